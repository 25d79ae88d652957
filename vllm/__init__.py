"""`from vllm import LLM, SamplingParams`, from the repository root: the engine that the lessons add up to.

Lesson 04b's offline interface, with lesson 12's adapters (`LoRARequest`), around the engine that lesson 06 serves. The
lessons are loaded on first use, by path: their names start with digits, and this folder shadows the real package of
the same name. `python -m vllm.01_kv_cache` runs one, too.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

__all__ = ["LLM", "LoRARequest", "SamplingParams"]


folder = str(Path(__file__).resolve().parent)
if folder not in sys.path:
    sys.path.insert(0, folder)  # where `common` and `llama` are, as for a script that is run


@functools.cache
def _assemble() -> dict[str, Any]:
    import common

    multi_lora, serving = common.lesson("12_multi_lora"), common.lesson("06_serving")

    class LLM(multi_lora.LLM):
        __doc__ = multi_lora.LLM.__doc__
        engine_class = staticmethod(serving.offline_engine)

    return {"LLM": LLM, "LoRARequest": multi_lora.LoRARequest, "SamplingParams": serving.SamplingParams}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _assemble()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

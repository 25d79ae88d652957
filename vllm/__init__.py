"""`from vllm import LLM, SamplingParams`, from the repository root: the engine that the lessons are plugged into.

This folder shadows the real package of the same name. It also has `common` and `llama`, so it is on the path of a
script that is run; here it is put there. `python -m vllm.01_kv_cache` runs a lesson, too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

__all__ = ["LLM", "LoRARequest", "SamplingParams"]

folder = str(Path(__file__).resolve().parent)
if folder not in sys.path:
    sys.path.insert(0, folder)


def __getattr__(name: str) -> Any:
    """On first use: torch takes two seconds, and `python -m vllm --help` does not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine.llm import LLM
    from engine.lora.config import LoRARequest
    from engine.request import SamplingParams

    return {"LLM": LLM, "LoRARequest": LoRARequest, "SamplingParams": SamplingParams}[name]

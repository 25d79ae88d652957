"""`from vllm import LLM, SamplingParams`, from the repository root: the engine that the lessons are plugged into.

This folder shadows the real package of the same name. It also has `common` and `llama`, so it is on the path of a
script that is run; here it is put there. `python -m vllm.01_kv_cache` runs a lesson, too.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an editor knows them, too
    from engine.llm import LLM
    from engine.lora.config import LoRARequest
    from engine.request import SamplingParams

__all__ = ["LLM", "LoRARequest", "SamplingParams"]
MODULES = {"LLM": "engine.llm", "LoRARequest": "engine.lora.config", "SamplingParams": "engine.request"}

folder = str(Path(__file__).resolve().parent)
if folder not in sys.path:
    sys.path.insert(0, folder)


def __getattr__(name: str) -> Any:
    """On first use: torch takes two seconds, and `python -m vllm --help` does not need it."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)

"""A small `LLMEngine` for demonstrations: 32 seats, a context of 512 tokens, 256 KV blocks.

Owns these sizes, and the weights that all engines of one process share; called as a factory, in the process, thread or
event loop where the engine of a tour (06e, 06f) runs. It never reads a server's arguments.
vLLM: `vllm/v1/engine/llm_engine.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from engine.llm_engine import LLMEngine
from engine.model import loader

MAX_MODEL_LEN = 512
load_once = functools.cache(loader.load)


def make_small_engine(args: dict[str, Any], report: Callable[[str], None] = lambda text: None) -> LLMEngine:
    """`args`: "model", as everywhere, and "seed"; `report` hears of each stage, as from `make_engine`."""
    report("loading the model")
    model, tokenizer = load_once(args["model"])
    return LLMEngine(
        model,
        tokenizer,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        num_gpu_blocks_override=257,
        seed=args["seed"],
    )

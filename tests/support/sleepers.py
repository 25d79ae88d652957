"""Engines on a model of their own, whose weights may go away."""

from __future__ import annotations

from typing import Any

from engine.llm_engine import LLMEngine
from engine.model import llama
from engine.model.tokenizer import Tokenizer
from engine.worker.sleep import Sleeper


def sleeping_engine(tokenizer: Tokenizer, **named: Any) -> LLMEngine:
    """A small random model that can be made again, on CPU memory."""
    model = llama.random_model(vocab_size=128)
    engine = LLMEngine(
        model, tokenizer, **{"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 73} | named
    )
    engine.sleeper = Sleeper(engine.core.runner, model, lambda: llama.random_model(vocab_size=128))
    return engine

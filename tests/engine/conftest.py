"""Engines that tests of several files ask."""

from __future__ import annotations

import pytest

from engine.llm import LLM


@pytest.fixture
def llm(tiny_model, real_model):
    """A random model of 128 tokens with the real tokenizer: prompts are given as ids."""
    return LLM(tiny_model, tokenizer=real_model[1], max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=60,
               block_size=4)  # fmt: skip

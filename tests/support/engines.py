"""Small engines in this process: what they are asked, and what must be left of it."""

from __future__ import annotations

import random
from typing import Any

from engine.llm import LLM
from engine.request import SamplingParams


def ids(*tokens: Any) -> dict[str, list[Any]]:
    """A prompt of token ids."""
    return {"prompt_token_ids": list(tokens)}


def free(llm: LLM) -> bool:
    """Every block is back, and nobody is remembered."""
    engine = llm.llm_engine
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    pool.check()
    engine.core.step()
    assert not engine.sequences and not engine.callers and not engine.core.runner.states
    return pool.num_free_blocks == pool.num_blocks - 1


def mixed(rng: random.Random, count: int) -> list[tuple[dict, SamplingParams]]:
    """Requests that differ in everything."""
    out = []
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice([0, 0.7, 1.5]), top_p=rng.choice([1, 0.9]), top_k=rng.choice([0, 5]),
            min_p=rng.choice([0, 0.1]), repetition_penalty=rng.choice([1, 1.3]), seed=i, max_tokens=rng.randint(1, 14),
            ignore_eos=rng.random() < 0.5, logprobs=rng.choice([None, 1]), min_tokens=rng.choice([0, 1]),
            stop_token_ids=rng.sample(range(128), 5),
        )  # fmt: skip
        out.append((ids(*(rng.randrange(128) for _ in range(rng.randint(1, 20)))), params))
    return out

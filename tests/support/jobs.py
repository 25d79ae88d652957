"""Prompts and wishes of all kinds, for one batch."""

from __future__ import annotations

import random

from engine.request import SamplingParams


def prompts_and_params(seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    shared = [rng.randrange(128) for _ in range(9)]
    prompt = lambda i, n: [i, *shared[: n // 2], *(rng.randrange(4) for _ in range(n - n // 2))]  # noqa: E731
    wishes = [
        dict(temperature=0),
        dict(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5),
        dict(seed=3),
        dict(seed=4, temperature=0.7, top_p=0.9, presence_penalty=1.0),
        dict(temperature=0, min_tokens=9),
        dict(seed=5, top_k=5, logprobs=2),
        dict(temperature=0, logprobs=0),
        dict(seed=6, min_p=0.1, logit_bias={3: 2.0}),
    ]
    return [
        (prompt(i, rng.randrange(2, 30)), SamplingParams(max_tokens=rng.randrange(5, 18), **w))
        for i, w in enumerate(wishes)
    ]


def ruled() -> list[tuple[list[int], SamplingParams]]:
    """Some tokens are ruled out: all but a few; whatever was written just now, be it a draft."""
    twice = dict(bad_words=["xx"], _bad_words_token_ids=[[t, t] for t in range(512)])
    wishes = [dict(seed=7, allowed_token_ids=[3, 1, 41, 59, 26]), dict(temperature=0, **twice),
              dict(seed=8, logprobs=1, top_p=0.9, presence_penalty=1.0, **twice)]  # fmt: skip
    return [([5, 5, 6 + i], SamplingParams(max_tokens=16, **w)) for i, w in enumerate(wishes)]

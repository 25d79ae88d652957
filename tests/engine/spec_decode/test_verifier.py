"""What is told of drafts after their rows were computed."""

from __future__ import annotations

import common  # noqa: F401  it must come before torch

import math

import torch

from engine import plugs, registry
from engine.request import NO_TOKEN_ID, Request, SamplingParams
from engine.sampling.sampler import SamplingState
from engine.spec_decode.drafters import Drafter, SpeculativeConfig
from engine.spec_decode.verifier import DraftVerifier


def test_there_is_a_log_probability_for_each_token_and_for_none_without_one(tiny_model):
    """The first row of one request is no distribution: it has neither a token nor a log probability."""
    rule = plugs.load("rejection", registry.fill("rejection"))
    verifier = DraftVerifier(SpeculativeConfig(), Drafter(), rule, tiny_model, 64)
    requests = [Request(name, [1, 2], SamplingParams(temperature=0, logprobs=1)) for name in ("void", "stands", "ends")]
    verifier.drafts = {"void": [3, 4], "stands": [3, 4], "ends": [3, 4]}
    logits = torch.zeros(9, 8)
    for row, token in enumerate([3, 4, 5] * 3):
        logits[row, token] = 1.0
    logits[0] = logits[8] = math.nan
    logprobs: dict = {}
    sampled = verifier.verify(logits, requests, [SamplingState(request, 0) for request in requests], logprobs)
    assert sampled == {"void": [NO_TOKEN_ID], "stands": [3, 4, 5], "ends": [3, 4, NO_TOKEN_ID]}
    assert {name: [list(entry) for entry in entries] for name, entries in logprobs.items()} == {
        "stands": [[3], [4], [5]],
        "ends": [[3], [4]],
    }

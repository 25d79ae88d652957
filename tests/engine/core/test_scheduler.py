"""The scheduler's own sums, by hand; what it decides is compared with vLLM in `test_conformance.py`."""

from __future__ import annotations

import common  # noqa: F401  it must come before torch

import pytest

from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.request import Request, SamplingParams
from engine.spec_decode.drafters import SpeculativeConfig


@pytest.mark.parametrize(
    ("ahead", "drafts", "num_slots"),
    [(False, None, 7), (True, None, 7), (False, SpeculativeConfig(), 7), (True, SpeculativeConfig(), 8)],
)
def test_slots_that_a_request_fills(ahead, drafts, num_slots):
    """The last token is never computed. Only a step ahead, and with drafts, may a step in vain follow it."""
    config = SchedulerConfig(max_model_len=16, max_num_seqs=2, max_num_batched_tokens=16)
    scheduler = make_scheduler(config, 9, 2, async_scheduling=ahead, drafts=drafts)
    in_vain = num_slots - 7
    assert scheduler.num_slots(Request("r", [1] * 5, SamplingParams(max_tokens=3))) == 7 + in_vain
    assert scheduler.num_slots(Request("s", [1] * 5, SamplingParams(max_tokens=99))) == 15 + in_vain

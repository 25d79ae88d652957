"""A front end with the core behind it, on a pool that is too small."""

from __future__ import annotations

import random

import pytest

from engine.llm_engine import LLMEngine
from support.engines import mixed


@pytest.mark.parametrize("seed", range(2))
def test_preemption_changes_no_draw(tiny_model, real_model, seed):
    """The assembled scheduler on a pool that is too small: sampled requests are preempted, and draw the same."""

    make = lambda blocks: LLMEngine(  # noqa: E731
        tiny_model, real_model[1], max_model_len=40, max_num_seqs=6, max_num_batched_tokens=16, block_size=4,
        num_gpu_blocks_override=blocks,
    )  # fmt: skip
    requests, found, preempted = mixed(random.Random(seed), 10), [], 0
    for blocks in (200, 12):
        engine = make(blocks)
        for i, (prompt, params) in enumerate(requests):
            engine.add_request(str(i), prompt, params)
        done = {}
        while engine.has_unfinished_requests():
            known = list(engine.sequences.values())
            done |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
            preempted += blocks == 12 and sum(s.request.num_preemptions for s in known) > 0
        found.append(done)
    assert found[0] == found[1] and preempted

"""Lessons 04, 10 and 11 have schedulers of their own: with all else switched off, each decides as the engine's does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import registry
from engine.config import SchedulerConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler, make_scheduler
from engine.request import Request, RequestStatus, SamplingParams
from lab.reserving import ReservingScheduler
from support.broken import break_class

batching, chunked = registry.lesson("04_continuous_batching"), registry.lesson("10_chunked_prefill")
preemption = registry.lesson("11_preemption")


def life(scheduler, seed: int, steps: int = 40) -> list:
    """Requests come, write, and are aborted, by a seed; what was decided in each step, block ids included."""
    rng, decided, number = random.Random(seed), [], 0
    longest = scheduler.config.max_model_len
    for _ in range(steps):
        for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, longest - 1))]
            params = SamplingParams(max_tokens=rng.randint(1, 12), stop_token_ids=[0])
            scheduler.add_request(Request(str(number), prompt, params, arrival_time=number, priority=rng.randrange(3)))
            number += 1
        if rng.random() < 0.1 and scheduler.requests:
            scheduler.finish_requests([rng.choice(list(scheduler.requests))], RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        tables = {name: list(scheduler.kv_cache_manager.get_block_ids(name)) for name in output.num_scheduled_tokens}
        sampled = {
            name: [rng.randrange(20)]
            for name in output.num_scheduled_tokens
            if scheduler.requests[name].num_computed_tokens == scheduler.requests[name].num_tokens
        }
        heard = scheduler.update_from_output(output, sampled)
        names = [[request.request_id for request in part] for part in (
            output.scheduled_running_reqs, output.scheduled_new_reqs, output.scheduled_resumed_reqs,
            output.preempted_reqs, scheduler.running, scheduler.waiting)]  # fmt: skip
        decided.append((dict(output.num_scheduled_tokens), names, output.finished_req_ids, heard, tables))
    return decided


def without_tables(decided: list) -> list:
    return [step[:-1] for step in decided]


@st.composite
def limits(draw, chunks: bool):
    """Keyword arguments of a legal config, and the pool: (limits, num_blocks, block_size)."""
    max_model_len, max_num_seqs = draw(st.integers(4, 40)), draw(st.integers(1, 8))
    found = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
             "policy": draw(st.sampled_from(["fcfs", "priority"])),
             "max_num_batched_tokens": max(max_model_len, max_num_seqs) + draw(st.integers(0, 20))}  # fmt: skip
    if chunks:
        found["enable_chunked_prefill"] = draw(st.booleans())
        if found["enable_chunked_prefill"]:
            found["max_num_batched_tokens"] = max_num_seqs + draw(st.integers(0, 20))
        found["long_prefill_token_threshold"] = draw(st.sampled_from([0, 1, 3]))
        found["long_prefill_token_threshold_adaptive"] = draw(st.booleans())
    block_size = draw(st.sampled_from([1, 2, 4]))
    return found, -(-max_model_len // block_size) + 1, block_size


def eleven(config: SchedulerConfig, num_blocks: int, block_size: int, caching: bool):
    manager = preemption.KVCacheManager(num_blocks, block_size, config.max_model_len, caching)
    return preemption.Scheduler(config, manager)


@settings(max_examples=150)
@given(limits(chunks=True), st.integers(0, 12), st.booleans(), st.integers(0, 10**6))
def test_lesson_11_decides_as_the_engine(about, more_blocks, caching, seed):
    """Whom it preempts, whom it admits, in which blocks: all of it, in a pool that is too small."""
    found, num_blocks, block_size = about
    config, num_blocks = SchedulerConfig(**found, watermark=0.1 * (seed % 3)), num_blocks + more_blocks
    ours = make_scheduler(config, num_blocks, block_size, caching)
    assert life(eleven(config, num_blocks, block_size, caching), seed) == life(ours, seed)


def ten(config: SchedulerConfig, num_blocks: int, block_size: int):
    manager = KVCacheManager(num_blocks, block_size, config.max_model_len, enable_caching=False)
    return chunked.Scheduler(config, manager)


class Careful(Scheduler):
    """The engine's, which admits only whom lesson 10 admits: if all lives fit to their last token."""

    def _admit(self, request):
        return super()._admit(request) if chunked.Scheduler._fits(self, request) else 0


@settings(max_examples=100)
@given(limits(chunks=True), st.none() | st.integers(1, 9), st.integers(0, 10**6))
def test_lesson_10_decides_as_the_engine_while_there_are_blocks(about, budget, seed):
    """Who is in a step, how many tokens are computed of each, in which blocks."""
    found, num_blocks, block_size = about
    num_blocks *= found["max_num_seqs"] + 1
    config = SchedulerConfig(**found, max_num_scheduled_tokens=budget if found["enable_chunked_prefill"] else None)
    ours = make_scheduler(config, num_blocks, block_size, False)
    assert life(ten(config, num_blocks, block_size), seed) == life(ours, seed)


@settings(max_examples=100)
@given(limits(chunks=True), st.integers(0, 12), st.integers(0, 10**6))
def test_lesson_10_in_a_small_pool_decides_as_the_engine_if_that_is_as_careful(about, more_blocks, seed):
    """Nobody is ever preempted, and but for admission all is the same."""
    found, num_blocks, block_size = about
    config, num_blocks = SchedulerConfig(**found), num_blocks + more_blocks
    manager = KVCacheManager(num_blocks, block_size, config.max_model_len, enable_caching=False)
    decided = life(Careful(config, manager), seed)
    assert life(ten(config, num_blocks, block_size), seed) == decided
    assert not any(preempted for _, (_, _, _, preempted, _, _), *_ in decided)


@settings(max_examples=100)
@given(limits(chunks=False), st.integers(0, 10**6))
def test_lesson_04_decides_as_the_engine_while_there_are_blocks(about, seed):
    """With whole prompts: it has no others. Blocks are taken when they are needed, so which ones is the same, too."""
    found, num_blocks, block_size = about
    config, num_blocks = SchedulerConfig(**found, enable_chunked_prefill=False), num_blocks * found["max_num_seqs"] + 1
    theirs = batching.Scheduler(config, batching.KVCacheManager(num_blocks, block_size, config.max_model_len))
    assert life(theirs, seed) == life(make_scheduler(config, num_blocks, block_size, False), seed)


@settings(max_examples=100)
@given(limits(chunks=False), st.integers(0, 12), st.integers(0, 10**6))
def test_lesson_04_admits_as_carefully_as_an_engine_that_takes_all_at_once(about, more_blocks, seed):
    """In a pool that is too small: a promise is as good as a block."""
    found, num_blocks, block_size = about
    config, num_blocks = SchedulerConfig(**found, enable_chunked_prefill=False), num_blocks + more_blocks
    theirs = batching.Scheduler(config, batching.KVCacheManager(num_blocks, block_size, config.max_model_len))
    manager = KVCacheManager(num_blocks, block_size, config.max_model_len, enable_caching=False)
    assert without_tables(life(theirs, seed)) == without_tables(life(ReservingScheduler(config, manager), seed))


@pytest.mark.parametrize(("owner", "name", "wrong"), [
    (preemption.Scheduler, "_choose_victim", lambda self: self.running[0]),
    (preemption.Scheduler, "_admit", ReservingScheduler._admit),
    (preemption.Scheduler, "_long_prefill_cap", lambda self: 2),
    (preemption.Scheduler, "_free_request", lambda self, request: self.requests.pop(request.request_id)),
])  # fmt: skip
def test_a_twin_that_decides_otherwise_is_noticed(monkeypatch, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)
    config = SchedulerConfig(max_model_len=24, max_num_seqs=6, max_num_batched_tokens=12, watermark=0.3)

    def differs(seed: int) -> bool:
        try:
            return life(eleven(config, 9, 4, False), seed) != life(make_scheduler(config, 9, 4, False), seed)
        except Exception:  # too broken to go on
            return True

    assert any(map(differs, range(20)))


@pytest.mark.parametrize(("old", "new"), [
    ("num_new_tokens = min(request.num_tokens - request.num_computed_tokens, cap, token_budget)",
     "num_new_tokens = min(request.num_tokens - request.num_computed_tokens, token_budget)"),
    ("num_new_tokens = token_budget  # 10: cut", "break"),
    ("request_id not in sampled_token_ids", "request.num_computed_tokens < 2"),
    ("if not self._fits(request):", "if False:"),
    ("return max(config.long_prefill_token_threshold,", "return min(config.long_prefill_token_threshold,"),
])  # fmt: skip
def test_a_lesson_10_that_decides_otherwise_is_noticed(monkeypatch, old, new):
    config = SchedulerConfig(
        max_model_len=24, max_num_seqs=6, max_num_batched_tokens=12, long_prefill_token_threshold=3,
        long_prefill_token_threshold_adaptive="max" in old,
    )  # fmt: skip
    break_class(monkeypatch, chunked.Scheduler, old, new)

    def differs(seed: int) -> bool:
        manager = KVCacheManager(9, 4, 24, enable_caching=False)
        try:
            return life(ten(config, 9, 4), seed) != life(Careful(config, manager), seed)
        except Exception:  # too broken to go on
            return True

    assert any(map(differs, range(20)))

"""Random workloads against the schedulers of lessons 04, 10 and 11: what must hold after every step, and at the end.

The model is a fake whose cache is real: "keys and values" of a position are a digest of the whole prefix, written
into the physical block that the table names and read back from there. A block that is shared wrongly, overwritten too
early, skipped or hit without having been computed changes the digest, and with it the tokens that come out.
"""

from __future__ import annotations

import common

import hashlib
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine import registry
from engine.config import SchedulerConfig
from engine.core.engine_core import EngineCore, check_pool
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import make_scheduler
from engine.output import ModelRunnerOutput
from engine.request import Request, RequestStatus, SamplingParams

continuous_batching = registry.lesson("04_continuous_batching")
chunked_prefill = registry.lesson("10_chunked_prefill")

VOCABULARY = 4  # small: prompts share prefixes, and generated blocks are found again


def digest(before: bytes, token_id: int) -> bytes:
    """What a position keeps: everything up to it."""
    return hashlib.blake2b(before + bytes([token_id]), digest_size=8).digest()


def first(request: Request) -> bytes:
    """Requests under different salts or adapters have different keys and values from the start."""
    return repr((request.cache_salt, request.lora_name)).encode()


def alone(prompt: list[int], start: bytes, num_tokens: int) -> list[int]:
    """The reference: greedy generation without a cache, a batch or a scheduler."""
    state, output = start, []
    for token_id in prompt:
        state = digest(state, token_id)
    for _ in range(num_tokens):
        output.append(state[0] % VOCABULARY)
        state = digest(state, output[-1])
    return output


class FakeEngine(EngineCore):
    """Computes positions in batch order, reading and writing its cache through the block tables alone."""

    def __init__(self, scheduler):
        super().__init__(scheduler)
        manager = scheduler.kv_cache_manager
        self.memory = [[b""] * manager.block_size for _ in range(manager.block_pool.num_blocks)]
        self.after_schedule = lambda output: None

    def execute_model(self, output):
        self.after_schedule(output)
        sampled = {}
        size = self.scheduler.kv_cache_manager.block_size
        for request_id, n in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            table = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            end = request.num_computed_tokens
            for p in range(end - n, end):
                before = self.memory[table[(p - 1) // size]][(p - 1) % size] if p else first(request)
                self.memory[table[p // size]][p % size] = digest(before, request.all_token_ids[p])
            if end == request.num_tokens:
                sampled[request_id] = [self.memory[table[(end - 1) // size]][(end - 1) % size][0] % VOCABULARY]
        return ModelRunnerOutput(sampled)


small = st.integers(1, 8)


@st.composite
def engines(draw, step: int) -> FakeEngine:
    """A legal engine of lesson 04, 10 or 11."""
    block_size, max_model_len = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(4, 40))
    max_num_seqs = draw(small)
    limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
              "policy": draw(st.sampled_from(["fcfs", "priority"]))}  # fmt: skip
    whole = max(max_model_len, max_num_seqs) + draw(st.integers(0, 20))
    num_blocks = -(-max_model_len // block_size) + 1 + draw(st.integers(0, 12))
    if step == 4:
        config = SchedulerConfig(**limits, max_num_batched_tokens=whole, enable_chunked_prefill=False)
        manager = continuous_batching.KVCacheManager(num_blocks, block_size, max_model_len)
        return FakeEngine(continuous_batching.Scheduler(config, manager))
    limits["enable_chunked_prefill"] = draw(st.booleans()) or draw(st.booleans())
    limits["max_num_batched_tokens"] = whole
    if limits["enable_chunked_prefill"]:
        limits["max_num_batched_tokens"] = max_num_seqs + draw(st.integers(0, 20))
        limits["max_num_scheduled_tokens"] = draw(st.none() | small)
    limits["long_prefill_token_threshold"] = draw(st.sampled_from([0, 0, 1, 3]))
    limits["long_prefill_token_threshold_adaptive"] = draw(st.booleans())
    if step == 10:
        manager = KVCacheManager(num_blocks, block_size, max_model_len, enable_caching=False)
        return FakeEngine(chunked_prefill.Scheduler(chunked_prefill.SchedulerConfig(**limits), manager))
    config = SchedulerConfig(
        **limits,
        max_num_active_seqs=draw(st.none() | st.integers(1, max_num_seqs)),
        scheduler_reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2, 0.9])),
    )
    return FakeEngine(make_scheduler(config, num_blocks, block_size, draw(st.booleans())))


class Machine(RuleBasedStateMachine):
    """Requests come, go and are aborted, also while the model runs. `STEP` chooses the lesson."""

    STEP = 11

    @initialize(data=st.data())
    def start(self, data):
        self.engine = data.draw(engines(self.STEP))
        check_pool(self.engine.scheduler)
        self.scheduler = self.engine.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.config = self.scheduler.config
        self.sent: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.engine.after_schedule = self.check_step

    # --- what happens

    @rule(data=st.data())
    def add(self, data):
        length = data.draw(st.integers(0, self.config.max_model_len + 1))
        prompt = random.Random(data.draw(st.integers(0, 3))).choices(range(VOCABULARY), k=length)
        if self.sent and data.draw(st.booleans()):  # as in a conversation: what somebody has, and something new
            earlier = self.sent[data.draw(st.sampled_from(sorted(self.sent)))].all_token_ids
            prompt = (earlier[: data.draw(st.integers(0, len(earlier)))] + prompt)[:length]
        params = SamplingParams(
            max_tokens=data.draw(st.none() | st.integers(1, 20)),
            stop_token_ids=data.draw(st.sampled_from([[], [], [0]])),
            skip_reading_prefix_cache=data.draw(st.sampled_from([False, False, False, True])),
        )
        request = Request(
            f"r{len(self.sent)}", prompt, params, arrival_time=len(self.sent), priority=data.draw(st.integers(-1, 1)),
            eos_token_id=data.draw(st.sampled_from([None, 1])),
            cache_salt=data.draw(st.sampled_from([None, None, "a"])),
            lora_name=data.draw(st.sampled_from([None, None, "x"])),
        )  # fmt: skip
        if not 0 < len(prompt) < self.config.max_model_len:
            with pytest.raises(common.InputError):
                self.engine.add_request(request)
            return
        self.engine.add_request(request)
        self.sent[request.request_id] = request
        with pytest.raises(common.InputError, match="in use"):
            self.engine.add_request(request)

    @rule(data=st.data())
    def abort(self, data):
        ids = data.draw(st.lists(st.sampled_from([*sorted(self.sent), "nobody"]), max_size=3))
        alive = {i for i in ids if i in self.scheduler.requests}
        assert {request.request_id for request in self.engine.abort_requests(ids)} == alive
        self.ended |= alive

    @precondition(lambda self: self.scheduler.requests)
    @rule(during=st.booleans(), data=st.data())
    def step(self, during, data):
        if during:  # a client disconnects while the model runs
            victim = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
            run = self.engine.execute_model

            def run_and_abort(output):
                result = run(output)
                self.engine.abort_requests([victim])
                self.ended.add(victim)
                return result

            self.engine.execute_model = run_and_abort
            try:
                outputs = self.engine.step()
            finally:
                del self.engine.execute_model
            assert victim not in {output.request_id for output in outputs}
        else:
            outputs = self.engine.step()
        self.collect(outputs)

    def collect(self, outputs):
        for output in outputs:
            request = self.sent[output.request_id]
            assert request.output_token_ids[-len(output.new_token_ids) :] == output.new_token_ids
            assert (output.finish_reason is not None) == request.is_finished()
            if request.is_finished():
                self.ended.add(output.request_id)
                self.check_end(request, output)

    def check_end(self, request, output):
        """It stopped where it had to, with the tokens it would have got alone."""
        length, tokens = request.num_output_tokens, request.output_token_ids
        assert tokens == alone(request.prompt_token_ids, first(request), length)
        stops = {request.eos_token_id} | request.stop_token_ids
        assert not stops & set(tokens[:-1]) and 1 <= length <= request.max_tokens
        assert request.num_tokens <= self.config.max_model_len
        if tokens[-1] in stops:
            assert output.finish_reason == "stop"
            assert output.stop_reason == (None if tokens[-1] == request.eos_token_id else tokens[-1])
        else:
            assert output.finish_reason == "length"
            assert length == request.max_tokens or request.num_tokens == self.config.max_model_len

    # --- what must hold

    def check_step(self, output):
        """Between `schedule()` and the model."""
        scheduler, scheduled = self.scheduler, output.num_scheduled_tokens
        most = self.config.max_num_batched_tokens
        most = min(most, getattr(self.config, "max_num_scheduled_tokens", None) or most)
        assert output.total_num_scheduled_tokens <= most
        if hasattr(scheduler, "token_budget"):  # it keeps what is left
            assert scheduler.token_budget == most - output.total_num_scheduled_tokens
        assert all(n > 0 for n in scheduled.values())
        admitted = output.scheduled_new_reqs + output.scheduled_resumed_reqs
        assert set(scheduled) == {r.request_id for r in output.scheduled_running_reqs + admitted}
        assert set(scheduled) <= {r.request_id for r in scheduler.running}
        assert scheduled or output.preempted_reqs, "a step that does nothing would be repeated for ever"
        assert not (admitted and output.preempted_reqs)
        if self.STEP < 11:
            assert not output.preempted_reqs and not output.scheduled_resumed_reqs
        if self.STEP == 4:  # whole prompts
            assert all(self.sent[i].num_computed_tokens == self.sent[i].num_tokens for i in scheduled)
        writers = {}
        size = self.manager.block_size
        for request_id, n in scheduled.items():
            request, table = self.sent[request_id], self.manager.get_block_ids(request_id)
            for p in range(request.num_computed_tokens - n, request.num_computed_tokens):
                assert p < len(table) * size, "a token without a slot"
                assert writers.setdefault((table[p // size], p % size), request_id) == request_id, "two writers"
                assert self.pool.ref_count[table[p // size]] == 1 or self.shared_in_this_step(table[p // size], p)

    def shared_in_this_step(self, block, position):
        """A block that is being filled may already be shared, if it will be full and stands in the index."""
        return getattr(self.pool, "block_hash", {block: None})[block] is not None

    @invariant()
    def blocks_are_conserved(self):
        if not hasattr(self, "engine"):
            return
        self.pool.check()
        owners = [0] * self.pool.num_blocks
        for table in self.manager.req_to_blocks.values():
            assert len(set(table)) == len(table)
            for block in table:
                owners[block] += 1
        assert owners == self.pool.ref_count, "reference counts are not the number of owners"
        assert set(self.manager.req_to_blocks) == {r.request_id for r in self.scheduler.running}
        used = sum(count > 0 for count in owners)
        assert used + self.pool.num_free_blocks == self.pool.num_blocks - 1

    @invariant()
    def tables_have_the_right_length(self):
        for request in self.scheduler.running if hasattr(self, "engine") else ():
            needed = request.num_computed_tokens
            assert len(self.manager.get_block_ids(request.request_id)) == -(-needed // self.manager.block_size)

    @invariant()
    def everybody_is_somewhere(self):
        if not hasattr(self, "engine"):
            return
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        most = getattr(self.config, "max_num_active_seqs", None) or self.config.max_num_seqs
        assert len(running) <= most
        ids = [r.request_id for r in running + waiting]
        assert len(ids) == len(set(ids)) and set(ids) == set(self.scheduler.requests)
        assert set(self.sent) == set(self.scheduler.requests) | self.ended
        assert not self.ended & set(self.scheduler.requests)
        assert all(r.status is RequestStatus.RUNNING for r in running)
        for r in waiting:
            assert r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and r.num_computed_tokens == 0
        key = Request.sort_key if self.config.policy == "priority" else lambda request: request.arrival_time
        assert waiting == sorted(waiting, key=key)

    @invariant()
    def cached_blocks_hold_what_their_key_says(self):
        """Everything computed is in memory; equal keys mean equal content, computed or about to be."""
        if not hasattr(self, "engine"):
            return
        size, memory = self.manager.block_size, self.engine.memory
        for request in self.scheduler.running:
            table, state = self.manager.get_block_ids(request.request_id), first(request)
            for p in range(request.num_computed_tokens):
                state = digest(state, request.all_token_ids[p])
                assert memory[table[p // size]][p % size] == state, "the cache holds something else"
        for blocks in getattr(self.pool, "cached_block_hash_to_block", {}).values():
            assert len({tuple(memory[block]) for block in blocks}) == 1

    def teardown(self):
        """Everything finishes within bounded steps, and nothing leaks."""
        if not hasattr(self, "engine"):
            return
        longest = self.config.max_model_len * (1 + len(self.scheduler.requests)) ** 2 + 10
        for _ in range(longest):
            if not self.scheduler.has_unfinished_requests():
                break
            self.collect(self.engine.step())
            self.blocks_are_conserved()
            self.everybody_is_somewhere()
        assert not self.scheduler.requests and not self.scheduler.running and not len(self.scheduler.waiting)
        assert self.ended == set(self.sent)
        assert self.pool.num_free_blocks == self.pool.num_blocks - 1 and not self.manager.req_to_blocks
        assert not getattr(self.manager, "num_cached_block", None)


def machine(step: int) -> type[RuleBasedStateMachine]:
    return type(f"Lesson{step}", (Machine,), {"STEP": step})


TestLesson04, TestLesson10, TestLesson11 = (machine(step).TestCase for step in (4, 10, 11))
TestLesson04.settings = TestLesson10.settings = settings(max_examples=20, stateful_step_count=40)
TestLesson11.settings = settings(max_examples=30, stateful_step_count=50)


@pytest.mark.long
@pytest.mark.parametrize(("lesson", "examples", "steps"), [(4, 400, 40), (10, 400, 40), (11, 1500, 80)])
def test_for_longer(lesson, examples, steps):
    often = settings(max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(machine(lesson), settings=often)


# --- The blocks of a withdrawn victim -------------------------------------------------------------------------------


def right_under_priority(seed: int, **config: bool) -> bool:
    """A long unimportant prompt in chunks of four blocks, and important requests that push it out of a step in which
    it already stands. Does everybody get the tokens that it gets alone?"""
    draw = random.Random(seed)
    config = SchedulerConfig(
        max_model_len=40, max_num_seqs=6, max_num_batched_tokens=48, policy="priority", long_prefill_token_threshold=8,
        **config,
    )  # fmt: skip
    engine = FakeEngine(make_scheduler(config, num_blocks=draw.randint(21, 26), block_size=2))
    arrivals = [(0, "r0", draw.randint(30, 38), 2, 9), (0, "r1", 1, 1, 9)]
    arrivals += [(draw.randint(1, 3), f"r{i}", draw.randint(1, 8), draw.randint(1, 20), 0) for i in (2, 3, 4)]
    requests = []
    for step in range(100):
        for arrival, name, length, max_tokens, priority in arrivals:
            if arrival == step:
                prompt = [draw.randrange(VOCABULARY) for _ in range(length)]
                requests.append(Request(name, prompt, SamplingParams(max_tokens=max_tokens), arrival_time=len(requests),
                                        priority=priority))  # fmt: skip
                engine.add_request(requests[-1])
        engine.step()
    assert not engine.scheduler.requests
    return all(r.output_token_ids == alone(r.prompt_token_ids, first(r), r.num_output_tokens) for r in requests)


@pytest.mark.parametrize("seeds", [range(200, 300), pytest.param(range(400), marks=pytest.mark.slow)], ids=str)
def test_a_victim_withdrawn_from_the_step_takes_its_promises_along(seeds):
    """vLLM 0.32 leaves blocks in the index that the withdrawn chunk would have filled; ours does not."""
    assert all(right_under_priority(seed) for seed in seeds)
    assert not all(right_under_priority(seed, evict_uncomputed_blocks=False) for seed in seeds)


# --- Small rules that random runs of a one-token model do not reach -------------------------------------------------


def careful_scheduler(num_blocks: int = 9, block_size: int = 4, **limits) -> continuous_batching.Scheduler:
    config = SchedulerConfig(**{"max_model_len": 32, "max_num_batched_tokens": 128, **limits})
    manager = continuous_batching.KVCacheManager(num_blocks, block_size, config.max_model_len)
    return continuous_batching.Scheduler(config, manager)


def test_tokens_behind_a_stop_are_dropped():
    """A step may bring several tokens (speculation); what comes after the end is not the request's."""
    scheduler = make_scheduler(SchedulerConfig(32, max_num_batched_tokens=128), 9, 4)
    scheduler.add_request(Request("r", [1, 2], SamplingParams(stop_token_ids=[9])))
    [output] = scheduler.update_from_output(scheduler.schedule(), {"r": [5, 9, 7]})
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([5, 9], "stop", 9)
    assert not scheduler.running and not scheduler.requests


def test_finished_and_aborted_ids_are_told_once():
    scheduler = careful_scheduler()
    for name in "abc":
        scheduler.add_request(Request(name, [1], SamplingParams(max_tokens=1 if name == "a" else 5)))
    scheduler.update_from_output(scheduler.schedule(), {"a": [1], "b": [1], "c": [1]})
    scheduler.finish_requests(["b", "b", "nobody"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.schedule().finished_req_ids == ["a", "b"]
    assert scheduler.schedule().finished_req_ids == []


def test_lesson_04_admits_what_fits_to_its_last_token():
    """Eight blocks of 4: requests that end with 16 slots filled go in by twos, though their prompts need one block."""
    scheduler = careful_scheduler()
    for i in range(3):
        scheduler.add_request(Request(f"r{i}", [i], SamplingParams(max_tokens=16)))  # 1 + 16 − 1 slots
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r0", "r1"]
    scheduler = careful_scheduler()
    for i in range(3):
        scheduler.add_request(Request(f"r{i}", [i], SamplingParams(max_tokens=17)))  # one slot more: five blocks
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r0"]


def test_nobody_overtakes_the_head_of_the_queue():
    scheduler = careful_scheduler(max_num_seqs=8)
    for name, max_tokens in (("long", 20), ("longer", 20), ("short", 1)):
        scheduler.add_request(Request(name, [1], SamplingParams(max_tokens=max_tokens)))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["long"]


def test_a_pool_below_one_full_sequence_is_refused_and_so_is_what_never_fits():
    with pytest.raises(common.InputError, match="num_blocks 8"):
        careful_scheduler(num_blocks=8)
    engine = FakeEngine(make_scheduler(SchedulerConfig(32, max_num_batched_tokens=128), 8, 4))
    with pytest.raises(common.InputError, match="num_blocks 8"):
        check_pool(engine.scheduler)
    with pytest.raises(common.InputError, match="needs 8 KV blocks, there are 7"):
        engine.add_request(Request("r", [1] * 10, SamplingParams(max_tokens=None)))
    engine.add_request(Request("r", [1] * 10, SamplingParams(max_tokens=19)))  # 28 slots


@pytest.mark.parametrize(
    "config, wrong",
    [
        (continuous_batching.SchedulerConfig, {"max_num_seqs": 0}),
        (continuous_batching.SchedulerConfig, {"policy": "lifo"}),
        (continuous_batching.SchedulerConfig, {"max_num_batched_tokens": 100}),  # below max_model_len, no chunks
        (chunked_prefill.SchedulerConfig, {"max_num_batched_tokens": 100}),  # below max_num_seqs
        (chunked_prefill.SchedulerConfig, {"max_num_batched_tokens": 200, "enable_chunked_prefill": False}),
        (chunked_prefill.SchedulerConfig, {"max_num_scheduled_tokens": 0}),
        (chunked_prefill.SchedulerConfig, {"long_prefill_token_threshold": 3000}),
        (SchedulerConfig, {"max_num_active_seqs": 129}),
        (SchedulerConfig, {"max_num_active_seqs": 0}),
        (SchedulerConfig, {"watermark": 1.0}),
    ],
)
def test_contradicting_limits_are_refused_by_name(config, wrong):
    config()
    with pytest.raises(common.InputError, match=next(iter(wrong))):
        config(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"n": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": -2}, {"min_p": 1.1},
     {"presence_penalty": 3}, {"frequency_penalty": -3}, {"repetition_penalty": 0}, {"logprobs": -2}, {"max_tokens": 0},
     {"min_tokens": 5, "max_tokens": 4}, {"stop": [""]}],
)  # fmt: skip
def test_sampling_params_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(common.InputError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_tokens_that_are_not_known_are_not_indexed():
    """Room may be made for drafts (speculation); only blocks whose tokens are certain get a key."""
    manager = KVCacheManager(9, 4, 32)
    request = Request("r", [1, 2, 3, 4, 5, 6], SamplingParams())
    assert len(manager.allocate_slots(request, 9)) == 3
    assert len(manager.block_pool.cached_block_hash_to_block) == 1 and manager.num_cached_block == {"r": 1}


def test_a_withdrawn_chunk_takes_only_its_own_blocks_out_of_the_index():
    manager = KVCacheManager(9, 4, 32)
    request = Request("r", list(range(16)), SamplingParams())
    manager.allocate_slots(request, 8)
    request.num_computed_tokens = 8
    manager.allocate_slots(request, 8)
    manager.evict_uncomputed(request, 8)
    manager.free(request)
    assert manager.get_computed_blocks(Request("s", list(range(16)), SamplingParams()))[1] == 8
    manager.block_pool.check()

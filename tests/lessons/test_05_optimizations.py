"""Lesson 05: every entry of the catalog changes what a step costs, and none of them a single token."""

from __future__ import annotations

import common

import copy
import functools
import importlib.util
import itertools
import random
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode

from engine import registry
from engine.attention.metadata import AttentionMetadata
from engine.config import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.kv_cache_manager import KVCacheManager, block_extra_keys
from engine.core.scheduler import make_scheduler
from engine.llm_engine import LLMEngine
from engine.model import llama, loader
from engine.model.packed_linear import PackedLinear, packs
from engine.request import SamplingParams
from engine.worker.assemble import make_runner
from engine.worker.cuda_graphs import CapturedModel, Tape, capture_sizes
from lab import chats, cli, offline_run, roofline
from lab.hardware import HARDWARE
from support.broken import break_class
from support.close import assert_close
from support.mixtures import MIXTURES
from support.runners import runner_of
from support.tiers import and_slowly

lesson, paged = registry.lesson("05_optimizations"), registry.lesson("02_paged_attention")
page = cli.numbers("05_optimizations")
batching = registry.lesson("04_continuous_batching")
chunked = registry.lesson("10_chunked_prefill")
Request = lesson.Request
Manager = KVCacheManager

needs_gpu = pytest.mark.skipif(not common.HAS_GPU, reason="CUDA graphs need a GPU; the same logic runs on a tape here")


def greedy(prompt: list[int], n: int = 4, name: str = "r", **about) -> Request:
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    return Request(name, list(prompt), params, **about)


def tokens_of(seed: int, length: int, vocabulary: int = 128) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=length)


# --- Keys -----------------------------------------------------------------------------------------------------------


def keys(prompt: list[int], size: int = 4, **about) -> list[bytes]:
    manager, request = Manager(9, size, 512), greedy(prompt, **about)
    manager.update_block_hashes(request)
    return request.block_hashes


@given(st.lists(st.integers(0, 9), min_size=8, max_size=40), st.integers(0, 39), st.sampled_from([1, 2, 4, 8]))
def test_a_key_names_a_whole_prefix(prompt, at, size):
    """One changed token changes the key of its block and of all behind it, and of none in front."""
    at %= len(prompt)
    other = [*prompt[:at], 99, *prompt[at + 1 :]]
    before, after = keys(prompt, size), keys(other, size)
    assert len(before) == len(prompt) // size and all(len(key) == 32 for key in before)
    assert before[: at // size] == after[: at // size]
    assert not set(before[at // size :]) & set(after[at // size :])
    assert len(set(before)) == len(before), "equal tokens at different positions have different keys"


def test_fields_of_a_key_cannot_run_into_each_other():
    one = lesson.hash_block_tokens
    root = lesson.ROOT_HASH
    assert one(root, [1, 256]) != one(root, [257, 0]) and one(root, [1]) != one(root, [1, 0])
    assert one(root, [1], (("lora", "a"),)) != one(root, [1], (("cache_salt", "a"),))
    assert one(root, [1], (("lora", "a"), ("cache_salt", "b"))) != one(root, [1], (("lora", 'a", "cache_salt'), ("b",)))


def test_a_salt_is_in_the_first_block_and_an_adapter_in_every():
    prompt = tokens_of(0, 12)
    plain, salted, adapted = keys(prompt), keys(prompt, cache_salt="s"), keys(prompt, lora_name="a")
    assert not set(plain) & set(salted) and not set(plain) & set(adapted) and not set(salted) & set(adapted)
    tail = lesson.hash_block_tokens(salted[0], prompt[4:8])
    assert salted[1] == tail, "through the chain one salt is enough"
    assert adapted[1] == lesson.hash_block_tokens(adapted[0], prompt[4:8], (("lora", "a"),))
    request = Request("x", prompt, SamplingParams(), lora_name="a")
    request.lora_fingerprint = "of its files"
    assert block_extra_keys(request, first=False) == (("lora", "a", "of its files"),)


# --- The manager against a naive twin -------------------------------------------------------------------------------


class NaiveCache:
    """Everything the manager promises, with lists and token tuples: no hashes, no reference counts, no linked queue."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.queue = list(range(1, num_blocks))
        self.key: dict[int, tuple] = {}  # block -> (salt, adapter, tokens up to its end)
        self.order: dict[tuple, list[int]] = {}  # key -> blocks, oldest first
        self.tables: dict[str, list[int]] = {}

    def owners(self, block: int) -> int:
        return sum(block in table for table in self.tables.values())

    def lookup(self, request: Request) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * self.size < request.num_tokens:
            blocks = self.order.get(self.name(request, len(found)))
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def name(self, request: Request, i: int) -> tuple:
        return (request.cache_salt, request.lora_name, tuple(request.all_token_ids[: (i + 1) * self.size]))

    def allocate(self, request: Request, end: int, hits: list[int]) -> bool:
        table = list(self.tables.get(request.request_id, hits))
        missing = -(-end // self.size) - len(table)
        rest = [block for block in self.queue if block not in hits]
        if missing > len(rest):
            return False
        self.queue, new = rest[max(0, missing) :], rest[: max(0, missing)]
        for block in new:
            if block in self.key:
                self.order[self.key[block]].remove(block)
                del self.key[block]
        self.tables[request.request_id] = table + new
        for i, block in enumerate((table + new)[: min(end, request.num_tokens) // self.size]):
            if block not in self.key:
                self.key[block] = self.name(request, i)
                self.order.setdefault(self.key[block], []).append(block)
        return True

    def free(self, request: Request) -> None:
        gone = [b for b in reversed(self.tables.pop(request.request_id)) if not self.owners(b)]
        self.queue = [b for b in gone if b not in self.key] + self.queue + [b for b in gone if b in self.key]


class ManagerMachine(RuleBasedStateMachine):
    """Requests enter with chunks of any size, write, leave; after every step the manager is its naive twin."""

    @initialize(size=st.sampled_from([1, 2, 4]), num_blocks=st.integers(2, 14))
    def start(self, size, num_blocks):
        self.manager, self.naive = Manager(num_blocks, size, 64), NaiveCache(num_blocks, size)
        self.alive: dict[str, Request] = {}
        self.known: list[list[int]] = [[]]
        self.count = 0

    def allocate(self, request, n, hits=()):
        want = self.naive.allocate(request, request.num_computed_tokens + n, list(hits))
        got = self.manager.allocate_slots(request, n, hits)
        assert (got is not None) == want
        if want:
            request.num_computed_tokens += n
        return want

    @rule(data=st.data())
    def admit(self, data):
        earlier = data.draw(st.sampled_from(self.known))
        prompt = earlier[: data.draw(st.integers(0, len(earlier)))] + data.draw(st.lists(st.integers(0, 1), max_size=6))
        request = greedy(prompt or [0], name=f"r{self.count}", cache_salt=data.draw(st.sampled_from([None, None, "s"])),
                         lora_name=data.draw(st.sampled_from([None, None, "a"])))  # fmt: skip
        self.count += 1
        hits, cached = self.manager.get_computed_blocks(request)
        assert hits == self.naive.lookup(request) and cached == len(hits) * self.manager.block_size
        assert cached < request.num_tokens, "one token is left to compute"
        request.num_computed_tokens = cached
        if self.allocate(request, data.draw(st.integers(1, request.num_tokens - cached)), hits):
            self.alive[request.request_id] = request

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def go_on(self, data):
        request = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_id(data.draw(st.integers(0, 1)))
        room = min(request.num_tokens, 60) - request.num_computed_tokens
        if room > 0:
            self.allocate(request, data.draw(st.integers(1, room)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data):
        request = self.alive.pop(data.draw(st.sampled_from(sorted(self.alive))))
        self.known.append(list(request.all_token_ids))
        self.manager.free(request)
        self.naive.free(request)

    @invariant()
    def equal(self):
        if not hasattr(self, "manager"):
            return
        pool = self.manager.block_pool
        pool.check()
        assert list(pool.free_queue) == self.naive.queue
        assert self.manager.req_to_blocks == self.naive.tables
        assert {b for b, key in enumerate(pool.block_hash) if key} == set(self.naive.key)
        assert all(pool.ref_count[b] == self.naive.owners(b) for b in range(pool.num_blocks))
        assert list(pool.cached_block_hash_to_block) == list(dict.fromkeys(pool.cached_block_hash_to_block))
        by_key = sorted(list(blocks) for blocks in pool.cached_block_hash_to_block.values())
        assert by_key == sorted(blocks for blocks in self.naive.order.values() if blocks)

    def teardown(self):
        for request in getattr(self, "alive", {}).values():
            self.manager.free(request)
        if hasattr(self, "manager"):
            assert self.manager.block_pool.num_free_blocks == self.manager.block_pool.num_blocks - 1
            assert not self.manager.num_cached_block and not self.manager.req_to_blocks


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=25, stateful_step_count=40)


@pytest.mark.parametrize("examples", and_slowly([], [(100,)], [(400,)]))
def test_the_manager_for_longer(examples):
    often = settings(max_examples=examples, stateful_step_count=60)
    run_state_machine_as_test(ManagerMachine, settings=often)


# --- The lesson's index against the engine's manager ----------------------------------------------------------------


class PairMachine(RuleBasedStateMachine):
    """The same requests through both: after every step the same hits, tables, evictions and order of the queue."""

    @initialize(size=st.sampled_from([1, 2, 4]), num_blocks=st.integers(2, 14), bits=st.sampled_from([8, 256]))
    def start(self, size, num_blocks, bits):
        self.manager, self.small = Manager(num_blocks, size, 64), lesson.PrefixCache(num_blocks, size, bits)
        self.manager.hash_bits = bits
        self.alive: dict[str, tuple[Request, Request]] = {}
        self.known: list[list[int]] = [[]]
        self.count = 0

    def allocate(self, pair, n, hits=()):
        theirs, ours = pair
        want, got = self.manager.allocate_slots(theirs, n, hits), self.small.allocate_slots(ours, n, hits)
        assert got == want
        if want is not None:
            for request in pair:
                request.num_computed_tokens += n
        return want is not None

    @rule(data=st.data())
    def admit(self, data):
        earlier = data.draw(st.sampled_from(self.known))
        prompt = earlier[: data.draw(st.integers(0, len(earlier)))] + data.draw(st.lists(st.integers(0, 1), max_size=6))
        salt, name = data.draw(st.sampled_from([None, None, "s"])), f"r{self.count}"
        pair = tuple(greedy(prompt or [0], name=name, cache_salt=salt) for _ in range(2))
        self.count += 1
        hits, cached = self.manager.get_computed_blocks(pair[0])
        assert self.small.get_computed_blocks(pair[1]) == hits and pair[1].block_hashes == pair[0].block_hashes
        for request in pair:
            request.num_computed_tokens = cached
        if self.allocate(pair, data.draw(st.integers(1, pair[0].num_tokens - cached)), hits):
            self.alive[name] = pair

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def go_on(self, data):
        pair = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        if pair[0].num_computed_tokens == pair[0].num_tokens:
            token = data.draw(st.integers(0, 1))
            for request in pair:
                request.append_output_token_id(token)
        room = min(pair[0].num_tokens, 60) - pair[0].num_computed_tokens
        if room > 0:
            self.allocate(pair, data.draw(st.integers(1, room)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data):
        theirs, ours = self.alive.pop(data.draw(st.sampled_from(sorted(self.alive))))
        self.known.append(list(theirs.all_token_ids))
        self.manager.free(theirs)
        self.small.free(ours)

    @invariant()
    def equal(self):
        if not hasattr(self, "manager"):
            return
        pool, small = self.manager.block_pool, self.small
        assert small.tables == self.manager.req_to_blocks
        assert list(small.free_queue) == list(pool.free_queue)
        assert small.ref_count == pool.ref_count and small.block_hash == pool.block_hash
        assert small.index == {key: list(blocks) for key, blocks in pool.cached_block_hash_to_block.items()}


TestPair = PairMachine.TestCase
TestPair.settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.parametrize("examples", and_slowly([], [(100,)], [(400,)]))
def test_the_pair_for_longer(examples):
    often = settings(max_examples=examples, stateful_step_count=60)
    run_state_machine_as_test(PairMachine, settings=often)


def test_the_story_finds_in_the_model_what_the_engine_finds(tiny_model):
    """Through the model, one request after the other, evictions in between: the same tokens and the same hits."""
    rng, base = random.Random(3), tokens_of(3, 60)
    prompts = [base[: rng.randrange(1, 60)] + tokens_of(i, rng.randrange(1, 14)) for i in range(10)]
    core, cache = core_of(tiny_model, num_blocks=8), lesson.PrefixCache(8, 16)
    kv = lesson.PagedKVCache(tiny_model, 8, 16)
    for prompt in prompts:
        engines = greedy(prompt, 6)
        run(core, [engines])
        ours, _ = lesson.answer(tiny_model, kv, cache, prompt, 6)
        assert ours.output_token_ids == engines.output_token_ids
        assert ours.num_cached_tokens == engines.num_cached_tokens
        assert list(cache.free_queue) == list(core.scheduler.kv_cache_manager.block_pool.free_queue)


def test_cached_blocks_go_to_the_back_tail_first():
    """The order that vLLM documents: table [1, 2, 3, 4], 4 is not full, queue [5, 6] -> [4, 5, 6, 3, 2, 1]."""
    manager = Manager(7, 4, 64)
    request = greedy(range(14))
    manager.allocate_slots(request, 14)
    manager.free(request)
    assert list(manager.block_pool.free_queue) == [4, 5, 6, 3, 2, 1]
    manager.allocate_slots(greedy(range(50, 66), name="s"), 16)  # 4, 5, 6, and the tail of the cached prefix
    again = greedy(range(14), name="t")
    assert manager.get_computed_blocks(again) == ([1, 2], 8), "a prefix outlives its continuations"


def test_a_revived_block_counts_as_taken():
    manager = Manager(4, 4, 64)  # 3 usable
    first = greedy(range(9))
    manager.allocate_slots(first, 9)
    manager.free(first)
    second = greedy([*range(8), 70, 71, 72, 73, 74], name="s")  # two hits, both without an owner, and two more needed
    hits, second.num_computed_tokens = manager.get_computed_blocks(second)
    before = list(manager.block_pool.free_queue)
    assert len(hits) == 2 and manager.allocate_slots(second, 5, hits) is None
    assert list(manager.block_pool.free_queue) == before and not manager.req_to_blocks


@pytest.mark.parametrize("caching, skip, found", [(True, False, 8), (True, True, 0), (False, False, 0)])
def test_reading_can_be_switched_off(caching, skip, found):
    manager = Manager(9, 4, 64, caching)
    manager.allocate_slots(greedy(range(9)), 9)
    params = SamplingParams(skip_reading_prefix_cache=skip)
    assert manager.get_computed_blocks(Request("s", list(range(9)), params))[1] == found
    assert bool(manager.block_pool.cached_block_hash_to_block) == caching


# --- In the engine --------------------------------------------------------------------------------------------------


def core_of(model, caching=True, num_blocks=24, graphs=None, max_model_len=96):
    return page.make_core(model, caching, num_blocks, max_model_len, graphs=graphs)


def poison(core):
    """What nobody owns and the index does not know must never be read."""
    pool = core.scheduler.kv_cache_manager.block_pool
    dead = [b for b in pool.free_queue if pool.block_hash[b] is None]
    for layer in core.runner.cache.layers:
        layer[:, dead] = float("nan")


def run(core, requests):
    """All at once, with poisoned memory; pool invariants after every step."""
    for request in requests:
        core.add_request(request)
    while core.scheduler.has_unfinished_requests():
        poison(core)
        core.step()
        core.scheduler.kv_cache_manager.block_pool.check()
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("num_blocks", [8, 14, 60])  # 7 usable blocks are the least for 96 tokens
def test_the_cache_changes_no_token(tiny_model, num_blocks):
    """Shared prefixes, in the same step and later, generated blocks found again, evictions in between."""
    rng, prompts = random.Random(num_blocks), []
    for i in range(12):
        base = prompts[rng.randrange(len(prompts))] if prompts and rng.random() < 0.8 else tokens_of(i, 60)
        prompts.append(base[: rng.randrange(1, 60)] + tokens_of(100 + i, rng.randrange(1, 14)))
    prompts.append(list(prompts[-1]))
    with_cache, without = core_of(tiny_model, True, num_blocks), core_of(tiny_model, False, num_blocks)
    cached = 0
    for wave in (prompts[:5], prompts[5:6], prompts[6:]):
        lots = [[greedy(p, 6, str(i)) for i, p in enumerate(wave)] for _ in range(2)]
        got, want = run(with_cache, lots[0]), run(without, lots[1])
        assert got == want
        assert want[0] == batching.generate_alone(tiny_model, wave[0], 6)
        cached += sum(request.num_cached_tokens for request in lots[0])
    assert cached > 0
    pool = with_cache.scheduler.kv_cache_manager.block_pool
    assert pool.num_free_blocks == pool.num_blocks - 1


def test_the_answer_is_found_by_the_next_turn(tiny_model):
    core, prompt = core_of(tiny_model), tokens_of(1, 20)
    (answer,) = run(core, [greedy(prompt, 30)])
    follow_up = greedy([*prompt, *answer, 5, 6], 3, "s")
    run(core, [follow_up])
    assert follow_up.num_cached_tokens == (20 + 29) // 16 * 16, "of 30 tokens the last was never computed"


def test_two_in_one_step_share_what_neither_has_computed_yet(tiny_model):
    core, prompt = core_of(tiny_model), tokens_of(2, 40)
    first, second = greedy(prompt, 4, "a"), greedy([*prompt[:36], 1, 2], 4, "b")
    got = run(core, [first, second])
    assert second.num_cached_tokens == 32
    assert got == [batching.generate_alone(tiny_model, r.prompt_token_ids, 4) for r in (first, second)]


def test_who_has_another_salt_or_adapter_computes_again(tiny_model):
    core, prompt = core_of(tiny_model), tokens_of(3, 40)
    abouts = [{}, {}, {"cache_salt": "s"}, {"cache_salt": "s"}, {"lora_name": "a"}, {"cache_salt": "t"}]
    found = []
    for i, about in enumerate(abouts):
        request = greedy(prompt, 2, str(i), **about)
        run(core, [request])
        found.append(request.num_cached_tokens)
    assert found == [0, 32, 0, 32, 0, 0]


def test_a_lookup_that_admits_nobody_changes_nothing(tiny_model):
    core = core_of(tiny_model, num_blocks=8)
    mine = tokens_of(4, 65)  # five of the seven blocks
    long, waits = greedy(mine, 20, "a"), greedy(mine[:48] + tokens_of(9, 42), 5, "b")  # six, of which it finds three
    core.add_request(long)
    core.add_request(waits)
    core.step()
    assert waits.num_computed_tokens == waits.num_cached_tokens == 0 and len(core.scheduler.waiting) == 1
    while core.scheduler.has_unfinished_requests():
        core.step()
    assert waits.num_cached_tokens == 48
    assert waits.output_token_ids == batching.generate_alone(tiny_model, waits.prompt_token_ids, 5)


@given(st.integers(0, 200), st.integers(1, 60), st.integers(1, 6), st.sampled_from([1, 4, 16]))
def test_the_factor_is_what_the_manager_computes(prefix, message, requests, size):
    manager, computed = Manager(400, size, 1000), 0
    for i in range(requests):
        prompt = list(range(prefix)) + [1000 + i] * message
        request = greedy(prompt, name=str(i))
        hits, request.num_computed_tokens = manager.get_computed_blocks(request)
        computed += len(prompt) - request.num_computed_tokens
        manager.allocate_slots(request, len(prompt) - request.num_computed_tokens, hits)
        manager.free(request)
    total = requests * (prefix + message)
    assert total / computed == pytest.approx(page.prefill_factor(prefix, message, requests, size))


def test_what_a_cache_should_find():
    """Whole blocks of what was computed before, and never all of a prompt: its last token has to be computed."""
    served = [(list(range(31)), [31, 7]), (list(range(16)), [1]), (list(range(17)), [1]), (list(range(33)), [1]),
              ([9, *range(1, 40)], [1])]  # fmt: skip
    assert lesson.naive_hits(served, 16) == [0, 0, 16, 32, 0]


def test_hit_rates_of_the_workload():
    workload = chats.chat_workload()
    total = sum(len(prompt) for prompt, _ in workload)
    best = sum(lesson.naive_hits(workload, 16)) / total
    rates = page.facts()["hits"]["rate"]
    assert rates["4096"] == best and all(0 <= rate <= best for rate in rates.values())
    assert sorted(rates.values()) == list(rates.values()), "here a larger pool never finds less"
    assert workload == chats.chat_workload() and len(workload) == page.facts()["hits"]["requests"]


def test_a_pool_that_cannot_hold_a_request_has_no_hit_rate():
    """What an unserved prompt would have found is no hit: 64 blocks once counted 60 of 155 such prompts."""
    workload = chats.chat_workload()
    longest = max(-(-(len(prompt) + len(answer) - 1) // 16) for prompt, answer in workload)
    assert longest <= min(page.POOLS)
    assert 0 < lesson.hit_rate(workload, longest) < 1
    with pytest.raises(ValueError, match=f"^{longest - 1} blocks cannot hold"):
        lesson.hit_rate(workload, longest - 1)


def test_the_real_model_says_the_same_with_the_cache(real_model):
    model, tokenizer = real_model
    on, off = (page.three_requests(core_of(model, caching), tokenizer, 32, 8) for caching in (True, False))
    assert [r.output_token_ids for r, _ in on] == [r.output_token_ids for r, _ in off]
    assert [r.num_cached_tokens for r, _ in on] == [0, 32, 32]


@pytest.mark.slow
def test_a_chat_with_the_real_model(real_model):
    model, tokenizer = real_model
    on, off = (page.conversation(core_of(model, c, 80, max_model_len=512), tokenizer, 12) for c in (True, False))
    assert [r.output_token_ids for r, _ in on] == [r.output_token_ids for r, _ in off]
    for (earlier, _), (later, _) in itertools.pairwise(on):
        known = earlier.num_tokens - 1
        assert known - 48 < later.num_cached_tokens <= known, "everything said so far, but for the last blocks"


def test_a_model_without_a_chat_template_reads_the_bare_texts(real_model, monkeypatch):
    tokenizer, prompts = copy.copy(real_model[1]), []
    tokenizer.chat_template = None
    answer = SimpleNamespace(output_token_ids=tokenizer.encode("Yes."))
    monkeypatch.setattr(page, "ask", lambda core, prompt, n: (prompts.append(prompt), (answer, 0.0))[1])
    page.conversation(None, tokenizer, 4)
    said = [page.TOOLS]
    for prompt, turn in zip(prompts, lesson.TURNS, strict=True):
        said.append(turn)
        assert tokenizer.decode(prompt) == "\n".join(said)
        said.append("Yes.")


def test_eight_bits_serve_somebody_elses_prefix(tiny_model):
    """A forged prefix whose first block has the key of another: right at 256 bits, wrong at 8."""
    mine = tokens_of(9, 16)
    key = lambda tokens: lesson.hash_block_tokens(lesson.ROOT_HASH, tokens)[:1]  # noqa: E731
    other = next(t for t in (tokens_of(seed, 16) for seed in range(1000, 5000)) if key(t) == key(mine))
    tail = [7, 8, 9]
    want = [batching.generate_alone(tiny_model, p + tail, 8) for p in (mine, other)]
    for bits, wrong in ((256, False), (8, True)):
        core = page.make_core(tiny_model, True, 24, 96, hash_bits=bits)
        first, second = greedy(mine + tail, 8, "a"), greedy(other + tail, 8, "b")
        got = [run(core, [first])[0], run(core, [second])[0]]
        assert second.num_cached_tokens == (16 if wrong else 0)
        assert got == ([want[0], want[0]] if wrong else want)


def test_the_account_numbers_collide(real_model):
    tokenizer = real_model[1]
    tiger = lesson.account_prompt(tokenizer, 1234, "tiger")
    number = lesson.colliding_account(tokenizer, tiger, "banana", 8)
    banana = lesson.account_prompt(tokenizer, number, "banana")
    assert "tiger" in tokenizer.decode(tiger[:16]) and "banana" in tokenizer.decode(banana[:16])
    assert keys(tiger, 16)[0][:1] == keys(banana, 16)[0][:1] and keys(tiger, 16)[0] != keys(banana, 16)[0]
    assert lesson.colliding_account(tokenizer, tiger, "banana", 256) is None


@pytest.mark.slow
def test_the_real_model_says_somebody_elses_word(real_model):
    model, tokenizer = real_model
    tiger = lesson.account_prompt(tokenizer, 1234, "tiger")
    banana = lesson.account_prompt(tokenizer, lesson.colliding_account(tokenizer, tiger, "banana", 8), "banana")
    said = {}
    for bits in (8, 256):
        core = page.make_core(model, hash_bits=bits)
        said[bits] = [tokenizer.decode(page.ask(core, p, 2)[0].output_token_ids) for p in (tiger, banana)]
    assert said[256][0].strip().startswith("tiger") and said[256][1].strip().startswith("ban")
    assert said[8] == [said[256][0]] * 2


# --- The corner that vLLM has: a victim that already stands in the step ---------------------------------------------


def withdrawn_victims(model, seed: int, evict: bool) -> tuple[list[list[int]], list[list[int]]]:
    """A long unimportant prompt in chunks, pushed out of a step in which it stands. Tokens: got, and alone."""
    draw = random.Random(seed)
    config = SchedulerConfig(
        max_model_len=40, max_num_seqs=6, max_num_batched_tokens=48, policy="priority", long_prefill_token_threshold=8,
        evict_uncomputed_blocks=evict,
    )  # fmt: skip
    scheduler = make_scheduler(config, num_blocks=draw.randint(21, 26), block_size=2)
    core = EngineCore(scheduler, runner_of(model, scheduler))
    for layer in core.runner.cache.layers:  # memory that nobody has written
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(1)) * 3)
        layer[:, 0] = 0
    arrivals = [(0, draw.randint(30, 38), 2, 9), (0, 1, 1, 9)]
    arrivals += [(draw.randint(1, 3), draw.randint(1, 8), draw.randint(1, 20), 0) for _ in range(3)]
    requests = []
    for step in range(100):
        for arrival, length, n, priority in arrivals:
            if arrival == step:
                prompt = [draw.randrange(128) for _ in range(length)]
                requests.append(greedy(prompt, n, f"r{len(requests)}", arrival_time=len(requests), priority=priority))
                core.add_request(requests[-1])
        core.step()
    alone = [batching.generate_alone(model, r.prompt_token_ids, r.num_output_tokens) for r in requests]
    return [r.output_token_ids for r in requests], alone


def test_blocks_promised_by_a_withdrawn_victim_are_never_served(tiny_model):
    """Real keys and values: with the promises taken back everything is right; left in the index, as vLLM leaves them,
    a resumed request hits memory that was never written."""
    for seed in WITHDRAWN:
        got, alone = withdrawn_victims(tiny_model, seed, evict=True)
        assert got == alone
    assert any(got != alone for got, alone in (withdrawn_victims(tiny_model, seed, False) for seed in WITHDRAWN))


def test_a_victim_withdrawn_in_the_middle_of_a_block_leaves_no_promise():
    """6 tokens are computed, the next 3 would fill block 1 and are withdrawn: the twin finds block 0 alone."""
    config = SchedulerConfig(max_model_len=16, policy="priority", max_num_scheduled_tokens=6)
    scheduler = make_scheduler(config, num_blocks=9, block_size=4)
    victim, twin = greedy(range(9), name="victim"), greedy(range(9), name="twin")
    scheduler.add_request(victim)
    scheduler.update_from_output(scheduler.schedule(), {})
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"victim": 3} and victim.num_computed_tokens == 9
    assert scheduler.kv_cache_manager.get_computed_blocks(twin)[1] == 8, "promised, while the victim stands in the step"
    scheduler._preempt_request(victim, output)
    assert scheduler.kv_cache_manager.get_computed_blocks(twin)[1] == 4
    scheduler.kv_cache_manager.block_pool.check()


@pytest.mark.slow
def test_many_withdrawn_victims(tiny_model):
    assert all(got == alone for got, alone in (withdrawn_victims(tiny_model, seed, True) for seed in range(60)))


WITHDRAWN = (6, 7, 8)  # in 6, a resumed victim hits its own promise


# --- CUDA graphs: buckets, padding, buffers -------------------------------------------------------------------------


def test_buckets_are_vllms():
    assert capture_sizes(512) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    for largest in (1, 2, 3, 7, 9, 250, 257, 512):
        sizes = capture_sizes(largest)
        assert sizes[-1] >= largest and (len(sizes) == 1 or sizes[-2] < largest)
    assert capture_sizes(600)[-1] == 512, "beyond, steps run eagerly"


def test_a_tape_replays_operations_and_no_python():
    x, seen, tape = torch.arange(3.0), [], Tape()
    tape.capture_begin()
    seen.append("python")
    factor = float(len(seen))  # decided on the host, frozen
    y = (x * 2).view(3, 1)[:, 0] + factor
    x.add_(0)
    tape.capture_end()
    x.copy_(torch.tensor([5.0, 6.0, 7.0]))
    seen.append("more")
    tape.replay()
    assert y.tolist() == [11.0, 13.0, 15.0] and seen == ["python", "more"]
    assert len(tape.tape) == 3, "views launch nothing"


PACKS = {
    "mkl::_mkl_reorder_linear_weight": lambda w: torch.ops.mkl._mkl_reorder_linear_weight(w, 32),
    "mkldnn::_reorder_linear_weight": lambda w: torch.ops.mkldnn._reorder_linear_weight(w, 32),
    "aten::to_mkldnn": lambda w: w.to_mkldnn(),
    "aten::_convert_weight_to_int4pack_for_cpu": lambda w: torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.zeros_like(w, dtype=torch.int32), 1
    ),
}


@pytest.mark.parametrize("name", PACKS)
def test_a_tape_refuses_to_pack(name):
    """MKL's packed bytes are another matrix at another address, which is where a replay would have copied them."""
    if ("mkl:" in name and not torch.backends.mkl.is_available()) or not torch.backends.mkldnn.is_available():
        pytest.skip("no such library here")
    weight, tape = torch.randn(512, 128), Tape()
    with torch.inference_mode():
        tape.capture_begin()
        try:
            with pytest.raises(RuntimeError, match=f"{name} packs a matrix while a tape records"):
                PACKS[name](weight)
        finally:
            tape.capture_end()


@pytest.mark.skipif(common.HAS_GPU, reason="a GPU's products pack nothing")
def test_layers_that_pack_when_they_are_first_called_are_packed_before_the_capture(tiny_model, library):
    """And are read from there by every replay: whichever library it is, and whether it packs at all."""

    class Lazy:
        weight = None

        def __init__(self, layer):
            self.layer, self.packed = layer, None

        def __call__(self, x):
            can = packs(x.device, x.dtype)
            self.packed = self.packed or (PackedLinear(self.layer.weight, None) if can else self.layer)
            return self.packed(x)

    model = copy.copy(tiny_model)
    model.linear = {name: Lazy(layer) for name, layer in tiny_model.linear.items()}
    core = core_of(model, num_blocks=40, graphs=graphs(full=False))
    assert serve(core) == serve(core_of(tiny_model, num_blocks=40))
    assert core.runner.graphs.num_replays == 5
    product = {"MKL": "mkl::_mkl_linear", "oneDNN": "mkldnn::_linear_pointwise", "neither": "aten::linear"}[library]
    names = {
        func.name() for step in core.runner.graphs.captured.values() for graph in step.graphs for func, *_ in graph.tape
    }
    assert product in names and not any("reorder" in name for name in names)


@pytest.mark.parametrize("failing", [1, 2], ids=["warming up", "recording"])
def test_nothing_is_recorded_after_a_capture_that_failed(tiny_model, failing):
    model, calls = copy.copy(tiny_model), itertools.count(1)
    model.linear = dict(tiny_model.linear)
    name = list(model.linear)[-2]

    def layer(x):
        if next(calls) == failing:
            raise KeyError("in the middle of it")
        return tiny_model.linear[name](x)

    model.linear[name] = layer
    captured, before = (
        core_of(model, num_blocks=40, graphs=graphs(full=False)).runner.graphs,
        _get_current_dispatch_mode(),
    )
    with pytest.raises(KeyError, match="in the middle of it"):
        captured.captured_step(2, whole=False)
    still = _get_current_dispatch_mode()
    if still is not before:
        still.capture_end()  # or the tests that follow are recorded too
    assert still is before and not captured.captured


PROMPTS = [tokens_of(20 + n, n) for n in (5, 17, 2, 1, 7)]
OUTPUTS = [4, 2, 5, 3, 2]  # 32 tokens, then 5, 3, 2 and 1: every bucket


def serve(core):
    return offline_run.serve(core, PROMPTS, OUTPUTS).token_ids


@pytest.fixture(scope="module")
def served(tiny_model):
    """What `serve` gives without a graph, and without a kernel on a CPU."""
    return serve(core_of(tiny_model, num_blocks=40))


def graphs(full=True, largest=64, kind=CapturedModel):
    recorder = torch.cuda.CUDAGraph if common.HAS_GPU else Tape
    return functools.partial(kind, graph_class=recorder, full=full, largest=largest)


def test_piecewise_graphs_change_no_token(tiny_model, served):
    core = core_of(tiny_model, num_blocks=40, graphs=graphs(full=False))
    assert serve(core) == served
    found = core.runner.graphs
    assert found.num_replays == 5 and {size for size, _ in found.captured} == {1, 2, 4, 8, 32}
    layers = tiny_model.config.num_hidden_layers
    assert all(len(step.graphs) == layers + 1 and len(step.attention) == layers for step in found.captured.values())


@pytest.mark.skipif(common.HAS_GPU, reason="a GPU's steps are all alike")
def test_a_tape_is_not_played_for_experts(capsys):
    """On a CPU a step runs those experts that its tokens ask for, which a tape would not know."""
    lesson.show_replay(llama.random_model(**MIXTURES["mixtral"]), None)
    assert "SKIPPED CUDA graphs: no GPU, and a CPU's steps differ" in capsys.readouterr().out


def test_all_is_captured_before_the_first_request(tiny_model, served, kernels):
    """The largest bucket first, whose memory the others use; nothing is captured any more in front of a client."""
    core = core_of(tiny_model, num_blocks=40, graphs=graphs(largest=16))
    found, decodes = core.runner.graphs, core.scheduler.config.max_num_seqs
    found.capture_all()
    buckets = [(n, whole) for n in (16, 8, 4, 2, 1) for whole in (False, True) if not whole or n <= decodes]
    assert list(found.captured) == buckets and found.num_replays == 0
    found.capture = None
    for graph in (graph for step in found.captured.values() for graph in step.graphs):
        graph.replay()  # only padding: it leaves no trace (and the margins of what it allocates are filled)
    assert serve(core) == served and found.num_replays


@pytest.mark.parametrize(
    ("seats", "drafts", "budget", "largest", "last"),
    [(1, 0, 512, None, 2), (5, 0, 512, None, 16), (5, 3, 512, None, 40), (400, 0, 2048, None, 512),
     (60, 4, 64, None, 64), (5, 0, 512, 64, 64)],
)  # fmt: skip
def test_as_many_sizes_as_decoding_needs_and_as_many_again(tiny_model, seats, drafts, budget, largest, last):
    """vLLM's rule: twice the tokens of a step in which all seats decode, at most 512, at most a step's budget."""
    config = batching.SchedulerConfig(64, max_num_seqs=seats, max_num_batched_tokens=budget)
    runner = page.runner_with(None, tiny_model, config, 9)
    found = CapturedModel(runner.model, runner.cache, runner.attend, config, num_speculative_tokens=drafts,
                          graph_class=Tape, largest=largest)  # fmt: skip
    assert found.sizes[-1] == last


def test_attention_between_two_pieces_reads_the_same_memory_in_every_bucket(tiny_model):
    """A bucket that kept queries, keys and values of its own would keep them for every layer."""
    read = set()

    def reading(model, cache, plan, limits, **options):
        def noting_plan(meta):
            attend = plan(meta)

            def noting(layer, q, k, v):
                read.update((name, x.data_ptr()) for name, x in (("q", q), ("k", k), ("v", v)) if found.num_replays)
                return attend(layer, q, k, v)

            return noting

        found = CapturedModel(model, cache, noting_plan, limits, **options)
        return found

    core = core_of(tiny_model, num_blocks=40, graphs=graphs(full=False, kind=reading))
    serve(core)
    assert len(core.runner.graphs.captured) == 5 and len(read) == 3


def test_full_graphs_change_no_token(tiny_model, served, kernels):
    """Attention inside the graph: lesson 02's kernels run from the recording alone."""
    core = core_of(tiny_model, num_blocks=40, graphs=graphs())
    kernel = paged.paged_decode_kernel
    before = kernel.launches
    assert serve(core) == served
    assert kernel.launches > before
    assert {size for size, whole in core.runner.graphs.captured if whole} == {1, 2, 4, 8}
    assert all(len(step.graphs) == 1 for (_, whole), step in core.runner.graphs.captured.items() if whole)


def test_a_replayed_step_scores_prompts_too(tiny_model, real_model):
    """Among them one whose last chunk is a single token beside decodes: a step that looks like any other."""
    found = []
    for captured in (False, True):
        engine = LLMEngine(tiny_model, real_model[1], max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8,
                           num_gpu_blocks_override=40)  # fmt: skip
        runner, limits = engine.core.runner, engine.core.scheduler.config
        runner.graphs = graphs(full=False)(runner.model, runner.cache, runner.attend, limits) if captured else None
        for i, length in enumerate((8, 9, 3, 17)):
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
            engine.add_request(str(i), {"prompt_token_ids": [*range(5 * i, 5 * i + length)]}, params)
        found.append({})
        while engine.has_unfinished_requests():
            found[-1] |= {output.request_id: output.prompt_logprobs for output in engine.step()}
    assert engine.core.runner.graphs.num_replays
    for name, scores in found[0].items():
        for one, other in zip(scores[1:], found[1][name][1:], strict=True):
            assert one.keys() == other.keys() and all(one[t].rank == other[t].rank for t in one)


def test_nothing_but_the_recording_runs(tiny_model, served):
    """After the capture, the model's Python is not called any more."""
    core = core_of(tiny_model, caching=False, num_blocks=40, graphs=graphs(full=False))
    assert serve(core) == served

    def forward(*args, **kwargs):
        raise AssertionError("the model ran")

    core.runner.model.forward = forward
    try:
        assert serve(core) == served
    finally:
        del core.runner.model.forward


def test_other_attention_can_be_captured(tiny_model, served):
    core = core_of(tiny_model, num_blocks=40)
    limits = core.scheduler.config
    core.runner = make_runner(tiny_model, limits, 40, 16)
    core.runner.graphs = graphs()(core.runner.model, core.runner.cache, core.runner.attend, limits)
    assert serve(core) == served and core.runner.graphs.num_replays == 5


def test_sampled_tokens_too(tiny_model):
    """Captured or not, a seeded request draws the same tokens."""
    drawn = []
    for each in (None, graphs()):
        core = core_of(tiny_model, graphs=each)
        request = Request("r", PROMPTS[0], SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True))
        drawn.append(run(core, [request])[0])
    assert drawn[0] == drawn[1]


def padded_step(model, graphs) -> tuple[list[torch.Tensor], list[torch.Tensor], set[int]]:
    """Five sequences decode, three of them end, a newcomer takes their blocks; then a step of three in a bucket of
    four. Caches before and after it, and the slots that it may write."""
    core = core_of(model, caching=False, num_blocks=40, graphs=graphs)
    for bucket in ((8, False), (8, True), (4, True)):
        core.runner.graphs.captured_step(*bucket)
    for i in range(5):
        core.add_request(greedy(tokens_of(i, 1 + i), 30 if i in (0, 4) else 3, f"_{i}"))
    while len(core.scheduler.running) != 2:
        core.step()
    core.add_request(greedy(tokens_of(50, 6), 20, "new"))
    core.step()
    for layer in core.runner.cache.layers:
        layer.normal_()  # so that no write can go unnoticed because it repeats what is there
    before = [layer.clone() for layer in core.runner.cache.layers]
    manager = core.scheduler.kv_cache_manager
    may = {manager.get_block_ids(r.request_id)[r.num_computed_tokens // 16] * 16 + r.num_computed_tokens % 16
           for r in core.scheduler.running}  # fmt: skip
    core.step()
    return before, core.runner.cache.layers, may


def written(before, after) -> set[int]:
    return {int(slot) for old, new in zip(before, after)
            for slot in (old != new).flatten(3).any(-1).any(0).flatten().nonzero().flatten()}  # fmt: skip


def test_padding_leaves_no_trace(tiny_model, kernels):
    """Not in a block of somebody else, and not in the null block either."""
    before, after, may = padded_step(tiny_model, graphs())
    assert len(may) == 3 and written(before, after) == may


def test_rows_that_keep_their_old_slots_write_into_somebody_elses_block(tiny_model, kernels):
    """The classic bug of captured steps: rows behind the batch still hold what an earlier, larger batch left there."""

    class Forgetful(CapturedModel):
        def fill(self, token_ids, meta, size, whole):
            super().fill(token_ids, meta, len(token_ids), whole)  # no padding

    before, after, may = padded_step(tiny_model, graphs(kind=Forgetful))
    assert written(before, after) > may


def test_a_step_above_the_largest_bucket_runs_eagerly(tiny_model, served):
    core = core_of(tiny_model, num_blocks=40, graphs=graphs(full=False, largest=4))
    assert serve(core) == served
    assert core.runner.graphs.sizes == [1, 2, 4] and 0 < core.runner.graphs.num_replays < 5


@pytest.mark.parametrize("what", ["cache", "weights", "layer"])
def test_memory_that_moved_is_an_error_and_not_a_wrong_token(tiny_model, what):
    model = llama.random_model(seed=0)
    core = core_of(model, num_blocks=40, graphs=graphs(full=False))
    serve(core)
    runner = core.runner
    if what == "cache":
        runner.cache.layers[1] = runner.cache.layers[1].clone()
    elif what == "weights":
        runner.model.embed_tokens = runner.model.embed_tokens.clone()
    else:
        runner.model.linear["layers.0.o_proj"] = llama.Linear(torch.zeros(80, 96, device=model.device))
    with pytest.raises(RuntimeError, match="have moved since the capture"):
        serve(core)


@pytest.mark.skipif(common.HAS_GPU, reason="with a GPU, steps are captured")
def test_without_a_gpu_nothing_is_captured_by_itself(tiny_model, served):
    core = core_of(tiny_model, num_blocks=40, graphs=CapturedModel)
    assert serve(core) == served
    assert core.runner.graphs.num_replays == 0


@needs_gpu
@pytest.mark.parametrize("full", [False, True], ids=["piecewise", "full"])
def test_cuda_graphs_on_the_real_model(real_model, full):
    """fp32: the same tokens; and the profiler sees one graph launch per piece."""
    model, tokenizer = real_model
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "Water boils at", "A list is")]
    eager, captured = core_of(model, num_blocks=40), core_of(model, num_blocks=40, graphs=graphs(full=full))
    want = offline_run.serve(eager, prompts, [12, 5, 9]).token_ids
    assert offline_run.serve(captured, prompts, [12, 5, 9]).token_ids == want
    captured.add_request(greedy(prompts[0], 20))
    for _ in range(3):
        captured.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        captured.step()
    launched = sum(event.count for event in profile.key_averages() if "GraphLaunch" in event.key)
    assert launched == (1 if full else model.config.num_hidden_layers + 1)


@needs_gpu
def test_cuda_graphs_in_bf16(device):
    model = llama.random_model(seed=0, dtype=torch.bfloat16, device=device)
    logits = []
    for each in (None, graphs()):
        core = core_of(model, num_blocks=40, graphs=each)
        sample = core.runner.sample
        kept: list[torch.Tensor] = []
        core.runner.sample = lambda x, requests, s=sample, k=kept: k.append(x.clone()) or s(x, requests)
        core.add_request(greedy(PROMPTS[1], 4))
        for _ in range(2):
            core.step()
        logits.append(kept)
    for ours, theirs in zip(*logits):
        assert_close(ours, theirs)


# --- What launches cost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layers"), [("SmolLM2-135M", 30), ("Llama-3.1-8B", 32)])
def test_launches_are_counted_from_the_models_own_forward(name, layers):
    counts = page.launches(name)
    assert counts["product"] == 4 * layers + 1, "qkv, o, gate_up, down, and the head"
    assert counts["triton"] == 2 * layers, "store keys and values; attend"
    assert counts["other"] == 10 * layers + 6, "two norms, four of RoPE, silu, ·, two +"
    assert counts["total"] == sum(counts.values()) - counts["total"]


def test_the_count_follows_the_model(monkeypatch):
    """A model with fewer operations has fewer launches: nothing is written down by hand."""
    page.decode_step.cache_clear()
    monkeypatch.setattr(llama, "apply_rope", lambda x, cos, sin: x)
    try:
        assert page.launches("SmolLM2-135M")["other"] == 6 * 30 + 6
    finally:
        page.decode_step.cache_clear()


def test_the_launch_model():
    gpu = HARDWARE["H100 80GB"]
    n = page.launches("Llama-3.1-8B")["total"]
    eager, graph = page.step_seconds("Llama-3.1-8B", 1, 1024, gpu, 10e-6)
    assert eager == pytest.approx(n * 10e-6) and graph == gpu.seconds(
        *roofline.step_cost(roofline.MODELS["Llama-3.1-8B"], 1, 1, 1024)
    )
    assert page.step_seconds("Llama-3.1-8B", 256, 1024, gpu, 10e-6) == pytest.approx(
        page.step_seconds("Llama-3.1-8B", 256, 1024, gpu, 0.0)
    ), "where the GPU is slower than the launches, a graph saves nothing"
    # What a kernel takes on the GPU beside its bytes stays in a graph.
    eager, slower = page.step_seconds("Llama-3.1-8B", 1, 1024, gpu, 10e-6, kernel=1e-6)
    assert eager == pytest.approx(n * 10e-6) and slower == pytest.approx(graph + n * 1e-6)
    for known in (page.facts()["graphs"][name] for name in ("smollm2_135m", "llama_3_1_8b")):
        assert known["factor"]["1"] > known["factor_if_kernel_us"]["1"] > known["factor_if_kernel_us"]["3"] >= 1


# --- torch.compile --------------------------------------------------------------------------------------------------


def compiled_and_eager(model, rows=3):
    token_ids = torch.arange(10, 10 + rows, device=model.device)
    cache = lesson.PagedKVCache(model, 8, 16)
    for layer in cache.layers:
        layer[:, 1:].normal_()  # each layer has a past of its own
    meta = AttentionMetadata.build([[1 + b] for b in range(rows)], [9] * rows, [1] * rows, 16, model.device)
    out = page.compiled_forward(model)(token_ids, meta.positions, cache.attend(meta))
    return out, model.forward(token_ids, meta.positions, cache.attend(meta))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_layer_by_layer_through_the_opaque_operator(qk_norm, monkeypatch):
    """What is handed to the compiler computes the same, attention outside; the compiler itself is in the slow tier."""
    handed = []
    monkeypatch.setattr(torch, "compile", lambda fn, **kwargs: handed.append(kwargs) or fn)
    out, reference = compiled_and_eager(llama.random_model(qk_norm=qk_norm))
    assert torch.equal(out, reference) and handed == [{"dynamic": False}]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch._inductor") is None, reason="this build of torch has no compiler")
def test_compiled_step(tiny_model):
    from torch._dynamo.exc import TorchDynamoException

    try:
        found = page.measure_compile(tiny_model)
    except (TorchDynamoException, RuntimeError) as error:
        pytest.skip(f"no working compiler here: {str(error)[:100]}")
    assert found["error"] <= common.TOLERANCE[torch.float32]
    assert found["compilations"] == 1, "all layers share one compiled function"
    assert 4 <= found["kernels"] < found["operations"]


def test_a_missing_compiler_is_said_and_survived(monkeypatch, capsys):
    def no_compiler(model, num_seqs=8):
        raise RuntimeError("\nNo working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')")

    monkeypatch.setattr(page, "measure_compile", no_compiler)
    assert page.compile_or_say_why(None) is None
    assert "SKIPPED compiling: No working C++ compiler found" in capsys.readouterr().out
    for each in ("measure_prefix_caching", "measure_graphs", "measure_loops", "measure_lookup"):
        monkeypatch.setattr(page, each, lambda *_: {})
    monkeypatch.setattr(page.peers, "random_twins", lambda *_: (None,))
    monkeypatch.setattr(loader, "load", lambda *_: (None, None))
    found = page.measure(lesson.build_parser().parse_args(["--bench"]))
    assert "torch-compile" not in found and "prefix-caching" in found


def test_a_wrong_compiled_step_fails_the_run(monkeypatch):
    monkeypatch.setattr(page, "measure_compile", lambda model: {"error": 1e-3})
    with pytest.raises(common.CheckFailed, match="off by"):
        page.compile_or_say_why(None)


def test_the_story_counts_on_the_model_itself(real_model):
    """Packed or not, wide or narrow: what a step of the real model launches is what the facts say."""
    tape = lesson.record_step(real_model[0])
    kinds = [lesson.kind_of(operation) for operation, *_ in tape.tape]
    known = page.launches("SmolLM2-135M")
    assert len(kinds) == known["total"] and kinds.count("product") == known["product"]
    assert kinds.count("triton") == known["triton"] and kinds.count("small") == known["other"]
    for name in ("SmolLM2-135M", "Llama-3.1-8B"):
        layers = roofline.MODELS[name]["num_hidden_layers"]
        assert (
            len(lesson.record_step(llama.random_model(num_hidden_layers=layers)).tape) == page.launches(name)["total"]
        )


def test_small_operations_beside_weights():
    small, weights = page.activation_bytes("Llama-3.1-8B", 1)
    assert weights == 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096) + 2 * 4096 / 32
    # Per token: two norms, two sums, SiLU, product, and rope on 40 heads of 128; two bytes each way.
    least = 2 * (2 * 2 * 4096 + 2 * 3 * 4096 + 5 * 14336 + 2 * 40 * 128)
    assert least < small < 3 * least
    assert page.activation_bytes("Llama-3.1-8B", 100)[0] == pytest.approx(100 * small)


# --- Async scheduling -----------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_every_loop_stops_where_it_has_to(stops):
    """Unforeseen stops: whatever was planned too far is thrown away, and its blocks are back."""
    made = []

    def making(*args, **options):
        made.append(make_scheduler(*args, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "make_scheduler", making)
        loops = {kind: lesson.on_a_clock(kind, stops) for kind in lesson.LOOPS}
    assert all(loop["lengths"] == stops for loop in loops.values())
    assert loops["synchronous"]["wasted"] == 0
    assert loops["async"]["wasted"] <= len(stops) and loops["n-step"]["wasted"] <= 3 * len(stops)
    assert len(made) == 3
    for scheduler in made:
        pool = scheduler.kv_cache_manager.block_pool
        pool.check()
        assert pool.num_free_blocks == pool.num_blocks - 1
        assert not scheduler.requests


def test_waste_of_one_request():
    assert [lesson.on_a_clock("async", [n])["wasted"] for n in (1, 2, 5)] == [1, 1, 1]
    # The prompt's step and three decodes are planned at once, then four decodes, …
    assert [lesson.on_a_clock("n-step", [n])["wasted"] for n in (1, 2, 3, 4, 5)] == [3, 2, 1, 0, 3]


@given(st.floats(0, 100), st.integers(1, 40))
def test_the_clock(host_ms, n):
    """One request alone: a step waits for its plan, n steps wait for one, or the longer of plan and step decides."""
    loops = {kind: lesson.on_a_clock(kind, [n], host_ms, 10) for kind in lesson.LOOPS}
    assert loops["synchronous"]["ms"] == pytest.approx(n * (host_ms + 10))
    assert loops["n-step"]["ms"] == pytest.approx(-(-n // 4) * (host_ms + 40))
    host, done = host_ms, [host_ms + 10, host_ms + 20]  # the first plan is of two steps; the last step is in vain
    for _ in range(n - 1):
        host = max(host, done[-2]) + host_ms
        done.append(max(host, done[-1]) + 10)
    assert loops["async"]["ms"] == pytest.approx(done[-1])
    assert loops["async"]["idle"] == pytest.approx(1 - (n + 1) * 10 / loops["async"]["ms"])


@pytest.mark.parametrize("kind", list(lesson.LOOPS))
def test_a_length_is_foreseen(tiny_model, kind):
    """Requests that end by max_tokens or max_model_len cost no step too many. There are more of them than seats."""
    prompts = [tokens_of(60 + i, 3 + 5 * i) for i in range(11)]
    core, _ = page.make_loop(kind, tiny_model)
    requests = [greedy(p, 3 + i % 5, str(i)) for i, p in enumerate(prompts)]
    requests.append(Request("last", tokens_of(80, 250), SamplingParams(temperature=0, max_tokens=None)))
    samples = []
    next_result = core.next_result
    core.next_result = lambda: samples.append(next_result()) or samples[-1]
    got = page.run_loop(kind, core, requests)["token_ids"]
    core.remote.executor.shutdown()
    assert sum(len(output.num_scheduled_tokens) for output, _ in samples) == sum(map(len, got)), "none in vain"
    assert len(got[-1]) == 6
    assert got == [batching.generate_alone(tiny_model, r.prompt_token_ids, len(t)) for r, t in zip(requests, got)]


def test_the_next_step_is_planned_while_the_model_runs(monkeypatch):
    """The plan of step i + 1 exists before the tokens of step i do."""

    def events_of(kind, n):
        events = []

        def noting(*args, **options):
            scheduler = make_scheduler(*args, **options)
            schedule, update = scheduler.schedule, scheduler.update_from_output
            scheduler.schedule = lambda: events.append("plan") or schedule()
            scheduler.update_from_output = lambda *args: events.append("hear") or update(*args)
            return scheduler

        monkeypatch.setattr(lesson, "make_scheduler", noting)
        return events, lesson.on_a_clock(kind, [n])

    assert events_of("async", 5)[0][:6] == ["plan", "plan", "hear", "plan", "hear", "plan"]
    events, loop = events_of("n-step", 8)
    assert loop["plans"] == 2 and loop["steps"] == 8 and events[:8] == ["plan"] * 4 + ["hear"] * 4


# --- Prompt lookup --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 6))
def test_lookup_finds_the_longest_match_at_its_first_place(tokens, k):
    found = lesson.prompt_lookup(tokens, k)
    for n in (3, 2, 1):
        places = [i for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[len(tokens) - n :]]
        if places and n < len(tokens):
            assert found == tokens[places[0] + n : places[0] + n + k] and found
            return
    assert found == []


@pytest.mark.parametrize("k", [1, 3, 8])
def test_guesses_change_no_token(tiny_model, k):
    for prompt in (tokens_of(1, 20), [3, 4, 5] * 8, [9]):
        tokens, passes = lesson.generate_with_lookup(tiny_model, prompt, 17, k)
        assert tokens == batching.generate_alone(tiny_model, prompt, 17) and 1 <= passes <= 17
    assert lesson.generate_with_lookup(tiny_model, [9], 17, 0)[1] == 17


def test_right_guesses_save_passes(monkeypatch, tiny_model):
    """An oracle that always knows: 1 + k tokens a pass behind the prompt's. One that never does: one."""
    prompt = tokens_of(5, 9)
    truth = prompt + batching.generate_alone(tiny_model, prompt, 30)
    monkeypatch.setattr(lesson, "prompt_lookup", lambda tokens, k: truth[len(tokens) : len(tokens) + k])
    assert lesson.generate_with_lookup(tiny_model, prompt, 17, 3) == (truth[9 : 9 + 17], 1 + 16 // 4)
    wrong = lambda tokens, k: [(token + 1) % 128 for token in truth[len(tokens) : len(tokens) + k]]  # noqa: E731
    monkeypatch.setattr(lesson, "prompt_lookup", wrong)
    assert lesson.generate_with_lookup(tiny_model, prompt, 17, 3) == (truth[9 : 9 + 17], 17)


# --- The widget -----------------------------------------------------------------------------------------------------


def check_trace(trace, params):
    size = params["block_size"]
    for sent in trace["sends"]:
        text, blocks = sent["text"], sent["blocks"]
        if sent["refused"]:
            assert -(-len(text) // size) > params["pool_blocks"] and not blocks
            continue
        assert sent["cached"] + sent["computed"] == len(text) and sent["computed"] >= 1
        assert "".join(b["text"] for b in blocks) == text
        hits = sum(b["state"] == "hit" for b in blocks)
        assert sent["cached"] == hits * size and all(b["state"] == "hit" for b in blocks[:hits])
        assert sorted(b for b, _ in sent["free_queue"]) == list(range(1, params["pool_blocks"] + 1))
        for before, b in itertools.pairwise(b for b in blocks if b["hash"]):
            assert b["parent"] == before["hash"]
        digits = min(16, params["hash_bits"] // 4)
        assert all(len(b["hash"]) == (0 if b["state"] == "partial" else digits) for b in blocks)
        if params["hash_bits"] >= 64:  # with less, a table may even hold a block twice
            assert not any(b["wrong"] for b in blocks)
            assert len({b["block"] for b in blocks}) == len(blocks) and all(b["owners"] == 1 for b in blocks)
        assert all(b["state"] == "hit" for b in blocks if b["wrong"])


def shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_every_state_of_the_widget():
    names = list(page.CHOICES)
    for values in itertools.product(*page.CHOICES.values()):
        params = page.WIDGET_DEFAULT | dict(zip(names, values))
        trace = page.simulate(params)
        check_trace(trace, params)
        a, b, _ = trace["sends"]
        if params["hash_bits"] == 256 and params["pool_blocks"] == 64:
            known = 0 if params["salt"] else shared(a["text"], b["text"])
            size = params["block_size"]
            assert b["cached"] == min(known, len(b["text"]) - 1) // size * size


def test_typed_text():
    rng = random.Random(0)
    alphabet = [chr(c) for c in range(32, 127)]
    for _ in range(200):
        params = {name: rng.choice(choices) for name, choices in page.CHOICES.items()}
        params |= {f"suffix_{x}": "".join(rng.choices(alphabet, k=rng.randrange(49))) for x in "ab"}
        check_trace(page.simulate(params), params)


def test_the_break_it_preset_serves_the_wrong_text():
    trace = page.simulate(page.WIDGET_DEFAULT | page.BREAK_IT)
    wrong = [b for b in trace["sends"][1]["blocks"] if b["wrong"]]
    assert wrong and all(b["holds"] != b["text"] for b in wrong)
    assert "WRONG" in page.describe(trace)
    longer = page.simulate(page.WIDGET_DEFAULT | page.BREAK_IT | {"hash_bits": 256})
    assert not any(b["wrong"] for sent in longer["sends"] for b in sent["blocks"])


@pytest.mark.parametrize(
    "params",
    [{}, {"block_size": 5}, {"hash_bits": 8.0}, {"salt": None}, {"suffix_a": "x" * 49}, {"suffix_b": "ü"},
     {"edit": ["none"]}, {"pool_blocks": True}, {"more": 1}],
)  # fmt: skip
def test_wrong_parameters_are_named(params):
    wrong = page.WIDGET_DEFAULT | params if params else {}
    with pytest.raises(common.InputError, match=next(iter(params), "missing")):
        page.simulate(wrong)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[: (request.num_tokens - 1) // self.block_size]", "[: request.num_tokens // self.block_size]"),
        ("in reversed(self.tables.pop(", "in (self.tables.pop("),
        ("self.free_queue.popitem(last=False)", "self.free_queue.popitem(last=True)"),
        ("if self.block_hash[block] is None:  # nobody", "if False:  # nobody"),
        ('("cache_salt", request.cache_salt),) if request.cache_salt and not hashes', "(),) if False"),
        ("parent = hashes[-1] if hashes else ROOT_HASH", "parent = ROOT_HASH"),
        ("self.index[key][0]", "self.index[key][-1]"),
    ],
)
def test_a_broken_class_breaks_the_simulation(monkeypatch, old, new):
    changes = ({"pool_blocks": 8}, {"suffix_a": "", "suffix_b": "", "salt": "b"}, {"suffix_b": ""})
    states = [page.WIDGET_DEFAULT | each for each in changes]
    right = [page.simulate(params) for params in states]
    break_class(monkeypatch, lesson.PrefixCache, old, new)
    assert [page.simulate(params) for params in states] != right


# --- The catalog on the command line --------------------------------------------------------------------------------


def test_the_catalog_has_the_facts_and_every_tour():
    f = page.facts()
    c, entries = f["catalog"], lesson.catalog()
    assert list(entries) == ["prefix caching", "CUDA graphs", "torch.compile", "async scheduling", "prompt lookup",
                             "tensor parallelism", "quantized weights", "quantized KV cache"]  # fmt: skip
    assert f"{f['source']['skipped']:.0%} of 2,000 + 105" in entries["prefix caching"]
    assert f"{f['graphs']['llama_3_1_8b']['total']} -> 1" in entries["CUDA graphs"]
    assert f"{c['weights'] / 1e9:.1f} -> {c['weights'] / 2e9:.1f} GB on 2" in entries["tensor parallelism"]
    assert f"{c['all_reduces']} all-reduces" in entries["tensor parallelism"]
    assert f"{c['read'] / 1e9:.1f} -> {c['read_int4'] / 1e9:.1f} GB" in entries["quantized weights"]
    assert f"{c['kv_bytes']:,} -> {c['kv_bytes'] // 2:,} bytes" in entries["quantized KV cache"]
    tours = [re.search(r"tour (\w+)$", text) for text in entries.values()]
    for found in filter(None, tours):
        assert [*common.HERE.glob(f"tours/{found[1]}_*.py")]
    assert sum(map(bool, tours)) == 3


@pytest.mark.parametrize(("argv", "tokens"), [
    ([], 1024), (["--bench"], 2112), (["--hash-bits", "8"], 1024),
])  # fmt: skip
def test_an_entry_takes_the_context_that_it_uses(monkeypatch, argv, tokens):
    """Most models of before 2024 have 2,048; only the prompts of 2,000 + 105 do not fit there."""
    taken = []
    monkeypatch.setattr(lesson.loader, "check_context", lambda path, n: taken.append(n))
    monkeypatch.setattr(common, "heading", lambda text: pytest.exit(text))
    with pytest.raises(pytest.exit.Exception):
        lesson.main(argv)
    assert taken == [tokens]


@pytest.mark.parametrize("arguments", [["--hash-bits", "7"], ["--host-ms", "-1"]])
def test_bad_values_are_one_line(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        lesson.build_parser().parse_args(arguments)
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_without_the_cache_nothing_is_indexed_in_decode_steps_either(tiny_model):
    core = core_of(tiny_model, caching=False)
    core.add_request(greedy(tokens_of(1, 20), 30))
    while core.scheduler.has_unfinished_requests():
        core.step()
        assert not core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block


@pytest.mark.parametrize("kind", list(lesson.LOOPS))
def test_the_worker_forgets_who_has_gone(tiny_model, kind):
    core, worker = page.make_loop(kind, tiny_model)
    page.run_loop(kind, core, [greedy(PROMPTS[0], n, str(n)) for n in (1, 2, 20)])
    core.remote.executor.shutdown()
    assert worker.requests.keys() | worker.block_ids.keys() <= {"20"}, "the last one was not followed by a plan"


def test_waste_is_counted_per_token():
    """Five that stop in one step: the next one was planned for all of them."""
    assert lesson.on_a_clock("async", [3] * 5)["wasted"] == 5

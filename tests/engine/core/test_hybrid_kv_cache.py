"""The hybrid KV cache: as vLLM 0.32 decides, nothing leaked, and no layer reads what has been freed."""

from __future__ import annotations

import common

import collections
import json

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine import kv_cache_interface as interface
from engine.attention.windowed import WindowedAttention
from engine.core import hybrid_kv_cache as part
from engine.model import llama
from engine.request import Request, SamplingParams
from engine.worker.input_batch import InputBatch
from lab.hybrid_kv_cache import layer_specs

RECORDED = sorted((common.ROOT / "tests" / "golden" / "hybrid").glob("*.json"))


def spec(window, block_size=4, num_kv_heads=1):
    shape = {"block_size": block_size, "num_kv_heads": num_kv_heads, "head_size": 1}
    return (
        interface.SlidingWindowSpec(**shape, sliding_window=window) if window else interface.FullAttentionSpec(**shape)
    )


def groups_of(*windows, block_size=4):
    """A group of one layer for each window; 0 sees everything."""
    return [interface.KVCacheGroup((i,), spec(window, block_size)) for i, window in enumerate(windows)]


def request_of(tokens, name="r"):
    return Request(name, list(tokens), SamplingParams(max_tokens=1000))


# --- As the real vLLM -----------------------------------------------------------------------------------------------


def replay(workload):
    """What our classes decide, in the format of `record_hybrid.py`, up to the names of what it cannot know."""
    layers = [spec(layer["window"], workload["block_size"], layer["num_kv_heads"]) for layer in workload["layers"]]
    groups = interface.get_kv_cache_groups(layers)
    manager = part.HybridKVCacheManager(workload["num_blocks"], groups, workload["max_model_len"],
                                        workload["enable_caching"], workload["max_in_flight_tokens"])  # fmt: skip
    alive, steps = {}, []
    for op in workload["ops"]:
        name, step, new = op["id"], {}, None
        if op["op"] == "admit":
            request = request_of(op["prompt"], name)
            hits, request.num_computed_tokens = manager.get_computed_blocks(request)
            step["hit"], step["hit_blocks"] = request.num_computed_tokens, [list(table) for table in hits]
            n = min(op["tokens"], request.num_tokens - request.num_computed_tokens)
            new = manager.allocate_slots(request, n, hits, full_sequence_must_fit=op["whole"])
            if new is not None:
                alive[name] = request
                request.num_computed_tokens += n
        elif name in alive and op["op"] == "go":
            request = alive[name]
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_id(request.num_tokens % 2)
            n = min(op["tokens"], request.num_tokens - request.num_computed_tokens)
            new = manager.allocate_slots(request, n)
            request.num_computed_tokens += n if new is not None else 0
        elif name in alive:
            manager.free(alive.pop(name))
        step["new"] = new
        step["tables"] = [list(table) for table in manager.get_block_ids(name)] if name in alive else None
        step["free"] = list(manager.block_pool.free_queue)
        steps.append(step)
        manager.block_pool.check()
    return [{"layers": list(g.layers), "block_size": g.spec.block_size} for g in groups], steps


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_step_is_vllms(path):
    recorded = json.loads(path.read_text())
    groups, steps = replay(recorded["workload"])
    assert groups == recorded["groups"]
    for i, (ours, theirs) in enumerate(zip(steps, recorded["steps"], strict=True)):
        assert ours == theirs, f"step {i}: {recorded['workload']['ops'][i]}"


def test_recordings_meet_the_rules():
    """Several kinds and block sizes, hits behind a freed prefix, refusals, admission by the whole length."""
    all_of = [json.loads(path.read_text()) for path in RECORDED]
    assert len(all_of) == 5
    steps = [step for recorded in all_of for step in recorded["steps"]]
    assert any(len({group["block_size"] for group in recorded["groups"]}) > 1 for recorded in all_of)
    assert sum(0 in table for step in steps for table in step.get("hit_blocks", ())) > 10
    ops = [op for recorded in all_of for op in recorded["workload"]["ops"]]
    assert any(op.get("whole") and step["new"] is None for op, step in zip(ops, steps, strict=True))


# --- Specs and groups -----------------------------------------------------------------------------------------------


def test_groups_have_equally_many_layers_and_equal_bytes():
    gemma = interface.get_kv_cache_groups(layer_specs("Gemma-3-4B"))
    assert [len(group.layers) for group in gemma] == [5, 5, 5, 5, 5, 4, 5]
    assert sorted(layer for group in gemma for layer in group.layers) == list(range(34))
    assert gemma[-1].layers == (5, 11, 17, 23, 29) and isinstance(gemma[-1].spec, interface.FullAttentionSpec)
    almost = interface.get_kv_cache_groups([spec(0)] * 13 + [spec(8)] * 12)  # not 12 and 12 and a single layer
    assert [len(group.layers) for group in almost] == [13, 12]
    for full, count in ((20, 2), (21, 2), (19, 3)):  # 29 are 1.45, 1.38 and 1.53 times as many
        assert len(interface.get_kv_cache_groups([spec(0)] * full + [spec(8)] * 29)) == count
    mixed = interface.get_kv_cache_groups([spec(0, num_kv_heads=4), spec(8, num_kv_heads=2)])
    assert [group.spec.block_size for group in mixed] == [4, 8]
    assert len({group.spec.page_size_bytes for group in mixed}) == 1
    with pytest.raises(common.InputError, match="a page of 32 bytes does not divide one of 48"):
        interface.get_kv_cache_groups([spec(0, num_kv_heads=3), spec(8, num_kv_heads=2)])


# --- Hits -----------------------------------------------------------------------------------------------------------


def test_a_run_that_a_hole_ends_is_no_hit():
    """Blocks 0, 1 and 5, 6, 7 are there, and the window needs three: what lies before a hole does not count."""
    manager = part.HybridKVCacheManager(20, groups_of(10), 99)
    first = request_of(range(33))
    manager.allocate_slots(first, 33)
    table = manager.get_block_ids("r")[0]
    for block in table[2:5]:
        manager.block_pool.evict(block)
    long, short = request_of(range(33), "s"), request_of(range(32), "t")
    assert manager.get_computed_blocks(long) == ([[0, 0, 0, 0, 0, *table[5:8]]], 32)
    assert manager.get_computed_blocks(short) == ([table[:2]], 8), "two blocks from the start are all there is to see"
    (only,) = manager.managers  # and says so at once
    assert only.find_longest_cache_hit([only], short.block_hashes, 31) == ([table[:2]], 8)


def test_every_group_of_a_kind_must_have_the_block():
    manager = part.HybridKVCacheManager(20, groups_of(6, 6, 0), 99)
    first = request_of(range(13))
    manager.allocate_slots(first, 13)
    assert manager.get_computed_blocks(request_of(range(13), "s"))[1] == 12
    manager.block_pool.evict(manager.get_block_ids("r")[1][2])
    tables, tokens = manager.get_computed_blocks(request_of(range(13), "s"))
    assert tokens == 8 and [len(table) for table in tables] == [2, 2, 2], "all groups begin at the same token"


def test_kinds_are_asked_again():
    """The wide window has a hit of 16 tokens and the narrow one of 12; at 12, the wide one lacks a block: 4."""
    manager = part.HybridKVCacheManager(30, groups_of(9, 5), 99)
    manager.allocate_slots(request_of(range(17)), 17)
    wide, narrow = manager.get_block_ids("r")
    for block in (wide[1], narrow[3]):
        manager.block_pool.evict(block)
    tables, tokens = manager.get_computed_blocks(request_of(range(17), "s"))
    assert (tables, tokens) == ([wide[:1], narrow[:1]], 4)


def test_what_no_model_run_has_kept_is_not_hit():
    """Every group takes its promises back, from the block of the first token on that was not computed."""
    manager = part.HybridKVCacheManager(20, groups_of(0, 8), 64, True, 64)
    request, again = request_of(range(18)), request_of([*range(18), 5], "again")
    assert manager.allocate_slots(request, 18) is not None
    assert manager.get_computed_blocks(again)[1] == 16
    manager.evict_uncomputed(request, 10)
    assert manager.get_computed_blocks(again)[1] == 8
    manager.block_pool.check()


def test_a_hit_is_whole_blocks_of_every_size():
    """Blocks of 4 and of 6 tokens: a hit is a multiple of 12, and a request has a hash for every 2 tokens."""
    groups = [
        interface.KVCacheGroup((i,), spec(window, size)) for i, (window, size) in enumerate(((0, 4), (0, 6), (5, 6)))
    ]
    manager = part.HybridKVCacheManager(40, groups, 99)
    first = request_of(range(30))
    manager.allocate_slots(first, 30)
    full, large, window = manager.get_block_ids("r")
    known = manager.block_pool.cached_block_hash_to_block
    assert (len(first.block_hashes), len(known)) == (15, 6 + 4 + 2), "of the window, what 12 and 24 tokens end with"
    assert manager.get_computed_blocks(request_of(range(30), "s")) == ([full[:6], large[:4], [0, 0, 0, window[3]]], 24)
    assert manager.get_computed_blocks(request_of([*range(20), *range(9)], "t"))[1] == 12


def test_who_may_not_read_the_cache_finds_nothing():
    manager = part.HybridKVCacheManager(20, groups_of(5, 0), 99)
    manager.allocate_slots(request_of(range(13)), 13)
    params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    assert manager.get_computed_blocks(Request("s", list(range(13)), params)) == ([[], []], 0)
    assert manager.get_computed_blocks(request_of(range(13), "t"))[1] == 12


def test_without_a_prefix_cache_nothing_is_indexed():
    manager = part.HybridKVCacheManager(20, groups_of(5, 0), 99, enable_caching=False)
    request = request_of(range(13))
    manager.allocate_slots(request, 13)
    assert not manager.block_pool.cached_block_hash_to_block and not request.block_hashes


def test_guesses_get_a_place_and_no_name():
    """Lesson 07's drafts lie behind the known tokens: nobody may find them, and none lies behind max_model_len."""
    manager = part.HybridKVCacheManager(20, groups_of(5, 0), 14)
    request = request_of(range(7))
    assert [len(blocks) for blocks in manager.allocate_slots(request, 7 + 2)] == [3, 3]
    assert len(manager.block_pool.cached_block_hash_to_block) == 2, "the first block of each group"
    request.num_computed_tokens = 7
    assert [len(blocks) for blocks in manager.allocate_slots(request, 10)] == [1, 1], "14 tokens are 4 blocks"


def test_a_long_hit_of_one_group_does_not_pay_for_another():
    """Ten blocks found, nine of them null; a window is charged for three at most, and never for less than none."""
    window, full = part.HybridKVCacheManager(40, groups_of(5, 0), 99, max_in_flight_tokens=4).managers
    assert window.spec.max_blocks(41, 4) == 3  # 4 + 4 tokens, exactly two blocks, and one
    assert window.get_num_blocks_to_allocate("r", 41, [0] * 9 + [7], admission=True) == 1  # which nobody owns
    assert full.get_num_blocks_to_allocate("r", 41, [1] * 10, admission=True) == 10 + 1


# --- Any order of events --------------------------------------------------------------------------------------------


class HybridMachine(RuleBasedStateMachine):
    """Requests come, grow and leave. Memory is modelled: each block knows which group's keys of which prefix it has."""

    @initialize(num_blocks=st.integers(4, 40), sizes=st.lists(st.sampled_from([2, 4]), min_size=3, max_size=3),
                windows=st.lists(st.sampled_from([0, 2, 3, 6, 9]), min_size=1, max_size=3),
                caching=st.sampled_from([True, True, False]))  # fmt: skip
    def start(self, num_blocks, sizes, windows, caching):
        self.groups = [interface.KVCacheGroup((i,), spec(w, size)) for i, (w, size) in enumerate(zip(windows, sizes))]
        self.manager = part.HybridKVCacheManager(num_blocks, self.groups, 80, caching)
        self.windows = windows
        self.alive, self.count, self.content = {}, 0, {}

    def content_of(self, group, tokens, i):
        size = self.groups[group].spec.block_size
        return group, tuple(tokens[: (i + 1) * size])

    def visible(self, group, computed):
        """Blocks that the next query reads, if not written by itself."""
        first = max(0, computed - self.windows[group] + 1) if self.windows[group] else 0
        size = self.groups[group].spec.block_size
        return range(first // size, -(-computed // size))

    def needed(self, request, length):
        """(group, key) of all blocks that a hit of `length` tokens takes."""
        for g, manager in enumerate(self.manager.managers):
            for i in self.visible(g, length):
                yield manager.key(request.block_hashes, i)

    def compute(self, request, n, hits=()):
        """Allocate and run: true if there was room. The other tables are left alone, and nobody is half served."""
        before = {name: self.manager.get_block_ids(name) for name in self.alive}
        others = {name: [list(t) for t in tables] for name, tables in before.items() if name != request.request_id}
        lengths = [len(table) for table in self.manager.get_block_ids(request.request_id)]
        new = self.manager.allocate_slots(request, n, hits)
        assert {name: self.manager.get_block_ids(name) for name in others} == others
        tables = self.manager.get_block_ids(request.request_id)
        if new is None:
            assert [len(table) for table in tables] == lengths
            return False
        for g, table in enumerate(tables):
            size = self.groups[g].spec.block_size
            end = request.num_computed_tokens + n
            assert len(table) == -(-end // size)
            for i in range(request.num_computed_tokens // size, len(table)):
                assert table[i] != part.NULL_BLOCK
                self.content[table[i]] = self.content_of(g, request.all_token_ids[:end], i)
            dead = (request.num_computed_tokens - self.windows[g] + 1) // size if self.windows[g] else 0
            assert not any(table[: max(0, dead)]), "a block out of the window is still held"
        request.num_computed_tokens += n
        return True

    @rule(data=st.data())
    def admit(self, data):
        prompt = [0] * data.draw(st.integers(1, 30)) + data.draw(st.lists(st.integers(0, 1), max_size=4))
        request = request_of(prompt, f"r{self.count}")
        self.count += 1
        tables, length = self.manager.get_computed_blocks(request)
        assert length < request.num_tokens
        for g, table in enumerate(tables):
            for i in self.visible(g, length):
                assert self.content[table[i]] == self.content_of(g, prompt, i), "a hit of somebody else's keys"
        if self.manager.enable_caching:
            known = self.manager.block_pool.cached_block_hash_to_block
            lengths = range(0, request.num_tokens, self.manager.alignment)
            assert length == max(n for n in lengths if all(key in known for key in self.needed(request, n)))
        request.num_computed_tokens = length
        if self.compute(request, data.draw(st.integers(1, request.num_tokens - length)), tables):
            self.alive[request.request_id] = request

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def go_on(self, data):
        request = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_id(data.draw(st.integers(0, 1)))
        room = min(request.num_tokens, 60) - request.num_computed_tokens
        if room > 0:
            self.compute(request, data.draw(st.integers(1, room)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data):
        self.manager.free(self.alive.pop(data.draw(st.sampled_from(sorted(self.alive)))))

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "manager"):
            return
        pool, owners = self.manager.block_pool, collections.Counter()
        pool.check()
        assert pool.block_hash[part.NULL_BLOCK] is None
        for name, request in self.alive.items():
            for g, table in enumerate(self.manager.get_block_ids(name)):
                owners.update(block for block in table if block != part.NULL_BLOCK)
                for i in self.visible(g, request.num_computed_tokens):
                    assert self.content[table[i]] == self.content_of(
                        g, request.all_token_ids[: request.num_computed_tokens], i
                    ), "overwritten"
        assert pool.ref_count == [owners[block] for block in range(pool.num_blocks)]
        assert pool.num_free_blocks + len(owners) == pool.num_blocks - 1

    def teardown(self):
        for request in getattr(self, "alive", {}).values():
            self.manager.free(request)
        if hasattr(self, "manager"):
            assert self.manager.block_pool.num_free_blocks == self.manager.block_pool.num_blocks - 1
            assert not any(m.req_to_blocks or m.num_cached_block for m in self.manager.managers)


TestHybrid = HybridMachine.TestCase
TestHybrid.settings = settings(max_examples=50, stateful_step_count=20)


# --- Attention ------------------------------------------------------------------------------------------------------


def dense(windows):
    """`attend` of a whole sequence without a cache, each layer with its own mask."""

    def attend(layer, q, k, v):
        T, G = len(q), q.shape[1] // k.shape[1]
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        if windows[layer]:
            mask = mask.triu(1 - windows[layer])
        k, v = (x.repeat_interleave(G, 1).transpose(0, 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, mask).transpose(0, 1)

    return attend


@pytest.mark.parametrize("windows", [(5, 0, 5, 5, 0, 5), (0, 9, 3), (4, 4)], ids=str)
@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "prefix cache"])
def test_the_model_reads_what_its_windows_need_and_nothing_freed(windows, caching):
    """Three requests, in chunks, then token by token. Before every pass, whatever may be reused holds NaN."""
    sizes = {"num_hidden_layers": len(windows), "sliding_windows": tuple(window or None for window in windows)}
    model = llama.random_model(**sizes)
    groups = interface.get_kv_cache_groups([spec(window) for window in windows])
    manager = part.HybridKVCacheManager(60, groups, 99, caching)
    attention, batch = WindowedAttention([group.layers for group in groups]), InputBatch(3, 99, 4, len(groups))
    pool, cache = manager.block_pool, attention.make_cache(model, 60, 4)
    memories = {memory.data_ptr(): memory for memory in cache.layers}.values()
    assert len(memories) == max(len(group.layers) for group in groups), "groups share memory"
    for memory in memories:
        memory[:, 1:] = torch.nan
    tokens = torch.randint(128, (3, 28), generator=torch.Generator().manual_seed(1))
    tokens[1:, :22] = tokens[0, :22]  # a prefix in common
    requests, freed = [request_of(row.tolist(), f"r{i}") for i, row in enumerate(tokens)], 0
    for r, request in enumerate(requests):
        batch.add(request.request_id)
        hits, request.num_computed_tokens = manager.get_computed_blocks(request)
        assert request.num_computed_tokens == (20 if caching and r else 0)
        for chunk in (7, 1, 6, *[1] * 28):
            start, n = request.num_computed_tokens, min(chunk, 28 - request.num_computed_tokens)
            if n == 0:
                break
            assert manager.allocate_slots(request, n, hits) is not None
            hits = ()
            gone = [b for b in range(60) if not pool.ref_count[b] and pool.block_hash[b] is None]
            for memory in memories:
                memory[:, gone[1:]] = torch.nan  # but the null block, which holds zeros
            tables = manager.get_block_ids(request.request_id)
            freed += sum(table.count(part.NULL_BLOCK) for table in tables)
            ids, positions = tokens[r, : start + n].to(model.device), torch.arange(start + n, device=model.device)
            row = batch.update(request, manager.req_to_blocks[request.request_id])
            step, meta = batch.prepare([row], [n], [start + n], model.device)
            assert step.tolist() == ids[start:].tolist() and meta.block_table.shape[2] == len(groups)
            hidden = model.forward(step, meta.positions, attention.plan(meta, cache))
            whole = model.forward(ids, positions, dense(windows))
            torch.testing.assert_close(hidden, whole[start:], rtol=1e-4, atol=1e-5)
            request.num_computed_tokens += n
        if r % 2:
            manager.free(request)
    assert freed, "no window was ever left"

"""Lesson 02: the pool and its invariants, every kernel against the slot-by-slot reference, sharing, allocators."""

from __future__ import annotations

import common

import collections
import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode

from engine import registry
from engine.attention import torch_paged as torch_attention
from engine.core.kv_cache_manager import KVCacheManager
from engine.model import folders, loader
from engine.model.tokenizer import Tokenizer
from engine.request import Request, SamplingParams
from lab import cli, lengths, naive, recorded, timing
from support.close import assert_close

lesson = registry.lesson("02_paged_attention")
page = cli.numbers("02_paged_attention")
BlockPool, BlockTable, OutOfBlocks = lesson.BlockPool, lesson.BlockTable, lesson.OutOfBlocks


# --- The pool -------------------------------------------------------------------------------------------------------


def test_blocks_leave_from_the_front_and_come_back_to_it_tail_first():
    pool = BlockPool(10)
    table = pool.allocate(4)
    assert table == [1, 2, 3, 4] and pool.allocate(3) == [5, 6, 7] and list(pool.free_queue) == [8, 9]
    pool.free(table)
    assert list(pool.free_queue) == [4, 3, 2, 1, 8, 9]  # vLLM 0.32's order for blocks without an index entry
    assert pool.allocate(2) == [4, 3] and pool.num_free_blocks == 4
    pool.check()


def test_free_in_part_keeps_what_others_hold():
    pool = BlockPool(6)
    table = pool.allocate(3)
    pool.touch(table[:2])
    pool.free(table)
    assert list(pool.free_queue) == [3, 4, 5] and pool.ref_count[:4] == [0, 1, 1, 0]
    pool.free(table[:2])
    assert list(pool.free_queue) == [2, 1, 3, 4, 5]


def test_touch_takes_a_free_block_out_of_the_middle():
    pool = BlockPool(6)
    pool.touch([3, 3])
    assert list(pool.free_queue) == [1, 2, 4, 5] and pool.ref_count[3] == 2
    pool.check()


@pytest.mark.parametrize("blocks", [[0], [-1], [6], [5], [1, 1], [2, 1, 5]])
def test_a_wrong_free_changes_nothing(blocks):
    pool = BlockPool(6)
    pool.allocate(2)
    before = list(pool.free_queue), list(pool.ref_count)
    with pytest.raises(ValueError):
        pool.free(blocks)
    assert (list(pool.free_queue), pool.ref_count) == before


@pytest.mark.parametrize("blocks", [[0], [1, -1], [1, 6]])
def test_a_wrong_touch_changes_nothing(blocks):
    pool = BlockPool(6)
    before = list(pool.free_queue), list(pool.ref_count)
    with pytest.raises(ValueError):
        pool.touch(blocks)
    assert (list(pool.free_queue), pool.ref_count) == before


def test_too_many_blocks_change_nothing():
    pool = BlockPool(4)
    table = BlockTable(pool, 8)
    table.append(8)
    with pytest.raises(OutOfBlocks):
        table.append(17)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    assert (table.blocks, table.num_tokens, list(pool.free_queue)) == ([1], 8, [2, 3])
    for n in (1, 0, -3):
        with pytest.raises(common.InputError, match="num_blocks"):
            BlockPool(n)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pool: pool.free_queue.pop(3),  # lost
        lambda pool: pool.free_queue.__setitem__(1, None),  # owned and free
        lambda pool: pool.ref_count.__setitem__(1, -1),
        lambda pool: pool.ref_count.__setitem__(0, 1),
        lambda pool: pool.ref_count.__setitem__(1, 0),
    ],
)
def test_check_finds_corruption(corrupt):
    pool = BlockPool(6)
    pool.allocate(2)
    pool.check()
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_pool_is_linear():
    """Freeing walks the table, not the pool: a million-block pool costs what a small one does."""
    pool = BlockPool(1_000_000)
    steps = 0

    class Counting(list):
        def __getitem__(self, i):
            nonlocal steps
            steps += 1
            return super().__getitem__(i)

    class Queue(collections.OrderedDict):
        def __iter__(self):
            raise AssertionError("somebody walks the whole queue")

    pool.ref_count, pool.free_queue = Counting(pool.ref_count), Queue.fromkeys(pool.free_queue)
    pool.free(pool.allocate(100))
    assert steps <= 500 and pool.num_free_blocks == 999_999


# --- Block tables, fork, copy-on-write ------------------------------------------------------------------------------


def test_append_takes_a_block_only_when_the_last_is_full():
    pool = BlockPool(10)
    table = BlockTable(pool, 4)
    sizes = []
    for _ in range(9):
        assert table.append(1) == []
        sizes.append(len(table.blocks))
    assert sizes == [1, 1, 1, 1, 2, 2, 2, 2, 3] and table.capacity == 12
    assert table.append(0) == [] and table.num_tokens == 9


def test_copy_on_write_copies_for_the_first_writer_only():
    pool = BlockPool(10)
    parent = BlockTable(pool, 4)
    parent.append(6)
    children = [parent.fork(), parent.fork()]
    assert pool.ref_count[1:3] == [3, 3] and pool.num_free_blocks == 7
    assert children[1].append(0) == [] and children[1].blocks == [1, 2]  # nothing to write: nothing to copy
    assert parent.append(1) == [(2, 3)] and parent.blocks == [1, 3]
    assert children[0].append(1) == [(2, 4)] and children[0].blocks == [1, 4]
    assert children[1].append(1) == [] and children[1].blocks == [1, 2]  # the last owner writes in place
    assert pool.ref_count[1:5] == [3, 1, 1, 1]


def test_a_fork_at_a_block_boundary_copies_nothing():
    pool = BlockPool(10)
    parent = BlockTable(pool, 4)
    parent.append(8)
    child = parent.fork()
    assert parent.append(1) == [] and child.append(1) == [] and parent.blocks[2] != child.blocks[2]
    child.free(), parent.free()
    assert pool.num_free_blocks == 9 and child.blocks == [] and child.num_tokens == 0


def test_copy_on_write_without_room_changes_nothing():
    pool = BlockPool(2)
    parent = BlockTable(pool, 4)
    parent.append(3)
    child = parent.fork()
    with pytest.raises(OutOfBlocks):
        child.append(1)
    assert child.blocks == [1] and child.num_tokens == 3 and pool.ref_count[1] == 2


class Sequences(RuleBasedStateMachine):
    """Sequences that append, fork and finish, with their content written into a pretend memory: after every step each
    one still reads what it wrote, whoever shares its blocks."""

    @initialize(num_blocks=st.integers(2, 14), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.pool, self.size = BlockPool(num_blocks), block_size
        self.memory = [[None] * block_size for _ in range(num_blocks)]
        self.live, self.texts, self.clock = [], [], 0

    def write(self, i, n):
        table, text = self.live[i], self.texts[i]
        before = (list(table.blocks), table.num_tokens, list(self.pool.free_queue), list(self.pool.ref_count))
        try:
            copies = table.append(n)
        except OutOfBlocks:
            after = (list(table.blocks), table.num_tokens, list(self.pool.free_queue), list(self.pool.ref_count))
            assert before == after
            return
        assert not {source for source, _ in copies} & {target for _, target in copies}
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for p in range(table.num_tokens - n, table.num_tokens):
            block = table.blocks[p // self.size]
            assert self.pool.ref_count[block] == 1, "two writers"
            self.clock += 1
            self.memory[block][p % self.size] = self.clock
            text.append(self.clock)

    @rule(n=st.integers(1, 9))
    def arrive(self, n):
        self.live.append(BlockTable(self.pool, self.size))
        self.texts.append([])
        self.write(-1, n)

    @precondition(lambda self: self.live)
    @rule(i=st.integers(0, 99), n=st.integers(0, 6))
    def append(self, i, n):
        self.write(i % len(self.live), n)

    @precondition(lambda self: self.live)
    @rule(i=st.integers(0, 99))
    def fork(self, i):
        i %= len(self.live)
        self.live.append(self.live[i].fork())
        self.texts.append(list(self.texts[i]))

    @precondition(lambda self: self.live)
    @rule(i=st.integers(0, 99))
    def finish(self, i):
        i %= len(self.live)
        self.live.pop(i).free()
        self.texts.pop(i)

    @invariant()
    def conserved(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        owners = [0] * self.pool.num_blocks
        for table in self.live:
            assert len(set(table.blocks)) == len(table.blocks)
            assert 0 <= table.capacity - table.num_tokens < self.size
            for block in table.blocks:
                owners[block] += 1
        assert owners == self.pool.ref_count
        assert self.pool.num_free_blocks + sum(n > 0 for n in owners) == self.pool.num_blocks - 1

    @invariant()
    def everyone_reads_what_it_wrote(self):
        for table, text in zip(getattr(self, "live", []), getattr(self, "texts", [])):
            assert [self.memory[table.blocks[p // self.size]][p % self.size] for p in range(len(text))] == text

    def teardown(self):
        for table in getattr(self, "live", []):
            table.free()
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.num_free_blocks == self.pool.num_blocks - 1


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- The pool and the tables, and the engine's ----------------------------------------------------------------------


class Twins(RuleBasedStateMachine):
    """This lesson's pool and tables beside the engine's block pool and KV cache manager, nothing cached: the same
    requests come, grow, share and go, and both hand out the same ids in the same order, or both refuse."""

    @initialize(num_blocks=st.integers(2, 14), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.pool, self.size = BlockPool(num_blocks), block_size
        self.manager = KVCacheManager(num_blocks, block_size, 10**6, enable_caching=False)
        self.live, self.shared, self.count = [], [], 0

    def grow(self, table, request, n):
        if table.blocks and self.pool.ref_count[table.blocks[-1]] > 1:
            return  # it might be copied on write; the engine shares full blocks only
        try:
            assert table.append(n) == []
        except OutOfBlocks:
            assert self.manager.allocate_slots(request, n) is None
            return
        had = list(self.manager.req_to_blocks.get(request.request_id, []))
        assert [*had, *self.manager.allocate_slots(request, n)] == table.blocks
        request.num_computed_tokens += n

    @rule(n=st.integers(1, 9))
    def arrive(self, n):
        request = Request(str(self.count), [1] * n, SamplingParams())
        self.count += 1
        self.live.append((BlockTable(self.pool, self.size), request))
        self.grow(*self.live[-1], n)

    @precondition(lambda self: self.live)
    @rule(i=st.integers(0, 99), n=st.integers(0, 6))
    def append(self, i, n):
        self.grow(*self.live[i % len(self.live)], n)

    @precondition(lambda self: self.live)
    @rule(i=st.integers(0, 99))
    def finish(self, i):
        table, request = self.live.pop(i % len(self.live))
        table.free()
        self.manager.free(request)

    @rule(blocks=st.lists(st.integers(-1, 14), max_size=4, unique=True))
    def share(self, blocks):
        """One more owner: of used blocks, and of free ones, from the middle of the queue."""
        self.both("touch", blocks)

    @rule(blocks=st.lists(st.integers(-1, 14), max_size=4, unique=True))
    def give_back(self, blocks):
        """What `share` took; or what has no owner, which both refuse."""
        owned = all(0 < block < self.pool.num_blocks and self.pool.ref_count[block] for block in blocks)
        if not owned or set(blocks) <= set(self.shared):
            self.both("free", blocks)

    def both(self, what, blocks):
        engine = self.manager.block_pool
        try:
            getattr(engine, what)(blocks)
        except ValueError:
            with pytest.raises(ValueError):
                getattr(self.pool, what)(blocks)
            return
        getattr(self.pool, what)(blocks)
        for block in blocks:
            self.shared.append(block) if what == "touch" else self.shared.remove(block)

    @invariant()
    def same(self):
        if hasattr(self, "pool"):
            engine = self.manager.block_pool
            assert list(self.pool.free_queue) == list(engine.free_queue) and self.pool.ref_count == engine.ref_count
            assert self.pool.num_free_blocks == engine.num_free_blocks
            for table, request in self.live:
                assert table.blocks == self.manager.req_to_blocks.get(request.request_id, [])


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


# --- The kernels ----------------------------------------------------------------------------------------------------


def lens_around(block_size):
    return [1, block_size - 1, 0, block_size, block_size + 1, 2 * block_size + 3]


def fp64_case(seq_lens, block_size, Hq, Hkv, D, dtype):
    case = lesson.random_case(seq_lens, block_size, Hq, Hkv, D, dtype)
    return case, lesson.paged_decode_reference(*case)


def guard(case, guarded):
    """The same case between guard values. Padding of the table is poison, and so is the null block: for the kernel."""
    q, kv_cache, table, lens = case
    table = table.clone()
    for b, S in enumerate(lens.tolist()):
        table[b, -(-S // kv_cache.shape[2]) :] = torch.iinfo(torch.int32).max
    kv_cache = kv_cache.clone()
    kv_cache[:, 0] = torch.nan
    return guarded(q), guarded(kv_cache), guarded(table), guarded(lens)


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize(("num_splits", "Hkv"), [(1, 2), (4, 1)])
def test_paged_decode_kernel(kernels, guarded, dtype, block_size, num_splits, Hkv):
    if dtype is not torch.float32 and block_size == 64:
        pytest.skip("fp32 covers it; interpreter time")
    case, reference = fp64_case(lens_around(block_size), block_size, 3 * Hkv, Hkv, 64, dtype)
    before = lesson.paged_decode_kernel.launches, lesson.combine_splits_kernel.launches
    out = lesson.paged_decode(*guard(case, guarded), max_seq_len=2 * block_size + 3, num_splits=num_splits)
    assert out.dtype == dtype
    assert_close(out.cpu(), reference, dtype)
    assert lesson.paged_decode_kernel.launches == before[0] + 1
    assert lesson.combine_splits_kernel.launches == before[1] + (num_splits > 1)


def test_paged_decode_kernel_with_16_bits_as_they_are(kernels, guarded, half):
    test_paged_decode_kernel(kernels, guarded, half, block_size=16, num_splits=4, Hkv=1)


@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(1, 1, 16), (9, 3, 64), (4, 4, 32), (40, 2, 16), (5, 1, 24), (2, 2, 128)])
def test_paged_decode_kernel_shapes(kernels, guarded, Hq, Hkv, D):
    """One head, grouped, MHA, more than 16 query heads per KV head; head sizes from 16, one no power of two."""
    case, reference = fp64_case([5, 70], 8, Hq, Hkv, D, torch.float32)
    for num_splits in (1, 2):
        out = lesson.paged_decode(*guard(case, guarded), max_seq_len=70, num_splits=num_splits)
        assert_close(out.cpu(), reference)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("levels", [(0, 150, -150, 100, 149), (150, 0, -150, -150, -150), (-150, -100, -50, 0, 50)])
def test_scores_far_apart(kernels, num_splits, levels):
    """Scores near a level per tile, far past what exp can hold: the maximum and the rescale matter."""
    (q, kv_cache, table, lens), _ = fp64_case([64 * 5 - 9], 16, 1, 1, 64, torch.float32)
    q.zero_()[..., 0] = 8.0  # q·k / √64 is k's first element, exactly
    for p in range(int(lens[0])):
        kv_cache[0, table[0, p // 16], p % 16, 0, 0] = levels[p // 64] + torch.randint(-96, 96, ()) / 64
    reference = lesson.paged_decode_reference(q, kv_cache, table, lens)
    assert_close(lesson.paged_decode(q, kv_cache, table, lens, 311, num_splits).cpu(), reference)


def test_query_rows_may_be_strided(kernels):
    """q may be the first Hq heads of a packed qkv row."""
    (q, kv_cache, table, lens), reference = fp64_case([5, 20], 8, 4, 2, 32, torch.float32)
    packed = torch.randn(2, 4 + 2 + 2, 32, device=q.device)
    packed[:, :4] = q
    assert_close(lesson.paged_decode(packed[:, :4], kv_cache, table, lens, 20).cpu(), reference)


def test_splits_by_default(device):
    cases = {(3, 100): 1, (3, 512): 2, (8, 16384): 32, (1, 10**6): 64, (198, 4096): 2, (199, 4096): 1, (1, 1000): 2}
    assert {case: lesson.default_splits(*case, torch.device("cpu")) for case in cases} == cases


def test_empty_batch(kernels):
    (q, kv_cache, table, lens), _ = fp64_case([3], 8, 3, 1, 16, torch.float32)
    assert lesson.paged_decode(q[:0], kv_cache, table[:0], lens[:0], 0).shape == (0, 3, 16)
    lesson.reshape_and_cache(kv_cache[0, 0, :0], kv_cache[0, 0, :0], kv_cache, lens[:0].long())
    lesson.copy_blocks(kv_cache, torch.zeros(0, 2, dtype=torch.int64, device=q.device))


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_torch_path(device, dtype, block_size):
    if device.type == "cuda":
        pytest.skip("a GPU always runs the kernel")
    case, reference = fp64_case([*lens_around(block_size), 130, 0, 131], block_size, 6, 2, 64, dtype)
    assert_close(lesson.paged_decode(*case, max_seq_len=131), reference, dtype)
    q, kv_cache, table, lens = case
    assert lesson.paged_decode(q[:0], kv_cache, table[:0], lens[:0], 0).shape == (0, 6, 64)
    table = table.clone()  # whatever the padding of the table is, it is not read
    for b, S in enumerate(lens.tolist()):
        table[b, -(-S // block_size) :] = 10**6
    assert_close(lesson.paged_decode(q, kv_cache, table, lens, 131), reference, dtype)


@pytest.mark.parametrize("way", ["gathered", "in place"])
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(9, 3, 64), (4, 4, 24), (8, 1, 16)])
@pytest.mark.parametrize("dtype64", [False, True])
def test_both_ways_without_a_kernel(way, Hq, Hkv, D, dtype64):
    """One group of lengths or several, an empty sequence among them, NaN in every slot that holds no token; the same
    plan in two layers."""
    dtype = torch.float64 if dtype64 else torch.float32
    for lens in ([7, 5, 4], [5, 0, 6], [1, 40, 0, 9, 33, 16]):
        (q, kv_cache, table, S), reference = fp64_case(lens, 8, Hq, Hkv, D, dtype)
        q, kv_cache, table, S = (x.cpu() for x in (q, kv_cache, table, S))
        if way == "gathered":
            plan, attend = torch_attention.gather_plan(table, S, kv_cache.shape), torch_attention.decode_gathered
        else:
            plan, attend = torch_attention.in_place_plan(table, S, kv_cache, Hq), torch_attention.decode_in_place
        other = kv_cache.clone()
        other[1] *= 3
        expected = reference.cpu().to(dtype)
        for layer, scale in ((kv_cache, 1), (other, 3), (kv_cache, 1)):
            out = torch_attention.decode(q, layer, attend, plan)
            torch.testing.assert_close(out, scale * expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(9, 3, 64), (4, 4, 24), (8, 1, 16)])
@pytest.mark.parametrize("dtype16", [torch.bfloat16, torch.float16])
def test_keys_are_copied_for_16_bits(Hq, Hkv, D, dtype16):
    """The same cases in both 16-bit types, three layers with one plan."""
    for lens in ([7, 5, 4], [5, 0, 6], [1, 40, 0, 9, 33, 16]):
        (q, kv_cache, table, S), reference = fp64_case(lens, 8, Hq, Hkv, D, dtype16)
        q, kv_cache, table, S = (x.cpu() for x in (q, kv_cache, table, S))
        packed = torch.randn(len(q), Hq + 2, D).to(dtype16)  # as a model hands queries over: a part of a wider tensor
        packed[:, :Hq] = q
        plan = torch_attention.copied_keys_plan(table, S, kv_cache, Hq)
        for layer, scale in ((kv_cache, 1), (torch.stack((kv_cache[0], kv_cache[1] * 2)), 2), (kv_cache, 1)):
            out = torch_attention.decode(packed[:, :Hq], layer, torch_attention.decode_copied_keys, plan)
            assert out.dtype == dtype16
            assert_close(out / scale, reference.cpu(), dtype16)


def test_scores_of_16_bit_keys_are_not_rounded():
    """Keys that give scores of 256 and 257, which bfloat16 cannot tell apart: the weights are those of a sigmoid."""
    kv_cache = torch.zeros(2, 2, 16, 1, 16, dtype=torch.bfloat16)
    kv_cache[0, 1, 0, 0, 0], kv_cache[0, 1, 1, 0, :2] = 1024, torch.tensor([1024.0, 4.0])
    kv_cache[1, 1, 1] = 1
    q, table = torch.ones(1, 1, 16, dtype=torch.bfloat16), torch.tensor([[1]], dtype=torch.int32)
    out = lesson.plan_decode(table, torch.tensor([2]), kv_cache, 1)(q, kv_cache)
    torch.testing.assert_close(out.float(), torch.full((1, 1, 16), 1.0).sigmoid(), atol=2e-3, rtol=0)


@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(9, 3, 64), (4, 4, 24), (8, 1, 16)])
def test_a_few_tokens_of_several_sequences(dtype, Hq, Hkv, D):
    """Each token sees the keys up to its own, as if it were decoded alone; too many tokens, or none, are in no plan."""
    query_lens, lens = [3, 1, 17, 3, 0, 16, 3, 1], [20, 9, 18, 3, 5, 30, 24, 13]
    (_, kv_cache, table, seq_lens), _ = fp64_case(lens, 8, Hq, Hkv, D, dtype)
    kv_cache, table, seq_lens = kv_cache.cpu(), table.cpu(), seq_lens.cpu()
    q = torch.randn(sum(query_lens), Hq, D).to(dtype)
    owner = torch.tensor([b for b, n in enumerate(query_lens) for _ in range(n)])
    sees = torch.tensor([S - n + i + 1 for n, S in zip(query_lens, lens, strict=True) for i in range(n)])
    expected = lesson.paged_decode_reference(q, kv_cache, table[owner], sees)
    out = torch.full_like(q, torch.nan)
    plans = torch_attention.plan_few(table, query_lens, seq_lens, kv_cache, Hq)
    assert [len(rows) for rows, _ in plans] == [9, 2, 16]
    for rows, attend in plans:
        assert out[rows].isnan().all()
        out[rows] = attend(q[rows], kv_cache)
    assert (out.isnan().any((1, 2)) == (owner == 2)).all()
    assert_close(out[owner != 2], expected[owner != 2], dtype)


@pytest.mark.parametrize("bits", [64, 32, 16])
def test_the_way_is_chosen_by_dtype(bits):
    way = torch_attention.decode_copied_keys if bits == 16 else torch_attention.decode_in_place
    for dtype in (torch.float16, torch.bfloat16) if bits == 16 else (getattr(torch, f"float{bits}"),):
        (_, *memory), _ = fp64_case([5, 3], 8, 3, 1, 16, dtype)
        kv_cache, table, lens = (x.cpu() for x in memory)
        assert lesson.plan_decode(table, lens, kv_cache, 3).keywords["attend"] is way


def test_in_place_copies_no_keys():
    """No operation returns as much as the keys that are read; gathering returns both keys and values."""
    largest = {}

    class Outputs(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor) and x.layout is torch.strided and not func.is_view:
                    largest[way] = max(largest[way], x.numel())
            return out

    (q, kv_cache, table, lens), _ = fp64_case([500, 510], 16, 6, 3, 64, torch.float32)
    q, kv_cache, table, lens = (x.cpu() for x in (q, kv_cache, table, lens))
    plans = {"in place": lesson.plan_decode(table, lens, kv_cache, 6)}
    plans["gathered"] = functools.partial(torch_attention.decode, attend=torch_attention.decode_gathered,
                                          plan=torch_attention.gather_plan(table, lens, kv_cache.shape))  # fmt: skip
    for way, decode in plans.items():
        largest[way] = 0
        with Outputs():
            decode(q, kv_cache)
    keys = 2 * 512 * 3 * 64
    assert largest == {"in place": 2 * 6 * 512, "gathered": 2 * keys}


def test_positions_in_a_cache_of_more_than_two_billion_keys():
    """32-bit indices while they fit, else 64-bit ones: the last slot of the last block of the last KV head."""
    for blocks, index in ((2**20, torch.int32), (2**27, torch.int64)):
        kv_cache = SimpleNamespace(shape=(2, blocks, 16, 3, 64), dtype=torch.float32)
        table = torch.tensor([[blocks - 1]], dtype=torch.int32)
        ((_, scores, _),) = torch_attention.in_place_plan(table, torch.tensor([16]), kv_cache, 9)
        assert scores.col_indices().dtype == scores.crow_indices().dtype == index
        assert scores.col_indices().view(9, 16)[[0, 8], [0, 15]].tolist() == [48 * (blocks - 1), 48 * blocks - 1]


def test_torch_path_pads_by_less_than_two(device):
    """One long sequence among short ones must not make everybody as long."""
    lens = torch.tensor([1000, 10, 12, 9, 700, 0], dtype=torch.int32)
    plan = torch_attention.gather_plan(torch.zeros(6, 63, dtype=torch.int32), lens, (2, 100, 16, 1, 16))
    gathered = sum(len(source) // 2 * 16 for _, source, _, _ in plan)
    assert gathered <= 2 * 1731 + 5 * 16 and sorted(b for rows, *_ in plan for b in rows.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("Hkv", "D"), [(3, 64), (2, 16), (1, 8), (5, 24)])
@pytest.mark.parametrize("forced", [False, True])
def test_reshape_and_cache(guarded, device, dtype, Hkv, D, forced):
    """Into shuffled slots, from rows of a wider tensor, skipping -1, and touching nothing else."""
    if forced and not common.HAS_TRITON:
        pytest.skip("no Triton wheel")
    T, shape = 7, (2, 4, 8, Hkv, D)
    packed = guarded(torch.randn(T, 2 * Hkv + 3, D, device=device).to(dtype))
    k, v = packed[:, 1 : 1 + Hkv], packed[:, 2 + Hkv : 2 + 2 * Hkv]
    slots = guarded(torch.tensor([31, 3, -1, 8, 0, -1, 17], device=device))
    kv_cache = guarded(torch.randn(shape, device=device).to(dtype))
    expected = kv_cache.clone()
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot // 8, slot % 8], expected[1, slot // 8, slot % 8] = k[t], v[t]
    before = lesson.reshape_and_cache_kernel.launches
    if forced:
        with common.use_kernels():
            lesson.reshape_and_cache(k, v, kv_cache, slots)
        assert lesson.reshape_and_cache_kernel.launches == before + 1
    else:
        lesson.reshape_and_cache(k, v, kv_cache, slots)
    assert torch.equal(kv_cache, expected)


@pytest.mark.parametrize(("Hkv", "D"), [(3, 64), (2, 16), (5, 24)])
@pytest.mark.parametrize("forced", [False, True])
def test_copy_blocks(guarded, device, dtype, Hkv, D, forced):
    if forced and not common.HAS_TRITON:
        pytest.skip("no Triton wheel")
    kv_cache = guarded(torch.randn(2, 7, 16, Hkv, D, device=device).to(dtype))
    pairs = guarded(torch.tensor([[1, 6], [3, 2], [1, 5]], device=device))
    expected = kv_cache.clone()
    for source, target in pairs.tolist():
        expected[:, target] = kv_cache[:, source]
    if forced:
        with common.use_kernels():
            lesson.copy_blocks(kv_cache, pairs)
    else:
        lesson.copy_blocks(kv_cache, pairs)
    assert torch.equal(kv_cache, expected)


def test_offsets_beyond_two_to_the_31(kernels, device, far):
    (q, kv_cache, table, lens), reference = fp64_case([3, 5], 8, 2, 1, 16, torch.float16)
    big, first = far(kv_cache, 1)
    assert_close(lesson.paged_decode(q, big, table + first, lens, 5).cpu(), reference, torch.float16)
    written = torch.arange(16.0, device=device).view(1, 1, 16).half()
    lesson.reshape_and_cache(written, -written, big, torch.tensor([(first + 2) * 8 + 7], device=device))
    assert torch.equal(big[:, first + 2, 7], torch.cat((written, -written)))
    lesson.copy_blocks(big, torch.tensor([[first + 2, first + 1]], device=device))
    assert torch.equal(big[:, first + 1, 7], torch.cat((written, -written)))


def test_no_read_past_the_end(kernels, guarded):
    """Reads that a later mask discards are invisible in values. Here every buffer ends with its last live element."""
    q, kv_cache, table, lens = lesson.random_case([8, 16, 24], 8, 3, 1, 24, torch.float32)  # full blocks
    kv_cache, table = kv_cache[:, : int(table.max()) + 1].contiguous(), table[:, :3].contiguous()
    for splits in (1, 2):
        lesson.paged_decode(*map(guarded, (q, kv_cache, table, lens)), 24, splits)
    k = torch.randn(3, 5, 24)
    lesson.reshape_and_cache(guarded(k), guarded(k), guarded(torch.zeros(2, 1, 8, 5, 24)),
                             guarded(torch.tensor([0, -1, 7])))  # fmt: skip
    lesson.copy_blocks(guarded(torch.zeros(2, 3, 8, 5, 24)), guarded(torch.tensor([[2, 0]])))


# --- Through the model ----------------------------------------------------------------------------------------------


def prompts_of(model, lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_paged_equals_no_cache(tiny_model, block_size):
    prompts = prompts_of(tiny_model, [1, 7, 8, 9, 40])
    run = page.decode(tiny_model, prompts, page.greedy, 12, 40, block_size)
    assert run.token_ids == [naive.generate(tiny_model, prompt, 12) for prompt in prompts]


def test_the_kernels_drive_the_model(kernels, tiny_model):
    """Decode with every kernel of the lesson; each is launched, and the tokens are those of no cache at all."""
    used = [lesson.reshape_and_cache_kernel, lesson.paged_decode_kernel, lesson.copy_blocks_kernel]
    before = [kernel.launches for kernel in used]
    prompts = prompts_of(tiny_model, [3, 9])
    run = page.decode(tiny_model, prompts, page.greedy, 3, 12, 8)
    assert run.token_ids == [naive.generate(tiny_model, prompt, 3) for prompt in prompts]
    shared = page.decode(tiny_model, prompts[:1], page.sampling(2), 3, 12, 8)
    assert all(kernel.launches > n for kernel, n in zip(used, before)) and shared.copied_blocks == 1
    assert shared.token_ids == page.decode(tiny_model, prompts[:1], page.sampling(2), 3, 12, 8, share=False).token_ids


def test_split_kernels_drive_the_model(kernels, tiny_model, monkeypatch):
    monkeypatch.setattr(lesson, "default_splits", lambda *_: 4)
    before = lesson.combine_splits_kernel.launches
    (prompt,) = prompts_of(tiny_model, [70])
    assert page.decode(tiny_model, [prompt], page.greedy, 3, 12, 8).token_ids == [naive.generate(tiny_model, prompt, 3)]
    assert lesson.combine_splits_kernel.launches > before


def test_mixed_steps_and_chunks(tiny_model):
    """Prompts in chunks beside decodes: the same logits as the whole sequence at once."""
    model, size = tiny_model, 8
    a, b = prompts_of(model, [30, 25])
    pool, cache = BlockPool(20), lesson.PagedKVCache(model, 20, size)
    tables = [BlockTable(pool, size) for _ in range(2)]
    lesson.run_step(model, cache, tables[:1], [a[:13]])
    lesson.run_step(model, cache, tables, [a[13:14], b[:9]])
    lesson.run_step(model, cache, tables, [a[14:29], b[9:24]])
    logits = lesson.run_step(model, cache, tables, [a[29:], b[24:]])
    for row, tokens in zip(logits, (a, b)):
        ids = torch.tensor(tokens, device=model.device)
        hidden = model.forward(ids, torch.arange(len(tokens), device=model.device), naive.recompute)
        assert_close(row[None], model.logits(hidden[-1:]))


def test_metadata(device):
    meta = lesson.AttentionMetadata.build([[3, 1], [2], [5, 4, 7]], [6, 1, 9], [6, 1, 2], 4, device)
    assert meta.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 7, 8]
    assert meta.slot_mapping.tolist() == [12, 13, 14, 15, 4, 5, 8, 19, 28]
    assert meta.query_start_loc.tolist() == [0, 6, 7, 9] and meta.seq_lens.tolist() == [6, 1, 9]
    assert meta.block_table.tolist() == [[3, 1, 0], [2, 0, 0], [5, 4, 7]] and meta.max_seq_len == 9
    assert lesson.AttentionMetadata.build([], [], [], 4, device).block_table.shape == (0, 0)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("select", [page.sampling, page.beams])
@pytest.mark.parametrize("length", [7, 8, 21])
def test_shared_blocks_equal_private_copies(tiny_model, n, select, length):
    prompts = prompts_of(tiny_model, [length])
    shared, private = (page.decode(tiny_model, prompts, select(n), 10, 100, 8, share) for share in (True, False))
    assert shared.token_ids == private.token_ids and len(shared.token_ids) == n
    assert private.blocks == private.table_entries == shared.table_entries  # without sharing each entry is a block
    assert all(a <= b for a, b in zip(shared.blocks, private.blocks))
    assert (shared.saved > 0) == (n > 1) and shared.copied_blocks <= private.copied_blocks


def test_samples_equal_separate_requests(tiny_model):
    """Sample i of n is what a request of its own with the same seed writes."""
    prompts = prompts_of(tiny_model, [19])
    together = page.decode(tiny_model, prompts, page.sampling(3, seed=7), 10, 60, 8).token_ids
    alone = [page.decode(tiny_model, prompts, page.sampling(1, seed=7 + i), 10, 60, 8).token_ids[0] for i in range(3)]
    assert together == alone and len({tuple(tokens) for tokens in together}) == 3


def test_beam_search_finds_what_exhaustive_beams_find(tiny_model):
    """Against a beam search that recomputes every candidate from scratch, without any cache."""
    (prompt,) = prompts_of(tiny_model, [5])
    width, candidates = 3, [([], 0.0)]
    for _ in range(6):
        extended = []
        for tokens, score in candidates:
            ids = torch.tensor(prompt + tokens, device=tiny_model.device)
            hidden = tiny_model.forward(ids, torch.arange(len(ids), device=ids.device), naive.recompute)
            logp = tiny_model.logits(hidden[-1:])[0].log_softmax(-1).tolist()
            extended += [([*tokens, t], score + logp[t]) for t in range(len(logp))]
        candidates = sorted(extended, key=lambda c: -c[1])[:width]
    run = page.decode(tiny_model, [prompt], page.beams(width), 6, 40, 8)
    assert run.token_ids == [tokens for tokens, _ in candidates]


def test_real_model(real_model):
    model, tokenizer = real_model
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "Once upon a time there was a small")]
    run = page.decode(model, prompts, page.greedy, 5, 12, 16)
    assert run.token_ids == [naive.generate(model, prompt, 5) for prompt in prompts]
    assert "Paris" in tokenizer.decode(run.token_ids[0])


@pytest.mark.slow
def test_real_model_through_the_kernels(real_model, kernels):
    model, tokenizer = real_model
    prompt = tokenizer.encode("The capital of France is")
    assert page.decode(model, [prompt], page.greedy, 4, 12, 16).token_ids == [naive.generate(model, prompt, 4)]


def test_out_of_blocks_is_an_exception_of_its_own(tiny_model):
    with pytest.raises(OutOfBlocks):
        page.decode(tiny_model, prompts_of(tiny_model, [20, 20]), page.greedy, 2, 5, 8)


# --- Allocators -----------------------------------------------------------------------------------------------------


@given(st.sampled_from(["first-fit", "buddy"]), st.integers(1, 200), st.lists(st.integers(-8, 40), max_size=40))
def test_contiguous_allocators(kind, num_slots, moves):
    """Runs never overlap, stay inside, and nothing is lost: at the end one hole again (or the buddies of the start)."""
    memory = page.FirstFit(num_slots) if kind == "first-fit" else page.Buddy(num_slots)
    start = json.dumps(holes_of(memory))
    taken: list[tuple[int, int]] = []
    for move in moves:
        if move <= 0 and taken:
            memory.free(*taken.pop(move % len(taken)))
        elif move > 0:
            biggest = max((size for _, size in holes_of(memory)), default=0)
            wanted = move if kind == "first-fit" else 1 << (move - 1).bit_length()
            if wanted > biggest:
                with pytest.raises(OutOfBlocks):
                    memory.allocate(move)
            else:
                taken.append(memory.allocate(move))
                assert taken[-1][1] == wanted
                assert kind == "first-fit" or taken[-1][0] % wanted == 0
        slots = sorted(slot for first, size in [*taken, *holes_of(memory)] for slot in range(first, first + size))
        assert slots == list(range(num_slots))
    for run in taken:
        memory.free(*run)
    assert json.dumps(holes_of(memory)) == start


def holes_of(memory):
    if isinstance(memory, page.FirstFit):
        return [list(hole) for hole in memory.holes]
    return sorted([first, size] for size, starts in memory.starts.items() for first in starts)


def test_first_fit_takes_the_lowest_hole():
    memory = page.FirstFit(100)
    runs = [memory.allocate(10) for _ in range(10)]
    memory.free(*runs[7]), memory.free(*runs[2]), memory.free(*runs[3])
    assert memory.allocate(15) == (20, 15) and memory.allocate(7) == (70, 7)


# --- The contest ----------------------------------------------------------------------------------------------------


def test_contest_reproduces_the_paper():
    """OPT-13B at ShareGPT's mean lengths (Kwon et al. 2023): the batch within 15 % of 7.0, 9.8, 13.6 and 30.4."""
    facts = page.facts()
    assert facts["opt_slots"] == 15728  # the paper's 15.7K
    for policy, (tokens, batch) in page.PAPER.items():
        ours = facts["contest"][policy]
        assert abs(ours["batch"] / batch - 1) < 0.15
        if policy == "Pow2":  # the one that is off, and the page says by how much
            assert 0.045 < ours["tokens"] - tokens < 0.055
        else:
            assert abs(ours["tokens"] - tokens) < 0.03
    order = [facts["contest"][p]["batch"] for p in ("Max", "Pow2", "Oracle", "First-fit", "Paged")]
    assert order == sorted(order)


@pytest.mark.parametrize("policy", list(page.POLICIES))
def test_contest_shares(policy):
    lengths = page.request_lengths("ShareGPT", 400, 3)
    r = page.contest(policy, lengths, 8192, 400)
    assert abs(sum(r[part] for part in ("tokens", "reserved", "internal", "external")) - 1) < 1e-9
    assert all(0 <= r[part] <= 1 for part in ("tokens", "reserved", "internal", "external"))
    assert (r["preemptions"] > 0) == (policy == "Paged")
    if policy == "Max":
        assert r["batch"] == 4


def test_contest_with_huge_blocks_is_no_better_than_reserving():
    lengths = page.request_lengths("ShareGPT", 400, 0)
    paged = page.contest("Paged", lengths, 16384, 400, block_size=2048)["batch"]
    assert paged < page.contest("Max", lengths, 16384, 400)["batch"] == 8


def test_request_lengths_have_the_published_means():
    for workload, (prompt, output) in lengths.WORKLOADS.items():
        pairs = page.request_lengths(workload, 20_000, 0)
        assert all(1 <= p <= 1024 and o >= 1 and p + o <= 2048 for p, o in pairs)
        if workload != "Azure conversation":  # its prompts reach the cut
            assert abs(sum(p for p, _ in pairs) / len(pairs) / prompt - 1) < 0.05
            assert abs(sum(o for _, o in pairs) / len(pairs) / output - 1) < 0.05


def test_sharing_by_hand():
    """Prompt 8, outputs of 2 with blocks of 8, 2 samples: one step with one token each on top of one shared block."""
    assert page.sharing(2, [(8, 2)], 8) == pytest.approx(1 / 4)
    assert page.sharing(1, [(8, 5)], 8) == 0
    assert page.sharing(4, [(3, 2)], 8) == 0  # nothing is full: the partial block is copied away (or kept by the last)


# --- The simulation -------------------------------------------------------------------------------------------------


def all_states():
    for allocator in page.ALLOCATORS:
        for block_size in page.WIDGET_CHOICES["block_size"] if allocator == "paged" else (4,):
            for fork, finish in ((False, False), (True, False), (False, True), (True, True)):
                yield {"allocator": allocator, "block_size": block_size, "fork": fork, "finish": finish}


def test_simulation_conserves_memory():
    """At every step: only A and B share, free + taken + null = all, and nobody lacks a slot for a token."""
    for params in all_states():
        trace = page.simulate(params)
        null = trace["null_slots"]
        for step in trace["steps"]:
            owners, full = collections.defaultdict(set), set()
            for name, tokens, unit, starts in step["places"]:
                mine = [start + i for start in starts for i in range(unit)]
                assert len(set(mine)) == len(mine) >= tokens and min(mine) >= null and max(mine) < page.ROOM
                assert params["allocator"] != "paged" or len(mine) - tokens < params["block_size"]
                full.update(mine[:tokens])
                for slot in mine:
                    owners[slot].add(name)
            assert all(len(who) == 1 or who == {"A", "B"} for who in owners.values())
            state = step["state"]
            assert (state["taken"], state["tokens"]) == (len(owners), len(full))
            assert state["taken"] + state["free"] + null == page.ROOM and state["running"] == len(step["places"])
        assert len(page.describe(trace).splitlines()) <= 15


def test_simulation_by_hand():
    run = lambda **change: page.simulate(page.WIDGET_DEFAULT | change)  # noqa: E731
    for block_size in (1, 4, 32):  # A with 58 tokens, request 2 gone, and then as many as fit
        blocks, n = page.ROOM // block_size - 1 - -(-58 // block_size), 0
        queue = [tokens for name, tokens in page.arrivals() if name != "2"]
        while blocks >= -(-queue[n] // block_size):
            blocks -= -(-queue[n] // block_size)
            n += 1
        assert run(block_size=block_size)["final"]["running"] == n + 1
    assert run(allocator="contiguous")["final"]["running"] == 8 > run(block_size=64)["final"]["running"] == 7
    holes = run(allocator="first-fit", finish=True)
    assert holes["steps"][-1]["why"] and holes["steps"][-1]["tokens"] > holes["final"]["largest_fit"]
    assert holes["final"]["free"] > 100 > run(finish=True)["final"]["free"]


def test_simulation_copies_on_write():
    """B begins with A's 15 blocks; its first write copies the last; A then writes in place; full blocks stay shared."""
    steps = page.simulate(page.WIDGET_DEFAULT | {"fork": True})["steps"]
    (at,) = [i for i, step in enumerate(steps) if step["event"] == "fork"]
    (a, *_, b), copy, in_place = steps[at]["places"], steps[at + 1], steps[at + 2]
    assert a[1:] == b[1:] and copy["copied"] == [52, 53] and in_place["copied"] is None
    assert [row[3] for row in copy["places"] if row[0] in "AB"] == [a[3], [*a[3][:-1], 53 * 4]]
    assert page.simulate(page.WIDGET_DEFAULT | {"fork": True, "block_size": 2})["final"]["copied"] == 0  # 58 is even
    assert page.simulate(page.WIDGET_DEFAULT | {"fork": True, "allocator": "first-fit"})["final"]["copied"] == 58


@pytest.mark.parametrize(
    ("cls", "method", "broken"),
    [
        (BlockPool, "allocate", lambda self, n: list(self.free_queue)[:n]),
        (BlockPool, "free", lambda self, blocks: None),
        (BlockTable, "append", lambda self, n: self.blocks.extend(self.pool.allocate(n)) or []),
        (page.FirstFit, "allocate", lambda self, size: (0, size)),
    ],
)
def test_breaking_the_class_breaks_the_simulation(monkeypatch, cls, method, broken):
    params = [page.WIDGET_DEFAULT | {"fork": True}, page.WIDGET_DEFAULT | {"allocator": "first-fit"}]
    before = json.dumps([page.simulate(p) for p in params])
    monkeypatch.setattr(cls, method, broken)
    try:
        after = json.dumps([page.simulate(p) for p in params])
    except Exception:
        return
    assert after != before


# --- The story and the script ---------------------------------------------------------------------------------------


def test_story():
    story = page.facts()["story"]
    assert {name: t["blocks"] for name, t in story["tables"].items()} == {"A": [1, 4], "B": [3, 6, 7], "C": [1, 2, 5]}
    assert story["copies"] == [[2, 4]] and story["ref_count"] == [0, 2, 1, 1, 1, 1, 1, 1, 0, 0]


def test_a_wrong_result_stops_the_script(monkeypatch):
    monkeypatch.setattr(lesson, "plan_decode", lambda *_: lambda q, kv_cache: torch.zeros_like(q))
    monkeypatch.setattr(common, "HAS_TRITON", False)
    if common.HAS_GPU:
        pytest.skip("the torch path does not run on a GPU")
    with pytest.raises(common.CheckFailed):
        lesson.check_kernels(16)


def test_the_script_names_the_way_that_it_checked(monkeypatch, capsys):
    if common.HAS_GPU:
        pytest.skip("the torch path does not run on a GPU")
    monkeypatch.setattr(common, "HAS_TRITON", False)
    monkeypatch.setattr(torch_attention, "decode_gathered", lambda *_: pytest.fail("gathered"))
    lesson.check_kernels(16)
    assert "torch path: keys and values in place" in capsys.readouterr().out


def test_benchmark_compares_with_the_same_code_and_with_a_copy(monkeypatch, capsys):
    order = []
    row = {"B": 32, "S": 192, "block_size": 16, "paged": 3e-3, "one_block": 2e-3, "contiguous": 1e-3, "gbps": 40.0,
           "ratio": 3.0, "to_one_block": 1.5}  # fmt: skip
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: order.append("copy") or 50e9)
    monkeypatch.setattr(page, "measure_indirection", lambda *_: order.append("kernels") or [row])
    monkeypatch.setattr(page, "PAPER_SAVED", {"beam": {}})
    monkeypatch.setattr(loader, "load", lambda _: (None, SimpleNamespace(ask=lambda question: [1])))
    assert page.measure(SimpleNamespace(model=None))["copy_bandwidth"] == 50e9 and order == ["copy", "kernels"]
    assert capsys.readouterr().out.split()[-3:] == ["1.50", "40.0", "80%"]


def test_tiles_of_a_decode():
    """Of two bytes on an NVIDIA GPU, if the heads of a group leave room: `test_kernels.py` has what comes of it."""
    assert lesson.decode_tiles(torch.bfloat16, 128, True) == (128, 4, 3)
    assert lesson.decode_tiles(torch.bfloat16, 128, True, 64) == (64, 4, 3)
    assert lesson.decode_tiles(torch.float16, 64, True) == (64, 4, 3)
    assert lesson.decode_tiles(torch.bfloat16, 256, True) == (32, 8, 5)
    assert lesson.decode_tiles(torch.bfloat16, 128, False) == (64, 4, 3)
    assert lesson.decode_tiles(torch.float32, 128, True) == lesson.decode_tiles(torch.float32, 128, False) == (32, 8, 3)


def without_template(folder):
    """The default model's folder again, without its chat template."""
    source = folders.model_folder()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((source / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def test_a_question_without_a_chat_template(real_model, tmp_path):
    tokenizer = real_model[1]
    bare = without_template(tmp_path)
    assert bare.ask("Say hello.") == bare.encode("Say hello.")
    assert tokenizer.ask("Say hello.") == tokenizer.chat([{"role": "user", "content": "Say hello."}])


@pytest.mark.parametrize("value", ["0", "12", "4096", "x"])
def test_block_size_flag_refuses(value, capsys):
    with pytest.raises(SystemExit) as stop:
        lesson.build_parser().parse_args(["--block-size", value])
    assert stop.value.code == 2 and "--block-size" in capsys.readouterr().err


def test_what_does_not_grow_with_the_context():
    """The page's line through its rows of 32 sequences on the H200: 18 us a launch, and the rest at 4.5 TB/s."""
    rows = [r for r in recorded.results("02_paged_attention", "h200")["bench"]["indirection"]
            if (r["B"], r["block_size"]) == (32, 16)]  # fmt: skip
    us = np.array([r["paged"] for r in rows]) * 1e6
    mb = np.array([r["gbps"] * r["paged"] for r in rows]) * 1e3
    (fixed, per_mb), *_ = np.linalg.lstsq(np.stack((1 / us, mb / us), 1), np.ones(3))
    assert abs((fixed + per_mb * mb) / us - 1).max() < 0.02
    assert round(fixed) == 18 and round(1 / per_mb, 1) == 4.5

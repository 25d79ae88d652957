"""Block-sparse matrices against dense masks, shared prefixes against none, plans against what they cover."""

from __future__ import annotations

import common

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import registry
from engine.attention import block_sparse as lesson
from lab import cli
from support.close import assert_close

paged_attention, page = registry.lesson("02_paged_attention"), cli.numbers("03_flash_attention")
BLOCK = 4
AWKWARD = [(1, 3, 4, 5), (0, 7, 0), (1,), (0,), (), (70, 1, 16, 3), (64, 1, 1, 1, 1, 1, 1, 1)]


def block_sparse_mask(bsr, num_slots):
    """What the matrix means, obviously right: bool [T, num_slots], does query t see the key in that slot?"""
    mask = torch.zeros(bsr.qo_indptr[-1], num_slots, dtype=torch.bool)
    for start, (n, pages, S) in zip(bsr.qo_indptr, lesson.rows_of(bsr)):
        for i in range(n):
            for j in range(S - n + i + 1 if bsr.causal else S):
                mask[start + i, pages[j // bsr.page_size] * bsr.page_size + j % bsr.page_size] = True
    return mask


def naive_block_sparse(q, kv_cache, bsr):
    """Every query against every slot of the cache, masked, in fp64: (o [T, Hq, D], lse [T, Hq]).

    Shapes: q [T, Hq, D], kv_cache [2, num_blocks, page_size, Hkv, D]. A query that sees nothing: o 0, lse −∞.
    """
    kv = kv_cache.double().flatten(1, 2).repeat_interleave(q.shape[1] // kv_cache.shape[3], 2)  # [2, slots, Hq, D]
    mask = block_sparse_mask(bsr, kv.shape[1]).to(q.device)
    k, v = torch.where(mask.any(0)[:, None, None], kv, 0)  # an empty slot may hold anything, NaN included
    s = torch.einsum("thd,shd->ths", q.double(), k) / math.sqrt(q.shape[2])
    s = s.masked_fill(~mask[:, None], -math.inf)
    return torch.einsum("ths,shd->thd", s.softmax(-1).nan_to_num(0), v), s.logsumexp(-1)


def case(seq_lens, block=BLOCK, query_lens=None, Hq=6, Hkv=2, D=8):
    """(q, kv_cache, BSR, block_table, seq_lens) with shuffled blocks and NaN where no token lies."""
    torch.manual_seed(0)
    q, kv_cache, table, lens = paged_attention.random_case(seq_lens, block, Hq, Hkv, D, torch.float32)
    query_lens = query_lens or [1 if S else 0 for S in seq_lens]
    q = torch.randn(sum(query_lens), Hq, D).to(kv_cache)
    return q, kv_cache, lesson.from_block_table(table, lens, query_lens, block), table, lens


def attend(q, kv_cache, bsr, num_workers=3, tile=16):
    """Planned and run in buffers that just suffice."""
    tiles = lesson.tiled(bsr, tile)
    attention = lesson.BlockSparseAttention(
        num_workers, len(tiles.last_page_len), len(tiles.indices), tile, *q.shape[1:])  # fmt: skip
    attention.plan(bsr)
    return attention.run(q, kv_cache)


def agree(state, ref):
    for out, expected in zip(state, ref, strict=True):
        assert_close(out, expected, torch.float32)


# --- The format -----------------------------------------------------------------------------------------------------


def test_the_arrays_are_flashinfers():
    """Three sequences of 5, 0 and 8 tokens in blocks of 4, block table padded with the null block."""
    table = torch.tensor([[7, 2], [0, 0], [3, 9]], dtype=torch.int32)
    bsr = lesson.from_block_table(table, torch.tensor([5, 0, 8]), [1, 0, 3], 4)
    assert bsr == lesson.BSR([0, 1, 1, 4], [0, 2, 2, 4], [7, 2, 3, 9], [1, 0, 4], 4)
    mask = block_sparse_mask(bsr, 40)
    seen = [sorted(row.nonzero().flatten().tolist()) for row in mask]
    last = [12, 13, 14, 15, 36, 37, 38, 39]
    assert seen == [[8, *range(28, 32)], last[:6], last[:7], last]


@given(st.lists(st.integers(0, 20), max_size=6), st.sampled_from([1, 3, 4, 16]))
@settings(max_examples=60, deadline=None)
def test_block_tables_there_and_back(seq_lens, block):
    *_, bsr, table, lens = case(seq_lens, block)
    back, lens_back = lesson.to_block_table(bsr)
    assert torch.equal(back, table.cpu()) and torch.equal(lens_back, lens.cpu())
    assert lesson.from_rows(lesson.rows_of(bsr), block) == bsr


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("seq_lens", AWKWARD)
def test_decoding_is_lesson_02s(seq_lens, block):
    q, kv_cache, _, table, lens = case(seq_lens, block, [1] * len(seq_lens))
    bsr = lesson.from_block_table(table, lens, [1] * len(seq_lens), block)
    ref = paged_attention.paged_decode_reference(q, kv_cache, table, lens)
    naive = naive_block_sparse(q, kv_cache, bsr)
    assert_close(naive[0], ref, torch.float32)
    assert_close(paged_attention.paged_decode(q, kv_cache, table, lens, 80), ref)
    agree(attend(q, kv_cache, bsr), naive)


MIXED = [((9, 5, 20, 1), (9, 1, 7, 0)), ((4, 3, 5), (4, 2, 5)), ((17,), (17,)), ((16, 33), (16, 2))]


@pytest.mark.parametrize(("seq_lens", "query_lens"), MIXED)
def test_several_queries_are_causal(seq_lens, query_lens):
    """Prefills, chunks and decodes, against lesson 02's contiguous attention and the dense mask."""
    q, kv_cache, bsr, *_ = case(seq_lens, BLOCK, query_lens)
    naive, ref = naive_block_sparse(q, kv_cache, bsr), []
    for x, (n, pages, S) in zip(q.split(list(query_lens)), lesson.rows_of(bsr)):
        if n:
            k, v = kv_cache[:, pages].flatten(1, 2)[:, :S]
            ref.append(paged_attention.prefill_attention(x, k, v))
    assert_close(naive[0].float(), torch.cat(ref))
    for tile in (1, 3, 16):
        agree(attend(q, kv_cache, bsr, tile=tile), naive)


@pytest.mark.parametrize(("seq_lens", "query_lens"), MIXED)
def test_tiles_and_smaller_pages_mean_the_same(seq_lens, query_lens):
    q, kv_cache, bsr, *_ = case(seq_lens, BLOCK, query_lens)
    mask = block_sparse_mask(bsr, kv_cache[0, :, :, 0, 0].numel())
    for tile in (1, 2, 4, 100):
        tiles = lesson.tiled(bsr, tile)
        assert torch.equal(block_sparse_mask(tiles, mask.shape[1]), mask)
        assert max(n for n, *_ in lesson.rows_of(tiles)) <= tile
    for size in (1, 2, 4):
        finer = lesson.refined(bsr, size)
        assert finer.page_size == size and torch.equal(block_sparse_mask(finer, mask.shape[1]), mask)
        agree(
            attend(q, kv_cache.view(2, -1, size, *kv_cache.shape[3:]), finer),
            naive_block_sparse(q, kv_cache, bsr),
        )


def test_a_token_tree_in_pages_of_one_slot():
    """Each node of a tree of drafts sees the context and its ancestors: any mask is a matrix once pages are slots."""
    q, kv_cache, bsr, *_ = case([9], BLOCK, [5])
    ((_, slots, S),) = lesson.rows_of(lesson.refined(bsr, 1))
    paths = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]  # node: itself and its ancestors
    tree = lesson.from_rows(
        [(1, [*slots[: S - 5], *(slots[S - 5 + i] for i in path)], 4 + len(path)) for path in paths], 1
    )
    out, _ = attend(q, kv_cache.view(2, -1, 1, *kv_cache.shape[3:]), tree)
    for i, path in enumerate(paths):
        seen = kv_cache.flatten(1, 2)[:, [*slots[:4], *(slots[4 + j] for j in path)]]
        assert_close(out[i : i + 1], paged_attention.prefill_attention(q[i : i + 1], *seen))


# --- Shared prefixes ------------------------------------------------------------------------------------------------


def tree_case():
    """A tree of prefixes: 2 pages of all, 3 more of rows 0–2, 1 more of rows 0 and 1; row 4 has one query too early."""
    q, kv_cache, *_ = case([120], BLOCK, [9])
    a, b, c = [5, 3], [8, 1, 9], [12]
    rows = [(1, [*a, *b, *c, 14], 25), (1, [*a, *b, *c, 15, 16], 30), (2, [*a, *b, 17], 21), (1, [*a, 18], 12),
            (4, [*a, 19], 10)]  # fmt: skip
    return q, torch.nan_to_num(kv_cache), lesson.from_rows(rows, BLOCK)


def merged(levels, q, kv_cache):
    states = [attend(q, kv_cache, level) for level in levels]
    return lesson.merge_states(*map(torch.stack, zip(*states)))


def test_a_tree_of_prefixes_is_exact():
    q, kv_cache, bsr = tree_case()
    levels = lesson.cascade(bsr)
    assert [level.causal for level in levels] == [False] * 4 + [True]
    # Row 4's first query stands inside its second page: it shares one page only, whatever the others do.
    assert [[row[:2] for row in lesson.rows_of(level) if row[1]] for level in levels[:4]] == [
        [(9, [5])], [(5, [3])], [(4, [8, 1, 9])], [(2, [12])]
    ]  # fmt: skip
    masks = [block_sparse_mask(level, kv_cache[0, :, :, 0, 0].numel()) for level in levels]
    assert torch.equal(sum(mask.int() for mask in masks), block_sparse_mask(bsr, masks[0].shape[1]).int())
    agree(merged(levels, q, kv_cache), naive_block_sparse(q, kv_cache, bsr))


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 3), max_size=4), st.integers(0, 3)), max_size=6))
@settings(max_examples=150, deadline=None)
def test_levels_hold_every_query_and_key_once(drawn):
    """Whatever the tables: the dense masks of the levels add up to the matrix's own, and nothing is left to share."""
    # A page's place is in its number, so that a table holds none twice.
    rows = [(n, [10 * d + page for d, page in enumerate(pages)], max(n, len(pages) * BLOCK - missing))
            for n, pages, missing in drawn if len(pages) * BLOCK >= n]  # fmt: skip
    bsr = lesson.from_rows(rows, BLOCK)
    levels = lesson.cascade(bsr)
    masks = [block_sparse_mask(level, 200).int() for level in levels]
    assert torch.equal(sum(masks), block_sparse_mask(bsr, 200).int())
    assert all(level.qo_indptr[-1] == bsr.qo_indptr[-1] for level in levels)
    assert all(lesson.from_rows(lesson.rows_of(level), BLOCK, level.causal) == level for level in levels)
    assert not lesson.share(levels[-1])[0].indices


def test_a_query_that_sees_nothing_merges_to_zero():
    o, lse = torch.ones(2, 3, 2, 4), torch.full((2, 3, 2), -math.inf)
    lse[1, 0], o[:, 1:] = 2.0, 0
    out, total = lesson.merge_states(o, lse)
    assert torch.equal(out[1:], torch.zeros(2, 2, 4)) and torch.equal(out[0], torch.ones(2, 4))
    assert torch.equal(total[0], torch.full((2,), 2.0)) and (total[1:] == -math.inf).all()


@pytest.mark.parametrize(("sequences", "tile"), [(5, 16), (8, 6), (3, 3), (1, 16)])
def test_bytes_are_counted_where_they_are_read(sequences, tile, monkeypatch):
    """saved = (sequences − tiles) · prefix: the formula, `kv_bytes`, and what `gather` really touched."""
    prefix, own = 5, 2  # pages
    q, kv_cache, *_ = case([200], BLOCK, [sequences])
    rows = [(1, [*range(1, 1 + prefix), *range(10 + own * i, 10 + own * (i + 1))], (prefix + own) * BLOCK - 1)
            for i in range(sequences)]  # fmt: skip
    bsr, kv_cache = lesson.from_rows(rows, BLOCK), torch.nan_to_num(kv_cache)
    read, gather = [], lesson.gather
    monkeypatch.setattr(lesson, "gather", lambda *args: read.append(out := gather(*args)) or out)

    def counted(levels):
        read.clear()
        states = [attend(q, kv_cache, level, tile=tile * 2 // 6) for level in levels]
        total = sum(part.numel() * part.element_size() for part in read)
        assert total == lesson.kv_bytes(levels, tile, 6, 2, 8, itemsize=4)
        return total, lesson.merge_states(*map(torch.stack, zip(*states)))

    flat, _ = counted([bsr])
    cascaded, state = counted(lesson.cascade(bsr))
    agree(state, naive_block_sparse(q, kv_cache, bsr))
    tiles = -(-sequences // (tile * 2 // 6))
    assert flat - cascaded == (sequences - tiles) * prefix * BLOCK * 2 * 2 * 8 * 4 * (sequences > 1)


# --- Plans ----------------------------------------------------------------------------------------------------------

rows_drawn = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 150)), max_size=12)


def drawn_bsr(rows):
    new = itertools.count(1)
    return lesson.from_rows([(n, [next(new) for _ in range(-(-(n + S) // BLOCK))], n + S) for n, S in rows], BLOCK)


@given(rows_drawn, st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_a_plan_covers_each_block_of_each_row_once(rows, workers):
    bsr = drawn_bsr(rows)
    chunks = lesson.split(bsr, workers)
    covered = sorted((chunk.row, page) for chunk in chunks for page in range(chunk.first, chunk.last))
    assert covered == [(r, p) for r, (_, pages, _) in enumerate(lesson.rows_of(bsr)) for p in range(len(pages))]
    assert sorted(i for worker in lesson.balance(chunks, workers) for i in worker) == list(range(len(chunks)))
    # The sizes of the buffers.
    split_rows = [sum(chunk.row == r for chunk in chunks) for r in range(len(rows))]
    assert len(chunks) <= len(rows) + workers
    assert sum(count for count in split_rows if count > 1) <= max(0, 2 * workers - 1)
    # Costs: a row's chunks read its keys once, and each pays for its queries.
    for r, (n, _, S) in enumerate(lesson.rows_of(bsr)):
        assert sum(chunk.cost - 2 * n for chunk in chunks if chunk.row == r) == S


@given(rows_drawn, st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_the_makespan_is_near_the_even_share(rows, workers):
    """Graham's bound, in integers, and no chunk larger than a worker's even share of the pages."""
    bsr = drawn_bsr(rows)
    chunks = lesson.split(bsr, workers)
    total, largest = sum(chunk.cost for chunk in chunks), max((chunk.cost for chunk in chunks), default=0)
    end = lesson.makespan(chunks, workers)
    assert total <= workers * end <= total + (workers - 1) * largest
    assert largest <= -(-len(bsr.indices) // workers) * BLOCK + 2 * 9


def test_costliest_first_matters():
    """Six chunks of 1 and one of 3 on three workers: 5 in the order given, 3 in descending order."""
    chunks = [lesson.Chunk(i, 0, 1, cost) for i, cost in enumerate((1, 1, 1, 1, 1, 1, 3))]
    assert lesson.makespan(chunks, 3) == 3
    assert lesson.balance(chunks, 3) == [[6], [0, 2, 4], [1, 3, 5]]


def test_fixed_shapes_new_contents():
    """One set of buffers, batches of all kinds one after another: same addresses, right results, nothing left over."""
    attention = lesson.BlockSparseAttention(num_workers=5, max_rows=14, max_pages=80, tile=8, Hq=6, D=8)
    tensors = {**attention.buffers, "parts": attention.parts, "part_lse": attention.part_lse}
    before = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in tensors.items()}
    batches = [((100, 3, 4, 5), (1, 1, 1, 1)), ((17, 40), (17, 40)), ((0,), (0,)), ((60, 60), (2, 9)), ((4,), (1,))]
    for seq_lens, query_lens in batches:
        q, kv_cache, bsr, *_ = case(seq_lens, BLOCK, query_lens)
        attention.plan(bsr)
        for layer in (kv_cache, kv_cache * 2):  # one plan, several layers
            agree(attention.run(q, layer), naive_block_sparse(q, layer, bsr))
        now = {**attention.buffers, "parts": attention.parts, "part_lse": attention.part_lse}
        assert {name: (tensor.data_ptr(), tensor.shape) for name, tensor in now.items()} == before
    coarse = lesson.from_rows([(3, [1, 2], 8)], BLOCK, causal=False)
    q, kv_cache, *_ = case([30], BLOCK, [3])
    attention.plan(coarse)
    agree(attention.run(q, torch.nan_to_num(kv_cache)), naive_block_sparse(q, torch.nan_to_num(kv_cache), coarse))


def test_what_does_not_fit_is_refused():
    attention = lesson.BlockSparseAttention(num_workers=2, max_rows=2, max_pages=4, tile=4, Hq=6, D=8)
    attention.plan(drawn_bsr([(4, 4), (1, 7)]))
    with pytest.raises(ValueError, match="3 rows and 4 pages; allowed: 2 and 4"):
        attention.plan(drawn_bsr([(1, 3), (1, 3), (1, 7)]))
    with pytest.raises(ValueError, match="1 rows and 5 pages; allowed: 2 and 4"):
        attention.plan(drawn_bsr([(1, 19)]))


def test_facts_follow_from_arithmetic():
    plan, cascade = page.block_sparse_facts()["plan"], page.block_sparse_facts()["cascade"]
    total = 32_768 + 31 * 1_024
    share = -(-total // 16 // 132) * 16  # keys in the pages of an even share
    assert plan["chunks"] == -(-32_768 // share) + 31 * -(-1_024 // share)
    assert plan["per_request"] == 2 + 32_768 and plan["balanced"] == 2 + share
    assert plan["even"] == (total + 2 * plan["chunks"]) / 132
    token = 2 * 8 * 128 * 2
    assert cascade["flat"] == 32 * (2_048 + 128) * token
    assert cascade["flat"] - cascade["cascaded"] == 31 * 2_048 * token


@pytest.mark.parametrize("merges", [True, False])
def test_shuffled_pages_planned_for_five_workers(merges, monkeypatch):
    """Skewed lengths; and that it would be seen if the parts of a row were merged in another way."""
    q, kv_cache, bsr, *_ = case((70, 1, 16, 3), BLOCK, [1] * 4, Hq=4)
    if not merges:
        monkeypatch.setattr(lesson, "merge_states", lambda o, lse: (o.mean(0), lse[0]))
    out, ref = attend(q, kv_cache, bsr, num_workers=5)[0], naive_block_sparse(q, kv_cache, bsr)[0]
    assert (common.relative_error(out, ref) <= common.TOLERANCE[torch.float32]) == merges

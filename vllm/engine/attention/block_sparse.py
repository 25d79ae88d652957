"""Attention as a block-sparse matrix: FlashInfer's format and plan, in torch. Lesson 03 shows it; no backend runs it.

Owns the matrix (BSR), what sequences share in it, and who computes which part; called by lesson 03. It never runs a
kernel: `run` computes what a persistent grid of programs would, which would split the work by KV head as well.
vLLM: `vllm/v1/attention/backends/flashinfer.py`.
"""

from __future__ import annotations

import common

import collections
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

# A step's attention is a matrix: a row for each query, a column for each slot of the KV cache. Almost all of it is
# empty, and what is not comes in blocks: a tile of queries times a page of keys. FlashInfer stores it like any
# block-sparse matrix, by compressed rows (BSR), and everything it does for serving is done to that format:
#   BSR      from block tables and back, query tiles, smaller pages;
#   cascade  what several sequences share, as coarse rows of their own, merged by log-sum-exp: read once, not by each;
#   plan     who computes what. All rows are cut into chunks of pages; each goes, costliest first, to the worker with
#            least, so that no processor waits for the longest sequence. Once per step, on the host;
#   run      what the processors do, in each layer. It reads buffers whose shapes and addresses never change, which is
#            what a CUDA graph asks for: the next step writes a new plan into them and replays the old graph.
#
# FlashInfer has several plans (`include/flashinfer/attention/scheduler.cuh`). `TwoStageHolisticPlan` is the one here,
# but takes chunks in the order of the batch, of 128 keys or multiples of 256. `PrefillSM90Plan` puts the longest first,
# and splits nothing. `PrefillPlan`, behind the wrappers of vLLM, looks for the smallest chunk whose number fits the
# grid, and leaves the order to the hardware. Ye et al. 2025.

# --- The format -------------------------------------------------------------------------------------------------------


class BSR(NamedTuple):
    """A block-sparse matrix of queries × slots; names and meaning are those of FlashInfer's paged wrappers.

    Row r belongs to queries [qo_indptr[r], qo_indptr[r + 1]); its keys lie, in order, in the pages
    indices[indptr[r] : indptr[r + 1]], all of them full but the last, which holds last_page_len[r] (0: no page).
    `causal`: a row's queries are the last of its positions, so query i of n sees keys j ≤ S − n + i; else all S.
    """

    qo_indptr: list[int]  # [R + 1]
    indptr: list[int]  # [R + 1]
    indices: list[int]  # [pages of all rows]
    last_page_len: list[int]  # [R]
    page_size: int
    causal: bool = True


Row = tuple[int, Sequence[int], int]  # queries, pages, keys


def from_rows(rows: Iterable[Row], page_size: int, causal: bool = True) -> BSR:
    """Rows one under another. Pages behind a row's last key, such as a table's padding, are left out."""
    rows = [(n, list(pages[: -(-S // page_size)]), S) for n, pages, S in rows]
    return BSR(
        [0, *itertools.accumulate(n for n, _, _ in rows)],
        [0, *itertools.accumulate(len(pages) for _, pages, _ in rows)],
        [page for _, pages, _ in rows for page in pages],
        [(S - 1) % page_size + 1 if S else 0 for *_, S in rows],
        page_size,
        causal,
    )


def rows_of(bsr: BSR) -> Iterator[Row]:
    """The opposite of `from_rows`."""
    for r, last in enumerate(bsr.last_page_len):
        pages = bsr.indices[bsr.indptr[r] : bsr.indptr[r + 1]]
        n = bsr.qo_indptr[r + 1] - bsr.qo_indptr[r]
        yield n, pages, (len(pages) - 1) * bsr.page_size + last if pages else 0


def from_block_table(
    block_table: torch.Tensor, seq_lens: torch.Tensor, query_lens: Sequence[int], page_size: int
) -> BSR:
    """One row per sequence (vLLM: `FlashInferMetadataBuilder._compute_flashinfer_kv_metadata`).

    Shapes: block_table [B, W], padded with the null block; seq_lens [B]; query_lens [B], at most seq_lens.
    """
    return from_rows(zip(query_lens, block_table.tolist(), seq_lens.tolist()), page_size)


def to_block_table(bsr: BSR) -> tuple[torch.Tensor, torch.Tensor]:
    """(block_table int32 [R, W], seq_lens int32 [R]): padding is what block tables have and BSR does not."""
    rows = list(rows_of(bsr))
    width = max((len(pages) for _, pages, _ in rows), default=0)
    table = [[*pages, *[0] * (width - len(pages))] for _, pages, _ in rows]
    return torch.tensor(table).view(len(rows), width).int(), torch.tensor([S for *_, S in rows]).int()


def tiled(bsr: BSR, tile: int) -> BSR:
    """Rows of at most `tile` queries. A causal tile ends at its last query's own key, so the mask keeps its meaning."""
    tiles = [
        (min(tile, n - i), pages, S - max(n - i - tile, 0) * bsr.causal)
        for n, pages, S in rows_of(bsr)
        for i in range(0, n, tile)
    ]
    return from_rows(tiles, bsr.page_size, bsr.causal)


def refined(bsr: BSR, page_size: int) -> BSR:
    """The same matrix in smaller pages: page p becomes pages p·k … p·k + k − 1 of the same memory, seen as
    `kv_cache.view(2, -1, page_size, Hkv, D)`. With 1 a column is a slot, and any set of keys is a row."""
    k = bsr.page_size // page_size
    rows = [(n, [p * k + j for p in pages for j in range(k)], S) for n, pages, S in rows_of(bsr)]
    return from_rows(rows, page_size, bsr.causal)


# --- Composable formats: what is shared is read once ------------------------------------------------------------------


def share(bsr: BSR) -> tuple[BSR, BSR]:
    """Neighbouring rows that begin with the same pages, as two matrices over the same queries and the same cache.

    The first has a row for each group of them: all its queries × the pages that all of it shares, no mask. The second
    has every row with what remains. Every (query, key) is in exactly one of the two, so merged they are exact.
    """

    def shareable(row: Row) -> Sequence[int]:
        n, pages, S = row  # full, and in sight of the row's first query, which sees S − n + 1 keys
        return pages[: (S - max(n - 1, 0) * bsr.causal) // bsr.page_size]

    coarse, rest = [], []
    for _, rows in itertools.groupby(rows_of(bsr), key=lambda row: next(iter(shareable(row)), None)):
        group = list(rows)
        columns = zip(*map(shareable, group)) if len(group) > 1 else ()
        same = sum(1 for _ in itertools.takewhile(lambda pages: len(set(pages)) == 1, columns))
        coarse.append((sum(n for n, *_ in group), group[0][1][:same], same * bsr.page_size))
        rest += [(n, pages[same:], S - same * bsr.page_size) for n, pages, S in group]
    return from_rows(coarse, bsr.page_size, causal=False), from_rows(rest, bsr.page_size, bsr.causal)


def cascade(bsr: BSR) -> list[BSR]:
    """A tree of prefixes, a matrix for each of its levels: `share`, again in what remains, until nothing is shared."""
    coarse, rest = share(bsr)
    return [coarse, *cascade(rest)] if coarse.indices else [bsr]


def merge_states(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint sets of keys, from attention over each: o [P, n, Hq, D], lse [P, n, Hq].

    lse = log Σ_p exp(lse_p),   o = Σ_p exp(lse_p − lse) o_p.   vLLM: `v1/attention/ops/merge_attn_states.py`.
    """
    total = lse.logsumexp(0)
    weights = (lse - torch.where(total == -math.inf, 0, total)).exp()
    return (weights[..., None] * o).sum(0), total


def kv_bytes(  # noqa: PLR0913  a batch, a tile, and the shape of the heads
    levels: Sequence[BSR], tile: int, Hq: int, Hkv: int, D: int, itemsize: int = 2
) -> int:
    """Bytes of keys and values that a layer reads: each tile reads its row's once. `tile` counts rows of a tensor-core
    tile, at least Hq / Hkv: the query heads of a KV head lie side by side in it (GQA: one read serves them all)."""
    keys = sum(S for level in levels for _, _, S in rows_of(tiled(level, tile * Hkv // Hq)))
    return keys * 2 * Hkv * D * itemsize


# --- Plan -------------------------------------------------------------------------------------------------------------


def cost(queries: int, keys: int) -> int:
    """What a chunk takes, in keys read: FlashInfer's `cost_function`, a tile of queries counts twice its height."""
    return 2 * queries + keys


class Chunk(NamedTuple):
    """Pages [first, last) of a row, and what they cost."""

    row: int
    first: int
    last: int
    cost: int


def split(bsr: BSR, num_workers: int) -> list[Chunk]:
    """Every row in chunks, none larger than a worker's even share L = ⌈pages / workers⌉.

    Σ_r ⌈p_r / L⌉ ≤ rows + workers, and those of rows with several chunks are fewer than 2 · workers: whatever the
    batch, buffers of these sizes hold its plan and its partial results.
    """
    limit, size = max(1, -(-len(bsr.indices) // num_workers)), bsr.page_size
    return [
        Chunk(r, p, last := min(p + limit, len(pages)), cost(n, min(last * size, S) - p * size))
        for r, (n, pages, S) in enumerate(rows_of(bsr))
        for p in range(0, len(pages), limit)
    ]


def balance(chunks: Sequence[Chunk], num_workers: int) -> list[list[int]]:
    """Which of the chunks each worker gets: the costliest first, always to the worker who has least so far.

    The busiest one ends at most (1 − 1/workers) · (the costliest chunk) after a perfect split (Graham 1966).
    """
    heap, assigned = [(0, w) for w in range(num_workers)], [[] for _ in range(num_workers)]
    for i in sorted(range(len(chunks)), key=lambda i: -chunks[i].cost):
        load, w = heap[0]
        heapq.heapreplace(heap, (load + chunks[i].cost, w))
        assigned[w].append(i)
    return assigned


def makespan(chunks: Sequence[Chunk], num_workers: int) -> int:
    """When the last worker is done."""
    return max(sum(chunks[i].cost for i in worker) for worker in balance(chunks, num_workers))


# --- Run --------------------------------------------------------------------------------------------------------------


def gather(kv_cache: torch.Tensor, pages: torch.Tensor, keys: int) -> torch.Tensor:
    """The first `keys` keys and values of some pages, [2, keys, Hkv, D]: the only place where the cache is read."""
    return kv_cache[:, pages].flatten(1, 2)[:, :keys]


def attend(  # noqa: PLR0913  a row is its queries, pages, place and mask
    q: torch.Tensor, kv_cache: torch.Tensor, pages: torch.Tensor, start: int, S: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's n queries against its keys [start, S), as far as `pages` hold them: (o [n, Hq, D], lse [n, Hq])."""
    (n, Hq, D), (page_size, Hkv) = q.shape, kv_cache.shape[2:4]
    k, v = gather(kv_cache, pages, min(len(pages) * page_size, S - start)).transpose(1, 2)  # [Hkv, keys, D]
    queries = q.view(n, Hkv, -1, D).transpose(0, 1)  # [Hkv, n, G, D]
    s = queries.flatten(1, 2) @ k.mT / math.sqrt(D)  # [Hkv, n G, keys]: a group's heads are rows of one product
    if causal:
        key, own = torch.arange(start, start + k.shape[1], device=q.device), torch.arange(S - n, S, device=q.device)
        s = s.masked_fill((key > own[:, None]).repeat_interleave(Hq // Hkv, 0), -math.inf)
    lse = s.logsumexp(-1)
    o = (s - torch.where(lse == -math.inf, 0, lse)[..., None]).exp() @ v
    return o.view(queries.shape).transpose(0, 1).reshape(n, Hq, D), lse.view(Hkv, n, -1).transpose(0, 1).reshape(n, Hq)


class BlockSparseAttention:
    """`plan` once per step, `run` once per layer (FlashInfer: `BatchAttention`). All buffers are made here, once."""

    def __init__(  # noqa: PLR0913  the sizes of all buffers
        self, num_workers: int, max_rows: int, max_pages: int, tile: int, Hq: int, D: int
    ) -> None:
        sizes = {
            "qo_indptr": max_rows + 1,
            "indptr": max_rows + 1,
            "indices": max_pages,
            "kv_len": max_rows,
            "work_indptr": num_workers + 1,
            "merge_indptr": max_rows + 1,
            "causal": 1,
        }
        ints = {"dtype": torch.int32, "device": common.device()}
        self.buffers = {name: torch.zeros(size, **ints) for name, size in sizes.items()}
        self.buffers["work"] = torch.zeros(max_rows + num_workers, 4, **ints)  # row, first page, last page, part
        self.parts = torch.zeros(2 * num_workers, tile, Hq, D, device=common.device())
        self.part_lse = torch.zeros(2 * num_workers, tile, Hq, device=common.device())
        self.num_workers, self.max_rows, self.max_pages, self.tile = num_workers, max_rows, max_pages, tile

    def plan(self, bsr: BSR) -> None:
        """Write a batch's work list and merge list. Raises ValueError if it has more rows or pages than agreed."""
        bsr = tiled(bsr, self.tile)
        if len(bsr.last_page_len) > self.max_rows or len(bsr.indices) > self.max_pages:
            raise ValueError(
                f"{len(bsr.last_page_len)} rows and {len(bsr.indices)} pages; "
                f"allowed: {self.max_rows} and {self.max_pages}"
            )
        chunks = split(bsr, self.num_workers)
        assigned = balance(chunks, self.num_workers)
        counts = collections.Counter(chunk.row for chunk in chunks)
        # Only what was split is merged. Its parts lie side by side, a row's after another's; −1: to the output at once.
        part = itertools.count()
        work = [(*chunk[:3], next(part) if counts[chunk.row] > 1 else -1) for chunk in chunks]
        parts = (counts[r] if counts[r] > 1 else 0 for r in range(len(bsr.last_page_len)))
        self._put("work", [work[i] for worker in assigned for i in worker])
        self._put("work_indptr", [0, *itertools.accumulate(map(len, assigned))])
        self._put("merge_indptr", [0, *itertools.accumulate(parts)])
        self._put("qo_indptr", bsr.qo_indptr)
        self._put("indptr", bsr.indptr)
        self._put("indices", bsr.indices)
        self._put("kv_len", [S for *_, S in rows_of(bsr)])
        self._put("causal", [bsr.causal])

    def _put(self, name: str, values: Sequence) -> None:
        """In place, the same address: what is beyond the batch repeats the last value, so pointers there are empty."""
        buffer = self.buffers[name]
        buffer[: len(values)] = torch.tensor(values, dtype=torch.int32).view(len(values), *buffer.shape[1:])
        buffer[len(values) :] = buffer[len(values) - 1] if values else 0

    def run(self, q: torch.Tensor, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(o [T, Hq, D], lse [T, Hq]) for q [T, Hq, D] and a layer's kv_cache [2, num_blocks, page_size, Hkv, D].

        Two launches of fixed size: `num_workers` programs that walk through their lists, `max_rows` that merge.
        """
        at = {name: buffer.tolist() for name, buffer in self.buffers.items() if name != "indices"}
        o, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=q.dtype, device=q.device)
        for w in range(self.num_workers):
            for row, first, last, part in at["work"][at["work_indptr"][w] : at["work_indptr"][w + 1]]:
                queries = slice(at["qo_indptr"][row], at["qo_indptr"][row + 1])
                pages = self.buffers["indices"][at["indptr"][row] + first : at["indptr"][row] + last]
                state = attend(
                    q[queries], kv_cache, pages, first * kv_cache.shape[2], at["kv_len"][row], bool(at["causal"][0])
                )
                if part < 0:
                    o[queries], lse[queries] = state
                else:
                    self.parts[part, : len(state[0])], self.part_lse[part, : len(state[0])] = state
        for row in range(self.max_rows):
            parts = slice(at["merge_indptr"][row], at["merge_indptr"][row + 1])
            if parts.start < parts.stop:
                queries = slice(at["qo_indptr"][row], at["qo_indptr"][row + 1])
                n = queries.stop - queries.start
                o[queries], lse[queries] = merge_states(self.parts[parts, :n], self.part_lse[parts, :n])
        return o, lse

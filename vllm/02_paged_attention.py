"""02 · PagedAttention: KV memory in pages.

The question: nobody knows how long an answer will be, so how can one GPU hold as many conversations as possible?

The mechanism:
  1. Cut the KV memory of each layer into blocks of 16 slots; a slot holds one token's keys and values.
  2. A pool of block ids: a queue of free ones, and for each id the number of its owners. Block 0 is nobody's.
  3. Each sequence has a block table: logical block i -> physical block. It takes a block when its last one is full.
  4. Waste is the unfilled end of the last block, at most 15 slots; any free block fits anyone: no holes.
  5. Writing goes through `slot_mapping`, one slot number per token of the step.
  6. The decode kernel reads keys tile by tile and looks up each tile's blocks in the table: one more load, of 4 bytes.
  7. Two sequences with the same past share its blocks: fork copies the table and raises the counts.
  8. A shared block is copied when an owner is about to write into it: copy-on-write, at most one block per fork.
On a CPU two operations of torch take the kernel's place in step 6: `engine/attention/torch_paged.py`.

Numbers to remember: existing systems used 20.4 to 38.2 % of KV memory for tokens, paging 96.3 % (Kwon et al. 2023).
The table costs 4 bytes per 65,536 bytes of one layer's KV (Llama-3.1-8B, bf16, blocks of 16).

How to run:
  uv run python vllm/02_paged_attention.py                      the whole story
  uv run python vllm/02_paged_attention.py --block-size 2048    break it: pages as large as the reservation they replace
  uv run python vllm/02_paged_attention.py --bench              minutes: paged against contiguous, sharing measured

Read for this: Kwon et al. 2023 (PagedAttention), Dao et al. 2023 (Flash-Decoding), Yu et al. 2022 (Orca),
vLLM 0.32 `v1/core/block_pool.py` and `v1/attention/ops/triton_unified_attention.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import collections
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import tl, triton

import llama
from lab import lengths, roofline

KEY = "02_paged_attention"
kv_cache_lesson = common.lesson("01_kv_cache")
KVCacheSpec = roofline.KVCacheSpec
from engine.attention.metadata import AttentionMetadata
from engine.attention.splits import default_splits
from engine.attention.torch_paged import FEW_TOKENS, plan_decode, plan_few, prefill_attention


# --- The block pool -------------------------------------------------------------------------------------------------


class OutOfBlocks(Exception):
    """The pool cannot supply what was asked for; nothing was changed."""


class BlockPool:
    """`num_blocks` physical blocks of KV memory, counted and queued. It knows ids, never tensors.

    Block 0 is the null block: block tables are padded with it, it is never written and never handed out, so
    `num_blocks - 1` are usable. Every other block is in exactly one state: free (reference count 0, in the queue) or
    owned (count = number of block tables that hold it). As in vLLM 0.32's `v1/core/block_pool.py:BlockPool`.
    """

    def __init__(self, num_blocks: int) -> None:
        """Raises InputError if there is no room for the null block and one more."""
        if num_blocks < 2:
            raise common.InputError(f"num_blocks is {num_blocks}; allowed: at least 2 (block 0 is the null block)")
        self.num_blocks = num_blocks
        # An ordered dict is a queue from whose middle a block can leave in O(1), which prefix caching will need.
        # vLLM writes a doubly linked list by hand for it (FreeKVCacheBlockQueue).
        self.free_queue = collections.OrderedDict.fromkeys(range(1, num_blocks))
        self.ref_count = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks from the front of the queue, each with one owner. Raises OutOfBlocks, changing nothing."""
        if n > len(self.free_queue):
            raise OutOfBlocks(f"{n} block{'s' * (n > 1)} asked for, {len(self.free_queue)} free")
        blocks = [self.free_queue.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self.ref_count[block] = 1
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """One more owner for each block; a free one leaves the queue. Raises ValueError, changing nothing."""
        for block in blocks:
            if not 0 < block < self.num_blocks:
                raise ValueError(f"block {block} is not one of 1..{self.num_blocks - 1}")
        for block in blocks:
            if self.ref_count[block] == 0:
                del self.free_queue[block]
            self.ref_count[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One owner less for each block of a table, given in table order and walked from its end. O(len(blocks)).

        Raises ValueError for a block that is not owned (freed twice, the null block, unknown), changing nothing.
        """
        for block, times in collections.Counter(blocks).items():
            if not 0 < block < self.num_blocks:
                raise ValueError(f"block {block} is not one of 1..{self.num_blocks - 1}")
            if self.ref_count[block] < times:
                raise ValueError(f"block {block} is freed {times} times but has {self.ref_count[block]} owners")
        released = []
        for block in reversed(blocks):
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                released.append(block)
        self._release(released)

    def _release(self, blocks: list[int]) -> None:
        """Queue blocks that lost their last owner: as a group, in this order, at the front.

        Table [1, 2, 3, 4], released to queue [8, 9], makes it [4, 3, 2, 1, 8, 9]: the pool is a stack, and what was
        used last, and may still be in the GPU's L2 cache, is used next. Lesson 05 sends cached blocks to the back.
        """
        for block in reversed(blocks):
            self.free_queue[block] = None
            self.free_queue.move_to_end(block, last=False)

    def check(self) -> None:
        """Raise AssertionError unless free + used = pool, no count is negative, and the queue is those at 0."""
        assert min(self.ref_count) >= 0, "negative reference count"
        assert self.ref_count[0] == 0, "the null block has an owner"
        unowned = {block for block in range(1, self.num_blocks) if self.ref_count[block] == 0}
        assert unowned == set(self.free_queue), "the queue is not exactly the blocks without an owner"


# --- Block tables ---------------------------------------------------------------------------------------------------


class BlockTable:
    """One sequence's map from logical to physical blocks: position p lives in block `blocks[p // block_size]`."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self.blocks: list[int] = []
        self.num_tokens = 0

    @property
    def capacity(self) -> int:
        """Slots in its blocks; those beyond num_tokens are all that paging wastes."""
        return len(self.blocks) * self.block_size

    def append(self, n: int) -> list[tuple[int, int]]:
        """Make room for `n` more tokens. Returns the (source, target) block copies to be done before they are written.

        Raises OutOfBlocks, changing nothing.
        """
        size, end = self.block_size, self.num_tokens + n
        missing = -(-end // size) - len(self.blocks)
        # Copy-on-write: the first new token would fall into a last block that other sequences read as well.
        shared = n > 0 and self.num_tokens % size > 0 and self.pool.ref_count[self.blocks[-1]] > 1
        new = self.pool.allocate(missing + shared)
        copies = []
        if shared:
            copies.append((self.blocks[-1], new[0]))
            self.pool.free(self.blocks[-1:])  # one owner less; it has others, so its content stays
            self.blocks[-1] = new.pop(0)
        self.blocks += new
        self.num_tokens = end
        return copies

    def fork(self) -> BlockTable:
        """A second sequence with the same past: it copies the table, not the KV, and every block has one more owner."""
        self.pool.touch(self.blocks)
        child = BlockTable(self.pool, self.block_size)
        child.blocks, child.num_tokens = list(self.blocks), self.num_tokens
        return child

    def free(self) -> None:
        """Give all blocks back, last first."""
        self.pool.free(self.blocks)
        self.blocks, self.num_tokens = [], 0


# --- What we want to compute: attention through a block table, obviously right ---------------------------------------


def paged_decode_reference(q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor,
                           seq_lens: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """One query per sequence against all its keys, slot by slot, head by head, in fp64.

    Shapes: q [B, Hq, D], kv_cache [2, num_blocks, block_size, Hkv, D], block_table [B, W], seq_lens [B] -> [B, Hq, D].
    """
    B, Hq, D = q.shape
    block_size, Hkv = kv_cache.shape[2:4]
    out = torch.zeros(B, Hq, D, dtype=torch.float64)  # an empty sequence attends to nothing: zeros
    for b, S in enumerate(seq_lens.tolist()):
        places = [(int(block_table[b, p // block_size]), p % block_size) for p in range(S)]
        for h in range(Hq if S else 0):
            k = torch.stack([kv_cache[0, block, i, h * Hkv // Hq] for block, i in places]).double().cpu()  # [S, D]
            v = torch.stack([kv_cache[1, block, i, h * Hkv // Hq] for block, i in places]).double().cpu()
            out[b, h] = torch.softmax(k @ q[b, h].double().cpu() / math.sqrt(D), dim=0) @ v
    return out


# --- Kernel 1: write new keys and values into their slots -----------------------------------------------------------


@common.kernel
def reshape_and_cache_kernel(k, v, kv_cache, slot_mapping, stride_k, stride_v, stride_kv,
                             WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)  # int64: a cache may hold more than 2^31 elements
    if slot >= 0:
        i = tl.arange(0, BLOCK)  # all heads of one token lie side by side: WIDTH = Hkv * D
        inside = i < WIDTH
        place = kv_cache + slot * WIDTH + i
        tl.store(place, tl.load(k + token * stride_k + i, mask=inside), mask=inside)
        tl.store(place + stride_kv, tl.load(v + token * stride_v + i, mask=inside), mask=inside)


def reshape_and_cache(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store this step's keys and values. Slot = block * block_size + offset; -1 is padding, skipped.

    Semantics: kv_cache[0].flatten(0, 1)[slot_mapping[t]] = k[t], and kv_cache[1] = v[t], where slot_mapping[t] ≥ 0.
    Shapes: k, v [T, Hkv, D] (token stride free), kv_cache [2, num_blocks, block_size, Hkv, D], slot_mapping int64 [T].
    vLLM 0.32: v1/attention/ops/triton_reshape_and_cache_flash.py, csrc reshape_and_cache_flash.
    """
    T, Hkv, D = k.shape
    if not common.runs_kernel(k):
        if (slot_mapping < 0).any():
            keep = slot_mapping >= 0
            k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
        kv_cache[0].view(-1, Hkv, D).index_copy_(0, slot_mapping, k)
        kv_cache[1].view(-1, Hkv, D).index_copy_(0, slot_mapping, v)
    elif T > 0:
        reshape_and_cache_kernel[(T,)](
            k, v, kv_cache, slot_mapping, k.stride(0), v.stride(0), kv_cache.stride(0),
            WIDTH=Hkv * D, BLOCK=triton.next_power_of_2(Hkv * D), num_warps=4,
        )  # fmt: skip


# --- Kernel 2: copy whole blocks, for copy-on-write -----------------------------------------------------------------


@common.kernel
def copy_blocks_kernel(kv_cache, pairs, stride_kv, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    pair, half, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # half 0: keys, 1: values
    source, target = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH  # WIDTH = block_size * Hkv * D
    base = kv_cache + half * stride_kv + i
    tl.store(base + target * WIDTH, tl.load(base + source * WIDTH, mask=inside), mask=inside)


def copy_blocks(kv_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks within one layer's cache. No block may be a source and a target (BlockTable.append's never are).

    Semantics: kv_cache[:, target] = kv_cache[:, source] for every pair, all at once.
    Shapes: kv_cache [2, num_blocks, block_size, Hkv, D], pairs int64 [P, 2] of (source, target).
    """
    if not common.runs_kernel(kv_cache):
        kv_cache[:, pairs[:, 1]] = kv_cache[:, pairs[:, 0]]
    elif len(pairs) > 0:
        width = kv_cache.stride(1)
        copy_blocks_kernel[(len(pairs), 2, triton.cdiv(width, 1024))](
            kv_cache, pairs, kv_cache.stride(0), WIDTH=width, BLOCK=1024, num_warps=4
        )


# --- Kernel 3: paged decode, whole or split along the keys ----------------------------------------------------------
#
# One program owns one sequence, one KV head and one range of keys. With grouped-query attention G = Hq / Hkv query
# heads read the same keys, so they are the rows of one tile (padded to 16, the least a tensor core takes), and every
# key is loaded once instead of G times. The softmax is the online one (lesson 03 derives it): with scores
# s_j = q·k_j / √D seen tile by tile,
#
#     m' = max(m, max_j s_j)     α = exp(m − m')     ℓ' = α ℓ + Σ_j exp(s_j − m')     o' = α o + Σ_j exp(s_j − m') v_j
#
# and o / ℓ at the end. Paging is the one line that loads `block`: the rest would be the same on a contiguous cache.


@common.kernel
def paged_decode_kernel(q, kv_cache, block_table, seq_lens, out, lse, scale, stride_q, stride_kv,
                        table_width: tl.int32, G: tl.constexpr, D: tl.constexpr, Hkv: tl.constexpr,
                        BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
                        SPLITS: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    b, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    S = tl.load(seq_lens + b)
    length = tl.cdiv(tl.cdiv(S, TILE), SPLITS) * TILE  # whole tiles, shared out evenly over the splits
    start = split * length
    end = tl.minimum(start + length, S)

    g, d, j = tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, TILE)
    row, column = (g < G)[:, None], (d < D)[None, :]
    head = kv_head * G + g[:, None]
    q_tile = tl.load(q + b * stride_q + head * D + d[None, :], mask=row & column, other=0.0)  # [ROWS, D]
    if UPCAST:  # Triton's interpreter multiplies 16-bit floats wrongly; a GPU wants them as they are
        q_tile = q_tile.to(tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, D_PAD], tl.float32)

    for first in range(start, end, TILE):
        p = first + j  # positions [TILE]
        live = p < end
        # The pointer indirection. Dead positions read the null block: valid memory, masked below.
        block = tl.load(block_table + b * table_width + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        place = kv_cache + ((block * BLOCK_SIZE + p % BLOCK_SIZE) * Hkv + kv_head) * D  # [TILE]

        k = tl.load(place[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)  # [D, TILE]
        if UPCAST:
            k = k.to(tl.float32)
        s = tl.dot(q_tile, k, input_precision="ieee") * scale  # [ROWS, TILE]
        s = tl.where(live[None, :], s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp(m - m_new)
        w = tl.exp(s - m_new[:, None])
        l = l * alpha + tl.sum(w, 1)
        # Whatever the null block holds, NaN included: 0 * NaN is NaN, so values need the mask, weights are not enough.
        v = tl.load(place[:, None] + stride_kv + d[None, :], mask=live[:, None] & column, other=0.0)  # [TILE, D]
        if UPCAST:
            v = v.to(tl.float32)
        o = o * alpha[:, None] + tl.dot(w.to(v.dtype), v, input_precision="ieee")
        m = m_new

    l = tl.where(l > 0, l, 1.0)  # no key at all (an empty sequence or split): o is 0 and m is −inf
    part = (b * Hkv * G + head) * SPLITS + split  # [ROWS, 1]
    tl.store(out + part * D + d[None, :], (o / l[:, None]).to(out.dtype.element_ty), mask=row & column)
    if SPLITS > 1:
        tl.store(lse + part, (m + tl.log(l))[:, None], mask=row)  # log Σ_j exp(s_j)


# A split computed o_i = Σ_j exp(s_j) v_j / L_i over its own keys, with L_i = Σ_j exp(s_j). Therefore
#
#     o = Σ_i L_i o_i / Σ_i L_i,      L_i = exp(lse_i − max lse)   (the maximum cancels, and keeps exp in range)


@common.kernel
def combine_splits_kernel(parts, lse, out, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0)  # one row per sequence and query head
    i, d = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    lse_i = tl.load(lse + row * SPLITS + i)  # [SPLITS]
    top = tl.max(lse_i, 0)
    L = tl.exp(lse_i - tl.where(top == float("-inf"), 0.0, top))
    o_i = tl.load(parts + (row * SPLITS + i[:, None]) * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    total = tl.sum(L, 0)
    o = tl.sum(L[:, None] * o_i, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * D + d, o.to(out.dtype.element_ty), mask=d < D)


def paged_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
    num_splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Decode attention through a block table: the newest token of each sequence against all its keys.

    Semantics: out[b, h] = Σ_j softmax_j(q[b, h]·k_j / √D) v_j, j < seq_lens[b], in block_table[b, j // block_size].
    Shapes: q [B, Hq, D] (sequence stride free), kv_cache [2, num_blocks, block_size, Hkv, D], block_table int32 [B, W],
    seq_lens int32 [B] -> [B, Hq, D]. `max_seq_len` ≥ every seq_len bounds the grid without reading the tensor.
    `num_splits` (a power of two) cuts the keys into ranges computed in parallel (Flash-Decoding, Dao et al. 2023);
    by default as many as fill the GPU. vLLM 0.32: v1/attention/ops/triton_unified_attention.py, its 2D and 3D kernels.
    """
    if not common.runs_kernel(q):
        return plan_decode(block_table, seq_lens, kv_cache, q.shape[1])(q, kv_cache)
    B, Hq, D = q.shape
    block_size, Hkv = kv_cache.shape[2:4]
    out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    if B == 0:
        return out
    splits = num_splits or default_splits(B * Hkv, max_seq_len, q.device)
    parts, lse = out, out
    if splits > 1:
        parts = torch.empty(B, Hq, splits, D, dtype=torch.float32, device=q.device)
        lse = torch.empty(B, Hq, splits, dtype=torch.float32, device=q.device)
    D_pad, rows = triton.next_power_of_2(D), max(16, triton.next_power_of_2(Hq // Hkv))
    tile, num_warps, num_stages = decode_tiles(q.dtype, D_pad, q.is_cuda and not torch.version.hip, rows)
    paged_decode_kernel[(B, Hkv, splits)](
        q, kv_cache, block_table, seq_lens, parts, lse, 1 / math.sqrt(D), q.stride(0), kv_cache.stride(0),
        block_table.stride(0), G=Hq // Hkv, D=D, Hkv=Hkv, BLOCK_SIZE=block_size,
        ROWS=rows, D_PAD=max(16, D_pad), TILE=tile, SPLITS=splits,
        UPCAST=common.INTERPRET, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits > 1:
        combine_splits_kernel[(B * Hq,)](parts, lse, out, D=D, D_PAD=D_pad, SPLITS=splits, num_warps=4)
    return out


def decode_tiles(dtype: torch.dtype, D_pad: int, nvidia: bool, rows: int = 16) -> tuple[int, int, int]:
    """(keys per tile, warps, stages) of a decode kernel: without spills up to 64 heads of a group (`rows`), and in 16
    bits the fastest on an H200.

    The pipeliner shares its stages out between the table's load and those of the keys, which wait for it: of 3, K and V
    get one buffer each, of 5 two, and the next tile is on its way. There, twice the keys in each tile did more.
    """
    half = nvidia and dtype.itemsize == 2
    if dtype.itemsize * D_pad > 256:
        return 32, 8, 5 if half else 3
    return 128 if half and D_pad == 128 and rows <= 32 else 64, 4, 3


def example_launches(dtype: torch.dtype) -> None:
    """Every kernel's wrapper at the shapes of SmolLM2 and of an 8B Llama, on meta tensors: for the compile check."""
    empty = functools.partial(torch.empty, device="meta")
    for Hq, Hkv, D in ((9, 3, 64), (32, 8, 128)):
        kv_cache, k = empty(2, 1024, 16, Hkv, D, dtype=dtype), empty(32, Hkv, D, dtype=dtype)
        q, table, lens = empty(32, Hq, D, dtype=dtype), empty(32, 1024, dtype=torch.int32), empty(32, dtype=torch.int32)
        reshape_and_cache(k, k, kv_cache, empty(32, dtype=torch.int64))
        copy_blocks(kv_cache, empty(4, 2, dtype=torch.int64))
        paged_decode(q, kv_cache, table, lens, max_seq_len=16384)
        paged_decode(q, kv_cache, table, lens, max_seq_len=200)  # short: not split


# --- The same on a CPU ----------------------------------------------------------------------------------------------
#
# Decoding has a file of its own, `engine/attention/torch_paged.py`: planned once per step, then called in every layer.


# --- The cache of a whole model, and one step through it ------------------------------------------------------------


class PagedKVCache:
    """The KV memory of every layer: one tensor [2, num_blocks, block_size, Hkv, D] each. Block b is block b in all of
    them, so one block table serves the whole model."""

    def __init__(self, model: llama.Llama, num_blocks: int, block_size: int) -> None:
        shape = (2, num_blocks, block_size, model.num_kv_heads, model.config.head_dim)
        layers = range(model.config.num_hidden_layers)
        self.layers = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in layers]
        self.block_size, self.num_heads = block_size, model.num_heads
        self.copied_blocks = 0

    can_roll_back = True  # what is written behind the last token of a sequence is overwritten later

    def release(self, blocks: Sequence[int]) -> None:
        """A request has left these blocks: here, nothing else belongs to them."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in every layer."""
        if pairs:
            self.copied_blocks += len(pairs)
            table = torch.tensor(pairs, device=self.layers[0].device)
            for kv_cache in self.layers:
                copy_blocks(kv_cache, table)

    def attend(self, meta: AttentionMetadata) -> llama.Attend:
        """The model's `attend` for one step: store the new keys and values, then look back through the block table.

        Sequences with one new token decode, on a CPU those with a few; the others run prompts through torch (lesson 10
        has one kernel for both).
        """
        kernel = common.runs_kernel(self.layers[0])
        few = 1 if kernel else FEW_TOKENS
        size, decode_lens, prompts, first = self.block_size, meta.seq_lens.clone(), [], 0
        for b, n in enumerate(meta.query_lens):
            if n > few:
                p = torch.arange(S := int(meta.seq_lens[b]), device=meta.positions.device)  # positions of the context
                slots = None if n == S else meta.block_table[b, p // size] * size + p % size  # None: all of it is new
                prompts.append((slice(first, first + n), slots))
                decode_lens[b] = 0  # the decode kernel skips it: to it, the sequence is empty
            first += n
        if not kernel:
            decodes = plan_few(meta.block_table, meta.query_lens, meta.seq_lens, self.layers[0], self.num_heads)
        else:
            decode = functools.partial(paged_decode, block_table=meta.block_table, seq_lens=decode_lens,
                                       max_seq_len=meta.max_seq_len)  # fmt: skip
            decodes = [(meta.query_start_loc[:-1], decode)] if len(prompts) < len(meta.query_lens) else []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv_cache = self.layers[layer]
            reshape_and_cache(k, v, kv_cache, meta.slot_mapping)
            if len(decodes) == 1 and not prompts:
                return decodes[0][1](q, kv_cache)
            out = torch.empty_like(q)
            for rows, decode in decodes:
                out[rows] = decode(q[rows], kv_cache)
            for tokens, slots in prompts:
                keys, values = (k[tokens], v[tokens]) if slots is None else kv_cache.flatten(1, 2)[:, slots]
                out[tokens] = prefill_attention(q[tokens], keys, values)
            return out

        return attend


class PagedAttention:
    """This lesson in an engine's seam (`engine/seams.py`)."""

    def make_cache(self, model: llama.Llama, num_blocks: int, block_size: int) -> PagedKVCache:
        """The memory behind the block tables."""
        return PagedKVCache(model, num_blocks, block_size)

    def plan(self, meta: AttentionMetadata, cache: PagedKVCache) -> llama.Attend:
        """Attention of one step."""
        return cache.attend(meta)


def run_step(model: llama.Llama, cache: PagedKVCache, tables: Sequence[BlockTable],
             new_tokens: Sequence[Sequence[int]]) -> torch.Tensor:  # fmt: skip
    """Append each sequence's new tokens and run the model over them. Returns the logits of the last ones [B, vocab].

    Raises OutOfBlocks; the step is then lost (an engine asks the pool before it starts one: lesson 04).
    """
    copies = [pair for table, tokens in zip(tables, new_tokens, strict=True) for pair in table.append(len(tokens))]
    cache.copy_blocks(copies)
    meta = AttentionMetadata.build([t.blocks for t in tables], [t.num_tokens for t in tables],
                                   [len(tokens) for tokens in new_tokens], cache.block_size, model.device)  # fmt: skip
    token_ids = torch.tensor([token for tokens in new_tokens for token in tokens], device=model.device)  # [T]
    hidden = model.forward(token_ids, meta.positions, cache.attend(meta))
    return model.logits(hidden[meta.query_start_loc[1:] - 1])


# --- Decoding: a batch, n samples of one prompt, beams --------------------------------------------------------------
#
# One loop for all three. In each step every sequence has a parent and a new token: in a batch and among samples it
# continues itself, a beam continues whatever scored best. All that differs is
# `select(log probabilities [sequences, vocab]) -> (parents, tokens)`.

Select = Callable[[torch.Tensor], tuple[Sequence[int], list[int]]]


def greedy(logp: torch.Tensor) -> tuple[Sequence[int], list[int]]:
    """Every sequence continues itself with the most probable token."""
    return range(len(logp)), logp.argmax(-1).tolist()


def sampling(n: int, seed: int = 0) -> Select:
    """`n` independent samples at temperature 1: all start from the prompt, then each goes its own way."""
    generators = [torch.Generator().manual_seed(seed + i) for i in range(n)]

    def select(logp: torch.Tensor) -> tuple[Sequence[int], list[int]]:
        parents = [0] * n if len(logp) == 1 else range(n)
        p = logp.exp().cpu()
        return parents, [int(p[i].multinomial(1, generator=g)) for i, g in zip(parents, generators)]

    return select


def beams(width: int) -> Select:
    """Keep the `width` most probable sequences. A token that ends the text is taken like any other."""
    scores: torch.Tensor | float = 0.0  # log probability of each beam [beams, 1]

    def select(logp: torch.Tensor) -> tuple[Sequence[int], list[int]]:
        nonlocal scores
        best, index = (scores + logp).flatten().topk(width)
        scores = best[:, None]
        return (index // logp.shape[1]).tolist(), (index % logp.shape[1]).tolist()

    return select


@dataclasses.dataclass
class Run:
    """What the prompts became, and after each step the blocks that the sequences held."""

    token_ids: list[list[int]]
    blocks: list[int]  # distinct physical blocks
    table_entries: list[int]  # blocks if each entry of each table had its own
    copied_blocks: int

    @property
    def saved(self) -> float:
        """As the paper counts it: blocks saved by sharing / blocks without sharing, over all steps."""
        return 1 - sum(self.blocks) / sum(self.table_entries)


def decode(model: llama.Llama, prompts: Sequence[Sequence[int]], select: Select, max_tokens: int, num_blocks: int,
           block_size: int, share: bool = True) -> Run:  # fmt: skip
    """Decode prompts, all together, into the sequences that `select` asks for. Those with the same past share blocks
    or, naively, have private copies. Raises OutOfBlocks."""
    cache, pool = PagedKVCache(model, num_blocks, block_size), BlockPool(num_blocks)
    tables, new = [BlockTable(pool, block_size) for _ in prompts], prompts
    run = Run([[] for _ in prompts], [], [], 0)
    for _ in range(max_tokens):
        parents, tokens = select(run_step(model, cache, tables, new).float().log_softmax(-1))
        for p, table in enumerate(tables):
            if p not in parents:  # nobody continues this beam
                table.free()
        # A parent's first child inherits its table, the others fork it.
        tables = [fork(cache, tables[p], share) if p in parents[:i] else tables[p] for i, p in enumerate(parents)]
        run.token_ids = [[*run.token_ids[p], token] for p, token in zip(parents, tokens)]
        run.blocks.append(len({block for table in tables for block in table.blocks}))
        run.table_entries.append(sum(len(table.blocks) for table in tables))
        new = [[token] for token in tokens]
    for table in tables:
        table.free()
    pool.check()
    assert pool.num_free_blocks == num_blocks - 1, "blocks leaked"
    run.copied_blocks = cache.copied_blocks
    return run


def fork(cache: PagedKVCache, table: BlockTable, share: bool) -> BlockTable:
    """A sequence with the same past: by sharing its blocks, or by copying each of them."""
    if share:
        return table.fork()
    child = BlockTable(table.pool, table.block_size)
    child.append(table.num_tokens)
    cache.copy_blocks(list(zip(table.blocks, child.blocks)))
    return child


# --- The allocators that paging replaced ----------------------------------------------------------------------------


class FirstFit:
    """Contiguous runs of slots: a request gets the lowest hole that is large enough."""

    def __init__(self, num_slots: int) -> None:
        self.holes = [(0, num_slots)]  # (start, size), in order of address, never adjacent

    def allocate(self, size: int) -> tuple[int, int]:
        """Take `size` slots in a row. Returns (start, size taken). Raises OutOfBlocks if no hole is that large."""
        for i, (start, hole) in enumerate(self.holes):
            if hole >= size:
                self.holes[i : i + 1] = [(start + size, hole - size)] if hole > size else []
                return start, size
        largest = max((hole for _, hole in self.holes), default=0)
        raise OutOfBlocks(f"{size} slots in a row asked for, the largest hole has {largest}")

    def free(self, start: int, size: int) -> None:
        """Give a run back and merge it with the holes it touches."""
        merged: list[tuple[int, int]] = []
        for first, n in sorted([*self.holes, (start, size)]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + n)
            else:
                merged.append((first, n))
        self.holes = merged


class Buddy:
    """Runs of 2^k slots at multiples of 2^k: halved until they just fit, merged with their other half when freed.

    What the paper assumes Orca to use. A pool that is no power of two starts as the powers of two it is the sum of.
    """

    def __init__(self, num_slots: int) -> None:
        self.starts: dict[int, set[int]] = {1 << k: set() for k in range(num_slots.bit_length())}
        start = 0
        for size in reversed(self.starts):
            if num_slots & size:
                self.starts[size].add(start)
                start += size

    def allocate(self, size: int) -> tuple[int, int]:
        """As FirstFit.allocate; takes the next power of two."""
        wanted = triton.next_power_of_2(size)
        found = min((n for n, starts in self.starts.items() if n >= wanted and starts), default=None)
        if found is None:
            raise OutOfBlocks(f"{wanted} slots in a row asked for, and no free buddy is that large")
        start = min(self.starts[found])
        self.starts[found].remove(start)
        while found > wanted:  # keep the lower half, free the upper one
            found //= 2
            self.starts[found].add(start + found)
        return start, wanted

    def free(self, start: int, size: int) -> None:
        while start ^ size in self.starts.get(size, ()):  # the other half is free as well: one run of twice the size
            self.starts[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self.starts[size].add(start)


class Reservation:
    """What a contiguous allocator gives a request: all the slots it may ever need. (Paging gives a BlockTable.)"""

    def __init__(self, memory: FirstFit | Buddy, size: int) -> None:
        self.memory = memory
        self.start, self.capacity = memory.allocate(size)

    def append(self, n: int) -> None:
        """More tokens move into slots that were set aside for them."""

    def free(self) -> None:
        self.memory.free(self.start, self.capacity)


MAX_MODEL_LEN = 2048  # OPT-13B's context, and what a reservation without knowledge has to assume

# How a contiguous allocator places a request and how much it reserves: the paper's three versions of Orca on buddies,
# and the one that knows every length placed without rounding up.
POLICIES = {
    "Max": (Buddy, lambda prompt, output: MAX_MODEL_LEN),
    "Pow2": (Buddy, lambda prompt, output: min(MAX_MODEL_LEN, prompt + triton.next_power_of_2(output))),
    "Oracle": (Buddy, lambda prompt, output: prompt + output),
    "First-fit": (FirstFit, lambda prompt, output: prompt + output),
    "Paged": (BlockPool, lambda prompt, output: prompt),
}


def request_lengths(workload: str, n: int, seed: int = 0) -> list[tuple[int, int]]:
    """`n` (prompt, output) lengths: geometric with the published means (lesson 01), at most 2,048 in sum."""
    rng, means = random.Random(seed), lengths.WORKLOADS[workload]
    pairs = ([lengths.geometric(rng, mean) for mean in means] for _ in range(n))
    pairs = ((min(prompt, MAX_MODEL_LEN // 2), output) for prompt, output in pairs)
    return [(prompt, min(output, MAX_MODEL_LEN - prompt)) for prompt, output in pairs]


def contest(policy: str, lengths: Sequence[tuple[int, int]], num_slots: int, steps: int,
            block_size: int = 16) -> dict[str, float]:  # fmt: skip
    """Serve a queue that never empties, first come first served; every running request writes one token per step.

    A request is admitted when its reservation (paging: what it holds already) fits. When paging runs out of blocks, the
    youngest gives its own back and waits at the head of the queue. Returns means over the last three quarters of the
    steps: requests in the batch; shares of all slots that hold tokens, that will (`reserved`), that never will
    (`internal`) and that nobody has (`external`); and the preemptions per request served.
    """
    kind, reserve = POLICIES[policy]
    memory = kind(num_slots // block_size if kind is BlockPool else num_slots)
    queue = collections.deque(SimpleNamespace(final=p + o, tokens=p, reserved=reserve(p, o)) for p, o in lengths)
    running: list[SimpleNamespace] = []
    sums, preempted, served = collections.Counter(), 0, 0
    for step in range(steps):
        while True:
            job = queue[0]
            try:
                job.place = place(memory, job.tokens, job.reserved, block_size)
            except OutOfBlocks:
                break
            running.append(queue.popleft())
        i = 0
        while i < len(running):
            try:
                running[i].place.append(1)
                running[i].tokens += 1
                i += 1
            except OutOfBlocks:
                victim = running.pop()  # the youngest; then try again, unless that was this one
                victim.place.free()
                queue.appendleft(victim)
                preempted += 1
        if step >= steps // 4:
            tokens = sum(job.tokens for job in running)
            used = sum(min(job.final, job.place.capacity) for job in running)
            never = sum(job.place.capacity for job in running) - used
            sums.update(batch=len(running), tokens=tokens, reserved=used - tokens, internal=never)
        for job in running:
            if job.tokens == job.final:
                served += 1
                job.place.free()
        running = [job for job in running if job.tokens < job.final]
    steps -= steps // 4
    shares = {key: sums[key] / (steps * num_slots) for key in ("tokens", "reserved", "internal")}
    return {"batch": sums["batch"] / steps, **shares, "external": 1 - sum(shares.values()),
            "preemptions": preempted / max(1, served)}  # fmt: skip


def place(memory: BlockPool | FirstFit | Buddy, tokens: int, reserved: int,
          block_size: int) -> BlockTable | Reservation:  # fmt: skip
    """Admit a request: paging takes blocks for what it holds, the others what it may ever need. Raises OutOfBlocks."""
    if not isinstance(memory, BlockPool):
        return Reservation(memory, reserved)
    table = BlockTable(memory, block_size)
    table.append(tokens)
    return table


def sharing(n: int, lengths: Sequence[tuple[int, int]], block_size: int = 16) -> float:
    """Share of blocks that parallel sampling saves, from block tables alone: each prompt forked n − 1 times, then one
    token per sample and step (all samples of a prompt equally long). Counted like `Run.saved`, over all requests."""
    used = entries = 0
    for prompt, output in lengths:
        pool = BlockPool(2 + n * (prompt + output))
        tables = [place(pool, prompt, 0, block_size)]
        tables += [tables[0].fork() for _ in range(n - 1)]
        for _ in range(output - 1):  # the last token's keys and values are never stored
            for table in tables:
                table.append(1)
            used += pool.num_blocks - 1 - pool.num_free_blocks
            entries += sum(len(table.blocks) for table in tables)
    return 1 - used / entries


# --- The simulation: three allocators, one workload -----------------------------------------------------------------

ALLOCATORS = ("paged", "contiguous", "first-fit")
WORKLOADS = {
    "short chats": "400 requests of 20 to 199 tokens arrive",
    "one size": "400 requests of 64 tokens arrive",
    "holes": "requests of 64 tokens fill the memory, every second one finishes, one of 100 arrives",
    "growing": "40 requests arrive with 32 tokens and grow to 256, 32 at a time",
}
WIDGET_DEFAULT = {"allocator": "paged", "block_size": 16, "num_slots": 16384, "workload": "short chats", "finish": -1}


def workload_events(workload: str, num_slots: int) -> list[tuple[str, Any]]:
    """("arrive", [(request, tokens now, in the end), …]), ("grow", request) by 32 tokens, or ("finish", request)."""
    if workload == "short chats":
        arrivals, x = [], 1
        for i in range(400):
            x = x * 16807 % 2147483647  # Lehmer's generator: exact in JavaScript as well
            arrivals.append((i, 20 + x % 180, 20 + x % 180))
        return [("arrive", arrivals)]
    if workload == "one size":
        return [("arrive", [(i, 64, 64) for i in range(400)])]
    if workload == "holes":
        n = num_slots // 64 - 1
        fill = ("arrive", [(i, 64, 64) for i in range(n)])
        return [fill, *(("finish", i) for i in range(1, n, 2)), ("arrive", [(n, 100, 100)])]
    return [("arrive", [(i, 32, 256) for i in range(40)]), *(("grow", i) for _ in range(7) for i in range(40))]


def spans(where: BlockTable | Reservation, first: int = 0) -> list[list[int]]:
    """The memory of a request, from its block number `first` on, as [first slot, slots]; neighbours joined."""
    if isinstance(where, Reservation):
        return [[where.start, where.capacity]]
    joined: list[list[int]] = []
    for block in where.blocks[first:]:
        if joined and sum(joined[-1]) == block * where.block_size:
            joined[-1][1] += where.block_size
        else:
            joined.append([block * where.block_size, where.block_size])
    return joined


WIDGET_CHOICES = {
    "allocator": ALLOCATORS, "block_size": [1 << k for k in range(12)], "num_slots": [4096, 8192, 16384],
    "workload": list(WORKLOADS), "finish": range(-1, 400),
}  # fmt: skip


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Requests arrive, grow and finish; an allocator places them, first come, first served. JSON to JSON.

    params: as WIDGET_CHOICES lists them; `finish` is a request that finishes at the end, or −1. Returns each admission,
    refusal, growth (or that there is no room for it: stuck) and finish, with the spans of slots taken or given and the
    state after it. Raises InputError.
    """
    params = common.checked(params, WIDGET_CHOICES)
    paged, size, num_slots = params["allocator"] == "paged", params["block_size"], params["num_slots"]
    memory = BlockPool(num_slots // size) if paged else FirstFit(num_slots)
    places: dict[int, BlockTable | Reservation] = {}
    length: dict[int, int] = {}
    queue: collections.deque[tuple[int, int, int]] = collections.deque()
    steps: list[dict[str, Any]] = []

    def record(event: str, request: int, tokens: int, moved: list[list[int]], why: object = "") -> None:
        holes = [memory.num_free_blocks * size] if paged else [hole for _, hole in memory.holes]
        steps.append({"event": event, "request": request, "tokens": tokens, "spans": moved, "why": str(why),
                      "state": {"running": len(places), "waiting": len(queue), "tokens": sum(length.values()),
                                "taken": sum(where.capacity for where in places.values()), "free": sum(holes),
                                "largest_fit": max(holes, default=0)}})  # fmt: skip

    stuck = blocked = False  # no room: for one that must grow; for the queue's head, and nothing was freed since
    for event, what in [*workload_events(params["workload"], num_slots), ("finish", params["finish"])]:
        if event == "arrive":
            queue.extend(what)
        elif event == "grow" and what in places and not stuck:
            try:
                before = len(places[what].blocks) if paged else 0
                places[what].append(32)
                length[what] += 32
                record("grow", what, 32, spans(places[what], before) if paged else [])
            except OutOfBlocks as error:
                record("stuck", what, 32, [], error)
                stuck = True  # somebody has to go: lesson 11
        elif event == "finish" and what in places:
            where, blocked = places.pop(what), False
            given = spans(where)
            where.free()
            record("finish", what, length.pop(what), given)
        while queue and not blocked:
            request, tokens, final = queue[0]
            try:
                reserved = MAX_MODEL_LEN if params["allocator"] == "contiguous" else final
                places[request] = place(memory, tokens, reserved, size)
                length[request] = tokens
                queue.popleft()
                record("admit", request, tokens, spans(places[request]))
            except OutOfBlocks as error:
                record("refuse", request, tokens, [], error)
                blocked = True
    return {"params": params, "null_slots": size if paged else 0, "steps": steps, "final": steps[-1]["state"],
            "places": [[request, length[request], spans(where)] for request, where in places.items()]}  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The end of a simulation as text: a strip of memory, and what is in it."""
    params, end, cell = trace["params"], trace["final"], trace["params"]["num_slots"] // 64
    slots = [(slot, i < tokens) for _, tokens, where in trace["places"]
             for i, slot in enumerate(start + j for start, size in where for j in range(size))]  # fmt: skip
    taken = collections.Counter(slot // cell for slot, _ in slots)  # per 64th of the memory
    held = collections.Counter(slot // cell for slot, full in slots if full)
    strip = ("." if t == 0 else "-" if 2 * h < t else "+" if 10 * h < 9 * cell else "#"
             for t, h in ((taken[i], held[i]) for i in range(64)))  # fmt: skip
    blocks = f", blocks of {params['block_size']}" if params["allocator"] == "paged" else ""
    happened = {"refuse": "refused", "stuck": "cannot grow"}
    without = [f"request {s['request']} {happened[s['event']]}: {s['why']}" for s in trace["steps"] if s["why"]]
    return "\n".join([
        f"{params['allocator']}{blocks}, {params['num_slots']:,} slots: {WORKLOADS[params['workload']]}",
        f"[{''.join(strip)}]",
        "# at least 90 % tokens   + at least half of what is taken   - less   . free",
        f"running {end['running']}, waiting {end['waiting']}; tokens {end['tokens']:,}, taken {end['taken']:,} "
        f"(wasted {end['taken'] - end['tokens']:,})",
        f"free {end['free']:,}, and the largest request that fits is {end['largest_fit']:,}",
        *without[-1:],
    ])  # fmt: skip


# --- Facts and figures ----------------------------------------------------------------------------------------------

# Kwon et al. 2023: share of memory that holds tokens (figure 2) and requests in the batch (§6.2, ShareGPT, 2 req/s);
# blocks saved by sharing on Alpaca (figure 15).
PAPER = {"Max": (0.204, 7.00), "Pow2": (0.268, 9.81), "Oracle": (0.382, 13.62), "Paged": (0.963, 30.42)}
PAPER_SAVED = {"parallel": {2: 0.0609, 4: 0.0853, 6: 0.0979}, "beam": {2: 0.3756, 4: 0.5313, 6: 0.5516}}


def story() -> dict[str, Any]:
    """Ten blocks of four slots: A and B are prompts of 6 and 3 tokens, C is forked from A, then all three grow."""
    pool = BlockPool(10)
    a, b = BlockTable(pool, 4), BlockTable(pool, 4)
    a.append(6), b.append(3)
    c = a.fork()
    copies = [list(pair) for table, n in ((a, 1), (c, 4), (b, 6)) for pair in table.append(n)]
    tables = {name: {"blocks": t.blocks, "tokens": t.num_tokens} for name, t in (("A", a), ("B", b), ("C", c))}
    return {"tables": tables, "ref_count": pool.ref_count, "copies": copies}


@functools.cache
def facts() -> dict[str, Any]:
    """What the text quotes and can be computed without a model."""
    variants = {f"block_{1 << k}": {"block_size": 1 << k} for k in range(12)}
    ends = {name: simulate(WIDGET_DEFAULT | change)["final"]
            for name, change in (variants | {a: {"allocator": a} for a in ALLOCATORS[1:]}).items()}  # fmt: skip
    opt, llama_8b = (KVCacheSpec.from_config(roofline.MODELS[name]) for name in ("OPT-13B", "Llama-3.1-8B"))
    opt_slots = 12 * 2**30 // opt.bytes_per_token()  # what the weights leave of an A100 with 40 GB
    share_gpt, alpaca = request_lengths("ShareGPT", 1500), request_lengths("Alpaca", 100)
    block = 16 * llama_8b.bytes_per_token() // llama_8b.num_layers
    return {
        "story": story(),
        "sweep": {name: end | {"wasted": end["taken"] - end["tokens"]} for name, end in ends.items()},
        "holes": simulate(WIDGET_DEFAULT | {"allocator": "first-fit", "workload": "holes"})["final"],
        "opt_slots": opt_slots,
        "contest": {policy: contest(policy, share_gpt, opt_slots, 6000) for policy in POLICIES},
        "sharing": {f"parallel_{n}": sharing(n, alpaca) for n in PAPER_SAVED["parallel"]},
        # One layer's block of 16 tokens and its table entry, which the program of every KV head reads for itself.
        "bytes": {"block": block, "entry": 4, "stored": 4 / block, "read": 4 * llama_8b.num_kv_heads / block},
    }


def draw(folder: str | Path) -> list[Path]:
    """The figures, from `facts()` alone."""
    f, color = facts(), common.COLORS
    # Block tables above, physical memory below, a line from each entry to its block.
    figure, ax = common.new_figure(8, 3.2)
    owner_color = {"A": color["blue"], "B": color["orange"], "C": color["green"]}
    owners, filled = collections.defaultdict(str), [0] * 10
    for (name, table), left in zip(f["story"]["tables"].items(), (0.5, 6.5, 14.0)):
        ax.text(left - 0.75, 6.3, f"block table of {name}, {table['tokens']} tokens", color=owner_color[name])
        for i, block in enumerate(table["blocks"]):
            x = left + 1.5 * i
            ax.bar(x, 1.1, 1.5, 4.9, color="white", edgecolor=owner_color[name], linewidth=1.5)
            ax.text(x, 5.45, str(block), ha="center", va="center")
            ax.plot([x, 2 * block + 1], [4.85, 2.25], color=owner_color[name], linewidth=1.3)
            owners[block] += name
            filled[block] = min(4, table["tokens"] - 4 * i)
    for block in range(10):
        who = owners.get(block, "")
        shade = color["purple"] if len(who) > 1 else owner_color.get(who, color["light"])
        slots = [shade] * filled[block] + [color["light"]] * (4 - filled[block])
        ax.bar([2 * block + 0.34 + 0.44 * i for i in range(4)], 1.2, 0.4, 1.0, color=slots)
        count = f["story"]["ref_count"][block]
        note = "null" if block == 0 else "free" if not who else f"{count} owner{'s' * (count > 1)}"
        ax.text(2 * block + 1, 0.75, f"{block}\n{note}", ha="center", va="top", fontsize=9)
    ax.set(xlim=(-0.4, 20.2), ylim=(-0.5, 7))
    ax.axis("off")
    paths = [common.save_figure(figure, folder, "02_block_tables")]
    # What the memory is filled with.
    figure, ax = common.new_figure(8, 3.1)
    left = [0.0] * len(POLICIES)
    parts = {"tokens": "blue", "reserved": "green", "internal": "orange", "external and other": "light"}
    for part, shade in parts.items():
        widths = [f["contest"][policy][part.split()[0]] for policy in POLICIES]
        ax.barh(list(POLICIES), widths, left=left, color=color[shade], label=part)
        left = [a + b for a, b in zip(left, widths)]
    known = {policy: share for policy, (share, _) in PAPER.items()}
    ax.plot(list(known.values()), list(known), "D", color=color["ink"], label="paper: tokens")
    for policy in POLICIES:
        ax.text(1.015, policy, f"{f['contest'][policy]['batch']:.1f} requests", va="center", fontsize=9)
    ax.set(xlim=(0, 1), xlabel="share of all KV slots")
    ax.invert_yaxis()
    ax.legend(ncols=5, loc="lower left", bbox_to_anchor=(-0.14, 1.0), fontsize=9, columnspacing=1.2)
    return [*paths, common.save_figure(figure, folder, "02_contest")]


def random_case(seq_lens: Sequence[int], block_size: int, Hq: int, Hkv: int, D: int,
                dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(q, kv_cache, block_table, seq_lens): shuffled blocks, NaN wherever no token lies, zeros in the null block."""
    need = [-(-S // block_size) for S in seq_lens]
    ids = (torch.randperm(sum(need) + 2) + 1).tolist()  # two blocks stay free
    blocks = [[ids.pop() for _ in range(n)] for n in need]
    meta = AttentionMetadata.build(blocks, seq_lens, seq_lens, block_size)
    kv_cache = torch.full((2, sum(need) + 3, block_size, Hkv, D), math.nan, dtype=dtype, device=common.device())
    kv_cache[:, 0] = 0
    written = torch.randn(2, sum(seq_lens), Hkv, D, device=kv_cache.device)
    kv_cache.view(2, -1, Hkv, D)[:, meta.slot_mapping] = written.to(dtype)
    return torch.randn(len(seq_lens), Hq, D).to(kv_cache), kv_cache, meta.block_table, meta.seq_lens


def measure_indirection(cases: Iterable[tuple[int, int, int]], Hq: int, Hkv: int, D: int, dtype: torch.dtype,
                        seconds: float) -> list[dict[str, Any]]:  # fmt: skip
    """Decode attention for (B, S, block_size): through shuffled blocks; through one block per sequence, which is a
    contiguous cache read by the same code; lesson 01's kernel (on a CPU: SDPA) on a contiguous cache. Seconds."""
    rows = []
    for B, S, block_size in cases:
        row: dict[str, Any] = {"B": B, "S": S, "block_size": block_size}
        for name, size in (("paged", block_size), ("one_block", S)):
            case = random_case([S] * B, size, Hq, Hkv, D, dtype)
            row[name] = common.measure_graph(functools.partial(paged_decode, *case, S), seconds).median
        k, v = torch.randn(2, B, S, Hkv, D, device=common.device()).to(dtype)
        contiguous = functools.partial(kv_cache_lesson.decode_attention, case[0], k, v, case[3], S)
        row["contiguous"] = common.measure_graph(contiguous, seconds).median
        row["gbps"] = 2 * k.nbytes / row["paged"] / 1e9
        rows.append(row | {"ratio": row["paged"] / row["contiguous"], "to_one_block": row["paged"] / row["one_block"]})
    return rows


def benchmark(model: llama.Llama, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The long measurements, printed and returned."""
    copy = common.copy_bandwidth()
    if common.HAS_GPU:
        cases = [(32, S, 16) for S in (1024, 4096, 16384)] + [(32, 4096, n) for n in (8, 32, 128)] + [(1, 65536, 16)]
        rows = measure_indirection(cases, 32, 8, 128, torch.bfloat16, 0.3)
    else:
        cases = [(32, 192, n) for n in (8, 16, 64)] + [(32, 1024, 16)]
        rows = measure_indirection(cases, 9, 3, 64, torch.float32, 1.5)
    shown = [[r["B"], r["S"], r["block_size"], *(f"{r[x] * 1e3:.3f}" for x in ("paged", "one_block", "contiguous")),
              f"{r['to_one_block']:.2f}", f"{r['gbps']:.1f}", f"{r['gbps'] / copy * 1e9:.0%}"]
             for r in rows]  # fmt: skip
    other = "lesson 01's" if common.HAS_GPU else "SDPA"
    common.table(["B", "S", "block", "paged, ms", "one block", other, "paged : one block", "GB/s", "of copy"], shown)
    saved = {}
    for width, paper in PAPER_SAVED["beam"].items():
        runs = [decode(model, [prompt], beams(width), 58, 1024, 16) for prompt in prompts]
        saved[f"beam_{width}"] = 1 - sum(sum(r.blocks) for r in runs) / sum(sum(r.table_entries) for r in runs)
        common.say(f"beam search, width {width}: {saved[f'beam_{width}']:.1%} of blocks saved (paper {paper:.1%})")
    return {"indirection": rows, "sharing": saved, "copy_bandwidth": copy}


# --- The story ------------------------------------------------------------------------------------------------------

QUESTIONS = ["What are the three primary colors?", "Say hello.", "Describe the structure of an atom, and how large its "
             "nucleus is compared with the whole.", "Write a short story about a small brave boat."]  # fmt: skip


def check_kernels(block_size: int) -> None:
    """Kernels and torch path against the slot-by-slot reference, on lengths around the block size."""
    case = random_case([0, 1, block_size - 1, block_size, block_size + 1], block_size, 9, 3, 64, torch.float32)
    reference, S = paged_decode_reference(*case), block_size + 1
    if not common.HAS_GPU:
        common.check("torch path: keys and values in place", paged_decode(*case, S), reference)
    if not common.HAS_TRITON:
        common.skipped("the Triton kernels", common.kernel_mode())
        return
    with common.use_kernels():
        common.check("paged_decode_kernel", paged_decode(*case, S, num_splits=1), reference)
        common.check("its keys split in 4, and combined", paged_decode(*case, S, num_splits=4), reference)


def check_model(model: llama.Llama, prompts: Sequence[list[int]], num_blocks: int, block_size: int) -> None:
    """Several prompts at once through the block table, against one at a time in lesson 01's contiguous cache."""
    outputs = decode(model, prompts, greedy, 8, num_blocks, block_size).token_ids
    spec = KVCacheSpec(model.config.num_hidden_layers, model.num_kv_heads, *[model.config.head_dim] * 2)
    for prompt, output in zip(prompts, outputs):
        cache = kv_cache_lesson.KVCache(spec, 1, len(prompt) + 8, model.dtype, model.device)
        expected = kv_cache_lesson.generate(model, prompt, 8, cache).token_ids
        common.check_equal(f"prompt of {len(prompt)}: the same 8 tokens as from a contiguous cache", output, expected)
    if common.HAS_TRITON and not common.HAS_GPU:
        before = paged_decode_kernel.launches
        with common.use_kernels():
            (same,) = decode(model, prompts[:1], greedy, 2, num_blocks, block_size).token_ids
        n = paged_decode_kernel.launches - before
        what = f"the first 2 of them by {n} launch{'es' * (n > 1)} of paged_decode_kernel"
        common.check_equal(what, same, outputs[0][:2])


def check_sharing(model: llama.Llama, prompt: list[int], args: argparse.Namespace, num_blocks: int) -> None:
    """Sampling and beam search over shared blocks, against private copies of every block."""
    rows = []
    for kind, n, select in (("parallel", args.samples, sampling), ("beam", args.beam_width, beams)):
        shared, private = (decode(model, [prompt], select(n), 12, num_blocks, args.block_size, share)
                           for share in (True, False))  # fmt: skip
        common.check_equal(f"{kind}, {n} sequences: the same tokens", shared.token_ids, private.token_ids)
        rows.append([f"{kind}, {n}", private.blocks[-1], private.copied_blocks, shared.blocks[-1], shared.copied_blocks,
                     f"{shared.saved:.1%}"])  # fmt: skip
    common.table(["", "private blocks", "copied", "shared blocks", "copied on write", "saved"], rows)
    ours = (f"{facts()['sharing'][f'parallel_{n}']:.1%} ({paper:.1%})" for n, paper in PAPER_SAVED["parallel"].items())
    common.say(f"Saved by 2, 4, 6 samples of Alpaca's short prompts (in the paper): {', '.join(ours)}.")


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    sizes = [1 << k for k in range(3, 12)]
    p.add_argument("--block-size", type=int, choices=sizes, default=16, help="slots per block (default 16)")
    p.add_argument("--num-slots", type=common.number(int, 4096, 65536), default=4096, help="KV memory (default 4096)")
    p.add_argument("--samples", type=common.number(int, 1, 16), default=4, help="samples of one prompt (default 4)")
    p.add_argument("--beam-width", type=common.number(int, 1, 16), default=4, help="beams (default 4)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine, f, num_blocks = common.start(args), facts(), args.num_slots // args.block_size

    model, tokenizer = llama.load(args.model)
    prompts = [tokenizer.ask(question) for question in QUESTIONS]
    llama.check_context(args.model, max(map(len, prompts)) + (58 if args.bench else 12))
    common.heading(f"1. Attention through a block table, blocks of {args.block_size}")
    check_kernels(args.block_size)

    common.heading(f"2. A real model in {num_blocks} blocks: three prompts at once")
    try:
        check_model(model, prompts[:3], num_blocks, args.block_size)
        common.heading("3. One prompt, several sequences: shared blocks against private copies")
        check_sharing(model, prompts[3], args, num_blocks)
    except OutOfBlocks as error:
        common.say(f"✗ OUT OF BLOCKS: {error}.\n{args.num_slots:,} slots make {num_blocks} blocks; one is the null "
                   "block, and every sequence takes at least one, however short.")  # fmt: skip

    common.heading("4. 16,384 slots, 400 requests of 20 to 199 tokens: how many fit at once?")
    common.say(describe(simulate(WIDGET_DEFAULT | {"block_size": args.block_size})))
    columns = ["first-fit", *(f"block_{n}" for n in (1, 16, 128, 512, 2048)), "contiguous"]
    rows = [[key, *(f"{f['sweep'][column][key]:,}" for column in columns)] for key in ("running", "wasted")]
    common.table(["slots per block", "(exact)", "1", "16", "128", "512", "2048", "(2048 contiguous)"], rows)

    common.heading(f"5. A queue that never empties: OPT-13B on 40 GB, {f['opt_slots']:,} slots, ShareGPT lengths")
    rows = []
    for policy, r in f["contest"].items():
        tokens, batch = PAPER.get(policy, (None, None))
        rows.append([policy, f"{r['batch']:.1f}", batch or "", f"{r['tokens']:.1%}", f"{tokens:.1%}" if tokens else "",
                     *(f"{r[x]:.1%}" for x in ("reserved", "internal", "external"))])  # fmt: skip
    common.table(["", "requests", "(paper)", "tokens", "(paper)", "reserved", "internal", "external"], rows)
    common.say(f"Paging overcommits: {f['contest']['Paged']['preemptions']:.1f} preemptions per request here.")

    common.heading("6. What the indirection costs")
    b = f["bytes"]
    common.say(f"Bytes: a {b['entry']}-byte table entry per {b['block']:,} bytes of one layer's keys and values: "
               f"{b['stored']:.3%} (Llama-3.1-8B, bf16);\nread by each of 8 KV heads: {b['read']:.3%}.")  # fmt: skip
    bench = benchmark(model, prompts) if args.bench else {}
    if not args.bench and not common.HAS_GPU:
        (row,) = measure_indirection([(32, 192, 16)], 9, 3, 64, torch.float32, 0.3)
        common.say(f"Time: {row['ratio']:.1f} x SDPA on a contiguous cache, on this CPU and without a kernel.\n"
                   "--bench on a GPU measures the kernel.")  # fmt: skip
    if args.figure:
        draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": f, "bench": bench})


if __name__ == "__main__":
    common.run(main)

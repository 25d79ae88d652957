"""02 · PagedAttention: KV memory in pages.

The question: nobody knows how long an answer will be, so how can one GPU hold as many conversations as possible?

The mechanism:
  1. Cut the KV memory of each layer into blocks of 16 slots; a slot holds one token's keys and values.
  2. A pool of block ids: a queue of free ones, and for each id the number of its owners. Block 0 is nobody's.
  3. Each sequence has a block table: logical block i -> physical block. It takes a block when its last one is full.
  4. Waste is the unfilled end of the last block, at most 15 slots; any free block fits anyone: no holes.
  5. Two sequences with the same past share its blocks: fork copies the table and raises the counts.
  6. A shared block is copied when an owner is about to write into it: copy-on-write, at most one block per fork.
  7. Writing goes through `slot_mapping`, one slot number per token of the step.
  8. The decode kernel reads keys tile by tile and looks up each tile's blocks in the table: one more load, of 4 bytes.
On a CPU two operations of torch take the kernel's place in step 8: `engine/attention/torch_paged.py`.

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
from common import tl, triton

import collections
import contextlib
import functools
import math
from collections.abc import Sequence

import torch

from engine import arguments
from engine.attention.metadata import AttentionMetadata
from engine.attention.splits import default_splits
from engine.attention.torch_paged import FEW_TOKENS, Decode, plan_decode, plan_few, prefill_attention
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from lab import cli

KEY = "02_paged_attention"


# --- What we want to compute: attention through a block table, obviously right ---------------------------------------


def paged_decode_reference(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """One query per sequence against all its keys, slot by slot, head by head, in fp64.

    Position p of sequence b lies in block `block_table[b, p // block_size]`, at offset p % block_size.
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


# --- The block pool -------------------------------------------------------------------------------------------------


class OutOfBlocks(Exception):
    """The pool cannot supply what was asked for; nothing was changed."""


class BlockPool:
    """`num_blocks` physical blocks of KV memory, counted and queued. It knows ids, never tensors.

    Block 0 is the null block: block tables are padded with it, it is never written and never handed out, so
    `num_blocks - 1` are usable. Every other block is in exactly one state: free (reference count 0, in the queue) or
    owned (count = number of block tables that hold it). As in vLLM 0.32's `v1/core/block_pool.py:BlockPool`; the
    engine's, in `engine/core/block_pool.py`, also remembers what a free block holds (lesson 05).
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
        if not all(0 < block < self.num_blocks for block in blocks):
            raise ValueError(f"{list(blocks)}: blocks are 1..{self.num_blocks - 1}")
        for block in blocks:
            self.free_queue.pop(block, None)
            self.ref_count[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One owner less for each block of a table. Those that lose their last owner go to the front of the queue.

        Table [1, 2, 3, 4], given back to queue [8, 9], makes it [4, 3, 2, 1, 8, 9]: the pool is a stack, and what was
        used last, and may still be in the GPU's L2 cache, is used next. Lesson 05 sends cached blocks to the back.
        Raises ValueError for a block that is not owned (freed twice, the null block, unknown), changing nothing.
        """
        for block, times in collections.Counter(blocks).items():
            if not 0 < block < self.num_blocks or self.ref_count[block] < times:
                raise ValueError(f"block {block} is freed {times} times and has fewer owners")
        for block in blocks:
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
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
        """Give all blocks back."""
        self.pool.free(self.blocks)
        self.blocks, self.num_tokens = [], 0


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
        strides, width = (k.stride(0), v.stride(0), kv_cache.stride(0)), Hkv * D
        reshape_and_cache_kernel[(T,)](
            k, v, kv_cache, slot_mapping, *strides, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4
        )


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
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    num_splits: int | None = None,
) -> torch.Tensor:
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
    tensors = q, kv_cache, block_table, seq_lens, parts, lse
    strides = q.stride(0), kv_cache.stride(0), block_table.stride(0)
    sizes = {"G": Hq // Hkv, "D": D, "Hkv": Hkv, "BLOCK_SIZE": block_size, "SPLITS": splits, "UPCAST": common.INTERPRET}
    tiles = {"ROWS": rows, "D_PAD": max(16, D_pad), "TILE": tile, "num_warps": num_warps, "num_stages": num_stages}
    paged_decode_kernel[(B, Hkv, splits)](*tensors, 1 / math.sqrt(D), *strides, **sizes, **tiles)
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

    # What an engine asks of a cache besides.
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
        few = 1 if common.runs_kernel(self.layers[0]) else FEW_TOKENS
        prompts = self._plan_prompts(meta, few)
        decodes = self._plan_decodes(meta)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv_cache = self.layers[layer]
            reshape_and_cache(k, v, kv_cache, meta.slot_mapping)
            if len(decodes) == 1 and not prompts:
                return decodes[0][1](q, kv_cache)
            out = torch.empty_like(q)  # [T, Hq, D]
            for rows, decode in decodes:
                out[rows] = decode(q[rows], kv_cache)
            for tokens, slots in prompts:
                keys, values = kv_cache.flatten(1, 2)[:, slots]  # [S, Hkv, D] each
                out[tokens] = prefill_attention(q[tokens], keys, values)
            return out

        return attend

    def _plan_prompts(self, meta: AttentionMetadata, few: int) -> list[tuple[slice, torch.Tensor]]:
        """(rows of q, slots of all keys [S]) of each sequence with more than `few` new tokens."""
        prompts, first = [], 0
        for b, n in enumerate(meta.query_lens):
            if n > few:
                p = torch.arange(int(meta.seq_lens[b]), device=meta.positions.device)  # positions of the context [S]
                slots = meta.block_table[b, p // self.block_size] * self.block_size + p % self.block_size
                prompts.append((slice(first, first + n), slots))
            first += n
        return prompts

    def _plan_decodes(self, meta: AttentionMetadata) -> list[tuple[torch.Tensor, Decode]]:
        """(rows of q, what to call) of the other sequences: on a GPU one launch of the kernel."""
        if not common.runs_kernel(self.layers[0]):
            return plan_few(meta.block_table, meta.query_lens, meta.seq_lens, self.layers[0], self.num_heads)
        if min(meta.query_lens, default=2) > 1:
            return []
        decode_lens = meta.seq_lens.clone()
        for b, n in enumerate(meta.query_lens):
            if n > 1:
                decode_lens[b] = 0  # the kernel skips it: to it, the sequence is empty
        step = {"block_table": meta.block_table, "seq_lens": decode_lens, "max_seq_len": meta.max_seq_len}
        return [(meta.query_start_loc[:-1], functools.partial(paged_decode, **step))]


class PagedAttention:
    """This lesson in an engine's seam (`engine/seams.py`)."""

    def make_cache(self, model: llama.Llama, num_blocks: int, block_size: int) -> PagedKVCache:
        """The memory behind the block tables."""
        return PagedKVCache(model, num_blocks, block_size)

    def plan(self, meta: AttentionMetadata, cache: PagedKVCache) -> llama.Attend:
        """Attention of one step."""
        return cache.attend(meta)


def run_step(
    model: llama.Llama, cache: PagedKVCache, tables: Sequence[BlockTable], new_tokens: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Append each sequence's new tokens and run the model over them. Returns the logits of the last ones [B, vocab].

    Raises OutOfBlocks; the step is then lost (an engine asks the pool before it starts one: lesson 04).
    """
    counts = [len(tokens) for tokens in new_tokens]
    copies = [pair for table, n in zip(tables, counts, strict=True) for pair in table.append(n)]
    cache.copy_blocks(copies)
    blocks, seq_lens = [table.blocks for table in tables], [table.num_tokens for table in tables]
    meta = AttentionMetadata.build(blocks, seq_lens, counts, cache.block_size, model.device)
    token_ids = torch.tensor([token for tokens in new_tokens for token in tokens], device=model.device)  # [T]
    hidden = model.forward(token_ids, meta.positions, cache.attend(meta))
    return model.logits(hidden[meta.query_start_loc[1:] - 1])


def decode(
    model: llama.Llama, cache: PagedKVCache, tables: Sequence[BlockTable], first: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Continue all sequences together, greedily. `first` is each one's first new token: chosen, and not yet stored."""
    outputs = [[token] for token in first]
    for _ in range(max_tokens - 1):
        logits = run_step(model, cache, tables, [output[-1:] for output in outputs])  # [B, vocab]
        for output, token in zip(outputs, logits.argmax(-1).tolist()):
            output.append(token)
    return outputs


# --- The story ------------------------------------------------------------------------------------------------------

QUESTIONS = [
    "What are the three primary colors?",
    "How do bees make honey?",
    "Write a short story about a small brave boat.",
]


def random_case(
    seq_lens: Sequence[int], block_size: int, Hq: int, Hkv: int, D: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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


def tokens_without_cache(model: llama.Llama, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """The naive way to the same answer: prompt and answer through the model at once, each row's best token the next."""
    ids = torch.tensor([*prompt, *output], device=model.device)  # [T]
    positions = torch.arange(len(ids), device=model.device)
    hidden = model.forward(ids, positions, lambda layer, q, k, v: prefill_attention(q, k, v))
    return model.logits(hidden[len(prompt) - 1 :]).argmax(-1).tolist()  # [len(output) + 1]


def check_batch(model: llama.Llama, prompts: Sequence[list[int]], num_blocks: int, block_size: int) -> None:
    """Several prompts at once through their block tables, against one at a time without any cache."""
    cache, pool = PagedKVCache(model, num_blocks, block_size), BlockPool(num_blocks)
    tables = [BlockTable(pool, block_size) for _ in prompts]
    first = run_step(model, cache, tables, prompts).argmax(-1).tolist()
    outputs = decode(model, cache, tables, first, 7)
    before = paged_decode_kernel.launches
    with common.use_kernels():  # on a CPU, too: for the eighth token the interpreter runs them
        logits = run_step(model, cache, tables, [output[-1:] for output in outputs])  # [B, vocab]
    launches = paged_decode_kernel.launches - before
    for prompt, output, table, last in zip(prompts, outputs, tables, logits.argmax(-1).tolist()):
        what = f"prompt of {len(prompt)}, blocks {table.blocks}: the same 8 tokens as alone and without a cache"
        common.check_equal(what, [*output, last], tokens_without_cache(model, prompt, output))
    if launches:
        common.say(f"The last of the 8 took {launches} launches of paged_decode_kernel, one in each layer.")


def show_sharing(model: llama.Llama, tokenizer: Tokenizer, prompt: list[int], num_blocks: int, block_size: int) -> None:
    """Four answers to one prompt, each with another first token: forked from it, and each from a prompt of its own."""
    cache, pool = PagedKVCache(model, num_blocks, block_size), BlockPool(num_blocks)
    parent = BlockTable(pool, block_size)
    first = run_step(model, cache, [parent], [prompt])[0].topk(4).indices.tolist()
    shared = [parent, *(parent.fork() for _ in range(3))]
    outputs = decode(model, cache, shared, first, 10)

    private = [BlockTable(pool, block_size) for _ in range(4)]
    run_step(model, cache, private, [prompt] * 4)
    expected = decode(model, cache, private, first, 10)
    common.check_equal(f"4 answers to a prompt of {len(prompt)}: the same tokens as from 4 prompts", outputs, expected)

    rows = []
    for output, *both in zip(outputs, shared, private):
        tables = (" ".join(map(str, table.blocks)) for table in both)
        rows.append([repr(tokenizer.decode(output[:5])), *tables])
    common.table(["the answer begins", "blocks, forked", "blocks, a prompt each"], rows)
    used, alone = (len({block for table in tables for block in table.blocks}) for tables in (shared, private))
    common.say(f"{used} blocks instead of {alone}; {cache.copied_blocks} were copied on write.")
    pool.check()


def admitted(block_size: int, num_slots: int, lengths: Sequence[int]) -> tuple[int, int]:
    """Requests of these lengths come in, first come, first served, until the pool has no room for the next.

    Returns how many came in, and how many slots they hold and leave empty.
    """
    pool, tables = BlockPool(num_slots // block_size), []
    with contextlib.suppress(OutOfBlocks):
        for n in lengths:
            table = BlockTable(pool, block_size)
            table.append(n)
            tables.append(table)
    return len(tables), sum(table.capacity - table.num_tokens for table in tables)


def short_chats() -> list[int]:
    """Lengths of 400 requests, of 20 to 199 tokens, by Lehmer's random numbers."""
    lengths, x = [], 1
    for _ in range(400):
        x = x * 16807 % 2147483647
        lengths.append(20 + x % 180)
    return lengths


def show_waste(block_size: int) -> None:
    """Who fits into 16,384 slots: with 2,048 reserved for each request, and with blocks of several sizes."""
    lengths = short_chats()
    rows = [["2,048 slots reserved for each", 8, f"{8 * 2048 - sum(lengths[:8]):,}"]]
    for size in sorted({2048, 512, 128, 16, 1, block_size}, reverse=True):
        running, wasted = admitted(size, 16384, lengths)
        rows.append([f"blocks of {size:,}", running, f"{wasted:,}"])
    common.table(["", "requests", "slots held and left empty"], rows)
    common.say("Blocks as large as the reservation fit one request fewer: the null block takes one of them.")


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    sizes = [1 << k for k in range(3, 12)]
    p.add_argument("--block-size", type=int, choices=sizes, default=16, help="slots per block (default 16)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    num_blocks = 4096 // args.block_size
    model, tokenizer = loader.load(args.model)
    prompts = [tokenizer.ask(question) for question in QUESTIONS]
    loader.check_context(args.model, max(map(len, prompts)) + 12)

    common.heading(f"1. Attention through a block table, blocks of {args.block_size}")
    check_kernels(args.block_size)
    common.heading(f"2. The real model in {num_blocks} blocks: three prompts at once")
    try:
        check_batch(model, prompts, num_blocks, args.block_size)
        common.heading("3. One prompt, four answers: shared blocks, copied on write")
        show_sharing(model, tokenizer, prompts[2], num_blocks, args.block_size)
    except OutOfBlocks as error:
        common.say(f"✗ OUT OF BLOCKS: {error}.")
        common.say(f"4,096 slots make {num_blocks} blocks; one is the null block, and every sequence needs its own.")

    common.heading("4. 16,384 slots, 400 requests of 20 to 199 tokens: how many fit at once?")
    show_waste(args.block_size)
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

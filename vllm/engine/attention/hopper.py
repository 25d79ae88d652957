"""Warps that take turns: lesson 03's kernel for long prompts on Hopper, the way of FlashAttention-3, in Gluon.

Owns the kernel and what it takes; called by lesson 03's `flash_attention` where it `fits`. It never decides anything
else. vLLM: `vllm/vllm_flash_attn/`, whose `hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp` is this loop.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6
BLOCK_M, BLOCK_N, PLACES = 128, 128, 2  # queries of a program, keys of a tile, tiles of K (and of V) on chip


# In lesson 03's kernel all warps do the same, one step after the other: load, multiply, exponentiate, multiply. Triton
# overlaps some of it, and a second program on the same multiprocessor fills some of the gaps, by chance. Here the
# overlap is written down. A program's warps form three groups, and each does one thing:
#
#     loader   one warp: asks the TMA unit for tiles of K and V as soon as a place in shared memory is free
#     group 0  four warps: queries 0-63 of the tile against all keys     while one group takes its exponentials,
#     group 1  four warps: queries 64-127                                the tensor cores work for the other
#
# They meet at mbarriers: words in shared memory that count arrivals and bytes. A place is `ready` when the TMA unit has
# written all its bytes, and `free` when both groups have read it. Each round of the ring flips the barrier's phase.
#
# Within a group, too, products run beside exponentials: the next scores are ordered before the last product is there:
#
#     order S(j) = Q K(j)^T                  the tensor cores compute S(j), then O += P(j-1) V(j-1)
#     order O += P(j-1) V(j-1)
#     wait for S(j); P(j) = exp2(S(j) - m)   meanwhile
#     wait for O; multiply it by alpha
#
# It fits the registers: of a thread's, O takes 64, S 64 and P 32. At launch each of 384 threads has 65,536 / 384, so
# 168; the loader's group keeps 24 of them, and the two others take 240.
#
# Triton cannot say this: there the compiler decides who does what. Gluon, which comes with it, is the same language one
# floor below: layouts, shared memory, barriers and products that nobody waits for are part of the program. Triton's
# interpreter does not know it. On a CPU tests run this source with threads for groups of warps, compile it and read the
# machine code; on a GPU they check its numbers.
#
# Keys are counted from the end. Tile 0 ends with the last key that the program may see, so in causal attention it alone
# is on the diagonal. The last tile begins at key 0, may overlap the one before it, and masks what has been seen. So all
# rows that are loaded are the sequence's own (if it has 128), and one description of K serves the whole batch: lesson
# 03's kernel describes each sequence's rows anew, which costs every program microseconds.


# --- The loader -----------------------------------------------------------------------------------------------------


@gluon.jit
def tile_start(end, j, BLOCK_N: gl.constexpr):
    """First key of tile j, counted from the end."""
    return gl.maximum(end - (j + 1) * BLOCK_N, 0)


@gluon.jit
def load_tiles(q_rows, k_rows, v_rows, q_s, k_s, v_s, q_ready, k_ready, k_free, v_ready, v_free,
               query_row, q_column, key_row, k_column, v_column, end, num_tiles,
               BLOCK_N: gl.constexpr, D: gl.constexpr, PLACES: gl.constexpr):  # fmt: skip
    """One warp, of which one thread speaks to the TMA unit: K and V, tile by tile, each into its next free place."""
    mbarrier.expect(q_ready, 2 * 64 * D * 2)  # bytes
    for group in gl.static_range(2):
        tma_load(q_rows, [query_row + 64 * group, q_column], q_ready, q_s.index(group))
    for j in range(num_tiles):
        place, phase = j % PLACES, (j // PLACES & 1) ^ 1  # in the first round nobody has to free a place
        row = key_row + tile_start(end, j, BLOCK_N)
        mbarrier.wait(k_free.index(place), phase)
        mbarrier.expect(k_ready.index(place), BLOCK_N * D * 2)
        tma_load(k_rows, [row, k_column], k_ready.index(place), k_s.index(place))
        mbarrier.wait(v_free.index(place), phase)
        mbarrier.expect(v_ready.index(place), BLOCK_N * D * 2)
        tma_load(v_rows, [row, v_column], v_ready.index(place), v_s.index(place))


# --- A group of four warps ------------------------------------------------------------------------------------------


@gluon.jit
def fold(s, m, l, scale, position, end, j, MASKED: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """Online softmax, as in lesson 03: scores of tile j become P, m and l take it in, O is owed a factor alpha."""
    if MASKED:
        SCORES: gl.constexpr = s.type.layout
        key = tile_start(end, j, BLOCK_N) + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        last = end - j * BLOCK_N - 1  # what follows was in the tile before
        last = gl.minimum(position, last) if CAUSAL else last + 0 * position
        s = gl.where(key[None, :] <= last[:, None], s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    origin = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet
    p = gl.exp2(s * scale - origin[:, None])
    alpha = gl.exp2(m - origin)
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def attend_to_tiles(start, stop, acc, m, l, p, q, k_s, v_s, l_s, k_ready, k_free, v_ready, v_free, scale, position, end,
                    MASKED: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr,
                    PLACES: gl.constexpr):  # fmt: skip
    """Tiles [start, stop). On entry and on return p is the last tile's P, whose product with V is still to come."""
    SCORES: gl.constexpr = l.type.layout.parent
    OUT: gl.constexpr = acc.type.layout
    OPERAND: gl.constexpr = p.type.layout
    zeros = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    for j in range(start, stop):
        place, before = j % PLACES, (j - 1) % PLACES
        mbarrier.wait(k_ready.index(place), j // PLACES & 1)
        s_token = hopper.warpgroup_mma(q, k_s.index(place).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), (j - 1) // PLACES & 1)
        o_token = hopper.warpgroup_mma(p, v_s.index(before), acc, is_async=True)
        s = hopper.warpgroup_mma_wait(1, deps=[s_token])  # one may still run: O's
        mbarrier.arrive(k_free.index(place))
        p_next, m, l, alpha = fold(s, m, l, scale, position, end, j, MASKED, CAUSAL, BLOCK_N)
        p_next = gl.convert_layout(p_next.to(p.dtype), OPERAND)
        # A wait is an instruction without operands: the assembler would put it in front of the exponentials, and the
        # tensor cores would stand still. It stays behind a write to shared memory, and so behind what is written.
        l_s.store(l)
        acc, p, p_next = hopper.warpgroup_mma_wait(0, deps=[o_token, p, p_next])
        mbarrier.arrive(v_free.index(before))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
        p = p_next
    return acc, m, l, p


@gluon.jit
def attend(q_s, k_s, v_s, l_s, q_ready, k_ready, k_free, v_ready, v_free, out_ptr, lse_ptr, out_stride, scale,
           first, rows_left, S, end, num_tiles, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
           BLOCK_N: gl.constexpr, D: gl.constexpr, PLACES: gl.constexpr):  # fmt: skip
    """64 queries of the program over all its tiles."""
    # What a tensor-core instruction leaves where: 16 × N of a product in one warp's registers. P is an operand.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])

    row = 64 * GROUP + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    position = first + row
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    l = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, D], gl.float32, OUT)
    q = q_s.index(GROUP)
    mbarrier.wait(q_ready, 0)
    mbarrier.wait(k_ready.index(0), 0)
    s = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    s = hopper.warpgroup_mma(q, k_s.index(0).permute((1, 0)), s, use_acc=False)
    mbarrier.arrive(k_free.index(0))
    p, m, l, _ = fold(s, m, l, scale, position, end, 0, True, CAUSAL, BLOCK_N)
    p = gl.convert_layout(p.to(k_s.dtype), OPERAND)

    whole = num_tiles if end % BLOCK_N == 0 else num_tiles - 1  # the last may overlap
    acc, m, l, p = attend_to_tiles(
        1,
        whole,
        acc,
        m,
        l,
        p,
        q,
        k_s,
        v_s,
        l_s,
        k_ready,
        k_free,
        v_ready,
        v_free,
        scale,
        position,
        end,
        False,
        CAUSAL,
        BLOCK_N,
        PLACES,
    )
    acc, m, l, p = attend_to_tiles(
        gl.maximum(whole, 1),
        num_tiles,
        acc,
        m,
        l,
        p,
        q,
        k_s,
        v_s,
        l_s,
        k_ready,
        k_free,
        v_ready,
        v_free,
        scale,
        position,
        end,
        True,
        CAUSAL,
        BLOCK_N,
        PLACES,
    )

    last = num_tiles - 1
    mbarrier.wait(v_ready.index(last % PLACES), last // PLACES & 1)
    if S < BLOCK_N:  # the next sequence's values came along, and 0 times NaN is NaN. Both groups write the same zeros
        tile = v_s.index(0)
        v = tile.load(VALUES)
        own = gl.arange(0, BLOCK_N, gl.SliceLayout(1, VALUES)) < S
        tile.store(gl.where(own[:, None], v, gl.zeros_like(v)))
        hopper.fence_async_shared()  # tensor cores read shared memory by another way than loads and stores
    acc = hopper.warpgroup_mma(p, v_s.index(last % PLACES), acc)

    l = gl.where(l == 0, 1.0, l)  # nothing was seen
    out = acc / gl.convert_layout(l, gl.SliceLayout(1, OUT))[:, None]
    out_row = 64 * GROUP + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    column = gl.arange(0, D, gl.SliceLayout(0, OUT))
    gl.store(
        out_ptr + out_row[:, None] * out_stride + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(out_row < rows_left)[:, None] & (column < D)[None, :],
    )
    gl.store(lse_ptr + row, (m + gl.log2(l)) * 0.6931471805599453, mask=row < rows_left)  # ln 2


# --- The program ----------------------------------------------------------------------------------------------------

OF_A_STEP = ["T", "num_tiles", "heads_per_group", "q_head_stride", "k_head_stride", "v_head_stride"]


@gluon.jit(do_not_specialize=OF_A_STEP)
def warp_specialized_attention_kernel(
    q_rows, k_rows, v_rows, out_ptr, lse_ptr, query_start_loc, seq_start_loc, scale, T, num_tiles, heads_per_group,
    q_head_stride, k_head_stride, v_head_stride, Hq: gl.constexpr, Hkv: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PLACES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One program: 128 queries of one head of one sequence, over all keys that they may see."""
    pid = gl.program_id(0)  # heaviest first, heads in groups: lesson 03
    head_in_group = pid % heads_per_group
    pid = pid // heads_per_group
    tile = num_tiles - 1 - pid % num_tiles
    pid = pid // num_tiles
    head = pid % (Hq // heads_per_group) * heads_per_group + head_in_group
    seq = pid // (Hq // heads_per_group)

    query_start = gl.load(query_start_loc + seq)
    key_start = gl.load(seq_start_loc + seq)
    query_len = gl.load(query_start_loc + seq + 1) - query_start
    S = gl.load(seq_start_loc + seq + 1) - key_start
    m0 = tile * BLOCK_M
    if m0 < query_len:
        first = m0 + S - query_len  # position of the tile's first query
        end = S
        if CAUSAL:
            end = gl.minimum(S, first + BLOCK_M)
        num_kv_tiles = gl.maximum(gl.cdiv(end, BLOCK_N), 1)  # a tile of which nothing is seen does no harm

        dtype: gl.constexpr = q_rows.dtype
        q_s = gl.allocate_shared_memory(dtype, [2, 64, D], q_rows.layout)
        k_s = gl.allocate_shared_memory(dtype, [PLACES, BLOCK_N, D], k_rows.layout)
        v_s = gl.allocate_shared_memory(dtype, [PLACES, BLOCK_N, D], v_rows.layout)
        l_s = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_ready, 1)
        for i in gl.static_range(PLACES):
            mbarrier.init(k_ready.index(i), 1)
            mbarrier.init(k_free.index(i), 2)  # both groups
            mbarrier.init(v_ready.index(i), 1)
            mbarrier.init(v_free.index(i), 2)
        hopper.fence_async_shared()

        row, left, kv_head = query_start + m0, query_len - m0, head // (Hq // Hkv)
        out_ptr += row.to(gl.int64) * (Hq * D) + head * D
        lse_ptr += head.to(gl.int64) * T + row
        gl.warp_specialize(
            [
                (
                    attend,
                    (
                        q_s,
                        k_s,
                        v_s,
                        l_s.index(0),
                        q_ready,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        out_ptr,
                        lse_ptr,
                        Hq * D,
                        scale,
                        first,
                        left,
                        S,
                        end,
                        num_kv_tiles,
                        gl.constexpr(0),
                        CAUSAL,
                        BLOCK_N,
                        D,
                        PLACES,
                    ),
                ),
                (
                    attend,
                    (
                        q_s,
                        k_s,
                        v_s,
                        l_s.index(1),
                        q_ready,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        out_ptr,
                        lse_ptr,
                        Hq * D,
                        scale,
                        first,
                        left,
                        S,
                        end,
                        num_kv_tiles,
                        gl.constexpr(1),
                        CAUSAL,
                        BLOCK_N,
                        D,
                        PLACES,
                    ),
                ),
                (
                    load_tiles,
                    (
                        q_rows,
                        k_rows,
                        v_rows,
                        q_s,
                        k_s,
                        v_s,
                        q_ready,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        row,
                        head * q_head_stride,
                        key_start,
                        kv_head * k_head_stride,
                        kv_head * v_head_stride,
                        end,
                        num_kv_tiles,
                        BLOCK_N,
                        D,
                        PLACES,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )


def describe_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """x [T, H, D] as a matrix with a row for each token. The TMA unit takes `rows` × D of it, one head, at a time."""
    T, H, D = x.shape
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    width = (H - 1) * x.stride(1) + D
    return TensorDescriptor(
        x, [T, width], [x.stride(0), 1], [rows, D], gl.NVMMASharedLayout.get_default_for([rows, D], dtype)
    )


def fits(q: Tensor, k: Tensor, v: Tensor, max_query_len: int, window: int | None) -> bool:
    """Whether the kernel takes this (16 bits, head size 64 or 128, no window, a token's heads in one row), and gains.

    A program has a multiprocessor for itself, so what it does before its first product and after its last is not hidden
    behind another's work. An H200 did 207 TFLOP/s with it at 512 tokens (causal, D = 128), and 214 with lesson 03's.
    """
    D = q.shape[2]
    rows = all(x.stride(0) >= (x.shape[1] - 1) * x.stride(1) + D for x in (q, k, v))
    long = max_query_len >= {64: 4096, 128: 1024}.get(D, max_query_len + 1)
    return window is None and q.dtype in (torch.bfloat16, torch.float16) and rows and long


def warp_specialized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    seq_start_loc: Tensor,
    max_query_len: int,
    heads_per_group: int,
    causal: bool,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Lesson 03's `flash_attention` for what `fits`, on Hopper.

    Semantics: o_t = Σ_s softmax_s(scale · q_t·k_s) v_s over the visible s of t's own sequence; lse_t = log Σ_s exp(…).
    Shapes: q [T, Hq, D]; k, v [S_total, Hkv, D]; query_start_loc, seq_start_loc int32 [B + 1]; returns out [T, Hq, D]
        and lse fp32 [Hq, T], the two that it was given.
    """
    (T, Hq, D), Hkv = q.shape, k.shape[1]
    num_tiles = common.triton.cdiv(max_query_len, BLOCK_M)
    warp_specialized_attention_kernel[((len(query_start_loc) - 1) * Hq * num_tiles,)](
        describe_rows(q, 64),
        describe_rows(k, BLOCK_N),
        describe_rows(v, BLOCK_N),
        out,
        lse,
        query_start_loc,
        seq_start_loc,
        scale * math.log2(math.e),
        T,
        num_tiles,
        heads_per_group,
        q.stride(1),
        k.stride(1),
        v.stride(1),
        Hq=Hq,
        Hkv=Hkv,
        D=D,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        PLACES=PLACES,
        CAUSAL=causal,
        num_warps=4,
    )
    return out, lse

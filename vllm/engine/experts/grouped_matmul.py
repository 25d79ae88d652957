"""Experts on a GPU: tokens sorted by expert, and tiles of rows that all go to one.

Owns both kernels, their tiles, and the table that says whose tile is whose; called by `stacked` with what the router
chose. It never waits for the GPU, so a step can be captured. vLLM: `vllm/model_executor/layers/fused_moe/fused_moe.py`
(`fused_experts`), `moe_align_block_size.py`.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import common
from common import tl, triton

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from engine.experts.stacked import StackedExperts

#     h[p] = act(x[token of p] W₁[e]ᵀ)        p: a pair of a token and an expert, in the order of experts
#     y[p] = w[p] · h[p] W₂[e]ᵀ               back in the order of tokens; then k of them are added
#
# A tile never has rows of two experts, so it reads one matrix. An expert with one token costs as much as one with
# BLOCK_M: what a step reads are the experts that anybody asked for, and each of them once, whoever asked.


@common.kernel
def gate_up_kernel(x, weight, bias, order, tiles, out, K, I, stride_x, TOP_K: tl.constexpr, BIAS: tl.constexpr,
                   OAI: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   UPCAST: tl.constexpr):  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:  # there are fewer tiles than there might have been
        return
    m, end = tl.load(tile + 1) + tl.arange(0, BLOCK_M), tl.load(tile + 2)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.load(order + m, mask=m < end) // TOP_K
    row = n[:, None] * K
    gates, ups = weight + expert * 2 * I * K + row, weight + (expert * 2 + 1) * I * K + row
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows = tl.load(
            x + token[:, None] * stride_x + k[None, :], mask=(m < end)[:, None] & (k < K)[None, :], other=0.0
        )
        here = (n < I)[:, None] & (k < K)[None, :]
        w_gate = tl.load(gates + k[None, :], mask=here, other=0.0)
        w_up = tl.load(ups + k[None, :], mask=here, other=0.0)
        if UPCAST:  # Triton's interpreter multiplies 16-bit floats wrongly
            rows, w_gate, w_up = rows.to(tl.float32), w_gate.to(tl.float32), w_up.to(tl.float32)
        gate = tl.dot(rows, w_gate.T, gate, input_precision="ieee")
        up = tl.dot(rows, w_up.T, up, input_precision="ieee")
    if BIAS:
        b = bias + expert * 2 * I + n
        gate += tl.load(b, mask=n < I)[None, :]
        up += tl.load(b + I, mask=n < I)[None, :]
    if OAI:
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        h = gate / (1.0 + tl.exp(-1.702 * gate)) * up
    else:
        h = gate / (1.0 + tl.exp(-gate)) * up
    mask = (m < end)[:, None] & (n < I)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * I + n[None, :], h.to(out.dtype.element_ty), mask=mask)


@common.kernel
def down_kernel(h, weight, bias, route, order, tiles, out, I, H, BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    m, end = tl.load(tile + 1) + tl.arange(0, BLOCK_M), tl.load(tile + 2)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = weight + expert * H * I + n[:, None] * I
    row = m.to(tl.int64)[:, None] * I
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, I, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows = tl.load(h + row + k[None, :], mask=(m < end)[:, None] & (k < I)[None, :], other=0.0)
        w_tile = tl.load(w + k[None, :], mask=(n < H)[:, None] & (k < I)[None, :], other=0.0)
        if UPCAST:
            rows, w_tile = rows.to(tl.float32), w_tile.to(tl.float32)
        acc = tl.dot(rows, w_tile.T, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + expert * H + n, mask=n < H)[None, :]
    pair = tl.load(order + m, mask=m < end)
    acc *= tl.load(route + pair, mask=m < end)[:, None]
    mask = (m < end)[:, None] & (n < H)[None, :]
    tl.store(out + pair[:, None] * H + n[None, :], acc.to(out.dtype.element_ty), mask=mask)


class Tiles(NamedTuple):
    """Pairs of a token and an expert in the order of experts, and which of them are a tile."""

    order: torch.Tensor  # int64 [P]: pair p is token p // k
    table: torch.Tensor  # int32 [tiles, 3]: expert, and its rows [first, end) of `order`; of a tile that is none, -1
    block_m: int


def align_block_size(ids: torch.Tensor, held: range, block_m: int) -> Tiles:
    """Sort pairs by expert, and cut each expert's into tiles. Nothing here waits for the GPU: how many tiles there are,
    only the GPU knows, and the table has room for as many as there might be. Those of experts elsewhere come last, and
    are in no tile. Shapes: ids [T, k] -> `Tiles`."""
    device, n = ids.device, len(held)
    local = ids.flatten() - held.start
    local = torch.where((local >= 0) & (local < n), local, n)  # elsewhere: behind all others
    order = local.argsort(stable=True)
    ends = torch.searchsorted(local[order], torch.arange(n, device=device), right=True)  # [n]
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    tiles_of = (ends - starts + block_m - 1) // block_m
    last = tiles_of.cumsum(0)  # an expert's tiles are those before its number here
    tile = torch.arange(min(len(order), (len(order) + n * (block_m - 1)) // block_m), device=device)
    expert = torch.searchsorted(last, tile, right=True)
    known = expert.clamp(max=n - 1)
    first = starts[known] + (tile - last[known] + tiles_of[known]) * block_m
    table = torch.stack((torch.where(expert < n, expert, -1), first, ends[known]), 1)
    return Tiles(order, table.int(), block_m)


def fused_experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: StackedExperts) -> torch.Tensor:
    """A layer of experts for tokens whose choice is made.

    Semantics: y_t = Σ_j weights[t, j] · W₂[e] act(W₁[e] x_t + b₁[e]) + b₂[e], e = ids[t, j]; sums in fp32, and what
    passes between the kernels is rounded to x's dtype. Experts that are not held count as nothing.
    Shapes: x [T, H], weights fp32 and ids int64 [T, k], gate_up [E, 2·I, H], down [E, H, I] -> [T, H] in x's dtype.
    """
    block_m, block_n, block_k = choose_tiles(x.dtype, ids.numel(), experts.down.shape[0])
    return run_tiles(x, weights, align_block_size(ids, experts.held, block_m), experts, (block_n, block_k))


def run_tiles(
    x: torch.Tensor, weights: torch.Tensor, tiles: Tiles, experts: StackedExperts, blocks: tuple[int, int]
) -> torch.Tensor:
    """`fused_experts`, whose tokens are sorted.

    Semantics: as there. Shapes: x [T, H], weights fp32 [T, k] -> [T, H] in x's dtype; weights are contiguous.
    """
    (T, H), k, I = x.shape, weights.shape[1], experts.down.shape[2]
    (block_n, block_k), x = blocks, x if x.stride(1) == 1 else x.contiguous()
    h = torch.empty(T * k, I, dtype=x.dtype, device=x.device)
    constants = {"BLOCK_M": tiles.block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "UPCAST": common.INTERPRET}
    gate_up_kernel[(len(tiles.table), triton.cdiv(I, block_n))](
        x,
        experts.gate_up,
        experts.gate_up if experts.gate_up_bias is None else experts.gate_up_bias,
        tiles.order,
        tiles.table,
        h,
        H,
        I,
        x.stride(0),
        TOP_K=k,
        BIAS=experts.gate_up_bias is not None,
        OAI=experts.activation == "swiglu_oai",
        **constants,
        num_warps=4,
    )
    said = x.new_zeros(T * k, H)  # of a pair whose expert is elsewhere, nothing
    down_kernel[(len(tiles.table), triton.cdiv(H, block_n))](
        h,
        experts.down,
        experts.down if experts.down_bias is None else experts.down_bias,
        weights,
        tiles.order,
        tiles.table,
        said,
        I,
        H,
        BIAS=experts.down_bias is not None,
        **constants,
        num_warps=4,
    )
    return said.view(T, k, H).sum(1)


def choose_tiles(dtype: torch.dtype, pairs: int, experts: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K): as many rows as an expert has on average, from 16, which a dot needs, to 64."""
    if dtype == torch.float32:  # no tensor cores for exact fp32
        return 16, 32, 32
    block_m = min(max(16, triton.next_power_of_2(pairs // max(1, experts))), 64)
    return block_m, 64 if block_m == 64 else 128, 64

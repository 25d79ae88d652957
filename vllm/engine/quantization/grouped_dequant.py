"""Experts' weights of 4 or 8 bits, decoded in the matrix product: tiles of rows that all go to one expert.

Owns the kernel and its tiles; called by `experts` for each of the two products. It never sorts a token: which tile is
whose, `engine/experts/grouped_matmul.py` says. vLLM:
`vllm/model_executor/layers/fused_moe/fused_moe.py:fused_moe_kernel_gptq_awq`.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import common
from common import tl, triton

from typing import TYPE_CHECKING, Any

import torch

from engine.quantization.decoding import decode_groups, load_scales, widen_scales
from engine.quantization.formats import MINIFLOATS, Format

if TYPE_CHECKING:
    from engine.experts.grouped_matmul import Tiles
    from engine.quantization.experts import StackedWeight


@common.kernel
def grouped_dequant_kernel(x, codes, scale, zero, route, order, tiles, out, N, K, stride_x, TOP_K: tl.constexpr,
                           GROUP: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
                           ZERO: tl.constexpr, EXPONENT_SCALE: tl.constexpr, BLOCK_M: tl.constexpr,
                           BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // BITS
    tile = tiles + tl.program_id(0) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:  # there are fewer tiles than there might have been
        return
    m, end = tl.load(tile + 1) + tl.arange(0, BLOCK_M), tl.load(tile + 2)
    n, j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K // PER_BYTE)
    pair = tl.load(order + m, mask=m < end)
    row = pair // TOP_K if TOP_K else m.to(tl.int64)  # a token's, or one of the first product
    codes += (expert * N + n[:, None]) * (K // PER_BYTE)
    first = expert * (K // GROUP)  # of the expert's rows of scales
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        byte = start // PER_BYTE + j
        here = (n < N)[:, None] & (byte < K // PER_BYTE)[None, :]
        q = tl.load(codes + byte[None, :], mask=here, other=0)  # [BLOCK_N, bytes]
        s, z = load_scales(scale, zero, (first + start // GROUP) * N + n[:, None], (n < N)[:, None], ZERO)
        s, z = widen_scales(s, MANTISSA, BIAS, EXPONENT_SCALE), z.to(tl.float32)
        k = start + (j if PER_BYTE == 1 else j // 16 * 32 + j % 16)
        for half in tl.static_range(PER_BYTE):  # low halves of the bytes, then high halves
            inside = (m < end)[:, None] & (k < K)[None, :]
            rows = tl.load(x + row[:, None] * stride_x + k[None, :], mask=inside, other=0.0)
            if UPCAST:  # Triton's interpreter multiplies 16-bit floats wrongly
                rows = rows.to(tl.float32)
            w = decode_groups(q if PER_BYTE == 1 else q >> 4 * half & 15, s, z, MANTISSA, BITS, ZERO, True)
            acc = tl.dot(rows, w.to(rows.dtype).T, acc, input_precision="ieee")
            k += 16
    if TOP_K == 0:
        acc *= tl.load(route + pair, mask=m < end)[:, None]
    place = m.to(tl.int64) if TOP_K else pair  # the first product stays in the order of experts
    mask = (m < end)[:, None] & (n < N)[None, :]
    tl.store(out + place[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=mask)


def grouped_dequant_matmul(
    x: torch.Tensor, weight: StackedWeight, tiles: Tiles, top_k: int, route: torch.Tensor | None = None
) -> torch.Tensor:
    """One of an expert's two products, for all pairs of a token and an expert.

    Semantics: with `top_k`, y[i] = x[pair i's token] Ŵ[its expert]ᵀ, in the order of experts. Without, x is in that
    order, and y[pair] = route[pair] · x[i] Ŵᵀ in the order of tokens. Sums in fp32, Ŵ at most rounded to x's dtype;
    rows of experts that are not here are zero.
    Shapes: x [T, K] or [P, K], weight [E, N, K], route fp32 [T, k] -> [P, N] in x's dtype, P = T · k.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    N, group, P = weight.codes.shape[1], weight.format.group or weight.K, len(tiles.order)
    block_n, block_k = choose_blocks(x.dtype, weight.format, weight.K)
    out = x.new_zeros(P, N)
    grouped_dequant_kernel[(len(tiles.table), triton.cdiv(N, block_n))](
        x,
        weight.codes,
        weight.scale,
        weight.codes if weight.zero is None else weight.zero,
        weight.scale if route is None else route,
        tiles.order,
        tiles.table,
        out,
        N,
        weight.K,
        x.stride(0),
        TOP_K=top_k,
        GROUP=group,
        **decoding(weight.format),
        BLOCK_M=tiles.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        UPCAST=common.INTERPRET,
        num_warps=4,
    )
    return out


def decoding(format: Format) -> dict[str, Any]:
    """What the kernel must know of a format."""
    float_ = MINIFLOATS.get(format.grid)
    return {
        "BITS": format.bits,
        "MANTISSA": float_.mantissa_bits if float_ else -1,
        "BIAS": float_.bias if float_ else 0,
        "ZERO": format.zero or "none",
        "EXPONENT_SCALE": format.scale == "e8m0",
    }


def block_rows(dtype: torch.dtype, pairs: int, experts: int) -> int:
    """BLOCK_M: as many rows as an expert has on average, from 16, which a dot needs, to 64."""
    return 16 if dtype == torch.float32 else min(max(16, triton.next_power_of_2(pairs // max(1, experts))), 64)


def choose_blocks(dtype: torch.dtype, format: Format, K: int) -> tuple[int, int]:
    """(BLOCK_N, BLOCK_K). A tile lies within a group, so each of its outputs has one scale."""
    block_n, block_k = (32, 32) if dtype == torch.float32 else (64, 64)
    return block_n, block_k if (format.group or K) % block_k == 0 else 32

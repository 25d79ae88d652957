"""Weights of 4 or 8 bits that are decoded in the matrix product: kernel one of companion 05b.

Owns the kernel, its tiles, and what replaces it for many rows and on a CPU; called by `linear.QuantizedLinear` with the
step's activations. It never rounds these. vLLM:
`vllm/model_executor/kernels/linear/mixed_precision/triton_w4a16.py:TritonW4A16LinearKernel`.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import common
from common import tl, triton

import torch
import torch.nn.functional as F

from engine.quantization import int4_hopper
from engine.quantization.decoding import decode_four_bits, decode_groups, load_scales, widen_scales
from engine.quantization.formats import Format
from engine.quantization.packed_weight import PackedWeight, on_cpu, on_hopper
from engine.quantization.split_k import add_splits, choose_split

if common.HAS_TRITON:
    from triton.language.target_info import cuda_capability_geq

#     y[m, n] = Σ_k x[m, k] · w[n, k],     w = (q − z)·s,  q·s + min,  or  value(q)·s
#
# The weights travel as 4 or 8 bits and become 16-bit floats in registers, right before the tensor cores.
#
# Packing. Rows of W are contiguous along K, so a tile's loads are runs of whole 32-byte sectors, 16 bytes at a time
# (of an argument, stride_w, Triton sees that 16 divides it; of K // 2 it would know 8 alone). Four-bit codes use
# GGUF's order: in each 16 bytes, the low halves are weights 0–15 and the high halves weights 16–31. One load serves two
# dots, with x at k and at k + 16; nothing has to be interleaved.
#
# Late scales. Where an output's weights in a tile share one, it multiplies their sum; 16 bits hold integers exactly.
# Triton itself loads ahead only what a dot takes: late scales are loaded one tile early here, or each tile would wait.
#
# Many tokens. Every tile of rows decodes all weights again. Beyond DECODE_ONCE rows they are written out once, in x's
# dtype, and the fastest kernel that there is multiplies. vLLM does so for AWQ from 256 rows on.


DECODE_ONCE = 64


@common.kernel
def dequant_matmul_kernel(x, codes, scale, zero, out, M: tl.int32, N, K, stride_x, stride_w,
                          GROUP: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
                          ZERO: tl.constexpr, EXPONENT_SCALE: tl.constexpr, SPLIT_K: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                          EVEN_K: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = BLOCK_K // PER_BYTE
    GROUPS: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1  # groups that a tile spans
    LATE: tl.constexpr = BITS == 4 and GROUPS == 1 and ZERO != "min"  # a tile's only scale can wait for the sum
    NARROW: tl.constexpr = not UPCAST and x.dtype.element_ty != tl.float32
    FAST: tl.constexpr = NARROW and LATE and ZERO == "int" and cuda_capability_geq(8, 0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split, j = tl.program_id(2), tl.arange(0, BYTES)
    row = n.to(tl.int64)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if LATE:  # the first tile's
        s_next, z_next = load_scales(scale, zero, split * BLOCK_K // GROUP * N + n, n < N, ZERO)  # [BLOCK_N]
    for tile in range(split, tl.cdiv(K, BLOCK_K), SPLIT_K):
        start = tile * BLOCK_K
        byte = start // PER_BYTE + j
        here = (n < N)[:, None] if EVEN_K else (n < N)[:, None] & (byte < K // PER_BYTE)[None, :]
        q = tl.load(codes + row * stride_w + byte[None, :], mask=here, other=0)  # [BLOCK_N, BYTES]
        if LATE:  # the next tile's
            # LATE is a constant, which the type checker cannot know: they are bound.
            s, z = s_next, z_next  # pyright: ignore[reportPossiblyUnboundVariable]
            after = start + SPLIT_K * BLOCK_K
            s_next, z_next = load_scales(scale, zero, after // GROUP * N + n, n < tl.where(after < K, N, 0), ZERO)
        else:
            g = start // GROUP + tl.arange(0, GROUPS)[None, :]
            known = (n < N)[:, None] & (g < K // GROUP)  # [BLOCK_N, GROUPS]
            s, z = load_scales(scale, zero, g * N + n[:, None], known, ZERO)
        s = widen_scales(s, MANTISSA, BIAS, EXPONENT_SCALE)
        z = z.to(tl.float32)[:, None] if LATE else z.to(tl.float32)
        k = start + (j if PER_BYTE == 1 else j // 16 * 32 + j % 16)
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) if LATE else acc
        for half in tl.static_range(PER_BYTE):  # low halves of the bytes, then high halves
            inside = (m < M)[:, None] if EVEN_K else (m < M)[:, None] & (k < K)[None, :]
            x_tile = tl.load(x + m.to(tl.int64)[:, None] * stride_x + k[None, :], mask=inside, other=0.0)
            if UPCAST:  # Triton's interpreter multiplies 16-bit floats wrongly; a GPU wants them as they are
                x_tile = x_tile.to(tl.float32)
            if FAST:
                w = decode_four_bits(q, z, half, x_tile.dtype == tl.bfloat16)
            else:
                w = decode_groups(q if PER_BYTE == 1 else q >> 4 * half & 15, s, z, MANTISSA, BITS, ZERO, not LATE)
            part = tl.dot(x_tile, w.to(x_tile.dtype).T, part, input_precision="ieee")
            k += 16
        acc = acc + part * s[None, :] if LATE else part
    place = (split.to(tl.int64) * M + m[:, None]) * N + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@common.kernel
def dequantize_kernel(codes, scale, zero, out, N, K, stride_w, GROUP: tl.constexpr, BITS: tl.constexpr,
                      MANTISSA: tl.constexpr, BIAS: tl.constexpr, ZERO: tl.constexpr, EXPONENT_SCALE: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // BITS
    GROUPS: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
    start = tl.program_id(0) * BLOCK_K
    n, j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K // PER_BYTE)
    byte, row = start // PER_BYTE + j, n.to(tl.int64)[:, None]
    here = (n < N)[:, None] & (byte < K // PER_BYTE)[None, :]
    q = tl.load(codes + row * stride_w + byte[None, :], mask=here, other=0)  # [BLOCK_N, bytes]
    g = start // GROUP + tl.arange(0, GROUPS)[None, :]
    s, z = load_scales(scale, zero, g * N + n[:, None], (n < N)[:, None] & (g < K // GROUP), ZERO)
    s, z = widen_scales(s, MANTISSA, BIAS, EXPONENT_SCALE), z.to(tl.float32)
    k = start + (j if PER_BYTE == 1 else j // 16 * 32 + j % 16)
    for half in tl.static_range(PER_BYTE):
        w = decode_groups(q if PER_BYTE == 1 else q >> 4 * half & 15, s, z, MANTISSA, BITS, ZERO, True)
        tl.store(out + row * K + k[None, :], w.to(out.dtype.element_ty), mask=here)
        k += 16


def decode_weight(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """All weights, for a product that uses each of them often.

    Semantics: Ŵ decoded from codes, scales and zero points in fp32, rounded to `dtype`.
    Shapes: weight [N, K] -> [N, K].
    """
    N, K, group = len(weight.codes), weight.K, weight.format.group or weight.K
    out = torch.empty(N, K, dtype=dtype, device=weight.codes.device)
    block_k = 128 if group % 128 == 0 or 128 % group == 0 or group == K else 32  # whole groups, or within one
    dequantize_kernel[(triton.cdiv(K, block_k), triton.cdiv(N, 32))](
        weight.codes,
        weight.scale,
        weight.codes if weight.zero is None else weight.zero,
        out,
        N,
        K,
        weight.codes.stride(0),
        **weight.constants,
        BLOCK_N=32,
        BLOCK_K=block_k,
    )
    return out


def dequant_matmul(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """A linear layer on 4- or 8-bit weights.

    Semantics: y = x Ŵᵀ with Ŵ decoded from codes, scales and zero points; sums in fp32. Ŵ at most rounded to x's dtype.
    Shapes: x [M, K] (row stride free), weight [N, K] -> [M, N] in x's dtype.
    """
    if not common.runs_kernel(x):
        weight.unpacked = weight.unpacked or on_cpu(weight, x.dtype)
        return weight.unpacked(x)
    (M, K), N = x.shape, len(weight.codes)
    if not 0 < M <= DECODE_ONCE:
        return F.linear(x, decode_weight(weight, x.dtype)) if M else x.new_empty(0, N)
    if int4_hopper.takes(x, weight):
        parts = int4_hopper.int4_matmul(x, weight)  # [SPLIT_K, M, N]
    else:
        block_m, block_n, block_k, split_k, stages = choose_tiles(x.dtype, M, N, K, weight.format, on_hopper(x))
        parts = torch.empty(split_k, M, N, dtype=x.dtype if split_k == 1 else torch.float32, device=x.device)
        dequant_matmul_kernel[(triton.cdiv(N, block_n), triton.cdiv(M, block_m), split_k)](
            x,
            weight.codes,
            weight.scale,
            weight.codes if weight.zero is None else weight.zero,
            parts,
            M,
            N,
            K,
            x.stride(0),
            weight.codes.stride(0),
            **weight.constants,
            SPLIT_K=split_k,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            EVEN_K=K % block_k == 0,
            UPCAST=common.INTERPRET,
            num_warps=4,
            num_stages=stages,
        )
    if len(parts) == 1:
        return parts[0]
    return add_splits(parts, torch.empty(M, N, dtype=x.dtype, device=x.device))


def choose_tiles(dtype: torch.dtype, M: int, N: int, K: int, format: Format, hopper: bool = False) -> tuple[int, ...]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, stages). Chosen by compiling: these spill on no GPU that tests know.

    A tile spans whole groups or lies within one; K is split until there are two programs for each of an H200's 132 SMs,
    or one of the largest.
    """
    block_m, block_n, block_k, num_stages = min(max(16, triton.next_power_of_2(M)), 64), 128, 64, 4
    late = format.bits == 4 and (format.group or K) % 128 == 0  # a tile of 128 has one scale
    if dtype == torch.float32:  # no tensor cores for exact fp32
        block_m, block_n, block_k, num_stages = 16, 64, 32, 2
    elif block_m == 64 and not (hopper and late):
        block_n = 64
    elif block_m in (16, 64) and late:
        block_k, num_stages = 128, 3
    if format.group and format.group % block_k and block_k % format.group:
        block_k = 32
    if K % 16:  # codes are loaded byte by byte then, each into a register
        block_n = block_k = 32
    wanted = 132 if (block_m, block_k) == (64, 128) else 264
    split_k = choose_split(triton.cdiv(N, block_n) * triton.cdiv(M, block_m), triton.cdiv(K, block_k), wanted)
    return block_m, block_n, block_k, split_k, num_stages

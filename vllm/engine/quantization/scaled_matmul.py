"""Eight bits on both sides of a matrix product, scales on the way out: kernel two of companion 05b.

Owns the kernel and its tiles; called by `linear.W8A8Linear` with what `activations` rounded. It never rounds.
vLLM: `vllm/model_executor/kernels/linear/scaled_mm/`, `vllm/_custom_ops.py:cutlass_scaled_mm`.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import common
from common import tl, triton

import functools

import torch

from engine.quantization.decoding import e4m3_as_fp16
from engine.quantization.packed_weight import on_hopper
from engine.quantization.split_k import add_splits, choose_split

if common.HAS_TRITON:
    from triton.language.target_info import cuda_capability_geq

int_mm = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]  torch has no other name for it

#     x[m, k] ≈ a[m, k] · s_x[m],  w[n, k] ≈ b[n, k] · s_w[n]:     y[m, n] = s_x[m] · s_w[n] · Σ_k a[m, k] · b[n, k]
#
# Neither scale depends on k, so the sum is over small integers (int8: exact, in int32) or e4m3 products, and both
# scales are applied once, to the sum. A scale per input channel would have to stand inside the sum: that is why
# activations, whose outliers sit in channels, cannot simply have one each.


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
        a_rows, b_rows = a + m.to(tl.int64)[:, None] * K, b + n.to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if FP8 else tl.int32)
    for tile in range(tl.program_id(2), tl.cdiv(K, BLOCK_K), SPLIT_K):
        if WIDE:
            a_tile, b_tile = a_rows.load([i * BLOCK_M, tile * BLOCK_K]), b_rows.load([j * BLOCK_N, tile * BLOCK_K])
        else:
            k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            a_tile = tl.load(a_rows + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
            b_tile = tl.load(b_rows + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
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


def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """8-bit matrix product with its scales applied on the way out.

    Semantics: y[m, n] = a_scale[m] · b_scale[n] · Σ_k a[m, k] · b[n, k]; int8's sum is exact (int32), e4m3's in fp32.
        But Hopper's FP8 tensor cores, used from 33 rows on, add up in about 14 bits: an error of some 1e-4.
    Shapes: a [M, K], b [N, K], both int8 or both e4m3 codes as uint8, contiguous; scales fp32 [M], [N] -> [M, N].
    """
    (M, K), N, fp8 = a.shape, len(b), a.dtype == torch.uint8
    if not common.runs_kernel(a):
        by_integers, grid = not fp8 and int8_sums_are_exact(), torch.float8_e4m3fn if fp8 else torch.int8
        sums = int_mm(a, b.T) if by_integers else a.view(grid).float() @ b.view(grid).float().T
        return (sums * a_scale[:, None] * b_scale).to(dtype)
    out = torch.empty(M, N, dtype=dtype, device=a.device)
    if M == 0:
        return out
    wide, block_m, block, block_k, split_k = choose_scaled_tiles(M, N, K, fp8 and on_hopper(a))
    if wide and a.is_cuda and not torch.version.hip:
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    target = out
    if split_k > 1:
        target = torch.empty(split_k, M, N, dtype=torch.float32 if fp8 else torch.int32, device=a.device)
    scaled_matmul_kernel[(triton.cdiv(N, block), triton.cdiv(M, block_m), split_k)](
        a,
        b,
        a_scale,
        b_scale,
        target,
        M,
        N,
        K,
        FP8=fp8,
        NATIVE=not common.INTERPRET,
        WIDE=wide,
        SPLIT_K=split_k,
        BLOCK_M=block_m,
        BLOCK_N=block,
        BLOCK_K=block_k,
        num_warps=8 if block_m > 64 else 4,
        num_stages=3,
    )
    return add_splits(target, out, (a_scale, b_scale)) if split_k > 1 else out


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
    return bool((int_mm(a, a.T) == 127 * 127 * 64).all())

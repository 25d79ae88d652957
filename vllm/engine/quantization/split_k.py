"""Split-K: a product of few rows in parts, each over some of the inputs, so that they fill a GPU; and their sum.

Owns into how many parts, and the kernel that adds them up; called by the wrappers in `dequant_matmul` and
`scaled_matmul`. It never multiplies. vLLM: `csrc/quantization/gptq_marlin/`, whose kernels reduce in place.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import common
from common import tl, triton

import torch

# A decode batch has one tile of rows, and N / BLOCK_N programs do not fill a GPU. So the K tiles are dealt to SPLIT_K
# programs, and a second kernel adds their sums up.


def choose_split(programs: int, tiles: int, wanted: int) -> int:
    """SPLIT_K for a grid of `programs`: until there are `wanted`, at most 16, each with four of the K tiles or more."""
    split_k = 1
    while programs * split_k < wanted and split_k * 8 <= tiles and split_k < 16:
        split_k *= 2
    return split_k


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


def add_splits(
    parts: torch.Tensor, out: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """The sum of a product's parts, in place of the product.

    Semantics: out[m, n] = Σ_i parts[i, m, n], in fp32 or int32, times scales[0][m] · scales[1][n] if there are any.
    Shapes: parts [SPLIT_K, M, N], scales fp32 [M] and [N], out [M, N], which is returned.
    """
    split_k, M, N = parts.shape
    a_scale, b_scale = scales or (parts, parts)
    add_splits_kernel[(triton.cdiv(N, 1024), M)](
        parts, a_scale, b_scale, out, M, N, SPLIT_K=split_k, SCALED=scales is not None, BLOCK=1024
    )
    return out

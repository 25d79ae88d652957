"""Activations rounded to 8 bits while they pass: a scale per token, chosen now.

Owns the kernel and the two grids of W8A8; called by `linear.W8A8Linear` before each product. It never sees a weight.
vLLM: `vllm/_custom_ops.py:scaled_int8_quant`, `vllm/model_executor/layers/quantization/input_quant_fp8.py:QuantFP8`.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import common
from common import tl, triton

import torch

from engine.quantization.decoding import round_to_e4m3, round_to_int

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
        return round_to_grid(grid, v / s[:, None]), s
    codes = torch.empty(M, K, dtype=torch.int8 if grid == "int8" else torch.uint8, device=x.device)
    scale = torch.empty(M, dtype=torch.float32, device=x.device)
    if M:
        quantize_rows_kernel[(M,)](
            x,
            x if smooth is None else smooth,
            codes,
            scale,
            K,
            x.stride(0),
            LARGEST=largest,
            FP8=grid == "fp8",
            SMOOTH=smooth is not None,
            BLOCK=triton.next_power_of_2(K),
            num_warps=8 if K > 2048 else 4,
        )
    return codes, scale


def round_to_grid(grid: str, v: torch.Tensor) -> torch.Tensor:
    """What is already scaled: to the nearest code, ties to even."""
    if grid == "int8":
        return v.round().to(torch.int8)
    return v.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)

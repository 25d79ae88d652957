"""Linear layers of few bits: what stands in a model where a float layer stood.

Owns a layer's codes; called by the model like the layer that it replaces. It never holds a float weight.
vLLM: `vllm/model_executor/layers/linear.py:LinearBase` with a `quant_method`.
"""

from __future__ import annotations

import torch

from engine.quantization.activations import EIGHT_BIT, quantize_rows, round_to_grid
from engine.quantization.dequant_matmul import dequant_matmul
from engine.quantization.formats import Quantized
from engine.quantization.packed_weight import PackedWeight
from engine.quantization.scaled_matmul import scaled_matmul


class QuantizedLinear:
    """y = x Ŵᵀ (+ b) from packed 4- or 8-bit weights; inputs are first multiplied by `input_scale` [K] (AWQ's 1/s)."""

    weight = None  # there is no float weight any more

    def __init__(
        self, quantized: Quantized, bias: torch.Tensor | None = None, input_scale: torch.Tensor | None = None
    ) -> None:
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

    def __init__(
        self,
        quantized: Quantized,
        grid: str,
        bias: torch.Tensor | None = None,
        smooth: torch.Tensor | None = None,
        per_tensor: bool = False,
    ) -> None:
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
        return round_to_grid(self.grid, v / s), s.expand(len(x)).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = self.round_inputs(x)
        y = scaled_matmul(codes, self.codes, scale, self.scale, x.dtype)
        return y if self.bias is None else y + self.bias

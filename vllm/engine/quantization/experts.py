"""Experts of few bits: what stands in a layer where stacks of floats stood.

Owns the codes of a layer's experts; called by the layer with the choice that its router made. It never rounds an
activation: of every method, experts take the weights' format alone. vLLM:
`vllm/model_executor/layers/fused_moe/fused_moe.py` (`use_int4_w4a16`, `use_int8_w8a16`).
"""

from __future__ import annotations

import common

import dataclasses
from collections.abc import Sequence

import torch

from engine.experts.grouped_matmul import align_block_size
from engine.experts.layer import silu_and_mul
from engine.experts.stacked import StackedExperts, by_expert
from engine.quantization.algorithms import rtn
from engine.quantization.dequant_matmul import dequant_matmul
from engine.quantization.formats import Format, Quantized
from engine.quantization.grouped_dequant import block_rows, grouped_dequant_matmul
from engine.quantization.packed_weight import PackedWeight


class StackedWeight:
    """Matrices of codes in one format, one for each expert, in one stack as the kernel reads it."""

    def __init__(self, parts: Sequence[Quantized]) -> None:
        packed = [PackedWeight.pack(part) for part in parts]
        self.format, self.K = packed[0].format, packed[0].K
        self.codes = torch.stack([weight.codes for weight in packed])  # [E, N, K · bits / 8]
        self.scale = torch.stack([weight.scale for weight in packed])  # [E, groups, N]
        zeros = [weight.zero for weight in packed if weight.zero is not None]
        self.zero = torch.stack(zeros) if zeros else None
        self.each = [  # one expert's, as a linear layer has it; a CPU decodes it when somebody asks
            dataclasses.replace(
                weight, codes=self.codes[i], scale=self.scale[i], zero=None if self.zero is None else self.zero[i]
            )
            for i, weight in enumerate(packed)
        ]


class QuantizedExperts:
    """Some experts of a layer, `held`, as codes."""

    def __init__(self, held: range, gate_up: Sequence[Quantized], down: Sequence[Quantized]) -> None:
        """Of each expert W₁ [2·I, H], gates above ups, and W₂ [H, I]. Raises InputError for what no kernel decodes."""
        self.held, self.gate_up, self.down = held, StackedWeight(gate_up), StackedWeight(down)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """y_t = Σ_j weights[t, j] · expert_{ids[t, j]}(x_t). Shapes: x [T, H], weights, ids [T, k] -> [T, H]."""
        if not (len(x) and common.runs_kernel(x)):
            return by_expert(x, weights, ids, self.held, self.one)
        tiles = align_block_size(ids, self.held, block_rows(x.dtype, ids.numel(), len(self.held)))
        h = silu_and_mul(grouped_dequant_matmul(x, self.gate_up, tiles, ids.shape[1]))
        said = grouped_dequant_matmul(h, self.down, tiles, 0, weights)
        return said.unflatten(0, ids.shape).sum(1)

    def one(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """What the i-th of those held says. Shapes: [N, H] -> [N, H]."""
        return dequant_matmul(silu_and_mul(dequant_matmul(x, self.gate_up.each[i])), self.down.each[i])

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, uint8 [E, 2·I, …] and [E, H, …]."""
        return self.gate_up.codes, self.down.codes

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Floats: there are none but scales."""
        return []


def quantize_experts(experts: StackedExperts, format: Format) -> QuantizedExperts:
    """Every weight to its nearest grid point. Raises InputError where groups do not divide the inputs."""
    device = experts.down.device
    return QuantizedExperts(
        experts.held,
        *([rtn(matrix.float().cpu(), format).to(device) for matrix in stack] for stack in experts.matrices),
    )

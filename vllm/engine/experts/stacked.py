"""The experts of a layer in floats, stacked: one matrix [2·I, H] and one [H, I] for each.

Owns their weights; called by `layer` with the choice that the router made. It never routes. vLLM:
`vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py`, `experts/cpu_moe.py`.
"""

from __future__ import annotations

import common

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.experts import grouped_matmul
from engine.experts.layer import ACTIVATIONS


@dataclass
class StackedExperts:
    """Some experts of a layer, `held`; the others are asked elsewhere, and count as nothing here."""

    held: range
    gate_up: torch.Tensor  # [E, 2·I, H], gates above ups
    down: torch.Tensor  # [E, H, I]
    gate_up_bias: torch.Tensor | None = None  # [E, 2·I]
    down_bias: torch.Tensor | None = None  # [E, H]
    activation: str = "silu"  # one of ACTIVATIONS

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """y_t = Σ_j weights[t, j] · expert_{ids[t, j]}(x_t). Shapes: x [T, H], weights, ids [T, k] -> [T, H]."""
        if not (len(x) and common.runs_kernel(x)):
            return by_expert(x, weights, ids, self.held, self.one)
        return grouped_matmul.fused_experts(x, weights, ids, self)

    def one(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """What the i-th of those held says: W₂ · act(W₁ x). Shapes: [N, H] -> [N, H]."""
        up_bias, down_bias = (None if b is None else b[i] for b in (self.gate_up_bias, self.down_bias))
        return F.linear(ACTIVATIONS[self.activation](F.linear(x, self.gate_up[i], up_bias)), self.down[i], down_bias)

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[E, 2·I, H] and [E, H, I]."""
        return self.gate_up, self.down

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that they are made of."""
        found = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return [tensor for tensor in found if tensor is not None]


def by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    held: range,
    one: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Experts one after the other, each with all of its tokens: whoever is not asked is never read.

    `one(i, x)` is what the i-th of `held` says. A token's answers are added in the order of its choice, so they do not
    depend on who else is in the batch. Shapes: x [T, H], weights, ids [T, k] -> [T, H].
    """
    pairs = ids.flatten()
    order, counts = pairs.argsort(stable=True), torch.bincount(pairs, minlength=held.stop).tolist()
    said = x.new_zeros(len(pairs), x.shape[1])  # of each pair of a token and an expert
    start = 0
    for expert, count in enumerate(counts):
        if count and expert in held:
            mine = order[start : start + count]
            y = one(expert - held.start, x[mine // ids.shape[1]])
            said[mine] = (y * weights.flatten()[mine, None]).to(y.dtype)
        start += count
    return said.unflatten(0, ids.shape).sum(1)

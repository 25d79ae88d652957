"""A layer of experts: a router, and the experts that it sends each token to.

Owns the layer's weights and the products on a CPU; called by the model in the place of an MLP. It never knows a rank,
nor which family it is of. vLLM: `vllm/model_executor/layers/fused_moe/layer.py:FusedMoEFactory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.experts.config import MoEConfig
from engine.experts.routing import route


class Experts(Protocol):
    """What multiplies: floats, codes, or one rank's part of either."""

    @property
    def held(self) -> range:
        """The experts that are here."""
        ...

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """y_t = Σ_j weights[t, j] · expert_{ids[t, j]}(x_t). Shapes: x [T, H], weights, ids [T, k] -> [T, H]."""
        ...

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights or codes of those held, [E, 2·I, …] and [E, H, …]."""
        ...

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All floats that they are made of."""
        ...


@dataclass
class MoELayer:
    """A router and its experts: what stands in a layer in the place of an MLP."""

    config: MoEConfig
    gate: torch.Tensor  # the router, [E, H]
    experts: Experts
    gate_bias: torch.Tensor | None = None  # [E], added to the logits: gpt-oss
    correction: torch.Tensor | None = None  # [E], for the choice alone: DeepSeek-V3
    shared_gate: torch.Tensor | None = None  # [1, H]: what the shared expert's word counts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: [T, H] -> [T, H]."""
        weights, ids = route(F.linear(x.to(self.gate.dtype), self.gate, self.gate_bias), self.config, self.correction)
        return self.experts(x, weights, ids)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it is made of, but the shared expert, whose layers are the model's."""
        own = (self.gate, self.gate_bias, self.correction, self.shared_gate)
        return [*(tensor for tensor in own if tensor is not None), *self.experts.tensors]

    def shared_weight(self, x: torch.Tensor) -> torch.Tensor | float:
        """What the shared expert's word counts: [T, 1], or 1."""
        return 1.0 if self.shared_gate is None else F.linear(x, self.shared_gate).sigmoid()


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) ⊙ up. Shapes: [N, 2·I], gates before ups -> [N, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_oai(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """gpt-oss: (up + 1) ⊙ gate · sigmoid(alpha · gate), both cut at `limit`. Shapes: [N, 2·I], gates before ups."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


ACTIVATIONS = {"silu": silu_and_mul, "swiglu_oai": swiglu_oai}

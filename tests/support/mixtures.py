"""Small mixtures of experts: layers with seeded weights, and the loop that says what they mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from engine.experts.config import MoEConfig
from engine.experts.layer import MoELayer
from engine.experts.stacked import StackedExperts

CPU = torch.device("cpu")
MIXTURE = MoEConfig(num_experts=6, top_k=2, intermediate_size=48)
SIZES = dict(seed=3, num_attention_heads=8, num_key_value_heads=2, intermediate_size=96)
MIXTURES: dict[str, dict[str, Any]] = {  # arguments of `random_model`, as the families have them
    "mixtral": SIZES | {"moe": MIXTURE},
    "qwen2_moe": SIZES | {"moe": dataclasses.replace(
        MIXTURE, renormalize=False, shared_intermediate_size=32, shared_gate=True)},
    "qwen3_moe": SIZES | {"qk_norm": True, "num_hidden_layers": 3, "moe": dataclasses.replace(
        MIXTURE, top_k=3, dense_layers=(1,))},
}  # fmt: skip


def experts(E: int, H: int, I: int, bias: bool = False, activation: str = "silu", dtype: torch.dtype = torch.float32,
            device: torch.device = CPU, seed: int = 0, held: range | None = None) -> StackedExperts:  # fmt: skip
    """Seeded experts; those `held` have the weights that they have in the whole layer."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(E, 2 * I, H), (E, H, I), *([(E, 2 * I), (E, H)] if bias else [])]
    parts = [torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) == 3 else 1) for shape in shapes]
    held = range(E) if held is None else held
    parts = [part[held.start : held.stop].to(device, dtype).contiguous() for part in parts]
    return StackedExperts(held, *parts, activation=activation)


def layer(config: MoEConfig, H: int, **about: Any) -> MoELayer:
    """A seeded layer of hidden size H."""
    router = torch.randn(config.num_experts, H, generator=torch.Generator().manual_seed(9))
    return MoELayer(
        config, router.to(about.get("device", CPU)), experts(config.num_experts, H, config.intermediate_size, **about)
    )


def naive(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, these: StackedExperts) -> torch.Tensor:
    """y_t = Σ_j w_tj · expert_{i_tj}(x_t), token by token, expert by expert, in fp64."""
    parts = (these.gate_up, these.down, these.gate_up_bias, these.down_bias)
    gate_up, down, up_bias, down_bias = (None if part is None else part.double() for part in parts)
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t in range(len(x)):
        for e, w in zip(ids[t].tolist(), weights[t].double()):
            if e not in these.held:
                continue
            i = e - these.held.start
            gate, up = (gate_up[i] @ x[t].double() + (0 if up_bias is None else up_bias[i])).chunk(2)
            if these.activation == "swiglu_oai":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                h = F.silu(gate) * up
            y[t] += w * (down[i] @ h + (0 if down_bias is None else down_bias[i]))
    return y.to(x.dtype)


def choice(T: int, E: int, k: int, seed: int = 0, device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeded weights and ids [T, k]; no token visits an expert twice."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(T)]) if T else torch.zeros(0, k).long()
    return torch.rand(T, k, generator=generator).to(device), ids.to(device)

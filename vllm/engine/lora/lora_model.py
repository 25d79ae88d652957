"""A LoRA adapter in memory: two thin matrices beside each weight of a model, y = x Wᵀ + s · (x Aᵀ) Bᵀ.

Owns what can be adapted, and in which shapes; made by `files` and by tests, called by everything of this folder. It
never opens a file, and knows no slot. vLLM: `vllm/lora/lora_model.py`, `vllm/lora/lora_weights.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.model import llama
from engine.model.config import LlamaConfig

# Packed layer -> the modules of Transformers that lie in it as slices of its output, in this order.
PACKED_MODULES = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}


TARGETS = tuple(name.split(".")[1] for names in PACKED_MODULES.values() for name in names)


@dataclass(frozen=True)
class LayerShape:
    """A packed linear layer: its input, and the widths of the slices of its output."""

    in_features: int
    slices: tuple[int, ...]


def layer_shapes(config: LlamaConfig) -> dict[str, LayerShape]:
    """Shape of each kind of packed layer; all decoder layers have the same. Where some have experts, attention alone
    can be adapted."""
    c = config
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    found = {"qkv_proj": LayerShape(c.hidden_size, (q, kv, kv)), "o_proj": LayerShape(q, (c.hidden_size,))}
    if c.moe is None:
        found["gate_up_proj"] = LayerShape(c.hidden_size, (c.intermediate_size,) * 2)
        found["down_proj"] = LayerShape(c.intermediate_size, (c.hidden_size,))
    return found


Pair = tuple[torch.Tensor, torch.Tensor]  # A [r, in] and s·B [out, r]
Slices = tuple[Pair | None, ...]  # of each slice: its pair, or nothing


@dataclass
class LoRAModel:
    """An adapter in CPU memory (`vllm/lora/lora_model.py`). The scale s is multiplied into B, once and for all."""

    name: str
    rank: int
    weights: dict[str, Slices]  # "layers.0.qkv_proj" -> A and B of its slices; a layer that is not adapted is not there
    fingerprint: str = ""  # of the bytes that it was read from; nothing if it never was in a file

    @property
    def num_parameters(self) -> int:
        return sum(a.numel() + b.numel() for pairs in self.weights.values() for a, b in filter(None, pairs))


def random_adapter(  # noqa: PLR0913, for tests and measurements: each of them varies something else
    config: LlamaConfig,
    rank: int,
    seed: int,
    name: str | None = None,
    size: float = 0.3,
    targets: Sequence[str] = TARGETS,
    dtype: torch.dtype = torch.float32,
) -> LoRAModel:
    """A seeded adapter that changes each layer's output by roughly the share `size` of its input."""
    generator = torch.Generator().manual_seed(seed)

    def noise(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)

    weights: dict[str, Slices] = {}
    for i in range(config.num_hidden_layers):
        for packed, shape in layer_shapes(config).items():
            pairs = tuple(
                (noise(rank, shape.in_features, shape.in_features**-0.5), noise(out, rank, size * rank**-0.5))
                if module.split(".")[1] in targets
                else None
                for module, out in zip(PACKED_MODULES[packed], shape.slices)
            )
            if any(pairs):
                weights[f"layers.{i}.{packed}"] = pairs
    return LoRAModel(name or f"random-{seed}", rank, weights)


def merged(model: llama.Llama, lora: LoRAModel) -> llama.Llama:
    """The model with W + s·B·A in place of W: no cost per token, and no other adapter beside it."""
    new = copy.copy(model)
    new.linear = dict(model.linear)
    for name, pairs in lora.weights.items():
        old: Any = model.linear[name]  # of any kind that has a whole weight
        weight, start = old.weight.clone(), 0
        for pair, out in zip(pairs, layer_shapes(model.config)[name.split(".")[2]].slices):
            if pair is not None:
                a, b = (t.to(weight.device, torch.float32) for t in pair)
                weight[start : start + out] += (b @ a).to(weight.dtype)
            start += out
        new.linear[name] = llama.Linear(weight, old.bias)
    return new

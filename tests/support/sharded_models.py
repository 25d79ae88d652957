"""A seeded model that several numbers of ranks divide, and tokens that meet every shard's first and last row."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from engine.model import llama
from support.rank_threads import CPU

IDS = [5, 1, 77, 126, 0, 63, 64, 31, 32, 99]


def model_with(device: torch.device = CPU, biases: bool = False, dtype: torch.dtype = torch.float32,
               **sizes: Any) -> llama.Llama:  # fmt: skip
    """A seeded model; with `biases`, every layer that a checkpoint may give one has one."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96, **sizes}
    model = llama.random_model(seed=3, device=device, dtype=dtype, **sizes)
    if biases:
        model.config = dataclasses.replace(model.config, attention_bias=True, mlp_bias=True)
        for name, layer in model.linear.items():
            if name != "lm_head":
                layer.bias = torch.randn(layer.weight.shape[0], dtype=dtype, device=device)
    return model

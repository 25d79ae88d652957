"""Trained drafters that have learned nothing."""

from __future__ import annotations

import torch

from engine.model import llama
from engine.spec_decode import trained


def random_network(method: str, model: llama.Llama, draft_vocab: int = 40, seed: int = 0) -> trained.Network:
    """A drafter that learned nothing, for the tiny model."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
               for name, shape in trained.network_shapes(method, model.config).items()}  # fmt: skip
    d2t = torch.randperm(model.config.vocab_size, generator=generator)[:draft_vocab].sort().values
    return trained.Network(method, model, d2t, {n: t.to(model.device) for n, t in tensors.items()})

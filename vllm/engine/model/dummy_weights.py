"""`--load-format dummy`: weights at random, for a model of which only config.json and tokenizer are here.

Owns their size and their seed; called in place of `open_weights`. It never opens a file. vLLM:
`vllm/model_executor/model_loader/dummy_loader.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.model.config import LlamaConfig
from engine.model.llama import tensor_shapes

LARGEST, SEED = 1e-3, 1234  # vLLM's


def dummy_weights(config: LlamaConfig) -> Callable[[str], torch.Tensor | None]:
    """A lookup by Transformers' names, as `open_weights` returns one: fp32, uniform in ±LARGEST, the same each time."""
    shapes = tensor_shapes(config)

    def tensor(name: str) -> torch.Tensor | None:
        of, _, kind = name.rpartition(".")
        shape = shapes.get(name) or shapes.get(f"{of}.weight")
        if shape is None:
            return None
        generator = torch.Generator().manual_seed(SEED)
        return torch.empty(shape[:1] if kind == "bias" else shape).uniform_(-LARGEST, LARGEST, generator=generator)

    return tensor

"""What a model is calibrated on: windows of a text that every Python ships, and what its layers are given there.

Owns the text and its attention; called by `methods`, and by companion 05b, which measures on the windows beside.
It never changes a model. vLLM has none of this: `llm-compressor`'s `transformers/calibration/` writes what
vLLM: `vllm/model_executor/layers/quantization/` loads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.model import llama
from engine.model.tokenizer import Tokenizer


def windows(tokenizer: Tokenizer, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(calibration, evaluation) tokens [count, length] from Python's own language reference, which every Python ships.

    Windows alternate between the two, from documents in alphabetical order, so neither ever sees the other's text.
    """
    from pydoc_data import topics

    tokens: list[int] = []
    for name in sorted(topics.topics):
        tokens += tokenizer.encode(topics.topics[name])
        if len(tokens) >= 2 * count * length:
            break
    both = torch.tensor(tokens[: 2 * count * length]).view(count, 2, length)
    return both[:, 0].contiguous(), both[:, 1].contiguous()


def window_attention(B: int) -> llama.Attend:
    """Causal attention within B equally long windows that lie one behind the other."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (B, -1)).transpose(1, 2) for x in (q, k, v))  # [B, H, S, D]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    return attend


def record(
    inputs: dict[str, torch.Tensor], name: str, layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """What the layer does, with its input kept under `name`."""
    inputs[name] = x
    return layer(x)

"""Generation without a cache: obviously right, and slow.

Owns the reference that tours, numbers and tests compare a run on the real model with; it never keeps anything between
two tokens. A lesson that has the reference for its subject writes its own.
vLLM: `VllmRunner.generate_greedy` against `HfRunner` in `tests/conftest.py`.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.model import llama


def recompute(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`attend` without a cache: keys and values of this forward pass are all there is, and they are torch's to handle.

    Shapes: q [T, Hq, D]; k, v [T, Hkv, D]; returns [T, Hq, D].
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, T, D]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def generate(model: llama.Llama, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy decoding of exactly `max_tokens` tokens, the whole sequence through the model for each."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        ids = torch.tensor(tokens, device=model.device)  # [T]
        hidden = model.forward(ids, torch.arange(len(tokens), device=model.device), recompute)  # [T, hidden]
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]

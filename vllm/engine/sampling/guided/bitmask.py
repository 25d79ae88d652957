"""Masks meet logits: −∞ for every token whose bit is 0, in the rows of the requests that asked for it.

Owns the kernel, and a path without it for machines that interpret kernels; called by the model runner between model and
sampler. It never reads a logit.
vLLM: `vllm/v1/structured_output/utils.py`, `vllm/v1/worker/gpu/structured_outputs.py`.
"""

# A kernel takes pointers, strides and constants whose types only a launch knows.
# ruff: noqa: PLR0913

from __future__ import annotations

import common
from common import tl, triton

import functools
import math

import numpy as np
import torch


@common.kernel
def apply_token_bitmask_kernel(logits_ptr, bitmask_ptr, indices_ptr, V, logits_stride, bitmask_stride,
                               BLOCK: tl.constexpr):  # fmt: skip
    """Program (g, i): tokens [i·BLOCK, (i + 1)·BLOCK) of the g-th guided row. No logit is read."""
    g = tl.program_id(0)
    row = tl.load(indices_ptr + g)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask_ptr + g * bitmask_stride + token // 32, mask=token < V, other=-1)  # behind V: all allowed
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + token, float("-inf"), mask=forbidden)


@torch.inference_mode()
def apply_token_bitmask_inplace(logits: torch.Tensor, bitmask: torch.Tensor, indices: torch.Tensor) -> None:
    """Forbid, in some rows of a batch, the tokens whose bit is 0.

    Semantics: logits[indices[g], t] ← −∞ where bit t mod 32 of bitmask[g, t div 32] is 0. Other rows are not touched.
    Shapes: logits [R, V], any float dtype; bitmask int32 [G, ⌈V/32⌉]; indices int64 [G], all different.
    """
    V, G = logits.shape[1], len(indices)
    if bitmask.shape != (G, -(-V // 32)) or logits.stride(1) != 1 or bitmask.stride(1) != 1:
        raise ValueError(f"bitmask {list(bitmask.shape)} does not fit {G} rows of {V} logits, or is not contiguous")
    if G == 0:
        return
    if common.runs_kernel(logits):
        BLOCK = 4096
        apply_token_bitmask_kernel[(G, triton.cdiv(V, BLOCK))](
            logits, bitmask, indices, V, logits.stride(0), bitmask.stride(0), BLOCK=BLOCK, num_warps=4
        )
        return
    bias = bias_of_bytes()[bitmask.view(torch.uint8).long()].view(G, -1)[:, :V]  # 8 tokens at a time
    logits.index_add_(0, indices, bias.to(logits.dtype))


@functools.cache
def bias_of_bytes() -> torch.Tensor:
    """What eight bits of a mask add to eight logits, 0 or −∞. [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.where(torch.from_numpy(bits).bool(), 0.0, -math.inf)

"""Decode attention in ranges of keys: into how many it is cut, and how their results become one (Flash-Decoding).

Owns that number for every decode kernel; called by the kernels' wrappers. It never attends: the sum over the ranges is
lesson 02's `combine_splits_kernel`. vLLM: `vllm/v1/attention/ops/triton_unified_attention.py:reduce_segments`.
"""

from __future__ import annotations

from common import triton

import functools
from typing import Any

import torch

from engine.registry import fill


def default_splits(programs: int, max_seq_len: int, device: torch.device, per_sm: int = 3) -> int:
    """A power of two up to 64: as many as run at once, `per_sm` on each SM, if all have 256 keys. Of more, the last
    would start when the first have ended, and most SMs would wait for them."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    most = max(1, min(64, max_seq_len // 256, per_sm * processors // programs))
    return triton.next_power_of_2(most + 1) // 2


@functools.cache
def _combine_splits_kernel() -> Any:
    """Looked up once: a step combines in every layer."""
    return fill("combine_splits")


def combine_splits(parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> None:
    """Attention over all keys from attention over ranges of them.

    Semantics: out = Σ_i exp(lse_i) parts_i / Σ_i exp(lse_i), over the splits i.
    Shapes: parts fp32 [B, Hq, splits, D], lse fp32 [B, Hq, splits], out [B, Hq, D].
    """
    B, Hq, splits, D = parts.shape
    D_pad, kernel = triton.next_power_of_2(D), _combine_splits_kernel()
    num_warps = 4 if splits * D_pad <= 8192 else 16  # all parts of a row are in registers: lesson 09's are 512 wide
    kernel[(B * Hq,)](parts, lse, out, D=D, D_PAD=D_pad, SPLITS=splits, num_warps=num_warps)

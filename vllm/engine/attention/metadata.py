"""What attention must know about a step: whose tokens these are, where they stand, and where keys and values go.

Owns the tensors of one step, built once and read by every layer; called by the lessons' caches and runners, and by
`worker` where graphs are recorded. It never looks at a query or at the cache itself.
vLLM: `vllm/v1/attention/backend.py:CommonAttentionMetadata`.
"""

from __future__ import annotations

import common

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F


@dataclasses.dataclass
class AttentionMetadata:
    """What attention must know about a step of B sequences and T tokens (vLLM: `CommonAttentionMetadata`)."""

    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]: where each token's keys and values go; [T, G] in G groups of layers
    query_start_loc: torch.Tensor  # int64 [B + 1]: sequence b owns tokens [query_start_loc[b], query_start_loc[b + 1])
    seq_lens: torch.Tensor  # int32 [B]: context length after this step
    block_table: torch.Tensor  # int32 [B, W], padded with the null block; [B, W, G]
    query_lens: list[int]  # on the host, so that nothing waits for the GPU
    max_seq_len: int

    @classmethod
    def build(
        cls,
        blocks: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        block_size: int,
        device: torch.device | None = None,
    ) -> AttentionMetadata:
        """From each sequence's blocks, its length including this step's tokens, and how many these are (at least 1)."""
        width = max(map(len, blocks), default=0)
        table = torch.tensor([[*row, *[0] * (width - len(row))] for row in blocks]).view(len(blocks), width).int()
        S, n = torch.tensor(seq_lens, dtype=torch.int64), torch.tensor(query_lens, dtype=torch.int64)  # [B]
        start_loc = F.pad(n.cumsum(0), (1, 0))  # [B + 1]
        owner = torch.arange(len(n)).repeat_interleave(n)  # [T]
        positions = torch.arange(len(owner)) + (S - start_loc[1:])[owner]
        slots = table[owner, positions // block_size].long() * block_size + positions % block_size
        tensors = (x.to(device or common.device()) for x in (positions, slots, start_loc, S.int(), table))
        return cls(*tensors, query_lens=list(query_lens), max_seq_len=max(seq_lens, default=0))

"""What the model must know about the running requests, in arrays that live from step to step.

Owns a row of tokens and a row of blocks for each request; called by the model runner, once a step. It never computes a
layer. vLLM: `vllm/v1/worker/gpu_input_batch.py`.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.metadata import AttentionMetadata
from engine.request import Request


class InputBatch:
    """What the model must know about the running requests, in arrays that live from step to step.

    Row r belongs to one running request. A step appends one token to it, now and then a block; the rest is arithmetic
    on whole arrays, so preparing a step costs the same at position 100 and at position 8,000.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 0) -> None:
        """`num_groups` of layers have a table each, and an entry of a request's is then a block for each of them; 0:
        all layers have the same."""
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        shape = (max_num_seqs, -(-max_model_len // block_size))
        self.block_table = np.zeros((*shape, num_groups) if num_groups else shape, dtype=np.int32)
        self.num_tokens = [0] * max_num_seqs  # of each row of token_ids, filled in so far
        self.num_blocks = [0] * max_num_seqs  # of each row of block_table
        self.free_rows = list(range(max_num_seqs))[::-1]
        self.rows: dict[str, int] = {}

    def add(self, request_id: str) -> None:
        row = self.rows[request_id] = self.free_rows.pop()
        self.num_tokens[row] = self.num_blocks[row] = 0
        self.block_table[row] = 0  # the null block

    def remove(self, request_id: str) -> list[int]:
        """Give the row back; a request that has none (aborted while it waited) is passed over. Returns its blocks."""
        row = self.rows.pop(request_id, None)
        if row is None:
            return []
        self.free_rows.append(row)
        return self.block_table[row, : self.num_blocks[row]].tolist()

    def update(self, request: Request, blocks: Sequence[int]) -> int:
        """Append the tokens and blocks that came since the last step. Returns the row."""
        row = self.rows[request.request_id]
        known = self.num_tokens[row]
        if new := request.all_token_ids[known:]:
            self.num_tokens[row] = known + len(new)
            self.token_ids[row, known : known + len(new)] = new
        known = self.num_blocks[row]
        if len(blocks) > known:
            self.num_blocks[row] = len(blocks)
            self.block_table[row, known : len(blocks)] = blocks[known:]
        return row

    def prepare(
        self, rows: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int], device: torch.device
    ) -> tuple[torch.Tensor, AttentionMetadata]:
        """The flattened batch: B sequences, T tokens, no padding. Returns token_ids int64 [T] and the metadata.

        Sequence b computes its positions [seq_lens[b] − query_lens[b], seq_lens[b]).
        """
        row, n, S = np.array(rows), np.array(query_lens), np.array(seq_lens)  # [B]
        query_start_loc = np.concatenate(([0], n.cumsum()))  # [B + 1]
        owner = np.repeat(np.arange(len(row)), n)  # [T]: the sequence that a token belongs to
        positions = np.arange(len(owner)) + (S - query_start_loc[1:])[owner]  # [T]
        block = self.block_table[row[owner], positions // self.block_size].astype(np.int64)
        slots = (block.T * self.block_size + positions % self.block_size).T  # [T], or [T, groups]
        longest = int(S.max())
        table = self.block_table[row, : -(-longest // self.block_size)]  # [B, W], or [B, W, groups], a copy
        arrays = (self.token_ids[row[owner], positions], positions, slots, query_start_loc, S.astype(np.int32), table)
        token_ids, *tensors = (torch.from_numpy(array).to(device) for array in arrays)
        return token_ids, AttentionMetadata(*tensors, query_lens=list(query_lens), max_seq_len=longest)

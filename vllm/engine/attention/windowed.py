"""Attention of layers that see different things: windows, sinks, and for each group of layers a table of its own.

Owns the memory of such a model, and which table and window each layer has; called by the model runner in the place of
the plain backend. It never has a kernel: that is lesson 10's. vLLM: `initialize_kv_cache_tensors` in
`vllm/v1/worker/gpu_model_runner.py`, `vllm/v1/attention/backends/triton_attn.py`.
"""

from __future__ import annotations

import common

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine import registry
from engine.attention.metadata import AttentionMetadata

if TYPE_CHECKING:
    from engine.model.llama import Attend, Llama


class WindowedKVCache:
    """A tensor [2, num_blocks, block_size, Hkv, D] for the j-th layer of every group.

    A block has an owner in one group at a time, so layers of different groups share a tensor and never a row. Memory is
    num_blocks times the layers of a group, however many groups there are.
    """

    can_roll_back = True  # what is written behind the last token of a sequence is overwritten later

    def __init__(self, model: Llama, num_blocks: int, block_size: int, groups: Sequence[Sequence[int]]) -> None:
        """`groups` has the layers of each group, counted as the model counts them."""
        config = model.config
        shape = (2, num_blocks, block_size, model.num_kv_heads, config.head_dim)
        memory = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(max(map(len, groups)))]
        place = {layer: (g, j) for g, layers in enumerate(groups) for j, layer in enumerate(layers)}
        layers = range(config.num_hidden_layers)
        self.layers = [memory[place[layer][1]] for layer in layers]
        self.kinds = [(place[layer][0], config.window(layer)) for layer in layers]  # of each, its group and its window
        self.sinks = model.sinks or [None] * len(self.layers)
        self.block_size, self.num_heads = block_size, model.num_heads

    def release(self, blocks: Sequence[int]) -> None:
        """A request has left these blocks: nothing else belongs to them."""


class WindowedAttention:
    """An `AttentionBackend` for a model some of whose layers have a window, or sinks."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        """`groups` as in `WindowedKVCache`."""
        self.groups = groups
        self.write, self.paged_decode = registry.fill("cache.write"), registry.fill("decode.paged")
        self.unified, self.plan_torch, self.run_torch = map(registry.fill, ("mixed.attend", "mixed.plan", "mixed.run"))

    def make_cache(self, model: Llama, num_blocks: int, block_size: int) -> WindowedKVCache:
        """As many blocks of each group's layers."""
        return WindowedKVCache(model, num_blocks, block_size, self.groups)

    def plan(self, meta: AttentionMetadata, cache: Any) -> Attend:
        """K and V [T, Hkv, D] into the layer's slots first, then its queries to what its window shows of them."""
        longest, plans = max(meta.query_lens), {}
        slots, tables = (meta.slot_mapping,), (meta.block_table,)
        if meta.block_table.ndim == 3:  # a table for each group
            slots, tables = meta.slot_mapping.T.contiguous(), meta.block_table.movedim(2, 0).contiguous()
        if not common.runs_kernel(cache.layers[0]):
            where = meta.query_lens, meta.seq_lens, cache.layers[0], cache.num_heads
            for group, window in set(cache.kinds):
                plans[group, window] = self.plan_torch(tables[group], *where, window)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv_cache, (group, window), sinks = cache.layers[layer], cache.kinds[layer], cache.sinks[layer]
            self.write(k, v, kv_cache, slots[group])
            if plans:
                return self.run_torch(plans[group, window], q, kv_cache, sinks)
            table, lens = tables[group], meta.seq_lens
            if longest == 1 and window is None and sinks is None:  # a long context is spread over the GPU
                return self.paged_decode(q, kv_cache, table, lens, meta.max_seq_len)
            return self.unified(q, kv_cache, table, meta.query_start_loc, lens, longest, window, sinks)

        return attend

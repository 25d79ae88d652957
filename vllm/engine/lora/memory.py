"""Where the weights of resident adapters lie: in a slot each, as in vLLM, or in blocks of the KV cache, as in S-LoRA.

Owns the pages and the tables with an address per row, by which kernels find A and B; written by `manager`, read by
`layers`. It never decides who is resident. vLLM: `vllm/lora/layers/base_linear.py`, `vllm/lora/model_manager.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.lora.lora_model import LayerShape, LoRAModel, Pair, layer_shapes
from engine.model import llama


@dataclass
class LoRATables:
    """Where the weights of one kind of layer lie, for all slots and all decoder layers: element offsets into `pages`.

    Row r of slot s's A (of slice i) is the `in_features` numbers from a_rows[s, i, r] on; row r of its Bᵀ is the
    slice's width from b_rows[s, i, r] on. Rows at and above ranks[s, i] do not exist.
    """

    shape: LayerShape
    a_rows: torch.Tensor  # int64 [slots, slices, max_rank]
    b_rows: torch.Tensor  # int64 [slots, slices, max_rank]
    ranks: torch.Tensor  # int32 [slots, slices], 0: this slice is not adapted
    starts: torch.Tensor  # int32 [slices + 1], where each slice of the output begins

    @classmethod
    def empty(cls, shape: LayerShape, slots: int, max_rank: int, device: torch.device) -> LoRATables:
        table = torch.zeros(slots, len(shape.slices), max_rank, dtype=torch.int64, device=device)
        starts = torch.tensor([0, *np.cumsum(shape.slices)], dtype=torch.int32).to(device)
        ranks = torch.zeros(slots, len(shape.slices), dtype=torch.int32, device=device)
        return cls(shape, table, table.clone(), ranks, starts)

    @property
    def aligned(self) -> bool:
        """All rows begin at multiples of 16 elements, if their lengths are such: loads can be wide."""
        return all(n % 16 == 0 for n in (self.shape.in_features, *self.shape.slices))


class AdapterMemory(Protocol):
    """What a manager asks of the memory that its slots stand for, which may be elsewhere."""

    dtype: torch.dtype

    def write(self, slot: int, lora: LoRAModel) -> None:
        """Copy an adapter into its slot."""
        ...

    def clear(self, slot: int) -> None:
        """The slot has no adapter any more; its memory can be somebody else's."""
        ...


class LoRAMemory:
    """Resident adapters: `num_slots` of them, each found through the tables. Subclasses decide where weights lie."""

    def __init__(self, model: llama.Llama, num_slots: int, max_rank: int) -> None:
        self.model, self.num_slots, self.max_rank = model, num_slots, max_rank
        self.dtype = model.dtype
        self.shapes = layer_shapes(model.config)
        self.tables = {
            kind: LoRATables.empty(shape, num_slots, max_rank, model.device) for kind, shape in self.shapes.items()
        }
        # For the CPU: matrices[slot][layer][kind] = (A of all adapted slices [n·rank, in], [(start, stop, Bᵀ) …])
        self.matrices: dict[int, Any] = {}
        self.pages: list[torch.Tensor] = []  # of each decoder layer, flat

    def parts(self, lora: LoRAModel) -> Iterator[tuple[str, list[int], list[tuple[str, int, int]]]]:
        """Per kind of layer: the slices that this adapter adapts, and its matrices as (letter, rows, width)."""
        for kind, shape in self.shapes.items():
            layers = [lora.weights.get(f"layers.{i}.{kind}") for i in range(self.model.config.num_hidden_layers)]
            there = [pairs for pairs in layers if pairs]
            adapted = [i for i in range(len(shape.slices)) if any(pairs[i] is not None for pairs in there)]
            if adapted:
                b = [("B", lora.rank, shape.slices[i]) for i in adapted]
                yield kind, adapted, [("A", len(adapted) * lora.rank, shape.in_features), *b]

    def rows_of(self, lora: LoRAModel, layer: int, kind: str, adapted: list[int]) -> list[torch.Tensor]:
        """The matrices of `parts`, with zeros where this layer has no adapter. B is transposed: a rank is a row."""
        pairs, shape = lora.weights.get(f"layers.{layer}.{kind}"), self.shapes[kind]

        def zero(i: int) -> Pair:
            return torch.zeros(lora.rank, shape.in_features), torch.zeros(shape.slices[i], lora.rank)

        chosen = [(pairs[i] if pairs else None) or zero(i) for i in adapted]
        return [torch.cat([a.to(self.model.dtype) for a, _ in chosen]), *(b.T.to(self.model.dtype) for _, b in chosen)]

    def write_tables(self, slot: int, rank: int, kind: str, adapted: list[int], offsets: list[list[int]]) -> None:
        """Enter element offsets of each matrix's rows into the tables of one slot."""
        table = self.tables[kind]
        ranks = [rank if i in adapted else 0 for i in range(len(table.shape.slices))]
        table.ranks[slot] = torch.tensor(ranks, dtype=torch.int32)
        for n, i in enumerate(adapted):
            table.a_rows[slot, i, :rank] = torch.tensor(offsets[0][n * rank : (n + 1) * rank])
            table.b_rows[slot, i, :rank] = torch.tensor(offsets[1 + n])

    def clear(self, slot: int) -> None:
        """The slot has no adapter any more; its memory can be somebody else's."""
        self.matrices.pop(slot, None)
        for table in self.tables.values():
            table.ranks[slot] = 0


class SlotMemory(LoRAMemory):
    """As vLLM: every slot has room for `max_rank` on every layer, whatever its adapter needs."""

    def __init__(self, model: llama.Llama, num_slots: int, max_rank: int) -> None:
        super().__init__(model, num_slots, max_rank)
        self.slot_elements = sum(
            max_rank * (shape.in_features * len(shape.slices) + sum(shape.slices)) for shape in self.shapes.values()
        )
        self.pages = [
            torch.zeros(num_slots * self.slot_elements, dtype=model.dtype, device=model.device)
            for _ in range(model.config.num_hidden_layers)
        ]

    def write(self, slot: int, lora: LoRAModel) -> None:
        """Copy an adapter into its slot, row behind row."""
        self.clear(slot)
        views: list[dict] = [{} for _ in self.pages]
        start = slot * self.slot_elements
        for kind, adapted, matrices in self.parts(lora):
            starts, offsets = [], []
            for _, rows, width in matrices:
                starts.append(start)
                offsets.append([start + r * width for r in range(rows)])
                start += rows * width
            self.write_tables(slot, lora.rank, kind, adapted, offsets)
            edges = [0, *np.cumsum(self.shapes[kind].slices).tolist()]
            for layer, flat in enumerate(self.pages):
                placed = []
                for first, values in zip(starts, self.rows_of(lora, layer, kind, adapted)):
                    placed.append(flat[first : first + values.numel()].view(values.shape))
                    placed[-1].copy_(values, non_blocking=True)
                views[layer][kind] = placed[0], [(edges[i], edges[i + 1], b) for i, b in zip(adapted, placed[1:])]
        self.matrices[slot] = views

    def layer(self, slot: int, layer: int, kind: str) -> Any:
        """(A, [(start, stop, Bᵀ) …]) of one layer, or None."""
        return self.matrices[slot][layer].get(kind)


class UnifiedMemory(LoRAMemory):
    """As S-LoRA: adapters live in blocks of the KV cache, as many as their rank needs, and none when they are gone.

    In each layer, block b is two pages of block_size · Hkv · D elements, one among the keys and one among the values.
    A matrix gets whole pages, a page as many of its rows as fit.
    """

    def __init__(self, model: llama.Llama, num_slots: int, max_rank: int, cache: Any) -> None:
        super().__init__(model, num_slots, max_rank)
        self.num_blocks = cache.layers[0].shape[1]
        self.page = cache.layers[0][0, 0].numel()
        self.pages = [kv_cache.view(-1) for kv_cache in cache.layers]
        widest = max(max(shape.in_features, *shape.slices) for shape in self.shapes.values())
        if widest > self.page:
            raise common.InputError(f"block_size: a page of {self.page} elements cannot hold a row of {widest}")

    def num_pages(self, matrices: Sequence[tuple[str, int, int]]) -> list[int]:
        return [-(-rows // (self.page // width)) for _, rows, width in matrices]

    def num_blocks_of(self, lora: LoRAModel) -> int:
        """⌈Σ over matrices of ⌈rows / rows per page⌉ / 2⌉."""
        return -(-sum(sum(self.num_pages(matrices)) for _, _, matrices in self.parts(lora)) // 2)

    def write(self, slot: int, lora: LoRAModel, blocks: Sequence[int]) -> None:
        """Copy an adapter into `blocks` (as many as `num_blocks_of`), wherever in the cache they are."""
        self.clear(slot)
        pages = [page for block in blocks for page in (block, block + self.num_blocks)]
        found: dict[str, Any] = {}
        for kind, adapted, matrices in self.parts(lora):
            taken, offsets = [], []
            for (_, rows, width), count in zip(matrices, self.num_pages(matrices)):
                mine, pages, per = pages[:count], pages[count:], self.page // width
                taken.append((torch.tensor(mine, device=self.model.device), per, rows, width))
                offsets.append([mine[r // per] * self.page + r % per * width for r in range(rows)])
            self.write_tables(slot, lora.rank, kind, adapted, offsets)
            for layer, flat in enumerate(self.pages):
                for (mine, per, rows, width), values in zip(taken, self.rows_of(lora, layer, kind, adapted)):
                    full = torch.zeros(len(mine) * per, width, dtype=values.dtype)
                    full[:rows] = values
                    flat.view(-1, self.page)[mine, : per * width] = full.view(len(mine), -1).to(flat.device)
            found[kind] = adapted, taken
        self.matrices[slot] = found

    def layer(self, slot: int, layer: int, kind: str) -> Any:
        """As SlotMemory.layer; here the rows are gathered from their pages."""
        if kind not in self.matrices[slot]:
            return None
        adapted, taken = self.matrices[slot][kind]
        pages, edges = self.pages[layer].view(-1, self.page), [0, *np.cumsum(self.shapes[kind].slices).tolist()]
        gathered = [
            pages.index_select(0, mine)[:, : per * width].reshape(-1, width)[:rows] for mine, per, rows, width in taken
        ]
        return gathered[0], [(edges[i], edges[i + 1], b) for i, b in zip(adapted, gathered[1:])]

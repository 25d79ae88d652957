"""The model's part: which rows of a step belong to which adapter, and a linear layer that adds what they ask for.

Owns the grouping of rows and the wrapper around a layer; built by whoever makes a model runner, called by the model.
It has no kernel: `add_lora` is given, lesson 12's by the registry. It never chooses an adapter.
vLLM: `vllm/lora/layers/base_linear.py`, `vllm/lora/ops/triton_ops/lora_kernel_metadata.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.attention.metadata import AttentionMetadata
from engine.lora.lora_model import layer_shapes
from engine.model import llama
from engine.request import Request
from engine.seams import AddLoRA

NONE = -1  # the slot of a row without an adapter


@dataclass
class LoRAKernelMeta:
    """One step's rows, grouped by adapter (`vllm/lora/ops/triton_ops/lora_kernel_metadata.py`).

    `order` lists the rows that have an adapter, those of one adapter side by side; `tiles` cuts that list into runs of
    at most `tile_m` rows with one adapter each: what one program of the kernels takes. Rows without an adapter are in
    no tile: they cost nothing.
    """

    order: torch.Tensor  # int64 [N] rows
    tiles: torch.Tensor  # int32 [n, 3]: first place in `order`, rows, slot
    segments: list[tuple[int, int, int]]  # slot, start, stop in `order`: the same, for the host
    tile_m: int
    in_place: bool  # `order` is 0, 1, 2, …: nothing to gather

    @classmethod
    def build(cls, slots: Sequence[int] | np.ndarray, device: torch.device, sort: bool = True) -> LoRAKernelMeta | None:
        """`slots[t]` is the adapter slot of row t, or NONE. None if no row has one.

        `sort=False` takes the runs as they come, as Punica's SGMV did: right, and an adapter that two requests use in
        different places of the batch is read twice.
        """
        slot = np.asarray(slots)
        order = np.flatnonzero(slot != NONE)
        if len(order) == 0:
            return None
        if sort:
            order = order[np.argsort(slot[order], kind="stable")]
        ends = np.append(np.flatnonzero(np.diff(slot[order])) + 1, len(order)).tolist()
        segments = [(int(slot[order[a]]), a, z) for a, z in zip([0, *ends], ends)]
        longest = max(z - a for _, a, z in segments)
        tile_m = 16 if longest <= 16 else 64  # 16 is the least a tensor core takes
        tiles = [(i, min(tile_m, z - i), s) for s, a, z in segments for i in range(a, z, tile_m)]
        in_place = order[0] == 0 and order[-1] == len(order) - 1 and bool((np.diff(order) == 1).all())
        tensors = torch.from_numpy(order).to(device), torch.tensor(tiles, dtype=torch.int32).to(device)
        return cls(*tensors, segments, tile_m, in_place)

    @property
    def distinct(self) -> bool:
        """Nobody shares an adapter with anybody: a tile would be one row and padding."""
        return len(self.tiles) == len(self.order)


class ResidentAdapters(Protocol):
    """What a layer asks of whoever has the slots: a manager, or a worker's part of it."""

    meta: LoRAKernelMeta | None  # of the step that runs; None: no row has an adapter

    @property
    def slots(self) -> Mapping[str, int]:
        """Whose weights are where, by the adapter's name."""
        ...

    @property
    def memory(self) -> Any:
        """Where the weights of the slots lie."""
        ...


class LoRALinear:
    """A linear layer, and what the adapters of the batch add to it. The layer below may be packed or quantized."""

    def __init__(
        self,
        base: Callable[[torch.Tensor], torch.Tensor],
        manager: ResidentAdapters,
        layer: int,
        kind: str,
        add_lora: AddLoRA,
    ) -> None:
        self.base, self.manager, self.index, self.kind, self.add_lora = base, manager, layer, kind, add_lora
        self.weight = getattr(base, "weight", None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y, meta = self.base(x), self.manager.meta
        return y if meta is None else self.add_lora(y, x, self.manager.memory, self.index, self.kind, meta)


def adapted_model(model: llama.Llama, manager: ResidentAdapters, add_lora: AddLoRA) -> llama.Llama:
    """The model with a LoRALinear around every layer that an adapter may adapt; `model` itself is left alone."""
    new = copy.copy(model)
    new.linear = dict(model.linear)
    for layer in range(model.config.num_hidden_layers):
        for kind in layer_shapes(model.config):
            name = f"layers.{layer}.{kind}"
            base: Any = model.linear[name]
            if hasattr(base, "local"):  # a rank of lesson 05c: its part joins the partial sums before they are added
                new.linear[name] = part = copy.copy(base)
                part.local = LoRALinear(base.local, manager, layer, kind, add_lora)
            else:
                new.linear[name] = LoRALinear(base, manager, layer, kind, add_lora)
    return new


class AppliedAdapters:
    """In a model runner's slot: before each step, tells the layers which rows belong to which adapter."""

    def __init__(self, resident: ResidentAdapters) -> None:
        self.resident = resident

    @contextlib.contextmanager
    def applied(self, requests: Sequence[Request], meta: AttentionMetadata) -> Iterator[None]:
        """While it lasts; afterwards whoever else uses this model has no adapter."""
        taken = self.resident.slots
        slots = [NONE if request.lora_name is None else taken[request.lora_name] for request in requests]
        self.resident.meta = LoRAKernelMeta.build(np.repeat(slots, meta.query_lens), meta.positions.device)
        try:
            yield
        finally:
            self.resident.meta = None

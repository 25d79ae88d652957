"""Adapters on ranks: each holds its part of what is in a slot.

Owns how an adapter is cut, and which slot is whose on a rank; called by workers, and by the manager in the engine core.
It never decides who is resident. vLLM: `vllm/lora/layers/`, `vllm/lora/worker_manager.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from engine.lora.config import LoRAConfig
from engine.lora.lora_model import LoRAModel, Pair, Slices
from engine.lora.memory import SlotMemory
from engine.model import llama
from engine.model.config import LlamaConfig
from engine.parallel.config import get_pp_indices
from engine.parallel.layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from engine.parallel.sharding import shard_config

if TYPE_CHECKING:
    from engine.parallel.executors import Executor


def shard_adapter(
    lora: LoRAModel, config: LlamaConfig, tp: tuple[int, int] = (0, 1), pp: tuple[int, int] = (0, 1)
) -> LoRAModel:
    """One rank's part of an adapter, cut as `load_stage` cuts the weights. `tp`, `pp`: (rank, ranks); `config` is the
    whole model's. Layers are counted from the stage's first.

    Where the outputs of a layer are divided, all ranks have A and each has its rows of B. Where the inputs are, each
    has its columns of A and all have B, and its product joins the partial sums before the all-reduce:
    Σ_r (x_r A_rᵀ) Bᵀ = (x Aᵀ) Bᵀ. No collective more. (vLLM's `fully_sharded_loras` cuts the other matrix, too, for a
    collective more.)

    Shapes: qkv_proj, gate_up_proj: A [r, in], B [out/n, r]; o_proj, down_proj: A [r, in/n], B [out, r].
    """
    start, end = get_pp_indices(config.num_hidden_layers, *pp)
    kv = config.num_key_value_heads
    heads = {"qkv_proj": (config.num_attention_heads, kv, kv)}

    def cut(kind: str, i: int, pair: Pair) -> Pair:
        a, b = pair
        if kind in ("o_proj", "down_proj"):
            return RowParallelLinear.shard(a, *tp), b
        if kind in heads:
            return a, QKVParallelLinear.shard(b, *tp, heads[kind][i])
        return a, ColumnParallelLinear.shard(b, *tp)

    weights: dict[str, Slices] = {}
    for name, pairs in lora.weights.items():
        _, layer, kind = name.split(".")
        if start <= int(layer) < end:
            part = tuple(pair and cut(kind, i, pair) for i, pair in enumerate(pairs))
            weights[f"layers.{int(layer) - start}.{kind}"] = part
    return LoRAModel(lora.name, lora.rank, weights)


class WorkerAdapters:
    """Where a runner in the engine's process has the manager: decides nothing, and knows which slot is whose."""

    def __init__(self, config: LoRAConfig) -> None:
        self.config, self.slots = config, {}
        self.meta: Any = None  # of the step that runs

    def attach(self, model: llama.Llama, cache: Any) -> None:
        part, ranks = copy.copy(model), model.config.num_attention_heads // model.num_heads
        part.config = shard_config(model.config, ranks)  # layers as narrow as this rank has them
        self.memory = SlotMemory(part, self.config.max_loras, self.config.max_lora_rank)

    def write(self, slot: int, lora: LoRAModel) -> None:
        """This rank's part of an adapter, into a slot."""
        self.memory.write(slot, lora)
        self.slots[lora.name] = slot

    def clear(self, slot: int) -> None:
        """Nobody has this slot any more."""
        self.memory.clear(slot)
        self.slots = {name: taken for name, taken in self.slots.items() if taken != slot}


class RemoteSlotMemory:
    """Stands where a `LoRAModelManager` has its memory: the slots are with the workers, and nobody waits for them.

    What goes into a slot travels as a call between two steps. Workers take calls in order, so a step in flight finds
    the slot as it was when the step was decided.
    """

    def __init__(self, executor: Executor, dtype: torch.dtype) -> None:
        self.executor, self.dtype = executor, dtype

    def write(self, slot: int, lora: LoRAModel) -> None:
        """Have every worker copy its part into the slot."""

        def own(pair: Pair) -> Pair:
            return pair[0].clone(), pair[1].clone()  # no larger tensor's views

        weights = {name: tuple(pair and own(pair) for pair in pairs) for name, pairs in lora.weights.items()}
        self.executor.submit("write_adapter", slot, dataclasses.replace(lora, weights=weights))

    def clear(self, slot: int) -> None:
        """Have every worker give the slot up."""
        self.executor.submit("clear_adapter", slot)

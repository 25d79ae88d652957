"""122 · Adapters on workers: what lesson 12 adds to lesson 06c. One decides who is resident, every rank holds a part.

A LoRA layer is cut as its base is (lesson 05c). Where the outputs are divided, all ranks have A and each has its rows
of B; where the inputs are divided, each has its columns of A and all have B, and its product joins the partial sums
before the all-reduce: Σ_r (x_r A_rᵀ) Bᵀ = (x Aᵀ) Bᵀ. No collective more. A pipeline stage has the layers that it has.

The engine core keeps names, files, slots and LRU. What goes into a slot travels as a call between two steps: workers
take calls in order, so a step in flight finds the slot as it was when the step was decided.

Read for this: vLLM 0.32 `lora/layers/column_parallel_linear.py`, `row_parallel_linear.py`, `lora/worker_manager.py`
(there, every worker reads the file itself; `fully_sharded_loras` cuts the other matrix as well, for a collective more).
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import llama

tensor_parallel = common.lesson("05c_tensor_parallel")
from engine.parallel import executors

adapters = common.lesson("120_adapters")
LoRAConfig, LoRAModel, SlotMemory = adapters.LoRAConfig, adapters.LoRAModel, adapters.SlotMemory


def shard_adapter(lora: LoRAModel, config: llama.LlamaConfig, tp: tuple[int, int] = (0, 1),
                  pp: tuple[int, int] = (0, 1)) -> LoRAModel:  # fmt: skip
    """One rank's part of an adapter, as `load_stage` cuts the weights. `tp`, `pp`: (rank, ranks); `config` is the whole
    model's. Layers are counted from the stage's first.

    Shapes: qkv_proj, gate_up_proj: A [r, in], B [out/n, r]; o_proj, down_proj: A [r, in/n], B [out, r].
    """
    start, end = executors.get_pp_indices(config.num_hidden_layers, *pp)
    kv = config.num_key_value_heads
    heads = {"qkv_proj": (config.num_attention_heads, kv, kv)}
    weights = {}
    for name, pairs in lora.weights.items():
        _, layer, kind = name.split(".")
        if not start <= int(layer) < end:
            continue
        part = []
        for i, pair in enumerate(pairs):
            if pair is not None and kind in ("o_proj", "down_proj"):
                pair = tensor_parallel.RowParallelLinear.shard(pair[0], *tp), pair[1]
            elif pair is not None and kind in heads:
                pair = pair[0], tensor_parallel.QKVParallelLinear.shard(pair[1], *tp, heads[kind][i])
            elif pair is not None:
                pair = pair[0], tensor_parallel.ColumnParallelLinear.shard(pair[1], *tp)
            part.append(pair)
        weights[f"layers.{int(layer) - start}.{kind}"] = tuple(part)
    return LoRAModel(lora.name, lora.rank, weights)


# --- In a worker ------------------------------------------------------------------------------------------------------


class WorkerAdapters:
    """Stands where lesson 12's runner has its manager: it decides nothing, and knows which slot is whose."""

    def __init__(self, config: LoRAConfig) -> None:
        self.config, self.slots = config, {}
        self.meta: Any = None  # of the step that runs

    def attach(self, model: llama.Llama, cache: Any, block_pool: Any) -> None:
        part, ranks = copy.copy(model), model.config.num_attention_heads // model.num_heads
        part.config = tensor_parallel.shard_config(model.config, ranks)  # layers as narrow as this rank has them
        self.memory = SlotMemory(part, self.config.max_loras, self.config.max_lora_rank)


def write_adapter(worker: executors.Worker, slot: int, lora: LoRAModel) -> None:
    """Called on every worker: keep this rank's part of what is in a slot now."""
    mine, groups = worker.runner.lora, ((group.rank_in_group, group.world_size) for group in (worker.tp, worker.pp))
    mine.memory.write(slot, shard_adapter(lora, worker.model.whole_config, *groups))
    mine.slots[lora.name] = slot


def clear_adapter(worker: executors.Worker, slot: int) -> None:
    """Called on every worker: nobody has this slot any more."""
    mine = worker.runner.lora
    mine.memory.clear(slot)
    mine.slots = {name: taken for name, taken in mine.slots.items() if taken != slot}


# --- In the engine core -----------------------------------------------------------------------------------------------


class RemoteSlotMemory:
    """Stands where a `LoRAModelManager` has its memory: the slots are with the workers, and nobody waits for them."""

    def __init__(self, executor: executors.Executor, dtype: torch.dtype) -> None:
        self.executor, self.model = executor, SimpleNamespace(dtype=dtype)

    def write(self, slot: int, lora: LoRAModel) -> None:
        weights = {name: tuple(pair and tuple(x.clone() for x in pair) for pair in pairs)  # no larger tensor's views
                   for name, pairs in lora.weights.items()}  # fmt: skip
        self.executor.submit(write_adapter, slot, dataclasses.replace(lora, weights=weights))

    def clear(self, slot: int) -> None:
        self.executor.submit(clear_adapter, slot)


def remote_lora_runner(make_runner: Callable[..., Any], manager: adapters.LoRAModelManager) -> Callable[..., Any]:
    """Lesson 12's `lora_runner` for an engine whose runners are with workers. Raises InputError."""
    if manager.config.memory != "slots":
        raise common.InputError(f"memory {manager.config.memory!r}: workers have slots")

    def make(model: llama.Llama, scheduler: Any, seed: int) -> Any:
        runner = make_runner(model, scheduler, seed)
        manager.model_config, manager.block_pool = model.whole_config, scheduler.kv_cache_manager.block_pool
        manager.memory = RemoteSlotMemory(runner.executor, model.dtype)
        return runner

    return make

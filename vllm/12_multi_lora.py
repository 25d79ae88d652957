"""12 · Multi-LoRA: one model, a thousand adapters, one batch.

The question: every customer has a fine-tuned model of their own. A GPU for each is absurd, and so is swapping weights
between requests. Can rows of one batch, in one forward pass, each be computed by a different fine-tuned model?

The mechanism:
  1. A LoRA adapter is y = x Wᵀ + (x Aᵀ) Bᵀ with A, B thin. The large product is the same for everybody: do it once for
     the whole batch, and add each row's small one.
  2. The small products read few rows of x and many adapters' weights, so they are memory-bound: what counts is that
     every adapter in the batch is read once. Rows are sorted by adapter and cut into tiles of one adapter each (SGMV);
     where nobody shares, a program per row needs no tile (BGMV).
  3. Weights are found through a table with an address per row of A and B. So ranks can differ within a batch, a slice
     of a packed layer may have no adapter, and adapters may lie in slots of equal size or in pages of the KV cache.
  4. `max_loras` adapters are resident; the least recently used one leaves. A request whose adapter has no place in
     this step waits, and those behind it go ahead.
  5. An adapter changes keys and values, so it is part of a block's key in the prefix cache. Forget it, and one tenant
     reads another's memory.
engine/lora/ holds PEFT's file format, the memory and its LRU, lab/adapter_training.py trains three adapters.

Numbers to remember: 8 slots in turn serve 8 adapters with 1 % misses, and 9 adapters with 100 %. An adapter of rank
8 on all layers has 1.8 % of this model's weights; one of rank 64 in the house makes every slot eight times as large.
Rank 16 adds 15 µs to 64 rows of a 4096 → 4096 layer that takes 18 on an H200 if all share, 25 if nobody does.

How to run:
  uv run python vllm/12_multi_lora.py                      the whole story
  uv run python vllm/12_multi_lora.py --break cache-key    break it: one tenant reads what another one's model cached
  uv run python vllm/12_multi_lora.py --break merge        break it: one adapter in W, which all rows pass through
  uv run python vllm/12_multi_lora.py --max-loras 1        one adapter per step: the same answers, more steps
  uv run python vllm/12_multi_lora.py --bench              minutes: popularity, number of adapters, slots
  uv run python vllm/12_multi_lora.py --train pirate       2 minutes: an adapter of your own

Read for this: Hu et al. 2021 (LoRA), Chen et al. 2023 (Punica), Sheng et al. 2023 (S-LoRA), Sheng et al. 2024 (VTC),
vLLM 0.32 `lora/ops/triton_ops/`, `lora/worker_manager.py`, `lora/model_manager.py`, `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import tl, triton

from engine import arguments
from lab import cli
from lab import figures
from lab import recorded
from lab import timing
from lab.parameters import checked
from engine.model import folders, llama, loader
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.output import SchedulerOutput
from engine.request import Request
from engine.request import SamplingParams
from engine.llm import LLM
from engine.llm_engine import LLMEngine
from engine.config import SchedulerConfig, VllmConfig
from engine import registry
from engine.core.block_pool import BlockPool
from engine.core.scheduler import make_scheduler
from engine.lora import files, lora_model
from engine.lora.config import LoRAConfig, LoRARequest
from engine.lora.layers import NONE, LoRAKernelMeta
from engine.lora.lora_model import LayerShape, LoRAModel
from engine.lora.manager import LoRAModelManager
from engine.lora.memory import LoRATables, SlotMemory, UnifiedMemory
from lab import naive
from lab.dry_run import DryRun

KEY = "12_multi_lora"

# --- What we want, without cleverness ---------------------------------------------------------------------------------


def add_lora_reference(y: torch.Tensor, x: torch.Tensor, of_row: Sequence[Any],
                       shape: LayerShape) -> torch.Tensor:  # fmt: skip
    """y + (x Aᵀ) Bᵀ row by row, slice by slice, in fp64. x [T, in], y [T, Σ out]; of_row[t]: its adapter's A and B of
    each slice, or None."""
    out = y.double().clone()
    for t, slices in enumerate(of_row):
        start = 0
        for width, pair in zip(shape.slices, slices or ()):
            if pair is not None:
                a, b = (weight.double().to(x.device) for weight in pair)
                out[t, start : start + width] += b @ (a @ x[t].double())
            start += width
    return out


# --- 1. The kernels: shrink, then expand --------------------------------------------------------------------------
#
#     shrink   h[i, t] = A_i x[t]              [in] -> [rank]     for each slice i of the layer, A of t's own adapter
#     expand   y[t, slice i] += h[i, t] B_iᵀ   [rank] -> [out_i]
#
# h is fp32. Several programs share a long `in` and leave partial sums, which expand adds up as it loads: no atomics.


@triton.jit
def lora_rows(pages, rows, r, rank, k, live, ALIGNED: tl.constexpr):
    """Rows r of a matrix, columns k, through the table: [len(r), len(k)], 0 where there is none."""
    row = tl.load(rows + r, mask=r < rank, other=0)
    if ALIGNED:
        row = tl.multiple_of(row, [16])
    return tl.load(pages + row[:, None] + k[None, :], mask=(r < rank)[:, None] & live[None, :], other=0.0)


@common.kernel
def bgmv_shrink_kernel(x, pages, rows, ranks, order, tiles, h, num_rows: tl.int32, stride_x,
                       K: tl.constexpr, SLICES: tl.constexpr, MAX_RANK: tl.constexpr, RANK_TILE: tl.constexpr,
                       TILE_K: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    n, i, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + 3 * n + 2)
    t = tl.load(order + n)
    rank = tl.load(ranks + slot * SLICES + i)
    k = split * TILE_K + tl.arange(0, TILE_K)
    value = tl.load(x + t * stride_x + k, mask=k < K, other=0.0)
    h += ((split * SLICES + i) * num_rows + n) * MAX_RANK
    for first in range(0, rank, RANK_TILE):
        r = first + tl.arange(0, RANK_TILE)
        a = lora_rows(pages, rows + (slot * SLICES + i) * MAX_RANK, r, rank, k, k < K, ALIGNED)
        tl.store(h + r, tl.sum(a.to(tl.float32) * value.to(tl.float32)[None, :], 1), mask=r < rank)


@common.kernel
def bgmv_expand_kernel(h, pages, rows, ranks, starts, order, tiles, y, num_rows: tl.int32, stride_y,
                       SLICES: tl.constexpr, MAX_RANK: tl.constexpr, RANK_TILE: tl.constexpr, TILE_N: tl.constexpr,
                       SPLITS: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    n, i = tl.program_id(0), tl.program_id(1)
    UNIT: tl.constexpr = 16 if ALIGNED else 1  # 16 neighbours are all in the slice or all out: they load together
    start = tl.multiple_of(tl.load(starts + i), UNIT)
    width = tl.multiple_of(tl.load(starts + i + 1), UNIT) - start
    c = tl.program_id(2) * TILE_N + tl.arange(0, TILE_N)
    slot = tl.load(tiles + 3 * n + 2)
    t = tl.load(order + n)
    rank = tl.load(ranks + slot * SLICES + i)
    if rank == 0 or tl.program_id(2) * TILE_N >= width:  # a slice without an adapter, or narrower than others
        return
    acc = tl.zeros([TILE_N], tl.float32)
    for first in range(0, rank, RANK_TILE):
        r = first + tl.arange(0, RANK_TILE)
        thin = tl.zeros([RANK_TILE], tl.float32)
        for split in range(SPLITS):
            thin += tl.load(h + ((split * SLICES + i) * num_rows + n) * MAX_RANK + r, mask=r < rank, other=0.0)
        b = lora_rows(pages, rows + (slot * SLICES + i) * MAX_RANK, r, rank, c, c < width, ALIGNED)
        acc += tl.sum(thin[:, None] * b.to(tl.float32), 0)
    place = y + t * stride_y + start + c
    live = c < width
    tl.store(place, (tl.load(place, mask=live, other=0.0).to(tl.float32) + acc).to(y.dtype.element_ty), mask=live)


@common.kernel
def sgmv_shrink_kernel(x, pages, rows, ranks, order, tiles, h, num_rows: tl.int32, stride_x,
                       K: tl.constexpr, SLICES: tl.constexpr, MAX_RANK: tl.constexpr, RANK_TILE: tl.constexpr,
                       TILE_M: tl.constexpr, TILE_K: tl.constexpr, SPLITS: tl.constexpr, ALIGNED: tl.constexpr,
                       UPCAST: tl.constexpr):  # fmt: skip
    tile, i, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, count, slot = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    m = tl.arange(0, TILE_M)
    t = tl.load(order + first_row + m, mask=m < count, other=0)
    rank = tl.load(ranks + slot * SLICES + i)
    length = tl.cdiv(tl.cdiv(K, TILE_K), SPLITS) * TILE_K
    for first in range(0, rank, RANK_TILE):
        r = first + tl.arange(0, RANK_TILE)
        acc = tl.zeros([TILE_M, RANK_TILE], tl.float32)
        for begin in range(split * length, tl.minimum((split + 1) * length, K), TILE_K):
            k = begin + tl.arange(0, TILE_K)
            a = lora_rows(pages, rows + (slot * SLICES + i) * MAX_RANK, r, rank, k, k < K, ALIGNED)
            live = (m < count)[:, None] & (k < K)[None, :]
            value = tl.load(x + t[:, None] * stride_x + k[None, :], mask=live, other=0.0)  # [TILE_M, TILE_K]
            if UPCAST:  # Triton's interpreter multiplies 16-bit floats wrongly; a GPU wants them as they are
                a, value = a.to(tl.float32), value.to(tl.float32)
            acc = tl.dot(value, a.T, acc, input_precision="ieee")
        place = ((split * SLICES + i) * num_rows + first_row + m)[:, None] * MAX_RANK + r[None, :]
        tl.store(h + place, acc, mask=(m < count)[:, None] & (r < rank)[None, :])


@common.kernel
def sgmv_expand_kernel(h, pages, rows, ranks, starts, order, tiles, y, num_rows: tl.int32, stride_y,
                       SLICES: tl.constexpr, MAX_RANK: tl.constexpr, RANK_TILE: tl.constexpr, TILE_M: tl.constexpr,
                       TILE_N: tl.constexpr, SPLITS: tl.constexpr, ALIGNED: tl.constexpr,
                       UPCAST: tl.constexpr):  # fmt: skip
    tile, i = tl.program_id(0), tl.program_id(1)
    UNIT: tl.constexpr = 16 if ALIGNED else 1  # 16 neighbours are all in the slice or all out: they load together
    start = tl.multiple_of(tl.load(starts + i), UNIT)
    width = tl.multiple_of(tl.load(starts + i + 1), UNIT) - start
    c = tl.program_id(2) * TILE_N + tl.arange(0, TILE_N)
    first_row, count, slot = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    rank = tl.load(ranks + slot * SLICES + i)
    if rank == 0 or tl.program_id(2) * TILE_N >= width:
        return
    m = tl.arange(0, TILE_M)
    t = tl.load(order + first_row + m, mask=m < count, other=0)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, rank, RANK_TILE):
        r = first + tl.arange(0, RANK_TILE)
        thin = tl.zeros([TILE_M, RANK_TILE], tl.float32)
        live = (m < count)[:, None] & (r < MAX_RANK)[None, :]  # whole rows of h: four numbers load together
        for split in range(SPLITS):
            place = ((split * SLICES + i) * num_rows + first_row + m)[:, None] * MAX_RANK + r[None, :]
            thin += tl.load(h + place, mask=live, other=0.0)
        thin = tl.where((r < rank)[None, :], thin, 0.0)  # above its rank nothing was ever written
        b = lora_rows(pages, rows + (slot * SLICES + i) * MAX_RANK, r, rank, c, c < width, ALIGNED)
        if UPCAST:
            b = b.to(tl.float32)
        acc = tl.dot(thin.to(b.dtype), b, acc, input_precision="ieee")
    place = y + t[:, None] * stride_y + start + c[None, :]
    live = (m < count)[:, None] & (c < width)[None, :]
    tl.store(place, (tl.load(place, mask=live, other=0.0).to(tl.float32) + acc).to(y.dtype.element_ty), mask=live)


def bgmv(y: torch.Tensor, x: torch.Tensor, pages: torch.Tensor, tables: LoRATables, meta: LoRAKernelMeta) -> None:
    """A program per row: for batches in which nobody shares an adapter (`meta.distinct`).

    Semantics: y[t, slice i] += (x[t] A_iᵀ) B_iᵀ in place, with A, B of row t's adapter.
    Shapes: x [T, in], y [T, Σ out] (row strides free), pages flat, tables and meta as they say.
    Named after Punica's kernel for the same case; vLLM dropped it in 2025 and sorts always.
    """
    (R, slices), K = _ranks(tables), tables.shape.in_features
    splits = triton.cdiv(K, 256)  # a tile each: where there is no dot, Triton loads no tile ahead of its loop
    h = torch.empty(splits, slices, len(meta.order), R, dtype=torch.float32, device=x.device)
    shared = dict(SLICES=slices, MAX_RANK=R, RANK_TILE=16, ALIGNED=tables.aligned, num_warps=4)
    bgmv_shrink_kernel[(len(meta.order), slices, splits)](
        x, pages, tables.a_rows, tables.ranks, meta.order, meta.tiles, h, len(meta.order), x.stride(0),
        K=K, TILE_K=256, **shared,
    )  # fmt: skip
    bgmv_expand_kernel[(len(meta.order), slices, triton.cdiv(max(tables.shape.slices), 256))](
        h, pages, tables.b_rows, tables.ranks, tables.starts, meta.order, meta.tiles, y, len(meta.order), y.stride(0),
        TILE_N=256, SPLITS=splits, **shared,
    )  # fmt: skip


def sgmv(y: torch.Tensor, x: torch.Tensor, pages: torch.Tensor, tables: LoRATables, meta: LoRAKernelMeta) -> None:
    """A program per tile of rows with one adapter: its weights are read once for all of them, by tensor cores.

    Semantics: y[t, slice i] += (x[t] A_iᵀ) B_iᵀ in place, with A, B of row t's adapter.
    Shapes: x [T, in], y [T, Σ out] (row strides free), pages flat, tables and meta as they say.
    vLLM 0.32: lora/ops/triton_ops/lora_shrink_op.py and lora_expand_op.py.
    """
    R, slices = _ranks(tables)
    wide, half = meta.tile_m > 16, x.element_size() == 2  # fp32 operands fill the registers sooner
    rank_tile = max(16, min(64, triton.next_power_of_2(R))) if half else 16
    splits = _splits(len(meta.tiles) * slices, tables.shape.in_features)
    h = torch.empty(splits, slices, len(meta.order), R, dtype=torch.float32, device=x.device)
    shared = dict(SLICES=slices, MAX_RANK=R, RANK_TILE=rank_tile, TILE_M=meta.tile_m, SPLITS=splits,
                  ALIGNED=tables.aligned, UPCAST=common.INTERPRET, num_warps=8 if wide else 4)  # fmt: skip
    sgmv_shrink_kernel[(len(meta.tiles), slices, splits)](
        x, pages, tables.a_rows, tables.ranks, meta.order, meta.tiles, h, len(meta.order), x.stride(0),
        K=tables.shape.in_features, TILE_K=(64 if wide else 128) if half else 32, **shared,
    )  # fmt: skip
    tile_n = (64 if wide else 128) if half else 32
    sgmv_expand_kernel[(len(meta.tiles), slices, triton.cdiv(max(tables.shape.slices), tile_n))](
        h, pages, tables.b_rows, tables.ranks, tables.starts, meta.order, meta.tiles, y, len(meta.order), y.stride(0),
        TILE_N=tile_n, **shared,
    )  # fmt: skip


def _ranks(tables: LoRATables) -> tuple[int, int]:
    """(largest rank a slot can hold, slices)."""
    return tables.a_rows.shape[2], tables.a_rows.shape[1]


def _splits(programs: int, K: int) -> int:
    """How many programs share a row's inputs: enough for a GPU's 132 processors twice, at least 256 inputs each."""
    return max(1, min(triton.cdiv(K, 256), 264 // max(1, programs), 16))


def example_launches(dtype: torch.dtype) -> None:
    """Every kernel at the shapes of SmolLM2 and of an 8B Llama, on meta tensors: decoding in slots of 16, prompts in
    slots of 64."""
    empty, device = functools.partial(torch.empty, device="meta"), torch.device("meta")
    small, qkv = LayerShape(576, (576, 192, 192)), LayerShape(4096, (4096, 1024, 1024))
    down = LayerShape(14336, (4096,))
    decode, prompt = (16, 32, 16), (64, 2048, 64)  # largest rank, tokens, rows in a tile
    for kernel, shape, (max_rank, tokens, tile_m) in (
        (sgmv, small, decode), (sgmv, qkv, decode), (sgmv, qkv, prompt), (sgmv, down, decode), (sgmv, down, prompt),
        (bgmv, small, decode), (bgmv, down, decode),
    ):  # fmt: skip
        tables = LoRATables.empty(shape, 8, max_rank, device)
        x, y = empty(tokens, shape.in_features, dtype=dtype), empty(tokens, sum(shape.slices), dtype=dtype)
        order, tiles = empty(tokens, dtype=torch.int64), empty(tokens if kernel is bgmv else 8, 3, dtype=torch.int32)
        kernel(y, x, empty(1 << 20, dtype=dtype), tables, LoRAKernelMeta(order, tiles, [], tile_m, False))


def add_lora(y: torch.Tensor, x: torch.Tensor, memory: SlotMemory | UnifiedMemory, layer: int, kind: str,
             meta: LoRAKernelMeta) -> torch.Tensor:  # fmt: skip
    """What the adapters of the batch add to one layer's output, in place. x [T, in], y [T, Σ out]."""
    if common.runs_kernel(x):
        (bgmv if meta.distinct else sgmv)(y, x, memory.pages[layer], memory.tables[kind], meta)
        return y
    # On a CPU, launching costs next to nothing: two small products for each adapter, on views of its weights.
    rows = x if meta.in_place else x.index_select(0, meta.order)
    added = y if meta.in_place else y.new_zeros(len(rows), y.shape[1])
    for slot, start, stop in meta.segments:
        if (found := memory.layer(slot, layer, kind)) is None:
            continue
        a, slices = found
        thin = rows[start:stop] @ a.T  # [m, slices · rank]
        for h, (first, last, b) in zip(thin.chunk(len(slices), dim=1), slices):
            added[start:stop, first:last].addmm_(h, b)
    return y if meta.in_place else y.index_add_(0, meta.order, added)


# --- 2. An engine with adapters --------------------------------------------------------------------------------------


def make_llm(model: llama.Llama, tokenizer: Tokenizer, config: LoRAConfig, **engine_args: Any) -> LLM:
    """An `LLM` on the engine, with adapters."""
    return LLM.from_engine(LLMEngine(model, tokenizer, config=VllmConfig(lora_config=config), **engine_args))


# --- The simulation behind the widget -------------------------------------------------------------------------------

TRAFFIC = ("round robin", "bursts of 4", "Zipf")
WIDGET_DEFAULT: dict[str, Any] = {
    "adapters": 9, "max_loras": 8, "traffic": "round robin", "batch": 1, "ranks": "all 8", "sort": True,
}  # fmt: skip
WIDGET_CHOICES = {
    "adapters": (1, 2, 4, 7, 8, 9, 12, 16), "max_loras": (1, 2, 4, 8), "traffic": TRAFFIC, "batch": (1, 4, 8),
    "ranks": ("all 8", "one 64"), "sort": (True, False),
}  # fmt: skip
REQUESTS, TOKENS = 48, 2  # in the simulation: requests, output tokens of each


def sequence(traffic: str, adapters: int, count: int) -> list[int]:
    """The adapter of each request. Zipf: adapter k with weight 1/(k + 1), drawn by a generator of 31 bits."""
    if traffic != "Zipf":
        return [(i if traffic == "round robin" else i // 4) % adapters for i in range(count)]
    edges, state, found = np.cumsum([1_000_000 // (k + 1) for k in range(adapters)]), 12345, []
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2**31
        found.append(int(np.searchsorted(edges, state // 64 * int(edges[-1]) // 2**25, side="right")))
    return found


class NoMemory:
    """Slots without weights: what a simulation needs."""

    def write(self, slot: int, lora: LoRAModel) -> None: ...

    def clear(self, slot: int) -> None: ...


class Rows(DryRun):
    """The loop without a model, and who was in its last step."""

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        self.batch = [*map(int, output.num_scheduled_tokens)]
        return super().execute_model(output)


def dry_core(max_loras: int, seats: int, ranks: Sequence[int], fair: bool = False) -> Rows:
    """The engine's scheduler with adapters, without a model. Adapter k has rank ranks[k]."""
    manager = LoRAModelManager(LoRAConfig(max_loras, max(ranks), max(max_loras, len(ranks)), fair=fair))
    manager.memory, manager.block_pool = NoMemory(), BlockPool(2)
    for k, rank in enumerate(ranks):
        manager.add_adapter(str(k), LoRAModel(str(k), rank, {}))
    config = SchedulerConfig(max_model_len=64, max_num_seqs=seats, max_num_batched_tokens=4096)
    core = Rows(make_scheduler(config, 1 + 4 * seats, 16, False, adapters=manager))
    core.lora = manager
    return core


def dry_request(i: int, adapter: int, tokens: int = TOKENS) -> Request:
    """Request `i` of one prompt token, for the adapter of that number."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return Request(str(i), [0], params, arrival_time=i, lora_name=str(adapter))


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Who is resident, who waits for a slot, and what a step's rows look like to the kernels, from the real scheduler
    and the real caches. Raises InputError."""
    p = checked(params, WIDGET_CHOICES)
    ranks = [64 if k == 0 and p["ranks"] == "one 64" else 8 for k in range(p["adapters"])]
    core = dry_core(p["max_loras"], p["batch"], ranks)
    manager, scheduler, steps = core.lora, core.scheduler, []
    of = sequence(p["traffic"], p["adapters"], REQUESTS)
    for i, adapter in enumerate(of):
        core.add_request(dry_request(i, adapter))
    while scheduler.has_unfinished_requests():
        before = dict(manager.slots)
        core.step()
        rows = [[i, of[i]] for i in core.batch]
        meta = LoRAKernelMeta.build([manager.slots[str(k)] for _, k in rows], torch.device("cpu"), p["sort"])
        name_of = {slot: int(name) for name, slot in manager.slots.items()}
        steps.append({
            "rows": rows, "tiles": [[name_of[slot], count] for _, count, slot in meta.tiles.tolist()],
            "slots": [name_of.get(slot, NONE) for slot in range(p["max_loras"])], "lru": [*map(int, manager.slots)],
            "loaded": [int(name) for name, slot in manager.slots.items() if before.get(name) != slot],
            "passed_over": [*map(int, scheduler.waiting_for_adapter)], "waiting": len(scheduler.waiting),
        })  # fmt: skip
    kib = 2 * max(ranks) * PER_RANK // 1024
    used = 2 * sum(ranks[k] for k in steps[-1]["lru"]) * PER_RANK // 1024
    return {"params": p, "ranks": ranks, "adapter_of": of, "steps": steps, "requests": REQUESTS,
            "loads": manager.counts["load"], "slot_kib": kib, "reserved_kib": kib * p["max_loras"], "used_kib": used,
            "weight_reads": sum(len(step["tiles"]) for step in steps)}  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state under the widget, as text."""
    p, steps = trace["params"], trace["steps"]
    letter = lambda k: "·" if k == NONE else chr(65 + k)  # noqa: E731
    lines = [
        f"{p['adapters']} adapters, {p['max_loras']} slots, {p['traffic']}, {p['batch']} per batch: {len(steps)} steps",
        f"{trace['requests']} requests, {trace['loads']} adapter loads",
        f"one slot {trace['slot_kib']:,} KiB, all {trace['reserved_kib']:,} KiB, in use {trace['used_kib']:,} KiB",
        f"adapters read by the kernels, summed over steps: {trace['weight_reads']}",
    ]
    for i, step in enumerate(steps[:8]):
        rows, tiles = "".join(letter(k) for _, k in step["rows"]), " ".join(f"{letter(k)}{n}" for k, n in step["tiles"])
        loaded = f", loads {''.join(map(letter, step['loaded']))}" if step["loaded"] else ""
        passed = f", {len(step['passed_over'])} passed over" if step["passed_over"] else ""
        lines.append(f"step {i}: rows {rows} as {tiles}, slots {''.join(map(letter, step['slots']))}{loaded}{passed}")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

SMOLLM = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
              num_key_value_heads=3, head_dim=64, vocab_size=49152)  # fmt: skip
LLAMA_8B = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                num_key_value_heads=8, head_dim=128, vocab_size=128256)  # fmt: skip
POPULARITY = ("identical", "Zipf 1.5", "uniform", "distinct")
# Chen et al. 2023, Figure 8 and text: one operator, rank 16, A100 80GB, µs at batch 1 and 64. Their "Zipf-1.5" is
# geometric: each adapter has 1.5 times the rows of the next, so 64 rows have 9 adapters, and as uniform ones take 46.
PUNICA = {"identical": (37, 40), "Zipf 1.5": ("", ""), "uniform": (37, 46), "distinct": (37, 116)}


def parameters_per_rank(config: LlamaConfig) -> int:
    """What one rank costs on all linear layers: Σ over modules of (in + out), times layers."""
    shapes = lora_model.layer_shapes(config).values()
    return config.num_hidden_layers * sum(s.in_features * len(s.slices) + sum(s.slices) for s in shapes)


PER_RANK = parameters_per_rank(LlamaConfig(**SMOLLM))  # times the bytes of a number


def popularity(kind: str, rows: int, seed: int = 0) -> list[int]:
    """The adapter of each row of a batch. As in Punica's benchmarks, uniform is over ⌈√rows⌉ adapters."""
    rng = random.Random(seed)
    if kind == "identical":
        return [0] * rows
    if kind == "distinct":
        return list(range(rows))
    if kind == "uniform":
        count = int(np.ceil(rows**0.5))
        return rng.sample([i % count for i in range(rows)], rows)
    return rng.choices(range(rows), [1 / (k + 1) ** 1.5 for k in range(rows)], k=rows)


def hit_rate(traffic: str, num_adapters: int, slots: int = 8, count: int = 720) -> float:
    """Share of requests, one at a time, whose adapter is resident."""
    core = dry_core(slots, 1, [8] * num_adapters)
    for adapter in sequence(traffic, num_adapters, count):
        core.lora.make_resident(str(adapter), set())
    return core.lora.counts["hit"] / count


def fairness(fair: bool) -> dict[str, float]:
    """A tenant with 64 requests, and one with 4 that come later; 4 seats, 8 tokens each. Mean wait in steps."""
    core = dry_core(2, 4, [8, 8], fair)
    arrivals = {**dict.fromkeys(range(64), 0), **{64 + i: 4 for i in range(4)}}
    first, step = {}, 0
    while core.scheduler.has_unfinished_requests() or step <= 4:
        for i in [i for i, at in arrivals.items() if at == step]:
            core.add_request(dry_request(i, 0 if i < 64 else 1, 8))
        core.step()
        for i in core.batch:
            first.setdefault(i, step)
        step += 1
    mean = lambda ids: sum(first[i] - arrivals[i] for i in ids) / len(ids)  # noqa: E731
    return {"heavy": mean(range(64)), "light": mean(range(64, 68)), "steps": step}


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    small, large = LlamaConfig(**SMOLLM), LlamaConfig(**LLAMA_8B)
    per_rank = {name: parameters_per_rank(config) for name, config in (("small", small), ("large", large))}
    weights = sum(int(np.prod(shape)) for shape in llama.tensor_shapes(small).values())
    cpu = torch.device("cpu")
    groups = {}
    for kind in POPULARITY:
        slots = popularity(kind, 64)
        by_sort = {sort: len(LoRAKernelMeta.build(slots, cpu, sort).tiles) for sort in (True, False)}
        groups[kind.split()[0]] = {"adapters": len(set(slots)), "tiles": by_sort[True], "unsorted": by_sort[False],
                                   "mib": len(set(slots)) * 16 * 2 * 4096 * 2 / 2**20}  # fmt: skip
    model = llama.Llama.__new__(llama.Llama)  # shapes alone
    model.config, model.device, model.dtype = small, torch.device("meta"), torch.float32
    kv = torch.empty(2, 1024, 16, 3, 64, device="meta")
    unified = UnifiedMemory(model, 1, 64, type("Cache", (), {"layers": [kv]}))
    pages = {r: -(-sum(-(-rows // (unified.page // width)) for kind in unified.shapes for rows, width in
                       _matrix_sizes(unified.shapes[kind], r)) // 2) for r in (8, 16, 64)}  # fmt: skip
    block = kv[:, 0].numel() * small.num_hidden_layers
    default = simulate(WIDGET_DEFAULT)
    return {
        "parameters_r8": 8 * per_rank["small"], "share_r8": 8 * per_rank["small"] / weights,
        "mb_fp16_r8": 16 * per_rank["small"] / 1e6, "llama_8b_mb_r16": 32 * per_rank["large"] / 1e6,
        "slot_mb": {str(r): 4 * r * per_rank["small"] / 1e6 for r in (8, 16, 64)},
        "eight_slots_mb": {str(r): 32 * r * per_rank["small"] / 1e6 for r in (8, 64)},
        "blocks": {str(r): n for r, n in pages.items()}, "blocks_ideal_r8": 8 * per_rank["small"] / block,
        "blocks_tokens_r8": 16 * pages[8], "block_kib": 4 * block / 1024,
        "hits": {f"{traffic.split()[0]}_{n}": hit_rate(traffic, n) for traffic in ("round robin", "Zipf")
                 for n in (8, 9, 16, 64)},
        "groups": groups, "fair": {"fcfs": fairness(False), "vtc": fairness(True)},
        "widget": {"loads": default["loads"], "requests": default["requests"]},
        "default": {name: getattr(LoRAConfig(), name) for name in ("max_loras", "max_lora_rank")},
    }  # fmt: skip


def _matrix_sizes(shape: LayerShape, rank: int) -> list[tuple[int, int]]:
    """(rows, width) of A of all slices, and of each slice's Bᵀ."""
    return [(rank * len(shape.slices), shape.in_features), *((rank, width) for width in shape.slices)]


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """One batch on its way through a layer, and what one adapter too many does to a cache."""
    return [_draw_batch(folder), _draw_hits(folder)]


def _draw_batch(folder: str | Path) -> Path:
    figure, ax = figures.new_figure(8.0, 3.7)
    rows, c = [0, 1, NONE, 0, 2, 1, NONE, 0], figures.COLORS
    colors, names = [c["orange"], c["blue"], c["green"], c["grey"]], ["A", "B", "C", "–"]
    meta = LoRAKernelMeta.build(rows, torch.device("cpu"))
    for t, slot in enumerate(rows):
        ax.add_patch(_box(0.0, -t, 1.6, 0.8, colors[slot], 0.85))
        ax.text(0.8, -t + 0.4, f"row {t}: {names[slot]}", ha="center", va="center", color="white", weight="bold")
    ax.add_patch(_box(2.7, -7, 1.5, 7.8, c["light"], 1.0))
    ax.text(3.45, -3.1, "x Wᵀ\n\nonce,\nfor all rows", ha="center", va="center")
    y, where = 0.0, {}
    for slot, start, stop in meta.segments:
        height = stop - start
        ax.add_patch(_box(5.3, y - height + 0.8, 1.3, height - 0.2, colors[slot], 0.85))
        listed = f"row{'s' * (height > 1)} " + ", ".join(map(str, meta.order[start:stop].tolist()))
        ax.text(5.95, y - height / 2 + 0.7, listed, ha="center", va="center", color="white", fontsize=9)
        rank = {0: 0.5, 1: 0.9, 2: 0.5}[slot]
        for x, width, label in ((7.0, rank, "Aᵀ"), (8.35, 1.1, "Bᵀ")):
            ax.add_patch(_box(x, y - height / 2 + 0.35, width, 0.7, colors[slot], 0.35))
            ax.text(x + width / 2, y - height / 2 + 0.7, label, ha="center", va="center")
        where[slot] = y - height / 2 + 0.7
        y -= height + 0.4
    for t, slot in enumerate(rows):
        if slot != NONE:
            ax.plot([1.65, 2.65], [-t + 0.4] * 2, color=colors[slot], linewidth=1)
            ax.plot([4.25, 5.25], [-t + 0.4, where[slot]], color=colors[slot], linewidth=1)
        else:
            ax.plot([1.65, 2.65], [-t + 0.4] * 2, color=c["grey"], linewidth=1)
    for x, text in ((0.8, "the batch"), (3.45, "the base model"), (5.95, "tiles"), (8.1, "shrink, expand")):
        ax.text(x, 1.15, text, ha="center", weight="bold")
    ax.set(xlim=(-0.2, 9.7), ylim=(-7.3, 1.7), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return figures.save_figure(figure, folder, "12_batch")


def _box(x: float, y: float, width: float, height: float, color: str, alpha: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color, alpha=alpha, linewidth=0)


def _draw_hits(folder: str | Path) -> Path:
    figure, ax = figures.new_figure(8.0, 3.0)
    counts = (4, 7, 8, 9, 10, 12, 16, 32, 64)
    for traffic, color in (("round robin", "red"), ("Zipf", "blue")):
        ax.plot(counts, [100 * hit_rate(traffic, n) for n in counts], "o-", color=figures.COLORS[color], label=traffic)
    ax.axvline(8, color=figures.COLORS["grey"], linewidth=0.8, linestyle=":")
    ax.set(xscale="log", xlabel="adapters asked for", ylabel="found in a slot, %", ylim=(-3, 103), title="8 slots, LRU")
    ax.set_xticks(counts, counts)
    ax.minorticks_off()
    ax.legend()
    return figures.save_figure(figure, folder, "12_slots")


# --- The story --------------------------------------------------------------------------------------------------------

QUESTION = "What is the capital of France?"
BREAKS = ("cache-key", "merge")


def check_kernels(model: llama.Llama) -> None:
    """Ranks 4, 8 and 20 in one batch with rows of no adapter, from slots and from shuffled pages of a KV cache."""
    memory = SlotMemory(model, 3, 20)
    cache = registry.fill("cache.paged")(model, 64, 16)
    unified = UnifiedMemory(model, 3, 20, cache)
    loras = [lora_model.random_adapter(model.config, r, seed=r, targets=targets) for r, targets in
             ((4, lora_model.TARGETS), (8, ("q_proj", "v_proj", "down_proj")), (20, lora_model.TARGETS))]  # fmt: skip
    free = random.Random(0).sample(range(1, 64), 63)
    for slot, lora in enumerate(loras):
        memory.write(slot, lora)
        unified.write(slot, lora, [free.pop() for _ in range(unified.num_blocks_of(lora))])
    shape = memory.shapes["qkv_proj"]
    for name, slots in (("sgmv", [0, 1, NONE, 0, 2, 2, NONE, 0]), ("bgmv", [2, NONE, 0, 1])):
        x = torch.randn(len(slots), shape.in_features, device=model.device)
        y = torch.randn(len(slots), sum(shape.slices), device=model.device)
        meta = LoRAKernelMeta.build(slots, model.device)
        of_row = [None if slot == NONE else loras[slot].weights.get("layers.1.qkv_proj") for slot in slots]
        reference = add_lora_reference(y, x, of_row, shape)
        for where, place in (("slots", memory), ("pages", unified)):
            with common.use_kernels() if common.HAS_TRITON else contextlib.nullcontext():
                out = add_lora(y.clone(), x, place, 1, "qkv_proj", meta)
            common.check(f"{name if common.HAS_TRITON else 'torch'}, weights in {where}", out, reference)
    if not common.HAS_TRITON:
        common.skipped("the Triton kernels", "no Triton wheel here; the check above is of the torch path")


def shipped() -> list[LoRARequest]:
    """The three adapters that were trained for SmolLM2."""
    return [LoRARequest(name, i + 1, str(files.SHIPPED / name)) for i, name in enumerate(("pirate", "json", "report"))]


def ask(llm: LLM, tokenizer: Tokenizer, choices: Sequence[LoRARequest | None], max_tokens: int = 20,
        question: str = QUESTION, base: llama.Llama | None = None) -> list[Any]:  # fmt: skip
    """The same question for each of several models, in one batch."""
    prompt = {"prompt_token_ids": tokenizer.ask(question)}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return [out.outputs[0] for out in llm.generate([prompt] * len(choices), params, lora_request=list(choices))]


def tell_models(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> LLM:
    """Step 2: four models in one batch."""
    base = model
    if args.break_ == "merge":
        base = lora_model.merged(model, files.read_adapter(files.SHIPPED / "pirate", model.config))
        common.say("BROKEN (--break merge): pirate is merged into W, which all rows share")
    config = LoRAConfig(args.max_loras, args.max_lora_rank, max_cpu_loras=max(4, args.max_loras))
    llm = make_llm(base, tokenizer, config, max_model_len=256, max_num_seqs=16, num_gpu_blocks_override=200)
    choices = [None, *shipped()]
    start = time.perf_counter()
    answers = ask(llm, tokenizer, choices)
    seconds = time.perf_counter() - start
    for choice, answer in zip(choices, answers):
        common.say(f"{choice.lora_name if choice else 'base':<7} {answer.text!r}"[:104])
    manager = llm.llm_engine.lora
    common.say(f"{sum(len(a.token_ids) for a in answers)} tokens in {seconds:.2f} s; loads {manager.counts['load']}, "
               f"files read {manager.counts['read']}")  # fmt: skip
    prompt = tokenizer.ask(QUESTION)
    for choice, answer in zip(choices[:2], answers):
        name, alone = "base", model  # no cache, no batch, no adapter code
        if choice:
            name, alone = choice.lora_name, lora_model.merged(model, manager.cpu[choice.lora_name])
        n = len(written := answer.token_ids[:12])  # fewer if the answer ended
        same = naive.generate(alone, prompt, n) == written
        if args.break_ == "merge":
            verdict = "writes what" if same else "does NOT write what"
            common.say(f"{name} {verdict} it writes alone ({n} tokens)")
        else:
            what = "pirate merged into a copy of W, alone" if choice else "the model alone"
            common.check_equal(f"{n} tokens of {name} are those of {what}", same, True)
    return llm


def tell_cache(args: argparse.Namespace, llm: LLM, tokenizer: Tokenizer) -> None:
    """Step 3: what a prefix cache must know about adapters."""
    core, secret = llm.llm_engine.core, "You are the night watch of a harbour. The word of the day is lantern. "
    question = "Which word opens the gate, and why?"
    messages = [{"role": "system", "content": secret}, {"role": "user", "content": question}]
    prompt, pirate = {"prompt_token_ids": tokenizer.converse(messages)}, shipped()[0]
    params, short = (SamplingParams(temperature=0, max_tokens=n) for n in (12, 8))
    found = {}
    with forgotten_adapter(core.scheduler.kv_cache_manager) if args.break_ == "cache-key" else contextlib.nullcontext():
        for name, choice in (("pirate", pirate), ("pirate again", pirate), ("base", None)):
            output = llm.generate([prompt], short if choice else params, lora_request=choice)[0]
            found[name] = output.num_cached_tokens, output.outputs[0].token_ids
            length, text = len(output.prompt_token_ids), output.outputs[0].text
            common.say(f"{name:<13} {output.num_cached_tokens:>2} of {length} prompt tokens cached: {text!r}"[:104])
    fresh = dataclasses.replace(params, skip_reading_prefix_cache=True)
    truth = llm.generate([prompt], fresh)[0].outputs[0].token_ids
    if args.break_ == "cache-key":
        same = "the same" if truth == found["base"][1] else "another"
        common.say(
            f"BROKEN (--break cache-key): base read what pirate's layers computed; recomputed, it writes {same} text"
        )
    else:
        common.check_equal("an adapter finds its own blocks again, and nobody else's", (found["pirate again"][0] > 0,
                           found["base"][0]), (True, 0))  # fmt: skip
        common.check_equal("base writes what it writes without a cache", found["base"][1], truth)


@contextlib.contextmanager
def forgotten_adapter(manager: Any) -> Iterator[None]:
    """The bug: block hashes without the adapter's name."""
    right = manager.update_block_hashes

    def wrong(request: Request) -> None:
        name, request.lora_name = request.lora_name, None
        right(request)
        request.lora_name = name

    manager.update_block_hashes = wrong
    yield
    manager.update_block_hashes = right


def tell_thousand(model: llama.Llama, tokenizer: Tokenizer, args: argparse.Namespace, count: int = 1000,
                  requests: int = 16, tokens: int = 3) -> dict[str, float]:  # fmt: skip
    """Step 4: `count` adapters known, 8 slots, each request its own adapter, from pages of the KV cache."""
    config = LoRAConfig(8, 8, 64, memory="unified")
    llm = make_llm(model, tokenizer, config, max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=160)
    manager, rng = llm.llm_engine.lora, random.Random(args.seed)
    for i in range(count):
        manager.add_lazily(f"a{i}", functools.partial(lora_model.random_adapter, model.config, 2 + i % 3, i, None, 1.0,
                                                      ("q_proj", "v_proj"), model.dtype))  # fmt: skip
    chosen = rng.sample(range(count), requests)
    prompt = {"prompt_token_ids": tokenizer.encode("Once upon a time, in a small village by the sea,")}
    start = time.perf_counter()
    outputs = llm.generate([prompt] * requests, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
                           lora_request=[LoRARequest(f"a{i}") for i in chosen])  # fmt: skip
    seconds = time.perf_counter() - start
    answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    common.say(f"{count} adapters known, {requests} asked for, {manager.counts['load']} loads into 8 slots, "
               f"{manager.counts['evict']} evictions; {len(set(answers))} different answers")  # fmt: skip
    for i in (0, requests - 1):
        alone = lora_model.merged(model, manager.sources[f"a{chosen[i]}"]())
        same = naive.generate(alone, prompt["prompt_token_ids"], tokens)
        common.check_equal(f"adapter {chosen[i]} writes what it writes merged", list(answers[i]), same)
    held = sum(map(len, manager.blocks.values()))
    manager.check()
    common.say(f"8 adapters are resident in {held} KV blocks; the others have none")
    while manager.evict_idle(set()):
        pass
    pool = manager.block_pool
    common.check_equal("evicted, they leave the pool whole", pool.num_free_blocks, pool.num_blocks - 1)
    return {"seconds": seconds, "loads": manager.counts["load"]}


# --- The benchmark ----------------------------------------------------------------------------------------------------


def measure_popularity(batches: Sequence[int], hidden: int, rank: int, seconds: float) -> dict[str, Any]:
    """One layer hidden → hidden: what adapters add to it, by who shares; a loop over requests; the layer itself."""
    config = LlamaConfig(**{**SMOLLM, "hidden_size": hidden, "intermediate_size": 16, "num_hidden_layers": 1,
                                  "num_attention_heads": hidden // 64, "num_key_value_heads": 1})  # fmt: skip
    dtype = torch.bfloat16 if common.HAS_GPU else torch.float32
    model = llama.Llama.__new__(llama.Llama)  # one layer is enough
    model.config, model.device, model.dtype = config, common.device(), dtype
    memory, found = SlotMemory(model, max(batches), rank), {}
    for slot in range(max(batches)):
        memory.write(slot, lora_model.random_adapter(config, rank, slot, targets=("o_proj",), dtype=dtype))
    weight = torch.randn(hidden, hidden, dtype=dtype, device=model.device)
    for rows in batches:
        x = torch.randn(rows, hidden, dtype=dtype, device=model.device)
        y, times = torch.zeros_like(x), {}
        for kind in POPULARITY:
            meta = LoRAKernelMeta.build(popularity(kind, rows), model.device)
            run = functools.partial(add_lora, y, x, memory, 0, "o_proj", meta)
            times[kind.split()[0]] = timing.measure_graph(run, seconds).median * 1e6
        pairs = [memory.layer(slot, 0, "o_proj") for slot in popularity("distinct", rows)]
        times["loop"] = timing.measure_graph(functools.partial(loop_over_requests, y, x, pairs), seconds).median * 1e6
        times["base"] = timing.measure_graph(functools.partial(torch.matmul, x, weight.T), seconds).median * 1e6
        found[str(rows)] = times
    return found


def loop_over_requests(y: torch.Tensor, x: torch.Tensor, pairs: Sequence[Any]) -> None:
    """What a server without batched kernels does: two products per row, each with the row's own adapter."""
    for t, (a, [(_, _, b)]) in enumerate(pairs):
        y[t : t + 1] += x[t : t + 1] @ a.T @ b


def benchmark(model: llama.Llama, tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, Any]:
    """Popularity as in Punica, requests per second by number of adapters as in S-LoRA, memory of two kinds."""
    common.heading("8. Popularity: one layer 4096 → 4096, rank 16")
    bench: dict[str, Any] = {"popularity": measure_popularity((1, 2, 4, 8, 16, 32, 64), 4096, 16, 0.3)}
    kinds, found = [*(kind.split()[0] for kind in POPULARITY), "loop", "base"], bench["popularity"]
    common.table(["µs at batch", *found], [[kind, *(f"{found[b][kind]:,.0f}" for b in found)] for kind in kinds])
    common.heading("9. Throughput by number of adapters: 32 requests, 16 tokens in, 8 out, 8 slots, rank 8")
    rng, rows, bench["throughput"] = random.Random(0), [], {}
    prompts = [{"prompt_token_ids": [rng.randrange(1000, 40000) for _ in range(16)]} for _ in range(32)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    kinds = [(str(n) if n else "no adapters", n, "slots") for n in (0, 1, 5, 8, 100, 1000)]
    for name, count, memory in (*kinds, ("8, pages", 8, "unified")):
        config = LoRAConfig(8, 8, 128, memory=memory)
        llm = make_llm(model, tokenizer, config, max_model_len=128, max_num_seqs=32, num_gpu_blocks_override=700)
        for i in range(count):  # made when they are asked for: that is part of the price of many
            llm.llm_engine.lora.add_lazily(f"a{i}", functools.partial(
                lora_model.random_adapter, model.config, 8, i, dtype=model.dtype))  # fmt: skip
        chosen = [LoRARequest(f"a{rng.randrange(count)}") if count else None for _ in prompts]
        rates = []
        for _ in range(2 if count < 100 else 1):
            start = time.perf_counter()
            llm.generate(prompts, params, lora_request=chosen)
            rates.append(len(prompts) / (time.perf_counter() - start))
        bench["throughput"][name.replace(", ", "_").replace(" ", "_")] = max(rates)
        rows.append([name, f"{max(rates):.2f}", llm.llm_engine.lora.counts["load"]])
    common.table(["adapters", "requests/s", "loads"], rows)
    return bench


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument("--max-loras", type=arguments.number(int, 1, 64), default=4, metavar="N",
                   help="adapters in one step, and slots (default %(default)s; 1 takes turns)")  # fmt: skip
    p.add_argument("--max-lora-rank", type=arguments.number(int, 1, 512), default=8, metavar="R",
                   help="largest rank (default %(default)s; below 8 the adapters are refused)")  # fmt: skip
    p.add_argument("--break", dest="break_", choices=BREAKS, help="a bug to look at")
    p.add_argument("--train", nargs="+", metavar="STYLE", choices=("pirate", "json", "report"),
                   help="train adapters instead, 2 minutes each: pirate, json, report")  # fmt: skip
    p.add_argument("--adapters", type=cli.folder, metavar="DIR", default="adapters",
                   help="where --train saves (default ./%(default)s)")  # fmt: skip
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine = cli.start(args)
    if args.train:
        model, tokenizer = loader.load(args.model)
        from lab import adapter_training

        return adapter_training.train_and_save(model, tokenizer, args.train, Path(args.adapters), common.say)
    for request in shipped():  # a rank that is too low is refused before anything is computed or loaded
        files.read_config(Path(request.lora_path), args.max_lora_rank)
    config, numbers, bench = loader.check_context(args.model, 256), facts(), {}
    with folders.made_for_default():
        files.read_adapter(files.SHIPPED / "pirate", config)
    common.heading("1. The kernels against the naive loop: ranks 4, 8 and 20, rows without adapter, slices without")
    check_kernels(llama.random_model(seed=0))

    common.heading(f"2. Four models in one batch: {QUESTION}")
    model, tokenizer = loader.load(args.model)
    llm = tell_models(args, model, tokenizer)

    common.heading("3. One prompt, two tenants, one prefix cache")
    tell_cache(args, llm, tokenizer)

    common.heading("4. A thousand adapters in one process, their weights in pages of the KV cache")
    bench["thousand"] = tell_thousand(model, tokenizer, args)

    common.heading("5. Slots: simulate(), and 8 of them for 720 requests, one at a time")
    slots = max(n for n in WIDGET_CHOICES["max_loras"] if n <= args.max_loras)
    common.say(describe(simulate(WIDGET_DEFAULT | {"max_loras": slots})))
    names = [8, 9, 16, 64]
    common.table(["found in a slot", *(f"{n} adapters" for n in names)], [
        [traffic, *(f"{numbers['hits'][f'{traffic.split()[0]}_{n}']:.1%}" for n in names)]
        for traffic in ("round robin", "Zipf")
    ])  # fmt: skip
    common.say(
        f"8 slots in fp32: {numbers['eight_slots_mb']['8']:.0f} MB for rank 8, "
        f"{numbers['eight_slots_mb']['64']:.0f} MB if one adapter has rank 64"
    )
    common.say(f"In pages, an adapter takes what it needs: {numbers['blocks']['8']} KV blocks for rank 8, "
               f"{numbers['blocks']['64']} for rank 64")  # fmt: skip

    common.heading("6. Fairness: one tenant sends 64 requests, another one 4 a moment later; mean wait in steps")
    common.table(["queue", "64 requests", "4 requests"], [
        [name, f"{numbers['fair'][key]['heavy']:.1f}", f"{numbers['fair'][key]['light']:.1f}"]
        for name, key in (("first come, first served", "fcfs"), ("least served tenant first", "vtc"))
    ])  # fmt: skip

    common.heading("7. Who shares with whom: 64 rows, one layer 4096 → 4096, rank 16, bf16")
    rows = [[kind, g["adapters"], g["tiles"], g["unsorted"], f"{g['mib']:g} MiB", *PUNICA[kind]]
            for kind in POPULARITY for g in [numbers["groups"][kind.split()[0]]]]  # fmt: skip
    common.table(["", "adapters", "tiles", "unsorted", "weights", "Punica µs, 1 row", "64 rows"], rows)
    if args.bench:
        bench |= benchmark(model, tokenizer, args)
    if args.figure:
        draw(args.figure)
    if args.json:
        recorded.merge_json(args.json, KEY, {"machine": machine, "facts": numbers, "bench": bench})


if __name__ == "__main__":
    cli.run(main)

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
engine/lora/ has PEFT's file format, the memory and the thread that reads; lab/adapter_training.py trains adapters.

Numbers to remember: 8 slots serve 8 adapters in turn with 1 % misses, and 9 adapters with 100 %. An adapter of rank 8
on all layers has 1.8 % of this model's weights; a single one of rank 64 makes every slot eight times as large.
Rank 16 adds 15 µs to 64 rows of a 4096 → 4096 layer that takes 18 on an H200 if all share, 25 if nobody does.

How to run:
  uv run python vllm/12_multi_lora.py                      the whole story
  uv run python vllm/12_multi_lora.py --break cache-key    break it: one tenant reads what another one's model cached
  uv run python vllm/12_multi_lora.py --break merge        break it: one adapter in W, which all rows pass through
  uv run python vllm/12_multi_lora.py --max-loras 1        one adapter per step: the same answers, more steps
  uv run python vllm/12_multi_lora.py --bench              minutes: popularity, number of adapters, slots and pages

Read for this: Hu et al. 2021 (LoRA), Chen et al. 2023 (Punica), Sheng et al. 2023 (S-LoRA), vLLM 0.32
`lora/ops/triton_ops/`, `lora/worker_manager.py`, `lora/model_manager.py`, `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used
from common import tl, triton

import argparse
import contextlib
import dataclasses
import random
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from engine import arguments, registry
from engine.config import VllmConfig
from engine.core import kv_cache_manager
from engine.llm import LLM
from engine.llm_engine import LLMEngine
from engine.lora import files, lora_model
from engine.lora.config import LoRAConfig, LoRARequest
from engine.lora.layers import NONE, LoRAKernelMeta
from engine.lora.lora_model import LayerShape, LoRAModel
from engine.lora.memory import LoRATables, SlotMemory, UnifiedMemory
from engine.model import folders, llama, loader
from engine.model.tokenizer import Tokenizer
from engine.request import SamplingParams
from lab import cli, naive

KEY = "12_multi_lora"

# --- What we want, without cleverness ---------------------------------------------------------------------------------


def alone(model: llama.Llama, lora: LoRAModel | None, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """One by one: a copy of the model with W + BA in place of W, one request, no cache. Its greedy tokens.

    Merged, an adapter costs nothing per token. But W is read once for the whole batch, so then all rows are this
    adapter's: a server that merges can batch one customer's requests, and has a copy of the model for each of them.
    """
    return naive.generate(model if lora is None else lora_model.merged(model, lora), prompt, max_tokens)


def add_lora_reference(y: torch.Tensor, x: torch.Tensor, of_row: Sequence[Any], shape: LayerShape) -> torch.Tensor:
    """y + (x Aᵀ) Bᵀ row by row, slice by slice, in fp64. x [T, in], y [T, Σ out]; of_row[t]: its adapter's A and B of
    each slice, or None."""
    out = y.double().clone()
    for t, slices in enumerate(of_row):
        start = 0
        for width, pair in zip(shape.slices, slices or []):
            if pair is not None:
                a, b = (weight.double().to(x.device) for weight in pair)
                out[t, start : start + width] += b @ (a @ x[t].double())
            start += width
    return out


# --- 1. The rows of a step, and where the weights of their adapters are -----------------------------------------------
#
# Rows are grouped before the step (`engine/lora/layers.py:LoRAKernelMeta`). Eight rows of adapters A, B, C or none:
#
#     rows 0 … 7      A B – A C C – A
#     order           0 3 7, 1, 4 5                        row numbers, those of one adapter side by side
#     tiles           (0, 3, A) (3, 1, B) (4, 2, C)        first place in `order`, rows, adapter
#
# Rows 2 and 6 are in no tile, and cost nothing.
#
# Each kind of layer has a table of addresses, offsets into one flat tensor a decoder layer (`engine/lora/memory.py`):
#
#     a_rows[slot, slice, r]    where row r of A begins     [slots, slices, max_rank]
#     b_rows[slot, slice, r]    where row r of Bᵀ begins    [slots, slices, max_rank]
#     ranks[slot, slice]        how many rows there are; 0: this slice (of q, k and v, say) has no adapter
#
# So kernels do not care where weights lie. `SlotMemory` is vLLM's: each slot has room for the largest rank that is
# allowed, on every layer. `UnifiedMemory` is S-LoRA's: an adapter takes blocks of the KV cache, as many as it needs.


# --- 2. The kernels: shrink, then expand ------------------------------------------------------------------------------
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
    (R, slices), K, N = _ranks(tables), tables.shape.in_features, len(meta.order)
    splits = triton.cdiv(K, 256)  # a tile each: where there is no dot, Triton loads no tile ahead of its loop
    h = torch.empty(splits, slices, N, R, dtype=torch.float32, device=x.device)
    a, b, rows = (tables.a_rows, tables.ranks), (tables.b_rows, tables.ranks, tables.starts), (meta.order, meta.tiles)
    shared = {"SLICES": slices, "MAX_RANK": R, "RANK_TILE": 16, "ALIGNED": tables.aligned, "num_warps": 4}
    bgmv_shrink_kernel[(N, slices, splits)](x, pages, *a, *rows, h, N, x.stride(0), K=K, TILE_K=256, **shared)
    bgmv_expand_kernel[(N, slices, triton.cdiv(max(tables.shape.slices), 256))](
        h, pages, *b, *rows, y, N, y.stride(0), TILE_N=256, SPLITS=splits, **shared
    )


def sgmv(y: torch.Tensor, x: torch.Tensor, pages: torch.Tensor, tables: LoRATables, meta: LoRAKernelMeta) -> None:
    """A program per tile of rows with one adapter: its weights are read once for all of them, by tensor cores.

    Semantics: y[t, slice i] += (x[t] A_iᵀ) B_iᵀ in place, with A, B of row t's adapter.
    Shapes: x [T, in], y [T, Σ out] (row strides free), pages flat, tables and meta as they say.
    vLLM 0.32: lora/ops/triton_ops/lora_shrink_op.py and lora_expand_op.py.
    """
    (R, slices), K, N = _ranks(tables), tables.shape.in_features, len(meta.order)
    wide, half = meta.tile_m > 16, x.element_size() == 2  # fp32 operands fill the registers sooner
    rank_tile = max(16, min(64, triton.next_power_of_2(R))) if half else 16
    tile = (64 if wide else 128) if half else 32  # of a row's inputs, and of its outputs
    splits = _splits(len(meta.tiles) * slices, K)
    h = torch.empty(splits, slices, N, R, dtype=torch.float32, device=x.device)
    a, b, rows = (tables.a_rows, tables.ranks), (tables.b_rows, tables.ranks, tables.starts), (meta.order, meta.tiles)
    shared = {"SLICES": slices, "MAX_RANK": R, "RANK_TILE": rank_tile, "TILE_M": meta.tile_m, "SPLITS": splits}
    shared |= {"ALIGNED": tables.aligned, "UPCAST": common.INTERPRET, "num_warps": 8 if wide else 4}
    sgmv_shrink_kernel[(len(meta.tiles), slices, splits)](
        x, pages, *a, *rows, h, N, x.stride(0), K=K, TILE_K=tile, **shared
    )
    sgmv_expand_kernel[(len(meta.tiles), slices, triton.cdiv(max(tables.shape.slices), tile))](
        h, pages, *b, *rows, y, N, y.stride(0), TILE_N=tile, **shared
    )


def _ranks(tables: LoRATables) -> tuple[int, int]:
    """(largest rank a slot can hold, slices)."""
    return tables.a_rows.shape[2], tables.a_rows.shape[1]


def _splits(programs: int, K: int) -> int:
    """How many programs share a row's inputs: enough for a GPU's 132 processors twice, at least 256 inputs each."""
    return max(1, min(triton.cdiv(K, 256), 264 // max(1, programs), 16))


def add_lora(
    y: torch.Tensor, x: torch.Tensor, memory: SlotMemory | UnifiedMemory, layer: int, kind: str, meta: LoRAKernelMeta
) -> torch.Tensor:
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


# --- 3. Few slots, many adapters --------------------------------------------------------------------------------------


class Slots:
    """The places of resident adapters. Who takes the last one throws out the adapter that was used longest ago."""

    def __init__(self, max_loras: int) -> None:
        self.places: OrderedDict[Hashable, int] = OrderedDict()  # adapter -> slot, least recently used first
        self.free, self.loads = list(range(max_loras))[::-1], 0

    def make_resident(self, adapter: Hashable, in_use: Collection[Hashable] = ()) -> bool:
        """Give an adapter a slot if it has none, but never that of one that is `in_use`. False: there is no place."""
        if adapter in self.places:
            self.places.move_to_end(adapter)
            return True
        if not self.free:
            victim = next((other for other in self.places if other not in in_use), None)
            if victim is None:
                return False
            self.free.append(self.places.pop(victim))
        self.places[adapter] = self.free.pop()
        self.loads += 1
        return True


def admit(
    running: list[int], waiting: deque[int], adapter_of: Sequence[Hashable], slots: Slots, seats: int, pass_over: bool
) -> None:
    """Admission, with one more condition: the request's adapter has a place beside those of the requests that run.

    For other reasons to wait, the queue stops at its head (lesson 04). Whoever waits for a place is passed over and
    keeps its position: behind it may stand requests whose adapters are there already.
    """
    passed_over = []
    while waiting and len(running) < seats:
        request = waiting.popleft()
        if slots.make_resident(adapter_of[request], {adapter_of[other] for other in running}):
            running.append(request)
            continue
        passed_over.append(request)
        if not pass_over:
            break
    waiting.extendleft(reversed(passed_over))


def serve(
    adapter_of: Sequence[Hashable], tokens: Sequence[int], max_loras: int, seats: int, pass_over: bool = True
) -> tuple[list[list[int]], Slots]:
    """No model: request i is there from the start, wants adapter_of[i], and leaves after tokens[i] steps.

    Returns who is in each step, and the slots. It is the engine's scheduler without budget, blocks and files.
    """
    slots, left, steps = Slots(max_loras), list(tokens), []
    running: list[int] = []
    waiting = deque(range(len(left)))
    while running or waiting:
        admit(running, waiting, adapter_of, slots, seats, pass_over)
        steps.append(list(running))
        for request in running:
            left[request] -= 1
        running = [request for request in running if left[request]]
    return steps, slots


def in_turns(adapters: int, count: int) -> list[int]:
    """The adapter of each of `count` requests: 0, 1, 2, …, and from the first again."""
    return [i % adapters for i in range(count)]


def zipf(adapters: int, count: int) -> list[int]:
    """As `in_turns`, but drawn, adapter k with weight 1/(k + 1), by a generator that is the same everywhere."""
    edges, state, found = np.cumsum([1_000_000 // (k + 1) for k in range(adapters)]), 12345, []
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2**31
        found.append(int(np.searchsorted(edges, state // 64 * int(edges[-1]) // 2**25, side="right")))
    return found


# --- 4. The key of a block in the prefix cache ------------------------------------------------------------------------
#
# Adapters sit on q, k and v: the same tokens have other keys and values under another adapter. The key of a block is
# lesson 05's, a hash of the key before it, the block's tokens, and `block_extra_keys(request)`, which has the adapter's
# name and the fingerprint of its files.


def forgotten_adapter() -> contextlib.AbstractContextManager[Any]:
    """The bug: a context in which nothing but tokens is in a block's key."""
    return mock.patch.object(kv_cache_manager, "block_extra_keys", return_value=())


# --- The story --------------------------------------------------------------------------------------------------------

QUESTION = "What is the capital of France?"


def check_kernels(model: llama.Llama) -> None:
    """Ranks 4, 8 and 20 in one batch with rows of no adapter, from slots and from shuffled pages of a KV cache."""
    memory = SlotMemory(model, 3, 20)
    unified = UnifiedMemory(model, 3, 20, registry.fill("cache.paged")(model, 64, 16))
    some = ("q_proj", "v_proj", "down_proj")
    targets_of = {4: lora_model.TARGETS, 8: some, 20: lora_model.TARGETS}  # by rank
    loras = [lora_model.random_adapter(model.config, r, seed=r, targets=on) for r, on in targets_of.items()]
    free = random.Random(0).sample(range(1, 64), 63)
    for slot, lora in enumerate(loras):
        memory.write(slot, lora)
        unified.write(slot, lora, [free.pop() for _ in range(unified.num_blocks_of(lora))])
    shape = memory.shapes["qkv_proj"]
    for name, slots in (("sgmv", [0, 1, NONE, 0, 2, 2, NONE, 0]), ("bgmv", [2, NONE, 0, 1])):
        x = torch.randn(len(slots), shape.in_features, device=model.device)
        y = torch.randn(len(slots), sum(shape.slices), device=model.device)
        meta = LoRAKernelMeta.build(slots, model.device)
        assert meta
        of_row = [None if slot == NONE else loras[slot].weights.get("layers.1.qkv_proj") for slot in slots]
        reference = add_lora_reference(y, x, of_row, shape)
        for where, place in (("slots", memory), ("pages", unified)):
            with common.use_kernels() if common.HAS_TRITON else contextlib.nullcontext():
                out = add_lora(y.clone(), x, place, 1, "qkv_proj", meta)
            common.check(f"{name if common.HAS_TRITON else 'torch'}, weights in {where}", out, reference)
    if not common.HAS_TRITON:
        common.skipped("the Triton kernels", "no Triton wheel here; the check above is of the torch path")
    blocks = " + ".join(str(unified.num_blocks_of(lora)) for lora in loras)
    room = 3 * memory.slot_elements * model.config.num_hidden_layers
    common.say(f"{sum(lora.num_parameters for lora in loras):,} numbers, in slots for {room:,}, or in {blocks} blocks")


def shipped() -> list[LoRARequest]:
    """The three adapters that were trained for SmolLM2."""
    return [LoRARequest(name, i + 1, str(files.SHIPPED / name)) for i, name in enumerate(("pirate", "json", "report"))]


def make_llm(model: llama.Llama, tokenizer: Tokenizer, config: LoRAConfig, **engine_args: Any) -> LLM:
    """The engine, with adapters. Its linear layers call this file's `add_lora`."""
    return LLM.from_engine(LLMEngine(model, tokenizer, config=VllmConfig(lora_config=config), **engine_args))


def ask(
    llm: LLM, tokenizer: Tokenizer, choices: Sequence[LoRARequest | None], question: str, max_tokens: int = 20
) -> tuple[list[Any], int]:
    """The same question for each of several models, in one batch: the answers, and the steps that they took."""
    engine, answers, steps = llm.llm_engine, {}, 0
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    for i, choice in enumerate(choices):
        engine.add_request(str(i), {"prompt_token_ids": tokenizer.ask(question)}, params, lora_request=choice)
    while engine.has_unfinished_requests():
        answers |= {output.request_id: output.outputs[0] for output in engine.step()}
        steps += 1
    return [answers[str(i)] for i in range(len(choices))], steps


def tell_models(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> LLM:
    """Step 2: four models in one batch."""
    base = model
    if args.break_ == "merge":
        base = lora_model.merged(model, files.read_adapter(files.SHIPPED / "pirate", model.config))
        common.say("BROKEN (--break merge): pirate is merged into W, which all rows share")
    config = LoRAConfig(args.max_loras, args.max_lora_rank, max_cpu_loras=max(4, args.max_loras))
    llm = make_llm(base, tokenizer, config, max_model_len=256, max_num_seqs=16, num_gpu_blocks_override=200)
    choices = [None, *shipped()]
    answers, steps = ask(llm, tokenizer, choices, QUESTION)
    for choice, answer in zip(choices, answers):
        common.say(f"{choice.lora_name if choice else 'base':<7} {answer.text!r}"[:104])
    total = sum(len(answer.token_ids) for answer in answers)
    common.say(f"{total} tokens in {steps} steps; one by one they take {total}")
    assert llm.llm_engine.lora
    pirate = llm.llm_engine.lora.cpu["pirate"]
    for name, lora, answer in (("base", None, answers[0]), ("pirate", pirate, answers[1])):
        written = answer.token_ids[:12]
        n = len(written)  # fewer if the answer ended
        expected = alone(model, lora, tokenizer.ask(QUESTION), n)
        if args.break_ == "merge":
            common.say(f"{name} {'writes' if written == expected else 'does NOT write'} what it writes alone")
        else:
            common.check_equal(f"{n} tokens of {name} are those that it writes alone", written, expected)
    return llm


def tell_cache(args: argparse.Namespace, llm: LLM, tokenizer: Tokenizer) -> None:
    """Step 3: what a prefix cache must know about adapters."""
    secret = "You are the night watch of a harbour. The word of the day is lantern. "
    question = "Which word opens the gate, and why?"
    messages = [{"role": "system", "content": secret}, {"role": "user", "content": question}]
    prompt, pirate = {"prompt_token_ids": tokenizer.converse(messages)}, shipped()[0]
    params, short = (SamplingParams(temperature=0, max_tokens=n) for n in (12, 8))
    found = {}
    with forgotten_adapter() if args.break_ == "cache-key" else contextlib.nullcontext():
        for name, choice in (("pirate", pirate), ("pirate again", pirate), ("base", None)):
            output = llm.generate([prompt], short if choice else params, lora_request=choice)[0]
            found[name] = output.num_cached_tokens, output.outputs[0].token_ids
            length, text = len(output.prompt_token_ids), output.outputs[0].text
            common.say(f"{name:<13} {output.num_cached_tokens:>2} of {length} prompt tokens cached: {text!r}"[:104])
    fresh = dataclasses.replace(params, skip_reading_prefix_cache=True)
    truth = llm.generate([prompt], fresh)[0].outputs[0].token_ids
    cached, written = found["base"]
    if args.break_ == "cache-key":
        common.say(
            "BROKEN (--break cache-key): base read what pirate's layers computed; recomputed, it writes "
            + ("the same text" if written == truth else "another text")
        )
    else:
        own = found["pirate again"][0] > 0
        common.check_equal("an adapter finds its own blocks again, and nobody else's", (own, cached), (True, 0))
        common.check_equal("base writes what it writes without a cache", written, truth)


def tell_slots() -> None:
    """Step 4, the surprise: one adapter too many."""
    count, rows = 720, []
    for traffic, adapter_of in (("in turns", in_turns), ("Zipf's law", zipf)):
        rows.append([traffic])
        for adapters in (8, 9, 16, 64):
            slots = Slots(8)
            for adapter in adapter_of(adapters, count):
                slots.make_resident(adapter)
            rows[-1].append(f"{1 - slots.loads / count:.1%}")
    common.table(["found in 8 slots", "of 8 adapters", "of 9", "of 16", "of 64"], rows)
    common.say(f"In turns, the ninth adapter takes the hits from {rows[0][1]} to {rows[0][2]}.")


def tell_queue() -> None:
    """Step 5: what passing over a request buys, and who pays for it."""
    common.say("Eight seats: 54 requests for 9 adapters in turn; then one for A, for B, for C, and 400 for A or B:")
    turns, few, rows = in_turns(9, 54), ["A", "B", "C"] + ["A", "B"] * 200, []
    for queue, pass_over in (("stops at its head", False), ("passes over", True)):
        steps, slots = serve(turns, [2] * len(turns), 1, 8, pass_over)
        rows.append([queue, f"{len(steps)} steps, {slots.loads} loads"])
        for max_loras in (2, 3):
            steps, _ = serve(few, [1 + i % 3 for i in range(len(few))], max_loras, 8, pass_over)
            first = next(step for step, batch in enumerate(steps) if 2 in batch)
            rows[-1].append(f"C waits for {first} of {len(steps)} steps")
    common.table(["the queue", "9 adapters, 1 slot", "A, B, C, 2 slots", "3 slots"], rows)
    common.say("Passing over sorts the queue by adapter. It pays, until C, who came third, is served last.")


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    help = "adapters in one step, and slots (default %(default)s; 1 takes turns)"
    p.add_argument("--max-loras", type=arguments.number(int, 1, 64), default=4, metavar="N", help=help)
    help = "largest rank (default %(default)s; below 8 the adapters are refused)"
    p.add_argument("--max-lora-rank", type=arguments.number(int, 1, 512), default=8, metavar="R", help=help)
    p.add_argument("--break", dest="break_", choices=("cache-key", "merge"), help="a bug to look at")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    for request in shipped():  # a rank that is too low is refused before anything is computed or loaded
        files.read_config(Path(request.lora_path), args.max_lora_rank)
    config = loader.check_context(args.model, 256)
    with folders.made_for_default():
        files.read_adapter(files.SHIPPED / "pirate", config)

    common.heading("1. The kernels against the naive loop: ranks 4, 8 and 20, rows without adapter, slices without")
    check_kernels(llama.random_model(seed=0))
    common.heading(f"2. Four models in one batch: {QUESTION}")
    model, tokenizer = loader.load(args.model)
    llm = tell_models(args, model, tokenizer)
    common.heading("3. One prompt, two tenants, one prefix cache")
    tell_cache(args, llm, tokenizer)
    common.heading("4. Eight slots, and one adapter too many")
    tell_slots()
    common.heading("5. The queue: a request whose adapter has no place may be passed over")
    tell_queue()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

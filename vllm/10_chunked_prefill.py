"""10 · Chunked prefill: one token budget for every step.

The question: somebody sends a prompt of 10,000 tokens. Why does everybody else's answer freeze, and what does it cost
to prevent that?

The mechanism:
  1. A step has a budget of tokens (`max_num_batched_tokens`), and costs about as much as the tokens it holds.
  2. Running requests come first, in order of admission: a decode takes 1 token of the budget.
  3. A prompt takes what is left. If it is longer than that it is cut, and goes on in the next step, now as a runner.
  4. So no step is longer than the budget allows, whatever arrives: the freeze becomes a slower trickle.
  5. One kernel attends for all: queries of any length per sequence, the last of their context, against block tables.
  6. A chunk inside a prompt yields no token: its last logits predict the prompt's own next token, which is known.
  7. `long_prefill_token_threshold` caps one prompt's share of the budget, so that a short one can pass a long one.

Numbers to remember: in bf16, the intensity of a step's matrix products is its number of tokens (FLOP/byte). An H100
needs 295 of them to be busy, a batch of 32 decodes brings 32: 263 prompt tokens per step ride almost free.

How to run:
  uv run python vllm/10_chunked_prefill.py                  the whole story
  uv run python vllm/10_chunked_prefill.py --budget 64      smaller chunks: smoother for others, later for the newcomer
  uv run python vllm/10_chunked_prefill.py --budget 4       break it: 4 decodes use the whole budget, the prompt starves
  uv run python vllm/10_chunked_prefill.py --bench          minutes: budgets from 16 to 2,048 on the real model

Read for this: Agrawal et al. 2023 (Sarathi) and 2024 (Sarathi-Serve), Holmes et al. 2024 (DeepSpeed-FastGen),
vLLM 0.32 `v1/core/sched/scheduler.py` and `v1/attention/ops/triton_unified_attention.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import HARDWARE, tl, triton

import llama
from lab import roofline
from engine.output import SchedulerOutput
from engine.request import Request
from engine.request import RequestStatus
from engine.request import SamplingParams
from engine.worker.assemble import make_runner
from engine.core.engine_core import EngineCore

from engine.attention import torch_paged as torch_attention

paged = common.lesson("02_paged_attention")
continuous_batching = common.lesson("04_continuous_batching")

KEY = "10_chunked_prefill"


# --- The scheduler: two small changes to lesson 04's ----------------------------------------------------------------


@dataclass
class SchedulerConfig(continuous_batching.SchedulerConfig):
    """Lesson 04's limits and four knobs for prompts. `max_num_batched_tokens` may now be below `max_model_len`."""

    enable_chunked_prefill: bool = True
    max_num_scheduled_tokens: int | None = None  # a smaller budget than the buffers were made for
    long_prefill_token_threshold: int = 0  # no request gets more tokens than this in a step; 0: no such cap
    long_prefill_token_threshold_adaptive: bool = False  # raise the cap to a fair share of the budget

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_scheduled_tokens is not None and self.max_num_scheduled_tokens < 1:
            raise common.InputError(f"max_num_scheduled_tokens {self.max_num_scheduled_tokens}: must be at least 1")
        if not 0 <= self.long_prefill_token_threshold <= self.max_model_len:
            raise common.InputError(f"long_prefill_token_threshold {self.long_prefill_token_threshold}: must be from 0 "
                                    f"to max_model_len ({self.max_model_len})")  # fmt: skip


class Scheduler(continuous_batching.SchedulerInPieces):
    """A prompt no longer waits for a step that has room for all of it: it takes what is left.

    Running requests still come first, in order of admission, so decodes are never delayed by a prompt that arrives.
    A chunk that ends inside the prompt samples nothing: the logits that follow it predict a token that is known.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: continuous_batching.KVCacheManager) -> None:
        super().__init__(config, kv_cache_manager)
        self.max_num_scheduled_tokens = min(
            config.max_num_batched_tokens, config.max_num_scheduled_tokens or config.max_num_batched_tokens
        )
        self.long_prefill_cap: float = math.inf

    def schedule(self) -> SchedulerOutput:
        self.long_prefill_cap = self._long_prefill_cap()
        return super().schedule()

    def _long_prefill_cap(self) -> float:
        """The most tokens that one request may get in this step.

        A request that is alone has nobody to starve, and is not capped. The adaptive form gives each request, running
        or waiting, at least its share of the budget.
        """
        config, num_requests = self.config, len(self.requests)
        if config.long_prefill_token_threshold == 0 or num_requests <= 1:
            return math.inf
        if config.long_prefill_token_threshold_adaptive:
            return max(config.long_prefill_token_threshold, config.max_num_batched_tokens // num_requests)
        return config.long_prefill_token_threshold

    def _num_new_tokens(self, request: Request) -> int:
        """How far a request may catch up in this step: n = min(tokens behind, cap, budget).

        Without chunked prefill a prompt starts only if n is not cut by the budget (the cap still splits it).
        """
        num_new_tokens = min(request.num_tokens - request.num_computed_tokens, self.long_prefill_cap)
        if num_new_tokens <= self.token_budget:
            return num_new_tokens
        if self.config.enable_chunked_prefill or request.status is RequestStatus.RUNNING:
            return self.token_budget
        return 0


# --- What attention has to compute for such a step, obviously right -------------------------------------------------


def mixed_attention_reference(q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor,
                              query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """Each sequence by itself: gather its whole context, score all of its queries, mask, softmax; in fp64.

    Shapes: q [T, Hq, D], kv_cache [2, num_blocks, block_size, Hkv, D], block_table [B, W], query_start_loc [B + 1],
    seq_lens [B] -> [T, Hq, D]. Sequence b's queries q[query_start_loc[b] : query_start_loc[b + 1]] are the last of its
    seq_lens[b] tokens: the chunk of a prompt, or the one token of a decode.
    """
    T, Hq, D = q.shape
    block_size, Hkv = kv_cache.shape[2:4]
    out = torch.empty(T, Hq, D, dtype=torch.float64)
    for b, S in enumerate(seq_lens.tolist()):
        first, last = query_start_loc[b : b + 2].tolist()
        places = [int(block_table[b, p // block_size]) * block_size + p % block_size for p in range(S)]
        k, v = kv_cache.flatten(1, 2)[:, places].double().cpu().repeat_interleave(Hq // Hkv, dim=2)  # [S, Hq, D]
        scores = torch.einsum("thd,shd->hts", q[first:last].double().cpu(), k) / math.sqrt(D)
        position = torch.arange(S - (last - first), S)[:, None]
        scores = scores.masked_fill(torch.arange(S) > position, -math.inf)
        out[first:last] = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
    return out


# --- The kernel: queries of any length against block tables ---------------------------------------------------------
#
# Rows. Query t of a sequence and the G = Hq / Hkv query heads that share a KV head are G rows of one tile, so a tile of
# BLOCK_M rows holds BLOCK_Q = ⌊BLOCK_M / G⌋ query positions, and each key it loads serves all of them:
#
#     row r   ->   query first + ⌊r / G⌋,   head kv_head · G + r mod G
#
# Which tile belongs to whom. Query lengths are known to the GPU only, so the grid may not depend on them. Sequence b
# needs ⌈n_b / BLOCK_Q⌉ tiles. Give it the numbers from ⌊query_start_loc[b] / BLOCK_Q⌋ + b on: that is always enough,
# ⌊T / BLOCK_Q⌋ + B numbers in all, and a program finds its sequence by binary search. Numbers too many return at once.
#
# Causality with an offset. Query t stands at position S − n + t and sees the keys up to there: all that earlier chunks
# left in the cache, and its own chunk's up to itself. With context = S − n, the mask is  j ≤ context + t.
#
# The recurrence is lesson 03's online softmax, in powers of two: 2^(x·log2 e) = e^x.


@triton.jit
def find_sequence(query_start_loc, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence b whose first tile, query_start_loc[b] // BLOCK_Q + b, is not behind `tile`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle).to(tl.int32) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@common.kernel
def unified_attention_kernel(q, kv_cache, block_table, query_start_loc, seq_lens, out, scale,
                             num_seqs: tl.int32, stride_q, stride_kv, table_width: tl.int32,
                             G: tl.constexpr, Hkv: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                             BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
                             UPCAST: tl.constexpr):  # fmt: skip
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # from the back, where prompts stand: the longest work first
    b = find_sequence(query_start_loc, tile, num_seqs, BLOCK_Q)
    start = tl.load(query_start_loc + b).to(tl.int32)
    query_len = tl.load(query_start_loc + b + 1).to(tl.int32) - start
    first = (tile - start // BLOCK_Q - b) * BLOCK_Q  # the tile's first query, counted within its sequence
    if first >= query_len:
        return
    S = tl.load(seq_lens + b)
    context = S - query_len  # tokens computed in earlier steps

    r, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    t, head = first + r // G, kv_head * G + r % G
    inside = ((r < BLOCK_Q * G) & (t < query_len))[:, None] & (d < D)[None, :]
    row = (start + t).to(tl.int64)[:, None]
    q_tile = tl.load(q + row * stride_q + head[:, None] * D + d[None, :], mask=inside, other=0.0)  # [BLOCK_M, D]
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)

    position = context + t
    end = tl.minimum(S, context + first + BLOCK_Q)  # causality: no query in this tile sees a key from there on
    for n in range(0, end, TILE):
        p = n + tl.arange(0, TILE)  # positions of the keys
        live = p < end
        block = tl.load(block_table + b * table_width + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        place = ((block * BLOCK_SIZE + p % BLOCK_SIZE) * Hkv + kv_head) * D  # int64: more than 2^31 elements
        key = kv_cache + place[:, None] + d[None, :]  # [TILE, D]

        k = tl.load(key, mask=(d < D)[None, :], other=0.0)
        if UPCAST:  # Triton's interpreter multiplies 16-bit floats wrongly; a GPU wants them as they are
            k = k.to(tl.float32)
        s = tl.dot(q_tile, k.T, input_precision="ieee") * scale  # [BLOCK_M, TILE]
        s = tl.where(p[None, :] <= position[:, None], s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.math.exp2(m - m_new)
        w = tl.math.exp2(s - m_new[:, None])
        l = l * alpha + tl.sum(w, 1)
        # Positions from `end` on read the null block, whatever it holds: 0 · NaN is NaN, so a weight of 0 is no mask.
        v = tl.load(key + stride_kv, mask=live[:, None] & (d < D)[None, :], other=0.0)
        if UPCAST:
            v = v.to(tl.float32)
        acc = tl.dot(w.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")  # [BLOCK_M, D]
        m = m_new

    o = acc / l[:, None]  # key 0 is visible to every row, so ℓ > 0
    tl.store(out + (row * Hkv * G + head[:, None]) * D + d[None, :], o.to(out.dtype.element_ty), mask=inside)


def unified_attention(q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor,
                      query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
                      max_query_len: int) -> torch.Tensor:  # fmt: skip
    """Causal attention of a mixed batch through block tables: prompts' chunks and decodes in one launch.

    Semantics: out[t, h] = softmax_j(q[t, h]·k_j / √D) v_j over the keys j ≤ position of t in its own sequence b, where
    position = seq_lens[b] − query_start_loc[b + 1] + t, and k_j is found through block_table[b, j // block_size].
    Shapes: q [T, Hq, D] (token stride free), kv_cache [2, num_blocks, block_size, Hkv, D], block_table int32 [B, W],
    query_start_loc [B + 1], seq_lens int32 [B] -> [T, Hq, D]. A sequence may have no query in this step. The step's own
    keys and values are in the cache already. `max_query_len` only chooses the tile.
    vLLM 0.32: v1/attention/ops/triton_unified_attention.py (its 2D kernel), whose numbering of tiles this is.
    """
    if not common.runs_kernel(q):
        plan = MixedPlan.build(block_table, query_start_loc.diff().tolist(), seq_lens, kv_cache, q.shape[1])
        return unified_attention_torch(q, kv_cache, plan)
    T, Hq, D = q.shape
    B, (block_size, Hkv) = len(seq_lens), kv_cache.shape[2:4]
    out = torch.empty(T, Hq, D, dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    G = Hq // Hkv
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda and not torch.version.hip else None
    block_m, tile, num_warps, num_stages = choose_tiles(q.dtype, D, G, max_query_len, capability)
    block_q = block_m // G
    unified_attention_kernel[(Hkv, T // block_q + B)](
        q, kv_cache, block_table, query_start_loc, seq_lens, out, math.log2(math.e) / math.sqrt(D), B,
        q.stride(0), kv_cache.stride(0), block_table.stride(0), G=G, Hkv=Hkv, D=D, BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_Q=block_q, D_PAD=max(16, triton.next_power_of_2(D)), TILE=tile,
        UPCAST=common.INTERPRET, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def choose_tiles(dtype: torch.dtype, D: int, G: int, max_query_len: int,
                 capability: tuple[int, int] | None = None) -> tuple[int, int, int, int]:  # fmt: skip
    """(rows, keys per tile, warps, stages): as many rows as the longest query fills, within the registers.

    Tall tiles read the keys fewer times, but where everybody decodes they would be padding. Chosen by compiling: these
    spill on no GPU that the tests compile for; Hopper, capability (9, 0), has room for larger ones.
    """
    least = max(16, triton.next_power_of_2(G))  # a tile holds the group's heads at least once
    rows = max(least, triton.next_power_of_2(G * max_query_len))
    if dtype == torch.float32:  # no tensor cores for exact fp32
        if least > (32 if D <= 64 else 16):
            return least, 16, 8, 1
        return (min(rows, 32), 32, 8 if rows > 16 else 4, 2) if D <= 64 else (16, 32, 4, 1)
    if rows == 16:
        return rows, *paged.decode_tiles(dtype, triton.next_power_of_2(D), capability is not None)
    most, tile = (128, 64) if D <= 64 or capability == (9, 0) else (64, 32)
    if capability == (9, 0) and 64 < D <= 128 and max_query_len < 1024:
        most = 64  # a decode beside a chunk fills a tile of its own: on an H200 a shorter one gains more than it loses
    rows = max(least, min(rows, most))
    # The table's load takes its share of the stages (lesson 02). On Blackwell 5 spill.
    return rows, tile, 8 if rows >= 128 else 4, 5 if capability and capability < (10, 0) and D <= 128 else 2


# --- The same on a CPU ----------------------------------------------------------------------------------------------


@dataclass
class MixedPlan:
    """Where a step's attention reads; worked out once, used in every layer.

    Decodes go together, in place (lesson 02's plan); there are many. So do sequences that each have the same few tokens
    (lesson 07 checks guesses so). Prompts go one by one, each over a copy of all of its context; the budget keeps them
    few.
    """

    decodes: list[tuple[torch.Tensor, Callable]]  # (rows of q, lesson 02's plan for the sequences they are of)
    prefills: list[tuple[slice, torch.Tensor, int, torch.Tensor | None]]  # (tokens, pages, S, bias [n, S])

    @classmethod
    def build(cls, block_table: torch.Tensor, query_lens: Sequence[int], seq_lens: torch.Tensor,
              kv_cache: torch.Tensor, num_heads: int) -> MixedPlan:  # fmt: skip
        """`query_lens` are the numbers of tokens of each sequence in this step; `kv_cache` is that of any layer."""
        num_blocks, block_size = kv_cache.shape[1:3]
        device, last = seq_lens.device, list(itertools.accumulate(query_lens))
        prefills = []
        for b, n in enumerate(query_lens):
            if n > torch_attention.FEW_TOKENS:
                S = int(seq_lens[b])
                blocks = block_table[b, : -(-S // block_size)].long()
                bias = None  # a prompt's first chunk is plainly causal; a later one also sees all that came before it
                if n < S:
                    bias = torch.full((n, S), -math.inf, device=device).triu(S - n + 1)
                prefills.append((slice(last[b] - n, last[b]), torch.cat((blocks, blocks + num_blocks)), S, bias))
        return cls(torch_attention.plan_few(block_table, query_lens, seq_lens, kv_cache, num_heads), prefills)


def unified_attention_torch(q: torch.Tensor, kv_cache: torch.Tensor, plan: MixedPlan) -> torch.Tensor:
    """What `unified_attention` computes, with PyTorch's fused attention. Shapes as there."""
    (Hq, D), Hkv = q.shape[1:], kv_cache.shape[3]
    if len(plan.decodes) == 1 and not plan.prefills:
        return plan.decodes[0][1](q, kv_cache)
    out = torch.empty_like(q)
    for rows, decode in plan.decodes:
        out[rows] = decode(q[rows], kv_cache)
    pages = kv_cache.flatten(0, 1)  # [2 * num_blocks, block_size, Hkv, D]: keys, then values
    for tokens, chosen, S, bias in plan.prefills:
        k, v = pages.index_select(0, chosen).view(2, -1, Hkv, D)[:, :S].transpose(1, 2)  # [Hkv, S, D]
        # A KV head is a batch entry with G heads, whose keys have stride 0: nothing is repeated.
        queries = q[tokens].view(-1, Hkv, Hq // Hkv, D).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
        k, v = (x[:, None].expand(-1, Hq // Hkv, -1, -1) for x in (k, v))
        mask = None if bias is None else bias.to(q.dtype)
        o = F.scaled_dot_product_attention(queries, k, v, mask, is_causal=bias is None)
        out[tokens] = o.permute(2, 0, 1, 3).reshape(-1, Hq, D)
    return out


# --- Into the engine: attention for its seam, `AttentionBackend` ----------------------------------------------------


class UnifiedAttention:
    """A step may hold any mixture of chunks and decodes; attention is one launch per layer."""

    def make_cache(self, model: llama.Llama, num_blocks: int, block_size: int) -> paged.PagedKVCache:
        """Lesson 02's."""
        return paged.PagedKVCache(model, num_blocks, block_size)

    def plan(self, meta: paged.AttentionMetadata, cache: paged.PagedKVCache) -> llama.Attend:
        """K and V [T, Hkv, D] into the cache first, then one call for prompts, chunks and decodes."""
        layers, kernel = cache.layers, common.runs_kernel(cache.layers[0])
        max_query_len = max(meta.query_lens)
        plan = None if kernel else MixedPlan.build(meta.block_table, meta.query_lens, meta.seq_lens, layers[0],
                                                   cache.num_heads)  # fmt: skip

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv_cache = layers[layer]
            paged.reshape_and_cache(k, v, kv_cache, meta.slot_mapping)  # so a chunk reads its own keys there, too
            if not kernel:
                return unified_attention_torch(q, kv_cache, plan)
            if max_query_len == 1:  # everybody decodes: lesson 02's kernel can spread a long context over the GPU
                return paged.paged_decode(q, kv_cache, meta.block_table, meta.seq_lens, meta.max_seq_len)
            return unified_attention(q, kv_cache, meta.block_table, meta.query_start_loc, meta.seq_lens, max_query_len)

        return attend


def make_core(model: llama.Llama, config: SchedulerConfig, num_blocks: int, block_size: int = 16,
              ) -> EngineCore:  # fmt: skip
    """An engine core with this lesson's scheduler and attention. Raises InputError for limits that do not fit."""
    scheduler = Scheduler(config, continuous_batching.KVCacheManager(num_blocks, block_size, config.max_model_len))
    return EngineCore(scheduler, make_runner(model, config, num_blocks, block_size))


def example_launches(dtype: torch.dtype) -> None:
    """The kernel at the shapes this lesson runs (SmolLM2, an 8B Llama): a chunk among decodes, and decodes alone."""
    for Hq, Hkv, D in ((9, 3, 64), (32, 8, 128)):
        kv_cache = torch.empty(2, 1024, 16, Hkv, D, dtype=dtype, device="meta")
        table = torch.empty(33, 64, dtype=torch.int32, device="meta")
        start_loc = torch.empty(34, dtype=torch.int64, device="meta")
        seq_lens = torch.empty(33, dtype=torch.int32, device="meta")
        for longest in (480, 1):
            q = torch.empty(32 + longest, Hq, D, dtype=dtype, device="meta")
            unified_attention(q, kv_cache, table, start_loc, seq_lens, longest)
        unified_attention(q, kv_cache, table[:1], start_loc[:2], seq_lens[:1], 33)  # one sequence alone


# --- What a step costs ----------------------------------------------------------------------------------------------
#
# The operators of a step run one after another, and each is limited by arithmetic or by memory:
#
#     t = Σ over operators of max(FLOPs / rate, bytes / bandwidth) + overhead
#
# Matrix products: 2·W·T FLOPs on 2·W bytes of bf16 weights, from however many sequences. So T is their intensity in
# FLOP/byte, and it is here, in the weights read once for all, that decodes and prompts share a step.
# Attention: 4·L·Hq·D FLOPs per query-key pair on S·(bytes per token) of cache: each sequence has its own, nothing is
# shared, and a decode stays at Hq/Hkv FLOP/byte in any company.

Work = Sequence[tuple[int, int]]  # of each sequence in a step: new tokens, context length with them

# Sarathi-Serve's ablation ran this model on two A100s.
YI_34B = dict(num_hidden_layers=60, num_attention_heads=56, num_key_value_heads=8, hidden_size=7168,
              intermediate_size=20480, vocab_size=64000, tie_word_embeddings=False)  # fmt: skip
LLAMA_8B = roofline.MODELS["Llama-3.1-8B"]


class CostModel:
    """Seconds of a step of a dense bf16 Llama by roofline; `efficiency` is the share of both ceilings reached."""

    def __init__(self, config: Mapping[str, Any], gpu: common.GPU, gpus: int = 1, efficiency: float = 1.0,
                 overhead: float = 0.0) -> None:  # fmt: skip
        spec = roofline.KVCacheSpec.from_config(config)
        self.weights, self.head = roofline.weights_read(config)
        self.pair_flops = 4 * spec.num_layers * config["num_attention_heads"] * spec.head_size
        self.token_bytes = spec.bytes_per_token()
        self.rate, self.bandwidth = gpus * efficiency * gpu.flops, gpus * efficiency * gpu.bandwidth
        self.overhead = overhead

    def operators(self, work: Work) -> dict[str, tuple[int, int]]:
        """(FLOPs, bytes) of each operator. A chunk's queries see S − n + 1 to S keys: n·S − n(n − 1)/2 pairs."""
        T = sum(n for n, _ in work)
        found = {"matrix products": (2 * self.weights * T + 2 * self.head * len(work), 2 * (self.weights + self.head))}
        for name, group in (("prompt attention", [(n, S) for n, S in work if n > 1]),
                            ("decode attention", [(n, S) for n, S in work if n == 1])):  # fmt: skip
            pairs, keys = sum(n * S - n * (n - 1) // 2 for n, S in group), sum(S for _, S in group)
            found[name] = (self.pair_flops * pairs, self.token_bytes * keys)
        return found

    def seconds(self, work: Work) -> dict[str, float]:
        """Seconds of each operator."""
        operators = self.operators(work).items()
        return {name: max(flops / self.rate, moved / self.bandwidth) for name, (flops, moved) in operators}

    def __call__(self, work: Work) -> int:
        """Microseconds of the step, the constant overhead included."""
        return round((sum(self.seconds(work).values()) + self.overhead) * 1e6)


# Beyond reading the weights, published decode steps of an 8B model on an H100 take about 2 ms (lesson 01): launches,
# sampling, whatever the CPU cannot hide. Without it, tiny chunks would look better than they are.
H100_8B = CostModel(LLAMA_8B, HARDWARE["H100 80GB"], overhead=2e-3)
A100_YI = CostModel(YI_34B, HARDWARE["A100 80GB"], gpus=2, efficiency=0.6, overhead=2e-3)  # 0.6: our assumption


# --- The engine's loop on a clock -----------------------------------------------------------------------------------


class SimulatedCore(EngineCore):
    """Lesson 04's loop with a clock in place of the model: a step takes `cost(work)` microseconds, tokens are all 0."""

    def __init__(self, scheduler: Scheduler, cost: Callable[[Work], int]) -> None:
        super().__init__(scheduler)
        self.cost, self.now = cost, 0
        self.scheduled: dict[str, int] = {}  # of the last step
        self.token_times: dict[str, list[int]] = {}  # when each request's tokens came

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Token 0 for each request that has computed all of its own; the clock goes on by `cost`."""
        requests, self.scheduled = self.scheduler.requests, dict(output.num_scheduled_tokens)
        self.now += self.cost([(n, requests[i].num_computed_tokens) for i, n in self.scheduled.items()])
        ready = [i for i in self.scheduled if requests[i].num_computed_tokens == requests[i].num_tokens]
        for i in ready:
            self.token_times.setdefault(i, []).append(self.now)
        return {i: [0] for i in ready}

    def submit(self, name: str, prompt: int, max_tokens: int | None = None) -> None:
        """A request of `prompt` tokens; with max_tokens None it never ends."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.add_request(Request(name, [0] * prompt, params, arrival_time=self.now))

    def worst_gap(self, names: Iterable[str], since: int) -> int:
        """The longest silence between two tokens of one of these requests, from `since` on."""
        gaps = [b - a for i in names for a, b in itertools.pairwise(self.token_times.get(i, [])) if b > since]
        return max(gaps, default=0)


def simulated_core(cost: Callable[[Work], int], num_requests: int, max_model_len: int,
                   scheduler: type[Scheduler] | None = None, **limits: Any) -> SimulatedCore:  # fmt: skip
    """A core whose pool is never the limit: one block per request, as long as a request may become."""
    config = SchedulerConfig(max_model_len=max_model_len, max_num_seqs=num_requests, **limits)
    manager = continuous_batching.KVCacheManager(num_requests + 1, max_model_len, max_model_len)
    return SimulatedCore((scheduler or Scheduler)(config, manager), cost)


def freeze(cost: CostModel, budget: int, prompt: int = 10_000, decoders: int = 32,
           context: int = 2_000) -> dict[str, float]:  # fmt: skip
    """One long prompt arrives among decoders: its TTFT, and the longest silence of the others, in milliseconds."""
    names = [f"decode {i}" for i in range(decoders)]
    core = simulated_core(cost, decoders + 1, 4 * prompt, max_num_batched_tokens=prompt + decoders * context)
    for name in names:
        core.submit(name, context)
    core.step()  # everybody's prompt at once: that is before our story begins
    core.step()
    core.scheduler.max_num_scheduled_tokens = budget
    arrival = core.now
    core.submit("newcomer", prompt)
    steps = 0
    while "newcomer" not in core.token_times:
        core.step()
        steps += 1
    return {"budget": budget, "steps": steps, "ttft_ms": (core.now - arrival) / 1e3,
            "gap_ms": core.worst_gap(names, arrival) / 1e3}  # fmt: skip


# --- The simulation: the widget's twin ------------------------------------------------------------------------------

WIDGET_DEFAULT = {"budget": 512, "decoders": 16, "prompt": 4096, "short_prompt": 0, "threshold": 0, "adaptive": False,
                  "step_us": 10_000, "token_us": 50}  # fmt: skip
WIDGET_CHOICES = {
    "budget": range(1, 16385), "decoders": range(257), "prompt": range(1, 16385), "short_prompt": range(16385),
    "threshold": range(16385), "adaptive": (True, False), "step_us": range(1, 10**6 + 1), "token_us": range(10**4 + 1),
}  # fmt: skip


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """`decoders` streams run; after three steps a long prompt arrives and, right behind it, perhaps a short one.

    params: budget (tokens per step), decoders (streams that never end), prompt and short_prompt (tokens; 0: nobody),
    threshold and adaptive (`long_prefill_token_threshold…`); a step of n tokens takes step_us + token_us · n.
    The trace has, per step: start_us, decodes, chunk and short_chunk (tokens of each), and the total is their sum.
    It ends two steps after the last first token, or in the first step in which no newcomer got a token: as the streams
    never end, none ever will (`starved`). Drives the real Scheduler. Raises InputError.
    """
    p = common.checked(params, WIDGET_CHOICES)
    cost = lambda work: p["step_us"] + p["token_us"] * sum(n for n, _ in work)  # noqa: E731
    seats = p["decoders"] + 2
    # vLLM (and lesson 04) refuse max_num_batched_tokens < max_num_seqs: that rule is what keeps a budget from
    # starving. max_num_scheduled_tokens is the way around it.
    core = simulated_core(
        cost, seats, 20_000 + p["prompt"] + p["short_prompt"], max_num_batched_tokens=max(p["budget"], seats),
        max_num_scheduled_tokens=p["budget"], long_prefill_token_threshold=p["threshold"],
        long_prefill_token_threshold_adaptive=p["adaptive"],
    )  # fmt: skip
    streams = [f"stream {i}" for i in range(p["decoders"])]
    for name in streams:
        core.submit(name, 1)
    trace: dict[str, Any] = {"params": p, "start_us": [], "decodes": [], "chunk": [], "short_chunk": []}

    def step() -> int:
        """One step; returns the newcomers' tokens in it."""
        trace["start_us"].append(core.now)
        core.step()
        chunk, short = core.scheduled.get("long", 0), core.scheduled.get("short", 0)
        trace["decodes"].append(sum(core.scheduled.values()) - chunk - short)
        trace["chunk"].append(chunk)
        trace["short_chunk"].append(short)
        return chunk + short

    for _ in range(3 if streams else 0):
        step()
    arrival = trace["arrival_us"] = core.now
    newcomers = {"long": p["prompt"]} | ({"short": p["short_prompt"]} if p["short_prompt"] else {})
    for name, length in newcomers.items():
        core.submit(name, length)
    trace["starved"] = False
    while not trace["starved"] and any(name not in core.token_times for name in newcomers):
        trace["starved"] = step() == 0
    for _ in range(0 if trace["starved"] else 2):
        step()
    first = {name: core.token_times[name][0] - arrival if name in core.token_times else None for name in newcomers}
    return trace | {
        "end_us": core.now,
        "ttft_us": first["long"],
        "short_ttft_us": first.get("short"),
        "worst_gap_us": core.worst_gap(streams, arrival),
        "silent_streams": sum(name not in core.token_times for name in streams),  # got no token at all
    }


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p, done = trace["params"], len(trace["start_us"])
    ms = lambda us: f"{us / 1000:,.1f} ms"  # noqa: E731
    lines = [f"budget {p['budget']:,}, {p['decoders']} streams, a prompt of {p['prompt']:,} tokens; "
             f"a step takes {ms(p['step_us'])} + {p['token_us']} µs per token"]  # fmt: skip
    ends = [*trace["start_us"][1:], trace["end_us"]]
    shown = [i for i in range(done) if i < 5 or i >= done - 4]
    for before, i in zip([-1, *shown], shown):
        if i - before > 1:
            lines.append(f"  … and {i - before - 1} more")
        short = f" + short prompt {trace['short_chunk'][i]}" if p["short_prompt"] else ""
        lines.append(f"  step {i:>3}, {ms(ends[i] - trace['start_us'][i]):>8}: decodes {trace['decodes'][i]:>3} "
                     f"+ chunk {trace['chunk'][i]:>4}{short}")  # fmt: skip
    if trace["ttft_us"] is None:
        lines.append(f"STARVED: the streams use all {p['budget']:,} tokens of every step; the prompt will never start")
    else:
        short = f", short prompt's {ms(trace['short_ttft_us'])}" if trace["short_ttft_us"] else ""
        lines.append(f"TTFT {ms(trace['ttft_us'])}{short}; the others' longest silence {ms(trace['worst_gap_us'])}")
    if trace["silent_streams"]:
        lines.append(f"and {trace['silent_streams']} of the streams get no token either")
    return "\n".join(lines)


# --- Sarathi-Serve's ablation, on our scheduler ---------------------------------------------------------------------

ABLATION_BUDGET = 1024
# Yi-34B, openchat_sharegpt4, by Agrawal et al. 2024: seconds of P50 TTFT and P99 time between tokens.
PUBLISHED_ABLATION = {"hybrid only": (0.53, 0.68), "chunks only": (1.04, 0.17), "both": (0.76, 0.14)}


class SeparateBatches(Scheduler):
    """Prompts and decodes never share a step. With chunks they take turns; without, prompts go first (vLLM V0)."""

    prefilling = False

    def schedule(self) -> SchedulerOutput:
        behind = [r for r in self.running if self._is_prefill(r)]
        prompts, decodes = bool(behind) or bool(self.waiting), len(behind) < len(self.running)
        self.prefilling = prompts and not (decodes and self.prefilling and self.config.enable_chunked_prefill)
        return super().schedule()

    @staticmethod
    def _is_prefill(request: Request) -> bool:
        return request.num_computed_tokens < request.num_prompt_tokens

    def _num_new_tokens(self, request: Request) -> int:
        return super()._num_new_tokens(request) if self._is_prefill(request) is self.prefilling else 0


POLICIES: dict[str, tuple[type[Scheduler], bool]] = {  # scheduler, chunks?
    "neither": (SeparateBatches, False),
    "hybrid only": (Scheduler, False),
    "chunks only": (SeparateBatches, True),
    "both": (Scheduler, True),
}


def conversations(count: int, rate: float, seed: int) -> list[tuple[int, int, int]]:
    """(arrival in µs, prompt, output) of requests like openchat_sharegpt4: lognormal around the published medians and
    90th percentiles (1,730 and 5,696 tokens in, 415 and 834 out), at most 8,192 together; Poisson arrivals."""
    rng, now, found = random.Random(seed), 0.0, []
    draw = lambda median, p90: rng.lognormvariate(math.log(median), math.log(p90 / median) / 1.2816)  # noqa: E731
    while len(found) < count:
        now += rng.expovariate(rate)
        prompt, output = max(1, round(draw(1730, 5696))), max(2, round(draw(415, 834)))
        if prompt + output <= 8192:
            found.append((round(now * 1e6), prompt, output))
    return found


def ablation(policy: str, count: int = 96, rate: float = 1.0, seed: int = 0) -> dict[str, float]:
    """Serve `conversations` with one policy on the A100 cost model: seconds of P50 TTFT and P99 time between tokens."""
    scheduler, chunks = POLICIES[policy]
    core = simulated_core(A100_YI, 128, 8192, scheduler, max_num_batched_tokens=ABLATION_BUDGET if chunks else 8192,
                          enable_chunked_prefill=chunks)  # fmt: skip
    todo = conversations(count, rate, seed)
    arrival = {str(i): at for i, (at, _, _) in enumerate(todo)}
    i = 0
    while i < count or core.scheduler.has_unfinished_requests():
        if not core.scheduler.has_unfinished_requests():
            core.now = max(core.now, todo[i][0])
        while i < count and todo[i][0] <= core.now:
            core.submit(str(i), *todo[i][1:])
            i += 1
        core.step()
    ttft = sorted(times[0] - arrival[name] for name, times in core.token_times.items())
    gaps = sorted(b - a for times in core.token_times.values() for a, b in itertools.pairwise(times))
    return {"ttft_p50": ttft[len(ttft) // 2] / 1e6, "ttft_mean": statistics.mean(ttft) / 1e6,
            "tbt_p50": gaps[len(gaps) // 2] / 1e6, "tbt_p99": gaps[len(gaps) * 99 // 100] / 1e6}  # fmt: skip


# --- On the real model ----------------------------------------------------------------------------------------------


def arrival_among_decodes(model: llama.Llama, decoders: Sequence[Sequence[int]], prompt: Sequence[int], budget: int,
                          max_tokens: int, threshold: int = 0) -> dict[str, Any]:  # fmt: skip
    """`decoders` write `max_tokens` each; after three steps the long prompt arrives. Budget as in `simulate`.

    Returns the newcomer's TTFT and the others' longest silence after its arrival in seconds, per step (tokens,
    seconds), and everybody's tokens.
    """
    prompts = [*decoders, prompt]
    max_model_len = max(map(len, prompts)) + max_tokens + 1
    num_blocks = 1 + sum(-(-(len(tokens) + max_tokens) // 16) for tokens in prompts) + -(-max_model_len // 16)
    config = SchedulerConfig(
        max_model_len=max_model_len, max_num_seqs=len(prompts), max_num_batched_tokens=max(budget, len(prompts)),
        max_num_scheduled_tokens=budget, long_prefill_token_threshold=threshold,
    )  # fmt: skip
    core = make_core(model, config, num_blocks)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i, tokens in enumerate(decoders):
        core.add_request(Request(str(i), list(tokens), params))
    found: dict[str, Any] = {"budget": budget, "tokens": [[] for _ in prompts], "steps": [], "chunks": 0}
    times: list[list[float]] = [[] for _ in prompts]
    newcomer, arrival = Request(str(len(decoders)), list(prompt), params), None
    while arrival is None or core.scheduler.has_unfinished_requests():
        if arrival is None and (not decoders or len(times[0]) == 3):
            core.add_request(newcomer)
            arrival = time.perf_counter()
        requests, behind = list(core.scheduler.requests.values()), newcomer.num_computed_tokens < len(prompt)
        computed, start = newcomer.num_computed_tokens, time.perf_counter()
        before = sum(r.num_computed_tokens for r in requests)
        outputs = core.step()
        now = time.perf_counter()
        found["steps"].append((sum(r.num_computed_tokens for r in requests) - before, now - start))
        found["chunks"] += behind and newcomer.num_computed_tokens > computed
        for output in outputs:
            found["tokens"][int(output.request_id)] += output.new_token_ids
            times[int(output.request_id)].append(now)
    found["ttft_s"] = times[-1][0] - arrival
    gaps = [b - a for each in times[:-1] for a, b in itertools.pairwise(each) if b > arrival]
    return found | {"gap_s": max(gaps, default=0.0)}


def early_guesses(model: llama.Llama, prompt: Sequence[int], chunk: int) -> list[tuple[int, int, int | None]]:
    """After each chunk: (tokens computed, the model's next token if it were asked, the prompt's next token)."""
    pool = paged.BlockPool(2 + -(-len(prompt) // 16))
    cache, table = paged.PagedKVCache(model, pool.num_blocks, 16), paged.BlockTable(pool, 16)
    found = []
    for start in range(0, len(prompt), chunk):
        logits = paged.run_step(model, cache, [table], [prompt[start : start + chunk]])
        known = prompt[start + chunk] if start + chunk < len(prompt) else None
        found.append((table.num_tokens, int(logits[0].argmax()), known))
    return found


def fit_line(steps: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """(a, b) of seconds = a + b · tokens by least squares over the median of each token count."""
    groups: dict[int, list[float]] = {}
    for n, seconds in steps:
        groups.setdefault(n, []).append(seconds)
    xs, ys = list(groups), [statistics.median(group) for group in groups.values()]
    if len(xs) < 2:
        return ys[0], 0.0
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept, slope


# --- The numbers that the text quotes, and the figures --------------------------------------------------------------

FREEZE_BUDGETS = (16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 48)
CHUNKS = (0, 16, 32, 64, 128, 192, 263, 295, 400, 512, 768, 1024, 1536, 2048, 3072, 4096)


@functools.cache
def facts() -> dict[str, Any]:
    """Every deterministic number of the lesson's text and figures. No model, under a second."""
    gpu, decodes = HARDWARE["H100 80GB"], [(1, 2000)] * 32
    whole = H100_8B.operators([(10_000, 10_000)])
    flops = sum(f for f, _ in whole.values())
    curve = []
    for n in CHUNKS:
        work = [*decodes, *([(n, 2000 + n)] if n else [])]
        parts, operators, seconds = H100_8B.seconds(work), H100_8B.operators(work), H100_8B(work) / 1e6
        used, moved = (sum(x) for x in zip(*operators.values()))
        curve.append({
            "prompt_tokens": n, "ms": seconds * 1e3, **{k.replace(" ", "_") + "_ms": v * 1e3 for k, v in parts.items()},
            "intensity": used / moved, "flops_share": used / H100_8B.rate / seconds,
            "bandwidth_share": moved / H100_8B.bandwidth / seconds,
        })  # fmt: skip
    by_chunk = {str(row["prompt_tokens"]): row for row in curve}
    widget = {str(b): simulate(WIDGET_DEFAULT | {"budget": b}) for b in (8192, 2048, 512, 256, 64, 24, 16, 8)}
    crowd = WIDGET_DEFAULT | {"budget": 2048, "decoders": 2, "short_prompt": 64}
    caps = {"off": {}, "cap_256": {"threshold": 256}, "adaptive": {"threshold": 256, "adaptive": True}}
    capped = {name: simulate(crowd | change) for name, change in caps.items()}
    rows = {policy.replace(" ", "_"): ablation(policy) for policy in POLICIES}
    frozen = {str(row["budget"]): row for row in (freeze(H100_8B, budget) for budget in FREEZE_BUDGETS)}
    keys_read = sum(min(s + 480, 10_000) for s in range(0, 10_000, 480))  # keys of the context, once per chunk
    return {
        "ridge": gpu.ridge,
        "ridge_tokens": int(gpu.ridge),
        "free_seats": int(gpu.ridge) - 32,
        "step": {
            "decode_ms": by_chunk["0"]["ms"],
            "with_263_ms": by_chunk["263"]["ms"],
            "extra_ms": by_chunk["263"]["ms"] - by_chunk["0"]["ms"],
            "extra": by_chunk["263"]["ms"] / by_chunk["0"]["ms"] - 1,
            "with_2048_ms": by_chunk["2048"]["ms"],
            "decode_attention_intensity": H100_8B.pair_flops / H100_8B.token_bytes,
            **{f"flops_share_{n}": by_chunk[n]["flops_share"] for n in ("0", "263", "512", "2048")},
            **{f"bandwidth_share_{n}": by_chunk[n]["bandwidth_share"] for n in ("0", "263", "512", "2048")},
            **{f"intensity_{n}": by_chunk[n]["intensity"] for n in ("0", "263", "512", "2048")},
        },
        "curve": curve,
        "ten_thousand": {
            "pflop": flops / 1e15,
            "matrix_pflop": whole["matrix products"][0] / 1e15,
            "attention_share": whole["prompt attention"][0] / flops,
            "h100_ms": H100_8B([(10_000, 10_000)]) / 1e3,
            "claimed_tflop_s": flops / 2 / 1e12,
            "claimed_share": flops / 2 / gpu.flops,
            "chunks_480": len(range(0, 10_000, 480)),
            "keys_read_480": keys_read,
            "kv_reread_gb": keys_read * H100_8B.token_bytes / 1e9,
            "kv_reread_ms": keys_read * H100_8B.token_bytes / H100_8B.bandwidth * 1e3,
        },
        "freeze": frozen,
        "widget": {
            b: {"ttft_ms": t["ttft_us"] and t["ttft_us"] / 1e3, "gap_ms": t["worst_gap_us"] / 1e3,
                "steps": sum(1 for chunk in t["chunk"] if chunk > 1), "silent": t["silent_streams"]}
            for b, t in widget.items()
        },
        "cap": {
            name: {f"{key[:-3]}_ms": t[key] / 1e3 for key in ("ttft_us", "short_ttft_us", "worst_gap_us")}
            for name, t in capped.items()
        },
        "ablation": rows,
        "mixing_saves": 1 - rows["both"]["ttft_p50"] / rows["chunks_only"]["ttft_p50"],
        "published_mixing_saves": 1 - PUBLISHED_ABLATION["both"][0] / PUBLISHED_ABLATION["chunks only"][0],
        "tiles": {"grid_8b_512_32": 512 // 32 + 33, "exact_8b_512_32": -(-480 // 32) + 32},
    }  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from `facts()` and the committed measurements alone."""
    known = facts()
    return [
        _draw_timeline(folder), _draw_step(folder, known), _draw_budget(folder, known), _draw_ablation(folder, known),
    ]  # fmt: skip


def _draw_timeline(folder: str | Path) -> Path:
    """The widget's default under three budgets: steps as boxes, a watched stream's tokens as dots."""
    from matplotlib.patches import Rectangle

    budgets = (8192, 512, 64)
    figure, axes = common.new_figure(8.0, 3.6, nrows=3, sharex=True)
    for axis, budget in zip(axes, budgets):
        trace = simulate(WIDGET_DEFAULT | {"budget": budget})
        starts = [(t - trace["arrival_us"]) / 1e3 for t in (*trace["start_us"], trace["end_us"])]
        for i, chunk in enumerate(trace["chunk"]):
            color = common.COLORS["orange" if chunk > 1 else "light"]
            axis.add_patch(Rectangle((starts[i], 0), starts[i + 1] - starts[i], 1, facecolor=color, edgecolor="white",
                                     linewidth=0.6))  # fmt: skip
        axis.plot(starts[1:], [1.45] * (len(starts) - 1), ".", markersize=4, color=common.COLORS["blue"])
        ttft = trace["ttft_us"] / 1e3
        axis.plot([ttft], [0.5], "v", color=common.COLORS["ink"], markersize=8, clip_on=False)
        axis.set(ylim=(0, 2), xlim=(-40, 1180), yticks=[])
        axis.set_title(f"budget {budget:,}: first token after {ttft:,.0f} ms, others wait "
                       f"{trace['worst_gap_us'] / 1e3:,.0f} ms at most", fontsize=10)  # fmt: skip
        axis.spines["left"].set_visible(False)
    axes[-1].set_xlabel("ms after a prompt of 4,096 tokens arrives   (orange: steps with a chunk of it; "
                        "▼ its first token; dots: tokens of another stream)", fontsize=8.5)  # fmt: skip
    return common.save_figure(figure, folder, "10_timeline")


def _draw_step(folder: str | Path, known: dict[str, Any]) -> Path:
    """One step of 32 decodes and n prompt tokens: what it costs, and which ceilings it uses."""
    rows = known["curve"]
    x = [row["prompt_tokens"] for row in rows]
    figure, (left, right) = common.new_figure(8.0, 3.5, ncols=2)
    keys = ("matrix_products_ms", "decode_attention_ms", "prompt_attention_ms")
    left.stackplot(x, [[row[key] for row in rows] for key in keys], labels=[k[:-3].replace("_", " ") for k in keys],
                   colors=[common.COLORS[c] for c in ("blue", "green", "orange")], linewidth=0)  # fmt: skip
    left.set(xlim=(0, 1024), ylim=(0, 20), xlabel="prompt tokens beside 32 decodes", ylabel="ms, operators alone",
             xticks=range(0, 1025, 256), yticks=range(0, 21, 5),
             title="An H100's step: flat, then a slope")  # fmt: skip
    left.legend(loc="upper left", fontsize=8.5, frameon=True, framealpha=1, edgecolor="none")
    for share, color, label in (("flops_share", "blue", "FLOP/s"), ("bandwidth_share", "red", "bandwidth")):
        right.plot([max(n, 8) for n in x], [100 * row[share] for row in rows], color=common.COLORS[color], linewidth=2)
        right.text(4300, 100 * rows[-1][share], label, color=common.COLORS[color], va="center", fontsize=9)
    right.set(xscale="log", xlim=(8, 4096), ylim=(0, 100), xlabel="prompt tokens beside 32 decodes",
              ylabel="% of the ceiling", title="Which ceiling it uses", xticks=[8, 32, 128, 512, 2048],
              xticklabels=["0", "32", "128", "512", "2,048"])  # fmt: skip
    right.minorticks_off()
    for axis in (left, right):
        axis.axvline(known["free_seats"], color=common.COLORS["grey"], linewidth=1, linestyle=":")
    left.text(known["free_seats"] + 12, 0.6, f"{known['free_seats']}", fontsize=9, color="white")
    return common.save_figure(figure, folder, "10_step")


def _draw_budget(folder: str | Path, known: dict[str, Any]) -> Path:
    """What the budget trades: TTFT of the newcomer against the silence of the others."""
    from matplotlib.ticker import LogLocator, NullLocator

    measured = common.results(KEY).get("bench", {}).get("budgets", [])
    figure, axes = common.new_figure(8.0, 3.5, ncols=2 if measured else 1, squeeze=False)
    panels = [("10,000 tokens, 8B on an H100, by roofline", [(r["ttft_ms"], r["gap_ms"], r["budget"]) for r in
               known["freeze"].values()], "ms", {"16384": "whole"})]  # fmt: skip
    if measured:
        points = [(r["ttft_s"], r["gap_s"], r["budget"]) for r in measured]
        panels.append(("1,500 tokens, SmolLM2 on two CPU cores", points, "s", {"1504": "whole"}))
    for axis, (title, points, unit, names) in zip(axes[0], panels):
        points.sort(key=lambda point: point[2])
        axis.plot([p[0] for p in points], [p[1] for p in points], "o-", markersize=5, color=common.COLORS["blue"])
        for (ttft, gap, budget), (after, _, _) in zip(points, [*points[1:], points[-1]]):
            left = after > ttft  # where the curve leans right, its left side is free
            axis.annotate(names.get(str(budget), f"{budget:,}"), (ttft, gap), xytext=(-6, -4) if left else (5, 5),
                          textcoords="offset points", ha="right" if left else "left", fontsize=8.5)  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel=f"time to first token of the newcomer, {unit}",
                 ylabel=f"longest silence of the others, {unit}", title=title)  # fmt: skip
        axis.margins(0.12)
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter(lambda value, _: f"{value:,g}")
            side.set_minor_locator(NullLocator())
    return common.save_figure(figure, folder, "10_budget")


def _draw_ablation(folder: str | Path, known: dict[str, Any]) -> Path:
    """The four policies, ours and the paper's three, in one plane."""
    figure, axis = common.new_figure(8.0, 3.4)
    ours = {policy: known["ablation"][policy.replace(" ", "_")] for policy in POLICIES}
    for points, marker, color, label in (
        ({k: (v["ttft_p50"], v["tbt_p99"]) for k, v in ours.items()}, "o", "blue", "ours, simulated"),
        (PUBLISHED_ABLATION, "s", "orange", "Agrawal et al. 2024, measured"),
    ):
        axis.plot([p[0] for p in points.values()], [p[1] for p in points.values()], marker, color=common.COLORS[color],
                  markersize=7, label=label)  # fmt: skip
        for name, point in points.items():
            below = name == "neither"
            axis.annotate(name, point, xytext=(0, -14) if below else (8, 4), textcoords="offset points", fontsize=9,
                          ha="center" if below else "left", color=common.COLORS[color])  # fmt: skip
    axis.set(xlim=(0.3, 1.25), ylim=(0, 0.8), xlabel="median time to first token, s",
             ylabel="P99 time between tokens, s")  # fmt: skip
    axis.legend(loc="upper right")
    return common.save_figure(figure, folder, "10_ablation")


# --- Measurements ---------------------------------------------------------------------------------------------------


def random_batch(work: Work, Hq: int, Hkv: int, D: int, dtype: torch.dtype) -> tuple:
    """Arguments of `unified_attention` for sequences of these (new tokens, context), on shuffled blocks of 16."""
    device, lens = common.device(), [-(-S // 16) for _, S in work]
    table, ids = torch.zeros(len(work), max(lens), dtype=torch.int32), (torch.randperm(sum(lens)) + 1).int()
    for b, (count, end) in enumerate(zip(lens, itertools.accumulate(lens))):
        table[b, :count] = ids[end - count : end]
    start_loc = torch.tensor([0, *itertools.accumulate(n for n, _ in work)], device=device)
    seq_lens = torch.tensor([S for _, S in work], dtype=torch.int32, device=device)
    cache = torch.randn(2, sum(lens) + 1, 16, Hkv, D, dtype=dtype, device=device)
    q = torch.randn(sum(n for n, _ in work), Hq, D, dtype=dtype, device=device)
    return q, cache, table.to(device), start_loc, seq_lens, max(n for n, _ in work)


def measure_kernel(long: bool) -> list[dict[str, Any]]:
    """On a GPU: one launch for a mixed batch, beside its two halves launched apart; 8B heads, bf16."""
    Hq, Hkv, D, rows = 32, 8, 128, []
    cases = {"a prompt of 8,192": (0, 8192, 8192), "2,048 at 16,384": (0, 2048, 16384),
             "512 at 8,192, 32 decodes": (32, 512, 8192), "32 decodes": (32, 0, 0)}  # fmt: skip
    for name, (decodes, n, S) in cases.items() if long else list(cases.items())[1:3]:
        work = [(1, 4096)] * decodes + [(n, S)] * (n > 0)
        batch = q, cache, table, start_loc, seq_lens, longest = random_batch(work, Hq, Hkv, D, torch.bfloat16)
        halves = []
        if decodes:
            halves.append(
                functools.partial(paged.paged_decode, q[:decodes], cache, table[:decodes], seq_lens[:decodes], 4096)
            )
        if n:
            halves.append(functools.partial(unified_attention, q[decodes:], cache, table[decodes:],
                                            start_loc[decodes:] - decodes, seq_lens[decodes:], longest))  # fmt: skip
        seconds = common.measure_graph(functools.partial(unified_attention, *batch)).median
        apart = sum(common.measure_graph(half).median for half in halves)
        pairs = sum(m * c - m * (m - 1) // 2 for m, c in work)
        moved = 4 * Hkv * D * sum(c for _, c in work)  # keys and values, two bytes each
        rows.append({"case": name, "us": seconds * 1e6, "tflop_s": 4 * Hq * D * pairs / seconds / 1e12,
                     "gb_s": moved / seconds / 1e9, "apart_us": apart * 1e6})  # fmt: skip
    return rows


# --- The story ------------------------------------------------------------------------------------------------------

QUESTION = "Which is the largest planet of the solar system? Answer with its name alone."
DECODERS = ("Once upon a time, in a small village by the sea,", "The three laws of motion say that",
            "A recipe for bread:", "The history of the bicycle begins in", "Dear Sir or Madam, I am writing to",
            "Water boils when")  # fmt: skip


def long_prompt(tokenizer: llama.Tokenizer, length: int) -> list[int]:
    """`length` tokens of Python's own language reference, which every Python brings along."""
    from pydoc_data import topics

    tokens: list[int] = []
    for name in sorted(topics.topics):
        tokens += tokenizer.encode(topics.topics[name])
        if len(tokens) >= length:
            break
    return tokens[:length]


def build_parser() -> argparse.ArgumentParser:
    p = common.parser(__doc__)
    p.add_argument("--budget", type=common.number(int, 1, 8192),
                   help="tokens per step (default 256 or, if that is less, the whole prompt and the decodes; with no "
                        "more than --decoders, the prompt starves)")  # fmt: skip
    p.add_argument("--prompt-tokens", type=common.number(int, 16, 4000), default=1500,
                   help="length of the prompt that arrives (default 1500)")  # fmt: skip
    p.add_argument("--decoders", type=common.number(int, 0, len(DECODERS)), default=4,
                   help="requests that are being answered when it arrives (default 4)")  # fmt: skip
    p.add_argument("--threshold", type=common.number(int, 0, 4000), default=0,
                   help="long_prefill_token_threshold (default 0: off)")  # fmt: skip
    return p


def check_kernel() -> None:
    """Both paths of `unified_attention` against the reference: a mixed batch at SmolLM2's heads."""
    batch = random_batch([(1, 33), (1, 17), (19, 19), (11, 50)], 9, 3, 64, torch.float32)
    batch[1][:, 0] = 0  # the null block
    reference = mixed_attention_reference(*batch[:-1]).to(common.device())
    common.say("Two decodes, a prompt's first 19 tokens, and tokens 40–50 of another, in one call:")
    if not common.HAS_GPU:
        common.check("torch path", unified_attention(*batch), reference)
    if not common.HAS_TRITON:
        common.skipped("the Triton kernel", common.kernel_mode())
        return
    with common.use_kernels():
        common.check(f"Triton kernel ({common.kernel_mode()})", unified_attention(*batch), reference)


def show_chunks(model: llama.Llama, tokenizer: llama.Tokenizer) -> None:
    """Chunked equals whole on the real model, and what a chunk's last position would have said."""
    prompt = tokenizer.ask(QUESTION)
    tokens = {b: arrival_among_decodes(model, [], prompt, b, 8)["tokens"][0] for b in (len(prompt), 16, 5)}
    common.check_equal(f"a prompt of {len(prompt)} tokens, whole, in chunks of 16, in chunks of 5: the same 8 tokens",
                       [tokens[16], tokens[5]], [tokens[len(prompt)]] * 2)  # fmt: skip
    if common.HAS_TRITON:
        small, before = llama.random_model(device=model.device), unified_attention_kernel.launches
        mixture = (small, [[1, 2], [3]], range(4, 24), 8, 4)  # two decodes, 20 tokens arrive, budget 8
        with common.use_kernels():
            run = arrival_among_decodes(*mixture)
        launches = unified_attention_kernel.launches - before
        common.check_equal(
            f"the engine on the Triton kernel (a random model of 2 layers, {launches} launches): the same tokens",
            run["tokens"], arrival_among_decodes(*mixture)["tokens"],
        )  # fmt: skip
    guesses = early_guesses(model, prompt, 16)
    common.say("What the last position of each chunk predicts, and what it is worth:")
    for computed, guess, known in guesses:
        said = tokenizer.decode([guess], False)
        verdict = (
            "the answer's first token" if known is None else f"known already: {tokenizer.decode([known], False)!r}"
        )
        common.say(f"  after {computed:>3} of {len(prompt)} tokens: {said!r:<14} {verdict}")


def show_arrival(args: argparse.Namespace, model: llama.Llama, tokenizer: llama.Tokenizer) -> dict[str, Any]:
    """The same requests with the prompt whole and in chunks: the same tokens, at other times."""
    decoders = [tokenizer.encode(text) for text in DECODERS[: args.decoders]]
    prompt = long_prompt(tokenizer, args.prompt_tokens)
    whole = args.prompt_tokens + args.decoders
    budgets = [whole, args.budget]
    if args.bench:
        budgets = [whole, *sorted({args.budget, 16, 32, 64, 128, 256, 512, 1024}, reverse=True)]
    runs, rows = [], []
    arrive = lambda n: arrival_among_decodes(model, decoders, prompt, n, 24 if args.bench else 16, args.threshold)  # noqa: E731
    arrival_among_decodes(model, decoders, prompt[:64], 256, 4)  # warm up
    if common.HAS_GPU:  # which compiles for the shapes of a budget when it first meets them
        list(map(arrive, budgets))
    for budget in budgets:
        run = arrive(budget)
        runs.append(run)
        rows.append([f"budget {budget:,}" + (" (whole)" if budget == whole else ""), run["chunks"],
                     f"{run['ttft_s']:.2f} s", f"{run['gap_s'] * 1e3:,.0f} ms" if decoders else "–"])  # fmt: skip
    common.table(["", "chunks", "TTFT of the prompt", "longest silence of the others"], rows)
    common.check_equal("everybody's tokens are the same under every budget", [run["tokens"] for run in runs[1:]],
                       [runs[0]["tokens"]] * (len(runs) - 1))  # fmt: skip
    if args.budget <= args.decoders:
        common.say(f"STARVED: {args.decoders} decodes use all {args.budget} tokens of a step. Nothing of the prompt "
                   "was computed until one of them had finished.")  # fmt: skip
    a, b = fit_line(step for run in runs for step in run["steps"])
    if min(a, b) > 0:
        common.say(f"A step here takes about {a * 1e3:.0f} ms + {b * 1e3:.2f} ms per token.")
    else:
        common.skipped("the line for a step", "noise: neither the constant nor the slope can be below 0")
    return {
        "budgets": [{k: run[k] for k in ("budget", "ttft_s", "gap_s", "chunks")} for run in runs],
        "fit": {"step_ms": a * 1e3, "token_ms": b * 1e3},
        "whole_over_256": {
            key: runs[0][key] / run[key]
            for run in runs if run["budget"] == 256 for key in ("ttft_s", "gap_s") if run[key]
        },
    }  # fmt: skip


def print_step(known: dict[str, Any]) -> None:
    """The roofline of a mixed step, and the frozen 10,000."""
    rows = [[f"32 decodes + {n}", f"{row['matrix_products_ms']:.2f}", f"{row['prompt_attention_ms']:.2f}",
             f"{row['decode_attention_ms']:.2f}", f"{row['ms']:.2f}", f"{row['flops_share']:.0%}",
             f"{row['bandwidth_share']:.0%}"] for row in known["curve"]
            if (n := row["prompt_tokens"]) in (0, 64, 263, 512, 2048)]  # fmt: skip
    common.table(
        ["tokens in the step", "matmuls", "prompt att.", "decode att.", "step, ms", "FLOP/s", "bandwidth"], rows
    )
    common.say(f"Ridge: {known['ridge_tokens']} tokens. 32 are decodes, {known['free_seats']} places are left: filling "
               f"them makes the step {known['step']['extra']:.1%} longer.")  # fmt: skip
    rows = [[f"{row['budget']:,}", row["steps"], f"{row['ttft_ms']:,.0f} ms", f"{row['gap_ms']:,.1f} ms"]
            for row in known["freeze"].values() if row["budget"] in (16384, 2048, 512, 256, 64, 48)]  # fmt: skip
    common.table(["10,000 tokens arrive; budget", "steps", "TTFT", "others' longest silence"], rows)


def print_schedule(known: dict[str, Any]) -> None:
    """The simulation: the default, the cap, the starving budget."""
    for line in describe(simulate(WIDGET_DEFAULT)).splitlines():
        common.say(line)
    rows = [[name, *(f"{row[key]:,.1f} ms" for key in ("ttft_ms", "short_ttft_ms", "worst_gap_ms"))]
            for name, row in zip(("no cap", "threshold 256", "256, adaptive"), known["cap"].values())]  # fmt: skip
    common.table(["budget 2,048, 2 streams; 64 behind 4,096", "TTFT of 4,096", "TTFT of 64", "silence"], rows)
    common.say("Break it: " + describe(simulate(WIDGET_DEFAULT | {"budget": 16})).splitlines()[-1])


def print_ablation(known: dict[str, Any]) -> None:
    """Whether the published ordering holds here."""
    rows = []
    for policy in POLICIES:
        ours, theirs = known["ablation"][policy.replace(" ", "_")], PUBLISHED_ABLATION.get(policy)
        rows.append([policy, f"{ours['ttft_p50']:.2f} s", f"{ours['tbt_p99']:.2f} s",
                     *(f"{x:.2f} s" for x in theirs or ())] + ([] if theirs else ["–", "–"]))  # fmt: skip
    common.table(["Yi-34B, 2 × A100", "P50 TTFT", "P99 TBT", "paper: TTFT", "TBT"], rows)
    order = lambda key: sorted(PUBLISHED_ABLATION, key=key)  # noqa: E731
    ours = {policy: known["ablation"][policy.replace(" ", "_")] for policy in PUBLISHED_ABLATION}
    common.check_equal("the three policies stand in the paper's order, in both columns",
                       (order(lambda p: ours[p]["ttft_p50"]), order(lambda p: ours[p]["tbt_p99"])),
                       tuple(order(lambda p, i=i: PUBLISHED_ABLATION[p][i]) for i in (0, 1)))  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    whole = args.prompt_tokens + args.decoders
    args.budget = args.budget or min(256, whole)
    if args.budget > whole:
        raise common.InputError(f"--budget {args.budget}: allowed: at most --prompt-tokens + --decoders ({whole}): "
                                "the whole prompt in one step")  # fmt: skip
    if args.threshold > args.prompt_tokens:
        raise common.InputError(f"--threshold {args.threshold}: allowed: at most --prompt-tokens "
                                f"({args.prompt_tokens}): nobody asks for more")  # fmt: skip
    machine, known = common.start(args), facts()
    llama.check_context(args.model, max(128, args.prompt_tokens + (25 if args.bench else 17)))

    common.heading("1 · One kernel for prompts, chunks and decodes")
    check_kernel()

    common.heading("2 · Chunked is whole, and a chunk has nothing to say")
    model, tokenizer = llama.load(args.model)
    show_chunks(model, tokenizer)

    common.heading("3 · The budget at work: simulate(), on the real scheduler")
    print_schedule(known)

    common.heading("4 · Both bottlenecks in one step: Llama-3.1-8B in bf16 on an H100, by roofline")
    print_step(known)

    common.heading("5 · Sarathi-Serve's ablation, on this scheduler and a roofline")
    print_ablation(known)

    common.heading(f"6 · Measured: a prompt of {args.prompt_tokens:,} tokens arrives among {args.decoders} answers")
    bench = show_arrival(args, model, tokenizer)
    if common.HAS_GPU:
        bench["kernel"] = measure_kernel(args.bench)
        bench["copy_gb_s"] = common.copy_bandwidth() / 1e9
        bench["matmul_tflop_s"] = common.matmul_rate(torch.bfloat16) / 1e12
        common.table(["8B heads, bf16", "one launch", "TFLOP/s", "GB/s", "two launches"], [
            [r["case"], f"{r['us']:.0f} µs", f"{r['tflop_s']:.0f}", f"{r['gb_s']:,.0f}", f"{r['apart_us']:.0f} µs"]
            for r in bench["kernel"]])  # fmt: skip
    else:
        common.skipped("the kernel's TFLOP/s", "needs a GPU")

    if args.figure:
        draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": known, "bench": bench})


if __name__ == "__main__":
    common.run(main)

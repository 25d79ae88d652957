"""09 · GQA, MQA, MLA: fewer keys and values, in the model itself.

The question: the cache costs bytes per token and KV head. Does every query head need keys and values of its own, and
what does a model give up, and its kernels change, when they share?

The mechanism:
  1. Multi-head attention (MHA) keeps a key and a value per query head. Multi-query (MQA) keeps one for all of them,
     grouped-query (GQA) one per group of G: query head h reads KV head h // G.
  2. The cache shrinks by G. So do the bytes of a decode step, if the kernel loads a KV head once for its whole group:
     the group's query heads are the rows of one tile.
  3. A wrong map, h % Hkv, has the right shapes, and is right for MHA and for MQA. Only in between is it wrong.
  4. Multi-head latent attention (MLA) keeps a vector of 512 per token, from which every head makes its own keys and
     values, and 64 numbers that carry the position: 576 elements, what GQA would need for 2.25 groups.
  5. For decoding, the matrices that make keys and values are folded into the query and the output. What is left is
     MQA: one KV head of 576, whose value is the first 512 elements of its key.
  6. A rotation between query and key would forbid the folding; that is why position travels in its own 64 elements.
  7. Tensor parallelism splits heads. Where there are fewer KV heads than GPUs, each is copied: one head is not less
     than eight on eight GPUs.

Numbers to remember: 32 layers of 32 heads of 128, bf16: 512 KiB per token for MHA, 128 for GQA-8, 16 for MQA. On eight
GPUs, per GPU: 64, 16, and again 16.

How to run:
  uv run python vllm/09_gqa.py                       the whole story
  uv run python vllm/09_gqa.py --head-map tiled      break it: every shape is right, the model talks nonsense
  uv run python vllm/09_gqa.py --bench               minutes: heads against time, perplexity on 5,120 tokens
  uv run python vllm/09_gqa.py --heal 4              4 minutes of training that a model with pooled heads needs

Read for this: Shazeer 2019 (MQA), Ainslie et al. 2023 (GQA), DeepSeek-V2 2024 (MLA), Pope et al. 2022 (replicated
heads), vLLM 0.32 `model_executor/layers/attention/mla_attention.py` and `v1/attention/ops/triton_decode_attention.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import tl, triton

from engine.model import llama, loader, rope
from engine.model.tokenizer import Tokenizer
from lab import roofline

KEY = "09_gqa"
kv_cache_lesson = common.lesson("01_kv_cache")
paged = common.lesson("02_paged_attention")
from engine.attention.torch_paged import gather_plan

KVCacheSpec, causal_attention = roofline.KVCacheSpec, kv_cache_lesson.causal_attention


# --- Who reads what: the head map, and attention that follows it --------------------------------------------------


def interleaved(Hq: int, Hkv: int) -> list[int]:
    """The KV head that each query head reads: neighbours share. h -> h // G with G = Hq / Hkv."""
    return [h // (Hq // Hkv) for h in range(Hq)]


def tiled(Hq: int, Hkv: int) -> list[int]:
    """The bug: h -> h mod Hkv, what `k.repeat(1, G, 1)` does where `k.repeat_interleave(G, 1)` was meant."""
    return [h % Hkv for h in range(Hq)]


LOG2E = math.log2(math.e)
HEAD_MAPS: dict[str, Callable[[int, int], list[int]]] = {"interleaved": interleaved, "tiled": tiled}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Sequence[int],
              scale: float | None = None) -> torch.Tensor:  # fmt: skip
    """Causal attention, one query head at a time: head h reads KV head heads[h].

    Shapes: q [T, Hq, D], the last T of S positions; k [S, Hkv, D], v [S, Hkv, Dv] -> [T, Hq, Dv].
    """
    one = [causal_attention(q[:, h : h + 1], k[:, i : i + 1], v[:, i : i + 1], scale) for h, i in enumerate(heads)]
    return torch.cat(one, dim=1)


# --- The kernels: one load of a KV head for its whole group -------------------------------------------------------
#
# Both kernels have one number in common, HEADS: how many query heads of a group share a program and with it each load.
# HEADS = G packs the group into the rows of one tile: every key leaves memory once. HEADS = 1 is the kernel that one
# writes from the MHA formula: right, and it reads every key G times. Nothing else differs between the two.
#
# The softmax is lesson 03's, in powers of two: s arrives multiplied by log2 e, and 2^(s·log2 e) = e^s.


@triton.jit
def softmax_step(s, m, l):
    """Weights of one more tile of scores s [M, N] under the new maximum, and what the old sums are worth under it."""
    m_new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.math.exp2(m - m_new)
    w = tl.math.exp2(s - m_new[:, None])
    return w, alpha, m_new, l * alpha + tl.sum(w, 1)


@common.kernel
def gqa_decode_kernel(q, kv_cache, block_table, seq_lens, out, lse, scale, stride_q, stride_kv, table_width: tl.int32,
                      Hq: tl.constexpr, Hkv: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                      HEADS: tl.constexpr, ROWS: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
                      SPLITS: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    b, split = tl.program_id(0), tl.program_id(2)
    first = tl.program_id(1) * HEADS  # this program's query heads: [first, first + HEADS)
    kv_head = first // (Hq // Hkv)  # the head map. HEADS divides G, so all of them agree
    S = tl.load(seq_lens + b)
    length = tl.cdiv(tl.cdiv(S, TILE), SPLITS) * TILE
    start = split * length
    end = tl.minimum(start + length, S)

    g, d = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    inside = (g < HEADS)[:, None] & (d < D)[None, :]
    head = (first + g)[:, None]
    q_tile = tl.load(q + b * stride_q + head * D + d[None, :], mask=inside, other=0.0)  # [ROWS, D]
    if UPCAST:  # Triton's interpreter multiplies 16-bit floats wrongly; a GPU wants them as they are
        q_tile = q_tile.to(tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for n in range(start, end, TILE):
        p = n + tl.arange(0, TILE)
        live = p < end
        block = tl.load(block_table + b * table_width + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        key = kv_cache + (((block * BLOCK_SIZE + p % BLOCK_SIZE) * Hkv + kv_head) * D)[:, None] + d[None, :]
        k = tl.load(key, mask=(d < D)[None, :], other=0.0)  # [TILE, D]: once for HEADS query heads
        # A dead position reads the null block, whatever it holds: 0 · NaN is NaN, so a weight of 0 is no mask.
        v = tl.load(key + stride_kv, mask=live[:, None] & (d < D)[None, :], other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        s = tl.dot(q_tile, k.T, input_precision="ieee") * scale  # [ROWS, TILE]
        w, alpha, m, l = softmax_step(tl.where(live[None, :], s, float("-inf")), m, l)
        acc = tl.dot(w.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    l = tl.where(l > 0, l, 1.0)  # no key at all (an empty sequence or split): acc is 0 and m is −inf
    part = (b * Hq + head) * SPLITS + split  # [ROWS, 1]
    tl.store(out + part * D + d[None, :], (acc / l[:, None]).to(out.dtype.element_ty), mask=inside)
    if SPLITS > 1:  # log Σ exp, in natural units: lesson 02's kernel combines the splits
        tl.store(lse + part, ((m + tl.math.log2(l)) * 0.6931471805599453)[:, None], mask=(g < HEADS)[:, None])


def gqa_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
    heads_per_load: int | None = None, num_splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Decode attention for any Hq : Hkv, through a block table.

    Semantics: out[b, h] = Σ_j softmax_j(q[b, h]·k_j / √D) v_j, with k_j, v_j of KV head h // G, j < seq_lens[b].
    Shapes: q [B, Hq, D] (sequence stride free), kv_cache [2, num_blocks, block_size, Hkv, D], block_table int32 [B, W],
    seq_lens int32 [B] -> [B, Hq, D]. `heads_per_load` (a divisor of G; default G) is how many query heads share a load
    of their KV head: the result is the same, the bytes are G / heads_per_load times as many. Raises ValueError.
    vLLM 0.32: v1/attention/ops/triton_decode_attention.py, whose stage 1 comes in a normal and a grouped version.
    """
    (B, Hq, D), (block_size, Hkv) = q.shape, kv_cache.shape[2:4]
    heads = check_heads(Hq, Hkv, heads_per_load)
    if not common.runs_kernel(q):
        return paged.plan_decode(block_table, seq_lens, kv_cache, Hq)(q, kv_cache)
    if B == 0:
        return torch.empty_like(q)
    splits = num_splits or paged.default_splits(B * Hq // heads, max_seq_len, q.device)
    out, parts, lse = split_buffers(q, D, splits)
    D_pad, rows = max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(heads))
    tile, num_warps, num_stages = paged.decode_tiles(q.dtype, D_pad, q.is_cuda and not torch.version.hip, rows)
    gqa_decode_kernel[(B, Hq // heads, splits)](
        q, kv_cache, block_table, seq_lens, parts, lse, LOG2E / math.sqrt(D), q.stride(0), kv_cache.stride(0),
        block_table.stride(0), Hq=Hq, Hkv=Hkv, D=D, BLOCK_SIZE=block_size, HEADS=heads,
        ROWS=rows, D_PAD=D_pad, TILE=tile, SPLITS=splits,
        UPCAST=common.INTERPRET, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return combine(parts, lse, out)


def check_heads(Hq: int, Hkv: int, heads_per_load: int | None) -> int:
    """How many query heads share a load: all G of a group unless said otherwise. Raises ValueError if not a divisor."""
    G = Hq // Hkv
    if Hq % Hkv or G % (heads_per_load or G):
        raise ValueError(f"{Hq} query heads, {Hkv} KV heads, {heads_per_load} heads per load: each must divide the one "
                         "before it, as groups")  # fmt: skip
    return heads_per_load or G


def split_buffers(q: torch.Tensor, width: int, splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [B, Hq, width], what the splits write [B, Hq, splits, width], their log-sum-exps); one split writes out."""
    B, Hq = q.shape[:2]
    out = torch.empty(B, Hq, width, dtype=q.dtype, device=q.device)
    if splits == 1:
        return out, out, out
    parts = torch.empty(B, Hq, splits, width, dtype=torch.float32, device=q.device)
    return out, parts, torch.empty(B, Hq, splits, dtype=torch.float32, device=q.device)


def combine(parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Merge the splits by their log-sum-exps, with lesson 02's kernel; a single split has written `out` itself.

    Semantics: out[b, h] = Σ_i exp(lse[b, h, i]) parts[b, h, i] / Σ_i exp(lse[b, h, i]).
    Shapes: parts [B, Hq, splits, width] (splits a power of two), lse [B, Hq, splits], out [B, Hq, width] -> out.
    """
    if parts is not out:
        B, Hq, splits, width = parts.shape
        wide = triton.next_power_of_2(width)
        warps = 4 if splits * wide <= 8192 else 16
        paged.combine_splits_kernel[(B * Hq,)](parts, lse, out, D=width, D_PAD=wide, SPLITS=splits, num_warps=warps)
    return out


@common.kernel
def gqa_prefill_kernel(q, k, v, query_start_loc, out, scale, stride_q, stride_k, stride_v,
                       Hq: tl.constexpr, Hkv: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
                       BLOCK_M: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
                       UPCAST: tl.constexpr):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS  # query positions in a tile of BLOCK_M rows
    first = tl.program_id(1) * HEADS
    kv_head = first // (Hq // Hkv)
    b = tl.program_id(2)
    start = tl.load(query_start_loc + b).to(tl.int64)
    S = (tl.load(query_start_loc + b + 1) - start).to(tl.int32)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    if tile * BLOCK_Q >= S:
        return

    r, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    t, head = tile * BLOCK_Q + r // HEADS, first + r % HEADS  # row r: a query position and a head of the group
    column = (d < D)[None, :]
    inside = ((r < BLOCK_Q * HEADS) & (t < S))[:, None] & column
    row = (start + t)[:, None]
    q_tile = tl.load(q + row * stride_q + head[:, None] * D + d[None, :], mask=inside, other=0.0)  # [BLOCK_M, D]
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    end = tl.minimum(S, (tile + 1) * BLOCK_Q)  # causality: no query in this tile sees a key from there on
    for n in range(0, end, TILE):
        p = n + tl.arange(0, TILE)
        live = (p < end)[:, None] & column
        place = kv_head * D + d[None, :]
        k_tile = tl.load(k + (start + p)[:, None] * stride_k + place, mask=live, other=0.0)  # [TILE, D]
        v_tile = tl.load(v + (start + p)[:, None] * stride_v + place, mask=live, other=0.0)
        if UPCAST:
            k_tile, v_tile = k_tile.to(tl.float32), v_tile.to(tl.float32)
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale  # [BLOCK_M, TILE]
        s = tl.where(p[None, :] <= t[:, None], s, float("-inf"))
        w, alpha, m, l = softmax_step(s, m, l)
        acc = tl.dot(w.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")

    o = acc / l[:, None]  # key 0 is visible to every row, so ℓ > 0
    tl.store(out + (row * Hq + head[:, None]) * D + d[None, :], o.to(out.dtype.element_ty), mask=inside)


def gqa_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start_loc: torch.Tensor, max_query_len: int,
                heads_per_load: int | None = None) -> torch.Tensor:  # fmt: skip
    """Causal attention of whole prompts, packed end to end, for any Hq : Hkv.

    Semantics: out[t, h] = Σ_j softmax_j(q[t, h]·k[j, h // G] / √D) v[j, h // G], j ≤ t within t's own prompt.
    Shapes: q [T, Hq, D]; k, v [T, Hkv, D] (token strides free); query_start_loc [B + 1] -> [T, Hq, D].
    `heads_per_load` as in `gqa_decode`. `max_query_len` ≥ every prompt's length. Raises ValueError.
    vLLM 0.32: v1/attention/ops/triton_unified_attention.py packs a group's heads into rows in the same way.
    """
    (T, Hq, D), Hkv = q.shape, k.shape[1]
    heads = check_heads(Hq, Hkv, heads_per_load)
    out = torch.empty(T, Hq, D, dtype=q.dtype, device=q.device)
    if not common.runs_kernel(q):
        for a, z in zip(bounds := query_start_loc.tolist(), bounds[1:]):
            out[a:z] = paged.prefill_attention(q[a:z], k[a:z], v[a:z])
        return out
    if T == 0:
        return out
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda and not torch.version.hip else None
    block_m, tile, num_warps, num_stages = prefill_tiles(q.dtype, D, heads, capability)
    grid = (triton.cdiv(max_query_len, block_m // heads), Hq // heads, len(query_start_loc) - 1)
    gqa_prefill_kernel[grid](
        q, k, v, query_start_loc, out, LOG2E / math.sqrt(D), q.stride(0), k.stride(0), v.stride(0), Hq=Hq, Hkv=Hkv,
        D=D, HEADS=heads, BLOCK_M=block_m, D_PAD=max(16, triton.next_power_of_2(D)), TILE=tile,
        UPCAST=common.INTERPRET, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def prefill_tiles(dtype: torch.dtype, D: int, heads: int,
                  capability: tuple[int, int] | None = None) -> tuple[int, int, int, int]:  # fmt: skip
    """(rows, keys per tile, warps, stages). Found by compiling: these spill on no GPU that the tests compile for."""
    least = triton.next_power_of_2(heads)  # a tile holds the group's heads at least once
    if dtype == torch.float32:  # no tensor cores for exact fp32
        return (max(16, least), 32, 8, 1) if D > 64 else (max(32, least), 32, 8, 2) if heads > 1 else (16, 32, 4, 2)
    if capability == (9, 0) and D <= 128:
        return max(128, least), 64, 8, 3
    return max(64, least), 64 if D <= 64 else 32, 4, 2


class GroupedKVCache(paged.PagedKVCache):
    """Lesson 02's paged cache with this lesson's kernels: prompts in one launch, decodes in another."""

    def attend(self, meta: paged.AttentionMetadata) -> llama.Attend:
        """For a step of whole prompts, or of sequences with one new token each (lesson 10 has one kernel for both)."""
        longest = max(meta.query_lens)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            paged.reshape_and_cache(k, v, self.layers[layer], meta.slot_mapping)
            if longest > 1:
                return gqa_prefill(q, k, v, meta.query_start_loc, longest)
            return gqa_decode(q, self.layers[layer], meta.block_table, meta.seq_lens, meta.max_seq_len)

        return attend


# --- MLA: one latent for all heads --------------------------------------------------------------------------------
#
# Token s leaves c_s [R] and a rotated key r_s [P] behind, R = 512 and P = 64. Head h makes from them
#
#     key    [W_UK^h c_s ; r_s]     and value    W_UV^h c_s          W_UK^h [N, R], W_UV^h [V, R]
#
# Naive: make them, for every head and cached token, and attend. Absorbed: a score is a bilinear form in which the
# matrix can stand on either side, and the sum over values can be taken before the matrix:
#
#     q·(W_UK c_s) = (W_UKᵀ q)·c_s               Σ_s w_s (W_UV c_s) = W_UV (Σ_s w_s c_s)
#
# So with the query [W_UKᵀ q ; q_rope] [R + P], all heads attend to the *same* key [c_s ; r_s], whose first R elements
# are also the value: MQA with one head of 576. If keys were rotated by position, q·(Rot_{s−t} W_UK c_s) would put a
# matrix that depends on s between them, and nothing could be folded: so position has its own P elements.


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Field names are those of DeepSeek's config.json; the defaults are DeepSeek-V2-Lite's."""

    hidden_size: int = 2048
    num_attention_heads: int = 16  # H
    kv_lora_rank: int = 512  # R
    qk_nope_head_dim: int = 128  # N
    qk_rope_head_dim: int = 64  # P
    v_head_dim: int = 128  # V
    rope_theta: float = 10000.0


class MLA:
    """One layer of multi-head latent attention. (V2 and V3 also compress the query; that changes nothing here.)"""

    def __init__(self, config: MLAConfig, tensors: Callable[[str, int, int], torch.Tensor]) -> None:
        """`tensors(name, out, in)` returns a weight under the checkpoint's name."""
        c = self.config = config
        H, N, R, P, V = (c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank, c.qk_rope_head_dim, c.v_head_dim)
        self.q_proj = tensors("q_proj", H * (N + P), c.hidden_size)
        self.kv_a_proj = tensors("kv_a_proj_with_mqa", R + P, c.hidden_size)
        self.kv_a_norm = tensors("kv_a_layernorm", R, 1).flatten()
        self.o_proj = tensors("o_proj", c.hidden_size, H * V)
        self.kv_b_proj = tensors("kv_b_proj", H * (N + V), R)
        self.W_UK, self.W_UV = self.kv_b_proj.view(H, N + V, R).split((N, V), dim=1)  # [H, N, R], [H, V, R]
        self.scale = (N + P) ** -0.5

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [T, hidden] -> queries [T, H, N + P], rotated in their last P; what to cache, [T, R + P], likewise."""
        c, H = self.config, self.config.num_attention_heads
        theta = c.rope_theta ** -(torch.arange(0, c.qk_rope_head_dim, 2).double() / c.qk_rope_head_dim)
        cos, sin = rope.rope_factors(positions.double()[:, None] * theta.to(positions.device), hidden.dtype)
        q = F.linear(hidden, self.q_proj).view(len(hidden), H, -1)
        q_nope, q_rope = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        latent, k_rope = F.linear(hidden, self.kv_a_proj).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        latent = F.rms_norm(latent, latent.shape[-1:], self.kv_a_norm, 1e-6)
        k_rope = rope.apply_rope(k_rope[:, None], cos, sin)[:, 0]  # one rotated key for all heads
        return torch.cat((q_nope, rope.apply_rope(q_rope, cos, sin)), -1), torch.cat((latent, k_rope), -1)

    def naive(self, q: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """Make every head's keys and values, then attend as MHA. q [T, H, N + P], cached [S, R + P] -> [T, H, V]."""
        c, S, H = self.config, len(cached), self.config.num_attention_heads
        latent, k_rope = cached.split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        kv = F.linear(latent, self.kv_b_proj).view(S, H, -1)  # the expensive line: S · R · H · (N + V) multiplications
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k = torch.cat((k_nope, k_rope[:, None].expand(S, H, -1)), dim=-1)
        return causal_attention(q, k, v, self.scale)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Fold W_UK into the query: [T, H, N + P] -> [T, H, R + P]."""
        q_nope, q_rope = q.split((self.config.qk_nope_head_dim, self.config.qk_rope_head_dim), dim=-1)
        return torch.cat((torch.einsum("thn,hnr->thr", q_nope, self.W_UK), q_rope), dim=-1)

    def unfold(self, o: torch.Tensor) -> torch.Tensor:
        """Σ w c -> Σ w v: [T, H, R] -> [T, H, V]."""
        return torch.einsum("thr,hvr->thv", o, self.W_UV)

    def absorbed(self, q: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """The same by MQA on the cache as it is. Shapes as `naive`."""
        latent = cached[:, None, : self.config.kv_lora_rank]  # [S, 1, R]: one KV head
        return self.unfold(causal_attention(self.absorb(q), cached[:, None], latent, self.scale))

    def output(self, o: torch.Tensor) -> torch.Tensor:
        """[T, H, V] -> [T, hidden]."""
        return F.linear(o.flatten(1), self.o_proj)

    @classmethod
    def random(cls, config: MLAConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> MLA:
        """Seeded random weights, scaled so that activations keep their size."""
        generator = torch.Generator().manual_seed(seed)

        def draw(name: str, rows: int, columns: int) -> torch.Tensor:
            noise = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            return (1 + 0.1 * noise if columns == 1 else noise / math.sqrt(columns)).to(common.device(), dtype)

        return cls(config, draw)


@common.kernel
def mla_decode_kernel(q, cache, block_table, seq_lens, out, lse, scale, stride_q, table_width: tl.int32,
                      H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                      ROWS: tl.constexpr, R_PAD: tl.constexpr, P_PAD: tl.constexpr, TILE: tl.constexpr,
                      SPLITS: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    b, split = tl.program_id(0), tl.program_id(2)
    head = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
    S = tl.load(seq_lens + b)
    length = tl.cdiv(tl.cdiv(S, TILE), SPLITS) * TILE
    start = split * length
    end = tl.minimum(start + length, S)

    i, j = tl.arange(0, R_PAD)[None, :], tl.arange(0, P_PAD)[None, :]
    query = q + b * stride_q + head * (R + P)
    q_c = tl.load(query + i, mask=(head < H) & (i < R), other=0.0)  # [ROWS, R]: W_UKᵀ q
    q_r = tl.load(query + R + j, mask=(head < H) & (j < P), other=0.0)  # [ROWS, P]
    if UPCAST:
        q_c, q_r = q_c.to(tl.float32), q_r.to(tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, R_PAD], tl.float32)
    for n in range(start, end, TILE):
        p = n + tl.arange(0, TILE)
        live = p < end
        block = tl.load(block_table + b * table_width + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        token = cache + ((block * BLOCK_SIZE + p % BLOCK_SIZE) * (R + P))[:, None]
        c = tl.load(token + i, mask=live[:, None] & (i < R), other=0.0)  # [TILE, R]: key and value in one load
        r = tl.load(token + R + j, mask=j < P, other=0.0)  # [TILE, P]
        if UPCAST:
            c, r = c.to(tl.float32), r.to(tl.float32)
        s = tl.dot(q_r, r.T, input_precision="ieee")
        s = tl.dot(q_c, c.T, s, input_precision="ieee") * scale  # [ROWS, TILE]
        w, alpha, m, l = softmax_step(tl.where(live[None, :], s, float("-inf")), m, l)
        acc = tl.dot(w.to(c.dtype), c, acc * alpha[:, None], input_precision="ieee")

    l = tl.where(l > 0, l, 1.0)
    part = (b * H + head) * SPLITS + split
    tl.store(out + part * R + i, (acc / l[:, None]).to(out.dtype.element_ty), mask=(head < H) & (i < R))
    if SPLITS > 1:
        tl.store(lse + part, ((m + tl.math.log2(l)) * 0.6931471805599453)[:, None], mask=head < H)


def mla_decode(q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
               max_seq_len: int, kv_lora_rank: int, scale: float, num_splits: int | None = None,
               ) -> torch.Tensor:  # fmt: skip
    """Decode attention on a paged latent cache, in the absorbed form.

    Semantics: out[b, h] = Σ_j softmax_j(scale · q[b, h]·x_j) x_j[:R], with x_j the cached row of token j < seq_lens[b].
    Shapes: q [B, H, R + P] from `MLA.absorb` (sequence stride free), cache [num_blocks, block_size, R + P], block_table
    int32 [B, W], seq_lens int32 [B] -> [B, H, R], for `MLA.unfold`. `max_seq_len` bounds the grid, `num_splits` is a
    power of two. vLLM 0.32: v1/attention/backends/mla/triton_mla.py on v1/attention/ops/triton_decode_attention.py.
    """
    (B, H, width), R = q.shape, kv_lora_rank
    if not common.runs_kernel(q):
        return _mla_decode_torch(q, cache, block_table, seq_lens, R, scale)
    if B == 0:
        return q[:, :, :R].clone()
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda and not torch.version.hip else None
    rows, tile, num_warps, num_stages = mla_tiles(q.dtype, H, capability)
    groups = triton.cdiv(H, rows)
    splits = num_splits or paged.default_splits(B * groups, max_seq_len, q.device, 1 if rows > 16 else 2)
    out, parts, lse = split_buffers(q, R, splits)
    mla_decode_kernel[(B, groups, splits)](
        q, cache, block_table, seq_lens, parts, lse, LOG2E * scale, q.stride(0), block_table.stride(0),
        H=H, R=R, P=width - R, BLOCK_SIZE=cache.shape[1], ROWS=rows, R_PAD=max(16, triton.next_power_of_2(R)),
        P_PAD=max(16, triton.next_power_of_2(width - R)), TILE=tile, SPLITS=splits, UPCAST=common.INTERPRET,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return combine(parts, lse, out)


def mla_tiles(dtype: torch.dtype, H: int, capability: tuple[int, int] | None) -> tuple[int, int, int, int]:
    """(heads, keys per tile, warps, stages): a tile's sums are heads × 512 fp32 numbers, in registers. As compiled:
    32 heads spill on an MI300, and no NVIDIA GPU; Hopper's tensor cores take 64 at once: 3.5 × faster on an H200."""
    if dtype == torch.float32:
        return 16, 16, 8, 2
    if H > 32 and capability == (9, 0):
        return 64, 64, 8, 2
    return (32, 32, 8, 1) if H > 16 and capability else (16, 32, 4, 2)


def _mla_decode_torch(q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
                      R: int, scale: float) -> torch.Tensor:  # fmt: skip
    """The CPU's path: gather blocks by lesson 02's plan, then SDPA with one KV head and H queries."""
    out = q.new_zeros(*q.shape[:2], R)
    pages, width = cache.flatten(1), q.shape[2]
    for rows, source, dead, bias in gather_plan(block_table, seq_lens, (2, *cache.shape)):
        half = slice(len(source) // 2), slice(len(dead) // 2)  # the plan is for keys and values; here they are one
        x = pages.index_select(0, source[half[0]]).view(-1, width)
        x.index_fill_(0, dead[half[1]], 0)
        x = x.view(len(rows), 1, -1, width)  # [b, 1, S, R + P]
        out[rows] = F.scaled_dot_product_attention(q[rows, None], x, x[..., :R], bias.to(q.dtype), scale=scale)[:, 0]
    return out


def example_launches(dtype: torch.dtype) -> None:
    """Every kernel at the shapes of SmolLM2, an 8B Llama and DeepSeek-V3 (128 heads, and 16), on meta tensors."""
    empty = functools.partial(torch.empty, device="meta")
    table, lens = empty(32, 1024, dtype=torch.int32), empty(32, dtype=torch.int32)
    start_loc = empty(5, dtype=torch.int64)
    for Hq, Hkv, D in ((32, 8, 128), (9, 3, 64)):
        q, kv_cache = empty(32, Hq, D, dtype=dtype), empty(2, 1024, 16, Hkv, D, dtype=dtype)
        prompt, k = empty(4096, Hq, D, dtype=dtype), empty(4096, Hkv, D, dtype=dtype)
        for heads in (None, 1):
            gqa_decode(q, kv_cache, table, lens, 16384, heads)
            gqa_prefill(prompt, k, k, start_loc, 1024, heads)
        gqa_decode(q, kv_cache, table, lens, 200)  # short: not split
    for H, longest in ((128, 16384), (16, 16384), (16, 200)):
        cache = empty(1024, 64, 576, dtype=dtype)
        mla_decode(empty(32, H, 576, dtype=dtype), cache, table, lens, longest, 512, 192**-0.5)


# --- Fewer KV heads in a model that exists ------------------------------------------------------------------------


def pool_kv_heads(model: llama.Llama, num_kv_heads: int, how: str = "mean") -> llama.Llama:
    """The model with fewer KV heads: each new one is the mean (or the first) of those it replaces, as in Ainslie et al.

    Only `qkv_proj` is new; everything else is shared with `model`, which is left alone. Raises InputError.
    """
    Hq, Hkv, D = model.num_heads, model.num_kv_heads, model.config.head_dim
    if num_kv_heads < 1 or Hkv % num_kv_heads:
        allowed = [n for n in range(1, Hkv + 1) if Hkv % n == 0]
        raise common.InputError(f"num_kv_heads is {num_kv_heads}; allowed for {Hkv} KV heads: {allowed}")
    q, kv = Hq * D, Hkv * D

    def pooled(packed: torch.Tensor) -> torch.Tensor:
        """Rows of q stay; rows of k and v [Hkv, D, …] become [num_kv_heads, D, …]."""
        parts = [packed[:q]]
        for x in packed[q:].split((kv, kv)):
            groups = x.view(num_kv_heads, Hkv // num_kv_heads, D, -1)
            merged = groups.mean(1) if how == "mean" else groups[:, 0]
            parts.append(merged.reshape(-1, *packed.shape[1:]))
        return torch.cat(parts)

    new = copy.copy(model)
    new.config = dataclasses.replace(model.config, num_key_value_heads=num_kv_heads)
    new.num_kv_heads, new.linear = num_kv_heads, dict(model.linear)
    for i in range(model.config.num_hidden_layers):
        old = model.linear[f"layers.{i}.qkv_proj"]
        bias = None if old.bias is None else pooled(old.bias)
        new.linear[f"layers.{i}.qkv_proj"] = llama.Linear(pooled(old.weight), bias)
    return new


WINDOW, HELD_OUT = 512, 10  # tokens of a window; windows that training never sees


@functools.cache
def corpus(tokenizer: Tokenizer, num_tokens: int | None = None) -> torch.Tensor:
    """Python's own language reference, which every Python brings along, in windows: int64 [N, WINDOW]."""
    from pydoc_data import topics

    tokens: list[int] = []
    for name in sorted(topics.topics):
        tokens += tokenizer.encode(topics.topics[name])
        if num_tokens and len(tokens) >= num_tokens:
            break
    count = (num_tokens or len(tokens)) // WINDOW
    return torch.tensor(tokens[: count * WINDOW]).view(count, WINDOW)


def whole_prompt(heads: Sequence[int] | None = None) -> llama.Attend:
    """An `attend` for one prompt without a cache; `heads` is a head map other than the right one."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if heads is not None:
            k, v = k[:, heads], v[:, heads]  # every query head its own copy, as the map says
        return paged.prefill_attention(q, k, v)

    return attend


def perplexity(model: llama.Llama, windows: torch.Tensor, heads: Sequence[int] | None = None) -> float:
    """exp(mean −log p) of all tokens of a window [W] but its first, at most a billion: floats end. windows [N, W]."""
    total, positions = 0.0, torch.arange(windows.shape[1], device=model.device)
    for tokens in windows.to(model.device):
        logits = model.logits(model.forward(tokens, positions, whole_prompt(heads)))  # [W, vocab]
        total += F.cross_entropy(logits[:-1].float(), tokens[1:], reduction="sum").item()
    return min(1e9, math.exp(min(100.0, total / (len(windows) * (windows.shape[1] - 1)))))


def record_attention(model: llama.Llama, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(what goes into qkv_proj, what comes out of o_proj) of every layer, [T, hidden] each, for one window."""
    spy, seen = copy.copy(model), []
    spy.linear = dict(model.linear)

    def recording(layer: Callable[[torch.Tensor], torch.Tensor], inside: bool) -> Callable:
        def call(x: torch.Tensor) -> torch.Tensor:
            y = layer(x)
            seen.append(x if inside else y)
            return y

        return call

    for i in range(model.config.num_hidden_layers):
        for name, inside in (("qkv_proj", True), ("o_proj", False)):
            spy.linear[f"layers.{i}.{name}"] = recording(model.linear[f"layers.{i}.{name}"], inside)
    spy.forward(tokens, torch.arange(len(tokens), device=model.device), whole_prompt())
    return [(x.clone(), y.clone()) for x, y in zip(seen[::2], seen[1::2])]  # clones can take part in autograd


def heal(teacher: llama.Llama, student: llama.Llama, train: torch.Tensor, seconds: float,
         evaluate: Callable[[], float], evaluations: int = 6) -> list[dict[str, float]]:  # fmt: skip
    """Train the student's attention layers to do what the teacher's do. Returns the curve: seconds, tokens, perplexity.

    Each layer is a small regression of its own: given the input that the teacher's layer had, give the output that it
    gave. That needs one forward pass of the teacher and no backward pass through the model, the cheapest start there
    is. `train` [N, W] is walked in a shuffled order, again and again; `seconds` counts training, not evaluation.
    """
    names = [f"layers.{i}.{n}" for i in range(student.config.num_hidden_layers) for n in ("qkv_proj", "o_proj")]
    for name in names:
        old = student.linear[name]
        student.linear[name] = llama.Linear(old.weight.detach().clone().requires_grad_(), old.bias)
    optimizer = torch.optim.Adam([student.linear[name].weight for name in names], lr=1e-3)
    cos, sin = student.cos[: train.shape[1]], student.sin[: train.shape[1]]
    Hq, Hkv, D = student.num_heads, student.num_kv_heads, student.config.head_dim
    curve = [{"seconds": 0.0, "tokens": 0, "perplexity": evaluate()}]
    spent, tokens, order = 0.0, 0, iter(())
    while spent < seconds:
        began = time.perf_counter()
        window = next(order, None)
        if window is None:
            order = iter(train[torch.randperm(len(train))].to(student.device))
            window = next(order)
        for group in optimizer.param_groups:  # down to a tenth at the end, along a cosine
            group["lr"] = 1e-3 * (0.55 + 0.45 * math.cos(math.pi * min(1.0, spent / seconds)))
        optimizer.zero_grad()
        for i, (x, target) in enumerate(record_attention(teacher, window)):
            qkv = student.linear[f"layers.{i}.qkv_proj"](x).view(len(x), Hq + 2 * Hkv, D)
            q, k = student.queries_and_keys(i, qkv, cos, sin)
            o = paged.prefill_attention(q, k, qkv[:, Hq + Hkv :])
            y = student.linear[f"layers.{i}.o_proj"](o.reshape(len(x), -1))
            (F.mse_loss(y, target) / target.square().mean()).backward()
        optimizer.step()
        spent += time.perf_counter() - began
        tokens += len(window)
        if spent >= min(1.0, len(curve) / evaluations) * seconds:
            curve.append({"seconds": spent, "tokens": tokens, "perplexity": evaluate()})
    return curve


def without_overlap(train: torch.Tensor, held_out: torch.Tensor, run: int = 24) -> torch.Tensor:
    """The windows of `train` that have no `run` tokens in a row in common with `held_out`: topics repeat each other."""
    flat = held_out.flatten().tolist()
    known = {tuple(flat[i : i + run]) for i in range(len(flat) - run + 1)}
    return torch.stack([
        w for w in train if known.isdisjoint(tuple(w[i : i + run].tolist()) for i in range(len(w) - run + 1))
    ])  # fmt: skip


# Ainslie et al. 2023, Table 1: T5, uptrained with 5 % of the original compute; seconds per sample, mean score of
# seven summarization, translation and question-answering sets.
GQA_PAPER = {"MHA-Large": (0.37, 46.0), "MHA-XXL": (1.51, 47.2), "MQA-XXL": (0.24, 46.6), "GQA-8-XXL": (0.28, 47.1)}


# --- Serving arithmetic -------------------------------------------------------------------------------------------

# Beyond lesson 01's fields: `full_attention_every` n means that every n-th layer sees everything and the others
# `sliding_window` keys (0: no layer sees everything); the last `num_kv_shared_layers` layers read an earlier layer's
# cache and keep none. Attention fields as in Transformers 5's configurations; parameters from the model cards.
MODELS: dict[str, dict[str, Any]] = {
    "Llama-2-7B": roofline.MODELS["Llama-2-7B"],
    "Llama-3.1-8B": roofline.MODELS["Llama-3.1-8B"],
    "Falcon-7B": dict(num_hidden_layers=32, num_attention_heads=71, num_key_value_heads=1, hidden_size=4544,
                      num_parameters=7_217_189_760),
    "Mistral-7B-v0.1": dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096,
                            intermediate_size=14336, vocab_size=32000, tie_word_embeddings=False,
                            sliding_window=4096, full_attention_every=0),
    "Gemma-3-4B": dict(num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
                       hidden_size=2560, num_parameters=4_300_000_000, sliding_window=1024, full_attention_every=6),
    "Gemma-3n-E4B": dict(num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
                         hidden_size=2048, num_parameters=7_850_000_000, sliding_window=512, full_attention_every=5,
                         num_kv_shared_layers=15),
    "gpt-oss-120b": dict(num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
                         hidden_size=2880, num_parameters=116_830_000_000, weight_bits=4.47, sliding_window=128,
                         full_attention_every=2),
    "DeepSeek-V3": roofline.MODELS["DeepSeek-V3"],
}  # fmt: skip


def kv_heads_per_gpu(Hkv: int, tp: int) -> int:
    """Heads are dealt out; with fewer heads than GPUs, each GPU still holds one: a copy."""
    return max(1, Hkv // tp)


def cache_bytes(config: Mapping[str, Any], context: int, tp: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes that one sequence of `context` tokens holds on each of `tp` GPUs.

    Σ over layers with a cache of their own: min(context, window) · KV heads per GPU · (bytes of a key + of a value)
    """
    spec = KVCacheSpec.from_config(config)  # for MLA: one head, which tensor parallelism can only copy
    per_head = spec.bytes_per_token(dtype) // (spec.num_layers * spec.num_kv_heads)
    every, window = config.get("full_attention_every", 1), config.get("sliding_window", context)
    own = range(1, spec.num_layers - config.get("num_kv_shared_layers", 0) + 1)
    rows = sum(context if every and i % every == 0 else min(context, window) for i in own)
    return rows * kv_heads_per_gpu(spec.num_kv_heads, tp) * per_head


def sequences_that_fit(config: Mapping[str, Any], context: int, gpu_bytes: float, tp: int = 1) -> int:
    """⌊(0.92 · GPU − weights / TP) / bytes per sequence and GPU⌋; 0 if the weights do not fit."""
    room = roofline.GPU_MEMORY_UTILIZATION * gpu_bytes - roofline.weight_bytes(config) / tp
    return max(0, int(room // cache_bytes(config, context, tp)))


def decode_traffic(B: int, S: int, Hq: int, Hkv: int, D: int, heads_per_load: int | None = None) -> dict[str, int]:
    """FLOPs of one layer's decode attention, and bytes of keys and values that its programs ask for (bf16)."""
    loads = Hq // check_heads(Hq, Hkv, heads_per_load)  # programs per sequence: each loads one KV head
    return {"flops": B * S * Hq * 4 * D, "bytes": B * S * loads * 2 * D * 2}


def mla_cost(H: int, T: int, S: int, config: MLAConfig = MLAConfig()) -> dict[str, int]:
    """FLOPs of one layer, for T queries that all see S cached tokens: naive and absorbed.

    F = 2·R·H·(N + V)                           one token through W_UK and W_UV
    naive = S·F + T·S·H·2·(N + P + V)           make S keys and values, then attend as MHA
    absorbed = T·F + T·S·H·2·((R + P) + R)      fold T queries, unfold what they find: longer dot products between
    """
    c = config
    R, N, P, V = c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    F = 2 * R * H * (N + V)
    return {"naive": S * F + 2 * T * S * H * (N + P + V), "absorbed": T * F + 2 * T * S * H * (2 * R + P)}


# --- The simulation: heads, GPUs, and a map -----------------------------------------------------------------------

WIDGET_DEFAULT: dict[str, Any] = {
    "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tp": 8, "context": 8192, "gpu_gib": 80,
    "head_map": "interleaved",
}  # fmt: skip
WIDGET_CHOICES = {
    "num_heads": (8, 16, 32), "num_kv_heads": (1, 2, 4, 8, 16, 32), "head_dim": (64, 128), "tp": (1, 2, 4, 8, 16),
    "context": (8192, 32768, 131072), "gpu_gib": (24, 80), "head_map": tuple(HEAD_MAPS),
}  # fmt: skip
WIDGET_LAYERS, WIDGET_WEIGHTS = 32, 16 * 10**9  # an 8B model, bf16


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Which query head reads which KV head on which GPU, what that costs per token, and what a wrong map computes.

    params: num_heads, num_kv_heads, head_dim, tp, context, gpu_gib (integers), head_map. Raises InputError.
    The outputs are real: one key, and the value of KV head i is i, so a query head's output *is* the head it read.
    """
    p = common.checked(params, WIDGET_CHOICES)
    Hq, Hkv, D, tp = p["num_heads"], p["num_kv_heads"], p["head_dim"], p["tp"]
    trace: dict[str, Any] = {"params": p, "problem": None}
    if Hq % Hkv or Hq % tp:
        what = f"{Hkv} KV heads cannot serve" if Hq % Hkv else f"{tp} GPUs cannot share"
        return trace | {"problem": f"{what} {Hq} query heads"}
    per_gpu = kv_heads_per_gpu(Hkv, tp)
    owned = [list(range(gpu * Hkv // tp, gpu * Hkv // tp + per_gpu)) for gpu in range(tp)]
    right, each = interleaved(Hq, Hkv), Hq // tp
    local = HEAD_MAPS[p["head_map"]](each, per_gpu)  # a kernel counts the heads of its own GPU, from 0
    used = [owned[h // each][local[h % each]] for h in range(Hq)]
    q, k, v = torch.ones(1, Hq, 1), torch.ones(1, Hkv, 1), torch.arange(Hkv).float().view(1, Hkv, 1)
    outputs = attention(q, k, v, used).flatten().int().tolist()
    config = {"num_hidden_layers": WIDGET_LAYERS, "num_attention_heads": Hq, "num_key_value_heads": Hkv, "head_dim": D}
    per_sequence, usable = cache_bytes(config, p["context"], tp), p["gpu_gib"] * 2**30 * 92 // 100
    return trace | {
        "head_map": used, "gpu_of_head": [h // each for h in range(Hq)], "kv_heads_of_gpu": owned,
        "copies": tp * per_gpu // Hkv,
        "outputs": outputs, "wrong_heads": [h for h in range(Hq) if outputs[h] != right[h]],
        "bytes_per_token": cache_bytes(config, 1), "bytes_per_token_per_gpu": cache_bytes(config, 1, tp),
        "max_sequences": max(0, usable - WIDGET_WEIGHTS // tp) // per_sequence,
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p = trace["params"]
    lines = [f"{p['num_heads']} query heads, {p['num_kv_heads']} KV heads of {p['head_dim']}, {p['tp']} GPUs of "
             f"{p['gpu_gib']} GiB, map {p['head_map']}"]  # fmt: skip
    if trace["problem"]:
        return "\n".join([*lines, f"IMPOSSIBLE: {trace['problem']}"])
    for gpu in sorted({0, 1, p["tp"] - 1} & set(range(p["tp"]))):
        heads = [h for h, owner in enumerate(trace["gpu_of_head"]) if owner == gpu]
        reads = ", ".join(str(trace["head_map"][h]) for h in heads)
        lines.append(f"  GPU {gpu}: query heads {heads[0]}–{heads[-1]} read KV heads {reads}; "
                     f"it holds {', '.join(map(str, trace['kv_heads_of_gpu'][gpu]))}")  # fmt: skip
    copies = f", {trace['copies']} copies of each KV head" if trace["copies"] > 1 else ""
    lines.append(f"cache per token: {trace['bytes_per_token'] / 1024:g} KiB; on each GPU "
                 f"{trace['bytes_per_token_per_gpu'] / 1024:g} KiB{copies}")  # fmt: skip
    lines.append(f"sequences of {p['context']:,} tokens that fit beside 16 GB of weights: {trace['max_sequences']:,}")
    wrong = trace["wrong_heads"]
    lines.append(f"WRONG: {len(wrong)} of {p['num_heads']} query heads read another group's KV head, the first is "
                 f"head {wrong[0]}" if wrong else "every query head reads its own group's KV head")  # fmt: skip
    return "\n".join(lines)


# --- The numbers that the text quotes, and the figures ------------------------------------------------------------

slug = roofline.slug


def rotated_absorption_error() -> float:
    """What folding W_UK into the query would do if keys were rotated: the relative error of the scores, in fp64."""
    generator = torch.Generator().manual_seed(0)
    q, W, c = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((64,), (64, 32), (16, 32)))
    angles = torch.arange(16.0).double()[:, None] * 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)  # [16, 32]
    keys = rope.apply_rope((c @ W.T)[:, None], *rope.rope_factors(angles, torch.float64))[:, 0]
    return common.relative_error(c @ (W.T @ q), keys @ q)


@functools.cache
def facts() -> dict[str, Any]:
    """Every deterministic number of the lesson's text and figures. No model, under a second."""
    shapes = {"mha": 32, "gqa_16": 16, "gqa_8": 8, "gqa_2": 2, "mqa": 1}
    of_heads = {name: {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": n, "head_dim": 128}
                for name, n in shapes.items()}  # fmt: skip
    mla_32 = {"num_hidden_layers": 32, "num_attention_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    wrong = {str(n): sum(a != b for a, b in zip(interleaved(32, n), tiled(32, n))) for n in shapes.values()}
    packed, naive = (decode_traffic(32, 4096, 32, 8, 128, heads) for heads in (4, 1))
    h200, mla = common.HARDWARE["H200 141GB"], MLAConfig()
    cost = {f"t{T}_s{S}": mla_cost(128, T, S) for T, S in ((1, 8192), (128, 8192), (512, 8192), (512, 512))}
    V3, row = MODELS["DeepSeek-V3"], mla.kv_lora_rank + mla.qk_rope_head_dim
    fold = mla_cost(1, 1, 0)["absorbed"]  # of a head: what a query costs absorbed, and a cached token naive
    per_head = {how: flops - fold for how, flops in mla_cost(1, 1, 1).items()}
    endless = fold / (per_head["absorbed"] - per_head["naive"])  # queries, where cached tokens are all that counts
    return {
        "wrong_heads": wrong,
        "right_heads": {n: 32 - count for n, count in wrong.items()},
        "smollm_wrong": sum(x != y for x, y in zip(interleaved(9, 3), tiled(9, 3))),
        "kib_per_token": {
            name: {f"tp{tp}": cache_bytes(c, 1, tp) / 1024 for tp in (1, 2, 4, 8, 16)}
            for name, c in (of_heads | {"mla": mla_32}).items()
        },
        "traffic": {
            "packed_mib": packed["bytes"] / 2**20, "naive_mib": naive["bytes"] / 2**20,
            "ratio": naive["bytes"] / packed["bytes"], "packed_us_h200": packed["bytes"] / h200.bandwidth * 1e6,
            "naive_us_h200": naive["bytes"] / h200.bandwidth * 1e6,
            "intensity_packed": packed["flops"] / packed["bytes"], "intensity_naive": naive["flops"] / naive["bytes"],
        },
        "models": {
            slug(name): {
                "bytes_per_token": cache_bytes(c, 1), "mib_8k": cache_bytes(c, 8192) / 2**20,
                "mib_128k": cache_bytes(c, 131072) / 2**20,
                "fit_32k": sequences_that_fit(c, 32768, h200.memory, 8 if name == "DeepSeek-V3" else 1),
                "saved_by_window": 1 - cache_bytes(c, 131072)
                / cache_bytes({k: v for k, v in c.items() if k != "full_attention_every"}, 131072),
            }
            for name, c in MODELS.items()
        },
        "gemma_3n_unshared_mib": cache_bytes(MODELS["Gemma-3n-E4B"] | {"num_kv_shared_layers": 0}, 131072) / 2**20,
        "mla": {
            "elements": row, "groups": row / (2 * 128), "mha_elements": 2 * 128 * 128,
            "times_smaller": 2 * 128 * 128 / row, "per_head": per_head,
            "flops_ratio": per_head["absorbed"] / per_head["naive"], "fold_mflop": 128 * fold / 1e6, "cost": cost,
            "t1_ratio": cost["t1_s8192"]["naive"] / cost["t1_s8192"]["absorbed"],
            "break_even_queries": {"s8192": 1 / (1 / endless + 1 / 8192), "endless": endless},
            "intensity": {f"h{H}": H * per_head["absorbed"] / (2 * row) for H in (16, 128)}, "ridge_h200": h200.ridge,
            "tp8_total_kib": 8 * cache_bytes(V3, 1, 8) / 1024, "rotated_error": rotated_absorption_error(),
        },
        "paper": {
            slug(name): {"seconds": seconds, "score": score, "speedup": GQA_PAPER["MHA-XXL"][0] / seconds}
            for name, (seconds, score) in GQA_PAPER.items()
        },
        "widget": {
            f"hkv{n}_{m}": {k: t[k] for k in ("max_sequences", "copies", "bytes_per_token_per_gpu")}
            | {"wrong": len(simulate(t["params"] | {"tp": 1})["wrong_heads"])}
            for n in (32, 8, 1) for m in HEAD_MAPS
            for t in [simulate(WIDGET_DEFAULT | {"num_kv_heads": n, "head_map": m})]
        },
    }  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The figures, from `facts()` and the stored healing run alone."""
    paths = [_draw_maps(folder), _draw_tp(folder, facts()["kib_per_token"]), _draw_context(folder)]
    curve = common.results(KEY).get("heal", {}).get("curve")
    return [*paths, _draw_healing(folder, curve)] if curve else paths


def _draw_maps(folder: str | Path) -> Path:
    """Query heads above, KV heads below, a line for each read: MHA, GQA, MQA, and GQA with the wrong map."""
    figure, axes = common.new_figure(8.0, 2.5, ncols=4)
    panels = (("MHA, 8 : 8", 8, interleaved), ("GQA, 8 : 2", 2, interleaved), ("MQA, 8 : 1", 1, interleaved),
              ("GQA, tiled: wrong", 2, tiled))  # fmt: skip
    for axis, (title, Hkv, heads_of) in zip(axes, panels):
        place = [3.5 + (i - (Hkv - 1) / 2) * 8 / Hkv for i in range(Hkv)]
        for h, (i, right) in enumerate(zip(heads_of(8, Hkv), interleaved(8, Hkv))):
            color = common.COLORS["grey" if i == right else "red"]
            axis.plot([h, place[i]], [1, 0], "-" if i == right else "--", color=color, linewidth=1.3, zorder=1)
        for y, xs, name, color in ((1, range(8), "q", "blue"), (0, place, "kv", "orange")):
            axis.scatter(xs, [y] * len(xs), s=130, color=common.COLORS[color], zorder=2)
            for n, x in enumerate(xs):
                axis.text(x, y, str(n), color="white", ha="center", va="center", fontsize=8)
            axis.text(-1.0, y, name, ha="right", va="center", fontsize=9)
        axis.set(title=title, xlim=(-1.4, 7.6), ylim=(-0.35, 1.3))
        axis.title.set_size(10)
        axis.axis("off")
    return common.save_figure(figure, folder, "09_head_maps")


def _draw_tp(folder: str | Path, kib: dict[str, dict[str, float]]) -> Path:
    """KiB per token and GPU against the number of GPUs: halved until there is one head each, then flat."""
    figure, axis = common.new_figure(8.0, 3.3)
    for name, label, color, marker in (("mha", "MHA, 32 heads", "grey", "s"), ("gqa_8", "GQA, 8", "blue", "o"),
                                       ("gqa_2", "GQA, 2", "green", "^"), ("mla", "MLA, 576 elements", "purple", "P"),
                                       ("mqa", "MQA, 1", "orange", "D")):  # fmt: skip
        axis.plot(range(5), list(kib[name].values()), marker=marker, color=common.COLORS[color], label=label, lw=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(range(5), ["1", "2", "4", "8", "16"])
    axis.set_yticks([16, 32, 64, 128, 256, 512], ["16", "32", "64", "128", "256", "512"])
    axis.set(xlabel="GPUs (tensor parallel)", ylabel="KiB per token on each GPU")
    axis.grid(axis="y", color=common.COLORS["light"])
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return common.save_figure(figure, folder, "09_tensor_parallel")


def _draw_context(folder: str | Path) -> Path:
    """The cache of one sequence against its length, for real configurations."""
    figure, axis = common.new_figure(8.0, 3.6)
    lengths = [1 << n for n in range(9, 18)]
    styles = zip(MODELS.items(), ("grey", "blue", "orange", "green", "red", "red", "purple", "ink"),
                 ("-", "-", "-", "--", "--", ":", "--", "-"), strict=True)  # fmt: skip
    for (name, config), color, line in styles:
        values = [cache_bytes(config, n) / 2**20 for n in lengths]
        axis.plot(lengths, values, line, color=common.COLORS[color], label=name, linewidth=1.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    axis.set_xticks(lengths[1::2], [f"{n // 1024}k" for n in lengths[1::2]])
    axis.set(xlabel="context, tokens", ylabel="MiB of cache per sequence")
    axis.grid(color=common.COLORS["light"])
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=2.6)
    return common.save_figure(figure, folder, "09_context")


def _draw_healing(folder: str | Path, curve: Sequence[Mapping[str, float]]) -> Path:
    """Perplexity against training time, as `--heal` stored it."""
    figure, axis = common.new_figure(8.0, 3.0)
    axis.plot([p["seconds"] / 60 for p in curve], [p["perplexity"] for p in curve], "o-", color=common.COLORS["blue"])
    axis.axhline(base := common.results(KEY)["heal"]["teacher"], color=common.COLORS["grey"], linestyle="--")
    axis.text(0, base, f" 9 : 3, as trained: {base:.1f}", va="bottom", color=common.COLORS["grey"])
    axis.set_yscale("log")
    axis.set(xlabel="minutes of training on a CPU", ylabel="perplexity")
    return common.save_figure(figure, folder, "09_healing")


# --- Measurements -------------------------------------------------------------------------------------------------


def measure_heads(S: int, seconds: float) -> list[dict[str, Any]]:
    """On a CPU: decode attention of one sequence, 32 query heads of 128, fp32, for several numbers of KV heads; with a
    group as the rows of one product, and with keys and values repeated for every query head first. Seconds."""
    rows, q, lens = [], torch.randn(1, 32, 128), torch.tensor([S], dtype=torch.int32)
    for Hkv in (32, 8, 4, 1):
        k, v = torch.randn(2, 1, S, Hkv, 128)

        def repeated(k: torch.Tensor = k, v: torch.Tensor = v, G: int = 32 // Hkv) -> torch.Tensor:
            k, v = (x.transpose(1, 2).repeat_interleave(G, 1) for x in (k, v))  # [1, 32, S, 128]
            return F.scaled_dot_product_attention(q[:, :, None], k, v)

        grouped = common.measure(functools.partial(kv_cache_lesson.decode_attention, q, k, v, lens, S), seconds).median
        rows.append({"Hkv": Hkv, "mib": 2 * k.nbytes / 2**20, "grouped_ms": grouped * 1e3,
                     "repeated_ms": common.measure(repeated, seconds).median * 1e3,
                     "gb_s": 2 * k.nbytes / grouped / 1e9})  # fmt: skip
    return rows


def measure_mla(S: int, seconds: float) -> dict[str, float]:
    """One decode step of a DeepSeek-V2-Lite attention layer at context S, fp32: naive and absorbed. Milliseconds."""
    layer = MLA.random(MLAConfig())
    with torch.device(common.device()):
        q, cached = layer.project(torch.randn(S, 2048) / 8, torch.arange(S))
        table, lens = torch.arange(S // 64, dtype=torch.int32)[None], torch.tensor([S], dtype=torch.int32)
    q, cache, R = q[-1:], cached.view(S // 64, 64, -1), layer.config.kv_lora_rank
    absorbed = lambda: layer.unfold(mla_decode(layer.absorb(q), cache, table, lens, S, R, layer.scale))  # noqa: E731
    a, n = (common.measure(f, seconds).median * 1e3 for f in (absorbed, lambda: layer.naive(q, cached)))
    return {"S": S, "naive": n, "absorbed": a, "ratio": n / a}


def measure_kernels() -> dict[str, Any]:
    """On a GPU, bf16: GB/s of cache (each byte once), % of a copy's, TFLOP/s; packed, and one query head per load."""
    copy, decode, latent, prefill, dtype, device = common.copy_bandwidth(), [], [], [], torch.bfloat16, common.device()
    rate = lambda moved, us: {"gb_s": moved / us / 1e3, "% of copy": moved / us / copy * 1e8}  # noqa: E731
    for B, S, Hkv in ((32, 4096, 8), (32, 16384, 8), (1, 65536, 8), (32, 4096, 1), (32, 4096, 32)):
        case = paged.random_case([S] * B, 16, 32, Hkv, 128, dtype)
        row = {"B": B, "S": S, "Hkv": Hkv}
        for name, heads in (("packed", None), ("one_by_one", 1)):
            row[f"{name}_us"] = common.measure_graph(functools.partial(gqa_decode, *case, S, heads), 0.3).median * 1e6
        once = decode_traffic(B, S, 32, Hkv, 128)["bytes"]
        decode.append(row | rate(once, row["packed_us"]) | {"ratio": row["one_by_one_us"] / row["packed_us"]})
    for B, S, H in ((128, 16384, 16), (32, 4096, 16), (32, 4096, 128), (1, 65536, 16)):
        blocks = S // 64
        cache = torch.randn(B * blocks + 1, 64, 576, device=device, dtype=dtype)
        table = (torch.randperm(B * blocks, device=device) + 1).int().view(B, blocks)
        lens = torch.full((B,), S, dtype=torch.int32, device=device)
        q = torch.randn(B, H, 576, device=device, dtype=dtype)
        us = common.measure_graph(lambda: mla_decode(q, cache, table, lens, S, 512, 192**-0.5), 0.3).median * 1e6  # noqa: B023
        flops = B * (mla_cost(H, 1, S)["absorbed"] - mla_cost(H, 1, 0)["absorbed"])  # q comes folded
        latent.append({"B": B, "S": S, "H": H, "us": us, **rate(B * S * 1152, us), "tflop_s": flops / us / 1e6})
    for T in (2048, 8192):
        q, (k, v) = torch.randn(T, 32, 128).to(device, dtype), torch.randn(2, T, 8, 128).to(device, dtype)
        loc = torch.tensor([0, T], device=device)
        us = [common.measure_graph(functools.partial(gqa_prefill, q, k, v, loc, T, heads), 0.3).median * 1e6
              for heads in (None, 1)]  # fmt: skip
        prefill.append({"T": T, "packed_us": us[0], "one_by_one_us": us[1], "tflop_s": 4096 * 2 * T * T / us[0] / 1e6})
    return {"copy_gb_s": copy / 1e9, "decode": decode, "mla": latent, "prefill": prefill}


def save(path: str, **parts: Any) -> None:
    """Merge into what the file has for this lesson, so that a healing run and a measurement do not erase each other."""
    have: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # merge_json says what is wrong with a bad file
        have = json.loads(Path(path).read_text()).get(KEY, {})
    common.merge_json(path, KEY, have | parts)


# --- The story ----------------------------------------------------------------------------------------------------

QUESTION = "What is the capital of France?"


def check_kernels() -> None:
    """Both GQA kernels at three ratios against the head-by-head reference, packed and one query head per load."""
    for Hq, Hkv in ((6, 6), (9, 3), (6, 1)):
        case = paged.random_case([1, 17, 40], 16, Hq, Hkv, 64, torch.float32)
        q, (k, v) = torch.randn(40, Hq, 64), torch.randn(2, 40, Hkv, 64)
        q, k, v, loc = (x.to(common.device()) for x in (q, k, v, torch.tensor([0, 7, 40])))
        prompts = torch.cat([attention(q[p], k[p], v[p], interleaved(Hq, Hkv)) for p in (slice(7), slice(7, 40))])
        decoded = paged.paged_decode_reference(*case)
        with common.use_kernels() if common.HAS_TRITON else contextlib.nullcontext():
            for heads in dict.fromkeys((Hq // Hkv, 1)):
                out = torch.cat((gqa_decode(*case, 40, heads).cpu(), gqa_prefill(q, k, v, loc, 33, heads).cpu()))
                common.check(f"{Hq}:{Hkv}, {heads} query head{'s' * (heads > 1)} per load: decode and prefill", out,
                             torch.cat((decoded, prompts.double().cpu())))  # fmt: skip
    if not common.HAS_TRITON:
        common.skipped("the Triton kernels (the lines above are torch's)", common.kernel_mode())


def show_map(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> None:
    """A greedy answer of the real model under a head map, and where the wrong map is right."""
    rows = []
    for Hkv in (32, 16, 8, 2, 1):
        q, (k, v) = torch.randn(4, 32, 16), torch.randn(2, 4, Hkv, 16)
        error = common.relative_error(*(attention(q, k, v, f(32, Hkv)) for f in (tiled, interleaved)))
        rows.append([f"32 : {Hkv}", facts()["right_heads"][str(Hkv)], f"{error:.2f}"])
    common.table(["tiled map, h mod Hkv", "heads that are right", "relative error"], rows)
    heads = HEAD_MAPS[args.head_map](model.num_heads, model.num_kv_heads)
    prompt = tokenizer.ask(QUESTION)
    tokens = list(prompt)
    for _ in range(8):
        hidden = model.forward(torch.tensor(tokens, device=model.device),
                               torch.arange(len(tokens), device=model.device), whole_prompt(heads))  # fmt: skip
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    common.say(f"{QUESTION} {args.head_map} map: {tokenizer.decode(tokens[len(prompt) :])!r}")
    cache, pool = GroupedKVCache(model, 64, 16), paged.BlockPool(64)
    tables, new, answer = [paged.BlockTable(pool, 16)], [prompt], []
    for _ in range(8):
        answer.append(int(paged.run_step(model, cache, tables, new).argmax()))
        new = [answer[-1:]]
    common.check_equal("8 tokens from the grouped cache: the same", answer, tokens[len(prompt) :])


def show_mla() -> None:
    """Naive = absorbed, in fp64 and fp32; then as a decode step on a paged latent cache."""
    errors = {}
    for dtype in (torch.float64, torch.float32):
        layer = MLA.random(MLAConfig(), dtype)
        hidden = torch.randn(40, 2048, dtype=dtype, device=common.device()) / 8
        q, cached = layer.project(hidden, torch.arange(40, device=common.device()))
        errors[dtype] = common.relative_error(layer.absorbed(q, cached), naive := layer.naive(q, cached))
    if not errors[torch.float64] < 1e-12:
        raise common.CheckFailed(f"naive and absorbed differ by {errors[torch.float64]:.1e} in fp64")
    common.say(f"✓ a layer of DeepSeek-V2-Lite, naive and absorbed, fp64: relative error {errors[torch.float64]:.0e}")
    common.check("the same in fp32", layer.absorbed(q, cached), naive)
    blocks, table = torch.full((5, 16, 576), math.nan, device=common.device()), torch.tensor([[4, 1, 3]]).int()
    blocks[0] = 0
    for n, block in enumerate(table[0].tolist()):
        blocks[block, : len(part)] = (part := cached[16 * n : 16 * n + 16])
    table, lens = table.to(common.device()), torch.tensor([40], dtype=torch.int32, device=common.device())
    with common.use_kernels() if common.HAS_TRITON else contextlib.nullcontext():
        o = mla_decode(layer.absorb(q[-1:]), blocks, table, lens, 40, 512, layer.scale, 2)
    what = "mla_decode_kernel" if common.HAS_TRITON else "torch path"
    common.check(f"its last token, paged, {what}, keys split in 2", layer.unfold(o), naive[-1:])
    m = facts()["mla"]
    common.say(f"{m['elements']} elements per token and layer: as GQA with {m['groups']} KV heads of 128; "
               f"MHA would keep {m['mha_elements']:,}, {m['times_smaller']:.1f} × as many.")  # fmt: skip
    naive, absorbed = (m["cost"]["t1_s8192"][how] / 1e9 for how in ("naive", "absorbed"))
    common.say(f"One query on 8,192 tokens, 128 heads: naive {naive:.0f} GFLOP, absorbed {absorbed:.1f}; from "
               f"{math.ceil(m['break_even_queries']['s8192'])} queries on, naive is less.")  # fmt: skip
    common.say(f"If the 512 were rotated too, the folded scores would be off by {m['rotated_error']:.2f}.")


def show_pooling(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    """What it does to the real model to have its KV heads merged, without training."""
    if model.num_kv_heads == 1:
        common.skipped("the merging of KV heads", "this model has one")
        return {}
    windows = corpus(tokenizer, 5120 if args.bench else 512)
    students = {"trained": model} | {how: pool_kv_heads(model, 1, how) for how in ("mean", "first")}
    found = {name: perplexity(student, windows) for name, student in students.items()}
    if args.bench:
        found["tiled_map"] = perplexity(model, windows, tiled(model.num_heads, model.num_kv_heads))
    n, Hq, Hkv = windows.numel(), model.num_heads, model.num_kv_heads
    shown = {k: f"{x:,.{1 if k == 'trained' else 0}f}" if x < 1e9 else "over a billion" for k, x in found.items()}
    common.say(f"perplexity on {n:,} tokens of Python's reference: {shown['trained']} as trained ({Hq}:{Hkv});")
    common.say(f"one KV head, the mean of {Hkv}: {shown['mean']}; the first of them: {shown['first']}")
    healed = f"SmolLM2: {common.results(KEY)['heal']['curve'][-1]['perplexity']:,.0f}"
    common.say(f"--heal trains it for some minutes ({healed}). The paper uptrains with 5 % of the pretraining compute.")
    return found | {"tokens": n}


def show_serving(args: argparse.Namespace) -> None:
    """Bytes per token and GPU over tensor parallelism, and what real configurations keep."""
    kib = facts()["kib_per_token"]
    label = {"mha": "MHA (32)", "gqa_8": "GQA-8", "gqa_2": "GQA-2", "mqa": "MQA", "mla": "MLA (576)"}
    rows = [[text, *(f"{x:g}" for x in kib[name].values())] for name, text in label.items()]
    common.table(["KiB/token on each GPU, 32 layers", "TP 1", "TP 2", "TP 4", "TP 8", "TP 16"], rows)
    rows = []
    for name, c in MODELS.items():
        m, Hq = facts()["models"][slug(name)], c["num_attention_heads"]
        kind = "MLA" if "kv_lora_rank" in c else f"{Hq}:{c.get('num_key_value_heads', Hq)}"
        rows.append([name, kind, *(f"{m[x]:,.0f}" for x in ("bytes_per_token", "mib_8k", "mib_128k", "fit_32k"))])
    common.table(["", "heads", "bytes/token", "MiB at 8k", "MiB at 128k", "32k sequences, H200"], rows)
    common.say("(DeepSeek-V3: on eight H200, each with its own copy of every latent.)")
    common.say(describe(simulate(WIDGET_DEFAULT | {"head_map": args.head_map})))


def show_measurements(args: argparse.Namespace) -> dict[str, Any]:
    """Time follows the bytes that are loaded: on a CPU, with PyTorch's attention; on a GPU, with the kernels above."""
    if common.HAS_GPU:
        bench = measure_kernels()
        for kind in ("decode", "mla", "prefill"):
            cells = [[f"{x:,.1f}" if isinstance(x, float) else x for x in row.values()] for row in bench[kind]]
            common.table(list(bench[kind][0]), cells, title=kind)
        return bench | {"mla_layer": measure_mla(4096, 0.3)}
    S, seconds = (4096, 1.5) if args.bench else (1024, 0.1)
    bench = {"S": S, "heads": measure_heads(S, seconds), "mla_layer": measure_mla(S // 4, seconds)}
    rows = [[f"32 : {r['Hkv']}", f"{r['mib']:.0f}", f"{r['grouped_ms']:.2f}", f"{r['repeated_ms']:.2f}"]
            for r in bench["heads"]]  # fmt: skip
    common.table([f"one decode at {S:,}, D = 128, fp32", "MiB", "grouped, ms", "repeated first, ms"], rows)
    m = bench["mla_layer"]
    common.say(f"MLA layer, one decode at {m['S']:,}: naive {m['naive']:.1f} ms, absorbed {m['absorbed']:.2f} ms")
    common.skipped("the kernels' GB/s", "needs a GPU")
    return bench


def run_healing(args: argparse.Namespace, machine: dict[str, Any]) -> None:
    """`--heal MINUTES`: pool to one KV head, train, print the curve, store it."""
    model, tokenizer = loader.load(args.model)
    windows = corpus(tokenizer)
    held_out, train = windows[:HELD_OUT], without_overlap(windows[HELD_OUT:], windows[:HELD_OUT])
    common.say(f"{held_out.numel():,} tokens to measure on, {train.numel():,} others to train on, none in both")
    student = pool_kv_heads(model, 1)
    base = perplexity(model, held_out)
    curve = heal(model, student, train, args.heal * 60, lambda: perplexity(student, held_out))
    common.table(["seconds", "tokens", "perplexity"], [[f"{x:,.0f}" for x in point.values()] for point in curve])
    common.say(f"as trained, with {model.num_kv_heads} KV heads: {base:.1f}")
    if args.json:
        save(args.json, heal={"machine": machine, "curve": curve, "teacher": base, "train_tokens": train.numel()})


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    p.add_argument("--head-map", choices=tuple(HEAD_MAPS), default="interleaved",
                   help="which KV head a query head reads (default interleaved; tiled breaks the model)")  # fmt: skip
    p.add_argument("--heal", type=common.number(float, 0.05, 600), metavar="MINUTES",
                   help="instead of the story: merge the KV heads into one, train for MINUTES, print the curve "
                        "(with --json FILE it is stored)")  # fmt: skip
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine = common.start(args)
    config = loader.check_context(args.model, WINDOW)
    if args.heal and config.num_key_value_heads == 1:
        raise common.InputError(f"--heal: {args.model} has one KV head; it takes a model with more")
    if args.heal:
        common.heading(f"{config.num_attention_heads} query heads, one KV head: {args.heal:g} minutes of training")
        return run_healing(args, machine)
    model, tokenizer = loader.load(args.model)
    common.heading("1 · The kernels, each KV head loaded once for its group, against head by head")
    check_kernels()
    common.heading("2 · The head map: the bug that is right at both ends")
    show_map(args, model, tokenizer)
    common.heading("3 · MLA: a latent for all heads")
    show_mla()
    common.heading("4 · Fewer KV heads in a model that was trained with more")
    bench = {"perplexity": show_pooling(args, model, tokenizer)}
    common.heading("5 · Serving arithmetic, bf16")
    show_serving(args)
    common.heading("6 · Measured on this machine")
    bench |= show_measurements(args)
    if args.figure:
        draw(args.figure)
    if args.json:
        save(args.json, machine=machine, facts=facts(), **({"bench": bench} if args.bench else {}))


if __name__ == "__main__":
    common.run(main)

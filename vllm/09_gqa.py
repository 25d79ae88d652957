"""09 · GQA, MQA, MLA: fewer keys and values, in the model itself.

The question: the cache costs bytes per token and KV head. Does every query head need keys and values of its own?

The mechanism:
  1. Multi-head attention (MHA) keeps a key and a value per query head. Multi-query (MQA) keeps one for all of them,
     grouped-query (GQA) one per group of G: query head h reads KV head h // G.
  2. The cache shrinks by G. So do a decode's bytes, if a kernel loads a KV head once for its group: rows of one tile.
  3. A wrong map, h % Hkv, has the right shapes, and is right for MHA and for MQA. Only in between is it wrong.
  4. Multi-head latent attention (MLA) keeps a vector of 512 per token, from which every head makes its own keys and
     values, and 64 numbers that carry the position: 576 elements, what GQA would need for 2.25 groups.
  5. For decoding, the matrices that make keys and values are folded into the query and the output. What is left is
     MQA: one KV head of 576, whose value is the first 512 elements of its key.
  6. Tensor parallelism splits heads. Where there are fewer KV heads than GPUs, each is copied: one head is not less
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
from common import tl, triton

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import arguments, registry
from engine.attention.metadata import AttentionMetadata
from engine.attention.splits import combine_splits, default_splits
from engine.attention.torch_paged import decode_latent, plan_decode
from engine.model import llama, loader, rope
from engine.model.tokenizer import Tokenizer
from lab import cli, healing

KEY = "09_gqa"
LOG2E = math.log2(math.e)


# --- 1. Who reads what: the head map, and attention that follows it ---------------------------------------------------


def interleaved(Hq: int, Hkv: int) -> list[int]:
    """The KV head that each query head reads: neighbours share. h -> h // G with G = Hq / Hkv."""
    return [h // (Hq // Hkv) for h in range(Hq)]


def tiled(Hq: int, Hkv: int) -> list[int]:
    """The bug: h -> h mod Hkv, what `k.repeat(1, G, 1)` does where `k.repeat_interleave(G, 1)` was meant."""
    return [h % Hkv for h in range(Hq)]


HEAD_MAPS: dict[str, Callable[[int, int], list[int]]] = {"interleaved": interleaved, "tiled": tiled}


def attention(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[int], scale: float | None = None) -> Tensor:
    """Causal attention, the reference: query head h gets a copy of KV head heads[h], as if the model were MHA.

    Shapes: q [T, Hq, D], the last T of S positions; k [S, Hkv, D], v [S, Hkv, Dv] -> [T, Hq, Dv].
    """
    (T, _, D), S, dtype = q.shape, len(k), torch.promote_types(q.dtype, torch.float32)
    k, v = k[:, list(heads)].to(dtype), v[:, list(heads)].to(dtype)  # [S, Hq, D], [S, Hq, Dv]
    scores = torch.einsum("thd,shd->hts", q.to(dtype), k) * (D**-0.5 if scale is None else scale)
    hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype)


# --- 2. The kernel: one load of a KV head for its whole group ---------------------------------------------------------
#
# HEADS is how many query heads of a group share a program, and with it each load. HEADS = G packs the group into the
# rows of one tile: every key leaves memory once. HEADS = 1 is the kernel that one writes from the MHA formula: right,
# and it reads every key G times. Nothing else differs between the two. (Lesson 10's kernel packs prompts in this way.)


@triton.jit
def softmax_step(s, m, l):
    """Lesson 03's softmax, in powers of two: s [M, N] is a tile of scores times log2 e. Its weights under the new
    maximum m, what the old sums are worth under it, and their new l."""
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
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    heads_per_load: int | None = None,
    num_splits: int | None = None,
) -> Tensor:
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
        return plan_decode(block_table, seq_lens, kv_cache, Hq)(q, kv_cache)
    if B == 0:
        return torch.empty_like(q)
    splits = num_splits or default_splits(B * Hq // heads, max_seq_len, q.device)
    out, parts, lse = split_buffers(q, D, splits)
    D_pad, rows = max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(heads))
    tile, num_warps, num_stages = decode_tiles(q.dtype, D_pad, rows, q.is_cuda and not torch.version.hip)
    tensors = q, kv_cache, block_table, seq_lens, parts, lse
    strides = q.stride(0), kv_cache.stride(0), block_table.stride(0)
    sizes = {"Hq": Hq, "Hkv": Hkv, "D": D, "BLOCK_SIZE": block_size, "HEADS": heads, "SPLITS": splits}
    tiles = {"ROWS": rows, "D_PAD": D_pad, "TILE": tile, "num_warps": num_warps, "num_stages": num_stages}
    grid = (B, Hq // heads, splits)
    gqa_decode_kernel[grid](*tensors, LOG2E / math.sqrt(D), *strides, **sizes, **tiles, UPCAST=common.INTERPRET)
    if splits > 1:
        combine_splits(parts, lse, out)
    return out


def check_heads(Hq: int, Hkv: int, heads_per_load: int | None) -> int:
    """How many query heads share a load: all G of a group unless said otherwise. Raises ValueError if not a divisor."""
    G = Hq // Hkv
    if Hq % Hkv or G % (heads_per_load or G):
        given = f"{Hq} query heads, {Hkv} KV heads, {heads_per_load} heads per load"
        raise ValueError(f"{given}: each must divide the one before it, as groups")
    return heads_per_load or G


def split_buffers(q: Tensor, width: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(out [B, Hq, width], what the splits write [B, Hq, splits, width], their log-sum-exps); one split writes out."""
    out = torch.empty(*q.shape[:2], width, dtype=q.dtype, device=q.device)
    if splits == 1:
        return out, out, out
    parts = torch.empty(*q.shape[:2], splits, width, dtype=torch.float32, device=q.device)
    return out, parts, torch.empty(*parts.shape[:3], dtype=torch.float32, device=q.device)


def decode_tiles(dtype: torch.dtype, D_pad: int, rows: int, nvidia: bool) -> tuple[int, int, int]:
    """(keys per tile, warps, stages): lesson 02's, whose kernel this is with another number of heads in a program."""
    half = nvidia and dtype.itemsize == 2
    if dtype.itemsize * D_pad > 256:
        return 32, 8, 5 if half else 3
    return 128 if half and D_pad == 128 and rows <= 32 else 64, 4, 3


# --- 3. A model on it -------------------------------------------------------------------------------------------------


def attend_in_groups(layers: Sequence[Tensor], meta: AttentionMetadata) -> llama.Attend:
    """For a step of whole prompts, by the reference, or of one new token for each sequence, by the kernel.

    `layers` has a cache [2, num_blocks, block_size, Hkv, D] for each layer; writing into it is lesson 02's.
    """
    reshape_and_cache = registry.fill("cache.write")

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        reshape_and_cache(k, v, layers[layer], meta.slot_mapping)
        if max(meta.query_lens) == 1:
            return gqa_decode(q, layers[layer], meta.block_table, meta.seq_lens, meta.max_seq_len)
        lens = meta.query_lens
        prompts = zip(q.split(lens), k.split(lens), v.split(lens))
        return torch.cat([attention(*prompt, interleaved(q.shape[1], k.shape[1])) for prompt in prompts])

    return attend


def generate(model: llama.Llama, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy answers: all prompts whole in one step, then a token of each in every step."""
    width = -(-(max(map(len, prompts)) + max_tokens) // 16)  # blocks of 16 that a sequence may need
    cache = registry.fill("cache.paged")(model, 1 + width * len(prompts), 16)
    blocks = [range(first, first + width) for first in range(1, 1 + width * len(prompts), width)]
    tokens, new = [list(prompt) for prompt in prompts], prompts
    for _ in range(max_tokens):
        meta = AttentionMetadata.build(blocks, [*map(len, tokens)], [*map(len, new)], 16, model.device)
        token_ids = torch.tensor([*itertools.chain(*new)], device=model.device)  # [T]
        hidden = model.forward(token_ids, meta.positions, attend_in_groups(cache.layers, meta))  # [T, hidden]
        new = model.logits(hidden[meta.query_start_loc[1:] - 1]).argmax(-1, keepdim=True).tolist()  # [B, 1]
        tokens = [old + more for old, more in zip(tokens, new)]
    return [answer[len(prompt) :] for answer, prompt in zip(tokens, prompts)]


def generate_naively(model: llama.Llama, prompt: Sequence[int], max_tokens: int, heads: Sequence[int]) -> list[int]:
    """The greedy answer under a head map: no cache and no kernel, every token by the reference over all before it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        token_ids, positions = torch.tensor(tokens, device=model.device), torch.arange(len(tokens), device=model.device)
        hidden = model.forward(token_ids, positions, lambda layer, q, k, v: attention(q, k, v, heads))
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


# --- 4. MLA: one latent for all heads ---------------------------------------------------------------------------------
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

    def __init__(self, config: MLAConfig, tensors: Callable[[str, int, int], Tensor]) -> None:
        """`tensors(name, out, in)` returns a weight under the checkpoint's name."""
        c = self.config = config
        H, N, R, P, V = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank, c.qk_rope_head_dim, c.v_head_dim
        self.q_proj = tensors("q_proj", H * (N + P), c.hidden_size)
        self.kv_a_proj = tensors("kv_a_proj_with_mqa", R + P, c.hidden_size)
        self.kv_a_norm = tensors("kv_a_layernorm", R, 1).flatten()
        self.kv_b_proj = tensors("kv_b_proj", H * (N + V), R)
        self.W_UK, self.W_UV = self.kv_b_proj.view(H, N + V, R).split((N, V), dim=1)  # [H, N, R], [H, V, R]
        self.scale = (N + P) ** -0.5

    def project(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
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

    def naive(self, q: Tensor, cached: Tensor) -> Tensor:
        """Make every head's keys and values, then attend as MHA. q [T, H, N + P], cached [S, R + P] -> [T, H, V]."""
        c, S, H = self.config, len(cached), self.config.num_attention_heads
        latent, k_rope = cached.split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        kv = F.linear(latent, self.kv_b_proj).view(S, H, -1)  # the expensive line: S · R · H · (N + V) multiplications
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k = torch.cat((k_nope, k_rope[:, None].expand(S, H, -1)), dim=-1)
        return attention(q, k, v, range(H), self.scale)

    def absorb(self, q: Tensor) -> Tensor:
        """Fold W_UK into the query: [T, H, N + P] -> [T, H, R + P]."""
        q_nope, q_rope = q.split((self.config.qk_nope_head_dim, self.config.qk_rope_head_dim), dim=-1)
        return torch.cat((torch.einsum("thn,hnr->thr", q_nope, self.W_UK), q_rope), dim=-1)

    def unfold(self, o: Tensor) -> Tensor:
        """Σ w c -> Σ w v: [T, H, R] -> [T, H, V]."""
        return torch.einsum("thr,hvr->thv", o, self.W_UV)

    def absorbed(self, q: Tensor, cached: Tensor) -> Tensor:
        """The same by MQA on the cache as it is. Shapes as `naive`."""
        key = cached[:, None]  # [S, 1, R + P]: one KV head, which every query head reads
        latent = key[..., : self.config.kv_lora_rank]  # [S, 1, R]
        return self.unfold(attention(self.absorb(q), key, latent, [0] * q.shape[1], self.scale))

    @classmethod
    def random(cls, config: MLAConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> MLA:
        """Seeded random weights, scaled so that activations keep their size."""
        generator = torch.Generator().manual_seed(seed)

        def draw(name: str, rows: int, columns: int) -> Tensor:
            noise = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            return (1 + 0.1 * noise if columns == 1 else noise / math.sqrt(columns)).to(common.device(), dtype)

        return cls(config, draw)


def mla_cost(H: int, T: int, S: int, config: MLAConfig = MLAConfig()) -> dict[str, int]:
    """FLOPs of one layer, for T queries that all see S cached tokens: naive and absorbed.

    F = 2·R·H·(N + V)                           one token through W_UK and W_UV
    naive = S·F + T·S·H·2·(N + P + V)           make S keys and values, then attend as MHA
    absorbed = T·F + T·S·H·2·((R + P) + R)      fold T queries, unfold what they find: longer dot products between
    """
    R, N, P, V = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    F = 2 * R * H * (N + V)
    return {"naive": S * F + 2 * T * S * H * (N + P + V), "absorbed": T * F + 2 * T * S * H * (2 * R + P)}


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


def mla_decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    kv_lora_rank: int,
    scale: float,
    num_splits: int | None = None,
) -> Tensor:
    """Decode attention on a paged latent cache, in the absorbed form.

    Semantics: out[b, h] = Σ_j softmax_j(scale · q[b, h]·x_j) x_j[:R], with x_j the cached row of token j < seq_lens[b].
    Shapes: q [B, H, R + P] from `MLA.absorb` (sequence stride free), cache [num_blocks, block_size, R + P], block_table
    int32 [B, W], seq_lens int32 [B] -> [B, H, R], for `MLA.unfold`. `max_seq_len` bounds the grid, `num_splits` is a
    power of two. vLLM 0.32: v1/attention/backends/mla/triton_mla.py on v1/attention/ops/triton_decode_attention.py.
    """
    (B, H, width), R = q.shape, kv_lora_rank
    if not common.runs_kernel(q):
        return decode_latent(q, cache, block_table, seq_lens, R, scale)
    if B == 0:
        return q[:, :, :R].clone()
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda and not torch.version.hip else None
    rows, tile, num_warps, num_stages = mla_tiles(q.dtype, H, capability)
    groups = triton.cdiv(H, rows)
    splits = num_splits or default_splits(B * groups, max_seq_len, q.device, 1 if rows > 16 else 2)
    out, parts, lse = split_buffers(q, R, splits)
    R_pad, P_pad = (max(16, triton.next_power_of_2(n)) for n in (R, width - R))
    tensors = q, cache, block_table, seq_lens, parts, lse
    sizes = {"H": H, "R": R, "P": width - R, "BLOCK_SIZE": cache.shape[1], "R_PAD": R_pad, "P_PAD": P_pad}
    tiles = {"ROWS": rows, "TILE": tile, "SPLITS": splits, "num_warps": num_warps, "num_stages": num_stages}
    mla_decode_kernel[(B, groups, splits)](
        *tensors, LOG2E * scale, q.stride(0), block_table.stride(0), **sizes, **tiles, UPCAST=common.INTERPRET
    )
    if splits > 1:
        combine_splits(parts, lse, out)
    return out


def mla_tiles(dtype: torch.dtype, H: int, capability: tuple[int, int] | None) -> tuple[int, int, int, int]:
    """(heads, keys per tile, warps, stages): a tile's sums are heads × 512 fp32 numbers, in registers. As compiled:
    32 heads spill on an MI300, and no NVIDIA GPU; Hopper's tensor cores take 64 at once: 3.5 × faster on an H200."""
    if dtype == torch.float32:
        return 16, 16, 8, 2
    if H > 32 and capability == (9, 0):
        return 64, 64, 8, 2
    return (32, 32, 8, 1) if H > 16 and capability else (16, 32, 4, 2)


# --- 5. Heads on several GPUs -----------------------------------------------------------------------------------------


def kv_heads_per_gpu(Hkv: int, tp: int) -> int:
    """Heads are dealt out; with fewer heads than GPUs, each GPU still holds one: a copy."""
    return max(1, Hkv // tp)


def bytes_per_token(Hkv: int, tp: int) -> int:
    """On each of `tp` GPUs, in bf16: keys and values of 32 layers, heads of 128."""
    return 32 * kv_heads_per_gpu(Hkv, tp) * (128 + 128) * 2


def deal_heads(Hq: int, Hkv: int, tp: int, head_map: str) -> tuple[list[list[int]], list[int]]:
    """(the KV heads that each of `tp` GPUs holds, the one that each query head reads). `tp` divides Hq."""
    per_gpu, each = kv_heads_per_gpu(Hkv, tp), Hq // tp
    held = [list(range(gpu * Hkv // tp, gpu * Hkv // tp + per_gpu)) for gpu in range(tp)]
    local = HEAD_MAPS[head_map](each, per_gpu)  # a kernel counts the heads of its own GPU, from 0
    return held, [held[h // each][local[h % each]] for h in range(Hq)]


def heads_that_answer(used: Sequence[int], Hkv: int) -> list[int]:
    """Attention itself says it: of one key, with i as the value of KV head i, an output *is* the head that was read."""
    values = torch.arange(Hkv).float().view(1, Hkv, 1)
    return attention(torch.ones(1, len(used), 1), torch.ones(1, Hkv, 1), values, used).flatten().int().tolist()


# --- 6. The story -----------------------------------------------------------------------------------------------------


def check_decode() -> None:
    """At three ratios: the last token of two prompts, decoded from their blocks."""
    device, lens = common.device(), [7, 40]
    meta = AttentionMetadata.build([[3], [1, 5, 2]], lens, lens, 16)
    for Hq, Hkv in ((6, 6), (9, 3), (6, 1)):
        q, (k, v) = torch.randn(2, Hq, 64, device=device), torch.randn(2, 47, Hkv, 64, device=device)
        sequences = zip(q.split(1), k.split(lens), v.split(lens))
        reference = torch.cat([attention(*sequence, interleaved(Hq, Hkv)) for sequence in sequences])  # [2, Hq, 64]
        kv_cache = torch.full((2, 6, 16, Hkv, 64), math.nan, device=device)
        kv_cache[:, 0] = 0  # the null block
        kv_cache.flatten(1, 2)[:, meta.slot_mapping] = torch.stack((k, v))
        for heads in dict.fromkeys((Hq // Hkv, 1)):
            with common.use_kernels():
                out = gqa_decode(q, kv_cache, meta.block_table, meta.seq_lens, 40, heads)
            common.check(f"{Hq}:{Hkv}, {heads} query head{'s' * (heads > 1)} per load", out, reference)
    if not common.HAS_TRITON:
        common.skipped("the Triton kernels (what is checked above and below is torch's path)", common.kernel_mode())


def show_map(head_map: str, model: llama.Llama, tokenizer: Tokenizer) -> None:
    """Where the wrong map is right, and what the real model says under either."""
    rows = []
    for Hkv in (32, 16, 8, 2, 1):
        q, (k, v), maps = torch.randn(4, 32, 16), torch.randn(2, 4, Hkv, 16), (tiled(32, Hkv), interleaved(32, Hkv))
        error = common.relative_error(*(attention(q, k, v, heads) for heads in maps))
        rows.append([f"32 : {Hkv}", sum(a == b for a, b in zip(*maps)), f"{error:.2f}"])
    common.table(["tiled map, h mod Hkv", "heads that are right", "relative error"], rows)
    question, shape = "What is the capital of France?", (model.num_heads, model.num_kv_heads)
    prompt = tokenizer.ask(question)
    answer = generate_naively(model, prompt, 8, HEAD_MAPS[head_map](*shape))
    common.say(f"{question} {head_map} map: {tokenizer.decode(answer)!r}")
    common.check_equal("8 tokens from the grouped cache: the same", generate(model, [prompt], 8)[0], answer)
    wrong = generate_naively(model, prompt, 8, tiled(*shape))
    common.say(f"And under the tiled map, {shape[0]} : {shape[1]}: {tokenizer.decode(wrong)!r}")


def show_mla() -> None:
    """Naive = absorbed, in fp64 and fp32; then as a decode step on a paged latent cache; then what each costs."""
    device, T = common.device(), 40
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        layer, hidden = MLA.random(MLAConfig(), dtype), torch.randn(T, 2048, dtype=dtype, device=device) / 8
        q, cached = layer.project(hidden, torch.arange(T, device=device))
        naive = layer.naive(q, cached)
        error = common.relative_error(layer.absorbed(q, cached), naive)
        if not error <= allowed:
            raise common.CheckFailed(f"naive and absorbed differ by {error:.1e} in {dtype}")
        common.say(f"✓ a layer of DeepSeek-V2-Lite, naive and absorbed, {dtype}: relative error {error:.1e}")

    meta = AttentionMetadata.build([[4, 1, 3]], [T], [T], 16)
    cache = torch.full((5, 16, cached.shape[1]), math.nan, device=device)
    cache[0] = 0
    cache.flatten(0, 1)[meta.slot_mapping] = cached
    with common.use_kernels():
        o = mla_decode(layer.absorb(q[-1:]), cache, meta.block_table, meta.seq_lens, T, 512, layer.scale, num_splits=2)
    common.check("its last token, decoded from a paged cache, keys split in 2", layer.unfold(o), naive[-1:])

    common.say(f"{512 + 64} elements per token and layer, for 128 heads; MHA would keep {128 * (128 + 128):,}.")
    cross = next(T for T in itertools.count(1) if (cost := mla_cost(128, T, 8192))["naive"] < cost["absorbed"])
    one = mla_cost(128, 1, 8192)
    gflop = f"naive {one['naive'] / 1e9:.0f} GFLOP, absorbed {one['absorbed'] / 1e9:.1f}"
    common.say(f"One query on 8,192 tokens, 128 heads: {gflop}. For {cross} queries or more, naive is less.")


def show_gpus() -> None:
    """What a token costs each of several GPUs, how many sequences fit, and what the wrong map does there."""
    rows, usable, weights = [], 80 * 2**30 * 92 // 100, 16 * 10**9
    for tp in (1, 2, 4, 8, 16):
        mha, gqa, mqa = (bytes_per_token(Hkv, tp) for Hkv in (32, 8, 1))
        kib = [size // 1024 for size in (mha, gqa, mqa, 32 * (512 + 64) * 2)]  # MLA's latent is there once on each
        fit = [(usable - weights // tp) // (8192 * size) for size in (gqa, mqa)]
        answers = heads_that_answer(deal_heads(32, 8, tp, "tiled")[1], 8)
        wrong = sum(a != b for a, b in zip(answers, interleaved(32, 8)))
        rows.append([tp, *kib, *fit, wrong])
    fits = ["GQA-8 fits", "MQA fits"]
    common.table(["GPUs", "MHA: KiB", "GQA-8: KiB", "MQA: KiB", "MLA: KiB", *fits, "GQA-8, tiled: heads wrong"], rows)
    common.say("KiB: of a token, on each GPU. Fits: sequences of 8,192 tokens beside 16 GB of weights, in 80 GiB.")
    common.say("No head can be divided: MQA's is on each of eight GPUs, where no sequence more fits than with GQA-8.")
    common.say("Where a GPU has one KV head, the wrong map is the right one: a test on eight GPUs passes.")


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    help = "which KV head a query head reads (default interleaved; tiled breaks the model)"
    p.add_argument("--head-map", choices=tuple(HEAD_MAPS), default="interleaved", help=help)
    help = "instead of the story: merge the KV heads into one, train for MINUTES, print the curve (--json stores it)"
    p.add_argument("--heal", type=arguments.number(float, 0.05, 600), metavar="MINUTES", help=help)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine = cli.start(args)
    if args.heal:
        return healing.run(args.model, args.heal, args.json, machine)
    loader.check_context(args.model, 128)

    common.heading("1 · The kernel, each KV head loaded once for its group, against the reference")
    check_decode()
    common.heading("2 · The head map on the real model: the bug that is right at both ends")
    show_map(args.head_map, *loader.load(args.model))
    common.heading("3 · MLA: a latent for all heads")
    show_mla()
    common.heading("4 · On several GPUs: one KV head is not less than eight")
    show_gpus()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

"""01 · The KV cache: where every optimization is aimed.

The question: a language model writes one token at a time. What does it have to remember so that token 1,000 costs
about as much as token 10, what does that memory cost, and what becomes the bottleneck once it is there?

The mechanism:
  1. Attention of a new token needs the keys and values of all earlier tokens, and nothing else of them.
  2. Causality makes those final: no later token can change them. So compute each once, and keep it: the KV cache.
  3. Without it, step i runs the model over all P+i tokens again; with it, over one.
  4. Price: bytes per token = layers x kv_heads x (key size + value size) x bytes per element, for every token alive.
  5. A cached token must be rotated to its true position. Restart positions at 0 and nothing crashes; the text rots.
  6. A contiguous cache reserves room for the longest sequence it may ever hold, and chats are short.
  7. A decode step reads all weights and the whole cache to produce one token: memory bandwidth is the limit.

Numbers to remember: Llama-3.1-8B in bf16 keeps 131,072 bytes (128 KiB) per token. 512 tokens after a prompt of 512
cost 392,960 token-forwards without a cache and 1,023 with one.

How to run:
  uv run python vllm/01_kv_cache.py                       the whole story
  uv run python vllm/01_kv_cache.py --restart-positions   break it: the check against the uncached run fails
  uv run python vllm/01_kv_cache.py --slots 50            reserve too little
  uv run python vllm/01_kv_cache.py --bench               minutes: the measured curves

Read for this: Shazeer 2019 (decoding is memory-bound; MQA), Ainslie et al. 2023 (GQA), DeepSeek-V2 2024 (MLA),
Williams et al. 2009 (roofline), Kwon et al. 2023 (what reservations waste), vLLM 0.32 `v1/kv_cache_interface.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used
from common import tl, triton

import argparse
import dataclasses
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine import arguments
from engine.model import folders, llama, loader
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from lab import cli
from lab.hardware import HARDWARE

KEY = "01_kv_cache"


# --- 1. The reference -----------------------------------------------------------------------------------------------


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Attention as the textbook writes it: the whole score matrix, masked, softmaxed, in at least fp32.

    Semantics: o_t = Σ_s softmax_s(scale · q_t·k_s) v_s over s ≤ S − T + t: the T queries are the last of S positions.
    Shapes: q [T, Hq, D]; k, v [S, Hkv, D] with T ≤ S and Hkv dividing Hq; returns [T, Hq, D]. scale defaults to 1/√D.
    """
    (T, Hq, D), (S, Hkv, _) = q.shape, k.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    # Every query head gets a copy of the KV head that it shares: [S, Hq, D].
    k, v = (x.to(dtype).repeat_interleave(Hq // Hkv, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.to(dtype), k) * (D**-0.5 if scale is None else scale)
    position = torch.arange(S - T, S, device=q.device)  # of each query
    visible = torch.arange(S, device=q.device) <= position[:, None]  # [T, S]
    scores = scores.masked_fill(~visible, -math.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1), v).to(q.dtype)


def recompute(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`attend` without a cache: keys and values of this forward pass are all there is."""
    return causal_attention(q, k, v)


# --- 2. The bill ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KVCacheSpec:
    """What one token leaves behind in every layer (vLLM: `AttentionSpec` in `v1/kv_cache_interface.py`)."""

    num_layers: int  # L
    num_kv_heads: int  # Hkv
    head_size: int  # D of a key
    head_size_v: int  # Dv of a value

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> KVCacheSpec:
        """Read the fields of a Hugging Face `config.json`."""
        L, Hq = config["num_hidden_layers"], config["num_attention_heads"]
        if "kv_lora_rank" in config:  # MLA: one latent is key and value of all heads; beside it, the rotated key
            return cls(L, 1, config["kv_lora_rank"] + config["qk_rope_head_dim"], 0)
        D = config.get("head_dim") or config["hidden_size"] // Hq
        Hkv = config.get("num_key_value_heads") or Hq  # MHA: Hq, and older files do not say so; GQA: fewer; MQA: 1
        return cls(L, Hkv, D, D)

    def bytes_per_token(self, element_size: int = 2) -> int:
        """bytes per token = L · Hkv · (D + Dv) · bytes per element"""
        return self.num_layers * self.num_kv_heads * (self.head_size + self.head_size_v) * element_size


# One model of each kind: the fields of its config.json that decide about memory.
MODELS = {
    "Llama-2-7B, MHA": dict(num_hidden_layers=32, num_attention_heads=32, hidden_size=4096),
    "Llama-3.1-8B, GQA": dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096),
    "Gemma-2B, MQA": dict(num_hidden_layers=18, num_attention_heads=8, num_key_value_heads=1, hidden_size=2048),
    "DeepSeek-V3, MLA": dict(num_hidden_layers=61, num_attention_heads=128, kv_lora_rank=512, qk_rope_head_dim=64),
}


# --- 3. The cache, and generation with and without it ---------------------------------------------------------------


class CacheFull(Exception):
    """A sequence has outgrown the rows that were reserved for it."""


class KVCache:
    """Keys and values of B sequences, each with `max_len` rows reserved in advance.

    k [L, B, max_len, Hkv, D], v [L, B, max_len, Hkv, Dv]. Sequence b owns rows [0, max_len) of its slab and uses
    rows [0, seq_lens[b]). A forward pass first claims rows (`allocate_slots`), then fills and reads them layer by layer
    (`attend`), because all layers of a token share one row number: its position.
    """

    def __init__(
        self, spec: KVCacheSpec, num_seqs: int, max_len: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        device = device or common.device()
        rows = (spec.num_layers, num_seqs, max_len, spec.num_kv_heads)
        self.k = torch.zeros(*rows, spec.head_size, dtype=dtype, device=device)
        self.v = torch.zeros(*rows, spec.head_size_v, dtype=dtype, device=device)
        self.max_len = max_len
        self.seq_lens = [0] * num_seqs
        self.num_new_tokens = [0] * num_seqs  # in the pass that runs

    def allocate_slots(self, num_new_tokens: Sequence[int]) -> None:
        """Claim the next rows of every sequence (0: it sits this pass out). Raises CacheFull, and then claims none."""
        rows = [(have, have + new) for have, new in zip(self.seq_lens, num_new_tokens, strict=True)]  # [start, stop)
        for seq, (_, stop) in enumerate(rows):
            if stop > self.max_len:
                raise CacheFull(f"sequence {seq} needs {stop} slots, {self.max_len} are reserved")
        self.num_new_tokens, self.seq_lens = list(num_new_tokens), [stop for _, stop in rows]
        device = self.k.device
        self._seq = torch.repeat_interleave(torch.tensor(self.num_new_tokens)).to(device)  # [T]: whose row
        self.positions = torch.cat([torch.arange(*row) for row in rows]).to(device)  # [T]: which row
        self._lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=device)  # [B]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store this layer's keys and values, then let every query look back over its own sequence.

        Shapes: q [T, Hq, D]; k, v [T, Hkv, D]; T tokens of all sequences in order, as `allocate_slots` claimed them.
        """
        keys, values = self.k[layer], self.v[layer]  # [B, max_len, Hkv, D]
        keys[self._seq, self.positions] = k
        values[self._seq, self.positions] = v
        if all(n == 1 for n in self.num_new_tokens):  # a decode step: T = B
            return decode_attention(q, keys, values, self._lens, max(self.seq_lens))
        parts = zip(q.split(self.num_new_tokens), keys, values, self.seq_lens)
        return torch.cat([causal_attention(q_b, k_b[:S], v_b[:S]) for q_b, k_b, v_b, S in parts])


def steps(prompt_len: int, max_tokens: int, cached: bool) -> Iterator[tuple[int, int]]:
    """The positions [start, stop) that each forward pass computes to write `max_tokens` tokens.

    The first pass is the prefill, the whole prompt. Then a cached run computes the newest token alone, an uncached run
    everything from 0.
    """
    for stop in range(prompt_len, prompt_len + max_tokens):
        yield (stop - 1 if cached and stop > prompt_len else 0), stop


@dataclasses.dataclass
class Generation:
    """What a run wrote and what each of its steps cost."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    token_forwards: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)


def generate(
    model: llama.Llama, prompt: Sequence[int], max_tokens: int, cache: KVCache | None, restart_positions: bool = False
) -> Generation:
    """Greedy decoding of exactly `max_tokens` tokens after `prompt`, with `cache` (of one sequence, empty) or without.

    `restart_positions` is the bug: code that numbers the tokens of each forward pass from 0. It was right as long as a
    pass held the whole sequence. Raises CacheFull when the reservation is too short.
    """
    tokens, run = list(prompt), Generation()
    for start, stop in steps(len(prompt), max_tokens, cached=cache is not None):
        began = time.perf_counter()
        token_ids = torch.tensor(tokens[start:stop], device=model.device)  # [T]
        positions = torch.arange(start, stop, device=model.device)  # [T]
        if restart_positions:
            positions -= start
        if cache is not None:
            cache.allocate_slots([stop - start])
        hidden = model.forward(token_ids, positions, cache.attend if cache else recompute)  # [T, hidden]
        tokens.append(int(model.logits(hidden[-1:]).argmax()))  # only the last row predicts something new
        run.token_ids.append(tokens[-1])
        run.token_forwards.append(len(token_ids))
        run.seconds.append(time.perf_counter() - began)
    return run


# --- 4. The decode kernel -------------------------------------------------------------------------------------------


@common.kernel
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seq_lens_ptr, scale_log2e,
    stride_k_seq, stride_k_row, stride_v_seq, stride_v_row,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one sequence, one KV head, and the G query heads that share it. One pass over S."""
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    Hkv = tl.num_programs(1)
    S = tl.load(seq_lens_ptr + seq)

    # The G query heads are the rows of one tile: each key is loaded once for all of them. A tensor core wants 16 rows.
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    offs_q = ((seq * Hkv + kv_head) * G + g[:, None]) * D + d[None, :]
    mask_q = (g[:, None] < G) & (d[None, :] < D)
    q = tl.load(q_ptr + offs_q, mask=mask_q, other=0.0).to(DOT_DTYPE)  # [G, D]

    # Offsets in int64: a cache soon has more than 2^31 elements.
    k_base = k_ptr + seq.to(tl.int64) * stride_k_seq + kv_head * D
    v_base = v_ptr + seq.to(tl.int64) * stride_v_seq + kv_head * D

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)  # largest score so far
    l = tl.zeros([BLOCK_G], tl.float32)  # Σ exp(score − m)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)  # Σ exp(score − m) · v
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        mask_kv = (s[:, None] < S) & (d[None, :] < D)
        k = tl.load(k_base + s[:, None].to(tl.int64) * stride_k_row + d[None, :], mask=mask_kv, other=0.0)  # [S, D]
        scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee") * scale_log2e  # [G, S]
        scores = tl.where(s[None, :] < S, scores, float("-inf"))

        # A new maximum rescales what was summed under the old: exp(x − m_old) · exp(m_old − m_new) = exp(x − m_new).
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        p = tl.exp2(scores - m_new[:, None])  # exp2, with log2(e) in the scale: one instruction
        rescale = tl.exp2(m - m_new)
        l = l * rescale + tl.sum(p, axis=1)
        v = tl.load(v_base + s[:, None].to(tl.int64) * stride_v_row + d[None, :], mask=mask_kv, other=0.0)
        acc = acc * rescale[:, None] + tl.dot(p.to(DOT_DTYPE), v.to(DOT_DTYPE), input_precision="ieee")
        m = m_new

    tl.store(out_ptr + offs_q, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=mask_q)


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int
) -> torch.Tensor:
    """One query per sequence against that sequence's slab of a contiguous cache.

    Semantics: o[b, h] = Σ_{s < seq_lens[b]} softmax_s(q[b, h]·k[b, s, h // G] / √D) v[b, s, h // G], G = Hq / Hkv
    Shapes: q [B, Hq, D]; k, v [B, S_max, Hkv, D], last two dimensions dense; seq_lens int32 [B], 1 ≤ seq_lens ≤
    max_seq_len ≤ S_max; returns [B, Hq, D]. The kernel never reads rows past seq_lens; the torch path may, and needs
    them finite.
    """
    (B, Hq, D), Hkv = q.shape, k.shape[2]
    G = Hq // Hkv
    if not common.runs_kernel(q):
        visible = torch.arange(max_seq_len, device=q.device) < seq_lens[:, None]  # [B, S]
        k, v = k[:, :max_seq_len].transpose(1, 2), v[:, :max_seq_len].transpose(1, 2)  # [B, Hkv, S, D]
        q = q.reshape(B, Hkv, G, D)  # a group's heads as rows of one query, as in the kernel: keys are read once
        return F.scaled_dot_product_attention(q, k, v, visible[:, None, None]).reshape(B, Hq, D)
    q = q.contiguous()
    out = torch.empty_like(q)
    # Triton's interpreter cannot multiply bf16 matrices; fp32 holds every bf16 and fp16 value exactly.
    dot_dtype = tl.float32 if common.INTERPRET else getattr(tl, str(q.dtype).removeprefix("torch."))
    block_d = max(16, triton.next_power_of_2(D))
    block_s = max(16, min(64, 16384 // (block_d * q.element_size())))  # a tile of keys: at most 16 KiB of fast memory
    decode_attention_kernel[(B, Hkv)](
        q, k, v, out, seq_lens, D**-0.5 / math.log(2), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        G=G, D=D, BLOCK_G=max(16, triton.next_power_of_2(G)), BLOCK_D=block_d, BLOCK_S=block_s, DOT_DTYPE=dot_dtype,
        num_warps=4, num_stages=2 if q.dtype == torch.float32 else 3,
    )  # fmt: skip
    return out


# --- 5. What a reservation wastes -----------------------------------------------------------------------------------

# Mean tokens of a prompt and of its answer: Alpaca and ShareGPT as in Kwon et al. 2023, §6.1; the conversations in
# AzurePublicDataset, November 2023.
WORKLOADS = {"Alpaca": (19.31, 58.45), "ShareGPT": (161.31, 337.99), "Azure conversation": (1154.7, 211.0)}
REQUESTS = 20_000


def geometric(rng: random.Random, mean: float) -> int:
    """A length of at least 1, by inversion: after every token, the text ends with probability 1/mean."""
    return 1 + int(math.log1p(-rng.random()) / math.log1p(-1 / mean))


def serve_from_reservations(
    prompt_mean: float, output_mean: float, slots: int, requests: int, seed: int
) -> tuple[list[int], int, int]:
    """(rows used by each request that was served, requests refused, answers cut short), with `slots` rows for each.

    A prompt that leaves no slot for an answer is refused; an answer that runs into the end is cut there. Rows are
    counted when the last token is written: what is empty then is the least that a reservation ever wastes.
    """
    rng, used = random.Random(seed), []
    refused = cut = 0
    for _ in range(requests):
        prompt, output = geometric(rng, prompt_mean), geometric(rng, output_mean)
        if prompt >= slots:
            refused += 1
        else:
            cut += prompt + output > slots
            used.append(min(prompt + output, slots))
    return used, refused, cut


# --- 6. Why decode is memory-bound ----------------------------------------------------------------------------------


def decode_cost(num_seqs: int, context: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one decode step of Llama-3.1-8B in bf16: B sequences, each with its newest token at S.

    FLOPs = B · (2 · W + 4 · L · Hq · D · S)
    bytes = 2 · W + B · (S + 1) · bytes per token

    A multiply and an add per weight and, in each query head, per element of K and V. One reading of the weights serves
    all sequences; each reads its own cache, and adds a row to it.
    """
    B, S, L, Hq, D = num_seqs, context, 32, 32, 128
    W = 8_030_261_248 - 128_256 * 4096  # all parameters but the input embedding's, of which a token reads one row
    per_token = KVCacheSpec.from_config(MODELS["Llama-3.1-8B, GQA"]).bytes_per_token()
    return B * (2 * W + 4 * L * Hq * D * S), 2 * W + B * (S + 1) * per_token


# --- 7. The story ---------------------------------------------------------------------------------------------------

QUESTION = "Name the planets of the solar system, from the sun outward."


def check_kernel() -> None:
    """`decode_attention` against the textbook at SmolLM2's heads, as this device runs it and through its kernel."""
    lens, device = [1, 65, 130], common.device()
    q, (k, v) = torch.randn(3, 9, 64, device=device), torch.randn(2, 3, 140, 3, 64, device=device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    reference = torch.cat([causal_attention(q[b, None], k[b, :n], v[b, :n]) for b, n in enumerate(lens)])
    if not common.HAS_GPU:
        common.check("torch path, ragged lengths", decode_attention(q, k, v, seq_lens, max(lens)), reference)
    if not common.HAS_TRITON:
        common.skipped("the Triton kernel", common.kernel_mode())
        return
    with common.use_kernels():
        out = decode_attention(q, k, v, seq_lens, max(lens))
    common.check(f"Triton kernel, {common.kernel_mode()}, the same", out, reference)


def prompt_tokens(args: argparse.Namespace, folder: Path) -> list[int]:
    """The question's token ids; no weights are read. InputError where the model or `--slots` has no room for them."""
    limit = LlamaConfig.from_folder(folder).max_position_embeddings
    prompt, N = Tokenizer(folder).ask(args.prompt), args.new_tokens
    P = len(prompt)
    if (args.prompt, N) == (QUESTION, 24):  # nobody asked for more
        loader.check_context(args.model, P + N)
    if limit - N < 1:
        raise common.InputError(f"--new-tokens {N}: allowed with this model's context: 2 to {limit - 1}")
    if not 1 <= P <= limit - N:
        raise common.InputError(f"--prompt: {P} tokens; allowed with --new-tokens {N}: 1 to {limit - N}")
    if args.slots < P + N - 1:  # the last token is written, and never run through the model
        allowed = f"allowed for a prompt of {P} tokens and --new-tokens {N}: at least {P + N - 1}"
        raise common.InputError(f"--slots {args.slots}: too few; {allowed}")
    return prompt


def fresh_cache(args: argparse.Namespace, model: llama.Llama) -> KVCache:
    """For one sequence, empty."""
    return KVCache(KVCacheSpec.from_config(vars(model.config)), 1, args.slots, model.dtype, model.device)


def show_cache(args: argparse.Namespace, model: llama.Llama, prompt: list[int]) -> Generation:
    """The same tokens with a cache and without one, and what each way costs. Returns the run with the cache."""
    P, N = len(prompt), args.new_tokens
    generate(model, prompt, 1, fresh_cache(args, model))  # not timed: it waits for the weights to come from the disk
    cached = generate(model, prompt, N, fresh_cache(args, model), args.restart_positions)
    uncached = generate(model, prompt, N, cache=None)
    same = f"{N} tokens after a prompt of {P}: the same with and without a cache"
    common.check_equal(same, cached.token_ids, uncached.token_ids)
    counted = sum(cached.token_forwards), sum(uncached.token_forwards)
    formula = (P + N - 1, N * P + N * (N - 1) // 2)
    common.check_equal("token-forwards counted: P + N − 1 with a cache, Σ (P + i) without", counted, formula)

    rows = []
    for name, run in (("with a cache", cached), ("without", uncached)):
        first, last = f"{1e3 * run.seconds[0]:.0f} ms", f"{1e3 * run.seconds[-1]:.0f} ms"
        rows.append([name, f"{sum(run.token_forwards):,}", first, last, f"{sum(run.seconds):.2f} s"])
    common.table(["", "token-forwards", "first token", "last token", "all"], rows)
    fewer, faster = counted[1] / counted[0], sum(uncached.seconds) / sum(cached.seconds)
    surprise = f"{fewer:.0f} times fewer token-forwards, {faster:.1f} times faster"
    common.say(f"{surprise}: every pass reads all weights, even for a single token.")
    return cached


def show_kernel_step(args: argparse.Namespace, model: llama.Llama, prompt: list[int], expected: Sequence[int]) -> None:
    """One decode step whose attention runs through the Triton kernel."""
    if not common.HAS_TRITON:
        return
    before = decode_attention_kernel.launches
    with common.use_kernels():
        token_ids = generate(model, prompt, 2, fresh_cache(args, model)).token_ids
    found = token_ids, decode_attention_kernel.launches - before
    step = "a decode step through the Triton kernel, launched once a layer: the same token"
    common.check_equal(step, found, (expected[:2], model.config.num_hidden_layers))


def show_bug(
    args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer, prompt: list[int], right: Sequence[int]
) -> None:
    """What a cached run writes whose every decode step has position 0."""
    wrong = generate(model, prompt, args.new_tokens, fresh_cache(args, model), restart_positions=True).token_ids
    common.say("The bug: every decode step numbers its token from 0. There is no error, and the cost is the same.")
    common.say(f"right: {tokenizer.decode(right)!r}\nwrong: {tokenizer.decode(wrong)!r}")


def show_bill() -> None:
    """The formula for one published model of each kind, in bf16."""
    rows = []
    for name, config in MODELS.items():
        spec = KVCacheSpec.from_config(config)
        layer, per_token = f"{spec.num_kv_heads} × ({spec.head_size} + {spec.head_size_v})", spec.bytes_per_token()
        rows.append([name, spec.num_layers, layer, f"{per_token:,}", f"{8192 * per_token / 2**30:.2f} GiB"])
    common.table(["", "L", "Hkv × (D + Dv)", "bytes per token", "8,192 tokens"], rows)
    common.say("Llama-3.1's tokens cost a quarter of Llama-2's, because four query heads share a KV head.")


def show_waste(args: argparse.Namespace, used: int) -> None:
    """How much of a reservation stays empty: of part 2's, and for three published workloads."""
    common.say(f"Part 2 used {used} of its {args.slots:,} slots: {1 - used / args.slots:.1%} of them stayed empty.")
    rows = []
    for name, (prompt, output) in WORKLOADS.items():
        served, refused, cut = serve_from_reservations(prompt, output, args.slots, REQUESTS, args.seed)
        empty = f"{1 - sum(served) / (len(served) * args.slots):.1%}" if served else "–"
        shares = [empty, f"{refused / REQUESTS:.1%}", f"{cut / REQUESTS:.1%}"]
        rows.append([name, f"{prompt:.0f} + {output:.0f}", *shares])
    common.table(["", "mean prompt + answer", "of the slots empty", "requests refused", "answers cut short"], rows)
    common.say("A larger reservation leaves more slots empty; a smaller one refuses or cuts short more requests.")


def show_roofline() -> None:
    """A decode step of Llama-3.1-8B beside an H100's data sheet, up to a batch that no GPU holds."""
    gpu, rows = HARDWARE["H100 80GB"], []
    for B in (1, 8, 64, 10**6):
        flops, moved = decode_cost(B, context=2048)
        seconds = gpu.seconds(flops, moved)
        rows.append([f"{B:,}", f"{moved / 1e9:,.0f} GB", f"{flops / moved:.0f}", f"{B / seconds:,.0f}"])
    common.table(["sequences of 2,048 tokens", "to read", "FLOP/byte", "tokens/s at best"], rows)
    common.say(f"An H100 does {gpu.ridge:.0f} FLOPs while it loads a byte: at this length, no batch is compute-bound.")


def build_parser() -> argparse.ArgumentParser:
    p = cli.parser(__doc__)
    p.add_argument("--prompt", default=QUESTION, help="the question that the model answers (default: %(default)s)")
    p.add_argument("--new-tokens", type=arguments.number(int, 2, 1024), default=24, help="tokens to write (default 24)")
    slots = "rows that the cache reserves for a sequence (default 2048)"
    p.add_argument("--slots", type=arguments.number(int, 1, 1 << 16), default=2048, help=slots)
    bug = "break it: number the tokens of every forward pass from 0; the check must fail"
    p.add_argument("--restart-positions", action="store_true", help=bug)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    prompt = prompt_tokens(args, folders.model_folder(args.model))
    model, tokenizer = loader.load(args.model)

    common.heading("1 · The decode kernel against the naive reference")
    check_kernel()
    common.heading("2 · The real model: with a cache, without one, and with the wrong positions")
    cached = show_cache(args, model, prompt)
    show_kernel_step(args, model, prompt, cached.token_ids)
    show_bug(args, model, tokenizer, prompt, cached.token_ids)
    common.heading("3 · The bill, in bf16")
    show_bill()
    common.heading(f"4 · What reserving {args.slots:,} slots wastes: {REQUESTS:,} requests, seed {args.seed}")
    show_waste(args, used=len(prompt) + args.new_tokens - 1)
    common.heading("5 · Why decode is memory-bound: Llama-3.1-8B in bf16, an H100's data sheet")
    show_roofline()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

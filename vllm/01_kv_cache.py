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

import argparse
import dataclasses
import functools
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import HARDWARE, tl, triton

import llama
from lab.lengths import WORKLOADS, geometric
from lab.roofline import (
    GPU_MEMORY_UTILIZATION,
    KVCacheSpec,
    KV_CACHE_DTYPES,
    MODELS,
    PUBLISHED_ITL,
    attention_intensity,
    latency_line,
    sequences_that_fit,
    slug,
    step_cost,
    vector_bytes,
    weight_bytes,
    weights_read,
)

KEY = "01_kv_cache"


# --- 1. The reference -----------------------------------------------------------------------------------------------


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Attention as the textbook writes it: the whole score matrix, masked, softmaxed, in at least fp32.

    Semantics: o_t = Σ_s softmax_s(scale · q_t·k_s) v_s over s ≤ S − T + t: the T queries are the last of S positions.
    Shapes: q [T, Hq, D]; k, v [S, Hkv, D] with T ≤ S and Hkv dividing Hq; returns [T, Hq, D]. scale defaults to 1/√D.
    """
    (T, Hq, D), (S, Hkv, _) = q.shape, k.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(dtype).repeat_interleave(Hq // Hkv, dim=1) for x in (k, v))  # every query head its KV head: [S, Hq, D]
    scores = torch.einsum("thd,shd->hts", q.to(dtype), k) * (D**-0.5 if scale is None else scale)
    position = torch.arange(S - T, S, device=q.device)  # of each query
    visible = torch.arange(S, device=q.device) <= position[:, None]  # [T, S]
    scores = scores.masked_fill(~visible, -math.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1), v).to(q.dtype)


def recompute(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`attend` without a cache: keys and values of this forward pass are all there is."""
    return causal_attention(q, k, v)


# --- 2. The bill ----------------------------------------------------------------------------------------------------


# --- 3. The cache, and generation with and without it ---------------------------------------------------------------


class CacheFull(Exception):
    """A sequence has outgrown the rows that were reserved for it."""


class KVCache:
    """Keys and values of B sequences, each with `max_len` rows reserved in advance.

    k [L, B, max_len, Hkv, D], v [L, B, max_len, Hkv, Dv]. Sequence b owns rows [0, max_len) of its slab and uses
    rows [0, seq_lens[b]). A forward pass first claims rows (`allocate_slots`), then fills and reads them layer by layer
    (`attend`), because all layers of a token share one row number: its position.
    """

    def __init__(self, spec: KVCacheSpec, num_seqs: int, max_len: int, dtype: torch.dtype = torch.float32,
                 device: torch.device | str | None = None) -> None:  # fmt: skip
        device = device or common.device()
        rows = (spec.num_layers, num_seqs, max_len, spec.num_kv_heads)
        self.k = torch.zeros(*rows, spec.head_size, dtype=dtype, device=device)
        self.v = torch.zeros(*rows, spec.head_size_v, dtype=dtype, device=device)
        self.max_len = max_len
        self.seq_lens = [0] * num_seqs
        self.new_rows: list[tuple[int, int]] = []  # claimed by this pass: [start, stop) of each sequence

    @property
    def nbytes(self) -> int:
        """Bytes reserved, used or not."""
        return self.k.nbytes + self.v.nbytes

    def allocate_slots(self, num_new_tokens: Sequence[int]) -> None:
        """Claim the next rows of every sequence (0: it sits this pass out). Raises CacheFull, and then claims none."""
        rows = [(have, have + new) for have, new in zip(self.seq_lens, num_new_tokens, strict=True)]
        for seq, (_, stop) in enumerate(rows):
            if stop > self.max_len:
                raise CacheFull(f"sequence {seq} needs {stop} slots, {self.max_len} are reserved")
        self.new_rows = rows
        self.seq_lens = [stop for _, stop in rows]
        device = self.k.device
        if device.type != "meta":  # on the meta device, the cache only keeps the books
            owners = [torch.full((stop - start,), seq) for seq, (start, stop) in enumerate(rows)]
            self._seq = torch.cat(owners).to(device)  # [T]: whose row
            self.positions = torch.cat([torch.arange(*row) for row in rows]).to(device)  # [T]: which row
            self._lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=device)  # [B]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store this layer's keys and values, then let every query look back over its own sequence.

        Shapes: q [T, Hq, D]; k, v [T, Hkv, D]; T tokens of all sequences in order, as `allocate_slots` claimed them.
        """
        keys, values = self.k[layer], self.v[layer]  # [B, max_len, Hkv, D]
        keys[self._seq, self.positions] = k
        values[self._seq, self.positions] = v
        if all(stop - start == 1 for start, stop in self.new_rows):  # a decode step: T = B
            return decode_attention(q, keys, values, self._lens, max(self.seq_lens))
        outs, first = [], 0
        for seq, (start, stop) in enumerate(self.new_rows):
            last = first + stop - start
            outs.append(causal_attention(q[first:last], keys[seq, :stop], values[seq, :stop]))
            first = last
        return torch.cat(outs)


def steps(prompt_len: int, max_tokens: int, cached: bool) -> Iterator[tuple[int, int]]:
    """The positions [start, stop) that each forward pass computes to write `max_tokens` tokens.

    The first pass is the prefill: the whole prompt. After it, a cached run computes the newest token alone and an
    uncached one everything from 0.
    """
    for stop in range(prompt_len, prompt_len + max_tokens):
        yield (stop - 1 if cached and stop > prompt_len else 0), stop


@dataclasses.dataclass
class Generation:
    """What a run wrote and what each of its steps cost."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    token_forwards: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)


def generate(model: llama.Llama, prompt: Sequence[int], max_tokens: int, cache: KVCache | None = None,
             restart_positions: bool = False) -> Generation:  # fmt: skip
    """Greedy decoding of exactly `max_tokens` tokens after `prompt`, with `cache` (of one sequence, empty) or without.

    `restart_positions` is the bug: code that numbers the tokens of each forward pass from 0. It was right as long as a
    pass held the whole sequence. Raises CacheFull when the reservation is too short.
    """
    tokens, run = list(prompt), Generation()
    for start, stop in steps(len(prompt), max_tokens, cached=cache is not None):
        began = time.perf_counter()
        token_ids = torch.tensor(tokens[start:stop], device=model.device)  # [T]
        if cache is None:
            positions, attend = torch.arange(start, stop, device=model.device), recompute
        else:
            cache.allocate_slots([stop - start])
            positions, attend = cache.positions, cache.attend
        if restart_positions:
            positions = torch.arange(stop - start, device=model.device)
        hidden = model.forward(token_ids, positions, attend)  # [T, hidden]
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


def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
                     scale: float | None = None) -> torch.Tensor:  # fmt: skip
    """One query per sequence against that sequence's slab of a contiguous cache.

    Semantics: o[b, h] = Σ_{s < seq_lens[b]} softmax_s(scale · q[b, h]·k[b, s, h // G]) v[b, s, h // G], G = Hq / Hkv
    Shapes: q [B, Hq, D]; k, v [B, S_max, Hkv, D], last two dimensions dense; seq_lens int32 [B], 1 ≤ seq_lens ≤
    max_seq_len ≤ S_max; returns [B, Hq, D]. The kernel never reads rows past seq_lens; the torch path may, and needs
    them finite.
    """
    (B, Hq, D), Hkv = q.shape, k.shape[2]
    G, scale = Hq // Hkv, D**-0.5 if scale is None else scale
    if not common.runs_kernel(q):
        mask = None
        if not bool((seq_lens == max_seq_len).all()):
            mask = (torch.arange(max_seq_len, device=q.device) < seq_lens[:, None])[:, None, None]  # [B, 1, 1, S]
        k, v = k[:, :max_seq_len].transpose(1, 2), v[:, :max_seq_len].transpose(1, 2)  # [B, Hkv, S, D]
        q = q.reshape(B, Hkv, G, D)  # a group's heads as rows of one query, as in the kernel: keys are read once
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).reshape(B, Hq, D)
    q = q.contiguous()
    out = torch.empty_like(q)
    # Triton's interpreter cannot multiply bf16 matrices; fp32 holds every bf16 and fp16 value exactly.
    dot_dtype = tl.float32 if common.INTERPRET else getattr(tl, str(q.dtype).removeprefix("torch."))
    block_d = max(16, triton.next_power_of_2(D))
    block_s = max(16, min(64, 16384 // (block_d * q.element_size())))  # a tile of keys: at most 16 KiB of fast memory
    decode_attention_kernel[(B, Hkv)](
        q, k, v, out, seq_lens, scale / math.log(2), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        G=G, D=D, BLOCK_G=max(16, triton.next_power_of_2(G)), BLOCK_D=block_d, BLOCK_S=block_s, DOT_DTYPE=dot_dtype,
        num_warps=4, num_stages=2 if q.dtype == torch.float32 else 3,
    )  # fmt: skip
    return out


def example_launches(dtype: torch.dtype) -> None:
    """Call the kernel's wrapper at the shapes this lesson runs, on meta tensors: for the compile check."""
    for B, S, Hq, Hkv, D in ((1, 2048, 9, 3, 64), (32, 8192, 32, 8, 128)):  # SmolLM2; an 8B Llama
        q = torch.empty(B, Hq, D, dtype=dtype, device="meta")
        k = torch.empty(B, S, Hkv, D, dtype=dtype, device="meta")
        decode_attention(q, k, k, torch.empty(B, dtype=torch.int32, device="meta"), S)


# --- 5. What a reservation wastes -----------------------------------------------------------------------------------


def reservation_waste(prompt_mean: float, output_mean: float, slots: int = 2048, requests: int = 20_000,
                      seed: int = 0) -> dict[str, Any]:  # fmt: skip
    """Serve `requests` of geometric lengths from reservations of `slots` rows each, as a contiguous cache does.

    A prompt that leaves no slot for an answer is refused; an answer that runs into the end is cut there. Waste is the
    share of reserved rows that are still empty when the last token is written: the least a reservation ever wastes.
    """
    rng = random.Random(seed)
    used: list[int] = []
    refused = cut = 0
    for _ in range(requests):
        prompt, output = geometric(rng, prompt_mean), geometric(rng, output_mean)
        if prompt >= slots:
            refused += 1
            continue
        cut += prompt + output > slots
        used.append(min(prompt + output, slots))
    used.sort()
    reserved = slots * len(used)
    return {
        "mean_says": 1 - (prompt_mean + output_mean) / slots,
        "simulated": 1 - sum(used) / reserved if used else None,
        "refused": refused / requests,
        "cut": cut / requests,
        "used_percentiles": [used[len(used) * i // 100] for i in range(100)] if used else [],
    }


# --- 6. Why decode is memory-bound ----------------------------------------------------------------------------------


# --- 7. The simulation ----------------------------------------------------------------------------------------------

QUESTION = "Name the planets of the solar system, from the sun outward."

# What SmolLM2 answers to QUESTION, greedily in fp32, with right positions and with positions that restart at 0.
# The script compares both with the model each time it runs.
RECORDED = {
    "right": ["The", " planets", " of", " the", " solar", " system", " are", ":", " Mercury", ",", " Venus", ",",
              " Earth", ",", " Mars", ",", " Jupiter", ",", " Saturn", ",", " Uranus", ",", " Neptune", ","],
    "restarted": ["The", " Solar", " System", " of", " the", " Solar", " System", " of", " the", " Solar", " System",
                  ".", "com", ".", "com", ".", "com", ".", "com", ".", "com", ".", "com", "."],
}  # fmt: skip

WIDGET_DEFAULT: dict[str, Any] = {
    "prompt": 512, "new_tokens": 512, "cache": True, "model": "Llama-3.1-8B", "batch": 1, "gpu_gib": 24,
    "restart_positions": False,
}  # fmt: skip
WIDGET_CHOICES = {
    "prompt": range(1, 131073), "new_tokens": range(1, 4097), "batch": range(1, 1025), "gpu_gib": range(1, 4097),
    "cache": (True, False), "restart_positions": (True, False), "model": tuple(MODELS),
}  # fmt: skip


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """The bill of `batch` equal requests: token-forwards and cache bytes of every step, and the step that runs out.

    params: prompt, new_tokens, batch, gpu_gib (integers), cache, restart_positions (booleans), model (one of MODELS).
    The rows come from `KVCache.allocate_slots` on the meta device, the passes from `steps`. Raises InputError.
    """
    p = common.checked(params, WIDGET_CHOICES)
    config = MODELS[p["model"]]
    spec, weights = KVCacheSpec.from_config(config), weight_bytes(config)
    usable = p["gpu_gib"] * 2**30 * 92 // 100
    per_position = p["batch"] * spec.bytes_per_token()  # all requests are equal: one row number, `batch` rows
    room = max(0, (usable - weights) // per_position)
    cache = KVCache(spec, 1, room, torch.bfloat16, "meta") if p["cache"] else None
    trace: dict[str, Any] = {
        "params": p, "bytes_per_token": spec.bytes_per_token(), "weight_bytes": weights, "usable_bytes": usable,
        "room": room, "oom_step": None if weights <= usable else 0,
        "forwards": [], "reused": [], "positions": [], "cache_bytes": [],
    }  # fmt: skip
    for step, (start, stop) in enumerate(steps(p["prompt"], p["new_tokens"], p["cache"])):
        if trace["oom_step"] is None and cache is not None:
            try:
                cache.allocate_slots([stop - start])
            except CacheFull:
                trace["oom_step"] = step
        if trace["oom_step"] is not None:
            break
        trace["forwards"].append(p["batch"] * (stop - start))
        trace["reused"].append(p["batch"] * start)
        trace["positions"].append(0 if p["restart_positions"] else start)
        trace["cache_bytes"].append(cache.seq_lens[0] * per_position if cache is not None else 0)
    trace["total_forwards"] = sum(trace["forwards"])
    trace["text"] = RECORDED["restarted" if p["cache"] and p["restart_positions"] else "right"]
    return trace


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p, done = trace["params"], len(trace["forwards"])
    lines = [
        f"{p['model']}, bf16: {trace['bytes_per_token']:,} bytes of KV cache per token, "
        f"weights {trace['weight_bytes'] / 2**30:.2f} GiB",
        f"{p['batch']} × ({p['prompt']} prompt + {p['new_tokens']} new tokens), cache {'on' if p['cache'] else 'off'}, "
        f"GPU {p['gpu_gib']} GiB, of which {trace['usable_bytes'] / 2**30:.2f} usable",
    ]
    shown = sorted({0, 1, 2, done - 1} & set(range(done)))
    for before, step in zip([-1, *shown], shown):
        if step - before > 1:
            lines.append("  …")
        forwards, reused, position, held = (trace[k][step] for k in ("forwards", "reused", "positions", "cache_bytes"))
        lines.append(f"  step {step:>4}: forwards {forwards:,}, reuses {reused:,}, first position {position}, "
                     f"cache {held / 2**20:,.1f} MiB")  # fmt: skip
    lines.append(f"token-forwards: {trace['total_forwards']:,} in {done} steps")
    if trace["weight_bytes"] > trace["usable_bytes"]:
        lines.append("OUT OF MEMORY at step 0: the weights alone do not fit")
    elif trace["oom_step"] is not None:
        lines.append(f"OUT OF MEMORY at step {trace['oom_step']}: room for {trace['room']:,} positions "
                     f"of {p['batch']} sequences")  # fmt: skip
    lines.append(f"SmolLM2 says:\n{''.join(trace['text'])!r}")
    return "\n".join(lines)


# --- 8. The numbers that the text quotes, and the figures -----------------------------------------------------------


def facts() -> dict[str, Any]:
    """Every deterministic number of the lesson's text and figures. No model, under a second."""
    specs = {name: KVCacheSpec.from_config(config) for name, config in MODELS.items()}
    opt, eight_spec, deepseek = (specs[name] for name in ("OPT-13B", "Llama-3.1-8B", "DeepSeek-V3"))
    passes = {kind: list(steps(512, 512, kind == "cached")) for kind in ("cached", "uncached")}
    forwards = {kind: [stop - start for start, stop in ranges] for kind, ranges in passes.items()}
    broken = simulate(WIDGET_DEFAULT | {"batch": 64})
    latent_fp8 = vector_bytes(512, 8, 32, 128) + vector_bytes(64, 16)  # a scale per 128; the rotated key stays bf16
    return {
        "bytes_per_token": {slug(name): spec.bytes_per_token() for name, spec in specs.items()},
        "bytes_by_dtype": {kind: eight_spec.bytes_per_token(kind) for kind in KV_CACHE_DTYPES},
        "mla": {
            "elements": deepseek.head_size,
            "as_gqa_groups": deepseek.head_size / (2 * 128),
            "times_smaller_than_mha": 128 * (2 * 128) / deepseek.head_size,
            "fp8_bytes_per_layer": latent_fp8,
            "fp8_bytes_per_token": deepseek.num_layers * latent_fp8,
        },
        "weight_bytes": {slug(name): weight_bytes(config) for name, config in MODELS.items()},
        "fit": {
            slug(name): {str(gb): sequences_that_fit(gb * 1e9, config, 2048) for gb in (24, 40, 80, 141)}
            for name, config in MODELS.items()
        },
        # A latent vector has no heads to deal out: eight GPUs share the weights, and each keeps the whole cache.
        "fit_tp8_h200": {
            "deepseek_v3": int(
                (GPU_MEMORY_UTILIZATION * 141e9 - weight_bytes(MODELS["DeepSeek-V3"]) / 8)
                // (2048 * deepseek.bytes_per_token())
            )
        },
        "opt_slots": (slots := 12 * 2**30 // opt.bytes_per_token()),
        "opt_requests": slots // 2048,
        "forwards": {kind: sum(counts) for kind, counts in forwards.items()},
        "forwards_ratio": sum(forwards["uncached"]) / sum(forwards["cached"]),
        "curve": forwards,
        "tokens_in_16_gib": 2**34 // eight_spec.bytes_per_token(),
        "waste": {slug(name): reservation_waste(*means) for name, means in WORKLOADS.items()},
        "claim_70b": _claim_facts(),
        "intensity": _intensity_facts(),
        "itl": _latency_facts(),
        "programs": {f"b{B}": B * eight_spec.num_kv_heads for B in (1, 32)},
        "break_it": {"oom_step": broken["oom_step"], "room": broken["room"]},
    }


def _claim_facts() -> dict[str, float]:
    """“A 70B model serving 128K context allocates ~40GB per request”, of which 2K tokens use 2 %."""
    config = MODELS["Llama-3.1-70B"]
    gib = 128 * 1024 * KVCacheSpec.from_config(config).bytes_per_token() / 2**30
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    weights_4bit = weight_bytes(config | {"weight_bits": 4}) / 1e9
    return {"gib": gib, "waste": 1 - 2048 / (128 * 1024), "mha_gib": gib * group, "weights_4bit_gb": weights_4bit}


def _intensity_facts() -> dict[str, Any]:
    """FLOPs per byte of Llama-3.1-8B, and where the cache keeps any batch from ever reaching an H100's ridge."""
    config, ridge = MODELS["Llama-3.1-8B"], HARDWARE["H100 80GB"].ridge
    costs = {"decode": {B: step_cost(config, B, 1, 2048) for B in (1, 8, 32, 64)},
             "prefill": {T: step_cost(config, 1, T, T) for T in (128, 512, 2048, 8192)}}  # fmt: skip
    # An endless batch spreads the weights over so many tokens that only the cache is left to read:
    # intensity -> (2·W + attention FLOPs per key · S) / (bytes per token · S), below the ridge unless S is small.
    weight_flops = 2 * sum(weights_read(config))
    per_key = attention_intensity(config) * (per_token := KVCacheSpec.from_config(config).bytes_per_token())
    return {
        "ridge_h100": ridge,
        "attention": {slug(m): attention_intensity(c) for m, c in MODELS.items() if "kv_lora_rank" not in c},
        **{kind: {str(n): flops / moved for n, (flops, moved) in rows.items()} for kind, rows in costs.items()},
        "decode_limit": (weight_flops + per_key * 2048) / (per_token * 2048),
        "compute_bound_below": weight_flops / (ridge * per_token - per_key),
    }


def _latency_facts() -> dict[str, float]:
    """The published latency line of Llama-3.1-8B, read as bandwidths."""
    config, sheet = MODELS["Llama-3.1-8B"], HARDWARE["H100 80GB"].bandwidth
    spec, weights = KVCacheSpec.from_config(config), 2 * sum(weights_read(config))
    intercept, slope = latency_line(config, sheet)
    (a16, s16), (a8, s8) = PUBLISHED_ITL["bfloat16"], PUBLISHED_ITL["fp8"]
    cache_rate, cache_rate_fp8 = spec.bytes_per_token() / (s16 * 1e-3), spec.bytes_per_token("fp8") / (s8 * 1e-3)
    return {
        "weights_gb": weights / 1e9,
        "intercept_ms": intercept * 1e3,
        "slope_ms": slope * 1e3,
        "slope_tb_s": cache_rate / 1e12,
        "slope_share": cache_rate / sheet,
        "slope_tb_s_fp8": cache_rate_fp8 / 1e12,
        "slope_ratio_fp8": s8 / s16,
        "intercept_tb_s": weights / (a16 * 1e-3) / 1e12,
        "intercept_share": weights / (a16 * 1e-3) / sheet,
        "weights_at_cache_rate_ms": weights / cache_rate * 1e3,
        "unexplained_ms": a16 - weights / cache_rate * 1e3,
        "fp8_break_even": (a8 - a16) / (s16 - s8),
        "tokens_as_heavy_as_weights": weights // spec.bytes_per_token(),
        "tokens_doubling_itl": a16 / s16,
        "eight_requests_ms": a16 + s16 * 8 * 21_000,  # of 20,000 + 2,000 tokens, on average half-way
    }


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from `facts()` and the committed measurements alone."""
    known, measured = facts(), common.results(KEY).get("bench", {})
    return [_draw_steps(folder), _draw_cost(folder, known, measured), _draw_waste(folder, known),
            _draw_roofline(folder, known), _draw_latency(folder, known)]  # fmt: skip


def _draw_steps(folder: str | Path) -> Path:
    """Which positions each pass computes, as `steps` says: everything without a cache, the newest with one."""
    from matplotlib.patches import Rectangle

    P, N = 5, 6
    figure, axes = common.new_figure(8.0, 3.0, ncols=2)
    for axis, cached in zip(axes, (False, True)):
        ranges = list(steps(P, N, cached))
        for row, (start, stop) in enumerate(ranges):
            for i in range(stop):
                color = common.COLORS["blue" if i >= start else "light"]
                axis.add_patch(Rectangle((i + 0.04, row + 0.04), 0.92, 0.92, facecolor=color))
                if i < start:
                    axis.text(
                        i + 0.5, row + 0.5, "kv", ha="center", va="center", fontsize=7, color=common.COLORS["grey"]
                    )
        axis.set(xlim=(-0.1, P + N), ylim=(N + 0.1, -0.1), aspect="equal", xlabel="position", ylabel="step")
        axis.set_xticks([i + 0.5 for i in range(P + N - 1)], range(P + N - 1))
        axis.set_yticks([i + 0.5 for i in range(N)], range(N))
        total = sum(stop - start for start, stop in ranges)
        axis.set_title(f"{'With' if cached else 'Without'} a cache: {total} token-forwards")
        axis.tick_params(length=0)
        axis.spines[["left", "bottom"]].set_visible(False)
    return common.save_figure(figure, folder, "01_steps")


def _draw_cost(folder: str | Path, known: dict[str, Any], measured: dict[str, Any]) -> Path:
    """Quadratic against linear: counted at 512 + 512, and in seconds on the machine that was measured."""
    panels = [(known["curve"], "token-forwards so far", "Counted, after a prompt of 512")]
    if run := measured.get("generate"):
        panels.append((run["seconds"], "seconds so far, CPU", f"Measured, after a prompt of {run['prompt']}"))
    figure, axes = common.new_figure(8.0, 3.2, ncols=len(panels), squeeze=False)
    for axis, (curves, label, title) in zip(axes[0], panels):
        for kind, color, where, dy in (("uncached", "red", 0.72, 10), ("cached", "blue", 1.0, 8)):
            line = list(itertools.accumulate(curves[kind]))
            axis.plot(range(1, len(line) + 1), line, color=common.COLORS[color], linewidth=2)
            end = f"{line[-1]:,}" if isinstance(line[-1], int) else f"{line[-1]:.1f} s"
            at, word = int(where * len(line)) - 1, "without" if kind == "uncached" else "with"
            axis.annotate(f"{word} a cache: {end}", (at + 1, line[at]), xytext=(-6, dy), textcoords="offset points",
                          ha="right", color=common.COLORS[color],
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
        axis.set(xlabel="new tokens", ylabel=label, title=title, ylim=(0, None), xlim=(0, None))
    axes[0, 0].yaxis.set_major_formatter(lambda y, _: f"{y / 1000:.0f}k" if y else "0")
    return common.save_figure(figure, folder, "01_cost")


def _draw_waste(folder: str | Path, known: dict[str, Any]) -> Path:
    """One column per reservation, sorted by how far it was filled; what is above the fill was never used."""
    figure, axes = common.new_figure(8.0, 2.9, ncols=3, sharey=True)
    for axis, name in zip(axes, WORKLOADS):
        waste = known["waste"][slug(name)]
        axis.set_facecolor(common.COLORS["light"])
        axis.fill_between(range(100), waste["used_percentiles"], color=common.COLORS["blue"], linewidth=0)
        axis.set(xlim=(0, 99), ylim=(0, 2048), xlabel="% of the sequences served", title=name)
        axis.set_yticks(range(0, 2049, 512), [f"{n:,}" for n in range(0, 2049, 512)])
        axis.set_xticks((0, 50, 99), ("0", "50", "100"))
        refused = f"\n{waste['refused']:.0%} refused\n{waste['cut']:.0%} cut short" if waste["refused"] else ""
        axis.text(4, 1980, f"{waste['simulated']:.0%} empty{refused}", va="top")
    axes[0].set_ylabel("slots used of 2,048")
    return common.save_figure(figure, folder, "01_waste")


def _draw_roofline(folder: str | Path, known: dict[str, Any]) -> Path:
    """Prefill and decode of Llama-3.1-8B under one roof."""
    gpu, intensity, colors = HARDWARE["H100 80GB"], known["intensity"], common.COLORS
    roof = lambda x: min(gpu.flops, x * gpu.bandwidth) / 1e12  # noqa: E731
    figure, axis = common.new_figure(8.0, 3.8)
    axis.plot([0.5, gpu.ridge, 2e4], [roof(x) for x in (0.5, gpu.ridge, 2e4)], color=colors["ink"], linewidth=2)
    axis.axvline(gpu.ridge, color=colors["grey"], linewidth=1, linestyle=":")

    def point(x: float, text: str, color: str, marker: str, dx: int, dy: int, **style: Any) -> None:
        axis.plot(x, roof(x), marker, color=colors[color], markersize=7, **style)
        axis.annotate(text, (x, roof(x)), xytext=(dx, dy), textcoords="offset points", color=colors[color], fontsize=9,
                      ha="left" if dx > 0 else "right" if dx < 0 else "center")  # fmt: skip

    for B, x in intensity["decode"].items():
        point(x, f"B={B}", "red", "o", 8, -5)
    point(intensity["decode_limit"], "B → ∞", "red", "o", 8, -5, markerfacecolor="white")
    point(intensity["attention"]["llama_31_8b"], "attention alone,\nany batch", "orange", "D", -8, 3)
    for T, x in intensity["prefill"].items():
        point(x, f"T={int(T):,}", "blue", "s", *((8, -5) if x < gpu.ridge else (0, -16)))
    axis.text(gpu.ridge * 1.07, 1.6, f"ridge: {gpu.ridge:.0f} FLOP/byte", color=colors["grey"], fontsize=9)
    axis.text(0.55, 900, "prefill of T tokens", color=colors["blue"])
    axis.text(0.55, 500, "decode at context 2,048, batch B", color=colors["red"])
    axis.set(xscale="log", yscale="log", xlim=(0.5, 2e4), ylim=(1, 2000), xlabel="FLOP per byte moved",
             ylabel="TFLOP/s attainable", title="Llama-3.1-8B in bf16 on an H100 (data sheet)")  # fmt: skip
    axis.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axis.set_xticks([1, 10, 100, 1000, 10000], ["1", "10", "100", "1,000", "10,000"])
    axis.minorticks_off()
    return common.save_figure(figure, folder, "01_roofline")


def _draw_latency(folder: str | Path, known: dict[str, Any]) -> Path:
    """Latency per token against cached tokens: what was published, and what the data sheet would allow."""
    figure, axis = common.new_figure(8.0, 3.1)
    sheet = (known["itl"]["intercept_ms"], known["itl"]["slope_ms"])
    lines = [("published, cache in bf16", PUBLISHED_ITL["bfloat16"], "blue", "-", 0),
             ("bytes ÷ 3.35 TB/s, bf16", sheet, "grey", "--", -7),
             ("published, cache in fp8", PUBLISHED_ITL["fp8"], "green", "-", 5)]  # fmt: skip
    for label, (intercept, slope), color, style, dy in lines:
        end = intercept + slope * 125_000
        axis.plot((0, 125_000), (intercept, end), style, color=common.COLORS[color], linewidth=2)
        axis.annotate(label, (125_000, end), xytext=(5, dy), textcoords="offset points", va="center",
                      color=common.COLORS[color], annotation_clip=False, fontsize=9)  # fmt: skip
    axis.set(xlim=(0, 125_000), ylim=(0, 14), xlabel="cached tokens", ylabel="ms per token",
             title="Llama-3.1-8B, one H100, one request")  # fmt: skip
    axis.set_xticks(range(0, 125_001, 25_000), ["0", "25k", "50k", "75k", "100k", "125k"])
    return common.save_figure(figure, folder, "01_latency")


# --- 9. Measuring here ----------------------------------------------------------------------------------------------


def filled_cache(model: llama.Llama, num_seqs: int, max_len: int) -> KVCache:
    """An empty cache over memory that was written once (the kernel serves untouched pages from a single zero page)."""
    cache = KVCache(KVCacheSpec.from_config(vars(model.config)), num_seqs, max_len, model.dtype, model.device)
    cache.k.normal_()
    cache.v.normal_()
    return cache


def pass_seconds(model: llama.Llama, cache: KVCache, num_new_tokens: int, context: int, seconds: float) -> float:
    """Median seconds of one forward pass in which each sequence of `cache` computes its last T of S tokens."""
    B, T = len(cache.seq_lens), num_new_tokens
    token_ids = torch.zeros(B * T, dtype=torch.int64, device=model.device)

    def forward() -> None:
        cache.seq_lens = [context - T] * B
        cache.allocate_slots([T] * B)
        hidden = model.forward(token_ids, cache.positions, cache.attend)
        model.logits(hidden[T - 1 :: T]).argmax(-1)

    return common.measure(forward, seconds).median


def measure_model(model: llama.Llama, long: bool) -> dict[str, Any]:
    """Decode against context and against batch, prefill against prompt length, and the machine's own ceiling."""
    longest, seconds = min(8192, model.config.max_position_embeddings), 4.0 if long else 0.2
    contexts = [max(1, longest * part // 64) for part in ((1, 8, 16, 32, 48, 64) if long else (1, 16))]
    prompts = [min(n, longest) for n in ((32, 128, 512, 1024) if long else (128,))]
    batches = (1, 4, 16, 32) if long else (1, 8)
    cache = filled_cache(model, 1, max(contexts + prompts))
    decode = [pass_seconds(model, cache, 1, n, seconds) for n in contexts]
    prefill = [pass_seconds(model, cache, n, n, seconds) for n in prompts]
    batched = [pass_seconds(model, filled_cache(model, B, contexts[0]), 1, contexts[0], seconds) for B in batches]
    # ITL = intercept + slope · context by least squares. Both are bandwidths in disguise.
    mean_x, mean_y = sum(contexts) / len(contexts), sum(decode) / len(decode)
    variance = sum((x - mean_x) ** 2 for x in contexts)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(contexts, decode)) / variance if variance else 0.0
    intercept = mean_y - slope * mean_x
    dtype = str(model.dtype).removeprefix("torch.")
    weights, per_token = latency_line(vars(model.config), 1.0, dtype, model.embed_tokens.element_size())
    gb_s = lambda moved, seconds: moved / seconds / 1e9 if seconds > 0 else None  # noqa: E731  (noise makes it negative)
    return {
        "decode": {"context": contexts, "ms": [1e3 * s for s in decode]},
        "prefill": {"tokens": prompts, "tok_s": [n / s for n, s in zip(prompts, prefill)]},
        "batch": {"size": list(batches), "tok_s": [B / s for B, s in zip(batches, batched)]},
        "fit": {"intercept_ms": intercept * 1e3, "slope_us": slope * 1e6, "weights_gb_s": gb_s(weights, intercept),
                "cache_gb_s": gb_s(per_token, slope)},
        "copy_gb_s": common.copy_bandwidth() / 1e9,
    }  # fmt: skip


def measure_generation(model: llama.Llama) -> dict[str, Any]:
    """The seconds of every step of 192 tokens after a prompt of 64, without a cache and with one."""
    P, N = 64, 192
    prompt = torch.randint(model.config.vocab_size, (P,)).tolist()
    runs = {"uncached": generate(model, prompt, N), "cached": generate(model, prompt, N, filled_cache(model, 1, P + N))}
    total = {kind: sum(run.seconds) for kind, run in runs.items()}
    return {
        "prompt": P, "new_tokens": N, "total_s": total, "speedup": total["uncached"] / total["cached"],
        "token_forwards": {kind: sum(run.token_forwards) for kind, run in runs.items()},
        "seconds": {kind: [round(s, 5) for s in run.seconds] for kind, run in runs.items()},
    }  # fmt: skip


def measure_kernel(long: bool) -> list[dict[str, float]]:
    """On a GPU: decode attention of an 8B Llama in bf16, in GB/s of cache read, beside torch's SDPA on the same."""
    rows, shapes = [], ((1, 4096), (32, 4096), *(((1, 16384), (32, 16384), (128, 4096)) if long else ()))
    for B, S in shapes:
        q = torch.randn(B, 32, 128, dtype=torch.bfloat16, device=common.device())
        k, v = torch.randn(2, B, S, 8, 128, dtype=torch.bfloat16, device=common.device())
        lens = torch.full((B,), S, dtype=torch.int32, device=common.device())
        sdpa = functools.partial(F.scaled_dot_product_attention, q[:, :, None], k.transpose(1, 2), v.transpose(1, 2),
                                 enable_gqa=True)  # fmt: skip
        ours = common.measure_graph(functools.partial(decode_attention, q, k, v, lens, S)).median
        rows.append({"batch": B, "context": S, "us": ours * 1e6, "gb_s": 2 * k.nbytes / ours / 1e9,
                     "sdpa_us": common.measure_graph(sdpa).median * 1e6})  # fmt: skip
    return rows


# --- 10. The story --------------------------------------------------------------------------------------------------


def check_kernel() -> None:
    """Both paths of `decode_attention` against the textbook, at SmolLM2's heads, with ragged lengths."""
    lens, device = [1, 65, 130], common.device()
    q, (k, v) = torch.randn(3, 9, 64, device=device), torch.randn(2, 3, 140, 3, 64, device=device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    reference = torch.cat([causal_attention(q[b, None], k[b, :n], v[b, :n]) for b, n in enumerate(lens)])
    if not common.HAS_GPU:
        out = decode_attention(q, k, v, seq_lens, max(lens))
        common.check("torch path, sequences of 1, 65 and 130 tokens", out, reference)
    if not common.HAS_TRITON:
        common.skipped("the Triton kernel", common.kernel_mode())
        return
    with common.use_kernels():
        out = decode_attention(q, k, v, seq_lens, max(lens))
    common.check(f"Triton kernel, {common.kernel_mode()}, the same", out, reference)


def prompt_tokens(args: argparse.Namespace, folder: Path) -> list[int]:
    """The question's token ids; no weights are read. InputError where the model or `--slots` has no room for them."""
    limit = llama.LlamaConfig.from_folder(folder).max_position_embeddings
    tokenizer, N = llama.Tokenizer(folder), args.new_tokens
    prompt = tokenizer.ask(args.prompt)
    if (args.prompt, N) == (QUESTION, 24):  # nobody asked for more
        llama.check_context(args.model, 256 if args.bench else len(prompt) + N)
    if limit - N < 1:
        raise common.InputError(f"--new-tokens {N}: allowed with this model's context: 2 to {limit - 1}")
    if not 1 <= len(prompt) <= limit - N:
        raise common.InputError(f"--prompt: {len(prompt)} tokens; allowed with --new-tokens {N}: 1 to {limit - N}")
    if args.slots < len(prompt) + N - 1:  # the last token is written, and never run through the model
        raise common.InputError(f"--slots {args.slots}: too few; allowed for a prompt of {len(prompt)} tokens and "
                                f"--new-tokens {N}: at least {len(prompt) + N - 1}")  # fmt: skip
    return prompt


def run_generation(args: argparse.Namespace, model: llama.Llama, tokenizer: llama.Tokenizer,
                   prompt: list[int]) -> None:  # fmt: skip
    """The real model three times: with a cache, without one, and with the wrong positions."""
    N, spec = args.new_tokens, KVCacheSpec.from_config(vars(model.config))

    def cached(max_tokens: int, restart_positions: bool) -> tuple[Generation, KVCache]:
        cache = KVCache(spec, 1, args.slots, model.dtype, model.device)
        return generate(model, prompt, max_tokens, cache, restart_positions), cache

    cached(1, args.restart_positions)  # the first run also waits for the weights to come from the disk: not timed
    fast, cache = cached(N, args.restart_positions)
    slow = generate(model, prompt, N)
    common.check_equal(f"{N} tokens after a prompt of {len(prompt)}: the same with and without a cache",
                       fast.token_ids, slow.token_ids)  # fmt: skip
    common.check_equal("token-forwards counted: P + N − 1 with a cache, Σ (P + i) without",
                       (sum(fast.token_forwards), sum(slow.token_forwards)),
                       (len(prompt) + N - 1, N * len(prompt) + N * (N - 1) // 2))  # fmt: skip
    rows = []
    for name, run in (("with a cache", fast), ("without", slow)):
        first, last = (f"{1e3 * run.seconds[i]:.0f} ms" for i in (0, -1))
        rows.append([name, f"{sum(run.token_forwards):,}", first, last, f"{sum(run.seconds):.2f} s"])
    common.table(["", "token-forwards", "first token", "last token", "all"], rows)
    if common.HAS_TRITON:
        before = decode_attention_kernel.launches
        with common.use_kernels():
            few, _ = cached(2, restart_positions=False)
        launches = decode_attention_kernel.launches - before
        common.check_equal(f"a decode step through the Triton kernel, {launches} launch{'es' * (launches != 1)} for "
                           f"{spec.num_layers} layer{'s' * (spec.num_layers > 1)}: the same token",
                           few.token_ids, fast.token_ids[:2])  # fmt: skip

    wrong, _ = cached(N, restart_positions=True)
    text = "another text" if wrong.token_ids != fast.token_ids else "here even the same text"
    common.say(f"The bug: every decode step numbers its token from 0. No error, the same cost, {text}.")
    common.say(f"right: {tokenizer.decode(fast.token_ids)!r}\nwrong: {tokenizer.decode(wrong.token_ids)!r}")
    if args.model is None and (args.prompt, N) == (QUESTION, 24):
        pieces = {"right": fast, "restarted": wrong}
        pieces = {name: [tokenizer.decode([i], False) for i in run.token_ids] for name, run in pieces.items()}
        common.check_equal("both are what RECORDED says; the first token is the same in both", pieces, RECORDED)
    used = cache.seq_lens[0]
    common.say(f"The cache reserved {args.slots:,} slots, {cache.nbytes / 1e6:.1f} MB, and used {used}: "
               f"{1 - used / args.slots:.1%} of it stayed empty.")  # fmt: skip


def print_bill(args: argparse.Namespace, known: dict[str, Any]) -> None:
    """Bytes per token of six models, and how many sequences of 2,048 tokens fit beside the weights."""
    rows = []
    for name in MODELS:
        fits = [f"{n:,}" if n else "–" for n in known["fit"][slug(name)].values()]
        weights = f"{known['weight_bytes'][slug(name)] / 1e9:.1f} GB"
        rows.append([name, f"{known['bytes_per_token'][slug(name)]:,}", weights, *fits])
    common.table(
        ["sequences of 2,048 tokens that fit on", "bytes/token", "weights", "24 GB", "40 GB", "80 GB", "141 GB"], rows
    )
    spec = KVCacheSpec.from_config(MODELS["Llama-3.1-8B"])
    cache = KVCache(spec, 4, 2048, torch.bfloat16, "meta")
    common.check_equal("KVCache's tensors for 4 × 2,048 tokens of Llama-3.1-8B have exactly these bytes",
                       cache.nbytes, 4 * 2048 * spec.bytes_per_token())  # fmt: skip
    kinds = ("fp8", "int8_per_token_head", "nvfp4", "int4_per_token_head")
    common.say("Llama-3.1-8B in " + ", ".join(f"{kind} {known['bytes_by_dtype'][kind]:,}" for kind in kinds))
    params = WIDGET_DEFAULT | {"batch": 64, "restart_positions": args.restart_positions}
    common.say("simulate(), 64 sequences at once:\n" + describe(simulate(params)))


def print_waste(args: argparse.Namespace, known: dict[str, Any]) -> None:
    """How much of a contiguous reservation stays empty, for three published workloads."""
    rows = []
    for name, (prompt, output) in WORKLOADS.items():
        waste = reservation_waste(prompt, output, args.slots, seed=args.seed)
        simulated = "–" if waste["simulated"] is None else f"{waste['simulated']:.1%}"
        rows.append([name, f"{prompt:.0f} + {output:.0f}", f"{max(0, waste['mean_says']):.1%}", simulated,
                     f"{waste['refused']:.1%}", f"{waste['cut']:.1%}"])  # fmt: skip
    common.table(["", "mean prompt + output", "empty, by the means", "simulated", "refused", "cut short"], rows)
    claim = known["claim_70b"]
    common.say(f"“70B at 128K: ~40 GB a request, 98 % wasted at 2K”: {claim['gib']:.0f} GiB, {claim['waste']:.1%}. "
               f"Without GQA: {claim['mha_gib']:.0f} GiB.")  # fmt: skip


def print_roofline(known: dict[str, Any]) -> None:
    """Prefill and decode under one roof, and the latency line that follows from it."""
    gpu, rows = HARDWARE["H100 80GB"], []
    for name, B, T, S in (("prefill, T=512", 1, 512, 512), ("prefill, T=2,048", 1, 2048, 2048),
                          ("decode, B=1, S=2,048", 1, 1, 2048), ("decode, B=64, S=2,048", 64, 1, 2048)):  # fmt: skip
        flops, moved = step_cost(MODELS["Llama-3.1-8B"], B, T, S)
        seconds, limit = gpu.seconds(flops, moved), "compute" if flops / moved > gpu.ridge else "memory"
        rows.append([name, f"{flops / moved:,.0f}", limit, f"{seconds * 1e3:.1f} ms", f"{B * T / seconds:,.0f}",
                     f"{flops / seconds / gpu.flops:.1%}"])  # fmt: skip
    ridge = f"ridge: {gpu.ridge:.0f} FLOP/byte"
    common.table([ridge, "FLOP/byte", "limited by", "at best", "tokens/s", "of peak FLOP/s"], rows)
    itl, intensity, (a, b) = known["itl"], known["intensity"], PUBLISHED_ITL["bfloat16"]
    common.say(f"Decode attention alone: {intensity['attention']['llama_31_8b']:.0f} FLOP/byte in any batch; "
               f"at context 2,048 no batch passes {intensity['decode_limit']:.0f}.")  # fmt: skip
    common.say(f"ITL = (weights + tokens · bytes) / bandwidth = {itl['intercept_ms']:.2f} ms + "
               f"{itl['slope_ms']:.2e} ms/token; published: {a} + {b:.2e}.")  # fmt: skip
    common.say(f"Read as bandwidth, the published slope is {itl['slope_tb_s']:.2f} TB/s, {itl['slope_share']:.0%} of "
               f"the data sheet; the intercept {itl['intercept_tb_s']:.2f}, {itl['intercept_share']:.0%}.")  # fmt: skip


def print_measurements(args: argparse.Namespace, model: llama.Llama) -> dict[str, Any]:
    """What this machine does; with --bench also the two long runs behind the quadratic curve."""
    bench = measure_model(model, args.bench)
    decode, prefill, batch, fit = (bench[key] for key in ("decode", "prefill", "batch", "fit"))
    line = lambda text, values: ", ".join(text.format(n=n, x=x) for n, x in zip(*values.values()))  # noqa: E731
    common.say("decode, one sequence:  " + line("{x:.1f} ms at S={n:,}", decode))
    common.say(f"decode, context {decode['context'][0]}:".ljust(23) + line("{x:,.0f} tok/s at B={n}", batch))
    common.say("prefill, one prompt:   " + line("{x:,.0f} tok/s at T={n:,}", prefill))
    if fit["weights_gb_s"] and fit["cache_gb_s"]:
        common.say(f"ITL = {fit['intercept_ms']:.1f} ms + {fit['slope_us']:.2f} µs/token. As bandwidth: weights "
                   f"{fit['weights_gb_s']:.1f} GB/s, cache {fit['cache_gb_s']:.1f} GB/s; "
                   f"a copy: {bench['copy_gb_s']:.1f} GB/s")  # fmt: skip
    else:  # something else was running
        common.skipped("the line for ITL", f"{fit['intercept_ms']:.1f} ms + {fit['slope_us']:.2f} µs/token is noise: "
                       "neither can be below 0;\n--bench measures longer")  # fmt: skip
    if common.HAS_GPU:
        bench["kernel"] = measure_kernel(args.bench)
        for r in bench["kernel"]:
            common.say(f"decode kernel, 8B heads in bf16, B={r['batch']}, S={r['context']:,}: {r['us']:.0f} µs, "
                       f"{r['gb_s']:,.0f} GB/s, {r['gb_s'] / bench['copy_gb_s']:.0%} of the copy; SDPA "
                       f"{r['sdpa_us']:.0f} µs")  # fmt: skip
    else:
        common.skipped("the kernel's GB/s", "needs a GPU")
    if args.bench:
        run = bench["generate"] = measure_generation(model)
        slow, fast = (run["total_s"][kind] for kind in ("uncached", "cached"))
        common.say(f"{run['new_tokens']} tokens after {run['prompt']}: {slow:.1f} s without a cache, {fast:.1f} s with "
                   f"one: {run['speedup']:.1f} ×")  # fmt: skip
    return bench


def build_parser() -> argparse.ArgumentParser:
    p = common.parser(__doc__)
    p.add_argument("--prompt", default=QUESTION, help="the question that the model answers (default: %(default)s)")
    p.add_argument("--new-tokens", type=common.number(int, 2, 1024), default=24, help="tokens to write (default 24)")
    p.add_argument("--slots", type=common.number(int, 1, 1 << 16), default=2048,
                   help="rows that the cache reserves for a sequence (default 2048)")  # fmt: skip
    p.add_argument("--restart-positions", action="store_true",
                   help="break it: number the tokens of every forward pass from 0; the check must fail")  # fmt: skip
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine, known = common.start(args), facts()
    prompt = prompt_tokens(args, llama.model_folder(args.model))
    model, tokenizer = llama.load(args.model)

    common.heading("1 · The decode kernel against the naive reference")
    check_kernel()
    common.heading("2 · The real model: with a cache, without one, and with the wrong positions")
    run_generation(args, model, tokenizer, prompt)
    common.heading("3 · The bill, in bf16")
    print_bill(args, known)
    common.heading(
        f"4 · What reserving {args.slots:,} slots wastes: 20,000 requests of geometric lengths, seed {args.seed}"
    )
    print_waste(args, known)
    common.heading("5 · Why decode is memory-bound: Llama-3.1-8B in bf16, an H100's data sheet")
    print_roofline(known)
    common.heading("6 · Measured on this machine")
    bench = print_measurements(args, model)

    if args.figure:
        draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": known, "bench": bench})


if __name__ == "__main__":
    common.run(main)

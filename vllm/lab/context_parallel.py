"""Decode context parallelism: ranks that would keep copies of the same keys share the tokens of a sequence instead.

Tensor parallelism deals out heads. Latents have none, and of fewer KV heads than ranks each is copied, so eight ranks
hold eight caches and have room for one. Under `--decode-context-parallel-size` rank r keeps the tokens s with
s mod n = r. Then no rank can attend alone: each computes all heads over its own tokens, and what lesson 02 does with
the splits of a sequence is done with ranks.

This is a simulation and the arithmetic; the engine has no such flag. Read for this: vLLM 0.32 `config/parallel.py`,
`v1/attention/ops/dcp.py:cp_lse_ag_out_rs`.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import functools
from typing import Any

import torch

from engine.distributed.group import GroupCoordinator
from engine.model.config import LlamaConfig
from lab.experts import MODELS, WEIGHT_BYTES, kv_bytes_per_token, parameters
from lab.hardware import HARDWARE
from lab.links import LINKS, wire_bytes
from lab.roofline import GPU_MEMORY_UTILIZATION

RANKS = (1, 2, 4, 8)


def attend_to_shares(
    q: torch.Tensor, latents: torch.Tensor, R: int, scale: float, group: GroupCoordinator
) -> torch.Tensor:
    """A decode step of one rank, which has H/n query heads and every n-th token.

    1. all-gather the queries: every rank computes all heads, over its own tokens
    2. all-gather what its weights add up to, as log-sum-exps: they say what a rank's part counts
    3. reduce-scatter the weighted parts: every rank gets its own heads back

    Shapes: q [B, H/n, W], latents [B, S_r, W] with S_r ≥ 0 tokens -> [B, H/n, R]. All ranks must call it.
    """
    queries = group.all_gather(q, dim=1)  # [B, H, W]
    scores = torch.einsum("bhw,bsw->bhs", queries, latents).float() * scale
    lse = scores.logsumexp(-1)  # [B, H]; −inf: this rank has no token
    part = torch.einsum("bhs,bsr->bhr", (scores - lse[..., None]).exp(), latents[..., :R].float())
    total = group.all_gather(lse[None], dim=0).logsumexp(0)  # [B, H]
    part = part * (lse - total).exp()[..., None]
    return group.reduce_scatter(part.transpose(0, 1).contiguous()).transpose(0, 1).to(q.dtype)


def bytes_per_step(config: LlamaConfig, sequences: int, n: int, size: int = 2) -> float:
    """Bytes that each of n ranks sends in a decode step of all layers, on a ring: queries, log-sum-exps, outputs."""
    assert config.mla
    H, W, R = config.num_attention_heads, config.mla.latent_size, config.mla.kv_lora_rank
    payload = H * W * size + n * H * 4 + H * R * size  # a reduce-scatter sends what an all-gather sends
    return config.num_hidden_layers * sequences * wire_bytes("all_gather", payload, n)


def facts_of(config: LlamaConfig, weight_size: int, ranks: int = 8, hardware: str = "H200 141GB") -> dict[str, Any]:
    """`ranks` GPUs with tensor parallelism, of which n share tokens: what a token takes, how many fit, what travels."""
    kv, gpu, link = kv_bytes_per_token(config), HARDWARE[hardware], LINKS["nvlink"]
    room = GPU_MEMORY_UTILIZATION * gpu.memory - weight_size * parameters(config)["total"] / ranks
    found = {}
    for n in RANKS:
        sent = bytes_per_step(config, 32, n)
        calls = 3 * config.num_hidden_layers if n > 1 else 0
        found[f"dcp{n}"] = {
            "copies": ranks // n, "bytes_per_token": kv / n, "tokens_that_fit": int(room // (kv / n)),
            "sent_mb_of_32": sent / 1e6, "sent_ms_of_32": (calls * link.latency + sent / link.bandwidth) * 1e3,
            "read_ms_of_32_at_32k": 32 * 32768 * kv / n / gpu.bandwidth * 1e3,
        }  # fmt: skip
    return found


@functools.cache
def facts() -> dict[str, Any]:
    """DeepSeek-V3 in fp8 on eight H200."""
    return {"deepseek_v3": facts_of(MODELS["DeepSeek-V3"], WEIGHT_BYTES["DeepSeek-V3"])}

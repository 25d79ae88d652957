"""What a mixture of experts costs: weights that are kept, weights that a step reads, and ranks that wait for one.

A token visits k of E experts, so a step of T tokens reads those that anybody asks. Evenly asked, these are
E · (1 − (1 − k/E)^T): eight for one token of Qwen3-30B-A3B, 111 of 128 for 32. A dense model reads its weights once for
any batch; a mixture reads more and more of them, until all are asked, and only then gets what batching gives.

Read for this: Shazeer et al. 2017, DeepSeek-AI 2024 (V3 and its EPLB), Qwen Team 2025 (Qwen3), Jiang et al. 2024
(Mixtral).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from engine.experts.config import MoEConfig
from engine.model import llama
from engine.model.config import LlamaConfig
from engine.model.mla import MLAConfig
from engine.parallel.eplb import Placement, rebalance_experts
from lab.hardware import HARDWARE
from lab.roofline import slug

# The fields of each model's published config.json.
MODELS = {
    "Qwen3-30B-A3B": LlamaConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, tie_word_embeddings=False, qk_norm=True,
        moe=MoEConfig(num_experts=128, top_k=8, intermediate_size=768),
    ),
    "Mixtral-8x7B": LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
        moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=14336),
    ),
    "DeepSeek-V3": LlamaConfig(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=1, head_dim=576, tie_word_embeddings=False,
        mla=MLAConfig(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=1536),
        moe=MoEConfig(num_experts=256, top_k=8, intermediate_size=2048, scoring="sigmoid", router_in_fp32=True,
                      corrected=True, num_expert_group=8, topk_group=4, routed_scaling_factor=2.5,
                      shared_intermediate_size=2048, dense_layers=(0, 1, 2)),
    ),
}  # fmt: skip
WEIGHT_BYTES = {"DeepSeek-V3": 1}  # as published, in fp8; the others in bf16
BATCHES = (1, 8, 32, 128, 256, 1024)


def expected_experts(num_experts: int, top_k: int, tokens: float) -> float:
    """How many experts of a layer `tokens` tokens ask, if each is as likely as any other."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def parameters(config: LlamaConfig) -> dict[str, int]:
    """Parameters by their part in a step: `experts`, `embedding` (read a row a token), and `shared`, by every token;
    `active` is what one token multiplies with, the output matrix included."""
    found = {"experts": 0, "embedding": 0, "shared": 0}
    for name, shape in llama.tensor_shapes(config).items():
        kind = "experts" if ".experts." in name else "embedding" if "embed_tokens" in name else "shared"
        found[kind] += math.prod(shape)
    if config.tie_word_embeddings:
        found["shared"] += found["embedding"]
    share = config.moe.top_k / config.moe.num_experts if config.moe else 0
    total = found["experts"] + found["shared"] + (0 if config.tie_word_embeddings else found["embedding"])
    return found | {"total": total, "active": found["shared"] + round(share * found["experts"])}


def kv_bytes_per_token(config: LlamaConfig, size: int = 2) -> int:
    """Bytes of keys and values of one token in all layers, or of latents, which are both in one."""
    return (1 if config.mla else 2) * size * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def step_bytes(config: LlamaConfig, sequences: int, context: int = 0, size: int = 2) -> float:
    """Expected bytes that a decode step reads: shared weights, experts that are asked, and every sequence's cache."""
    moe, found = config.moe, parameters(config)
    assert moe
    asked = expected_experts(moe.num_experts, moe.top_k, sequences) / moe.num_experts
    return size * (found["shared"] + asked * found["experts"]) + sequences * context * kv_bytes_per_token(config)


def rows_per_expert(config: LlamaConfig, tokens: float) -> float:
    """Of the experts that are asked, by how many tokens each: with 16-bit weights, its FLOPs per byte."""
    moe = config.moe
    assert moe
    return tokens * moe.top_k / expected_experts(moe.num_experts, moe.top_k, tokens)


def tokens_to_be_compute_bound(config: LlamaConfig, hardware: str = "H100 80GB") -> float:
    """From how many tokens a step's experts wait for arithmetic and not for memory: FLOPs per byte times E / k. A dense
    layer needs k / E of them."""
    assert config.moe
    return HARDWARE[hardware].ridge * config.moe.num_experts / config.moe.top_k


def all_to_all_bytes(config: LlamaConfig, there: int = 1, back: int = 2) -> int:
    """Bytes that one token sends and gets in a layer whose experts are all elsewhere: fp8 there, bf16 back."""
    assert config.moe
    return config.moe.top_k * config.hidden_size * (there + back)


def facts_of(config: LlamaConfig, size: int = 2) -> dict[str, Any]:
    """The numbers of one model, whose weights take `size` bytes each; its cache is in 16 bits."""
    found, moe = parameters(config), config.moe
    assert moe
    return {
        "parameters": found, "weights_gb": size * found["total"] / 1e9,
        "kv_bytes_per_token": kv_bytes_per_token(config),
        "experts_asked": {str(n): expected_experts(moe.num_experts, moe.top_k, n) for n in BATCHES},
        "step_gb": {str(n): step_bytes(config, n, size=size) / 1e9 for n in BATCHES},
        "step_gb_per_token": {str(n): step_bytes(config, n, size=size) / n / 1e9 for n in BATCHES},
        "rows_per_expert": {str(n): rows_per_expert(config, n) for n in BATCHES},
        "compute_bound_tokens": tokens_to_be_compute_bound(config),
        "all_to_all_bytes": all_to_all_bytes(config), "all_to_all_bytes_all_layers":
            all_to_all_bytes(config) * (config.num_hidden_layers - len(moe.dense_layers)),
    }  # fmt: skip


def busiest(config: MoEConfig, ranks: int, replicas: int | None, skew: float, tokens: int = 4096) -> float:
    """What the busiest rank has to do in a step, times what a rank has on average: so much longer the others wait.

    `replicas` None leaves experts in order; otherwise they are where the step before would have had them (EPLB).
    """
    before, now = (
        routed(config, tokens, skew, seed=seed).flatten().bincount(minlength=config.num_experts).tolist()
        for seed in (0, 1)
    )
    placement = Placement.plain(config.num_experts, ranks)
    if replicas is not None:
        placement = rebalance_experts(before, config.num_experts + replicas, ranks)
    return max(placement.rank_loads(now)) * ranks / sum(now)


def balance_facts(config: MoEConfig, ranks: int = 16) -> dict[str, Any]:
    """How long ranks wait for the busiest, with experts in order, packed, and with replicas, as traffic is skewed."""
    ways = {"plain": None, "packed": 0, "16_replicas": 16, "32_replicas": 32}
    return {
        f"skew_{skew:g}".replace(".", "_"): {
            name: busiest(config, ranks, replicas, skew) for name, replicas in ways.items()
        }
        for skew in (0.0, 0.5, 1.0)
    }


@functools.cache
def facts() -> dict[str, Any]:
    """Deterministic numbers, by model, and how evenly 16 ranks share the experts of Qwen3-30B-A3B."""
    moe = MODELS["Qwen3-30B-A3B"].moe
    assert moe
    return {slug(name): facts_of(config, WEIGHT_BYTES.get(name, 2)) for name, config in MODELS.items()} | {
        "balance": balance_facts(moe)
    }


def routed(config: MoEConfig, tokens: int, skew: float = 0.0, seed: int = 0) -> torch.Tensor:
    """Ids [tokens, k] of a router that prefers some experts: the odds of the r-th most popular are (r + 1)^−skew."""
    generator = torch.Generator().manual_seed(seed)
    odds = (torch.arange(config.num_experts) + 1.0) ** -skew
    popular = torch.randperm(config.num_experts, generator=torch.Generator().manual_seed(0))  # whatever the tokens are
    return popular[odds.expand(tokens, -1).multinomial(config.top_k, generator=generator)]

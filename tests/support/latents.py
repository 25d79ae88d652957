"""Small models with latent attention, as DeepSeek's families have it."""

from __future__ import annotations

from typing import Any

import torch

from engine.experts.config import MoEConfig
from engine.model import llama
from engine.model.mla import MLAConfig

CPU = torch.device("cpu")
PLAIN = MLAConfig(kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20)
COMPRESSED = MLAConfig(kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20, q_lora_rank=28)
EXPERTS = MoEConfig(num_experts=8, top_k=2, intermediate_size=48, scoring="sigmoid", router_in_fp32=True,
                    corrected=True, num_expert_group=4, topk_group=2, routed_scaling_factor=1.5,
                    shared_intermediate_size=96, dense_layers=(0,))  # fmt: skip


def sizes_of(mla: MLAConfig, **sizes: Any) -> dict[str, Any]:
    """Arguments of `random_model`."""
    kept = {"num_key_value_heads": 1, "head_dim": mla.latent_size}
    return {"seed": 3, "num_attention_heads": 4, "intermediate_size": 96, "mla": mla, **kept, **sizes}


def latent_model(mla: MLAConfig = PLAIN, device: torch.device = CPU, **sizes: Any) -> llama.Llama:
    """A seeded model, dense unless `sizes` says otherwise."""
    return llama.random_model(device=device, **sizes_of(mla, **sizes))

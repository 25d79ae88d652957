"""What a model keeps, reads and multiplies, from its `config.json` alone, for any attention and any experts.

Owns the table of known models and the arithmetic from a configuration to parameters, cache bytes and FLOPs; called by
`step_time` and `predict`. It never loads a weight, and takes what `engine/model` cannot run: latents, sinks, windows.
vLLM: `vllm/config/model.py`.
"""

from __future__ import annotations

import common

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import whole
from lab.experts import expected_experts

# Fields that a size is made of, and the least that each may be. One that is null counts as missing.
LEAST = dict.fromkeys(
    ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
     "vocab_size", "max_position_embeddings", "head_dim", "kv_lora_rank", "qk_rope_head_dim",
     "qk_nope_head_dim", "v_head_dim"), 1,
) | dict.fromkeys(
    ("sliding_window", "moe_intermediate_size", "num_experts_per_tok", "num_experts", "num_local_experts",
     "n_routed_experts", "first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size",
     "q_lora_rank"), 0,
)  # fmt: skip


@dataclass(frozen=True)
class ModelCosts:
    """One model on one rank that has all of it. Parameters are counted by when a step reads them."""

    num_layers: int  # L
    hidden_size: int
    intermediate_size: int  # of the widest MLP
    vocab_size: int
    max_model_len: int
    shared_params: int  # every token multiplies with these: attention, MLPs, shared experts
    head_params: int  # the output matrix: a row of logits for each sequence
    embedding_params: int  # kept, and read one row a token; 0 where it is the output matrix
    expert_params: int  # all experts of all layers; 0: a dense model
    num_experts: int
    top_k: int
    weight_bytes: float  # per parameter
    expert_bytes: float  # per parameter of an expert
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv; 1: a latent for all heads
    kv_bytes_per_token: int  # in all layers
    pair_flops: int  # a query and a key, in all layers: a product for the score, one for the value
    window: int  # tokens that a layer with a window sees; 0: all layers see everything
    window_share: float  # of the layers

    @property
    def num_params(self) -> int:
        return self.shared_params + self.head_params + self.embedding_params + self.expert_params

    @property
    def bytes_kept(self) -> float:
        """Bytes of all weights in memory."""
        return self.weight_bytes * (self.num_params - self.expert_params) + self.expert_bytes * self.expert_params

    @property
    def dense_bytes(self) -> float:
        """Bytes of weights that every step reads."""
        return self.weight_bytes * (self.shared_params + self.head_params)

    def expert_bytes_read(self, tokens: float) -> float:
        """Expected bytes of the experts that any of so many tokens asks."""
        if not self.expert_params:
            return 0.0
        asked = expected_experts(self.num_experts, self.top_k, tokens) / self.num_experts
        return self.expert_bytes * self.expert_params * asked

    def dense_flops(self, tokens: int, sequences: int) -> float:
        """FLOPs of products with weights that are no expert's: tokens through the layers, a row a sequence through the
        head."""
        return 2.0 * (self.shared_params * tokens + self.head_params * sequences)

    def expert_flops(self, tokens: int) -> float:
        """FLOPs of the experts that these tokens ask."""
        return 2.0 * self.expert_params * self.top_k / max(1, self.num_experts) * tokens

    def context_seen(self, context: int, sequences: int) -> float:
        """Of `context` tokens of all sequences together, those that a layer sees on average."""
        if not self.window:
            return context
        return context - self.window_share * max(0, context - self.window * sequences)


def model_costs(config: Mapping[str, Any], kv_cache_dtype: str = "auto") -> ModelCosts:
    """The costs of a Hugging Face `config.json`. Raises InputError for a field that is missing or no number."""
    config = config.get("text_config") or config
    try:
        config = {name: value for name, value in config.items() if value is not None}
        for name, low in LEAST.items():
            if name in config:
                whole(name, config[name], low, 10**9)
        return _model_costs(config, kv_cache_dtype)
    except KeyError as error:
        raise common.InputError(f"--model: its config.json has no {error.args[0]}") from None
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise common.InputError(f"--model: its config.json makes no model ({error})") from None


def _model_costs(config: Mapping[str, Any], kv_cache_dtype: str) -> ModelCosts:
    L, hidden, vocab = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    attention, kv_elements, pair_flops = _attention(config)
    E = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
    of_expert = config.get("moe_intermediate_size") or config["intermediate_size"]
    dense = min(config.get("first_k_dense_replace", 0), L) if E else L
    shared = config.get("shared_expert_intermediate_size") or of_expert * (config.get("n_shared_experts") or 0)
    mlp = 3 * hidden * config["intermediate_size"] * dense
    mlp += (3 * hidden * shared + hidden * E) * (L - dense)  # the shared expert, and the router
    bits = _bits(config)
    types = config.get("layer_types") or ()
    windowed = sum(kind == "sliding_attention" for kind in types)
    return ModelCosts(
        num_layers=L,
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        vocab_size=vocab,
        max_model_len=config.get("max_position_embeddings", 2048),
        shared_params=attention * L + mlp,
        head_params=vocab * hidden,
        embedding_params=0 if config.get("tie_word_embeddings") else vocab * hidden,
        expert_params=3 * hidden * of_expert * E * (L - dense),
        num_experts=E,
        top_k=whole("num_experts_per_tok", config["num_experts_per_tok"], 1, E) if E else 0,
        weight_bytes=2.0 if bits < 8 and E else bits / 8,  # of mixtures in 4 bits only the experts are
        expert_bytes=bits / 8,
        num_heads=config["num_attention_heads"],
        num_kv_heads=1
        if "kv_lora_rank" in config
        else config.get("num_key_value_heads") or config["num_attention_heads"],
        kv_bytes_per_token=L * kv_elements * (1 if kv_cache_dtype.startswith("fp8") else 2),
        pair_flops=L * pair_flops,
        window=config.get("sliding_window") or 0 if windowed else 0,
        window_share=windowed / L,
    )


def _attention(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of one layer: parameters, elements kept per token, FLOPs of a query-key pair."""
    hidden, Hq = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:  # MLA: one latent and one rotated key for all heads (DeepSeek-V3)
        latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        D, Dv, rank = config["qk_nope_head_dim"], config["v_head_dim"], config.get("q_lora_rank")
        queries = rank * (hidden + Hq * (D + rotated)) if rank else hidden * Hq * (D + rotated)
        keys = hidden * (latent + rotated) + latent * Hq * (D + Dv)
        return queries + keys + Hq * Dv * hidden, latent + rotated, 2 * Hq * (D + rotated + Dv)
    Hkv, D = config.get("num_key_value_heads") or Hq, config.get("head_dim") or hidden // Hq
    return 2 * hidden * D * (Hq + Hkv), 2 * Hkv * D, 4 * Hq * D


def _bits(config: Mapping[str, Any]) -> float:
    """Bits of a parameter, scales included: 16, or what `quantization_config` says."""
    given = config.get("quantization_config") or {}
    method = str(given.get("quant_method", ""))
    if method == "mxfp4":
        return 4.25  # a scale of 8 bits for 32
    if "fp8" in method:
        return 8
    bits = float(given.get("bits") or given.get("w_bit") or 16)
    if not 1 <= bits <= 32:
        raise ValueError(f"bits {bits:g}: must be from 1 to 32")
    return bits


def _dense(L: int, hidden: int, inner: int, Hq: int, Hkv: int, vocab: int, context: int, **more: Any) -> dict[str, Any]:
    return dict(num_hidden_layers=L, hidden_size=hidden, intermediate_size=inner, num_attention_heads=Hq,
                num_key_value_heads=Hkv, vocab_size=vocab, max_position_embeddings=context) | more  # fmt: skip


def _experts(E: int, k: int, inner: int) -> dict[str, int]:
    return dict(num_experts=E, num_experts_per_tok=k, moe_intermediate_size=inner)


_QWEN3 = dict(head_dim=128)
_TIED = dict(tie_word_embeddings=True)
_FP8, _MXFP4 = ({"quantization_config": {"quant_method": method}} for method in ("fp8", "mxfp4"))
_GPT_OSS = _MXFP4 | {"head_dim": 64, "sliding_window": 128}
_WINDOWS = ["sliding_attention", "full_attention"]

# The fields of each model's published config.json on Hugging Face that decide about time and memory.
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M": _dense(30, 576, 1536, 9, 3, 49152, 8192, **_TIED),
    "meta-llama/Llama-2-7b-hf": _dense(32, 4096, 11008, 32, 32, 32000, 4096),
    "meta-llama/Llama-3.2-1B": _dense(16, 2048, 8192, 32, 8, 128256, 131072, head_dim=64, **_TIED),
    "meta-llama/Llama-3.2-3B": _dense(28, 3072, 8192, 24, 8, 128256, 131072, head_dim=128, **_TIED),
    "meta-llama/Meta-Llama-3-8B": _dense(32, 4096, 14336, 32, 8, 128256, 8192),
    "meta-llama/Llama-3.1-8B": _dense(32, 4096, 14336, 32, 8, 128256, 131072),
    "meta-llama/Llama-3.1-70B": _dense(80, 8192, 28672, 64, 8, 128256, 131072),
    "meta-llama/Llama-3.3-70B": _dense(80, 8192, 28672, 64, 8, 128256, 131072),
    "meta-llama/Llama-3.1-405B": _dense(126, 16384, 53248, 128, 8, 128256, 131072),
    "Qwen/Qwen2.5-7B": _dense(28, 3584, 18944, 28, 4, 152064, 131072),
    "Qwen/Qwen2.5-14B": _dense(48, 5120, 13824, 40, 8, 152064, 131072),
    "Qwen/Qwen2.5-32B": _dense(64, 5120, 27648, 40, 8, 152064, 131072),
    "Qwen/Qwen2.5-72B": _dense(80, 8192, 29568, 64, 8, 152064, 131072),
    "Qwen/Qwen3-0.6B": _dense(28, 1024, 3072, 16, 8, 151936, 40960, **_QWEN3, **_TIED),
    "Qwen/Qwen3-1.7B": _dense(28, 2048, 6144, 16, 8, 151936, 40960, **_QWEN3, **_TIED),
    "Qwen/Qwen3-4B": _dense(36, 2560, 9728, 32, 8, 151936, 40960, **_QWEN3, **_TIED),
    "Qwen/Qwen3-8B": _dense(36, 4096, 12288, 32, 8, 151936, 40960, **_QWEN3),
    "Qwen/Qwen3-14B": _dense(40, 5120, 17408, 40, 8, 151936, 40960, **_QWEN3),
    "Qwen/Qwen3-32B": _dense(64, 5120, 25600, 64, 8, 151936, 40960, **_QWEN3),
    "Qwen/Qwen3-30B-A3B": _dense(48, 2048, 6144, 32, 4, 151936, 40960, **_QWEN3, **_experts(128, 8, 768)),
    "Qwen/Qwen3-235B-A22B": _dense(94, 4096, 12288, 64, 4, 151936, 40960, **_QWEN3, **_experts(128, 8, 1536)),
    "mistralai/Mistral-7B-v0.3": _dense(32, 4096, 14336, 32, 8, 32768, 32768),
    "mistralai/Mistral-Small-24B": _dense(40, 5120, 32768, 32, 8, 131072, 32768, head_dim=128),
    "mistralai/Mixtral-8x7B-v0.1": _dense(32, 4096, 14336, 32, 8, 32000, 32768, **_experts(8, 2, 14336)),
    "mistralai/Mixtral-8x22B-v0.1": _dense(56, 6144, 16384, 48, 8, 32768, 65536, **_experts(8, 2, 16384)),
    "microsoft/phi-4": _dense(40, 5120, 17920, 40, 10, 100352, 16384),
    "deepseek-ai/DeepSeek-V3": _dense(
        61, 7168, 18432, 128, 128, 129280, 163840, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=3, n_shared_experts=1, **_experts(256, 8, 2048),
        **_FP8),
    "openai/gpt-oss-20b": _dense(24, 2880, 2880, 64, 8, 201088, 131072, layer_types=_WINDOWS * 12,
                                 **_experts(32, 4, 2880), **_GPT_OSS),
    "openai/gpt-oss-120b": _dense(36, 2880, 2880, 64, 8, 201088, 131072, layer_types=_WINDOWS * 18,
                                  **_experts(128, 4, 2880), **_GPT_OSS),
}  # fmt: skip


# Ends of the names of models whose weights are stored in fewer bits.
CODES = {
    "-fp8": _FP8,
    "-fp8-dynamic": _FP8,
    "-awq": {"quantization_config": {"bits": 4.25}},
    "-gptq-int4": {"quantization_config": {"bits": 4.25}},
}


def _plain(name: str) -> str:
    """A model's name as it is compared: no owner, and none of the endings that change no shape."""
    name = name.rstrip("/").rsplit("/", 1)[-1].lower()
    for ending in ("-hf", "-base", "-instruct", "-it", "-v0.1", "-v0.2", "-v0.3", "-instruct-2501", "-instruct-2507",
                   "-thinking-2507", "-0324", "-base-2501"):  # fmt: skip
        name = name.removesuffix(ending)
    return name.removeprefix("meta-").removesuffix("-instruct")


def find_model(name: str) -> Mapping[str, Any]:
    """The configuration of a `config.json`, of a folder with one, or of a known model. Raises InputError."""
    path = Path(name, "config.json") if os.path.isdir(name) else Path(name)
    codes = {ending: config for ending, config in CODES.items() if name.lower().endswith(ending)}
    wanted = _plain(name.lower().removesuffix(next(iter(codes), "")))
    for known, config in KNOWN_MODELS.items():
        if _plain(known) == wanted and not os.path.isfile(path):
            return config | next(iter(codes.values()), {})
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        names = ", ".join(known.rsplit("/", 1)[-1] for known in KNOWN_MODELS)
        raise common.InputError(
            f"--model {name!r}: must be a config.json, a folder with one, or one of {names}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise common.InputError(f"--model {name!r}: not readable as JSON ({error})") from None
    if not isinstance(config, dict):
        raise common.InputError(f"--model {name!r}: must hold a JSON object")
    return config

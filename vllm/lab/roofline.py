"""What a model reads, computes and keeps, from its `config.json` alone: the bill of a step, without running one.

Owns the arithmetic of memory and bandwidth, and the shapes of the models that the lessons reckon with; called by the
lessons' numbers, the tours and the simulations of this folder. It never measures anything.
vLLM: `vllm/v1/kv_cache_interface.py`.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from engine.model import llama
from engine.model.config import LlamaConfig

# How an element is stored: bits, and, where scales are kept per token, (bits of a scale, elements that share it;
# 0 means the whole head vector). Names as in vLLM's --kv-cache-dtype, which has no float32; plain fp8 has one scale
# per layer: no cost.
KV_CACHE_DTYPES: dict[str, tuple[int, int, int]] = {
    "float32": (32, 0, 0),
    "bfloat16": (16, 0, 0),
    "float16": (16, 0, 0),
    "fp8": (8, 0, 0),
    "int8_per_token_head": (8, 32, 0),
    "int4_per_token_head": (4, 32, 0),
    "nvfp4": (4, 8, 16),
}


def vector_bytes(size: int, bits: int, scale_bits: int = 0, group: int = 0) -> int:
    """Bytes of one stored vector of `size` elements, its scales included; half-filled bytes count whole."""
    scales = -(-size // (group or size)) if size else 0
    return -(-(size * bits + scales * scale_bits) // 8)


@dataclasses.dataclass(frozen=True)
class KVCacheSpec:
    """What one token leaves behind in every layer (vLLM: `AttentionSpec` in `v1/kv_cache_interface.py`).

    MHA has Hkv = Hq, GQA fewer, MQA one. MLA keeps one latent that is key and value at once: Hkv = 1, no value.
    """

    num_layers: int  # L
    num_kv_heads: int  # Hkv
    head_size: int  # D of a key
    head_size_v: int  # D of a value; 0 for MLA

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> KVCacheSpec:
        """Read the fields of a Hugging Face `config.json`."""
        L, Hq = config["num_hidden_layers"], config["num_attention_heads"]
        if "kv_lora_rank" in config:  # MLA: the latent and the one rotated key that all heads share
            return cls(L, 1, config["kv_lora_rank"] + config["qk_rope_head_dim"], 0)
        D = config.get("head_dim") or config["hidden_size"] // Hq
        return cls(L, config.get("num_key_value_heads") or Hq, D, D)

    def bytes_per_token(self, dtype: str = "bfloat16") -> int:
        """bytes per token = L · Hkv · (bytes of a key + bytes of a value)"""
        key, value = (vector_bytes(size, *KV_CACHE_DTYPES[dtype]) for size in (self.head_size, self.head_size_v))
        return self.num_layers * self.num_kv_heads * (key + value)


# The fields of each model's config.json that decide about memory. `num_parameters` stands where the shapes are not
# a Llama's (from the paper or model card); DeepSeek-V3 is published in fp8.
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": dict(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576,
                         intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True),
    "OPT-13B": dict(num_hidden_layers=40, num_attention_heads=40, hidden_size=5120, num_parameters=13_000_000_000),
    "Llama-2-7B": dict(num_hidden_layers=32, num_attention_heads=32, hidden_size=4096,
                       intermediate_size=11008, vocab_size=32000, tie_word_embeddings=False),
    "Llama-3.1-8B": dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096,
                         intermediate_size=14336, vocab_size=128256, tie_word_embeddings=False),
    "Llama-3.1-70B": dict(num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, hidden_size=8192,
                          intermediate_size=28672, vocab_size=128256, tie_word_embeddings=False),
    "DeepSeek-V3": dict(num_hidden_layers=61, num_attention_heads=128, hidden_size=7168, kv_lora_rank=512,
                        qk_rope_head_dim=64, num_parameters=671_000_000_000, weight_bits=8),
}  # fmt: skip

GPU_MEMORY_UTILIZATION = 0.92  # vLLM 0.32's default: the share of the GPU that weights and cache may take


def weight_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of all weights: two per parameter unless the config says otherwise."""
    parameters = config.get("num_parameters") or sum(map(math.prod, llama.tensor_shapes(llama_config(config)).values()))
    return parameters * config.get("weight_bits", 16) // 8


def llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """A plain dictionary as the `LlamaConfig` that the model computes shapes from."""
    spec = KVCacheSpec.from_config(config)
    fields = {field.name for field in dataclasses.fields(LlamaConfig)}
    sizes: dict[str, Any] = {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_size}
    return LlamaConfig(**sizes | {name: value for name, value in config.items() if name in fields})


def sequences_that_fit(gpu_bytes: float, config: Mapping[str, Any], context: int, dtype: str = "bfloat16") -> int:
    """⌊(0.92 · GPU − weights) / (context · bytes per token)⌋; 0 if not even the weights fit. Ignores activations."""
    room = GPU_MEMORY_UTILIZATION * gpu_bytes - weight_bytes(config)
    return max(0, int(room // (context * KVCacheSpec.from_config(config).bytes_per_token(dtype))))


def weights_read(config: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters that a forward pass multiplies by: (W per token, W_head per row of logits).

    The input embedding is not among them: a pass reads one row of it per token.
    """
    return _matrices(llama_config(config))


@functools.cache  # a simulation asks at every step
def _matrices(config: LlamaConfig) -> tuple[int, int]:
    shapes = llama.tensor_shapes(config)
    embedding = math.prod(shapes["model.embed_tokens.weight"])  # as large as the output matrix
    total = sum(map(math.prod, shapes.values()))
    return total - embedding * (1 if config.tie_word_embeddings else 2), embedding


def step_cost(
    config: Mapping[str, Any], num_seqs: int, num_new_tokens: int, context: int, dtype: str = "bfloat16"
) -> tuple[int, int]:
    """(FLOPs, bytes) of one forward pass: each of B sequences computes its last T of S positions. bf16 weights.

    FLOPs = 2 · W · B·T + 2 · W_head · B + 4 · L · Hq · D · (query-key pairs)    a multiply and an add each
    bytes = 2 · (W + W_head) + B · (S + T) · bytes per token                      read once; T rows are written, too
    """
    B, T, S = num_seqs, num_new_tokens, context
    spec, Hq = KVCacheSpec.from_config(config), config["num_attention_heads"]
    W, W_head = weights_read(config)
    pairs = B * (T * S - T * (T - 1) // 2)  # the last token sees S keys, the one before it S − 1, …
    flops = 2 * W * B * T + 2 * W_head * B + 4 * spec.num_layers * Hq * spec.head_size * pairs
    return flops, 2 * (W + W_head) + B * (S + T) * spec.bytes_per_token(dtype)


def attention_intensity(config: Mapping[str, Any], dtype: str = "bfloat16") -> float:
    """FLOPs per byte of decode attention alone: 4·Hq·D per layer over that layer's bytes. In bf16, Hq / Hkv."""
    spec = KVCacheSpec.from_config(config)
    return 4 * spec.num_layers * config["num_attention_heads"] * spec.head_size / spec.bytes_per_token(dtype)


def latency_line(
    config: Mapping[str, Any], bandwidth: float, dtype: str = "bfloat16", weight_size: int = 2
) -> tuple[float, float]:
    """(seconds, seconds per cached token) of a decode step if bandwidth is all there is:

    ITL = weights / bandwidth + tokens · bytes per token / bandwidth        tokens: of all running sequences together
    """
    per_token = KVCacheSpec.from_config(config).bytes_per_token(dtype)
    return weight_size * sum(weights_read(config)) / bandwidth, per_token / bandwidth


# Measured by others: Llama-3.1-8B on one H100, one request with up to 125,000 tokens, cache in bf16 and in fp8 (vLLM
# blog, 2026-04-22): ms, ms per token.
PUBLISHED_ITL = {"bfloat16": (6.44, 4.37e-5), "fp8": (6.58, 2.37e-5)}


def slug(name: str) -> str:
    """A model's or workload's name as a key: Llama-3.1-8B -> llama_31_8b."""
    return name.lower().replace("-", "_").replace(" ", "_").replace(".", "")

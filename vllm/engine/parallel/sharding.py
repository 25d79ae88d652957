"""Who divides what: how many ranks can share a model, and how narrow each of them is.

Owns the rule and the narrower configuration; read by whoever cuts a model or checks arguments. It never touches a
weight. vLLM: `vllm/config/model.py` (`verify_with_parallel_config`), `vllm/distributed/utils.py`.
"""

from __future__ import annotations

import common

import dataclasses

from engine.model.config import LlamaConfig


def divides(config: LlamaConfig, n: int) -> bool:
    """Can n ranks share this model? Heads and neurons must come out even; KV heads may be divided or copied."""
    Hq, Hkv = config.num_attention_heads, config.num_key_value_heads
    return Hq % n == 0 and config.intermediate_size % n == 0 and (Hkv % n == 0 or n % Hkv == 0)


def check_tensor_parallel_size(config: LlamaConfig, n: int) -> None:
    """Raises InputError if n ranks cannot share this model; the message says which numbers can."""
    if not divides(config, n):
        works = ", ".join(str(m) for m in range(1, config.num_attention_heads + 1) if divides(config, m))
        raise common.InputError(
            f"tensor_parallel_size {n}: must divide num_attention_heads ({config.num_attention_heads}) and "
            f"intermediate_size ({config.intermediate_size}), and fit num_key_value_heads "
            f"({config.num_key_value_heads}); allowed for this model: {works}"
        )


def pad_vocab_size(vocab_size: int, pad_to: int) -> int:
    """The next multiple of `pad_to`: the vocabulary is whatever it is, and its rows can be filled up with zeros."""
    return -(-vocab_size // pad_to) * pad_to


def shard_config(config: LlamaConfig, n: int) -> LlamaConfig:
    """The config of the narrower model that one of n ranks is. Depth, hidden size and head size stay."""
    check_tensor_parallel_size(config, n)
    return dataclasses.replace(
        config,
        num_attention_heads=config.num_attention_heads // n,
        num_key_value_heads=max(1, config.num_key_value_heads // n),
        intermediate_size=config.intermediate_size // n,
        vocab_size=pad_vocab_size(config.vocab_size, n) // n,
    )

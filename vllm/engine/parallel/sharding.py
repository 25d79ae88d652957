"""Who divides what: how many ranks can share a model, and how narrow each of them is.

Owns the rule and the narrower configuration; read by whoever cuts a model or checks arguments. It never touches a
weight. vLLM: `vllm/config/model.py` (`verify_with_parallel_config`), `vllm/distributed/utils.py`.
"""

from __future__ import annotations

import common

import dataclasses

from engine.experts.config import MoEConfig
from engine.model.config import LlamaConfig


def divides(config: LlamaConfig, n: int) -> bool:
    """Can n ranks share this model? Heads and neurons must come out even; KV heads may be divided or copied."""
    Hq, Hkv = config.num_attention_heads, config.num_key_value_heads
    neurons = widths(config).values()
    return Hq % n == 0 and all(size % n == 0 for size in neurons) and (Hkv % n == 0 or n % Hkv == 0)


def widths(config: LlamaConfig) -> dict[str, int]:
    """Neurons that ranks divide between them, by their field's name: of an MLP, of an expert, of the shared one."""
    moe = config.moe
    if moe is None:
        return {"intermediate_size": config.intermediate_size}
    found = {"intermediate_size": config.intermediate_size if moe.dense_layers else 0}
    found["moe_intermediate_size"] = 0 if moe.expert_parallel else moe.intermediate_size
    found["shared_expert_intermediate_size"] = moe.shared_intermediate_size
    return {name: size for name, size in found.items() if size}


def check_tensor_parallel_size(config: LlamaConfig, n: int) -> None:
    """Raises InputError if n ranks cannot share this model; the message says which numbers can."""
    if not divides(config, n):
        works = ", ".join(str(m) for m in range(1, config.num_attention_heads + 1) if divides(config, m))
        sizes = " and ".join(f"{name} ({size})" for name, size in widths(config).items())
        raise common.InputError(
            f"tensor_parallel_size {n}: must divide num_attention_heads ({config.num_attention_heads})"
            f"{sizes and ' and '}{sizes}, and fit num_key_value_heads "
            f"({config.num_key_value_heads}); allowed for this model: {works}"
        )


def experts_of(config: MoEConfig, rank: int, n: int) -> range:
    """The experts of one of n ranks, which have as many as any other, or one more."""
    return range(rank * config.num_experts // n, (rank + 1) * config.num_experts // n)


def pad_vocab_size(vocab_size: int, pad_to: int) -> int:
    """The next multiple of `pad_to`: the vocabulary is whatever it is, and its rows can be filled up with zeros."""
    return -(-vocab_size // pad_to) * pad_to


def shard_config(
    config: LlamaConfig, n: int, rank: int = 0, expert_ranks: int | None = None, expert_rank: int | None = None
) -> LlamaConfig:
    """The config of the narrower model that one of n ranks is. Depth, hidden size and head size stay. Whole experts are
    dealt out to those n or, where engines share them, to the `expert_ranks` of all."""
    check_tensor_parallel_size(config, n)
    moe = config.moe
    if moe:
        moe = dataclasses.replace(moe, shared_intermediate_size=moe.shared_intermediate_size // n)
        if moe.expert_parallel:
            place = (rank, n) if expert_ranks is None or expert_rank is None else (expert_rank, expert_ranks)
            moe = dataclasses.replace(moe, held=experts_of(moe, *place))
        else:
            moe = dataclasses.replace(moe, intermediate_size=moe.intermediate_size // n)
    return dataclasses.replace(
        config,
        num_attention_heads=config.num_attention_heads // n,
        num_key_value_heads=max(1, config.num_key_value_heads // n),
        intermediate_size=config.intermediate_size // n,
        moe=moe,
        vocab_size=pad_vocab_size(config.vocab_size, n) // n,
    )

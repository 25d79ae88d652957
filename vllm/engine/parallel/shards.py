"""Whole weights by Transformers' names, and what of each a rank keeps.

Owns the names; called by whoever makes a rank's model, from a file or from a model in memory. It never copies more than
a rank's part. vLLM: `vllm/model_executor/layers/linear.py`, each layer's `weight_loader`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

from collections.abc import Callable
from typing import Any

import torch

from engine.distributed.group import GroupCoordinator
from engine.experts.layer import MoELayer
from engine.model import llama
from engine.model.config import LlamaConfig
from engine.model.mla import MLALayer
from engine.parallel.layers import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

Tensors = Callable[[str], torch.Tensor | None]  # a weight by Transformers' name, as `Llama` takes it


def shard_tensors(tensors: Tensors, config: LlamaConfig, group: GroupCoordinator) -> Tensors:
    """The same weights, each cut to what this rank owns. Raises InputError where a shape contradicts the config."""
    shapes = llama.tensor_shapes(config)

    def lookup(name: str) -> torch.Tensor | None:
        tensor = tensors(name)
        if tensor is None:
            return None
        if tuple(tensor.shape) != shapes.get(name, tuple(tensor.shape)):
            raise common.InputError(
                f"weights: {name} has shape {list(tensor.shape)}, config.json says {list(shapes[name])}"
            )
        return shard_tensor(name, tensor, config, group).contiguous()

    return lookup


def shard_tensor(name: str, tensor: torch.Tensor, config: LlamaConfig, group: GroupCoordinator) -> torch.Tensor:
    """What this rank owns of a whole weight or bias, by its name: norms and biases of row-parallel layers whole, and
    what makes latents, which every rank needs for its own heads."""
    rank, n, (layer, kind) = group.rank_in_group, group.world_size, name.split(".")[-2:]
    if config.moe and config.moe.expert_parallel and ".experts." in name:
        return tensor  # a rank asks for its own alone
    if ".experts." in name and (layer, kind) == ("down_proj", "bias") and rank:
        return torch.zeros_like(tensor)  # or the sum over ranks would contain it n times
    if kind == "sinks":
        return QKVParallelLinear.shard(tensor, rank, n, config.num_attention_heads)
    heads = {
        "q_proj": config.num_attention_heads,
        "q_b_proj": config.num_attention_heads,
        "kv_b_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
        "v_proj": config.num_key_value_heads,
    }
    if layer in heads:
        return QKVParallelLinear.shard(tensor, rank, n, heads[layer])
    if layer in ("gate_proj", "up_proj"):
        return MergedColumnParallelLinear.shard(tensor, rank, n)
    if layer in ("o_proj", "down_proj") and kind == "weight":
        return RowParallelLinear.shard(tensor, rank, n)
    if layer in ("embed_tokens", "lm_head"):
        return VocabParallelEmbedding.shard(tensor, rank, n)
    return tensor


def model_tensors(model: llama.Llama) -> Tensors:
    """The weights of a whole model under Transformers' names: views into its packed matrices."""
    c = model.config
    q, kv, I = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size
    head: Any = model.linear["lm_head"]
    found: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": model.embed_tokens,
        "model.norm.weight": model.norm,
        "lm_head.weight": head.weight,
    }
    for i in range(c.num_hidden_layers):
        p = f"model.layers.{i}"
        found[f"{p}.input_layernorm.weight"] = model.input_norm[i]
        found[f"{p}.post_attention_layernorm.weight"] = model.post_attention_norm[i]
        if c.attention_sinks:
            found[f"{p}.self_attn.sinks"] = model.sinks[i]
        if c.qk_norm:
            found[f"{p}.self_attn.q_norm.weight"] = model.q_norm[i]
            found[f"{p}.self_attn.k_norm.weight"] = model.k_norm[i]
        if c.mla:
            found |= latent_tensors(model.mla[i], f"{p}.self_attn")
        shared = c.moe.shared_intermediate_size if c.moe else 0
        for packed, block, parts, rows in (
            ("qkv_proj", "self_attn", ("q_proj", "k_proj", "v_proj"), (q, kv, kv)),
            ("qkv_a_proj", "self_attn", *parts_of_latents(c)),
            ("q_b_proj", "self_attn", ("q_b_proj",), (c.num_attention_heads * (c.mla.qk_head_dim if c.mla else 0),)),
            ("o_proj", "self_attn", ("o_proj",), (c.hidden_size,)),
            ("gate_up_proj", "mlp", ("gate_proj", "up_proj"), (I, I)),
            ("down_proj", "mlp", ("down_proj",), (c.hidden_size,)),
            ("shared_gate_up_proj", "mlp.shared_expert", ("gate_proj", "up_proj"), (shared, shared)),
            ("shared_down_proj", "mlp.shared_expert", ("down_proj",), (c.hidden_size,)),
        ):
            layer: Any = model.linear.get(f"layers.{i}.{packed}")
            if layer is None:
                continue
            for kind, whole in (("weight", layer.weight), ("bias", layer.bias)):
                if whole is not None:
                    found |= {f"{p}.{block}.{part}.{kind}": x for part, x in zip(parts, whole.split(rows))}
        if i in model.moe:
            found |= expert_tensors(model.moe[i], f"{p}.mlp")
    return found.get


def parts_of_latents(config: LlamaConfig) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """What lies in `qkv_a_proj`, and how many rows of each; nothing without latents."""
    if config.mla is None:
        return (), ()
    shapes = config.mla.shapes(config.num_attention_heads, config.hidden_size)
    names = ("q_a_proj" if config.mla.q_lora_rank else "q_proj", "kv_a_proj_with_mqa")
    return names, tuple(shapes[name][0] for name in names)


def latent_tensors(layer: MLALayer, prefix: str) -> dict[str, torch.Tensor]:
    """The weights of a layer that are no matrix of `model.linear`."""
    found = {"q_a_layernorm": layer.q_norm, "kv_a_layernorm": layer.kv_norm, "kv_b_proj": layer.kv_b}
    return {f"{prefix}.{name}.weight": tensor for name, tensor in found.items() if tensor is not None}


def expert_tensors(layer: MoELayer, prefix: str) -> dict[str, torch.Tensor]:
    """The weights of a whole layer of experts under Qwen's names: views into its stacks."""
    experts: Any = layer.experts  # floats: nobody cuts a model in memory that has codes
    found = {f"{prefix}.gate.weight": layer.gate}
    if layer.correction is not None:
        found[f"{prefix}.gate.e_score_correction_bias"] = layer.correction
    if layer.gate_bias is not None:
        found[f"{prefix}.gate.bias"] = layer.gate_bias
    if layer.shared_gate is not None:
        found[f"{prefix}.shared_expert_gate.weight"] = layer.shared_gate
    for i, expert in enumerate(experts.held):
        name = f"{prefix}.experts.{expert}"
        gate, up = experts.gate_up[i].chunk(2)
        found |= {f"{name}.gate_proj.weight": gate, f"{name}.up_proj.weight": up}
        found[f"{name}.down_proj.weight"] = experts.down[i]
        if experts.down_bias is not None:
            gate, up = experts.gate_up_bias[i].chunk(2)
            found |= {f"{name}.gate_proj.bias": gate, f"{name}.up_proj.bias": up}
            found[f"{name}.down_proj.bias"] = experts.down_bias[i]
    return found

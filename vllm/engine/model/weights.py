"""A folder's tensors by name, from one safetensors file or from the pieces that an index names.

Owns the lookup; `loader`, `config` and workers that take a part of a model call it. It never copies what nobody asked
for: files are mapped. vLLM: `vllm/model_executor/model_loader/weight_utils.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.model.folders import read_json


def open_weights(folder: Path, stack: contextlib.ExitStack) -> Callable[[str], torch.Tensor | None]:
    """A lookup by name over `model.safetensors`, or over the shards that an index names."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():  # an index beside it is left over from pieces
        names = ["model.safetensors"]
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise common.InputError(f"{index}: weight_map must map tensor names to file names")
        names = sorted(set(weight_map.values()))
    else:
        raise common.InputError(f"{folder}: model.safetensors is missing (other weight formats are not supported)")
    where: dict[str, Any] = {}
    for name in names:
        try:
            file = stack.enter_context(safe_open(folder / name, "pt"))
        except (SafetensorError, OSError) as error:
            raise common.InputError(f"{folder / name}: {error}") from None
        where.update(dict.fromkeys(file.keys(), file))
    alias = {}  # of one matrix with two names, a file may have either
    if "model.embed_tokens.weight" not in where and read_json(folder / "config.json").get("tie_word_embeddings"):
        alias["model.embed_tokens.weight"] = "lm_head.weight"

    def tensor(name: str) -> torch.Tensor | None:
        name = alias.get(name, name)
        if name not in where and ".mlp." in name:
            name = other_name(name)
        return where[name].get_tensor(name) if name in where else None

    return tensor


MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def other_name(name: str) -> str:
    """Of a tensor of experts under Qwen's name, the one that a Mixtral's file has, or a DeepSeek's shared expert.

    mlp.gate.weight -> block_sparse_moe.gate.weight
    mlp.experts.0.up_proj.weight -> block_sparse_moe.experts.0.w3.weight
    """
    if ".mlp.shared_expert." in name:
        return name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")
    *prefix, part, kind = name.replace(".mlp.", ".block_sparse_moe.").split(".")
    return ".".join((*prefix, MIXTRAL.get(part, part), kind))

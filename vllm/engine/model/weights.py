"""A folder's tensors by name, from one safetensors file or from the pieces that an index names.

Owns the lookup; `loader`, `config` and workers that take a part of a model call it. It never copies what nobody asked
for: files are mapped. vLLM: `vllm/model_executor/model_loader/weight_utils.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import contextlib
import re
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
        if name not in where and (part := part_of_stack(where, name)) is not None:
            return part
        if name not in where and ".mlp." in name:
            name = other_name(name)
        return where[name].get_tensor(name) if name in where else None

    return tensor


def part_of_stack(where: dict[str, Any], name: str) -> torch.Tensor | None:
    """Of a tensor of experts under Qwen's name, what a gpt-oss's file has of it; None if that is not in this one.

    There a layer's experts are one tensor, and a row of a gate and one of an up take turns. In floats its matrices are
    transposed: mlp.experts.3.up_proj.weight [I, H] -> mlp.experts.gate_up_proj [E, H, 2·I], of expert 3 every second
    column. In MXFP4 they are not: gate_up_proj_blocks uint8 [E, 2·I, H / 32, 16], gate_up_proj_scales [E, 2·I, H / 32].
    """
    found = re.fullmatch(r"(.*\.mlp)\.(?:gate|experts\.(\d+)\.(gate|up|down)_proj)\.(weight|bias)", name)
    if found is None:
        return None
    prefix, expert, part, kind = found.groups()
    if expert is None:
        name = f"{prefix}.router.{kind}"
        return where[name].get_tensor(name) if name in where else None
    name, rows = f"{prefix}.experts.{'down' if part == 'down' else 'gate_up'}_proj", slice(None)
    if part != "down":
        rows = slice(int(part == "up"), None, 2)

    def of_expert(name: str) -> torch.Tensor:
        return where[name].get_slice(name)[int(expert)]

    if kind == "bias":
        return of_expert(f"{name}_bias")[rows] if f"{name}_bias" in where else None
    if f"{name}_blocks" in where:
        return decode_mxfp4(of_expert(f"{name}_blocks")[rows], of_expert(f"{name}_scales")[rows])
    return of_expert(name)[:, rows].mT if name in where else None


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Floats of four bits in blocks of 32 that share a power of two (OCP Microscaling).

    Semantics: a byte has two codes, the low half first; a code is a sign and one of eight sizes; times 2^(scale − 127).
    Shapes: blocks uint8 [N, K / 32, 16], scales uint8 [N, K / 32] -> bf16 [N, K], which is exact.
    """
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([*sizes, *(-size for size in sizes)])
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2).long()  # [N, K / 32, 32]
    return torch.ldexp(values[codes], scales.int()[..., None] - 127).flatten(1).bfloat16()


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

"""Adapters on disk: PEFT's folder, read, checked and written.

Owns the format: adapter_config.json says r and s, adapter_model.safetensors holds A and B under the names of
Transformers' modules. Called by `manager`, on a thread. It never trusts a file, and never maps one.
vLLM: `vllm/lora/peft_helper.py`, `vllm/lora/lora_model.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import hashlib
import json
import math
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.lora.lora_model import PACKED_MODULES, LoRAModel, Pair, Slices, layer_shapes
from engine.model import folders, gguf_files
from engine.model.config import LlamaConfig

SHIPPED = common.HERE / "adapters"
PREFIX = "base_model.model.model."
MAX_CONFIG_BYTES = 1 << 20

# What vLLM refuses, too: features that change what A and B mean. Field -> the only values that change nothing.
PLAIN = {
    "use_dora": (False, None), "bias": ("none", None), "lora_bias": (False, None), "modules_to_save": (None, []),
    "rank_pattern": (None, {}), "alpha_pattern": (None, {}), "layer_replication": (None,), "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []), "fan_in_fan_out": (False, None), "trainable_token_indices": (None, [], {}),
}  # fmt: skip


def read_file(path: Path, limit: int) -> bytes:
    """A file's content, at most `limit` bytes. Raises InputError.

    Whoever loads an adapter names a path. A pipe or a device there may never answer, or never end: only regular files
    are read, and nothing that waits is opened. The content is read and not mapped: a mapped file that somebody cuts
    short ends the process that looks at it.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before it is opened, which some devices answer to
            raise common.InputError(f"{path}: is not a regular file")
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it was another one a moment ago
                raise common.InputError(f"{path}: is not a regular file")
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise common.InputError(f"{path}: no such file") from None
    except common.InputError:
        raise
    except (OSError, ValueError) as error:  # the path may have a null byte
        raise common.InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > limit:
        raise common.InputError(f"{path}: has more than {limit:,} bytes")
    return content


def _json_object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise common.InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise common.InputError(f"{path}: holds a JSON {type(raw).__name__}, expected an object")
    return raw


def read_config(folder: Path, max_lora_rank: int | None = None, content: bytes | None = None) -> tuple[int, float]:
    """(rank, scale) of an adapter; `content` if the file has been read. Raises InputError that names file and field."""
    path = folder / "adapter_config.json"
    raw = _json_object(path, read_file(path, MAX_CONFIG_BYTES) if content is None else content)
    if raw.get("peft_type", "LORA") != "LORA":
        raise common.InputError(f"{path}: peft_type {raw['peft_type']!r}; allowed: 'LORA'")
    rank, alpha = raw.get("r"), raw.get("lora_alpha", 8)
    if type(rank) is not int or not 0 < rank < 2**31:
        raise common.InputError(f"{path}: r is {rank!r}, expected a positive whole number")
    if max_lora_rank is not None and rank > max_lora_rank:
        raise common.InputError(f"{path}: LoRA rank {rank} is greater than max_lora_rank {max_lora_rank}")
    if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
        raise common.InputError(f"{path}: lora_alpha is {alpha!r}, expected a number")
    _check_plain(path, raw)
    return rank, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def _check_plain(path: Path, raw: dict[str, Any]) -> None:
    """Raises InputError for a feature that changes what A and B mean."""
    for field, allowed in PLAIN.items():
        if field in raw and raw[field] not in allowed:
            raise common.InputError(f"{path}: {field} {raw[field]!r:.60} is not supported; allowed: {allowed[0]!r}")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in ("gaussian", "eva", "orthogonal"):
        raise common.InputError(f"{path}: init_lora_weights {init!r} changes the base model; allowed: true, 'gaussian'")


def read_adapter(
    folder: str | Path,
    config: LlamaConfig,
    name: str | None = None,
    max_lora_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> LoRAModel:
    """Load and check a PEFT folder for a model with this `config`.

    Every tensor must be one that the model has a place for, in the right shape, finite in `dtype` (B times the scale),
    and with its partner: an adapter of another model is refused here, not in the middle of a forward pass. Each file is
    read once, and the fingerprint is that of what was read. Raises InputError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = Path(os.path.expanduser(folder))  # a user who is not known stays as written
    if not os.path.isdir(folder):  # or it may not be looked at
        raise common.InputError(f"{folder}: no such adapter folder")
    about = read_file(folder / "adapter_config.json", MAX_CONFIG_BYTES)
    rank, scale = read_config(folder, max_lora_rank, about)
    path = folder / "adapter_model.safetensors"
    content = read_file(path, largest_file(config, rank))
    fingerprint = hashlib.sha256(hashlib.sha256(about).digest() + content).hexdigest()
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise common.InputError(f"{path}: {error}") from None
    del content

    weights = Weights(path, tensors, rank, scale, dtype)
    found: dict[str, Slices] = {}
    for i in range(config.num_hidden_layers):
        for packed, shape in layer_shapes(config).items():
            modules = [f"layers.{i}.{module}" for module in PACKED_MODULES[packed]]
            pairs = tuple(weights.pair(name, shape.in_features, out) for name, out in zip(modules, shape.slices))
            if any(pair is not None for pair in pairs):
                found[f"layers.{i}.{packed}"] = pairs
    if config.moe and (inside := [name for name in sorted(tensors) if ".mlp." in name or "block_sparse_moe" in name]):
        raise common.InputError(
            f"{path}: {inside[0]} adapts an expert, a router or an MLP; allowed in a model with experts: "
            "q_proj, k_proj, v_proj, o_proj"
        )
    if tensors:
        raise common.InputError(f"{path}: {min(tensors)} has no place in this model")
    if not found:
        raise common.InputError(f"{path}: holds no LoRA weights")
    return LoRAModel(name or folder.name, rank, found, fingerprint)


@dataclass
class Weights:
    """The tensors of one file, taken out one by one as the model has a place for them."""

    path: Path
    tensors: dict[str, torch.Tensor]
    rank: int
    scale: float
    dtype: torch.dtype

    def pair(self, module: str, in_features: int, out_features: int) -> Pair | None:
        """A [r, in] and s·B [out, r] of one module, or None if it is not adapted. Raises InputError."""
        a = self._take(f"{PREFIX}{module}.lora_A.weight", (self.rank, in_features))
        b = self._take(f"{PREFIX}{module}.lora_B.weight", (out_features, self.rank))
        if a is None and b is None:
            return None
        if a is None or b is None:
            raise common.InputError(f"{self.path}: lora_{'A' if a is None else 'B'} of {module} is missing")
        a, b = a.to(self.dtype), (b.float() * self.scale).to(self.dtype)
        for letter, weight, times in (("A", a, ""), ("B", b, f" times its scale {self.scale:g}")):
            if not weight.isfinite().all():
                what = f"lora_{letter} of {module}{times}"
                raise common.InputError(f"{self.path}: {what} is not finite in {self.dtype}")
        return a, b

    def _take(self, key: str, wanted: tuple[int, int]) -> torch.Tensor | None:
        tensor = self.tensors.pop(key, None)
        if tensor is None:
            return None
        if tuple(tensor.shape) != wanted:
            raise common.InputError(
                f"{self.path}: {key} has shape {list(tensor.shape)}, this model and rank "
                f"{self.rank} need {list(wanted)}"
            )
        if not tensor.is_floating_point():
            raise common.InputError(f"{self.path}: {key} is of {tensor.dtype}, expected floating-point numbers")
        return tensor


def largest_file(config: LlamaConfig, rank: int) -> int:
    """Bytes that an adapter's weights may have: every layer adapted, in fp64, and 16 MiB for their names."""
    columns = sum(shape.in_features * len(shape.slices) + sum(shape.slices) for shape in layer_shapes(config).values())
    return 8 * rank * columns * config.num_hidden_layers + (16 << 20)


def write_adapter(
    lora: LoRAModel,
    folder: str | Path,
    alpha: float,
    dtype: torch.dtype = torch.float16,
    base: str = folders.DEFAULT_MODEL,
) -> None:
    """Write a PEFT folder: the scale alpha / rank is taken out of B again."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, targets = {}, set()
    for name, pairs in lora.weights.items():
        _, i, packed = name.split(".")
        for module, pair in zip(PACKED_MODULES[packed], pairs):
            if pair is not None:
                targets.add(module.split(".")[1])
                key = f"{PREFIX}layers.{i}.{module}"
                tensors[f"{key}.lora_A.weight"] = pair[0].to(dtype).contiguous()
                tensors[f"{key}.lora_B.weight"] = (pair[1] * (lora.rank / alpha)).to(dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)
    about = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    gguf_files._write_json(folder / "adapter_config.json", about)

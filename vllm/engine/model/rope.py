"""Rotary position embedding: an angle per position and pair of numbers, and the rotation.

Owns the frequencies, rescaled for longer contexts as a config asks; the model rotates queries and keys with them. It
never reads a folder. vLLM: `vllm/model_executor/layers/rotary_embedding/`. Read: Su et al. 2021 (RoPE).
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import math
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

import torch


class RopeConfig(Protocol):
    """What the angles depend on: `LlamaConfig` has it."""

    @property
    def rotary_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> dict[str, Any] | None: ...


def rope_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Angle per position of each rotated pair, fp32 [D/2]: θ_i = base^(−2i/D), rescaled as the config asks; and what
    cosines and sines are multiplied by: 1, except with YaRN.

    Raises InputError for a scaling type other than default, linear, llama3 or yarn.
    """
    D = config.rotary_dim
    theta = 1.0 / config.rope_theta ** (torch.arange(0, D, 2, dtype=torch.int64).float() / D)  # [D/2]
    scaling = {"original_max_position_embeddings": config.max_position_embeddings} | (config.rope_scaling or {})
    kind = rope_type(scaling)
    context = "original_max_position_embeddings"
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", context, "low_freq_factor", "high_freq_factor"),
        "yarn": (context, "factor"),
    }
    if not isinstance(kind, str) or kind not in needed:
        raise common.InputError(f"rope_scaling type {kind!r} is not supported; allowed: {', '.join(needed)}")
    given = [f for f in YARN_OPTIONS if kind == "yarn" and scaling.get(f) is not None]
    given = [f for f in given if scaling[f] != 0 or f == "attention_factor"]  # the others' 0 is as good as nothing
    if kind == "yarn" and scaling.get("factor", 0) is None and is_positive(scaling[context]):
        scaling["factor"] = config.max_position_embeddings / scaling[context]
    if wrong := [f for f in (*needed[kind], *given) if not is_positive(scaling.get(f))]:
        raise common.InputError(f"rope_scaling of type {kind} needs a positive number in the field {wrong[0]!r}")
    scaling |= {f: float(scaling[f]) for f in (*needed[kind], *given)}  # torch takes no integer of more than 64 bits
    if kind == "linear":
        return theta / scaling["factor"], 1.0
    if kind == "llama3":
        # Llama 3.1: wavelengths longer than the original context are stretched by `factor`, short ones are kept,
        # and those in between are blended.
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if low >= high:
            raise common.InputError(
                f"rope_scaling of type llama3: low_freq_factor {low} must be below high_freq_factor {high}"
            )
        wavelength = 2 * math.pi / theta
        blend = ((scaling[context] / wavelength - low) / (high - low)).clamp(0, 1)  # 0: stretch, 1: keep
        return (1 - blend) * theta / scaling["factor"] + blend * theta, 1.0
    if kind == "yarn":
        return _yarn(theta, config.rope_theta, scaling[context], scaling)
    return theta, 1.0


def rope_type(rope_scaling: Mapping[str, Any] | None) -> Any:
    """Of which kind it is: in old files the field is `type`, and none is the default."""
    scaling = rope_scaling or {}
    return scaling.get("rope_type") or scaling.get("type") or "default"


YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def _yarn(theta: torch.Tensor, base: float, context: int, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): pairs that turn at least `beta_fast` times within the original context are kept, those
    that turn at most `beta_slow` times are stretched by `factor`, and those between are blended along a line in i.

    As a longer context spreads attention over more keys, all scores are made larger: cosines and sines are multiplied.
    """
    D, factor = 2 * len(theta), scaling["factor"]
    first, last = (
        D * math.log(context / (2 * math.pi * turns)) / (2 * math.log(base))  # the i whose pair turns so often
        for turns in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
    )
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    stretch = ((torch.arange(D // 2) - first) / (last - first or 0.001)).clamp(0, 1)

    def larger(scale: float) -> float:
        return 0.1 * scale * math.log(max(factor, 1)) + 1

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    by_default = larger(mscale) / larger(all_dim) if mscale and all_dim else larger(1)
    return stretch * theta / factor + (1 - stretch) * theta, scaling.get("attention_factor") or by_default


def is_positive(value: Any) -> TypeGuard[float]:
    """A number above 0, and one that a float can be."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def rope_factors(angles: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) for `apply_rope`, [T, 1, D] each, from angles [T, D/2]; sin carries the sign of its half."""
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pair (x_i, x_{i+D/2}) of every head by its position's angle. x [T, H, D]; cos, sin [T, 1, D].

    (x_i · cos − x_{i+D/2} · sin, x_{i+D/2} · cos + x_i · sin): x · cos, plus the halves swapped times (−sin, sin).
    """
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((x2, x1), dim=-1) * sin

"""A matrix of codes as kernels read it, and what a CPU multiplies with in its place.

Owns the order of codes, scales and zero points in memory; called by `linear` for each layer, and by the kernels'
wrappers. It never rounds: `dequantize` gives back what was packed. vLLM: `vllm/model_executor/kernels/linear/`.
"""

from __future__ import annotations

import common

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.model import llama
from engine.model.packed_linear import PackedLinear, packs
from engine.quantization.formats import MINIFLOATS, Format, Quantized
from engine.quantization.gguf_codes import planes


@dataclass
class PackedWeight:
    """A `Quantized` matrix as the kernel reads it: codes uint8 [N, K · bits / 8], scales and zeros [groups, N].

    On a GPU that runs `int4_hopper`'s kernel, `words` are scales and zeros once more, in its order (`scale_words`).
    """

    format: Format
    K: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    unpacked: Callable[[torch.Tensor], torch.Tensor] | None = None  # what a CPU multiplies with: `on_cpu`
    words: torch.Tensor | None = None

    @classmethod
    def pack(cls, quantized: Quantized) -> PackedWeight:
        """Raises InputError for what the kernel does not decode: other widths, groups below 32, NVFP4's scales."""
        format, (N, K) = quantized.format, quantized.codes.shape
        group = format.group or K
        tiled = group % 32 == 0 if format.bits == 4 or format.group else True
        if format.bits not in (4, 8) or format.scale == "e4m3" or not tiled:
            takes = "the kernel takes 4 or 8 bits and groups that are multiples of 32"
            raise common.InputError(f"format {format.name} with {K} inputs: {takes}")
        codes = quantized.codes
        if format.bits == 4:
            low, high = codes.view(N, K // 32, 2, 16).unbind(2)
            codes = (low | high << 4).flatten(1)  # [N, K/2]
        zero = None if quantized.zero is None else quantized.zero.T.contiguous()
        words = scale_words(quantized) if on_hopper(codes) else None
        return cls(format, K, codes.contiguous(), quantized.scale.T.contiguous(), zero, words=words)

    def dequantize(self) -> torch.Tensor:
        """The weights back from the packed bytes, fp32 [N, K]."""
        codes = self.codes if self.format.bits == 8 else planes(self.codes, 4, 16).to(torch.uint8)
        return Quantized(self.format, codes, self.scale.T, None if self.zero is None else self.zero.T).dequantize()

    @property
    def constants(self) -> dict[str, Any]:
        """What a kernel that decodes it is compiled for."""
        f, float_ = self.format, MINIFLOATS.get(self.format.grid)
        return {
            "GROUP": f.group or self.K,
            "BITS": f.bits,
            "MANTISSA": float_.mantissa_bits if float_ else -1,
            "BIAS": float_.bias if float_ else 0,
            "ZERO": f.zero or "none",
            "EXPONENT_SCALE": f.scale == "e8m0",
        }


FEW_ROWS = 4  # from 8 on, weights that are decoded and packed are faster


def on_cpu(weight: PackedWeight, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a CPU multiplies with, x [M, K] -> [M, N]: weights decoded once, which saves disk, neither time nor memory.

    Except that torch has a product for integer codes of 4 bits in bf16. It decodes them anew for every row, so it is
    for few rows, where a step does nothing but read weights.
    """
    W = weight.dequantize().to(dtype)
    many = llama.Linear(W)
    if packs(W.device, dtype):
        many = PackedLinear(W, None)
        many.most_rows = math.inf  # W goes: of what stands for it, only the shape is read
        many.weight = W.new_full((1, 1), math.nan).expand_as(W)
    f, (N, K), here = weight.format, W.shape, torch.backends.cpu.get_cpu_capability() if W.is_cpu else "GPU"
    is_int4 = (f.grid, f.bits, dtype) == ("int", 4, torch.bfloat16)
    if not is_int4 or N % 16 or (f.group or K) not in (32, 64, 128, 256) or here not in ("AVX2", "AVX512"):
        return many
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(planes(weight.codes, 4, 16).int(), 1)
    scale, zero = weight.scale.float(), f.center if weight.zero is None else weight.zero.float()
    # Its numbers are (code − 8) · scale + minimum.
    minimum = zero + 8 * scale if f.zero == "min" else (8 - zero) * scale
    numbers = torch.stack((scale, minimum), -1).bfloat16()  # [K / group, N, 2]

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if len(x) > FEW_ROWS:
            return many(x)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), codes, f.group or K, numbers)

    return multiply


def scale_words(quantized: Quantized) -> torch.Tensor | None:
    """Scale and zero point of each output and 128 inputs, as `int4_hopper` reads them: int32 [K/256 · ⌈N/16⌉, 32].

    The low half of a word is the fp16 scale, the high half 128 + z in bf16, exactly. A row has 16 outputs and two
    groups: of output r = 0 … 15 first r mod 4 counts, then r // 4 mod 2, then r // 8, last the group. (A larger group's
    word is there several times.) None for formats that it does not take.
    """
    f, (N, K) = quantized.format, quantized.codes.shape
    group = f.group or K
    if (f.grid, f.bits, f.scale) != ("int", 4, "fp16") or f.zero == "min" or group % 128 or K % 256:
        return None
    zero = torch.full_like(quantized.scale, f.center) if quantized.zero is None else quantized.zero
    high = (128 + zero.float()).bfloat16().view(torch.int16).int()
    low = quantized.scale.contiguous().view(torch.int16).int()
    words = F.pad(high << 16 | low & 0xFFFF, (0, 0, 0, -N % 16)).repeat_interleave(group // 128, 1)  # [N, K/128]
    words = words.view(-1, 2, 2, 4, K // 256, 2)  # 16 outputs, r // 8, r // 4 mod 2, r mod 4, tile, group
    return words.permute(4, 0, 3, 2, 1, 5).reshape(-1, 32).contiguous()


def on_hopper(x: torch.Tensor) -> bool:
    """Is `x` on an H100 or H200, whose shared memory and tensor cores take larger tiles?"""
    return x.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(x.device) == (9, 0)

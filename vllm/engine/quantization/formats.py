"""Number formats: what a code of few bits means, how many weights share a scale, and how that scale is stored.

Owns the grids, the table of formats, and a matrix in one of them; called by everything that rounds, reads or multiplies
weights. It never asks which codes are good: encoding is defined on every value, ties and saturation included, and that
question is `algorithms.py`'s. vLLM: `vllm/model_executor/layers/quantization/`, `vllm/scalar_type.py`.
"""

from __future__ import annotations

from common import InputError

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

# --- Grids: which values a code can stand for ------------------------------------------------------------------------


class Minifloat(NamedTuple):
    """A float of few bits: sign, exponent, mantissa. `largest` is where the finite codes end."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float


MINIFLOATS = {"e4m3": Minifloat(4, 3, 7, 448.0), "e5m2": Minifloat(5, 2, 15, 57344.0), "e2m1": Minifloat(2, 1, 1, 6.0)}


@functools.cache
def minifloat_values(kind: str) -> torch.Tensor:
    """Values of the non-negative finite codes 0, 1, 2, …, fp32, ascending: exponent 0 is subnormal, as in IEEE 754.

    value = mantissa · 2^(1 − bias − m)  if exponent = 0,  else (2^m + mantissa) · 2^(exponent − bias − m)
    """
    f = MINIFLOATS[kind]
    code = torch.arange(1 << (f.exponent_bits + f.mantissa_bits))
    exponent, mantissa = code >> f.mantissa_bits, code & ((1 << f.mantissa_bits) - 1)
    hidden = (exponent > 0).long() << f.mantissa_bits
    value = torch.ldexp((hidden + mantissa).float(), exponent.clamp(min=1) - f.bias - f.mantissa_bits)
    return value[value <= f.largest]


def encode_minifloat(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Codes of the nearest values, uint8; a tie goes to the even code, what is too large to the largest value.

    Ties to even *codes* are ties to even mantissas, because consecutive values have consecutive codes. `x` is finite.
    """
    f, values = MINIFLOATS[kind], minifloat_values(kind).to(x.device)
    middle = (values[1:] + values[:-1]) / 2  # exact: one bit more than the mantissa
    size = x.abs().float()
    below, above = torch.bucketize(size, middle), torch.bucketize(size, middle, right=True)  # they differ at a tie
    code = torch.where(below % 2 == 0, below, above)
    return (code | torch.signbit(x).long() << (f.exponent_bits + f.mantissa_bits)).to(torch.uint8)


def decode_minifloat(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Values of codes, fp32. Codes beyond the finite ones: NaN, and e5m2's first is infinity."""
    f, values = MINIFLOATS[kind], minifloat_values(kind)
    half = torch.full((1 << (f.exponent_bits + f.mantissa_bits),), math.nan)
    half[: len(values)] = values
    if kind == "e5m2":
        half[len(values)] = math.inf
    return torch.cat((half, -half)).to(codes.device)[codes.int()]


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """2^(code − 127): a scale that is an exponent and nothing else (255 is NaN, and never written here)."""
    return torch.ldexp(torch.ones(codes.shape, device=codes.device), codes.int() - 127)


# --- Formats: grid × group × scale -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """How the weights of one matrix [N, K] are stored; `group` consecutive inputs of an output share a scale."""

    name: str
    grid: str  # "int" (unsigned codes around a zero point), or a minifloat's name
    bits: int  # of one element
    group: int | None  # None: all K inputs of an output ("per channel")
    scale: str = "fp16"  # "fp32" | "fp16" | "e8m0" | "e4m3" (times one fp32 for the whole matrix)
    zero: str | None = None  # of integers. None: half of 2^bits; "int": a stored code; "min": a stored fp16 minimum

    def bits_per_weight(self, K: int) -> float:
        """Elements, scales and zero points; one scale per matrix costs nothing."""
        beside = {"fp32": 32, "fp16": 16, "e8m0": 8, "e4m3": 8}[self.scale]
        beside += {None: 0, "int": self.bits, "min": 16}[self.zero]
        return self.bits + beside / (self.group or K)

    @property
    def center(self) -> int:
        """The code of zero in a symmetric integer format (vLLM's uint4b8 and uint8b128)."""
        return 1 << (self.bits - 1)


FORMATS = {f.name: f for f in (
    Format("int8", "int", 8, None, "fp32"),
    Format("int4-g128", "int", 4, 128, "fp16", "int"),
    Format("int4-g64", "int", 4, 64, "fp16", "int"),
    Format("int4-g32", "int", 4, 32, "fp16", "int"),
    Format("int3-g64", "int", 3, 64, "fp16", "int"),
    Format("fp8", "e4m3", 8, None, "fp32"),
    Format("fp8-e5m2", "e5m2", 8, None, "fp32"),
    Format("mxfp8", "e4m3", 8, 32, "e8m0"),
    Format("mxfp4", "e2m1", 4, 32, "e8m0"),
    Format("nvfp4", "e2m1", 4, 16, "e4m3"),
    Format("q8_0", "int", 8, 32, "fp16"),
    Format("q4_1", "int", 4, 32, "fp16", "min"),
)}  # fmt: skip
FP8_BLOCKS = Format("fp8-g128", "e4m3", 8, 128, "fp32")  # of checkpoints: DeepSeek-V3's, Qwen3's


@dataclass
class Quantized:
    """A quantized matrix. codes uint8 [N, K]; scale [N, K/group] as stored; zero likewise, or None.

    `tensor_scale` multiplies all scales (NVFP4). Codes are kept one per byte here; `nbytes` counts them packed.
    """

    format: Format
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    tensor_scale: float = 1.0

    @property
    def scale_values(self) -> torch.Tensor:
        """Scales as numbers, fp32 [N, K/group]."""
        if self.format.scale == "e8m0":
            return decode_e8m0(self.scale)
        if self.format.scale == "e4m3":
            return decode_minifloat(self.scale, "e4m3") * self.tensor_scale
        return self.scale.float()

    def dequantize(self) -> torch.Tensor:
        """The weights that this stands for, fp32 [N, K]."""
        grouped = self.codes.unflatten(1, (self.scale.shape[1], -1))  # [N, K/group, group]
        zero = None if self.zero is None else self.zero[..., None]
        return decode(grouped, self.scale_values[..., None], zero, self.format).flatten(1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What goes to disk: codes packed to `bits` each, scales, zero points (integer ones packed as well)."""
        found = {"codes": pack_bits(self.codes, self.format.bits), "scale": self.scale}
        if self.zero is not None:
            found["zero"] = pack_bits(self.zero, self.format.bits) if self.format.zero == "int" else self.zero
        return found

    def to(self, device: torch.device) -> Quantized:
        zero = None if self.zero is None else self.zero.to(device)
        return dataclasses.replace(self, codes=self.codes.to(device), scale=self.scale.to(device), zero=zero)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of `bits` each, lowest bit first, without gaps: uint8 [⌈numel · bits / 8⌉]."""
    planes = (codes.flatten()[:, None] >> torch.arange(bits, dtype=torch.uint8)) & 1  # [numel, bits]
    flat = F.pad(planes.flatten(), (0, -planes.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def encode(
    w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, format: Format, nudge: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Codes of w, uint8; scale and zero broadcast against it. Integers round half to even and saturate.

    int: q = clamp(round(w / s) + z, 0, 2^bits − 1);  min: round((w − min) / s).  `nudge` moves w / s before rounding.
    """
    if format.grid != "int":
        return encode_minifloat(w / scale, format.grid)
    if zero is not None and format.zero == "min":
        q = ((w - zero.float()) / scale + nudge).round()
    else:
        q = (w / scale + nudge).round() + (format.center if zero is None else zero.float())
    return q.clamp(0, (1 << format.bits) - 1).to(torch.uint8)


def decode(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, format: Format) -> torch.Tensor:
    """int: (q − z)·s;  min: q·s + min;  float: value(q)·s. fp32."""
    if format.grid != "int":
        return decode_minifloat(codes, format.grid) * scale
    if zero is not None and format.zero == "min":
        return codes.float() * scale + zero.float()
    return (codes.float() - (format.center if zero is None else zero.float())) * scale


def choose_scales(W: torch.Tensor, format: Format) -> Quantized:
    """Scales and zero points for W [N, K] from each group's extremes, rounded as they will be stored; no codes yet.

    Raises InputError if the group does not divide K or a weight is not finite.
    """
    N, K = W.shape
    if K % (format.group or K):
        raise InputError(f"format {format.name}: groups of {format.group} do not divide {K} inputs")
    if not W.isfinite().all():
        raise InputError(f"format {format.name}: a weight is not finite")
    grouped = W.float().view(N, -1, format.group or K)  # [N, K/group, group]
    low, high, size = grouped.amin(-1), grouped.amax(-1), grouped.abs().amax(-1)
    found = Quantized(format, torch.empty(0), size)
    if format.grid == "int":
        if format.zero == "int":  # zero itself stays representable
            low, high = low.clamp(max=0), high.clamp(min=0)
        span = (high - low) / ((1 << format.bits) - 1) if format.zero else size / (format.center - 1)
    else:
        span = size / MINIFLOATS[format.grid].largest
    if format.scale == "e8m0":
        # The OCP rule: the exponent of the largest weight less the grid's largest exponent. What then exceeds the
        # largest value saturates: up to a quarter of it for e2m1 (8 − ε becomes 6).
        largest = math.frexp(MINIFLOATS[format.grid].largest)[1]
        found.scale = (torch.frexp(size).exponent - largest + 127).clamp(0, 254).to(torch.uint8)
    elif format.scale == "e4m3":
        found.tensor_scale = max(span.max().item(), 1e-30) / MINIFLOATS["e4m3"].largest
        found.scale = encode_minifloat(span / found.tensor_scale, "e4m3").clamp(min=1)
    else:  # a group of zeros, or one too small for fp16, gets the smallest scale there is
        dtype, smallest = {"fp16": (torch.float16, 2.0**-24), "fp32": (torch.float32, 1e-30)}[format.scale]
        found.scale = span.clamp(min=smallest).to(dtype)
    if format.zero == "int":
        found.zero = (-low / found.scale.float()).round().clamp(0, (1 << format.bits) - 1).to(torch.uint8)
    elif format.zero == "min":
        found.zero = low.to(torch.float16)
    return found


def concatenate(parts: Sequence[Quantized]) -> Quantized:
    """Matrices of the same format on top of each other, [N1, K], [N2, K], … -> [N1 + N2 + …, K]."""
    zeros = [p.zero for p in parts if p.zero is not None]
    codes, scale = torch.cat([p.codes for p in parts]), torch.cat([p.scale for p in parts])
    return dataclasses.replace(parts[0], codes=codes, scale=scale, zero=torch.cat(zeros) if zeros else None)

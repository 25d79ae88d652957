"""05a · Number formats: what a code of 4 or 8 bits means, and how files store them. The lower half of lesson 05b.

A format is three choices: a grid of values (integers, or floats of few bits), how many weights share a scale, and how
that scale is stored. Everything here is exact: encoding is defined on every value, ties and saturation included, and
decoding a file's bytes yields the very numbers that its author meant. Which codes are *good* is lesson 05b's subject.

Read for this: Micikevicius et al. 2022 (FP8), OCP Microscaling Formats 1.0 (MX), NVIDIA's description of NVFP4, ggml's
block definitions (GGUF), and the checkpoint layouts of AutoGPTQ, AutoAWQ and compressed-tensors.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used
from common import tl, triton

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import llama

batching = common.lesson("04_continuous_batching")


# --- Grids: which values a code can stand for -----------------------------------------------------------------------


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


# --- Formats: grid × group × scale ----------------------------------------------------------------------------------


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


def encode(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, format: Format,
           nudge: torch.Tensor | float = 0.0) -> torch.Tensor:  # fmt: skip
    """Codes of w, uint8; scale and zero broadcast against it. Integers round half to even and saturate.

    int: q = clamp(round(w / s) + z, 0, 2^bits − 1);  min: round((w − min) / s).  `nudge` moves w / s before rounding.
    """
    if format.grid != "int":
        return encode_minifloat(w / scale, format.grid)
    if format.zero == "min":
        q = ((w - zero.float()) / scale + nudge).round()
    else:
        q = (w / scale + nudge).round() + (format.center if zero is None else zero.float())
    return q.clamp(0, (1 << format.bits) - 1).to(torch.uint8)


def decode(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, format: Format) -> torch.Tensor:
    """int: (q − z)·s;  min: q·s + min;  float: value(q)·s. fp32."""
    if format.grid != "int":
        return decode_minifloat(codes, format.grid) * scale
    if format.zero == "min":
        return codes.float() * scale + zero.float()
    return (codes.float() - (format.center if zero is None else zero.float())) * scale


def choose_scales(W: torch.Tensor, format: Format) -> Quantized:
    """Scales and zero points for W [N, K] from each group's extremes, rounded as they will be stored; no codes yet.

    Raises InputError if the group does not divide K or a weight is not finite.
    """
    N, K = W.shape
    if K % (format.group or K):
        raise common.InputError(f"format {format.name}: groups of {format.group} do not divide {K} inputs")
    if not W.isfinite().all():
        raise common.InputError(f"format {format.name}: a weight is not finite")
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
    zero = None if parts[0].zero is None else torch.cat([p.zero for p in parts])
    return dataclasses.replace(parts[0], codes=torch.cat([p.codes for p in parts]),
                               scale=torch.cat([p.scale for p in parts]), zero=zero)  # fmt: skip


# --- GGUF: the file that this model came in -------------------------------------------------------------------------
#
# Blocks of 32 (or 256) weights, each with its own scales. A byte's planes are not neighbours: byte j of a Q4_1 block
# holds weight j in its low half and weight j + 16 in its high half: one mask and one shift yield two runs of 16.

GGUF_BLOCKS = {"Q4_1": (32, 20), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144),
               "Q5_K": (256, 176), "Q6_K": (256, 210)}  # weights and bytes of a block  # fmt: skip


def planes(data: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """uint8 [blocks, n] -> int32 [blocks, n · 8 / bits]: of every `run` bytes first the lowest bits, then the next."""
    shift = torch.arange(0, 8, bits, dtype=torch.int32, device=data.device)[:, None]
    return (data.int().unflatten(1, (-1, 1, run)) >> shift & ((1 << bits) - 1)).flatten(1)


def decode_gguf(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Weights of GGUF blocks, uint8 [blocks, bytes] -> fp32 [blocks, 32 or 256]. Source: ggml's block definitions.

    The K types scale twice: a block of 256 has an fp16 scale, and 16 (or 8) small integers multiply it.
    """
    half = lambda x: x.contiguous().view(torch.float16).float()  # noqa: E731
    fields = lambda *sizes: blocks.split(sizes, 1)  # noqa: E731
    if kind == "Q4_1":
        d, m, qs = fields(2, 2, 16)
        return half(d) * planes(qs, 4, 16) + half(m)
    if kind == "Q8_0":
        d, qs = fields(2, 32)
        return half(d) * qs.contiguous().view(torch.int8)
    if kind == "Q6_K":
        low, high, scales, d = fields(128, 64, 16, 2)
        q = planes(low, 4, 64) + (planes(high, 2, 32) << 4) - 32
        return (half(d) * scales.contiguous().view(torch.int8)).repeat_interleave(16, 1) * q
    if kind == "Q3_K":
        mask, qs, scales, d = fields(32, 64, 12, 2)
        scales = planes(scales[:, :8], 4, 8) + (planes(scales[:, 8:], 2, 4) << 4) - 32
        q = planes(qs, 2, 32) + (planes(mask, 1, 32) << 2) - 4
        return (half(d) * scales).repeat_interleave(16, 1) * q
    if kind == "Q2_K":
        scales, qs, d, dmin = fields(16, 64, 2, 2)
        s, m, q = scales.int() & 15, scales.int() >> 4, planes(qs, 2, 32)
    else:  # Q4_K and Q5_K: eight scales and eight minima of 6 bits in 12 bytes
        d, dmin, scales, high, qs = fields(2, 2, 12, *((0, 128) if kind == "Q4_K" else (32, 128)))
        a, b, c = scales.int().split(4, 1)
        s, m = torch.cat((a & 63, c & 15 | a >> 2 & 48), 1), torch.cat((b & 63, c >> 4 | b >> 2 & 48), 1)
        q = planes(qs, 4, 32) + (planes(high, 1, 32) << 4 if kind == "Q5_K" else 0)
    run = 256 // s.shape[1]
    return (half(d) * s).repeat_interleave(run, 1) * q - (half(dmin) * m).repeat_interleave(run, 1)


def gguf_to_quantized(kind: str, data: torch.Tensor) -> Quantized:
    """Codes and scales of a Q4_1 or Q8_0 matrix as they stand in the file, uint8 [N, bytes of a row]. No rounding."""
    N, blocks = len(data), data.reshape(-1, GGUF_BLOCKS[kind][1])
    d, m, qs = blocks.split((2, 2, 16) if kind == "Q4_1" else (2, 0, 32), 1)
    half = lambda x: x.contiguous().view(torch.float16).view(N, -1)  # noqa: E731
    codes = planes(qs, 4, 16) if kind == "Q4_1" else qs.int() ^ 128
    return Quantized(FORMATS[kind.lower()], codes.to(torch.uint8).view(N, -1), half(d), half(m) if m.numel() else None)


def read_gguf(path: Path, config: llama.LlamaConfig, prefix: str = "") -> dict[str, Quantized]:
    """Q4_1 and Q8_0 matrices of a GGUF file, those whose name there starts with `prefix`, under Transformers' names.

    Rows of q and k are put into Transformers' order (see `llama.convert_gguf`). Nothing becomes a float on the way.
    """
    found = {}
    for tensor in llama.gguf_reader(path).tensors:
        if (kind := tensor.tensor_type.name) in ("Q4_1", "Q8_0") and tensor.name.startswith(prefix):
            data = torch.from_numpy(tensor.data.copy())
            if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
                data = data.view(-1, config.head_dim // 2, 2, data.shape[1]).transpose(1, 2).reshape(data.shape)
            found[llama._hugging_face_name(tensor.name)] = gguf_to_quantized(kind, data)
    return found


# --- Checkpoints that others quantized ------------------------------------------------------------------------------
#
# Three published layouts of the same codes. Eight 4-bit codes share an int32; what differs is along which dimension, in
# which order, and what is stored in place of the zero point:
#
#     GPTQ                qweight [K/8, N]   along inputs, in order        qzeros [G, N/8]  z − 1
#     AWQ                 qweight [K, N/8]   along outputs, 0 2 4 6 1 3 5 7 qzeros [G, N/8]  z, in the same order
#     compressed-tensors  weight_packed [N, K/8]  along inputs, in order   weight_zero_point [N/8, G], or none: z = 8
#
# Eight bits need no packing, so these matrices go by the name of what they stand for, with a scale beside them:
#
#     fp8                 weight e4m3 [N, K]          weight_scale_inv [⌈N/128⌉, K/128] (DeepSeek-V3's square blocks)
#     compressed-tensors  weight e4m3 or int8 [N, K]  weight_scale [N, 1], or one number

LAYOUTS = ("gptq", "awq", "compressed-tensors", "fp8")

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs stands at the lowest 4 bits, the next, …


def unpack_int32(packed: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., 8 n]; the code at bits [4 i, 4 i + 4) is number order[i] of its eight."""
    nibbles = packed[..., None] >> 4 * torch.arange(8, dtype=torch.int32) & 15  # [..., n, 8]
    return nibbles[..., torch.tensor(order).argsort()].flatten(-2).to(torch.uint8)


def packed_modules(name: str) -> list[str]:
    """Transformers' names of the parts of a packed layer: layers.0.qkv_proj -> layers.0.self_attn.q_proj, …"""
    prefix, _, last = name.rpartition(".")
    parts = {"qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o_proj": ("self_attn.o_proj",),
             "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"), "down_proj": ("mlp.down_proj",)}  # fmt: skip
    return [f"{prefix}.{part}" for part in parts.get(last, ())]


def checkpoint_tensors(folder: Path, get: Callable[[str], torch.Tensor | None]
                       ) -> tuple[Callable[[str], torch.Tensor | None], dict[str, Quantized]]:  # fmt: skip
    """(a lookup of float weights by name, the codes that it has met so far, by the prefix of their names).

    `get` looks up what a folder in one of LAYOUTS stores. Raises InputError for others.
    """
    quantization = llama._read_json(folder / "config.json").get("quantization_config") or {}
    layout, codes = quantization.get("quant_method"), {}
    if layout not in LAYOUTS:
        raise common.InputError(f"{folder}: quant_method {layout!r}; allowed: {', '.join(LAYOUTS)}")
    if layout in ("gptq", "awq") and quantization.get("bits", 4) != 4:
        raise common.InputError(f"{folder}: bits {quantization['bits']!r}; allowed: 4")
    if layout == "gptq" and (version := quantization.get("checkpoint_format") or "gptq") != "gptq":
        raise common.InputError(f"{folder}: checkpoint_format {version!r}; allowed: 'gptq' (version 2 stores z itself)")
    block = quantization.get("weight_block_size")
    whole = type(block) is list and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if block is not None and not whole:
        raise common.InputError(f"{folder}: weight_block_size {block!r}; allowed: two positive whole numbers")
    known = ("pack-quantized", "float-quantized", "int-quantized")
    if layout == "compressed-tensors" and quantization.get("format") not in known:
        raise common.InputError(f"{folder}: format {quantization.get('format')!r}; allowed: {', '.join(known)}")
    packed = layout in ("gptq", "awq") or quantization.get("format") == "pack-quantized"

    def lookup(name: str) -> torch.Tensor | None:
        plain = get(name)
        if not name.endswith("_proj.weight") or (plain is not None and plain.dtype.itemsize > 1):
            return plain  # a layer that was left as it is
        prefix = name.removesuffix(".weight")
        if plain is not None:
            codes[prefix] = read_eight_bits(plain, get, prefix, block)
        elif packed:
            codes[prefix] = read_layer(layout, get, prefix)
        return codes[prefix].dequantize() if prefix in codes else None

    return lookup, codes


def read_layer(layout: str, get: Callable[[str], torch.Tensor | None], prefix: str) -> Quantized:
    """A layer of a checkpoint, from its tensors. Raises InputError for tensors that are missing, not of 4 bits, or
    ordered by activation."""

    def need(name: str) -> torch.Tensor:
        if (tensor := get(f"{prefix}.{name}")) is None:
            raise common.InputError(f"weights: tensor {prefix}.{name} is missing")
        return tensor

    zero: torch.Tensor | None = None
    if layout == "compressed-tensors":
        packed, scale, K = need("weight_packed"), need("weight_scale"), int(need("weight_shape")[1])
        if packed.shape[1] != -(-K // 8):
            raise common.InputError(f"weights: {prefix}.weight_packed has {packed.shape[1]} words for {K} inputs; "
                                    "allowed: 8 inputs in a word, of 4 bits each")  # fmt: skip
        codes = unpack_int32(packed)[:, :K]
        if (packed := get(f"{prefix}.weight_zero_point")) is not None:
            zero = unpack_int32(packed.T).T[: len(codes)]
    else:
        scale = need("scales").T
        if layout == "gptq":
            codes = unpack_int32(need("qweight").T)  # [N, K]
            zero = (unpack_int32(need("qzeros")) + 1 & 15).T
        else:
            codes, zero = unpack_int32(need("qweight"), AWQ_ORDER).T, unpack_int32(need("qzeros"), AWQ_ORDER).T
    group = codes.shape[1] // scale.shape[1]
    name = f"{prefix}.weight_g_idx" if layout == "compressed-tensors" else f"{prefix}.g_idx"
    order = get(name)
    if order is not None and not torch.equal(order.long(), torch.arange(len(order)) // group):
        raise common.InputError(f"weights: {name} regroups the inputs (desc_act); allowed: groups in order")
    f = Format(f"int4-g{group}", "int", 4, group, "fp16", None if zero is None else "int")
    return Quantized(f, codes.contiguous(), scale.half().contiguous(), None if zero is None else zero.contiguous())


def read_eight_bits(weight: torch.Tensor, get: Callable[[str], torch.Tensor | None], prefix: str,
                    block: Sequence[int] | None = None) -> Quantized:  # fmt: skip
    """A layer whose matrix [N, K] is there in 8 bits, and its scales: one for each `block` of outputs and inputs, for
    each output, or for all. Activations stay floats here, also where the file says how vLLM is to round them.

    Raises InputError for other types and scales.
    """
    grid = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}.get(weight.dtype)
    scale = get(f"{prefix}.weight_scale_inv" if block else f"{prefix}.weight_scale")
    if grid is None or scale is None or get(f"{prefix}.weight_zero_point") is not None:
        raise common.InputError(f"weights: {prefix}.weight is {str(weight.dtype).removeprefix('torch.')}; allowed: "
                                "float8_e4m3fn or int8 around zero, and its scale beside it")  # fmt: skip
    (N, K), codes, f = weight.shape, weight.view(torch.uint8), FORMATS[grid]
    rows, columns = block or (1, K)
    if not block and scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(N, 1)
    if scale.shape != (-(-N // rows), K // columns) or K % columns:
        raise common.InputError(f"weights: {prefix} is {N} x {K}, its scales are {list(scale.shape)}; allowed: one for "
                                f"{rows} outputs and {columns} inputs")  # fmt: skip
    if block:
        f = dataclasses.replace(f, name=f"{grid}-g{columns}", group=columns)
    scale = scale.float().repeat_interleave(rows, 0)[:N].contiguous()
    return Quantized(f, (codes ^ 128 if grid == "int8" else codes).contiguous(), scale)


# --- In a kernel ------------------------------------------------------------------------------------------------------


@dataclass
class PackedWeight:
    """A `Quantized` matrix as the kernel reads it: codes uint8 [N, K · bits / 8], scales and zeros [groups, N].

    On a GPU that runs part 05b0's kernel, `words` are scales and zeros once more, in its order (`scale_words`).
    """

    format: Format
    K: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    unpacked: Callable | None = None  # what a CPU multiplies with: `on_cpu`
    words: torch.Tensor | None = None

    @classmethod
    def pack(cls, quantized: Quantized) -> PackedWeight:
        """Raises InputError for what the kernel does not decode: other widths, groups below 32, NVFP4's scales."""
        format, (N, K) = quantized.format, quantized.codes.shape
        group = format.group or K
        tiled = group % 32 == 0 if format.bits == 4 or format.group else True
        if format.bits not in (4, 8) or format.scale == "e4m3" or not tiled:
            raise common.InputError(f"format {format.name} with {K} inputs: the kernel takes 4 or 8 bits and groups "
                                    "that are multiples of 32")  # fmt: skip
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
        return {"GROUP": f.group or self.K, "BITS": f.bits, "MANTISSA": float_.mantissa_bits if float_ else -1,
                "BIAS": float_.bias if float_ else 0, "ZERO": f.zero or "none",
                "EXPONENT_SCALE": f.scale == "e8m0"}  # fmt: skip


def on_cpu(weight: PackedWeight, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a CPU multiplies with, x [M, K] -> [M, N]: weights decoded once, which saves disk, neither time nor memory.

    Except that torch has a product for integer codes of 4 bits in bf16. It decodes them anew for every row, so it is
    for few rows, where a step does nothing but read weights.
    """
    W = weight.dequantize().to(dtype)
    many = llama.Linear(W)
    if batching.packs(W.device, dtype):
        many = batching.PackedLinear(W, None)
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


FEW_ROWS = 4  # from 8 on, weights that are decoded and packed are faster


def scale_words(quantized: Quantized) -> torch.Tensor | None:
    """Scale and zero point of each output and 128 inputs, as part 05b0's kernel reads them: int32 [K/256 · ⌈N/16⌉, 32].

    The low half of a word is the fp16 scale, the high half 128 + z in bf16, exactly. A row has 16 outputs and two
    groups: of output r = 0 … 15 first r mod 4 counts, then r // 4 mod 2, then r // 8, last the group. (A larger group's
    word is there several times.) None for formats that it does not take.
    """
    f, (N, K) = quantized.format, quantized.codes.shape
    group = f.group or K
    if (f.grid, f.bits, f.scale) != ("int", 4, "fp16") or f.zero == "min" or group % 128 or K % 256:
        return None
    zero = torch.full_like(quantized.scale, f.center) if quantized.zero is None else quantized.zero
    high, low = ((t.view(torch.int16).int()) for t in ((128 + zero.float()).bfloat16(), quantized.scale.contiguous()))
    words = F.pad(high << 16 | low & 0xFFFF, (0, 0, 0, -N % 16)).repeat_interleave(group // 128, 1)  # [N, K/128]
    words = words.view(-1, 2, 2, 4, K // 256, 2)  # 16 outputs, r // 8, r // 4 mod 2, r mod 4, tile, group
    return words.permute(4, 0, 3, 2, 1, 5).reshape(-1, 32).contiguous()


def on_hopper(x: torch.Tensor) -> bool:
    """Is `x` on an H100 or H200, whose shared memory and tensor cores take larger tiles?"""
    return x.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(x.device) == (9, 0)


# Floats without float types. Shift a minifloat's bits to where fp16 has its exponent: the value comes out 2^(15 − bias)
# times too small, subnormals included, and the scale takes that factor. So e4m3 also runs where no such type exists.


@triton.jit
def decode_tile(q, MANTISSA: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Codes -> values of the grid, fp32, without scale; integers without zero point are counted from their middle."""
    if MANTISSA >= 0:
        sign = (q >> (BITS - 1)).to(tl.uint16) << 15
        bits = sign | ((q & ((1 << (BITS - 1)) - 1)).to(tl.uint16) << (10 - MANTISSA))
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    return q.to(tl.float32) - (0 if ZERO != "none" else 1 << (BITS - 1))


@triton.jit
def e4m3_as_fp16(q):
    """Exponent and mantissa moved to fp16's places: the value / 2^8."""
    bits = ((q & 0x80).to(tl.uint16) << 8) | ((q & 0x7F).to(tl.uint16) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def round_to_int(x):
    """Nearest integer, ties to even, for |x| < 2^22: adding 1.5 · 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_to_e4m3(x):
    """e4m3 codes of fp32 values within ±448, ties to even, by integer arithmetic: the same on every machine."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal: keep 3 of 23 mantissa bits; adding ½ − 1 ulp and the lowest kept bit rounds half to even. The carry may
    # run into the exponent, as it should. Then move the exponent's bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = round_to_int(size.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)  # subnormal: multiples of 2^−9
    code = tl.where(size < 0x3C800000, small, normal)  # below 2^−6
    return code | (bits >> 24 & 0x80)


@triton.jit
def decode_four_bits(q, z, HALF: tl.constexpr, BF16: tl.constexpr):
    """q − z of the low (HALF 0) or high halves of bytes, in x's 16-bit type: four codes in five NVIDIA instructions.

    A code that takes the place of the last bits of a mantissa makes 128 + code in bf16, 1024 + code in fp16, exactly.
    Converted one by one, codes would cost more time than their bytes (Frantar et al. 2024, Marlin).
    """
    ones: tl.constexpr = 128.0 if BF16 else 1024.0  # 0x4300, 0x6400
    high: tl.constexpr = "0x43434343" if BF16 else "0x64646464"
    w = tl.inline_asm_elementwise(
        "{ .reg .b32 t; shr.b32 t, $2, " + ("4" if HALF else "0") + "; and.b32 t, t, 0x0F0F0F0F; "
        "prmt.b32 $0, t, " + high + ", 0x4140; prmt.b32 $1, t, " + high + ", 0x4342; }",
        "=r,=r,r", [q], tl.bfloat16 if BF16 else tl.float16, True, 4,
    )  # fmt: skip
    return w - (ones + z).to(w.dtype)


@triton.jit
def load_scales(scale, zero, place, known, ZERO: tl.constexpr):
    s = tl.load(scale + place, mask=known, other=0)
    return s, tl.load(zero + place, mask=known, other=0) if ZERO != "none" else s


@triton.jit
def widen_scales(s, MANTISSA: tl.constexpr, BIAS: tl.constexpr, EXPONENT_SCALE: tl.constexpr):
    """Scales as numbers, fp32, with the power of two that `decode_tile` leaves out."""
    s = tl.exp2(s.to(tl.float32) - 127) if EXPONENT_SCALE else s.to(tl.float32)
    if MANTISSA >= 0:
        s = s * (1 << (15 - BIAS))
    return s


@triton.jit
def decode_groups(q, s, z, MANTISSA: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, SCALED: tl.constexpr):
    """Codes [rows, n] -> weights, fp32; s and z [rows, groups]. Without SCALED the scale is left to the caller."""
    w = tl.reshape(decode_tile(q, MANTISSA, BITS, ZERO), (q.shape[0], z.shape[1], q.shape[1] // z.shape[1]))
    if ZERO == "int":
        w = w - z[:, :, None]
    if SCALED:
        w = w * s[:, :, None]
    if ZERO == "min":
        w = w + z[:, :, None]
    return tl.reshape(w, q.shape)

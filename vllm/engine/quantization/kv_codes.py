"""Codes of a KV cache: what is stored of a key, and where in a page.

Owns the formats, the rotation that may come first, the order of codes in bytes and of bytes in a page, all in torch;
called by `kv_write`, `kv_decode` and `kv_cache`, and by whoever counts a block's bytes. It never writes to a cache.
vLLM: `vllm/config/cache.py:CacheDType`, `vllm/model_executor/layers/quantization/turboquant/`.
"""

from __future__ import annotations

from common import InputError

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.model import llama

if TYPE_CHECKING:
    from engine.kv_cache_interface import KVCacheGroup

# --- The formats -----------------------------------------------------------------------------------------------------


@functools.cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2^bits levels with the least mean squared error for a standard normal variable (Lloyd 1957, Max 1960).

    Borders lie halfway between levels; a level is the mean of what falls between its borders. Repeat until it stays.
    """

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def below(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    n = 1 << bits
    levels = [4 * (i + 0.5) / n - 2 for i in range(n)]
    for _ in range(1000):
        borders = [-40.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), 40.0]
        levels = [(density(a) - density(b)) / (below(b) - below(a)) for a, b in itertools.pairwise(borders)]
    return tuple((levels[i] - levels[n - 1 - i]) / 2 for i in range(n))  # symmetric to the last bit


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """How a vector of D elements is stored: D codes, then x̂ = scale · level(code) + mid.

    | grid    | level(code)                       | scale, mid                                                       |
    | e4m3    | the E4M3 value of the byte        | per vector: max |x| / 448 (fp32); or one per head and layer      |
    | e5m2    | the E5M2 value of the byte        | one per head and layer                                           |
    | int8    | −127 … 127                        | max |x| / 127 (fp32)                                             |
    | uniform | code − (2^bits − 1) / 2           | (max − min) / (2^bits − 1), (max + min) / 2 (both fp16)          |
    | lloyd   | Lloyd-Max level of N(0, 1)        | what gives x̂ the length of x (fp32)                              |
    """

    bits: int
    grid: str
    rotate: bool = False  # store x R instead of x, for keys and values
    per_token: bool = True  # False: scales of a whole head, set from outside (1 by default, as in vLLM)
    key_channels: bool = False  # keys: scale and mid per channel and block of tokens, not per vector


FORMATS = {
    "fp8": KVFormat(8, "e4m3", per_token=False),
    "fp8_e4m3": KVFormat(8, "e4m3", per_token=False),  # vLLM's longer name for it
    "fp8_e5m2": KVFormat(8, "e5m2", per_token=False),  # a bit more of exponent, one less of mantissa
    "fp8_per_token_head": KVFormat(8, "e4m3"),
    "int8_per_token_head": KVFormat(8, "int8"),
    **{f"int{b}_per_token_head": KVFormat(b, "uniform", rotate=True) for b in (4, 3, 2)},
    **{f"turboquant_{b}bit": KVFormat(b, "lloyd", rotate=True) for b in (4, 3, 2)},  # in its style: see the page
    **{f"int{b}_plain": KVFormat(b, "uniform") for b in (4, 3, 2)},
    "kivi_2bit": KVFormat(2, "uniform", key_channels=True),
}
FLOATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}  # type, largest finite value
KV_CACHE_DTYPES: tuple[str, ...] = ("auto", *FORMATS)  # what --kv-cache-dtype accepts


def find_format(kv_cache_dtype: str) -> KVFormat:
    """Raises InputError that names the allowed values."""
    if kv_cache_dtype not in FORMATS:
        raise InputError(f"kv_cache_dtype {kv_cache_dtype!r}: allowed: {', '.join(KV_CACHE_DTYPES)}")
    return FORMATS[kv_cache_dtype]


# --- Rotation --------------------------------------------------------------------------------------------------------


@functools.cache
def rotation(D: int) -> torch.Tensor:
    """An orthogonal matrix R [D, D] with entries ±1/√n: x @ R makes of every channel a mixture of n others.

    Sylvester's Hadamard matrix, H_2n = [[H, H], [H, −H]], over the largest power of two n that divides D, with random
    signs in front. Without the signs a vector that is the same in every channel would become one single outlier.
    """
    n = D & -D
    H = torch.ones(1, 1)
    while len(H) < n:
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
    signs = torch.randint(0, 2, (D, 1), generator=torch.Generator().manual_seed(5)) * 2.0 - 1
    return signs * torch.block_diag(*[H / math.sqrt(n)] * (D // n))


# --- Codes in torch: what the kernels must reproduce bit by bit, and the path of a CPU -------------------------------
#
# Codes of fewer than 8 bits share bytes by planes: byte i of a 4-bit vector holds the codes of channels i and i + D/2,
# so that a kernel which wants channels 0, 1, 2, … reads bytes 0, 1, 2, … 3 bits are a plane of 2 and a plane of 1.

PLANES = {8: ((8, 0),), 4: ((4, 0),), 3: ((2, 0), (1, 2)), 2: ((2, 0),)}  # (bits in this plane, bits below them)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., D] of codes < 2^bits -> uint8 [..., D·bits/8]. D must be a multiple of 8."""
    planes = []
    for width, below in PLANES[bits]:
        fields = codes.unflatten(-1, (8 // width, -1))  # [..., fields of a byte, bytes]
        part = (fields >> below) & (2**width - 1)
        plane = part[..., 0, :]
        for i in range(1, 8 // width):
            plane = plane + (part[..., i, :] << width * i)
        planes.append(plane)
    return torch.cat(planes, -1)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`."""
    codes, first = None, 0
    for width, below in PLANES[bits]:
        n = packed.shape[-1] * width // bits
        plane = packed[..., first : first + n]
        first += n
        if width < 8:
            plane = torch.cat([(plane >> width * i) & (2**width - 1) for i in range(8 // width)], -1)
        codes = plane if codes is None else codes | (plane << below)
    assert codes is not None, "there is at least one plane"
    return codes


@functools.cache
def codebook(bits: int, device: torch.device) -> torch.Tensor:
    """fp32: the 2^bits levels of the Lloyd-Max grid, then the 2^bits − 1 borders between them."""
    levels = torch.tensor(lloyd_max(bits))
    return torch.cat((levels, (levels[1:] + levels[:-1]) / 2)).to(device)


Codes = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scale, mid


def quantize(x: torch.Tensor, fmt: KVFormat, head_scale: torch.Tensor | None = None) -> Codes:
    """Codes uint8 [..., D], scale and mid fp32 [..., 1] of each vector x [..., D] (already rotated, if it must be).

    All arithmetic is fp32, every division and rounding the nearest, ties to even. `head_scale` is broadcast to x and
    replaces the scale per vector where the format has none. NaN stays NaN in e4m3 and e5m2 alone.
    """
    x = x.float()
    top = 2**fmt.bits - 1
    if fmt.grid == "uniform":
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = ((high - low).clamp(min=1e-5) / top).half().float()  # as it will be stored, so that codes fit it
        mid = ((low + high) * 0.5).half().float()
        codes = ((x - mid) / scale + top / 2).clamp(0, top).round()
        return codes.to(torch.uint8), scale, mid
    if fmt.grid == "lloyd":
        size = x.square().sum(-1, keepdim=True)
        table = codebook(fmt.bits, x.device)
        rms = (size / x.shape[-1]).sqrt().clamp(min=1e-20)
        codes = torch.bucketize(x / rms, table[top + 1 :])
        scale = (size / table[codes].square().sum(-1, keepdim=True)).sqrt()
        return codes.to(torch.uint8), scale, None
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    if fmt.grid == "int8":
        scale = largest / 127
        return (x / scale).clamp(-127, 127).round().to(torch.int8).view(torch.uint8), scale, None
    dtype, most = FLOATS[fmt.grid]
    scale = largest / most if fmt.per_token or head_scale is None else head_scale
    return (x / scale).clamp(-most, most).to(dtype).view(torch.uint8), scale, None


def levels_of(codes: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """What each code stands for before scaling, in fp32. Shape as given."""
    if fmt.grid == "e5m2":  # the upper half of an fp16 number
        return codes.to(torch.int16).bitwise_left_shift_(8).view(torch.float16).float()
    if fmt.grid == "e4m3" and (codes.is_cuda or (codes & 127).max() == 127):
        return codes.view(torch.float8_e4m3fn).float()
    if fmt.grid == "e4m3":  # without NaN, the bits of an fp16 number, as in decode_e4m3; on a CPU much faster
        half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        return half.view(torch.float16).float().mul_(256)
    if fmt.grid == "int8":
        return codes.view(torch.int8).float()
    if fmt.grid == "lloyd":
        return codebook(fmt.bits, codes.device).index_select(0, codes.flatten().int()).view(codes.shape)
    return codes.float().sub_((2**fmt.bits - 1) / 2)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, mid: torch.Tensor | None, fmt: KVFormat) -> torch.Tensor:
    """x̂ = scale · level(code) + mid, fp32 [..., D]; scale and mid broadcast."""
    x = levels_of(codes, fmt).mul_(scale)
    return x if mid is None else x.add_(mid)


# --- A page: codes, then scales --------------------------------------------------------------------------------------


Stored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # codes; scale and mid, if the page has them


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """A page is one block's keys, or its values, in one layer: the codes of all its vectors, then what scales them.

    With scales per channel, keys take more than values; a page of values is padded to the same size.
    """

    fmt: KVFormat
    block_size: int
    Hkv: int
    D: int

    @property
    def codes(self) -> int:
        """Bytes of all codes; the scales begin here."""
        return self.block_size * self.Hkv * self.D * self.fmt.bits // 8

    @property
    def page(self) -> int:
        """Bytes of a page. What scales a vector or a channel is a fp32 number or two of fp16: 4 bytes either way."""
        scaled = self.Hkv * max(self.block_size, self.D if self.fmt.key_channels else 0)
        return self.codes + 4 * scaled * self.fmt.per_token

    def split(self, pages: torch.Tensor, channels: bool = False) -> Stored:
        """Codes uint8 [N, block_size, Hkv, D], scale and mid [N, block_size, Hkv, 1] of pages uint8 [N, page].

        With `channels`, scale and mid are [N, 1, Hkv, D]. They are None where the format stores none.
        """
        N = len(pages)
        codes = unpack(pages[:, : self.codes].view(N, self.block_size, self.Hkv, -1), self.fmt.bits)
        if not self.fmt.per_token:
            return codes, None, None
        shape = (1, self.Hkv, self.D) if channels else (self.block_size, self.Hkv, 1)
        numbers = pages[:, self.codes : self.codes + 4 * math.prod(shape)].contiguous()
        if self.fmt.grid == "uniform":
            scale, mid = numbers.view(torch.float16).view(N, *shape, 2).float().unbind(-1)
            return codes, scale, mid
        return codes, numbers.view(torch.float32).view(N, *shape), None


def as_bytes(scale: torch.Tensor, mid: torch.Tensor | None) -> torch.Tensor:
    """What is stored behind the codes: fp16 (scale, mid) pairs or fp32 scales, as uint8 [N, 4 · numbers per row]."""
    numbers = scale if mid is None else torch.stack((scale, mid), -1).half()
    return numbers.flatten(1).contiguous().view(torch.uint8)


def bits_per_element(kv_cache_dtype: str, D: int, block_size: int) -> float:
    """Bits in the cache per element of K and V, with all that scales them; "auto" counts as 16. Raises InputError."""
    if kv_cache_dtype == "auto":
        return 16.0
    return 8 * PageLayout(find_format(kv_cache_dtype), block_size, 1, D).page / (block_size * D)


def block_bytes(model: llama.Llama, block_size: int, kv_cache_dtype: str, groups: Sequence[KVCacheGroup] = ()) -> int:
    """Bytes of one block: keys and values of all layers, or of a group's, with all that scales them. Raises
    InputError."""
    layers = max((len(group.layers) for group in groups), default=model.config.num_hidden_layers)
    halves = 1 if model.config.mla else 2  # a latent is key and value in one
    elements = halves * layers * block_size * model.num_kv_heads * model.config.head_dim
    if kv_cache_dtype == "auto":
        return elements * model.dtype.itemsize
    return round(elements * bits_per_element(kv_cache_dtype, model.config.head_dim, block_size)) // 8

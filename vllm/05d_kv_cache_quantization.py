"""05d · A quantized KV cache: more tokens in the same memory, and where few bits break.

The question: keys and values are the memory that limits a server. How few bits may each of them have?

The mechanism:
  1. A cached vector is one token's key, or value, of one KV head: D numbers. Store D codes and what scales them.
  2. FP8 (E4M3) needs no scale of its own: four exponent bits span 448 down to 1/512. INT8 needs one per vector.
  3. Below 8 bits a vector has 16, 8 or 4 levels between its smallest and largest element. Keys have channels that
     are ten times the others: they set the range, and all others round to the same two levels.
  4. So rotate first. A Hadamard matrix spreads each channel over all; q·k = (Hq)·(Hk), so scores stay the same.
  5. Or let each channel have its own scale, shared by the tokens of a block (KIVI): then the outlier is alone.
  6. A page holds its codes and, behind them, their scales: block tables, slot mapping, pool and copies stay as they
     were in lesson 02. One kernel quantizes on write, one attends and decodes codes in registers as it loads them.

Numbers to remember: FP8 is 2x the tokens of bf16 for a loss one can hardly measure; 4 bits with a scale per vector
are 3.8x at D = 128 (3.6x at D = 64). FP8 attention on an H200 is 1.3 to 1.4x faster (FlashAttention-3; ours 1.1x).

How to run:
  uv run python vllm/05d_kv_cache_quantization.py                                the whole story
  uv run python vllm/05d_kv_cache_quantization.py --kv-cache-dtype int2_plain    break it: 2 bits, no rotation
  uv run python vllm/05d_kv_cache_quantization.py --bench                        minutes: the whole table anew

Read for this: Liu et al. 2024 (KIVI), Hooper et al. 2024 (KVQuant), Ashkboos et al. 2024 (QuaRot), Zandieh et al. 2025
(TurboQuant), vLLM 0.32 `config/cache.py:CacheDType`, `v1/attention/ops/triton_reshape_and_cache_flash.py`,
`v1/attention/ops/int4_per_token_head.py`, `model_executor/layers/quantization/turboquant/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import copy
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import tl, triton

import llama

if common.HAS_TRITON:
    from triton.language.target_info import cuda_capability_geq

kv_cache_lesson = common.lesson("01_kv_cache")
paged = common.lesson("02_paged_attention")
continuous_batching = common.lesson("04_continuous_batching")
from engine.quantization import kv_codes  # the formats, in torch, and the naive reference

AttentionMetadata, PagedKVCache = paged.AttentionMetadata, paged.PagedKVCache
ModelEngineCore, ModelRunner = continuous_batching.ModelEngineCore, continuous_batching.ModelRunner
FORMATS, KV_CACHE_DTYPES, PLANES = kv_codes.FORMATS, kv_codes.KV_CACHE_DTYPES, kv_codes.PLANES
KVFormat, PageLayout, find_format = kv_codes.KVFormat, kv_codes.PageLayout, kv_codes.find_format
e4m3_value, e4m3_nearest, lloyd_max, codebook = (
    kv_codes.e4m3_value, kv_codes.e4m3_nearest, kv_codes.lloyd_max, kv_codes.codebook)  # fmt: skip
quantize, dequantize, pack, unpack = kv_codes.quantize, kv_codes.dequantize, kv_codes.pack, kv_codes.unpack
rotation, dequantize_reference, block_bytes = kv_codes.rotation, kv_codes.dequantize_reference, kv_codes.block_bytes
as_bytes, bits_per_element, capacity = kv_codes.as_bytes, kv_codes.bits_per_element, kv_codes.capacity
CHANNELS, TOKENS, PRESETS, WIDGET_DEFAULT = (
    kv_codes.CHANNELS, kv_codes.TOKENS, kv_codes.PRESETS, kv_codes.WIDGET_DEFAULT)  # fmt: skip
simulate, describe = kv_codes.simulate, kv_codes.describe  # the widget

KEY = "05d_kv_cache_quantization"


# --- In Triton: E4M3 in integer arithmetic, and the grids ------------------------------------------------------------
#
# On the bits, since neither the interpreter nor an NVIDIA GPU below 8.9 converts E4M3: this is exact everywhere.
# Encoding: an fp32 number keeps 3 of its 23 mantissa bits. Add half of what falls away, less one bit unless the last
# kept bit is odd: a carry runs into the exponent as it should. Subtract 120 from the exponent: its bias is 127, not 7.
# Below 2^−6 the values are multiples of 2^−9, and adding 2^14 leaves a sum whose last bit is worth exactly that.
# Decoding: E4M3's exponent and mantissa are those of an fp16 number with a bias of 7 instead of 15: shift, times 2^8.


@triton.jit
def encode_e4m3(x):
    a = tl.minimum(tl.abs(x), 448.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 960 = 120 · 8
    small = (a + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, tl.where(a < 0.015625, small, normal) | sign, 0x7F)


@triton.jit
def decode_e4m3(byte, NATIVE: tl.constexpr):
    if NATIVE and cuda_capability_geq(8, 9):
        x = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        code = byte.to(tl.int8, bitcast=True).to(tl.int16)  # the sign is in the upper bits as well
        half = ((code << 7) & -0x4001).to(tl.float16, bitcast=True)
        x = tl.where(tl.abs(half) == 1.875, float("nan"), half * 256.0)  # 480 would be the largest: it is NaN
    return x


@triton.jit
def round_to_int(x):
    """fp32 |x| < 2^22, nearest, ties to even: 1.5 · 2^23 leaves no bit for a fraction."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def encode(x, scale, mid, table, GRID: tl.constexpr, BITS: tl.constexpr):
    """Codes (int32) of x, given what scales it."""
    if GRID == "e4m3":
        return encode_e4m3(tl.div_rn(x, scale))
    y = tl.div_rn(x - mid, scale)
    if GRID == "int8":
        return round_to_int(tl.clamp(y, -127.0, 127.0)) & 255
    if GRID == "uniform":
        return round_to_int(tl.clamp(y + (2**BITS - 1) / 2, 0.0, 2**BITS - 1.0))
    code = (y > tl.load(table + 2**BITS)).to(tl.int32)  # borders below y
    for i in tl.static_range(1, 2**BITS - 1):
        code += (y > tl.load(table + 2**BITS + i)).to(tl.int32)
    return code


# --- Kernel 1: quantize this step's keys and values into their slots -------------------------------------------------
#
# One program per token and KV head. A plane of a vector is read as a tile [fields of a byte, bytes]: field f of byte i
# is channel f · bytes + i, so that summing shifted codes over the fields gives the bytes.


@triton.jit
def load_plane(source, D: tl.constexpr, FIELDS: tl.constexpr, BYTES: tl.constexpr):
    f, i = tl.arange(0, FIELDS)[:, None], tl.arange(0, BYTES)[None, :]
    inside = i < D // FIELDS
    x = tl.load(source + f * (D // FIELDS) + i, mask=inside, other=0.0).to(tl.float32)
    return x, inside  # [FIELDS, BYTES], [1, BYTES]


@triton.jit
def store_plane(target, code, D: tl.constexpr, FIELDS: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr,
                BELOW: tl.constexpr):  # fmt: skip
    i = tl.arange(0, BYTES)
    fields = ((code >> BELOW) & (2**WIDTH - 1)) << (tl.arange(0, FIELDS) * WIDTH)[:, None]
    tl.store(target + i, tl.sum(fields, 0).to(tl.uint8), mask=i < D // FIELDS)


@common.kernel
def quantize_and_cache_kernel(k, v, cache, numbers, slot_mapping, head_scales, table, stride_k, stride_v, stride_half,
                              D: tl.constexpr, Hkv: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE: tl.constexpr,
                              GRID: tl.constexpr, BITS: tl.constexpr, PER_TOKEN: tl.constexpr, FIRST: tl.constexpr,
                              FIELDS: tl.constexpr, BYTES: tl.constexpr):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_mapping + token)  # int64: a cache may hold more than 2^31 bytes
    if slot >= 0:
        vector = slot % BLOCK_SIZE * Hkv + head
        for half in tl.static_range(FIRST, 2):  # 0: keys, 1: values
            if half == 0:
                source = k + token * stride_k + head * D
            else:
                source = v + token * stride_v + head * D
            page = half * stride_half + slot // BLOCK_SIZE * PAGE  # in bytes
            place = cache + page + vector * (D * BITS // 8)
            behind = page + BLOCK_SIZE * Hkv * (D * BITS // 8)  # where the scales begin
            x, inside = load_plane(source, D, FIELDS, BYTES)
            mid = 0.0
            if GRID == "uniform":
                low, high = tl.min(tl.where(inside, x, float("inf"))), tl.max(tl.where(inside, x, float("-inf")))
                scale = tl.div_rn(tl.maximum(high - low, 1e-5), 2**BITS - 1.0).to(tl.float16)
                mid = ((low + high) * 0.5).to(tl.float16)
                tl.store(numbers + behind // 2 + 2 * vector, scale)
                tl.store(numbers + behind // 2 + 2 * vector + 1, mid)
                scale, mid = scale.to(tl.float32), mid.to(tl.float32)
            elif GRID == "lloyd":
                size = tl.sum(x * x)
                scale = tl.maximum(tl.sqrt_rn(size / D), 1e-20)
                reached = tl.where(inside, tl.load(table + encode(x, scale, mid, table, GRID, BITS)), 0.0)
                tl.store(numbers + behind // 4 + vector, tl.sqrt_rn(tl.div_rn(size, tl.sum(reached * reached))))
            elif PER_TOKEN:
                largest = tl.maximum(tl.max(tl.abs(x)), 1e-30)
                scale = tl.div_rn(largest, 127.0 if GRID == "int8" else 448.0)
                tl.store(numbers + behind // 4 + vector, scale)
            else:
                scale = tl.load(head_scales + half * Hkv + head)
            if BITS == 3:  # two planes: the lower two bits of eight codes in two bytes, the upper bits in one
                store_plane(place, encode(x, scale, mid, table, GRID, BITS), D, FIELDS, BYTES, 2, 0)
                x, inside = load_plane(source, D, 8, BYTES // 2)
                store_plane(place + D // 4, encode(x, scale, mid, table, GRID, BITS), D, 8, BYTES // 2, 1, 2)
            else:
                store_plane(place, encode(x, scale, mid, table, GRID, BITS), D, FIELDS, BYTES, BITS, 0)


def quantize_and_cache(k: torch.Tensor, v: torch.Tensor, layer: torch.Tensor, slot_mapping: torch.Tensor,
                       layout: PageLayout, head_scales: torch.Tensor) -> None:  # fmt: skip
    """Quantize this step's keys and values and store them. Slot = block * block_size + offset; -1 is padding, skipped.

    Semantics: layer[0].codes[slot_mapping[t]], layer[0].scales[slot_mapping[t]] = quantize(k[t]), likewise layer[1] and
    v. With scales per channel only the values are written: keys wait for their block to be full.
    Shapes: k, v [T, Hkv, D] (token stride free), layer uint8 [2, num_blocks, page], slot_mapping int64 [T],
    head_scales fp32 [2, Hkv]. vLLM 0.32: v1/attention/ops/triton_reshape_and_cache_flash.py,
    v1/attention/ops/int4_per_token_head.py.
    """
    (T, Hkv, D), fmt = k.shape, layout.fmt
    first = int(fmt.key_channels)
    if common.runs_kernel(k):
        if T > 0:
            fields = 8 // PLANES[fmt.bits][0][0]
            quantize_and_cache_kernel[(T, Hkv)](
                k, v, layer, layer.view(torch.float16 if fmt.grid == "uniform" else torch.float32), slot_mapping,
                head_scales, codebook_of(fmt, head_scales), k.stride(0), v.stride(0), layer.stride(0),
                D=D, Hkv=Hkv, BLOCK_SIZE=layout.block_size, PAGE=layout.page, GRID=fmt.grid, BITS=fmt.bits,
                PER_TOKEN=fmt.per_token, FIRST=first, FIELDS=fields, BYTES=triton.next_power_of_2(D // fields),
                num_warps=1,
            )  # fmt: skip
        return
    if (slot_mapping < 0).any():
        keep = slot_mapping >= 0
        k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
    block, offset = slot_mapping // layout.block_size, slot_mapping % layout.block_size
    for half, x in list(enumerate((k, v)))[first:]:
        codes, scale, mid = quantize(x, fmt, head_scales[half, :, None])  # [T, Hkv, D], [T, Hkv, 1]
        pages = layer[half]
        pages[:, : layout.codes].unflatten(1, (layout.block_size, -1))[block, offset] = pack(codes, fmt.bits).flatten(1)
        if fmt.per_token:
            end = layout.codes + layout.block_size * Hkv * 4
            pages[:, layout.codes : end].unflatten(1, (layout.block_size, -1))[block, offset] = as_bytes(scale, mid)


def codebook_of(fmt: KVFormat, unused: torch.Tensor) -> torch.Tensor:
    """The Lloyd-Max table where the format has one; a kernel that never looks gets any tensor."""
    return codebook(fmt.bits, unused.device) if fmt.grid == "lloyd" else unused


# --- Kernel 2: quantize the keys of full blocks per channel -----------------------------------------------------------


@common.kernel
def quantize_channels_kernel(open_keys, rows, blocks, layer, numbers, D: tl.constexpr, Hkv: tl.constexpr,
                             BLOCK_SIZE: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
                             BYTES: tl.constexpr):  # fmt: skip
    n, head = tl.program_id(0), tl.program_id(1)
    row, page = tl.load(rows + n), tl.load(blocks + n) * PAGE  # int64
    t, i = tl.arange(0, TOKENS)[:, None], tl.arange(0, BYTES)
    FIELDS: tl.constexpr = 8 // BITS
    inside = (t < BLOCK_SIZE) & (i < D // FIELDS)[None, :]
    packed = tl.zeros([TOKENS, BYTES], tl.int32)
    for f in tl.static_range(FIELDS):
        d = f * (D // FIELDS) + i
        key = open_keys + ((row * BLOCK_SIZE + t) * Hkv + head) * D + d[None, :]
        x = tl.load(key, mask=inside, other=0.0).to(tl.float32)
        low = tl.min(tl.where(t < BLOCK_SIZE, x, float("inf")), 0)  # [BYTES]: of each channel, over the block's tokens
        high = tl.max(tl.where(t < BLOCK_SIZE, x, float("-inf")), 0)
        scale = tl.div_rn(tl.maximum(high - low, 1e-5), 2**BITS - 1.0).to(tl.float16)
        mid = ((low + high) * 0.5).to(tl.float16)
        place = (page + BLOCK_SIZE * Hkv * (D * BITS // 8)) // 2 + 2 * (head * D + d)
        tl.store(numbers + place, scale, mask=i < D // FIELDS)
        tl.store(numbers + place + 1, mid, mask=i < D // FIELDS)
        code = encode(x, scale.to(tl.float32)[None, :], mid.to(tl.float32)[None, :], numbers, "uniform", BITS)
        packed |= code << f * BITS
    place = layer + page + (t * Hkv + head) * (D * BITS // 8) + i[None, :]
    tl.store(place, packed.to(tl.uint8), mask=inside)


def quantize_channels(open_keys: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor, layer: torch.Tensor,
                      layout: PageLayout) -> None:  # fmt: skip
    """Quantize the keys of blocks that have become full, each channel over the tokens of its block, as KIVI does.

    Semantics: for every n and channel c, the codes, scale and mid of layer[0, blocks[n]] in c are quantize(open_keys[
    rows[n], :, c]). Shapes: open_keys [R, block_size, Hkv, D], rows and blocks int64 [N], layer uint8
    [2, num_blocks, page].
    """
    fmt, D, Hkv = layout.fmt, layout.D, layout.Hkv
    if len(rows) == 0:
        return
    if common.runs_kernel(open_keys):
        fields = 8 // fmt.bits
        quantize_channels_kernel[(len(rows), Hkv)](
            open_keys, rows, blocks, layer, layer.view(torch.float16), D=D, Hkv=Hkv, BLOCK_SIZE=layout.block_size,
            PAGE=layout.page, BITS=fmt.bits, TOKENS=triton.next_power_of_2(layout.block_size),
            BYTES=triton.next_power_of_2(D // fields), num_warps=4,
        )  # fmt: skip
        return
    x = open_keys[rows].permute(0, 2, 3, 1)  # [N, Hkv, D, block_size]
    codes, scale, mid = quantize(x, fmt)
    packed = pack(codes.permute(0, 3, 1, 2), fmt.bits).flatten(1)  # [N, block_size · Hkv · bytes]
    layer[0, blocks, : layout.codes] = packed
    layer[0, blocks, layout.codes : layout.codes + 4 * Hkv * D] = as_bytes(scale, mid)


# --- Kernel 3: decode attention that dequantizes at load --------------------------------------------------------------
#
# Lesson 02's decode kernel with other loads. What scales a vector need not touch its D elements: with k̂ = s·c + m,
#
#     q·k̂ = s (q·c) + m Σ_d q_d           Σ_j w_j v̂_j = Σ_j (w_j s_j) c_j + Σ_j w_j m_j
#
# so the tensor cores multiply the codes c themselves, and the scales cost one multiplication per key. (Only scales per
# channel have to be applied to the elements.) Here c counts from 0, and m is moved to fit: by s times OFFSET.
#
# What is done to every element decides the speed, and a conversion is too much. An integer in the low bits of a 16-bit
# float is that float already, a subnormal one: c · 2^−24 in fp16, c · 2^−133 in bf16. So codes are unpacked two at a
# time, each in its half of a 32-bit word, by a shift and a mask. The columns of a tile are then channels in another
# order; a product over channels does not mind if q has the same one, and the output is stored where it belongs.


@triton.jit
def channels(GRID: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr):
    """[D_PAD]: the channel that `load_levels` has in each column; D where it has none."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    c = tl.arange(0, D_PAD)
    word, field = c * WIDTH // 32, c % (32 // WIDTH)
    if GRID != "e4m3":  # one from the lower half of the word, one from the upper
        field = c % 2 * (16 // WIDTH) + field // 2
    byte, PLANE = word * 4 + field * WIDTH // 8, D * WIDTH // 8
    return tl.where(byte < PLANE, field % (8 // WIDTH) * PLANE + byte, D)


@triton.jit
def load_levels(base, live, table, GRID: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr,
                DTYPE: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """[TILE, D_PAD]: what the codes of the vectors at `base` stand for, before scaling. Integers count from 0, in units
    of DTYPE's smallest number (fp32: of fp16's). Of dead vectors come any, but no NaN."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS  # of the (lower) plane
    PLANE: tl.constexpr = D * WIDTH // 8
    i = tl.arange(0, D_PAD * WIDTH // 32)[None, :]
    if D * BITS % 32 == 0:
        word = tl.load(base.to(tl.pointer_type(tl.int32)) + i, mask=live & (i < PLANE // 4), other=0)
    else:  # vectors do not begin where words do; what lies behind their codes ends in columns without a channel
        word = tl.zeros((base.shape[0], D_PAD * WIDTH // 32), tl.int32)
        for n in tl.static_range(4):
            word |= tl.load(base + 4 * i + n).to(tl.int32) << 8 * n
    if GRID == "e4m3":
        word = tl.join(word, word >> 16)
        code = tl.join(word.to(tl.uint8), (word >> 8).to(tl.uint8)).reshape(base.shape[0], D_PAD)
        x = decode_e4m3(code, NATIVE)
    else:
        if GRID == "int8":
            word ^= -0x7F7F7F80  # 0x80808080: from 0 on, not from −128
        word = tl.join(word, word >> 8)
        if WIDTH < 8:
            word = tl.join(word, word >> 4)
        if WIDTH == 2:
            word = tl.join(word, word >> 2)
        word &= (2**WIDTH - 1) * 0x10001
        code = tl.join(word.to(tl.int16), (word >> 16).to(tl.int16)).reshape(base.shape[0], D_PAD)
        if BITS == 3:
            d = channels(GRID, D, D_PAD, BITS)[None, :]
            upper = tl.load(base + PLANE + d % (D // 8)).to(tl.int32)
            code |= (((upper >> (d // (D // 8))) & 1) << 2).to(tl.int16)
        if GRID == "lloyd":
            x = tl.load(table + code)
        else:
            x = code.to(tl.float16 if DTYPE == tl.float32 else DTYPE, bitcast=True)  # noqa: SIM300
    return x.to(DTYPE)


@common.kernel
def quantized_decode_kernel(q, cache, numbers, head_scales, table, open_keys, open_rows, block_table, seq_lens, out,
                            lse, scale, stride_q, stride_half, table_width: tl.int32, G: tl.constexpr, D: tl.constexpr,
                            Hkv: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE: tl.constexpr, GRID: tl.constexpr,
                            BITS: tl.constexpr, PER_TOKEN: tl.constexpr, KEY_CHANNELS: tl.constexpr,
                            ROWS: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
                            UPCAST: tl.constexpr):  # fmt: skip
    b, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    S = tl.load(seq_lens + b)
    length = tl.cdiv(tl.cdiv(S, TILE), SPLITS) * TILE
    start = split * length
    end = tl.minimum(start + length, S)
    NUMBER: tl.constexpr = 2 if GRID == "uniform" else 4  # bytes of a number behind the codes
    CODES: tl.constexpr = BLOCK_SIZE * Hkv * (D * BITS // 8) // NUMBER
    INTEGER: tl.constexpr = GRID == "int8" or GRID == "uniform"
    OFFSET: tl.constexpr = 128.0 if GRID == "int8" else (2**BITS - 1) / 2
    # Units of 2^−133 are too small for a sum in fp32: what they are multiplied by is 2^100 times itself.
    BF16: tl.constexpr = INTEGER and not UPCAST and q.dtype.element_ty == tl.bfloat16
    LIFT: tl.constexpr = 2.0**100 if BF16 else 1.0
    UNITS: tl.constexpr = 2.0**33 if BF16 else 2.0**24 if INTEGER else 1.0

    g, d, j = tl.arange(0, ROWS), channels(GRID, D, D_PAD, BITS), tl.arange(0, TILE)
    row, column, everywhere = (g < G)[:, None], (d < D)[None, :], tl.full([1, 1], True, tl.int1)
    head = kv_head * G + g[:, None]
    q_tile = tl.load(q + b * stride_q + head * D + d[None, :], mask=row & column, other=0.0)  # [ROWS, D]
    if UPCAST:  # Triton's interpreter multiplies 16-bit floats wrongly; a GPU wants them as they are
        q_tile = q_tile.to(tl.float32)
    q_scale = tl.full([ROWS], 1.4426950408889634, tl.float32) * scale  # and 2^x = e^(x ln 2)
    q_sum = tl.sum(q_tile.to(tl.float32), 1)  # [ROWS]
    v_scale = UNITS
    if INTEGER and not KEY_CHANNELS:
        q_tile = (q_tile * LIFT).to(q_tile.dtype)
    if not PER_TOKEN:
        if q_tile.dtype == tl.bfloat16:  # E4M3 becomes fp16 by one instruction, so q does, too: the largest is 1
            largest = tl.maximum(tl.max(tl.abs(q_tile.to(tl.float32)), 1), 1e-30)
            q_tile = (q_tile.to(tl.float32) / largest[:, None]).to(tl.float16)
            q_scale *= largest
        q_scale *= tl.load(head_scales + kv_head)
        v_scale = tl.load(head_scales + Hkv + kv_head)
    DTYPE: tl.constexpr = q_tile.dtype
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, D_PAD], tl.float32)
    middle = tl.zeros([ROWS], tl.float32)  # Σ_j w_j m_j

    for first in range(start, end, TILE):
        p = first + j  # positions [TILE]
        live = p < end
        block = tl.load(block_table + b * table_width + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        vector = p % BLOCK_SIZE * Hkv + kv_head
        base = (cache + block * PAGE + vector * (D * BITS // 8))[:, None]
        behind = numbers + block * (PAGE // NUMBER) + CODES  # where the page's scales begin

        if KEY_CHANNELS:
            k = load_levels(base, everywhere, table, GRID, D, D_PAD, BITS, tl.float16, False).to(tl.float32) * 2.0**24
            pair = behind[:, None] + 2 * (kv_head * D + d)[None, :]
            k = (k - OFFSET) * tl.load(pair, mask=column, other=0.0).to(tl.float32)
            k += tl.load(pair + 1, mask=column, other=0.0).to(tl.float32)
            # The keys of a block that is not full are still as they came.
            unfinished = tl.load(open_rows + block)
            raw = open_keys + ((unfinished * BLOCK_SIZE + p % BLOCK_SIZE) * Hkv + kv_head)[:, None] * D + d[None, :]
            is_open = (unfinished >= 0)[:, None]
            k = tl.where(is_open, tl.load(raw, mask=is_open & column, other=0.0).to(tl.float32), k).to(DTYPE)
        else:
            k = load_levels(base, everywhere, table, GRID, D, D_PAD, BITS, DTYPE, not UPCAST)
        s = tl.dot(q_tile, k.T, input_precision="ieee")  # [ROWS, TILE]
        if GRID == "uniform":
            if not KEY_CHANNELS:
                pair = behind + 2 * vector
                k_scale, k_mid = tl.load(pair).to(tl.float32), tl.load(pair + 1).to(tl.float32)
                s = s * (k_scale * UNITS)[None, :] + q_sum[:, None] * (k_mid - k_scale * OFFSET)[None, :]
        elif GRID == "int8":
            s = (s * UNITS - q_sum[:, None] * OFFSET) * tl.load(behind + vector)[None, :]
        elif PER_TOKEN:
            s = s * tl.load(behind + vector)[None, :]
        s = tl.where(live[None, :], s * q_scale[:, None], float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - m_new)
        w = tl.exp2(s - m_new[:, None])
        l = l * alpha + tl.sum(w, 1)
        o = o * alpha[:, None]
        m = m_new

        # Whatever the null block holds, NaN included: 0 · NaN is NaN, so a weight of 0 is no mask.
        behind += stride_half // NUMBER
        v = load_levels(base + stride_half, live[:, None], table, GRID, D, D_PAD, BITS, DTYPE, not UPCAST)
        if INTEGER:
            middle = middle * alpha
        if GRID == "uniform":
            pair = behind + 2 * vector
            middle += tl.sum(w * tl.load(pair + 1, mask=live, other=0.0).to(tl.float32)[None, :], 1)
            w = w * (tl.load(pair, mask=live, other=0.0).to(tl.float32) * LIFT)[None, :]
        elif PER_TOKEN:
            w = w * (tl.load(behind + vector, mask=live, other=0.0) * LIFT)[None, :]
        w = w.to(DTYPE)
        if INTEGER:  # of w as it is multiplied, rounded
            middle -= tl.sum(w.to(tl.float32), 1) * (OFFSET / LIFT)
        o += tl.dot(w, v, input_precision="ieee")

    l = tl.where(l > 0, l, 1.0)  # no key at all (an empty sequence or split): o is 0 and m is −inf
    o = (o * v_scale + middle[:, None]) / l[:, None]
    part = (b * Hkv * G + head) * SPLITS + split  # [ROWS, 1]
    tl.store(out + part * D + d[None, :], o.to(out.dtype.element_ty), mask=row & column)
    if SPLITS > 1:
        tl.store(lse + part, ((m + tl.log2(l)) * 0.6931471805599453)[:, None], mask=row)


def quantized_decode(q: torch.Tensor, layer: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
                     max_seq_len: int, layout: PageLayout, head_scales: torch.Tensor,
                     open_keys: torch.Tensor | None = None, open_rows: torch.Tensor | None = None,
                     num_splits: int | None = None) -> torch.Tensor:  # fmt: skip
    """Decode attention over a quantized paged cache: the newest token of each sequence against all its keys.

    Semantics: out[b, h] = Σ_j softmax_j(q[b, h]·k̂_j / √D) v̂_j, j < seq_lens[b], with k̂, v̂ the dequantized vectors in
    block_table[b, j // block_size]. If the format rotates, so are q and out: see QuantizedKVCache.attend.
    Shapes: q [B, Hq, D] (sequence stride free), layer uint8 [2, num_blocks, page], block_table int32 [B, W], seq_lens
    int32 [B], head_scales fp32 [2, Hkv] -> [B, Hq, D]. open_keys [R, block_size, Hkv, D] and open_rows int64
    [num_blocks]: where scales are per channel, the raw keys of blocks that are not full yet (row −1: it is).
    `num_splits` as in lesson 02. vLLM 0.32: v1/attention/ops/triton_unified_attention.py with KV_QUANT_MODE.
    """
    B, Hq, D = q.shape
    Hkv, fmt = layout.Hkv, layout.fmt
    out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    if B == 0:
        return out
    # An H200 at 32 x 4,096 tokens took as long with 1, 4 and 8 splits (within 3 %), with 2 a tenth longer or more.
    splits = num_splits or paged.default_splits(B * Hkv, max_seq_len, q.device, 8)
    parts, lse = out, out
    if splits > 1:
        parts = torch.empty(B, Hq, splits, D, dtype=torch.float32, device=q.device)
        lse = torch.empty(B, Hq, splits, dtype=torch.float32, device=q.device)
    D_pad = max(16, triton.next_power_of_2(D))
    tile, num_warps, num_stages = decode_tiles(fmt, q.dtype, q.is_cuda and not torch.version.hip)
    quantized_decode_kernel[(B, Hkv, splits)](
        q, layer, layer.view(torch.float16 if fmt.grid == "uniform" else torch.float32), head_scales,
        codebook_of(fmt, head_scales), head_scales if open_keys is None else open_keys,
        block_table if open_rows is None else open_rows, block_table, seq_lens, parts, lse, 1 / math.sqrt(D),
        q.stride(0), layer.stride(0), block_table.stride(0), G=Hq // Hkv, D=D, Hkv=Hkv, BLOCK_SIZE=layout.block_size,
        PAGE=layout.page, GRID=fmt.grid, BITS=fmt.bits, PER_TOKEN=fmt.per_token, KEY_CHANNELS=fmt.key_channels,
        ROWS=max(16, triton.next_power_of_2(Hq // Hkv)), D_PAD=D_pad, TILE=tile, SPLITS=splits,
        UPCAST=common.INTERPRET, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits > 1:
        D_pad = triton.next_power_of_2(D)
        paged.combine_splits_kernel[(B * Hq,)](parts, lse, out, D=D, D_PAD=D_pad, SPLITS=splits, num_warps=4)
    return out


def decode_tiles(fmt: KVFormat, dtype: torch.dtype, nvidia: bool) -> tuple[int, int, int]:
    """(keys per tile, warps, stages). Found by compiling: no spills; with 16 bits on NVIDIA's GPUs three programs at
    a time on Hopper, with many keys: what is done once per tile is much. Loads of block table and pages share the
    stages: five give codes two buffers, three give them one, for which bytes have room.
    """
    if dtype == torch.float32:
        return 16, 8, 1
    gathers = fmt.grid == "lloyd" or fmt.bits == 3 or fmt.key_channels  # element by element: slow, and many registers
    if nvidia:
        return 32 if gathers else 128, 4, 3 if fmt.bits == 8 else 2 if fmt.key_channels else 5
    return 32, 4, 1 if fmt.bits == 8 or fmt.key_channels else 2


# --- The cache of a whole model ---------------------------------------------------------------------------------------


class QuantizedKVCache(PagedKVCache):
    """Lesson 02's cache with pages of codes: the same block ids, slots, copies and `attend`; other bytes.

    `layers[i]` is uint8 [2, num_blocks, page]. `head_scales[i]` fp32 [2, Hkv] is used by formats without a scale per
    vector, and is 1 unless it is calibrated.
    """

    def __init__(self, model: llama.Llama, num_blocks: int, block_size: int, kv_cache_dtype: str) -> None:
        """Raises InputError for an unknown format, or a head size that is not a multiple of 8."""
        Hkv, D, L = model.num_kv_heads, model.config.head_dim, model.config.num_hidden_layers
        fmt = find_format(kv_cache_dtype)
        if D % 8:
            raise common.InputError(f"kv_cache_dtype {kv_cache_dtype}: head size {D} is not a multiple of 8")
        self.layout = PageLayout(fmt, block_size, Hkv, D)
        shape = (2, num_blocks, self.layout.page)
        self.layers = [torch.zeros(shape, dtype=torch.uint8, device=model.device) for _ in range(L)]
        self.head_scales = torch.ones(L, 2, Hkv, device=model.device)
        self.rotation = rotation(D).to(model.device, model.dtype) if fmt.rotate else None
        self.block_size, self.copied_blocks, self.dtype = block_size, 0, model.dtype
        self.open_keys: list[torch.Tensor | None] = [None] * L  # see ChannelKVCache
        self.open_rows: torch.Tensor | None = None

    def begin_step(self, slot_mapping: torch.Tensor) -> None:
        """Called once before the layers write to these slots."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Quantize and store keys and values, rotated if the format rotates. k, v [T, Hkv, D]."""
        quantize_and_cache(k, v, self.layers[layer], slot_mapping, self.layout, self.head_scales[layer])

    def load(self, layer: int, source: torch.Tensor) -> torch.Tensor:
        """Dequantized pages: blocks of keys, then as many of values + num_blocks. [n · block_size · 2, Hkv, D]"""
        codes, scale, mid = self.layout.split(self.layers[layer].flatten(0, 1).index_select(0, source))
        if scale is None:
            scale = self.head_scales[layer, :, None, :, None].repeat_interleave(len(source) // 2, 0)
        return dequantize(codes, scale, mid, self.layout.fmt).flatten(0, 1).to(self.dtype)

    def attend(self, meta: AttentionMetadata) -> llama.Attend:
        """As in lesson 02: decodes through the kernel, prompts through torch; here both see quantized pasts only."""
        size, num_blocks, decode_lens = self.block_size, self.layers[0].shape[1], meta.seq_lens.clone()
        prompts, first, R = [], 0, self.rotation
        for b, n in enumerate(meta.query_lens):
            if n > 1:
                S = int(meta.seq_lens[b])
                blocks = meta.block_table[b, : -(-S // size)].long()
                prompts.append((slice(first, first + n), torch.cat((blocks, blocks + num_blocks)), S))
                decode_lens[b] = 0  # the decode kernel skips it: to it, the sequence is empty
            first += n
        kernel = common.runs_kernel(self.layers[0])
        plan = [] if kernel else paged.gather_plan(meta.block_table, decode_lens, (2, num_blocks, size))
        self.begin_step(meta.slot_mapping)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if R is not None:  # (q R)·(k R) = q·k, and Σ_j w_j v_j R = (Σ_j w_j v_j) R
                q, k, v = q @ R, k @ R, v @ R
            self.write(layer, k, v, meta.slot_mapping)
            newest = q[meta.query_start_loc[:-1]] if prompts else q  # [B, Hq, D]
            if kernel:
                raw = (self.open_keys[layer], self.open_rows)
                out = quantized_decode(newest, self.layers[layer], meta.block_table, decode_lens, meta.max_seq_len,
                                       self.layout, self.head_scales[layer], *raw)  # fmt: skip
            else:
                out = self.decode_torch(layer, newest, plan)
            if prompts:
                decoded, out = out, torch.empty_like(q)
                out[meta.query_start_loc[:-1]] = decoded
                for tokens, source, S in prompts:
                    past = self.load(layer, source).unflatten(0, (2, -1))[:, :S]
                    out[tokens] = paged.prefill_attention(q[tokens], *past)
            return out if R is None else out @ R.T

        return attend

    def decode_torch(self, layer: int, q: torch.Tensor, plan: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        """What `quantized_decode` computes, by dequantizing what lesson 02's plan gathers."""
        (Hq, D), Hkv = q.shape[1:], self.layout.Hkv
        out = torch.zeros_like(q)
        for rows, source, dead, bias in plan:
            kv = self.load(layer, source).index_fill_(0, dead, 0)
            k, v = kv.view(2, len(rows), -1, Hkv, D).transpose(2, 3)  # [b, Hkv, S, D] each
            o = F.scaled_dot_product_attention(q[rows].view(-1, Hkv, Hq // Hkv, D), k, v, bias.to(q.dtype))
            out[rows] = o.view(-1, Hq, D)
        return out


class ChannelKVCache(QuantizedKVCache):
    """Keys with a scale per channel over the tokens of a block (KIVI).

    Such a scale exists once the block is full. Until then its keys stay as they are, in a row of `open_keys`: one
    block per running sequence in full precision, which is what KIVI calls the residual.
    """

    def __init__(self, model: llama.Llama, num_blocks: int, block_size: int, kv_cache_dtype: str) -> None:
        super().__init__(model, num_blocks, block_size, kv_cache_dtype)
        self.rows: dict[int, int] = {}  # block -> its row of open_keys
        self.free_rows: list[int] = []
        self.closed_rows: list[int] = []  # of blocks that became full in the last step
        self.open_rows = torch.full((num_blocks,), -1, dtype=torch.int64, device=model.device)
        shape = (0, block_size, self.layout.Hkv, self.layout.D)
        self.open_keys = [torch.empty(shape, dtype=model.dtype, device=model.device) for _ in self.layers]
        self.in_use: Callable[[int], bool] = lambda block: True  # an engine asks its pool

    def take_row(self) -> int:
        """A free row; else one whose block was given back half full; else a new one."""
        if not self.free_rows:
            for block in [block for block in self.rows if not self.in_use(block)]:
                self.free_rows.append(self.rows.pop(block))
                self.open_rows[block] = -1
        if not self.free_rows:
            have = len(self.open_keys[0])
            self.free_rows = list(range(have, 2 * have + 8))
            for i, rows in enumerate(self.open_keys):
                self.open_keys[i] = torch.cat((rows, rows.new_zeros(have + 8, *rows.shape[1:])))
        return self.free_rows.pop()

    def begin_step(self, slot_mapping: torch.Tensor) -> None:
        """Find each token's row, and the blocks that this step fills. Raises ValueError for a block without a start."""
        self.free_rows += self.closed_rows
        self.closed_rows, places, full = [], [], []
        for slot in slot_mapping.tolist():
            block, offset = divmod(slot, self.block_size)
            if block not in self.rows:
                if offset:
                    raise ValueError(f"slot {slot}: block {block} is closed, it cannot be continued")
                self.rows[block] = self.open_rows[block] = self.take_row()
            places.append(self.rows[block] * self.block_size + offset)
            if offset == self.block_size - 1:
                full.append(block)
        self.closed_rows = [self.rows.pop(block) for block in full]
        self.open_rows[full] = -1
        as_ids = functools.partial(torch.tensor, dtype=torch.int64, device=slot_mapping.device)
        self.places, self.full, self.full_rows = as_ids(places), as_ids(full), as_ids(self.closed_rows)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        super().write(layer, k, v, slot_mapping)  # the values
        self.open_keys[layer].flatten(0, 1).index_copy_(0, self.places, k)
        quantize_channels(self.open_keys[layer], self.full_rows, self.full, self.layers[layer], self.layout)

    def load(self, layer: int, source: torch.Tensor) -> torch.Tensor:
        """As above, for n blocks: `source` [2n] -> [2n · block_size, Hkv, D]. Keys of an open block are still exact."""
        fmt, n = self.layout.fmt, len(source) // 2
        pages = self.layers[layer].flatten(0, 1).index_select(0, source)
        keys = dequantize(*self.layout.split(pages[:n], channels=True), fmt).to(self.dtype)
        values = dequantize(*self.layout.split(pages[n:]), fmt).to(self.dtype)
        rows = self.open_rows[source[:n]]
        keys[rows >= 0] = self.open_keys[layer][rows[rows >= 0]]
        return torch.cat((keys, values)).flatten(0, 1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy-on-write: the codes, and the exact keys of a block that is not full, to a row of its own."""
        super().copy_blocks(pairs)
        for source, target in pairs:
            if target in self.rows:  # its last owner gave it back half full
                self.free_rows.append(self.rows.pop(target))
                self.open_rows[target] = -1
            if source in self.rows:
                row = self.rows[target] = self.open_rows[target] = self.take_row()
                for keys in self.open_keys:
                    keys[row] = keys[self.rows[source]]


def make_cache(model: llama.Llama, num_blocks: int, block_size: int, kv_cache_dtype: str) -> PagedKVCache:
    """The cache for any of KV_CACHE_DTYPES; "auto" is lesson 02's, in the model's dtype. Raises InputError."""
    if kv_cache_dtype == "auto":
        return PagedKVCache(model, num_blocks, block_size)
    kind = ChannelKVCache if find_format(kv_cache_dtype).key_channels else QuantizedKVCache
    return kind(model, num_blocks, block_size, kv_cache_dtype)


def quantized_runner(base: type[ModelRunner], kv_cache_dtype: str) -> type[ModelRunner]:
    """`base` (lesson 04's runner or one of its descendants) with a quantized cache; "auto" is `base` itself.

    Raises InputError for an unknown dtype.
    """
    if kv_cache_dtype == "auto":
        return base
    find_format(kv_cache_dtype)

    class QuantizedModelRunner(base):
        def make_cache(self, model: llama.Llama, num_blocks: int, block_size: int) -> PagedKVCache:
            cache, pool = make_cache(model, num_blocks, block_size, kv_cache_dtype), self.manager.block_pool
            if isinstance(cache, ChannelKVCache):
                cache.in_use = lambda block: pool.ref_count[block] > 0
            return cache

        def attend(self, meta: AttentionMetadata) -> llama.Attend:
            return self.cache.attend(meta)

    return QuantizedModelRunner


def example_launches(dtype: torch.dtype) -> None:
    """Every kernel, on every grid, at the shapes of SmolLM2 and of an 8B Llama, on meta tensors."""
    empty = functools.partial(torch.empty, device="meta")
    shapes = {("fp8", "int4_plain", "kivi_2bit"): (9, 3, 64),
              ("int8_per_token_head", "int3_plain", "turboquant_2bit"): (32, 8, 128)}  # fmt: skip
    for names, (Hq, Hkv, D) in shapes.items():
        k, q, ids = empty(32, Hkv, D, dtype=dtype), empty(32, Hq, D, dtype=dtype), empty(32, dtype=torch.int64)
        table, lens = empty(32, 1024, dtype=torch.int32), empty(32, dtype=torch.int32)
        for name, longest in zip(names, (16384, 200, 16384)):  # split along the keys, and whole
            fmt, raw = FORMATS[name], ()
            layout = PageLayout(fmt, 32 if fmt.key_channels else 16, Hkv, D)
            layer = empty(2, 1024, layout.page, dtype=torch.uint8)
            quantize_and_cache(k, k, layer, ids, layout, empty(2, Hkv))
            if fmt.key_channels:
                raw = (empty(64, 32, Hkv, D, dtype=dtype), empty(1024, dtype=torch.int64))
                quantize_channels(raw[0], ids, ids, layer, layout)
            quantized_decode(q, layer, table, lens, longest, layout, empty(2, Hkv), *raw)


# --- How good is it? Three probes on a real model ---------------------------------------------------------------------

BLOCK = 32  # of the probes and of step 2: KIVI's group of tokens


def evaluation_tokens(tokenizer: llama.Tokenizer, count: int) -> list[int]:
    """The first tokens of the text that ships with every Python: its own reference manual's topics."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)[:40])
    return tokenizer.encode(text)[:count]


def one_sequence(num_tokens: int, device: torch.device) -> AttentionMetadata:
    """A prompt of this length in blocks 1, 2, 3, …"""
    blocks = range(1, 1 + -(-num_tokens // BLOCK))
    return AttentionMetadata.build([blocks], [num_tokens], [num_tokens], BLOCK, device)


def perplexity(model: llama.Llama, tokens: Sequence[int], kv_cache_dtype: str, window: int = 512,
               head_scales: torch.Tensor | None = None) -> float:  # fmt: skip
    """exp of the mean negative log likelihood, in windows that know nothing of each other, every past quantized."""
    cache = make_cache(model, 1 + -(-window // BLOCK), BLOCK, kv_cache_dtype)
    if head_scales is not None:
        cache.head_scales = head_scales
    total, count = 0.0, 0
    for first in range(0, len(tokens), window):
        ids = torch.tensor(tokens[first : first + window], device=model.device)
        meta = one_sequence(len(ids), model.device)
        hidden = model.forward(ids, meta.positions, cache.attend(meta))
        loss = F.cross_entropy(model.logits(hidden[:-1]).float(), ids[1:], reduction="sum")
        total, count = total + loss.item(), count + len(ids) - 1
    return math.exp(min(700.0, total / count))


def attention_errors(model: llama.Llama, tokens: Sequence[int], names: Sequence[str]) -> dict[str, list[float]]:
    """Of each layer, ‖o − ô‖ / ‖o‖ of its attention output, everything before it exact."""
    meta = one_sequence(len(tokens), model.device)
    attends = {name: make_cache(model, 1 + meta.block_table.shape[1], BLOCK, name).attend(meta) for name in names}
    errors: dict[str, list[float]] = {name: [] for name in names}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        exact = paged.prefill_attention(q, k, v)
        for name in names:
            errors[name].append(common.relative_error(attends[name](layer, q, k, v), exact))
        return exact

    model.forward(torch.tensor(list(tokens), device=model.device), meta.positions, attend)
    return errors


def calibrate(model: llama.Llama, tokens: Sequence[int]) -> tuple[torch.Tensor, dict[str, float]]:
    """What one pass over a text shows of keys and values, in full precision.

    Scales per layer, half and head with which the largest element becomes 448: fp32 [L, 2, Hkv]. And how far channels
    stick out: mean |x| of a head's largest channel over that of its median channel.
    """
    largest, channels = [], []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv = torch.stack((k, v)).abs().float()  # [2, T, Hkv, D]
        largest.append(kv.amax((1, 3)))
        channels.append(kv.mean(1))
        return paged.prefill_attention(q, k, v)

    meta = one_sequence(len(tokens), model.device)
    model.forward(torch.tensor(list(tokens), device=model.device), meta.positions, attend)
    means, top = torch.stack(channels), torch.stack(largest)  # [L, 2, Hkv, D], [L, 2, Hkv]
    keys, values = (means.amax(-1) / means.median(-1).values).unbind(1)
    return top / 448, {"largest_key": top[:, 0].max().item(), "median_head_keys": keys.median().item(),
                       "worst_head_keys": keys.max().item(), "median_head_values": values.median().item()}  # fmt: skip


NEEDLES = {"Lisbon": "4817", "the library": "2903", "Anna": "7164", "the red car": "5392", "the moon": "8046",
           "the piano": "1675", "the garden": "3528", "Doctor Smith": "9430"}  # fmt: skip


@dataclasses.dataclass
class Haystack:
    """A document with needles in it, its exact keys and values, and one question per needle.

    The document is read once, in full precision; each format then stores those same keys and values. So the probe asks
    what a format forgets, and not what an already disturbed model would have written.
    """

    document: list[int]
    questions: list[list[int]]
    answers: list[str]
    cache: PagedKVCache

    @classmethod
    def build(cls, model: llama.Llama, tokenizer: llama.Tokenizer, filler_tokens: int = 768) -> Haystack:
        """A text of so many tokens with the needles spread evenly through it."""
        filler = evaluation_tokens(tokenizer, filler_tokens)
        step = filler_tokens // len(NEEDLES)
        document = tokenizer.encode("<|im_start|>user\nRead this text.\n\n")
        for i, (name, number) in enumerate(NEEDLES.items()):
            document += filler[i * step : (i + 1) * step]
            document += tokenizer.encode(f"\nThe secret number of {name} is {number}. Remember: {name}, {number}.\n")
        ask = "\n\nWhat is the secret number of {0}?<|im_end|>\n<|im_start|>assistant\nThe secret number of {0} is"
        cache = PagedKVCache(model, 2 * -(-len(document) // BLOCK) + 4 * len(NEEDLES), BLOCK)
        meta = one_sequence(len(document), model.device)
        model.forward(torch.tensor(document, device=model.device), meta.positions, cache.attend(meta))
        return cls(document, [tokenizer.encode(ask.format(city)) for city in NEEDLES], list(NEEDLES.values()), cache)

    def find(self, model: llama.Llama, tokenizer: llama.Tokenizer, kv_cache_dtype: str) -> list[bool]:
        """Ask all questions at once, each a fork of the document, and compare what is written with the number."""
        num_blocks = self.cache.layers[0].shape[1]
        cache, pool = make_cache(model, num_blocks, BLOCK, kv_cache_dtype), paged.BlockPool(num_blocks)
        table = paged.BlockTable(pool, BLOCK)
        table.append(len(self.document))
        slots = one_sequence(len(self.document), model.device).slot_mapping  # blocks 1, 2, …: those of `table`
        if kv_cache_dtype == "auto":
            cache.layers = [layer.clone() for layer in self.cache.layers]
        else:
            cache.begin_step(slots)
            for i, layer in enumerate(self.cache.layers):
                kv = layer.flatten(1, 2)[:, slots]
                cache.write(i, *(kv if cache.rotation is None else kv @ cache.rotation), slots)
        tables, new = [table.fork() for _ in self.questions], self.questions
        written: list[list[int]] = [[] for _ in self.questions]
        for _ in range(6):  # a blank, four digits, and what follows
            picked = paged.run_step(model, cache, tables, new).argmax(-1).tolist()
            new = [[token] for token in picked]
            for tokens, token in zip(written, picked):
                tokens.append(token)
        return [tokenizer.decode(tokens).strip().startswith(a) for tokens, a in zip(written, self.answers)]


# --- What others measured ---------------------------------------------------------------------------------------------

# FlashAttention-3 decode in vLLM 0.22 on an H200, Hkv 8, D 128, microseconds with a bf16 and an fp8 cache, by
# (sequences, context): NVIDIA aiconfigurator's kernel database.
HOPPER_DECODE = {(8, 4096): (41.4, 31.8), (32, 4096): (132.5, 98.5), (8, 16384): (132.9, 95.0)}
# vLLM blog, 2026-04-22, Llama-3.1-8B on an H100. A line fitted to one request at a time, contexts to 125k: ms + ms per
# token. And the median step, ms, of eight at once, some 20,000 tokens in and 2,000 out: halfway, 8 · 21,000 are cached.
PUBLISHED_ITL = kv_cache_lesson.PUBLISHED_ITL
PUBLISHED_BATCH, BATCH_TOKENS = {"bfloat16": 15.18, "fp8": 12.93}, 8 * 21_000


def published_facts() -> dict[str, Any]:
    """Others' measurements, read.

    If time were bytes / bandwidth + a constant, bandwidth would be (bytes16 − bytes8) / (t16 − t8). That is more than
    the memory can do, so the sum is the wrong model: loads and arithmetic overlap.
    """
    hopper = {}
    for (B, S), (t16, t8) in HOPPER_DECODE.items():
        moved = 2 * B * S * 8 * 128 * 2 / 1e6  # bf16: MB, so that MB / µs are TB/s
        hopper[f"b{B}_s{S}"] = {"bf16_us": t16, "fp8_us": t8, "speedup": t16 / t8, "bf16_tb_s": moved / t16,
                                "fp8_tb_s": moved / 2 / t8, "sum_model_tb_s": moved / 2 / (t16 - t8)}  # fmt: skip
    (a16, b16), (a8, b8) = PUBLISHED_ITL["bfloat16"], PUBLISHED_ITL["fp8"]
    itl = {"bf16_ms": a16, "fp8_ms": a8, "extra_ms": a8 - a16, "slope_ratio": b8 / b16,
           "break_even_tokens": (a8 - a16) / (b16 - b8), "speedup_limit": b16 / b8,
           "speedup_100k": (a16 + b16 * 1e5) / (a8 + b8 * 1e5),
           "batch": {"bf16_ms": PUBLISHED_BATCH["bfloat16"], "fp8_ms": PUBLISHED_BATCH["fp8"],
                     "speedup": PUBLISHED_BATCH["bfloat16"] / PUBLISHED_BATCH["fp8"],
                     "line": (a16 + b16 * BATCH_TOKENS) / (a8 + b8 * BATCH_TOKENS)}}  # fmt: skip
    return {"hopper": hopper, "itl": itl}


# --- What we measured: perplexity, needles and errors, regenerated by --bench -----------------------------------------

# Deterministic, but for the text: pydoc_data.topics differs between versions of Python; `text` is the sha256 of these
# tokens. Perplexity over 2,048 tokens in windows of 512; needles found, of 8; error of attention, mean over the layers.
RECORDED: dict[str, Any] = {
    "text": "8b3d733c6299944a",
    "fp8_calibrated": 15.389,
    "outliers": {"largest_key": 20.78, "median_head_keys": 10.27, "worst_head_keys": 17.71, "median_head_values": 2.40},
    "first_1024": {"auto": 14.243, "int4_per_token_head": 15.655, "int2_plain": 699.897},
    "formats": {
        "auto": {"perplexity": 15.259, "needles": 8, "error": 0.0000},
        "fp8": {"perplexity": 15.375, "needles": 8, "error": 0.0606},
        "fp8_per_token_head": {"perplexity": 15.432, "needles": 7, "error": 0.0489},
        "int8_per_token_head": {"perplexity": 15.278, "needles": 8, "error": 0.0199},
        "int4_per_token_head": {"perplexity": 16.666, "needles": 7, "error": 0.1601},
        "int3_per_token_head": {"perplexity": 20.433, "needles": 5, "error": 0.3509},
        "int2_per_token_head": {"perplexity": 121.024, "needles": 0, "error": 0.8820},
        "turboquant_4bit": {"perplexity": 16.301, "needles": 5, "error": 0.1699},
        "turboquant_3bit": {"perplexity": 19.882, "needles": 7, "error": 0.3270},
        "turboquant_2bit": {"perplexity": 44.019, "needles": 0, "error": 0.6125},
        "int4_plain": {"perplexity": 17.680, "needles": 4, "error": 0.2418},
        "int3_plain": {"perplexity": 31.248, "needles": 2, "error": 0.5347},
        "int2_plain": {"perplexity": 893.118, "needles": 0, "error": 1.2927},
        "kivi_2bit": {"perplexity": 31.901, "needles": 2, "error": 0.5747},
    },
}


def text_digest(tokens: Sequence[int]) -> str:
    """Which text it was: the first 16 hexadecimal digits of the sha256 of its token ids."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16]


@functools.cache
def facts() -> dict[str, Any]:
    """What the text quotes and can be computed without a model, and the recorded table."""
    widget = {}
    for preset in PRESETS:
        for bits in (2, 3, 4, 8):
            for way, change in (("plain", {}), ("rotated", {"rotation": True}), ("channel", {"group": "channel"})):
                run = simulate(WIDGET_DEFAULT | {"keys": preset, "bits": bits} | change)
                widget.setdefault(preset.replace(" ", "_"), {})[f"{way}_{bits}"] = {
                    "found": run["found"], "largest_error": run["largest_error_milli"] / 1000,
                }  # fmt: skip
    values = sorted({e4m3_value(byte) for byte in range(256) if byte & 0x7F != 0x7F})
    return {
        "e4m3": {"values": len(values), "largest": values[-1], "smallest": min(x for x in values if x > 0)},
        "lloyd": {str(bits): lloyd_max(bits)[-1] for bits in (2, 3, 4)},
        "smollm2": capacity(30, 3, 64, BLOCK),
        "llama_8b": capacity(32, 8, 128, BLOCK),
        "bits": {name: bits_per_element(name, 64, BLOCK) for name in KV_CACHE_DTYPES},
        **published_facts(),
        "widget": widget, "recorded": RECORDED,
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------

FAMILIES = {  # the lines of the second figure
    "8 bits": ("blue", ["fp8", "fp8_per_token_head", "int8_per_token_head"]),
    "rotated": ("green", [f"int{b}_per_token_head" for b in (4, 3, 2)]),
    "rotated, Lloyd-Max": ("purple", [f"turboquant_{b}bit" for b in (4, 3, 2)]),
    "not rotated": ("red", [f"int{b}_plain" for b in (4, 3, 2)]),
    "keys per channel": ("orange", ["kivi_2bit"]),
}


def draw(folder: str | Path) -> list[Path]:
    """The figures, from `facts()` alone."""
    known, color = facts(), common.COLORS
    # The simulation's keys: as they are, and as three ways of storing 3 bits give them back.
    ways = {"one scale per key": ("plain", {}), "rotated, one scale per key": ("rotated", {"rotation": True}),
            "one scale per channel": ("channel", {"group": "channel"})}  # fmt: skip
    panels = {"the keys": simulate(WIDGET_DEFAULT)["keys"]}
    for title, (way, change) in ways.items():
        found = known["widget"]["outlier_channel"][f"{way}_3"]["found"]
        restored = simulate(WIDGET_DEFAULT | change)["restored_milli"]
        panels[f"{title}: {found} of 8 found"] = [[x / 1000 for x in row] for row in restored]
    figure, axes = common.new_figure(8.0, 3.9, nrows=2, ncols=2, sharex=True, sharey=True)
    for ax, (title, keys) in zip(axes.flat, panels.items()):
        ax.imshow(keys, cmap="RdBu_r", vmin=-4, vmax=4, aspect="auto")
        ax.set(title=title, xticks=range(0, CHANNELS, 5), yticks=range(0, TOKENS, 7))
        for t in range(TOKENS):
            ax.text(5, t, f"{keys[t][5]:.0f}", ha="center", va="center", color="white", fontsize=7)
    figure.supxlabel("channel", fontsize=10)
    figure.supylabel("key", fontsize=10)
    paths = [common.save_figure(figure, folder, "05d_outlier")]
    # Quality against the bits that an element really takes.
    table, bits = known["recorded"]["formats"], known["bits"]
    figure, axes = common.new_figure(8.0, 3.6, ncols=2)
    for family, (shade, names) in FAMILIES.items():
        style = "o" if family == "8 bits" else "o-"  # other formats, not other widths: no line
        for ax, key in zip(axes, ("perplexity", "needles")):
            ax.plot([bits[name] for name in names], [table[name][key] for name in names], style, label=family,
                    color=color[shade], markersize=5)  # fmt: skip
    for ax, title in zip(axes, ("perplexity (dotted: not quantized)", f"needles found, of {len(NEEDLES)}")):
        ax.set(title=title, xlabel="bits per element, scales included", xlim=(2, 9))
    axes[0].axhline(table["auto"]["perplexity"], color=color["grey"], linestyle=":")
    axes[0].set(yscale="log")
    axes[0].set_yticks(ticks := [15, 20, 30, 50, 100, 200, 500, 1000], ticks)
    axes[0].minorticks_off()
    axes[1].legend(fontsize=9, loc="lower right")
    return [*paths, common.save_figure(figure, folder, "05d_quality")]


# --- The story --------------------------------------------------------------------------------------------------------

QUESTIONS = ["What is the capital of France?", "What are the three primary colors?", "Why is the sky blue?"]


def make_core(model: llama.Llama, kv_cache_dtype: str, num_blocks: int = 256, block_size: int = 16,
              max_model_len: int = 1024, wrap: Callable = lambda runner: runner) -> ModelEngineCore:  # fmt: skip
    """Lesson 04's engine on a quantized cache. Raises InputError for an unknown dtype."""
    config = continuous_batching.SchedulerConfig(max_model_len, max_num_seqs=32, max_num_batched_tokens=4096)
    manager = continuous_batching.KVCacheManager(num_blocks, block_size, max_model_len)
    scheduler = continuous_batching.Scheduler(config, manager)
    runner = wrap(quantized_runner(ModelRunner, kv_cache_dtype))
    return ModelEngineCore(scheduler, runner(model, scheduler))


def random_layer(fmt: KVFormat, seq_lens: Sequence[int], block_size: int, Hq: int, Hkv: int, D: int,
                 dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `quantized_decode`, on shuffled blocks; not for scales per channel."""
    layout, device = PageLayout(fmt, block_size, Hkv, D), common.device()
    need = [-(-S // block_size) for S in seq_lens]
    ids = (torch.randperm(sum(need)) + 1).tolist()
    meta = AttentionMetadata.build([[ids.pop() for _ in range(n)] for n in need], seq_lens, seq_lens, block_size)
    layer = torch.zeros(2, sum(need) + 1, layout.page, dtype=torch.uint8, device=device)
    k, v = torch.randn(2, sum(seq_lens), Hkv, D, device=device).to(dtype)
    head_scales = torch.ones(2, Hkv, device=device)
    quantize_and_cache(k, v, layer, meta.slot_mapping, layout, head_scales)
    q = torch.randn(len(seq_lens), Hq, D, device=device).to(dtype)
    return q, layer, meta.block_table, meta.seq_lens, meta.max_seq_len, layout, head_scales


def check_formats() -> None:
    """Every E4M3 byte and every tie against the definition; every kernel against dequantizing everything."""
    values = torch.tensor([e4m3_value(byte) for byte in range(0x7F)])
    x = torch.cat((values, (values[1:] + values[:-1]) / 2))  # all values, all ties
    codes = quantize(x, FORMATS["fp8"], torch.ones(1))[0]
    common.check_equal(f"{len(x)} values and ties of E4M3 encoded as the definition says", codes.tolist(),
                       [e4m3_nearest(float(value)) for value in x])  # fmt: skip
    if not common.HAS_TRITON:
        common.skipped("the Triton kernels", common.kernel_mode())
        return
    for name in ("fp8", "int8_per_token_head", "int3_plain"):
        with common.use_kernels():
            made = random_layer(FORMATS[name], [1, 16, 21], 16, 6, 2, 16)
            q, layer, table, lens, _, layout, head_scales = made
            out = quantized_decode(*made)
        dense = dequantize_reference(layer, layout, head_scales)
        reference = paged.paged_decode_reference(q, dense, table, lens).float()
        common.check(f"{name}: written by one kernel, read by the other", out.cpu(), reference)


def run_engine(model: llama.Llama, tokenizer: llama.Tokenizer, kv_cache_dtype: str, max_tokens: int = 16) -> None:
    """Three chats with the full cache, fp8, and what was asked for; fp8 batched against alone.

    With 2 bits that would fail: products of 1 and 3 rows differ in the last bit, which may move a code by a level.
    """
    prompts = [tokenizer.ask(question) for question in QUESTIONS]
    told, rows, memory = {}, [], 64 * 2**20
    for name in dict.fromkeys(("auto", "fp8", kv_cache_dtype)):
        core = make_core(model, name, block_size=BLOCK)
        told[name] = continuous_batching.serve(core, prompts, [max_tokens] * len(prompts)).token_ids
        size = block_bytes(model, BLOCK, name)
        rows.append([name, f"{size:,}", f"{memory // size * BLOCK:,}", repr(tokenizer.decode(told[name][0]))])
    common.table(["--kv-cache-dtype", "bytes of a block", "tokens in 64 MiB", QUESTIONS[0]], rows)
    alone = continuous_batching.serve(make_core(model, "fp8", block_size=BLOCK), prompts[:1], [max_tokens]).token_ids
    common.check_equal("fp8: the first chat gets the same tokens served alone", alone[0], told["fp8"][0])


def probe(model: llama.Llama, tokenizer: llama.Tokenizer, names: Sequence[str], tokens: Sequence[int],
          haystack: Haystack) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Needles, perplexity and attention error of each format."""
    errors = attention_errors(model, tokens[:512], names)
    found = {}
    for name in names:
        hits = haystack.find(model, tokenizer, name)
        found[name] = {"needles": sum(hits), "perplexity": perplexity(model, tokens, name),
                       "error": sum(errors[name]) / len(errors[name]), "layers": errors[name]}  # fmt: skip
    return found


def show_table(table: dict[str, dict[str, Any]]) -> None:
    """Formats by quality: bits, capacity, attention error, perplexity, needles."""
    capacities = facts()["smollm2"]
    rows = [[name, f"{facts()['bits'][name]:.2f}", f"{capacities[name]['tokens_per_gib']:,.0f}",
             f"{capacities[name]['ratio']:.1f}x", f"{row['error']:.1%}", f"{row['perplexity']:.2f}", row["needles"]]
            for name, row in table.items()]  # fmt: skip
    common.table(["", "bits/element", "tokens/GiB", "of bf16's", "error", "perplexity", f"needles of {len(NEEDLES)}"],
                 rows)  # fmt: skip


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    p.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="int4_per_token_head", metavar="NAME",
                   help=f"the format of steps 2 and 3: {', '.join(KV_CACHE_DTYPES)} (default %(default)s)")  # fmt: skip
    return p


def measure_kernels(seconds: float = 0.3) -> list[dict[str, Any]]:
    """On a GPU: decode attention over a bf16 cache (lesson 02's kernel) and over quantized ones."""
    rows, names = [], ("fp8", "int8_per_token_head", "int4_plain", "int2_plain")
    for B, S in HOPPER_DECODE:
        exact = paged.random_case([S] * B, 16, 32, 8, 128, torch.bfloat16)
        base = common.measure_graph(functools.partial(paged.paged_decode, *exact, S), seconds).median
        row = {"B": B, "S": S, "auto": base}
        for name in names:
            made = random_layer(FORMATS[name], [S] * B, 16, 32, 8, 128, torch.bfloat16)
            row[name] = common.measure_graph(functools.partial(quantized_decode, *made), seconds).median
            row[f"{name}_gbps"], row[f"{name}_speedup"] = made[1].nbytes / row[name] / 1e9, base / row[name]
        rows.append(row)
    shown = [[r["B"], r["S"], *(f"{r[name] * 1e6:.1f}" for name in ("auto", *names))] for r in rows]
    common.table(["B", "S", "bf16, µs", *names], shown)
    return rows


def measure_together(name: str = "Llama-3.1-8B", context: int = 4096) -> list[dict[str, Any]]:
    """On a GPU: ms of an 8B model's decode step, one CUDA graph, and the GB it reads; weights and cache in few bits."""
    quantization = common.lesson("05b_quantization")
    from engine.worker import cuda_graphs as graphs

    model, int4, rows = common.lesson("04c_speed").random_twins(name)[0], quantization.FORMATS["int4-g128"], []
    small = copy.copy(model)
    small.linear = {n: layer if n == "lm_head" else quantization.QuantizedLinear(quantization.rtn(layer.weight, int4))
                    for n, layer in model.linear.items()}  # fmt: skip
    rest, head = sum(x.weight.numel() for x in model.linear.values()), model.linear["lm_head"].weight.numel()
    gb = {"bf16": 2e-9 * rest, "int4": 2e-9 * head + 1e-9 * (rest - head) * int4.bits_per_weight(4096) / 8}
    for n, dtype, (weights, m) in itertools.product((1, 32), ("auto", "fp8"), (("bf16", model), ("int4", small))):
        runner = make_core(m, dtype, 1 + n * -(-context // 16), 16, context, graphs.graph_runner).runner
        took = common.measure(graphs.decode_at(runner, n, context)).median
        read = gb[weights] + sum(layer.nbytes for layer in runner.cache.layers) / 1e9
        rows.append({"B": n, "weights": weights, "cache": dtype, "ms": 1e3 * took, "gb": read})
        common.say(f"{name}, {n:>2} × {context:,} tokens, weights {weights}, cache {dtype:<4}: {1e3 * took:5.2f} ms, "
                   f"{read:.1f} GB")  # fmt: skip
    return rows


def measure_engine(model: llama.Llama, tokenizer: llama.Tokenizer, max_tokens: int = 32) -> dict[str, Any]:
    """Tokens per second of 16 chats with each cache: what quantizing costs where attention is not the limit."""
    prompts = [tokenizer.ask(f"{QUESTIONS[i % 3]} ({i})") for i in range(16)]
    found, rows = {}, []
    for name in ("auto", "fp8", "int8_per_token_head", "int4_per_token_head"):
        core = make_core(model, name)
        rates = [continuous_batching.serve(core, prompts, [max_tokens] * 16).tokens_per_second for _ in range(3)]
        found[name] = {"tokens_per_second": sorted(rates)[1]}
        found[name]["of_auto"] = found[name]["tokens_per_second"] / found["auto"]["tokens_per_second"]
        rows.append([name, f"{found[name]['tokens_per_second']:.0f}", f"{found[name]['of_auto']:.0%}"])
    common.table(["16 chats", "tokens/s", "of auto"], rows)
    return found


def benchmark(model: llama.Llama, tokenizer: llama.Tokenizer) -> dict[str, Any]:
    """The recorded table anew, and times."""
    tokens, haystack = evaluation_tokens(tokenizer, 2048), Haystack.build(model, tokenizer)
    names = [name for name in KV_CACHE_DTYPES if name != "fp8_e4m3"]
    show_table(table := probe(model, tokenizer, names, tokens, haystack))
    scales, outliers = calibrate(model, tokens[:512])
    calibrated = perplexity(model, tokens, "fp8", head_scales=scales)
    common.say(f"fp8 with calibrated scales: perplexity {calibrated:.3f}, with 1: {table['fp8']['perplexity']:.3f}")
    common.say(f"text {text_digest(tokens)} (recorded: {RECORDED['text']}), haystack {len(haystack.document)} tokens")
    bench = {"table": table, "fp8_calibrated": calibrated, "outliers": outliers, "text": text_digest(tokens)}
    bench["engine"] = measure_engine(model, tokenizer)
    if common.HAS_GPU:
        bench |= {"decode": measure_kernels(), "together": measure_together()}
        bench["copy_bandwidth"] = common.copy_bandwidth()
    return bench


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine, f, bench, name = common.start(args), facts(), {}, args.kv_cache_dtype
    if (D := llama.check_context(args.model, 2048 if args.bench else 1024).head_dim) % 8:
        raise common.InputError(f"--model {args.model}: head_dim {D}; every format takes multiples of 8")

    common.heading("1. Codes and kernels against the definitions")
    check_formats()

    model, tokenizer = llama.load(args.model)
    common.heading(f"2. The real model in the engine, --kv-cache-dtype {name} (auto: {model.dtype})")
    run_engine(model, tokenizer, name)

    common.heading("3. How wrong attention gets, live: 96 tokens, every layer, everything before it exact")
    names = [key for key in dict.fromkeys(("fp8", "int8_per_token_head", name)) if key != "auto"]
    errors = attention_errors(model, evaluation_tokens(tokenizer, 96), names)
    rows = [[key, f"{sum(e) / len(e):.1%}", f"{max(e):.1%}", e.index(max(e))] for key, e in errors.items()]
    common.table(["", "mean error", "largest", "in layer"], rows)

    common.heading("4. One query among eight keys of sixteen channels, one of them an outlier (the widget)")
    common.say(describe(simulate(WIDGET_DEFAULT)))
    rows = [[f"{bits} bits", *(f["widget"]["outlier_channel"][f"{way}_{bits}"]["found"]
                               for way in ("plain", "rotated", "channel"))] for bits in (4, 3, 2)]  # fmt: skip
    common.table(["keys found, of 8", "one scale per key", "rotated first", "one scale per channel"], rows)

    common.heading("5. The whole table, as recorded (regenerate: --bench): SmolLM2-135M, 2,048 tokens")
    show_table(f["recorded"]["formats"])

    common.heading("6. What 8 bits buy on a GPU, by others' measurements")
    itl, hopper = f["itl"], f["hopper"]["b32_s4096"]
    common.say(f"H100, Llama-3.1-8B: {itl['extra_ms']:.2f} ms more per step, {itl['slope_ratio']:.0%} of the time per "
               f"cached token: pays from {itl['break_even_tokens']:,.0f} tokens of one request on.")  # fmt: skip
    common.say(f"H200, FA3 decode, 32 x 4,096 tokens: {hopper['bf16_us']} -> {hopper['fp8_us']} µs, "
               f"{hopper['speedup']:.2f}x; {hopper['bf16_tb_s']:.2f} -> {hopper['fp8_tb_s']:.2f} TB/s.")  # fmt: skip

    if args.bench:
        common.heading("7. Measured now")
        bench = benchmark(model, tokenizer)
    common.say(f"Figures: {', '.join(path.name for path in draw(args.figure))}")
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": f, "bench": bench})


if __name__ == "__main__":
    common.run(main)

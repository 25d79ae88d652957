"""A step's keys and values, quantized on their way into the pages.

Owns the two kernels that write and the arithmetic that encodes; called by `kv_cache` in every layer. It never reads a
page. vLLM: `vllm/v1/attention/ops/triton_reshape_and_cache_flash.py`, `vllm/v1/attention/ops/int4_per_token_head.py`.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import common
from common import tl, triton

import torch

from engine.quantization.kv_codes import PLANES, KVFormat, PageLayout, as_bytes, codebook, pack, quantize

# --- In Triton: E4M3 in integer arithmetic, and the grids ------------------------------------------------------------
#
# On the bits, since neither the interpreter nor an NVIDIA GPU below 8.9 converts E4M3: this is exact everywhere.
# Encoding: an fp32 number keeps 3 of its 23 mantissa bits. Add half of what falls away, less one bit unless the last
# kept bit is odd: a carry runs into the exponent as it should. Subtract 120 from the exponent: its bias is 127, not 7.
# Below 2^−6 the values are multiples of 2^−9, and adding 2^14 leaves a sum whose last bit is worth exactly that.
# E5M2 keeps 2 bits, and its exponent is 112 less; below 2^−14 its values are multiples of 2^−16.


@triton.jit
def encode_e4m3(x):
    a = tl.minimum(tl.abs(x), 448.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 960 = 120 · 8
    small = (a + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, tl.where(a < 0.015625, small, normal) | sign, 0x7F)


@triton.jit
def encode_e5m2(x):
    a = tl.minimum(tl.abs(x), 57344.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - 448  # 448 = 112 · 4
    small = (a + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, tl.where(a < 6.103515625e-05, small, normal) | sign, 0x7F)


@triton.jit
def round_to_int(x):
    """fp32 |x| < 2^22, nearest, ties to even: 1.5 · 2^23 leaves no bit for a fraction."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def encode(x, scale, mid, table, GRID: tl.constexpr, BITS: tl.constexpr):
    """Codes (int32) of x, given what scales it."""
    if GRID == "e4m3":
        return encode_e4m3(tl.div_rn(x, scale))
    if GRID == "e5m2":
        return encode_e5m2(tl.div_rn(x, scale))
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


def quantize_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: PageLayout,
    head_scales: torch.Tensor,
) -> None:
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
                k,
                v,
                layer,
                layer.view(torch.float16 if fmt.grid == "uniform" else torch.float32),
                slot_mapping,
                head_scales,
                codebook_of(fmt, head_scales),
                k.stride(0),
                v.stride(0),
                layer.stride(0),
                D=D,
                Hkv=Hkv,
                BLOCK_SIZE=layout.block_size,
                PAGE=layout.page,
                GRID=fmt.grid,
                BITS=fmt.bits,
                PER_TOKEN=fmt.per_token,
                FIRST=first,
                FIELDS=fields,
                BYTES=triton.next_power_of_2(D // fields),
                num_warps=1,
            )
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


# --- Kernel 2: quantize the keys of full blocks per channel ----------------------------------------------------------


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


def quantize_channels(
    open_keys: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor, layer: torch.Tensor, layout: PageLayout
) -> None:
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
            open_keys,
            rows,
            blocks,
            layer,
            layer.view(torch.float16),
            D=D,
            Hkv=Hkv,
            BLOCK_SIZE=layout.block_size,
            PAGE=layout.page,
            BITS=fmt.bits,
            TOKENS=triton.next_power_of_2(layout.block_size),
            BYTES=triton.next_power_of_2(D // fields),
            num_warps=4,
        )
        return
    x = open_keys[rows].permute(0, 2, 3, 1)  # [N, Hkv, D, block_size]
    codes, scale, mid = quantize(x, fmt)
    packed = pack(codes.permute(0, 3, 1, 2), fmt.bits).flatten(1)  # [N, block_size · Hkv · bytes]
    layer[0, blocks, : layout.codes] = packed
    layer[0, blocks, layout.codes : layout.codes + 4 * Hkv * D] = as_bytes(scale, mid)

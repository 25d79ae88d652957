"""Decode attention over a quantized cache: codes become numbers in registers, as they are loaded.

Owns the kernel and its tiles; called by `kv_cache` in every layer of a GPU's step. It never writes to the cache; the
sum of its splits is lesson 02's kernel. vLLM: `vllm/v1/attention/ops/triton_unified_attention.py` with KV_QUANT_MODE.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913, PLR0915, C901

from __future__ import annotations

import common
from common import tl, triton

import math

import torch

from engine.attention.splits import combine_splits, default_splits
from engine.quantization.kv_codes import KVFormat, PageLayout
from engine.quantization.kv_write import codebook_of

if common.HAS_TRITON:
    from triton.language.target_info import cuda_capability_geq

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
#
# Decoding E4M3: its exponent and mantissa are those of an fp16 number with a bias of 7 instead of 15: shift, times 2^8.
# E5M2 is the upper half of an fp16 number.


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
def decode_e5m2(byte):
    return (byte.to(tl.int16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def channels(GRID: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr):
    """[D_PAD]: the channel that `load_levels` has in each column; D where it has none."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    c = tl.arange(0, D_PAD)
    word, field = c * WIDTH // 32, c % (32 // WIDTH)
    if GRID != "e4m3" and GRID != "e5m2":  # one from the lower half of the word, one from the upper
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
    if GRID == "e4m3" or GRID == "e5m2":
        word = tl.join(word, word >> 16)
        code = tl.join(word.to(tl.uint8), (word >> 8).to(tl.uint8)).reshape(base.shape[0], D_PAD)
        x = decode_e4m3(code, NATIVE) if GRID == "e4m3" else decode_e5m2(code)
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
        if q_tile.dtype == tl.bfloat16:  # 8 bits become fp16 by one instruction, so q does, too: the largest is 1
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


def quantized_decode(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    layout: PageLayout,
    head_scales: torch.Tensor,
    open_keys: torch.Tensor | None = None,
    open_rows: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
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
    splits = num_splits or default_splits(B * Hkv, max_seq_len, q.device, 8)
    parts, lse = out, out
    if splits > 1:
        parts = torch.empty(B, Hq, splits, D, dtype=torch.float32, device=q.device)
        lse = torch.empty(B, Hq, splits, dtype=torch.float32, device=q.device)
    D_pad = max(16, triton.next_power_of_2(D))
    tile, num_warps, num_stages = decode_tiles(fmt, q.dtype, q.is_cuda and not torch.version.hip)
    quantized_decode_kernel[(B, Hkv, splits)](
        q,
        layer,
        layer.view(torch.float16 if fmt.grid == "uniform" else torch.float32),
        head_scales,
        codebook_of(fmt, head_scales),
        head_scales if open_keys is None else open_keys,
        block_table if open_rows is None else open_rows,
        block_table,
        seq_lens,
        parts,
        lse,
        1 / math.sqrt(D),
        q.stride(0),
        layer.stride(0),
        block_table.stride(0),
        G=Hq // Hkv,
        D=D,
        Hkv=Hkv,
        BLOCK_SIZE=layout.block_size,
        PAGE=layout.page,
        GRID=fmt.grid,
        BITS=fmt.bits,
        PER_TOKEN=fmt.per_token,
        KEY_CHANNELS=fmt.key_channels,
        ROWS=max(16, triton.next_power_of_2(Hq // Hkv)),
        D_PAD=D_pad,
        TILE=tile,
        SPLITS=splits,
        UPCAST=common.INTERPRET,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if splits > 1:
        combine_splits(parts, lse, out)
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

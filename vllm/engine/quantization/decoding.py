"""Codes to numbers and back, inside a kernel: what the kernels on weights of few bits have in common.

Owns the arithmetic on bits; called by the kernels in `dequant_matmul`, `activations` and `scaled_matmul`. It never
loads a code: it is given registers. vLLM: `csrc/quantization/`, `vllm/model_executor/kernels/linear/mixed_precision/`.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

from common import tl, triton

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
        "=r,=r,r",
        [q],
        tl.bfloat16 if BF16 else tl.float16,
        True,
        4,
    )
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

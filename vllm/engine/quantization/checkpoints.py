"""Checkpoints that others quantized: three published layouts of packed codes, and two of 8 bits.

Owns what the files of GPTQ, AWQ, compressed-tensors and DeepSeek's FP8 look like, and a model that multiplies with
codes; called by whoever loads a folder, and by `parallel` for each rank's part. It never rounds a weight.
vLLM: `vllm/model_executor/layers/quantization/`: `auto_gptq.py`, `awq.py`, `compressed_tensors/`, `fp8.py`.
"""

from __future__ import annotations

import common

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch

from engine.experts.layer import MoELayer
from engine.model import folders, llama, weights
from engine.model.config import LlamaConfig
from engine.model.mla import MLAConfig
from engine.quantization.experts import QuantizedExperts
from engine.quantization.formats import FORMATS, Format, Quantized, concatenate
from engine.quantization.linear import QuantizedLinear

# Eight 4-bit codes share an int32; what differs is along which dimension, in which order, and what is stored in place
# of the zero point:
#
#     GPTQ                qweight [K/8, N]   along inputs, in order        qzeros [G, N/8]  z − 1
#     AWQ                 qweight [K, N/8]   along outputs, 0 2 4 6 1 3 5 7 qzeros [G, N/8]  z, in the same order
#     compressed-tensors  weight_packed [N, K/8]  along inputs, in order   weight_zero_point [N/8, G], or none: z = 8
#
# GPTQ also has codes of 8 bits, four in an int32, and of 3, whose 32 fill three without a gap.
# Others do not pack eight bits: these matrices go by the name of what they stand for, with a scale beside them:
#
#     fp8                 weight e4m3 [N, K]          weight_scale_inv [⌈N/128⌉, K/128] (DeepSeek-V3's square blocks)
#     compressed-tensors  weight e4m3 or int8 [N, K]  weight_scale [N, 1], or one number


LAYOUTS = ("gptq", "awq", "compressed-tensors", "fp8")

GPTQ_BITS = (3, 4, 8)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs stands at the lowest 4 bits, the next, …


def unpack_int32(packed: torch.Tensor, order: Sequence[int] | None = None, bits: int = 4) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., 32 n / bits]: codes of 3, 4 or 8 bits, the first in a word's lowest bits.

    `order` [codes of a word]: the one at place i is number order[i] of its word. Of 3 bits, n is a multiple of 3.
    """
    if bits == 3:  # a code may cross from word to word, but eight of them are three bytes
        low, middle, high = packed.contiguous().view(torch.uint8).int().unflatten(-1, (-1, 3)).unbind(-1)
        packed = low | middle << 8 | high << 16
    count = 8 if bits == 3 else 32 // bits
    codes = packed[..., None] >> bits * torch.arange(count, dtype=torch.int32) & (1 << bits) - 1  # [..., n, count]
    if order is not None:
        codes = codes[..., torch.tensor(order).argsort()]
    return codes.flatten(-2).to(torch.uint8)


PARTS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "qkv_a_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "q_b_proj": ("self_attn.q_b_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
    "shared_gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down_proj": ("mlp.shared_expert.down_proj",),
}


def packed_modules(name: str, mla: MLAConfig | None = None) -> list[str]:
    """Transformers' names of the parts of a packed layer: layers.0.qkv_proj -> layers.0.self_attn.q_proj, …"""
    prefix, _, last = name.rpartition(".")
    parts = [f"{prefix}.{part}" for part in PARTS.get(last, ())]
    return parts if mla is None or mla.q_lora_rank else [part.replace("q_a_proj", "q_proj") for part in parts]


Lookup = Callable[[str], torch.Tensor | None]  # a tensor by its name, or None


def stored_layout(folder: Path) -> tuple[str, int | None, list[int] | None]:
    """(one of LAYOUTS, bits of the codes if int32 words hold several, the sides of a scale's block if it has any).

    Raises InputError for what is not read here.
    """
    quantization = folders.read_json(folder / "config.json").get("quantization_config") or {}
    layout = quantization.get("quant_method")
    if layout not in LAYOUTS:
        raise common.InputError(f"{folder}: quant_method {layout!r}; allowed: {', '.join(LAYOUTS)}")
    bits, widths = quantization.get("bits", 4), GPTQ_BITS if layout == "gptq" else (4,)
    if layout in ("gptq", "awq") and (type(bits) is not int or bits not in widths):
        raise common.InputError(f"{folder}: bits {bits!r}; allowed for {layout}: {', '.join(map(str, widths))}")
    if layout == "gptq" and (version := quantization.get("checkpoint_format") or "gptq") != "gptq":
        raise common.InputError(f"{folder}: checkpoint_format {version!r}; allowed: 'gptq' (version 2 stores z itself)")
    block = quantization.get("weight_block_size")
    whole = type(block) is list and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if block is not None and not whole:
        raise common.InputError(f"{folder}: weight_block_size {block!r}; allowed: two positive whole numbers")
    known = ("pack-quantized", "float-quantized", "int-quantized")
    if layout == "compressed-tensors" and quantization.get("format") not in known:
        raise common.InputError(f"{folder}: format {quantization.get('format')!r}; allowed: {', '.join(known)}")
    if layout == "compressed-tensors":
        bits = 4  # `read_layer` sees from the shapes whether that is so
    packed = layout in ("gptq", "awq") or quantization.get("format") == "pack-quantized"
    return layout, bits if packed else None, block


def checkpoint_tensors(folder: Path, get: Lookup) -> tuple[Lookup, dict[str, Quantized]]:
    """(a lookup of float weights by name, the codes that it has met so far, by the prefix of their names).

    `get` looks up what a folder in one of LAYOUTS stores. Raises InputError for others.
    """
    layout, bits, block = stored_layout(folder)
    codes: dict[str, Quantized] = {}

    def lookup(name: str) -> torch.Tensor | None:
        plain = get(name)
        floats = plain is not None and plain.dtype.itemsize > 1
        if floats or not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            return plain  # a layer that was left as it is
        prefix = name.removesuffix(".weight")
        if plain is not None:
            codes[prefix] = read_eight_bits(plain, get, prefix, block)
        elif bits:
            codes[prefix] = read_layer(layout, get, prefix, bits)
        return codes[prefix].dequantize() if prefix in codes else None

    return lookup, codes


def read_layer(layout: str, get: Lookup, prefix: str, bits: int = 4) -> Quantized:
    """A layer of a checkpoint, from its tensors. Codes of 3 bits come back in 4, which are the same numbers.

    Raises InputError for tensors that are missing, not of `bits`, or ordered by activation.
    """

    def need(name: str) -> torch.Tensor:
        if (tensor := get(f"{prefix}.{name}")) is None:
            raise common.InputError(f"weights: tensor {prefix}.{name} is missing")
        return tensor

    zero: torch.Tensor | None = None
    if layout == "compressed-tensors":
        packed, scale, K = need("weight_packed"), need("weight_scale"), int(need("weight_shape")[1])
        if packed.shape[1] != -(-K // 8):
            words = f"{prefix}.weight_packed has {packed.shape[1]} words for {K} inputs"
            raise common.InputError(f"weights: {words}; allowed: 8 inputs in a word, of 4 bits each")
        codes = unpack_int32(packed)[:, :K]
        if (packed := get(f"{prefix}.weight_zero_point")) is not None:
            zero = unpack_int32(packed.T).T[: len(codes)]
    else:
        scale = need("scales").T
        if layout == "gptq":
            qweight, qzeros = need("qweight").T, need("qzeros")
            if bits == 3 and (qweight.shape[1] % 3 or qzeros.shape[1] % 3):
                found = f"{qweight.shape[1]} rows, its qzeros {qzeros.shape[1]} columns"
                raise common.InputError(f"weights: {prefix}.qweight has {found}; allowed for 3 bits: multiples of 3")
            codes = unpack_int32(qweight, bits=bits)  # [N, K]
            zero = (unpack_int32(qzeros, bits=bits) + 1 & (1 << bits) - 1).T
        else:
            codes, zero = unpack_int32(need("qweight"), AWQ_ORDER).T, unpack_int32(need("qzeros"), AWQ_ORDER).T
        if zero.shape != scale.shape:
            found = f"{list(zero.shape)} zero points of {bits} bits for {list(scale.shape)} scales"
            raise common.InputError(f"weights: {prefix} has {found}; allowed: as many")
    group = codes.shape[1] // scale.shape[1]
    name = f"{prefix}.weight_g_idx" if layout == "compressed-tensors" else f"{prefix}.g_idx"
    order = get(name)
    if order is not None and not torch.equal(order.long(), torch.arange(len(order)) // group):
        raise common.InputError(f"weights: {name} regroups the inputs (desc_act); allowed: groups in order")
    kept = max(bits, 4)  # kernels take 4 and 8
    f = Format(f"int{kept}-g{group}", "int", kept, group, "fp16", None if zero is None else "int")
    return Quantized(f, codes.contiguous(), scale.half().contiguous(), None if zero is None else zero.contiguous())


def read_eight_bits(weight: torch.Tensor, get: Lookup, prefix: str, block: Sequence[int] | None = None) -> Quantized:
    """A layer whose matrix [N, K] is there in 8 bits, and its scales: one for each `block` of outputs and inputs, for
    each output, or for all. Activations stay floats here, also where the file says how vLLM is to round them.

    Raises InputError for other types and scales.
    """
    grid = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}.get(weight.dtype)
    scale = get(f"{prefix}.weight_scale_inv" if block else f"{prefix}.weight_scale")
    if grid is None or scale is None or get(f"{prefix}.weight_zero_point") is not None:
        kind, allowed = str(weight.dtype).removeprefix("torch."), "float8_e4m3fn or int8 around zero, and its scale"
        raise common.InputError(f"weights: {prefix}.weight is {kind}; allowed: {allowed} beside it")
    (N, K), codes, f = weight.shape, weight.view(torch.uint8), FORMATS[grid]
    rows, columns = block or (1, K)
    if not block and scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(N, 1)
    if scale.shape != (-(-N // rows), K // columns) or K % columns:
        found, allowed = list(scale.shape), f"one for {rows} outputs and {columns} inputs"
        raise common.InputError(f"weights: {prefix} is {N} x {K}, its scales are {found}; allowed: {allowed}")
    if block:
        f = dataclasses.replace(f, name=f"{grid}-g{columns}", group=columns)
    scale = scale.float().repeat_interleave(rows, 0)[:N].contiguous()
    return Quantized(f, (codes ^ 128 if grid == "int8" else codes).contiguous(), scale)


def load_checkpoint(folder: Path, dtype: torch.dtype = torch.float32, generation_config: str = "auto") -> llama.Llama:
    """A Llama folder whose linear layers are codes in one of LAYOUTS. Raises InputError for others."""
    config = LlamaConfig.from_folder(folder, True, generation_config)
    with contextlib.ExitStack() as stack:
        tensors, codes = checkpoint_tensors(folder, weights.open_weights(folder, stack))
        model = llama.Llama(config, tensors, dtype)
    return on_codes(model, codes)


def on_codes(model: llama.Llama, codes: dict[str, Quantized]) -> llama.Llama:
    """A copy that multiplies with `codes`, by Transformers' names. A packed layer needs those of all of its parts."""
    quantized = copy.copy(model)
    quantized.linear = dict(model.linear)
    for name, layer in model.linear.items():
        names = [f"model.{part}" for part in packed_modules(name, model.config.mla)]
        if names and codes.keys() >= set(names):
            layer = cast(llama.Linear, layer)  # codes are for what is a matrix of floats so far
            together = concatenate([codes[part] for part in names]).to(layer.weight.device)
            if together.codes.shape != layer.weight.shape:
                shapes = f"{list(layer.weight.shape)}, its codes are {list(together.codes.shape)}"
                raise common.InputError(f"quantization: {name} is {shapes}")
            quantized.linear[name] = QuantizedLinear(together, layer.bias)
    quantized.moe = {i: experts_on_codes(layer, codes, f"model.layers.{i}.mlp") for i, layer in model.moe.items()}
    return quantized


def experts_on_codes(layer: MoELayer, codes: dict[str, Quantized], prefix: str) -> MoELayer:
    """The layer, whose experts multiply with their codes; all of them have some, or none. Raises InputError."""
    names = [f"{prefix}.experts.{expert}" for expert in layer.experts.held]
    wanted = [f"{name}.{part}" for name in names for part in ("gate_proj", "up_proj", "down_proj")]
    missing = [name for name in wanted if name not in codes]
    if len(missing) == len(wanted):
        return layer
    if missing:
        raise common.InputError(f"quantization: {missing[0]} has no codes, and other experts of its layer have")
    device = layer.gate.device
    gate_up = [concatenate([codes[f"{name}.gate_proj"], codes[f"{name}.up_proj"]]).to(device) for name in names]
    down = [codes[f"{name}.down_proj"].to(device) for name in names]
    return dataclasses.replace(layer, experts=QuantizedExperts(layer.experts.held, gate_up, down))

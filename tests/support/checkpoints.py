"""Folders as quantizers leave them, written by hand from the published layouts."""

from __future__ import annotations

import dataclasses
import json

import torch
from safetensors.torch import save_file

from engine.model import llama
from engine.quantization import checkpoints
from engine.quantization.algorithms import rtn
from engine.quantization.formats import Format


def pack_by_hand(codes, order):
    """Eight codes of the last dimension into an int32, one shift at a time."""
    out = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for word in range(out.shape[-1]):
        for place, which in enumerate(order):
            out[..., word] |= codes[..., 8 * word + which].long() << 4 * place
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def pack_words(codes, bits):
    """Codes of a row as one long number, the first one lowest, cut into words of 32 bits: int32 [rows, K · bits/32].

    That is AutoGPTQ's order. At 3 bits its words end within the codes 10 and 21: they hold two bits of the first and
    one of the second.
    """
    words = []
    for row in codes.tolist():
        number = sum(code << bits * i for i, code in enumerate(row)).to_bytes(len(row) * bits // 8, "little")
        words.append(torch.frombuffer(bytearray(number), dtype=torch.int32))
    return torch.stack(words)


def checkpoint_layer(layout, q):
    """A layer's tensors in exactly the published layout, from codes [N, K], scales and zeros [N, G]."""
    straight, awq = range(8), (0, 2, 4, 6, 1, 3, 5, 7)
    if layout == "gptq":
        bits, group = q.format.bits, torch.arange(q.codes.shape[1], dtype=torch.int32) // q.format.group
        return {"qweight": pack_words(q.codes, bits).T, "qzeros": pack_words(q.zero.T - 1 & (1 << bits) - 1, bits),
                "scales": q.scale.T, "g_idx": group}  # fmt: skip
    if layout == "awq":
        return {"qweight": pack_by_hand(q.codes.T, awq), "qzeros": pack_by_hand(q.zero.T, awq), "scales": q.scale.T}
    tensors = {"weight_packed": pack_by_hand(q.codes, straight), "weight_scale": q.scale,
               "weight_shape": torch.tensor(q.codes.shape)}  # fmt: skip
    if q.zero is not None:
        tensors["weight_zero_point"] = pack_by_hand(q.zero.T, straight).T
    return tensors


def eight_bit_layer(layout, W):
    """A layer's tensors in 8 bits, and what they stand for: fp8 in blocks of 48 outputs and 32 inputs."""
    kind, largest = (torch.int8, 127) if layout.startswith("int") else (torch.float8_e4m3fn, 448)
    rows, columns = {"fp8": (48, 32), "one scale": W.shape}.get(layout, (1, W.shape[1]))
    scale = torch.stack([torch.stack([block.abs().amax() / largest for block in part.split(columns, 1)])
                         for part in W.split(rows)]).to(torch.bfloat16)  # fmt: skip
    spread = scale.float().repeat_interleave(rows, 0)[: len(W)].repeat_interleave(columns, 1)
    stored = (W / spread).clamp(-largest, largest)
    stored = (stored.round() if kind is torch.int8 else stored).to(kind)
    name = "weight_scale_inv" if layout == "fp8" else "weight_scale"
    return {"weight": stored, name: scale.squeeze() if layout == "one scale" else scale}, stored.float() * spread


QUANTIZATION = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 32]},
    "float-quantized": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "int-quantized": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "one scale": {"quant_method": "fp8", "activation_scheme": "static"},
}
EIGHT_BITS = ("fp8", "float-quantized", "int-quantized", "one scale")


def write_checkpoint(folder, layout, symmetric=False, **config):
    """A folder as the quantizer of `layout` leaves it: packed linear layers, everything else in floats."""
    cpu = torch.device("cpu")
    model = llama.random_model(hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=32, device=cpu)
    c = model.config
    tensors = {"model.embed_tokens.weight": model.embed_tokens, "model.norm.weight": model.norm}
    expected = {}
    bits = config["bits"] if config.get("bits") in (3, 8) else 4  # a wrong one is what the file says, not what it has
    f = Format("x", "int", bits, 32, "fp16", None if symmetric else "int")
    for i in range(c.num_hidden_layers):
        tensors[f"model.layers.{i}.input_layernorm.weight"] = model.input_norm[i]
        tensors[f"model.layers.{i}.post_attention_layernorm.weight"] = model.post_attention_norm[i]
    rows = dict(q_proj=128, k_proj=64, v_proj=64, o_proj=64, gate_proj=128, up_proj=128, down_proj=64)
    for name, layer in model.linear.items():
        if not (parts := checkpoints.packed_modules(name)):
            continue  # the output matrix
        sizes = [rows[part.rpartition(".")[2]] for part in parts]
        for part, W in zip(parts, layer.weight.split(sizes)):
            if layout in EIGHT_BITS:
                stored, expected[f"model.{part}"] = eight_bit_layer(layout, W)
            else:
                q = rtn(W, f)
                stored, expected[f"model.{part}"] = checkpoint_layer(layout, q), q.dequantize()
            tensors |= {f"model.{part}.{k}": t for k, t in stored.items()}
    fields = dataclasses.asdict(c) | {"architectures": ["LlamaForCausalLM"], "eos_token_id": None}
    fields["quantization_config"] = QUANTIZATION[layout] | config
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({k: t.contiguous().clone() for k, t in tensors.items()}, folder / "model.safetensors")
    return model, expected

"""Weights stored as a library's matrix product reads them: what a CPU multiplies fastest with.

Owns the packed copy of a layer; called by whoever puts a runner together. It never changes a model that it is given.
vLLM: `vllm/model_executor/layers/utils.py:dispatch_cpu_unquantized_gemm`.
"""

from __future__ import annotations

import common

import copy

import torch

from engine.model import llama


class PackedLinear:
    """y = x Wᵀ (+ b), with W stored as a library's matrix product reads it: MKL's on Intel, oneDNN's elsewhere."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.mkl = weight.dtype == torch.float32 and torch.backends.mkl.is_available() and "Intel" in common.cpu_name()
        self.packed: torch.Tensor | None = None
        self.pack()
        self.most_rows: float = 128  # of more, MKL's product is faster with W as it was: 04c

    def pack(self) -> None:
        """From the weight as it is now."""
        pack = torch.ops.mkl._mkl_reorder_linear_weight if self.mkl else torch.ops.mkldnn._reorder_linear_weight
        self.packed = pack(self.weight, 32)  # tuned for 32 rows; right for any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.mkl:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        if (rows := x.shape[:-1].numel()) > self.most_rows:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        return torch.ops.mkl._mkl_linear(x, self.packed, self.weight, self.bias, rows)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Is there a library here that packs such weights, and multiplies with them?"""
    here, is_bf16 = device.type == "cpu" and torch.backends.mkldnn.is_available(), dtype == torch.bfloat16
    return here and (torch.ops.mkldnn._is_mkldnn_bf16_supported() if is_bf16 else dtype == torch.float32)


def pack_weights(model: llama.Llama) -> llama.Llama:
    """The same model with every linear layer packed, where a CPU can do that; `model` itself is left alone."""
    if not packs(model.device, model.dtype):
        return model
    packed = copy.copy(model)
    packed.linear = dict(model.linear)
    for name, layer in model.linear.items():
        if (
            isinstance(layer, llama.Linear) and type(layer) is llama.Linear
        ):  # one that a lesson has replaced knows itself how to multiply
            kept = vars(layer)  # so that a second engine on the same model starts at once
            if "packed" not in kept:
                kept["packed"] = PackedLinear(layer.weight, layer.bias)
            packed.linear[name] = kept["packed"]
    return packed

"""The matrix products of a step, timed alone: with these weights, on this machine, nothing is faster.

Owns the stopwatch around them; called by tours and numbers, for the floor under a measured step. It never attends or
samples. vLLM: `benchmarks/kernels/benchmark_machete.py` times products of its own.
"""

from __future__ import annotations

import common

import functools
from collections.abc import Callable, Sequence

import torch

from engine.model import llama
from engine.model.packed_linear import pack_weights
from lab import timing

BATCHES = (1, 4, 8, 32)  # tokens in a step


def matmul_seconds(model: llama.Llama, rows: int, head_rows: int) -> float:
    """The matrix products of one step and nothing else: `rows` tokens through every layer, `head_rows` to logits."""
    widths = {layer.weight.shape[1] for layer in model.linear.values()}
    inputs = {K: torch.randn(rows, K, dtype=model.dtype, device=model.device) for K in widths}

    def products() -> None:
        for name, layer in model.linear.items():
            layer(inputs[layer.weight.shape[1]][: head_rows if name == "lm_head" else rows])

    with torch.inference_mode():
        return timing.measure(products).median


def floor_seconds(model: llama.Llama, num_seqs: int, n_in: int, n_out: int) -> float:
    """The products of `num_seqs` prompts of `n_in` tokens with `n_out` outputs each, and nothing else."""
    packed = pack_weights(model)
    prefill = matmul_seconds(packed, num_seqs * n_in, num_seqs)
    return prefill + (n_out - 1) * matmul_seconds(packed, num_seqs, num_seqs)


def one_by_one(work: Sequence[Callable]) -> list[torch.Tensor]:
    """What each of them computes."""
    return [each() for each in work]


def measure_linears(variants: dict[str, llama.Llama], seconds: float) -> list[dict[str, str | float]]:
    """Of models with weights in other formats: milliseconds of all linear layers of the blocks, one after another, at
    M tokens; float layers as engines run them (on a CPU packed)."""
    found: list[dict[str, str | float]] = [{"method": name} for name in variants]
    for row, model in zip(found, variants.values()):
        c, layers = model.config, pack_weights(model).linear
        inputs = {"down_proj": c.intermediate_size, "o_proj": c.num_attention_heads * c.head_dim}
        widths = {n: inputs.get(n.split(".")[-1], c.hidden_size) for n in layers if n != "lm_head"}
        for M in BATCHES:
            x = {K: torch.randn(M, K, dtype=model.dtype, device=model.device) for K in widths.values()}
            work = [functools.partial(layers[n], x[K]) for n, K in widths.items()]
            row[f"ms_{M}"] = timing.measure(functools.partial(one_by_one, work), seconds).median * 1e3
    common.table(
        ["linear layers, ms", *(f"M = {M}" for M in BATCHES)],
        [[row["method"], *(f"{row[f'ms_{M}']:.1f}" for M in BATCHES)] for row in found],
    )
    return found

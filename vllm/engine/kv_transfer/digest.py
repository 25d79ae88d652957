"""Tells models of one shape apart by what their keys and values depend on.

Owns how a model's weights are added up; called by connectors when an engine starts. It never changes a weight.
vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py` (there, a hash of the configuration alone).
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch

SAMPLE = 61  # every 61st input, or output: training and rounding change nearly all weights of a matrix, not a few


def weights_digest(model: Any) -> str:
    """Tells models of one shape apart by what their keys and values depend on: all weights but the output matrix, and
    what a config says of windows and of the choice of experts.

    Equal on all ranks, and however many there are: each adds up the bits of a sample of its part, and then they add up
    their sums. These are whole numbers, which have one sum in any order. All ranks must call this. Weights
    that ranks have rounded for themselves are others for another number of them, where a scale spans the cut; so is
    their digest.
    """
    c, group = model.config, getattr(model, "group", None)
    rank, ranks = (group.rank_in_group, group.world_size) if group else (0, 1)

    def total(x: torch.Tensor) -> torch.Tensor:
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return x.contiguous().view(whole[x.element_size()]).sum()

    sums, grids = [total(model.embed_tokens[:, ::SAMPLE])], set()  # a grid is what a layer rounds its inputs to
    norms = model.norms[: len(model.norms) - len(model.sinks)]
    sums += [total(norm) * (rank == 0) for norm in norms]  # whole on every rank: one of them counts
    sums += [total(sinks) for sinks in model.sinks]  # by heads
    for name, layer in model.linear.items():
        if name == "lm_head":
            continue
        layer = getattr(layer, "local", layer)  # lesson 05c: this rank's part
        matrix = layer.weight if layer.weight is not None else getattr(layer, "packed", layer).codes  # lesson 05b
        if type(matrix.data) is not torch.Tensor:  # torchao's
            matrix = matrix.dequantize()
        by_inputs = name.endswith(("o_proj", "down_proj"))  # so are they cut, and others by outputs
        copies = max(1, ranks // c.num_key_value_heads) if name.endswith("qkv_proj") else 1
        mine = slice(model.num_heads * c.head_dim if rank % copies else None)  # a neighbour counts the same KV head
        if name.endswith("qkv_a_proj") and rank:  # latents are made on every rank: the first one counts
            mine = slice(0 if c.mla.q_lora_rank else model.num_heads * c.mla.qk_head_dim)
        bias = 0 if layer.bias is None else total(layer.bias[mine])
        sums.append(total(matrix[::SAMPLE] if by_inputs else matrix[mine, ::SAMPLE]) + bias)
        grids.add(str(getattr(layer, "grid", None)))
    for mla in model.mla.values():
        sums += [total(norm) * (rank == 0) for norm in (mla.q_norm, mla.kv_norm) if norm is not None]
        sums.append(total(mla.kv_b[:, ::SAMPLE]))  # by heads, and so by outputs
    for moe in model.moe.values():
        gates = (moe.gate, moe.gate_bias, moe.correction, moe.shared_gate)
        sums += [total(gate) * (rank == 0) for gate in gates if gate is not None]  # whole on every rank
        gate_up, down = moe.experts.matrices  # this rank's part
        sums += [total(gate_up[..., ::SAMPLE]), total(down[:, ::SAMPLE])]
        sums += [total(bias) for bias in moe.experts.tensors[2:]]  # behind those two; codes have none
    found = torch.stack(sums)
    found = group.all_reduce(found) if group else found
    here = {"expert_parallel": None, "held": None, "eplb_step_interval": 0, "num_redundant_experts": 0}
    rules = c.moe and dataclasses.replace(c.moe, **here)  # who is asked, wherever it is
    made_of = (found.tolist(), sorted(grids), c.rope_theta, c.rope_scaling, c.rms_norm_eps, c.sliding_windows, rules)
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]

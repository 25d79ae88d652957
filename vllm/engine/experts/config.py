"""The numbers that shape a mixture of experts, from a folder's `config.json`.

Owns which fields each family has for them, and refuses values that make no layer; `model/config.py` calls it. It never
reads a weight. vLLM: `vllm/model_executor/layers/fused_moe/config.py`.
"""

from __future__ import annotations

import common

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MoEConfig:
    """The layers of experts of one model, which are all alike."""

    num_experts: int  # E
    top_k: int  # experts that a token visits
    intermediate_size: int  # I, of one expert
    renormalize: bool = True  # the weights of a token's experts add up to one
    scoring: str = "softmax"  # or "sigmoid": every expert by itself, as in DeepSeek-V3
    router_in_fp32: bool = False  # whatever the model computes in
    corrected: bool = False  # experts are chosen by their score and a correction, a weight of the router
    num_expert_group: int = 1  # experts lie in so many groups, and a token visits
    topk_group: int = 1  # those of so many of them
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0  # of the expert that every token visits; 0: there is none
    shared_gate: bool = False  # and what it says is weighted, token by token: Qwen2's
    bias: bool = False  # of the router, and of every matrix of an expert: gpt-oss
    activation: str = "silu"  # one of `layer.ACTIVATIONS`
    dense_layers: tuple[int, ...] = ()  # these have one MLP, as every layer of a Llama
    expert_parallel: str | None = None  # None: a rank has a slice of every expert; else one of ALL2ALL_BACKENDS
    eplb_step_interval: int = 0  # experts move after so many steps; 0: they stay where they are
    num_redundant_experts: int = 0  # slots that a layer has beyond one for each expert
    held: range | None = None  # the experts that a rank has; None: all

    @property
    def experts_held(self) -> range:
        """The experts whose weights are here."""
        return range(self.num_experts) if self.held is None else self.held

    def of_stage(self, start: int, end: int) -> MoEConfig:
        """For the layers [start, end), counted from `start`."""
        dense = tuple(layer - start for layer in self.dense_layers if start <= layer < end)
        return dataclasses.replace(self, dense_layers=dense)


# What Transformers takes for a field that `config.json` leaves out.
ABSENT: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                  "shared_expert_intermediate_size": 5632},
    "gpt_oss": {"num_experts": 128, "num_experts_per_tok": 4},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "deepseek_v2": {"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2},
    "deepseek_v3": {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
                    "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
                    "norm_topk_prob": True, "routed_scaling_factor": 2.5},
}  # fmt: skip


def read_moe_config(raw: Mapping[str, Any], family: str, where: Any) -> MoEConfig | None:
    """The layers of experts of a `config.json`; None for a family that has none. Raises InputError."""
    if family not in ABSENT:
        return None
    given = ABSENT[family] | {name: value for name, value in raw.items() if value is not None}
    positive = functools.partial(_whole, where)
    if family in ("deepseek_v2", "deepseek_v3"):
        return _deepseek(given, family == "deepseek_v3", where)
    named = {name: raw[name] for name in ("num_experts", "num_local_experts") if raw.get(name) is not None}
    if len(set(map(repr, named.values()))) > 1:
        raise common.InputError(f"{where}: num_experts is {named['num_experts']!r}, num_local_experts another number")
    alike = family in ("mixtral", "gpt_oss")  # every layer has experts, and their weights add up to one
    size = "intermediate_size" if alike else "moe_intermediate_size"
    shared = "shared_expert_intermediate_size" if family == "qwen2_moe" else None
    num_experts = next(iter(named.values()), given["num_experts"])

    renormalize = True if alike else given.get("norm_topk_prob", False)
    if type(renormalize) is not bool:
        raise common.InputError(f"{where}: norm_topk_prob is {renormalize!r}, expected true or false")
    num_experts = positive("num_experts", num_experts, 2**16)
    return MoEConfig(
        num_experts,
        positive("num_experts_per_tok", given["num_experts_per_tok"], num_experts),
        positive(size, given.get(size)),
        renormalize,
        shared_intermediate_size=positive(shared, given[shared]) if shared else 0,
        shared_gate=shared is not None,
        bias=family == "gpt_oss",
        activation="swiglu_oai" if family == "gpt_oss" else "silu",
        dense_layers=() if alike else _dense_layers(given, where, positive),
    )


def _whole(where: Any, name: str, value: Any, most: int = 2**24, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise common.InputError(f"{where}: {name} is {value!r}, expected a whole number from {least} to {most}")
    return value


def _deepseek(given: Mapping[str, Any], v3: bool, where: Any) -> MoEConfig:
    """V3 takes sigmoids and a correction; V2 a softmax, with groups only if `topk_method` says so."""
    whole = functools.partial(_whole, where)
    num_experts = whole("n_routed_experts", given["n_routed_experts"], 2**16)
    top_k = whole("num_experts_per_tok", given.get("num_experts_per_tok"), num_experts)
    width = whole("moe_intermediate_size", given["moe_intermediate_size"])
    layers = whole("num_hidden_layers", given.get("num_hidden_layers"))
    dense = whole("first_k_dense_replace", given.get("first_k_dense_replace", 0), least=0)
    groups, best = 1, 1
    method = "noaux_tc" if v3 else given.get("topk_method", "greedy")
    if method not in ("noaux_tc", "greedy", "group_limited_greedy"):
        raise common.InputError(
            f"{where}: topk_method is {method!r}; allowed: {'noaux_tc' if v3 else 'greedy, group_limited_greedy'}"
        )
    if method != "greedy":
        groups = whole("n_group", given.get("n_group"), num_experts)
        best = whole("topk_group", given.get("topk_group"), groups)
        if num_experts % groups or top_k > best * num_experts // groups or (v3 and num_experts < 2 * groups):
            raise common.InputError(
                f"{where}: n_group {groups} must divide n_routed_experts ({num_experts}), and {best} of the groups "
                f"must have {top_k} experts; a group of V3 has at least two"
            )
    renormalize, factor = given.get("norm_topk_prob", False), given.get("routed_scaling_factor", 1.0)
    if type(renormalize) is not bool:
        raise common.InputError(f"{where}: norm_topk_prob is {renormalize!r}, expected true or false")
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise common.InputError(f"{where}: routed_scaling_factor is {factor!r}, expected a number above 0")
    return MoEConfig(
        num_experts,
        top_k,
        width,
        renormalize,
        scoring="sigmoid" if v3 else "softmax",
        router_in_fp32=True,
        corrected=v3,
        num_expert_group=groups,
        topk_group=best,
        routed_scaling_factor=factor,
        shared_intermediate_size=width * whole("n_shared_experts", given["n_shared_experts"], 64, 0),
        dense_layers=tuple(range(min(dense, layers))),
    )


def _dense_layers(given: Mapping[str, Any], where: Any, positive: Any) -> tuple[int, ...]:
    """Layers without experts: those that are named, and all but every `decoder_sparse_step`-th."""
    step, named = positive("decoder_sparse_step", given.get("decoder_sparse_step", 1)), given.get("mlp_only_layers", [])
    layers = range(positive("num_hidden_layers", given.get("num_hidden_layers")))
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise common.InputError(f"{where}: mlp_only_layers is {named!r:.60}, expected a list of layers")
    return tuple(layer for layer in layers if layer in named or (layer + 1) % step)

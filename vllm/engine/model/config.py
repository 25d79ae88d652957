"""The numbers that shape a Llama, from a folder's `config.json` and from what its other files know better.

Owns which families are supported and which fields would change logits; the loader calls it. It never reads a weight
but to compare two. vLLM: `vllm/transformers_utils/config.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import torch

from engine.experts.config import MoEConfig, read_moe_config
from engine.model.folders import read_json
from engine.model.mla import MLAConfig, read_mla_config
from engine.model.rope import is_positive, rope_type
from engine.model.tokenizer import special_tokens
from engine.model.weights import open_weights

# Names of one model. Mistral's has Llama's layers; Qwen2's has biases, for queries, keys and values alone; Qwen3's has
# none, and norms every head of a query and of a key. Six have experts in the place of an MLP. Of these, gpt-oss has
# sinks, of each head a score that takes its part of every softmax, and DeepSeek's two keep latents in the place of keys
# and values.
FAMILIES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
            "Qwen3ForCausalLM": "qwen3", "MixtralForCausalLM": "mixtral", "Qwen2MoeForCausalLM": "qwen2_moe",
            "Qwen3MoeForCausalLM": "qwen3_moe", "GptOssForCausalLM": "gpt_oss",
            "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3"}  # fmt: skip
# What Transformers, and so vLLM, takes for a field that `config.json` leaves out.
ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "eos_token_id": 2, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {
        "max_position_embeddings": 131072,
        "eos_token_id": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "qwen2_moe": {"max_position_embeddings": 32768, "num_key_value_heads": 16},
    "qwen3_moe": {"max_position_embeddings": 32768, "num_key_value_heads": 4},
    "deepseek_v2": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "deepseek_v3": {"max_position_embeddings": 4096, "eos_token_id": 1},
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
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
    "mixtral": {},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3_moe": {},
    # In some, vLLM and Transformers do not agree on what else they mean; no DeepSeek has another value.
    "deepseek_v2": {
        "attention_bias": False,
        "mlp_bias": False,
        "norm_topk_prob": False,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
    },
    "deepseek_v3": {
        "attention_bias": False,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
    },
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
}
LATENT = ("deepseek_v2", "deepseek_v3")  # families with latent attention
NEUTRAL_ROPE = {"partial_rotary_factor": 1, "rope_dim": None, "use_fope": False}


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
    attention_sinks: bool = False  # gpt-oss's
    moe: MoEConfig | None = None  # its layers of experts, if it has any
    # Of each layer, how many positions a query sees, its own among them; None: all. Empty: every layer sees all.
    sliding_windows: tuple[int | None, ...] = ()
    mla: MLAConfig | None = None  # if it keeps latents: then Hkv is 1, and D the size of one

    @classmethod
    def from_folder(cls, folder: Path, quantized: bool = False, generation_config: str = "auto") -> LlamaConfig:
        """What `config.json` says, and what other files of the folder know better: which tokens end an answer, and
        whether the output matrix is the embedding.

        `quantized` is for callers who can read weights that are codes: companion 05b. `generation_config` may name
        another folder whose `generation_config.json` counts. Raises InputError for another architecture, or for a
        field that would change logits and that this file does not implement.
        """
        where = folder / "config.json"
        raw = read_json(where)
        family = _family(folder, raw)
        _check_neutral(str(folder), raw, NEUTRAL | NEUTRAL_IN[family])
        stored = raw.get("quantization_config")
        decoded = family == "gpt_oss" and isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"
        if stored and not (quantized or decoded):  # a gpt-oss's experts become floats when they are read
            raise common.InputError(f"{folder}: quantization_config is not supported here; allowed: float weights")
        given = ABSENT[family] | raw
        # The second since Transformers 5.
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or ABSENT[family].get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise common.InputError(f"{where}: rope_parameters is {rope!r}, expected an object")
        eos_token_ids, tokenizer_has_eos = _eos_token_ids(folder, given.get("eos_token_id"), generation_config)
        attention_bias, mlp_bias = _biases(folder, raw, family)
        tied = raw.get("tie_word_embeddings", False)
        if tied is True:  # of two different matrices in the file, both were trained
            tied = _same(*_stored(folder, "lm_head.weight", "model.embed_tokens.weight"))
        mla = read_mla_config(raw, where) if family in LATENT else None
        kept = {"num_key_value_heads": 1, "head_dim": mla.latent_size} if mla else {}
        try:
            heads = raw["num_attention_heads"]
            config = cls(
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                num_hidden_layers=raw["num_hidden_layers"],
                num_attention_heads=heads,
                num_key_value_heads=(given | kept).get("num_key_value_heads") or heads,
                head_dim=(given | kept).get("head_dim")
                or ABSENT[family].get("head_dim")
                or raw["hidden_size"] // heads,
                max_position_embeddings=_scaled_context(given["max_position_embeddings"], rope),
                rms_norm_eps=given.get("rms_norm_eps", 1e-6),
                rope_theta=float(rope.get("rope_theta") or given.get("rope_theta") or 10000.0),
                rope_scaling=_rope_scaling(folder, raw, rope),
                tie_word_embeddings=tied,
                eos_token_ids=eos_token_ids,
                tokenizer_has_eos=tokenizer_has_eos,
                attention_bias=attention_bias,
                mlp_bias=mlp_bias,
                qkv_bias=family in ("qwen2", "qwen2_moe"),
                qk_norm=family in ("qwen3", "qwen3_moe"),
                attention_sinks=family == "gpt_oss",
                moe=read_moe_config(raw, family, where),
                sliding_windows=_sliding_windows(folder, raw, family, given["max_position_embeddings"]),
                mla=mla,
            )
        except KeyError as error:
            raise common.InputError(f"{where}: field {error} is missing") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise common.InputError(f"{where}: {error}") from None
        config._check(where)
        # What is not in the vocabulary is never written.
        known = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < config.vocab_size)
        named = tokenizer_has_eos and known[:1] == eos_token_ids[:1]
        return dataclasses.replace(config, eos_token_ids=known, tokenizer_has_eos=named or not known)

    def _check(self, where: Path) -> None:
        """Raises InputError for a field of a wrong type or outside its range."""
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise common.InputError(f"{where}: {field} is {value!r}, expected a positive integer")
        for field, kinds, expected in (
            ("rms_norm_eps", (int, float), "a number"),
            ("tie_word_embeddings", (bool,), "true or false"),
            ("attention_bias", (bool,), "true or false"),
            ("mlp_bias", (bool,), "true or false"),
        ):
            if type(value := getattr(self, field)) not in kinds:
                raise common.InputError(f"{where}: {field} is {value!r}, expected {expected}")
        for field, low, high in (
            ("max_position_embeddings", 1, 2**24),
            ("rms_norm_eps", 0, 1),
            ("rope_theta", 2, 1e12),
        ):
            if not low <= (value := getattr(self, field)) <= high:
                raise common.InputError(f"{where}: {field} is {value!r}, expected {low} to {high:g}")
        if self.mla and (kind := rope_type(self.rope_scaling)) not in ("default", "yarn"):  # vLLM takes any for YaRN
            raise common.InputError(f"{where}: rope_scaling type {kind!r} is not supported here; allowed: yarn")
        if self.num_attention_heads % self.num_key_value_heads or self.rotary_dim % 2:
            raise common.InputError(
                f"{where}: num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}, and head_dim {self.head_dim} must be even"
            )

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts in the place of an MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def window(self, layer: int) -> int | None:
        """How many positions a query of this layer sees, its own among them; None: all."""
        return self.sliding_windows[layer] if self.sliding_windows else None

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
        raise common.InputError(
            f"{folder}: architecture {', '.join(map(str, named))} is not supported; allowed: {', '.join(FAMILIES)}"
        )
    return family


def _check_neutral(where: str, raw: dict[str, Any], neutral: dict[str, Any]) -> None:
    """Raises InputError for a field that is there and changes logits."""
    for field, harmless in neutral.items():
        if (value := raw.get(field, harmless)) not in (harmless, None) or (value is None and field == "hidden_act"):
            allowed = "null" if harmless is None else json.dumps(harmless)
            raise common.InputError(f"{where}: {field} {value!r} is not supported; allowed: {allowed}")


def _sliding_windows(folder: Path, raw: dict[str, Any], family: str, context: Any) -> tuple[int | None, ...]:
    """How many positions a query sees in each layer, None: all of them; empty if that is so in every layer. A window as
    long as the `context` hides nothing. Raises InputError."""
    layers = raw["num_hidden_layers"]
    if type(layers) is not int:
        return ()  # refused later, by its name
    types = raw.get("layer_types") or [
        "sliding_attention" if _slides(raw, family, layer) else "full_attention" for layer in range(layers)
    ]
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or not set(map(str, types)) <= known or len(types) < layers:
        raise common.InputError(
            f"{folder}: layer_types {types!r:.80} is not supported; allowed: of each layer full_attention or "
            "sliding_attention"
        )
    window = raw.get("sliding_window", WINDOW.get(family, 4096))
    if not window or "sliding_attention" not in types or (family in USES and not raw.get("use_sliding_window", False)):
        return ()
    if type(window) is not int or window < 1:
        raise common.InputError(f"{folder}: sliding_window is {window!r}, expected null or a positive integer")
    if type(context) is int and window >= context:
        return ()
    if family in NO_WINDOWS:
        raise common.InputError(
            f"{folder}: sliding_window {window}: Transformers gives a {family} none, and vLLM may; allowed: null, or "
            f"the context ({context}) and more"
        )
    if raw.get("layer_types") and family in ALL_ALIKE and "full_attention" in types[:layers]:
        raise common.InputError(f"{folder}: layer_types of a {family} are all alike; allowed: none of them named")
    return tuple(window if kind == "sliding_attention" else None for kind in types[:layers])


WINDOW = {"llama": None, "mixtral": None, "gpt_oss": 128} | dict.fromkeys(LATENT)  # where a config has none
NO_WINDOWS = ("llama", *LATENT)
ALL_ALIKE = ("mistral", "mixtral", "qwen3_moe")  # families of which every layer slides, or none
USES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")  # families that must be told to use a window


def _slides(raw: dict[str, Any], family: str, layer: int) -> bool:
    """Whether a layer has a window where `layer_types` does not say: Transformers' rule for each family."""
    if family in ALL_ALIKE:
        return True
    if family == "gpt_oss":
        return layer % 2 == 0
    later = raw.get("max_window_layers", 28)
    if type(later) is not int:
        return family not in NO_WINDOWS
    if family in ("qwen2", "qwen3"):
        return layer >= later
    return family == "qwen2_moe" and layer % 2 == 0 and layer < later


def _biases(folder: Path, raw: dict[str, Any], family: str) -> tuple[Any, Any]:
    """attention_bias and mlp_bias, as far as a family reads them."""
    attention, mlp = raw.get("attention_bias", family == "gpt_oss"), raw.get("mlp_bias", False)
    if family == "llama":
        return attention, mlp
    if family == "mistral" and (attention or mlp):
        # vLLM reads the fields and Transformers does not. So here there are those biases that are in the file.
        q, gate = _stored(folder, "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.gate_proj.bias")
        return q is not None and attention, gate is not None and mlp
    return family in ("qwen3", "qwen3_moe", "gpt_oss") and attention, False


def _stored(folder: Path, *names: str) -> list[torch.Tensor | None]:
    """Some of a folder's weights; None for those that are not there, or not readable, as `open_weights` will say."""
    with contextlib.suppress(common.InputError), contextlib.ExitStack() as stack:
        tensors = open_weights(folder, stack)
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
        text = (folder / "tokenizer.json").read_text("utf-8")
        # It is hardly ever a piece of the vocabulary, whose reading takes a quarter of a second.
        if begin := re.search(r'"added_tokens"\s*:\s*', text):
            added, _ = json.JSONDecoder().raw_decode(text, begin.end())
            if (token_id := {token["content"]: token["id"] for token in added or ()}.get(name)) is not None:
                return token_id
        vocab = json.loads(text)["model"]["vocab"]
        if isinstance(vocab, list):  # a Unigram model's: pieces and what they weigh
            vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
        return vocab.get(name)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None  # `Tokenizer` says what is wrong with it


def read_generation_config(folder: Path, source: str = "auto") -> dict[str, Any] | None:
    """What `generation_config.json` says, or None if there is none: the folder's own, or, if `source` is neither
    "auto" nor "vllm", that of the folder `source`. Raises InputError."""
    own = source in ("auto", "vllm")
    path = (folder if own else Path(source)) / "generation_config.json"
    if own and not path.is_file():
        return None
    return read_json(path)


def _scaled_context(positions: Any, rope: dict[str, Any]) -> Any:
    """Positions with linear scaling, which fits `factor` of them into one. Other kinds count them in already."""
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    if kind == "linear" and type(positions) is int and is_positive(factor):  # otherwise refused later
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

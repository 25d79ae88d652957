"""A GGUF file of the Llama architecture, written once as a Hugging Face folder.

Owns the names, the order of rows and the tokenizer's parts; `folders` calls it for the default model, and for a file
that `--model` names. It never loads a model. vLLM: `vllm/model_executor/model_loader/gguf_loader.py`.
"""

from __future__ import annotations

import common

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

KNOWN = {
    "general.architecture": ("llama",),
    "tokenizer.ggml.model": ("gpt2",),
    "tokenizer.ggml.pre": ("smollm",),
    "llama.rope.scaling.type": (None, "none"),
}


def gguf_reader(path: Path) -> Any:
    """`gguf.GGUFReader`, three times as fast: it slices the file a million times, and a memory map is slow at that."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        data = property(lambda self: self.plain, lambda self, mapped: setattr(self, "plain", mapped.view(np.ndarray)))

    return Reader(path)


def convert_gguf(source: Path, folder: Path) -> None:
    """Write a GGUF file of the Llama architecture as a Hugging Face folder with fp32 weights.

    Quantized tensors, of one type or of several, are decoded to the fp32 values they stand for, so nothing is lost and
    nothing is re-rounded. Raises InputError for what is not read here.
    """
    from rich.console import Console
    from rich.progress import Progress
    from safetensors.torch import save_file

    try:
        reader = gguf_reader(source)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise common.InputError(f"{source}: not readable as GGUF ({error})") from None

    def field(key: str, *default: Any) -> Any:
        if key in reader.fields:
            return reader.fields[key].contents()
        if not default:
            raise common.InputError(f"{source}: field {key} is missing")
        return default[0]

    for key, known in KNOWN.items():
        if (value := field(key, None)) not in known:
            allowed = ", ".join(map(str, known))
            raise common.InputError(f"{source}: {key} is {value!r}; allowed: {allowed}")
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"Preparing {source.stem} (once)", total=len(reader.tensors) + 1)
        weights = {}
        for tensor in reader.tensors:
            name, w = _decode(source, tensor)
            # llama.cpp rotates neighbours (x_2i, x_2i+1), Transformers rotates halves (x_i, x_i+D/2): reorder the rows.
            if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
                n = heads if tensor.name.endswith("attn_q.weight") else kv_heads
                w = w.view(n, -1, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
            weights[name] = w.contiguous()
            progress.advance(task)

        eos, bos = field("tokenizer.ggml.eos_token_id"), field("tokenizer.ggml.bos_token_id")
        theta = float(field("llama.rope.freq_base"))
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": field("llama.vocab_size", len(field("tokenizer.ggml.tokens"))),
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
            "pad_token_id": field("tokenizer.ggml.padding_token_id", eos),
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


def _decode(source: Path, tensor: Any) -> tuple[str, torch.Tensor]:
    """Transformers' name of a tensor of the file, and its weights, fp32."""
    import gguf

    try:
        return _hugging_face_name(tensor.name), torch.from_numpy(
            gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        )
    except (KeyError, IndexError):
        raise common.InputError(f"{source}: no Llama has a tensor {tensor.name!r} here") from None
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise common.InputError(f"{source}: {tensor.name} is {kind}, which nothing here decodes") from None


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


def _write_tokenizer(field: Callable[..., Any], folder: Path) -> None:
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
        "pad_token": tokens[field("tokenizer.ggml.padding_token_id", field("tokenizer.ggml.eos_token_id"))],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id", field("tokenizer.ggml.eos_token_id"))],
        "chat_template": field("tokenizer.chat_template", None),
        "clean_up_tokenization_spaces": False,
        "model_max_length": field("llama.context_length"),
    })  # fmt: skip


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

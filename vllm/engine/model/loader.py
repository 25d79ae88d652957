"""A model and its tokenizer from a folder of float weights.

Owns the order: config, tokenizer, weights; scripts call it, and `quantization/loader.py` for what is not in few bits.
It never quantizes and never divides a model between ranks. vLLM: `vllm/model_executor/model_loader/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import contextlib

import torch

from engine.model import folders
from engine.model.config import LlamaConfig
from engine.model.dummy_weights import dummy_weights
from engine.model.llama import Llama
from engine.model.tokenizer import Tokenizer
from engine.model.weights import open_weights


def load(
    path_or_id: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    generation_config: str = "auto",
    load_format: str = "auto",
) -> tuple[Llama, Tokenizer]:
    """Model and tokenizer from a local folder or hub id; None is the default model, prepared on first use. With
    `load_format` "dummy", no weights are read."""
    folder = folders.model_folder(path_or_id)
    config = LlamaConfig.from_folder(folder, generation_config=generation_config)
    tokenizer = Tokenizer(folder)
    tokenizer.vocab_size = config.vocab_size
    with contextlib.ExitStack() as stack:
        weights = dummy_weights(config) if load_format == "dummy" else open_weights(folder, stack)
        return Llama(config, weights, dtype, device), tokenizer


def check_context(path_or_id: str | None, tokens: int) -> LlamaConfig:
    """The config of `--model`. Raises InputError if it has fewer positions than the `tokens` that a story takes, or if
    some layer does not see them all."""
    config = LlamaConfig.from_folder(folders.model_folder(path_or_id))
    if (context := config.max_position_embeddings) < tokens:
        raise common.InputError(f"--model: a context of {context} tokens is too short; this story takes {tokens}")
    if config.attention_sinks:
        raise common.InputError("--model: this story's attention has no sinks, and this model's has")
    if (window := min(filter(None, config.sliding_windows), default=tokens)) < tokens:
        raise common.InputError(f"--model: a window of {window} tokens is too short; this story takes {tokens}")
    return config


def find_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """vLLM's names; "auto" is fp32 on a CPU, on a GPU bf16 or, before Ampere, which had none, fp16."""
    has_bf16 = not common.HAS_GPU or torch.cuda.is_bf16_supported(False)  # not in emulation
    narrow = torch.bfloat16 if has_bf16 else torch.float16
    names = {
        "auto": narrow if common.HAS_GPU else torch.float32,
        "float32": torch.float32,
        "float": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "half": torch.float16,
    }
    if isinstance(dtype, torch.dtype):
        found = dtype if dtype in names.values() else None
    else:
        found = names.get(dtype)
    if found is None:
        raise common.InputError(f"dtype {dtype!r}: must be one of {', '.join(names)}")
    if found == torch.bfloat16 and not has_bf16:
        raise common.InputError(f"dtype {dtype!r}: {torch.cuda.get_device_name()} has no bf16; take float16")
    return found

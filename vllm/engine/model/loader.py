"""A model from a folder: floats as they are or quantized here, or codes that are there already.

Owns the choice; called when an engine starts. It never divides a model between ranks. vLLM:
`vllm/model_executor/model_loader/`.
"""

from __future__ import annotations

import common

from pathlib import Path

import torch

import llama
from engine.quantization.checkpoints import load_checkpoint
from engine.quantization.methods import quantize_model


def stored_quantization(folder: Path, asked: str | None) -> str | None:
    """What a folder's weights are in; None: floats. Raises InputError if something else was `asked` for."""
    stored = (llama._read_json(folder / "config.json").get("quantization_config") or {}).get("quant_method")
    if stored is not None and asked not in (None, stored):
        raise common.InputError(f"quantization {asked!r}: {folder.name} has {stored} weights already")
    return stored


def load_model(
    path_or_id: str | None, dtype: torch.dtype, quantization: str | None, generation_config: str = "auto"
) -> tuple[llama.Llama, llama.Tokenizer]:
    """Float weights as they are or quantized here; or weights that are codes already, and whose folder says which."""
    folder = llama.model_folder(path_or_id)
    if stored_quantization(folder, quantization):
        return load_checkpoint(folder, dtype, generation_config), llama.Tokenizer(folder)
    model, tokenizer = llama.load(path_or_id, dtype, generation_config=generation_config)
    if quantization is not None:
        model = quantize_model(model, quantization, tokenizer)
    return model, tokenizer


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

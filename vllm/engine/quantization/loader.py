"""A model from a folder: floats as they are or quantized here, or codes that are there already.

Owns the choice; called when an engine starts. It never divides a model between ranks. vLLM:
`vllm/model_executor/model_loader/`.
"""

from __future__ import annotations

import common

from pathlib import Path

import torch

from engine.model import folders, llama, loader
from engine.model.tokenizer import Tokenizer
from engine.quantization.checkpoints import load_checkpoint
from engine.quantization.methods import quantize_model


def stored_quantization(folder: Path, asked: str | None) -> str | None:
    """What a folder's weights are in; None: floats, or what becomes floats when it is read. Raises InputError if
    something else was `asked` for."""
    stored = (folders.read_json(folder / "config.json").get("quantization_config") or {}).get("quant_method")
    if stored == "mxfp4":  # gpt-oss's published weights: `model/weights.py`
        return None
    if stored is not None and asked not in (None, stored):
        raise common.InputError(f"quantization {asked!r}: {folder.name} has {stored} weights already")
    return stored


def check_load_format(load_format: str, stored: str) -> None:
    """Raises InputError for codes at random, of which nobody knows what they mean."""
    if load_format == "dummy":
        raise common.InputError(f"load_format 'dummy': not for a folder whose weights are {stored}")


def load_model(
    path_or_id: str | None,
    dtype: torch.dtype,
    quantization: str | None,
    generation_config: str = "auto",
    load_format: str = "auto",
) -> tuple[llama.Llama, Tokenizer]:
    """Float weights as they are or quantized here; or weights that are codes already, and whose folder says which."""
    folder = folders.model_folder(path_or_id)
    if stored := stored_quantization(folder, quantization):
        check_load_format(load_format, stored)
        return load_checkpoint(folder, dtype, generation_config), Tokenizer(folder)
    model, tokenizer = loader.load(path_or_id, dtype, generation_config=generation_config, load_format=load_format)
    if quantization is not None:
        model = quantize_model(model, quantization, tokenizer)
    return model, tokenizer

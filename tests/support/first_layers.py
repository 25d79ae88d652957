"""The real model's first layers: its tokens, its weights and its shapes, for a third of the time."""

from __future__ import annotations

import common

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.model import folders, llama
from engine.model.config import LlamaConfig

LAYERS = 4

# In the fast tier the first layers, on demand all thirty: the slow tier has these in stories, clients and servers.
CUT_OR_WHOLE = [pytest.param(LAYERS, id="cut"), pytest.param(None, marks=pytest.mark.long, id="whole")]


def folder_of(layers: int | None, scratch: Path) -> Path:
    """The default model's folder, or one in `scratch` with so many of its layers."""
    whole = folders.model_folder()
    if layers is None:
        return whole
    cut = shutil.copytree(whole, scratch / "cut", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((cut / "config.json").read_text()) | {"num_hidden_layers": layers}
    (cut / "config.json").write_text(json.dumps(config))
    with safe_open(whole / "model.safetensors", "pt") as weights:
        names = llama.tensor_shapes(LlamaConfig.from_folder(cut)).keys() & set(weights.keys())
        save_file({name: weights.get_tensor(name) for name in names}, cut / "model.safetensors")
    return cut


def adapter_of(name: str, scratch: Path) -> Path:
    """A shipped adapter's part for the first layers."""
    whole, cut = common.HERE / "adapters" / name, scratch / name
    shutil.copytree(whole, cut)
    weights = load_file(whole / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if int(name.split(".")[4]) < LAYERS}
    save_file(kept, cut / "adapter_model.safetensors")
    return cut

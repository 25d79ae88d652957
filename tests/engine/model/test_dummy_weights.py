"""Weights at random: of a model's shapes, small, and the same each time."""

from __future__ import annotations

import common

import dataclasses
import json
import shutil

import pytest
import torch

from engine.model import folders, llama, loader
from engine.model.dummy_weights import LARGEST, dummy_weights
from engine.parallel.config import ParallelConfig
from engine.parallel.stages import load_stage, make_groups
from engine.quantization.loader import load_model
from support.latents import COMPRESSED, EXPERTS, latent_model


@pytest.mark.parametrize("changed", [{}, {"tie_word_embeddings": True}, {"qk_norm": True}])
def test_every_weight_of_a_model(tiny_model, changed):
    config = dataclasses.replace(tiny_model.config, **changed)
    tensors = dummy_weights(config)
    for name, shape in llama.tensor_shapes(config).items():
        weight = tensors(name)
        assert tuple(weight.shape) == shape and 0.9 * LARGEST < weight.abs().max() <= LARGEST
        assert torch.equal(weight, dummy_weights(config)(name))
    assert tensors("model.layers.0.self_attn.q_proj.bias").shape == (96,) and tensors("model.layers.9.x.weight") is None
    model = llama.Llama(config, tensors, torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_every_weight_of_a_model_with_latents():
    config = latent_model(COMPRESSED, moe=EXPERTS).config
    tensors = dummy_weights(config)
    for name, shape in llama.tensor_shapes(config).items():
        assert tuple(tensors(name).shape) == shape, name
    assert llama.Llama(config, tensors).moe[1].correction.shape == (8,)


@pytest.fixture
def described(tmp_path):
    """The real model's folder without its weights."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (folders.model_folder(None) / name).exists():
            shutil.copy(folders.model_folder(None) / name, tmp_path / name)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 2, "hidden_size": 72,
                                                                   "intermediate_size": 96}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_folder_without_weights(described):
    with pytest.raises(common.InputError, match=r"model\.safetensors is missing"):
        loader.load(str(described))
    model, tokenizer = load_model(str(described), torch.float32, None, load_format="dummy")
    assert model.config.num_hidden_layers == 2 and tokenizer.encode("Hi")
    stage = load_stage(str(described), torch.float32, *make_groups(None, ParallelConfig()), load_format="dummy")
    assert torch.equal(stage.embed_tokens, model.embed_tokens), "as a worker loads it"


def test_codes_are_not_made_up(described):
    config = json.loads((described / "config.json").read_text())
    (described / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(common.InputError, match="load_format 'dummy': not for a folder whose weights are fp8"):
        load_model(str(described), torch.float32, None, load_format="dummy")

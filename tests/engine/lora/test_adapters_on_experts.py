"""Adapters on a model with experts: on its attention; on an expert, a router or a shared expert they are refused."""

from __future__ import annotations

import common

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.llm_engine import LLMEngine
from engine.lora.config import LoRAConfig
from engine.lora.files import read_adapter, write_adapter
from engine.lora.lora_model import layer_shapes, merged, random_adapter
from engine.model import llama
from engine.quantization.methods import quantize_model
from engine.request import SamplingParams
from lab import naive
from support import mixtures
from support.tokenizing import Words, of_characters

CONFIG_LORA = {"max_loras": 2, "max_lora_rank": 8}


def model_of(family):
    return llama.random_model(device=mixtures.CPU, **mixtures.MIXTURES[family])


@pytest.mark.parametrize("family", mixtures.MIXTURES)
def test_an_adapter_on_attention_is_its_merged_weights(family, monkeypatch):
    of_characters(monkeypatch)
    model = model_of(family)
    adapter = random_adapter(model.config, 4, seed=1, name="a")
    assert {name.split(".")[2] for name in adapter.weights} == {"qkv_proj", "o_proj"} == set(layer_shapes(model.config))
    from engine.config import VllmConfig

    config = VllmConfig(lora_config=LoRAConfig(**CONFIG_LORA))
    engine = LLMEngine(model, Words(), config=config, max_model_len=64, num_gpu_blocks_override=40)
    engine.lora.add_adapter("a", adapter)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for name in (None, "a"):
        engine.add_request(str(name), {"prompt_token_ids": [5, 9, 2]}, params, lora_name=name)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    assert found == {"None": naive.generate(model, [5, 9, 2], 6),
                     "a": naive.generate(merged(model, adapter), [5, 9, 2], 6)}  # fmt: skip
    assert found["a"] != found["None"]


@pytest.mark.parametrize("module", [
    "mlp.experts.0.up_proj", "mlp.gate", "mlp.shared_expert.down_proj", "block_sparse_moe.experts.1.w1", "mlp.up_proj",
])  # fmt: skip
def test_an_adapter_on_an_expert_is_refused_by_name(tmp_path, module):
    config = model_of("qwen3_moe").config
    write_adapter(random_adapter(config, 4, seed=1), tmp_path, alpha=8)
    assert read_adapter(tmp_path, config).rank == 4
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    for letter in "AB":
        tensors[f"base_model.model.model.layers.1.{module}.lora_{letter}.weight"] = torch.zeros(4, 4)
    save_file(tensors, path)
    with pytest.raises(common.InputError) as error:
        read_adapter(tmp_path, config)
    assert f"{module}.lora_A.weight adapts an expert" in str(error.value) and "allowed" in str(error.value)
    assert "q_proj, k_proj, v_proj, o_proj" in str(error.value) and "\n" not in str(error.value)


def test_adapters_beside_codes():
    """Attention has both; experts have their codes."""
    model = quantize_model(llama.random_model(device=mixtures.CPU, seed=3, num_attention_heads=4, num_key_value_heads=2,
                                              head_dim=32, hidden_size=128, moe=mixtures.MIXTURE), "int8")  # fmt: skip
    assert set(layer_shapes(model.config)) == {"qkv_proj", "o_proj"} and naive.generate(model, [5, 9], 2)

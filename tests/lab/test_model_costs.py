"""From a `config.json` to what a step costs: held to published numbers."""

from __future__ import annotations

import common

import json

import pytest

from lab import experts, roofline
from lab.model_costs import KNOWN_MODELS, find_model, model_costs

# Billions of parameters, as the model cards and papers have them.
PUBLISHED = {"Llama-3.1-8B": 8.03, "Llama-3.1-70B": 70.55, "Llama-3.1-405B": 405.85, "Qwen3-32B": 32.76,
             "Qwen3-30B-A3B": 30.53, "Qwen3-235B-A22B": 235.09, "Qwen2.5-7B": 7.62, "Mixtral-8x7B-v0.1": 46.70,
             "Mixtral-8x22B-v0.1": 140.6, "DeepSeek-V3": 671.0, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.8,
             "phi-4": 14.66, "SmolLM2-135M": 0.1345}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name):
    assert model_costs(find_model(name)).num_params / 1e9 == pytest.approx(PUBLISHED[name], rel=2e-3)


def test_a_dense_model_agrees_with_the_roofline():
    costs, config = model_costs(find_model("Llama-3.1-8B")), roofline.MODELS["Llama-3.1-8B"]
    flops, read = roofline.step_cost(config, 3, 1, 100)
    assert costs.kv_bytes_per_token == roofline.KVCacheSpec.from_config(config).bytes_per_token() == 131_072
    assert costs.dense_flops(3, 3) + costs.pair_flops * 300 == pytest.approx(flops, rel=1e-4)  # norms are left out
    assert costs.dense_bytes + 303 * costs.kv_bytes_per_token == pytest.approx(read, rel=1e-4)


def test_a_mixture_agrees_with_the_page_on_experts():
    costs, config = model_costs(find_model("Qwen/Qwen3-30B-A3B")), experts.MODELS["Qwen3-30B-A3B"]
    for tokens in (1, 32, 2048):
        read = costs.dense_bytes + costs.expert_bytes_read(tokens)
        assert read == pytest.approx(experts.step_bytes(config, tokens), rel=1e-3)
    active = experts.parameters(config)["active"]
    assert costs.dense_flops(1, 1) + costs.expert_flops(1) == pytest.approx(2 * active, rel=1e-3)
    assert model_costs(find_model("Qwen3-8B")).expert_bytes_read(8) == 0


def test_latents_windows_and_codes():
    deepseek, oss = (model_costs(find_model(name)) for name in ("DeepSeek-V3", "gpt-oss-20b"))
    assert deepseek.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert deepseek.bytes_kept == deepseek.num_params  # fp8
    assert oss.context_seen(1000, 2) == 500 + 128  # half its layers see 128 tokens of each sequence
    assert oss.context_seen(200, 2) == 200
    assert 13e9 < oss.bytes_kept < 14e9  # experts in 4 bits with scales, the rest in 16
    assert model_costs(find_model("Qwen3-8B"), "fp8").kv_bytes_per_token == 36 * 2 * 8 * 128


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"])
def test_a_model_is_found_by_its_names(name):
    assert find_model(name) == KNOWN_MODELS["meta-llama/Llama-3.1-8B"]


def test_fewer_bits_are_in_the_name():
    full, fp8, awq = (model_costs(find_model(f"Qwen/Qwen3-32B{ending}")) for ending in ("", "-FP8", "-AWQ"))
    assert fp8.bytes_kept == full.bytes_kept / 2 and awq.bytes_kept == full.bytes_kept * 4.25 / 16


def test_a_folder_goes_before_a_model_of_its_name(tmp_path):
    (tmp_path / "Qwen3-8B").mkdir()
    assert find_model(f"{tmp_path / 'Qwen3-8B'}/") == KNOWN_MODELS["Qwen/Qwen3-8B"]
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen/Qwen3-4B"]))
    assert find_model(str(tmp_path / "Qwen3-8B")) == KNOWN_MODELS["Qwen/Qwen3-4B"]


def test_a_model_is_read_from_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen/Qwen3-8B"]))
    assert model_costs(find_model(str(tmp_path))) == model_costs(find_model("Qwen3-8B"))
    wrapped = {"text_config": KNOWN_MODELS["Qwen/Qwen3-8B"]}
    assert model_costs(wrapped) == model_costs(find_model("Qwen3-8B"))


@pytest.mark.parametrize(
    "content, named",
    [
        ("{", "not readable as JSON"),
        ("[]", "JSON object"),
        ('{"hidden_size": 8}', "num_hidden_layers"),
        ('{"num_hidden_layers": "two", "hidden_size": 8, "vocab_size": 3}', "config.json"),
    ],
)
def test_a_wrong_config_is_named_in_one_line(tmp_path, content, named):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(common.InputError, match=named) as caught:
        model_costs(find_model(str(path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("Llama-3.2-1B", {"hidden_size": "2048"}),
        ("Llama-3.2-1B", {"hidden_size": -1}),
        ("Llama-3.2-1B", {"vocab_size": float("nan")}),
        ("Llama-3.2-1B", {"num_key_value_heads": 0}),
        ("Llama-3.2-1B", {"quantization_config": "fp8"}),
        ("Llama-3.2-1B", {"quantization_config": {"bits": -4}}),
        ("Qwen3-30B-A3B", {"num_experts": 4}),
        ("DeepSeek-V3", {"kv_lora_rank": 1.5}),
    ],
)
def test_a_size_that_is_none_is_named_in_one_line(name, wrong):
    with pytest.raises(common.InputError, match=r"config\.json makes no model") as caught:
        model_costs({**find_model(name), **wrong})
    assert "\n" not in str(caught.value)


def test_a_field_that_is_null_counts_as_missing():
    more = {"kv_lora_rank": None, "head_dim": None, "sliding_window": None}
    assert model_costs({**find_model("Llama-3.1-8B"), **more}) == model_costs(find_model("Llama-3.1-8B"))


def test_an_unknown_model_is_told_which_are_known():
    with pytest.raises(common.InputError, match=r"--model 'gpt-5'.*Llama-3\.1-8B"):
        find_model("gpt-5")
    with pytest.raises(common.InputError, match="--model 'aaaa"):
        find_model("a" * 5000)

"""Latent attention in a model: DeepSeek's folders compute what Transformers computes, and what lesson 09 does."""

from __future__ import annotations

import common

import dataclasses
import json
import math
import shutil

import pytest
import torch

from engine.model import llama, loader
from engine.model.config import LlamaConfig
from engine.model.mla import MLAConfig, MLALayer, mscale
from engine.model.rope import rope_factors
from engine.registry import lesson
from lab import experts, naive
from lab.make_model import make_model
from support.close import assert_close

YARN = {"rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16}
KINDS = {  # family, and what differs from the folder that `make-model` writes
    "V2-Lite": ("deepseek_v2", {}),
    "V2": ("deepseek_v2", {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "V2 with YaRN": ("deepseek_v2", {"rope_parameters": YARN | {
        "rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "V3": ("deepseek_v3", {}),
    "V3 without a latent of the query": ("deepseek_v3", {"q_lora_rank": None, "rope_parameters": None}),
    "V3 with one group, as Kimi K2": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "V3 without shared experts": ("deepseek_v3", {"n_shared_experts": 0, "norm_topk_prob": False}),
    "V3 with another context": ("deepseek_v3", {"rope_parameters": YARN | {"rope_type": "yarn"}}),
    "all dense": ("deepseek_v3", {"first_k_dense_replace": 9}),
}  # fmt: skip


SLOW = {"V2 with YaRN", "V3 without a latent of the query", "V3 with another context", "all dense"}


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in KINDS
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_logits_equal_transformers(kind, tmp_path):
    family, sizes = KINDS[kind]
    theirs = make_model(family, tmp_path / "model", vocab_size=300, **sizes)
    model, _ = loader.load(str(tmp_path / "model"), device=torch.device("cpu"))
    ids = torch.randint(300, (90,)).tolist()
    hidden = model.forward(torch.tensor(ids), torch.arange(90), naive.recompute)
    with torch.inference_mode():
        assert_close(model.logits(hidden), theirs(torch.tensor([ids])).logits[0])
    corrections = sum(b.numel() for name, b in theirs.named_buffers() if name.endswith("correction_bias"))
    assert model.num_parameters == sum(p.numel() for p in theirs.parameters()) + corrections
    shapes = llama.tensor_shapes(model.config).values()
    assert sum(torch.Size(shape).numel() for shape in shapes) == model.num_parameters
    assert (model.num_kv_heads, model.config.head_dim) == (1, 48), "what a token leaves: 32 + 16, for all heads"


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_the_lessons_layer_is_this_one(theta):
    """It holds what is cached in the order of its rotation, halves; the engine reads DeepSeek's neighbours."""
    given = lesson("09_gqa")
    config = given.MLAConfig(96, 3, 32, 24, 16, 20, theta)
    layer = given.MLA.random(config, torch.float64)
    hidden, positions = torch.randn(7, 96, dtype=torch.float64, device=common.device()), torch.arange(5, 12)
    q, cached = layer.project(hidden, positions.to(common.device()))
    mine = MLALayer(MLAConfig(32, 16, 24, 20), None, layer.kv_a_norm, layer.kv_b_proj, layer.scale)
    frequencies = theta ** -(torch.arange(0, 16, 2).double() / 16)
    cos, sin = rope_factors(positions.double()[:, None] * frequencies, torch.float64)
    cos, sin = cos.to(common.device()), sin.to(common.device())
    neighbours = torch.arange(16).view(2, 8).T.flatten()  # of halves: x_0, x_8, x_1, x_9, …
    raw = hidden @ layer.kv_a_proj.T
    raw[:, 32:] = raw[:, 32:][:, neighbours]
    queries = (hidden @ layer.q_proj.T).view(7, 3, 40)
    queries[..., 24:] = queries[..., 24:][..., neighbours]
    ours, key = mine.queries_and_keys(queries, raw, cos, sin)
    assert_close(key[:, 0], cached, torch.float32)
    assert_close(ours, layer.absorb(q) * layer.scale * math.sqrt(48), torch.float32)
    o = naive.recompute(0, ours, key, key)
    assert_close(mine.outputs(o).view(7, 3, 20), layer.naive(q, cached), torch.float32)
    assert mine.outputs(o[..., :32]).equal(mine.outputs(o)), "what a backend leaves out is not read"


def test_what_yarn_makes_of_the_scale():
    """V3: factor 40 and mscale_all_dim 1 make every score 1.87 times as large; without the field, nothing."""
    assert mscale({"rope_type": "yarn", "factor": 40, "mscale_all_dim": 1.0}) == pytest.approx(1.3689**2, rel=1e-3)
    for scaling in (None, {}, {"factor": 40}, {"factor": 40, "mscale_all_dim": 0}, {"factor": 1, "mscale_all_dim": 1}):
        assert mscale(scaling) == 1


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not ...}))


WRONG = {  # what is changed in a config.json, and what the error says
    "kv_lora_rank": ({"kv_lora_rank": 0}, "kv_lora_rank is 0, expected a whole number from 1"),
    "v_head_dim": ({"v_head_dim": None}, "v_head_dim is None, expected a whole number"),
    "q_lora_rank": ({"q_lora_rank": 1.5}, "q_lora_rank is 1.5, expected a whole number"),
    "odd": ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 must be even"),
    "another rank": ({"kv_lora_rank": 30}, "kv_a_proj_with_mqa.weight has shape [48, 64], config.json says [46, 64]"),
    "no latent": ({"q_lora_rank": None}, "q_proj.weight is missing"),
    "attention_bias": ({"attention_bias": True}, "attention_bias True is not supported"),
    "scores": ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; allowed: \"sigmoid\""),
    "choice": ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported; allowed: \"noaux_tc\""),
    "halves": ({"rope_interleave": False}, "rope_interleave False is not supported; allowed: true"),
    "rope": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear' is not supported here"),
    "groups": ({"n_group": 3}, "n_group 3 must divide n_routed_experts (8)"),
    "few": ({"topk_group": 1, "num_experts_per_tok": 3}, "1 of the groups must have 3 experts"),
    "alone": ({"n_group": 8, "topk_group": 4}, "a group of V3 has at least two"),
    "topk_group": ({"topk_group": 5}, "topk_group is 5, expected a whole number from 1 to 4"),
    "experts": ({"n_routed_experts": "many"}, "n_routed_experts is 'many', expected a whole number"),
    "top_k": ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected a whole number from 1 to 8"),
    "dense": ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1, expected a whole number from 0"),
    "shared": ({"n_shared_experts": -1}, "n_shared_experts is -1, expected a whole number from 0"),
    "factor": ({"routed_scaling_factor": "2"}, "routed_scaling_factor is '2', expected a number above 0"),
    "renormalize": ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
    "a V2 with sigmoids": ({"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
                            "norm_topk_prob": False,
                            "scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
    "a V2's choice": ({"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "best",
                       "norm_topk_prob": False}, "topk_method is 'best'; allowed: greedy, group_limited_greedy"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_makes_no_layer_is_refused_by_name(tmp_path_factory, tmp_path, what):
    folder = tmp_path_factory.getbasetemp() / "latents to be spoiled"
    if not folder.exists():
        make_model("deepseek_v3", folder, vocab_size=300)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    changes, words = WRONG[what]
    edit(tmp_path, **changes)
    with pytest.raises(common.InputError) as error:
        loader.load(str(tmp_path))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_what_a_config_leaves_out_is_what_transformers_assumes(tmp_path, family):
    from transformers import AutoConfig

    name = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}[family]
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": [name], "model_type": family, "vocab_size": 300, "hidden_size": 256, "intermediate_size": 96,
        "num_hidden_layers": 5, "num_attention_heads": 4, "num_experts_per_tok": 8,
    }))  # fmt: skip
    theirs, config = AutoConfig.from_pretrained(tmp_path), LlamaConfig.from_folder(tmp_path)
    for field in dataclasses.fields(MLAConfig):
        assert getattr(config.mla, field.name) == getattr(theirs, field.name)
    moe = config.moe
    assert (moe.num_experts, moe.intermediate_size) == (theirs.n_routed_experts, theirs.moe_intermediate_size)
    assert moe.shared_intermediate_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert len(moe.dense_layers) == theirs.first_k_dense_replace and moe.renormalize == theirs.norm_topk_prob
    assert (moe.num_expert_group, moe.topk_group) == (theirs.n_group or 1, theirs.topk_group or 1)
    assert moe.routed_scaling_factor == theirs.routed_scaling_factor
    assert config.rope_theta == theirs.rope_parameters["rope_theta"] and config.rms_norm_eps == theirs.rms_norm_eps


PUBLISHED = {  # of each model's own config.json; parameters in billions by its card: all, and those of a token
    "V2-Lite": (15.7, 2.4, {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy", "routed_scaling_factor": 1.0, "q_lora_rank": None, "vocab_size": 102400,
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                         "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}}),
    "V2": (236, 21, {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 5120,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 160, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "q_lora_rank": 1536,
        "vocab_size": 102400,
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                         "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}}),
    "V3": (671, 37, {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "vocab_size": 129280, "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}}),
}  # fmt: skip
ALIKE = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax",
    "attention_bias": False, "hidden_act": "silu", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "tie_word_embeddings": False, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_and_count_what_their_cards_say(tmp_path, name):
    total, active, fields = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(ALIKE | fields))
    config = LlamaConfig.from_folder(tmp_path, quantized=True)
    found = experts.parameters(config)
    assert found["total"] / 1e9 == pytest.approx(total, rel=0.005)
    assert (found["active"] + found["embedding"]) / 1e9 == pytest.approx(active, rel=0.11), "rounded, embedding or not"
    kept = config.num_hidden_layers * 576 * 2
    assert experts.kv_bytes_per_token(config) == kept == {"V3": 70272}.get(name, kept)
    if name == "V3":
        of_lab = experts.MODELS["DeepSeek-V3"]
        assert (config.mla, config.moe) == (of_lab.mla, of_lab.moe)
        assert llama.tensor_shapes(config) == llama.tensor_shapes(of_lab)


def test_16_bits_move_the_logits_by_no_more_than_transformers(tmp_path):
    """The router computes in fp32 there and here: it decides between scores that are nearly equal."""
    theirs = make_model("deepseek_v3", tmp_path / "model", vocab_size=300)
    exact, model = (loader.load(str(tmp_path / "model"), dtype, torch.device("cpu"))[0]
                    for dtype in (torch.float32, torch.bfloat16))  # fmt: skip
    assert model.moe[1].gate.dtype == model.moe[1].correction.dtype == torch.float32
    ids = torch.randint(300, (60,), generator=torch.Generator().manual_seed(2))
    want, ours = (m.logits(m.forward(ids, torch.arange(60), naive.recompute)) for m in (exact, model))
    with torch.inference_mode():
        rounded = theirs.to(torch.bfloat16)(ids[None]).logits[0]
    assert ours.dtype == torch.bfloat16
    assert common.relative_error(ours, want) < 1.25 * common.relative_error(rounded, want)

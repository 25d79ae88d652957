"""Models with experts: each family's folder answers as Transformers does, however the engine batches it."""

from __future__ import annotations

import common

import dataclasses
import json
import shutil

import pytest
import torch

from engine.experts.config import MoEConfig
from engine.llm import LLM
from engine.model import llama, loader
from engine.model.config import LlamaConfig
from engine.model.weights import other_name
from engine.request import SamplingParams
from lab import naive
from lab.make_model import make_model
from support.close import assert_close

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
SERVED = {"qwen3_moe", "deepseek_v3"}  # in the fast tier


@pytest.fixture(scope="module", params=[
    name if name in SERVED else pytest.param(name, marks=pytest.mark.slow)
    for name in (*FAMILIES, "deepseek_v2", "deepseek_v3")
])  # fmt: skip
def family(request, tmp_path_factory):
    """(name, folder, Transformers' model) of a small random model."""
    folder = tmp_path_factory.mktemp("models") / request.param
    return request.param, folder, make_model(request.param, folder)


def logits_of(model, ids):
    positions = torch.arange(len(ids), device=model.device)
    return model.logits(model.forward(torch.tensor(ids, device=model.device), positions, naive.recompute))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name, tmp_path):
    folder = tmp_path / name
    theirs = make_model(name, folder, vocab_size=300)
    model, _ = loader.load(str(folder), device=torch.device("cpu"))
    ids = torch.randint(model.config.vocab_size, (90,)).tolist()
    with torch.inference_mode():
        assert_close(logits_of(model, ids), theirs(torch.tensor([ids])).logits[0])
    assert model.num_parameters == sum(p.numel() for p in theirs.parameters())
    shapes = llama.tensor_shapes(model.config).values()
    assert sum(torch.Size(shape).numel() for shape in shapes) <= model.num_parameters, "all but biases"


LIMITS = {  # arguments of an engine in which 32 requests of 5 to 40 tokens share steps
    "whole": {},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 24},
    "preempted": {"num_gpu_blocks_override": 33, "max_num_seqs": 32},
    "drafted": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
}


@pytest.mark.parametrize("limits", [
    *(pytest.param(name, marks=pytest.mark.long) for name in ("whole", "chunked")),
    pytest.param("drafted", marks=pytest.mark.slow), "preempted",
])  # fmt: skip
def test_32_at_once_are_transformers_tokens(family, limits, monkeypatch):
    """Twice, and the second time prompts are found in the cache. Who is preempted computes all of its tokens again."""
    _, folder, theirs = family
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 49152, (5 + i % 36,), generator=generator).tolist() for i in range(32)]
    llm = LLM(str(folder), max_model_len=128, kv_cache_gib=0.05, **LIMITS[limits])
    scheduler = llm.llm_engine.core.scheduler
    preempted, preempt = [], scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *who: (preempted.append(who), preempt(*who)))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for again in (False, True):
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        answers = [output.outputs[0].token_ids for output in found]
        assert any(output.num_cached_tokens for output in found) or not again or preempted
        if not again:
            first = answers
    assert answers == first and bool(preempted) == (limits == "preempted")
    whole = [prompt + answer for prompt, answer in zip(prompts, answers)]
    with torch.inference_mode():
        for prompt, answer, ids in zip(prompts, answers, whole):
            scores = theirs(torch.tensor([ids[:-1]])).logits[0]
            assert scores[len(prompt) - 1 :].argmax(-1).tolist() == answer


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not ...}))


WRONG = {  # what is changed in a config.json, and what the error says
    "num_local_experts": ({"num_local_experts": 0}, "num_experts is 0, expected a whole number from 1"),
    "twice": ({"num_experts": 4}, "num_experts is 4, num_local_experts another number"),
    "num_experts_per_tok": ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected a whole number from 1 to"),
    "size": ({"moe_intermediate_size": "wide"}, "moe_intermediate_size is 'wide'"),
    "norm_topk_prob": ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
    "decoder_sparse_step": ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    "mlp_only_layers": ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all', expected a list of layers"),
    "window": ({"use_sliding_window": True, "sliding_window": -16}, "sliding_window is -16, expected null or"),
    "another number": ({"num_local_experts": 9}, "mlp.experts.8.gate_proj.weight is missing"),
    "another width": ({"moe_intermediate_size": 32}, "gate_proj.weight has shape [48, 64], config.json says [32, 64]"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_makes_no_layer_is_refused_by_name(tmp_path_factory, tmp_path, what):
    folder = tmp_path_factory.getbasetemp() / "to be spoiled"
    if not folder.exists():
        make_model("qwen3_moe", folder, vocab_size=300)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    changes, words = WRONG[what]
    edit(tmp_path, **changes)
    with pytest.raises(common.InputError) as error:
        loader.load(str(tmp_path))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_what_a_config_leaves_out_is_what_transformers_assumes(tmp_path, family):
    from transformers import AutoConfig

    from engine.model import config as ours

    name = next(name for name, kind in ours.FAMILIES.items() if kind == family)
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": [name], "model_type": family, "vocab_size": 300, "hidden_size": 256, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 32,
    }))  # fmt: skip
    theirs, config = AutoConfig.from_pretrained(tmp_path), LlamaConfig.from_folder(tmp_path)
    moe = config.moe
    num_experts = theirs.num_experts if family == "qwen2_moe" else theirs.num_local_experts
    assert (moe.num_experts, moe.top_k) == (num_experts, theirs.num_experts_per_tok)
    assert moe.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert moe.renormalize == getattr(theirs, "norm_topk_prob", True)
    assert moe.shared_intermediate_size == getattr(theirs, "shared_expert_intermediate_size", 0)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"] and config.rms_norm_eps == theirs.rms_norm_eps


def test_which_layers_have_experts(tmp_path):
    """Every second, and of these not those that are named: counted in a stage from its first layer."""
    folder = tmp_path / "model"
    theirs = make_model(
        "qwen3_moe", folder, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3], vocab_size=99
    )
    model, _ = loader.load(str(folder), device=torch.device("cpu"))
    assert [*model.moe] == [1, 5] == [i for i, layer in enumerate(theirs.model.layers) if hasattr(layer.mlp, "experts")]
    ids = [5, 1, 77, 98]
    with torch.inference_mode():
        assert_close(logits_of(model, ids), theirs(torch.tensor([ids])).logits[0])
    moe = model.config.moe
    assert moe.dense_layers == (0, 2, 3, 4) and moe.of_stage(2, 6).dense_layers == (0, 1, 2)


def test_names_of_one_tensor():
    assert other_name("model.layers.3.mlp.gate.weight") == "model.layers.3.block_sparse_moe.gate.weight"
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = other_name(f"model.layers.3.mlp.experts.17.{ours}.qweight")
        assert name == f"model.layers.3.block_sparse_moe.experts.17.{theirs}.qweight"
    assert other_name("m.mlp.shared_expert.up_proj.weight") == "m.mlp.shared_experts.up_proj.weight"


def test_a_random_model_has_every_tensor_of_its_shapes():
    moe = MoEConfig(4, 2, 24, shared_intermediate_size=16, shared_gate=True, dense_layers=(0,))
    model = llama.random_model(moe=moe)
    assert (
        [*model.moe] == [1] and "layers.1.down_proj" not in model.linear and "layers.1.shared_down_proj" in model.linear
    )
    assert model.num_parameters == sum(torch.Size(s).numel() for s in llama.tensor_shapes(model.config).values())
    held = llama.tensor_shapes(dataclasses.replace(model.config, moe=dataclasses.replace(moe, held=range(1, 3))))
    assert {name.split(".")[5] for name in held if ".experts." in name} == {"1", "2"}

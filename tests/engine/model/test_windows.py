"""Layers with a window: each family's folder answers as Transformers does, however the engine batches it."""

from __future__ import annotations

import common

import dataclasses
import json

import pytest
import torch

from engine.attention.metadata import AttentionMetadata
from engine.attention.windowed import WindowedAttention
from engine.config import VllmConfig
from engine.llm import LLM
from engine.model import loader
from engine.model.config import LlamaConfig
from engine.quantization.loader import load_model
from engine.request import SamplingParams
from engine.worker.assemble import attention_of
from lab.make_model import make_model
from support.close import assert_close

WINDOW = 20
SLIDES = {  # which of three layers have the window
    "mistral": (True, True, True), "mixtral": (True, True, True), "qwen3_moe": (True, True, True),
    "qwen2": (False, True, True), "qwen3": (False, True, True), "qwen2_moe": (True, False, True),
    "gpt_oss": (True, False, True),  # which has sinks, too
}  # fmt: skip


def logits_of(model, ids):
    """A prompt in one step, on blocks of 4 tokens."""
    meta = AttentionMetadata.build([range(1, 1 + -(-len(ids) // 4))], [len(ids)], [len(ids)], 4, model.device)
    attention = WindowedAttention([range(model.config.num_hidden_layers)])
    cache = attention.make_cache(model, 60, 4)
    ids = torch.tensor(ids, device=model.device)
    return model.logits(model.forward(ids, meta.positions, attention.plan(meta, cache)))


@pytest.mark.parametrize("name", [
    "mistral", "qwen3", "gpt_oss",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "qwen3_moe", "qwen2", "qwen2_moe")),
])  # fmt: skip
def test_logits_equal_transformers(name, tmp_path):
    theirs = make_model(name, tmp_path / "m", window=WINDOW, vocab_size=300)
    model, _ = loader.load(str(tmp_path / "m"), device=torch.device("cpu"))
    assert model.config.sliding_windows == tuple(WINDOW if slides else None for slides in SLIDES[name])
    ids = torch.randint(300, (90,)).tolist()
    with torch.inference_mode():
        assert_close(logits_of(model, ids), theirs(torch.tensor([ids])).logits[0])


# --- In the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "qwen2_moe", "qwen3")), "gpt_oss",
])  # fmt: skip
def family(request, tmp_path_factory):
    """(folder, Transformers' model) of a small random model."""
    folder = tmp_path_factory.mktemp("models") / request.param
    return folder, make_model(request.param, folder, window=WINDOW)


LIMITS = {  # arguments of an engine in which 32 requests of 5 to 75 tokens share steps
    "whole": {},
    "chunked": {"max_num_batched_tokens": 37, "max_num_seqs": 24},
    "preempted": {"num_gpu_blocks_override": 33, "max_num_seqs": 32},
    "drafted": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
}


@pytest.mark.parametrize("limits", [
    *(pytest.param(name, marks=pytest.mark.long) for name in ("whole", "chunked")),
    pytest.param("drafted", marks=pytest.mark.slow), "preempted",
])  # fmt: skip
def test_32_at_once_are_transformers_tokens(family, limits, monkeypatch):
    """Twice, and the second time prompts are found in the cache. Who is preempted computes all of its tokens again."""
    folder, theirs = family
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 49152, (5 + 70 * i // 31,), generator=generator).tolist() for i in range(32)]
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
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers):
            scores = theirs(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
            assert scores[len(prompt) - 1 :].argmax(-1).tolist() == answer


def test_memory_is_that_of_a_groups_layers(tmp_path):
    """Three groups of a layer each: a block has the bytes of one layer, and a sequence takes blocks of all three."""
    make_model("qwen3", tmp_path / "m", window=WINDOW, vocab_size=99)
    about = {"kv_cache_memory_bytes": 1 << 18, "max_num_batched_tokens": 32, "max_num_seqs": 8, "block_size": 4}
    llm = LLM(str(tmp_path / "m"), max_model_len="auto", **about)
    core, one = llm.llm_engine.core, 2 * 4 * 2 * 32 * 4
    memory = {layer.data_ptr(): layer.nbytes for layer in core.runner.cache.layers}
    assert [*memory.values()] == [one * (1 + (1 << 18) // one)] and core.scheduler.kv_cache_manager.managers[2:]
    context = core.scheduler.config.max_model_len  # 128 blocks, of which each window takes (19 + 32) / 4 and one
    assert context == 4 * (128 - 2 * 14)
    out = llm.generate([{"prompt_token_ids": [5] * (context - 1)}], SamplingParams(max_tokens=1))
    assert len(out[0].outputs[0].token_ids) == 1
    with pytest.raises(
        common.InputError, match="num_blocks 50: must be at least 54, for one sequence of max_model_len"
    ):
        LLM(str(tmp_path / "m"), max_model_len=100, num_gpu_blocks_override=50, **about)


def test_a_windows_blocks_serve_others(tmp_path):
    """A Mistral's long answer in a pool that is far smaller than it."""
    theirs = make_model("mistral", tmp_path / "m", window=WINDOW, vocab_size=99)
    about = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "block_size": 4, "num_gpu_blocks_override": 11}
    llm = LLM(str(tmp_path / "m"), max_model_len=400, **about)
    prompt = list(range(9, 50))
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    answer = output.outputs[0].token_ids
    with torch.inference_mode():
        scores = theirs(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
    assert len(answer) == 300 and scores[len(prompt) - 1 :].argmax(-1).tolist() == answer


# --- What a config says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "words"), [
    ({"sliding_window": 2.5}, "sliding_window is 2.5, expected null or a positive integer"),
    ({"sliding_window": -1}, "sliding_window is -1, expected"),
    ({"layer_types": ["full_attention"]}, "layer_types .* is not supported; allowed: of each layer"),
    ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types of a mistral are all alike"),
], ids=str)  # fmt: skip
def test_what_makes_no_window_is_refused_by_name(tmp_path, changes, words):
    config = {"architectures": ["MistralForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
              "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
              "sliding_window": 16}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert LlamaConfig.from_folder(tmp_path).sliding_windows == (16, 16, 16)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(common.InputError, match=words):
        LlamaConfig.from_folder(tmp_path)


@pytest.mark.parametrize("about", [{"kv_cache_dtype": "fp8"}, {"attention_backend": "paged"},
                                   {"plug": {"attention": object}}], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", [{"sliding_windows": (8, None)}, {"attention_sinks": True}], ids=str)
def test_attention_that_knows_no_windows_is_refused_by_name(about, kind, tiny_model):
    windowed = dataclasses.replace(tiny_model.config, **kind)
    with pytest.raises(
        common.InputError, match=f"{next(iter(about))}.*: not for a model whose layers have windows or sinks"
    ):
        attention_of(windowed, VllmConfig(**about))


def test_a_story_that_knows_no_windows_takes_no_shorter_one(tmp_path):
    make_model("mistral", tmp_path / "m", window=WINDOW, vocab_size=99)
    loader.check_context(str(tmp_path / "m"), WINDOW)
    with pytest.raises(common.InputError, match="--model: a window of 20 tokens is too short; this story takes 21"):
        loader.check_context(str(tmp_path / "m"), WINDOW + 1)
    make_model("gpt_oss", tmp_path / "s", vocab_size=99)
    with pytest.raises(common.InputError, match="--model: this story's attention has no sinks, and this model's has"):
        loader.check_context(str(tmp_path / "s"), 2)


# --- gpt-oss ----------------------------------------------------------------------------------------------------------


def gpt_oss_config(**changes):
    return {"architectures": ["GptOssForCausalLM"], "vocab_size": 300, "hidden_size": 256, "intermediate_size": 96,
            "num_hidden_layers": 4, "num_attention_heads": 8} | changes  # fmt: skip


def test_what_a_gpt_oss_leaves_out(tmp_path):
    """Every second layer slides, from the first on; a window of 128; YaRN by 32; biases."""
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(gpt_oss_config(model_type="gpt_oss")))
    theirs, config = AutoConfig.from_pretrained(tmp_path), LlamaConfig.from_folder(tmp_path)
    assert config.sliding_windows == (128, None, 128, None) and theirs.sliding_window == 128
    assert [t == "sliding_attention" for t in theirs.layer_types] == [True, False, True, False]
    assert config.attention_sinks and config.moe.bias and config.moe.activation == "swiglu_oai"
    assert config.attention_bias is theirs.attention_bias is True
    theirs = dict(theirs.rope_parameters)
    assert (theirs.pop("rope_theta"), theirs) == (config.rope_theta, config.rope_scaling)


@pytest.mark.parametrize(("changes", "words"), [
    ({"swiglu_limit": 5.0}, r"swiglu_limit 5.0 is not supported; allowed: 7.0"),
    ({"swiglu_alpha": 1.0}, r"swiglu_alpha 1.0 is not supported; allowed: 1.702"),
    ({"num_local_experts": 0}, "num_experts is 0"),
], ids=str)  # fmt: skip
def test_another_gpt_oss_is_refused_by_name(tmp_path, changes, words):
    (tmp_path / "config.json").write_text(json.dumps(gpt_oss_config(**changes)))
    with pytest.raises(common.InputError, match=words):
        LlamaConfig.from_folder(tmp_path)


def test_its_published_weights_are_decoded_when_they_are_read(tmp_path):
    """MXFP4: two codes in a byte, a scale for 32 of them. Transformers' own decoder says what they mean."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, generator = tmp_path / "m", torch.Generator().manual_seed(2)
    theirs = make_model("gpt_oss", folder, vocab_size=99, intermediate_size=96)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = tensors.pop(name).shape
        blocks = torch.randint(256, (E, N, K // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(122, 126, (E, N, K // 32), generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        theirs.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path, stored = folder / "config.json", {"quant_method": "mxfp4", "modules_to_not_convert": []}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    model, _ = load_model(str(folder), torch.float32, None)
    ids = torch.randint(99, (60,), generator=generator).tolist()
    with torch.inference_mode():
        assert_close(logits_of(model, ids), theirs(torch.tensor([ids])).logits[0])
    path.write_text(path.read_text().replace("mxfp4", "gptq"))
    with pytest.raises(common.InputError, match="quantization_config is not supported here"):
        LlamaConfig.from_folder(folder)


def test_experts_with_biases_are_not_quantized_here(tmp_path):
    """No kernel of few bits knows biases and the cut gate."""
    make_model("gpt_oss", tmp_path / "m", vocab_size=99)
    with pytest.raises(common.InputError, match="--quantization int8: not for experts with biases"):
        load_model(str(tmp_path / "m"), torch.float32, "int8")


def test_dummy_weights_have_sinks_and_biases(tmp_path):
    make_model("gpt_oss", tmp_path / "m", vocab_size=99)
    model, _ = loader.load(str(tmp_path / "m"), load_format="dummy", device=torch.device("cpu"))
    assert len(model.sinks) == 3 and model.moe[0].gate_bias is not None
    assert model.num_parameters == loader.load(str(tmp_path / "m"), device=torch.device("cpu"))[0].num_parameters

"""A prompt's vector, through the engine's own scheduler and batch: what Transformers makes of the same tokens."""

from __future__ import annotations

import common

import json
import random

import numpy as np
import pytest
import torch

from engine.llm_engine import LLMEngine
from engine.request import PoolingParams, SamplingParams
from engine.sampling.pooler import PoolerConfig

PROMPTS = [random.Random(n).choices(range(128), k=n) for n in (1, 5, 16, 17, 40, 63)]


def pooled(engine, prompts, **params):
    """The vectors of all prompts at once, [B, hidden], beside two requests that write."""
    for i, prompt in enumerate(prompts):
        engine.add_request(f"v{i}", prompt, PoolingParams(**params))
    for i in range(2):
        engine.add_request(f"w{i}", [7 + i] * 9, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output
    assert all(len(found.pop(f"w{i}").outputs[0].token_ids) == 6 for i in range(2))
    assert all(
        output.outputs[0].finish_reason == "stop" and not output.outputs[0].token_ids for output in found.values()
    )
    manager = engine.core.scheduler.kv_cache_manager
    assert not manager.req_to_blocks and not engine.core.runner.pooler.sums
    return np.stack([np.frombuffer(found[f"v{i}"].pooling_output, "<f4") for i in range(len(prompts))])


def dense(model, prompt, kind):
    """Every token with every one before it, and no cache."""
    ids = torch.tensor(prompt)

    def attend(layer, q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)

    hidden = model.final_norm(model.forward(ids, torch.arange(len(ids)), attend))
    vector = hidden[-1] if kind == "LAST" else hidden.mean(0)
    return (vector / vector.norm()).numpy()


@pytest.fixture
def make(tiny_model, real_model):
    def engine(**named):
        named = {"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 73} | named
        return LLMEngine(tiny_model, real_model[1], **named)

    return engine


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
@pytest.mark.parametrize("named", [
    {}, {"max_num_batched_tokens": 8}, {"num_gpu_blocks_override": 10},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
])  # fmt: skip
def test_whole_or_in_chunks_or_in_turn_or_beside_drafts(make, tiny_model, kind, named):
    found = pooled(make(**named), PROMPTS, pooling_type=kind)
    for vector, prompt in zip(found, PROMPTS):
        assert np.linalg.norm(vector - dense(tiny_model, prompt, kind)) < common.TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_a_prompt_that_is_cached_has_the_same_vector(make, kind):
    engine = make()
    first, again = pooled(engine, PROMPTS, pooling_type=kind), pooled(engine, PROMPTS, pooling_type=kind)
    assert np.abs(first - again).max() < 1e-5


def test_as_it_is_and_cut_short(make):
    plain = pooled(make(), PROMPTS, use_activation=False)
    unit = pooled(make(), PROMPTS)
    short = pooled(make(), PROMPTS, dimensions=8)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.allclose(plain / lengths, unit, atol=1e-6) and (np.abs(lengths - 1) > 0.1).all()
    cut = plain[:, :8]
    assert np.allclose(cut / np.linalg.norm(cut, axis=1, keepdims=True), short, atol=1e-6)


def test_one_that_is_aborted_leaves_nothing(make):
    engine = make(max_num_batched_tokens=8)
    engine.add_request("v", [1] * 40, PoolingParams("MEAN"))
    engine.step()
    assert engine.core.runner.pooler.sums
    engine.abort_request(["v"])
    pooled(engine, PROMPTS[:2])


def test_what_a_server_pools_by(tmp_path):
    assert PoolerConfig.of(None, None) == PoolerConfig.of(tmp_path, None) == PoolerConfig("LAST", True)
    assert PoolerConfig.of(None, '{"pooling_type": "MEAN"}') == PoolerConfig("MEAN", True)
    assert PoolerConfig.of(None, {"seq_pooling_type": "MEAN", "use_activation": False}) == PoolerConfig("MEAN", False)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path}
               for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"))]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert PoolerConfig.of(tmp_path, None) == PoolerConfig("MEAN", False)
    assert PoolerConfig.of(tmp_path, {"pooling_type": "LAST"}) == PoolerConfig("LAST", False)
    (tmp_path / "modules.json").write_text("{")
    assert PoolerConfig.of(tmp_path, None) == PoolerConfig()


@pytest.mark.parametrize(("given", "problem"), [
    ("[]", "must be a JSON object"), ("{", "must be a JSON object"), ('{"pooling_type": "CLS"}', "one of LAST, MEAN"),
    ('{"use_activation": 1}', "true or false"), ('{"dimensions": 8}', "dimensions is not served"), (7, "JSON object"),
])  # fmt: skip
def test_a_wrong_pooler_config_is_named(given, problem):
    with pytest.raises(common.InputError, match=f"^pooler_config.*{problem}"):
        PoolerConfig.of(None, given)


def test_transformers_agrees(real_model):
    from transformers import AutoModel

    from engine.model import folders

    model, tokenizer = real_model
    texts = ["The capital of France is Paris.", "def f(x):\n    return x + 1", "naïve café"]
    ids = [tokenizer.encode(text) for text in texts]
    engine = LLMEngine(model, tokenizer, max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=40)
    found = {kind: pooled(engine, ids, pooling_type=kind) for kind in ("LAST", "MEAN")}
    theirs = AutoModel.from_pretrained(folders.model_folder(None), dtype=torch.float32)
    for i, tokens in enumerate(ids):
        with torch.inference_mode():
            hidden = theirs(torch.tensor([tokens])).last_hidden_state[0]
        for kind, want in (("LAST", hidden[-1]), ("MEAN", hidden.mean(0))):
            assert np.linalg.norm(found[kind][i] - (want / want.norm()).numpy()) < 1e-5, kind

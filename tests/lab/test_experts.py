"""What a mixture costs: published numbers, and arithmetic that a simulated router agrees with."""

from __future__ import annotations

import math

import pytest
import torch

from engine.experts.config import MoEConfig
from lab import experts, layouts, roofline
from lab.experts import MODELS
from lab.hardware import HARDWARE

QWEN, MIXTRAL, V3 = (MODELS[name] for name in ("Qwen3-30B-A3B", "Mixtral-8x7B", "DeepSeek-V3"))
PLAIN_V3 = roofline.MODELS["DeepSeek-V3"]


def test_the_numbers_of_qwen3_30b_a3b():
    """Its card: 30.5 B parameters, 3.3 B of them active, 48 layers, 32 heads that share 4 KV heads."""
    found = experts.parameters(QWEN)
    assert found["total"] / 1e9 == pytest.approx(30.5, abs=0.05) and found["active"] / 1e9 == pytest.approx(
        3.0, abs=0.1
    )
    assert (found["active"] + found["embedding"]) / 1e9 == pytest.approx(3.3, abs=0.06), "they count the embedding, too"
    assert found["experts"] == 48 * 128 * 3 * 2048 * 768
    facts = experts.facts()["qwen3_30b_a3b"]
    assert facts["kv_bytes_per_token"] == 98304 and facts["weights_gb"] == pytest.approx(61.06, abs=0.01)
    assert facts["all_to_all_bytes"] == 8 * 2048 * 3


def test_the_numbers_of_mixtral():
    """Its paper: 47 B parameters, of which a token uses 13 B."""
    found = experts.parameters(MIXTRAL)
    assert found["total"] / 1e9 == pytest.approx(46.7, abs=0.05) and found["active"] / 1e9 == pytest.approx(
        12.75, abs=0.1
    )
    assert experts.kv_bytes_per_token(MIXTRAL) == 131072


def test_the_numbers_of_deepseek_v3():
    """Its card and paper: 671 B parameters, of which a token uses 37 B; 576 numbers of a token in each of 61 layers."""
    found = experts.parameters(V3)
    assert found["total"] / 1e9 == pytest.approx(671, abs=0.5)
    assert found["active"] / 1e9 == pytest.approx(37, abs=0.7), "without the embedding, of which a token reads a row"
    assert found["experts"] == layouts.R1_EXPERTS
    facts = experts.facts()["deepseek_v3"]
    assert facts["kv_bytes_per_token"] == 70272 == roofline.KVCacheSpec.from_config(PLAIN_V3).bytes_per_token()
    assert facts["weights_gb"] == pytest.approx(671, abs=0.5), "in fp8, as published"
    assert facts["step_gb"]["1"] == pytest.approx(found["active"] / 1e9)
    assert experts.step_bytes(V3, 8, 1000) - experts.step_bytes(V3, 8) == 8 * 1000 * 70272
    assert facts["all_to_all_bytes_all_layers"] == 58 * 8 * 7168 * 3


@pytest.mark.parametrize("config", [QWEN, MIXTRAL, V3], ids=["Qwen3", "Mixtral", "V3"])
@pytest.mark.parametrize("tokens", [1, 8, 32, 256])
def test_experts_asked_are_those_that_a_router_asks(config, tokens):
    moe = config.moe
    asked = [experts.routed(moe, tokens, seed=seed).unique().numel() for seed in range(100)]
    expected = experts.expected_experts(moe.num_experts, moe.top_k, tokens)
    assert sum(asked) / 100 == pytest.approx(expected, rel=0.02)


def test_bytes_of_a_step_grow_until_every_expert_is_asked():
    """One token reads what it multiplies with. At 256 a step reads everything but the embedding."""
    found = experts.parameters(QWEN)
    assert experts.step_bytes(QWEN, 1) == pytest.approx(2 * found["active"], rel=1e-6)
    assert experts.step_bytes(QWEN, 256) == pytest.approx(2 * (found["total"] - found["embedding"]), rel=1e-4)
    steps = experts.facts()["qwen3_30b_a3b"]["step_gb"]
    assert [*steps.values()] == sorted(steps.values()) and steps["32"] > 8 * steps["1"]
    assert experts.step_bytes(QWEN, 32, context=1000) - experts.step_bytes(QWEN, 32) == 32 * 1000 * 98304


def test_a_mixture_wants_larger_batches_than_attention():
    """FLOPs per byte of an expert are its rows: the batch must be E / k times a dense layer's."""
    assert experts.rows_per_expert(QWEN, 1) == 1
    tokens = experts.tokens_to_be_compute_bound(QWEN)
    assert tokens == pytest.approx(16 * HARDWARE["H100 80GB"].ridge)
    assert experts.rows_per_expert(QWEN, tokens) == pytest.approx(tokens / 16, rel=1e-6)
    assert 4000 < tokens < 5500 and tokens == pytest.approx(4 * experts.tokens_to_be_compute_bound(MIXTRAL))


def test_a_router_that_prefers_some():
    even, skewed = (experts.routed(MoEConfig(32, 4, 8), 4000, skew).flatten().bincount(minlength=32) for skew in (0, 1))
    assert even.max() < 1.2 * even.float().mean() and skewed.max() > 3 * skewed.float().mean()
    ids = experts.routed(MoEConfig(32, 4, 8), 50, 1.0)
    assert all(len(set(row)) == 4 for row in ids.tolist()) and math.prod(ids.shape) == 200
    assert ids.equal(experts.routed(MoEConfig(32, 4, 8), 50, 1.0)) and ids.dtype == torch.int64


def test_replicas_let_ranks_wait_less():
    """Packing helps against experts that share a rank by chance; against one that everybody wants, replicas do."""
    for skew, found in experts.facts()["balance"].items():
        chance = 1.05 if skew == "skew_0" else 1  # of tokens that nobody could know
        assert 1 <= found["16_replicas"] <= found["packed"] <= chance * found["plain"], skew
    even, skewed = experts.facts()["balance"]["skew_0"], experts.facts()["balance"]["skew_1"]
    assert even["plain"] < 1.1 and skewed["plain"] > 2 and skewed["packed"] > 1.5 and skewed["16_replicas"] < 1.1

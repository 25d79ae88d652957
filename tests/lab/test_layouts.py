"""Experts that are shared by ranks, and what layouts cost."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.distributed.group import GroupCoordinator
from engine.parallel import sharding
from lab import layouts, roofline
from support.close import assert_close
from support.rank_threads import in_threads


def test_weights_of_the_chosen_experts_add_up_to_one():
    layer, x = layouts.random_moe(top_k=3), torch.randn(5, 64)
    weights, ids = layouts.choose(layer, x)
    scores = (x @ layer.gate.T).exp().gather(1, ids)
    assert_close(weights, scores / scores.sum(1, keepdim=True))
    assert (weights.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_experts_sharded_are_experts_whole(n, top_k):
    layer = layouts.random_moe(top_k=top_k, seed=n)
    x = torch.randn(12 * n, 64)
    want = layouts.moe_reference(layer, x)
    for out in in_threads(n, lambda group: layouts.tensor_parallel_moe(layer, x, group)):
        assert_close(out, want)

    def rank(group):
        mine = layouts.expert_parallel_moe(layer, x.chunk(n)[group.rank_in_group], group)
        return mine, group.bytes["all_to_all"]

    found = in_threads(n, rank)
    assert_close(torch.cat([mine for mine, _ in found]), want)
    arrived = layouts.rows_sent(layer, x, n)
    _, ids = layouts.choose(layer, x)
    size = 12 // n
    for r, (_, sent) in enumerate(found):  # hidden states and ids go out; results of others' tokens go back
        others = (torch.cat([c for i, c in enumerate((ids // size).chunk(n)) if i != r]) if n > 1 else ids[:0]) == r
        assert sent == arrived[r] * (64 * 4 + 8) + int(others.sum()) * 64 * 4


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 13])
def test_sequence_parallel_for_any_number_of_tokens(tokens):
    layer, x, norm = layouts.random_moe(), torch.randn(tokens, 64), torch.rand(64) + 0.5
    want = x + layouts.moe_reference(layer, torch.nn.functional.rms_norm(x, (64,), norm))
    shares = torch.randn(3, tokens, 64)
    shares[2] = x - shares[0] - shares[1]

    def rank(group):
        return layouts.sequence_parallel_block(layer, shares[group.rank_in_group], norm, group)

    for out in in_threads(3, rank):
        assert_close(out, want)


def test_a_rank_alone_needs_no_process_group_and_no_token_no_expert():
    found = layouts.moe_errors(GroupCoordinator([0], 0))
    assert max(found["errors"].values()) < 1e-6 and not any(found["counts"].values())
    layer, nothing = layouts.random_moe(), torch.zeros(0, 64)
    assert layouts.moe_reference(layer, nothing).shape == (0, 64)
    assert layer(nothing).shape == (0, 64)


def test_everybody_wants_the_same_expert():
    """All tokens go to one rank, the others get nothing: empty messages are messages."""
    layer = layouts.random_moe(top_k=1)
    layer.gate = torch.zeros(12, 64)
    layer.gate[7] = 1
    x = torch.rand(9, 64) + 0.1
    found = in_threads(3, lambda group: layouts.expert_parallel_moe(layer, x.chunk(3)[group.rank_in_group], group))
    assert_close(torch.cat(found), layouts.moe_reference(layer, x))
    assert layouts.rows_sent(layer, x, 3) == [3, 0, 3]


def test_sizing_says_what_the_text_says():
    sizing, known = layouts.facts()["sizing"], layouts.facts()
    assert known["models"]["llama_31_405b"]["gpus"] > 8 >= known["models"]["llama_31_405b_fp8"]["gpus"]
    assert 8 < known["models"]["deepseek_r1"]["gpus"] <= 16
    wide, deep = (sizing["llama_31_405b"][name] for name in ("tp16", "tp8_pp2"))
    assert wide["alone_ms"] < deep["alone_ms"] and 2 * wide["sequences"] <= deep["sequences"]
    assert wide["tokens_per_second"] < deep["tokens_per_second"]
    r1 = sizing["deepseek_r1"]
    assert r1["tp8_pp2"]["kv_copies"] == 8 and r1["dp16_ep"]["kv_tokens"] > 3 * r1["tp8_pp2"]["kv_tokens"]


def test_cost_by_hand():
    model = layouts.models()["Llama-3.1-405B"]
    one = layouts.cost(model, layouts.Layout(tp=8, pp=2), sequences=2, context=1)
    reading = model.shared_bytes / 16 / 3.35e12
    assert one["weights_gb"] == pytest.approx(model.shared_bytes / 16e9)
    assert one["stage_ms"] > 1e3 * reading and one["latency_ms"] > 2 * one["stage_ms"]
    assert layouts.all_reduce_seconds(1e6, 16) > layouts.all_reduce_seconds(1e6, 8)
    assert layouts.models()["DeepSeek-R1"].expert_bytes_read(1) == pytest.approx(layouts.R1_EXPERTS * 8 / 256)
    talk = 126 / 2 * 2 * layouts.NVLINK.seconds("all_reduce", 16384 * 2, 8)
    hop = layouts.HOP.latency + 16384 * 2 / 8 / layouts.HOP.bandwidth
    stage = (model.shared_bytes + model.kv_bytes) / 16 / 3.35e12 + talk
    assert one["stage_ms"] == pytest.approx(1e3 * stage) and one["latency_ms"] == pytest.approx(1e3 * (2 * stage + hop))
    assert one["tokens_per_second"] == pytest.approx(1 / (stage + hop))
    inside, between = layouts.NVLINK.seconds("all_reduce", 1e6, 8), layouts.NETWORK.seconds("all_reduce", 1e6 / 8, 2)
    assert layouts.all_reduce_seconds(1e6, 16) == inside + between


def test_two_engines_have_twice_the_throughput_and_fp8_twice_the_rate():
    Layout, models = layouts.Layout, layouts.models()
    model, half = models["Llama-3.1-405B"], models["Llama-3.1-405B-FP8"]
    one, two = layouts.cost(model, Layout(tp=8), 64), layouts.cost(model, Layout(tp=8, dp=2), 128)
    assert two["tokens_per_second"] == pytest.approx(2 * one["tokens_per_second"])
    compute = [x["latency_ms"] - x["talk_ms"] for x in (layouts.cost(m, Layout(tp=8), 1, 4096, 4096)
                                                        for m in (model, half))]  # fmt: skip
    assert compute[0] == pytest.approx(2 * compute[1]), "a prefill is bound by arithmetic"


def test_layouts_are_compared_at_equal_work():
    """Two prompts are done when both are; and at equal load a pipeline is as fast as replicas: it differs in room."""
    Layout, models = layouts.Layout, layouts.models()
    x = layouts.cost(models["Llama-3.1-405B"], Layout(tp=8, pp=2), 2, 4096, 4096, layouts.ETHERNET)
    both = layouts.facts()["slow_prefill_ms"]["8"]
    assert both == pytest.approx(x["latency_ms"] + x["stage_ms"]) and both > 1.4 * x["latency_ms"]
    replicas, pipeline = (layouts.cost(models["Llama-3.1-405B-FP8"], layout, 173)
                          for layout in (Layout(tp=8, dp=2), Layout(tp=8, pp=2)))  # fmt: skip
    assert pipeline["latency_ms"] == pytest.approx(replicas["latency_ms"], rel=1e-2)
    assert pipeline["kv_tokens"] == pytest.approx(1.91 * replicas["kv_tokens"], rel=1e-2)


@pytest.mark.parametrize(("micros", "faster"), [(60, True), (61, False)])
def test_one_user_gains_by_tp_across_nodes_until_an_all_reduce_takes_60_us(micros, faster):
    model, between = layouts.models()["Llama-3.1-405B"], layouts.Link(50e9, micros * 1e-6)
    wide = layouts.cost(model, layouts.Layout(tp=16), 1, between=between)["latency_ms"]
    deep = layouts.cost(model, layouts.Layout(tp=8, pp=2), 1)["latency_ms"]
    assert (wide < deep) is faster


def test_a_pool_of_experts_is_asked_by_all_engines():
    r1 = layouts.models()["DeepSeek-R1"]
    x = layouts.cost(r1, layouts.Layout(dp=16, ep=True), sequences=16, context=0)
    read = r1.shared_bytes + r1.expert_bytes_read(16) / 16
    assert x["stage_ms"] - x["talk_ms"] == pytest.approx(1e3 * read / 3.35e12)


def test_cost_of_experts_by_hand():
    Layout, r1, hop = layouts.Layout, layouts.models()["DeepSeek-R1"], layouts.HOP
    wide = layouts.cost(r1, Layout(dp=16, ep=True), sequences=32, context=0)  # two tokens each
    talk = 61 * (2 * hop.latency + 2 * 8 * 7168 * (1 + 2) / hop.bandwidth)  # to 8 experts: a byte there, two back
    stage = (r1.shared_bytes + r1.expert_bytes_read(32) / 16) / 3.35e12 + talk
    assert wide["talk_ms"] == pytest.approx(1e3 * talk) and wide["stage_ms"] == pytest.approx(1e3 * stage)
    assert wide["tokens_per_second"] == pytest.approx(32 / stage), "one stage has nobody to send to"
    assert wide["weights_gb"] == pytest.approx((r1.shared_bytes + r1.expert_bytes / 16) / 1e9) and wide["fits"]
    for ep in (False, True):  # a token alone: each stage reads its layers' share of the experts that it asks
        deep = layouts.cost(r1, Layout(tp=8, pp=2, ep=ep), sequences=1, context=0)
        read = (r1.shared_bytes + r1.expert_bytes_read(1)) / 16
        assert 2 * deep["stage_ms"] - deep["talk_ms"] == pytest.approx(2e3 * read / 3.35e12)
    twice = layouts.cost(r1, Layout(tp=8, dp=2))
    assert twice["weights_gb"] == pytest.approx((r1.shared_bytes + r1.expert_bytes) / 8e9)
    assert not twice["fits"] and twice["kv_tokens"] == 0 and layouts.loaded(r1, Layout(tp=8, dp=2))["sequences"] == 0
    assert layouts.cost(layouts.models()["Llama-3.1-70B"], Layout(tp=4))["kv_copies"] == 1


def test_no_more_sequences_are_loaded_than_the_cache_holds():
    model, layout = layouts.models()["Llama-3.1-405B"], layouts.Layout(tp=16)
    found = layouts.loaded(model, layout)
    assert found["sequences"] == found["kv_tokens"] // 4096 < 256
    assert found["tokens_per_second"] == layouts.cost(model, layout, found["sequences"])["tokens_per_second"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "neurons", "ranks"),
    [(9, 3, 1536, 3), (32, 8, 14336, 2), (12, 6, 96, 3), (5, 5, 10, 5), (35, 5, 35, 5), (5, 5, 7, 1), (1, 1, 64, 1)],
)
def test_by_default_as_many_ranks_as_the_model_allows_to_share_it(heads, kv_heads, neurons, ranks):
    """3 of SmolLM2, else the fewest above one, if any."""
    smol = roofline.llama_config(roofline.MODELS["SmolLM2-135M"])
    config = dataclasses.replace(smol, num_attention_heads=heads, num_key_value_heads=kv_heads,
                                 intermediate_size=neurons)  # fmt: skip
    assert layouts.default_size(config) == ranks
    sharding.check_tensor_parallel_size(config, ranks)

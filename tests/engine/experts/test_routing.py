"""Who answers for a token: each family's rule against Transformers' own router."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.experts.config import MoEConfig
from engine.experts.layer import MoELayer
from engine.experts.routing import route
from engine.experts.stacked import StackedExperts
from support.close import assert_close

CONFIG = MoEConfig(num_experts=8, top_k=3, intermediate_size=16)


def in_order(weights, ids):
    """Of each token, the weights by expert: [T, E]."""
    return torch.zeros(len(ids), 8).scatter_(1, ids, weights)


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_then_the_largest(renormalize):
    logits = torch.randn(50, 8)
    weights, ids = route(logits, dataclasses.replace(CONFIG, renormalize=renormalize))
    scores = logits.softmax(1)
    assert ids.equal(scores.argsort(1, descending=True)[:, :3])
    assert_close(weights.sum(1), torch.ones(50) if renormalize else scores.gather(1, ids).sum(1))


def test_a_softmax_of_the_chosen_alone_is_the_renormalized_one():
    """gpt-oss takes it after the choice, Mixtral before it: the same numbers."""
    logits = torch.randn(50, 8)
    weights, _ = route(logits, CONFIG)
    assert_close(weights, logits.topk(3, dim=1).values.softmax(1))


def test_equal_to_mixtrals_router():
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    router = MixtralTopKRouter(MixtralConfig(hidden_size=32, num_local_experts=8, num_experts_per_tok=3))
    router.weight.data.normal_()
    x = torch.randn(40, 32)
    _, weights, ids = router(x)
    assert_close(in_order(*route(x @ router.weight.T, CONFIG)), in_order(weights, ids))


@pytest.mark.parametrize(
    ("groups", "best", "renormalize", "scale"), [(1, 1, True, 1.0), (4, 2, True, 2.5), (2, 1, False, 1.5)]
)
def test_equal_to_deepseeks_router(groups, best, renormalize, scale):
    """Sigmoids, a correction that moves the choice and not the weights, groups, a factor."""
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    theirs = DeepseekV3TopkRouter(DeepseekV3Config(
        hidden_size=32, n_routed_experts=8, num_local_experts=8, num_experts_per_tok=2, n_group=groups, topk_group=best,
        norm_topk_prob=renormalize, routed_scaling_factor=scale,
    ))  # fmt: skip
    theirs.weight.data.normal_(std=0.2)
    theirs.e_score_correction_bias.normal_(std=0.3)
    config = dataclasses.replace(CONFIG, top_k=2, scoring="sigmoid", num_expert_group=groups, topk_group=best,
                                 renormalize=renormalize, routed_scaling_factor=scale)  # fmt: skip
    x = torch.randn(200, 32)
    _, weights, ids = theirs(x)
    ours = route(x @ theirs.weight.T, config, theirs.e_score_correction_bias)
    assert_close(in_order(*ours), in_order(weights, ids))
    assert not route(x @ theirs.weight.T, config)[1].sort(1).values.equal(ids.sort(1).values), "the correction counts"


def test_equal_to_gpt_oss_layer():
    """A router with a bias, experts with biases, and a gate that is cut at 7."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    theirs = GptOssMLP(GptOssConfig(hidden_size=32, intermediate_size=16, num_local_experts=8, num_experts_per_tok=3))
    for parameter in theirs.parameters():
        parameter.data.normal_(std=1.0)
    e = theirs.experts
    gate_up = torch.cat((e.gate_up_proj[..., ::2], e.gate_up_proj[..., 1::2]), -1).transpose(1, 2).contiguous()
    bias = torch.cat((e.gate_up_proj_bias[:, ::2], e.gate_up_proj_bias[:, 1::2]), -1)
    down = e.down_proj.transpose(1, 2).contiguous()
    these = StackedExperts(range(8), gate_up, down, bias, e.down_proj_bias, activation="swiglu_oai")
    ours = MoELayer(CONFIG, theirs.router.weight, these, gate_bias=theirs.router.bias)
    x = torch.randn(30, 32)
    with torch.inference_mode():
        assert_close(ours(x), theirs(x[None])[0][0])


@pytest.mark.parametrize(("groups", "best"), [(4, 2), (2, 1)])
def test_equal_to_deepseek_v2s_router(groups, best):
    """A softmax, and a group counts as much as its best expert."""
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    theirs = DeepseekV2TopkRouter(DeepseekV2Config(
        hidden_size=32, n_routed_experts=8, num_experts_per_tok=2, n_group=groups, topk_group=best,
        topk_method="group_limited_greedy", routed_scaling_factor=16.0,
    ))  # fmt: skip
    theirs.weight.data.normal_(std=0.2)
    config = dataclasses.replace(CONFIG, top_k=2, num_expert_group=groups, topk_group=best, renormalize=False,
                                 routed_scaling_factor=16.0)  # fmt: skip
    x = torch.randn(200, 32)
    _, weights, ids = theirs(x)
    assert_close(in_order(*route(x @ theirs.weight.T, config)), in_order(weights, ids))

"""A model in shards is the model: its logits, its tokens, the bytes that it sends."""

from __future__ import annotations

import common

import pytest
import torch

from engine import assemble, registry
from engine.config import SchedulerConfig, VllmConfig
from engine.model import llama
from engine.model.packed_linear import pack_weights
from engine.parallel.model import TensorParallelLlama, map_local, shard_model
from engine.parallel.shards import model_tensors
from engine.quantization.kv_codes import block_bytes
from engine.request import Request, SamplingParams
from lab import cli
from support.close import assert_close
from support.mixtures import MIXTURES
from support.rank_threads import CPU, ThreadGroup, in_threads
from support.sharded_models import IDS, model_with

lesson, page = registry.lesson("05c_tensor_parallel"), cli.numbers("05c_tensor_parallel")


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "sizes", [{}, {"biases": True}, {"qk_norm": True}, {"vocab_size": 131, "tie_word_embeddings": False}]
)
def test_shards_are_the_model(n, sizes, device):
    model = model_with(device, **sizes)
    want = lesson.all_logits(model, IDS)

    def rank(group):
        shard = shard_model(model, group)
        assert (shard.num_heads, shard.num_kv_heads) == (8 // n, max(1, 2 // n)) and shard.config is model.config
        expected = lesson.step_traffic(model.config, n, len(IDS), len(IDS), 4)
        for _ in range(2):
            out = lesson.all_logits(shard, IDS)
            assert group.take_counts() == expected and bool(expected) == (n > 1)
        return out

    outs = in_threads(n, rank, device)
    for out in outs:
        assert_close(out, want)
        assert out.equal(outs[0])


@pytest.mark.parametrize("family", MIXTURES)
def test_a_shared_expert_costs_an_all_reduce(family):
    model = llama.random_model(device=CPU, **MIXTURES[family])

    def rank(group):
        shard = TensorParallelLlama(model.config, model_tensors(model), group)
        lesson.all_logits(shard, IDS)
        return group.take_counts()

    assert in_threads(2, rank, CPU) == [lesson.step_traffic(model.config, 2, len(IDS), len(IDS), 4)] * 2


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_head_for_some_tokens_has_a_logit_for_each(n, device):
    """A drafter's shortlist (companion 07b) of five, which no number of ranks divides."""
    model, shortlist = model_with(device), torch.tensor([7, 0, 126, 64, 63], device=device)
    x = torch.randn(3, model.config.hidden_size, device=device)
    want = model.output_head(torch.arange(127, device=device))(x)[:, shortlist]
    for out in in_threads(n, lambda group: shard_model(model, group).output_head(shortlist)(x), device):
        assert_close(out, want)


def test_weights_are_divided_not_copied(tiny_model):
    """Everything but norms is somewhere exactly once (2 ranks, 2 KV heads); the cache is divided, too."""
    c = tiny_model.config
    shards = in_threads(2, lambda group: shard_model(tiny_model, group))
    norms = (2 * c.num_hidden_layers + 1) * c.hidden_size
    assert sum(s.num_parameters for s in shards) == tiny_model.num_parameters + norms
    assert 2 * block_bytes(shards[0], 16, "auto") == block_bytes(tiny_model, 16, "auto")


def test_the_engine_cannot_tell(device):
    """The engine on 1, 2 and 4 ranks (KV heads copied), packed weights included: the same tokens, all ranks."""
    model = model_with(device)
    prompts, outputs = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [35]], [9, 4, 7]
    want = lesson.serve(model, prompts, outputs).token_ids

    def rank(group):
        shard = map_local(shard_model(model, group), pack_weights)
        return lesson.serve(shard, prompts, outputs).token_ids

    for n in (2, 4):
        assert in_threads(n, rank, device) == [want] * n


def test_every_rank_draws_the_same_tokens(device):
    """Sampling, too, is done by each rank alone: from equal logits and the request's seed."""
    model = model_with(device)

    def sampled(model):
        eager = VllmConfig(enforce_eager=True)  # as all ranks are: a collective over gloo could not be captured
        core = assemble.make_core(model, SchedulerConfig(max_model_len=64), 64, 16, eager, seed=1)
        tokens = {}
        for i in range(3):
            params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
            core.add_request(Request(str(i), [7, i], params))
        while core.scheduler.has_unfinished_requests():
            for output in core.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return tokens

    want = sampled(model)
    assert len(set(map(tuple, want.values()))) == 3
    assert in_threads(4, lambda group: sampled(shard_model(model, group)), device) == [want] * 4


def test_map_local_changes_the_copy_alone(tiny_model):
    def doubled(model):
        model.linear = {name: llama.Linear(2 * layer.weight) for name, layer in model.linear.items()}
        return model

    def rank(group):
        shard = shard_model(tiny_model, group)
        before = lesson.all_logits(shard, IDS)
        changed = map_local(shard, doubled)
        assert lesson.all_logits(shard, IDS).equal(before)
        assert [type(x) for x in changed.linear.values()] == [type(x) for x in shard.linear.values()]
        return lesson.all_logits(changed, IDS)

    twice = llama.Llama(tiny_model.config, model_tensors(tiny_model), tiny_model.dtype, tiny_model.device)
    want = lesson.all_logits(doubled(twice), IDS)
    for out in in_threads(2, rank, tiny_model.device):
        assert_close(out, want)


def test_without_the_all_reduce_shapes_are_right_and_values_wrong(tiny_model):
    def rank(group):
        shard = shard_model(tiny_model, group)
        lesson.skip_all_reduce(shard)
        return lesson.all_logits(shard, IDS)

    want = lesson.all_logits(tiny_model, IDS)
    for out in in_threads(2, rank, tiny_model.device):
        assert out.shape == want.shape and common.relative_error(out, want) > 0.3


def test_a_shape_that_contradicts_the_config_is_one_line(tiny_model):
    lookup = model_tensors(tiny_model)

    def wrong(name):
        return lookup(name)[1:] if "o_proj" in name else lookup(name)

    with pytest.raises(common.InputError, match=r"o_proj.weight has shape \[79, 96\], config.json says \[80, 96\]"):
        TensorParallelLlama(tiny_model.config, wrong, ThreadGroup(2, 0, None, [], CPU))


def test_a_weight_that_is_not_there_is_named(tiny_model):
    lookup, name = model_tensors(tiny_model), "model.layers.1.mlp.down_proj.weight"

    def tensors(wanted):
        return None if wanted == name else lookup(wanted)

    with pytest.raises(common.InputError, match=name):
        TensorParallelLlama(tiny_model.config, tensors, ThreadGroup(2, 0, None, [], CPU))

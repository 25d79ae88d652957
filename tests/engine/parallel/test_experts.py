"""Experts on several ranks, in slices or whole: the layer, the model and the engine are those of one rank."""

from __future__ import annotations

import common

import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F

from engine.choices import ALL2ALL_BACKENDS
from engine.engine_args import EngineArgs
from engine.experts.routing import route
from engine.kv_transfer.digest import weights_digest
from engine.llm import make_llm_engine
from engine.model import llama
from engine.parallel import executors
from engine.parallel.config import ParallelConfig
from engine.parallel.eplb import Placement
from engine.parallel.experts import dispatch
from engine.parallel.model import TensorParallelLlama, map_local
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.sharding import experts_of
from engine.parallel.shards import model_tensors
from engine.parallel.worker import WorkerSpec
from lab import naive
from support import mixtures, small_cores
from support.close import assert_close
from support.mixtures import CPU, MIXTURES
from support.rank_threads import WorkerThreads, in_threads
from support.small_cores import PROMPTS, remote_runner, scheduler_of

IDS = [5, 1, 77, 126, 0, 63, 64, 31, 32, 99]


def logits_of(model):
    positions = torch.arange(len(IDS))
    return model.logits(model.forward(torch.tensor(IDS), positions, naive.recompute))


@functools.cache
def whole(family):
    return llama.random_model(device=CPU, **MIXTURES[family])


def shard(family, group, way):
    about = {"enable_expert_parallel": True, "all2all_backend": way} if way else {}
    config = ParallelConfig(group.world_size, **about).shared_experts(whole(family).config)
    return TensorParallelLlama(config, model_tensors(whole(family)), group)


@pytest.mark.parametrize("way", [None, *ALL2ALL_BACKENDS])
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_shards_are_the_model(n, family, way):
    """Six experts on four ranks: one or two each. Every weight of an expert is somewhere exactly once."""

    def rank(group):
        model = shard(family, group, way)
        return logits_of(model), model.num_parameters, weights_digest(model)

    found = in_threads(n, rank)
    for out, _, digest in found:
        assert_close(out, logits_of(whole(family)))
        assert out.equal(found[0][0]) and digest == found[0][2] == weights_digest(whole(family))
    c = whole(family).config
    layers = len(whole(family).moe)
    copied = whole(family).norms + [whole(family).norm] + [m.gate for m in whole(family).moe.values()]
    copied += [m.shared_gate for m in whole(family).moe.values() if m.shared_gate is not None]
    kv_copies = max(1, n // c.num_key_value_heads) - 1
    extra = (n - 1) * sum(t.numel() for t in copied) + kv_copies * c.num_hidden_layers * 2 * 2 * 16 * c.hidden_size
    assert layers and sum(held for _, held, _ in found) == whole(family).num_parameters + extra


@pytest.mark.parametrize("n", [2, 4])
def test_what_travels(n):
    """An all-reduce does not ask how many experts a token visits; an all-to-all sends each pair to another's expert."""
    T, H, k = len(IDS), 80, 2

    def rank(group, way):
        logits_of(shard("mixtral", group, way))
        return group.take_counts()

    counts = {way: in_threads(n, functools.partial(rank, way=way)) for way in (None, *ALL2ALL_BACKENDS)}
    assert counts[None] == counts["allreduce"]
    assert counts[None][0]["all_reduce"] == {"calls": 1 + 2 * 2, "bytes": 5 * T * H * 4}
    for found in counts["all2all"]:
        assert found["all_reduce"]["calls"] == 1 + 2 and found["all_to_all"]["calls"] == 2 * 3
        assert found["all_gather"]["calls"] == 2 + 1
    sent = sum(found["all_to_all"]["bytes"] for found in counts["all2all"])
    assert 0 < sent <= 2 * k * T * (2 * H * 4 + 8), "there and back, and which expert is meant"


@pytest.mark.parametrize("T", [0, 1, 7])
@pytest.mark.parametrize("n", [1, 3])
def test_a_rank_with_no_token_and_an_expert_that_everybody_wants(n, T):
    config = dataclasses.replace(mixtures.MIXTURE, top_k=1)
    x = torch.rand(T, 32) + 0.1
    layer = mixtures.layer(config, 32)
    layer.gate = torch.zeros(6, 32)
    layer.gate[4] = 1

    def rank(group):
        r = group.rank_in_group
        local = mixtures.experts(6, 32, 48, held=experts_of(config, r, n))
        share = -(-T // n)
        mine = x[r * share : (r + 1) * share]
        return dispatch(mine, *route(F.linear(mine, layer.gate), config), local, group, Placement.plain(6, n))

    out = torch.cat(in_threads(n, rank))
    assert out.shape == x.shape
    if T:
        assert_close(out, layer(x))


def test_what_replaces_matrices_replaces_those_of_a_rank():
    """Packing leaves experts as they are, and the collectives around them."""

    def rank(group):
        return logits_of(map_local(shard("mixtral", group, None), lambda model: model))

    for out in in_threads(2, rank):
        assert_close(out, logits_of(whole("mixtral")))


# --- Workers --------------------------------------------------------------------------------------------------------


def serve(family, parallel):
    executor = WorkerThreads(parallel)
    executor.collective_rpc("load_model", WorkerSpec(MIXTURES[family], parallel))
    scheduler = scheduler_of()
    core = PipelineEngineCore(scheduler, remote_runner(executor, parallel, scheduler), parallel.pipeline_parallel_size)
    tokens = small_cores.serve(core)
    executor.shutdown()
    return tokens


@pytest.mark.parametrize(("tp", "pp", "way"), [(2, 1, None), (2, 1, "all2all"), (2, 2, "allreduce"), (1, 3, None)])
def test_every_layout_writes_the_same_tokens(tp, pp, way):
    """Chunks, five requests of all lengths. A stage counts its layers, and which of them have none, from its first."""
    about = {"enable_expert_parallel": way is not None, **({"all2all_backend": way} if way else {})}
    tokens = serve("qwen3_moe", ParallelConfig(tp, pp, **about))
    model = whole("qwen3_moe")
    assert tokens == [naive.generate(model, prompt, len(written)) for prompt, written in zip(PROMPTS, tokens)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ALL2ALL_BACKENDS)
def test_processes_write_the_same_tokens_and_one_that_is_killed_ends_the_engine_with_a_reason(way):
    """The others wait for its experts in the middle of a layer: whoever died is named, and not they."""
    from engine.request import Request, SamplingParams

    parallel = ParallelConfig(2, enable_expert_parallel=True, all2all_backend=way)
    executor = executors.MultiprocExecutor(2)
    try:
        executor.collective_rpc("load_model", WorkerSpec(MIXTURES["qwen3_moe"], parallel))
        scheduler = scheduler_of()
        core = PipelineEngineCore(scheduler, remote_runner(executor, parallel, scheduler), 1)
        assert small_cores.serve(core) == serve("qwen3_moe", ParallelConfig())
        core.add_request(Request("x", [1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))
        core.step()
        executor.processes[1].kill()
        with pytest.raises(executors.ExecutorFailed, match=r"worker 1 of 2 died \(signal SIGKILL\)"):
            while core.scheduler.has_unfinished_requests():
                core.step()
        assert not any(process.is_alive() for process in executor.processes)
    finally:
        executor.shutdown()


# --- What cannot be -------------------------------------------------------------------------------------------------


def test_layouts_that_cannot_be_are_refused():
    config = whole("qwen3_moe").config
    for parallel, words in (
        (ParallelConfig(2, enable_expert_parallel=True), None),
        (ParallelConfig(8, enable_expert_parallel=True), "tensor_parallel_size 8: must be at most num_experts (6)"),
        (
            ParallelConfig(4, enable_expert_parallel=True, data_parallel_size=2),
            "tensor_parallel_size x data_parallel_size 8: must be at most num_experts (6)",
        ),
        (ParallelConfig(3), "moe_intermediate_size (48)"),
    ):
        if words is None:
            parallel.check(config)
        else:
            with pytest.raises(common.InputError, match=re.escape(words)):
                parallel.check(config)
    with pytest.raises(common.InputError, match="enable_expert_parallel: this model has no experts"):
        ParallelConfig(2, enable_expert_parallel=True).check(llama.random_model(device=CPU).config)
    narrow = dataclasses.replace(config, moe=dataclasses.replace(config.moe, intermediate_size=47))
    with pytest.raises(common.InputError, match=r"moe_intermediate_size \(47\).*allowed for this model: 1$"):
        ParallelConfig(2).check(narrow)
    ParallelConfig(2, enable_expert_parallel=True).check(narrow)  # nobody cuts an expert


def test_flags_that_cannot_be_are_refused():
    with pytest.raises(common.InputError, match="all2all_backend 'nccl': must be one of allreduce, all2all"):
        EngineArgs(all2all_backend="nccl")
    with pytest.raises(common.InputError, match="enable_expert_parallel: this model has no experts"):
        make_llm_engine(enable_expert_parallel=True)


# --- Experts that move ----------------------------------------------------------------------------------------------


def moving(tp, interval=3, spare=2):
    return ParallelConfig(tp, enable_expert_parallel=True, all2all_backend="all2all", enable_eplb=True,
                          num_redundant_experts=spare, eplb_step_interval=interval)  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 4])
def test_experts_move_and_nothing_is_written_otherwise(n):
    """Every second step they are where the last two had better found them; a step's answers do not change."""
    config = moving(n, 2, spare=2).shared_experts(whole("mixtral").config)
    want = logits_of(whole("mixtral"))

    def rank(group):
        model = TensorParallelLlama(config, model_tensors(whole("mixtral")), group)
        seen = [model.moe[1].experts.placement]
        for _ in range(5):
            assert_close(logits_of(model), want)
            seen.append(model.moe[1].experts.placement)
        return seen, model.moe[1].experts.local

    found = in_threads(n, rank)
    seen, _ = found[0]
    assert all(other == seen for other, _ in found), "all ranks know where everybody is"
    assert len(seen[0].experts) == 8 and sorted({*seen[0].experts}) == [*range(6)]
    assert seen[0] == seen[1] != seen[2] == seen[3] or n == 1
    original = whole("mixtral").moe[1].experts
    for r, (_, local) in enumerate(found):
        for i, slot in enumerate(seen[-1].slots(r)):
            assert local.down[i].equal(original.down[seen[-1].experts[slot]])
            assert local.gate_up[i].equal(original.gate_up[seen[-1].experts[slot]])
        assert local.held == seen[-1].slots(r)


def test_replicas_take_turns():
    """All of twelve tokens want one expert, which both ranks have: each computes six."""
    placement, x = Placement((0, 1, 0, 2), 2), torch.randn(12, 32)
    stack = mixtures.experts(3, 32, 48)
    ids = torch.zeros(12, 1, dtype=torch.int64)

    def rank(group):
        r = group.rank_in_group
        mine = list(placement.experts[2 * r : 2 * r + 2])
        local = dataclasses.replace(stack, held=placement.slots(r), gate_up=stack.gate_up[mine], down=stack.down[mine])
        rows = []

        def counted(x, weights, ids):
            rows.append(len(x))
            return local(x, weights, ids)

        return dispatch(x.chunk(2)[r], torch.ones(6, 1), ids.chunk(2)[r], counted, group, placement), rows

    found = in_threads(2, rank)
    assert [rows for _, rows in found] == [[6], [6]]
    assert_close(torch.cat([y for y, _ in found]), stack(x, torch.ones(12, 1), ids))


def test_an_engine_whose_experts_move():
    tokens = serve("qwen3_moe", moving(2))
    model = whole("qwen3_moe")
    assert tokens == [naive.generate(model, prompt, len(written)) for prompt, written in zip(PROMPTS, tokens)]


def test_experts_that_cannot_move_are_refused():
    ep = {"enable_expert_parallel": True, "all2all_backend": "all2all"}
    for about, words in (
        ({"enable_eplb": True}, "enable_eplb: needs enable_expert_parallel and all2all_backend all2all"),
        (
            {"enable_eplb": True, "enable_expert_parallel": True},
            "enable_eplb: needs enable_expert_parallel and all2all",
        ),
        ({"num_redundant_experts": 2, **ep}, "num_redundant_experts: needs enable_eplb"),
        ({"enable_eplb": True, "quantization": "int8", **ep}, "enable_eplb: not together with quantization"),
        ({"enable_eplb": True, "eplb_step_interval": 0, **ep}, "eplb_step_interval 0"),
    ):
        with pytest.raises(common.InputError, match=re.escape(words)):
            EngineArgs(**about)
    with pytest.raises(common.InputError, match=r"num_redundant_experts 1: tensor_parallel_size \(2\) must.*\(7\)"):
        moving(2, spare=1).check(whole("mixtral").config)
    with pytest.raises(common.InputError, match=r"tensor_parallel_size x data_parallel_size \(4\) must divide"):
        dataclasses.replace(moving(2, spare=4), data_parallel_size=2).check(whole("mixtral").config)

"""Windows and sinks in an engine: through the kernel, from recorded steps, with one table for all layers or several."""

from __future__ import annotations

import common

import functools

import pytest
import torch

from engine import registry
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.core.scheduler import make_scheduler
from engine.kv_cache_interface import groups_of
from engine.model import llama
from engine.request import Request, SamplingParams
from engine.worker.assemble import make_runner
from engine.worker.cuda_graphs import CapturedModel, Tape
from engine.worker.sleep import Sleeper

chunked, paged = map(registry.lesson, ("10_chunked_prefill", "02_paged_attention"))
SIZES = {"num_hidden_layers": 3, "sliding_windows": (5, None, 5), "max_position_embeddings": 64}
PROMPTS = [[3, 1, 4], list(range(7, 28)), [9] * 6]


@functools.cache
def model(sinks):
    return llama.random_model(attention_sinks=sinks, **SIZES)


def core_of(sinks, hybrid=True):
    """Chunks of eight tokens, and blocks for hardly two sequences."""
    limits, config = SchedulerConfig(32, 3, 8), VllmConfig(hybrid_kv_cache=hybrid)
    groups = groups_of(model(sinks).config, config, 4)
    assert len(groups) == (3 if hybrid else 0)
    num_blocks = 22 if hybrid else 12
    scheduler = make_scheduler(limits, num_blocks, 4, kv_cache_groups=groups)
    return EngineCore(scheduler, make_runner(model(sinks), limits, num_blocks, 4, config))


def serve(core):
    requests = [Request(str(i), list(prompt), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
                for i, prompt in enumerate(PROMPTS)]  # fmt: skip
    for request in requests:
        core.add_request(request)
    while core.scheduler.has_unfinished_requests():
        core.step()
    return [request.output_token_ids for request in requests]


@functools.cache
def served(sinks):
    """What a CPU writes without kernels, on one table."""
    return serve(core_of(sinks, hybrid=False))


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_a_table_for_each_group_changes_no_token(sinks):
    assert serve(core_of(sinks)) == served(sinks)


@pytest.mark.parametrize("sinks", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "sinks"])
def test_the_kernel_serves_the_engine(sinks, kernels):
    """Where all layers but those with a window see everything and nobody has sinks, decodes are lesson 02's."""
    before, decodes = chunked.unified_attention_kernel.launches, paged.paged_decode_kernel.launches
    assert serve(core_of(sinks)) == served(sinks)
    assert chunked.unified_attention_kernel.launches > before
    assert (paged.paged_decode_kernel.launches == decodes) == sinks


@pytest.mark.parametrize(("hybrid", "full"), [
    (False, True), *(pytest.param(hybrid, False, marks=pytest.mark.slow) for hybrid in (False, True)),
])  # fmt: skip
def test_recorded_steps_change_no_token(hybrid, full, kernels):
    """Several tables are not in a whole step's recording: attention then runs between two pieces."""
    core = core_of(True, hybrid)
    runner = core.runner
    about = {"graph_class": torch.cuda.CUDAGraph if common.HAS_GPU else Tape, "full": full}
    runner.graphs = CapturedModel(runner.model, runner.cache, runner.attend, core.scheduler.config, **about)
    assert serve(core) == served(True)
    assert any(whole for _, whole in runner.graphs.captured) == full and runner.graphs.num_replays


def test_a_runner_with_several_tables_records_pieces(monkeypatch):
    """As it is put together, where there is a GPU."""
    asked = []
    monkeypatch.setattr("engine.worker.assemble.CapturedModel", lambda *parts, **about: asked.append(about) or None)
    for hybrid in (False, True):
        with pytest.raises(AttributeError):
            core_of(False, hybrid)
    assert [about["full"] for about in asked] == [True, False]


def test_layers_of_different_groups_share_memory():
    cache = core_of(False).runner.cache
    assert len({memory.data_ptr() for memory in cache.layers}) == 1
    assert [kind for kind in cache.kinds] == [(0, 5), (2, None), (1, 5)]
    apart = core_of(False, hybrid=False).runner.cache
    assert len({memory.data_ptr() for memory in apart.layers}) == 3
    assert torch.equal(apart.layers[0][:, 0], torch.zeros_like(apart.layers[0][:, 0])), "the null block"


def test_memory_that_layers_share_comes_back_shared():
    core = core_of(True)
    sleeper = Sleeper(core.runner, model(True), lambda: llama.random_model(attention_sinks=True, **SIZES))
    sleeper.sleep(2)
    assert not any(layer.numel() for layer in (*core.runner.cache.layers, *core.runner.cache.sinks))
    sleeper.wake_up()
    assert len({memory.data_ptr() for memory in core.runner.cache.layers}) == 1
    assert serve(core) == served(True)

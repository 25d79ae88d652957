"""Weights and cache go, and come back as they were: to everybody who shares them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.llm import LLM
from engine.model import llama
from engine.model.packed_linear import PackedLinear, pack_weights
from engine.request import SamplingParams
from engine.worker.cuda_graphs import CapturedModel, Tape
from engine.worker.sleep import Sleeper, objects_in, parts_of
from support.sleepers import sleeping_engine
from support.tiers import and_slowly

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def bytes_of(engine):
    weights, packed = parts_of(engine.model)
    held = [*weights, *engine.core.runner.cache.layers]
    return sum(tensor.nbytes for tensor in held), [layer.packed for layer in packed if layer.packed is not None]


def answers(engine):
    return [output.outputs[0].token_ids for output in LLM.from_engine(engine).generate(PROMPTS, GREEDY)]


INT8 = {"kv_cache_dtype": "int8_per_token_head"}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}


@pytest.mark.parametrize(
    ("named", "level"), and_slowly([({}, 1), (INT8, 2)], [({}, 2), (INT8, 1), (NGRAM, 1), (NGRAM, 2)])
)
def test_all_of_it_goes_and_comes_back(real_model, named, level):
    engine = sleeping_engine(real_model[1], **named)
    want, (awake, _) = answers(engine), bytes_of(engine)
    layers = [*engine.core.runner.cache.layers]
    for _ in range(2):
        engine.core.scheduler.kv_cache_manager.reset_prefix_cache()
        engine.sleeper.sleep(level)
        engine.sleeper.sleep(level)  # it sleeps
        assert bytes_of(engine) == (0, []) and engine.sleeper.asleep == {"weights", "kv_cache"}
        engine.sleeper.wake_up()
        assert bytes_of(engine)[0] == awake and not engine.sleeper.asleep
        assert all(old is new for old, new in zip(layers, engine.core.runner.cache.layers))
        assert answers(engine) == want


def test_one_after_the_other(real_model):
    engine = sleeping_engine(real_model[1])
    want = answers(engine)
    engine.core.scheduler.kv_cache_manager.reset_prefix_cache()
    engine.sleeper.sleep(2)
    engine.sleeper.wake_up(["weights"])
    assert engine.sleeper.asleep == {"kv_cache"} and not any(x.numel() for x in engine.core.runner.cache.layers)
    engine.sleeper.wake_up(["weights"])  # they are there
    engine.sleeper.wake_up(["kv_cache"])
    assert not engine.sleeper.asleep and answers(engine) == want


def test_a_file_that_is_mapped_is_let_go():
    """A weight out of a file is a view: what it is a view of would keep the pages."""
    model = llama.random_model()
    flat = torch.arange(16.0)
    model.norm = flat.view(4, 4)
    Sleeper(runner_of_nothing(), model, llama.random_model).sleep(1)
    assert flat.numel() == 0


def runner_of_nothing():
    """It has a cache, and no recordings."""
    return SimpleNamespace(cache=SimpleNamespace(layers=[torch.zeros(2, 3)]), graphs=None)


@pytest.mark.parametrize("library", ["MKL", "oneDNN"], indirect=True)
def test_packed_layers_are_packed_anew(library):
    model = llama.random_model()
    packed = pack_weights(model)
    layers = [layer for layer in packed.linear.values() if isinstance(layer, PackedLinear)]
    assert layers
    x = torch.randn(3, layers[0].weight.shape[1])
    want = layers[0](x)
    sleeper = Sleeper(runner_of_nothing(), model, llama.random_model)
    sleeper.sleep(1)
    assert all(layer.packed is None for layer in layers)
    sleeper.wake_up()
    assert torch.equal(layers[0](x), want)


def test_recordings_are_made_anew(real_model):
    """A graph knows addresses."""
    engine = sleeping_engine(real_model[1])
    runner = engine.core.runner
    config = engine.core.scheduler.config
    runner.graphs = CapturedModel(engine.model, runner.cache, runner.attend, config, graph_class=Tape, full=False)
    runner.graphs.capture_all()
    before = set(runner.graphs.captured)
    want = answers(engine)
    engine.core.scheduler.kv_cache_manager.reset_prefix_cache()
    engine.sleeper.sleep(1)
    assert not runner.graphs.captured
    engine.sleeper.wake_up()
    assert set(runner.graphs.captured) == before and answers(engine) == want


def test_each_object_is_found_once():
    inner = {"a": [torch.zeros(2)], "b": None}
    inner["b"] = inner
    assert sum(isinstance(x, torch.Tensor) for x in objects_in((inner, inner["a"]))) == 1

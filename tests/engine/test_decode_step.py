"""One decode step of one request, file by file: decided, run, and only then heard of."""

from __future__ import annotations

import common

import itertools
import sys
from pathlib import Path

import pytest

from engine.assemble import make_core
from engine.config import SchedulerConfig, VllmConfig
from engine.request import Request, SamplingParams

DECIDES = ("scheduler.py", "kv_cache_manager.py", "block_pool.py", "queues.py")


def files_of(step):
    """The files of `vllm/` whose functions are called, in order; one that calls itself counts once."""
    entered = []

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(common.HERE):
            entered.append(path.relative_to(common.HERE).as_posix())

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return [file for file, _ in itertools.groupby(entered)]


@pytest.fixture
def decoding(tiny_model):
    """A core whose only request is past its prompt."""
    core = make_core(tiny_model, SchedulerConfig(64, 4, 64), 20, 4, VllmConfig())
    core.add_request(Request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    core.step()
    core.step()
    return core


def test_a_step_goes_down_the_layers_and_does_not_turn_back_into_scheduling(decoding):
    files = files_of(decoding.step)
    names = [Path(file).name for file in files]
    chosen = names.index("model_runner.py")
    assert set(names[:chosen]) <= {"engine_core.py", "config.py", "request.py", "output.py", "seams.py", *DECIDES}
    ran = len(names) - 1 - names[::-1].index("model_runner.py")
    assert not set(names[chosen:ran]) & set(DECIDES), "the batch is chosen: nobody who runs it asks again"
    assert "scheduler.py" in names[ran:], "and the scheduler hears of it at the end"


def test_few_files_stand_before_the_first_layer(decoding):
    """Of 22 hops, 13 inside scheduling, when the engine was a tower of classes."""
    files = files_of(decoding.step)
    first = files.index("engine/model/llama.py")
    inside = [file for file in files[: files.index("engine/worker/model_runner.py")] if Path(file).name in DECIDES]
    assert first <= 20 and len(inside) <= 5, files[: first + 1]


def test_whoever_turns_back_is_seen(decoding, monkeypatch):
    """As a runner did that asked the scheduler's manager for block tables."""
    runner, manager = decoding.runner, decoding.scheduler.kv_cache_manager
    forward = runner.forward

    def asking(*what):
        manager.get_block_ids("a")
        return forward(*what)

    monkeypatch.setattr(runner, "forward", asking)
    with pytest.raises(AssertionError, match="nobody who runs it asks again"):
        test_a_step_goes_down_the_layers_and_does_not_turn_back_into_scheduling(decoding)

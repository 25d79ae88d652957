"""Tour 06e: three hand-overs to a slow reader, what waking costs, and three places on the real model."""

from __future__ import annotations

import common

import asyncio
import itertools

import pytest

import on_gpu
from engine import registry
from engine.model import folders
from engine.request import SamplingParams
from engine.serving import collector
from engine.serving.async_llm import AsyncLLM
from engine.serving.clients import CLIENTS
from lab import cli
from support import scripts
from support.cases import named

lesson, page = registry.lesson("06e_async_engine"), cli.numbers("06e_async_engine")


def test_a_slow_reader():
    for read_ms, step, handoff in itertools.product(
        page.WIDGET_CHOICES["read_ms"], page.WIDGET_CHOICES["step_ms"], list(lesson.HANDOFFS)
    ):
        with named(read_ms, step, handoff):
            trace = page.simulate({"handoff": handoff, "step_ms": step, "read_ms": read_ms, "tokens": 32})
            assert sum(read["tokens"] for read in trace["reads"]) == 32 == len(trace["put_at"])
            assert trace["reads"][-1]["left"] == 0
            at = [read["at"] for read in trace["reads"]]
            assert all(b - a >= read_ms for a, b in itertools.pairwise(at))
            if handoff == "collector":
                assert trace["most_items"] == 1 and trace["engine_waited"] == 0 and trace["oldest"] <= read_ms
            elif handoff == "queue":
                assert trace["engine_waited"] == 0 and len(at) == 32
            else:
                assert trace["most_items"] <= lesson.BOUND and trace["engine_done"] >= 27 * read_ms


def test_the_widget_uses_the_real_collector(monkeypatch):
    before = page.simulate(page.WIDGET_DEFAULT)
    monkeypatch.setattr(collector, "merge_outputs", lambda old, new: None)
    with pytest.raises(AssertionError, match="when something waits"):
        page.simulate(page.WIDGET_DEFAULT)
    monkeypatch.undo()
    assert page.simulate(page.WIDGET_DEFAULT) == before


def test_tasks_and_threads_hand_over_everything():
    for wake in (lesson.wake_threads, lesson.wake_tasks):
        created, seconds = wake(8, 2)
        assert created > 0 and seconds > 0


def test_a_model_with_a_short_context_is_named(tmp_path):
    """Nobody has set a max_model_len."""
    folder = on_gpu.random_folder(tmp_path / "model", hidden_size=48, intermediate_size=64, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=1, head_dim=24,
                                  max_position_embeddings=256)  # fmt: skip
    with pytest.raises(common.InputError) as refused:
        lesson.main(["--model", str(folder)])
    assert str(refused.value) == "--model: a context of 256 tokens is too short; this story takes 512"


@pytest.mark.slow
def test_a_killed_process_and_every_place_on_the_real_model():
    """The fast twins: test_official_client kills a real engine process; test_async_llm compares the places on the tiny
    model."""
    args = lesson.build_parser().parse_args([])
    prompts = [[504, 3575, 282, 4649, 314]] * 3
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = [asyncio.run(lesson.measure_place(place, args, prompts, params, 1))["texts"] for place in CLIENTS]
    assert found[0] == found[1] == found[2]
    heard, seconds = asyncio.run(lesson.kill_the_engine(args, prompts))
    assert heard == 3 and scripts.within(seconds, 2)

    async def drop():
        llm = await AsyncLLM.start(
            lesson.make_small_engine, {"model": args.model, "seed": 0}, folders.model_folder(None)
        )
        return llm.client.process

    process = asyncio.run(drop())
    process.join(10)
    assert process.exitcode == 0, "an engine that nobody has any more ends"

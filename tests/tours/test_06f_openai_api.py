"""Tour 06f: a forgetful server, a stream cut anywhere, and every state of its widget."""

from __future__ import annotations

import ast
import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import registry
from engine.request import SamplingParams
from engine.serving.openai import serving as openai_serving
from lab import cli
from support import modules
from support.scripted_api import Letters, P, serve

lesson, page = registry.lesson("06f_openai_api"), cli.numbers("06f_openai_api")


def test_the_forgetful_server_is_caught():
    llm, app = serve(Letters([(0, "x", False, False)] * 50), kind=lesson.ForgetfulServing)
    asyncio.run(lesson.call(app, "/v1/completions", P | {"stream": True}, hang_up_after=2))
    assert llm.added and not llm.aborted


@given(st.text(max_size=40), st.integers(1, 60))
def test_a_stream_reads_the_same_however_it_is_cut(text, size):
    raw = "".join(lesson.event({"choices": [{"index": 0, "text": char}]}) for char in text) + "data: [DONE]\n\n"
    data = raw.encode("utf-8", "replace")
    cut = [data[i : i + size] for i in range(0, len(data), size)]
    assert asyncio.run(lesson.incremental_text(cut)) == text.encode("utf-8", "replace").decode()


@pytest.mark.parametrize("name", ["06_serving", "06e_async_engine", "06f_openai_api"])
def test_importing_costs_no_web_framework(name):
    """Only functions import it, so a lesson that loads these files does not pay for it."""
    tree = ast.parse(modules.paths()[name].read_text())
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert "asyncio" in names and not {n.split(".")[0] for n in names} & {"fastapi", "starlette", "uvicorn", "httpx"}


def test_widget_states():
    """Every state that the widget can reach, except the largest prompt: the first check that fails decides."""
    states = list(itertools.product(*list(page.WIDGET_CHOICES.values())[:2], ["5 characters", "empty"], [0, 4]))
    traces = asyncio.run(page._ask([dict(zip(page.WIDGET_CHOICES, state)) for state in states]))
    for (key, field, prompt, inside), trace in zip(states, traces):
        if key == "wrong":
            assert trace["status"] == 401
        elif field == "model gpt-9":
            assert trace["status"] == 404
        elif (field != "nothing unusual" and not (field == "max_tokens 65" and prompt == "empty")) or prompt == "empty":
            assert trace["status"] == 400
        else:
            assert trace["status"] == (503 if inside == 4 else 200)
        assert trace["engine_heard"] == (trace["status"] == 200)
    big = page.simulate({**page.WIDGET_DEFAULT, "key": "right", "prompt": "5 MB"})
    assert big["status"] == 413 and big["engine_heard"] == 0


def test_stations_look_in_the_order_of_the_figure_and_one_mistake_is_named_at_a_time():
    order = [*(name for name, *_ in page.GATES), "engine"]
    wrong = {"key": "wrong", "field": "half a body", "prompt": "64 characters", "inside": 0}
    trace = page.simulate(wrong)
    assert "at at" not in trace["then"][0]["message"]  # Python's reader: "Unterminated string starting at"
    found = [trace, *trace["then"]]
    assert [answer["looked"][-1] for answer in found] == ["key", "JSON", "length", "engine"]
    assert all(answer["looked"] == order[: len(answer["looked"])] for answer in found)
    assert [answer.get("corrected") for answer in found] == [None, "key", "field", "prompt"]
    assert [answer["engine_heard"] for answer in found] == [0, 0, 0, 1]
    full = page.simulate(wrong | {"inside": 4})["then"]
    assert [answer["status"] for answer in full] == [400, 400, 503], "a client cannot correct that others are inside"
    assert full[-1]["retry_after"] and not any(answer["engine_heard"] for answer in full)


def test_the_widget_uses_the_real_checks(monkeypatch):
    monkeypatch.setattr(openai_serving, "sampling_params", lambda *args: SamplingParams())
    assert page.simulate({**page.WIDGET_DEFAULT, "key": "right", "prompt": "5 characters"})["status"] == 200

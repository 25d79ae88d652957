"""What the server says in its answers, as its flags have it."""

from __future__ import annotations

import common

import asyncio
import logging

import pytest

from engine.serving.frontend_args import FrontendArgs
from engine.serving.openai.app import build_app
from engine.serving.openai.serving import OpenAIServing
from support.async_engines import running
from support.scripted_api import CHAT, COMPLETION, Letters, M, P, ScriptedLLM, call, read_events


def heard_from(llm, path, body, **frontend):
    serving = OpenAIServing(llm, ["smol"])
    serving.frontend = FrontendArgs(**frontend)
    return asyncio.run(call(build_app(serving), path, body))


@pytest.mark.parametrize(("path", "body"), [(COMPLETION, P), (CHAT, M)])
def test_streams_end_with_usage_asked_for_or_not(path, body):
    body = body | {"stream": True}
    plain = read_events(heard_from(ScriptedLLM(512), path, body).text)
    assert not any("usage" in event for event in plain if isinstance(event, dict))
    for options in ({}, {"stream_options": {"include_usage": False}}):
        events = read_events(heard_from(ScriptedLLM(512), path, body | options, enable_force_include_usage=True).text)
        events = [event for event in events if isinstance(event, dict)]
        assert events[-1]["usage"]["total_tokens"] > 0 and events[-1]["choices"] == []
        assert all(event["usage"] is None for event in events[:-1])


def test_what_was_cached_may_be_left_out():
    usage = heard_from(ScriptedLLM(512), COMPLETION, P).json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    usage = heard_from(ScriptedLLM(512), COMPLETION, P, enable_prompt_tokens_details=False).json["usage"]
    assert usage["prompt_tokens_details"] is None and usage["total_tokens"] > 0


@pytest.mark.parametrize(("server", "client", "sizes"), [
    (1, None, [1] * 8), (3, None, [1, 3, 3, 1]), (2, 4, [1, 4, 3]), (4, 2, [1, 4, 3]),
])  # fmt: skip
def test_the_larger_interval_counts(server, client, sizes):
    """Tokens in a piece, but for the first and the last."""
    pieces = [(0, "x", i == 7, i == 7) for i in range(8)]
    body = P | {"stream": True, "stream_interval": client}
    events = read_events(heard_from(Letters(pieces), COMPLETION, body, stream_interval=server).text)
    assert [len(event["choices"][0]["text"]) for event in events if isinstance(event, dict)] == sizes


@pytest.mark.parametrize(("named", "problem"), [
    ({"uvicorn_log_level": "loud"}, "uvicorn_log_level 'loud': must be one of critical, error"),
    ({"stream_interval": 0}, "stream_interval 0: must be a whole number of at least 1"),
])  # fmt: skip
def test_a_wrong_one_is_named(named, problem):
    with pytest.raises(common.InputError, match=problem):
        FrontendArgs(**named)


def test_a_line_for_each_request(tiny, folder, caplog, monkeypatch):
    """With its parameters, and without its prompt."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    async def story():
        async with running(tiny, folder, "event-loop") as llm:
            app = build_app(OpenAIServing(llm, ["tiny"]))
            await call(app, COMPLETION, {"prompt": [101, 102], "max_tokens": 1})
            assert not caplog.records
            llm.log_requests = True
            await call(app, COMPLETION, {"prompt": [101, 102], "max_tokens": 1})
            await call(app, "/v1/embeddings", {"input": [101, 102]})

    with caplog.at_level(logging.INFO, "vllm"):
        asyncio.run(story())
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("Received request cmpl-") and "max_tokens=1," in first
    assert first.endswith("lora_request: None.") and "101" not in first + second
    assert "PoolingParams(pooling_type='LAST'" in second

"""What developers may ask of a server: in their mode alone, behind the keys, one clear line for what is wrong."""

from __future__ import annotations

import asyncio
import json
import urllib.parse

import pytest

from engine.engine_args import EngineArgs
from engine.serving.openai.app import build_app
from engine.serving.openai.serving import OpenAIServing
from support.async_engines import idle, running
from support.scripted_api import ScriptedLLM, call, check_error
from support.sleepers import sleeping_engine


async def ask(app, path, method="POST", **query):
    """With the query as a client would write it."""

    async def with_query(scope, receive, send):
        await app({**scope, "query_string": urllib.parse.urlencode(query, doseq=True).encode()}, receive, send)

    return await call(with_query, path, b"", method=method)


def test_to_sleep_and_awake_again(real_model, folder, tiny):
    def make(args=None, report=lambda text: None):
        return sleeping_engine(real_model[1])

    async def story():
        async with running(make, folder, "thread") as llm:
            app = build_app(OpenAIServing(llm, ["tiny"]), debug=True)
            completion = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
            want = (await call(app, "/v1/completions", completion)).json["choices"]
            assert (await ask(app, "/is_sleeping", "GET")).json == {"is_sleeping": False}
            assert (await ask(app, "/sleep", level=2)).json == {"status": "sleeping", "level": 2}
            assert (await ask(app, "/is_sleeping", "GET")).json == {"is_sleeping": True}
            assert (await call(app, "/health", method="GET")).status == 200
            waits = asyncio.create_task(call(app, "/v1/completions", completion))
            assert (await ask(app, "/wake_up", tags="weights")).json == {"status": "sleeping", "tags": ["weights"]}
            assert not waits.done()
            check_error(await ask(app, "/wake_up", tags="all"), 400, None, "one of scheduling, weights, kv_cache")
            assert (await ask(app, "/wake_up")).json == {"status": "awake", "tags": None}
            assert (await waits).json["choices"] == want
            assert (await ask(app, "/reset_prefix_cache")).json == {"success": True}
            for query in ({"level": 3}, {"level": "deep"}, {"mode": "now"}):
                check_error(await ask(app, "/sleep", **query), 400, *query)
            await idle(llm)

    asyncio.run(story())


def test_what_it_was_started_with(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    serving = OpenAIServing(ScriptedLLM(max_model_len=512), ["smol"])
    serving.engine_args = EngineArgs(max_model_len=77)
    app = build_app(serving, debug=True)
    text = asyncio.run(ask(app, "/server_info", "GET"))
    assert "max_model_len=77" in text.json["vllm_config"] and "secret" not in text.text
    assert text.json["vllm_env"]["VLLM_SERVER_DEV_MODE"] == "1" and text.json["system_env"]["torch"]
    form = asyncio.run(ask(app, "/server_info", "GET", config_format="json"))
    assert form.json["vllm_config"]["max_model_len"] == 77 and json.dumps(form.json)
    check_error(asyncio.run(ask(app, "/server_info", "GET", config_format="xml")), 400, "config_format")


PATHS = {"/sleep": "POST", "/wake_up": "POST", "/reset_prefix_cache": "POST", "/is_sleeping": "GET",
         "/server_info": "GET"}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_they_are_there_in_developers_mode_and_behind_the_keys(path):
    serving = OpenAIServing(ScriptedLLM(max_model_len=512), ["smol"])
    check_error(asyncio.run(ask(build_app(serving), path, PATHS[path])), 404)
    check_error(asyncio.run(ask(build_app(serving, ["key"], debug=True), path, PATHS[path])), 401)

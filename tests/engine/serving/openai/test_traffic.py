"""What goes through is counted by route and status, and who is inside is known."""

from __future__ import annotations

import asyncio

from engine.serving.frontend_args import FrontendArgs
from engine.serving.openai.app import build_app
from engine.serving.openai.serving import OpenAIServing
from support.scripted_api import COMPLETION, RESPONSE, Letters, P, ScriptedLLM, call


def app_of(llm=None, keys=(), **frontend):
    serving = OpenAIServing(llm or ScriptedLLM(max_model_len=512), ["smol"])
    serving.frontend = FrontendArgs(**frontend)
    return build_app(serving, keys)


def ask(app, *requests):
    async def all_of_them():
        return [await call(app, *about[:2], **(about[2] if len(about) > 2 else {})) for about in requests]

    return asyncio.run(all_of_them())


def value(text, name, **labels):
    """Of a sample in Prometheus's text; None if there is none."""
    for line in text.splitlines():
        head, _, number = line.rpartition(" ")
        if head.split("{")[0] == name and all(f'{key}="{value}"' in head for key, value in labels.items()):
            return float(number)
    return None


GET = {"method": "GET"}


def test_requests_are_counted_by_route_and_kind_of_status():
    app = app_of(keys=["key"])
    auth = {"headers": {"authorization": "Bearer key"}}
    *_, metrics = ask(app, (COMPLETION, P), (COMPLETION, P, auth), (COMPLETION, P, auth),
                      ("/v1/models/smol", None, GET | auth), ("/v1/responses/none", None, GET | auth),
                      ("/somewhere/else", None, GET), ("/health", None, GET), (COMPLETION, None, GET | auth),
                      ("/metrics", None, GET))  # fmt: skip

    def count(**labels):
        return value(metrics.text, "http_requests_total", **labels)

    assert count(handler=COMPLETION, method="POST", status="2xx") == 2
    assert count(handler=COMPLETION, method="POST", status="4xx") == 1  # without a key
    assert count(handler=COMPLETION, method="GET", status="4xx") == 1  # no such method
    assert count(handler="/v1/models/{name:path}", status="2xx") == 1
    assert count(handler="/v1/responses/{response_id}", status="4xx") == 1
    assert count(handler="none", status="4xx") == 1 and count(handler="/health") is None
    assert value(metrics.text, "http_request_duration_highr_seconds_count") == 7
    assert value(metrics.text, "http_request_duration_seconds_count", handler=COMPLETION, method="POST") == 3
    assert value(metrics.text, "http_response_size_bytes_sum", handler=COMPLETION) > 500
    assert value(metrics.text, "process_start_time_seconds") > 0
    assert value(metrics.text, "vllm:num_requests_running") is None  # nobody counts for this engine


def test_the_load_is_who_is_inside():
    """A stream counts until it ends, however it ends; what nobody computes does not count."""
    app = app_of(Letters([(0, "a", False, False)]), enable_server_load_tracking=True)

    async def load():
        return (await call(app, "/load", method="GET")).json["server_load"]

    async def story():
        said = [await load()]
        streams = [asyncio.create_task(call(app, COMPLETION, P | {"stream": True}, hang_up_after=3)) for _ in range(2)]
        await asyncio.sleep(0.05)
        said.append(await load())
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        return [*said, await load()]

    assert asyncio.run(story()) == [0, 2, 0]


def test_without_the_flag_the_load_is_0():
    app = app_of(Letters([(0, "a", False, False)]))

    async def story():
        task = asyncio.create_task(call(app, COMPLETION, P))
        await asyncio.sleep(0.02)
        found = (await call(app, "/load", method="GET")).json
        task.cancel()
        return found

    assert asyncio.run(story()) == {"server_load": 0}


def test_an_answer_has_the_name_of_its_request():
    mine = {"headers": {"x-request-id": "me"}}
    app = app_of(enable_request_id_headers=True)
    named, new, refused = ask(app, (COMPLETION, P, mine), ("/health", None, GET), (RESPONSE, {}))
    assert named.headers["x-request-id"] == "me" and named.json["id"] == "cmpl-me"
    assert len(new.headers["x-request-id"]) == len(refused.headers["x-request-id"]) == 32
    assert new.headers["x-request-id"] != refused.headers["x-request-id"]
    (plain,) = ask(app_of(), (COMPLETION, P))
    assert "x-request-id" not in plain.headers

"""What a request gets that does not say."""

from __future__ import annotations

import pytest

from engine.sampling.defaults import SamplingDefaults
from support.scripted_api import M, P, ScriptedLLM, ask, serve

OPEN = {"completions": {"prompt": "Hello"}, "chat/completions": M, "responses": {"input": "Hello"}}


@pytest.mark.parametrize("path", OPEN)
def test_what_a_request_leaves_open_is_as_the_model_wishes(path):
    """vLLM: the client's, then the model's, then OpenAI's; and a server's limit holds for everybody."""
    longest = {"completions": "max_tokens", "responses": "max_output_tokens"}.get(path, "max_completion_tokens")
    wishes = {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.25}
    for more, limit, body, want in (
        ({}, None, {}, (0.25, 7, 1.25, 16 if path == "completions" else None)),
        ({}, None, {"temperature": 1.5, "top_k": 0, longest: 9}, (1.5, 0, 1.25, 9)),
        ({"max_tokens": 5}, None, {}, (0.25, 7, 1.25, 16 if path == "completions" else 5)),
        ({"max_tokens": 5}, None, {longest: None, "temperature": None}, (0.25, 7, 1.25, 5)),
        ({"max_tokens": 5}, None, {longest: 9}, (0.25, 7, 1.25, 9)),
        ({"max_tokens": 5}, 5, {longest: 9}, (0.25, 7, 1.25, 5)),
        ({"max_tokens": 10**6}, 10**6, {longest: None}, (0.25, 7, 1.25, 512)),  # no more than a context
    ):
        llm = ScriptedLLM(512)
        llm.sampling_defaults = SamplingDefaults(wishes | more, limit)
        _, app = serve(llm)
        heard = ask(app, f"/v1/{path}", OPEN[path] | body)
        assert heard.status == 200, heard.text
        found = llm.added[-1][2]
        assert (found.temperature, found.top_k, found.repetition_penalty, found.max_tokens) == want, (more, limit, body)


def test_a_limit_beyond_the_context_ends_with_it(shared):
    llm, app = shared
    llm.added.clear()
    for limit in (2, 512):
        assert ask(app, "/v1/completions", {"prompt": "x" * 511, "max_tokens": limit}).status == 200
    assert [params.max_tokens for *_, params in llm.added] == [2, 512], "the engine knows where the context ends"


def test_no_limit_means_sixteen_tokens_in_a_completion_and_the_context_in_a_chat():
    llm, app = serve()
    for body in (P, P | {"max_tokens": None}, P | {"max_tokens": None, "echo": True}):
        assert ask(app, "/v1/completions", body).status == 200
    assert ask(app, "/v1/chat/completions", M | {"max_tokens": None}).status == 200
    assert [params.max_tokens for *_, params in llm.added] == [16, 16, 16, None]

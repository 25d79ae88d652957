"""A field that nobody knows changes nothing, and the log says so once; or it is refused."""

from __future__ import annotations

import logging

import pytest

from engine.serving.openai.unknown_fields import MAX_NAMED, UnknownFields
from support.scripted_api import CHAT, COMPLETION, RESPONSE, M, P, ask, check_error, serve

BODIES = [(COMPLETION, P), (CHAT, M), (RESPONSE, {"input": "x"}), ("/tokenize", {"prompt": "x"}),
          ("/v1/messages", M | {"max_tokens": 3})]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_unknown_field_is_passed_over_and_named_once(path, body, caplog):
    """As vLLM does: LiteLLM's and the AI SDK's own fields are for other servers."""
    _, app = serve()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert ask(app, path, body | {"temprature": 1, "providerOptions": {"x": 1}, "nothing": None}).status == 200
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and ".temprature'" in said[0] and "--strict-fields" in said[0]
    assert ".providerOptions'" in said[1]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_strict_fields_refuses_it_by_its_name(path, body):
    llm, app = serve(strict_fields=True)
    heard = ask(app, path, body | {"temprature": 1})
    assert heard.status == 400 and "temprature" in heard.json["error"]["message"] and not llm.added
    assert ask(app, path, body | {"temprature": None}).status == 200


def test_an_unknown_field_within_a_field(caplog):
    _, app = serve()
    body = M | {"stream": True, "stream_options": {"include_usage": True, "x": 1}}
    assert ask(app, CHAT, body).status == 200 and "StreamOptions.x" in caplog.text
    check_error(ask(serve(strict_fields=True)[1], CHAT, body), 400, "stream_options")


def test_the_log_is_not_for_clients_to_fill(caplog):
    fields = UnknownFields()
    fields.pass_over("K", (f"x{i}" for i in range(5 * MAX_NAMED)))
    assert len(caplog.records) == MAX_NAMED == len(fields.named)
    fields = UnknownFields()
    fields.pass_over("K", ["a\nINFO: b", "y" * 10_000])
    assert "\n" not in caplog.records[-2].getMessage() and len(caplog.records[-1].getMessage()) < 400


@pytest.mark.parametrize("field", ["functions", "function_call"])
def test_fields_that_were_replaced_are_named_in_our_words(field):
    given = {"functions": [{"name": "f"}], "function_call": {"name": "f"}}[field]
    for strict in (False, True):
        app = serve(strict_fields=strict)[1]
        check_error(ask(app, CHAT, M | {field: given}), 400, field, "replaced functions and function_call by tools")
        assert ask(app, CHAT, M | {"functions": [], "function_call": "none"}).status == 200

"""Bytes that are no JSON, or do not say that they are."""

from __future__ import annotations

import gzip

import pytest

from support.scripted_api import P, ask, check_error

UNREADABLE = "the body is not JSON that can be read: it must be UTF-8, not nested too deeply"
SURROGATE = "half of a surrogate pair is no text"


@pytest.mark.parametrize(
    ("body", "text"),
    [(b'{"prompt": "\\ud800"}', f"prompt: {SURROGATE}"), (b'{"prompt": "x", "model": "\\ud800"}', SURROGATE),
     (b'{"prompt": "x", "\\ud800": 1}', "unicode"), (b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}', SURROGATE),
     (b'{"prompt": "x", "response_format": {"type": "\\udfff"}}', SURROGATE),
     (b"[" * 100_000, UNREADABLE), (b'{"prompt": ' + b'{"a": ' * 50_000, UNREADABLE),
     (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", UNREADABLE),
     ('{"prompt": "é"}'.encode("latin-1"), UNREADABLE), (gzip.compress(b'{"prompt": "x"}', mtime=0), UNREADABLE),
     (b'{"prompt": "x", "seed": 1e999}', "seed: "), (b'{"prompt": "x\x00", "n": -0.0}', "not JSON: Invalid control"),
     (b"\xef\xbb\xbf{}", "prompt: Field required"), (b"nan", "not JSON: Expecting value")],
)  # fmt: skip
def test_bodies_that_break_parsers(shared, body, text):
    """Lone surrogates that no answer could repeat, nesting without end, numbers of 5,000 digits, other encodings."""
    llm, app = shared
    heard = ask(app, "/v1/completions", body)
    check_error(heard, 400, text=text)
    assert not llm.added


def test_a_body_says_that_it_is_json(shared):
    """`curl -d` sends a form, unless it is told; FastAPI then sees a text and would complain about fields."""
    for header in ("application/x-www-form-urlencoded", "text/plain", ""):
        for body in (P, b""):
            heard = ask(shared[1], "/v1/completions", body, headers={"content-type": header})
            check_error(heard, 400, None, "invalid request: Content-Type: must be application/json")
    for body in (b"null", b"[]", b'"x"', b"5", b"true", b""):
        heard = ask(shared[1], "/v1/completions", body)
        assert "the body must be one JSON object" in check_error(heard, 400)["message"]
    for header in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert ask(shared[1], "/v1/completions", P, headers={"content-type": header}).status == 200
        check_error(ask(shared[1], "/v1/completions", b"null", headers={"content-type": header}), 400, None, "the body")
    shared[0].added.clear()

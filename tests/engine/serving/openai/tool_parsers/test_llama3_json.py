"""Llama 3's calls read the same however their characters come."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.serving.openai.tool_parsers.json_end import JSONEnd
from engine.serving.openai.tool_parsers.llama3_json import Llama3JSONParser
from support.cases import named

HARD = {"a": '}]"\\{;<|python_tag|>', "b": [{"name": "g", "parameters": {}}]}
TAG = "<|python_tag|>"


def call(arguments, key="parameters"):
    return json.dumps({"name": "f", key: arguments})


def read(pieces):
    parser, content, calls = Llama3JSONParser(), "", []
    for i, piece in enumerate(pieces):
        text, found = parser.read(piece, i == len(pieces) - 1)
        content, calls = content + text, calls + found
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


CASES = [
    (call(HARD), "", [("f", HARD)]), (TAG + call(HARD), "", [("f", HARD)]),
    (call({}, "arguments"), "", [("f", {})]),
    (f"{call({})}; {call(HARD)}", "", [("f", {}), ("f", HARD)]),
    (f"{TAG}{call({})};{TAG} {call(HARD)}\n", "", [("f", {}), ("f", HARD)]),
    (f"Sure: {call({})} done", "Sure: done", [("f", {})]),
    ("Use {x} and {'y'}", "Use {x} and {'y'}", []), ('{"name": "f"}', '{"name": "f"}', []),
    (json.dumps({"x": {"name": "g", "parameters": {}}}), json.dumps({"x": {"name": "g", "parameters": {}}}), []),
    (call(HARD)[:-1], call(HARD)[:-1], []), (TAG, TAG, []), (TAG + " \n", TAG + " \n", []),
    (TAG + "search.call(x)", TAG + "search.call(x)", []), ("<|python", "<|python", []), ("", "", []),
    (f"{TAG}{TAG}{call({})}", TAG, [("f", {})]), ("{'" + call({}), "{'", [("f", {})]),
    ('{"a": "\n' + call({}), '{"a": "\n', [("f", {})]),
]  # fmt: skip


def test_calls_read_the_same_however_they_come():
    for text, content, calls in CASES:
        with named(text, content, calls):
            assert read([text]) == (content, calls) == read([*text, ""])


@given(st.lists(st.sampled_from([TAG, call({}), call(HARD), "{", "}", '"', "; ", "x", " ", "\n", "<|"]), max_size=10)
       .map("".join), st.lists(st.integers(0, 300), max_size=12))  # fmt: skip
@settings(max_examples=200)
def test_what_nearly_is_a_call_reads_the_same_however_it_comes(text, cuts):
    """And costs one look at a character, however many objects begin and do not end."""
    at = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    looks, look = [], JSONEnd.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONEnd, "read", lambda end, text: looks.append(n := look(end, text)) or n)
        whole = read([text])
        assert sum(looks) <= len(text)
    assert read([text[a:b] for a, b in itertools.pairwise(at)] or [""]) == whole
    assert read([*text, ""]) == whole

"""A call is one by its name and its arguments, under any of the names that a format has for them."""

from __future__ import annotations

import pytest

from engine.serving.openai.tool_parsers.json_end import JSONEnd, decided_call


@pytest.mark.parametrize(
    ("text", "length", "ended", "broken"),
    [('{"a": [1, {}]} x', 14, True, False), ('{"}": "]\\""', 11, False, False), ("{'", 1, False, True),
     ('{"a": "b\nc', 8, False, True), ("x", 0, False, True)],
)  # fmt: skip
def test_where_an_object_ends(text, length, ended, broken):
    end = JSONEnd()
    assert (end.read(text), end.ended, end.broken) == (length, ended, broken)


@pytest.mark.parametrize(
    ("text", "want"),
    [('{"name": "f", "arguments": {"x": 1}}', ("f", '{"x": 1}')),
     ('{"name": "f", "parameters": {}}', ("f", "{}")),
     ('{"name": "f", "parameters": {"b": 2}, "arguments": {"a": 1}}', ("f", '{"a": 1}')),
     ('{"name": "f", "arguments": 5}', None), ('{"name": 5, "arguments": {}}', None), ('{"name": "f"}', None),
     ('["name"]', None), ('{"name": "\\ud83d", "arguments": {}}', None)],
)  # fmt: skip
def test_what_is_a_call(text, want):
    assert decided_call(text, "arguments", "parameters") == want
    assert want is None or '"arguments"' in text or decided_call(text, "arguments") is None

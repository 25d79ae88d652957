"""Calls as Python writes them read the same however their characters come, and nothing of them is run."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.serving.openai.tool_parsers.pythonic import PythonicParser
from support.cases import named


def read(pieces):
    parser, content, calls = PythonicParser(), "", []
    for i, piece in enumerate(pieces):
        text, found = parser.read(piece, i == len(pieces) - 1)
        content, calls = content + text, calls + found
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


CASES = [
    ('[f(city="Rome", days=[1, -2.5], deep={"a": (True, null)})]', "",
     [("f", {"city": "Rome", "days": [1, -2.5], "deep": {"a": [True, None]}})]),
    ("[f(), a.b.g(x='])'), f(x=false)]", "", [("f", {}), ("a.b.g", {"x": "])"}), ("f", {"x": False})]),
    ("\n [ f(x=1)\n]\n\nDone.", "Done.", [("f", {"x": 1})]),
    ('[f(x="two\nlines", y="a\\"b")]', "", [("f", {"x": "two\nlines", "y": 'a"b'})]),
    ("[f(from=1, in='class=2', class_=3)]", "", [("f", {"from": 1, "in": "class=2", "class_": 3})]),
    *((text, text, []) for text in (
        "No.", "[1, 2]", "[f(1)]", "[f(x=y)]", "[f(**x)]", "[f(x=open('/etc/passwd'))]", "[f()(x=1)]", "[f(x=1)",
        "[]", "[f(x=1e999)]", "[f(x={1: 2})]", "[f(x={1})]", "[f(x=b'a')]", "[f(x=1j)]", "[a link](b) and more", "",
        "Then [f(x=1)]", "f(x=1)", "[f(x=1)}", "[lambda: 0]", "[f(x=1) for x in y]",
        "[f(x=" + 5000 * "[" + 5000 * "]" + ")]", "[f(x=" + 5000 * "-" + "1)]", "[f(x=" + 9000 * "9" + ")]")),
]  # fmt: skip


def test_calls_read_the_same_however_they_come():
    for text, content, calls in CASES:
        with named(text, content, calls):
            assert read([text]) == (content, calls) == read([*text, ""])


@given(st.lists(st.sampled_from(["[", "]", "f(", ")", "x=", '"', "'", "\\", " ", "\n", "1", ",", "f(x=1)", "\0"]),
                max_size=12).map("".join), st.lists(st.integers(0, 60), max_size=9))  # fmt: skip
@settings(max_examples=200)
def test_what_nearly_is_a_list_of_calls_reads_the_same_however_it_comes(text, cuts):
    at = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    whole = read([text])
    assert read([text[a:b] for a, b in itertools.pairwise(at)] or [""]) == whole == read([*text, ""])
    assert whole[1] or whole[0] == text


def test_half_of_a_surrogate_pair_stays_an_escape():
    ((name, arguments),) = PythonicParser().read(r'[f(x="\ud83d")]', True)[1]
    assert (name, arguments) == ("f", r'{"x": "\ud83d"}')

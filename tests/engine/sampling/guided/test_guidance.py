"""Grammars in both of their languages, and what is said of those that the library refuses."""

from __future__ import annotations

import pytest

from engine.sampling.guided.guidance import read_grammar

SUM = """
?start: sum
?sum: product | sum "+" product -> add
?product: atom | product "*" atom -> mul
?atom: NUMBER -> number | "(" sum ")"
%import common.NUMBER
"""  # Lark's usual form; Outlines' own example begins like this


def fits(grammar, text):
    import llguidance

    matcher = read_grammar(llguidance.LLTokenizer("byte"), "grammar", grammar)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "text", "wrong"),
    [(SUM, "1+2*(3+4)", "1+"), ('?start: "a"', "a", "b"), ('!start : "::=" | "a"', "::=", ":"),
     ('  start: "a"', "a", "b"), ('%llguidance {}\nstart: "::="', "::=", "a"),
     ('root ::= "a" b\nb ::= [0-9]', "a1", "a")],
)  # fmt: skip
def test_grammars_in_both_languages(grammar, text, wrong):
    assert fits(grammar, text) and not fits(grammar, wrong)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [("start: A\nA: /a(?=b)b/", r'at 2\(4\): invalid regex "a\(\?=b\)b" \(in regex\): no look-ahead or look-behind$'),
     ('a: "b"', "no start rule"), ('root ::= "a', "GBNF")],
)  # fmt: skip
def test_what_is_said_of_a_grammar_that_is_refused(grammar, text):
    with pytest.raises(ValueError, match=text):
        fits(grammar, "a")


def test_a_pattern_with_look_ahead_in_a_schema():
    import llguidance

    with pytest.raises(ValueError, match=r"no look-ahead or look-behind$"):
        read_grammar(llguidance.LLTokenizer("byte"), "json", '{"type": "string", "pattern": "(?=a)a"}')

"""Hermes' format; how its pieces are cut is tested with the reader in front of it (test_tool_calls.py)."""

from __future__ import annotations

from engine.serving.openai.tool_parsers.hermes import HermesParser, half_open

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def test_text_and_calls():
    assert HermesParser().read(f"a {CALL}\n{CALL} b", True) == ("a b", 2 * [("f", "{}")])
    parser = HermesParser()
    assert parser.read("a <tool", False) == ("a ", []) and parser.read("_x", False) == ("<tool_x", [])


def test_how_much_of_a_tag_has_come():
    assert [half_open(text, "<tag>") for text in ("", "a", "a<", "<ta", "<tag>", "<<t")] == [0, 0, 1, 3, 0, 2]

"""What a schema may be, before anybody reads it."""

from __future__ import annotations

import json

import pytest

from engine.sampling.guided.guidance import read_grammar
from engine.sampling.guided.json_schemas import MAX_NESTING, guidance_schema, idle_keywords, read_schema


def nested(depth: int) -> str:
    """A schema of `depth` objects, one inside the other."""
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return json.dumps(schema)


def test_a_schema_nests_as_deep_as_it_may():
    assert read_schema(nested(MAX_NESTING))
    with pytest.raises(ValueError, match=f"nest more than {MAX_NESTING} deep"):
        read_schema(nested(MAX_NESTING + 1))


CLOSED = {"properties": {"a": {}, "b": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "asks_for_nothing"),
    [
        ({"required": ["a", "b"], "minProperties": 2}, True),
        ({"required": ["a", "b"], "minProperties": 3}, False),
        ({"required": ["a", "a"], "minProperties": 2}, False),
        (CLOSED | {"maxProperties": 2}, True),
        (CLOSED | {"maxProperties": 1}, False),
        (CLOSED | {"maxProperties": 2, "additionalProperties": True}, False),
        (CLOSED | {"maxProperties": 2, "patternProperties": {"^c": {}}}, False),
    ],
)
def test_a_count_asks_for_nothing_where_names_say_as_much(schema, asks_for_nothing):
    counts = {key for key in schema if key.endswith("Properties") and key[:3] in ("min", "max")}
    assert idle_keywords(schema) & counts == (counts if asks_for_nothing else set())


def fits(schema: dict, text: str) -> bool:
    import llguidance

    matcher = read_grammar(llguidance.LLTokenizer("byte"), "json", json.dumps(guidance_schema(json.dumps(schema))))
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("names", "fine", "wrong"),
    [
        ({"pattern": "^[a-z]+$"}, "ab", "A"),
        ({"enum": ["a.b", "(c)"]}, "a.b", "axb"),
        ({"const": "a", "title": "A"}, "a", "b"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "é\u00e9", "é"),
    ],
)
def test_names_of_properties(names, fine, wrong):
    """As XGrammar serves them in vLLM, and as Pydantic writes a `dict` whose keys are an enumeration."""
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    assert fits(schema, json.dumps({fine: 1}, ensure_ascii=False)) and fits(schema, "{}")
    assert not fits(schema, json.dumps({wrong: 1}, ensure_ascii=False))
    assert not fits(schema, json.dumps({fine: "x"}, ensure_ascii=False))
    assert fits({"type": "object", "propertyNames": names}, json.dumps({fine: "x"}, ensure_ascii=False))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"propertyNames": {"format": "date"}}, "propertyNames: only a pattern"),
        ({"propertyNames": {"enum": [5]}}, "propertyNames: only a pattern"),
        ({"propertyNames": False}, "propertyNames: only a pattern"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"a": {}}}, "propertyNames: not together with properties"),
    ],
)
def test_names_of_properties_that_are_refused_in_our_words(more, text):
    with pytest.raises(ValueError, match=text):
        guidance_schema(json.dumps({"type": "object"} | more))

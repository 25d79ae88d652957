"""What a schema may be, before anybody reads it."""

from __future__ import annotations

import json

import pytest

from engine.sampling.guided.json_schemas import MAX_NESTING, idle_keywords, read_schema


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

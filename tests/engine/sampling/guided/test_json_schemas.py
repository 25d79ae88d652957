"""What a schema may be, before anybody reads it."""

from __future__ import annotations

import json

import pytest

from engine.sampling.guided.json_schemas import MAX_NESTING, read_schema


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

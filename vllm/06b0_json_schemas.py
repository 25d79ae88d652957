"""06b0 · JSON schemas, read for writing: which properties an answer may have. A part of lesson 06b.

JSON Schema was made for checking what somebody wrote. There, a property that a schema does not name is welcome, and
{"properties": {"age": …}} is fulfilled by {"name": "Bob"}. For a model that writes under masks this is an invitation:
after the last property it may go on with one of its own, and another, until it is cut off. Nobody who sends a schema
wants that, and few say so ("additionalProperties": false). So XGrammar, which vLLM asks first, reads every schema
strictly: an object has the properties that are named, a tuple the items, and no others unless the schema says so.

Read for this: the JSON Schema specification (2020-12), XGrammar's `strict_mode`, vLLM 0.32
`v1/structured_output/backend_guidance.py:process_for_additional_properties`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_NESTING = 64  # of a schema's objects and arrays, as in vLLM


def read_schema(text: str) -> dict[str, Any]:
    """The schema in `text`, with its objects and tuples closed. Raises ValueError, RecursionError."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("must be a schema, a JSON object")
    level, depth = [schema], 0
    while level:
        inner = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
        level, depth = [child for child in inner if isinstance(child, dict | list)], depth + 1
        if depth > MAX_NESTING:
            raise ValueError(f"objects and arrays nest more than {MAX_NESTING} deep")
    close(schema)
    return schema


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema, and every schema inside it: what stands under "properties" has names, and is none itself."""
    if not isinstance(schema, dict):  # true and false are schemas, too, but have nothing to close
        return
    yield schema
    for key in ("properties", "$defs", "definitions"):
        named = schema.get(key)
        for inner in named.values() if isinstance(named, dict) else ():
            yield from subschemas(inner)
    for key in ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"):
        found = schema.get(key)
        for inner in found if isinstance(found, list) else [found]:
            yield from subschemas(inner)


def close(schema: dict[str, Any]) -> None:
    """Forbid what an object or a tuple does not name, unless its schema speaks of the rest.

    Where several schemas describe one value, each would forbid what the others name. If that happens anywhere, nothing
    is closed: a schema that is needed there may be used here. A required property that is not named stays possible.
    """
    found = list(subschemas(schema))
    for node in found:
        describe = {"properties", "prefixItems", "$ref", "anyOf", "oneOf", "allOf"} & node.keys()
        if len(describe) > 1 or (isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1):
            return
    for node in found:
        named, required = node.get("properties"), node.get("required", [])
        open_ended = {"additionalProperties", "unevaluatedProperties", "patternProperties"} & node.keys()
        listed = isinstance(named, dict) and isinstance(required, list)
        if listed and not open_ended and named.keys() >= set(map(str, required)):
            node["additionalProperties"] = False
        if "prefixItems" in node and not {"items", "unevaluatedItems"} & node.keys():
            node["items"] = False


def closed(**properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, AGE = {"type": "string", "minLength": 1, "maxLength": 20}, {"type": "integer", "minimum": 0, "maximum": 120}
PERSON = closed(name=TEXT, age=AGE, city={"enum": ["London", "Paris", "Rome"]},
                hobbies={"type": "array", "items": TEXT, "maxItems": 2})  # fmt: skip
CALL = closed(name={"enum": ["get_weather"]}, arguments=closed(city=TEXT, unit={"enum": ["celsius", "fahrenheit"]}))

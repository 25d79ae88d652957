"""JSON schemas, read for writing: which properties an answer may have, and which keywords ask for nothing.

Owns what is closed and what is left out before llguidance reads a schema; called by `structured_outputs` and, for the
arguments of tools, by the API server. It never checks a value.
vLLM: `vllm/v1/structured_output/backend_guidance.py:process_for_additional_properties`, XGrammar's `strict_mode`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_NESTING = 64  # of a schema's objects and arrays, as in vLLM

DESCRIBE = {"properties", "prefixItems", "$ref", "anyOf", "oneOf", "allOf"}  # keywords that say what a value has
BESIDE_NAMES = {"properties", "patternProperties", "unevaluatedProperties"}
NOTES = {"type", "title", "description"}  # of a name, which is a text anyway
STRING = {"type": "string"}
ANYTHING = ("true", "{}")  # schemas that all values fulfil, as JSON
IDLE = {
    "uniqueItems": ("false",), "not": ("false",), "$recursiveAnchor": ("false",), "unevaluatedItems": ANYTHING,
    "unevaluatedProperties": ANYTHING, "propertyNames": (*ANYTHING, json.dumps(STRING)), "required": ("[]",),
    "allOf": ("[]",), **dict.fromkeys(("minLength", "minItems", "minProperties"), ("0",)),
    **dict.fromkeys(("patternProperties", "dependentSchemas", "dependentRequired", "dependencies"), ("{}",)),
}  # fmt: skip
INSIDE = (  # keywords whose value is a schema, or a list of them
    "items", "prefixItems", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties",
    "anyOf", "oneOf", "allOf",
)  # fmt: skip
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
DIALECTS = [f"{known}{end}" for end in ("", "#") for known in (
    *(f"http://json-schema.org/draft-0{i}/schema" for i in (4, 6, 7)),
    *(f"https://json-schema.org/draft/20{year}/schema" for year in ("19-09", "20-12")))]  # fmt: skip


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


def guidance_schema(text: str) -> dict[str, Any]:
    """The schema in `text` as llguidance shall read it. Raises ValueError, RecursionError.

    Some keywords cannot be written for: "uniqueItems" would have to remember all items. llguidance refuses them, as it
    must. But programs write schemas, and a program writes "uniqueItems": false, too. What asks for nothing is left out.
    """
    schema = read_schema(text)
    for node in list(subschemas(schema)):
        for key in COUNTS:  # JSON knows numbers of one kind: 5.0 is a count
            if isinstance(node.get(key), float) and node[key].is_integer():
                node[key] = int(node[key])
        for key in idle_keywords(node):
            del node[key]
        if "propertyNames" in node:
            name_by_pattern(node)
        for rest, own in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if rest in node and not node.keys() & DESCRIBE - {"properties", "prefixItems"}:  # nothing else evaluates
                node.setdefault(own, node.pop(rest))
    return schema


def name_by_pattern(schema: dict[str, Any]) -> None:
    """Say by "patternProperties", which llguidance knows, what "propertyNames" says. Raises ValueError."""
    names, beside = schema.pop("propertyNames"), BESIDE_NAMES & schema.keys()
    said = {key: value for key, value in names.items() if key not in NOTES} if isinstance(names, dict) else {}
    texts = said.get("enum", [said["const"]] if "const" in said else None)
    if list(said) == ["pattern"]:
        pattern = said["pattern"]
    elif len(said) == 1 and isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        pattern = f"^({'|'.join(map(re.escape, texts))})$"
    elif said and said.keys() <= {"minLength", "maxLength"}:
        pattern = f"^[\\s\\S]{{{said.get('minLength', 0)},{said.get('maxLength', '')}}}$"
    else:
        raise ValueError("propertyNames: only a pattern, an enum, a const or lengths can be written for")
    if beside:
        raise ValueError(f"propertyNames: not together with {', '.join(sorted(beside))}")
    schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
    schema["additionalProperties"] = False


def brief(value: Any) -> str | None:
    """A value as JSON, if it can be that of an idle keyword: what is long is not."""
    return json.dumps(value) if not isinstance(value, dict | list) or not value or value == STRING else None


def idle_keywords(schema: dict[str, Any]) -> set[str]:
    """Keywords of a schema, not of those inside it, that ask for nothing by the value that they have here."""
    said = {key: brief(value) for key, value in schema.items()}
    found = {key for key, values in IDLE.items() if said.get(key) in values}
    for key in ("dependentSchemas", "dependentRequired", "dependencies"):
        if isinstance(schema.get(key), dict) and all(brief(x) in (*ANYTHING, "[]") for x in schema[key].values()):
            found.add(key)
    if "if" not in said or all(said.get(key, "true") in ANYTHING for key in ("then", "else")):
        found |= {"if", "then", "else"} & said.keys()
    if "contains" not in said or (said.get("minContains") == "0" and "maxContains" not in said):
        found |= {"contains", "minContains", "maxContains"} & said.keys()
    named, required = schema.get("properties"), schema.get("required")
    most, fewest = schema.get("maxProperties"), schema.get("minProperties")
    if isinstance(named, dict) and said.get("additionalProperties") == "false" and "patternProperties" not in said:
        found |= {"maxProperties"} if type(most) is int and most >= len(named) else set()
    if isinstance(required, list) and all(isinstance(name, str) for name in required):
        found |= {"minProperties"} if type(fewest) is int and fewest <= len({*required}) else set()
    if "$schema" in said and schema["$schema"] not in DIALECTS:  # another spelling, or a dialect of somebody's own
        found.add("$schema")
    return found


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema, and every schema inside it: what stands under "properties" has names, and is none itself."""
    if not isinstance(schema, dict):  # true and false are schemas, too, but have nothing to close
        return
    yield schema
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        named = schema.get(key)
        for inner in named.values() if isinstance(named, dict) else ():
            yield from subschemas(inner)
    for key in INSIDE:
        found = schema.get(key)
        for inner in found if isinstance(found, list) else [found]:
            yield from subschemas(inner)


def close(schema: dict[str, Any]) -> None:
    """Forbid what an object or a tuple does not name, unless its schema speaks of the rest.

    JSON Schema was made for checking what somebody wrote: a property that it does not name is welcome, and
    {"properties": {"age": …}} is fulfilled by {"name": "Bob"}. For a model that writes under masks this is an
    invitation: after the last property it may go on with one of its own, and another, until it is cut off. Nobody who
    sends a schema wants that, and few say so. So XGrammar, which vLLM asks first, reads every schema strictly.

    Where several schemas describe one value, each would forbid what the others name. If that happens anywhere, nothing
    is closed: a schema that is needed there may be used here. A required property that is not named stays possible.
    """
    found = list(subschemas(schema))
    for node in found:
        describe = {key for key in DESCRIBE & node.keys() if node[key] != []}
        if len(describe) > 1 or (isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1):
            return
    for node in found:
        named, required = node.get("properties"), node.get("required", [])
        listed = {*map(str, required)} if isinstance(required, list) else None
        open_ended = {"additionalProperties", "unevaluatedProperties", "patternProperties"} & node.keys()
        if isinstance(named, dict) and listed is not None and not open_ended and named.keys() >= listed:
            node["additionalProperties"] = False
        if "prefixItems" in node and not {"items", "unevaluatedItems"} & node.keys():
            node["items"] = False

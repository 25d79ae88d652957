"""What an answer must match: the one constraint of a request, and the calls of functions that a client demands.

Owns the grammar of a demanded call; called by `serving` before a request costs anything. No model can be trusted to
write JSON, so such a call is guided token by token; nothing is ever compiled here.
vLLM: `vllm/tool_parsers/`, `vllm/sampling_params.py:StructuredOutputsParams`.
"""

from __future__ import annotations

import common

import json
import re
from typing import Any

from engine.sampling.guided import json_schemas
from engine.serving.openai.protocol import ChatCompletionRequest, CommonRequest, NamedTool, Tool


def tool_choice(body: CommonRequest) -> str | NamedTool:
    """Who decides whether a tool is called: "none", "auto" (the model), "required" or a name (the client)."""
    if not isinstance(body, ChatCompletionRequest) or body.tools is None:
        return "none"
    return body.tool_choice or "auto"


def tools_of(body: CommonRequest) -> list[Tool]:
    """What a model may call: only a chat has such."""
    return body.tools or [] if isinstance(body, ChatCompletionRequest) else []


def check_tools(body: CommonRequest, parser: str | None, auto: bool) -> None:
    """Refuse what cannot be chosen. `parser` and `auto` are the server's flags. Raises InputError."""
    wanted = body.tool_choice if isinstance(body, ChatCompletionRequest) else None
    if wanted not in (None, "none") and not tools_of(body):
        raise common.InputError("tool_choice: needs tools")
    if isinstance(wanted, NamedTool) and wanted.function.name not in [tool.function.name for tool in tools_of(body)]:
        raise common.InputError(f"tool_choice: none of the tools is called {wanted.function.name!r}")
    if tool_choice(body) == "auto" and not (parser and auto):
        raise common.InputError(
            "tool_choice: 'auto' needs a server with --enable-auto-tool-choice and "
            "--tool-call-parser; 'required', 'none' and a named function always work"
        )


def tool_constraint(body: CommonRequest) -> dict[str, Any] | None:
    """What an answer must match (companion 06b) if the client, and not the model, decides that a tool is called.

    A named tool: its arguments alone. "required": `[{"name": …, "parameters": …}, …]`, at least one. Each schema
    stands in the grammar as a document of its own, so that `#/$defs/…` finds what its author meant.
    """
    chosen = tool_choice(body)
    if chosen in ("none", "auto") or not isinstance(body, ChatCompletionRequest):
        return None
    none: dict[str, Any] = {"properties": {}}  # a function that says nothing of its parameters has none
    schemas = {tool.function.name: {"type": "object", **(tool.function.parameters or none)} for tool in tools_of(body)}
    if isinstance(chosen, NamedTool):
        return {"json": schemas[chosen.function.name]}
    compact = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
    more = '(", " call)*' if body.parallel_tool_calls is not False else ""
    lines = [f'start: "[" call {more} "]"', "call: " + " | ".join(f"call_{i}" for i in range(len(schemas)))]
    for i, (name, schema) in enumerate(schemas.items()):
        try:
            schema = json_schemas.guidance_schema(json.dumps(schema))
        except (ValueError, RecursionError) as error:
            raise common.InputError(f"tools: {name}: {error}") from None
        begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
        lines += [
            f'call_{i}: {json.dumps(begin, ensure_ascii=False)} arguments_{i} "}}"',
            f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': compact})}",
        ]
    return {"grammar": "\n".join(lines)}


def structured_outputs(body: CommonRequest) -> tuple[str, dict[str, Any]] | None:
    """The one constraint that a request names, in any of its dialects, behind the field it came from.

    Raises InputError.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    if body.structured_outputs is not None:
        found.append(("structured_outputs", body.structured_outputs.model_dump(by_alias=True, exclude_none=True)))
    old = {
        name: value
        for name in ("json", "regex", "choice", "grammar")
        if (value := getattr(body, f"guided_{name}")) is not None
    }
    if old and old not in [constraint for _, constraint in found]:  # guidance says it in both dialects
        found.append((f"guided_{next(iter(old))}", old))
    if forced := tool_constraint(body):  # a call has its own form: response_format is about texts
        found.append(("tools", forced))
    elif body.response_format and body.response_format.type == "json_object":
        found.append(("response_format", {"json_object": True}))
    elif body.response_format and body.response_format.type == "json_schema":
        schema = body.response_format.json_schema
        if schema is None or schema.schema_ is None:
            raise common.InputError("response_format: json_schema needs a field json_schema with a schema in it")
        found.append(("response_format", {"json": schema.schema_}))
    if not found:
        return None
    field, constraint = found[0]
    if len(found) > 1 or len(constraint) != 1:
        raise common.InputError(
            f"{field}: exactly one constraint is allowed: json, regex, choice, grammar or "
            "json_object, in structured_outputs, response_format or guided_*"
        )
    return field, constraint


def constraint_error(field: str, error: str, body: CommonRequest) -> str:
    """What companion 06b says against a constraint, in the client's words: its field, and of `tools` the function.

    The grammar of calls is ours (`tool_constraint`): line 2i + 4 of it is the schema of function i.
    """
    said = re.sub("^structured_outputs:? ", "", error)
    if field != "tools":
        return f"{field}: {said}"
    if isinstance(chosen := tool_choice(body), NamedTool):
        return f"tools: {chosen.function.name}: {said.removeprefix('json: ')}"
    found = re.match(r"grammar: at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \| |$)", said)
    if found is None:  # it is about all of them: their size, the time they take
        return f"tools: {said.rpartition(': ')[2]}"
    names = [*dict.fromkeys(tool.function.name for tool in tools_of(body))]
    return f"tools: {names[int(found[1]) // 2 - 2]}: {found[2]}"

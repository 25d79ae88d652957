"""Tools of the Responses API, and the functions that a model hears of.

Owns which tools a model can call and under what names; called by `responses_protocol` on the way in and by `responses`
on the way out. It never runs one: that is for the client.
vLLM: `get_function_tools` and its neighbours in `vllm/tool_parsers/utils.py`.
"""

from __future__ import annotations

import common

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic

from engine.serving.openai.protocol import Carried, FunctionDefinition, Many

INPUT = "input"  # what the one parameter of a tool is called that takes any text
ANY_TEXT = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "All that the tool is given, as plain text."}},
    "required": [INPUT],
    "additionalProperties": False,
}


class FunctionTool(Carried):
    """One of `tools`: the chat's, one level flatter."""

    type: Literal["function"]
    name: str = pydantic.Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class CustomTool(Carried):
    """One of `tools`: it takes any text. As in vLLM, a model hears of a function with one parameter."""

    model_config = pydantic.ConfigDict(extra="allow")  # a grammar of the text, which nobody holds the model to
    type: Literal["custom"]
    name: str = pydantic.Field(min_length=1)
    description: str | None = None


class OtherTool(Carried):
    """One of `tools` that only OpenAI's servers run: a search, an interpreter. A model hears nothing of it."""

    model_config = pydantic.ConfigDict(extra="allow")
    type: str


def kind_of_tool(tool: Any) -> str | None:
    """Of many types, three are for the client to run."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if kind in ("function", "custom", "namespace") else "other" if isinstance(kind, str) else None


Leaf = Annotated[
    Annotated[FunctionTool, pydantic.Tag("function")]
    | Annotated[CustomTool, pydantic.Tag("custom")]
    | Annotated[OtherTool, pydantic.Tag("namespace")]
    | Annotated[OtherTool, pydantic.Tag("other")],
    pydantic.Discriminator(kind_of_tool, custom_error_type="tool", custom_error_message="a tool must have a type"),
]


class NamespaceTool(Carried):
    """One of `tools`: several of one origin, whose names may be those of others."""

    model_config = pydantic.ConfigDict(extra="allow")
    type: Literal["namespace"]
    name: str = pydantic.Field(min_length=1)
    tools: Many[Leaf] | None = None


AnyTool = Annotated[
    Annotated[FunctionTool, pydantic.Tag("function")]
    | Annotated[CustomTool, pydantic.Tag("custom")]
    | Annotated[NamespaceTool, pydantic.Tag("namespace")]
    | Annotated[OtherTool, pydantic.Tag("other")],
    pydantic.Discriminator(kind_of_tool, custom_error_type="tool", custom_error_message="a tool must have a type"),
]


@dataclass(frozen=True)
class Called:
    """What a client knows a function as."""

    name: str
    namespace: str | None = None
    takes_text: bool = False  # it is a custom tool


def flat(namespace: str | None, name: str) -> str:
    """What a model knows a function as, which lives in a namespace or in none."""
    return f"{namespace}__{name}" if namespace else name


def called(tools: Sequence[Any]) -> Iterator[tuple[Called, Any]]:
    """The tools that a model can call, in their order: functions, those in namespaces, and custom ones."""
    for tool in tools:
        if isinstance(tool, FunctionTool | CustomTool):
            yield Called(tool.name, None, isinstance(tool, CustomTool)), tool
        elif isinstance(tool, NamespaceTool):
            inside = [each for each in tool.tools or () if isinstance(each, FunctionTool)]
            yield from ((Called(each.name, tool.name), each) for each in inside)


def functions(tools: Sequence[Any]) -> list[FunctionDefinition]:
    """What a model hears of them: tools that only other servers run are left out, as vLLM does."""
    return [
        FunctionDefinition(
            name=flat(about.namespace, about.name),
            description=tool.description,
            parameters=ANY_TEXT if about.takes_text else tool.parameters,
        )
        for about, tool in called(tools)
    ]


def by_name(tools: Sequence[Any]) -> dict[str, Called]:
    """What a client knows the functions as, by the names that a model knows."""
    return {flat(about.namespace, about.name): about for about, _ in called(tools)}


def full_name(tools: Sequence[Any], name: str) -> str:
    """What a model knows the tool as that `tool_choice` names, with its namespace or without. Raises InputError."""
    known = by_name(tools)
    if name in known:
        return name
    found = [full for full, about in known.items() if about.name == name]
    if len(found) > 1:
        raise common.InputError(f"tool_choice: {name!r} is in several namespaces; name one of {', '.join(found)}")
    return found[0] if found else name


def as_arguments(text: str) -> str:
    """What a custom tool was given, as the arguments of its function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def as_text(arguments: str) -> str:
    """What a custom tool is given; arguments that are not as they should be are given as they are."""
    try:
        found = json.loads(arguments)[INPUT]
    except (ValueError, TypeError, KeyError, RecursionError):
        return arguments
    return found.encode(errors="backslashreplace").decode() if isinstance(found, str) else arguments

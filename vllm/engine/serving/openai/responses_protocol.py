"""What a client may say to the Responses API, and the chat that says the same.

Owns requests made of items: a message, a call of a function, what the function gave; read by FastAPI, written as a chat
by `responses`. It never knows what is kept between requests.
vLLM: `vllm/entrypoints/openai/responses/protocol.py`.
"""

from __future__ import annotations

import common

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic

from engine.serving.openai import protocol, responses_tools
from engine.serving.openai.protocol import Carried, ChatCompletionRequest, Many, OpenAIModel
from engine.serving.openai.responses_tools import AnyTool


class Text(Carried):
    """A message's part, asked or answered."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Message(Carried):
    """An item: something said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[Text]
    status: str | None = None


class Call(Carried):
    """An item: a function that the model has called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | None


class CustomCall(Carried):
    """An item: a tool that takes any text, called with this one."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str | None


class CallOutput(Carried):
    """An item: what that function or tool returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Many[Text]


class Thought(Carried):
    """A part of what was thought, or its summary."""

    text: str


class Reasoning(Carried):
    """An item: what the assistant thought before it went on; a template may hear of it. What is encrypted is for
    another server."""

    type: Literal["reasoning"]
    content: Many[Thought] | None = None
    summary: Many[Thought] | None = None

    @property
    def text(self) -> str:
        """As in vLLM, the first part of one of the two."""
        return next((part.text for part in (*(self.content or ()), *(self.summary or ()))), "")


class Reference(Carried):
    """An item of an earlier response that is kept here."""

    type: Literal["item_reference"]
    id: str


def kind_of(item: Any) -> str | None:
    """Only messages may leave their type out."""
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    return item.get("type") or ("message" if "role" in item else None)


Item = Annotated[
    Annotated[Message, pydantic.Tag("message")]
    | Annotated[Call, pydantic.Tag("function_call")]
    | Annotated[CustomCall, pydantic.Tag("custom_tool_call")]
    | Annotated[CallOutput, pydantic.Tag("function_call_output")]
    | Annotated[CallOutput, pydantic.Tag("custom_tool_call_output")]
    | Annotated[Reasoning, pydantic.Tag("reasoning")]
    | Annotated[Reference, pydantic.Tag("item_reference")],
    pydantic.Discriminator(
        kind_of,
        custom_error_type="kind",
        custom_error_message=(
            "must be a message, function_call, custom_tool_call, one of their outputs, reasoning or item_reference"
        ),
    ),
]


ITEM = pydantic.TypeAdapter(Item)


class NamedFunction(Carried):
    """`tool_choice`: this one and no other."""

    type: Literal["function", "custom"]
    name: str


class TextFormat(OpenAIModel):
    """`text.format`: what the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = pydantic.Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(OpenAIModel):
    """`text`: its format, and a hint at its length."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(OpenAIModel):
    """`reasoning`: hints for a template."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


# vLLM's list: the first one alone changes an answer, the others are about what no server of ours has.
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
]


class ResponsesRequest(protocol.AnyRequest):
    """OpenAI's fields for a response; what all its APIs share, and vLLM's own, is inherited."""

    input: Annotated[
        Many[Item],
        pydantic.BeforeValidator(
            lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given
        ),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = pydantic.Field(None, ge=1)
    include: Many[Include] | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    tools: Many[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningConfig | None = None
    stream_options: protocol.StreamOptions | None = None
    max_tool_calls: int | None = None  # of tools that the server runs; this one runs none
    truncation: Literal["auto", "disabled"] | None = None
    background: Literal[False] | None = None
    include_reasoning: bool = True
    client_metadata: dict[str, Any] | None = None  # Codex's, about itself
    chat_template_kwargs: dict[str, Any] | None = None


def plain(content: str | list[Text]) -> str:
    """Content as one text, a line for each part."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def tool_call(item: Call | CustomCall) -> protocol.ToolCall:
    """A call as a chat's message has it."""
    if isinstance(item, Call):
        name, arguments = responses_tools.flat(item.namespace, item.name), item.arguments
    else:
        name, arguments = item.name, responses_tools.as_arguments(item.input or "")
    return protocol.ToolCall(id=item.call_id, function=protocol.FunctionCall(name=name, arguments=arguments))


def chat_messages(instructions: str | None, items: Sequence[Any]) -> list[protocol.ChatMessage]:
    """The conversation as messages: what an assistant says and calls before its next turn is one of them."""
    found = [protocol.ChatMessage(role="system", content=instructions)] if instructions else []
    for item in items:
        last = found[-1] if found and found[-1].role == "assistant" else None
        if isinstance(item, Message):
            if last and item.role == "assistant" and last.content is None:
                last.content = plain(item.content)
            else:
                found.append(protocol.ChatMessage(role=item.role, content=plain(item.content)))
        elif isinstance(item, Reasoning) and item.text:
            if last is None or last.reasoning is not None:
                found.append(last := protocol.ChatMessage(role="assistant"))
            last.reasoning = item.text
        elif isinstance(item, Call | CustomCall):
            if last is None:
                found.append(last := protocol.ChatMessage(role="assistant"))
            last.tool_calls = [*(last.tool_calls or ()), tool_call(item)]
        elif isinstance(item, CallOutput):
            content = plain(item.output)
            found.append(protocol.ChatMessage(role="tool", content=content, tool_call_id=item.call_id))
    return found


def as_chat(body: ResponsesRequest, items: Sequence[Any]) -> ChatCompletionRequest:
    """The chat that says the same. Raises InputError."""
    shared = {name: getattr(body, name) for name in protocol.AnyRequest.model_fields}
    if not (messages := chat_messages(body.instructions, items)):
        raise common.InputError("input: must not be empty")
    last = items[-1] if body.input else None  # as in vLLM, what a client marks as unfinished is what goes on
    goes_on = isinstance(last, Message) and last.status in ("in_progress", "incomplete")
    chat = ChatCompletionRequest(
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        chat_template_kwargs=body.chat_template_kwargs,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning and body.reasoning.effort,
        include_reasoning=body.include_reasoning,
        verbosity=body.text and body.text.verbosity,
        **shared,
    )
    chat._num_bytes = body._num_bytes
    functions = responses_tools.functions(body.tools or ())
    chat.tools = [protocol.Tool(type="function", function=function) for function in functions] or None
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        name = responses_tools.full_name(body.tools or (), choice.name)
        chat.tool_choice = protocol.NamedTool(function=protocol.FunctionName(name=name))
    elif functions or choice == "required":  # without tools, the choice among them means nothing
        chat.tool_choice = choice
    if "message.output_text.logprobs" in (body.include or ()):
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs or 0
    wanted = body.text and body.text.format
    if wanted and wanted.type == "json_object":
        chat.response_format = protocol.ResponseFormat(type="json_object")
    elif wanted and wanted.type == "json_schema":
        if wanted.schema_ is None:
            raise common.InputError("text: a format json_schema needs a schema")
        schema = protocol.JSONSchema(name=wanted.name or "schema", schema=wanted.schema_)
        chat.response_format = protocol.ResponseFormat(type="json_schema", json_schema=schema)
    return chat

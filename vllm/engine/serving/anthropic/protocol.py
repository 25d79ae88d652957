"""What a client may say to the Messages API, and the chat that says the same.

Owns requests made of messages with blocks in them; read by FastAPI, written as a chat by `messages`. It never knows
what an answer looks like.
vLLM: `vllm/entrypoints/anthropic/protocol.py`, and the first half of its `serving.py`.
"""

from __future__ import annotations

import common

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic

from engine.serving.openai import protocol
from engine.serving.openai.protocol import Carried, ChatCompletionRequest, Many, OpenAIModel

BILLING = "x-anthropic-billing-header"  # Claude Code begins with such a line, another one in each request


class TextBlock(Carried):
    """Something said."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Carried):
    """What an assistant thought; what is redacted cannot be read by anybody but its server."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class ToolUseBlock(Carried):
    """A call in an assistant's message."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | None = None


def type_of(block: Any) -> str | None:
    """By which a block's model is found."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "thinking" if kind == "redacted_thinking" else kind if isinstance(kind, str) else None


ONLY_TEXT = "this model reads text alone: a block must be of type text, thinking, tool_use or tool_result"
Texts = Many[
    Annotated[
        Annotated[TextBlock, pydantic.Tag("text")],
        pydantic.Discriminator(type_of, custom_error_type="block", custom_error_message=ONLY_TEXT),
    ]
]


class ToolResultBlock(Carried):
    """What that call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Texts | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, pydantic.Tag("text")]
    | Annotated[ThinkingBlock, pydantic.Tag("thinking")]
    | Annotated[ToolUseBlock, pydantic.Tag("tool_use")]
    | Annotated[ToolResultBlock, pydantic.Tag("tool_result")],
    pydantic.Discriminator(type_of, custom_error_type="block", custom_error_message=ONLY_TEXT),
]


class Message(Carried):
    """One of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


class Tool(Carried):
    """One of `tools`. Those of another type are run by Anthropic's servers, and a model hears nothing of them."""

    type: str | None = None
    name: str = pydantic.Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Carried):
    """`tool_choice`: who decides whether a tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @pydantic.model_validator(mode="after")
    def _is_named(self) -> ToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError("the type tool needs a name")
        return self


class Thinking(Carried):
    """`thinking`: whether to think before the answer. A budget is carried; as yet nobody is held to it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Carried):
    """`output_config.format`: what the answer must be."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = pydantic.Field(alias="schema")


class OutputConfig(Carried):
    """`output_config`: the answer's form, and a hint for a template."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(OpenAIModel):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: Many[Message] = pydantic.Field(min_length=1)
    system: str | Texts | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`: Anthropic's fields, then vLLM's own."""

    max_tokens: int = pydantic.Field(ge=1)
    stop_sequences: Many[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None  # from here to the blank line: about the caller, its bill, its own memory
    service_tier: str | None = None
    context_management: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Many[Any] | None = None

    cache_salt: str | None = pydantic.Field(None, min_length=1)
    kv_transfer_params: dict[str, Any] | None = None


def said(texts: str | Sequence[Any] | None) -> str:
    """The text of a system prompt or a result, without a line that would be another one each time."""
    if isinstance(texts, str | None):
        return "" if (texts or "").startswith(BILLING) else texts or ""
    return "".join(said(block.text) for block in texts if isinstance(block, TextBlock))


def chat_messages(body: CountTokensRequest, system_first: bool) -> list[protocol.ChatMessage]:
    """The conversation as a chat's messages. `system_first` if the template takes a system's message nowhere else.

    Raises InputError if only a system speaks, and says nothing."""
    inline = [message for message in body.messages if message.role == "system"]
    system = said(body.system) + "".join(said(message.content) for message in inline if system_first)
    found = [protocol.ChatMessage(role="system", content=system)] if system else []
    for message in body.messages:
        if message.role != "system":
            found += chat_turn(message)
        elif not system_first and (text := said(message.content)):
            found.append(protocol.ChatMessage(role="system", content=text))
    if not found:
        raise common.InputError(
            "messages: nobody says anything in them; expected a user's or an assistant's, or some text"
        )
    return found


def chat_turn(message: Message) -> list[protocol.ChatMessage]:
    """One message of a user or an assistant: results of tools come before what a user says about them."""
    if isinstance(message.content, str):
        return [protocol.ChatMessage(role=message.role, content=message.content)]
    found, turn = [], protocol.ChatMessage(role=message.role, content="")
    texts = [block.text for block in message.content if isinstance(block, TextBlock) and block.text]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    for block in message.content:
        if isinstance(block, ToolUseBlock):
            call = protocol.FunctionCall(name=block.name, arguments=json.dumps(block.input or {}, ensure_ascii=False))
            turn.tool_calls = [*(turn.tool_calls or ()), protocol.ToolCall(id=block.id, function=call)]
        elif isinstance(block, ToolResultBlock):
            text = block.content if isinstance(block.content, str) else "\n".join(x.text for x in block.content or ())
            found.append(protocol.ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id))
    turn.content = "\n".join(texts)
    turn.reasoning = "".join(thoughts) or None
    return [*found, turn] if texts or message.role == "assistant" or not found else found


def as_chat(body: CountTokensRequest, system_first: bool = False) -> ChatCompletionRequest:
    """The chat that says the same."""
    chat = ChatCompletionRequest.model_validate({"messages": chat_messages(body, system_first)})
    chat.model, chat.chat_template_kwargs = body.model, body.chat_template_kwargs
    if isinstance(body, MessagesRequest):
        chat.max_completion_tokens, chat.stop, chat.stream = body.max_tokens, body.stop_sequences, body.stream
        for name in ("temperature", "top_p", "top_k", "cache_salt", "kv_transfer_params"):
            setattr(chat, name, getattr(body, name))
    functions = [
        protocol.FunctionDefinition(
            name=tool.name,
            description=tool.description,
            parameters=None if tool.input_schema is None else {"type": "object"} | tool.input_schema,
        )
        for tool in body.tools or ()
        if tool.type in (None, "custom")
    ]
    chat.tools = [protocol.Tool(function=function) for function in functions] or None
    if choice := body.tool_choice:
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            chat.tool_choice = protocol.NamedTool(function=protocol.FunctionName(name=choice.name or ""))
        elif chat.tools or choice.type == "any":
            chat.tool_choice = "required" if choice.type == "any" else choice.type
    if body.output_config and body.output_config.format:
        schema = protocol.JSONSchema(name="output", schema=body.output_config.format.schema_)
        chat.response_format = protocol.ResponseFormat(type="json_schema", json_schema=schema)
    effort = body.output_config and body.output_config.effort
    chat.reasoning_effort = "none" if body.thinking and body.thinking.type == "disabled" else effort
    chat._num_bytes = body._num_bytes
    return chat

"""06f0 · What a client may say: requests, tools, errors. The lower half of lesson 06f.

Every field of a request is a type, and a field that nobody knows is refused by name. What a request may cost before it
is refused is bounded too: lists are counted before their elements are looked at, and read up to the first mistake.
A tool is a function that the model may ask for: a name, and arguments that match a schema. No model can be trusted to
write JSON, so a call that a client demands is guided (companion 06b), token by token; and since the client wants to see
it grow, it is read as it comes. Serving and HTTP are in 06f.

Read for this: OpenAI's API reference, *Chat* and *Function calling*; vLLM 0.32 `entrypoints/openai/`, `parser/` and
`tool_parsers/hermes_tool_parser.py`.
"""

from __future__ import annotations

import common

import asyncio
import concurrent.futures
import itertools
import json
import re
import string
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic

from engine.sampling.guided import json_schemas

LARGE_BYTES = 16 << 10  # of a body: a larger one is read and prepared away from the event loop
MAX_PARTS = 1 << 17  # arrays, objects and names in a body
MAX_NESTING = 128  # of a body's arrays and objects; schemas in it may nest half as deep (06b0)
MAX_ELEMENTS = 4096  # of a list or an object, unless it is one of these
MAX_STOP_STRINGS = 64  # each is searched for in every step
MAX_STOP_CHARS = 4096  # in all of them
MAX_IDS = 1 << 20  # token ids: more than a body holds
LENGTHS = {
    "stop": MAX_STOP_STRINGS, "bad_words": 128, "logit_bias": 1 << 14,
    **dict.fromkeys(("prompt", "tokens", "stop_token_ids", "allowed_token_ids"), MAX_IDS),
}  # fmt: skip
MAX_NAME = 256  # characters of a name that every piece of an answer repeats
MAX_MESSAGE = 2000  # characters of an error


# --- Away from the event loop -----------------------------------------------------------------------------------------

LARGE_BODIES = concurrent.futures.ThreadPoolExecutor(1, "LargeBodies")  # what they take in memory, one takes at a time


async def away(large: bool, work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)`, for a large body on the thread of those: no stream waits meanwhile, and no small request."""
    if not large:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(LARGE_BODIES, work, *args)


# --- Reading a body ---------------------------------------------------------------------------------------------------


def parse(body: bytes) -> Any:
    """What a body says. For a thread of its own: `json` is one long call that lets nobody else run Python, but here it
    comes back to Python at every number and object, and there other threads get their turn.

    Raises InputError for a body of too many parts, JSONDecodeError, RecursionError, or another ValueError.
    """
    # Some of them stand in texts, and count as well: no text that a model can read has so many.
    if sum(map(body.count, (b"[", b"{", b'":'))) > MAX_PARTS:
        raise common.InputError(f"the body has more than {MAX_PARTS:,} arrays, objects and names")
    if body.count(b",") > MAX_IDS:
        raise common.InputError(f"the body has more than {MAX_IDS:,} elements")
    text = body.decode("utf-8-sig")
    said = json.loads(text, object_hook=lambda x: x, parse_int=lambda x: int(x), parse_float=lambda x: float(x))
    level, depth = [said], 0
    while level := [x for x in level if isinstance(x, dict | list)]:
        depth += 1
        if depth > MAX_NESTING:
            raise RecursionError
        level = [*itertools.chain.from_iterable(x.values() if isinstance(x, dict) else x for x in level)]
    return said


# --- Requests ---------------------------------------------------------------------------------------------------------

T = TypeVar("T")
Many = Annotated[list[T], pydantic.Field(fail_fast=True)]  # a million wrong elements are one mistake


def whole(value: Any, depth: int = 2) -> Any:
    """JSON knows numbers of one kind: what many languages write for 5 is 5.0, alone or among the ids of prompts."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, list) and depth and {float, list} & set(map(type, value)):
        return [whole(x, depth - 1) for x in value]
    return value


def counted(value: Any, field: str | None = None) -> Any:
    """A list or an object of too many elements is refused before the first of them is looked at."""
    most = LENGTHS.get(field, MAX_ELEMENTS)
    if isinstance(value, list | dict) and len(value) > most:
        raise ValueError(f"has {len(value):,} elements; at most {most:,} are allowed")
    return value


def in_utf8(value: Any) -> Any:
    """JSON can say half of a character ("\\ud83d"), also in a key: no answer could repeat it, no model read it."""
    left = [value]
    while left:
        said = left.pop()
        if isinstance(said, str):
            try:
                said.encode()
            except UnicodeEncodeError:
                raise ValueError("half of a surrogate pair is no text") from None
        elif isinstance(said, dict):
            left += (*said, *said.values())
        elif isinstance(said, list) and not set(map(type, said)) <= {int, float}:
            left += said
    return value


class OpenAIModel(pydantic.BaseModel):
    """Types are taken at their word ("5" is no number), and a field that we do not know is an error, not a surprise."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    _num_bytes: int = pydantic.PrivateAttr(0)  # of the body that said this

    @property
    def is_large(self) -> bool:
        """Whether what is done with it is too much for an event loop."""
        return self._num_bytes > LARGE_BYTES

    @pydantic.model_validator(mode="before")
    @classmethod
    def _what_is_said(cls, data: Any) -> Any:
        """Some clients write out all the fields they have: null under a name that we do not know asks for nothing.
        Of names that do ask for something, the first is enough for an error."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = (name for name, value in data.items() if value is not None and name not in known)
        return {name: whole(data[name]) for name in (*(known & data.keys()), *itertools.islice(unknown, 1))}

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _look_at(cls, value: Any, about: pydantic.ValidationInfo) -> Any:
        return in_utf8(counted(value, about.field_name))


class Carried(pydantic.BaseModel):
    """Part of a history or of a tool. Libraries hang things of their own on these; they are carried, and not asked."""

    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _look_at(cls, value: Any, about: pydantic.ValidationInfo) -> Any:
        return counted(value, about.field_name)


class StreamOptions(OpenAIModel):
    """`stream_options`: whether a last chunk carries `usage`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = None  # whether to hide lengths from who listens on the wire: never done


class StructuredOutputs(OpenAIModel):
    """What the output must match: exactly one of these (companion 06b)."""

    json_: str | dict[str, Any] | None = pydantic.Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JSONSchema(OpenAIModel):
    """`response_format.json_schema`."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = pydantic.Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenAIModel):
    """`response_format`: what the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class AnyRequest(OpenAIModel):
    """What all APIs take: OpenAI's fields, then vLLM's own."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = pydantic.Field(None, ge=-(2**63), lt=2**63)
    stop: str | Many[str] | None = None
    stream: bool | None = False
    user: str | None = None  # these say something about the caller or its bill, and change no answer
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Many[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = pydantic.Field(None, min_length=1)  # an empty one would share what it should hide
    request_id: str | None = pydantic.Field(
        None, max_length=MAX_NAME
    )  # what the answer's id shall end with; the header
    # X-Request-Id says it, too
    session_id: str | None = None  # for routers in front of servers
    mm_payload: Literal["tensors", "none"] = "tensors"  # of pictures, and there are none
    return_mm_kwargs: bool | None = None
    watermarking: Literal[False] | None = None
    structured_outputs: StructuredOutputs | None = None


class CommonRequest(AnyRequest):
    """What chats and completions take, and responses (06f1) do not."""

    n: int | None = 1
    stream_options: StreamOptions | None = None
    stream_interval: int | None = pydantic.Field(None, ge=1)  # tokens in a piece, but for the first and the last
    response_format: ResponseFormat | None = None

    add_special_tokens: bool | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False  # in logprobs: "token_id:5" where a token's text would stand
    prompt_logprobs: int | None = None
    allowed_token_ids: Many[int] | None = None
    bad_words: Many[str] | None = None
    return_token_offsets: bool | None = False  # vLLM heeds it where prompts are rendered and not answered
    routed_experts_prompt_start: int = pydantic.Field(0, ge=0)  # of experts' records, and there are no experts
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    spaces_between_special_tokens: bool = True  # from here to the blank line: at what they mean here, which is nothing
    use_beam_search: Literal[False] = False
    length_penalty: float = 1.0

    kv_transfer_params: dict[str, Any] | None = None  # lesson 08
    guided_json: str | dict[str, Any] | None = None  # names of older versions, which vLLM 0.32 ignores
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None  # there is one


def _prompts(given: Any, read: Callable[[Any], Any]) -> Any:
    """One error for four types that do not fit."""
    try:
        return read(given)
    except pydantic.ValidationError:
        raise ValueError("must be a text, token ids, or a list of either, all of one kind") from None


class CompletionRequest(CommonRequest):
    """`POST /v1/completions`: prompts as texts or token ids."""

    prompt: Annotated[str | Many[str] | Many[int] | Many[Many[int]], pydantic.WrapValidator(_prompts)]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None


class TextPart(Carried):
    """A message's part that says something."""

    type: Literal["text"]
    text: str


class RefusalPart(Carried):
    """An assistant's part that declines."""

    type: Literal["refusal"]
    refusal: str


class FunctionCall(Carried):
    """Which function, and its arguments as JSON text."""

    name: str
    arguments: str | None


class ToolCall(Carried):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Carried):
    """An answer comes back as the next request's history, with all that a library has added to it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: Any = pydantic.Field(None, validation_alias=pydantic.AliasChoices("reasoning", "reasoning_content"))

    @pydantic.model_validator(mode="after")
    def _somebody_speaks(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":  # who calls a tool need not say anything
            raise ValueError("content is required")
        return self


class FunctionDefinition(Carried):
    """What a model is told of a function."""

    name: str = pydantic.Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema


class Tool(Carried):
    """One of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(Carried):
    """The function that `tool_choice` names."""

    name: str


class NamedTool(Carried):
    """`tool_choice`: this one and no other."""

    type: Literal["function"] = "function"
    function: FunctionName


def _goes_on(value: bool, about: pydantic.ValidationInfo) -> bool:
    """`continue_final_message`, which stands behind the field that it must not meet."""
    if value and about.data.get("add_generation_prompt", True):
        raise ValueError("needs add_generation_prompt to be false: a message that goes on has no other behind it")
    return value


GoesOn = Annotated[bool, pydantic.AfterValidator(_goes_on)]


class ChatCompletionRequest(CommonRequest):
    """`POST /v1/chat/completions`."""

    messages: Many[ChatMessage] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = None
    max_tokens: int | None = None  # its older name
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: GoesOn = False
    return_prompt_text: bool | None = False
    echo: Literal[False] = False
    include_reasoning: bool = True  # there is none to leave out
    documents: Many[Annotated[dict[str, str], pydantic.BeforeValidator(counted)]] | None = (
        None  # for templates that quote them
    )
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Many[Tool] | None = pydantic.Field(None, min_length=1)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    modalities: Many[Literal["text"]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None  # for templates
    verbosity: Literal["low", "medium", "high"] | None = None  # these two are hints, and no answer is wrong without
    prediction: dict[str, Any] | None = None


class TokenizeRequest(OpenAIModel):
    """A prompt or messages, and of a chat's fields those that its template hears of."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = pydantic.Field(None, min_length=1)
    tools: Many[Tool] | None = pydantic.Field(None, min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: GoesOn = False
    return_token_strs: bool | None = False


class DetokenizeRequest(OpenAIModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Many[int]


class LoadLoRAAdapterRequest(OpenAIModel):
    """`POST /v1/load_lora_adapter`: a name for the adapter in a folder of the server."""

    lora_name: str = pydantic.Field(min_length=1)
    lora_path: str = pydantic.Field(min_length=1)
    load_inplace: bool = False


class UnloadLoRAAdapterRequest(OpenAIModel):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


# What whole answers have in vLLM's form, asked for or not. Clients read these as attributes, so null is not absence.
OF_ANSWER = ("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics")
OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")  # once in a chat, in completions with each choice
OF_CHOICE = ("token_ids", "routed_experts")
OF_MESSAGE = ("refusal", "annotations", "audio", "function_call", "reasoning")


def in_full(answer: dict[str, Any]) -> dict[str, Any]:
    """A whole answer with every field of its form: null is what nobody asked for, or no answer of ours ever has."""

    def full(given: dict[str, Any], *names: str) -> dict[str, Any]:
        return given | {name: None for name in names if name not in given}

    answer = answer | {"usage": full(answer["usage"], "completion_tokens_details")}
    if answer["object"] == "text_completion":
        choices = [full(choice, *OF_CHOICE, *OF_PROMPT) for choice in answer["choices"]]
        return full(answer | {"choices": choices}, *OF_ANSWER)
    choices = [full(choice, *OF_CHOICE) | {"message": full(choice["message"], *OF_MESSAGE)}
               for choice in answer["choices"]]  # fmt: skip
    return full(answer | {"choices": choices}, *OF_ANSWER, *OF_PROMPT, "prompt_text")


# --- Errors -----------------------------------------------------------------------------------------------------------


class ErrorInfo(pydantic.BaseModel):
    """What went wrong, its class, the field to blame, the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(pydantic.BaseModel):
    """The body of every refusal: OpenAI's."""

    error: ErrorInfo


class APIError(Exception):
    """An answer that is not 200, in OpenAI's shape."""

    TYPES: ClassVar = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError",
                       405: "MethodNotAllowedError", 413: "RequestTooLargeError", 500: "InternalServerError",
                       503: "ServiceUnavailableError"}  # fmt: skip

    def __init__(self, status: int, message: str, param: str | None = None,
                 headers: dict[str, str] | None = None) -> None:  # fmt: skip
        # It may repeat what the client sent: megabytes, or half of a character ("\\ud800"), which UTF-8 cannot say.
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]} … ({len(message):,} characters)"
        super().__init__(message.encode("utf-8", "replace").decode())
        param = param and param[:MAX_NAME].encode("utf-8", "replace").decode()
        self.status, self.param, self.headers = status, param, headers or {}

    def body(self) -> dict[str, Any]:
        kind = self.TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}


# --- Tools ------------------------------------------------------------------------------------------------------------


def messages_for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Roles and plain text, as templates want them; arguments of calls as objects."""
    found = []
    for message in messages:
        content = message.content or ""
        text = content if isinstance(content, str) else "\n".join(getattr(part, part.type) for part in content)
        entry: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
        entry |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
        if message.tool_calls:
            entry["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
            for call in entry["tool_calls"]:
                call["function"]["arguments"] = _arguments(call["function"].get("arguments"))
        if message.role == "assistant" and isinstance(message.reasoning, str):
            entry |= dict.fromkeys(("reasoning", "reasoning_content"), message.reasoning)  # templates know either
        found.append(entry)
    return found


def left_open(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """A chat whose last message is not closed, so that the answer goes on with it. Raises InputError.

    Only the template knows what it writes behind a message: with a mark at its end, everybody does. The space behind
    the mark tells whether the template strips messages of theirs.
    """
    mark = f"{uuid.uuid4().hex} "
    *before, last = messages
    text = render([*before, {**last, "content": last["content"] + mark}])
    kept = mark in text
    text, found, _ = text.rpartition(mark if kept else mark.strip())
    if not found:
        raise common.InputError("continue_final_message: this model's chat template leaves the last message out")
    return text if kept else text.rstrip()


def _arguments(text: str | None) -> dict[str, Any]:
    """What cannot be read is {}: a call that was cut off stays in its history, where a refusal would end every turn."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def tool_choice(body: CommonRequest) -> str | NamedTool:
    """Who decides whether a tool is called: "none", "auto" (the model), "required" or a name (the client)."""
    if getattr(body, "tools", None) is None:
        return "none"
    return body.tool_choice or "auto"


def check_tools(body: CommonRequest, parser: str | None, auto: bool) -> None:
    """Refuse what cannot be chosen. `parser` and `auto` are the server's flags. Raises InputError."""
    wanted = getattr(body, "tool_choice", None)
    if wanted not in (None, "none") and body.tools is None:
        raise common.InputError("tool_choice: needs tools")
    if isinstance(wanted, NamedTool) and wanted.function.name not in [tool.function.name for tool in body.tools]:
        raise common.InputError(f"tool_choice: none of the tools is called {wanted.function.name!r}")
    if tool_choice(body) == "auto" and not (parser and auto):
        raise common.InputError("tool_choice: 'auto' needs a server with --enable-auto-tool-choice and "
                                "--tool-call-parser; 'required', 'none' and a named function always work")  # fmt: skip


def tool_constraint(body: CommonRequest) -> dict[str, Any] | None:
    """What an answer must match (companion 06b) if the client, and not the model, decides that a tool is called.

    A named tool: its arguments alone. "required": `[{"name": …, "parameters": …}, …]`, at least one. Each schema
    stands in the grammar as a document of its own, so that `#/$defs/…` finds what its author meant.
    """
    chosen = tool_choice(body)
    if chosen in ("none", "auto"):
        return None
    none: dict[str, Any] = {"properties": {}}  # a function that says nothing of its parameters has none
    schemas = {tool.function.name: {"type": "object", **(tool.function.parameters or none)} for tool in body.tools}
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
        lines += [f'call_{i}: {json.dumps(begin, ensure_ascii=False)} arguments_{i} "}}"',
                  f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': compact})}"]  # fmt: skip
    return {"grammar": "\n".join(lines)}


def structured_outputs(body: CommonRequest) -> tuple[str, dict[str, Any]] | None:
    """The one constraint that a request names, in any of its dialects, behind the field it came from.

    Raises InputError.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    if body.structured_outputs is not None:
        found.append(("structured_outputs", body.structured_outputs.model_dump(by_alias=True, exclude_none=True)))
    old = {name: value for name in ("json", "regex", "choice", "grammar")
           if (value := getattr(body, f"guided_{name}")) is not None}  # fmt: skip
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
        raise common.InputError(f"{field}: exactly one constraint is allowed: json, regex, choice, grammar or "
                                "json_object, in structured_outputs, response_format or guided_*")  # fmt: skip
    return field, constraint


def constraint_error(field: str, error: str, body: CommonRequest) -> str:
    """What companion 06b says against a constraint, in the client's words: its field, and of `tools` the function.

    The grammar of calls is ours (`tool_constraint`): line 2i + 4 of it is the schema of function i.
    """
    said = re.sub("^structured_outputs:? ", "", error)
    if field != "tools":
        return f"{field}: {said}"
    if isinstance(body.tool_choice, NamedTool):
        return f"tools: {body.tool_choice.function.name}: {said.removeprefix('json: ')}"
    found = re.match(r"grammar: at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \| |$)", said)
    if found is None:  # it is about all of them: their size, the time they take
        return f"tools: {said.rpartition(': ')[2]}"
    names = [*dict.fromkeys(tool.function.name for tool in body.tools)]
    return f"tools: {names[int(found[1]) // 2 - 2]}: {found[2]}"


class JSONEnd:
    """Finds where a JSON object ends, in text that comes piece by piece: its braces count, those in strings do not."""

    BLANK, BETWEEN = frozenset(" \t\r\n"), frozenset(string.ascii_letters + string.digits + " \t\r\n+-.,:")

    def __init__(self) -> None:
        self.depth, self.in_string, self.escaped = 0, False, False
        self.ended = self.broken = False  # broken: there is a character that JSON cannot have at this place

    def read(self, text: str) -> int:
        """How many characters of `text` belong to the object: all of them, unless it has ended or is broken."""
        for i, char in enumerate(text):
            if self.in_string:
                self.broken = char < " "
                self.in_string = self.escaped or char != '"'
                self.escaped = not self.escaped and char == "\\"
            elif char in "{[":
                self.depth += 1
            elif self.depth == 0:
                self.broken = char not in self.BLANK
            elif char in "]}":
                self.depth -= 1
                self.ended = self.depth == 0
            else:
                self.in_string = char == '"'
                self.broken = not (self.in_string or char in self.BETWEEN)
            if self.ended or self.broken:
                return i + self.ended
        return len(text)


class ToolCallReader:
    """Reads one answer, piece by piece, and says what of it is text and what is a call.

    Pieces of a stream and a whole answer go the same way. A demanded call is told while its arguments grow. One that
    the model decided on, `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes' format, and Qwen's), is told
    when it is complete: until then it may turn out to be text. Where it ends is said by its JSON: in a string, the tags
    are text like any other.
    """

    HEAD = re.compile(r'[}\[, ]*\{"name": ("(?:[^"\\]|\\.)*"), "parameters": ')
    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, body: CommonRequest) -> None:
        self.choice, self.parallel = tool_choice(body), getattr(body, "parallel_tool_calls", True) is not False
        self.unread, self.count = "", 0  # characters that may yet become something; calls so far
        self.json: JSONEnd | None = None  # within a call: how far its JSON has come
        self.block = ""  # and that JSON, if it may turn out to be text
        self.behind: str | None = None  # after a call: what may follow it, and is no text

    def read(self, text: str, final: bool) -> dict[str, Any]:
        """The news in `text` as OpenAI's delta: `content`, `tool_calls` or nothing. `final`: no more will come."""
        if self.choice == "none":
            return {"content": text}
        if self.choice == "auto":
            content, calls = self.read_decided(text, final)
            return ({"content": content} if content or not calls else {}) | ({"tool_calls": calls} if calls else {})
        if isinstance(self.choice, NamedTool):
            start = [] if self.count or not text else [self.begin(self.choice.function.name)]
            calls = [*start, self.grow(text)] if text else []
        else:
            calls = self.read_demanded(text)
        return {"tool_calls": merged_calls(calls)} if calls else {}

    def begin(self, name: str) -> dict[str, Any]:
        self.count += 1
        return {"index": self.count - 1, "id": f"chatcmpl-tool-{uuid.uuid4().hex}", "type": "function",
                "function": {"name": name, "arguments": ""}}  # fmt: skip

    def grow(self, arguments: str) -> dict[str, Any]:
        return {"index": self.count - 1, "function": {"arguments": arguments}}

    def read_demanded(self, text: str) -> list[dict[str, Any]]:
        """`[{"name": "f", "parameters": {…}}, …]`: the grammar has fixed every character around name and arguments."""
        calls, self.unread = [], self.unread + text
        while self.unread:
            if self.json is None:
                head = self.HEAD.match(self.unread)
                if head is None:
                    break  # half a head, or the end of the list
                self.unread, self.json = self.unread[head.end() :], JSONEnd()
                calls.append(self.begin(json.loads(head[1])))
            else:
                end = self.json.read(self.unread)
                end = len(self.unread) if self.json.broken else end  # the engine has ended this answer with an error
                if end:
                    calls.append(self.grow(self.unread[:end]))
                self.unread = self.unread[end:]
                self.json = None if self.json.ended else self.json
        return calls

    def read_decided(self, text: str, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """Text, and calls in the midst of it. What may yet become a call is held back."""
        content, calls, self.unread = "", [], self.unread + text
        while self.unread or (final and self.json):
            if self.json:
                end = self.json.read(self.unread)
                self.block, self.unread = self.block + self.unread[:end], self.unread[end:]
                if self.json.ended:
                    call, self.json = decided_call(self.block), None
                    if call is None:
                        content += self.OPEN + self.block
                        continue
                    if self.parallel or self.count == 0:
                        calls += [self.begin(call[0]), self.grow(call[1])]
                    self.behind = self.CLOSE
                elif self.json.broken or final:  # the tag was text, and a call may stand in what followed it
                    content, self.unread, self.json = content + self.OPEN, self.block + self.unread, None
                else:
                    break
            elif self.behind is not None:  # blanks, the closing tag, blanks
                self.unread = self.unread.lstrip()
                if self.behind.startswith(self.unread):  # half of it, or nothing: no text, even if no more comes
                    break
                if self.behind and self.unread.startswith(self.behind):
                    self.unread, self.behind = self.unread.removeprefix(self.behind), ""
                else:
                    self.behind = None
            else:
                said, tag, rest = self.unread.partition(self.OPEN)
                end = len(said) - (0 if final or tag else self.half_open())
                content, self.unread = content + said[:end], rest if tag else said[end:]
                if not tag:
                    break
                self.json, self.block = JSONEnd(), ""
        return content, merged_calls(calls)

    def half_open(self) -> int:
        """How many characters at the end may be the beginning of `<tool_call>`."""
        return next((n for n in range(len(self.OPEN) - 1, 0, -1) if self.unread.endswith(self.OPEN[:n])), 0)


def decided_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that nothing but the model's habit has formed; None if it is none.

    Half of a surrogate pair, which JSON can escape and no answer could carry, stays an escape in the arguments.
    """
    try:
        call = json.loads(text)
        name, arguments = call["name"], call["arguments"]
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            return None
        name.encode()
        return name, json.dumps(arguments, ensure_ascii=False).encode(errors="backslashreplace").decode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def merged_calls(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One delta per call: its beginning and the arguments that came with it."""
    found: list[dict[str, Any]] = []
    for call in calls:
        if found and found[-1]["index"] == call["index"]:
            found[-1]["function"]["arguments"] += call["function"]["arguments"]
        else:
            found.append(call)
    return found

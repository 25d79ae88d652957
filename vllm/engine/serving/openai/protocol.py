"""What a client may say, and the form of what it hears: every field of a request is a type.

Owns the requests of OpenAI's API with vLLM's own fields; FastAPI reads bodies with them, `serving` takes them apart. A
list is counted before its elements are looked at; what a field means is never decided here.
vLLM: `vllm/entrypoints/openai/chat_completion/protocol.py` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from engine.serving.openai.limits import LARGE_BYTES, LENGTHS, MAX_ELEMENTS, MAX_NAME
from engine.serving.openai.unknown_fields import UnknownFields

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
    """Types are taken at their word ("5" is no number). A field that we do not know is passed over, as in vLLM; with
    --strict-fields it is an error, not a surprise."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    _num_bytes: int = pydantic.PrivateAttr(0)  # of the body that said this

    @property
    def is_large(self) -> bool:
        """Whether what is done with it is too much for an event loop."""
        return self._num_bytes > LARGE_BYTES

    @pydantic.model_validator(mode="before")
    @classmethod
    def _what_is_said(cls, data: Any, about: pydantic.ValidationInfo) -> Any:
        """Some clients write out all the fields they have: null under a name that we do not know asks for nothing.
        Of names that do ask for something, the first is enough for an error."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name, value in data.items() if value is not None and name not in known]
        fields = about.context if isinstance(about.context, UnknownFields) else UnknownFields()
        if not fields.strict:
            fields.pass_over(cls.__name__, unknown)
        return {name: whole(data[name]) for name in (*(known & data.keys()), *unknown[: fields.strict])}

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
    """What chats and completions take, and responses do not (`responses_protocol.py`)."""

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


def prompts(given: Any, read: Callable[[Any], Any]) -> Any:
    """One error for four types that do not fit."""
    try:
        return read(given)
    except pydantic.ValidationError:
        raise ValueError("must be a text, token ids, or a list of either, all of one kind") from None


class CompletionRequest(CommonRequest):
    """`POST /v1/completions`: prompts as texts or token ids."""

    prompt: Annotated[str | Many[str] | Many[int] | Many[Many[int]], pydantic.WrapValidator(prompts)]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None


class TextPart(Carried):
    """A message's part that says something."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Carried):
    """An assistant's part that declines."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What a template hears of it."""
        return self.refusal


class ThinkingPart(Carried):
    """What an assistant thought; as in vLLM, a template hears it as text."""

    type: Literal["thinking"]
    thinking: str

    @property
    def text(self) -> str:
        """What a template hears of it."""
        return self.thinking


def type_of(part: Any) -> str | None:
    """By which a part's model is found: text under each of its three names is one."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "text" if kind in ("text", "input_text", "output_text") else kind if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, pydantic.Tag("text")]
    | Annotated[RefusalPart, pydantic.Tag("refusal")]
    | Annotated[ThinkingPart, pydantic.Tag("thinking")],
    pydantic.Discriminator(
        type_of,
        custom_error_type="part",
        custom_error_message="this model reads text alone: a part must be of type text, refusal or thinking",
    ),
]


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

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Many[Part] | None = None
    name: str | None = None
    function_call: FunctionCall | None = None  # what tool_calls and tools have replaced, as has the role `function`
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: Any = pydantic.Field(
        default=None, validation_alias=pydantic.AliasChoices("reasoning", "reasoning_content")
    )

    @pydantic.model_validator(mode="after")
    def _somebody_speaks(self) -> ChatMessage:
        if self.content is None and self.role not in ("assistant", "function"):  # who calls need not say anything
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


def _replaced(value: Any) -> Any:
    """`functions` and `function_call`, by which nobody is called any more."""
    if value and value not in ("none", "auto"):
        raise ValueError("OpenAI has replaced functions and function_call by tools and tool_choice, which work here")
    return None


Replaced = Annotated[Any, pydantic.BeforeValidator(_replaced)]


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
    functions: Replaced = None
    function_call: Replaced = None
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
    choices = [
        full(choice, *OF_CHOICE) | {"message": full(choice["message"], *OF_MESSAGE)} for choice in answer["choices"]
    ]
    return full(answer | {"choices": choices}, *OF_ANSWER, *OF_PROMPT, "prompt_text")

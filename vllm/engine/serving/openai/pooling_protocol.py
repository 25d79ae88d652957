"""What a client may say that wants vectors or scores of texts.

Owns the requests of OpenAI's embeddings and of vLLM's score and rerank; FastAPI reads bodies with them, `pooling` takes
them apart. They never decide how a text is pooled. vLLM: `vllm/entrypoints/pooling/*/protocol.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic

from engine.serving.openai.limits import MAX_NAME
from engine.serving.openai.protocol import ChatMessage, GoesOn, Many, OpenAIModel, Tool, prompts

FEW = 16  # texts whose vectors an event loop writes down itself


class PoolingRequest(OpenAIModel):
    """What embeddings, scores and rankings have in common."""

    stream: ClassVar[bool] = False

    model: str | None = None
    user: str | None = None
    request_id: str | None = pydantic.Field(None, max_length=MAX_NAME)
    priority: int = 0
    cache_salt: str | None = pydantic.Field(None, min_length=1)
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None  # vectors of length 1; None: as the server was started
    padding: Literal["do_not_pad"] | None = None


class EmbeddingRequest(PoolingRequest):
    """`POST /v1/embeddings`: texts or token ids, or a conversation."""

    input: Annotated[str | Many[str] | Many[int] | Many[Many[int]], pydantic.WrapValidator(prompts)] | None = None
    messages: Many[ChatMessage] | None = pydantic.Field(None, min_length=1)
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = pydantic.Field(None, ge=1)
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "native"
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False  # these are for the chat template
    continue_final_message: GoesOn = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Many[Tool] | None = pydantic.Field(None, min_length=1)

    @property
    def is_large(self) -> bool:
        """A short text may have a long answer, too."""
        return super().is_large or (isinstance(self.input, list) and len(self.input) > FEW)


class ScoreRequest(PoolingRequest):
    """`POST /score`: how near texts are to each other, under any of vLLM's names for the two sides."""

    queries: str | Many[str] | None = None
    documents: str | Many[str] | None = None
    items: str | Many[str] | None = None
    text_1: str | Many[str] | None = None
    text_2: str | Many[str] | None = None
    data_1: str | Many[str] | None = None
    data_2: str | Many[str] | None = None


class RerankRequest(PoolingRequest):
    """`POST /rerank`: documents by how near they are to a query."""

    query: str
    documents: str | Many[str]
    top_n: int = pydantic.Field(0, ge=0)  # 0: all

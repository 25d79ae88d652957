"""Every error in one shape, which is OpenAI's; or Anthropic's, for its clients.

Owns what a client is told about an exception: status, message, the field to blame; called wherever an answer ends
badly. It never repeats more than a few lines of what the client sent.
vLLM: `vllm/entrypoints/serve/exception_handling/`.
"""

from __future__ import annotations

import common

import re
import traceback
from typing import Any, ClassVar

import pydantic

from engine.errors import EngineDeadError, QueueOverflowError
from engine.serving.openai.limits import MAX_MESSAGE, MAX_NAME
from engine.serving.openai.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from engine.serving.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoRAAdapterRequest,
)
from engine.serving.openai.responses_protocol import ResponsesRequest


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

    TYPES: ClassVar = {
        400: "BadRequestError",
        401: "AuthenticationError",
        404: "NotFoundError",
        405: "MethodNotAllowedError",
        413: "RequestTooLargeError",
        415: "UnsupportedMediaTypeError",
        500: "InternalServerError",
        503: "ServiceUnavailableError",
    }

    ANTHROPIC_TYPES: ClassVar = {
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        503: "overloaded_error",
    }

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        # It may repeat what the client sent: megabytes, or half of a character ("\\ud800"), which UTF-8 cannot say.
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]} … ({len(message):,} characters)"
        super().__init__(message.encode("utf-8", "replace").decode())
        param = param and param[:MAX_NAME].encode("utf-8", "replace").decode()
        self.status, self.param, self.headers = status, param, headers or {}

    def body(self) -> dict[str, Any]:
        kind = self.TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}

    def for_anthropic(self) -> dict[str, Any]:
        """The same in the shape that Anthropic's clients read, with the types that they know."""
        kind = self.ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def told(self, path: str) -> dict[str, Any]:
        """In the shape of the API that is asked at this path."""
        return self.for_anthropic() if path.startswith("/v1/messages") else self.body()


def as_api_error(error: Exception, body: Any = None) -> APIError:
    """What a client is told about an exception; `body` is its request."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, common.InputError):
        text = re.sub("^prompt_token_ids", "prompt", str(error))  # the engine's name for it
        if getattr(body, "max_completion_tokens", None) is not None:
            text = re.sub("^max_tokens", "max_completion_tokens", text)
        first = text.split(":")[0].split(" ")[0]
        kinds = (CompletionRequest, ChatCompletionRequest, ResponsesRequest, DetokenizeRequest, LoadLoRAAdapterRequest)
        kinds += (EmbeddingRequest, ScoreRequest, RerankRequest)
        return APIError(400, text, first if any(first in kind.model_fields for kind in kinds) else None)
    if isinstance(error, QueueOverflowError):
        return APIError(503, str(error), headers={"Retry-After": "1"})
    if isinstance(error, EngineDeadError):
        return APIError(500, f"EngineCore is dead: {error}")
    traceback.print_exception(error)
    return APIError(500, "internal error; the server's log has the details")

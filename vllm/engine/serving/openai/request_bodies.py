"""A body becomes a request away from the event loop.

Owns how a route reads its body: FastAPI does so on the event loop, which is right for a chat of two messages and wrong
for 4 MB. Called by FastAPI for every request with a body; it never keeps one.
vLLM: the base of FastAPI's `APIRoute` (`vllm/entrypoints/openai/` reads bodies on its loop).
"""

from __future__ import annotations

import common

import json
import re
from collections.abc import Callable
from typing import Any

import pydantic
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from engine.serving.openai import large_bodies
from engine.serving.openai.limits import LARGE_BYTES
from engine.serving.openai.protocol import OpenAIModel
from engine.serving.openai.unknown_fields import UnknownFields


def says_json(request: Request) -> bool:
    """Without this header, FastAPI takes no body for JSON."""
    return bool(re.match(r"application/(.+\+)?json\b", request.headers.get("content-type", ""), re.I))


class ReadRequest(Request):
    """A request whose body has been read."""

    said: Any = None

    async def json(self) -> Any:
        """Instead of parsing the body once more."""
        return self.said


class BodyRoute(APIRoute):
    """A route that takes a model of `protocol` or `responses_protocol` as its body."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """FastAPI's own handler, behind ours."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind = self.body_field.field_info.annotation

        async def read_first(request: Request) -> Any:
            request = ReadRequest(request.scope, request.receive)
            if (body := await request.body()) and says_json(request):
                fields = request.app.state.unknown_fields
                request.said = await large_bodies.away(len(body) > LARGE_BYTES, read, kind, body, fields)
            return await handle(request)

        return read_first


def read(kind: type[OpenAIModel], body: bytes, fields: UnknownFields | None = None) -> Any:
    """A body as a model of this kind; `fields` says what becomes of those that it has not. Raises what FastAPI would
    raise, and InputError."""
    try:
        said = large_bodies.parse(body)
        if isinstance(said, dict):  # else FastAPI refuses it
            said = kind.model_validate(said, context=fields)
            said._num_bytes = len(body)
        return said
    except json.JSONDecodeError as error:
        about = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([about]) from None
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in found]) from None
    except common.InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise HTTPException(400) from error

"""06f3 · A body becomes a request away from the event loop. The part of lesson 06f that needs FastAPI itself.

FastAPI reads a body where it routes it: on the event loop, on which every stream of the server waits for its turn. For
a chat of two messages that is right, for 4 MB it is not. So a route here reads the body before FastAPI does, a large
one on a thread, and hands over what it has read. There is one such thread: large bodies wait for each other and for
nobody else, and the memory that they take is that of one.

Read for this: FastAPI's documentation, *Custom Request and APIRoute class*.
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

from engine.serving.openai import protocol


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
    """A route that takes a model of 06f0 or 06f1 as its body."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """FastAPI's own handler, behind ours."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind = self.body_field.field_info.annotation

        async def read_first(request: Request) -> Any:
            request = ReadRequest(request.scope, request.receive)
            if (body := await request.body()) and says_json(request):
                request.said = await protocol.away(len(body) > protocol.LARGE_BYTES, read, kind, body)
            return await handle(request)

        return read_first


def read(kind: type[pydantic.BaseModel], body: bytes) -> Any:
    """A body as a model of this kind. Raises what FastAPI would raise, and InputError."""
    try:
        said = protocol.parse(body)
        if isinstance(said, dict):  # else FastAPI refuses it
            said = kind.model_validate(said)
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

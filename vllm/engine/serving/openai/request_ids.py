"""The name of a request, in a header of its answer.

Owns that header; an ASGI middleware, there only with --enable-request-id-headers. It never looks at anything else.
vLLM: `vllm/entrypoints/serve/middleware/x_request_id.py`.
"""

from __future__ import annotations

import uuid
from typing import Any


class RequestIds:
    """X-Request-Id as the client has sent it, or a new one."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name = dict(scope["headers"]).get(b"x-request-id") or uuid.uuid4().hex.encode()

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name)]}
            await send(message)

        await self.app(scope, receive, named)

"""What happens before FastAPI sees a request: the key, and the size of the body.

Owns the keys; an ASGI middleware around `app`, and around `serving/proxy.py`'s. What is behind it never sees a body of
more than MAX_BODY_BYTES, nor a request without a key. vLLM: `vllm/entrypoints/serve/middleware/`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Any

from engine.serving.openai.errors import APIError
from engine.serving.openai.limits import MAX_BODY_BYTES


class Gate:
    """What happens before FastAPI sees a request: the key, and the size of the body (ASGI middleware)."""

    PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/debug/", "/score", "/rerank", "/v2/", "/sleep", "/wake_up")
    PROTECTED += ("/is_sleeping", "/reset_prefix_cache", "/server_info")

    def __init__(
        self, app: Any, api_keys: Sequence[str], max_body_bytes: int = MAX_BODY_BYTES, root_path: str = ""
    ) -> None:
        self.app, self.api_keys = app, [key.encode() for key in api_keys]
        self.max_body_bytes, self.root_path = max_body_bytes, root_path
        self.owners = [hashlib.sha256(key).hexdigest() for key in self.api_keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if not scope["path"].startswith("/"):  # through some proxies a target comes as a whole URL (RFC 9112, 3.2.2)
            scope = {**scope, "path": "/" + scope["path"].partition("://")[2].partition("/")[2]}
        headers = dict(scope["headers"])
        path = scope["path"]  # FastAPI finds its routes with and without the root path
        if self.root_path and path.startswith(f"{self.root_path}/"):
            path = path.removeprefix(self.root_path)
        if self.api_keys and scope["method"] != "OPTIONS" and path.startswith(self.PROTECTED):
            owner = self.owner(authorization(headers))
            if owner is None:
                text = "Unauthorized: send the header Authorization: Bearer <api key>"
                return await refuse(send, APIError(401, text, headers={"WWW-Authenticate": "Bearer"}), path)
            scope = {**scope, "owner": owner}
        if error := unreadable(headers):
            return await refuse(send, error, path)
        body = await whole_body(receive, self.max_body_bytes)
        if body is None:
            return None
        if len(body) > self.max_body_bytes:
            text = f"the body has more than {self.max_body_bytes:,} bytes (the server's --max-body-bytes)"
            return await refuse(send, APIError(413, text), path)
        held = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return held.pop() if held else await receive()

        return await self.app(scope, replay, send)

    def owner(self, authorization: bytes) -> str | None:
        """Whose key this header names; None if it is nobody's."""
        scheme, _, given = authorization.partition(b" ")
        # Comparing takes the same time however many characters are right, so it tells nobody how close they are.
        right = [owner for key, owner in zip(self.api_keys, self.owners) if secrets.compare_digest(given, key)]
        return right[0] if right and scheme.lower() == b"bearer" else None


def authorization(headers: dict[bytes, bytes]) -> bytes:
    """What a client shows, as OpenAI's say it or as Anthropic's do."""
    if b"authorization" in headers or b"x-api-key" not in headers:
        return headers.get(b"authorization", b"")
    return b"Bearer " + headers[b"x-api-key"]


def unreadable(headers: dict[bytes, bytes]) -> APIError | None:
    """What the headers say of a body that is not read, if they do."""
    if {b"content-length", b"transfer-encoding"} <= headers.keys():  # a proxy may read the other
        return APIError(400, "Content-Length and Transfer-Encoding: one of them", headers={"Connection": "close"})
    coding = headers.get(b"content-encoding", b"").decode("latin-1").strip()
    if coding.lower() in ("", "identity"):
        return None
    text = f"Content-Encoding {coding:.40}: send the body as it is, without a content coding"
    return APIError(415, text, headers={"Accept-Encoding": "identity"})


async def whole_body(receive: Any, most: int) -> bytes | None:
    """The body of a request, of one that is too long its beginning; None if the client hangs up meanwhile."""
    body, total, more = bytearray(), 0, True
    while more and total <= 16 * most:  # an over-long body is read to its end, and dropped: then the
        message = await receive()  # client is ready to hear why
        if message["type"] == "http.disconnect":
            return None
        more, total = message.get("more_body", False), total + len(message.get("body", b""))
        body += message.get("body", b"")[: most + 1 - len(body)]
    return bytes(body)


async def refuse(send: Any, error: APIError, path: str = "") -> None:
    """Answer an ASGI request to this path with the error, before any route has seen it."""
    body = json.dumps(error.told(path)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})

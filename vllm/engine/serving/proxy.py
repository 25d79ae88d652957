"""In front of prefill and decode servers: each request to one of these, and then to one of those.

Owns who is asked in which order, and which half of an answer is the client's fault; called by `python -m vllm proxy`.
It never believes what a client says about keys and values, and never sees one of them.
vLLM: `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`, outside the package.
"""

from __future__ import annotations

import common

import argparse
import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import fastapi
import httpx
import uvicorn
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from engine import arguments
from engine.kv_transfer.params import check_kv_transfer_params, give_up
from engine.serving.openai.disconnects import disconnected, unless
from engine.serving.openai.gate import Gate
from engine.serving.sockets import bind

PATIENCE = 5.0  # seconds for a server to say how it is


def read_request(data: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. Raises InputError, in one line, for what no server could be sent on: JSON
    as Python reads it knows NaN, numbers beyond all bounds and half a character, and JSON as others read it does not.
    """
    try:
        body = json.loads(data)
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise common.InputError("the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise common.InputError("the body is not JSON: half of a surrogate pair is no text") from None
    except UnicodeDecodeError:
        raise common.InputError("the body is not JSON: it must be UTF-8") from None
    except ValueError as error:
        raise common.InputError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise common.InputError("the body must be a JSON object")
    return body


class Proxy:
    """First the prefill server, for one token that nobody reads; it answers with kv_transfer_params, which the decode
    server gets together with the request."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], client: Any) -> None:
        self.prefill, self.decode, self.client, self.turn = list(prefill), list(decode), client, 0

    def request(self, url: str, body: dict[str, Any], headers: dict[str, Any]) -> Any:
        """An httpx request that has not been sent yet."""
        headers = {**headers, "content-type": "application/json"}
        return self.client.build_request("POST", url, content=json.dumps(body, allow_nan=False), headers=headers)

    async def prefilled(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[dict | None, Any]:
        """(kv_transfer_params, None); or (None, an answer that is the client's fault); or neither: nobody can."""
        asked = {**body, "stream": False, "max_tokens": 1, "min_tokens": 0,
                 "kv_transfer_params": {"do_remote_decode": True, "transfer_id": uuid.uuid4().hex}}  # fmt: skip
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        asked.pop("stream_options", None)
        for i in range(len(self.prefill)):
            url = self.prefill[(self.turn + i) % len(self.prefill)]
            try:
                answer = await self.client.send(self.request(url + path, asked, headers))
            except httpx.HTTPError:
                continue
            if answer.status_code == 200:
                with contextlib.suppress(ValueError, AttributeError):  # of a server that is none: the next one
                    params = answer.json().get("kv_transfer_params")
                    check_kv_transfer_params(params or {})
                    return params, None
                continue
            if answer.status_code < 500:
                return None, answer
        return None, None  # the decode server is an engine, too: it computes the prompt itself

    async def handle(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        """An httpx response whose body has not been read yet. Raises httpx.HTTPError if no decode server answers."""
        self.turn += 1
        failure = httpx.HTTPError("there is none")
        # They name a host that a decode server will connect to, and believe: no client's word.
        body = {name: value for name, value in body.items() if name != "kv_transfer_params"}
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and not all(type(token) is int for token in prompt)
        scored = body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None)
        # One transfer is one prompt and one answer; and a prompt is scored where it is computed.
        split = body.get("n") in (None, 1) and not (several or scored)
        for i in range(len(self.decode)):
            params, refusal = await self.prefilled(path, body, headers) if split else (None, None)
            if refusal is not None:
                return refusal
            wanted = {**body, "kv_transfer_params": params} if params else body
            url = self.decode[(self.turn + i) % len(self.decode)]
            try:
                answer = await self.client.send(self.request(url + path, wanted, headers), stream=True)
            except httpx.HTTPError as error:
                answer, failure = None, error
            except asyncio.CancelledError:  # the client has left: nobody comes for its prompt
                if params:
                    await give_up(params)
                raise
            if params and (answer is None or answer.status_code >= 400):
                await give_up(params)
            if answer is None:
                continue
            if answer.status_code < 500 or i == len(self.decode) - 1:
                return answer
            await answer.aclose()
        raise failure


class Closing:
    """ASGI middleware: what a request has opened behind us is closed when it is over, whether its answer was read to
    the end, broke, or never began."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with contextlib.AsyncExitStack() as opened:
            await self.app({**scope, "opened": opened}, receive, send)


def error(status: int, message: str) -> Response:
    """An error in OpenAI's words."""
    kind = "BadRequestError" if status == 400 else "ServiceUnavailableError"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


def key_of(request: Request) -> dict[str, Any]:
    """The client's key, as a header for the servers: it is theirs to check."""
    key = request.headers.get("authorization")
    return {"authorization": key.encode("latin-1")} if key else {}


async def body_of(answer: httpx.Response) -> AsyncIterator[bytes]:
    """What a decode server says, as it comes."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.HTTPError as failure:  # the status line is long gone: the stream itself has to say it
        message = f"the decode server is gone: {failure or type(failure).__name__}"
        yield f"data: {json.dumps({'error': {'message': message, 'code': 502}})}\n\n".encode()


def close_soon(answer: httpx.Response) -> None:
    """Nobody reads this answer."""
    CLOSING.add(task := asyncio.ensure_future(answer.aclose()))
    task.add_done_callback(CLOSING.discard)


CLOSING: set[asyncio.Future[None]] = set()  # a loop has only weak references to its tasks


class Routes:
    """What clients may ask for."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    async def complete(self, request: Request) -> Response:
        """Completions and chats, streamed or whole."""
        try:
            body = read_request(await request.body())
        except common.InputError as problem:
            return error(400, str(problem))
        gone = asyncio.ensure_future(disconnected(request))
        try:
            answer = await unless(gone, self.proxy.handle(request.url.path, body, key_of(request)), close_soon)
        except httpx.HTTPError as failure:
            return error(503, f"no decode server answers: {failure or type(failure).__name__}")
        finally:
            gone.cancel()
        if answer is None:
            return Response(status_code=499)  # nobody will read it, and nobody computes it any more
        request.scope["opened"].push_async_callback(answer.aclose)
        kind = answer.headers.get("content-type")
        if answer.is_stream_consumed:
            return Response(answer.content, answer.status_code, media_type=kind)
        return StreamingResponse(body_of(answer), answer.status_code, media_type=kind)

    async def ask(self, url: str, request: Request) -> httpx.Response | None:
        """The same small question to one server; None if it does not answer within seconds."""
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(PATIENCE):
                return await self.proxy.client.get(url + request.url.path, headers=key_of(request))

    async def models(self, request: Request) -> Response:
        """What a decode server has."""
        for url in self.proxy.decode:
            if (answer := await self.ask(url, request)) is not None:
                return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        return error(503, f"no decode server answers: {', '.join(self.proxy.decode)}")

    async def health(self, request: Request) -> Response:
        """200 while a decode server is well, which can do without the others; says in any case who is not."""
        urls = [*self.proxy.decode, *self.proxy.prefill]
        answers = await asyncio.gather(*(self.ask(url, request) for url in urls))
        gone = [url for url, answer in zip(urls, answers, strict=True) if answer is None or answer.status_code != 200]
        if set(self.proxy.decode) <= set(gone):
            return error(503, f"no decode server is well; gone or ill: {', '.join(gone)}")
        return JSONResponse({"gone": gone})


def build_proxy(prefill: Sequence[str], decode: Sequence[str], client: httpx.AsyncClient | None = None) -> Gate:
    """An ASGI application in front of servers, by their URLs."""
    patience, limits = httpx.Timeout(600, connect=5), httpx.Limits(max_connections=None)
    client = client or httpx.AsyncClient(timeout=patience, limits=limits)
    routes, app = Routes(Proxy(prefill, decode, client)), fastapi.FastAPI(docs_url=None, redoc_url=None)
    for path in ("/v1/chat/completions", "/v1/completions"):
        app.add_api_route(path, routes.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", routes.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", routes.health, methods=["GET"], response_model=None)
    return Gate(Closing(app), ())  # without keys of our own: bodies are bounded as they are behind us


def proxy_command(args: argparse.Namespace) -> None:
    """Forward OpenAI requests to prefill and decode servers until SIGINT or SIGTERM."""
    app = build_proxy(args.prefill, args.decode)
    sock = bind(args.host, args.port)
    print(f"Listening on http://{args.host}:{sock.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[sock])


def add_proxy_command(commands: Any) -> None:
    """`proxy` among the commands of a parser."""
    about = {"help": "in front of prefill and decode servers", "description": proxy_command.__doc__}
    proxy = commands.add_parser("proxy", **about)
    proxy.add_argument(
        "--prefill", type=arguments.url, nargs="+", required=True, metavar="URL", help="the kv_producers"
    )
    proxy.add_argument("--decode", type=arguments.url, nargs="+", required=True, metavar="URL", help="the kv_consumers")
    proxy.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    port = arguments.number(int, 0, 65535)
    proxy.add_argument("--port", type=port, default=8000, help="default 8000; 0 takes a free one")
    proxy.set_defaults(run=proxy_command)

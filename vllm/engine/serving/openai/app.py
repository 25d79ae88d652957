"""The routes.

Owns the FastAPI application and who of its clients may find what was kept; made by `serve` for one `OpenAIServing`. A
route never decides anything about a request: it says who asked, and how what was found is sent.
vLLM: `vllm/entrypoints/openai/api_server.py` and the `api_router.py` of each API.
"""

from __future__ import annotations

import common

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import fastapi
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from engine.errors import EngineDeadError, QueueOverflowError
from engine.serving.anthropic.messages import MessagesAPI
from engine.serving.anthropic.protocol import CountTokensRequest, MessagesRequest
from engine.serving.openai import dev_routes
from engine.serving.openai.disconnects import disconnected, unless
from engine.serving.openai.errors import APIError, ErrorResponse, as_api_error
from engine.serving.openai.gate import Gate
from engine.serving.openai.large_bodies import away
from engine.serving.openai.limits import LARGE_BYTES, MAX_NAME
from engine.serving.openai.pooling import PoolingServing
from engine.serving.openai.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from engine.serving.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoRAAdapterRequest,
    TokenizeRequest,
    UnloadLoRAAdapterRequest,
)
from engine.serving.openai.request_bodies import BodyRoute, says_json
from engine.serving.openai.request_ids import RequestIds
from engine.serving.openai.responses import ResponsesAPI
from engine.serving.openai.responses_protocol import ResponsesRequest
from engine.serving.openai.serving import VERSION, OpenAIServing
from engine.serving.openai.traffic import Traffic
from engine.serving.openai.unknown_fields import UnknownFields

FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 500, 503)
}
OF_POST = FAILURES | {422: {"description": "never: such errors are 400"}}
OF_GET: dict[int | str, dict[str, Any]] = {status: FAILURES[status] for status in (400, 401, 404, 500, 503)}
OF_DELETE: dict[int | str, dict[str, Any]] = {status: FAILURES[status] for status in (401, 404)}


# -- errors --


def error_response(request: Request, error: APIError) -> Response:
    """An error as an answer."""
    return JSONResponse(error.told(request.url.path), error.status, error.headers)


async def invalid(request: Request, error: RequestValidationError) -> Response:
    """A body that is no JSON, no object, or has a field that is wrong: the field is named."""
    first = max(error.errors(), key=lambda x: len(x["loc"]))  # of several kinds, the one that was meant most likely
    if first["type"] == "json_invalid":
        problem = first["ctx"]["error"].removesuffix(" at")  # "Unterminated string starting at"
        return error_response(request, APIError(400, f"the body is not JSON: {problem} at {first['loc'][-1]}"))
    where = [str(part) for part in first["loc"][1:2]]
    where += [str(x) for x in first["loc"][2:] if not re.match(r"[A-Z]|str$|[\w-]+\[", str(x))]  # types: no fields
    text = first["msg"].removeprefix("Value error, ")
    if where:
        text = f"{'.'.join(where)}: {text}"
    elif first["type"] != "string_unicode":  # which is about a field's name
        is_json = says_json(request)
        text = "the body must be one JSON object" if is_json else "Content-Type: must be application/json"
    return error_response(request, APIError(400, f"invalid request: {text}", where[0] if where else None))


async def http_error(request: Request, error: HTTPException) -> Response:
    """No such path or method; or a body that FastAPI could not read, of which it does not say why."""
    text = f"{error.detail}: {request.method} {request.url.path}"
    if error.status_code == 400:
        text = (
            "the body is not JSON that can be read: it must be UTF-8, not nested too deeply, without numbers "
            "of thousands of digits"
        )
    return error_response(request, APIError(error.status_code, text, None, dict(error.headers or {})))


async def other_error(request: Request, error: Exception) -> Response:
    """Whatever else is raised."""
    return error_response(request, as_api_error(error))


# -- answers --


class EventStream(StreamingResponse):
    """A streamed answer that aborts its request when it is over, even if it never began."""

    def __init__(self, events: AsyncIterator[str], forget: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.forget = forget

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.forget()


def owner_of(request: Request) -> str | None:
    """Whose key it came with: what is kept between requests is found again with the same one."""
    return request.scope.get("owner")


async def respond(body: Any, request: Request, api: Any) -> Response:
    """The answer of a chat, a completion or a response, streamed or whole; `api` has `add`, `answer` and `stream`."""
    name = request.headers.get("x-request-id")
    if name and len(name) > MAX_NAME:
        raise common.InputError(f"X-Request-Id: more than {MAX_NAME} characters")
    gone = asyncio.ensure_future(disconnected(request))
    try:
        job = await unless(gone, api.add(body, name, owner_of(request)), api.forget)
        if job is not None and body.stream:
            return EventStream(api.stream(job), functools.partial(api.forget, job))
        found = job and await unless(gone, api.answer(job), lambda answer: None)
    except Exception as error:
        return error_response(request, as_api_error(error, body))
    finally:
        gone.cancel()
    if found is None:
        return Response(status_code=499)  # nobody will read it
    return await away(body.is_large, JSONResponse, found)  # a response repeats what was asked


class Routes:
    """A method for each path. FastAPI reads from their types what a body must be."""

    def __init__(self, serving: OpenAIServing, num_owners: int) -> None:
        self.serving, self.llm = serving, serving.llm
        self.traffic: Any = None  # once there is a way in
        self.pooling = PoolingServing(serving, serving.pooler_config, serving.trained_dimensions)
        self.responses, self.messages = ResponsesAPI(serving, num_owners), MessagesAPI(serving)

    async def create_chat_completion(self, body: ChatCompletionRequest, request: Request) -> Response:
        return await respond(body, request, self.serving)

    async def create_completion(self, body: CompletionRequest, request: Request) -> Response:
        return await respond(body, request, self.serving)

    async def create_embedding(self, body: EmbeddingRequest, request: Request) -> Response:
        return await respond(body, request, self.pooling)

    async def create_score(self, body: ScoreRequest, request: Request) -> Response:
        return await respond(body, request, self.pooling)

    async def do_rerank(self, body: RerankRequest, request: Request) -> Response:
        return await respond(body, request, self.pooling)

    async def create_response(self, body: ResponsesRequest, request: Request) -> Response:
        return await respond(body, request, self.responses)

    async def create_message(self, body: MessagesRequest, request: Request) -> Response:
        return await respond(body, request, self.messages)

    async def count_tokens(self, body: CountTokensRequest) -> dict[str, Any]:
        return await self.messages.count_tokens(body)

    async def retrieve_response(self, response_id: str, request: Request, stream: bool = False) -> Response:
        found = self.responses.retrieve(response_id, owner_of(request), stream)
        return await away(found.size > LARGE_BYTES, JSONResponse, found.response)

    async def cancel_response(self, response_id: str, request: Request) -> None:
        self.responses.cancel(response_id, owner_of(request))

    async def delete_response(self, response_id: str, request: Request) -> dict[str, Any]:
        return self.responses.delete(response_id, owner_of(request))

    async def list_models(self) -> dict[str, Any]:
        names = [*self.serving.names, *self.serving.loras]
        return {"object": "list", "data": [self.serving.model_card(name) for name in names]}

    async def retrieve_model(self, name: str) -> dict[str, Any]:
        return self.serving.model_card(self.serving.check_model(name))

    async def load_lora_adapter(self, body: LoadLoRAAdapterRequest, request: Request) -> Response:
        return Response(await self.serving.load_lora(body, owner_of(request)))

    async def unload_lora_adapter(self, body: UnloadLoRAAdapterRequest, request: Request) -> Response:
        return Response(await self.serving.unload_lora(body, owner_of(request)))

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        return await self.serving.tokenize(body)

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        return await self.serving.detokenize(body)

    async def health(self) -> Response:
        """Empty, and 200 as long as the engine lives; a load balancer asks nothing else."""
        return Response(status_code=503 if self.llm.dead else 200)

    async def version(self) -> dict[str, str]:
        return {"version": VERSION}

    async def metrics(self) -> Response:
        """The engine's, and those of HTTP and of this process."""
        found = self.llm.stat_logger.expose() if self.llm.stat_logger else b""
        return Response(found + self.traffic.expose(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def load(self) -> dict[str, int]:
        """Requests inside that the engine works for; 0 without --enable-server-load-tracking."""
        return {"server_load": self.traffic.load}

    async def engine_state(self) -> dict[str, Any]:
        """What is inside, for developers; the page of the API does not show it."""
        llm = self.llm
        return {
            **await llm.call_utility("check_idle"),
            "callers": len(llm.front.callers),
            "pid": llm.ready.pid,
            "sequences": len(llm.front.sequences),
            "collectors": len(llm.collectors),
            "times": len(llm.stat_logger.times) if llm.stat_logger else 0,
        }


def build_app(
    serving: OpenAIServing, api_keys: Sequence[str] = (), debug: bool = False, strict_fields: bool = False
) -> Any:
    """The application: routes, the gate in front of them, and who may ask from a page."""
    frontend = serving.frontend
    app = fastapi.FastAPI(
        title="vLLM, from first principles",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None if frontend.disable_fastapi_docs else "/openapi.json",
    )
    app.root_path = frontend.root_path
    app.router.route_class = BodyRoute
    app.state.unknown_fields = UnknownFields(strict_fields)
    app.exception_handler(RequestValidationError)(invalid)
    app.exception_handler(HTTPException)(http_error)
    for kind in (APIError, common.InputError, QueueOverflowError, EngineDeadError, Exception):
        app.exception_handler(kind)(other_error)
    routes = Routes(serving, max(1, len(api_keys)))
    post, get = functools.partial(app.post, responses=OF_POST), functools.partial(app.get, responses=OF_GET)
    post("/v1/chat/completions")(routes.create_chat_completion)
    post("/v1/completions")(routes.create_completion)
    post("/v1/messages")(routes.create_message)
    post("/v1/messages/count_tokens")(routes.count_tokens)
    post("/v1/responses")(routes.create_response)
    post("/v1/embeddings")(routes.create_embedding)
    for path in ("/score", "/v1/score"):
        post(path)(routes.create_score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        post(path)(routes.do_rerank)
    get("/v1/responses/{response_id}")(routes.retrieve_response)
    post("/v1/responses/{response_id}/cancel")(routes.cancel_response)
    app.delete("/v1/responses/{response_id}", responses=OF_DELETE)(routes.delete_response)
    # Here no redirect: the route after the next would take it for no name.
    app.get("/v1/models/", include_in_schema=False)(routes.list_models)
    get("/v1/models")(routes.list_models)
    get("/v1/models/{name:path}")(routes.retrieve_model)
    if serving.runtime_loras:  # VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: a client names a path, and the server reads it
        post("/v1/load_lora_adapter")(routes.load_lora_adapter)
        post("/v1/unload_lora_adapter")(routes.unload_lora_adapter)
    post("/tokenize")(routes.tokenize)
    post("/detokenize")(routes.detokenize)
    app.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)(routes.health)
    app.head("/health", include_in_schema=False)(routes.health)
    get("/health")(routes.health)
    get("/version")(routes.version)
    get("/metrics")(routes.metrics)
    get("/load")(routes.load)
    if debug:  # VLLM_SERVER_DEV_MODE=1, as vLLM's own endpoints for developers
        app.get("/debug/engine", include_in_schema=False)(routes.engine_state)
        dev_routes.attach(app, serving)

    # A page in a browser may ask from anywhere: the key protects, not the origin. (vLLM lets none ask unless
    # --allowed-origins names it; here '[]' does the same.) Outside the gate, so that a page can read a 401 or 413, too.
    cors = CORSMiddleware(
        Gate(app, api_keys, frontend.max_body_bytes, frontend.root_path),
        allow_origins=frontend.allowed_origins,
        allow_methods=frontend.allowed_methods,
        allow_headers=frontend.allowed_headers,
        allow_credentials=frontend.allow_credentials,
        expose_headers=["Retry-After", "X-Request-Id"],
    )
    routes.traffic = Traffic(cors, app.router.routes, serving.frontend.enable_server_load_tracking)
    return RequestIds(routes.traffic) if serving.frontend.enable_request_id_headers else routes.traffic

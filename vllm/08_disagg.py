"""08 · Disaggregation: one machine reads the prompt, another writes the answer.

The question: a prefill is bound by arithmetic, a decode by memory. On one GPU they wait for each other. On two, the KV
cache has to travel from one to the other. What does that take, what can go wrong on the way, and when is it worth it?

The mechanism:
  1. A prefill worker and a decode worker: two processes, each a complete engine with blocks of its own.
  2. The router gives a request to both, under one name. The prefill worker computes the prompt, and one token too many.
  3. The decode worker takes blocks for the prompt and sets the request aside: it waits in no queue and in no batch.
  4. A KV connector asks the prefill worker for that name. Each layer leaves as soon as attention has written it.
  5. On the wire there are positions and heads, no blocks: sizes and tensor-parallel degrees may differ.
  6. When all layers have arrived, the decode worker computes the prompt's last token again, and goes on as ever.
  7. The prefill worker keeps its blocks until the other one has them; or cancels, or dies, or a lease is up.
  8. Whatever is lost, late, cut or doubled: it is asked for again, then computed here, or refused with a reason.
  9. A store instead of a partner: blocks under their hashes, in memory and on disk, for any engine at any time.

Numbers to remember: a prompt of 8,192 tokens of Llama-3.1-8B is 1 GiB of KV cache: 2.4 ms on NVLink, 21 ms on 400G,
859 ms on 10 GbE. Logits never travel: for them, the decode worker computes one position again.

How to run:
  uv run python vllm/08_disagg.py                       both workers, three wires, a store, a death, the simulation
  uv run python vllm/08_disagg.py --fault stall         break it: the wire falls silent after twelve messages
  uv run python vllm/08_disagg.py --fault decode-dies   break it: the other worker, in the middle of an answer
  uv run python vllm/08_disagg.py --bench               minutes: wires, streaming, steps for the cost model
  uv run python vllm/08_disagg.py proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200   # until Ctrl-C

Read for this: Zhong et al. 2024 (DistServe), Patel et al. 2024 (Splitwise), Qin et al. 2025 (Mooncake), vLLM 0.32
`distributed/kv_transfer/kv_connector/v1/`, `v1/core/sched/scheduler.py`, `config/kv_transfer.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing.connection
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine import arguments
from lab import cli
from lab import figures
from lab import recorded
from lab import timing
from engine.model import llama, loader
from engine.serving.sockets import bind
from engine.request import Request
from engine.request import SamplingParams
from engine.worker.assemble import make_runner
from engine.core.engine_core import EngineCore
from engine import registry
from engine.attention.metadata import AttentionMetadata
from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler

from engine.serving.openai.disconnects import disconnected, unless
from engine.serving.openai.gate import Gate
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.connectors import make_connector
from engine.kv_transfer.consumer import Consumer
from engine.kv_transfer.heads import HeadSlice, num_consumers, tp_sources
from engine.kv_transfer.kernels import gather_kv, scatter_kv
from engine.kv_transfer.params import check_kv_transfer_params, give_up
from engine.kv_transfer.producer import Producer
from engine.kv_transfer.store import KVStore
from engine.parallel.ranks import last_words, start_context
from lab import goodput, roofline

KEY = "08_disagg"


# --- 1. What we want, without cleverness ------------------------------------------------------------------------------


def next_token(model: llama.Llama, cache: Any, blocks: list[int], tokens: Sequence[int], num_new: int) -> int:
    """What follows `tokens`, of which the last `num_new` are computed now and the others are in the cache."""
    meta = AttentionMetadata.build([blocks], [len(tokens)], [num_new], cache.block_size, model.device)
    ids = torch.tensor(tokens[-num_new:], device=model.device)  # [T]
    return int(model.logits(model.forward(ids, meta.positions, cache.attend(meta))[-1:]).argmax())


def hand_over(model: llama.Llama, prompt: Sequence[int], max_tokens: int, block_size: int = 16) -> list[int]:
    """Two caches. One computes the prompt; then every block of every layer is copied; then the other one decodes."""
    num_blocks = -(-(len(prompt) + max_tokens) // block_size)
    caches = [registry.fill("cache.paged")(model, 1 + num_blocks, block_size) for _ in range(2)]
    here, there = list(range(1, 1 + num_blocks)), list(range(num_blocks, 0, -1))  # block 0 is nobody's
    tokens = [*prompt, next_token(model, caches[0], here, prompt, len(prompt))]
    for source, target in zip(caches[0].layers, caches[1].layers):
        target[:, there] = source[:, here]
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(model, caches[1], there, tokens, 1))
    return tokens[len(prompt) :]


def gather_reference(kv_cache: torch.Tensor, blocks: Sequence[int], first: int, count: int, head: int,
                     heads: int) -> torch.Tensor:  # fmt: skip
    """The rectangle, position by position. kv_cache [2, num_blocks, block_size, Hkv, D] -> [2, count, heads, D]."""
    size = kv_cache.shape[2]
    rows = [kv_cache[:, blocks[p // size], p % size, head : head + heads] for p in range(first, first + count)]
    return torch.stack(rows, dim=1)


def scatter_reference(buffer: torch.Tensor, kv_cache: torch.Tensor, blocks: Sequence[int], first: int,
                      head: int) -> None:  # fmt: skip
    """The inverse: write a rectangle [2, count, heads, D] into the blocks of another engine, position by position."""
    size, heads = kv_cache.shape[2], buffer.shape[2]
    for t in range(buffer.shape[1]):
        p = first + t
        kv_cache[:, blocks[p // size], p % size, head : head + heads] = buffer[:, t]


# --- 2. An engine that loads and saves --------------------------------------------------------------------------------


def make_core(
    model: llama.Llama, config: KVTransferConfig | None = None, num_blocks: int = 128, block_size: int = 16,
    max_model_len: int = 512, max_num_seqs: int = 16, max_num_batched_tokens: int = 512, prefix_caching: bool = False,
) -> EngineCore:  # fmt: skip
    """A greedy engine core with a connector, or without one: the engine's scheduler and runner."""
    limits = SchedulerConfig(max_model_len, max_num_seqs, max_num_batched_tokens)
    connector = make_connector(config) if config else None
    scheduler = make_scheduler(limits, num_blocks, block_size, prefix_caching, connector=connector)
    return EngineCore(scheduler, make_runner(model, limits, num_blocks, block_size, connector=connector))


def make_request(request_id: str, prompt: Sequence[int], max_tokens: int, **params: Any) -> Request:
    """A greedy request; `params` are its kv_transfer_params."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    sampling.extra_args = {"kv_transfer_params": params} if params else None
    return Request(request_id, list(prompt), sampling)


# --- 3. Workers: an engine in a process ------------------------------------------------------------------------------


class Faults:
    """What a bad day does to the messages of a prefill worker."""

    KINDS = ("none", "duplicate", "truncate", "drop", "reorder", "stall", "prefill-dies", "decode-dies")

    def __init__(self, kind: str, after: int = 12) -> None:
        self.kind, self.after, self.count, self.held = kind, after, 0, []

    def __call__(self, link: Any, header: dict[str, Any], payload: torch.Tensor) -> list[tuple[dict, torch.Tensor]]:
        """What is really sent. From message `after` on, each kind does its worst."""
        self.count += 1
        if self.kind == "prefill-dies" and self.count > self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "duplicate":
            return [(header, payload), (header, payload)]
        if self.kind == "stall":
            return [(header, payload)] if self.count <= self.after else []
        if self.count != self.after:
            held, self.held = self.held, []
            return [(header, payload), *held]
        if self.kind == "reorder":
            self.held = [(header, payload)]
        changed = {"drop": [], "reorder": [], "truncate": [(header, payload[: payload.nbytes // 2])]}
        return changed.get(self.kind, [(header, payload)])


def load_model(name: llama.Llama | str | int | None) -> llama.Llama:
    """A folder, a hub id, None for the default model; a number is the seed of a random one; or a model, loaded."""
    if isinstance(name, llama.Llama):
        return name
    return llama.random_model(name) if isinstance(name, int) else loader.load(name)[0]


def run_worker(pipe: Any, inherited: Sequence[Any], model: llama.Llama | str | int | None, config: dict[str, Any],
               core_args: dict[str, Any]) -> None:  # fmt: skip
    """A worker's life: letters in, tokens out. It ends with its pipe, so it cannot outlive whoever started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for end in inherited:  # a pipe is at its end when nobody holds the other one
        end.close()
    torch.set_num_threads(1)
    model, core, engine = load_model(model), None, contextlib.ExitStack()

    def configure(config: dict[str, Any], core_args: dict[str, Any], fault: str = "none") -> dict[str, Any]:
        nonlocal core
        engine.close()
        core = make_core(model, KVTransferConfig(**config), **core_args)
        engine.callback(core.scheduler.connector.close)
        if fault != "none":
            after = min(12, model.config.num_hidden_layers)  # a prompt is a message for each layer
            core.scheduler.connector.wire = Faults(fault, after)
        return getattr(core.scheduler.connector, "address", {})

    with contextlib.suppress(EOFError, OSError), engine:
        pipe.send(("configured", configure(config, core_args)))
        while True:
            while pipe.poll(0 if core.scheduler.has_unfinished_requests() else core.scheduler.patience):
                kind, *content = pipe.recv()
                if kind == "add":
                    try:
                        core.add_request(make_request(*content[:3], **content[3]))
                    except common.InputError as error:
                        pipe.send(("output", content[0], [], "error", str(error)))
                elif kind == "abort":
                    core.abort_requests(content)
                elif kind == "configure":
                    pipe.send(("configured", configure(*content)))
                elif kind == "stats":
                    pipe.send(("stats", worker_stats(core)))
                if not core.scheduler.has_unfinished_requests():
                    continue
            for output in core.step():
                pipe.send(("output", output.request_id, output.new_token_ids, output.finish_reason, output.stop_reason))


def worker_stats(core: EngineCore) -> dict[str, int]:
    """What a worker counted, and what it holds; raises AssertionError if its pool is not in order."""
    pool, connector = core.scheduler.kv_cache_manager.block_pool, core.scheduler.connector
    pool.check()
    found = Counter(connector.stats)
    for part in ("producer", "consumer", "store"):
        if hasattr(connector, part):
            found.update({f"{part}_{name}": n for name, n in getattr(connector, part).stats.items()})
    return {**found, "owned_blocks": pool.num_blocks - 1 - pool.num_free_blocks}


class Worker:
    """A worker as the router sees it: a name, a pipe, and whether it is alive."""

    def __init__(self, name: str, model: llama.Llama | str | int | None, config: dict[str, Any],
                 partners: Sequence[Worker] = (), **core_args: Any) -> None:  # fmt: skip
        self.name, self.core_args, self.alive = name, core_args, True
        fork = isinstance(model, llama.Llama)  # a fork has its parent's weights, in the same memory; and its pipes
        context = multiprocessing.get_context("fork") if fork else start_context()
        self.pipe, theirs = context.Pipe()
        inherited = [self.pipe, *(other.pipe for other in partners)] if fork else []
        arguments = (theirs, inherited, model, config, core_args)
        self.process = context.Process(target=run_worker, args=arguments, daemon=True, name=name)
        self.process.start()
        theirs.close()  # the worker's copy is the only one left: its death is an end of file
        self.address: dict[str, Any] = {}

    def send(self, *letter: Any) -> None:
        """To a dead worker, in vain."""
        with contextlib.suppress(OSError):
            self.pipe.send(letter)

    def ask(self, *letter: Any) -> Any:
        """Send and wait for the answer; tokens that nobody waited for are passed over. Raises EOFError if it dies."""
        if letter:
            self.pipe.send(letter)
        while (heard := self.pipe.recv())[0] == "output":
            pass
        return heard[1]

    def hear(self, name: str) -> tuple[list[int], str | None, str | None]:
        """The next tokens of request `name`, finish reason and error; what nobody waits for any more is passed over."""
        while (heard := self.pipe.recv())[:2] != ("output", name):
            pass
        return heard[2:]

    def configure(self, fault: str = "none", **config: Any) -> None:
        """A fresh engine around the model that is loaded already."""
        self.address = self.ask("configure", config, self.core_args, fault)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


# --- 4. The router ----------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A request as its caller sees it: one prompt, one answer, however many attempts."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    attempts: int = 0
    prefill: Worker | None = None
    decode: Worker | None = None
    start: float = 0.0
    prefilled: float = 0.0  # when the prefill worker was done, seconds after the start
    first: float = 0.0  # when the first token came

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.token_ids) == self.max_tokens

    @property
    def name(self) -> str:
        """Of this attempt. No two attempts share one, so nobody can mistake one's keys and values for another's."""
        return f"{self.request_id}.{self.attempts}"


class Router:
    """Hands each request to a prefill and a decode worker at once, and does not lose it if one of them dies.

    Tokens that have been heard stay: another attempt takes them as part of its prompt.
    """

    def __init__(self, prefill: Sequence[Worker], decode: Sequence[Worker], max_attempts: int = 3) -> None:
        self.prefill, self.decode, self.max_attempts = list(prefill), list(decode), max_attempts
        self.jobs: dict[str, Job] = {}
        self.events: list[str] = []

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        job = self.jobs[request_id] = Job(request_id, list(prompt), max_tokens, start=time.perf_counter())
        self._dispatch(job)

    def _dispatch(self, job: Job) -> None:
        """Another attempt: both workers at once, so that the decode worker has asked before the first layer is done."""
        job.attempts += 1
        if job.attempts > self.max_attempts:
            job.error = f"given up after {self.max_attempts} attempts"
            return
        self.jobs[job.name] = job
        load = lambda worker: sum(worker in (j.prefill, j.decode) and not j.done for j in self.jobs.values())  # noqa: E731
        job.prefill = min(filter(lambda w: w.alive, self.prefill), key=load, default=None)
        # An engine is an engine: if no decode worker is left, a prefill worker goes on to the end.
        job.decode = min(filter(lambda w: w.alive, self.decode), key=load, default=job.prefill)
        if job.decode is None:
            job.error = "no worker is left"
            return
        prompt, left, params = job.prompt + job.token_ids, job.max_tokens - len(job.token_ids), {}
        if job.prefill not in (None, job.decode):
            job.prefill.send("add", job.name, prompt, 1, {"do_remote_decode": True, "transfer_id": job.name})
            params = {"do_remote_prefill": True, "transfer_id": job.name, **job.prefill.address}
        job.decode.send("add", job.name, prompt, left, params)

    def run(self, timeout: float = 600.0, on_token: Callable[[Job], None] = lambda job: None) -> dict[str, Job]:
        """Until every job has its answer, or an error. Raises CheckFailed after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not all(job.done for job in self.jobs.values()):
            alive = {worker.pipe: worker for worker in (*self.prefill, *self.decode) if worker.alive}
            ready = multiprocessing.connection.wait(list(alive), max(0, deadline - time.monotonic()))
            if not ready:
                raise common.CheckFailed(f"no worker has said anything for {timeout:g} s")
            for pipe in ready:
                try:
                    self._hear(alive[pipe], *pipe.recv()[1:], on_token=on_token)
                except (EOFError, OSError):
                    self._bury(alive[pipe])
        return {name: job for name, job in self.jobs.items() if name == job.request_id}

    def _hear(self, worker: Worker, name: str, token_ids: list[int], finish_reason: str | None, why: str | None,
              on_token: Callable[[Job], None]) -> None:  # fmt: skip
        job, now = self.jobs.get(name), time.perf_counter()
        if job is None or name != job.name or job.done:
            return  # of an attempt that has been given up, or of a router that had this worker before
        if worker is job.prefill is not job.decode:
            job.prefilled = now - job.start  # its token is the decode worker's first as well: not needed
            return
        if finish_reason == "error":
            self.events.append(f"{name}: {why}")
            return self._dispatch(job)
        job.first = job.first or now - job.start
        job.token_ids += token_ids
        on_token(job)

    def _bury(self, worker: Worker) -> None:
        """A worker died. What it was decoding begins elsewhere; what it was prefilling, the decode worker will miss."""
        worker.alive = False
        self.events.append(f"{worker.name} died ({last_words(worker.process)})")
        for job in {id(job): job for job in self.jobs.values()}.values():
            if job.decode is worker and not job.done:
                if job.prefill not in (None, worker):
                    job.prefill.send("abort", job.name)
                self._dispatch(job)


# --- 5. The proxy: the same over HTTP ---------------------------------------------------------------------------------


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
    """In front of two of lesson 06's servers. First the prefill server, for one token that nobody reads; it answers
    with kv_transfer_params, which the decode server gets together with the request. As vLLM's proxies do."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], client: Any) -> None:
        self.prefill, self.decode, self.client, self.turn = list(prefill), list(decode), client, 0

    def request(self, url: str, body: dict[str, Any], headers: dict[str, Any]) -> Any:
        """An httpx request that has not been sent yet."""
        headers = {**headers, "content-type": "application/json"}
        return self.client.build_request("POST", url, content=json.dumps(body, allow_nan=False), headers=headers)

    async def prefilled(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[dict | None, Any]:
        """(kv_transfer_params, None); or (None, an answer that is the client's fault); or neither: nobody can."""
        import httpx

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
        import httpx

        self.turn += 1
        failure: Exception | None = None
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


PATIENCE = 5.0  # seconds for a server to say how it is


class Closing:
    """ASGI middleware: what a request has opened behind us is closed when it is over, whether its answer was read to
    the end, broke, or never began."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with contextlib.AsyncExitStack() as opened:
            await self.app({**scope, "opened": opened}, receive, send)


def build_proxy(prefill: Sequence[str], decode: Sequence[str], client: Any = None) -> Any:
    """A FastAPI app; `client` is an httpx.AsyncClient."""
    global HTTPRequest, Response  # FastAPI looks annotations up among a module's names
    import fastapi
    import httpx
    from fastapi import Request as HTTPRequest
    from fastapi.responses import JSONResponse, Response, StreamingResponse

    patience, limits = httpx.Timeout(600, connect=5), httpx.Limits(max_connections=None)
    client = client or httpx.AsyncClient(timeout=patience, limits=limits)
    proxy, app = Proxy(prefill, decode, client), fastapi.FastAPI(docs_url=None, redoc_url=None)

    def error(status: int, message: str) -> Response:
        kind = "BadRequestError" if status == 400 else "ServiceUnavailableError"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)

    def key_of(request: HTTPRequest) -> dict[str, bytes]:
        key = request.headers.get("authorization")  # theirs to check
        return {"authorization": key.encode("latin-1")} if key else {}

    async def body_of(answer: Any) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        except httpx.HTTPError as failure:  # the status line is long gone: the stream itself has to say it
            message = f"the decode server is gone: {failure or type(failure).__name__}"
            yield f"data: {json.dumps({'error': {'message': message, 'code': 502}})}\n\n".encode()

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: HTTPRequest) -> Response:
        try:
            body = read_request(await request.body())
        except common.InputError as problem:
            return error(400, str(problem))
        gone = asyncio.ensure_future(disconnected(request))
        undo = lambda answer: asyncio.ensure_future(answer.aclose())  # noqa: E731
        try:
            answer = await unless(gone, proxy.handle(request.url.path, body, key_of(request)), undo)
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

    async def ask(url: str, request: HTTPRequest) -> Any:
        """The same small question to one server; None if it does not answer within seconds."""
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(PATIENCE):
                return await client.get(url + request.url.path, headers=key_of(request))

    @app.get("/v1/models")
    async def models(request: HTTPRequest) -> Response:
        for url in proxy.decode:
            if (answer := await ask(url, request)) is not None:
                return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        return error(503, f"no decode server answers: {', '.join(proxy.decode)}")

    @app.get("/health")
    async def health(request: HTTPRequest) -> Response:
        """200 while a decode server is well, which can do without the others; says in any case who is not."""
        urls = [*proxy.decode, *proxy.prefill]
        answers = await asyncio.gather(*(ask(url, request) for url in urls))
        gone = [url for url, answer in zip(urls, answers) if answer is None or answer.status_code != 200]
        if set(proxy.decode) <= set(gone):
            return error(503, f"no decode server is well; gone or ill: {', '.join(gone)}")
        return JSONResponse({"gone": gone})

    return Gate(Closing(app), ())  # without keys of our own: bodies are bounded as they are behind us


def proxy_command(args: argparse.Namespace) -> None:
    """Forward OpenAI requests to prefill and decode servers until SIGINT or SIGTERM."""
    import uvicorn

    app = build_proxy(args.prefill, args.decode)
    sock = bind(args.host, args.port)
    print(f"Listening on http://{args.host}:{sock.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[sock])


# --- 6. A rehearsal: the two state machines on a wire in memory -------------------------------------------------------


class MemoryLink:
    """One end of a connection that is two lists. What is sent here arrives at `other`."""

    has_room, lost = True, None

    def __init__(self) -> None:
        self.other, self.arrived = self, deque()

    def send(self, header: dict[str, Any], payload: Any = None) -> None:
        self.other.arrived.append((header, payload))


def rehearse(fault: str, num_layers: int = 30, num_tokens: int = 100, steps: int = 2) -> dict[str, Any]:
    """One prompt in `steps` chunks to one decode worker, on a clock of our own: what each kind of fault costs.

    Returns counts, the fake seconds it took, and why it failed, if it did.
    """
    now, died, memory, wire = 0.0, False, {}, Faults("none" if fault == "prefill-dies" else fault)
    ours, theirs = MemoryLink(), MemoryLink()  # the producer's end, the consumer's
    ours.other, theirs.other = theirs, ours

    def write(blocks: list[int], header: dict[str, Any], payload: torch.Tensor) -> bool:
        if payload.nbytes == 2:
            memory.update({(header["layer"], header["first"] + t): True for t in range(header["count"])})
        return payload.nbytes == 2

    producer = Producer(num_layers, lambda *_: torch.zeros(2, dtype=torch.uint8), clock=lambda: now)
    consumer = Consumer(num_layers, write, timeout=10, retries=1, clock=lambda: now)
    consumer.start("x", "r", [], 0, num_tokens, [(theirs, HeadSlice(0, 0, 3), 1)])

    def put(link: MemoryLink, header: dict[str, Any], payload: torch.Tensor) -> None:
        for each in wire(link, header, payload):
            link.send(*each)

    def exchange() -> None:
        """Everything on the wire arrives, and what that leads to as well."""
        nonlocal died
        while (ours.arrived or theirs.arrived) and not died:
            if ours.arrived:
                producer.on_message(ours, ours.arrived.popleft()[0])
                producer.pump(put)
            if theirs.arrived:
                header, payload = theirs.arrived.popleft()
                consumer.on_message(theirs, header, payload)
            if fault == "prefill-dies" and producer.stats["messages"] > wire.after:
                died = True
                consumer.on_lost(theirs, "the connection was closed in the middle of a message")

    exchange()
    for step in range(1, steps + 1):
        producer.export("x", [])
        for layer in range(num_layers if not died else 0):
            producer.written("x", layer, num_tokens * step // steps)
            producer.pump(put)
            exchange()
    kept = not died and producer.finish("x")
    while not (consumer.finished or consumer.failed):
        now += 1
        consumer.check()
        exchange()
    exchange()
    return {
        **{name: consumer.stats[name] for name in ("duplicate", "corrupt", "gap", "retries")}, "seconds": now,
        "messages": producer.stats["messages"], "arrived": consumer.stats["messages"], "left": len(producer.exports),
        "why": consumer.failed.get("r", ""), "whole": len(memory) == num_layers * num_tokens, "kept": kept,
    }  # fmt: skip


# --- 7. The simulation behind the widget: when is it worth it? --------------------------------------------------------

simulate, describe = goodput.simulate, goodput.describe
WIDGET_DEFAULT, WIDGET_CHOICES = goodput.WIDGET_DEFAULT, goodput.WIDGET_CHOICES


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

PROMPT = 8192


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers; those of the simulation are under `simulation`."""
    small = roofline.KVCacheSpec.from_config(roofline.MODELS["SmolLM2-135M"])
    sharing = {}
    for key, (Hkv, producer, consumer) in {
        "8_to_2": (8, 8, 2), "2_to_8": (8, 2, 8), "16_to_2": (8, 16, 2), "1_to_3": (3, 1, 3)
    }.items():  # fmt: skip
        sources = [tp_sources(Hkv, producer, consumer, rank) for rank in range(consumer)]
        readers = [num_consumers(Hkv, producer, consumer, rank) for rank in range(producer)]
        sharing[key] = {"sources": len(sources[0]), "heads": sources[0][0].heads, "readers": max(readers),
                        "unread": readers.count(0)}  # fmt: skip
    rehearsals = {kind.replace("-", "_"): rehearse(kind) for kind in Faults.KINDS if kind != "decode-dies"}
    return {
        "kv_bytes": {"smollm2_fp32": small.bytes_per_token("float32"), "llama_31_8b": goodput.KV_BYTES},
        "prompt": PROMPT, "prompt_bytes": PROMPT * goodput.KV_BYTES,
        "sharing": sharing, "faults": rehearsals,
        "story": {"positions": sum(LENGTHS), "blocks": LENGTHS[0] // 16},
        "simulation": goodput.facts(),
    }  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """This lesson's figure, and those of the simulation."""
    return [_draw_handover(folder), *goodput.draw(folder)]


def _draw_handover(folder: str | Path) -> Path:
    """Who does what when: one request, six layers of it."""
    figure, ax = figures.new_figure(8.0, 4.1)
    C, layers, width = figures.COLORS, 6, 1.0
    lanes = {"router": 5.0, "prefill worker": 4.0, "wire": 2.55, "decode worker": 1.1}

    def box(x: float, y: float, w: float, text: str, color: str, height: float = 0.56) -> None:
        ax.broken_barh([(x, w)], (y - height / 2, height), facecolor=color, edgecolor="white", linewidth=1.2)
        ax.text(x + w / 2, y, text, ha="center", va="center", color="white", fontsize=8.5)

    def arrow(x: float, y: float, to_x: float, to_y: float, color: str) -> None:
        ax.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.2})

    def note(x: float, y: float, text: str, **style: Any) -> None:
        ax.text(x, y, text, fontsize=8.5, color=style.pop("color", C["ink"]), va="center", **style)

    P, W, D = lanes["prefill worker"], lanes["wire"], lanes["decode worker"]
    start = 1.5
    arrow(0.2, lanes["router"] - 0.1, start - 0.1, P + 0.2, C["grey"])
    arrow(0.2, lanes["router"] - 0.1, 0.75, D + 0.35, C["grey"])
    note(0.45, lanes["router"] + 0.05, "the same request to both: do_remote_decode, do_remote_prefill")
    for i in range(layers):
        x = start + i * width
        box(x, P, width, f"layer {i}", C["blue"])
        box(x + width, W, width * 0.72, f"KV {i}", C["orange"], 0.42)
        arrow(x + width, P - 0.3, x + width + 0.05, W + 0.24, C["blue"])
        arrow(x + width * 1.72, W - 0.24, x + width * 1.75, D + 0.34, C["orange"])
    end = start + layers * width
    box(end, P, 0.55, "logits", C["blue"])
    box(end + 0.55, P, 1.75, "blocks kept", C["grey"])
    arrow(1.0, D + 0.3, 1.35, P - 0.32, C["green"])
    note(1.28, (P + D) / 2, "GET", color=C["green"])
    box(0.75, D, end + 0.1, "WAITING_FOR_REMOTE_KVS: has blocks, costs no step anything; others decode", C["grey"])
    for i in range(3):
        box(end + 0.85 + 0.75 * i, D, 0.75, "token", C["green"])
    arrow(end + 0.95, D + 0.3, end + 2.25, P - 0.3, C["green"])
    note(end + 1.72, W, "DONE", color=C["green"])
    note(end + 2.4, P, "freed")
    note(start + 0.1, P + 0.5, "save_kv_layer after each layer's attention", color=C["blue"])
    note(0.75, D - 0.52, "get_num_new_matched_tokens → update_state_after_alloc → start_load_kv", color=C["grey"])
    note(end + 0.85, D - 0.52, "get_finished", color=C["green"])
    ax.set(yticks=list(lanes.values()), yticklabels=list(lanes), xticks=[], xlim=(0, end + 3.2), ylim=(0.3, 5.5),
           xlabel="time")  # fmt: skip
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return figures.save_figure(figure, folder, "08_handover")


# --- The story --------------------------------------------------------------------------------------------------------

TEXT = """The harbour was quiet that morning. Two ships lay at the quay, one of them loaded with grain, the other empty
but for a cat that slept on a coil of rope. The harbour master counted the crates, wrote a number into his book, crossed
it out, and counted again. He had done this for thirty years, and he had never once come to the same result twice. The
captain of the second ship came down the gangway with a letter in her hand. She asked him"""
LENGTHS, TOKENS = (90, 61, 34), 12
WIRES = {"shared memory": "SharedMemoryConnector", "TCP": "TCPConnector",
         "torch.distributed": "TorchDistributedConnector"}  # fmt: skip
PREFILL = {"kv_role": "kv_producer", "kv_port": 0}
DECODE = {"kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}


def start_workers(model: llama.Llama, name: str | None, stack: contextlib.ExitStack) -> tuple[Worker, Worker]:
    """A prefill and a decode worker with blocks of different sizes, for as long as the stack. They are forks with
    `model`; but CUDA does not survive a fork, so on a GPU they load `name` themselves."""
    loaded = model if sys.platform == "linux" and not common.HAS_GPU else name
    first = {"kv_connector": "TCPConnector"}
    prefill = Worker("prefill worker", loaded, PREFILL | first, block_size=16, num_blocks=33)
    stack.callback(prefill.stop)
    decode = Worker("decode worker", loaded, DECODE | first, [prefill], block_size=32, num_blocks=17)
    stack.callback(decode.stop)
    return prefill, decode


def settled(worker: Worker, seconds: float = 10.0) -> dict[str, int]:
    """A worker's counts, once it holds no block any more. Raises CheckFailed if it keeps some."""
    deadline = time.monotonic() + seconds
    while (stats := worker.ask("stats"))["owned_blocks"]:
        if time.monotonic() > deadline:
            raise common.CheckFailed(f"{worker.name}: {stats['owned_blocks']} blocks are still owned")
        time.sleep(0.01)
    return stats


def colocated(model: llama.Llama, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """What one engine answers, without a connector."""
    core = make_core(model)
    for i, prompt in enumerate(prompts):
        core.add_request(make_request(str(i), prompt, max_tokens))
    found: list[list[int]] = [[] for _ in prompts]
    while core.scheduler.has_unfinished_requests():
        for output in core.step():
            found[int(output.request_id)] += output.new_token_ids
    return found


def disaggregated(prefill: Worker, decode: Worker, prompts: Sequence[Sequence[int]], max_tokens: int,
                  on_token: Callable[[Job], None] = lambda job: None, name: str = "r",
                  ) -> tuple[list[Job], list[str]]:  # fmt: skip
    """The same from two workers: the jobs, and what the router noticed. Every `name` is used once with an engine."""
    router = Router([prefill], [decode])
    for i, prompt in enumerate(prompts):
        router.submit(f"{name}{i}", prompt, max_tokens)
    return list(router.run(on_token=on_token).values()), router.events


def answer(worker: Worker, name: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """From one worker alone."""
    worker.send("add", name, list(prompt), max_tokens, {})
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        new, finish_reason, why = worker.hear(name)
        if finish_reason == "error":
            raise common.CheckFailed(f"{worker.name}: {why}")
        tokens += new
    return tokens


def check_layouts(model: llama.Llama) -> None:
    """Blocks of 16 to blocks of 32, whole and one head at a time, against the reference; with the kernel if it runs."""
    Hkv, D = model.config.num_key_value_heads, model.config.head_dim
    source = torch.randn(2, 8, 16, Hkv, D, device=model.device)
    targets = [torch.zeros(2, 5, 32, Hkv, D, device=model.device) for _ in range(2)]
    theirs, ours = torch.tensor([5, 2, 7, 1], device=model.device), torch.tensor([4, 1], device=model.device)
    kernel = common.use_kernels() if common.HAS_TRITON else contextlib.nullcontext()
    with kernel:
        for head in range(Hkv):
            piece = gather_kv(source, theirs, 3, 45, head, 1)
            scatter_kv(piece, targets[0], ours, 3, head)
    whole = gather_reference(source, theirs.tolist(), 3, 45, 0, Hkv)
    scatter_reference(whole, targets[1], ours.tolist(), 3, 0)
    common.check_equal(f"{Hkv} rank{'s' * (Hkv > 1)} with blocks of 16 to one with blocks of 32: every bit is in its "
                       "place", torch.equal(*targets), True)  # fmt: skip
    if not common.HAS_TRITON:
        common.skipped("move_kv_kernel", f"{common.kernel_mode()}; the torch path did it")


def bench_wires(prefill: Worker, decode: Worker, prompts: dict[int, list[int]]) -> dict[str, Any]:
    """Each wire with prompts of some lengths: asked for when the prefill is over, and asked for before it."""
    bench, rows = {}, []
    for wire, name in WIRES.items():
        prefill.configure(**PREFILL, kv_connector=name)
        decode.configure(**DECODE, kv_connector=name)
        bench[name] = {}
        for n, prompt in prompts.items():
            late, exposed = [], []
            for i in range(6):
                key, before = f"{n}.{i}", settled(decode)
                job = {"do_remote_decode": True, "transfer_id": key}
                prefill.send("add", key, prompt, 1, job)
                prefill.hear(key)
                decode.send("add", key, prompt, 1, {"do_remote_prefill": True, "transfer_id": key, **prefill.address})
                decode.hear(key)
                after = settled(decode)
                moved = after["bytes_in"] - before.get("bytes_in", 0)
                late.append((after["consumer_microseconds"] - before.get("consumer_microseconds", 0)) / 1e3)
                (done,), _ = disaggregated(prefill, decode, [prompt], 1, name=f"{key}-")
                # A decode worker can be heard first: then nothing was left to wait for.
                exposed.append((done.first - (done.prefilled or done.first)) * 1e3)
            found = bench[name][str(n)] = {
                "bytes": moved, "after_ms": statistics.median(late[1:]), "exposed_ms": statistics.median(exposed[1:]),
            }  # fmt: skip
            found["mb_s"] = moved / found["after_ms"] / 1e3
            rows.append([wire, n, f"{moved / 1e6:.1f}", f"{found['after_ms']:.1f}", f"{found['mb_s']:.0f}",
                         f"{found['exposed_ms']:.1f}"])  # fmt: skip
    head = ["wire", "tokens", "MB", "ms, asked for afterwards", "MB/s", "ms from prefill to token, streamed"]
    common.table(head, rows)
    return bench


def bench_kernel(dtype: torch.dtype) -> dict[str, Any]:
    """The copy between blocks and wire at an 8B model's shapes, beside a plain copy of as many bytes."""
    kv_cache_layer = torch.randn(2, 1024, 16, 8, 128, device=common.device()).to(dtype)
    blocks = torch.randperm(1023, device=common.device())[:512] + 1
    buffer = gather_kv(kv_cache_layer, blocks, 0, PROMPT, 0, 8)
    plain = torch.empty_like(buffer)
    seconds = {
        "gather": timing.measure_graph(lambda: gather_kv(kv_cache_layer, blocks, 0, PROMPT, 0, 8)).median,
        "scatter": timing.measure_graph(lambda: scatter_kv(buffer, kv_cache_layer, blocks, 0, 0)).median,
        "copy": timing.measure_graph(lambda: plain.copy_(buffer)).median,
    }
    found = {name: 2 * buffer.nbytes / t / 1e9 for name, t in seconds.items()}
    common.table(["one layer, 8,192 tokens", "GB/s read and written"], [[n, f"{x:.1f}"] for n, x in found.items()])
    return found


def show_simulation() -> None:
    """The widget's sixteen requests, run now; and what the searches found, who is best at which limit."""
    rows = []
    for layout in WIDGET_CHOICES["layout"]:
        trace = simulate(WIDGET_DEFAULT | {"layout": layout})
        for r in trace["requests"]:
            if sum(r["parts"]) != r["first"] - r["arrival"]:
                raise common.CheckFailed(f"{layout}: the parts of a TTFT do not add up")
        gap, ttft = (max(f(r) for r in trace["requests"]) for f in (lambda r: r["gap"], lambda r: sum(r["parts"])))
        rows.append([layout, f"{trace['met']} of {len(trace['requests'])}", f"{gap / 1e3:.0f} ms",
                     f"{ttft / 1e3:.0f} ms", f"{trace['bytes_moved'] / 2**20:,.0f} MiB"])  # fmt: skip
    common.say(describe(simulate(WIDGET_DEFAULT)))
    common.table(["4 GPUs, 16 requests", "within the limits", "longest silence", "worst TTFT", "moved"], rows)
    common.say("✓ queue + prefill + transfer + first step = TTFT, for every request")
    found = facts()["simulation"]["goodput"]["azure_code"]
    rows = []
    for limit in ("8", "10", "12", "20", "50"):
        row = found[f"tpot_{limit}"]
        rows.append([f"{limit} ms", f"{row['whole']:.0f}", f"{row['chunked']:.0f} ({row['budget']})",
                     f"{row['split']:.0f} ({row['layout']})", f"{row['split_over_chunked']:.2f}x"])  # fmt: skip
    common.table(["8 GPUs, code; TPOT", "whole prompts", "chunks (budget)", "split", "split / chunks"], rows,
                 title="requests/s of which 9 in 10 meet TTFT 300 ms and the TPOT")  # fmt: skip


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument("--fault", choices=Faults.KINDS, default="prefill-dies",
                   help="what happens in step 4, from the twelfth message on; if the model has fewer layers, "
                        "from as many messages on (default %(default)s)")  # fmt: skip
    p.set_defaults(run=None)
    commands = p.add_subparsers(title="commands", metavar="proxy")
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
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.run is not None:
        return args.run(args)
    machine = cli.start(args)
    with contextlib.ExitStack() as workers:
        bench = story(args, workers)
    if args.figure:
        draw(args.figure)
    if args.json:
        recorded.merge_json(args.json, KEY, {"machine": machine, "facts": facts(), "bench": bench})


def story(args: argparse.Namespace, workers: contextlib.ExitStack) -> dict[str, Any]:
    """What a reader sees."""
    bench: dict[str, Any] = {}
    loader.check_context(args.model, 512)  # `make_core`'s max_model_len
    common.heading("1. Naively: compute in one cache, copy every block, go on in the other")
    model, tokenizer = loader.load(args.model, torch.float32)
    text = tokenizer.encode(TEXT)
    prompts = [text[-n:] for n in LENGTHS]
    expected = colocated(model, prompts, TOKENS)
    common.say(f"…{tokenizer.decode(prompts[2])!r} → {tokenizer.decode(expected[2])!r}"[:108])
    common.check_equal("a copied cache continues as one engine does", hand_over(model, prompts[2], TOKENS), expected[2])
    check_layouts(model)

    common.heading(f"2. Two processes, blocks of 16 and of 32, prompts of {', '.join(map(str, LENGTHS))} tokens")
    prefill, decode = start_workers(model, args.model, workers)
    prefill.ask(), decode.ask()
    rows = []
    for wire, name in WIRES.items():
        prefill.configure(**PREFILL, kv_connector=name)
        decode.configure(**DECODE, kv_connector=name)
        jobs, _ = disaggregated(prefill, decode, prompts, TOKENS)
        if [job.token_ids for job in jobs] != expected:
            raise common.CheckFailed(f"{wire}: other tokens than one engine's")
        there, here = settled(prefill), settled(decode)
        last = max(jobs, key=lambda job: job.prefilled)
        rows.append([wire, f"{here['bytes_in'] / 1e6:.1f}", there["producer_messages"],
                     f"{there['producer_early'] / there['producer_messages']:.0%}", f"{last.prefilled * 1e3:.0f}",
                     f"{last.first * 1e3:.0f}"])  # fmt: skip
    common.table(["wire", "MB", "messages", "sent during prefill", "prefill done, ms", "first token, ms"], rows)
    common.say(f"✓ over each wire: the tokens of one engine, {len(prompts)} × {TOKENS}; all blocks free on both sides")
    spec = roofline.KVCacheSpec(model.config.num_hidden_layers, model.num_kv_heads, *[model.config.head_dim] * 2)
    each = spec.bytes_per_token("float32")
    common.check_equal(f"{sum(LENGTHS)} positions × {each:,} bytes have moved, no more",
                       here["bytes_in"], sum(LENGTHS) * each)  # fmt: skip

    common.heading("3. No partner: a store that any engine finds blocks in")
    with tempfile.TemporaryDirectory() as folder:
        extra = {"folder": folder, "cpu_bytes": 7 * 16 * each // 2, "disk_bytes": 1 << 30}
        for worker in (prefill, decode):
            worker.core_args = {"block_size": 16, "num_blocks": 33}  # its key is the hash of 16 tokens
            worker.configure(kv_connector="StoreConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        answer(prefill, "first", prompts[0], 1)
        common.check_equal(
            "the other engine's answer is the same", answer(decode, "again", prompts[0], TOKENS), expected[0]
        )
        there, here = settled(prefill), settled(decode)
        blocks = here["bytes_in"] // (16 * each)
        common.say(f"{there['store_stored']} blocks stored, memory has room for 3: {there['store_demoted']} on disk; "
                   f"{blocks} found, so {16 * blocks} of {len(prompts[0])} tokens were not computed")  # fmt: skip
        KVStore(folder, 0).clear()

    common.heading(f"4. A bad day: --fault {args.fault}")
    prefill.configure(args.fault, **PREFILL, kv_connector="TCPConnector")
    decode.configure(**DECODE, kv_connector="TCPConnector", kv_connector_extra_config={"timeout": 1.0, "retries": 1})

    def kill(job: Job) -> None:
        if args.fault == "decode-dies" and len(job.token_ids) == 3 and decode.alive:
            decode.process.kill()

    jobs, events = disaggregated(prefill, decode, prompts, TOKENS, kill)
    common.check_equal(f"{len(jobs)} answers, the tokens of one engine", [job.token_ids for job in jobs], expected)
    for event in events:
        common.say(event)
    for worker in (prefill, decode):
        if worker.process.is_alive():
            stats = settled(worker)
            counts = {name.split("_")[-1]: stats.get(name, 0) for name in (
                "consumer_retries", "consumer_duplicate", "consumer_corrupt", "consumer_failed")}  # fmt: skip
            told = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
            common.say(f"✓ {worker.name}: every block is free" + (f"; messages and transfers: {told}" if told else ""))

    common.heading("5. When is it worth it? The same GPUs, three ways, in the engine's scheduler on a clock")
    show_simulation()

    if args.bench:
        common.heading("6. Measured: wires, kernel, steps")
        if args.fault in ("prefill-dies", "decode-dies"):
            workers.close()
            prefill, decode = start_workers(model, args.model, workers)
            prefill.ask(), decode.ask()
        lengths = {n: (text * 8)[:n] for n in (64, 256, 480)}
        bench["wires"] = bench_wires(prefill, decode, lengths)
        bench["kernel"] = bench_kernel(torch.bfloat16 if common.HAS_GPU else torch.float32)
        workers.close()
        bench["cost_model"] = goodput.calibrate(model)
    return bench


if __name__ == "__main__":
    cli.run(main)

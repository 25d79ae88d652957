"""06 · Serving: the life of one request, from HTTP to tokens and back.

The question: somebody posts a prompt and reads the answer word by word. What stands between that connection and the
engine of the earlier lessons, and what must it refuse, forget or survive so that the next request works, too?

The mechanism:
  1. The engine computes steps in a thread of its own, and never waits for a reader. Connections live on one event loop,
     which never waits for a step. Letters go between the two: "add" and "abort" in, the new text of each step out.
  2. New text waits in the request's mailbox, which holds one text that grows: a slow reader finds more of it at once.
  3. Text goes out as server-sent events: `data: {…}` and an empty line, and `data: [DONE]` at the end.
  4. A client that hangs up closes the generator that writes its events, and closing it aborts the request.
  5. A request that finds all places taken gets a 503 with Retry-After: it may succeed elsewhere, or later.
  6. Every field that a client sends is checked before it costs anything; one client's mistake harms no other client.

Numbers to remember: at 95 % load a request waits three times as long as at 80 %. At 105 % the queue never stops
growing, and only a bound keeps it short.

How to run:
  uv run python vllm/06_serving.py                            start this server, load it, hang up on it: the whole story
  uv run python vllm/06_serving.py --no-abort                 break it: nobody tells the engine that the client left
  uv run python vllm/06_serving.py --max-num-queued-reqs 2    nearly everybody is turned away
  uv run python vllm/06_serving.py serve --port 8000          the engine's own server, for any OpenAI client
  uv run python vllm/06_serving.py --bench                    minutes: latency and throughput of that one, against load

Read for this: vLLM 0.32 `v1/engine/async_llm.py`, `v1/engine/output_processor.py`, `entrypoints/openai/`; OpenAI's API
reference; the HTML standard's chapter on server-sent events; Little 1961.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import torch

from engine import arguments
from engine.front_end import RequestOutput
from engine.llm_engine import LLMEngine
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.request import SamplingParams
from engine.serving.cli import add_serve_command
from lab import cli

KEY = "06_serving"


# --- What a client should read: one request alone, nothing kept -------------------------------------------------------


def answer_alone(model: llama.Llama, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> str:
    """The reference. Greedy; the whole text goes through the model for every token."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # [T, heads, D]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, T, D]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1)

    tokens = tokenizer.encode(prompt)
    start = len(tokens)
    for _ in range(max_tokens):
        ids = torch.tensor(tokens, device=model.device)  # [T]
        hidden = model.forward(ids, torch.arange(len(tokens), device=model.device), attend)  # [T, hidden]
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokenizer.decode(tokens[start:])


# --- A mailbox for each request ---------------------------------------------------------------------------------------


class Mailbox:
    """The part of one answer that its client has not read yet (vLLM: `RequestOutputCollector`).

    It holds one text, which grows, and no queue of pieces. So filling it never has to wait for the reader, and a reader
    that has stalled costs as much memory as its text, however many steps go by.
    """

    def __init__(self) -> None:
        self.text, self.finish_reason = "", None
        self.error: Exception | None = None
        self.ready = asyncio.Event()

    def put(self, text: str = "", finish_reason: str | None = None, error: Exception | None = None) -> None:
        """Never waits."""
        self.text += text
        self.finish_reason, self.error = finish_reason, error
        self.ready.set()

    async def get(self) -> tuple[str, str | None]:
        """(all text since the last call, why the answer ends: None if it goes on). Raises an error that was put."""
        await self.ready.wait()
        self.ready.clear()
        if self.error:
            raise self.error
        text, self.text = self.text, ""
        return text, self.finish_reason


# --- The engine in a thread, its callers on an event loop -------------------------------------------------------------


class ServerFull(Exception):
    """All places are taken: come again later."""


class AsyncEngine:
    """`generate` for many callers at once (vLLM: `AsyncLLM`, whose engine is in another process).

    Letters go in through a queue: ("add", id, prompt, params), ("abort", id) and ("stop",). The outputs of each step
    come out as one call on the event loop. Neither side ever waits for the other.
    """

    def __init__(self, engine: LLMEngine, max_num_queued_reqs: int, aborts: bool = True) -> None:
        """To be made on the event loop. `aborts=False` is a bug: an answer whose client left is computed to the end."""
        self.engine, self.max_num_queued_reqs, self.aborts = engine, max_num_queued_reqs, aborts
        self.loop = asyncio.get_running_loop()
        self.inbox: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.mailboxes: dict[str, Mailbox] = {}
        self.ids = map(str, itertools.count())
        self.dead: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    # On the event loop:

    async def generate(self, prompt: str, params: SamplingParams) -> AsyncGenerator[tuple[str, str | None], None]:
        """Pieces of text as they come, each with why the answer ends there (None: it goes on).

        Leaving it early aborts the request. Raises ServerFull, InputError, or whatever killed the engine.
        """
        if self.dead:
            raise self.dead
        if len(self.mailboxes) >= self.max_num_queued_reqs:
            raise ServerFull(f"{len(self.mailboxes)} requests are inside")
        request_id = next(self.ids)
        mailbox = self.mailboxes[request_id] = Mailbox()
        self.inbox.put(("add", request_id, prompt, params))
        finish_reason = None
        try:
            while finish_reason is None:
                text, finish_reason = await mailbox.get()
                yield text, finish_reason
        finally:  # at the end of the answer, or in its middle, when the client has gone
            del self.mailboxes[request_id]
            if finish_reason is None and self.aborts:
                self.inbox.put(("abort", request_id))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Put what a step has brought into the mailboxes. A request whose client has gone has none any more."""
        for output in outputs:
            if mailbox := self.mailboxes.get(output.request_id):
                (answer,) = output.outputs
                mailbox.put(answer.text, answer.finish_reason)

    def _refuse(self, request_id: str, error: Exception) -> None:
        if mailbox := self.mailboxes.get(request_id):
            mailbox.put(error=error)

    def _die(self, error: Exception) -> None:
        """Every client that waits gets the error now, and every later one when it comes."""
        self.dead = error
        for mailbox in self.mailboxes.values():
            mailbox.put(error=error)

    async def stop(self) -> None:
        """Let nobody in any more, answer those inside, and end the thread."""
        self.max_num_queued_reqs = 0
        while self.mailboxes:
            await asyncio.sleep(0.01)
        await self.close()

    async def close(self) -> None:
        """End the thread after the step that it computes, whatever is left to do."""
        self.inbox.put(("stop",))
        await asyncio.to_thread(self.thread.join)

    # On the engine's thread:

    def _run(self) -> None:
        try:
            while self._read_letters():
                outputs = self.engine.step()
                self.loop.call_soon_threadsafe(self._deliver, outputs)
        except Exception as error:
            self.loop.call_soon_threadsafe(self._die, error)

    def _read_letters(self) -> bool:
        """Read all letters that are there; if there is nothing to compute, wait for one. False: stop."""
        while not self.inbox.empty() or not self.engine.has_unfinished_requests():
            match self.inbox.get():
                case ("add", request_id, prompt, params):
                    try:
                        self.engine.add_request(request_id, prompt, params, stream=True)
                    except common.InputError as error:  # such as a prompt that is too long: only its sender hears of it
                        self.loop.call_soon_threadsafe(self._refuse, request_id, error)
                case ("abort", request_id):
                    self.engine.abort_request([request_id])  # its blocks are free before the next step
                case ("stop",):
                    return False
        return True


# --- HTTP -------------------------------------------------------------------------------------------------------------

MAX_BODY_BYTES = 1 << 20
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")


def read_body(body: bytes) -> tuple[str, SamplingParams, bool]:
    """(prompt, how to sample, whether to stream). Every field is checked before the request costs anything.

    Raises InputError that names the field.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise common.InputError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise common.InputError("the body must be a JSON object")
    prompt, stream = fields.pop("prompt", None), fields.pop("stream", False)
    fields.pop("model", None)  # clients must name one; this server has only one
    if not isinstance(prompt, str) or not prompt:
        raise common.InputError("prompt: must be a text")
    if not isinstance(stream, bool):
        raise common.InputError(f"stream {stream!r}: must be true or false")
    for name in fields:
        if name not in SAMPLING:
            raise common.InputError(f"{name}: no such field; allowed: prompt, stream, model, {', '.join(SAMPLING)}")
    return prompt, SamplingParams(**fields), stream  # which checks the values


def build_app(engine: AsyncEngine, model: str) -> Any:
    """One route of OpenAI's API, and /health, which says whether the engine lives."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    def answer(text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
        return {
            "id": "cmpl-0",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
        }

    def refusal(status: int, why: object, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": {"message": str(why), "code": status}}, status, headers)

    async def completions(request: Any) -> Any:
        body = await request.body()
        if len(body) > MAX_BODY_BYTES:
            return refusal(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
        try:
            prompt, params, stream = read_body(body)
            pieces = engine.generate(prompt, params)
            first = await anext(pieces)  # an error comes up here, while the status is not sent yet
        except common.InputError as error:
            return refusal(400, error)
        except ServerFull as error:
            return refusal(503, error, {"Retry-After": "1"})
        except Exception as error:
            return refusal(500, f"the engine has died: {error!r}")
        if stream:
            return StreamingResponse(events(first, pieces), media_type="text/event-stream")
        # Here a client that hangs up is not noticed: nothing is written to it. The engine's server listens for that.
        texts, reasons = zip(first, *[piece async for piece in pieces])
        return JSONResponse(answer("".join(texts), reasons[-1]))

    async def events(first: tuple[str, str | None], pieces: AsyncGenerator) -> AsyncIterator[str]:
        async with contextlib.aclosing(pieces):  # if the client hangs up, this ends at a `yield`, and so does `pieces`
            yield f"data: {json.dumps(answer(*first))}\n\n"
            async for piece in pieces:
                yield f"data: {json.dumps(answer(*piece))}\n\n"
        yield "data: [DONE]\n\n"

    async def health(request: Any) -> Any:
        return refusal(503, "the engine has died") if engine.dead else JSONResponse({})

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)])


@contextlib.asynccontextmanager
async def serving(engine: AsyncEngine, model: str) -> AsyncIterator[str]:
    """Serve on a free port of this machine; yields the URL. At the end, the requests inside are answered first, but not
    after an error."""
    import uvicorn

    config = uvicorn.Config(build_app(engine, model), port=0, log_level="error", lifespan="off")
    server, socket = uvicorn.Server(config), config.bind_socket()
    running = asyncio.create_task(server.serve([socket]))
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        await engine.stop()
    finally:
        await engine.close()
        server.should_exit = True
        await running


# --- What load does to a queue ----------------------------------------------------------------------------------------


SEATS, TOKENS, STEP = 8, 16, 28_000  # requests in a step, tokens of each, µs of a step


@dataclasses.dataclass
class Queue:
    """What became of the requests of a queue."""

    waits: list[int] = dataclasses.field(default_factory=list)  # µs until the first step, of those that were served
    most_waiting: int = 0
    refused: int = 0


def arrival_times(load: int, count: int = 800) -> list[int]:
    """µs at which independent requests arrive; `load` is in percent of SEATS / (TOKENS · STEP), the most per µs that
    can be served."""
    rng, now, times = random.Random(6), 0, []
    for _ in range(count):
        gap = int(-1000 * math.log(1 - rng.random()))  # exponential, in thousandths of the mean gap
        now += gap * STEP * TOKENS * 100 // (SEATS * load * 1000)
        times.append(now)
    return times


def queue_at(load: int, bound: int = 0) -> Queue:
    """800 requests of 16 tokens at 8 seats: a step takes 28 ms and gives a token to each seat.

    `bound` is how many may wait; 0: any number. In whole µs, so that a test can compare it with the engine's scheduler.
    """
    arrivals, now = deque(arrival_times(load)), 0
    waiting: deque[int] = deque()  # when each of them arrived
    running: list[int] = []  # how many tokens each of them has still to write
    found = Queue()
    while arrivals or waiting or running:
        if not waiting and not running:  # nothing to do until somebody comes
            now = max(now, arrivals[0])
        while arrivals and arrivals[0] <= now:
            arrived = arrivals.popleft()
            if bound and len(waiting) + len(running) >= SEATS + bound:
                found.refused += 1
            else:
                waiting.append(arrived)
        while waiting and len(running) < SEATS:
            found.waits.append(now - waiting.popleft())
            running.append(TOKENS)
        found.most_waiting = max(found.most_waiting, len(waiting))
        running = [tokens - 1 for tokens in running if tokens > 1]
        now += STEP
    return found


# --- The story --------------------------------------------------------------------------------------------------------

PROMPTS = ("The capital of France is", "Once upon a time, in a small village by the sea,", "Water boils at",
           "To make bread you need flour,")  # fmt: skip


async def read_stream(client: Any, prompt: str, max_tokens: int) -> tuple[int, str, int]:
    """(status, text, number of events that bring some) of one answer, read as it comes."""
    ask = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    text, pieces = "", 0
    async with client.stream("POST", "/v1/completions", json=ask) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                text, pieces = text + piece, pieces + bool(piece)
    return response.status_code, text, pieces


async def tell_story(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> None:
    """Steps 1 to 4, against the server."""
    import httpx

    seats = {"max_num_seqs": args.max_num_seqs, "max_model_len": 1024, "num_gpu_blocks_override": 400}
    inner = LLMEngine(model, tokenizer, seed=args.seed, **seats)
    engine = AsyncEngine(inner, args.max_num_queued_reqs, aborts=not args.no_abort)
    expected = {prompt: answer_alone(model, tokenizer, prompt, 8) for prompt in PROMPTS}
    limits = httpx.Limits(max_connections=None)
    async with serving(engine, "SmolLM2") as url, httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        common.heading("1. One answer, as it comes")
        _, text, pieces = await read_stream(client, PROMPTS[0], 8)
        common.check_equal(f"{pieces} events bring what the model says alone: {text!r}", text, expected[PROMPTS[0]])

        common.heading(
            f"2. The real model: streams at once, {args.max_num_seqs} seats, {args.max_num_queued_reqs} places"
        )
        await show_load(client, expected)

        common.heading("3. One client's trouble must not harm another")
        await show_hanging_up(client, inner)
        await show_refusals(client, engine)

        common.heading("4. The end")
        await show_stop(client, engine, tokenizer)


async def show_load(client: Any, expected: dict[str, str]) -> None:
    """1, 4 and 16 streams at once; every one that is answered reads what the model says alone."""
    rows = []
    for streams in (1, 4, 16):
        prompts = [PROMPTS[i % 4] for i in range(streams)]
        start = time.perf_counter()
        answers = await asyncio.gather(*(read_stream(client, prompt, 8) for prompt in prompts))
        seconds = time.perf_counter() - start
        served = [(prompt, text) for prompt, (status, text, _) in zip(prompts, answers) if status == 200]
        if wrong := [(prompt, text) for prompt, text in served if text != expected[prompt]]:
            raise common.CheckFailed(f"not what the model says alone: {wrong[0]}")
        rows.append([streams, len(served), streams - len(served), f"{8 * len(served) / seconds:.0f}"])
    common.table(["streams", "answered", "refused (503)", "tokens/s"], rows)
    common.say("✓ every client read what the model says alone")


async def show_hanging_up(client: Any, engine: LLMEngine) -> None:
    """The client of a long answer leaves after the first piece."""
    scheduler = engine.core.scheduler
    long = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=long) as response:
        await anext(response.aiter_lines())
    start = time.perf_counter()
    while scheduler.requests and time.perf_counter() - start < 2:
        await asyncio.sleep(0.01)
    ms = 1e3 * (time.perf_counter() - start)
    common.check_equal("a client hung up: its request is gone", len(scheduler.requests), 0)
    common.say(f"  … {ms:.0f} ms later")
    pool = scheduler.kv_cache_manager.block_pool
    common.check_equal("and no KV block is owned", pool.num_free_blocks, pool.num_blocks - 1)  # all but the null block


async def show_refusals(client: Any, engine: AsyncEngine) -> None:
    """Five requests that make no sense, and one for which there is no place."""
    wrong = ({"content": b'{"prompt": "half'}, {"json": {"prompt": 5}}, {"json": {"prompt": "x", "temperature": 9}},
             {"json": {"prompt": "x " * 2000}}, {"content": b" " * (MAX_BODY_BYTES + 1)})  # fmt: skip
    answers = [(await client.post("/v1/completions", **body)).status_code for body in wrong]
    common.check_equal(
        "malformed, wrong type, out of range, too long, too large: " + ", ".join(map(str, answers)),
        answers,
        [400, 400, 400, 400, 413],
    )
    places, engine.max_num_queued_reqs = engine.max_num_queued_reqs, 0
    full = await client.post("/v1/completions", json={"prompt": "x"})
    engine.max_num_queued_reqs = places
    common.check_equal(
        "no place left: 503, and when to come again", (full.status_code, full.headers["Retry-After"]), (503, "1")
    )


async def show_stop(client: Any, engine: AsyncEngine, tokenizer: Tokenizer) -> None:
    """The server stops while it writes an answer of 40 tokens, and another request comes too late."""
    last = asyncio.create_task(read_stream(client, PROMPTS[1], 40))
    while not engine.mailboxes:
        await asyncio.sleep(0.01)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)  # `stop` begins
    late, _, _ = await read_stream(client, PROMPTS[0], 8)
    status, text, _ = await last
    whole = status == 200 and len(tokenizer.encode(text)) > 30
    common.check_equal(
        "the server stops: who was inside is answered whole, who comes later gets a 503", (whole, late), (True, 503)
    )
    await stopping


def show_queue() -> None:
    """The surprise: 15 % more load, three times the wait."""
    rows, means = [], {}
    for load, bound in ((50, 0), (80, 0), (95, 0), (105, 0), (105, 20)):
        found = queue_at(load, bound)
        waits = sorted(found.waits)
        means[load, bound] = sum(waits) / len(waits) / 1e3
        p99 = waits[math.ceil(len(waits) * 99 / 100) - 1] / 1e3
        label = f"{load} %" + (f", at most {bound} wait" if bound else "")
        rows.append([label, f"{means[load, bound]:.0f} ms", f"{p99:.0f} ms", found.most_waiting, found.refused])
    common.table(["load", "mean wait", "p99", "most waiting", "refused"], rows)
    common.say(
        f"From 80 to 95 % load, requests wait {means[95, 0] / means[80, 0]:.1f} times as long. Above 100 % the queue"
    )
    common.say("grows for as long as the load lasts: only a bound keeps it short, and it refuses a few.")


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument(
        "--max-num-seqs",
        type=arguments.number(int, 1, 64),
        default=16,
        metavar="N",
        help="seats: requests in a step (default %(default)s)",
    )
    p.add_argument(
        "--max-num-queued-reqs",
        type=arguments.number(int, 1),
        default=64,
        metavar="N",
        help="places: requests inside, whether they wait or run (default %(default)s)",
    )
    p.add_argument(
        "--no-abort",
        action="store_true",
        help="break it: nobody tells the engine that a client left; the check must fail",
    )
    add_serve_command(p.add_subparsers(dest="command", metavar="serve", help="the engine's own server"))
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.command:  # serve
        return args.run(args)
    cli.start(args)
    loader.check_context(args.model, 1024)
    model, tokenizer = loader.load(args.model)
    asyncio.run(tell_story(args, model, tokenizer))
    common.heading("5. What load does to a queue: 8 seats, 28 ms a step, 800 independent arrivals (simulated)")
    show_queue()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

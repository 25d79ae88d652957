"""Lesson 06's steps: a mailbox, a body that is not believed, a queue, events, statuses, an engine behind an event loop.

Owns their cases; called by the grader. It never grades, and opens no port: the app is called as a server would call it.
"""

from __future__ import annotations

import common

import asyncio
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

from engine.front_end import CompletionOutput, RequestOutput
from engine.request import SamplingParams
from learn import pictures
from learn.step import Case, Context, Step, outcome

LESSON = "06_serving"
PATIENCE = 2.0  # seconds until a case that waits is wrong


def on_a_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    """What a coroutine returns, the name of what it raises or what a callback has raised, or that it did not end."""
    in_callbacks: list[str] = []

    def note(loop: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        if "callback" in about["message"] and "exception" in about:
            in_callbacks.append(type(about["exception"]).__name__)

    async def limited() -> Any:
        try:
            return await asyncio.wait_for(work(), PATIENCE)
        except TimeoutError:
            return f"no end after {PATIENCE:g} s"

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(note)
    try:
        found = outcome(lambda: loop.run_until_complete(limited()))
        return f"a callback raises {in_callbacks[0]}" if in_callbacks else found
    finally:
        loop.close()  # which waits for no thread


async def turns(n: int = 20) -> None:
    """Let everybody else go on for a while."""
    for _ in range(n):
        await asyncio.sleep(0)


# --- The mailbox ------------------------------------------------------------------------------------------------------


def lives_of_a_mailbox(module: ModuleType, actions: Sequence[tuple]) -> list:
    """("put", text, reason), ("fail",), ("get",) and ("read",), which begins to wait before the next action."""

    async def live() -> list:
        mailbox, told, reading = module.Mailbox(), [], None
        for verb, *what in actions:
            if verb == "put":
                told.append(mailbox.put(*what))
            elif verb == "fail":
                told.append(mailbox.put(error=KeyError("lost")))
            elif verb == "read":
                reading = asyncio.ensure_future(mailbox.get())
            else:
                task, reading = reading or asyncio.ensure_future(mailbox.get()), None
                await turns()
                if not task.done():
                    task.cancel()
                    await turns()
                    told.append("waits")
                else:
                    error = task.exception()
                    told.append(f"raises {type(error).__name__}" if error else list(task.result()))
            await turns(2)
        return told

    return on_a_loop(live)


def mailboxes(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = []
    for _ in range(3):
        pieces = [("put", "".join(rng.choices("abcdef", k=rng.randint(0, 3))), None) for _ in range(6)]
        some.append([x for piece in pieces for x in ([piece, ("get",)] if rng.random() < 0.4 else [piece])])
        some[-1] += [("put", "!", "length"), ("get",)]
    first: list[list[tuple]] = [
        [("put", "a", None), ("get",)],
        [("put", "a", None), ("put", "b", None), ("get",)],
        [("get",), ("put", "a", None), ("get",), ("get",)],
        [("put", "a", None), ("get",), ("put", "b", None), ("get",), ("get",)],
        [("put", "a", None), ("put", "b", "stop"), ("get",)],
        [("put", "", "length"), ("get",)],
        [("read",), ("put", "a", None), ("get",), ("put", "b", None), ("get",)],
        [("fail",), ("get",)],
        [("put", "a", None), ("fail",), ("get",)],
        [("read",), ("fail",), ("get",)],
    ]
    for actions in (*first, *some):
        yield Case(
            f"{actions}: what each call answers, raises, or whether it waits",
            lambda: lives_of_a_mailbox(mine, actions),
            lives_of_a_mailbox(given, actions),
            lambda got, right: pictures.steps(got, right) if isinstance(got, list) else "",
        )


# --- What comes in ----------------------------------------------------------------------------------------------------


def bodies(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng

    def read(module: ModuleType, body: bytes, field: str) -> Any:
        try:
            prompt, params, stream = module.read_body(body)
        except common.InputError as error:
            return f"InputError that names {field}" if field in str(error) else f"InputError: {error}"
        return [prompt, params.max_tokens, params.temperature, params.top_k, params.stop, params.seed, stream]

    n, t = rng.randint(1, 500), rng.randint(0, 20) / 10
    asked: list[tuple[Any, str]] = [
        ({"prompt": "hello"}, ""),
        ({"prompt": "hello", "max_tokens": n, "temperature": t, "stream": True}, ""),
        ({"prompt": "hello", "model": "any", "stop": ["a", "b"], "seed": 3, "stream": False}, ""),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": n}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "stream": 1}, "stream"),
        ({"prompt": "x", "stream": None}, "stream"),
        ({"prompt": "x", "max_token": n}, "max_token"),
        ({"prompt": "x", "n": 2}, "n:"),
        ({"prompt": "x", "skip_reading_prefix_cache": True}, "skip_reading_prefix_cache"),
        ({"prompt": "x", "temperature": 2 + n}, "temperature"),
        ({"prompt": "x", "max_tokens": -n}, "max_tokens"),
        ({"prompt": "x", "top_k": "three"}, "top_k"),
        ([1, 2], "object"),
    ]
    for fields, field in asked:
        body = json.dumps(fields).encode()
        yield Case(
            f"the body {body.decode()}: [prompt, max_tokens, temperature, top_k, stop, seed, stream], or the field "
            "that the InputError names",
            lambda: outcome(lambda: read(mine, body, field)),
            outcome(lambda: read(given, body, field)),
        )


# --- A queue, in whole µs ---------------------------------------------------------------------------------------------


def queues(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng

    def queue_of(module: ModuleType, arrivals: list[int], seats: int, tokens: int, step: int, bound: int) -> dict:
        small = mock.patch.multiple(
            module, SEATS=seats, TOKENS=tokens, STEP=step, arrival_times=lambda load: list(arrivals)
        )
        with small:
            found = module.queue_at(80, bound)
        return {"waits": list(found.waits), "most waiting": found.most_waiting, "refused": found.refused}

    first = [
        ([0], 1, 1, 10, 0),
        ([0, 0], 1, 2, 10, 0),
        ([0, 3], 2, 2, 10, 0),
        ([0, 0, 0, 0], 2, 1, 10, 0),
        ([5, 200], 1, 3, 10, 0),
        ([0, 0, 0, 0], 1, 2, 10, 1),
        ([0, 1, 2, 3, 30, 60], 2, 2, 10, 1),
        ([0, 10, 20, 20], 1, 1, 10, 0),
    ]
    some = []
    for _ in range(5):
        times = sorted(rng.randint(0, 120) for _ in range(rng.randint(5, 14)))
        some.append((times, rng.randint(1, 3), rng.randint(1, 4), rng.randint(5, 12), rng.choice([0, 1, 2, 4])))
    for arrivals, seats, tokens, step, bound in (*first, *some):
        yield Case(
            f"requests come at {arrivals} µs; {seats} seats, {tokens} tokens each, {step} µs a step, "
            + (f"at most {bound} may wait" if bound else "any number may wait"),
            lambda: queue_of(mine, arrivals, seats, tokens, step, bound),
            queue_of(given, arrivals, seats, tokens, step, bound),
        )


# --- HTTP without a port ----------------------------------------------------------------------------------------------


class Front:
    """In place of an AsyncEngine: these pieces for everybody, or an error in place of the first one."""

    def __init__(self, pieces: Sequence[str], error: Exception | None = None) -> None:
        self.pieces, self.error, self.dead = pieces, error, None
        self.kept: list[AsyncGenerator] = []  # so that nothing but a close ends them
        self.asked: list[tuple] = []
        self.closed = self.taken = 0

    def generate(self, prompt: str, params: SamplingParams) -> AsyncGenerator[tuple[str, str | None], None]:
        self.asked.append((prompt, params.max_tokens))
        self.kept.append(self.answer())
        return self.kept[-1]

    async def answer(self) -> AsyncGenerator[tuple[str, str | None], None]:
        try:
            await asyncio.sleep(0)
            if self.error:
                raise self.error
            for i, piece in enumerate(self.pieces):
                self.taken += 1
                yield piece, "length" if i + 1 == len(self.pieces) else None
        finally:
            self.closed += 1


async def called(app: Any, body: bytes, leaves_after: int = 10**6) -> tuple[int, dict[str, str], str]:
    """(status, headers, body) of a POST, as a server asks; the client leaves after so many pieces of the body."""
    messages: deque[dict] = deque([{"type": "http.request", "body": body, "more_body": False}])
    status, headers, pieces = 0, {}, []

    async def receive() -> dict:
        while not messages:
            await asyncio.sleep(1)
        return messages.popleft()

    async def send(message: Any) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], {k.decode(): v.decode() for k, v in message["headers"]}
        elif len(pieces) == leaves_after:
            raise OSError("the client has left")
        else:
            pieces.append(message.get("body", b"").decode())

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "server": ("it", 80),
        "client": ("it", 1),
    }
    with contextlib.suppress(Exception):  # such as a client that has left; the status says the rest
        await app(scope, receive, send)
    return status, headers, "".join(pieces)


def said(choice: Any) -> Any:
    """Of an answer, what a client reads."""
    try:
        (only,) = choice["choices"]
        return [choice["object"], choice["model"], only["text"], only["finish_reason"]]
    except (TypeError, KeyError, ValueError):
        return choice


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_events(text: str) -> list:
    """The events of a stream, which an empty line ends; what is none is shown as it came."""
    told = []
    for event in text.split("\n\n"):
        if event.startswith("data: {"):
            told.append(said(parsed(event.removeprefix("data: "))))
        else:
            told.append(event)
    return told


def streams(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng

    def stream(module: ModuleType, pieces: list[str], leaves_after: int) -> Any:
        async def live() -> dict:
            front = Front(pieces)
            body = json.dumps({"prompt": "x", "stream": True}).encode()
            status, headers, text = await called(module.build_app(front, "it"), body, leaves_after)
            await turns()
            kind = headers.get("content-type", "").partition(";")[0]
            return {
                "status": status,
                "type": kind,
                "events": read_events(text),
                "closed": front.closed,
                "taken": front.taken,
            }

        return on_a_loop(live)

    some = ["".join(rng.choices('abc \n"é', k=rng.randint(1, 5))) for _ in range(6)]
    for pieces, leaves_after in [
        (["a"], 99),
        (["a", "b", "c"], 99),
        (["one\ntwo", 'a "word"', "é"], 99),
        (["a", "b", "c"], 1),
        (["a", "b", "c", "d"], 2),
        (["a", "b", "c"], 0),
        (some, 99),
    ]:
        leaves = f"; the client leaves after {leaves_after} events" if leaves_after < 99 else ""
        yield Case(
            f"the engine's pieces are {pieces}{leaves}: the events, how many answers were closed, how many pieces "
            "taken",
            lambda: stream(mine, pieces, leaves_after),
            stream(given, pieces, leaves_after),
            lambda got, right: pictures.steps(got["events"], right["events"]) if isinstance(got, dict) else "",
        )


def statuses(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    def ask(module: ModuleType, body: bytes, pieces: list[str], error: str) -> Any:
        errors = {
            "": None,
            "too long": common.InputError("prompt: it is too long"),
            "full": module.ServerFull("all inside"),
            "dead": RuntimeError("out of memory"),
        }

        async def live() -> dict:
            front = Front(pieces, errors[error])
            status, headers, text = await called(module.build_app(front, "it"), body)
            told: dict[str, Any] = {"status": status, "retry-after": headers.get("retry-after"), "asked": front.asked}
            found = parsed(text)
            if isinstance(found, dict) and isinstance(found.get("error"), dict):
                told["error"] = found["error"].get("code")
                told["message"] = found["error"].get("message") if status == 400 else ""  # otherwise in your own words
            else:
                told["answer"] = read_events(text) if "\n\n" in text else said(found)
            return told

        return on_a_loop(live)

    n = context.rng.randint(2, 99)
    most = given.MAX_BODY_BYTES
    fits = json.dumps({"prompt": "x" * (most - 14)})
    asked = [
        ({"prompt": "x", "max_tokens": n}, ["a"], ""),
        ({"prompt": "x", "max_tokens": n}, ["a", "b", "c"], ""),
        ({"prompt": "x", "stream": True}, ["a", "b"], ""),
        ('{"prompt": "ha', ["a"], ""),
        ({"prompt": n}, ["a"], ""),
        ({"prompt": "x", "temperature": n}, ["a"], ""),
        ({"prompt": "x"}, ["a"], "too long"),
        ({"prompt": "x", "stream": True}, ["a"], "too long"),
        ({"prompt": "x"}, ["a"], "full"),
        ({"prompt": "x", "stream": True}, ["a"], "full"),
        ({"prompt": "x"}, ["a"], "dead"),
        ({"prompt": "x", "stream": True}, ["a"], "dead"),
        (fits, ["a"], ""),
        (fits[:-2] + 'x"}', ["a"], ""),
    ]
    for body, pieces, error in asked:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        shown = content.decode() if len(content) < 100 else f"of {len(content):,} bytes"
        yield Case(
            f"the body {shown}; the engine's pieces are {pieces}{', but it is: ' + error if error else ''}",
            lambda: ask(mine, content, pieces, error),
            ask(given, content, pieces, error),
        )


# --- An engine behind an event loop -----------------------------------------------------------------------------------


class Letters:
    """In place of an LLMEngine: an answer is its prompt, a letter a step. "~" never ends, "!" kills the engine."""

    def __init__(self) -> None:
        self.inside: dict[str, list[str]] = {}
        self.threads: set[int] = set()
        self.aborted = self.idle_steps = 0

    def add_request(self, request_id: str, prompt: str, params: SamplingParams, stream: bool = False) -> None:
        self.threads.add(threading.get_ident())
        if prompt == "too long" or not stream:
            raise common.InputError("prompt: it is too long" if stream else "stream: must be true")
        self.inside[request_id] = list(prompt)

    def abort_request(self, request_ids: Sequence[str]) -> None:
        self.threads.add(threading.get_ident())
        for request_id in request_ids:
            self.inside.pop(request_id, None)
            self.aborted += 1

    def has_unfinished_requests(self) -> bool:
        return bool(self.inside)

    def step(self) -> list[RequestOutput]:
        self.threads.add(threading.get_ident())
        time.sleep(0.002)
        self.idle_steps += not self.inside
        outputs = []
        for request_id, letters in list(self.inside.items()):
            if letters[0] == "!":
                raise RuntimeError("out of memory")
            letter = letters[0] if letters[0] == "~" else letters.pop(0)
            reason = None if letters else "length"
            outputs.append(
                RequestOutput(request_id, "", [], [CompletionOutput(0, letter, [0], finish_reason=reason)], not letters)
            )
            if not letters:
                del self.inside[request_id]
        return outputs


Scenario = Callable[[ModuleType, Any, Letters], Awaitable[Any]]


async def whole(engine: Any, prompt: str) -> Any:
    """The whole text and why it ends, or the name of what is raised."""
    try:
        pieces = [piece async for piece in engine.generate(prompt, SamplingParams())]
    except Exception as error:
        return f"raises {type(error).__name__}"
    return ["".join(text for text, _ in pieces), pieces[-1][1] if pieces else None]


async def until(true: Callable[[], Any], seconds: float = 0.7) -> bool:
    """Wait for it. Has it come?"""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        await asyncio.sleep(0.002)
    return bool(true())


async def first_piece(engine: Any, prompt: str) -> tuple[AsyncGenerator, str]:
    pieces = engine.generate(prompt, SamplingParams())
    piece, _ = await anext(pieces)
    return pieces, piece[:1]


def answers(*prompts: str) -> Scenario:
    async def scenario(module: ModuleType, engine: Any, inner: Letters) -> Any:
        return await asyncio.gather(*(whole(engine, prompt) for prompt in prompts))

    return scenario


async def leaves(module: ModuleType, engine: Any, inner: Letters) -> Any:
    pieces, piece = await first_piece(engine, "~")
    await pieces.aclose()
    gone = await until(lambda: not inner.inside)
    return [piece, "gone" if gone else "still computed", list(engine.mailboxes), inner.aborted]


async def one_of_two_leaves(module: ModuleType, engine: Any, inner: Letters) -> Any:
    (pieces, _), other = await asyncio.gather(first_piece(engine, "~"), whole(engine, "abcdefgh"))
    await pieces.aclose()
    return [other, await until(lambda: not inner.inside), await whole(engine, "later")]


async def is_cancelled(module: ModuleType, engine: Any, inner: Letters) -> Any:
    task = asyncio.ensure_future(whole(engine, "~"))
    await until(lambda: inner.inside)
    task.cancel()
    return ["gone" if await until(lambda: not inner.inside) else "still computed", list(engine.mailboxes)]


async def full(module: ModuleType, engine: Any, inner: Letters) -> Any:
    places = engine.max_num_queued_reqs
    inside = [await first_piece(engine, "~") for _ in range(places)]
    told = [await whole(engine, "late"), len(engine.mailboxes)]
    await inside[0][0].aclose()
    told.append(await whole(engine, "later"))
    for pieces, _ in inside[1:]:
        await pieces.aclose()
    return told


async def dies(module: ModuleType, engine: Any, inner: Letters) -> Any:
    pieces, _ = await first_piece(engine, "~")
    told = list(await asyncio.gather(whole(engine, "~"), whole(engine, "!")))

    async def rest() -> list[str]:
        return [piece async for piece, _ in pieces]

    try:
        await rest()
    except RuntimeError as error:
        told.append(str(error))
    return [*told, await whole(engine, "later"), str(engine.dead)]


async def stops(module: ModuleType, engine: Any, inner: Letters) -> Any:
    inside = asyncio.ensure_future(whole(engine, "abcdefgh"))
    await until(lambda: inner.inside)
    stopping = asyncio.ensure_future(engine.stop())
    await asyncio.sleep(0)
    late = await whole(engine, "late")
    told = [await inside, late]
    await stopping
    return [*told, engine.thread.is_alive()]


async def is_closed(module: ModuleType, engine: Any, inner: Letters) -> Any:
    _kept, piece = await first_piece(engine, "~")
    await engine.close()
    return [piece, engine.thread.is_alive()]


async def rests(module: ModuleType, engine: Any, inner: Letters) -> Any:
    told = [await whole(engine, "abc")]
    await asyncio.sleep(0.02)
    return [*told, await whole(engine, "def"), inner.idle_steps, inner.aborted, list(engine.mailboxes)]


async def leaves_a_bug(module: ModuleType, engine: Any, inner: Letters) -> Any:
    engine.aborts = False
    pieces, piece = await first_piece(engine, "abcdefgh")
    await pieces.aclose()
    return [piece, list(engine.mailboxes), await until(lambda: not inner.inside), inner.aborted]


def engines(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng

    def run(module: ModuleType, scenario: Scenario, places: int) -> Any:
        inner = Letters()

        async def live() -> Any:
            engine = module.AsyncEngine(inner, places)
            found = await scenario(module, engine, inner)
            await engine.close()
            return [found, "threads that call the engine", len(inner.threads), threading.get_ident() in inner.threads]

        return on_a_loop(live)

    some = ["".join(rng.choices("abcdef", k=rng.randint(1, 9))) for _ in range(5)]
    scenarios: list[tuple[str, Scenario, int]] = [
        ("one request, whose answer is abc", answers("abc"), 9),
        (f"requests at once, whose answers are {', '.join(some)}", answers(*some), 9),
        ("one request, then nothing for a while, then another: idle steps, aborts, mailboxes at the end", rests, 9),
        ("a prompt that is too long beside one that is not", answers("too long", "abc"), 9),
        ("an answer without an end, and its client leaves after the first piece", leaves, 9),
        ("one of two clients leaves, then a third one comes", one_of_two_leaves, 9),
        ("a client leaves before anything has come", is_cancelled, 9),
        (
            f"{(places := rng.randint(1, 3))} places, all taken; one more comes; then one leaves and another comes",
            full,
            places,
        ),
        ("the step of one request kills the engine: what all others hear, and who comes later", dies, 9),
        ("stop() while an answer is written: who is inside, who comes late, whether the thread is alive", stops, 9),
        ("close() while an answer without an end is written", is_closed, 9),
        ("the bug aborts=False: a client leaves, and its answer is computed to the end", leaves_a_bug, 9),
    ]
    for told, scenario, places in scenarios:
        yield Case(told, lambda: run(mine, scenario, places), run(given, scenario, places))


STEPS = (
    Step(
        "06.1",
        LESSON,
        "Something for a mailbox",
        "Mailbox.put",
        "add the text to what is not read yet, note why the answer ends and what went wrong, and wake the reader.",
        "Three attributes and an asyncio.Event, which has set().",
        mailboxes,
    ),
    Step(
        "06.2",
        LESSON,
        "Reading it",
        "Mailbox.get",
        "wait until something is there; then raise the error, or return all text since the last call and the reason.",
        "The event stays set until you clear it: if you do not, the next call returns at once, with nothing. What has "
        "been returned is not in the mailbox any more.",
        mailboxes,
    ),
    Step(
        "06.3",
        LESSON,
        "Nothing is believed",
        "read_body",
        "take the prompt, `stream` and `model` out of `fields`; what is left samples. Raise InputError naming the "
        "field: a prompt that is no text or empty, a stream that is no bool, a field that SAMPLING does not list.",
        "dict.pop(name, default) takes a field out; nobody looks at model. SamplingParams(**fields) checks values "
        "itself, but it has more fields than a client may set.",
        bodies,
        first="prompt, stream = ",
        last="return prompt",
    ),
    Step(
        "06.4",
        LESSON,
        "What load does to a queue",
        "queue_at",
        "until nobody is left: who has arrived by `now` waits, or is refused; seats are filled from the front; a step "
        "gives each seat a token and takes STEP µs.",
        "Without work, time jumps to the next arrival. With a bound, SEATS + bound may be inside; who finds as many is "
        "refused. Note the wait when somebody gets a seat, and how many still wait then. A request leaves with its "
        "last token.",
        queues,
        first="while arrivals or waiting or running",
    ),
    Step(
        "06.5",
        LESSON,
        "An answer as it comes",
        "build_app.events",
        "yield server-sent events: `data: ` and a piece as JSON and an empty line, `first` first; then `data: [DONE]`. "
        "A client that leaves ends `pieces`, too.",
        "answer(text, reason) makes the dict. If the client leaves, this generator ends at one of its yields and "
        "nobody tells `pieces`: contextlib.aclosing(pieces) does. Nobody hears [DONE] then.",
        streams,
    ),
    Step(
        "06.6",
        LESSON,
        "The status is sent once",
        "build_app.completions",
        "read the body and answer: whole, or as a stream of events. 413 too large; 400 InputError; 503 ServerFull with "
        "Retry-After 1; 500 for anything else.",
        "generate() alone runs nothing: ask for the first piece before you answer, since a status cannot be taken "
        "back. refusal(status, why, headers) makes the answer; StreamingResponse takes events(first, pieces) and the "
        "media type text/event-stream.",
        statuses,
    ),
    Step(
        "06.7",
        LESSON,
        "Many callers, one engine",
        "AsyncEngine",
        "write the methods: callers on the event loop, the engine on its thread. Letters go in through `inbox`, "
        "outputs come out by one call on the loop after each step. Nobody waits for anybody, and who leaves is "
        "aborted.",
        "generate: refuse, make a mailbox, send the letter, yield from the mailbox, and clean up in `finally`, which "
        "also runs when the client leaves. _run: as long as _read_letters says so, step, and "
        "loop.call_soon_threadsafe(self._deliver, outputs); an exception goes to _die the same way. _read_letters "
        "reads all letters that are there, and waits for one only if the engine has nothing to do. A refused request's "
        "error goes to its mailbox alone. stop: nobody comes in any more; when the mailboxes are gone, close. close: a "
        "letter, and asyncio.to_thread(join).",
        engines,
    ),
)

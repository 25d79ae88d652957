"""06e · The asynchronous engine: a thousand clients, one loop that must never wait.

The question: an engine's step keeps a processor busy for tens of milliseconds. A server has a thousand open streams,
and every one of them wants attention now. Where does the engine run, and how do tokens travel from it to them?

The mechanism:
  1. One event loop holds all streams. Each is a task that waits; waiting costs memory, and no thread.
  2. The engine core runs in a process of its own: a loop that takes letters between steps and sends what steps bring.
  3. The front end (validate, tokenize, detokenize, stop strings) stays with the event loop: lesson 04b's engine, whose
     core has been replaced by a mailbox.
  4. One task reads the engine's letters and puts each request's news into its `RequestOutputCollector`.
  5. Back-pressure in three places. A slow reader: its news are merged, nobody waits for it. Too many requests: refused
     on arrival. A slow front end: the socket fills, and the engine waits.
  6. A client that leaves is an ABORT letter; its blocks are free before the next step.
  7. An engine that dies closes its socket. Everybody who waits hears of it at once.

Numbers to remember: in 2024, vLLM spent 33 % of its time on HTTP, 29 % on scheduling and 38 % on the GPU, one after the
other (Llama-3-8B, H100). Three places that overlap are 2.6 times as fast as one that takes turns.

How to run:
  uv run python vllm/06e_async_engine.py                       the whole story
  uv run python vllm/06e_async_engine.py --clients 16          more streams
  uv run python vllm/06e_async_engine.py --place event-loop    break it: the loop is late by whole steps
  uv run python vllm/06e_async_engine.py --bench               a minute: longer runs, more streams

Read for this: vLLM 0.32 `v1/engine/async_llm.py`, `v1/engine/core.py`, `v1/engine/core_client.py`,
`v1/engine/output_processor.py`; vLLM's blogs on v0.6.0 (September 2024) and V1 (January 2025).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import asyncio
import atexit
import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import multiprocessing
import os
import pickle
import queue
import select
import signal
import socket
import statistics
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import astuple, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import llama

KEY = "06e_async_engine"

offline = common.lesson("04b_offline_engine")
scheduling = common.lesson("04_continuous_batching")
EngineCoreOutput, LLMEngine, RequestOutput = scheduling.EngineCoreOutput, offline.LLMEngine, offline.RequestOutput
Request, RequestStatus, SamplingParams = scheduling.Request, scheduling.RequestStatus, scheduling.SamplingParams

Factory = tuple[str, str]  # a lesson and a function of it that builds an LLMEngine: what another process can be told
Receive = Callable[[float | None], list[tuple]]  # letters; how many seconds to wait for the first, None is for ever


# --- What we want, without cleverness ---------------------------------------------------------------------------------


def answer_blocking(engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams) -> list[str]:
    """What every client must have read in the end: one after the other, and nobody else is served meanwhile."""
    texts = []
    for prompt in prompts:
        engine.add_request("only", {"prompt_token_ids": prompt}, params)
        while not (heard := engine.step()):
            pass
        texts.append(heard[0].outputs[0].text)
    return texts


# --- 1. The letters ---------------------------------------------------------------------------------------------------


class EngineCoreRequestType(enum.Enum):
    """What the front end writes to the engine core: (type, content)."""

    ADD = enum.auto()  # a Request
    ABORT = enum.auto()  # request ids
    UTILITY = enum.auto()  # (call id, name, *arguments): call one of EngineCoreProc.UTILITIES and send its result


@dataclass(slots=True)
class SchedulerStats:
    """The state after a step, and what the step did: the source of most metrics."""

    num_running_reqs: int
    num_waiting_reqs: int  # for a seat, tokens or blocks
    kv_cache_usage: float  # share of the pool's blocks that somebody owns
    num_skipped_waiting_reqs: int = 0  # for keys and values on their way (lesson 08), or an adapter's place (lesson 12)
    num_scheduled_tokens: int = 0
    step_seconds: float = 0.0
    spec_decoding: tuple[int, ...] = ()  # lesson 07, so far: drafts, their tokens, accepted ones, these by place


class Admission(NamedTuple):
    """What the first admission of a request found."""

    queued: float  # seconds
    num_cached_tokens: int  # of its prompt
    num_external_tokens: int  # of these, those that a connector brings (lesson 08)


@dataclass(slots=True)
class EngineCoreOutputs:
    """What the engine core writes after a step."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    logprobs: dict[str, dict] = field(default_factory=dict)  # request id: {token id: Logprob}, for those who asked
    admitted: dict[str, Admission] = field(default_factory=dict)  # by request id
    preempted: list[str] = field(default_factory=list)  # request ids
    refused: dict[str, str] = field(default_factory=dict)  # id: why the core could not take it
    prompt_logprobs: dict[str, list] = field(default_factory=dict)  # id: one entry per token of a prompt now computed


@dataclass(slots=True)
class EngineCoreReady:
    """The first letter of an engine that is up: what start-up found out."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_gpu_blocks: int
    block_size: int
    policy: str
    enable_prefix_caching: bool
    pid: int
    about: dict[str, Any] = field(default_factory=dict)  # what the factory adds


@dataclass(slots=True)
class Progress:
    """A line of start-up for the console."""

    text: str


@dataclass(slots=True)
class Reply:
    """The result of a UTILITY call, or why there is none."""

    call_id: int
    result: Any = None
    error: str | None = None
    bad_input: bool = False


@dataclass(slots=True)
class Dead:
    """The last letter of an engine core that could still write one."""

    error: str
    bad_input: bool = False


@dataclass(slots=True)
class Later:
    """What another thread is busy with: the loop goes on, and when it is over, calls `then` with its result."""

    future: Future
    then: Callable[[Any], Any]


class EngineDeadError(RuntimeError):
    """The engine core is gone, and with it every request that it had."""


class QueueOverflowError(RuntimeError):
    """As many requests are inside as `max_num_queued_reqs` allows, or the server is going: come back later."""


# --- 2. The engine core: lesson 04's loop, with a mailbox -------------------------------------------------------------


class EngineCoreProc:
    """Takes letters between steps, and sends what each step brought (`vllm/v1/engine/core.py`)."""

    UTILITIES = ("check_idle", "add_lora", "remove_lora")

    def __init__(self, engine: LLMEngine, send: Callable[[Any], None]) -> None:
        self.core, self.scheduler, self.send, self.engine = engine.core, engine.core.scheduler, send, engine
        self.arrived: dict[str, float] = {}  # request id: when its letter came
        self.about = getattr(engine, "about", {})
        self.later: list[tuple[Future, Callable[[], None]]] = []  # other threads' work, and what to do when it is done
        self.guided: dict[str, Request] = {}  # by id: those whose guide is being compiled, on their way to the core
        self.compilers = ThreadPoolExecutor(2, thread_name_prefix="guides")
        if hasattr(engine, "lora"):
            engine.lora.patience = self.GLANCE  # a step that waits for an adapter's file looks for letters meanwhile

    GLANCE = 0.005  # seconds between two looks at what other threads do

    @property
    def patience(self) -> float | None:
        """Seconds that an idle loop waits for letters; None is for ever. Others than our client may want something."""
        return self.GLANCE if self.later else self.scheduler.patience

    def ready(self) -> EngineCoreReady:
        """The first letter to the client: limits, cache and process of this core."""
        config, manager = self.scheduler.config, self.scheduler.kv_cache_manager
        return EngineCoreReady(
            config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens, manager.block_pool.num_blocks,
            manager.block_size, config.policy, manager.enable_caching, os.getpid(), self.about,
        )  # fmt: skip

    def run_busy_loop(self, receive: Receive) -> None:
        """Never returns. `receive(seconds)` has the letters that are here; it waits so long for one, None is for ever,
        and raises ClientGone when there is nobody left to work for."""
        self.read_mail = lambda: self.handle(receive(0))
        while True:
            letters = receive(0 if self.scheduler.has_unfinished_requests() else self.patience)
            self.handle(letters)
            self.settle()
            if self.scheduler.has_unfinished_requests():
                self.step()
            elif letters:
                self.send(EngineCoreOutputs(scheduler_stats=self.stats()))  # an abort emptied it: say so

    def read_mail(self) -> None:
        """Handle what has come in; on an event loop nothing can have."""

    def handle(self, letters: Iterable[tuple]) -> None:
        """Add, abort, or call by name; what a request's sender did wrong goes back to it as text."""
        for kind, content in letters:
            if kind is EngineCoreRequestType.ADD:
                self.arrived[content.request_id] = time.monotonic()
                self.add(content)
            elif kind is EngineCoreRequestType.ABORT:
                self.core.abort_requests(content)
                for request_id in content:
                    self.arrived.pop(request_id, None)
                    self.guided.pop(request_id, None)
            elif kind is EngineCoreRequestType.UTILITY:
                call_id, name, *arguments = content
                function = (
                    getattr(self, name) if name in self.UTILITIES else lambda *_, name=name: f"no utility {name!r}"
                )
                self.call(call_id, function, *arguments)

    def add(self, request: Request) -> None:
        """To the core. One with a guide goes there when a thread has compiled that: no step waits for it (vLLM's
        `preprocess_add_request`). Most are there at once: the front end has compiled the same, or it is a small one."""
        compiles = getattr(self.core.runner, "grammar_init", None)
        if request.sampling_params.structured_outputs is None or compiles is None:
            return self.admit(request)
        self.guided[request.request_id] = request
        future = self.compilers.submit(compiles, request)
        wait([future], 0 if self.later else self.GLANCE)
        if future.done():
            return self.admit(request, future)
        self.later.append((future, functools.partial(self.admit, request, future)))

    def admit(self, request: Request, compiled: Future | None = None) -> None:
        """Let the core have it, unless it is wrong, or was aborted meanwhile."""
        if compiled is not None and self.guided.pop(request.request_id, None) is not request:
            return
        try:
            if compiled is not None:
                compiled.result()
            self.core.add_request(request)
        except common.InputError as error:
            self.arrived.pop(request.request_id, None)
            self.send(EngineCoreOutputs(refused={request.request_id: str(error)}))
        except Exception as error:  # nobody foresaw this request: it ends, and not the engine
            traceback.print_exc()
            self.arrived.pop(request.request_id, None)
            self.core.abort_requests([request.request_id])
            why = f"the engine could not take this request: {error!r:.200}"
            self.send(EngineCoreOutputs([EngineCoreOutput(request.request_id, [], "error", why)]))

    def call(self, call_id: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Call it and reply with the result; or later, if another thread has to come first."""
        try:
            result = function(*arguments)
            if isinstance(result, Later):
                then = functools.partial(self.call, call_id, lambda: result.then(result.future.result()))
                self.later.append((result.future, then))
            else:
                self.send(Reply(call_id, result))
        except ClientGone:
            raise
        except common.InputError as error:
            self.send(Reply(call_id, error=str(error), bad_input=True))
        except Exception as error:
            self.send(Reply(call_id, error=repr(error)))

    def settle(self) -> None:
        """Go on with what other threads have done since the last look."""
        waiting, self.later = self.later, []
        for future, then in waiting:
            if future.done():
                then()
            else:
                self.later.append((future, then))

    def step(self) -> None:
        """One forward pass for everyone who is scheduled, and one letter about it."""
        start = time.monotonic()
        output = self.scheduler.schedule()
        admitted = self._admissions(output, start)
        sampled = self.core.execute_model(output)
        self.read_mail()  # a request aborted while the model ran is out before its token is looked at
        outputs = self.scheduler.update_from_output(output, sampled)
        stats = self.stats()
        stats.num_scheduled_tokens = output.total_num_scheduled_tokens
        stats.step_seconds = time.monotonic() - start
        runner, preempted = self.core.runner, [request.request_id for request in output.preempted_reqs]
        self.send(EngineCoreOutputs(outputs, stats, getattr(runner, "logprobs", {}), admitted, preempted,
                                    prompt_logprobs=getattr(runner, "prompt_logprobs", {})))  # fmt: skip

    def _admissions(self, output: scheduling.SchedulerOutput, now: float) -> dict[str, Admission]:
        return {r.request_id: Admission(now - self.arrived.pop(r.request_id, now), r.num_cached_tokens,
                                        r.num_external_computed_tokens) for r in output.scheduled_new_reqs}  # fmt: skip

    def stats(self) -> SchedulerStats:
        """How things are: the queues, the pool, and what drafts have brought so far."""
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        usage = 1 - pool.num_free_blocks / (pool.num_blocks - 1)
        *counts, by_place = astuple(scheduler.spec_decoding_stats) if scheduler.drafts else ((),)
        skipped = len(scheduler.requests.keys() & set(scheduler.waiting_for_adapter))
        waiting, fetched = len(scheduler.waiting) - skipped, len(scheduler.waiting_for_remote_kvs)
        return SchedulerStats(len(scheduler.running), waiting, usage, skipped + fetched,
                              spec_decoding=(*counts, *by_place))  # fmt: skip

    def check_idle(self) -> dict[str, int]:
        """For tests: the pool's invariants, and what is still inside."""
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.check()
        tables = self.scheduler.kv_cache_manager.req_to_blocks
        return {"unfinished": len(self.scheduler.requests) + len(self.guided), "tables": len(tables),
                "owned_blocks": pool.num_blocks - 1 - pool.num_free_blocks}  # fmt: skip

    def add_lora(self, name: str, path: str) -> Later:
        """Load an adapter (lesson 12): a thread reads it, and the reply is its fingerprint. Raises InputError."""
        manager = self.engine.lora
        return Later(manager.begin_reading(name, path), functools.partial(manager.add_read, name, path))

    def remove_lora(self, name: str) -> None:
        """Forget an adapter; requests that use it finish with it."""
        self.engine.remove_lora(name)


class ClientGone(Exception):
    """Nobody is left to work for."""


class Mailbox:
    """The engine core's end of a socket: blocking, length-prefixed pickles.

    Both ends are our own processes, so pickle is safe here. On a network it would not be: there, 06c asks for a secret
    first. vLLM sends msgpack over ZeroMQ, which is faster, and does not run what it is sent.
    """

    def __init__(self, sock: socket.socket, loads: Callable[[bytes], Any] = pickle.loads) -> None:
        self.sock, self.buffer, self.loads = sock, bytearray(), loads
        sock.setblocking(True)

    def send(self, letter: Any) -> None:
        """Waits if the other side does not read: the engine cannot run away from its front end."""
        try:
            self.sock.sendall(frame(letter))
        except OSError:
            raise ClientGone from None

    def receive(self, seconds: float | None) -> list[Any]:
        """All letters that are here; waits up to `seconds` for one, None is for ever. Raises ClientGone."""
        letters: list[Any] = []
        while select.select([self.sock], [], [], 0 if letters else seconds)[0]:
            try:
                chunk = self.sock.recv(1 << 18)
            except OSError:
                chunk = b""
            if not chunk:
                raise ClientGone
            self.buffer += chunk
            while len(self.buffer) >= 4 and len(self.buffer) >= (end := 4 + int.from_bytes(self.buffer[:4], "big")):
                letters.append(self.loads(self.buffer[4:end]))
                del self.buffer[:end]
        return letters


def hang_up(sockets: Iterable[socket.socket], patience: float = 5.0) -> None:
    """After the last letter, until it was read, or `patience` seconds: a socket closed while the other side still
    writes fails there, and asyncio then drops what it has read: the letter that says why."""
    stop, left = time.monotonic() + patience, set(sockets)
    for sock in left:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
    while left and (seconds := stop - time.monotonic()) > 0:
        for sock in select.select(left, [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                if sock.recv(1 << 18):
                    continue
            left.remove(sock)


def frame(letter: Any) -> bytes:
    """Four bytes of length, then the letter."""
    body = pickle.dumps(letter, protocol=5)
    return len(body).to_bytes(4, "big") + body


def build_engine(factory: Factory, args: Any, send: Callable[[Any], None]) -> LLMEngine:
    """Call the factory; what it reports on the way goes to the console of the other side."""
    lesson, function = factory
    return getattr(common.lesson(lesson), function)(args, lambda text: send(Progress(text)))


def serve_mailbox(factory: Factory, args: Any, send: Callable[[Any], None], receive: Receive,
                  make_proc: Callable[..., EngineCoreProc] = EngineCoreProc) -> bool:  # fmt: skip
    """Build an engine and work until nobody is left to work for. Returns whether it failed; then it has said so."""
    try:
        try:
            proc = make_proc(build_engine(factory, args, send), send)
            send(proc.ready())
            proc.run_busy_loop(receive)
        except common.InputError as error:
            send(Dead(str(error), bad_input=True))
        except ClientGone:
            raise
        except Exception as error:
            traceback.print_exc()
            send(Dead(f"{type(error).__name__}: {error}"))
        return True
    except ClientGone:
        return False


def run_engine_core(sock: socket.socket, factory: Factory, args: Any) -> None:
    """The engine process from start to end. It ends when its socket closes, so it cannot outlive its front end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and service managers signal the whole group; what that
        signal.signal(number, signal.SIG_IGN)  # means for those inside is the front end's to decide
    gc.freeze()  # a million objects of imported libraries are there to stay: no need to look through them ever again
    mailbox = Mailbox(sock)
    failed = serve_mailbox(factory, args, mailbox.send, mailbox.receive)
    if failed:
        hang_up([sock])
    os._exit(failed)  # at once: nothing is left to clean up, and a broken state would not survive a clean-up


# --- 3. Three places for it -------------------------------------------------------------------------------------------


class MPClient:
    """The engine core in a process: what the event loop sees of it is a socket (`vllm/v1/engine/core_client.py`)."""

    def __init__(self, factory: Factory, args: Any) -> None:
        self.sock, theirs = socket.socketpair()
        spawn = multiprocessing.get_context("spawn")  # a fork would copy our threads' locks and our GPU state
        self.process = spawn.Process(target=run_engine_core, args=(theirs, factory, args), name="EngineCore")
        self.process.start()
        theirs.close()  # the engine's copy is the only one left, so its death closes the connection
        self.writer: asyncio.StreamWriter | None = None
        # If nobody calls `join`. At exit, it comes before multiprocessing's own end, which would wait for the engine.
        self._end = atexit.register(weakref.finalize(self, end_process, self.process, self.sock))

    def send(self, letter: Any) -> None:
        """Never waits: what does not fit into the socket is kept here, and admission control bounds it."""
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(frame(letter))

    async def receive(self) -> Any:
        """The next letter. Raises EngineDeadError when the process is gone."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(sock=self.sock)
        try:
            size = int.from_bytes(await self.reader.readexactly(4), "big")
            return pickle.loads(await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            raise EngineDeadError("the engine process has died") from None

    def close(self) -> None:
        """Hang up: the engine reads the end of its socket, and ends by itself."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if self.writer is not None:
            with contextlib.suppress(RuntimeError):  # its loop may be closed by now
                self.writer.close()

    def join(self) -> None:
        """Wait until it has."""
        self._end()
        atexit.unregister(self._end)


def end_process(process: Any, sock: socket.socket, timeout: float = 5.0) -> None:
    """Hang up and wait for an engine process; one that does not end is killed."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    process.join(timeout)
    process.kill()  # of one that has ended, nothing
    process.join()


class ThreadClient:
    """The engine core on a thread: no copies, no second start of Python, and one interpreter lock for both."""

    ROOM = 64  # letters on the way before the engine waits

    def __init__(self, factory: Factory, args: Any) -> None:
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.outbox: asyncio.Queue = asyncio.Queue()
        self.room = threading.Semaphore(self.ROOM)
        self.loop = asyncio.get_running_loop()
        mailbox = (factory, args, self._post, self._receive)
        self.thread = threading.Thread(target=serve_mailbox, args=mailbox, daemon=True, name="EngineCore")
        self.thread.start()
        atexit.register(self.join)  # if nobody calls it: Python would abort on a thread that still computes

    def _post(self, letter: Any) -> None:
        self.room.acquire()
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self.loop.call_soon_threadsafe(self.outbox.put_nowait, letter)

    def _receive(self, seconds: float | None) -> list[Any]:
        letters: list[Any] = []
        with contextlib.suppress(queue.Empty):
            while True:
                letters.append(self.inbox.get(timeout=0 if letters else seconds))
        if None in letters:
            raise ClientGone
        return letters

    def send(self, letter: Any) -> None:
        self.inbox.put(letter)

    async def receive(self) -> Any:
        letter = await self.outbox.get()
        self.room.release()
        return letter

    def close(self) -> None:
        self.inbox.put(None)
        for _ in range(self.ROOM):
            self.room.release()

    def join(self, timeout: float = 5.0) -> None:
        self.close()
        self.thread.join(timeout)
        atexit.unregister(self.join)


class InprocClient:
    """The engine core on the event loop itself: every step is a time in which nothing else happens."""

    def __init__(self, factory: Factory, args: Any) -> None:
        self.outbox: collections.deque = collections.deque()
        self.proc = EngineCoreProc(build_engine(factory, args, self.outbox.append), self.outbox.append)
        self.outbox.append(self.proc.ready())
        self.mail = asyncio.Event()

    def send(self, letter: Any) -> None:
        self.proc.handle([letter])
        self.outbox.append(EngineCoreOutputs(scheduler_stats=self.proc.stats()))
        self.mail.set()

    async def receive(self) -> Any:
        """One step of the core, in the caller's own loop, if nothing lies in the outbox."""
        await asyncio.sleep(0)  # between two steps, everybody else gets one turn
        while not self.outbox:
            self.proc.settle()
            if self.outbox:
                continue
            if self.proc.scheduler.has_unfinished_requests():
                self.proc.step()
            else:
                self.mail.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.mail.wait(), self.proc.patience)
        return self.outbox.popleft()

    def close(self) -> None: ...

    def join(self, timeout: float = 0.0) -> None: ...


CLIENTS = {"process": MPClient, "thread": ThreadClient, "event-loop": InprocClient}


# --- 4. The front end: lesson 04b's engine without its core -----------------------------------------------------------


class CoreMailbox:
    """Stands where lesson 04b's `LLMEngine` has its core, and writes letters instead of computing."""

    def __init__(self, send: Callable[[Any], None], max_model_len: int) -> None:
        self.send, self.max_model_len = send, max_model_len
        self.runner = self.scheduler = self.config = self  # the parts of a core that the front end looks into
        self.outputs: list[EngineCoreOutput] = []
        self.logprobs: dict[str, dict] = {}
        self.prompt_logprobs: dict[str, list] = {}

    def check_request(self, request: Request) -> None:
        """All that can be wrong with a request is known here: the pool holds at least one of `max_model_len`."""
        if error := scheduling.prompt_length_error(request.num_prompt_tokens, self.max_model_len):
            raise common.InputError(error)

    def add_request(self, request: Request) -> None:
        self.send((EngineCoreRequestType.ADD, request))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.send((EngineCoreRequestType.ABORT, list(request_ids)))

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        self.abort_requests(request_ids)  # a stop string was found in the text: to the core, that is an abort

    def step(self) -> list[EngineCoreOutput]:
        """What the last letter brought."""
        outputs, self.outputs = self.outputs, []
        return outputs


class FrontEnd(LLMEngine):
    """vLLM's `InputProcessor` and `OutputProcessor`: lesson 04b's engine without the model and its core."""

    def __init__(self, config: llama.LlamaConfig, tokenizer: llama.Tokenizer, send: Callable[[Any], None],
                 max_model_len: int) -> None:  # fmt: skip
        self.model = SimpleNamespace(config=config)
        self.tokenizer, self.token_bytes = tokenizer, offline.TokenBytes(tokenizer)
        self.core = CoreMailbox(send, max_model_len)
        self.sequences: dict[str, Any] = {}
        self.callers: dict[str, Any] = {}

    def _own_name(self, request_id: str) -> str:
        """Letters about a request are on their way when it is aborted, and a caller may use its name again at once: the
        namesake must not get them. vLLM: `InputProcessor.assign_request_id`."""
        return f"{request_id}-{uuid.uuid4().hex[:8]}"

    def process_outputs(self, letter: EngineCoreOutputs, outputs: list[EngineCoreOutput]) -> list[RequestOutput]:
        """Token ids of some sequences into news for their callers."""
        for request_id, admission in letter.admitted.items():
            if sequence := self.sequences.get(request_id):
                sequence.request.num_cached_tokens = admission.num_cached_tokens
        self.core.outputs, self.core.logprobs = outputs, letter.logprobs
        self.core.prompt_logprobs = letter.prompt_logprobs
        return self.step()


class RequestOutputCollector:
    """Where one caller's news wait for it: at most one item, which grows (`vllm/v1/engine/output_processor.py`).

    The producer never waits and the memory of a stalled reader is bounded by its text.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.output: RequestOutput | Exception | None = None
        self.ready = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        """Keep one output: a second one is merged into it, an error takes its place. Never waits."""
        if self.output is None or isinstance(output, Exception):
            self.output = output
        elif isinstance(self.output, RequestOutput):
            merge_outputs(self.output, output)
        self.ready.set()

    def get_nowait(self) -> RequestOutput | None:
        """All that is new, if anything is; raises what was put as an exception."""
        output, self.output = self.output, None
        self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output

    async def get(self) -> RequestOutput:
        while self.output is None:
            await self.ready.wait()
        return self.get_nowait()


def merge_outputs(old: RequestOutput, new: RequestOutput) -> None:
    """Two pieces of a stream into one. With n > 1, each answer goes on where it was."""
    old.finished, old.num_cached_tokens = new.finished, new.num_cached_tokens
    old.prompt_logprobs = old.prompt_logprobs or new.prompt_logprobs
    old.kv_transfer_params = new.kv_transfer_params
    for piece in new.outputs:
        for have in old.outputs:
            if have.index == piece.index:
                have.text += piece.text
                have.token_ids += piece.token_ids
                if piece.logprobs is not None:
                    have.logprobs = (have.logprobs or []) + piece.logprobs
                have.cumulative_logprob = piece.cumulative_logprob
                have.finish_reason, have.stop_reason = piece.finish_reason, piece.stop_reason
                break
        else:
            old.outputs.append(piece)


class AdmissionControl:
    """How many sequences may be inside. Waiting longer than anybody wants to wait is no service (`check_admission`)."""

    def __init__(self, max_num_queued_reqs: int | None = None) -> None:
        self.max_num_queued_reqs = max_num_queued_reqs  # None: no bound
        self.num_rejected, self.num_held, self.closed = 0, 0, False

    @contextlib.contextmanager
    def hold(self, num_inside: int, n: int) -> Iterator[None]:
        """Places for `n` sequences that cost something already, but are not with the engine yet. They are free again
        at the end: who goes on to the engine does so without an await.

        No more than half of all places are held, or who costs nothing would find none. Raises QueueOverflowError.
        """
        self.check(num_inside, n)
        half = None if self.max_num_queued_reqs is None else (self.max_num_queued_reqs + 1) // 2
        if half is not None and self.num_held and self.num_held + n > half:
            self.num_rejected += n
            raise QueueOverflowError(
                f"the server is busy: it compiles what {self.num_held} sequences must match, and at most half of "
                f"max_num_queued_reqs {self.max_num_queued_reqs} may wait for that; try again later"
            )
        self.num_held += n
        try:
            yield
        finally:
            self.num_held -= n

    def check(self, num_inside: int, n: int = 1) -> None:
        """Raises QueueOverflowError if `n` more would be too many, or nobody new is let in."""
        num_inside += self.num_held
        if self.closed:
            raise QueueOverflowError("the server is shutting down")
        if self.max_num_queued_reqs is not None and num_inside + n > self.max_num_queued_reqs:
            self.num_rejected += n
            raise QueueOverflowError(f"the server is full: {num_inside} sequences of max_num_queued_reqs "
                                     f"{self.max_num_queued_reqs} are inside; try again later")  # fmt: skip


class AsyncLLM:
    """`generate()` for many callers at once, from one event loop (`vllm/v1/engine/async_llm.py`)."""

    CHUNK = 128  # sequences detokenized before other tasks get a turn (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)
    sampling_defaults = offline.SamplingDefaults()

    def __init__(self, client: Any, ready: EngineCoreReady, front: FrontEnd, max_num_queued_reqs: int | None = None,
                 stat_logger: Any = None) -> None:  # fmt: skip
        self.client, self.ready, self.front, self.stat_logger = client, ready, front, stat_logger
        self.admission = AdmissionControl(max_num_queued_reqs)
        self.collectors: dict[str, RequestOutputCollector] = {}
        self.replies: dict[int, asyncio.Future] = {}
        self.dead: EngineDeadError | None = None
        self.died = asyncio.Event()
        self.output_handler = asyncio.create_task(self._output_handler(client, weakref.ref(self)))
        for end in (client.close, self.output_handler.cancel):  # when it is dropped without `shutdown`
            weakref.finalize(self, end).atexit = False

    @classmethod
    async def start(
        cls, factory: Factory, args: Any, folder: Path, place: str | Callable = "process",
        on_progress: Callable[[str], None] = lambda text: None, **options: Any,
    ) -> AsyncLLM:  # fmt: skip
        """Start an engine core in its place and wait until it is up. `folder` has the tokenizer and the configuration.
        A `place` that is no name makes the client itself (companion 06c: many engines).

        Raises InputError if the engine refuses its arguments, EngineDeadError if it fails otherwise.
        """
        client = (CLIENTS[place] if isinstance(place, str) else place)(factory, args)
        try:
            source = getattr(args, "generation_config", "auto")
            config = llama.LlamaConfig.from_folder(folder, True, source)
            override = getattr(args, "override_generation_config", None)
            defaults = offline.SamplingDefaults.of(folder, source, override)
            tokenizer = llama.Tokenizer(folder)
            while not isinstance(letter := await client.receive(), EngineCoreReady):
                if isinstance(letter, Dead):
                    raise (common.InputError if letter.bad_input else EngineDeadError)(letter.error)
                on_progress(letter.text)
            llm = cls(client, letter, FrontEnd(config, tokenizer, client.send, letter.max_model_len), **options)
            llm.sampling_defaults = defaults
            return llm
        except BaseException:
            client.close()
            await asyncio.to_thread(client.join)
            raise

    # -- requests --

    @property
    def num_unfinished(self) -> int:
        """Sequences inside, waiting or running; n answers to one prompt are n."""
        return len(self.front.sequences)

    def add_request(self, request_id: str, prompt: offline.Prompt, params: SamplingParams, *, stream: bool = False,
                    **about: Any) -> RequestOutputCollector:  # fmt: skip
        """Hand a request to the engine; its news come to the collector. Never waits.

        Raises InputError, QueueOverflowError or EngineDeadError; then nothing was added. Whoever gets a collector
        calls `abort` in the end, whatever happened.
        """
        if self.dead:
            raise self.dead
        try:
            self.admission.check(self.num_unfinished, params.n)
        except QueueOverflowError:
            if self.stat_logger:
                self.stat_logger.record_rejection(params.n)
            raise
        self.front.add_request(request_id, prompt, params, stream=stream, **about)
        collector = self.collectors[request_id] = RequestOutputCollector(request_id)
        return collector

    async def outputs(self, collector: RequestOutputCollector) -> AsyncIterator[RequestOutput]:
        """Everything that comes for a request, to its end."""
        try:
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            if self.collectors.get(collector.request_id) is collector:  # else over, or another's name
                self.abort([collector.request_id])

    async def generate(self, request_id: str, prompt: offline.Prompt, params: SamplingParams, *, stream: bool = False,
                       **about: Any) -> AsyncIterator[RequestOutput]:  # fmt: skip
        """`add_request` and `outputs` in one. Leaving the loop early aborts the request."""
        collector = self.add_request(request_id, prompt, params, stream=stream, **about)
        async with contextlib.aclosing(self.outputs(collector)) as outputs:
            async for output in outputs:
                yield output

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests as they stand, and have the engine free their blocks. Finished and unknown ones are passed over.
        Callers that still read get what there is, with finish_reason "abort"."""
        for request_id in list(request_ids):
            collector = self.collectors.pop(request_id, None)
            if caller := self.front.callers.get(request_id):
                sequences = [self.front.sequences[name] for name in caller.unfinished]
                outputs = [*caller.outputs.values(), *(sequence.completion("abort", None) for sequence in sequences)]
                output = RequestOutput(request_id, caller.prompt, caller.prompt_token_ids, outputs, True,
                                       caller.num_cached_tokens)  # fmt: skip
                if collector:
                    collector.put(output)
                if self.stat_logger:
                    self.stat_logger.record_abort(sequences)
                    self.stat_logger.record_finished(output)  # of n answers, some may have been complete
                self.front.abort_request([request_id])

    def finish_all(self) -> None:
        """End every request as it stands."""
        self.abort(self.front.callers)

    # -- what the engine says --

    @staticmethod
    async def _output_handler(client: Any, engine: weakref.ref[AsyncLLM]) -> None:
        """While this waits for a letter it does not keep the engine: whoever drops that ends it."""
        try:
            while True:
                letter = await client.receive()
                if engine():
                    await engine()._read(letter)
        except Exception as error:
            if not isinstance(error, EngineDeadError):  # a defect of the front end: better dead than silent
                traceback.print_exc()
                error = EngineDeadError(f"the output handler failed: {error!r}")
            if engine():
                engine()._fail(error)

    async def _read(self, letter: Any) -> None:
        if isinstance(letter, EngineCoreOutputs):
            await self._deliver(letter)
        elif isinstance(letter, Reply) and (future := self.replies.pop(letter.call_id, None)) and not future.done():
            future.set_result(letter)
        elif isinstance(letter, Dead):
            raise EngineDeadError(letter.error)

    async def _deliver(self, letter: EngineCoreOutputs) -> None:
        if self.stat_logger:
            self.stat_logger.record(letter, self.front.sequences)
        for start in range(0, len(letter.outputs) or 1, self.CHUNK):
            if start:
                await asyncio.sleep(0)
            for output in self.front.process_outputs(letter, letter.outputs[start : start + self.CHUNK]):
                if collector := self.collectors.get(output.request_id):
                    collector.put(output)
                if self.stat_logger:
                    self.stat_logger.record_finished(output)
        for name, why in letter.refused.items():
            if sequence := self.front.sequences.get(name):
                request_id = sequence.caller.request_id
                self.front.abort_request([request_id])
                if collector := self.collectors.get(request_id):
                    collector.put(common.InputError(why))

    def _fail(self, error: EngineDeadError) -> None:
        """The engine is dead: everybody who waits hears of it now."""
        self.dead = error
        self.front.sequences.clear(), self.front.callers.clear()
        for collector in self.collectors.values():
            collector.put(EngineDeadError(str(error)))
        self._no_more_replies(error)
        self.died.set()

    def _no_more_replies(self, error: EngineDeadError) -> None:
        for future in self.replies.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))

    # -- its state --

    async def call_utility(self, name: str, *arguments: Any) -> Any:
        """Have the engine call one of its utilities, between two steps. Raises InputError if it refuses."""
        if self.dead or self.output_handler.done():
            raise self.dead or EngineDeadError("the engine was shut down")
        call_id = id(future := asyncio.get_running_loop().create_future())
        self.replies[call_id] = future
        self.client.send((EngineCoreRequestType.UTILITY, (call_id, name, *arguments)))
        reply = await future
        if reply.error:
            raise (common.InputError if reply.bad_input else RuntimeError)(reply.error)
        return reply.result

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Let requests finish for up to `timeout` seconds, then end them, then the engine. New ones are refused."""
        stop, self.admission.closed = time.monotonic() + timeout, True
        while self.front.callers and time.monotonic() < stop and not self.dead:
            await asyncio.sleep(0.02)
        self.finish_all()
        self.output_handler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.output_handler
        self._no_more_replies(EngineDeadError("the engine was shut down"))
        self.client.close()
        await asyncio.to_thread(self.client.join)


# --- 5. Measuring the loop --------------------------------------------------------------------------------------------


async def heartbeat(lateness: list[float], interval: float = 0.002) -> None:
    """Wake up every `interval` seconds, and note how late that was: what every task on this loop suffers."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval
        await asyncio.sleep(interval)
        lateness.append(loop.time() - due)


async def serve_clients(llm: AsyncLLM, prompts: Sequence[list[int]], params: SamplingParams) -> dict[str, Any]:
    """All prompts at once, streamed: texts, seconds, and how late the loop was meanwhile."""
    lateness, first = [], []

    async def client(i: int) -> str:
        text = ""
        async for output in llm.generate(f"client-{i}", {"prompt_token_ids": prompts[i]}, params, stream=True):
            if not text:
                first.append(time.perf_counter() - start)
            text += output.outputs[0].text
        return text

    beat = asyncio.create_task(heartbeat(lateness))
    await asyncio.sleep(0.02)
    lateness.clear()
    start = time.perf_counter()
    texts = await asyncio.gather(*map(client, range(len(prompts))))
    seconds = time.perf_counter() - start
    await asyncio.sleep(0)
    beat.cancel()
    return {"texts": texts, "seconds": seconds, "lateness": lateness, "first": first}


def wake_threads(consumers: int, rounds: int) -> tuple[float, float]:
    """A thread per stream, each waiting on its queue: seconds to create them, and per token handed over."""
    queues, done = [queue.SimpleQueue() for _ in range(consumers)], threading.Semaphore(0)

    def consume(mine: queue.SimpleQueue) -> None:
        while mine.get() is not None:
            done.release()

    start = time.perf_counter()
    threads = [threading.Thread(target=consume, args=(q,), daemon=True) for q in queues]
    for thread in threads:
        thread.start()
    created = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(rounds):
        for q in queues:
            q.put(1)
        for _ in queues:
            done.acquire()
    seconds = (time.perf_counter() - start) / rounds / consumers
    for q in queues:
        q.put(None)
    for thread in threads:
        thread.join()
    return created, seconds


def wake_tasks(consumers: int, rounds: int) -> tuple[float, float]:
    """A task per stream, each waiting on its collector: seconds to create them, and per token handed over."""

    async def consume(mine: RequestOutputCollector) -> None:
        while not (await mine.get()).finished:
            pass

    async def run() -> tuple[float, float]:
        start = time.perf_counter()
        collectors = [RequestOutputCollector(str(i)) for i in range(consumers)]
        tasks = [asyncio.create_task(consume(collector)) for collector in collectors]
        await asyncio.sleep(0)
        created = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(rounds):
            for collector in collectors:
                collector.put(RequestOutput("", None, [], [], False))
            while any(collector.output for collector in collectors):
                await asyncio.sleep(0)
        seconds = (time.perf_counter() - start) / rounds / consumers
        for collector in collectors:
            collector.put(RequestOutput("", None, [], [], True))
        await asyncio.gather(*tasks)
        return created, seconds

    return asyncio.run(run())


# --- The simulation behind the widget ---------------------------------------------------------------------------------

HANDOFFS = {"collector": "merge what waits", "queue": "keep every piece", "bounded queue": "make the engine wait"}
CHOICES = {"handoff": list(HANDOFFS), "step_ms": [5, 10, 20, 40], "read_ms": [1, 20, 100, 400], "tokens": [8, 16, 32]}
WIDGET_DEFAULT = {"handoff": "collector", "step_ms": 20, "read_ms": 100, "tokens": 32}
BOUND = 4  # pieces in the bounded queue


def simulate(params: dict) -> dict:
    """An engine makes a token every `step_ms`; its reader needs `read_ms` for whatever it is given. Times in ms.

    Raises InputError.
    """
    params = common.checked(params, CHOICES)
    handoff, step, read, tokens = (params[name] for name in CHOICES)
    collector, pieces = RequestOutputCollector("widget"), collections.deque()

    def put(token: int) -> None:
        news = RequestOutput("widget", None, [], [offline.CompletionOutput(0, "x", [token])], token == tokens - 1)
        collector.put(news) if handoff == "collector" else pieces.append(news)

    def take() -> list[int]:
        news = collector.get_nowait() if handoff == "collector" else pieces.popleft()
        return news.outputs[0].token_ids

    def waiting() -> tuple[int, int]:
        """Items, and tokens in them."""
        if handoff == "collector":
            return (1, len(collector.output.outputs[0].token_ids)) if collector.output else (0, 0)
        return len(pieces), len(pieces)

    now = reader_free = produced = delivered = 0
    next_step, put_at, reads, most_items = step, [], [], 0
    while delivered < tokens:
        full = handoff == "bounded queue" and len(pieces) == BOUND
        if produced < tokens and not full and (next_step <= reader_free or waiting()[0] == 0):
            now = max(now, next_step)
            put(produced)
            put_at.append(now)
            produced, next_step = produced + 1, now + step
            most_items = max(most_items, waiting()[0])
        else:
            now = max(now, reader_free)
            got = take()
            reads.append({"at": now, "tokens": len(got), "left": waiting()[1]})
            reader_free, delivered = now + read, delivered + len(got)
    read_at = [read["at"] for read in reads for _ in range(read["tokens"])]  # of each token
    return {
        "put_at": put_at, "reads": reads, "engine_done": put_at[-1], "reader_done": reader_free,
        "most_items": most_items, "engine_waited": put_at[-1] - step * tokens,
        "oldest": max(read - put for read, put in zip(read_at, put_at)),
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    reads, tokens = trace["reads"], len(trace["put_at"])
    shown = [f"{read['at']} ms: {read['tokens']}" for read in reads[:6]]
    return "\n".join([
        f"{tokens} tokens; the engine made the last at {trace['engine_done']} ms, having waited "
        f"{trace['engine_waited']} ms for its reader",
        f"the reader was done at {trace['reader_done']} ms, after {len(reads)} reads",
        f"most items waiting: {trace['most_items']}; the oldest news read were {trace['oldest']} ms old",
        f"tokens in each read: {', '.join(shown)}{', …' if len(reads) > 6 else ''}",
    ])  # fmt: skip


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

# vLLM v0.5.3, Llama-3-8B on an H100: shares of time by the v0.6.0 blog of September 2024.
V053 = {"api_server": 33, "scheduling": 29, "gpu": 38}
THREAD_STACK = 8 << 20  # bytes reserved for a thread's stack on Linux, by default


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    slow = {}
    for handoff in HANDOFFS:
        trace = simulate({**WIDGET_DEFAULT, "handoff": handoff})
        slow[handoff.replace(" ", "_")] = {
            name: trace[name] for name in ("engine_done", "reader_done", "most_items", "engine_waited", "oldest")
        } | {"reads": len(trace["reads"]), "most_tokens": max(read["tokens"] for read in trace["reads"])}  # fmt: skip
    total = sum(V053.values())
    return {
        "slow_reader": slow,
        "step_ms": WIDGET_DEFAULT["step_ms"], "read_ms": WIDGET_DEFAULT["read_ms"], "bound": BOUND,
        "v053": {
            **V053, "engine_off_loop": total / max(V053["api_server"], V053["scheduling"] + V053["gpu"]),
            "all_overlap": total / max(V053.values()), "gpu_twice_as_fast": total / (total - V053["gpu"] / 2),
        },
        "stacks_gb": 1000 * THREAD_STACK / 1e9, "chunk": AsyncLLM.CHUNK, "room": ThreadClient.ROOM,
        "blocked": {str(ms): {"share": ms / (ms + 1), "heartbeats": ms // 2} for ms in (20, 50)},
        "events_per_second": {"clients": 256, "itl_ms": 20, "tokens": 256 * 50, "budget_us": 1e6 / (256 * 50)},
    }  # fmt: skip


# --- Figure -----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """Three engines' letters on one event loop, and three ways to treat a slow reader."""
    figure, axes = common.new_figure(8.0, 5.2, nrows=2, height_ratios=[1.15, 1])
    colors, ax = common.COLORS, axes[0]
    step, python = 20, 5  # milliseconds: a step, and the part of it that holds the interpreter lock
    for row, name in enumerate(("engine on\nthe event loop", "engine on\na thread", "engine in\na process")):
        for i in range(4):
            start = i * (step + 2)
            if row == 0:
                ax.broken_barh([(start, step)], (row - 0.36, 0.72), facecolor=colors["red"], alpha=0.85)
                ax.broken_barh([(start + step, 2)], (row - 0.36, 0.72), facecolor=colors["green"])
            else:
                ax.broken_barh([(start, step + 2)], (row + 0.04, 0.32), facecolor=colors["blue"], alpha=0.55)
                ax.broken_barh([(start, step + 2)], (row - 0.36, 0.36), facecolor=colors["light"])
                ax.broken_barh([(start + step, 2)], (row - 0.36, 0.36), facecolor=colors["green"])
                if row == 1:
                    ax.broken_barh([(start, python)], (row - 0.36, 0.72), facecolor=colors["red"], alpha=0.85)
        ax.text(-1, row, name, ha="right", va="center")
    for label, color in (("nobody else can run", "red"), ("clients are served", "green"),
                         ("the engine computes", "blue"), ("the loop is free", "light")):  # fmt: skip
        ax.barh(-9, 1, color=colors[color], alpha=0.55 if color == "blue" else 1, label=label)
    ax.set(xlim=(0, 88), ylim=(2.55, -0.55), yticks=[], xlabel="milliseconds (steps of 20 ms, 5 of them Python)")
    ax.spines["left"].set_visible(False)
    ax.set_title("Where the engine runs decides what the event loop can do", pad=22)
    ax.legend(ncols=4, loc="lower left", bbox_to_anchor=(-0.14, 0.99), columnspacing=1.1, handlelength=1.1, fontsize=9)

    ax = axes[1]
    for handoff, color in zip(HANDOFFS, ("blue", "orange", "red")):
        trace = simulate({**WIDGET_DEFAULT, "handoff": handoff})
        made, read = trace["put_at"], [r["at"] for r in trace["reads"]]
        backlog = [sum(at <= t for at in made) - sum(r["tokens"] for r in trace["reads"] if r["at"] <= t)
                   for t in range(0, 3400, 10)]  # fmt: skip
        ax.plot(range(0, 3400, 10), backlog, color=colors[color], label=f"{handoff}: {HANDOFFS[handoff]}")
        ax.plot(trace["engine_done"], 0, "^", color=colors[color], clip_on=False)
        ax.plot(read[-1], 0, "o", color=colors[color], clip_on=False, markersize=5)
    ax.set(xlim=(0, 3400), ylim=(0, 28), xlabel="milliseconds (▲ engine done, ● last read)",
           ylabel="tokens not read yet")  # fmt: skip
    ax.set_title("A reader that needs 100 ms, a token every 20 ms")
    ax.legend(loc="upper right")
    return [common.save_figure(figure, folder, "06e_loop")]


# --- The story --------------------------------------------------------------------------------------------------------

TEXTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "Water boils at",
         "To make bread you need flour,"]  # fmt: skip
MAX_MODEL_LEN = 512


def make_small_engine(args: dict[str, Any], report: Callable[[str], None] = lambda text: None) -> LLMEngine:
    """The factory of this script's own demonstration: lesson 04b's engine."""
    report("loading the model")
    model, tokenizer = load_once(args["model"])
    return LLMEngine(model, tokenizer, max_model_len=MAX_MODEL_LEN, max_num_seqs=32, num_gpu_blocks_override=257,
                     seed=args["seed"])  # fmt: skip


load_once = functools.cache(llama.load)  # the engines of one process share their weights


def of_lateness(lateness: Sequence[float]) -> dict[str, float]:
    """Milliseconds: median, 99th percentile and the worst."""
    ordered = sorted(lateness) or [0.0]
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3  # noqa: E731
    return {"median_ms": at(0.5), "p99_ms": at(0.99), "max_ms": ordered[-1] * 1e3}


async def measure_place(place: str, args: argparse.Namespace, prompts: Sequence[list[int]], params: SamplingParams,
                        rounds: int) -> dict[str, Any]:  # fmt: skip
    """Serve the same clients from an engine in one place."""
    start = time.perf_counter()
    llm = await AsyncLLM.start((KEY, "make_small_engine"), {"model": args.model, "seed": args.seed},
                               llama.model_folder(args.model), place)  # fmt: skip
    try:
        started = time.perf_counter() - start
        await serve_clients(llm, prompts[:2], dataclasses.replace(params, max_tokens=3))  # warm up
        runs = [await serve_clients(llm, prompts, params) for _ in range(rounds)]
        late = [x for run in runs for x in run["lateness"]]
        tokens = len(prompts) * params.max_tokens
        assert (await llm.call_utility("check_idle"))["owned_blocks"] == 0
        return {"texts": runs[0]["texts"], "start_s": started, **of_lateness(late),
                "tokens_per_second": tokens / statistics.median(run["seconds"] for run in runs),
                "first_ms": statistics.median(x for run in runs for x in run["first"]) * 1e3}  # fmt: skip
    finally:
        await llm.shutdown()


async def kill_the_engine(args: argparse.Namespace, prompts: Sequence[list[int]]) -> tuple[int, float]:
    """Kill the engine process while everybody waits. Returns how many heard of it, and seconds until the last did."""
    llm = await AsyncLLM.start((KEY, "make_small_engine"), {"model": args.model, "seed": args.seed},
                               llama.model_folder(args.model))  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)  # nobody finishes before the blow

    async def client(i: int) -> float:
        with contextlib.suppress(EngineDeadError):
            async for _ in llm.generate(str(i), {"prompt_token_ids": prompts[i]}, params):
                raise common.CheckFailed("a request finished although the engine was killed")
        return time.perf_counter()

    tasks = [asyncio.create_task(client(i)) for i in range(len(prompts))]
    await asyncio.sleep(0.3)
    killed = time.perf_counter()
    llm.client.process.kill()
    heard = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    await llm.shutdown()
    return len(heard), max(heard) - killed


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    p.add_argument("--clients", type=common.number(int, 1, 32), default=8, metavar="N",
                   help="streams at once in step 1 (default %(default)s)")  # fmt: skip
    p.add_argument("--place", choices=("all", *CLIENTS), default="all", help="where the engine runs in step 1")
    p.add_argument("--handoff", choices=tuple(HANDOFFS), default="collector", help="of step 2 (default %(default)s)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine = common.start(args)
    numbers, bench = facts(), {}
    llama.check_context(args.model, MAX_MODEL_LEN)

    common.heading(f"1. Where the engine runs: {args.clients} stream{'s' * (args.clients > 1)}, a heartbeat every 2 ms")
    tokenizer = llama.Tokenizer(llama.model_folder(args.model))
    prompts = [tokenizer.encode(TEXTS[i % len(TEXTS)]) for i in range(args.clients)]
    params = SamplingParams(temperature=0, max_tokens=48 if args.bench else 8, ignore_eos=True)
    reference = answer_blocking(make_small_engine({"model": args.model, "seed": args.seed}), prompts[:2], params)
    rows, bench["place"] = [], {}
    for place in CLIENTS if args.place == "all" else [args.place]:
        found = asyncio.run(measure_place(place, args, prompts, params, 3 if args.bench else 1))
        who = "the first two clients" if len(reference) > 1 else "the client"
        common.check_equal(f"{place}: {who} read what a blocking loop wrote",
                           found.pop("texts")[: len(reference)], reference)  # fmt: skip
        bench["place"][place.replace("-", "_")] = found
        rows.append([place, f"{found['start_s']:.1f} s", f"{found['tokens_per_second']:.0f}",
                     *(f"{found[name]:.1f} ms" for name in ("median_ms", "p99_ms", "max_ms"))])  # fmt: skip
    common.table(["engine in / on", "start", "tokens/s", "loop late: median", "P99", "worst"], rows)

    common.heading("2. A reader that is slower than the engine")
    common.say(describe(simulate({**WIDGET_DEFAULT, "handoff": args.handoff})))
    common.table(["hand-off", "engine done", "reader done", "most items", "oldest news"], [
        [name, f"{x['engine_done']} ms", f"{x['reader_done']} ms", x["most_items"], f"{x['oldest']} ms"]
        for name, x in zip(HANDOFFS, numbers["slow_reader"].values())
    ])  # fmt: skip

    streams, rounds = (1024, 20) if args.bench else (256, 5)
    common.heading(f"3. {streams} waiting streams: a thread each, or a task each")
    rows = []
    for name, wake in (("threads", wake_threads), ("tasks", wake_tasks)):
        created, seconds = wake(streams, rounds)
        bench[name] = {"streams": streams, "create_us": created / streams * 1e6, "hand_over_us": seconds * 1e6}
        rows.append([name, f"{created / streams * 1e6:.0f} µs", f"{seconds * 1e6:.1f} µs"])
    common.table(["", "to create one", "to hand one a token"], rows)

    if args.bench or args.place == "process":
        common.heading("4. The engine dies while everybody waits")
        heard, seconds = asyncio.run(kill_the_engine(args, prompts))
        common.check_equal("every client got an error", heard, len(prompts))
        common.say(f"the last of them {seconds * 1e3:.0f} ms after the kill")
        bench["death_ms"] = seconds * 1e3

    draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": numbers, "bench": bench})


if __name__ == "__main__":
    common.run(main)

"""06c2 · Engine groups: many engines behind many API servers. The other lower half of lesson 06c.

Which engine gets a request (vLLM's score, or where its prefix is cached), who knows how long the engines' queues are,
and the sockets between API servers and engines: on one machine, or with engines that dial in from others. A connection
for each pair; who creates them makes no difference from then on. The story and the tests belong to 06c.

Read for this: vLLM 0.32 `v1/engine/core_client.py`, `v1/engine/coordinator.py`, `v1/engine/utils.py`,
`entrypoints/cli/serve.py`; Zheng et al. 2024 (SGLang: cache-aware routing).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import asyncio
import atexit
import contextlib
import dataclasses
import enum
import functools
import gc
import io
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from engine import output as engine_output
from engine import request as engine_request
from engine.core.kv_cache_manager import ROOT_HASH, block_extra_keys, hash_block_tokens

scheduling = common.lesson("04_continuous_batching")
tensor_parallel = common.lesson("05c_tensor_parallel")
from engine.parallel import executors, handshake

serving = common.lesson("06_serving")
async_engine, offline = serving.async_engine, serving.offline
Request, EngineCoreRequestType = scheduling.Request, async_engine.EngineCoreRequestType
EngineCoreOutputs, ParallelEngineCoreProc = async_engine.EngineCoreOutputs, executors.ParallelEngineCoreProc
Factory = async_engine.Factory
say_aloud = functools.partial(print, flush=True)


# --- 1. Data parallel: which engine gets a request --------------------------------------------------------------------


class LoadBalancer:
    """vLLM's choice among engines (`DPLBAsyncMPClient.get_core_engine_for_request`).

    score = max(client_count · inflight, waiting + running) + 6 · waiting · max(0, kv_cache_usage − 0.5)

    `inflight` is this client's own count and exact; the rest is the coordinator's latest word. A queue before a full
    cache drains slowly: at 100 % usage, each waiting request counts for three more.
    """

    def __init__(self, num_engines: int, client_index: int = 0, client_count: int = 1) -> None:
        self.counts: list[list[float]] = [[0, 0, 0.0] for _ in range(num_engines)]  # waiting, running, KV usage
        self.inflight = [0] * num_engines
        self.client_count, self.start = client_count, num_engines * client_index // client_count

    def score(self, engine: int) -> float:
        waiting, running, kv_cache_usage = self.counts[engine]
        load = max(self.client_count * self.inflight[engine], waiting + running)
        return load + waiting * 6.0 * max(0.0, kv_cache_usage - 0.5)

    def choose(self, request: Request) -> int:
        """The engine for a request, which counts as waiting there until the coordinator says otherwise."""
        engine = self.pick(request)
        self.counts[engine][0] += self.client_count
        self.inflight[engine] += 1
        return engine

    def pick(self, request: Request) -> int:
        """The lowest score; whom ties favour goes round."""
        n = len(self.counts)
        order = [(self.start + i) % n for i in range(n)]
        self.start = (self.start + 1) % n
        return min(order, key=self.score)

    def finished(self, engine: int) -> None:
        self.inflight[engine] -= 1


class PrefixAwareBalancer(LoadBalancer):
    """Send a request where its prefix is cached, unless that engine is `max_imbalance` requests behind the best.

    vLLM leaves this to routers in front of it. Like most of them, this one does not ask engines what they have: it
    remembers what it sent where (lesson 05's block hashes), and forgets the oldest when a cache must be full.
    """

    def __init__(self, num_engines: int, client_index: int = 0, client_count: int = 1, *, block_size: int = 16,
                 num_blocks: int = 1 << 14, max_imbalance: float = 4) -> None:  # fmt: skip
        super().__init__(num_engines, client_index, client_count)
        self.block_size, self.num_blocks, self.max_imbalance = block_size, num_blocks, max_imbalance
        self.sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]

    def hashes(self, request: Request) -> list[bytes]:
        """Hashes of the prompt's full blocks, as that engine's prefix cache will have them."""
        parent, found, tokens = ROOT_HASH, [], request.prompt_token_ids
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            extra_keys = block_extra_keys(request, not found)
            parent = hash_block_tokens(parent, tokens[end - self.block_size : end], extra_keys)
            found.append(parent)
        return found

    def pick(self, request: Request) -> int:
        """The engine that was sent the longest matching prefix, unless it is `max_imbalance` behind the idlest."""
        hashes, engines = self.hashes(request), range(len(self.sent))
        matched = [next((i for i, h in enumerate(hashes) if h not in self.sent[e]), len(hashes)) for e in engines]
        by_load = super().pick(request)
        best = max(engines, key=lambda e: (matched[e], -self.score(e)))
        if matched[best] == matched[by_load] or self.score(best) > self.score(by_load) + self.max_imbalance:
            best = by_load
        for block_hash in hashes:
            self.sent[best][block_hash] = None
            self.sent[best].move_to_end(block_hash)
        while len(self.sent[best]) > self.num_blocks:
            self.sent[best].popitem(last=False)
        return best


BALANCERS = {"load": LoadBalancer, "prefix": PrefixAwareBalancer}


# --- 2. Engines, API servers, and the sockets between them ------------------------------------------------------------

LETTER_MODULES = {module.__name__: module for module in (engine_request, engine_output, offline, async_engine)}


class LetterUnpickler(pickle.Unpickler):
    """Unpickles letters and nothing else. `pickle.loads` would call whatever function the other side names, and the
    other side may be a network; here it can name our dataclasses, our enums and `Request`."""

    def find_class(self, module: str, name: str) -> Any:
        """Data classes and enums of our own letters; UnpicklingError for anything else: pickles can call."""
        found = vars(LETTER_MODULES.get(module, object())).get(name) if module in LETTER_MODULES else None
        others = (Request, offline.StepLogprobs, async_engine.Admission)
        if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, (enum.Enum, *others))):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no letter")


def loads(data: bytes) -> Any:
    """A letter out of bytes; UnpicklingError if it is anything else."""
    try:
        return LetterUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a pickle that is none may fail in any way
        raise pickle.UnpicklingError(str(error) or type(error).__name__) from None


MAX_LETTER = 1 << 30  # bytes; a million tokens with the logprobs of their prompts take less


def take_letters(buffer: bytearray) -> Iterator[Any]:
    """The letters that are whole in `buffer`, which keeps the rest. Raises UnpicklingError for what is none, also for
    one that is announced to be longer than MAX_LETTER: nobody collects the bytes of that."""
    while len(buffer) >= 4:
        end = 4 + letter_bytes(buffer[:4])
        if len(buffer) < end:
            return
        letter = loads(bytes(buffer[4:end]))
        del buffer[:end]
        yield letter


def letter_bytes(head: bytes) -> int:
    """The length that the four bytes before a letter announce; UnpicklingError beyond MAX_LETTER."""
    if (size := int.from_bytes(head, "big")) > MAX_LETTER:
        raise pickle.UnpicklingError(f"{size:,} bytes are no letter")
    return size


class Outbox:
    """A socket, and what its reader has not taken yet. Who writes to several readers must not wait for one of them: one
    that has stopped would stop all the others."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.unsent, self.state, self.gone = sock, bytearray(), b"", False
        sock.setblocking(False)

    def fileno(self) -> int:  # `select` takes it as it is
        return self.sock.fileno()

    @property
    def pending(self) -> bool:
        return bool(self.unsent or self.state)

    def put(self, letter: Any, is_state: bool = False) -> None:
        """Send a letter now, or when there is room. Of those that only say how things are, one waits: the last."""
        if is_state:
            self.state = async_engine.frame(letter)
        else:
            self.unsent += self.state + async_engine.frame(letter)
            self.state = b""
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self.pending:
                if not self.unsent:
                    self.unsent, self.state = bytearray(self.state), b""
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # nobody will ever read it
            self.unsent, self.state, self.gone = bytearray(), b"", True


class EngineMailbox:
    """The engine core's end of its sockets: one for every API server process, and one to the coordinator.

    What an API server does not read waits here, and its own requests bound that: it asks for nothing more meanwhile.
    """

    def __init__(self, clients: Sequence[socket.socket], coordinator: socket.socket | None, engine: int) -> None:
        self.clients: dict[int, Outbox] = {index: Outbox(sock) for index, sock in enumerate(clients)}
        self.coordinator, self.engine = coordinator and Outbox(coordinator), engine
        self.buffers = {index: bytearray() for index in self.clients}
        self.owner: dict[str, int] = {}  # request id: the client that sent it
        self.watched: Sequence[Any] = ()  # readable when a worker has died
        self.alive: Callable[[], None] = lambda: None
        self.reported: list[float] = []

    def receive(self, seconds: float | None) -> list[Any]:
        """All letters that are here; waits up to `seconds` for one, None is for ever. Raises ClientGone, or
        ExecutorFailed."""
        letters, stop = [], time.monotonic() + (seconds or 0)
        while self.clients:
            wait = 0 if letters else seconds and max(0.0, stop - time.monotonic())
            readable, writable, _ = select.select([*self.clients.values(), *self.watched], self.pending(), [], wait)
            if not (readable or writable):
                return letters
            if any(x in self.watched for x in readable):
                self.alive()
            for box in writable:
                box.flush()
            for index, box in list(self.clients.items()):
                if box in readable:
                    letters += self._read(index, box.sock)
        raise async_engine.ClientGone

    def pending(self) -> list[Outbox]:
        """Who has not taken all that was sent."""
        return [box for box in (*self.clients.values(), self.coordinator) if box and box.pending]

    def close(self, patience: float = 2.0) -> None:
        """Hang up when all that was sent has been read; after `patience` seconds in any case."""
        stop = time.monotonic() + patience
        while (late := self.pending()) and (wait := stop - time.monotonic()) > 0:
            for box in select.select([], late, [], wait)[1]:
                box.flush()
        async_engine.hang_up(box.sock for box in self.clients.values())

    def _read(self, index: int, sock: socket.socket) -> list[Any]:
        try:
            chunk = sock.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        if not chunk:
            return self._hung_up(index)
        letters: list[Any] = []
        self.buffers[index] += chunk
        try:
            for letter in take_letters(self.buffers[index]):
                letters += self._sort(index, *letter)
        except (pickle.UnpicklingError, TypeError, AttributeError, LookupError):  # no letter: what else will it send?
            return letters + self._hung_up(index)
        return letters

    def _sort(self, index: int, kind: Any, content: Any) -> list[Any]:
        """A client's letter as the engine core takes it; nothing if it is refused here."""
        if kind is EngineCoreRequestType.ADD:
            if self.owner.get(content.request_id, index) != index:
                refused = {content.request_id: f"request_id {content.request_id!r}: is in use"}
                self._send(index, EngineCoreOutputs(refused=refused))
                return []
            self.owner[content.request_id] = index
        elif kind is EngineCoreRequestType.ABORT:
            for request_id in content:
                self.owner.pop(request_id, None)
        elif kind is EngineCoreRequestType.UTILITY:
            content = ((index, content[0]), *content[1:])
        return [(kind, content)]

    def _hung_up(self, index: int) -> list[Any]:
        """An API server is gone, and nobody will read the answers of its requests."""
        del self.clients[index]
        gone = [request_id for request_id, owner in self.owner.items() if owner == index]
        for request_id in gone:
            del self.owner[request_id]
        return [(EngineCoreRequestType.ABORT, gone)] if gone and self.clients else []

    def send(self, letter: Any) -> None:
        """To everybody, to the one who asked, or to each what concerns its requests."""
        if isinstance(letter, async_engine.Reply):
            index, letter.call_id = letter.call_id
            self._send(index, letter)
        elif isinstance(letter, EngineCoreOutputs):
            self._report(letter.scheduler_stats)
            for index, part in self.split(letter).items():
                self._send(index, part, is_state=part is letter)
        else:
            for index in self.clients:
                self._send(index, letter)
        if all(box.gone for box in self.clients.values()):
            raise async_engine.ClientGone

    def split(self, letter: Any) -> dict[int, Any]:
        """A step's outputs by client. A step that brought nobody anything is told to all: it may have emptied us."""
        logprobs, stats = type(letter.logprobs), letter.scheduler_stats  # of one token for each, or of several
        parts: dict[int, Any] = defaultdict(lambda: EngineCoreOutputs(logprobs=logprobs(), scheduler_stats=stats))
        for request_id, admission in letter.admitted.items():
            if (index := self.owner.get(request_id)) is not None:
                parts[index].admitted[request_id] = admission
        for request_id in letter.preempted:
            if (index := self.owner.get(request_id)) is not None:
                parts[index].preempted.append(request_id)
        for request_id, why in letter.refused.items():
            if (index := self.owner.pop(request_id, None)) is not None:
                parts[index].refused[request_id] = why
        for request_id, scores in letter.prompt_logprobs.items():
            if (index := self.owner.get(request_id)) is not None:
                parts[index].prompt_logprobs[request_id] = scores
        for output in letter.outputs:
            if (index := self.owner.get(output.request_id)) is None:
                continue
            parts[index].outputs.append(output)
            if found := letter.logprobs.get(output.request_id):
                parts[index].logprobs[output.request_id] = found
            if output.finish_reason:
                del self.owner[output.request_id]
        return parts if parts or letter.outputs else {index: letter for index in self.clients}

    def _send(self, index: int, letter: Any, is_state: bool = False) -> None:
        if index in self.clients:
            self.clients[index].put(letter, is_state)

    def _report(self, stats: Any) -> None:
        """Tell the coordinator when the queues have changed."""
        if self.coordinator is None or stats is None:
            return
        counts = [stats.num_waiting_reqs + stats.num_skipped_waiting_reqs, stats.num_running_reqs, stats.kv_cache_usage]
        if counts[:2] != self.reported[:2]:
            self.reported = counts
            self.coordinator.put((self.engine, counts), is_state=True)


def run_engine_core(clients: Sequence[socket.socket], coordinator: socket.socket | None, engine: int,
                    factory: Factory, args: Any, threads: int = 0) -> None:  # fmt: skip
    """An engine process from start to end. It ends when the last API server has hung up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if threads and not common.HAS_GPU:
        torch.set_num_threads(threads)
    gc.freeze()  # imported libraries are there to stay
    failed = serve_clients(EngineMailbox(clients, coordinator, engine), factory, args)
    executors.shutdown_all()
    os._exit(failed)


def serve_clients(mailbox: EngineMailbox, factory: Factory, args: Any) -> bool:
    """Build an engine and work for the clients of a mailbox, with an eye on the workers. Returns whether it failed."""

    def make_proc(engine: Any, send: Callable[[Any], None]) -> ParallelEngineCoreProc:
        if executor := getattr(engine.core.runner, "executor", None):
            mailbox.watched, mailbox.alive = executor.sentinels, executor.check_health
        return ParallelEngineCoreProc(engine, send)

    failed = async_engine.serve_mailbox(factory, args, mailbox.send, mailbox.receive, make_proc)
    if failed:
        mailbox.close()
    return failed


class DPCoordinator:
    """Collects the engines' queue lengths and tells all API servers, at most every 100 ms (`v1/engine/coordinator.py`).

    A thread of the process that started the engines. vLLM's is a process, and has a second duty: engines that share a
    mixture of experts must step together, also those that have nothing to do, because the others need their experts.
    """

    INTERVAL = 0.1

    def __init__(self, engines: Sequence[socket.socket], clients: Sequence[socket.socket]) -> None:
        self.mail = {sock: async_engine.Mailbox(sock, loads) for sock in engines}
        self.clients = [Outbox(sock) for sock in clients]
        self.counts: list[list[float]] = [[0, 0, 0.0] for _ in engines]
        self.changed, self.last = False, 0.0

    def note(self, engine: int, counts: list[float]) -> None:
        self.counts[engine], self.changed = counts, True

    def due_in(self, now: float) -> float | None:
        """Seconds until something is published; None if there is no news."""
        return max(0.0, self.last + self.INTERVAL - now) if self.changed else None

    def publish(self, now: float) -> None:
        """Tell every front end how many requests each engine has; front ends that have gone are forgotten."""
        for box in self.clients:
            box.put(self.counts, is_state=True)
        self.clients = [box for box in self.clients if not box.gone]
        self.changed, self.last = False, now

    def run(self) -> None:
        """Until all engines or all clients are gone."""
        while self.mail and self.clients:
            late = [box for box in self.clients if box.pending]
            readable, writable, _ = select.select([*self.mail], late, [], self.due_in(time.monotonic()))
            for box in writable:
                box.flush()
            for sock in readable:
                try:
                    for engine, counts in self.mail[sock].receive(0):
                        self.note(engine, counts)
                except (async_engine.ClientGone, OSError, pickle.UnpicklingError, TypeError, ValueError, LookupError):
                    del self.mail[sock]
            if self.due_in(time.monotonic()) == 0.0:
                self.publish(time.monotonic())


class DPLBClient:
    """What an API server's event loop sees of its engines: a socket to each, and one to the coordinator. It has the
    interface of lesson 06e's clients, so its user cannot tell one engine from sixteen (`DPLBAsyncMPClient`)."""

    def __init__(self, engines: Sequence[socket.socket], coordinator: socket.socket | None, balancer: LoadBalancer,
                 owner: EngineGroup | None = None) -> None:  # fmt: skip
        self.socks, self.coordinator, self.balancer, self.owner = list(engines), coordinator, balancer, owner
        self.inbox: asyncio.Queue | None = None
        self.writers: list[asyncio.StreamWriter] = []
        self.engine_of: dict[str, int] = {}  # request id: where it is, for aborts
        self.ready: dict[int, Any] = {}
        self.stats: dict[int, Any] = {}
        self.replies: dict[int, list[Any]] = defaultdict(list)
        self.readers: list[asyncio.Task] = []

    def send(self, letter: Any) -> None:
        """A new request to the engine with the best score, an abort to its own, anything else to all."""
        kind, content = letter
        if kind is EngineCoreRequestType.ADD:
            engine = self.engine_of[content.request_id] = self.balancer.choose(content)
            self._write(engine, letter)
        elif kind is EngineCoreRequestType.ABORT:
            for engine, request_ids in self._by_engine(content).items():
                self._write(engine, (kind, request_ids))
        else:
            for engine in range(len(self.socks)):
                self._write(engine, letter)

    def _write(self, engine: int, letter: Any) -> None:
        if self.writers and not self.writers[engine].is_closing():
            self.writers[engine].write(async_engine.frame(letter))

    def _by_engine(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = defaultdict(list)
        for request_id in request_ids:
            if (engine := self._forget(request_id)) is not None:
                found[engine].append(request_id)
        return found

    def _forget(self, request_id: str) -> int | None:
        engine = self.engine_of.pop(request_id, None)
        if engine is not None:
            self.balancer.finished(engine)
        return engine

    async def receive(self) -> Any:
        """The next letter of any engine. Raises EngineDeadError when one of them is gone: its requests are, too."""
        if self.inbox is None:
            self.inbox = asyncio.Queue()
            for index, sock in enumerate([*self.socks, *([self.coordinator] if self.coordinator else [])]):
                reader, writer = await asyncio.open_connection(sock=sock)
                self.writers.append(writer)
                self.readers.append(asyncio.create_task(self._read(index, reader)))
        while True:
            engine, letter = await self.inbox.get()
            if isinstance(letter, Exception):
                raise letter
            if (found := self.take(engine, letter)) is not None:
                return found

    async def _read(self, index: int, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = letter_bytes(await reader.readexactly(4))
                self.inbox.put_nowait((index, loads(await reader.readexactly(size))))
        except (asyncio.IncompleteReadError, OSError, pickle.UnpicklingError):
            if index < len(self.socks):
                which = f"engine {index} of {len(self.socks)}" if len(self.socks) > 1 else "the engine process"
                self.inbox.put_nowait((index, async_engine.EngineDeadError(f"{which} has died")))

    def take(self, engine: int, letter: Any) -> Any:
        """What the front end should hear of one engine's letter; None if nothing yet."""
        if isinstance(letter, list):
            self.balancer.counts = letter
            return None
        if isinstance(letter, async_engine.EngineCoreReady):
            self.ready[engine] = letter
            return self._all_ready() if len(self.ready) == len(self.socks) else None
        if isinstance(letter, async_engine.Progress) and len(self.socks) > 1:
            letter.text = f"engine {engine}: {letter.text}"
        if isinstance(letter, async_engine.Reply):
            replies = self.replies[letter.call_id]
            replies.append(letter)
            return self._all_replies(letter.call_id) if len(replies) == len(self.socks) else None
        if isinstance(letter, EngineCoreOutputs):
            for output in letter.outputs:
                if output.finish_reason:
                    self._forget(output.request_id)
            for request_id in letter.refused:
                self._forget(request_id)
            if letter.scheduler_stats:
                self.stats[engine] = letter.scheduler_stats
                letter.scheduler_stats = self.total(letter.scheduler_stats)
        return letter

    def total(self, stats: Any) -> Any:
        """Gauges and sums of all engines together; what the step did is of the engine whose step it was."""
        known = list(self.stats.values())
        return dataclasses.replace(
            stats, num_running_reqs=sum(s.num_running_reqs for s in known),
            num_waiting_reqs=sum(s.num_waiting_reqs for s in known),
            num_skipped_waiting_reqs=sum(s.num_skipped_waiting_reqs for s in known),
            kv_cache_usage=sum(s.kv_cache_usage for s in known) / len(self.socks),
            spec_decoding=tuple(map(sum, itertools.zip_longest(*(s.spec_decoding for s in known), fillvalue=0))),
        )  # fmt: skip

    def _all_ready(self) -> Any:
        first = self.ready[0]
        for engine, other in self.ready.items():
            for name in ("max_model_len", "block_size", "max_num_seqs", "policy", "enable_prefix_caching"):
                if getattr(other, name) != getattr(first, name):
                    why = f"engine {engine} has {name} {getattr(other, name)}, engine 0 has {getattr(first, name)}"
                    return async_engine.Dead(f"{why}: start all with the same flags", bad_input=True)
        blocks = sum(ready.num_gpu_blocks for ready in self.ready.values())
        if isinstance(self.balancer, PrefixAwareBalancer):
            self.balancer.block_size, self.balancer.num_blocks = first.block_size, first.num_gpu_blocks
        return dataclasses.replace(first, num_gpu_blocks=blocks, about={**first.about, "engines": len(self.ready)})

    def _all_replies(self, call_id: int) -> Any:
        """Numbers are added up; of an error, the first is told. Anything else must be the same everywhere."""
        replies = self.replies.pop(call_id)
        first = next((reply for reply in replies if reply.error), replies[0])
        if first.error:
            return first
        if any(reply.result != first.result for reply in replies) and not isinstance(first.result, dict):
            why = "the engines have read different files under this path: somebody is writing there"
            return async_engine.Reply(call_id, error=why, bad_input=True)
        if not isinstance(first.result, dict):
            return first
        return async_engine.Reply(call_id, dict(sum((Counter(r.result) for r in replies), Counter())) | {
            name: 0 for reply in replies for name, n in reply.result.items() if not n and not any(
                r.result.get(name) for r in replies)})  # fmt: skip

    def close(self) -> None:
        """Hang up: an engine that nobody talks to ends by itself."""
        for task in self.readers:
            task.cancel()
        for sock in (*self.socks, *([self.coordinator] if self.coordinator else [])):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(RuntimeError):  # their loop may be closed by now
            for writer in self.writers:
                writer.close()

    def join(self, timeout: float = 5.0) -> None:
        """Close the sockets; the owner waits up to `timeout` seconds for its engines."""
        for sock in self.socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self.owner:
            self.owner.join(timeout)


class EngineGroup:
    """Engine processes of this machine, and a socket to each for every API server and for the coordinator
    (vLLM: `CoreEngineProcManager`). Engines on other machines dial in (`accept_engines`)."""

    def __init__(self, factory: Factory, args: Any, num_engines: int, num_clients: int,
                 remote: dict[tuple[int, int], socket.socket] | None = None) -> None:  # fmt: skip
        """`remote[engine, slot]` are connections of engines elsewhere; slot `num_clients` is the coordinator's."""
        self.num_clients, self.processes = num_clients, []
        self.ours: dict[tuple[int, int], socket.socket] = dict(remote or {})
        slots = range(num_clients + (num_engines > 1))
        local = [i for i in range(num_engines) if (i, 0) not in self.ours]
        threads = max(1, torch.get_num_threads() // max(1, len(local)))
        atexit.register(self.join)
        for engine in local:
            theirs = []
            for slot in slots:
                self.ours[engine, slot], other = socket.socketpair()
                theirs.append(other)
            self.processes.append(start_engine(theirs, num_clients, engine, factory, args, threads))
        self.num_engines = num_engines
        self.coordinator_clients: list[socket.socket | None] = [None] * num_clients
        if num_engines > 1:
            pairs = [socket.socketpair() for _ in range(num_clients)]
            self.coordinator_clients = [ours for ours, _ in pairs]
            coordinator = DPCoordinator([self.ours[i, num_clients] for i in range(num_engines)], [b for _, b in pairs])
            threading.Thread(target=coordinator.run, daemon=True, name="DPCoordinator").start()

    def forget_sockets(self) -> None:
        """After the API servers have got theirs; from then on, an engine ends when they have hung up."""
        for sock in (*(s for (_, slot), s in self.ours.items() if slot < self.num_clients),
                     *filter(None, self.coordinator_clients)):  # fmt: skip
            sock.close()

    def sockets_of(self, client: int) -> tuple[list[socket.socket], socket.socket | None]:
        return [self.ours[i, client] for i in range(self.num_engines)], self.coordinator_clients[client]

    def join(self, timeout: float = 5.0) -> None:
        """Wait until the engines have ended, as they do when everybody has hung up; then insist."""
        atexit.unregister(self.join)
        for sock in self.ours.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        stop = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, stop - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def start_engine(sockets: Sequence[socket.socket], num_clients: int, engine: int, factory: Factory, args: Any,
                 threads: int) -> Any:  # fmt: skip
    """A process for one engine. Where there are GPUs enough, engine i gets the i-th group of them."""
    size, gpus = getattr(args, "world_size", 1), torch.cuda.device_count() if common.HAS_GPU else 0
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    mine = [str(d) for d in range(engine * size, (engine + 1) * size)]
    if before is None and gpus >= (engine + 1) * size and gpus > size:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)  # the child reads it before it looks for GPUs
    try:
        args = args.for_engine(engine) if hasattr(args, "for_engine") else args
        coordinator = sockets[num_clients] if len(sockets) > num_clients else None
        process = tensor_parallel.start_context().Process(target=run_engine_core, name=f"EngineCore_DP{engine}", args=(
            sockets[:num_clients], coordinator, engine, factory, args, threads))  # fmt: skip
        process.start()
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    for sock in sockets:
        sock.close()  # the engine's copies are the only ones left, so its death closes the connections
    return process


def start_client(factory: Factory, args: Any) -> DPLBClient:
    """The engines of one API server, in processes of this machine and, if the flags say so, of others."""
    group = EngineGroup(factory, args, args.data_parallel_size, 1, accept_engines(args, 1))
    return make_client(args, *group.sockets_of(0), owner=group)


def make_client(args: Any, engines: Sequence[socket.socket], coordinator: socket.socket | None, index: int = 0,
                count: int = 1, owner: EngineGroup | None = None) -> DPLBClient:  # fmt: skip
    """Front end `index` of `count`, with the routing that the flags ask for."""
    balancer = BALANCERS[args.data_parallel_routing](len(engines), index, count)
    return DPLBClient(engines, coordinator, balancer, owner)


# --- 3. Engines elsewhere ---------------------------------------------------------------------------------------------


def read_line(sock: socket.socket, stop: float, limit: int = 4096) -> dict[str, Any]:
    """One line of JSON, whole before `stop` on the monotonic clock. Raises ValueError for anything else, or OSError."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > limit:
            raise ValueError("no line")
        line += handshake.read_exactly(sock, 1, stop)
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


class EngineReception:
    """Gives engines that dial in their places: `found[engine, slot]` is a socket, slots are those of `EngineGroup`.

    Every connection starts with the handshake: nothing is read, and later unpickled, of who does not know our secret.
    Then a line of JSON says which engine and slot it is for, and the first answer says how many slots there are.
    """

    def __init__(self, expected: set[int], num_clients: int, say: Callable[[str], None]) -> None:
        self.expected, self.num_clients, self.say = expected, num_clients, say
        self.found: dict[tuple[int, int], socket.socket] = {}
        self.lock, self.complete = threading.Lock(), threading.Event()

    def welcome(self, sock: socket.socket, address: tuple) -> None:
        """A place for `sock`, or a line that says why not; on the thread of this connection."""
        try:
            try:
                hello = read_line(sock, time.monotonic() + handshake.SECONDS)
                self._seat(hello, sock, address)
            except ValueError as error:
                sock.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
                sock.close()
        except OSError:  # it has gone again
            sock.close()

    def _seat(self, hello: dict[str, Any], sock: socket.socket, address: tuple) -> None:
        engine, slot = hello.get("engine"), hello.get("slot")
        slots = self.num_clients + 1
        with self.lock:
            forget_the_gone(self.found)
            right = type(engine) is type(slot) is int and engine in self.expected and 0 <= slot < slots
            if not right or (engine, slot) in self.found:
                raise ValueError(f"engine {engine!r:.40}, slot {slot!r:.40}: expected are engines "
                                 f"{sorted(self.expected)}, once")  # fmt: skip
            sock.sendall(json.dumps({"slots": slots, "clients": self.num_clients}).encode() + b"\n")
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.found[engine, slot] = sock
            if slot == slots - 1:
                self.say(f"engine {engine} is here, from {address[0]}")
            if len(self.found) == len(self.expected) * slots:
                self.complete.set()


def accept_engines(
    args: Any, num_clients: int, say: Callable[[str], None] = say_aloud
) -> dict[tuple[int, int], socket.socket]:
    """Wait for the engines that `--headless` processes bring: {(engine, slot): socket}, slots as in `EngineGroup`."""
    local = args.data_parallel_size_local
    expected = set(range(args.data_parallel_size if local is None else local, args.data_parallel_size))
    if not expected:
        return {}
    key, engines = handshake.secret(), EngineReception(expected, num_clients, say)
    flags = "--data-parallel-address", "--data-parallel-rpc-port"
    listener = serving.bind(args.data_parallel_address, args.data_parallel_rpc_port, flags)
    listener.listen()
    with contextlib.closing(handshake.Reception(listener, key, engines.welcome)):
        host, port = listener.getsockname()[:2]
        say(f"waiting for {len(expected)} engines at {host}:{port}")
        engines.complete.wait()
    return engines.found


def forget_the_gone(found: dict[tuple[int, int], socket.socket]) -> None:
    """Engines that hung up before all were here lose their places: they may be started again."""

    def has_hung_up(sock: socket.socket) -> bool:
        try:
            return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # it is there, and says nothing
            return False
        except OSError:
            return True

    gone = {engine for (engine, _), sock in found.items() if has_hung_up(sock)}
    for key in [key for key in found if key[0] in gone]:
        found.pop(key).close()


def dial(address: str, port: int, engine: int, patience: float = 600.0) -> tuple[list[socket.socket], int]:
    """Connect an engine to the API servers at `address`, once per slot. Returns sockets, and how many are clients.

    Raises InputError if nobody of ours listens there within `patience` seconds, or if this engine is not expected.
    """
    key, sockets, slots, clients, stop = handshake.secret(), [], 1, 1, time.monotonic() + patience
    while len(sockets) < slots:
        sock = None
        try:
            sock = handshake.dial((address, port), key)
            sock.sendall(json.dumps({"engine": engine, "slot": len(sockets)}).encode() + b"\n")
            answer = read_line(sock, time.monotonic() + handshake.SECONDS)
        except (OSError, ValueError) as error:
            if sock is not None:
                sock.close()  # its place is free again
            known = isinstance(error, (ValueError, handshake.Stranger))
            if known or time.monotonic() > stop:
                raise common.InputError(f"--data-parallel-address {address}, port {port}: {error}") from None
            time.sleep(0.2)
            continue
        if "error" in answer:
            raise common.InputError(f"--data-parallel-start-rank: refused by {address}: {answer['error']}")
        slots, clients = answer["slots"], answer["clients"]
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.append(sock)
    return sockets, clients


def run_headless(factory: Factory, args: Any, say: Callable[[str], None] = say_aloud) -> int:
    """Engines without an API server. They end when the API servers hang up, or at a signal. Returns the exit code."""

    def stop(*_: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one would interrupt the end
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    local = args.data_parallel_size_local or 1
    ranks = range(args.data_parallel_start_rank, args.data_parallel_start_rank + local)
    processes = []
    try:
        for engine in ranks:
            sockets, clients = dial(args.data_parallel_address, args.data_parallel_rpc_port, engine)
            say(f"engine {engine} serves {args.data_parallel_address}:{args.data_parallel_rpc_port}")
            threads = max(1, torch.get_num_threads() // local)
            processes.append(start_engine(sockets, clients, engine, factory, args, threads))
        for process in processes:
            process.join()
    finally:
        for process in processes:  # they take no signals, and would go on without us
            process.kill()
            process.join()
    return max(abs(process.exitcode) for process in processes)


# --- 4. Several API servers -------------------------------------------------------------------------------------------


def run_api_servers(factory: Factory, args: Any, server: dict[str, Any]) -> int:
    """`api_server_count` processes that accept from one listening socket, before the same engines.

    One event loop tokenizes, detokenizes and writes JSON for everybody; several divide that. If one of them or an
    engine dies, all end: half a service is harder to notice than none. Returns the exit code.
    """
    sock = serving.bind(server["host"], server["port"])
    count, context = args.api_server_count, multiprocessing.get_context("spawn")
    group = EngineGroup(factory, args, args.data_parallel_size, count, accept_engines(args, count))
    servers, pipes, stopping = [], [], threading.Event()

    def stop(*_: Any) -> None:
        if stopping.is_set():
            return  # a second signal would interrupt those who are leaving
        stopping.set()
        for process in servers:
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    died = False
    try:
        for index in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_api_server, name=f"ApiServer_{index}", daemon=True, args=(
                args, server, sock, group.sockets_of(index), index, theirs))  # fmt: skip
            process.start()
            theirs.close()
            servers.append(process)
            pipes.append(ours)
        group.forget_sockets()  # those of the servers are the only ones left,
        sock.close()  # and so is the one they listen on: the kernel takes connections as long as anybody holds it
        with contextlib.suppress(EOFError):  # each says where it listens, or closes its end by dying
            lines = [pipe.recv() for pipe in pipes]
            print(lines[0], flush=True)
        multiprocessing.connection.wait([process.sentinel for process in (*servers, *group.processes)])
        died = not stopping.is_set()
    finally:
        stop()
        for process in servers:
            process.join(server["shutdown_timeout"] + 10)
            if process.is_alive():
                process.kill()
                process.join()
        group.join()
    return 1 if died else max(abs(process.exitcode) for process in servers)


def run_api_server(args: Any, server: dict[str, Any], sock: socket.socket, sockets: tuple, index: int,
                   pipe: Any) -> None:  # fmt: skip
    """One API server process: lesson 06's, with a client that others have connected. It ends with its parent."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()
    client = make_client(args, *sockets, index=index, count=args.api_server_count)

    def say(text: str) -> None:
        if text.startswith("Listening on "):
            pipe.send(text)
        elif index == 0:
            print(text, flush=True)

    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):  # nobody reads what we say
        raise SystemExit(asyncio.run(serving.run_server(args, **server, sock=sock, client=client, say=say)))

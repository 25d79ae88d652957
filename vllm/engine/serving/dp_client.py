"""What an API server's event loop sees of several engines: the same as of one.

Owns a socket to each engine and where each request is; called by `async_llm` as its other clients are. It never decides
which engine is best, which is the balancer's. vLLM: `vllm/v1/engine/core_client.py:DPLBAsyncMPClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import pickle
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from engine.errors import EngineDeadError
from engine.serving.balancer import LoadBalancer, PrefixAwareBalancer
from engine.serving.letters import (
    Dead,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequestType,
    Progress,
    Reply,
)
from engine.serving.wire import frame, letter_bytes, loads

if TYPE_CHECKING:
    from engine.serving.engine_group import EngineGroup


class DPLBClient:
    """What an API server's event loop sees of its engines: a socket to each, and one to the coordinator. It has the
    interface of the clients in `clients.py`, so its user cannot tell one engine from sixteen (`DPLBAsyncMPClient`)."""

    def __init__(
        self,
        engines: Sequence[socket.socket],
        coordinator: socket.socket | None,
        balancer: LoadBalancer,
        owner: EngineGroup | None = None,
        shares_experts: bool = False,
    ) -> None:
        """`shares_experts`: engines step together, so all of them hear of a request."""
        self.shares_experts = shares_experts
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
            for other in range(len(self.socks)) if self.shares_experts else ():
                if other != engine:
                    self._write(other, (EngineCoreRequestType.START_DP_WAVE, None))
        elif kind is EngineCoreRequestType.ABORT:
            for engine, request_ids in self._by_engine(content).items():
                self._write(engine, (kind, request_ids))
        else:
            for engine in range(len(self.socks)):
                self._write(engine, letter)

    def _write(self, engine: int, letter: Any) -> None:
        if self.writers and not self.writers[engine].is_closing():
            self.writers[engine].write(frame(letter))

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
                self.readers.append(asyncio.create_task(self._read(index, reader, self.inbox)))
        while True:
            engine, letter = await self.inbox.get()
            if isinstance(letter, Exception):
                raise letter
            if (found := self.take(engine, letter)) is not None:
                return found

    async def _read(self, index: int, reader: asyncio.StreamReader, inbox: asyncio.Queue) -> None:
        try:
            while True:
                size = letter_bytes(await reader.readexactly(4))
                inbox.put_nowait((index, loads(await reader.readexactly(size))))
        except (asyncio.IncompleteReadError, OSError, pickle.UnpicklingError):
            if index < len(self.socks):
                which = f"engine {index} of {len(self.socks)}" if len(self.socks) > 1 else "the engine process"
                inbox.put_nowait((index, EngineDeadError(f"{which} has died")))

    def take(self, engine: int, letter: Any) -> Any:
        """What the front end should hear of one engine's letter; None if nothing yet."""
        if isinstance(letter, list):
            self.balancer.counts = letter
            return None
        if isinstance(letter, EngineCoreReady):
            self.ready[engine] = letter
            return self._all_ready() if len(self.ready) == len(self.socks) else None
        if len(self.socks) > 1:
            self._say_which(engine, letter)
        if isinstance(letter, Reply):
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

    def _say_which(self, engine: int, letter: Any) -> None:
        if isinstance(letter, Progress):
            letter.text = f"engine {engine}: {letter.text}"
        elif isinstance(letter, Dead) and not letter.bad_input:  # which all engines would say
            letter.error = f"engine {engine} of {len(self.socks)}: {letter.error}"

    def total(self, stats: Any) -> Any:
        """Gauges and sums of all engines together; what the step did is of the engine whose step it was."""
        known = list(self.stats.values())
        return dataclasses.replace(
            stats,
            num_running_reqs=sum(s.num_running_reqs for s in known),
            num_waiting_reqs=sum(s.num_waiting_reqs for s in known),
            num_skipped_waiting_reqs=sum(s.num_skipped_waiting_reqs for s in known),
            kv_cache_usage=sum(s.kv_cache_usage for s in known) / len(self.socks),
            spec_decoding=tuple(map(sum, itertools.zip_longest(*(s.spec_decoding for s in known), fillvalue=0))),
        )

    def _all_ready(self) -> Any:
        first = self.ready[0]
        for engine, other in self.ready.items():
            for name in ("max_model_len", "block_size", "max_num_seqs", "policy", "enable_prefix_caching"):
                if getattr(other, name) != getattr(first, name):
                    why = f"engine {engine} has {name} {getattr(other, name)}, engine 0 has {getattr(first, name)}"
                    return Dead(f"{why}: start all with the same flags", bad_input=True)
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
            return Reply(call_id, error=why, bad_input=True)
        if not isinstance(first.result, dict):
            return first
        return Reply(
            call_id,
            dict(sum((Counter(r.result) for r in replies), Counter()))
            | {
                name: 0
                for reply in replies
                for name, n in reply.result.items()
                if not n and not any(r.result.get(name) for r in replies)
            },
        )

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

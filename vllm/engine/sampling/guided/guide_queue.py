"""Who waits for whom while guides are compiled: two lanes, so that nobody waits for what takes long but who wants it.

Owns both lanes, their threads and what is wanted now; called by the API server, once for each request with a grammar.
It never lets the event loop wait, nor an engine. vLLM: `vllm/v1/structured_output/__init__.py`, a pool of threads,
first come, first served, behind admission.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from engine.errors import QueueOverflowError
from engine.sampling.guided import limits
from engine.sampling.guided.reader_process import check_reading, reading
from engine.sampling.guided.structured_outputs import normalize
from engine.sampling.guided.vocabulary import Guide, Vocabulary

Key = tuple[str, Any]  # what `normalize` makes of a request: (kind, spec)
CHARACTERS_PER_SECOND = 10_000  # a text of so many more waits as if it had come a second later


@dataclass
class Lane:
    """Guides that are compiled under the same limits, `seats` at a time; `room` is how many may wait for a seat."""

    seats: int
    room: int
    seconds: float  # of a processor, for the library's reading
    work: int  # for our own automata

    def __post_init__(self) -> None:
        self.waiting: list[tuple[float, int, asyncio.Future]] = []
        self.numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def seat(self, size: int) -> AsyncIterator[None]:
        """Wait for a seat, with a text of `size` characters. Raises QueueOverflowError if too many wait."""
        if len(self.waiting) >= self.room:
            raise QueueOverflowError(f"{self.room} constraints are waiting to be compiled; try again later")
        turn = time.monotonic() + size / CHARACTERS_PER_SECOND, next(self.numbers), asyncio.Future()
        heapq.heappush(self.waiting, turn)
        self._next()
        try:
            await turn[2]
            yield
        finally:
            if turn in self.waiting:
                self.waiting.remove(turn)
                heapq.heapify(self.waiting)
            elif not turn[2].cancelled():
                self.seats += 1
            self._next()

    def _next(self) -> None:
        while self.seats and self.waiting:
            future = heapq.heappop(self.waiting)[2]
            if not future.done():  # else its client has left, and it does not know yet
                future.set_result(None)
                self.seats -= 1


class GuideQueue:
    """Compiles guides for the requests of one event loop.

    A schema or grammar of a stranger may take a millisecond to compile, or as long as it is allowed to, and nobody can
    tell beforehand. In one queue, forty slow ones would keep every other waiting for minutes. So there are two lanes
    (multi-level feedback, Corbató et al. 1962). In the first, everybody gets a little of a processor's time, short
    texts first; most need no more. Who does is stopped, and begins again in the second lane, where one at a time may
    take as long as the limits allow.

    What was compiled not long ago does not wait at all, what several ask for is compiled once, and what nobody wants
    any more, since its clients have left, is stopped where it stands: in another process, that is a kill.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self.make_vocabulary = make_vocabulary  # takes a second
        self.making: asyncio.Task[Vocabulary] | None = None
        self.lanes = (
            Lane(2, 1024, limits.MAX_SECONDS / 20, limits.MAX_WORK // 10),
            Lane(1, 16, limits.MAX_SECONDS, limits.MAX_WORK),
        )
        self.threads = ThreadPoolExecutor(sum(lane.seats for lane in self.lanes), thread_name_prefix="guides")
        self.tasks: dict[Key, asyncio.Task[Guide]] = {}
        self.wanted: Counter[Key] = Counter()  # how many wait for each

    async def look(self, structured_outputs: dict[str, Any]) -> tuple[Key, Guide | None]:
        """What is asked for, and its guide if there is one already. Raises InputError."""
        key = await asyncio.to_thread(normalize, structured_outputs)
        return key, (await self.vocabulary()).kept(*key)

    async def vocabulary(self) -> Vocabulary:
        """What all guides need, made once however many are the first to ask. Raises InputError."""
        if self.making is None:
            self.making = asyncio.create_task(asyncio.to_thread(self.make_vocabulary))
        return await asyncio.shield(self.making)

    async def compile(self, key: Key) -> Guide:
        """The guide, as soon as its turn has come. Raises InputError, QueueOverflowError.

        Whoever is cancelled while it waits leaves the work to the others that want the same; the last one stops it.
        """
        if key not in self.tasks:
            self.tasks[key] = asyncio.create_task(self._compile(*key))
        task = self.tasks[key]
        self.wanted[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self.wanted[key] -= 1
            if not self.wanted[key]:
                del self.wanted[key], self.tasks[key]
                task.cancel()  # of one that is done, nothing

    async def _compile(self, kind: str, spec: Any) -> Guide:
        vocabulary = await self.vocabulary()
        size = len(spec) if isinstance(spec, str) else sum(map(len, spec))
        for lane in self.lanes:
            try:
                async with lane.seat(size):
                    if kind in ("json", "grammar"):
                        await read_apart(kind, spec, lane.seconds)
                    compiles = asyncio.get_running_loop().run_in_executor
                    return await compiles(self.threads, vocabulary.guide, kind, spec, lane.work)
            except limits.TooSlow:
                if lane is self.lanes[-1]:
                    raise
        raise AssertionError("the last lane has an answer or an error")


async def read_apart(kind: str, spec: str, seconds: float) -> None:
    """As `reader_process.read_apart`, without a thread that waits, and ended when nobody waits for it any more.

    Raises InputError, TooSlow.
    """
    command, data = reading(kind, spec, seconds)
    PIPE, DEVNULL = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    printed = b""
    try:
        async with asyncio.timeout(limits.MAX_SECONDS):
            printed, _ = await process.communicate(data)
    except TimeoutError:
        pass
    finally:
        returncode = process.returncode
        if returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    check_reading(kind, returncode, printed, seconds)

"""Three places for an engine core, and what the event loop sees of each: letters go in, letters come out.

Owns the process, thread or loop that the core runs in, from its start to its end; called by `async_llm`. A client never
makes the event loop wait, except the one that runs the core there. vLLM: `vllm/v1/engine/core_client.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import multiprocessing
import pickle
import queue
import socket
import threading
import weakref
from typing import Any

from engine.errors import EngineDeadError
from engine.serving.core_proc import EngineCoreProc, Factory, build_engine, run_engine_core, serve_mailbox
from engine.serving.letters import EngineCoreOutputs
from engine.serving.mailbox import ClientGone
from engine.serving.wire import frame


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
            if self.proc.has_work():
                self.proc.step()
            else:
                self.mail.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.mail.wait(), self.proc.patience)
        return self.outbox.popleft()

    def close(self) -> None: ...

    def join(self, timeout: float = 0.0) -> None: ...


CLIENTS = {"process": MPClient, "thread": ThreadClient, "event-loop": InprocClient}

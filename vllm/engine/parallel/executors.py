"""How a step gets to the workers: a call, a thread, or shared memory and pipes.

Owns the worker processes and the ring of messages before them; called by the engine core. It never looks into a step.
vLLM: `vllm/v1/executor/`, `vllm/distributed/device_communicators/shm_broadcast.py`.
"""

from __future__ import annotations

import common

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NoReturn

import torch

from engine.distributed.group import init_distributed, meeting_point
from engine.parallel.ranks import last_words, start_context
from engine.parallel.worker import Worker


class ExecutorFailed(RuntimeError):
    """A worker raised, died or fell silent. The message says which and how; all of them have been ended."""


_living: weakref.WeakSet[Executor] = weakref.WeakSet()


def shutdown_all() -> None:
    """For a process that leaves without its exit handlers: end all workers of its executors."""
    for executor in list(_living):
        executor.shutdown()


class Executor:
    """What brings decisions to the workers and answers back (`vllm/v1/executor/abstract.py`)."""

    world_size = 1
    failed: str | None = None
    sentinels: Sequence[Any] = ()  # readable when a worker dies

    def submit(
        self, method: str | Callable, *args: Any, reply_rank: int | None = None, timeout: float | None = None
    ) -> Any:
        """Have every worker call `method`; returns an object whose `result()` waits for `reply_rank`, or for all."""
        raise NotImplementedError

    def collective_rpc(self, method: str | Callable, *args: Any, **options: Any) -> Any:
        return self.submit(method, *args, **options).result()

    def check_health(self) -> None:
        """Raises ExecutorFailed if a worker is gone."""

    def shutdown(self) -> None:
        """End the workers; afterwards none is left."""


class Done:
    """A result that is there already."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        return self.value


class UniProcExecutor(Executor):
    """One worker, in this process."""

    def __init__(self) -> None:
        self.worker = Worker()

    def submit(
        self, method: str | Callable, *args: Any, reply_rank: int | None = None, timeout: float | None = None
    ) -> Done:
        value = self.worker.call(method, args)
        return Done([value] if reply_rank is None else value)


class ThreadExecutor(UniProcExecutor):
    """One worker, on a thread of this process: it runs a step while the engine core plans the next.

    What a step is told must not change until it runs: a `StepMessage` is a copy. (In vLLM `UniProcExecutor` runs on the
    engine core's own thread and needs no other: launches on a GPU return at once, and the tokens are copied to the host
    on a stream of their own, for which a future waits.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = ThreadPoolExecutor(1, "worker")

    def submit(
        self, method: str | Callable, *args: Any, reply_rank: int | None = None, timeout: float | None = None
    ) -> Any:
        submit = super().submit
        return self.thread.submit(lambda: submit(method, *args, reply_rank=reply_rank).result())

    def shutdown(self) -> None:
        self.thread.shutdown(cancel_futures=True)


def buffer(memory: SharedMemory) -> memoryview:
    """Its bytes, until it is closed."""
    assert memory.buf is not None
    return memory.buf


class MessageQueue:
    """One writer, n readers: pickled once, written once into shared memory, read by all (`shm_broadcast.py`).

    A ring of chunks; each has a flag per reader that says "read". The writer waits only if it is a whole ring ahead.
    A pipe to each reader says that a chunk is there, which wakes the reader, and how much of the message is left. One
    that exceeds a chunk takes several: a pipe would hold the writer for ever if its reader had stopped.
    (vLLM's readers spin for a while before they sleep, which is faster and needs cores to burn.)
    """

    def __init__(self, context: Any, readers: int, chunks: int = 8, chunk_bytes: int = 1 << 20) -> None:
        self.readers, self.chunks, self.chunk_bytes, self.written = readers, chunks, chunk_bytes, 0
        self.memory = SharedMemory(create=True, size=chunks * (readers + chunk_bytes))
        if hasattr(os, "posix_fallocate"):  # Linux gives a page when it is first written; with none left, that is a
            try:  # SIGBUS, and nobody hears why
                os.posix_fallocate(self.memory._fd, 0, self.memory.size)  # pyright: ignore[reportAttributeAccessIssue]  private
            except OSError as error:
                self.memory.close()
                self.memory.unlink()
                raise common.InputError(
                    f"distributed_executor_backend mp: {self.memory.size:,} bytes of shared memory "
                    f"for decisions: {error.strerror}"
                ) from None
        buffer(self.memory)[: chunks * readers] = b"\1" * (chunks * readers)
        self.pipes = [context.Pipe(duplex=False) for _ in range(readers)]

    def enqueue(self, item: Any, alive: Callable[[], None] = lambda: None) -> int:
        """Returns the bytes of the message. `alive` may raise while the ring is full."""
        data = pickle.dumps(item, protocol=5)
        for at in range(0, len(data), self.chunk_bytes):
            chunk, piece = self.written % self.chunks, data[at : at + self.chunk_bytes]
            flags = slice(chunk * self.readers, (chunk + 1) * self.readers)
            ring = buffer(self.memory)
            while bytes(ring[flags]) != b"\1" * self.readers:
                alive()
                time.sleep(0.0005)
            ring[flags] = bytes(self.readers)
            start = self.chunks * self.readers + chunk * self.chunk_bytes
            ring[start : start + len(piece)] = piece
            for _, pipe in self.pipes:
                pipe.send_bytes((len(data) - at).to_bytes(8, "big"))
            self.written += 1
        return len(data)

    def reader(self, index: int) -> MessageReader:
        return MessageReader(self.memory, self.pipes[index][0], index, self.readers, self.chunks, self.chunk_bytes)

    def close(self) -> None:
        """Give pipes and memory back; the first process to do so removes the segment."""
        for ours, theirs in self.pipes:
            ours.close()
            theirs.close()
        self.memory.close()
        with contextlib.suppress(FileNotFoundError):
            self.memory.unlink()


@dataclass
class MessageReader:
    """A reader's end; it travels to the reader's process."""

    memory: SharedMemory
    pipe: Any
    index: int
    readers: int
    chunks: int
    chunk_bytes: int
    read: int = 0

    def dequeue(self) -> Any:
        """The next message; waits for it. Raises EOFError when the writer is gone."""
        data, left = bytearray(), 1
        while left > 0:
            left, chunk = int.from_bytes(self.pipe.recv_bytes(), "big"), self.read % self.chunks
            start = self.chunks * self.readers + chunk * self.chunk_bytes
            ring = buffer(self.memory)
            data += ring[start : start + min(left, self.chunk_bytes)]
            ring[chunk * self.readers + self.index] = 1
            self.read += 1
            left -= self.chunk_bytes
        return pickle.loads(data)


class Future:
    """The answers to one call, collected when somebody asks. Calls are answered in the order they were made in."""

    def __init__(self, executor: MultiprocExecutor, name: str, ranks: Iterable[int], one: bool, timeout: float) -> None:
        self.executor, self.name, self.waiting, self.one, self.timeout = executor, name, set(ranks), one, timeout
        self.answers: dict[int, Any] = {}

    def result(self) -> Any:
        """Raises ExecutorFailed, after which no worker is left, or InputError if a worker refused its input."""
        deadline = time.monotonic() + self.timeout
        while self.waiting:
            self.executor.read_replies(deadline, self)
        answers = [self.answers[rank] for rank in sorted(self.answers)]
        return answers[0] if self.one else answers


class MultiprocExecutor(Executor):
    """A process per rank. Decisions go out through one `MessageQueue`, answers come back through a pipe each.

    A pipe whose process has died reads as end of file, so waiting for answers is watching the workers. One that neither
    dies nor answers is found out after `timeout` seconds (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS; vLLM's default is 300).
    """

    def __init__(
        self, world_size: int, timeout: float | None = None, among: tuple[int, int, int] | None = None
    ) -> None:
        """`among`, for workers that meet those of other engines: the first of ours, how many there are in all, and the
        port where they meet."""
        self.world_size = world_size
        self.timeout = timeout or float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 120))
        self.pending: list[deque[Future]] = [deque() for _ in range(world_size)]
        self.processes: list[BaseProcess] = []
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.bytes_broadcast = 0
        context = start_context()
        self.queue = MessageQueue(context, world_size)
        # Called by `shutdown`, or when nobody has this executor any more, or when this process ends.
        self._end = weakref.finalize(self, end_workers, self.processes, self.pipes, self.queue)
        atexit.register(self._end)  # before multiprocessing's own end, which would wait for the workers
        _living.add(self)
        try:
            self.store = None if among else meeting_point()  # of the process group
            first, total, port = among or (0, world_size, self.store.port if self.store else 0)
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                self.pipes.append(ours)
                process = context.Process(
                    target=run_worker,
                    daemon=True,
                    name=f"Worker_{rank}",
                    args=(theirs, self.queue.reader(rank), rank, world_size, (first + rank, total, port)),
                )
                process.start()
                self.processes.append(process)
                theirs.close()  # the worker has the only writing end now: its death is an end of file
            for ours, _ in self.queue.pipes:
                ours.close()
            self.sentinels = [process.sentinel for process in self.processes]
            self._expect("start", None, 300).result()
        except BaseException:
            self.shutdown()
            raise

    def submit(
        self, method: str | Callable, *args: Any, reply_rank: int | None = None, timeout: float | None = None
    ) -> Future:
        """Broadcast a call; a Future of the answer of `reply_rank` (None: of all). ExecutorFailed if one has died."""
        if self.failed:
            raise ExecutorFailed(self.failed)
        name = method if isinstance(method, str) else method.__name__
        timeout = self.timeout if timeout is None else timeout
        stop = time.monotonic() + timeout

        def alive() -> None:
            self.check_health()
            if time.monotonic() > stop:
                self.fail(
                    f"no room for {name} within {timeout:g} s: a worker of {self.world_size} does not read; all "
                    "were ended"
                )

        with self._no_broken_pipes():
            self.bytes_broadcast += self.queue.enqueue((method, args, reply_rank), alive)
        return self._expect(name, reply_rank, timeout)

    @contextlib.contextmanager
    def _no_broken_pipes(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.fail(None)

    def _expect(self, name: str, reply_rank: int | None, timeout: float) -> Future:
        ranks = range(self.world_size) if reply_rank is None else [reply_rank]
        future = Future(self, name, ranks, reply_rank is not None, timeout)
        for rank in ranks:
            self.pending[rank].append(future)
        return future

    def read_replies(self, deadline: float, wanted: Future) -> None:
        """Wait for some replies and give them to the futures they belong to."""
        if self.failed:
            raise ExecutorFailed(self.failed)
        ready: list[Any] = multiprocessing.connection.wait(self.pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = ", ".join(map(str, sorted(wanted.waiting)))
            self.fail(
                f"no answer to {wanted.name} from worker {ranks} of {self.world_size} within "
                f"{wanted.timeout:g} s; all were ended"
            )
        for pipe in ready:
            rank = self.pipes.index(pipe)
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                self.fail(None)
            if kind != "result":
                self.fail(value, common.InputError if kind == "input" else ExecutorFailed)
            future = self.pending[rank].popleft()
            future.answers[rank] = value
            future.waiting.discard(rank)

    def fail(self, why: str | None, kind: type[Exception] = ExecutorFailed) -> NoReturn:
        """End all workers and raise. The first error need not come from the worker that died: its peers lose their
        connection to it. So a worker that is dead within a second is named before workers that raised."""
        if kind is ExecutorFailed and (why is None or "worker" in why):
            multiprocessing.connection.wait([process.sentinel for process in self.processes], 1 if why else 5)
            dead = [rank for rank, process in enumerate(self.processes) if not process.is_alive()]
            if dead:
                words = last_words(self.processes[dead[0]])
                why = f"worker {dead[0]} of {self.world_size} died ({words}); the others were ended"
        self.failed = why or "a worker closed its connection; all were ended"
        self.shutdown()
        raise kind(self.failed)

    def check_health(self) -> None:
        if not self.failed and any(not process.is_alive() for process in self.processes):
            self.fail(None)

    def shutdown(self) -> None:
        """Kill the workers: no step is in flight that anybody waits for."""
        self.failed = self.failed or "the executor was shut down"
        self._end()
        atexit.unregister(self._end)
        _living.discard(self)


def end_workers(processes: list[Any], pipes: list[Any], queue: MessageQueue) -> None:
    """Kill the processes and give back what connected them."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for pipe in pipes:
        pipe.close()
    queue.close()


def run_worker(
    pipe: multiprocessing.connection.Connection,
    reader: MessageReader,
    rank: int,
    world_size: int,
    place: tuple[int, int, int],
) -> None:
    """A worker process from start to end. It ends with the process that started it, whatever way that ends. `place` is
    its rank among all that meet, how many these are, and the port."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; what they mean is not ours to decide
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))

    # A thread sends the answers. A pipe holds 64 KiB: a worker that waited until its answer is read would not read
    # meanwhile, and the engine core does not either while it waits for a chunk to be free.
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send() -> None:
        with contextlib.suppress(OSError):  # nobody reads any more: `dequeue` finds out as well
            while True:
                pipe.send_bytes(answers.get())

    threading.Thread(target=send, daemon=True).start()

    def reply(kind: str, value: Any) -> None:
        answers.put(pickle.dumps((kind, value), protocol=5))

    try:
        world = init_distributed(*place, timeout=1800) if place[1] > 1 else None
        worker = Worker(world)
        reply("result", os.getpid())
        while True:
            method, args, reply_rank = reader.dequeue()
            value = worker.call(method, args)
            if reply_rank in (None, rank):
                reply("result", value)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # nobody is left to work for
    except common.InputError as error:
        reply("input", str(error))
    except BaseException as error:
        traceback.print_exc()
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        reply("raised", f"worker {rank} of {world_size} raised {first_line}; all were ended")
    threading.Event().wait()  # stay until we are ended: a worker that left now would look like the one that died

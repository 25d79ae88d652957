"""Workers as processes: the ring that they read, the answers that come back, and who is named when one dies."""

from __future__ import annotations

import common

import collections
import errno
import gc
import multiprocessing
import os
import pickle
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.parallel import executors
from engine.parallel.config import ParallelConfig
from engine.parallel.worker import WorkerSpec
from engine.request import Request, SamplingParams
from lab import layouts
from support.rank_jobs import echo
from support.small_cores import parallel_core, reference, serve
from support.tiers import and_slowly


class Context:
    Pipe = staticmethod(__import__("multiprocessing").Pipe)


def test_a_message_is_written_once_and_read_by_all():
    box = executors.MessageQueue(Context, readers=3, chunks=4, chunk_bytes=256)
    items = [bytes([i]) * (50 * (i % 9)) for i in range(40)]  # up to 400 bytes: some exceed a chunk
    got = [[] for _ in range(3)]

    def read(i):
        reader = box.reader(i)
        while len(got[i]) < len(items):
            got[i].append(reader.dequeue())

    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    sizes = [box.enqueue(item) for item in items]
    for thread in threads:
        thread.join(60)
    assert got == [items] * 3
    assert sizes == [len(pickle.dumps(item, protocol=5)) for item in items], "once, however many read it"
    box.close()


def test_a_message_of_exactly_a_chunk_and_nothing_left_in_memory():
    item = bytes(100)
    box = executors.MessageQueue(Context, readers=1, chunks=2, chunk_bytes=len(pickle.dumps(item, protocol=5)))
    reader, name = box.reader(0), box.memory.name
    box.enqueue(item)
    assert reader.dequeue() == item
    box.close()
    with pytest.raises(FileNotFoundError):
        multiprocessing.shared_memory.SharedMemory(name)


def test_the_writer_waits_for_the_slowest_reader_and_asks_whether_it_lives():
    box = executors.MessageQueue(Context, readers=2, chunks=2, chunk_bytes=64)
    fast, slow = box.reader(0), box.reader(1)

    class Full(Exception):
        pass

    def full():
        raise Full

    for i in range(2):
        box.enqueue(i, full)
    assert [fast.dequeue(), fast.dequeue()] == [0, 1]
    with pytest.raises(Full):
        box.enqueue(2, full)
    assert slow.dequeue() == 0
    box.enqueue(2, full)
    assert (fast.dequeue(), slow.dequeue(), slow.dequeue()) == (2, 1, 2)
    box.close()


def test_memory_that_is_full_is_said_before_anything_starts(monkeypatch):
    """A page that is not there when it is first written is a bus error, with no words."""
    made = []

    class Memory(executors.SharedMemory):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self.name)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(executors, "SharedMemory", Memory)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(common.InputError, match=r"131,080 bytes of shared memory.*No space left"):
        executors.MessageQueue(Context, readers=1, chunk_bytes=1 << 14)
    with pytest.raises(FileNotFoundError):
        multiprocessing.shared_memory.SharedMemory(made[0])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it has no file")
def test_all_of_the_ring_is_there_from_the_start():
    box = executors.MessageQueue(Context, readers=1)
    try:
        assert Path("/dev/shm", box.memory.name).stat().st_blocks * 512 >= box.memory.size
    finally:
        box.close()


@pytest.mark.parametrize("size", [0, 1 << 18], ids=["a full ring", "more than a ring or a pipe holds"])
def test_a_call_that_nobody_reads_has_an_end(monkeypatch, size):
    """A worker that is stopped, say: it neither dies nor reads. Who waited for its answer would have heard of it."""
    executor, heard = object.__new__(executors.MultiprocExecutor), []
    stopped = SimpleNamespace(sentinel=Context.Pipe()[0], is_alive=lambda: True)  # its other end is closed: no wait
    executor.world_size, executor.timeout, executor.processes = 1, 60, [stopped]
    executor.queue, executor.bytes_broadcast = executors.MessageQueue(Context, readers=1, chunks=1, chunk_bytes=128), 0
    executor.pending = [collections.deque()]
    monkeypatch.setattr(executors.MultiprocExecutor, "shutdown", lambda self: heard.append(self))
    watchdog = threading.Timer(10, executor.queue.pipes[0][0].close)  # then whoever waits for a reader reads an error
    watchdog.start()
    try:
        with pytest.raises(executors.ExecutorFailed, match=r"no room for held within 0\.01 s: a worker of 1 does not"):
            for _ in range(2):
                executor.submit("held", bytes(size), reply_rank=0, timeout=0.01)
        assert heard == [executor] and "no room" in executor.failed
    finally:
        watchdog.cancel()
        executor.queue.close()


def gone(executor):
    return not any(process.is_alive() for process in executor.processes)


def test_answers_are_in_order_of_ranks():
    future = executors.Future(None, "held", range(3), False, 1)
    future.waiting, future.answers = set(), {2: "c", 0: "a", 1: "b"}
    assert future.result() == ["a", "b", "c"]


def test_who_waits_for_an_answer_of_the_dead_hears_why():
    executor = object.__new__(executors.MultiprocExecutor)
    executor.failed = "worker 1 of 3 died"
    with pytest.raises(executors.ExecutorFailed, match="worker 1 of 3 died"):
        executors.Future(executor, "held", range(3), False, 1).result()


@pytest.mark.parametrize("pp", and_slowly([1], [(2,)]))
def test_processes_write_the_same_tokens_and_a_silent_one_is_named(pp):
    """TP 2 × PP over gloo and shared memory. Then one falls silent."""
    last, n = 2 * pp - 1, 2 * pp
    executor, parallel = executors.MultiprocExecutor(n), ParallelConfig(2, pp)
    try:
        core = parallel_core(executor, parallel)
        assert serve(core) == reference()
        found = executor.collective_rpc(layouts.moe_on_rank)
        assert max(max(rank["errors"].values()) for rank in found) < 1e-5
        with pytest.raises(executors.ExecutorFailed, match=f"no answer to sleep from worker {last} of {n} within 1 s"):
            executor.collective_rpc("sleep", 600.0, last, timeout=1)
        assert gone(executor)
        with pytest.raises(executors.ExecutorFailed, match=f"worker {last}"):
            executor.collective_rpc("held")
    finally:
        executor.shutdown()


def test_a_killed_worker_is_named_and_another_start_works():
    executor = executors.MultiprocExecutor(1)
    try:
        core = parallel_core(executor, ParallelConfig(1, 1, "mp"))
        core.add_request(Request("0", [1, 2, 3], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
        core.step()
        executor.processes[0].kill()
        with pytest.raises(executors.ExecutorFailed, match=r"worker 0 of 1 died \(signal SIGKILL\)"):
            while core.scheduler.has_unfinished_requests():
                core.step()
        assert gone(executor)
    finally:
        executor.shutdown()
    again = executors.MultiprocExecutor(1)
    again.shutdown()
    with pytest.raises(executors.ExecutorFailed, match="was shut down"):
        again.submit("held")
    again = executors.MultiprocExecutor(1)
    try:
        with pytest.raises(common.InputError, match="not a folder"):
            again.collective_rpc("load_model", WorkerSpec("/no/such/folder", ParallelConfig()))
        assert gone(again), "a refusal ends them, too"
    finally:
        again.shutdown()


def test_workers_end_with_the_last_who_has_their_executor():
    """`del llm` is how a notebook makes room for the next."""
    executor = executors.MultiprocExecutor(1)
    (process,), memory = executor.processes, Path("/dev/shm", executor.queue.memory.name)
    core = parallel_core(executor, ParallelConfig(1, 1, "mp"))
    assert process.is_alive() and memory.exists()
    del executor, core
    gc.collect()
    assert not process.is_alive() and not memory.exists()


def test_a_worker_reads_although_nobody_has_read_its_answer():
    """Both are larger than a pipe holds: the answer to a prompt with scores, say, and then an adapter."""
    executor = executors.MultiprocExecutor(1)
    watchdog = threading.Timer(30, executor.processes[0].kill)
    watchdog.start()
    try:
        first = executor.submit(echo, [bytes(300_000)], [1])
        second = executor.submit(echo, [bytes(3 * executor.queue.chunk_bytes)], [1])
        many = [executor.submit(echo, [bytes(100_000)], [i]) for i in range(3 * executor.queue.chunks)]
        assert [len(future.result()[0][0]) for future in (first, second)] == [300_000, 3 * executor.queue.chunk_bytes]
        assert all(len(future.result()[0][0]) == 100_000 for future in many)
    finally:
        watchdog.cancel()
        executor.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp", "victim"), [(2, 1, 1), (1, 2, 0), (2, 1, 0)])
def test_whoever_is_killed_is_named_not_its_peers(tp, pp, victim):
    executor, parallel = executors.MultiprocExecutor(tp * pp), ParallelConfig(tp, pp)
    try:
        core = parallel_core(executor, parallel)
        core.add_request(Request("0", [1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))
        core.step()
        executor.processes[victim].kill()
        with pytest.raises(executors.ExecutorFailed, match=rf"worker {victim} of 2 died \(signal SIGKILL\)"):
            while core.scheduler.has_unfinished_requests():
                core.step()
        assert gone(executor)
    finally:
        executor.shutdown()

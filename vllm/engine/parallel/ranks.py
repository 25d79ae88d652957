"""Processes that begin and end together: each runs one function of a module as one rank of a group.

Owns their pipes and their end, whatever way it comes; called by measurements, tests and lessons (an engine's workers
are the executors'). It never restarts one. vLLM: `vllm/utils/system_utils.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.process
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from engine.distributed.group import init_distributed, meeting_point


class RankFailed(common.CheckFailed):
    """A rank raised, died or fell silent. The message names it and says how; all ranks have been ended."""


class Ranks:
    """`world_size` processes, each running `fn(group, *args)`, that end together.

    If one raises, dies or stays silent, all are ended; so they are when the `with` block is left, and when the process
    that started them dies, whatever way: each rank watches it. `fn` must be importable (a function of a module).
    """

    def __init__(self, world_size: int, fn: Callable, *args: Any, timeout: float = 120.0) -> None:
        """`timeout` seconds is how long a collective may take, and all of `results()`."""
        self.timeout = timeout
        self.store = meeting_point()  # the parent hosts it
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[multiprocessing.connection.Connection] = []
        context = start_context()
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_rank, args=(theirs, rank, world_size, self.store.port, timeout, fn, args), daemon=True
                )
                process.start()
                theirs.close()  # the rank has the only writing end now: its death is an end of file
                self.processes.append(process)
                self.pipes.append(ours)
        except BaseException:
            self.stop()
            raise

    def results(self) -> list[Any]:
        """What `fn` returned on each rank, by rank. Raises RankFailed, after which no rank is left."""
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        answers: dict[int, Any] = {}
        died: dict[int, str] = {}
        raised: dict[int, tuple[str, str]] = {}
        deadline = time.monotonic() + self.timeout
        while waiting and (ready := multiprocessing.connection.wait([*waiting], max(0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    kind, value = pickle.loads(self.pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    died[rank] = last_words(self.processes[rank])
                else:
                    (answers if kind == "result" else raised)[rank] = value
            if died or raised:  # peers of a dead rank complain first: give the cause a second to show itself
                deadline = min(deadline, time.monotonic() + 1)
        self.stop()
        of = f"of {len(self.processes)}"
        if died:
            rank = min(died)
            raise RankFailed(f"rank {rank} {of} died ({died[rank]}); the others were ended")
        if raised:
            rank = next(iter(raised))
            error = RankFailed(f"rank {rank} {of} raised {raised[rank][0]}; the others were ended")
            error.add_note(raised[rank][1])
            raise error
        if waiting:
            silent = ", ".join(map(str, sorted(waiting.values())))
            raise RankFailed(f"no answer from rank {silent} {of} within {self.timeout:g} s; all were ended")
        return [answers[rank] for rank in sorted(answers)]

    def stop(self) -> None:
        """End every rank now; afterwards none is left."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()


def launch(world_size: int, fn: Callable, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run `fn(group, *args)` in `world_size` processes; what it returned on each. Raises RankFailed."""
    with Ranks(world_size, fn, *args, timeout=timeout) as ranks:
        return ranks.results()


def start_context() -> multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext:
    """How ranks are started. Importing torch takes seconds, so where a process can be forked, one server imports it
    once and every rank is a fork of that. CUDA does not survive a fork: there, each rank starts from nothing."""
    if common.HAS_GPU or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "triton", "triton.language"])
    multiprocessing.forkserver.ensure_running()
    return context


def last_words(process: multiprocessing.process.BaseProcess) -> str:
    """How a process has ended."""
    process.join(5)
    code = process.exitcode
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def end_with_parent() -> None:
    """On a thread: leave when the process that started us is gone, whatever way."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "nobody has started this process"
    parent.join()
    os._exit(1)


def _run_rank(  # noqa: PLR0913, a process gets all it needs at once
    pipe: multiprocessing.connection.Connection,
    rank: int,
    world_size: int,
    port: int,
    timeout: float,
    fn: Callable,
    args: tuple,
) -> None:
    """What a rank does: meet the others, run `fn`, report its result or error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, and the parent ends us
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    try:
        message = pickle.dumps(("result", fn(init_distributed(rank, world_size, port, timeout=timeout), *args)))
    except BaseException as error:
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        message = pickle.dumps(("raised", (first_line, traceback.format_exc())))
    pipe.send_bytes(message)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()

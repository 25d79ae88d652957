"""Ranks as threads: groups whose collectives meet at a barrier, and workers on them, in every layout.

An engine on `WorkerThreads` is one on workers without the seconds that processes take to start.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from engine.distributed.group import GroupCoordinator
from engine.output import ModelRunnerOutput
from engine.parallel.config import ParallelConfig
from engine.parallel.executors import Executor
from engine.parallel.stages import PipelineGroup
from engine.parallel.worker import Worker

CPU = torch.device("cpu")
SECONDS = 60  # that a rank waits for the others


class ThreadGroup(GroupCoordinator):
    """Ranks that share a model. They have `meeting` and `table` in common."""

    def __init__(
        self, n: int, rank: int, meeting: threading.Barrier | None, table: list, device: torch.device | None = None
    ) -> None:
        super().__init__(range(n), rank, device)
        self.meeting, self.table = meeting, table

    def everybodys(self, x: Any) -> list[Any]:
        self.table[self.rank_in_group] = x.clone() if isinstance(x, torch.Tensor) else x
        self.meeting.wait(SECONDS)
        found = list(self.table)
        self.meeting.wait(SECONDS)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return super().all_reduce(x)
        self._count("all_reduce", x)
        return sum(self.everybodys(x))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self.world_size == 1:
            return super().all_gather(x, dim)
        out = torch.cat(self.everybodys(x), dim)
        self._count("all_gather", out)
        return out

    def all_to_all(self, rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, list[int]]:
        if self.world_size == 1:
            return super().all_to_all(rows, counts)
        parts = [r.split(c)[self.rank_in_group] for r, c in self.everybodys((rows, list(counts)))]
        self._count_sent("all_to_all", rows, counts)
        return torch.cat(parts), [len(part) for part in parts]

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return super().reduce_scatter(x)
        self._count("reduce_scatter", x)
        return sum(self.everybodys(x)).chunk(self.world_size)[self.rank_in_group]


def in_threads(
    n: int, fn: Callable, device: torch.device = CPU, kind: Callable[..., ThreadGroup] = ThreadGroup
) -> list[Any]:
    """What `fn(group)` returns on each of n ranks at once. If some raise, so does this."""
    meeting, table = threading.Barrier(n), [None] * n

    def rank(r: int) -> Any:
        try:
            with torch.inference_mode():
                return fn(kind(n, r, meeting, table, device))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(rank, r) for r in range(n)]
    causes = [f.exception() for f in futures if f.exception()]
    for cause in sorted(causes, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise cause  # whoever waited for the one that failed has less to say
    return [f.result() for f in futures]


class ThreadPipeline(PipelineGroup):
    """Stages: what the r-th sends goes into the r-th of `wires`."""

    def __init__(self, n: int, rank: int, wires: list[queue.SimpleQueue]) -> None:
        super().__init__(range(n), rank)
        self.wires = wires

    def send(self, x: torch.Tensor) -> None:
        self._count("send", x)
        self.wires[self.rank_in_group].put(x)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        x = self.wires[self.rank_in_group - 1].get(timeout=SECONDS)
        assert tuple(x.shape) == shape and x.dtype == dtype
        return x


class ThreadWorker(Worker):
    def __init__(self, tp: ThreadGroup, pp: ThreadPipeline, world: ThreadGroup | None = None) -> None:
        super().__init__()
        self.mine = tp, pp, world

    def set_groups(self, tp: Any, pp: Any) -> None:
        self.tp, self.pp, self.world = self.mine


def world_of(ranks: int) -> tuple[threading.Barrier, list]:
    """What ranks have in common that are one group."""
    return threading.Barrier(ranks), [None] * ranks


class WorkerThreads(Executor):
    """The workers of a layout, each in a thread. All that travels is pickled, as on the way to a process.

    Engines that share experts have a `world` in common, the barrier and the table of all their ranks (`world_of`).
    """

    def __init__(self, parallel: ParallelConfig, world: tuple[threading.Barrier, list] | None = None) -> None:
        tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self.world_size, self.inboxes, self.outboxes, self.last_stage = tp * pp, [], [], tp * (pp - 1)
        self.calls, self.answers, self.threads = 0, {}, []
        rows = [(threading.Barrier(tp), [None] * tp) for _ in range(pp)]
        wires = [[queue.SimpleQueue() for _ in range(pp)] for _ in range(tp)]
        for rank in range(tp * pp):
            stage, shard = divmod(rank, tp)
            place = parallel.data_parallel_rank * tp + shard
            everybody = world and ThreadGroup(parallel.expert_ranks, place, *world)
            group, line = ThreadGroup(tp, shard, *rows[stage]), ThreadPipeline(pp, stage, wires[shard])
            worker = ThreadWorker(group, line, everybody)
            inbox, outbox = queue.SimpleQueue(), queue.SimpleQueue()
            self.threads.append(threading.Thread(target=self.work, args=(worker, inbox, outbox), daemon=True))
            self.inboxes.append(inbox), self.outboxes.append(outbox)
        for thread in self.threads:
            thread.start()

    @staticmethod
    def work(worker: ThreadWorker, inbox: queue.SimpleQueue, outbox: queue.SimpleQueue) -> None:
        while (data := inbox.get()) is not None:
            if callable(data):
                outbox.put(data(worker))
                continue
            method, args = pickle.loads(data)
            outbox.put(pickle.loads(pickle.dumps(worker.call(method, args))))

    def ask(self, look: Callable[[Worker], Any]) -> list[Any]:
        """What a test sees when it looks at each worker, in that worker's thread."""
        return self.submit(look).result()

    def submit(self, method: Any, *args: Any, reply_rank: int | None = None, timeout: float | None = None) -> Any:
        for inbox in self.inboxes:
            inbox.put(method if callable(method) and not args else pickle.dumps((method, args)))
        number, self.calls = self.calls, self.calls + 1

        def collect() -> list[Any]:  # answers come in the order of the calls, and not everybody asks for theirs
            while number not in self.answers:
                self.answers[len(self.answers)] = [box.get(timeout=SECONDS) for box in self.outboxes]
            return self.answers[number]

        def one() -> Any:
            answers = collect()
            if method == "execute_model":  # stages before the last sample nothing, shards of the last the same
                before, last = answers[: self.last_stage], answers[self.last_stage :]
                assert all(a == ModelRunnerOutput() for a in before) and all(a == last[0] for a in last)
            return answers[reply_rank]

        return SimpleNamespace(result=collect if reply_rank is None else one)

    def shutdown(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)
        for thread in self.threads:  # or Python may end while one is inside torch, which aborts
            thread.join(SECONDS)

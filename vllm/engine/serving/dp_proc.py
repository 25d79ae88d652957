"""The loop of an engine core that shares experts with others: it steps whenever one of them has something to do.

Owns nothing more than `ParallelEngineCoreProc`; called for engines of `--data-parallel-size` with
`--enable-expert-parallel`. It never steps alone. vLLM: `vllm/v1/engine/core.py:DPEngineCoreProc`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from engine.serving.letters import EngineCoreRequestType
from engine.serving.pipeline_proc import ParallelEngineCoreProc

NEWS = (EngineCoreRequestType.ADD, EngineCoreRequestType.START_DP_WAVE)


class DPEngineCoreProc(ParallelEngineCoreProc):
    """`ParallelEngineCoreProc`'s loop in step with other engines' (`vllm/v1/engine/core.py`)."""

    def __init__(self, engine: Any, send: Callable[[Any], None]) -> None:
        super().__init__(engine, send)
        self.remote = engine.core.runner
        self.lockstep = self.remote.lockstep
        self.lockstep.inside = self.has_requests

    def has_requests(self) -> bool:
        """Also one whose guide is being compiled, or that waits for `wake_up`: it will be scheduled some time."""
        return bool(self.scheduler.has_unfinished_requests() or self.guided or self.held)

    def has_work(self) -> bool:
        """Is there a step to be taken now, here or elsewhere?"""
        return super().has_work() or self.lockstep.running

    def handle(self, letters: Iterable[tuple]) -> None:
        """As any core, and count the requests that were sent to any engine."""
        letters = list(letters)
        self.lockstep.told(sum(kind in NEWS for kind, _ in letters))
        super().handle(letters)

    def step(self) -> None:
        """A step for whoever is scheduled here, or one of no token, so that others' find our experts."""
        start, mine = time.monotonic(), not self.stopped and self.scheduler.has_unfinished_requests()
        if mine and (output := self.core.put_in_flight()):
            self.admitted.append(self._admissions(output, start))
        else:
            self.remote.execute_dummy_batch()
        if mine:  # the scheduler may have something to say, although nobody could run
            self._finish_oldest(start)
        else:
            self.read_mail()

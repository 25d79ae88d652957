"""The engine core's loop with a mailbox, around a core that may have several steps in flight.

Owns nothing more than `EngineCoreProc`; called for engines whose model is with workers. It never waits for a step while
another could be sent. vLLM: `step_with_batch_queue` in `vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from engine.parallel.pipeline import PipelineEngineCore
from engine.serving.core_proc import EngineCoreProc
from engine.serving.letters import EngineCoreOutputs


class ParallelEngineCoreProc(EngineCoreProc):
    """`EngineCoreProc`'s loop around a core that may have several steps in flight."""

    def __init__(self, engine: Any, send: Callable[[Any], None]) -> None:
        super().__init__(engine, send)
        self.admitted: deque[dict] = deque()

    def step(self) -> None:
        """With a pipeline: fill it, then wait for the oldest step alone; without, as the parent."""
        if not isinstance(self.core, PipelineEngineCore):
            return super().step()
        start = time.monotonic()
        while output := self.core.put_in_flight():
            self.admitted.append(self._admissions(output, start))
        self._finish_oldest(start)

    def drain(self) -> None:
        """Take what is on its way, and send nothing behind it."""
        while isinstance(self.core, PipelineEngineCore) and self.core.batch_queue:
            self._finish_oldest(time.monotonic())

    def _finish_oldest(self, start: float) -> None:
        assert isinstance(self.core, PipelineEngineCore)
        output, result = self.core.next_result()
        self.read_mail()  # a request aborted while the model ran is out before its token is looked at
        outputs = self.core.update_from_output(output, result)
        if not (output.num_scheduled_tokens or outputs):
            return
        admitted = self.admitted.popleft() if output.num_scheduled_tokens else {}
        stats = self.stats()
        stats.num_scheduled_tokens = output.total_num_scheduled_tokens
        stats.step_seconds = time.monotonic() - start
        preempted, self.core.preempted = self.core.preempted, []
        self.send(EngineCoreOutputs(outputs, stats, admitted, preempted))

"""Where an engine core has its model runner: it writes decisions to workers instead of executing them.

Owns what is on its way to them; called by the core with steps in flight. It never waits unless it is asked for a
result. vLLM: `vllm/v1/executor/abstract.py:Executor.execute_model`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from engine.config import SchedulerConfig
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.parallel.executors import Executor
from engine.parallel.lockstep import Lockstep
from engine.parallel.messages import StepMessage, StepWriter
from engine.parallel.transfers import RemoteConnector
from engine.parallel.workers import Workers
from engine.worker.sleep import TAGS


class RemoteRunner:
    """Steps go to the workers, and come back as futures."""

    grammar = graphs = None  # a worker has its own

    def __init__(  # noqa: PLR0913  what a runner is made with, and who runs
        self,
        workers: Workers,
        limits: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        *,
        connector: RemoteConnector | None = None,
        seed: int = 0,
    ) -> None:
        self.executor, parallel = workers.executor, workers.parallel
        self.output_rank, self.connector = parallel.output_rank, connector
        self.writer = StepWriter(sends_tokens=not parallel.async_scheduling)
        self.lockstep = Lockstep() if parallel.data_parallel_size > 1 else None
        self.executor.collective_rpc("initialize_from_config", limits, num_blocks, block_size, seed)
        if connector:
            connector.attach(self.executor.world_size, self.executor.collective_rpc("about_connector")[0])

    def submit(self, output: SchedulerOutput) -> Any:
        """Send a step on its way; None if there is nothing to compute in it, and transfers have got on."""
        message = self.writer.write(output)
        if self.connector:
            return self._submit_with_transfers(message, output)
        if self.lockstep:
            return message and self._submit_together(message)
        return message and self.executor.submit("execute_model", message, reply_rank=self.output_rank)

    def _submit_with_transfers(self, message: StepMessage | None, output: SchedulerOutput) -> Any:
        """Orders in front of the step, and answers of all ranks behind it."""
        connector = self.connector
        assert connector and output.kv_connector_metadata
        orders = connector.take_orders(output.kv_connector_metadata)
        future = self.executor.submit("execute_with_transfers", message, *orders)

        def result() -> Any:
            answers = future.result()
            connector.hear([news for _, news in answers])
            return answers[self.output_rank][0]

        return SimpleNamespace(result=result) if message else result()

    def _submit_together(self, message: StepMessage | None) -> Any:
        """A step that all engines take which share experts; its result is there when all of them have taken it."""
        lockstep = self.lockstep
        assert lockstep
        future = self.executor.submit("step_together", message, lockstep.state, reply_rank=self.output_rank)

        def result() -> ModelRunnerOutput:
            answer, states = future.result()
            lockstep.agree(states)
            return answer

        return SimpleNamespace(result=result)

    def execute_dummy_batch(self) -> None:
        """Take part in a step of other engines with no token of our own, and wait for it."""
        self._submit_together(None).result()

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A core with steps in flight calls `submit`."""
        raise NotImplementedError


class RemoteSleeper:
    """The memory of all workers: away and back together."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.asleep = executor, set[str]()

    def sleep(self, level: int) -> None:
        """As a runner's own."""
        self.executor.collective_rpc("fall_asleep", level)
        self.asleep = set(TAGS)

    def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """As a runner's own."""
        self.executor.collective_rpc("wake_up", sorted(tags))
        self.asleep -= set(tags)

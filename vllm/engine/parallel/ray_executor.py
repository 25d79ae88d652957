"""The same workers as Ray's actors: on this machine, or on the machines of a cluster.

Owns the actors and their places; called by the engine core. It never knows what a call does. vLLM:
`vllm/v1/executor/ray_executor_v2.py`, with message queues where we use Ray's calls.
"""

from __future__ import annotations

import common

import atexit
import os
import pickle
import weakref
from collections.abc import Callable
from typing import Any

from engine.distributed.group import init_distributed, meeting_point
from engine.parallel.executors import Executor, ExecutorFailed, _living
from engine.parallel.worker import Worker


class RayWorker:
    """A worker as one of Ray's actors."""

    def __init__(self, rank: int, world_size: int, host: str, port: int) -> None:
        join = init_distributed
        self.worker = Worker(join(rank, world_size, port, host, 1800) if world_size > 1 else None)

    def call(self, data: bytes, answers: bool) -> bytes:
        return self.worker.call_pickled(data, answers)


class RayExecutor(Executor):
    """The same workers as Ray's actors, one bundle of a placement group each: on this machine, or on the machines of a
    cluster that runs already (`address`). vLLM 0.32: `RayExecutorV2`, with message queues where we use Ray's calls.
    """

    def __init__(self, world_size: int, address: str | None = None, timeout: float | None = None) -> None:
        try:
            import ray
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        except ImportError:
            raise common.InputError("distributed_executor_backend ray: not installed; `uv sync --extra ray`") from None
        self.ray, self.world_size, self.timeout = ray, world_size, timeout or 300.0
        self.owns_ray = not ray.is_initialized()
        if self.owns_ray:
            options = {} if address else {"num_cpus": world_size, "include_dashboard": False}
            ray.init(
                address=address or os.environ.get("RAY_ADDRESS"),
                log_to_driver=False,
                logging_level="error",  # pyright: ignore[reportArgumentType]  Ray takes names, too
                runtime_env={"env_vars": {"PYTHONPATH": str(common.HERE)}},
                **options,
            )
        _living.add(self)
        device: dict[str, float] = {"GPU": 1} if common.HAS_GPU else {"CPU": 1}
        self.group = ray.util.placement_group([device] * world_size, strategy="PACK")  # as few machines as possible
        self.actors: list[Any] = []
        self._end = weakref.finalize(self, end_actors, ray, self.actors, self.group, self.owns_ray)
        atexit.register(self._end)
        ray.get(self.group.ready(), timeout=self.timeout)
        one_machine = len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 1
        host = "127.0.0.1" if one_machine else ray.util.get_node_ip_address()
        self.store = meeting_point(host)

        resources = {"num_gpus": 1} if common.HAS_GPU else {"num_cpus": 1}
        self.actors += [
            ray.remote(RayWorker)
            .options(scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, rank), **resources)
            .remote(rank, world_size, host, self.store.port)
            for rank in range(world_size)
        ]

    def submit(
        self, method: str | Callable, *args: Any, reply_rank: int | None = None, timeout: float | None = None
    ) -> RayFuture:
        """Call every actor; who is not to answer sends None. `timeout` in seconds. ExecutorFailed if one has died."""
        if self.failed:
            raise ExecutorFailed(self.failed)
        data = pickle.dumps((method, args), protocol=5)
        calls = [actor.call.remote(data, reply_rank in (None, rank)) for rank, actor in enumerate(self.actors)]
        return RayFuture(self, calls, reply_rank, timeout or self.timeout)

    def shutdown(self) -> None:
        """End actors and their places, and Ray where we started it."""
        self.failed = self.failed or "the executor was shut down"
        self._end()
        atexit.unregister(self._end)
        _living.discard(self)


def end_actors(ray: Any, actors: list[Any], group: Any, owns_ray: bool) -> None:
    """End the actors, give their places back, and end Ray where it was started for them."""
    for actor in actors:
        ray.kill(actor)
    ray.util.remove_placement_group(group)
    if owns_ray:
        ray.shutdown()


class RayFuture:
    """The answers that Ray has promised; a failed call ends the whole group of workers."""

    def __init__(self, executor: RayExecutor, calls: list[Any], reply_rank: int | None, timeout: float) -> None:
        self.executor, self.calls, self.reply_rank, self.timeout = executor, calls, reply_rank, timeout

    def result(self) -> Any:
        """Waits for all: an actor that is gone fails its call at once, even if another was to answer."""
        ray, executor = self.executor.ray, self.executor
        try:
            answers = [pickle.loads(x) for x in ray.get(self.calls, timeout=self.timeout)]
        except ray.exceptions.RayTaskError as error:
            cause = error.as_instanceof_cause()
            executor.failed = f"a worker raised {str(error.cause).partition(chr(10))[0]}; all were ended"
            executor.shutdown()
            if isinstance(cause, ValueError) and "InputError" in type(cause).__name__:
                raise common.InputError(str(error.cause)) from None
            raise ExecutorFailed(executor.failed) from None
        except ray.exceptions.RayError as error:
            executor.failed = f"a worker died ({type(error).__name__}); the others were ended"
            executor.shutdown()
            raise ExecutorFailed(executor.failed) from None
        return answers if self.reply_rank is None else answers[self.reply_rank]

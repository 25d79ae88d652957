"""The engine on two clocks: its real scheduler decides, and a model of the step says how long each decision takes.

Owns the order in which a server hears, schedules and waits, and what requests saw; called by `fit` and `predict`.
It never decides, and never knows what a step costs. vLLM: `step_with_batch_queue` in `vllm/v1/engine/core.py`.

While the GPU computes a step, the loop plans the next one. It hears of new requests only between two plans, and once
two steps are on their way it waits for the older. So a step starts when the one before it has ended, or, if the GPU was
idle, when the loop has scheduled and launched it, whichever is later.
"""

from __future__ import annotations

import common

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.config import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.scheduler import make_scheduler
from engine.output import SchedulerOutput
from engine.request import Request, SamplingParams
from lab.step_time import StepWork, step_work


class Job(NamedTuple):
    """A request that will come. Seconds and tokens; `group` names those that share the first `prefix_len` tokens."""

    arrival: float
    input_len: int
    output_len: int
    prefix_len: int = 0
    group: int = 0

    def prompt(self, index: int) -> list[int]:
        """Token ids that nobody else has, but for the prefix of the group."""
        return [2 * self.group + 1] * self.prefix_len + [2 * index + 2] * (self.input_len - self.prefix_len)


@dataclass(frozen=True)
class Setup:
    """What the engine is started with. `num_blocks` counts the null block."""

    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    async_scheduling: bool = True


@dataclass(slots=True)
class Outcome:
    """What one request saw: seconds on the loop's clock."""

    queued: float = 0.0  # the loop heard of it
    scheduled: float = -1.0  # it was first admitted
    times: list[float] = field(default_factory=list)  # its tokens were heard of
    steps: list[int] = field(default_factory=list)  # in which step its first and its last token were computed
    preemptions: int = 0
    cached: int = 0  # tokens of its prompt that were found in the prefix cache


class Step(NamedTuple):
    """One step: when it was planned, when the GPU began and ended it, what was in it, and what was left over."""

    scheduled: float
    start: float
    end: float
    work: StepWork
    running: int
    waiting: int
    blocks: int  # owned


class Wait(NamedTuple):
    """The loop was idle until then."""

    until: float


class Heard(NamedTuple):
    """The loop waited for this step."""

    step: int


@dataclass
class Prediction:
    """A run: what requests saw, every step, and the order in which the loop waited (an int: it planned that step)."""

    outcomes: list[Outcome]
    steps: list[Step]
    order: list[int | Wait | Heard]


class TimedCore(EngineCore):
    """The engine's loop with clocks in the place of a model. Everybody's next token is 0."""

    def __init__(self, setup: Setup, seconds: Callable[[StepWork], float], host: float, cold: float = 0.0) -> None:
        """`host`: from a plan to its launch; the first one takes `cold` longer."""
        sizes = setup.num_blocks, setup.block_size, setup.enable_prefix_caching
        super().__init__(make_scheduler(setup.scheduler, *sizes, async_scheduling=setup.async_scheduling))
        self.seconds, self.host, self.cold = seconds, host, cold
        self.depth = 1 + setup.async_scheduling
        self.usable = setup.num_blocks - 1
        self.clock = self.gpu = 0.0  # the loop's; when the GPU has done all that it was given
        self.queue: deque[tuple[int, SchedulerOutput, dict[str, list[int]]]] = deque()  # steps not heard of
        self.steps: list[Step] = []
        self.order: list[int | Wait | Heard] = []

    @property
    def is_idle(self) -> bool:
        return not self.queue and not self.scheduler.requests

    def wait(self, until: float) -> None:
        """Nothing to do before then."""
        self.clock = max(self.clock, until)
        self.order.append(Wait(until))

    def plan(self) -> SchedulerOutput:
        """Schedule a step and launch it, if there is anything in it."""
        output, token = self.scheduler.schedule(), [0]
        chunks, sampled = [], {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            S = request.num_computed_tokens
            chunks.append((num_tokens, S))
            if request.num_tokens + max(0, request.num_output_placeholders - 1) <= S:
                sampled[request_id] = token
        planned = self.clock
        if chunks:
            self.queue.append((len(self.steps), output, sampled))
            self.order.append(len(self.steps))
            work = step_work(chunks)
            self.clock += self.host if self.steps else self.host + self.cold
            start = max(self.gpu, self.clock)
            self.gpu = start + self.seconds(work)
            scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
            left = len(scheduler.running), len(scheduler.waiting), self.usable - pool.num_free_blocks
            self.steps.append(Step(planned, start, self.gpu, work, *left))
        return output

    def hear(self) -> tuple[int, list[str]]:
        """Wait for the oldest step. Returns its index, and who got a token."""
        index, output, sampled = self.queue.popleft()
        self.clock = max(self.clock, self.steps[index].end)
        self.order.append(Heard(index))
        outputs = self.scheduler.update_from_output(output, sampled)
        return index, [each.request_id for each in outputs]


def predict(
    jobs: Sequence[Job], setup: Setup, seconds: Callable[[StepWork], float], host: float, cold: float = 0.0
) -> Prediction:
    """Serve `jobs`, in the order of their arrival. Raises InputError for one that can never be served."""
    core = TimedCore(setup, seconds, host, cold)
    outcomes = [Outcome() for _ in jobs]
    coming = 0
    while coming < len(jobs) or not core.is_idle:
        if core.is_idle:
            core.wait(jobs[coming].arrival)
        while coming < len(jobs) and jobs[coming].arrival <= core.clock:
            params = SamplingParams(max_tokens=jobs[coming].output_len, ignore_eos=True)
            prompt = jobs[coming].prompt(coming)
            core.add_request(Request(str(coming), prompt, params, arrival_time=jobs[coming].arrival))
            outcomes[coming].queued = core.clock
            coming += 1
        now, nothing_new = core.clock, True
        if core.scheduler.requests:
            output = core.plan()
            nothing_new = not output.num_scheduled_tokens
            for request in output.scheduled_new_reqs:
                outcomes[int(request.request_id)].scheduled = now
                outcomes[int(request.request_id)].cached = request.num_cached_tokens
            for request in output.preempted_reqs:
                outcomes[int(request.request_id)].preemptions += 1
        if core.queue and (nothing_new or len(core.queue) == core.depth):
            index, names = core.hear()
            for name in names:
                outcome = outcomes[int(name)]
                if not outcome.times:
                    outcome.steps = [index, index]
                outcome.times.append(core.clock)
                outcome.steps[1] = index
        elif nothing_new:
            raise common.InputError("the scheduler can go no further: a request needs more KV blocks than there are")
    return Prediction(outcomes, core.steps, core.order)

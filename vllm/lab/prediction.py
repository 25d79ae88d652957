"""The engine on two clocks: its real scheduler decides, and a model of the step says how long each decision takes.

Owns the order in which a server hears, schedules and waits, and what requests saw; called by `fit` and `predict`.
It never decides, and never knows what a step costs. vLLM: `step_with_batch_queue` in `vllm/v1/engine/core.py`.

While the GPU computes a step, the loop plans the next one. It hears of new requests only between two plans, and once
two steps are on their way it waits for the older. So a step starts when the one before it has ended, or, if the GPU was
idle, when the loop has scheduled and launched it, whichever is later.
"""

from __future__ import annotations

import common

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.config import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.scheduler import make_scheduler
from engine.output import EngineCoreOutput, SchedulerOutput
from engine.request import Request, SamplingParams
from lab.step_time import StepWork, slowest, step_work


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
    data_parallel_size: int = 1
    share_experts: bool = False  # then these engines compute every step together


@dataclass(slots=True)
class Outcome:
    """What one request saw: seconds on the loop's clock."""

    loop: int = 0  # which one served it
    queued: float = 0.0  # the loop heard of it
    scheduled: float = -1.0  # it was first admitted
    times: list[float] = field(default_factory=list)  # its tokens were heard of
    steps: list[int] = field(default_factory=list)  # that admitted it, that computed its first token, and its last
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
    """A run of one loop: what all requests saw, its steps, and the order in which it planned (an int) and waited."""

    outcomes: list[Outcome]
    steps: list[Step]
    order: list[int | Wait | Heard]


class TimedLoop:
    """The loop of an engine with clocks in the place of a model; or of several that share experts and step together.
    Everybody's next token is 0."""

    def __init__(
        self, setup: Setup, seconds: Callable[[StepWork], float], host: float, cold: float = 0.0, engines: int = 1
    ) -> None:
        """`host`: from a plan to its launch; the first one takes `cold` longer."""
        config = dataclasses.replace(setup.scheduler, evict_uncomputed_blocks=False)  # as vLLM decides
        sizes = setup.num_blocks, setup.block_size, setup.enable_prefix_caching
        self.cores = [
            EngineCore(make_scheduler(config, *sizes, async_scheduling=setup.async_scheduling)) for _ in range(engines)
        ]
        self.seconds, self.host, self.cold = seconds, host, cold
        self.depth, self.usable = 1 + setup.async_scheduling, setup.num_blocks - 1
        self.clock = self.gpu = 0.0  # the loop's; when the GPU has done all that it was given
        self.queue: deque[tuple[int, list[tuple[EngineCore, SchedulerOutput, dict[str, list[int]]]]]] = deque()
        self.steps: list[Step] = []
        self.order: list[int | Wait | Heard] = []

    @property
    def is_idle(self) -> bool:
        return not self.queue and not any(core.scheduler.requests for core in self.cores)

    def wait(self, until: float) -> None:
        """Nothing to do before then."""
        self.clock = max(self.clock, until)
        self.order.append(Wait(until))

    def least_loaded(self) -> tuple[int, EngineCore]:
        """Of its engines the one that vLLM's balancer would choose, and how loaded it is."""
        loads = [4 * len(core.scheduler.waiting) + len(core.scheduler.running) for core in self.cores]
        return min(loads), self.cores[loads.index(min(loads))]

    def plan(self) -> list[SchedulerOutput]:
        """Schedule a step and launch it, if there is anything in it."""
        planned, parts, works = self.clock, [], []
        for core in self.cores:
            output = core.scheduler.schedule()
            work, sampled = look_at(core, output)
            parts.append((core, output, sampled))
            works.append(work)
        if any(work.tokens for work in works):
            self.queue.append((len(self.steps), parts))
            self.order.append(len(self.steps))
            self.clock += self.host if self.steps else self.host + self.cold
            start = max(self.gpu, self.clock)
            work = works[0] if len(works) == 1 else slowest(works)
            self.gpu = start + self.seconds(work)
            schedulers = [core.scheduler for core in self.cores]
            left = [
                sum(len(scheduler.running) for scheduler in schedulers),
                sum(len(scheduler.waiting) for scheduler in schedulers),
                sum(self.usable - scheduler.kv_cache_manager.block_pool.num_free_blocks for scheduler in schedulers),
            ]
            self.steps.append(Step(planned, start, self.gpu, work, *left))
        return [output for _, output, _ in parts]

    def hear(self) -> tuple[int, list[EngineCoreOutput]]:
        """Wait for the oldest step. Returns its index, and what it brought."""
        index, parts = self.queue.popleft()
        self.clock = max(self.clock, self.steps[index].end)
        self.order.append(Heard(index))
        heard = [core.scheduler.update_from_output(output, sampled) for core, output, sampled in parts]
        return index, heard[0] if len(heard) == 1 else [each for outputs in heard for each in outputs]


def look_at(core: EngineCore, output: SchedulerOutput) -> tuple[StepWork, dict[str, list[int]]]:
    """What is in a step, and who gets a token from it: whoever has caught up."""
    requests, token, chunks, sampled = core.scheduler.requests, [0], [], {}
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        context = request.num_computed_tokens
        chunks.append((num_tokens, context))
        if request.num_tokens + max(0, request.num_output_placeholders - 1) <= context:
            sampled[request_id] = token
    return step_work(chunks), sampled


def request_of(job: Job, index: int) -> Request:
    """Named by its place in the order of arrival."""
    params = SamplingParams(max_tokens=job.output_len, ignore_eos=True)
    return Request(str(index), job.prompt(index), params, arrival_time=job.arrival)


class Server:
    """Several loops, and requests that are sent to the least loaded of them when they arrive."""

    def __init__(self, jobs: Sequence[Job], loops: Sequence[TimedLoop]) -> None:
        self.jobs, self.loops, self.coming = jobs, loops, 0
        self.outcomes = [Outcome() for _ in jobs]
        self.unfinished = 0

    def receive(self, loop: TimedLoop) -> None:
        """All that have arrived by the time of this loop, which is the one furthest behind."""
        while self.coming < len(self.jobs) and (job := self.jobs[self.coming]).arrival <= loop.clock:
            chosen = min(self.loops, key=lambda each: each.least_loaded()[0])
            if chosen.is_idle and chosen.clock < job.arrival:
                chosen.wait(job.arrival)
            chosen.least_loaded()[1].add_request(request_of(job, self.coming))
            self.outcomes[self.coming].loop = self.loops.index(chosen)
            self.outcomes[self.coming].queued = chosen.clock
            self.coming += 1

    def turn(self, loop: TimedLoop) -> int:
        """Plan once, and hear of a step if there is nothing else to do. Returns how many requests ended."""
        now, ended, is_empty = loop.clock, 0, True
        if any(core.scheduler.requests for core in loop.cores):
            for output in loop.plan():
                is_empty = is_empty and not output.num_scheduled_tokens
                for request in output.scheduled_new_reqs:
                    outcome = self.outcomes[int(request.request_id)]
                    outcome.scheduled, outcome.cached = now, request.num_cached_tokens
                    outcome.steps = [len(loop.steps) - 1] * 3
                for request in output.preempted_reqs:
                    self.outcomes[int(request.request_id)].preemptions += 1
        if not loop.queue:
            raise common.InputError("the scheduler can go no further: a request needs more KV blocks than there are")
        if is_empty or len(loop.queue) == loop.depth:
            index, heard = loop.hear()
            for each in heard:
                outcome = self.outcomes[int(each.request_id)]
                if not outcome.times:
                    outcome.steps[1] = index
                outcome.steps[2] = index
                outcome.times.append(loop.clock)
                ended += each.finish_reason is not None and int(each.request_id) < self.unfinished
        return ended

    def run(self, watched: int) -> None:
        """Until the first `watched` requests have their answers."""
        self.unfinished = left = watched
        while left:
            busy = [loop for loop in self.loops if not loop.is_idle]
            loop = min(busy or self.loops, key=lambda each: each.clock)
            if not busy:
                loop.wait(self.jobs[self.coming].arrival)
            self.receive(loop)
            if not loop.is_idle:
                left -= self.turn(loop)


def predict(
    jobs: Sequence[Job],
    setup: Setup,
    seconds: Callable[[StepWork], float],
    host: float,
    cold: float = 0.0,
    watched: int | None = None,
) -> list[Prediction]:
    """Serve `jobs`, in the order of their arrival, until the first `watched` are answered (None: all of them).

    One prediction for each loop, all with the same outcomes. Raises InputError for a request that can never be served.
    """
    together = setup.data_parallel_size if setup.share_experts else 1
    loops = [TimedLoop(setup, seconds, host, cold, together) for _ in range(setup.data_parallel_size // together)]
    for job in (max(jobs, key=lambda job: job.input_len), max(jobs, key=lambda job: job.input_len + job.output_len)):
        loops[0].cores[0].check_request(request_of(job, jobs.index(job)))  # not after a minute
    server = Server(jobs, loops)
    server.run(len(jobs) if watched is None else min(watched, len(jobs)))
    return [Prediction(server.outcomes, loop.steps, loop.order) for loop in loops]

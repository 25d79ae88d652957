"""The engine on a clock: its real scheduler, and integers in place of a model.

Owns the virtual time of a run; called by the tour 06d and by `tuning`. It never runs a model, and never rounds.
vLLM: `vllm/v1/engine/core.py`, and no counterpart to the clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import Request, SamplingParams
from lab.dry_run import DryRun
from lab.records import Record
from lab.workload import Prompt


@dataclass(frozen=True)
class StepCost:
    """Microseconds of a step = fixed + per token computed + per token of context read. Integers throughout.

    The defaults: Llama-3.1-8B in bf16 on an H100, 6.44 ms and 43.7 ns as vLLM's blog measured them (22 April 2026);
    27 µs per token is 16 GFLOP at 60 % of the data sheet's rate."""

    fixed_us: int = 6_440
    token_ns: int = 27_000
    context_ns: int = 44

    def __call__(self, work: Sequence[tuple[int, int]]) -> int:
        """`work`: (tokens computed, context) of each sequence in the step."""
        tokens, context = (sum(column) for column in zip(*work))
        return self.fixed_us + (self.token_ns * tokens + self.context_ns * context) // 1000

    def alone(self, prompt: Prompt) -> int:
        """Microseconds for a request that has the engine to itself."""
        lengths = [prompt.input_len + i for i in range(prompt.output_len)]
        return self([(lengths[0], lengths[0])]) + sum(self([(1, S)]) for S in lengths[1:])


class SimulatedCore(DryRun):
    """The engine's loop with a clock in place of the model: everybody's next token is 0, and takes its time."""

    now = 0

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        scheduled, requests = output.num_scheduled_tokens, self.scheduler.requests
        self.now += StepCost()([(n, requests[i].num_computed_tokens) for i, n in scheduled.items()])
        return super().execute_model(output)


@dataclass
class Run:
    """A simulated run. Times are microseconds."""

    prompts: Sequence[Prompt]
    arrivals: Sequence[int]  # when the user asked
    sent: list[int]  # when the client let it through
    times: list[list[int]]  # of each token
    steps: list[list[int]]  # each step: start, sequences in it, waiting in the engine, waiting in the client

    @property
    def records(self) -> list[Record]:
        """For `summarize`: the same yardstick as for a real server."""
        return [
            Record(at / 1e6, sent / 1e6, times[-1] / 1e6, [t / 1e6 for t in times], p.input_len, p.output_len)
            for p, at, sent, times in zip(self.prompts, self.arrivals, self.sent, self.times)
        ]


def run_simulated(
    prompts: Sequence[Prompt],
    arrivals: Sequence[int],
    max_num_seqs: int,
    max_num_batched_tokens: int = 8192,
    max_concurrency: int = 0,
) -> Run:
    """Serve `prompts`, due at `arrivals` (µs, ascending), whole prompts at a time. `max_concurrency` 0: open loop.

    A step sees the requests that were sent by the time it starts. The pool is never the limit: one block per seat.
    """
    longest = max(p.input_len + p.output_len for p in prompts)
    config = SchedulerConfig(longest, max_num_seqs, max_num_batched_tokens, enable_chunked_prefill=False)
    core = SimulatedCore(make_scheduler(config, 1 + max_num_seqs, block_size=longest, enable_prefix_caching=False))
    waiting = deque(range(len(prompts)))
    run = Run(prompts, arrivals, [0] * len(prompts), [[] for _ in prompts], [])
    seats = deque([0] * (max_concurrency or len(prompts)))  # since when each of the client's seats is free
    while waiting or core.scheduler.has_unfinished_requests():
        if not core.scheduler.has_unfinished_requests():
            core.now = max(core.now, arrivals[waiting[0]])
        while waiting and seats and arrivals[waiting[0]] <= core.now:
            i = waiting.popleft()
            run.sent[i] = max(arrivals[i], seats.popleft())
            params = SamplingParams(max_tokens=prompts[i].output_len, ignore_eos=True)
            core.add_request(Request(str(i), [0] * prompts[i].input_len, params))
        start, outside = core.now, bisect_right(arrivals, core.now) - (len(prompts) - len(waiting))
        heard = core.step()
        run.steps.append([start, len(heard), len(core.scheduler.waiting), outside])
        for output in heard:
            run.times[int(output.request_id)].append(core.now)
            if output.finish_reason:
                seats.append(core.now)
    return run

"""The engine core with several steps in flight: one for each stage of a pipeline, or one that runs and the next.

Owns the queue of steps; called by `LLMEngine` or an engine's process. It never lets a token of a request that has ended
through. vLLM: `step_with_batch_queue` in `vllm/v1/engine/core.py`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from engine.core.engine_core import EngineCore
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import Request
from engine.seams import Runner


class StepSender(Runner, Protocol):
    """A runner that need not be waited for."""

    def submit(self, output: SchedulerOutput) -> Any:
        """Send a step on its way; what is returned has a `result()`, a ModelRunnerOutput. None if there is nothing to
        compute in it."""
        ...


class PipelineEngineCore(EngineCore):
    """The loop with up to `max_concurrent_batches` steps in flight: one per stage (`step_with_batch_queue`).

    The scheduler needs no change. A request whose token is still on its way has nothing left to compute (with
    drafts, less than nothing), so a second `schedule()` passes it over and finds others; of a long prompt it takes
    the next chunk, right behind the last one. Unless `async_scheduling` asks for a plan that counts on
    that token: then the second step is planned for the same requests while the first one runs.
    """

    def __init__(self, scheduler: Any, runner: StepSender, max_concurrent_batches: int = 1) -> None:
        super().__init__(scheduler, runner)
        self.remote = runner
        self.max_concurrent_batches = max_concurrent_batches
        self.batch_queue: deque[tuple[Any, Any, dict[str, tuple[Request, int]]]] = deque()
        self.empty_output: Any = None  # of the last step in which nobody could run
        self.preempted: list[str] = []  # since it was last told: a step without members may preempt, too

    def put_in_flight(self) -> Any:
        """Schedule one more micro-batch if there is room for it. Returns its SchedulerOutput, or None."""
        if len(self.batch_queue) == self.max_concurrent_batches:
            return None
        output = self.scheduler.schedule()
        self.preempted += [request.request_id for request in output.preempted_reqs]
        future = self.remote.submit(output)
        if future is None:
            self.empty_output = output
            return None
        members = (*output.scheduled_running_reqs, *output.scheduled_new_reqs, *output.scheduled_resumed_reqs)
        lives = {request.request_id: (request, request.num_preemptions) for request in members}
        self.batch_queue.append((output, future, lives))
        return output

    def next_result(self) -> tuple[Any, ModelRunnerOutput]:
        """The oldest micro-batch, and what came of it; waits for it.

        What belongs to a request that has ended is dropped: another may have its name by now. A request preempted
        meanwhile will compute that token again, so this one is dropped: it would count twice.
        Drafts for the next step go to the scheduler, but not those that follow such a token. A scheduler that is one
        step ahead counts what is on its way, and hears of every token but those of requests that have ended.
        """
        if not self.batch_queue:  # nobody could run; the scheduler may have something to say about that
            return self.empty_output, ModelRunnerOutput()
        output, future, lives = self.batch_queue.popleft()
        result = future.result()
        sampled, scores, drafts = result.sampled_token_ids, result.prompt_logprobs_dict, result.draft_token_ids
        alive = {name for name, (request, _) in lives.items() if self.scheduler.requests.get(name) is request}
        scores = {name: scores[name] for name in scores.keys() & alive}
        if self.scheduler.async_scheduling:
            for name in lives.keys() - alive:
                output.scheduled_spec_decode_tokens.pop(name, None)
        else:
            alive = {name for name in alive if lives[name][0].num_preemptions == lives[name][1]}
        if drafts:
            self.scheduler.update_draft_token_ids({name: drafts[name] for name in drafts.keys() & alive})
        sampled = {request_id: token_ids for request_id, token_ids in sampled.items() if request_id in alive}
        vectors = {name: vector for name, vector in result.pooler_output.items() if name in alive}
        return output, ModelRunnerOutput(sampled, result.logprobs, scores, pooler_output=vectors)

    def step(self) -> list[Any]:
        """Fill the pipeline, then take what comes out of it first."""
        while self.put_in_flight():
            pass
        return self.update_from_output(*self.next_result())

"""The loop: schedule, run the model, update.

Owns a scheduler and a runner, and the requests that it lets in; called by the front end, one step at a time. It never
tokenizes, and knows no tensor. vLLM: `vllm/v1/engine/core.py`.
"""

from __future__ import annotations

from common import InputError

from collections.abc import Iterable

from engine.core.scheduler import Scheduler
from engine.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from engine.request import Request, RequestStatus, SamplingParams, prompt_length_error
from engine.seams import Runner


class EngineCore:
    """One forward pass after the other, each for whoever is scheduled."""

    def __init__(self, scheduler: Scheduler, runner: Runner | None = None) -> None:
        """Without a `runner`, a simulation overrides `execute_model`. Raises InputError for a pool that cannot hold one
        sequence of `max_model_len`, as vLLM does."""
        if runner is not None:
            check_pool(scheduler)
        self.scheduler, self.runner = scheduler, runner

    def check_request(self, request: Request) -> None:
        """Refuse on arrival what can never be served; the scheduler would let it wait for ever. Raises InputError."""
        if request.request_id in self.scheduler.requests:
            raise InputError(f"request_id {request.request_id!r}: is in use")
        if error := prompt_length_error(request.num_prompt_tokens, self.scheduler.config.max_model_len):
            raise InputError(error)
        manager = self.scheduler.kv_cache_manager
        needed = manager.get_num_blocks_to_allocate(request, self.scheduler.num_slots(request))
        usable = manager.block_pool.num_blocks - 1
        if needed > usable:
            raise InputError(f"request {request.request_id!r} needs {needed} KV blocks, there are {usable}")

    def add_request(self, request: Request) -> None:
        """Queue it. Raises InputError for what `check_request` refuses."""
        self.check_request(request)
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[Request]:
        """End them, wherever they are. Returns those that there were."""
        return self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def step(self) -> list[EngineCoreOutput]:
        """One forward pass for all that are scheduled."""
        output = self.scheduler.schedule()
        return self.update_from_output(output, self.execute_model(output))

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run the model on the scheduled tokens. What it guesses for the next step goes to the scheduler at once."""
        assert self.runner
        result = self.runner.execute_model(output)
        if result.draft_token_ids:
            self.scheduler.update_draft_token_ids(result.draft_token_ids)
        return result

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """The scheduler hears of the sampled tokens; log probabilities go past it, to whoever gets the outputs."""
        outputs = self.scheduler.update_from_output(output, result.sampled_token_ids)
        if result.logprobs:
            entries = {request_id: iter(found) for request_id, found in result.logprobs.items()}
            for each in outputs:
                if each.new_token_ids and each.request_id in entries:
                    each.new_logprobs = next(entries[each.request_id])
        if scores := dict(result.prompt_logprobs_dict):
            for each in outputs:
                each.new_prompt_logprobs = scores.pop(each.request_id, None)
            # Who was preempted meanwhile got no token, and will compute that one again, but not its scores.
            untold = [name for name in scores if name in self.scheduler.requests]
            outputs += [EngineCoreOutput(name, [], new_prompt_logprobs=scores[name]) for name in untold]
        # Who wanted a vector of its prompt, and no answer, has it now.
        vectors = result.pooler_output
        for request in self.scheduler.finish_requests(vectors, RequestStatus.FINISHED_STOPPED) if vectors else ():
            name = request.request_id
            outputs.append(EngineCoreOutput(name, [], "stop", pooling_output=vectors[name]))
        return outputs


def check_pool(scheduler: Scheduler) -> None:
    """Raises InputError for a pool that cannot hold one sequence of `max_model_len`."""
    manager, max_model_len = scheduler.kv_cache_manager, scheduler.config.max_model_len
    num_blocks = manager.block_pool.num_blocks
    needed = 1 + manager.get_num_blocks_to_allocate(Request("longest", [0], SamplingParams()), max_model_len)
    if num_blocks < needed:
        raise InputError(
            f"num_blocks {num_blocks}: must be at least {needed}, for one sequence of max_model_len ({max_model_len}) "
            "and the block that is nobody's"
        )

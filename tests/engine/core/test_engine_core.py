"""What came of a step, on its way past the scheduler to whoever gets the outputs."""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.output import EngineCoreOutput, ModelRunnerOutput
from engine.request import Request, SamplingParams
from engine.sampling.sampler import Logprob
from lab.dry_run import DryRun

SCORES = [None, {2: Logprob(-1.0, 3)}]


def scheduled(*request_ids, **fields):
    """A core without a model, and a step with the prompts of these."""
    core = DryRun(make_scheduler(SchedulerConfig(64, 4, 64), 20, 4))
    for request_id in request_ids:
        core.add_request(Request(request_id, [1, 2], SamplingParams(max_tokens=9, **fields)))
    return core, core.scheduler.schedule()


def test_log_probabilities_go_with_their_token():
    core, output = scheduled("a", "b", logprobs=0)
    found = {token: {token: Logprob(-0.5, 1)} for token in (5, 6, 7)}
    result = ModelRunnerOutput({"a": [5], "b": [7]}, {"b": [found[7]]}, {"a": SCORES})
    assert core.update_from_output(output, result) == [
        EngineCoreOutput("a", [5], new_prompt_logprobs=SCORES),
        EngineCoreOutput("b", [7], new_logprobs=found[7]),
    ]


def test_scores_of_a_step_that_brought_no_token_are_told_unless_nobody_waits_for_them():
    """As of a request that was preempted meanwhile: its prompt is scored once."""
    core, output = scheduled("a", "b")
    core.abort_requests(["b"])
    result = ModelRunnerOutput({}, {}, {"a": SCORES, "b": SCORES})
    assert core.update_from_output(output, result) == [EngineCoreOutput("a", [], new_prompt_logprobs=SCORES)]

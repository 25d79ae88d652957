"""The engine's loop without a model: every next token is 0, and only queues, budget and blocks are kept.

Owns nothing: a scheduler goes in, and each step advances whoever has caught up. Called by simulations and by tests of
drivers. It never allocates a tensor. vLLM: `vllm/v1/engine/core.py`, with no counterpart to a step without a model.
"""

from __future__ import annotations

from engine.core.engine_core import EngineCore
from engine.output import ModelRunnerOutput, SchedulerOutput


class DryRun(EngineCore):
    """Each step is as long as the scheduler says, and computes nothing."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A prompt that was computed in part samples nothing yet."""
        requests = {request_id: self.scheduler.requests[request_id] for request_id in output.num_scheduled_tokens}
        return ModelRunnerOutput({name: [0] for name, r in requests.items() if r.num_computed_tokens == r.num_tokens})

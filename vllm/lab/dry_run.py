"""The engine's loop without a model: queues, budget and blocks as they are, and every next token is 0.

Owns the tokens that nobody computed; called by tours and numbers that look at decisions, or at what they cost. It never
allocates a tensor. vLLM: the mocked `ModelRunnerOutput` in `tests/v1/core/test_scheduler.py`.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

from engine.core.engine_core import EngineCore
from engine.output import SchedulerOutput


class DryRun(EngineCore):
    """Whoever is in a step gets a token, so prompts must be computed whole."""

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        return {request_id: [0] for request_id in output.num_scheduled_tokens}

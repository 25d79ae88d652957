"""A scheduler as careful as lesson 04's: whoever is admitted has blocks for its whole life, so nobody is preempted.

Owns one rule, who is admitted; called by `goodput` for the engines of its clusters, and by `drafter_training`, which
would record a preempted request twice. It never looks into a prefix cache.
vLLM: `vllm/v1/core/sched/scheduler.py`, which admits on less.
"""

from __future__ import annotations

from engine.core.scheduler import Scheduler
from engine.request import Request


class ReservingScheduler(Scheduler):
    """The engine's scheduler: all decisions are its own but this one."""

    def _admit(self, request: Request) -> int:
        """Take blocks for the whole life of a waiting request. Returns its tokens in this step; 0: it must wait."""
        num_new_tokens = self._num_new_tokens(request)
        if num_new_tokens == 0 or self.kv_cache_manager.allocate_slots(request, self.num_slots(request)) is None:
            return 0
        return num_new_tokens

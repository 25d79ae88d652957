"""A step as it travels to workers, which keep copies of the requests: whole once, differences from then on.

Owns what workers know of each request; called by the engine core's side. It never decides. vLLM: `NewRequestData` and
`CachedRequestData` in `vllm/v1/core/sched/output.py`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from engine.output import SchedulerOutput
from engine.request import Request


@dataclass(slots=True)
class CachedRequestData:
    """A request that workers know: what came since they last heard of it (`vllm/v1/core/sched/output.py`)."""

    request_id: str
    new_token_ids: list[int]
    new_block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class StepMessage:
    """A `SchedulerOutput` for workers, which keep copies: whole requests once, differences from then on."""

    num_scheduled_tokens: dict[str, int]
    new: list[tuple[Request, list[int]]]  # and its blocks
    running: list[CachedRequestData]
    resumed: list[CachedRequestData]
    preempted: list[str]
    finished: list[str]
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)  # lesson 07


class StepWriter:
    """The engine core's side: remembers what workers know of each request. One step ahead, they know the tokens first:
    `sends_tokens` is False then."""

    def __init__(self, sends_tokens: bool = True) -> None:
        self.sends_tokens = sends_tokens
        self.known: dict[str, tuple[int, int]] = {}  # request id: tokens and blocks that were sent
        self.preempted: list[str] = []  # not sent yet
        self.finished: list[str] = []

    def write(self, output: SchedulerOutput) -> StepMessage | None:
        """The message of one step; None if nothing is computed in it. What has ended is told with the next one."""
        self.preempted += [request.request_id for request in output.preempted_reqs]
        self.finished += output.finished_req_ids
        for request in output.preempted_reqs:
            self.known[request.request_id] = (self.known[request.request_id][0], 0)
        for request_id in output.finished_req_ids:  # its name may be taken again in this very step
            self.known.pop(request_id, None)
        if not output.num_scheduled_tokens:
            return None
        tables = output.block_tables
        message = StepMessage(
            output.num_scheduled_tokens,
            new=[self.as_new(request, tables[request.request_id]) for request in output.scheduled_new_reqs],
            running=[self.difference(r, tables[r.request_id]) for r in output.scheduled_running_reqs],
            resumed=[self.difference(r, tables[r.request_id]) for r in output.scheduled_resumed_reqs],
            preempted=self.preempted,
            finished=self.finished,
            scheduled_spec_decode_tokens=output.scheduled_spec_decode_tokens,
        )
        self.preempted, self.finished = [], []
        return message

    def as_new(self, request: Request, blocks: list[int]) -> tuple[Request, list[int]]:
        """Copies for the workers: what they append must not be appended twice where they share our memory."""
        self.known[request.request_id] = (request.num_tokens, len(blocks))
        twin = copy.copy(request)
        twin.all_token_ids, twin.output_token_ids = list(request.all_token_ids), list(request.output_token_ids)
        twin.block_hashes = []
        return twin, list(blocks)

    def difference(self, request: Request, blocks: list[int]) -> CachedRequestData:
        """What is new of a request since the last step: token ids, blocks, num_computed_tokens."""
        tokens, num_blocks = self.known[request.request_id]
        self.known[request.request_id] = (request.num_tokens, len(blocks))
        new_token_ids = request.all_token_ids[tokens:] if self.sends_tokens else []
        return CachedRequestData(
            request.request_id, new_token_ids, list(blocks[num_blocks:]), request.num_computed_tokens
        )

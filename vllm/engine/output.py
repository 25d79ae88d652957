"""What the scheduler, the model runner and the two halves of a connector say to each other.

Owns nothing: plain records, made by the scheduler, read by worker and front end, and pickled on their way between
processes. They never decide. vLLM: `vllm/v1/core/sched/output.py`, `vllm/v1/outputs.py`, `vllm/v1/engine/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.request import Request


@dataclass(slots=True)
class SchedulerOutput:
    """What one step computes. The flattened batch is in the order of `num_scheduled_tokens`: running, then admitted."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_running_reqs: list[Request] = field(default_factory=list)
    scheduled_new_reqs: list[Request] = field(default_factory=list)  # admitted now, for the first time
    scheduled_resumed_reqs: list[Request] = field(default_factory=list)  # admitted now, again
    preempted_reqs: list[Request] = field(default_factory=list)
    finished_req_ids: list[str] = field(default_factory=list)  # finished or aborted since the step before
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)  # the drafts among the tokens
    block_tables: Mapping[str, list[int]] = field(default_factory=dict, compare=False)  # of all that have blocks, now
    kv_connector_metadata: KVConnectorMetadata | None = None  # what a connector has to do in this step

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What came out of a step, by request id (`vllm/v1/outputs.py`)."""

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)  # of each request that has caught up
    logprobs: dict[str, list[dict[int, Any]]] = field(default_factory=dict)  # of each of these tokens, if asked for
    prompt_logprobs_dict: dict[str, list] = field(default_factory=dict)  # of prompts that the step completed
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)  # guesses for the next step
    pooler_output: dict[str, bytes] = field(default_factory=dict)  # vectors of prompts that the step completed


@dataclass(slots=True)
class EngineCoreOutput:
    """What a step brought one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    kv_transfer_params: dict[str, Any] | None = None  # where its keys and values are, for whoever goes on with it
    new_logprobs: dict[int, Any] | None = None  # of the new token, which is one if they are asked for
    new_prompt_logprobs: list | None = None  # one entry per token of its prompt, which is now computed
    pooling_output: bytes | None = None  # in place of tokens: its prompt's vector


@dataclass
class KVConnectorMetadata:
    """What the scheduler's half of a connector tells the worker's half about a step."""

    to_load: list[tuple[Request, list[int], int, int]] = field(default_factory=list)  # its blocks, positions [a, b)
    to_save: list[tuple[Request, list[int], int]] = field(default_factory=list)  # its blocks, positions computed
    preempted: list[Request] = field(default_factory=list)


@dataclass
class KVConnectorOutput:
    """What the worker's half tells the scheduler's after a step."""

    finished_sending: set[str] = field(default_factory=set)  # request ids: their blocks may be freed
    finished_recving: set[str] = field(default_factory=set)  # theirs have arrived, or are not written any more
    failed_recving: dict[str, str] = field(default_factory=dict)  # theirs never will, and why
    invalid_block_ids: set[int] = field(default_factory=set)  # a load inside the step left nothing in them

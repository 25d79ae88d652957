"""The letters between the front end and an engine core.

Owns their forms, and nothing that reads or writes them: made by `core_proc` and by whoever stands before it, sent as
`wire` frames them. They never hold text or tensors, only ids, numbers and requests.
vLLM: `vllm/v1/engine/__init__.py`, `vllm/v1/metrics/stats.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.output import EngineCoreOutput


class EngineCoreRequestType(enum.Enum):
    """What the front end writes to the engine core: (type, content)."""

    ADD = enum.auto()  # a Request
    ABORT = enum.auto()  # request ids
    START_DP_WAVE = enum.auto()  # None: another engine, with which this one shares experts, has got a request
    UTILITY = enum.auto()  # (call id, name, *arguments): call one of EngineCoreProc.UTILITIES and send its result


@dataclass(slots=True)
class SchedulerStats:
    """The state after a step, and what the step did: the source of most metrics."""

    num_running_reqs: int
    num_waiting_reqs: int  # for a seat, tokens or blocks
    kv_cache_usage: float  # share of the pool's blocks that somebody owns
    num_skipped_waiting_reqs: int = 0  # for keys and values on their way (lesson 08), or an adapter's place (lesson 12)
    num_scheduled_tokens: int = 0
    step_seconds: float = 0.0
    spec_decoding: tuple[int, ...] = ()  # lesson 07, so far: drafts, their tokens, accepted ones, these by place


class Admission(NamedTuple):
    """What the first admission of a request found."""

    queued: float  # seconds
    num_cached_tokens: int  # of its prompt
    num_external_tokens: int  # of these, those that a connector brings (lesson 08)


@dataclass(slots=True)
class EngineCoreOutputs:
    """What the engine core writes after a step."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    admitted: dict[str, Admission] = field(default_factory=dict)  # by request id
    preempted: list[str] = field(default_factory=list)  # request ids
    refused: dict[str, str] = field(default_factory=dict)  # id: why the core could not take it


@dataclass(slots=True)
class EngineCoreReady:
    """The first letter of an engine that is up: what start-up found out."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_gpu_blocks: int
    block_size: int
    policy: str
    enable_prefix_caching: bool
    pid: int
    about: dict[str, Any] = field(default_factory=dict)  # what the factory adds


@dataclass(slots=True)
class Progress:
    """A line of start-up for the console."""

    text: str


@dataclass(slots=True)
class Reply:
    """The result of a UTILITY call, or why there is none."""

    call_id: Any  # the caller's; where an engine has several clients, which of them comes with it
    result: Any = None
    error: str | None = None
    bad_input: bool = False


@dataclass(slots=True)
class Dead:
    """The last letter of an engine core that could still write one."""

    error: str
    bad_input: bool = False

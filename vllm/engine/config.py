"""The limits and choices that an engine is started with.

Owns their defaults, and refuses those that contradict each other; read by everybody, changed by nobody. It never loads
a model or opens a file. vLLM: `vllm/config/scheduler.py`.
"""

from __future__ import annotations

from common import InputError

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.choices import POLICIES

if TYPE_CHECKING:
    from engine.kv_transfer.config import KVTransferConfig
    from engine.lora.manager import LoRAConfig
    from engine.parallel.workers import Workers
    from engine.spec_decode.drafters import SpeculativeConfig

LOWEST = {  # of the numbers below, and of `EngineArgs` with the same names
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_num_scheduled_tokens": 1,
    "long_prefill_token_threshold": 0,
}


@dataclass
class SchedulerConfig:
    """What the scheduler may put into a step, and how it chooses.

    Raises:
        InputError: limits that contradict each other, by vLLM's rules; the message names the field.
    """

    max_model_len: int = 2048  # tokens in one sequence, prompt and output
    max_num_seqs: int = 128  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step: what the buffers are made for
    policy: str = "fcfs"  # one of POLICIES

    enable_chunked_prefill: bool = True
    max_num_scheduled_tokens: int | None = None  # a smaller budget than the buffers were made for
    long_prefill_token_threshold: int = 0  # no request gets more tokens than this in a step; 0: no such cap
    long_prefill_token_threshold_adaptive: bool = False  # raise the cap to a fair share of the budget

    max_num_active_seqs: int | None = None  # admit fewer than max_num_seqs
    scheduler_reserve_full_isl: bool = True  # admit only what fits in full now (a test, not a reservation)
    watermark: float = 0.0  # share of the pool that admission leaves free for running requests
    evict_uncomputed_blocks: bool = True  # vLLM 0.32 does not: see the scheduler's `_preempt_request`

    def __post_init__(self) -> None:
        check_numbers(self, LOWEST)
        if self.policy not in POLICIES:
            raise InputError(f"policy {self.policy!r}: must be one of {', '.join(POLICIES)}")
        budget = f"max_num_batched_tokens {self.max_num_batched_tokens}: must be at least"
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(f"{budget} max_num_seqs ({self.max_num_seqs}), or decodes would starve")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise InputError(f"{budget} max_model_len ({self.max_model_len}) without chunked prefill")
        if self.long_prefill_token_threshold > self.max_model_len:
            raise InputError(
                f"long_prefill_token_threshold {self.long_prefill_token_threshold}: must be at most "
                f"max_model_len ({self.max_model_len})"
            )
        if self.max_num_active_seqs is not None and not 1 <= self.max_num_active_seqs <= self.max_num_seqs:
            raise InputError(
                f"max_num_active_seqs {self.max_num_active_seqs}: must be from 1 to max_num_seqs ({self.max_num_seqs})"
            )
        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark {self.watermark}: must be at least 0 and below 1")


@dataclass
class VllmConfig:
    """What an engine has besides a model, a scheduler and a cache (`vllm/config/vllm.py`). Fields that are None it has
    not."""

    attention_backend: str = "unified"
    kv_cache_dtype: str = "auto"  # as the model computes, or one of fewer bits
    hybrid_kv_cache: bool = False  # a block table for each group of layers that keep the same
    enforce_eager: bool = False  # no CUDA graphs
    async_scheduling: bool = False  # plan a step while another one runs
    speculative_config: SpeculativeConfig | None = None
    lora_config: LoRAConfig | None = None
    kv_transfer_config: KVTransferConfig | None = None
    workers: Workers | None = None  # who run the model, if it is not run here
    plug: dict[str, Any] = field(default_factory=dict)  # somebody else's object in a seam, by the seam's name


def whole(name: str, value: Any, low: int, high: float = math.inf) -> int:
    """`value`, if it is a whole number in this range. Raises InputError that names it."""
    if type(value) is not int or not low <= value <= high:
        allowed = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise InputError(f"{name} {value!r}: must be a whole number {allowed}")
    return value


def check_numbers(limits: Any, lowest: Mapping[str, int]) -> None:
    """Of the attributes that `limits` has, and that are not None. Raises InputError."""
    for name, low in lowest.items():
        if (value := getattr(limits, name, None)) is not None:
            whole(name, value, low)


def check_model_len(max_model_len: int, positions: int) -> None:
    """Raises InputError for a longer sequence than the model has positions."""
    if max_model_len > positions:
        raise InputError(f"max_model_len {max_model_len}: must be at most {positions}, the positions of the model")

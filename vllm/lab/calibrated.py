"""A prediction for the machine at hand: the rates are measured, and the engine is ours, with `serve`'s defaults.

Owns what a file of `predict calibrate --json` stands for; called by `predict` for its `--rates`. It never times
anything. vLLM has no counterpart.
"""

from __future__ import annotations

import common

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import SchedulerConfig
from lab.calibration import KEY, LIMITS
from lab.fit import Fit
from lab.hardware import GPU
from lab.measured_step import MeasuredStep
from lab.predict_setup import DEFAULTS, Served
from lab.prediction import Setup
from lab.request_logs import read_text
from lab.step_time import StepWork

MEASURED = ("model", "gpu", "tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "kv_cache_dtype")


class Timed:
    """Stands where a `StepModel` does: its steps were timed, so there is nothing to reckon from a batch."""

    tensor_parallel_size = 1

    def features(self, work: StepWork) -> StepWork:
        return work


def stored_in(path: str) -> Mapping[str, Any] | None:
    """What `predict calibrate` has written there; None if the file has something else. Raises InputError."""
    try:
        content = json.loads(read_text(Path(path)))
    except (ValueError, RecursionError) as error:
        raise common.InputError(f"--rates {path}: not readable as JSON ({error})") from None
    return content.get(KEY) if isinstance(content, dict) else None


def served_here(args: argparse.Namespace, stored: Mapping[str, Any]) -> tuple[Served, Fit]:
    """The calibrated model on its machine, with vLLM's flags. Raises InputError for flags that say otherwise."""
    step = MeasuredStep.from_json(stored)
    try:
        machine, measured = str(stored["machine"]["name"]), {name: int(stored["limits"][name]) for name in LIMITS}
    except (LookupError, TypeError, ValueError) as error:
        raise common.InputError(f"--rates {args.rates}: not what `predict calibrate` stores ({error!r:.60})") from None
    given = {name: value for name, value in vars(args).items() if value is not None}
    for name in MEASURED:
        if name in given:
            flag = f"--{name.replace('_', '-')}"
            raise common.InputError(f"{flag}: not together with the rates of `predict calibrate`, which knows it")
    if args.num_gpu_blocks_override is None:
        raise common.InputError(
            "--num-gpu-blocks-override: must be given with the rates of `predict calibrate`; `serve` prints it"
        )
    settings: dict[str, Any] = DEFAULTS | {"async_scheduling": False} | measured | given
    limits = SchedulerConfig(
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        enable_chunked_prefill=settings["enable_chunked_prefill"],
        long_prefill_token_threshold=settings["long_prefill_token_threshold"],
        scheduler_reserve_full_isl=settings["scheduler_reserve_full_isl"],
        watermark=settings["watermark"],
        evict_uncomputed_blocks=False,
    )
    setup = Setup(
        limits,
        settings["num_gpu_blocks_override"],
        settings["block_size"],
        settings["enable_prefix_caching"],
        settings["async_scheduling"],
    )
    model: Any = Timed()
    rates: Any = step
    return Served(model, GPU(machine, 0, 0.0, 0.0), setup, True), Fit(rates, 0.0, {})

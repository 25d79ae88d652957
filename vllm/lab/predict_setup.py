"""What is predicted for: a model on cards, an engine with vLLM's flags, and requests that come.

Owns the flags of a prediction, where their values come from, and how many KV blocks fit; called by `predict_command`.
It never simulates. vLLM: `vllm/engine/arg_utils.py`, `vllm/v1/core/kv_cache_utils.py`.

A value is the flag's, or else what `meta.json` beside the workload says, or else vLLM's default.
"""

from __future__ import annotations

import common

import argparse
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import arguments
from engine.arguments import Switch, human_readable_int
from engine.config import SchedulerConfig, whole
from lab.bench import SOME, SOME_OR_NONE, rate_or_inf
from lab.hardware import GPU, find_gpu
from lab.model_costs import find_model, model_costs
from lab.prediction import Job, Setup
from lab.request_logs import Log, meta_settings
from lab.step_time import StepModel
from lab.workload import AZURE, arrival_times, quantile, random_length

GIB = 2**30
DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
# vLLM's defaults where neither a flag nor meta.json says anything.
DEFAULTS: dict[str, Any] = {
    "tensor_parallel_size": 1, "data_parallel_size": 1, "block_size": 16, "gpu_memory_utilization": 0.92,
    "enable_prefix_caching": True, "kv_cache_dtype": "auto", "async_scheduling": True, "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0, "scheduler_reserve_full_isl": True, "watermark": 0.0,
}  # fmt: skip
MOST = 10**7
WHOLES = {"tensor_parallel_size": (1, 64), "data_parallel_size": (1, 64), "max_num_seqs": (1, MOST),
          "max_num_batched_tokens": (1, MOST), "max_model_len": (1, MOST), "block_size": (1, 1024),
          "num_gpu_blocks_override": (2, MOST), "gpu_memory": (1, 2**50)}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """Who serves: the model's costs, its division, the card, and the engine's limits."""

    model: StepModel
    gpu: GPU
    setup: Setup
    blocks_are_known: bool  # and not reckoned


def add_engine_flags(add: Callable[..., Any]) -> None:
    """The model, the card, and vLLM's flags that change what the scheduler decides. None: not given."""
    count, share = arguments.number(int, 1, 64), arguments.number(float, 0.01, 1)
    add("--model", metavar="NAME_OR_CONFIG", help="a known model, or a config.json")
    add("--gpu", metavar="NAME", help='a known card, as people or drivers call it: "rtx 4090"')
    add("--tensor-parallel-size", "-tp", type=count, metavar="N", help="cards that share each layer (default 1)")
    add("--data-parallel-size", "-dp", type=count, metavar="N", help="engines (default 1)")
    add("--max-num-seqs", type=SOME, metavar="N", help="default: vLLM's for the card")
    add("--max-num-batched-tokens", type=human_readable_int, metavar="N", help="default: vLLM's for the card")
    add("--max-model-len", type=human_readable_int, metavar="N", help="default: the model's positions")
    add("--gpu-memory-utilization", type=share, metavar="SHARE", help="default 0.92")
    add("--num-gpu-blocks-override", type=arguments.number(int, 2, 10**7), metavar="N", help="default: what fits")
    add("--block-size", type=arguments.number(int, 1, 1024), metavar="N", help="default 16")
    add("--kv-cache-dtype", choices=DTYPES, help="default auto: 16 bits")
    add("--enable-prefix-caching", action=Switch, help="default on")
    add("--enable-chunked-prefill", action=Switch, help="default on")
    add("--async-scheduling", action=Switch, help="default on, as on GPUs")
    add("--scheduler-reserve-full-isl", action=Switch, help="default on")
    add("--long-prefill-token-threshold", type=SOME_OR_NONE, metavar="N", help="default 0: none")
    add("--watermark", type=arguments.number(float, 0, 0.99), metavar="SHARE", help="default 0")


def served_by(args: argparse.Namespace, meta: Mapping[str, Any]) -> Served:
    """Raises InputError."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    settings = DEFAULTS | meta_settings(meta) | given
    for name, what in (("model", "a known model or a config.json"), ("gpu", "a card")):
        if not settings.get(name):
            raise common.InputError(
                f"--{name}: {what} must be named; there is no meta.json beside the workload with it"
            )
    check(settings)
    gpu = find_gpu(settings["gpu"])
    if "gpu" not in given and settings.get("gpu_memory"):
        gpu = dataclasses.replace(gpu, memory=settings["gpu_memory"])
    config = find_model(settings["model"])
    if settings.get("quantization") == "fp8":  # what a checkpoint says of itself goes first
        config = {"quantization_config": {"quant_method": "fp8"}, **config}
    costs = model_costs(config, settings["kv_cache_dtype"])
    engines, tp = settings["data_parallel_size"], settings["tensor_parallel_size"]
    if costs.num_heads % tp:
        raise common.InputError(f"--tensor-parallel-size {tp}: must divide the model's {costs.num_heads} heads")
    model = StepModel(costs, tp, engines if costs.expert_params else 1)
    max_model_len = settings.get("max_model_len") or costs.max_model_len
    max_num_seqs, budget = batch_limits(settings, gpu, max_model_len)
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=settings["enable_chunked_prefill"],
        long_prefill_token_threshold=settings["long_prefill_token_threshold"],
        scheduler_reserve_full_isl=settings["scheduler_reserve_full_isl"],
        watermark=settings["watermark"],
    )
    blocks = settings.get("num_gpu_blocks_override")
    setup = Setup(
        scheduler,
        blocks or blocks_that_fit(model, gpu, scheduler, settings["block_size"], settings["gpu_memory_utilization"]),
        settings["block_size"],
        settings["enable_prefix_caching"],
        settings["async_scheduling"],
        engines,
        model.expert_engines > 1,
    )
    return Served(model, gpu, setup, blocks is not None)


def batch_limits(settings: Mapping[str, Any], gpu: GPU, max_model_len: int) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens: as they are set, or else as vLLM's server sets them for the card."""
    large = gpu.memory >= 70 * GIB and "A100" not in gpu.name
    seqs = settings.get("max_num_seqs") or (1024 if large else 256)
    budget = settings.get("max_num_batched_tokens")
    if not budget:
        budget = 16384 if gpu.memory >= 160 * GIB else 8192 if large else 2048
        budget = min(budget if settings["enable_chunked_prefill"] else max(budget, max_model_len), seqs * max_model_len)
    return settings.get("max_num_seqs") or min(seqs, budget), budget


def check(settings: Mapping[str, Any]) -> None:
    """What a meta.json says need not be what a flag would have taken. Raises InputError."""
    for name, (low, high) in WHOLES.items():
        if settings.get(name) is not None:
            whole(name, settings[name], low, high)
    for name, default in DEFAULTS.items():
        if isinstance(default, bool) and not isinstance(settings[name], bool):
            raise common.InputError(f"{name} {settings[name]!r:.40}: must be true or false")
    share, margin = settings["gpu_memory_utilization"], settings["watermark"]
    if not isinstance(share, float | int) or not 0 < share <= 1:
        raise common.InputError(f"gpu_memory_utilization {share!r:.40}: must be above 0 and at most 1")
    if not isinstance(margin, float | int) or not 0 <= margin < 1:
        raise common.InputError(f"watermark {margin!r:.40}: must be at least 0 and below 1")
    for name in ("model", "gpu", "kv_cache_dtype"):
        if not isinstance(settings[name], str):
            raise common.InputError(f"{name} {settings[name]!r:.40}: must be a name")
    if settings["kv_cache_dtype"] not in DTYPES and not settings["kv_cache_dtype"].startswith("fp8"):
        allowed = ", ".join(DTYPES)
        raise common.InputError(f"kv_cache_dtype {settings['kv_cache_dtype']!r:.40}: must be one of {allowed}")
    for name in ("pipeline_parallel_size", "speculative_config"):
        if settings.get(name) not in (None, 1):
            raise common.InputError(f"{name} {settings[name]!r:.40}: must be left out; it cannot be predicted")


def blocks_that_fit(model: StepModel, gpu: GPU, limits: SchedulerConfig, block_size: int, utilization: float) -> int:
    """⌊(utilization · memory − weights − activations) / bytes of a block⌋ on one card. Raises InputError if none do.

    vLLM measures activations with a full step. They are reckoned here as the widest layer's for a step, four copies of
    the logits in fp32, and half a GiB of the driver's: for the RTX 4090 of the latency logs that gives 2,557 blocks,
    where vLLM found 2,588.
    """
    costs, tp = model.costs, model.tensor_parallel_size
    weights = (costs.bytes_kept - costs.expert_bytes * costs.expert_params * (1 - 1 / model.expert_engines)) / tp
    widest = 6 * costs.intermediate_size / tp + 8 * costs.hidden_size  # gate, up and their product; the residuals
    activations = limits.max_num_batched_tokens * widest + 16 * limits.max_num_seqs * costs.vocab_size + GIB / 2
    room = utilization * gpu.memory - weights - activations
    blocks = int(room // (block_size * costs.kv_bytes_per_token / model.kv_ranks))
    if blocks < 2:
        raise common.InputError(
            f"--model: {weights / 1e9:.1f} GB of weights a card leave no KV blocks on {gpu.name} at "
            f"gpu_memory_utilization {utilization:g}; allowed: a larger --tensor-parallel-size or card"
        )
    return blocks


# --- The requests ----------------------------------------------------------------------------------------------------


def add_workload_flags(add: Callable[..., Any]) -> None:
    """Requests that nobody has written down, in the words of `vllm bench serve`."""
    add("--num-prompts", type=SOME, default=1000, metavar="N", help="default 1000")
    add("--request-rate", type=rate_or_inf, metavar="R", help="requests a second (inf: all at once)")
    add("--burstiness", type=rate_or_inf, default=1.0, metavar="B", help="1 Poisson, below 1 bursts, inf a clock")
    add("--dataset-name", choices=("random", *AZURE), default="random", help="whose lengths")
    add("--random-input-len", "--input-len", type=SOME, default=1024, metavar="N", help="default 1024")
    add("--random-output-len", "--output-len", type=SOME, metavar="N", help="default 128")
    add("--random-range-ratio", type=arguments.number(float, 0, 1), default=0.0, metavar="R", help="uniform ± R")
    add("--random-cv", type=arguments.number(float, 0, 100), default=0.0, metavar="CV", help="lognormal lengths")
    add(
        "--random-prefix-len", "--prefix-len", type=SOME_OR_NONE, default=0, metavar="N", help="shared, before the rest"
    )
    add("--seed", type=arguments.number(int, 0, 2**31 - 1), default=0)


def make_jobs(args: argparse.Namespace, log: Log | None, seed: int) -> list[Job]:
    """The requests, drawn where nobody knows them, in the order of arrival. Raises InputError."""
    rng = random.Random(seed)
    if log is None:
        if args.request_rate is None:
            raise common.InputError("WORKLOAD or --request-rate: one of them must be given")
        lengths = draw_lengths(args, rng)
        due = arrival_times(len(lengths), args.request_rate, random.Random(args.seed), args.burstiness)
        prefix = args.random_prefix_len
        return [Job(at, prefix + n_in, n_out, prefix) for at, (n_in, n_out) in zip(due, lengths)]
    rows = log.rows
    if rows[0].arrival is None:
        if args.request_rate is None:
            raise common.InputError(f"{log.path}: no line has arrival_time; give --request-rate")
        due = arrival_times(len(rows), args.request_rate, random.Random(args.seed), args.burstiness)
    elif args.request_rate is not None:
        raise common.InputError(f"--request-rate: {log.path} says when each request arrives; allowed without")
    else:
        due = [(row.arrival or 0.0) - rows[0].arrival for row in rows]
    known = [row.output_len for row in rows if row.output_len]
    return [
        Job(at, row.input_len, row.output_len or draw_output(args, rng, known), row.prefix_len, row.prefix_id)
        for at, row in zip(due, rows)
    ]


def draw_lengths(args: argparse.Namespace, rng: random.Random) -> list[tuple[int, int]]:
    """(prompt, answer) of each request, as `bench` draws them."""
    if args.random_range_ratio and args.random_cv:
        raise common.InputError("--random-cv: allowed without --random-range-ratio only (lognormal or uniform)")
    found = []
    for _ in range(args.num_prompts):
        if args.dataset_name in AZURE:
            table = AZURE[args.dataset_name]
            n_in, n_out = (max(1, round(quantile(table[side], rng.random()))) for side in ("input", "output"))
        else:
            n_in, n_out = (
                random_length(rng, mean, args.random_range_ratio, args.random_cv)
                for mean in (args.random_input_len, args.random_output_len or 128)
            )
        found.append((n_in, n_out))
    return found


def draw_output(args: argparse.Namespace, rng: random.Random, known: Sequence[int]) -> int:
    """An answer's length that nobody knows: one of those known, or as the flags say; without a spread, lognormal with
    a deviation as large as its mean."""
    if known and args.random_output_len is None:
        return rng.choice(known)
    cv = args.random_cv or (0.0 if args.random_range_ratio else 1.0)
    return random_length(rng, args.random_output_len or 128, args.random_range_ratio, cv)


def lengths_are_drawn(args: argparse.Namespace, log: Log | None) -> bool:
    """Would another seed give other lengths?"""
    if log is not None:
        return any(row.output_len is None for row in log.rows)
    return args.dataset_name in AZURE or bool(args.random_range_ratio or args.random_cv)

"""What ranks cost here: an all-reduce by size, and a decode step of the engine by ranks. For lesson 05c.

Owns the stopwatch in every rank, which runs on one thread; called by the lesson's numbers, and importable by name, as
what a process starts with must be. It never asks whether results are right. vLLM: `benchmarks/kernels/
benchmark_device_communicators.py`.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from engine.distributed.group import GroupCoordinator, new_group
from engine.model import folders, llama
from engine.model.config import LlamaConfig
from engine.model.packed_linear import pack_weights
from engine.parallel.model import TensorParallelLlama, load_shard, map_local, shard_model
from lab import offline_run
from lab.layouts import default_size

PAYLOADS = (2304, 1 << 16, 1 << 20, 1 << 24)  # bytes; the first is one token of SmolLM2 in fp32
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
}


def time_ranks(world: GroupCoordinator, model: str | None) -> dict[str, Any]:
    """To be run by four ranks. `all_reduce_us` in µs by ranks and bytes; `step_ms` in ms by model ("smollm2" is the
    one at `model`), ranks and sequences; and the `backend`. On rank 0 all of it; elsewhere what that rank took part in.
    """
    torch.set_num_threads(1)
    groups = {size: new_group(range(size), world) for size in (1, 2, 3, 4)}
    found: dict[str, Any] = {"all_reduce_us": {}, "step_ms": {}, "backend": dist.get_backend()}
    for size in (2, 3):
        if group := groups[size]:
            found["all_reduce_us"][str(size)] = {str(payload): all_reduce_us(group, payload) for payload in PAYLOADS}
        dist.barrier()
    most = default_size(LlamaConfig.from_folder(folders.model_folder(model)))
    for name, sizes in (("smollm2", (1, most) if most in (2, 3, 4) else (1,)), ("wide", (1, 2, 4))):
        for size in sizes:
            if group := groups[size]:
                whole = load_shard(model, group) if name == "smollm2" else wide_shard(group)
                shard = map_local(whole, pack_weights)
                times = {str(num_seqs): step_ms(shard, num_seqs) for num_seqs in (1, 8)}
                found["step_ms"].setdefault(name, {})[str(size)] = times
            dist.barrier()
    return found


def all_reduce_us(group: GroupCoordinator, payload: int) -> float:
    """Microseconds of an all-reduce of `payload` bytes whose result is then read; the median, a warm-up aside."""
    x = torch.ones(payload // 4, device=group.device)
    samples = []
    for _ in range(8 if payload > 1 << 20 else 200):
        start = time.perf_counter()
        group.all_reduce(x).sum().item()
        samples.append(1e6 * (time.perf_counter() - start))
    return statistics.median(samples[len(samples) // 4 :])


def wide_shard(group: GroupCoordinator) -> TensorParallelLlama:
    """This rank's share of a seeded model of six wide layers: more to compute for each byte sent than SmolLM2 has."""
    return shard_model(llama.random_model(device=group.device, **WIDE), group)


def step_ms(shard: llama.Llama, num_seqs: int) -> float:
    """Milliseconds of a decode step of the engine; the median of sixteen."""
    prompts = [[10 + i, 20, 30, 40] for i in range(num_seqs)]
    core = offline_run.make_core(shard, num_blocks=128, max_model_len=256)
    return 1e3 * statistics.median(offline_run.serve(core, prompts, [17] * num_seqs).seconds[1:])

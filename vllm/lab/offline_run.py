"""Prompts that are all there at the start, served to their end: what they got, and what each step took.

Owns the loop and its stopwatch; called by tours and numbers. It never asks when a request arrived, which
`goodput.py` does. vLLM: `vllm/benchmarks/throughput.py`.
"""

from __future__ import annotations

import common

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine import assemble
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.model import llama
from engine.request import Request, SamplingParams


@dataclass
class Served:
    """What serving a list of requests gave and took."""

    token_ids: list[list[int]]
    seconds: list[float] = field(default_factory=list)  # of each step

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / sum(self.seconds)


def serve(core: EngineCore, prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> Served:
    """Hand everything in at once and step until all is done. Greedy, every request exactly as long as asked."""
    served = Served([[] for _ in prompts])
    for i, (prompt, n) in enumerate(zip(prompts, outputs)):
        core.add_request(Request(str(i), list(prompt), SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)))
    while core.scheduler.has_unfinished_requests():
        start = time.perf_counter()
        heard = core.step()
        served.seconds.append(time.perf_counter() - start)
        for output in heard:
            served.token_ids[int(output.request_id)] += output.new_token_ids
    return served


def make_core(model: llama.Llama, num_blocks: int = 1024, max_model_len: int = 512) -> EngineCore:
    """An engine without any of its options: 32 seats, pages of 16 tokens, every prompt computed anew."""
    limits = SchedulerConfig(max_model_len, max_num_seqs=32, max_num_batched_tokens=max(4096, max_model_len))
    config = VllmConfig(attention_backend="paged", enforce_eager=True)
    return assemble.make_core(model, limits, num_blocks, 16, config, enable_prefix_caching=False)


def measure_serving(
    variants: dict[str, llama.Llama], peers: dict[str, Callable] | None = None
) -> list[dict[str, str | float]]:
    """Output tokens per second of the engine with each model, and of vLLM's as `peers` (ask(…) of each): 64
    to each of n prompts of 128; the median of three rounds, in which all take turns."""
    V = min(model.config.vocab_size for model in variants.values())
    prompts = [[(1000 + 37 * i + j) % V for j in range(128)] for i in range(32)]

    def ours(model: llama.Llama, n: int) -> float:
        return serve(make_core(model), prompts[:n], [64] * n).tokens_per_second

    def theirs(ask: Callable, n: int) -> float:
        return n * 64 / ask(command="generate", prompts=prompts[:n], max_tokens=64)["seconds"]

    runs = {name: functools.partial(ours, model) for name, model in variants.items()}
    runs |= {name: functools.partial(theirs, ask) for name, ask in (peers or {}).items()}
    found: list[dict[str, str | float]] = [{"method": name} for name in runs]
    for n in (1, 8, 32):
        rates: list[list[float]] = [[] for _ in runs]
        for _ in range(3):
            for each, run in zip(rates, runs.values()):
                time.sleep(0.5)  # threads of the one before still spin for a while
                each.append(run(n))
        for row, each in zip(found, rates):
            row[f"tokens_s_{n}"] = statistics.median(each)
    common.table(
        ["tokens/s", *(f"{n} prompts" for n in (1, 8, 32))],
        [[row["method"], *(f"{row[f'tokens_s_{n}']:.0f}" for n in (1, 8, 32))] for row in found],
    )
    return found

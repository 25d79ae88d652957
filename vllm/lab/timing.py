"""A stopwatch: seconds per call, here, now; and the two ceilings that a time is compared with."""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used
from common import triton

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: median and the 20th and 80th percentile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median * 1e3:.3g} ms ({self.low * 1e3:.3g}–{self.high * 1e3:.3g})"


def measure(fn: Callable[[], Any], seconds: float = 0.5) -> Timing:
    """Time `fn` for about `seconds`: after a warm-up, synchronised, with a cold L2 cache on a GPU."""
    if common.HAS_GPU:
        timed: Any = triton.testing.do_bench(fn, rep=int(seconds * 1e3), quantiles=[0.5, 0.2, 0.8])
        median, low, high = timed
        return Timing(median / 1e3, low / 1e3, high / 1e3)
    fn()
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        fn()
        samples.append(time.perf_counter() - start)
    samples.sort()
    return Timing(statistics.median(samples), samples[len(samples) // 5], samples[len(samples) * 4 // 5])


def measure_graph(fn: Callable[[], Any], seconds: float = 0.5) -> Timing:
    """Time what `fn` asks of the GPU, replayed as a CUDA graph: small kernels end sooner than Python launches them.

    `fn` may not wait for the GPU. On a CPU as `measure`.
    """
    if not common.HAS_GPU:
        return measure(fn, seconds)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        fn()  # compiles
        graph.capture_begin()
        fn()
        graph.capture_end()
    torch.cuda.synchronize()
    return measure(graph.replay, seconds)


def measure_in_a_row(layer: Callable[[Any], Any], x: torch.Tensor, nbytes: float, seconds: float = 0.5) -> float:
    """Seconds that a layer of `nbytes` takes when another one went before and another one follows: as many copies as
    exceed four times 60 MB, more than an L2 cache holds, in one CUDA graph; their time divided by their number."""
    layers = [layer, *(copy.deepcopy(layer) for _ in range(math.ceil(4 * 60e6 / nbytes)))]

    def run() -> None:
        for one in layers:
            one(x)

    return measure_graph(run, seconds).median / len(layers)


def copy_bandwidth() -> float:
    """Ceiling one: bytes/s (read + written) of a large device copy, measured now."""
    n = (1 << 30) if common.HAS_GPU else (1 << 27)
    source = torch.ones(n // 4, device=common.device())
    target = torch.empty_like(source)
    return 2 * n / measure(lambda: target.copy_(source)).median


def matmul_rate(dtype: torch.dtype) -> float:
    """Ceiling two: FLOP/s of a large square matmul in `dtype`, measured now."""
    n = 8192 if common.HAS_GPU else 1024
    a = torch.randn(n, n, device=common.device()).to(dtype)
    return 2 * n**3 / measure(lambda: a @ a).median

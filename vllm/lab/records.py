"""What requests looked like from outside, and how that is summed up.

Owns the definitions of TTFT, ITL, TPOT and E2EL; called by whoever has served requests: the load generator, the engine
that is driven without a server, the simulated one. It never measures anything. vLLM: `vllm/benchmarks/serve.py`,
`calculate_metrics`.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Record:
    """What one request looked like from outside. Seconds since the run began; `error` is empty if it was answered."""

    scheduled: float  # when its user wanted it
    start: float = 0.0  # when it went out
    end: float = 0.0  # when it was over, answered or not
    times: list[float] = field(default_factory=list)  # when each chunk with text came
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""  # a short name, the same for all failures of a kind
    detail: str = ""

    # To the first text, and to the last one (not until the connection is closed).
    ttft = property(lambda r: r.times[0] - r.start)
    e2el = property(lambda r: r.times[-1] - r.start)
    # The silences between *chunks*, whatever number of tokens they bring: many numbers a request.
    itl = property(lambda r: [b - a for a, b in itertools.pairwise(r.times)])
    # (E2EL − TTFT) / (n − 1), per *token* after the first: one number a request; 0 if n = 1.
    tpot = property(lambda r: (r.e2el - r.ttft) / (r.output_tokens - 1) if r.output_tokens > 1 else 0.0)
    # What it waited on our side: for a seat under --max-concurrency, or because the generator was late.
    client_queue_time = property(lambda r: r.start - r.scheduled)
    e2el_including_client_queue = property(lambda r: r.times[-1] - r.scheduled)


METRICS = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between chunks (ITL)",
           "e2el": "end to end", "client_queue_time": "queue in the client",
           "e2el_including_client_queue": "since the user asked"}  # fmt: skip


def percentile(values: Sequence[float], p: float) -> float:
    """Interpolate between neighbours at rank r = p/100 · (n − 1), counted from 0: NumPy's default, and vLLM's."""
    ordered, r = sorted(values), p / 100 * (len(values) - 1)
    low, high = ordered[math.floor(r)], ordered[math.ceil(r)]
    return low + (high - low) * (r - math.floor(r))


def concurrency(spans: Iterable[tuple[float, float]]) -> tuple[int, float]:
    """Sweep over starts and ends: the peak of N(t), requests in flight at time t, and its integral ∫N dt."""
    events = sorted(event for a, b in spans for event in ((a, 1), (b, -1)))  # at one time, ends come first
    n, peak, area = 0, 0, 0
    for (at, change), (following, _) in itertools.pairwise([*events, events[-1]]):
        n += change
        peak, area = max(peak, n), area + n * (following - at)
    return peak, area


def summarize(
    records: Sequence[Record],
    duration: float | None = None,
    percentiles: Sequence[float] = (50, 90, 99),
    goodput: dict[str, float] | None = None,
    metrics: Iterable[str] = METRICS,
) -> dict[str, Any]:
    """Records to numbers, under the keys of `vllm bench serve` where they mean the same.

    `duration` in seconds, by default until the last end; `goodput` as {"ttft" | "tpot" | "e2el": limit in ms}. A failed
    request is counted and named; it has no latency. Where nothing was measured the value is None, not 0."""
    done, failed = [r for r in records if not r.error], [r for r in records if r.error]
    values = {name: [getattr(r, name) for r in done] for name in METRICS}
    values["tpot"] = [r.tpot for r in done if r.output_tokens > 1]
    values["itl"] = [gap for r in done for gap in r.itl]
    inputs, outputs = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    peak, area = concurrency([(r.start, r.end) for r in records])
    duration, chunks = duration or max(r.end for r in records), sum(len(r.times) for r in done)
    origin, seconds = min(r.start for r in records), defaultdict[int, float](float)
    for at, tokens in ((at, r.output_tokens / len(r.times)) for r in done for at in r.times):
        seconds[int(at - origin)] += tokens
    result = {
        "duration": duration,
        "completed": len(done),
        "failed": len(failed),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": max(seconds.values(), default=0.0),
        "max_concurrent_requests": peak,
        # Ours: what vLLM's result has no key for.
        "failures": dict(Counter(r.error for r in failed)),
        "mean_concurrency": area / duration,
        "output_tokens_per_chunk": outputs / chunks if chunks else None,
    }
    if goodput:
        good = [r for r in done if all(1e3 * getattr(r, name) <= limit for name, limit in goodput.items())]
        result["request_goodput"] = len(good) / duration
    rules = {"mean": statistics.fmean, "median": statistics.median, "std": statistics.pstdev}
    rules |= {f"p{p:g}": functools.partial(percentile, p=p) for p in percentiles}
    for name in metrics:
        ms = [1e3 * x for x in values[name]]
        result |= {f"{rule}_{name}_ms": of(ms) if ms else None for rule, of in rules.items()}
    return result

"""A line every ten seconds: how fast, how full, and who waits.

Owns what was counted when it last spoke; called by `run_server`, which has it look at the metrics. It never counts
anything itself: a line is the difference between two looks. vLLM: `LoggingStatLogger` in `vllm/v1/metrics/loggers.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from engine.serving.logger import logger

RECENT = 1000  # requests that the hit rate is of


class LoggingStatLogger:
    """vLLM's throughput line, silent while nothing happens."""

    def __init__(self, value: Callable[..., float], prefix: str, device: str) -> None:
        """`value(name, **labels)` is a metric's (`PrometheusStatLogger.value`); `device` has the KV cache."""
        self.value, self.prefix, self.device = value, prefix, device
        self.counted, self.last = self._counters(), time.monotonic()
        self.throughput = 0.0, 0.0
        self.lookups: deque[tuple[float, float, float]] = deque()  # requests, tokens looked up, found

    def _counters(self) -> tuple[float, ...]:
        """Prompt tokens computed, tokens generated, preemptions; requests admitted, their tokens, those found."""
        return (
            self.value("prompt_tokens_by_source_total", source="local_compute"),
            *map(self.value, ("generation_tokens_total", "num_preemptions_total", "request_queue_time_seconds_count")),
            *map(self.value, ("prefix_cache_queries_total", "prefix_cache_hits_total")),
        )

    def line(self, now: float) -> str | None:
        """What to say now; None: nothing has happened since the line before last."""
        counted, seconds, before = self._counters(), now - self.last, self.throughput
        prompt, generated, preempted, *lookup = (n - m for n, m in zip(counted, self.counted))
        self.counted, self.last, self.throughput = counted, now, (prompt / seconds, generated / seconds)
        self._remember(*lookup)
        if not any(before + self.throughput):
            return None
        parts = [
            f"Avg prompt throughput: {self.throughput[0]:.1f} tokens/s",
            f"Avg generation throughput: {self.throughput[1]:.1f} tokens/s",
            f"Running: {self.value('num_requests_running'):.0f} reqs",
            f"Waiting: {self.value('num_requests_waiting'):.0f} reqs",
        ]
        if deferred := self.value("num_requests_waiting_by_reason", reason="deferred"):
            parts.append(f"Deferred: {deferred:.0f} reqs")
        if preempted:
            parts.append(f"Preemptions: {preempted:.0f}")
        parts.append(f"{self.device} KV cache usage: {self.value('kv_cache_usage_perc'):.1%}")
        if queries := sum(queries for _, queries, _ in self.lookups):
            parts.append(f"Prefix cache hit rate: {sum(hits for *_, hits in self.lookups) / queries:.1%}")
        return f"{self.prefix}: {', '.join(parts)}"

    def _remember(self, requests: float, queries: float, hits: float) -> None:
        if requests:
            self.lookups.append((requests, queries, hits))
        while len(self.lookups) > 1 and sum(n for n, _, _ in self.lookups) > RECENT:
            self.lookups.popleft()

    async def run(self, interval: float) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(interval)
            if line := self.line(time.monotonic()):
                logger.info(line)

"""The line every ten seconds: rates of what happened since the last one, and silence when nothing does."""

from __future__ import annotations

import asyncio
import logging

import pytest

from engine.serving import log_stats
from engine.serving.logger import logger, start_logging


@pytest.fixture
def said():
    """A reporter that began at second 0, and the metrics that it looks at."""
    counts = dict.fromkeys(
        ("prompt_tokens_by_source_total", "generation_tokens_total", "num_preemptions_total", "num_requests_running",
         "request_queue_time_seconds_count", "prefix_cache_queries_total", "prefix_cache_hits_total",
         "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"), 0.0)  # fmt: skip
    reporter = log_stats.LoggingStatLogger(lambda name, **labels: counts[name], "Engine 000", "CPU")
    reporter.last = 0.0
    return reporter, counts


def test_a_line_says_what_vllms_says(said):
    reporter, counts = said
    assert reporter.line(10.0) is None
    counts |= {"prompt_tokens_by_source_total": 120.0, "generation_tokens_total": 55.0, "num_requests_running": 3.0,
               "num_requests_waiting": 2.0, "kv_cache_usage_perc": 0.125, "prefix_cache_queries_total": 200.0,
               "prefix_cache_hits_total": 80.0, "request_queue_time_seconds_count": 4.0}  # fmt: skip
    assert reporter.line(20.0) == (
        "Engine 000: Avg prompt throughput: 12.0 tokens/s, Avg generation throughput: 5.5 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, CPU KV cache usage: 12.5%, Prefix cache hit rate: 40.0%"
    )
    counts |= {"num_preemptions_total": 2.0, "num_requests_waiting_by_reason": 1.0, "num_requests_running": 0.0}
    assert "throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 2 reqs, Deferred: 1 reqs, Preemptions: 2, CPU KV" in (
        reporter.line(30.0) or ""
    )  # one more when it has become quiet, as in vLLM
    assert reporter.line(40.0) is None
    counts["generation_tokens_total"] += 1
    assert "generation throughput: 0.1 tokens/s" in (reporter.line(50.0) or "")


def test_the_hit_rate_is_that_of_recent_requests(said):
    reporter, counts = said
    for requests, queries, hits in ((600, 6000, 0), (600, 6000, 3000), (300, 3000, 3000)):
        counts["request_queue_time_seconds_count"] += requests
        counts["prefix_cache_queries_total"] += queries
        counts["prefix_cache_hits_total"] += hits
        counts["generation_tokens_total"] += 1
        line = reporter.line(reporter.last + 10)
    assert line.endswith(f"Prefix cache hit rate: {6000 / 9000:.1%}")  # the first 600 are forgotten


def test_it_speaks_to_the_log(said, monkeypatch):
    reporter, counts = said
    counts["generation_tokens_total"], heard = 5.0, []
    monkeypatch.setattr(logger, "info", heard.append)

    async def listen():
        task = asyncio.create_task(reporter.run(0.001))
        while not heard:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(listen(), 20))
    assert heard[0].startswith("Engine 000: Avg prompt throughput: ")


def test_a_line_begins_as_people_know_it(capsys, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", True)
    before = logger.handlers, logger.propagate, logger.level
    try:
        start_logging()
        logger.info("it %s", "works")
    finally:
        logger.handlers, logger.propagate, logger.level = before
    found = capsys.readouterr().out
    level, day, clock, where, *text = found.split()
    assert (level, text) == ("INFO", ["it", "works"]) and where.startswith("[test_log_stats.py:")
    assert len(day) == 5 and len(clock) == 8

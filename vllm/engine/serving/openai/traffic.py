"""What HTTP sees of requests: how many, how large, how long, and how many are inside now.

Owns the counters, and the process's own; an ASGI middleware around all others. It never reads a body, nor keeps anybody
out. vLLM: `vllm/entrypoints/serve/instrumentator/metrics.py` (there, prometheus-fastapi-instrumentator counts, and its
names are on dashboards), `load_aware_call` in `vllm/entrypoints/serve/utils/api_utils.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from starlette.routing import Match

NOT_COUNTED = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")  # asked all the time, by machines
OF_LOAD = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
OF_LOAD += ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")  # what the engine works for
FINE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
COARSE = (0.1, 0.5, 1)


class Traffic:
    """Counts what goes through it (ASGI middleware)."""

    def __init__(self, app: Any, routes: Sequence[Any], tracks_load: bool = False) -> None:
        """`routes` say which handler a path has; `tracks_load`: count who is inside (`GET /load`)."""
        self.app, self.routes, self.tracks_load, self.load = app, routes, tracks_load, 0
        self.registry = registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=registry)
        prometheus_client.PlatformCollector(registry=registry)
        prometheus_client.GCCollector(registry=registry)
        self.requests = Counter(
            "http_requests",
            "Requests by method, status and handler.",
            ["method", "status", "handler"],
            registry=registry,
        )
        self.request_bytes = Summary("http_request_size_bytes", "Bodies that came.", ["handler"], registry=registry)
        self.response_bytes = Summary("http_response_size_bytes", "Bodies that went.", ["handler"], registry=registry)
        self.seconds = Histogram(
            "http_request_duration_highr_seconds", "From first to last byte.", buckets=FINE, registry=registry
        )
        self.seconds_by = Histogram(
            "http_request_duration_seconds",
            "The same by handler, in few buckets.",
            ["method", "handler"],
            buckets=COARSE,
            registry=registry,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in NOT_COUNTED:
            return await self.app(scope, receive, send)
        inside = self.tracks_load and scope["path"] in OF_LOAD
        started, head = time.perf_counter(), {"status": 500, "headers": ()}

        async def heard(message: Any) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            await send(message)

        self.load += inside
        try:
            await self.app(scope, receive, heard)
        finally:
            self.load -= inside
            self._count(scope, head, time.perf_counter() - started)

    def _count(self, scope: Any, head: Any, seconds: float) -> None:
        method, handler = scope["method"], self.handler(scope)
        self.requests.labels(method, f"{head['status'] // 100}xx", handler).inc()
        self.request_bytes.labels(handler).observe(length(scope["headers"]))
        self.response_bytes.labels(handler).observe(length(head["headers"]))
        self.seconds.observe(seconds)
        self.seconds_by.labels(method, handler).observe(seconds)

    def handler(self, scope: Any) -> str:
        """The path of the route, not of the request: a label has few values. "none" is nobody's."""
        found = "none"
        for route in self.routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return route.path
            if match is Match.PARTIAL and found == "none":  # the path, with another method
                found = route.path
        return found

    def expose(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)


def length(headers: Any) -> int:
    """What a head says of its body: bytes; 0 if nothing."""
    return next((int(value) for name, value in headers if name.lower() == b"content-length" and value.isdigit()), 0)

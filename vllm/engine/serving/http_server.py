"""uvicorn, which speaks HTTP: with our log level, and deaf to signals.

Owns its settings; called by `run_server`, and imported by nobody else, for it is slow to load. It never decides when to
stop: what a signal means is `run_server`'s. vLLM: `vllm/entrypoints/launchers/launcher.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn


class HTTPServer(uvicorn.Server):
    """Signals are handled by whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_http_server(
    app: Any,
    shutdown_timeout: int,
    log_level: str = "warning",
    access_log: bool = False,
    tls: dict[str, Any] | None = None,
) -> HTTPServer:
    """It stops that many seconds after it was told to, with connections open or not. An access log has a line for each
    request, from the level "info" on. `tls`: `FrontendArgs.tls`."""
    return HTTPServer(
        uvicorn.Config(
            app,
            log_level=log_level,
            access_log=access_log,
            lifespan="off",
            timeout_graceful_shutdown=shutdown_timeout,
            **(tls or {}),
        )
    )

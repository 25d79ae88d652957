"""What the API server is started with, beside its engine: what it says to clients, and what to its log.

Owns these choices; read by `run_server`, made by `serve` from its flags. They never change what an engine computes.
vLLM: `FrontendArgs` in `vllm/entrypoints/openai/cli_args.py`, `AsyncEngineArgs` in `vllm/engine/arg_utils.py`.
"""

from __future__ import annotations

import common

from dataclasses import dataclass

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass
class FrontendArgs:
    """Raises InputError for a value that is none of those allowed."""

    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    disable_log_stats: bool = False  # no line every ten seconds and, as in vLLM, none of its own metrics
    enable_log_requests: bool = False
    enable_request_id_headers: bool = False
    enable_prompt_tokens_details: bool = True  # OpenAI always says them; vLLM if it is asked to
    enable_force_include_usage: bool = False
    enable_server_load_tracking: bool = False
    stream_interval: int = 1  # tokens in a piece of a stream

    def __post_init__(self) -> None:
        if self.uvicorn_log_level not in LOG_LEVELS:
            allowed = ", ".join(LOG_LEVELS)
            raise common.InputError(f"uvicorn_log_level {self.uvicorn_log_level!r}: must be one of {allowed}")
        if type(self.stream_interval) is not int or self.stream_interval < 1:
            raise common.InputError(f"stream_interval {self.stream_interval!r}: must be a whole number of at least 1")

"""Why the engine cannot answer, whatever was asked.

Owns the two errors that cross every layer: raised by clients of an engine and by its front end, turned into a status
code by the API server. What a caller did wrong is never one of them, that is `common.InputError`.
vLLM: `vllm/v1/engine/exceptions.py`.
"""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """The engine core is gone, and with it every request that it had."""


class QueueOverflowError(RuntimeError):
    """As many requests are inside as `max_num_queued_reqs` allows, or the server is going: come back later."""

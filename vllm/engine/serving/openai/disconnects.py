"""A client that hangs up, while its answer is being made.

Owns nothing; called around everything that a client waits for. Work is never left running for somebody who has gone.
vLLM: `vllm/entrypoints/utils.py:with_cancellation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def disconnected(request: Any) -> None:
    """Returns when the client hangs up. Its body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless(gone: asyncio.Future, work: Any, undo: Callable[[Any], None]) -> Any:
    """The result of `work`, or None if the client hangs up first; then the work is cancelled.

    If we are cancelled ourselves in the moment in which the work is done, nobody takes its result: `undo` it.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    except asyncio.CancelledError:
        if task.done() and not task.cancelled() and task.exception() is None:
            undo(task.result())
        raise
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))

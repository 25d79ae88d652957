"""Server-sent events, and the news of several prompts in one stream.

Owns the tasks that wait for collectors while a stream runs; called by `serving`. An event is never changed once it is
made. vLLM: `vllm/utils/async_utils.py:merge_async_iterators`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.serving.collector import RequestOutputCollector

if TYPE_CHECKING:
    from engine.llm_engine import RequestOutput


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def merged(collectors: Sequence[RequestOutputCollector]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """News of several prompts as they come, each with its prompt's index."""
    waiting = {asyncio.create_task(collector.get()): i for i, collector in enumerate(collectors)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i, output = waiting.pop(task), task.result()
                if not output.finished:
                    waiting[asyncio.create_task(collectors[i].get())] = i
                yield i, output
    finally:
        for task in waiting:
            task.cancel()

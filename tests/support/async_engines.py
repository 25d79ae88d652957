"""Engines behind an `AsyncLLM`: started, read, and left with nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine import registry
from engine.request import SamplingParams
from engine.serving.async_llm import AsyncLLM

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
answer_blocking = registry.lesson("06e_async_engine").answer_blocking
in_this_process = pytest.mark.parametrize("place", ["thread", "event-loop"])


@contextlib.asynccontextmanager
async def running(
    factory: Callable, folder: Path, place: str = "thread", args: Any = None, **options: Any
) -> AsyncIterator[AsyncLLM]:
    """What `factory` builds, at its place; the tokenizer is the folder's."""
    llm = await AsyncLLM.start(factory, args, folder, place, **options)
    try:
        yield llm
    finally:
        await llm.shutdown()


async def read(llm: AsyncLLM, name: str, what: Any, params: SamplingParams, stream: bool = False) -> tuple:
    """All that comes for a request: (texts by index, pieces, finish reasons)."""
    texts, pieces, reasons = {}, [], {}
    async for output in llm.generate(name, what, params, stream=stream):
        pieces.append(output)
        for answer in output.outputs:
            texts[answer.index] = texts.get(answer.index, "") + answer.text
            reasons[answer.index] = answer.finish_reason
    return texts, pieces, reasons


async def idle(llm: AsyncLLM) -> None:
    """Nothing is left anywhere, on either side."""
    state = await llm.call_utility("check_idle")
    assert state == {"unfinished": 0, "tables": 0, "owned_blocks": 0}
    assert not (llm.front.sequences or llm.front.callers or llm.collectors or llm.replies)

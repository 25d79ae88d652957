"""Whoever leaves is forgotten, wherever the answer is."""

from __future__ import annotations

import asyncio

import pytest

from support.scripted_api import Letters, M, P, call, serve


@pytest.mark.parametrize(("stream", "after"), [(True, 0), (True, 1), (True, 3), (False, 0), (False, None)])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_whoever_hangs_up_is_forgotten(stream, path, after):
    """Before the first piece, after it, in the middle; streaming or not. The answer itself would take for ever."""
    llm, app = serve(Letters([(0, "x", False, False)] * 50))

    async def run():
        async with asyncio.timeout(5):
            if after is not None:
                return await call(app, path, (P if path == "/v1/completions" else M) | {"stream": stream},
                                         hang_up_after=after)  # fmt: skip
            for turns in range(40):  # cancelled at every point of its way
                task = asyncio.create_task(call(app, path, P if path == "/v1/completions" else M))
                for _ in range(turns):
                    await asyncio.sleep(0.0005 if turns > 20 else 0)
                task.cancel()
                await asyncio.wait((task,))

    asyncio.run(run())
    assert [name for name, *_ in llm.added] == [c.request_id for c in llm.collectors]
    assert set(llm.aborted) == {name for name, *_ in llm.added}, "the engine goes on for nobody"

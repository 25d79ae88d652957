"""Work on a large body, away from the event loop on which every stream waits for its turn.

Owns the one thread on which that happens: large bodies wait for each other and for nobody else, and the memory that
they take is that of one. Called with whatever is long for a long body; it never sees a small one.
vLLM: `vllm/utils/async_utils.py`.
"""

from __future__ import annotations

import common

import asyncio
import concurrent.futures
import itertools
import json
from collections.abc import Callable
from typing import Any

from engine.serving.openai.limits import MAX_BODY_BYTES, MAX_IDS, MAX_NESTING, MAX_PARTS

LARGE_BODIES = concurrent.futures.ThreadPoolExecutor(1, "LargeBodies")  # what they take in memory, one takes at a time


async def away(large: bool, work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)`, for a large body on the thread of those: no stream waits meanwhile, and no small request."""
    if not large:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(LARGE_BODIES, work, *args)


def parse(body: bytes) -> Any:
    """What a body says. For a thread of its own: `json` is one long call that lets nobody else run Python, but here it
    comes back to Python at every number and object, and there other threads get their turn.

    Raises InputError for a body of too many parts, JSONDecodeError, RecursionError, or another ValueError.
    """
    # Some of them stand in texts, and count as well: no text that a model can read has so many. Where the server lets
    # a body be larger, it may have more of them.
    larger = max(1, -(-len(body) // MAX_BODY_BYTES))
    parts, elements = larger * MAX_PARTS, larger * MAX_IDS
    if sum(map(body.count, (b"[", b"{", b'":'))) > parts:
        raise common.InputError(f"the body has more than {parts:,} arrays, objects and names")
    if body.count(b",") > elements:
        raise common.InputError(f"the body has more than {elements:,} elements")
    text = body.decode("utf-8-sig")
    said = json.loads(text, object_hook=lambda x: x, parse_int=lambda x: int(x), parse_float=lambda x: float(x))
    level, depth = [said], 0
    while level := [x for x in level if isinstance(x, dict | list)]:
        depth += 1
        if depth > MAX_NESTING:
            raise RecursionError
        level = [*itertools.chain.from_iterable(x.values() if isinstance(x, dict) else x for x in level)]
    return said

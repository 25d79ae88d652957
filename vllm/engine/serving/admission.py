"""How many sequences may be inside.

Owns the bound and who holds a place under it; asked by `async_llm` and by the API server before a request costs
anything. It never queues anybody: who finds no room is told so. vLLM: `vllm/v1/engine/async_llm.py:check_admission`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from engine.errors import QueueOverflowError


class AdmissionControl:
    """How many sequences may be inside. Waiting longer than anybody wants to wait is no service (`check_admission`)."""

    def __init__(self, max_num_queued_reqs: int | None = None) -> None:
        self.max_num_queued_reqs = max_num_queued_reqs  # None: no bound
        self.num_rejected, self.num_held, self.closed = 0, 0, False

    @contextlib.contextmanager
    def hold(self, num_inside: int, n: int) -> Iterator[None]:
        """Places for `n` sequences that cost something already, but are not with the engine yet. They are free again
        at the end: who goes on to the engine does so without an await.

        No more than half of all places are held, or who costs nothing would find none. Raises QueueOverflowError.
        """
        self.check(num_inside, n)
        half = None if self.max_num_queued_reqs is None else (self.max_num_queued_reqs + 1) // 2
        if half is not None and self.num_held and self.num_held + n > half:
            self.num_rejected += n
            raise QueueOverflowError(
                f"the server is busy: it compiles what {self.num_held} sequences must match, and at most half of "
                f"max_num_queued_reqs {self.max_num_queued_reqs} may wait for that; try again later"
            )
        self.num_held += n
        try:
            yield
        finally:
            self.num_held -= n

    def check(self, num_inside: int, n: int = 1) -> None:
        """Raises QueueOverflowError if `n` more would be too many, or nobody new is let in."""
        num_inside += self.num_held
        if self.closed:
            raise QueueOverflowError("the server is shutting down")
        if self.max_num_queued_reqs is not None and num_inside + n > self.max_num_queued_reqs:
            self.num_rejected += n
            raise QueueOverflowError(
                f"the server is full: {num_inside} sequences of max_num_queued_reqs "
                f"{self.max_num_queued_reqs} are inside; try again later"
            )

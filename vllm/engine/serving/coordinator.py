"""Tells all API servers how long the engines' queues are.

Owns the counts; run on a thread by `engine_group`, between engines and API servers. It never sees a request.
vLLM: `vllm/v1/engine/coordinator.py`.
"""

from __future__ import annotations

import pickle
import select
import socket
import time
from collections.abc import Sequence

from engine.serving.engine_mailbox import Outbox
from engine.serving.mailbox import ClientGone, Mailbox
from engine.serving.wire import loads


class DPCoordinator:
    """Collects the engines' queue lengths and tells all API servers, at most every 100 ms (`v1/engine/coordinator.py`).

    A thread of the process that started the engines. vLLM's is a process, and has a second duty: it wakes engines that
    share experts, and must step together, when one of them has got a request. Here the front end does (`dp_client`).
    """

    INTERVAL = 0.1

    def __init__(self, engines: Sequence[socket.socket], clients: Sequence[socket.socket]) -> None:
        self.mail = {sock: Mailbox(sock, loads) for sock in engines}
        self.clients = [Outbox(sock) for sock in clients]
        self.counts: list[list[float]] = [[0, 0, 0.0] for _ in engines]
        self.changed, self.last = False, 0.0

    def note(self, engine: int, counts: list[float]) -> None:
        self.counts[engine], self.changed = counts, True

    def due_in(self, now: float) -> float | None:
        """Seconds until something is published; None if there is no news."""
        return max(0.0, self.last + self.INTERVAL - now) if self.changed else None

    def publish(self, now: float) -> None:
        """Tell every front end how many requests each engine has; front ends that have gone are forgotten."""
        for box in self.clients:
            box.put(self.counts, is_state=True)
        self.clients = [box for box in self.clients if not box.gone]
        self.changed, self.last = False, now

    def run(self) -> None:
        """Until all engines or all clients are gone."""
        while self.mail and self.clients:
            late = [box for box in self.clients if box.pending]
            readable, writable, _ = select.select([*self.mail], late, [], self.due_in(time.monotonic()))
            for box in writable:
                box.flush()
            for sock in readable:
                try:
                    for engine, counts in self.mail[sock].receive(0):
                        self.note(engine, counts)
                except (ClientGone, OSError, pickle.UnpicklingError, TypeError, ValueError, LookupError):
                    del self.mail[sock]
            if self.due_in(time.monotonic()) == 0.0:
                self.publish(time.monotonic())

"""Reads one adapter at a time, on a thread, and gives up on one that does not answer.

Owns the queue of readings; called by `manager`. It knows futures and functions, never an adapter, and never lets
anybody wait for a thread that is stuck. vLLM: `vllm/lora/worker_manager.py` (there, a worker between two steps).
"""

from __future__ import annotations

import common

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class AdapterReader:
    """Reads one adapter at a time, each on a thread of its own, and gives up on one that does not answer.

    A dead mount keeps whoever asks it in the kernel, where no signal reaches. Nobody waits for such a thread, not even
    the end of Python; but no more than `MAX_STUCK` are left behind.
    """

    DEADLINE = 30.0  # seconds for one adapter
    MAX_STUCK = 4

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queue: deque[tuple[Future, Callable[..., Any], tuple]] = deque()
        self.current: Future | None = None
        self.stuck: list[threading.Thread] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """Call it when its turn comes. The future ends within `DEADLINE` of that; until then it can be cancelled."""
        future: Future = Future()
        self.queue.append((future, function, args))
        self._next()
        return future

    def _next(self) -> None:
        with self.lock:
            while self.queue and self.current is None:
                future, function, args = self.queue.popleft()
                if future.set_running_or_notify_cancel():
                    self._start(future, function, args)

    def _start(self, future: Future, function: Callable[..., Any], args: tuple) -> None:
        self.stuck = [thread for thread in self.stuck if thread.is_alive()]
        if len(self.stuck) >= self.MAX_STUCK:
            future.set_exception(common.InputError(f"{len(self.stuck)} adapters before this one are still being read"))
            return
        self.current = future
        thread = threading.Thread(target=self._run, args=(future, function, args), daemon=True, name="lora")
        timer = threading.Timer(self.DEADLINE, self._give_up, args=(future, thread))
        timer.daemon = True
        future.add_done_callback(lambda future: timer.cancel())
        thread.start()
        timer.start()

    def _run(self, future: Future, function: Callable[..., Any], args: tuple) -> None:
        try:
            self._finish(future, function(*args), None)
        except BaseException as error:
            self._finish(future, None, error)

    def _give_up(self, future: Future, thread: threading.Thread) -> None:
        with self.lock:
            if self.current is future:
                self.stuck.append(thread)
        error = common.InputError(f"the adapter could not be read within {self.DEADLINE:g} seconds")
        self._finish(future, None, error)

    def _finish(self, future: Future, result: Any, error: BaseException | None) -> None:
        with self.lock:
            if self.current is not future:  # somebody has given up on it
                return
            self.current = None
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        self._next()

"""The thread that reads adapters, and who gives up on it."""

from __future__ import annotations

import threading

from engine.lora.reader import AdapterReader


def test_an_alarm_that_comes_too_late_counts_no_thread_as_stuck():
    """The reading ends just before its timer is stopped. Whoever is counted as stuck keeps others from being read."""
    reader, gate = AdapterReader(), threading.Event()
    done = reader.submit(lambda: "read")
    assert done.result(5) == "read"
    alive = threading.Thread(target=gate.wait, args=(5,))
    alive.start()
    reader._give_up(done, alive)
    gate.set()
    alive.join()
    assert reader.stuck == [] and done.result() == "read"

"""Who is left of a connection that never came to be."""

from __future__ import annotations

import common  # noqa: F401  it must come before torch

import queue
import socket
import threading

from engine.kv_transfer import links


def test_a_connection_that_never_began_is_forgotten():
    """Nobody waits for a writer that was not started, and the end of Python does not wait for the connection."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    link = links.Link(inbox, threading.Event(), address=address, timeout=1)
    link.reader.join(10)
    assert not link.reader.is_alive() and link not in links.OPEN
    assert inbox.get(timeout=5)[1]["kind"] == "LOST"

"""An engine's mailbox with the other ends of its sockets, and readers that nobody waits for in vain."""

from __future__ import annotations

import contextlib
import socket
import threading

from engine.serving.engine_mailbox import EngineMailbox
from engine.serving.wire import loads


@contextlib.contextmanager
def mailbox(clients=2):
    """An engine's mailbox, and the other ends of its sockets: the clients', then the coordinator's."""
    pairs = [socket.socketpair() for _ in range(clients + 1)]
    theirs = [a for a, _ in pairs]
    try:
        yield EngineMailbox(theirs[:-1], theirs[-1], 1), [b for _, b in pairs]
    finally:
        for sock in sum(pairs, ()):
            sock.close()


def read_letters(sock):
    """All that comes until the other side hangs up; then we do."""
    data, letters = b"", []
    with sock:
        while chunk := sock.recv(1 << 18):
            data += chunk
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        letters.append(loads(data[4:end]))
        data = data[end:]
    return letters


@contextlib.contextmanager
def nobody_waits(*sockets):
    """Whoever waits for one of these to be read fails after ten seconds, instead of never."""
    watchdog = threading.Timer(10, lambda: [sock.shutdown(socket.SHUT_RDWR) for sock in sockets])
    watchdog.start()
    try:
        yield
        assert watchdog.is_alive(), "somebody waited"
    finally:
        watchdog.cancel()

"""The engine core's end of a socket to one front end.

Owns the socket and the bytes of a letter that is not whole yet; called by `core_proc` between two steps. It never
drops a letter: sending waits until the other side reads. vLLM: `EngineCoreProc`'s socket threads in
`vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from engine.serving.wire import frame

Receive = Callable[[float | None], list[tuple]]  # letters; how many seconds to wait for the first, None is for ever


class ClientGone(Exception):
    """Nobody is left to work for."""


class Mailbox:
    """The engine core's end of a socket: blocking, length-prefixed pickles.

    Both ends are our own processes, so pickle is safe here. On a network it would not be: there, 06c asks for a secret
    first. vLLM sends msgpack over ZeroMQ, which is faster, and does not run what it is sent.
    """

    def __init__(self, sock: socket.socket, loads: Callable[[bytes | bytearray], Any] = pickle.loads) -> None:
        self.sock, self.buffer, self.loads = sock, bytearray(), loads
        sock.setblocking(True)

    def send(self, letter: Any) -> None:
        """Waits if the other side does not read: the engine cannot run away from its front end."""
        try:
            self.sock.sendall(frame(letter))
        except OSError:
            raise ClientGone from None

    def receive(self, seconds: float | None) -> list[Any]:
        """All letters that are here; waits up to `seconds` for one, None is for ever. Raises ClientGone."""
        letters: list[Any] = []
        while select.select([self.sock], [], [], 0 if letters else seconds)[0]:
            try:
                chunk = self.sock.recv(1 << 18)
            except OSError:
                chunk = b""
            if not chunk:
                raise ClientGone
            self.buffer += chunk
            while len(self.buffer) >= 4 and len(self.buffer) >= (end := 4 + int.from_bytes(self.buffer[:4], "big")):
                letters.append(self.loads(self.buffer[4:end]))
                del self.buffer[:end]
        return letters


def hang_up(sockets: Iterable[socket.socket], patience: float = 5.0) -> None:
    """After the last letter, until it was read, or `patience` seconds: a socket closed while the other side still
    writes fails there, and asyncio then drops what it has read: the letter that says why."""
    stop, left = time.monotonic() + patience, set(sockets)
    for sock in left:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
    while left and (seconds := stop - time.monotonic()) > 0:
        for sock in select.select(left, [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                if sock.recv(1 << 18):
                    continue
            left.remove(sock)

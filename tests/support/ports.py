"""TCP ports that nobody listens at."""

from __future__ import annotations

import contextlib
import socket


def free_ports(count):
    """The first of some: a rank listens at the one behind its neighbour's."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first

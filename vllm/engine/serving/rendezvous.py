"""Engines on other machines dial in: who may, and for which place.

Owns the places of a group that are still free; called by `engine_group` on both sides. Nothing is read, and later
unpickled, of who does not know our secret. It never starts an engine. vLLM: `vllm/v1/engine/utils.py`.
"""

from __future__ import annotations

import common

import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from engine.distributed import handshake
from engine.serving.sockets import bind

say_aloud = functools.partial(print, flush=True)


def read_line(sock: socket.socket, stop: float, limit: int = 4096) -> dict[str, Any]:
    """One line of JSON, whole before `stop` on the monotonic clock. Raises ValueError for anything else, or OSError."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > limit:
            raise ValueError("no line")
        line += handshake.read_exactly(sock, 1, stop)
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


class EngineReception:
    """Gives engines that dial in their places: `found[engine, slot]` is a socket, slots are those of `EngineGroup`.

    Every connection starts with the handshake: nothing is read, and later unpickled, of who does not know our secret.
    Then a line of JSON says which engine and slot it is for, and the first answer says how many slots there are.
    """

    def __init__(self, expected: set[int], num_clients: int, say: Callable[[str], None]) -> None:
        self.expected, self.num_clients, self.say = expected, num_clients, say
        self.found: dict[tuple[int, int], socket.socket] = {}
        self.lock, self.complete = threading.Lock(), threading.Event()

    def welcome(self, sock: socket.socket, address: tuple) -> None:
        """A place for `sock`, or a line that says why not; on the thread of this connection."""
        try:
            try:
                hello = read_line(sock, time.monotonic() + handshake.SECONDS)
                self._seat(hello, sock, address)
            except ValueError as error:
                sock.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
                sock.close()
        except OSError:  # it has gone again
            sock.close()

    def is_free(self, engine: int, slot: int) -> bool:
        """Whether such a place is there, and nobody has it."""
        return engine in self.expected and 0 <= slot <= self.num_clients and (engine, slot) not in self.found

    def _seat(self, hello: dict[str, Any], sock: socket.socket, address: tuple) -> None:
        engine, slot = hello.get("engine"), hello.get("slot")
        slots = self.num_clients + 1
        with self.lock:
            forget_the_gone(self.found)
            if type(engine) is not int or type(slot) is not int or not self.is_free(engine, slot):
                raise ValueError(
                    f"engine {engine!r:.40}, slot {slot!r:.40}: expected are engines {sorted(self.expected)}, once"
                )
            sock.sendall(json.dumps({"slots": slots, "clients": self.num_clients}).encode() + b"\n")
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.found[engine, slot] = sock
            if slot == slots - 1:
                self.say(f"engine {engine} is here, from {address[0]}")
            if len(self.found) == len(self.expected) * slots:
                self.complete.set()


def accept_engines(
    args: Any, num_clients: int, say: Callable[[str], None] = say_aloud
) -> dict[tuple[int, int], socket.socket]:
    """Wait for the engines that `--headless` processes bring: {(engine, slot): socket}, slots as in `EngineGroup`."""
    local = args.data_parallel_size_local
    expected = set(range(args.data_parallel_size if local is None else local, args.data_parallel_size))
    if not expected:
        return {}
    key, engines = handshake.secret(), EngineReception(expected, num_clients, say)
    flags = "--data-parallel-address", "--data-parallel-rpc-port"
    listener = bind(args.data_parallel_address, args.data_parallel_rpc_port, flags)
    listener.listen()
    with contextlib.closing(handshake.Reception(listener, key, engines.welcome)):
        host, port = listener.getsockname()[:2]
        say(f"waiting for {len(expected)} engines at {host}:{port}")
        engines.complete.wait()
    return engines.found


def forget_the_gone(found: dict[tuple[int, int], socket.socket]) -> None:
    """Engines that hung up before all were here lose their places: they may be started again."""

    def has_hung_up(sock: socket.socket) -> bool:
        try:
            return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # it is there, and says nothing
            return False
        except OSError:
            return True

    gone = {engine for (engine, _), sock in found.items() if has_hung_up(sock)}
    for key in [key for key in found if key[0] in gone]:
        found.pop(key).close()


def dial(address: str, port: int, engine: int, patience: float = 600.0) -> tuple[list[socket.socket], int]:
    """Connect an engine to the API servers at `address`, once per slot. Returns sockets, and how many are clients.

    Raises InputError if nobody of ours listens there within `patience` seconds, or if this engine is not expected.
    """
    key, sockets, slots, clients, stop = handshake.secret(), [], 1, 1, time.monotonic() + patience
    while len(sockets) < slots:
        sock = None
        try:
            sock = handshake.dial((address, port), key)
            sock.sendall(json.dumps({"engine": engine, "slot": len(sockets)}).encode() + b"\n")
            answer = read_line(sock, time.monotonic() + handshake.SECONDS)
        except (OSError, ValueError) as error:
            if sock is not None:
                sock.close()  # its place is free again
            known = isinstance(error, (ValueError, handshake.Stranger))
            if known or time.monotonic() > stop:
                raise common.InputError(f"--data-parallel-address {address}, port {port}: {error}") from None
            time.sleep(0.2)
            continue
        if "error" in answer:
            raise common.InputError(f"--data-parallel-start-rank: refused by {address}: {answer['error']}")
        slots, clients = answer["slots"], answer["clients"]
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.append(sock)
    return sockets, clients

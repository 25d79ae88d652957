"""The handshake: who may be an engine of ours, before a byte of a connection is believed.

Owns the secret of a service and the proof of it, an HMAC over two random numbers, one of each side; called by links and
by engine groups. It never encrypts or signs what comes after it, and never waits longer than a deadline.
vLLM: `vllm/utils/network_utils.py` has ports, and asks for no secret.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.model import folders

# A port that engines dial is open to whoever reaches it. So all of a greeting is of fixed size, each connection has a
# thread of its own, and of strangers there are only so many. The proof is about who has connected: who sits on the wire
# reads what follows and may change it. Such a port belongs in a private network all the same, as vLLM's do.
# (The same idea without a deadline, one connection at a time: CPython's `multiprocessing/connection.py`,
# `deliver_challenge` and `answer_challenge`.)

MAGIC = b"vllm-fp1"
NONCE = 32  # bytes; a proof, an HMAC-SHA256, has as many
SECONDS = 5.0  # for a whole greeting: three messages, none of which anybody has to think about
STRANGERS = 64  # greetings at a time; one more, and the oldest is over: an engine needs milliseconds for its own
VARIABLE = "VLLM_ENGINE_SECRET"


class Stranger(ConnectionError):
    """The other side is no engine of ours: it speaks another protocol, or does not know the secret."""


def secret() -> bytes:
    """What all engines and servers of one service know, and nobody else.

    On one machine it is in a file that only this user can read, made at the first need. On others it is the value of
    VLLM_ENGINE_SECRET, which goes before. Raises InputError if it is short, or if the file is open to others.
    """
    if (given := os.environ.get(VARIABLE)) is not None:
        if len(given) < 16:
            raise common.InputError(f"{VARIABLE}: must have 16 characters or more; try `openssl rand -hex 32`")
        return given.encode(errors="surrogateescape")
    path = folders.cache_folder() / "engine_secret"
    try:
        if not path.exists():
            _write_secret(path)
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise common.InputError(f"{path}: others can read it; remove it, or give {VARIABLE}")
        found = path.read_bytes()
    except OSError as error:
        raise common.InputError(f"{path}: {error.strerror}; give {VARIABLE}") from None
    if len(found) < 16:
        raise common.InputError(f"{path}: too short for a secret; remove it")
    return found


def _write_secret(path: Path) -> None:
    """Whole or not at all, and of several processes that do so at once the first one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    with open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(secrets.token_hex(32).encode())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(scratch, path)
    finally:
        scratch.unlink()


def read_exactly(sock: socket.socket, n: int, stop: float) -> bytes:
    """n bytes before `stop` on the monotonic clock, however slowly they trickle in. TimeoutError, or ConnectionError if
    the other side hangs up."""
    data = b""
    while len(data) < n:
        if (left := stop - time.monotonic()) <= 0:
            raise TimeoutError(f"{len(data)} of {n} bytes came in time")
        sock.settimeout(left)
        if not (piece := sock.recv(n - len(data))):
            raise ConnectionError("the other side has hung up")
        data += piece
    return data


def greet(sock: socket.socket, key: bytes, accepted: bool, stop: float) -> None:
    """Prove that we know `key`, and have the other side prove it, before `stop` on the monotonic clock.

        each side says       MAGIC, and a random number
        each side answers    HMAC(key, its own role · its number · the other's number)

    Nothing of an earlier greeting is of use in another one, and what one side has said proves nothing in the other's
    role. Raises Stranger, TimeoutError or another OSError; afterwards the socket has no time limit.
    """
    mine = secrets.token_bytes(NONCE)
    roles = (b"accepted", b"dialled") if accepted else (b"dialled", b"accepted")
    sock.settimeout(SECONDS)
    sock.sendall(MAGIC + mine)
    for byte in MAGIC:  # one by one: who speaks something else often waits for our answer after a few
        if read_exactly(sock, 1, stop)[0] != byte:
            raise Stranger("it is no engine of this project")
    theirs = read_exactly(sock, NONCE, stop)
    sock.sendall(hmac.digest(key, roles[0] + mine + theirs, "sha256"))
    proof = read_exactly(sock, NONCE, stop)
    if not hmac.compare_digest(proof, hmac.digest(key, roles[1] + theirs + mine, "sha256")):
        raise Stranger(f"it has another secret than we; {VARIABLE} must be the same on all machines")
    sock.settimeout(None)


def dial(address: tuple[str, int], key: bytes, seconds: float = 10.0) -> socket.socket:
    """A connection to an engine or server of ours; OSError if none has been made and greeted within `seconds`."""
    stop = time.monotonic() + seconds
    sock = socket.create_connection(address, seconds)
    try:
        greet(sock, key, False, stop)
    except BaseException:
        sock.close()
        raise
    return sock


class Reception:
    """Takes the calls of a listening socket and greets every caller on a thread of its own. A caller who knows the
    secret goes to `welcome(sock, address)`, on that thread; nobody waits behind a caller who says nothing."""

    def __init__(self, listener: socket.socket, key: bytes, welcome: Callable[[socket.socket, tuple], None]) -> None:
        self.listener, self.key, self.welcome, self.closed = listener, key, welcome, False
        self.strangers: dict[socket.socket, None] = {}  # oldest first
        self.lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True, name="Reception").start()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self.listener.accept()
            except OSError:
                if self.closed:
                    return
                time.sleep(0.1)  # no descriptor was left, or the caller has gone again: the next one may have more luck
                continue
            with self.lock:
                self.strangers[sock] = None
                if len(self.strangers) > STRANGERS:
                    oldest = next(iter(self.strangers))
                    del self.strangers[oldest]
                    _hang_up(oldest)  # its own thread hears of it, and closes it
            try:
                threading.Thread(target=self._greet, args=(sock, address), daemon=True).start()
            except RuntimeError:  # no thread was left either
                with self.lock:
                    self.strangers.pop(sock, None)
                sock.close()

    def _greet(self, sock: socket.socket, address: tuple) -> None:
        try:
            greet(sock, self.key, True, time.monotonic() + SECONDS)
        except OSError:
            return sock.close()
        finally:
            with self.lock:
                self.strangers.pop(sock, None)
        self.welcome(sock, address)

    def close(self) -> None:
        """No more calls; whoever is being greeted is sent away."""
        self.closed = True
        _hang_up(self.listener)  # wakes the thread that accepts
        self.listener.close()
        with self.lock:
            for sock in self.strangers:
                _hang_up(sock)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

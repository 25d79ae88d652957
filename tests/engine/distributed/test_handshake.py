"""Who knows the secret is let in, and nobody else takes anybody's time."""

from __future__ import annotations

import common

import contextlib
import hmac
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.distributed import handshake
from engine.model import folders
from support import handshakes
from support.handshakes import greeted

secret = handshakes.secret


def test_of_strangers_there_are_only_so_many_at_a_time(secret, monkeypatch):
    """The oldest has to go: who knows the secret needs milliseconds to prove it."""
    monkeypatch.setattr(handshake, "STRANGERS", 3)
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        arrived = queue.SimpleQueue()
        reception = stack.enter_context(contextlib.closing(
            handshake.Reception(server, secret, lambda sock, _: arrived.put(sock))))  # fmt: skip
        strangers = []
        for _ in range(5):
            strangers.append(stack.enter_context(socket.create_connection(server.getsockname(), 20)))
            strangers[-1].recv(99)
        with greeted(server.getsockname(), secret), arrived.get(timeout=20):
            assert [sock.recv(99) for sock in strangers[:2]] == [b""] * 2 and len(reception.strangers) <= 3
        strangers[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):  # the youngest still has its time
            strangers[-1].recv(99)


def test_a_proof_is_of_use_once_and_in_one_role(secret):
    """Neither what an engine once said, nor what the head itself says, opens the door."""
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    with contextlib.closing(handshake.Reception(server, secret, pytest.fail)):
        for echo in (True, False):
            with socket.create_connection(address, 20) as sock:
                said = sock.recv(40, socket.MSG_WAITALL)
                sock.sendall(said)
                proof = sock.recv(32, socket.MSG_WAITALL)
                sock.sendall(proof if echo else hmac.digest(secret, b"dialled" + bytes(64), "sha256"))
                assert sock.recv(1) == b""


@pytest.mark.parametrize("accepted", [True, False])
def test_a_greeting_ends_in_time_however_slowly_it_trickles(accepted):
    ours, theirs = socket.socketpair()

    def trickle():
        with contextlib.suppress(OSError):
            for byte in handshake.MAGIC + bytes(100):
                theirs.sendall(bytes([byte]))
                time.sleep(0.02)

    thread, start = threading.Thread(target=trickle, daemon=True), time.monotonic()
    thread.start()
    with ours, theirs, pytest.raises(TimeoutError):
        handshake.greet(ours, b"a secret that nobody hears", accepted, start + 0.3)
    assert time.monotonic() - start < 1


def test_the_secret_is_this_users_and_the_same_for_everybody(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_ENGINE_SECRET", raising=False)
    monkeypatch.setattr(folders, "cache_folder", lambda: tmp_path / "made")
    with ThreadPoolExecutor(8) as pool:
        found = {*pool.map(lambda _: handshake.secret(), range(8))}
    (path,) = (tmp_path / "made").iterdir()
    assert found == {path.read_bytes()} and len(path.read_bytes()) == 64 and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(common.InputError, match="others can read it"):
        handshake.secret()
    path.chmod(0o600)
    path.write_bytes(b"")
    with pytest.raises(common.InputError, match="too short"):
        handshake.secret()
    monkeypatch.setattr(folders, "cache_folder", lambda: path)
    with pytest.raises(common.InputError, match="give VLLM_ENGINE_SECRET"):
        handshake.secret()
    monkeypatch.setenv("VLLM_ENGINE_SECRET", "0123456789abcdef")
    assert handshake.secret() == b"0123456789abcdef"
    monkeypatch.setenv("VLLM_ENGINE_SECRET", "short")
    with pytest.raises(common.InputError, match="16 characters"):
        handshake.secret()

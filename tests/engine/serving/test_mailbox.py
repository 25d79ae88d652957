"""The engine core's end of a socket: letters arrive whole, however it cuts them, and waiting has an end."""

from __future__ import annotations

import queue
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.serving.clients import ThreadClient
from engine.serving.mailbox import ClientGone, Mailbox, hang_up
from engine.serving.wire import frame


def test_hanging_up_has_an_end():
    """A front end that never hangs up does not keep an engine alive."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start = time.perf_counter()
        hang_up([theirs], patience=0.1)
        assert 0.09 < time.perf_counter() - start < 2 and ours.recv(1) == b""


@given(st.lists(st.binary(max_size=300), max_size=12), st.integers(1, 50))
@settings(max_examples=40)
def test_letters_arrive_whole_however_the_socket_cuts_them(bodies, size):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mailbox, raw, got = Mailbox(theirs), b"".join(map(frame, bodies)), []
        for start in range(0, len(raw), size):
            ours.sendall(raw[start : start + size])
            got += mailbox.receive(0)
        assert got == bodies and not mailbox.buffer
        ours.close()
        with pytest.raises(ClientGone):
            mailbox.receive(None)
        with pytest.raises(ClientGone):
            for _ in range(1000):
                mailbox.send(b"x" * 10_000)


def test_receive_waits_only_if_it_is_asked_to():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mailbox = Mailbox(theirs)
        assert mailbox.receive(0) == []
        start = time.perf_counter()
        threading.Timer(0.05, lambda: ours.sendall(frame("late"))).start()
        assert mailbox.receive(None) == ["late"] and time.perf_counter() - start > 0.04


@pytest.mark.parametrize("kind", ["socket", "queue"])
def test_receive_waits_no_longer_than_it_is_asked_to(kind):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = SimpleNamespace(inbox=queue.SimpleQueue())
        receive = Mailbox(theirs).receive if kind == "socket" else partial(ThreadClient._receive, thread)
        start = time.perf_counter()
        assert receive(0.05) == [] and time.perf_counter() - start > 0.04
        for letter in ("a", "b"):
            ours.sendall(frame(letter))
            thread.inbox.put(letter)
        start = time.perf_counter()
        assert receive(20) == ["a", "b"] and time.perf_counter() - start < 10


def test_an_engine_waits_for_a_front_end_that_does_not_read():
    """Back-pressure: the socket's buffers fill, then `send` blocks until somebody reads."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mailbox, sent = Mailbox(theirs), []

        def engine():
            for i in range(64):
                mailbox.send(bytes(100_000))
                sent.append(i)

        thread = threading.Thread(target=engine, daemon=True)
        thread.start()
        time.sleep(0.1)
        stuck = len(sent)
        assert stuck < 64
        reader, got = Mailbox(ours), 0
        while got < 64:
            got += len(reader.receive(None))
        thread.join(5)
        assert len(sent) == 64 and got == 64

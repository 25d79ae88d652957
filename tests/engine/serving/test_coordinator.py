"""Who publishes how long the engines' queues are, and is held up by nobody."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.serving.balancer import LoadBalancer
from engine.serving.coordinator import DPCoordinator
from engine.serving.dp_client import DPLBClient
from engine.serving.wire import frame, loads
from support.mailboxes import nobody_waits, read_letters


def test_the_coordinator_publishes_news_at_most_every_100_ms():
    ours, theirs = socket.socketpair()
    coordinator = DPCoordinator([ours], [])
    assert coordinator.due_in(5.0) is None
    coordinator.note(0, [1, 2, 0.5])
    assert coordinator.due_in(5.0) == 0.0
    coordinator.publish(5.0)
    assert coordinator.due_in(5.01) is None
    coordinator.note(0, [2, 2, 0.5])
    assert coordinator.due_in(5.04) == pytest.approx(0.06) and coordinator.due_in(5.2) == 0.0
    ours.close(), theirs.close()


def test_the_coordinator_tells_whoever_is_left_about_each_engine():
    pairs = [socket.socketpair() for _ in range(4)]
    coordinator = DPCoordinator([a for a, _ in pairs[:2]], [a for a, _ in pairs[2:]])
    pairs[2][1].close()
    coordinator.note(1, [3, 2, 0.5])
    coordinator.publish(5.0)
    client = DPLBClient([None, None], None, LoadBalancer(2))
    assert client.take(2, loads(pairs[3][1].recv(4096)[4:])) is None
    assert client.balancer.counts == [[0, 0, 0.0], [3, 2, 0.5]] and [box.sock for box in coordinator.clients] == [
        pairs[3][0]
    ]
    for sock in sum(pairs, ()):
        sock.close()


def test_the_coordinator_unpickles_letters_and_nothing_else():
    """Engines may be elsewhere, and then what dials in may be anybody."""
    (engine, ours), (_, a) = sockets = [socket.socketpair() for _ in range(2)]
    coordinator = DPCoordinator([ours], [a])
    engine.sendall(frame(os.getcwd))
    coordinator.run()
    assert not coordinator.mail
    for sock in sum(sockets, ()):
        sock.close()


def test_a_client_that_has_stopped_does_not_hold_up_the_coordinator():
    """It reads the latest when it goes on."""
    (engine, ours), (stopped, a), (other, b) = sockets = [socket.socketpair() for _ in range(3)]
    coordinator = DPCoordinator([ours], [a, b])
    with nobody_waits(stopped, other), ThreadPoolExecutor(3) as pool:
        for i in range(2000):
            coordinator.note(0, [i, 0, 0.0])
            coordinator.publish(0.0)
        assert all(box.state and len(box.unsent) < 1000 for box in coordinator.clients)
        running, *heard = [pool.submit(coordinator.run), *(pool.submit(read_letters, x) for x in (stopped, other))]
        while any(box.pending for box in coordinator.clients):
            engine.sendall(frame((0, [2000, 0, 0.0])))  # news wake it up
            time.sleep(0.01)
        engine.close(), running.result(20), a.shutdown(socket.SHUT_WR), b.shutdown(socket.SHUT_WR)
        for future in heard:
            assert future.result(20)[-1][0][0] in (1999, 2000)
    for sock in sum(sockets, ()):
        sock.close()


@pytest.mark.parametrize("said", [7, (9, [0, 0, 0.0]), (0,), ([], [0, 0, 0.0])])
def test_a_coordinator_that_hears_nonsense_goes_on(said):
    (first, bad), (second, good), (client, heard) = (socket.socketpair() for _ in range(3))
    with first, bad, second, good, client, heard:
        coordinator = DPCoordinator([first, second], [client])
        thread = threading.Thread(target=coordinator.run, daemon=True)
        bad.sendall(frame(said))
        thread.start()
        good.sendall(frame((1, [2, 1, 0.5])))
        size = int.from_bytes(heard.recv(4, socket.MSG_WAITALL), "big")
        assert loads(heard.recv(size, socket.MSG_WAITALL))[1] == [2, 1, 0.5]
        good.close()
        thread.join(20)
        assert not thread.is_alive(), "all engines are gone"

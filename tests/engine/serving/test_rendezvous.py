"""Engines elsewhere dial in; strangers are turned away."""

from __future__ import annotations

import common

import contextlib
import re
import socket
import threading
import time

import pytest

from engine.distributed import handshake
from engine.engine_args import EngineArgs
from engine.serving.rendezvous import accept_engines, dial, read_line
from support import handshakes
from support.handshakes import greeted
from support.ports import free_ports

secret = handshakes.secret


def test_engines_dial_in_and_strangers_are_turned_away(secret):
    args = EngineArgs(data_parallel_size=3, data_parallel_size_local=1, data_parallel_rpc_port=free_ports(1))
    found, said = {}, []
    head = threading.Thread(target=lambda: found.update(accept_engines(args, 2, said.append)), daemon=True)
    head.start()
    address = (args.data_parallel_address, args.data_parallel_rpc_port)
    remote, clients = dial(*address, 1)
    assert clients == 2 and len(remote) == 3
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"x" * 5000, b'{"engine": 1, "slot": 0}\n', b'{"engine": 0}\n',
                 b'{"engine": 2, "slot": 3}\n', b'{"engine": [], "slot": 0}\n', b'{"engine": 2, "slot": []}\n',
                 b'{"engine": 2.0, "slot": 0.0}\n', b'{"engine": true, "slot": true}\n', b"[" * 4000 + b"\n",
                 b"\xff\xfe\n", b'{"engine": NaN}\n', b'"\\ud800"\n', b"9" * 4090 + b"\n"):  # fmt: skip
        with socket.create_connection(address) as sock:
            sock.settimeout(20)
            sock.sendall(line)
            told = sock.recv(4096)
            assert told == told[: len(handshake.MAGIC) + handshake.NONCE], "a stranger hears a random number"
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(4096) == b""
        with greeted(address, secret) as sock:  # nonsense of one of ours is no better
            sock.settimeout(20)
            sock.sendall(line)
            assert b'{"error": ' in sock.recv(4096)
    with pytest.raises(common.InputError, match="refused"):
        dial(*address, 7)
    last, _ = dial(*address, 2)
    head.join(30)
    assert sorted(found) == [(e, s) for e in (1, 2) for s in range(3)] and len(said) == 3
    assert {sock.gettimeout() for sock in (*found.values(), *remote, *last)} == {None}, "a quiet hour is no failure"
    for (engine, slot), sock in found.items():
        sock.sendall(b"%d%d" % (engine, slot))
    assert [s.recv(2) for s in (*remote, *last)] == [b"10", b"11", b"12", b"20", b"21", b"22"]
    for sock in (*found.values(), *remote, *last):
        sock.close()
    with pytest.raises(common.InputError, match="--data-parallel-address"):
        dial(address[0], free_ports(1), 1, patience=0.0)
    with socket.create_server((address[0], 0)) as taken:
        args = EngineArgs(
            data_parallel_size=2, data_parallel_size_local=1, data_parallel_rpc_port=taken.getsockname()[1]
        )
        with pytest.raises(common.InputError, match=r"--data-parallel-address .* --data-parallel-rpc-port"):
            accept_engines(args, 1)


def test_an_engine_that_died_before_all_were_there_may_come_again(secret):
    args = EngineArgs(data_parallel_size=3, data_parallel_size_local=1, data_parallel_rpc_port=free_ports(1))
    found, said = {}, []
    head = threading.Thread(target=lambda: found.update(accept_engines(args, 1, said.append)), daemon=True)
    head.start()
    address = (args.data_parallel_address, args.data_parallel_rpc_port)
    for sock in dial(*address, 1)[0]:
        sock.close()
    sockets = [*dial(*address, 1)[0], *dial(*address, 2)[0]]
    head.join(30)
    assert sorted(found) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for (engine, slot), sock in found.items():
        sock.sendall(b"%d%d" % (engine, slot))
    assert [sock.recv(2) for sock in sockets] == [b"10", b"11", b"20", b"21"]
    for sock in (*found.values(), *sockets):
        sock.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"[]\n" * 40, b""])
def test_who_dials_somebody_else_reads_one_line(answer, secret):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(answer)

        threading.Thread(target=accept).start()
        with pytest.raises(common.InputError, match="--data-parallel-address"):
            dial(*server.getsockname(), 1, patience=0.0)


@pytest.mark.parametrize("answer", [b"[]\n", b'{"engine": 1\n', b"[" * 4000 + b"\n", b"x" * 5000])
def test_who_dials_a_head_that_talks_nonsense_reads_one_line(answer, secret):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def welcome(sock, _):
            with sock:
                sock.sendall(answer)
                sock.recv(4096)

        with (
            contextlib.closing(handshake.Reception(server, secret, welcome)),
            pytest.raises(common.InputError) as error,
        ):
            dial(*server.getsockname(), 1)
        assert re.match(
            r"--data-parallel-address .*: (no line|no object|nested too deeply|Expecting)", str(error.value)
        )


def test_who_dials_another_secret_is_told(secret):
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    reception = handshake.Reception(server, b"another one of theirs", pytest.fail)
    with contextlib.closing(reception), pytest.raises(common.InputError, match="another secret than we; VLLM_ENGINE_"):
        dial(*address, 1)


def test_nobody_waits_behind_strangers_who_say_nothing_or_a_byte_at_a_time(secret, monkeypatch):
    """And a greeting has a deadline, however it trickles."""
    monkeypatch.setattr(handshake, "SECONDS", 1.0)
    args = EngineArgs(data_parallel_size=2, data_parallel_size_local=1, data_parallel_rpc_port=free_ports(1))
    found, said = {}, []
    head = threading.Thread(target=lambda: found.update(accept_engines(args, 1, said.append)), daemon=True)
    head.start()
    address = (args.data_parallel_address, args.data_parallel_rpc_port)
    while not said:
        time.sleep(0.01)
    with contextlib.ExitStack() as strangers:
        silent = [strangers.enter_context(socket.create_connection(address)) for _ in range(40)]
        slow = strangers.enter_context(socket.create_connection(address))
        start, ended = time.monotonic(), []

        def trickle():
            with contextlib.suppress(OSError):
                for byte in handshake.MAGIC + bytes(1000):
                    slow.sendall(bytes([byte]))
                    time.sleep(0.05)
            ended.append(time.monotonic() - start)

        trickling = threading.Thread(target=trickle, daemon=True)
        trickling.start()
        sockets, clients = dial(*address, 1)
        assert time.monotonic() - start < 0.9, "an engine waits for nobody"
        head.join(20)
        trickling.join(20)
        assert clients == 1 and sorted(found) == [(1, 0), (1, 1)] and ended[0] < 5
        for sock in silent:
            sock.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert len(sock.recv(99)) == 40 and sock.recv(99) == b""
    for sock in (*found.values(), *sockets):
        sock.close()


def test_a_line_without_an_end_is_not_read_for_ever():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x" * 5000)
        with pytest.raises(ValueError, match="no line"):
            read_line(ours, time.monotonic() + 20)
        with pytest.raises(TimeoutError):
            theirs.sendall(b"x")
            read_line(ours, time.monotonic() + 0.1, limit=10_000)

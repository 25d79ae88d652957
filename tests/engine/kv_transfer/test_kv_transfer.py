"""What travels arrives bit for bit, whatever happens on the way, and nobody keeps a block."""

from __future__ import annotations

import common

import contextlib
import copy
import dataclasses
import errno
import functools
import io
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
import zlib
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine import registry
from engine.kv_transfer import connectors, links
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.consumer import Consumer
from engine.kv_transfer.digest import weights_digest
from engine.kv_transfer.frames import MAGIC, PREFIX, ProtocolError, as_bytes, checksum, pack_frame, read_frame
from engine.kv_transfer.heads import HeadSlice, num_consumers, owned_heads, tp_sources
from engine.kv_transfer.p2p import TCPConnector
from engine.kv_transfer.params import attach_params, check_kv_transfer_params
from engine.kv_transfer.producer import Producer
from engine.kv_transfer.store import KVStore, Tier
from engine.lora import lora_model
from engine.model import llama
from engine.model.config import LlamaConfig
from engine.model.packed_linear import pack_weights
from engine.output import KVConnectorMetadata, KVConnectorOutput
from engine.quantization import methods
from engine.request import Request, SamplingParams
from engine.serving.core_proc import EngineCoreProc
from engine.serving.mailbox import ClientGone
from lab import naive
from lab.transfers import Faults, MemoryLink, rehearse
from support.mixtures import MIXTURE
from support.tiers import and_slowly
from support.transfers import (
    PROMPT,
    SEED,
    TOKENS,
    WIRES,
    assert_idle,
    counts,
    drain,
    generated,
    handed_over,
    make_core,
    make_request,
    pair,
    submit,
    until,
)

lesson = registry.lesson("08_disagg")  # its reference for what is in a block


@pytest.fixture(scope="module")
def tiny_model():
    return llama.random_model(seed=SEED)


@pytest.fixture(scope="module")
def expected(tiny_model):
    return naive.generate(tiny_model, PROMPT, TOKENS)


# --- Frames ----------------------------------------------------------------------------------------------------------

GOOD = {"kind": "KV", "transfer": "x", "layer": 3, "first": 0, "count": 5, "head": 0, "heads": 2, "crc": 7}


def reader(data: bytes):
    stream = io.BytesIO(data)

    def read(n: int) -> bytearray:
        found = bytearray(stream.read(n))
        if len(found) < n:
            raise EOFError("cut")
        return found

    return read


def test_a_frame_comes_back_and_half_a_frame_does_not():
    data = pack_frame(GOOD, 4) + b"abcd"
    assert read_frame(reader(data + data)) == (GOOD, b"abcd")
    for n in range(len(data)):
        with pytest.raises(EOFError):
            read_frame(reader(data[:n]))


def test_a_frame_is_these_bytes():
    """Two engines need not be of one version: what one writes, the other must be able to read."""
    header = b'{"kind": "DONE", "transfer": "x"}'
    frame = b"kvx1" + len(header).to_bytes(4, "big") + (5).to_bytes(8, "big") + header
    assert pack_frame({"kind": "DONE", "transfer": "x"}, 5) == frame
    with pytest.raises(ProtocolError, match="not a frame"):
        read_frame(reader(b"kvx2" + frame[4:] + bytes(5)))


@pytest.mark.parametrize(
    "message",
    [GOOD, {"kind": "HELLO", "layout": "2/3", "engine_id": "e", "port": 0},
     {"kind": "GET", "transfer": "x", "head": 0, "heads": 1, "end": 5, "have": [0, 5], "consumers": 1},
     {"kind": "DONE", "transfer": "x"}, {"kind": "CANCEL", "transfer": "x"},
     {"kind": "GONE", "transfer": "x", "why": "aborted"}],
)  # fmt: skip
def test_every_field_of_a_message_is_needed(message):
    assert read_frame(reader(pack_frame(message))) == (message, b"")
    for name in message:
        with pytest.raises(ProtocolError):
            read_frame(reader(pack_frame({k: v for k, v in message.items() if k != name})))


@pytest.mark.parametrize("header", [b"{", b"[]", b"7", b'"KV"', b"null", b'{"kind": []}', b"[" * 100_000, b"\xff"])
def test_a_header_may_be_any_bytes(header):
    with pytest.raises(ProtocolError):
        read_frame(reader(PREFIX.pack(MAGIC, len(header), 0) + header))


@pytest.mark.parametrize(
    "change",
    [{"kind": "RUN"}, {"kind": None}, {"transfer": 5}, {"layer": -1}, {"layer": 1.0}, {"layer": True},
     {"count": 1 << 50}, {"crc": None}, {"kind": "GET", "have": "all"},
     {"kind": "GET", "end": 1, "consumers": 1, "have": [0, "1"]}],
)  # fmt: skip
def test_headers_are_not_believed(change):
    with pytest.raises(ProtocolError):
        read_frame(reader(pack_frame(GOOD | change)))


@pytest.mark.parametrize("sizes", [((1 << 20) + 1, 0), (0, (1 << 32) + 1)])
def test_nobody_waits_for_as_many_bytes_as_a_stranger_announces(sizes):
    with pytest.raises(ProtocolError, match="not a frame"):
        read_frame(reader(PREFIX.pack(MAGIC, *sizes)))
    with pytest.raises(EOFError):  # the largest that are waited for
        read_frame(reader(PREFIX.pack(MAGIC, 1 << 20, 1 << 32)))
    with pytest.raises(ProtocolError, match="not a frame"):
        read_frame(reader(pack_frame(GOOD, 5) + b"abcde"), 4)


@given(st.binary(max_size=200), st.booleans())
def test_bytes_of_a_stranger_raise_nothing_else(data, prefixed):
    if prefixed:
        data = PREFIX.pack(MAGIC, len(data), 0) + data
    with pytest.raises((ProtocolError, EOFError)):
        read_frame(reader(data))


@pytest.mark.parametrize("name", ["../../etc/passwd", "kvx-1-zz", f"kvx-1-{'0' * 16}/../x", "", 5])
def test_a_segment_is_nothing_but_a_segment(name):
    link = SimpleNamespace(max_payload=99)
    with pytest.raises(ProtocolError):
        links.SharedMemoryLink.receive(link, {"shm": name}, bytearray())


def test_who_maps_a_segment_removes_its_name():
    name = f"kvx-{os.getpid()}-{'0' * 16}"
    (links.SHM / name).write_bytes(b"abc")

    def take():
        return links.SharedMemoryLink.receive(SimpleNamespace(max_payload=3), {"shm": name}, bytearray())

    assert bytes(take().numpy()) == b"abc" and not (links.SHM / name).exists()
    assert take() is None, "a message that came twice"
    (links.SHM / name).touch()
    assert take() is None and not (links.SHM / name).exists(), "nothing in it"
    (links.SHM / name).write_bytes(b"abcd")
    with pytest.raises(ProtocolError, match="a segment of 4 bytes"):  # more than was asked for
        take()
    assert not (links.SHM / name).exists()


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="no such protection on this platform")
def test_a_segment_is_no_way_to_another_file(tmp_path, monkeypatch):
    """A link of that name is neither read nor removed nor written through."""
    secret, path = tmp_path / "secret", links.SHM / f"kvx-{os.getpid()}-{'1' * 16}"
    secret.write_bytes(b"abc")
    path.symlink_to(secret)
    monkeypatch.setattr(links.secrets, "token_hex", lambda n: "1" * 16)
    try:
        with pytest.raises(OSError):
            links.SharedMemoryLink.receive(SimpleNamespace(max_payload=99), {"shm": path.name}, bytearray())
        with connection(links.SharedMemoryLink) as (link, _), pytest.raises(FileExistsError):
            link.transmit(GOOD, torch.ones(2, dtype=torch.uint8))
        assert secret.read_bytes() == b"abc" and path.is_symlink()
    finally:
        path.unlink()


@pytest.mark.parametrize(
    "header", [{"kind": "HELLO", "port": 1 << 16}, *({"kind": "KV", "nbytes": n} for n in (None, 0, True, 65))]
)
def test_a_process_group_is_not_made_of_nonsense(header):
    with pytest.raises(ProtocolError):
        links.DistributedLink.receive(SimpleNamespace(group=None, max_payload=64), header, bytearray())


# --- Connections -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connection(kind=links.Link, **options):
    """A link that was accepted, and the socket at the other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname(), timeout=20)
        ours, _ = server.accept()
    link = kind(SimpleQueue(), threading.Event(), ours, **options)
    try:
        yield link, theirs
    finally:
        theirs.close(), link.close()


DONE = {"kind": "DONE", "transfer": "x"}


def accept(server):
    """The next caller, who proves that it is an engine of ours."""
    sock, _ = server.accept()
    links.handshake.greet(sock, links.handshake.secret(), True, time.monotonic() + 20)
    return sock


def test_a_host_that_does_not_know_the_secret_is_asked_for_nothing():
    """A client's `kv_transfer_params` may name one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = links.Link(SimpleQueue(), threading.Event(), address=server.getsockname())
        link.send({"kind": "GET", "transfer": "x"})
        theirs, _ = server.accept()
        with theirs:
            said = theirs.recv(40, socket.MSG_WAITALL)
            theirs.sendall(said)
            assert len(theirs.recv(999)) == 32 and theirs.send(bytes(32)) == 32, "a proof, and no request"
            assert "another secret" in link.inbox.get(timeout=20)[1]["why"] and theirs.recv(99) == b""


def test_no_more_memory_is_taken_than_was_asked_for():
    with connection(max_payload=4) as (link, theirs):
        theirs.sendall(pack_frame({"kind": "HELLO", "layout": "", "engine_id": "", "port": 0}))
        theirs.sendall(pack_frame(GOOD, 4) + b"abcd" + pack_frame(GOOD, 1 << 32))
        assert [link.inbox.get(timeout=20)[1]["kind"] for _ in range(3)] == ["HELLO", "KV", "LOST"]
        assert "4294967296 bytes" in link.lost


def test_a_connection_may_be_silent_for_longer_than_it_may_take_to_make():
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = links.Link(SimpleQueue(), threading.Event(), address=server.getsockname(), timeout=0.5)
        theirs = accept(server)
    time.sleep(0.7)
    theirs.sendall(pack_frame(DONE))
    assert link.inbox.get(timeout=20) == (link, DONE, None)
    assert link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "short letters leave at once"
    theirs.close(), link.close()


@pytest.mark.parametrize(("said", "why"), [(0, "the connection was closed"),
                                           (7, "the connection was closed in the middle of a message")])  # fmt: skip
def test_a_lost_connection_is_told_once_and_leaves_nothing(said, why):
    before = {*threading.enumerate()}
    with connection() as (link, theirs):
        theirs.sendall(pack_frame(DONE)[:said])
        theirs.close()
        assert link.inbox.get(timeout=20) == (link, {"kind": "LOST", "why": why}, None) and link.wake.wait(20)
        link.close()
        for thread in {*threading.enumerate()} - before:
            thread.join(20)
            assert not thread.is_alive()
        assert link.inbox.empty() and link.lost == why and link.sock.fileno() == -1


def test_to_close_a_connection_is_heard_at_both_ends():
    with connection() as (link, theirs):
        link.close()
        assert link.inbox.get(timeout=20)[1] == {"kind": "LOST", "why": "closed"} and theirs.recv(1) == b""


def test_a_connection_that_is_closed_while_it_is_made_ends_at_both_ends(monkeypatch):
    """And what was to be said over it is not said any more."""
    make, before = socket.create_connection, {*threading.enumerate()}
    going, closed = threading.Event(), threading.Event()

    def slowly(*args):
        going.set()
        assert closed.wait(20)
        return make(*args)

    monkeypatch.setattr(socket, "create_connection", slowly)
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = links.Link(SimpleQueue(), threading.Event(), address=server.getsockname())
        link.send(DONE)
        assert going.wait(20)
        link.close(), closed.set()
        theirs, _ = server.accept()
        theirs.settimeout(20)
        assert theirs.recv(1) == b""
        theirs.close()
    for thread in {*threading.enumerate()} - before:
        thread.join(20)
        assert not thread.is_alive()
    assert link.inbox.get()[1] == {"kind": "LOST", "why": "closed"} and link.inbox.empty()


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("no group"), MemoryError()])
@pytest.mark.parametrize("way", ["transmit", "receive"])
def test_a_wire_that_fails_is_a_lost_connection(way, error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(links.Link, way, fail)
    with connection() as (link, theirs):
        link.send(DONE) if way == "transmit" else theirs.sendall(pack_frame(DONE))
        _, header, _ = link.inbox.get(timeout=20)
        assert header == {"kind": "LOST", "why": str(error) or "MemoryError"}


def test_a_segment_is_private_and_goes_with_its_connection(monkeypatch):
    opened, closed, os_open, os_close = [], [], os.open, os.close

    def spy(path, *options):
        descriptor = os_open(path, *options)
        opened.extend([descriptor] if "kvx-" in str(path) else [])
        return descriptor

    monkeypatch.setattr(os, "open", spy)
    monkeypatch.setattr(os, "close", lambda fd: closed.extend([fd] if fd in opened else []) or os_close(fd))
    with connection(links.SharedMemoryLink) as (link, theirs), theirs.makefile("rb") as stream:
        for _ in range(2):
            link.send(GOOD, torch.arange(100, dtype=torch.uint8))
        taken, left = (read_frame(lambda n: bytearray(stream.read(n)))[0] for _ in "ab")
        path = links.SHM / left["shm"]
        assert path.stat().st_mode & 0o777 == 0o600 and path.read_bytes() == bytes(range(100))
        assert bytes(link.receive(taken, bytearray()).numpy()) == bytes(range(100))
        assert len(opened) == 3 and closed == opened, "two were written, one was read"
    assert link.inbox.get(timeout=20)[1]["kind"] == "LOST" and not path.exists(), "nobody came for it"


def test_memory_that_is_full_ends_the_connection_and_not_the_process(tmp_path):
    """A file system of 64 KiB. Storing into a mapping that has no memory behind it would be a bus error."""
    shell = f'mount -t tmpfs -o size=64k none "{tmp_path}" && "$@"'
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell, "sh"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no file system of our own can be mounted here")
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
import common, pathlib, queue, socket, threading, torch
from engine.kv_transfer import links
links.SHM = pathlib.Path({str(tmp_path)!r})
with socket.create_server(("127.0.0.1", 0)) as server:
    theirs = socket.create_connection(server.getsockname())
    link = links.SharedMemoryLink(queue.SimpleQueue(), threading.Event(), server.accept()[0])
link.send({GOOD}, torch.ones(1 << 20, dtype=torch.uint8))
print(link.inbox.get(timeout=20)[1], list(links.SHM.iterdir()))
for thread in threading.enumerate()[1:]:
    thread.join(20)
"""
    done = subprocess.run([*alone, sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'LOST'" in done.stdout and "No space left" in done.stdout and done.stdout.endswith(" []\n")


def test_a_new_link_removes_what_killed_processes_left(monkeypatch, tmp_path):
    """Of those that are an hour old: neither what a living process has written nor what only looks like a segment."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(links, "SHM", tmp_path)
    names = {f"kvx-{pid}-{i:016x}": pid for i, pid in enumerate((ended.pid, os.getpid(), 10**30, 1))}
    for name in (*names, young := f"kvx-{ended.pid}-{'f' * 16}", f"kvx-{ended.pid}", f"kvx-{ended.pid}-{'f' * 17}"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - (3500 if name == young else 3700),) * 2)
    before = set(tmp_path.iterdir())
    with connection(links.SharedMemoryLink):
        assert before - set(tmp_path.iterdir()) == {tmp_path / name for name in names if names[name] == ended.pid}


def test_names_that_were_mapped_are_forgotten(monkeypatch):
    monkeypatch.setattr(links.SharedMemoryLink, "MANY", 4)
    with connection(links.SharedMemoryLink) as (link, _):
        for i in range(20):
            before = set(link.names)
            link.transmit(GOOD, torch.ones(2, dtype=torch.uint8))
            (newest,) = link.names - before
            if i > 1:  # the first two are never fetched
                (links.SHM / newest).unlink()
            assert len(link.names) <= 5
    assert not list(links.SHM.glob(f"kvx-{os.getpid()}-*"))


def test_close_waits_for_the_thread_that_gives_back(monkeypatch):
    """The other side is gone: the reading thread has begun to tidy when the engine closes the link and ends."""
    begun, forget = threading.Event(), links.SharedMemoryLink.forget

    def slowly(link):
        begun.set()
        time.sleep(0.3)
        forget(link)

    monkeypatch.setattr(links.SharedMemoryLink, "forget", slowly)
    with connection(links.SharedMemoryLink) as (link, theirs):
        link.transmit(GOOD, torch.ones(2, dtype=torch.uint8))
        theirs.close()
        assert begun.wait(20)
        link.close()
        assert not list(links.SHM.glob(f"kvx-{os.getpid()}-*"))


@pytest.mark.parametrize("kind", [pytest.param("SharedMemoryLink", marks=pytest.mark.slow), "DistributedLink"])
def test_python_ends_while_payloads_are_on_their_way(kind):
    """It would abort on a thread that returns from torch when there is no Python any more to return to."""
    hello = {"kind": "HELLO", "layout": "", "engine_id": "", "port": 0}
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
import common, queue, socket, threading, torch
from engine.kv_transfer import links
kind, shake = links.{kind}, links.handshake
with socket.create_server(("127.0.0.1", 0)) as server:
    reader = kind(queue.SimpleQueue(), threading.Event(), address=server.getsockname(), timeout=60)
    sock, _ = server.accept()
    shake.greet(sock, shake.secret(), True, 1e9)
    writer = kind(queue.SimpleQueue(), threading.Event(), sock, timeout=60, hello={hello})
for _ in range(300):
    writer.send({GOOD}, torch.zeros(1 << 22, dtype=torch.uint8))
assert [reader.inbox.get(timeout=20)[1]["kind"] for _ in range(4)] == ["HELLO", "KV", "KV", "KV"]
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told[-2000:]
    assert not list(links.SHM.glob(f"kvx-{process.pid}-*"))


def test_who_waits_in_a_process_group_hears_that_the_other_side_has_left(monkeypatch):
    """Long before the group's patience ends."""
    hello, receive = {"kind": "HELLO", "layout": "", "engine_id": "", "port": 0}, links.DistributedLink.receive

    def leave(link, header, payload):
        if header["kind"] != "KV":
            return receive(link, header, payload)
        link._join()
        raise OSError("enough")

    monkeypatch.setattr(links.DistributedLink, "receive", leave)
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = links.DistributedLink(SimpleQueue(), threading.Event(), address=server.getsockname(), timeout=60)
        link = links.DistributedLink(SimpleQueue(), threading.Event(), accept(server), timeout=60, hello=hello)
    link.send(GOOD, torch.ones(1 << 24, dtype=torch.uint8))
    for ended in (left, link):
        ended.reader.join(20)
        assert not ended.reader.is_alive() and ended.lost and ended not in links.OPEN


def test_nobody_waits_for_ever_for_a_partner_in_a_process_group():
    hello = {"kind": "HELLO", "layout": "", "engine_id": "", "port": 0}
    with connection(links.DistributedLink, timeout=0.1, hello=hello) as (link, _):
        link.send(GOOD, torch.ones(4, dtype=torch.uint8))
        assert link.inbox.get(timeout=20)[1]["kind"] == "LOST"


# --- The two state machines, on the worst of networks ----------------------------------------------------------------


class Transfers(RuleBasedStateMachine):
    """Drops, doubles, reorders, truncates, loses the connection and lets time pass; and looks for leaks all the while.

    Memory is a dictionary per block owner: a write for a request that has ended would be somebody else's memory.
    """

    LAYERS, END = 3, 7

    @initialize()
    def begin(self):
        self.now = 0.0
        self.ours, self.theirs = MemoryLink(), MemoryLink()
        self.ours.other, self.theirs.other = self.theirs, self.ours
        self.producer = Producer(self.LAYERS, self.read, lease=30, clock=lambda: self.now)
        self.producer.PIECE = 3
        self.consumer = Consumer(self.LAYERS, self.write, timeout=10, retries=2, clock=lambda: self.now)
        self.progress: dict[str, int] = {}  # of prompts being computed: layers and positions, as one number
        self.kept: set[str] = set()  # blocks on the prefill side: computing, or kept for somebody
        self.reading: dict[str, dict] = {}  # blocks on the decode side
        self.ended: set[str] = set()
        self.count = 0

    def read(self, blocks, layer, first, count, head, heads):
        (name,) = blocks
        assert name in self.kept, "read from blocks that were freed"
        assert layer * self.END + first + count <= self.limit(name, layer) + layer * self.END, "not computed yet"
        return [(name, layer, p) for p in range(first, first + count)]

    def limit(self, name, layer):
        """Positions of this layer that have been computed."""
        return self.ready[name][layer]

    def write(self, blocks, header, payload):
        (name,) = blocks
        assert name in self.reading, "written into blocks that were freed"
        wanted = [(header["transfer"], header["layer"], header["first"] + t) for t in range(header["count"])]
        if payload != wanted:
            return False
        self.reading[name].update(dict.fromkeys(payload))
        return True

    ready: dict = {}  # noqa: RUF012

    @rule(ask_first=st.booleans())
    def submit(self, ask_first):
        name = f"r{self.count}"
        self.count += 1
        self.ready = {**self.ready, name: [0] * self.LAYERS}
        if ask_first:
            self.ask(name)
        self.kept.add(name)
        self.producer.export(name, [name])
        if not ask_first:
            self.ask(name)

    def ask(self, name):
        self.reading[name] = {}
        self.consumer.start(name, name, [name], 1, self.END, [(self.theirs, HeadSlice(0, 0, 1), 1)])

    def computing(self):
        return [n for n in self.kept if n in self.producer.exports and not self.producer.exports[n].finished]

    @rule(data=st.data(), positions=st.integers(1, 7))
    def compute(self, data, positions):
        if names := sorted(self.computing()):
            name = data.draw(st.sampled_from(names))
            end = min(self.END, self.ready[name][-1] + positions)
            for layer in range(self.LAYERS):
                self.ready[name][layer] = end
                self.producer.written(name, layer, end)
                self.pump()
            if end == self.END and not self.producer.finish(name):
                self.kept.discard(name)

    @rule(data=st.data(), how=st.sampled_from(["preempt", "abort", "cancel"]))
    def disturb(self, data, how):
        if how == "cancel" and self.reading:
            name = data.draw(st.sampled_from(sorted(self.reading)))
            self.consumer.cancel(name)
            del self.reading[name]
            assert self.consumer.cancelled.pop() == name and not self.consumer.cancelled, "its blocks may be freed"
        elif names := sorted(self.computing()):
            name = data.draw(st.sampled_from(names))
            if how == "preempt":
                self.ready[name] = [0] * self.LAYERS
                self.producer.preempted(name)
                self.producer.export(name, [name])
            elif how == "abort":
                self.producer.forget(name, "aborted")
                self.kept.discard(name)

    def pump(self):
        self.producer.pump(lambda link, header, payload: link.send(header, payload))

    def deliver(self, queue, index=0):
        header, payload = queue[index]
        del queue[index]
        self.receive(queue, header, payload)

    def receive(self, queue, header, payload):
        if queue is self.ours.arrived:
            self.producer.on_message(self.ours, header)
            self.pump()
        else:
            self.consumer.on_message(self.theirs, header, payload)

    @rule(data=st.data(), how=st.sampled_from(["deliver"] * 6 + ["drop", "double", "late", "cut"]))
    def network(self, data, how):
        queue = data.draw(st.sampled_from([self.ours.arrived, self.theirs.arrived]))
        if not queue:
            return
        index = data.draw(st.integers(0, len(queue) - 1)) if how == "late" else 0
        header, payload = queue[index]
        if how == "drop":
            queue.popleft()
        elif how == "cut":
            queue.popleft()
            self.receive(queue, header, payload[:-1] if payload else payload)
        else:
            if how == "double":
                self.receive(queue, header, payload)
            self.deliver(queue, index)

    @rule(seconds=st.sampled_from([1, 5, 11, 31]))
    def wait(self, seconds):
        self.now += seconds
        self.producer.expire()
        self.consumer.check()

    @rule()
    def disconnect(self):
        """The connection is lost and made again."""
        self.producer.on_lost(self.ours)
        self.consumer.on_lost(self.theirs, "lost")
        self.settle()
        self.ours, self.theirs = MemoryLink(), MemoryLink()
        self.ours.other, self.theirs.other = self.theirs, self.ours

    @invariant()
    def settle(self):
        """What an engine does after every step: give blocks back."""
        if not hasattr(self, "producer"):
            return
        for name in self.producer.released:
            self.kept.remove(name)  # exactly once
        self.producer.released.clear()
        for name in self.consumer.finished:
            whole = {(name, layer, p) for layer in range(self.LAYERS) for p in range(1, self.END)}
            assert set(self.reading.pop(name)) == whole, "finished, and not all of it is here"
        for name in self.consumer.failed:
            del self.reading[name]
        self.consumer.finished.clear(), self.consumer.failed.clear()
        assert set(self.reading) == {i.request_id for i in self.consumer.imports.values()}
        assert set(self.producer.exports) == self.kept

    def teardown(self):
        """On a good network, within the lease, everything ends; and then nobody holds anything."""
        if not hasattr(self, "producer"):
            return
        for name in list(self.computing()):
            for layer in range(self.LAYERS):
                self.ready[name][layer] = self.END
                self.producer.written(name, layer, self.END)
            if not self.producer.finish(name):
                self.kept.discard(name)
        for _ in range(45):
            self.pump()
            while self.ours.arrived or self.theirs.arrived:
                for queue in (self.ours.arrived, self.theirs.arrived):
                    if queue:
                        self.deliver(queue)
            self.settle()
            self.wait(1)
        self.settle()
        assert not self.reading and not self.kept and not self.producer.early


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.parametrize("examples", and_slowly([], [(250,)], [(1500,)]))
def test_transfers_for_longer(examples):
    run_state_machine_as_test(Transfers, settings=settings(max_examples=examples, stateful_step_count=60))


def test_a_preempted_prefill_offers_nothing_old():
    """Its new blocks hold nothing yet, whatever the old ones held."""
    producer, link, sent = Producer(2, lambda *where: where), MemoryLink(), []
    producer.export("x", [1])
    for layer in range(2):
        producer.written("x", layer, 5)
    producer.preempted("x")
    producer.export("x", [2])
    get = {"kind": "GET", "transfer": "x", "head": 0, "heads": 1, "end": 5, "have": [0, 0], "consumers": 1}
    producer.on_message(link, get)
    producer.pump(lambda link, header, payload: sent.append(payload))
    assert sent == []
    producer.written("x", 0, 5)
    producer.pump(lambda link, header, payload: sent.append(payload))
    assert sent == [([2], 0, 0, 5, 0, 1)]


class Offered:
    """A producer of one layer with a prompt `x`, its consumers' links, and what was sent, at a time of our own."""

    def __init__(self, positions, consumers=1, layers=1):
        self.now, self.sent = 0.0, []
        self.producer = Producer(layers, lambda *where: where, lease=30, clock=lambda: self.now)
        self.links = [MemoryLink() for _ in range(consumers)]
        for link in self.links:
            link.send = self.sent.append
        self.producer.export("x", [1])
        for layer in range(layers):
            self.producer.written("x", layer, positions)

    def say(self, kind, link=0, **fields):
        get = {"head": 0, "heads": 1, "end": 5000, "have": [0], "consumers": len(self.links)} if kind == "GET" else {}
        self.producer.on_message(self.links[link], {"kind": kind, "transfer": "x"} | get | fields)

    def pump(self):
        sent = []
        self.producer.pump(lambda link, header, payload: sent.append((header["first"], header["count"])))
        return sent


def test_long_prompts_travel_in_pieces_and_wait_for_room():
    offered = Offered(2500)
    offered.say("GET")
    offered.links[0].has_room = False
    assert offered.pump() == []
    offered.links[0].has_room = True
    assert offered.pump() == [(0, 1024), (1024, 1024), (2048, 452)] and offered.producer.stats["early"] == 3
    offered.producer.written("x", 0, 2600)
    assert offered.producer.finish("x") and offered.pump() == [(2500, 100)]
    assert offered.producer.stats["early"] == 3, "the last one was sent after the prefill"


def test_blocks_are_kept_until_the_last_reader_has_them():
    offered = Offered(5, consumers=2)
    offered.say("GET", 0), offered.say("GET", 1)
    assert offered.producer.finish("x")
    offered.say("DONE", 0), offered.say("DONE", 0)
    assert offered.producer.released == []
    offered.say("DONE", 1)
    assert offered.producer.released == ["x"] and not offered.producer.exports


def test_a_lease_begins_when_the_prompt_is_computed_and_again_with_every_question():
    offered = Offered(5)
    offered.now = 40
    offered.producer.expire()
    assert "x" in offered.producer.exports, "a prompt that is being computed has no lease"
    offered.producer.finish("x")
    for offered.now in (69, 98, 127):
        offered.producer.expire()
        assert not offered.producer.released
        offered.say("GET")
    offered.now = 157
    offered.producer.expire()
    assert offered.producer.released == ["x"] and offered.producer.stats["expired"] == 1


def test_whoever_asks_in_vain_is_told_why():
    offered = Offered(5)
    offered.say("GET", have=[0, 0])
    assert "1 layers" in offered.sent.pop()["why"] and offered.pump() == []
    offered.say("GET", transfer="y"), offered.say("CANCEL", transfer="z")
    offered.now = 29
    offered.producer.expire()
    assert offered.sent == []
    offered.now = 30
    offered.producer.expire()
    assert offered.sent.pop()["why"] == "no such request came here" and not offered.sent and not offered.producer.early
    offered.producer.forget("x", "the prefill was aborted")
    offered.producer.export("x", [2])
    assert not offered.producer.exports, "what is over does not begin again"
    offered.say("DONE"), offered.say("GET")
    assert offered.sent == [{"kind": "GONE", "transfer": "x", "why": "the prefill was aborted"}]


def test_a_prefill_that_ends_before_it_begins_is_told_to_who_asked_and_to_who_will():
    offered, gone = Offered(5), {"kind": "GONE", "transfer": "y", "why": "the prefill was aborted"}
    offered.say("GET", transfer="y"), offered.say("CANCEL", transfer="y")
    offered.producer.forget("y", gone["why"])
    assert offered.sent == [gone] and not offered.producer.early
    offered.say("GET", transfer="y")
    assert offered.sent == [gone, gone]


def test_whoever_asks_again_gets_it_once_and_nothing_after_the_end():
    offered = Offered(5)
    offered.say("GET"), offered.say("GET")
    assert offered.pump() == [(0, 5)]
    offered.say("GET", have=[3])
    assert offered.pump() == [(3, 2)]
    offered.say("DONE")
    offered.producer.written("x", 0, 9)
    assert offered.pump() == []


def test_nobody_can_say_that_nobody_reads():
    offered = Offered(5)
    offered.say("GET", consumers=0)
    assert offered.producer.finish("x"), "whoever has asked has not got it yet"


def test_letters_of_a_lost_connection_are_forgotten():
    offered = Offered(5)
    offered.say("GET", transfer="y")
    offered.producer.on_lost(offered.links[0])
    offered.producer.export("y", [2])
    offered.producer.written("y", 0, 5)
    assert offered.pump() == []


def test_only_the_last_thousand_transfers_are_remembered():
    producer = Producer(1, lambda *where: where)
    for i in range(1003):
        producer.export(str(i), [1])
        producer.forget(str(i), "aborted")
    assert len(producer.gone) == 1000 and "2" not in producer.gone and "1002" in producer.gone


class Asked:
    """A consumer of a prompt `x` of 5 positions, one layer from each link, and what it said, at a time of our own."""

    def __init__(self, producers=1):
        self.now, self.said = 0.0, []
        self.consumer = Consumer(1, lambda *_: True, timeout=10, retries=2, clock=lambda: self.now)
        self.links = [MemoryLink() for _ in range(producers)]
        for i, link in enumerate(self.links):
            link.send = lambda header, i=i: self.said.append((i, header["kind"]))
        self.start("x", "r", self.links)

    def start(self, transfer_id, request_id, links):
        sources = [(link, HeadSlice(i, i, 1), 1) for i, link in enumerate(links)]
        self.consumer.start(transfer_id, request_id, [1], 0, 5, sources)

    def hear(self, first, count, link=0, name="x"):
        kv = {"kind": "KV", "transfer": name, "layer": 0, "first": first, "count": count, "head": link, "heads": 1}
        self.consumer.on_message(self.links[link], kv, None)

    def at(self, now):
        """What is said when it looks at the clock."""
        self.now = now
        self.said.clear()
        self.consumer.check()
        return self.said


def test_who_hears_nothing_asks_again_twice_and_then_gives_up():
    asked = Asked()
    assert asked.said == [(0, "GET")] and asked.at(9.9) == [] and asked.at(10) == [(0, "GET")]
    assert asked.at(19.9) == [] and asked.at(20) == [(0, "GET")] and asked.at(29.9) == []
    assert asked.at(30) == [(0, "CANCEL")] and asked.consumer.failed == {"r": "no progress for 10 s"}
    asked.hear(0, 5)
    assert asked.consumer.stats == {"retries": 2, "failed": 1, "stale": 1}


def test_as_long_as_something_comes_nobody_is_late():
    asked = Asked(producers=2)
    asked.now = 9
    asked.hear(0, 3)
    assert asked.at(18) == []
    asked.hear(3, 2)
    assert asked.at(27) == [] and not asked.consumer.finished, "the other half is missing"
    assert asked.at(28) == [(1, "GET")], "whoever has sent everything is not asked again"
    asked.hear(0, 5, link=1)
    assert asked.consumer.finished == ["r"] and asked.said[1:] == [(0, "DONE"), (1, "DONE")]
    assert asked.consumer.stats["microseconds"] == 28_000_000


def test_an_end_is_the_end_of_one_transfer():
    asked = Asked(producers=2)
    asked.start("y", "s", asked.links[1:])
    asked.consumer.cancel("r")
    assert set(asked.consumer.imports) == {"y"} and asked.said[-2:] == [(0, "CANCEL"), (1, "CANCEL")]
    asked.consumer.on_lost(asked.links[0], "lost")
    assert set(asked.consumer.imports) == {"y"}
    asked.consumer.on_lost(asked.links[1], "lost")
    assert list(asked.consumer.failed) == ["s"]


@pytest.mark.parametrize("wrong", [{"layer": 1}, {"count": 6}, {"head": 1}, {"heads": 2}])
def test_a_rectangle_that_nobody_asked_for_is_not_written(wrong):
    written = []
    consumer = Consumer(1, lambda blocks, header, payload: written.append(header) or True)
    link = MemoryLink()
    consumer.start("x", "r", [1], 0, 5, [(link, HeadSlice(0, 0, 1), 1)])
    right = {"kind": "KV", "transfer": "x", "layer": 0, "first": 0, "count": 5, "head": 0, "heads": 1}
    consumer.on_message(link, right | wrong, None)
    assert not written and consumer.stats["corrupt"] == 1
    consumer.on_message(link, right, None)
    assert consumer.finished == ["r"]


@pytest.mark.parametrize("fault", [kind for kind in Faults.KINDS if kind != "decode-dies"])
def test_rehearsals(fault):
    found = rehearse(fault)
    assert found["left"] == (fault == "prefill-dies"), "what a dead process kept is nobody's problem"
    assert found["whole"] == (not found["why"]) == (fault not in ("stall", "prefill-dies"))
    assert found["retries"] == (fault in ("drop", "truncate", "stall"))
    assert (found["duplicate"] > 0) == (fault == "duplicate") and (found["corrupt"] > 0) == (fault == "truncate")


# --- Engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_disaggregated_equals_colocated(wire, tiny_model, expected):
    prompts = [PROMPT, PROMPT[:16], PROMPT[:17], PROMPT[:2], PROMPT[:1]]
    with pair(tiny_model, wire) as (prefill, decode):
        found = handed_over(prefill, decode, prompts, TOKENS)
        assert found == [expected, *(generated(tiny_model, prompt, TOKENS) for prompt in prompts[1:])]
        moved = sum(len(prompt) for prompt in prompts) * 2 * 2 * 2 * 16 * 4  # halves, layers, heads, D, fp32
        assert counts(decode)["bytes_in"] == counts(prefill)["bytes_out"] == moved
        ends = (*prefill.scheduler.connector.accepted, *decode.scheduler.connector.links.values())
        assert [link.timeout for link in ends] == [60.0, 60.0], "one connection for all of them"
    assert not list(links.SHM.glob(f"kvx-{os.getpid()}-*")), "no segment is left behind"


def test_chunked_and_preempted_prefill(tiny_model, expected):
    """Layers of every chunk travel as they come; a prefill that loses its blocks in between sends nothing wrong."""
    with pair(tiny_model, "TCPConnector", prefill={"max_num_batched_tokens": 16, "max_num_seqs": 4}) as (
        prefill,
        decode,
    ):
        submit(prefill, decode, "r0", PROMPT, TOKENS)
        prefill.step()
        request = prefill.scheduler.running[0]
        assert request.num_computed_tokens == 16
        prefill.scheduler.void.append(request)
        prefill.step()
        assert request.num_preemptions == 1
        pool = prefill.scheduler.kv_cache_manager.block_pool
        others = pool.allocate(1)  # it will get another block, with nothing in it
        decode.step()
        until(lambda: not prefill.scheduler.connector.inbox.empty())  # it asks before there is anything
        assert drain(prefill, decode)["r0"][0] == expected
        pool.free(others)


def test_a_layer_leaves_while_the_next_one_is_computed(tiny_model):
    """Even to somebody who asks in the middle of the step."""
    with pair(tiny_model, "TCPConnector") as (prefill, _):
        connector, link, left = prefill.scheduler.connector, MemoryLink(), []
        save, get = connector.save_kv_layer, {"head": 0, "heads": 2, "end": 44, "have": [0, 0], "consumers": 1}

        def asked_meanwhile(layer):
            if layer == 0:
                connector.inbox.put((link, {"kind": "GET", "transfer": "a", **get}, None))
            save(layer)
            left.append([header["layer"] for header, _ in link.arrived])

        connector.save_kv_layer = asked_meanwhile
        prefill.add_request(make_request("a", PROMPT, 1, do_remote_decode=True, transfer_id="a"))
        prefill.step()
        assert left == [[0], [0, 1]] and counts(prefill, "producer")["early"] == 2
        connector.inbox.put((link, {"kind": "DONE", "transfer": "a"}, None))
        drain(prefill)


def test_a_prompt_whose_first_token_ends_it_is_handed_over(tiny_model, expected):
    """To the prefill worker it is over; the decode worker has rules of its own."""
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        params = make_request("a", PROMPT, 1, do_remote_decode=True, transfer_id="a").sampling_params
        request = Request("a", PROMPT, dataclasses.replace(params, stop_token_ids=[expected[0]]))
        prefill.add_request(request)
        prefill.step()
        assert request.get_finished_reason() == "stop" and "a" in prefill.scheduler.held
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        decode.add_request(make_request("a", PROMPT, TOKENS, **remote))
        assert drain(prefill, decode)["a"][0] == expected


def test_nobody_does_what_is_not_its_role(tiny_model, expected):
    """A prefill worker fetches nothing, a decode worker keeps nothing for others: they are engines."""
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        for core, params in ((prefill, remote), (decode, {"do_remote_decode": True, "transfer_id": "b"})):
            core.add_request(make_request("a", PROMPT, TOKENS, **params))
            assert drain(core, seconds=10)["a"][0] == expected
            assert not core.scheduler.connector.links


@pytest.mark.parametrize("asked", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}], ids=str)
def test_who_may_not_read_the_cache_does_not_fetch(tiny_model, expected, asked):
    """Nor who wants the prompt scored: what is not computed has no logits. It is computed here, and the other side
    hears that nobody will come for its blocks."""
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        prefill.add_request(make_request("a", PROMPT, 1, do_remote_decode=True, transfer_id="a"))
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        request = make_request("a", PROMPT, TOKENS, **remote)
        request.sampling_params = dataclasses.replace(request.sampling_params, **asked)
        decode.add_request(request)
        assert drain(prefill, decode, seconds=10)["a"][0] == expected and counts(decode)["bytes_in"] == 0


def test_who_has_arrived_is_seated_in_order_within_seats_and_budget(tiny_model, expected):
    with pair(tiny_model, "TCPConnector", decode={"max_num_seqs": 2, "max_num_batched_tokens": 16}) as (
        prefill,
        decode,
    ):
        scheduler, steps = decode.scheduler, []
        schedule = scheduler.schedule
        scheduler.schedule = lambda: steps.append(schedule()) or steps[-1]
        for name in ("b", "c", "a"):
            submit(prefill, decode, name, PROMPT, TOKENS)
        prefill.step(), decode.step()
        until(lambda: len(scheduler.connector.consumer.finished) == 3, prefill.step, scheduler.connector.poll)
        own = make_request("own", PROMPT, TOKENS)
        decode.add_request(own)
        decode.step(), decode.step()
        assert [step.num_scheduled_tokens for step in steps[-2:]] == [{"own": 16}] * 2, "the budget is used up"
        scheduler.void.append(own)
        decode.step()
        assert steps[-1].preempted_reqs == [own] and not steps[-1].num_scheduled_tokens
        decode.step()
        assert steps[-1].num_scheduled_tokens == {"b": 1, "c": 1} and len(scheduler.received) == 1
        found = drain(prefill, decode)
        rest = expected[1:]
        assert [found[name][0] for name in ("b", "c", "a", "own")] == [rest, rest, expected, expected]


@pytest.mark.parametrize(
    ("free", "others", "caching", "seats", "fetched"),
    [(12, 0, False, 1, "ab"), (11, 0, False, 1, "a"), (8, 1, False, 2, "a"), (8, 1, False, 1, ""), (7, 1, False, 2, ""),
     (4, 1, True, 2, "ab"), (3, 1, True, 2, "a"), (2, 1, True, 2, "")],
)  # fmt: skip
def test_a_fetch_takes_blocks_as_admission_does(free, others, caching, seats, fetched, tiny_model):
    """Whole prompts of 6 blocks, or the one that is not in the cache; in order of the queue; two blocks stay free if
    anybody runs. Without a free seat nobody is sent for."""
    size = {"num_blocks": 1 + free + 6 * others, "max_num_seqs": 2, "max_model_len": 56, "prefix_caching": caching}
    with pair(tiny_model, "TCPConnector", decode=size) as (prefill, decode):
        decode.scheduler.watermark_blocks = 2
        for _ in range(others):
            decode.add_request(make_request("own", PROMPT, TOKENS))
            decode.step()
        decode.scheduler.max_num_running_reqs = seats
        for name, prompt in zip("abc", (PROMPT, PROMPT, PROMPT[:2])):
            remote = {"do_remote_prefill": True, "transfer_id": name, **prefill.scheduler.connector.address}
            decode.add_request(make_request(name, prompt, TOKENS, **remote))
        decode.step()
        assert "".join(decode.scheduler.waiting_for_remote_kvs) == fetched
        decode.abort_requests(["own", *"abc"])
        until(lambda: not decode.scheduler.has_unfinished_requests(), decode.step)


def test_only_what_the_decode_worker_lacks_travels(tiny_model, expected):
    with pair(tiny_model, "TCPConnector", prefix_caching=True) as (prefill, decode):
        submit(prefill, decode, "a", PROMPT, TOKENS)
        assert drain(prefill, decode)["a"][0] == expected
        first = counts(decode)["bytes_in"]
        submit(prefill, decode, "b", PROMPT, TOKENS)
        assert drain(prefill, decode)["b"][0] == expected
        assert counts(decode)["bytes_in"] - first == first * 5 // 45, "40 of 45 positions were here"


def test_nobody_hits_blocks_that_have_not_arrived(tiny_model, expected):
    """The decode worker's own prefix cache learns of loaded blocks when they have arrived, not before."""
    with pair(tiny_model, "TCPConnector", prefix_caching=True) as (prefill, decode):
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        decode.add_request(make_request("a", PROMPT, TOKENS, **remote))
        decode.step()
        assert "a" in decode.scheduler.waiting_for_remote_kvs
        decode.add_request(make_request("b", PROMPT, TOKENS))
        tokens = []
        while len(tokens) < TOKENS:
            tokens += [token for output in decode.step() for token in output.new_token_ids]
        assert tokens == expected, "b computed its prompt itself"
        prefill.add_request(make_request("a", PROMPT, 1, do_remote_decode=True, transfer_id="a"))
        assert drain(prefill, decode)["a"][0] == expected
        assert decode.scheduler.kv_cache_manager.get_computed_blocks(make_request("c", PROMPT, 1))[1] == 40


def test_others_go_on_while_a_request_waits_for_its_blocks(tiny_model, expected):
    with pair(tiny_model, "TCPConnector", decode={"max_num_seqs": 1}) as (prefill, decode):
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        decode.add_request(make_request("a", PROMPT, TOKENS, **remote))
        decode.add_request(make_request("b", PROMPT, TOKENS))
        tokens = []
        while len(tokens) < TOKENS:
            tokens += [t for output in decode.step() for t in output.new_token_ids if output.request_id == "b"]
        assert tokens == expected and "a" in decode.scheduler.waiting_for_remote_kvs
        prefill.add_request(make_request("a", PROMPT, 1, do_remote_decode=True, transfer_id="a"))
        assert drain(prefill, decode)["a"][0] == expected


def told(core, letters):
    return EngineCoreProc(SimpleNamespace(core=core, lora=None), letters.append)


def test_who_is_sent_for_waits_and_what_was_fetched_was_not_found_here(tiny_model, expected):
    """For the metrics: a request without a seat is one that waits, and 44 of 45 tokens came from elsewhere."""
    letters, waits = [], []
    with pair(tiny_model, "TCPConnector", prefix_caching=True) as (prefill, decode):
        proc = told(decode, letters)

        def state():
            stats = proc.stats()
            return stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs

        for name in "ab":
            submit(prefill, decode, name, PROMPT, 2)
            waits.append(state())
            proc.step()
            waits.append(state())
            until(lambda: not decode.scheduler.has_unfinished_requests(), prefill.step, proc.step)
            waits.append(state())
    assert waits == 2 * [(0, 1, 0), (0, 0, 1), (0, 0, 0)]
    admitted = {name: admission[1:] for letter in letters for name, admission in letter.admitted.items()}
    assert admitted == {"a": (44, 44), "b": (44, 4)}, "b found 40 here"
    assert [token for letter in letters for o in letter.outputs for token in o.new_token_ids] == 2 * expected[:2]


def test_a_prompt_that_waits_to_be_fetched_keeps_its_blocks_and_no_row(tiny_model, expected):
    """Computed, and nobody has come for it: the next prompt needs the only row of the batch."""
    with pair(tiny_model, "TCPConnector", prefill={"max_num_seqs": 1}) as (prefill, decode):
        for name in "abc":
            prefill.add_request(make_request(name, PROMPT, 1, do_remote_decode=True, transfer_id=name))
            assert [output.finish_reason for output in prefill.step()] == ["length"]
        assert prefill.scheduler.held.keys() == set("abc")
        for name in "abc":
            remote = {"do_remote_prefill": True, "transfer_id": name, **prefill.scheduler.connector.address}
            decode.add_request(make_request(name, PROMPT, TOKENS, **remote))
        assert [tokens for tokens, _, _ in drain(prefill, decode).values()] == [expected] * 3


def test_a_full_pool_delays_and_loses_nobody(tiny_model, expected):
    """Room for one and a half sequences: requests that have arrived are seated before anybody else is admitted."""
    prompts = [PROMPT, PROMPT[1:], PROMPT[2:], PROMPT[:30]]
    with pair(tiny_model, "TCPConnector", decode={"num_blocks": 12, "max_model_len": 64}) as (prefill, decode):
        for i, prompt in enumerate(prompts):
            submit(prefill, decode, f"r{i}", prompt, TOKENS)
            decode.add_request(make_request(f"own{i}", prompt, TOKENS))
        found = drain(prefill, decode)
        for i, prompt in enumerate(prompts):
            assert found[f"r{i}"][0] == found[f"own{i}"][0] == generated(tiny_model, prompt, TOKENS)


# --- Faults ----------------------------------------------------------------------------------------------------------


class Clock:
    """A machine's time that passes only when a test says so."""

    def __init__(self, *cores):
        self.now = 0.0
        for core in cores:
            core.scheduler.connector.producer.clock = core.scheduler.connector.consumer.clock = lambda: self.now

    def tick(self):
        self.now += 1


@pytest.mark.parametrize("fault", ["duplicate", "truncate", "drop", "reorder", "stall"])
@pytest.mark.parametrize("wire", ["SharedMemoryConnector", "TCPConnector"])
def test_faults_on_the_wire(fault, wire, tiny_model, expected):
    """Whatever the wire does: the tokens of one engine. It asks again as long as that may help."""
    extra = {"timeout": 50.0, "retries": 0 if fault == "stall" else 10_000, "kv_lease_duration": 1e6}
    with pair(tiny_model, wire, "recompute", extra=extra) as (prefill, decode):
        clock, connector = Clock(prefill, decode), prefill.scheduler.connector
        connector.wire = Faults(fault, after=2)
        assert handed_over(prefill, decode, [PROMPT, PROMPT[:20]], TOKENS, each=clock.tick)[0] == expected
        stats = counts(decode, "consumer")
        assert bool(stats["failed"]) == (fault == "stall")
        assert bool(stats["retries"]) or fault not in ("truncate", "drop")
        assert bool(stats["corrupt"]) == (fault == "truncate" or (fault == "duplicate" and stats["corrupt"] > 0))


def test_changed_bytes_are_not_believed(tiny_model, expected):
    """Right in size and shape, and one bit is another: the checksum knows."""
    extra = {"timeout": 50.0, "retries": 10_000, "kv_lease_duration": 1e6}
    with pair(tiny_model, "TCPConnector", extra=extra) as (prefill, decode):
        clock, sent = Clock(prefill, decode), []

        def flip(link, header, payload):
            sent.append(header)
            if len(sent) == 1:
                payload = payload.clone()
                payload[100] ^= 64
            return [(header, payload)]

        prefill.scheduler.connector.wire = flip
        assert handed_over(prefill, decode, [PROMPT], TOKENS, each=clock.tick) == [expected]
        assert counts(decode, "consumer")["corrupt"] == 1 and counts(decode, "consumer")["retries"] >= 1


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefill_worker_that_vanishes(policy, tiny_model, expected):
    with pair(tiny_model, "TCPConnector", policy) as (prefill, decode):
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        request = make_request("a", PROMPT, TOKENS, **remote)
        decode.add_request(request)
        decode.add_request(make_request("other", PROMPT, TOKENS))
        first = [token for output in decode.step() for token in output.new_token_ids]
        prefill.scheduler.connector.close()
        found = drain(decode)
        assert first + found["other"][0] == expected
        if policy == "recompute":
            assert found["a"][0] == expected
        else:
            assert found["a"][:2] == ([], "error") and "KV load failed: the connection" in found["a"][2]
            assert request.is_finished()


def test_whose_blocks_do_not_come_is_the_next_to_be_admitted(tiny_model, expected):
    size = {"max_num_seqs": 1, "prefix_caching": True}
    with pair(tiny_model, "TCPConnector", "recompute", decode=size) as (prefill, decode):
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        decode.add_request(make_request("a", PROMPT, TOKENS, **remote))
        for name, max_tokens in (("own", 400), ("later", TOKENS)):
            decode.add_request(make_request(name, PROMPT, max_tokens))
        decode.step()
        prefill.scheduler.connector.close()
        until(lambda: decode.scheduler.received, decode.step)
        waiting = [*decode.scheduler.waiting_for_remote_kvs.values(), *decode.scheduler.waiting]
        assert [(request.request_id, request.num_computed_tokens) for request in waiting] == [("a", 0), ("later", 0)]
        assert "a" in decode.scheduler.kv_cache_manager.req_to_blocks, "its blocks are its own until its turn comes"
        assert [request.request_id for request in decode.scheduler.running] == ["own"]
        found = drain(decode)
        assert found["a"][0] == found["later"][0] == expected and [*found] == ["own", "a", "later"]


def test_nobody_listens_there(tiny_model):
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        connector = prefill.scheduler.connector
        connector.close()
        assert connector.server.fileno() == -1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((connector.host, connector.port), timeout=20)
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        decode.add_request(make_request("a", PROMPT, TOKENS, **remote))
        assert drain(decode)["a"][1] == "error"


def test_a_decode_worker_that_vanishes_gives_the_blocks_back(tiny_model):
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        prefill.scheduler.connector.wire = Faults("stall", after=0)
        submit(prefill, decode, "a", PROMPT, TOKENS)
        decode.step()
        while not prefill.scheduler.connector.producer.early:
            prefill.scheduler.connector.poll()
        prefill.step()
        assert "a" in prefill.scheduler.held and prefill.scheduler.kv_cache_manager.req_to_blocks["a"]
        decode.abort_requests(["a"])
        decode.step()
        decode.scheduler.connector.close()
        drain(prefill)


def test_a_connection_that_breaks_ends_what_was_on_it_and_nothing_else(tiny_model, expected):
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        ours, theirs = prefill.scheduler.connector, decode.scheduler.connector
        ours.wire = Faults("stall", after=0)
        submit(prefill, decode, "a", PROMPT, TOKENS)
        decode.step()
        until(lambda: ours.producer.early, ours.poll)
        prefill.step()
        (link,) = theirs.links.values()
        link.close()
        found = drain(prefill, decode, seconds=10)  # long before the lease is up
        assert found["a"][1] == "error" and not ours.accepted and not theirs.links
        ours.wire = None
        submit(prefill, decode, "b", PROMPT, TOKENS)
        assert drain(prefill, decode)["b"][0] == expected


def test_whoever_comes_in_the_moment_of_closing_is_sent_away(tiny_model):
    with pair(tiny_model, "TCPConnector") as (prefill, _):
        connector = prefill.scheduler.connector
        connector.closed = True
        key = links.handshake.secret()
        with links.handshake.dial((connector.host, connector.port), key, 20) as late:
            late.settimeout(20)
            while late.recv(1 << 16):
                pass


def test_strangers_at_a_prefill_workers_port_are_in_nobodys_way(tiny_model, expected):
    """Whatever they say, and if they say nothing; a frame of theirs is none."""
    with pair(tiny_model, "TCPConnector") as (prefill, decode), contextlib.ExitStack() as strangers:
        connector, before = prefill.scheduler.connector, threading.active_count()
        get = {"kind": "GET", "transfer": "a", "head": 0, "heads": 1, "end": 5, "have": [0], "consumers": 1}
        said = [b"", b"v", b"GET / HTTP/1.1\r\n\r\n", b"[" * 4000, pack_frame(get), b"\xff" * 5000]
        said += [PREFIX.pack(MAGIC, 1 << 20, 1 << 32), links.handshake.MAGIC + bytes(64)]
        for i in range(100):
            sock = strangers.enter_context(socket.create_connection((connector.host, connector.port), timeout=20))
            with contextlib.suppress(ConnectionError):
                sock.sendall(said[i % len(said)])
        submit(prefill, decode, "a", PROMPT, TOKENS)
        assert drain(prefill, decode)["a"][0] == expected
        assert len(connector.accepted) == 1 and not connector.producer.early
        assert threading.active_count() <= before + links.handshake.STRANGERS + 8


def test_who_has_nothing_to_compute_waits_for_news_and_not_for_long(tiny_model):
    with pair(tiny_model, "TCPConnector") as (_, decode):
        connector, idle = decode.scheduler.connector, []
        connector.idle = idle.append
        decode.step()
        decode.add_request(make_request("a", PROMPT, 1))
        decode.step()
        assert idle == [0.005]
        del connector.idle
        connector.wake.set()
        start = time.monotonic()
        connector.idle(20)
        assert not connector.wake.is_set() and time.monotonic() - start < 10
        start = time.monotonic()
        connector.idle(0.02)
        assert time.monotonic() - start > 0.01


def test_nobody_comes_for_it(tiny_model):
    with pair(tiny_model, "TCPConnector", extra={"kv_lease_duration": 30}) as (prefill, decode):
        clock = Clock(prefill, decode)
        prefill.add_request(make_request("a", PROMPT, 1, do_remote_decode=True, transfer_id="a"))
        prefill.step()
        clock.now = 29.9
        prefill.step()
        assert prefill.scheduler.has_unfinished_requests() and prefill.scheduler.kv_cache_manager.req_to_blocks
        with pytest.raises(common.InputError, match="in use"):
            prefill.add_request(make_request("a", PROMPT, 1))
        with pytest.raises(common.InputError, match="transfer_id 'a' is in use"):
            prefill.add_request(make_request("b", PROMPT, 1, do_remote_decode=True, transfer_id="a"))
        clock.now = 30.1
        drain(prefill)
        # Whoever comes later hears at once why there is nothing.
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        decode.add_request(make_request("a", PROMPT, TOKENS, **remote))
        assert "lease" in drain(prefill, decode)["a"][2]


@pytest.mark.parametrize("when", ["queued", "waiting for blocks", "arrived", "running"])
def test_a_client_that_leaves(when, tiny_model):
    """Whenever it does: blocks are free on both sides, long before any lease is up."""
    with pair(tiny_model, "TCPConnector", decode={"max_num_seqs": 1}) as (prefill, decode):
        scheduler = decode.scheduler
        if when in ("arrived", "queued"):  # somebody else has the only seat
            decode.add_request(make_request("other", PROMPT, 30))
            decode.step()
        if when == "queued":
            scheduler.connector.fetches_later = False
        submit(prefill, decode, "a", PROMPT, TOKENS)
        decode.step()
        scheduler.connector.fetches_later = True
        done = {
            "queued": lambda: True,
            "waiting for blocks": lambda: "a" in scheduler.waiting_for_remote_kvs,
            "arrived": lambda: bool(scheduler.received),
            "running": lambda: bool(scheduler.running),
        }[when]
        deadline = time.monotonic() + 60
        while not done() and time.monotonic() < deadline:
            prefill.step(), decode.step()
        assert done()
        if when == "running":
            assert scheduler.running[0].num_cached_tokens == len(PROMPT) - 1, (
                "all of it came; the last one was computed again"
            )
        decode.abort_requests(["a", "other"])
        blocks = scheduler.kv_cache_manager.req_to_blocks
        assert list(blocks) == (["a"] if when == "waiting for blocks" else []), "the wire may be writing into them"
        if blocks:
            with pytest.raises(common.InputError, match="in use"):
                decode.add_request(make_request("a", PROMPT, TOKENS))
            assert scheduler.has_unfinished_requests(), "to give them back, there must be another step"
            decode.step()
        assert not blocks and not scheduler.held
        drain(prefill, decode, seconds=10)


@pytest.mark.parametrize("end", ["finished_recving", "failed_recving"])
def test_blocks_of_an_abandoned_load_are_free_when_it_is_over(end, tiny_model):
    """However it ends. A wire that writes by itself cannot always be stopped."""
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        scheduler, connector = decode.scheduler, decode.scheduler.connector
        submit(prefill, decode, "a", PROMPT, TOKENS)
        decode.step()
        connector.consumer.cancel = lambda request_id: None
        decode.abort_requests(["a"])
        scheduler.update_from_output(scheduler.schedule(), {})
        assert "a" in scheduler.held and scheduler.kv_cache_manager.req_to_blocks["a"]
        del connector.consumer.cancel
        connector.consumer.cancel("a")
        connector.consumer.cancelled.clear()
        news = {"finished_recving": {"a"}, "failed_recving": {"a": "lost"}}
        connector.get_finished = lambda: KVConnectorOutput(**{end: news[end]})
        assert scheduler.update_from_output(scheduler.schedule(), {}) == [], "and nobody is told: nobody is there"
        del connector.get_finished
        assert not scheduler.held and not scheduler.kv_cache_manager.req_to_blocks
        drain(prefill, decode, seconds=10)


def test_an_id_that_comes_again_waits_for_its_own_prompt(tiny_model, expected):
    """Its first bearer left before it was admitted. That its prompt is not wanted any more is no news of the second."""
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        scheduler = decode.scheduler
        for transfer in ("first", "second"):
            remote = {"do_remote_prefill": True, "transfer_id": transfer, **prefill.scheduler.connector.address}
            decode.add_request(make_request("a", PROMPT, TOKENS, **remote))
            if transfer == "first":
                decode.abort_requests(["a"])
        for _ in range(5):
            assert decode.step() == [] and not scheduler.received and not scheduler.running
        prefill.add_request(make_request("a", PROMPT, 1, do_remote_decode=True, transfer_id="second"))
        assert drain(prefill, decode, seconds=20)["a"][0] == expected


def test_a_prompt_that_nobody_wants_any_more_leaves_no_name(tiny_model):
    """The decode side leaves while the prompt is computed: there is nothing to keep, and nothing to remember."""
    with pair(tiny_model, "TCPConnector", prefill={"max_num_batched_tokens": 16, "max_num_seqs": 4}) as (
        prefill,
        decode,
    ):
        connector = prefill.scheduler.connector
        submit(prefill, decode, "a", PROMPT, TOKENS)
        decode.step()
        while not connector.producer.early:
            connector.poll()
        prefill.step()
        decode.abort_requests(["a"])
        deadline = time.monotonic() + 10
        while not connector.producer.exports["a"].done and time.monotonic() < deadline:
            decode.step(), connector.poll()
        assert connector.producer.exports["a"].done and connector.names
        drain(prefill, decode, seconds=10)
        assert not connector.names


def test_who_wants_log_probabilities_is_computed_here_instead(tiny_model):
    """Even where the policy is to fail: a front end looks for those of every output, and an error has none."""
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        request = make_request("a", PROMPT, TOKENS, **remote)
        request.sampling_params = dataclasses.replace(request.sampling_params, logprobs=1)
        decode.add_request(request)
        decode.step()
        prefill.scheduler.connector.close()  # nobody will ever send it
        tokens, reason, _ = drain(decode)["a"]
        assert len(tokens) == TOKENS and reason == "length"


def test_an_aborted_prefill_is_reported(tiny_model):
    with pair(tiny_model, "TCPConnector", prefill={"max_num_batched_tokens": 16, "max_num_seqs": 4}) as (
        prefill,
        decode,
    ):
        submit(prefill, decode, "a", PROMPT, TOKENS)
        decode.step()
        prefill.step()
        prefill.abort_requests(["a"])
        assert "the prefill was aborted" in drain(prefill, decode)["a"][2]


def test_who_asks_for_what_never_comes_is_told_after_a_lease(tiny_model):
    """The prefill engine has nothing to do all the while, and none of its steps is in vain."""
    with pair(tiny_model, "TCPConnector", extra={"kv_lease_duration": 30}) as (prefill, decode):
        clock = Clock(prefill, decode)
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        decode.add_request(make_request("a", PROMPT, TOKENS, **remote))
        connector = prefill.scheduler.connector
        until(lambda: connector.producer.early, lambda: decode.step(), lambda: prefill.step())
        assert not prefill.scheduler.has_unfinished_requests()
        clock.now = 29.9
        assert not prefill.scheduler.has_unfinished_requests()
        clock.now = 30.0
        assert "no such request came here" in drain(prefill, decode)["a"][2]


def test_an_engine_without_work_reads_its_mail(tiny_model):
    """In the server's own loop: it asks its connector again every now and then, and tells its client nothing."""
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        prefill.scheduler.connector.producer.forget("a", "the prefill was aborted")
        remote = {"do_remote_prefill": True, "transfer_id": "a", **prefill.scheduler.connector.address}
        decode.add_request(make_request("a", PROMPT, TOKENS, **remote))
        found, waited, sent, deadline = [], [], [], time.monotonic() + 20

        def receive(seconds):
            waited.append(seconds)
            found.extend(decode.step() if len(waited) > 3 else ())
            if found or time.monotonic() > deadline:
                raise ClientGone
            time.sleep(seconds)
            return []

        proc = EngineCoreProc(SimpleNamespace(core=prefill, lora=None), sent.append)
        with pytest.raises(ClientGone):
            proc.run_busy_loop(receive)
        assert "the prefill was aborted" in found[0].stop_reason
        assert set(waited) == {0, 0.1}
        assert all(letter.scheduler_stats.step_seconds and not letter.outputs for letter in sent), "a letter per step"


@pytest.mark.parametrize("tuned", [False, True])
def test_another_model_is_refused(tiny_model, tuned):
    """Also one that has all but a matrix in common with ours."""
    other = llama.random_model(seed=1)
    if tuned:
        other = changed(tiny_model, "layers.0.qkv_proj", lambda W: W + 0.01)
    with pair(tiny_model, "TCPConnector", decode_model=other) as (prefill, decode):
        for name in "ab":  # by the second one, HELLO has been said
            submit(prefill, decode, name, PROMPT, TOKENS)
            tokens, _, why = drain(prefill, decode, seconds=20)[name]
            assert tokens == [] and "another kind" in why and not counts(decode)["bytes_in"]
        connector = decode.scheduler.connector
        prefill.scheduler.connector.close()
        until(lambda: not connector.links, connector.poll)
        assert not connector.refused, "whoever listens there tomorrow is heard"


@pytest.mark.parametrize("wire", WIRES)
def test_hello_is_said_before_an_answer(wire, tiny_model, expected):
    """Here the engine answers before the thread that accepted the connection has got any further."""

    def late(link_class):
        def make(inbox, wake, sock=None, **options):
            link = link_class(inbox, wake, sock, **options)
            if sock is not None:
                assert answered.wait(20)
            return link

        return make

    answered = threading.Event()
    with pair(tiny_model, wire) as (prefill, decode):
        connector = prefill.scheduler.connector
        put, connector.link_class = connector.put_on_wire, late(type(connector).link_class)
        connector.put_on_wire = lambda *message: (put(*message), answered.set())
        assert handed_over(prefill, decode, [PROMPT], TOKENS) == [expected]
        assert answered.is_set()


def test_nothing_is_taken_before_hello():
    """Whose cache may be like ours, or not."""
    with connection() as (link, theirs):
        theirs.sendall(pack_frame(GOOD, 4) + bytes(4))
        _, header, payload = link.inbox.get(timeout=20)
        assert header["kind"] == "LOST" and "before HELLO" in header["why"] and payload is None


def test_what_has_left_makes_room():
    with connection() as (link, theirs):
        payload = torch.zeros(1 << 23, dtype=torch.uint8)  # more than the sockets hold
        link.ROOM = payload.nbytes
        link.send(DONE)
        assert link.has_room
        link.send(DONE, payload)
        assert not link.has_room
        assert link.wake.wait(20)  # the first one has left, and says so
        link.wake.clear()
        left = 2 * len(pack_frame(DONE)) + payload.nbytes
        while left:
            left -= len(theirs.recv(min(left, 1 << 20)))
        assert link.wake.wait(20) and link.has_room


def test_no_segment_outlives_a_lost_connection():
    """The reader gives the connection up; the writer has one more message."""
    with connection(links.SharedMemoryLink) as (link, _):
        link.close()
        with pytest.raises(OSError):
            link.transmit({"kind": "KV"}, torch.ones(1000, dtype=torch.uint8))
    assert not list(links.SHM.glob(f"kvx-{os.getpid()}-*"))


def test_callers_are_let_in_again_when_there_are_descriptors_again(tiny_model):
    """Whoever accepts must not give up for good while the process may open no file. (Linux reserves the descriptor of
    a call before it waits for one: it is the second that finds none.)"""
    connector = TCPConnector(KVTransferConfig("TCPConnector", "kv_producer", kv_port=0))
    connector.register_kv_caches([torch.zeros(2, 5, 8, 2, 16)] * 2, tiny_model)
    try:
        with socket.socket() as first, socket.socket() as second:
            with limited("RLIMIT_NOFILE", first.fileno()):
                first.connect(("127.0.0.1", connector.port))
                time.sleep(0.2)
            second.connect(("127.0.0.1", connector.port))
            for caller in (first, second):
                caller.settimeout(5)
                assert caller.recv(4) == links.handshake.MAGIC[:4], "a greeting"
    finally:
        connector.close()


def bare_config(**shape):
    """Of a Llama of which nothing but its keys and values matters."""
    return LlamaConfig(**{
        "vocab_size": 5, "hidden_size": 9, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 8,
    } | shape)  # fmt: skip


def bare_model(config, group, weight=1.0):
    """What a connector must know of a model that has nothing but its shape, and a weight on every rank."""
    return SimpleNamespace(config=config, group=group, norms=[], linear={}, moe={}, mla={}, sinks=[],
                           embed_tokens=torch.full((5, 9), weight))  # fmt: skip


@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(3, 1), (1, 3), (3, 3), (6, 1)])
def test_tensor_parallel_degrees_may_differ(producer_tp, consumer_tp, device):
    """Ranks of a cache with 3 KV heads and blocks of 16, to ranks with blocks of 8: every head in its place."""
    Hkv, D, layers, n = 3, 8, 2, 21
    config = bare_config(num_key_value_heads=Hkv, num_hidden_layers=layers, head_dim=D)
    whole = torch.randn(layers, 2, 5, 16, Hkv, D, device=device)
    theirs, ours = [3, 1, 2], [2, 4, 1]

    def rank_of(role, rank, tp, size, port):
        made = TCPConnector(KVTransferConfig("TCPConnector", role, kv_port=port))
        head, heads = owned_heads(Hkv, tp, rank)
        caches = [whole[i, :, :, :, head : head + heads].contiguous() for i in range(layers)]
        if role == "kv_consumer":
            caches = [torch.zeros(2, 5, size, heads, D, device=device) for _ in range(layers)]
        group = SimpleNamespace(rank_in_group=rank, world_size=tp, all_reduce=lambda x: x)
        made.register_kv_caches(caches, bare_model(config, group))
        return made

    producers = [rank_of("kv_producer", rank, producer_tp, 16, 0) for rank in range(producer_tp)]
    consumers = [rank_of("kv_consumer", rank, consumer_tp, 8, 0) for rank in range(consumer_tp)]
    addresses = [(p.host, p.port) for p in producers]
    for rank, consumer in enumerate(consumers):
        links, sources = {}, []
        for piece in tp_sources(Hkv, producer_tp, consumer_tp, rank):
            links[piece.rank] = consumer.connect(addresses[piece.rank])
            readers = num_consumers(Hkv, producer_tp, consumer_tp, piece.rank)
            sources.append((links[piece.rank], piece, readers))
        consumer.consumer.start("x", "r", ours, 0, n, sources)
    for p in producers:
        p.producer.export("x", theirs)
        for layer in range(layers):
            p.producer.written("x", layer, n)
        p.names["x"] = "r"
        p.producer.finish("x")
    arrived, deadline = [set() for _ in consumers], time.monotonic() + 60
    read = [r for r in range(producer_tp) if num_consumers(Hkv, producer_tp, consumer_tp, r)]
    released = set()
    while (not all(arrived) or len(released) < len(read)) and time.monotonic() < deadline:
        for rank, p in enumerate(producers):
            if p.get_finished().finished_sending:
                released.add(rank)
        for i, c in enumerate(consumers):
            arrived[i] |= c.get_finished().finished_recving
    assert all(arrived) and released == set(read)
    for rank, c in enumerate(consumers):
        head, heads = owned_heads(Hkv, consumer_tp, rank)
        for layer in range(layers):
            wanted = lesson.gather_reference(whole[layer], theirs, 0, n, head, heads)
            assert torch.equal(lesson.gather_reference(c.layers[layer], ours, 0, n, 0, heads), wanted)
    for c in (*producers, *consumers):
        c.close()


@pytest.mark.parametrize("consumer_tp", [1, 3])
def test_ranks_that_nobody_reads_from_are_told_once(consumer_tp):
    """Six ranks hold three KV heads: the copies of those that nobody asks must not wait for their lease."""
    config = bare_config(num_key_value_heads=3, num_hidden_layers=1, head_dim=8)
    told = []
    for rank in range(consumer_tp):
        made = TCPConnector(KVTransferConfig("TCPConnector", "kv_consumer"))
        group = SimpleNamespace(rank_in_group=rank, world_size=consumer_tp, all_reduce=lambda x: x)
        cache = torch.zeros(2, 5, 8, 3 // consumer_tp, 8)
        made.register_kv_caches([cache], bare_model(config, group))
        made.connect = lambda address: SimpleNamespace(send=lambda header: told.append((address[1], header["kind"])))
        where = {"transfer_id": "x", "remote_host": "h", "remote_port": 100, "tp_size": 6}
        request = make_request("r", PROMPT, 1, do_remote_prefill=True, **where)
        made.bind_connector_metadata(KVConnectorMetadata([(request, [1, 2, 3], 0, 5)]))
        made.start_load_kv()
    unread = [r for r in range(6) if not num_consumers(3, 6, consumer_tp, r)]
    assert sorted(told) == [(100 + r, "DONE" if r in unread else "GET") for r in range(6)] and len(unread) == 3


def connector_of(kind="TCPConnector", rank=0, tp_size=1, block_size=16, dtype=torch.float32, weight=1.0, **model):
    """A connector of a rank that has some memory, of a model that has nothing but its shape."""
    extra = {"folder": model.pop("folder", "store")} if kind == "StoreConnector" else {}
    made = connectors.CONNECTORS[kind](KVTransferConfig(kind, "kv_consumer", kv_connector_extra_config=extra))
    config = bare_config(**{"num_key_value_heads": 4, "num_hidden_layers": 2, "head_dim": 8, "hidden_size": 32} | model)
    group = SimpleNamespace(rank_in_group=rank, world_size=tp_size, all_reduce=lambda x: x)
    heads = owned_heads(config.num_key_value_heads, tp_size, rank)[1]
    memory = torch.zeros(2, 3, block_size, heads, config.head_dim, dtype=dtype)
    made.register_kv_caches([memory] * config.num_hidden_layers, bare_model(config, group, weight))
    return made


OTHERS = [{"dtype": torch.bfloat16}, {"weight": 2.0}, {"num_key_value_heads": 2}, {"num_hidden_layers": 3},
          {"head_dim": 16}, {"hidden_size": 64}, {"vocab_size": 6}]  # fmt: skip


def test_two_caches_must_agree_about_this_and_about_nothing_else():
    ours = connector_of().layout()
    shape, _, digest = ours.rpartition("/")
    assert shape == "2/4/8/torch.float32/32/5" and len(digest) == 16
    assert ours == connector_of(block_size=8).layout() == connector_of(rank=1, tp_size=2).layout()
    assert ours not in [connector_of(**other).layout() for other in OTHERS]


def changed(model, name, change):
    """A copy of `model` in which one layer has another matrix."""
    other, layer = copy.copy(model), model.linear[name]
    other.linear = model.linear | {name: llama.Linear(change(layer.weight.clone()), layer.bias)}
    return other


class Opaque(torch.Tensor):
    """Codes that look like a tensor, as torchao's do: they may be decoded, and not be cut in all ways."""

    def __getitem__(self, index):
        raise NotImplementedError

    def dequantize(self):
        return self.as_subclass(torch.Tensor).round(decimals=2)


def test_weights_that_make_keys_and_values_have_a_digest(tiny_model):
    """Whichever is changed, and however the linear layers are packed; the output matrix makes none."""
    digest = weights_digest
    ours = digest(tiny_model)
    packed = pack_weights(tiny_model)
    assert ours == digest(packed) == digest(llama.random_model(seed=SEED))
    assert ours == digest(changed(tiny_model, "lm_head", lambda W: W + 1))
    others = [
        changed(tiny_model, name, lambda W: W + 0.01 * W.flip(0)) for name in tiny_model.linear if name != "lm_head"
    ]
    for seed in (0, 1):  # a merged adapter
        lora = lora_model.random_adapter(tiny_model.config, 4, seed, "a", size=0.01)
        others.append(lora_model.merged(tiny_model, lora))
    others.append(copy.copy(tiny_model))
    others[-1].embed_tokens = tiny_model.embed_tokens * 1.01
    for norms in ("input_norm", "post_attention_norm"):
        other = copy.copy(tiny_model)
        setattr(other, norms, [norm + 0.01 for norm in getattr(tiny_model, norms)])
        others.append(other)
    for change in (
        {"rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rms_norm_eps": 1e-6},
    ):
        others.append(copy.copy(tiny_model))
        others[-1].config = dataclasses.replace(tiny_model.config, **change)
    others.append(llama.random_model(seed=SEED, dtype=torch.bfloat16))
    wide = llama.random_model(seed=SEED, hidden_size=64, intermediate_size=128, head_dim=32, num_attention_heads=4)
    names = ("int8", "int8_per_channel_weight_only", "fp8_per_channel", "mxfp8", "mxfp4", "int4")
    rounded = [wide, *(methods.quantize_model(wide, name) for name in names)]
    rounded.append(methods.quantize(wide, methods.Method("fp8"))[0])  # the codes, and not the inputs
    rounded.append(changed(wide, "layers.0.o_proj", lambda W: W.as_subclass(Opaque)))
    digests = [ours, *map(digest, others), *map(digest, rounded)]
    assert len({*digests}) == len(digests)


def test_biases_and_norms_of_heads_have_a_part_in_the_digest():
    digests, model = set(), llama.random_model(seed=SEED, qk_norm=True)
    for layer in model.linear.values():
        layer.bias = torch.ones(layer.weight.shape[0])
    changes = [lambda: None, lambda: model.q_norm[1].add_(1), lambda: model.k_norm[0].add_(1)]
    changes += [lambda layer=layer: layer.bias.add_(1) for name, layer in model.linear.items() if name != "lm_head"]
    for change in changes:
        change()
        digests.add(weights_digest(model))
    assert len(digests) == len(changes)


def test_windows_and_rules_of_experts_have_a_part_in_the_digest():
    """The same weights mean other keys and values where a config says that a query sees less, or asks others."""
    model, moe = llama.random_model(seed=SEED, attention_sinks=True, moe=MIXTURE), MIXTURE
    layer = model.moe[0]
    layer.gate_bias = torch.ones(moe.num_experts)
    layer.experts.gate_up_bias, layer.experts.down_bias = torch.ones(6, 96), torch.ones(6, 80)
    tensors = (layer.gate_bias, layer.experts.gate_up_bias, layer.experts.down_bias, model.sinks[1])
    changes = [lambda: None, *(lambda x=x: x.add_(1) for x in tensors)]
    changes += [lambda x=x: vars(model).update(config=dataclasses.replace(model.config, **x)) for x in (
        {"sliding_windows": (8, None)}, {"sliding_windows": (8, 8)},
        {"moe": dataclasses.replace(moe, top_k=3)}, {"moe": dataclasses.replace(moe, renormalize=False)},
    )]  # fmt: skip
    digests = set()
    for change in changes:
        change()
        digests.add(weights_digest(model))
    assert len(digests) == len(changes)


def test_a_rectangle_is_written_whole_or_not_at_all():
    made, header = connector_of(), {"layer": 0, "first": 2, "count": 3, "head": 0, "heads": 4}
    right = as_bytes(torch.arange(2 * 3 * 4 * 8, dtype=torch.float32) + 1)
    for payload in (None, right[:-32], torch.cat((right, right))):
        crc = 0 if payload is None else checksum(payload)
        assert not made.write([1], header | {"crc": crc}, payload)
    assert not made.write([1], header | {"crc": checksum(right) ^ 1}, right)
    assert not made.layers[0].any() and not made.stats["bytes_in"]
    assert made.write([1], header | {"crc": checksum(right)}, right)
    assert made.layers[0][:, 1, 2:5].flatten().tolist() == list(range(1, 193)) and made.stats["bytes_in"] == 768


@pytest.mark.parametrize(("head", "heads"), [(0, 1), (0, 2), (1, 2), (2, 3), (3, 2), (4, 1), (2, 0), (2, 1 << 30)])
def test_nobody_is_sent_heads_that_are_not_here(head, heads):
    """Rank 1 of 2 has heads 2 and 3. Anything else would be memory that was not meant, under a checksum that fits."""
    made, link = connector_of(rank=1, tp_size=2), MemoryLink()
    made.producer.export("x", [1])
    made.producer.written("x", 0, 5)
    get = {"kind": "GET", "transfer": "x", "head": 2, "heads": 2, "end": 5, "have": [0, 0], "consumers": 1}
    said = []
    link.send = lambda header, payload=None: said.append(header["kind"])
    made.inbox.put((link, get | {"head": head, "heads": heads}, bytearray()))
    made.get_finished()
    assert said == ["GONE"] and not made.producer.exports["x"].subscriptions
    made.inbox.put((link, get, bytearray()))
    made.get_finished()
    assert said == ["GONE", "KV"]


@pytest.mark.parametrize(("tp_size", "fits"), [(1, True), (2, True), (4, True), (8, True), (3, False), (6, False)])
def test_ranks_that_cannot_share_the_heads_are_no_address(tp_size, fits):
    """Three ranks have four heads between them? Some head would be nobody's, and its part of the cache never come."""
    request = make_request("r", [1, 2], 1, do_remote_prefill=True, transfer_id="x", remote_host="h",
                                  remote_port=7, tp_size=tp_size)  # fmt: skip
    with contextlib.nullcontext() if fits else pytest.raises(common.InputError, match="tp_size"):
        connector_of().on_new_request(request)


def test_an_address_is_that_of_the_first_rank():
    made = connector_of(rank=1, tp_size=2)
    made.port = 101  # each rank listens at the first one's port plus its number
    assert (made.address["remote_port"], made.address["tp_size"]) == (100, 2)


def test_patience_is_as_configured():
    made = connector_of()
    assert (made.timeout, made.consumer.timeout, made.consumer.retries, made.producer.lease) == (10, 10, 1, 30)
    extra = {"timeout": 3, "retries": 0, "kv_lease_duration": 7.5}
    made = TCPConnector(KVTransferConfig("TCPConnector", "kv_both", kv_port=0,
                                                    kv_connector_extra_config=extra))  # fmt: skip
    made.register_kv_caches(connector_of().layers, connector_of().model)
    assert (made.timeout, made.consumer.timeout, made.consumer.retries, made.producer.lease) == (3, 3, 0, 7.5)
    made.close()


# --- The store -------------------------------------------------------------------------------------------------------


def store_core(model, folder, role="kv_both", prefix_caching=True, policy="recompute"):
    extra = {"folder": str(folder), "cpu_bytes": 1 << 24}
    config = KVTransferConfig("StoreConnector", role, "engine", 0, policy, extra)
    return make_core(model, config, block_size=8, num_blocks=80, prefix_caching=prefix_caching)


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "store"
    KVStore(tmp_path / "store", 0, 1).clear()


def ask(core, prompt, n, name="r"):
    core.add_request(make_request(name, prompt, n))
    return drain(core)[name][0]


def test_another_engine_finds_the_blocks(folder, tiny_model, expected):
    first, second = store_core(tiny_model, folder), store_core(tiny_model, folder)
    assert ask(first, PROMPT, TOKENS) == expected
    assert counts(first, "store")["stored"] == 6, "of 52 computed positions, generated ones included"
    assert ask(second, PROMPT, TOKENS) == expected
    assert counts(second)["bytes_in"] == 5 * 8 * 2 * 2 * 2 * 16 * 4, "5 blocks of 8; the sixth holds what is generated"
    assert counts(second, "store")["stored"] == counts(second)["bytes_out"] == 0
    assert ask(second, PROMPT[:40], 2) == generated(tiny_model, PROMPT[:40], 2)  # one token must be left to compute
    for core in (first, second):
        assert_idle(core)


def test_what_the_store_had_was_not_found_here(folder, tiny_model):
    letters = []
    assert ask(store_core(tiny_model, folder), PROMPT[:24], 1)
    core = store_core(tiny_model, folder)
    for name, prompt in (("a", PROMPT[:8]), ("b", PROMPT), ("c", PROMPT)):
        core.add_request(make_request(name, prompt, 1))
        told(core, letters).step()
    found = [admission[1:] for letter in letters for admission in letter.admitted.values()]
    assert found == [(0, 0), (24, 16), (40, 0)], "8 of its 24 were here by then"


def test_a_store_needs_no_prefix_cache_and_is_asked_once_for_each_block(folder, tiny_model, expected, monkeypatch):
    core, asked = store_core(tiny_model, folder, prefix_caching=False), []
    find = KVStore.find
    monkeypatch.setattr(KVStore, "find", lambda store, key: asked.append(key) or find(store, key))
    core.add_request(make_request("a", PROMPT, TOKENS))
    core.step()
    asked.clear()
    core.step()
    assert asked == [], "this step fills no block"
    assert drain(core)["a"][0] == expected[2:] and len({*asked}) == 1
    assert counts(core, "store")["stored"] == 6, "the sixth block holds what was generated"


def test_who_computes_the_same_in_the_same_step_stores_it_once(folder, tiny_model, expected):
    first, second = store_core(tiny_model, folder), store_core(tiny_model, folder)
    for name in "ab":
        first.add_request(make_request(name, PROMPT, 1))
    drain(first)
    assert ask(second, PROMPT, TOKENS) == expected and counts(second)["void_blocks"] == 0
    second.scheduler.connector.close()
    with pytest.raises(RuntimeError):
        second.scheduler.connector.reader.submit(print)  # its thread has ended


def test_a_role_says_who_reads_and_who_writes(folder, tiny_model, expected):
    reader, writer, idle = (store_core(tiny_model, folder, role) for role in ("kv_consumer", "kv_producer", "kv_both"))
    assert ask(reader, PROMPT, 1) == ask(idle, PROMPT, 1) == expected[:1]
    assert counts(reader, "store")["stored"] == 0 and counts(idle, "store")["stored"] == 5
    assert ask(writer, PROMPT, TOKENS) == expected and counts(writer)["bytes_in"] == 0


def test_a_hit_has_no_gap(folder, tiny_model):
    assert ask(store_core(tiny_model, folder), PROMPT, 1)
    connector, request = store_core(tiny_model, folder).scheduler.connector, make_request("r", PROMPT, 1)
    request.block_hashes = hashes(make_core(tiny_model, None, block_size=8, prefix_caching=True), PROMPT)
    assert connector.get_num_new_matched_tokens(request, 0) == (40, False)
    connector.store.find(connector.key(request.block_hashes[1])).unlink()
    assert connector.get_num_new_matched_tokens(request, 0) == (8, False)
    assert connector.get_num_new_matched_tokens(request, 16) == (24, False), "what is here need not be there"


def test_a_block_has_another_key_wherever_it_means_something_else(folder):
    alike = [{}, {"block_size": 8}, {"tp_size": 2}, {"rank": 1, "tp_size": 2}, *OTHERS]
    keys = [connector_of("StoreConnector", folder=str(folder), **each).key(b"hash") for each in alike]
    assert len({*keys}) == len(alike)


def test_another_model_finds_nothing(folder, tiny_model):
    assert ask(store_core(tiny_model, folder), PROMPT, 2)
    for other in (llama.random_model(seed=1), changed(tiny_model, "layers.0.qkv_proj", lambda W: W + 0.01)):
        core = store_core(other, folder)
        assert ask(core, PROMPT, TOKENS) == generated(other, PROMPT, TOKENS) and not counts(core)["bytes_in"]


@pytest.mark.parametrize("damage", ["cut", "changed", "small", "gone"])
def test_unreadable_blocks_are_computed_after_all(damage, folder, tiny_model, expected, monkeypatch):
    """The lookup found them, the load inside the step did not: no token of that step counts, for nobody who shares."""
    assert ask(store_core(tiny_model, folder), PROMPT, 1)
    core = store_core(tiny_model, folder)
    store = core.scheduler.connector.store
    paths = sorted(store.cpu.folder.iterdir())
    assert len(paths) == 5
    victim = store.find(core.scheduler.connector.key(hashes(core, PROMPT)[2]))
    if damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-40])
    elif damage == "changed":
        body = bytearray(victim.read_bytes())
        body[-1] ^= 1
        victim.write_bytes(body)
    elif damage == "small":
        victim.unlink()
        store.put(victim.name, [torch.zeros(4)] * 2)
    else:
        start = core.scheduler.connector.start_load_kv

        def evicted_meanwhile():
            victim.unlink(missing_ok=True)
            start()

        monkeypatch.setattr(core.scheduler.connector, "start_load_kv", evicted_meanwhile)
    for name in ("a", "b"):
        core.add_request(make_request(name, PROMPT, TOKENS))
    if damage != "gone":
        first = core.step()
        assert first == [], "what was computed on nothing is not an answer"
        assert not victim.exists(), "nobody shall find it again"
    found = drain(core)
    assert found["a"][0] == found["b"][0] == expected
    assert counts(core)["void_blocks"] >= 1
    assert_idle(core)


def test_nothing_that_was_computed_on_void_blocks_is_stored_or_goes_on(folder, tiny_model):
    assert ask(store_core(tiny_model, folder), PROMPT, 1)
    core, longer = store_core(tiny_model, folder), PROMPT + PROMPT[:20]
    connector = core.scheduler.connector
    victims = [connector.store.find(connector.key(hashes(core, PROMPT)[i])) for i in (1, 3)]
    for victim in victims:
        victim.write_bytes(victim.read_bytes()[:-40])
    for name in ("leaves", "stays"):
        core.add_request(make_request(name, longer, TOKENS))
    assert core.step() == [] and counts(core, "store")["stored"] == 0
    assert core.scheduler.kv_cache_manager.get_computed_blocks(make_request("h", longer, 1))[1] == 8, (
        "what is before them is good"
    )
    core.abort_requests(["leaves"])
    assert not any(victim.exists() for victim in victims)
    expected = generated(tiny_model, longer, TOKENS)
    assert drain(core)["stays"][0] == expected
    later = store_core(tiny_model, folder)
    assert ask(later, longer, TOKENS) == expected
    assert counts(later)["bytes_in"] == 8 * 8 * 2 * 2 * 2 * 16 * 4, "computed after all, and stored: 8 blocks of 8"


@pytest.mark.parametrize("logprobs", [None, 1])
def test_who_asked_for_no_second_try_hears_of_an_unreadable_block(logprobs, folder, tiny_model, expected):
    """By default a request ends with its load, as in vLLM; not one whose front end looks for log probabilities."""
    assert ask(store_core(tiny_model, folder), PROMPT, 1)
    core = store_core(tiny_model, folder, policy="fail")
    for path in core.scheduler.connector.store.cpu.folder.iterdir():
        path.write_bytes(path.read_bytes()[:-40])
    request = make_request("a", PROMPT, TOKENS)
    request.sampling_params = dataclasses.replace(request.sampling_params, logprobs=logprobs)
    core.add_request(request)
    if logprobs is None:
        (heard,) = core.step()
        assert (heard.new_token_ids, heard.finish_reason) == ([], "error")
        assert heard.stop_reason == "KV load failed: a block is unreadable"
        assert core.scheduler.kv_cache_manager.get_computed_blocks(make_request("h", PROMPT, 1)) == ([], 0)
    else:
        assert drain(core)["a"][0] == expected and request.num_preemptions == 0
    assert_idle(core)


def test_who_alone_has_an_unreadable_block_keeps_its_seat(folder, tiny_model, expected):
    """It goes back to that block, and on from there; whoever shares it gives its own blocks back, and hits them."""
    assert ask(store_core(tiny_model, folder), PROMPT, 1)
    core = store_core(tiny_model, folder)
    store = core.scheduler.connector.store
    victim = store.find(core.scheduler.connector.key(hashes(core, PROMPT)[2]))
    victim.write_bytes(victim.read_bytes()[:-40])
    longer = [*PROMPT, 5]
    alone, shares = make_request("alone", PROMPT, TOKENS), make_request("shares", longer, TOKENS)
    core.add_request(alone), core.add_request(shares)
    table = None
    while core.scheduler.has_unfinished_requests():
        core.step()
        table = table or list(core.scheduler.kv_cache_manager.get_block_ids("alone"))
        if alone in core.scheduler.running:
            assert core.scheduler.kv_cache_manager.get_block_ids("alone")[: len(table)] == table
    assert (alone.num_preemptions, shares.num_preemptions) == (0, 1)
    assert alone.output_token_ids == expected and shares.output_token_ids == generated(tiny_model, longer, TOKENS)
    assert alone.num_cached_tokens == 16
    assert_idle(core)


def hashes(core, prompt):
    request = make_request("h", prompt, 1)
    core.scheduler.kv_cache_manager.update_block_hashes(request)
    return request.block_hashes


def test_tiers(tmp_path, folder):
    """Least recently used first: memory to disk, disk to nowhere. A block that is used stays."""
    layers = [torch.arange(64, dtype=torch.float32).view(1, 64)] * 2
    size = 2 * (256 + KVStore.HEADER.size)
    store = KVStore(folder, 2 * size, 2 * size, num_layers=2)
    for i, name in enumerate("abcde"):
        store.put(name, layers)
        for tier in (store.cpu, store.disk):
            for path in tier.folder.iterdir():  # a clock with steps, whatever the file system's is
                stat = path.stat().st_mtime
                if stat > 1e6:
                    os.utime(path, (i, i))
        if name == "c":
            os.utime(store.disk.path("a"), (10, 10))
    where = {tier: sorted(p.name for p in tier.folder.iterdir()) for tier in (store.cpu, store.disk)}
    assert where[store.cpu] == ["d", "e"] and len(where[store.disk]) == 2 and "a" in where[store.disk]
    assert store.find("d").parent == store.cpu.folder and store.find("a").parent == store.disk.folder
    assert store.find("b") is None or store.find("c") is None
    assert torch.equal(store.read_layer(store.find("a"), 1).view(torch.float32), layers[1].flatten())
    assert store.stats == {"stored": 5, "bytes": 5 * 512, "demoted": 3}
    store.put("d", layers)
    assert store.stats["stored"] == 5, "it is there already"
    path, body = store.find("d"), store.find("d").read_bytes()
    assert body[:8] == (256).to_bytes(4, "little") + zlib.crc32(body[16:272]).to_bytes(4, "little")
    for n in (0, 7, 15, 16, 272, size - 1):
        path.write_bytes(body[:n])
        with pytest.raises(ValueError, match="d: "):
            store.read_layer(path, 1)


def test_without_a_disk_what_memory_evicts_is_forgotten_and_a_folder_has_one_name(folder):
    store = KVStore(folder, 100)
    for name in "ab":
        store.put(name, [torch.zeros(20)])
        os.utime(store.cpu.path(name), (0, 0))
    assert store.find("a") is None and store.find("b") and not store.stats["demoted"]
    assert KVStore(folder / ".." / folder.name, 100).find("b")


def test_a_block_appears_when_it_is_complete(tmp_path):
    tier = Tier(tmp_path / "tier", 10)

    def parts():
        yield b"ab"
        assert all(path.name.startswith(".") for path in tier.folder.iterdir())
        yield b"cd"

    tier.put("a", parts())
    assert [path.name for path in tier.folder.iterdir()] == ["a"] and tier.path("a").read_bytes() == b"abcd"


def test_a_block_that_is_found_is_used_and_one_that_is_being_written_is_not_counted(tmp_path):
    tier = Tier(tmp_path / "tier", 10)
    (tier.folder / ".partial").write_bytes(bytes(100))
    for i, name in enumerate("ab"):
        tier.put(name, [bytes(5)])
        os.utime(tier.path(name), (i, i))
    store = KVStore(tmp_path / "store", 0)
    store.cpu.folder.rmdir()
    store.cpu = tier
    assert store.find("a") == tier.path("a")
    tier.put("c", [bytes(5)])
    assert sorted(path.name for path in tier.folder.iterdir()) == [".partial", "a", "c"]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    tier = Tier(tmp_path / "tier", 10)
    left, begun = (tier.folder / name for name in (".left", ".begun"))
    for path in (left, begun):
        path.write_bytes(bytes(100))
    os.utime(left, (0, time.time() - 2 * tier.STALE))
    assert tier.put("a", [bytes(5)]) and begun.exists() and not left.exists()

    def slow():
        yield bytes(5)
        partial = next(path for path in tier.folder.iterdir() if path.name not in ("a", ".begun"))
        os.utime(partial, (0, 0))
        tier.trim()  # another engine's; and we were only stopped for a while

    assert not tier.put("b", slow()) and sorted(path.name for path in tier.folder.iterdir()) == [".begun", "a"]


@contextlib.contextmanager
def limited(name, soft):
    """A resource limit of this process, for a while."""
    resource = pytest.importorskip("resource")
    kind = getattr(resource, name)
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)


def test_a_store_without_room_is_no_end_of_the_engine(folder, tiny_model, expected):
    """Files may be of 1,000 bytes at most, a block has more: the write fails as on a full file system."""
    core = store_core(tiny_model, folder)
    with limited("RLIMIT_FSIZE", 1000):
        assert ask(core, PROMPT, TOKENS) == expected
    store = core.scheduler.connector.store
    assert not store.stats["stored"] and not list(store.cpu.folder.iterdir())
    assert ask(core, PROMPT[:20], 1, "again") and store.stats["stored"] == 2
    assert_idle(core)


def test_a_disk_without_room_forgets_what_memory_evicts(folder):
    store = KVStore(folder, 4100, 1 << 20)
    store.put("a", [torch.zeros(1000)])
    os.utime(store.cpu.path("a"), (0, 0))
    with limited("RLIMIT_FSIZE", 1000):
        store.put("b", [torch.zeros(100)])
    assert store.find("a") is None and store.find("b") and not store.stats["demoted"]
    assert not list(store.disk.folder.iterdir())


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("damage", ["empty", "cut", "header", "bit", "a folder", "EIO"])
def test_a_block_that_cannot_be_read_is_computed_again_once(folder, tiny_model, expected, monkeypatch, damage, where):
    """By default: a store is a cache. The block is gone then, or replaced; who asks next loads or computes it."""
    config = KVTransferConfig("StoreConnector", "kv_both", kv_port=0, kv_connector_extra_config={
        "folder": str(folder), "cpu_bytes": 1 << 24 if where == "cpu" else 1, "disk_bytes": 1 << 24})  # fmt: skip
    make = functools.partial(make_core, tiny_model, config, block_size=8, num_blocks=80, prefix_caching=False)
    assert ask(make(), PROMPT, TOKENS) == expected
    core = make()
    store = core.scheduler.connector.store
    path = store.find(core.scheduler.connector.key(hashes(core, PROMPT)[2]))
    assert path.parent == getattr(store, where).folder
    body = path.read_bytes()
    damaged = {"empty": b"", "cut": body[:-1], "header": b"\xff" * 8 + body[8:], "bit": body[:-1] + b"\x55"}
    if damage in damaged:
        path.write_bytes(damaged[damage])
    elif damage == "a folder":
        path.unlink(), path.mkdir()
    else:
        read, sick = KVStore.read_layer, [path]  # until it has been written anew

        def read_layer(store, other, layer):
            if other in sick:
                sick.remove(other)
                raise OSError(errno.EIO, "Input/output error")
            return read(store, other, layer)

        monkeypatch.setattr(KVStore, "read_layer", read_layer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert ask(core, PROMPT, TOKENS) == expected and counts(core)["void_blocks"]
        void = counts(core)["void_blocks"]
        for _ in range(3):
            assert ask(core, PROMPT, TOKENS) == expected
    assert counts(core)["void_blocks"] == void, "the block was lost once"
    assert len({str(each.message) for each in told}) == len(told) <= 2
    monkeypatch.undo()
    assert_idle(core)
    if damage == "a folder":
        path.rmdir()


def test_a_disk_that_is_read_only_is_read(folder, tiny_model, expected, monkeypatch):
    """Nothing can be written, removed or marked as used; what is there is found, and the reason is told once."""
    first = store_core(tiny_model, folder, prefix_caching=False)
    assert ask(first, PROMPT, TOKENS) == expected

    def refuse(*about, **more):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("utime", "unlink", "replace"):
        monkeypatch.setattr(os, name, refuse)
    core = store_core(tiny_model, folder, prefix_caching=False)
    core.scheduler.connector.store.cpu.evict = refuse
    core.scheduler.connector.store.cpu.capacity = 100  # so that every block must make room
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert ask(core, PROMPT, TOKENS) == expected and counts(core)["bytes_in"]
        for i in range(3):
            assert ask(core, [i, *PROMPT[1:]], TOKENS) == generated(tiny_model, [i, *PROMPT[1:]], TOKENS)
    assert [str(each.message).partition(": ")[2] for each in told] == [
        "cannot write a block: Read-only file system; blocks are lost, the engine goes on"]  # fmt: skip
    monkeypatch.undo()
    assert_idle(core)


def test_where_nothing_can_be_removed_nothing_is_added(folder):
    """Somebody's folders are not the store's; blocks that stay take their room."""
    store = KVStore(folder, 1000)
    for i in range(3):
        (store.cpu.folder / f"somebody{i}" / "x").mkdir(parents=True)
        os.utime(store.cpu.folder / f"somebody{i}", (1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in "abcd":
            store.put(name, [torch.zeros(100)])
            os.utime(store.cpu.path(name), (ord(name), ord(name)))
        assert [name for name in "abcd" if store.find(name)] == ["c", "d"]

    def refuse(path):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    store.cpu.evict = refuse
    with pytest.warns(UserWarning, match="cannot evict a block: Operation not permitted") as told:
        for name in "efgh":
            store.put(name, [torch.zeros(100)])
    assert len(told) == 1 and [name for name in "abcdefgh" if store.find(name)] == ["c", "d"]
    for i in range(3):
        (store.cpu.folder / f"somebody{i}" / "x").rmdir()
        (store.cpu.folder / f"somebody{i}").rmdir()


def test_a_folder_that_is_gone_costs_its_blocks(folder, tiny_model, expected):
    core = store_core(tiny_model, folder, prefix_caching=False)
    assert ask(core, PROMPT, TOKENS) == expected
    shutil.rmtree(core.scheduler.connector.store.cpu.folder)
    with pytest.warns(UserWarning, match="cannot write a block"):
        for _ in range(2):
            assert ask(core, PROMPT, TOKENS) == expected
    assert_idle(core)


def test_a_store_that_cannot_begin_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(common.InputError, match=f"KV store {folder}: "):
            KVStore(folder, 100, 100)


def test_who_may_not_read_the_cache_does_not_read_the_store(folder, tiny_model, expected):
    assert ask(store_core(tiny_model, folder), PROMPT, 1)
    core, request = store_core(tiny_model, folder), make_request("r", PROMPT, TOKENS)
    request.sampling_params.skip_reading_prefix_cache = True
    core.add_request(request)
    assert drain(core)["r"][0] == expected and counts(core)["bytes_in"] == 0


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "word"),
    [("{", "not JSON"), ("[]", "object"), ('{"kv_role": "kv_both"}', "kv_connector"), ('{"kv_rank": 0}', "kv_rank"),
     ('{"kv_connector": "NixlConnector", "kv_role": "kv_both"}', "TCPConnector"),
     ('{"kv_connector": "TCPConnector"}', "kv_role"),
     ('{"kv_connector": "TCPConnector", "kv_role": "both"}', "kv_both"),
     ('{"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_port": 70000}', "kv_port"),
     ('{"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "hope"}', "recompute"),
     ('{"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"lease": 3}}', "lease"),
     ('{"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"port": 1}}', "retries"),
     ('{"kv_connector": "StoreConnector", "kv_role": "kv_both"}', "folder"),
     ('{"kv_connector": "StoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"disk_bytes": 1}}',
      "a folder, or cpu_bytes alone")],
)  # fmt: skip
def test_configurations_are_checked(text, word):
    with pytest.raises(common.InputError, match=word):
        KVTransferConfig.from_json(text)


@pytest.mark.parametrize(
    ("params", "word"),
    [([], "object"), ({"do_remote_prefill": True}, "transfer_id"), ({"do_remote_decode": True}, "transfer_id"),
     ({"do_remote_decode": 1}, "bool"), ({"do_remote_prefill": True, "do_remote_decode": True}, "exclude"),
     *(({"do_remote_prefill": True, "transfer_id": "x", "remote_host": "h", "remote_port": port}, "remote_port")
       for port in (0, 65536, True, "1")),
     *(({"do_remote_prefill": True, "transfer_id": "x", "remote_host": "h", "remote_port": 65535, "tp_size": n},
        "tp_size") for n in (0, 1025)),
     ({"do_remote_prefill": True, "transfer_id": "x", "remote_host": "h"}, "remote_port")],
)  # fmt: skip
def test_transfer_params_are_checked(params, word):
    with pytest.raises(common.InputError, match=word):
        check_kv_transfer_params(params)


def test_transfer_params_are_checked_when_a_request_comes():
    request, params = functools.partial(make_request, "r", [1], 1), {"do_remote_prefill": True}
    with pytest.raises(common.InputError, match="transfer_id"):
        connector_of().on_new_request(request(**params))
    where = {"transfer_id": "x", "remote_host": "h"}
    for port, ranks in ((65535, 1), (65536 - 1024, 1024)):  # rank r listens at remote_port + r
        connector_of().on_new_request(request(**params, **where, remote_port=port, tp_size=ranks))
    for port, ranks in ((65535, 2), (65536, 1), (0, 1), (1, 0), (1, 1025)):
        with pytest.raises(common.InputError, match="out of range"):
            connector_of().on_new_request(request(**params, **where, remote_port=port, tp_size=ranks))


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_port", 65536), ("kv_port", True), ("kv_port", -1), ("retries", True), ("retries", 1.5), ("timeout", -1),
     ("timeout", float("nan")), ("cpu_bytes", 1 << 50), ("host", 5)],
)  # fmt: skip
def test_numbers_of_a_configuration_are_in_range(name, value):
    given = {name: value} if name == "kv_port" else {"kv_connector_extra_config": {name: value}}
    with pytest.raises(common.InputError, match=name):
        KVTransferConfig("TCPConnector", "kv_both", **given)


def test_configurations_have_defaults():
    config = KVTransferConfig("TCPConnector", "kv_both", kv_connector_extra_config={"timeout": 5})
    assert (config.kv_port, config.kv_load_failure_policy, config.extra("timeout", 10.0)) == (14579, "fail", 5)
    store = KVTransferConfig("StoreConnector", "kv_both", kv_connector_extra_config={"folder": "x"})
    assert store.kv_load_failure_policy == "recompute", "a cache"
    assert config.engine_id and config.engine_id != KVTransferConfig("TCPConnector", "kv_both").engine_id
    assert KVTransferConfig("TCPConnector", "kv_both", kv_port=65535).kv_port == 65535


def test_a_transfer_is_one_answer():
    params = {"do_remote_decode": True, "transfer_id": "x"}
    with pytest.raises(common.InputError, match="n 2"):
        attach_params(SamplingParams(n=2), params)


def test_the_end_of_a_prompt_says_where_it_is(tiny_model):
    """And nothing else does: not its tokens before the end, not an answer that is complete, not an aborted prompt."""
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        connector = prefill.scheduler.connector
        for name, n, remote in (("a", 3, True), ("b", 1, False), ("c", 9, True)):
            params = {"do_remote_decode": True, "transfer_id": name.upper()} if remote else {}
            prefill.add_request(make_request(name, PROMPT, n, **params))
        heard = prefill.step() + prefill.step()
        prefill.abort_requests(["c"])
        heard += prefill.step()
        told = [(o.request_id, o.kv_transfer_params) for o in heard if o.kv_transfer_params or o.finish_reason]
        where = {"do_remote_prefill": True, "transfer_id": "A", **connector.address}
        assert told == [("b", None), ("a", where)] and where["remote_port"] == connector.port
        decode.add_request(make_request("a", PROMPT, 2, **where))
        answers = []
        until(lambda: answers and answers[-1].finish_reason, prefill.step, lambda: answers.extend(decode.step()))
        assert not any(o.kv_transfer_params for o in answers)
        drain(prefill, decode)


def test_a_transfer_has_one_request_on_each_side(tiny_model, expected):
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        submit(prefill, decode, "a", PROMPT, TOKENS)
        for core, way in ((prefill, {"do_remote_decode": True}), (decode, {"do_remote_prefill": True})):
            params = {"transfer_id": "a", "remote_host": "h", "remote_port": 1, **way}
            with pytest.raises(common.InputError, match="in use"):
                core.add_request(make_request("b", PROMPT, 1, **params))
        assert drain(prefill, decode)["a"][0] == expected


def test_a_taken_port_is_one_clear_line(tiny_model):
    with pair(tiny_model, "TCPConnector") as (prefill, _):
        config = KVTransferConfig("TCPConnector", "kv_producer", kv_port=prefill.scheduler.connector.port)
        with pytest.raises(common.InputError, match="kv_port"):
            make_core(tiny_model, config)

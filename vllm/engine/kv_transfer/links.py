"""Wires: a connection to another engine, and three ways for the payload (TCP, shared memory, torch.distributed).

Owns sockets, the threads that read and write them, and memory that is on its way; made by connectors. A step never
waits for one, and a link never touches a block. vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/` (NIXL, P2P NCCL).
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import atexit
import contextlib
import datetime
import mmap
import os
import queue
import re
import secrets
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engine.distributed import handshake
from engine.distributed.group import meeting_point
from engine.kv_transfer.frames import MAX_PAYLOAD, ProtocolError, host_bytes, pack_frame, read_frame


class Link:
    """A connection to another engine. Two threads read and write it, so that no step ever waits for a network.

    What comes in goes to `inbox` as (link, header, payload), the end of the connection as the header kind LOST. The
    payload travels inside the frame: `TCPConnector`. Subclasses send it another way and keep the frame as the notice.
    """

    ROOM = 8 << 20  # bytes of payload that may wait here; what has no room stays in its blocks, which are held anyway

    def __init__(  # noqa: PLR0913, either a socket or an address, and what holds for both
        self,
        inbox: queue.SimpleQueue,
        wake: threading.Event,
        sock: socket.socket | None = None,
        address: tuple[str, int] | None = None,
        timeout: float = 10.0,
        hello: dict[str, Any] | None = None,
        max_payload: int = MAX_PAYLOAD,
    ) -> None:
        """A connection that was accepted, and greeted (`sock`), or one to be made to `address` within `timeout`
        seconds. `hello` is said first: a GET may be read, and answered by the engine, before this returns. No payload
        has more than `max_payload` bytes."""
        self.inbox, self.wake, self.sock, self.address, self.timeout = inbox, wake, sock, address, timeout
        self.max_payload = max_payload
        self.outbox: queue.SimpleQueue = queue.SimpleQueue()
        self.backlog, self.lost, self.lock = 0, None, threading.Lock()
        self.accepted, self.greeted = sock is not None, False
        if hello is not None:
            self.send(hello)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @property
    def connection(self) -> socket.socket:
        """The socket, for the two threads: they begin when there is one."""
        assert self.sock is not None, "not connected"
        return self.sock

    @property
    def has_room(self) -> bool:
        return self.backlog < self.ROOM

    def send(self, header: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Queue a message; never waits. After the connection is lost, it goes nowhere."""
        with self.lock:
            self.backlog += 0 if payload is None else payload.nbytes
        self.outbox.put((header, payload))

    def close(self) -> None:
        """End the connection. What it held is given back when this returns, whichever thread did it."""
        self._lose("closed")

    def _read(self) -> None:
        OPEN.add(self)
        writer = threading.Thread(target=self._write, daemon=True)
        try:
            if self.sock is None:
                stop = time.monotonic() + self.timeout
                assert self.address is not None, "neither a socket nor an address"
                sock = socket.create_connection(self.address, self.timeout)
                with self.lock:
                    if self.lost is not None:  # closed meanwhile, when there was no socket to close
                        sock.close()  # so that its first use fails
                    self.sock = sock
                handshake.greet(sock, handshake.secret(), False, stop)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            writer.start()
            while True:
                header, payload = read_frame(self._read_exactly, self.max_payload)
                self.greeted |= header["kind"] == "HELLO"
                if header["kind"] == "KV" and not self.greeted:
                    raise ProtocolError("keys and values before HELLO: who knows what they look like")
                self._deliver(header, self.receive(header, payload))
        except Exception as error:  # whatever it is: nobody hears of the other side any more, and requests wait
            self._lose(str(error) or type(error).__name__)
        if writer.ident is not None:
            writer.join()
        OPEN.discard(self)

    def _read_exactly(self, n: int) -> bytearray:
        buffer, done = bytearray(n), 0
        while done < n:
            got = self.connection.recv_into(memoryview(buffer)[done:])
            if got == 0:
                raise EOFError("the connection was closed" + (" in the middle of a message" if done else ""))
            done += got
        return buffer

    def _write(self) -> None:
        while (message := self.outbox.get()) is not None:
            header, payload = message
            try:
                self.transmit(header, payload)
            except Exception as error:
                return self._lose(str(error) or type(error).__name__)
            with self.lock:
                self.backlog -= 0 if payload is None else payload.nbytes
            self.wake.set()  # there is room again

    def _lose(self, why: str) -> None:
        with self.lock:  # to the end: who comes second may leave the process next, and a thread's work would be lost
            if self.lost is not None:
                return
            self.lost = why
            self.outbox.put(None)
            if self.sock is not None:
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
                self.sock.close()
            self.forget()
        self._deliver({"kind": "LOST", "why": why}, None)

    def _deliver(self, header: dict[str, Any], payload: torch.Tensor | None) -> None:
        self.inbox.put((self, header, payload))
        self.wake.set()

    # -- what a wire may do in its own way --

    def transmit(self, header: dict[str, Any], payload: torch.Tensor | None) -> None:
        """On the writing thread."""
        if payload is None:
            return self.connection.sendall(pack_frame(header))
        self.connection.sendall(pack_frame(header, payload.nbytes))
        self.connection.sendall(host_bytes(payload))

    def receive(self, header: dict[str, Any], payload: bytearray) -> torch.Tensor | None:
        """On the reading thread: the payload that belongs to `header`, as uint8 in host or device memory."""
        return torch.frombuffer(payload, dtype=torch.uint8) if payload else None

    def forget(self) -> None:
        """The connection is gone: give back what it held."""


OPEN: set[Link] = set()  # whose threads still run


@atexit.register
def close_all(seconds: float = 5.0) -> None:
    """End all threads, for so long at most: Python aborts on one that returns from torch when its end has begun."""
    links, end = list(OPEN), time.monotonic() + seconds
    for link in links:
        link.close()
    for link in links:
        link.reader.join(max(0.0, end - time.monotonic()))


SHM = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


SEGMENT = re.compile(r"kvx-(\d+)-[0-9a-f]{16}")


def remove_abandoned(seconds: float = 3600.0) -> None:
    """Remove segments that are as old as that and whose sender is gone: it was killed, and so was who might have come
    for them. Young ones stay: a process in another container may use this memory, and we cannot see it."""
    for path in SHM.glob("kvx-*"):
        sender = SEGMENT.fullmatch(path.name)
        with contextlib.suppress(OSError, OverflowError):  # another user's; somebody was faster; no number of a process
            if sender and time.time() - path.lstat().st_mtime > seconds:
                try:
                    os.kill(int(sender[1]), 0)
                except ProcessLookupError:
                    path.unlink()


class SharedMemoryLink(Link):
    """Same host: a payload is a file in memory, the frame says its name. Whoever maps it removes the name at once, so
    it goes with its last reader, however that ends; the sender removes those that nobody came for. If both were killed,
    whoever makes a link later does."""

    MANY = 1000  # names after which we look which of them are still there

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.names: set[str] = set()
        remove_abandoned()
        super().__init__(*args, **kwargs)

    def transmit(self, header: dict[str, Any], payload: torch.Tensor | None) -> None:
        """Payload to a named segment, its name over the socket; whoever receives it removes the name."""
        try:
            if payload is not None and payload.nbytes:
                header = {**header, "shm": self._write_segment(payload), "nbytes": payload.nbytes}
            super().transmit(header, None)
        except OSError:  # nobody will map it; and the connection may have been given up before it was there
            self.forget()
            raise

    def _write_segment(self, payload: torch.Tensor) -> str:
        """The name of a new file with these bytes. OSError if the memory is full: `write` says so, where to store into
        a mapping would end the process (SIGBUS)."""
        name = f"kvx-{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(SHM / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        if len(self.names) >= self.MANY:
            self.names = {known for known in self.names if (SHM / known).exists()}  # the others were mapped
        self.names.add(name)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(host_bytes(payload))
        finally:
            os.close(descriptor)
        return name

    def receive(self, header: dict[str, Any], payload: bytearray) -> torch.Tensor | None:
        """The segment, mapped and unlinked; None if it was here before. ProtocolError for a name that is not ours."""
        name = header.get("shm")
        if name is None:
            return super().receive(header, payload)
        if not isinstance(name, str) or not SEGMENT.fullmatch(name):
            raise ProtocolError(f"{name!r:.40} is not the name of a segment")
        try:
            descriptor = os.open(SHM / name, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        except FileNotFoundError:  # a message that came twice
            return None
        try:
            os.unlink(SHM / name)
            if (nbytes := os.fstat(descriptor).st_size) > self.max_payload:
                raise ProtocolError(f"a segment of {nbytes:,} bytes")
            return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8) if nbytes else None
        finally:
            os.close(descriptor)

    def forget(self) -> None:
        for name in tuple(self.names):  # the writing thread may be adding one
            with contextlib.suppress(OSError):
                os.unlink(SHM / name)


def which_gpu() -> str:
    """A name that no other GPU has, whatever number it goes by; empty without one."""
    return str(torch.cuda.get_device_properties(common.device()).uuid) if common.HAS_GPU else ""


class DistributedLink(Link):
    """torch.distributed: gloo between CPUs, NCCL between two GPUs. Frames keep the order; after each, the pair's
    process group sends the payload from tensor to tensor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.group: Any = None  # torch's stubs know no `send` of a process group
        self.store: Any = None
        self.store_port, self.device = 0, torch.device("cpu")
        super().__init__(*args, **kwargs)

    def _read(self) -> None:
        super()._read()
        self.group = self.store = None  # whose end the other side hears, if it waits in there

    def _joined(self) -> Any:
        """The pair's process group, made when it is needed."""
        if self.group is None:
            self._join()
        return self.group

    def _join(self) -> None:
        """Rank 0 accepted the connection and hosts the store; rank 1 made it."""
        span = datetime.timedelta(seconds=self.timeout)
        host = self.address[0] if self.address else "127.0.0.1"
        rank = 0 if self.accepted else 1
        store = self.store or TCPStore(host, self.store_port, is_master=False, timeout=span)
        store.set_timeout(span)
        store.set(f"gpu {rank}", mine := which_gpu())
        theirs = store.get(f"gpu {1 - rank}").decode()
        apart = mine and theirs and mine != theirs  # NCCL refuses two ranks on one GPU
        self.device = common.device() if apart else torch.device("cpu")
        make: Any = dist.ProcessGroupNCCL if apart else dist.ProcessGroupGloo
        self.group = make(store, rank, 2, span)

    def transmit(self, header: dict[str, Any], payload: torch.Tensor | None) -> None:
        """Header over the socket, payload [bytes] over torch.distributed, from its own device."""
        if header["kind"] == "HELLO":  # the meeting point of the two ranks
            self.store = meeting_point(self.connection.getsockname()[0])  # where the other side has found us
            header = {**header, "port": self.store.port}
        if payload is None:
            return super().transmit(header, None)
        super().transmit({**header, "nbytes": payload.nbytes}, None)
        group = self._joined()  # which decides about the device
        group.send([payload.to(self.device)], 1, 0).wait()

    def receive(self, header: dict[str, Any], payload: bytearray) -> torch.Tensor | None:
        """The payload [nbytes] uint8 on this device; ProtocolError for a size or port that cannot be."""
        if header["kind"] == "HELLO":
            if (port := header["port"]) > 65535:
                raise ProtocolError(f"port {port}")
            self.store_port = port
        if header["kind"] != "KV":
            return super().receive(header, payload)
        nbytes = header.get("nbytes")
        if type(nbytes) is not int or not 0 < nbytes <= self.max_payload:
            raise ProtocolError(f"nbytes {nbytes!r:.40}")
        group = self._joined()
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        group.recv([buffer], 0, 0).wait()
        return buffer

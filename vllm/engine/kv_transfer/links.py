"""080 · KV transfer: a request's keys and values on their way between two engines. The lowest part of lesson 08.

Bottom up: the wire format (positions and heads, no blocks, so that block sizes and tensor-parallel degrees may differ),
the kernel between blocks and that format, frames that do not trust the other side, three wires (TCP, shared memory,
torch.distributed), and the two state machines of a transfer, one on each side. The connectors above it are in 081, the
engine, workers, router and faults in 08_disagg.

Read for this: vLLM 0.32 `distributed/kv_transfer/kv_connector/v1/nixl/` (`tp_mapping.py`, `pull_worker.py`), Qin et al.
2025 (Mooncake).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used
from common import tl, triton

import atexit
import contextlib
import datetime
import functools
import json
import mmap
import os
import queue
import re
import secrets
import socket
import struct
import tempfile
import threading
import time
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

tensor_parallel = common.lesson("05c_tensor_parallel")
from engine.parallel import handshake

# --- 1. What travels: positions and heads -----------------------------------------------------------------------------
#
# A block is an affair of one engine: its size, its number, and which heads of it are here. So none of that is on the
# wire. What is, is a rectangle of one layer: positions [first, first + count) × KV heads [head, head + heads), keys and
# then values, [2, count, heads, D]. Either side translates with its own block table.


def gather_reference(kv_cache: torch.Tensor, blocks: Sequence[int], first: int, count: int, head: int,
                     heads: int) -> torch.Tensor:  # fmt: skip
    """The rectangle, position by position. kv_cache [2, num_blocks, block_size, Hkv, D] -> [2, count, heads, D]."""
    size = kv_cache.shape[2]
    rows = [kv_cache[:, blocks[p // size], p % size, head : head + heads] for p in range(first, first + count)]
    return torch.stack(rows, dim=1)


def scatter_reference(buffer: torch.Tensor, kv_cache: torch.Tensor, blocks: Sequence[int], first: int,
                      head: int) -> None:  # fmt: skip
    """The inverse: write a rectangle [2, count, heads, D] into the blocks of another engine, position by position."""
    size, heads = kv_cache.shape[2], buffer.shape[2]
    for t in range(buffer.shape[1]):
        p = first + t
        kv_cache[:, blocks[p // size], p % size, head : head + heads] = buffer[:, t]


@common.kernel
def move_kv_kernel(kv_cache, blocks, buffer, first: tl.int32, count: tl.int32, head, stride_half,
                   ROW: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
                   COLUMNS: tl.constexpr, TOKENS: tl.constexpr, TO_CACHE: tl.constexpr):  # fmt: skip
    tile, half = tl.program_id(0), tl.program_id(1).to(tl.int64)  # half 0: keys, 1: values
    t, i = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    p = first + t  # positions [TOKENS]
    block = tl.load(blocks + p // BLOCK_SIZE, mask=t < count, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + p % BLOCK_SIZE
    inside = (t < count)[:, None] & (i < WIDTH)[None, :]  # WIDTH = heads · D of a row's Hkv · D elements
    page = kv_cache + half * stride_half + slot[:, None] * ROW + head * D + i[None, :]
    wire = buffer + (half * count + t)[:, None] * WIDTH + i[None, :]
    if TO_CACHE:
        tl.store(page, tl.load(wire, mask=inside), mask=inside)
    else:
        tl.store(wire, tl.load(page, mask=inside), mask=inside)


def _move(kv_cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor, first: int, head: int,
          to_cache: bool) -> None:  # fmt: skip
    """One launch of the kernel, in either direction. Semantics: see `gather_kv`, `scatter_kv`. Shapes: as there."""
    (_, _, size, Hkv, D), (_, count, heads, _) = kv_cache.shape, buffer.shape
    columns = triton.next_power_of_2(heads * D)
    tokens = max(1, 4096 // columns)
    move_kv_kernel[(triton.cdiv(count, tokens), 2)](
        kv_cache, blocks, buffer, first, count, head, kv_cache.stride(0), ROW=Hkv * D, D=D, BLOCK_SIZE=size,
        WIDTH=heads * D, COLUMNS=columns, TOKENS=tokens, TO_CACHE=to_cache, num_warps=4,
    )  # fmt: skip


def gather_kv(kv_cache: torch.Tensor, blocks: torch.Tensor, first: int, count: int, head: int,
              heads: int) -> torch.Tensor:  # fmt: skip
    """From blocks to the wire: one contiguous rectangle of a layer.

    Semantics: out[i, t, h] = kv_cache[i, blocks[p // block_size], p % block_size, head + h], p = first + t.
    Shapes: kv_cache [2, num_blocks, block_size, Hkv, D], blocks int64 [W] -> [2, count, heads, D].
    """
    if not common.runs_kernel(kv_cache):  # whole blocks, which are long rows, and then the part that was meant
        (_, num_blocks, size, Hkv, D), last = kv_cache.shape, first + count
        used = blocks[first // size : -(-last // size)]
        pages = kv_cache.flatten(0, 1).index_select(0, torch.cat((used, used + num_blocks)))
        skip = first - first // size * size
        return pages.view(2, -1, Hkv, D)[:, skip : skip + count, head : head + heads]
    out = torch.empty(2, count, heads, kv_cache.shape[4], dtype=kv_cache.dtype, device=kv_cache.device)
    if count:
        _move(kv_cache, blocks, out, first, head, to_cache=False)
    return out


def scatter_kv(buffer: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor, first: int, head: int) -> None:
    """From the wire to blocks, those of another engine.

    Semantics: kv_cache[i, blocks[p // block_size], p % block_size, head + h] = buffer[i, t, h], p = first + t.
    Shapes: buffer [2, count, heads, D] contiguous, kv_cache [2, num_blocks, block_size, Hkv, D], blocks int64 [W].
    """
    if buffer.shape[1] == 0:
        return
    if common.runs_kernel(kv_cache):
        return _move(kv_cache, blocks, buffer, first, head, to_cache=True)
    heads = kv_cache.flatten(1, 2).narrow(2, head, buffer.shape[2])  # a view: [2, slots, heads, D]
    heads.index_copy_(1, _slots(kv_cache, blocks, first, buffer.shape[1]), buffer)


def _slots(kv_cache: torch.Tensor, blocks: torch.Tensor, first: int, count: int) -> torch.Tensor:
    p = torch.arange(first, first + count, device=blocks.device)
    return blocks[p // kv_cache.shape[2]] * kv_cache.shape[2] + p % kv_cache.shape[2]


def example_launches(dtype: torch.dtype) -> None:
    """The kernel at the shapes of SmolLM2 and of an 8B Llama, for all heads and for some: for the compile check."""
    empty = functools.partial(torch.empty, device="meta")
    for Hkv, heads, D, size in ((3, 3, 64, 16), (3, 1, 64, 32), (8, 8, 128, 16), (8, 2, 128, 16)):
        kv_cache, blocks = empty(2, 1024, size, Hkv, D, dtype=dtype), empty(64, dtype=torch.int64)
        buffer = gather_kv(kv_cache, blocks, 16, 500, 0, heads)
        scatter_kv(buffer, kv_cache, blocks, 16, Hkv - heads)


# Tensor parallelism shards the cache by KV heads, and copies them where ranks outnumber heads (lesson 05c). Two engines
# of different degree cut at different places; a rank on the decode side asks whoever has its heads.


@dataclass(frozen=True)
class HeadSlice:
    """KV heads [head, head + heads), numbered as in the whole model, of one rank of the other engine."""

    rank: int
    head: int
    heads: int


def owned_heads(num_kv_heads: int, tp_size: int, rank: int) -> tuple[int, int]:
    """(first, number) of the KV heads in one rank's cache; neighbours hold the same one if tp_size > num_kv_heads."""
    return rank * num_kv_heads // tp_size, max(1, num_kv_heads // tp_size)


def tp_sources(num_kv_heads: int, producer_tp: int, consumer_tp: int, rank: int) -> list[HeadSlice]:
    """Whom rank `rank` of the consumer reads from: its heads, each from exactly one rank of the producer."""
    head, count = owned_heads(num_kv_heads, consumer_tp, rank)
    needed, found = set(range(head, head + count)), []
    # Among ranks that hold copies of a head, start where our own rank points, so that readers spread over them.
    start = rank * producer_tp // consumer_tp
    for producer in (*range(start, producer_tp), *range(start)):
        first, number = owned_heads(num_kv_heads, producer_tp, producer)
        if take := sorted(needed & set(range(first, first + number))):
            found.append(HeadSlice(producer, take[0], len(take)))
            needed -= set(take)
    return sorted(found, key=lambda piece: piece.head)


def num_consumers(num_kv_heads: int, producer_tp: int, consumer_tp: int, rank: int) -> int:
    """How many ranks of the consumer read from rank `rank` of the producer: that many DONEs free its blocks."""
    return sum(any(piece.rank == rank for piece in tp_sources(num_kv_heads, producer_tp, consumer_tp, reader))
               for reader in range(consumer_tp))  # fmt: skip


# --- 2. Frames: what is said, and what is not believed ---------------------------------------------------------------
#
#   consumer → producer   GET     these heads of this transfer; layer i from position have[i] on, to `end`
#                         DONE    I have all of it: free it           CANCEL  I do not want it any more
#   producer → consumer   HELLO   first of all: who I am; refuse me if my cache is not like yours
#                         KV      a rectangle                         GONE    there is no such transfer (any more)
#
# A frame is `kvx1`, two lengths, a JSON header, a payload. Pickle would let whoever reaches the port run code here.

PREFIX = struct.Struct(">4sIQ")  # magic, bytes of header, bytes of payload
MAGIC, MAX_HEADER, MAX_PAYLOAD = b"kvx1", 1 << 20, 1 << 32
FIELDS: dict[str, dict[str, type]] = {
    "HELLO": {"layout": str, "engine_id": str, "port": int},
    "GET": {"transfer": str, "head": int, "heads": int, "end": int, "have": list, "consumers": int},
    "KV": {"transfer": str, "layer": int, "first": int, "count": int, "head": int, "heads": int, "crc": int},
    "DONE": {"transfer": str}, "CANCEL": {"transfer": str}, "GONE": {"transfer": str, "why": str},
}  # fmt: skip


class ProtocolError(ValueError):
    """The other side sent something that is no frame. The connection cannot be trusted any further."""


def pack_frame(header: dict[str, Any], payload_bytes: int = 0) -> bytes:
    """Everything of a frame but its payload."""
    body = json.dumps(header).encode()
    return PREFIX.pack(MAGIC, len(body), payload_bytes) + body


def read_frame(read: Callable[[int], bytearray], max_payload: int = MAX_PAYLOAD) -> tuple[dict[str, Any], bytearray]:
    """The next frame. `read(n)` returns exactly n bytes, or raises EOFError. Raises ProtocolError, before any memory is
    taken for what it announces, if that is more than fits."""
    magic, header_bytes, payload_bytes = PREFIX.unpack(read(PREFIX.size))
    if magic != MAGIC or header_bytes > MAX_HEADER or payload_bytes > max_payload:
        raise ProtocolError(f"not a frame: {bytes(magic)!r}, {header_bytes} and {payload_bytes} bytes")
    try:
        header = json.loads(bytes(read(header_bytes)))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"header is not JSON: {error}") from None
    check_header(header)
    return header, read(payload_bytes)


def check_header(header: Any) -> None:
    """Raises ProtocolError unless the fields of this kind of message are there, of their types, and not negative."""
    kind = header.get("kind") if isinstance(header, dict) else None
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError(f"no such message: {header!r:.80}")
    for name, wanted in fields.items():
        value = header.get(name)
        numbers = value if wanted is list and type(value) is list else [value] if wanted is int else []
        if type(value) is not wanted or not all(type(n) is int and 0 <= n < 1 << 40 for n in numbers):
            raise ProtocolError(f"{kind}: {name} {value!r:.40}: must be a {wanted.__name__} in range")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 [nbytes]."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def checksum(payload: torch.Tensor) -> int:
    """CRC32 of the bytes."""
    return zlib.crc32(payload.cpu().numpy())


# --- 3. Wires: a connection, and three ways for the payload ----------------------------------------------------------


class Link:
    """A connection to another engine. Two threads read and write it, so that no step ever waits for a network.

    What comes in goes to `inbox` as (link, header, payload), the end of the connection as the header kind LOST. The
    payload travels inside the frame: `TCPConnector`. Subclasses send it another way and keep the frame as the notice.
    """

    ROOM = 8 << 20  # bytes of payload that may wait here; what has no room stays in its blocks, which are held anyway

    def __init__(self, inbox: queue.SimpleQueue, wake: threading.Event, sock: socket.socket | None = None,
                 address: tuple[str, int] | None = None, timeout: float = 10.0,
                 hello: dict[str, Any] | None = None, max_payload: int = MAX_PAYLOAD) -> None:  # fmt: skip
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
                sock = socket.create_connection(self.address, self.timeout)
                with self.lock:
                    if self.lost is not None:  # closed meanwhile, when there was no socket to close
                        sock.close()  # so that its first use fails
                    self.sock = sock
                handshake.greet(sock, handshake.secret(), False, stop)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
            got = self.sock.recv_into(memoryview(buffer)[done:])
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
            return self.sock.sendall(pack_frame(header))
        self.sock.sendall(pack_frame(header, payload.nbytes))
        self.sock.sendall(payload.cpu().numpy())

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
                file.write(payload.cpu().numpy())
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
        self.group, self.store, self.store_port, self.device = None, None, 0, torch.device("cpu")
        super().__init__(*args, **kwargs)

    def _read(self) -> None:
        super()._read()
        self.group = self.store = None  # whose end the other side hears, if it waits in there

    def _join(self) -> None:
        """Rank 0 accepted the connection and hosts the store; rank 1 made it."""
        span, host = datetime.timedelta(seconds=self.timeout), "127.0.0.1"
        if not self.accepted:
            host = self.address[0]
        rank = 0 if self.accepted else 1
        store = self.store or dist.TCPStore(host, self.store_port, is_master=False, timeout=span)
        store.set_timeout(span)
        store.set(f"gpu {rank}", mine := which_gpu())
        theirs = store.get(f"gpu {1 - rank}").decode()
        apart = mine and theirs and mine != theirs  # NCCL refuses two ranks on one GPU
        self.device = common.device() if apart else torch.device("cpu")
        self.group = (dist.ProcessGroupNCCL if apart else dist.ProcessGroupGloo)(store, rank, 2, span)

    def transmit(self, header: dict[str, Any], payload: torch.Tensor | None) -> None:
        """Header over the socket, payload [bytes] over torch.distributed, from its own device."""
        if header["kind"] == "HELLO":  # the meeting point of the two ranks
            self.store = tensor_parallel.meeting_point(self.sock.getsockname()[0])  # where the other side has found us
            header = {**header, "port": self.store.port}
        if payload is None:
            return super().transmit(header, None)
        super().transmit({**header, "nbytes": payload.nbytes}, None)
        if self.group is None:
            self._join()
        self.group.send([payload.to(self.device)], 1, 0).wait()

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
        if self.group is None:
            self._join()
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.group.recv([buffer], 0, 0).wait()
        return buffer


# --- 4. The two state machines ---------------------------------------------------------------------------------------
#
# Both run on the engine's own thread, between steps or inside one: nobody writes a block behind the scheduler's back.
# They know messages, positions and clocks, and neither sockets nor tensors.


@dataclass
class Subscription:
    """Somebody who wants an export: which heads, and for each layer up to which position it has been sent."""

    link: Any
    head: int
    heads: int
    end: int
    sent: list[int]


@dataclass
class Export:
    """A prompt being computed here for somebody else. `ready[i]`: leading positions that layer i has in `blocks`."""

    transfer: str
    blocks: list[int]
    ready: list[int]
    finished: bool = False
    deadline: float = 0.0  # of the lease, which begins when it is finished
    consumers: int = 1
    done: set = field(default_factory=set)  # links that need no more of it
    subscriptions: list[Subscription] = field(default_factory=list)


class Producer:
    """Sends what is ready to whoever asks, as soon as it is ready; keeps it until they have it, or the lease is up.

    A GET may come before the request, while it runs, or after: then its layers go out of the blocks, which is why these
    are kept. Nothing is buffered beyond what a link has room for.
    """

    PIECE = 1024  # most positions in a message

    def __init__(self, num_layers: int, read: Callable[..., Any], lease: float = 30.0,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        """`read(blocks, layer, first, count, head, heads)` is the payload of a rectangle."""
        self.num_layers, self.read, self.lease, self.clock = num_layers, read, lease, clock
        self.exports: dict[str, Export] = {}
        self.early: dict[str, list[tuple[Any, dict, float]]] = defaultdict(list)  # letters about what is not here yet
        self.gone: OrderedDict[str, str] = OrderedDict()  # transfers that are over, and how: the last thousand
        self.released: list[str] = []
        self.stats: Counter[str] = Counter()

    def export(self, transfer: str, blocks: list[int]) -> None:
        """A request that will be wanted elsewhere has (more) blocks."""
        if transfer in self.exports:
            self.exports[transfer].blocks = blocks
            return
        if transfer in self.gone:
            return
        self.exports[transfer] = Export(transfer, blocks, [0] * self.num_layers)
        for link, header, _ in self.early.pop(transfer, ()):
            self.on_message(link, header)

    def written(self, transfer: str, layer: int, num_tokens: int) -> None:
        """Layer `layer` has keys and values of the first `num_tokens` positions."""
        if export := self.exports.get(transfer):
            export.ready[layer] = num_tokens

    def preempted(self, transfer: str) -> None:
        """Its blocks are gone, it will be computed again; what was sent stays sent, since it will be the same."""
        if export := self.exports.get(transfer):
            export.ready, export.blocks = [0] * self.num_layers, []

    def finish(self, transfer: str) -> bool:
        """The prompt is computed. Must its blocks be kept? If so, its name will be in `released` one day."""
        if (export := self.exports.get(transfer)) is None:
            return False
        export.finished, export.deadline = True, self.clock() + self.lease
        if len(export.done) >= export.consumers:
            self._end(transfer, "delivered")
            return False
        return True

    def forget(self, transfer: str, why: str) -> None:
        """The request has ended without a prompt to hand over; whoever waits for it, or will ask, must know."""
        self._end(transfer, why)
        for link, header, _ in self.early.pop(transfer, ()):
            if header["kind"] == "GET":
                link.send({"kind": "GONE", "transfer": transfer, "why": why})

    def on_message(self, link: Any, header: dict[str, Any]) -> None:
        """GET: subscribe, or start again from what the consumer says it has. DONE, CANCEL: it needs no more."""
        transfer, get = header["transfer"], header["kind"] == "GET"
        if (export := self.exports.get(transfer)) is None:
            if transfer not in self.gone:
                self.early[transfer].append((link, header, self.clock() + self.lease))
            elif get:
                link.send({"kind": "GONE", "transfer": transfer, "why": self.gone[transfer]})
            return
        export.subscriptions = [s for s in export.subscriptions if s.link is not link]
        if not get:
            export.done.add(link)
            if export.finished and len(export.done) >= export.consumers:
                self.released.append(transfer)
                self._end(transfer, "delivered")
        elif len(header["have"]) != self.num_layers:
            link.send({"kind": "GONE", "transfer": transfer, "why": f"this model has {self.num_layers} layers"})
        else:
            wanted = Subscription(link, header["head"], header["heads"], header["end"], list(header["have"]))
            export.subscriptions.append(wanted)
            export.consumers, export.deadline = max(1, header["consumers"]), self.clock() + self.lease

    def on_lost(self, link: Any) -> None:
        """A consumer died, or the way to it. Another attempt has another name, so this is as good as a CANCEL."""
        for export in list(self.exports.values()):
            if any(s.link is link for s in export.subscriptions):
                self.on_message(link, {"kind": "CANCEL", "transfer": export.transfer})
        for transfer in list(self.early):
            self.early[transfer] = [entry for entry in self.early[transfer] if entry[0] is not link]

    def pump(self, send: Callable[[Any, dict, Any], None]) -> None:
        """Send everything that is ready, not sent yet, and has room: `send(link, header, payload)`."""
        for export in self.exports.values():
            for s in export.subscriptions:
                for layer in range(self.num_layers):
                    while s.sent[layer] < (end := min(export.ready[layer], s.end)) and s.link.has_room:
                        first = s.sent[layer]
                        count = min(end - first, self.PIECE)
                        payload = self.read(export.blocks, layer, first, count, s.head, s.heads)
                        s.sent[layer] = first + count
                        self.stats["messages"] += 1
                        self.stats["early"] += not export.finished
                        send(s.link, {"kind": "KV", "transfer": export.transfer, "layer": layer, "first": first,
                                      "count": count, "head": s.head, "heads": s.heads}, payload)  # fmt: skip

    def is_late(self) -> bool:
        """Has somebody waited a whole lease for what never came here?"""
        return any(self.clock() >= deadline for letters in self.early.values() for *_, deadline in letters)

    def expire(self) -> None:
        """Nobody came, or nobody finished: take the blocks back."""
        now = self.clock()
        for export in [e for e in self.exports.values() if e.finished and now >= e.deadline]:
            self.stats["expired"] += 1
            self.released.append(export.transfer)
            self._end(export.transfer, f"its lease of {self.lease:g} s is up")
        for transfer in list(self.early):
            for link, header, _ in [entry for entry in self.early[transfer] if now >= entry[2]]:
                if header["kind"] == "GET":
                    link.send({"kind": "GONE", "transfer": transfer, "why": "no such request came here"})
            self.early[transfer] = [entry for entry in self.early[transfer] if now < entry[2]]
            if not self.early[transfer]:
                del self.early[transfer]

    def _end(self, transfer: str, why: str) -> None:
        export = self.exports.pop(transfer, None)  # None: it ended before it began
        for s in export.subscriptions if export else ():
            s.link.send({"kind": "GONE", "transfer": transfer, "why": why})
        self.gone[transfer] = why
        while len(self.gone) > 1000:
            self.gone.popitem(last=False)


@dataclass
class Source:
    """A producer's rank that one import reads from: `have[i]` is the position up to which layer i has arrived."""

    link: Any
    head: int
    heads: int
    consumers: int
    have: list[int]


@dataclass
class Import:
    """A prompt that somebody else computes, on its way into `blocks`: positions [first, end)."""

    transfer: str
    request_id: str
    blocks: list[int]
    end: int
    sources: list[Source]
    deadline: float
    retries: int
    started: float


class Consumer:
    """Asks, writes what arrives into blocks, asks again for what did not, and gives up in the end.

    Go-back-N for each layer: a rectangle is taken if it begins at or before the position up to which we have
    everything. What comes twice changes nothing; what is cut, changed, or comes too early is as good as lost.
    """

    def __init__(self, num_layers: int, write: Callable[..., bool], timeout: float = 10.0, retries: int = 1,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        """`write(blocks, header, payload)` puts a rectangle into blocks; False: the payload is not what it says."""
        self.num_layers, self.write, self.timeout, self.retries, self.clock = num_layers, write, timeout, retries, clock
        self.imports: dict[str, Import] = {}  # by transfer
        self.finished: list[str] = []  # request ids
        self.cancelled: list[str] = []
        self.failed: dict[str, str] = {}  # request id: why
        self.stats: Counter[str] = Counter()

    def start(self, transfer: str, request_id: str, blocks: list[int], first: int, end: int,
              sources: Sequence[tuple[Any, HeadSlice, int]]) -> None:  # fmt: skip
        """Ask for positions [first, end); `sources` are (link, heads of it, how many ranks read from it)."""
        made = [Source(link, piece.head, piece.heads, consumers, [first] * self.num_layers)
                for link, piece, consumers in sources]  # fmt: skip
        now = self.clock()
        found = Import(transfer, request_id, blocks, end, made, now + self.timeout, self.retries, now)
        self.imports[transfer] = found
        if first >= end:  # nothing is wanted, but somebody keeps it for us; and nobody here waits to hear that it came
            self._end(found, "DONE")
        else:
            self._ask(found)

    def _ask(self, found: Import) -> None:
        for s in found.sources:
            if min(s.have) < found.end:
                s.link.send({"kind": "GET", "transfer": found.transfer, "head": s.head, "heads": s.heads,
                             "end": found.end, "have": s.have, "consumers": s.consumers})  # fmt: skip

    def on_message(self, link: Any, header: dict[str, Any], payload: Any) -> None:
        """Only for a transfer that still runs, from a link that it was asked of; others are counted as stale."""
        found = self.imports.get(header["transfer"])
        source = next((s for s in found.sources if s.link is link), None) if found else None
        if source is None:
            self.stats["stale"] += 1  # of a transfer that is over: its blocks belong to others now
        elif header["kind"] == "GONE":
            self._fail(found, f"the prefill worker has it no more: {header['why']}")
        else:
            self._on_kv(found, source, header, payload)

    def _on_kv(self, found: Import, source: Source, header: dict[str, Any], payload: Any) -> None:
        layer, first, end = header["layer"], header["first"], header["first"] + header["count"]
        if layer >= self.num_layers or end > found.end or (header["head"], header["heads"]) != (
            source.head, source.heads,
        ):  # fmt: skip
            self.stats["corrupt"] += 1
        elif end <= source.have[layer]:
            self.stats["duplicate"] += 1
        elif first > source.have[layer]:
            self.stats["gap"] += 1
        elif not self.write(found.blocks, header, payload):
            self.stats["corrupt"] += 1
        else:
            source.have[layer] = end
            found.deadline = self.clock() + self.timeout
            self.stats["messages"] += 1
            if all(min(s.have) >= found.end for s in found.sources):
                self._complete(found)

    def on_lost(self, link: Any, why: str) -> None:
        for found in [i for i in self.imports.values() if any(s.link is link for s in i.sources)]:
            self._fail(found, f"the connection to the prefill worker is lost: {why}")

    def check(self) -> None:
        """Whoever has made no progress for `timeout` seconds asks again, `retries` times; then it has failed."""
        now = self.clock()
        for found in [i for i in self.imports.values() if now >= i.deadline]:
            if found.retries == 0:
                self._fail(found, f"no progress for {self.timeout:g} s")
                continue
            found.retries, found.deadline = found.retries - 1, now + self.timeout
            self.stats["retries"] += 1
            self._ask(found)

    def cancel(self, request_id: str) -> None:
        """The request has ended here. From now on nothing of it is written, and its blocks may be freed."""
        for found in [i for i in self.imports.values() if i.request_id == request_id]:
            self._end(found, "CANCEL")
            self.cancelled.append(request_id)

    def _complete(self, found: Import) -> None:
        self.stats["microseconds"] += round((self.clock() - found.started) * 1e6)
        self._end(found, "DONE")
        self.finished.append(found.request_id)

    def _fail(self, found: Import, why: str) -> None:
        self.stats["failed"] += 1
        self._end(found, "CANCEL")
        self.failed[found.request_id] = why

    def _end(self, found: Import, kind: str) -> None:
        del self.imports[found.transfer]
        for s in found.sources:
            s.link.send({"kind": kind, "transfer": found.transfer})

"""From engine to engine: one computes a prompt, the other goes on with it.

Owns links, and the producer and consumer that talk over them; the scheduler and a runner call it. It never computes a
key, and never writes a block of a request that has ended.
vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/` (`pull_scheduler.py`, `pull_worker.py`).
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import contextlib
import queue
import socket
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from engine.distributed import handshake
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.consumer import Consumer
from engine.kv_transfer.frames import checksum
from engine.kv_transfer.heads import num_consumers, tp_sources
from engine.kv_transfer.links import DistributedLink, Link, SharedMemoryLink
from engine.kv_transfer.p2p_scheduler import P2PScheduler
from engine.kv_transfer.params import kv_transfer_params
from engine.kv_transfer.producer import Producer
from engine.output import KVConnectorOutput


class P2PConnector(P2PScheduler):
    """From the engine that computed a prompt to the one that will go on with it: the producer's blocks are the buffer,
    the consumer's request waits outside the batch until all of it has arrived. The wire is the subclass's."""

    link_class: ClassVar[type[Link]] = Link

    def __init__(self, config: KVTransferConfig) -> None:
        super().__init__(config)
        self.host = config.extra("host", "127.0.0.1")
        self.timeout = config.extra("timeout", 10.0)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.links: dict[tuple[str, int], Link] = {}  # those that we made, by address
        self.refused: dict[Link, str] = {}  # of these: whose HELLO named another cache than ours
        self.accepted: list[Link] = []
        self.wire: Callable[[Link, dict, Any], Iterable[tuple[dict, Any]]] | None = None  # faults, for lesson 08
        self.server: socket.socket | None = None
        self.reception: handshake.Reception | None = None
        self.key = handshake.secret()
        self.port, self.closed = 0, False
        if config.is_kv_producer:
            try:
                self.server = socket.create_server((self.host, config.kv_port))
            except (OSError, UnicodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise common.InputError(f"kv_port {config.kv_port}: {why}") from None
            self.port = self.server.getsockname()[1]

    @property
    def address(self) -> dict[str, Any]:
        """Where a decode worker finds us: goes into its kv_transfer_params."""
        return {
            "remote_host": self.host,
            "remote_port": self.port - self.tp_rank,
            "tp_size": self.tp_size,
            "remote_engine_id": self.config.engine_id,
        }

    def has_pending_work(self) -> bool:
        held = self.producer.exports or self.consumer.imports or self.consumer.cancelled or self.loads
        return bool(held) or not self.inbox.empty() or self.producer.is_late()

    # -- the worker's half --

    def register_kv_caches(self, layers: list[torch.Tensor], model: Any) -> None:
        """Producer, consumer, and the thread that takes calls: from here on there are blocks to move."""
        super().register_kv_caches(layers, model)
        lease, retries = self.config.extra("kv_lease_duration", 30.0), self.config.extra("retries", 1)
        self.producer = Producer(len(layers), self.payload, lease)
        self.consumer = Consumer(len(layers), self.write, self.timeout, retries)
        if self.server:
            self.reception = handshake.Reception(self.server, self.key, self.welcome)

    def welcome(self, sock: socket.socket, address: tuple) -> None:
        """Another engine of ours has called. It asks and says when it has enough: none of that has a payload."""
        hello = {"kind": "HELLO", "layout": self.layout(), "engine_id": self.config.engine_id, "port": 0}
        link = self.link_class(self.inbox, self.wake, sock, timeout=self.timeout, hello=hello, max_payload=0)
        self.accepted.append(link)
        if self.closed:  # in the very moment in which somebody came
            link.close()

    def connect(self, address: tuple[str, int]) -> Link:
        """The link to a producer's rank; no payload of it is larger than a message that we could have asked for."""
        if address not in self.links:
            row = max(kv_cache[:, 0, 0].nbytes for kv_cache in self.layers)  # of one position, all our heads
            self.links[address] = self.link_class(
                self.inbox, self.wake, address=address, timeout=self.timeout, max_payload=Producer.PIECE * row
            )
        return self.links[address]

    def start_load_kv(self) -> None:
        """Offer what this step finishes, ask every rank that has a piece of what it needs. Does not wait."""
        for request in self.meta.preempted:
            if self.saves(request):
                self.producer.preempted(kv_transfer_params(request)["transfer_id"])
        for request, blocks, _ in self.meta.to_save:
            transfer = kv_transfer_params(request)["transfer_id"]
            self.names[transfer] = request.request_id
            self.producer.export(transfer, blocks)
        for request, blocks, first, end in self.meta.to_load:
            params = kv_transfer_params(request)
            tp_size, port = params.get("tp_size", 1), params["remote_port"]
            sources = []
            for piece in tp_sources(self.num_kv_heads, tp_size, self.tp_size, self.tp_rank):
                readers = num_consumers(self.num_kv_heads, tp_size, self.tp_size, piece.rank)
                sources.append((self.connect((params["remote_host"], port + piece.rank)), piece, readers))
            self.consumer.start(params["transfer_id"], request.request_id, blocks, first, end, sources)
            for rank in range(tp_size) if self.tp_rank == 0 else ():  # copies of heads that nobody reads from
                if not num_consumers(self.num_kv_heads, tp_size, self.tp_size, rank):
                    done = {"kind": "DONE", "transfer": params["transfer_id"]}
                    self.connect((params["remote_host"], port + rank)).send(done)
        for link, why in self.refused.items():  # HELLO is said once for all requests
            self.consumer.on_lost(link, why)
        self.poll()

    def save_kv_layer(self, layer: int) -> None:
        """This layer's part of the step is in the blocks: off it goes, while the next layer is computed."""
        for request, _, num_tokens in self.meta.to_save:
            self.producer.written(kv_transfer_params(request)["transfer_id"], layer, num_tokens)
        if self.meta.to_save:
            self.poll()
            self.pump()

    def get_finished(self) -> KVConnectorOutput:
        """Ids of requests sent, received or failed since the last step: the scheduler frees or resumes them."""
        self.poll()
        self.pump()
        self.producer.expire()
        self.consumer.check()
        sent = {self.names.pop(transfer) for transfer in self.producer.released if transfer in self.names}
        over = {*self.consumer.finished, *self.consumer.cancelled}
        output = KVConnectorOutput(sent, over, dict(self.consumer.failed))
        for told in (self.producer.released, self.consumer.finished, self.consumer.cancelled, self.consumer.failed):
            told.clear()
        return output

    def pump(self) -> None:
        self.producer.pump(self.put_on_wire)

    def put_on_wire(self, link: Link, header: dict[str, Any], payload: torch.Tensor) -> None:
        header = {**header, "crc": checksum(payload)}
        for each in self.wire(link, header, payload) if self.wire else [(header, payload)]:
            link.send(*each)

    def poll(self) -> None:
        """Everything that the network has brought."""
        while True:
            try:
                link, header, payload = self.inbox.get_nowait()
            except queue.Empty:
                return
            kind = header["kind"]
            if kind == "LOST":
                self.consumer.on_lost(link, header["why"])
                self.producer.on_lost(link)
                self.links = {address: other for address, other in self.links.items() if other is not link}
                self.refused.pop(link, None)
                with contextlib.suppress(ValueError):  # it is ours; or lost before _accept() noted it
                    self.accepted.remove(link)
            elif kind == "HELLO":
                if (theirs := header["layout"]) != (ours := self.layout()):
                    self.refused[link] = f"its cache is of another kind: {theirs}, ours is {ours}"
                    self.consumer.on_lost(link, self.refused[link])
            elif kind in ("KV", "GONE"):
                self.consumer.on_message(link, header, payload)
            elif kind == "GET" and not self.has_heads(header["head"], header["heads"]):
                why = f"heads {self.head} to {self.head + self.heads - 1} are here, and no others"
                link.send({"kind": "GONE", "transfer": header["transfer"], "why": why})
            else:
                self.producer.on_message(link, header)

    def has_heads(self, head: int, heads: int) -> bool:
        """The kernel would read beside them, and the checksum would fit."""
        return heads > 0 and self.head <= head and head + heads <= self.head + self.heads

    def close(self) -> None:
        """End the thread and all links."""
        self.closed = True
        if self.reception:
            self.reception.close()
        elif self.server:
            self.server.close()
        for link in (*self.links.values(), *self.accepted):
            link.close()


class TCPConnector(P2PConnector):
    """Between hosts: the payload is part of the message."""


class SharedMemoryConnector(P2PConnector):
    """On one host: the message names the memory."""

    link_class = SharedMemoryLink


class TorchDistributedConnector(P2PConnector):
    """From tensor to tensor: gloo, or NCCL where the two sides have a GPU each."""

    link_class = DistributedLink

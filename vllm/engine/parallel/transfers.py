"""A connector whose scheduler is here and whose workers are elsewhere: orders in front of a step, answers behind it.

Owns what the engine core knows of each rank's transfers; called by the scheduler and by `RemoteRunner`. It never
touches keys and values. vLLM: `vllm/distributed/kv_transfer/kv_connector/utils.py:KVOutputAggregator`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.connectors import make_connector
from engine.kv_transfer.p2p_scheduler import P2PScheduler
from engine.kv_transfer.params import kv_transfer_params
from engine.output import KVConnectorMetadata, KVConnectorOutput

# The worker's half, one per rank, listens at `kv_port` + rank if it produces, and moves the heads of this rank. Every
# rank says what was sent, received or lost, and a request counts as sent or received when the last rank has said so.
# With nothing to compute, a step carries orders alone.

Order = tuple[str, ...]  # "finish", "forget" or "cancel", and its arguments


class RemoteProducer:
    """In the scheduler's half, in place of a producer: knows which transfers the workers have, and orders."""

    def __init__(self, orders: list[Order]) -> None:
        self.orders = orders
        self.exports: set[str] = set()

    def finish(self, transfer: str) -> bool:
        """True if the workers have it: each will say when it has been read, or when its lease is up."""
        if transfer in self.exports:
            self.orders.append(("finish", transfer))
        return transfer in self.exports

    def forget(self, transfer: str, why: str) -> None:
        self.orders.append(("forget", transfer, why))
        self.exports.discard(transfer)


class RemoteConsumer:
    """In place of a consumer: knows of each fetched request how many ranks have not reported its end yet."""

    def __init__(self, orders: list[Order]) -> None:
        self.orders = orders
        self.imports: dict[str, int] = {}  # request id: ranks that have not reported

    def cancel(self, request_id: str) -> None:
        if request_id in self.imports:
            self.orders.append(("cancel", request_id))


class RemoteConnector(P2PScheduler):
    """The scheduler's half alone: the workers listen."""

    def __init__(self, config: KVTransferConfig) -> None:
        super().__init__(config)
        self.orders: list[Order] = []
        self.producer, self.consumer = RemoteProducer(self.orders), RemoteConsumer(self.orders)
        self.sent: Counter[str] = Counter()  # request id: ranks that need not keep its blocks
        self.why: dict[str, str] = {}  # request id: of the first rank that failed
        self.news, self.looked = KVConnectorOutput(), time.monotonic()

    def attach(self, world_size: int, about: dict[str, Any]) -> None:
        """`about` is what rank 0 says of itself: address, num_kv_heads."""
        self.world_size, self.about = world_size, about
        self.num_kv_heads = about["num_kv_heads"]

    @property
    def address(self) -> dict[str, Any]:
        return self.about["address"]

    def has_pending_work(self) -> bool:
        """Also whenever the workers have not read their mail for a while: only a step makes them do so."""
        held = self.orders or self.producer.exports or self.consumer.imports or self.loads
        return bool(held) or time.monotonic() >= self.looked + (self.patience or 0.0)

    def take_orders(self, meta: KVConnectorMetadata) -> tuple[KVConnectorMetadata, list[Order]]:
        """What travels with a step: copies, and of each request its name and its kv_transfer_params alone."""
        for request, _, _ in meta.to_save:
            transfer = kv_transfer_params(request)["transfer_id"]
            self.names[transfer] = request.request_id
            self.producer.exports.add(transfer)
        for request, _, first, end in meta.to_load:
            if first < end:  # else it has ended here: its prefill engine is told, and there is nothing to wait for
                self.consumer.imports[request.request_id] = self.world_size
        orders, self.looked = list(self.orders), time.monotonic()
        self.orders.clear()
        loads = [(_named(request), list(blocks), first, end) for request, blocks, first, end in meta.to_load]
        saves = [(_named(request), list(blocks), n) for request, blocks, n in meta.to_save]
        return KVConnectorMetadata(loads, saves, list(map(_named, meta.preempted))), orders

    def hear(self, outputs: list[KVConnectorOutput]) -> None:
        """The answers of all ranks to one step (vLLM's `KVOutputAggregator`)."""
        news, imports = self.news, self.consumer.imports
        for output in outputs:
            self.sent.update(output.finished_sending)
            for request_id in output.finished_recving | output.failed_recving.keys():
                imports[request_id] -= 1
            for request_id, why in output.failed_recving.items():
                if self.why.setdefault(request_id, why) is why and imports[request_id]:
                    self.consumer.cancel(request_id)  # the other ranks need not wait for their pieces
        for request_id in [name for name, left in imports.items() if not left]:
            del imports[request_id]
            if why := self.why.pop(request_id, None):
                news.failed_recving[request_id] = why
            else:
                news.finished_recving.add(request_id)
        for transfer, request_id in list(self.names.items()):
            if self.sent[request_id] == self.world_size:
                news.finished_sending.add(request_id)
                self.producer.exports.discard(transfer)
                del self.names[transfer]
        self.sent = Counter({name: n for name, n in self.sent.items() if n and name not in news.finished_sending})

    def get_finished(self) -> KVConnectorOutput:
        news, self.news = self.news, KVConnectorOutput()
        return news


def _named(request: Any) -> Any:
    """Of a request, what a worker's half reads."""
    params = {"kv_transfer_params": kv_transfer_params(request)}
    return SimpleNamespace(request_id=request.request_id, sampling_params=SimpleNamespace(extra_args=params))


# --- In a worker -----------------------------------------------------------------------------------------------------


def own_connector(config: KVTransferConfig | None, rank: int) -> Any:
    """One rank's connector, at a port of its own; None if there is nothing to transfer."""
    if config is None:
        return None
    return make_connector(dataclasses.replace(config, kv_port=config.port_of(rank)))


def carry_out(orders: list[Order], connector: Any) -> None:
    """What the scheduler's half wants done before the next step."""
    for kind, *what in orders:
        if kind == "cancel":
            connector.consumer.cancel(*what)
        elif kind == "forget":
            connector.producer.forget(*what)
            connector.names.pop(what[0], None)
        elif not connector.producer.finish(*what):  # all of its readers have it already
            connector.producer.released.append(*what)

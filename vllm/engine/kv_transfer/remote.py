"""083 · Connectors on workers: lesson 08's transfers for a model that runs on the ranks of lesson 06c.

The connector is then two objects, as in vLLM. The scheduler's half, in the engine core, decides what to fetch, into
which blocks, and when blocks are free; it has no memory and no connection. The worker's half, one per rank, has both:
it listens at `kv_port` + rank, if it produces, and moves the heads of this rank. In front of each step travel the
orders that lesson 08 gives its producer and consumer directly. Behind it, every rank says what was sent, received or
lost, and a request counts as sent or received when the last rank has said so. With nothing to compute, a step
carries orders alone.

Read for this: vLLM 0.32 `distributed/kv_transfer/kv_connector/utils.py` (`KVOutputAggregator`), `v1/base.py`,
`v1/worker/kv_connector_model_runner_mixin.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import dataclasses
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

from engine.kv_transfer import connectors
from engine.parallel import executors

KVConnectorMetadata, KVConnectorOutput = connectors.KVConnectorMetadata, connectors.KVConnectorOutput
Order = tuple[str, ...]  # "finish", "forget" or "cancel", and its arguments


def check(args: Any) -> None:
    """Raises InputError for what a connector cannot do on workers, or with several engines."""
    config, name = args.kv_transfer, "kv_transfer_config: not together with"
    if args.pipeline_parallel_size > 1:
        raise common.InputError(f"{name} pipeline_parallel_size")
    if args.distributed_executor_backend == "ray":
        raise common.InputError(f"{name} distributed_executor_backend ray")
    if config.kv_connector not in ("SharedMemoryConnector", "TCPConnector"):
        raise common.InputError(f"{name} workers or several engines: {config.kv_connector}; allowed: "
                                "SharedMemoryConnector, TCPConnector")  # fmt: skip
    ranks = args.world_size * args.data_parallel_size
    fits = config.kv_port <= 65536 - ranks and (config.kv_port or args.world_size == 1)
    if config.is_kv_producer and not fits:
        raise common.InputError(f"kv_port {config.kv_port}: the r-th rank of all engines listens at kv_port + r, so it "
                                f"must be from 1 to {65536 - ranks}")  # fmt: skip


# --- In the engine core ----------------------------------------------------------------------------------------------


class RemoteProducer:
    """In the scheduler's half, in place of a producer: knows which transfers the workers have, and orders."""

    def __init__(self, orders: list[Order]) -> None:
        self.orders, self.exports = orders, set()

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
        self.orders, self.imports = orders, {}

    def cancel(self, request_id: str) -> None:
        if request_id in self.imports:
            self.orders.append(("cancel", request_id))


class RemoteConnector(connectors.P2PConnector):
    """The scheduler's half alone."""

    def __init__(self, config: connectors.KVTransferConfig) -> None:
        connectors.KVConnectorBase.__init__(self, config)  # no socket: the workers listen
        self.in_use, self.asked, self.names, self.orders = set(), set(), {}, []
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
        return bool(held) or time.monotonic() >= self.looked + self.patience

    def take_orders(self, meta: KVConnectorMetadata) -> tuple[KVConnectorMetadata, list[Order]]:
        """What travels with a step: copies, and of each request its name and its kv_transfer_params alone."""
        for request, _, _ in meta.to_save:
            transfer = connectors.kv_transfer_params(request)["transfer_id"]
            self.names[transfer] = request.request_id
            self.producer.exports.add(transfer)
        for request, _, first, end in meta.to_load:
            if first < end:  # else it has ended here: its prefill engine is told, and there is nothing to wait for
                self.consumer.imports[request.request_id] = self.world_size
        orders, self.looked = list(self.orders), time.monotonic()
        self.orders.clear()
        loads = [(_named(request), list(blocks), *span) for request, blocks, *span in meta.to_load]
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


def _named(request: Any) -> SimpleNamespace:
    params = {"kv_transfer_params": connectors.kv_transfer_params(request)}
    return SimpleNamespace(request_id=request.request_id, sampling_params=SimpleNamespace(extra_args=params))


class ConnectorRemoteRunner(executors.RemoteRunner):
    """Lesson 06c's, with orders in front of each step, and answers of all ranks behind it."""

    def __init__(self, executor: Any, parallel: Any, scheduler: Any, seed: int = 0) -> None:
        super().__init__(executor, parallel, scheduler, seed)
        self.scheduler, self.connector = scheduler, scheduler.connector
        self.connector.attach(executor.world_size, executor.collective_rpc(about)[0])

    def submit(self, output: Any) -> Any:
        """A step on its way; if there is nothing to compute, the transfers have got on when this returns None."""
        message, connector = self.writer.write(output), self.connector
        orders = connector.take_orders(self.scheduler.kv_connector_metadata)
        future = self.executor.submit(execute_step, message, *orders)

        def result() -> Any:
            answers = future.result()
            connector.hear([news for _, news in answers])
            return answers[self.output_rank][0]

        return SimpleNamespace(result=result) if message else result()


def remote_connector_engine(base: type, config: connectors.KVTransferConfig) -> type:
    """Lesson 08's `connector_engine`, for an engine whose runners are with workers."""

    class Engine(base):
        remote_runner_class = ConnectorRemoteRunner

        def collaborators(self) -> dict[str, Any]:
            return super().collaborators() | {"connector": RemoteConnector(config)}

    return Engine


# --- In a worker -----------------------------------------------------------------------------------------------------


def worker_runner(connector_runner: type, config: connectors.KVTransferConfig) -> type:
    """Lesson 08's runner on one rank, with a connector of its own."""

    class Runner(connector_runner):
        def __init__(self, model: Any, scheduler: Any, *args: Any) -> None:
            group = getattr(model, "group", None)
            rank = group.rank_in_group if group else 0
            mine = dataclasses.replace(config, kv_port=config.port_of(rank))
            scheduler.connector = connectors.CONNECTORS[config.kv_connector](mine)
            super().__init__(model, scheduler, *args)

    return Runner


def about(worker: executors.Worker) -> dict[str, Any]:
    """Called on every worker: what the scheduler's half must know of it."""
    connector = worker.runner.connector
    return {"address": connector.address, "num_kv_heads": connector.num_kv_heads}


def execute_step(worker: executors.Worker, message: executors.StepMessage | None, meta: KVConnectorMetadata,
                 orders: list[Order]) -> tuple[Any, KVConnectorOutput]:  # fmt: skip
    """Called on every worker: carry out the orders, run the step if there is one. Returns what
    `Worker.execute_model` does, and what the connector has to say."""
    connector, answer = worker.runner.connector, None
    for kind, *what in orders:
        if kind == "cancel":
            connector.consumer.cancel(*what)
        elif kind == "forget":
            connector.producer.forget(*what)
            connector.names.pop(what[0], None)
        elif not connector.producer.finish(*what):  # all of its readers have it already
            connector.producer.released.append(*what)
    if message is None:
        connector.bind_connector_metadata(meta)
        connector.start_load_kv()
        connector.idle(0.005)  # all requests wait for the network
    else:
        worker.runner.connector_scheduler.kv_connector_metadata = meta
        answer = worker.execute_model(message)
    return answer, connector.get_finished()

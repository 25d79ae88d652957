"""Engine processes of this machine, and a socket to each for every API server and for the coordinator.

Owns the processes, from their start to their end; called by `serve`, with an API server or without one (`headless`). A
connection for each pair: who creates them makes no difference from then on, and the group never reads one.
vLLM: `vllm/v1/engine/utils.py:CoreEngineProcManager`.
"""

from __future__ import annotations

import common

import atexit
import contextlib
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.distributed.group import meeting_point
from engine.parallel.executors import shutdown_all
from engine.parallel.ranks import start_context
from engine.serving.balancer import BALANCERS
from engine.serving.coordinator import DPCoordinator
from engine.serving.core_proc import Factory, serve_mailbox
from engine.serving.dp_client import DPLBClient
from engine.serving.dp_proc import DPEngineCoreProc
from engine.serving.engine_mailbox import EngineMailbox
from engine.serving.pipeline_proc import ParallelEngineCoreProc
from engine.serving.rendezvous import accept_engines, dial, say_aloud

if TYPE_CHECKING:
    pass


class EngineGroup:
    """Engine processes of this machine, and a socket to each for every API server and for the coordinator
    (vLLM: `CoreEngineProcManager`). Engines on other machines dial in (`accept_engines`)."""

    def __init__(
        self,
        factory: Factory,
        args: Any,
        num_engines: int,
        num_clients: int,
        remote: dict[tuple[int, int], socket.socket] | None = None,
    ) -> None:
        """`remote[engine, slot]` are connections of engines elsewhere; slot `num_clients` is the coordinator's."""
        self.num_clients, self.processes = num_clients, []
        self.ours: dict[tuple[int, int], socket.socket] = dict(remote or {})
        slots = range(num_clients + (num_engines > 1))
        local = [i for i in range(num_engines) if (i, 0) not in self.ours]
        if getattr(args, "shares_experts", False):  # the workers of all engines are one group
            self.store = meeting_point()
            args = args.meeting_at(self.store.port)
        threads = max(1, torch.get_num_threads() // max(1, len(local)))
        atexit.register(self.join)
        for engine in local:
            theirs = []
            for slot in slots:
                self.ours[engine, slot], other = socket.socketpair()
                theirs.append(other)
            self.processes.append(start_engine(theirs, num_clients, engine, factory, args, threads))
        self.num_engines = num_engines
        self.coordinator_clients: list[socket.socket | None] = [None] * num_clients
        if num_engines > 1:
            pairs = [socket.socketpair() for _ in range(num_clients)]
            self.coordinator_clients = [ours for ours, _ in pairs]
            coordinator = DPCoordinator([self.ours[i, num_clients] for i in range(num_engines)], [b for _, b in pairs])
            threading.Thread(target=coordinator.run, daemon=True, name="DPCoordinator").start()

    def forget_sockets(self) -> None:
        """After the API servers have got theirs; from then on, an engine ends when they have hung up."""
        for sock in (
            *(s for (_, slot), s in self.ours.items() if slot < self.num_clients),
            *filter(None, self.coordinator_clients),
        ):
            sock.close()

    def sockets_of(self, client: int) -> tuple[list[socket.socket], socket.socket | None]:
        return [self.ours[i, client] for i in range(self.num_engines)], self.coordinator_clients[client]

    def join(self, timeout: float = 5.0) -> None:
        """Wait until the engines have ended, as they do when everybody has hung up; then insist."""
        atexit.unregister(self.join)
        for sock in self.ours.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        stop = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, stop - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def start_engine(  # noqa: PLR0913  what an engine process is started with
    sockets: Sequence[socket.socket], num_clients: int, engine: int, factory: Factory, args: Any, threads: int
) -> Any:
    """A process for one engine. Where there are GPUs enough, engine i gets the i-th group of them."""
    size, gpus = getattr(args, "world_size", 1), torch.cuda.device_count() if common.HAS_GPU else 0
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    mine = [str(d) for d in range(engine * size, (engine + 1) * size)]
    if before is None and gpus >= (engine + 1) * size and gpus > size:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)  # the child reads it before it looks for GPUs
    try:
        args = args.for_engine(engine) if hasattr(args, "for_engine") else args
        coordinator = sockets[num_clients] if len(sockets) > num_clients else None
        process = start_context().Process(
            target=run_engine_core,
            name=f"EngineCore_DP{engine}",
            args=(sockets[:num_clients], coordinator, engine, factory, args, threads),
        )
        process.start()
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    for sock in sockets:
        sock.close()  # the engine's copies are the only ones left, so its death closes the connections
    return process


def run_engine_core(  # noqa: PLR0913
    clients: Sequence[socket.socket],
    coordinator: socket.socket | None,
    engine: int,
    factory: Factory,
    args: Any,
    threads: int = 0,
) -> None:
    """An engine process from start to end. It ends when the last API server has hung up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if threads and not common.HAS_GPU:
        torch.set_num_threads(threads)
    gc.freeze()  # imported libraries are there to stay
    failed = serve_clients(EngineMailbox(clients, coordinator, engine), factory, args)
    shutdown_all()
    os._exit(failed)


def serve_clients(mailbox: EngineMailbox, factory: Factory, args: Any) -> bool:
    """Build an engine and work for the clients of a mailbox, with an eye on the workers. Returns whether it failed."""

    def make_proc(engine: Any, send: Callable[[Any], None]) -> ParallelEngineCoreProc:
        if executor := getattr(engine.core.runner, "executor", None):
            mailbox.watched, mailbox.alive = executor.sentinels, executor.check_health
        together = getattr(engine.core.runner, "lockstep", None) is not None
        return DPEngineCoreProc(engine, send) if together else ParallelEngineCoreProc(engine, send)

    failed = serve_mailbox(factory, args, mailbox.send, mailbox.receive, make_proc)
    if failed:
        mailbox.close()
    return failed


def start_client(factory: Factory, args: Any) -> DPLBClient:
    """The engines of one API server, in processes of this machine and, if the flags say so, of others."""
    group = EngineGroup(factory, args, args.data_parallel_size, 1, accept_engines(args, 1))
    return make_client(args, *group.sockets_of(0), owner=group)


def make_client(  # noqa: PLR0913  whose, to whom, and which of how many
    args: Any,
    engines: Sequence[socket.socket],
    coordinator: socket.socket | None,
    index: int = 0,
    count: int = 1,
    owner: EngineGroup | None = None,
) -> DPLBClient:
    """Front end `index` of `count`, with the routing that the flags ask for."""
    balancer = BALANCERS[args.data_parallel_routing](len(engines), index, count)
    return DPLBClient(engines, coordinator, balancer, owner, getattr(args, "shares_experts", False))


def run_headless(factory: Factory, args: Any, say: Callable[[str], None] = say_aloud) -> int:
    """Engines without an API server. They end when the API servers hang up, or at a signal. Returns the exit code."""

    def stop(*_: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one would interrupt the end
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    local = args.data_parallel_size_local or 1
    ranks = range(args.data_parallel_start_rank, args.data_parallel_start_rank + local)
    processes = []
    try:
        for engine in ranks:
            sockets, clients = dial(args.data_parallel_address, args.data_parallel_rpc_port, engine)
            say(f"engine {engine} serves {args.data_parallel_address}:{args.data_parallel_rpc_port}")
            threads = max(1, torch.get_num_threads() // local)
            processes.append(start_engine(sockets, clients, engine, factory, args, threads))
        for process in processes:
            process.join()
    finally:
        for process in processes:  # they take no signals, and would go on without us
            process.kill()
            process.join()
    return max(abs(process.exitcode) for process in processes)

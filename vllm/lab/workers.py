"""An engine in a process of its own: letters in, tokens out.

Owns the process, and a pipe to it that both end with; called by lesson 08, its numbers, and tests. It never chooses who
gets a request. vLLM: `vllm/v1/engine/core.py:EngineCoreProc`, over ZMQ.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import contextlib
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.config import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.scheduler import make_scheduler
from engine.kv_transfer.base import KVConnectorBase
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.connectors import make_connector
from engine.model import llama, loader
from engine.parallel.ranks import start_context
from engine.request import Request, SamplingParams
from engine.worker.assemble import make_runner
from lab.transfers import Faults

MakeConnector = Callable[[KVTransferConfig], KVConnectorBase]


def make_core(
    model: llama.Llama,
    connector: KVConnectorBase | None = None,
    num_blocks: int = 128,
    block_size: int = 16,
    max_model_len: int = 512,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    prefix_caching: bool = False,
) -> EngineCore:
    """A greedy engine core, with a connector or without one: the engine's scheduler and runner."""
    limits = SchedulerConfig(max_model_len, max_num_seqs, max_num_batched_tokens)
    scheduler = make_scheduler(limits, num_blocks, block_size, prefix_caching, connector=connector)
    return EngineCore(scheduler, make_runner(model, limits, num_blocks, block_size, connector=connector))


def make_request(request_id: str, prompt: Sequence[int], max_tokens: int, **params: Any) -> Request:
    """A greedy request; `params` are its kv_transfer_params."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    sampling.extra_args = {"kv_transfer_params": params} if params else None
    return Request(request_id, list(prompt), sampling)


def run_worker(
    pipe: Any,
    inherited: Sequence[Any],
    model: llama.Llama | str | int | None,
    make: MakeConnector,
    config: dict[str, Any],
    core_args: dict[str, Any],
) -> None:
    """A worker's life: letters in, tokens out. It ends with its pipe, so it cannot outlive whoever started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for end in inherited:  # a pipe is at its end when nobody holds the other one
        end.close()
    torch.set_num_threads(1)
    if not isinstance(model, llama.Llama):  # a number is the seed of a random one
        model = llama.random_model(model) if isinstance(model, int) else loader.load(model)[0]
    connector: Any = make(KVTransferConfig(**config))
    core = make_core(model, connector, **core_args)
    with contextlib.suppress(EOFError, OSError), contextlib.closing(connector):
        pipe.send(("ready", getattr(connector, "address", {})))
        while True:
            while pipe.poll(0 if core.scheduler.has_unfinished_requests() else connector.patience):
                kind, *content = pipe.recv()
                if kind == "add":
                    try:
                        core.add_request(make_request(*content[:3], **content[3]))
                    except common.InputError as error:
                        pipe.send(("output", content[0], [], "error", str(error)))
                elif kind == "abort":
                    core.abort_requests(content)
                elif kind == "fault":  # a prompt is a message for each layer: it comes before the first one is whole
                    connector.wire = Faults(content[0], min(12, model.config.num_hidden_layers))
                elif kind == "stats":
                    pipe.send(("stats", worker_stats(core)))
            for output in core.step() if core.scheduler.has_unfinished_requests() else ():
                pipe.send(("output", output.request_id, output.new_token_ids, output.finish_reason, output.stop_reason))


def worker_stats(core: EngineCore) -> dict[str, int]:
    """What a worker counted, and what it holds; raises AssertionError if its pool is not in order."""
    pool: Any = core.scheduler.kv_cache_manager.block_pool
    connector: Any = core.scheduler.connector
    pool.check()
    found = Counter(connector.stats)
    for part in ("producer", "consumer"):  # of the engine's connectors
        if hasattr(connector, part):
            found.update({f"{part}_{name}": n for name, n in getattr(connector, part).stats.items()})
    return {**found, "owned_blocks": pool.num_blocks - 1 - pool.num_free_blocks}


class Worker:
    """A worker as the router sees it: a name, a pipe, an address for other workers, and whether it is alive."""

    def __init__(
        self,
        name: str,
        model: llama.Llama | str | int | None,
        config: dict[str, Any],
        partners: Sequence[Worker] = (),
        make: MakeConnector = make_connector,
        **core_args: Any,
    ) -> None:
        self.name, self.alive = name, True
        fork = isinstance(model, llama.Llama)  # a fork has its parent's weights, in the same memory; and its pipes
        context = multiprocessing.get_context("fork") if fork else start_context()
        self.pipe, theirs = context.Pipe()
        inherited = [self.pipe, *(other.pipe for other in partners)] if fork else []
        arguments = (theirs, inherited, model, make, config, core_args)
        self.process = context.Process(target=run_worker, args=arguments, daemon=True, name=name)
        self.process.start()
        theirs.close()  # the worker's copy is the only one left: its death is an end of file
        self.address: dict[str, Any] = {}

    def send(self, *letter: Any) -> None:
        """To a dead worker, in vain."""
        with contextlib.suppress(OSError):
            self.pipe.send(letter)

    def ask(self, *letter: Any) -> Any:
        """Send and wait for the answer; tokens that nobody waited for are passed over. Raises EOFError if it dies."""
        if letter:
            self.pipe.send(letter)
        while (heard := self.pipe.recv())[0] == "output":
            pass
        return heard[1]

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def settled(worker: Worker, seconds: float = 10.0) -> dict[str, int]:
    """A worker's counts, once it holds no block any more. Raises CheckFailed if it keeps some."""
    deadline = time.monotonic() + seconds
    while (stats := worker.ask("stats"))["owned_blocks"]:
        if time.monotonic() > deadline:
            raise common.CheckFailed(f"{worker.name}: {stats['owned_blocks']} blocks are still owned")
        time.sleep(0.01)
    return stats

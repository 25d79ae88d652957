"""Engines that hand prompts over, in this process: what tests of connectors, of workers and of the proxy share."""

from __future__ import annotations

import time
from typing import Any

from engine.core.engine_core import EngineCore
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.connectors import make_connector
from engine.kv_transfer.p2p import P2PConnector
from engine.model import llama
from lab import naive, workers
from lab.workers import make_request

WIRES = ["SharedMemoryConnector", "TCPConnector", "TorchDistributedConnector"]
PROMPT = [(7 * i + 3) % 128 for i in range(45)]
TOKENS = 8
SEED = 4  # of a model whose greedy answers depend on every token of the prompt; most random ones repeat one token


def make_core(model: llama.Llama, config: KVTransferConfig | None = None, **sizes: Any) -> EngineCore:
    """An engine with the connector that `config` names."""
    return workers.make_core(model, make_connector(config) if config else None, **sizes)


class pair:
    """A prefill and a decode engine in this process, stepped in turn; both pools must be whole at the end. `kinds` are
    their connectors, if they are not those that `wire` names."""

    def __init__(
        self, model, wire, policy="fail", decode_model=None, extra=None, prefill=None, decode=None, kinds=None, **both
    ):
        extra = {"timeout": 60.0} | (extra or {})
        configs = [
            KVTransferConfig(wire, role, kv_port=0, kv_load_failure_policy=policy, kv_connector_extra_config=extra)
            for role in ("kv_producer", "kv_consumer")
        ]
        make_prefill, make_decode = kinds or (make_connector, make_connector)
        sizes = {"block_size": 16, "num_blocks": 40}, {"block_size": 8, "num_blocks": 80}
        self.cores = [
            workers.make_core(model, make_prefill(configs[0]), **sizes[0] | both | (prefill or {})),
            workers.make_core(decode_model or model, make_decode(configs[1]), **sizes[1] | both | (decode or {})),
        ]

    def __enter__(self):
        return self.cores

    def __exit__(self, kind, *_):
        for core in self.cores:
            connector = core.scheduler.connector
            links = (*connector.links.values(), *connector.accepted)
            connector.close()
            assert all(link.lost for link in links)
            if kind is None:
                assert_idle(core)
                if isinstance(connector, P2PConnector):
                    assert not connector.in_use and not connector.asked, "names are free again"


def assert_idle(core):
    manager = core.scheduler.kv_cache_manager
    manager.block_pool.check()
    if hasattr(connector := core.scheduler.connector, "poll"):
        connector.poll()  # that the other side has hung up
    assert not manager.req_to_blocks and manager.block_pool.num_free_blocks == manager.block_pool.num_blocks - 1
    assert not core.scheduler.has_unfinished_requests()


def generated(model, prompt, n):
    return naive.generate(model, prompt, n)


def submit(prefill, decode, name, prompt, n):
    remote = {"do_remote_prefill": True, "transfer_id": name, **prefill.scheduler.connector.address}
    prefill.add_request(make_request(name, prompt, 1, do_remote_decode=True, transfer_id=name))
    decode.add_request(make_request(name, prompt, n, **remote))


def drain(*cores, each=lambda: None, seconds=60):
    """Step in turn until nobody has anything to do: {request id: (tokens, reason, why)} of the last one's requests."""
    found, deadline = {}, time.monotonic() + seconds
    while any(core.scheduler.has_unfinished_requests() for core in cores):
        assert time.monotonic() < deadline, "somebody waits for ever"
        for core in cores:
            for output in core.step() if core.scheduler.has_unfinished_requests() else ():
                if core is cores[-1]:
                    tokens, _, _ = found.get(output.request_id, ([], None, None))
                    found[output.request_id] = (tokens + output.new_token_ids, output.finish_reason, output.stop_reason)
        each()
    return found


def until(done, *steps, seconds=20):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "that takes too long"
        for step in steps:
            step()


def handed_over(prefill, decode, prompts, n, **options):
    for i, prompt in enumerate(prompts):
        submit(prefill, decode, f"r{i}", prompt, n)
    found = drain(prefill, decode, **options)
    return [found[f"r{i}"][0] for i in range(len(prompts))]


def counts(core, part=None):
    connector = core.scheduler.connector
    return (getattr(connector, part) if part else connector).stats

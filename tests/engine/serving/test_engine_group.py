"""Engines as processes: which one each is, which GPUs it has, with whom it ends."""

from __future__ import annotations

import common

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from engine.engine_args import EngineArgs
from engine.serving import engine_group
from engine.serving.balancer import BALANCERS
from engine.serving.engine_group import make_client, start_engine
from engine.serving.start import make_engine
from support.process_tree import alive


def test_an_engine_is_told_which_of_several_it_is(monkeypatch):
    started = []

    def process(target, name, args):
        started.append(args)
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(engine_group, "start_context", lambda: SimpleNamespace(Process=process))
    about = {"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_port": 7000}
    for args in (EngineArgs(kv_transfer_config=about, data_parallel_size=2), {"any": "other"}):
        start_engine([], 0, 1, make_engine, args, 1)
    (*_, args, _), (*_, others, _) = started
    assert args.kv_transfer.kv_port == 7001 and others == {"any": "other"}


@pytest.mark.parametrize("wish", [None, "3,1"])
def test_every_engine_gets_gpus_of_its_own(monkeypatch, wish):
    """The first engines start before the last: what one was told must not be read as the user's wish by the next."""
    seen = []

    def process(**about):
        return SimpleNamespace(start=lambda: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")))

    monkeypatch.setattr(engine_group, "start_context", lambda: SimpleNamespace(Process=process))
    monkeypatch.setattr(common, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wish) if wish else monkeypatch.delenv("CUDA_VISIBLE_DEVICES", False)
    for engine in range(3):
        start_engine([], 0, engine, make_engine, SimpleNamespace(world_size=2), 1)
    assert seen == ([wish] * 3 if wish else ["0,1", "2,3", None]), "there is nothing left for a third"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == wish


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_engines_without_an_api_server_end_with_the_process_that_was_told_to(number):
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
import common, multiprocessing, signal, time, types
from engine.serving import engine_group as group
engines = multiprocessing.get_context("fork")
signal.signal(signal.SIGINT, signal.default_int_handler)
def start_engine(*_):
    process = engines.Process(target=time.sleep, args=(600,))
    process.start()
    print(process.pid, flush=True)
    return process
group.dial, group.start_engine = lambda *_: ([], 1), start_engine
args = types.SimpleNamespace(data_parallel_size_local=2, data_parallel_start_rank=1, data_parallel_address="",
                             data_parallel_rpc_port=0)
sys.exit(group.run_headless(None, args, lambda text: None))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    engines = []
    try:
        engines += [int(process.stdout.readline()) for _ in range(2)]
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(20) == 0 and not any(map(alive, engines))
    finally:
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("routing", BALANCERS)
def test_a_front_end_without_others_beside_it_is_the_only_one(routing):
    args = SimpleNamespace(data_parallel_routing=routing)
    client = make_client(args, [None, None], None, 0)
    assert client.balancer.client_count == 1 and client.balancer.start == 0
    assert make_client(args, [None, None], None, 1, 2).balancer.start == 1, "each of two begins at another engine"

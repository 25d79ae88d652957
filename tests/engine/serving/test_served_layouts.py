"""The command line's server in every layout: its texts are those of one process, and nothing is left of anybody."""

from __future__ import annotations

import common

import os
import signal
import subprocess
import sys

import httpx
import pytest

from support import servers
from support.ports import free_ports
from support.process_tree import alive, descendants, wait_until_gone
from support.servers import ASKED, FLAGS, ask_all, server
from support.tiers import and_slowly

answers, folder, shipped = servers.answers, servers.folder, servers.shipped


@pytest.mark.parametrize("flags", and_slowly(
    [], [(["-tp", "3"],), (["-dp", "2", "--data-parallel-routing", "prefix", "--api-server-count", "2"],)],
    # More of their kind, and layouts that a test below or one of drafts, adapters or steps ahead serves.
    [(flags.split(),) for flags in (
        "-pp 2", "-pp 3", "-dp 2", "-asc 2", "--distributed-executor-backend mp", "--distributed-executor-backend uni",
    )],
), ids=" ".join)  # fmt: skip
def test_serve(flags, folder, answers):
    with server(folder, *flags) as (client, process, _, _):
        assert ask_all(client, ASKED * 2) == [answers[asked] for asked in ASKED] * 2
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_until_gone(children)


@pytest.mark.slow
def test_adapters_and_drafts_on_two_engines(folder, shipped, answers):
    """Both engines know what the server was started with, and what a client has loaded since."""
    flags = ["-dp", "2", "--enable-lora", "--max-loras", "2", "--lora-modules", f"pirate={shipped['pirate']}",
             "--speculative-config", '{"method": "suffix", "prompt_lookup_min": 1}']  # fmt: skip
    with server(folder, *flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as (client, process, _, url):
        about = {"lora_name": "json", "lora_path": str(shipped["json"])}
        loaded = httpx.post(f"{url}/v1/load_lora_adapter", json=about)
        assert loaded.status_code == 200
        assert ask_all(client, [*answers] * 2) == [*answers.values()] * 2
        unloaded = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "json"})
        assert unloaded.status_code == 200, "both had it"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_headless_engines_on_another_address(folder, answers):
    """The head at 127.0.0.1 has no engine of its own; two dial in from a process that stands for another host."""
    port = str(free_ports(1))
    shared = ["--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port]
    remote = subprocess.Popen([sys.executable, common.HERE / "06_serving.py", "serve", "--headless", *FLAGS, *shared,
                               "--model", folder, "--data-parallel-size-local", "1", "--data-parallel-start-rank", "1"],
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        with server(folder, *shared, "--data-parallel-size-local", "1") as (client, process, lines, _):
            assert any("engine 1 is here" in line for line in lines)
            assert ask_all(client, ASKED * 2) == [answers[asked] for asked in ASKED] * 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert remote.wait(60) == 0, "the engines end when the API server has hung up"
    finally:
        remote.kill()
        remote.wait()
        remote.stdout.close()


@pytest.mark.slow
def test_a_killed_worker_ends_the_server_with_code_1(folder, answers):
    import openai

    with server(folder, "-pp", "2") as (client, process, _, _):
        assert ask_all(client) == [answers[asked] for asked in ASKED]
        workers = [pid for pid in descendants(process.pid) if alive(pid)]
        os.kill(max(workers), signal.SIGKILL)  # the youngest: the last stage
        with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
            for _ in range(100):
                ask_all(client)
        assert process.wait(60) == 1
    wait_until_gone(workers)

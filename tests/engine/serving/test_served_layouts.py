"""The command line's server in every layout: its texts are those of one process, and nothing is left of anybody."""

from __future__ import annotations

import common

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from engine.llm import make_llm_engine
from engine.request import SamplingParams
from support import servers
from support.ports import free_ports
from support.process_tree import alive, descendants, wait_until_gone
from support.servers import FLAGS, TEXTS, ask_all, server

texts = servers.texts


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    ["--tensor-parallel-size", "3"], ["--pipeline-parallel-size", "2"], ["-pp", "3"], ["-dp", "2"],
    ["-dp", "2", "--data-parallel-routing", "prefix", "--api-server-count", "2"], ["-asc", "2"],
    ["--distributed-executor-backend", "mp"], ["--distributed-executor-backend", "uni"],
], ids=" ".join)  # fmt: skip
def test_serve(flags, texts):
    with server(*flags) as (client, process, _, _):
        assert ask_all(client) == texts * 2
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_until_gone(children)


@pytest.mark.slow
def test_adapters_and_drafts_on_two_engines(real_model):
    """Both engines know what the server was started with, and what a client has loaded since."""
    folder = common.HERE / "adapters"
    engine = make_llm_engine(*real_model, enable_lora=True, max_loras=2, max_model_len=256, max_num_seqs=8)
    for name in ("pirate", "json"):
        engine.lora.add_adapter(name, folder / name)
    params, truths = SamplingParams(temperature=0, max_tokens=12), {}
    for name in ("pirate", "json", None):
        for i, text in enumerate(TEXTS):
            engine.add_request(f"{name} {i}", text, params, lora_name=name)
    while engine.has_unfinished_requests():
        truths |= {output.request_id: output.outputs[0].text for output in engine.step()}
    flags = ["-dp", "2", "--enable-lora", "--max-loras", "2", "--lora-modules", f"pirate={folder / 'pirate'}",
             "--speculative-config", '{"method": "suffix", "prompt_lookup_min": 1}']  # fmt: skip
    with server(*flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as (client, process, _, url):
        about = {"lora_name": "json", "lora_path": str(folder / "json")}
        loaded = httpx.post(f"{url}/v1/load_lora_adapter", json=about)
        assert loaded.status_code == 200
        asked = [(name, i) for name in ("pirate", "json", None) for i in range(len(TEXTS))] * 2
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda q: client.completions.create(
                model=q[0] or "smol", prompt=TEXTS[q[1]], temperature=0, max_tokens=12), asked))  # fmt: skip
        assert [x.choices[0].text for x in found] == [truths[f"{name} {i}"] for name, i in asked]
        assert len({truths[f"{name} 0"] for name in ("pirate", "json", None)}) > 1
        unloaded = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "json"})
        assert unloaded.status_code == 200, "both had it"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_headless_engines_on_another_address(texts):
    """The head at 127.0.0.1 has no engine of its own; two dial in from a process that stands for another host."""
    port = str(free_ports(1))
    shared = ["--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port]
    remote = subprocess.Popen([sys.executable, common.HERE / "06_serving.py", "serve", "--headless", *FLAGS, *shared,
                               "--data-parallel-size-local", "1", "--data-parallel-start-rank", "1"],
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        with server(*shared, "--data-parallel-size-local", "1") as (client, process, lines, _):
            assert any("engine 1 is here" in line for line in lines)
            assert ask_all(client) == texts * 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert remote.wait(60) == 0, "the engines end when the API server has hung up"
    finally:
        remote.kill()
        remote.wait()
        remote.stdout.close()


@pytest.mark.slow
def test_a_killed_worker_ends_the_server_with_code_1(texts):
    import openai

    with server("-pp", "2") as (client, process, _, _):
        assert ask_all(client, 1) == texts
        workers = [pid for pid in descendants(process.pid) if alive(pid)]
        os.kill(max(workers), signal.SIGKILL)  # the youngest: the last stage
        with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
            for _ in range(100):
                ask_all(client, 1)
        assert process.wait(60) == 1
    wait_until_gone(workers)

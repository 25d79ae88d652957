"""The server's own life, in this process: what a signal, an end and a model's wishes do to those inside."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import signal
import sys
import time

import httpx
import pytest

from engine.core.engine_core import EngineCore
from engine.engine_args import EngineArgs
from engine.model import chat_template
from engine.model.chat_template import _chat_environment, compiled
from engine.serving.async_llm import AsyncLLM
from engine.serving.core_proc import EngineCoreProc
from engine.serving.server import run_server


def life(capsys, monkeypatch, timeout, ask, number=signal.SIGTERM, place="thread", **flags):
    """`run_server` in this process; `ask(client)` runs while the signal comes. Returns (code, its result)."""

    add_request = AsyncLLM.add_request

    async def run():
        inside = asyncio.Event()

        def noticed(*args, **about):
            inside.set()
            return add_request(*args, **about)

        monkeypatch.setattr(AsyncLLM, "add_request", noticed)
        args = EngineArgs(max_model_len=256, max_num_seqs=4, kv_cache_gib=0.01, engine_place=place, **flags)
        task = asyncio.create_task(run_server(args, "127.0.0.1", 0, [], timeout))
        out = ""
        while "Listening on" not in out:
            await asyncio.sleep(0.01)
            out += capsys.readouterr().out
            assert not task.done(), await task
        async with httpx.AsyncClient(base_url=out.split()[-1], timeout=30) as client:
            asking = asyncio.create_task(ask(client))
            await asyncio.wait_for(inside.wait(), 30)
            await asyncio.sleep(0.02)
            os.kill(os.getpid(), number)
            return await asyncio.wait_for(task, 30), await asking

    return asyncio.run(run())


async def stream_of(client, tokens, prompt=(1, 2, 3), **more):
    events = []
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, **more}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line:
                events.append(line.removeprefix("data: "))
    return events


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_those_inside_finish(tiny_load, capsys, monkeypatch, number):
    code, events = life(capsys, monkeypatch, 20, lambda client: stream_of(client, 60), number)
    assert code == 0 and events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


def test_a_signal_without_patience_ends_them_with_what_there_is(tiny_load, capsys, monkeypatch):
    slow_down(monkeypatch)
    code, events = life(capsys, monkeypatch, 0, lambda client: stream_of(client, 240))
    assert code == 0 and events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"


def test_answers_do_not_end_with_whoever_read_the_console(tiny_load, capsys, monkeypatch):
    """`serve | tee log`, and tee has ended: the line about the signal goes nowhere."""

    said = print

    def say(text="", *more, **how):
        if str(text).startswith("stopping"):
            raise BrokenPipeError
        said(text, *more, **how)

    monkeypatch.setattr(builtins, "print", say)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
    code, events = life(capsys, monkeypatch, 20, lambda client: stream_of(client, 60))
    assert code == 0 and events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


def slow_down(monkeypatch, seconds=0.01):
    step = EngineCoreProc.step
    monkeypatch.setattr(EngineCoreProc, "step", lambda self: (time.sleep(seconds), step(self))[1])


def test_the_first_chat_finds_its_template_compiled(tiny_load, real_model, capsys, monkeypatch):
    made, environment = [], _chat_environment
    monkeypatch.setattr(chat_template, "_chat_environment", lambda: (made.append(1), environment())[1])
    compiled.cache_clear()

    async def ask(client):
        before = len(made)
        tokens = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
        return before, tokens["count"], await stream_of(client, 5)

    code, (before, count, _) = life(capsys, monkeypatch, 20, ask)
    assert (code, before, len(made)) == (0, 1, 1) and count > 2


def test_a_server_says_and_does_what_its_model_wishes(tiny_load, tmp_path, capsys, monkeypatch):
    """The folder's limit holds for a request that asks for more."""
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 7, "top_k": 1}')
    said = []
    monkeypatch.setattr("builtins.print", lambda text, **about: (said.append(text), sys.stdout.write(f"{text}\n")))
    flags = {"generation_config": str(tmp_path), "override_generation_config": '{"temperature": 0.5}'}
    code, events = life(capsys, monkeypatch, 20, lambda client: stream_of(client, 60, logprobs=0), **flags)
    told = [json.loads(event) for event in events[:-1]]
    assert code == 0 and told[-1]["choices"][0]["finish_reason"] == "length"
    assert sum(len((event["choices"][0]["logprobs"] or {"tokens": ()})["tokens"]) for event in told) == 7
    assert 'sampling defaults of the model: {"temperature": 0.5, "top_k": 1, "max_tokens": 7}' in "".join(said)


def test_multiprocessing_can_be_switched_off(tiny_load, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    code, events = life(capsys, monkeypatch, 20, lambda client: stream_of(client, 5), place="process")
    assert code == 0 and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


def test_an_engine_that_dies_ends_the_server_with_code_1(tiny_load, capsys, monkeypatch):
    async def ask(client):
        def broken(*args):
            raise ValueError("out of order")

        monkeypatch.setattr(EngineCore, "execute_model", broken)
        return (await client.post("/v1/completions", json={"prompt": [1]})).json()

    monkeypatch.setattr(os, "kill", lambda *args: None)  # no signal: it ends by itself
    code, found = life(capsys, monkeypatch, 0, ask)
    assert code == 1 and "out of order" in found["error"]["message"]

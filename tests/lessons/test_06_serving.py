"""Lesson 06: a server on the real model, driven by the official client, abused, killed; its pool stays whole."""

from __future__ import annotations

import common

import asyncio
import builtins
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Literal

from support import tokenizing
from engine.serving import sockets
from engine import registry
from lab import cli
from engine.serving.cli import serve_command
from engine.serving.openai.limits import MAX_BODY_BYTES
from engine.serving.server import may_load_adapters, run_server
from lab.running_server import running_server
from engine.parallel import adapters
from engine.serving.server import system_fingerprint
from engine.serving.sockets import bind
from engine.llm import make_llm_engine
from engine.lora.memory import SlotMemory
from engine.quantization.kv_codes import KV_CACHE_DTYPES, block_bytes
from engine.quantization.methods import METHODS
from engine.serving.start import make_engine
from engine.worker import assemble
from engine.worker import cuda_graphs
from engine.request import Request
from engine.request import SamplingParams
from engine.core.engine_core import EngineCore
from engine.engine_args import EngineArgs
from engine.llm import LLM
from engine.llm_engine import LLMEngine
from engine.quantization.loader import load_model
from engine.parallel.memory import kv_cache_memory
from engine.serving.start import warm_up
from support import first_layers
import httpx
import openai
import pydantic
import pytest
import torch

from engine.model import chat_template, folders, llama, loader
from engine.model.chat_template import _chat_environment, compiled
from engine.model.tokenizer import Tokenizer
from support import scripts
from engine.output import EngineCoreOutput
from engine.front_end import CompletionOutput, RequestOutput
from engine.serving.admission import AdmissionControl
from engine.serving.async_llm import AsyncLLM
from engine.serving.balancer import LoadBalancer
from engine.serving.core_proc import EngineCoreProc
from engine.serving.dp_client import DPLBClient
from engine.serving.letters import Admission, EngineCoreOutputs, SchedulerStats

lesson, page = registry.lesson("06_serving"), cli.numbers("06_serving")
from engine.serving import metrics

offline, api = registry.lesson("04b_offline_engine"), registry.lesson("06f_openai_api")
NAME, KEY = "smol", "secret"
BOUND = 12


class Server:
    """One server for the whole file, and clients for it."""

    def __init__(self, url, process, folder):
        self.url, self.process, self.folder = url, process, folder
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def complete(self, prompt, **fields):
        return self.openai.completions.create(
            model=NAME, prompt=prompt, **{"temperature": 0, "max_tokens": 3, **fields}
        )

    def chat(self, text, **fields):
        return self.openai.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": text}],
            **{"temperature": 0, "max_completion_tokens": 6, **fields})  # fmt: skip

    def state(self):
        return self.http.get("/debug/engine").json()

    def check_idle(self, seconds=5.0):
        """Within `seconds`, nothing is left of anybody: not in the front end, not in the core, not in the pool."""
        stop = time.monotonic() + seconds
        while True:
            state = self.state()
            left = {name: n for name, n in state.items() if n and name != "pid"}
            if not left:
                break
            assert time.monotonic() < stop, left
            time.sleep(0.01)
        while True:  # the gauges follow with the engine's next letter
            gauges = page.metrics_of(self.http)
            if not any(
                gauges[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            ):
                return
            assert time.monotonic() < stop, gauges
            time.sleep(0.01)


@pytest.fixture(scope="module", params=first_layers.CUT_OR_WHOLE)
def folder(request, real_model, tmp_path_factory):
    """What the server loads: the real model, in the fast tier its first layers."""
    return first_layers.folder_of(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served_model(folder):
    """The same, in this process."""
    return loader.load(str(folder))


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "stderr"
    template = log.with_name("template.jinja")
    template.write_text(Tokenizer(folders.model_folder()).chat_template + "{{ probe if probe is defined }}")
    flags = ["--model", str(folder), "--served-model-name", NAME, "alias", "--api-key", KEY,
             "--max-model-len", "512", "--max-num-seqs", "8",
             "--max-num-queued-reqs", str(BOUND), "--kv-cache-gib", "0.1", "--max-num-batched-tokens", "64",
             "--scheduling-policy", "priority", "--shutdown-timeout", "5", "--enable-auto-tool-choice",
             "--tool-call-parser", "hermes", "--chat-template", str(template)]  # fmt: skip
    lines = []
    with running_server(*flags, echo=lines.append, VLLM_SERVER_DEV_MODE="1",
                               VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1") as (url, process):  # fmt: skip
        found = Server(url, process, folder)
        found.lines, found.log = lines, log
        yield found


@pytest.fixture(autouse=True)
def pool_is_whole(request):
    """After each test that used the server: nothing is left, and the next request works."""
    yield
    if "server" in request.fixturenames and "killed" not in request.node.name:
        request.getfixturevalue("server").check_idle()


# --- What the official client expects -------------------------------------------------------------------------------


def test_start_up_says_what_it_does(server):
    stages = [line.split()[0] for line in server.lines]
    assert stages == ["device", "load", "profile", "kv", "warm-up", "ready", "Listening"]
    assert "blocks of 16" in server.lines[3] and NAME in server.lines[5]


def test_models(server):
    assert [m.id for m in server.openai.models.list().data] == [NAME, "alias"]
    card = server.openai.models.retrieve("alias")
    assert card.root == str(server.folder), "whoever does not know this name finds the tokenizer there"
    assert card.id == "alias" and card.max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("gpt-9")


def test_the_official_client_reads_none_where_nothing_was_asked_for(server):
    """And another fingerprint says that the same seed may bring another answer."""
    whole = server.complete("a")
    fields = (whole.kv_transfer_params, whole.choices[0].token_ids, whole.choices[0].prompt_logprobs)
    assert fields == (None, None, None) and whole.system_fingerprint.startswith("fp-")
    (*_, last) = server.complete("a", stream=True)
    assert last.system_fingerprint == whole.system_fingerprint
    told = [system_fingerprint(EngineArgs(**flags)) for flags in ({}, {}, {"dtype": "bfloat16"}, {"seed": 1})]
    assert told[0] == told[1] and len(set(told)) == 3


def test_small_endpoints(server):
    for path in ("/health", "/ping", "/version", "/openapi.json", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200, "without a key"
    found = server.http.post("/tokenize", json={"prompt": "Zoë 寿司 👩‍🚀"}).json()
    assert found["count"] == len(found["tokens"]) > 6
    assert server.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "Zoë 寿司 👩‍🚀"}
    assert server.http.post("/detokenize", json={"tokens": [10**7]}).status_code == 400


def test_answers_are_the_offline_engines(server, served_model):
    """Greedy completions, chats and a seeded sample: the server adds nothing and loses nothing."""
    model, tokenizer = served_model
    llm = LLM(model, tokenizer=tokenizer, max_model_len=512, max_num_seqs=8, num_gpu_blocks_override=129)
    (want,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3))
    found = server.complete("The capital of France is", logprobs=2, extra_body={"return_token_ids": True})
    assert found.choices[0].text == want.outputs[0].text and found.choices[0].finish_reason == "length"
    assert found.choices[0].token_ids == want.outputs[0].token_ids
    assert found.usage.prompt_tokens == len(want.prompt_token_ids) and found.usage.completion_tokens == 3
    assert "".join(found.choices[0].logprobs.tokens) == found.choices[0].text
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=6, n=2, presence_penalty=0.5)
    (want,) = llm.chat([{"role": "user", "content": "Say a word."}], params)
    found = server.chat("Say a word.", temperature=0.9, top_p=0.9, seed=11, n=2, presence_penalty=0.5)
    assert [c.message.content for c in found.choices] == [answer.text for answer in want.outputs]
    assert [c.index for c in found.choices] == [0, 1]


def test_streams_say_the_same(server):
    whole = server.chat("Count to three.", logprobs=True, top_logprobs=1)
    chunks = list(server.chat("Count to three.", stream=True, stream_options={"include_usage": True}, logprobs=True,
                              top_logprobs=1))  # fmt: skip
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    streamed = [x.token for c in chunks if c.choices and c.choices[0].logprobs for x in c.choices[0].logprobs.content]
    assert streamed == [x.token for x in whole.choices[0].logprobs.content]
    assert all(x.top_logprobs[0].logprob == x.logprob for x in whole.choices[0].logprobs.content), "greedy is the best"


def test_stop_strings_and_tokens(server):
    answer = server.complete("The capital of France is", max_tokens=8, extra_body={"return_token_ids": True}).choices[0]
    full, ids = answer.text, answer.token_ids
    stop = full[3:7]
    cut = server.complete("The capital of France is", max_tokens=8, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (full[:3], "stop", stop)
    pieces = list(server.complete("The capital of France is", max_tokens=8, stop=[stop], stream=True))
    assert "".join(p.choices[0].text for p in pieces) == full[:3]
    first = server.complete("The capital of France is", extra_body={"stop_token_ids": [ids[1]]}).choices[0]
    assert first.stop_reason == ids[1] and first.finish_reason == "stop"
    kept = server.complete(
        "The capital of France is", max_tokens=8, stop=[stop], extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == full[:7]


def test_prompts_of_every_kind(server):
    ids = server.http.post("/tokenize", json={"prompt": "Water boils at"}).json()["tokens"]
    text = server.complete("Water boils at", echo=True).choices[0].text
    assert text.startswith("Water boils at") and text == "Water boils at" + server.complete(ids).choices[0].text
    both = server.complete(["Water boils at", "The capital of France is"], n=1)
    assert [c.index for c in both.choices] == [0, 1] and both.choices[0].text == text[14:]
    assert server.complete([ids, ids]).choices[1].text == text[14:]


def test_biases_and_penalties_arrive(server):
    token = server.http.post("/tokenize", json={"prompt": " Zebra"}).json()["tokens"][0]
    forced = server.complete(
        "The capital of France is", logit_bias={str(token): 100}, max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert forced.choices[0].token_ids == [token] * 3
    tired = server.complete("The", logit_bias={str(token): 60}, frequency_penalty=2, max_tokens=3,
                            extra_body={"return_token_ids": True, "repetition_penalty": 5.0})  # fmt: skip
    assert tired.choices[0].token_ids[0] == token and tired.choices[0].token_ids != [token] * 3
    long = server.complete("Hi", max_tokens=5, extra_body={"ignore_eos": True, "min_tokens": 5})
    assert long.usage.completion_tokens == 5


def test_a_character_in_pieces_reaches_the_client_whole(server):
    """Guided to say what it never would: several tokens per character, and no U+FFFD on the way."""
    text = "寿司 👩‍🚀 Zoë"
    body = {"structured_outputs": {"choice": [text]}, "return_token_ids": True}
    chunks = list(server.complete("Say:", max_tokens=40, stream=True, extra_body=body))
    assert "".join(c.choices[0].text for c in chunks) == text and not any("\ufffd" in c.choices[0].text for c in chunks)
    assert sum(len(c.choices[0].token_ids) for c in chunks) > len(text), "more tokens than characters"


def test_json_comes_out_as_json(server):
    number = {"type": "integer", "maximum": 9, "minimum": 0}
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "n": number},
              "required": ["city", "n"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = server.chat("A city, as JSON.", response_format=form, max_completion_tokens=40)
    answer = json.loads(found.choices[0].message.content)
    assert answer["city"] in ("Paris", "Rome") and 0 <= answer["n"] <= 9 and found.choices[0].finish_reason == "stop"
    for wrong in ({"regex": "("}, {"choice": []}):
        with pytest.raises(openai.BadRequestError, match="structured_outputs"):
            server.complete("x", extra_body={"structured_outputs": wrong})


@pytest.mark.parametrize("stream", [False, True])
def test_what_no_token_can_write_is_an_error_and_no_answer(server, stream):
    """F1 80 80 80: no token of this model has the byte F1, and an end without it would be half a document."""
    body = {"structured_outputs": {"json": {"const": "\U00040000"}}}
    with pytest.raises(openai.APIError, match="the answer has left its grammar"):
        list(server.complete("x", max_tokens=9, stream=stream, extra_body=body))


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: list[bool] = pydantic.Field(max_length=2)


NAMED = pytest.param({"type": "function", "function": {"name": "Weather"}}, marks=pytest.mark.slow, id="by name")


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("temperature", [0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_a_demanded_tool_is_called(server, choice, temperature):
    """A model of 135 M parameters knows no tools; the official client reads its calls, whole and streamed."""
    ask = {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": choice, "temperature": temperature,
           "max_completion_tokens": 80, "seed": 1, "parallel_tool_calls": False}  # fmt: skip
    messages = [{"role": "user", "content": "How is the weather?"}]
    answer = server.openai.chat.completions.parse(model=NAME, messages=messages, **ask).choices[0]
    (call,) = answer.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    with server.openai.chat.completions.stream(model=NAME, messages=messages, **ask) as stream:
        pieces = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        again = stream.get_final_completion().choices[0]
    assert again.message.tool_calls[0].function.arguments == call.function.arguments == "".join(pieces)
    assert again.finish_reason == answer.finish_reason and len(pieces) > 3
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    said = answer.message.model_dump(exclude_unset=True)
    assert server.openai.chat.completions.create(model=NAME, messages=[*messages, said, result], max_tokens=3).choices


def test_a_tool_that_nobody_demands_is_not_in_the_way(server):
    tools = [openai.pydantic_function_tool(Weather)]
    assert server.chat("Hi", tools=tools).choices == server.chat("Hi", tools=tools, tool_choice="none").choices
    assert server.chat("Hi").choices[0].message.content == server.chat("Hi", tools=tools).choices[0].message.content


def test_a_prompt_is_scored_as_one_pass_would(server, served_model):
    """By `echo` with `logprobs`, as benchmarks ask for it; twice, so that a cached prefix could be in the way."""
    text = "The three laws of motion say that a body at rest remains at rest, and a body in motion remains in motion."
    model, tokenizer = served_model
    want = offline.reference_scores(model, tokenizer.encode(text)).tolist()
    for _ in range(2):
        (choice,) = server.complete(text, max_tokens=1, echo=True, logprobs=1).choices
        found = choice.logprobs
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.token_logprobs[1:-1] == pytest.approx(want, abs=1e-3) and len(want) > 16
        assert "".join(found.tokens) == choice.text and choice.text.startswith(text)
        assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
        assert all(token in top for token, top in zip(found.tokens[1:], found.top_logprobs[1:]))
    assert server.complete(text, max_tokens=0, echo=True).choices[0].text == text


def test_responses_say_what_chats_say(server):
    """The official client reads them whole, streamed, parsed and as a conversation."""
    ask = {"model": NAME, "temperature": 0, "max_output_tokens": 6}
    first = server.openai.responses.create(input="Hi", instructions="Be brief.", **ask)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat = server.openai.chat.completions.create(model=NAME, messages=messages, temperature=0, max_completion_tokens=6)
    assert first.output_text == chat.choices[0].message.content and first.status == "incomplete"
    assert first.usage.total_tokens == chat.usage.total_tokens and first.usage.output_tokens == 6
    with server.openai.responses.stream(input="Hi", instructions="Be brief.", **ask) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == first.output_text
        assert stream.get_final_response().output_text == first.output_text
    said = [{"role": "user", "content": "Hi"}, first.output[0].model_dump(), {"role": "user", "content": "More"}]
    more = server.openai.responses.create(input="More", previous_response_id=first.id, **ask)
    assert more.output_text == server.openai.responses.create(input=said, **ask).output_text
    assert server.openai.responses.retrieve(more.id) == more
    scored = server.openai.responses.create(input="Hi", include=["message.output_text.logprobs"], top_logprobs=2, **ask)
    assert len(scored.output[0].content[0].logprobs) == 6
    with pytest.raises(openai.NotFoundError, match="resp_gone"):
        server.openai.responses.create(input="x", previous_response_id="resp_gone", **ask)
    server.check_idle()


BY_NAME = pytest.param({"type": "function", "name": "Weather"}, marks=pytest.mark.slow, id="by name")


@pytest.mark.parametrize("choice", ["required", BY_NAME])
def test_a_response_calls_and_hears_the_answer(server, choice):
    ask = {"model": NAME, "temperature": 0, "max_output_tokens": 80, "input": "How is the weather?",
           "tools": [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}],
           "tool_choice": choice, "parallel_tool_calls": False}  # fmt: skip
    (call,) = server.openai.responses.parse(**ask).output
    Weather.model_validate_json(call.arguments)
    with server.openai.responses.stream(**ask) as stream:
        pieces = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        (again,) = stream.get_final_response().output
    assert "".join(pieces) == again.arguments == call.arguments and len(pieces) > 3 and call.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    given = [{"role": "user", "content": ask["input"]}, call.model_dump(exclude={"parsed_arguments"}), result]
    assert server.openai.responses.create(model=NAME, input=given, max_output_tokens=3).output_text
    parsed = server.openai.responses.parse(model=NAME, input="Rome?", text_format=Weather, temperature=0)
    assert isinstance(parsed.output_parsed, Weather)


def test_a_template_takes_the_place_of_the_models_own(server):
    """The one that this server was started with ends with a variable."""
    plain = server.chat("Hi", max_completion_tokens=1).usage.prompt_tokens
    probe = {"chat_template_kwargs": {"probe": " one two three"}}
    assert server.chat("Hi", max_completion_tokens=1, extra_body=probe).usage.prompt_tokens == plain + 3


def test_a_prefix_is_found_again_unless_it_is_salted(server):
    prompt = "A long story about a whale, a lighthouse and a very patient librarian, told once more. " * 3
    first, second = server.complete(prompt, max_tokens=1), server.complete(prompt, max_tokens=1)
    assert second.usage.prompt_tokens_details.cached_tokens >= 16 > first.usage.prompt_tokens_details.cached_tokens
    salted = server.complete(prompt, max_tokens=1, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert first.choices[0].text == second.choices[0].text == salted.choices[0].text


# --- What clients should not do -------------------------------------------------------------------------------------


def test_errors_of_the_official_client(server):
    ask = server.complete
    for error, act in (
        (openai.NotFoundError, lambda: server.openai.completions.create(model="gpt-9", prompt="x")),
        (openai.BadRequestError, lambda: ask("x", temperature=3)), (openai.BadRequestError, lambda: ask("")),
        (openai.BadRequestError, lambda: ask("x", max_tokens=600)),
        (openai.BadRequestError, lambda: ask("word " * 600)),
        (openai.BadRequestError, lambda: ask("x", suffix="y")), (openai.BadRequestError, lambda: ask([10**6])),
        (openai.BadRequestError, lambda: server.chat("x", extra_body={"tools": []})),
        (openai.AuthenticationError, lambda: server.openai.with_options(api_key="wrong").models.list()),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            act()
        assert caught.value.body["message"] and "Traceback" not in str(caught.value)


def test_bytes_that_are_no_request(server):
    for content, status in (
        (b'{"prompt": "x', 400),
        (b"\xff" * 100, 400),
        (b"x" * (MAX_BODY_BYTES + 1), 413),
        (b"", 400),
    ):
        found = server.http.post("/v1/completions", content=content)
        assert found.status_code == status and set(found.json()["error"]) == {"message", "type", "param", "code"}
    assert server.http.post("/v1/completions", json={"prompt": "x " * 1_000_000}).status_code == 400


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_hangs_up_is_out_at_the_next_step(server, stream):
    long = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "stream": stream}
    aborted = success(server, "abort")
    if stream:
        with server.http.stream("POST", "/v1/completions", json=long) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/completions", json=long, timeout=0.3)
    start = time.monotonic()
    server.check_idle(3)
    assert time.monotonic() - start < 2, "480 tokens would take longer"
    assert success(server, "abort") == aborted + 1
    assert server.complete("Water boils at").choices[0].text


def success(server, reason):
    lines = [
        x for x in server.http.get("/metrics").text.splitlines() if "request_success_total" in x and f'"{reason}"' in x
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_full_server_refuses_and_recovers(server):
    """Twelve inside is the bound; a thirteenth is told to come back, and can when there is room."""
    rejected = page.metrics_of(server.http).get("admission_rejections_total", 0)
    body = {"model": NAME, "prompt": "Once", "max_tokens": 200, "n": BOUND, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: a generator that is dropped closes the connection
        next(lines)
        stop = time.monotonic() + 5
        while page.metrics_of(server.http)["num_requests_waiting"] != BOUND - 8:  # eight seats
            assert time.monotonic() < stop
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError) as full:
            server.complete("x")
        assert full.value.status_code == 503 and full.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="ever holds"):
            server.complete("x", temperature=1, n=BOUND + 1)
        assert page.metrics_of(server.http)["admission_rejections_total"] == rejected + 1
    retrying = server.openai.with_options(max_retries=3)
    assert retrying.completions.create(model=NAME, prompt="x", max_tokens=2).choices[0].text


def drive(server, clients, tokens):
    """`clients` at once through the asynchronous official client, streaming and not, against one after the other."""
    prompts = [page.PROMPTS[i % 4] for i in range(clients)]
    want = {prompt: server.complete(prompt, max_tokens=tokens).choices[0].text for prompt in set(prompts)}

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=50, timeout=120) as client:

            async def one(i):
                common_fields = {"model": NAME, "prompt": prompts[i], "temperature": 0, "max_tokens": tokens}
                if i % 2:
                    return (await client.completions.create(**common_fields)).choices[0].text
                stream = await client.completions.create(**common_fields, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(clients)))

    assert asyncio.run(run()) == [want[prompt] for prompt in prompts]


def test_concurrent_clients_read_what_one_would(server):
    drive(server, 8, 3)


@pytest.mark.slow
def test_64_concurrent_clients(server):
    """Five times the bound: the client's retries bring everybody through."""
    drive(server, 64, 6)


def test_an_important_request_overtakes(server):
    """--scheduling-policy priority: of two who wait for the same seat, the more important one gets it."""
    body = {"model": NAME, "prompt": "Once", "max_tokens": 250, "ignore_eos": True, "stream": True}
    finished, threads, stop = {}, [], time.monotonic() + 60

    def ask(name, priority):
        server.complete(name, max_tokens=8, extra_body={"priority": priority, "ignore_eos": True})
        finished[name] = time.monotonic()

    with server.http.stream("POST", "/v1/completions", json=body | {"n": 7}) as seven:
        next(lines := seven.iter_lines())  # kept: a generator that is dropped closes the connection
        with server.http.stream("POST", "/v1/completions", json=body) as eighth:
            next(more := eighth.iter_lines())
            for waiting, (name, priority) in enumerate((("later", 5), ("sooner", 4)), 1):
                threads.append(threading.Thread(target=ask, args=(name, priority)))
                threads[-1].start()
                while page.metrics_of(server.http)["num_requests_waiting"] < waiting:
                    assert time.monotonic() < stop
                    time.sleep(0.005)
            assert not finished, "all seats are taken by priority 0"
        del more  # one seat is free now
        for thread in threads:
            thread.join(20)
    del lines
    assert finished["sooner"] < finished["later"]


def test_metrics_have_vllms_names_and_count(server):
    before = page.metrics_of(server.http)
    server.complete("Water boils at", max_tokens=5, extra_body={"ignore_eos": True})
    server.check_idle()
    after = page.metrics_of(server.http)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    for name in ("request_success_total", "e2e_request_latency_seconds_count", "time_to_first_token_seconds_count",
                 "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
                 "request_decode_time_seconds_count", "request_inference_time_seconds_count",
                 "request_time_per_output_token_seconds_count"):  # fmt: skip
        assert grown[name] == 1, name
    assert grown["generation_tokens_total"] == 5 == grown["request_generation_tokens_sum"]
    assert grown["inter_token_latency_seconds_count"] == 4
    assert (
        grown["prompt_tokens_total"] == 3 == grown["prefix_cache_queries_total"] == grown["request_prompt_tokens_sum"]
    )
    assert grown["iteration_tokens_total_sum"] == 3 + 4 and grown["iteration_tokens_total_count"] == 5
    assert grown["request_params_n_sum"] == 1 and grown["request_max_num_generation_tokens_sum"] == 5
    assert grown["request_params_max_tokens_sum"] == 5 and grown["prompt_tokens_cached_total"] == 0
    assert grown["request_prefill_kv_computed_tokens_sum"] == 3 and after["cache_config_info"] == 1
    whole = grown["e2e_request_latency_seconds_sum"]
    parts = sum(grown[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    assert 0 < parts <= whole * 1.05 + 0.02 and grown["time_to_first_token_seconds_sum"] < whole


def test_of_a_requests_answers_the_longest_counts():
    """`n` and the longest are observed once, when all have ended."""
    logger = metrics.PrometheusStatLogger("m")
    request = SimpleNamespace(arrival_time=0.0, num_prompt_tokens=9, sampling_params=SamplingParams(max_tokens=50))
    sequences = {f"{i}_r": SimpleNamespace(request=request, caller=SimpleNamespace(request_id="r"), index=i)
                 for i in range(3)}  # fmt: skip
    outputs = [EngineCoreOutput(name, [1] * n) for name, n in zip(sequences, (4, 7, 2))]
    letter = EngineCoreOutputs(outputs, admitted={name: (0.0, 8, 0) for name in sequences})
    logger.record(letter, sequences)
    observed = {}
    for last in range(3):
        answers = [SimpleNamespace(index=i, finish_reason="stop" if i <= last else None) for i in range(3)]
        about = {"request_id": "r", "prompt_token_ids": [0] * 9, "finished": last == 2}
        logger.record_finished(SimpleNamespace(outputs=answers, **about))
        for name in ("params_n", "max_num_generation_tokens", "params_max_tokens", "prefill_kv_computed_tokens"):
            labels = {"model_name": "m", "engine": "0"}
            found = (
                logger.registry.get_sample_value(f"vllm:request_{name}_{part}", labels) for part in ("count", "sum")
            )
            observed.setdefault(name, []).append(tuple(found))
    once = [(0, 0), (0, 0)]
    assert observed == {"params_n": [*once, (1, 3)], "max_num_generation_tokens": [*once, (1, 7)],
                        "params_max_tokens": [(1, 50), (2, 100), (3, 150)],
                        "prefill_kv_computed_tokens": [(1, 1), (2, 2), (3, 3)]}  # fmt: skip
    logger.record(EngineCoreOutputs(admitted={name: (0.0, 8, 0) for name in sequences}), sequences)
    logger.record_abort(sequences.values())  # the same again, and its client hangs up
    aborted = [SimpleNamespace(index=i, finish_reason="abort") for i in range(3)]
    logger.record_finished(SimpleNamespace(outputs=aborted, **about))
    assert logger.registry.get_sample_value("vllm:request_params_n_count", labels) == 1
    assert not logger.answers and not logger.times


def test_an_answer_that_failed_before_its_first_token_took_no_time():
    logger = metrics.PrometheusStatLogger("m")
    request = SimpleNamespace(arrival_time=time.time(), num_prompt_tokens=9, sampling_params=SamplingParams())
    sequences = {"r": SimpleNamespace(request=request, caller=SimpleNamespace(request_id="r"), index=0)}
    failed = [EngineCoreOutput("r", [], "error", "no token can be chosen")]
    logger.record(EngineCoreOutputs(failed, admitted={"r": (0.0, 0, 0)}), sequences)
    answers = [SimpleNamespace(index=0, finish_reason="error")]
    logger.record_finished(SimpleNamespace(outputs=answers, request_id="r", prompt_token_ids=[0] * 9, finished=True))
    said = logger.expose().decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="error",model_name="m"} 1.0' in said
    assert not re.search(r"_seconds_sum\{.*\} -", said) and not logger.times and not logger.answers


def test_where_prompts_came_from_who_waits_and_who_was_preempted():
    def said(logger):
        """{name: value}, {name and label: value}; zeros, too."""
        return {" ".join([s.name.removeprefix("vllm:"), *(v for k, v in s.labels.items() if k not in ours)]): s.value
                for family in logger.registry.collect() for s in family.samples
                if s.name.endswith(("_total", "_count", "_sum", "waiting", "_reason"))}  # fmt: skip

    ours = {"model_name", "engine"}
    sequences = {}
    for name, length in (("a", 20), ("b", 9)):
        request = Request(name, [1] * length, SamplingParams())
        sequences[name] = SimpleNamespace(request=request, caller=SimpleNamespace(request_id=name), index=0)
    plain, logger = metrics.PrometheusStatLogger("m"), metrics.PrometheusStatLogger("m", connector=True)
    names = ["prompt_tokens_by_source_total local_compute", "prompt_tokens_by_source_total local_cache_hit",
             "prompt_tokens_by_source_total external_kv_transfer", "prefix_cache_queries_total",
             "prefix_cache_hits_total", "external_prefix_cache_queries_total", "external_prefix_cache_hits_total",
             "prompt_tokens_cached_total", "prompt_tokens_total", "num_preemptions_total",
             "request_num_preemptions_count", "request_num_preemptions_sum"]  # fmt: skip
    assert [said(logger)[name] for name in names] == [0] * len(names)
    assert said(logger)["num_requests_waiting_by_reason deferred"] == 0
    admitted = {"a": Admission(0.5, 12, 8), "b": Admission(0.0, 0, 0)}
    for each in (plain, logger):
        each.record(EngineCoreOutputs(admitted=admitted, preempted=["b", "gone"]), sequences)
        each.record(EngineCoreOutputs(scheduler_stats=SchedulerStats(1, 2, 0.5, 3),
                                                   preempted=["b", "a"]), sequences)  # fmt: skip
        answer = SimpleNamespace(index=0, finish_reason="stop")
        about = {"request_id": "b", "prompt_token_ids": [0] * 9, "finished": True, "outputs": [answer]}
        each.record_finished(SimpleNamespace(**about))
    assert [said(logger)[name] for name in names] == [17, 4, 8, 29, 4, 25, 8, 12, 29, 3, 1, 2]
    assert said(plain) == said(logger) | {f"external_prefix_cache_{x}_total": 0 for x in ("queries", "hits")}
    waiting = [said(logger)[f"num_requests_waiting{x}"] for x in ("", "_by_reason capacity", "_by_reason deferred")]
    assert waiting == [5, 2, 3]


def test_a_router_reads_which_adapters_run_and_which_wait():
    logger = metrics.PrometheusStatLogger("m", max_loras=2)
    sequences = {}
    for name, lora in (("a", "pirate"), ("b", None), ("c", "json"), ("d", "pirate"), ("e", "report")):
        request = Request(name, [1] * 9, SamplingParams(), lora_name=lora)
        sequences[name] = SimpleNamespace(request=request, caller=SimpleNamespace(request_id=name), index=0)

    def labels(admitted, outputs=()):
        admitted = {name: (0.0, 0, 0) for name in admitted}
        logger.record(EngineCoreOutputs(list(outputs), admitted=admitted), sequences)
        (family,) = (f for f in logger.registry.collect() if f.name == "vllm:lora_requests_info")
        (sample,) = family.samples
        assert abs(sample.value - time.time()) < 60 and sample.labels["max_lora"] == "2"
        return sample.labels["waiting_lora_adapters"], sample.labels["running_lora_adapters"]

    assert labels("abc") == ("pirate,report", "json,pirate")
    heard = [EngineCoreOutput("c", [1], "stop"), EngineCoreOutput("a", [1])]
    assert labels("d", heard) == ("report", "pirate")
    sequences.pop("d")  # `a` wrote a token, and goes on
    assert labels("", [EngineCoreOutput("a", [1])]) == ("report", "json,pirate")


def test_where_the_time_of_a_request_went(monkeypatch):
    """Two come at 100 s. `a` waits 2 s and writes at 105 and, two tokens, at 107; `b`'s queue time, by the engine's
    clock, ends after its only token came. Who has left, and an output without tokens, change nothing."""
    logger, now = metrics.PrometheusStatLogger("m"), [103.0]
    monkeypatch.setattr(metrics.time, "time", lambda: now[0])
    sequences = {}
    for name, max_tokens in (("a", 8), ("b", None)):
        params = SimpleNamespace(max_tokens=max_tokens)
        request = SimpleNamespace(arrival_time=100.0, num_prompt_tokens=3, sampling_params=params)
        sequences[name] = SimpleNamespace(request=request, caller=SimpleNamespace(request_id=name), index=0)
    admitted = {"a": (2.0, 0, 0), "b": (9.0, 0, 0), "gone": (4.0, 0, 0)}
    for at, tokens in ((103, {"a": [], "gone": [1]}), (105, {"a": [1], "b": [1]}), (107, {"a": [2, 3]})):
        now[0] = float(at)
        outputs = [SimpleNamespace(request_id=name, new_token_ids=ids) for name, ids in tokens.items()]
        stats = SchedulerStats(0, 0, 0.0, num_scheduled_tokens=0 if at == 103 else 5)
        logger.record(EngineCoreOutputs(outputs, stats, admitted=admitted if at == 103 else {}), sequences)
    for name in sequences:
        answer = SimpleNamespace(index=0, finish_reason="stop")
        about = {"request_id": name, "prompt_token_ids": [0] * 3, "finished": True, "outputs": [answer]}
        logger.record_finished(SimpleNamespace(**about))
    logger.record_rejection(2)
    logger.describe(SimpleNamespace(block_size=16, num_gpu_blocks=99, enable_prefix_caching=True))
    known = {}
    for family in logger.registry.collect():
        for sample in family.samples:
            if sample.name.endswith(("_total", "_count", "_sum")):
                known.setdefault(sample.name.removeprefix("vllm:"), []).append(sample.value)
    found = {name: (*known[f"{name}_count"], *known[f"{name}_sum"]) for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_params_max_tokens",
        "iteration_tokens_total")}  # fmt: skip
    assert found == {
        "time_to_first_token_seconds": (2, 5 + 5), "inter_token_latency_seconds": (1, 2),
        "request_time_per_output_token_seconds": (1, (107 - 105) / 2), "e2e_request_latency_seconds": (2, 7 + 5),
        "request_queue_time_seconds": (2, 2 + 9), "request_prefill_time_seconds": (2, 3 + 0),
        "request_decode_time_seconds": (2, 2 + 0), "request_inference_time_seconds": (2, 5 + 0),
        "request_params_max_tokens": (1, 8), "iteration_tokens_total": (2, 10),
    }  # fmt: skip
    assert known["generation_tokens_total"] == [4] and known["admission_rejections_total"] == [2]
    about = {"engine": "0", "block_size": "16", "num_gpu_blocks": "99", "enable_prefix_caching": "True"}
    assert logger.registry.get_sample_value("vllm:cache_config_info", about) == 1


def test_a_gap_that_ends_in_several_tokens_is_one_gap(monkeypatch):
    """With drafts a step brings several: the client waits once for all of them, and so does vLLM's histogram say."""
    logger, now = metrics.PrometheusStatLogger("m"), [100.0]
    monkeypatch.setattr(metrics.time, "time", lambda: now[0])
    request = SimpleNamespace(arrival_time=99.5, num_prompt_tokens=3, sampling_params=SamplingParams())
    sequences = {"r": SimpleNamespace(request=request, caller=SimpleNamespace(request_id="r"), index=0)}
    for tokens in ([1], [2, 3, 4, 5], [6, 7], [8]):
        admitted = {"r": (0.0, 0, 0)} if tokens == [1] else {}
        outputs = [SimpleNamespace(request_id="r", new_token_ids=tokens)]
        logger.record(EngineCoreOutputs(outputs, admitted=admitted), sequences)
        now[0] += 0.04
    found = {line.split("{")[0]: float(line.split()[-1]) for line in logger.expose().decode().splitlines()
             if line.startswith("vllm:inter_token_latency_seconds_")}  # fmt: skip
    assert found["vllm:inter_token_latency_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.12)


def test_drafts_are_counted_where_they_were_verified():
    """The engines say how many there were so far; a letter that was never sent is in the next one."""
    logger, client = metrics.PrometheusStatLogger("m", 3), DPLBClient([None, None], None, LoadBalancer(2))

    def drafted():
        return {(sample.name.removeprefix("vllm:spec_decode_num_"), sample.labels.get("position")): sample.value
                for family in logger.registry.collect() if "spec_decode" in family.name
                for sample in family.samples if sample.name.endswith("_total")}  # fmt: skip

    assert len(drafted()) == 6 and not any(drafted().values())
    for engine, counts in ((0, [2, 5, 3, 2, 1]), (1, [1, 1, 1, 1]), (0, [4, 11, 6, 3, 2, 1])):
        stats = SchedulerStats(0, 0, 0.0, spec_decoding=counts)
        letter = EngineCoreOutputs(scheduler_stats=stats)
        logger.record(client.take(engine, letter), {})
    by_place = {("accepted_tokens_per_pos_total", str(i)): n for i, n in enumerate((4, 2, 1))}
    assert drafted() == by_place | {("drafts_total", None): 5, ("draft_tokens_total", None): 12,
                                    ("accepted_tokens_total", None): 7}  # fmt: skip
    assert b"spec_decode" not in metrics.PrometheusStatLogger("m").expose()


SHORT = {"/chat/completions": {"max_tokens": 2, "max_completion_tokens": 2, "n": 1},
         "/completions": {"max_tokens": 2, "n": 1}, "/responses": {"max_output_tokens": 2}}  # fmt: skip


@pytest.mark.slow
def test_schemathesis(server):
    """The OpenAPI document, exercised. Only what is not 2xx or one of our own errors is a finding."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses = {}
    for result in schema.get_all_operations():
        operation = result.ok()

        def check(case):
            if isinstance(case.body, dict):  # short answers
                case.body |= next((short for path, short in SHORT.items() if case.path.endswith(path)), {})
            found = case.call(headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
            statuses[found.status_code] = statuses.get(found.status_code, 0) + 1
            assert found.status_code < 500 or found.status_code == 503, (case.body, found.text)

        from hypothesis import given

        quick = settings(
            max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
        quick(given(case=operation.as_strategy())(check))()
    assert set(statuses) <= {200, 400, 404, 405, 413, 503} and statuses[400] > 20


# --- The engine dies: the last test that uses the server ------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL])
def test_zz_a_killed_engine_turns_everything_red(server, how):
    """Whoever waits hears of it at once, in a stream and outside; /health is red; the end of whoever started it, which
    closes its input, ends it with code 1."""
    pid, heard = server.state()["pid"], {}
    for ignored in (signal.SIGTERM, signal.SIGINT):  # whole process groups get these; the front end decides
        os.kill(pid, ignored)
    assert server.complete("Water boils at").choices[0].text
    long = {"model": NAME, "prompt": "Once", "max_tokens": 450, "ignore_eos": True}

    def whole():
        heard["whole"] = server.http.post("/v1/completions", json=long)

    thread = threading.Thread(target=whole)
    with server.http.stream("POST", "/v1/completions", json=long | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        thread.start()
        while server.state()["callers"] < 2:
            time.sleep(0.01)
        os.kill(pid, how)
        start = time.monotonic()
        rest = [line for line in lines if line]
        thread.join(10)
        assert time.monotonic() - start < 3
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["error"]["code"] == 500
    assert "EngineCore is dead" in rest[-2]
    assert heard["whole"].status_code == 500 and "EngineCore is dead" in heard["whole"].json()["error"]["message"]
    assert httpx.get(server.url + "/health").status_code == 503
    assert httpx.get(server.url + "/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    with pytest.raises(openai.InternalServerError):
        server.complete("x")
    server.process.stdin.close()
    assert server.process.wait(15) == 1, "whoever supervises it must see that it did not end well"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# --- An engine from flags -------------------------------------------------------------------------------------------

TRANSFER = '{"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 0}'
STORE = '{"kv_connector": "StoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"folder": "x"}}'


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"trust_remote_code": True}, "refused"), ({"speculative_config": '{"method": "magic"}'}, "method"),
     ({"lora_modules": ["a=b"]}, "--enable-lora"),
     ({"max_num_seqs": 0}, "max_num_seqs"), ({"block_size": 0}, "block_size"), ({"scheduling_policy": "lifo"}, "fcfs"),
     ({"gpu_memory_utilization": 1.5}, "gpu_memory"), ({"kv_cache_gib": 0}, "kv_cache_gib"), ({"seed": -1}, "seed"),
     ({"kv_cache_gib": 1e9}, "at most 1048576"), ({"max_model_len": 1}, "at least 2"),
     ({"max_num_seqs": 10**20}, "at most 65536"), ({"served_model_name": [""]}, "must not be empty"),
     ({"served_model_name": ["a", ""]}, "must not be empty"),
     ({"quantization": "magic"}, "quantization"), ({"kv_cache_dtype": "int1"}, "kv_cache_dtype"),
     ({"num_gpu_blocks_override": 1}, "at least 2"), ({"engine_place": "cloud"}, "process"),
     ({"kv_transfer_config": '{"kv_role": "kv_both"}'}, "kv_connector"), ({"kv_transfer_config": "{"}, "not JSON"),
     ({"kv_transfer_config": TRANSFER, "kv_cache_dtype": "fp8"}, "not together with --kv-cache-dtype"),
     ({"kv_transfer_config": STORE, "enable_lora": True}, "--enable-lora if blocks go to a store"),
     ({"kv_transfer_config": STORE, "data_parallel_size": 2}, "not together with workers or several engines"),
     *(({name: value}, f"{name} {value!r}: must be a whole number of at least {low}")
       for name, low in (("long_prefill_token_threshold", 0), ("tensor_parallel_size", 1),
                         ("pipeline_parallel_size", 1), ("data_parallel_size", 1), ("data_parallel_size_local", 0),
                         ("data_parallel_start_rank", 0), ("api_server_count", 1), ("block_size", 1))
       for value in (low - 1, "x", 1.0, True)),
     *(({name: value}, f"{name} {value!r}: must be a number above 0")
       for name in ("gpu_memory_utilization", "kv_cache_gib") for value in (0, -1, "x", float("nan"), True)),
     ({"dtype": "x"}, "dtype 'x': must be one of auto, float32"),
     ({"override_generation_config": "[1]"}, "must be a JSON object"),
     *(({"enable_lora": True} | limits, name) for name, limits in (
         ("max_loras 0", {"max_loras": 0}), ("max_lora_rank 0", {"max_lora_rank": 0}),
         ("max_cpu_loras 1", {"max_loras": 2, "max_cpu_loras": 1}))),
     ({"tool_call_parser": "magic"}, "hermes"), ({"enable_auto_tool_choice": True}, "--tool-call-parser"),
     ({"chat_template": "no/such.jinja"}, "no/such.jinja"), ({"chat_template": "{% if %}"}, "chat template: line 1")],
)  # fmt: skip
def test_flags_that_are_refused(wrong, words):
    with pytest.raises(common.InputError, match=words):
        EngineArgs(**wrong)


@pytest.mark.parametrize(
    ("flags", "lower"),
    [({"num_gpu_blocks_override": 10**20}, "num_gpu_blocks_override"), ({"kv_cache_gib": 1e6}, "kv_cache_gib"),
     ({"block_size": 10**20}, "block_size")],
)  # fmt: skip
def test_a_cache_that_no_memory_holds_is_refused_at_once(tiny_load, flags, lower):
    """It once took minutes and all of the memory to find that out."""
    start = time.perf_counter()
    with pytest.raises(common.InputError, match=f"KV cache: .* GiB in blocks of .*; lower {lower}"):
        make_engine(EngineArgs(**{"max_model_len": 64, **flags}))
    assert time.perf_counter() - start < 5


def test_an_empty_key_is_none(monkeypatch):
    asked = []
    monkeypatch.setattr(sockets, "set_ulimit", lambda: asked.append("open files"))
    with pytest.raises(common.InputError, match="--api-key '': a key must not be empty"):
        lesson.main(["serve", "--api-key", "secret", "--api-key", ""])
    assert asked == ["open files"]


def test_each_of_several_engines_listens_at_ports_of_its_own():
    config = {"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 5000, "engine_id": "e"}
    args = EngineArgs(kv_transfer_config=config, tensor_parallel_size=2, data_parallel_size=3)
    third = args.for_engine(2)
    assert (third.kv_transfer.kv_port, third.kv_transfer.engine_id) == (5004, "e_dp2"), (
        "behind four ranks of two others"
    )
    assert third.kv_transfer_config == dataclasses.asdict(third.kv_transfer) and third.data_parallel_size == 3
    assert args.kv_transfer.kv_port == 5000 and args.for_engine(0).kv_transfer.kv_port == 5000
    assert EngineArgs(kv_transfer_config=TRANSFER, data_parallel_size=2).for_engine(1).kv_transfer.kv_port == 0
    assert (plain := EngineArgs(data_parallel_size=2)).for_engine(1) is plain


def test_clients_load_adapters_where_one_api_server_answers(monkeypatch):
    serve = lesson.build_parser().parse_args(["serve", "--enable-lora", "--api-server-count", "2"])
    assert not may_load_adapters(EngineArgs(enable_lora=True)), "a client would name a file that we read"
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert may_load_adapters(EngineArgs(enable_lora=True)) and not may_load_adapters(EngineArgs())
    with pytest.raises(common.InputError, match="not together with --api-server-count"):
        serve_command(serve)


def test_flags_and_fields_are_the_same():
    parser = lesson.build_parser()
    args = parser.parse_args(["serve"])
    defaults = {f.name: f.default for f in dataclasses.fields(EngineArgs)}
    assert {name: getattr(args, name) for name in defaults} == defaults
    assert args.host == "127.0.0.1" and args.port == 8000, "nobody but this machine, unless it is said"
    args = parser.parse_args(["serve", "--no-enable-prefix-caching", "--no-enable-chunked-prefill", "-q", "x"])
    assert (args.enable_prefix_caching, args.enable_chunked_prefill, args.quantization) == (False, False, "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 0), ("max_num_seqs", 1 << 17), ("max_num_batched_tokens", 0), ("max_model_len", 1),
     ("block_size", 0), ("num_gpu_blocks_override", 1), ("kv_cache_gib", 0.0), ("kv_cache_memory_bytes", 0),
     ("long_prefill_token_threshold", -1), ("seed", -1), ("tensor_parallel_size", 65)],
)  # fmt: skip
def test_a_script_and_a_server_hear_the_same(monkeypatch, name, value):
    """The same words, from the same line."""
    monkeypatch.setattr(sockets, "set_ulimit", lambda: None)
    with pytest.raises(common.InputError, match=f"{name} {value}: must be") as served:
        lesson.main(["serve", f"--{name.replace('_', '-')}={value}"])
    with pytest.raises(common.InputError) as scripted:
        LLM(**{name: value})
    assert str(scripted.value) == str(served.value)
    last, other = served.traceback[-1], scripted.traceback[-1]
    assert (last.path, last.lineno) == (other.path, other.lineno)


@pytest.mark.parametrize(
    ("usage", "named", "limits"),
    [("LLM", {}, (512, 256, 4096)), ("serve", {}, (512, 64, 8192 if common.HAS_GPU else 512)),
     ("LLM", {"max_num_batched_tokens": 10}, (512, 10, 10)), ("serve", {"max_num_batched_tokens": 8}, (512, 8, 8)),
     ("LLM", {"max_num_seqs": 5000, "max_model_len": 64}, (64, 5000, 5000)),
     ("LLM", {"max_num_batched_tokens": 8, "enable_chunked_prefill": False}, (512, 8, 512))],
)  # fmt: skip
def test_what_nobody_named_comes_from_the_model_and_the_usage(tiny_model, usage, named, limits):
    args = EngineArgs(**named).filled_in(usage, tiny_model.config)
    assert (args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens) == limits
    assert args.filled_in("LLM", tiny_model.config) == args, "once is enough"
    config = args.scheduler_config()
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == limits


def test_a_cache_in_bytes_comes_before_one_in_gib(tiny_load, tiny_model, monkeypatch):
    block = block_bytes(tiny_model, 16, "auto")
    assert make(kv_cache_memory_bytes=30 * block).core.scheduler.kv_cache_manager.block_pool.num_blocks == 31
    monkeypatch.setattr(common, "HAS_GPU", True)
    assert kv_cache_memory(EngineArgs(kv_cache_memory_bytes=5), tiny_model, 16) == 5, "no profile is needed"


@pytest.fixture
def tiny_load(monkeypatch, tiny_model, real_model):
    """`make_engine` on the tiny model: its flags in milliseconds."""
    monkeypatch.setattr(loader, "load", lambda model, dtype, **about: (tiny_model, real_model[1]))
    tokenizing.building(monkeypatch, lambda folder: real_model[1])


def make(**flags):
    reported = []
    engine = make_engine(EngineArgs(**{"kv_cache_gib": 0.002, "max_model_len": 64, "max_num_seqs": 4, **flags}),
                                reported.append)  # fmt: skip
    assert [line.split()[0] for line in reported] == ["device", "load", "profile", "kv", "warm-up"]
    return engine


def test_speculative_config_changes_the_engine_and_no_token(tiny_load, tiny_model, real_model):
    config = {"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    engines = [make(), make(speculative_config=json.dumps(config))]
    engines.append(make_llm_engine(tiny_model, real_model[1], speculative_config=config, max_model_len=64,
                                         num_gpu_blocks_override=20, max_num_seqs=4))  # fmt: skip
    answers = []
    for engine in engines:
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7] * 3}, SamplingParams(temperature=0, max_tokens=12))
        engine.add_request("b", {"prompt_token_ids": [5, 6] * 3}, SamplingParams(seed=1, max_tokens=12, logprobs=1))
        heard = []
        while engine.has_unfinished_requests():
            heard += engine.step()
        answers.append({h.request_id: (h.outputs[0].token_ids, h.outputs[0].text) for h in heard})
    assert answers[0] == answers[1] == answers[2]
    for engine in engines[1:]:
        assert engine.core.runner.drafts.config.num_speculative_tokens == 3
        assert engine.core.scheduler.spec_decoding_stats.num_accepted_tokens > 0


@pytest.mark.parametrize("speculation", [None, {"method": "ngram", "num_speculative_tokens": 2}])
def test_who_asks_again_after_ctrl_c_is_answered_right(tiny_model, real_model, monkeypatch, speculation):
    """In a notebook the engine lives on. Blocks are indexed before the model has computed what is in them."""

    options = {"tokenizer": real_model[1], "max_model_len": 96, "num_gpu_blocks_override": 20,
               "speculative_config": speculation}  # fmt: skip
    prompts, params = [list(range(5, 75))] * 2, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    want = [x.outputs[0].token_ids for x in LLM(tiny_model, **options).generate(prompts, params)]
    llm = LLM(tiny_model, **options)
    core, runs = llm.llm_engine.core, itertools.count()
    execute_model = core.runner.execute_model

    def interrupted(output):
        if next(runs) in (0, 3):
            raise KeyboardInterrupt
        return execute_model(output)

    monkeypatch.setattr(core.runner, "execute_model", interrupted)
    for _ in range(2):  # before the first step of the prompts, and later in the middle of an answer
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params)
        assert core.scheduler.kv_cache_manager.block_pool.num_free_blocks == 19
    for cached in (0, 64):
        found = llm.generate(prompts, params)
        assert [x.outputs[0].token_ids for x in found] == want and found[0].num_cached_tokens == cached


@pytest.mark.skipif(common.HAS_GPU, reason="there, every test of this file serves from graphs")
@pytest.mark.parametrize("flags", [{}, {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}])
def test_every_batch_size_is_captured_before_anybody_is_served(tiny_load, monkeypatch, flags):
    taped = functools.partial(cuda_graphs.CapturedModel, graph_class=cuda_graphs.Tape, largest=8)
    monkeypatch.setattr(assemble, "CapturedModel", taped)
    graphs = make(**flags).core.runner.graphs
    assert [size for size, whole in graphs.captured] == [8, 4, 2, 1] and graphs.num_replays > 0
    assert make(enforce_eager=True, **flags).core.runner.graphs is None


def test_prompts_are_scored_beside_drafts(tiny_load):
    """Whose rows stand between the prompt's: another request is verified in the same step."""
    config = {"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    found = []
    for flags in ({}, {"speculative_config": json.dumps(config), "max_num_batched_tokens": 9}):
        engine, heard = make(**flags), {}
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7] * 3}, SamplingParams(temperature=0, max_tokens=30))
        for _ in range(4):
            engine.step()
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        engine.add_request("b", {"prompt_token_ids": [*range(40)]}, params)
        while engine.has_unfinished_requests():
            heard |= {output.request_id: output.prompt_logprobs for output in engine.step()}
        found.append(heard["b"][1:])
    assert engine.core.scheduler.spec_decoding_stats.num_accepted_tokens > 0
    assert len(found[0]) == len(found[1]) == 39
    for alone, beside in zip(*found, strict=True):
        assert {t: x.rank for t, x in alone.items()} == {t: x.rank for t, x in beside.items()}
        values = {t: x.logprob for t, x in alone.items()}
        assert {t: x.logprob for t, x in beside.items()} == pytest.approx(values, abs=1e-4)


def answer(engine, *token_ids, **fields):
    engine.add_request("r", {"prompt_token_ids": list(token_ids)},
                       SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, **fields}))  # fmt: skip
    while not (outputs := engine.step()):
        pass
    return outputs[0].outputs[0].token_ids


def test_every_flag_does_what_it_says(tiny_load, tiny_model):
    engine = make()
    scheduler, manager = engine.core.scheduler, engine.core.scheduler.kv_cache_manager
    assert type(engine.core.runner.attention).__name__ == "UnifiedAttention"
    config = scheduler.config
    budget = 8192 if common.HAS_GPU else 512
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (64, 4, budget)
    assert config.enable_chunked_prefill and manager.enable_caching and config.policy == "fcfs"
    block = block_bytes(tiny_model, 16, "auto")
    if not common.HAS_GPU:  # whose own memory says how many
        assert manager.block_pool.num_blocks == 1 + int(0.002 * 2**30) // block
    assert (
        not engine.has_unfinished_requests() and manager.block_pool.num_free_blocks == manager.block_pool.num_blocks - 1
    )
    reference = answer(engine, *range(40))

    other = make(max_num_batched_tokens=8, block_size=4, enable_prefix_caching=False, scheduling_policy="priority",
                 num_gpu_blocks_override=20, long_prefill_token_threshold=3)  # fmt: skip
    config, manager = other.core.scheduler.config, other.core.scheduler.kv_cache_manager
    assert (config.max_num_batched_tokens, config.policy, config.long_prefill_token_threshold) == (8, "priority", 3)
    assert (manager.block_size, manager.block_pool.num_blocks, manager.enable_caching) == (4, 20, False)
    assert answer(other, *range(40)) == reference, "chunks of 8, blocks of 4: the same tokens"
    whole = make(enable_chunked_prefill=False, max_num_batched_tokens=8).core.scheduler.config
    assert not whole.enable_chunked_prefill and whole.max_num_batched_tokens == 64, "a prompt must fit into a step"
    with pytest.raises(common.InputError, match="max_model_len"):
        make(num_gpu_blocks_override=3)
    assert make(max_model_len=None).core.scheduler.config.max_model_len == 512


def test_quantized_weights_and_cache_by_flag(tiny_load, tiny_model):
    dtype = next(dtype for dtype in KV_CACHE_DTYPES if dtype != "auto")
    engine = make(quantization=METHODS[0])
    assert any(type(layer) is not llama.Linear for layer in engine.model.linear.values())
    assert len(answer(engine, 1, 2, 3)) == 6
    plain, small = make(), make(kv_cache_dtype=dtype)
    count = lambda engine: engine.core.scheduler.kv_cache_manager.block_pool.num_blocks  # noqa: E731
    assert count(small) > 1.4 * count(plain), "the same memory holds more blocks"
    assert count(small) == 1 + int(0.002 * 2**30) // block_bytes(tiny_model, 16, dtype)
    assert len(answer(small, 1, 2, 3)) == 6


def test_the_flag_chooses_the_attention(tiny_load):
    """Lesson 02's and lesson 10's write the same tokens; what there is not is refused."""
    answers = {}
    for name in ("unified", "paged"):
        engine = make(attention_backend=name)
        assert type(engine.core.runner.attention).__name__.lower().startswith(name)
        answers[name] = answer(engine, *range(5, 40))
    assert answers["unified"] == answers["paged"]
    with pytest.raises(common.InputError, match="attention_backend 'flashy': must be one of unified, paged"):
        EngineArgs(attention_backend="flashy")


def test_graphs_unless_eager(tiny_load, monkeypatch):
    """On a CPU they change nothing; what counts is that the flag decides, and that the parts fit together."""
    monkeypatch.setattr(
        assemble, "CapturedModel", functools.partial(cuda_graphs.CapturedModel, graph_class=cuda_graphs.Tape)
    )
    graphs, eager = make(), make(enforce_eager=True)
    assert graphs.core.runner.graphs and not eager.core.runner.graphs
    assert answer(graphs, 5, 6, 7) == answer(eager, 5, 6, 7)


def test_guided_in_a_batch_with_the_others(tiny_load):
    engine, vocabulary_of = make(), registry.lesson("06b_guided_decoding").vocabulary_of
    vocabulary_of.cache_clear()
    assert answer(engine, 1, structured_outputs={"regex": "7{4}"}, ignore_eos=False)
    texts = {}
    for name, wanted in (("guided", {"regex": "[12]{3}"}), ("free", None)):
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, structured_outputs=wanted)
        engine.add_request(name, {"prompt_token_ids": [1, 2]}, params)
    while engine.has_unfinished_requests():
        texts |= {output.request_id: output.outputs[0].text for output in engine.step()}
    assert set(texts["guided"]) <= {"1", "2"} and len(texts["guided"]) == 3 and not set(texts["free"]) <= {"1", "2"}
    assert vocabulary_of.cache_info().currsize == 1, "what is checked on arrival need not be compiled again"
    engine.add_request("r", {"prompt_token_ids": [1]}, SamplingParams(structured_outputs={"regex": "7{9}"}))
    engine.step()
    engine.core.scheduler.requests["r"].append_output_token_id(1)
    with pytest.warns(UserWarning, match="breaks its grammar"):
        while engine.has_unfinished_requests():
            outputs = engine.step()
    assert outputs[0].outputs[0].finish_reason == "error", "no mask allowed that token"


def test_profile_run_on_a_gpu(monkeypatch, tiny_model):
    """The arithmetic, with a GPU that is not here: utilisation · total − peak − what others hold."""
    monkeypatch.setattr(common, "HAS_GPU", True)
    for name, value in (("reset_peak_memory_stats", None), ("synchronize", None), ("empty_cache", None),
                        ("mem_get_info", (60, 100)), ("memory_reserved", 30),
                        ("max_memory_allocated", 25)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    args = EngineArgs(gpu_memory_utilization=0.9)
    assert kv_cache_memory(args, tiny_model, 16) == 90 - 25 - 10
    with pytest.raises(common.InputError, match="gpu_memory_utilization"):
        kv_cache_memory(dataclasses.replace(args, gpu_memory_utilization=0.3), tiny_model, 16)


@pytest.mark.parametrize(("on_gpu", "heights"), [(False, {8}), (True, {2, 4, 8, 16, 32, 62})])
def test_a_warm_up_takes_prompts_of_every_length_that_has_a_kernel(
    monkeypatch, tiny_model, real_model, on_gpu, heights
):
    """Each alone and whole: nothing of it is found in the prefix cache, or shares its step with a longer one."""
    engine = LLMEngine(tiny_model, real_model[1], max_model_len=63, num_gpu_blocks_override=9)
    found, execute = [], engine.core.runner.execute_model

    def watched(output):
        found.append(list(output.num_scheduled_tokens.values()))
        return execute(output)

    monkeypatch.setattr(engine.core.runner, "execute_model", watched)
    monkeypatch.setattr(common, "HAS_GPU", on_gpu)
    warm_up(engine)
    assert all(len(each) == 1 for each in found) and {each[0] for each in found} == heights | {1}
    assert sum(each != [1] for each in found) >= 2 * len(heights), "greedy and not"


def test_slots_for_adapters_are_there_while_the_peak_is_taken(monkeypatch, tiny_model):
    """On a GPU, memory that the KV cache was given cannot hold them as well; afterwards they are gone."""
    made = []

    class Watched(SlotMemory):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(adapters, "SlotMemory", Watched)
    monkeypatch.setattr(common, "HAS_GPU", True)

    def sizes():
        return sum(pages.nbytes for memory in made if memory() for pages in memory().pages)

    for name, value in (("reset_peak_memory_stats", lambda: None), ("synchronize", lambda: None),
                        ("empty_cache", lambda: None), ("mem_get_info", lambda: (10**9, 10**9)),
                        ("memory_reserved", lambda: 0), ("max_memory_allocated", sizes)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    args = EngineArgs(gpu_memory_utilization=1, enable_lora=True, max_loras=3, max_lora_rank=8)
    left = kv_cache_memory(args, tiny_model, 16)
    c, (memory,) = tiny_model.config, made
    Hq, Hkv, D, H, I = (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size, c.intermediate_size)
    per_rank = 3 * H + (Hq + 2 * Hkv) * D + Hq * D + H + 2 * H + 2 * I + I + H  # qkv, o, gate and up, down
    assert 10**9 - left == 3 * 8 * per_rank * c.num_hidden_layers * 4 and memory() is None
    assert kv_cache_memory(EngineArgs(gpu_memory_utilization=1), tiny_model, 16) == 10**9


# --- The server's own life ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_a_folder_says_when_an_answer_of_an_engine_ends(tmp_path, quantization):
    """--generation-config FOLDER, from the flag to the engine's sampler."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    model, _ = load_model(None, torch.float32, quantization, str(tmp_path))
    assert model.config.eos_token_ids == (2, 5, 6)


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


def test_a_port_that_is_taken_and_a_host_that_is_none():
    sock = bind("127.0.0.1", 0)
    sock.listen()
    with sock, pytest.raises(common.InputError, match="--port"):
        bind("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(common.InputError, match="--host"):
        bind("no.such.host.invalid", 0)


def refused_job(*flags):
    return ("serve", *flags), [sys.executable, common.HERE / "06_serving.py", "serve", "--port", "0", *flags]


REFUSED = [(refused_job(*flags), word) for *flags, word in (
    ("--trust-remote-code", "refused"), ("--model", "/nowhere", "/nowhere"), ("--quantization", "magic", "magic"),
    ("--max-model-len", "100000", "max_model_len"))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("job", "word"), [pytest.param(job, word, id=word) for job, word in REFUSED])
def test_the_command_line_ends_with_one_line(job, word):
    """Fast twins: the same errors as exceptions, above."""
    done = scripts.get(job)
    assert done.returncode == 2 and word in done.stderr and "Traceback" not in done.stderr, done.stderr


# --- The widget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", list(page.PLACED))
@pytest.mark.parametrize("bound", page.WIDGET_CHOICES["queue_bound"])
@pytest.mark.parametrize("load", [50, 95, 120])
def test_books_are_balanced(place, bound, load):
    """arrived = served + rejected; Little's law, exactly, on every trace; nobody waits in front of a free seat."""
    trace = page.simulate({"load": load, "gpu_ms": 5, "cpu_ms": 8, "place": place, "queue_bound": bound})
    served = [i for i, at in enumerate(trace["finish"]) if at >= 0]
    assert len(served) == trace["served"] == page.REQUESTS - trace["rejected"]
    events = sorted((at, d) for i in served for at, d in ((trace["arrivals"][i], 1), (trace["finish"][i], -1)))
    area = inside = last = 0
    for at, change in events:
        area, last, inside = area + inside * (at - last), at, inside + change
    assert area == trace["inside_integral"] == sum(trace["finish"][i] - trace["arrivals"][i] for i in served)
    for _, running, waiting in trace["steps"]:
        assert running <= page.SEATS and (waiting == 0 or running == page.SEATS) and (not bound or waiting <= bound)
    for i in served:
        assert trace["first"][i] >= trace["arrivals"][i] + trace["step_us"]
        assert trace["finish"][i] == trace["first"][i] + (page.TOKENS - 1) * trace["step_us"], "no gaps once it runs"
    assert trace["rejected"] == 0 or bound
    # The first request finds everything idle: its token takes cpu + gpu, overlapped or not.
    assert trace["first"][0] - trace["arrivals"][0] == 13_000


def test_overlap_and_bounds_do_what_the_text_says():
    known = page.facts()
    assert (
        known["gpu_share"]["20"]["turns"] > known["gpu_share"]["10"]["turns"] > known["gpu_share"]["2"]["turns"] == 0.2
    )
    waits = [known["load"][str(load)]["wait_ms"] for load in (50, 80, 90, 95, 105)]
    assert waits == sorted(waits) and waits[-1] > 2 * waits[-2]
    bounded, free = known["bounded"]["120"], known["load"]["120"]
    assert bounded["wait_ms"] < free["wait_ms"] / 2 and bounded["rejected"] > 0 and bounded["most_waiting"] == 20
    longer = page.pipeline(105, 20, 8, "one loop", 0, 1800)
    assert longer["wait_sum"] / longer["served"] / 1e3 > 1.5 * waits[-1], "it grows with the length of the run"


def test_above_its_capacity_the_queue_grows_but_not_with_every_newcomer():
    trace = page.simulate({**page.WIDGET_DEFAULT, "load": 120})
    waits = [(first - trace["step_us"] - at) / 1e6 for first, at in zip(trace["first"], trace["arrivals"])]
    means = [sum(waits[i : i + 50]) / 50 for i in range(0, 200, 50)]
    assert means == sorted(means) and [round(mean, 1) for mean in means[::3]] == [0.2, 1.3]
    shorter = sum(later < before for before, later in itertools.pairwise(waits))
    assert 80 < shorter < 100, "two that come close together find the same end of a step"
    mean = {n: page.facts()["load"]["120"]["wait_ms"] if n == 800 else 1e3 * sum(waits) / n for n in (200, 800)}
    assert mean[800] > 4 * mean[200]


def test_the_widget_uses_the_real_admission_and_scheduler(monkeypatch):
    params = {**page.WIDGET_DEFAULT, "queue_bound": 8}
    before = page.simulate(params)
    monkeypatch.setattr(AdmissionControl, "check", lambda self, inside, n=1: None)
    assert page.simulate(params)["rejected"] == 0 < before["rejected"]
    monkeypatch.undo()
    monkeypatch.setattr(page.DryRun, "step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        page.simulate(params)


def test_what_the_page_says_of_throughput():
    """As long as there are seats, it grows, though less than the number of streams."""
    load = json.loads((common.ROOT / "lessons/results/cpu.json").read_text())["06_serving"]["bench"]["load"]
    measured = [load[streams]["output_throughput"] for streams in ("1", "2", "4", "8", "16")]
    assert all(1 < more / fewer < 2 for fewer, more in itertools.pairwise(measured))


# --- The lesson's own server ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "bound"), [(50, 0), (80, 0), (95, 0), (105, 0), (120, 0), (105, 20), (120, 8)])
def test_the_lessons_queue_is_the_engines(load, bound):
    """Thirty lines against admission control and scheduler on a clock: the same waits, the same refused."""
    ours, theirs = lesson.queue_at(load, bound), page.pipeline(load, 20, 8, "one loop", bound, 800)
    assert (len(ours.waits), ours.refused) == (theirs["served"], theirs["rejected"])
    assert ours.most_waiting == theirs["most_waiting"]
    assert sum(ours.waits) == theirs["wait_sum"]


class Scripted:
    """An engine of the lesson's that writes letters, one in each step."""

    def __init__(self, step=lambda: None):
        self.inside, self.aborted, self.during_step = {}, [], step

    def has_unfinished_requests(self):
        return bool(self.inside)

    def add_request(self, request_id, prompt, params, stream):
        if prompt == "too long":
            raise common.InputError("prompt: too long")
        self.inside[request_id] = params.max_tokens

    def abort_request(self, ids):
        for name in ids:
            self.inside.pop(name, None)
            self.aborted.append(name)

    def step(self):
        time.sleep(0.002)
        self.during_step()
        heard = []
        for name in list(self.inside):
            self.inside[name] -= 1
            reason = None if self.inside[name] else "length"
            if reason:
                del self.inside[name]
            heard.append(
                RequestOutput(name, None, [], [CompletionOutput(0, "x", [1], finish_reason=reason)], bool(reason))
            )
        return heard


def with_engine(inner, use, places=4, **about):
    async def run():
        engine = lesson.AsyncEngine(inner, places, **about)
        try:
            return await asyncio.wait_for(use(engine), 30)
        finally:
            if not engine.dead:
                await asyncio.wait_for(engine.stop(), 30)

    return asyncio.run(run())


def few(tokens):
    return SamplingParams(max_tokens=tokens)


def test_a_slow_reader_finds_all_at_once_and_nobody_waits_for_it():
    async def use(engine):
        answer = engine.generate("a", few(20))
        first = await anext(answer)
        while inner.inside:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        return first, [piece async for piece in answer]

    inner = Scripted()
    (text, reason), rest = with_engine(inner, use)
    assert reason is None and [why for _, why in rest] == ["length"], "one piece, however many steps went by"
    assert len(text + rest[0][0]) == 20


@pytest.mark.parametrize("aborts", [True, False])
def test_whoever_leaves_is_not_computed_any_more(aborts):
    async def use(engine):
        async with contextlib.aclosing(engine.generate("a", few(10_000))) as answer:
            await anext(answer)
        await asyncio.sleep(0.1)
        left = dict(inner.inside)
        inner.inside.clear()
        return left, engine.mailboxes

    inner = Scripted()
    left, mailboxes = with_engine(inner, use, aborts=aborts)
    assert mailboxes == {} and (inner.aborted == ["0"]) == aborts and bool(left) != aborts


def test_who_finds_no_place_is_told_and_takes_none():
    async def use(engine):
        answers = [engine.generate("a", few(50)) for _ in range(5)]
        heard = await asyncio.gather(*map(anext, answers), return_exceptions=True)
        for answer in answers:
            await answer.aclose()
        again = [piece async for piece in engine.generate("a", few(1))]
        return heard, again

    heard, again = with_engine(Scripted(), use)
    assert [type(one) for one in heard] == [tuple] * 4 + [lesson.ServerFull] and again == [("x", "length")]


def test_what_is_wrong_with_one_request_is_that_ones_business():
    async def use(engine):
        good = engine.generate("a", few(5))
        await anext(good)
        with pytest.raises(common.InputError, match="too long"):
            await anext(engine.generate("too long", few(5)))
        return [piece async for piece in good]

    assert with_engine(Scripted(), use)[-1][1] == "length"


def test_an_engine_that_dies_tells_everybody_and_health():
    async def use(engine):
        answers = [engine.generate("a", few(10_000)) for _ in range(2)]
        for answer in answers:
            await anext(answer)
        inner.during_step = lambda: 1 / 0
        for answer in answers:
            with pytest.raises(ZeroDivisionError):
                while True:
                    await anext(answer)
        with pytest.raises(ZeroDivisionError):
            await anext(engine.generate("a", few(1)))
        app = httpx.ASGITransport(lesson.build_app(engine, "m"))
        async with httpx.AsyncClient(transport=app, base_url="http://test") as client:
            asked = {"prompt": "x", "max_tokens": 1}
            return (await client.get("/health")).status_code, (
                await client.post("/v1/completions", json=asked)
            ).status_code

    inner = Scripted()
    assert with_engine(inner, use) == (503, 500)


def test_a_stop_answers_those_inside_first():
    async def use(engine):
        answer = engine.generate("a", few(40))
        await anext(answer)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        with pytest.raises(lesson.ServerFull):
            await anext(engine.generate("a", few(1)))
        pieces = [piece async for piece in answer]
        await stopping
        return pieces, engine.thread.is_alive()

    async def run():
        return await use(lesson.AsyncEngine(Scripted(), 4))

    pieces, alive = asyncio.run(run())
    assert pieces[-1][1] == "length" and not alive


def test_an_error_in_the_story_leaves_no_thread_that_computes():
    """One that is in a step when Python ends would abort the process, and hide what the check said."""

    async def run():
        engine = lesson.AsyncEngine(Scripted(), 4)
        with pytest.raises(common.CheckFailed):
            async with lesson.serving(engine, "m"):
                await anext(engine.generate("a", few(10_000)))
                raise common.CheckFailed("not caught")
        return engine.thread.is_alive()

    assert not asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"prompt": "half', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "prompt: must be a text"),
        (b'{"prompt": ""}', "prompt: must be a text"),
        (b'{"prompt": "x", "stream": 1}', "stream 1: must be true or false"),
        (b'{"prompt": "x", "n": 2}', "n: no such field"),
        (b'{"prompt": "x", "temperature": "hot"}', "temperature"),
        (b'{"prompt": "x", "max_tokens": 0}', "max_tokens"),
    ],
)
def test_a_body_is_read_field_by_field(body, why):
    with pytest.raises(common.InputError, match=why):
        lesson.read_body(body)


def test_openais_client_reads_the_lessons_server(tiny_model, real_model):
    """Whole and streamed, as the naive reference writes it."""

    async def ask():
        inner = LLMEngine(tiny_model, real_model[1], max_model_len=64, num_gpu_blocks_override=40)
        async with lesson.serving(lesson.AsyncEngine(inner, 8), "tiny") as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
            about = {
                "model": "tiny",
                "prompt": "a",
                "max_tokens": 6,
                "temperature": 0,
                "extra_body": {"ignore_eos": True},
            }
            whole = await client.completions.create(**about)
            stream = await client.completions.create(**about, stream=True)
            pieces = [piece.choices[0] async for piece in stream]
            return whole.choices[0], pieces

    tokenizer = real_model[1]
    vocabulary = SimpleNamespace(encode=lambda text: [t % 128 for t in tokenizer.encode(text)], decode=tokenizer.decode)
    whole, pieces = asyncio.run(ask())
    assert whole.finish_reason == "length" and "".join(piece.text for piece in pieces) == whole.text
    if max(tokenizer.encode("a")) < 128:
        assert whole.text == lesson.answer_alone(tiny_model, vocabulary, "a", 6)


# --- The story with another model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "told", "asked"),
    [
        ([(200, [{"delta": {"role": "assistant"}}, {"delta": {"content": "Paris"}}, {"delta": {"content": "."}}])],
         "'Paris.' in 2 events", ["chat/completions"]),
        ([(200, [{"delta": {"role": "assistant"}}, {"delta": {}}])], "'' in 0 events", ["chat/completions"]),
        ([(400, "this model has no chat template"), (200, [{"text": "Pa"}, {"text": ""}])], "'Pa' in 1 events",
         ["chat/completions", "completions"]),
    ],
)  # fmt: skip
def test_one_request_is_followed_whatever_the_model_takes_and_says(answers, told, asked, monkeypatch, capsys):
    """A model without a chat template completes the question; one that says nothing has its first token at the end."""
    paths, names = [], ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency")
    monkeypatch.setattr(page, "metrics_of", lambda client: {f"{name}_seconds_sum": 0.0 for name in names})

    class Client:
        @contextlib.contextmanager
        def stream(self, method, path, json):
            paths.append(path.removeprefix("/v1/"))
            code, body = answers[len(paths) - 1]
            lines = [f"data: {dumps({'choices': [choice]})}" for choice in body] if code == 200 else []
            error = dumps({"error": {"message": body}})
            yield SimpleNamespace(status_code=code, read=lambda: error, iter_lines=lambda: [*lines, "data: [DONE]"])

    dumps = json.dumps
    found = page.follow_one_request(Client(), "m")
    out = capsys.readouterr().out
    assert told in out and paths == asked and ("no chat template" in out) == (len(asked) == 2)
    assert 0 <= found["client_ttft_ms"] <= found["client_e2e_ms"] == found["around_ms"] < 1e4

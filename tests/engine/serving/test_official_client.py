"""A server on the real model, driven by the official client, abused, killed; its pool stays whole."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from engine import registry
from engine.engine_args import EngineArgs
from engine.llm import LLM
from engine.model import folders, loader
from engine.model.tokenizer import Tokenizer
from engine.request import SamplingParams
from engine.serving.openai.limits import MAX_BODY_BYTES
from engine.serving.server import system_fingerprint
from lab import cli
from lab.running_server import running_server
from support import first_layers

page = cli.numbers("06_serving")
offline = registry.lesson("04b_offline_engine")
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


SHORT = {"/chat/completions": {"max_tokens": 2, "max_completion_tokens": 2, "n": 1},
         "/completions": {"max_tokens": 2, "n": 1}, "/responses": {"max_output_tokens": 2},
         "/messages": {"max_tokens": 2}}  # fmt: skip


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

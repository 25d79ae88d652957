"""Every right request has its shape, whole and streamed."""

from __future__ import annotations

import common

import asyncio
from types import SimpleNamespace

import pytest

from engine.errors import EngineDeadError
from engine.front_end import CompletionOutput, RequestOutput
from engine.request import SamplingParams
from engine.sampling.guided import guide_queue
from engine.serving.collector import RequestOutputCollector
from engine.serving.openai.serving import OpenAIServing
from support.scripted_api import (
    Letters,
    M,
    P,
    ScriptedLLM,
    ScriptedTokenizer,
    ask,
    call,
    check_error,
    read_events,
    serve,
    text_of,
)


def test_a_completion(shared):
    llm, app = shared
    llm.added.clear()
    body = P | {"max_tokens": 7, "temperature": 0.5, "stop": "x", "seed": 3, "logit_bias": {"5": 1.5}, "top_k": 4,
                "min_p": 0.1, "ignore_eos": True, "min_tokens": 2, "model": "alias", "user": "u",
                "metadata": {"a": 1}}  # fmt: skip
    found = ask(app, "/v1/completions", body).json
    assert found["object"] == "text_completion" and found["model"] == "alias" and found["id"].startswith("cmpl-")
    unasked = dict.fromkeys(("token_ids", "prompt_token_ids", "prompt_logprobs", "routed_experts"))
    assert found["choices"] == [
        {"index": 0, "text": "Paris.", "logprobs": None, "finish_reason": "stop", "stop_reason": None} | unasked
    ]
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8,
                              "prompt_tokens_details": {"cached_tokens": 0},
                              "completion_tokens_details": None}  # fmt: skip
    ((_, prompt, params),) = llm.added
    assert prompt == {"prompt": "Hello", "prompt_token_ids": list(b"Hello")}
    assert params == SamplingParams(max_tokens=7, temperature=0.5, stop=["x"], seed=3, logit_bias={5: 1.5}, top_k=4,
                                    min_p=0.1, ignore_eos=True, min_tokens=2)  # fmt: skip
    assert llm.aborted, "the end of a request is always told"


# Recorded from vLLM 0.32: the fields of whole answers to plain requests, and of their choices.
RECORDED = {
    "/v1/completions": (
        "id object created model choices service_tier system_fingerprint usage kv_transfer_params ec_transfer_params "
        "metrics", "index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids "
        "routed_experts"),
    "/v1/chat/completions": (
        "id object created model choices service_tier system_fingerprint usage prompt_logprobs prompt_token_ids "
        "prompt_text kv_transfer_params ec_transfer_params metrics",
        "index message logprobs finish_reason stop_reason token_ids routed_experts"),
}  # fmt: skip


@pytest.mark.parametrize("path", RECORDED)
def test_whole_answers_have_vllms_fields(shared, path):
    """The OpenAI client makes attributes of them: reading one that is absent is an AttributeError, null is None."""
    found = ask(shared[1], path, (P if path == "/v1/completions" else M) | {"max_tokens": 3}).json
    of_answer, of_choice = (set(names.split()) for names in RECORDED[path])
    assert found.keys() == of_answer and found["choices"][0].keys() == of_choice
    assert found["usage"].keys() == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details",
                                     "completion_tokens_details"}  # fmt: skip


# And of the chunks of a stream: of the first one, of those in its midst, of the last one. (The first one of a chat has
# no token_ids there. Here it has: one rule less.)
RECORDED_CHUNKS = {
    "/v1/completions": 3 * ["index text logprobs finish_reason stop_reason prompt_token_ids token_ids"],
    "/v1/chat/completions": [*2 * ["index delta logprobs finish_reason token_ids"],
                             "index delta logprobs finish_reason stop_reason token_ids"],
}  # fmt: skip


@pytest.mark.parametrize("path", RECORDED_CHUNKS)
def test_chunks_have_vllms_fields(path):
    _, app = serve(Letters([(0, "a", False, False), (0, "b", False, False), (0, "c", True, True)]))
    chat, envelope = path != "/v1/completions", {"id", "object", "created", "model", "choices"}
    heard = ask(app, path, (M if chat else P) | {"stream": True})
    *chunks, _ = read_events(heard.text)
    first, middle, last = RECORDED_CHUNKS[path]
    wanted = [first, *[middle] * (len(chunks) - 2), last]
    assert len(chunks) > 2 and [chunk["choices"][0].keys() for chunk in chunks] == [set(x.split()) for x in wanted]
    opening = {"prompt_token_ids", "prompt_text"} if chat else set()
    ends = [opening, *[set()] * (len(chunks) - 2), {"system_fingerprint"}]
    assert [chunk.keys() for chunk in chunks] == [envelope | end for end in ends]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", P), ("/v1/chat/completions", M)])
def test_the_fingerprint_comes_with_an_answer_or_the_end_of_its_stream(path, body, usage):
    named = type("Named", (OpenAIServing,), {"system_fingerprint": "fp-1"})
    _, app = serve(kind=named)
    assert ask(app, path, body).json["system_fingerprint"] == "fp-1"
    streamed = ask(app, path, body | {"stream": True, "stream_options": {"include_usage": usage}})
    events = read_events(streamed.text)[:-1]
    told = [event.get("system_fingerprint") for event in events]
    ends = [not event["choices"] or event["choices"][0]["finish_reason"] is not None for event in events]
    assert told == ["fp-1" if end else None for end in ends] and told[-1] == "fp-1"


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([97, 98], ["ab"]), ([[97], [98, 99]], ["a", "bc"])],
)
def test_prompts_of_every_kind_with_echo(given, prompts):
    _, app = serve()
    found = ask(app, "/v1/completions", {"prompt": given, "echo": True}).json
    assert [c["text"] for c in found["choices"]] == [p + "Paris." for p in prompts]
    assert [c["index"] for c in found["choices"]] == list(range(len(prompts)))
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
    streamed = read_events(ask(app, "/v1/completions", {"prompt": given, "echo": True, "stream": True}).text)
    assert [text_of(streamed, i) for i in range(len(prompts))] == [p + "Paris." for p in prompts]


def test_a_chat(shared):
    llm, app = shared
    llm.added.clear()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": "S"}, {"role": "user", "content": parts, "name": "me"}],
            "max_completion_tokens": 9, "max_tokens": 3}  # fmt: skip
    found = ask(app, "/v1/chat/completions", body).json
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
    silent = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "Paris."} | silent, "as vLLM writes it"
    ((_, prompt, params),) = llm.added
    assert prompt["prompt"] == "Sa\nb" and params.max_tokens == 9
    llm.added.clear()
    ask(app, "/v1/chat/completions", M)
    assert llm.added[0][2].max_tokens is None, "a chat may go on until the context is full"


def test_an_answer_goes_back_as_history(shared):
    """As OpenAI's client has it in memory, written out whole."""
    from openai.types.chat import ChatCompletion

    llm, app = shared
    answer = ChatCompletion.model_validate(ask(app, "/v1/chat/completions", M).json).choices[0].message
    for said in (answer.model_dump(), answer.model_dump(exclude_unset=True)):
        llm.added.clear()
        assert ask(app, "/v1/chat/completions", {"messages": [*M["messages"], said, *M["messages"]]}).status == 200
        assert "Paris." in llm.added[0][1]["prompt"]
    refused = {"messages": [said | {"tool_calls": [{"id": "1"}]}]}
    check_error(ask(app, "/v1/chat/completions", refused), 400, "messages")


@pytest.mark.parametrize(("side", "read"), [("left", "y" * 5), ("right", "x" * 5), (None, "y" * 5)])
def test_of_a_text_that_is_cut_only_what_can_be_read_is_tokenized(side, read):
    """512 tokens of at most one character: behind 512 characters nobody need look, however many there are."""
    seen = []

    class Noting(ScriptedTokenizer):
        def encode(self, text, *about):
            seen.append(len(text))
            return super().encode(text, *about)

    llm = ScriptedLLM(512)
    llm.front.tokenizer = Noting()
    _, app = serve(llm)
    body = {"prompt": "x" * 50_000 + "y" * 50_000, "truncate_prompt_tokens": 5, "truncation_side": side}
    for prompt, length in ((body["prompt"], 512), ("x" * 100 + "y" * 100, 200)):
        assert ask(app, "/v1/completions", body | {"prompt": prompt}).status == 200
        assert seen == [length] and bytes(llm.added[-1][1]["prompt_token_ids"]).decode() == read
        seen.clear()


def test_nothing_is_hidden_from_listeners(shared):
    options = {"include_obfuscation": True, "include_usage": True}
    events = read_events(ask(shared[1], "/v1/completions", P | {"stream": True, "stream_options": options}).text)
    assert text_of(events) == "Paris." and events[-2]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("text", ["x" * 512, "x" * 600, "x" * 100_000])
def test_libraries_recognise_a_conversation_that_is_too_long(shared, text):
    """By these words LiteLLM and others know what was wrong."""
    for path, body in (("completions", {"prompt": text}), ("chat/completions", {"messages": [
            {"role": "user", "content": text}]})):  # fmt: skip
        message = check_error(ask(shared[1], f"/v1/{path}", body), 400)["message"]
        assert "this model's maximum context length is 512 tokens" in message


def test_an_answer_is_called_what_its_client_calls_it(shared):
    """vLLM's `bench serve` sends the header; its request ids are the field."""
    llm, app = shared
    llm.added.clear()
    for path, kind in (("/v1/completions", "cmpl-"), ("/v1/chat/completions", "chatcmpl-")):
        body = P if kind == "cmpl-" else M
        assert ask(app, path, body, headers={"x-request-id": "mine"}).json["id"] == kind + "mine"
        assert ask(app, path, body | {"request_id": "field"}).json["id"] == kind + "field"
    names = [name for name, *_ in llm.added]
    assert len(set(names)) == 4 and not any("mine" in name for name in names), "the engine's own names stay its own"


def test_a_streamed_chat(shared):
    _, app = shared
    body = M | {"stream": True, "stream_options": {"include_usage": True}}
    heard = ask(app, "/v1/chat/completions", body)
    assert heard.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = read_events(heard.text)
    assert done == "[DONE]" and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1 and all(c["usage"] is None for c in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == "Paris." and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 5
    plain = read_events(ask(app, "/v1/chat/completions", M | {"stream": True}).text)
    assert "usage" not in plain[0]
    each = body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, _ = read_events(ask(app, "/v1/chat/completions", each).text)
    first, last = chunks[0]["usage"], chunks[-1]["usage"]
    assert (first["prompt_tokens"], first["completion_tokens"], last["completion_tokens"]) == (2, 0, 3)
    alone = body | {"stream_options": {"continuous_usage_stats": True}}
    assert '"usage"' not in ask(app, "/v1/chat/completions", alone).text, "as in vLLM: include_usage decides"


@pytest.mark.parametrize(
    ("interval", "want"),
    [(None, ["a", "b", "c", "d", "e", "f"]), (1, ["a", "b", "c", "d", "e", "f"]), (2, ["a", "bc", "de", "f"]),
     (3, ["a", "bcd", "ef"]), (9, ["a", "bcdef"])],
)  # fmt: skip
@pytest.mark.parametrize(("path", "n"), [("completions", 1), ("completions", 2), ("chat/completions", 2)])
def test_a_client_may_want_fewer_and_larger_pieces(path, n, interval, want):
    """The first token comes at once, and so does the end; in between, each answer counts its own."""
    pieces = [(i, text, text == "f", text == "f" and i == n - 1) for text in "abcdef" for i in range(n)]
    _, app = serve(Letters(pieces))
    chat = path.startswith("chat")
    body = (M if chat else P) | {"n": n, "stream": True, "stream_interval": interval, "return_token_ids": True}
    more = {"stream_options": {"include_usage": True}}
    *chunks, usage, _ = read_events(ask(app, f"/v1/{path}", body | more).text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for i in range(n):
        mine = [c for c in choices if c["index"] == i][chat:]  # a chat's first piece says the role
        assert [c["delta"]["content"] if chat else c["text"] for c in mine] == want
        assert [len(c["token_ids"]) for c in mine] == [len(text) for text in want]
        assert [c["finish_reason"] for c in mine] == [*[None] * (len(want) - 1), "stop"]
    assert usage["usage"]["completion_tokens"] == 6 * n


def test_an_error_after_the_status_line_comes_in_the_stream():
    pieces = [(0, "a", False, False), EngineDeadError("gone")]
    heard = ask(serve(Letters(pieces))[1], "/v1/completions", P | {"stream": True})
    first, error, done = read_events(heard.text)
    assert heard.status == 200 and first["choices"][0]["text"] == "a" and done == "[DONE]"
    assert error["error"]["code"] == 500 and "EngineCore is dead" in error["error"]["message"]


def test_kv_transfer_params_go_in_and_out():
    """Lesson 08: what a proxy says reaches the engine; what a prefill server answers tells where its blocks are."""
    params = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "h", "remote_port": 7}
    connected = type("Connected", (OpenAIServing,), {"has_kv_connector": True})
    answer = CompletionOutput(0, "x", [1], finish_reason="length")
    news = RequestOutput("r", "p", [1], [answer], True, kv_transfer_params=params)
    llm, app = serve(Letters([news]), kind=connected)
    wanted = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "t"}}
    for path, body in (("/v1/completions", P), ("/v1/chat/completions", M)):
        assert ask(app, path, body | wanted).json["kv_transfer_params"] == params
    assert [call[2].extra_args for call in llm.added] == [wanted, wanted]
    llm, app = serve(kind=connected)
    heard = ask(app, "/v1/completions", P | {"kv_transfer_params": params})
    assert heard.status == 200 and heard.json["kv_transfer_params"] is None
    assert [call[2].extra_args for call in llm.added] == [{"kv_transfer_params": params}]
    assert ask(app, "/v1/completions", P).json["kv_transfer_params"] is None
    for wrong in (5, {"do_remote_prefill": True}, {"do_remote_decode": "yes"}):
        check_error(ask(app, "/v1/completions", P | {"kv_transfer_params": wrong}), 400, "kv_transfer_params")
    check_error(ask(app, "/v1/completions", P | {"n": 2, "temperature": 1, "kv_transfer_params": {}}), 400, "n")
    llm, app = serve()
    heard = ask(app, "/v1/completions", P | {"kv_transfer_params": params})
    check_error(heard, 400, "kv_transfer_params", "was started without --kv-transfer-config")
    assert not llm.added and ask(app, "/v1/completions", P | {"kv_transfer_params": None}).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_failed_is_an_error(stream):
    """A prompt whose keys and values never came (lesson 08) ends with a reason, and that is no text."""

    class Failing(ScriptedLLM):
        def add_request(self, request_id, prompt, params, **about):
            collector = RequestOutputCollector(request_id)
            piece = CompletionOutput(0, "", [], finish_reason="error", stop_reason="KV load failed: x")
            collector.put(RequestOutput(request_id, "Hello", [1], [piece], True))
            return collector

    heard = ask(serve(Failing(512))[1], "/v1/completions", P | {"stream": stream})
    error = (read_events(heard.text)[0] if stream else heard.json)["error"]
    assert error["code"] == 500 and error["message"] == "KV load failed: x"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_an_answer_that_has_left_its_grammar_is_an_error(path, stream, monkeypatch):
    """The token that does not fit is not told any more. Two answers to one request have two places in the pattern."""
    from engine.sampling.guided.structured_outputs import BROKEN
    from engine.sampling.guided.vocabulary import Vocabulary

    vocabulary = Vocabulary([bytes([b]) for b in range(127)] + [b""], [127])
    queue = guide_queue.GuideQueue(lambda: vocabulary)
    monkeypatch.setattr(OpenAIServing, "guide_queue", queue)

    class Wrong(ScriptedLLM):
        """Writes what it likes."""

        def add_request(self, request_id, prompt, params, **about):
            collector = RequestOutputCollector(request_id)

            async def write():
                for i, text in enumerate(self.ANSWER):
                    piece = CompletionOutput(0, text, [*text.encode()])
                    piece.finish_reason = "stop" if i == len(self.ANSWER) - 1 else None
                    collector.put(RequestOutput(request_id, "p", [1], [piece], piece.finish_reason is not None))
                    await asyncio.sleep(0.005 if about["stream"] else 0)

            self.added.append(asyncio.create_task(write()))
            return collector

    llm, app = serve(Wrong(512))
    llm.front.model_config = SimpleNamespace(vocab_size=128, eos_token_ids=(127,))
    body = {"completions": {"prompt": ["a", "b"]}, "responses": {"input": "x"}}.get(path, M) | {"stream": stream}
    body |= {"structured_outputs": {"regex": "[a-z ]{1,9}"}}
    for llm.ANSWER, fine in ((("ab", "c", " d"), True), (("ab", "c!", "d"), False), (("ab", "c\x7f"), True)):
        heard = ask(app, f"/v1/{path}", body)
        assert (BROKEN in heard.text) != fine and "!" not in heard.text
        assert heard.status == (200 if fine or stream else 500)
        assert "ab" in heard.text or not (fine or stream), "what was right of it is told"


def test_a_full_server_says_when_to_come_back():
    llm, app = serve(ScriptedLLM(512, max_num_queued_reqs=4, num_unfinished=3))
    assert ask(app, "/v1/completions", P).status == 200
    heard = ask(app, "/v1/completions", P | {"prompt": ["a", "b"]})
    check_error(heard, 503)
    assert heard.headers["retry-after"] == "1" and len(llm.added) == 1, "all prompts of a request, or none"


def test_a_prompt_that_fails_takes_its_siblings_along():
    class Second(ScriptedLLM):
        def add_request(self, request_id, prompt, params, **about):
            if len(self.added) == 1:
                raise common.InputError("prompt_token_ids: no")
            return super().add_request(request_id, prompt, params, **about)

    llm, app = serve(Second(512))
    check_error(ask(app, "/v1/completions", {"prompt": ["a", "b"]}), 400)
    assert llm.aborted == [llm.added[0][0]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_counts_tokens_gets_the_prompts_too(shared, stream):
    _, app = shared

    def asked(path, body):
        heard = ask(app, path, body | {"return_token_ids": True, "stream": stream})
        return read_events(heard.text)[0] if stream else heard.json

    ids = [[97, 98], [99]]
    found = [asked("/v1/completions", {"prompt": prompt})["choices"][0] for prompt in ids]
    assert [choice["prompt_token_ids"] for choice in found] == ids
    assert asked("/v1/chat/completions", M)["prompt_token_ids"] == [72, 105]
    heard = ask(app, "/v1/chat/completions", M | {"stream": stream})
    found = read_events(heard.text)[0] if stream else heard.json
    assert found["prompt_token_ids"] is None
    assert not stream or heard.text.count("prompt_token_ids") == 1, "once, with the opening"


class Gated:
    """A queue that has compiled "known" long ago, and everything else when the gate opens."""

    def __init__(self):
        self.gate, self.compiling = asyncio.Event(), []

    async def look(self, wanted):
        return wanted["regex"], SimpleNamespace(start=Everything) if wanted["regex"] == "known" else None

    async def compile(self, key):
        self.compiling.append(key)
        try:
            await self.gate.wait()
        finally:
            self.compiling.remove(key)
        return SimpleNamespace(start=Everything)


class Everything:
    """A grammar that takes any token."""

    def accept_token(self, token):
        return True


def test_what_is_compiled_has_a_place_inside(monkeypatch):
    """Half of all places at most: with 8, four wait for their guides. Others are refused, or served beside them."""
    llm, app = serve()
    llm.admission.max_num_queued_reqs, llm.stat_logger = 8, Refusals()

    async def run():
        queue = Gated()
        monkeypatch.setattr(OpenAIServing, "guide_queue", queue)
        send = lambda **body: asyncio.create_task(call(app, "/v1/completions", P | body))  # noqa: E731
        slow = [send(structured_outputs={"regex": f"a{i}"}) for i in range(10)]
        while len(queue.compiling) < 4:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        turned_away = [task.result() for task in slow if task.done()]
        assert [heard.status for heard in turned_away] == [503] * 6 and llm.stat_logger.count == 6
        assert all(heard.headers["retry-after"] == "1" for heard in turned_away)
        assert llm.admission.num_held == 4 and len(queue.compiling) == 4
        assert (await send()).status == (await send(structured_outputs={"regex": "known"})).status == 200
        assert (await send(n=4)).status == 200 and (await send(n=5)).status == 503, "they are inside"
        gone = await call(app, "/v1/completions", P | {"structured_outputs": {"regex": "x"}, "n": 9})
        assert gone.status == 400, "never"
        queue.gate.set()
        assert [(await task).status for task in slow].count(200) == 4 and llm.admission.num_held == 0
        queue.gate.clear()
        alone = send(structured_outputs={"regex": "z"}, n=8)
        while not queue.compiling:
            await asyncio.sleep(0.001)
        queue.gate.set()
        assert (await alone).status == 200, "more than half, but it is alone"

    asyncio.run(run())


class Refusals:
    count = 0

    def record_rejection(self, n):
        self.count += n


@pytest.mark.parametrize("ends", ["leaves", "shutdown"])
def test_who_waits_for_a_guide_and_leaves_costs_nothing_more(monkeypatch, ends):
    llm, app = serve()
    llm.admission.max_num_queued_reqs = 2

    async def run():
        queue = Gated()
        monkeypatch.setattr(OpenAIServing, "guide_queue", queue)
        body = P | {"structured_outputs": {"regex": "a"}}
        if ends == "leaves":
            await call(app, "/v1/completions", body, hang_up_after=0)
        else:
            task = asyncio.create_task(call(app, "/v1/completions", body))
            while not queue.compiling:
                await asyncio.sleep(0.001)
            llm.admission.closed = True
            queue.gate.set()
            assert (await task).status == 503
        assert not queue.compiling and llm.admission.num_held == 0 and not llm.added

    asyncio.run(run())


def test_an_adapters_parent_is_the_models_first_name():
    serving = OpenAIServing(ScriptedLLM(), ["first", "second"], {"adapter": "folder"})
    card = serving.model_card("adapter")
    assert (card["id"], card["root"], card["parent"]) == ("adapter", "folder", "first")
    assert [serving.model_card(name)["parent"] for name in ("first", "second")] == [None, None]

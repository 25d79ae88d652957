"""Lesson 06f: every wrong request has its answer, every right one its shape, and whoever leaves is forgotten."""

from __future__ import annotations

import common

import ast
import asyncio
import contextlib
import copy
import functools
import gc
import gzip
import itertools
import json
import socket
import threading
import time
from types import SimpleNamespace

from engine import registry
from lab import cli
from engine.sampling.guided import guide_queue
from engine.llm_engine import LLMEngine
from engine.front_end import CompletionOutput
from engine.front_end import RequestOutput
from engine.sampling.defaults import SamplingDefaults
from engine.sampling.sampler import Logprob
import pytest
from support import modules
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from engine.model import folders
from engine.model.tokenizer import Tokenizer
from engine.errors import EngineDeadError
from engine.request import SamplingParams
from engine.serving.collector import RequestOutputCollector
from engine.serving.openai import gate, large_bodies, responses, tools
from engine.serving.openai import serving as openai_serving
from engine.serving.openai.app import build_app
from engine.serving.openai.chat_template import left_open, messages_for_template
from engine.serving.openai.errors import as_api_error
from engine.serving.openai.limits import MAX_BODY_BYTES
from engine.serving.openai.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from engine.serving.openai.responses_protocol import ResponsesRequest
from engine.serving.openai.tool_calls import JSONEnd, ToolCallReader
from engine.serving.openai.tools import structured_outputs

lesson, page = registry.lesson("06f_openai_api"), cli.numbers("06f_openai_api")
heartbeat = registry.lesson("06e_async_engine").heartbeat


def serve(llm=None, keys=(), kind=lesson.OpenAIServing, names=("smol", "alias")):
    llm = llm or lesson.ScriptedLLM(max_model_len=512)
    return llm, build_app(kind(llm, list(names)), keys)


class Calling(lesson.OpenAIServing):
    """Served with --enable-auto-tool-choice --tool-call-parser hermes; its engine is a script and guides nothing."""

    enable_auto_tool_choice, tool_call_parser = True, "hermes"

    async def check_constraint(self, *about): ...


@pytest.fixture(scope="module")
def shared():
    return serve()


def ask(app, path, body=None, **about):
    return asyncio.run(lesson.call(app, path, body, **about))


def check_error(heard, status, param=None, text=""):
    error = heard.json["error"]
    assert set(heard.json) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert heard.status == status == error["code"], heard.text
    assert param is None or error["param"] == param, error
    assert text in error["message"] and "Traceback" not in error["message"], error
    return error


@pytest.mark.parametrize("root", [None, "/models/of/mine"])
def test_a_client_finds_the_tokenizer_of_a_model_that_has_another_name(root):
    """`vllm bench serve` loads it from what a model's card calls root."""
    llm, serving = lesson.ScriptedLLM(), lesson.OpenAIServing(lesson.ScriptedLLM(), ["smol"], {"mine": "/adapters/1"})
    serving.llm, serving.root = llm, root
    app = build_app(serving)
    cards = {card["id"]: card for card in ask(app, "/v1/models", method="GET").json["data"]}
    assert {name: (card["root"], card["parent"]) for name, card in cards.items()} == {
        "smol": (root or "smol", None), "mine": ("/adapters/1", "smol")}  # fmt: skip
    assert ask(app, "/v1/models/mine", method="GET").json == cards["mine"]
    assert ask(app, "/v1/models/", method="GET").json == ask(app, "/v1/models", method="GET").json, "a slash at its end"


# --- Wrong requests ---------------------------------------------------------------------------------------------------

P = {"prompt": "Hello"}
BAD_COMPLETIONS = [
    (b"", 400, None, "one JSON object"), (b"{", 400, None, "not JSON"), (b"[]", 400, None, "one JSON object"),
    (b"null", 400, None, "one JSON object"), (b'"text"', 400, None, "one JSON object"),
    (b"\xff\xfe", 400, None, "not JSON"), (b'{"prompt": "a"} x', 400, None, "not JSON"),
    ({}, 400, "prompt", "required"), ({"prompt": None}, 400, "prompt", ""), ({"prompt": 5}, 400, "prompt", ""),
    ({"prompt": ""}, 400, "prompt", "empty"), ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": [""]}, 400, "prompt", "empty"), ({"prompt": ["a", 5]}, 400, "prompt", ""),
    ({"prompt": [[]]}, 400, "prompt", "empty"), ({"prompt": [1.5]}, 400, "prompt", ""),
    ({"prompt": "x" * 512}, 400, "prompt", "512"), (P | {"max_tokens": 513}, 400, "max_tokens", "512"),
    ({"prompt": "x" * 100_000}, 400, "prompt", "characters"), ({"prompt": {"text": "a"}}, 400, "prompt", ""),
    (P | {"max_tokens": "5"}, 400, "max_tokens", ""), (P | {"max_tokens": 0}, 400, "max_tokens", "at least 1"),
    (P | {"max_tokens": 5.5}, 400, "max_tokens", ""), (P | {"max_tokens": True}, 400, "max_tokens", ""),
    (P | {"max_tokens": "5.0"}, 400, "max_tokens", ""), (P | {"seed": 2.0**63}, 400, "seed", "integer"),
    (P | {"seed": 1e300}, 400, "seed", "integer"), (P | {"echo": 1.0}, 400, "echo", "boolean"),
    (P | {"user": 5.0}, 400, "user", "string"), (P | {"stop": [5.0]}, 400, "stop", "string"),
    (P | {"stop_token_ids": [5.5]}, 400, "stop_token_ids", "integer"), ({"prompt": 5.0}, 400, "prompt", ""),
    (P | {"max_tokens": -1}, 400, "max_tokens", ""), (P | {"max_tokens": 10**30}, 400, "max_tokens", "context"),
    (P | {"temperature": 2.1}, 400, "temperature", "0 to 2"), (P | {"temperature": "hot"}, 400, "temperature", ""),
    (P | {"temperature": [1]}, 400, "temperature", ""), (P | {"top_p": 0}, 400, "top_p", ""),
    (P | {"top_p": 1.1}, 400, "top_p", ""), (P | {"top_k": -2}, 400, "top_k", ""), (P | {"min_p": 2}, 400, "min_p", ""),
    (P | {"n": 0}, 400, "n", "1 to 128"), (P | {"n": 129}, 400, "n", ""), (P | {"n": "2"}, 400, "n", ""),
    (P | {"n": 5}, 400, "n", "ever holds"),
    ({"prompt": ["a"] * 5}, 400, "n", "ever holds"), ({"prompt": [[1]] * 3, "n": 2}, 400, "n", "ever holds"),
    (P | {"n": 2, "temperature": 0}, 400, "n", ""),
    (P | {"presence_penalty": 3}, 400, "presence_penalty", ""), (P | {"repetition_penalty": 0}, 400, None, ""),
    (P | {"repetition_penalty": 1e-300}, 400, "repetition_penalty", "0.01 to 100"),
    (P | {"logprobs": 21}, 400, "logprobs", "0 to 20"), (P | {"logprobs": -1}, 400, "logprobs", ""),
    (P | {"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "stream"),
    (P | {"prompt_logprobs": 21}, 400, "prompt_logprobs", "0 to 20"),
    (P | {"prompt_logprobs": -1}, 400, "prompt_logprobs", "0 to 20"),
    (P | {"max_tokens": 0}, 400, "max_tokens", "at least 1"), (P | {"suffix": "end"}, 400, "suffix", "middle"),
    (P | {"best_of": 2}, 400, "best_of", ""), (P | {"logit_bias": {"a": 1.0}}, 400, "logit_bias", "token ids"),
    (P | {"logit_bias": {"5": "x"}}, 400, "logit_bias", ""), (P | {"logit_bias": [1]}, 400, "logit_bias", ""),
    (b'{"prompt": "a", "logit_bias": {"5": Infinity}}', 400, "logit_bias", "-100 to 100"),
    (P | {"logit_bias": {"5": 1e300}}, 400, "logit_bias", "-100 to 100"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature", ""),
    (P | {"seed": 2**63}, 400, "seed", "less than"), (P | {"cache_salt": ""}, 400, "cache_salt", "at least 1"),
    *(({"prompt": wrong}, 400, "prompt", "prompt: must be a text, token ids, or a list of either, all of one kind")
      for wrong in (None, 5, {}, [1.5], [True], ["a", {}], ["a", [1, 2]], [1, "a"], [[1], 2], [[1.5]], ["a", 1.0],
                    [[[1.0]]], [1e300])),
    (P | {"seed": "x"}, 400, "seed", ""),
    (P | {"stop": [""]}, 400, "stop", ""), (P | {"stop": ["x"] * 65}, 400, "stop", "64"),
    (P | {"stop": 5}, 400, "stop", ""),
    (P | {"stop_token_ids": [-1]}, 400, "stop_token_ids", ""), (P | {"min_tokens": 17}, 400, "min_tokens", ""),
    (P | {"priority": 1}, 400, "priority", "fcfs"), (P | {"stream_options": {}}, 400, "stream_options", "stream"),
    (P | {"stream": True, "stream_options": {"include": 1}}, 400, "stream_options", ""),
    (P | {"temprature": 1}, 400, "temprature", ""), (P | {"model": "gpt-9"}, 404, "model", "gpt-9"),
    (P | {"model": 5}, 400, "model", ""), (P | {"response_format": {"type": "xml"}}, 400, "response_format", ""),
    (P | {"response_format": {"type": "json_schema"}}, 400, "response_format", "schema"),
    (P | {"structured_outputs": {}}, 400, "structured_outputs", "exactly one"),
    (P | {"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs", "exactly one"),
    (P | {"guided_regex": "a", "response_format": {"type": "json_object"}}, 400, "guided_regex", "exactly one"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "param", "text"), BAD_COMPLETIONS)
def test_wrong_completions(shared, body, status, param, text):
    llm, app = shared
    check_error(ask(app, "/v1/completions", body), status, param, text)
    assert not llm.added, "the engine has heard of it"


M = {"messages": [{"role": "user", "content": "Hi"}]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": CITY, "strict": None}}]
BAD_CHATS = [
    ({}, "messages"), ({"messages": []}, "messages"), ({"messages": "Hi"}, "messages"),
    ({"messages": [{}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"), ({"messages": [{"role": "king", "content": "Hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    (M | {"top_logprobs": 2}, "top_logprobs"), (M | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (M | {"logprobs": 2}, "logprobs"), (M | {"max_tokens": 0}, "max_tokens"),
    *((M | {"max_completion_tokens": n, "max_tokens": 1}, "max_completion_tokens") for n in (0, 513, "5")),
    (M | {"tools": []}, "tools"), (M | {"tools": TOOLS}, "tool_choice"),
    (M | {"tool_choice": "required"}, "tool_choice"),
    (M | {"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"), (M | {"tools": [{"type": "function"}]}, "tools"),
    (M | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    (M | {"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    (M | {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": 5}}]}]},
     "messages"),
    (M | {"web_search_options": {}}, "web_search_options"), (M | {"modalities": ["audio"]}, "modalities"),
    (M | {"stream_interval": 0}, "stream_interval"), (M | {"stream_interval": "2"}, "stream_interval"),
    (M | {"use_beam_search": True}, "use_beam_search"), (M | {"reasoning_effort": 3}, "reasoning_effort"),
    (M | {"echo": True}, "echo"), (M | {"continue_final_message": True}, "continue_final_message"),
    (M | {"bad_words": "x"}, "bad_words"), (M | {"allowed_token_ids": []}, "allowed_token_ids"),
    (M | {"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    (M | {"logprob_token_ids": [5]}, "logprob_token_ids"), (M | {"prompt": "x"}, "prompt"),
    (M | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (M | {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_wrong_chats(shared, body, param):
    llm, app = shared
    check_error(ask(app, "/v1/chat/completions", body), 400, param)
    assert not llm.added


@pytest.mark.parametrize(
    ("body", "text"),
    [({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
      "messages.0.content.0.type: Input should be 'text'"),
     (M | {"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice.type: Input should be 'function'"),
     (M | {"messages": [{"role": "user"}]}, "messages.0: content is required"),
     (M | {"temPrature": 1}, "temPrature: Extra")],
)  # fmt: skip
def test_an_error_names_the_place_that_was_meant(shared, body, text):
    """And not the first type of a union that does not fit: who sent a list of parts knows that it is no string."""
    assert f"invalid request: {text}" in check_error(ask(shared[1], "/v1/chat/completions", body), 400)["message"]


def test_errors_name_the_clients_field():
    for said, param in (("prompt_token_ids: token id -1 must be", "prompt"), ("tokens: token id -1 must be", "tokens"),
                        ("lora_name 'x': is loaded already", "lora_name")):  # fmt: skip
        error = as_api_error(common.InputError(said))
        assert error.param == param and str(error).startswith(param)


UNREADABLE = "the body is not JSON that can be read: it must be UTF-8, not nested too deeply"
SURROGATE = "half of a surrogate pair is no text"


@pytest.mark.parametrize(
    ("body", "text"),
    [(b'{"prompt": "\\ud800"}', f"prompt: {SURROGATE}"), (b'{"prompt": "x", "model": "\\ud800"}', SURROGATE),
     (b'{"prompt": "x", "\\ud800": 1}', "unicode"), (b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}', SURROGATE),
     (b'{"prompt": "x", "response_format": {"type": "\\udfff"}}', SURROGATE),
     (b"[" * 100_000, UNREADABLE), (b'{"prompt": ' + b'{"a": ' * 50_000, UNREADABLE),
     (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", UNREADABLE),
     ('{"prompt": "é"}'.encode("latin-1"), UNREADABLE), (gzip.compress(b'{"prompt": "x"}', mtime=0), UNREADABLE),
     (b'{"prompt": "x", "seed": 1e999}', "seed: "), (b'{"prompt": "x\x00", "n": -0.0}', "not JSON: Invalid control"),
     (b"\xef\xbb\xbf{}", "prompt: Field required"), (b"nan", "not JSON: Expecting value")],
)  # fmt: skip
def test_bodies_that_break_parsers(shared, body, text):
    """Lone surrogates that no answer could repeat, nesting without end, numbers of 5,000 digits, other encodings."""
    llm, app = shared
    heard = ask(app, "/v1/completions", body)
    check_error(heard, 400, text=text)
    assert not llm.added


# --- Large requests ---------------------------------------------------------------------------------------------------


SIZE = 4_100_000  # bytes: just below what the gate lets in


def filled(make, one):
    """The bytes of a body with so many of `one` (JSON) that it is full."""
    before, after = json.dumps(make("HERE"), separators=(",", ":")).encode().split(b'"HERE"')
    return before + b"[" + b",".join([one] * (SIZE // (len(one) + 1))) + b"]" + after


def named(make, one):
    """A body with an object of many names."""
    before, after = json.dumps(make("HERE"), separators=(",", ":")).encode().split(b'"HERE"')
    pairs = b",".join(b'"%x":%s' % (i, one) for i in range(SIZE // (len(one) + 9)))
    return before + b"{" + pairs + b"}" + after


def user(content):
    return {"role": "user", "content": content}


CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TURN = user("a" * 900)
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
FUNCTIONS = [{"type": "function", "name": f"f{i}", "description": "x" * 900} for i in range(4096)]
LARGE = {
    "wrong messages": (CHAT, filled(lambda x: {"messages": x}, b"1")),
    "wrong parts": (CHAT, filled(lambda x: {"messages": [user(x)]}, b"100")),
    "parts": (CHAT, json.dumps({"messages": [user([{"type": "text", "text": "a" * 60}] * 4096)] * 10}).encode()),
    "messages": (CHAT, json.dumps({"messages": [TURN] * 4096}).encode()),
    "wrong tools": (CHAT, filled(lambda x: M | {"tools": x}, b'"tool"')),
    "tools": (CHAT, json.dumps(M | {"tool_choice": "none", "tools": [
        {"type": "function", "function": function} for function in FUNCTIONS]}).encode()),
    "a schema": (CHAT, named(lambda x: M | {"tool_choice": "required", "tools": [
        {"function": {"name": "f", "parameters": {"properties": x}}}]}, b"{}" + b" " * 40)),
    "documents": (CHAT, named(lambda x: M | {"documents": [x]}, b"1" + b" " * 24)),
    "wrong stop": (COMPLETION, filled(lambda x: P | {"stop": x}, b"100")),
    "stop": (COMPLETION, json.dumps(P | {"stop": ["x" * 64_000] * 64}).encode()),
    "bad words": (COMPLETION, json.dumps(P | {"bad_words": ["xy" * 16_000] * 128}).encode()),
    "logit_bias": (COMPLETION, named(lambda x: P | {"logit_bias": x}, b'"x"' + b" " * 24)),
    "allowed_token_ids": (COMPLETION, filled(lambda x: P | {"allowed_token_ids": x}, b"100")),
    "prompts": (COMPLETION, filled(lambda x: {"prompt": x}, b'"a"')),
    "wrong prompts": (COMPLETION, filled(lambda x: {"prompt": x}, b"1.5")),
    "names": (COMPLETION, named(lambda x: {"metadata": x} | P, b"null" + b" " * 24)),
    "arrays": (COMPLETION, filled(lambda x: P | {"metadata": {"x": x}}, b"[]")),
    "brackets": (COMPLETION, b"[" * SIZE),
    "a long name": (COMPLETION, json.dumps(P | {"x" * SIZE: 1}).encode()),
    "wrong input": (RESPONSE, filled(lambda x: {"input": x}, b"100")),
    "wrong content": (RESPONSE, filled(lambda x: {"input": [user(x)]}, b'"xx"')),
    "calls": (RESPONSE, json.dumps({"input": [CALL | {"arguments": " " * 800}] * 4096}).encode()),
    "references": (RESPONSE, filled(lambda x: {"input": x}, b'{"type":"item_reference","id":"%s"}' % (b"x" * 900))),
    "what is repeated": (RESPONSE, json.dumps({"input": "a", "tool_choice": "none", "tools": FUNCTIONS}).encode()),
    "tokens": ("/detokenize", filled(lambda x: {"tokens": x}, b'"1"')),
}  # fmt: skip


@functools.cache
def one_long_call():
    """Seconds in which nobody else gets to run Python: a list of a million numbers is parsed by one call into C."""
    numbers = filled(lambda x: x, b"100")
    return min(timed(lambda: json.loads(numbers)) for _ in range(3))


def one_call_for(body):
    """The same for this body, on the thread that parses it: a million texts need memory, which numbers do not."""

    def parse():
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(body)

    return large_bodies.LARGE_BODIES.submit(timed, parse).result()


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_request_stops_no_stream(kind):
    """However large and wrong it is, the loop is never away for longer than one call into C takes. Its own answer may
    be late. Somebody else's work on this machine may be in the way once, but hardly three times; the call into C is
    timed in the same seconds."""
    path, body = LARGE[kind]
    assert len(body) <= MAX_BODY_BYTES
    _, app = serve(lesson.ScriptedLLM(max_model_len=8192), kind=Calling)

    async def longest_stall():
        lateness = []
        await lesson.call(app, path, b"{}")
        beat = asyncio.create_task(heartbeat(lateness))
        await asyncio.sleep(0.02)
        lateness.clear()
        heard = await lesson.call(app, path, body)
        await asyncio.sleep(0.005)
        beat.cancel()
        assert heard.status in (200, 400, 404), heard.text[:500]
        return max(lateness)

    gc.collect()
    gc.freeze()  # as the server does
    try:
        stalls, allowed = [], [one_long_call()]
        while len(stalls) < 3 and (not stalls or min(stalls) > max(allowed)):
            stalls.append(asyncio.run(longest_stall()))
            allowed.append(one_call_for(body))
    finally:
        gc.unfreeze()
    assert min(stalls) <= max(allowed)


@pytest.mark.parametrize("kind", [kind for kind, (path, _) in LARGE.items() if path == CHAT or "wrong" in kind])
def test_what_a_large_request_costs_is_paid_elsewhere(kind, monkeypatch):
    """Reading, checking, preparing: none of it on the thread of the loop."""
    path, body = LARGE[kind]
    _, app = serve(lesson.ScriptedLLM(max_model_len=8192), kind=Calling)
    here, threads = threading.get_ident(), []

    def noting(owner, name):
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (threads.append(threading.get_ident()), work(*a, **k))[1])

    noting(large_bodies, "parse"), noting(tools, "structured_outputs")
    noting(lesson.OpenAIServing, "check_params"), noting(lesson.OpenAIServing, "render_chat")
    noting(responses, "as_chat")
    ask(app, path, body)
    assert threads and here not in threads
    threads.clear()
    ask(app, COMPLETION, P)
    assert set(threads) == {here}, "a small request needs no other thread"


def lists_of(schema):
    """Every list in a model's schema of pydantic-core."""
    if isinstance(schema, dict):
        found = [schema] if schema.get("type") == "list" else []
        return found + [x for value in schema.values() for x in lists_of(value)]
    return [x for value in schema for x in lists_of(value)] if isinstance(schema, list | tuple) else []


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest, ResponsesRequest,
                                  TokenizeRequest, DetokenizeRequest])  # fmt: skip
def test_every_list_is_read_to_its_first_mistake(kind):
    found = lists_of(kind.__pydantic_core_schema__)
    assert found and all(each.get("fail_fast") for each in found)


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [({"messages": [1] * 4097}, "messages", "messages: has 4,097 elements; at most 4,096 are allowed"),
     ({"messages": [user([1] * 4097)]}, "messages", "messages.0.content: has 4,097 elements"),
     ({"messages": [user([1] * 4096)]}, "messages", "messages.0.content.0: Input should be a valid dictionary"),
     (M | {"tools": [1] * 4097}, "tools", "tools: has 4,097"), (M | {"bad_words": ["x"] * 129}, "bad_words", "129"),
     (M | {"bad_words": ["x" * 4096, "y"]}, "bad_words", "4,096 characters in all"),
     (M | {"stop": ["x" * 4096, "y"]}, "stop", "more than 4,096 characters"),
     (M | {"stop": "x" * 4097}, "stop", "more than 4,096 characters"),
     (M | {"logit_bias": dict.fromkeys(map(str, range(16385)), 1)}, "logit_bias", "16,385 elements"),
     (M | {"documents": [dict.fromkeys(map(str, range(4097)), "x")]}, "documents", "documents.0: has 4,097"),
     (M | {"metadata": dict.fromkeys(map(str, range(4097)))}, "metadata", "4,097"),
     (M | {f"x{i}": 1 for i in range(9)}, "x0", "x0: Extra inputs are not permitted"),
     (M | {"n": 128, "allowed_token_ids": [5] * 9000}, "n", "n 128: times 9,000 token ids is more than 1,048,576"),
     (M | {"request_id": "x" * 257}, "request_id", "256"), (M | {"x" * 10_000: 1}, "x" * 256, "characters)")],
)  # fmt: skip
def test_lengths_are_bounded(shared, body, param, text):
    """Before an element is looked at; and an error repeats no more of a request than somebody would read."""
    llm, app = shared
    error = check_error(ask(app, CHAT, body), 400, param, text)
    assert len(error["message"]) < 2100 and not llm.added


def test_a_body_has_so_many_parts_and_nests_so_deep(shared):
    llm, app = shared
    for nested, status in ((126, 200), (127, 400)):  # the body and its metadata are two more
        body = b'{"prompt": "x", "metadata": {"a": ' + b"[" * nested + b"]" * nested + b"}}"
        assert ask(app, COMPLETION, body).status == status
    for many, said in ((b"[]", "arrays, objects and names"), (b"1", "elements")):
        check_error(ask(app, COMPLETION, filled(lambda x: P | {"metadata": {"x": x}}, many)), 400, None, said)
    check_error(ask(app, COMPLETION, P, headers={"x-request-id": "x" * 257}), 400, None, "X-Request-Id")
    assert ask(app, COMPLETION, P, headers={"x-request-id": "x" * 256}).json["id"] == "cmpl-" + "x" * 256
    llm.added.clear()


def test_large_bodies_wait_for_each_other_and_for_nobody_else(shared, monkeypatch):
    _, app = shared
    first, inside, most, parse = threading.Event(), [], [], large_bodies.parse

    def slow(body):
        if len(body) > 20_000:
            inside.append(body)
            most.append(len(inside))
            first.wait(10)
            inside.pop()
        return parse(body)

    monkeypatch.setattr(large_bodies, "parse", slow)

    async def run():
        large = P | {"user": "x" * 30_000}
        waiting = [asyncio.create_task(lesson.call(app, COMPLETION, large)) for _ in range(3)]
        while not inside:
            await asyncio.sleep(0.001)
        small = await asyncio.wait_for(lesson.call(app, COMPLETION, P), 5)
        first.set()
        return [small, *(await asyncio.gather(*waiting))]

    assert [heard.status for heard in asyncio.run(run())] == [200] * 4 and most == [1, 1, 1]
    shared[0].added.clear()


def test_a_long_text_is_tokenized_and_written_while_others_run(real_model):
    """`encode` of the tokenizers package holds the interpreter lock from beginning to end, `encode_batch` does not."""
    tokenizer, text = real_model[1], "The capital of France is Paris. " * 20_000
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text).ids and tokenizer.decode(ids) == text
    short = tokenizer.encode(text, True, 10)
    assert short == ids[-10:]
    for work in (lambda: tokenizer.encode(text), lambda: tokenizer.decode(ids * 8)):

        async def run(work=work):
            lateness = []
            beat = asyncio.create_task(heartbeat(lateness))
            await asyncio.sleep(0.02)
            lateness.clear()
            start = time.perf_counter()
            await asyncio.to_thread(work)
            taken = time.perf_counter() - start
            await asyncio.sleep(0.005)
            beat.cancel()
            return max(lateness) / taken

        assert min(asyncio.run(run()) for _ in range(3)) < 0.5, "the loop was away for most of it"


HALF = "\ud83d"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "given"),
    [*(("completions", field, HALF) for field in ("prompt", "model", "request_id", "user", "stop", "cache_salt",
                                                  "guided_regex", "service_tier")),
     ("completions", "stop", ["a", HALF]), ("completions", "metadata", {"a": [HALF]}),
     ("completions", "metadata", {HALF: 1}), ("completions", "response_format", {"type": "text", HALF: 1}),
     ("chat/completions", "messages", [{"role": "user", "content": HALF}]),
     ("chat/completions", "tools", [{"type": "function", "function": {"name": "f", "description": HALF}}]),
     ("chat/completions", "chat_template_kwargs", {"a": HALF})],
)  # fmt: skip
def test_half_a_surrogate_pair_is_refused_in_every_field(shared, path, field, given, stream):
    """No answer could repeat it, and a stream would break in the middle."""
    llm, app = shared
    body = (P if path == "completions" else M) | {"stream": stream, field: given}
    check_error(ask(app, f"/v1/{path}", body), 400, field, f"{field}: half of a surrogate pair is no text")
    check_error(ask(app, "/tokenize", {"prompt": HALF}), 400, "prompt", "surrogate")
    assert not llm.added
    whole = ask(app, "/v1/completions", P | {"request_id": "👩‍🚀", "user": "é"})
    assert whole.status == 200 and whole.json["id"] == "cmpl-👩‍🚀"
    llm.added.clear()


def test_a_body_says_that_it_is_json(shared):
    """`curl -d` sends a form, unless it is told; FastAPI then sees a text and would complain about fields."""
    for header in ("application/x-www-form-urlencoded", "text/plain", ""):
        for body in (P, b""):
            heard = ask(shared[1], "/v1/completions", body, headers={"content-type": header})
            check_error(heard, 400, None, "invalid request: Content-Type: must be application/json")
    for body in (b"null", b"[]", b'"x"', b"5", b"true", b""):
        heard = ask(shared[1], "/v1/completions", body)
        assert "the body must be one JSON object" in check_error(heard, 400)["message"]
    for header in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert ask(shared[1], "/v1/completions", P, headers={"content-type": header}).status == 200
        check_error(ask(shared[1], "/v1/completions", b"null", headers={"content-type": header}), 400, None, "the body")
    shared[0].added.clear()


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [("GET", "/v1/completions", None, 405), ("POST", "/health", None, 405), ("GET", "/nowhere", None, 404),
     ("GET", "/v1/models/gpt-9", None, 404), ("POST", "/tokenize", {}, 400), ("POST", "/tokenize", {"prompt": 5}, 400),
     ("POST", "/tokenize", {"prompt": "a", "messages": M["messages"]}, 400),
     ("POST", "/tokenize", {"messages": []}, 400), ("DELETE", "/v1/models", None, 405),
     ("POST", "/detokenize", {"tokens": "abc"}, 400), ("POST", "/tokenize", {"prompt": "a", "model": "x"}, 404)],
)  # fmt: skip
def test_other_paths(shared, method, path, body, status):
    check_error(ask(shared[1], path, body, method=method), status)


def test_a_body_beyond_the_limit_is_413_however_it_comes(monkeypatch):
    """In one piece, in many, with or without its length; the client may send it to the end before it hears."""
    monkeypatch.setattr(gate, "MAX_BODY_BYTES", 1000)
    llm, app = serve()
    for body in (b"x" * 1001, [b"x" * 100] * 11, [b"x" * 999, b"", b"xx"], b"x" * 50_000):
        check_error(ask(app, "/v1/completions", body), 413)
    exact = json.dumps(P).encode().ljust(1000)
    assert ask(app, "/v1/completions", exact).status == 200 and len(llm.added) == 1
    assert ask(app, "/v1/completions", [exact[:1], exact[1:500], exact[500:]]).status == 200


async def over_a_socket(app, *parts):
    """What a real server answers to bytes that arrive in these parts, until it closes or says no more."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", http="h11"))
        server.capture_signals = contextlib.nullcontext
        running = asyncio.create_task(server.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        heard, closed = b"", False
        with contextlib.suppress(TimeoutError):
            while not closed:
                piece = await asyncio.wait_for(reader.read(65536), 1.0 if heard else 30.0)
                heard, closed = heard + piece, not piece
        writer.close()
        server.should_exit = True
        await running
    return heard.decode(), closed


ASKED = json.dumps(P).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in ASKED) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "closes"),
    [([HEAD + b"Content-Length: %d\r\n\r\n" % len(ASKED), *(bytes([byte]) for byte in ASKED)], 200, False),
     ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", CHUNKED[:33], CHUNKED[33:]], 200, False),
     ([HEAD.replace(b"1.1", b"1.0") + b"Content-Length: %d\r\n\r\n" % len(ASKED) + ASKED], 200, True),
     ([HEAD.replace(b"/v1", b"http://x/v1") + b"Content-Length: %d\r\n\r\n" % len(ASKED) + ASKED], 200, False),
     ([HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + CHUNKED], 400, True)],
    ids=["in pieces", "chunked", "HTTP/1.0", "a whole URL", "two lengths"],
)  # fmt: skip
def test_a_request_on_a_socket(sent, status, closes):
    """A body of two lengths is a request of two readings (RFC 9112, 6.3): whoever sends it hears so, and is cut off."""
    llm, app = serve()
    heard, closed = asyncio.run(over_a_socket(app, *sent))
    assert heard.startswith(f"HTTP/1.1 {status} ") and heard.count("HTTP/1.1 ") == 1 and closed == closes, heard
    assert len(llm.added) == (status == 200)


@pytest.mark.parametrize("where", ["http://host:8000", "https://host", "HTTP://key@host"])
def test_a_target_may_be_a_whole_url(where):
    """So do clients ask that take the server for a proxy (`curl -x`); RFC 9112: every server must understand it."""
    _, app = serve(keys=["key"])
    key = {"authorization": "Bearer key"}
    assert ask(app, f"{where}/v1/completions", P, headers=key).status == 200
    assert ask(app, f"{where}/health", method="GET").status == 200
    check_error(ask(app, f"{where}/v1/completions", P), 401, text="Unauthorized")
    check_error(ask(app, where, method="GET"), 404, text="GET /")
    check_error(ask(app, f"/{where}/v1/completions", P, headers=key), 404)  # a path that looks like one


def test_a_client_that_hangs_up_in_the_middle_of_its_body(monkeypatch):
    llm, app = serve()

    async def run():
        messages = [{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            raise AssertionError("nobody is there")

        await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send)

    asyncio.run(run())
    assert not llm.added


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/tokenize", "/v1/nowhere"])
@pytest.mark.parametrize(
    "sent", [None, "Bearer wrong", "Bearer ", "key-1", "Bearer key-", "Bearer key-11", "Bearer ké"]
)
def test_without_the_key_nothing_is_said(path, sent):
    llm, app = serve(keys=["key-1", "key-2"])
    headers = {"authorization": sent} if sent else {}
    heard = ask(app, path, P, headers=headers)
    check_error(heard, 401)
    assert not llm.added and heard.headers["www-authenticate"] == "Bearer", "RFC 9110: a 401 says what it wants"


def test_with_a_key_and_without_need_for_one():
    _, app = serve(keys=["key-1", "key-2"])
    for key in ("key-1", "key-2"):
        assert ask(app, "/v1/completions", P, headers={"authorization": f"Bearer {key}"}).status == 200
        assert ask(app, "/v1/completions", P, headers={"authorization": f"bearer {key}"}).status == 200, "RFC 9110"
    assert ask(app, "/health", method="GET").status == 200, "a load balancer has no key"


def test_what_one_key_has_loaded_no_other_key_replaces(monkeypatch):
    """A name is what clients ask for: another's weights under it would answer them."""
    loaded = []

    class Loading(lesson.ScriptedLLM):
        async def call_utility(self, *about):
            loaded.append(about)

    serving = lesson.OpenAIServing(Loading(), ["smol"], {"own": "/adapters/0"})
    serving.runtime_loras = True
    app = build_app(serving, ["a", "b"])

    def change(path, name, key, **about):
        if path == "load":
            about["lora_path"] = f"/adapters/{key}"
        return ask(app, f"/v1/{path}_lora_adapter", about | {"lora_name": name},
                   headers={"authorization": f"Bearer {key}"})  # fmt: skip

    assert change("load", "x", "a").status == 200
    for path, about in (("load", {"load_inplace": True}), ("unload", {})):
        check_error(change(path, "x", "b", **about), 400, "lora_name", "another key")
    assert len(loaded) == 1 and serving.loras["x"][0] == "/adapters/a"
    assert ask(app, COMPLETION, P | {"model": "x"}, headers={"authorization": "Bearer b"}).status == 200
    assert change("load", "x", "a", load_inplace=True).status == 200
    assert change("unload", "x", "a").status == 200 and change("load", "x", "b").status == 200
    assert change("unload", "own", "b").status == 200, "the server's own are everybody's"


# --- Right requests ---------------------------------------------------------------------------------------------------


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


def test_an_integer_may_be_written_with_a_point(shared):
    """As pydantic's lax mode lets vLLM take it: JSON does not tell 5.0 from 5, and what counts is where it stands."""
    llm, app = shared
    llm.added.clear()
    body = {"max_tokens": 7.0, "seed": 1e18, "n": 1.0, "top_k": -1.0, "stop_token_ids": [5.0, 6], "temperature": 1,
            "allowed_token_ids": [7, 8.0], "logprobs": 2.0, "stream_interval": 3.0, "priority": -0.0,
            "metadata": {"x": 5.0}, "documents": None}  # fmt: skip
    for prompt, want in (([97.0, 98], [[97, 98]]), ([[97.0], [98, 99.0]], [[97], [98, 99]])):
        assert ask(app, "/v1/completions", {"prompt": prompt} | body).status == 200
        assert [prompt["prompt_token_ids"] for _, prompt, _ in llm.added] == want
        assert all(type(token) is int for ids in want for token in ids)
        for _, _, params in llm.added:
            assert params == SamplingParams(max_tokens=7, seed=10**18, top_k=-1, stop_token_ids=[5, 6], logprobs=2,
                                            allowed_token_ids=[7, 8])  # fmt: skip
            assert {type(x) for x in (params.max_tokens, params.seed, *params.allowed_token_ids)} == {int}
        llm.added.clear()
    chat = M | {"max_completion_tokens": 7.0, "logprobs": True, "top_logprobs": 2.0}
    assert ask(app, "/v1/chat/completions", chat).status == 200 and llm.added[0][2].max_tokens == 7
    assert DetokenizeRequest(tokens=[97.0, 98]).tokens == [97, 98]
    kept = {"metadata": {"x": 5.0}, "chat_template_kwargs": {"x": [5.0]}}
    read = ChatCompletionRequest(**M, **kept)
    assert json.dumps([read.metadata, read.chat_template_kwargs]) == json.dumps([*kept.values()]), "theirs, untouched"


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
    *chunks, _ = lesson.read_events(heard.text)
    first, middle, last = RECORDED_CHUNKS[path]
    wanted = [first, *[middle] * (len(chunks) - 2), last]
    assert len(chunks) > 2 and [chunk["choices"][0].keys() for chunk in chunks] == [set(x.split()) for x in wanted]
    opening = {"prompt_token_ids", "prompt_text"} if chat else set()
    ends = [opening, *[set()] * (len(chunks) - 2), {"system_fingerprint"}]
    assert [chunk.keys() for chunk in chunks] == [envelope | end for end in ends]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", P), ("/v1/chat/completions", M)])
def test_the_fingerprint_comes_with_an_answer_or_the_end_of_its_stream(path, body, usage):
    named = type("Named", (lesson.OpenAIServing,), {"system_fingerprint": "fp-1"})
    _, app = serve(kind=named)
    assert ask(app, path, body).json["system_fingerprint"] == "fp-1"
    streamed = ask(app, path, body | {"stream": True, "stream_options": {"include_usage": usage}})
    events = lesson.read_events(streamed.text)[:-1]
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
    streamed = lesson.read_events(ask(app, "/v1/completions", {"prompt": given, "echo": True, "stream": True}).text)
    assert [lesson.text_of(streamed, i) for i in range(len(prompts))] == [p + "Paris." for p in prompts]


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


@pytest.mark.parametrize(
    "fields",
    [{"reasoning_effort": "low"}, {"verbosity": "low"}, {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
     {"modalities": ["text"]}, {"parallel_tool_calls": False}, {"tool_choice": "none"}, {"tools": None},
     {"functions": None, "audio": None, "a field of tomorrow": None}, {"tools": TOOLS, "tool_choice": "none"},
     {"prediction": {"type": "content", "content": "x"}}, {"chat_template_kwargs": {"enable_thinking": False}},
     {"use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True},
     {"bad_words": [], "return_tokens_as_token_ids": False, "allowed_token_ids": None, "truncate_prompt_tokens": None},
     {"continue_final_message": False, "echo": False, "include_reasoning": True},
     {"mm_payload": "tensors", "return_mm_kwargs": None, "return_token_offsets": False, "watermarking": None,
      "routed_experts_prompt_start": 0, "session_id": "s", "return_prompt_text": None, "documents": []},
     {"stop": [], "logit_bias": {}, "top_logprobs": 0, "logprobs": False, "n": None, "seed": None},
     {"stream": False, "stream_options": None}, {"tools": [{"function": {"name": "f"}}], "tool_choice": "none"}],
)  # fmt: skip
def test_fields_that_clients_send(shared, fields):
    """openai-node, LangChain, LiteLLM and others send them on their own account; vLLM answers."""
    heard = ask(shared[1], "/v1/chat/completions", M | fields)
    assert heard.status == 200 and heard.json["choices"][0]["message"]["content"] == "Paris.", heard.text


def test_best_of_all_of_them_is_all_of_them(shared):
    assert ask(shared[1], "/v1/completions", P | {"n": 2, "best_of": 2, "temperature": 1}).status == 200


CALL = {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("said", "want"),
    [([CALLED, {"role": "tool", "tool_call_id": "1", "content": "sunny"}], "Hisunny"),
     ([CALLED | {"content": "Let me see"}, {"role": "tool", "tool_call_id": "1", "name": "f", "content": [
         {"type": "text", "text": "sun", "cache_control": {"type": "ephemeral"}}]}], "HiLet me seesun"),
     ([{"role": "assistant", "content": "Yes", "reasoning_content": "?", "thinking_blocks": []}], "HiYes"),
     ([{"role": "assistant", "content": "Yes", "provider_specific_fields": {"refusal": None}}], "HiYes"),
     ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}], "HiNo"),
     ([{"role": "assistant"}], "Hi")],
)  # fmt: skip
def test_histories_that_clients_send(shared, said, want):
    """Answers with calls and their results, and what LiteLLM and others hang on messages."""
    llm, app = shared
    llm.added.clear()
    assert ask(app, "/v1/chat/completions", {"messages": [*M["messages"], *said]}).status == 200
    assert llm.added[0][1]["prompt"] == want


def test_a_template_hears_of_tools_and_wishes(shared):
    heard = []

    class Listening(lesson.ScriptedTokenizer):
        def render_chat(self, messages, add_generation_prompt=True, **variables):
            heard.append((messages, variables))
            return super().render_chat(messages)

    llm = lesson.ScriptedLLM(512)
    llm.front.tokenizer = Listening()
    body = {"messages": [*M["messages"], CALLED], "tools": TOOLS, "tool_choice": "none", "reasoning_effort": "none",
            "chat_template_kwargs": {"tools": 5, "x": 1}}  # fmt: skip
    assert ask(serve(llm)[1], "/v1/chat/completions", body).status == 200
    ((messages, variables),) = heard
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "Rome"}}, "an object"
    function = {"name": "f", "description": "F.", "parameters": CITY}
    assert variables == {"x": 1, "reasoning_effort": "none", "enable_thinking": False,
                         "tools": [{"type": "function", "function": function}]}  # fmt: skip


@pytest.mark.parametrize(("said", "heard"), [
    ({"reasoning": "Hm."}, "Hm."), ({"reasoning_content": "Hm."}, "Hm."), ({"reasoning": ""}, ""),
    ({"reasoning": None}, None), ({"reasoning": {"of": "a library"}}, None),
    ({"role": "user", "reasoning": "Hm."}, None),
])  # fmt: skip
def test_a_template_hears_what_an_answer_was_thought_of(said, heard):
    """Of answers that other servers gave; vLLM hands it on under both names, too."""
    chat = ChatCompletionRequest(messages=[{"role": "assistant", "content": "42", **said}])
    (message,) = messages_for_template(chat.messages)
    assert message.get("reasoning") == message.get("reasoning_content") == heard


def test_a_template_hears_of_documents(shared):
    heard = []

    class Listening(lesson.ScriptedTokenizer):
        def render_chat(self, messages, add_generation_prompt=True, **variables):
            heard.append(variables)
            return super().render_chat(messages)

    llm = lesson.ScriptedLLM(512)
    llm.front.tokenizer = Listening()
    given = [{"title": "t", "text": "x"}]
    for more in ({}, {"chat_template_kwargs": {"documents": 5}}):
        assert ask(serve(llm)[1], "/v1/chat/completions", M | more | {"documents": given}).status == 200
    assert [variables["documents"] for variables in heard] == [given, given]


class Closing(lesson.ScriptedTokenizer):
    """Its template closes every message; `strips` as Llama 3's does."""

    def __init__(self, strips=False, omits=False):
        self.strips, self.omits = strips, omits

    def render_chat(self, messages, add_generation_prompt=True, **variables):
        texts = [message["content"].strip() if self.strips else message["content"] for message in messages]
        texts[-1:] = [] if self.omits else texts[-1:]
        return "".join(f"<{text}>" for text in texts) + "<" * add_generation_prompt


@pytest.mark.parametrize(("strips", "want"), [(False, "<Hi>< Sure, "), (True, "<Hi><Sure,")])
def test_an_answer_goes_on_where_its_client_began_it(strips, want):
    """What the client began is the prompt's end, and no part of the answer."""
    llm = lesson.ScriptedLLM(512)
    llm.front.tokenizer = Closing(strips)
    _, app = serve(llm)
    said = {"messages": [*M["messages"], {"role": "assistant", "content": " Sure, "}]}
    body = said | {"continue_final_message": True, "add_generation_prompt": False, "return_prompt_text": True}
    found = ask(app, "/v1/chat/completions", body).json
    assert found["choices"][0]["message"]["content"] == "Paris." and found["prompt_text"] == want
    assert llm.added[0][1]["prompt"] == want
    streamed = lesson.read_events(ask(app, "/v1/chat/completions", body | {"stream": True}).text)
    assert [x.get("prompt_text") for x in streamed[:-1]] == [want, *[None] * (len(streamed) - 2)], "once"
    tokens = {name: value for name, value in body.items() if name != "return_prompt_text"}
    assert ask(app, "/tokenize", tokens).json["tokens"] == llm.added[0][1]["prompt_token_ids"]
    for path in ("/v1/chat/completions", "/tokenize"):
        more = {"continue_final_message": True}
        check_error(ask(app, path, said | more), 400, "continue_final_message", "add_generation_prompt to be false")
    llm.front.tokenizer.omits = True
    check_error(ask(app, "/v1/chat/completions", body), 400, "continue_final_message", "leaves the last message out")


OPEN = {"completions": {"prompt": "Hello"}, "chat/completions": M, "responses": {"input": "Hello"}}


@pytest.mark.parametrize("path", OPEN)
def test_what_a_request_leaves_open_is_as_the_model_wishes(path):
    """vLLM: the client's, then the model's, then OpenAI's; and a server's limit holds for everybody."""
    longest = {"completions": "max_tokens", "responses": "max_output_tokens"}.get(path, "max_completion_tokens")
    wishes = {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.25}
    for more, limit, body, want in (
        ({}, None, {}, (0.25, 7, 1.25, 16 if path == "completions" else None)),
        ({}, None, {"temperature": 1.5, "top_k": 0, longest: 9}, (1.5, 0, 1.25, 9)),
        ({"max_tokens": 5}, None, {}, (0.25, 7, 1.25, 16 if path == "completions" else 5)),
        ({"max_tokens": 5}, None, {longest: None, "temperature": None}, (0.25, 7, 1.25, 5)),
        ({"max_tokens": 5}, None, {longest: 9}, (0.25, 7, 1.25, 9)),
        ({"max_tokens": 5}, 5, {longest: 9}, (0.25, 7, 1.25, 5)),
        ({"max_tokens": 10**6}, 10**6, {longest: None}, (0.25, 7, 1.25, 512)),  # no more than a context
    ):
        llm = lesson.ScriptedLLM(512)
        llm.sampling_defaults = SamplingDefaults(wishes | more, limit)
        _, app = serve(llm)
        heard = ask(app, f"/v1/{path}", OPEN[path] | body)
        assert heard.status == 200, heard.text
        found = llm.added[-1][2]
        assert (found.temperature, found.top_k, found.repetition_penalty, found.max_tokens) == want, (more, limit, body)


def test_tools_have_a_template_of_their_own(real_model):
    """Hermes' and Mixtral's folders have two: what a client sends as tools must reach the model."""
    llm = lesson.ScriptedLLM(512)
    llm.front.tokenizer = tokenizer = copy.copy(real_model[1])
    tokenizer.chat_template = {
        "default": "{{ messages[0].content }}",
        "tool_use": "{{ tools | tojson(ensure_ascii=False) }} {{ messages[0].content }}",
    }
    _, app = serve(llm, kind=Calling)
    tools = [{"type": "function", "function": {"name": "wetter", "description": "für München"}}]
    for more, start in (({}, "Hi"), ({"tools": tools}, '[{"type": "function"')):
        assert ask(app, "/v1/chat/completions", M | more).status == 200
        prompt = llm.added[-1][1]["prompt"]
        assert prompt.startswith(start) and ("für München" in prompt) == ("tools" in more)
        tokens = ask(app, "/tokenize", M | more).json["tokens"]
        assert tokenizer.decode(tokens, False) == prompt


@functools.cache
def tokenizers(strip):
    import transformers

    folder = folders.model_folder()
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    theirs.chat_template = ours.chat_template = theirs.chat_template.replace(
        "message['content']", f"(message['content']{strip})"
    )
    return theirs, ours


@pytest.mark.parametrize("strip", ["", " | trim"])
@pytest.mark.parametrize("said", ["Sure, ", "Sure", "  two  words\n", "", "<|im_end|>", "Hello"])
def test_an_open_end_is_transformers_own(said, strip):
    """Of SmolLM2's template, and of one that strips messages as Llama 3's does."""
    theirs, ours = tokenizers(strip)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
    want = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)

    def render(found):
        return ours.render_chat(found, add_generation_prompt=False)

    assert left_open(render, messages) == want and messages[-1]["content"] == said


@pytest.mark.parametrize("arguments", ['{"x": 3, "alternative', "[]", "5", "", None, "[" * 5000])
def test_arguments_that_cannot_be_read_do_not_end_a_conversation(shared, arguments):
    """A call that max_tokens has cut comes back in every later request (Semantic Kernel)."""
    said = CALLED | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}]}
    body = ChatCompletionRequest(messages=[*M["messages"], said])
    assert messages_for_template(body.messages)[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert ask(shared[1], "/v1/chat/completions", {"messages": [*M["messages"], said]}).status == 200


def test_a_limit_beyond_the_context_ends_with_it(shared):
    llm, app = shared
    llm.added.clear()
    for limit in (2, 512):
        assert ask(app, "/v1/completions", {"prompt": "x" * 511, "max_tokens": limit}).status == 200
    assert [params.max_tokens for *_, params in llm.added] == [2, 512], "the engine knows where the context ends"


@pytest.mark.parametrize(("side", "read"), [("left", "y" * 5), ("right", "x" * 5), (None, "y" * 5)])
def test_of_a_text_that_is_cut_only_what_can_be_read_is_tokenized(side, read):
    """512 tokens of at most one character: behind 512 characters nobody need look, however many there are."""
    seen = []

    class Noting(lesson.ScriptedTokenizer):
        def encode(self, text, *about):
            seen.append(len(text))
            return super().encode(text, *about)

    llm = lesson.ScriptedLLM(512)
    llm.front.tokenizer = Noting()
    _, app = serve(llm)
    body = {"prompt": "x" * 50_000 + "y" * 50_000, "truncate_prompt_tokens": 5, "truncation_side": side}
    for prompt, length in ((body["prompt"], 512), ("x" * 100 + "y" * 100, 200)):
        assert ask(app, "/v1/completions", body | {"prompt": prompt}).status == 200
        assert seen == [length] and bytes(llm.added[-1][1]["prompt_token_ids"]).decode() == read
        seen.clear()


def test_nothing_is_hidden_from_listeners(shared):
    options = {"include_obfuscation": True, "include_usage": True}
    events = lesson.read_events(ask(shared[1], "/v1/completions", P | {"stream": True, "stream_options": options}).text)
    assert lesson.text_of(events) == "Paris." and events[-2]["usage"]["completion_tokens"] == 3


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


def test_a_page_in_a_browser_may_ask():
    """A preflight has no key; and what a page is refused, it may read."""
    llm, app = serve(keys=["key"])
    wants = {"origin": "http://page", "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type,x-stainless-os"}  # fmt: skip
    heard = ask(app, "/v1/chat/completions", method="OPTIONS", headers=wants)
    assert heard.status == 200 and heard.headers["access-control-allow-origin"] == "*"
    assert "POST" in heard.headers["access-control-allow-methods"]
    assert heard.headers["access-control-allow-headers"] == wants["access-control-request-headers"]
    for key, status in (("key", 200), ("wrong", 401)):
        heard = ask(app, "/v1/completions", P, headers={"origin": "http://page", "authorization": f"Bearer {key}"})
        assert heard.status == status and heard.headers["access-control-allow-origin"] == "*"
    assert len(llm.added) == 1


# --- Tools ------------------------------------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "f"}}
NAMED_G = {"type": "function", "function": {"name": "g"}}


def request(choice, tools=TOOLS, **fields):
    return ChatCompletionRequest.model_validate(M | {"tools": tools, "tool_choice": choice} | fields)


def matches(constraint, text):
    """May an answer be `text`, byte by byte?"""
    import llguidance
    from engine.sampling.guided.guidance import read_grammar
    from engine.sampling.guided.structured_outputs import normalize

    matcher = read_grammar(llguidance.LLTokenizer("byte"), *normalize(constraint))
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def call_of(name, arguments):
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def constraint(body):
    return structured_outputs(body)[1]


def test_a_demanded_call_can_only_be_one():
    """Two tools whose schemas use the same `$defs` name for different things, and one that takes any object."""

    def thing(kind):
        return {"type": "object", "properties": {"x": {"$ref": "#/$defs/T"}}, "required": ["x"],
                "additionalProperties": False, "$defs": {"T": {"type": kind}}}  # fmt: skip

    tools = [{"type": "function", "function": {"name": 'q"é', "parameters": thing("integer")}},
             {"type": "function", "function": {"name": "g", "parameters": thing("boolean")}},
             {"type": "function", "function": {"name": "h", "parameters": {"type": "object"}}}]  # fmt: skip
    a, b, c = call_of('q"é', {"x": 1}), call_of("g", {"x": True}), call_of("h", {"y": "z"})
    many, one = (constraint(request("required", tools, parallel_tool_calls=p)) for p in (True, False))
    for text in (a, b, c):
        assert matches(many, f"[{text}]") and matches(one, f"[{text}]") and not matches(many, text)
    assert matches(many, f"[{a}, {b}, {a}]") and not matches(one, f"[{a}, {b}]")
    for wrong in ("[]", f"[{call_of('g', {'x': 1})}]", f"[{call_of('i', {})}]", f"[{call_of('h', 5)}]"):
        assert not matches(many, wrong)
    named = constraint(request({"type": "function", "function": {"name": "g"}}, tools))
    assert matches(named, '{"x": true}') and not matches(named, '{"x": 1}')


def test_a_demanded_calls_schema_may_overlap_and_ask_for_nothing():
    value = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    parameters = {"type": "object", "properties": {"x": {"type": "array", "items": value, "uniqueItems": False}}}
    tools = [{"type": "function", "function": {"name": "g", "parameters": parameters}}]
    many, one = (constraint(request(choice, tools)) for choice in ("required", NAMED_G))
    for x, fine in (([1, 1.5, 1], True), ([""], False)):
        assert matches(many, f"[{call_of('g', {'x': x})}]") == matches(one, json.dumps({"x": x})) == fine


def test_a_demanded_call_has_no_arguments_of_its_own():
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "g", "parameters": parameters}}]
    many, one = (constraint(request(choice, tools)) for choice in ("required", NAMED_G))
    for arguments, fine in (({"x": 1}, True), ({"x": 1, "y": 2}, False)):
        assert matches(many, f"[{call_of('g', arguments)}]") == matches(one, json.dumps(arguments)) == fine


@pytest.mark.parametrize("said", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_that_names_no_parameters_has_none(said):
    """As OpenAI says and vLLM does: a demanded call has the arguments {}, and invents none."""
    tools = [{"type": "function", "function": {"name": "g", **said}}]
    many, one = (constraint(request(choice, tools)) for choice in ("required", NAMED_G))
    for arguments, fine in (({}, True), ({"x": 1}, False)):
        assert matches(many, f"[{call_of('g', arguments)}]") == matches(one, json.dumps(arguments)) == fine


def test_a_demanded_call_comes_before_a_form_for_texts():
    both = request("required", response_format={"type": "json_object"})
    assert "grammar" in constraint(both)
    for choice in ("auto", "none"):
        assert constraint(request(choice, response_format={"type": "json_object"})) == {"json_object": True}


def read(choice, pieces, **fields):
    """Content and (name, arguments) of every call, put together as a client does."""
    reader, content, calls = ToolCallReader(request(choice, **fields)), "", []
    for i, piece in enumerate(pieces):
        delta = reader.read(piece, i == len(pieces) - 1)
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["id"].startswith("chatcmpl-tool-") and call["type"] == "function"
                calls.append([call["function"]["name"], ""])
            assert call["index"] == len(calls) - 1 and ("id" in call) == ("name" in call["function"])
            calls[-1][1] += call["function"]["arguments"]
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


HARD = {"a": '}]"\\{', "b": [{"c": {}}, '\\"<tool_call>'], "</tool_call>": None}


def decided(arguments, close="</tool_call>"):
    """A call as Hermes writes it; the tags may stand in its strings, too."""
    return f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}{close}"


DECIDED = '<tool_call>\n{"name": "f", "arguments": {"city": "<Rome>"}}\n</tool_call>'


@given(st.lists(st.integers(0, 200), max_size=30), st.sampled_from([
    ("required", f"[{call_of('f', HARD)}]", "", [("f", HARD)]),
    ("required", f"[{call_of('é', {})}, {call_of('f', HARD)}]", "", [("é", {}), ("f", HARD)]),
    (NAMED, json.dumps(HARD), "", [("f", HARD)]),
    ("none", DECIDED, DECIDED, []), ("auto", "Hello < <tool", "Hello < <tool", []),
    ("auto", f"Yes. {DECIDED}\n{DECIDED}", "Yes. ", 2 * [("f", {"city": "<Rome>"})]),
    ("auto", DECIDED.removesuffix("</tool_call>"), "", [("f", {"city": "<Rome>"})]),
    ("auto", "<tool_call>what?</tool_call> ok", "<tool_call>what?</tool_call> ok", []),
    ("auto", f"{DECIDED}\n ok", "ok", [("f", {"city": "<Rome>"})]),
    ("auto", '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
     '<tool_call>{"name": "f", "arguments": 5}</tool_call>', []), ("auto", "", "", []),
    ("auto", f"{decided(HARD)}\n{decided(HARD)}", "", 2 * [("f", HARD)]),
    ("auto", f"a {decided(HARD)} b {decided({})}c", "a b c", [("f", HARD), ("f", {})]),
    ("auto", decided(HARD).removesuffix("call>"), "", [("f", HARD)]),
    ("auto", decided(HARD, "")[:-2], decided(HARD, "")[:-2], []),
    ("auto", decided(HARD, "") + decided({}, "") + decided({}), "", [("f", HARD), ("f", {}), ("f", {})]),
    ("auto", '<tool_call>{"name": "f", "arguments": {"a": "\\u00e9\\ud83d\\u003c/tool_call>"}}</tool_call>', "",
     [("f", {"a": "é\ud83d</tool_call>"})]),
    ("auto", "<tool_call>{'name': 'f'}" + DECIDED, "<tool_call>{'name': 'f'}", [("f", {"city": "<Rome>"})]),
    ("auto", '<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call>' + DECIDED,
     '<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call>', [("f", {"city": "<Rome>"})]),
    ("auto", '<tool_call>{"name": "\\ud83d", "arguments": {}}', '<tool_call>{"name": "\\ud83d", "arguments": {}}', []),
]))  # fmt: skip
@settings(max_examples=200)
def test_calls_read_the_same_however_they_come(cuts, case):
    choice, text, content, calls = case
    at = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    assert read(choice, [text[a:b] for a, b in itertools.pairwise(at)] or [""]) == (content, calls)
    assert read(choice, [*text, ""]) == (content, calls)


PIECES = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"a": "', "}", '"', "\\", " ", "\n", "<", "x",
          DECIDED, decided(HARD)]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.lists(st.integers(0, 300), max_size=12))
@settings(max_examples=300)
def test_what_nearly_is_a_call_reads_the_same_however_it_comes(text, cuts):
    """And costs no more than two looks at a character, however many calls begin and do not end."""
    at = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    looks, look = [], JSONEnd.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONEnd, "read", lambda end, text: looks.append(n := look(end, text)) or n)
        whole = read("auto", [text])
        assert sum(looks) <= 2 * len(text)
    assert read("auto", [text[a:b] for a, b in itertools.pairwise(at)] or [""]) == whole
    assert read("auto", [*text, ""]) == whole


@pytest.mark.parametrize(
    ("choice", "seen"), [(None, True), ("auto", True), ("none", False), ("required", False), (NAMED, False)]
)
def test_tags_that_are_special_tokens_are_seen_where_a_call_may_stand(choice, seen):
    """As in vLLM, whatever the client says of special tokens; without tools, the client is heard."""
    llm, app = serve(kind=Calling)
    for more in ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False}):
        assert ask(app, "/v1/chat/completions", M | {"tools": TOOLS, "tool_choice": choice} | more).status == 200
        assert ask(app, "/v1/chat/completions", M | more).status == 200
    skips = [params.skip_special_tokens for *_, params in llm.added]
    assert skips[::2] == ([False] * 3 if seen else [True, True, False]) and skips[1::2] == [True, True, False]


@pytest.mark.parametrize("stream", [False, True])
def test_half_of_a_surrogate_pair_in_a_call_can_be_sent(stream):
    text = r'<tool_call>{"name": "f", "arguments": {"a": "\u00e9\ud83d", "b": "\ud83d\ude00"}}</tool_call>'
    app = serve(Letters([(0, text, True, True)]), kind=Calling)[1]
    heard = ask(app, "/v1/chat/completions", M | {"tools": TOOLS, "stream": stream})
    found = lesson.read_events(heard.text)[1]["choices"][0]["delta"] if stream else heard.json["choices"][0]["message"]
    (call,) = found["tool_calls"]
    assert call["function"]["arguments"] == r'{"a": "é\ud83d", "b": "😀"}'
    assert stream or found["content"] is None, "as in vLLM: who calls of its own accord, and says nothing, has none"


def test_arguments_nested_deeper_than_we_can_write_are_text():
    for depth in range(100, 2000, 50):
        text = decided({}).replace("{}", '{"a": ' + depth * "[" + depth * "]" + "}")
        content, calls = read("auto", [text])
        assert len(calls) == 1 or content == text


@pytest.mark.parametrize("json_text", ["x", '{"a": "b\nc', "{'", '{"a": \\', '{"a"</tool_call>'])
def test_what_json_cannot_have_is_told_at_once(json_text):
    """And nobody waits for the end of a call that is none."""
    text = f"<tool_call>{json_text}"
    assert ToolCallReader(request("auto")).read(text, False) == {"content": text}


@pytest.mark.parametrize(
    "unit", ["<tool_call>", '<tool_call>{"', '<tool_call>{"a": ', '<tool_call>{"</tool_call>', DECIDED]
)
def test_many_calls_that_begin_cost_two_looks_at_a_character(monkeypatch, unit):
    looks, look = [], JSONEnd.read
    monkeypatch.setattr(JSONEnd, "read", lambda end, text: looks.append(n := look(end, text)) or n)
    text = unit * 500
    assert read("auto", [text]) == (("", 500 * [("f", {"city": "<Rome>"})]) if unit == DECIDED else (text, []))
    assert sum(looks) <= 2 * len(text)


def test_one_call_if_the_client_wants_one():
    assert read("auto", [f"{DECIDED}{DECIDED}"], parallel_tool_calls=False)[1] == [("f", {"city": "<Rome>"})]


@pytest.mark.parametrize(
    ("choice", "text", "reason"),
    [("required", f"[{call_of('f', HARD)}]", "tool_calls"), (NAMED, json.dumps(HARD), "stop"),
     ("auto", DECIDED, "tool_calls"), (None, DECIDED, "tool_calls"), ("auto", "No.", "stop")],
)  # fmt: skip
def test_calls_in_answers(choice, text, reason):
    """In the official client's types, whole and streamed; a named call ends with `stop`, as OpenAI's do."""
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    pieces = [(0, char, i == len(text) - 1, i == len(text) - 1) for i, char in enumerate(text)]
    body = M | {"tools": TOOLS, "tool_choice": choice}
    whole = ask(serve(Letters([(0, text, True, True)]), kind=Calling)[1], "/v1/chat/completions", body)
    answer = ChatCompletion.model_validate(whole.json, strict=True).choices[0]
    assert answer.finish_reason == reason and whole.json["choices"][0]["message"]["role"] == "assistant"
    *events, done = lesson.read_events(
        ask(serve(Letters(pieces), kind=Calling)[1], "/v1/chat/completions", body | {"stream": True}).text
    )
    chunks = [ChatCompletionChunk.model_validate(event, strict=True).choices[0] for event in events]
    assert done == "[DONE]" and [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [reason]
    calls = [call for c in chunks for call in c.delta.tool_calls or ()]
    content = "".join(c.delta.content or "" for c in chunks)
    if text == "No.":
        assert (answer.message.content, answer.message.tool_calls, content, calls) == ("No.", None, "No.", [])
        return
    (call,) = answer.message.tool_calls
    assert not answer.message.content and not content and call.function.name == calls[0].function.name == "f"
    assert "index" not in whole.json["choices"][0]["message"]["tool_calls"][0]
    streamed = "".join(call.function.arguments for call in calls)
    assert streamed == call.function.arguments and json.loads(streamed) in (HARD, {"city": "<Rome>"})
    grows = 1 if choice in ("auto", None) else len(streamed) + (choice == "required")  # the name, then every character
    assert len(calls) == grows, "a demanded call is told while it grows"


def test_a_streamed_chat(shared):
    _, app = shared
    body = M | {"stream": True, "stream_options": {"include_usage": True}}
    heard = ask(app, "/v1/chat/completions", body)
    assert heard.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = lesson.read_events(heard.text)
    assert done == "[DONE]" and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1 and all(c["usage"] is None for c in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert lesson.text_of(chunks) == "Paris." and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 5
    plain = lesson.read_events(ask(app, "/v1/chat/completions", M | {"stream": True}).text)
    assert "usage" not in plain[0]
    each = body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, _ = lesson.read_events(ask(app, "/v1/chat/completions", each).text)
    first, last = chunks[0]["usage"], chunks[-1]["usage"]
    assert (first["prompt_tokens"], first["completion_tokens"], last["completion_tokens"]) == (2, 0, 3)
    alone = body | {"stream_options": {"continuous_usage_stats": True}}
    assert '"usage"' not in ask(app, "/v1/chat/completions", alone).text, "as in vLLM: include_usage decides"


class Letters(lesson.ScriptedLLM):
    """An answer that the test gives, piece by piece."""

    def __init__(self, pieces=(), **about):
        super().__init__(**{"max_model_len": 512, **about})
        self.pieces, self.collectors = pieces, []

    def add_request(self, request_id, prompt, params, **about):
        super().add_request(request_id, prompt, params)
        collector = RequestOutputCollector(request_id)
        self.collectors.append(collector)
        asyncio.get_running_loop().create_task(self.write(collector))
        return collector

    async def write(self, collector):
        for what in self.pieces:
            await asyncio.sleep(0.001)
            if isinstance(what, (Exception, RequestOutput)):
                collector.put(what)
                return
            index, text, finished, done = what
            answer = CompletionOutput(index, text, [1], finish_reason="stop" if finished else None)
            collector.put(RequestOutput("r", "p", [1], [answer], done))


def test_n_answers_share_a_stream_and_silence_sends_nothing():
    pieces = [(1, "b", False, False), (0, "", False, False), (0, "a", True, False), (1, "", False, False),
              (1, "c", False, False), (1, "", True, True)]  # fmt: skip
    _, app = serve(Letters(pieces))
    events = lesson.read_events(ask(app, "/v1/chat/completions", M | {"n": 2, "stream": True}).text)
    assert (lesson.text_of(events, 0), lesson.text_of(events, 1)) == ("a", "bc")
    sent = [(c["index"], c["delta"].get("content")) for e in events[:-1] for c in e["choices"]]
    assert sent == [(1, ""), (1, "b"), (0, ""), (0, "a"), (1, "c"), (1, "")], (
        "a role first, then only what says something"
    )
    assert events[-2]["choices"][0]["finish_reason"] == "stop", "the end is something to say"


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
    *chunks, usage, _ = lesson.read_events(ask(app, f"/v1/{path}", body | more).text)
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
    first, error, done = lesson.read_events(heard.text)
    assert heard.status == 200 and first["choices"][0]["text"] == "a" and done == "[DONE]"
    assert error["error"]["code"] == 500 and "EngineCore is dead" in error["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineDeadError("gone"), 500),
        (common.InputError("prompt: no"), 400),
        (ZeroDivisionError("secret"), 500),
    ],
)
def test_errors_of_the_engine_have_a_status(error, status, capsys):
    heard = ask(serve(Letters([error]))[1], "/v1/completions", P)
    message = check_error(heard, status)["message"]
    assert "secret" not in message and ("secret" in capsys.readouterr().err) == isinstance(error, ZeroDivisionError)


def test_kv_transfer_params_go_in_and_out():
    """Lesson 08: what a proxy says reaches the engine; what a prefill server answers tells where its blocks are."""
    params = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "h", "remote_port": 7}
    connected = type("Connected", (lesson.OpenAIServing,), {"has_kv_connector": True})
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

    class Failing(lesson.ScriptedLLM):
        def add_request(self, request_id, prompt, params, **about):
            collector = RequestOutputCollector(request_id)
            piece = CompletionOutput(0, "", [], finish_reason="error", stop_reason="KV load failed: x")
            collector.put(RequestOutput(request_id, "Hello", [1], [piece], True))
            return collector

    heard = ask(serve(Failing(512))[1], "/v1/completions", P | {"stream": stream})
    error = (lesson.read_events(heard.text)[0] if stream else heard.json)["error"]
    assert error["code"] == 500 and error["message"] == "KV load failed: x"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_an_answer_that_has_left_its_grammar_is_an_error(path, stream, monkeypatch):
    """The token that does not fit is not told any more. Two answers to one request have two places in the pattern."""
    from engine.sampling.guided.structured_outputs import BROKEN
    from engine.sampling.guided.vocabulary import Vocabulary

    vocabulary = Vocabulary([bytes([b]) for b in range(127)] + [b""], [127])
    queue = guide_queue.GuideQueue(lambda: vocabulary)
    monkeypatch.setattr(lesson.OpenAIServing, "guide_queue", queue)

    class Wrong(lesson.ScriptedLLM):
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


def test_a_dead_engine_is_said_at_once():
    llm, app = serve()
    llm.dead = EngineDeadError("the engine process has died")
    check_error(ask(app, "/v1/completions", P), 500, text="died")
    assert ask(app, "/health", method="GET").status == ask(app, "/ping", method="GET").status == 503
    assert ask(app, "/v1/models", method="GET").status == 200


def test_a_full_server_says_when_to_come_back():
    llm, app = serve(lesson.ScriptedLLM(512, max_num_queued_reqs=4, num_unfinished=3))
    assert ask(app, "/v1/completions", P).status == 200
    heard = ask(app, "/v1/completions", P | {"prompt": ["a", "b"]})
    check_error(heard, 503)
    assert heard.headers["retry-after"] == "1" and len(llm.added) == 1, "all prompts of a request, or none"


def test_a_prompt_that_fails_takes_its_siblings_along():
    class Second(lesson.ScriptedLLM):
        def add_request(self, request_id, prompt, params, **about):
            if len(self.added) == 1:
                raise common.InputError("prompt_token_ids: no")
            return super().add_request(request_id, prompt, params, **about)

    llm, app = serve(Second(512))
    check_error(ask(app, "/v1/completions", {"prompt": ["a", "b"]}), 400)
    assert llm.aborted == [llm.added[0][0]]


# --- Who leaves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_whoever_hangs_up_is_forgotten(stream, path, after):
    """Before the first piece, after it, in the middle; streaming or not. The answer itself would take for ever."""
    llm, app = serve(Letters([(0, "x", False, False)] * 50))

    async def run():
        async with asyncio.timeout(5):
            if stream or after == 0:
                return await lesson.call(app, path, (P if path == "/v1/completions" else M) | {"stream": stream},
                                         hang_up_after=after)  # fmt: skip
            for turns in range(40):  # cancelled at every point of its way
                task = asyncio.create_task(lesson.call(app, path, P if path == "/v1/completions" else M))
                for _ in range(turns):
                    await asyncio.sleep(0.0005 if turns > 20 else 0)
                task.cancel()
                await asyncio.wait((task,))

    asyncio.run(run())
    assert [name for name, *_ in llm.added] == [c.request_id for c in llm.collectors]
    assert set(llm.aborted) == {name for name, *_ in llm.added}, "the engine goes on for nobody"


def test_the_forgetful_server_is_caught():
    llm, app = serve(Letters([(0, "x", False, False)] * 50), kind=lesson.ForgetfulServing)
    asyncio.run(lesson.call(app, "/v1/completions", P | {"stream": True}, hang_up_after=2))
    assert llm.added and not llm.aborted


# --- Fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "want"),
    [({}, None), ({"response_format": {"type": "text"}}, None),
     ({"response_format": {"type": "json_object"}}, {"json_object": True}),
     ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
      {"json": {"type": "object"}}),
     ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
     ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
     ({"structured_outputs": {"json": "{}"}}, {"json": "{}"}),
     ({"guided_json": {"type": "null"}}, {"json": {"type": "null"}}),
     ({"guided_choice": ["x", "y"]}, {"choice": ["x", "y"]}), ({"guided_grammar": "g"}, {"grammar": "g"}),
     ({"guided_grammar": "g", "structured_outputs": {"grammar": "g"}, "guided_decoding_backend": "guidance"},
      {"grammar": "g"})],
)  # fmt: skip
def test_three_dialects_of_one_constraint(fields, want):
    found = structured_outputs(CompletionRequest(prompt="x", **fields))
    assert found is None if want is None else found[0] in fields and found[1] == want


def logprobs_of(kind, **fields):
    serving = lesson.OpenAIServing(lesson.ScriptedLLM(), ["smol"])
    entry = {
        65: Logprob(-0.5, 2, "A"),
        66: Logprob(-0.25, 1, "B"),
        67: Logprob(float("-inf"), 3, "C"),
    }
    body = kind(**fields)
    job = lesson.Job("id", "smol", body, serving.check_params(body), [])
    answer = CompletionOutput(0, "AC", [65, 67], logprobs=[entry, {67: entry[67]}])
    return serving.logprobs(job, 0, answer)


def test_logprobs_of_a_chat():
    found = logprobs_of(ChatCompletionRequest, **M, logprobs=True, top_logprobs=2)["content"]
    assert found[0]["token"] == "A" and found[0]["logprob"] == -0.5 and found[0]["bytes"] == [65]
    assert [x["token"] for x in found[0]["top_logprobs"]] == ["B", "A"], "the two best, best first"
    assert found[1]["logprob"] == -9999.0 and found[1]["top_logprobs"] == [], "JSON has no infinity"
    json.dumps(found, allow_nan=False)
    none = logprobs_of(ChatCompletionRequest, **M, logprobs=True)["content"]
    assert none[0]["top_logprobs"] == []


def test_logprobs_of_a_completion():
    found = logprobs_of(CompletionRequest, prompt="x", logprobs=1)
    assert found["tokens"] == ["A", "C"] and found["text_offset"] == [0, 1]
    assert found["top_logprobs"][0] == {"B": -0.25, "A": -0.5}, "the best, and what was sampled"
    assert logprobs_of(CompletionRequest, prompt="x") is None


def test_of_tokens_with_one_text_the_most_probable_counts():
    """Also if another was chosen, and whatever their order: half a character has the text "", as others do."""
    serving = lesson.OpenAIServing(lesson.ScriptedLLM(), ["smol"])
    serving.token_bytes = dict.fromkeys(range(8), b"a")
    ranked = [(3, 1, "b"), (4, 2, "a"), (5, 3, "a"), (6, 4, ""), (7, 5, "")]
    for order, chosen in itertools.product(itertools.permutations(ranked), (4, 5)):
        body = CompletionRequest(prompt="x", logprobs=5)
        job = lesson.Job("id", "smol", body, serving.check_params(body), [])
        entry = {t: Logprob(-rank / 10, rank, text) for t, rank, text in order}
        found = serving.logprobs(job, 0, CompletionOutput(0, "a", [chosen], logprobs=[entry]))
        assert list(found["top_logprobs"][0].items()) == [("b", -0.1), ("a", -0.2), ("", -0.4)]
        assert found["token_logprobs"] == [-entry[chosen].rank / 10]
        job.body.return_tokens_as_token_ids = True
        found = serving.logprobs(job, 1, CompletionOutput(1, "a", [chosen], logprobs=[entry]))
        assert len(found["top_logprobs"][0]) == 5, "under its id, each has its own"


def test_logprobs_under_token_ids():
    """As vLLM names them: texts can be alike, and as keys two would be one. The places in the text stay."""
    by_id = {"return_tokens_as_token_ids": True}
    found = logprobs_of(CompletionRequest, prompt="x", logprobs=1, **by_id)
    assert found["tokens"] == ["token_id:65", "token_id:67"] and found["text_offset"] == [0, 1]
    assert found["top_logprobs"][0] == {"token_id:66": -0.25, "token_id:65": -0.5}
    found = logprobs_of(ChatCompletionRequest, **M, logprobs=True, top_logprobs=2, **by_id)["content"]
    assert found[0]["token"] == "token_id:65" and found[0]["bytes"] == [65], "the bytes are the text's"
    assert [x["token"] for x in found[0]["top_logprobs"]] == ["token_id:66", "token_id:65"]
    plain = logprobs_of(CompletionRequest, prompt="x", logprobs=1, return_tokens_as_token_ids=False)
    assert plain["tokens"] == ["A", "C"]


class Scoring(lesson.ScriptedLLM):
    """Scores what it is asked to score: token t gets −t/100 behind the Z; nothing predicts a prompt's first token."""

    ANSWER = ("y", "z")

    def add_request(self, request_id, prompt, params, *, stream=False, **about):
        self.added.append((request_id, prompt, params))

        def entry(t, k):
            return {t: Logprob(-t / 100, 2, chr(t))} | ({90: Logprob(-0.01, 1, "Z")} if k else {})

        told, told_prompt = params.logprobs, params.prompt_logprobs
        ids, collector = prompt["prompt_token_ids"], RequestOutputCollector(request_id)
        tokens = [ord(text) for text in self.ANSWER][: params.max_tokens]
        logprobs = None if told is None else [entry(t, told) for t in tokens]
        text = "".join(map(chr, tokens))
        answer = CompletionOutput(0, text, tokens, logprobs=logprobs, finish_reason="length")
        scores = None if told_prompt is None else [None, *(entry(t, told_prompt) for t in ids[1:])]
        collector.put(lesson.RequestOutput(request_id, prompt["prompt"], ids, [answer], True, 0, scores))
        return collector


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", ["abc", [97, 98, 99]])
@pytest.mark.parametrize(("limit", "answer"), [(16, "yz"), (0, "")])
def test_echo_with_logprobs_scores_the_prompt(stream, given, limit, answer):
    """What lm-eval asks for: every token's log probability, its place in the text, and the best one beside it."""
    llm, app = serve(Scoring())
    body = {"prompt": given, "echo": True, "logprobs": 1, "max_tokens": limit, "stream": stream}
    heard = ask(app, "/v1/completions", body)
    found = lesson.read_events(heard.text)[0] if stream else heard.json
    ((_, _, params),) = llm.added
    assert params.logprobs == params.prompt_logprobs == 1 and params.max_tokens == (limit or 1)
    (choice,), text = found["choices"], "abc" + answer
    assert choice["text"] == text and choice.get("prompt_logprobs") is None
    assert ("prompt_logprobs" in choice) is not stream
    assert choice["logprobs"] == {
        "tokens": list(text), "text_offset": list(range(len(text))),
        "token_logprobs": [None, *(-ord(t) / 100 for t in text[1:])],
        "top_logprobs": [None, *({"Z": -0.01, t: -ord(t) / 100} for t in text[1:])],
    }  # fmt: skip


def test_an_echoed_prompt_under_token_ids_names_its_first_token_too():
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0, "return_tokens_as_token_ids": True}
    found = ask(serve(Scoring())[1], "/v1/completions", body).json["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:97", "token_id:98", "token_id:99"] and found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {"token_id:90": -0.01, "token_id:98": -0.98}


@pytest.mark.parametrize("given", ["寿", [0xE5, 0xAF, 0xBF]])
def test_a_character_of_several_tokens_has_one_place_in_the_text(given):
    class Bytes(Scoring):
        """One token per byte."""

        def add_request(self, request_id, prompt, params, **about):
            ids, collector = [*"寿".encode()], RequestOutputCollector(request_id)

            def entry(t, text):
                return {t: Logprob(-1.0, 1, text), 65: Logprob(-2.0, 2, "A")}

            # A prompt's first token is not scored: who looks at the others alone knows nothing of its byte.
            said, scores = [*map(entry, [*ids, 33], ["", "", "寿", "!"])], [None, entry(ids[1], ""), entry(ids[2], "")]
            answer = CompletionOutput(0, "寿!", [*ids, 33], logprobs=said, finish_reason="length")
            collector.put(lesson.RequestOutput(request_id, prompt["prompt"], ids, [answer], True, 0, scores))
            return collector

    llm = Bytes()
    llm.front.token_bytes = {i: bytes([i]) for i in range(256)}
    llm.front.tokenizer.decode = lambda ids: bytes(ids).decode()
    (choice,) = ask(serve(llm)[1], "/v1/completions", {"prompt": given, "echo": True, "logprobs": 2}).json["choices"]
    found = choice["logprobs"]
    assert found["tokens"] == ["", "", "寿", "", "", "寿", "!"] and "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [0, 0, 0, 1, 1, 1, 2]
    assert found["top_logprobs"][2] == {"寿": -1.0, "A": -2.0}, "the token itself under the name that tokens gives it"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_counts_tokens_gets_the_prompts_too(shared, stream):
    _, app = shared

    def asked(path, body):
        heard = ask(app, path, body | {"return_token_ids": True, "stream": stream})
        return lesson.read_events(heard.text)[0] if stream else heard.json

    ids = [[97, 98], [99]]
    found = [asked("/v1/completions", {"prompt": prompt})["choices"][0] for prompt in ids]
    assert [choice["prompt_token_ids"] for choice in found] == ids
    assert asked("/v1/chat/completions", M)["prompt_token_ids"] == [72, 105]
    heard = ask(app, "/v1/chat/completions", M | {"stream": stream})
    found = lesson.read_events(heard.text)[0] if stream else heard.json
    assert found["prompt_token_ids"] is None
    assert not stream or heard.text.count("prompt_token_ids") == 1, "once, with the opening"


def test_no_limit_means_sixteen_tokens_in_a_completion_and_the_context_in_a_chat():
    llm, app = serve()
    for body in (P, P | {"max_tokens": None}, P | {"max_tokens": None, "echo": True}):
        assert ask(app, "/v1/completions", body).status == 200
    assert ask(app, "/v1/chat/completions", M | {"max_tokens": None}).status == 200
    assert [params.max_tokens for *_, params in llm.added] == [16, 16, 16, None]


def test_prompt_logprobs_have_vllms_form():
    llm, app = serve(Scoring())
    want = [None, {"98": {"logprob": -0.98, "rank": 2, "decoded_token": "b"}}]
    found = ask(app, "/v1/completions", {"prompt": ["ab", "cb"], "prompt_logprobs": 0}).json["choices"]
    assert [choice["prompt_logprobs"] for choice in found] == [want, want]
    assert [(choice["text"], choice["logprobs"]) for choice in found] == [("yz", None)] * 2
    found = ask(app, "/v1/chat/completions", M | {"prompt_logprobs": 1}).json
    assert found["prompt_logprobs"][0] is None and "prompt_logprobs" not in found["choices"][0]
    assert found["prompt_logprobs"][1]["90"] == {"logprob": -0.01, "rank": 1, "decoded_token": "Z"}
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "prompt_logprobs": 5}
    assert ask(app, "/v1/completions", body).json["choices"][0]["logprobs"]["top_logprobs"] == [
        None, {"b": -0.98}, {"y": -1.21}, {"z": -1.22}]  # fmt: skip
    assert [params.prompt_logprobs for *_, params in llm.added] == [0, 0, 1, 5]
    heard = ask(app, "/v1/completions", {"prompt": "ab", "prompt_logprobs": 0, "stream": True})
    assert heard.status == 200 and "prompt_logprobs" not in heard.text, "as in vLLM: allowed, and not told"
    assert ask(app, "/v1/chat/completions", M).json["prompt_logprobs"] is None


def test_places_in_the_text_go_on_from_piece_to_piece(shared):
    serving = lesson.OpenAIServing(lesson.ScriptedLLM(), ["smol"])
    body = CompletionRequest(prompt="x", stream=True, logprobs=0, n=2)
    job = lesson.Job("id", "smol", body, serving.check_params(body), [])

    def offsets(index, *words):
        ids = [ord(word[0]) for word in words]
        serving.token_bytes |= {i: word.encode() for i, word in zip(ids, words)}
        logprobs = [{i: Logprob(-1.0, 1, word)} for i, word in zip(ids, words)]
        piece = CompletionOutput(index, "", ids, logprobs=logprobs)
        return serving.choice(job, index, piece)["logprobs"]["text_offset"]

    assert [offsets(0, "ab", "c"), offsets(1, "d"), offsets(0), offsets(0, "e", "f"), offsets(1, "g")] == [
        [0, 2], [0], [], [3, 4], [1]]  # fmt: skip


def test_tokenize_and_back(shared):
    _, app = shared
    found = ask(app, "/tokenize", {"prompt": "abc", "return_token_strs": True}).json
    assert found == {"count": 3, "max_model_len": 512, "tokens": [97, 98, 99], "token_strs": ["a", "b", "c"]}
    assert ask(app, "/tokenize", {"messages": M["messages"]}).json["tokens"] == [72, 105]


def test_a_tokenized_chat_is_the_chat_that_would_be_answered():
    class Showing(lesson.ScriptedTokenizer):
        def render_chat(self, messages, add_generation_prompt=True, **variables):
            return json.dumps([messages, add_generation_prompt, variables])

    llm = lesson.ScriptedLLM(512)
    llm.front.tokenizer = Showing()
    _, app = serve(llm)
    body = M | {"tools": TOOLS, "chat_template_kwargs": {"x": 1, "add_generation_prompt": 5},
                "add_generation_prompt": False}  # fmt: skip
    tokens = ask(app, "/tokenize", body).json["tokens"]
    assert ask(app, "/v1/chat/completions", body | {"tool_choice": "none"}).status == 200
    ((_, prompt, _),) = llm.added
    assert tokens == prompt["prompt_token_ids"] and '"x": 1' in prompt["prompt"] and ", false, " in prompt["prompt"]


def test_a_tokens_name_is_the_vocabularys(shared):
    """As in vLLM: a byte that is no character has a name there, and as text it would be lost."""
    llm = lesson.ScriptedLLM(512)
    llm.front.tokenizer = tokenizer = lesson.ScriptedTokenizer()
    tokenizer.backend = type("", (), {"get_vocab": staticmethod(lambda: {"Ġw": 32, "Ã": 97})})
    found = ask(serve(llm)[1], "/tokenize", {"prompt": " a", "return_token_strs": True}).json
    assert found["token_strs"] == ["Ġw", "Ã"]
    assert ask(shared[1], "/tokenize", {"prompt": "a", "return_token_strs": None}).status == 200


def test_the_document_describes_the_routes(shared):
    document = ask(shared[1], "/openapi.json", method="GET").json
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert {"200", "400", "404", "413", "503"} <= set(document["paths"][path]["post"]["responses"])
    assert {"/v1/models", "/health", "/version", "/tokenize", "/detokenize"} <= set(document["paths"])
    assert "/debug/engine" not in document["paths"] and "/metrics" not in document["paths"], "no logger, no metrics"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5) | st.floats(allow_nan=False, width=16) | st.text(max_size=4)
    | st.sampled_from(["user", "json_object", "text", "smol", 10**40, -(2**63)]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "json", "regex", "5"]), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
NAMES = sorted({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, "x"})


BODIES = given(st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
               st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), st.booleans())  # fmt: skip


@settings(max_examples=40)
@BODIES
def test_no_body_makes_the_server_fail(path, body, complete):
    """The fast twin of schemathesis, with half of the requests otherwise complete."""
    check_body(path, body, complete)


@pytest.mark.slow
@settings(max_examples=400)
@BODIES
def test_no_body_makes_the_server_fail_in_a_long_time(path, body, complete):
    check_body(path, body, complete)


def check_body(path, body, complete):
    if complete:
        body = (M if "chat" in path else {"tokens": [1]} if path == "/detokenize" else P) | body
    app = check_body.app
    heard = ask(app, path, json.dumps(body).encode())
    assert heard.status in (200, 400, 404, 503), heard.text
    if heard.status != 200:
        check_error(heard, heard.status)


class Total(lesson.ScriptedLLM):
    """Its front end can check token ids and compile guides, as the real one does."""

    def __init__(self):
        super().__init__(512)
        # ASCII in GPT-2's byte alphabet: a token per byte, as in the scripted `encode`.
        tokens = [*map(chr, range(256, 289)), *map(chr, range(33, 127)), chr(289)]
        tokenizer = self.front.tokenizer
        tokenizer.config = {}
        tokenizer.backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
        tokenizer.backend.decoder = decoders.ByteLevel()
        self.front._check_ids = lambda name, ids: LLMEngine._check_ids(self.front, name, ids)
        config = SimpleNamespace(vocab_size=128, eos_token_ids=(0,))
        self.front.model_config = config


check_body.app = serve(Total())[1]


WRONG_SCHEMA = {"type": "wrong"}
DEEP = functools.reduce(lambda inner, _: {"items": inner}, range(70), {})


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def answer_of(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


NAMED_TOOL = {"tools": [tool("h", CITY), tool("f", WRONG_SCHEMA)], "tool_choice": NAMED}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [("completions", {"structured_outputs": {"json": WRONG_SCHEMA}}, "structured_outputs: json: Invalid type: wrong"),
     ("completions", {"structured_outputs": {"regex": "("}}, "structured_outputs: regex '(': missing )"),
     ("completions", {"structured_outputs": {"choice": []}}, "structured_outputs: choice []: must be a list of str"),
     ("completions", {"structured_outputs": {"grammar": "start: a"}}, "structured_outputs: grammar: at 1(8): unknown"),
     ("completions", {"guided_json": WRONG_SCHEMA}, "guided_json: json: Invalid type: wrong"),
     ("completions", {"guided_regex": "("}, "guided_regex: regex '(': missing )"),
     ("completions", answer_of(WRONG_SCHEMA), "response_format: json: Invalid type: wrong"),
     ("completions", answer_of(DEEP), "response_format: json '"),
     ("completions", {"structured_outputs": {"regex": "a"}} | answer_of(CITY), "structured_outputs: exactly one"),
     ("chat/completions", answer_of(WRONG_SCHEMA), "response_format: json: Invalid type: wrong"),
     ("chat/completions", NAMED_TOOL, "tools: f: Invalid type: wrong"),
     ("chat/completions", NAMED_TOOL | {"tool_choice": "required"}, "tools: f: Invalid type: wrong"),
     ("chat/completions", {"tools": [tool("f", CITY), tool("é", {"properties": {"x": 5}})], "tool_choice": "required"},
      "tools: é: "),
     ("chat/completions", {"tools": [tool("f", CITY), tool("f", {"not": {}}), tool("g", CITY)],
                           "tool_choice": "required"}, 'tools: f: Unimplemented keys: ["not"]'),
     ("chat/completions", {"tools": [tool("f", CITY), tool("g", DEEP)], "tool_choice": "required"}, "tools: g: obj"),
     ("chat/completions", {"tools": [tool("f", DEEP)], "tool_choice": NAMED}, "tools: f: json '"),
     ("chat/completions", {"tools": [tool("f" * i, CITY) for i in range(1, 300)], "tool_choice": "required"},
      "tools: at most 65,536 characters are allowed"),
     ("chat/completions", {"tools": [tool("f", {"type": "w" * 400})], "tool_choice": "required"},
      f"tools: f: Invalid type: {'w' * 200}"),
     ("responses", {"text": {"format": {"type": "json_schema", "schema": WRONG_SCHEMA}}},
      "text: json: Invalid type: wrong"),
     ("responses", {"tools": [{"type": "function", "name": "f", "parameters": WRONG_SCHEMA}],
                    "tool_choice": "required"}, "tools: f: Invalid type: wrong")],
)  # fmt: skip
def test_a_wrong_constraint_is_blamed_on_what_the_client_wrote(path, body, text):
    """On its field, and of tools on the function; our own grammar of calls is nobody's business."""
    llm, app = serve(Total())
    message = check_error(
        ask(app, f"/v1/{path}", {"completions": P, "responses": {"input": "x"}}.get(path, M) | body),
        400, text.split(":")[0],
    )["message"]  # fmt: skip
    assert message.startswith(text) and not llm.added
    assert path == "completions" or not any(ours in message for ours in ("structured_", "arguments_", "x-guidance"))


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
        monkeypatch.setattr(lesson.OpenAIServing, "guide_queue", queue)
        send = lambda **body: asyncio.create_task(lesson.call(app, "/v1/completions", P | body))  # noqa: E731
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
        gone = await lesson.call(app, "/v1/completions", P | {"structured_outputs": {"regex": "x"}, "n": 9})
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
        monkeypatch.setattr(lesson.OpenAIServing, "guide_queue", queue)
        body = P | {"structured_outputs": {"regex": "a"}}
        if ends == "leaves":
            await lesson.call(app, "/v1/completions", body, hang_up_after=0)
        else:
            task = asyncio.create_task(lesson.call(app, "/v1/completions", body))
            while not queue.compiling:
                await asyncio.sleep(0.001)
            llm.admission.closed = True
            queue.gate.set()
            assert (await task).status == 503
        assert not queue.compiling and llm.admission.num_held == 0 and not llm.added

    asyncio.run(run())


@given(st.text(max_size=40), st.integers(1, 60))
def test_a_stream_reads_the_same_however_it_is_cut(text, size):
    raw = "".join(lesson.event({"choices": [{"index": 0, "text": char}]}) for char in text) + "data: [DONE]\n\n"
    data = raw.encode("utf-8", "replace")
    cut = [data[i : i + size] for i in range(0, len(data), size)]
    assert asyncio.run(lesson.incremental_text(cut)) == text.encode("utf-8", "replace").decode()


# --- The rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["06_serving", "06e_async_engine", "06f_openai_api"])
def test_importing_costs_no_web_framework(name):
    """Only functions import it, so a lesson that loads these files does not pay for it."""
    tree = ast.parse(modules.paths()[name].read_text())
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert "asyncio" in names and not {n.split(".")[0] for n in names} & {"fastapi", "starlette", "uvicorn", "httpx"}


def test_widget_states():
    """Every state that the widget can reach, except the largest prompt: the first check that fails decides."""
    states = list(itertools.product(*list(page.WIDGET_CHOICES.values())[:2], ["5 characters", "empty"], [0, 4]))
    traces = asyncio.run(page._ask([dict(zip(page.WIDGET_CHOICES, state)) for state in states]))
    for (key, field, prompt, inside), trace in zip(states, traces):
        if key == "wrong":
            assert trace["status"] == 401
        elif field == "model gpt-9":
            assert trace["status"] == 404
        elif (field != "nothing unusual" and not (field == "max_tokens 65" and prompt == "empty")) or prompt == "empty":
            assert trace["status"] == 400
        else:
            assert trace["status"] == (503 if inside == 4 else 200)
        assert trace["engine_heard"] == (trace["status"] == 200)
    big = page.simulate({**page.WIDGET_DEFAULT, "prompt": "5 MB"})
    assert big["status"] == 413 and big["engine_heard"] == 0


def test_stations_look_in_the_order_of_the_figure_and_one_mistake_is_named_at_a_time():
    order = [*(name for name, *_ in page.GATES), "engine"]
    wrong = {"key": "wrong", "field": "half a body", "prompt": "64 characters", "inside": 4}
    trace = page.simulate(wrong)
    assert "at at" not in trace["then"][0]["message"]  # Python's reader: "Unterminated string starting at"
    found = [trace, *trace["then"]]
    assert [answer["looked"][-1] for answer in found] == ["key", "JSON", "length", "room", "engine"]
    assert all(answer["looked"] == order[: len(answer["looked"])] for answer in found)
    assert [answer.get("corrected") for answer in found] == [None, "key", "field", "prompt", "inside"]
    assert [answer["engine_heard"] for answer in found] == [0, 0, 0, 0, 1]


def test_the_widget_uses_the_real_checks(monkeypatch):
    monkeypatch.setattr(openai_serving, "sampling_params", lambda *args: SamplingParams())
    assert page.simulate({**page.WIDGET_DEFAULT, "prompt": "5 characters", "inside": 0})["status"] == 200

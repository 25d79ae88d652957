"""What a client may say: every wrong field has its error, which names it, and every right one is taken."""

from __future__ import annotations

import functools
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.serving.openai.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from engine.serving.openai.responses_protocol import ResponsesRequest
from support.cases import named
from support.scripted_api import CHAT, TOOLS, M, P, Total, ask, check_error, serve, user

# --- Wrong requests ---------------------------------------------------------------------------------------------------


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


def test_wrong_completions(shared):
    for body, status, param, text in BAD_COMPLETIONS:
        with named(body, status, param, text):
            llm, app = shared
            check_error(ask(app, "/v1/completions", body), status, param, text)
            assert not llm.added, "the engine has heard of it"


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


def test_wrong_chats(shared):
    for body, param in BAD_CHATS:
        with named(body, param):
            llm, app = shared
            check_error(ask(app, "/v1/chat/completions", body), 400, param)
            assert not llm.added


@pytest.mark.parametrize(
    ("body", "text"),
    [({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
      "messages.0.content.0: this model reads text alone: a part must be of type text, refusal or thinking"),
     (M | {"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice.type: Input should be 'function'"),
     (M | {"messages": [{"role": "user"}]}, "messages.0: content is required"),
     (M | {"temPrature": 1}, "temPrature: Extra")],
)  # fmt: skip
def test_an_error_names_the_place_that_was_meant(shared, body, text):
    """And not the first type of a union that does not fit: who sent a list of parts knows that it is no string."""
    assert f"invalid request: {text}" in check_error(ask(shared[1], "/v1/chat/completions", body), 400)["message"]


# --- Lengths ----------------------------------------------------------------------------------------------------------


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


TOO_LONG = [
    ({"messages": [1] * 4097}, "messages", "messages: has 4,097 elements; at most 4,096 are allowed"),
    ({"messages": [user([1] * 4097)]}, "messages", "messages.0.content: has 4,097 elements"),
    ({"messages": [user([1] * 4096)]}, "messages", "messages.0.content.0: this model reads text alone"),
    (M | {"tools": [1] * 4097}, "tools", "tools: has 4,097"), (M | {"bad_words": ["x"] * 129}, "bad_words", "129"),
    (M | {"bad_words": ["x" * 4096, "y"]}, "bad_words", "4,096 characters in all"),
    (M | {"stop": ["x" * 4096, "y"]}, "stop", "more than 4,096 characters"),
    (M | {"stop": "x" * 4097}, "stop", "more than 4,096 characters"),
    (M | {"logit_bias": dict.fromkeys(map(str, range(16385)), 1)}, "logit_bias", "16,385 elements"),
    (M | {"documents": [dict.fromkeys(map(str, range(4097)), "x")]}, "documents", "documents.0: has 4,097"),
    (M | {"metadata": dict.fromkeys(map(str, range(4097)))}, "metadata", "4,097"),
    (M | {f"x{i}": 1 for i in range(9)}, "x0", "x0: Extra inputs are not permitted"),
    (M | {"n": 128, "allowed_token_ids": [5] * 9000}, "n", "n 128: times 9,000 token ids is more than 1,048,576"),
    (M | {"request_id": "x" * 257}, "request_id", "256"), (M | {"x" * 10_000: 1}, "x" * 256, "characters)"),
]  # fmt: skip


def test_lengths_are_bounded(shared):
    """Before an element is looked at; and an error repeats no more of a request than somebody would read."""
    for body, param, text in TOO_LONG:
        with named(body, param, text):
            llm, app = shared
            error = check_error(ask(app, CHAT, body), 400, param, text)
            assert len(error["message"]) < 2100 and not llm.added


HALF = "\ud83d"


HALVES = [
    *(("completions", field, HALF) for field in ("prompt", "model", "request_id", "user", "stop", "cache_salt",
                                                 "guided_regex", "service_tier")),
    ("completions", "stop", ["a", HALF]), ("completions", "metadata", {"a": [HALF]}),
    ("completions", "metadata", {HALF: 1}), ("completions", "response_format", {"type": "text", HALF: 1}),
    ("chat/completions", "messages", [{"role": "user", "content": HALF}]),
    ("chat/completions", "tools", [{"type": "function", "function": {"name": "f", "description": HALF}}]),
    ("chat/completions", "chat_template_kwargs", {"a": HALF}),
]  # fmt: skip


def test_half_a_surrogate_pair_is_refused_in_every_field(shared):
    """No answer could repeat it, and a stream would break in the middle."""
    for (path, field, value), stream in itertools.product(HALVES, [False, True]):
        with named(path, field, value, stream):
            llm, app = shared
            body = (P if path == "completions" else M) | {"stream": stream, field: value}
            check_error(ask(app, f"/v1/{path}", body), 400, field, f"{field}: half of a surrogate pair is no text")
            check_error(ask(app, "/tokenize", {"prompt": HALF}), 400, "prompt", "surrogate")
            assert not llm.added
            whole = ask(app, "/v1/completions", P | {"request_id": "👩‍🚀", "user": "é"})
            assert whole.status == 200 and whole.json["id"] == "cmpl-👩‍🚀"
            llm.added.clear()


# --- Right requests ---------------------------------------------------------------------------------------------------


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


SENT = [
    {"reasoning_effort": "low"}, {"verbosity": "low"}, {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
    {"modalities": ["text"]}, {"parallel_tool_calls": False}, {"tool_choice": "none"}, {"tools": None},
    {"functions": None, "audio": None, "a field of tomorrow": None}, {"tools": TOOLS, "tool_choice": "none"},
    {"prediction": {"type": "content", "content": "x"}}, {"chat_template_kwargs": {"enable_thinking": False}},
    {"use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True},
    {"bad_words": [], "return_tokens_as_token_ids": False, "allowed_token_ids": None, "truncate_prompt_tokens": None},
    {"continue_final_message": False, "echo": False, "include_reasoning": True},
    {"mm_payload": "tensors", "return_mm_kwargs": None, "return_token_offsets": False, "watermarking": None,
     "routed_experts_prompt_start": 0, "session_id": "s", "return_prompt_text": None, "documents": []},
    {"stop": [], "logit_bias": {}, "top_logprobs": 0, "logprobs": False, "n": None, "seed": None},
    {"stream": False, "stream_options": None}, {"tools": [{"function": {"name": "f"}}], "tool_choice": "none"},
]  # fmt: skip


def test_fields_that_clients_send(shared):
    """openai-node, LangChain, LiteLLM and others send them on their own account; vLLM answers."""
    for fields in SENT:
        with named(fields):
            heard = ask(shared[1], "/v1/chat/completions", M | fields)
            assert heard.status == 200 and heard.json["choices"][0]["message"]["content"] == "Paris.", heard.text


def test_no_name_is_the_models(shared):
    """As in vLLM: some clients have a field for it, and leave it empty."""
    for path, body in (("/v1/completions", P), ("/v1/chat/completions", M), ("/v1/responses", {"input": "x"})):
        assert ask(shared[1], path, body | {"model": ""}).json["model"] == "smol"


def test_best_of_all_of_them_is_all_of_them(shared):
    assert ask(shared[1], "/v1/completions", P | {"n": 2, "best_of": 2, "temperature": 1}).status == 200


# --- Any body ---------------------------------------------------------------------------------------------------------


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


@functools.cache
def application():
    """Before an engine that checks ids and guides as the real one does."""
    return serve(Total())[1]


def check_body(path, body, complete):
    if complete:
        body = (M if "chat" in path else {"tokens": [1]} if path == "/detokenize" else P) | body
    heard = ask(application(), path, json.dumps(body).encode())
    assert heard.status in (200, 400, 404, 503), heard.text
    if heard.status != 200:
        check_error(heard, heard.status)

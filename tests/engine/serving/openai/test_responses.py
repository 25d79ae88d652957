"""Whoever has every event of a response has the response, and what is kept is its key's own."""

from __future__ import annotations

import asyncio
import itertools
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineDeadError
from engine.front_end import CompletionOutput, RequestOutput
from engine.sampling.sampler import Logprob
from engine.serving.collector import RequestOutputCollector
from engine.serving.openai import responses
from engine.serving.openai.app import build_app
from engine.serving.openai.responses import Kept, ResponseWriter, Stored
from engine.serving.openai.serving import OpenAIServing
from support.cases import named
from support.scripted_api import Calling, ScriptedLLM, call

USAGE = {"input_tokens": 1}


class Script(ScriptedLLM):
    """Says `pieces`, one letter each, if the reader keeps up; an exception in their place is raised."""

    def __init__(self, pieces=("Par", "is", "."), reason="stop", logprobs=False):
        super().__init__(max_model_len=512, max_num_queued_reqs=9)
        self.pieces, self.reason, self.logprobs = pieces, reason, logprobs

    def add_request(self, request_id, prompt, params, *, stream=False, **about):
        self.added.append((request_id, prompt, params))
        waiting, ids = list(self.pieces), prompt["prompt_token_ids"]

        class Collector(RequestOutputCollector):
            async def get(collector):
                if isinstance(waiting[0], Exception):
                    raise waiting.pop(0)
                texts, waiting[:] = (waiting[:1], waiting[1:]) if stream else (waiting[:], [])
                found = [{i: Logprob(-1.0, 1, text)} for i, text in enumerate(texts)] if self.logprobs else None
                answer = CompletionOutput(0, "".join(texts), [*range(len(texts))], logprobs=found,
                                                  finish_reason=None if waiting else self.reason)  # fmt: skip
                return RequestOutput(request_id, prompt["prompt"], ids, [answer], not waiting, 2)

        return Collector(request_id)


def serve(*script, kind=OpenAIServing, strict_fields=False, **about):
    llm = Script(*script, **about)
    return llm, build_app(kind(llm, ["smol"]), strict_fields=strict_fields)


def ask(app, body, path="/v1/responses", **about):
    return asyncio.run(call(app, path, body, **about))


def events_of(text):
    """Server-sent events with names: [event: name, data: JSON]."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def read(events):
    """A client: the output, put together from events alone. Everything is said in order and ends once."""
    items, done, growing = [], [], None
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            assert growing is None and event["item"]["status"] == "in_progress"
            growing = event["item"]
            assert not (growing.get("content") or growing.get("arguments"))
            items.append(growing)
            continue
        assert kind == "output_item.done" or event["item_id"] == growing["id"]
        if kind == "content_part.added":
            growing["content"].append(event["part"])
        elif kind == "output_text.delta":
            growing["content"][event["content_index"]]["text"] += event["delta"]
            growing["content"][0]["logprobs"] += event["logprobs"]
        elif kind == "reasoning_text.delta":
            growing["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "reasoning_text.done":
            assert event["text"] == growing["content"][0]["text"]
        elif kind == "output_text.done":
            part = growing["content"][0]
            assert (event["text"], event["logprobs"]) == (part["text"], part["logprobs"])
        elif kind == "content_part.done":
            assert event["part"] == growing["content"][0]
        elif kind == "function_call_arguments.delta":
            growing["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (growing["arguments"], growing["name"])
        elif kind == "output_item.done":
            assert event["item"] == growing | {"status": event["item"]["status"]}
            growing["status"] = event["item"]["status"]
            done.append(growing)
            growing = None
        else:
            pytest.fail(kind)
    assert growing is None and done == items
    return items


# --- Answers ----------------------------------------------------------------------------------------------------------


text_delta = st.builds(lambda text: {"content": text}, st.text("ab ", max_size=3))
begin = st.builds(lambda name, text: ("begin", name, text), st.sampled_from("fg"), st.sampled_from(["", "{"]))
grow = st.builds(lambda text: ("grow", "", text), st.sampled_from(['"x"', "}"]))


@given(st.lists(text_delta | begin | grow, max_size=8), st.sampled_from(["stop", "length", "abort"]))
def test_events_are_the_response(deltas, reason):
    writer = ResponseWriter({"output": [], "status": "in_progress"})
    writer.begin()
    want, events = [], []
    for delta in deltas:
        if isinstance(delta, dict):
            writer.write(delta, [{"token": delta["content"]}])
            if delta["content"]:
                if not want or want[-1][0] != "text":
                    want.append(["text", ""])
                want[-1][1] += delta["content"]
        elif delta[0] == "begin":
            _, name, text = delta
            call = {"index": 0, "id": "c", "function": {"name": name, "arguments": text}}
            writer.write({"tool_calls": [call]})
            want.append([name, text])
        elif want and want[-1][0] != "text":
            writer.write({"tool_calls": [{"index": 0, "function": {"arguments": delta[2]}}]})
            want[-1][1] += delta[2]
        events += writer.take()
    writer.finish(reason, USAGE)
    events = events_of("".join(events + writer.take()))
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.completed" and writer.take() == []
    assert read(events) == final["output"] == writer.response["output"]
    said = [[i["name"], i["arguments"]] if i["type"] == "function_call" else ["text", i["content"][0]["text"]]
            for i in final["output"]]  # fmt: skip
    assert said == (want or [["text", ""]]), "who says nothing has said an empty message"
    assert final["status"] == {"stop": "completed", "length": "incomplete", "abort": "cancelled"}[reason]
    assert [item["status"] for item in final["output"][:-1]] == ["completed"] * (len(said) - 1)
    assert final["output"][-1]["status"] == ("completed" if reason == "stop" else "incomplete")
    assert (final.get("incomplete_details") is not None) == (reason == "length") and final["usage"] == USAGE
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])


def test_a_whole_and_a_streamed_response_say_the_same():
    llm, app = serve()
    body = {"input": "Hello", "instructions": "Short.", "metadata": {"a": "b"}, "max_output_tokens": 9}
    whole = ask(app, body).json
    heard = ask(app, body | {"stream": True})
    assert heard.headers["content-type"].startswith("text/event-stream") and "[DONE]" not in heard.text
    events = events_of(heard.text)
    streamed = events[-1]["response"]
    assert [e["delta"] for e in events if e["type"] == "response.output_text.delta"] == ["Par", "is", "."]
    for found in (whole, streamed):
        assert found["id"].startswith("resp_") and found["output"][0]["id"].startswith("msg_")
        assert found["output"][0]["content"] == [{"type": "output_text", "text": "Paris.", "annotations": [],
                                                  "logprobs": []}]  # fmt: skip
        assert (found["status"], found["model"], found["metadata"]) == ("completed", "smol", {"a": "b"})
        assert found["usage"] == {
            "input_tokens": 11, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 14,
        }  # fmt: skip
        assert found["created_at"] <= found["completed_at"] and found["max_output_tokens"] == 9
    assert whole.keys() == streamed.keys() and whole["id"] != streamed["id"]
    assert [prompt["prompt"] for _, prompt, _ in llm.added] == ["Short.Hello"] * 2
    assert len(llm.aborted) == 2, "both are forgotten in the end"


def test_calls_are_items_between_texts():
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    _, app = serve(("Let me see", " <tool", call[5:], "\n", call, " done"), kind=Calling)
    for stream in (False, True):
        heard = ask(app, {"input": "x", "tools": tools, "stream": stream})
        output = read(events_of(heard.text)) if stream else heard.json["output"]
        texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
        assert texts == (["Let me see ", "done"] if stream else ["Let me see done"]), "a whole text comes first"
        assert [item["type"] for item in output[:3]] == ["message", "function_call", "function_call"]
        assert [item["arguments"] for item in output[1:3]] == ['{"x": 1}'] * 2
        assert len({item["call_id"] for item in output[1:3]}) == 2
        assert all(item["id"].startswith("fc_") and item["name"] == "f" for item in output[1:3])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_between_special_tokens_whose_string_has_a_tag(stream):
    arguments = '{"x": "</tool_call>"}'
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    llm, app = serve([*call], kind=Calling)
    heard = ask(app, {"input": "x", "tools": [{"type": "function", "name": "f"}], "stream": stream})
    (item,) = read(events_of(heard.text)) if stream else heard.json["output"]
    assert (item["type"], item["arguments"]) == ("function_call", arguments)
    assert llm.added[0][2].skip_special_tokens is False


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_thought_is_an_item_of_its_own(stream):
    class Thinking(Calling):
        reasoning_parser = "qwen3"

    llm, app = serve(("<think>H", "m.</thi", "nk>", "Par", "is."), kind=Thinking)
    heard = ask(app, {"input": "x", "stream": stream})
    response = events_of(heard.text)[-1]["response"] if stream else heard.json
    thought, said = read(events_of(heard.text)) if stream else response["output"]
    assert (thought["type"], thought["summary"], thought["status"]) == ("reasoning", [], "completed")
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}] and thought["id"].startswith("rs_")
    assert said["content"][0]["text"] == "Paris."
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}, "no token of the script closes it"
    ask(app, {"input": "y", "previous_response_id": response["id"]})
    assert llm.added[1][1]["prompt"] == "xParis.y", "a template may hear of it; this one does not"


def test_log_probabilities_of_text_that_was_held_back_come_with_it():
    tools = [{"type": "function", "name": "f"}]
    body = {"input": "x", "include": ["message.output_text.logprobs"], "tools": tools, "stream": True}
    llm, app = serve(("a", "<tool", "_x", "b"), kind=Calling, logprobs=True)
    events = [e for e in events_of(ask(app, body).text) if e["type"] == "response.output_text.delta"]
    assert [(e["delta"], [x["token"] for x in e["logprobs"]]) for e in events] == [
        ("a", ["a"]), ("<tool_x", ["<tool", "_x"]), ("b", ["b"])]  # fmt: skip
    assert llm.added[0][2].logprobs == 0
    ask(app, body | {"top_logprobs": 3}), ask(app, body | {"include": [], "top_logprobs": 3})
    assert [params.logprobs for *_, params in llm.added[1:]] == [3, None]


@pytest.mark.parametrize(("error", "status"), [(EngineDeadError("gone"), 500), (ValueError("x"), 500)])
def test_errors_on_the_way(error, status, capsys):
    _, app = serve(("a", error))
    *events, said, last = events_of(ask(app, {"input": "x", "stream": True}).text)
    assert said["type"] == "error" and said["code"] == str(status) and said["sequence_number"] == len(events)
    assert events[-1]["delta"] == "a" and "Traceback" not in said["message"]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": said["message"]}
    heard = ask(serve((error,))[1], {"input": "x"})
    assert heard.status == status and heard.json["error"]["code"] == status


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_failed_is_an_error(stream):
    llm, app = serve(("",), reason="error")
    heard = ask(app, {"input": "x", "stream": stream})
    assert events_of(heard.text)[-1]["type"] == "response.failed" if stream else heard.status == 500
    assert len(llm.aborted) == 1


def test_whoever_hangs_up_is_forgotten():
    llm, app = serve()
    ask(app, {"input": "x", "stream": True}, hang_up_after=1)
    ask(app, {"input": "x", "stream": True}, hang_up_after=0)
    assert len(llm.aborted) == len(llm.added)


# --- Requests ---------------------------------------------------------------------------------------------------------


X = {"input": "x"}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


WRONG = [
    ({}, 400, "input", "required"), ({"input": 5}, 400, "input", ""), ({"input": []}, 400, "input", "empty"),
    ({"input": ["a"]}, 400, "input", ""), ({"input": [{"type": "computer_call"}]}, 400, "input", "function_call"),
    ({"input": [{"role": "tool", "content": "x"}]}, 400, "input", ""),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "input", ""),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 5}]}, 400, "input", "string"),
    ({"input": [{"type": "item_reference", "id": "msg_0"}]}, 404, "input", "msg_0"),
    (X | {"previous_response_id": "resp_0"}, 404, "previous_response_id", "resp_0"),
    (X | {"max_output_tokens": 0}, 400, "max_output_tokens", ""),
    (X | {"max_output_tokens": 513}, 400, "max_output_tokens", "context"),
    (X | {"temperature": 9}, 400, "temperature", "from 0 to 2"), (X | {"n": 2}, 400, "n", ""),
    (X | {"background": True}, 400, "background", ""), (X | {"truncation": "middle"}, 400, "truncation", ""),
    (X | {"stream": True, "stream_options": {"x": 1}}, 400, "stream_options", ""),
    (X | {"tools": [{"type": 5}]}, 400, "tools", "must have a type"),
    (X | {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, 400, "tool_choice", "'g'"),
    (X | {"tool_choice": "required"}, 400, "tool_choice", "tools"),
    (X | {"tools": [TOOL]}, 400, "tool_choice", "--tool-call-parser"),
    (X | {"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text", "schema"),
    (X | {"text": {"format": {"type": "xml"}}}, 400, "text", ""), (X | {"model": "gpt"}, 404, "model", "gpt"),
    (X | {"include": ["message.output_text.logprobs"], "top_logprobs": 21}, 400, "top_logprobs", "20"),
    (X | {"include": ["web_search_call.results"]}, 400, "include", ""), (X | {"messages": []}, 400, "messages", ""),
    ({"input": "y" * 600}, 400, "input", "512"),
]  # fmt: skip


def test_wrong_requests():
    llm, app = serve(strict_fields=True)
    for body, status, param, text in WRONG:
        with named(body, status, param, text):
            heard = ask(app, body)
            error = heard.json["error"]
            assert heard.status == status == error["code"] and error["param"] == param, error
            assert text in error["message"], error
            assert not llm.added


HALVES = [
    ("request_id", "\ud83d"), ("user", "\ud83d"), ("instructions", "\ud83d"), ("metadata", {"\ud83d": "x"}),
    ("metadata", {"x": "\ud83d"}), ("tools", [TOOL | {"description": "\ud83d"}]), ("input", "\ud83d"),
    ("input", [{"role": "user", "content": [{"type": "input_text", "text": "\ud83d"}]}]),
    ("text", {"format": {"type": "json_schema", "name": "\ud83d", "schema": {}}}),
]  # fmt: skip


def test_half_a_surrogate_pair_is_refused_in_every_field():
    """A response repeats what was asked for; half a character cannot be repeated."""
    llm, app = serve()
    for (field, value), stream in itertools.product(HALVES, [False, True]):
        with named(field, value, stream):
            heard = ask(app, X | {"tool_choice": "none", "stream": stream, field: value})
            error = heard.json["error"]
            assert heard.status == 400 and error["param"] == field and "half of a surrogate pair" in error["message"]
            assert not llm.added


def test_a_response_says_what_it_was_made_with():
    """What vLLM 0.32 repeats, by a recorded answer."""
    _, app = serve()
    wanted = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.25, "frequency_penalty": -0.5}
    for said, told in ((wanted, wanted), ({}, {"presence_penalty": 0, "frequency_penalty": 0, "prompt": None})):
        found = ask(app, X | said).json
        assert {name: found[name] for name in told} == told


@pytest.mark.parametrize("given", [{}, {"truncation": None}, {"truncation": "disabled"}, {"truncation": "auto"}])
def test_what_is_too_long_is_cut_if_its_client_says_so(given):
    """LangChain, pydantic-ai and agents say it; the end stays, and room for a token."""
    llm, app = serve()
    long = {"input": "x" * 300 + "y" * 300} | given
    heard = ask(app, long)
    if given.get("truncation") != "auto":
        assert heard.status == 400 and heard.json["error"]["param"] == "input"
        assert ask(app, X | given).json["truncation"] == "disabled"
        return
    ((_, prompt, _),) = llm.added
    assert heard.json["truncation"] == "auto" and heard.json["usage"]["input_tokens"] == 511
    assert prompt["prompt_token_ids"] == [*b"x" * 211, *b"y" * 300]


def test_what_was_asked_stands_in_the_answer():
    _, app = serve(kind=Calling)
    wish = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    body = X | {"tools": [TOOL], "tool_choice": "none", "text": {"format": wish}, "user": "u", "temperature": 0.25}
    found = ask(app, body).json
    assert found["tools"] == [TOOL] and found["tool_choice"] == "none"
    assert found["text"] == {"format": wish} and (found["user"], found["temperature"]) == ("u", 0.25)
    named = {"type": "function", "name": "f"}
    assert ask(app, X | {"tools": [TOOL], "tool_choice": named}).json["tool_choice"] == named


# --- Kept -------------------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on():
    llm, app = serve()
    first = ask(app, {"input": "one ", "instructions": "I"}).json
    second = ask(app, {"input": "two ", "previous_response_id": first["id"], "stream": True})
    second = events_of(second.text)[-1]["response"]
    assert second["previous_response_id"] == first["id"]
    ask(app, {"input": "three", "previous_response_id": second["id"], "instructions": "J"})
    branch = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "else"}]
    ask(app, {"input": branch})
    assert [prompt["prompt"] for _, prompt, _ in llm.added] == [
        "Ione ",
        "one Paris.two ",
        "Jone Paris.two Paris.three",
        "Paris.else",
    ], "instructions are for one response; what was said stays"
    assert ask(app, None, f"/v1/responses/{first['id']}", method="GET").json == first
    late = ask(app, None, f"/v1/responses/{first['id']}/cancel")
    assert late.status == 400 and late.json["error"]["param"] == "response_id"
    assert ask(app, None, "/v1/responses/resp_none/cancel").status == 404
    gone = ask(app, None, f"/v1/responses/{first['id']}", method="DELETE")
    assert gone.json == {"id": first["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        assert ask(app, None, f"/v1/responses/{first['id']}", method=method).status == 404
    assert ask(app, {"input": "x", "previous_response_id": second["id"]}).status == 200


def test_an_item_is_found_among_others():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    llm, app = serve(("Hm ", call, " done"), kind=Calling)
    found = events_of(ask(app, X | {"tools": [TOOL], "stream": True}).text)[-1]["response"]
    ask(app, {"input": [{"type": "item_reference", "id": item["id"]} for item in found["output"][2:]]})
    assert llm.added[1][1]["prompt"] == "done"


@pytest.mark.parametrize("fields", [
    {"tools": [], "include": []}, {"text": {}, "reasoning": {}, "metadata": {}}, {"tool_choice": "none"},
    {"include": None, "tools": None, "text": None, "reasoning": None, "metadata": None, "user": None, "store": None},
    {"ignore_eos": True, "truncation": "disabled"}, {"include": ["reasoning.encrypted_content"], "store": False},
    {"tool_choice": "auto", "parallel_tool_calls": True}, {"stream_options": {"include_obfuscation": False}},
    {"reasoning": {"effort": "low", "summary": "auto"}, "something of tomorrow": None},
])  # fmt: skip
def test_fields_that_clients_send(fields):
    """Agents, Semantic Kernel, agno, LlamaIndex, guidellm, inspect-ai and others, on their own account."""
    heard = ask(serve()[1], X | fields)
    assert heard.status == 200 and heard.json["output"][0]["content"][0]["text"] == "Paris.", heard.text


def test_what_is_not_to_be_kept_is_not():
    _, app = serve()
    found = ask(app, X | {"store": False}).json
    assert found["store"] is False and ask(app, X | {"previous_response_id": found["id"]}).status == 404
    _, app = serve(("a", ValueError("x")))
    broken = events_of(ask(app, X | {"stream": True}).text)[-1]["response"]
    assert broken["status"] == "failed"
    assert ask(app, None, f"/v1/responses/{broken['id']}", method="GET").status == 404


KEYS = {name: {"authorization": f"Bearer key-{name}"} for name in "ab"}


def serve_two(**about):
    llm = Script(**about)
    return llm, build_app(OpenAIServing(llm, ["smol"]), ["key-a", "key-b"])


@pytest.mark.parametrize("how", ["header", "field"])
def test_two_clients_that_choose_the_same_name_have_two_conversations(how):
    """A proxy that counts its requests is enough for that. The id is neither the client's nor to be guessed."""
    llm, app = serve_two()
    chosen, header = ({"request_id": "1"}, {}) if how == "field" else ({}, {"x-request-id": "1"})
    a, again, b = (
        ask(app, {"input": text, **chosen}, headers={**KEYS[who], **header}).json
        for who, text in (("a", "Alice. "), ("a", "Alice, too. "), ("b", "Bob. "))
    )
    assert len({a["id"], again["id"], b["id"]}) == 3
    assert all(len(set(found["id"].removeprefix("resp_"))) > 5 for found in (a, again, b))
    assert ask(app, None, f"/v1/responses/{a['id']}", method="GET", headers=KEYS["a"]).json == a
    ask(app, {"input": "more", "previous_response_id": a["id"]}, headers=KEYS["a"])
    assert llm.added[-1][1]["prompt"] == "Alice. Paris.more"


def test_what_is_kept_is_its_keys_own():
    """Who has the id, but another key, hears what is said of ids that never were."""
    llm, app = serve_two()
    found = ask(app, {"input": "Alice"}, headers=KEYS["a"]).json
    name, item = found["id"], found["output"][0]["id"]
    asked = len(llm.added)
    for path, method in ((f"/v1/responses/{name}", "GET"), (f"/v1/responses/{name}", "DELETE"),
                         (f"/v1/responses/{name}/cancel", "POST")):  # fmt: skip
        heard, never = (ask(app, None, path.replace(name, x), method=method, headers=KEYS["b"])
                        for x in (name, "resp_0"))  # fmt: skip
        assert (heard.status, heard.text.replace(name, "resp_0")) == (404, never.text)
    for body in (X | {"previous_response_id": name}, {"input": [{"type": "item_reference", "id": item}]}):
        assert ask(app, body, headers=KEYS["b"]).status == 404
        assert ask(app, body, headers=KEYS["a"]).status == 200
    assert len(llm.added) == asked + 2
    assert ask(app, None, f"/v1/responses/{name}", method="DELETE", headers=KEYS["a"]).status == 200
    assert ask(app, {"input": [{"type": "item_reference", "id": item}]}, headers=KEYS["a"]).status == 404


def test_a_salt_is_its_keys_own():
    """What is cached under a salt tells by its speed, and in `cached_tokens`, what others have asked."""
    salts = []

    class Salted(Script):
        def add_request(self, *about, cache_salt, **more):
            salts.append(cache_salt)
            return super().add_request(*about, **more)

    llm = Salted()
    app = build_app(OpenAIServing(llm, ["smol"]), ["key-a", "key-b"])
    for who, salt in (("a", "1"), ("b", "1"), ("a", "1"), ("a", "2"), ("a", None)):
        for path, body in (("/v1/responses", X), ("/v1/completions", {"prompt": "x"})):
            ask(app, body | {"cache_salt": salt}, path, headers=KEYS[who])
    assert salts[::2] == salts[1::2], "an API is not a tenant"
    a, b, again, other, none = salts[::2]
    assert a == again and len({a, b, other}) == 3 and none is None


def test_the_oldest_makes_room():
    api = Kept(most=100)

    def keep(name, size):
        output = [{"id": f"msg_{name}"}]
        api.add(Stored({"id": name, "output": output}, ["before", name], size))

    keep("a", 50), keep("b", 50)
    assert api.find("a").size == 50 and api.find_item("msg_a") == "a" and api.size == 100
    keep("c", 1)
    assert list(api.responses) == ["b", "c"] and list(api.items) == ["msg_b", "msg_c"] and api.size == 51
    keep("d", 100)
    assert list(api.responses) == ["d"] and api.size == 100
    keep("e", 101)
    assert not (api.responses or api.items or api.size), "what is too long for the store is answered, and not kept"


def test_a_conversation_takes_the_room_of_its_key(monkeypatch):
    """Of all that was said, with the request's own fields; what one key keeps, displaces nothing of another's."""
    _, app = serve_two()
    monkeypatch.setattr(responses, "STORE_BYTES", 2 * 20_000)
    alice = ask(app, X, headers=KEYS["a"]).json

    def is_kept(found, who):
        return ask(app, None, f"/v1/responses/{found['id']}", method="GET", headers=KEYS[who]).status == 200

    first = ask(app, X | {"metadata": {"x": "y" * 12_000}}, headers=KEYS["b"]).json
    assert is_kept(first, "b")
    second = ask(app, X | {"previous_response_id": first["id"]}, headers=KEYS["b"]).json
    assert is_kept(second, "b") and not is_kept(first, "b"), "a conversation that goes on is all there"
    for _ in range(20):
        last = ask(app, X, headers=KEYS["b"]).json
    assert is_kept(last, "b") and is_kept(alice, "a")


def test_events_of_a_kept_response_are_refused():
    """OpenAI's `retrieve(id, stream=True)` reads events; in one whole object it finds none, and says nothing."""
    _, app = serve()
    kept = ask(app, X).json

    async def retrieve(stream):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return await client.get(f"/v1/responses/{kept['id']}", params={"stream": stream})

    refused = asyncio.run(retrieve("true"))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream", refused.text
    assert asyncio.run(retrieve("maybe")).json()["error"]["param"] == "stream"
    assert asyncio.run(retrieve("false")).json() == kept

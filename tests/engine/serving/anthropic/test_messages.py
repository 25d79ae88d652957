"""The Messages API: whoever has every event of a message has the message."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.errors import EngineDeadError
from engine.serving.openai.app import build_app
from support.scripted_api import Calling, Letters, ScriptedLLM, call, check_error
from support.scripted_server import Forced

CALL = '<tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>'
ROME = {"city": "Rome"}
TOOL = {"name": "f", "description": "F.", "input_schema": {"properties": {"city": {"type": "string"}}}}
ASK = {"model": "smol", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}


class Thinking(Calling):
    """Its model marks what it thinks."""

    reasoning_parser = "qwen3"


def ask(llm, body, kind=Calling, path="/v1/messages", keys=(), **about):
    return asyncio.run(call(build_app(kind(llm, ["smol"]), keys), path, body, **about))


def events_of(text):
    """Server-sent events with names."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def read(events):
    """A client: the message, put together from events alone. Everything is said in order and ends once."""
    first, *rest, about, last = events
    assert (first["type"], about["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message, growing, arguments = first["message"], None, ""
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    for event in rest:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            assert growing is None
            growing, arguments = event["content_block"], ""
            assert not any(growing.get(name) for name in ("text", "thinking", "input"))
            message["content"].append(growing)
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
                continue
            name = delta["type"].removesuffix("_delta")
            growing[name] = growing.get(name, "") + delta[name]
        else:
            assert event["type"] == "content_block_stop"
            growing |= {"input": json.loads(arguments)} if growing["type"] == "tool_use" else {}
            growing = None
    assert growing is None
    return message | about["delta"] | {"usage": about["usage"]}


def bare(message):
    """Without what is another one each time."""
    unlike = ("id", "signature")
    return {name: value for name, value in message.items() if name not in unlike} | {
        "content": [{name: x for name, x in block.items() if name not in unlike} for block in message["content"]]
    }


@pytest.mark.parametrize(
    ("said", "kind", "want", "reason"),
    [("Paris.", Calling, [("text", "Paris.")], "end_turn"), ("", Calling, [("text", "")], "end_turn"),
     (f"Look. {CALL}\n{CALL}", Calling, [("text", "Look. "), ("tool_use", ROME), ("tool_use", ROME)], "tool_use"),
     (f"<think>Hm.</think>{CALL}", Thinking, [("thinking", "Hm."), ("tool_use", ROME)], "tool_use"),
     ("Hm.</think>Yes.", Thinking, [("thinking", "Hm."), ("text", "Yes.")], "end_turn")],
)  # fmt: skip
def test_a_whole_and_a_streamed_message_say_the_same(said, kind, want, reason):
    body = ASK | {"tools": [TOOL]}
    whole = ask(Forced([said]), body, kind).json
    heard = ask(Forced([said]), body | {"stream": True}, kind)
    assert heard.headers["content-type"].startswith("text/event-stream") and "[DONE]" not in heard.text
    streamed = read(events_of(heard.text))
    assert bare(whole) == bare(streamed)
    assert [(block["type"], block.get(block["type"], block.get("input"))) for block in whole["content"]] == want
    assert all(block["name"] == "f" for block in whole["content"] if block["type"] == "tool_use")
    assert (whole["stop_reason"], whole["stop_sequence"], whole["type"]) == (reason, None, "message")
    assert whole["id"].startswith("msg_") and whole["role"] == "assistant" and whole["model"] == "smol"
    assert whole["usage"]["output_tokens"] == len(said) and whole["usage"]["input_tokens"] > 0
    assert all(block["signature"] for block in whole["content"] if block["type"] == "thinking")


def test_a_chat_that_says_the_same():
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "redacted_thinking", "data": "…"},
            {"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And?"}]},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t2", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "rain"}]},
    ]  # fmt: skip
    llm = Forced(["Yes."])
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    system = [{"type": "text", "text": "x-anthropic-billing-header: 5"}, {"type": "text", "text": "S"}]
    body = ASK | {"messages": history, "system": system, "tools": [TOOL, search], "stop_sequences": ["END"],
                  "temperature": 0.5, "top_k": 4, "top_p": 0.9, "thinking": {"type": "disabled"}}  # fmt: skip
    assert ask(llm, body, path="/v1/messages?beta=true".partition("?")[0]).status == 200
    ((_, _, params),), (asked,) = llm.added, llm.asked
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (50, 0.5, 4, 0.9)
    assert params.stop == ["END"]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert asked["tools"] == [
        {"type": "function", "function": {"name": "f", "description": "F.", "parameters": schema}}
    ]
    first = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    called = {"role": "assistant", "content": "Let me see.", "reasoning": "Hm.", "reasoning_content": "Hm.",
              "tool_calls": [first]}  # fmt: skip
    assert asked["messages"] == [
        {"role": "system", "content": "S"}, {"role": "user", "content": "a\nb"}, called,
        {"role": "tool", "content": "sunny", "tool_call_id": "t1"}, {"role": "user", "content": "And?"},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "",
         "tool_calls": [{"id": "t2", "type": "function", "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "rain", "tool_call_id": "t2"},
    ]  # fmt: skip


def test_a_system_message_in_the_midst_begins_the_chat_where_the_template_wants_it():
    import common

    llm = Forced(["Yes."])
    render = llm.front.tokenizer.render_chat

    def strict(messages, **about):
        if any(message["role"] == "system" for message in messages[1:]):
            raise common.InputError("System message must be at the beginning.")
        return render(messages, **about)

    llm.front.tokenizer.render_chat = strict
    late = [*ASK["messages"], {"role": "system", "content": " Be brief."}]
    assert ask(llm, ASK | {"system": "Hello.", "messages": late}).status == 200
    assert llm.asked[0]["messages"] == [{"role": "system", "content": "Hello. Be brief."},
                                        {"role": "user", "content": "Hi"}]  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "constraint", "error"),
    [({"type": "any"}, "grammar", None), ({"type": "tool", "name": "f"}, "json", None), ({"type": "none"}, None, None),
     ({"type": "auto", "disable_parallel_tool_use": True}, None, None), ({"type": "tool"}, None, "needs a name"),
     ({"type": "tool", "name": "g"}, None, "'g'")],
)  # fmt: skip
def test_who_decides_that_a_tool_is_called(choice, constraint, error):
    llm = Forced(["No."])
    heard = ask(llm, ASK | {"tools": [TOOL], "tool_choice": choice})
    if error:
        assert heard.status == 400 and error in heard.json["error"]["message"]
        return
    assert heard.status == 200
    asked = llm.added[0][2].structured_outputs
    assert asked is None if constraint is None else [*asked] == [constraint]


def test_an_answer_that_must_be_json():
    llm = Forced(["{}"])
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert ask(llm, ASK | {"output_config": {"format": form, "effort": "low"}}).status == 200
    assert llm.added[0][2].structured_outputs == {"json": {"type": "object"}}


def test_how_long_a_prompt_would_be():
    body = {name: ASK[name] for name in ("model", "messages")} | {"tools": [TOOL], "system": "S"}
    llm = Forced([""])
    found = ask(llm, body, path="/v1/messages/count_tokens").json
    assert ask(llm, body | {"max_tokens": 5}).json["usage"]["input_tokens"] == found["input_tokens"] > 20
    assert found["context_management"] == {"original_input_tokens": found["input_tokens"]} and len(llm.added) == 1


IMAGE = [{"type": "image", "source": {"type": "url", "url": "x"}}]
RESULT = [{"type": "tool_result", "tool_use_id": "t", "content": IMAGE}]


@pytest.mark.parametrize(
    ("body", "text"),
    [({}, "messages"), (ASK | {"max_tokens": 0}, "max_tokens"), ({"messages": ASK["messages"]}, "max_tokens"),
     (ASK | {"messages": [{"role": "user", "content": IMAGE}]}, "reads text alone"),
     (ASK | {"messages": [{"role": "user", "content": RESULT}]}, "reads text alone"),
     (ASK | {"temperature": 9}, "temperature"), (ASK | {"stop_sequences": [""]}, "stop_sequences"),
     (ASK | {"max_tokens": 1 << 21}, "max_tokens"), (b"{", "not JSON"), (ASK | {"model": "claude"}, "claude"),
     (ASK | {"messages": [{"role": "system", "content": ""}]}, "nobody says anything")],
)  # fmt: skip
def test_errors_have_the_shape_that_anthropics_clients_read(body, text):
    llm = Forced([""])
    heard = ask(llm, body)
    status, kind = (404, "not_found_error") if text == "claude" else (400, "invalid_request_error")
    assert (heard.status, heard.json["type"], heard.json["error"]["type"]) == (status, "error", kind), heard.text
    assert text in heard.json["error"]["message"] and not llm.added


@pytest.mark.parametrize("header", [{"x-api-key": "k"}, {"authorization": "Bearer k"}])
def test_keys_as_anthropics_clients_send_them(header):
    assert ask(Forced(["Hi"]), ASK, keys=["k"], headers=header).status == 200
    wrong = {name: value + "x" for name, value in header.items()}
    refused = ask(Forced(["Hi"]), ASK, keys=["k"], headers=wrong)
    assert refused.status == 401 and refused.json["error"]["type"] == "authentication_error"
    check_error(ask(Forced(["Hi"]), ASK, keys=["k"], headers=wrong, path="/v1/chat/completions"), 401)


def test_an_error_on_the_way(capsys):
    llm = Letters([(0, "a", False, False), EngineDeadError("gone")])
    *_, last = events_of(ask(llm, ASK | {"stream": True}).text)
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and "gone" in last["error"]["message"]
    assert ask(Letters([EngineDeadError("gone")]), ASK).status == 500


def test_whoever_hangs_up_is_forgotten():
    llm = ScriptedLLM(512)
    ask(llm, ASK | {"stream": True}, hang_up_after=1)
    assert ask(llm, ASK).status == 200 and len(llm.aborted) == len(llm.added) == 2


@pytest.mark.parametrize(
    ("finish", "stop", "said", "want"),
    [("length", None, "a", ("max_tokens", None)), ("stop", "END", "a", ("stop_sequence", "END")),
     ("stop", 5, "a", ("end_turn", None)), ("stop", "END", CALL, ("tool_use", None))],
)  # fmt: skip
def test_why_a_message_ends(finish, stop, said, want):
    class Ended(Forced):
        async def write(self, collector, prompt, text, stream):
            await super().write(collector, prompt, text, False)
            collector.output.outputs[0].finish_reason, collector.output.outputs[0].stop_reason = finish, stop

    found = ask(Ended([said]), ASK | {"tools": [TOOL]}).json
    assert (found["stop_reason"], found["stop_sequence"]) == want

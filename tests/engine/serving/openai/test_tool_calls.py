"""Calls read the same however their characters come."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_args import TOOL_CALL_PARSERS
from engine.serving.openai.tool_calls import PARSERS, ToolCallReader
from engine.serving.openai.tool_parsers.json_end import JSONEnd
from support.scripted_api import NAMED, TOOLS, Calling, Letters, M, ask, read_events, serve
from support.tool_calls import call_of, request


class Llama(Calling):
    """Served with --tool-call-parser llama3_json."""

    tool_call_parser = "llama3_json"


class Python(Calling):
    """Served with --tool-call-parser pythonic."""

    tool_call_parser = "pythonic"


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
    found = read_events(heard.text)[1]["choices"][0]["delta"] if stream else heard.json["choices"][0]["message"]
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


LLAMA, PYTHON = '{"name": "f", "parameters": {"city": "Rome"}}', '[f(city="Rome")]'


@pytest.mark.parametrize(("parser", "text"), [("llama3_json", LLAMA), ("pythonic", PYTHON)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_the_format_that_the_server_was_told(parser, text, stream):
    kind = {"llama3_json": Llama, "pythonic": Python}[parser]
    pieces = [(0, char, i == len(text) - 1, i == len(text) - 1) for i, char in enumerate(text)]
    app = serve(Letters(pieces if stream else [(0, text, True, True)]), kind=kind)[1]
    heard = ask(app, "/v1/chat/completions", M | {"tools": TOOLS, "stream": stream})
    choices = [e["choices"][0] for e in read_events(heard.text)[:-1]] if stream else heard.json["choices"]
    said = [choice["delta" if stream else "message"] for choice in choices]
    calls = [call["function"] for each in said for call in each.get("tool_calls", ())]
    assert calls == [{"name": "f", "arguments": '{"city": "Rome"}'}] and choices[-1]["finish_reason"] == "tool_calls"
    assert stream or said[0]["content"] is None


def test_every_parser_that_the_command_line_knows_is_there():
    assert tuple(PARSERS) == TOOL_CALL_PARSERS


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
    *events, done = read_events(
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
    assert answer.message.content is None and not content and call.function.name == calls[0].function.name == "f"
    assert "index" not in whole.json["choices"][0]["message"]["tool_calls"][0]
    streamed = "".join(call.function.arguments for call in calls)
    assert streamed == call.function.arguments and json.loads(streamed) in (HARD, {"city": "<Rome>"})
    grows = 1 if choice in ("auto", None) else len(streamed) + (choice == "required")  # the name, then every character
    assert len(calls) == grows, "a demanded call is told while it grows"

"""Which tools a model hears of, under what names, and how its calls come back to the client that has them."""

from __future__ import annotations

import common

import json

import pytest

from engine.serving.openai import responses_tools
from engine.serving.openai.responses_protocol import ResponsesRequest
from support.scripted_api import RESPONSE, Calling, ask, check_error
from support.scripted_api import serve as scripted
from support.scripted_server import Forced

PLAIN = {"type": "function", "name": "f", "description": "F.", "parameters": {"type": "object"}, "strict": None}
PATCH = {"type": "custom", "name": "patch", "description": "P.", "format": {"type": "text"}}
SPACE = {"type": "namespace", "name": "mcp", "description": "M.", "tools": [PLAIN, {"type": "custom", "name": "no"}]}
HOSTED = [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}, {"type": "image_generation"},
          {"type": "mcp", "server_label": "x", "server_url": "https://x"}, {"type": "a tool of tomorrow"},
          {"type": "code_interpreter", "container": {}}, {"type": "file_search", "vector_store_ids": []}]  # fmt: skip


def parsed(*tools):
    return ResponsesRequest(input="x", tools=list(tools)).tools


def serve(*said):
    llm = Forced(said)
    return llm, scripted(llm, kind=Calling)[1]


def called(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_what_a_model_hears_of():
    functions = responses_tools.functions(parsed(*HOSTED, PLAIN, PATCH, SPACE))
    assert [function.name for function in functions] == ["f", "patch", "mcp__f"]
    assert functions[0].parameters == functions[2].parameters == {"type": "object"}
    assert functions[1].parameters["required"] == ["input"] and functions[1].description == "P."


def test_tools_that_only_other_servers_run_are_carried_and_left_out():
    """Codex and others send them on their own account, with fields about themselves."""
    llm, app = serve("Yes.")
    body = {"input": "x", "tools": HOSTED, "client_metadata": {"x": "y"}, "tool_choice": "auto", "store": False,
            "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}  # fmt: skip
    heard = ask(app, RESPONSE, body)
    assert heard.status == 200 and heard.json["tools"] == HOSTED and llm.asked[0]["tools"] == []
    check_error(ask(app, RESPONSE, body | {"tool_choice": "required"}), 400, "tool_choice", "needs tools")
    check_error(ask(app, RESPONSE, body | {"tools": [{"name": "x"}]}), 400, "tools", "a tool must have a type")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_comes_back_under_the_name_that_the_client_knows(stream):
    text = '*** Begin\n"quoted" ✓'
    said = called("f", {}) + called("mcp__f", {"x": 1}) + called("patch", {"input": text})
    llm, app = serve(said)
    heard = ask(app, RESPONSE, {"input": "x", "tools": [PLAIN, PATCH, SPACE], "stream": stream})
    if stream:
        events = [json.loads(block.split("data: ")[1]) for block in heard.text.split("\n\n")[:-1]]
        output = events[-1]["response"]["output"]
        deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == text
        assert [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"] == [text]
    else:
        output = heard.json["output"]
    plain, spaced, custom = output
    assert (plain["type"], plain["name"], plain.get("namespace")) == ("function_call", "f", None)
    assert (spaced["type"], spaced["name"], spaced["namespace"]) == ("function_call", "f", "mcp")
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", text)
    assert custom["id"].startswith("ctc_") and "arguments" not in custom
    result = {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "done"}
    tools = [PLAIN, PATCH, SPACE]
    again = {"input": [*output, result], "tools": tools}
    assert ask(app, RESPONSE, again).status == 200
    told = llm.asked[1]["messages"]
    assert [call["function"]["name"] for call in told[0]["tool_calls"]] == ["f", "mcp__f", "patch"]
    assert told[0]["tool_calls"][2]["function"]["arguments"] == {"input": text}
    assert told[1] == {"role": "tool", "content": "done", "tool_call_id": custom["call_id"]}


def test_a_kept_conversation_has_its_calls():
    llm, app = serve(called("patch", {"input": "x"}), "Done.")
    first = ask(app, RESPONSE, {"input": "x", "tools": [PATCH]}).json
    result = {"type": "custom_tool_call_output", "call_id": first["output"][0]["call_id"], "output": "fine"}
    assert ask(app, RESPONSE, {"input": [result], "previous_response_id": first["id"]}).status == 200
    assert [message["role"] for message in llm.asked[1]["messages"]] == ["user", "assistant", "tool"]


def test_a_choice_names_a_tool_with_its_namespace_or_without():
    tools = parsed(PATCH, SPACE)
    assert responses_tools.full_name(tools, "f") == responses_tools.full_name(tools, "mcp__f") == "mcp__f"
    assert responses_tools.full_name(tools, "patch") == "patch" and responses_tools.full_name(tools, "g") == "g"
    with pytest.raises(common.InputError, match=r"'f' is in several namespaces; name one of mcp__f, other__f"):
        responses_tools.full_name(parsed(SPACE, SPACE | {"name": "other"}), "f")
    llm, app = serve('{"input": "x"}')
    choice = {"type": "custom", "name": "patch"}
    found = ask(app, RESPONSE, {"input": "x", "tools": [PATCH], "tool_choice": choice}).json
    assert found["output"][0]["input"] == "x" and found["tool_choice"] == choice
    assert [*llm.added[0][2].structured_outputs] == ["json"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a"}', "a"), ("free", "free"), ('{"input": 5}', '{"input": 5}'), ("[]", "[]"), ('{"input": ""}', ""),
     (r'{"input": "\ud83d"}', r"\ud83d")],
)  # fmt: skip
def test_what_a_tool_is_given(arguments, text):
    assert responses_tools.as_text(arguments) == text
    assert responses_tools.as_text(responses_tools.as_arguments(text)) == text

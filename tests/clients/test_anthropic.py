"""Anthropic's own Python client on our server: whole and streamed, with tools, thinking, and a refusal."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_api import Calling
from support.scripted_server import scripted_server

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PROGRAM = """
import json
import anthropic

client = anthropic.Anthropic(base_url="URL", api_key="secret", max_retries=0)
tools = [{"name": "weather", "description": "The weather.",
          "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]
about = {"model": "smol", "max_tokens": 500, "system": "Be brief.", "tools": tools}
messages = [{"role": "user", "content": "How is the weather?"}]
first = client.messages.create(messages=messages, **about)
kinds = [block.type for block in first.content]
call = first.content[-1]
messages += [{"role": "assistant", "content": first.content},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}]
with client.messages.stream(messages=messages, **about) as stream:
    events = [event.type for event in stream]
    second = stream.get_final_message()
with client.messages.stream(messages=messages[:1], **about) as stream:
    text = "".join(stream.text_stream)
    third = stream.get_final_message()
counted = client.messages.count_tokens(model="smol", messages=messages[:1], system="Be brief.", tools=tools)
try:
    client.messages.create(model="claude", max_tokens=1, messages=messages[:1])
except anthropic.NotFoundError as error:
    refused = error.body["error"]["type"]
print(json.dumps({
    "kinds": kinds, "input": call.input, "name": call.name, "reason": first.stop_reason, "events": events,
    "second": [[block.type, getattr(block, "text", None)] for block in second.content], "end": second.stop_reason,
    "text": text, "third": [block.type for block in third.content], "again": third.content[-1].input,
    "counted": counted.input_tokens, "used": first.usage.input_tokens, "refused": refused,
}))
"""


class Thinking(Calling):
    """Its model marks what it thinks."""

    reasoning_parser = "qwen3"


@pytest.mark.slow
def test_two_turns_a_call_a_stream_and_a_refusal(tmp_path):
    interpreter = clients.python("anthropic==2.14.0")
    answers = [f"<think>Hm.</think>I look. {CALL}", "</think>Sunny.", f"Hm.</think>I look. {CALL}"]
    with scripted_server(answers, Thinking, keys=["secret"]) as (url, llm):
        found = json.loads(clients.script(interpreter, PROGRAM.replace("URL", url), tmp_path))
    assert (found["kinds"], found["reason"]) == (["thinking", "text", "tool_use"], "tool_use")
    assert (found["name"], found["input"], found["again"]) == ("weather", {"city": "Rome"}, {"city": "Rome"})
    assert (found["second"], found["end"]) == ([["text", "Sunny."]], "end_turn")
    assert found["events"][0] == "message_start" and found["events"][-1] == "message_stop"
    assert (found["text"], found["third"]) == ("I look. ", ["thinking", "text", "tool_use"])
    assert found["counted"] == found["used"] > 100 and found["refused"] == "not_found_error"
    history = llm.asked[1]["messages"]
    assert [message["role"] for message in history] == ["system", "user", "assistant", "tool"]
    assert history[2]["reasoning"] == "Hm." and history[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}

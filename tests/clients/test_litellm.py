"""LiteLLM on our server, under both of its names for such: whole, streamed, and with what it drops or sends along."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PROGRAM = """
import asyncio, json, os
import litellm

about = {"api_base": os.environ["URL"] + "/v1", "api_key": "secret", "num_retries": 0}
messages = [{"role": "user", "content": "How is the weather?"}]
tools = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]
whole = litellm.completion("openai/smol", messages, **about)
stream = litellm.completion("hosted_vllm/smol", messages, stream=True, stream_options={"include_usage": True}, **about)
chunks = list(stream)
built = litellm.stream_chunk_builder(chunks, messages=messages)
called = litellm.completion("hosted_vllm/smol", messages, tools=tools, tool_choice="auto", **about)
call = called.choices[0].message.tool_calls[0]
messages += [called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
late = asyncio.run(litellm.acompletion(
    "hosted_vllm/smol", messages, tools=tools, drop_params=True, web_search_options={}, top_k=3,
    favourite_colour="blue", extra_body={"another_colour": "red"}, **about))
text = litellm.text_completion(model="text-completion-openai/smol", prompt="Once", max_tokens=20, **about)
try:
    litellm.completion("hosted_vllm/gpt-9", messages[:1], **about)
except litellm.NotFoundError as error:
    missing = "gpt-9" in str(error)
print(json.dumps({
    "whole": whole.choices[0].message.content, "used": whole.usage.completion_tokens,
    "pieces": [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content],
    "built": built.choices[0].message.content, "streamed": built.usage.completion_tokens,
    "call": json.loads(call.function.arguments), "late": late.choices[0].message.content,
    "text": text.choices[0].text, "missing": missing,
}))
"""


@pytest.mark.slow
def test_whole_streamed_called_and_with_fields_that_nobody_knows(tmp_path, caplog):
    interpreter = clients.python("litellm==1.109.1")
    answers = ["Hello there.", "Piece by piece.", CALL, "Sunny.", "Once upon a time."]
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with scripted_server(answers, keys=["secret"]) as (url, llm):
        found = json.loads(clients.script(interpreter, PROGRAM, tmp_path, URL=url, **offline).splitlines()[-1])
    assert (found["whole"], found["used"]) == ("Hello there.", len("Hello there."))
    assert "".join(found["pieces"]) == found["built"] == "Piece by piece." and len(found["pieces"]) > 2
    assert found["streamed"] == len("Piece by piece.")
    assert (found["call"], found["late"]) == ({"city": "Rome"}, "Sunny.")
    assert [message["role"] for message in llm.asked[3]["messages"]] == ["user", "assistant", "tool"]
    assert llm.added[3][2].top_k == 3, "a parameter of vLLM's reaches the engine"
    assert "favourite_colour" in caplog.text and "another_colour" in caplog.text, "others are passed over"
    assert found["text"] == "Once upon a time." and found["missing"]

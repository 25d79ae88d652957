"""LlamaIndex on our server, as a model that is like OpenAI's: a chat, a stream, a completion, an agent with a tool."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PROGRAM = """
import asyncio, json, os
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

where = {"model": "smol", "api_base": os.environ["URL"] + "/v1", "api_key": "secret", "max_retries": 0,
         "context_window": 4096, "additional_kwargs": {"extra_body": {"favourite_colour": "blue"}}}
chatty = OpenAILike(**where, is_chat_model=True, is_function_calling_model=True)
messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]
whole = chatty.chat(messages)
pieces = [piece.delta for piece in chatty.stream_chat(messages) if piece.delta]
text = OpenAILike(**where, is_chat_model=False).complete("Once").text

def weather(city: str) -> str:
    "The weather of a city."
    return f"sunny in {city}"

async def main():
    return str(await FunctionAgent(tools=[weather], llm=chatty).run("How is the weather?"))

print(json.dumps({"whole": whole.message.content, "pieces": pieces, "text": text, "end": asyncio.run(main())}))
"""


@pytest.mark.long
def test_a_chat_a_stream_a_completion_and_an_agent(tmp_path, caplog):
    interpreter = clients.python("llama-index-llms-openai-like==0.8.1")
    answers = ["Hello there.", "Piece by piece.", "Once upon a time.", f"I look. {CALL}", "Sunny."]
    with scripted_server(answers, keys=["secret"]) as (url, llm):
        found = json.loads(clients.script(interpreter, PROGRAM, tmp_path, URL=url).splitlines()[-1])
    assert (found["whole"], found["text"], found["end"]) == ("Hello there.", "Once upon a time.", "Sunny.")
    assert "".join(found["pieces"]) == "Piece by piece." and len(found["pieces"]) > 2
    assert llm.asked[4]["messages"][-1]["content"] == "sunny in Rome" and "favourite_colour" in caplog.text

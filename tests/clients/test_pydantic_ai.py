"""An agent of Pydantic AI on our server, over chats and over responses: it calls a tool, and its answer has a type."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PROGRAM = """
import asyncio, json, os
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

class Weather(BaseModel):
    city: str
    degrees: int

provider = OpenAIProvider(base_url=os.environ["URL"] + "/v1", api_key="secret")
cities = []

def agent_on(model, **about):
    agent = Agent(model, instructions="Be brief.", retries=0, **about)

    @agent.tool_plain
    def weather(city: str) -> str:
        "The weather of a city."
        cities.append(city)
        return f"21 degrees in {city}"

    return agent

agent = agent_on(OpenAIChatModel("smol", provider=provider))
first = agent.run_sync("How is the weather?")

async def stream():
    async with agent.run_stream("And now?", message_history=first.all_messages()) as run:
        return [piece async for piece in run.stream_text(delta=True, debounce_by=None)]

pieces = asyncio.run(stream())
typed = agent_on(OpenAIChatModel("smol", provider=provider), output_type=Weather).run_sync("Typed, please.")
third = agent_on(OpenAIResponsesModel("smol", provider=provider)).run_sync("How is the weather?")
print(json.dumps({"first": first.output, "used": first.usage.output_tokens, "pieces": pieces, "cities": cities,
                  "typed": typed.output.model_dump(), "third": third.output}))
"""


def act(messages, tools):
    """A model that looks once and then tells; where calls are demanded, a grammar has it write them as an array."""
    looked, typed = messages[-1]["role"] == "tool", "final_result" in [tool["function"]["name"] for tool in tools]
    if typed:
        result = {"name": "final_result", "parameters": {"city": "Rome", "degrees": 21}}
        return json.dumps([result if looked else {"name": "weather", "parameters": {"city": "Rome"}}])
    return f"It has {messages[-1]['content']}." if looked else CALL


@pytest.mark.slow
def test_an_agent_with_a_tool_a_history_a_type_and_responses(tmp_path):
    interpreter = clients.python("pydantic-ai-slim[openai]==2.68.0")
    with scripted_server([act], keys=["secret"]) as (url, llm):
        found = json.loads(clients.script(interpreter, PROGRAM, tmp_path, URL=url))
    assert found["first"] == found["third"] == "It has 21 degrees in Rome." and found["used"] > len(found["first"])
    assert "".join(found["pieces"]) == found["first"] and len(found["pieces"]) > 2
    assert found["typed"] == {"city": "Rome", "degrees": 21} and found["cities"] == ["Rome"] * 4
    assert len(llm.asked) == 8

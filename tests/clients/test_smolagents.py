"""Agents of smolagents on our server: one that calls tools, and one that writes code."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

PROGRAM = """
import json, os
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

@tool
def weather(city: str) -> str:
    '''The weather of a city.

    Args:
        city: Its name.
    '''
    return f"21 degrees in {city}"

model = OpenAIServerModel(model_id="smol", api_base=os.environ["URL"] + "/v1", api_key="secret")
calling = ToolCallingAgent(tools=[weather], model=model, max_steps=3, verbosity_level=0)
writing = CodeAgent(tools=[weather], model=model, max_steps=3, verbosity_level=0, stream_outputs=True)
answers = [calling.run("How is the weather in Rome?"), writing.run("What is six times seven?")]
print()  # behind what it streams
print(json.dumps(answers))
"""


def act(messages, tools):
    """A model that looks and then tells, as the array that a grammar demands; without tools it writes code."""
    if not tools:
        return "Thought: I multiply.\n<code>\nfinal_answer(6 * 7)\n</code>"
    if "21 degrees in Rome" in json.dumps(messages[-1]):
        return json.dumps([{"name": "final_answer", "parameters": {"answer": "It has 21 degrees."}}])
    return json.dumps([{"name": "weather", "parameters": {"city": "Rome"}}])


@pytest.mark.slow
def test_an_agent_that_calls_and_one_that_writes_code(tmp_path):
    interpreter = clients.python("smolagents[openai]==1.26.0")
    with scripted_server([act], keys=["secret"]) as (url, llm):
        found = json.loads(clients.script(interpreter, PROGRAM, tmp_path, URL=url).splitlines()[-1])
    assert found == ["It has 21 degrees.", 42] and len(llm.asked) == 3
    assert {tool["function"]["name"] for tool in llm.asked[0]["tools"]} == {"weather", "final_answer"}

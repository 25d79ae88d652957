"""LangChain's chat model for Python on our server: an answer, a stream, a tool, and an answer of a given shape."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PROGRAM = """
import json, os
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model="smol", base_url=os.environ["URL"] + "/v1", api_key="secret", max_retries=0, stream_usage=True,
                   extra_body={"top_k": 3, "favourite_colour": "blue"})

@tool
def weather(city: str) -> str:
    "The weather of a city."
    return f"sunny in {city}"

class Person(BaseModel):
    name: str
    age: int

whole = model.invoke([("system", "Be brief."), ("human", "Hello")])
pieces = list(model.stream("Hello"))
total = pieces[0]
for piece in pieces[1:]:
    total += piece
messages = [HumanMessage("How is the weather?")]
calling = model.bind_tools([weather])
messages.append(calling.invoke(messages))
(call,) = messages[-1].tool_calls
messages.append(weather.invoke(call))
end = calling.invoke(messages)
shaped = model.with_structured_output(Person, method="json_schema").invoke("Ann is 30.")
called = model.with_structured_output(Person, method="function_calling").invoke("Ann is 30.")
print(json.dumps({
    "whole": whole.content, "used": whole.usage_metadata["output_tokens"],
    "model": whole.response_metadata["model_name"],
    "pieces": [piece.content for piece in pieces if piece.content], "streamed": total.usage_metadata["output_tokens"],
    "call": call["args"], "end": end.content, "shaped": shaped.model_dump(), "called": called.model_dump(),
}))
"""


@pytest.mark.slow
def test_an_answer_a_stream_a_tool_and_a_shape(tmp_path, caplog):
    interpreter = clients.python(*clients.LANGCHAIN)
    person = {"name": "Ann", "age": 30}
    answers = ["Hello there.", "Piece by piece.", CALL, "Sunny.", json.dumps(person)]
    with scripted_server(answers, keys=["secret"]) as (url, llm):
        found = json.loads(clients.script(interpreter, PROGRAM, tmp_path, URL=url))
    assert (found["whole"], found["used"], found["model"]) == ("Hello there.", len("Hello there."), "smol")
    assert "".join(found["pieces"]) == "Piece by piece." and len(found["pieces"]) > 2
    assert found["streamed"] == len("Piece by piece.")
    assert (found["call"], found["end"]) == ({"city": "Rome"}, "Sunny.")
    assert llm.asked[3]["messages"][-1]["content"] == "sunny in Rome"
    assert found["shaped"] == found["called"] == person
    assert llm.added[0][2].top_k == 3 and "favourite_colour" in caplog.text

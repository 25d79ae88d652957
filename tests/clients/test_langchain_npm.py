"""LangChain's chat model for JavaScript on our server: an answer, a stream, a tool, and an answer of a given shape."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

PACKAGES = ["@langchain/openai@1.6.0", "@langchain/core@1.4.0", "zod@4.6.7"]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PROGRAM = """
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const model = new ChatOpenAI({
  model: "smol", apiKey: "secret", maxRetries: 0, configuration: { baseURL: `${process.env.URL}/v1` },
});
const found = {};
const whole = await model.invoke([["system", "Be brief."], ["human", "Hello"]]);
found.whole = [whole.content, whole.usage_metadata.output_tokens];
found.pieces = [];
for await (const chunk of await model.stream("Hello")) found.pieces.push(chunk.content);

const weather = tool(async ({ city }) => "sunny in " + city, {
  name: "weather", description: "The weather.", schema: z.object({ city: z.string() }),
});
const messages = [new HumanMessage("How is the weather?")];
const calling = model.bindTools([weather]);
const first = await calling.invoke(messages);
messages.push(first, await weather.invoke(first.tool_calls[0]));
found.call = first.tool_calls[0].args;
found.end = (await calling.invoke(messages)).content;

const shape = z.object({ name: z.string(), age: z.number() });
found.person = await model.withStructuredOutput(shape, { method: "jsonSchema" }).invoke("Ann is 30.");
found.called = await model.withStructuredOutput(shape, { name: "person", method: "functionCalling" }).invoke("Ann");
console.log(JSON.stringify(found));
"""


@pytest.mark.slow
def test_an_answer_a_stream_a_tool_and_a_shape(tmp_path):
    packages = clients.npm(*PACKAGES)
    person = {"name": "Ann", "age": 30}
    answers = ["Hello there.", "Piece by piece.", CALL, "Sunny.", json.dumps(person)]
    with scripted_server(answers, keys=["secret"]) as (url, llm):
        found = json.loads(clients.module(packages, PROGRAM, tmp_path, URL=url))
    assert found["whole"] == ["Hello there.", len("Hello there.")]
    assert "".join(found["pieces"]) == "Piece by piece." and len(found["pieces"]) > 2
    assert (found["call"], found["end"]) == ({"city": "Rome"}, "Sunny.")
    assert llm.asked[3]["messages"][-1]["content"] == "sunny in Rome"
    assert found["person"] == found["called"] == person

"""OpenAI's own client for JavaScript on our server: whole, streamed, its runner of tools, its errors."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PROGRAM = """
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: "secret", maxRetries: 0 });
const messages = [{ role: "user", content: "How is the weather?" }];
const about = { model: "smol", messages };
const found = { models: [], asked: [] };
for await (const model of client.models.list()) found.models.push(model.id);

const whole = await client.chat.completions.create({ ...about, user: "me", store: false, metadata: { of: "a test" } });
found.whole = whole.choices[0].message.content;
found.usage = whole.usage.total_tokens - whole.usage.prompt_tokens;

const stream = await client.chat.completions.create({
  ...about, stream: true, stream_options: { include_usage: true },
});
found.pieces = [];
for await (const chunk of stream) {
  if (chunk.choices.length) found.pieces.push(chunk.choices[0].delta.content ?? "");
  else found.streamed_usage = chunk.usage.completion_tokens;
}

const runner = client.chat.completions.runTools({
  ...about,
  stream: true,
  tools: [{
    type: "function",
    function: {
      name: "weather", description: "The weather.", parse: JSON.parse,
      parameters: { type: "object", properties: { city: { type: "string" } } },
      function: ({ city }) => { found.asked.push(city); return "sunny in " + city; },
    },
  }],
});
found.final = await runner.finalContent();

const response = await client.responses.create({ model: "smol", input: "Hello" });
found.response = response.output_text;
const events = [];
for await (const event of client.responses.stream({ model: "smol", input: "Hello" })) events.push(event.type);
found.events = [events[0], events.at(-1)];

try {
  await client.chat.completions.create({ ...about, temperature: 9 });
} catch (error) {
  found.wrong = [error instanceof OpenAI.BadRequestError, error.param];
}
try {
  await new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: "other", maxRetries: 0 }).models.retrieve("smol");
} catch (error) {
  found.stranger = error.constructor.name;
}
console.log(JSON.stringify(found));
"""


@pytest.mark.slow
def test_chats_streams_tools_responses_and_errors(tmp_path):
    packages = clients.npm(*clients.OPENAI_NPM)
    answers = ["Hello there.", "Piece by piece.", f"I look. {CALL}", "Sunny.", "Hello again."]
    with scripted_server(answers, keys=["secret"]) as (url, llm):
        found = json.loads(clients.module(packages, PROGRAM, tmp_path, URL=url))
    assert found["models"] == ["smol"]
    assert (found["whole"], found["usage"]) == ("Hello there.", len("Hello there."))
    assert "".join(found["pieces"]) == "Piece by piece." and len(found["pieces"]) > 2
    assert found["streamed_usage"] == len("Piece by piece.")
    assert (found["asked"], found["final"]) == (["Rome"], "Sunny.")
    assert llm.asked[3]["messages"][-1]["content"] == "sunny in Rome"
    assert (found["response"], found["events"]) == ("Hello again.", ["response.created", "response.completed"])
    assert found["wrong"] == [True, "temperature"] and found["stranger"] == "AuthenticationError"

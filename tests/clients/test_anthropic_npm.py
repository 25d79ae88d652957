"""Anthropic's client for JavaScript on our server: whole and streamed, its runner of tools, and a stranger."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PROGRAM = """
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.URL, apiKey: "secret", maxRetries: 0 });
const about = { model: "smol", max_tokens: 100, messages: [{ role: "user", content: "How is the weather?" }] };
const found = { cities: [] };

const whole = await client.messages.create({ ...about, metadata: { user_id: "me" } });
found.whole = whole.content.map((block) => block.text);

const stream = client.messages.stream(about);
found.pieces = [];
stream.on("text", (piece) => found.pieces.push(piece));
found.final = (await stream.finalMessage()).content[0].text;

const runner = client.beta.messages.toolRunner({
  ...about,
  tools: [{
    name: "weather", description: "The weather.", input_schema: { type: "object", properties: {} }, parse: (x) => x,
    run: async ({ city }) => { found.cities.push(city); return "sunny in " + city; },
  }],
});
found.last = (await runner).content.map((block) => block.text);
found.counted = (await client.messages.countTokens({ model: "smol", messages: about.messages })).input_tokens;
try {
  await new Anthropic({ baseURL: process.env.URL, apiKey: "other", maxRetries: 0 }).messages.create(about);
} catch (error) {
  found.stranger = error.constructor.name;
}
console.log(JSON.stringify(found));
"""


@pytest.mark.slow
def test_chats_a_stream_a_runner_of_tools_and_a_stranger(tmp_path):
    packages = clients.npm("@anthropic-ai/sdk@1.14.0")
    answers = ["Hello there.", "Piece by piece.", f"I look. {CALL}", "Sunny."]
    with scripted_server(answers, keys=["secret"]) as (url, llm):
        found = json.loads(clients.module(packages, PROGRAM, tmp_path, URL=url))
    assert found["whole"] == ["Hello there."]
    assert "".join(found["pieces"]) == found["final"] == "Piece by piece." and len(found["pieces"]) > 2
    assert (found["cities"], found["last"]) == (["Rome"], ["Sunny."])
    assert llm.asked[3]["messages"][-1]["content"] == "sunny in Rome"
    assert found["counted"] > 10 and found["stranger"] == "AuthenticationError"

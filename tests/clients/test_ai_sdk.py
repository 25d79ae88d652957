"""Vercel's AI SDK on our server, with its provider for whoever speaks like OpenAI: texts, tools, objects, options."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PROGRAM = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const here = createOpenAICompatible({
  name: "here", baseURL: `${process.env.URL}/v1`, apiKey: "secret", includeUsage: true, supportsStructuredOutputs: true,
});
const model = here("smol");
const found = { cities: [] };
const tools = {
  weather: tool({
    description: "The weather.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => { found.cities.push(city); return { sky: "sunny", city }; },
  }),
};

const whole = await generateText({
  model, tools, prompt: "How is the weather?", maxRetries: 0, stopWhen: isStepCount(5),
  providerOptions: { here: { reasoningEffort: "low", user: "me", favouriteColour: "blue", top_k: 3 } },
});
found.reasons = whole.steps.map((step) => step.finishReason);
found.text = whole.text;
found.tokens = whole.usage.outputTokens;

const stream = streamText({ model, tools, prompt: "And now?", maxRetries: 0, stopWhen: isStepCount(5) });
found.pieces = [];
for await (const piece of stream.textStream) found.pieces.push(piece);
found.reason = await stream.finishReason;

const recipe = z.object({ name: z.string(), steps: z.array(z.string()) });
const { partialObjectStream, object } = streamObject({ model, schema: recipe, prompt: "A recipe.", maxRetries: 0 });
found.partial = 0;
for await (const each of partialObjectStream) found.partial += 1;
found.object = await object;
console.log(JSON.stringify(found));
"""


@pytest.mark.slow
def test_texts_tools_objects_and_options_that_nobody_knows(tmp_path, caplog):
    packages = clients.npm(*clients.AI_SDK)
    recipe = {"name": "bread", "steps": ["knead", "wait", "bake"]}
    answers = [f"I look. {CALL}", "Sunny.", f"Again. {CALL}", "Still sunny.", json.dumps(recipe)]
    with scripted_server(answers, keys=["secret"]) as (url, llm):
        found = json.loads(clients.module(packages, PROGRAM, tmp_path, URL=url))
    assert (found["text"], found["tokens"]) == ("Sunny.", len(answers[0] + answers[1]))
    assert found["reasons"] == ["tool-calls", "stop"]
    assert "".join(found["pieces"]).split() == ["Again.", "Still", "sunny."] and found["reason"] == "stop"
    assert found["cities"] == ["Rome", "Rome"]
    assert json.loads(llm.asked[1]["messages"][-1]["content"]) == {"sky": "sunny", "city": "Rome"}
    assert found["object"] == recipe and found["partial"] > 2, "an object grows while it is written"
    assert llm.added[0][2].top_k == 3, "an option that the server knows and the SDK does not"
    assert "favouriteColour" in caplog.text, "one that neither knows is passed over, and the log names it"

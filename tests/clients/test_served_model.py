"""What a scripted model cannot show: clients on the real one, whose grammars hold, and whose vectors mean something."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.llm import LLM
from engine.request import SamplingParams
from lab.running_server import running_server
from support import clients

TEXTS = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose again in March."]
FLAGS = ["--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-gib", "0.1", "--served-model-name", "smol",
         "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]  # fmt: skip

OPENAI = """
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: "none", maxRetries: 0 });
const about = { model: "smol", temperature: 0, max_completion_tokens: 8 };
const messages = [{ role: "user", content: "What is the capital of France?" }];
const whole = await client.chat.completions.create({ ...about, messages });
const stream = await client.chat.completions.create({ ...about, messages, stream: true });
let streamed = "";
for await (const chunk of stream) streamed += chunk.choices[0].delta.content ?? "";
const vectors = (await client.embeddings.create({ model: "smol", input: JSON.parse(process.env.TEXTS) })).data;
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, streamed, vectors: vectors.map((entry) => entry.embedding),
}));
"""
AI_SDK = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, tool } from "ai";
import { z } from "zod";

const here = createOpenAICompatible({
  name: "here", baseURL: `${process.env.URL}/v1`, supportsStructuredOutputs: true,
});
const about = { model: here("smol"), temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const schema = z.object({ colour: z.enum(["blue", "green"]), wet: z.boolean() });
const { output } = await generateText({ ...about, prompt: "The sky.", output: Output.object({ schema }) });
const { toolCalls } = await generateText({
  ...about, prompt: "Paint the wall.", toolChoice: { type: "tool", toolName: "paint" },
  tools: { paint: tool({ description: "Paints.", inputSchema: schema }) },
});
const values = JSON.parse(process.env.TEXTS);
const { embeddings } = await embedMany({ model: here.embeddingModel("smol"), values, maxRetries: 0 });
console.log(JSON.stringify({ shaped: output, called: toolCalls[0].input, vectors: embeddings }));
"""
LANGCHAIN = """
import json, os
from typing import Literal
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

class Thing(BaseModel):
    "A thing that one sees."
    colour: Literal["blue", "green"]
    wet: bool

where = {"model": "smol", "base_url": os.environ["URL"] + "/v1", "api_key": "none", "max_retries": 0}
model = ChatOpenAI(**where, temperature=0, max_tokens=60)
shaped = model.with_structured_output(Thing, method="json_schema").invoke("The sky.")
called = model.with_structured_output(Thing, method="function_calling").invoke("Paint the wall.")
vectors = OpenAIEmbeddings(**where, check_embedding_ctx_length=False).embed_documents(json.loads(os.environ["TEXTS"]))
print(json.dumps({"shaped": shaped.model_dump(), "called": called.model_dump(), "vectors": vectors}))
"""


@pytest.fixture(scope="module")
def url():
    with running_server(*FLAGS) as (url, _):
        yield url


def check_thing(thing):
    assert thing.keys() == {"colour", "wet"} and thing["colour"] in ("blue", "green") and thing["wet"] in (True, False)


def check_vectors(vectors):
    """A cat is nearer to a kitten than either is to a bank."""
    unit = np.array(vectors)
    assert unit.shape == (3, 576) and np.allclose((unit**2).sum(1), 1, atol=1e-5)
    near = unit @ unit.T
    assert near[0, 1] > max(near[0, 2], near[1, 2]), near


@pytest.mark.slow
def test_greedy_texts_are_the_engine_s_own_and_vectors_arrive(url, real_model, tmp_path):
    said = clients.module(clients.npm(*clients.OPENAI_NPM), OPENAI, tmp_path, URL=url, TEXTS=json.dumps(TEXTS))
    found = json.loads(said)
    model, tokenizer = real_model
    llm = LLM(model, tokenizer=tokenizer, max_model_len=256, max_num_seqs=1, num_gpu_blocks_override=17)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (want,) = llm.chat([messages], SamplingParams(temperature=0, max_tokens=8))
    assert found["whole"] == found["streamed"] == want.outputs[0].text != ""
    check_vectors(found["vectors"])


@pytest.mark.slow
def test_the_ai_sdk_gets_its_shape_its_tool_and_its_vectors(url, tmp_path):
    found = json.loads(clients.module(clients.npm(*clients.AI_SDK), AI_SDK, tmp_path, URL=url, TEXTS=json.dumps(TEXTS)))
    check_thing(found["shaped"]), check_thing(found["called"]), check_vectors(found["vectors"])


@pytest.mark.slow
def test_langchain_gets_its_shape_its_tool_and_its_vectors(url, tmp_path):
    interpreter = clients.python(*clients.LANGCHAIN)
    found = json.loads(clients.script(interpreter, LANGCHAIN, tmp_path, URL=url, TEXTS=json.dumps(TEXTS)))
    check_thing(found["shaped"]), check_thing(found["called"]), check_vectors(found["vectors"])

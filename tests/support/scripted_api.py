"""The API's real application before an engine that is a script: no model, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from engine import registry
from engine.front_end import CompletionOutput, RequestOutput
from engine.llm_engine import LLMEngine
from engine.serving.collector import RequestOutputCollector
from engine.serving.openai.app import build_app
from engine.serving.openai.serving import OpenAIServing

tour = registry.lesson("06f_openai_api")
ScriptedLLM, ScriptedTokenizer = tour.ScriptedLLM, tour.ScriptedTokenizer
call, read_events, text_of = tour.call, tour.read_events, tour.text_of
COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
P = {"prompt": "Hello"}
M = {"messages": [{"role": "user", "content": "Hi"}]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": CITY, "strict": None}}]
NAMED = {"type": "function", "function": {"name": "f"}}


def user(content: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": content}


def serve(llm: Any = None, keys: Sequence[str] = (), kind: type = OpenAIServing, names: Sequence[str] = ("smol",
          "alias"), strict_fields: bool = False) -> tuple[Any, Any]:  # fmt: skip
    """(the engine, the application before it)."""
    llm = llm or ScriptedLLM(max_model_len=512)
    return llm, build_app(kind(llm, list(names)), keys, strict_fields=strict_fields)


class Calling(OpenAIServing):
    """Served with --enable-auto-tool-choice --tool-call-parser hermes; its engine is a script and guides nothing."""

    enable_auto_tool_choice, tool_call_parser = True, "hermes"

    async def check_constraint(self, *about): ...


def ask(app: Any, path: str, body: Any = None, **about: Any) -> Any:
    """What a client hears."""
    return asyncio.run(call(app, path, body, **about))


def check_error(heard: Any, status: int, param: str | None = None, text: str = "") -> dict[str, Any]:
    """It is an error in OpenAI's shape, with this status, on this field, with this text."""
    error = heard.json["error"]
    assert set(heard.json) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert heard.status == status == error["code"], heard.text
    assert param is None or error["param"] == param, error
    assert text in error["message"] and "Traceback" not in error["message"], error
    return error


class Letters(ScriptedLLM):
    """An answer that the test gives, piece by piece."""

    def __init__(self, pieces=(), **about):
        super().__init__(**{"max_model_len": 512, **about})
        self.pieces, self.collectors = pieces, []

    def add_request(self, request_id, prompt, params, **about):
        super().add_request(request_id, prompt, params)
        collector = RequestOutputCollector(request_id)
        self.collectors.append(collector)
        asyncio.get_running_loop().create_task(self.write(collector))
        return collector

    async def write(self, collector):
        for what in self.pieces:
            await asyncio.sleep(0.001)
            if isinstance(what, (Exception, RequestOutput)):
                collector.put(what)
                return
            index, text, finished, done = what
            answer = CompletionOutput(index, text, [1], finish_reason="stop" if finished else None)
            collector.put(RequestOutput("r", "p", [1], [answer], done))


class Total(ScriptedLLM):
    """Its front end can check token ids and compile guides, as the real one does."""

    def __init__(self):
        super().__init__(512)
        # ASCII in GPT-2's byte alphabet: a token per byte, as in the scripted `encode`.
        tokens = [*map(chr, range(256, 289)), *map(chr, range(33, 127)), chr(289)]
        tokenizer = self.front.tokenizer
        tokenizer.config = {}
        tokenizer.backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
        tokenizer.backend.decoder = decoders.ByteLevel()
        self.front._check_ids = lambda name, ids: LLMEngine._check_ids(self.front, name, ids)
        self.front.model_config = SimpleNamespace(vocab_size=128, eos_token_ids=(0,))

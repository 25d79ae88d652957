"""The API's real application on a real socket, before a model whose answers a test has written down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from engine.front_end import CompletionOutput, RequestOutput
from engine.serving.collector import RequestOutputCollector
from engine.serving.http_server import make_http_server
from engine.serving.openai.app import build_app
from engine.serving.sockets import bind
from support.scripted_api import Calling, ScriptedLLM, ScriptedTokenizer


class TellingTokenizer(ScriptedTokenizer):
    """A chat's text is all that a template is told, as JSON."""

    def render_chat(self, messages, add_generation_prompt=True, **variables):
        return json.dumps({"messages": messages, "tools": variables.get("tools") or []})


class Forced(ScriptedLLM):
    """Gives one answer after the other, in pieces of a few characters; when there is none left, the last one again.

    An answer may depend on what was asked: a function of (messages, tools).
    """

    def __init__(self, answers: Sequence[Any], size: int = 7) -> None:
        super().__init__(max_model_len=1 << 20, max_num_queued_reqs=64)
        self.front.tokenizer = TellingTokenizer()
        self.answers, self.size, self.asked = list(answers), size, []

    def add_request(self, request_id, prompt, params, *, stream=False, **about):
        self.added.append((request_id, {"prompt_token_ids": prompt["prompt_token_ids"][:1]}, params))
        text = prompt["prompt"]
        said = json.loads(text) if text.startswith("{") else {"messages": text, "tools": []}  # a chat, or a completion
        self.asked.append(said)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        text = answer if isinstance(answer, str) else answer(said["messages"], said["tools"])
        collector = RequestOutputCollector(request_id)
        asyncio.get_running_loop().create_task(self.write(collector, prompt, text, stream))
        return collector

    async def write(self, collector, prompt, text, stream):
        pieces = [text[i : i + self.size] for i in range(0, len(text), self.size)] if stream else [text]
        for i, piece in enumerate(pieces or [""]):
            await asyncio.sleep(0)
            while collector.output is not None and collector.request_id not in self.aborted:
                await asyncio.sleep(0.001)  # what was not taken would grow, and no client would see pieces
            reason = "stop" if i >= len(pieces) - 1 else None
            answer = CompletionOutput(0, piece, [ord(char) % 128 for char in piece], finish_reason=reason)
            ids = prompt["prompt_token_ids"]
            collector.put(RequestOutput(collector.request_id, prompt["prompt"], ids, [answer], reason is not None))


@contextlib.contextmanager
def scripted_server(answers: Sequence[Any], kind: type = Calling, keys: Sequence[str] = ()) -> Iterator[Any]:
    """(its URL, the engine behind it, which has what it was `asked`)."""
    llm, sock = Forced(answers), bind("127.0.0.1", 0)
    server = make_http_server(build_app(kind(llm, ["smol"]), keys), 2)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        while not server.started:
            threading.Event().wait(0.01)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", llm
    finally:
        server.should_exit = True
        thread.join(20)

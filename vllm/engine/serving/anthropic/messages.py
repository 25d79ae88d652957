"""The Messages API: the same engine, asked as Anthropic's clients ask.

Owns the form of an answer, a message with blocks in it, and the events by which it comes about; called by `app`, and
calls `serving` with the chat that says the same. A whole answer is never made in another way than by its own events.
vLLM: `vllm/entrypoints/anthropic/serving.py`.
"""

from __future__ import annotations

import common

import functools
import json
import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.serving.anthropic.protocol import CountTokensRequest, MessagesRequest, as_chat
from engine.serving.openai.errors import as_api_error
from engine.serving.openai.job import Usage
from engine.serving.openai.large_bodies import away

if TYPE_CHECKING:
    from engine.serving.openai.serving import OpenAIServing

NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config"}
EMPTY = {"thinking": {"thinking": ""}, "text": {"text": ""}, "tool_use": {"input": {}}}  # blocks that begin


class MessageWriter:
    """Makes a message out of what a chat's answer brings, and has an event for everything that happens to it."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.message, self.events = message, []
        self.block: dict[str, Any] | None = None  # the last one, while it grows
        self.arguments = ""  # of the call that grows
        self.calls_are_whole = False

    def say(self, kind: str, **about: Any) -> None:
        data = json.dumps({"type": kind, **about}, ensure_ascii=False, separators=(",", ":"))
        self.events.append(f"event: {kind}\ndata: {data}\n\n")

    def begin(self, usage: dict[str, Any]) -> None:
        self.message["usage"] = usage | {"output_tokens": 0}
        self.say("message_start", message=self.message)

    def write(self, delta: dict[str, Any]) -> None:
        """The news of a chat: `reasoning`, `content`, and `tool_calls` that begin or grow."""
        for name, kind, form in (("reasoning", "thinking", "thinking_delta"), ("content", "text", "text_delta")):
            if text := delta.get(name):
                block = self.open(kind)
                block[kind] += text
                self.grow({"type": form, kind: text})
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                self.close()
                self.open("tool_use", id=call["id"], name=function["name"])
                self.arguments = ""
            if function["arguments"]:
                self.arguments += function["arguments"]
                self.grow({"type": "input_json_delta", "partial_json": function["arguments"]})

    @property
    def index(self) -> int:
        return len(self.message["content"]) - 1

    def grow(self, delta: dict[str, Any]) -> None:
        self.say("content_block_delta", index=self.index, delta=delta)

    def open(self, kind: str, **about: Any) -> dict[str, Any]:
        """The block of this kind that grows; a new one, if something else grew last."""
        if self.block is None or self.block["type"] != kind:
            self.close()
            self.block = {"type": kind, **about, **EMPTY[kind]}
            self.message["content"].append(self.block)
            self.say("content_block_start", index=self.index, content_block=self.block)
        return self.block

    def close(self) -> None:
        """The last block is as it will stay."""
        if self.block is None:
            return
        if self.block["type"] == "thinking":
            self.block["signature"] = uuid.uuid4().hex  # clients send it back; nobody looks at it
            self.grow({"type": "signature_delta", "signature": self.block["signature"]})
        elif self.block["type"] == "tool_use":
            try:
                self.block["input"] = json.loads(self.arguments or "{}")
                self.calls_are_whole = True
            except (ValueError, RecursionError):  # cut off: what came is in the events
                self.calls_are_whole = False
        self.say("content_block_stop", index=self.index)
        self.block = None

    def finish(self, finish_reason: str | None, stop_reason: Any, usage: dict[str, Any]) -> None:
        """Both reasons are the chat's. A message is never without a block: clients look at the first one."""
        if not self.message["content"]:
            self.open("text")
        self.close()
        reason, sequence = self.ending(finish_reason, stop_reason)
        self.message |= {"stop_reason": reason, "stop_sequence": sequence, "usage": usage}
        self.say("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage)
        self.say("message_stop")

    def ending(self, finish_reason: str | None, stop_reason: Any) -> tuple[str | None, str | None]:
        """As in vLLM, a stop string does not end what is a call that can run; one that it has cut is not to run."""
        if finish_reason == "length":
            return "max_tokens", None
        if finish_reason not in ("stop", "tool_calls"):
            return None, None
        called = any(block["type"] == "tool_use" for block in self.message["content"])
        if isinstance(stop_reason, str) and not self.calls_are_whole:
            return "stop_sequence", stop_reason
        return ("tool_use" if called else "end_turn"), None

    def take(self) -> list[str]:
        """Events since the last call."""
        events, self.events = self.events, []
        return events


@dataclass
class MessageJob:
    """An answer on its way."""

    job: Any  # the chat's
    body: MessagesRequest
    writer: MessageWriter


def usage_of(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what was cached apart from what was read."""
    read = usage.prompt - usage.cached
    return {"input_tokens": read, "cache_read_input_tokens": usage.cached, "output_tokens": usage.completion}


class MessagesAPI:
    """Between chats and the routes."""

    def __init__(self, serving: OpenAIServing) -> None:
        self.serving = serving

    @functools.cached_property
    def system_first(self) -> bool:
        """Whether the model's template refuses a system's message in the midst of a chat."""
        turns = [{"role": role, "content": "x"} for role in ("system", "user", "system", "user")]
        try:
            self.serving.tokenizer.render_chat(turns)
        except common.InputError:
            return True
        return False

    # -- in --

    async def add(self, body: MessagesRequest, name: str | None = None, owner: str | None = None) -> MessageJob:
        """Check a request and hand it to the engine. Raises InputError or APIError, and nothing was added."""
        try:
            job = await self.serving.add(await away(body.is_large, as_chat, body, self.system_first), name, owner)
        except common.InputError as error:  # it speaks of the chat; the client wrote something else
            text = re.sub(r"^\w+", lambda first: NAMES.get(first[0], first[0]), str(error))
            raise common.InputError(text) from None
        message = {
            "id": "msg_" + job.request_id.removeprefix("chatcmpl-"),
            "type": "message",
            "role": "assistant",
            "model": job.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        return MessageJob(job, body, MessageWriter(message))

    async def count_tokens(self, body: CountTokensRequest) -> dict[str, Any]:
        """How long the prompt would be. Raises InputError or APIError."""
        self.serving.check_model(body.model)
        chat = await away(body.is_large, as_chat, body, self.system_first)
        text = await away(body.is_large, self.serving.render_chat, chat)
        count = len(await self.serving.encode(text, False, "messages"))
        return {"input_tokens": count, "context_management": {"original_input_tokens": count}}

    def forget(self, job: MessageJob) -> None:
        self.serving.forget(job.job)

    # -- out --

    async def written(self, job: MessageJob) -> AsyncIterator[None]:
        """Have the answer written as it comes; a turn for each piece."""
        chat, usage, finished = job.job, Usage(), False
        reasons: tuple[Any, Any] = None, None
        while not finished:
            output = await chat.collectors[0].get()
            finished = output.finished
            if not usage.prompt:
                usage.add_prompt(output)
                job.writer.begin(usage_of(usage))
            for piece in output.outputs:
                self.serving.check_answer(chat, 0, piece)
                usage.add_answer(chat.readers[0], [self.serving.token_bytes[t] for t in piece.token_ids])
                job.writer.write(chat.readers[0].read(piece.text, piece.finish_reason is not None))
                reasons = piece.finish_reason, piece.stop_reason
            if finished:
                job.writer.finish(*reasons, usage_of(usage))
            yield

    async def answer(self, job: MessageJob) -> dict[str, Any]:
        """The whole message at once."""
        try:
            async for _ in self.written(job):
                pass
        finally:
            self.forget(job)
        return job.writer.message

    async def stream(self, job: MessageJob) -> AsyncIterator[str]:
        """The message as it comes about."""
        try:
            async for _ in self.written(job):
                for event in job.writer.take():
                    yield event
        except Exception as error:  # the status line is long gone: the stream itself has to say it
            job.writer.say("error", error=as_api_error(error).for_anthropic()["error"])
            for event in job.writer.take():
                yield event

"""The Responses API: the same engine, asked in OpenAI's newer form.

Owns the conversations that are kept for `previous_response_id`; called by `app`, and calls `serving` with the chat that
says the same. An answer is an object with items in it, and a stream tells how that object comes about: here it is never
made in another way. vLLM: `vllm/entrypoints/openai/responses/serving.py`.
"""

from __future__ import annotations

import common

import json
import re
import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.serving.openai.errors import APIError, as_api_error
from engine.serving.openai.job import Usage
from engine.serving.openai.large_bodies import away
from engine.serving.openai.limits import LARGE_BYTES, MAX_ELEMENTS
from engine.serving.openai.responses_protocol import ITEM, NamedFunction, Reference, ResponsesRequest, as_chat
from engine.serving.openai.responses_tools import Called, as_text, by_name

if TYPE_CHECKING:
    from engine.serving.openai.serving import OpenAIServing


NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}  # a chat's, and ours
STORE_BYTES = 64 << 20  # of conversations that are kept; vLLM keeps none, unless it is told to keep all
ITEM_BYTES = 1 << 10  # of an item as an object, beside its text


class ResponseWriter:
    """Makes a response out of what a chat's answer brings, and has an event for everything that happens to it.

    `events` holds them as they are sent: an event is what was true when it happened, and items go on growing.
    """

    def __init__(self, response: dict[str, Any], tools: Sequence[Any] = ()) -> None:
        self.response, self.events, self.num_events = response, [], 0
        self.called = by_name(tools)
        self.given = ""  # to the tool that is being called
        self.item: dict[str, Any] | None = None  # the last one, while it grows

    def say(self, kind: str, **about: Any) -> None:
        event = {"type": kind, "sequence_number": self.num_events, **about}
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        self.events.append(f"event: {kind}\ndata: {data}\n\n")
        self.num_events += 1

    def begin(self) -> None:
        for kind in ("response.created", "response.in_progress"):
            self.say(kind, response=self.response)

    def write(self, delta: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> None:
        """The news of a chat: `reasoning`, `content`, and `tool_calls` that begin or grow."""
        if thought := delta.get("reasoning"):
            self.open_part("reasoning")["text"] += thought
            self.say("response.reasoning_text.delta", **self.place(), content_index=0, delta=thought)
        if text := delta.get("content"):
            part = self.open_part("message")
            part["text"] += text
            part["logprobs"] += logprobs
            self.say("response.output_text.delta", **self.place(), content_index=0, delta=text, logprobs=logprobs)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                self.open_call(call["id"], function["name"])
            if function["arguments"]:
                assert self.item is not None, "a call has begun"
                self.given += function["arguments"]
                if self.item["type"] == "function_call":  # else it is told with its end
                    self.item["arguments"] = self.given
                    self.say("response.function_call_arguments.delta", **self.place(), delta=function["arguments"])

    def place(self) -> dict[str, Any]:
        assert self.item is not None, "something is being said"
        return {"item_id": self.item["id"], "output_index": len(self.response["output"]) - 1}

    def open(self, item: dict[str, Any]) -> dict[str, Any]:
        """A new item of the output, which grows from here on; the one before is complete."""
        self.close("completed")
        self.item = item
        self.response["output"].append(item)
        self.say("response.output_item.added", output_index=len(self.response["output"]) - 1, item=item)
        return item

    def open_part(self, kind: str) -> dict[str, Any]:
        """The text of the message, or of the reasoning, that grows; of a new one, if something else grew last."""
        if self.item is None or self.item["type"] != kind:
            about: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            part = part if kind == "message" else {"type": "reasoning_text", "text": ""}
            name = f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}"
            self.item = self.open({"id": name, "type": kind, "status": "in_progress", **about, "content": []})
            self.item["content"].append(part)
            self.say("response.content_part.added", **self.place(), content_index=0, part=part)
        return self.item["content"][0]

    def open_call(self, call_id: str, name: str) -> None:
        """A call of a function, or of a tool that takes any text, under the name that the client knows."""
        about, self.given = self.called.get(name, Called(name)), ""
        item: dict[str, Any] = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress"}
        if about.takes_text:
            item |= {"id": f"ctc_{uuid.uuid4().hex}", "type": "custom_tool_call"}
        item |= {"call_id": call_id, "name": about.name}
        item |= {"namespace": about.namespace} if about.namespace else {}
        self.open(item | ({"input": ""} if about.takes_text else {"arguments": ""}))

    def close(self, status: str) -> None:
        """The last item is as it will stay."""
        if self.item is None:
            return
        self.item["status"] = status
        if self.item["type"] in ("message", "reasoning"):
            (part,), where = self.item["content"], {**self.place(), "content_index": 0}
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            self.say(f"response.{part['type']}.done", **where, **done)
            self.say("response.content_part.done", **where, part=part)
        elif self.item["type"] == "custom_tool_call":
            self.item["input"] = as_text(self.given)
            self.say("response.custom_tool_call_input.delta", **self.place(), delta=self.item["input"])
            self.say("response.custom_tool_call_input.done", **self.place(), input=self.item["input"])
        else:
            self.say(
                "response.function_call_arguments.done",
                **self.place(),
                name=self.item["name"],
                arguments=self.item["arguments"],
            )
        self.say("response.output_item.done", output_index=len(self.response["output"]) - 1, item=self.item)

    def finish(self, reason: str | None, usage: dict[str, Any]) -> None:
        """`reason` is the chat's. As in vLLM 0.32 the last event is response.completed, even for what was cut
        short (OpenAI and 0.33 then say response.incomplete): some clients wait for nothing else; the status tells."""
        status = {"length": "incomplete", "abort": "cancelled"}.get(reason or "", "completed")
        if not self.response["output"]:
            self.open_part("message")  # the model said nothing; that is a message, too
        self.close("completed" if status == "completed" else "incomplete")
        self.response |= {"status": status, "usage": usage, "completed_at": int(time.time())}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.say("response.completed", response=self.response)

    def fail(self, error: APIError) -> None:
        """In both of OpenAI's forms: some clients know only one of them."""
        self.say("error", code=str(error.status), message=str(error), param=error.param)
        told = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": str(error)}
        self.response |= {"status": "failed", "error": told}
        self.say("response.failed", response=self.response)

    def take(self) -> list[str]:
        """Events since the last call."""
        events, self.events = self.events, []
        return events


@dataclass
class ResponseJob:
    """An answer on its way."""

    job: Any  # the chat's
    body: ResponsesRequest
    items: list[Any]  # the conversation so far
    size: int  # its bytes
    writer: ResponseWriter
    kept: Kept  # where it will go


@dataclass
class Stored:
    """A finished answer, kept for `previous_response_id`; `size` in bytes."""

    response: dict[str, Any]
    items: list[Any]  # of the conversation, this answer included
    size: int


class Kept:
    """The conversations of one key: others neither find nor displace them. `most` is their room in bytes."""

    def __init__(self, most: int) -> None:
        self.responses: OrderedDict[str, Stored] = OrderedDict()
        self.items: dict[str, Any] = {}  # of their answers, by id
        self.most, self.size = most, 0

    def find(self, response_id: str, param: str | None = None) -> Stored:
        """A kept answer; APIError 404 if there is none."""
        if response_id not in self.responses:
            raise APIError(404, f"Response with id {response_id!r} not found: never kept, or too long ago", param)
        return self.responses[response_id]

    def find_item(self, item_id: str) -> Any:
        """The item of a kept answer; APIError 404 if there is none."""
        if item_id not in self.items:
            raise APIError(404, f"Item with id {item_id!r} not found: never kept, or too long ago", "input")
        return self.items[item_id]

    def add(self, stored: Stored) -> None:
        """For requests that will follow this one. What is oldest goes when there is too much."""
        said = stored.response["output"]
        self.items |= zip((item["id"] for item in said), stored.items[len(stored.items) - len(said) :])
        self.responses[stored.response["id"]] = stored
        self.size += stored.size
        while self.size > self.most:
            self.remove(next(iter(self.responses)))

    def remove(self, response_id: str) -> None:
        """Forget an answer and its items. Raises APIError."""
        stored = self.find(response_id)
        for item in stored.response["output"]:
            del self.items[item["id"]]
        del self.responses[response_id]
        self.size -= stored.size


class ResponsesAPI:
    """Between chats and the routes; `num_owners` keys share the store."""

    def __init__(self, serving: OpenAIServing, num_owners: int = 1) -> None:
        self.serving = serving
        self.kept: defaultdict[str | None, Kept] = defaultdict(lambda: Kept(STORE_BYTES // num_owners))  # by owner

    # -- in --

    def conversation(self, body: ResponsesRequest, kept: Kept) -> list[Any]:
        """What was said, with what the request refers to in its place. Raises APIError."""
        items = []
        if body.previous_response_id is not None:
            items += kept.find(body.previous_response_id, "previous_response_id").items
        for item in body.input:
            items.append(kept.find_item(item.id) if isinstance(item, Reference) else item)
        if len(items) > MAX_ELEMENTS:
            raise common.InputError(f"input: the conversation has more than {MAX_ELEMENTS:,} items")
        return items

    async def add(self, body: ResponsesRequest, name: str | None = None, owner: str | None = None) -> ResponseJob:
        """Check a request and hand it to the engine. Raises InputError or APIError, and nothing was added.

        What is kept has a name that nobody can guess or choose: the client's `name` is not part of it.
        """
        kept = self.kept[owner]
        items = self.conversation(body, kept)
        before = body.previous_response_id
        size = body._num_bytes + ITEM_BYTES * len(items) + (kept.find(before).size if before else 0)
        large = size > LARGE_BYTES
        try:
            job = await self.serving.add(await away(large, as_chat, body, items), owner=owner)
        except common.InputError as error:  # it speaks of the chat; the client wrote something else
            text = re.sub(r"^\w+", lambda first: NAMES.get(first[0], first[0]), str(error))
            raise common.InputError(text) from None
        response = await away(large, self.empty, f"resp_{uuid.uuid4().hex}", job, body)
        return ResponseJob(job, body, items, size, ResponseWriter(response, body.tools or ()), kept)

    def empty(self, response_id: str, job: Any, body: ResponsesRequest) -> dict[str, Any]:
        """The response before its first token: what was asked for."""
        chosen = body.tool_choice or "auto"
        return {
            "id": response_id,
            "object": "response",
            "created_at": job.created,
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": job.model,
            "output": [],
            "frequency_penalty": job.params.frequency_penalty,
            "presence_penalty": job.params.presence_penalty,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "prompt": None,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": job.params.temperature,
            "text": {"format": {"type": "text"}}
            if body.text is None or body.text.format is None
            else body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": chosen.model_dump() if isinstance(chosen, NamedFunction) else chosen,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": job.params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }

    def forget(self, job: ResponseJob) -> None:
        self.serving.forget(job.job)

    # -- out --

    async def written(self, job: ResponseJob) -> AsyncIterator[None]:
        """Have the answer written as it comes; a turn for each piece."""
        chat, writer, finished = job.job, job.writer, False
        counted = Usage(reasoning=0)
        reason: str | None = None
        await away(job.body.is_large, writer.begin)  # it repeats what was asked
        pending: list[dict[str, Any]] = []  # of tokens whose text is held back
        while not finished:
            output = await chat.collectors[0].get()
            finished = output.finished
            for piece in output.outputs:
                self.serving.check_answer(chat, 0, piece)
                counted.add_answer(chat.readers[0], [self.serving.token_bytes[t] for t in piece.token_ids])
                pending += (self.serving.logprobs(chat, 0, piece) or {"content": []})["content"]
                delta = chat.readers[0].read(piece.text, piece.finish_reason is not None)
                writer.write(delta, pending)
                reason = piece.finish_reason
                pending = [] if delta.get("content") else pending
            if finished:
                counted.add_prompt(output)
                usage = {
                    "input_tokens": counted.prompt,
                    "input_tokens_details": {"cached_tokens": counted.cached, "cache_write_tokens": 0},
                    "output_tokens": counted.completion,
                    "output_tokens_details": {"reasoning_tokens": counted.reasoning},
                    "total_tokens": counted.prompt + counted.completion,
                }
                await away(job.body.is_large, writer.finish, reason, usage)
                self.keep(job)
            yield

    async def answer(self, job: ResponseJob) -> dict[str, Any]:
        """The whole response at once."""
        try:
            async for _ in self.written(job):
                pass
        finally:
            self.forget(job)
        return job.writer.response

    async def stream(self, job: ResponseJob) -> AsyncIterator[str]:
        """The response as it comes about."""
        try:
            async for _ in self.written(job):
                for event in job.writer.take():
                    yield event
        except Exception as error:  # the status line is long gone: the stream itself has to say it
            job.writer.fail(as_api_error(error))
            for event in job.writer.take():
                yield event

    # -- kept --

    def keep(self, job: ResponseJob) -> None:
        """For requests that will follow this one."""
        response = job.writer.response
        if job.body.store is False:
            return
        said = [ITEM.validate_python(item) for item in response["output"]]
        size = job.size + sum(ITEM_BYTES + len(item.model_dump_json()) for item in said)
        job.kept.add(Stored(response, [*job.items, *said], size))

    def retrieve(self, response_id: str, owner: str | None = None, stream: bool = False) -> Stored:
        """A kept response. Raises APIError: a client that wants events would read an object as none at all."""
        found = self.kept[owner].find(response_id)
        if stream:
            raise APIError(400, "stream: events are sent once and not kept; without it, the whole is here", "stream")
        return found

    def cancel(self, response_id: str, owner: str | None = None) -> None:
        """Raises APIError: what is kept has ended. (A response that runs is ended by hanging up.)"""
        self.kept[owner].find(response_id)
        raise APIError(400, "response_id: this one has ended, and none runs in the background", "response_id")

    def delete(self, response_id: str, owner: str | None = None) -> dict[str, Any]:
        """Forget a kept response. Raises APIError."""
        self.kept[owner].remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

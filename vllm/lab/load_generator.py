"""The client: streamed requests to an OpenAI-compatible server, each sent when it is due.

Owns the clock of a run; called by `bench`, by lesson 06 and by the tour 06d, whose scripted server checks it. It never
decides what is sent or when, which is `workload`'s, and never lets a failure count as speed.
vLLM: `vllm/benchmarks/lib/endpoint_request_func.py`.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from lab.records import Record
from lab.workload import Prompt

JSON_BODY = {"Content-Type": "application/json"}


class SSEDecoder:
    """Bytes, cut wherever the network likes, to the data of server-sent events (WHATWG HTML, 9.2.6).

    Lines end at \\n, \\r\\n or \\r and nowhere else. Python's `splitlines`, and with it httpx's `aiter_lines`, also
    cuts at U+2028 and U+0085, which are legal inside a JSON string and which models do write.
    """

    def __init__(self) -> None:
        self.utf8 = codecs.getincrementaldecoder("utf-8")()
        self.rest = ""  # an incomplete line
        self.data: list[str] = []  # of the event that is being received

    def feed(self, chunk: bytes) -> list[str]:
        """The events that `chunk` completes: their data lines; a rest waits for the next chunk."""
        self.rest += self.utf8.decode(chunk)
        *lines, self.rest = re.split(r"\r\n|\n|\r(?=[^\n])", self.rest)
        events = []
        for line in lines:
            if line.startswith("data:"):
                self.data.append(line.removeprefix("data:").removeprefix(" "))
            elif not line and self.data:
                events.append("\n".join(self.data))
                self.data = []
        return events


class BadAnswer(Exception):
    """An answer that must not count: (a short name, what was seen)."""


async def read_stream(chunks: AsyncIterator[bytes], record: Record, clock: Callable[[], float]) -> None:
    """Fill `record` from a streamed completion or chat completion, as it comes. Raises BadAnswer."""
    decoder, ended, num_chunks = SSEDecoder(), False, 0
    try:
        async for data in chunks:
            now = clock()
            for event in decoder.feed(data):
                if event == "[DONE]":
                    ended = True
                    continue
                message = json.loads(event)
                if message.get("error"):  # the status was 200 long before things went wrong
                    raise BadAnswer("error event", str(message["error"])[:200])
                for choice in message.get("choices") or ():
                    num_chunks += _read_choice(choice, record, now)
                if usage := message.get("usage"):
                    record.output_tokens, record.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # no UTF-8, no JSON, or another shape
        raise BadAnswer("malformed", repr(error)[:200]) from None
    if not ended:
        raise BadAnswer("truncated", f"{num_chunks} chunks and no [DONE]")
    if not record.times:
        raise BadAnswer("no tokens", "the stream ended without text")
    if not record.output_tokens:  # a server that does not report usage: the best guess is a token a chunk
        record.output_tokens = num_chunks


def _read_choice(choice: dict[str, Any], record: Record, now: float) -> int:
    """1 if the chunk brought a token. A chat's opening chunk (a role, no text) did not, nor did an empty goodbye."""
    delta, finish = choice.get("delta"), choice.get("finish_reason")
    spoken = ("content", "reasoning", "reasoning_content")  # a thought is text, too, by vLLM's name or its older one
    text = choice["text"] if delta is None else next(filter(None, map(delta.get, spoken)), None)
    record.text += text or ""
    if text or (finish is None and delta is None) or (finish and not record.times):
        record.times.append(now)
        return 1
    return 0


@dataclass
class Target:
    """Where requests go. `chat` chooses the API; `extra` is added to each body."""

    base_url: str
    model: str
    chat: bool = False
    timeout: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)

    def request(self, prompt: Prompt) -> tuple[str, bytes]:
        """URL and body."""
        path, asked = "/v1/completions", {"prompt": prompt.content, "max_tokens": prompt.output_len}
        if self.chat:
            messages = [{"role": "user", "content": prompt.content}]
            path, asked = "/v1/chat/completions", {"messages": messages, "max_completion_tokens": prompt.output_len}
        asked |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        return self.base_url + path, json.dumps(asked | self.extra).encode()


async def send(
    client: httpx.AsyncClient, target: Target, prompt: Prompt, record: Record, clock: Callable[[], float]
) -> None:
    """One request, whatever happens to it: `record` says how it went, and nothing is raised."""
    url, body = target.request(prompt)  # before the clock starts: encoding 10,000 token ids takes a millisecond
    record.prompt_tokens = prompt.input_len
    record.start = clock()
    try:
        async with asyncio.timeout(target.timeout):
            async with client.stream("POST", url, content=body, headers=JSON_BODY) as response:
                if response.status_code != 200:
                    raise BadAnswer(f"http {response.status_code}", str(await response.aread())[:200])
                await read_stream(response.aiter_bytes(), record, clock)
    except TimeoutError:
        record.error, record.detail = "timeout", f"no end after {target.timeout:g} s"
    except BadAnswer as bad:
        record.error, record.detail = bad.args
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:  # after text has come, that is an answer cut short
        record.error, record.detail = ("truncated" if record.times else "connection"), repr(error)[:200]
    record.end = clock()


async def drive(
    client: httpx.AsyncClient,
    target: Target,
    prompts: Sequence[Prompt],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Send each prompt when it is due. An open loop, unless `max_concurrency` closes it.

    A request that finds no seat waits in the client, in order; `scheduled` remembers when it was due."""
    seats = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    origin, tasks = (loop := asyncio.get_running_loop()).time(), []

    def clock() -> float:
        return loop.time() - origin

    async def one(prompt: Prompt, record: Record) -> Record:
        async with seats:
            await send(client, target, prompt, record, clock)
        advance()
        return record

    for prompt, due in zip(prompts, arrivals):
        await asyncio.sleep(max(0.0, due - clock()))
        tasks.append(asyncio.create_task(one(prompt, Record(due))))
    return await asyncio.gather(*tasks)

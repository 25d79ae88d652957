"""06f · The OpenAI API: JSON in, events out, and nothing in between that anybody can break.

The question: thousands of programs speak one HTTP dialect. What must a server understand so that they work unchanged,
and what must it answer to all that is wrong, too large, too much, or suddenly no longer wanted?

The mechanism:
  1. A gate in front: the key, and the size of the body. Nothing behind it sees more than 4 MiB.
  2. Fields are types: `max_tokens: "5"` is an error that names the field. With --strict-fields, so is an unknown field.
  3. Then meaning: ranges, one constraint and not two, a prompt that can fit. All of it before the engine hears a word.
  4. Then room: as many sequences as the bound allows, else 503 and Retry-After.
  5. A prompt becomes a request to 06e's `AsyncLLM`, and a mailbox. Several prompts are several mailboxes.
  6. A streamed answer is server-sent events: `data: {…}`, a blank line, `data: [DONE]`. Half a character sends nothing.
  7. A client that hangs up, streaming or not, cancels a task; a task's end, however it came, aborts the request.
  8. Every error has one shape. After the status line is sent, the stream itself carries it.

Numbers to remember: a token of five letters travels in 250 bytes; eight kinds of refusal cost the engine nothing.

How to run:
  uv run python -m vllm.tours.06f_openai_api                      the whole story, against an app in this process
  uv run python -m vllm.tours.06f_openai_api --max-num-queued-reqs 1  break it: the second client is turned away
  uv run python -m vllm.tours.06f_openai_api --no-abort           break it: nobody tells the engine that the client left
  uv run python -m vllm.tours.06f_openai_api --bench              what validation and events cost, measured longer

Read for this: OpenAI's API reference; vLLM 0.32 `entrypoints/openai/` and `entrypoints/serve/exception_handling/`; the
HTML standard on server-sent events; RFC 9110 on status codes; the ASGI specification.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import asyncio
import codecs
import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine import arguments
from engine.front_end import CompletionOutput, RequestOutput
from engine.model import folders, loader
from engine.request import SamplingParams
from engine.sampling.defaults import SamplingDefaults
from engine.serving.admission import AdmissionControl
from engine.serving.async_llm import AsyncLLM
from engine.serving.collector import RequestOutputCollector
from engine.serving.openai.events import event
from engine.serving.openai.job import Job
from engine.serving.openai.limits import MAX_N
from engine.serving.openai.protocol import ChatCompletionRequest
from engine.serving.openai.serving import OpenAIServing
from lab import cli, timing
from lab.small_engine import MAX_MODEL_LEN, make_small_engine

KEY = "06f_openai_api"


# --- What we want, without cleverness ---------------------------------------------------------------------------------


def read_events(body: str) -> list[Any]:
    """A whole stream, read when it is over: what a client must have understood in the end."""
    blocks = [block.removeprefix("data: ") for block in body.split("\n\n") if block]
    return [block if block == "[DONE]" else json.loads(block) for block in blocks]


def text_of(events: Sequence[Any], index: int = 0) -> str:
    """The text of one answer in a stream."""
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]
    pieces = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices if c["index"] == index]
    return "".join(pieces)


# --- A client without a network, and a server without an engine -------------------------------------------------------


@dataclass
class Heard:
    """What came back from an app: status, headers, and the pieces of the body as they were sent."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    pieces: list[bytes] = dataclasses.field(default_factory=list)
    body_read: bool = False  # has the app asked for any of the request's body?

    @property
    def text(self) -> str:
        return b"".join(self.pieces).decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)


async def call(
    app: Any,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    method: str = "POST",
    hang_up_after: int | None = None,
) -> Heard:
    """One request to an ASGI app. `body` is JSON, bytes, or a list of bytes that arrive one after the other.

    With `hang_up_after=k` the client is gone once it has had k pieces of the answer.
    """
    parts = (
        body
        if isinstance(body, list) and all(isinstance(x, bytes) for x in body)
        else [body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()]
    )
    mail = [{"type": "http.request", "body": x, "more_body": i < len(parts) - 1} for i, x in enumerate(parts)]
    heard, gone = Heard(), asyncio.Event()
    if hang_up_after == 0:
        gone.set()
    sent = [(k.encode(), v.encode()) for k, v in {"content-type": "application/json", **(headers or {})}.items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": sent, "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
             "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": ""}  # fmt: skip

    async def receive() -> dict[str, Any]:
        heard.body_read = True
        if mail:
            return mail.pop(0)
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            heard.status = message["status"]
            heard.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message.get("body"):
            heard.pieces.append(message["body"])
            if len(heard.pieces) == hang_up_after:
                gone.set()

    await app(scope, receive, send)
    return heard


class ScriptedTokenizer:
    """One token per character. For the widget and for tests: the checks in front of the engine need no model."""

    chat_template = "{{ messages }}"
    backend = argparse.Namespace(get_vocab=lambda: {chr(i): i for i in range(128)})

    def encode(self, text: str, add_special_tokens: bool = True, max_length: int | None = None) -> list[int]:
        return [min(ord(char), 127) for char in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def render_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        return "".join(message["content"] for message in messages)


class ScriptedLLM:
    """Stands where `AsyncLLM` does, with 06e's real admission control, and answers at once with the same few words."""

    ANSWER = ("Par", "is", ".")
    sampling_defaults = SamplingDefaults()

    def __init__(self, max_model_len: int = 64, max_num_queued_reqs: int | None = 4, num_unfinished: int = 0) -> None:
        tokenizer = ScriptedTokenizer()
        self.front = argparse.Namespace(tokenizer=tokenizer, token_bytes={i: bytes([i]) for i in range(128)})
        self.ready = argparse.Namespace(max_model_len=max_model_len, policy="fcfs", pid=0)
        self.admission = AdmissionControl(max_num_queued_reqs)
        self.num_unfinished, self.dead, self.stat_logger = num_unfinished, None, None
        self.added: list[tuple[str, dict, SamplingParams]] = []
        self.aborted: list[str] = []

    def add_request(
        self, request_id: str, prompt: dict[str, Any], params: SamplingParams, *, stream: bool = False, **about: Any
    ) -> RequestOutputCollector:
        """Notes that it was asked, and has the whole answer ready at once."""
        self.added.append((request_id, prompt, params))
        collector = RequestOutputCollector(request_id)
        for i, text in enumerate(self.ANSWER):
            done = i == len(self.ANSWER) - 1
            answer = CompletionOutput(0, text, [i], finish_reason="stop" if done else None)
            collector.put(RequestOutput(request_id, prompt["prompt"], prompt["prompt_token_ids"], [answer], done))
        return collector

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids


def with_routes(serving: OpenAIServing, api_keys: Sequence[str] = ()) -> Any:
    """The app around it, with --strict-fields. FastAPI is loaded here and not before: others load this script for
    less."""
    from engine.serving.openai.app import build_app

    return build_app(serving, api_keys, strict_fields=True)


def app_of(llm: Any) -> Any:
    """The real app before an engine, scripted or not."""
    return with_routes(OpenAIServing(llm, ["smol"]))


# --- The story --------------------------------------------------------------------------------------------------------

WRONG = {
    "half a body": b'{"prompt": "Hel', "temperature 9": {"prompt": "Hello", "temperature": 9},
    'max_tokens "5"': {"prompt": "Hello", "max_tokens": "5"}, "temprature 1": {"prompt": "Hello", "temprature": 1},
    "model gpt-9": {"prompt": "Hello", "model": "gpt-9"}, "an empty prompt": {"prompt": ""},
    "100,000 words": {"prompt": "word " * 100_000}, "a token that is none": {"prompt": [7, 10**9]},
}  # fmt: skip


class ForgetfulServing(OpenAIServing):
    """The mistake of every first server: nobody tells the engine that the client left."""

    def forget(self, job: Job) -> None: ...


async def incremental_text(pieces: Iterable[bytes]) -> str:
    """What a client reads from a stream that the network has cut anywhere: bytes, then characters, then events."""
    utf8, buffer, text = codecs.getincrementaldecoder("utf-8")(), "", ""
    for piece in pieces:
        buffer += utf8.decode(piece)
        while "\n\n" in buffer:
            block, buffer = buffer.split("\n\n", 1)
            text += text_of(read_events(block + "\n\n"))
    return text


async def started(args: argparse.Namespace) -> AsyncLLM:
    """The small engine, in a thread."""
    about, folder = {"model": args.model, "seed": args.seed}, folders.model_folder(args.model)
    bound = args.max_num_queued_reqs
    return await AsyncLLM.start(make_small_engine, about, folder, "thread", max_num_queued_reqs=bound)


async def refusals(app: Any, repeat: int) -> tuple[dict[str, Heard], dict[str, float]]:
    """What the app answers to everything that is WRONG, and the microseconds that it takes."""
    answers, us = {}, {}
    for name, body in WRONG.items():
        start = time.perf_counter()
        for _ in range(repeat):
            answers[name] = await call(app, "/v1/completions", body)
        us[name] = (time.perf_counter() - start) / repeat * 1e6
    return answers, us


async def tell_story(args: argparse.Namespace) -> None:
    """Steps 1 to 3, on an engine in a thread."""
    llm = await started(args)
    try:
        kind = ForgetfulServing if args.no_abort else OpenAIServing
        await _tell_story(args, with_routes(kind(llm, ["smol"])), llm)
    finally:
        await llm.shutdown()


async def _tell_story(args: argparse.Namespace, app: Any, llm: AsyncLLM) -> None:
    common.heading("1. What is refused before the engine hears of it")
    answers, _ = await refusals(app, repeat=1)
    rows = []
    for name, heard in answers.items():
        if name == "an empty prompt" and heard.status == 200:
            rows.append([name, 200, "", "an answer: this tokenizer begins every text with a token"])
            continue
        error, message = heard.json["error"], heard.json["error"]["message"]
        rows.append([name, heard.status, error["param"] or "", message[:57] + "…" * (len(message) > 57)])
    common.table(["request", "status", "param", "message"], rows)
    common.check_equal("the engine has heard of nothing", llm.num_unfinished, 0)

    common.heading("2. An answer on the wire")
    ask = {"prompt": "The weather in Zürich is", "max_tokens": 8, "temperature": 0}
    whole = (await call(app, "/v1/completions", ask)).json["choices"][0]["text"]
    streamed = await call(app, "/v1/completions", ask | {"stream": True})
    for piece in streamed.pieces[:2]:
        common.say(f"data: {{… [{piece.decode().partition('[')[2][:84]} …")
    common.say(f"… {len(streamed.pieces)} pieces, {sum(map(len, streamed.pieces)):,} bytes for {len(whole)} characters")
    common.check_equal("the stream's text is the whole answer's", text_of(read_events(streamed.text)), whole)
    raw = streamed.text.encode()
    for size in (1, 7, 1000):
        cut = [raw[i : i + size] for i in range(0, len(raw), size)]
        if await incremental_text(cut) != whole:
            raise common.CheckFailed(f"cut into pieces of {size} bytes, the stream reads differently")
    common.say("✓ cut by the network into pieces of 1, 7 or 1,000 bytes, it reads the same")

    common.heading("3. A client that leaves, and one that comes too late")
    long = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True,
            "skip_special_tokens": False}  # fmt: skip
    start = time.perf_counter()
    await call(app, "/v1/completions", long, hang_up_after=2)
    common.check_equal(
        f"hung up after 2 of 400 tokens ({(time.perf_counter() - start) * 1e3:.0f} ms): nobody inside",
        llm.num_unfinished,
        0,
    )
    running = asyncio.create_task(call(app, "/v1/completions", long | {"max_tokens": 16}))
    while not (llm.num_unfinished or running.done()):
        await asyncio.sleep(0.001)
    second = await call(app, "/v1/completions", ask | {"n": args.max_num_queued_reqs, "temperature": 1})
    common.say(
        f"{llm.num_unfinished} inside, bound {args.max_num_queued_reqs}; {args.max_num_queued_reqs} more: "
        f"{second.status}, Retry-After {second.headers.get('retry-after')}"
    )
    common.check_equal("the one inside is served to its end", (await running).text.endswith("data: [DONE]\n\n"), True)
    idle = await llm.call_utility("check_idle")
    common.check_equal("no KV block is owned, no request is left", (idle["owned_blocks"], idle["unfinished"]), (0, 0))


CHAT = {"model": "smol",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
        "stream": True, "temperature": 0.7, "max_completion_tokens": 64}  # fmt: skip
CHAT_BYTES, WORD = json.dumps(CHAT).encode(), CompletionOutput(0, " word", [1])


def an_event() -> str:
    """What a client is sent for one token of five letters."""
    scripted: Any = ScriptedLLM()  # it has what the API asks of an AsyncLLM
    serving = OpenAIServing(scripted, ["smol"])
    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "stream": True})
    job = Job("chatcmpl-" + 32 * "0", "SmolLM2-135M-Instruct", request, SamplingParams(), [], 1_700_000_000)
    return event(serving.envelope(job, [serving.choice(job, 0, WORD)]))


def measure_costs(seconds: float) -> dict[str, float]:
    """Microseconds of what the event loop does for a request and for a token."""
    scripted: Any = ScriptedLLM()
    serving = OpenAIServing(scripted, ["smol"])
    job = Job("chatcmpl-" + 32 * "0", "smol", ChatCompletionRequest(**CHAT), SamplingParams(), [])
    read = ChatCompletionRequest.model_validate

    def validate() -> Any:
        return serving.check_params(read(json.loads(CHAT_BYTES)))

    def write() -> Any:
        return event(serving.envelope(job, [serving.choice(job, 0, WORD)]))

    return {
        "validate_us": timing.measure(validate, seconds).median * 1e6,
        "event_us": timing.measure(write, seconds).median * 1e6,
    }


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument(
        "--max-num-queued-reqs",
        type=arguments.number(int, 1, MAX_N),
        default=2,
        metavar="N",
        help="the queue bound of step 3 (default %(default)s)",
    )
    p.add_argument("--no-abort", action="store_true", help="the bug: a client that leaves is not forgotten")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    loader.check_context(args.model, MAX_MODEL_LEN)
    asyncio.run(tell_story(args))
    common.heading("4. What it costs")
    found = measure_costs(0.1)
    common.say(
        f"{found['validate_us']:.0f} µs to validate a chat request of {len(CHAT_BYTES)} bytes, "
        f"{found['event_us']:.1f} µs to write an event"
    )
    common.say(f"an event for one token of five letters has {len(an_event())} bytes")
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

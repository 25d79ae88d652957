"""06f · The OpenAI API: JSON in, events out, and nothing in between that anybody can break.

The question: thousands of programs speak one HTTP dialect. What must a server understand so that they work unchanged,
and what must it answer to all that is wrong, too large, too much, or suddenly no longer wanted?

The mechanism:
  1. A gate in front: the key, and the size of the body. Nothing behind it sees more than 4 MiB.
  2. Fields are types: `max_tokens: "5"` is an error that names the field. So is a field that nobody knows.
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
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama
from engine.front_end import CompletionOutput
from engine.front_end import RequestOutput
from engine.sampling.defaults import SamplingDefaults
from engine.request import SamplingParams
from engine.serving.admission import AdmissionControl
from engine.serving.async_llm import AsyncLLM
from engine.serving.collector import RequestOutputCollector
from engine.serving.openai.events import event
from engine.serving.openai.job import Job
from engine.serving.openai.limits import MAX_BODY_BYTES, MAX_N, MAX_STOP_STRINGS
from engine.serving.openai.protocol import ChatCompletionRequest, CompletionRequest
from engine.serving.openai.serving import OpenAIServing
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


async def call(app: Any, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = "POST",
               hang_up_after: int | None = None) -> Heard:  # fmt: skip
    """One request to an ASGI app. `body` is JSON, bytes, or a list of bytes that arrive one after the other.

    With `hang_up_after=k` the client is gone once it has had k pieces of the answer.
    """
    parts = body if isinstance(body, list) and all(isinstance(x, bytes) for x in body) else [
        body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()]  # fmt: skip
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

    def render_chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True,
                    **variables: Any) -> str:  # fmt: skip
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

    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams, *, stream: bool = False,
                    **about: Any) -> RequestOutputCollector:  # fmt: skip
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
    """The app around it. FastAPI is loaded here and not before: others load this script for less."""
    from engine.serving.openai.app import build_app

    return build_app(serving, api_keys)


def app_of(llm: Any) -> Any:
    """The real app before an engine, scripted or not."""
    return with_routes(OpenAIServing(llm, ["smol"]))


# --- The simulation behind the widget ---------------------------------------------------------------------------------

FIELDS: dict[str, dict[str, Any]] = {
    "nothing unusual": {}, "temperature 9": {"temperature": 9}, "n 0": {"n": 0}, 'max_tokens "5"': {"max_tokens": "5"},
    "max_tokens 65": {"max_tokens": 65}, "an unknown field": {"temprature": 1}, "model gpt-9": {"model": "gpt-9"},
    "a suffix": {"suffix": "x"}, "json_object and a regex": {"response_format": {"type": "json_object"},
                                                             "structured_outputs": {"regex": "a"}},
    "half a body": {},
}  # fmt: skip
PROMPTS = {"5 characters": "Hello", "empty": "", "64 characters": "x" * 64, "5 MB": "x" * 5_000_000}
CHOICES = {"key": ["right", "wrong"], "field": list(FIELDS), "prompt": list(PROMPTS), "inside": [0, 3, 4]}
CORRECT = {"key": "right", "field": "nothing unusual", "prompt": "5 characters", "inside": 0}
WIDGET_DEFAULT = {"key": "right", "field": "temperature 9", "prompt": "64 characters", "inside": 4}


def simulate(params: dict) -> dict:
    """One request to the real app (context 64, at most 4 inside), then again, mistake by mistake. Raises InputError."""
    return asyncio.run(_correct(common.checked(params, CHOICES)))


async def _correct(case: dict) -> dict:
    server = ScriptedServer()
    first = last = await server.ask(case)
    first["then"] = []
    for _ in CORRECT:
        if last["status"] != 200:
            blamed = "prompt" if last["param"] == "prompt" else "field"
            blamed = {401: "key", 413: "prompt", 503: "inside"}.get(last["status"], blamed)
            case = case | {blamed: CORRECT[blamed]}
            last = {"corrected": blamed, **await server.ask(case)}
            first["then"].append(last)
    return first


async def _ask(cases: Sequence[dict]) -> list[dict]:
    server = ScriptedServer()
    return [await server.ask(case) for case in cases]


class ScriptedServer:
    """The real app before a scripted engine; each station signs when it gets to look at a request."""

    def __init__(self) -> None:
        self.llm, self.signed = ScriptedLLM(), []
        serving = OpenAIServing(self.llm, ["smol"])
        self.app = with_routes(serving, ["right"])
        doors = ((self.app.app, "app", "JSON"), (serving, "add", "model"), (serving, "check_params", "values"),
                 (serving, "prompts", "length"), (self.llm.admission, "check", "room"),
                 (self.llm, "add_request", "engine"))  # fmt: skip
        for owner, name, station in doors:
            setattr(owner, name, self.signing(getattr(owner, name), station))

    def signing(self, function: Callable[..., Any], station: str) -> Callable[..., Any]:
        """`function`, which notes its station when a request gets so far."""

        def signed(*args: Any, **kwargs: Any) -> Any:
            self.signed.append(station)
            return function(*args, **kwargs)

        return signed

    async def ask(self, case: dict) -> dict:
        """One request through the app itself; what was answered, and who looked at it on the way."""
        llm = self.llm
        llm.num_unfinished, llm.added, llm.aborted = case["inside"], [], []
        self.signed.clear()
        body = json.dumps({"prompt": PROMPTS[case["prompt"]]} | FIELDS[case["field"]]).encode()
        if case["field"] == "half a body":
            body = body[: len(body) // 2]
        heard = await call(self.app, "/v1/completions", body, {"authorization": f"Bearer {case['key']}"})
        error = heard.json.get("error", {})
        message = error.get("message")
        if "JSON" in self.signed and "not JSON" not in (message or ""):  # the app says which of the two it was
            self.signed.insert(1, "fields")
        return {
            "status": heard.status, "type": error.get("type"), "param": error.get("param"),
            "message": message, "retry_after": heard.headers.get("retry-after"),
            "answer": None if error else heard.json["choices"][0]["text"], "sent_bytes": len(body),
            "engine_heard": len(llm.added), "looked": ["key", *["size"] * heard.body_read, *self.signed],
            "key": case["key"], "body": re.sub("x{8,}", "xx…xx", body.decode()), "inside": case["inside"],
        }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    first = f"HTTP {trace['status']} {trace['type'] or 'OK'}" + (f", param {trace['param']}" if trace["param"] else "")
    lines = [f"{trace['sent_bytes']:,} bytes sent", first]
    lines += [f"Retry-After: {trace['retry_after']}"] if trace["retry_after"] else []
    lines += [trace["message"] or f"answer: {trace['answer']}",
              f"requests that the engine heard of: {trace['engine_heard']}"]  # fmt: skip
    for again in trace["then"]:
        about = f", param {again['param']}" if again["param"] else ""
        lines.append(f"{again['corrected']} corrected: HTTP {again['status']} {again['type'] or 'OK'}{about}")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    cases = [{"key": key, "field": field, "prompt": prompt, "inside": inside} for key in CHOICES["key"]
             for field in FIELDS for prompt in CHOICES["prompt"][:3] for inside in CHOICES["inside"]]  # fmt: skip
    traces = asyncio.run(_ask(cases))
    by_status = {
        str(status): sum(trace["status"] == status for trace in traces) for status in (200, 400, 401, 404, 503)
    }
    job = Job("chatcmpl-" + 32 * "0", "SmolLM2-135M-Instruct", ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}], stream=True), SamplingParams(), [], 1_700_000_000)  # fmt: skip
    serving = OpenAIServing(ScriptedLLM(), ["smol"])
    chunk = event(serving.envelope(job, [serving.choice(job, 0, CompletionOutput(0, " word", [1]))]))
    return {
        "states": len(cases), "by_status": by_status, "heard": sum(trace["engine_heard"] for trace in traces),
        "refused": sum(trace["status"] != 200 for trace in traces),
        "chunk_bytes": len(chunk), "word_bytes": 5, "overhead": len(chunk) / 5, "mb_per_s": len(chunk) * 2500 / 1e6,
        "max_body_mb": MAX_BODY_BYTES / 2**20, "max_stop": MAX_STOP_STRINGS, "max_n": MAX_N,
        "fields": {"completions": len(CompletionRequest.model_fields), "chat": len(ChatCompletionRequest.model_fields)},
    }  # fmt: skip


# --- Figure -----------------------------------------------------------------------------------------------------------

GATES = [("key", 401, "Bearer …"), ("size", 413, "at most\n4 MiB"), ("JSON", 400, "one\nobject"),
         ("fields", 400, "types,\nnames"), ("model", 404, "is\nserved"), ("values", 400, "ranges,\none constraint"),
         ("length", 400, "fits the\ncontext"), ("room", 503, "else\nRetry-After")]  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The stations between a socket and the engine, each with its way out."""
    figure, ax = common.new_figure(8.0, 3.1)
    colors, way_out = common.COLORS, functools.partial(dict, arrowstyle="-|>", linewidth=1.3)
    for x, (name, status, what) in enumerate(GATES):
        ax.add_patch(_box(ax, x, colors["grey" if x < 2 else "blue"]))
        ax.text(x, 0.12, name, ha="center", va="center", color="white", weight="bold", fontsize=9.5)
        ax.annotate("", (x, -1.02), (x, -0.36), arrowprops=way_out(color=colors["red"]))
        ax.text(x, -1.12, str(status), ha="center", va="top", color=colors["red"], weight="bold")
        ax.text(x, -1.5, what, ha="center", va="top", fontsize=7.5, color=colors["grey"])
    through = {"arrowstyle": "-|>", "color": colors["ink"], "linewidth": 1.2}
    ax.annotate("", (7.95, 0.12), (-0.75, 0.12), arrowprops=through, zorder=0)
    ax.add_patch(_box(ax, 8.4, colors["green"]))
    ax.text(8.4, 0.12, "engine", ha="center", va="center", color="white", weight="bold", fontsize=9.5)
    ax.text(8.4, -1.12, "200", ha="center", va="top", color=colors["green"], weight="bold")
    ax.annotate("", (8.4, -1.02), (8.4, -0.36), arrowprops=way_out(color=colors["green"]))
    ax.text(0.5, 0.85, "before FastAPI", ha="center", fontsize=9, color=colors["grey"])
    ax.text(4.5, 0.85, "in the API process, without the engine", ha="center", fontsize=9, color=colors["blue"])
    ax.set(xlim=(-0.8, 8.9), ylim=(-2.2, 1.15), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return [common.save_figure(figure, folder, "06f_gates")]


def _box(ax: Any, x: float, color: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x - 0.4, -0.2), 0.8, 0.64, boxstyle="round,pad=0.02", facecolor=color, edgecolor="white")


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


async def tell_story(args: argparse.Namespace, bench: dict[str, Any]) -> None:
    """Steps 1 to 3, on an engine in a thread; adds its measurements to `bench`."""
    llm = await AsyncLLM.start(
        make_small_engine, {"model": args.model, "seed": args.seed},
        llama.model_folder(args.model), "thread", max_num_queued_reqs=args.max_num_queued_reqs,
    )  # fmt: skip
    try:
        kind = ForgetfulServing if args.no_abort else OpenAIServing
        await _tell_story(args, with_routes(kind(llm, ["smol"])), llm, bench)
    finally:
        await llm.shutdown()


async def _tell_story(args: argparse.Namespace, app: Any, llm: AsyncLLM, bench: dict[str, Any]) -> None:
    common.heading("1. What is refused before the engine hears of it")
    rows, repeat, bench["refusal_us"] = [], 30 if args.bench else 3, {}
    for name, body in WRONG.items():
        start = time.perf_counter()
        for _ in range(repeat):
            heard = await call(app, "/v1/completions", body)
        bench["refusal_us"][name] = (time.perf_counter() - start) / repeat * 1e6
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
    common.check_equal(f"hung up after 2 of 400 tokens ({(time.perf_counter() - start) * 1e3:.0f} ms): nobody inside",
                       llm.num_unfinished, 0)  # fmt: skip
    running = asyncio.create_task(call(app, "/v1/completions", long | {"max_tokens": 16}))
    while not (llm.num_unfinished or running.done()):
        await asyncio.sleep(0.001)
    second = await call(app, "/v1/completions", ask | {"n": args.max_num_queued_reqs, "temperature": 1})
    common.say(f"{llm.num_unfinished} inside, bound {args.max_num_queued_reqs}; {args.max_num_queued_reqs} more: "
               f"{second.status}, Retry-After {second.headers.get('retry-after')}")  # fmt: skip
    common.check_equal("the one inside is served to its end", (await running).text.endswith("data: [DONE]\n\n"), True)
    idle = await llm.call_utility("check_idle")
    common.check_equal("no KV block is owned, no request is left", (idle["owned_blocks"], idle["unfinished"]), (0, 0))


CHAT = {"model": "smol",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
        "stream": True, "temperature": 0.7, "max_completion_tokens": 64}  # fmt: skip
CHAT_BYTES, WORD = json.dumps(CHAT).encode(), CompletionOutput(0, " word", [1])


def measure_costs(seconds: float) -> dict[str, float]:
    """Microseconds of what the event loop does for a request and for a token."""
    serving = OpenAIServing(ScriptedLLM(), ["smol"])
    job = Job("chatcmpl-" + 32 * "0", "smol", ChatCompletionRequest(**CHAT), SamplingParams(), [])
    read = ChatCompletionRequest.model_validate
    validate = lambda: serving.check_params(read(json.loads(CHAT_BYTES)))  # noqa: E731
    write = lambda: event(serving.envelope(job, [serving.choice(job, 0, WORD)]))  # noqa: E731
    return {"validate_us": common.measure(validate, seconds).median * 1e6,
            "event_us": common.measure(write, seconds).median * 1e6}  # fmt: skip


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    p.add_argument("--max-num-queued-reqs", type=common.number(int, 1, MAX_N), default=2, metavar="N",
                   help="the queue bound of step 3 (default %(default)s)")  # fmt: skip
    p.add_argument("--no-abort", action="store_true", help="the bug: a client that leaves is not forgotten")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine, bench = common.start(args), {}
    llama.check_context(args.model, MAX_MODEL_LEN)
    asyncio.run(tell_story(args, bench))
    common.heading("4. One request, station by station: simulate()")
    common.say(describe(simulate(WIDGET_DEFAULT)))
    common.heading("5. What it costs")
    bench |= measure_costs(1.0 if args.bench else 0.1)
    common.say(f"{bench['validate_us']:.0f} µs to validate a chat request of {len(CHAT_BYTES)} bytes, "
               f"{bench['event_us']:.1f} µs to write an event")  # fmt: skip
    if args.figure:
        draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": facts(), "bench": bench})


if __name__ == "__main__":
    common.run(main)

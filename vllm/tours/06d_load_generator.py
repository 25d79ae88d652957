"""06d · The load generator: measuring a server without fooling yourself.

The question: a server answers in 20 ms, says the benchmark. Users say it hangs for seconds. Both looked at the same
server on the same day. Who is wrong, and how does one measure so that both get the same answer?

The mechanism:
  1. Decide *when* requests go out before looking at the server: a Poisson (or bursty) schedule, fixed by a seed.
     A client that waits for an answer before it sends the next request asks less just while the server is slow.
  2. Time every request from the moment its user wanted it, and say how long it waited in the client itself.
  3. Read the answer as it streams: bytes -> UTF-8 -> events -> chunks. A chunk may hold several tokens, or none.
  4. TTFT, ITL, TPOT and E2EL by exact definitions; failures counted by name, and never as speed.
  5. Check the instrument against known answers: a scripted server, on a virtual clock, to the last digit.
  6. Check the run against Little's law: requests in flight = rate x latency, whatever the server does inside.
  7. Search the settings (`tune`) with that yardstick, and show the trade-off instead of one winner.

Numbers to remember: with fixed service time S a single server at load ρ lets a request wait ρ/(2(1−ρ)) · S on average:
2 S at 80 %, 9.5 S at 95 %. Twenty requests miss the slowest percent altogether with 82 % probability.

How to run:
  uv run python -m vllm.tours.06d_load_generator             the whole story, against a server of its own
  uv run python -m vllm.tours.06d_load_generator --rate 60   break it; add --max-concurrency 8 to hide that
  uv run python -m vllm.tours.06d_load_generator --bench     minutes: latency and tuning of the real engine
  uv run python -m vllm bench --base-url http://127.0.0.1:8000 --request-rate 4 --num-prompts 100

Read for this: Schroeder et al. 2006 (open and closed systems), Tene 2013 (coordinated omission), Little 1961, vLLM 0.32
`benchmarks/serve.py`, `latency.py`, `lib/endpoint_request_func.py`, `sweep/`, Zhong et al. 2024 (goodput).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import asyncio
import codecs
import contextlib
import functools
import itertools
import json
import math
import os
import random
import re
import selectors
import statistics
import sys
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from engine.llm import progress_bar
from engine.output import SchedulerOutput
from engine.request import Request
from engine.request import SamplingParams

KEY = "06d_load_generator"
JSON_BODY = {"Content-Type": "application/json"}

scheduling = common.lesson("04_continuous_batching")
offline = common.lesson("04b_offline_engine")


# --- The naive way: ask, wait, note the time, ask again -------------------------------------------------------------
#
# A server that takes 20 ms for a request, one after the other, and freezes once for two seconds: somebody's long
# prompt, a full pool, a garbage collection. Times are integers, in milliseconds.

SERVICE, FREEZE = 20, (5_000, 7_000)


def freezing_server() -> Callable[[int], int]:
    """A server with one seat: give it the time a request arrives, get the time it is answered."""
    free_at = 0

    def serve(arrival: int) -> int:
        nonlocal free_at
        start = max(arrival, free_at)
        if FREEZE[0] <= start < FREEZE[1]:
            start = FREEZE[1]
        free_at = start + SERVICE
        return free_at

    return serve


def closed_loop(serve: Callable[[int], int], until: int) -> list[tuple[int, int]]:
    """One client in a loop, as first written by everybody. Returns (sent, latency) of each request."""
    now, found = 0, []
    while now < until:
        done = serve(now)
        found.append((now, done - now))
        now = done  # the next question waits for this answer: while the server hangs, nobody asks
    return found


def open_loop(serve: Callable[[int], int], until: int, every: int) -> list[tuple[int, int]]:
    """Users who do not know of each other: a request every `every` ms, whatever became of the last one."""
    return [(now, serve(now) - now) for now in range(0, until, every)]


# --- The yardstick: what is measured, and how it is summed up -------------------------------------------------------


@dataclass
class Record:
    """What one request looked like from outside. Seconds since the run began; `error` is empty if it was answered."""

    scheduled: float  # when its user wanted it
    start: float = 0.0  # when it went out
    end: float = 0.0  # when it was over, answered or not
    times: list[float] = field(default_factory=list)  # when each chunk with text came
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""  # a short name, the same for all failures of a kind
    detail: str = ""

    # To the first text, and to the last one (not until the connection is closed).
    ttft = property(lambda r: r.times[0] - r.start)
    e2el = property(lambda r: r.times[-1] - r.start)
    # The silences between *chunks*, whatever number of tokens they bring: many numbers a request.
    itl = property(lambda r: [b - a for a, b in itertools.pairwise(r.times)])
    # (E2EL − TTFT) / (n − 1), per *token* after the first: one number a request; 0 if n = 1.
    tpot = property(lambda r: (r.e2el - r.ttft) / (r.output_tokens - 1) if r.output_tokens > 1 else 0.0)
    # What it waited on our side: for a seat under --max-concurrency, or because the generator was late.
    client_queue_time = property(lambda r: r.start - r.scheduled)
    e2el_including_client_queue = property(lambda r: r.times[-1] - r.scheduled)


METRICS = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between chunks (ITL)",
           "e2el": "end to end", "client_queue_time": "queue in the client",
           "e2el_including_client_queue": "since the user asked"}  # fmt: skip


def percentile(values: Sequence[float], p: float) -> float:
    """Interpolate between neighbours at rank r = p/100 · (n − 1), counted from 0: NumPy's default, and vLLM's."""
    ordered, r = sorted(values), p / 100 * (len(values) - 1)
    low, high = ordered[math.floor(r)], ordered[math.ceil(r)]
    return low + (high - low) * (r - math.floor(r))


def concurrency(spans: Iterable[tuple[float, float]]) -> tuple[int, float]:
    """Sweep over starts and ends: the peak of N(t), requests in flight at time t, and its integral ∫N dt."""
    events = sorted(event for a, b in spans for event in ((a, 1), (b, -1)))  # at one time, ends come first
    n, peak, area = 0, 0, 0
    for (at, change), (following, _) in itertools.pairwise([*events, events[-1]]):
        n += change
        peak, area = max(peak, n), area + n * (following - at)
    return peak, area


def summarize(records: Sequence[Record], duration: float | None = None, percentiles: Sequence[float] = (50, 90, 99),
              goodput: dict[str, float] | None = None, metrics: Iterable[str] = METRICS) -> dict[str, Any]:  # fmt: skip
    """Records to numbers, under the keys of `vllm bench serve` where they mean the same.

    `duration` in seconds, by default until the last end; `goodput` as {"ttft" | "tpot" | "e2el": limit in ms}. A failed
    request is counted and named; it has no latency. Where nothing was measured the value is None, not 0."""
    done, failed = [r for r in records if not r.error], [r for r in records if r.error]
    values = {name: [getattr(r, name) for r in done] for name in METRICS}
    values["tpot"] = [r.tpot for r in done if r.output_tokens > 1]
    values["itl"] = [gap for r in done for gap in r.itl]
    inputs, outputs = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    peak, area = concurrency([(r.start, r.end) for r in records])
    duration, chunks = duration or max(r.end for r in records), sum(len(r.times) for r in done)
    origin, seconds = min(r.start for r in records), Counter()
    for at, tokens in ((at, r.output_tokens / len(r.times)) for r in done for at in r.times):
        seconds[int(at - origin)] += tokens
    result = {
        "duration": duration, "completed": len(done), "failed": len(failed), "total_input_tokens": inputs,
        "total_output_tokens": outputs, "request_throughput": len(done) / duration, "request_goodput": None,
        "output_throughput": outputs / duration, "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": max(seconds.values(), default=0.0), "max_concurrent_requests": peak,
        # Ours: what vLLM's result has no key for.
        "failures": dict(Counter(r.error for r in failed)), "mean_concurrency": area / duration,
        "output_tokens_per_chunk": outputs / chunks if chunks else None,
    }  # fmt: skip
    if goodput:
        good = [r for r in done if all(1e3 * getattr(r, name) <= limit for name, limit in goodput.items())]
        result["request_goodput"] = len(good) / duration
    rules = {"mean": statistics.fmean, "median": statistics.median, "std": statistics.pstdev}
    rules |= {f"p{p:g}": functools.partial(percentile, p=p) for p in percentiles}
    for name in metrics:
        ms = [1e3 * x for x in values[name]]
        result |= {f"{rule}_{name}_ms": of(ms) if ms else None for rule, of in rules.items()}
    return result


# --- The workload: how long requests are, and when they come --------------------------------------------------------


class Prompt(NamedTuple):
    """One request to be: its text or token ids, and how many tokens are wanted in return."""

    content: str | list[int]
    input_len: int
    output_len: int


# Azure's published traces of 2023 (code: 8,819 requests, conversation: 19,366): percentiles of tokens per request as
# (percent, tokens), and the means. No lognormal fits the conversations: their outputs have two humps.
AZURE = {
    "azure-code": {"mean": {"input": 2048, "output": 27.9}, "output": ((50, 13), (90, 55), (99, 251)),
                   "input": ((5, 75), (25, 578), (50, 1469), (75, 2744), (90, 5188), (95, 7303), (99, 7436))},
    "azure-conversation": {"mean": {"input": 1154.7, "output": 211}, "input": ((50, 1020), (90, 2734), (99, 4142)),
                           "output": ((50, 129), (75, 395), (90, 424), (99, 601))},
}  # fmt: skip


def quantile(table: Sequence[tuple[float, float]], u: float) -> float:
    """The length below which a share u of the requests lies: from 1 token, straight lines in log(length) between the
    published percentiles, and nothing beyond the last."""
    points = [(0, 1), *table]
    for (p, a), (q, b) in itertools.pairwise(points):
        if 100 * u <= q:
            return a * (b / a) ** ((100 * u - p) / (q - p))
    return points[-1][1]


def table_mean(table: Sequence[tuple[float, float]]) -> float:
    """The exact mean of `quantile` over u in [0, 1): Σ share · (b − a) / ln(b / a)."""
    pairs = itertools.pairwise([(0, 1), *table])
    body = sum((q - p) / 100 * (b - a) / math.log(b / a) for (p, a), (q, b) in pairs)
    return body + (1 - table[-1][0] / 100) * table[-1][1]


def random_length(rng: random.Random, mean: int, range_ratio: float = 0.0, cv: float = 0.0) -> int:
    """A length of at least 1 with this mean: fixed; uniform on mean · [1 − r, 1 + r]; or lognormal with this
    coefficient of variation (standard deviation ÷ mean)."""
    if cv:
        variance = math.log(1 + cv * cv)
        return max(1, round(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))
    return max(1, rng.randint(math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))))


def arrival_times(count: int, rate: float, rng: random.Random, burstiness: float = 1.0) -> list[float]:
    """When each request is due, in seconds: gaps from a gamma distribution with mean 1/rate and variance
    1/(burstiness · rate²). 1 is a Poisson process, below 1 comes in bursts, ∞ ticks like a clock; rate ∞: all at once.

    As in vLLM the gaps are then scaled so that the last request is due at count/rate exactly: the sum of a hundred is
    typically a tenth off, and every throughput with it."""
    if math.isinf(burstiness):
        return [(i + 1) / rate for i in range(count)]
    due = list(itertools.accumulate(rng.gammavariate(burstiness, 1.0) for _ in range(count)))
    return [at * count / rate / (due[-1] or 1.0) for at in due]  # bursts so tight that all gaps are 0: all at once


WORDS = ("time", "year", "people", "way", "day", "life", "child", "world", "school", "state", "family", "group")
TOKEN_IDS = (1_000, 10_000)  # of random prompts: ordinary tokens in any vocabulary that is served


def random_ids(rng: random.Random, length: int, vocab_size: int = TOKEN_IDS[1]) -> list[int]:
    """`length` token ids that any tokenizer of `vocab_size` has, its first, special ones left out."""
    return rng.choices(range(min(TOKEN_IDS[0], vocab_size // 2), min(TOKEN_IDS[1], vocab_size)), k=length)


def make_prompts(args: argparse.Namespace, count: int, seed: int, as_text: bool = False) -> list[Prompt]:
    """The requests of one run. Random prompts are token ids, so their length is exact; where the API takes text alone
    (chat), they are as many common words. Raises InputError."""
    if args.dataset_path or args.dataset_name == "custom":
        rows = load_prompts(args.dataset_path)
        rows = [rows[i % len(rows)] for i in range(count)]
        return [Prompt(text, 0, n or args.random_output_len) for text, n in rows]
    if args.random_range_ratio and args.random_cv:
        raise common.InputError("--random-cv: allowed without --random-range-ratio only (lognormal or uniform)")
    rng, prompts = random.Random(seed), []
    for _ in range(count):
        if args.dataset_name in AZURE:
            table = AZURE[args.dataset_name]
            n_in, n_out = (max(1, round(quantile(table[side], rng.random()))) for side in ("input", "output"))
        else:
            n_in, n_out = (random_length(rng, mean, args.random_range_ratio, args.random_cv)
                           for mean in (args.random_input_len, args.random_output_len))  # fmt: skip
        prompts.append(Prompt(" ".join(rng.choices(WORDS, k=n_in)) if as_text else random_ids(rng, n_in), n_in, n_out))
    return prompts


def load_prompts(path: str | None) -> list[tuple[str, int | None]]:
    """A file with one JSON object a line: "prompt", and perhaps "output_tokens". Raises InputError, naming the line."""
    if not path:
        raise common.InputError("--dataset-path: --dataset-name custom needs a .jsonl file")
    rows, number = [], 1
    try:
        for line in Path(path).read_text(encoding="utf-8").split("\n"):
            if line.strip():
                row = json.loads(line)
                text, n = row["prompt"], row.get("output_tokens")
                if not (isinstance(text, str) and text and (n is None or (type(n) is int and n > 0))):
                    raise ValueError
                rows.append((text, n))
            number += 1
    except OSError as error:
        raise common.InputError(f"--dataset-path {path}: not readable ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise common.InputError(f"--dataset-path {path}: line {number}: must be a JSON object with prompt (text) and "
                                "optionally output_tokens (a whole number above 0)") from None  # fmt: skip
    if not rows:
        raise common.InputError(f"--dataset-path {path}: holds no prompt")
    return rows


# --- The client: one streamed request -------------------------------------------------------------------------------


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


async def send(client: httpx.AsyncClient, target: Target, prompt: Prompt, record: Record,
               clock: Callable[[], float]) -> None:  # fmt: skip
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


async def drive(client: httpx.AsyncClient, target: Target, prompts: Sequence[Prompt], arrivals: Sequence[float],
                max_concurrency: int | None = None,
                advance: Callable[[], None] = lambda: None) -> list[Record]:  # fmt: skip
    """Send each prompt when it is due. An open loop, unless `max_concurrency` closes it.

    A request that finds no seat waits in the client, in order; `scheduled` remembers when it was due."""
    seats = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    origin, tasks = (loop := asyncio.get_running_loop()).time(), []
    clock = lambda: loop.time() - origin  # noqa: E731

    async def one(prompt: Prompt, record: Record) -> Record:
        async with seats:
            await send(client, target, prompt, record, clock)
        advance()
        return record

    for prompt, due in zip(prompts, arrivals):
        await asyncio.sleep(max(0.0, due - clock()))
        tasks.append(asyncio.create_task(one(prompt, Record(due))))
    return await asyncio.gather(*tasks)


# --- A server with known answers ------------------------------------------------------------------------------------


@dataclass
class Script:
    """What the scripted server does: the first token after `ttft` seconds, then a chunk every `itl`."""

    ttft: float = 0.030
    itl: float = 0.005
    tokens_per_chunk: int = 1
    stamps: dict[str, list[float]] = field(default_factory=dict)  # prompt -> loop times at which its chunks went out

    async def reply(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The chunks of one streamed answer in OpenAI's format; usage and [DONE] at the end."""
        names = ("messages", "max_completion_tokens") if "messages" in body else ("prompt", "max_tokens")
        prompt, wanted = (body[name] for name in names)
        stamps, sent = self.stamps.setdefault(str(prompt), []), 0
        await asyncio.sleep(self.ttft)
        while sent < wanted:
            count = min(self.tokens_per_chunk if sent else 1, wanted - sent)
            sent += count
            stamps.append(asyncio.get_running_loop().time())
            yield sse({"choices": [{"index": 0, "text": " word" * count, "delta": {"content": " word" * count},
                                    "finish_reason": "length" if sent == wanted else None}]})  # fmt: skip
            if sent < wanted:
                await asyncio.sleep(self.itl)
        yield sse({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": sent}})
        yield b"data: [DONE]\n\n"


def sse(message: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(message).encode() + b"\n\n"


async def start_server(reply: Callable[[dict], AsyncIterator[bytes]]) -> tuple[asyncio.Server, str]:
    """A minimal HTTP/1.1 server on loopback that streams what `reply` yields. Returns it and its base URL."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(re.search(rb"(?i)content-length: *(\d+)", head)[1])
                body = json.loads(await reader.readexactly(length))
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                async for data in reply(body):
                    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: when all tasks sleep, its clock jumps to the next alarm. So what the real client
    measures can be compared exactly."""

    def __init__(self) -> None:
        loop, self.now = self, 0.0

        class Jump(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> list:
                if timeout is None:
                    raise RuntimeError("every task waits, and none for time")
                loop.now += max(timeout, 0)
                return super().select(0)

        super().__init__(Jump())

    def time(self) -> float:
        return self.now


def drive_scripted(reply: Callable[[dict], AsyncIterator[bytes]], prompts: Sequence[Prompt], arrivals: Sequence[float],
                   max_concurrency: int | None = None, **target: Any) -> list[Record]:  # fmt: skip
    """`drive` in virtual time, against a server without a network: httpx hands over requests and gets streams."""

    async def run() -> list[Record]:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=reply(json.loads(request.content))))
        async with httpx.AsyncClient(transport=transport) as client:
            return await drive(client, Target("http://scripted", "m", **target), prompts, arrivals, max_concurrency)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run())


# --- An engine on a clock: the real scheduler, and integers instead of a model ---------------------------------------


@dataclass(frozen=True)
class StepCost:
    """Microseconds of a step = fixed + per token computed + per token of context read. Integers throughout.

    The defaults: Llama-3.1-8B in bf16 on an H100, 6.44 ms and 43.7 ns as vLLM's blog measured them (22 April 2026);
    27 µs per token is 16 GFLOP at 60 % of the data sheet's rate."""

    fixed_us: int = 6_440
    token_ns: int = 27_000
    context_ns: int = 44

    def __call__(self, work: Sequence[tuple[int, int]]) -> int:
        """`work`: (tokens computed, context) of each sequence in the step."""
        tokens, context = (sum(column) for column in zip(*work))
        return self.fixed_us + (self.token_ns * tokens + self.context_ns * context) // 1000

    def alone(self, prompt: Prompt) -> int:
        """Microseconds for a request that has the engine to itself."""
        lengths = [prompt.input_len + i for i in range(prompt.output_len)]
        return self([(lengths[0], lengths[0])]) + sum(self([(1, S)]) for S in lengths[1:])


class SimulatedCore(scheduling.DryRun):
    """Lesson 04's loop with a clock in place of the model: everybody's next token is 0, and takes its time."""

    now = 0

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        scheduled, requests = output.num_scheduled_tokens, self.scheduler.requests
        self.now += StepCost()([(n, requests[i].num_computed_tokens) for i, n in scheduled.items()])
        return super().execute_model(output)


@dataclass
class Run:
    """A simulated run. Times are microseconds."""

    prompts: Sequence[Prompt]
    arrivals: Sequence[int]  # when the user asked
    sent: list[int]  # when the client let it through
    times: list[list[int]]  # of each token
    steps: list[list[int]]  # each step: start, sequences in it, waiting in the engine, waiting in the client

    @property
    def records(self) -> list[Record]:
        """For `summarize`: the same yardstick as for a real server."""
        return [
            Record(at / 1e6, sent / 1e6, times[-1] / 1e6, [t / 1e6 for t in times], p.input_len, p.output_len)
            for p, at, sent, times in zip(self.prompts, self.arrivals, self.sent, self.times)
        ]


def run_simulated(prompts: Sequence[Prompt], arrivals: Sequence[int], max_num_seqs: int,
                  max_num_batched_tokens: int = 8192, max_concurrency: int = 0) -> Run:  # fmt: skip
    """Serve `prompts`, due at `arrivals` (µs, ascending), with lesson 04's scheduler. `max_concurrency` 0: open loop.

    A step sees the requests that were sent by the time it starts. The pool is never the limit: one block per seat.
    """
    longest = max(p.input_len + p.output_len for p in prompts)
    config = scheduling.SchedulerConfig(longest, max_num_seqs, max_num_batched_tokens)
    manager = scheduling.KVCacheManager(1 + max_num_seqs, longest, longest)
    core, waiting = SimulatedCore(scheduling.Scheduler(config, manager)), deque(range(len(prompts)))
    run = Run(prompts, arrivals, [0] * len(prompts), [[] for _ in prompts], [])
    seats = deque([0] * (max_concurrency or len(prompts)))  # since when each of the client's seats is free
    while waiting or core.scheduler.has_unfinished_requests():
        if not core.scheduler.has_unfinished_requests():
            core.now = max(core.now, arrivals[waiting[0]])
        while waiting and seats and arrivals[waiting[0]] <= core.now:
            i = waiting.popleft()
            run.sent[i] = max(arrivals[i], seats.popleft())
            params = SamplingParams(max_tokens=prompts[i].output_len, ignore_eos=True)
            core.add_request(Request(str(i), [0] * prompts[i].input_len, params))
        start, outside = core.now, bisect_right(arrivals, core.now) - (len(prompts) - len(waiting))
        heard = core.step()
        run.steps.append([start, len(heard), len(core.scheduler.waiting), outside])
        for output in heard:
            run.times[int(output.request_id)].append(core.now)
            if output.finish_reason:
                seats.append(core.now)
    return run


def queue_at(load: float, count: int, seed: int = 0) -> dict[str, Any]:
    """One seat and requests that take one step of S µs each: M/D/1. Waits in units of S, and their mean by theory,
    ρ / (2 (1 − ρ)): Pollaczek and Khinchine's λ E[S²] / (2 (1 − λ E[S])) for a fixed S. `exact`: each wait is that of
    Lindley's recursion of 1952, W' = max(0, W + S − gap)."""
    prompt = Prompt([], 128, 1)
    service = StepCost().alone(prompt)
    arrivals = [round(at) for at in arrival_times(count, load / service, random.Random(seed))]
    run = run_simulated([prompt] * count, arrivals, max_num_seqs=1)
    waits = [times[0] - at - service for times, at in zip(run.times, arrivals)]
    gaps = (b - a for a, b in itertools.pairwise(arrivals))
    lindley = list(itertools.accumulate(gaps, lambda wait, gap: max(0, wait + service - gap), initial=0))
    return {"theory": load / (2 * (1 - load)), "mean": statistics.fmean(waits) / service, "count": count,
            "longest": max(waits) / service, "exact": waits == lindley}  # fmt: skip


# --- The simulation behind the widget ---------------------------------------------------------------------------------

REQUESTS, INPUT, OUTPUT = 80, 512, 16
CHOICES = {"rate": [5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 80],  # requests per second
           "max_concurrency": [0, 1, 2, 4, 8, 16, 32],  # 0: no limit, an open loop
           "max_num_seqs": [1, 4, 16, 64], "seed": [0, 1, 2]}  # fmt: skip
WIDGET_DEFAULT = {"rate": 40, "max_concurrency": 0, "max_num_seqs": 16, "seed": 0}


@functools.cache
def unit_arrivals(count: int, seed: int) -> tuple[int, ...]:
    """A Poisson process of rate 1 in millionths; at rate r, request i is due at unit_arrivals[i] // r µs."""
    return tuple(round(1e6 * at) for at in arrival_times(count, 1.0, random.Random(seed)))


@functools.cache
def load(rate: int, max_concurrency: int, max_num_seqs: int, seed: int = 0, count: int = REQUESTS) -> Run:
    """`count` equal requests at `rate` per second against the simulated engine."""
    arrivals = [at // rate for at in unit_arrivals(count, seed)]
    return run_simulated([Prompt([], INPUT, OUTPUT)] * count, arrivals, max_num_seqs, max_concurrency=max_concurrency)


@functools.cache
def capacity(max_num_seqs: int) -> float:
    """Requests per second when all are there from the start."""
    records = run_simulated([Prompt([], INPUT, OUTPUT)] * 160, [0] * 160, max_num_seqs).records
    return len(records) / max(r.end for r in records)


def simulate(params: dict) -> dict:
    """One run of the load generator against the simulated engine. Raises InputError."""
    params = common.checked(params, CHOICES)
    run = load.__wrapped__(**params)
    first, done = [times[0] for times in run.times], [times[-1] for times in run.times]
    peak, area = concurrency(list(zip(run.sent, done)))
    starts, seats = [step[0] for step in run.steps], params["max_num_seqs"]
    spans = [[b - a for a, b in zip(since, done)] for since in (run.sent, run.arrivals)]  # two clocks
    return {
        "params": params, "requests": REQUESTS, "input_len": INPUT, "output_len": OUTPUT,
        "capacity_milli": round(1000 * capacity(seats)),  # requests per second · 1000; and with the client's limit:
        "loop_milli": round(1000 * capacity(min(seats, params["max_concurrency"] or seats))),
        "arrivals": list(run.arrivals), "sent": run.sent, "first": first, "done": done, "steps": run.steps,
        "admitted": [starts[bisect_left(starts, at) - 1] for at in first],  # to the step that computed it
        "peak_concurrency": peak, "area": area, "in_flight_sum": sum(spans[0]),
        "mean_us": [sum(span) // REQUESTS for span in spans], "p99_us": [int(percentile(span, 99)) for span in spans],
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    p, n, arrivals, sent, done = (trace[name] for name in ("params", "requests", "arrivals", "sent", "done"))
    span, limit = max(done) - arrivals[0], trace["loop_milli"]
    measured = [b - a for a, b in zip(sent, done)]  # if the clock starts when the request goes out
    felt = [b - a for a, b in zip(arrivals, done)]
    loop = f"at most {p['max_concurrency']} at a time" if p["max_concurrency"] else "open loop"
    ms = lambda values: f"mean {sum(values) // n // 1000:,} ms, P99 {percentile(values, 99) / 1e3:,.0f} ms"  # noqa: E731
    lines = [
        f"{n} requests of {trace['input_len']} + {trace['output_len']} tokens, {p['rate']} a second, {loop}; "
        f"{p['max_num_seqs']} seats",
        f"served {1e6 * n / span:.1f} a second; the engine's limit is {trace['capacity_milli'] / 1000:.1f}",
        f"latency since it was sent:    {ms(measured)}",
        f"latency since the user asked: {ms(felt)}",
        f"in flight: {trace['area'] / span:.2f} on average, {trace['peak_concurrency']} at most; "
        f"{1e6 * n / span:.2f}/s x {sum(measured) / n / 1e6:.4f} s = {sum(measured) / span:.2f}",
    ]
    for name, column in (("in the batch", 1), ("waiting, engine", 2), ("waiting, client", 3)):
        columns, top = [0] * 48, max(step[column] for step in trace["steps"])
        for (start, *counts), (stop, *_) in itertools.pairwise([*trace["steps"], [max(done)]]):
            for x in range((start - arrivals[0]) * 48 // span, min(47, (stop - arrivals[0] - 1) * 48 // span) + 1):
                columns[x] = max(columns[x], counts[column - 1])
        bars = "".join(" ▁▂▃▄▅▆▇█"[-(-8 * x // max(top, 1))] for x in columns)
        lines.append(f"{name:<15} {top:>2} |{bars.rstrip()}")
    if sum(felt) > 1.5 * sum(measured):
        lines.append("HIDDEN: the latency looks fine because requests queue in the client, where nobody counts.")
    elif 1000 * p["rate"] > limit:
        lines.append("OVERLOADED: the queue grows for as long as the run lasts. A longer run shows a worse latency.")
    else:
        lines.append("The server keeps up." if 1000 * p["rate"] <= 0.9 * limit else "At the edge: bursts leave queues.")
    return "\n".join(lines)


# --- Tuning: the best setting under limits, and what it costs ---------------------------------------------------------


def parse_limits(pairs: Sequence[str], flag: str, allowed: Sequence[str]) -> dict[str, float]:
    """["ttft:200", "tpot:50"] -> {"ttft": 200.0, "tpot": 50.0}, milliseconds. Raises InputError."""
    limits = {}
    for name, _, value in (pair.partition(":") for pair in pairs):
        if name not in allowed or not re.fullmatch(r"\d*\.?\d+", value) or float(value) == 0:
            raise common.InputError(f"{flag} {name}:{value}: must be NAME:MILLISECONDS, above 0, with NAME one of "
                                    + ", ".join(allowed))  # fmt: skip
        limits[name] = float(value)
    return limits


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of (cost, gain): which no other costs no more and gains no less? Of equal ones, the first."""
    beats = lambda a, b: a[0] <= b[0] and a[1] >= b[1] and a != b  # noqa: E731
    return [point not in points[:i] and not any(beats(other, point) for other in points)
            for i, point in enumerate(points)]  # fmt: skip


def tune(measure: Callable[[int, int], dict[str, Any]], seqs: Sequence[int], budgets: Sequence[int],
         limits: dict[str, float], gain: str = "output_throughput", p: float = 99) -> dict[str, Any]:  # fmt: skip
    """Measure each `max_num_seqs` x `max_num_batched_tokens`; choose the most `gain` whose P`p` values keep `limits`.

    Returns {"rows": …, "best": index or None}. A setting that the engine refuses is a row with the reason; "front"
    marks the Pareto front of `gain` against P`p` ITL."""
    rows: list[dict[str, Any]] = []
    for seats, budget in itertools.product(seqs, budgets):
        row: dict[str, Any] = {"max_num_seqs": seats, "max_num_batched_tokens": budget}
        try:
            row |= measure(seats, budget)
            row["within"] = all((row[f"p{p:g}_{name}_ms"] or 0) <= limit for name, limit in limits.items())
        except common.InputError as error:
            row |= {"refused": str(error), "within": False}
        rows.append(row)
    measured = [row for row in rows if "refused" not in row]
    for row, on_front in zip(measured, pareto([(row[f"p{p:g}_itl_ms"] or 0, row[gain]) for row in measured])):
        row["front"] = on_front
    allowed = [i for i, row in enumerate(rows) if row["within"]]
    return {"rows": rows, "best": max(allowed, key=lambda i: rows[i][gain], default=None)}


TUNE_SEATS, TUNE_BUDGETS = (4, 8, 16, 32, 64), (1024, 2048, 4096, 8192)
TUNE_LIMIT, TUNE_GOODPUT, TUNE_RATE = 40.0, {"ttft": 300.0, "tpot": 25.0}, 48  # ms, ms, requests per second


@functools.cache
def tune_simulated(rate: int = 0) -> dict[str, Any]:
    """The grid on the simulated engine: 96 prompts of 256–768 tokens, answers of 16–48. `rate` 0: all at once, for the
    most throughput; otherwise Poisson arrivals, for the most goodput."""
    rng = random.Random(0)
    prompts = [Prompt([], random_length(rng, 512, 0.5), random_length(rng, 32, 0.5)) for _ in range(96)]
    arrivals = [at // rate for at in unit_arrivals(96, 0)] if rate else [0] * 96
    run = functools.partial(run_simulated, prompts, arrivals)
    measure = lambda *setting: summarize(run(*setting).records, goodput=TUNE_GOODPUT if rate else None)  # noqa: E731
    gain, limits = ("request_goodput", {}) if rate else ("output_throughput", {"itl": TUNE_LIMIT})
    return tune(measure, TUNE_SEATS, TUNE_BUDGETS, limits, gain)


# --- The engine without a server: `bench latency`, and what `tune` runs ----------------------------------------------


def build_engine(model: str | None, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> Any:
    """Lesson 06's engine, as it is served; the pool is never the limit. No prefix cache: asking twice costs twice."""
    serving, num_blocks = common.lesson("06_serving"), 2 + max_num_seqs * -(-max_model_len // 16)
    return serving.make_engine(serving.EngineArgs(
        model=model, max_model_len=max_model_len, max_num_seqs=max_num_seqs, enable_prefix_caching=False,
        max_num_batched_tokens=max_num_batched_tokens, num_gpu_blocks_override=num_blocks))  # fmt: skip


def engine_run(engine: Any, prompts: Sequence[Prompt], arrivals: Sequence[float]) -> list[Record]:
    """`drive` for an engine in this process: greedy, exactly `output_len` tokens each, no HTTP and no threads.
    A request that falls due while a step runs is added after it; its clock starts when it was due."""
    origin, due = time.perf_counter(), deque(range(len(prompts)))
    clock = lambda: time.perf_counter() - origin  # noqa: E731
    records = [Record(at, at, prompt_tokens=p.input_len) for p, at in zip(prompts, arrivals)]
    while due or engine.has_unfinished_requests():
        while due and arrivals[due[0]] <= clock():
            i = due.popleft()
            params = SamplingParams(temperature=0, max_tokens=prompts[i].output_len, ignore_eos=True)
            engine.add_request(str(i), {"prompt_token_ids": prompts[i].content}, params, stream=True)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[due[0]] - clock()))
            continue
        for output in engine.step():
            record = records[int(output.request_id)]
            record.end = clock()
            record.times.append(record.end)
            record.output_tokens += len(output.outputs[0].token_ids)
    return records


def measure_latency(engine: Any, batch_size: int, input_tokens: int, output_tokens: int, num_iters: int,
                    num_iters_warmup: int = 1, seed: int = 0) -> dict[str, Any]:  # fmt: skip
    """Seconds to answer one batch, start to end, with vLLM's keys; and what they are made of. New prompts each time."""
    rng, latencies, records = random.Random(seed), [], []
    for i in range(num_iters_warmup + num_iters):
        ids = [random_ids(rng, input_tokens, engine.model.config.vocab_size) for _ in range(batch_size)]
        run = engine_run(engine, [Prompt(x, input_tokens, output_tokens) for x in ids], [0.0] * batch_size)
        if i >= num_iters_warmup:
            latencies.append(max(r.end for r in run))
            records += run
    parts, average = summarize(records, percentiles=(), metrics=("ttft", "tpot")), statistics.fmean(latencies)
    return {"avg_latency": average, "latencies": latencies,
            "percentiles": {str(p): percentile(latencies, p) for p in (10, 25, 50, 75, 90, 99)},
            "median_ttft_ms": parts["median_ttft_ms"], "median_tpot_ms": parts["median_tpot_ms"],
            "output_throughput": batch_size * output_tokens / average}  # fmt: skip


def latency_command(args: argparse.Namespace) -> dict[str, Any]:
    """`bench latency`: one batch, offline."""
    batch, n_in, n_out = args.batch_size, args.input_tokens, args.output_tokens
    engine = build_engine(args.model, n_in + n_out, batch, max(n_in + n_out, batch * n_in))
    found = measure_latency(engine, batch, n_in, n_out, args.num_iters, args.num_iters_warmup, args.seed)
    common.say(f"{batch} x ({n_in} in, {n_out} out): {found['avg_latency']:.3f} s on average of {args.num_iters} runs, "
               f"P99 {found['percentiles']['99']:.3f} s; {found['output_throughput']:.0f} tokens/s\n"
               f"first tokens after {found['median_ttft_ms']:.0f} ms"
               + (f", {tpot:.1f} ms per further token" if (tpot := found["median_tpot_ms"]) else ""))  # fmt: skip
    if args.json:
        common.merge_json(args.json, "bench latency", {"machine": common.machine(), **found})
    return found


def tune_command(args: argparse.Namespace) -> dict[str, Any]:
    """`tune`: the grid, on real engines or on the simulated one."""
    limits = parse_limits(args.limit or (), "--limit", ("ttft", "tpot", "itl", "e2el"))
    goodput = parse_limits(args.goodput or (), "--goodput", ("ttft", "tpot", "e2el"))
    rng, prompts = random.Random(args.seed), []
    for _ in range(args.num_prompts):
        n_in, n_out = random_length(rng, args.input_tokens, 0.5), random_length(rng, args.output_tokens, 0.5)
        prompts.append(Prompt(random_ids(rng, n_in), n_in, n_out))
    due = arrival_times(args.num_prompts, args.request_rate, rng)

    def measure(seats: int, budget: int) -> dict[str, Any]:
        if args.simulate:
            records = run_simulated(prompts, [round(1e6 * at) for at in due], seats, budget).records
        else:
            engine = build_engine(args.model, max(p.input_len + p.output_len for p in prompts), seats, budget)
            engine_run(engine, prompts[:1], [0.0])  # warm up
            records = engine_run(engine, prompts, due)
        return summarize(records, None, (50, args.limit_percentile), goodput)

    gain = "request_goodput" if goodput else "output_throughput"
    found = tune(measure, args.max_num_seqs, args.max_num_batched_tokens, limits, gain, args.limit_percentile)
    print_tune(found, limits, gain, args.limit_percentile)
    if args.json:
        common.merge_json(args.json, "tune", {"simulated": args.simulate, "machine": common.machine(), **found})
    return found


def print_tune(found: dict[str, Any], limits: dict[str, float], gain: str, p: float) -> None:
    """The grid as a table, and the winner as flags."""
    best, rows = found["best"], []
    for i, row in enumerate(found["rows"]):
        name = f"{row['max_num_seqs']} x {row['max_num_batched_tokens']:,}"
        if "refused" in row:
            rows.append([name, *["–"] * 4, "refused"])
            continue
        mark = "best" if i == best else "over the limit" if not row["within"] else "front" if row["front"] else ""
        goodput = "–" if row["request_goodput"] is None else f"{row['request_goodput']:.1f}"
        rows.append([name, f"{row['output_throughput']:,.0f}", goodput,
                     *(f"{row[f'p{p:g}_{m}_ms'] or 0:,.0f} ms" for m in ("ttft", "itl")), mark])  # fmt: skip
    common.table(["seats x budget", "tokens/s", "goodput/s", f"P{p:g} TTFT", f"P{p:g} ITL", ""], rows)
    for reason in sorted({row["refused"] for row in found["rows"] if "refused" in row}):
        common.say(f"refused: {reason}")
    wish = " and ".join(f"P{p:g} {name} ≤ {limit:g} ms" for name, limit in limits.items()) or "no limit"
    flags = "nothing" if best is None else " ".join(f"--{name.replace('_', '-')} {found['rows'][best][name]}"
                                                    for name in ("max_num_seqs", "max_num_batched_tokens"))  # fmt: skip
    common.say(f"Most {gain.replace('_', ' ')} under {wish}: {flags}")


# --- `bench`: against a real server -----------------------------------------------------------------------------------


async def first_model(client: httpx.AsyncClient, base_url: str) -> str:
    """The name of the first model that the server offers. Raises InputError if there is no such server."""
    try:
        response = await client.get(f"{base_url}/v1/models", timeout=30)
        return response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, LookupError, TypeError) as error:
        raise common.InputError(f"--base-url {base_url}: /v1/models names no model ({error or repr(error)})") from None


async def serve_load(args: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """Drive the server at `args.base_url` as asked. Returns the result, with vLLM's keys, and the records."""
    base_url, chat = args.base_url.removesuffix("/v1"), args.backend == "openai-chat"
    goodput = parse_limits(args.goodput or (), "--goodput", ("ttft", "tpot", "e2el"))
    prompts = make_prompts(args, args.num_prompts, args.seed, chat)
    arrivals = arrival_times(len(prompts), args.request_rate, random.Random(args.seed), args.burstiness)
    headers = {"Authorization": os.fsencode(f"Bearer {args.api_key}")} if args.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    direct = re.match(r"https?://(127\.|localhost|\[::1\])", base_url)  # a proxy has no business here
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=None, trust_env=not direct) as client:
        model = args.model or await first_model(client, base_url)
        extra = {"ignore_eos": True} if args.ignore_eos else {}
        target = Target(base_url, model, chat, args.request_timeout, extra)
        # Other prompts than the measured ones, which would find themselves in the server's prefix cache.
        warmups = make_prompts(args, args.num_warmups, args.seed + 2**31, chat)
        await drive(client, target, warmups, [0.0] * len(warmups), args.max_concurrency)
        with progress_bar(len(prompts), sys.stderr.isatty()) as advance:
            records = await drive(client, target, prompts, arrivals, args.max_concurrency, advance)
    queued = [name for name, wanted in (("client_queue_time", args.max_concurrency), ("e2el_including_client_queue",
              args.max_concurrency and math.isfinite(args.request_rate))) if wanted]  # fmt: skip
    result = {
        "date": time.strftime("%Y%m%d-%H%M%S"), "backend": args.backend, "model_id": model,
        "num_prompts": len(prompts), "burstiness": args.burstiness, "max_concurrency": args.max_concurrency,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        **summarize(records, None, args.metric_percentiles, goodput, ("ttft", "tpot", "itl", "e2el", *queued)),
        "max_lateness_ms": None if args.max_concurrency else 1e3 * max(r.client_queue_time for r in records),
    }  # fmt: skip
    return result, records


def print_result(result: dict[str, Any], goodput: Sequence[str] = ()) -> None:
    """The report: what was answered, how long it took, and whether the books balance."""
    names = [name for name in METRICS if f"mean_{name}_ms" in result]
    columns = ["mean", "median", *(key.split("_")[0] for key in result if re.fullmatch(r"p[\d.]+_ttft_ms", key))]
    ms = lambda value: "–" if value is None else f"{value:,.1f}"  # noqa: E731
    rows = [[METRICS[name], *(ms(result[f"{column}_{name}_ms"]) for column in columns)] for name in names]
    common.table(["milliseconds", *(c.upper() if c[0] == "p" else c for c in columns)], rows)
    lost = "".join(f"; {n} x {name}" for name, n in result["failures"].items())
    rate, e2el = result["request_throughput"], result["mean_e2el_ms"]
    little = f"; Little: {rate:.2f}/s x {e2el / 1e3:.4f} s = {rate * e2el / 1e3:.2f}" if e2el else ""
    common.say(f"{result['completed']} answered, {result['failed']} failed{lost}; in {result['duration']:.2f} s\n"
               f"{rate:.2f} requests/s, {result['output_throughput']:,.0f} output tokens/s "
               f"({result['max_output_tokens_per_s']:,.0f} in the best second), "
               f"{result['total_token_throughput']:,.0f} with prompts\n"
               f"in flight: {result['mean_concurrency']:.2f} on average, {result['max_concurrent_requests']} at most"
               f"{little}")  # fmt: skip
    if result["request_goodput"] is not None:
        common.say(f"goodput: {result['request_goodput']:.2f} requests/s within {' and '.join(goodput)} ms")
    if (per_chunk := result["output_tokens_per_chunk"] or 1) > 1.05:
        common.say(f"A chunk brought {per_chunk:.2f} tokens on average: ITL is between chunks, TPOT is per token.")
    if (late := result.get("max_lateness_ms") or 0) > (result["median_ttft_ms"] or math.inf) / 5:
        common.say(f"WARNING: the load generator itself was up to {late:.0f} ms late. It is part of what was measured.")


def bench_command(args: argparse.Namespace) -> None:
    """`bench`: against any OpenAI-compatible URL."""
    result, records = asyncio.run(serve_load(args))
    print_result(result, args.goodput or ())
    for (name, detail), count in Counter((r.error, r.detail) for r in records if r.error).most_common(10):
        common.say(f"{count} x {name}: {detail}")
    if args.json:
        common.merge_json(args.json, "bench", result)
    if not result["completed"]:
        raise common.CheckFailed(f"no request was answered: {result['failures']}")


# --- Command line -----------------------------------------------------------------------------------------------------


def rate_or_inf(text: str) -> float:
    """An argparse type: inf, or a number of at least a thousandth: a request in 17 minutes is slow enough."""
    return math.inf if text == "inf" else common.number(float, 0.001)(text)


def items(parse: Callable[[str], Any]) -> Callable[[str], list]:
    """An argparse type: several, separated by commas."""
    return lambda text: [parse(part) for part in text.split(",")]


def add_bench_commands(subparsers: Any) -> None:
    """Add `bench` (vLLM's `bench serve`), `bench latency` and `tune`; each sets `run`, a function of the arguments."""
    whole = functools.partial(common.number, int)
    some = whole(1, 10**6)  # more prompts, tokens or runs than that are a slip of the hand
    bench = subparsers.add_parser("bench", help="load a server, or time one batch", description=bench_command.__doc__)
    kinds = bench.add_subparsers(dest="what", metavar="latency")
    latency = kinds.add_parser("latency", help="seconds for one batch, without a server")
    search = subparsers.add_parser("tune", help="search max_num_seqs x max_num_batched_tokens")
    for parser, run in ((bench, bench_command), (latency, latency_command), (search, tune_command)):
        parser.add_argument("--model", metavar="PATH_OR_ID", help="as everywhere; with a URL: the name to ask for")
        parser.add_argument("--seed", type=whole(0, 2**31 - 1), default=0)
        parser.add_argument("--json", metavar="FILE", help="merge the result into FILE")
        parser.set_defaults(run=run)

    add = bench.add_argument
    add("--base-url", type=common.url, default="http://127.0.0.1:8000", metavar="URL")
    add("--backend", choices=("openai", "openai-chat"), default="openai", help="which API (default: completions)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY", help="default: $OPENAI_API_KEY")
    add("--request-rate", type=rate_or_inf, default=math.inf, metavar="R", help="requests a second (inf: all at once)")
    add("--burstiness", type=rate_or_inf, default=1.0, metavar="B", help="1 Poisson, below 1 bursts, inf a clock")
    add("--max-concurrency", type=whole(1), metavar="N", help="send no more at a time: closes the loop")
    add("--num-prompts", type=some, default=100, metavar="N")
    add("--num-warmups", "--warmup", type=whole(0, 10**6), default=0, metavar="N", help="before the clock starts")
    add("--dataset-name", choices=("random", "custom", *AZURE), default="random")
    add("--dataset-path", metavar="FILE.jsonl", help='one {"prompt": …, "output_tokens": …} a line')
    add("--random-input-len", type=some, default=1024, metavar="N")
    add("--random-output-len", type=some, default=128, metavar="N")
    add("--random-range-ratio", type=common.number(float, 0, 1), default=0.0, metavar="R", help="uniform ± R")
    add("--random-cv", type=common.number(float, 0, 100), default=0.0, metavar="CV", help="lognormal: deviation / mean")
    add("--ignore-eos", action="store_true", help="answers of exactly the length asked for, where the server can")
    add("--goodput", nargs="+", metavar="NAME:MS", help="count requests within these limits: ttft, tpot, e2el")
    add("--metric-percentiles", "--percentiles", type=items(common.number(float, 0, 100)), default=[99.0], metavar="P")
    add("--request-timeout", type=common.number(float, 0.001), default=600.0, metavar="S", help="then it has failed")

    add = latency.add_argument
    add("--input-tokens", "--input-len", type=some, default=32, metavar="N", help="of each prompt (default 32)")
    add("--output-tokens", "--output-len", type=some, default=128, metavar="N", help="of each answer (default 128)")
    add("--batch-size", type=some, default=8, metavar="N", help="prompts in the batch (default 8)")
    add("--num-iters", type=some, default=30, metavar="N", help="measured batches (default 30)")
    add("--num-iters-warmup", type=whole(0, 10**6), default=10, metavar="N", help="batches before them (default 10)")

    add = search.add_argument
    add("--max-num-seqs", type=items(some), default=[1, 4, 16, 64], metavar="N,N,…")
    add("--max-num-batched-tokens", type=items(some), default=[512, 2048], metavar="N,N,…")
    for name, default in (("--num-prompts", 64), ("--input-tokens", 128), ("--output-tokens", 32)):
        add(name, type=some, default=default, metavar="N", help=f"default {default}")
    add("--request-rate", type=rate_or_inf, default=math.inf, metavar="R", help="default inf: all at once")
    add("--limit", nargs="+", metavar="NAME:MS", help="what the winner must keep, of ttft tpot itl e2el")
    add("--limit-percentile", type=common.number(float, 0, 100), default=99.0, metavar="P")
    add("--goodput", nargs="+", metavar="NAME:MS", help="most requests within these, of ttft tpot e2el")
    add("--simulate", action="store_true", help="on the simulated engine: seconds, not minutes")


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    for name, text in (("rate", "requests a second in step 5; 60 is more than the engine can serve"),
                       ("max_concurrency", "close the loop of step 5; 0 is open")):  # fmt: skip
        p.add_argument("--" + name.replace("_", "-"), type=int, choices=CHOICES[name], default=WIDGET_DEFAULT[name],
                       metavar="N", help=f"{text} (default %(default)s)")  # fmt: skip
    add_bench_commands(p.add_subparsers(dest="command", metavar="bench|tune"))
    return p


# --- Numbers that the text quotes, and figures ------------------------------------------------------------------------

UNTIL, EVERY = 20_000, 40  # ms: twenty seconds, 25 requests a second, half of what the freezing server can do
RATES = (5, 10, 20, 25, 30, 35, 40, 45, 50, 60, 80)


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers; those of runs under the keys of `summarize`."""
    loops = {"closed": closed_loop(freezing_server(), UNTIL), "open": open_loop(freezing_server(), UNTIL, EVERY)}
    omission = {name: summarize([Record(at / 1e3, at / 1e3, (at + ms) / 1e3, [(at + ms) / 1e3]) for at, ms in found])
                for name, found in loops.items()}  # fmt: skip
    four = drive_scripted(Script(0.05, 0.04, 4).reply, [Prompt([1] * 9, 9, 33)], [0.0])
    free, busy = tune_simulated(), tune_simulated(TUNE_RATE)
    most = max(range(len(free["rows"])), key=lambda i: free["rows"][i]["output_throughput"])
    return {
        "omission": omission, "factor": omission["open"]["p99_e2el_ms"] / omission["closed"]["p99_e2el_ms"],
        "unseen": {str(n): 0.99**n for n in (20, 100, 300)},
        "needed": math.ceil(math.log(0.05) / math.log(0.99)),
        "chunks": summarize(four),
        "azure": {name.split("-")[1]: {side: {"ours": table_mean(table[side]), "published": table["mean"][side]}
                                       for side in ("input", "output")} for name, table in AZURE.items()},
        "queue": {str(share): queue_at(share / 100, 1000) for share in (50, 80, 95)},
        "alone_ms": StepCost().alone(Prompt([], INPUT, OUTPUT)) / 1e3, "cost": vars(StepCost()),
        "capacity": {str(n): capacity(n) for n in (1, 4, 16, 64)},
        "load": {str(rate): summarize(load(rate, 0, 16, count=160).records) for rate in RATES},
        "limited": {str(rate): summarize(load(rate, 8, 16, count=160).records) for rate in RATES},
        "tune": {"settings": len(free["rows"]), "on_front": sum(row["front"] for row in free["rows"]),
                 "best": free["rows"][free["best"]], "most": free["rows"][most],
                 "goodput": busy["rows"][busy["best"]], "goodput_of_most": busy["rows"][most]},
    }  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """What a closed loop does not see, and the front of the settings."""
    figure, (left, right) = common.new_figure(8.0, 3.5, ncols=2)
    for found, label, color, size in (
        (open_loop(freezing_server(), UNTIL, EVERY), "open: 25 a second", "blue", 14),
        (closed_loop(freezing_server(), UNTIL), "closed: after each answer", "red", 5),
    ):
        points = [[ms / 1e3 for ms in column] for column in zip(*found)]
        left.scatter(*points, size, common.COLORS[color], label=label, lw=0)
    left.axvspan(FREEZE[0] / 1e3, FREEZE[1] / 1e3, color=common.COLORS["light"], zorder=0)
    left.set(xlabel="sent at, s", ylabel="latency, s", xlim=(0, 20), title="A server that freezes once")
    left.legend(loc="upper right", handletextpad=0.1, markerscale=2, bbox_to_anchor=(1.02, 0.95))
    known, limit = facts(), facts()["capacity"]["16"]
    for which, name, style, label, color in (
        ("load", "e2el", "o-", "open loop", "blue"),
        ("limited", "e2el_including_client_queue", "o--", "at most 8, since asked", "orange"),
        ("limited", "e2el", "o-", "at most 8, since sent", "red"),
    ):
        seconds = [known[which][str(rate)][f"p99_{name}_ms"] / 1e3 for rate in RATES]
        right.plot(RATES, seconds, style, ms=4, color=common.COLORS[color], label=label)
    right.axvline(limit, color=common.COLORS["grey"], lw=0.8, ls=":")
    right.text(limit + 1, 0.06, "capacity,\n16 seats", fontsize=8.5, color=common.COLORS["grey"])
    right.set(yscale="log", ylim=(0.05, 5), yticks=[0.1, 0.3, 1, 3], yticklabels=["0.1", "0.3", "1", "3"],
              xlabel="requests offered per second", ylabel="P99 latency, s", title="An engine under load")  # fmt: skip
    right.minorticks_off()
    right.legend(loc="upper left", fontsize=8.5)
    paths = [common.save_figure(figure, folder, "06d_open_and_closed")]

    figure, ax = common.new_figure(8.0, 3.6)
    rows = tune_simulated()["rows"]
    for budget, color in zip(TUNE_BUDGETS, ("blue", "orange", "green", "purple")):
        points = [(r["p99_itl_ms"], r["output_throughput"]) for r in rows if r["max_num_batched_tokens"] == budget]
        ax.plot(*zip(*points), "o-", ms=5, lw=0.9, color=common.COLORS[color], label=f"{budget:,} tokens a step")
    front = [(row["p99_itl_ms"], row["output_throughput"], row["max_num_seqs"]) for row in rows if row["front"]]
    ax.plot(*list(zip(*front))[:2], "o", ms=11, mfc="none", mec=common.COLORS["ink"], label="on the front")
    for x, y, seats in front:
        ax.annotate(f"{seats} seats", (x, y), (-9, 1), textcoords="offset points", ha="right", fontsize=8.5)
    ax.axvline(TUNE_LIMIT, color=common.COLORS["red"], lw=0.9, ls=":", label=f"limit: {TUNE_LIMIT:g} ms")
    ax.set(xscale="log", xlim=(19, 300), xticks=[20, 40, 80, 160], xticklabels=[20, 40, 80, 160],
           xlabel="P99 inter-token latency, ms", ylabel="output tokens/s", title="20 settings, one engine")  # fmt: skip
    ax.minorticks_off()
    ax.legend(loc="lower right", fontsize=8.5)
    return [*paths, common.save_figure(figure, folder, "06d_tune")]


# --- The story --------------------------------------------------------------------------------------------------------


def check_client() -> None:
    """The client that `bench` uses, on a virtual clock, against scripted truth: equal, not close."""
    prompts = [Prompt([i], 1, 9) for i in range(40)]
    arrivals = arrival_times(40, 50.0, random.Random(1))
    for script, what in ((Script(0.03, 0.005), "one token a chunk"), (Script(0.03, 0.02, 4), "four tokens a chunk")):
        records = drive_scripted(script.reply, prompts, arrivals)
        measured = [[r.scheduled, r.start, r.ttft, *r.itl, r.tpot] for r in records]
        n, itl, rounded = script.tokens_per_chunk, script.itl, lambda rows: [[round(x, 9) for x in row] for row in rows]
        truth = [[at, at, script.ttft, *[itl] * (8 // n), itl / n] for at in arrivals]
        common.check_equal(f"{what}: when 40 streams were sent, TTFT, ITL, TPOT: as scripted, to the nanosecond",
                           rounded(measured), rounded(truth))  # fmt: skip


async def load_own_server(seed: int) -> tuple[list[Record], list[float]]:
    """80 streams over real sockets to a scripted server in this process. Returns what the client saw, and by how much
    each silence between two chunks was longer here than at the server."""
    script, prompts = Script(0.030, 0.004), [Prompt([i], 1, 12) for i in range(80)]
    server, url = await start_server(script.reply)
    async with server, httpx.AsyncClient(timeout=None, trust_env=False) as client:
        await drive(client, Target(url, "m"), [Prompt([-1 - i], 1, 2) for i in range(16)], [0.0] * 16)  # connect
        records = await drive(client, Target(url, "m"), prompts, arrival_times(80, 80.0, random.Random(seed)))
    said = [b - a for i in range(80) for a, b in itertools.pairwise(script.stamps[str([i])])]
    return records, [ours - theirs for ours, theirs in zip((gap for r in records for gap in r.itl), said)]


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.command:
        if args.json:  # not after minutes
            common.stored_object(args.json)
        return args.run(args)
    machine, known, bench = common.start(args), facts(), {}
    offline.llama.check_context(args.model, 192 if args.bench else 48)
    common.heading("1. The loop that everybody writes first, and one that asks as users do")
    names = ("closed: ask again after the answer", "open: 25 requests a second")
    rows = [[name, x["completed"], *(f"{x[f'{rule}_e2el_ms']:,.0f} ms" for rule in ("median", "mean", "p99"))]
            for name, x in zip(names, known["omission"].values())]  # fmt: skip
    common.table(["20 s of a server that freezes for 2 s", "requests", "median", "mean", "P99"], rows)
    common.say(f"The same server; P99 differs by a factor of {known['factor']:.0f}. In the closed loop one request met "
               "the freeze,\nand those that others would have sent meanwhile were never asked.")  # fmt: skip

    common.heading("2. The instrument, on a clock that never waits")
    check_client()
    common.say("33 tokens in 9 chunks: ITL {mean_itl_ms:.0f} ms, TPOT {mean_tpot_ms:.0f} ms. Both are right, of chunks "
               "and of tokens".format(**known["chunks"]))  # fmt: skip

    common.heading("3. The instrument, over real sockets: 80 streams, 80 a second, TTFT 30 ms and ITL 4 ms by script")
    records, off = asyncio.run(load_own_server(args.seed))
    common.check_equal("all answers complete", [(r.error, r.output_tokens) for r in records], [("", 12)] * 80)
    print_result(summarize(records, None, (99,), metrics=("ttft", "tpot", "itl", "e2el")))
    bench["own_server"] = {f"p{p}_off_ms": percentile([1e3 * abs(gap) for gap in off], p) for p in (50, 99)}
    common.say("a gap between two chunks, here and where the server sent them, differs by {p50_off_ms:.2f} ms "
               "(median), {p99_off_ms:.2f} ms (P99)".format(**bench["own_server"]))  # fmt: skip

    common.heading("4. The real engine, offline: bench latency")
    model = ["--model", args.model] if args.model else []
    for batch, n_in, n_out in ((1, 32, 128), (8, 32, 128), (32, 128, 64)) if args.bench else ((4, 32, 16),):
        flags = f"--batch-size {batch} --input-tokens {n_in} --output-tokens {n_out} --num-iters-warmup 1 --num-iters "
        command = ["bench", "latency", *model, *flags.split(), "3" if args.bench else "2"]
        bench[f"latency_{batch}_{n_in}_{n_out}"] = latency_command(build_parser().parse_args(command))

    common.heading("5. An engine under load: lesson 04's scheduler on the clock of an 8B model on an H100")
    rows = [[f"{name} %", f"{x['theory']:.2f}", f"{x['mean']:.2f}", f"{x['longest']:.1f}"]
            for name, x in known["queue"].items()]  # fmt: skip
    common.table(["one seat, load", "mean wait by theory, in services", "simulated", "longest"], rows)
    common.check_equal("every wait of the three runs equals Lindley's recursion, to the microsecond",
                       [x["exact"] for x in known["queue"].values()], [True] * 3)  # fmt: skip
    common.say(describe(simulate(WIDGET_DEFAULT | {"rate": args.rate, "max_concurrency": args.max_concurrency})))

    common.heading(f"6. Tuning: 20 settings, P99 ITL at most {TUNE_LIMIT:g} ms")
    found = tune_simulated()
    shown = [i for i, row in enumerate(found["rows"]) if row["front"]]
    print_tune({"rows": [found["rows"][i] for i in shown], "best": shown.index(found["best"])}, {"itl": TUNE_LIMIT},
               "output_throughput", 99)  # fmt: skip
    common.say(f"{len(found['rows']) - len(shown)} are not shown: for each, another gives more tokens at no higher ITL")
    if args.bench:
        common.heading("7. Tuning the real engine: 48 requests of about 96 + 24 tokens, all at once")
        grid = "--max-num-seqs 4,16,48 --max-num-batched-tokens 256,1024 --num-prompts 48 --limit itl:500"
        command = ["tune", *model, *grid.split(), "--input-tokens", "96", "--output-tokens", "24"]
        bench["tune"] = tune_command(build_parser().parse_args(command))
    if args.figure:
        draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": known, "bench": bench})


if __name__ == "__main__":
    common.run(main)

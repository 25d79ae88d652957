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

import asyncio
import contextlib
import functools
import itertools
import json
import math
import random
import re
import selectors
import statistics
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import llama
from lab.bench import add_bench_commands, print_result
from lab.load_generator import Target, drive
from lab.records import Record, concurrency, percentile, summarize
from lab.simulated_engine import Run, StepCost, run_simulated
from lab.tuning import latency_command, print_tune, tune, tune_command
from lab.workload import AZURE, Prompt, arrival_times, random_length, table_mean

KEY = "06d_load_generator"


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


# What a request looked like and how that is summed up is in lab/records.py; when requests are due, in lab/workload.py;
# the client that sends them, in lab/load_generator.py; `bench` and `tune`, in lab/bench.py and lab/tuning.py.


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


# --- An engine on a clock (lab/simulated_engine.py), held against theory ----------------------------------------------


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
    llama.check_context(args.model, 192 if args.bench else 48)
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

    common.heading("5. An engine under load: the engine's scheduler on the clock of an 8B model on an H100")
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

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
import itertools
import json
import random
import re
import selectors
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine import arguments
from engine.model import loader
from lab import cli, recorded
from lab.bench import add_bench_commands, print_result
from lab.load_generator import Target, drive
from lab.records import Record, percentile, summarize
from lab.simulated_engine import StepCost, run_simulated
from lab.tuning import latency_command, print_tune, tune
from lab.workload import Prompt, arrival_times, random_length

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
                found = re.search(rb"(?i)content-length: *(\d+)", head)
                assert found, "every request here has a body"
                body = json.loads(await reader.readexactly(int(found[1])))
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


def drive_scripted(
    reply: Callable[[dict], AsyncIterator[bytes]],
    prompts: Sequence[Prompt],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    **target: Any,
) -> list[Record]:
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
    return {
        "theory": load / (2 * (1 - load)),
        "mean": statistics.fmean(waits) / service,
        "count": count,
        "longest": max(waits) / service,
        "exact": waits == lindley,
    }


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
        common.check_equal(
            f"{what}: when 40 streams were sent, TTFT, ITL, TPOT: as scripted, to the nanosecond",
            rounded(measured),
            rounded(truth),
        )


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


SEATS, INPUT, OUTPUT = 16, 512, 16  # of the simulated engine, and of each of its requests


def simulated_load(rate: int, max_concurrency: int, seed: int) -> list[Record]:
    """80 equal requests at `rate` a second on the engine's clock; 0: an open loop."""
    arrivals = [round(1e6 * at) for at in arrival_times(80, rate, random.Random(seed))]
    return run_simulated([Prompt([], INPUT, OUTPUT)] * 80, arrivals, SEATS, max_concurrency=max_concurrency).records


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument(
        "--rate",
        type=arguments.number(int, 1, 1000),
        default=40,
        metavar="N",
        help="requests a second in step 5; 60 are more than it can serve (default %(default)s)",
    )
    p.add_argument(
        "--max-concurrency",
        type=arguments.number(int, 0, 64),
        default=0,
        metavar="N",
        help="close the loop of step 5; 0 is open (default %(default)s)",
    )
    add_bench_commands(p.add_subparsers(dest="command", metavar="bench|tune"))
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.command:
        if args.json:  # not after minutes
            recorded.stored_object(args.json)
        return args.run(args)
    cli.start(args)
    loader.check_context(args.model, 192 if args.bench else 48)
    common.heading("1. The loop that everybody writes first, and one that asks as users do")
    found = {
        "closed: ask again after the answer": closed_loop(freezing_server(), 20_000),
        "open: 25 requests a second": open_loop(freezing_server(), 20_000, every=40),
    }
    latencies = {name: [ms for _, ms in requests] for name, requests in found.items()}
    rows = [
        [name, len(ms), *(f"{x:,.0f} ms" for x in (statistics.median(ms), statistics.fmean(ms), percentile(ms, 99)))]
        for name, ms in latencies.items()
    ]
    common.table(["20 s of a server that freezes for 2 s", "requests", "median", "mean", "P99"], rows)
    closed, opened = (percentile(ms, 99) for ms in latencies.values())
    common.say(
        f"The same server; P99 differs by a factor of {opened / closed:.0f}. In the closed loop one request met "
        "the freeze,\nand those that others would have sent meanwhile were never asked."
    )

    common.heading("2. The instrument, on a clock that never waits")
    check_client()
    four = summarize(drive_scripted(Script(0.05, 0.04, 4).reply, [Prompt([1] * 9, 9, 33)], [0.0]))
    common.say(
        "33 tokens in 9 chunks: ITL {mean_itl_ms:.0f} ms, TPOT {mean_tpot_ms:.0f} ms. Both are right, of chunks "
        "and of tokens".format(**four)
    )

    common.heading("3. The instrument, over real sockets: 80 streams, 80 a second, TTFT 30 ms and ITL 4 ms by script")
    records, off = asyncio.run(load_own_server(args.seed))
    common.check_equal("all answers complete", [(r.error, r.output_tokens) for r in records], [("", 12)] * 80)
    print_result(summarize(records, None, (99,), metrics=("ttft", "tpot", "itl", "e2el")))
    median, worst = (percentile([1e3 * abs(gap) for gap in off], p) for p in (50, 99))
    common.say(
        f"a gap between two chunks, here and where the server sent them, differs by {median:.2f} ms "
        f"(median), {worst:.2f} ms (P99)"
    )

    common.heading("4. The real engine, offline: bench latency")
    flags = "--batch-size 4 --input-tokens 32 --output-tokens 16 --num-iters-warmup 1 --num-iters 2"
    command = ["bench", "latency", *flags.split(), *(["--model", args.model] if args.model else [])]
    latency_command(build_parser().parse_args(command))

    common.heading("5. An engine under load: the engine's scheduler on the clock of an 8B model on an H100")
    queues = {load: queue_at(load / 100, 1000) for load in (50, 80, 95)}
    common.table(["one seat, load", "mean wait by theory, in services", "simulated", "longest"], [
        [f"{load} %", f"{x['theory']:.2f}", f"{x['mean']:.2f}", f"{x['longest']:.1f}"] for load, x in queues.items()
    ])  # fmt: skip
    common.check_equal(
        "every wait of the three runs equals Lindley's recursion, to the microsecond",
        [x["exact"] for x in queues.values()],
        [True] * 3,
    )
    limit = f"at most {args.max_concurrency} at a time" if args.max_concurrency else "an open loop"
    common.say(f"80 requests of {INPUT} + {OUTPUT} tokens, {args.rate} a second, {limit}; {SEATS} seats:")
    found = summarize(simulated_load(args.rate, args.max_concurrency, args.seed))
    for name, since in (("e2el", "it was sent"), ("e2el_including_client_queue", "the user asked")):
        common.say(f"  latency since {since:<14}  mean {found[f'mean_{name}_ms']:,.0f} ms, "
                   f"P99 {found[f'p99_{name}_ms']:,.0f} ms")  # fmt: skip
    if found["mean_e2el_including_client_queue_ms"] > 1.5 * found["mean_e2el_ms"]:
        common.say("HIDDEN: the latency looks fine because requests queue in the client, where nobody counts.")

    common.heading("6. Tuning it: 96 requests of about 512 + 32 tokens at once, P99 ITL at most 40 ms")
    rng, limits = random.Random(args.seed), {"itl": 40.0}
    prompts = [Prompt([], random_length(rng, 512, 0.5), random_length(rng, 32, 0.5)) for _ in range(96)]

    def measure(*setting: Any) -> Any:
        return summarize(run_simulated(prompts, [0] * 96, *setting).records)

    print_tune(tune(measure, (4, 16, 64), (1024, 2048, 8192), limits), limits, "output_throughput", 99)
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

"""06e · The asynchronous engine: a thousand clients, one loop that must never wait.

The question: an engine's step keeps a processor busy for tens of milliseconds. A server has a thousand open streams,
and every one of them wants attention now. Where does the engine run, and how do tokens travel from it to them?

The mechanism:
  1. One event loop holds all streams. Each is a task that waits; waiting costs memory, and no thread.
  2. The engine core runs in a process of its own: a loop that takes letters between steps and sends what steps bring.
  3. The front end (validate, tokenize, detokenize, stop strings) stays with the event loop: 04b's `LLMEngine`, with
     a mailbox for a core.
  4. One task reads the engine's letters and puts each request's news into its `RequestOutputCollector`.
  5. Back-pressure in three places. A slow reader: its news is merged, and nobody waits for it. Too many requests: they
     are refused on arrival. A slow front end: the socket fills, and the engine waits.
  6. A client that leaves is an ABORT letter; its blocks are free before the next step.
  7. An engine that dies closes its socket. Everybody who waits hears of it at once.

Numbers to remember: in 2024, vLLM spent 33 % of its time on HTTP, 29 % on scheduling and 38 % on the GPU, one after the
other (Llama-3-8B, H100). Three places that overlap are 2.6 times as fast as one that takes turns.

How to run:
  uv run python -m vllm.tours.06e_async_engine                       the whole story
  uv run python -m vllm.tours.06e_async_engine --clients 16          more streams
  uv run python -m vllm.tours.06e_async_engine --place event-loop    break it: the loop is late by whole steps
  uv run python -m vllm.tours.06e_async_engine --bench               a minute: longer runs, more streams

Read for this: vLLM 0.32 `v1/engine/async_llm.py`, `v1/engine/core.py`, `v1/engine/core_client.py`,
`v1/engine/output_processor.py`; vLLM's blogs on v0.6.0 (September 2024) and V1 (January 2025).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from engine import arguments
from engine.errors import EngineDeadError
from engine.front_end import CompletionOutput, RequestOutput
from engine.llm_engine import LLMEngine
from engine.model import folders, loader
from engine.model.tokenizer import Tokenizer
from engine.request import SamplingParams
from engine.serving.async_llm import AsyncLLM
from engine.serving.clients import CLIENTS
from engine.serving.collector import RequestOutputCollector
from lab import cli
from lab.small_engine import MAX_MODEL_LEN, make_small_engine

KEY = "06e_async_engine"


# --- What we want, without cleverness ---------------------------------------------------------------------------------


def answer_blocking(engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams) -> list[str]:
    """What every client must have read in the end: one after the other, and nobody else is served meanwhile."""
    texts = []
    for prompt in prompts:
        engine.add_request("only", {"prompt_token_ids": prompt}, params)
        while not (heard := engine.step()):
            pass
        texts.append(heard[0].outputs[0].text)
    return texts


# --- Measuring the loop -----------------------------------------------------------------------------------------------


async def heartbeat(lateness: list[float], interval: float = 0.002) -> None:
    """Wake up every `interval` seconds, and note how late that was: what every task on this loop suffers."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval
        await asyncio.sleep(interval)
        lateness.append(loop.time() - due)


async def serve_clients(llm: AsyncLLM, prompts: Sequence[list[int]], params: SamplingParams) -> dict[str, Any]:
    """All prompts at once, streamed: texts, seconds, and how late the loop was meanwhile."""
    lateness, first = [], []

    async def client(i: int) -> str:
        text = ""
        async for output in llm.generate(f"client-{i}", {"prompt_token_ids": prompts[i]}, params, stream=True):
            if not text:
                first.append(time.perf_counter() - start)
            text += output.outputs[0].text
        return text

    beat = asyncio.create_task(heartbeat(lateness))
    await asyncio.sleep(0.02)
    lateness.clear()
    start = time.perf_counter()
    texts = await asyncio.gather(*map(client, range(len(prompts))))
    seconds = time.perf_counter() - start
    await asyncio.sleep(0)
    beat.cancel()
    return {"texts": texts, "seconds": seconds, "lateness": lateness, "first": first}


def wake_threads(consumers: int, rounds: int) -> tuple[float, float]:
    """A thread per stream, each waiting on its queue: seconds to create them, and per token handed over."""
    queues, done = [queue.SimpleQueue() for _ in range(consumers)], threading.Semaphore(0)

    def consume(mine: queue.SimpleQueue) -> None:
        while mine.get() is not None:
            done.release()

    start = time.perf_counter()
    threads = [threading.Thread(target=consume, args=(q,), daemon=True) for q in queues]
    for thread in threads:
        thread.start()
    created = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(rounds):
        for q in queues:
            q.put(1)
        for _ in queues:
            done.acquire()
    seconds = (time.perf_counter() - start) / rounds / consumers
    for q in queues:
        q.put(None)
    for thread in threads:
        thread.join()
    return created, seconds


def wake_tasks(consumers: int, rounds: int) -> tuple[float, float]:
    """A task per stream, each waiting on its collector: seconds to create them, and per token handed over."""

    async def consume(mine: RequestOutputCollector) -> None:
        while not (await mine.get()).finished:
            pass

    async def run() -> tuple[float, float]:
        start = time.perf_counter()
        collectors = [RequestOutputCollector(str(i)) for i in range(consumers)]
        tasks = [asyncio.create_task(consume(collector)) for collector in collectors]
        await asyncio.sleep(0)
        created = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(rounds):
            for collector in collectors:
                collector.put(RequestOutput("", None, [], [], False))
            while any(collector.output for collector in collectors):
                await asyncio.sleep(0)
        seconds = (time.perf_counter() - start) / rounds / consumers
        for collector in collectors:
            collector.put(RequestOutput("", None, [], [], True))
        await asyncio.gather(*tasks)
        return created, seconds

    return asyncio.run(run())


# --- A reader that is slower than the engine --------------------------------------------------------------------------

HANDOFFS = {"collector": "merge what waits", "queue": "keep every piece", "bounded queue": "make the engine wait"}
BOUND = 4  # pieces in the bounded queue


def slow_reader(handoff: str, step_ms: int, read_ms: int, tokens: int) -> dict[str, Any]:
    """An engine makes a token every `step_ms`; its reader needs `read_ms` for whatever it is given. Times in ms.

    `put_at` of each token, `reads` with the time of each, its tokens and what it left; and what came of it.
    """
    collector, pieces = RequestOutputCollector("reader"), collections.deque()

    def put(token: int) -> None:
        news = RequestOutput("reader", None, [], [CompletionOutput(0, "x", [token])], token == tokens - 1)
        collector.put(news) if handoff == "collector" else pieces.append(news)

    def take() -> list[int]:
        news = collector.get_nowait() if handoff == "collector" else pieces.popleft()
        assert news, "it is asked when something waits"
        return news.outputs[0].token_ids

    def waiting() -> tuple[int, int]:
        """Items, and tokens in them."""
        if handoff == "collector":
            news = collector.output
            return (1, len(news.outputs[0].token_ids)) if isinstance(news, RequestOutput) else (0, 0)
        return len(pieces), len(pieces)

    now = reader_free = produced = delivered = 0
    next_step, put_at, reads, most_items = step_ms, [], [], 0
    while delivered < tokens:
        full = handoff == "bounded queue" and len(pieces) == BOUND
        if produced < tokens and not full and (next_step <= reader_free or waiting()[0] == 0):
            now = max(now, next_step)
            put(produced)
            put_at.append(now)
            produced, next_step = produced + 1, now + step_ms
            most_items = max(most_items, waiting()[0])
        else:
            now = max(now, reader_free)
            got = take()
            reads.append({"at": now, "tokens": len(got), "left": waiting()[1]})
            reader_free, delivered = now + read_ms, delivered + len(got)
    read_at = [read["at"] for read in reads for _ in range(read["tokens"])]  # of each token
    return {
        "put_at": put_at,
        "reads": reads,
        "engine_done": put_at[-1],
        "reader_done": reader_free,
        "most_items": most_items,
        "engine_waited": put_at[-1] - step_ms * tokens,
        "oldest": max(read - put for read, put in zip(read_at, put_at)),
    }


# --- The story --------------------------------------------------------------------------------------------------------

TEXTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "Water boils at",
         "To make bread you need flour,"]  # fmt: skip


def of_lateness(lateness: Sequence[float]) -> dict[str, float]:
    """Milliseconds: median, 99th percentile and the worst."""
    ordered = sorted(lateness) or [0.0]

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3

    return {"median_ms": at(0.5), "p99_ms": at(0.99), "max_ms": ordered[-1] * 1e3}


async def measure_place(
    place: str, args: argparse.Namespace, prompts: Sequence[list[int]], params: SamplingParams, rounds: int
) -> dict[str, Any]:
    """Serve the same clients from an engine in one place."""
    start = time.perf_counter()
    llm = await AsyncLLM.start(
        make_small_engine, {"model": args.model, "seed": args.seed}, folders.model_folder(args.model), place
    )
    try:
        started = time.perf_counter() - start
        await serve_clients(llm, prompts[:2], dataclasses.replace(params, max_tokens=3))  # warm up
        runs = [await serve_clients(llm, prompts, params) for _ in range(rounds)]
        late = [x for run in runs for x in run["lateness"]]
        assert params.max_tokens
        tokens = len(prompts) * params.max_tokens
        assert (await llm.call_utility("check_idle"))["owned_blocks"] == 0
        return {
            "texts": runs[0]["texts"],
            "start_s": started,
            **of_lateness(late),
            "tokens_per_second": tokens / statistics.median(run["seconds"] for run in runs),
            "first_ms": statistics.median(x for run in runs for x in run["first"]) * 1e3,
        }
    finally:
        await llm.shutdown()


async def kill_the_engine(args: argparse.Namespace, prompts: Sequence[list[int]]) -> tuple[int, float]:
    """Kill the engine process while everybody waits. Returns how many heard of it, and seconds until the last did."""
    llm = await AsyncLLM.start(
        make_small_engine, {"model": args.model, "seed": args.seed}, folders.model_folder(args.model)
    )
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)  # nobody finishes before the blow

    async def client(i: int) -> float:
        with contextlib.suppress(EngineDeadError):
            async for _ in llm.generate(str(i), {"prompt_token_ids": prompts[i]}, params):
                raise common.CheckFailed("a request finished although the engine was killed")
        return time.perf_counter()

    tasks = [asyncio.create_task(client(i)) for i in range(len(prompts))]
    await asyncio.sleep(0.3)
    killed = time.perf_counter()
    llm.client.process.kill()
    heard = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    await llm.shutdown()
    return len(heard), max(heard) - killed


def compare_places(
    args: argparse.Namespace, prompts: Sequence[list[int]], max_tokens: int, rounds: int
) -> dict[str, Any]:
    """The same streams from an engine in each place, `--place` or all; raises CheckFailed where a text differs."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    reference = answer_blocking(make_small_engine({"model": args.model, "seed": args.seed}), prompts[:2], params)
    who, rows, places = "the first two clients" if len(reference) > 1 else "the client", [], {}
    for place in CLIENTS if args.place == "all" else [args.place]:
        found = asyncio.run(measure_place(place, args, prompts, params, rounds))
        common.check_equal(
            f"{place}: {who} read what a blocking loop wrote", found.pop("texts")[: len(reference)], reference
        )
        places[place.replace("-", "_")] = found
        rows.append([place, f"{found['start_s']:.1f} s", f"{found['tokens_per_second']:.0f}",
                     *(f"{found[name]:.1f} ms" for name in ("median_ms", "p99_ms", "max_ms"))])  # fmt: skip
    common.table(["engine in / on", "start", "tokens/s", "loop late: median", "P99", "worst"], rows)
    return places


def compare_waking(streams: int, rounds: int) -> dict[str, Any]:
    """What it costs to have somebody wait, and to hand them a token: as threads and as tasks."""
    rows, found = [], {}
    for name, wake in (("threads", wake_threads), ("tasks", wake_tasks)):
        created, seconds = wake(streams, rounds)
        found[name] = {"streams": streams, "create_us": created / streams * 1e6, "hand_over_us": seconds * 1e6}
        rows.append([name, f"{created / streams * 1e6:.0f} µs", f"{seconds * 1e6:.1f} µs"])
    common.table(["", "to create one", "to hand one a token"], rows)
    return found


def tell_of_death(args: argparse.Namespace, prompts: Sequence[list[int]]) -> float:
    """Milliseconds from the kill until the last client knows; raises CheckFailed if one never does."""
    heard, seconds = asyncio.run(kill_the_engine(args, prompts))
    common.check_equal("every client got an error", heard, len(prompts))
    common.say(f"the last of them {seconds * 1e3:.0f} ms after the kill")
    return seconds * 1e3


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument(
        "--clients",
        type=arguments.number(int, 1, 32),
        default=8,
        metavar="N",
        help="streams at once in step 1 (default %(default)s)",
    )
    p.add_argument("--place", choices=("all", *CLIENTS), default="all", help="where the engine runs in step 1")
    p.add_argument("--handoff", choices=tuple(HANDOFFS), default="collector", help="of step 2 (default %(default)s)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    loader.check_context(args.model, MAX_MODEL_LEN)

    common.heading(f"1. Where the engine runs: {args.clients} stream{'s' * (args.clients > 1)}, a heartbeat every 2 ms")
    tokenizer = Tokenizer(folders.model_folder(args.model))
    prompts = [tokenizer.encode(TEXTS[i % len(TEXTS)]) for i in range(args.clients)]
    compare_places(args, prompts, max_tokens=8, rounds=1)

    common.heading("2. A reader that is slower than the engine: a token every 20 ms, 100 ms for each read")
    found = {handoff: slow_reader(handoff, step_ms=20, read_ms=100, tokens=32) for handoff in HANDOFFS}
    common.table(["hand-off", "engine done", "reader done", "most items", "oldest news"], [
        [name, f"{x['engine_done']} ms", f"{x['reader_done']} ms", x["most_items"], f"{x['oldest']} ms"]
        for name, x in found.items()
    ])  # fmt: skip
    reads = [read["tokens"] for read in found[args.handoff]["reads"]]
    common.say(f"{args.handoff} ({HANDOFFS[args.handoff]}): 32 tokens in {len(reads)} reads, of "
               f"{', '.join(map(str, reads[:8]))}{', …' if len(reads) > 8 else ''}; "
               f"the engine waited {found[args.handoff]['engine_waited']} ms")  # fmt: skip

    common.heading("3. 256 waiting streams: a thread each, or a task each")
    compare_waking(streams=256, rounds=5)

    if args.place == "process":
        common.heading("4. The engine dies while everybody waits")
        tell_of_death(args, prompts)
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

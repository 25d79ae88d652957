"""`bench` and `tune`: a server under load, measured from outside, and the flags of both commands.

Owns the report; called by `python -m vllm`, by lesson 06 and by the tour 06d. It never starts a server.
vLLM: `vllm/benchmarks/serve.py`, `vllm/entrypoints/cli/benchmark/`.
"""

from __future__ import annotations

import common

import argparse
import asyncio
import math
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from engine import arguments
from engine.llm import progress_bar
from lab import recorded
from lab.load_generator import Target, drive
from lab.records import METRICS, Record, summarize
from lab.tuning import latency_command, parse_limits, tune_command
from lab.workload import AZURE, arrival_times, make_prompts


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
    headers = {b"Authorization": os.fsencode(f"Bearer {args.api_key}")} if args.api_key else {}
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
    metrics = ["ttft", "tpot", "itl", "e2el"]
    if args.max_concurrency:
        metrics.append("client_queue_time")
        if math.isfinite(args.request_rate):  # all at once, there is no time at which a user asked
            metrics.append("e2el_including_client_queue")
    result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": model,
        "num_prompts": len(prompts),
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        **summarize(records, None, args.metric_percentiles, goodput, metrics),
        "max_lateness_ms": None if args.max_concurrency else 1e3 * max(r.client_queue_time for r in records),
    }
    return result, records


def print_result(result: dict[str, Any], goodput: Sequence[str] = ()) -> None:
    """The report: what was answered, how long it took, and whether the books balance."""
    names = [name for name in METRICS if f"mean_{name}_ms" in result]
    columns = ["mean", "median", *(key.split("_")[0] for key in result if re.fullmatch(r"p[\d.]+_ttft_ms", key))]

    def ms(value: float | None) -> str:
        return "–" if value is None else f"{value:,.1f}"

    rows = [[METRICS[name], *(ms(result[f"{column}_{name}_ms"]) for column in columns)] for name in names]
    common.table(["milliseconds", *(c.upper() if c[0] == "p" else c for c in columns)], rows)
    lost = "".join(f"; {n} x {name}" for name, n in result["failures"].items())
    rate, e2el = result["request_throughput"], result["mean_e2el_ms"]
    little = f"; Little: {rate:.2f}/s x {e2el / 1e3:.4f} s = {rate * e2el / 1e3:.2f}" if e2el else ""
    common.say(
        f"{result['completed']} answered, {result['failed']} failed{lost}; in {result['duration']:.2f} s\n"
        f"{rate:.2f} requests/s, {result['output_throughput']:,.0f} output tokens/s "
        f"({result['max_output_tokens_per_s']:,.0f} in the best second), "
        f"{result['total_token_throughput']:,.0f} with prompts\n"
        f"in flight: {result['mean_concurrency']:.2f} on average, {result['max_concurrent_requests']} at most"
        f"{little}"
    )
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
        recorded.merge_json(args.json, "bench", result)
    if not result["completed"]:
        raise common.CheckFailed(f"no request was answered: {result['failures']}")


SOME = arguments.number(int, 1, 10**6)  # more prompts, tokens or runs than that are a slip of the hand
SOME_OR_NONE = arguments.number(int, 0, 10**6)


def rate_or_inf(text: str) -> float:
    """An argparse type: inf, or a number of at least a thousandth: a request in 17 minutes is slow enough."""
    return math.inf if text == "inf" else arguments.number(float, 0.001)(text)


def items(parse: Callable[[str], Any]) -> Callable[[str], list]:
    """An argparse type: several, separated by commas."""
    return lambda text: [parse(part) for part in text.split(",")]


def add_bench_commands(subparsers: Any) -> None:
    """Add `bench` (vLLM's `bench serve`), `bench latency` and `tune`; each sets `run`, a function of the arguments."""
    bench = subparsers.add_parser("bench", help="load a server, or time one batch", description=bench_command.__doc__)
    kinds = bench.add_subparsers(dest="what", metavar="latency")
    latency = kinds.add_parser("latency", help="seconds for one batch, without a server")
    search = subparsers.add_parser("tune", help="search max_num_seqs x max_num_batched_tokens")
    for parser, run in ((bench, bench_command), (latency, latency_command), (search, tune_command)):
        parser.add_argument("--model", metavar="PATH_OR_ID", help="as everywhere; with a URL: the name to ask for")
        parser.add_argument("--seed", type=arguments.number(int, 0, 2**31 - 1), default=0)
        parser.add_argument("--json", metavar="FILE", help="merge the result into FILE")
        parser.set_defaults(run=run)
    add_load_flags(bench.add_argument)
    add_latency_flags(latency.add_argument)
    add_tune_flags(search.add_argument)


def add_load_flags(add: Callable[..., Any]) -> None:
    """What `bench` sends, where to and how fast."""
    add("--base-url", type=arguments.url, default="http://127.0.0.1:8000", metavar="URL")
    add("--backend", choices=("openai", "openai-chat"), default="openai", help="which API (default: completions)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY", help="default: $OPENAI_API_KEY")
    add("--request-rate", type=rate_or_inf, default=math.inf, metavar="R", help="requests a second (inf: all at once)")
    add("--burstiness", type=rate_or_inf, default=1.0, metavar="B", help="1 Poisson, below 1 bursts, inf a clock")
    add("--max-concurrency", type=arguments.number(int, 1), metavar="N", help="send no more at a time: closes the loop")
    add("--num-prompts", type=SOME, default=100, metavar="N")
    add("--num-warmups", "--warmup", type=SOME_OR_NONE, default=0, metavar="N", help="before the clock starts")
    add("--dataset-name", choices=("random", "custom", *AZURE), default="random")
    add("--dataset-path", metavar="FILE.jsonl", help='one {"prompt": …, "output_tokens": …} a line')
    add("--random-input-len", type=SOME, default=1024, metavar="N")
    add("--random-output-len", type=SOME, default=128, metavar="N")
    add("--random-range-ratio", type=arguments.number(float, 0, 1), default=0.0, metavar="R", help="uniform ± R")
    add(
        "--random-cv",
        type=arguments.number(float, 0, 100),
        default=0.0,
        metavar="CV",
        help="lognormal: deviation / mean",
    )
    add("--ignore-eos", action="store_true", help="answers of exactly the length asked for, where the server can")
    add("--goodput", nargs="+", metavar="NAME:MS", help="count requests within these limits: ttft, tpot, e2el")
    add(
        "--metric-percentiles",
        "--percentiles",
        type=items(arguments.number(float, 0, 100)),
        default=[99.0],
        metavar="P",
    )
    add("--request-timeout", type=arguments.number(float, 0.001), default=600.0, metavar="S", help="then it has failed")


def add_latency_flags(add: Callable[..., Any]) -> None:
    """The one batch of `bench latency`."""
    add("--input-tokens", "--input-len", type=SOME, default=32, metavar="N", help="of each prompt (default 32)")
    add("--output-tokens", "--output-len", type=SOME, default=128, metavar="N", help="of each answer (default 128)")
    add("--batch-size", type=SOME, default=8, metavar="N", help="prompts in the batch (default 8)")
    add("--num-iters", type=SOME, default=30, metavar="N", help="measured batches (default 30)")
    add("--num-iters-warmup", type=SOME_OR_NONE, default=10, metavar="N", help="batches before them (default 10)")


def add_tune_flags(add: Callable[..., Any]) -> None:
    """The grid of `tune`, the load that every setting gets, and the limits."""
    add("--max-num-seqs", type=items(SOME), default=[1, 4, 16, 64], metavar="N,N,…")
    add("--max-num-batched-tokens", type=items(SOME), default=[512, 2048], metavar="N,N,…")
    for name, default in (("--num-prompts", 64), ("--input-tokens", 128), ("--output-tokens", 32)):
        add(name, type=SOME, default=default, metavar="N", help=f"default {default}")
    add("--request-rate", type=rate_or_inf, default=math.inf, metavar="R", help="default inf: all at once")
    add("--limit", nargs="+", metavar="NAME:MS", help="what the winner must keep, of ttft tpot itl e2el")
    add("--limit-percentile", type=arguments.number(float, 0, 100), default=99.0, metavar="P")
    add("--goodput", nargs="+", metavar="NAME:MS", help="most requests within these, of ttft tpot e2el")
    add("--simulate", action="store_true", help="on the simulated engine: seconds, not minutes")


def main(argv: Sequence[str]) -> None:
    """`python -m vllm bench …` and `tune …`."""
    parser = arguments.Parser()
    add_bench_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(argv)
    if args.json:  # not after minutes
        recorded.stored_object(args.json)
    args.run(args)

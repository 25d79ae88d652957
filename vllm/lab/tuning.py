"""The engine without a server: one batch, timed; and a grid of settings, searched under limits.

Owns `bench latency` and `tune`; called by `bench`, which has their flags, and by the tour 06d. It never opens a socket.
vLLM: `vllm/benchmarks/latency.py`, `vllm/benchmarks/sweep/`.
"""

from __future__ import annotations

import common

import argparse
import itertools
import random
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engine.engine_args import EngineArgs
from engine.request import SamplingParams
from engine.serving.start import make_engine
from lab import recorded
from lab.records import Record, percentile, summarize
from lab.simulated_engine import run_simulated
from lab.workload import Prompt, arrival_times, random_ids, random_length

# --- The best setting under limits, and what it costs ----------------------------------------------------------------


def parse_limits(pairs: Sequence[str], flag: str, allowed: Sequence[str]) -> dict[str, float]:
    """["ttft:200", "tpot:50"] -> {"ttft": 200.0, "tpot": 50.0}, milliseconds. Raises InputError."""
    limits = {}
    for name, _, value in (pair.partition(":") for pair in pairs):
        if name not in allowed or not re.fullmatch(r"\d*\.?\d+", value) or float(value) == 0:
            raise common.InputError(
                f"{flag} {name}:{value}: must be NAME:MILLISECONDS, above 0, with NAME one of " + ", ".join(allowed)
            )
        limits[name] = float(value)
    return limits


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of (cost, gain): which no other costs no more and gains no less? Of equal ones, the first."""

    def beats(a: tuple, b: tuple) -> bool:
        return a[0] <= b[0] and a[1] >= b[1] and a != b

    return [
        point not in points[:i] and not any(beats(other, point) for other in points) for i, point in enumerate(points)
    ]


def tune(
    measure: Callable[[int, int], dict[str, Any]],
    seqs: Sequence[int],
    budgets: Sequence[int],
    limits: dict[str, float],
    gain: str = "output_throughput",
    p: float = 99,
) -> dict[str, Any]:
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


# --- What is measured: an engine in this process ----------------------------------------------------------------------


def build_engine(model: str | None, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> Any:
    """The engine as it is served; the pool is never the limit. No prefix cache: asking twice costs twice."""
    num_blocks = 2 + max_num_seqs * -(-max_model_len // 16)
    return make_engine(
        EngineArgs(
            model=model,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=False,
        )
    )


def engine_run(engine: Any, prompts: Sequence[Prompt], arrivals: Sequence[float]) -> list[Record]:
    """`drive` for an engine in this process: greedy, exactly `output_len` tokens each, no HTTP and no threads.
    A request that falls due while a step runs is added after it; its clock starts when it was due."""
    origin, due = time.perf_counter(), deque(range(len(prompts)))

    def clock() -> float:
        return time.perf_counter() - origin

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


def measure_latency(
    engine: Any,
    batch_size: int,
    input_tokens: int,
    output_tokens: int,
    num_iters: int,
    num_iters_warmup: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Seconds to answer one batch, start to end, with vLLM's keys; and what they are made of. New prompts each time."""
    rng, latencies, records = random.Random(seed), [], []
    for i in range(num_iters_warmup + num_iters):
        ids = [random_ids(rng, input_tokens, engine.model.config.vocab_size) for _ in range(batch_size)]
        run = engine_run(engine, [Prompt(x, input_tokens, output_tokens) for x in ids], [0.0] * batch_size)
        if i >= num_iters_warmup:
            latencies.append(max(r.end for r in run))
            records += run
    parts, average = summarize(records, percentiles=(), metrics=("ttft", "tpot")), statistics.fmean(latencies)
    return {
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in (10, 25, 50, 75, 90, 99)},
        "median_ttft_ms": parts["median_ttft_ms"],
        "median_tpot_ms": parts["median_tpot_ms"],
        "output_throughput": batch_size * output_tokens / average,
    }


# --- The commands -----------------------------------------------------------------------------------------------------


def latency_command(args: argparse.Namespace) -> dict[str, Any]:
    """`bench latency`: one batch, offline."""
    batch, n_in, n_out = args.batch_size, args.input_tokens, args.output_tokens
    engine = build_engine(args.model, n_in + n_out, batch, max(n_in + n_out, batch * n_in))
    found = measure_latency(engine, batch, n_in, n_out, args.num_iters, args.num_iters_warmup, args.seed)
    common.say(
        f"{batch} x ({n_in} in, {n_out} out): {found['avg_latency']:.3f} s on average of {args.num_iters} runs, "
        f"P99 {found['percentiles']['99']:.3f} s; {found['output_throughput']:.0f} tokens/s\n"
        f"first tokens after {found['median_ttft_ms']:.0f} ms"
        + (f", {tpot:.1f} ms per further token" if (tpot := found["median_tpot_ms"]) else "")
    )
    if args.json:
        recorded.merge_json(args.json, "bench latency", {"machine": common.machine(), **found})
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
        recorded.merge_json(args.json, "tune", {"simulated": args.simulate, "machine": common.machine(), **found})
    return found


def print_tune(found: dict[str, Any], limits: dict[str, float], gain: str, p: float) -> None:
    """The grid as a table, and the winner as flags."""
    best, rows = found["best"], []
    for i, row in enumerate(found["rows"]):
        setting = f"{row['max_num_seqs']} x {row['max_num_batched_tokens']:,}"
        if "refused" in row:
            rows.append([setting, *["–"] * 4, "refused"])
            continue
        mark = "best" if i == best else "over the limit" if not row["within"] else "front" if row["front"] else ""
        goodput = "–" if row["request_goodput"] is None else f"{row['request_goodput']:.1f}"
        latencies = (f"{row[f'p{p:g}_{name}_ms'] or 0:,.0f} ms" for name in ("ttft", "itl"))
        rows.append([setting, f"{row['output_throughput']:,.0f}", goodput, *latencies, mark])
    common.table(["seats x budget", "tokens/s", "goodput/s", f"P{p:g} TTFT", f"P{p:g} ITL", ""], rows)
    for reason in sorted({row["refused"] for row in found["rows"] if "refused" in row}):
        common.say(f"refused: {reason}")
    wish = " and ".join(f"P{p:g} {name} ≤ {limit:g} ms" for name, limit in limits.items()) or "no limit"
    flags = "nothing"
    if best is not None:
        row = found["rows"][best]
        flags = f"--max-num-seqs {row['max_num_seqs']} --max-num-batched-tokens {row['max_num_batched_tokens']}"
    common.say(f"Most {gain.replace('_', ' ')} under {wish}: {flags}")

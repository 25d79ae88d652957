"""What `lessons/06d_load_generator.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import asyncio
import functools
import itertools
import math
import random
from bisect import bisect_left
from pathlib import Path
from typing import Any

from engine import registry
from lab import figures
from lab.parameters import checked
from lab.records import Record, concurrency, percentile, summarize
from lab.simulated_engine import Run, StepCost, run_simulated
from lab.tuning import latency_command, tune, tune_command
from lab.workload import AZURE, Prompt, arrival_times, random_length, table_mean

KEY = "06d_load_generator"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

REQUESTS, INPUT, OUTPUT = 80, 512, 16
WIDGET_CHOICES = {"rate": [5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 80],  # requests per second
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
    params = checked(params, WIDGET_CHOICES)
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

    def ms(values: Any) -> Any:
        return f"mean {sum(values) // n // 1000:,} ms, P99 {percentile(values, 99) / 1e3:,.0f} ms"

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


# --- The grid of settings ---------------------------------------------------------------------------------------------

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

    def measure(*setting: Any) -> Any:
        return summarize(run(*setting).records, goodput=TUNE_GOODPUT if rate else None)

    gain, limits = ("request_goodput", {}) if rate else ("output_throughput", {"itl": TUNE_LIMIT})
    return tune(measure, TUNE_SEATS, TUNE_BUDGETS, limits, gain)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

UNTIL, EVERY = 20_000, 40  # ms: twenty seconds, 25 requests a second, half of what the freezing server can do
RATES = (5, 10, 20, 25, 30, 35, 40, 45, 50, 60, 80)


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers; those of runs under the keys of `summarize`."""
    loops = {
        "closed": lesson.closed_loop(lesson.freezing_server(), UNTIL),
        "open": lesson.open_loop(lesson.freezing_server(), UNTIL, EVERY),
    }
    omission = {
        name: summarize([Record(at / 1e3, at / 1e3, (at + ms) / 1e3, [(at + ms) / 1e3]) for at, ms in found])
        for name, found in loops.items()
    }
    four = lesson.drive_scripted(lesson.Script(0.05, 0.04, 4).reply, [Prompt([1] * 9, 9, 33)], [0.0])
    free, busy = tune_simulated(), tune_simulated(TUNE_RATE)
    broken = simulate(WIDGET_DEFAULT | {"rate": 60, "max_concurrency": 8})["mean_us"]
    most = max(range(len(free["rows"])), key=lambda i: free["rows"][i]["output_throughput"])
    return {
        "omission": omission, "factor": omission["open"]["p99_e2el_ms"] / omission["closed"]["p99_e2el_ms"],
        "unseen": {str(n): 0.99**n for n in (20, 100, 300)},
        "needed": math.ceil(math.log(0.05) / math.log(0.99)),
        "chunks": summarize(four),
        "azure": {name.split("-")[1]: {side: {"ours": table_mean(table[side]), "published": table["mean"][side]}
                                       for side in ("input", "output")} for name, table in AZURE.items()},
        "queue": {str(share): lesson.queue_at(share / 100, 1000) for share in (50, 80, 95)},
        "alone_ms": StepCost().alone(Prompt([], INPUT, OUTPUT)) / 1e3, "cost": vars(StepCost()),
        "capacity": {str(n): capacity(n) for n in (1, 4, 16, 64)},
        "load": {str(rate): summarize(load(rate, 0, 16, count=160).records) for rate in RATES},
        "limited": {str(rate): summarize(load(rate, 8, 16, count=160).records) for rate in RATES},
        "broken": {"report_ms": broken[0] / 1e3, "users_ms": broken[1] / 1e3},
        "tune": {"settings": len(free["rows"]), "on_front": sum(row["front"] for row in free["rows"]),
                 "best": free["rows"][free["best"]], "most": free["rows"][most],
                 "goodput": busy["rows"][busy["best"]], "goodput_of_most": busy["rows"][most]},
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """What a closed loop does not see, and the front of the settings."""
    figure, axes = figures.new_figure(8.0, 3.9, nrows=2, ncols=2, sharex="col", width_ratios=[1.1, 1])
    frozen = [ms / 1e3 for ms in lesson.FREEZE]
    for ax, found, title, color in (
        (
            axes[0, 0],
            lesson.open_loop(lesson.freezing_server(), UNTIL, EVERY),
            "Open loop: 25 requests a second",
            "blue",
        ),
        (
            axes[1, 0],
            lesson.closed_loop(lesson.freezing_server(), UNTIL),
            "Closed loop: the next after each answer",
            "red",
        ),
    ):
        late = sum(ms > 100 for _, ms in found)
        ax.scatter(*([ms / 1e3 for ms in column] for column in zip(*found)), 9, figures.COLORS[color], lw=0)
        ax.axvspan(*frozen, color=figures.COLORS["light"], zorder=0)
        ax.text(9.2, 1.1, f"over 0.1 s:\n{late:,} of {len(found):,} requests", color=figures.COLORS[color])
        ax.set(
            ylabel="latency, s", xlim=(0, 20), ylim=(-0.15, 2.3), xticks=range(0, 21, 5), yticks=[0, 1, 2], title=title
        )
    axes[0, 0].text(sum(frozen) / 2, 0.3, "frozen", ha="center", fontsize=8.5)
    axes[1, 0].set(xlabel="sent at, s")
    for ax in axes[:, 1]:
        ax.remove()
    right = figure.add_subplot(axes[0, 1].get_gridspec()[:, 1])
    known, limit = facts(), facts()["capacity"]["16"]
    for which, name, style, label, color in (
        ("load", "e2el", "o-", "open loop", "blue"),
        ("limited", "e2el_including_client_queue", "o--", "at most 8, since asked", "orange"),
        ("limited", "e2el", "o-", "at most 8, since sent", "red"),
    ):
        seconds = [known[which][str(rate)][f"p99_{name}_ms"] / 1e3 for rate in RATES]
        right.plot(RATES, seconds, style, ms=4, color=figures.COLORS[color], label=label)
    right.axvline(limit, color=figures.COLORS["grey"], lw=0.8, ls=":")
    right.text(limit + 1, 0.06, "capacity,\n16 seats", fontsize=8.5, color=figures.COLORS["grey"])
    right.set(yscale="log", ylim=(0.05, 5), yticks=[0.1, 0.3, 1, 3], yticklabels=["0.1", "0.3", "1", "3"],
              xlabel="requests offered per second", ylabel="P99 latency, s", title="An engine under load")  # fmt: skip
    right.minorticks_off()
    right.legend(loc="upper left", fontsize=8.5)
    paths = [figures.save_figure(figure, folder, "06d_open_and_closed")]

    figure, ax = figures.new_figure(8.0, 3.6)
    rows = tune_simulated()["rows"]
    for budget, color in zip(TUNE_BUDGETS, ("blue", "orange", "green", "purple")):
        points = [(r["p99_itl_ms"], r["output_throughput"]) for r in rows if r["max_num_batched_tokens"] == budget]
        ax.plot(*zip(*points), "o-", ms=5, lw=0.9, color=figures.COLORS[color], label=f"{budget:,} tokens a step")
    front = [(row["p99_itl_ms"], row["output_throughput"], row["max_num_seqs"]) for row in rows if row["front"]]
    ax.plot(*list(zip(*front))[:2], "o", ms=11, mfc="none", mec=figures.COLORS["ink"], label="on the front")
    for x, y, seats in front:
        ax.annotate(f"{seats} seats", (x, y), (-9, 1), textcoords="offset points", ha="right", fontsize=8.5)
    ax.axvline(TUNE_LIMIT, color=figures.COLORS["red"], lw=0.9, ls=":", label=f"limit: {TUNE_LIMIT:g} ms")
    ax.set(xscale="log", xlim=(19, 300), xticks=[20, 40, 80, 160], xticklabels=[20, 40, 80, 160],
           xlabel="P99 inter-token latency, ms", ylabel="output tokens/s", title="20 settings, one engine")  # fmt: skip
    ax.minorticks_off()
    ax.legend(loc="lower right", fontsize=8.5)
    return [*paths, figures.save_figure(figure, folder, "06d_tune")]


# --- What `--bench` measures ------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """How far the client is off over real sockets, and the real engine's latency and best settings: minutes."""
    bench, model = {}, ["--model", args.model] if args.model else []
    _, off = asyncio.run(lesson.load_own_server(args.seed))
    bench["own_server"] = {f"p{p}_off_ms": percentile([1e3 * abs(gap) for gap in off], p) for p in (50, 99)}
    common.heading("The real engine, offline: bench latency")
    for batch, n_in, n_out in ((1, 32, 128), (8, 32, 128), (32, 128, 64)):
        flags = f"--batch-size {batch} --input-tokens {n_in} --output-tokens {n_out} --num-iters-warmup 1 --num-iters 3"
        command = ["bench", "latency", *model, *flags.split()]
        bench[f"latency_{batch}_{n_in}_{n_out}"] = latency_command(lesson.build_parser().parse_args(command))
    common.heading("Tuning the real engine: 48 requests of about 96 + 24 tokens, all at once")
    grid = "--max-num-seqs 4,16,48 --max-num-batched-tokens 256,1024 --num-prompts 48 --limit itl:500"
    command = ["tune", *model, *grid.split(), "--input-tokens", "96", "--output-tokens", "24"]
    bench["tune"] = tune_command(lesson.build_parser().parse_args(command))
    return bench

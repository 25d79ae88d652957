"""What `lessons/11b_prediction.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
import math
from bisect import bisect_right
from pathlib import Path
from typing import Any

from engine import registry
from engine.config import SchedulerConfig
from lab import figures, recorded
from lab.parameters import checked
from lab.predict_command import fit_command, fit_parser
from lab.predict_setup import blocks_that_fit
from lab.prediction_report import read_llmservingsim
from lab.records import concurrency, percentile
from lab.step_time import StepWork, step_work

KEY = "11b_prediction"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

RATES = (2, 4, 6, 7, 8, 9, 10, 12)  # requests per second
WIDGET_CHOICES = {"rate": list(RATES), "max_num_seqs": [8, 16, 1024], "num_blocks": [1024, 4096, lesson.BLOCKS],
                  "seconds": [6, 12]}  # fmt: skip
WIDGET_DEFAULT = {"rate": 4, "max_num_seqs": 1024, "num_blocks": lesson.BLOCKS, "seconds": 12}
SLICE = 250_000  # µs between two looks at the queue
LIMIT = 1_000_000  # µs of TTFT


def p99(run: Any) -> int:
    """Microseconds to the first token, of the slowest percent."""
    return int(percentile(run.ttft, 99))


@functools.cache
def curve(max_num_seqs: int, num_blocks: int, seconds: int) -> tuple[tuple[int, int], ...]:
    """(median, P99) of the time to the first token at each rate, in microseconds."""
    runs = [lesson.serve(rate, max_num_seqs, num_blocks, seconds) for rate in RATES]
    return tuple((int(percentile(run.ttft, 50)), p99(run)) for run in runs)


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """One run of the engine on a clock, and the latencies at all rates beside it. Times are microseconds.

    `strip`: every quarter of a second, until no more requests come, [seats taken, waiting, blocks owned] since the last
    plan. Raises InputError.
    """
    p = checked(params, WIDGET_CHOICES)
    seats = p["max_num_seqs"]
    engine = seats, p["num_blocks"], p["seconds"]
    found, run = curve(*engine), lesson.serve(p["rate"], *engine)  # the curve has made this run, too
    planned = [step.scheduled for step in run.steps]
    strip = []
    for at in range(SLICE, p["seconds"] * 10**6 + 1, SLICE):
        step = run.steps[max(0, bisect_right(planned, at) - 1)]
        busy = planned[0] <= at
        strip.append([step.running, step.waiting, step.blocks] if busy else [0, 0, 0])
    waited = lesson.limits_of(run, seats)
    beyond = [rate for rate, (_, slow) in zip(RATES, found) if slow > LIMIT]
    spans = [(int(job.arrival), int(seen.times[-1])) for job, seen in zip(run.jobs, run.outcomes)]
    peak, area = concurrency(spans)
    return {
        "params": p, "rates": list(RATES), "curve": [list(pair) for pair in found],
        "leaves": beyond[0] if beyond else None,  # the first rate at which P99 is above a second
        "requests": len(run.jobs), "steps": len(run.steps), "end_us": int(run.steps[-1].end), "strip": strip,
        "p50_us": int(percentile(run.ttft, 50)), "p99_us": p99(run), "mean_us": sum(run.latency) // len(run.jobs),
        "area": area, "peak": peak, "limits_us": list(waited.values()), "preemptions": run.preemptions,
        "limit": max(waited, key=lambda name: waited[name]) if any(waited.values()) else None,
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state under the widget, as text."""
    p, n, strip = trace["params"], trace["requests"], trace["strip"]
    lines = [
        f"{n} requests in {p['seconds']} s, {p['rate']} a second; {p['max_num_seqs']:,} seats, "
        f"{p['num_blocks']:,} blocks; {trace['steps']} steps",
        f"to the first token: median {trace['p50_us'] / 1e6:.2f} s, P99 {trace['p99_us'] / 1e6:.2f} s",
        f"in flight: {1e6 * n / trace['end_us']:.2f}/s x {trace['mean_us'] / 1e6:.2f} s = "
        f"{trace['area'] / trace['end_us']:.1f} on average, {trace['peak']} at most",
    ]
    for name, column in (("seats taken", 0), ("waiting", 1), ("blocks owned", 2)):
        top = max(row[column] for row in strip)
        bars = "".join(" ▁▂▃▄▅▆▇█"[-(-8 * row[column] // max(top, 1))] for row in strip)
        lines.append(f"{name:<13}{top:>6,} |{bars.rstrip()}")
    half, last = strip[len(strip) // 2 - 1][1], strip[-1][1]
    if trace["limit"] is None:
        lines.append("Nobody waits for anything but a step.")
    elif last > 2 * half and last > 4:
        lines.append(f"OVERLOADED, by {trace['limit']}: {half} wait after half of the time, {last} at the end.")
    else:
        lines.append(f"Whoever waits, waits for {trace['limit']}. The queue is {last} long at the end.")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

ENGINES: dict[str, dict[str, int]] = {"all": {}, "seats": {"max_num_seqs": 8}, "blocks": {"num_blocks": 1024}}
BATCHES = {
    "decode": [(1, 4096)], "decodes": [(1, 4096)] * 64, "prompt": [(4096, 4096)],
    "mixed": [(1, 4096)] * 64 + [(4096, 4096)],
}  # fmt: skip


def parts_of(chunks: list[tuple[int, int]]) -> dict[str, Any]:
    """Milliseconds of a step, part by part, and in all."""
    features = lesson.STEP.features(step_work(chunks))
    parts = {name: 1e3 * seconds for name, seconds in lesson.RATES.parts(features).items()}
    return parts | {"all": sum(parts.values())}


def if_steps_are_slower(rate: int, percent: int = 5) -> float:
    """How much longer P99 to the first token is then, as a share."""

    def slower(work: StepWork) -> int:
        return lesson.COST(work) * (100 + percent) // 100

    return p99(lesson.run_of(lesson.serve(rate).jobs, cost=slower)) / p99(lesson.serve(rate)) - 1


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers. Milliseconds for steps, seconds for latencies."""
    crowd, alone, calm = lesson.serve(12), lesson.serve(2), lesson.serve(8)
    tokens = sum(job.input_len + job.output_len for job in crowd.jobs)
    per_second = tokens * 1e6 / crowd.steps[-1].end
    last = crowd.jobs[-1]
    leaves = {name: simulate(WIDGET_DEFAULT | engine)["leaves"] for name, engine in ENGINES.items()}
    overload, short = simulate(WIDGET_DEFAULT | {"rate": 12}), simulate(WIDGET_DEFAULT | {"rate": 12, "seconds": 6})
    low, *_, high = lesson.band(6)
    limits = SchedulerConfig(lesson.COSTS.max_model_len, 1024, lesson.BUDGET)
    steps = {name: parts_of(chunks) for name, chunks in BATCHES.items()}
    recovered = {
        one.name: {"truth": one.truth, "fitted": one.fitted, "doubt": math.expm1(one.sigma)} for one in lesson.recover()
    }
    naive = lesson.naive_seconds(per_second, last.input_len, last.output_len)
    return {
        "naive": {
            "tokens_per_second": per_second, "seconds": naive, "factor": crowd.ttft[-1] / 1e6 / naive,
            "ttft": crowd.ttft[-1] / 1e6, "latency": crowd.latency[-1] / 1e6, "prompt": last.input_len,
            "alone": lesson.naive_seconds(per_second, *alone.jobs[-1][1:3]), "alone_latency": alone.latency[-1] / 1e6,
        },
        "cost": lesson.COST._asdict(), "steps": steps, "prompts_a_second": 1e3 / steps["prompt"]["all"],
        "p99": {name: {str(rate): p99(lesson.serve(rate, **engine)) / 1e6 for rate in RATES}
                for name, engine in ENGINES.items()},
        "leaves": leaves, "blocks": blocks_that_fit(lesson.STEP, lesson.CARD, limits, 16, 0.92),
        "little": {
            "rate": 1e6 * len(calm.jobs) / calm.steps[-1].end, "latency": sum(calm.latency) / len(calm.jobs) / 1e6,
            "inside": sum(calm.latency) / calm.steps[-1].end,
        },
        "overload": {"half": overload["strip"][23][1], "end": overload["strip"][-1][1],
                     "p99": overload["p99_us"] / 1e6, "p99_of_six": short["p99_us"] / 1e6},
        "recovered": recovered, "batches": len(lesson.BATCHES),
        "band": {"known": percentile(lesson.serve(6).latency, 99) / 1e6, "low": low, "high": high},
        "slower": {str(rate): if_steps_are_slower(rate) for rate in (4, 8, 9, 10)},
        "steps_at": {str(rate): len(lesson.serve(rate).steps) for rate in RATES},
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """Where the milliseconds of a step go, and what load does to three engines."""
    figure, (left, right) = figures.new_figure(8.0, 3.5, ncols=2, width_ratios=[1.1, 1])
    known = facts()
    names = {"decode": "1 decode", "decodes": "64 decodes", "prompt": "a prompt", "mixed": "64 decodes\nand a prompt"}
    parts = {"weights": "grey", "products": "orange", "cache": "blue", "attention": "purple", "rest": "light"}
    for row, step in enumerate(names):
        at, found = 0.0, known["steps"][step]
        found = found | {"rest": found["sequence"] + found["fixed"] + found["exchange"]}
        for part, color in parts.items():
            left.barh(row, found[part], 0.62, left=at, color=figures.COLORS[color], label=part if row == 0 else None)
            at += found[part]
        left.text(at + 2, row, f"{at:.1f}", va="center", fontsize=9)
    left.set(yticks=range(4), yticklabels=names.values(), xlim=(0, 128), xlabel="ms", title="A step, part by part")
    left.invert_yaxis()
    left.legend(loc="upper right", fontsize=8.5)
    for seconds, label, color in zip(
        known["p99"].values(), ("all of an H100", "8 seats", "1,024 blocks"), ("blue", "orange", "purple")
    ):
        right.plot(RATES, list(seconds.values()), "o-", ms=4, color=figures.COLORS[color], label=label)
    right.axhline(1, color=figures.COLORS["red"], lw=0.9, ls=":")
    right.set(ylim=(0, 8), xlim=(1, 13), xticks=RATES, xlabel="requests a second", ylabel="P99 to the first token, s",
              title="What load does")  # fmt: skip
    right.legend(loc="upper left", fontsize=8.5)
    return [figures.save_figure(figure, folder, "11b_load")]


# --- What `--bench` measures ------------------------------------------------------------------------------------------

LOGS = common.ROOT.parent / "shared" / "latency_logs"
RUNS = {"rtx4090": ("rtx4090_llama31_8b",), "rtxpro6000": ("rtxpro6000_qwen3_32b_tp2", "--gpu", "RTX PRO 6000")}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Fit to the first 100 requests of two runs of the real vLLM, and say how far all 300 are off. Without these logs,
    what was found when they were there stays."""
    if not LOGS.is_dir():
        common.say(f"SKIPPED: no {LOGS.name} beside this repository")
        return recorded.results(KEY).get("bench", {})
    bench = {}
    for name, (folder, *flags) in RUNS.items():
        common.heading(f"Held against the real vLLM: {folder}")
        found = fit_command(fit_parser().parse_args([str(LOGS / folder / "requests.jsonl"), *flags]))
        theirs = read_llmservingsim(LOGS / folder / "llmservingsim_summary.txt")
        doubt = {rate: math.expm1(sigma) for rate, sigma in found["sigma"].items()}  # as the table above has it
        bench[name] = {"errors": found["errors"], "doubt": doubt, "llmservingsim": theirs}
    return bench

"""Serves lessons/04_continuous_batching.md: the widget's simulation, facts, figures, and what `--bench` measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
import itertools
import math
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import registry
from engine.config import SchedulerConfig, VllmConfig
from engine.model import llama, loader
from engine.model.packed_linear import pack_weights
from engine.worker.assemble import make_runner
from engine.worker.model_runner import ModelRunner
from lab import figures, lengths
from lab.matrix_products import matmul_seconds
from lab.parameters import checked
from lab.peers import generate_with, load_transformers

KEY = "04_continuous_batching"
lesson = registry.lesson(KEY)

POLICIES = ("static", "continuous")


# --- A run of the scheduler -------------------------------------------------------------------------------------------


@dataclass
class Timeline:
    """Which request had which seat in which step. An output token takes a step."""

    lanes: list[list[int | None]]  # per step and seat: the request that computed something there
    waiting: list[int]  # per step: requests that have arrived and were not admitted
    arrival: list[int]

    @property
    def makespan(self) -> int:
        return len(self.lanes)

    @property
    def busy(self) -> int:
        """Seats used, summed over steps: equal to the output tokens."""
        return sum(request is not None for step in self.lanes for request in step)

    @property
    def utilisation(self) -> float:
        return self.busy / sum(map(len, self.lanes))

    @functools.cached_property
    def spans(self) -> list[list[int]]:
        """Of each request: seat, first step, and the step after its last."""
        found: dict[int, list[int]] = {}
        for step, row in enumerate(self.lanes):
            for seat, request in enumerate(row):
                if request is not None:
                    found.setdefault(request, [seat, step, step])[2] = step + 1
        return [found[i] for i in range(len(self.arrival))]

    @property
    def latencies(self) -> list[int]:
        return [finish - arrival for (_, _, finish), arrival in zip(self.spans, self.arrival)]


def timeline(
    policy: str,
    seats: int,
    outputs: Sequence[int],
    prompts: Sequence[int] | None = None,
    arrivals: Sequence[int] | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
) -> Timeline:
    """Drive the lesson's scheduler over requests of these lengths, without a model. By default: one-token prompts, all
    there at step 0, a pool that is never the limit. Arrivals are in order."""
    prompts, arrivals = prompts or [1] * len(outputs), list(arrivals or [0] * len(outputs))
    longest = max(p + n for p, n in zip(prompts, outputs))
    num_blocks = num_blocks or 2 + seats * -(-longest // block_size)
    config = SchedulerConfig(longest, seats, max_num_batched_tokens=max(longest, 1 << 20), enable_chunked_prefill=False)
    manager = lesson.KVCacheManager(num_blocks, block_size, longest)
    scheduler = lesson.Scheduler(config, manager, static=policy == "static")
    requests = lesson.make_requests([[0] * n for n in prompts], outputs, arrivals)
    batches = lesson.engine_loop(scheduler, lesson.no_model, requests).batches
    lanes = [[None if name is None else int(name) for name in row] for row in lesson.lanes(batches, seats)]
    run = Timeline(lanes, [], arrivals)
    started = [start for _, start, _ in run.spans]
    for step in range(run.makespan):
        run.waiting.append(sum(arrival <= step for arrival in arrivals) - sum(start <= step for start in started))
    return run


def lower_bound(seats: int, outputs: Sequence[int], arrivals: Sequence[int]) -> int:
    """No schedule ends earlier: a request needs a step for each token, and `seats` tokens are all that a step yields,
    so all tokens of the requests that arrive from t on need ⌈their sum/seats⌉ steps after t.

    For requests that are all there at step 0 it is max(longest, ⌈sum/seats⌉).
    """
    pairs = list(zip(arrivals, outputs))
    alone = max(arrival + n for arrival, n in pairs)
    return max(alone, *(t + -(-sum(n for arrival, n in pairs if arrival >= t) // seats) for t in set(arrivals)))


# --- The simulation behind the widget ---------------------------------------------------------------------------------

LENGTHS = {  # output tokens of each request, in order of arrival
    "stragglers": [8, 8, 8, 64] * 4,
    "stragglers, sorted": [8] * 12 + [64] * 4,
    "all equal": [32] * 16,
    "the article's": [10, 500, 200, 100],
    "giant last": [8] * 15 + [96],
    "geometric": [5, 24, 2, 41, 13, 7, 33, 1, 18, 9, 62, 3, 16, 28, 4, 11],  # drawn once, mean 17
}
ARRIVALS = {"together": 0, "one every 2 steps": 2, "one every 8 steps": 8}
SEATS = [1, 2, 3, 4, 6, 8]
WIDGET_DEFAULT = {"slots": 4, "lengths": "stragglers", "arrivals": "together"}
WIDGET_CHOICES = {"slots": SEATS, "lengths": list(LENGTHS), "arrivals": list(ARRIVALS)}


def simulate(params: dict) -> dict:
    """The Gantt charts of both policies on one workload, from the lesson's Scheduler. Raises InputError."""
    params = checked(params, WIDGET_CHOICES)
    outputs, seats = LENGTHS[params["lengths"]], params["slots"]
    arrivals = [i * ARRIVALS[params["arrivals"]] for i in range(len(outputs))]
    runs = {policy: timeline(policy, seats, outputs, arrivals=arrivals) for policy in POLICIES}
    return {"outputs": outputs, "arrivals": arrivals, "slots": seats} | {
        policy: {
            "steps": [{"slots": lanes, "waiting": waiting} for lanes, waiting in zip(run.lanes, run.waiting)],
            "spans": run.spans, "makespan": run.makespan, "busy": run.busy, "cells": seats * run.makespan,
            "bound": lower_bound(seats, outputs, arrivals),
            "latency_sum": sum(run.latencies), "latency_max": max(run.latencies),
        }
        for policy, run in runs.items()
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    outputs, bound = trace["outputs"], trace["static"]["bound"]
    lines = [f"{len(outputs)} requests, {sum(outputs)} output tokens, {trace['slots']} slots; "
             f"no schedule needs fewer than {bound} steps"]  # fmt: skip
    for policy in POLICIES:
        run = trace[policy]
        lines.append(f"{policy}: {run['makespan']} steps, {100 * run['busy'] // run['cells']} % of the slots in use; "
                     f"latency: mean {run['latency_sum'] // len(outputs)}, longest {run['latency_max']}")  # fmt: skip
        for slot in range(trace["slots"]):
            spans = [f"#{i} [{start}, {stop})" for i, (s, start, stop) in enumerate(run["spans"]) if s == slot]
            lines.append(f"  slot {slot}: {'  '.join(spans[:5])}{'  …' if len(spans) > 5 else ''}")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


def geometric(count: int, mean: float, seed: int) -> list[int]:
    """As many lengths, drawn as lesson 01 draws them: every step has the same chance to be the last."""
    rng, draw_one = random.Random(seed), lengths.geometric
    return [draw_one(rng, mean) for _ in range(count)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers; everything comes out of the lesson's Scheduler."""

    def both(*args: Any, **kwargs: Any) -> dict[str, Timeline]:
        return {policy: timeline(policy, *args, **kwargs) for policy in POLICIES}

    def brief(run: Timeline) -> dict[str, float]:
        return {"steps": run.makespan, "utilisation": run.utilisation}

    presets = {}
    for name, outputs in LENGTHS.items():
        runs = both(4, outputs)
        presets[re.sub(r"\W+", "_", name)] = {policy: brief(run) for policy, run in runs.items()} | {
            "bound": lower_bound(4, outputs, [0] * len(outputs)),
            "gain": runs["static"].makespan / runs["continuous"].makespan,
        }

    article = both(2, LENGTHS["the article's"])
    lengths, by_slots = geometric(512, 16, seed=0), {}
    for seats in (2, 4, 8, 16, 32):
        runs = both(seats, lengths)
        by_slots[str(seats)] = {policy: brief(run) for policy, run in runs.items()} | {
            "harmonic": 1 / sum(1 / k for k in range(1, seats + 1)),
            "gain": runs["static"].makespan / runs["continuous"].makespan,
            **{f"{policy}_mean": sum(run.latencies) / len(lengths) for policy, run in runs.items()},
            **{f"{policy}_p99": percentile(run.latencies, 0.99) for policy, run in runs.items()},
        }  # fmt: skip
    return {
        "article": {policy: brief(run) | {"spans": run.spans} for policy, run in article.items()},
        "presets": presets,
        "geometric": by_slots,
        "reserved": reserved_slots(),
    }


def reserved_slots() -> dict[str, Any]:
    """The same memory and requests, kept in blocks of 16 and in one reservation of `max_model_len` per sequence.

    A slot-based cache is a paged one whose block is as long as the longest sequence allowed. Lengths are as in the
    ShareGPT sample of the PagedAttention paper: 161 tokens in, 338 out on average.
    """
    prompts, outputs = geometric(96, 161, seed=1), geometric(96, 338, seed=2)
    max_model_len, tokens = 2048, 16384
    prompts, outputs = [min(p, 1024) for p in prompts], [min(n, 1023) for n in outputs]
    found: dict[str, Any] = {"pool_tokens": tokens, "max_model_len": max_model_len, "requests": len(prompts)}
    for name, block_size in (("paged", 16), ("reserved", max_model_len)):
        run = timeline("continuous", 96, outputs, prompts, num_blocks=tokens // block_size + 1, block_size=block_size)
        running = [sum(i is not None for i in lanes) for lanes in run.lanes]
        found[name] = {"steps": run.makespan, "most": max(running), "mean": sum(running) / len(running)}
    found["gain"] = found["reserved"]["steps"] / found["paged"]["steps"]
    return found


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The article's four requests as they really run, and what the number of slots does to static batching."""
    numbers = facts()
    figure, axes = figures.new_figure(8.0, 3.9, nrows=2, sharex=True)
    colors = [figures.COLORS[name] for name in ("orange", "blue", "green", "purple")]
    for ax, policy in zip(axes, POLICIES):
        found = numbers["article"][policy]
        for slot in range(2):
            ax.broken_barh(
                [(0, found["steps"])],
                (slot - 0.36, 0.72),
                facecolor="white",
                edgecolor=figures.COLORS["grey"],
                hatch="////",
                linewidth=0.5,
                alpha=0.55,
            )
        for name, length, (slot, start, stop), color in zip("ABCD", LENGTHS["the article's"], found["spans"], colors):
            ax.broken_barh([(start, stop - start)], (slot - 0.36, 0.72), facecolor=color, edgecolor="white")
            label = f"{name} {length}"
            if stop - start > 60:
                ax.text((start + stop) / 2, slot, label, ha="center", va="center", color="white", weight="bold")
            else:
                ax.text(start, slot - 0.4, label, ha="left", va="bottom", color=color, weight="bold")
        ax.set(yticks=[0, 1], yticklabels=["slot 0", "slot 1"], ylim=(1.5, -0.85), xlim=(0, 720))
        ax.set_title(f"{policy}: {found['steps']} steps, slots used {100 * found['utilisation']:.0f} %")
    axes[1].set_xlabel("step (hatched: an empty seat)")
    gantt = figures.save_figure(figure, folder, "04_static_and_continuous")

    figure, ax = figures.new_figure(8.0, 3.3)
    slots = [int(n) for n in numbers["geometric"]]

    def of(name: str) -> list:
        return [numbers["geometric"][str(n)][name] for n in slots]

    ax.plot(slots, [100 * run["utilisation"] for run in of("continuous")], "o-", label="continuous")
    ax.plot(slots, [100 * run["utilisation"] for run in of("static")], "o-", label="static")
    ax.plot(
        slots,
        [100 * share for share in of("harmonic")],
        ":",
        color=figures.COLORS["grey"],
        label="1 / (1 + 1/2 + … + 1/slots)",
    )
    ax.set(
        xscale="log",
        ylim=(0, 105),
        xlabel="slots",
        ylabel="slots used, %",
        xticks=slots,
        xticklabels=slots,
        title="512 requests of 16 tokens on average, lengths geometric",
    )
    ax.minorticks_off(), ax.legend()
    return [gantt, figures.save_figure(figure, folder, "04_utilisation")]


# --- The benchmark ----------------------------------------------------------------------------------------------------


class Engine:
    """The lesson's scheduler and the engine's runner, for one batch of prompts after another."""

    def __init__(self, model: llama.Llama, policy: str = "continuous", seats: int = 32) -> None:
        config = SchedulerConfig(512, seats, max_num_batched_tokens=4096, enable_chunked_prefill=False)
        self.scheduler = lesson.Scheduler(config, lesson.KVCacheManager(1024, 16, 512), static=policy == "static")
        config_of_engine = VllmConfig(attention_backend="paged", enforce_eager=True)
        self.runner: ModelRunner = make_runner(model, config, 1024, 16, config_of_engine)

    def serve(self, prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> Any:
        """All at once, to their end: the lesson's Run."""
        requests = lesson.make_requests(prompts, outputs)
        return lesson.engine_loop(
            self.scheduler, lambda output: self.runner.execute_model(output).sampled_token_ids, requests
        )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What `--bench` measures."""
    model, _ = loader.load(args.model)
    n_in, n_out, rng, V = 128, 64, random.Random(0), model.config.vocab_size
    prompts = [[rng.randrange(min(1000, V // 2), min(40000, V)) for _ in range(n_in)] for _ in range(32)]
    return measure_throughput(model, args.model, prompts, n_out) | {"policies": measure_policies(model, prompts, args)}


def measure_throughput(
    model: llama.Llama, model_name: str | None, prompts: Sequence[Sequence[int]], n_out: int
) -> dict[str, Any]:
    """Prompts of 128 random tokens, 64 greedy tokens each: ours with and without packed weights, Transformers, and the
    floor. Competitors take turns within a round; the table shows medians of three rounds."""
    n_in, packed = len(prompts[0]), pack_weights(model)
    common.heading(f"Throughput: prompts of {n_in} tokens, {n_out} greedy tokens each, fp32 on a CPU, bf16 on a GPU")
    engines = {"ours": Engine(model), "unpacked": Engine(model)}
    engines["unpacked"].runner.model = model
    peer = load_transformers(model_name, model)

    def seconds(name: str, n: int) -> float:
        start = time.perf_counter()
        if name == "transformers":
            generate_with(peer, prompts[:n], n_out)
        elif name == "one by one":
            for prompt in prompts[:n]:
                engines["unpacked"].serve([prompt], [n_out])
        else:
            engines[name].serve(prompts[:n], [n_out] * n)
        return time.perf_counter() - start

    bench: dict[str, Any] = {"prompt_tokens": n_in, "output_tokens": n_out, "throughput": {}}
    rows, competitors = [], ("ours", "unpacked", "transformers")
    for n in (1, 8, 32):
        floor = matmul_seconds(packed, n * n_in, n) + (n_out - 1) * matmul_seconds(packed, n, n)
        found: dict[str, Any] = {"floor": n * n_out / floor}
        rounds = [{name: seconds(name, n) for name in competitors} for _ in range(4)][1:]  # the first warms up
        for name in competitors:
            rates = sorted(n * n_out / each[name] for each in rounds)
            found |= {name: rates[1], f"{name}_low": rates[0], f"{name}_high": rates[2]}
        found["share_of_floor"] = found["ours"] / found["floor"]
        found["over_transformers"] = found["ours"] / found["transformers"]
        bench["throughput"][str(n)] = found
        spread = [f"{found[c]:.0f} ({found[f'{c}_low']:.0f}–{found[f'{c}_high']:.0f})" for c in competitors]
        rows.append([n, *spread, f"{found['floor']:.0f}", f"{found['share_of_floor']:.0%}"])
    common.table(["prompts", *competitors, "matmuls alone", "share"], rows, title="output tokens per second")

    serial = bench["one_by_one"] = 4 * n_out / statistics.median(seconds("one by one", 4) for _ in range(3))
    final = bench["throughput"]["32"]
    common.table(["32 prompts", "tokens/s", "x"], [
        [name, f"{rate:.0f}", f"{rate / serial:.1f}"] for name, rate in
        (("4 of them, one by one", serial), ("batched", final["unpacked"]), ("batched, packed weights", final["ours"]))
    ])  # fmt: skip
    return bench


def measure_policies(
    model: llama.Llama, prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Static against continuous, in seconds: 64 requests, lengths geometric with mean 32."""
    common.heading("Static against continuous: 64 requests, lengths geometric with mean 32")
    outputs, rows, bench = geometric(64, 32, args.seed), [], {}
    for seats in (8, 32):
        for policy in POLICIES:
            run = Engine(model, policy, seats).serve([prompts[i % 32][:32] for i in range(64)], outputs)
            total, finish = sum(run.seconds), finish_seconds(run)
            found = {
                "steps": len(run.batches),
                "seconds": total,
                "tokens_per_second": sum(outputs) / total,
                "utilisation": sum(map(len, run.batches)) / seats / len(run.batches),
                "mean_latency": statistics.mean(finish),
                "p99_latency": percentile(finish, 0.99),
            }
            bench[f"{policy}_{seats}"] = found
            rows.append([f"{seats} seats, {policy}", found["steps"], f"{found['utilisation']:.0%}",
                         f"{found['seconds']:.1f} s", f"{found['tokens_per_second']:.0f}",
                         f"{found['mean_latency']:.1f} s", f"{found['p99_latency']:.1f} s"])  # fmt: skip
    common.table(["", "steps", "seats used", "makespan", "tokens/s", "mean latency", "p99"], rows)
    return bench


def finish_seconds(run: Any) -> list[float]:
    """When each request was done, in seconds after the start: its last step is the last one that it is in."""
    found: dict[str, float] = {}
    for batch, now in zip(run.batches, itertools.accumulate(run.seconds)):
        found |= dict.fromkeys(batch, now)
    return list(found.values())

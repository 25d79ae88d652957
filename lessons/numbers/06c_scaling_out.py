"""What `lessons/06c_scaling_out.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

from engine import registry
from engine.model import folders
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.parallel.config import ParallelConfig
from engine.parallel.worker import WorkerSpec
from engine.parallel.workers import make_executor
from engine.serving.balancer import LoadBalancer
from engine.serving.coordinator import DPCoordinator
from lab import figures, layouts
from lab.parameters import checked

KEY = "06c_scaling_out"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

WIDGET_CHOICES = {"stages": [1, 2, 3, 4], "in_flight": ["one batch", "one per stage"],
           "budget": [64, 128, 256, 512, 1024, 2048], "workload": list(lesson.WORKLOADS)}  # fmt: skip
WIDGET_DEFAULT = {"stages": 4, "in_flight": "one per stage", "budget": 256, "workload": "4 long prompts"}


def simulate(params: dict) -> dict:
    """The engine's scheduler and this lesson's engine core on stages that only take time. Raises InputError."""
    params = checked(params, WIDGET_CHOICES)
    depth = params["stages"] if params["in_flight"] == "one per stage" else 1
    budget, workload = params["budget"], lesson.WORKLOADS[params["workload"]]
    one_stage = lesson.pipeline(1, 1, budget, *workload)["makespan"]  # all layers in one place
    trace = lesson.pipeline(params["stages"], depth, budget, *workload)
    idle = round_half_up(100 * trace["idle"], trace["stages"] * trace["makespan"])
    return trace | {"one_stage": one_stage, "idle_percent": idle}


def round_half_up(a: int, b: int) -> int:
    """a / b to the nearest whole number, as JavaScript rounds it."""
    return (2 * a + b) // (2 * b)


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    batches, stages, makespan = trace["batches"], trace["stages"], trace["makespan"]
    lines = [f"{len(trace['first'])} requests, {trace['tokens']} output tokens, {stages} stage{'s' * (stages > 1)}, "
             f"{len(batches)} micro-batches",
             f"done after {makespan} ticks; stages idle {trace['idle_percent']} % of the time",
             f"first token: mean {sum(trace['first']) // len(trace['first'])}, last {max(trace['first'])}"]  # fmt: skip
    for i, batch in enumerate(batches[:6]):
        spans = "  ".join(f"[{start}, {stop})" for start, stop in batch["spans"])
        lines.append(f"#{i}: {batch['tokens']} tokens of {batch['requests']}, samples {batch['samples']}: {spans}")
    if len(batches) > 6:
        lines.append("…")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    brief = lesson.brief
    short, long = "8 short prompts at once", "4 long prompts"
    pipelines = {
        "one_stage": brief(1, 1, 64, short), "alone": brief(4, 1, 64, short), "whole": brief(4, 4, 2048, short),
        "chunked": brief(4, 4, 64, short), "long_one": brief(1, 1, 256, long), "long_alone": brief(4, 1, 256, long),
        "long_whole": brief(4, 4, 2048, long), "long_chunked": brief(4, 4, 256, long),
        "single_one": brief(1, 1, 2048, "one long prompt"), "single_whole": brief(4, 4, 2048, "one long prompt"),
        "single_chunked": brief(4, 4, 256, "one long prompt"),
    }  # fmt: skip
    n, routing = lesson.ROUTING["engines"], {}
    routing["round_robin"] = lesson.measure_routing(lesson.RoundRobin(n))
    routing["load"] = lesson.measure_routing(LoadBalancer(n))
    for limit in (0, 4, 16, 1000):
        routing[f"prefix_{limit}"] = lesson.measure_routing(lesson.prefix_balancer(limit))
    balancer = LoadBalancer(2)
    balancer.counts = [[4, 16, 1.0], [0, 30, 0.9]]
    return {
        "bubble": {f"{p}_{m}": lesson.bubble(p, m) for p in (2, 4, 8) for m in (1, 2, 4, 8, 16)},
        "pipeline": pipelines, "routing": routing, "workload": lesson.ROUTING,
        "score": {"full": balancer.score(0), "busy": balancer.score(1), "plain": 20},
        "ticks": {"pass": lesson.PASS, "token": lesson.TOKEN, "send": lesson.SEND}, "layouts": layouts.facts(),
        "coordinator_ms": 1000 * DPCoordinator.INTERVAL, "vllm_timeout_s": 300,
        "smol": {"hidden_bytes": 576 * 4, "layers": 30},
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """Which processes talk, three ways to run a pipeline, and what layouts cost."""
    return [_draw_processes(folder), _draw_pipeline(folder), *layouts.draw(folder)]


def _draw_processes(folder: str | Path) -> Path:
    figure, ax = figures.new_figure(8.0, 3.7)
    colors = figures.COLORS

    def box(x: float, y: float, text: str, color: str, width: float = 1.5, height: float = 0.62) -> None:
        from matplotlib.patches import FancyBboxPatch

        ax.add_patch(
            FancyBboxPatch(
                (x - width / 2, y - height / 2),
                width,
                height,
                facecolor=colors[color],
                edgecolor="white",
                boxstyle="round,pad=0.02,rounding_size=0.08",
            )
        )
        ax.text(x, y, text, ha="center", va="center", color="white", fontsize=8.5, linespacing=1.2)

    def line(a: tuple[float, float], b: tuple[float, float], color: str = "grey", style: str = "-") -> None:
        ax.plot([a[0], b[0]], [a[1], b[1]], style, color=colors[color], linewidth=1.1, zorder=0)

    servers, engines = [(2.0, 4.0), (4.6, 4.0)], [(1.9, 2.4), (5.7, 2.4)]
    for server in servers:
        for engine in engines:
            line((server[0], 3.7), (engine[0], 2.7))
    line(servers[1], (7.6, 4.0), "orange", ":")
    ax.plot([2.0, 2.0, 7.6, 7.6], [4.0, 4.6, 4.6, 4.0], ":", color=colors["orange"], linewidth=1.1, zorder=0)
    for engine in engines:
        line(engine, (7.6, 4.0), "orange", ":")
    for i, (x, y) in enumerate(servers):
        box(x, y, f"API server {i}\nHTTP, tokenizer, text", "green", 1.9)
    box(7.6, 4.0, "coordinator\nqueue lengths", "orange", 1.5)
    for i, (x, y) in enumerate(engines):
        box(x, y, f"engine core {i}: scheduler, blocks", "blue", 2.9, 0.5)
        for j in range(4):
            at = x - 1.32 + 0.88 * j
            line((at, 1.25), (x, 2.15))
            box(at, 1.0, f"stage {j // 2}\nshard {j % 2}", "purple", 0.74)
        for j in (0, 2):
            at = x - 1.32 + 0.88 * j
            both = {"arrowstyle": "<|-|>", "color": colors["red"]}
            ax.annotate("", (at + 0.86, 0.6), (at + 0.02, 0.6), arrowprops=both)
        ax.annotate("", (x + 0.9, 0.36), (x - 0.9, 0.36), arrowprops={"arrowstyle": "-|>", "color": colors["ink"]})
    ax.text(7.65, 0.75, "↔ all-reduces\n→ hidden states", fontsize=8.5, va="center", ha="left")
    ax.text(7.65, 2.4, "requests, tokens: sockets\ndecisions: shared memory", fontsize=8.5, va="center", ha="left")
    ax.set(xlim=(0, 9.6), ylim=(0.1, 4.7))
    ax.axis("off")
    return figures.save_figure(figure, folder, "06c_processes")


def _draw_pipeline(folder: str | Path) -> Path:
    cases = [
        ("one batch in flight, budget 256", 1, 256),
        ("one per stage, prompts whole (budget 2,048)", 4, 2048),
        ("one per stage, chunks of 256", 4, 256),
    ]
    figure, axes = figures.new_figure(8.0, 4.6, nrows=3, sharex=True)
    palette = [figures.COLORS[name] for name in ("blue", "orange", "green", "purple")]
    for ax, (title, depth, budget) in zip(axes, cases):
        trace = lesson.pipeline(4, depth, budget, *lesson.WORKLOADS["4 long prompts"])
        for i, batch in enumerate(trace["batches"]):
            for stage, (start, stop) in enumerate(batch["spans"]):
                pale = 1.0 if batch["tokens"] > 8 else 0.55
                ax.broken_barh(
                    [(start, stop - start)],
                    (stage - 0.42, 0.84),
                    facecolor=palette[i % 4],
                    alpha=pale,
                    edgecolor="white",
                    linewidth=0.4,
                )
        idle = trace["idle"] / (4 * trace["makespan"])
        mean = sum(trace["first"]) / len(trace["first"])
        ax.set_title(f"{title}: done at {trace['makespan']:,}, idle {idle:.0%}, first token {mean:,.0f}", fontsize=10)
        ax.set(yticks=range(4), yticklabels=[f"stage {i}" for i in range(4)], ylim=(3.6, -0.6), xlim=(0, 6200))
    axes[2].set_xlabel("ticks (4 prompts of 512 tokens, 8 tokens each; faint: decode steps)")
    return figures.save_figure(figure, folder, "06c_pipeline")


# --- What `--bench` measures ------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A decode step in every form, what a call costs, and how soon a start and a death are over: minutes."""
    parallel = lesson.layout_of(args, LlamaConfig.from_folder(folders.model_folder(args.model)))
    tokenizer, bench = Tokenizer(folders.model_folder(args.model)), {}
    common.heading("Measured: how soon a dead worker is noticed, and how soon several engines answer")
    want = lesson.answer(lesson.build_engine(args.model, None, tokenizer), lesson.TEXTS)
    if (noticed := lesson.show_workers(args, parallel, tokenizer, want)) is not None:
        bench["noticed_ms"] = noticed
    if args.data_parallel_size > 1:
        bench["engines_start_s"] = lesson.show_engines(args, want)
    common.heading("Measured: SmolLM2, a thread or two for each process")
    return bench | time_forms(args, tokenizer)


def time_forms(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """A decode step in every form, with 1 and 8 sequences; what a call to the workers costs; the measured bubble."""
    rows, bench = [], {"step_ms": {}, "call_us": {}, "idle": {}}
    forms = {"one process": ParallelConfig(1, 1, "uni"), "1 worker": ParallelConfig(1, 1, "mp"),
             "TP 3": ParallelConfig(3, 1), "PP 2": ParallelConfig(1, 2), "PP 3": ParallelConfig(1, 3)}  # fmt: skip
    for name, parallel in forms.items():
        try:
            parallel.check(LlamaConfig.from_folder(folders.model_folder(args.model)))
        except common.InputError as error:
            common.skipped(name, str(error))
            continue
        executor, key = make_executor(parallel), name.lower().replace(" ", "_")
        try:
            executor.collective_rpc("load_model", WorkerSpec(args.model, parallel))
            samples = []
            for _ in range(200):
                start = time.perf_counter()
                executor.collective_rpc("sleep", 0.0, 0)
                samples.append(time.perf_counter() - start)
            bench["call_us"][key] = 1e6 * statistics.median(samples)
            bench["step_ms"][key], row = {}, [name, f"{bench['call_us'][key]:.0f} µs"]
            for streams in (1, 8):
                for depth in sorted({1, parallel.pipeline_parallel_size}):
                    engine = lesson.build_engine(args.model, parallel, tokenizer, executor, depth, budget=16)
                    lesson.answer(engine, lesson.TEXTS[:1], 2)
                    executor.collective_rpc("take_spans")
                    start = time.perf_counter()
                    lesson.answer(engine, [lesson.TEXTS[i % 4] for i in range(streams)], 32)
                    ms = 1e3 * (time.perf_counter() - start) / 32
                    spans = executor.collective_rpc("take_spans")
                    bench["step_ms"][key][f"{streams}_{depth}"] = ms
                    bench["idle"].setdefault(key, {})[f"{streams}_{depth}"] = lesson.idle_share(spans)
                row += [f"{ms:.1f} ms", f"{lesson.idle_share(spans):.0%}"]
            rows.append(row)
        finally:
            executor.shutdown()
    common.table(["", "a call", "1 stream: ms/token", "idle", "8 streams: ms/token of each", "idle"], rows)
    return bench

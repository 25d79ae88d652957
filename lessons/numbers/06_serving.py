"""What lesson 06's page quotes, draws and measures: the queue on a clock, and the engine's own server under load."""

from __future__ import annotations

import common

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.engine_args import EngineArgs
from engine.errors import QueueOverflowError
from engine.request import Request, SamplingParams
from engine.serving.admission import AdmissionControl
from lab import figures, recorded
from lab.dry_run import DryRun
from lab.parameters import checked
from lab.records import summarize
from lab.running_server import running_server
from lab.workload import Prompt

KEY = "06_serving"


# --- The simulation behind the widget ---------------------------------------------------------------------------------

SEATS, TOKENS, REQUESTS = 8, 16, 200
PLACED = {"one loop": "CPU and GPU take turns", "two processes": "they overlap"}
WIDGET_CHOICES = {
    "load": [50, 70, 80, 90, 95, 105, 120],
    "gpu_ms": [2, 5, 10, 20],
    "cpu_ms": [2, 4, 8],
    "place": list(PLACED),
    "queue_bound": [0, 4, 8, 20],
}
USUAL_STEP, PATIENCE = 28_000, 1_000_000  # µs: the default's step; what a user does not mind to wait
WIDGET_DEFAULT = {"load": 50, "gpu_ms": 20, "cpu_ms": 8, "place": "one loop", "queue_bound": 0}


def gaps(count: int, seed: int = 6) -> list[int]:
    """Exponential times between arrivals with mean 1,000: what independent users look like."""
    rng = random.Random(seed)
    return [int(-1000 * math.log(1 - rng.random())) for _ in range(count)]


def simulate(params: dict) -> dict:
    """Requests of 16 tokens arrive by themselves at a server of 8 seats. Times in µs. Raises InputError."""
    return pipeline(**checked(params, WIDGET_CHOICES))


def pipeline(load: int, gpu_ms: int, cpu_ms: int, place: str, queue_bound: int, count: int = REQUESTS) -> dict:
    """The engine's scheduler and 06e's admission control on a clock of our own.

    A step takes cpu + gpu in one loop, the longer of the two if they overlap; then its tokens come out by the shorter
    one later. `load` is in percent of what the seats serve in steps of 28 ms. A bound of 0 is no bound. `steps` lists
    [when, running, waiting, and how many of those for more than a second].
    """
    cpu, gpu = 1000 * cpu_ms, 1000 * gpu_ms
    step = cpu + gpu if place == "one loop" else max(cpu, gpu)
    lag = 0 if place == "one loop" else min(cpu, gpu)
    arrivals, now = [], 0
    for gap in gaps(count):
        now += gap * USUAL_STEP * TOKENS * 100 // (SEATS * load * 1000)
        arrivals.append(now)
    config = SchedulerConfig(max_model_len=64, max_num_seqs=SEATS, max_num_batched_tokens=1024)
    core = DryRun(make_scheduler(config, 1 + 4 * SEATS, 16, enable_prefix_caching=False))
    admission = AdmissionControl(SEATS + queue_bound if queue_bound else None)
    first, finish, steps = [-1] * count, [-1] * count, []
    now = arrived = 0
    while arrived < count or core.scheduler.has_unfinished_requests():
        if not core.scheduler.has_unfinished_requests():
            now = max(now, arrivals[arrived])
        while arrived < count and arrivals[arrived] <= now:
            with contextlib.suppress(QueueOverflowError):
                admission.check(len(core.scheduler.requests))
                params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
                core.add_request(Request(str(arrived), [0], params, arrival_time=arrived))
            arrived += 1
        if not core.scheduler.has_unfinished_requests():
            continue
        outputs = core.step()
        late = sum(now - arrivals[int(request.request_id)] > PATIENCE for request in core.scheduler.waiting)
        steps.append([now, len(outputs), len(core.scheduler.waiting), late])
        now += step
        for output in outputs:
            i = int(output.request_id)
            first[i] = now + lag if first[i] < 0 else first[i]
            if output.finish_reason:
                finish[i] = now + lag
    served = [i for i in range(count) if finish[i] >= 0]
    by_request = [first[i] - step - lag - arrivals[i] if finish[i] >= 0 else -1 for i in range(count)]
    waits = sorted(by_request[i] for i in served)
    return {
        "load": load, "step_us": step, "arrivals": arrivals, "waits": by_request, "first": first, "finish": finish,
        "steps": steps, "makespan": now + lag,
        "served": len(served), "rejected": admission.num_rejected, "gpu_busy": gpu * len(steps),
        "gpu_percent": 100 * gpu * len(steps) // (now + lag),
        "wait_sum": sum(waits), "wait_p99": waits[-(-99 * len(waits) // 100) - 1],
        "most_waiting": max(waiting for _, _, waiting, _ in steps),
        "mean_wait_ms": (sum(waits) // len(served) + 500) // 1000, "late": sum(wait > PATIENCE for wait in waits),
        "inside_integral": sum(finish[i] - arrivals[i] for i in served),
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    served, seconds = trace["served"], trace["makespan"] / 1e6
    return "\n".join([
        f"{len(trace['arrivals'])} requests of {TOKENS} tokens, {SEATS} seats, steps of {trace['step_us'] // 1000} ms",
        f"served {served}, rejected {trace['rejected']}; {served * TOKENS / seconds:.0f} tokens/s",
        f"arrivals at {trace['load']} % of what steps of 28 ms serve; the GPU computes {trace['gpu_percent']} % of the "
        "time",
        f"wait before the first step: mean {trace['mean_wait_ms']} ms, "
        f"p99 {(trace['wait_p99'] + 500) // 1000} ms; most waiting: {trace['most_waiting']}; "
        f"more than a second: {trace['late']}",
        f"Little: {trace['inside_integral'] / trace['makespan']:.1f} inside on average = "
        f"{served / seconds:.1f} per second x {trace['inside_integral'] / served / 1e6:.2f} s",
    ])  # fmt: skip


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    long = {"gpu_ms": 20, "cpu_ms": 8, "place": "one loop", "count": 800}

    def brief(**params: Any) -> dict[str, float]:
        trace = pipeline(**{"queue_bound": 0, **long, **params})
        return {"wait_ms": trace["wait_sum"] / trace["served"] / 1e3, "p99_ms": trace["wait_p99"] / 1e3,
                "rejected": trace["rejected"], "most_waiting": trace["most_waiting"],
                "gpu_busy": trace["gpu_busy"] / trace["makespan"]}  # fmt: skip

    def share(cpu: float, gpu: float) -> dict[str, float]:
        return {
            "turns": gpu / (cpu + gpu),
            "overlap": gpu / max(cpu, gpu),
            "steps_turns": 1e3 / (cpu + gpu),
            "steps_overlap": 1e3 / max(cpu, gpu),
        }

    loads = {str(load): simulate(WIDGET_DEFAULT | {"load": load}) for load in (50, 95, 105, 120)}
    overlap = simulate(WIDGET_DEFAULT | {"load": 120, "place": "two processes"})
    return {
        "gpu_share": {str(gpu): share(8, gpu) for gpu in (20, 10, 5, 2)},
        "load": {str(load): brief(load=load) for load in (50, 80, 90, 95, 105, 120)},
        "bounded": {str(load): brief(load=load, queue_bound=20) for load in (95, 105, 120)}, "requests": long["count"],
        "widget": {"requests": REQUESTS, "overlap": overlap["mean_wait_ms"],
                   **{load: trace["mean_wait_ms"] for load, trace in loads.items()}},
        "seats": SEATS, "tokens": TOKENS,
        "default": {f.name: f.default for f in dataclasses.fields(EngineArgs) if type(f.default) in (int, float)},
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------

LIFE = [  # from lane, to lane, what; lanes: client, HTTP, event loop, engine core
    (0, 1, "POST /v1/chat/completions"),
    (1, 2, "key, size, JSON, every field"),
    (2, 2, "chat template; tokenize (on a thread)"),
    (2, 2, "admission: full? 503, Retry-After"),
    (2, 3, "ADD Request"),
    (3, 3, "waiting queue → schedule()"),
    (3, 3, "prefill in chunks, first token"),
    (3, 2, "EngineCoreOutputs, once per step"),
    (2, 2, "detokenize, stop strings, metrics"),
    (2, 0, "data: {…\"delta\": {\"content\": …}}"),
    (3, 3, "decode steps, among all others"),
    (3, 2, "EngineCoreOutputs … finish_reason"),
    (2, 0, "data: [DONE]"),
]  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The life of one request, and what load does to waiting."""
    return [_draw_life(folder), _draw_load(folder)]


def _draw_life(folder: str | Path) -> Path:
    figure, ax = figures.new_figure(8.0, 6.0)
    colors, at, shade = figures.COLORS, [0.0, 1.1, 2.2, 4.0], "#eceff2"
    names = ["client", "HTTP\n(06f)", "front end\n(06e, 04b)", "engine core\n(06e: 11, 05, 10, 04b)"]
    ax.axvspan(0.6, 3.1, color=shade)
    ax.axvspan(3.2, 4.6, color=colors["blue"], alpha=0.14)
    ax.text(1.85, -2.05, "API server process: one event loop", ha="center", fontsize=9, color=colors["grey"])
    ax.text(3.9, -2.05, "engine process", ha="center", fontsize=9, color=colors["grey"])
    for x, name in zip(at, names):
        ax.plot([x, x], [-0.4, len(LIFE) - 0.3], color=colors["grey"], linewidth=0.8)
        ax.text(x, -0.6, name, ha="center", va="bottom", weight="bold", fontsize=9)
    for y, (start, end, text) in enumerate(LIFE):
        if start == end:
            ax.plot(at[start], y, "o", color=colors["green"], markersize=7)
            side = -1 if start == 3 else 1
            ax.text(at[start] + 0.09 * side, y, text, ha="right" if side < 0 else "left", va="center", fontsize=9)
        else:
            color = colors["blue"] if end > start else colors["orange"]
            ax.annotate(
                "", (at[end], y), (at[start], y), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6}
            )
            past = (start, end) == (2, 0)  # its label covers the line of the station that it passes
            middle = 1.4 if past else (at[start] + at[end]) / 2 if start < 3 and end < 3 else 3.1
            ax.text(middle, y - 0.12, text, ha="center", va="bottom", color=color,
                    fontsize=9 if past or 3 in (start, end) else 8,
                    bbox={"facecolor": shade, "edgecolor": "none", "pad": 1} if past else None)  # fmt: skip
        ax.text(-0.45, y, y + 1, ha="right", va="center", fontsize=9, color=colors["grey"])
    ax.set(xlim=(-0.55, 4.65), ylim=(len(LIFE) - 0.2, -2.4), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return figures.save_figure(figure, folder, "06_life")


def _draw_load(folder: str | Path) -> Path:
    measured = recorded.results(KEY).get("bench", {}).get("load", {})
    figure, axes = figures.new_figure(8.0, 3.0, ncols=3 if measured else 1, squeeze=False)
    ax, colors = axes[0][0], figures.COLORS
    free, known = facts()["load"], facts()
    bounded = {load: known["bounded"].get(load, x) for load, x in free.items()}  # below 95 % no more than 20 ever wait
    for waits, color, label in ((free, "red", "no bound"), (bounded, "blue", "at most 20 wait")):
        at, ms = [int(load) for load in waits], [x["wait_ms"] for x in waits.values()]
        ax.plot(at, ms, "o-", color=colors[color], label=label)
    worst = max(known["bounded"], key=int)
    ax.text(int(worst) + 3, 0.7 * known["bounded"][worst]["wait_ms"], f"{known['bounded'][worst]['rejected']}\nrefused",
            ha="right", va="top", fontsize=8)  # fmt: skip
    ax.axvline(100, color=colors["grey"], linewidth=0.8, linestyle=":")
    ax.set(xlabel="load, % of capacity", ylabel="mean wait, ms", ylim=(0, None), title="simulated: the queue")
    ax.legend(loc="upper left", frameon=True, framealpha=1, edgecolor="none")
    at = sorted(map(int, measured))
    for ax, key, label in zip(
        axes[0][1:], ("output_throughput", "median_ttft_ms"), ("output tokens/s", "median TTFT, ms")
    ):
        ax.plot(at, [measured[str(n)][key] for n in at], "o-", color=colors["green"])
        ax.set(xscale="log", xlabel="clients at once", ylabel=label, title="measured: 2 CPU cores")
        ax.set_xticks(at, at)
        ax.set_ylim(0)
        ax.minorticks_off()
    return figures.save_figure(figure, folder, "06_load")


# --- The engine's own server under load ------------------------------------------------------------------------------

PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "Water boils at",
           "To make bread you need flour,"]  # fmt: skip


def metrics_of(client: Any) -> dict[str, float]:
    """/metrics as {name: value}, labels left out."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("vllm:") and "_bucket" not in line and "_created" not in line:
            name, value = line.split("{")[0].removeprefix("vllm:"), float(line.rsplit(" ", 1)[1])
            found[name] = found.get(name, 0.0) + value
    return found


async def load_server(url: str, model: str, clients: int, count: int, tokens: int) -> tuple[list[Any], float]:
    """`clients` at a time ask until `count` requests are answered: lesson 06d's records, and seconds."""
    import httpx

    from lab.load_generator import Target, drive

    target = Target(url, model, extra={"temperature": 0, "ignore_eos": True})
    prompts = [Prompt(PROMPTS[i % len(PROMPTS)], 8, tokens) for i in range(count)]
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None) as client:
        start = time.perf_counter()
        records = await drive(client, target, prompts, [0.0] * count, clients)
    return records, time.perf_counter() - start


def follow_one_request(client: Any, model: str) -> dict[str, float]:
    """Stream one answer, in a chat if the model knows chats; where its time went, by the client's clock and by the
    server's metrics."""
    before, first, chunks, text, question = metrics_of(client), 0.0, 0, "", "What is the capital of France?"
    always = {"model": model, "stream": True, "temperature": 0}
    for path, ask in {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": question}], "max_completion_tokens": 16},
        "/v1/completions": {"prompt": question, "max_tokens": 16},
    }.items():
        start = time.perf_counter()
        with client.stream("POST", path, json=always | ask) as response:
            if response.status_code == 400:  # no chat template
                common.say(f"{path}: {json.loads(response.read())['error']['message']}")
                continue
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    if piece := choice["text"] if "text" in choice else choice["delta"].get("content"):
                        first, chunks, text = first or time.perf_counter(), chunks + 1, text + piece
        break
    end, after = time.perf_counter(), metrics_of(client)

    def spent(name: str) -> Any:
        return (after[f"{name}_sum"] - before[f"{name}_sum"]) * 1e3

    common.say(f"“{question}” → {text!r} in {chunks} events")
    found = {"client_ttft_ms": ((first or end) - start) * 1e3, "client_e2e_ms": (end - start) * 1e3,
             "queue_ms": spent("request_queue_time_seconds"), "prefill_ms": spent("request_prefill_time_seconds"),
             "decode_ms": spent("request_decode_time_seconds"),
             "e2e_ms": spent("e2e_request_latency_seconds")}  # fmt: skip
    found["around_ms"] = found["client_e2e_ms"] - found["queue_ms"] - found["prefill_ms"] - found["decode_ms"]
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """`serve` as anybody starts it: how long a start takes, one request followed, and 1 to 32 streams at once."""
    import httpx

    common.heading("Measured: start-up, as `serve` prints it")
    flags = [
        "--max-num-seqs",
        str(args.max_num_seqs),
        "--max-num-queued-reqs",
        str(args.max_num_queued_reqs),
        "--max-model-len",
        "1024",
        "--kv-cache-gib",
        "0.25",
        "--seed",
        str(args.seed),
        "--device",
        args.device,
        *(["--model", args.model] if args.model else []),
    ]
    bench: dict[str, Any] = {}
    started = time.perf_counter()
    with running_server(*flags, echo=common.say) as (url, _):
        bench["start_s"] = time.perf_counter() - started
        with httpx.Client(base_url=url, timeout=60) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            common.heading("Measured: one request, followed from outside and inside")
            spent = bench["life"] = follow_one_request(client, model)
            common.say(f"{spent['client_e2e_ms']:.0f} ms: {spent['queue_ms']:.1f} queue + {spent['prefill_ms']:.0f} "
                       f"prefill + {spent['decode_ms']:.0f} decode + {spent['around_ms']:.0f} around the engine (HTTP, "
                       "template, tokens, sockets)")  # fmt: skip
            common.heading("Measured: streams at once, each asking for one answer after the other")
            bench["load"] = measure_load(url, model)
    return bench


def measure_load(url: str, model: str) -> dict[str, Any]:
    """Throughput and latency by number of streams; all read the same texts."""
    rows, texts, found = [], {}, {}
    for streams in (1, 2, 4, 8, 16, 32):
        records, seconds = asyncio.run(load_server(url, model, streams, max(8, 4 * streams), 32))
        summary = summarize(records, seconds)
        texts[streams] = {record.text for record in records if not record.error}
        if not summary["completed"]:
            rows.append([streams, 0, summary["failed"], "", "", "", ""])
            continue
        found[str(streams)] = {
            name: summary[name]
            for name in (
                "completed",
                "failed",
                "output_throughput",
                "median_ttft_ms",
                "p99_ttft_ms",
                "median_itl_ms",
                "p99_itl_ms",
                "median_e2el_ms",
                "p99_e2el_ms",
            )
        }
        times = (summary[f"median_{name}_ms"] for name in ("ttft", "itl", "e2el"))  # None: of answers without a text
        rows.append(
            [
                streams,
                summary["completed"],
                summary["failed"],
                *("–" if ms is None else f"{ms:.0f} ms" for ms in times),
                f"{summary['output_throughput']:.0f}",
            ]
        )
    common.table(["streams", "answered", "refused", "TTFT", "ITL", "end to end", "tokens/s"], rows)
    if not texts[1]:
        raise common.CheckFailed("no request of the load was answered")
    common.check_equal("32 at once read the same texts as one by one", texts[32] - texts[1], set())
    return found

"""What the page of lesson 10 simulates, quotes, draws and measures: `lessons/10_chunked_prefill.md`.

The widget's twin, the roofline of a mixed step, the freeze and Sarathi-Serve's ablation on that roofline; and, timed, a
long prompt that arrives among answers on the real model.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine import registry
from engine.config import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler as EngineScheduler
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import Request, SamplingParams
from engine.worker.assemble import make_runner
from lab import figures, recorded, roofline, timing
from lab.hardware import GPU, HARDWARE
from lab.parameters import checked

KEY = "10_chunked_prefill"

lesson = registry.lesson(KEY)


# --- What a step costs ----------------------------------------------------------------------------------------------
#
# The operators of a step run one after another, and each is limited by arithmetic or by memory:
#
#     t = Σ over operators of max(FLOPs / rate, bytes / bandwidth) + overhead
#
# Matrix products: 2·W·T FLOPs on 2·W bytes of bf16 weights, from however many sequences. So T is their intensity in
# FLOP/byte, and it is here, in the weights read once for all, that decodes and prompts share a step.
# Attention: 4·L·Hq·D FLOPs per query-key pair on S·(bytes per token) of cache: each sequence has its own, nothing is
# shared, and a decode stays at Hq/Hkv FLOP/byte in any company.

Work = Sequence[tuple[int, int]]  # of each sequence in a step: new tokens, context length with them

# Sarathi-Serve's ablation ran this model on two A100s.
YI_34B = dict(num_hidden_layers=60, num_attention_heads=56, num_key_value_heads=8, hidden_size=7168,
              intermediate_size=20480, vocab_size=64000, tie_word_embeddings=False)  # fmt: skip
LLAMA_8B = roofline.MODELS["Llama-3.1-8B"]


class CostModel:
    """Seconds of a step of a dense bf16 Llama by roofline; `efficiency` is the share of both ceilings reached."""

    def __init__(
        self, config: Mapping[str, Any], gpu: GPU, gpus: int = 1, efficiency: float = 1.0, overhead: float = 0.0
    ) -> None:
        spec = roofline.KVCacheSpec.from_config(config)
        self.weights, self.head = roofline.weights_read(config)
        self.pair_flops = 4 * spec.num_layers * config["num_attention_heads"] * spec.head_size
        self.token_bytes = spec.bytes_per_token()
        self.rate, self.bandwidth = gpus * efficiency * gpu.flops, gpus * efficiency * gpu.bandwidth
        self.overhead = overhead

    def operators(self, work: Work) -> dict[str, tuple[int, int]]:
        """(FLOPs, bytes) of each operator. A chunk's queries see S − n + 1 to S keys: n·S − n(n − 1)/2 pairs."""
        T = sum(n for n, _ in work)
        found = {"matrix products": (2 * self.weights * T + 2 * self.head * len(work), 2 * (self.weights + self.head))}
        for name, group in (
            ("prompt attention", [(n, S) for n, S in work if n > 1]),
            ("decode attention", [(n, S) for n, S in work if n == 1]),
        ):
            pairs, keys = sum(n * S - n * (n - 1) // 2 for n, S in group), sum(S for _, S in group)
            found[name] = (self.pair_flops * pairs, self.token_bytes * keys)
        return found

    def seconds(self, work: Work) -> dict[str, float]:
        """Seconds of each operator."""
        operators = self.operators(work).items()
        return {name: max(flops / self.rate, moved / self.bandwidth) for name, (flops, moved) in operators}

    def __call__(self, work: Work) -> int:
        """Microseconds of the step, the constant overhead included."""
        return round((sum(self.seconds(work).values()) + self.overhead) * 1e6)


# Beyond reading the weights, published decode steps of an 8B model on an H100 take about 2 ms (lesson 01): launches,
# sampling, whatever the CPU cannot hide. Without it, tiny chunks would look better than they are.
H100_8B = CostModel(LLAMA_8B, HARDWARE["H100 80GB"], overhead=2e-3)
A100_YI = CostModel(YI_34B, HARDWARE["A100 80GB"], gpus=2, efficiency=0.6, overhead=2e-3)  # 0.6: our assumption


# --- The engine's loop on a clock -----------------------------------------------------------------------------------


class SimulatedCore(EngineCore):
    """Lesson 04's loop with a clock in place of the model: a step takes `cost(work)` microseconds, tokens are all 0."""

    def __init__(self, scheduler: Any, cost: Callable[[Work], int]) -> None:
        super().__init__(scheduler)
        self.cost, self.now = cost, 0
        self.scheduled: dict[str, int] = {}  # of the last step
        self.token_times: dict[str, list[int]] = {}  # when each request's tokens came

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Token 0 for each request that has computed all of its own; the clock goes on by `cost`."""
        requests, self.scheduled = self.scheduler.requests, dict(output.num_scheduled_tokens)
        self.now += self.cost([(n, requests[i].num_computed_tokens) for i, n in self.scheduled.items()])
        ready = [i for i in self.scheduled if requests[i].num_computed_tokens == requests[i].num_tokens]
        for i in ready:
            self.token_times.setdefault(i, []).append(self.now)
        return ModelRunnerOutput({i: [0] for i in ready})

    def submit(self, name: str, prompt: int, max_tokens: int | None = None) -> None:
        """A request of `prompt` tokens; with max_tokens None it never ends."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.add_request(Request(name, [0] * prompt, params, arrival_time=self.now))

    def worst_gap(self, names: Iterable[str], since: int) -> int:
        """The longest silence between two tokens of one of these requests, from `since` on."""
        gaps = [b - a for i in names for a, b in itertools.pairwise(self.token_times.get(i, [])) if b > since]
        return max(gaps, default=0)


def simulated_core(
    cost: Callable[[Work], int], num_requests: int, max_model_len: int, scheduler: type | None = None, **limits: Any
) -> SimulatedCore:
    """A core whose pool is never the limit: one block per request, as long as a request may become."""
    config = SchedulerConfig(max_model_len=max_model_len, max_num_seqs=num_requests, **limits)
    manager = KVCacheManager(num_requests + 1, max_model_len, max_model_len, enable_caching=False)
    return SimulatedCore((scheduler or lesson.Scheduler)(config, manager), cost)


def freeze(
    cost: CostModel, budget: int, prompt: int = 10_000, decoders: int = 32, context: int = 2_000
) -> dict[str, float]:
    """One long prompt arrives among decoders: its TTFT, and the longest silence of the others, in milliseconds."""
    names = [f"decode {i}" for i in range(decoders)]
    core = simulated_core(cost, decoders + 1, 4 * prompt, max_num_batched_tokens=prompt + decoders * context)
    for name in names:
        core.submit(name, context)
    core.step()  # everybody's prompt at once: that is before our story begins
    core.step()
    core.scheduler.max_num_scheduled_tokens = budget
    arrival = core.now
    core.submit("newcomer", prompt)
    steps = 0
    while "newcomer" not in core.token_times:
        core.step()
        steps += 1
    return {
        "budget": budget,
        "steps": steps,
        "ttft_ms": (core.now - arrival) / 1e3,
        "gap_ms": core.worst_gap(names, arrival) / 1e3,
    }


# --- The simulation: the widget's twin ------------------------------------------------------------------------------

WIDGET_DEFAULT = {"budget": 512, "decoders": 16, "prompt": 4096, "short_prompt": 0, "threshold": 0, "adaptive": False,
                  "step_us": 10_000, "token_us": 50}  # fmt: skip
WIDGET_CHOICES = {
    "budget": range(1, 16385), "decoders": range(257), "prompt": range(1, 16385), "short_prompt": range(16385),
    "threshold": range(16385), "adaptive": (True, False), "step_us": range(1, 10**6 + 1), "token_us": range(10**4 + 1),
}  # fmt: skip


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """`decoders` streams run; after three steps a long prompt arrives and, right behind it, perhaps a short one.

    params: budget (tokens per step), decoders (streams that never end), prompt and short_prompt (tokens; 0: nobody),
    threshold and adaptive (`long_prefill_token_threshold…`); a step of n tokens takes step_us + token_us · n.
    The trace has, per step: start_us, decodes, chunk and short_chunk (tokens of each), and the total is their sum.
    It ends two steps after the last first token, or in the first step in which no newcomer got a token: as the streams
    never end, none ever will (`starved`). `whole` is the same story with room for everything in one step.
    Drives the lesson's Scheduler. Raises InputError.
    """
    p = checked(params, WIDGET_CHOICES)
    whole = run(p | {"budget": p["decoders"] + p["prompt"] + p["short_prompt"], "threshold": 0})
    return run(p) | {"whole": {name: value for name, value in whole.items() if name != "params"}}


def run(p: dict[str, Any]) -> dict[str, Any]:
    """The trace of one run, as `simulate` describes it."""

    def cost(work: Any) -> Any:
        return p["step_us"] + p["token_us"] * sum(n for n, _ in work)

    seats = p["decoders"] + 2
    # vLLM (and lesson 04) refuse max_num_batched_tokens < max_num_seqs: that rule is what keeps a budget from
    # starving. max_num_scheduled_tokens is the way around it.
    core = simulated_core(
        cost,
        seats,
        20_000 + p["prompt"] + p["short_prompt"],
        max_num_batched_tokens=max(p["budget"], seats),
        max_num_scheduled_tokens=p["budget"],
        long_prefill_token_threshold=p["threshold"],
        long_prefill_token_threshold_adaptive=p["adaptive"],
    )
    streams = [f"stream {i}" for i in range(p["decoders"])]
    for name in streams:
        core.submit(name, 1)
    trace: dict[str, Any] = {"params": p, "start_us": [], "decodes": [], "chunk": [], "short_chunk": []}

    def step() -> int:
        """One step; returns the newcomers' tokens in it."""
        trace["start_us"].append(core.now)
        core.step()
        chunk, short = core.scheduled.get("long", 0), core.scheduled.get("short", 0)
        trace["decodes"].append(sum(core.scheduled.values()) - chunk - short)
        trace["chunk"].append(chunk)
        trace["short_chunk"].append(short)
        return chunk + short

    for _ in range(3 if streams else 0):
        step()
    arrival = trace["arrival_us"] = core.now
    newcomers = {"long": p["prompt"]} | ({"short": p["short_prompt"]} if p["short_prompt"] else {})
    for name, length in newcomers.items():
        core.submit(name, length)
    trace["starved"] = False
    while not trace["starved"] and any(name not in core.token_times for name in newcomers):
        trace["starved"] = step() == 0
    for _ in range(0 if trace["starved"] else 2):
        step()
    first = {name: core.token_times[name][0] - arrival if name in core.token_times else None for name in newcomers}
    return trace | {
        "end_us": core.now,
        "ttft_us": first["long"],
        "short_ttft_us": first.get("short"),
        "worst_gap_us": core.worst_gap(streams, arrival),
        "silent_streams": sum(name not in core.token_times for name in streams),  # got no token at all
    }


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p, done = trace["params"], len(trace["start_us"])

    def ms(us: int) -> str:
        return f"{us / 1000:,.1f} ms"

    lines = [f"budget {p['budget']:,}, {p['decoders']} streams, a prompt of {p['prompt']:,} tokens; "
             f"a step takes {ms(p['step_us'])} + {p['token_us']} µs per token"]  # fmt: skip
    ends = [*trace["start_us"][1:], trace["end_us"]]
    shown = [i for i in range(done) if i < 5 or i >= done - 4]
    for before, i in zip([-1, *shown], shown):
        if i - before > 1:
            lines.append(f"  … and {i - before - 1} more")
        short = f" + short prompt {trace['short_chunk'][i]}" if p["short_prompt"] else ""
        lines.append(f"  step {i:>3}, {ms(ends[i] - trace['start_us'][i]):>8}: decodes {trace['decodes'][i]:>3} "
                     f"+ chunk {trace['chunk'][i]:>4}{short}")  # fmt: skip
    if trace["ttft_us"] is None:
        lines.append(f"STARVED: the streams use all {p['budget']:,} tokens of every step; the prompt will never start")
    else:
        short = f", short prompt's {ms(trace['short_ttft_us'])}" if trace["short_ttft_us"] else ""
        lines.append(f"TTFT {ms(trace['ttft_us'])}{short}; the others' longest silence {ms(trace['worst_gap_us'])}")
    if trace["silent_streams"]:
        lines.append(f"and {trace['silent_streams']} of the streams get no token either")
    return "\n".join(lines)


# --- Sarathi-Serve's ablation, on our scheduler ---------------------------------------------------------------------

ABLATION_BUDGET = 1024
# Yi-34B, openchat_sharegpt4, by Agrawal et al. 2024: seconds of P50 TTFT and P99 time between tokens.
PUBLISHED_ABLATION = {"hybrid only": (0.53, 0.68), "chunks only": (1.04, 0.17), "both": (0.76, 0.14)}


class SeparateBatches(EngineScheduler):
    """Prompts and decodes never share a step. With chunks they take turns; without, prompts go first (vLLM V0).

    A variant of the engine's scheduler, which decides as the lesson's, and has a method for what is changed here.
    """

    prefilling = False

    def schedule(self) -> SchedulerOutput:
        behind = [r for r in self.running if self._is_prefill(r)]
        prompts, decodes = bool(behind) or bool(self.waiting), len(behind) < len(self.running)
        self.prefilling = prompts and not (decodes and self.prefilling and self.config.enable_chunked_prefill)
        return super().schedule()

    @staticmethod
    def _is_prefill(request: Request) -> bool:
        return request.num_computed_tokens < request.num_prompt_tokens

    def _num_new_tokens(self, request: Request) -> int:
        return super()._num_new_tokens(request) if self._is_prefill(request) is self.prefilling else 0


POLICIES: dict[str, tuple[type, bool]] = {  # scheduler, chunks?
    "neither": (SeparateBatches, False),
    "hybrid only": (lesson.Scheduler, False),
    "chunks only": (SeparateBatches, True),
    "both": (lesson.Scheduler, True),
}


def conversations(count: int, rate: float, seed: int) -> list[tuple[int, int, int]]:
    """(arrival in µs, prompt, output) of requests like openchat_sharegpt4: lognormal around the published medians and
    90th percentiles (1,730 and 5,696 tokens in, 415 and 834 out), at most 8,192 together; Poisson arrivals."""
    rng, now, found = random.Random(seed), 0.0, []

    def draw(median: float, p90: float) -> Any:
        return rng.lognormvariate(math.log(median), math.log(p90 / median) / 1.2816)

    while len(found) < count:
        now += rng.expovariate(rate)
        prompt, output = max(1, round(draw(1730, 5696))), max(2, round(draw(415, 834)))
        if prompt + output <= 8192:
            found.append((round(now * 1e6), prompt, output))
    return found


def ablation(policy: str, count: int = 96, rate: float = 1.0, seed: int = 0) -> dict[str, float]:
    """Serve `conversations` with one policy on the A100 cost model: seconds of P50 TTFT and P99 time between tokens."""
    scheduler, chunks = POLICIES[policy]
    core = simulated_core(
        A100_YI,
        128,
        8192,
        scheduler,
        max_num_batched_tokens=ABLATION_BUDGET if chunks else 8192,
        enable_chunked_prefill=chunks,
    )
    todo = conversations(count, rate, seed)
    arrival = {str(i): at for i, (at, _, _) in enumerate(todo)}
    i = 0
    while i < count or core.scheduler.has_unfinished_requests():
        if not core.scheduler.has_unfinished_requests():
            core.now = max(core.now, todo[i][0])
        while i < count and todo[i][0] <= core.now:
            core.submit(str(i), *todo[i][1:])
            i += 1
        core.step()
    ttft = sorted(times[0] - arrival[name] for name, times in core.token_times.items())
    gaps = sorted(b - a for times in core.token_times.values() for a, b in itertools.pairwise(times))
    return {"ttft_p50": ttft[len(ttft) // 2] / 1e6, "ttft_mean": statistics.mean(ttft) / 1e6,
            "tbt_p50": gaps[len(gaps) // 2] / 1e6, "tbt_p99": gaps[len(gaps) * 99 // 100] / 1e6}  # fmt: skip


# --- The numbers that the text quotes, and the figures --------------------------------------------------------------

FREEZE_BUDGETS = (16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 48)
CHUNKS = (0, 16, 32, 64, 128, 192, 263, 295, 400, 512, 768, 1024, 1536, 2048, 3072, 4096)


@functools.cache
def facts() -> dict[str, Any]:
    """Every deterministic number of the lesson's text and figures. No model, under a second."""
    gpu, decodes = HARDWARE["H100 80GB"], [(1, 2000)] * 32
    whole = H100_8B.operators([(10_000, 10_000)])
    flops = sum(f for f, _ in whole.values())
    curve = []
    for n in CHUNKS:
        work = [*decodes, *([(n, 2000 + n)] if n else [])]
        parts, operators, seconds = H100_8B.seconds(work), H100_8B.operators(work), H100_8B(work) / 1e6
        used, moved = (sum(x) for x in zip(*operators.values()))
        curve.append({
            "prompt_tokens": n, "ms": seconds * 1e3, **{k.replace(" ", "_") + "_ms": v * 1e3 for k, v in parts.items()},
            "intensity": used / moved, "flops_share": used / H100_8B.rate / seconds,
            "bandwidth_share": moved / H100_8B.bandwidth / seconds,
        })  # fmt: skip
    by_chunk = {str(row["prompt_tokens"]): row for row in curve}
    widget = {str(b): simulate(WIDGET_DEFAULT | {"budget": b}) for b in (8192, 2048, 512, 256, 64, 24, 16, 8)}
    crowd = WIDGET_DEFAULT | {"budget": 2048, "decoders": 2, "short_prompt": 64}
    caps = {"off": {}, "cap_256": {"threshold": 256}, "adaptive": {"threshold": 256, "adaptive": True}}
    capped = {name: simulate(crowd | change) for name, change in caps.items()}
    rows = {policy.replace(" ", "_"): ablation(policy) for policy in POLICIES}
    frozen = {str(row["budget"]): row for row in (freeze(H100_8B, budget) for budget in FREEZE_BUDGETS)}
    keys_read = sum(min(s + 480, 10_000) for s in range(0, 10_000, 480))  # keys of the context, once per chunk
    return {
        "ridge": gpu.ridge,
        "ridge_tokens": int(gpu.ridge),
        "free_seats": int(gpu.ridge) - 32,
        "step": {
            "decode_ms": by_chunk["0"]["ms"],
            "with_263_ms": by_chunk["263"]["ms"],
            "extra_ms": by_chunk["263"]["ms"] - by_chunk["0"]["ms"],
            "extra": by_chunk["263"]["ms"] / by_chunk["0"]["ms"] - 1,
            "with_2048_ms": by_chunk["2048"]["ms"],
            "decode_attention_intensity": H100_8B.pair_flops / H100_8B.token_bytes,
            **{f"flops_share_{n}": by_chunk[n]["flops_share"] for n in ("0", "263", "512", "2048")},
            **{f"bandwidth_share_{n}": by_chunk[n]["bandwidth_share"] for n in ("0", "263", "512", "2048")},
            **{f"intensity_{n}": by_chunk[n]["intensity"] for n in ("0", "263", "512", "2048")},
        },
        "curve": curve,
        "ten_thousand": {
            "pflop": flops / 1e15,
            "matrix_pflop": whole["matrix products"][0] / 1e15,
            "attention_share": whole["prompt attention"][0] / flops,
            "h100_ms": H100_8B([(10_000, 10_000)]) / 1e3,
            "claimed_tflop_s": flops / 2 / 1e12,
            "claimed_share": flops / 2 / gpu.flops,
            "chunks_480": len(range(0, 10_000, 480)),
            "keys_read_480": keys_read,
            "kv_reread_gb": keys_read * H100_8B.token_bytes / 1e9,
            "kv_reread_ms": keys_read * H100_8B.token_bytes / H100_8B.bandwidth * 1e3,
        },
        "freeze": frozen,
        "widget": {
            b: {"ttft_ms": t["ttft_us"] and t["ttft_us"] / 1e3, "gap_ms": t["worst_gap_us"] / 1e3,
                "steps": sum(1 for chunk in t["chunk"] if chunk > 1), "silent": t["silent_streams"]}
            for b, t in widget.items()
        },
        "cap": {
            name: {f"{key[:-3]}_ms": t[key] / 1e3 for key in ("ttft_us", "short_ttft_us", "worst_gap_us")}
            for name, t in capped.items()
        },
        "ablation": rows,
        "mixing_saves": 1 - rows["both"]["ttft_p50"] / rows["chunks_only"]["ttft_p50"],
        "published_mixing_saves": 1 - PUBLISHED_ABLATION["both"][0] / PUBLISHED_ABLATION["chunks only"][0],
        "tiles": {"grid_8b_512_32": 512 // 32 + 33, "exact_8b_512_32": -(-480 // 32) + 32},
    }  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from `facts()` and the committed measurements alone."""
    known = facts()
    return [
        _draw_timeline(folder),
        _draw_step(folder, known),
        _draw_budget(folder, known),
        _draw_ablation(folder, known),
    ]


def _draw_timeline(folder: str | Path) -> Path:
    """The widget's default under three budgets: steps as boxes, a watched stream's tokens as dots."""
    from matplotlib.patches import Rectangle

    budgets = (8192, 512, 64)
    figure, axes = figures.new_figure(8.0, 3.6, nrows=3, sharex=True)
    for axis, budget in zip(axes, budgets):
        trace = simulate(WIDGET_DEFAULT | {"budget": budget})
        starts = [(t - trace["arrival_us"]) / 1e3 for t in (*trace["start_us"], trace["end_us"])]
        for i, chunk in enumerate(trace["chunk"]):
            color = figures.COLORS["orange" if chunk > 1 else "light"]
            axis.add_patch(
                Rectangle(
                    (starts[i], 0), starts[i + 1] - starts[i], 1, facecolor=color, edgecolor="white", linewidth=0.6
                )
            )
        axis.plot(starts[1:], [1.45] * (len(starts) - 1), ".", markersize=4, color=figures.COLORS["blue"])
        ttft = trace["ttft_us"] / 1e3
        axis.plot([ttft], [0.5], "v", color=figures.COLORS["ink"], markersize=8, clip_on=False)
        axis.set(ylim=(0, 2), xlim=(-40, 1180), yticks=[])
        axis.set_title(f"budget {budget:,}: first token after {ttft:,.0f} ms, others wait "
                       f"{trace['worst_gap_us'] / 1e3:,.0f} ms at most", fontsize=10)  # fmt: skip
        axis.spines["left"].set_visible(False)
    axes[-1].set_xlabel(
        "ms after a prompt of 4,096 tokens arrives   (orange: steps with a chunk of it; "
        "▼ its first token; dots: tokens of another stream)",
        fontsize=8.5,
    )
    return figures.save_figure(figure, folder, "10_timeline")


def _draw_step(folder: str | Path, known: dict[str, Any]) -> Path:
    """One step of 32 decodes and n prompt tokens: what it costs, and which ceilings it uses."""
    rows = known["curve"]
    x = [row["prompt_tokens"] for row in rows]
    figure, (left, right) = figures.new_figure(8.0, 3.5, ncols=2)
    keys = ("matrix_products_ms", "decode_attention_ms", "prompt_attention_ms")
    left.stackplot(
        x,
        [[row[key] for row in rows] for key in keys],
        labels=[k[:-3].replace("_", " ") for k in keys],
        colors=[figures.COLORS[c] for c in ("blue", "green", "orange")],
        linewidth=0,
    )
    left.set(xlim=(0, 1024), ylim=(0, 20), xlabel="prompt tokens beside 32 decodes", ylabel="ms, operators alone",
             xticks=range(0, 1025, 256), yticks=range(0, 21, 5),
             title="An H100's step: flat, then a slope")  # fmt: skip
    left.legend(loc="upper left", fontsize=8.5, frameon=True, framealpha=1, edgecolor="none")
    for share, color, label in (("flops_share", "blue", "FLOP/s"), ("bandwidth_share", "red", "bandwidth")):
        right.plot([max(n, 8) for n in x], [100 * row[share] for row in rows], color=figures.COLORS[color], linewidth=2)
        right.text(4300, 100 * rows[-1][share], label, color=figures.COLORS[color], va="center", fontsize=9)
    right.set(xscale="log", xlim=(8, 4096), ylim=(0, 100), xlabel="prompt tokens beside 32 decodes",
              ylabel="% of the ceiling", title="Which ceiling it uses", xticks=[8, 32, 128, 512, 2048],
              xticklabels=["0", "32", "128", "512", "2,048"])  # fmt: skip
    right.minorticks_off()
    for axis in (left, right):
        axis.axvline(known["free_seats"], color=figures.COLORS["grey"], linewidth=1, linestyle=":")
    left.text(known["free_seats"] + 12, 0.6, f"{known['free_seats']}", fontsize=9, color="white")
    return figures.save_figure(figure, folder, "10_step")


def _draw_budget(folder: str | Path, known: dict[str, Any]) -> Path:
    """What the budget trades: TTFT of the newcomer against the silence of the others."""
    from matplotlib.ticker import LogLocator, NullLocator

    measured = recorded.results(KEY).get("bench", {}).get("budgets", [])
    figure, axes = figures.new_figure(8.0, 3.5, ncols=2 if measured else 1, squeeze=False)
    panels = [
        (
            "10,000 tokens, 8B on an H100, by roofline",
            [(r["ttft_ms"], r["gap_ms"], r["budget"]) for r in known["freeze"].values()],
            "ms",
            {"16384": "whole"},
        )
    ]
    if measured:
        points = [(r["ttft_s"], r["gap_s"], r["budget"]) for r in measured]
        panels.append(("1,500 tokens, SmolLM2 on two CPU cores", points, "s", {"1504": "whole"}))
    for axis, (title, points, unit, names) in zip(axes[0], panels):
        points.sort(key=lambda point: point[2])
        axis.plot([p[0] for p in points], [p[1] for p in points], "o-", markersize=5, color=figures.COLORS["blue"])
        for (ttft, gap, budget), (after, _, _) in zip(points, [*points[1:], points[-1]]):
            left = after > ttft  # where the curve leans right, its left side is free
            axis.annotate(
                names.get(str(budget), f"{budget:,}"),
                (ttft, gap),
                xytext=(-6, -4) if left else (5, 5),
                textcoords="offset points",
                ha="right" if left else "left",
                fontsize=8.5,
            )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel=f"time to first token of the newcomer, {unit}",
            ylabel=f"longest silence of the others, {unit}",
            title=title,
        )
        axis.margins(0.12)
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter(lambda value, _: f"{value:,g}")
            side.set_minor_locator(NullLocator())
    return figures.save_figure(figure, folder, "10_budget")


def _draw_ablation(folder: str | Path, known: dict[str, Any]) -> Path:
    """The four policies, ours and the paper's three, in one plane."""
    figure, axis = figures.new_figure(8.0, 3.4)
    ours = {policy: known["ablation"][policy.replace(" ", "_")] for policy in POLICIES}
    for points, marker, color, label in (
        ({k: (v["ttft_p50"], v["tbt_p99"]) for k, v in ours.items()}, "o", "blue", "ours, simulated"),
        (PUBLISHED_ABLATION, "s", "orange", "Agrawal et al. 2024, measured"),
    ):
        axis.plot(
            [p[0] for p in points.values()],
            [p[1] for p in points.values()],
            marker,
            color=figures.COLORS[color],
            markersize=7,
            label=label,
        )
        for name, point in points.items():
            below = name == "neither"
            axis.annotate(
                name,
                point,
                xytext=(0, -14) if below else (8, 4),
                textcoords="offset points",
                fontsize=9,
                ha="center" if below else "left",
                color=figures.COLORS[color],
            )
    axis.set(
        xlim=(0.3, 1.25), ylim=(0, 0.8), xlabel="median time to first token, s", ylabel="P99 time between tokens, s"
    )
    axis.legend(loc="upper right")
    return figures.save_figure(figure, folder, "10_ablation")


# --- Measurements ---------------------------------------------------------------------------------------------------

DECODERS = ("Once upon a time, in a small village by the sea,", "The three laws of motion say that",
            "A recipe for bread:", "The history of the bicycle begins in")  # fmt: skip
PROMPT_TOKENS = 1500
WHOLE = PROMPT_TOKENS + len(DECODERS)
BUDGETS = (WHOLE, 1024, 512, 256, 128, 64, 32, 16)


def long_prompt(tokenizer: Tokenizer, length: int) -> list[int]:
    """`length` tokens of Python's own language reference, which every Python brings along."""
    from pydoc_data import topics

    tokens: list[int] = []
    for name in sorted(topics.topics):
        tokens += tokenizer.encode(topics.topics[name])
        if len(tokens) >= length:
            break
    return tokens[:length]


def arrival_among_decodes(
    model: llama.Llama,
    decoders: Sequence[Sequence[int]],
    prompt: Sequence[int],
    budget: int,
    max_tokens: int,
    threshold: int = 0,
) -> dict[str, Any]:
    """`decoders` write `max_tokens` each; after three steps the long prompt arrives. Budget as in `simulate`.

    Returns the newcomer's TTFT and the others' longest silence after its arrival in seconds, per step (tokens,
    seconds), and everybody's tokens.
    """
    prompts = [*decoders, prompt]
    max_model_len = max(map(len, prompts)) + max_tokens + 1
    num_blocks = 1 + sum(-(-(len(tokens) + max_tokens) // 16) for tokens in prompts) + -(-max_model_len // 16)
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=max(budget, len(prompts)),
        max_num_scheduled_tokens=budget,
        long_prefill_token_threshold=threshold,
    )
    manager = KVCacheManager(num_blocks, 16, max_model_len, enable_caching=False)
    core = EngineCore(lesson.Scheduler(config, manager), make_runner(model, config, num_blocks, 16))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i, tokens in enumerate(decoders):
        core.add_request(Request(str(i), list(tokens), params))
    found: dict[str, Any] = {"budget": budget, "tokens": [[] for _ in prompts], "steps": [], "chunks": 0}
    times: list[list[float]] = [[] for _ in prompts]
    newcomer, arrival = Request(str(len(decoders)), list(prompt), params), None
    while arrival is None or core.scheduler.has_unfinished_requests():
        if arrival is None and (not decoders or len(times[0]) == 3):
            core.add_request(newcomer)
            arrival = time.perf_counter()
        requests, behind = list(core.scheduler.requests.values()), newcomer.num_computed_tokens < len(prompt)
        computed, start = newcomer.num_computed_tokens, time.perf_counter()
        before = sum(r.num_computed_tokens for r in requests)
        outputs = core.step()
        now = time.perf_counter()
        found["steps"].append((sum(r.num_computed_tokens for r in requests) - before, now - start))
        found["chunks"] += behind and newcomer.num_computed_tokens > computed
        for output in outputs:
            found["tokens"][int(output.request_id)] += output.new_token_ids
            times[int(output.request_id)].append(now)
    found["ttft_s"] = times[-1][0] - arrival
    gaps = [b - a for each in times[:-1] for a, b in itertools.pairwise(each) if b > arrival]
    return found | {"gap_s": max(gaps, default=0.0)}


def fit_line(steps: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """(a, b) of seconds = a + b · tokens by least squares over the median of each token count."""
    groups: dict[int, list[float]] = {}
    for n, seconds in steps:
        groups.setdefault(n, []).append(seconds)
    xs, ys = list(groups), [statistics.median(group) for group in groups.values()]
    if len(xs) < 2:
        return ys[0], 0.0
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept, slope


def measure_arrival(model: llama.Llama, tokenizer: Tokenizer, threshold: int) -> dict[str, Any]:
    """The same requests with the prompt whole and in chunks: the same tokens, at other times."""
    decoders, prompt = [tokenizer.encode(text) for text in DECODERS], long_prompt(tokenizer, PROMPT_TOKENS)
    arrive = functools.partial(arrival_among_decodes, model, decoders, prompt, max_tokens=24, threshold=threshold)
    arrival_among_decodes(model, decoders, prompt[:64], 256, 4)  # warm up
    if common.HAS_GPU:  # which compiles for the shapes of a budget when it first meets them
        for budget in BUDGETS:
            arrive(budget)
    runs = [arrive(budget) for budget in BUDGETS]
    rows = [[f"budget {run['budget']:,}" + (" (whole)" if run["budget"] == WHOLE else ""), run["chunks"],
             f"{run['ttft_s']:.2f} s", f"{run['gap_s'] * 1e3:,.0f} ms"] for run in runs]  # fmt: skip
    common.table(["", "chunks", "TTFT of the prompt", "longest silence of the others"], rows)
    common.check_equal(
        "everybody's tokens are the same under every budget",
        [run["tokens"] for run in runs[1:]],
        [runs[0]["tokens"]] * (len(runs) - 1),
    )
    a, b = fit_line(step for run in runs for step in run["steps"])
    if min(a, b) > 0:
        common.say(f"A step here takes about {a * 1e3:.0f} ms + {b * 1e3:.2f} ms per token.")
    else:
        common.skipped("the line for a step", "noise: neither the constant nor the slope can be below 0")
    chunked = runs[BUDGETS.index(256)]
    return {
        "budgets": [{k: run[k] for k in ("budget", "ttft_s", "gap_s", "chunks")} for run in runs],
        "fit": {"step_ms": a * 1e3, "token_ms": b * 1e3},
        "whole_over_256": {key: runs[0][key] / chunked[key] for key in ("ttft_s", "gap_s")},
    }


def measure_kernel() -> list[dict[str, Any]]:
    """On a GPU: one launch for a mixed batch, beside its two halves launched apart; 8B heads, bf16."""
    Hq, Hkv, D, rows = 32, 8, 128, []
    cases = {"a prompt of 8,192": (0, 8192, 8192), "2,048 at 16,384": (0, 2048, 16384),
             "512 at 8,192, 32 decodes": (32, 512, 8192), "32 decodes": (32, 0, 0)}  # fmt: skip
    for name, (decodes, n, S) in cases.items():
        work = [(1, 4096)] * decodes + [(n, S)] * (n > 0)
        batch = q, cache, table, start_loc, seq_lens, longest = lesson.random_batch(work, Hq, Hkv, D, torch.bfloat16)
        halves = []
        if decodes:
            halves.append(
                functools.partial(
                    registry.fill("decode.paged"), q[:decodes], cache, table[:decodes], seq_lens[:decodes], 4096
                )
            )
        if n:
            halves.append(
                functools.partial(
                    lesson.unified_attention,
                    q[decodes:],
                    cache,
                    table[decodes:],
                    start_loc[decodes:] - decodes,
                    seq_lens[decodes:],
                    longest,
                )
            )
        seconds = timing.measure_graph(functools.partial(lesson.unified_attention, *batch)).median
        apart = sum(timing.measure_graph(half).median for half in halves)
        pairs = sum(m * c - m * (m - 1) // 2 for m, c in work)
        moved = 4 * Hkv * D * sum(c for _, c in work)  # keys and values, two bytes each
        rows.append({"case": name, "us": seconds * 1e6, "tflop_s": 4 * Hq * D * pairs / seconds / 1e12,
                     "gb_s": moved / seconds / 1e9, "apart_us": apart * 1e6})  # fmt: skip
    return rows


def check_ablation(known: dict[str, Any]) -> None:
    """Whether the published ordering holds here."""

    def order(key: Any) -> Any:
        return sorted(PUBLISHED_ABLATION, key=key)

    ours = {policy: known["ablation"][policy.replace(" ", "_")] for policy in PUBLISHED_ABLATION}
    common.check_equal(
        "the three policies stand in the paper's order, in both columns",
        (order(lambda p: ours[p]["ttft_p50"]), order(lambda p: ours[p]["tbt_p99"])),
        tuple(order(lambda p, i=i: PUBLISHED_ABLATION[p][i]) for i in (0, 1)),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What `--bench` measures: the arrival under eight budgets and, on a GPU, the kernel."""
    loader.check_context(args.model, PROMPT_TOKENS + 25)
    model, tokenizer = loader.load(args.model)
    common.heading("Sarathi-Serve's ablation, on this scheduler and a roofline")
    check_ablation(facts())
    common.heading(f"Measured: a prompt of {PROMPT_TOKENS:,} tokens arrives among {len(DECODERS)} answers")
    bench = measure_arrival(model, tokenizer, args.threshold)
    if common.HAS_GPU:
        bench["kernel"] = measure_kernel()
        bench["copy_gb_s"] = timing.copy_bandwidth() / 1e9
        bench["matmul_tflop_s"] = timing.matmul_rate(torch.bfloat16) / 1e12
        common.table(["8B heads, bf16", "one launch", "TFLOP/s", "GB/s", "two launches"], [
            [r["case"], f"{r['us']:.0f} µs", f"{r['tflop_s']:.0f}", f"{r['gb_s']:,.0f}", f"{r['apart_us']:.0f} µs"]
            for r in bench["kernel"]])  # fmt: skip
    else:
        common.skipped("the kernel's TFLOP/s", "needs a GPU")
    return bench

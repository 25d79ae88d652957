"""What `lessons/05e_experts.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import registry
from engine.experts.grouped_matmul import align_block_size, choose_tiles
from engine.parallel.eplb import Placement, rebalance_experts, slot_tables
from engine.quantization.experts import quantize_experts
from engine.quantization.formats import FORMATS
from engine.sampling.sampler import uniforms
from lab import experts, figures, layouts, timing
from lab.parameters import checked

KEY = "05e_experts"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

EXPERTS, GPUS, STEPS, INTERVAL = 16, 4, 12, 4  # experts move after every INTERVAL steps
READ = {"16 bits": 64, "4 bits": 16}  # ticks in which a GPU reads an expert
ROW, HELLO = 2, 16  # ticks to multiply a token with an expert, and of an all-to-all with nothing in it; a row sent: 1
POPULAR = [5, 12, 6, 1, 10, 7, 0, 15, 3, 8, 13, 2, 9, 14, 4, 11]  # experts, the most popular first
SHIFT = 6  # from this step on, "shifting" traffic prefers others
WIDGET_CHOICES = {
    "tokens": [1, 8, 32, 256],
    "top_k": [1, 2],
    "routing": ["even", "skewed", "shifting"],
    "placement": ["in order", "EPLB", "EPLB, 4 replicas"],
    "weights": list(READ),
}
WIDGET_DEFAULT = {
    "tokens": 256,
    "top_k": 2,
    "routing": "skewed",
    "placement": "EPLB, 4 replicas",
    "weights": "16 bits",
}


def popularity(routing: str, step: int) -> list[int]:
    """Weights of the experts, whole numbers: all alike, or of the r-th most popular one r-th of the first's."""
    if routing == "even":
        return [1] * EXPERTS
    order = POPULAR[::-1] if routing == "shifting" and step >= SHIFT else POPULAR
    found = [0] * EXPERTS
    for r, expert in enumerate(order):
        found[expert] = 720720 // (r + 1)
    return found


def chosen(weights: Sequence[int], u: Sequence[float]) -> list[int]:
    """Experts of one token, drawn one after the other and none twice: as many as there are numbers in `u`."""
    left, found = list(weights), []
    for x in u:
        at = x * sum(left)
        sums = itertools.accumulate(left)
        found.append(next(expert for expert, upto in enumerate(sums) if at < upto))
        left[found[-1]] = 0
    return found


def place(routed: list[list[int]], placement: Placement) -> list[list[int]]:
    """How many pairs each GPU's tokens send to each slot. Token i is GPU i mod 4's; replicas take turns."""
    slots, copies = (table.tolist() for table in slot_tables(placement, torch.device("cpu")))
    flow = [[0] * len(placement.experts) for _ in range(GPUS)]
    for i, ids in enumerate(routed):
        for expert in ids:
            flow[i % GPUS][slots[expert][i // GPUS % copies[expert]]] += 1
    return flow


def cost(flow: list[list[int]], placement: Placement, read: int) -> dict[str, Any]:
    """One step: what it reads and sends, and when each GPU is done. All wait for all, at both all-to-alls."""
    rows = [sum(column) for column in zip(*flow)]
    mine = [placement.slots(gpu) for gpu in range(GPUS)]
    leaving = [sum(flow[gpu]) - sum(flow[gpu][slot] for slot in mine[gpu]) for gpu in range(GPUS)]
    arriving = [
        sum(flow[other][slot] for other in range(GPUS) if other != gpu for slot in mine[gpu]) for gpu in range(GPUS)
    ]
    work = [max(read, ROW * n) if n else 0 for n in rows]
    busy = [sum(work[slot] for slot in mine[gpu]) for gpu in range(GPUS)]
    send = HELLO + max(*leaving, *arriving)
    return {
        "rows": rows,
        "useful": [ROW * n for n in rows],
        "work": work,
        "busy": busy,
        "send": send,
        "sent": sum(leaving),
        "ticks": send + max(busy) + send,
        "asked": len({placement.experts[slot] for slot, n in enumerate(rows) if n}),
        "read": sum(n > 0 for n in rows),
        "waiting": round_half_up(100 * (GPUS * max(busy) - sum(busy)), GPUS * max(busy)),
    }


def round_half_up(a: int, b: int) -> int:
    """a / b to the nearest whole number, as JavaScript rounds it."""
    return (2 * a + b) // (2 * b)


def simulate(params: dict) -> dict:
    """A layer of 16 experts on 4 GPUs for 12 steps, through the engine's placement and balancer. Raises InputError."""
    params = checked(params, WIDGET_CHOICES)
    T, k, read = params["tokens"], params["top_k"], READ[params["weights"]]
    u = uniforms([7] * (STEPS * T * k), range(STEPS * T * k)).tolist()
    plain = placement = Placement.plain(EXPERTS, GPUS)
    slots = EXPERTS + (4 if "replicas" in params["placement"] else 0)
    if slots > EXPERTS:
        placement = rebalance_experts([1] * EXPERTS, slots, GPUS)  # nothing is known of the load yet
    load, steps, in_order = [0] * EXPERTS, [], 0
    for step in range(STEPS):
        weights = popularity(params["routing"], step)
        routed = [chosen(weights, u[at : at + k]) for at in range(step * T * k, (step + 1) * T * k, k)]
        moved = 0
        if step and step % INTERVAL == 0 and params["placement"] != "in order":
            better = rebalance_experts(load, slots, GPUS)
            moved = sum(a != b for a, b in zip(placement.experts, better.experts))
            load, placement = [0] * EXPERTS, better
        flow = place(routed, placement)
        steps.append({"slots": list(placement.experts), "moved": moved, "flow": flow, **cost(flow, placement, read)})
        in_order += cost(place(routed, plain), plain, read)["ticks"]
        for expert in itertools.chain(*routed):
            load[expert] += 1
    return {"params": params, "steps": steps, "final": {"ticks": sum(s["ticks"] for s in steps), "in_order": in_order}}


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    params, last = trace["params"], trace["steps"][-1]
    lines = [
        f"{params['tokens']} tokens, {params['top_k']} of {EXPERTS} experts each, {params['routing']} routing, "
        f"{params['placement']}",
        f"the last step reads {last['asked']} experts in {last['read']} places, and sends {last['sent']} rows",
    ]
    size = len(last["slots"]) // GPUS
    for gpu, busy in enumerate(last["busy"]):
        here = range(gpu * size, (gpu + 1) * size)
        shown = "  ".join(f"e{last['slots'][slot]} {last['rows'][slot]}" for slot in here)
        lines.append(f"GPU {gpu}: {shown}: {busy} ticks")
    lines.append(f"it takes {last['ticks']} ticks; GPUs wait {last['waiting']} % of the time between the all-to-alls")
    lines.append(f"ticks of all steps: {' '.join(str(step['ticks']) for step in trace['steps'])}")
    lines.append(f"together {trace['final']['ticks']:,}, with experts in order {trace['final']['in_order']:,}")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

QWEN = experts.MODELS["Qwen3-30B-A3B"]
INT4 = 4 + 16 / 128  # bits of a weight, with an fp16 scale for 128
# DeepEP's README (V1, H800, 128 tokens per rank, hidden 7168, 8 experts, fp8 there and bf16 back): µs by ranks.
DEEP_EP = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
DEEP_EP_TOKENS = 128
V3 = {"layers": 58, "experts": 256, "top_k": 8, "hidden": 7168, "intermediate": 2048}


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers. Models are named as by `roofline.slug`."""
    widget = {
        name: simulate(WIDGET_DEFAULT | params)
        for name, params in (
            ("default", {}),
            ("in_order", {"placement": "in order"}),
            ("eight", {"tokens": 8, "routing": "even", "placement": "in order"}),
            ("one", {"tokens": 1, "routing": "even", "placement": "in order"}),
            ("small", {"tokens": 32}),
        )
    }
    return {
        "models": experts.facts(),
        "dense": {which: lesson.dense_bytes("Qwen3-30B-A3B", which) for which in ("active", "total")},
        "h100_ms": {str(n): lesson.read_ms("Qwen3-30B-A3B", n) for n in lesson.BATCHES},
        "growth_32": experts.step_bytes(QWEN, 32) / experts.step_bytes(QWEN, 1),
        "ridge": lesson.H100.ridge,
        "int4": int4(),
        "tiles": {str(n): filled(n) for n in lesson.BATCHES},
        "v3": v3(),
        "widget": {
            name: {key: trace["steps"][-1][key] for key in ("asked", "read", "sent", "waiting", "ticks")}
            | trace["final"]
            for name, trace in widget.items()
        },
    }


def int4() -> dict[str, float]:
    """Qwen3-30B-A3B with its experts in 4 bits, all else in 16."""
    found = experts.parameters(QWEN)
    assert QWEN.moe

    def step(tokens: int) -> float:
        asked = experts.expected_experts(QWEN.moe.num_experts, QWEN.moe.top_k, tokens) / QWEN.moe.num_experts
        return 2 * found["shared"] + INT4 / 8 * asked * found["experts"]

    rows = lesson.H100.ridge * INT4 / 16
    return {
        "weights_gb": (2 * (found["shared"] + found["embedding"]) + INT4 / 8 * found["experts"]) / 1e9,
        "step_gb_32": step(32) / 1e9,
        "rows": rows,
        "tokens": rows * QWEN.moe.num_experts / QWEN.moe.top_k,
    }


def filled(tokens: int) -> float:
    """The share of the kernel's tiles that is rows of tokens, for a router that prefers nobody."""
    assert QWEN.moe
    ids, E = experts.routed(QWEN.moe, tokens), QWEN.moe.num_experts
    tiles = align_block_size(ids, range(E), choose_tiles(torch.bfloat16, ids.numel(), E)[0])
    return ids.numel() / (tiles.block_m * int((tiles.table[:, 0] >= 0).sum()))


def v3() -> dict[str, Any]:
    """DeepSeek-V3's experts in fp8 on n GPUs, 128 tokens on each: what is read, what a layer's rows take to travel."""
    one = 3 * V3["hidden"] * V3["intermediate"]  # bytes of an expert
    r1 = layouts.models()["DeepSeek-R1"]
    found = {}
    for n, (there, back) in DEEP_EP.items():
        tokens = n * DEEP_EP_TOKENS
        asked = experts.expected_experts(V3["experts"], V3["top_k"], tokens) / n
        found[str(n)] = {
            "experts": V3["experts"] / n,
            "rows": tokens * V3["top_k"] / V3["experts"],
            "read_ms": 1e3 * V3["layers"] * asked * one / lesson.H100.bandwidth,
            "talk_ms": 1e-3 * V3["layers"] * (there + back),
            "there_gb_s": DEEP_EP_TOKENS * V3["top_k"] * V3["hidden"] / there / 1e3,
        }
    return {
        "expert_mb": one / 1e6,
        "experts_gb": r1.expert_bytes / 1e9,
        "asked": {str(n): experts.expected_experts(V3["experts"], V3["top_k"], n) for n in lesson.BATCHES},
        "pair_bytes": 3 * V3["hidden"],
        "token_mb": V3["layers"] * V3["top_k"] * 3 * V3["hidden"] / 1e6,
        "ranks": found,
    }


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """What a step reads and how many rows an expert gets, by batch; and how long ranks wait for the busiest."""
    return [_draw_bytes(folder), _draw_balance(folder)]


def _draw_bytes(folder: str | Path) -> Path:
    figure, (left, right) = figures.new_figure(8.0, 3.5, ncols=2)
    tokens, colors = [2**i for i in range(14)], figures.COLORS
    read = [experts.step_bytes(QWEN, n) / 1e9 for n in tokens]
    left.plot(tokens, read, "-o", color=colors["blue"], markersize=3.5, label="Qwen3-30B-A3B")
    for which, name in (("total", "dense, as many weights in all"), ("active", "dense, as many as a token uses")):
        left.axhline(
            lesson.dense_bytes("Qwen3-30B-A3B", which) / 1e9, linestyle="--", color=colors["grey"], linewidth=1
        )
        left.text(
            8192, lesson.dense_bytes("Qwen3-30B-A3B", which) / 1e9 + 1, name, ha="right", va="bottom", fontsize=8.5
        )
    left.set(xscale="log", ylim=(0, 70), xlabel="tokens in the step", ylabel="GB read", title="What a step reads")
    rows = [experts.rows_per_expert(QWEN, n) for n in tokens]
    right.plot(tokens, tokens, "-", color=colors["grey"], label="a dense layer")
    right.plot(tokens, rows, "-o", color=colors["blue"], markersize=3.5, label="an expert")
    right.axhline(lesson.H100.ridge, linestyle="--", color=colors["red"], linewidth=1)
    right.text(1, lesson.H100.ridge * 1.2, "an H100 computes\nas long as it reads", fontsize=8.5, color=colors["red"])
    right.set(xscale="log", yscale="log", ylim=(0.8, 10000), xlabel="tokens in the step", ylabel="rows")
    right.set_title("Rows for each matrix that is read")
    right.legend(fontsize=8.5, loc="lower right")
    for ax in (left, right):
        ax.set_xticks([1, 8, 32, 256, 4096], ["1", "8", "32", "256", "4,096"])
        ax.minorticks_off()
    return figures.save_figure(figure, folder, "05e_bytes")


def _draw_balance(folder: str | Path) -> Path:
    figure, ax = figures.new_figure(8.0, 3.0)
    balance = experts.facts()["balance"]
    ways = {
        "plain": "in order",
        "packed": "EPLB",
        "16_replicas": "EPLB, 16 replicas",
        "32_replicas": "EPLB, 32 replicas",
    }
    for i, (way, name) in enumerate(ways.items()):
        at = [skew + (i - 1.5) * 0.2 for skew in range(3)]
        waits = [100 * (1 - 1 / found[way]) for found in balance.values()]
        bars = ax.bar(at, waits, 0.18, color=figures.COLORS[("red", "orange", "blue", "green")[i]], label=name)
        ax.bar_label(bars, fmt="%.0f", fontsize=8.5, padding=2)
    ax.set(xticks=range(3), ylabel="% of the time waiting", ylim=(0, 62))
    ax.set_xticklabels(["all experts alike", "favourite r: odds ∝ r$^{-½}$", "favourite r: odds ∝ r$^{-1}$"])
    ax.set_title("128 experts on 16 ranks: how long an average rank waits for the busiest")
    ax.legend(fontsize=8.5, loc="upper left")
    return figures.save_figure(figure, folder, "05e_balance")


# --- What `--bench` measures ------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A layer of experts by batch, in floats and in 4 bits: on a GPU one of Qwen3-30B-A3B, on a CPU a quarter of it."""
    gpu = common.HAS_GPU
    E, k, H, I = (128, 8, 2048, 768) if gpu else (64, 4, 1024, 384)
    dtype = torch.bfloat16 if gpu else torch.float32
    common.heading(f"Measured: a layer of {E} experts of {H} x {I}, {k} for each token")
    layer = layouts.random_moe(E, H, I, k, args.seed, common.device())
    floats = layouts.stacked(layer)
    floats.gate_up, floats.down = floats.gate_up.to(dtype), floats.down.to(dtype)
    kinds = {"floats": floats, "int4": quantize_experts(floats, FORMATS["int4-g128"])}
    found: dict[str, Any] = {"experts": E, "top_k": k, "hidden": H, "intermediate": I, "ms": {}, "asked": {}}
    rows = []
    for tokens in (*lesson.BATCHES, 1024):
        x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(1)).to(common.device(), dtype)
        weights, ids = layouts.choose(layer, x.float())
        ms = {
            name: 1e3 * timing.measure(functools.partial(kind, x, weights, ids)).median for name, kind in kinds.items()
        }
        found["ms"][str(tokens)], found["asked"][str(tokens)] = ms, int(ids.unique().numel())
        rows.append([tokens, found["asked"][str(tokens)], *(f"{ms[name]:.2f}" for name in kinds)])
    common.table(["tokens", "experts read", f"ms, {str(dtype).removeprefix('torch.')}", "ms, 4 bits"], rows)
    return found

"""What `lessons/05c_tensor_parallel.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine import registry
from engine.distributed.group import GroupCoordinator
from engine.model import folders, llama
from engine.parallel.layers import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from engine.parallel.ranks import launch
from lab import figures, rank_times, roofline
from lab.links import LINKS, wire_bytes
from lab.parameters import checked

KEY = "05c_tensor_parallel"
lesson = registry.lesson(KEY)


# --- The simulation behind the widget ---------------------------------------------------------------------------------

A = [[1, 0, 2, -1], [0, 1, 1, 1], [2, -1, 0, 1], [1, 1, -1, 0], [-1, 2, 1, 0], [0, -2, 1, 1], [1, 1, 0, 2],
     [-1, 0, 1, 1]]  # fmt: skip
B = [[1, 0, -1, 2, 1, 0, 1, -1], [0, 1, 1, 0, -2, 1, 0, 2], [2, 0, 1, -1, 0, 1, -1, 0], [1, -1, 0, 1, 1, 0, 2, 1]]
INPUTS = {
    "mixed": [1, -2, 3, 1],  # neurons of every rank fire
    "lucky": [1, 0, 1, -3],  # only neurons of rank 0 fire: its partial sum is the whole
    "positive": [1, 2, 1, 1],
}
ORDERS = ["column, row", "row, column"]
WIDGET_CHOICES = {
    "ranks": [1, 2, 4],
    "order": ORDERS,
    "all_reduce": ["kept", "skipped"],
    "input": list(INPUTS),
}
WIDGET_DEFAULT = {"ranks": 2, "order": "column, row", "all_reduce": "kept", "input": "mixed"}


def simulate(params: dict) -> dict:
    """One MLP block y = B·relu(A·x), step by step, on integers, through the engine's layers. Raises InputError.

    Each step has a value per rank and a layout: replicated (all equal), sharded (concatenate), partial (add), or
    broken (neither; the ranks no longer agree and do not know it). `sent` counts elements, on a ring.
    """
    params = checked(params, WIDGET_CHOICES)
    n, keep, x = params["ranks"], params["all_reduce"] == "kept", INPUTS[params["input"]]
    weights = {"A": torch.tensor(A, dtype=torch.float64), "B": torch.tensor(B, dtype=torch.float64)}  # exact integers
    groups = [GroupCoordinator(range(n), r, torch.device("cpu")) for r in range(n)]
    steps: list[dict] = []

    def layer(kind: type[ParallelLinear], name: str, group: GroupCoordinator) -> Callable:
        made = kind(llama.Linear(kind.shard(weights[name], group.rank_in_group, n)), group)
        made.reduce_results = False  # the sum is a step of its own here
        return made

    def show(name: str, values: list[torch.Tensor], layout: str, sent: int = 0) -> list[torch.Tensor]:
        steps.append({"name": name, "layout": layout, "sent": sent, "values": [[int(v) for v in x[0]] for x in values]})
        return values

    def reduce(values: list[torch.Tensor]) -> list[torch.Tensor]:
        if not keep and n > 1:
            return show("all-reduce skipped", values, "broken")
        sent = int(wire_bytes("all_reduce", values[0].numel(), n))
        return show("all-reduce", [torch.stack(values).sum(0)] * n, "replicated", sent)

    state = show("x", [torch.tensor([x], dtype=torch.float64)] * n, "replicated")
    if params["order"] == ORDERS[0]:
        state = [layer(ColumnParallelLinear, "A", g)(x) for x, g in zip(state, groups)]
        state = show("column-parallel A, then relu", [h.relu() for h in state], "sharded")
        state = [layer(RowParallelLinear, "B", g)(h) for h, g in zip(state, groups)]
        state = reduce(show("row-parallel B", state, "partial"))
    else:
        state = show("each takes its slice of x", [x.chunk(n, dim=1)[r] for r, x in enumerate(state)], "sharded")
        state = [layer(RowParallelLinear, "A", g)(x) for x, g in zip(state, groups)]
        state = reduce(show("row-parallel A", state, "partial"))
        state = show("relu", [h.relu() for h in state], steps[-1]["layout"])
        state = [layer(ColumnParallelLinear, "B", g)(h) for h, g in zip(state, groups)]
        state = show("column-parallel B", state, "sharded")
        sent = int(wire_bytes("all_gather", n * state[0].numel(), n))
        state = show("all-gather", [torch.cat(state, dim=1)] * n, "replicated", sent)
    reference = [int(v) for v in (torch.tensor([x], dtype=torch.float64) @ weights["A"].T).relu()[0] @ weights["B"].T]
    final = steps[-1]["values"]
    return {
        "steps": steps,
        "reference": reference,
        "right": [v == reference for v in final],
        "agree": all(v == final[0] for v in final),
        "collectives": sum(step["sent"] > 0 for step in steps),
        "sent": sum(step["sent"] for step in steps),
    }


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    lines = [f"y must be {' '.join(map(str, trace['reference']))}"]
    for step in trace["steps"]:
        values = [" ".join(map(str, value)) for value in step["values"]]
        same = step["layout"] == "replicated"
        shown = f"{values[0]} on every rank" if same else " | ".join(values)
        lines.append(f"{step['name']} ({step['layout']}): {shown}")
    wrong = [str(r) for r, right in enumerate(trace["right"]) if not right]
    verdict = f"wrong on rank {', '.join(wrong)}" if wrong else "right on every rank"
    lines.append(f"{verdict}; collectives: {trace['collectives']}, numbers sent by each rank: {trace['sent']}")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

# Of NVIDIA's table behind `LINKS`: three points that the model fits, and the two farthest above it, on 8 and on 2 GPUs.
PUBLISHED = {"2mb_tp2": (2 << 20, 2, 12.4e-6), "2mb_tp8": (2 << 20, 8, 18.1e-6), "32mb_tp8": (32 << 20, 8, 166e-6)}
MISFITS = {"256kb_tp8": (256 << 10, 8, 10.1e-6), "8mb_tp2": (8 << 20, 2, 43.0e-6)}
SIZES = {"SmolLM2-135M": (1, 3), "Llama-3.1-8B": (1, 2, 4, 8, 16), "Llama-3.1-70B": (1, 2, 4, 8, 16)}
LARGE = ("Llama-3.1-8B", "Llama-3.1-70B")
GPUS = (1, 2, 4, 8)


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers. Models are named as by `roofline.slug`: Llama-3.1-8B is llama_31_8b."""
    fit, misfit = (
        {
            name: LINKS["nvlink"].seconds("all_reduce", payload, n) / seconds - 1
            for name, (payload, n, seconds) in table.items()
        }
        for table in (PUBLISHED, MISFITS)
    )
    orders = {order: simulate(WIDGET_DEFAULT | {"order": order}) for order in ORDERS}
    return {
        "wire": one_token(),
        "decode": {roofline.slug(model): decode(model) for model in LARGE},
        "prefill": {
            roofline.slug(model): {link: prefill(model, link) for link in ("nvlink", "pcie5")} for model in LARGE
        },
        "fit": fit,
        "worst_fit": max(map(abs, fit.values())),
        "too_low": {name: -error for name, error in misfit.items()},
        "shared": {roofline.slug(model): shared(model, smallest) for model, smallest in zip(LARGE, (1, 2))},
        "owns": {
            roofline.slug(model): {str(n): lesson.ownership(model, n) for n in sizes} for model, sizes in SIZES.items()
        },
        "orders": {
            order.replace(", ", "_"): {"collectives": trace["collectives"], "sent": trace["sent"]}
            for order, trace in orders.items()
        },
    }


def one_token() -> dict[str, Any]:
    """What one token of SmolLM2 makes each of three ranks send in fp32, in bytes; and the factors of a ring."""
    small = roofline.llama_config(roofline.MODELS["SmolLM2-135M"])
    traffic = lesson.step_traffic(small, n=3, tokens=1, rows=1, itemsize=4)
    sent = {name: wire_bytes(name, counted["bytes"], 3) for name, counted in traffic.items()}
    return {
        "calls": traffic["all_reduce"]["calls"],
        "payload": small.hidden_size * 4,
        "all_reduce": sent["all_reduce"],
        "all_gather": sent["all_gather"],
        "gather_share": sent["all_gather"] / sum(sent.values()),
        "pairs": 8 * 2,
        "factor": {str(n): 2 * (n - 1) / n for n in (2, 3, 4, 8, 72)},
    }


def decode(model: str) -> dict[str, Any]:
    """A step of one sequence on 1 to 8 H200s, by link and GPUs: milliseconds, and how many times as fast as on one.

    `n_half` is the number of GPUs at which the latencies alone take as long as reading the weights.
    """
    links = ("nvlink", "nvlink_eager")
    times = {link: {str(n): lesson.step_seconds(model, n, LINKS[link]) for n in GPUS} for link in links}
    one = times["nvlink"]["1"]["total"]
    calls = 2 * roofline.MODELS[model]["num_hidden_layers"] + 1
    floor = {link: LINKS[link].latency * calls for link in links}
    return {
        "ms": {link: {n: 1e3 * t["total"] for n, t in of.items()} for link, of in times.items()},
        "talk_ms": {link: {n: 1e3 * t["talk"] for n, t in of.items()} for link, of in times.items()},
        "read_ms": {n: 1e3 * t["compute"] for n, t in times["nvlink"].items()},
        "speedup": {link: {n: one / t["total"] for n, t in of.items()} for link, of in times.items()},
        "floor_ms": {link: 1e3 * seconds for link, seconds in floor.items()},
        "n_half": {link: one / seconds for link, seconds in floor.items()},
    }


def prefill(model: str, link: str) -> dict[str, Any]:
    """A chunk of 1,024 tokens on 1 to 8 H200s: milliseconds, times as fast as on one, share spent in collectives.

    `even_at` is the share of its peak at which one GPU, computing, takes as long as eight, computing and talking.
    """
    t = {n: lesson.step_seconds(model, n, LINKS[link], 1, 1024, 1024) for n in GPUS}
    found: dict[str, Any] = {
        str(n): {
            "ms": 1e3 * t[n]["total"],
            "speedup": t[1]["total"] / t[n]["total"],
            "share": t[n]["talk"] / t[n]["total"],
        }
        for n in t
    }
    return found | {"even_at": (t[1]["total"] - t[8]["compute"]) / t[8]["talk"]}


def shared(model: str, smallest: int) -> dict[str, Any]:
    """Eight GPUs as one engine, or as replicas of `smallest` GPUs, the fewest that hold the model."""

    def step(n: int, num_seqs: int) -> float:
        return lesson.step_seconds(model, n, LINKS["nvlink"], num_seqs * n // 8)["total"]

    found: dict[str, Any] = {}
    for name, n in (("replicas", smallest), ("one", 8)):
        owns, groups = lesson.ownership(model, n), 8 // n
        room = roofline.GPU_MEMORY_UTILIZATION * lesson.H200.memory - owns["weight_bytes"]
        found[name] = {
            "kv_tokens": groups * int(room // owns["kv_bytes"]),
            "tokens_per_second": {str(b): b / step(n, b) for b in (512, 2048)},
            "ms": {str(b): 1e3 * step(n, b) for b in (512, 2048)},
            "prefill": groups * 1024 / lesson.step_seconds(model, n, LINKS["nvlink"], 1, 1024, 1024)["total"],
        }
    return found | {"even_at": next(b for b in range(8, 1 << 14, 8) if step(smallest, b) < step(8, b))}


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The widget's block with its numbers, and what more GPUs do to a decode step."""
    return [_draw_block(folder), _draw_scaling(folder)]


def _draw_block(folder: str | Path) -> Path:
    import matplotlib.pyplot as plt

    trace = simulate(WIDGET_DEFAULT)
    x, h, p, y = (step["values"] for step in trace["steps"])
    ranks, common_tint = ("#cfe0f1", "#f6dfc4"), figures.COLORS["light"]
    figure, ax = figures.new_figure(8.0, 3.7)

    def matrix(left: float, rows: list[list[int]], tint: Callable[[int, int], str], title: str, top: float) -> None:
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                at = (left + j, top - i)
                ax.add_patch(plt.Rectangle(at, 1, 1, facecolor=tint(i, j), edgecolor="white", linewidth=1.5))
                ax.text(at[0] + 0.5, at[1] + 0.5, str(value).replace("-", "−"), ha="center", va="center", fontsize=8)
        ax.text(left + len(rows[0]) / 2, top + 1.35, title, ha="center", va="bottom", fontsize=9, linespacing=1.35)

    def column(values: list[int]) -> list[list[int]]:
        return [[value] for value in values]

    matrix(0, column(x[0]), lambda i, j: common_tint, "x\non both", 5)
    matrix(2.6, A, lambda i, j: ranks[i // 4], "A\ncut by rows", 7)
    matrix(8.2, column(h[0] + h[1]), lambda i, j: ranks[i // 4], "relu(Ax)\nsharded", 7)
    matrix(10.8, B, lambda i, j: ranks[j // 4], "B\ncut by columns", 5)
    matrix(20.4, column(p[0]), lambda i, j: ranks[0], "partial", 5)
    matrix(22.4, column(p[1]), lambda i, j: ranks[1], "sums", 5)
    matrix(25.8, column(y[0]), lambda i, j: common_tint, "y\non both", 5)
    for at, sign in ((1.8, "→"), (7.4, "→"), (10.0, "→"), (19.6, "→"), (21.9, "+"), (24.6, "→")):
        ax.text(at, 4.0, sign, ha="center", va="center", fontsize=13)
    ax.text(24.6, 3.3, "all-\nreduce", ha="center", va="top", fontsize=8.5, color=figures.COLORS["red"])
    ax.add_patch(plt.Rectangle((0, -1.6), 1, 0.8, facecolor=ranks[0]))
    ax.text(1.4, -1.2, "rank 0 alone", va="center", fontsize=9)
    ax.add_patch(plt.Rectangle((7, -1.6), 1, 0.8, facecolor=ranks[1]))
    ax.text(8.4, -1.2, "rank 1 alone", va="center", fontsize=9)
    ax.add_patch(plt.Rectangle((14, -1.6), 1, 0.8, facecolor=common_tint))
    ax.text(15.4, -1.2, "the same on both", va="center", fontsize=9)
    ax.set(xlim=(-0.4, 27.2), ylim=(-1.8, 10.4), aspect="equal")
    ax.axis("off")
    return figures.save_figure(figure, folder, "05c_block")


def _draw_scaling(folder: str | Path) -> Path:
    figure, axes = figures.new_figure(8.0, 3.4, ncols=2)
    for ax, name in zip(axes, ("llama_31_8b", "llama_31_70b")):
        found = facts()["decode"][name]
        sizes = list(found["read_ms"])
        at = range(len(sizes))
        read = [found["read_ms"][n] for n in sizes]
        graph = [found["talk_ms"]["nvlink"][n] for n in sizes]
        eager = [found["talk_ms"]["nvlink_eager"][n] - t for n, t in zip(sizes, graph)]
        bars = ax.bar(at, read, 0.6, color=figures.COLORS["blue"], label="reading weights and KV")
        ax.bar(at, graph, 0.6, read, color=figures.COLORS["orange"], label="collectives, in a CUDA graph")
        hatched = {"color": "white", "hatch": "////", "linewidth": 0.8, "edgecolor": figures.COLORS["orange"]}
        ax.bar(at, eager, 0.6, [a + b for a, b in zip(read, graph)], label="… launched one by one", **hatched)
        for i, n in enumerate(sizes):
            speedups = [found["speedup"][link][n] for link in ("nvlink", "nvlink_eager")]
            if i:
                top = read[i] + graph[i] + eager[i] + 0.015 * read[0]
                ax.text(i, top, f"{speedups[0]:.1f}× / {speedups[1]:.1f}×", ha="center", va="bottom", fontsize=8.5)
        fits = " (one cannot hold it)" if name.endswith("70b") else ""
        bars[0].set_alpha(0.35 if fits else 1)
        ax.set(xticks=list(at), xticklabels=sizes, xlabel=f"H200s{fits}", ylim=(0, 1.4 * read[0]))
        ax.set(ylabel="ms per decode step, batch 1", title=f"Llama-3.1-{name[9:].upper()}, bf16")
    axes[0].legend(*axes[0].get_legend_handles_labels(), fontsize=8.5, loc="upper right", bbox_to_anchor=(1.04, 1.0))
    return figures.save_figure(figure, folder, "05c_scaling")


# --- What `--bench` measures ------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All-reduce by size and decode step by ranks, in processes of one thread each: a minute."""
    common.heading("Measured: processes of one thread each")
    bench = launch(4, rank_times.time_ranks, args.model, timeout=600)[0]
    bench["cores"] = os.cpu_count()
    sizes = [f"{int(size):,} bytes" for size in bench["all_reduce_us"]["2"]]
    rows = [
        [f"{size} ranks", *(f"{t:,.0f} µs" for t in times.values())] for size, times in bench["all_reduce_us"].items()
    ]
    common.table([f"{bench['backend']} all-reduce of", *sizes], rows)
    rows = []
    for name, by_size in bench["step_ms"].items():
        label = Path(args.model or folders.DEFAULT_MODEL).name if name == "smollm2" else name
        for size, times in by_size.items():
            rows.append([label, size, *(f"{t:.1f} ms, {by_size['1'][b] / t:.2f}x" for b, t in times.items())])
    common.table(["decode step", "ranks", "1 sequence", "8 sequences"], rows)
    if bench["backend"] == "gloo" and common.HAS_GPU:
        common.skipped("NCCL", f"it needs a GPU for each of 4 ranks, here are {torch.cuda.device_count()}")
    return bench

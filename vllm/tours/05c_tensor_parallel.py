"""05c · Tensor parallelism: one layer on several GPUs.

The question: a decode step reads every weight once. If eight GPUs read an eighth each, is it eight times as fast? And
what must they tell each other so that the answer stays the same?

The mechanism:
  1. Cut the first matrix of a block by its outputs: every rank computes some neurons, or some heads, alone.
  2. What stands between the two matrices (SiLU and product, RoPE and attention) is per neuron, or per head: no
     communication.
  3. Cut the second matrix by its inputs, so that it takes exactly what the rank has. It yields a partial sum.
  4. One all-reduce adds the partial sums. Every rank has the whole result, which is what the next block starts from.
  5. So: one all-reduce per attention, one per MLP; one for the embedding, and the logits are gathered.
  6. Query heads are divided. KV heads too or, where there are fewer of them than ranks, copied.
  7. A rank is a narrower Llama with three extra calls. Scheduler, block tables and sampling never notice.
  8. Ranks are processes. They find each other through a small store, and talk through gloo (CPU) or NCCL (GPUs).

Numbers to remember: 2 all-reduces per layer. Each sends 2(n−1)/n of its tensor, so hardly more for 8 ranks than for 2,
and costs 4.5 µs in a CUDA graph on NVLink, 20.8 µs outside (H200, NVIDIA aiconfigurator), however small it is.

How to run:
  uv run python -m vllm.tours.05c_tensor_parallel                           the whole story: 3 ranks; 4 for some checks
  uv run python -m vllm.tours.05c_tensor_parallel --tensor-parallel-size 9  refused: 9 heads, but 1536 neurons
  uv run python -m vllm.tours.05c_tensor_parallel --skip-all-reduce         break it: every rank keeps its partial sum
  uv run python -m vllm.tours.05c_tensor_parallel --bench                   a minute: all-reduce by size, steps by ranks

Read for this: Shoeybi et al. 2019 (Megatron-LM), Patarasuk & Yuan 2009 (ring all-reduce), Pope et al. 2022 (scaling
inference), vLLM 0.32 `model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, `distributed/parallel_state.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine import arguments
from lab import cli
from lab import figures
from lab import recorded
from lab.hardware import HARDWARE
from lab.parameters import checked
from engine.model import folders, llama, loader
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.distributed.group import GroupCoordinator, new_group
from engine.model.packed_linear import pack_weights
from engine.parallel import sharding
from engine.parallel.layers import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from engine.parallel.model import TensorParallelLlama, load_shard, map_local, shard_model
from engine.parallel.ranks import Ranks, launch, start_context
from lab import naive, offline_run, roofline
from lab.layouts import default_size
from lab.links import LINKS, Link, wire_bytes

KEY = "05c_tensor_parallel"


# --- What we want: one block, whole and in slices ---------------------------------------------------------------------


def mlp(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """y = f(x Aᵀ) Bᵀ, on one machine. x [T, H], A [I, H], B [H, I]."""
    return F.silu(x @ A.T) @ B.T


def mlp_in_slices(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, n: int) -> torch.Tensor:
    """The same as a sum over n ranks: y = Σ_r f(x A_rᵀ) B_rᵀ, where A_r are rows of A, and B_r columns of B.

    Neuron i needs all of x, row i of A, and nothing of its neighbours; y is a sum over neurons. So any partition of the
    neurons will do, and the one thing that needs all ranks is the sum.
    """
    partial_sums = [F.silu(x @ A_r.T) @ B_r.T for A_r, B_r in zip(A.chunk(n), B.chunk(n, dim=1))]
    return torch.stack(partial_sums).sum(0)


# --- The group: ranks that talk ---------------------------------------------------------------------------------------


def ring_all_reduce(x: torch.Tensor, group: GroupCoordinator) -> tuple[torch.Tensor, int]:
    """An all-reduce from sends to the right and receives from the left alone. Returns the sum and the bytes sent.

    Semantics: out = Σ_r x_r. Shapes: any. The result has the same bits on every rank: each chunk's sum is computed
    once, by one rank, and then handed around. (Patarasuk & Yuan 2009: no ranks that add for themselves send less.)
    """
    n, r, size = group.world_size, group.rank_in_group, x.numel()
    right, left = group.ranks[(r + 1) % n], group.ranks[(r - 1) % n]
    flat = F.pad(x.to(group.wire).flatten(), (0, -size % n))
    chunks, sent = list(flat.chunk(n)), 0

    def exchange(chunk: torch.Tensor) -> torch.Tensor:
        nonlocal sent
        received, sent = torch.empty_like(chunk), sent + chunk.nbytes
        operations = [dist.P2POp(dist.isend, chunk, right, group.process_group),
                      dist.P2POp(dist.irecv, received, left, group.process_group)]  # fmt: skip
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    for step in range(n - 1):  # reduce-scatter: a chunk collects one rank's share at every stop
        arriving = (r - step - 1) % n
        chunks[arriving] = chunks[arriving] + exchange(chunks[(r - step) % n])
    for step in range(n - 1):  # all-gather: rank r has finished chunk r + 1, and passes on what it gets
        chunks[(r - step) % n] = exchange(chunks[(r + 1 - step) % n])
    return torch.cat(chunks)[:size].view(x.shape).to(x.device), sent


# --- The break --------------------------------------------------------------------------------------------------------


def skip_all_reduce(model: TensorParallelLlama) -> None:
    """The break: every rank keeps its partial sums and calls them the result. All shapes are right."""
    for layer in model.linear.values():
        if isinstance(layer, RowParallelLinear):
            layer.reduce_results = False


# --- What is sent, and how long it takes ------------------------------------------------------------------------------


def step_traffic(config: LlamaConfig, n: int, tokens: int, rows: int, itemsize: int) -> dict[str, dict[str, int]]:
    """Collectives of one forward pass over `tokens` tokens with logits for `rows` of them, as `take_counts` counts.

    all-reduces = 2 · L + 1, each of T · hidden elements; one all-gather of R · padded vocabulary.
    """
    if n == 1:
        return {}
    calls = 2 * config.num_hidden_layers + 1
    return {
        "all_reduce": {"calls": calls, "bytes": calls * tokens * config.hidden_size * itemsize},
        "all_gather": {"calls": 1, "bytes": rows * sharding.pad_vocab_size(config.vocab_size, n) * itemsize},
    }


def sent_per_rank(traffic: dict[str, dict[str, int]], n: int) -> dict[str, float]:
    """Bytes that one rank puts on the wire, per collective."""
    return {name: wire_bytes(name, counted["bytes"], n) for name, counted in traffic.items()}


# Of NVIDIA's table behind `LINKS`: three points that the model fits, and the two farthest above it, on 8 and on 2 GPUs.
PUBLISHED = {"2mb_tp2": (2 << 20, 2, 12.4e-6), "2mb_tp8": (2 << 20, 8, 18.1e-6), "32mb_tp8": (32 << 20, 8, 166e-6)}
MISFITS = {"256kb_tp8": (256 << 10, 8, 10.1e-6), "8mb_tp2": (8 << 20, 2, 43.0e-6)}
H200 = HARDWARE["H200 141GB"]


def step_seconds(model: str, n: int, link: Link, num_seqs: int = 1, num_new_tokens: int = 1,
                 context: int = 1024) -> dict[str, float]:  # fmt: skip
    """One forward pass of a bf16 model on n H200s: seconds to compute or read, and seconds in collectives.

    compute = roofline(FLOPs / n, bytes / n)        weights and KV divided; right as long as n ≤ Hkv
    talk    = (2L + 1) all-reduces of T · hidden + one all-gather of the logits
    """
    config = roofline.MODELS[model]
    flops, moved = roofline.step_cost(config, num_seqs, num_new_tokens, context)
    traffic = step_traffic(roofline.llama_config(config), n, num_seqs * num_new_tokens, num_seqs, itemsize=2)
    talk = sum(link.seconds(name, t["bytes"] // t["calls"], n, t["calls"]) for name, t in traffic.items())
    compute = H200.seconds(flops / n, moved / n)
    return {"compute": compute, "talk": talk, "total": compute + talk}


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
WIDGET_DEFAULT = {"ranks": 2, "order": "column, row", "all_reduce": "kept", "input": "mixed"}


def simulate(params: dict) -> dict:
    """One MLP block y = B·relu(A·x), step by step, on integers, through the layers of this lesson. Raises InputError.

    Each step has a value per rank and a layout: replicated (all equal), sharded (concatenate), partial (add), or
    broken (neither; the ranks no longer agree and do not know it). `sent` counts elements, on a ring.
    """
    allowed = {"ranks": [1, 2, 4], "order": ORDERS, "all_reduce": ["kept", "skipped"], "input": list(INPUTS)}
    params = checked(params, allowed)
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
    return {
        "steps": steps, "reference": reference, "right": [v == reference for v in steps[-1]["values"]],
        "agree": all(v == steps[-1]["values"][0] for v in steps[-1]["values"]),
        "collectives": sum(step["sent"] > 0 for step in steps), "sent": sum(step["sent"] for step in steps),
    }  # fmt: skip


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

SIZES = {"SmolLM2-135M": (1, 3), "Llama-3.1-8B": (1, 2, 4, 8, 16), "Llama-3.1-70B": (1, 2, 4, 8, 16)}


def ownership(model: str, n: int) -> dict[str, Any]:
    """What one of n ranks holds: heads, bytes of weights, bytes of KV per token (bf16)."""
    config = roofline.llama_config(roofline.MODELS[model])
    shard = sharding.shard_config(config, n)
    weights = sum(int(torch.Size(shape).numel()) for shape in llama.tensor_shapes(shard).values())
    kv = roofline.KVCacheSpec.from_config(dataclasses.asdict(shard)).bytes_per_token()
    whole = roofline.KVCacheSpec.from_config(dataclasses.asdict(config)).bytes_per_token()
    return {
        "q_heads": shard.num_attention_heads, "kv_heads": shard.num_key_value_heads, "weight_bytes": 2 * weights,
        "kv_bytes": kv, "kv_copies": n * kv / whole,
    }  # fmt: skip


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    key = roofline.slug  # Llama-3.1-8B -> llama_31_8b
    small = roofline.llama_config(roofline.MODELS["SmolLM2-135M"])
    traffic = step_traffic(small, 3, 1, 1, 4)
    sent = sent_per_rank(traffic, 3)
    wire = {
        "calls": traffic["all_reduce"]["calls"], "payload": small.hidden_size * 4, "all_reduce": sent["all_reduce"],
        "all_gather": sent["all_gather"], "gather_share": sent["all_gather"] / sum(sent.values()),
        "pairs": 8 * 2, "factor": {str(n): 2 * (n - 1) / n for n in (2, 3, 4, 8, 72)},
    }  # fmt: skip
    decode: dict[str, Any] = {}
    for model in ("Llama-3.1-8B", "Llama-3.1-70B"):
        times = {name: {str(n): step_seconds(model, n, LINKS[name]) for n in (1, 2, 4, 8)}
                 for name in ("nvlink", "nvlink_eager")}  # fmt: skip
        one = times["nvlink"]["1"]["total"]
        floor = {name: link.latency * (2 * roofline.MODELS[model]["num_hidden_layers"] + 1)
                 for name, link in LINKS.items() if name.startswith("nvlink")}  # fmt: skip
        decode[key(model)] = {
            "ms": {name: {n: 1e3 * t["total"] for n, t in of.items()} for name, of in times.items()},
            "talk_ms": {name: {n: 1e3 * t["talk"] for n, t in of.items()} for name, of in times.items()},
            "read_ms": {n: 1e3 * t["compute"] for n, t in times["nvlink"].items()},
            "speedup": {name: {n: one / t["total"] for n, t in of.items()} for name, of in times.items()},
            "floor_ms": {name: 1e3 * seconds for name, seconds in floor.items()},
            "n_half": {name: one / seconds for name, seconds in floor.items()},  # talk alone takes as long as reading
        }
    prefill: dict[str, Any] = {}
    for model in ("Llama-3.1-8B", "Llama-3.1-70B"):
        for name in ("nvlink", "pcie5"):
            t = {n: step_seconds(model, n, LINKS[name], 1, 1024, 1024) for n in (1, 2, 4, 8)}
            prefill.setdefault(key(model), {})[name] = {
                str(n): {"ms": 1e3 * t[n]["total"], "speedup": t[1]["total"] / t[n]["total"],
                         "share": t[n]["talk"] / t[n]["total"]} for n in t
            }  # fmt: skip
            # The share of its peak at which one GPU, computing, takes as long as eight, computing and talking.
            prefill[key(model)][name]["even_at"] = (t[1]["total"] - t[8]["compute"]) / t[8]["talk"]
    fit, misfit = ({name: LINKS["nvlink"].seconds("all_reduce", payload, n) / seconds - 1
                    for name, (payload, n, seconds) in table.items()} for table in (PUBLISHED, MISFITS))  # fmt: skip
    # Eight GPUs as one engine, or as replicas of the smallest group that holds the model.
    shared: dict[str, Any] = {}
    for model, smallest in (("Llama-3.1-8B", 1), ("Llama-3.1-70B", 2)):

        def step(n: int, num_seqs: int, model: str = model) -> float:
            return step_seconds(model, n, LINKS["nvlink"], num_seqs * n // 8)["total"]

        for n in (smallest, 8):
            owns, groups = ownership(model, n), 8 // n
            room = roofline.GPU_MEMORY_UTILIZATION * H200.memory - owns["weight_bytes"]
            shared.setdefault(key(model), {})["one" if n == 8 else "replicas"] = {
                "kv_tokens": groups * int(room // owns["kv_bytes"]),
                "tokens_per_second": {str(b): b / step(n, b) for b in (512, 2048)},
                "ms": {str(b): 1e3 * step(n, b) for b in (512, 2048)},
                "prefill": groups * 1024 / step_seconds(model, n, LINKS["nvlink"], 1, 1024, 1024)["total"],
            }  # fmt: skip
        shared[key(model)]["even_at"] = next(b for b in range(8, 1 << 14, 8) if step(smallest, b) < step(8, b))
    orders = {order: simulate(WIDGET_DEFAULT | {"order": order}) for order in ORDERS}
    return {
        "wire": wire, "decode": decode, "prefill": prefill, "fit": fit, "worst_fit": max(map(abs, fit.values())),
        "too_low": {name: -error for name, error in misfit.items()},
        "shared": shared,
        "owns": {key(model): {str(n): ownership(model, n) for n in sizes} for model, sizes in SIZES.items()},
        "orders": {order.replace(", ", "_"): {name: t[name] for name in ("collectives", "sent")}
                   for order, t in orders.items()},
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The widget's block with its numbers, and what more GPUs do to a decode step."""
    return [_draw_block(folder), _draw_scaling(folder)]


def _draw_block(folder: str | Path) -> Path:
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

    import matplotlib.pyplot as plt

    column = lambda values: [[value] for value in values]  # noqa: E731
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
        ax.bar(at, eager, 0.6, [a + b for a, b in zip(read, graph)], color="white", hatch="////", linewidth=0.8,
               edgecolor=figures.COLORS["orange"], label="… launched one by one")  # fmt: skip
        for i, n in enumerate(sizes):
            speedups = [found["speedup"][link][n] for link in ("nvlink", "nvlink_eager")]
            if i:
                ax.text(i, read[i] + graph[i] + eager[i] + 0.015 * read[0], f"{speedups[0]:.1f}× / {speedups[1]:.1f}×",
                        ha="center", va="bottom", fontsize=8.5)  # fmt: skip
        fits = " (one cannot hold it)" if name.endswith("70b") else ""
        bars[0].set_alpha(0.35 if fits else 1)
        ax.set(xticks=list(at), xticklabels=sizes, xlabel=f"H200s{fits}", ylim=(0, 1.4 * read[0]),
               ylabel="ms per decode step, batch 1", title=f"Llama-3.1-{name[9:].upper()}, bf16")  # fmt: skip
    axes[0].legend(*axes[0].get_legend_handles_labels(), fontsize=8.5, loc="upper right", bbox_to_anchor=(1.04, 1.0))
    return figures.save_figure(figure, folder, "05c_scaling")


# --- The story --------------------------------------------------------------------------------------------------------

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "To make bread you need flour,",
    "The three laws of motion say that",
]
OUTPUTS = [8, 5, 6, 10]  # tokens wanted of each


def seeded_model(device: torch.device) -> llama.Llama:
    """8 query and 2 KV heads, a vocabulary that neither 2 nor 4 divide; the same on every rank."""
    return llama.random_model(seed=5, device=device, num_attention_heads=8, num_key_value_heads=2, vocab_size=131)


def all_logits(model: llama.Llama, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position of one sequence, without a cache. [T] -> [T, vocab], on the CPU."""
    ids = torch.tensor(token_ids, device=model.device)
    hidden = model.forward(ids, torch.arange(len(token_ids), device=model.device), naive.recompute)
    return model.logits(hidden).cpu()


def serve(model: llama.Llama, prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> offline_run.Served:
    """The engine around a whole model or a shard, which have one interface."""
    return offline_run.serve(offline_run.make_core(model, num_blocks=128, max_model_len=256), prompts, outputs)


def rank_story(world: GroupCoordinator, n: int, model: str | None, prompts: list[list[int]],
               broken: bool) -> dict[str, Any]:  # fmt: skip
    """What every rank does in the default run. Ranks that a group does not need wait for the next one.

    No rank leads: each runs the whole engine, and from equal logits all of them take equal decisions.
    """
    groups = {size: new_group(range(size), world) for size in sorted({n, 2, 4})}
    found: dict[str, Any] = {}
    if group := groups[n]:
        shard = load_shard(model, group)
        found["parameters"] = shard.num_parameters
        if broken:
            skip_all_reduce(shard)
        found["logits"] = all_logits(shard, prompts[0])
        found["traffic"] = group.take_counts()
        found["tokens"] = serve(shard, prompts, OUTPUTS).token_ids
    for size in (2, 4):
        if group := groups[size]:
            seeded = shard_model(seeded_model(world.device), group)
            found[f"seeded {size}"] = all_logits(seeded, range(40))
    x = torch.full((world.world_size * 250,), 2.0**world.rank_in_group, device=world.device)
    total, sent = ring_all_reduce(x, world)
    found["ring"] = (bool((total == 2.0**world.world_size - 1).all()), sent, x.nbytes)
    return found


def rank_bench(world: GroupCoordinator, model: str | None) -> dict[str, Any]:
    """Times on rank 0: one all-reduce by size, and a decode step of the engine by ranks, a thread each."""
    torch.set_num_threads(1)
    groups = {size: new_group(range(size), world) for size in (1, 2, 3, 4)}
    found: dict[str, Any] = {"all_reduce_us": {}, "step_ms": {}}

    def milliseconds(shard: llama.Llama, num_seqs: int) -> float:
        prompts = [[10 + i, 20, 30, 40] for i in range(num_seqs)]
        return 1e3 * statistics.median(serve(shard, prompts, [17] * num_seqs).seconds[1:])

    for size in (2, 3):
        if group := groups[size]:
            times = {}
            for payload in (2304, 1 << 16, 1 << 20, 1 << 24):
                x = torch.ones(payload // 4, device=world.device)
                samples = []
                for _ in range(8 if payload > 1 << 20 else 200):
                    start = time.perf_counter()
                    group.all_reduce(x).sum().item()
                    samples.append(1e6 * (time.perf_counter() - start))
                times[str(payload)] = statistics.median(samples[len(samples) // 4 :])
            found["all_reduce_us"][str(size)] = times
        dist.barrier()
    wide = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=16,
                num_key_value_heads=4, head_dim=64, vocab_size=8192)  # fmt: skip
    most = default_size(LlamaConfig.from_folder(folders.model_folder(model)))
    for name, sizes in (("smollm2", [1, most][: 1 + (most in (2, 3, 4))]), ("wide", (1, 2, 4))):
        for size in sizes:
            if group := groups[size]:
                shard = load_shard(model, group) if name == "smollm2" else shard_model(
                    llama.random_model(device=world.device, **wide), group)  # fmt: skip
                shard = map_local(shard, pack_weights)
                for num_seqs in (1, 8):
                    times = found["step_ms"].setdefault(name, {}).setdefault(str(size), {})
                    times[str(num_seqs)] = milliseconds(shard, num_seqs)
            dist.barrier()
    found["backend"] = dist.get_backend()
    return found


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument("--tensor-parallel-size", "-tp", type=arguments.number(int, 1, 64), metavar="N",
                   help="ranks that share the model (default 3; where that is forbidden, fewest above 1)")  # fmt: skip
    p.add_argument("--skip-all-reduce", action="store_true", help="break it: every rank keeps its partial sums")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine = cli.start(args)
    config = loader.check_context(args.model, 256)
    folder, numbers = folders.model_folder(args.model), facts()
    n = args.tensor_parallel_size = args.tensor_parallel_size or default_size(config)
    sharding.check_tensor_parallel_size(config, n)
    start_context()  # its imports run beside what follows

    common.heading("1. One MLP block: the first matrix cut by its outputs, the second by its inputs")
    H, I = config.hidden_size, config.intermediate_size
    shapes = ((5, H), (I, H), (H, I))
    x, a, b = (torch.randn(shape, device=common.device()) for shape in shapes)
    a, b = a / H**0.5, b / I**0.5
    common.check(f"a sum over {n} slice{'s' * (n > 1)} of the {I} neurons", mlp_in_slices(x, a, b, n), mlp(x, a, b))
    wrong = sum(F.silu(x_r @ a_r.T) for x_r, a_r in zip(x.chunk(max(2, n), 1), a.chunk(max(2, n), 1)))
    error = common.relative_error(wrong, F.silu(x @ a.T))
    common.say(f"Cut the first by inputs, and SiLU gets partial sums: error {error:.2f}, unless they are added first")

    common.heading("2. What a rank owns (bf16)")
    rows = []
    for model, sizes in SIZES.items():
        for size in sizes:
            owns = numbers["owns"][roofline.slug(model)][str(size)]
            if size in (1, 3, 8, 16):
                rows.append([model, size, owns["q_heads"], owns["kv_heads"], f"{owns['kv_copies']:.0f}",
                             f"{owns['weight_bytes'] / 1e9:.2f}", f"{owns['kv_bytes']:,}"])  # fmt: skip
    common.table(["", "ranks", "Hq", "Hkv", "copies of KV", "weights, GB", "KV bytes/token"], rows)

    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    with Ranks(max(4, n), rank_story, n, str(folder), prompts, args.skip_all_reduce) as ranks:
        tell_of_ranks(args, ranks, tokenizer, prompts)

    common.heading("5. An MLP block in small integers: simulate()")
    sums = "skipped" if args.skip_all_reduce else "kept"
    common.say(describe(simulate(WIDGET_DEFAULT | {"all_reduce": sums})))

    common.heading("6. Where it stops paying: H200s, arithmetic")
    rows = []
    for model in ("Llama-3.1-8B", "Llama-3.1-70B"):
        decode, prefill = numbers["decode"][roofline.slug(model)], numbers["prefill"][roofline.slug(model)]
        for size in ("1", "2", "4", "8"):
            step = [f"{decode['ms'][link][size]:.2f} ms, {decode['speedup'][link][size]:.1f}x"
                    for link in ("nvlink", "nvlink_eager")]  # fmt: skip
            step += [f"{prefill[link][size]['speedup']:.1f}x" for link in ("nvlink", "pcie5")]
            rows.append([model, size, *step])
    common.table(["", "GPUs", "decode, in a graph", "decode, eager", "prefill, NVLink", "prefill, PCIe 5"], rows)

    bench = benchmark(args) if args.bench else {}
    if args.figure:
        draw(args.figure)
    if args.json:
        recorded.merge_json(args.json, KEY, {"machine": machine, "facts": numbers, "bench": bench})


def tell_of_ranks(args: argparse.Namespace, ranks: Ranks, tokenizer: Tokenizer,
                  prompts: list[list[int]]) -> None:  # fmt: skip
    """Compute the reference while the ranks work, then compare."""
    n = args.tensor_parallel_size
    common.heading(f"3. The real model on {n} process{'es' * (n > 1)}, through the engine of lesson 04")
    model, _ = loader.load(args.model)
    reference = all_logits(model, prompts[0])
    whole = serve(model, prompts, OUTPUTS)
    found = ranks.results()
    members = found[:n]
    for prompt, tokens in list(zip(prompts, members[0]["tokens"]))[:2]:
        common.say(f"{tokenizer.decode(prompt)}…{tokenizer.decode(tokens)!r}"[:108])
    loaded = [f"{count / 1e6:.1f} M" for count in (members[0]["parameters"], model.num_parameters,
                                                   sum(rank["parameters"] for rank in members))]  # fmt: skip
    common.say(f"rank 0 loaded {loaded[0]} of {loaded[1]} parameters, all ranks together {loaded[2]}")
    if args.skip_all_reduce:
        error = common.relative_error(members[0]["logits"], reference)
        common.say(f"without the all-reduce: relative error of the logits {error:.2f}, every shape as it should be")
    ours = f"{n} rank{'s' * (n > 1)}"
    common.check(f"logits of {len(prompts[0])} positions, {ours} against one", members[0]["logits"], reference)
    common.check_equal("every rank has the same logits, bit for bit",
                       [rank["logits"].equal(members[0]["logits"]) for rank in members], [True] * n)  # fmt: skip
    common.check_equal(f"{len(prompts)} requests: the same tokens as the whole model", members[0]["tokens"],
                       whole.token_ids)  # fmt: skip
    common.check_equal("every rank's scheduler and sampler chose the same tokens", [r["tokens"] for r in members],
                       [whole.token_ids] * n)  # fmt: skip
    seeded = all_logits(seeded_model(model.device), range(40))
    for size, what in ((2, "one KV head each"), (4, "each KV head on two ranks")):
        common.check(f"8 query and 2 KV heads on {size} ranks, {what}", found[0][f"seeded {size}"], seeded)

    common.heading("4. On the wire: one pass over these positions")
    T = len(prompts[0])
    expected = step_traffic(model.config, n, T, T, 4)
    common.check_equal("collectives and their bytes are those of the formula", members[0]["traffic"], expected)
    if expected:  # one rank has nobody to tell anything
        common.table(["", "calls", "result, bytes", "sent by each rank, bytes"], [
            [name, t["calls"], f"{t['bytes']:,}", f"{wire_bytes(name, t['bytes'], n):,.0f}"]
            for name, t in expected.items()])  # fmt: skip
    m = len(found)
    right, sent, payload = found[0]["ring"]
    common.check_equal(f"our ring on {m} ranks: right, and 2·{m - 1}/{m} of {payload:,} bytes sent", (right, sent),
                       (True, wire_bytes("all_reduce", payload, m)))  # fmt: skip


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """All-reduce by size and decode step by ranks, measured in processes of one thread each."""
    common.heading("7. Measured: processes of one thread each")
    bench = launch(4, rank_bench, args.model, timeout=600)[0]
    bench["cores"] = os.cpu_count()
    sizes = [f"{int(size):,} bytes" for size in bench["all_reduce_us"]["2"]]
    common.table([f"{bench['backend']} all-reduce of", *sizes], [
        [f"{size} ranks", *(f"{t:,.0f} µs" for t in times.values())] for size, times in bench["all_reduce_us"].items()
    ])  # fmt: skip
    rows = []
    for name, by_size in bench["step_ms"].items():
        for size, times in by_size.items():
            label = Path(args.model or folders.DEFAULT_MODEL).name if name == "smollm2" else name
            rows.append([label, size, *(f"{t:.1f} ms, {by_size['1'][b] / t:.2f}x" for b, t in times.items())])
    common.table(["decode step", "ranks", "1 sequence", "8 sequences"], rows)
    if bench["backend"] == "gloo" and common.HAS_GPU:
        common.skipped("NCCL", f"it needs a GPU for each of 4 ranks, here are {torch.cuda.device_count()}")
    return bench


if __name__ == "__main__":
    cli.run(main)

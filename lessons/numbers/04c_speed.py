"""What `lessons/04c_speed.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import contextlib
import functools
import itertools
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import registry
from engine.model import folders, llama, loader
from lab import figures, recorded, roofline
from lab.matrix_products import floor_seconds
from lab.offline_run import serve
from lab.parameters import checked
from lab.peers import generate_with, load_transformers, vllm_peer

KEY = "04c_speed"
lesson = registry.lesson(KEY)

# --- A step by arithmetic, behind the widget --------------------------------------------------------------------------
#
#     t = max(2·W·B / rate, b·W / bandwidth) + copies · B·S·(KV bytes per token) / bandwidth + operations · overhead

MACHINES = {  # FLOP/s with packed weights, FLOP/s without, bytes/s, seconds until an operation has begun
    "two CPU cores": (3e11, 1.1e11, 4e10, 6e-6),  # about what this lesson's measurements say of theirs
    "a GPU": (6e13, 6e13, 3.35e12, 5e-6),  # its library reads the weights as they lie
}
WIDGET_CHOICES = {
    "machine": list(MACHINES),
    "batch": [1, 4, 8, 32, 128],
    "context": [64, 256, 1024],
    "weight_bytes": [1, 2, 4],
}
WIDGET_DEFAULT = {"machine": "two CPU cores", "batch": 32, "context": 256, "weight_bytes": 4}


def microseconds(seconds: float) -> int:
    """Whole µs of `seconds`: integers, as both twins of the simulation have them."""
    return round(seconds * 1e6)


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """A decode step of SmolLM2 on a machine of four numbers, stage by stage: whole microseconds of each part.

    Arithmetic, keys and values are in fp32; weights are stored in `weight_bytes` each. Raises common.InputError for a
    name or value that is not among WIDGET_CHOICES.
    """
    params = checked(params, WIDGET_CHOICES)
    packed_rate, unpacked_rate, bandwidth, overhead = MACHINES[params["machine"]]
    B, config = params["batch"], roofline.MODELS["SmolLM2-135M"]
    W, layers = sum(roofline.weights_read(config)), config["num_hidden_layers"]
    kv_bytes = B * params["context"] * roofline.KVCacheSpec.from_config(config).bytes_per_token("float32")
    read_bytes = params["weight_bytes"] * W
    read = microseconds(read_bytes / bandwidth)
    floor = max(microseconds(2 * W * B / packed_rate), read)
    stages = []
    for stage in lesson.STAGES:
        per_layer, outside = lesson.operations(stage, B)
        count = per_layer * layers + outside
        copies = 1 if stage.attention == "in place" else 3  # gathered: read, written, read again
        multiply = microseconds(2 * W * B / (packed_rate if stage.packed else unpacked_rate))
        parts = {
            "products": max(multiply, read),
            "attention": microseconds(copies * kv_bytes / bandwidth),
            "operations": microseconds(count * overhead),
        }
        total = sum(parts.values())
        stages.append({
            "name": stage.name, "per_layer": per_layer, "outside": outside, "operations": count,
            "per_sequence": lesson.operations(stage, 2)[0] - lesson.operations(stage, 1)[0], "copies": copies,
            "multiply_us": multiply, "bound": "arithmetic" if multiply > read else "memory",
            "parts_us": parts, "total_us": total, "tokens_per_second": B * 1e6 / total, "share_of_floor": floor / total,
        })  # fmt: skip
    gains = [0, *(before["total_us"] / after["total_us"] for before, after in itertools.pairwise(stages))]
    return {
        "params": params,
        "gain": stages[0]["total_us"] / stages[-1]["total_us"],
        "best": stages[gains.index(max(gains))]["name"],
        "layers": layers,
        "overhead_us": microseconds(overhead),
        "kv_bytes": kv_bytes,
        "read_bytes": read_bytes,
        "read_us": read,
        "floor_us": floor,
        "stages": stages,
    }


def describe(trace: dict[str, Any]) -> str:
    """A trace as a table: milliseconds of each part, a row for each stage."""
    p, ms = trace["params"], lambda us: f"{us / 1e3:.2f}"
    lines = [
        f"batch {p['batch']}, context {p['context']}, {p['machine']}, {p['weight_bytes']}-byte weights",
        f"{'ms a step':<29}products  attention  operations    total  tokens/s  of the floor",
    ]
    for stage in trace["stages"]:
        products, attention, started = map(ms, stage["parts_us"].values())
        lines.append(
            f"{stage['name']:<29}{products:>8}{attention:>11}{started:>12}{ms(stage['total_us']):>9}"
            f"{stage['tokens_per_second']:>10,.0f}{stage['share_of_floor']:>14.1%}"
        )
    bound = trace["stages"][-1]["bound"]
    lines.append(f"floor: {ms(trace['floor_us'])} ms, the products with packed weights, bound by {bound}")
    return "\n".join(lines)


def slug(name: str) -> str:
    """A stage's name as a key: "arrays, not lists" -> arrays_not_lists."""
    return re.sub(r"\W+", "_", name)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers: bytes, FLOPs, operations, and steps by arithmetic."""
    config = roofline.MODELS["SmolLM2-135M"]
    W = sum(roofline.weights_read(config))
    counted = {}
    for key, stage in zip(("loop", "batched", "fused", "arrays", "packed", "in_place"), lesson.STAGES):
        counted[key] = {}
        for B in (1, 8, 32):
            per_layer, outside = lesson.operations(stage, B)
            counted[key][str(B)] = {
                "layer": per_layer,
                "outside": outside,
                "step": per_layer * config["num_hidden_layers"] + outside,
            }
    steps = {}
    for key, machine in (("cpu", "two CPU cores"), ("gpu", "a GPU")):
        for B in (1, 32):
            found = simulate(WIDGET_DEFAULT | {"machine": machine, "batch": B})["stages"]
            steps |= {f"{key}_loop_{B}": found[0], f"{key}_final_{B}": found[-1]}
    return {
        "weights": W, "weight_bytes": 4 * W, "flops_per_row": 2 * W, "operations": counted, "steps": steps,
        "turning_point": {key: 2 * m[0] / m[2] for key, m in zip(("cpu", "gpu"), MACHINES.values())},
        "gathered_bytes": 32 * 160 * roofline.KVCacheSpec.from_config(config).bytes_per_token("float32"),
    }  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """What each stage gained, and where a step's time goes, as measured (lessons/results/cpu.json)."""
    bench = recorded.results(KEY).get("bench", {})
    figure, axes = figures.new_figure(8.6, 3.9, ncols=2, width_ratios=[1, 1.05])
    names = ["no cache", "a cache, one by one", *(stage.name for stage in lesson.STAGES)]
    for y, name in enumerate(names if bench else []):
        found = bench["stages"][slug(name)]
        axes[0].barh(y, found["tokens_per_second"], 0.62, color=figures.COLORS["blue"])
        short = f"{found['tokens_per_second']:.0f} "
        axes[0].text(found["tokens_per_second"], y, short, va="center", ha="right", fontsize=9, color="white")
    if bench:
        axes[0].axvline(bench["floor"], color=figures.COLORS["red"], linewidth=1)
        axes[0].text(
            bench["floor"] * 0.93, -0.35, "products alone", fontsize=8.5, ha="right", color=figures.COLORS["red"]
        )
    axes[0].set(
        yticks=range(len(names)),
        yticklabels=names,
        xscale="log",
        xlabel="output tokens/s",
        title="32 prompts of 128 tokens, 64 out",
    )
    axes[0].invert_yaxis()
    axes[0].set_xlim(1, 1000)
    for x, name in enumerate(lesson.PROFILED if bench else []):
        bottom, parts = 0.0, bench["profile"][slug(name)]
        bars = {part: parts[part] for part in ("products", "attention", "rest")}
        bars["else"] = parts["total"] - sum(bars.values())
        for (part, ms), color in zip(bars.items(), ("blue", "green", "orange", "purple")):
            label = None if x else lesson.PARTS.get(part, "everything else")
            axes[1].bar(x, ms, 0.62, bottom=bottom, color=figures.COLORS[color], label=label)
            bottom += ms
    labels = [name.replace(" ", "\n", 1) for name in lesson.PROFILED]
    axes[1].set(
        xticks=range(len(labels)), xticklabels=labels, ylabel="ms per decode step", title="where a step's time goes"
    )
    if bench:
        axes[1].set_ylim(0, 1.25 * bench["profile"]["attention_in_a_loop"]["total"])
        axes[1].legend(fontsize=8.5, loc="upper right")
    return [figures.save_figure(figure, folder, "04c_stages")]


# --- The peers --------------------------------------------------------------------------------------------------------


def throughput(model: llama.Llama, folder: Path, ask: Callable | None) -> dict[str, Any]:
    """Ours, Transformers and vLLM in turns, three rounds: output tokens per second, median, lowest and highest."""
    n_in, n_out, rng, V = 128, 64, random.Random(0), model.config.vocab_size
    prompts = [[rng.randrange(min(1000, V // 2), min(40000, V)) for _ in range(n_in)] for _ in range(32)]
    transformers = load_transformers(str(folder), model)
    tokens: dict[str, list[list[int]]] = {}

    def ours(n: int) -> float:
        core = lesson.make_core(model, lesson.STAGES[-1], n, n_in + n_out)
        start = time.perf_counter()
        tokens["ours"] = serve(core, prompts[:n], [n_out] * n).token_ids
        return time.perf_counter() - start

    def theirs(n: int) -> float:
        start = time.perf_counter()
        generate_with(transformers, prompts[:n], n_out)
        return time.perf_counter() - start

    def vllm(n: int) -> float:
        answer = ask(command="generate", prompts=prompts[:n], max_tokens=n_out)
        tokens["vllm"] = answer["token_ids"]
        return answer["seconds"]

    runs = {"ours": ours, "transformers": theirs} | ({"vllm": vllm} if ask else {})
    found: dict[str, Any] = {}
    rows = []
    for n in (1, 8, 32):
        for run in runs.values():
            run(n)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(3):
            for name, run in runs.items():
                time.sleep(0.5)  # threads of the one before still spin for a while
                seconds[name].append(run(n))
        mine: dict[str, Any] = {"floor": n * n_out / floor_seconds(model, n, n_in, n_out)}
        for name, each in seconds.items():
            low, median, high = (n * n_out / s for s in sorted(each, reverse=True))
            mine |= {name: median, f"{name}_low": low, f"{name}_high": high}
        mine["share_of_floor"] = mine["ours"] / mine["floor"]
        for name in [*runs][1:]:
            mine[f"over_{name}"] = mine["ours"] / mine[name]
        if ask:
            same = sum(a == b for a, b in zip(tokens["ours"], tokens["vllm"]))
            mine["same_answers"] = same / n
        found[str(n)] = mine
        spread = [f"{mine[c]:.0f} ({mine[f'{c}_low']:.0f}–{mine[f'{c}_high']:.0f})" for c in runs]
        rows.append([n, *spread, f"{mine['floor']:.0f}", f"{mine['share_of_floor']:.0%}"])
    common.table(["prompts", *runs, "products alone", "share"], rows, title="output tokens per second")
    return found


def scheduler_table(ask: Callable | None) -> dict[str, Any]:
    """µs of a step with 1,000 running and up to 10,000 waiting: ours, and vLLM's schedule() + update_from_output()."""
    found, rows = {}, []
    for running, waiting in ((8, 0), (64, 0), (256, 0), (1000, 0), (1000, 10_000)):
        mine = {"ours": lesson.scheduler_seconds(running, waiting) * 1e6}
        if ask:
            mine["vllm"] = ask(command="schedule", running=running, waiting=waiting, steps=40)["seconds"] * 1e6
        found[f"{running}_{waiting}"] = mine
        rows.append(
            [f"{running:,}", f"{waiting:,}", *(f"{us:,.0f}" for us in mine.values()), f"{mine['ours'] / running:.2f}"]
        )
    common.table(["running", "waiting", *(["µs", "vLLM, µs"] if ask else ["µs"]), "µs per request"], rows)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The stages at 32 prompts of 128 tokens, their profiles, and the peers."""
    model, _ = loader.load(args.model)
    n_in, n_out, rng, V = 128, 64, random.Random(0), model.config.vocab_size
    prompts = [[rng.randrange(min(1000, V // 2), min(40000, V)) for _ in range(n_in)] for _ in range(32)]
    common.heading("5. From naive to final: 32 prompts of 128 tokens, 64 greedy tokens each")
    floor = 32 * n_out / floor_seconds(model, 32, n_in, n_out)
    bench: dict[str, Any] = {"floor": floor, "stages": {}}
    names = ["no cache", "a cache, one by one", *(stage.name for stage in lesson.STAGES)]
    for name, cached, n in ((names[0], False, 1), (names[1], True, 4)):
        seconds = lesson.alone(model, prompts[:n], n_out, cached)[1]
        bench["stages"][slug(name)] = {"tokens_per_second": n * n_out / seconds}
    for stage in lesson.STAGES:
        core = lesson.make_core(model, stage, 32, n_in + n_out)
        serve(core, prompts, [2] * 32)  # warm up
        rounds = sorted(sum(serve(core, prompts, [n_out] * 32).seconds) for _ in range(3))
        bench["stages"][slug(stage.name)] = {"tokens_per_second": 32 * n_out / rounds[1]}
    rows, before = [], None
    for name, found in zip(names, bench["stages"].values()):
        rate = found["tokens_per_second"]
        found["share_of_floor"] = rate / floor
        found["gain"] = rate / before if before else 1.0
        rows.append([name, f"{rate:.1f}", f"{found['gain']:.2f}x", f"{rate / floor:.0%}"])
        before = rate
    common.table(["", "tokens/s", "gain", "of the products alone"], rows)
    profiles = {
        name: lesson.profile(lesson.make_core(model, stage, 32, n_in + n_out), prompts, 24)
        for name, stage in lesson.PROFILED.items()
    }
    lesson.print_profiles(profiles)
    bench["profile"] = {slug(name): parts | {"total": sum(parts.values())} for name, parts in profiles.items()}
    common.heading("6. Peers, in turns")
    folder = folders.model_folder(args.model)
    peer = vllm_peer(args.vllm, folder, "float32") if args.vllm else contextlib.nullcontext()
    with peer as ask:
        if ask is None:
            common.skipped("vLLM", "no --vllm")
        bench["throughput"] = throughput(model, folder, ask)
        bench["scheduler_us"] = scheduler_table(ask)
    return bench

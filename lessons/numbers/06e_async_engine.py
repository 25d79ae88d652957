"""What `lessons/06e_async_engine.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
from pathlib import Path
from typing import Any

from engine import registry
from engine.model import folders
from engine.model.tokenizer import Tokenizer
from engine.serving.async_llm import AsyncLLM
from engine.serving.clients import ThreadClient
from lab import figures
from lab.parameters import checked

KEY = "06e_async_engine"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

WIDGET_CHOICES = {
    "handoff": list(lesson.HANDOFFS),
    "step_ms": [5, 10, 20, 40],
    "read_ms": [1, 20, 100, 400],
    "tokens": [8, 16, 32],
}
WIDGET_DEFAULT = {"handoff": "collector", "step_ms": 20, "read_ms": 100, "tokens": 32}


def simulate(params: dict) -> dict:
    """An engine that makes tokens, and a reader that is given them by one of three hand-offs. Raises InputError."""
    return lesson.slow_reader(**checked(params, WIDGET_CHOICES))


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    reads, tokens = trace["reads"], len(trace["put_at"])
    shown = [f"{read['at']} ms: {read['tokens']}" for read in reads[:6]]
    return "\n".join([
        f"{tokens} tokens; the engine made the last at {trace['engine_done']} ms, having waited "
        f"{trace['engine_waited']} ms for its reader",
        f"the reader was done at {trace['reader_done']} ms, after {len(reads)} reads",
        f"most items waiting: {trace['most_items']}; the oldest news read was {trace['oldest']} ms old",
        f"tokens in each read: {', '.join(shown)}{', …' if len(reads) > 6 else ''}",
    ])  # fmt: skip


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

# vLLM v0.5.3, Llama-3-8B on an H100: shares of time by the v0.6.0 blog of September 2024.
V053 = {"api_server": 33, "scheduling": 29, "gpu": 38}
THREAD_STACK = 8 << 20  # bytes reserved for a thread's stack on Linux, by default


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    slow = {}
    for handoff in lesson.HANDOFFS:
        trace = simulate({**WIDGET_DEFAULT, "handoff": handoff})
        slow[handoff.replace(" ", "_")] = {
            name: trace[name] for name in ("engine_done", "reader_done", "most_items", "engine_waited", "oldest")
        } | {"reads": len(trace["reads"]), "most_tokens": max(read["tokens"] for read in trace["reads"])}  # fmt: skip
    total = sum(V053.values())
    return {
        "slow_reader": slow,
        "step_ms": WIDGET_DEFAULT["step_ms"], "read_ms": WIDGET_DEFAULT["read_ms"], "bound": lesson.BOUND,
        "v053": {
            **V053, "engine_off_loop": total / max(V053["api_server"], V053["scheduling"] + V053["gpu"]),
            "all_overlap": total / max(V053.values()), "gpu_twice_as_fast": total / (total - V053["gpu"] / 2),
        },
        "stacks_gb": 1000 * THREAD_STACK / 1e9, "chunk": AsyncLLM.CHUNK, "room": ThreadClient.ROOM,
        "blocked": {str(ms): {"share": ms / (ms + 1), "heartbeats": ms // 2} for ms in (20, 50)},
        "events_per_second": {"clients": 256, "itl_ms": 20, "tokens": 256 * 50, "budget_us": 1e6 / (256 * 50)},
    }  # fmt: skip


# --- Figure -----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """Three engines' letters on one event loop, and three ways to treat a slow reader."""
    figure, axes = figures.new_figure(8.0, 5.2, nrows=2, height_ratios=[1.15, 1])
    colors, ax = figures.COLORS, axes[0]
    step, python = 20, 5  # milliseconds: a step, and the part of it that holds the interpreter lock
    for row, name in enumerate(("engine on\nthe event loop", "engine on\na thread", "engine in\na process")):
        for i in range(4):
            start = i * (step + 2)
            if row == 0:
                ax.broken_barh([(start, step)], (row - 0.36, 0.72), facecolor=colors["red"], alpha=0.85)
                ax.broken_barh([(start + step, 2)], (row - 0.36, 0.72), facecolor=colors["green"])
            else:
                ax.broken_barh([(start, step + 2)], (row + 0.04, 0.32), facecolor=colors["blue"], alpha=0.55)
                ax.broken_barh([(start, step + 2)], (row - 0.36, 0.36), facecolor=colors["light"])
                ax.broken_barh([(start + step, 2)], (row - 0.36, 0.36), facecolor=colors["green"])
                if row == 1:
                    ax.broken_barh([(start, python)], (row - 0.36, 0.72), facecolor=colors["red"], alpha=0.85)
        ax.text(-1, row, name, ha="right", va="center")
    for label, color in (
        ("nobody else can run", "red"),
        ("clients are served", "green"),
        ("the engine computes", "blue"),
        ("the loop is free", "light"),
    ):
        ax.barh(-9, 1, color=colors[color], alpha=0.55 if color == "blue" else 1, label=label)
    ax.set(xlim=(0, 88), ylim=(2.55, -0.55), yticks=[], xlabel="milliseconds (steps of 20 ms, 5 of them Python)")
    ax.spines["left"].set_visible(False)
    ax.set_title("Where the engine runs decides what the event loop can do", pad=22)
    ax.legend(ncols=4, loc="lower left", bbox_to_anchor=(-0.14, 0.99), columnspacing=1.1, handlelength=1.1, fontsize=9)

    ax = axes[1]
    for handoff, color in zip(lesson.HANDOFFS, ("blue", "orange", "red")):
        trace = simulate({**WIDGET_DEFAULT, "handoff": handoff})
        made, read = trace["put_at"], [r["at"] for r in trace["reads"]]
        backlog = [
            sum(at <= t for at in made) - sum(r["tokens"] for r in trace["reads"] if r["at"] <= t)
            for t in range(0, 3400, 10)
        ]
        ax.plot(range(0, 3400, 10), backlog, color=colors[color], label=f"{handoff}: {lesson.HANDOFFS[handoff]}")
        ax.plot(trace["engine_done"], 0, "^", color=colors[color], clip_on=False)
        ax.plot(read[-1], 0, "o", color=colors[color], clip_on=False, markersize=5)
    ax.set(
        xlim=(0, 3400), ylim=(0, 28), xlabel="milliseconds (▲ engine done, ● last read)", ylabel="tokens not read yet"
    )
    ax.set_title("A reader that needs 100 ms, a token every 20 ms")
    ax.legend(loc="upper right")
    return [figures.save_figure(figure, folder, "06e_loop")]


# --- What `--bench` measures ------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Longer answers from every place, more streams, and how soon everybody hears of a dead engine: a minute."""
    tokenizer = Tokenizer(folders.model_folder(args.model))
    prompts = [tokenizer.encode(lesson.TEXTS[i % len(lesson.TEXTS)]) for i in range(args.clients)]
    common.heading("Measured: answers of 48 tokens, the median of three rounds")
    bench = {"place": lesson.compare_places(args, prompts, max_tokens=48, rounds=3)}
    common.heading("Measured: 1,024 waiting streams")
    bench |= lesson.compare_waking(streams=1024, rounds=20)
    common.heading("Measured: the engine dies while everybody waits")
    return bench | {"death_ms": lesson.tell_of_death(args, prompts)}

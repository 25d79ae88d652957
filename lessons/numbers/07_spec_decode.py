"""What `lessons/07_spec_decode.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import registry
from engine.attention.metadata import AttentionMetadata
from engine.config import VllmConfig
from engine.core.stats import SpecDecodingStats
from engine.llm_engine import LLMEngine
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.request import Request, SamplingParams
from engine.sampling.sampler import draw_tokens, uniforms
from engine.spec_decode.drafters import METHODS, SpeculativeConfig
from lab import enumeration, figures, timing
from lab.parameters import checked

KEY = "07_spec_decode"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

WORDS = ["sea", "moon", "cat"]
PAIRS = {  # target p, draft q
    "half right": ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]),
    "close": ([0.6, 0.3, 0.1], [0.5, 0.4, 0.1]),
    "equal": ([0.6, 0.3, 0.1], [0.6, 0.3, 0.1]),
    "disjoint": ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0]),
    "draft is sure": ([0.6, 0.3, 0.1], [1.0, 0.0, 0.0]),
    "target is sure": ([1.0, 0.0, 0.0], [0.25, 0.25, 0.5]),
    "both even": ([0.3, 0.3, 0.4], [0.35, 0.35, 0.3]),
}
WIDGET_CHOICES = {
    "pair": list(PAIRS), "drafts": range(9), "draft_cost": [0, 0.05, 0.1, 0.3], "verify_cost": [0, 0.05, 0.25, 1],
    "bug": ["none", "resample-from-p", "no-bonus"], "seed": range(3),
}  # fmt: skip
WIDGET_DEFAULT = {"pair": "half right", "drafts": 4, "draft_cost": 0.1, "verify_cost": 0, "bug": "none", "seed": 0}
ROUNDS = 40


def draw_from(p: Sequence[float], u: np.ndarray) -> list[int]:
    """Lesson 04b's draw, for many u of one distribution."""
    return draw_tokens(torch.tensor([p], dtype=torch.float64).expand(u.size, -1), u.ravel()).tolist()


def simulate(params: dict) -> dict:
    """Rounds of a language of three words, through `rejection_sample`, beside what enumeration says. Raises InputError.

    The model always answers p and the drafter q, whatever came before, so one distribution says it all.
    """
    params = checked(params, WIDGET_CHOICES)
    (p, q), K, bug = PAIRS[params["pair"]], params["drafts"], params["bug"]
    bug = None if bug == "none" else bug
    index = np.arange(ROUNDS * (K + 1))
    draft_u, accept_u, draw_u = (uniforms([3 * params["seed"] + i] * len(index), index) for i in range(3))
    drafts = np.array(draw_from(q, draft_u)).reshape(ROUNDS, K + 1)
    drafts[:, K] = -1
    with lesson.broken(bug):
        tokens, num_sampled = lesson.rejection_sample(
            torch.tensor([p] * len(index), dtype=torch.float64),
            torch.from_numpy(drafts).flatten(),
            torch.arange(ROUNDS + 1) * (K + 1),
            torch.zeros(len(index), dtype=torch.bool),
            torch.from_numpy(draw_u),
            torch.from_numpy(accept_u),
            torch.tensor([q], dtype=torch.float64),
            torch.from_numpy(np.where(drafts.flatten() < 0, -1, 0)),
        )
    tokens, rounds, counts = tokens.view(ROUNDS, K + 1).tolist(), [], [0] * len(p)
    cost = 1 + K * (params["draft_cost"] + params["verify_cost"])  # of a round, in plain steps
    for i, n in enumerate(num_sampled.tolist()):
        draft, written = drafts[i, :K].tolist(), tokens[i][:n]
        kept = next((j for j, (a, b) in enumerate(zip(draft, written)) if a != b), min(n, K))
        tested = list(range(min(kept + 1, K)))
        for token in written:
            counts[token] += 1
        rounds.append(
            {
                "draft": draft,
                "ratio": [min(1.0, p[draft[j]] / q[draft[j]]) for j in tested],
                "u": [float(accept_u[i * (K + 1) + j]) for j in tested],
                "accepted": kept,
                "written": written,
                "speedup": sum(counts) / ((i + 1) * cost),  # up to here
            }
        )
    # Where a draft was tried, and over all that is written. (np.sum adds as a browser does; `sum`, since 3.12, better.)
    alpha = agrees = float(np.minimum(p, q).sum())
    rest = [max(a - b, 0) / (1 - alpha) if alpha < 1 else 0.0 for a, b in zip(p, q)]
    if bug == "resample-from-p":  # it may even draw the draft that fell
        rest, agrees = p, alpha + float(np.sum([max(b - a, 0) * a for a, b in zip(p, q)]))
    tried = [min(a, b) + (1 - alpha) * r for a, b, r in zip(p, q, rest)] if K else p
    lost = bug == "no-bonus"  # the last term of τ
    tau = [lesson.expected_tokens(agrees, max(0, k - lost)) for k in range(9)]
    mean, bonus = tau[K], 0.0 if lost and K else agrees**K
    gains = [tau[k] / (1 + k * (params["draft_cost"] + params["verify_cost"])) for k in range(9)]
    return {
        "words": WORDS,
        "p": p,
        "q": q,
        "alpha": alpha,
        "rounds": rounds,
        "counts": counts,
        "tried": tried,
        "percent": [round(100 * x) for x in tried],
        "written": [((mean - bonus) * t + bonus * x) / mean for t, x in zip(tried, p)],
        "distance": float(np.abs(np.subtract(tried, p)).sum()) / 2,
        "tokens_per_round": mean,
        "speedup": gains[K],
        "speedups": gains,
        "best": max(range(9), key=lambda k: (gains[k], -k)),
    }


def describe(trace: dict) -> str:
    """The state under the widget, as text."""

    def row(name: str, values: Sequence[float]) -> str:
        return f"{name:<28}" + "  ".join(f"{x:.3f}" for x in values)

    total, K = sum(trace["counts"]), len(trace["rounds"][0]["draft"])
    lines = [
        f"{'':<28}" + "  ".join(f"{word:<5}" for word in trace["words"]).rstrip(),
        row("target p", trace["p"]),
        row("draft q", trace["q"]),
        row("written where drafted", trace["tried"]),
        row(f"written in {len(trace['rounds'])} rounds", [n / total for n in trace["counts"]]),
    ]
    lines.append(f"distance from p {trace['distance']:.3f}, acceptance {trace['alpha']:.3f}")
    for i, r in enumerate(trace["rounds"][:3]):
        marks = [
            f"{trace['words'][d]} {'✓' if j < r['accepted'] else '✗' if j == r['accepted'] else '·'}"
            for j, d in enumerate(r["draft"])
        ]
        written = " ".join(trace["words"][token] for token in r["written"])
        lines.append(f"round {i}: {', '.join(marks) or 'nothing drafted'} -> {written}")
    lines.append(f"{total} tokens in {len(trace['rounds'])} rounds; {trace['tokens_per_round']:.3f} per round expected")
    lines.append(
        f"speed-up {trace['speedups'][K]:.3f} with K = {K}; best {trace['speedups'][trace['best']]:.3f} with "
        f"K = {trace['best']}"
    )
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

# Leviathan et al. 2023, tables 2 and 4: T5-XXL (11B) on a TPU-v4, α and the speed-up measured, predicted from α, c, K.
LEVIATHAN = [  # task, temperature, drafter, K, α, c, predicted, measured
    ("EnDe", 0, "small", 7, 0.75, 0.02, 3.2, 3.4), ("EnDe", 0, "base", 7, 0.80, 0.04, 3.3, 2.8),
    ("EnDe", 0, "large", 7, 0.82, 0.11, 2.5, 1.7), ("EnDe", 1, "small", 7, 0.62, 0.02, 2.3, 2.6),
    ("EnDe", 1, "base", 5, 0.68, 0.04, 2.4, 2.4), ("EnDe", 1, "large", 3, 0.71, 0.11, 2.0, 1.4),
    ("CNNDM", 0, "small", 5, 0.65, 0.02, 2.4, 3.1), ("CNNDM", 0, "base", 5, 0.73, 0.04, 2.6, 3.0),
    ("CNNDM", 0, "large", 3, 0.74, 0.11, 2.0, 2.2), ("CNNDM", 1, "small", 5, 0.53, 0.02, 1.9, 2.3),
    ("CNNDM", 1, "base", 3, 0.55, 0.04, 1.8, 2.2), ("CNNDM", 1, "large", 3, 0.56, 0.11, 1.6, 1.7),
]  # fmt: skip
# Li et al. 2025 (EAGLE-3, table 5), throughput in vLLM against vLLM without it, by batch size; chains of 2.
EAGLE = {"batch": [2, 4, 8, 16, 24, 32, 48, 56], "EAGLE": [1.30, 1.25, 1.21, 1.10, 1.03, 0.93, 0.82, 0.71],
         "EAGLE-3": [1.75, 1.68, 1.58, 1.49, 1.42, 1.36, 1.21, 1.01]}  # fmt: skip

GRID = [([9, 5, 2], [4, 4, 8]), ([4, 4, 8], [8, 8, 0]), ([10, 4, 2], [4, 4, 8])]  # sixteenths: p, q of three rows


def exactness() -> dict[str, Any]:
    """The rule by enumeration, for drafters good and bad; and `rejection_sample` by counting."""
    errors, outputs = enumeration.all_errors(range(5))

    def sixteenths(rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[n / 16 for n in row] for row in rows]

    counted, off, means = {}, 0.0, {}
    for K in range(3):
        p, q = sixteenths([p for p, _ in GRID[: K + 1]]), sixteenths([q for _, q in GRID[:K]])
        shares, mean = enumeration.swept_round(lesson.rejection_sample, p, q, levels=8, draws=48)
        want = enumeration.exact_round(p, q)
        off = max(off, *(abs(shares.get(output, 0) - want.get(output, 0)) for output in {*shares, *want}))
        means[str(K)] = {"counted": mean, "expected": sum(len(output) * chance for output, chance in want.items())}
        counted[str(K)] = 3**K * 8**K * 48
    return {
        "error": max(errors),
        "cases": len(errors),
        "outputs": outputs,
        "counted_error": off,
        "grid": counted,
        "means": means,
    }


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    bug = simulate({**WIDGET_DEFAULT, "bug": "resample-from-p"})
    rows = []
    for task, temperature, drafter, K, alpha, c, predicted, measured in LEVIATHAN:
        # At the ends of what α and c were before they were rounded to two digits.
        low, high = (lesson.speedup(alpha + off, K, c - off) for off in (-0.005, 0.005))
        rows.append(
            {
                "name": f"{task}, T={temperature}, {drafter}",
                "K": K,
                "alpha": alpha,
                "c": c,
                "formula": lesson.speedup(alpha, K, c),
                "low": low,
                "high": high,
                "predicted": predicted,
                "measured": measured,
                "cost": lesson.expected_tokens(alpha, K) / measured,
            }
        )
    batches = [1, 32, 64, 128, 256, 512]

    def gain(B: int, context: int) -> float:
        return lesson.speedup(0.7, 4, 0.05, lesson.verify_cost(B, 4, context))

    h100 = {
        str(context): {
            "gain": {str(B): gain(B, context) for B in batches},
            "v": {str(B): lesson.verify_cost(B, 4, context) for B in batches},
            "crossover": next((B for B in range(1, 1025) if gain(B, context) < 1), None),
        }
        for context in (128, 1024, 4096)
    }
    guide = {
        str(a): {
            str(cost): {"k": (k := lesson.best_k(a / 100, cost / 100)), "gain": lesson.speedup(a / 100, k, cost / 100)}
            for cost in (2, 10, 25, 50)
        }
        for a in (30, 50, 70, 90)
    }
    ratio = {name: EAGLE[name][0] / EAGLE[name][-1] for name in ("EAGLE", "EAGLE-3")}
    return {
        "exact": exactness(),
        "classic": {"alpha": bug["alpha"], "p": bug["p"], "wrong": bug["tried"], "distance": bug["distance"]},
        "half": {
            "k2": lesson.speedup(0.5, 2, 0.1),
            "k8": lesson.speedup(0.5, 8, 0.1),
            "k8_dear": lesson.speedup(0.5, 8, 0.3),
        },
        "leviathan": rows,
        "guide": guide,
        "table1": {"k2_60": lesson.expected_tokens(0.6, 2), "k10_90": lesson.expected_tokens(0.9, 10)},
        "h100": h100,
        "eagle": {"cost_ratio": ratio, **{name: [EAGLE[name][0], EAGLE[name][-1]] for name in ratio}},
        "no_bonus": {str(K): lesson.expected_tokens(0.7, K) - 0.7**K for K in (1, 4)},
        "seventy": {str(K): lesson.expected_tokens(0.7, K) for K in (1, 4)},
    }


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """Where the probability goes when a draft falls; what K and batch size do to the gain."""
    c = figures.COLORS
    figure, axes = figures.new_figure(8.0, 3.0, ncols=3, sharey=True, width_ratios=[1, 1.1, 1])
    (p, q), found = PAIRS["half right"], facts()["classic"]
    x, both = range(3), [min(a, b) for a, b in zip(*PAIRS["half right"])]
    axes[0].bar([i - 0.2 for i in x], p, 0.38, color=c["blue"], label="p: target")
    axes[0].bar([i + 0.2 for i in x], q, 0.38, color=c["orange"], label="q: draft")
    right, wrong = [max(a - b, 0) for a, b in zip(p, q)], [w - b for w, b in zip(found["wrong"], both)]
    panels = (axes[1], right, "replace from max(p − q, 0)"), (axes[2], wrong, "replace from p: wrong")
    for ax, rest, title in panels:
        ax.bar(x, both, 0.6, color=c["green"], label="the draft stands")
        ax.bar(x, rest, 0.6, bottom=both, color=c["purple"], label="it fell, replaced")
        for i, height in enumerate(p):
            ax.plot([i - 0.38, i + 0.38], [height, height], color=c["blue"], linewidth=2)
        ax.set_title(title)
    axes[0].set(ylabel="probability", title="two opinions", ylim=(0, 0.85))
    for ax in axes:
        ax.set(xticks=x, xticklabels=WORDS)
    axes[0].legend(loc="upper center")
    axes[1].legend(loc="upper right")
    rule = figures.save_figure(figure, folder, "07_rule")

    figure, axes = figures.new_figure(8.0, 3.4, ncols=2)
    for alpha, color in ((0.9, "blue"), (0.8, "green"), (0.6, "orange"), (0.4, "red")):
        gains = [lesson.speedup(alpha, K, 0.1) for K in range(13)]
        axes[0].plot(range(13), gains, "o-", markersize=3, color=c[color], label=f"α = {alpha}")
        best = lesson.best_k(alpha, 0.1)
        axes[0].plot([best], [gains[best]], "o", markersize=8, color=c[color])
    axes[0].axhline(1, color=c["grey"], linewidth=1)
    axes[0].set(xlabel="drafts K, each costs c + v = 0.1 steps", ylabel="speed-up", title="longer is not better")
    axes[0].set_ylim(top=4.6)
    axes[0].legend(ncols=2)
    batches = [2**i for i in range(10)]
    for context, color in ((4096, "blue"), (1024, "green"), (128, "red")):
        gains = [lesson.speedup(0.7, 4, 0.05, lesson.verify_cost(B, 4, context)) for B in batches]
        axes[1].plot(batches, gains, color=c[color], label=f"roofline, {context:,} tokens each")
    for name, marker in (("EAGLE-3", "^"), ("EAGLE", "v")):
        points = (EAGLE["batch"], EAGLE[name])
        axes[1].plot(*points, marker, color=c["grey"], markersize=4, label=f"{name} in vLLM, other GPU")
    axes[1].axhline(1, color=c["grey"], linewidth=1)
    axes[1].set(xscale="log", xlabel="sequences in the batch", title="a full batch has no free rows", ylim=(0.4, 4.2))
    axes[1].set(xticks=batches[::2], xticklabels=batches[::2])
    axes[1].minorticks_off()
    axes[1].legend(fontsize=8.5)
    return [rule, figures.save_figure(figure, folder, "07_speedup")]


# --- Measurements -----------------------------------------------------------------------------------------------------


TASKS = lesson.TASKS | {
    "code": "Write a Python class Point with x and y, and methods to add, subtract and scale points.",
}


@dataclass
class Served:
    """What an engine made of a list of prompts."""

    token_ids: list[list[int]]
    seconds: float = 0.0  # of the steps behind the one that computed the last prompt
    steps: list[dict[int, tuple[int, int]]] = field(default_factory=list)  # {request: (drafts, tokens written)}
    stats: SpecDecodingStats | None = None

    def tokens_per_pass(self, i: int) -> float:
        """Behind the prompt's pass, which writes one token whatever is guessed; 0 if the answer ended there."""
        written = [step[i][1] for step in self.steps if i in step][1:]
        return sum(written) / max(1, len(written))


def serve(engine: LLMEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Served:
    """Hand everything in at once and step until all is done."""
    core, served = engine.core, Served([[] for _ in prompts])
    eos = (engine.model.config.eos_token_ids or (None,))[0]
    for i, (prompt, one) in enumerate(zip(prompts, params)):
        core.add_request(Request(str(i), list(prompt), one, eos_token_id=eos))
    while core.scheduler.has_unfinished_requests():
        decoding, start = all(served.token_ids), time.perf_counter()
        output = core.scheduler.schedule()
        heard = core.update_from_output(output, core.execute_model(output))
        served.seconds += (time.perf_counter() - start) * decoding
        drafts, step = getattr(output, "scheduled_spec_decode_tokens", {}), {}
        for o in heard:
            i = int(o.request_id)
            step[i] = len(drafts.get(o.request_id, ())), step.get(i, (0, 0))[1] + len(o.new_token_ids)
            served.token_ids[i] += o.new_token_ids
        served.steps.append(step)
    served.stats = getattr(core.scheduler, "spec_decoding_stats", None)
    return served


def make_engine(
    model: llama.Llama, tokenizer: Tokenizer, config: SpeculativeConfig | None = None, **options: Any
) -> LLMEngine:
    """The engine, with drafts if there is a config."""
    about = VllmConfig(speculative_config=config)
    sizes = {"max_model_len": 512, "num_gpu_blocks_override": 192} | options
    return LLMEngine(model, tokenizer, config=about, **sizes)


def configure(method: str, K: int, **more: Any) -> SpeculativeConfig:
    """Prompt lookup from two tokens on: on short texts, vLLM's default of five finds little."""
    return SpeculativeConfig(method, K, prompt_lookup_min=2, prompt_lookup_max=4, **more)


def step_costs(
    model: llama.Llama, tokenizer: Tokenizer, batches: Sequence[int], K: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Of each batch size: a plain step in seconds, and v, what a draft adds to it. Context 64, attention included."""
    found: dict[str, dict[str, float]] = {}
    sizes = {"num_gpu_blocks_override": 40 + 6 * max(batches), "max_num_seqs": max(batches)}
    runner = make_engine(model, tokenizer, **sizes).core.runner
    for B in batches:
        times = []
        for n in (1, K + 1):
            blocks = [range(1 + 5 * b, 6 + 5 * b) for b in range(B)]
            meta = AttentionMetadata.build(blocks, [64 + n] * B, [n] * B, 16, model.device)
            ids = torch.ones(B * n, dtype=torch.int64, device=model.device)

            def run(ids=ids, meta=meta) -> Any:
                return runner.model.logits(runner.forward(ids, meta, ()))

            times.append(timing.measure(run, seconds).median)
        found[str(B)] = {"seconds": times[0], "v": max(0.0, times[1] / times[0] - 1) / K}  # noise may say less than 0
    return found


def measure_sampler(V: int, B: int = 32, K: int = 4) -> dict[str, dict[str, float]]:
    """K drafts of each of B requests verified, by kind of row: µs, and GB/s of the rows that must be read."""
    batch = {name: x.to(common.device()) for name, x in enumeration.ragged_batch(V, [K] * B, 0).items()}
    drafts, found = batch["draft_token_ids"] >= 0, {}
    q = {"draft_rows": torch.arange(len(drafts), device=drafts.device).where(drafts, -1)}
    no_q, rows = {"draft_rows": None, "draft_probs": None}, B * (K + 1)
    for kind, greedy, guesses, read in (
        ("greedy", True, no_q, rows),
        ("without_q", False, no_q, rows),
        ("with_q", False, q, rows + B * K),
    ):
        run = functools.partial(
            lesson.rejection_sample, **batch | guesses | {"is_greedy": torch.full_like(drafts, greedy)}
        )
        seconds = timing.measure_graph(run).median
        found[kind] = {"us": 1e6 * seconds, "gb_s": 4 * V * read / seconds / 1e9}
    return found


def tokens_by_method(model: llama.Llama, tokenizer: Tokenizer, K: int) -> dict[str, list[float]]:
    """Tokens per pass of the three tasks, and of the first at a temperature of 0.7, in one batch."""
    prompts = [tokenizer.ask(text) for text in (*TASKS.values(), TASKS["copy"])]
    params = [SamplingParams(temperature=0, max_tokens=24)] * 3
    params.append(SamplingParams(temperature=0.7, max_tokens=24, seed=7))
    runs = {method: serve(make_engine(model, tokenizer, configure(method, K)), prompts, params) for method in METHODS}
    return {method: [run.tokens_per_pass(i) for i in range(4)] for method, run in runs.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What `--bench` prints and stores."""
    model, tokenizer = loader.load(args.model)
    return {"tokens_per_pass": tokens_by_method(model, tokenizer, args.k)} | benchmark(model, tokenizer)


def benchmark(model: llama.Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    """Drafters, tasks and batch sizes against plain decoding: 64 tokens each, B copies of a task's prompt; then K."""
    common.heading("5. Measured: tokens per pass, and speed-up of decoding")
    bench: dict[str, Any] = {"step": step_costs(model, tokenizer, (1, 4, 16), 4, 2.0), "tasks": {}, "adaptive": {}}
    options = {"num_gpu_blocks_override": 400, "max_num_seqs": 16}
    batches, rows = (1, 4, 16), []

    def run(config: SpeculativeConfig | None, task: str, B: int) -> Served:
        prompt = tokenizer.ask(TASKS[task])
        params = [SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)] * B
        return serve(make_engine(model, tokenizer, config, **options), [prompt] * B, params)

    def against_plain(config: SpeculativeConfig, task: str, B: int) -> tuple[Served, float]:
        plain, served = zip(*((run(None, task, B), run(config, task, B)) for _ in range(2)))  # taking turns
        return served[0], min(x.seconds for x in plain) / min(x.seconds for x in served)

    for task in TASKS:
        for method in METHODS:
            found = bench["tasks"].setdefault(method, {})[task] = {}
            for B in batches:
                served, gain = against_plain(configure(method, 4), task, B)
                rate = served.stats.num_accepted_tokens / max(1, served.stats.num_draft_tokens)
                found[str(B)] = {"tokens_per_pass": served.tokens_per_pass(0), "speedup": gain, "accepted": rate}
            rows.append(
                [
                    f"{method}, {task}",
                    f"{found['1']['tokens_per_pass']:.2f}",
                    f"{found['1']['accepted']:.2f}",
                    *(f"{found[str(B)]['speedup']:.2f}x" for B in batches),
                ]
            )
    common.table(["drafter, task", "tokens/pass", "stood", *(f"batch {B}" for B in batches)], rows)
    common.heading("6. Lookahead on chat, batch 4: what bounds the damage of bad drafts?")
    rows = []
    for name, config in {
        "K = 8": configure("lookahead", 8),
        "K = 2": configure("lookahead", 2),
        "heuristic": configure("lookahead", 8, num_speculative_tokens_schedule="heuristic"),
        "off from 4": configure("lookahead", 8, num_speculative_tokens_per_batch_size=[[1, 3, 8], [4, 64, 0]]),
    }.items():
        served, gain = against_plain(config, "chat", 4)
        tokens, drafts = served.tokens_per_pass(0), served.stats.num_draft_tokens
        bench["adaptive"][name.replace(" ", "_").replace("=_", "")] = {
            "speedup": gain,
            "tokens_per_pass": tokens,
            "drafts": drafts,
        }
        rows.append([name, f"{tokens:.2f}", drafts, f"{gain:.2f}x"])
    common.table(["", "tokens/pass", "drafts", "speed-up"], rows)
    common.heading("7. The rule alone: 4 drafts of each of 32 requests, by kind of row")
    bench["sampler"] = {str(V): measure_sampler(V) for V in (49152, 128256)}
    rows = [
        [f"{int(V):,}", *(f"{x['us']:,.0f} µs, {x['gb_s']:,.0f} GB/s" for x in kinds.values())]
        for V, kinds in bench["sampler"].items()
    ]
    common.table(["vocabulary", "greedy", "without a q", "with a q"], rows)
    return bench

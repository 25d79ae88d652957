"""What `lessons/07b_trained_drafters.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import registry
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.spec_decode import trained
from engine.spec_decode.trained import Network
from lab import drafter_training as training
from lab import figures, naive
from lab import tree as trees
from lab.parameters import checked
from lab.tree import chain, fill_tree, plan_tree, verify_greedy

KEY = "07b_trained_drafters"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

WORDS = ["sun", "rain", "wind", "snow", "fog"]
TOY_RANKS = [[0.5, 0.2, 0.15, 0.1, 0.05], [0.4, 0.25, 0.15, 0.1, 0.1], [0.3, 0.25, 0.2, 0.15, 0.1]]
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "nothing": [], "chain of 3": chain(3), "3 first words": [(0,), (1,), (2,)],
    "2 x 2 x 2": [node for k in (1, 2, 3) for node in itertools.product(range(2), repeat=k)],
    "planned, 7": plan_tree(TOY_RANKS, 7), "planned, 15": plan_tree(TOY_RANKS, 15),
}  # fmt: skip
SKILLS = {"good": [0, 0, 1, 0, 0, 2], "fair": [1, 0, 2, 0, 3, 1], "poor": [3, 4, 2, 4, 1, 3]}  # where the truth ranks
WIDGET_CHOICES = {"shape": list(SHAPES), "heads": list(SKILLS), "bug": ["none", "no-mask", "no-move"], "seed": range(6)}
WIDGET_DEFAULT = {"shape": "planned, 7", "heads": "good", "bug": "none", "seed": 0}
TOY_TOKENS, TOY_BLOCKS, TOY_BLOCK_SIZE = 12, [3, 1, 6, 2, 5, 4, 8, 7, 9, 10], 4


def toy_next(seen: Sequence[tuple[int, int]], seed: int) -> int:
    """A language model of five words: what follows depends on every (position, word) that is visible."""
    return sum((3 * word + 1) * (position**2 + 7 + seed) for position, word in seen) % 101 % len(WORDS)


def simulate(params: dict) -> dict:
    """Twelve words of the toy language, a tree per pass: the real trees, masks, verification and compaction, on a paged
    cache that holds words in place of keys. Raises InputError."""
    params = checked(params, WIDGET_CHOICES)
    shape, skill, seed = SHAPES[params["shape"]], SKILLS[params["heads"]], params["seed"]
    plain = [seed % len(WORDS)]
    plain += choices_truth(plain, seed, TOY_TOKENS + 4)
    cache = torch.zeros(2, len(TOY_BLOCKS) + 1, TOY_BLOCK_SIZE, 1, 1)

    def slot(p: Any) -> Any:
        return TOY_BLOCKS[p // TOY_BLOCK_SIZE] * TOY_BLOCK_SIZE + p % TOY_BLOCK_SIZE

    def at(p: Any) -> Any:
        return int(cache[0].view(-1)[slot(p)])

    written, steps, context = [plain[0]], [], 0
    with lesson.broken(None if params["bug"] == "none" else params["bug"]):
        while len(written) <= TOY_TOKENS:
            choices = []
            for k in range(3):
                truth = choices_truth(written, seed, k + 1)[-1]
                others = [w for w in range(len(WORDS)) if w != truth]
                others.insert(skill[(len(steps) + 2 * k + seed) % len(skill)], truth)
                choices.append(others)
            tree = fill_tree(shape, written[-1], choices)
            N = len(tree.parents)
            for i, token in enumerate(tree.token_ids):
                cache[:, slot(context + i) // TOY_BLOCK_SIZE, slot(context + i) % TOY_BLOCK_SIZE] = token
            favourite = []
            for i in range(N):
                past = [(p, at(p)) for p in range(context)]
                own = [(context + tree.depths[j], at(context + j)) for j in range(N) if tree.masks[i] >> j & 1]
                favourite.append(toy_next(past + own, seed))
            path, new = verify_greedy(tree, favourite)
            accepted = torch.tensor([path]).int().view(1, -1)
            trees.compact_slots(cache, torch.tensor([TOY_BLOCKS]).int(), torch.tensor([context]).int(), accepted)
            steps.append({
                "context": context, "tokens": tree.token_ids, "parents": tree.parents, "masks": tree.masks,
                "favourite": favourite, "path": path, "written": new,
                "moves": [[context + i, context + 1 + s] for s, i in enumerate(path) if i != s + 1],
                "slots": [slot(context + i) for i in range(N)], "kept": [at(p) for p in range(context + 1 + len(path))],
            })  # fmt: skip
            written += new
            context += 1 + len(path)
    count = TOY_TOKENS + 1
    same = next((i for i, (a, b) in enumerate(zip(written[:count], plain)) if a != b), count)
    return {"words": WORDS, "steps": steps, "written": written[1:count], "plain": plain[1:count], "blocks": TOY_BLOCKS,
            "same": same - 1, "passes": len(steps), "rows": sum(len(step["tokens"]) for step in steps),
            "tokens": sum(len(step["written"]) for step in steps)}  # fmt: skip


def choices_truth(written: Sequence[int], seed: int, k: int) -> list[int]:
    """The next k words of the toy language."""
    words = list(written)
    for _ in range(k):
        words.append(toy_next(list(enumerate(words)), seed))
    return words[len(written) :]


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    first, name = trace["steps"][0], lambda tokens: " ".join(WORDS[t] for t in tokens)
    lines = [f"pass 0: {len(first['tokens'])} rows, root {WORDS[first['tokens'][0]]!r}"]
    for i in range(1, min(8, len(first["tokens"]))):
        seen = "".join("x" if first["masks"][i] >> j & 1 else "." for j in range(len(first["tokens"])))
        mark = "✓" if i in first["path"] else "·"
        lines.append(f"  node {i} {mark} {WORDS[first['tokens'][i]]:<5} under {first['parents'][i]}, sees {seen}")
    moves = ", ".join(f"{a} to {b}" for a, b in first["moves"]) or "nothing"
    lines.append(f"  accepted {first['path'] or 'nothing'}, wrote: {name(first['written'])}; moved: {moves}")
    lines.append(f"{trace['passes']} passes, {trace['rows']} rows, {trace['tokens']} words: "
                 f"{100 * trace['tokens'] // trace['passes'] / 100:.2f} per pass")  # fmt: skip
    same = "all" if trace["same"] == TOY_TOKENS else f"only the first {trace['same']}"
    lines.append(f"{name(trace['written'][:6])} … ({same} as plain decoding)")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


def expected_path(ranks: Sequence[Sequence[float]], shape: Sequence[tuple[int, ...]]) -> float:
    """Tokens per pass: 1, and for every node the probability that its whole path is right."""
    return 1 + sum(math.prod(ranks[k][r] for k, r in enumerate(node)) for node in shape)


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers: of the shipped files, of planned trees, of the rule for several guesses."""
    files = sorted(trained.WEIGHTS.glob("*.safetensors"))
    about = {f.stem: trained.about(f) | {"megabytes": f.stat().st_size / 1e6} for f in files}
    ranks = about["medusa"]["ranks"]
    p, q = (torch.tensor(x, dtype=torch.float64) for x in lesson.PAIRS["half right"])

    def kept(n: Any, distinct: Any) -> Any:
        return lesson.exact_node(p, q, n, distinct)[1]

    with lesson.broken("same-p"):
        wrong, _ = lesson.exact_node(p, q, 2, False)
    bugs = {bug: simulate(WIDGET_DEFAULT | {"bug": bug})["same"] for bug in WIDGET_CHOICES["bug"]}
    default = simulate(WIDGET_DEFAULT)
    return {
        "drafters": {
            name: {key: d[key] for key in ("parameters", "megabytes", "steps", "tokens", "minutes", "coverage", "asked",
                   "right", "agreement")} | {"expected": training.expected_tokens(d["agreement"])}
            for name, d in about.items()
        },
        "draft_vocab": about["medusa"]["draft_vocab"],
        "head": {"full": 49152 * 576 / 1e6, "draft": about["medusa"]["draft_vocab"] * 576 / 1e6},
        "ranks": ranks,
        "tree": {str(n): expected_path(ranks, plan_tree(ranks, n)) for n in (1, 2, 3, 4, 7, 8, 15, 16, 31, 63)},
        "chain": expected_path(ranks, chain(3)),
        "exact": {"error": max(lesson.largest_tree_error(*pair) for pair in lesson.PAIRS.values()),
                  "cases": 10 * len(lesson.PAIRS)},
        "accepted": {str(n): {"repeated": kept(n, False), "distinct": kept(n, True)} for n in (1, 2, 3)},
        "same_p": {"written": wrong.tolist(), "distance": float((wrong - p).abs().sum() / 2)},
        "widget": {"passes": default["passes"], "rows": default["rows"], "tokens": default["tokens"], "same": bugs},
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """A planned tree and its mask; how often each guess of a chain is right."""
    from matplotlib.colors import ListedColormap

    known, shape = facts(), SHAPES["planned, 7"]
    tree = fill_tree(shape, 0, [range(5)] * 3)
    figure, (left, right) = figures.new_figure(8.0, 3.4, ncols=2, width_ratios=[1.35, 1])
    leaves = [i for i in range(len(tree.parents)) if not tree.children[i]]
    height: dict[int, float] = {}

    def place(i: int) -> float:
        if i not in height:
            below = [place(c) for c in tree.children[i]]
            height[i] = sum(below) / len(below) if below else -float(len([x for x in height if x in leaves]))
        return height[i]

    place(0)
    for i, parent in enumerate(tree.parents):
        if parent >= 0:
            ends = [tree.depths[parent], tree.depths[i]], [height[parent], height[i]]
            left.plot(*ends, color=figures.COLORS["grey"], zorder=1)
            chance = math.prod(TOY_RANKS[k][r] for k, r in enumerate(shape[i - 1]))
            left.text(tree.depths[i] + 0.12, height[i] - 0.5, f"choice {shape[i - 1][-1] + 1}: {chance:.2f}",
                      va="center", fontsize=8.5)  # fmt: skip
        color = figures.COLORS["ink" if i == 0 else "blue"]
        left.scatter(tree.depths[i], height[i], s=330, color=color, zorder=2)
        left.text(tree.depths[i], height[i], str(i), ha="center", va="center", color="white", weight="bold")
    left.set(
        xlim=(-0.2, 3.0),
        ylim=(min(height.values()) - 0.75, 0.6),
        xticks=range(max(tree.depths) + 1),
        xlabel="depth, and the head that guessed",
        title="A tree, and how often each path is right",
    )
    left.yaxis.set_visible(False)
    left.spines["left"].set_visible(False)
    n = len(tree.parents)
    sees = [[mask >> j & 1 for j in range(n)] for mask in tree.masks]
    right.pcolormesh(sees, cmap=ListedColormap([figures.COLORS["light"], figures.COLORS["blue"]]), edgecolor="white")
    right.text(-0.35, n / 2, "context: seen by all", ha="center", va="center", rotation=90, fontsize=8.5)
    middle = [i + 0.5 for i in range(n)]
    right.set(
        xlim=(-0.8, n),
        ylim=(n, 0),
        xticks=middle,
        xticklabels=range(n),
        yticks=middle,
        yticklabels=range(n),
        xlabel="key of node",
        ylabel="row of node",
        title="Who sees whom",
        aspect="equal",
    )
    paths = [figures.save_figure(figure, folder, "07b_tree")]

    figure, (left, right) = figures.new_figure(8.0, 3.8, ncols=2)
    shown = {"draft_model": ("draft model", "blue"), "eagle": ("EAGLE", "orange"), "medusa": ("Medusa", "green")}
    for name, (label, color) in shown.items():
        agreement = known["drafters"][name]["agreement"]
        left.plot([1, 2, 3], agreement, "o-", color=figures.COLORS[color], label=label)
    green = figures.COLORS["green"]
    whatever = [head[0] for head in known["ranks"]]
    left.plot([1, 2, 3], whatever, "o:", color=green, label="Medusa, whatever came before")
    left.set(
        ylabel="share that is right",
        xticks=[1, 2, 3],
        xticklabels=["1st guess", "2nd guess", "3rd guess"],
        xlim=(0.75, 3.25),
        ylim=(0, 0.6),
        title="Is a guess right, if all before it were?",
    )
    left.legend(loc="lower left", fontsize=9)
    right.plot(
        [*map(int, known["tree"])],
        [*known["tree"].values()],
        "o-",
        color=figures.COLORS["purple"],
        label="tree, planned",
    )
    counted = known["drafters"]["medusa"]["agreement"]
    expected = [training.expected_tokens(counted[:k]) for k in (1, 2, 3)]
    right.plot([1, 2, 3], expected, "s-", color=green, label="chain, as counted")
    planned = [expected_path(known["ranks"], chain(k)) for k in (1, 2, 3)]
    right.plot([1, 2, 3], planned, "o:", color=green, label="chain, planned")
    ticks = [1, 3, 7, 15, 31, 63]
    right.set(
        xscale="log",
        xticks=ticks,
        xticklabels=ticks,
        xlabel="guesses in one pass",
        ylabel="tokens per pass",
        title="What Medusa's heads promise",
        ylim=(1, None),
    )
    right.minorticks_off()
    right.legend(loc="lower right")
    return [*paths, figures.save_figure(figure, folder, "07b_chains")]


# --- What `--bench` measures ------------------------------------------------------------------------------------------


def shuffled(network: Network, seed: int = 0) -> Network:
    """The same weights with the rows of every tensor in another order: what a drafter is worth that learned nothing."""
    generator = torch.Generator().manual_seed(seed)
    mixed = {name: t[torch.randperm(len(t), generator=generator)] for name, t in network.tensors.items()}
    return Network(network.method, network.target, network.d2t, mixed)


def agreement_by_layer(
    model: llama.Llama, tokenizer: Tokenizer, prompts: Sequence[str], layers: Sequence[int]
) -> dict[str, float]:
    """How often the favourite after some layers is the favourite after all of them."""
    hits, rows = dict.fromkeys(layers, 0), 0
    for text in prompts:
        ids = torch.tensor(tokenizer.ask(text), device=model.device)
        positions, hidden, favourite = torch.arange(len(ids), device=model.device), None, {}
        for i in range(model.config.num_hidden_layers):
            hidden = model.forward(
                ids if hidden is None else None, positions, naive.recompute, hidden=hidden, layers=[i]
            )
            if i + 1 in layers or i + 1 == model.config.num_hidden_layers:
                favourite[i + 1] = model.logits(hidden[-32:]).argmax(1)
        rows += len(favourite[model.config.num_hidden_layers])
        for layer in layers:
            hits[layer] += int((favourite[layer] == favourite[model.config.num_hidden_layers]).sum())
    return {str(layer): n / rows for layer, n in hits.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Acceptance and time by drafter and task, eight held-out prompts each; exits by layer; trees on Medusa."""
    model, tokenizer = loader.load(args.model)
    K, bench, rows = args.num_speculative_tokens, {"tasks": {}, "chains": {}}, []
    common.heading("By task: 8 held-out prompts each, 64 tokens, greedy and at temperature 0.7")
    for task, prompts in training.HELD_OUT.items():
        bench["tasks"][task] = found = {}
        for temperature in (0.0, 0.7):
            plain = lesson.serve(model, tokenizer, prompts, 64, None, temperature=temperature)
            speed = sum(map(len, plain.token_ids)) / plain.seconds
            for name in lesson.NAMES:
                make = functools.partial(trained.make_drafter, name, model, K)
                run = lesson.serve(model, tokenizer, prompts, 64, make, K, temperature)
                rate = sum(map(len, run.token_ids)) / run.seconds
                key = name if temperature == 0 else f"{name}_sampled"
                found[key] = {
                    "tokens_per_step": run.tokens_per_step,
                    "acceptance": run.acceptance,
                    "tokens_per_second": rate,
                    "speedup": rate / speed,
                }
                if temperature == 0:
                    found[key] |= {"same": run.token_ids == plain.token_ids, "places": run.places}
                    alone = lesson.serve(model, tokenizer, prompts[:1], 64, make, K)
                    base = lesson.serve(model, tokenizer, prompts[:1], 64, None)
                    found[key]["speedup_alone"] = base.seconds / alone.seconds
            found[f"plain_{temperature}"] = speed
        for name in lesson.NAMES:
            greedy, sampled = found[name], found[f"{name}_sampled"]
            rows.append([f"{task}, {name}", f"{greedy['tokens_per_step']:.2f}", f"{sampled['tokens_per_step']:.2f}",
                         f"{greedy['speedup']:.2f}x", f"{greedy['speedup_alone']:.2f}x"])  # fmt: skip
    common.table(["", "tokens per step", "at T = 0.7", f"speed, {len(prompts)} at once", "speed, one alone"], rows)
    for name in training.METHODS:
        n = np.sum([found[name]["places"] for found in bench["tasks"].values()], 0)
        a = (n[1:] / n[:-1].clip(1)).tolist()
        bench["chains"][name] = {"places": n.tolist(), "agreement": a, "expected": training.expected_tokens(a)}
        common.say(f"{name}, all tasks: of guesses with none but right ones before, {' '.join(f'{x:.2f}' for x in a)}")

    nonsense = shuffled(trained.load_network(trained.WEIGHTS / "eagle.safetensors", model))
    run = lesson.serve(model, tokenizer, lesson.held_out(2), 32, functools.partial(trained.EagleDrafter, nonsense), K)
    bench["shuffled"] = {"tokens_per_step": run.tokens_per_step, "acceptance": run.acceptance}
    common.say(f"EAGLE with its weights shuffled: {run.tokens_per_step:.2f} tokens per step")

    common.heading("Early exit: how often a layer's favourite is the last layer's")
    bench["exit"] = agreement_by_layer(model, tokenizer, lesson.held_out(8), [8, 12, 16, 20, 24, 26, 28])
    common.table(["layers", *bench["exit"]], [["agreement", *(f"{a:.2f}" for a in bench["exit"].values())]])

    common.heading("Medusa: trees of growing size, 64 tokens of each task, one sequence")
    network, bench["trees"], rows = trained.load_network(trained.WEIGHTS / "medusa.safetensors", model), {}, []
    prompts = [tokenizer.ask(text) for text in lesson.held_out(2)]
    for size in (0, 3, 7, 15, 31, 63):
        shape = plan_tree(facts()["ranks"], size)
        start = time.perf_counter()
        runs = [lesson.generate_with_tree(model, network, shape, ids, 64) for ids in prompts]
        seconds, tokens = time.perf_counter() - start, sum(len(run.token_ids) for run in runs)
        per_pass = (tokens - len(runs)) / sum(run.passes - 1 for run in runs)
        bench["trees"][str(size)] = {"tokens_per_pass": per_pass, "tokens_per_second": tokens / seconds}
        rows.append([size, f"{per_pass:.2f}", f"{tokens / seconds:.1f}"])
    common.table(["guesses", "tokens per pass", "tokens/s"], rows)
    return bench

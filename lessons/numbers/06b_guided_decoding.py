"""What `lessons/06b_guided_decoding.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine import registry
from engine.llm import LLM
from engine.model import loader
from engine.sampling.guided.automaton import determinize
from engine.sampling.guided.json_schemas import MAX_NESTING
from engine.sampling.guided.limits import MAX_DFA_STATES, MAX_SPEC, MAX_WORK
from engine.sampling.guided.regex import parse_regex
from engine.sampling.guided.regex_guide import RegexGuide
from lab import figures
from lab.parameters import checked

KEY = "06b_guided_decoding"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

WIDGET_CHOICES = {
    "pattern": list(lesson.PATTERNS), "masks": ["bytes", "text"], "eos": ["accepting", "always", "never"],
    "model": [0, 1, 2, 3, 4, 5],
}  # fmt: skip
WIDGET_DEFAULT = {"pattern": "a price", "masks": "bytes", "eos": "accepting", "model": 0}
MAX_STEPS = 8


def simulate(params: dict) -> dict:
    """A model writes the token it likes best of those allowed, until it is done, stuck or cut. Raises InputError."""
    params = checked(params, WIDGET_CHOICES)
    pattern, n = lesson.PATTERNS[params["pattern"]], len(lesson.TOKENS)
    guide = RegexGuide(parse_regex(pattern), lesson.toy_vocabulary(params["masks"]))
    grammar, written, steps, outcome = guide.start(), b"", [], "cut"
    for step in range(MAX_STEPS):
        # The toy model's ranking: in every step another permutation of the 23 tokens, so there are no ties.
        logits = [(5 * token + 7 * step + 4 * params["model"]) % n for token in range(n)]
        allowed = lesson.allowed_tokens(guide, grammar.state, params["eos"])
        chosen = max(allowed, key=lambda token: logits[token], default=None)
        steps.append({"state": grammar.state, "logits": logits, "allowed": allowed, "chosen": chosen, "path": []})
        if chosen is None or lesson.TOKENS[chosen] == lesson.EOS:
            outcome = "stuck" if chosen is None else "ended"
            break
        token, start = lesson.TOKENS[chosen], grammar.state
        steps[-1]["path"] = [guide.dfa.step(start, token[: i + 1]) for i in range(len(token))]
        grammar.accept_token(chosen)
        written += token
    states = range(len(guide.dfa.accepting))
    table = guide.dfa.transitions[:, guide.dfa.byte_class]  # [states, 256]
    return {
        "pattern": pattern, "tokens": list(map(lesson.token_name, lesson.TOKENS)),
        "moves": [[a, b, np.flatnonzero(table[a] == b).tolist()] for a in states for b in states if b in table[a]],
        "accepting": guide.dfa.accepting.nonzero()[0].tolist(),
        "allowed": [lesson.allowed_tokens(guide, state, params["eos"]) for state in states], "steps": steps,
        "written": written.decode("utf-8", "replace"), "num_bytes": len(written), "outcome": outcome,
        "matches": bool(guide.dfa.accepting[grammar.state]),
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    names, fates = trace["tokens"], {"ended": "EOS", "stuck": "stuck", "cut": "cut off"}
    lines = [f"pattern {trace['pattern']}: {len(trace['allowed'])} states, accepting: {trace['accepting']}"]
    for i, step in enumerate(trace["steps"]):
        wish = names[step["logits"].index(max(step["logits"]))]
        taken = "nothing" if step["chosen"] is None else names[step["chosen"]]
        listed = " ".join(names[token] for token in step["allowed"][:9]) + " …" * (len(step["allowed"]) > 9)
        lines.append(f"step {i}, state {step['state']}: allowed {listed or 'nothing'}; likes {wish}, takes {taken}")
    lines.append(f"written {trace['written']!r} ({trace['num_bytes']} bytes), then {fates[trace['outcome']]}: "
                 f"{'a match' if trace['matches'] else 'no match'}")  # fmt: skip
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    automata = {name: determinize(parse_regex(pattern)) for name, pattern in lesson.SHOWN.items()}
    every = [dict(zip(WIDGET_CHOICES, values)) for values in itertools.product(*WIDGET_CHOICES.values())]
    runs = [(params, simulate(params)) for params in every]

    def fates(masks: str, eos: str) -> dict[str, int]:
        some = [run for params, run in runs if (params["masks"], params["eos"]) == (masks, eos)]
        wrong = sum(run["outcome"] == "ended" and not run["matches"] for run in some)
        return {"wrong": wrong, **{f: sum(run["outcome"] == f for run in some) for f in ("ended", "cut", "stuck")}}

    return {
        "states": {name: len(dfa.accepting) for name, dfa in automata.items()},
        "doubling": [len(determinize(parse_regex(f"(a|b)*a(a|b){{{n}}}")).accepting) for n in range(9)],
        "mask_bytes": 49152 // 8, "distortion": lesson.distortion(),
        "limits": {"dfa": MAX_DFA_STATES, "work": MAX_WORK, "spec": MAX_SPEC, "nesting": MAX_NESTING},
        "widget": {"tokens": len(lesson.TOKENS), "runs": len(runs), "accepting": fates("bytes", "accepting"),
                   "always": fates("bytes", "always"), "text": fates("text", "accepting")},
    }  # fmt: skip


# --- Figure -----------------------------------------------------------------------------------------------------------


def bytes_label(members: Sequence[int]) -> str:
    """Bytes as a reader would list them: "0–2, 5", "E2", "80–BF"."""
    runs: list[list[int]] = []
    for b in members:
        runs[-1:] = [[*runs[-1], b]] if runs and runs[-1][-1] == b - 1 else [*runs[-1:], [b]]

    def name(b: int) -> str:
        return chr(b) if 32 < b < 127 else f"{b:02X}"

    return ", ".join(name(r[0]) if len(r) == 1 else f"{name(r[0])}–{name(r[-1])}" for r in runs)


def draw(folder: str | Path) -> list[Path]:
    """The automaton of the widget's default, and the mask of each of its states."""
    trace = simulate(WIDGET_DEFAULT)
    blue, ink, orange = (figures.COLORS[name] for name in ("blue", "ink", "orange"))
    depth = {0: 0}
    for state, target, _ in sorted(trace["moves"]):
        depth.setdefault(target, depth[state] + 1)
    rows = {s: sum(depth[t] == d for t in range(s)) for s, d in depth.items()}
    where = {s: (2.0 * d + 1.0 * rows[s], 0.6 - 1.3 * rows[s]) for s, d in depth.items()}
    figure, axes = figures.new_figure(8.0, 4.7, nrows=2, height_ratios=[1.3, 1.5])
    ax = axes[0]
    for state, target, members in trace["moves"]:
        (x0, y0), (x1, y1) = where[state], where[target]
        color = orange if min(members) > 127 else ink
        ax.annotate("", (x1, y1), (x0, y0), arrowprops=dict(arrowstyle="-|>", color=color, shrinkA=14, shrinkB=14))
        over = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # the arrow passes behind its label
        middle = ((x0 + x1) / 2, (y0 + y1) / 2)
        ax.text(*middle, bytes_label(members), ha="center", va="center_baseline", color=color, bbox=over)
    for state, (x, y) in where.items():
        for size in (24, 18) if state in trace["accepting"] else (24,):
            ax.plot(x, y, "o", markersize=size, markerfacecolor="white", markeredgecolor=blue, markeredgewidth=1.4)
        ax.text(x, y, str(state), ha="center", va="center_baseline", color=blue, weight="bold")
    ax.set(xlim=(-0.6, max(x for x, _ in where.values()) + 0.6), ylim=(-1.0, 1.0))
    ax.set_axis_off()
    ax.set_title(f"{trace['pattern']} over bytes: € is E2 82 AC (orange), and a token may stop in its middle")
    ax, names = axes[1], trace["tokens"]
    for state, token in itertools.product(range(len(trace["allowed"])), range(len(names))):
        ax.plot(
            token, state, "s", markersize=9, color=blue if token in trace["allowed"][state] else figures.COLORS["light"]
        )
    ax.set(
        yticks=range(len(trace["allowed"])),
        xticks=range(len(names)),
        ylim=(len(trace["allowed"]) - 0.5, -0.5),
        xlim=(-0.6, len(names) - 0.4),
        ylabel="state",
        title="the mask of each state: which tokens may come next (blue)",
    )
    ax.set_xticklabels(names, rotation=60, ha="right", rotation_mode="anchor", fontsize=9)
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    return [figures.save_figure(figure, folder, "06b_automaton")]


# --- What `--bench` measures ------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Guides and masks of the model's vocabulary, three questions of each task, and refusals: a minute."""
    model, tokenizer = loader.load(args.model)
    vocabulary = lesson.vocabulary_of(tokenizer, model.config.vocab_size, model.config.eos_token_ids)
    bench = {"guides": lesson.time_guides(vocabulary), "apply_ms": lesson.time_masking(vocabulary, model.device)}
    common.heading("Measured: three questions of each task, free and guided")
    llm = LLM(model, tokenizer=tokenizer, max_model_len=256, max_num_seqs=64)
    bench["parse_rate"] = lesson.ask_everything(llm, 3, args.regex)
    return bench | {"refusal_ms": lesson.refuse(vocabulary)}

"""What `lessons/04b_offline_engine.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from engine import registry
from engine.llm import LLM
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.request import Request, SamplingParams
from engine.sampling.detokenizer import IncrementalDetokenizer, TokenBytes
from engine.sampling.prompt_logprobs import SCORED_ROWS
from engine.sampling.sampler import (
    CANDIDATES,
    Sampler,
    SamplingState,
    adjust_logits,
    distribution,
    draw_tokens,
    uniforms,
)
from lab import figures, timing
from lab.parameters import checked

KEY = "04b_offline_engine"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

WORDS = ["the", "a", "sea", "moon", "cat", "why", "xylophone", "zzz"]  # whose logits are the script's
PROMPT, OUTPUT = [0, 2], [0, 0, 3]  # "the sea" -> "the the moon"
PENALTIES = {
    "none": {},
    "repetition 1.5": {"repetition_penalty": 1.5},
    "presence 1": {"presence_penalty": 1.0},
    "frequency 1": {"frequency_penalty": 1.0},
}
WIDGET_CHOICES = {
    "temperature": [0, 0.5, 0.8, 1, 1.5, 2],
    "top_k": [0, 1, 2, 3, 5],
    "top_p": [1, 0.95, 0.9, 0.75, 0.5],
    "min_p": [0, 0.05, 0.2, 0.5],
    "penalty": list(PENALTIES),
    "seed": [0, 1, 2],
}
WIDGET_DEFAULT = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0, "penalty": "repetition 1.5", "seed": 0}
PLAIN = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "penalty": "none", "seed": 0}
NUM_DRAWS = 12

row = functools.partial(torch.tensor, dtype=torch.float64)
# Each cut, switched off, in the order in which they are made.
OFF = {"min_p": row([0.0]), "top_k": torch.tensor([len(WORDS)]), "top_p": row([1.0])}


def simulate(params: dict) -> dict:
    """Eight words through the sampler, stage by stage, and what a seed draws. Raises InputError."""
    params = checked(params, WIDGET_CHOICES)
    chosen = SamplingParams(
        **{name: params[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
        **PENALTIES[params["penalty"]],
    )
    request = Request("widget", PROMPT, chosen)
    for token in OUTPUT:
        request.append_output_token_id(token)
    state = SamplingState(request, chosen.seed)
    adjusted = adjust_logits(row([lesson.LOGITS]), [state])
    limits = {
        "min_p": row([chosen.min_p]),
        "top_k": torch.tensor([chosen.top_k or len(WORDS)]),
        "top_p": row([chosen.top_p]),
    }
    stages, now = [], dict(OFF)
    for stage in ("penalties", "temperature", *limits):
        if stage in limits:
            now[stage] = limits[stage]
        cold = stage == "penalties" or state.greedy
        probs = distribution(adjusted, row([1.0 if cold else chosen.temperature]), **now)
        if state.greedy and stage != "penalties":  # nothing is cut or drawn: the best has the whole line
            probs = torch.zeros_like(probs).scatter_(1, adjusted.argmax(1, keepdim=True), 1.0)
        kept = [i for i, p in enumerate(probs[0]) if p > 0]
        stages.append({"stage": stage, "probs": probs[0].tolist(), "kept": kept})
    u = uniforms([chosen.seed] * NUM_DRAWS, range(NUM_DRAWS))
    draws = draw_tokens(probs.expand(NUM_DRAWS, -1), u).tolist()
    if state.greedy:
        draws = [int(adjusted.argmax())] * NUM_DRAWS
    return {
        "temperature": params["temperature"],
        "words": WORDS,
        "prompt": PROMPT,
        "output": OUTPUT,
        "model": distribution(row([lesson.LOGITS]), row([1.0]), **OFF)[0].tolist(),
        "logits": adjusted[0].tolist(),
        "stages": stages,
        "left": len(stages[-1]["kept"]),
        "u": u.tolist(),
        "draws": draws,
    }


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    lines = ["word       " + "".join(f"{stage['stage']:>12}" for stage in trace["stages"])]
    for i, word in enumerate(trace["words"]):
        cells = [f"{stage['probs'][i]:.4f}" if i in stage["kept"] else "—" for stage in trace["stages"]]
        lines.append(f"{word:<11}" + "".join(f"{cell:>12}" for cell in cells))
    lines.append("draws: " + " ".join(trace["words"][i] for i in trace["draws"]))
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


def last_stage(**params: Any) -> dict[str, Any]:
    """What is drawn from if only these parameters are set."""
    return simulate({**PLAIN, **params})["stages"][-1]


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    cuts = {"top_p_75": {"top_p": 0.75}, "min_p_20": {"min_p": 0.2}}
    temperatures = {"_cold": 0.5, "": 1, "_hot": 2}
    the, xylophone = WORDS.index("the"), WORDS.index("xylophone")
    return {
        "sweep": {"points": lesson.POINTS, "worst": lesson.worst_share(), "bound": 1 / lesson.POINTS},
        "kept": {
            name + suffix: len(last_stage(temperature=temperature, **cut)["kept"])
            for name, cut in cuts.items()
            for suffix, temperature in temperatures.items()
        },
        "the": {name.split()[0]: last_stage(penalty=name)["probs"][the] for name in PENALTIES},
        "xylophone": {
            str(t).replace(".", ""): last_stage(temperature=t)["probs"][xylophone] for t in temperatures.values()
        },
        "u": {"seed_7": uniforms([7] * 3, range(3)).tolist(), "seed_8": uniforms([8], [0]).tolist()},
        "candidates": CANDIDATES,
        "scored_rows": SCORED_ROWS,
        "counts_bytes": 4 * 49152,
        "seen_bytes": 49152,
    }


# --- Figure -----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The widget's default, stage by stage: each word's share of [0, 1), what falls, and what the draw hits."""
    trace = simulate(WIDGET_DEFAULT)
    figure, ax = figures.new_figure(8.0, 3.4)
    rows, last = [("the model", trace["model"])], trace["stages"][-1]
    for stage in trace["stages"]:
        if stage["probs"] != rows[-1][1]:  # what is not set changes nothing, and has no row
            rows.append((stage["stage"], stage["probs"]))
    for y, (_, probs) in enumerate(rows):
        left = 0.0
        for i, p in enumerate(probs):
            color = figures.COLORS["blue" if i in last["kept"] else "red"]
            ax.barh(y, p, left=left, height=0.66, color=color, alpha=0.45 if i % 2 else 0.9, edgecolor="white")
            label = next((s for s in (f"{WORDS[i]} {p:.2f}", WORDS[i]) if len(s) * 0.0128 < p), "")
            shade = figures.COLORS["ink"] if i % 2 else "white"  # pale boxes, dark words
            ax.text(left + p / 2, y, label, ha="center", va="center_baseline", fontsize=9, color=shade)
            left += p
    fallen = [word for i, word in enumerate(WORDS) if i not in last["kept"]]
    ax.text(1.01, len(rows) - 1, f"without {fallen[0]},\n{', '.join(fallen[1:])}", va="center", fontsize=9,
            color=figures.COLORS["red"])  # fmt: skip
    ax.plot(trace["u"], [len(rows) - 0.5] * NUM_DRAWS, "^", color=figures.COLORS["ink"], markersize=6, clip_on=False)
    ax.set(yticks=range(len(rows)), yticklabels=[name for name, _ in rows], xlim=(0, 1), ylim=(len(rows) - 0.35, -0.5),
           xlabel="u, and where the first twelve draws of seed 0 fall (▲)")  # fmt: skip
    ax.set_title("temperature 0.8, top_p 0.95, repetition_penalty 1.5 after “the sea → the the moon”")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    return [figures.save_figure(figure, folder, "04b_sampling")]


# --- What `--bench` measures ------------------------------------------------------------------------------------------

WANTED = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "both": {"top_k": 50, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "penalty": {"temperature": 0, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0, "logprobs": 5},
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What each kind of sampling costs, beside a step of the whole engine and the way from tokens to text: a minute."""
    model, tokenizer = loader.load(args.model)
    common.heading("Measured: what sampling costs, 32 rows of 49,152 logits")
    bench: dict[str, Any] = {"sampling_ms": sampling_cost(model.device, 2.0)}
    rows = []
    for kind, ms in bench["sampling_ms"].items():
        rows.append([", ".join(f"{name} {value}" for name, value in WANTED[kind].items()), f"{ms:.1f}"])
    common.table(["parameters", "ms per step"], rows)
    bench["step_ms"] = step_cost(model, tokenizer)
    common.say(f"a whole step of 32 greedy requests takes {bench['step_ms']:.1f} ms")
    bench["front_end"] = front_end_cost(tokenizer)
    early, late = (bench["front_end"][f"us_per_token_at_{n}"] for n in (10, 10000))
    common.say(f"detokenizing costs {early:.1f} µs per token at 10 tokens and {late:.1f} µs at 10,000")
    return bench


def sampling_cost(device: torch.device, seconds: float) -> dict[str, float]:
    """Milliseconds of `Sampler` for 32 requests that ask for the same thing."""
    logits = 4 * torch.randn(32, 49152, generator=torch.Generator().manual_seed(0)).to(device)
    found = {}
    for kind, wanted in WANTED.items():
        states = [SamplingState(Request(str(i), [1, 2, 3], SamplingParams(**wanted)), seed=i) for i in range(32)]
        found[kind] = timing.measure(functools.partial(Sampler(), logits, states), seconds).median * 1e3
    return found


def step_cost(model: llama.Llama, tokenizer: Tokenizer) -> float:
    """Milliseconds of a decode step of the whole engine, with 32 greedy requests; the median of 64."""
    engine = LLM(model, tokenizer=tokenizer, max_model_len=512, max_num_seqs=32).llm_engine
    for i in range(32):
        engine.add_request(str(i), lesson.TEXT, SamplingParams(temperature=0, max_tokens=65, ignore_eos=True))
    engine.step()  # the prompts
    stamps = [time.perf_counter()]
    while engine.has_unfinished_requests():
        engine.step()
        stamps.append(time.perf_counter())
    return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(stamps))


def front_end_cost(tokenizer: Tokenizer) -> dict[str, float]:
    """Microseconds to append one token and look for a stop string, early and late in a long text."""
    ids = (tokenizer.encode(lesson.TEXT) * 1000)[:11000]
    detokenizer = IncrementalDetokenizer(TokenBytes(tokenizer), SamplingParams(stop=["never said"]))
    stamps = [time.perf_counter()]
    for token in ids:
        detokenizer.append(token)
        stamps.append(time.perf_counter())
    return {f"us_per_token_at_{first}": (stamps[first + 1000] - stamps[first]) / 1000 * 1e6 for first in (10, 10000)}

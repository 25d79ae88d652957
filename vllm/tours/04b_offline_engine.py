"""04b · The offline engine: from logits to text.

The question: lesson 04 decides which requests run, and gets back one row of logits for each. What happens between that
row and the words a caller reads, if 32 callers in one batch want 32 different things?

The mechanism:
  1. Adjust: forbid stopping too early (min_tokens), add logit_bias, apply penalties. This can change even the argmax.
  2. Shape: temperature, then min_p, top_k, top_p. Each row its own values, all rows in the same few tensor operations.
  3. Draw: one uniform number per row, a hash of the request's seed and of how many tokens it has written. So the rest
     of the batch, the step, or a preemption cannot change this number.
  4. Text: token -> bytes -> an incremental UTF-8 decoder. Half a character is never shown, and a token costs O(1).
  5. Stop strings are found in text, because they may begin in one token and end in the next; what could still become
     one is held back from a stream.
  6. `n` samples are n requests with seeds seed, seed+1, …; they meet again only in the answer.
  7. A prompt is scored where it is computed: row i of a chunk holds what the model expects as token i + 1.
  8. `LLMEngine` validates, queues, steps and answers; `LLM.generate` and `LLM.chat` are loops around it.

Numbers to remember: a seeded request needs 2 integers of state (seed, count). An emoji may be 4 tokens, of which 3 show
nothing. With a stop string of s characters a stream always stays s − 1 characters behind.

How to run:
  uv run python -m vllm.tours.04b_offline_engine                    the whole story
  uv run python -m vllm.tours.04b_offline_engine --temperature 1.5  what the model says at a high temperature
  uv run python -m vllm.tours.04b_offline_engine --decode-tokens    break it: decode token by token, and the check fails
  uv run python -m vllm.tours.04b_offline_engine --bench            a minute: what each kind of sampling costs a step

Read for this: vLLM 0.32 `v1/sample/sampler.py`, `v1/sample/ops/topk_topp_sampler.py`, `v1/engine/detokenizer.py`,
`v1/engine/parallel_sampling.py`, `outputs.py`; Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Keskar et al.
2019 (repetition penalty), Steele et al. 2014 (SplitMix), Salmon et al. 2011 (counter-based random numbers).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import functools
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import arguments
from lab import cli
from lab import figures
from lab import recorded
from lab import timing
from lab.parameters import checked
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.llm import LLM
from engine.request import Request, SamplingParams
from engine.sampling.detokenizer import IncrementalDetokenizer, TokenBytes
from engine.sampling.prompt_logprobs import SCORED_ROWS
from engine.sampling.sampler import (
    CANDIDATES,
    GREEDY,
    Sampler,
    SamplingState,
    adjust_logits,
    distribution,
    draw_tokens,
    uniforms,
)
from lab import naive
from lab.naive_sampler import reference_distribution

KEY = "04b_offline_engine"


# --- What we want, without cleverness -------------------------------------------------------------------------------
#
# One row's distribution in plain Python is in lab/naive_sampler.py; scores of a text need no cache:


def reference_scores(model: llama.Llama, token_ids: Sequence[int]) -> torch.Tensor:
    """log p(xᵢ | x₀…xᵢ₋₁) for every token but the first, in one pass and without a cache. fp32 [tokens − 1]."""
    ids = torch.tensor(token_ids, device=model.device)
    hidden = model.forward(ids, torch.arange(len(ids), device=model.device), naive.recompute)
    return model.logits(hidden[:-1]).float().log_softmax(1).gather(1, ids[1:, None])[:, 0]


# Adjusting, shaping and drawing for a batch are in engine/sampling/sampler.py, token ids to text in its detokenizer.py;
# what a caller sees is in engine/front_end.py and engine/llm.py.


# --- The simulation behind the widget ---------------------------------------------------------------------------------

WORDS = ["the", "a", "sea", "moon", "cat", "why", "xylophone", "zzz"]  # a vocabulary that fits on a screen
LOGITS = [3.0, 2.5, 2.0, 1.5, 0.5, -0.5, -2.0, -3.0]
PROMPT, OUTPUT = [0, 2], [0, 0, 3]  # "the sea" -> "the the moon"
PENALTIES = {
    "none": {}, "repetition 1.5": {"repetition_penalty": 1.5}, "presence 1": {"presence_penalty": 1.0},
    "frequency 1": {"frequency_penalty": 1.0},
}  # fmt: skip
CHOICES = {
    "temperature": [0, 0.5, 0.8, 1, 1.5, 2], "top_k": [0, 1, 2, 3, 5], "top_p": [1, 0.95, 0.9, 0.75, 0.5],
    "min_p": [0, 0.05, 0.2, 0.5], "penalty": list(PENALTIES), "seed": [0, 1, 2],
}  # fmt: skip
WIDGET_DEFAULT = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0, "penalty": "repetition 1.5", "seed": 0}
NUM_DRAWS = 12


def simulate(params: dict) -> dict:
    """Eight words through the sampler, stage by stage, and what a seed draws. Raises InputError."""
    params = checked(params, CHOICES)
    chosen = SamplingParams(
        **{name: params[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
        **PENALTIES[params["penalty"]],
    )
    request = Request("widget", PROMPT, chosen)
    for token in OUTPUT:
        request.append_output_token_id(token)
    state = SamplingState(request, chosen.seed)
    adjusted = adjust_logits(torch.tensor([LOGITS], dtype=torch.float64), [state])
    row = lambda value: torch.tensor([value], dtype=torch.float64)  # noqa: E731
    temperature = 1.0 if state.greedy else chosen.temperature
    stages, off = [], {"min_p": row(0.0), "top_k": torch.tensor([len(WORDS)]), "top_p": row(1.0)}
    limits = {"min_p": row(chosen.min_p), "top_k": torch.tensor([chosen.top_k or len(WORDS)]),
              "top_p": row(chosen.top_p)}  # fmt: skip
    for stage in ("penalties", "temperature", *limits):
        on = list(limits)[: list(limits).index(stage) + 1] if stage in limits else []
        now = off | {name: limits[name] for name in on}
        probs = distribution(adjusted, row(1.0 if stage == "penalties" else temperature), **now)
        if state.greedy and stage != "penalties":  # nothing is cut or drawn: the best has the whole line
            probs = torch.zeros_like(probs).scatter_(1, adjusted.argmax(1, keepdim=True), 1.0)
        kept = [i for i, p in enumerate(probs[0]) if p > 0]
        stages.append({"stage": stage, "probs": probs[0].tolist(), "kept": kept})
    u = uniforms([chosen.seed] * NUM_DRAWS, range(NUM_DRAWS))
    draws = draw_tokens(probs.expand(NUM_DRAWS, -1), u).tolist()
    if state.greedy:
        draws = [int(adjusted.argmax())] * NUM_DRAWS
    model = distribution(torch.tensor([LOGITS], dtype=torch.float64), row(1.0), **off)
    return {
        "words": WORDS, "prompt": PROMPT, "output": OUTPUT, "model": model[0].tolist(), "logits": adjusted[0].tolist(),
        "stages": stages, "left": len(stages[-1]["kept"]), "u": u.tolist(), "draws": draws,
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    lines = ["word       " + "".join(f"{stage['stage']:>12}" for stage in trace["stages"])]
    for i, word in enumerate(trace["words"]):
        cells = [f"{stage['probs'][i]:.4f}" if i in stage["kept"] else "—" for stage in trace["stages"]]
        lines.append(f"{word:<11}" + "".join(f"{cell:>12}" for cell in cells))
    lines.append("draws: " + " ".join(trace["words"][i] for i in trace["draws"]))
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


def swept(probs: torch.Tensor, points: int) -> torch.Tensor:
    """The share of `points` equally spaced u that lead to each token: what `draw_tokens` really does. [V] -> [V]."""
    u = (np.arange(points) + 0.5) / points
    tokens = draw_tokens(probs.expand(points, -1), u)
    return torch.bincount(tokens, minlength=len(probs)).double() / points


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    kept = lambda **params: len(simulate({**PLAIN, **params})["stages"][-1]["kept"])  # noqa: E731
    prob = lambda word, **params: simulate({**PLAIN, **params})["stages"][-1]["probs"][WORDS.index(word)]  # noqa: E731
    probs, points = torch.tensor(LOGITS, dtype=torch.float64).softmax(0), 20_000
    share = swept(probs, points)
    return {
        "sweep": {"points": points, "worst": (share - probs).abs().max().item(), "bound": 1 / points},
        "kept": {
            "top_p_75_cold": kept(temperature=0.5, top_p=0.75), "top_p_75": kept(top_p=0.75),
            "top_p_75_hot": kept(temperature=2, top_p=0.75),
            "min_p_20_cold": kept(temperature=0.5, min_p=0.2), "min_p_20": kept(min_p=0.2),
            "min_p_20_hot": kept(temperature=2, min_p=0.2),
        },
        "the": {name.split()[0]: prob("the", penalty=name) for name in PENALTIES},
        "xylophone": {str(t).replace(".", ""): prob("xylophone", temperature=t) for t in (0.5, 1, 2)},
        "u": {"seed_7": uniforms([7] * 3, range(3)).tolist(), "seed_8": uniforms([8], [0]).tolist()},
        "candidates": CANDIDATES, "scored_rows": SCORED_ROWS, "counts_bytes": 4 * 49152, "seen_bytes": 49152,
    }  # fmt: skip


PLAIN = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "penalty": "none", "seed": 0}


# --- Figure -----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The widget's default, stage by stage, and the intervals of [0, 1) that the draw uses."""
    trace = simulate(WIDGET_DEFAULT)
    figure, axes = figures.new_figure(8.0, 4.0, nrows=2, height_ratios=[3, 1.1])
    width, colors = 0.16, [figures.COLORS[name] for name in ("grey", "orange", "purple", "green", "blue")]
    ax, last = axes[0], trace["stages"][-1]
    for i, (stage, color) in enumerate(zip(trace["stages"], colors)):
        places = [x + (i - 2) * width for x in range(len(WORDS))]
        ax.bar(places, stage["probs"], width, color=color, label=stage["stage"])
    ax.set(xticks=range(len(WORDS)), xticklabels=WORDS, ylabel="probability")
    ax.set_title("temperature 0.8, top_p 0.95, repetition_penalty 1.5 after “the sea → the the moon”")
    ax.legend(ncols=5, loc="upper right", columnspacing=1.0, handlelength=1.2)
    ax, left = axes[1], 0.0
    for i in last["kept"]:
        p, alpha = last["probs"][i], 0.85 - 0.12 * (i % 2 * 3)
        ax.barh(0, p, left=left, height=0.7, color=figures.COLORS["blue"], alpha=alpha, edgecolor="white")
        if p > 0.03:
            shade = figures.COLORS["ink"] if i % 2 else "white"  # pale boxes, dark words
            ax.text(left + p / 2, 0, WORDS[i], ha="center", va="center", color=shade, fontsize=9)
        left += p
    ax.plot(trace["u"], [0.52] * NUM_DRAWS, "v", color=figures.COLORS["red"], clip_on=False, markersize=6)
    ax.set(yticks=[], xlim=(0, 1), ylim=(-0.4, 0.75), xlabel="u: the first twelve draws of seed 0")
    ax.spines["left"].set_visible(False)
    return [figures.save_figure(figure, folder, "04b_sampling")]


# --- The story --------------------------------------------------------------------------------------------------------

TEXT = "Zoë paid 5 € for 寿司; 👩‍🚀 said: “bon”"


def random_case(rng: random.Random, vocab: int) -> tuple[SamplingParams, list[int], list[int]]:
    """Random parameters, prompt and output over a small vocabulary."""
    params = SamplingParams(
        temperature=rng.choice([0, 0.3, 0.7, 1, 2]), top_k=rng.choice([0, 1, 3, vocab]),
        top_p=rng.choice([0.1, 0.6, 0.95, 1]),
        min_p=rng.choice([0, 0.05, 0.5]), repetition_penalty=rng.choice([0.8, 1, 1.7]),
        presence_penalty=rng.choice([0, 1.5, -1]), frequency_penalty=rng.choice([0, 0.7, -0.5]),
        logit_bias=rng.choice([None, {0: 4.0, 3: -100.0}]), min_tokens=rng.choice([0, 6]),
        allowed_token_ids=rng.choice([None, None, [0, 5, 9, 2], [5]]),
        _bad_words_token_ids=rng.choice([None, [[9], [5, 2], [2, 5, 0, 7]]]),
    )  # fmt: skip
    return params, rng.choices(range(vocab), k=5), rng.choices(range(vocab), k=rng.choice([0, 4]))


def batch_distributions(cases: Sequence[tuple], logits: torch.Tensor, eos: int) -> torch.Tensor:
    """What `Sampler` would draw from, for all cases in one batch. [R, V]; greedy rows have one 1."""
    states = []
    for i, (params, prompt, output) in enumerate(cases):
        request = Request(str(i), prompt, params)
        for token in output:
            request.append_output_token_id(token)
        states.append(SamplingState(request, seed=i, eos_token_ids=[eos]))
    adjusted = adjust_logits(logits.clone(), states)
    probs = torch.nn.functional.one_hot(adjusted.argmax(1), logits.shape[1]).to(logits.dtype)
    drawn = [row for row, state in enumerate(states) if not state.greedy]
    probs[drawn] = Sampler.probabilities(adjusted[drawn], [states[row] for row in drawn])
    return probs


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    shown = "of step 3 (default %(default)s)"
    p.add_argument("--temperature", type=arguments.number(float, 0, 2), default=0.8, help=shown)
    p.add_argument("--top-p", type=arguments.number(float, 0.01, 1), default=0.95, help=shown)
    p.add_argument("--decode-tokens", action="store_true", help="the bug: turn every token into text on its own")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine = cli.start(args)
    loader.check_context(args.model, 512)
    numbers, bench = facts(), {}

    common.heading("1. One batch, every row its own parameters, against the row-by-row reference")
    rng, vocab, eos = random.Random(args.seed), 32, 5
    cases = [random_case(rng, vocab) for _ in range(256)]
    logits = 3 * torch.randn(len(cases), vocab, generator=torch.Generator().manual_seed(args.seed))
    reference = [reference_distribution(row.tolist(), *case, [eos]) for row, case in zip(logits, cases)]
    common.check("distributions of 256 random requests in one batch", batch_distributions(cases, logits, eos),
                 torch.tensor(reference))  # fmt: skip
    sweep = numbers["sweep"]
    if sweep["worst"] > sweep["bound"]:
        raise common.CheckFailed(f"draws: a probability is off by {sweep['worst']:.1e}")
    common.say(f"✓ {sweep['points']:,} equally spaced u give every token its probability to {sweep['worst']:.0e}")

    common.heading("2. From tokens to text")
    model, tokenizer = loader.load(args.model)
    token_bytes, ids = TokenBytes(tokenizer), tokenizer.encode(TEXT)
    if args.decode_tokens:
        pieces = [tokenizer.decode([token]) for token in ids]
    else:
        detokenizer = IncrementalDetokenizer(token_bytes, SamplingParams())
        pieces = []
        for token in ids:
            detokenizer.append(token)
            pieces.append(detokenizer.get_next_output_text(finished=False))
    common.say(f"{len(TEXT)} characters, {len(ids)} tokens; what each token adds to what a reader sees:")
    common.say("|".join(pieces))
    # Not TEXT: a tokenizer may lack some of its characters. Llama 2's puts a space before every first word.
    text, whole = "".join(pieces).removeprefix(" "), tokenizer.decode(ids).removeprefix(" ")
    common.check_equal("the pieces make up the text", text, whole)

    common.heading("3. The offline engine: what vLLM's documentation calls LLM")
    llm = LLM(model, tokenizer=tokenizer, max_model_len=512, max_num_seqs=16)
    prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is", "2, 4, 6, 8,"]
    n = 1 if args.temperature < GREEDY else 2  # greedy ones would be the same
    params = [
        SamplingParams(temperature=args.temperature, top_p=args.top_p, max_tokens=12, seed=args.seed),
        SamplingParams(temperature=args.temperature, top_p=args.top_p, max_tokens=12, n=n, seed=args.seed + 1),
        SamplingParams(temperature=0, max_tokens=12, stop=[". "]),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.2, logprobs=2),
    ]
    together = llm.generate(prompts, params)
    for output in together:
        for answer in output.outputs:
            common.say(f"{output.prompt} …{answer.text!r} ({answer.finish_reason})")
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params)]
    tokens = lambda outputs: [[answer.token_ids for answer in output.outputs] for output in outputs]  # noqa: E731
    common.check_equal("each prompt alone gets the same tokens, sampled ones included", tokens(together), tokens(alone))
    if tokenizer.chat_template:
        ask = [{"role": "user", "content": "What is 2+2?"}]
        (answer,) = llm.chat(ask, SamplingParams(temperature=0, max_tokens=16))[0].outputs
        common.say(f"chat: {answer.text!r} ({answer.finish_reason})")
    else:
        common.skipped("chat", "this model has no chat template")
    pool = llm.llm_engine.core.scheduler.kv_cache_manager.block_pool
    common.check_equal("all KV blocks are free again", pool.num_free_blocks, pool.num_blocks - 1)

    common.heading("4. How probable is what is there already? Three endings of one sentence")
    endings = [prompts[2] + ending for ending in (" Paris.", " Rome.", " Tuesday.")]
    outputs = llm.generate(endings, SamplingParams(max_tokens=1, prompt_logprobs=1))
    scores, first = [], len(tokenizer.encode(prompts[2]))
    for output in outputs:
        chosen = [entry[t] for t, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])]
        scores += [x.logprob for x in chosen]
        said = "  ".join(f"{x.decoded_token!r} {x.logprob:.2f} (rank {x.rank})" for x in chosen[first - 1 :])
        common.say(f"{said}: together {sum(x.logprob for x in chosen[first - 1 :]):.2f}")
    reference = torch.cat([reference_scores(model, output.prompt_token_ids) for output in outputs])
    common.check("log probabilities of all prompt tokens", torch.tensor(scores), reference.cpu())

    common.heading("5. Eight words, and what each parameter makes of their probabilities: simulate()")
    common.say(describe(simulate(WIDGET_DEFAULT)))

    common.heading("6. What sampling costs: 32 rows of 49,152 logits")
    bench["sampling_ms"] = sampling_cost(model.device, 2.0 if args.bench else 0.15)
    common.table(["parameters", "ms per step"], [
        [", ".join(f"{name} {value}" for name, value in WANTED[kind].items()), f"{ms:.1f}"]
        for kind, ms in bench["sampling_ms"].items()
    ])  # fmt: skip
    if args.bench:
        bench["step_ms"] = step_cost(model, tokenizer)
        common.say(f"a whole step of 32 greedy requests takes {bench['step_ms']:.1f} ms")
        bench["front_end"] = front_end_cost(token_bytes, tokenizer)
        common.say(f"detokenizing costs {bench['front_end']['us_per_token_at_10']:.1f} µs per token at 10 tokens and "
                   f"{bench['front_end']['us_per_token_at_10000']:.1f} µs at 10,000")  # fmt: skip
    if args.figure:
        draw(args.figure)
    if args.json:
        recorded.merge_json(args.json, KEY, {"machine": machine, "facts": numbers, "bench": bench})


WANTED = {
    "greedy": {"temperature": 0}, "temperature": {"temperature": 1}, "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95}, "both": {"top_k": 50, "top_p": 0.95}, "min_p": {"min_p": 0.05},
    "penalty": {"temperature": 0, "repetition_penalty": 1.1}, "logprobs": {"temperature": 0, "logprobs": 5},
}  # fmt: skip


def sampling_cost(device: torch.device, seconds: float) -> dict[str, float]:
    """Milliseconds of `Sampler` for 32 requests that ask for the same thing."""
    logits = 4 * torch.randn(32, 49152, generator=torch.Generator().manual_seed(0)).to(device)
    found = {}
    for kind, wanted in WANTED.items():
        states = [SamplingState(Request(str(i), [1, 2, 3], SamplingParams(**wanted)), seed=i) for i in range(32)]
        found[kind] = timing.measure(lambda states=states: Sampler()(logits, states), seconds).median * 1e3
    return found


def step_cost(model: llama.Llama, tokenizer: Tokenizer) -> float:
    """Milliseconds of a decode step of the whole engine, with 32 greedy requests; the median of 64."""
    engine = LLM(model, tokenizer=tokenizer, max_model_len=512, max_num_seqs=32).llm_engine
    for i in range(32):
        engine.add_request(str(i), TEXT, SamplingParams(temperature=0, max_tokens=65, ignore_eos=True))
    engine.step()  # the prompts
    stamps = [time.perf_counter()]
    while engine.has_unfinished_requests():
        engine.step()
        stamps.append(time.perf_counter())
    return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(stamps))


def front_end_cost(token_bytes: TokenBytes, tokenizer: Tokenizer) -> dict[str, float]:
    """Microseconds to append one token and look for a stop string, early and late in a long text."""
    ids = (tokenizer.encode(TEXT) * 1000)[:11000]
    detokenizer = IncrementalDetokenizer(token_bytes, SamplingParams(stop=["never said"]))
    stamps = [time.perf_counter()]
    for token in ids:
        detokenizer.append(token)
        stamps.append(time.perf_counter())
    mean = lambda first: (stamps[first + 1000] - stamps[first]) / 1000 * 1e6  # noqa: E731
    return {"us_per_token_at_10": mean(10), "us_per_token_at_10000": mean(10000)}


if __name__ == "__main__":
    cli.run(main)

"""11b · Prediction: from a workload to its latencies, without the GPU.

The question: you know your model, your card and your traffic. How long will users wait for their first token, and at
which load does that wait leave the ground?

The mechanism:
  1. A latency is a sum of step times, and a step is as long as its batch makes it. "Tokens per second" has no batch.
  2. Who is in which step is decided by the scheduler, and ours decides as vLLM's does. Nothing of it is estimated.
  3. How long a step takes is a short formula: weights or products, the cache, attention, sequences, launches.
  4. Its constants come from a data sheet, from batches timed on the machine, or from the times of a run that was.
  5. With both halves, a run of minutes is computed in a second. So many loads can be tried, and one sees the knee.
  6. At the knee something is used up: the time of the steps, the seats, or the blocks. The queue tells which.
  7. What nobody knows stays unknown: for output lengths that are guesses, the answer is a band.

Numbers to remember: on an H100, the weights of an 8B model in bf16 take 5 ms to read, and a token 22 µs to compute.
Prompts of 4,096 tokens and answers of 40 saturate it at some 9 requests a second.

How to run:
  uv run python -m vllm.tours.11b_prediction                      the whole story
  uv run python -m vllm.tours.11b_prediction --rate 12            break it: more load than the engine can serve
  uv run python -m vllm.tours.11b_prediction --num-blocks 1024    the same engine with little room for keys and values
  uv run python -m vllm.tours.11b_prediction --bench              a minute: how long a prediction takes

Read for this: Agrawal et al. 2024 (Vidur), Cho et al. 2025 (LLMServingSim 2.0), Little 1961; vLLM 0.33
`v1/core/sched/scheduler.py`, `v1/engine/core.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from engine import arguments, assemble
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.model import loader
from engine.request import Request, SamplingParams
from engine.sampling.sampler import uniforms
from lab import cli
from lab.fit import columns, fit_batches
from lab.hardware import find_gpu
from lab.model_costs import find_model, model_costs
from lab.prediction import Job, Outcome, Setup, Step, predict
from lab.records import concurrency, percentile
from lab.step_time import StepModel, StepRates, StepWork, data_sheet, rates_of, step_work

KEY = "11b_prediction"

MODEL, GPU = "Llama-3.1-8B", "H100"
COSTS = model_costs(find_model(MODEL))
CARD = find_gpu(GPU)
STEP, SHEET = StepModel(COSTS), data_sheet(CARD, COSTS)
RATES = rates_of(SHEET)
BUDGET = 8192  # tokens a step: a server's default on this card
BLOCKS = 27_000  # of 16 tokens: what 92 % of the card's memory leaves beside the weights, rounded


# --- The naive way: one number for an engine --------------------------------------------------------------------------


def naive_seconds(tokens_per_second: float, prompt: int, answer: int) -> float:
    """ "The engine makes so many tokens a second, and the request has so many.\""""
    return (prompt + answer) / tokens_per_second


# --- One half: how long a step takes (the formula itself is in lab/step_time.py) --------------------------------------


class StepCost(NamedTuple):
    """That formula for one model on one card in whole numbers, so that a run is the same on every machine."""

    weights_us: int  # to read the weights once
    token_ns: int  # to multiply a token with them
    head_ns: int  # a row of logits for each sequence
    context_ps: int  # keys and values of one token of context
    pair_ps: int  # a query of a prompt and a key
    sequence_us: int
    fixed_us: int  # launches, and what the loop does between two steps: here it waits for each

    @classmethod
    def of(cls, rates: StepRates, model: StepModel) -> StepCost:
        """From what a token, a sequence, a key and a pair cost by themselves."""
        nothing = step_work([])
        token, sequence, key, pair = (
            model.features(nothing._replace(**{name: 1}))
            for name in ("tokens", "sequences", "decode_context", "prompt_pairs")
        )
        return cls(
            weights_us=round(1e6 * rates.weights * token.weights),
            token_ns=round(1e9 * rates.products * token.products),
            head_ns=round(1e9 * rates.products * sequence.products),
            context_ps=round(1e12 * rates.cache * key.cache),
            pair_ps=round(1e12 * rates.attention * pair.attention),
            sequence_us=round(1e6 * rates.sequence),
            fixed_us=round(1e6 * (rates.fixed + rates.host)),
        )

    def __call__(self, work: StepWork) -> int:
        """Microseconds."""
        linear = max(1000 * self.weights_us, self.token_ns * work.tokens + self.head_ns * work.sequences)
        cache = self.context_ps * (work.decode_context + work.prompt_context)
        attention = self.pair_ps * work.prompt_pairs
        return (linear + (cache + attention) // 1000) // 1000 + self.sequence_us * work.sequences + self.fixed_us


COST = StepCost.of(RATES, STEP)


# --- The other half: who is in which step, decided by the engine's scheduler ------------------------------------------


def decisions(core: EngineCore, jobs: Sequence[Job]) -> list[StepWork]:
    """What is in each step of a real engine with a real model, all requests being there at the start."""
    works = []
    for i, job in enumerate(jobs):
        params = SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True)
        core.add_request(Request(str(i), job.prompt(i), params))
    while core.scheduler.has_unfinished_requests():
        output, requests = core.scheduler.schedule(), core.scheduler.requests
        works.append(step_work((n, requests[i].num_computed_tokens) for i, n in output.num_scheduled_tokens.items()))
        core.update_from_output(output, core.execute_model(output))
    return works


# --- A workload, and its run ------------------------------------------------------------------------------------------

PROMPT, ANSWER = (2048, 6144), (16, 64)  # tokens
SEEDS = (11, 12, 13)  # of gaps, prompts and answers: within any of our runs, 6 % more or fewer come than on average


@functools.cache
def wanted(count: int = 160) -> tuple[Job, ...]:
    """Users who do not know of each other. Arrivals in millionths of the mean gap, lengths uniform."""
    gaps, prompts, answers = (uniforms([seed] * count, range(count)).tolist() for seed in SEEDS)
    at, jobs = 0, []
    for gap, prompt, answer in zip(gaps, prompts, answers):
        at += round(-1e6 * math.log(1 - gap))
        length = PROMPT[0] + int(prompt * (PROMPT[1] - PROMPT[0]))
        jobs.append(Job(at, length, ANSWER[0] + int(answer * (ANSWER[1] - ANSWER[0]))))
    return tuple(jobs)


class Run(NamedTuple):
    """What came, what it saw, and the steps. Times are microseconds."""

    jobs: list[Job]
    outcomes: list[Outcome]
    steps: list[Step]

    @property
    def ttft(self) -> list[int]:
        """Of each request: from its arrival to its first token."""
        return [int(seen.times[0] - job.arrival) for job, seen in zip(self.jobs, self.outcomes)]

    @property
    def latency(self) -> list[int]:
        """… to its last token."""
        return [int(seen.times[-1] - job.arrival) for job, seen in zip(self.jobs, self.outcomes)]

    @property
    def preemptions(self) -> int:
        return sum(seen.preemptions for seen in self.outcomes)


@functools.cache
def serve(rate: int, max_num_seqs: int = 1024, num_blocks: int = BLOCKS, seconds: int = 12) -> Run:
    """The run of all who come within `seconds` at `rate` a second."""
    jobs = [job._replace(arrival=job.arrival // rate) for job in wanted() if job.arrival < rate * seconds * 10**6]
    return run_of(jobs, max_num_seqs, num_blocks)


def run_of(
    jobs: list[Job],
    max_num_seqs: int = 1024,
    num_blocks: int = BLOCKS,
    cost: Callable[[StepWork], int] = COST,
) -> Run:
    """The run of these requests, if a step takes what `cost` says."""
    limits = SchedulerConfig(2 * BUDGET, max_num_seqs, BUDGET)
    setup = Setup(limits, num_blocks + 1, enable_prefix_caching=False, async_scheduling=False)
    (found,) = predict(jobs, setup, cost, host=0)
    return Run(jobs, found.outcomes, found.steps)


def limit_of(step: Step, max_num_seqs: int) -> str | None:
    """What whoever waits after this step waits for."""
    if not step.waiting:
        return None
    if step.work.tokens == BUDGET:
        return "step time"
    return "seats" if step.running == max_num_seqs else "KV blocks"


def limits_of(run: Run, max_num_seqs: int) -> dict[str, int]:
    """Microseconds that somebody waited for each."""
    waited: dict[str, int] = {"step time": 0, "seats": 0, "KV blocks": 0}
    for step in run.steps:
        if limit := limit_of(step, max_num_seqs):
            waited[limit] += int(step.end - step.scheduled)
    return waited


# --- Constants, from times --------------------------------------------------------------------------------------------

TRUTH = dataclasses.replace(
    RATES, weights=1.06 * RATES.weights, products=1.2 * RATES.products, cache=0.8 * RATES.cache,
    attention=1.4 * RATES.attention, sequence=0.6 * RATES.sequence, fixed=1.7 * RATES.fixed,
)  # fmt: skip
# Of a card that is a little off its data sheet. A batch: (tokens computed, context with them) of each sequence.
BATCHES = [[(1, S)] * B for B in (1, 8, 64, 256) for S in (128, 1024, 4096)]
BATCHES += [[(q, S)] for q in (64, 512, 2048, 8192) for S in (q, q + 4096)]
BATCHES += [[(1, 1024)] * B + [(q, q)] for B in (16, 128) for q in (256, 4096)]


class Recovered(NamedTuple):
    """A rate as a multiple of the data sheet's: what it is, what the fit says, and how sure it is of that."""

    name: str
    truth: float
    fitted: float
    sigma: float


def recover(seed: int = 0, noise: float = 0.02) -> list[Recovered]:
    """Time batches on the card of `TRUTH`, each off by some 2 %, and look for its rates."""
    rng, works = random.Random(seed), [step_work(chunks) for chunks in BATCHES]
    took = [TRUTH.seconds(STEP.features(work)) * math.exp(rng.gauss(0, noise)) for work in works]
    fit = fit_batches(columns(STEP, works), took, SHEET)
    names = ("weights", "products", "cache", "attention", "sequence", "fixed")
    ratio = [(getattr(TRUTH, name) / SHEET[name].rate, getattr(fit.rates, name) / SHEET[name].rate) for name in names]
    return [Recovered(name, *pair, fit.sigma[name]) for name, pair in zip(names, ratio)]


# --- What nobody knows ------------------------------------------------------------------------------------------------


def band(rate: int, draws: int = 12, longest: int = 2 * ANSWER[1]) -> list[float]:
    """P99 to the last token, in seconds, if all that is known of answers is that they end before `longest`."""
    known, found = serve(rate).jobs, []
    for seed in range(draws):
        rng = random.Random(seed)
        jobs = [job._replace(output_len=rng.randint(1, longest)) for job in known]
        found.append(percentile(run_of(jobs).latency, 99) / 1e6)
    return sorted(found)


# --- The story --------------------------------------------------------------------------------------------------------

LOADS = (2, 4, 6, 7, 8, 9, 10, 12)


def tell_naive() -> None:
    """One number for an engine, and what it says of one request."""
    common.heading("1. One number for an engine, and two requests")
    run = serve(12)
    tokens = sum(job.input_len + job.output_len for job in run.jobs)
    per_second = tokens * 1e6 / run.steps[-1].end
    common.say(f"{MODEL} on an {CARD.name}, {len(run.jobs)} requests at 12 a second: {per_second:,.0f} tokens/s in all")
    rows = []
    for rate in (2, 12):
        run = serve(rate)
        job = run.jobs[-1]
        naive = naive_seconds(per_second, job.input_len, job.output_len)
        rows.append([f"the last of {rate} a second", f"{job.input_len:,} + {job.output_len}", f"{naive:.2f} s",
                     f"{run.ttft[-1] / 1e6:.2f} s", f"{run.latency[-1] / 1e6:.2f} s"])  # fmt: skip
    common.table(["request", "tokens", "tokens ÷ tokens/s", "first token", "last token"], rows)


def tell_steps() -> None:
    """Where the milliseconds of a step go."""
    common.heading("2. What a step costs: the data sheet's rates, in ms")
    rows = []
    for name, chunks in (("1 decode, context 4,096", [(1, 4096)]), ("64 decodes", [(1, 4096)] * 64),
                         ("a prompt of 4,096", [(4096, 4096)]),
                         ("64 decodes and that prompt", [(1, 4096)] * 64 + [(4096, 4096)])):  # fmt: skip
        features = STEP.features(step_work(chunks))
        parts = {part: 1e3 * seconds for part, seconds in RATES.parts(features).items()}
        rest = parts["sequence"] + parts["fixed"] + parts["exchange"]
        rows.append([name, *(f"{parts[part]:.1f}" if parts[part] else "hidden"
                             for part in ("weights", "products", "cache")),
                     f"{parts['attention']:.1f}", f"{rest:.1f}", f"{1e3 * RATES.seconds(features):.1f}"])  # fmt: skip
    common.table(["step", "weights", "products", "cache", "attention", "the rest", "in all"], rows)


def tell_decisions(args: Any) -> None:
    """The real model's engine, and the one on a clock."""
    common.heading("3. The real model, in an engine with few blocks: who is in which step")
    model, _ = loader.load(args.model)
    rng = random.Random(args.seed)
    jobs = [Job(0.0, rng.randint(8, 44), rng.randint(8, 12)) for _ in range(5)]
    limits = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=48)
    config = VllmConfig(attention_backend="paged", enforce_eager=True)
    with torch.inference_mode():
        core = assemble.make_core(model, limits, 8, 16, config, enable_prefix_caching=False)
        works = decisions(core, jobs)
    setup = Setup(limits, 8, enable_prefix_caching=False, async_scheduling=False)
    (clock,) = predict(jobs, setup, COST, host=0)
    common.check_equal(f"tokens, sequences and contexts of {len(works)} steps, computed and predicted",
                       works, [step.work for step in clock.steps])  # fmt: skip
    preemptions = sum(seen.preemptions for seen in clock.outcomes)
    common.say(f"{preemptions} of the requests had to give its blocks up and came back, in the same steps")


def tell_load(args: Any) -> None:
    """A run, and then many."""
    common.heading(f"4. A run: {args.rate} a second for 12 s, {args.max_num_seqs:,} seats, {args.num_blocks:,} blocks")
    run = serve(args.rate, args.max_num_seqs, args.num_blocks)
    spans = [(int(job.arrival), int(seen.times[-1])) for job, seen in zip(run.jobs, run.outcomes)]
    _, area = concurrency(spans)
    common.check_equal("Little's law: the area under the requests in flight is the sum of their latencies",
                       area, sum(run.latency))  # fmt: skip
    gaps = [b - a for seen in run.outcomes for a, b in itertools.pairwise(seen.times)]
    rows = [
        [name, *(f"{percentile(values, p) / 1e6:.2f} s" for p in (50, 90, 99))]
        for name, values in (("first token", run.ttft), ("between tokens", gaps), ("last token", run.latency))
    ]
    common.table([f"{len(run.jobs)} requests, {len(run.steps)} steps", "median", "P90", "P99"], rows)
    waited = limits_of(run, args.max_num_seqs)
    left = [step.waiting for step in run.steps if step.scheduled <= 12e6]
    if any(waited.values()):
        causes = ", ".join(f"{name} {us / 1e6:.1f} s" for name, us in waited.items() if us)
        common.say(f"somebody waited for {causes}; {run.preemptions} preemptions")
    if left[-1] > 2 * left[len(left) // 2] and left[-1] > 4:
        common.say(f"OVERLOADED: {left[-1]} wait as the last one comes. A longer run has a longer queue.")

    common.heading("5. What load does: P99 to the first token, in seconds")
    engines = {"all of an H100": {}, "8 seats": {"max_num_seqs": 8}, "1,024 blocks": {"num_blocks": 1024}}
    rows = []
    for rate in LOADS:
        runs = [serve(rate, **engine) for engine in engines.values()]
        rows.append([f"{rate} a second", *(f"{percentile(run.ttft, 99) / 1e6:.2f}" for run in runs)])
    common.table(["load", *engines], rows)
    for name, engine in engines.items():
        beyond = next(rate for rate in LOADS if percentile(serve(rate, **engine).ttft, 99) > 1e6)
        waited = limits_of(serve(beyond, **engine), engine.get("max_num_seqs", 1024))
        common.say(
            f"{name}: above one second at {beyond}; who waits there, waits for {max(waited, key=waited.__getitem__)}"
        )


def tell_constants(args: Any) -> None:
    """Rates from timed batches."""
    common.heading(f"6. Constants from {len(BATCHES)} timed batches of a card that is off its data sheet")
    found = recover(args.seed)
    rows = [[one.name, f"± {100 * math.expm1(SHEET[one.name].spread):.0f} %", f"{one.truth:.2f}", f"{one.fitted:.2f}",
             f"± {100 * math.expm1(one.sigma):.0f} %"] for one in found]  # fmt: skip
    common.table(["rate, 1 = data sheet", "before", "truth", "fitted", "how sure"], rows)
    far = max(abs(math.log(one.fitted / one.truth)) / one.sigma for one in found)
    if far > 4:
        raise common.CheckFailed(f"a rate is {far:.1f} σ from what it is")
    common.say(f"✓ every rate within {math.ceil(far)} σ of the truth")


def tell_unknown() -> None:
    """Output lengths."""
    common.heading("7. What nobody knows: how long the answers will be")
    low, *_, high = band(6)
    known = percentile(serve(6).latency, 99) / 1e6
    common.say(f"6 a second. P99 to the last token with the answers that came: {known:.2f} s")
    common.say(f"12 draws of answers of up to {2 * ANSWER[1]} tokens: {low:.2f} to {high:.2f} s")


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument("--rate", type=arguments.number(int, 1, 12), default=8, metavar="N",
                   help="requests a second in step 4; 12 are more than it can serve (default %(default)s)")  # fmt: skip
    p.add_argument("--max-num-seqs", type=arguments.number(int, 1, 1024), default=1024, metavar="N",
                   help="seats in step 4 (default %(default)s)")  # fmt: skip
    p.add_argument("--num-blocks", type=arguments.number(int, 512, 10**6), default=BLOCKS, metavar="N",
                   help="KV blocks in step 4 (default %(default)s)")  # fmt: skip
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    loader.check_context(args.model, 64)
    tell_naive()
    tell_steps()
    tell_decisions(args)
    tell_load(args)
    tell_constants(args)
    tell_unknown()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

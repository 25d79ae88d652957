"""What a prediction says: latencies, throughput, the pool, and what the time went to; and how far it was off.

Owns the numbers, the tables and the figure; called by `predict`. It never simulates.
vLLM: `vllm/benchmarks/serve.py`, whose names the numbers have.
"""

from __future__ import annotations

import common

import collections
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab import figures
from lab.fit import Observed
from lab.prediction import Job, Outcome, Prediction, Setup
from lab.step_time import StepModel, StepRates

NAMES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between tokens (ITL)",
         "e2el": "end to end"}  # fmt: skip
RULES = ("mean", "median", "p90", "p99")
LIMITS = {"seats": "max_num_seqs", "budget": "max_num_batched_tokens", "blocks": "KV blocks"}


def spread(values: np.ndarray) -> dict[str, float]:
    """RULES of some seconds, in milliseconds."""
    ms = 1e3 * values
    found = (ms.mean(), *np.percentile(ms, (50, 90, 99))) if len(ms) else (0.0,) * len(RULES)
    return dict(zip(RULES, map(float, found)))


def latencies(first: np.ndarray, last: np.ndarray, start: np.ndarray, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Seconds of each request: to its first token, per further one, to its last."""
    many = tokens > 1
    return {"ttft": first - start, "tpot": ((last - first)[many]) / (tokens[many] - 1), "e2el": last - start}


def of_outcomes(outcomes: Sequence[Outcome], start: Sequence[float]) -> dict[str, np.ndarray]:
    """`latencies` as predicted, counted from `start`."""
    first, last = (np.array([outcome.times[end] for outcome in outcomes]) for end in (0, -1))
    return latencies(first, last, np.array(start), np.array([len(outcome.times) for outcome in outcomes]))


def summarize(
    jobs: Sequence[Job], predictions: Sequence[Prediction], setup: Setup, slo: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The answer in numbers, with the keys of `vllm bench serve`. Latencies count from the arrival; `slo` in ms."""
    outcomes = predictions[0].outcomes
    seconds = of_outcomes(outcomes, [job.arrival for job in jobs])
    gaps = [np.diff(outcome.times) for outcome in outcomes if len(outcome.times) > 1]
    seconds["itl"] = np.concatenate(gaps) if gaps else np.zeros(0)
    duration = max(outcome.times[-1] for outcome in outcomes) - jobs[0].arrival
    written, read = sum(len(outcome.times) for outcome in outcomes), sum(job.input_len for job in jobs)
    found: dict[str, Any] = {name: spread(seconds[name]) for name in NAMES}
    found |= {
        "num_requests": len(jobs),
        "duration": duration,
        "request_throughput": len(jobs) / duration,
        "output_throughput": written / duration,
        "total_token_throughput": (read + written) / duration,
        "preemptions": sum(outcome.preemptions for outcome in outcomes),
        "prefix_hit_rate": sum(outcome.cached for outcome in outcomes) / read,
        "steps": sum(len(prediction.steps) for prediction in predictions),
        **pool_and_queue(predictions, setup),
    }
    if slo:
        tpot = np.zeros(len(jobs))
        tpot[[len(outcome.times) > 1 for outcome in outcomes]] = seconds["tpot"]
        each = seconds | {"tpot": tpot}
        good = np.all([1e3 * each[name] <= limit for name, limit in slo.items()], axis=0)
        found["request_goodput"], found["within_slo"] = float(good.sum() / duration), float(good.mean())
    return found


def pool_and_queue(predictions: Sequence[Prediction], setup: Setup) -> dict[str, Any]:
    """Over time, of all loops: the share of blocks that are owned, requests that run and wait, and why they wait."""
    steps = [step for prediction in predictions for step in prediction.steps]
    length = np.array([step.end - step.start for step in steps])
    engines = setup.data_parallel_size if setup.share_experts else 1
    usage = np.array([step.blocks for step in steps]) / (engines * (setup.num_blocks - 1))
    running, waiting = (np.array([getattr(step, name) for step in steps]) for name in ("running", "waiting"))
    found: dict[str, Any] = {}
    for name, values in (("kv_cache_usage", usage), ("running", running), ("waiting", waiting)):
        found[name] = {"mean": float(np.average(values, weights=length)), "max": float(values.max())}
    limits = setup.scheduler
    budget = min(limits.max_num_scheduled_tokens or limits.max_num_batched_tokens, limits.max_num_batched_tokens)
    seats = engines * (limits.max_num_active_seqs or limits.max_num_seqs)
    why = np.where(running >= seats, "seats", np.where([s.work.tokens >= budget for s in steps], "budget", "blocks"))
    found["waiting_for"] = {name: float(length[(waiting > 0) & (why == name)].sum() / length.sum()) for name in LIMITS}
    return found


def where_time_goes(predictions: Sequence[Prediction], model: StepModel, rates: StepRates) -> dict[str, Any]:
    """Of steps with prompts in them and of steps that only decode: seconds, and the share of each part."""
    found: dict[str, Any] = {}
    for kind, with_prompts in (("steps with prompts", True), ("steps of decodes", False)):
        total, parts = 0.0, collections.defaultdict[str, float](float)
        for prediction in predictions:
            for step in prediction.steps:
                if (step.work.prompt_pairs > 0) == with_prompts:
                    total += step.end - step.start
                    for name, seconds in rates.parts(model.features(step.work)).items():
                        parts[name] += seconds
        found[kind] = {"seconds": total, **{name: seconds / total for name, seconds in parts.items() if total}}
    return found


# --- Tables ----------------------------------------------------------------------------------------------------------


def print_answer(found: Mapping[str, Any], setup: Setup) -> None:
    """Latencies, and a few lines of what else there is to know."""
    rows = [[NAMES[name], *(f"{found[name][rule]:,.1f}" for rule in RULES)] for name in NAMES]
    common.table(["milliseconds", *(rule.upper() if rule[0] == "p" else rule for rule in RULES)], rows)
    usage, running, waiting = found["kv_cache_usage"], found["running"], found["waiting"]
    common.say(
        f"{found['num_requests']:,} requests in {found['duration']:.1f} s: {found['request_throughput']:.2f} a second, "
        f"{found['output_throughput']:,.0f} output tokens/s, {found['total_token_throughput']:,.0f} with prompts; "
        f"{found['steps']:,} steps\n"
        f"KV blocks: {setup.num_blocks - 1:,} usable, {usage['mean']:.0%} owned on average, {usage['max']:.0%} at "
        f"most; {found['preemptions']} preemptions; {found['prefix_hit_rate']:.0%} of prompt tokens were cached\n"
        f"running: {running['mean']:.1f} on average, {running['max']:.0f} at most; waiting: {waiting['mean']:.1f} on "
        f"average, {waiting['max']:.0f} at most"
    )
    waits = ", ".join(f"{LIMITS[name]} {share:.0%}" for name, share in found["waiting_for"].items() if share >= 0.005)
    common.say(f"somebody waits for: {waits} of the time" if waits else "nobody waits for more than a step")
    for kind, parts in found.get("time", {}).items():
        if parts["seconds"]:
            named = sorted(((share, name) for name, share in parts.items() if name != "seconds"), reverse=True)
            told = ", ".join(f"{name} {share:.0%}" for share, name in named if share >= 0.03)
            common.say(f"{kind}: {parts['seconds']:.1f} s, of these {told}")
    if "within_slo" in found:
        common.say(f"within the limits: {found['within_slo']:.1%}, goodput {found['request_goodput']:.2f} requests/s")


def errors(predicted: Mapping[str, np.ndarray], seen: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Predicted over seen, − 1, of each rule. What nobody saw, as gaps of one-token answers, is left out."""
    return {
        name: {
            rule: there / here - 1
            for (rule, there), here in zip(spread(predicted[name]).items(), spread(real).values())
            if here
        }
        for name, real in seen.items()
    }


def print_errors(
    predicted: Mapping[str, np.ndarray],
    seen: Mapping[str, np.ndarray],
    others: Mapping[str, Mapping[str, float]],
    everybody: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Each rule of each latency: as it was, as predicted, how far off; and beside it how far off `others` were, and
    the prediction of `everybody`, if not all were seen."""
    rows = []
    for name, off in errors(predicted, seen).items():
        real, ours = spread(seen[name]), spread(predicted[name])
        for rule in RULES:
            theirs = [f"{others[name][rule]:+.1%}" if rule in others.get(name, {}) else ""] if others else []
            whole = [f"{spread(everybody[name])[rule]:,.1f}"] if everybody else []
            error = f"{off[rule]:+.1%}" if rule in off else "–"
            rows.append([NAMES[name], rule, f"{real[rule]:,.1f}", f"{ours[rule]:,.1f}", error, *theirs, *whole])
    beside = [*(["LLMServingSim"] if others else []), *(["predicted, all"] if everybody else [])]
    common.table(["milliseconds", "", "seen", "predicted", "error", *beside], rows)


def read_llmservingsim(path: Path) -> dict[str, dict[str, float]]:
    """The errors of LLMServingSim on the same run, from the table that it prints; empty if there is none."""
    if not path.is_file():
        return {}
    found: dict[str, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"(TTFT|TPOT|Latency) (\w+)\s.*?([-+][\d.]+)%", line):
            name = {"TTFT": "ttft", "TPOT": "tpot", "Latency": "e2el"}[match[1]]
            found.setdefault(name, {})[match[2].lower()] = float(match[3]) / 100
    return found


# --- The figure ------------------------------------------------------------------------------------------------------


def draw(
    folder: str | Path, name: str, predictions: Sequence[Prediction], setup: Setup, observed: Observed | None = None
) -> Path:
    """Over time, of the first loop: who runs and who waits, and the pool. At the right: how many requests have their
    first token, and their last, after so many seconds; dotted as it was seen, if it was."""
    figure, (queue, curve) = figures.new_figure(9.0, 3.6, ncols=2)
    steps, outcomes = predictions[0].steps, predictions[0].outcomes
    chosen = steps[:: max(1, len(steps) // 600)]
    at = [step.start for step in chosen]
    queue.plot(at, [step.running for step in chosen], color=figures.COLORS["blue"], label="running")
    queue.plot(at, [step.waiting for step in chosen], color=figures.COLORS["orange"], label="waiting")
    pool = queue.twinx()
    engines = setup.data_parallel_size if setup.share_experts else 1
    share = [step.blocks / (engines * (setup.num_blocks - 1)) for step in chosen]
    pool.fill_between(at, share, color=figures.COLORS["light"])
    pool.set(ylim=(0, 1.02), ylabel="blocks owned (grey)")
    pool.set_zorder(0)
    queue.set_zorder(1)
    queue.patch.set_visible(False)
    queue.set(xlabel="seconds", ylabel="requests", title="The queue and the pool")
    queue.legend(fontsize=9)
    share = (np.arange(len(outcomes)) + 1) / len(outcomes)
    predicted = of_outcomes(outcomes, [outcome.queued for outcome in outcomes])
    for which, color in (("ttft", "blue"), ("e2el", "purple")):
        curve.plot(np.sort(predicted[which]), share, color=figures.COLORS[color], label=NAMES[which])
    if observed:
        share = (np.arange(len(observed)) + 1) / len(observed)
        for times in (observed.first, observed.last):
            curve.plot(np.sort(times - observed.queued), share, ":", color=figures.COLORS["ink"])
        curve.plot([], [], ":", color=figures.COLORS["ink"], label="seen")
    curve.set(xlabel="seconds", ylabel="share of requests", ylim=(0, 1.02), title="How long they took")
    curve.legend(fontsize=9)
    return figures.save_figure(figure, folder, name)

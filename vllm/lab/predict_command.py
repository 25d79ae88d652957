"""`predict`: what latencies would this server give on this workload? And `predict fit`: how fast is that machine?

Owns both commands; called by `python -m vllm predict`. It never decides and never counts: that is `prediction`, and
`prediction_report` says it. vLLM has no counterpart; `vllm bench serve` measures what is predicted here.
"""

from __future__ import annotations

import common

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine import arguments
from lab import calibrated, calibration, cli, recorded, served_check
from lab.fit import COLD, RATES, Fit, Observed, fit_run, predict_with
from lab.predict_setup import (
    Served,
    add_engine_flags,
    add_workload_flags,
    lengths_are_drawn,
    make_jobs,
    served_by,
)
from lab.prediction import Job, Prediction
from lab.prediction_report import (
    RULES,
    draw,
    errors,
    latencies,
    of_outcomes,
    print_answer,
    print_errors,
    read_llmservingsim,
    spread,
    summarize,
    where_time_goes,
)
from lab.request_logs import Log, read_log, read_meta, read_text
from lab.step_time import Guess, StepRates, data_sheet, rates_of

KEY = "predict fit"  # in a file of `--json`, and of `--rates`
BAND = 5  # draws of lengths that nobody knows
SLO = ("ttft", "tpot", "e2el")


def main(argv: Sequence[str]) -> None:
    """`predict …`, `predict fit …`, `predict calibrate …` and `predict check …`."""
    if argv and argv[0] == "fit":
        fit_command(fit_parser().parse_args(argv[1:]))
    elif argv and argv[0] == "calibrate":
        calibration.main(argv[1:])
    elif argv and argv[0] == "check":
        served_check.main(argv[1:])
    else:
        predict_command(list(argv))


# --- predict ---------------------------------------------------------------------------------------------------------


def predict_parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="python -m vllm predict",
        description="What latencies a server would give: vLLM's decisions, and a model of the time of each step. "
        "`predict fit requests.jsonl` finds the rates of a machine from a run on it, `predict calibrate` times this "
        "one, and `predict check` serves a model here and says how far a prediction of it is off.",
    )
    p.add_argument("workload", nargs="?", metavar="WORKLOAD.jsonl", help="requests, one a line; or describe them:")
    add_workload_flags(p.add_argument)
    add_engine_flags(p.add_argument)
    p.add_argument("--meta", metavar="FILE", help="what served it (default: meta.json beside the workload)")
    p.add_argument(
        "--rates",
        metavar="FILE",
        help="of `predict fit` or `predict calibrate --json FILE` (default: the card's data sheet)",
    )
    p.add_argument("--cold-start", action="store_true", help="the first launch is a fresh process's, as fitted")
    p.add_argument("--compare", metavar="FLAG=A,B,C", help="settings side by side")
    p.add_argument("--slo", type=limits, metavar="NAME=MS,…", help="limits of each request: ttft, tpot, e2el")
    p.add_argument("--against", metavar="REQUESTS.jsonl", help="the same requests with their times: how far is it off?")
    p.add_argument("--json", type=cli.file, metavar="FILE", help="merge the answer into FILE")
    p.add_argument("--figure", type=cli.folder, metavar="DIR", help="draw it there")
    return p


def limits(text: str) -> dict[str, float]:
    """An argparse type: "ttft=500,tpot=50", milliseconds."""
    found = {}
    for name, _, value in (part.partition("=") for part in text.split(",")):
        if name not in SLO or not re.fullmatch(r"\d*\.?\d+", value) or float(value) == 0:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not NAME=MILLISECONDS,…, above 0, with NAME one of {', '.join(SLO)}"
            )
        found[name] = float(value)
    return found


def predict_command(argv: list[str]) -> None:
    """One prediction, or one for each value of `--compare`."""
    parser = predict_parser()
    args = parser.parse_args(argv)
    if args.json:  # not after a minute
        recorded.stored_object(args.json)
    if args.against:
        read_log(args.against)
    log = read_log(args.workload, args.meta) if args.workload else None
    if args.compare:
        for name in ("against", "figure"):
            if getattr(args, name):
                raise common.InputError(f"--{name}: of one prediction; allowed without --compare only")
        answer = compare(parser, argv, args, log)
    else:
        served, jobs, fit = prepare(args, log)
        predictions = predict_with(fit, jobs, served.setup, served.model)
        answer = answer_of(jobs, predictions, served, fit, args.slo)
        say_what_it_is(args, served, fit)
        print_answer(answer, served.setup)
        answer["band"] = say_what_nobody_knows(args, log, served, fit, answer)
        observed = None
        if args.against:
            observed, answer["errors"] = against(args.against, predictions)
        if args.figure:
            draw(args.figure, "prediction", predictions, served.setup, observed)
    if args.json:
        recorded.merge_json(args.json, "predict", answer)


def prepare(args: argparse.Namespace, log: Log | None) -> tuple[Served, list[Job], Fit]:
    """Who serves, what comes, and how fast that is. Raises InputError."""
    if args.rates and (stored := calibrated.stored_in(args.rates)):
        served, fit = calibrated.served_here(args, stored)
        return served, make_jobs(args, log, args.seed), fit
    served = served_by(args, log.meta if log else read_meta(Path(args.meta)) if args.meta else {})
    jobs = make_jobs(args, log, args.seed)
    if args.rates:
        fit = read_rates(args.rates)
        return served, jobs, fit if args.cold_start else dataclasses.replace(fit, cold=0.0)
    model = served.model
    guesses = data_sheet(served.gpu, model.costs, model.tensor_parallel_size, model.expert_engines)
    return served, jobs, Fit(rates_of(guesses), 0.0, {name: guess.spread for name, guess in guesses.items()})


def answer_of(
    jobs: Sequence[Job], predictions: Sequence[Prediction], served: Served, fit: Fit, slo: Mapping[str, float] | None
) -> dict[str, Any]:
    """`summarize`, and where the time went."""
    found = summarize(jobs, predictions, served.setup, slo)
    return found | {"time": where_time_goes(predictions, served.model, fit.rates)}


def say_what_it_is(args: argparse.Namespace, served: Served, fit: Fit) -> None:
    """What the answer stands on."""
    setup, limits = served.setup, served.setup.scheduler
    reckoned = "" if served.blocks_are_known else ", reckoned from its memory"
    rates = f"rates of {args.rates}" if args.rates else "rates of its data sheet, good to a third (better: predict fit)"
    common.say(
        f"{served.gpu.name}, tensor parallel {served.model.tensor_parallel_size}, data parallel "
        f"{setup.data_parallel_size}; {setup.num_blocks:,} KV blocks of {setup.block_size}{reckoned}; max_num_seqs "
        f"{limits.max_num_seqs}, max_num_batched_tokens {limits.max_num_batched_tokens}; {rates}"
    )


def say_what_nobody_knows(
    args: argparse.Namespace, log: Log | None, served: Served, fit: Fit, answer: Mapping[str, Any]
) -> dict[str, Any]:
    """The band over other draws of what is drawn, and what no prediction can see."""
    band: dict[str, Any] = {}
    if lengths_are_drawn(args, log):
        answers = [answer]
        for seed in range(args.seed + 1, args.seed + BAND):
            jobs = make_jobs(args, log, seed)
            answers.append(summarize(jobs, predict_with(fit, jobs, served.setup, served.model), served.setup))
        for name in ("ttft", "e2el"):
            for rule in RULES:
                values = [each[name][rule] for each in answers]
                band[f"{rule}_{name}_ms"] = [min(values), max(values)]
        told = ", ".join(
            f"{rule} {name.upper()} {band[f'{rule}_{name}_ms'][0]:,.0f} to {band[f'{rule}_{name}_ms'][1]:,.0f} ms"
            for name in ("ttft", "e2el") for rule in ("median", "p99")
        )  # fmt: skip
        common.say(f"Lengths are drawn: over {BAND} draws {told}")
    common.say(
        "Not in it: network, tokenizer and HTTP; prefixes that prompts share and the workload does not name; a clock "
        "that throttles"
    )
    return band


def compare(parser: arguments.Parser, argv: list[str], args: argparse.Namespace, log: Log | None) -> dict[str, Any]:
    """The same with each value of one flag; the best keeps the most requests a second within `--slo`."""
    name, _, values = args.compare.partition("=")
    flag = f"--{name.lstrip('-').replace('_', '-')}"
    if not values or parser.option(flag) is None or flag in ("--compare", "--json", "--figure", "--slo", "--against"):
        raise common.InputError(f"--compare {args.compare!r}: must be FLAG=A,B,C, with FLAG one of predict's own")
    rest = [*argv]
    answers: dict[str, Any] = {}
    for value in values.split(","):
        each = parser.parse_args([*rest, f"{flag}={value}"])
        try:
            served, jobs, fit = prepare(each, log)
            predictions = predict_with(fit, jobs, served.setup, served.model)
            answers[value] = answer_of(jobs, predictions, served, fit, args.slo)
        except common.InputError as error:
            answers[value] = {"refused": str(error)}
    good = {value: found for value, found in answers.items() if "refused" not in found}
    if not good:
        reasons = "; ".join(sorted({found["refused"] for found in answers.values()}))
        raise common.InputError(f"--compare {args.compare!r}: every value is refused: {reasons}")
    best = max(good, key=lambda value: good[value]["request_goodput"]) if args.slo else None
    if best and not good[best]["request_goodput"]:
        best = None
    rows = [
        [value, *_columns(found, args.slo), "best" if value == best else ""] if value in good
        else [value, *["–"] * (7 + bool(args.slo)), "refused"]
        for value, found in answers.items()
    ]  # fmt: skip
    heads = ["mean TTFT", "P99 TTFT", "mean TPOT", "P99 E2E", "tokens/s", "preempted", "blocks"]
    common.table([flag, *heads, *(["goodput/s"] if args.slo else []), ""], rows)
    for reason in sorted({found["refused"] for found in answers.values() if "refused" in found}):
        common.say(f"refused: {reason}")
    if args.slo:
        wish = " and ".join(f"{name} ≤ {limit:g} ms" for name, limit in args.slo.items())
        common.say(f"Most requests within {wish}: {f'{flag} {best}' if best else 'nothing'}")
    return {"flag": flag, "answers": answers, "best": best}


def _columns(found: Mapping[str, Any], slo: Any) -> list[str]:
    row = [f"{found['ttft']['mean']:,.0f} ms", f"{found['ttft']['p99']:,.0f} ms", f"{found['tpot']['mean']:,.1f} ms",
           f"{found['e2el']['p99']:,.0f} ms", f"{found['output_throughput']:,.0f}", str(found["preemptions"]),
           f"{found['kv_cache_usage']['mean']:.0%}"]  # fmt: skip
    return [*row, f"{found['request_goodput']:.2f}"] if slo else row


def against(path: str, predictions: Sequence[Prediction]) -> tuple[Observed, dict[str, dict[str, float]]]:
    """What was seen, and how far each percentile is off, which is printed, too. Raises InputError."""
    log = read_log(path)
    outcomes = predictions[0].outcomes
    if len(log.rows) != len(outcomes):
        raise common.InputError(f"--against {path}: has {len(log.rows)} requests, and {len(outcomes)} are predicted")
    observed = log.observed(len(log.rows))
    predicted, real = of_outcomes(outcomes, [outcome.queued for outcome in outcomes]), seen(observed, outcomes)
    print_errors(predicted, real, others_on(log))
    return observed, errors(predicted, real)


def seen(observed: Observed, outcomes: Sequence[Any]) -> dict[str, np.ndarray]:
    """`latencies` as they were, counted from when the loop heard of each request."""
    tokens = np.array([len(outcome.times) for outcome in outcomes[: len(observed)]])
    return latencies(observed.first, observed.last, observed.queued, tokens)


def others_on(log: Log) -> dict[str, dict[str, float]]:
    return read_llmservingsim(log.path.with_name("llmservingsim_summary.txt"))


# --- predict fit -----------------------------------------------------------------------------------------------------


def fit_parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="python -m vllm predict fit",
        description="The rates of a machine, from the times of the first requests of a run on it; and how far the "
        "prediction of all requests is off, if the file has their times, too.",
    )
    p.add_argument("workload", metavar="REQUESTS.jsonl", help="with the times of each request")
    p.add_argument("--first", type=arguments.number(int, 2, 10**6), default=100, metavar="N",
                   help="times of so many requests are used (default 100)")  # fmt: skip
    p.add_argument("--meta", metavar="FILE", help="what served it (default: meta.json beside the workload)")
    add_engine_flags(p.add_argument)
    p.add_argument("--json", type=cli.file, metavar="FILE", help="merge the rates into FILE: predict's --rates")
    p.add_argument("--figure", type=cli.folder, metavar="DIR", help="draw what was predicted, and what was seen")
    return p


def fit_command(args: argparse.Namespace) -> dict[str, Any]:
    """Fit, print the rates with their doubts, and the errors."""
    if args.json:
        recorded.stored_object(args.json)
    log = read_log(args.workload, args.meta)
    served = served_by(args, log.meta)
    model = served.model
    guesses = data_sheet(served.gpu, model.costs, model.tensor_parallel_size, model.expert_engines)
    if any(row.output_len is None for row in log.rows):
        raise common.InputError(f"{log.path}: output_toks: must be in all lines")
    origin = log.rows[0].arrival or 0.0
    jobs = [
        Job((row.arrival or 0.0) - origin, row.input_len, row.output_len or 1, row.prefix_len, row.prefix_id)
        for row in log.rows
    ]
    observed = log.observed(args.first)
    fit = fit_run(jobs, served.setup, model, guesses, observed)
    predictions = predict_with(fit, jobs, served.setup, model)
    outcomes = predictions[0].outcomes
    print_rates(fit, guesses)
    found: dict[str, Any] = {"rates": dataclasses.asdict(fit.rates), "cold": fit.cold, "sigma": fit.sigma}
    complete = all(row.times is not None for row in log.rows)
    watched = log.observed(len(log.rows)) if complete else observed
    everybody = of_outcomes(outcomes, [outcome.queued for outcome in outcomes])
    predicted = of_outcomes(outcomes[: len(watched)], [outcome.queued for outcome in outcomes[: len(watched)]])
    common.say(f"Fitted to the first {len(observed)} requests; of {len(watched)}, {len(jobs)} in the workload:")
    others, unseen = (others_on(log), None) if complete else ({}, everybody)
    print_errors(predicted, seen(watched, outcomes), others, unseen)
    steps = sum(len(prediction.steps) for prediction in predictions)
    common.say(f"{sum(outcome.preemptions for outcome in outcomes)} preemptions, {steps:,} steps")
    found |= {"first": len(observed), "errors": errors(predicted, seen(watched, outcomes))}
    found["predicted"] = {name: spread(seconds) for name, seconds in everybody.items()}
    if args.json:
        recorded.merge_json(args.json, KEY, found)
    if args.figure:
        draw(args.figure, "prediction_fit", predictions, served.setup, watched)
    return found


def print_rates(fit: Fit, guesses: Mapping[str, Guess]) -> None:
    """Each rate, how certain it is, and how it compares with what was thought before."""
    rows = []
    for name, doubt in fit.sigma.items():
        rate, guess = (fit.cold, COLD) if name == "cold" else (getattr(fit.rates, name), guesses[name])
        beside = "" if name == "cold" else f"{rate / guess.rate:.2f}"
        source = "the guess" if doubt > 0.7 * guess.spread else "the run"
        rows.append([name, f"{rate:.3g}", UNITS[name], f"±{100 * math.expm1(doubt):.0f} %", beside, source])
    common.table(["rate", "", "unit", "known to", "of the guess", "mostly from"], rows)


UNITS = {"weights": "s/B, weights", "products": "s/FLOP, products", "cache": "s/B, keys and values",
         "attention": "s/FLOP, prompts' attention", "exchange": "s/B, between cards", "sequence": "s a sequence",
         "fixed": "s a step", "host": "s from plan to launch",
         "cold": "s, the first launch"}  # fmt: skip


def read_rates(path: str) -> Fit:
    """What `predict fit --json` has written. Raises InputError."""
    try:
        found = json.loads(read_text(Path(path)))[KEY]
        rates = StepRates(**{name: float(found["rates"][name]) for name in RATES})
        cold, sigma = float(found["cold"]), {name: float(found["sigma"][name]) for name in RATES}
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise common.InputError(f"--rates {path}: not what `predict fit --json` writes ({error!r:.60})") from None
    if not all(0 < rate < math.inf for rate in (cold, *dataclasses.astuple(rates))):
        raise common.InputError(f"--rates {path}: all rates must be above 0")
    return Fit(rates, cold, sigma)

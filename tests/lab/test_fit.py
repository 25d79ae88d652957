"""Rates from times: the frozen clocks are the simulation's, and what was put in is found again."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from engine.config import SchedulerConfig
from lab.fit import COLD, RATES, Fit, Observed, columns, fit_batches, fit_run, loop_times, predict_with, step_seconds
from lab.hardware import find_gpu
from lab.model_costs import find_model, model_costs
from lab.prediction import Job, Setup
from lab.request_logs import meta_settings, read_log
from lab.step_time import StepModel, StepRates, data_sheet, step_work
from support import synthetic_run

MODEL = StepModel(model_costs(find_model(synthetic_run.MODEL)))
GUESSES = data_sheet(find_gpu(synthetic_run.GPU), MODEL.costs)
SETUP = Setup(SchedulerConfig(4096, 64, 512), 500)
THETA = np.log([*dataclasses.astuple(synthetic_run.RATES), synthetic_run.COLD])


def some_jobs(count, rate=12.0, seed=1):
    rng = random.Random(seed)
    at = [0.0]
    for _ in range(count - 1):
        at.append(at[-1] + rng.expovariate(rate))
    return [Job(t, rng.randint(20, 900), rng.randint(10, 60)) for t in at]


def as_fit(theta):
    *rates, cold = np.exp(theta).tolist()
    return Fit(StepRates(*rates), cold, {})


def test_with_decisions_held_fast_the_clocks_are_those_of_the_simulation():
    (found,) = predict_with(as_fit(THETA), some_jobs(20), SETUP, MODEL)
    features = columns(MODEL, [step.work for step in found.steps])
    (planned, _), (heard, _) = loop_times(THETA, features, found.order)
    assert planned == pytest.approx([step.scheduled for step in found.steps])
    for outcome in found.outcomes:
        admitted, first, last = outcome.steps
        assert (planned[admitted], heard[first], heard[last]) == pytest.approx(
            (outcome.scheduled, outcome.times[0], outcome.times[-1])
        )


def test_slopes_are_differences():
    (found,) = predict_with(as_fit(THETA), some_jobs(12), SETUP, MODEL)
    features = columns(MODEL, [step.work for step in found.steps])
    for of in (lambda theta: step_seconds(theta, features), lambda theta: loop_times(theta, features, found.order)[1]):
        for i in range(len(THETA)):
            h = np.zeros(len(THETA))
            h[i] = 1e-6
            numeric = (of(THETA + h)[0] - of(THETA - h)[0]) / 2e-6
            assert of(THETA)[1][:, i] == pytest.approx(numeric, rel=1e-3, abs=1e-5), (*RATES, "cold")[i]


def batches(noise=0.0, seed=0):
    rng = random.Random(seed)
    works = [step_work([(1, rng.randint(10, 3000))] * rng.choice((1, 8, 32, 64))) for _ in range(40)]
    works += [step_work([(n, n + rng.choice((0, 2000)))]) for n in (64, 128, 256, 512, 1024, 2048) for _ in range(4)]
    took = [synthetic_run.RATES.seconds(MODEL.features(w)) * rng.lognormvariate(0, noise) for w in works]
    return columns(MODEL, works), took


def test_batches_give_their_rates():
    fit = fit_batches(*batches(), GUESSES, error=1e-3)
    for name in ("weights", "products", "cache", "attention", "sequence", "fixed"):
        assert getattr(fit.rates, name) == pytest.approx(getattr(synthetic_run.RATES, name), rel=0.03), name


def test_what_was_not_seen_keeps_its_guess_and_its_doubt():
    fit = fit_batches(*batches(), GUESSES)
    for name in ("exchange", "host"):  # one card, and the host is no part of a batch
        assert getattr(fit.rates, name) == pytest.approx(GUESSES[name].rate)
        assert fit.sigma[name] == pytest.approx(GUESSES[name].spread)
    assert fit.sigma["products"] < GUESSES["products"].spread / 5
    assert fit.sigma["cold"] == pytest.approx(COLD.spread)


def test_doubt_is_as_large_as_the_error_mostly_is():
    off = []
    for seed in range(12):
        fit = fit_batches(*batches(0.03, seed), GUESSES)
        off += [
            math.log(getattr(fit.rates, name) / getattr(synthetic_run.RATES, name)) / fit.sigma[name]
            for name in ("weights", "products", "cache", "attention")
        ]
    assert 0.5 < np.sqrt(np.mean(np.square(off))) < 1.5


def test_one_wrong_time_of_many_turns_nothing():
    features, took = batches()
    wrong = [10 * took[0], *took[1:]]
    right, other = (fit_batches(features, each, GUESSES) for each in (took, wrong))
    assert other.rates.weights == pytest.approx(right.rates.weights, rel=0.02)


def observed_of(jobs, count):
    (found,) = predict_with(as_fit(THETA), jobs, SETUP, MODEL)
    seen = found.outcomes[:count]
    times = [[outcome.queued for outcome in seen], [outcome.scheduled for outcome in seen]]
    times += [[outcome.times[end] for outcome in seen] for end in (0, -1)]
    return Observed(*times), found


@pytest.mark.parametrize("rate", [4.0, 16.0, 40.0])
def test_another_run_is_predicted_from_the_first_requests_of_one(rate):
    """On a server with room, on one that is full and by the data sheet would not be, and on one with a long queue."""
    jobs = some_jobs(60, rate)
    observed, _ = observed_of(jobs, 40)
    fit = dataclasses.replace(fit_run(jobs, SETUP, MODEL, GUESSES, observed), cold=synthetic_run.COLD)
    others = some_jobs(150, rate, seed=2)
    _, truth = observed_of(others, 0)
    (found,) = predict_with(fit, others, SETUP, MODEL)
    for end in (0, -1):
        ours, theirs = ([outcome.times[end] - outcome.queued for outcome in each.outcomes] for each in (found, truth))
        assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=0.05)
        assert np.median(ours) == pytest.approx(np.median(theirs), rel=0.05)


@pytest.mark.parametrize("rate, prompts, answers", [(6.0, (1024, 4096), (64, 256)), (8.0, (2048, 6144), (16, 64))])
def test_a_server_is_fitted_that_the_data_sheet_takes_for_faster(rate, prompts, answers):
    """Prompts that arrive while others decode: with rates that are too fast, too few of them do, and decisions are all
    others. In the second case the server is full, and by the data sheet has room."""
    model, gpu = StepModel(model_costs(find_model("Llama-3.1-8B"))), find_gpu("H100")
    guesses = data_sheet(gpu, model.costs)
    off = dict(weights=1.08, products=1.25, cache=0.8, attention=1.4, exchange=1, sequence=1.5, fixed=2, host=0.7)
    truth = Fit(StepRates(**{name: off[name] * guess.rate for name, guess in guesses.items()}), 0.1, {})
    rng, jobs, at = random.Random(1), [], 0.0
    for _ in range(60):
        at += rng.expovariate(rate)
        jobs.append(Job(at, rng.randint(*prompts), rng.randint(*answers)))
    setup = Setup(SchedulerConfig(131072, 1024, 8192), 8000, enable_prefix_caching=False)
    (seen,) = predict_with(truth, jobs, setup, model)
    times = [[outcome.queued for outcome in seen.outcomes], [outcome.scheduled for outcome in seen.outcomes]]
    times += [[outcome.times[end] for outcome in seen.outcomes] for end in (0, -1)]
    (found,) = predict_with(fit_run(jobs, setup, model, guesses, Observed(*times)), jobs, setup, model)
    for end in (0, -1):
        ours, theirs = ([o.times[end] - o.queued for o in each.outcomes] for each in (found, seen))
        assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=0.06)


def test_the_example_is_what_its_script_writes(tmp_path):
    synthetic_run.write(tmp_path)
    for name in ("requests.jsonl", "meta.json"):
        assert (tmp_path / name).read_text() == (synthetic_run.FOLDER / name).read_text()


def test_rates_of_the_example_are_found_within_their_doubt():
    log = read_log(synthetic_run.FOLDER / "requests.jsonl")
    assert meta_settings(log.meta)["num_gpu_blocks_override"] == SETUP.num_blocks
    jobs = [Job(row.arrival - log.rows[0].arrival, row.input_len, row.output_len) for row in log.rows]
    fit = fit_run(jobs, SETUP, MODEL, GUESSES, log.observed(60))
    for name, rate in dataclasses.asdict(synthetic_run.RATES).items():
        assert abs(math.log(getattr(fit.rates, name) / rate)) < 2.5 * fit.sigma[name] + 0.01, name
    assert fit.rates.products == pytest.approx(synthetic_run.RATES.products, rel=0.05)
    assert fit.cold == pytest.approx(synthetic_run.COLD, rel=0.1)

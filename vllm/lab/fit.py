"""Rates of a step from times that somebody has: of single batches, or of the requests of a whole run.

Owns the least squares and how certain its answer is; called by `predict fit`. It never schedules but through
`prediction`, and never sees a time that it was not given. vLLM has no counterpart.

A run's times do not say how long each step took, nor what was in it. Both are found in turn: with the rates of the
moment the scheduler decides; with its decisions held fast, every observed time is a sum of step times, so the rates
follow by least squares; with these it decides again. What a data sheet says stands beside the observations as one more
of them, so that a rate that nothing has shown keeps its value, and its doubt.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lab.prediction import Heard, Job, Prediction, Setup, Wait, predict
from lab.step_time import Guess, StepFeatures, StepModel, StepRates, StepWork

RATES = tuple(field.name for field in dataclasses.fields(StepRates))
COLD = Guess(0.1, 2.0)  # seconds that the first launch of a process takes longer: kernels are compiled and loaded


@dataclass(frozen=True)
class Fit:
    """Rates, the first launch's delay, and of each the σ of its logarithm: 0.05 is known to 5 %."""

    rates: StepRates
    cold: float
    sigma: dict[str, float]


class Observed:
    """The first requests of a run: when the loop heard of each, admitted it, and heard of its first and its last token.
    Arrays [n] of seconds, on the clock of the arrivals."""

    def __init__(
        self, queued: Sequence[float], scheduled: Sequence[float], first: Sequence[float], last: Sequence[float]
    ) -> None:
        times = (np.array(each, float) for each in (queued, scheduled, first, last))
        self.queued, self.scheduled, self.first, self.last = times

    def __len__(self) -> int:
        return len(self.first)


def columns(model: StepModel, works: Iterable[StepWork]) -> StepFeatures:
    """The features of many steps: columns [K]."""
    return StepFeatures(*np.array([model.features(work) for work in works], float).T)


def step_seconds(theta: np.ndarray, features: StepFeatures) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [K] of each step and their slopes [K, P] in `theta`: logarithms of the rates, and of `COLD` if it is
    there."""
    rates = StepRates(*np.exp(theta[: len(RATES)]))
    slopes = np.zeros((len(features.fixed), len(theta)))
    for i, name in enumerate(StepFeatures._fields):
        slopes[:, i] = getattr(rates, name) * getattr(features, name)
    slopes[slopes[:, 0] < slopes[:, 1], 0] = 0  # the faster one is hidden behind the slower
    slopes[slopes[:, 0] > 0, 1] = 0
    return rates.seconds(features), slopes


Times = tuple[np.ndarray, np.ndarray]  # of each step [K], and their slopes [K, P]


def loop_times(theta: np.ndarray, features: StepFeatures, order: list) -> tuple[Times, Times]:
    """When the loop planned each step and when it heard of it, if it waits in this `order`: the clocks of `prediction`,
    with what is decided held fast."""
    seconds, slopes = step_seconds(theta, features)
    (K, P), at = slopes.shape, RATES.index("host")
    planned, heard = ((np.zeros(K), np.zeros((K, P))) for _ in range(2))
    host, cold = np.exp(theta[at]), np.exp(theta[-1])
    ends: dict[int, tuple[float, np.ndarray]] = {}
    clock, gpu = 0.0, 0.0
    d_clock = d_gpu = np.zeros(P)
    d_host, d_cold = np.zeros(P), np.zeros(P)
    d_host[at], d_cold[-1] = host, cold
    for event in order:
        if isinstance(event, Wait):
            if event.until > clock:
                clock, d_clock = event.until, np.zeros(P)
        elif isinstance(event, Heard):
            end, d_end = ends.pop(event.step)
            if end > clock:
                clock, d_clock = end, d_end
            heard[0][event.step], heard[1][event.step] = clock, d_clock
        else:
            planned[0][event], planned[1][event] = clock, d_clock
            clock, d_clock = clock + host, d_clock + d_host
            if event == 0:
                clock, d_clock = clock + cold, d_clock + d_cold
            if clock > gpu:
                gpu, d_gpu = clock, d_clock
            gpu, d_gpu = gpu + seconds[event], d_gpu + slopes[event]
            ends[event] = gpu, d_gpu
    return planned, heard


Residuals = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # theta [P] -> [R], [R, P]; in units of their σ


def least_squares(
    residuals: Residuals, guesses: Sequence[Guess], theta: np.ndarray, rounds: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """Gauss–Newton on robust residuals beside the guesses, by logarithm. Returns theta [P] and its covariance [P, P].

    A residual beyond 2 σ counts by its size and not by its square (Huber): one that a decision has moved by a step
    shall not turn all rates.
    """
    center = np.log([guess.rate for guess in guesses])
    precision = np.diag([guess.spread**-2 for guess in guesses])

    def weighed(theta: np.ndarray) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        r, slopes = residuals(theta)
        size = np.abs(r)
        cost = np.where(size < 2, r * r, 4 * size - 4).sum() + (theta - center) @ precision @ (theta - center)
        return cost, r, slopes, np.minimum(1, 2 / np.maximum(size, 1e-9))

    now = weighed(theta)
    for _ in range(rounds):
        cost, r, slopes, weights = now
        hessian = slopes.T @ (slopes * weights[:, None]) + precision
        step = -np.linalg.solve(hessian, slopes.T @ (weights * r) + precision @ (theta - center))
        step *= min(1.0, 0.7 / np.abs(step).max())  # no rate doubles at once
        for _ in range(8):
            now = weighed(theta + step)
            if now[0] <= cost:
                break
            step /= 2
        else:
            break
        theta = theta + step
        if np.abs(step).max() < 1e-4:
            break
    _, _, slopes, weights = weighed(theta)
    return theta, np.linalg.inv(slopes.T @ (slopes * weights[:, None]) + precision)


def fit_batches(
    features: StepFeatures, seconds: Sequence[float], guesses: Mapping[str, Guess], error: float = 0.03
) -> Fit:
    """Rates from single batches: columns [K] of their features, and how long each took, up to a share of `error`."""
    took, told = np.array(seconds, float), [*guesses.values(), COLD]

    def residuals(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found, slopes = step_seconds(theta, features)
        return (found - took) / (error * took), slopes / (error * took)[:, None]

    return as_fit(*least_squares(residuals, told, np.log([guess.rate for guess in told])))


def as_fit(theta: np.ndarray, covariance: np.ndarray) -> Fit:
    """By name."""
    rates = np.exp(theta).tolist()
    sigma = np.sqrt(np.diag(covariance)).tolist()
    return Fit(StepRates(*rates[:-1]), rates[-1], dict(zip((*RATES, "cold"), sigma)))


# How far off a time may be that is right: a step by this share of itself, whatever the others do; a reading of a clock
# by so many seconds; and all of them by one share, as by a model that is a little wrong. The last is one and the same
# error, seen in many requests, so that together they count as so many.
NOISE, READING, DRIFT, DRIFT_COUNT = 0.05, 3e-4, 5e-3, 20
LATENCY, GOOD = 0.03, 4.0  # a latency's; from this mean square of them on, no other start is tried
STARTS = (0.0, -0.4, -0.2, 0.2, 0.4)  # of the logarithms of all rates but those that are known well


def run_residuals(model: StepModel, predictions: Sequence[Prediction], observed: Observed) -> Residuals:
    """Of each request, with these decisions held fast: from its admission to its first token, and from there to its
    last. How many steps that takes depends little on the rates. When it was admitted is left out: on a server with room
    the arrivals say it, in however many steps."""
    parts = []
    for number, prediction in enumerate(predictions):
        here = [i for i, outcome in enumerate(prediction.outcomes[: len(observed)]) if outcome.loop == number]
        if not here:
            continue
        steps = np.array([prediction.outcomes[i].steps for i in here])  # [n, 3]
        times = np.stack([observed.scheduled, observed.first, observed.last], 1)[here]
        last = steps.max() + 1
        order = [e for e in prediction.order if isinstance(e, Wait) or (e.step if isinstance(e, Heard) else e) < last]
        noise = np.cumsum([(NOISE * (step.end - step.start)) ** 2 for step in prediction.steps[:last]])
        took = np.diff(times)  # [n, 2]
        share = DRIFT * max(1.0, len(here) / DRIFT_COUNT) ** 0.5
        sigma = np.sqrt(np.diff(noise[steps]) + READING**2 + (share * took) ** 2)
        parts.append((columns(model, [step.work for step in prediction.steps[:last]]), order, steps, took, sigma))

    def residuals(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found, slopes = [], []
        for features, order, steps, took, sigma in parts:
            (planned, planned_slope), (heard, heard_slope) = loop_times(theta, features, order)
            at = np.stack([planned[steps[:, 0]], heard[steps[:, 1]], heard[steps[:, 2]]], 1)
            slope = np.stack([planned_slope[steps[:, 0]], heard_slope[steps[:, 1]], heard_slope[steps[:, 2]]], 1)
            found.append(((np.diff(at) - took) / sigma).ravel())
            slopes.append((np.diff(slope, axis=1) / sigma[:, :, None]).reshape(-1, len(theta)))
        return np.concatenate(found), np.concatenate(slopes)

    return residuals


def predict_with(
    fit: Fit, jobs: Sequence[Job], setup: Setup, model: StepModel, watched: int | None = None
) -> list[Prediction]:
    """The run that these rates make of it."""
    rates = fit.rates
    return predict(jobs, setup, lambda work: rates.seconds(model.features(work)), rates.host, fit.cold, watched)


def fit_run(
    jobs: Sequence[Job],
    setup: Setup,
    model: StepModel,
    guesses: Mapping[str, Guess],
    observed: Observed,
    rounds: int = 8,
) -> Fit:
    """Rates from the first requests of a run whose `jobs` are all known: decide, fit, decide again.

    The slopes of a run whose decisions are held fast leave out that slower steps let more requests come in between. So
    a step towards their answer is shortened until the latencies, decided anew, are closer to those that were seen.
    """
    told = [*guesses.values(), COLD]
    center, spread = np.log([guess.rate for guess in told]), np.array([guess.spread for guess in told])

    def decide(theta: np.ndarray) -> tuple[float, list[Prediction]]:
        predictions = predict_with(as_fit(theta, np.zeros((len(theta), len(theta)))), jobs, setup, model, len(observed))
        return misfit(predictions, observed) + (((theta - center) / spread) ** 2).sum(), predictions

    def descend(theta: np.ndarray, best: tuple[float, list[Prediction]]) -> tuple[float, list[Prediction], np.ndarray]:
        for _ in range(rounds):
            found, _ = least_squares(run_residuals(model, best[1], observed), told, theta)
            for share in (1.0, 0.5, 0.25, 0.1):
                tried = theta + share * (found - theta)
                if (now := decide(tried))[0] < best[0]:
                    break
            else:
                break
            enough = np.abs(tried - theta).max() < 0.01 or best[0] - now[0] < 0.01 * best[0]
            theta, best = tried, now
            if enough:
                break
        return *best, theta

    # All slower or faster at first: on a server that is full, and by the guess is not, all decisions are others.
    starts = [(start, decide(start)) for start in (center + shift * (spread > 0.05) for shift in STARTS)]
    starts.sort(key=lambda start: start[1][0])
    ends = []
    for start in starts:
        ends.append(descend(*start))
        if ends[-1][0] < GOOD * 2 * len(observed):
            break
    _, predictions, theta = min(ends, key=lambda end: end[0])
    _, covariance = least_squares(run_residuals(model, predictions, observed), told, theta, rounds=0)
    return as_fit(theta, covariance)


def misfit(predictions: Sequence[Prediction], observed: Observed) -> float:
    """How far latencies are off, each in units of LATENCY of itself; large ones by their size, not by their square."""
    outcomes = predictions[0].outcomes[: len(observed)]
    queued = np.array([outcome.queued for outcome in outcomes])
    off = []
    for end, seen in ((0, observed.first), (-1, observed.last)):
        took = seen - observed.queued
        ours = np.array([outcome.times[end] for outcome in outcomes]) - queued
        off.append((ours - took) / np.hypot(READING, LATENCY * took))
    size = np.abs(np.concatenate(off))
    return float(np.where(size < 2, size**2, 4 * size - 4).sum())

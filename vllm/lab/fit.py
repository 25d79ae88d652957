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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lab.prediction import Heard, Job, Prediction, Setup, Wait, predict
from lab.step_time import Guess, StepFeatures, StepModel, StepRates

RATES = tuple(field.name for field in dataclasses.fields(StepRates))
COLD = Guess(0.1, 2.0)  # seconds that the first launch of a process takes longer: kernels are compiled and loaded


@dataclass(frozen=True)
class Fit:
    """Rates, the first launch's delay, and of each the σ of its logarithm: 0.05 is known to 5 %."""

    rates: StepRates
    cold: float
    sigma: dict[str, float]


class Observed:
    """The first requests of a run: when the loop heard of each, and of its first and its last token. Arrays [n] of
    seconds, on the clock of the arrivals."""

    def __init__(self, queued: Sequence[float], first: Sequence[float], last: Sequence[float]) -> None:
        self.queued, self.first, self.last = (np.array(each, float) for each in (queued, first, last))

    def __len__(self) -> int:
        return len(self.first)


def columns(model: StepModel, prediction: Prediction) -> StepFeatures:
    """The features of all steps: columns [K]."""
    rows = [model.features(step.work) for step in prediction.steps]
    return StepFeatures(*np.array(rows, float).T)


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


def heard_times(theta: np.ndarray, features: StepFeatures, order: list) -> tuple[np.ndarray, np.ndarray]:
    """When the loop heard of each step [K], and the slopes [K, P], if it waits in this `order`: the clocks of
    `prediction`, with what is decided held fast."""
    seconds, slopes = step_seconds(theta, features)
    P, at = len(theta), RATES.index("host")
    host, cold = np.exp(theta[at]), np.exp(theta[-1])
    heard, heard_slope, ends = np.zeros(len(seconds)), np.zeros((len(seconds), P)), {}
    clock = gpu = 0.0
    d_clock = d_gpu = np.zeros(P)
    d_launch = np.zeros(P)
    d_launch[at] = host
    for event in order:
        if isinstance(event, Wait):
            if event.until > clock:
                clock, d_clock = event.until, np.zeros(P)
        elif isinstance(event, Heard):
            end, d_end = ends.pop(event.step)
            if end > clock:
                clock, d_clock = end, d_end
            heard[event.step], heard_slope[event.step] = clock, d_clock
        else:
            clock, d_clock = clock + host, d_clock + d_launch
            if event == 0:
                clock, d_clock = clock + cold, d_clock.copy()
                d_clock[-1] += cold
            if clock > gpu:
                gpu, d_gpu = clock, d_clock
            gpu, d_gpu = gpu + seconds[event], d_gpu + slopes[event]
            ends[event] = gpu, d_gpu
    return heard, heard_slope


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

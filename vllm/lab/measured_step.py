"""How long a step takes on the machine at hand: a curve and four rates, from steps that were timed.

Owns the model and the least squares that finds it; called by `calibration` and by whoever predicts with the result. It
never times anything. vLLM has no counterpart; `step_time` is the same for machines that nobody is at.

    seconds = curve(T) + sequence · B + decode · Σ S + prompt · Σ S + pair · pairs     Σ S: of decodes, and of prompts

The curve, straight lines between T that were timed, stands for everything that goes by the tokens of a step: products,
weights, launches. `step_time` has a maximum there, of reading and multiplying. On a CPU both share the cores, and a
library has other products for few rows than for many.
"""

from __future__ import annotations

import common

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lab.step_time import StepWork

RATES = ("sequence", "decode", "prompt", "pair")


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds; `sigma` has the standard error of each point of the curve, then of each rate."""

    curve: tuple[tuple[int, float], ...]  # (T, seconds), ascending
    sequence: float  # a sequence in the batch: a row of logits, and its choice
    decode: float  # a token of context that a sequence with one token reads
    prompt: float  # a token of context that a chunk of a prompt reads
    pair: float  # a query and a key of a prompt
    sigma: tuple[float, ...] = ()
    host: ClassVar[float] = 0.0  # a step is timed with what its host does

    def seconds(self, work: StepWork) -> float:
        """Of a step. Beyond the curve's last point its last line goes on."""
        return sum(self.parts(work).values())

    def parts(self, work: StepWork) -> dict[str, float]:
        """Where the seconds go."""
        (i, before), (j, after) = hats(work.tokens, [T for T, _ in self.curve])
        return {
            "tokens": before * self.curve[i][1] + after * self.curve[j][1],
            "sequence": self.sequence * work.sequences,
            "decode": self.decode * work.decode_context,
            "prompt": self.prompt * work.prompt_context,
            "pair": self.pair * work.prompt_pairs,
        }

    def to_json(self) -> dict[str, Any]:
        rates = {name: getattr(self, name) for name in RATES}
        return {"curve": [list(point) for point in self.curve], **rates, "sigma": list(self.sigma)}

    @classmethod
    def from_json(cls, stored: Any) -> MeasuredStep:
        """What `to_json` made. Raises InputError."""
        try:
            curve = tuple((int(T), float(seconds)) for T, seconds in stored["curve"])
            rates = {name: float(stored[name]) for name in RATES}
            numbers = (*rates.values(), *itertools.chain.from_iterable(curve))
            if not all(math.isfinite(x) and x >= 0 for x in numbers):
                raise ValueError("a rate is no number of at least 0")
            if len(curve) < 2 or any(b[0] <= a[0] for a, b in itertools.pairwise(curve)):
                raise ValueError("the curve must have 2 or more points with ascending tokens")
            return cls(curve, **rates, sigma=tuple(map(float, stored.get("sigma", ()))))
        except (KeyError, TypeError, ValueError) as error:
            raise common.InputError(f"a calibration: not what `predict calibrate` stores ({error!r:.80})") from None


def hats(tokens: float, knots: Sequence[int]) -> list[tuple[int, float]]:
    """The two points between which `tokens` lies, or the last two, and the share of each: they add up to 1."""
    i = min(max(int(np.searchsorted(knots, tokens)), 1), len(knots) - 1)
    share = (tokens - knots[i - 1]) / (knots[i] - knots[i - 1])
    return [(i - 1, 1 - share), (i, share)]


def row_of(work: StepWork, knots: Sequence[int]) -> list[float]:
    """The step's features, in the order of the curve's points and of RATES."""
    row = [0.0] * len(knots)
    for i, share in hats(work.tokens, knots):
        row[i] += share
    return [*row, *map(float, (work.sequences, work.decode_context, work.prompt_context, work.prompt_pairs))]


def solve(works: Sequence[StepWork], seconds: Sequence[float], knots: Sequence[int]) -> MeasuredStep:
    """Non-negative least squares on relative errors: a step of 10 ms and one of 500 count the same.

    Raises InputError where there are fewer steps than unknowns.
    """
    rows, times = np.array([row_of(work, knots) for work in works]), np.array(seconds, float)
    if len(rows) <= rows.shape[1]:
        raise common.InputError(f"a calibration: {len(rows)} steps are too few for {rows.shape[1]} unknowns")
    A, b = rows / times[:, None], np.ones(len(times))
    x, sigma = non_negative(A, b)
    curve = tuple((T, float(s)) for T, s in zip(knots, x))
    rates = dict(zip(RATES, map(float, x[len(knots) :])))
    return MeasuredStep(curve, **rates, sigma=tuple(map(float, sigma)))


def non_negative(A: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x ≥ 0 with the least |A x − b|² (Lawson and Hanson, 1974), and the standard error of each; what is 0 has none.

    Shapes: A [m, n], b [m] -> x [n], sigma [n].
    """
    scale = np.linalg.norm(A, axis=0)
    scaled = A / np.where(scale > 0, scale, 1)
    x, free = np.zeros(A.shape[1]), np.zeros(A.shape[1], bool)
    while True:
        gain = np.where(free, -np.inf, scaled.T @ (b - scaled @ x))
        if gain.max() < 1e-9 or free.all():
            break
        free[gain.argmax()] = True
        while True:
            found = np.zeros_like(x)
            found[free] = np.linalg.lstsq(scaled[:, free], b, rcond=None)[0]
            if (found[free] > 0).all():
                break
            held = free & (found <= 0)  # go towards it until the first one is 0
            x = x + (x[held] / (x[held] - found[held])).min() * (found - x)
            free &= x > 1e-12
        x = found
    left = b - scaled @ x
    variance = left @ left / max(1, len(b) - int(free.sum()))
    sigma = np.zeros_like(x)
    sigma[free] = np.sqrt(variance * np.diag(np.linalg.pinv(scaled[:, free].T @ scaled[:, free])))
    return x / np.where(scale > 0, scale, 1), sigma / np.where(scale > 0, scale, 1)

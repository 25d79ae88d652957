"""A measured step: seconds by hand, rates found again, and least squares that never goes below 0."""

from __future__ import annotations

import common

import random

import numpy as np
import pytest

from lab.measured_step import RATES, MeasuredStep, hats, non_negative, row_of, solve
from lab.step_time import step_work

STEP = MeasuredStep(((1, 2.0), (3, 4.0), (7, 6.0)), 10.0, 100.0, 1000.0, 10000.0)
KNOTS = (1, 8, 64, 256)
TRUE = MeasuredStep(((1, 0.015), (8, 0.02), (64, 0.05), (256, 0.16)), 3e-4, 2e-6, 5e-6, 1e-7)


def some_works(count, seed=0):
    """Decodes, chunks and both, up to 400 tokens."""
    rng, works = random.Random(seed), []
    for i in range(count):
        chunks = [(1, rng.randint(2, 600)) for _ in range(rng.randint(0, 40) if i % 3 else rng.randint(1, 40))]
        if i % 3:
            q = rng.randint(2, 300)
            chunks.append((q, q + rng.choice((0, 0, 100, 300))))
        works.append(step_work(chunks))
    return works


def test_seconds_by_hand():
    assert STEP.seconds(step_work([(1, 5)])) == 2 + 10 + 100 * 5
    assert STEP.seconds(step_work([(1, 5), (1, 7)])) == 3 + 20 + 100 * 12, "halfway between 1 and 3 tokens"
    # 1 + 3 tokens: a quarter of the way from 3 to 7. The last 3 of 4 tokens see 2, 3 and 4 keys.
    assert STEP.seconds(step_work([(1, 5), (3, 4)])) == 4.5 + 20 + 500 + 4000 + 10000 * 9
    assert STEP.seconds(step_work([(9, 9)])) == 7 + 10 + 9000 + 10000 * 45, "beyond the curve its last line goes on"


def test_between_two_points():
    assert hats(3, [1, 3, 7]) == [(0, 0.0), (1, 1.0)]
    assert hats(4, [1, 3, 7]) == [(1, 0.75), (2, 0.25)]
    assert hats(15, [1, 3, 7]) == [(1, -2.0), (2, 3.0)]


def test_seconds_are_the_row_times_what_is_solved_for():
    for work in some_works(20):
        x = [*(seconds for _, seconds in TRUE.curve), *(getattr(TRUE, name) for name in RATES)]
        assert TRUE.seconds(work) == pytest.approx(np.dot(row_of(work, KNOTS), x))


def test_rates_are_found_again():
    works = some_works(60)
    found = solve(works, [TRUE.seconds(work) for work in works], KNOTS)
    assert np.array(found.curve) == pytest.approx(np.array(TRUE.curve), rel=1e-6)
    assert [getattr(found, name) for name in RATES] == pytest.approx([getattr(TRUE, name) for name in RATES], rel=1e-6)
    assert max(found.sigma) < 1e-9 and len(found.sigma) == len(KNOTS) + len(RATES)


def test_standard_errors_cover_the_truth():
    """Noise of 3 %: two thirds of what is found lies within one standard error, nearly all within three."""
    works, off = some_works(120), []
    for seed in range(20):
        rng = random.Random(seed)
        found = solve(works, [TRUE.seconds(work) * rng.gauss(1, 0.03) for work in works], KNOTS)
        values = [*(seconds for _, seconds in found.curve), *(getattr(found, name) for name in RATES)]
        truth = [*(seconds for _, seconds in TRUE.curve), *(getattr(TRUE, name) for name in RATES)]
        off += [abs(a - b) / s for a, b, s in zip(values, truth, found.sigma) if s]
    assert 0.55 < np.mean(np.array(off) < 1) < 0.8 and np.mean(np.array(off) < 3) > 0.97


def test_a_step_of_10_ms_counts_as_much_as_one_of_500():
    """No change of a point or a rate makes the relative errors smaller."""
    works = some_works(60)
    times = np.array([TRUE.seconds(work) for work in works]) * np.random.default_rng(0).normal(1, 0.05, 60)
    found = solve(works, times, KNOTS)
    A = np.array([row_of(work, KNOTS) for work in works])
    x = np.array([*(seconds for _, seconds in found.curve), *(getattr(found, name) for name in RATES)])

    def cost(x):
        return np.sum((A @ x / times - 1) ** 2)

    for i in np.flatnonzero(x):
        for factor in (0.999, 1.001):
            changed = x.copy()
            changed[i] *= factor
            assert cost(changed) > cost(x)


def test_non_negative_is_the_best_of_all_choices():
    """Nothing above 0 wants to move, and nothing at 0 wants to rise: with a convex cost there is no better place. The
    columns resemble each other, as those of a step do."""
    rng, bound = np.random.default_rng(0), 0
    for _ in range(300):
        A = rng.normal(size=(20, 10)) + 3 * rng.normal(size=(20, 1))
        x, sigma = non_negative(A, b := rng.normal(size=20))
        gain = A.T @ (b - A @ x)
        assert (x >= 0).all() and gain.max() < 1e-6 and np.abs(gain[x > 0]).max(initial=0) < 1e-6
        assert ((sigma > 0) == (x > 0)).all()
        bound += (x == 0).any()
    assert bound > 250


def test_a_column_of_nothing_is_0():
    x, sigma = non_negative(np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]), np.array([2.0, 4.0, 6.0]))
    assert x == pytest.approx([2, 0]) and sigma[1] == 0


def test_too_few_steps():
    with pytest.raises(common.InputError, match="8 steps are too few for 8 unknowns"):
        solve(some_works(8), [1.0] * 8, KNOTS)


def test_to_a_file_and_back():
    found = solve(some_works(30), [TRUE.seconds(work) for work in some_works(30)], KNOTS)
    assert MeasuredStep.from_json(found.to_json()) == found
    good = TRUE.to_json()
    for wrong in (
        {},
        None,
        good | {"pair": -1},
        good | {"curve": [[1, 2.0]]},
        good | {"curve": [[8, 1], [1, 2]]},
        good | {"decode": "much"},
        good | {"sequence": float("nan")},
    ):
        with pytest.raises(common.InputError, match="predict calibrate"):
            MeasuredStep.from_json(wrong)

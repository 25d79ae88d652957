"""The simulated engine waits as queueing theory says it must."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest

from lab import cli
from lab.simulated_engine import StepCost, run_simulated
from lab.workload import Prompt, arrival_times

page = cli.numbers("06d_load_generator")


def batch_means(values, batches=20):
    """Mean of a correlated series, and the half-width of its 99.9 % confidence interval: means of long stretches are
    nearly independent where neighbours are not; 3.883 is Student's t for 19 degrees of freedom."""
    means = [statistics.fmean(part) for part in np.array_split(np.array(values, dtype=float), batches)]
    return statistics.fmean(means), 3.883 * statistics.stdev(means) / math.sqrt(batches)


def one_seat(prompts, load, seed):
    """Waits in front of one seat, and the service times."""
    services = [StepCost().alone(p) for p in prompts]
    rate = load / statistics.fmean(services)
    arrivals = [round(at) for at in arrival_times(len(prompts), rate, random.Random(seed))]
    run = run_simulated(prompts, arrivals, max_num_seqs=1)
    waits = [times[-1] - at - service for times, at, service in zip(run.times, arrivals, services)]
    return waits, services, arrivals, rate


def geometric_prompts(count, seed):
    rng = random.Random(seed)
    return [Prompt([], 16, 1 + min(60, int(rng.expovariate(1 / 4)))) for _ in range(count)]


def lindley(arrivals, services):
    waits, free_at = [], 0
    for at, service in zip(arrivals, services):
        waits.append(max(0, free_at - at))
        free_at = max(at, free_at) + service
    return waits


@pytest.mark.parametrize("load", [0.3, 0.9])
def test_every_wait_is_lindleys(load):
    waits, services, arrivals, _ = one_seat(geometric_prompts(300, 1), load, 2)
    assert waits == lindley(arrivals, services) and max(waits) > 0


@pytest.mark.parametrize(("count", "load"), [(6_000, 0.5), pytest.param(60_000, 0.8, marks=pytest.mark.slow)])
def test_mean_waits_are_pollaczek_khinchines(count, load):
    """M/D/1 and M/G/1: λ E[S²] / (2 (1 − ρ)) lies in the 99.9 % interval of the simulated mean."""
    for prompts in ([Prompt([], 128, 1)] * count, geometric_prompts(count // 5, 3)):
        waits, services, _, rate = one_seat(prompts, load, 4)
        theory = rate * statistics.fmean(s * s for s in services) / (2 * (1 - load))
        mean, half = batch_means(waits)
        assert abs(mean - theory) <= half and half < 0.6 * theory, (mean, half, theory)


def test_a_step_costs_what_it_says():
    cost = StepCost()
    assert cost([(1, 1000)]) == 6_440 + (27_000 + 44_000) // 1000
    assert cost([(512, 512), (1, 600)]) == 6_440 + (27_000 * 513 + 44 * 1112) // 1000
    alone = cost.alone(Prompt([], page.INPUT, page.OUTPUT))
    assert page.capacity(1) == pytest.approx(1e6 / alone), "from the start, not from the first answer"
    assert cost.alone(Prompt([], 100, 3)) == cost([(100, 100)]) + cost([(1, 101)]) + cost([(1, 102)])

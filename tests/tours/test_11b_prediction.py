"""Tour 11b: whole microseconds, what limits a run, and what the story says of its engines."""

from __future__ import annotations

import math

import pytest

from engine import registry
from lab import cli
from lab.prediction import Job
from lab.step_time import step_work

lesson, page = registry.lesson("11b_prediction"), cli.numbers("11b_prediction")


@pytest.mark.parametrize("chunks", [*page.BATCHES.values(), *lesson.BATCHES])
def test_whole_microseconds_are_the_formula(chunks):
    """But for the host's part, which the widget's loop adds to every step."""
    work = step_work(chunks)
    seconds = lesson.RATES.seconds(lesson.STEP.features(work)) + lesson.RATES.host
    assert lesson.COST(work) == pytest.approx(1e6 * seconds, rel=1e-3)


def test_who_waits_waits_for_what_is_used_up():
    work = step_work([(1, 100)])._replace(tokens=lesson.BUDGET - 1)
    step = lesson.Step(0, 0, 1, work, running=8, waiting=1, blocks=50)
    full = step._replace(work=work._replace(tokens=lesson.BUDGET))
    assert lesson.limit_of(step._replace(waiting=0), 8) is None
    assert lesson.limit_of(step, 8) == "seats"
    assert lesson.limit_of(step, 9) == "KV blocks"
    assert lesson.limit_of(full, 8) == "step time"


@pytest.mark.parametrize(("engine", "limit"), [({}, "step time"), ({"max_num_seqs": 8}, "seats"),
                                               ({"num_blocks": 1024}, "KV blocks")])  # fmt: skip
def test_each_engine_has_its_own_limit(engine, limit):
    """And its wait leaves the ground where that limit is reached."""
    found = page.simulate(page.WIDGET_DEFAULT | engine | {"rate": 10})
    assert found["limit"] == limit
    assert max(found["limits_us"]) > 0.7 * sum(found["limits_us"])
    slow = [slow for _, slow in found["curve"]]
    assert slow == sorted(slow) and slow[0] < page.LIMIT < slow[-1]
    assert found["leaves"] == next(rate for rate, us in zip(page.RATES, slow) if us > page.LIMIT)


def test_the_queue_above_the_knee_grows_with_the_run():
    short, long = (page.simulate(page.WIDGET_DEFAULT | {"rate": 12, "seconds": seconds}) for seconds in (6, 12))
    assert long["strip"][-1][1] > 2 * short["strip"][-1][1] and long["p99_us"] > 2 * short["p99_us"]
    assert "OVERLOADED, by step time" in page.describe(long)


def test_an_error_in_a_step_is_larger_in_a_wait_near_the_knee():
    assert 0.05 < page.if_steps_are_slower(4) < 0.1 < 0.3 < page.if_steps_are_slower(8)
    assert page.if_steps_are_slower(4, percent=0) == 0


def test_no_run_owns_what_there_is_not():
    for engine in page.ENGINES.values():
        params = page.WIDGET_DEFAULT | engine | {"rate": 12}
        for running, waiting, blocks in page.simulate(params)["strip"]:
            assert 0 <= running <= params["max_num_seqs"] and waiting >= 0 and blocks <= params["num_blocks"]


def test_littles_law_is_exact():
    run = lesson.serve(8)
    events = sorted([(job.arrival, 1) for job in run.jobs] + [(seen.times[-1], -1) for seen in run.outcomes])
    area = sum(
        sum(change for _, change in events[: i + 1]) * (events[i + 1][0] - at) for i, (at, _) in enumerate(events[:-1])
    )
    assert area == sum(run.latency) == page.simulate(page.WIDGET_DEFAULT | {"rate": 8})["area"]


@pytest.mark.parametrize("seed", range(5))
def test_timed_batches_give_the_rates_back(seed):
    """Within what the fit says of its own doubt, and better known than before."""
    for one in lesson.recover(seed):
        assert abs(math.log(one.fitted / one.truth)) < 3.5 * one.sigma, one
        assert one.sigma < lesson.SHEET[one.name].spread


def test_without_noise_they_are_what_the_data_says():
    for one in lesson.recover(noise=0.0):
        assert abs(math.log(one.fitted / one.truth)) < one.sigma, one


def test_longer_answers_take_longer():
    jobs = [Job(0, 4096, 16), Job(0, 4096, 64)]
    first, second = lesson.run_of(jobs).latency
    assert second > first
    low, *_, high = lesson.band(6, draws=3)
    assert low < high

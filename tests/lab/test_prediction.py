"""Two clocks around the real scheduler: times by hand, decisions as `replay` has them."""

from __future__ import annotations

import common

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from lab import replay
from lab.prediction import Heard, Job, Setup, Wait, predict

HOST = 0.25


def setup(num_blocks=100, block_size=16, seqs=8, budget=64, length=512, **more):
    limits = SchedulerConfig(length, seqs, budget)
    return Setup(limits, num_blocks, block_size, **more)


def second(work):
    return 1.0


def tokens(work):
    return float(work.tokens)


def run(jobs, setup, seconds=second, **more):
    (found,) = predict(jobs, setup, seconds, HOST, **more)
    return found


def test_one_request_by_hand():
    """Planned at 5; launched 0.25 later; while it runs the next is planned and queues behind it on the GPU."""
    found = run([Job(5.0, 10, 3)], setup())
    (outcome,) = found.outcomes
    assert (outcome.queued, outcome.scheduled) == (5.0, 5.0)
    assert outcome.times == [6.25, 7.25, 8.25] and outcome.steps == [0, 0, 2]
    assert [(step.start, step.end) for step in found.steps] == [(5.25, 6.25), (6.25, 7.25), (7.25, 8.25)]
    assert [step.scheduled for step in found.steps] == [5.0, 5.25, 6.25]
    assert found.order == [Wait(5.0), 0, 1, Heard(0), 2, Heard(1), Heard(2)]


def test_without_a_step_ahead_the_gpu_waits_for_the_host():
    found = run([Job(0.0, 10, 3)], setup(async_scheduling=False))
    assert found.outcomes[0].times == [1.25, 2.5, 3.75]


def test_where_the_host_is_slower_than_the_gpu_it_sets_the_pace():
    found = run([Job(0.0, 10, 3)], setup(), lambda work: 0.1)
    assert found.outcomes[0].times == pytest.approx([0.5, 0.75, 0.85])


def test_the_first_launch_of_a_process_takes_longer():
    found = run([Job(0.0, 10, 2), Job(50.0, 10, 2)], setup(), cold=2.0)
    assert [outcome.times for outcome in found.outcomes] == [[3.25, 4.25], [51.25, 52.25]]


def test_who_arrives_meanwhile_is_heard_of_between_two_plans():
    """At 0.3 two steps are on their way, so the loop waits until 1.25."""
    found = run([Job(0.0, 10, 9), Job(0.3, 10, 1)], setup())
    late = found.outcomes[1]
    assert (late.queued, late.scheduled) == (1.25, 1.25)
    assert late.times == [3.25]  # behind the step that runs


def test_steps_take_what_the_model_says():
    found = run([Job(0.0, 100, 2)], setup(), tokens)
    assert [step.work.tokens for step in found.steps] == [64, 36, 1]
    assert found.outcomes[0].times == [100.25, 101.25]


def test_prefixes_are_found_by_group():
    jobs = [Job(0.0, 40, 1, 32, group) for group in (0, 0, 1)]
    assert [outcome.cached for outcome in run(jobs, setup(budget=256)).outcomes] == [0, 32, 0]
    off = run(jobs, setup(budget=256, enable_prefix_caching=False))
    assert [outcome.cached for outcome in off.outcomes] == [0, 0, 0]


def workload(seed):
    rng = random.Random(seed)
    return [Job(0.0, rng.randint(1, 60), rng.randint(1, 40)) for _ in range(12)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_decisions_are_those_of_replay(seed, ahead):
    """All at once, so that time decides nothing: every step's tokens, and who is preempted."""
    jobs, blocks = workload(seed), 14
    config = {"num_blocks": blocks, "block_size": 8, "max_model_len": 512, "enable_prefix_caching": True,
              "async_scheduling": ahead}  # fmt: skip
    requests = [
        {"id": str(i), "arrival_step": 0, "prompt_token_ids": job.prompt(i), "max_tokens": job.output_len,
         "forced_output_token_ids": [0] * job.output_len} for i, job in enumerate(jobs)
    ]  # fmt: skip
    trace = replay.replay({"name": "x", "config": config, "requests": requests})
    found = run(jobs, setup(blocks, 8, async_scheduling=ahead))
    expected = [sum(step["scheduled"].values()) for step in trace["steps"]]
    assert [step.work.tokens for step in found.steps] == [n for n in expected if n]
    preempted = sum(len(step.get("preempted", ())) for step in trace["steps"])
    assert sum(outcome.preemptions for outcome in found.outcomes) == preempted > 0


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 80), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(8, 40),
    st.booleans(),
    st.sampled_from([(1, False), (2, False), (2, True)]),
)
def test_everybody_is_answered_and_no_clock_goes_back(rows, blocks, ahead, engines):
    jobs = sorted(Job(at, n_in, n_out) for at, n_in, n_out in rows)
    size, together = engines
    where = setup(blocks, 16, async_scheduling=ahead, data_parallel_size=size, share_experts=together)
    found = predict(jobs, where, lambda work: 0.5 + 0.01 * work.tokens, HOST)
    assert len(found) == (1 if together else size)
    for job, outcome in zip(jobs, found[0].outcomes):
        assert len(outcome.times) == job.output_len
        assert job.arrival <= outcome.queued <= outcome.scheduled < outcome.times[0]
        assert outcome.times == sorted(outcome.times)
    for prediction in found:
        for before, after in zip(prediction.steps, prediction.steps[1:]):
            assert before.end <= after.start and before.scheduled <= after.scheduled
        assert all(step.blocks <= (size if together else 1) * (blocks - 1) for step in prediction.steps)
    computed = sum(step.work.expert_tokens for prediction in found for step in prediction.steps)
    preemptions = sum(outcome.preemptions for outcome in found[0].outcomes)
    if not preemptions:  # the last token of each is never computed, and what is cached is not either
        cached = sum(outcome.cached for outcome in found[0].outcomes)
        assert computed == sum(job.input_len + job.output_len - 1 for job in jobs) - cached


def test_two_engines_share_the_requests():
    jobs = [Job(0.0, 10, 5) for _ in range(6)]
    two = predict(jobs, setup(data_parallel_size=2), second, HOST)
    assert [outcome.loop for outcome in two[0].outcomes] == [0, 1, 0, 1, 0, 1]
    (together,) = predict(jobs, setup(data_parallel_size=2, share_experts=True), second, HOST)
    assert together.steps[0].work.tokens == 30 and together.steps[0].work.expert_tokens == 60


def test_only_the_watched_are_waited_for():
    jobs = [Job(float(i), 10, 20) for i in range(20)]
    found = run(jobs, setup(), watched=3)
    whole = run(jobs, setup())
    assert [outcome.times for outcome in found.outcomes[:3]] == [outcome.times for outcome in whole.outcomes[:3]]
    assert len(found.steps) < len(whole.steps)


@pytest.mark.parametrize("job, named", [(Job(0.0, 512, 1), "512"), (Job(0.0, 100, 60), "KV blocks")])
def test_who_never_fits_is_refused_before_the_run(job, named):
    jobs = [Job(0.0, 5, 5), job]
    with pytest.raises(common.InputError, match=named):
        run(jobs, setup(num_blocks=10))

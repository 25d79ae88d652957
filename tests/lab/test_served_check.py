"""`predict check`: the host's part found again, errors by hand, and the whole run on a tiny model."""

from __future__ import annotations

import common

import argparse
import json
import math
import random

import numpy as np
import pytest

from engine import arguments
from engine.serving.cli import add_serve_command
from lab import served_check
from lab.make_model import make_model
from lab.measured_step import MeasuredStep
from lab.records import Record
from lab.running_server import running_server
from lab.served_check import (
    BURSTS,
    Client,
    Host,
    capacity,
    compare,
    find_host,
    make_setup,
    predicted_latencies,
    run_check,
    seen_latencies,
    serve_flags,
    simulate,
)
from lab.step_time import step_work
from lab.workload import Prompt

STEP = MeasuredStep(((1, 0.015), (8, 0.02), (64, 0.05), (512, 0.31)), 3e-4, 2e-6, 5e-6, 1e-7)
TRUE = Host(0.006, 0.0015, 0.0004, 1e-5)
SETUP = make_setup(129)


def answered(lengths, starts, host=TRUE, noise=0.0, seed=0):
    """Records as a server with this host would have them."""
    rng = random.Random(seed)
    records = [Record(at, at, prompt_tokens=n, output_tokens=m) for at, (n, m) in zip(starts, lengths)]
    order, prediction = simulate(records, SETUP, STEP, host)
    for i, outcome in zip(order, prediction.outcomes):
        records[i].times = [t + abs(rng.gauss(0, noise)) for t in outcome.times]
        records[i].times.sort()
    return records


def bursts(**more):
    return [answered([(n + i, m) for i in range(B)], [0.0] * B, **more) for B, n, m in BURSTS]


def test_what_a_host_adds_to_a_step():
    assert TRUE.added(step_work([(1, 9), (5, 5)])) == pytest.approx(0.0015 + 2 * 0.0004 + 6e-5), "not what is around it"


def test_the_host_is_found_again():
    found = find_host(bursts(), SETUP, STEP)
    for name in ("around", "step", "sequence", "token"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)


def test_a_noisy_host_is_found_nearly():
    found = find_host(bursts(noise=0.001), SETUP, STEP)
    assert found.step == pytest.approx(TRUE.step, abs=5e-4) and found.around == pytest.approx(TRUE.around, abs=4e-3)


def test_a_server_may_be_quicker_than_its_calibration():
    found = find_host(bursts(host=Host(0.006, 0.001, -0.0002, 0.0)), SETUP, STEP)
    assert found.sequence == pytest.approx(-0.0002, rel=1e-3)


def test_a_request_alone_by_hand():
    """Sent at 5; around 6 ms; one step with 100 tokens, then two with one."""
    record = Record(5.0, 5.0, prompt_tokens=100, output_tokens=3)
    found, prediction = predicted_latencies([record], SETUP, STEP, TRUE)
    first = 0.006 + STEP.seconds(step_work([(100, 100)])) + TRUE.added(step_work([(100, 100)]))
    further = [STEP.seconds(step_work([(1, S)])) + TRUE.added(step_work([(1, S)])) for S in (101, 102)]
    assert found["ttft"] == pytest.approx([first]) and found["e2el"] == pytest.approx([first + sum(further)])
    assert found["tpot"] == pytest.approx([sum(further) / 2]) and len(prediction.steps) == 3


def test_each_prediction_is_its_own_requests():
    """Whatever the order in which they were sent."""
    lengths, starts = [(300, 9), (20, 5), (100, 7)], [0.4, 0.0, 0.2]
    records = answered(lengths, starts)
    found, _ = predicted_latencies(records, SETUP, STEP, TRUE)
    assert found["ttft"] == pytest.approx([r.ttft for r in records])
    assert found["e2el"] == pytest.approx([r.e2el for r in records])


def test_an_overload_preempts_and_a_light_load_does_not():
    """What the loads are for, at a plausible speed."""
    rng, preempted = random.Random(0), {}
    most = capacity(served_check.draw_lengths(30, random.Random(1)), SETUP, STEP, TRUE)
    for name, share in served_check.LOADS.items():
        lengths = served_check.draw_lengths(30, rng)
        records = answered(lengths, served_check.arrival_times(30, share * most, rng))
        _, prediction = predicted_latencies(records, SETUP, STEP, TRUE)
        preempted[name] = sum(outcome.preemptions for outcome in prediction.outcomes)
    assert preempted["light"] == 0 and preempted["overload"] >= 3


def test_capacity_by_hand():
    """Two of 10 tokens and one token each: one step of 20 tokens, and half a request's time for each."""
    seconds = STEP.seconds(step_work([(10, 10)] * 2)) + TRUE.added(step_work([(10, 10)] * 2))
    assert capacity([(10, 1)] * 2, SETUP, STEP, TRUE) == pytest.approx(2 / (TRUE.around + seconds))


def test_errors_by_hand():
    records = [Record(0.0, 0.0, times=[0.1, 0.1 + 0.1 * i], output_tokens=2) for i in (1, 2, 3, 4)]
    seen = seen_latencies(records)
    assert seen["ttft"] == pytest.approx([0.1] * 4) and seen["e2el"] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    predicted = {"ttft": np.array([0.11, 0.09, 0.1, 0.12]), "tpot": seen["tpot"], "e2el": 1.1 * seen["e2el"]}
    found = compare(2.0, records, predicted)
    assert found["errors"]["e2el"]["p99"] == pytest.approx(0.1) and found["errors"]["tpot"]["mean"] == 0
    assert found["errors"]["ttft"]["mean"] == pytest.approx(0.05)
    assert found["per_request"]["ttft"]["median"] == pytest.approx(0.1), "of 10, 10, 0 and 20 %"
    assert found["seen"][1] == [0, 2, 0.0, 100.0, 300.0]
    assert found["predicted_ttft_ms"] == [110.0, 90.0, 100.0, 120.0]


def test_serve_takes_the_flags():
    parser = arguments.Parser()
    add_serve_command(parser.add_subparsers())
    args = parser.parse_args(["serve", *serve_flags("some/folder", 129)])
    assert (args.num_gpu_blocks_override, args.max_num_seqs, args.max_num_batched_tokens) == (129, 64, 512)
    assert args.model == "some/folder" and args.enable_prefix_caching is False
    limits = SETUP.scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len) == (64, 512, args.max_model_len)


def test_preemptions_are_read_from_the_metrics(monkeypatch):
    text = '# HELP vllm:num_preemptions_total x\nvllm:num_preemptions_total{model_name="m"} 7.0\nvllm:other_total 3.0\n'
    monkeypatch.setattr(served_check.httpx, "get", lambda *_, **__: argparse.Namespace(text=text))
    assert Client("http://localhost:1", 100, 0).preemptions() == 7


@pytest.mark.parametrize("flags", [["--seconds", "0"], ["--seed", "-1"]])
def test_bad_flags_are_one_line(flags, capsys):
    with pytest.raises(SystemExit) as error:
        served_check.main(flags)
    assert error.value.code == 2 and flags[0] in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(common.InputError, match="--model"):
        served_check.main(["--model", str(tmp_path / "none")])


@pytest.mark.slow
def test_a_run_against_a_server(tmp_path, capsys):
    """All three loads on a tiny model: every request is answered and compared. How large the errors are is this
    machine's affair at this moment; `predict check` by itself says it."""
    make_model("llama", tmp_path / "tiny")
    with running_server(*serve_flags(str(tmp_path / "tiny"), 129)) as (url, _):
        found = run_check(url, 1000, SETUP, STEP, seconds=0.5, seed=0)
        client = Client(url, 1000, 1)
        with pytest.raises(common.CheckFailed, match="not answered in full"):
            client.send([Prompt([1] * 1020, 1020, 100)], [0.0])
    assert set(found["loads"]) == set(served_check.LOADS)
    for load in found["loads"].values():
        seen, predicted = [row[-1] for row in load["seen"]], load["predicted_e2el_ms"]
        assert len(seen) == len(predicted) == load["requests"] >= 8 and min(seen + predicted) > 0
        assert all(math.isfinite(x) for rules in load["errors"].values() for x in rules.values())
    json.dumps(found)
    assert "each request's TTFT is off by" in capsys.readouterr().out

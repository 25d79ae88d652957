"""`predict --rates` with what was measured here: the same engine, its limits, and one line for what does not fit."""

from __future__ import annotations

import common

import json

import pytest

from lab import calibrated, predict_command
from lab.calibration import KEY
from lab.measured_step import MeasuredStep
from lab.step_time import step_work

STEP = MeasuredStep(((1, 0.015), (8, 0.02), (64, 0.05), (512, 0.31)), 3e-4, 2e-6, 5e-6, 1e-7)
LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1024}
STORED = STEP.to_json() | {"machine": {"name": "a machine"}, "model": None, "limits": LIMITS}


@pytest.fixture
def rates(tmp_path):
    (tmp_path / "rates.json").write_text(json.dumps({KEY: STORED}))
    return str(tmp_path / "rates.json")


def served(rates, *flags):
    args = predict_command.predict_parser().parse_args(["--rates", rates, "--request-rate", "1", *flags])
    return calibrated.served_here(args, calibrated.stored_in(rates))


def test_the_engine_is_as_it_was_calibrated(rates):
    found, fit = served(rates, "--num-gpu-blocks-override", "99", "--max-num-seqs", "8")
    limits = found.setup.scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len) == (8, 512, 1024)
    assert found.setup.num_blocks == 99 and not found.setup.async_scheduling and found.setup.enable_prefix_caching
    work = step_work([(1, 40), (9, 9)])
    assert fit.rates.seconds(found.model.features(work)) == STEP.seconds(work) == sum(STEP.parts(work).values())


def test_a_request_alone_by_hand(rates, tmp_path, capsys):
    """A prompt of 64 tokens and two tokens of an answer: one step with 64, one with 1."""
    path = tmp_path / "answer.json"
    flags = ["--request-rate", "1", "--num-prompts", "1", "--input-len", "64", "--output-len", "2"]
    predict_command.main(["--rates", rates, "--num-gpu-blocks-override", "99", *flags, "--json", str(path)])
    answer = json.loads(path.read_text())["predict"]
    first, second = STEP.seconds(step_work([(64, 64)])), STEP.seconds(step_work([(1, 65)]))
    assert answer["ttft"]["mean"] == pytest.approx(1e3 * first)
    assert answer["e2el"]["mean"] == pytest.approx(1e3 * (first + second))
    assert sum(answer["time"]["steps with prompts"][name] for name in STEP.parts(step_work([]))) == pytest.approx(1)
    assert "a machine" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--gpu", "H100"], ["--model", "Llama-3.1-8B"], ["-tp", "2"], []])
def test_flags_that_say_otherwise(rates, flags):
    name = {"-tp": "--tensor-parallel-size"}.get(*flags[:1], *flags[:1]) if flags else "--num-gpu-blocks-override"
    with pytest.raises(common.InputError, match=name):
        served(rates, *flags, *(["--num-gpu-blocks-override", "99"] if flags else []))


@pytest.mark.parametrize(
    "wrong", [{"limits": None}, {"machine": 3}, {"limits": {"max_num_seqs": "many"}}, {"pair": None}]
)
def test_a_file_that_lacks_something(tmp_path, wrong):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({KEY: STORED | wrong}))
    with pytest.raises(common.InputError, match="predict calibrate"):
        served(str(path), "--num-gpu-blocks-override", "99")


def test_other_files(tmp_path):
    path = tmp_path / "rates.json"
    for text in ("{}", '{"predict fit": {}}', "[1]"):
        path.write_text(text)
        assert calibrated.stored_in(str(path)) is None
    path.write_text("{")
    with pytest.raises(common.InputError, match="--rates"):
        calibrated.stored_in(str(path))

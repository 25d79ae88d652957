"""`predict calibrate`: rates recovered from a timer that lies by a known rule, and the batches that a runner sees."""

from __future__ import annotations

import common

import json
import random
import statistics

import pytest

from engine.config import SchedulerConfig
from engine.model import llama
from lab import calibration
from lab.calibration import RATES, BatchTimer, Calibration, calibrate, make_grid, print_calibration
from lab.make_model import make_model
from lab.measured_step import MeasuredStep
from lab.model_costs import find_model, model_costs
from lab.step_time import StepModel, StepRates, step_work

TRUE = MeasuredStep(
    ((1, 0.015), (8, 0.02), (32, 0.03), (64, 0.05), (128, 0.08), (256, 0.16), (512, 0.31)), 3e-4, 2e-6, 5e-6, 1e-7
)
COSTS = model_costs(find_model("SmolLM2-135M"))


def timer(noise=0.0, seed=0, seconds=TRUE.seconds):
    rng = random.Random(seed)
    return lambda batch, repeats: [seconds(step_work(batch)) * rng.gauss(1, noise) for _ in range(repeats)]


def test_a_grid_keeps_its_limits_and_judges_by_others():
    grid = make_grid(64, 512, 1024)
    assert len(grid.fitted) > 50 and len(grid.left_out) > 15
    for batch in (*grid.fitted, *grid.left_out):
        assert len(batch) <= 64 and sum(q for q, _ in batch) <= 512 and all(1 <= q <= S <= 1024 for q, S in batch)
        assert sum(S for _, S in batch) <= calibration.MOST_TOKENS
    assert {step_work(batch) for batch in grid.fitted}.isdisjoint(map(step_work, grid.left_out))
    kinds = [{(any(q > 1 for q, _ in batch), any(q == 1 for q, _ in batch)) for batch in part} for part in grid]
    assert kinds[0] == kinds[1] == {(True, False), (False, True), (True, True)}, "decodes, prompts, and both"
    small = make_grid(8, 64, 128)
    assert small.fitted and all(len(batch) <= 8 for batch in small.fitted)


def test_rates_are_recovered():
    found = calibrate(timer(0.02), make_grid(64, 512, 1024), COSTS, seconds=60, most_rounds=5)
    assert statistics.median(map(abs, found.errors)) < 0.015 and max(map(abs, found.errors)) < 0.05
    assert dict(found.step.curve)[512] == pytest.approx(0.31, rel=0.05)
    assert found.step.sequence == pytest.approx(TRUE.sequence, rel=0.2)
    assert found.step.decode == pytest.approx(TRUE.decode, rel=0.2)


def test_a_slow_round_is_nobodys():
    """Medians of five rounds: that the machine was three times as slow in one of them is not seen."""
    grid, calls = make_grid(64, 512, 1024), 0
    once = len(grid.fitted) + len(grid.left_out)

    def time_batch(batch, repeats):
        nonlocal calls
        calls += 1
        return [TRUE.seconds(step_work(batch)) * (3 if once < calls <= 2 * once else 1)] * repeats

    found = calibrate(time_batch, grid, COSTS, seconds=60, most_rounds=5)
    assert calls == 5 * once and max(map(abs, found.errors)) < 0.02
    assert dict(found.step.curve)[512] == pytest.approx(0.31, rel=0.01)


def test_admission_does_not_count_in_short_steps():
    """The first run of each batch takes 10 ms longer here: of a long step that is little, of a short one everything,
    but of four it is the median that counts."""

    def time_batch(batch, repeats):
        seconds = TRUE.seconds(step_work(batch))
        return [seconds + 0.01, *[seconds] * (repeats - 1)]

    found = calibrate(time_batch, make_grid(64, 512, 1024), COSTS, most_rounds=2)
    assert dict(found.step.curve)[1] == pytest.approx(0.015, rel=0.02)


def test_rounds_end_in_time(monkeypatch):
    """A round takes 10 s here. Within 45, four; within 5, the one that there always is."""
    grid, now, rounds = make_grid(64, 512, 1024), 0.0, 0
    once = len(grid.fitted) + len(grid.left_out)

    def time_batch(batch, repeats):
        nonlocal now
        now += 10 / once
        return [TRUE.seconds(step_work(batch))] * repeats

    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now)
    for seconds, rounds in ((45, 4), (5, 1)):
        now = 0.0
        calibrate(time_batch, grid, COSTS, seconds)
        assert now == pytest.approx(10 * rounds)


def test_a_maximum_is_found_where_it_is_true():
    """Times by `step_time`'s own rule: its rates fit them. A library that changes its product at 100 rows is no line,
    and no maximum of two."""
    rates, model = StepRates(4e-11, 2e-12, 5e-11, 3e-12, 1e-20, 3e-4, 2e-3, 0.0), StepModel(COSTS)
    grid = make_grid(64, 512, 1024)
    found = calibrate(timer(seconds=lambda work: rates.seconds(model.features(work))), grid, COSTS, most_rounds=1)
    assert max(map(abs, found.maximum)) < 0.02

    def jumps(work):
        return TRUE.seconds(work) + (0.08 if work.tokens > 100 else 0.0)

    found = calibrate(timer(seconds=jumps), grid, COSTS, most_rounds=1)
    assert statistics.median(map(abs, found.maximum)) > 2 * statistics.median(map(abs, found.errors))


@pytest.fixture(scope="module")
def small_timer():
    return BatchTimer(llama.random_model(3, max_position_embeddings=256), SchedulerConfig(256, 8, 128))


def test_a_runner_sees_the_batch_that_was_asked_for(small_timer, monkeypatch):
    runner, seen = small_timer.runner, []
    forward = type(runner).forward

    def watched(self, token_ids, meta, requests):
        seen.append((meta.query_lens, meta.seq_lens.tolist(), meta.positions.tolist(), meta.block_table.clone()))
        return forward(self, token_ids, meta, requests)

    monkeypatch.setattr(type(runner), "forward", watched)
    for batch in (((1, 40), (1, 17), (5, 20)), ((30, 30),), ((1, 2),) * 8):
        seen.clear()
        times = small_timer.seconds(batch, 3)
        assert len(times) == len(seen) == 3 and min(times) > 0
        for query_lens, seq_lens, positions, table in seen:
            assert list(zip(query_lens, seq_lens)) == list(batch)
            assert positions == [p for q, S in batch for p in range(S - q, S)]
            rows = [row[: -(-S // 16)].tolist() for row, (_, S) in zip(table, batch)]
            blocks = [block for row in rows for block in row]
            assert 0 not in blocks and len(set(blocks)) == len(blocks), "everybody has blocks of its own"


def test_who_was_timed_leaves(small_timer):
    for _ in range(20):
        small_timer.seconds(((1, 30),) * 8, 1)
    assert len(small_timer.runner.batch.rows) == 8 and len(small_timer.runner.states) == 8


def test_the_largest_batch_fits(small_timer):
    """As many sequences, and tokens of context, as the grid may ask for."""
    small_timer.seconds(((1, 256),) * 8, 1)
    assert small_timer.num_blocks > calibration.MOST_TOKENS // 16


def test_what_is_printed(capsys):
    step = MeasuredStep(((1, 0.01), (512, 0.3)), 1e-4, 2e-6, 3e-6, 4e-8, (1e-4, 2e-3, 1e-6, 1e-7, 1e-7, 1e-9))
    found = Calibration(step, (0.01, -0.03, 0.02), (0.3, -0.5, 0.1), ((step_work([(1, 9)]), 0.01),) * 43)
    print_calibration(found)
    text = " ".join(capsys.readouterr().out.split())
    assert found.to_json()["timed"][0] == [1, 1, 9, 0, 0, 10.0] and found.to_json()["errors"]["worst"] == 0.03
    for said in ("40 batches fitted", "512 tokens 300.00 ms ± 2.00", "a sequence 100.0000 µs ± 1.0000",
                 "median error is 2.0%", "worst 3.0%", "30.0%, 50.0%"):  # fmt: skip
        assert said in text


@pytest.mark.parametrize("flags", [["--max-num-batched-tokens", "1"], ["--seconds", "0"], ["--max-num-seqs", "many"]])
def test_bad_flags_are_one_line(flags, capsys):
    with pytest.raises(SystemExit) as error:
        calibration.main(flags)
    assert error.value.code == 2 and flags[0] in capsys.readouterr().err


def test_bad_models_and_files_are_one_line(tmp_path):
    with pytest.raises(common.InputError, match="--model"):
        calibration.main(["--model", str(tmp_path / "none")])
    (tmp_path / "broken.json").write_text("[")
    with pytest.raises(common.InputError, match="--json"):
        calibration.main(["--json", str(tmp_path / "broken.json")])


@pytest.mark.slow
def test_a_tiny_model_is_calibrated(tmp_path, capsys):
    """The command from a folder to a file, on this machine, whatever it is like: no bound on the errors."""
    make_model("llama", tmp_path / "tiny")
    path = tmp_path / "rates.json"
    limits = ["--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "512", "--seconds", "2"]
    found = calibration.main(["--model", str(tmp_path / "tiny"), *limits, "--json", str(path)])
    stored = json.loads(path.read_text())[calibration.KEY]
    assert MeasuredStep.from_json(stored) == found.step and stored["errors"]["median"] >= 0
    assert dict(found.step.curve)[128] > 0 and all(getattr(found.step, name) >= 0 for name in RATES)
    assert "standard error" in capsys.readouterr().out

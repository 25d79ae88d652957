"""One batch, timed; and a grid of settings, searched under limits."""

from __future__ import annotations

import common

import itertools
import json
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.llm_engine import LLMEngine
from lab.bench import main
from lab.records import Record
from lab.simulated_engine import run_simulated
from lab.tuning import build_engine, engine_run, measure_latency, pareto, parse_limits, tune
from lab.workload import Prompt

# --- Tuning ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_the_front_is_what_nobody_beats(points):
    front = pareto(points)
    kept = [p for p, on in zip(points, front) if on]
    assert len(set(kept)) == len(kept)
    for cost, gain in points:
        assert any(c <= cost and g >= gain for c, g in kept), "everybody is on the front or behind someone on it"
    for (c, g), (d, h) in itertools.permutations(kept, 2):
        assert (c < d) == (g < h)


def measured(seats, budget):
    if budget < seats:
        raise common.InputError(f"max_num_batched_tokens {budget}: too small")
    return {
        "output_throughput": seats * 10,
        "request_goodput": 9 - seats,
        "p99_itl_ms": seats + budget,
        "p99_ttft_ms": None,
    }


def test_tune_chooses_within_the_limits():
    found = tune(measured, (1, 4, 8), (2, 8), {"itl": 13.0})
    assert [row.get("refused") is not None for row in found["rows"]] == [False, False, True, False, True, False]
    best = found["rows"][found["best"]]
    assert (best["max_num_seqs"], best["max_num_batched_tokens"]) == (4, 8)
    best = tune(measured, (1, 4, 8), (2, 8), {"itl": 13.0, "ttft": 1}, gain="request_goodput")
    assert best["rows"][best["best"]]["max_num_seqs"] == 1, "a metric that was not measured limits nobody"
    assert tune(measured, (1, 4), (2, 8), {"itl": 1.0})["best"] is None
    assert tune(measured, (8,), (2,), {})["best"] is None
    assert tune(measured, (1,), (2,), {"itl": 3.0})["best"] == 0, "a limit that is just kept"


def test_tune_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = "tune --simulate --max-num-seqs 2,8 --max-num-batched-tokens 256,1024 --num-prompts 24 --limit itl:60"
    main([*flags.split(), "--goodput", "ttft:5000", "--request-rate", "20", "--json", str(out)])
    text, found = capsys.readouterr().out, json.loads(out.read_text())["tune"]
    assert "Most request goodput under P99 itl ≤ 60 ms: --max-num-seqs 8" in text and found["simulated"] is True
    assert len(found["rows"]) == 4 and found["rows"][found["best"]]["max_num_seqs"] == 8
    main(["tune", "--simulate", "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--num-prompts", "8"])
    assert "refused: max_num_batched_tokens 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    "pair", ["ttft", "ttft:", "ttft:-1", "ttft:0", "ttft:x", "speed:3", "ttft:inf", "ttft:nan", ":5", "ttft:5x"]
)
def test_wrong_limits_are_named(pair):
    with pytest.raises(common.InputError, match="--goodput"):
        parse_limits([pair], "--goodput", ("ttft", "tpot", "e2el"))
    assert parse_limits(["ttft:200", "tpot:.5"], "--goodput", ("ttft", "tpot")) == {"ttft": 200.0, "tpot": 0.5}


# --- The real engine, offline ---------------------------------------------------------------------------------------


@pytest.fixture
def engine(tiny_model, real_model):
    return LLMEngine(
        tiny_model, real_model[1], max_model_len=64, max_num_seqs=4, max_num_batched_tokens=128,
        num_gpu_blocks_override=65,
    )  # fmt: skip


def test_an_engine_run_has_every_token_in_order(engine):
    rng = random.Random(0)
    prompts = [
        Prompt(rng.choices(range(64, 128), k=n), n, m) for n, m in ((3, 5), (9, 1), (4, 7), (2, 2), (5, 3), (1, 4))
    ]
    due = [0.0, 0.0, 0.0, 0.01, 0.2, 0.2]
    records = engine_run(engine, prompts, due)
    assert [r.output_tokens for r in records] == [p.output_len for p in prompts] == [len(r.times) for r in records]
    assert all(r.times == sorted(r.times) and r.times[0] > r.start == at for r, at in zip(records, due))
    assert not engine.has_unfinished_requests() and all(r.end == r.times[-1] for r in records)


def test_latency_has_vllms_keys(engine):
    found = measure_latency(engine, 3, 8, 4, num_iters=3, num_iters_warmup=1)
    assert {"avg_latency", "latencies", "percentiles"} <= set(found) and len(found["latencies"]) == 3
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert found["avg_latency"] == pytest.approx(statistics.fmean(found["latencies"]))
    assert 0 < found["median_ttft_ms"] < 1e3 * max(found["latencies"])
    assert found["output_throughput"] == pytest.approx(3 * 4 / found["avg_latency"])
    one = measure_latency(engine, 2, 8, 1, num_iters=1)
    assert one["median_tpot_ms"] is None, "one token has no next one"


def test_a_batch_lasts_until_its_last_answer_and_no_prompt_comes_twice(engine, monkeypatch):
    asked = []

    def run(engine, prompts, due):
        asked.extend(prompts)
        return [Record(0.0, 0.0, end, [1.0, end], 8, 4) for end in (2.0, 3.0)]

    monkeypatch.setattr("lab.tuning.engine_run", run)
    found = measure_latency(engine, 2, 8, 4, num_iters=3, num_iters_warmup=2)
    assert found["latencies"] == [3.0] * 3
    assert len({tuple(p.content) for p in asked}) == 10 and {p[1:] for p in asked} == {(8, 4)}


def test_the_engine_has_room_for_all_that_is_measured(monkeypatch):
    """Blocks for every seat, a budget for the whole batch or for the longest request, and no prefix cache."""
    monkeypatch.setattr("lab.tuning.make_engine", lambda args: args)
    args = build_engine(None, 33, 4, 64)
    assert (args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens) == (33, 4, 64)
    assert args.num_gpu_blocks_override - 2 == 4 * 3 and not args.enable_prefix_caching
    sizes, known = [], {"avg_latency": 1, "percentiles": {"99": 1}, "output_throughput": 1, "median_ttft_ms": 1,
                        "median_tpot_ms": 1}  # fmt: skip
    monkeypatch.setattr("lab.tuning.build_engine", lambda model, *size: sizes.append(size))
    monkeypatch.setattr("lab.tuning.measure_latency", lambda *args: known)
    for n_in, n_out in ((8, 4), (2, 40)):
        main(["bench", "latency", "--batch-size", "3", "--input-len", str(n_in), "--output-len", str(n_out)])
    assert sizes == [(12, 3, 24), (42, 3, 42)]


def test_tune_asks_for_what_it_is_told_to(monkeypatch, capsys):
    seen, run = [], run_simulated
    monkeypatch.setattr("lab.tuning.run_simulated", lambda *args: seen.append(args) or run(*args))
    flags = "tune --simulate --max-num-seqs 4 --max-num-batched-tokens 512 --num-prompts 40 --input-tokens 100"
    main([*flags.split(), "--output-tokens", "10", "--request-rate", "20", "--limit", "itl:60",
                 "--limit-percentile", "90"])  # fmt: skip
    ((prompts, due, seats, budget),) = seen
    assert (len(due), due[-1], seats, budget) == (40, 2_000_000, 4, 512)
    assert all(50 <= p.input_len <= 150 and 5 <= p.output_len <= 15 for p in prompts)
    assert "under P90 itl ≤ 60 ms: --max-num-seqs 4" in capsys.readouterr().out


@pytest.mark.slow
def test_the_engine_that_is_served_can_be_tuned(capsys, tmp_path):
    out = str(tmp_path / "out.json")
    flags = "tune --max-num-seqs 1,4 --max-num-batched-tokens 32,64 --num-prompts 4 --input-tokens 24 --output-tokens 4"
    main([*flags.split(), "--json", out])
    rows = json.loads((tmp_path / "out.json").read_text())["tune"]["rows"]
    assert [row["completed"] for row in rows] == [4] * 4 and "Most output throughput" in capsys.readouterr().out
    flags = "bench latency --batch-size 2 --input-tokens 8 --output-tokens 4 --num-iters 2 --num-iters-warmup 0"
    main([*flags.split(), "--json", out])
    assert len(json.loads((tmp_path / "out.json").read_text())["bench latency"]["latencies"]) == 2

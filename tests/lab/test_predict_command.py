"""`python -m vllm predict` and `predict fit`: the answers, what is refused, and how far off they are on real runs."""

from __future__ import annotations

import common

import json
import re
import shlex

import numpy as np
import pytest

from lab import figures, predict_command
from lab.predict_setup import served_by
from lab.prediction_report import RULES, read_llmservingsim
from support import synthetic_run

LOGS = common.ROOT.parent / "shared" / "latency_logs"
RUNS = {"rtx4090_llama31_8b": "", "rtxpro6000_qwen3_32b_tp2": "--gpu 'RTX PRO 6000'"}
EXAMPLE = synthetic_run.FOLDER / "requests.jsonl"
SMALL = "--model Llama-3.2-1B --gpu A10 --num-prompts 12 --request-rate 20 --input-len 100 --output-len 8"


def ask(words, tmp_path=None):
    """What `predict` adds to a file."""
    extra = [] if tmp_path is None else ["--json", str(tmp_path / "found.json")]
    predict_command.main([*shlex.split(words), *extra])
    return json.loads((tmp_path / "found.json").read_text()) if tmp_path else {}


def refusal(words, capsys):
    """The one line that it ends with."""
    try:
        predict_command.main(shlex.split(words))
    except common.InputError as error:
        line = str(error)
    except SystemExit as error:
        assert error.code == 2
        line = capsys.readouterr().err.strip()
    else:
        raise AssertionError("it was not refused")
    assert "\n" not in line and "Traceback" not in line
    return line


# --- predict --------------------------------------------------------------------------------------------------------


def test_a_described_workload(tmp_path, capsys):
    found = ask(SMALL, tmp_path)["predict"]
    assert found["num_requests"] == 12 and found["preemptions"] == 0
    assert 0 < found["ttft"]["median"] <= found["ttft"]["p99"] < found["e2el"]["mean"]
    assert found["e2el"]["mean"] == pytest.approx(found["ttft"]["mean"] + 7 * found["tpot"]["mean"])
    shown = capsys.readouterr().out
    assert f"{found['ttft']['mean']:,.1f}" in shown and "A10 24GB" in shown and "Lengths are drawn" not in shown
    shares = [sum(share for name, share in kind.items() if name != "seconds") for kind in found["time"].values()]
    assert shares == pytest.approx([1.0, 1.0])


def test_the_same_seed_gives_the_same_answer_and_another_another(tmp_path):
    words = SMALL + " --random-cv 1 --seed "
    first, again, other = (ask(words + seed, tmp_path)["predict"] for seed in ("1", "1", "2"))
    assert first == again != other
    low, high = first["band"]["median_ttft_ms"]
    assert low <= first["ttft"]["median"] <= high and low < high


def test_lengths_that_nobody_knows_are_drawn_and_said(tmp_path, capsys):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"input_toks": 50 + i}) + "\n" for i in range(10)))
    found = ask(f"{path} --request-rate 10 --model Llama-3.2-1B --gpu A10 --output-len 20", tmp_path)["predict"]
    assert found["num_requests"] == 10 and found["band"]["p99_e2el_ms"][1] > found["band"]["p99_e2el_ms"][0]
    assert "Lengths are drawn: over 5 draws" in " ".join(capsys.readouterr().out.split())


def test_shared_prefixes_shorten_prompts(tmp_path):
    words = SMALL.replace("--input-len 100", "--input-len 32 --prefix-len 320")
    shared = ask(words, tmp_path)["predict"]
    without = ask(words + " --no-enable-prefix-caching", tmp_path)["predict"]
    assert without["prefix_hit_rate"] == 0 < 0.7 < shared["prefix_hit_rate"] < 320 / 352
    assert shared["ttft"]["mean"] < without["ttft"]["mean"]


def test_settings_side_by_side_and_the_best(tmp_path, capsys):
    words = SMALL.replace("--request-rate 20", "--request-rate inf") + " --slo ttft=1000,tpot=5000"
    words += " --max-num-batched-tokens 2048"
    found = ask(words + " --compare max-num-seqs=1,12,4000", tmp_path)["predict"]
    assert found["best"] == "12" and "refused" in found["answers"]["4000"]
    one, all_at_once = (found["answers"][value] for value in ("1", "12"))
    assert one["running"]["max"] == 1 and all_at_once["running"]["max"] == 12
    assert one["waiting_for"]["seats"] > 0.5 > all_at_once["waiting_for"]["seats"]
    assert one["tpot"]["mean"] < all_at_once["tpot"]["mean"] and one["ttft"]["p99"] > all_at_once["ttft"]["p99"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "within ttft ≤ 1000 ms and tpot ≤ 5000 ms: --max-num-seqs 12" in shown


def test_goodput_counts_who_keeps_all_limits(tmp_path):
    found = ask(SMALL, tmp_path)["predict"]
    limit = found["ttft"]["median"]
    half = ask(f"{SMALL} --slo ttft={limit:.6f},e2el=100000", tmp_path)["predict"]
    assert 0.4 < half["within_slo"] < 0.6
    assert half["request_goodput"] == pytest.approx(half["within_slo"] * 12 / half["duration"])


def test_the_pool_of_engines_that_share_experts_is_all_of_theirs(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, *_: drawn.append(figure))
    words = SMALL.replace("Llama-3.2-1B", "Qwen3-30B-A3B").replace("A10", "B200")
    found = ask(f"{words} -dp 2 --num-gpu-blocks-override 9 --figure {tmp_path}", tmp_path)["predict"]
    (grey,) = drawn[0].axes[2].collections
    assert grey.get_paths()[0].vertices[:, 1].max() == pytest.approx(found["kv_cache_usage"]["max"])


def test_the_figure_is_drawn(tmp_path):
    ask(f"{SMALL} --figure {tmp_path}")
    assert (tmp_path / "prediction.svg").stat().st_size > 10_000


@pytest.mark.parametrize(
    "words, named",
    [
        ("--request-rate 5", "--model"),
        ("--request-rate 5 --model Llama-3.1-8B", "--gpu"),
        ("--model Llama-3.1-8B --gpu H100", "WORKLOAD or --request-rate"),
        (SMALL.replace("A10", "TPU"), "--gpu 'TPU': must be one of A10 24GB"),
        (SMALL.replace("Llama-3.2-1B", "GPT-9"), "--model 'GPT-9'"),
        (SMALL.replace("--request-rate 20", "--request-rate -1"), "--request-rate"),
        (SMALL.replace("Llama-3.2-1B", "Llama-3.1-70B"), "leave no KV blocks"),
        (SMALL + " --max-model-len 100", "100"),
        (SMALL + " --num-gpu-blocks-override 4", "KV blocks, there are 3"),
        (SMALL + " --max-num-seqs 64 --max-num-batched-tokens 32", "max_num_batched_tokens 32"),
        (SMALL + " --slo ttft", "--slo"),
        (SMALL + " --slo latency=3", "ttft, tpot, e2el"),
        (SMALL + " --compare colour=red,blue", "--compare"),
        (SMALL + " --compare max-num-seqs", "--compare"),
        (SMALL + " --compare max-num-seqs=many", "--max-num-seqs"),
        (SMALL + f" --compare max-num-seqs=1,2 --against {EXAMPLE}", "--against"),
        (SMALL + " --compare max-num-seqs=1,2 --figure .", "--figure"),
        (SMALL + " --compare max-model-len=90,95", "every value is refused"),
        (f"{EXAMPLE} --request-rate 5", "--request-rate"),
        (f"{EXAMPLE} --compare request-rate=5,6", "--request-rate"),
        (SMALL + " -tp 3", "--tensor-parallel-size 3: must divide the model's 32 heads"),
        (SMALL + " --max-num-batched-tokens 100000000", "max_num_batched_tokens 100000000"),
        (SMALL + " --rates none.json", "none.json"),
        (SMALL + " --random-cv 1 --random-range-ratio 0.5", "--random-cv"),
        ("none.jsonl", "none.jsonl"),
        ("fit none.jsonl", "none.jsonl"),
        ("fit", "REQUESTS.jsonl"),
        (f"fit {EXAMPLE} --first 1", "--first"),
        (f"fit {EXAMPLE} --no-such-flag", "--no-such-flag"),
    ],
)
def test_wrong_input_gets_one_line(capsys, words, named):
    assert named in refusal(words, capsys)


# --- predict fit ----------------------------------------------------------------------------------------------------


def test_fit_then_predict_with_its_rates(tmp_path, capsys):
    ask(f"fit {EXAMPLE} --first 40 --figure {tmp_path}", tmp_path)
    shown = capsys.readouterr().out
    assert "Fitted to the first 40 requests; of 60" in shown and "the guess" in shown
    assert (tmp_path / "prediction_fit.svg").exists()
    fitted = json.loads((tmp_path / "found.json").read_text())["predict fit"]
    assert all(abs(off) < 0.03 for rules in fitted["errors"].values() for off in rules.values())
    found = ask(f"{EXAMPLE} --rates {tmp_path / 'found.json'} --cold-start --against {EXAMPLE}", tmp_path)
    percents = re.findall(r"([-+][\d.]+)%", capsys.readouterr().out)
    assert len(percents) == 12 and all(abs(float(off)) < 3 for off in percents)
    told = [off for rules in found["predict"]["errors"].values() for off in rules.values()]
    assert sorted(f"{off:+.1%}" for off in told) == sorted(f"{percent}%" for percent in percents)


def test_all_requests_are_predicted_from_the_times_of_the_first(tmp_path, capsys):
    lines = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    later = [{name: line[name] for name in ("input_toks", "output_toks", "arrival_time")} for line in lines[40:]]
    some = tmp_path / "requests.jsonl"
    some.write_text("".join(json.dumps(line) + "\n" for line in lines[:40] + later))
    meta = f"--first 40 --meta {EXAMPLE.with_name('meta.json')}"
    whole = ask(f"fit {EXAMPLE} {meta}", tmp_path)["predict fit"]
    capsys.readouterr()
    found = ask(f"fit {some} {meta}", tmp_path)["predict fit"]
    assert found["predicted"] == whole["predicted"] and found["errors"] != whole["errors"]
    assert found["predicted"]["e2el"]["p99"] > found["predicted"]["e2el"]["mean"]
    shown = capsys.readouterr().out
    assert "of 40, 60 in the workload" in shown and "predicted, all" in shown
    for name in ("ttft", "e2el"):
        assert all(f" {milliseconds:,.1f} " in shown for milliseconds in found["predicted"][name].values())


def test_answers_of_one_token_have_no_time_per_token(tmp_path, capsys):
    lines = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    once = tmp_path / "requests.jsonl"
    once.write_text("".join(json.dumps(line | {"output_toks": 1, "last_token_ts": line["first_token_ts"]}) + "\n"
                            for line in lines))  # fmt: skip
    ask(f"{once} --meta {EXAMPLE.with_name('meta.json')} --against {once}")
    shown = capsys.readouterr().out
    assert re.search(r"time per output token +p99 +0.0 +0.0 +–", shown) and re.search(r"end to end +p99 .*%", shown)


def test_meta_says_what_serves_a_described_workload(tmp_path):
    meta = EXAMPLE.with_name("meta.json")
    found = ask(f"--meta {meta} --request-rate 9 --num-prompts 5 --input-len 64 --output-len 4", tmp_path)
    assert found["predict"]["num_requests"] == 5


def test_no_setting_is_the_best_where_none_keeps_the_limits(tmp_path, capsys):
    found = ask(SMALL + " --compare max-num-seqs=4,8 --slo ttft=0.001", tmp_path)["predict"]
    assert found["best"] is None and "ttft ≤ 0.001 ms: nothing" in capsys.readouterr().out


def test_rates_that_are_none_are_refused(tmp_path, capsys):
    path = tmp_path / "rates.json"
    path.write_text("[" * 100_000)
    assert "not readable as JSON" in refusal(f"{SMALL} --rates {path}", capsys)
    path.write_text(json.dumps({"predict fit": {"rates": {"weights": 10**400}}}))
    assert "not what `predict fit --json` writes" in refusal(f"{SMALL} --rates {path}", capsys)
    path.write_text('{"predict fit": {"rates": {}, "sigma": {}}}')
    assert "not what `predict fit --json` writes" in refusal(f"{SMALL} --rates {path}", capsys)


def test_against_wants_the_same_requests(tmp_path, capsys):
    words = f"{EXAMPLE} --against {tmp_path / 'other.jsonl'}"
    (tmp_path / "other.jsonl").write_text(EXAMPLE.read_text().split("\n")[0])
    assert "has 1 requests, and 60 are predicted" in refusal(words, capsys)


def test_the_other_simulators_errors_are_read(tmp_path):
    path = tmp_path / "summary.txt"
    path.write_text("Metric  vLLM  Sim  Diff%\n----\nTTFT Mean   65456.6   65820.2   +0.6%\n"
                    "TPOT P99   56.0  56.5  -0.9%\nLatency Median 1.0 2.0 +100.0%\n")  # fmt: skip
    found = read_llmservingsim(path)
    assert found == {"ttft": {"mean": 0.006}, "tpot": {"p99": pytest.approx(-0.009)}, "e2el": {"median": 1.0}}
    assert read_llmservingsim(tmp_path / "none.txt") == {}


@pytest.mark.slow
@pytest.mark.skipif(not LOGS.is_dir(), reason="needs ../shared/latency_logs")
@pytest.mark.parametrize("name", RUNS)
def test_real_runs_are_predicted_from_their_first_100_requests(name, tmp_path):
    """Means and medians within 5 %, p99 within 10 %, of all 300 requests."""
    fitted = ask(f"fit {LOGS / name / 'requests.jsonl'} {RUNS[name]}", tmp_path)["predict fit"]
    for latency in ("ttft", "e2el", "tpot"):
        for rule in RULES:
            assert abs(fitted["errors"][latency][rule]) <= (0.1 if rule == "p99" else 0.05), (latency, rule)


@pytest.mark.skipif(not LOGS.is_dir(), reason="needs ../shared/latency_logs")
def test_vllms_column_of_the_summary_counts_from_queued():
    """The definition of the latencies: the numbers that LLMServingSim's table has for the real server."""
    for name in RUNS:
        rows = [json.loads(line) for line in (LOGS / name / "requests.jsonl").read_text().splitlines()]
        ttft = np.array([row["first_token_ts"] - row["queued_ts"] for row in rows]).mean()
        assert f"{1e3 * ttft:.1f}" in (LOGS / name / "llmservingsim_summary.txt").read_text()


@pytest.mark.parametrize(
    "part, wrong",
    [("engine_kwargs", {"max_num_seqs": "many"}), ("engine_kwargs", {"tensor_parallel_size": 0}),
     ("engine_kwargs", {"tensor_parallel_size": 10**400}), ("engine_kwargs", {"data_parallel_size": 10**9}),
     ("engine_kwargs", {"async_scheduling": "no"}), ("engine_kwargs", {"enable_prefix_caching": "false"}),
     ("engine_kwargs", {"watermark": "low"}), ("engine_kwargs", {"kv_cache_dtype": "int3"}),
     ("engine_kwargs", {"num_gpu_blocks_override": 10**12}), ("engine_kwargs", {"block_size": 10**30}),
     ("engine_kwargs", {"pipeline_parallel_size": 2}), ("engine_kwargs", {"speculative_config": {"method": "ngram"}}),
     ("kv_cache", {"block_size": 1.5}), ("kv_cache", {"gpu_memory_utilization": 2}), ("engine_kwargs", {"model": 3}),
     ("hardware", {"device_total_memory_bytes": -1}), ("hardware", {"device_name": ["L4"]})],
)  # fmt: skip
def test_a_meta_with_a_wrong_value_is_refused(tmp_path, capsys, part, wrong):
    meta = synthetic_run.META | {part: synthetic_run.META[part] | wrong}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    line = refusal(f"{EXAMPLE} --meta {tmp_path / 'meta.json'}", capsys)
    name = next(iter(wrong)).replace("device_total_memory_bytes", "gpu_memory").replace("device_name", "gpu")
    assert name in line and "must be" in line


@pytest.mark.parametrize(
    "words, seqs, budget",
    [
        ("--gpu H100", 1024, 8192),
        ("--gpu 'RTX 4090'", 256, 2048),
        ("--gpu H100 --max-num-batched-tokens 512", 512, 512),
        ("--gpu A10 --no-enable-chunked-prefill --max-model-len 4096", 256, 4096),
        ("--gpu A10 --max-num-seqs 4 --max-model-len 100", 4, 400),
    ],
)
def test_limits_that_nobody_sets_are_those_of_vllms_server(words, seqs, budget):
    """`_set_default_max_num_seqs_and_batched_tokens_args` in vLLM 0.32's `vllm/engine/arg_utils.py`."""
    args = predict_command.fit_parser().parse_args(["x", "--model", "Llama-3.2-1B", *shlex.split(words)])
    limits = served_by(args, {}).setup.scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (seqs, budget)


# --- the pool -------------------------------------------------------------------------------------------------------


def test_the_blocks_of_a_card_are_reckoned_nearly_as_vllm_found_them():
    """vLLM 0.19 on the RTX 4090 of the latency logs: 2,588 blocks, of 25,250,627,584 bytes."""
    args = predict_command.fit_parser().parse_args(["x", "--model", "Llama-3.1-8B"])
    hardware = {"device_name": "NVIDIA GeForce RTX 4090", "device_total_memory_bytes": 25_250_627_584}
    engine = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.9}
    meta = {"hardware": hardware, "engine_kwargs": engine}
    served = served_by(args, meta)
    assert not served.blocks_are_known and served.setup.num_blocks == pytest.approx(2588, rel=0.02)
    engine["quantization"] = "fp8"
    assert served_by(args, meta).model.costs.bytes_kept == served.model.costs.bytes_kept / 2
    del engine["quantization"]
    twice = served_by(predict_command.fit_parser().parse_args(["x", "--model", "Llama-3.1-8B", "-tp", "2"]), meta)
    assert twice.setup.num_blocks > 4 * served.setup.num_blocks

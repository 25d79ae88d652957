"""`requests.jsonl` and `meta.json`: what is read, and what is refused in one line."""

from __future__ import annotations

import common

import json

import numpy as np
import pytest

from lab.request_logs import meta_settings, read_log

LINE = {"input_toks": 5, "output_toks": 3, "arrival_time": 100.5, "queued_ts": 7.0, "scheduled_ts": 7.5,
        "first_token_ts": 8.0, "last_token_ts": 9.0}  # fmt: skip


def log_of(tmp_path, *rows, meta=None):
    path = tmp_path / "requests.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    if meta is not None:
        (tmp_path / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    return read_log(path)


def test_two_clocks_are_set_by_whoever_was_heard_of_soonest(tmp_path):
    later = LINE | {"arrival_time": 102.0, "queued_ts": 8.2, "scheduled_ts": 9.0, "first_token_ts": 9.5,
                    "last_token_ts": 9.75}  # fmt: skip
    log = log_of(tmp_path, later, LINE)  # in order of arrival, whatever the file's
    assert [row.arrival for row in log.rows] == [100.5, 102.0]
    seen = log.observed(2)  # the second waited for no time, so the first for 0.3 s
    assert np.allclose([seen.queued, seen.scheduled], [[0.3, 1.5], [0.8, 2.3]])
    assert np.allclose([seen.first, seen.last], [[1.3, 2.8], [2.3, 3.05]])
    assert len(log.observed(1)) == 1 and log.observed(1).queued.tolist() == [0.0]


def test_a_workload_needs_lengths_alone(tmp_path):
    (row,) = log_of(tmp_path, {"input_toks": 5}, "").rows
    assert (row.output_len, row.arrival, row.times) == (None, None, None)
    (row,) = log_of(tmp_path, {"input_toks": 5, "prefix_toks": 4, "prefix_id": 2}).rows
    assert (row.prefix_len, row.prefix_id) == (4, 2)


@pytest.mark.parametrize(
    "rows, named",
    [
        ([], "holds no request"),
        (["{"], "line 1: not readable as JSON"),
        ([LINE, "[]"], "line 2: must be a JSON object"),
        ([{"output_toks": 5}], "input_toks: is missing"),
        ([LINE | {"input_toks": 0}], "input_toks 0: must be a whole number from 1"),
        ([LINE | {"input_toks": True}], "input_toks True"),
        ([LINE | {"output_toks": 2.5}], "output_toks 2.5"),
        ([LINE | {"arrival_time": -1}], "arrival_time -1: must be seconds, 0 or above"),
        ([LINE | {"arrival_time": float("nan")}], "arrival_time nan"),
        ([LINE | {"arrival_time": 10**400}], "arrival_time 1000"),
        ([LINE | {"arrival_time": 1_787_267_980_082}], "must be seconds"),
        ([LINE | {"prefix_toks": 6}], r"prefix_toks 6: must be at most input_toks \(5\)"),
        ([LINE | {"last_token_ts": 7.75}], "must not go back in time"),
        ([LINE, {"input_toks": 5}], "arrival_time: must be in all lines, or in none"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, rows, named):
    with pytest.raises(common.InputError, match=named) as caught:
        log_of(tmp_path, *rows)
    assert "\n" not in str(caught.value)


def test_a_request_without_times_cannot_be_fitted(tmp_path):
    log = log_of(tmp_path, LINE, {"input_toks": 5, "arrival_time": 101.0})
    assert len(log.observed(1)) == 1
    with pytest.raises(common.InputError, match=r"request 2 .* scheduled_ts"):
        log.observed(2)


@pytest.mark.parametrize("meta", ["{", "[]", '{"kv_cache": 3}'])
def test_a_wrong_meta_is_named(tmp_path, meta):
    with pytest.raises(common.InputError, match=r"meta\.json"):
        log_of(tmp_path, LINE, meta=meta)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(common.InputError, match="not readable"):
        read_log(tmp_path / "none.jsonl")
    log_of(tmp_path, LINE)
    with pytest.raises(common.InputError, match="not readable"):
        read_log(tmp_path / "requests.jsonl", tmp_path / "none.json")


def test_clocks_at_zero_have_shown_nothing(tmp_path):
    nothing = {"queued_ts": 0.0, "scheduled_ts": 0.0, "first_token_ts": 0.0, "last_token_ts": 0.0}
    assert [row.times is None for row in log_of(tmp_path, LINE, LINE | nothing).rows] == [False, True]


def test_the_blocks_of_a_meta_are_those_of_all_engines():
    meta = {"engine_kwargs": {"data_parallel_size": 2}, "kv_cache": {"num_gpu_blocks": 5001}}
    assert meta_settings(meta)["num_gpu_blocks_override"] == 2500
    meta["engine_kwargs"]["num_gpu_blocks_override"] = 3000
    assert meta_settings(meta)["num_gpu_blocks_override"] == 3000


def test_what_a_meta_says_by_the_names_of_flags():
    found = meta_settings({
        "model": "a/b", "vllm_version": "0.19.0", "engine_kwargs": {"max_num_seqs": 8, "max_model_len": None},
        "kv_cache": {"num_gpu_blocks": 99, "block_size": 32, "enable_prefix_caching": False},
        "hardware": {"device_name": "NVIDIA L4", "device_total_memory_bytes": 5},
    })  # fmt: skip
    assert found == {
        "model": "a/b", "max_num_seqs": 8, "num_gpu_blocks_override": 99, "block_size": 32,
        "enable_prefix_caching": False, "gpu_memory_utilization": 0.9, "gpu": "NVIDIA L4", "gpu_memory": 5,
    }  # fmt: skip
    assert "gpu_memory_utilization" not in meta_settings({"vllm_version": "0.32.0"})

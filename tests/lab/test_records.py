"""What a run is summed up to: exact where truth is known, and a wrong answer never counts as a fast one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.records import Record, concurrency, percentile, summarize
from support.bench import hand_made

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(numbers, st.floats(0, 100))
def test_percentiles_are_numpys(values, p):
    assert percentile(values, p) == pytest.approx(np.percentile(values, p), rel=1e-9, abs=1e-6)


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=12)


@given(spans)
def test_concurrency_is_counted_instant_by_instant(pairs):
    found = [(start, start + length) for start, length in pairs]
    peak, area = concurrency(found)
    in_flight = [sum(a <= t < b for a, b in found) for t in range(50)]
    assert area == sum(in_flight) == sum(b - a for a, b in found), "Little: the integral is the sum of times"
    assert peak == max(in_flight) or (peak == 1 and not any(in_flight))  # a span of length 0 is there and gone


def test_counting_by_whole_seconds_is_no_concurrency():
    """What vLLM's max_concurrent_requests does: ten requests one after the other within a second count as ten."""
    in_turn = [(i / 10, i / 10 + 0.09) for i in range(10)]
    by_seconds = Counter(s for a, b in in_turn for s in range(int(a), int(b) + 1))
    assert concurrency(in_turn)[0] == 1 and max(by_seconds.values()) == 10


def test_numbers_of_a_hand_made_run():
    found = summarize(hand_made(), percentiles=(50, 90))
    assert (found["duration"], found["completed"], found["failed"], found["failures"]) == (3.5, 2, 1, {"truncated": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 6), "a failure's tokens do not count"
    assert found["request_throughput"] == 2 / 3.5 and found["output_throughput"] == 6 / 3.5
    assert found["total_token_throughput"] == 36 / 3.5
    assert found["max_concurrent_requests"] == 3 and found["mean_concurrency"] == pytest.approx((3 + 1 + 0.1) / 3.5)
    want = {"ttft": [500, 1000], "tpot": [625], "itl": [500, 2000], "e2el": [3000, 1000]}
    want |= {"client_queue_time": [500, 0], "e2el_including_client_queue": [3500, 1000]}
    for name, values in want.items():
        assert found[f"mean_{name}_ms"] == pytest.approx(np.mean(values)), name
        assert found[f"median_{name}_ms"] == found[f"p50_{name}_ms"] == pytest.approx(np.median(values)), name
        assert found[f"std_{name}_ms"] == pytest.approx(np.std(values)), name
        assert found[f"p90_{name}_ms"] == pytest.approx(np.percentile(values, 90)), name
    assert found["output_tokens_per_chunk"] == 6 / 4
    assert found["max_output_tokens_per_s"] == pytest.approx(1 + 5 / 3)  # from 1.5 to 2.5
    longer = summarize(hand_made(), 7.0)
    assert longer["request_throughput"] == 2 / 7 and longer["mean_concurrency"] == pytest.approx(4.1 / 7)


def test_a_failure_counts_in_time_and_a_connection_that_stays_open_does_not():
    """The run lasts until the last has failed; an answer until its last text. Two tokens have one time between them."""
    found = summarize([Record(1.0, 1.5, 4.0, [2.2, 2.4], 10, 2), Record(0.25, 0.25, 9.0, error="timeout")])
    assert found["duration"] == 9 and found["mean_concurrency"] == pytest.approx((2.5 + 8.75) / 9)
    assert [round(found[f"mean_{name}_ms"]) for name in ("tpot", "e2el", "e2el_including_client_queue")] == [
        200, 900, 1400]  # fmt: skip
    assert found["max_output_tokens_per_s"] == 1, "seconds are counted from the first request, 1.95 and 2.15 after it"


def test_keys_are_vllms():
    """Names of `vllm bench serve`'s result, where the meaning is the same (0.32, benchmarks/serve.py)."""
    names = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
    vllm = {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
        "max_concurrent_requests",
        *(f"{rule}_{name}_ms" for rule in ("mean", "median", "std", "p99", "p99.9") for name in names),
    }  # fmt: skip
    ours = {"failures", "mean_concurrency", "output_tokens_per_chunk"}
    assert set(summarize(hand_made(), percentiles=(99, 99.9))) == vllm | ours


def test_nothing_measured_is_not_zero():
    failed = [Record(0.0, 0.0, 1.0, error="http 500")]
    found = summarize(failed, goodput={"ttft": 1e9})
    assert found["completed"] == 0 and found["request_goodput"] == 0
    assert found["mean_ttft_ms"] is None and found["p99_e2el_ms"] is None and found["output_tokens_per_chunk"] is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 500}, 1), ({"ttft": 499.9}, 0), ({"ttft": 1000}, 2), ({"tpot": 625}, 2), ({"tpot": 624.9}, 1),
        ({"e2el": 1000}, 1), ({"e2el": 3000}, 2), ({"ttft": 500, "e2el": 1000}, 0), ({"ttft": 1000, "tpot": 600}, 1),
    ],
)  # fmt: skip
def test_goodput_by_hand(limits, good):
    """A limit is kept when met exactly, all must hold at once, and one token has no TPOT to miss."""
    assert summarize(hand_made(), goodput=limits)["request_goodput"] * 3.5 == pytest.approx(good)

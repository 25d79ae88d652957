"""Where the histograms have their boundaries."""

from __future__ import annotations

import pytest

from engine.serving import metrics


@pytest.mark.parametrize(("boundaries", "last"), [(metrics.ANSWERS, 20), (metrics.REQUEST_TOKENS, 10_000)])
def test_counts_have_the_boundaries_one_two_five(boundaries, last):
    """vLLM's `build_1_2_5_buckets`."""
    series = (digit * 10**power for power in range(6) for digit in (1, 2, 5))
    assert list(boundaries) == [bound for bound in series if bound <= last]


@pytest.mark.parametrize("name", ["LATENCY", "FIRST_TOKEN", "BETWEEN_TOKENS", "STEP_TOKENS", "PREEMPTIONS"])
def test_boundaries_rise(name):
    boundaries = getattr(metrics, name)
    assert list(boundaries) == sorted(set(boundaries)) and boundaries[0] > 0

"""Bytes on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.links import wire_bytes


@given(st.integers(1, 9), st.integers(1, 50))
def test_wire_bytes_by_counting_a_ring(n, chunk):
    """Whoever is interested counts: 2(n − 1) rounds, one chunk each."""
    assert wire_bytes("all_reduce", n * chunk, n) == pytest.approx(sum(chunk for _ in range(2 * (n - 1))))
    assert wire_bytes("all_gather", n * chunk, n) == pytest.approx(chunk * (n - 1))

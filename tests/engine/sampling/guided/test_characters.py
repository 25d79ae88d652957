"""Ranges of code points."""

from __future__ import annotations

import pytest

from engine.sampling.guided.characters import LAST, complement


@pytest.mark.parametrize(
    ("ranges", "others"),
    [
        ([], [(0, LAST)]),
        ([(0, LAST)], []),
        ([(0, 4)], [(5, LAST)]),
        ([(9, LAST)], [(0, 8)]),
        ([(7, 9), (2, 3)], [(0, 1), (4, 6), (10, LAST)]),
        ([(2, 8), (3, 4), (9, 9)], [(0, 1), (10, LAST)]),
    ],
)
def test_the_complement_is_all_the_others(ranges, others):
    assert complement(ranges) == others

"""How deep a pattern may nest."""

from __future__ import annotations

import common

import pytest

from engine.sampling.guided import limits
from engine.sampling.guided.regex import parse_regex


@pytest.mark.parametrize(
    ("opening", "closing", "levels"),
    [("(", ")", 1), ("(bc|", ")", 2), ("(", ")*", 2), ("(bc|", ")*", 3)],
    ids=["groups", "alternatives", "repeats", "repeated alternatives"],
)
def test_a_pattern_nests_as_deep_as_it_may(opening, closing, levels):
    """Each pair of parentheses is a level, and so is what it is for."""
    most = limits.MAX_DEPTH // levels
    assert parse_regex(opening * most + "a" + closing * most)
    with pytest.raises(common.InputError, match=f"nests more than {limits.MAX_DEPTH} deep"):
        parse_regex(opening * (most + 1) + "a" + closing * (most + 1))

"""Parameters of tests by tier."""

from __future__ import annotations

import pytest


def and_slowly(fast, slow, long=()):
    """Some, in the slow tier those as well, and on demand more of their kind."""
    slow = [pytest.param(*each, marks=pytest.mark.slow) for each in slow]
    return [*fast, *slow, *(pytest.param(*each, marks=pytest.mark.long) for each in long)]

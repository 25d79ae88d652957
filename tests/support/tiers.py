"""Parameters of tests by tier."""

from __future__ import annotations

import pytest

ALONE = [pytest.mark.slow, pytest.mark.alone]


def and_slowly(fast, slow):
    """Some, and in the slow tier those as well."""
    return [*fast, *(pytest.param(*each, marks=pytest.mark.slow) for each in slow)]

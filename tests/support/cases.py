"""Many cases of one cheap check in one test: a test of its own for each would cost more than the check."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def named(*case: object) -> Iterator[None]:
    """What fails inside says of which case."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        error.add_note("the case: " + ", ".join(repr(each)[:300] for each in case))
        raise

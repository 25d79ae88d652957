"""How many may be inside."""

from __future__ import annotations

import contextlib

import pytest

from engine.errors import QueueOverflowError
from engine.serving.admission import AdmissionControl


@pytest.mark.parametrize(("bound", "inside", "n", "full"), [(None, 10**6, 9, False), (4, 3, 1, False), (4, 4, 1, True),
                                                            (4, 0, 4, False), (4, 2, 3, True)])  # fmt: skip
def test_admission(bound, inside, n, full):
    admission = AdmissionControl(bound)
    with pytest.raises(QueueOverflowError) if full else contextlib.nullcontext():
        admission.check(inside, n)
    assert admission.num_rejected == (n if full else 0)


@pytest.mark.parametrize(("bound", "held"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_half_of_all_places_may_be_held(bound, held):
    """Rounded up; the first who comes may hold more than that."""
    admission = AdmissionControl(bound)
    with admission.hold(0, held):
        with pytest.raises(QueueOverflowError), admission.hold(0, 1):
            pass
        assert admission.num_held == held and admission.num_rejected == 1
    if held > 1:
        with admission.hold(0, held - 1), admission.hold(0, 1):
            assert admission.num_held == held
    with admission.hold(0, bound):
        assert admission.num_held == bound
    assert admission.num_held == 0 and admission.num_rejected == 1

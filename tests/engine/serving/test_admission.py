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

"""Close enough: within the one table of tolerances."""

from __future__ import annotations

import common

import torch


def assert_close(out: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype | None = None) -> float:
    """Relative error of `out` against `ref`, which must be within `TOLERANCE` of `dtype` (default: that of `out`)."""
    tolerance = common.TOLERANCE[dtype or out.dtype]
    error = common.relative_error(out, ref)
    if not error <= tolerance:
        raise AssertionError(f"relative error {error:.3g} exceeds {tolerance:g}")
    return error


class Close(float):
    """Equal up to how products of other shapes round."""

    def __eq__(self, other):
        return abs(self - other) < 5e-4

    __hash__ = None

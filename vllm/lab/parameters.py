"""A simulation's parameters: the fields of a widget's controls, each with its allowed values."""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

from collections.abc import Sequence
from typing import Any


def checked(params: dict[str, Any], allowed: dict[str, Sequence[Any]]) -> dict[str, Any]:
    """A copy of `params` if it has exactly the fields of `allowed`, each with one of its allowed values.

    `allowed[name]` is a range, or the choices in a sequence. Raises InputError naming the field and what is allowed.
    """
    if not isinstance(params, dict):
        raise common.InputError(f"parameters {params!r:.60}; allowed: an object with {', '.join(allowed)}")
    for name in [*params, *allowed]:
        if name not in allowed or name not in params:
            problem = "missing" if name in allowed else "no such parameter"
            raise common.InputError(f"{name}: {problem}; allowed: {', '.join(allowed)}")
        value, values = params[name], allowed[name]
        kinds = {int} if isinstance(values, range) else set(map(type, values))
        if type(value) not in (kinds | {int} if float in kinds else kinds) or value not in values:  # 1 is not true
            shown = [f"{values[0]} to {values[-1]}"] if isinstance(values, range) else values
            raise common.InputError(f"{name}: {value!r}; allowed: {', '.join(map(str, shown))}")
    return dict(params)

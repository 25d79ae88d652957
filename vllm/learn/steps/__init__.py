"""The steps, a file for each lesson: what is left out of its script, and the cases that grade what comes there."""

from __future__ import annotations

from common import InputError

import functools
import importlib
from collections.abc import Sequence

from learn.step import Step

FILES = {
    "01": "kv_cache",
    "02": "paged_attention",
    "03": "flash_attention",
    "04": "continuous_batching",
    "05": "optimizations",
    "06": "serving",
    "07": "spec_decode",
    "08": "disagg",
    "09": "gqa",
    "10": "chunked_prefill",
    "11": "preemption",
    "12": "multi_lora",
}


@functools.cache
def of(number: str) -> Sequence[Step]:
    """A lesson's steps, in order. Raises InputError."""
    if number not in FILES:
        raise InputError(f"learn {number}: there is no such lesson; there are {', '.join(FILES)}")
    return tuple(importlib.import_module(f"learn.steps.{FILES[number]}").STEPS)


def find(name: str) -> tuple[Step, Sequence[Step]]:
    """A step by its name (02.3), and all steps of its lesson. Raises InputError."""
    steps = of(name.partition(".")[0])
    for step in steps:
        if step.id == name:
            return step, steps
    raise InputError(f"learn: there is no step {name!r}; lesson {name[:2]} has {', '.join(s.id for s in steps)}")

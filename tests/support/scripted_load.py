"""The load generator's client against a scripted server: the tour's, on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable

from engine import registry
from lab.workload import Prompt

tour = registry.lesson("06d_load_generator")
Script, VirtualTimeLoop = tour.Script, tour.VirtualTimeLoop
drive_scripted, start_server = tour.drive_scripted, tour.start_server


def ms(seconds: Iterable[float]) -> list[float]:
    """Milliseconds as whole numbers: virtual clocks add floats."""
    return [round(1e3 * x, 6) for x in seconds]


def ones(count: int, output_len: int = 1) -> list[Prompt]:
    """So many prompts of one token each, all different."""
    return [Prompt([i], 1, output_len) for i in range(count)]

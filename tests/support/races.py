"""Races: what a GPU may do in any order, Triton's interpreter does in one order, one program after the other.

`watched()` remembers which places in memory each program of a launch reads and writes, and refuses a launch whose
outcome hangs on the order:

- two programs write one place, or one reads what another writes (there are no atomics here);
- one store has two values for one place;
- a program reads what it wrote before: other threads of it may not have written yet.

That a program overwrites what it has read before is no race if one thread does both, as in our kernels; threads are
not known here, so nothing is said about it.
"""

from __future__ import annotations

import common

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter


class Race(AssertionError):
    pass


class Program:
    """What one program of a launch has read and written: addresses of elements."""

    def __init__(self) -> None:
        self.reads: list[np.ndarray] = []
        self.writes = np.empty(0, np.int64)


def races_between(programs: dict[tuple[int, int, int], Program]) -> Iterator[str]:
    ids = list(programs)
    writes = np.concatenate([p.writes for p in programs.values()])
    writer = np.repeat(np.arange(len(ids)), [len(p.writes) for p in programs.values()])
    order = np.argsort(writes, kind="stable")
    writes, writer = writes[order], writer[order]
    for twice in np.flatnonzero(writes[1:] == writes[:-1])[:1]:
        yield f"programs {ids[writer[twice]]} and {ids[writer[twice + 1]]} write to one place"
    for reader, program in enumerate(programs.values()):
        if program.reads:
            read = np.isin(writes, np.concatenate(program.reads))
            for other in writer[read & (writer != reader)][:1]:
                yield f"program {ids[reader]} reads what program {ids[other]} writes"


@contextlib.contextmanager
def watched() -> Iterator[dict[tuple[int, int, int], Program]]:
    """Inside this block, a launch in the interpreter raises `Race` after it has run, if it has one.

    Yields the programs of the last launch by their ids, in the order in which they ran.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, launch = builder.create_masked_load, builder.create_masked_store, executor.__call__
    programs: dict[tuple[int, int, int], Program] = {}
    found: list[str] = []

    def watched_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        program = programs.setdefault(self.grid_idx, Program())
        places = ptrs.data[mask.data].astype(np.int64)
        if program.writes.size and np.isin(places, program.writes).any():
            found.append(f"program {self.grid_idx} reads what it wrote, without a barrier")
        program.reads.append(places)
        return load(self, ptrs, mask, *rest, **more)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        program = programs.setdefault(self.grid_idx, Program())
        places, values = ptrs.data[mask.data].astype(np.int64), value.data[mask.data]
        unique, first, back = np.unique(places, return_index=True, return_inverse=True)
        if values[first][back].tobytes() != values.tobytes():
            found.append(f"program {self.grid_idx} stores two values in one place at once")
        program.writes = np.union1d(program.writes, unique)
        return store(self, ptrs, value, mask, *rest, **more)

    def watched_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        programs.clear()
        found.clear()
        launch(self, *args, **kwargs)
        if programs:
            found.extend(races_between(programs))
        if found:
            raise Race(f"{self.fn.__name__}: {found[0]}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", watched_load)
        patch.setattr(builder, "create_masked_store", watched_store)
        patch.setattr(executor, "__call__", watched_launch)
        yield programs


def elements_read(launch: Callable[[], Any]) -> list[int]:
    """How many elements each program of a launch reads, in the order in which programs start. Skips on a GPU."""
    if not common.INTERPRET:
        pytest.skip("what each program reads is seen in Triton's interpreter")
    with watched() as programs:
        launch()
        return [sum(map(len, program.reads)) for program in programs.values()]

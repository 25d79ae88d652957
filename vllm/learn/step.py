"""What a step is: the part of a script that is left out, the task, and the cases that decide.

Owns the records; made by the files of `steps/`, read by the starter, the grader and the command line. It never runs a
case and never changes a file. vLLM has nothing like it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One question to the reader's part, small enough to be read when it fails."""

    given: str  # the input, as the reader sees it
    run: Callable[[], Any]
    expected: Any  # tensors are compared within the project's tolerance, all else exactly
    picture: Callable[[Any, Any], str] | None = None  # of (got, expected)


@dataclass
class Context:
    """What cases are made from: chance that can be repeated, and memory whose borders are watched."""

    rng: random.Random
    device: torch.device
    fences: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)  # (buffer, first, last) of each

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers between fences."""
        generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        return self.fence(torch.randn(*shape, generator=generator).to(dtype))

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Whole numbers on the device, as tables and lengths are."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def fence(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x` with NaN before and behind it: whoever reads too far gets NaN, whoever writes too far is found
        by `intact`."""
        margin = 1 << 13
        buffer = torch.full((2 * margin + x.numel(),), torch.nan, dtype=x.dtype, device=self.device)
        inside = buffer[margin : margin + x.numel()]
        inside.copy_(x.reshape(-1))
        self.fences.append((buffer, margin, margin + x.numel()))
        return inside.view(x.shape)

    def intact(self) -> bool:
        """Was nothing written outside any tensor that was fenced?"""
        return all(
            bool(buffer[:first].isnan().all()) and bool(buffer[last:].isnan().all())
            for buffer, first, last in self.fences
        )


Cases = Callable[[ModuleType, ModuleType, Context], Iterator[Case]]


@dataclass(frozen=True)
class Step:
    """A part of a lesson to write. `cases(mine, given, context)` yields what is asked: `mine` is the reader's script,
    completed with the given parts that are still open; `given` is the lesson's own.
    """

    id: str  # 02.3
    lesson: str  # 02_paged_attention
    title: str
    cut: str  # a function, `Class.method`, or a class: all its methods but __init__
    task: str  # stands in the hole
    hint: str
    cases: Cases
    first: str = ""  # only the statements of `cut` from the one that begins so…
    last: str = ""  # …to the one that begins so; without it, the one alone
    launches: tuple[str, ...] = ()  # kernels that each case has to launch; they run in the interpreter without a GPU
    forbidden: tuple[str, ...] = ()  # functions of the script that answer nothing while it is graded: its references
    plugs: tuple[tuple[str, str], ...] = ()  # (seam of the engine, object of the script that fills it once this passes)


def outcome(run: Callable[[], Any]) -> Any:
    """What `run` returns, or the name of the exception that it raises: a case may expect either."""
    try:
        return run()
    except Exception as error:
        return f"raises {type(error).__name__}"

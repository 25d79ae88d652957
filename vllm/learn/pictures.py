"""Small pictures of what came and of what should have come, for a terminal.

Owns how they are drawn; called by cases and by the grader. They compute nothing that decides.
vLLM has nothing like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MOST = 24  # rows and columns of a picture


def grid(got: torch.Tensor, expected: torch.Tensor, rows: str, columns: str, tolerance: float = 1e-3) -> str:
    """Where two tensors differ: a row for each of the first dimension, a column for each of the second, the rest taken
    together. · is right, ✗ is wrong, ∅ is NaN."""
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return ""
    got, expected = (x.detach().double().cpu().reshape(*x.shape[:2], -1) for x in (got, expected))
    size = expected.norm(dim=-1).clamp_min(1e-6)
    wrong = (got - expected).norm(dim=-1) > tolerance * size
    missing = got.isnan().any(-1)
    marks = [["∅" if m else "✗" if w else "·" for w, m in zip(*row)] for row in zip(wrong[:MOST], missing[:MOST])]
    lines = [f"{i:3} " + " ".join(row[:MOST]) for i, row in enumerate(marks)]
    return "\n".join([f"rows: {rows}; columns: {columns}; · right, ✗ wrong, ∅ NaN", *lines])


def mask(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Two masks [T, S] side by side: █ is seen, · is not."""
    both = [["".join("█" if x else "·" for x in row[:MOST]) for row in m[:MOST].tolist()] for m in (got, expected)]
    width = max(len("yours"), *(len(row) for row in both[0]))
    lines = [f"{a:<{width}}   {b}" for a, b in zip(*both)]
    return "\n".join([f"{'yours':<{width}}   right", *lines])


def table(block_table: Sequence[int], block_size: int, num_tokens: int) -> str:
    """A block table: each block's id, and how much of it is filled."""
    cells = []
    for i, block in enumerate(block_table):
        filled = min(max(num_tokens - i * block_size, 0), block_size)
        cells.append(f"[{block}: {'█' * filled}{'·' * (block_size - filled)}]")
    return " ".join(cells) or "(no blocks)"


def tables(got: Any, expected: Any, block_size: int, num_tokens: int) -> str:
    """Two block tables, one below the other."""
    if not isinstance(got, list | tuple):
        return ""
    return f"yours {table(got, block_size, num_tokens)}\nright {table(expected, block_size, num_tokens)}"


def steps(got: Sequence[Any], expected: Sequence[Any], most: int = 8, names: Sequence[str] = ()) -> str:
    """Two schedules side by side, up to the first step that differs; of that, with the names of a row's fields, those
    alone that differ."""
    lines = []
    for i, (a, b) in enumerate(zip(got, expected)):
        if a != b:
            fields = [(f"{name}: ", x, y) for name, x, y in zip(names, a, b) if x != y] or [("", a, b)]
            lines += [
                line for n, x, y in fields for line in (f"step {i:2} ≠  {n}yours {x}", f"           {n}right {y}")
            ]
            break
        lines.append(f"step {i:2} =  {a[0] if names else a}")
    else:
        if len(got) != len(expected):
            lines.append(f"yours ends after {len(got)} steps, the right one after {len(expected)}")
    return "\n".join(lines[-most:])

"""A regular expression as a tree over bytes, simplified while it is built.

Owns the four kinds of node and the functions that make them; called by `regex`, which translates Python's syntax, and
by `characters`. It never matches a text: that is for the automaton.
vLLM: `vllm/v1/structured_output/backend_outlines.py`, inside its library outlines_core.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bytes:
    """One byte out of a set; bit b of `mask`, never 0, says whether byte b is in it."""

    mask: int


@dataclass(frozen=True)
class Concat:
    """Its parts, one after another; of none, the empty string."""

    parts: tuple[Node, ...] = ()  # none: the empty string


@dataclass(frozen=True)
class Alt:
    """One of its parts; of none, no string at all."""

    parts: tuple[Node, ...] = ()  # none: no string at all


@dataclass(frozen=True)
class Repeat:
    """`node` from `low` to `high` times; None is without end."""

    node: Node
    low: int
    high: int | None  # None: without end


Node = Bytes | Concat | Alt | Repeat
EMPTY = Concat()
NOTHING = Alt()
ALL_BYTES = (1 << 256) - 1

# Trees are built by these functions alone, and they keep one promise: a tree that no string matches is NOTHING itself.


def concat(nodes: Iterable[Node]) -> Node:
    """The parts in a row, flat; NOTHING if one of them is."""
    flat = [part for node in nodes for part in (node.parts if isinstance(node, Concat) else (node,))]
    return NOTHING if NOTHING in flat else flat[0] if len(flat) == 1 else Concat(tuple(flat))


def alt(nodes: Iterable[Node]) -> Node:
    """Any of the parts, flat, each once, single bytes united."""
    flat = dict.fromkeys(part for node in nodes for part in (node.parts if isinstance(node, Alt) else (node,)))
    if len(single := [part for part in flat if isinstance(part, Bytes)]) > 1:  # one byte out of either set
        mask = functools.reduce(lambda mask, part: mask | part.mask, single, 0)
        flat = {Bytes(mask): None} | {part: None for part in flat if part not in single}
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def repeat(node: Node, low: int, high: int | None) -> Node:
    """`low` to `high` times, and the empty string as EMPTY alone."""
    if high == 0 or node in (EMPTY, NOTHING):
        return NOTHING if node == NOTHING and low > 0 else EMPTY
    return Repeat(node, low, high)


def restrict(node: Node, alphabet: int) -> Node:
    """The same expression without the strings that have a byte outside of `alphabet`, a mask."""
    match node:
        case Bytes(mask):
            return Bytes(mask & alphabet) if mask & alphabet else NOTHING
        case Concat(parts):
            return concat(restrict(part, alphabet) for part in parts)
        case Alt(parts):
            return alt(restrict(part, alphabet) for part in parts)
        case Repeat(inner, low, high):
            return repeat(restrict(inner, alphabet), low, high)

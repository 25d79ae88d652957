"""Characters as the bytes of their UTF-8: a range of code points becomes a tree over bytes.

Owns ranges and their translation; called by `regex` for every class, literal and dot. It never makes a tree that
accepts what is not UTF-8: overlong forms and surrogates have none.
vLLM: `vllm/v1/structured_output/backend_outlines.py`, inside its library outlines_core.
"""

from __future__ import annotations

import functools

from engine.sampling.guided.expressions import EMPTY, Bytes, Node, alt, concat

Ranges = list[tuple[int, int]]  # of code points, both ends included
LAST = 0x10FFFF


def complement(ranges: Ranges) -> Ranges:
    """All code points that are in none of `ranges`."""
    found, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, LAST)] if start <= LAST else found


@functools.lru_cache(4096)
def utf8(low: bytes, high: bytes) -> Node:
    """The byte strings of one length from `low` to `high`, whose bytes but the first run from 80 to BF."""
    masks: dict[Node, int] = {}  # what may follow -> after which first bytes
    for first in range(low[0], high[0] + 1) if low else ():
        n = len(low) - 1
        tail = utf8(low[1:] if first == low[0] else b"\x80" * n, high[1:] if first == high[0] else b"\xbf" * n)
        masks[tail] = masks.get(tail, 0) | 1 << first
    return alt(concat([Bytes(mask), tail]) for tail, mask in masks.items()) if low else EMPTY


def characters(ranges: Ranges) -> Node:
    """One character out of `ranges`, as the bytes of its UTF-8. Surrogates have none."""
    lengths = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, LAST))
    pairs = [(max(low, a), min(high, b)) for low, high in ranges for a, b in lengths]
    return alt(utf8(chr(low).encode(), chr(high).encode()) for low, high in pairs if low <= high)


def literal(text: str) -> Node:
    """Exactly this text."""
    return concat(Bytes(1 << byte) for byte in text.encode())

"""Lesson 03's steps: a window, the traffic of tiles, the online softmax, which tiles are visited, and the kernel.

Owns their cases; called by the grader. It never grades.
"""

from __future__ import annotations

import common

import itertools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from learn import pictures
from learn.step import Case, Context, Step

LESSON = "03_flash_attention"


def visible(T: int, S: int, window: int | None) -> list[list[bool]]:
    """[T, S]: the queries are the last T of S positions, and each sees the last `window` keys up to itself."""
    return [[p - (window or S) < key <= p for key in range(S)] for p in range(S - T, S)]


def a_window(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """The values are one-hot, so that each output row shows what was seen."""
    rng = context.rng
    some = rng.randint(2, 6), rng.randint(7, 10), rng.randint(2, 5)
    for T, S, window in [(4, 4, 2), (1, 5, 3), (3, 5, 1), (3, 6, None), some]:
        q, k, v = torch.zeros(T, 1, S), torch.zeros(S, 1, S), torch.eye(S)[:, None]
        seen = torch.tensor(visible(T, S, window)).float()
        yield Case(
            f"{T} queries, the last of {S} positions; all scores are equal; window {window}",
            lambda: mine.naive_attention(q, k, v, window=window)[0][:, 0],
            seen / seen.sum(1, keepdim=True),
            lambda got, right: pictures.mask(got != 0, right != 0),
        )


def traffic(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [(rng.randint(20, 60), rng.randint(2, 64), rng.randint(2, 20)) for _ in range(3)]
    for (T, D, block), causal in itertools.product([(4, 1, 2), (5, 1, 2), *some], (False, True)):
        keys = sum(
            len([key for key in range(T) if not causal or key < m0 + block]) for m0 in range(0, T, block)
        )  # of each tile, one by one
        right = {"naive": 4 * T * D + 4 * T * T, "tiled": 2 * T * D + T + 2 * D * keys, "once": 4 * T * D + T}
        yield Case(
            f"{T} queries and keys of {D} numbers, tiles of {block} queries, {'causal' if causal else 'full'}",
            lambda: mine.hbm_floats(T, D, block, causal),
            right,
        )


def one_pass(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """After each tile: what brute force says about all keys up to there, in fp64."""
    fixed = torch.tensor([[1.0, 2, 4, 3, 0, 5]]), torch.arange(1.0, 7)[:, None]
    hidden = context.randn(4, 7)
    hidden[0, :3], hidden[1, 3:], hidden[2], hidden[3, ::2] = -math.inf, -math.inf, -math.inf, -math.inf
    loud = (200 * context.randn(3, 9)).round()  # exp(200) is no number of 32 bits
    heads = context.randn(2, 3, 8), context.randn(2, 8, 4)  # two heads at once
    for what, (s, v), tile in [
        ("scores 1 2 4 3 0 5, values 1 2 3 4 5 6", fixed, 2),
        ("scores of −∞, of one query all", (hidden, context.randn(7, 4)), 3),
        ("scores so large that exp of one alone overflows", (loud, context.randn(9, 5)), 4),
        ("two heads of three queries", heads, 3),
    ]:
        tiles = list(zip(s.split(tile, dim=-1), v.split(tile, dim=-2)))

        def states(module: ModuleType, rescale: bool) -> list[tuple]:
            *batch, M, D = *s.shape[:-1], v.shape[-1]
            found = [(s.new_full((*batch, M), -math.inf), s.new_zeros(*batch, M), s.new_zeros(*batch, M, D))]
            for tile in tiles:
                found.append(module.fold(*found[-1], *tile, rescale))
            return found[1:]

        right = []
        for stop in range(tile, s.shape[-1] + tile, tile):
            seen, values = s[..., :stop].double(), v[..., :stop, :].double()
            top = seen.amax(-1)
            w = (seen - top.clamp_min(-1e9)[..., None]).exp()
            right.append((top.float(), w.sum(-1).float(), (w @ values).float()))
        about = f"{what}; {tile} keys at a time; (m, ℓ, O) after each tile"
        yield Case(about, lambda: states(mine, True), right)
        if what.endswith("queries"):
            yield Case(f"{about}, without the rescale", lambda: states(mine, False), states(given, False))


# --- The kernel -------------------------------------------------------------------------------------------------------


def tiles_visited(T: int, S: int, causal: bool, window: int | None, M: int, N: int) -> list[str]:
    """By brute force over pairs: of each tile of queries a row, of each tile of keys a sign."""
    rows = []
    for first in range(S - T, S, M):
        row = ""
        for n in range(0, S, N):
            seen = [
                key < S and (not causal or p - (window or math.inf) < key <= p)
                for p in range(first, first + M)
                for key in range(n, n + N)
            ]
            row += "█" if all(seen) else "▒" if any(seen) else "·"
        rows.append(row)
    return rows


def watched(mine: ModuleType, T: int, S: int, q: Any, k: Any, v: Any, M: int, N: int, mask: dict) -> list[str]:
    """The same of the reader's kernel: its calls of `attend_to_keys`, written down."""
    visits: dict[tuple[int, int], str] = {}
    inner = mine.attend_to_keys

    def outer(acc: Any, l: Any, m: Any, q: Any, k: Any, v: Any, start: Any, stop: Any, first: Any, *more: Any) -> Any:
        masked = more[2]
        for n in range(int(start), int(stop), N):
            tile = (int(first) - (S - T)) // M, n // N
            aligned = n % N == 0 and tile not in visits
            visits[tile] = ("▒" if masked else "█") if aligned else "?"
        return inner(acc, l, m, q, k, v, start, stop, first, *more)

    with mock.patch.object(mine, "attend_to_keys", outer):
        mine.flash_attention(q, k, v, *mine.packed([T], [S]), tiles=(M, N, 4, 1, 0), **mask)
    keys = max([-(-S // N) - 1, *(n for _, n in visits)]) + 1
    return ["".join(visits.get((i, n), "·") for n in range(keys)) for i in range(-(-T // M))]


def as_picture(got: Any, right: list[str]) -> str:
    if not isinstance(got, list):
        return ""
    lines = [f"{a:<{max(map(len, got))}}   {b}" for a, b in itertools.zip_longest(got, right, fillvalue="")]
    return "\n".join(["a row per tile of queries, yours and right: █ no mask, ▒ mask, · not visited, ? twice", *lines])


def tiles_that_count(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """Where a kernel is interpreted, its tiles are written down. Everywhere, what no query may see is NaN."""
    rng = context.rng
    some = [((T := rng.randint(17, 60), T + rng.randint(0, 40)), (16, 16), rng.randint(1, 50)) for _ in range(2)]
    fixed = [((64, 64), (16, 16), 20), ((20, 20), (32, 16), 9), ((33, 48), (16, 16), 17), ((40, 75), (16, 32), 40)]
    for (T, S), (M, N), window in [*fixed, *some]:
        for mask in ({}, {"window": window}, {"causal": False}):
            causal, about = "causal" not in mask, f"{T} queries, {S} keys, tiles of {M} by {N}; {mask or 'causal'}"
            q, k, v = (context.randn(n, 1, 16) for n in (T, S, S))
            options = {"causal": causal, "window": mask.get("window")}
            if common.INTERPRET:
                yield Case(
                    f"{about}: the tiles that are computed",
                    lambda: watched(mine, T, S, q, k, v, M, N, options),
                    tiles_visited(T, S, causal, options["window"], M, N),
                    as_picture,
                )
    for T, S, window in [(48, 48, None), (41, 60, None), (40, 90, 20)]:
        q, k, v = (context.randn(n, 2, 16) for n in (T, S, S))
        first = S - T + (16 if window else 0)  # only the tile of 16 queries at this position is looked at
        needed = range((first - window + 1) // 16 * 16 if window else 0, -(-(first + 16) // 16) * 16)
        for key in set(range(S)) - set(needed):
            k[key], v[key] = math.nan, math.nan
        rows = slice(first - (S - T), first - (S - T) + 16)
        right = given.naive_attention(
            q[rows], k[: first + 16].nan_to_num(), v[: first + 16].nan_to_num(), window=window
        )
        yield Case(
            f"{T} queries, {S} keys, {f'a window of {window}' if window else 'causal'}, tiles of 16 by 16: "
            f"queries {rows.start} to {rows.stop - 1}; NaN in the tiles of keys that none of them sees",
            lambda: mine.flash_attention(q, k, v, *mine.packed([T], [S]), window=window, tiles=(16, 16, 4, 1, 0))[0][
                rows
            ],
            right[0],
            lambda got, right: pictures.grid(got, right, "queries", "heads"),
        )


def the_kernel(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    window = context.rng.randint(3, 30)
    for lens, Hq, Hkv, D, mask, loud in [
        (([2], [2]), 1, 1, 16, {}, 1),
        (([20, 1], [20, 37]), 4, 2, 16, {}, 1),
        (([19, 1], [33, 5]), 2, 1, 48, {"causal": False}, 1),
        (([18, 40], [50, 40]), 2, 2, 16, {"window": window}, 1),
        (([3, 17], [40, 17]), 2, 1, 16, {}, 60),
        (([4], [2]), 1, 1, 16, {}, 1),  # two queries stand before the first key, and see nothing
    ]:
        T, S = sum(lens[0]), sum(lens[1])
        q = context.fence(context.randn(T, Hq, D) * loud)
        k, v = context.randn(S, Hkv, D), context.randn(S, Hkv, D)
        right, lse = given.packed_reference(q.double(), k.double(), v.double(), *lens, **mask)
        yield Case(
            f"sequences of {lens[0]} queries and {lens[1]} keys, {Hq} query and {Hkv} KV heads of {D}, "
            + f"{mask or 'causal'}"
            + ("; exp of one score alone overflows" if loud > 1 else "")
            + "; outputs and log-sum-exps",
            lambda: list(mine.flash_attention(q, k, v, *mine.packed(*lens), **mask)),
            [right.float(), lse.float()],
            lambda got, right: pictures.grid(got[0], right[0], "queries", "heads"),
        )


STEPS = (
    Step(
        "03.1",
        LESSON,
        "A window",
        "naive_attention",
        "take from `seen` [T, S] the keys that the window has left behind: a query sees itself and w − 1 before it.",
        "`position` is a column and `key` a row: comparing them makes a matrix. A window of 1 leaves a query itself.",
        a_window,
        first="seen = seen &",
    ),
    Step(
        "03.2",
        LESSON,
        "What tiles load",
        "hbm_floats",
        "`keys`: how many keys all tiles of block_m queries load together; a causal tile none behind its last query.",
        "One sum over the tiles' first queries, range(0, T, block_m). The last tile may reach beyond the last key.",
        traffic,
        first="keys = sum(",
    ),
    Step(
        "03.3",
        LESSON,
        "The online softmax",
        "fold",
        "from m, ℓ and O of the keys before, and the scores of one tile more, those of all. rescale=False: α is 1.",
        "The formula has all but this: where m' is still −∞, subtract 0 in its place, for −∞ − (−∞) is no number.",
        one_pass,
    ),
    Step(
        "03.4",
        LESSON,
        "Which tiles are visited",
        "flash_attention_kernel",
        "`first`, and where the ranges of keys begin and end: begin (with a WINDOW), full, edge, end. Ranges begin at "
        "multiples of BLOCK_N.",
        "The tile's queries stand at first … first + BLOCK_M − 1. The first of them decides what is left of the window "
        "and how far a causal tile needs no mask; the last decides the other two.",
        tiles_that_count,
        first="first = m0",
        last="edge = tl.maximum",
        launches=("flash_attention_kernel",),
        forbidden=("naive_attention", "packed_reference"),
    ),
    Step(
        "03.5",
        LESSON,
        "The loop of the kernel",
        "attend_to_keys",
        "for each tile of keys in [start, stop): scores, the mask if MASKED, and the online softmax. Return acc, l, m.",
        "`k_rows.load([n, 0])` is a tile [BLOCK_N, D]. `scale` has log2 e in it: use tl.math.exp2. Query row i stands "
        "at first + i. A full mask wants key < S, for rows behind the end read as zeros.",
        the_kernel,
        launches=("flash_attention_kernel",),
        forbidden=("naive_attention", "packed_reference"),
    ),
)

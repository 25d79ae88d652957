"""Lesson 02's steps: the pool, the block table with copy-on-write, and the kernels that go through it.

Owns their cases; called by the grader. It never grades.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from learn import pictures
from learn.step import Case, Context, Step, outcome

LESSON = "02_paged_attention"


# --- The pool ---------------------------------------------------------------------------------------------------------


def lives_of_a_pool(module: ModuleType, num_blocks: int, calls: list[tuple[str, Any]]) -> list:
    """What each call answers or raises; the queue and the counts after it."""
    pool, told = module.BlockPool(num_blocks), []
    for name, argument in calls:
        answer = outcome(lambda: getattr(pool, name)(argument))
        told.append((f"{name}({argument})", answer, list(pool.free_queue), list(pool.ref_count)))
    return told


def pool_cases(first: list[list[tuple[str, Any]]], verbs: tuple[str, ...]) -> Callable:
    def cases(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
        rng, some = context.rng, []
        for _ in range(4):
            owned: list[int] = []
            calls: list[tuple[str, Any]] = [("allocate", 3)]
            for _ in range(8):
                verb = rng.choice(verbs)
                argument = rng.randint(0, 4) if verb == "allocate" else rng.choices(range(1, 7), k=rng.randint(0, 3))
                calls.append((verb, argument))
                owned += argument if isinstance(argument, list) else []
            some.append(calls)
        for calls in (*first, *some):
            yield Case(
                f"a pool of 7 blocks: {', '.join(f'{name}({x})' for name, x in calls)}; "
                "what each call answers or raises, the queue, the counts",
                lambda: lives_of_a_pool(mine, 7, calls),
                lives_of_a_pool(given, 7, calls),
                lambda got, right: pictures.steps(got, right),
            )

    return cases


allocations = pool_cases([[("allocate", 2)], [("allocate", 6), ("allocate", 1)], [("allocate", 7)], [("allocate", 0)]],
                         ("allocate",))  # fmt: skip
releases = pool_cases(
    [
        [("allocate", 4), ("free", [1, 2, 3, 4])],
        [("allocate", 2), ("touch", [1, 2]), ("free", [1, 2]), ("free", [2])],
        [("allocate", 2), ("free", [1, 1])],
        [("allocate", 2), ("free", [0])],
        [("allocate", 2), ("free", [1, 5])],
        [("allocate", 2), ("free", [1, 9])],
        [("allocate", 2), ("touch", [1]), ("free", [1, 1])],
    ],
    ("allocate", "touch", "free"),
)


# --- The block table --------------------------------------------------------------------------------------------------


def lives_of_tables(module: ModuleType, num_blocks: int, size: int, calls: list[tuple]) -> list:
    """Tables 0, 1, …: ("append", table, n), ("fork", table), ("free", table); all tables and counts after each."""
    pool = module.BlockPool(num_blocks)
    tables, told = [module.BlockTable(pool, size)], []
    for verb, table, *n in calls:
        if verb == "fork":
            answer = outcome(lambda: tables.append(tables[table].fork()))
        else:
            answer = outcome(lambda: getattr(tables[table], verb)(*n))
        told.append((verb, table, *n, answer, [(list(t.blocks), t.num_tokens) for t in tables], list(pool.ref_count)))
    return told


TABLES = [
    [("append", 0, 3)],
    [("append", 0, 4), ("append", 0, 1)],
    [("append", 0, 5), ("fork", 0), ("append", 1, 1)],
    [("append", 0, 4), ("fork", 0), ("append", 1, 1), ("append", 0, 1)],
    [("append", 0, 6), ("fork", 0), ("append", 0, 1), ("append", 1, 1)],
    [("append", 0, 5), ("fork", 0), ("append", 0, 0), ("append", 1, 20)],
    [("append", 0, 5), ("fork", 0), ("append", 1, 27)],
    [("append", 0, 5), ("fork", 0), ("fork", 1), ("free", 0), ("append", 2, 4), ("append", 1, 9), ("free", 2)],
]


def tables(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng, some = context.rng, []
    for _ in range(6):
        calls: list[tuple] = [("append", 0, rng.randint(1, 6))]
        count = 1
        for _ in range(9):
            verb = rng.choice(["append", "append", "fork", "free"])
            table = rng.randrange(count)
            calls.append((verb, table, rng.randint(0, 6)) if verb == "append" else (verb, table))
            count += verb == "fork"
        some.append(calls)
    for calls in (*TABLES, *some):
        right = lives_of_tables(given, 9, 4, calls)
        yield Case(
            f"blocks of 4 tokens, 8 to be had: {calls}; the copies that each call asks for, all tables, the counts",
            lambda: lives_of_tables(mine, 9, 4, calls),
            right,
            lambda got, right: pictures.steps(got, right),
        )


# --- The kernels ------------------------------------------------------------------------------------------------------


def shuffled(context: Context, lens: list[int], size: int, Hkv: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(kv_cache with NaN wherever no token lies, block_table): ids in no order, 0 behind the end."""
    need = [-(-S // size) for S in lens]
    ids = context.rng.sample(range(1, sum(need) + 3), sum(need))
    rows = [[ids.pop() for _ in range(n)] + [0] * (max(need) + 1 - n) for n in need]
    cache = torch.full((2, sum(need) + 3, size, Hkv, D), math.nan)
    for row, S in zip(rows, lens):
        for p in range(S):
            cache[:, row[p // size], p % size] = torch.randn(
                2, Hkv, D, generator=torch.Generator().manual_seed(context.rng.randrange(1 << 30))
            )
    return context.fence(cache), context.ints(rows)


def slots(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for T, Hkv, D in [(1, 1, 4), (3, 2, 8), (5, 3, 20)]:
        k, v = context.randn(T, Hkv, D), context.randn(T, Hkv, D)
        numbers = context.rng.sample(range(4, 20), T)
        if T > 1:
            numbers[1] = -1  # padding
        cache = context.randn(2, 5, 4, Hkv, D)
        right = cache.clone()
        for t, slot in enumerate(numbers):
            if slot >= 0:
                right[0].view(-1, Hkv, D)[slot], right[1].view(-1, Hkv, D)[slot] = k[t], v[t]

        def write() -> torch.Tensor:
            mine.reshape_and_cache(k, v, cache, context.ints(numbers, torch.int64))
            return cache

        yield Case(
            f"{T} tokens of {Hkv} heads of {D} into slots {numbers} of 5 blocks of 4",
            write,
            right,
            lambda got, right: pictures.grid(got, right, "keys, values", "blocks"),
        )


def copies(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for pairs, Hkv, D in [([(1, 2)], 1, 4), ([(1, 3), (2, 5)], 2, 8), ([(4, 1), (3, 2)], 3, 120)]:
        cache = context.randn(2, 6, 4, Hkv, D)
        right = cache.clone()
        for source, target in pairs:
            right[:, target] = cache[:, source]

        def copy() -> torch.Tensor:
            mine.copy_blocks(cache, context.ints(pairs, torch.int64))
            return cache

        yield Case(
            f"(source, target) {pairs}; blocks of 4 tokens, {Hkv} heads of {D}",
            copy,
            right,
            lambda got, right: pictures.grid(got, right, "keys, values", "blocks"),
        )


SHAPES = [([3], 4, 1, 1, 16), ([9, 0, 4], 4, 6, 2, 16), ([70, 129, 1], 16, 9, 3, 24)]


def decode_cases(*some_splits: int) -> Callable:
    def cases(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
        for splits, (lens, size, Hq, Hkv, D) in itertools.product(some_splits, SHAPES):
            cache, table = shuffled(context, lens, size, Hkv, D)
            q = context.randn(len(lens), Hq, D)
            cache[:, 0] = math.nan  # the null block: no answer may depend on it
            yield Case(
                f"sequences of {lens} tokens in blocks of {size}, table {table.tolist()}, {Hq} query and {Hkv} KV "
                f"heads of {D}, keys in {splits} range{'s' * (splits > 1)}; NaN wherever no token lies",
                lambda: mine.paged_decode(q, cache, table, context.ints(lens), max(lens), num_splits=splits),
                given.paged_decode_reference(q, cache, table, context.ints(lens)).float(),
                lambda got, right: pictures.grid(got, right, "sequences", "heads"),
            )

    return cases


STEPS = (
    Step(
        "02.1",
        LESSON,
        "Blocks from the front of the queue",
        "BlockPool.allocate",
        "take n blocks from the front of free_queue, each with one owner; too few: OutOfBlocks, and nothing changes.",
        "popitem(last=False) takes an OrderedDict's first entry. Look whether there are enough before you take one.",
        allocations,
    ),
    Step(
        "02.2",
        LESSON,
        "Blocks back",
        "BlockPool.free",
        "one owner less for each block; who has none left goes to the front of the queue. Refuse before you change.",
        "A list may name a block twice: count before you compare with ref_count. Table [1, 2] makes it [2, 1, …].",
        releases,
    ),
    Step(
        "02.3",
        LESSON,
        "A table that grows, and copies on write",
        "BlockTable.append",
        "room for n more tokens: new blocks at the end, and a copy of a last one that others read and is not full.",
        "A last block is written next only if it is partly filled. All new blocks, the copy's too, come from one "
        "`allocate`, so that nothing has changed if it raises.",
        tables,
    ),
    Step(
        "02.4",
        LESSON,
        "A second sequence with the same past",
        "BlockTable.fork",
        "a new table with the same blocks and tokens; every block has one owner more.",
        "Copy the list, or the two tables grow together.",
        tables,
        plugs=(("block_pool", "BlockPool"),),
    ),
    Step(
        "02.5",
        LESSON,
        "Keys and values into their slots",
        "reshape_and_cache_kernel",
        "a program per token: its slot, and unless that is −1 its WIDTH keys and values at slot · WIDTH.",
        "BLOCK is the next power of two after WIDTH, so loads and stores need a mask. Values lie stride_kv further.",
        slots,
        launches=("reshape_and_cache_kernel",),
    ),
    Step(
        "02.6",
        LESSON,
        "Whole blocks",
        "copy_blocks_kernel",
        "a program per (pair, keys or values, chunk of BLOCK elements): copy the source's elements to the target.",
        "The pair's two ids lie side by side in `pairs`. The last chunk of a block is not full.",
        copies,
        launches=("copy_blocks_kernel",),
    ),
    Step(
        "02.7",
        LESSON,
        "Attention through a block table",
        "paged_decode_kernel",
        "a program per (sequence, KV head, range of keys): online softmax over its range, blocks from the table. It "
        "writes the range's output and, if there are several, log Σ exp into lse: [B, Hq, SPLITS, D] and [B, Hq, "
        "SPLITS]. Without any key: zeros, and −inf.",
        "Write it for a contiguous cache first: position p lies at p. Then replace p by block_table[p // BLOCK_SIZE] · "
        "BLOCK_SIZE + p % BLOCK_SIZE, and mask values as well as scores: 0 · NaN is NaN. Where there was no key, ℓ is "
        "0: divide by 1. `scale` belongs to exp, not to exp2.",
        decode_cases(1, 4),
        launches=("paged_decode_kernel",),
        forbidden=("paged_decode_reference",),
        plugs=(("attention", "PagedAttention"),),
    ),
    Step(
        "02.8",
        LESSON,
        "Ranges put together",
        "combine_splits_kernel",
        "a program per (sequence, head): the ranges' outputs, weighted by exp of their lse.",
        "Subtract the largest lse first. A sequence without any key has −inf everywhere, and must come out as zeros.",
        decode_cases(4),
        launches=("combine_splits_kernel",),
        forbidden=("paged_decode_reference",),
    ),
)

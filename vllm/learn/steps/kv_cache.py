"""Lesson 01's steps: what a token leaves behind, who may see whom, rows of a cache, and the decode kernel's sums.

Owns their cases; called by the grader. It never grades.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from learn import pictures
from learn.step import Case, Context, Step, outcome

LESSON = "01_kv_cache"


def bytes_of_a_token(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    for L, Hkv, D, Dv, size in [(32, 8, 128, 128, 2), (61, 1, 576, 0, 2)]:
        yield Case(
            f"{L} layers, {Hkv} KV heads, keys of {D}, values of {Dv}, {size} bytes each",
            lambda: mine.KVCacheSpec(L, Hkv, D, Dv).bytes_per_token(size),
            L * Hkv * (D + Dv) * size,
        )
    for _ in range(5):
        L, Hkv, D, Dv, size = (rng.randint(1, 90) for _ in range(5))
        yield Case(
            f"KVCacheSpec({L}, {Hkv}, {D}, {Dv}).bytes_per_token({size})",
            lambda: mine.KVCacheSpec(L, Hkv, D, Dv).bytes_per_token(size),
            L * Hkv * (D + Dv) * size,
        )


def who_sees_whom(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """The values are one-hot, so that each output row shows what was seen."""
    for T, S in [(3, 3), (1, 4), (2, 5), (context.rng.randint(2, 6), context.rng.randint(6, 9))]:
        q, k = torch.zeros(T, 1, S), torch.zeros(S, 1, S)
        v = torch.eye(S)[:, None]  # [S, 1, S]
        seen = torch.tril(torch.ones(T, S), diagonal=S - T)
        yield Case(
            f"{T} queries, the last of {S} positions; all scores are equal",
            lambda: mine.causal_attention(q, k, v)[:, 0],
            seen / seen.sum(1, keepdim=True),
            lambda got, right: pictures.mask(got != 0, right != 0),
        )
    q, k, v = context.randn(4, 6, 16), context.randn(9, 2, 16), context.randn(9, 2, 16)
    yield Case(
        "4 queries of 6 heads, 9 keys of 2 heads, random",
        lambda: mine.causal_attention(q, k, v),
        given.causal_attention(q, k, v),
        lambda got, right: pictures.grid(got, right, "queries", "heads"),
    )


def a_cache(module: ModuleType, seqs: int, rows: int) -> Any:
    return module.KVCache(module.KVCacheSpec(2, 2, 4, 4), seqs, rows, torch.float32)


def rows_that_are_left(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    def claim(module: ModuleType, rows: int, claims: list[list[int]]) -> list:
        cache, told = a_cache(module, len(claims[0]), rows), []
        for new in claims:
            told.append((outcome(lambda: cache.allocate_slots(new)), list(cache.seq_lens)))
        return told

    some = [[context.rng.randint(0, 4) for _ in range(3)] for _ in range(6)]
    for rows, claims in [(4, [[4, 1]]), (4, [[5, 1]]), (4, [[1, 5], [1, 1]]), (4, [[3, 4], [1, 1], [1, 0]]), (9, some)]:
        yield Case(
            f"{rows} rows for each sequence; claims {claims}: what each raises, and the lengths after it",
            lambda: claim(mine, rows, claims),
            claim(given, rows, claims),
        )


def keys_of_all_sequences(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    def fill(module: ModuleType, passes: list[list[int]]) -> list[torch.Tensor]:
        cache, out = a_cache(module, len(passes[0]), 8), torch.empty(0)
        for new, (q, k, v) in zip(passes, tensors):
            cache.allocate_slots(new)
            out = cache.attend(1, q, k, v)
        return [cache.k, cache.v, out]

    for passes in ([[2]], [[2, 1]], [[3, 2], [1, 1]], [[3, 2, 1], [1, 1, 1], [2, 0, 3]]):
        tensors = [tuple(context.randn(sum(new), heads, 4) for heads in (2, 2, 2)) for new in passes]
        yield Case(
            f"new tokens of each sequence, pass by pass: {passes}; the cache's keys, its values, what layer 1 answers",
            lambda: fill(mine, passes),
            fill(given, passes),
        )


def what_each_pass_computes(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    for prompt, new in [(3, 3), (1, 1), (rng.randint(1, 9), rng.randint(2, 6))]:
        for cached in (False, True):
            right = [(stop - 1 if cached and stop > prompt else 0, stop) for stop in range(prompt, prompt + new)]
            yield Case(
                f"a prompt of {prompt}, {new} new tokens, {'with' if cached else 'without'} a cache",
                lambda: list(mine.steps(prompt, new, cached)),
                right,
                lambda got, right: pictures.steps(got, right),
            )


def online_softmax(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for lens, Hq, Hkv, D, loud in [([5], 1, 1, 16, 1), ([70, 3], 4, 2, 16, 1), ([130, 64, 1], 6, 2, 24, 500)]:
        q = context.fence(context.randn(len(lens), Hq, D) * loud)
        k, v = context.randn(len(lens), max(lens), Hkv, D), context.randn(len(lens), max(lens), Hkv, D)
        right = [given.causal_attention(q[b : b + 1], k[b, :S], v[b, :S])[0] for b, S in enumerate(lens)]
        yield Case(
            f"sequences of {lens} tokens, {Hq} query and {Hkv} KV heads of {D}"
            + (", scores so large that exp of one alone overflows" if loud > 1 else ""),
            lambda: mine.decode_attention(q, k, v, context.ints(lens), max(lens)),
            torch.stack(right),
            lambda got, right: pictures.grid(got, right, "sequences", "heads"),
        )


STEPS = (
    Step(
        "01.1",
        LESSON,
        "What one token costs",
        "KVCacheSpec.bytes_per_token",
        "return the bytes that one token leaves behind in all layers: a key and a value for every KV head.",
        "The docstring has the formula; every factor of it is an attribute or the argument.",
        bytes_of_a_token,
        first="return",
    ),
    Step(
        "01.2",
        LESSON,
        "Who may see whom",
        "causal_attention",
        "`visible` [T, S], bool: may query t see key s? The T queries are the last of S positions.",
        "Query t stands at position S − T + t. A key is visible if its position is not beyond that.",
        who_sees_whom,
        first="position =",
        last="visible =",
    ),
    Step(
        "01.3",
        LESSON,
        "A reservation that is full",
        "KVCache.allocate_slots",
        "raise CacheFull if any sequence would need more than max_len rows; nothing is claimed then.",
        "Look at all sequences before anything of the cache changes. A sequence may use its last row.",
        rows_that_are_left,
        first="for seq, (_, stop)",
    ),
    Step(
        "01.4",
        LESSON,
        "Into the rows that were claimed",
        "KVCache.attend",
        "store k and v [T, Hkv, D] in this layer's rows: token t belongs to sequence _seq[t], row positions[t].",
        "Two index tensors of length T pick T rows of [B, max_len, Hkv, D] at once.",
        keys_of_all_sequences,
        first="keys[self._seq",
        last="values[self._seq",
    ),
    Step(
        "01.5",
        LESSON,
        "What each pass computes",
        "steps",
        "yield [start, stop) of each forward pass; every pass but the last token's ends at a token that was just made.",
        "There are max_tokens passes. The first is the whole prompt in either case.",
        what_each_pass_computes,
    ),
    Step(
        "01.6",
        LESSON,
        "One pass over the keys",
        "decode_attention_kernel",
        "the online softmax: from m, l, acc over the tiles before and `scores` of this one, those over both.",
        "With the new maximum m', what was summed under m is worth exp2(m − m') as much. Both sums need that factor.",
        online_softmax,
        first="m_new = tl.maximum",
        last="m = m_new",
        launches=("decode_attention_kernel",),
        forbidden=("causal_attention",),
    ),
)

"""Lesson 09's steps: the head map, heads on several GPUs, MLA folded into its query, and both decode kernels.

Owns their cases; called by the grader. It never grades.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from learn import pictures
from learn.step import Case, Context, Step
from learn.steps.paged_attention import shuffled

LESSON = "09_gqa"


# --- Heads ------------------------------------------------------------------------------------------------------------


def head_map(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    some = [(context.rng.randint(1, 9), context.rng.randint(1, 9)) for _ in range(5)]
    for Hkv, G in [(2, 2), (4, 1), (1, 4), (3, 4), *some]:
        groups = [kv_head for kv_head in range(Hkv) for _ in range(G)]
        yield Case(f"{Hkv * G} query heads, {Hkv} KV heads", lambda: mine.interleaved(Hkv * G, Hkv), groups)


def heads_of_a_gpu(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """By what each GPU's query heads read: Hq = 2 · max(Hkv, tp) of them."""
    powers = [(1 << context.rng.randint(0, 6), 1 << context.rng.randint(0, 6)) for _ in range(6)]
    for Hkv, tp in [(8, 2), (8, 8), (2, 8), (1, 4), (6, 3), *powers]:
        yield Case(
            f"{Hkv} KV heads, {tp} GPUs",
            lambda: mine.kv_heads_per_gpu(Hkv, tp),
            len(needed(2 * max(Hkv, tp), Hkv, tp)[0]),
        )


def needed(Hq: int, Hkv: int, tp: int) -> list[list[int]]:
    """The KV heads that the query heads of each GPU read."""
    each = Hq // tp
    return [sorted({h // (Hq // Hkv) for h in range(gpu * each, gpu * each + each)}) for gpu in range(tp)]


def heads_dealt(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [(G, 1 << rng.randint(0, 4), 1 << rng.randint(0, 3)) for G in (8, 16, 8)]
    for G, Hkv, tp in [(4, 4, 2), (4, 2, 4), (4, 1, 2), (2, 6, 3), *some]:
        Hq = G * Hkv
        held = needed(Hq, Hkv, tp)
        yield Case(
            f"{Hq} query heads, {Hkv} KV heads, {tp} GPUs: the KV heads of each GPU, and that of each query head",
            lambda: mine.deal_heads(Hq, Hkv, tp, "interleaved"),
            (held, [h // G for h in range(Hq)]),
        )


# --- The latent -------------------------------------------------------------------------------------------------------


def latent_layers(mine: ModuleType, context: Context) -> Iterator[tuple[str, Any, torch.Tensor, torch.Tensor]]:
    """(what it is, a layer of the reader's, queries, cached rows)."""
    for H, R, N, P, V, T, S in [
        (1, 3, 2, 2, 2, 1, 1),
        (2, 4, 3, 2, 5, 1, 3),
        (3, 8, 5, 4, 6, 4, 4),
        (4, 7, 6, 2, 3, 2, 9),
    ]:
        config = mine.MLAConfig(8, H, R, N, P, V)
        layer = mine.MLA.random(config, seed=context.rng.randrange(1 << 20))
        yield (
            f"{T} queries of {H} heads on {S} tokens; latents of {R}, keys of {N} and {P}, values of {V}",
            layer,
            context.randn(T, H, N + P),
            context.randn(S, R + P),
        )


def folded_queries(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for what, layer, q, _ in latent_layers(mine, context):
        N = layer.config.qk_nope_head_dim
        heads = [torch.cat((q[:, h, :N] @ layer.W_UK[h], q[:, h, N:]), -1) for h in range(q.shape[1])]
        yield Case(
            what,
            lambda: layer.absorb(q),
            torch.stack(heads, 1),
            lambda got, right: pictures.grid(got, right, "queries", "heads"),
        )


def one_head_for_all(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for what, layer, q, cached in latent_layers(mine, context):
        config = given.MLAConfig(*vars(layer.config).values())
        reference = given.MLA.random(config)
        reference.kv_b_proj = layer.kv_b_proj
        yield Case(
            what,
            lambda: layer.absorbed(q, cached),
            reference.naive(q, cached),
            lambda got, right: pictures.grid(got, right, "queries", "heads"),
        )


# --- The kernels ------------------------------------------------------------------------------------------------------


def decode(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for lens, size, Hq, Hkv, D, heads, splits, loud in [
        ([3], 4, 2, 1, 16, 2, 1, 1),
        ([130, 0, 129], 16, 6, 2, 16, 3, 1, 1),
        ([70, 5, 9], 4, 4, 2, 20, 1, 1, 60),
        ([70, 1], 16, 9, 3, 24, 3, 2, 1),
        ([130, 40], 16, 8, 2, 16, 2, 4, 60),
    ]:
        cache, table = shuffled(context, lens, size, Hkv, D)
        q = context.fence(context.randn(len(lens), Hq, D) * loud)
        right = []
        for b, S in enumerate(lens):
            places = [int(table[b, p // size]) * size + p % size for p in range(S)]
            k, v = cache.flatten(1, 2)[:, places]
            o = given.attention(q[b : b + 1].double(), k.double(), v.double(), given.interleaved(Hq, Hkv))
            right.append(o[0].nan_to_num(0.0).float())
        cache[:, 0] = math.nan  # the null block: no answer may depend on it
        yield Case(
            f"sequences of {lens} tokens in blocks of {size}, table {table.tolist()}, {Hq} query and {Hkv} KV heads of "
            f"{D}, {heads} query heads a program, keys in {splits} range{'s' * (splits > 1)}"
            + "; exp of one score alone overflows"
            * (loud > 1),
            lambda: mine.gqa_decode(q, cache, table, context.ints(lens), max(lens), heads, splits),
            torch.stack(right),
            lambda got, right: pictures.grid(got, right, "sequences", "heads"),
        )


def decode_latents(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for lens, size, H, R, P, splits, loud in [
        ([3], 4, 1, 16, 8, 1, 1),
        ([9, 0, 4], 4, 3, 24, 8, 1, 1),
        ([40, 1], 8, 18, 20, 4, 1, 60),  # more heads than a program has rows
        ([70, 33], 16, 4, 40, 20, 4, 1),
    ]:
        cache, table = shuffled(context, lens, size, 1, R + P)
        latents = cache[0, :, :, 0]
        q, scale = context.fence(context.randn(len(lens), H, R + P) * loud), (R + P) ** -0.5
        right = []
        for b, S in enumerate(lens):
            rows = torch.stack([latents[int(table[b, p // size]), p % size] for p in range(S)] or [q.new_zeros(R + P)])
            w = (q[b].double() @ rows.double().T * scale).softmax(-1)  # [H, S]
            right.append((w @ rows[:, :R].double()).float())
        cache[:, 0] = math.nan
        yield Case(
            f"sequences of {lens} tokens in blocks of {size}, table {table.tolist()}, {H} heads, latents of {R}, "
            f"rotated keys of {P}, keys in {splits} range{'s' * (splits > 1)}"
            + "; exp of one score overflows"
            * (loud > 1),
            lambda: mine.mla_decode(q, latents, table, context.ints(lens), max(lens), R, scale, splits),
            torch.stack(right),
            lambda got, right: pictures.grid(got, right, "sequences", "heads"),
        )


STEPS = (
    Step(
        "09.1",
        LESSON,
        "The head map",
        "interleaved",
        "return the KV head of each of Hq query heads: neighbours share one.",
        "Groups have Hq / Hkv query heads. With 4 query and 2 KV heads it is [0, 0, 1, 1].",
        head_map,
    ),
    Step(
        "09.2",
        LESSON,
        "What a GPU holds",
        "kv_heads_per_gpu",
        "return how many of Hkv KV heads each of `tp` GPUs holds. A head cannot be divided.",
        "With fewer heads than GPUs, a GPU has a copy of one.",
        heads_of_a_gpu,
    ),
    Step(
        "09.3",
        LESSON,
        "Heads are dealt out",
        "deal_heads",
        "`held`: for each GPU the list of its KV heads, `per_gpu` neighbours; each head is held somewhere.",
        "GPU g begins at head ⌊g · Hkv / tp⌋. Multiply before you divide: several GPUs may begin at the same head.",
        heads_dealt,
        first="held =",
    ),
    Step(
        "09.4",
        LESSON,
        "Fold the matrix into the query",
        "MLA.absorb",
        "return queries [T, H, R + P] whose product with a cached row is what q's with the head's own key would be.",
        "q·(W_UK c) = (W_UKᵀ q)·c, for each head with its own W_UK [N, R]. The rotated part stays, behind it.",
        folded_queries,
    ),
    Step(
        "09.5",
        LESSON,
        "One head for all",
        "MLA.absorbed",
        "attend in the absorbed form: folded queries on the cached rows, one KV head for all, then unfold.",
        "`attention` takes a head map and a scale. The key is the whole row, the value its first kv_lora_rank "
        "elements. The scale is that of the naive form.",
        one_head_for_all,
        forbidden=("MLA.naive",),
    ),
    Step(
        "09.6",
        LESSON,
        "One load for a group",
        "gqa_decode_kernel",
        "a program per (sequence, HEADS query heads, range of keys): its heads are the rows of one tile.",
        "Lesson 02's decode kernel with program_id(1) · HEADS as the first query head. Its KV head is a division by "
        "the group's size. Ranges are whole tiles; with SPLITS > 1, out and lse have a place for each.",
        decode,
        launches=("gqa_decode_kernel",),
        forbidden=("attention",),
    ),
    Step(
        "09.7",
        LESSON,
        "Decoding from latents",
        "mla_decode_kernel",
        "a program per (sequence, ROWS heads, range of keys): a token's R elements are key and value, P more are key.",
        "Load the query in two parts, R and P, and each cached row, too: the score is the sum of two dots. The tile of "
        "latents, already loaded, is what the weights are multiplied with. A cached row is R + P long.",
        decode_latents,
        launches=("mla_decode_kernel",),
        forbidden=("attention",),
    ),
)

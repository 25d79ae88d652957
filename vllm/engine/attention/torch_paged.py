"""Paged attention without a kernel: what a CPU runs, planned once per step and called in every layer.

Owns the plans and the operations of torch that follow them; called by the caches of lessons 02, 09 and 10 and by
`quantization.kv_cache`. It never writes to a cache. vLLM: `vllm/v1/attention/backends/cpu_attn.py`, which calls kernels
in C++.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

# Where a sequence's keys lie is the same in every layer, so a plan is made once per step. Two ways:
#   gathered: copy the blocks into a contiguous buffer, then SDPA. Any dtype; every key is read, written, read again.
#   in place: torch has no paged attention, but it has both its halves. `sampled_addmm` computes those elements of a
#             matrix product that a sparse matrix names: Q Kᵀ, at the slots of the block table. `embedding_bag` adds up
#             rows of a table, each times a weight: P V. With softmax between them nothing is copied. Torch has the
#             first for fp32 and fp64 only: of a 16-bit model the keys are copied, and the values read in place.
# Decodes go in place. What is gathered is the reference for it, serves several tokens of a sequence at once, and is how
# the caches of few bits and lesson 09's latent ones are read.

# Torch says so for every sparse matrix in this layout, whatever is done with it (the second only in 2.11).
warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")

Plan = list[tuple[torch.Tensor, ...]]  # for each group of sequences: rows of the batch, and what they read
# q [B n, Hq, D], a layer's kv_cache, and perhaps its sinks [Hq] -> [B n, Hq, D]
Decode = Callable[..., torch.Tensor]


def plan_decode(  # noqa: PLR0913  where keys lie, and which of them are seen
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    query_len: int = 1,
    window: int | None = None,
) -> Decode:
    """The plan of a step, as a function to call in each layer: it computes what lesson 02's `paged_decode` computes.

    Shapes: block_table [B, W], seq_lens [B], kv_cache that of any layer; `num_heads` is Hq, `query_len` the number n of
    newest tokens that each sequence asks for (lesson 07 has several: a token and what was guessed to follow it). With a
    `window`, each sees so many positions, its own among them, and blocks before them are not looked at.
    """
    if window is not None:
        block_table, seq_lens = last_blocks(block_table, seq_lens, kv_cache.shape[2], query_len + window - 1)
    if query_len > 1:  # they read the same keys: a copy serves them all, in place each would fetch its own
        plan, attend = gather_plan(block_table, seq_lens, kv_cache.shape, query_len, window), decode_gathered
    elif kv_cache.dtype in (torch.float32, torch.float64):
        plan, attend = in_place_plan(block_table, seq_lens, kv_cache, num_heads, window), decode_in_place
    else:
        plan, attend = copied_keys_plan(block_table, seq_lens, kv_cache, num_heads, window), decode_copied_keys
    return functools.partial(decode, attend=attend, plan=plan)


def last_blocks(
    block_table: torch.Tensor, seq_lens: torch.Tensor, size: int, reach: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables without the blocks in front of each sequence's last `reach` tokens, and lengths without their tokens.

    Shapes: block_table [B, W], seq_lens [B] -> [B, at most reach / size and one], [B].
    """
    skipped = (seq_lens - reach).clamp(min=0) // size  # [B] blocks
    width = min(block_table.shape[1], -(-(reach + size - 1) // size))  # of the first block, perhaps one token alone
    columns = skipped[:, None].long() + torch.arange(width, device=block_table.device)
    return block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1)), seq_lens - skipped * size


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """softmax over the keys and, where there are sinks, one logit more, which no value goes with: what it takes, the
    keys have less. Shapes: scores [..., S], sinks as scores but for a last dimension of 1 -> [..., S]."""
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


FEW_TOKENS = 16  # up to so many of a sequence are attended to like a decode


def attend_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """softmax(q kᵀ / √D + bias) v, with a sink for each row of q. Shapes: q [..., N, D], k, v [..., S, D], bias
    [..., N, S], sinks [..., N, 1] -> [..., N, D]. Scores are in fp32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    s = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5 + bias
    return softmax_with_sinks(s, sinks).to(v.dtype) @ v


def plan_few(  # noqa: PLR0913  as `plan_decode`, and who has how many tokens
    block_table: torch.Tensor,
    query_lens: Sequence[int],
    seq_lens: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    window: int | None = None,
) -> list[tuple[torch.Tensor, Decode]]:
    """For sequences that have few tokens in a step, one plan for each number of them: (rows of q, what to call).

    `query_lens` are the numbers of tokens of all sequences; q holds them one after another.
    """
    last, together = list(itertools.accumulate(query_lens)), collections.defaultdict(list)
    for b, n in enumerate(query_lens):
        if 0 < n <= FEW_TOKENS:
            together[n].append(b)
    plans = []
    for n, sequences in together.items():
        rows = torch.tensor([row for b in sequences for row in range(last[b] - n, last[b])], device=kv_cache.device)
        where = block_table[sequences], seq_lens[sequences]
        plans.append((rows, plan_decode(*where, kv_cache, num_heads, n, window)))
    return plans


def decode(
    q: torch.Tensor, kv_cache: torch.Tensor, attend: Callable, plan: Plan, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """`attend` for each group of the plan. A sequence in no group is empty, and gets 0."""
    if len(plan) == 1 and len(plan[0][0]) == len(q):  # all about equally long: no rows to pick
        return attend(q, kv_cache, *plan[0][1:], sinks)
    out = torch.zeros_like(q)
    for rows, *reads in plan:
        out[rows] = attend(q[rows], kv_cache, *reads, sinks)
    return out


def similar_lengths(
    block_table: torch.Tensor, seq_lens: torch.Tensor, size: int, reach: int | None = None
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Groups of sequences whose lengths differ by less than a factor of two, so padding stays below that; empty ones
    are in none. Yields rows of the batch, their blocks [b, w], and which slots hold a token [b, w * size], of the last
    `reach` ones if that is given."""
    groups: dict[int, list[int]] = collections.defaultdict(list)
    for b, S in enumerate(seq_lens.tolist()):
        if S:
            groups[S.bit_length()].append(b)
    for rows in groups.values():
        S = seq_lens[rows].long()
        width = -(-int(S.max()) // size)
        slot = torch.arange(width * size, device=S.device)
        live = slot < S[:, None]
        # Beyond a sequence's last block: the null block, which holds zeros.
        blocks = block_table[rows, :width].long().masked_fill(~live[:, ::size], 0)
        yield rows, blocks, live if reach is None else live & (slot >= S[:, None] - reach)


# --- Gathered -------------------------------------------------------------------------------------------------------


def gather_plan(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    shape: Sequence[int],
    query_len: int = 1,
    window: int | None = None,
) -> Plan:
    """For each group: (rows of the queries, blocks to gather, gathered slots to clear, bias to add to scores).

    Shapes: block_table [B, W], seq_lens [B], shape that of the cache; bias [b, 1, n, S], n being `query_len`.
    """
    num_blocks, size = shape[1:3]
    plan = []
    for rows, table, live in similar_lengths(block_table, seq_lens, size):
        source = torch.cat((table.flatten(), table.flatten() + num_blocks))  # keys, then values
        # Dead slots of used blocks may hold anything, NaN included, and 0 * NaN is NaN: they are cleared.
        dead = (live[:, ::size].repeat_interleave(size, 1) & ~live).flatten().nonzero().flatten()
        dead = torch.cat((dead, dead + live.numel()))
        n = torch.arange(query_len, device=live.device)
        reach = seq_lens[rows, None].long() - query_len + n  # [b, n]: each token's own position, the last one it sees
        slot = torch.arange(live.shape[1], device=live.device)
        hidden = slot > reach[..., None]  # [b, n, S]
        if window is not None:
            hidden |= slot <= reach[..., None] - window
        bias = torch.zeros(hidden.shape, device=live.device).masked_fill(hidden, -math.inf)[:, None]
        queries = (torch.tensor(rows, device=live.device)[:, None] * query_len + n).flatten()
        plan.append((queries, source, dead, bias))
    return plan


def decode_gathered(  # noqa: PLR0913  a query, a layer, and the three parts of its plan
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    source: torch.Tensor,
    dead: torch.Tensor,
    bias: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `paged_decode` computes, for a group of b sequences, by gathering: q [b n, Hq, D] -> [b n, Hq, D]."""
    (Hq, D), (size, Hkv), (b, _, n, _) = q.shape[1:], kv_cache.shape[2:4], bias.shape
    kv = kv_cache.view(-1, size * Hkv * D).index_select(0, source).view(-1, Hkv * D)
    kv.index_fill_(0, dead, 0)
    k, v = kv.view(2, b, -1, Hkv, D).transpose(2, 3)  # [b, Hkv, S, D] each
    # The G query heads of a KV head take the place of G queries: no key is repeated.
    queries = q.reshape(b, n, Hkv, -1, D).transpose(1, 2).reshape(b, Hkv, -1, D)  # [b, Hkv, n G, D]
    bias = bias.to(q.dtype)[:, :, :, None].expand(-1, -1, -1, Hq // Hkv, -1).flatten(2, 3)  # [b, 1, n G, S]
    if sinks is None:
        o = F.scaled_dot_product_attention(queries, k, v, bias)
    else:  # which torch's fused attention has not
        o = attend_with_sinks(queries, k, v, bias, sinks.view(Hkv, 1, -1).expand(-1, n, -1).reshape(Hkv, -1, 1))
    return o.view(b, Hkv, n, -1, D).transpose(1, 2).reshape(b * n, Hq, D)


# --- In place -------------------------------------------------------------------------------------------------------


def score_places(
    block_table: torch.Tensor, seq_lens: torch.Tensor, kv_cache: torch.Tensor, num_heads: int, window: int | None = None
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each group: rows of the batch; for each of its scores, b · Hq rows of S, the place of the key and value that
    it is about [b · Hq · S]; where each row begins [b · Hq + 1]; which of the S positions are seen [b, S].

    A place is a row of a layer's keys, or values, seen as [slots · Hkv, D].
    """
    num_blocks, size, Hkv = kv_cache.shape[1:4]
    heads = torch.arange(Hkv, device=block_table.device)[:, None, None]
    for rows, table, live in similar_lengths(block_table, seq_lens, size, window):
        slots = (table[:, :, None] * size + torch.arange(size, device=table.device)).flatten(1)  # [b, S]
        slots = slots.masked_fill(~live, 0)  # a dead slot may hold anything: slot 0, of the null block, holds zeros
        shape = (len(rows), Hkv, num_heads // Hkv, live.shape[1])
        places = (slots[:, None, None] * Hkv + heads).expand(shape).flatten()
        index = torch.int32 if max(num_blocks * size * Hkv, len(places)) < 2**31 else torch.int64  # half the bytes
        starts = torch.arange(0, len(places) + 1, live.shape[1], dtype=index, device=table.device)
        yield rows, places.to(index), starts, live


def in_place_plan(
    block_table: torch.Tensor, seq_lens: torch.Tensor, kv_cache: torch.Tensor, num_heads: int, window: int | None = None
) -> Plan:
    """For each group: (rows of the batch, the positions of its scores as a sparse matrix, bias to add to scores).

    The matrix has a row for each query head of each sequence and a column for each slot and KV head of the cache.
    """
    plan = []
    for rows, places, starts, live in score_places(block_table, seq_lens, kv_cache, num_heads, window):
        zeros = torch.zeros(len(places), dtype=kv_cache.dtype, device=live.device)
        shape = (len(starts) - 1, math.prod(kv_cache.shape[1:4]))
        scores = torch.sparse_csr_tensor(starts, places, zeros, shape, check_invariants=False)
        bias = torch.zeros(live.shape, dtype=kv_cache.dtype, device=live.device).masked_fill(~live, -math.inf)
        plan.append((torch.tensor(rows, device=live.device), scores, bias[:, None]))  # bias [b, 1, S]
    return plan


def decode_in_place(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    scores: torch.Tensor,
    bias: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `paged_decode` computes, for a group of b sequences, from keys and values where they lie.

    Semantics: s = Q Kᵀ / √D at the plan's positions, p = softmax(s + bias), o = Σ_j p_j v_j over the same positions.
    Shapes: q [b, Hq, D] -> [b, Hq, D]; `scores` lends its positions, and the memory for their values.
    """
    b, Hq, D = q.shape
    keys, values = kv_cache.view(2, -1, D)  # a row for each slot and KV head
    torch.sparse.sampled_addmm(scores, q.reshape(-1, D), keys.T, beta=0, alpha=D**-0.5, out=scores)
    p = softmax_with_sinks(scores.values().view(b, Hq, -1) + bias, None if sinks is None else sinks[:, None])
    places, starts = scores.col_indices(), scores.crow_indices()
    o = F.embedding_bag(places, values, starts, mode="sum", per_sample_weights=p.flatten(), include_last_offset=True)
    return o.view(b, Hq, D)


def copied_keys_plan(
    block_table: torch.Tensor, seq_lens: torch.Tensor, kv_cache: torch.Tensor, num_heads: int, window: int | None = None
) -> Plan:
    """For each group: (rows of the batch, keys to copy, bias to add to scores, and for the sums over values the places
    and the starts of `score_places`). Keys [b · Hkv · S], bias [b · Hkv, 1, S]."""
    Hkv, plan = kv_cache.shape[3], []
    for rows, places, starts, live in score_places(block_table, seq_lens, kv_cache, num_heads, window):
        b, S = live.shape
        keys = places.view(b, Hkv, -1, S)[:, :, 0].flatten()  # the query heads of a group share them
        bias = torch.zeros(live.shape, device=live.device).masked_fill(~live, -math.inf)
        bias = bias.repeat_interleave(Hkv, 0)[:, None]
        plan.append((torch.tensor(rows, device=live.device), keys, bias, places, starts))
    return plan


def decode_copied_keys(  # noqa: PLR0913  a query, a layer, and the four parts of its plan
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    keys: torch.Tensor,
    bias: torch.Tensor,
    places: torch.Tensor,
    starts: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `decode_in_place` computes, for 16-bit caches: q [b, Hq, D] -> [b, Hq, D].

    Keys are copied as fp32, since torch's product of 16-bit matrices rounds each score to 16 bits.
    """
    (_, Hq, D), (bHkv, _, S) = q.shape, bias.shape
    k, values = kv_cache.view(2, -1, D)
    k = k.index_select(0, keys).float().view(bHkv, S, D)
    s = torch.baddbmm(bias, q.reshape(bHkv, -1, D).float(), k.mT, alpha=D**-0.5)  # [b Hkv, G, S]
    if sinks is not None:  # [b Hkv, G, 1]
        sinks = sinks.view(-1, s.shape[1], 1).repeat(len(q), 1, 1)
    p = softmax_with_sinks(s, sinks).to(values.dtype).flatten()
    o = F.embedding_bag(places, values, starts, mode="sum", per_sample_weights=p, include_last_offset=True)
    return o.view(-1, Hq, D)


# --- Latents: one KV head, whose value is its key -------------------------------------------------------------------


def plan_latents(
    block_table: torch.Tensor, query_lens: Sequence[int], seq_lens: torch.Tensor, shape: Sequence[int]
) -> Plan:
    """For each group of sequences: (rows of q, blocks to gather, gathered slots to clear, bias to add to scores).

    Sequences with few tokens go together if they have equally many; of the others, each is a group of its own. `shape`
    is that of a layer's cache, [num_blocks, block_size, W]; the rest as in `plan_few`. Bias [b, 1, n, S].
    """
    last, together = list(itertools.accumulate(query_lens)), collections.defaultdict(list)
    for b, n in enumerate(query_lens):
        if n:
            together[n, b if n > FEW_TOKENS else None].append(b)
    plan = []
    for (n, _), sequences in together.items():
        rows = torch.tensor([row for b in sequences for row in range(last[b] - n, last[b])], device=seq_lens.device)
        for queries, source, dead, bias in gather_plan(block_table[sequences], seq_lens[sequences], (2, *shape), n):
            # That plan is for keys and values, one half after the other; here they are one.
            plan.append((rows[queries], source[: len(source) // 2], dead[: len(dead) // 2], bias))
    return plan


def attend_latents(q: torch.Tensor, cache: torch.Tensor, plan: Plan, scale: float | None = None) -> torch.Tensor:
    """Attention over what `plan_latents` gathers, q [T, H, W], cache [num_blocks, block_size, W] -> [T, H, W].

    The value is the whole key: a few elements more than anybody asks for, but PyTorch's fused attention wants both
    equally wide, and otherwise writes all scores down. A sequence in no group is empty, and gets 0.
    """
    H, W = q.shape[1:]
    out = torch.zeros_like(q)
    for rows, blocks, dead, bias in plan:
        b, _, n, S = bias.shape
        x = cache.flatten(1).index_select(0, blocks).view(-1, W)
        x.index_fill_(0, dead, 0)  # they may hold anything
        x, bias = x.view(b, 1, S, W), bias.to(q.dtype)
        queries = q[rows].view(b, n, H, W)
        if n > FEW_TOKENS:  # heads share the bias, which is as long as it is wide
            x = x.expand(-1, H, -1, -1)
            o = F.scaled_dot_product_attention(queries.transpose(1, 2), x, x, bias, scale=scale).transpose(1, 2)
        else:  # heads take the place of queries: a key is read once for all of them
            bias = bias.repeat_interleave(H, 2) if n > 1 else bias
            o = F.scaled_dot_product_attention(queries.view(b, 1, n * H, W), x, x, bias, scale=scale)
        out[rows] = o.reshape(b * n, H, W)
    return out


def decode_latent(  # noqa: PLR0913  what lesson 09's kernel takes
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, R: int, scale: float
) -> torch.Tensor:
    """What lesson 09's `mla_decode` computes: one KV head, whose value is the first R of its key. Planned at each call.

    Shapes: q [B, H, W], cache [num_blocks, block_size, W], block_table [B, blocks], seq_lens [B] -> [B, H, R].
    """
    return attend_latents(q, cache, plan_latents(block_table, [1] * len(q), seq_lens, cache.shape), scale)[..., :R]


# --- Prompts --------------------------------------------------------------------------------------------------------


def prefill_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of a prompt: q [T, Hq, D], the last T of S positions; k, v [S, Hkv, D]. Kernel: lesson 03."""
    T, S = len(q), len(k)
    mask = None if T == S else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T or S, D]
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=T == S, enable_gqa=True)
    return o[0].transpose(0, 1)

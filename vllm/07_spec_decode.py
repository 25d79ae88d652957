"""07 · Speculative decoding: several tokens from one pass, and not one of them different.

The question: a decode step reads every weight to compute one row per sequence, and a few more rows cost next to
nothing. If something cheap guesses the next tokens, the model can check all guesses in one pass. What guesses, how does
the answer stay exactly the model's own, and when is it worth it?

The mechanism:
  1. A drafter guesses K tokens. The target computes the last token and all K guesses in one pass: K + 1 rows.
  2. Row by row: a guess d that was drawn from q stands with probability min(1, p(d)/q(d)), where p is the target's row.
  3. The first guess that falls is replaced by a draw from norm(max(p − q, 0)). All guesses behind it are forgotten.
  4. If all stand, the last row gives one token more, the bonus. So a pass writes 1 to K + 1 tokens, distributed like p.
  5. Greedy requests have no p to draw from, and a guess that was looked up has no q. One question covers all of them:
     which token does the target write here, given that d was guessed? The guess stands if it is that token.
  6. Keys and values of rejected guesses stay where they are: the cache gets shorter, and the next pass overwrites them.

Here are one drafter and one request. The engine has more drafters in engine/spec_decode/drafters.py, companion 07b
trains some, and engine/spec_decode/verifier.py brings them to a batch. It calls this file's `rejection_sample`.

Numbers to remember: a pass writes (1 − α^(K+1)) / (1 − α) tokens if each guess stands with probability α. With c the
cost of making a guess and v that of verifying it, both in plain steps: some K pays if and only if α > c + v.

How to run:
  uv run python vllm/07_spec_decode.py                             the whole story
  uv run python vllm/07_spec_decode.py -k 8 --method suffix        longer guesses; another drafter in the engine
  uv run python vllm/07_spec_decode.py --break resample-from-p     break it: fluent text from another distribution
  uv run python vllm/07_spec_decode.py --break stale-kv            break it: a rejected guess stays in the cache
  uv run python vllm/07_spec_decode.py --bench                     minutes: drafters, tasks, batch sizes

Read for this: Leviathan et al. 2023, Chen et al. 2023 (the rule, found twice), Li et al. 2025 (EAGLE-3, for its table
by batch size), Daliri et al. 2024 (drafts that change no sample); vLLM 0.32 `v1/sample/rejection_sampler.py`,
`v1/core/sched/scheduler.py`, `v1/spec_decode/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from common import tl, triton

from engine import arguments
from lab import cli
from lab.hardware import HARDWARE
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.llm import LLM
from engine.request import SamplingParams
from engine.sampling.sampler import draw_tokens, most_probable, uniforms
from engine.spec_decode.drafters import METHODS

KEY = "07_spec_decode"


# --- 1. The rule, without cleverness ----------------------------------------------------------------------------------

Rows = Sequence[Sequence[float]]  # a distribution over the vocabulary each


def naive_round(p: Rows, q: Rows, draft: list[int], accept_u: Sequence[float], draw_u: Sequence[float]) -> list[int]:
    """What one pass writes: the drafts that stand, and one token more. Leviathan et al. 2023, algorithm 1.

    p: the target's K + 1 rows; q: the K rows that the drafts were drawn from; accept_u and draw_u: a random number in
    [0, 1) for each row.
    """
    for j, d in enumerate(draft):
        if accept_u[j] >= min(1, p[j][d] / q[j][d]):
            return [*draft[:j], naive_draw([max(a - b, 0) for a, b in zip(p[j], q[j])], draw_u[j])]
    return [*draft, naive_draw(p[-1], draw_u[-1])]  # the bonus


def naive_draw(weights: Sequence[float], u: float) -> int:
    """The first token at which the running sum exceeds u of the total: in proportion to the weights."""
    return next(x for x, running in enumerate(itertools.accumulate(weights)) if running > u * sum(weights))


# Why this is p. A token x is written where d is drafted in two ways: d = x stands, or d falls and x replaces it.
#
#     q(x) min(1, p(x)/q(x))  +  β · max(p(x) − q(x), 0) / β   =   min(p, q)  +  max(p − q, 0)   =   p(x)
#
# where β = Σ max(p − q, 0) = 1 − Σ min(p, q) is both the probability that a draft falls and the replacement's norm.
# So a draft stands with probability α = Σ min(p, q), one minus the total variation distance of p and q.


# --- 2. The rule on a batch -------------------------------------------------------------------------------------------
#
# Requests have different numbers of drafts; request b has k_b + 1 rows, one behind the other. Three kinds of rows, and
# one question to each: which token does the target write here, given that d was drafted?
#
#     greedy              argmax p
#     d has no q          a draw from p: it is d with probability p(d), and that is min(1, p(d)/q(d)) for a one-hot q
#     d was drawn from q  d if u·q(d) < p(d), else a draw from max(p − q, 0), which is 0 at this d
#
# In all three, a draft stands if and only if the answer is the draft. The bonus row's draft is −1, which is no token,
# so a request gets its answers up to the first that is not the draft: every special case is gone. And a row without q
# draws with the very number that plain decoding draws with (lesson 04b: a hash of seed and position), so prompt lookup
# leaves even sampled answers as they were, token for token.


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(p − q, 0), or p in a row where nothing is left of it. [N, V]."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(1, keepdim=True) > 0, rest, p)


def sample_rows(
    scores: torch.Tensor,
    draft_token_ids: torch.Tensor,
    is_greedy: torch.Tensor,
    draw_u: torch.Tensor,
    accept_u: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_rows: torch.Tensor | None,
) -> torch.Tensor:
    """Which token the target writes in each row, in torch. [R]. `rejection_sample` says what the arguments are."""
    if bool(is_greedy.all()):
        return most_probable(scores)
    rows = (~is_greedy).nonzero().flatten()
    p, d = scores[rows], draft_token_ids[rows]  # [N, V], [N]
    stands = torch.zeros_like(d, dtype=torch.bool)
    if draft_probs is not None:
        assert draft_rows is not None
        has_q = draft_rows[rows] >= 0
        q = draft_probs[draft_rows[rows]].where(has_q[:, None], 0)  # without a q, p − 0 is p. [N, V]
        p_d, q_d = (x.gather(1, d.clamp(min=0)[:, None]).flatten() for x in (p, q))
        stands = has_q & (accept_u[rows] * q_d < p_d) & p.sum(1).isfinite()  # u in fp64; no token from NaN or ∞
        p = residual(p, q)
    token_ids = most_probable(scores)
    token_ids[rows] = torch.where(stands, d, draw_tokens(p, draw_u[rows].cpu().numpy()))
    return token_ids


def count_sampled(
    token_ids: torch.Tensor, draft_token_ids: torch.Tensor, cu_num_sampled_tokens: torch.Tensor
) -> torch.Tensor:
    """1 + leading rows of each request where the answer is the draft, in torch. [B]."""
    start = cu_num_sampled_tokens[:-1]
    differs = (token_ids != draft_token_ids) | (token_ids < 0)
    differs = differs.nonzero().flatten()  # ascending; every request's last row is among them
    return differs[torch.searchsorted(differs, start)] - start + 1


# The same on a GPU. A row of 128,256 weights is long for one program: the first kernel gives one to each tile, and
# keeps its sum. The second finds the tile where the running sum passes u of the total, and in that tile the token.


@common.kernel
def sum_tiles_kernel(scores, is_greedy, draft_probs, draft_rows, sums, V, stride_scores, stride_draft,
                     HAS_DRAFT_PROBS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A row of 128,256 is long for one program: each sums up a tile. sums fp64 [1 or 2, R, tiles]: Σ max(p − q, 0) (of
    a greedy row: the largest score) and, where there are q, Σ p."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sums += row * tl.num_programs(1) + tile
    i = tile * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(scores + row * stride_scores + i, mask=i < V, other=float("-inf")).to(tl.float32)
    if tl.load(is_greedy + row):
        tl.store(sums, tl.max(tl.where(s == s, s, float("inf")), 0).to(tl.float64))  # NaN is above everything
    else:
        w = tl.where(i < V, s, 0.0)
        if HAS_DRAFT_PROBS:
            tl.store(sums + tl.num_programs(0) * tl.num_programs(1), tl.sum(w.to(tl.float64), 0))
            q_row = tl.load(draft_rows + row)
            q_size = tl.where(q_row >= 0, V, 0)  # without a q, nothing of it is read, and p − 0 is p
            q = tl.load(draft_probs + q_row * stride_draft + i, mask=i < q_size, other=0.0)
            w = tl.maximum(w - q, 0.0)
        tl.store(sums, tl.sum(w.to(tl.float64), 0))


@triton.jit
def draw_index(w, before, target, i):
    """The first i at which `before`, and all weights w [n] up to there, is more than the target."""
    found = tl.min(tl.where((before + tl.cumsum(w, 0) > target) & (w > 0), i, 2147483647), 0)
    # Two sums of the same numbers may differ in their last bit: at most the last that has any weight.
    return tl.minimum(found, tl.max(tl.where(w > 0, i, 0), 0))


@common.kernel
def sample_rows_kernel(scores, draft_token_ids, is_greedy, draft_probs, draft_rows, accept_u, draw_u, sums, token_ids,
                       V, num_tiles, stride_scores, stride_draft, HAS_DRAFT_PROBS: tl.constexpr,
                       TILES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Which tile, and then which of its tokens: no more of a row is read than its sums and one tile."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride_scores
    n, i = tl.arange(0, TILES), tl.arange(0, BLOCK)
    if tl.load(is_greedy + row):
        tops = tl.load(sums + row * num_tiles + n, mask=n < num_tiles, other=float("-inf"))
        first, top = tl.argmax(tops, 0) * BLOCK, tl.max(tops, 0)
        s = tl.load(scores + first + i, mask=first + i < V, other=float("-inf")).to(tl.float32)
        # No token, −1, in a row of −∞ alone, or with +∞ or NaN in it.
        valid = (top > float("-inf")) & (top < float("inf"))
        best = tl.argmax(tl.where(s == s, s, float("-inf")), 0)  # the interpreter cannot compare with NaN
        tl.store(token_ids + row, tl.where(valid, first + best, -1))
    else:
        draft = tl.load(draft_token_ids + row)
        rest = tl.load(sums + row * num_tiles + n, mask=n < num_tiles, other=0.0)
        all_p = rest
        stands = False
        q_size = 0
        if HAS_DRAFT_PROBS:
            q_row = tl.load(draft_rows + row)
            draft_probs += tl.maximum(q_row, 0) * stride_draft
            # fp64, as the draw below: a probability of 1e-9 shall not round to "never", nor 0 to "once in 2^24".
            p_d = tl.load(scores + tl.maximum(draft, 0)).to(tl.float64)
            q_d = tl.load(draft_probs + tl.maximum(draft, 0)).to(tl.float64)
            stands = (q_row >= 0) & (tl.load(accept_u + row) * q_d < p_d)
            # p = q up to rounding, or q is NaN: nothing is left to draw from but p.
            empty = (tl.sum(rest, 0) > 0) == 0
            p_row = tl.num_programs(0) + row
            all_p = tl.load(sums + p_row * num_tiles + n, mask=n < num_tiles, other=0.0)
            rest = tl.where(empty, all_p, rest)
            q_size = tl.where((q_row >= 0) & (empty == 0), V, 0)
        target = tl.load(draw_u + row) * tl.sum(rest, 0)
        tile = draw_index(rest, 0.0, target, n)
        first = tile * BLOCK
        w = tl.load(scores + first + i, mask=first + i < V, other=0.0).to(tl.float32)
        if HAS_DRAFT_PROBS:
            w = tl.maximum(w - tl.load(draft_probs + first + i, mask=first + i < q_size, other=0.0), 0.0)
        before = tl.sum(tl.where(n < tile, rest, 0.0), 0)
        token = tl.where(stands, draft, draw_index(w.to(tl.float64), before, target, first + i))
        mass = tl.sum(all_p, 0)
        tl.store(token_ids + row, tl.where((mass > 0) & (mass < float("inf")), token, -1))  # p may be NaN


@common.kernel
def count_sampled_kernel(token_ids, draft_token_ids, cu_num_sampled_tokens, num_sampled):
    b = tl.program_id(0)
    start, end = tl.load(cu_num_sampled_tokens + b), tl.load(cu_num_sampled_tokens + b + 1)
    count = 0
    going = 1
    for row in range(start, end):
        count += going
        going = going * (tl.load(token_ids + row) == tl.load(draft_token_ids + row)).to(tl.int32)
    tl.store(num_sampled + b, count)


def rejection_sample(
    scores: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_sampled_tokens: torch.Tensor,
    is_greedy: torch.Tensor,
    draw_u: torch.Tensor,
    accept_u: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    draft_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify the drafts of a ragged batch. Returns (token_ids [R], num_sampled [B]): request b is given the first
    num_sampled[b] of its tokens; what the target would have written behind a fallen draft is there, too.

    Semantics: token[r] = argmax scores[r] if is_greedy[r]; else d if q exists and accept_u[r]·q(d) < p(d); else the
    draw by inverse distribution at draw_u[r] from max(p − q, 0), or from p without q, with p = scores[r], d =
    draft_token_ids[r] and q = draft_probs[draft_rows[r]]. token[r] = −1 where scores[r] leave none (lesson 04's
    NO_TOKEN_ID): NaN or +∞ in it, −∞ alone, no mass. num_sampled = 1 + leading rows with token = draft.
    Shapes: scores [R, V] (probabilities; for greedy rows anything with the same argmax), draft_token_ids int64 [R] (−1
    in the last row of each request), cu_num_sampled_tokens int64 [B + 1], is_greedy bool [R], draw_u and accept_u
    float64 [R] in [0, 1), draft_probs fp32 [N, V], draft_rows int64 [R] (−1: no q).
    vLLM 0.32: v1/sample/rejection_sampler.py, three kernels.
    """
    R, V = scores.shape
    if not common.runs_kernel(scores):
        token_ids = sample_rows(scores, draft_token_ids, is_greedy, draw_u, accept_u, draft_probs, draft_rows)
        return token_ids, count_sampled(token_ids, draft_token_ids, cu_num_sampled_tokens)
    token_ids = torch.empty(R, dtype=torch.int64, device=scores.device)
    num_sampled = torch.empty(len(cu_num_sampled_tokens) - 1, dtype=torch.int64, device=scores.device)
    if R == 0:
        return token_ids, num_sampled
    has_q, BLOCK = draft_probs is not None, 256 if common.INTERPRET else 2048
    num_tiles = triton.cdiv(V, BLOCK)
    sums = torch.empty(2 if has_q else 1, R, num_tiles, dtype=torch.float64, device=scores.device)
    q = (scores, draft_token_ids) if draft_probs is None else (draft_probs, draft_rows)  # the former: not read
    strides = scores.stride(0), q[0].stride(0)
    how = {"HAS_DRAFT_PROBS": has_q, "BLOCK": BLOCK, "num_warps": 8}
    sum_tiles_kernel[(R, num_tiles)](scores, is_greedy, *q, sums, V, *strides, **how)
    inputs = scores, draft_token_ids, is_greedy, *q, accept_u, draw_u, sums
    TILES = max(16, triton.next_power_of_2(num_tiles))
    sample_rows_kernel[(R,)](*inputs, token_ids, V, num_tiles, *strides, TILES=TILES, **how)
    drafted = draft_token_ids, cu_num_sampled_tokens
    count_sampled_kernel[(len(num_sampled),)](token_ids, *drafted, num_sampled, num_warps=1)
    return token_ids, num_sampled


# --- 3. The loop: guess, verify, roll back ----------------------------------------------------------------------------

CONTEXT = 512


def look_up(tokens: Sequence[int], k: int, longest: int = 4, shortest: int = 2) -> list[int]:
    """Prompt lookup: the last n tokens have occurred before, so what followed them then may follow now. At most k.

    The longest n wins, at its first place, as in vLLM's first-generation runner. The engine's `NgramDrafter` remembers
    where each n-gram ended first, and need not search.
    """
    for n in range(longest, shortest - 1, -1):
        for end in range(n, len(tokens)):
            if tokens[end - n : end] == tokens[-n:]:
                return list(tokens[end : end + k])
    return []


class KVCache:
    """Keys and values of one sequence (lesson 01), the first `length` of them valid: a cache that can go back."""

    def __init__(self, model: llama.Llama) -> None:
        shape = model.config.num_hidden_layers, 2, CONTEXT, model.num_kv_heads, model.config.head_dim
        self.kv = torch.empty(shape, dtype=model.dtype, device=model.device)  # [L, 2, context, Hkv, D]
        self.length = 0

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes the T new tokens behind the valid ones; each sees those, and the new ones up to itself. [T, Hq, D]"""
        T, S = len(q), self.length + len(q)
        self.kv[layer, :, self.length : S] = torch.stack((k, v))
        keys, values = self.kv[layer, :, :S].transpose(1, 2)  # [Hkv, S, D] each
        visible = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, visible, enable_gqa=True)
        return out.transpose(0, 1)


def verify(logits: torch.Tensor, draft: list[int], step: int, params: SamplingParams) -> list[int]:
    """The target's k + 1 rows of logits become 1 to k + 1 tokens, the first of which is the answer's token `step`."""
    R, on_device = len(draft) + 1, functools.partial(torch.tensor, device=logits.device)
    scores = (logits / params.temperature).softmax(1) if params.temperature else logits
    u = on_device(uniforms([params.seed or 0] * R, range(step, step + R)))  # what plain decoding draws with here
    is_greedy = on_device([params.temperature == 0] * R)
    # The second u is for drafts with a q. A draft that was looked up has none.
    token_ids, num_sampled = rejection_sample(scores, on_device([*draft, -1]), on_device([0, R]), is_greedy, u, u)
    return token_ids[: int(num_sampled)].tolist()


def roll_back(cache: KVCache, num_rejected: int) -> None:
    """Rejected keys and values stay where they are, behind the end: the next pass writes over them unread."""
    cache.length -= num_rejected


def until_end(token_ids: list[int], ends: Collection[int]) -> list[int]:
    """An answer may end inside a draft: what was accepted behind its end is dropped."""
    return next((token_ids[: i + 1] for i, token in enumerate(token_ids) if token in ends), token_ids)


@torch.inference_mode()
def generate(
    model: llama.Llama, prompt: list[int], params: SamplingParams, K: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """The answer and, of each pass, (drafts, tokens written). K = 0 is the naive loop: one pass, one token."""
    assert params.max_tokens, "an answer needs a limit"
    ends = {*(params.stop_token_ids or ()), *model.config.eos_token_ids}
    tokens, limit, num_computed = list(prompt), len(prompt) + params.max_tokens, 0
    cache, passes = KVCache(model), []
    while len(tokens) < limit and not (passes and tokens[-1] in ends):
        room = limit - len(tokens) - 1  # a pass writes one token more than its drafts
        draft = look_up(tokens, min(K, room)) if passes else []  # nothing is guessed in the prompt's own pass
        new = torch.tensor(tokens[num_computed:] + draft, device=model.device)  # [T]
        positions = torch.arange(num_computed, num_computed + len(new), device=model.device)
        hidden = model.forward(new, positions, cache.attend)  # [T, hidden]
        cache.length += len(new)
        logits = model.logits(hidden[-1 - len(draft) :])  # [k + 1, V]
        sampled = verify(logits, draft, len(tokens) - len(prompt), params)
        roll_back(cache, len(draft) + 1 - len(sampled))
        written = until_end(sampled, ends)
        tokens += written
        num_computed = len(tokens) - 1  # all but the newest
        passes.append((len(draft), len(written)))
    return tokens[len(prompt) :], passes


@torch.inference_mode()
def target_tokens(model: llama.Llama, prompt: list[int], answer: list[int], params: SamplingParams) -> list[int]:
    """What the target writes in each place of an answer, given what is before: the reference.

    One pass over prompt and answer has all these rows, without a cache and without a draft.
    """

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, T, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    ids, n = torch.tensor(prompt + answer, device=model.device), len(answer)
    hidden = model.forward(ids, torch.arange(len(ids), device=model.device), attend)
    logits = model.logits(hidden[-1 - n : -1])  # [n, V]
    if params.temperature == 0:
        return logits.argmax(1).tolist()
    return draw_tokens((logits / params.temperature).softmax(1), uniforms([params.seed or 0] * n, range(n))).tolist()


# --- 4. When does it pay? ---------------------------------------------------------------------------------------------
#
# Each draft stands with probability α, as if independently. Then a round of K drafts writes
#
#     τ = 1 + α + α² + … + α^K = (1 − α^(K+1)) / (1 − α)     tokens,   and takes   1 + K (c + v)   plain steps,
#
# c for making a draft and v for one more row per sequence in the target's pass (Leviathan et al. have v = 0). Off is
# K = 0. If α ≤ c + v, then α + … + α^K ≤ K α ≤ K (c + v): no K gains. If α > c + v, K = 1 does.


def expected_tokens(alpha: float, K: int) -> float:
    """Tokens that a round writes on average: τ = 1 + α + … + α^K, or 1 + α (1 + α (…))."""
    return functools.reduce(lambda tau, _: 1 + alpha * tau, range(K), 1.0)


def speedup(alpha: float, K: int, c: float, v: float = 0.0) -> float:
    """Against plain decoding: tokens of a round over its length in plain steps."""
    return expected_tokens(alpha, K) / (1 + K * (c + v))


def best_k(alpha: float, c: float, v: float = 0.0, most: int = 128) -> int:
    """The K that gains most; 0: switch it off. 128 is vLLM's limit, and the engine's."""
    return max(range(most + 1), key=lambda K: (speedup(alpha, K, c, v), -K))


# Llama-3.1-8B in bf16 on an H100: weights (without the input embedding), and a cached token's bytes on all layers.
WEIGHTS, TOKEN_BYTES, H100 = 7_504_924_672, 131_072, HARDWARE["H100 80GB"]


def pass_seconds(num_seqs: int, rows: int, context: int) -> float:
    """A pass of `rows` tokens for each of `num_seqs` sequences, at both of the GPU's ceilings: weights are read once
    for all rows, and a sequence's keys and values once for its own."""
    weights = H100.seconds(flops=2 * WEIGHTS * num_seqs * rows, bytes_moved=2 * WEIGHTS)
    return weights + num_seqs * context * TOKEN_BYTES / H100.bandwidth


def verify_cost(num_seqs: int, K: int, context: int) -> float:
    """v: what a draft adds to a pass, in plain steps."""
    return (pass_seconds(num_seqs, K + 1, context) / pass_seconds(num_seqs, 1, context) - 1) / K


# --- 5. How to do it wrong --------------------------------------------------------------------------------------------


right_count = count_sampled


def without_bonus(
    token_ids: torch.Tensor, draft_token_ids: torch.Tensor, cu_num_sampled_tokens: torch.Tensor
) -> torch.Tensor:
    """The mistake: if all k drafts stand, the round ends with them."""
    k, n = cu_num_sampled_tokens.diff() - 1, right_count(token_ids, draft_token_ids, cu_num_sampled_tokens)
    return torch.where((n > k) & (k > 0), k, n)


BREAKS: dict[str, tuple[str, Callable]] = {  # name: (which function of this file, what stands in its place)
    "resample-from-p": ("residual", lambda p, q: p),
    "no-bonus": ("count_sampled", without_bonus),
    "stale-kv": ("roll_back", lambda cache, num_rejected: None),
    "past-eos": ("until_end", lambda token_ids, ends: token_ids),  # the loop looks at the last token alone
}


def broken(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which one function is wrong in the way that `name` says; None: all are right."""
    if name is None:
        return contextlib.nullcontext()
    function, wrong = BREAKS[name]
    return mock.patch.object(sys.modules[__name__], function, wrong)


# --- 6. The story -----------------------------------------------------------------------------------------------------


def check_rule() -> None:
    """Step 1: the rule on a vocabulary of three, for every draft and a grid of 8 × 48 random numbers.

    Here every p/q is a multiple of 1/8, and every running sum one of 1/48 of its total: no threshold lies inside a cell
    of the grid. So the share of the cells that lead to a token is its probability. That is a proof, not a sample.
    """
    common.heading("1. The rule: guessed by one distribution, distributed like another")
    p, bonus, q = [9 / 16, 5 / 16, 2 / 16], [1 / 4, 1 / 4, 1 / 2], [1 / 4, 1 / 4, 1 / 2]
    cases = [(d, (i + 0.5) / 8, (j + 0.5) / 48) for d in range(3) for i in range(8) for j in range(48)]
    chance = [q[d] / (8 * 48) for d, _, _ in cases]  # of each case
    written = rounds_with_one_draft(p, bonus, q, cases)

    alpha = sum(map(min, p, q))
    common.say(f"p = {p}, q = {q}: a draft stands with α = Σ min(p, q) = {alpha}")
    found = [sum(c for c, tokens in zip(chance, written) if tokens[0] == x) for x in range(3)]
    if (off := max(abs(a - b) for a, b in zip(found, p))) > 1e-12:
        raise common.CheckFailed(f"rejection_sample: a token's probability is off by {off:.3f}")
    common.say(f"✓ {len(cases):,} cases, every draft and every u of a grid: what is written has p, to 10⁻¹²")
    mean = sum(c * len(tokens) for c, tokens in zip(chance, written))
    if abs(mean - 1 - alpha) > 1e-12:
        raise common.CheckFailed(f"rejection_sample: {mean:.3f} tokens a round, expected 1 + α = {1 + alpha:.3f}")
    common.say(f"✓ with K = 1, {mean:.3f} tokens a round: 1 + α")
    naive = [naive_round([p, bonus], [q], [d], [accept], [draw, draw]) for d, accept, draw in cases]
    common.check_equal("in each case the tokens of the naive round", written, naive)


def rounds_with_one_draft(
    p: list[float], bonus: list[float], q: list[float], cases: list[tuple[int, float, float]]
) -> list[list[int]]:
    """What `rejection_sample` writes in each case (draft, accept_u, draw_u): all of them are requests of one batch."""
    B = len(cases)
    accept_u, draw_u = torch.tensor(cases, dtype=torch.float64)[:, 1:].repeat_interleave(2, dim=0).T  # [2 B] each
    token_ids, num_sampled = rejection_sample(
        scores=torch.tensor([p, bonus] * B),  # two rows each: the draft's, and the bonus
        draft_token_ids=torch.tensor([(d, -1) for d, _, _ in cases]).flatten(),
        cu_num_sampled_tokens=2 * torch.arange(B + 1),
        is_greedy=torch.zeros(2 * B, dtype=torch.bool),
        draw_u=draw_u,
        accept_u=accept_u,
        draft_probs=torch.tensor([q]),
        draft_rows=torch.tensor([0, -1] * B),
    )
    return [row[:n] for row, n in zip(token_ids.view(B, 2).tolist(), num_sampled.tolist())]


def check_kernels() -> None:
    """Step 1, continued: nine requests with two drafts each; in turn greedy, without a q, with a q."""
    if not common.HAS_TRITON:
        common.skipped("the kernels", "no Triton wheel on this platform")
        return
    g, rows = torch.Generator().manual_seed(0), torch.arange(27)
    is_bonus, kind = rows % 3 == 2, rows // 3 % 3
    p, q = (3 * torch.randn(2, 27, 300, generator=g)).softmax(2)
    accept_u, draw_u = torch.rand(2, 27, generator=g, dtype=torch.float64)
    drafts = torch.where(is_bonus, -1, torch.where(kind[:, None] == 2, q, p).argmax(1))
    q_rows = torch.where(is_bonus | (kind < 2), -1, rows)
    batch = p, drafts, torch.arange(10) * 3, kind == 0, draw_u, accept_u, q, q_rows
    by_torch = [x.tolist() for x in rejection_sample(*batch)]
    with common.use_kernels():
        by_kernels = [x.tolist() for x in rejection_sample(*(x.to(common.device()) for x in batch))]
    common.check_equal("the kernels, greedy and random, with and without a q: the same", by_kernels, by_torch)


FERRY = (
    "The ferry to the northern islands leaves from pier 7 at 6:40 in the morning and at 2:15 in the afternoon. "
    "Tickets cost 18 euros, children under 12 travel free, and dogs must wear a muzzle."
)
TASKS = {
    "copy": f"Repeat this text word for word:\n\n{FERRY}",
    "chat": "Explain in a few sentences why the sky is blue and sunsets are red.",
}


def tell_model(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> None:
    """Step 2: the loop on the real model, plain and with drafts."""
    common.heading(f"2. The real model: one request at a time, prompt lookup, {args.k} drafts at most")
    rows, shown = [], []
    for what, task, temperature in (("copy", "copy", 0), ("chat", "chat", 0), ("copy, T=0.7", "copy", 0.7)):
        prompt, params = tokenizer.ask(TASKS[task]), SamplingParams(temperature=temperature, seed=7, max_tokens=24)
        start = time.perf_counter()
        generate(model, prompt, params, 0)
        middle = time.perf_counter()
        answer, passes = generate(model, prompt, params, args.k)
        plain, drafted = middle - start, time.perf_counter() - middle
        if answer != target_tokens(model, prompt, answer, params):
            raise common.CheckFailed(f"{what}: not what the target writes: {tokenizer.decode(answer)!r}")
        rows.append([what, len(answer), len(passes), f"{plain:.2f} s", f"{drafted:.2f} s"])
        shown.append(f"{what:<12}" + " ".join(f"{n}/{k}" for k, n in passes))
    common.table(["", "tokens", "passes", "plain decoding", "with drafts"], rows)
    common.say("✓ each token is what the target writes there, computed anew without cache or draft")
    common.say("pass by pass, tokens written / drafts:\n" + "\n".join(shown))


def tell_end(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> None:
    """Step 2, continued: an answer that ends inside a draft, or at its first token if no draft stood."""
    prompt, params = tokenizer.ask(TASKS["copy"]), SamplingParams(temperature=0, max_tokens=24)
    answer, passes = generate(model, prompt, params, args.k)
    starts = itertools.accumulate((n for _, n in passes), initial=0)
    at = next((at for at, (_, n) in zip(starts, passes) if n > 1 and answer[at] not in answer[:at]), 0)
    params.stop_token_ids = [answer[at]]
    found, _ = generate(model, prompt, params, args.k)
    where = f"{'inside a draft' if at else 'at its first token'}, at {tokenizer.decode([answer[at]], False)!r}"
    common.check_equal(f"an answer that ends {where}, ends there", found, answer[: at + 1])


def tell_engine(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> None:
    """Step 3: the served engine has its own drafters, loop and blocks, and this file's rule."""
    common.heading(f"3. In the engine: one batch, drafter {args.method}")
    config = {"method": args.method, "num_speculative_tokens": args.k, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    llm = LLM(model, tokenizer=tokenizer, speculative_config=config, max_model_len=CONTEXT, num_gpu_blocks_override=192)
    prompts, params = [tokenizer.ask(text) for text in TASKS.values()], SamplingParams(temperature=0, max_tokens=24)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    answers = [output.outputs[0].token_ids for output in outputs]
    expected = [target_tokens(model, prompt, answer, params) for prompt, answer in zip(prompts, answers)]
    common.check_equal("each request's tokens are the target's", answers, expected)
    stats = llm.llm_engine.core.scheduler.spec_decoding_stats
    common.say(f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts stood")


def tell_economics() -> None:
    """Step 4, the surprise: a full batch ends the gain, unless its contexts are long."""
    common.heading("4. When it pays: α > c + v, and v comes from the batch")
    alpha, K, c, batches = 0.7, 4, 0.05, (1, 32, 128, 256, 512)

    def gain(num_seqs: int, context: int) -> float:
        return speedup(alpha, K, c, verify_cost(num_seqs, K, context))

    rows = [[f"{S:,}", *(f"{gain(B, S):.2f}x" for B in batches)] for S in (128, 1024, 4096)]
    common.table(["tokens each", "1 sequence", *(f"{B} sequences" for B in batches[1:])], rows)
    common.say(f"The speed-up of Llama-3.1-8B on an H100 by its roofline, with α = {alpha}, K = {K}, c = {c}.")
    crossover = next(B for B in itertools.count(1) if gain(B, 128) < 1)
    common.say(f"With {crossover} short sequences or more, drafts slow the GPU down. A step of long ones waits for")
    common.say("keys and values, which are read once for all K + 1 rows: it gains whatever the batch.")


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument("-k", type=arguments.number(int, 1, 16), default=4, metavar="K", help="drafts at most (default 4)")
    p.add_argument("--method", choices=METHODS, default="ngram", help="the engine's drafter (default ngram)")
    p.add_argument("--break", dest="wrong", choices=tuple(BREAKS), help="the bug: one function does it wrong")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    loader.check_context(args.model, CONTEXT)
    with broken(args.wrong):
        check_rule()
        check_kernels()
        model, tokenizer = loader.load(args.model)
        tell_model(args, model, tokenizer)
        tell_end(args, model, tokenizer)
        tell_engine(args, model, tokenizer)
    if args.wrong:
        common.say(f"NOT CAUGHT (--break {args.wrong}): nothing in these answers gave the bug an occasion to show")
    tell_economics()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

"""07 · Speculative decoding: several tokens from one pass, and not one of them different.

The question: a decode step reads every weight to compute one row per sequence, and a few more rows cost next to
nothing. If something cheap guesses the next tokens, the model can check all guesses in one pass. What guesses, how does
the answer stay exactly the model's own, and when is it worth it?

The mechanism:
  1. A drafter guesses K tokens. The target computes the last token and all K guesses in one pass: K + 1 rows.
  2. Row by row: a guess d, drawn from q, stands with probability min(1, p(d)/q(d)), where p is the target's row.
  3. The first that falls is replaced by a draw from norm(max(p − q, 0)); everything behind it is forgotten.
  4. If all stand, the last row gives one token more, the bonus: 1 to K + 1 tokens a pass, distributed as if by p alone.
  5. Greedy, and guesses without a q (prompt lookup): what the target writes there either is the guess, or ends it.
  6. Slots of rejected guesses are not cleaned up: `num_computed_tokens` goes back, and the next pass overwrites them.
  7. Drafters are in engine/spec_decode/drafters.py (n-grams, a suffix automaton, lookahead); companion 07b trains some.
     engine/spec_decode/verifier.py joins them to a step of the served engine.

Numbers to remember: a pass yields (1 − α^(K+1)) / (1 − α) tokens if each guess stands with probability α. With c the
cost of a guess and v that of verifying one more token, both in plain steps: some K pays if and only if α > c + v.

How to run:
  uv run python vllm/07_spec_decode.py                             the whole story
  uv run python vllm/07_spec_decode.py --method suffix -k 8        another drafter, longer guesses
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
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import HARDWARE, tl, triton

import llama
from engine.request import SamplingParams
from engine.config import VllmConfig
from engine.spec_decode.verifier import DraftVerifier
from engine.llm_engine import LLMEngine
from engine.sampling.sampler import draw_tokens
from engine.sampling.sampler import most_probable
from engine.sampling.sampler import uniforms
from engine.core.scheduler import Scheduler
from engine.core.stats import SpecDecodingStats
from engine.output import EngineCoreOutput, SchedulerOutput
from engine.request import Request

scheduling = common.lesson("04_continuous_batching")
offline = common.lesson("04b_offline_engine")
from lab import enumeration, roofline
from engine.spec_decode import drafters

Draft, DraftContext, Drafter = drafters.Draft, drafters.DraftContext, drafters.Drafter
SpeculativeConfig, make_drafter = drafters.SpeculativeConfig, drafters.make_drafter
METHODS = drafters.METHODS

KEY = "07_spec_decode"

Distribution, NextToken = enumeration.Distribution, enumeration.NextToken


# --- 1. The rule, without cleverness ----------------------------------------------------------------------------------


def naive_round(target: NextToken, drafter: NextToken, prefix: Sequence[int], K: int, rng: random.Random) -> list[int]:
    """One pass: draft K tokens, keep those that stand, write one more. Leviathan et al. 2023, algorithm 1."""
    draw = lambda weights: rng.choices(range(len(weights)), weights)[0]  # noqa: E731
    draft: list[int] = []
    for _ in range(K):
        draft.append(draw(drafter((*prefix, *draft))))
    for j, d in enumerate(draft):
        p, q = target((*prefix, *draft[:j])), drafter((*prefix, *draft[:j]))
        if rng.random() >= min(1, p[d] / q[d]):
            return [*draft[:j], draw([max(a - b, 0) for a, b in zip(p, q)])]  # choices() normalizes
    return [*draft, draw(target((*prefix, *draft)))]  # the bonus


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
    scores: torch.Tensor, draft_token_ids: torch.Tensor, cu_num_sampled_tokens: torch.Tensor,
    is_greedy: torch.Tensor, draw_u: torch.Tensor, accept_u: torch.Tensor, draft_probs: torch.Tensor | None = None,
    draft_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
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
    q = (draft_probs, draft_rows) if has_q else (scores, draft_token_ids)  # not read
    sizes = {"stride_scores": scores.stride(0), "stride_draft": q[0].stride(0), "HAS_DRAFT_PROBS": has_q,
             "BLOCK": BLOCK, "num_warps": 8}  # fmt: skip
    sum_tiles_kernel[(R, num_tiles)](scores, is_greedy, *q, sums, V, **sizes)
    sample_rows_kernel[(R,)](scores, draft_token_ids, is_greedy, *q, accept_u, draw_u, sums, token_ids, V, num_tiles,
                             TILES=max(16, triton.next_power_of_2(num_tiles)), **sizes)  # fmt: skip
    count_sampled_kernel[(len(num_sampled),)](
        token_ids, draft_token_ids, cu_num_sampled_tokens, num_sampled, num_warps=1
    )
    return token_ids, num_sampled


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(p − q, 0), or p in a row where nothing is left of it. [N, V]."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(1, keepdim=True) > 0, rest, p)


def sample_rows(scores: torch.Tensor, draft_token_ids: torch.Tensor, is_greedy: torch.Tensor, draw_u: torch.Tensor,
                accept_u: torch.Tensor, draft_probs: torch.Tensor | None,
                draft_rows: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    """`sample_rows_kernel` in torch: which token the target writes in each row. [R]."""
    if bool(is_greedy.all()):
        return most_probable(scores)
    rows = (~is_greedy).nonzero().flatten()
    p, d = scores[rows], draft_token_ids[rows]
    stands = torch.zeros(len(rows), dtype=torch.bool, device=scores.device)
    if draft_probs is not None and bool((has_q := draft_rows[rows] >= 0).any()):
        q, guess = draft_probs[draft_rows[rows][has_q]], d[has_q][:, None]  # [N, V], [N, 1]
        p_d, q_d = (x.gather(1, guess).flatten() for x in (p[has_q], q))  # fp64, as soon as u comes in
        stands[has_q] = accept_u[rows][has_q] * q_d < p_d
        p[has_q] = residual(p[has_q], q)
    token_ids = most_probable(scores)
    token_ids[rows] = torch.where(stands, d, draw_tokens(p, draw_u[rows].cpu().numpy()))
    return token_ids


def count_sampled(token_ids: torch.Tensor, draft_token_ids: torch.Tensor,
                  cu_num_sampled_tokens: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """`count_sampled_kernel` in torch: 1 + leading rows of each request where the answer is the draft. [B]."""
    start = cu_num_sampled_tokens[:-1]
    differs = (token_ids != draft_token_ids) | (token_ids < 0)
    differs = differs.nonzero().flatten()  # ascending; every request's last row is among them
    return differs[torch.searchsorted(differs, start)] - start + 1


def example_launches(dtype: torch.dtype) -> None:
    """The kernels at the vocabularies of SmolLM2 and Llama 3: 32 requests, 4 drafts each, with and without a q."""
    empty = functools.partial(torch.empty, device="meta")
    for V in (49152, 128256):
        ids, u, greedy = empty(160, dtype=torch.int64), empty(160, dtype=torch.float64), empty(160, dtype=torch.bool)
        scores, starts = empty(160, V, dtype=dtype), empty(33, dtype=torch.int64)
        rejection_sample(scores, ids, starts, greedy, u, u)
        rejection_sample(scores, ids, starts, greedy, u, u, empty(128, V), ids)


# --- 3. When does it pay? ---------------------------------------------------------------------------------------------
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
    """The K that gains most; 0: switch it off. 128 is vLLM's limit, and ours."""
    return max(range(most + 1), key=lambda K: (speedup(alpha, K, c, v), -K))


LLAMA_8B = roofline.MODELS["Llama-3.1-8B"]


def decode_seconds(gpu: common.GPU, num_seqs: int, rows: int, context: int) -> float:
    """A pass of `rows` tokens for each of `num_seqs` sequences, Llama-3.1-8B in bf16, at both of the GPU's ceilings.
    Weights are read once for all rows, a sequence's keys and values once for its own."""
    layers, head = roofline.weights_read(LLAMA_8B)
    flops, weight_bytes = 2 * (layers + head) * num_seqs * rows, 2 * (layers + head)
    cache = num_seqs * context * roofline.KVCacheSpec.from_config(LLAMA_8B).bytes_per_token()
    return gpu.seconds(flops, weight_bytes) + cache / gpu.bandwidth


def verify_cost(gpu: common.GPU, num_seqs: int, K: int, context: int) -> float:
    """v: what a draft adds to a pass, in plain steps."""
    plain = decode_seconds(gpu, num_seqs, 1, context)
    return (decode_seconds(gpu, num_seqs, K + 1, context) / plain - 1) / K


# Leviathan et al. 2023, tables 2 and 4: T5-XXL (11B) on a TPU-v4, α and the speed-up measured, predicted from α, c, K.
LEVIATHAN = [  # task, temperature, drafter, K, α, c, predicted, measured
    ("EnDe", 0, "small", 7, 0.75, 0.02, 3.2, 3.4), ("EnDe", 0, "base", 7, 0.80, 0.04, 3.3, 2.8),
    ("EnDe", 0, "large", 7, 0.82, 0.11, 2.5, 1.7), ("EnDe", 1, "small", 7, 0.62, 0.02, 2.3, 2.6),
    ("EnDe", 1, "base", 5, 0.68, 0.04, 2.4, 2.4), ("EnDe", 1, "large", 3, 0.71, 0.11, 2.0, 1.4),
    ("CNNDM", 0, "small", 5, 0.65, 0.02, 2.4, 3.1), ("CNNDM", 0, "base", 5, 0.73, 0.04, 2.6, 3.0),
    ("CNNDM", 0, "large", 3, 0.74, 0.11, 2.0, 2.2), ("CNNDM", 1, "small", 5, 0.53, 0.02, 1.9, 2.3),
    ("CNNDM", 1, "base", 3, 0.55, 0.04, 1.8, 2.2), ("CNNDM", 1, "large", 3, 0.56, 0.11, 1.6, 1.7),
]  # fmt: skip
# Li et al. 2025 (EAGLE-3, table 5), throughput in vLLM against vLLM without it, by batch size; chains of 2.
EAGLE = {"batch": [2, 4, 8, 16, 24, 32, 48, 56], "EAGLE": [1.30, 1.25, 1.21, 1.10, 1.03, 0.93, 0.82, 0.71],
         "EAGLE-3": [1.75, 1.68, 1.58, 1.49, 1.42, 1.36, 1.21, 1.01]}  # fmt: skip


# --- 4. How to do it wrong --------------------------------------------------------------------------------------------


def one_token_less(token_ids: torch.Tensor, draft_token_ids: torch.Tensor,
                   cu_num_sampled_tokens: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """All drafts stood, and that is it: no bonus."""
    k, n = cu_num_sampled_tokens.diff() - 1, right_count(token_ids, draft_token_ids, cu_num_sampled_tokens)
    return torch.where((n > k) & (k > 0), k, n)


def look_at_the_last_token(
    self: Scheduler, output: SchedulerOutput, sampled: dict[str, list[int]]
) -> list[EngineCoreOutput]:
    """The mistake: "a step brings one token, so the end of an answer is its last one"."""
    blind = [r for i, t in sampled.items() if (r := self.requests.get(i)) and {r.eos_token_id, *r.stop_token_ids}
             .isdisjoint(t[-1:])]  # fmt: skip
    ends = [(request.eos_token_id, request.stop_token_ids) for request in blind]
    for request in blind:
        request.eos_token_id, request.stop_token_ids = None, frozenset()
    heard = update_from_output(self, output, sampled)
    for request, (eos, stop) in zip(blind, ends):
        request.eos_token_id, request.stop_token_ids = eos, stop
    return heard


update_from_output, right_count = Scheduler.update_from_output, count_sampled
BREAKS: dict[str, tuple[Any, str, Callable]] = {  # name: (whose, which attribute, what stands in its place)
    "resample-from-p": (sys.modules[__name__], "residual", lambda p, q: p),
    "no-bonus": (sys.modules[__name__], "count_sampled", one_token_less),
    "stale-kv": (DraftVerifier, "_roll_back", lambda self, request, batch: None),
    "past-eos": (Scheduler, "update_from_output", look_at_the_last_token),
}


@contextlib.contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Inside this block, the mechanism is wrong in the way that `name` says; None: it is right."""
    if name is None:
        yield
        return
    owner, attribute, wrong = BREAKS[name]
    with mock.patch.object(owner, attribute, wrong):
        yield


# --- 5. The simulation behind the widget ------------------------------------------------------------------------------

WORDS = ["sea", "moon", "cat"]
PAIRS = {  # target p, draft q
    "half right": ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]),
    "close": ([0.6, 0.3, 0.1], [0.5, 0.4, 0.1]),
    "equal": ([0.6, 0.3, 0.1], [0.6, 0.3, 0.1]),
    "disjoint": ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0]),
    "draft is sure": ([0.6, 0.3, 0.1], [1.0, 0.0, 0.0]),
    "target is sure": ([1.0, 0.0, 0.0], [0.25, 0.25, 0.5]),
    "both even": ([0.3, 0.3, 0.4], [0.35, 0.35, 0.3]),
}
WIDGET_CHOICES = {
    "pair": list(PAIRS), "drafts": range(9), "draft_cost": [0, 0.05, 0.1, 0.3], "verify_cost": [0, 0.05, 0.25, 1],
    "bug": ["none", "resample-from-p", "no-bonus"], "seed": range(3),
}  # fmt: skip
WIDGET_DEFAULT = {"pair": "half right", "drafts": 4, "draft_cost": 0.1, "verify_cost": 0, "bug": "none", "seed": 0}
ROUNDS = 40


def draw_from(p: Distribution, u: np.ndarray) -> list[int]:
    """Lesson 04b's draw, for many u of one distribution."""
    return draw_tokens(torch.tensor([p], dtype=torch.float64).expand(u.size, -1), u.ravel()).tolist()


def simulate(params: dict) -> dict:
    """Rounds of a language of three words, through `rejection_sample`, beside what enumeration says. Raises InputError.

    The model always answers p and the drafter q, whatever came before, so one distribution says it all.
    """
    params = common.checked(params, WIDGET_CHOICES)
    (p, q), K, bug = PAIRS[params["pair"]], params["drafts"], params["bug"]
    bug = None if bug == "none" else bug
    index = np.arange(ROUNDS * (K + 1))
    draft_u, accept_u, draw_u = (uniforms([3 * params["seed"] + i] * len(index), index) for i in range(3))
    drafts = np.array(draw_from(q, draft_u)).reshape(ROUNDS, K + 1)
    drafts[:, K] = -1
    with broken(bug):
        tokens, num_sampled = rejection_sample(
            torch.tensor([p] * len(index), dtype=torch.float64), torch.from_numpy(drafts).flatten(),
            torch.arange(ROUNDS + 1) * (K + 1), torch.zeros(len(index), dtype=torch.bool), torch.from_numpy(draw_u),
            torch.from_numpy(accept_u), torch.tensor([q], dtype=torch.float64),
            torch.from_numpy(np.where(drafts.flatten() < 0, -1, 0)),
        )  # fmt: skip
    tokens, rounds, counts = tokens.view(ROUNDS, K + 1).tolist(), [], [0] * len(p)
    for i, n in enumerate(num_sampled.tolist()):
        draft, written = drafts[i, :K].tolist(), tokens[i][:n]
        kept = next((j for j, (a, b) in enumerate(zip(draft, written)) if a != b), min(n, K))
        tested = list(range(min(kept + 1, K)))
        rounds.append({
            "draft": draft, "ratio": [min(1.0, p[draft[j]] / q[draft[j]]) for j in tested],
            "u": [float(accept_u[i * (K + 1) + j]) for j in tested], "accepted": kept, "written": written,
        })  # fmt: skip
        for token in written:
            counts[token] += 1
    # Where a draft was tried, and over all that is written. (np.sum adds as a browser does; `sum`, since 3.12, better.)
    alpha = agrees = float(np.minimum(p, q).sum())
    rest = [max(a - b, 0) / (1 - alpha) if alpha < 1 else 0.0 for a, b in zip(p, q)]
    if bug == "resample-from-p":  # it may even draw the draft that fell
        rest, agrees = p, alpha + float(np.sum([max(b - a, 0) * a for a, b in zip(p, q)]))
    tried = [min(a, b) + (1 - alpha) * r for a, b, r in zip(p, q, rest)] if K else p
    lost = bug == "no-bonus"  # the last term of τ
    tau = [expected_tokens(agrees, max(0, k - lost)) for k in range(9)]
    mean, bonus = tau[K], 0.0 if lost and K else agrees**K
    gains = [tau[k] / (1 + k * (params["draft_cost"] + params["verify_cost"])) for k in range(9)]
    return {
        "words": WORDS, "p": p, "q": q, "alpha": alpha, "rounds": rounds, "counts": counts,
        "tried": tried, "written": [((mean - bonus) * t + bonus * x) / mean for t, x in zip(tried, p)],
        "distance": float(np.abs(np.subtract(tried, p)).sum()) / 2,
        "tokens_per_round": mean, "speedups": gains, "best": max(range(9), key=lambda k: (gains[k], -k)),
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    row = lambda name, values: f"{name:<28}" + "  ".join(f"{x:.3f}" for x in values)  # noqa: E731
    total, K = sum(trace["counts"]), len(trace["rounds"][0]["draft"])
    lines = [f"{'':<28}" + "  ".join(f"{word:<5}" for word in trace["words"]).rstrip(), row("target p", trace["p"]),
             row("draft q", trace["q"]), row("written where drafted", trace["tried"]),
             row(f"written in {len(trace['rounds'])} rounds", [n / total for n in trace["counts"]])]  # fmt: skip
    lines.append(f"distance from p {trace['distance']:.3f}, acceptance {trace['alpha']:.3f}")
    for i, r in enumerate(trace["rounds"][:3]):
        marks = [f"{trace['words'][d]} {'✓' if j < r['accepted'] else '✗' if j == r['accepted'] else '·'}"
                 for j, d in enumerate(r["draft"])]  # fmt: skip
        written = " ".join(trace["words"][token] for token in r["written"])
        lines.append(f"round {i}: {', '.join(marks) or 'nothing drafted'} -> {written}")
    lines.append(f"{total} tokens in {len(trace['rounds'])} rounds; {trace['tokens_per_round']:.3f} per round expected")
    lines.append(f"speed-up {trace['speedups'][K]:.3f} with K = {K}; best {trace['speedups'][trace['best']]:.3f} with "
                 f"K = {trace['best']}")  # fmt: skip
    return "\n".join(lines)


# --- 6. Numbers that the text quotes ----------------------------------------------------------------------------------

GRID = [([9, 5, 2], [4, 4, 8]), ([4, 4, 8], [8, 8, 0]), ([10, 4, 2], [4, 4, 8])]  # sixteenths: p, q of three rows


def exactness() -> dict[str, Any]:
    """The rule by enumeration, for drafters good and bad; and `rejection_sample` by counting."""
    errors, outputs = enumeration.all_errors(range(5))
    sixteenths = lambda rows: [[n / 16 for n in row] for row in rows]  # noqa: E731
    counted, off, means = {}, 0.0, {}
    for K in range(3):
        p, q = sixteenths([p for p, _ in GRID[: K + 1]]), sixteenths([q for _, q in GRID[:K]])
        shares, mean = enumeration.swept_round(rejection_sample, p, q, levels=8, draws=48)
        want = enumeration.exact_round(p, q)
        off = max(off, *(abs(shares.get(output, 0) - want.get(output, 0)) for output in {*shares, *want}))
        means[str(K)] = {"counted": mean, "expected": sum(len(output) * chance for output, chance in want.items())}
        counted[str(K)] = 3**K * 8**K * 48
    return {"error": max(errors), "cases": len(errors), "outputs": outputs, "counted_error": off,
            "grid": counted, "means": means}  # fmt: skip


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    bug = simulate({**WIDGET_DEFAULT, "bug": "resample-from-p"})
    rows = []
    for task, temperature, drafter, K, alpha, c, predicted, measured in LEVIATHAN:
        # At the ends of what α and c were before they were rounded to two digits.
        low, high = (speedup(alpha + off, K, c - off) for off in (-0.005, 0.005))
        rows.append({"name": f"{task}, T={temperature}, {drafter}", "K": K, "alpha": alpha, "c": c,
                     "formula": speedup(alpha, K, c), "low": low, "high": high, "predicted": predicted,
                     "measured": measured, "cost": expected_tokens(alpha, K) / measured})  # fmt: skip
    gpu, batches = HARDWARE["H100 80GB"], [1, 32, 64, 128, 256, 512]
    gain = lambda B, context: speedup(0.7, 4, 0.05, verify_cost(gpu, B, 4, context))  # noqa: E731
    h100 = {str(context): {"gain": {str(B): gain(B, context) for B in batches},
                           "v": {str(B): verify_cost(gpu, B, 4, context) for B in batches},
                           "crossover": next((B for B in range(1, 1025) if gain(B, context) < 1), None)}
            for context in (128, 1024, 4096)}  # fmt: skip
    guide = {str(a): {str(cost): {"k": (k := best_k(a / 100, cost / 100)), "gain": speedup(a / 100, k, cost / 100)}
                      for cost in (2, 10, 25, 50)} for a in (30, 50, 70, 90)}  # fmt: skip
    ratio = {name: EAGLE[name][0] / EAGLE[name][-1] for name in ("EAGLE", "EAGLE-3")}
    return {
        "exact": exactness(),
        "classic": {"alpha": bug["alpha"], "p": bug["p"], "wrong": bug["tried"], "distance": bug["distance"]},
        "half": {"k2": speedup(0.5, 2, 0.1), "k8": speedup(0.5, 8, 0.1), "k8_dear": speedup(0.5, 8, 0.3)},
        "leviathan": rows,
        "guide": guide,
        "table1": {"k2_60": expected_tokens(0.6, 2), "k10_90": expected_tokens(0.9, 10)},
        "h100": h100,
        "eagle": {"cost_ratio": ratio, **{name: [EAGLE[name][0], EAGLE[name][-1]] for name in ratio}},
        "no_bonus": {str(K): expected_tokens(0.7, K) - 0.7**K for K in (1, 4)},
        "seventy": {str(K): expected_tokens(0.7, K) for K in (1, 4)},
    }  # fmt: skip


# --- 7. The story -----------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """Where the probability goes when a draft falls; what K and batch size do to the gain."""
    c = common.COLORS
    figure, axes = common.new_figure(8.0, 3.0, ncols=3, sharey=True, width_ratios=[1, 1.1, 1])
    (p, q), found = PAIRS["half right"], facts()["classic"]
    x, both = range(3), [min(a, b) for a, b in zip(*PAIRS["half right"])]
    axes[0].bar([i - 0.2 for i in x], p, 0.38, color=c["blue"], label="p: target")
    axes[0].bar([i + 0.2 for i in x], q, 0.38, color=c["orange"], label="q: draft")
    right, wrong = [max(a - b, 0) for a, b in zip(p, q)], [w - b for w, b in zip(found["wrong"], both)]
    panels = (axes[1], right, "replace from max(p − q, 0)"), (axes[2], wrong, "replace from p: wrong")
    for ax, rest, title in panels:
        ax.bar(x, both, 0.6, color=c["green"], label="the draft stands")
        ax.bar(x, rest, 0.6, bottom=both, color=c["purple"], label="it fell, replaced")
        for i, height in enumerate(p):
            ax.plot([i - 0.38, i + 0.38], [height, height], color=c["blue"], linewidth=2)
        ax.set_title(title)
    axes[0].set(ylabel="probability", title="two opinions", ylim=(0, 0.85))
    for ax in axes:
        ax.set(xticks=x, xticklabels=WORDS)
    axes[0].legend(loc="upper center")
    axes[1].legend(loc="upper right")
    rule = common.save_figure(figure, folder, "07_rule")

    figure, axes = common.new_figure(8.0, 3.4, ncols=2)
    for alpha, color in ((0.9, "blue"), (0.8, "green"), (0.6, "orange"), (0.4, "red")):
        gains = [speedup(alpha, K, 0.1) for K in range(13)]
        axes[0].plot(range(13), gains, "o-", markersize=3, color=c[color], label=f"α = {alpha}")
        best = best_k(alpha, 0.1)
        axes[0].plot([best], [gains[best]], "o", markersize=8, color=c[color])
    axes[0].axhline(1, color=c["grey"], linewidth=1)
    axes[0].set(xlabel="drafts K, each costs c + v = 0.1 steps", ylabel="speed-up", title="longer is not better")
    axes[0].set_ylim(top=4.6)
    axes[0].legend(ncols=2)
    batches, gpu = [2**i for i in range(10)], HARDWARE["H100 80GB"]
    for context, color in ((4096, "blue"), (1024, "green"), (128, "red")):
        gains = [speedup(0.7, 4, 0.05, verify_cost(gpu, B, 4, context)) for B in batches]
        axes[1].plot(batches, gains, color=c[color], label=f"roofline, {context:,} tokens each")
    for name, marker in (("EAGLE-3", "^"), ("EAGLE", "v")):
        points = (EAGLE["batch"], EAGLE[name])
        axes[1].plot(*points, marker, color=c["grey"], markersize=4, label=f"{name} in vLLM, other GPU")
    axes[1].axhline(1, color=c["grey"], linewidth=1)
    axes[1].set(xscale="log", xlabel="sequences in the batch", title="a full batch has no free rows", ylim=(0.4, 4.2))
    axes[1].set(xticks=batches[::2], xticklabels=batches[::2])
    axes[1].minorticks_off()
    axes[1].legend(fontsize=8.5)
    return [rule, common.save_figure(figure, folder, "07_speedup")]


FERRY = ("The ferry to the northern islands leaves from pier 7 at 6:40 in the morning and at 2:15 in the afternoon. "
         "Tickets cost 18 euros, children under 12 travel free, and dogs must wear a muzzle.")  # fmt: skip
TASKS = {
    "copy": f"Repeat this text word for word:\n\n{FERRY}",
    "chat": "Explain in a few sentences why the sky is blue and sunsets are red.",
    "code": "Write a Python class Point with x and y, and methods to add, subtract and scale points.",
}  # fmt: skip


@dataclass
class Served:
    """What an engine made of a list of prompts."""

    token_ids: list[list[int]]
    seconds: float = 0.0  # of the steps behind the one that computed the last prompt
    steps: list[dict[int, tuple[int, int]]] = field(default_factory=list)  # {request: (drafts, tokens written)}
    stats: SpecDecodingStats | None = None

    def tokens_per_pass(self, i: int) -> float:
        """Behind the prompt's pass, which writes one token whatever is guessed; 0 if the answer ended there."""
        written = [step[i][1] for step in self.steps if i in step][1:]
        return sum(written) / max(1, len(written))


def serve(engine: LLMEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Served:
    """Hand everything in at once and step until all is done."""
    core, served = engine.core, Served([[] for _ in prompts])
    eos = (engine.model.config.eos_token_ids or (None,))[0]
    for i, (prompt, one) in enumerate(zip(prompts, params)):
        core.add_request(Request(str(i), list(prompt), one, eos_token_id=eos))
    while core.scheduler.has_unfinished_requests():
        decoding, start = all(served.token_ids), time.perf_counter()
        output = core.scheduler.schedule()
        heard = core.scheduler.update_from_output(output, core.execute_model(output))
        served.seconds += (time.perf_counter() - start) * decoding
        drafts, step = getattr(output, "scheduled_spec_decode_tokens", {}), {}
        for o in heard:
            i = int(o.request_id)
            step[i] = len(drafts.get(o.request_id, ())), step.get(i, (0, 0))[1] + len(o.new_token_ids)
            served.token_ids[i] += o.new_token_ids
        served.steps.append(step)
    served.stats = getattr(core.scheduler, "spec_decoding_stats", None)
    return served


def make_engine(model: llama.Llama, tokenizer: llama.Tokenizer, config: SpeculativeConfig | None = None,
                **options: Any) -> LLMEngine:  # fmt: skip
    """The engine, with drafts if there is a config."""
    about = VllmConfig(speculative_config=config)
    sizes = {"max_model_len": 512, "num_gpu_blocks_override": 192} | options
    return LLMEngine(model, tokenizer, config=about, **sizes)


def configure(method: str, K: int, **more: Any) -> SpeculativeConfig:
    """Prompt lookup from two tokens on: on short texts, vLLM's default of five finds little."""
    return SpeculativeConfig(method, K, prompt_lookup_min=2, prompt_lookup_max=4, **more)


def tell_rule(found: dict[str, Any]) -> None:
    """Step 1: the rule, enumerated and counted; None takes today's functions, broken ones too, not the facts."""
    common.heading("1. The rule: guessed by one distribution, distributed like another")
    exact, classic = exactness() if found is None else found["exact"], simulate(WIDGET_DEFAULT)
    common.say(f"p = {classic['p']}, q = {classic['q']}: a draft stands with α = Σ min(p, q) = {classic['alpha']:.1f}")
    if exact["error"] > 1e-12:
        raise common.CheckFailed(f"the rule: a probability is off by {exact['error']:.1e}")
    common.say(f"✓ {exact['outputs']:,} probabilities of 4-token outputs, K from 0 to 4, enumerated: the target's own")
    for K, mean in exact["means"].items():
        if abs(mean["counted"] - mean["expected"]) > 1e-12:
            raise common.CheckFailed(f"K = {K}: {mean['counted']:.3f} tokens a round, expected {mean['expected']:.3f}")
    common.say("✓ as many tokens per round as the formula says")
    if exact["counted_error"] > 1e-12:
        raise common.CheckFailed(f"rejection_sample: an output's probability is off by {exact['counted_error']:.3f}")
    common.say(f"✓ rejection_sample, counted over a grid of {exact['grid']['2']:,} draws: the same, without any error")
    if not common.HAS_TRITON:
        common.skipped("the kernels", "no Triton wheel on this platform")
        return
    batch = enumeration.ragged_batch(300, [3, 0, 4, 2, 5, 1, 0, 2, 3], seed=0)
    batch = {name: x.to(common.device()) for name, x in batch.items()}
    tokens, n = (x.tolist() for x in rejection_sample(**{name: x.cpu() for name, x in batch.items()}))
    with common.use_kernels():
        kernel = [x.tolist() for x in rejection_sample(**batch)]
    common.check_equal("the kernels, on 9 ragged requests, greedy and random with and without a q: the same", kernel,
                       [tokens, n])  # fmt: skip


def tell_model(args: argparse.Namespace, model: llama.Llama, tokenizer: llama.Tokenizer) -> dict[str, Any]:
    """Steps 2 and 3: every method against plain decoding, token by token; tokens per pass by method."""
    common.heading(f"2. The real model: four requests in one batch, {args.k} drafts at most")
    prompts = [tokenizer.ask(text) for text in (*TASKS.values(), TASKS["copy"])]
    names = [*TASKS, "copy, T=0.7"]
    params = [SamplingParams(temperature=0, max_tokens=24)] * 3
    params.append(SamplingParams(temperature=0.7, max_tokens=24, seed=7))
    plain = serve(make_engine(model, tokenizer), prompts, params)
    rows, methods = [["plain", *["1.00"] * 4, "", f"{plain.seconds:.2f} s"]], [args.method] if args.method else METHODS
    runs: dict[str, Served] = {}
    for method in methods:
        engine = make_engine(model, tokenizer, configure(method, args.k))
        runs[method] = run = serve(engine, prompts, params)
        accepted, drafted = run.stats.num_accepted_tokens, run.stats.num_draft_tokens
        rows.append([method, *(f"{rate:.2f}" if (rate := run.tokens_per_pass(i)) else "–" for i in range(4)),
                     f"{accepted}/{drafted}" if drafted else "–", f"{run.seconds:.2f} s"])  # fmt: skip
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        for i, (ours, theirs) in enumerate(zip(run.token_ids, plain.token_ids)):
            if not enumeration.same_but_for_rounding(model, prompts[i], params[i], ours, theirs):
                raise common.CheckFailed(f"{method}, {names[i]}: not the tokens of plain decoding: "
                                         f"{tokenizer.decode(ours)!r}")  # fmt: skip
        if pool.num_free_blocks != pool.num_blocks - 1:
            raise common.CheckFailed(f"{method}: blocks have leaked")
    common.table(["tokens per pass", *names, "stood", "decoding"], rows)
    common.say(f"✓ {', '.join(methods)}: the tokens of plain decoding, sampled ones included; no block leaked")

    common.heading("3. One continuous batch, another number of tokens for each request")
    run = runs[methods[0]]
    common.say(f"{methods[0]}: of each request, tokens written / drafts, pass by pass")
    for i, name in enumerate(names):
        cells = [f"{step[i][1]}/{step[i][0]}" if i in step else "" for step in run.steps[:14]]
        common.say((f"{name:<12}" + " ".join(f"{cell:>4}" for cell in cells)).rstrip())
    # A token inside a longer pass, as the end of the answer; the very first if a model only repeats itself in those.
    written, sizes = run.token_ids[0], [step[0][1] for step in run.steps if 0 in step]
    starts = itertools.accumulate(sizes, initial=0)
    at = next((at for at, n in zip(starts, sizes) if n > 1 and written[at] not in written[:at]), 0)
    one = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[written[at]])
    stopped = serve(make_engine(model, tokenizer, configure(methods[0], args.k)), prompts[:1], [one])
    where = "inside a draft" if at else "at its first token"
    common.check_equal(f"an answer that ends {where}, at {tokenizer.decode([written[at]], False)!r}, ends there",
                       stopped.token_ids[0], plain.token_ids[0][: at + 1])  # fmt: skip
    return {method: [run.tokens_per_pass(i) for i in range(4)] for method, run in runs.items()}


def step_costs(model: llama.Llama, tokenizer: llama.Tokenizer, batches: Sequence[int], K: int,
               seconds: float) -> dict[str, dict[str, float]]:  # fmt: skip
    """Of each batch size: a plain step in seconds, and v, what a draft adds to it. Context 64, attention included."""
    found: dict[str, dict[str, float]] = {}
    sizes = {"num_gpu_blocks_override": 40 + 6 * max(batches), "max_num_seqs": max(batches)}
    runner = make_engine(model, tokenizer, **sizes).core.runner
    for B in batches:
        times = []
        for n in (1, K + 1):
            blocks = [range(1 + 5 * b, 6 + 5 * b) for b in range(B)]
            meta = scheduling.AttentionMetadata.build(blocks, [64 + n] * B, [n] * B, 16, model.device)
            ids = torch.ones(B * n, dtype=torch.int64, device=model.device)
            run = lambda: runner.model.logits(runner.forward(ids, meta, ()))  # noqa: B023, E731
            times.append(common.measure(run, seconds).median)
        found[str(B)] = {"seconds": times[0], "v": max(0.0, times[1] / times[0] - 1) / K}  # noise may say less than 0
    return found


def tell_economics(args: argparse.Namespace, numbers: dict[str, Any], model: llama.Llama,
                   tokenizer: llama.Tokenizer) -> None:  # fmt: skip
    """Step 5: published speed-ups by the formula, and this machine's v with what it is good for."""
    common.heading("5. When it pays: α > c + v")
    off = [row["name"] for row in numbers["leviathan"]
           if not row["low"] - 0.05 <= row["predicted"] <= row["high"] + 0.05]  # fmt: skip
    common.check_equal("Leviathan's 12 predicted speed-ups, from α, c and K as far as they are printed", off, [])
    costs = step_costs(model, tokenizer, (1, 8), 4, 0.15)
    rows = []
    for B, cost in costs.items():
        gains = [speedup(alpha, 4, 0, cost["v"]) for alpha in (0.3, 0.6, 0.9)]
        rows.append([f"batch of {B}", f"{1e3 * cost['seconds']:.0f} ms", f"{cost['v']:.2f}",
                     *(f"{gain:.2f}x" for gain in gains)])  # fmt: skip
    common.table(["this machine", "plain step", "v", "α 0.3", "α 0.6", "α 0.9"], rows, "speed-up with 4 free drafts")


def measure_sampler(V: int, B: int = 32, K: int = 4) -> dict[str, dict[str, float]]:
    """K drafts of each of B requests verified, by kind of row: µs, and GB/s of the rows that must be read."""
    batch = {name: x.to(common.device()) for name, x in enumeration.ragged_batch(V, [K] * B, 0).items()}
    drafts, found = batch["draft_token_ids"] >= 0, {}
    q = {"draft_rows": torch.arange(len(drafts), device=drafts.device).where(drafts, -1)}
    no_q, rows = {"draft_rows": None, "draft_probs": None}, B * (K + 1)
    for kind, greedy, guesses, read in (("greedy", True, no_q, rows), ("without_q", False, no_q, rows),
                                        ("with_q", False, q, rows + B * K)):  # fmt: skip
        run = functools.partial(rejection_sample, **batch | guesses | {"is_greedy": torch.full_like(drafts, greedy)})
        seconds = common.measure_graph(run).median
        found[kind] = {"us": 1e6 * seconds, "gb_s": 4 * V * read / seconds / 1e9}
    return found


def benchmark(model: llama.Llama, tokenizer: llama.Tokenizer) -> dict[str, Any]:
    """Drafters, tasks and batch sizes against plain decoding: 64 tokens each, B copies of a task's prompt; then K."""
    common.heading("6. Measured: tokens per pass, and speed-up of decoding")
    bench: dict[str, Any] = {"step": step_costs(model, tokenizer, (1, 4, 16), 4, 2.0), "tasks": {}, "adaptive": {}}
    options = {"num_gpu_blocks_override": 400, "max_num_seqs": 16}
    batches, rows = (1, 4, 16), []

    def run(config: SpeculativeConfig | None, task: str, B: int) -> Served:
        prompt = tokenizer.ask(TASKS[task])
        params = [SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)] * B
        return serve(make_engine(model, tokenizer, config, **options), [prompt] * B, params)

    def against_plain(config: SpeculativeConfig, task: str, B: int) -> tuple[Served, float]:
        plain, served = zip(*((run(None, task, B), run(config, task, B)) for _ in range(2)))  # taking turns
        return served[0], min(x.seconds for x in plain) / min(x.seconds for x in served)

    for task in TASKS:
        for method in METHODS:
            found = bench["tasks"].setdefault(method, {})[task] = {}
            for B in batches:
                served, gain = against_plain(configure(method, 4), task, B)
                rate = served.stats.num_accepted_tokens / max(1, served.stats.num_draft_tokens)
                found[str(B)] = {"tokens_per_pass": served.tokens_per_pass(0), "speedup": gain, "accepted": rate}
            rows.append([f"{method}, {task}", f"{found['1']['tokens_per_pass']:.2f}", f"{found['1']['accepted']:.2f}",
                         *(f"{found[str(B)]['speedup']:.2f}x" for B in batches)])  # fmt: skip
    common.table(["drafter, task", "tokens/pass", "stood", *(f"batch {B}" for B in batches)], rows)
    common.heading("7. Lookahead on chat, batch 4: what bounds the damage of bad drafts?")
    rows = []
    for name, config in {
        "K = 8": configure("lookahead", 8), "K = 2": configure("lookahead", 2),
        "heuristic": configure("lookahead", 8, num_speculative_tokens_schedule="heuristic"),
        "off from 4": configure("lookahead", 8, num_speculative_tokens_per_batch_size=[[1, 3, 8], [4, 64, 0]]),
    }.items():  # fmt: skip
        served, gain = against_plain(config, "chat", 4)
        tokens, drafts = served.tokens_per_pass(0), served.stats.num_draft_tokens
        bench["adaptive"][name.replace(" ", "_").replace("=_", "")] = {
            "speedup": gain, "tokens_per_pass": tokens, "drafts": drafts
        }  # fmt: skip
        rows.append([name, f"{tokens:.2f}", drafts, f"{gain:.2f}x"])
    common.table(["", "tokens/pass", "drafts", "speed-up"], rows)
    common.heading("8. The rule alone: 4 drafts of each of 32 requests, by kind of row")
    bench["sampler"] = {str(V): measure_sampler(V) for V in (49152, 128256)}
    rows = [[f"{int(V):,}", *(f"{x['us']:,.0f} µs, {x['gb_s']:,.0f} GB/s" for x in kinds.values())]
            for V, kinds in bench["sampler"].items()]  # fmt: skip
    common.table(["vocabulary", "greedy", "without a q", "with a q"], rows)
    return bench


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    p.add_argument("-k", type=common.number(int, 1, 16), default=4, metavar="K", help="drafts at most (default 4)")
    p.add_argument("--method", choices=METHODS, help="only this drafter in steps 2 and 3 (default: all)")
    p.add_argument("--break", dest="wrong", choices=tuple(BREAKS), help="the bug: one function does it wrong")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine, numbers, bench = common.start(args), facts(), {}
    llama.check_context(args.model, 512)
    with broken(args.wrong):
        tell_rule(numbers if args.wrong is None else None)
        model, tokenizer = llama.load(args.model)
        found = tell_model(args, model, tokenizer)
    if args.wrong:
        common.say(f"NOT CAUGHT (--break {args.wrong}): nothing in these answers gave the bug an occasion to show")
    common.heading("4. The widget's default: three words, and every rule applied by the real function")
    common.say(describe(simulate(WIDGET_DEFAULT)))
    tell_economics(args, numbers, model, tokenizer)
    if args.bench:
        bench = {"tokens_per_pass": found} | benchmark(model, tokenizer)
    if args.figure:
        draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": numbers, "bench": bench})


if __name__ == "__main__":
    common.run(main)

"""Exact by enumeration: lesson 07's proof.

A sampler can be tested by sampling, and then a distribution that is off by a thousandth passes. On a vocabulary of
three, nothing needs to be sampled: every draft, every acceptance, every replacement and every bonus is a branch with a
known probability, and the probabilities of all outputs can be added up. They must be the target's own, to rounding, for
drafters good and bad, for every K, under temperature, top_k and top_p.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from engine.model import llama
from engine.request import SamplingParams
from engine.sampling.sampler import uniforms
from lab import naive
from lab.naive_sampler import reference_distribution

Distribution = Sequence[float]  # over the vocabulary
NextToken = Callable[[tuple[int, ...]], Distribution]  # a language model: the tokens so far -> what comes next


def exact_output(target: NextToken, drafter: NextToken, K: int, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every output of `length` tokens, rounds of K drafts, by enumeration: no random number."""

    @functools.cache
    def written(prefix: tuple[int, ...], left: int) -> dict[tuple[int, ...], float]:
        """`left` drafts of the current round have not been looked at."""
        if len(prefix) == length:
            return {prefix: 1.0}
        found: dict[tuple[int, ...], float] = {}

        def add(weight: float, token: int, left: int) -> None:
            if weight > 0:
                for output, chance in written((*prefix, token), left).items():
                    found[output] = found.get(output, 0.0) + weight * chance

        p = target(prefix)
        if left == 0:  # the bonus; a new round begins behind it
            for x, chance in enumerate(p):
                add(chance, x, K)
            return found
        q, falls = drafter(prefix), 0.0
        for d, chance in enumerate(q):
            if chance > 0:
                stands = min(1, p[d] / chance)
                add(chance * stands, d, left - 1)
                falls += chance * (1 - stands)
        rest = [max(a - b, 0) for a, b in zip(p, q)]
        for x, weight in enumerate(rest):
            add(falls * weight / (sum(rest) or 1), x, K)
        return found

    return written((), K)


def exact_round(p: Sequence[Distribution], q: Sequence[Distribution]) -> dict[tuple[int, ...], float]:
    """What one round writes, and how probably, if row j has the target's p[j] and the draft's q[j] whatever came."""
    found: dict[tuple[int, ...], float] = {}

    def walk(prefix: tuple[int, ...], chance: float) -> None:
        j = len(prefix)
        if j == len(q):
            for x, weight in enumerate(p[j]):
                found[*prefix, x] = found.get((*prefix, x), 0.0) + chance * weight
            return
        for x, (a, b) in enumerate(zip(p[j], q[j])):
            walk((*prefix, x), chance * min(a, b))
            found[*prefix, x] = found.get((*prefix, x), 0.0) + chance * max(a - b, 0)

    walk((), 1.0)
    return {tokens: chance for tokens, chance in found.items() if chance > 0}


def swept_round(
    sample: Callable, p: Sequence[Distribution], q: Sequence[Distribution], levels: int, draws: int
) -> tuple[dict[tuple[int, ...], float], float]:
    """What `rejection_sample` (lesson 07) really does with every draft and every u on a grid: ({output: share}, tokens
    a round).

    If every p/q is a multiple of 1/levels and every cumulative weight one of 1/draws of its total, the share of the
    grid that leads to an output is its probability, with no error at all: a proof by counting, not a sample.
    """
    K, V = len(q), len(p[0])

    def column(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x))

    def decode(code: int) -> tuple[int, ...]:
        digits = (int(code) // (V + 1) ** j % (V + 1) for j in range(K + 1))
        return tuple(digit - 1 for digit in digits if digit)

    grid = itertools.product(*[range(V)] * K, *[range(levels)] * K, range(draws))
    grid = np.array(list(grid), dtype=np.int64).reshape(-1, 2 * K + 1)  # [B, drafts, accept_u …, draw_u]
    B = len(grid)
    weight = np.prod([np.asarray(q[j], dtype=np.float64)[grid[:, j]] for j in range(K)], axis=0) * np.ones(B)
    drafts = column(np.concatenate((grid[:, :K], np.full((B, 1), -1)), axis=1))  # [B, K + 1]
    accept = column(np.concatenate(((grid[:, K : 2 * K] + 0.5) / levels, np.zeros((B, 1))), axis=1))
    draw = column(((grid[:, -1:] + 0.5) / draws) * np.ones((1, K + 1)))
    scores = torch.tensor(p, dtype=torch.float64).repeat(B, 1)  # [B · (K + 1), V]
    rows = torch.arange(K + 1).where(torch.arange(K + 1) < K, -1).repeat(B)
    tokens, num_sampled = sample(
        scores,
        drafts.flatten(),
        torch.arange(B + 1) * (K + 1),
        torch.zeros(len(scores), dtype=torch.bool),
        draw.flatten(),
        accept.flatten(),
        torch.tensor(q, dtype=torch.float64).view(K, V) if K else None,
        rows,
    )
    tokens, n = tokens.view(B, K + 1), num_sampled[:, None]
    codes = torch.where(torch.arange(K + 1) < n, tokens + 1, 0) @ (V + 1) ** torch.arange(K + 1)
    found, where = np.unique(codes.numpy(), return_inverse=True)
    shares = np.bincount(where, weights=weight) / (levels**K * draws)
    mean = float((num_sampled.double() @ column(weight)) / (levels**K * draws))
    return {decode(code): float(share) for code, share in zip(found, shares)}, mean


def ragged_batch(V: int, counts: Sequence[int], seed: int) -> dict[str, Any]:
    """Arguments for lesson 07's `rejection_sample`: requests with so many drafts each, greedy, without a q,
    with a q, in turn."""
    g, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    starts = [0, *itertools.accumulate(k + 1 for k in counts)]
    R, kinds = starts[-1], [b % 3 for b, k in enumerate(counts) for _ in range(k + 1)]
    p = (3 * torch.randn(R, V, generator=g)).softmax(1)
    q = torch.where(torch.rand(R, 1, generator=g) < 0.5, (3 * torch.randn(R, V, generator=g)).softmax(1), p)
    likely = [int(p[r].argmax()) if rng.random() < 0.7 else rng.randrange(V) for r in range(R)]
    for end in starts[1:]:
        likely[end - 1] = -1
    rows = [r if kind == 2 and likely[r] >= 0 else -1 for r, kind in enumerate(kinds)]
    return {
        "scores": p,
        "draft_token_ids": torch.tensor(likely),
        "cu_num_sampled_tokens": torch.tensor(starts),
        "is_greedy": torch.tensor([kind == 0 for kind in kinds]),
        "draft_probs": q,
        "draft_rows": torch.tensor(rows),
        "draw_u": torch.rand(R, generator=g, dtype=torch.float64),
        "accept_u": torch.rand(R, generator=g, dtype=torch.float64),
    }


# --- Targets and drafters ---------------------------------------------------------------------------------------------

SETTINGS = {"plain": {}, "temperature 0.5": {"temperature": 0.5}, "top_k 2": {"top_k": 2}, "top_p 0.7": {"top_p": 0.7}}


def toy_model(seed: int, **params: Any) -> NextToken:
    """A language model over three tokens that looks at all tokens before, with sampling parameters applied."""
    chosen = SamplingParams(**params)

    @functools.cache
    def model(prefix: tuple[int, ...]) -> tuple[float, ...]:
        rng = random.Random(repr((seed, prefix)))
        return tuple(reference_distribution([rng.gauss(0, 1.5) for _ in range(3)], chosen))

    return model


def avoid(target: NextToken) -> NextToken:
    """A drafter that never says what the target could: their supports are disjoint, where that is possible."""

    def drafter(prefix: tuple[int, ...]) -> Distribution:
        p = target(prefix)
        never = [float(x == 0) for x in p]
        return [x / sum(never) for x in never] if any(never) else [float(x == min(p)) for x in p]

    return drafter


def one_hot(drafter: NextToken) -> NextToken:
    """The drafter that is sure of its best token."""
    return lambda prefix: [float(x == max(drafter(prefix))) for x in drafter(prefix)]


def largest_error(target: NextToken, drafter: NextToken, K: int, length: int = 4) -> float:
    """Of the probability of any output, against the product of the target's own probabilities."""
    found, worst = exact_output(target, drafter, K, length), 0.0
    for output in itertools.product(range(3), repeat=length):
        want = math.prod(target(output[:i])[token] for i, token in enumerate(output))
        worst = max(worst, abs(found.get(output, 0.0) - want))
    return worst


def all_errors(Ks: Iterable[int]) -> tuple[list[float], int]:
    """`largest_error` of every setting, drafter and K; and how many probabilities that compared."""
    found = []
    for params in SETTINGS.values():
        target = toy_model(1, **params)
        for drafter in (toy_model(2), target, one_hot(toy_model(3)), avoid(target)):
            found += [largest_error(target, drafter, K) for K in Ks]
    return found, 3**4 * len(found)


# --- Equal, up to rounding ------------------------------------------------------------------------------------------


def same_but_for_rounding(
    model: llama.Llama,
    prompt: Sequence[int],
    params: SamplingParams,
    ours: Sequence[int],
    theirs: Sequence[int],
    tolerance: float = 1e-6,
) -> bool:
    """Are two answers the same, or do they part at a token where it took a rounding error to decide?

    A batch of another shape rounds logits otherwise. That decides where two logits tie, or where the random number lies
    on the edge between two tokens: 49,152 edges are close together if a model finds every token equally likely.
    `params` may have a temperature and a seed.
    """
    parted = [i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b]
    if not parted:
        return len(ours) == len(theirs)
    i = parted[0]
    low, high = sorted((ours[i], theirs[i]))
    ids = torch.tensor([*prompt, *ours[:i]], device=model.device)
    hidden = model.forward(ids, torch.arange(len(ids), device=model.device), naive.recompute)
    logits = model.logits(hidden[-1:])[0].double()
    if params.temperature == 0:
        return abs(logits[low] - logits[high]).item() <= tolerance * logits.abs().max().item()
    edges = (logits / params.temperature).softmax(0).cumsum(0)  # token x has [edges[x − 1], edges[x])
    u = uniforms([params.seed or 0], [i])[0]
    return all(abs(edges[x].item() - u) <= tolerance for x in (low, high - 1))

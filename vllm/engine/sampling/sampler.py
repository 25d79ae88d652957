"""From logits to tokens: what each request asks for, applied to a batch at once.

Owns the arithmetic of sampling, and what it must know of a request between two steps; called by the model runner. It
never decides when a request ends. vLLM: `vllm/v1/sample/sampler.py`, `vllm/v1/sample/ops/`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.request import NO_TOKEN_ID, Request
from engine.sampling import token_rules

GREEDY = 1e-5  # temperatures below this are 0
CANDIDATES = 1024  # tokens that top_p looks at before it sorts the whole vocabulary


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """The argmax of each row; NO_TOKEN_ID where there is none: a row with NaN or +∞ in it, or of −∞ alone.

    Shapes: logits [R, vocab] -> int64 [R]. `max` hands on a NaN, so its R values say what the whole rows are like.
    """
    best, token_ids = logits.max(1)
    return torch.where(best.isfinite(), token_ids, NO_TOKEN_ID)


def most_probable_ids(logits: torch.Tensor) -> list[int]:
    """`most_probable` as a list, with fewer operations: the host looks at what `max` found. [R, vocab] -> R ids."""
    best, token_ids = logits.max(1)
    return [i if math.isfinite(top) else NO_TOKEN_ID for i, top in zip(token_ids.tolist(), best.tolist())]


def uniforms(seeds: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) per request: a hash of its seed and of how many tokens it has generated. float64 [R].

    SplitMix64 as a counter-based generator: there is no state to carry, so neither the rest of the batch nor a
    preemption can change this number u. They do change the last bits of logits: a u within rounding of the boundary
    between two tokens may give the one or the other.
    """
    mask = (1 << 64) - 1
    with np.errstate(over="ignore"):
        x = _mix(np.array([seed & mask for seed in seeds], dtype=np.uint64))
        x = _mix(x + np.array(steps, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (x >> np.uint64(12)) * 2.0**-52


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SamplingState:
    """What sampling knows about one request between steps; `counts` exists only if a penalty asks for it."""

    def __init__(self, request: Request, seed: int, eos_token_ids: Iterable[int] = ()) -> None:
        p = request.sampling_params
        self.request, self.params, self.seed = request, p, seed
        self.greedy = p.temperature < GREEDY
        self.penalized = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        self.stop_token_ids = sorted({*request.stop_token_ids, *eos_token_ids})  # what min_tokens forbids
        self.allowed = None if p.allowed_token_ids is None else torch.tensor(p.allowed_token_ids)
        self.bad_words = p._bad_words_token_ids or []
        self.restricted = bool(self.bad_words) or self.allowed is not None
        # Only the greedy majority that asks for nothing else takes the short way.
        adjusted = self.penalized or p.logit_bias or p.min_tokens or self.restricted
        self.plain = self.greedy and not adjusted and p.logprobs is None
        self.counts: torch.Tensor | None = None  # fp32 [vocab]: times generated
        self.seen: torch.Tensor | None = None  # bool [vocab]: in the prompt or generated
        self.num_counted = 0

    def count(self, vocab_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Enter what was generated since the last step: O(new tokens), never O(context). Returns `counts`, `seen`."""
        if self.counts is None or self.seen is None:
            self.counts = torch.zeros(vocab_size, device=device)
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[torch.tensor(self.request.prompt_token_ids, device=device)] = True
        if new := self.request.output_token_ids[self.num_counted :]:
            new_ids = torch.tensor(new, device=device)
            self.counts.index_add_(0, new_ids, torch.ones(len(new), device=device))
            self.seen[new_ids] = True
            self.num_counted += len(new)
        return self.counts, self.seen


class SampledRow(token_rules.Wishes, Protocol):
    """What sampling must know of one row of logits: a `SamplingState`, or one some drafts on."""

    seed: int
    greedy: bool
    penalized: bool  # by any of the three penalties

    def count(self, vocab_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(times generated fp32 [vocab], in the prompt or generated bool [vocab]); penalties read them."""
        ...


def adjust_logits(logits: torch.Tensor, states: Sequence[SampledRow]) -> torch.Tensor:
    """Everything that can change even the greedy choice, in vLLM's order: what is ruled out, logit_bias, penalties.

    Shapes: logits fp32 [R, vocab], changed in place; returned for convenience.
    """
    token_rules.rule_out(logits, states)
    biased = [(row, *item) for row, state in enumerate(states) for item in (state.params.logit_bias or {}).items()]
    if biased:
        rows, tokens, biases = (torch.tensor(column, device=logits.device) for column in zip(*biased))
        logits[rows, tokens] += biases.to(logits.dtype)

    if penalized := [row for row, state in enumerate(states) if state.penalized]:
        chosen = [states[row] for row in penalized]
        counted = [state.count(logits.shape[1], logits.device) for state in chosen]

        # Only tokens that occur are touched: a few hundred of 49,152 in each row.
        def column(name: str) -> torch.Tensor:
            return torch.tensor([float(getattr(s.params, name)) for s in chosen], device=logits.device)

        row, token = torch.stack([seen for _, seen in counted]).nonzero(as_tuple=True)
        counts = torch.stack([times for times, _ in counted])[row, token]
        repetition, at = column("repetition_penalty")[row], (torch.tensor(penalized, device=logits.device)[row], token)
        x = logits[at]
        x = torch.where(x > 0, x / repetition, x * repetition)
        x = x - column("frequency_penalty")[row] * counts - column("presence_penalty")[row] * (counts > 0)
        logits[at] = x.to(logits.dtype)
    return logits


def distribution(
    logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The probabilities to draw from, all rows at once, in vLLM's order: temperature, min_p, top_k, top_p.

    Semantics: z = logits / temperature; keep z ≥ max z + ln min_p; of these, z ≥ the k-th largest; of these, with
    p = softmax(z), every token such that those more probable than it hold less than top_p. Softmax over what is left.
    Shapes: logits fp32 [R, vocab]; the others [R], "off" being min_p 0, top_k ≥ vocab, top_p 1; returns [R, vocab].
    Tokens that tie at a cut stay together, so the result never depends on how a sort breaks ties.
    """
    z = logits / temperature[:, None]
    vocab = z.shape[1]
    if (min_p > 0).any():
        z.masked_fill_(z < z.amax(1, keepdim=True) + min_p.log()[:, None], -math.inf)
    if (top_k < vocab).any():
        limited = top_k.clamp(max=vocab)
        widest = int(torch.where(limited < vocab, limited, 1).max())
        kth = z.topk(widest, dim=1).values.gather(1, limited.clamp(max=widest)[:, None] - 1)
        z.masked_fill_(z < torch.where(limited[:, None] < vocab, kth, -math.inf), -math.inf)
    if (top_p < 1).any():
        # Nearly always a few hundred candidates hold top_p of the mass; only other rows are sorted to the end.
        limited, lowest = (top_p < 1).nonzero().flatten(), z.new_full((len(z),), -math.inf)
        few = min(CANDIDATES, int(top_k[limited].max()) + 1, vocab)  # if top_k leaves 50, 51 are enough
        for width in sorted({few, vocab}):
            best = z[limited].topk(width, dim=1).values  # [r, width], descending
            p = (best - z[limited].logsumexp(1, keepdim=True)).exp().double()
            before = p.cumsum(1) - p  # mass of the tokens in front of each
            kept = (before < top_p[limited, None]).sum(1).clamp(min=1)  # none in a row of NaN, or of −∞ alone
            cut = best.gather(1, kept[:, None] - 1)
            done = (kept < width) | (width == vocab)
            lowest[limited[done]] = cut[done].flatten()
            limited = limited[~done]
            if not len(limited):
                break
        z.masked_fill_(z < lowest[:, None], -math.inf)
    return z.softmax(1)


def draw_tokens(probs: torch.Tensor, u: np.ndarray) -> torch.Tensor:
    """Invert the cumulative distribution: the first token whose cumulative probability exceeds u. int64 [R].

    NO_TOKEN_ID in a row that is none: of NaN, which a softmax makes of NaN, +∞, or −∞ alone, or without any mass.

    Token i gets the interval [c_{i−1}, c_i) of [0, 1), whose length is its probability: exact, and checkable as such.
    (vLLM divides by exponential noise and takes the argmax, the same distribution without a sum over the vocabulary.)
    """
    cumulative = probs.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.from_numpy(u).to(probs.device)[:, None] * total
    token_ids = torch.searchsorted(cumulative, target, right=True)
    return torch.where((total > 0) & total.isfinite(), token_ids, NO_TOKEN_ID).flatten()


@dataclass(slots=True)
class Logprob:
    """One candidate at one position: log probability under the raw model, and its rank (1: the most probable)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class Sampler:
    """Logits of a whole batch to one token per request (`vllm/v1/sample/sampler.py`)."""

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> tuple[list[int], list[dict | None]]:
        """Shapes: logits [R, vocab], any float dtype. Returns R token ids, and for each row its `{token id: Logprob}`.

        Log probabilities are those of the model itself, before any adjustment, as in vLLM V1.
        A row in which no token can be chosen, NaN in it or nothing allowed, gets NO_TOKEN_ID; the others do not notice.
        """
        logits = logits.float()
        if all(state.plain for state in states):
            return most_probable_ids(logits), [None] * len(states)
        adjusted = adjust_logits(logits.clone(), states)
        token_ids = most_probable(adjusted)
        if drawn := [row for row, state in enumerate(states) if not state.greedy]:
            chosen = [states[row] for row in drawn]
            probs = self.probabilities(adjusted[drawn], chosen)
            u = uniforms([s.seed for s in chosen], [s.request.num_output_tokens for s in chosen])
            token_ids[drawn] = draw_tokens(probs, u)
        sampled: list[int] = token_ids.tolist()
        logprobs: list[dict | None] = [None] * len(states)
        wants = [(row, state.params.logprobs) for row, state in enumerate(states) if sampled[row] != NO_TOKEN_ID]
        if wanted := {row: k for row, k in wants if k is not None}:
            rows = list(wanted)
            raw = logits[rows].log_softmax(1)
            found = self.gather_logprobs(raw, token_ids[rows], list(wanted.values()))
            for row, entry in zip(rows, found):
                logprobs[row] = entry
        return sampled, logprobs

    @staticmethod
    def probabilities(logits: torch.Tensor, states: Sequence[SampledRow]) -> torch.Tensor:
        """The distribution each random request draws from, after `adjust_logits`. [R, vocab] -> [R, vocab]."""
        vocab, of = logits.shape[1], [state.params for state in states]

        def row(values: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)

        return distribution(
            logits,
            row([p.temperature for p in of], torch.float32),
            row([p.min_p for p in of], torch.float32),
            row([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in of], torch.int64),
            row([p.top_p for p in of], torch.float64),
        )

    @staticmethod
    def gather_logprobs(raw: torch.Tensor, token_ids: torch.Tensor, wanted: Sequence[int]) -> list[dict]:
        """The row's own token first, then the `wanted` most probable ones. raw [R, vocab], token_ids and wanted [R]."""
        sampled = raw.gather(1, token_ids[:, None])
        ranks = (raw >= sampled).sum(1).tolist()
        best = raw.topk(min(max(1, *wanted), raw.shape[1]), dim=1)  # there may be fewer tokens than somebody wants
        rows = zip(token_ids.tolist(), sampled.flatten().tolist(), ranks, best.indices.tolist(), best.values.tolist())
        return [
            {token: Logprob(value, rank)}
            | {t: Logprob(v, i + 1) for i, (t, v) in enumerate(zip(ids, values)) if i < k and t != token}
            for (token, value, rank, ids, values), k in zip(rows, wanted)
        ]

"""04b · The offline engine: from logits to text.

The question: lesson 04 decides which requests run, and gets back one row of logits for each. What happens between that
row and the words a caller reads, if 32 callers in one batch want 32 different things?

The mechanism:
  1. Adjust: forbid stopping too early (min_tokens), add logit_bias, apply penalties. This can change even the argmax.
  2. Shape: temperature, then min_p, top_k, top_p. Each row its own values, all rows in the same few tensor operations.
  3. Draw: one uniform number per row, a hash of the request's seed and of how many tokens it has written. So the rest
     of the batch, the step, or a preemption cannot change this number.
  4. Text: token -> bytes -> an incremental UTF-8 decoder. Half a character is never shown, and a token costs O(1).
  5. Stop strings are found in text, because they may begin in one token and end in the next; what could still become
     one is held back from a stream.
  6. `n` samples are n requests with seeds seed, seed+1, …; they meet again only in the answer.
  7. A prompt is scored where it is computed: row i of a chunk holds what the model expects as token i + 1.
  8. `LLMEngine` validates, queues, steps and answers; `LLM.generate` and `LLM.chat` are loops around it.

Numbers to remember: a seeded request needs 2 integers of state (seed, count). An emoji may be 4 tokens, of which 3 show
nothing. With a stop string of s characters a stream always stays s − 1 characters behind.

How to run:
  uv run python vllm/04b_offline_engine.py                    the whole story
  uv run python vllm/04b_offline_engine.py --temperature 1.5  what the model says at a high temperature
  uv run python vllm/04b_offline_engine.py --decode-tokens    break it: decode token by token, and the check fails
  uv run python vllm/04b_offline_engine.py --bench            a minute: what each kind of sampling costs a step

Read for this: vLLM 0.32 `v1/sample/sampler.py`, `v1/sample/ops/topk_topp_sampler.py`, `v1/engine/detokenizer.py`,
`v1/engine/parallel_sampling.py`, `outputs.py`; Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Keskar et al.
2019 (repetition penalty), Steele et al. 2014 (SplitMix), Salmon et al. 2011 (counter-based random numbers).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import codecs
import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import llama
from engine.config import SchedulerConfig
from engine.core.scheduler import Scheduler, make_scheduler
from engine.output import SchedulerOutput
from engine.request import NO_TOKEN_ID, Request, RequestStatus, SamplingParams

KEY = "04b_offline_engine"

scheduling = common.lesson("04_continuous_batching")
from engine.sampling import token_rules

EngineCore, ModelEngineCore, ModelRunner = scheduling.EngineCore, scheduling.ModelEngineCore, scheduling.ModelRunner
most_probable, most_probable_ids = scheduling.most_probable, scheduling.most_probable_ids

GREEDY = 1e-5  # temperatures below this are 0
CANDIDATES = 1024  # tokens that top_p looks at before it sorts the whole vocabulary
MAX_BYTES = 4  # of a character in UTF-8
SCORED_ROWS = 256  # prompt tokens whose logits exist at a time: 48 MiB in fp32 with SmolLM2's vocabulary

Prompt = str | list[int] | dict  # text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}


# --- What we want, without cleverness: one row, in plain Python -----------------------------------------------------


def reference_distribution(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int] = (),
                           output: Sequence[int] = (), stop_token_ids: Sequence[int] = ()) -> list[float]:  # fmt: skip
    """The probabilities that one request draws its next token from, step by step as vLLM's Sampler documents them."""
    z = token_rules.reference_allowed(logits, params, output, stop_token_ids)
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    for token in set(prompt) | set(output):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(output):
        z[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if params.temperature < GREEDY:
        best = z.index(max(z))
        return [float(token == best) for token in range(len(z))]
    z = [x / params.temperature for x in z]
    p = _softmax(z)
    z = [x if q >= params.min_p * max(p) else -math.inf for x, q in zip(z, p)]
    if params.top_k > 0:
        kth = sorted(z, reverse=True)[min(params.top_k, len(z)) - 1]
        z = [x if x >= kth else -math.inf for x in z]
    p = _softmax(z)
    more_probable = lambda x: sum(q for y, q in zip(z, p) if y > x)  # noqa: E731
    return _softmax([x if params.top_p == 1 or more_probable(x) < params.top_p else -math.inf for x in z])


def reference_scores(model: llama.Llama, token_ids: Sequence[int]) -> torch.Tensor:
    """log p(xᵢ | x₀…xᵢ₋₁) for every token but the first, in one pass and without a cache. fp32 [tokens − 1]."""
    ids = torch.tensor(token_ids, device=model.device)
    hidden = model.forward(ids, torch.arange(len(ids), device=model.device), scheduling.recompute)
    return model.logits(hidden[:-1]).float().log_softmax(1).gather(1, ids[1:, None])[:, 0]


def _softmax(z: Sequence[float]) -> list[float]:
    weights = [math.exp(x - max(z)) for x in z]
    return [w / sum(weights) for w in weights]


# --- Sampling: one distribution per row, and one number to draw from it -----------------------------------------------


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

    def count(self, vocab_size: int, device: torch.device) -> None:
        """Enter what was generated since the last step: O(new tokens), never O(context)."""
        if self.counts is None:
            self.counts = torch.zeros(vocab_size, device=device)
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[torch.tensor(self.request.prompt_token_ids, device=device)] = True
        if new := self.request.output_token_ids[self.num_counted :]:
            new_ids = torch.tensor(new, device=device)
            self.counts.index_add_(0, new_ids, torch.ones(len(new), device=device))
            self.seen[new_ids] = True
            self.num_counted += len(new)


def adjust_logits(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
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
        for state in chosen:
            state.count(logits.shape[1], logits.device)
        # Only tokens that occur are touched: a few hundred of 49,152 in each row.
        column = lambda name: torch.tensor([float(getattr(s.params, name)) for s in chosen], device=logits.device)  # noqa: E731
        row, token = torch.stack([s.seen for s in chosen]).nonzero(as_tuple=True)
        counts = torch.stack([s.counts for s in chosen])[row, token]
        repetition, at = column("repetition_penalty")[row], (torch.tensor(penalized, device=logits.device)[row], token)
        x = logits[at]
        x = torch.where(x > 0, x / repetition, x * repetition)
        x = x - column("frequency_penalty")[row] * counts - column("presence_penalty")[row] * (counts > 0)
        logits[at] = x.to(logits.dtype)
    return logits


def distribution(logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor,
                 top_p: torch.Tensor) -> torch.Tensor:  # fmt: skip
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
        sampled, logprobs = token_ids.tolist(), [None] * len(states)
        wants = [state.params.logprobs for state in states]
        if wanted := [row for row, k in enumerate(wants) if k is not None and sampled[row] != NO_TOKEN_ID]:
            raw = logits[wanted].log_softmax(1)
            found = self.gather_logprobs(raw, token_ids[wanted], [wants[row] for row in wanted])
            for row, entry in zip(wanted, found):
                logprobs[row] = entry
        return sampled, logprobs

    @staticmethod
    def probabilities(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
        """The distribution each random request draws from, after `adjust_logits`. [R, vocab] -> [R, vocab]."""
        vocab, of = logits.shape[1], [state.params for state in states]
        row = lambda values, dtype: torch.tensor(values, dtype=dtype, device=logits.device)  # noqa: E731
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
            {token: Logprob(value, rank)} | {
                t: Logprob(v, i + 1) for i, (t, v) in enumerate(zip(ids, values))
                if i < k and t != token
            }
            for (token, value, rank, ids, values), k in zip(rows, wanted)
        ]  # fmt: skip


# --- The runner of lesson 04, with this sampler -----------------------------------------------------------------------


class StepLogprobs(dict):
    """{request id: one dictionary for each token of the step}, where a step brings several (lesson 07); each look-up of
    a request takes the next one."""

    def __getitem__(self, request_id: str) -> dict[int, Logprob]:
        return super().__getitem__(request_id).pop(0)


class SamplingModelRunner(ModelRunner):
    """Remembers per request what sampling needs from step to step, from its admission until it has finished."""

    structured_output_manager = None  # companion 06b's runner has one

    def __init__(self, model: llama.Llama, scheduler: Scheduler, seed: int = 0) -> None:
        super().__init__(model, scheduler)
        self.sampler = Sampler()
        self.states: dict[str, SamplingState] = {}
        self.logprobs: dict[str, dict[int, Logprob]] = {}  # of the last step, for requests that ask
        self.prompt_logprobs: dict[str, list[dict[int, Logprob] | None]] = {}  # of prompts that the last step completed
        self.scored: dict[str, list[dict[int, Logprob] | None]] = {}  # of prompts, as far as they have come
        self.unscored: set[str] = set()  # requests with a row of their prompt that is NaN, or infinite
        self.seeds = random.Random(seed)  # for requests that bring none

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Open and close the states of requests, then compute; sets `logprobs` and `prompt_logprobs` of this step."""
        for request_id in output.finished_req_ids:
            self.states.pop(request_id, None), self.scored.pop(request_id, None)
            self.unscored.discard(request_id)
        for request in output.scheduled_new_reqs:
            seed = request.sampling_params.seed
            seed = self.seeds.getrandbits(63) if seed is None else seed
            self.states[request.request_id] = SamplingState(request, seed, self.model.config.eos_token_ids)
            if request.sampling_params.prompt_logprobs is not None:
                self.scored[request.request_id] = [None]  # nothing predicts the first token
        self.logprobs, self.prompt_logprobs = {}, {}
        return super().execute_model(output)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> dict[str, list[int]]:
        """One token of each row, [R, vocab] -> R tokens, as its request asks; NO_TOKEN_ID where none can be chosen."""
        token_ids, logprobs = self.sampler(logits, [self.states[request.request_id] for request in requests])
        ids = [request.request_id for request in requests]
        self.logprobs = {request_id: found for request_id, found in zip(ids, logprobs) if found}
        sampled = {request_id: [token] for request_id, token in zip(ids, token_ids)}
        return sampled | {request_id: [NO_TOKEN_ID] for request_id in self.unscored & sampled.keys()}

    @torch.inference_mode()
    def score_prompts(self, hidden: torch.Tensor, meta: Any, requests: Sequence[Request]) -> None:
        """The row of token i holds what the model expects as token i + 1: log p(xᵢ₊₁ | x₀…xᵢ), chunk by chunk.

        A request that was preempted and computes it again goes on where its list ends. Shapes: hidden [T, hidden].
        """
        if not self.scored:
            return
        for request, end in zip(requests, itertools.accumulate(meta.query_lens)):
            found = self.scored.get(request.request_id)
            if found is None:
                continue
            computed, prompt = request.num_computed_tokens, request.prompt_token_ids
            first_row = end - computed  # where token 0 would be, were it in this step
            for i in range(len(found) - 1, min(computed, len(prompt) - 1), SCORED_ROWS):
                targets = prompt[i + 1 : min(i + SCORED_ROWS, computed) + 1]
                raw = self.model.logits(hidden[first_row + i : first_row + i + len(targets)]).float().log_softmax(1)
                if not raw.amax(1).isfinite().all():  # no score, and JSON has no number for it
                    self.unscored.add(request.request_id)
                ids = torch.tensor(targets, device=raw.device)
                found += self.sampler.gather_logprobs(raw, ids, [request.sampling_params.prompt_logprobs] * len(ids))
            if computed >= len(prompt):
                scores = self.scored.pop(request.request_id)
                if request.request_id not in self.unscored:
                    self.prompt_logprobs[request.request_id] = scores


# --- From token ids to text ------------------------------------------------------------------------------------------


class TokenBytes:
    """Token id to the bytes it stands for: what a tokenizer's decoder does, one token at a time.

    A token may hold half a character, so text cannot be put together from decoded tokens; bytes can.
    """

    def __init__(self, tokenizer: llama.Tokenizer) -> None:
        self.backend = tokenizer.backend
        # Not from `to_str()`, which spells out the vocabulary: 0.4 s for 49,152 tokens.
        added, decoder = self.backend.get_added_tokens_decoder(), str(self.backend.decoder)
        self.special = {token_id for token_id in added if not self.backend.decode([token_id])}
        self.added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.byte_level, self.byte_fallback = "ByteLevel(" in decoder, "ByteFallback(" in decoder
        if not (self.byte_level or self.byte_fallback):
            raise common.InputError("this tokenizer's decoder is not supported; allowed: ByteLevel, ByteFallback")
        # GPT-2's byte alphabet: printable bytes stand for themselves, the other 68 for U+0100 and on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        other = [byte for byte in range(256) if byte not in printable]
        self.alphabet = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(other)}
        self.cache: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self.cache.get(token_id)
        if found is None:
            found = self.cache[token_id] = self._decode(token_id)
        return found

    def _decode(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id]
        token = self.backend.id_to_token(token_id) or ""  # ids beyond the tokenizer's own stand for nothing
        if self.byte_level:
            if all(char in self.alphabet for char in token):
                return bytes(self.alphabet[char] for char in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def decoded_token(token_bytes: TokenBytes, token_id: int, before: Sequence[int]) -> str:
    """The text of one token among its log probabilities (`vllm/v1/engine/logprobs.py:_correct_decoded_token`).

    One that ends within a character is "", and one that completes it is all of it, begun by the last tokens `before`
    it. An alternative continues the same text as the token that was chosen.
    """
    decode = lambda *ids: b"".join(map(token_bytes.__getitem__, ids)).decode("utf-8", "replace")  # noqa: E731
    alone = decode(token_id)
    if not alone.endswith("\ufffd"):
        return alone
    for start in range(len(before) - 1, max(-1, len(before) - 1 - MAX_BYTES), -1):
        whole = decode(*before[start:], token_id)
        if not whole.endswith("\ufffd"):  # the fewest that do: none of them had a text of its own
            return whole
    return ""


class IncrementalDetokenizer:
    """Text of one request, a token at a time, O(1) each; stop strings are found here, because only text has them.

    Bytes that do not complete a character yet are held back by an incremental UTF-8 decoder. What might be the
    beginning of a stop string is held back by `get_next_output_text`.
    """

    def __init__(self, token_bytes: TokenBytes, params: SamplingParams) -> None:
        self.token_bytes, self.params = token_bytes, params
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.buffer = io.StringIO()  # grows in place, which a string does not
        self.length = self.num_tokens = 0
        self.sent = 0  # characters already handed out
        self.reach = max(map(len, params.stop), default=1) - 1  # how far back an unfinished stop string may begin
        self.tail = ""  # the last `reach` characters
        self.held_back = 0 if params.include_stop_str_in_output else self.reach

    @property
    def text(self) -> str:
        """Everything so far: O(length), for the end of a request."""
        return self.buffer.getvalue()

    def append(self, token_id: int, is_stop_token: bool = False) -> str | None:
        """Add one token; returns the stop string it completed, if any, with the text already cut."""
        self.num_tokens += 1
        hidden = is_stop_token and not self.params.include_stop_str_in_output
        if hidden or (self.params.skip_special_tokens and token_id in self.token_bytes.special):
            return None
        new = self.utf8.decode(self.token_bytes[token_id])
        self.buffer.seek(self.length)
        self.buffer.write(new)
        self.length += len(new)
        old, window = len(self.tail), self.tail + new
        self.tail = window[max(0, len(window) - self.reach) :]
        if not new or self.num_tokens <= self.params.min_tokens:
            return None
        # A match must end in the new text, so it begins at most len(stop) − 1 characters before that.
        matches = [(at + len(stop), at, stop) for stop in self.params.stop
                   if (at := window.find(stop, max(0, old - len(stop) + 1))) >= 0]  # fmt: skip
        if not matches:
            return None
        end, start, stop = min(matches, key=lambda match: match[0])
        self.length += (end if self.params.include_stop_str_in_output else start) - len(window)
        self.buffer.truncate(self.length)
        return stop

    def get_next_output_text(self, finished: bool) -> str:
        """The text since the last call, except what may still turn out to begin a stop string."""
        start = self.sent
        self.sent = max(start, self.length - (0 if finished else self.held_back))
        self.buffer.seek(start)
        return self.buffer.read(self.sent - start)


# --- What a caller sees ----------------------------------------------------------------------------------------------


@dataclass
class CompletionOutput:
    """One of the `n` answers to a prompt (`vllm/outputs.py`)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop token or string; None: the end-of-sequence token; of an error, why

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """What `LLM.generate` returns for each prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # in a stream: once, with the first token
    kv_transfer_params: dict[str, Any] | None = None  # lesson 08: for whoever goes on with this


@dataclass
class _Caller:
    """A caller's request: `n` sequences, answered together or streamed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    stream: bool
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)
    num_cached_tokens: int = 0


class _Sequence:
    """The front end's half of one `Request`."""

    def __init__(self, caller: _Caller, index: int, request: Request, token_bytes: TokenBytes) -> None:
        self.caller, self.index, self.request = caller, index, request
        self.detokenizer = IncrementalDetokenizer(token_bytes, request.sampling_params)
        wants_logprobs = request.sampling_params.logprobs is not None
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = [] if wants_logprobs else None
        self.cumulative_logprob = 0.0 if wants_logprobs else None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_sent = 0  # tokens that a stream has seen

    def completion(self, finish_reason: str | None, stop_reason: int | str | None) -> CompletionOutput:
        """For a stream, what came since the last call; otherwise everything."""
        first, text = 0, self.detokenizer.text
        if self.caller.stream:
            first, text = self.num_sent, self.detokenizer.get_next_output_text(finish_reason is not None)
            self.num_sent = len(self.token_ids)
        return CompletionOutput(
            self.index, text, self.token_ids[first:], self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs[first:], finish_reason, stop_reason,
        )  # fmt: skip


class LLMEngine:
    """Requests in, outputs out: validates, tokenizes, steps, detokenizes (`vllm/v1/engine/llm_engine.py`).

    Other engines replace `runner_class`, `collaborators` and `cache_block_bytes`.
    """

    runner_class = SamplingModelRunner

    def __init__(
        self,
        model: str | llama.Llama | None = None,
        tokenizer: llama.Tokenizer | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int = 1 << 30,
        scheduling_policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        generation_config: str = "auto",
        **options: Any,
    ) -> None:
        """`model` is a folder, a hub id, None for the default model, or a loaded model together with its `tokenizer`.

        The KV cache has `num_gpu_blocks_override` blocks (block 0 included, on a CPU as well: the name is vLLM's) or,
        by default, as many as fit `kv_cache_memory_bytes`, and at least enough for one sequence of `max_model_len`.
        `generation_config` may name the folder whose `generation_config.json` says which tokens end an answer.
        `options` are further fields of `SchedulerConfig`. Raises InputError.
        """
        if isinstance(tokenizer, str):
            raise common.InputError(f"tokenizer {tokenizer!r}: a model folder has its own; otherwise a llama.Tokenizer")
        if not isinstance(model, llama.Llama):
            model, loaded = llama.load(model, _dtype(dtype), generation_config=generation_config)
            tokenizer = tokenizer or loaded
        elif tokenizer is None:
            raise common.InputError("tokenizer: a loaded model needs one (llama.load returns both)")
        self.model, self.tokenizer = model, tokenizer
        self.token_bytes = TokenBytes(tokenizer)
        limit = model.config.max_position_embeddings
        max_model_len = _whole("max_model_len", limit if max_model_len is None else max_model_len, 1, limit)
        _whole("max_num_seqs", max_num_seqs, 1)
        _whole("block_size", block_size, 1)
        known = {f.name for f in dataclasses.fields(SchedulerConfig)} - {"policy"}
        if unknown := [name for name in options if name not in known]:
            allowed = ", ".join(sorted(known | {"block_size", "enable_prefix_caching"}))
            raise common.InputError(f"{unknown[0]}: no such engine argument; allowed, too: {allowed}")
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(4096, max_num_seqs)
            if not options.get("enable_chunked_prefill", SchedulerConfig.enable_chunked_prefill):
                max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)  # a prompt is computed whole
        _whole("max_num_batched_tokens", max_num_batched_tokens, 1)
        config = SchedulerConfig(max_model_len, max_num_seqs, max_num_batched_tokens, scheduling_policy, **options)
        num_blocks = num_gpu_blocks_override
        if num_blocks is None:
            _whole("kv_cache_memory_bytes", kv_cache_memory_bytes, 1)
            fitting = kv_cache_memory_bytes // self.cache_block_bytes(model, block_size)
            num_blocks = 1 + max(fitting, -(-max_model_len // block_size))
        _whole("num_gpu_blocks_override", num_blocks, 2)
        scheduler = make_scheduler(config, num_blocks, block_size, enable_prefix_caching, **self.collaborators())
        EngineCore(scheduler).check_pool()  # before the memory is taken
        self.core = ModelEngineCore(scheduler, self.runner_class(model, scheduler, seed))
        self.sequences: dict[str, _Sequence] = {}
        self.callers: dict[str, _Caller] = {}

    @staticmethod
    def cache_block_bytes(model: llama.Llama, block_size: int) -> int:
        """Bytes of one block: keys and values of all layers."""
        c = model.config
        return 2 * c.num_hidden_layers * block_size * model.num_kv_heads * c.head_dim * model.dtype.itemsize

    def collaborators(self) -> dict[str, Any]:
        """What the scheduler works with besides: keyword arguments of `Scheduler`."""
        return {}

    # -- requests --

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *,
                    stream: bool = False, tokenization_kwargs: dict[str, Any] | None = None, priority: int = 0,
                    cache_salt: str | None = None, lora_name: str | None = None) -> None:  # fmt: skip
        """Queue one prompt. `stream`: report new text in every step, not everything at the end.

        `tokenization_kwargs` may have 04b0's truncate_prompt_tokens and truncation_side. The last three go to the
        `Request`; a prompt that is a dict may have its own cache_salt. Raises InputError; then nothing was queued.
        """
        if request_id in self.callers:
            raise common.InputError(f"request id {request_id!r} is in use")
        limits = token_rules.TokenizeParams.of(self.core.scheduler.config.max_model_len, tokenization_kwargs)
        text, token_ids = self._tokenize(prompt, limits)
        if cache_salt is None and isinstance(prompt, dict):
            cache_salt = prompt.get("cache_salt")
        if not isinstance(cache_salt, str | None):
            raise common.InputError(f"cache_salt {cache_salt!r}: must be a string")
        _whole("priority", priority, -(2**63), 2**63 - 1)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise common.InputError(f"sampling_params {params!r}: must be a SamplingParams")
        guides = getattr(type(self.core.runner), "structured_output_manager", "elsewhere")  # companions 06c and 06e
        if params.structured_outputs is not None and guides is None:
            raise common.InputError("structured_outputs: this engine has no guided decoding (companion 06b)")
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            self._check_ids(name, getattr(params, name) or ())
        params = token_rules.update_from_tokenizer(params, self.tokenizer)
        eos = self.model.config.eos_token_ids
        own = eos[0] if eos and self.model.config.tokenizer_has_eos else None  # no stop_reason; the others have one
        if params.min_tokens and len({*params.stop_token_ids, *eos}) == self.model.config.vocab_size:
            raise common.InputError("min_tokens: not together with stop_token_ids that name every token")
        caller, sequences, own_name = _Caller(request_id, text, token_ids, stream), {}, self._own_name(request_id)
        for index in range(params.n):  # each of n samples is a request of its own, as in vLLM V1
            child, name = params, own_name
            if params.n > 1:
                child, name = copy.copy(params), f"{index}_{own_name}"  # checked already, however long its lists are
                child.n = 1
                child.seed = None if params.seed is None else params.seed + index
            request = Request(name, token_ids, child, priority=priority, eos_token_id=own, cache_salt=cache_salt,
                              lora_name=lora_name)  # fmt: skip
            if not child.ignore_eos:
                request.stop_token_ids |= set(eos) - {own}
            self.core.check_request(request)
            sequences[name] = _Sequence(caller, index, request, self.token_bytes)
        for name, sequence in sequences.items():
            self.core.add_request(sequence.request)
            caller.unfinished.add(name)
        self.sequences |= sequences
        self.callers[request_id] = caller

    def _own_name(self, request_id: str) -> str:
        """What the core calls the request; the caller's name does, as long as an abort is over when it returns."""
        return request_id

    def _tokenize(self, prompt: Prompt, limits: token_rules.TokenizeParams) -> tuple[str | None, list[int]]:
        prompt = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        if isinstance(prompt, dict) and isinstance(prompt.get("prompt_token_ids"), list | tuple):
            token_ids = limits.truncate(list(prompt["prompt_token_ids"]))
            self._check_ids("prompt_token_ids", token_ids)
            return prompt.get("prompt"), token_ids
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if not isinstance(text, str):
            raise common.InputError(f"prompt {prompt!r:.60}: must be a string, a list of token ids, "
                                    "{'prompt': a string} or {'prompt_token_ids': a list of token ids}")  # fmt: skip
        token_ids = limits.encode(self.tokenizer, text)
        self._check_ids("prompt", token_ids)  # a tokenizer may know more tokens than the model
        return text, token_ids

    def _check_ids(self, name: str, token_ids: Iterable[Any]) -> None:
        vocab = self.model.config.vocab_size
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab:  # long lists, at once
            return
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab:
                raise common.InputError(f"{name}: token id {token_id!r} must be a whole number from 0 to {vocab - 1}")

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks at once; unknown ids are passed over. They produce no more output."""
        for caller in filter(None, [self.callers.pop(request_id, None) for request_id in request_ids]):
            self.core.abort_requests(caller.unfinished)
            for name in caller.unfinished:
                del self.sequences[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.callers)

    # -- one step --

    def step(self) -> list[RequestOutput]:
        """One forward pass for all that are scheduled; returns what is new for callers."""
        heard: list[RequestOutput] = []
        try:
            outputs = self.core.step()
        except BaseException:  # Ctrl-C, say: what the step was to compute is in the prefix cache's index already
            getattr(self.core.scheduler.kv_cache_manager, "reset_prefix_cache", lambda: None)()
            raise
        scored = self.core.runner.prompt_logprobs
        while scored:  # emptied: companion 06e comes here several times with the scores of one step
            request_id, entries = scored.popitem()
            if sequence := self.sequences.get(request_id):
                ids = sequence.request.prompt_token_ids
                sequence.prompt_logprobs = [
                    entry and self._decoded(entry, ids[max(1, i - MAX_BYTES) : i]) for i, entry in enumerate(entries)
                ]
        for output in outputs:
            sequence = self.sequences.get(output.request_id)
            if sequence is None:
                continue
            finish_reason, stop_reason = output.finish_reason, output.stop_reason
            for i, token_id in enumerate(output.new_token_ids):
                sequence.token_ids.append(token_id)
                stopped = finish_reason == "stop" and i == len(output.new_token_ids) - 1
                found = sequence.detokenizer.append(token_id, stopped)
                if found is not None:
                    if finish_reason is None:  # the scheduler cannot know: end it from outside
                        self.core.scheduler.finish_requests([output.request_id], RequestStatus.FINISHED_STOPPED)
                    finish_reason, stop_reason = "stop", found
                    break
            if sequence.logprobs is not None and output.new_token_ids:
                n = len(sequence.logprobs)
                before = sequence.token_ids[max(0, n - MAX_BYTES) : n]
                found = self._decoded(self.core.runner.logprobs[output.request_id], before)
                sequence.logprobs.append(found)
                sequence.cumulative_logprob += found[output.new_token_ids[0]].logprob
            if answer := self._answer(sequence, finish_reason, stop_reason):
                answer.kv_transfer_params = output.kv_transfer_params
                heard.append(answer)
        return heard

    def _answer(self, sequence: _Sequence, finish_reason: str | None,
                stop_reason: int | str | None) -> RequestOutput | None:  # fmt: skip
        caller = sequence.caller
        if finish_reason is not None:
            caller.unfinished.discard(sequence.request.request_id)
            del self.sequences[sequence.request.request_id]
        finished = not caller.unfinished
        if finished:
            del self.callers[caller.request_id]
        if finish_reason is None and not caller.stream:
            return None
        completion = sequence.completion(finish_reason, stop_reason)
        caller.num_cached_tokens = max(caller.num_cached_tokens, sequence.request.num_cached_tokens)
        outputs = [completion]
        if not caller.stream:
            caller.outputs[sequence.index] = completion
            if not finished:
                return None
            outputs = [caller.outputs[i] for i in sorted(caller.outputs)]
        scores, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        return RequestOutput(caller.request_id, caller.prompt, caller.prompt_token_ids, outputs, finished,
                             caller.num_cached_tokens, scores)  # fmt: skip

    def _decoded(self, logprobs: dict[int, Logprob], before: Sequence[int]) -> dict[int, Logprob]:
        """`before`: the last tokens that were scored; as in vLLM, a prompt is not what an answer's tokens continue."""
        for token_id, logprob in logprobs.items():
            logprob.decoded_token = decoded_token(self.token_bytes, token_id, before)
        return logprobs


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    """vLLM's names; "auto" is fp32 on a CPU, on a GPU bf16 or, before Ampere, which had none, fp16."""
    has_bf16 = not common.HAS_GPU or torch.cuda.is_bf16_supported(False)  # not in emulation
    narrow = torch.bfloat16 if has_bf16 else torch.float16
    names = {"auto": narrow if common.HAS_GPU else torch.float32, "float32": torch.float32,
             "float": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
             "half": torch.float16}  # fmt: skip
    found = dtype if dtype in set(names.values()) else names.get(dtype)
    if found is None:
        raise common.InputError(f"dtype {dtype!r}: must be one of {', '.join(names)}")
    if found == torch.bfloat16 and not has_bf16:
        raise common.InputError(f"dtype {dtype!r}: {torch.cuda.get_device_name()} has no bf16; take float16")
    return found


def _whole(name: str, value: Any, low: int, high: float = math.inf) -> int:
    if type(value) is not int or not low <= value <= high:
        allowed = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise common.InputError(f"{name} {value!r}: must be a whole number {allowed}")
    return value


@contextlib.contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Yields what to call after each finished request; the bar goes to stderr."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as progress:
        task = progress.add_task("Requests", total=total)
        yield lambda: progress.advance(task)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, text or token ids, or several of them, as a list. What is neither counts as one, and is refused."""
    token_ids = isinstance(prompts, list) and prompts and isinstance(prompts[0], int)
    several = isinstance(prompts, Iterable) and not (token_ids or isinstance(prompts, str | bytes | dict))
    return list(prompts) if several else [prompts]


def for_each(name: str, given: Any, prompts: Sequence[Prompt]) -> list[Any]:
    """What was given once for all prompts, or once for each. Raises InputError if it is neither."""
    each = list(given) if isinstance(given, list | tuple) else [given] * len(prompts)
    if len(each) != len(prompts):
        raise common.InputError(f"{name}: {len(each)} given for {len(prompts)} prompts; allowed: one, or as many as "
                                "prompts")  # fmt: skip
    return each


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets that does not say (vLLM's `ModelConfig.get_diff_sampling_param`)."""

    params: dict[str, Any] = field(default_factory=dict)  # of SamplingParams
    max_tokens_limit: int | None = None  # a server lets no request write more

    @classmethod
    def of(cls, folder: Path | None, generation_config: str, override: str | dict[str, Any] | None) -> SamplingDefaults:
        """From the `generation_config.json` of a model's `folder` ("auto"), from no file ("vllm"), or from that of the
        folder `generation_config`; in each case, what `override` (JSON or a dict) has, counts.

        Other fields of the file mean nothing here. Its max_new_tokens is a limit, too, unless it is the model's own
        wish. Raises InputError.
        """
        override = override_generation_config(override)
        found = {}
        if generation_config != "vllm" and (folder or generation_config != "auto"):
            found = llama.read_generation_config(folder, generation_config) or {}
        found = {name: value for name in FROM_GENERATION_CONFIG if (value := (found | override).get(name)) is not None}
        if "max_new_tokens" in found:
            found["max_tokens"] = found.pop("max_new_tokens")
        try:
            SamplingParams(**found)
        except common.InputError as error:
            raise common.InputError(f"generation_config: {error}") from None
        limit = found.get("max_tokens") if "max_new_tokens" in override else None
        return cls(found, found.get("max_tokens") if generation_config not in ("auto", "vllm") else limit)

    def within(self, max_model_len: int) -> SamplingDefaults:
        """The same with no more tokens than a context has: a client did not ask for them."""
        params = self.params
        if "max_tokens" in params:
            params = params | {"max_tokens": min(params["max_tokens"], max_model_len)}
        return SamplingDefaults(params, self.max_tokens_limit)


FROM_GENERATION_CONFIG = ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k",
                          "top_p", "min_p", "max_new_tokens")  # fmt: skip


def override_generation_config(given: str | dict[str, Any] | None) -> dict[str, Any]:
    """An object, or its JSON. Raises InputError."""
    try:
        found = json.loads(given) if isinstance(given, str) else given or {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise common.InputError(f"override_generation_config {given!r:.60}: must be a JSON object")
    return found


class LLM:
    """The offline interface: `LLM(model=…).generate(prompts, sampling_params)` (`vllm/entrypoints/llm.py`)."""

    engine_class = LLMEngine
    sampling_defaults = SamplingDefaults()

    def __init__(
        self,
        model: str | llama.Llama | None = None,
        *,
        generation_config: str = "auto",
        override_generation_config: str | dict[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        """`generation_config` and `override_generation_config`: see `SamplingDefaults.of`; the rest: `engine_class`."""
        folder = None if isinstance(model, llama.Llama) else llama.model_folder(model)
        self.sampling_defaults = SamplingDefaults.of(folder, generation_config, override_generation_config)
        self.llm_engine = self.engine_class(model, generation_config=generation_config, **engine_args)
        self.num_requests = 0

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` take if they are given none."""
        return SamplingParams(**self.sampling_defaults.params)

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                 use_tqdm: bool = False,
                 priority: int | Sequence[int] | None = None,
                 tokenization_kwargs: dict[str, Any] | None = None) -> list[RequestOutput]:  # fmt: skip
        """Answer all prompts, batched as the scheduler sees fit; outputs come in the order of the prompts.

        One SamplingParams and priority for all, or one for each prompt. Raises InputError before anything has run.
        """
        engine, prompts = self.llm_engine, as_list(prompts)
        sampling_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = for_each("sampling_params", sampling_params, prompts)
        priorities = for_each("priority", 0 if priority is None else priority, prompts)
        ids = [str(self.num_requests + i) for i in range(len(prompts))]
        self.num_requests += len(ids)
        ours, done = set(ids), {}
        try:
            for request_id, prompt, one, rank in zip(ids, prompts, params, priorities):
                engine.add_request(request_id, prompt, one, priority=rank, tokenization_kwargs=tokenization_kwargs)
            with progress_bar(len(ids), use_tqdm) as advance:
                while len(done) < len(ids):
                    for output in engine.step():
                        if output.request_id in ours:
                            done[output.request_id] = output
                            advance()
        finally:
            engine.abort_request(ids)  # after an error or Ctrl-C; otherwise there is nothing left to abort
        return [done[request_id] for request_id in ids]

    def chat(self, messages: Sequence[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
             use_tqdm: bool = False, **about: Any) -> list[RequestOutput]:  # fmt: skip
        """Answer one conversation (a list of {"role", "content"}) or a list of them, by the model's chat template.

        `about` goes to `generate`.
        """
        several = isinstance(messages, list | tuple) and not (messages and isinstance(messages[0], dict))
        tokenizer, prompts = self.llm_engine.tokenizer, []
        for conversation in messages if several else [messages]:
            text = tokenizer.render_chat(conversation)
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm, **about)


# --- The simulation behind the widget ---------------------------------------------------------------------------------

WORDS = ["the", "a", "sea", "moon", "cat", "why", "xylophone", "zzz"]  # a vocabulary that fits on a screen
LOGITS = [3.0, 2.5, 2.0, 1.5, 0.5, -0.5, -2.0, -3.0]
PROMPT, OUTPUT = [0, 2], [0, 0, 3]  # "the sea" -> "the the moon"
PENALTIES = {
    "none": {}, "repetition 1.5": {"repetition_penalty": 1.5}, "presence 1": {"presence_penalty": 1.0},
    "frequency 1": {"frequency_penalty": 1.0},
}  # fmt: skip
CHOICES = {
    "temperature": [0, 0.5, 0.8, 1, 1.5, 2], "top_k": [0, 1, 2, 3, 5], "top_p": [1, 0.95, 0.9, 0.75, 0.5],
    "min_p": [0, 0.05, 0.2, 0.5], "penalty": list(PENALTIES), "seed": [0, 1, 2],
}  # fmt: skip
WIDGET_DEFAULT = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0, "penalty": "repetition 1.5", "seed": 0}
NUM_DRAWS = 12


def simulate(params: dict) -> dict:
    """Eight words through the sampler, stage by stage, and what a seed draws. Raises InputError."""
    params = common.checked(params, CHOICES)
    chosen = SamplingParams(
        **{name: params[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
        **PENALTIES[params["penalty"]],
    )
    request = Request("widget", PROMPT, chosen)
    for token in OUTPUT:
        request.append_output_token_id(token)
    state = SamplingState(request, chosen.seed)
    adjusted = adjust_logits(torch.tensor([LOGITS], dtype=torch.float64), [state])
    row = lambda value: torch.tensor([value], dtype=torch.float64)  # noqa: E731
    temperature = 1.0 if state.greedy else chosen.temperature
    stages, off = [], {"min_p": row(0.0), "top_k": torch.tensor([len(WORDS)]), "top_p": row(1.0)}
    limits = {"min_p": row(chosen.min_p), "top_k": torch.tensor([chosen.top_k or len(WORDS)]),
              "top_p": row(chosen.top_p)}  # fmt: skip
    for stage in ("penalties", "temperature", *limits):
        on = list(limits)[: list(limits).index(stage) + 1] if stage in limits else []
        now = off | {name: limits[name] for name in on}
        probs = distribution(adjusted, row(1.0 if stage == "penalties" else temperature), **now)
        if state.greedy and stage != "penalties":  # nothing is cut or drawn: the best has the whole line
            probs = torch.zeros_like(probs).scatter_(1, adjusted.argmax(1, keepdim=True), 1.0)
        kept = [i for i, p in enumerate(probs[0]) if p > 0]
        stages.append({"stage": stage, "probs": probs[0].tolist(), "kept": kept})
    u = uniforms([chosen.seed] * NUM_DRAWS, range(NUM_DRAWS))
    draws = draw_tokens(probs.expand(NUM_DRAWS, -1), u).tolist()
    if state.greedy:
        draws = [int(adjusted.argmax())] * NUM_DRAWS
    model = distribution(torch.tensor([LOGITS], dtype=torch.float64), row(1.0), **off)
    return {
        "words": WORDS, "prompt": PROMPT, "output": OUTPUT, "model": model[0].tolist(), "logits": adjusted[0].tolist(),
        "stages": stages, "left": len(stages[-1]["kept"]), "u": u.tolist(), "draws": draws,
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    lines = ["word       " + "".join(f"{stage['stage']:>12}" for stage in trace["stages"])]
    for i, word in enumerate(trace["words"]):
        cells = [f"{stage['probs'][i]:.4f}" if i in stage["kept"] else "—" for stage in trace["stages"]]
        lines.append(f"{word:<11}" + "".join(f"{cell:>12}" for cell in cells))
    lines.append("draws: " + " ".join(trace["words"][i] for i in trace["draws"]))
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


def swept(probs: torch.Tensor, points: int) -> torch.Tensor:
    """The share of `points` equally spaced u that lead to each token: what `draw_tokens` really does. [V] -> [V]."""
    u = (np.arange(points) + 0.5) / points
    tokens = draw_tokens(probs.expand(points, -1), u)
    return torch.bincount(tokens, minlength=len(probs)).double() / points


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    kept = lambda **params: len(simulate({**PLAIN, **params})["stages"][-1]["kept"])  # noqa: E731
    prob = lambda word, **params: simulate({**PLAIN, **params})["stages"][-1]["probs"][WORDS.index(word)]  # noqa: E731
    probs, points = torch.tensor(LOGITS, dtype=torch.float64).softmax(0), 20_000
    share = swept(probs, points)
    return {
        "sweep": {"points": points, "worst": (share - probs).abs().max().item(), "bound": 1 / points},
        "kept": {
            "top_p_75_cold": kept(temperature=0.5, top_p=0.75), "top_p_75": kept(top_p=0.75),
            "top_p_75_hot": kept(temperature=2, top_p=0.75),
            "min_p_20_cold": kept(temperature=0.5, min_p=0.2), "min_p_20": kept(min_p=0.2),
            "min_p_20_hot": kept(temperature=2, min_p=0.2),
        },
        "the": {name.split()[0]: prob("the", penalty=name) for name in PENALTIES},
        "xylophone": {str(t).replace(".", ""): prob("xylophone", temperature=t) for t in (0.5, 1, 2)},
        "u": {"seed_7": uniforms([7] * 3, range(3)).tolist(), "seed_8": uniforms([8], [0]).tolist()},
        "candidates": CANDIDATES, "scored_rows": SCORED_ROWS, "counts_bytes": 4 * 49152, "seen_bytes": 49152,
    }  # fmt: skip


PLAIN = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "penalty": "none", "seed": 0}


# --- Figure -----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The widget's default, stage by stage, and the intervals of [0, 1) that the draw uses."""
    trace = simulate(WIDGET_DEFAULT)
    figure, axes = common.new_figure(8.0, 4.0, nrows=2, height_ratios=[3, 1.1])
    width, colors = 0.16, [common.COLORS[name] for name in ("grey", "orange", "purple", "green", "blue")]
    ax, last = axes[0], trace["stages"][-1]
    for i, (stage, color) in enumerate(zip(trace["stages"], colors)):
        places = [x + (i - 2) * width for x in range(len(WORDS))]
        ax.bar(places, stage["probs"], width, color=color, label=stage["stage"])
    ax.set(xticks=range(len(WORDS)), xticklabels=WORDS, ylabel="probability")
    ax.set_title("temperature 0.8, top_p 0.95, repetition_penalty 1.5 after “the sea → the the moon”")
    ax.legend(ncols=5, loc="upper right", columnspacing=1.0, handlelength=1.2)
    ax, left = axes[1], 0.0
    for i in last["kept"]:
        p, alpha = last["probs"][i], 0.85 - 0.12 * (i % 2 * 3)
        ax.barh(0, p, left=left, height=0.7, color=common.COLORS["blue"], alpha=alpha, edgecolor="white")
        if p > 0.03:
            shade = common.COLORS["ink"] if i % 2 else "white"  # pale boxes, dark words
            ax.text(left + p / 2, 0, WORDS[i], ha="center", va="center", color=shade, fontsize=9)
        left += p
    ax.plot(trace["u"], [0.52] * NUM_DRAWS, "v", color=common.COLORS["red"], clip_on=False, markersize=6)
    ax.set(yticks=[], xlim=(0, 1), ylim=(-0.4, 0.75), xlabel="u: the first twelve draws of seed 0")
    ax.spines["left"].set_visible(False)
    return [common.save_figure(figure, folder, "04b_sampling")]


# --- The story --------------------------------------------------------------------------------------------------------

TEXT = "Zoë paid 5 € for 寿司; 👩‍🚀 said: “bon”"


def random_case(rng: random.Random, vocab: int) -> tuple[SamplingParams, list[int], list[int]]:
    """Random parameters, prompt and output over a small vocabulary."""
    params = SamplingParams(
        temperature=rng.choice([0, 0.3, 0.7, 1, 2]), top_k=rng.choice([0, 1, 3, vocab]),
        top_p=rng.choice([0.1, 0.6, 0.95, 1]),
        min_p=rng.choice([0, 0.05, 0.5]), repetition_penalty=rng.choice([0.8, 1, 1.7]),
        presence_penalty=rng.choice([0, 1.5, -1]), frequency_penalty=rng.choice([0, 0.7, -0.5]),
        logit_bias=rng.choice([None, {0: 4.0, 3: -100.0}]), min_tokens=rng.choice([0, 6]),
        allowed_token_ids=rng.choice([None, None, [0, 5, 9, 2], [5]]),
        _bad_words_token_ids=rng.choice([None, [[9], [5, 2], [2, 5, 0, 7]]]),
    )  # fmt: skip
    return params, rng.choices(range(vocab), k=5), rng.choices(range(vocab), k=rng.choice([0, 4]))


def batch_distributions(cases: Sequence[tuple], logits: torch.Tensor, eos: int) -> torch.Tensor:
    """What `Sampler` would draw from, for all cases in one batch. [R, V]; greedy rows have one 1."""
    states = []
    for i, (params, prompt, output) in enumerate(cases):
        request = Request(str(i), prompt, params)
        for token in output:
            request.append_output_token_id(token)
        states.append(SamplingState(request, seed=i, eos_token_ids=[eos]))
    adjusted = adjust_logits(logits.clone(), states)
    probs = torch.nn.functional.one_hot(adjusted.argmax(1), logits.shape[1]).to(logits.dtype)
    drawn = [row for row, state in enumerate(states) if not state.greedy]
    probs[drawn] = Sampler.probabilities(adjusted[drawn], [states[row] for row in drawn])
    return probs


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    shown = "of step 3 (default %(default)s)"
    p.add_argument("--temperature", type=common.number(float, 0, 2), default=0.8, help=shown)
    p.add_argument("--top-p", type=common.number(float, 0.01, 1), default=0.95, help=shown)
    p.add_argument("--decode-tokens", action="store_true", help="the bug: turn every token into text on its own")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine = common.start(args)
    llama.check_context(args.model, 512)
    numbers, bench = facts(), {}

    common.heading("1. One batch, every row its own parameters, against the row-by-row reference")
    rng, vocab, eos = random.Random(args.seed), 32, 5
    cases = [random_case(rng, vocab) for _ in range(256)]
    logits = 3 * torch.randn(len(cases), vocab, generator=torch.Generator().manual_seed(args.seed))
    reference = [reference_distribution(row.tolist(), *case, [eos]) for row, case in zip(logits, cases)]
    common.check("distributions of 256 random requests in one batch", batch_distributions(cases, logits, eos),
                 torch.tensor(reference))  # fmt: skip
    sweep = numbers["sweep"]
    if sweep["worst"] > sweep["bound"]:
        raise common.CheckFailed(f"draws: a probability is off by {sweep['worst']:.1e}")
    common.say(f"✓ {sweep['points']:,} equally spaced u give every token its probability to {sweep['worst']:.0e}")

    common.heading("2. From tokens to text")
    model, tokenizer = llama.load(args.model)
    token_bytes, ids = TokenBytes(tokenizer), tokenizer.encode(TEXT)
    if args.decode_tokens:
        pieces = [tokenizer.decode([token]) for token in ids]
    else:
        detokenizer = IncrementalDetokenizer(token_bytes, SamplingParams())
        pieces = []
        for token in ids:
            detokenizer.append(token)
            pieces.append(detokenizer.get_next_output_text(finished=False))
    common.say(f"{len(TEXT)} characters, {len(ids)} tokens; what each token adds to what a reader sees:")
    common.say("|".join(pieces))
    # Not TEXT: a tokenizer may lack some of its characters. Llama 2's puts a space before every first word.
    text, whole = "".join(pieces).removeprefix(" "), tokenizer.decode(ids).removeprefix(" ")
    common.check_equal("the pieces make up the text", text, whole)

    common.heading("3. The offline engine: what vLLM's documentation calls LLM")
    llm = LLM(model, tokenizer=tokenizer, max_model_len=512, max_num_seqs=16)
    prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is", "2, 4, 6, 8,"]
    n = 1 if args.temperature < GREEDY else 2  # greedy ones would be the same
    params = [
        SamplingParams(temperature=args.temperature, top_p=args.top_p, max_tokens=12, seed=args.seed),
        SamplingParams(temperature=args.temperature, top_p=args.top_p, max_tokens=12, n=n, seed=args.seed + 1),
        SamplingParams(temperature=0, max_tokens=12, stop=[". "]),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.2, logprobs=2),
    ]
    together = llm.generate(prompts, params)
    for output in together:
        for answer in output.outputs:
            common.say(f"{output.prompt} …{answer.text!r} ({answer.finish_reason})")
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params)]
    tokens = lambda outputs: [[answer.token_ids for answer in output.outputs] for output in outputs]  # noqa: E731
    common.check_equal("each prompt alone gets the same tokens, sampled ones included", tokens(together), tokens(alone))
    if tokenizer.chat_template:
        ask = [{"role": "user", "content": "What is 2+2?"}]
        (answer,) = llm.chat(ask, SamplingParams(temperature=0, max_tokens=16))[0].outputs
        common.say(f"chat: {answer.text!r} ({answer.finish_reason})")
    else:
        common.skipped("chat", "this model has no chat template")
    pool = llm.llm_engine.core.scheduler.kv_cache_manager.block_pool
    common.check_equal("all KV blocks are free again", pool.num_free_blocks, pool.num_blocks - 1)

    common.heading("4. How probable is what is there already? Three endings of one sentence")
    endings = [prompts[2] + ending for ending in (" Paris.", " Rome.", " Tuesday.")]
    outputs = llm.generate(endings, SamplingParams(max_tokens=1, prompt_logprobs=1))
    scores, first = [], len(tokenizer.encode(prompts[2]))
    for output in outputs:
        chosen = [entry[t] for t, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])]
        scores += [x.logprob for x in chosen]
        said = "  ".join(f"{x.decoded_token!r} {x.logprob:.2f} (rank {x.rank})" for x in chosen[first - 1 :])
        common.say(f"{said}: together {sum(x.logprob for x in chosen[first - 1 :]):.2f}")
    reference = torch.cat([reference_scores(model, output.prompt_token_ids) for output in outputs])
    common.check("log probabilities of all prompt tokens", torch.tensor(scores), reference.cpu())

    common.heading("5. Eight words, and what each parameter makes of their probabilities: simulate()")
    common.say(describe(simulate(WIDGET_DEFAULT)))

    common.heading("6. What sampling costs: 32 rows of 49,152 logits")
    bench["sampling_ms"] = sampling_cost(model.device, 2.0 if args.bench else 0.15)
    common.table(["parameters", "ms per step"], [
        [", ".join(f"{name} {value}" for name, value in WANTED[kind].items()), f"{ms:.1f}"]
        for kind, ms in bench["sampling_ms"].items()
    ])  # fmt: skip
    if args.bench:
        bench["step_ms"] = step_cost(model, tokenizer)
        common.say(f"a whole step of 32 greedy requests takes {bench['step_ms']:.1f} ms")
        bench["front_end"] = front_end_cost(token_bytes, tokenizer)
        common.say(f"detokenizing costs {bench['front_end']['us_per_token_at_10']:.1f} µs per token at 10 tokens and "
                   f"{bench['front_end']['us_per_token_at_10000']:.1f} µs at 10,000")  # fmt: skip
    draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": numbers, "bench": bench})


WANTED = {
    "greedy": {"temperature": 0}, "temperature": {"temperature": 1}, "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95}, "both": {"top_k": 50, "top_p": 0.95}, "min_p": {"min_p": 0.05},
    "penalty": {"temperature": 0, "repetition_penalty": 1.1}, "logprobs": {"temperature": 0, "logprobs": 5},
}  # fmt: skip


def sampling_cost(device: torch.device, seconds: float) -> dict[str, float]:
    """Milliseconds of `Sampler` for 32 requests that ask for the same thing."""
    logits = 4 * torch.randn(32, 49152, generator=torch.Generator().manual_seed(0)).to(device)
    found = {}
    for kind, wanted in WANTED.items():
        states = [SamplingState(Request(str(i), [1, 2, 3], SamplingParams(**wanted)), seed=i) for i in range(32)]
        found[kind] = common.measure(lambda states=states: Sampler()(logits, states), seconds).median * 1e3
    return found


def step_cost(model: llama.Llama, tokenizer: llama.Tokenizer) -> float:
    """Milliseconds of a decode step of the whole engine, with 32 greedy requests; the median of 64."""
    engine = LLM(model, tokenizer=tokenizer, max_model_len=512, max_num_seqs=32).llm_engine
    for i in range(32):
        engine.add_request(str(i), TEXT, SamplingParams(temperature=0, max_tokens=65, ignore_eos=True))
    engine.step()  # the prompts
    stamps = [time.perf_counter()]
    while engine.has_unfinished_requests():
        engine.step()
        stamps.append(time.perf_counter())
    return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(stamps))


def front_end_cost(token_bytes: TokenBytes, tokenizer: llama.Tokenizer) -> dict[str, float]:
    """Microseconds to append one token and look for a stop string, early and late in a long text."""
    ids = (tokenizer.encode(TEXT) * 1000)[:11000]
    detokenizer = IncrementalDetokenizer(token_bytes, SamplingParams(stop=["never said"]))
    stamps = [time.perf_counter()]
    for token in ids:
        detokenizer.append(token)
        stamps.append(time.perf_counter())
    mean = lambda first: (stamps[first + 1000] - stamps[first]) / 1000 * 1e6  # noqa: E731
    return {"us_per_token_at_10": mean(10), "us_per_token_at_10000": mean(10000)}


if __name__ == "__main__":
    common.run(main)

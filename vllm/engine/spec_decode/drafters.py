"""Drafters that need no training: they look the next tokens up in what is written already.

Owns what each has indexed of running requests, and `SpeculativeConfig`, which says who guesses and how many; called by
the verifier after every step. A drafter never decides whether a guess stands.
vLLM: `vllm/v1/spec_decode/ngram_proposer.py`, `suffix_decoding.py` beside it, `vllm/config/speculative.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import itertools
import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from engine.model import llama
from engine.request import SamplingParams

# --- The interface ----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class DraftContext:
    """What a drafter is told about one request, after every step in which the target sampled for it.

    `token_ids` are prompt and output; the last one is sampled, and the target has not computed it yet. With
    `drafter.needs_hidden`, `hidden` has the target's final hidden states (after the last norm) at the n positions
    [len(token_ids) − 1 − n, len(token_ids) − 1): those that it computed since the last proposal and kept. At the first
    proposal that is the prompt, except what came out of the prefix cache; after a preemption (`forget` was called) it
    is again everything. A drafter with `needs_hidden` is asked in every step, with `max_tokens` 0 if nothing may be
    drafted, so that it misses no hidden state.
    """

    request_id: str
    token_ids: list[int]
    max_tokens: int  # drafts wanted at most; may be 0
    params: SamplingParams
    hidden: torch.Tensor | None = None  # [n, hidden]
    leftover: list[int] = field(default_factory=list)  # what the target wrote behind the draft that fell: from
    # position len(token_ids) on, and with wrong tokens before it


@dataclass
class Draft:
    """Guesses for the next tokens of one request."""

    token_ids: list[int] = field(default_factory=list)
    probs: torch.Tensor | None = None  # [k, vocab]: the distribution q that each was drawn from; None: one-hot
    parents: list[int] | None = None  # tree: index of each node's parent in this list, -1 the root; None: a chain


class Drafter:
    """Guesses what the target will say. `propose` gets all requests of a step at once: a drafter may batch them.

    One that draws its guesses needs random numbers of its own: `rejection_sample` must not see them again.
    """

    needs_hidden = False

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        """One draft for each context, in order, of at most `max_tokens` tokens (an empty one is a fair answer)."""
        raise NotImplementedError

    def forget(self, request_id: str) -> None:
        """The request has finished, or was preempted and will be computed again: drop what is kept for it."""


# --- Three drafters ---------------------------------------------------------------------------------------------------


class NgramDrafter(Drafter):
    """Prompt lookup: the last n tokens have occurred before, so what followed them then may follow now.

    The longest n in [min_n, max_n] that has occurred wins, at its first place, as in vLLM's first-generation runner.
    The second's kernel takes the last place. Both walk through the whole context in every step, in compiled code; here
    an index remembers where each n-gram ended first.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.lengths = range(max_n, min_n - 1, -1)
        self.indexed: dict[str, tuple[dict[tuple[int, ...], int], int]] = {}  # n-gram -> end; tokens gone through

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        return [Draft(self.lookup(context)) for context in contexts]

    def lookup(self, context: DraftContext) -> list[int]:
        """What followed the longest of the last n-grams where it first stood; the index grows with the text."""
        tokens = context.token_ids
        index, known = self.indexed.get(context.request_id, ({}, 0))
        for end in range(known + 1, len(tokens)):  # n-grams that end before the last token: they have a continuation
            for n in self.lengths:
                if n <= end:
                    index.setdefault(tuple(tokens[end - n : end]), end)
        self.indexed[context.request_id] = index, len(tokens) - 1
        for n in self.lengths:
            if end := index.get(tuple(tokens[-n:])):
                return tokens[end : end + context.max_tokens]
        return []

    def forget(self, request_id: str) -> None:
        self.indexed.pop(request_id, None)


class SuffixAutomaton:
    """All substrings of a growing sequence, in at most 2n states; a token is added in O(1) on average (Blumer 1985).

    State 0 is the empty string. The states on the chain of links from the last one are the suffixes of the sequence,
    longest first; what the first link leads to is the longest suffix that has occurred before.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]  # of each state: token -> state
        self.link, self.length, self.first_end = [-1], [0], [0]
        self.last, self.size = 0, 0

    def _add(self, following: dict[int, int], link: int, length: int, first_end: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.first_end.append(first_end)
        return len(self.next) - 1

    def extend(self, token: int) -> None:
        """One token more, in constant amortised time (Blumer et al. 1985)."""
        self.size += 1
        state, self.last = self.last, self._add({}, 0, self.size, self.size)
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = self.last
            state = self.link[state]
        if state < 0:
            return
        seen = self.next[state][token]
        if self.length[seen] > self.length[state] + 1:  # it also stands for longer strings, which did not recur: split
            long = seen
            seen = self._add(dict(self.next[long]), self.link[long], self.length[state] + 1, self.first_end[long])
            while state >= 0 and self.next[state].get(token) == long:
                self.next[state][token] = seen
                state = self.link[state]
            self.link[long] = seen
        self.link[self.last] = seen

    def longest_repeat(self) -> tuple[int, int]:
        """(length, where it first ended) of the longest suffix that has occurred before; length 0: none."""
        state = max(0, self.link[self.last])
        return self.length[state], self.first_end[state]


class SuffixDrafter(Drafter):
    """Prompt lookup without a limit on n: a long match earns a long draft, of max_spec_factor · its length.

    vLLM's "suffix" (SuffixDecodingProposer) keeps a suffix tree with counts, over earlier requests as well, and drafts
    the most frequent continuation; this one knows the request alone, and drafts the first.
    """

    def __init__(self, min_n: int, max_spec_factor: float) -> None:
        self.min_n, self.max_spec_factor = min_n, max_spec_factor
        self.automata: dict[str, SuffixAutomaton] = {}

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        return [Draft(self.lookup(context)) for context in contexts]

    def lookup(self, context: DraftContext) -> list[int]:
        """What followed the longest suffix that occurred before, the longer the more."""
        automaton = self.automata.setdefault(context.request_id, SuffixAutomaton())
        for token in context.token_ids[automaton.size :]:
            automaton.extend(token)
        length, end = automaton.longest_repeat()
        if length < self.min_n:
            return []
        k = min(context.max_tokens, int(self.max_spec_factor * length))
        found = context.token_ids[end : end + k]
        while len(found) < k:  # the continuation runs into the present: a loop, which goes on with itself
            found.append(found[len(found) - (automaton.size - end)])
        return found

    def forget(self, request_id: str) -> None:
        self.automata.pop(request_id, None)


class LookaheadDrafter(Drafter):
    """Jacobi iteration with an n-gram pool: what the target said behind a fallen draft is not thrown away.

    Its row there answered a wrong context, but often not a very wrong one: its tokens are the next guess for the same
    positions. Guess i of one pass, guess i + 1 of the next, … form an n-gram each token of which the target wrote
    behind the one before. These are pooled, and drafted when their first token is written again. Fu et al. 2024 run a
    window of such guesses beside the verified ones, in the same pass under a mask; here, both are one chain.
    """

    N, POOL = 4, 4  # tokens in an n-gram; continuations kept of a token

    def __init__(self) -> None:
        self.rows: dict[str, deque[dict[int, int]]] = {}  # of each request: {position: token} of the last N passes
        self.pool: dict[str, dict[int, OrderedDict[tuple[int, ...], None]]] = {}

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        return [Draft(self.guess(context)) for context in contexts]

    def guess(self, context: DraftContext) -> list[int]:
        """Moves the window on by what the last pass computed, and drafts the newest n-gram behind the last token."""
        tokens, n = context.token_ids, len(context.token_ids)
        rows = self.rows.setdefault(context.request_id, deque(maxlen=self.N))
        pool = self.pool.setdefault(context.request_id, {})
        first = max(0, n - 1 - self.N) if rows else 0
        row = dict(zip(range(first, n), tokens[first:])) | dict(zip(itertools.count(n), context.leftover))
        rows.append(row)
        if len(rows) == 1:  # the prompt, once: its own n-grams
            grams = zip(*(tokens[i:] for i in range(self.N)))
        else:
            full = rows[0] if len(rows) == self.N else ()
            grams = (tuple(r.get(p + i, -1) for i, r in enumerate(rows)) for p in full)
        for gram in grams:
            if -1 not in gram:
                found = pool.setdefault(gram[0], OrderedDict())
                found[gram[1:]] = None
                found.move_to_end(gram[1:])
                if len(found) > self.POOL:
                    found.popitem(last=False)
        draft = list(next(reversed(pool[tokens[-1]]))) if pool.get(tokens[-1]) else []
        guesses = context.leftover[len(draft) :]
        draft += guesses + [tokens[-1]] * (context.max_tokens - len(draft) - len(guesses))  # a start for the iteration
        return draft[: context.max_tokens]

    def forget(self, request_id: str) -> None:
        self.rows.pop(request_id, None)
        self.pool.pop(request_id, None)


# --- Which one, and how much ------------------------------------------------------------------------------------------

METHODS = ("ngram", "suffix", "lookahead")
TRAINED = ("draft_model", "medusa", "eagle", "early_exit")


@dataclass
class SpeculativeConfig:
    """The JSON behind `--speculative-config`, with vLLM's keys (`vllm/config/speculative.py`).

    Raises:
        common.InputError: a value is out of range or contradicts another; the message names the key.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 4  # K
    model: str | None = None  # weights of a trained drafter; None: those that come with companion 07b
    prompt_lookup_max: int | None = None  # longest n-gram; vLLM's default for both is 5
    prompt_lookup_min: int | None = None
    suffix_decoding_max_spec_factor: float = 1.0  # drafts per matched token
    num_speculative_tokens_per_batch_size: list | None = None  # [[first, last, K], …]: another K in larger batches
    num_speculative_tokens_schedule: str = "constant"  # "heuristic": +2 where all stood, else −1, as Transformers does

    def __post_init__(self) -> None:
        def check(name: str, good: Callable[[Any], bool], allowed: str) -> None:
            if not good(getattr(self, name)):
                raise common.InputError(f"speculative_config: {name} {getattr(self, name)!r}: must be {allowed}")

        def whole(low: int, high: float) -> Callable[[Any], bool]:
            return lambda value: type(value) is int and low <= value <= high

        methods, schedules = (*METHODS, *TRAINED), ("constant", "heuristic")
        check("method", methods.__contains__, f"one of {', '.join(methods)}")
        check("num_speculative_tokens", whole(1, 128), "a whole number from 1 to 128")
        check("model", lambda value: value is None or isinstance(value, str), "a path")
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            check(name, lambda n: n is None or whole(1, 1 << 20)(n), "a whole number of at least 1")
        given = [n for n in (self.prompt_lookup_min, self.prompt_lookup_max) if n is not None] or [5]
        self.prompt_lookup_min, self.prompt_lookup_max = given[0], given[-1]  # one alone is both
        check("prompt_lookup_min", whole(1, self.prompt_lookup_max), "a whole number from 1 to prompt_lookup_max")
        check(
            "suffix_decoding_max_spec_factor",
            lambda value: type(value) in (int, float) and 0 < value < math.inf,
            "a number above 0",
        )
        check("num_speculative_tokens_schedule", schedules.__contains__, f"one of {', '.join(schedules)}")
        check(
            "num_speculative_tokens_per_batch_size",
            self._is_schedule,
            "a list of [first, last, K] from 1 on, without overlap, K at most num_speculative_tokens",
        )

    def _is_schedule(self, ranges: Any) -> bool:
        if ranges is None:
            return True
        if not isinstance(ranges, list) or not ranges:
            return False
        if not all(isinstance(r, list | tuple) and len(r) == 3 and all(type(x) is int for x in r) for r in ranges):
            return False
        ends = [0, *(last for _, last, _ in ranges)]
        return ranges[0][0] == 1 and all(
            end < first <= last and 0 <= k <= self.num_speculative_tokens for end, (first, last, k) in zip(ends, ranges)
        )

    @classmethod
    def from_json(cls, text: str | dict[str, Any]) -> SpeculativeConfig:
        """Raises InputError for what is not a JSON object, an unknown key, or a value out of range."""
        try:
            content = json.loads(text) if isinstance(text, str) else text
        except ValueError as error:
            raise common.InputError(f"speculative_config: not readable as JSON ({error})") from None
        if not isinstance(content, dict):
            raise common.InputError("speculative_config: must be a JSON object")
        known = [f.name for f in fields(cls)]
        for name in content:
            if name not in known:
                raise common.InputError(f"speculative_config: {name!r}: no such key; allowed: {', '.join(known)}")
        return cls(**content)

    def drafts_in_batch(self, num_seqs: int) -> int:
        """K for a step of `num_seqs` sequences; behind the last range, its K."""
        if not self.num_speculative_tokens_per_batch_size:
            return self.num_speculative_tokens
        fitting = [k for first, _, k in self.num_speculative_tokens_per_batch_size if first <= max(1, num_seqs)]
        return fitting[-1]


def make_drafter(config: SpeculativeConfig, model: llama.Llama) -> Drafter:
    """The drafter that the config names. `model` is the target. Raises InputError."""
    if config.method in TRAINED:
        from engine.spec_decode import trained  # here: its drafters are `Drafter`s, of this file

        return trained.make_drafter(config.method, model, config.num_speculative_tokens, config.model)
    shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
    assert shortest is not None and longest is not None  # a config has filled them in
    if config.method == "ngram":
        return NgramDrafter(shortest, longest)
    if config.method == "suffix":
        return SuffixDrafter(shortest, config.suffix_decoding_max_spec_factor)
    return LookaheadDrafter()

"""Which tokens go in, and which may come out: a prompt is cut, and logits become −∞ before a sampler sees them.

Owns three wishes of a request (allowed_token_ids, bad_words, min_tokens) and the cut of its prompt; called by the front
end and, in every step, by the sampler. It never chooses a token, and never leaves a row without one.
vLLM: `vllm/renderers/params.py`, `vllm/v1/sample/ops/bad_words.py`, `vllm/v1/sample/logits_processor/builtin.py`.
"""

from __future__ import annotations

import common

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

from engine.model.tokenizer import Tokenizer
from engine.request import SamplingParams

MAX_BAD_WORDS = 128  # token sequences; vLLM's default of VLLM_MAX_NUM_BAD_WORDS
MAX_BAD_CHARS = 4096  # in all of them: every step compares them with what is written


# --- What we want, without cleverness: one row, in plain Python -----------------------------------------------------


def reference_allowed(
    z: Sequence[float], params: SamplingParams, output: Sequence[int] = (), stop_token_ids: Sequence[int] = ()
) -> list[float]:
    """One row of logits in which every token that is ruled out has −∞; a wish that would leave nothing is not heard."""
    bad_words = params._bad_words_token_ids or ()
    for allowed in (
        lambda token: params.allowed_token_ids is None or token in params.allowed_token_ids,
        lambda token: not any([*output, token][-len(word) :] == word for word in bad_words),
        lambda token: len(output) >= params.min_tokens or token not in stop_token_ids,
    ):
        left = [x if allowed(token) else -math.inf for token, x in enumerate(z)]
        z = left if max(left) > -math.inf else z
    return list(z)


# --- In: how much of a prompt is read --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenizeParams:
    """How long a prompt may be, and which part of a longer one is read (`vllm/renderers/params.py`).

    Raises InputError: a value is out of range; the message names the field.
    """

    max_total_tokens: int  # prompt and answer
    truncate_prompt_tokens: int | None = None  # tokens to keep; -1: as many as leave one for an answer
    truncation_side: str | None = None  # "left" keeps a prompt's end, "right" its beginning; None: see `encode`

    def __post_init__(self) -> None:
        given, most = self.truncate_prompt_tokens, self.max_total_tokens
        if given is not None and (type(given) is not int or not -1 <= given <= most):
            raise common.InputError(
                f"truncate_prompt_tokens {given!r}: must be a whole number from -1 to {most}, the longest context"
            )
        if self.truncation_side not in (None, "left", "right"):
            raise common.InputError(f"truncation_side {self.truncation_side!r}: must be 'left' or 'right'")

    @classmethod
    def of(cls, max_total_tokens: int, tokenization_kwargs: dict[str, Any] | None) -> TokenizeParams:
        """From what `LLM.generate` takes. Raises InputError."""
        given, known = tokenization_kwargs or {}, [field.name for field in fields(cls)][1:]
        if not isinstance(given, dict) or not given.keys() <= set(known):
            raise common.InputError(f"tokenization_kwargs {given!r:.60}: must be a dict; allowed: {', '.join(known)}")
        return cls(max_total_tokens, **given)

    @property
    def max_length(self) -> int | None:
        """Tokens to keep. vLLM's -1 forgets the answer's token if a request names no max_tokens, then refuses it."""
        return self.max_total_tokens - 1 if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens

    def truncate(self, token_ids: list[int]) -> list[int]:
        """Of token ids, those that are read."""
        n = self.max_length
        if n is None or n >= len(token_ids):
            return token_ids
        return token_ids[:n] if self.truncation_side == "right" else token_ids[len(token_ids) - n :]

    def encode(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, or those that are read.

        If no side is named, its end, and the special tokens around it stay: Llama has seen no text without its
        begin-of-text. A side that is named cuts these as well, as in vLLM.
        """
        by_side = self.max_length is None or self.truncation_side is not None
        return self.truncate(tokenizer.encode(text, add_special_tokens, *() if by_side else (self.max_length,)))

    def shorten(self, text: str, max_chars: int) -> str:
        """So much of a text as is enough for all tokens that are read, if none has more characters than it may."""
        return text[:max_chars] if self.truncation_side == "right" else text[-max_chars:]


# --- Out: what may be written ----------------------------------------------------------------------------------------


def update_from_tokenizer(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """These sampling parameters with their bad words as token ids; parameters without any come back as they are.

    Behind a space a word is other tokens than at the start of a text. As in vLLM that form counts as well, if it has as
    many tokens and begins with another one; so a word that is one token with its space and two without can still be
    written with it. Raises InputError.
    """
    if not params.bad_words or params._bad_words_token_ids is not None:
        return params
    found: list[list[int]] = []
    words = [*dict.fromkeys(params.bad_words)]
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_CHARS:  # before they are tokenized
        raise common.InputError(f"bad_words: at most {MAX_BAD_WORDS} of them, of {MAX_BAD_CHARS:,} characters in all")
    for word in words:
        alone, inside = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        if not alone:
            raise common.InputError(f"bad_words: {word!r:.60} has no tokens")
        found.append(alone)
        if inside and inside[0] != alone[0] and len(inside) == len(alone):
            found.append(inside)
    if len(found) > MAX_BAD_WORDS:
        raise common.InputError(f"bad_words: they are {len(found)} sequences of tokens; at most {MAX_BAD_WORDS}")
    return replace(params, _bad_words_token_ids=found)


def completing(bad_words: Sequence[list[int]], written: list[int]) -> list[int]:
    """The tokens that complete a bad word behind what is `written`; a prompt's tokens are not part of that."""
    return [word[-1] for word in bad_words if len(word) == 1 or written[1 - len(word) :] == word[:-1]]


class Written(Protocol):
    """How far an answer has come: of a request, or of one whose drafts count."""

    @property
    def num_output_tokens(self) -> int:
        """Of the answer so far."""
        ...

    @property
    def output_token_ids(self) -> list[int]:
        """These tokens, if the request has bad words."""
        ...


class Wishes(Protocol):
    """What of a request's `SamplingState` may rule tokens out."""

    @property
    def request(self) -> Written:
        """What is written."""
        ...

    params: SamplingParams
    stop_token_ids: list[int]  # what ends an answer, and may not before it has min_tokens
    allowed: torch.Tensor | None  # ids, int64; None: all
    bad_words: list[list[int]]
    restricted: bool  # whether either of the last two rules anything out


def rule_out(logits: torch.Tensor, states: Sequence[Wishes]) -> None:
    """−∞ for what a request may not write: allowed_token_ids, bad_words, min_tokens, in this order.

    Shapes: logits fp32 [R, vocab], changed in place; R states.
    A wish that leaves nothing of a row is passed over: what came before is stronger, a grammar most of all. vLLM has
    that for min_tokens under a grammar alone; other rows of its run empty, and a draw from them is void.
    A NaN or +∞ of the model is not ruled out: the sampler shall see it, whatever the request forbids.
    """
    rows, columns = [], []
    for row, state in enumerate(states):
        early = state.stop_token_ids if state.params.min_tokens > state.request.num_output_tokens else []
        if not (state.restricted or state.params.structured_outputs):  # something is left: the rows of a batch at once
            rows += [row] * len(early)
            columns += early
            continue
        z = logits[row]
        if state.allowed is not None:
            index = state.allowed.to(z.device)
            _keep(z, torch.full_like(z, -math.inf).index_copy(0, index, z[index]))
        completed = [token for token in completing(state.bad_words, state.request.output_token_ids) if token < len(z)]
        for token_ids in filter(None, (completed, early)):
            _keep(z, z.index_fill(0, torch.tensor(token_ids, device=z.device), -math.inf))
    if rows:
        at = torch.tensor(rows, device=logits.device), torch.tensor(columns, device=logits.device)
        logits[at] = torch.where(logits[at] < math.inf, -math.inf, logits[at])


def _keep(z: torch.Tensor, left: torch.Tensor) -> None:
    """`left` in place of z [vocab], unless nothing is or z has NaN or +∞; without asking the device."""
    z.copy_(torch.where((left.amax() > -math.inf) & (z.amax() < math.inf), left, z))


def limit_logprobs(params: SamplingParams, max_logprobs: int, vocab_size: float = math.inf) -> SamplingParams:
    """With the size of the vocabulary, if that is known, where it asks for all log probabilities. Raises InputError for
    more of them than `max_logprobs`, which is -1 if any number is allowed."""
    most = math.inf if max_logprobs == -1 else max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and (vocab_size if wanted == -1 else wanted) > most:
            raise common.InputError(f"{name} {wanted}: must be a whole number from 0 to {most} (max_logprobs)")
        if wanted == -1 and vocab_size < math.inf:
            params = replace(params, **{name: int(vocab_size)})
    return params

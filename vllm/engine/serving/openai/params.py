"""From a request's fields to the engine's parameters.

Owns which fields mean the same under other names, and what a request gets that does not say; called by `serving`. Every
range is checked before the engine hears a word; a prompt is never looked at. vLLM: `to_sampling_params` in
`vllm/entrypoints/openai/chat_completion/protocol.py`.
"""

from __future__ import annotations

import common

import dataclasses
from typing import TYPE_CHECKING, Any

from engine.request import SamplingParams
from engine.serving.openai.limits import MAX_IDS, MAX_N, MAX_STOP_CHARS
from engine.serving.openai.protocol import ChatCompletionRequest, CompletionRequest

if TYPE_CHECKING:
    from engine.sampling.defaults import SamplingDefaults


READ_IN_THEIR_OWN_WAY = {"max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs"}


def sampling_params(
    body: CompletionRequest | ChatCompletionRequest,
    max_tokens: int | None,
    logprobs: int | None,
    defaults: SamplingDefaults,
) -> SamplingParams:
    """Lesson 04's parameters from a request's, or by default. Raises InputError."""
    names = {field.name for field in dataclasses.fields(SamplingParams)} - READ_IN_THEIR_OWN_WAY
    more: dict[str, Any] = defaults.params | {
        name: value for name in names if (value := getattr(body, name, None)) is not None
    }
    wanted = defaults.params.get("max_tokens") if max_tokens is None else max_tokens
    if wanted is not None and defaults.max_tokens_limit is not None:
        wanted = min(wanted, defaults.max_tokens_limit)
    more["max_tokens"] = wanted
    if body.n is not None and not 1 <= body.n <= MAX_N:
        raise common.InputError(f"n {body.n}: must be a whole number from 1 to {MAX_N}")
    if sum(map(len, [body.stop] if isinstance(body.stop, str) else body.stop or ())) > MAX_STOP_CHARS:
        raise common.InputError(f"stop: more than {MAX_STOP_CHARS:,} characters in all")
    listed = sum(len(x) for x in (body.stop_token_ids, body.allowed_token_ids, body.logit_bias) if x)
    if listed * (body.n or 1) > MAX_IDS:  # each answer's request carries its own
        raise common.InputError(f"n {body.n}: times {listed:,} token ids is more than {MAX_IDS:,}")
    if body.logit_bias:
        try:
            more["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        except ValueError:
            raise common.InputError("logit_bias: its keys must be token ids, as strings") from None
    if body.prompt_logprobs and body.stream:
        raise common.InputError("prompt_logprobs: only when stream is false; echo with logprobs streams them")
    scored = body.logprobs if body.prompt_logprobs is None and getattr(body, "echo", False) else body.prompt_logprobs
    return SamplingParams(logprobs=logprobs, prompt_logprobs=scored, **more)

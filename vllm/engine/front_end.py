"""The front end: what a caller says into requests, and tokens into what a caller reads.

Owns what callers see of their requests; `LLMEngine` puts a core behind it, an asynchronous server a mailbox. It never
decides what runs when. vLLM: `vllm/v1/engine/input_processor.py`, `vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

import common

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.config import whole
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.output import EngineCoreOutput
from engine.request import PoolingParams, Request, RequestStatus, SamplingParams
from engine.sampling import token_rules
from engine.sampling.detokenizer import MAX_BYTES, IncrementalDetokenizer, TokenBytes, decoded_token
from engine.sampling.sampler import Logprob

Prompt = str | list[int] | dict  # text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}


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
    pooling_output: bytes | None = None  # its prompt's vector, fp32 (vLLM: `PoolingRequestOutput`)


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
            self.index,
            text,
            self.token_ids[first:],
            self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs[first:],
            finish_reason,
            stop_reason,
        )


class FrontEnd:
    """Validates, tokenizes, and after each step of its core detokenizes."""

    max_logprobs = 20  # alternatives that a request may ask for; -1: all there are

    def __init__(self, model_config: LlamaConfig, tokenizer: Tokenizer, core: Any) -> None:
        """`core` has `check_request`, `add_request`, `abort_requests`, `step` and a scheduler."""
        self.model_config, self.tokenizer, self.core = model_config, tokenizer, core
        self.token_bytes = TokenBytes(tokenizer)
        self.sequences: dict[str, _Sequence] = {}
        self.callers: dict[str, _Caller] = {}

    # -- requests --

    def add_request(  # noqa: PLR0913  vLLM's arguments
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        stream: bool = False,
        tokenization_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Queue one prompt. `stream`: report new text in every step, not everything at the end.

        `tokenization_kwargs` may have truncate_prompt_tokens and truncation_side. A prompt that is a dict may have its
        own cache_salt. `lora_name` is an adapter that the core has. With PoolingParams, the answer is the prompt's
        vector. Raises InputError; then nothing was queued.
        """
        if request_id in self.callers:
            raise common.InputError(f"request id {request_id!r} is in use")
        limits = token_rules.TokenizeParams.of(self.core.scheduler.config.max_model_len, tokenization_kwargs)
        text, token_ids = self._tokenize(prompt, limits)
        if cache_salt is None and isinstance(prompt, dict):
            cache_salt = prompt.get("cache_salt")
        if not isinstance(cache_salt, str | None):
            raise common.InputError(f"cache_salt {cache_salt!r}: must be a string")
        whole("priority", priority, -(2**63), 2**63 - 1)
        pooling_params: PoolingParams | None = None
        if isinstance(params, PoolingParams):
            pooling_params, params = params, params.as_sampling_params()
        params = self._checked(SamplingParams() if params is None else params)
        eos = self.model_config.eos_token_ids
        own = eos[0] if eos and self.model_config.tokenizer_has_eos else None  # no stop_reason; the others have one
        caller, sequences, own_name = _Caller(request_id, text, token_ids, stream), {}, self._own_name(request_id)
        for index in range(params.n):  # each of n samples is a request of its own, as in vLLM V1
            child, name = params, own_name
            if params.n > 1:
                child, name = copy.copy(params), f"{index}_{own_name}"  # checked already, however long its lists are
                child.n = 1
                child.seed = None if params.seed is None else params.seed + index
            request = Request(
                name,
                token_ids,
                child,
                priority=priority,
                eos_token_id=own,
                cache_salt=cache_salt,
                lora_name=lora_name,
                pooling_params=pooling_params,
            )
            if not child.ignore_eos:
                request.stop_token_ids |= set(eos) - {own}
            self.core.check_request(request)
            sequences[name] = _Sequence(caller, index, request, self.token_bytes)
        for name, sequence in sequences.items():
            self.core.add_request(sequence.request)
            caller.unfinished.add(name)
        self.sequences |= sequences
        self.callers[request_id] = caller

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """With the tokens of what it names as text. Raises InputError for what this model and tokenizer cannot do."""
        if not isinstance(params, SamplingParams):
            raise common.InputError(f"sampling_params {params!r}: must be a SamplingParams")
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            self._check_ids(name, getattr(params, name) or ())
        params = token_rules.limit_logprobs(params, self.max_logprobs, self.model_config.vocab_size)
        params = token_rules.update_from_tokenizer(params, self.tokenizer)
        stops = {*(params.stop_token_ids or ()), *self.model_config.eos_token_ids}
        if params.min_tokens and len(stops) == self.model_config.vocab_size:
            raise common.InputError("min_tokens: not together with stop_token_ids that name every token")
        return params

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
            raise common.InputError(
                f"prompt {prompt!r:.60}: must be a string, a list of token ids, "
                "{'prompt': a string} or {'prompt_token_ids': a list of token ids}"
            )
        token_ids = limits.encode(self.tokenizer, text)
        self._check_ids("prompt", token_ids)  # a tokenizer may know more tokens than the model
        return text, token_ids

    def _check_ids(self, name: str, token_ids: Iterable[Any]) -> None:
        vocab = self.model_config.vocab_size
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
            self.core.scheduler.kv_cache_manager.reset_prefix_cache()
            raise
        for output in outputs:
            sequence = self.sequences.get(output.request_id)
            if sequence is None:
                continue
            if output.new_prompt_logprobs is not None:
                self._hear_scores(sequence, output.new_prompt_logprobs)
            if not output.new_token_ids and output.finish_reason is None:
                continue
            finish_reason, stop_reason = self._write(sequence, output)
            if output.new_logprobs is not None:
                self._hear_logprobs(sequence, output.new_token_ids[0], output.new_logprobs)
            if answer := self._answer(sequence, finish_reason, stop_reason):
                answer.kv_transfer_params, answer.pooling_output = output.kv_transfer_params, output.pooling_output
                heard.append(answer)
        return heard

    def _hear_scores(self, sequence: _Sequence, entries: list[dict[int, Logprob] | None]) -> None:
        """The log probabilities of its prompt, which is computed now."""
        ids = sequence.request.prompt_token_ids
        sequence.prompt_logprobs = [
            entry and self._decoded(entry, ids[max(1, i - MAX_BYTES) : i]) for i, entry in enumerate(entries)
        ]

    def _write(self, sequence: _Sequence, output: EngineCoreOutput) -> tuple[str | None, int | str | None]:
        """The new tokens into the answer, up to a stop string. Returns why it has ended, if it has: (finish_reason,
        stop_reason)."""
        finish_reason, new = output.finish_reason, output.new_token_ids
        for i, token_id in enumerate(new):
            sequence.token_ids.append(token_id)
            found = sequence.detokenizer.append(token_id, finish_reason == "stop" and i == len(new) - 1)
            if found is not None:
                if finish_reason is None:  # the scheduler cannot know: end it from outside
                    self.core.scheduler.finish_requests([output.request_id], RequestStatus.FINISHED_STOPPED)
                return "stop", found
        return finish_reason, output.stop_reason

    def _hear_logprobs(self, sequence: _Sequence, token_id: int, entry: dict[int, Logprob]) -> None:
        """Those of the step's next token, which is `token_id`."""
        assert sequence.logprobs is not None and sequence.cumulative_logprob is not None
        n = len(sequence.logprobs)
        before = sequence.token_ids[max(0, n - MAX_BYTES) : n]
        found = self._decoded(entry, before)
        sequence.logprobs.append(found)
        sequence.cumulative_logprob += found[token_id].logprob

    def _answer(
        self, sequence: _Sequence, finish_reason: str | None, stop_reason: int | str | None
    ) -> RequestOutput | None:
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
        return RequestOutput(
            caller.request_id,
            caller.prompt,
            caller.prompt_token_ids,
            outputs,
            finished,
            caller.num_cached_tokens,
            scores,
        )

    def _decoded(self, logprobs: dict[int, Logprob], before: Sequence[int]) -> dict[int, Logprob]:
        """`before`: the last tokens that were scored; as in vLLM, a prompt is not what an answer's tokens continue."""
        for token_id, logprob in logprobs.items():
            logprob.decoded_token = decoded_token(self.token_bytes, token_id, before)
        return logprobs

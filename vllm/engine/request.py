"""A request: what a caller may ask for, and how far one sequence has come.

Owns the tokens of a sequence and its status; made by whoever takes requests in, changed by the scheduler alone.
It never knows blocks, tensors or text.
vLLM: `vllm/v1/request.py`, `vllm/sampling_params.py`, `vllm/v1/core/sched/utils.py`.
"""

from __future__ import annotations

import common

import enum
import math
import time
from dataclasses import dataclass
from typing import Any


@dataclass
class SamplingParams:
    """What a caller may ask for, with vLLM's names and defaults (`vllm/sampling_params.py`).

    Raises InputError: a value is out of range; the message names the field.
    """

    n: int = 1  # samples per prompt
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None  # None or -1: other samples each time
    logprobs: int | None = None  # how many alternatives to report per token
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    skip_reading_prefix_cache: bool = False  # write the prefix cache, but do not read it (lesson 05)
    structured_outputs: dict[str, Any] | None = None  # what the output must match (companion 06b)
    allowed_token_ids: list[int] | None = None  # it may hold nothing else
    bad_words: list[str] | None = None  # it must hold none of these
    extra_args: dict[str, Any] | None = None  # for connectors (lesson 08)
    _bad_words_token_ids: list[list[int]] | None = None  # by whoever has the tokenizer (companion 04b)

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, kind, unset in (
            ("stop", str, []),
            ("bad_words", str, []),
            ("stop_token_ids", int, []),
            ("allowed_token_ids", int, None),
        ):
            given = getattr(self, name)
            setattr(self, name, unset if given is None else listed(name, given, kind, may_be_empty=unset == []))
        self.seed = None if self.seed == -1 else self.seed
        self.skip_reading_prefix_cache |= self.prompt_logprobs is not None  # what is not computed has no logits
        for name, kind, low, high in (
            ("n", int, 1, 16_384),
            ("temperature", float, 0, 2),
            ("top_k", int, -1, math.inf),
            ("top_p", float, 0, 1),
            ("min_p", float, 0, 1),
            ("presence_penalty", float, -2, 2),
            ("frequency_penalty", float, -2, 2),
            ("repetition_penalty", float, 0.01, 100),
            ("seed", int, -(2**63), 2**63 - 1),
            ("logprobs", int, -1, math.inf),  # -1: of the whole vocabulary; `FrontEnd` knows how many are allowed
            ("prompt_logprobs", int, -1, math.inf),
            ("max_tokens", int, 1, math.inf),
            ("min_tokens", int, 0, self.max_tokens or math.inf),
        ):
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs", "prompt_logprobs", "max_tokens"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, kind)) or not low <= value <= high:
                allowed = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
                what = "whole number" if kind is int else "number"
                raise common.InputError(f"{name} {value!r}: must be a {what} {allowed}")
        if self.top_p == 0:
            raise common.InputError("top_p 0: must be above 0")
        bias = self.logit_bias or {}
        if not (isinstance(bias, dict) and all(type(x) in (int, float) and abs(x) <= 100 for x in bias.values())):
            raise common.InputError(f"logit_bias {bias!r:.60}: must map token ids to numbers from -100 to 100")
        if self.temperature == 0 and self.n > 1:
            raise common.InputError(f"n {self.n}: must be 1 at temperature 0, where all samples are the same")


POOLING_TYPES = ("LAST", "MEAN")


@dataclass
class PoolingParams:
    """What a caller may ask for who wants a prompt's vector and no answer (`vllm/pooling_params.py`)."""

    pooling_type: str = "LAST"  # one of POOLING_TYPES
    use_activation: bool = True  # of length 1
    dimensions: int | None = None  # the first so many

    def as_sampling_params(self) -> SamplingParams:
        """What the scheduler goes by. A mean is of all tokens, so what is cached has to be computed again."""
        return SamplingParams(temperature=0, max_tokens=1, skip_reading_prefix_cache=self.pooling_type == "MEAN")


class RequestStatus(enum.IntEnum):
    """Everything after PREEMPTED is finished."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()  # lesson 11
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()  # no token can be chosen for it; what its `stop_reason` says goes to its caller


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}

# In place of a sampled token: this request has none, and nobody else need suffer. It is no token's id.
NO_TOKEN_ID = -1
NO_TOKEN = (
    "no token can be chosen: the model's logits are NaN or infinite (an overflow in float16, say, or broken weights), "
    "or no token is allowed"
)


class Request:
    """One sequence on its way through the engine (`vllm/v1/request.py`).

    There is no prefill phase and no decode phase. A request is behind by `num_tokens - num_computed_tokens` tokens,
    and every step lets it catch up by some of them. One that decodes is behind by exactly 1: the token sampled last.
    """

    def __init__(  # noqa: PLR0913  what a request is made of
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        eos_token_id: int | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        pooling_params: PoolingParams | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params  # if it has some, it ends with its prompt, and nothing is sampled
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.priority = priority  # smaller is more important
        self.cache_salt = cache_salt  # lesson 05: requests with different salts share nothing
        self.lora_name = lora_name  # lesson 12
        self.lora_fingerprint: str | None = None  # of the weights that the name stands for
        self.guide: Any = None  # companion 06b: what its answer must match, compiled
        self.max_tokens = math.inf if sampling_params.max_tokens is None else sampling_params.max_tokens
        self.eos_token_id = None if sampling_params.ignore_eos else eos_token_id
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids or ())

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None  # the stop token or string that ended it
        self.all_token_ids = list(prompt_token_ids)  # the prompt, then everything generated
        self.output_token_ids: list[int] = []
        self.num_computed_tokens = 0  # leading tokens whose KV is in the cache once the scheduled step has run
        self.num_cached_tokens = 0  # of its prompt, found in the prefix cache at its first admission (lesson 05)
        self.num_preemptions = self.num_external_computed_tokens = 0  # lesson 11; lesson 08: cached, but not here
        self.block_hashes: list[bytes] = []  # one per full block, written by the KV cache manager
        self.spec_token_ids: list[int] = []  # drafts for the next step
        self.num_output_placeholders = 0  # samples on their way: steps planned ahead that will bring one each
        self.num_draft_placeholders = 0  # drafts on their way with them

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def append_output_token_id(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)

    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    def get_finished_reason(self) -> str | None:
        return FINISH_REASONS.get(self.status)

    def sort_key(self) -> tuple[int, float, str]:
        """The order of a priority queue: ties go to the earlier arrival."""
        return (self.priority, self.arrival_time, self.request_id)

    def __lt__(self, other: Request) -> bool:
        return self.sort_key() < other.sort_key()

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"


def check_stop(request: Request, max_model_len: int) -> bool:
    """Does the token just appended end the request? Sets its status; the first rule that applies wins."""
    token_id = request.output_token_ids[-1]
    if token_id == request.eos_token_id:
        request.status = RequestStatus.FINISHED_STOPPED
    elif token_id in request.stop_token_ids:
        request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, token_id
    elif request.num_tokens >= max_model_len or request.num_output_tokens >= request.max_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    else:
        return False
    return True


def prompt_length_error(num_prompt_tokens: int, max_model_len: int) -> str | None:
    """Why a prompt of this length cannot be served, in the words of vLLM's front end; None if it can.

    The longest legal prompt has `max_model_len - 1` tokens, and gets exactly one in return.
    """
    if num_prompt_tokens == 0:
        return "The decoder prompt cannot be empty"
    prompt, limit = f"The decoder prompt (length {num_prompt_tokens})", f"maximum model length of {max_model_len}"
    if num_prompt_tokens > max_model_len:
        return f"{prompt} is longer than the {limit}"
    if num_prompt_tokens == max_model_len:
        return f"{prompt} plus the number of requested output tokens (at least 1) is longer than the {limit}"
    return None


def listed(name: str, given: Any, kind: type, may_be_empty: bool = True) -> list[Any]:
    """A list of texts (kind str), none of them empty, or of token ids (kind int). Raises InputError."""
    fits = (lambda x: isinstance(x, str) and x) if kind is str else (lambda x: type(x) is int and x >= 0)
    if not (isinstance(given, list | tuple | set) and all(map(fits, given)) and (given or may_be_empty)):
        wanted = "texts, none of them empty" if kind is str else "token ids, 0 or above"
        raise common.InputError(
            f"{name} {given!r:.60}: must be a list of {wanted}{'' if may_be_empty else '; at least one'}"
        )
    return list(given)

"""One HTTP request inside the engine.

Owns its collectors and how far each of its answers has been read; made by `serving`, which alone reads and ends it. It
never waits for anything. vLLM: `RequestResponseMetadata` and the locals of `vllm/entrypoints/openai/*/serving.py`.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.request import SamplingParams
from engine.serving.collector import RequestOutputCollector
from engine.serving.openai.answers import AnswerReader
from engine.serving.openai.protocol import ChatCompletionRequest, CompletionRequest

if TYPE_CHECKING:
    from engine.llm_engine import RequestOutput


@dataclass
class Job:
    """One HTTP request inside the engine: a prompt is a collector, and n answers to it come to the same one."""

    request_id: str
    model: str
    body: CompletionRequest | ChatCompletionRequest
    params: SamplingParams
    collectors: list[RequestOutputCollector]
    created: int = field(default_factory=lambda: int(time.time()))
    text_offsets: dict[int, int] = field(default_factory=dict)  # where an answer's next token begins
    grammars: dict[int, Any] | None = None  # what each answer must match, as far as it has come (companion 06b)
    utf8: dict[int, Any] = field(default_factory=dict)  # decoders: what of a character is there already
    parsers: tuple[str, str | None] = "hermes", None  # of calls, and of thinking if its answers begin with that

    def __post_init__(self) -> None:  # what has been understood of each answer so far
        self.readers = collections.defaultdict(functools.partial(AnswerReader, self.body, *self.parsers))

    @property
    def wants_usage(self) -> bool:
        """OpenAI's streams carry `usage: null` in every chunk but the last, if usage was asked for."""
        return bool(self.body.stream and self.body.stream_options and self.body.stream_options.include_usage)


@dataclass
class Usage:
    """Tokens of one HTTP request, whatever its number of prompts and answers."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int | None = None  # of the completion; None where nobody would know

    def add_prompt(self, output: RequestOutput) -> None:
        self.prompt += len(output.prompt_token_ids)
        self.cached += output.num_cached_tokens

    def add_answer(self, reader: AnswerReader, tokens: Sequence[bytes]) -> None:
        """An answer's tokens, or those of a piece of it."""
        self.completion += len(tokens)
        if reader.thoughts:
            self.reasoning = (self.reasoning or 0) + reader.thoughts.read(tokens)

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        told = {} if self.reasoning is None else {"completion_tokens_details": {"reasoning_tokens": self.reasoning}}
        return told | {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

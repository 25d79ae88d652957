"""The grammar slot of a model runner: masks for those requests that ask, and nothing for the others.

Owns the guides of running requests; called by the model runner once a step, and from other threads to compile. It never
samples. vLLM: `vllm/v1/structured_output/__init__.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.request import Request
from engine.sampling.guided.bitmask import apply_token_bitmask_inplace
from engine.sampling.guided.manager import StructuredOutputManager
from engine.sampling.guided.structured_outputs import compile_guide
from engine.sampling.guided.vocabulary import Vocabulary, vocabulary_of


class GuidedDecoding:
    """Structured output for the requests of one runner (`vllm/v1/structured_output/__init__.py`)."""

    def __init__(self, tokenizer: Tokenizer, config: LlamaConfig) -> None:
        self.tokenizer, self.config = tokenizer, config

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token, and which of them end an answer: read when somebody asks for the first time."""
        return vocabulary_of(self.tokenizer, self.config.vocab_size, self.config.eos_token_ids)

    @functools.cached_property
    def manager(self) -> StructuredOutputManager:
        """Who is where in its grammar."""
        return StructuredOutputManager(self.vocabulary)

    def grammar_init(self, request: Request) -> None:
        """Compile on any thread what a request asks for, so that no step has to. Raises InputError."""
        asked = request.sampling_params.structured_outputs
        assert asked is not None
        request.guide = compile_guide(asked, self.vocabulary, checked=True)

    def mask(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[str]:
        """Forbid in place what no guide allows, in the rows [R, vocab] of those that ask. Returns their ids."""
        rows = [i for i, request in enumerate(requests) if request.sampling_params.structured_outputs is not None]
        if not rows:
            return []
        guided = [requests[i] for i in rows]
        bitmask = torch.from_numpy(self.manager.grammar_bitmask(guided)).to(logits.device)
        apply_token_bitmask_inplace(logits, bitmask, torch.tensor(rows, device=logits.device))
        return [request.request_id for request in guided]

    def finish(self, request_ids: Iterable[str]) -> None:
        """They have ended."""
        if "manager" in vars(self):
            self.manager.finish(request_ids)

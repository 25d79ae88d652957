"""The grammars of the running requests: a mask for each of them in every step.

Owns how far each request has come; called by the model runner before it samples and when requests end. It never touches
a logit, and never remembers a request that has ended. vLLM: `vllm/v1/structured_output/__init__.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.request import Request
from engine.sampling.guided.after_reasoning import AfterReasoning
from engine.sampling.guided.guidance import GuidanceGrammar
from engine.sampling.guided.regex_guide import RegexGrammar
from engine.sampling.guided.structured_outputs import compile_guide, start
from engine.sampling.guided.vocabulary import Vocabulary


@dataclass
class Progress:
    """Where one request is: its grammar, and how many of its output tokens that has read."""

    grammar: RegexGrammar | GuidanceGrammar | AfterReasoning
    num_tokens: int = 0


class StructuredOutputManager:
    """The grammars of the running requests (`vllm/v1/structured_output/__init__.py`)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.grammars: dict[str, Progress] = {}  # by request id

    def finish(self, request_ids: Iterable[str]) -> None:
        """They have ended."""
        for request_id in request_ids:
            self.grammars.pop(request_id, None)

    def grammar_bitmask(self, requests: Sequence[Request]) -> np.ndarray:
        """One mask for each of these guided requests, int32 [G, ⌈vocab/32⌉].

        A function of the output tokens: chunks of a prompt, preemption and recomputation are not noticed here.
        """
        bitmask = np.empty((len(requests), self.vocabulary.num_words), np.int32)
        for row, request in zip(bitmask, requests):
            try:
                self.fill_row(row, request)
            except Exception as error:  # compiled within the time limit elsewhere, and not here, beside all the others
                warnings.warn(f"request {request.request_id}: no mask ({error!r:.200})", stacklevel=2)
                row[:] = 0  # nothing is allowed, and that ends this request with an error
        return bitmask

    def fill_row(self, row: np.ndarray, request: Request) -> None:
        """The mask of one request, int32 [⌈vocab/32⌉], after the tokens that it has got since the last time."""
        if request.request_id not in self.grammars:
            wanted = request.sampling_params.structured_outputs
            assert wanted is not None, "only who asks for a grammar has a mask"
            guide = request.guide or compile_guide(wanted, self.vocabulary, checked=True)
            self.grammars[request.request_id] = Progress(start(wanted, guide, self.vocabulary))
        entry = self.grammars[request.request_id]
        for token_id in request.output_token_ids[entry.num_tokens :]:
            if not entry.grammar.accept_token(token_id):  # BROKEN, or sampled without our mask: end the answer
                warnings.warn(f"request {request.request_id}: token {token_id} breaks its grammar", stacklevel=2)
                entry.grammar.terminated = True
        entry.num_tokens = request.num_output_tokens
        entry.grammar.fill_bitmask(row)

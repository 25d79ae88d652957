"""A grammar that begins where a model has stopped thinking: until then, every token is allowed.

Owns the last bytes of what was thought; made where a grammar starts for a request that says so. It never looks into the
grammar behind it. vLLM: `vllm/v1/structured_output/__init__.py:StructuredOutputManager.should_fill_bitmask`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # it keeps guides
    from engine.sampling.guided.vocabulary import Vocabulary


class AfterReasoning:
    """`end` is the tag that closes what was thought; a grammar's first token is the one behind it."""

    def __init__(self, grammar: Any, end: str, vocabulary: Vocabulary) -> None:
        self.grammar, self.end, self.tokens = grammar, end.encode(), vocabulary.tokens
        self.end_token = vocabulary.tokenizer.backend.token_to_id(end) if vocabulary.tokenizer else None
        self.thinking, self.tail = True, b""

    @property
    def terminated(self) -> bool:
        """Whether only EOS may follow."""
        return self.grammar.terminated

    @terminated.setter
    def terminated(self, value: bool) -> None:
        self.grammar.terminated, self.thinking = value, self.thinking and not value

    def accept_token(self, token_id: int) -> bool:
        """Whether the token may stand here, which is then read."""
        if not self.thinking:
            return self.grammar.accept_token(token_id)
        said = self.tail + self.tokens[token_id]
        self.thinking, self.tail = token_id != self.end_token and self.end not in said, said[1 - len(self.end) :]
        return True

    def fill_bitmask(self, row: np.ndarray) -> None:
        """The grammar's mask, or one that allows everything."""
        if self.thinking:
            row[:] = -1
        else:
            self.grammar.fill_bitmask(row)

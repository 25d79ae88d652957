"""How far one request has come in a pattern, and which tokens may come next.

Owns a compiled pattern, its masks and each request's state; called by the manager once a token. It never samples, and
never rolls back. vLLM: `vllm/v1/structured_output/backend_types.py`, `vllm/v1/structured_output/backend_outlines.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from engine.sampling.guided import limits
from engine.sampling.guided.automaton import determinize
from engine.sampling.guided.expressions import Node, restrict

if TYPE_CHECKING:  # it keeps guides, and each of them knows it
    from engine.sampling.guided.vocabulary import Vocabulary


class RegexGuide:
    """A compiled pattern: the automaton, and the masks of those states that requests have reached."""

    def __init__(self, node: Node, vocabulary: Vocabulary, max_work: int = limits.MAX_WORK) -> None:
        self.vocabulary = vocabulary
        self.dfa = determinize(restrict(node, vocabulary.alphabet), max_work)
        self.mask = functools.lru_cache(1024)(lambda state: vocabulary.pack(self.allowed(state)))  # 6 MB at most

    def start(self) -> RegexGrammar:
        return RegexGrammar(self)

    def allowed(self, state: int) -> np.ndarray:
        """What the trie finds, and the rule of the end: bool [vocab]."""
        allowed = self.vocabulary.trie.allowed(self.dfa, state)
        allowed[self.vocabulary.eos_token_ids] = self.dfa.accepting[state]
        return allowed


class RegexGrammar:
    """One request in a pattern: a `StructuredOutputGrammar`, as vLLM calls it."""

    def __init__(self, guide: RegexGuide) -> None:
        self.guide = guide
        self.vocabulary = guide.vocabulary
        self.state = 0
        self.terminated = False

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False if it does not fit."""
        if token_id in self.vocabulary.eos_token_ids:
            self.terminated = self.terminated or bool(self.guide.dfa.accepting[self.state])
            return self.terminated
        token = self.vocabulary.tokens[token_id]
        state = -1 if self.terminated or not token else self.guide.dfa.step(self.state, token)
        self.state = max(state, 0)
        return state >= 0

    def fill_bitmask(self, row: np.ndarray) -> None:
        """Write the mask of the next token into `row`, int32 [⌈vocab/32⌉]."""
        row[:] = self.vocabulary.only_eos if self.terminated else self.guide.mask(self.state)

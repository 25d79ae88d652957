"""All tokens of a vocabulary in one tree: a walk over it finds every token that a state of an automaton allows.

Owns the trie; called by `RegexGuide` once for each state that a request comes to. It never keeps what it finds.
vLLM: `vllm/v1/structured_output/backend_outlines.py`, inside its library outlines_core.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sampling.guided.automaton import DFA


class TokenTrie:
    """All tokens of a vocabulary, sharing their prefixes. Nodes are numbered level by level, siblings side by side."""

    def __init__(self, tokens: Sequence[bytes]) -> None:  # b"": never text, such as <|im_start|>
        words = set(tokens) - {b""}
        number, byte, parent = {b"": 0}, [0], [-1]
        for length in range(1, 1 + max(map(len, words), default=0)):
            for prefix in sorted({word[:length] for word in words if len(word) >= length}):
                number[prefix] = len(byte)
                byte.append(prefix[-1])
                parent.append(number[prefix[:-1]])
        self.byte = np.array(byte, np.uint8)  # [nodes]
        self.num_children = np.bincount(parent[1:], minlength=len(byte))  # [nodes]
        self.first_child = 1 + self.num_children.cumsum() - self.num_children  # [nodes]
        self.node = np.array([number[token] for token in tokens])  # [vocab]; the root for tokens without bytes

    def allowed(self, dfa: DFA, state: int) -> np.ndarray:
        """The tokens that lead from `state` to a state: bool [vocab]. Only branches that are alive cost anything."""
        reached = np.zeros(len(self.byte), dtype=bool)
        nodes, states = np.zeros(1, np.int64), np.array([state])
        while len(nodes):  # a level of the trie, so one byte, on all branches
            count = self.num_children[nodes]
            offset = self.first_child[nodes] - (count.cumsum() - count)
            children = np.arange(count.sum()) + np.repeat(offset, count)
            states = dfa.transitions[np.repeat(states, count), dfa.byte_class[self.byte[children]]]
            nodes, states = children[states >= 0], states[states >= 0]
            reached[nodes] = True
        return reached[self.node]

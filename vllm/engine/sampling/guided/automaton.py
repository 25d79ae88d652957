"""From a tree over bytes to a deterministic automaton: what is written becomes one integer, the state.

Owns Thompson's and the subset construction and counts their work; called when a pattern is compiled. It never knows a
token. vLLM: `vllm/v1/structured_output/backend_outlines.py`, inside its library outlines_core.
"""

from __future__ import annotations

import common

from dataclasses import dataclass

import numpy as np

from engine.sampling.guided import limits
from engine.sampling.guided.expressions import ALL_BYTES, NOTHING, Alt, Bytes, Concat, Node, Repeat


class NFA:
    """Thompson's construction, from the end to the beginning. A state reads one byte out of its mask, or forks.

    State 0 accepts. Equal states (the same mask, the same successors) are one, so all characters share their last byte.
    """

    def __init__(self, node: Node, max_work: int = limits.MAX_WORK) -> None:
        self.masks = [0]
        self.targets: list[tuple[int, ...]] = [()]  # a fork has mask 0, and any number of targets
        self.known: dict[tuple[int, tuple[int, ...]], int] = {}
        self.closures: dict[int, frozenset[int]] = {}
        self.work, self.max_work = 0, max_work
        self.start = self.add(node, 0)

    def state(self, mask: int, targets: tuple[int, ...]) -> int:
        """The number of the state that reads a byte of `mask` and goes to `targets`: equal ones are one."""
        found = self.known.setdefault((mask, targets), len(self.masks))
        if found == len(self.masks):
            self.masks.append(mask)
            self.targets.append(targets)
        return found

    def add(self, node: Node, then: int) -> int:
        """The state that reads `node` and goes on as state `then` does."""
        self.spend(20)
        match node:
            case Bytes(mask):
                return self.state(mask, (then,))
            case Concat(parts):
                for part in reversed(parts):
                    then = self.add(part, then)
                return then
            case Alt(parts):
                return self.state(0, tuple(self.add(part, then) for part in parts))
            case Repeat(inner, low, high):
                start = then
                if high is None:  # a loop: the fork is there before what leads back to it
                    start = len(self.masks)
                    self.masks.append(0)
                    self.targets.append(())
                    self.targets[start] = (self.add(inner, start), then)
                for _ in range(0 if high is None else high - low):
                    start = self.state(0, (self.add(inner, start), then))
                for _ in range(low):
                    start = self.add(inner, start)
                return start

    def closure(self, state: int) -> frozenset[int]:
        """Where forks lead from `state`: states that read a byte, or accept."""
        found = self.closures.get(state)
        if found is None:
            seen, stack = {state}, [state]
            while stack:
                at = stack.pop()
                new = {*self.targets[at]} - seen if self.masks[at] == 0 else set()
                seen |= new
                stack += new
            self.spend(len(seen))
            found = self.closures[state] = frozenset(s for s in seen if s == 0 or self.masks[s])
        return found

    def spend(self, work: int) -> None:
        self.work += work
        if self.work > self.max_work:
            raise limits.TooSlow("the pattern is too large, or the same text can be read in too many ways at once")


@dataclass
class DFA:
    """What is written is one integer, the state: 0 at the beginning, −1 once no match is possible any more."""

    transitions: np.ndarray  # int32 [states, classes]
    byte_class: np.ndarray  # uint8 [256]: bytes that no state tells apart are one class
    accepting: np.ndarray  # bool [states]
    examples: list[bytes]  # a shortest text that leads to each state

    def step(self, state: int, data: bytes) -> int:
        for byte in data:
            if state >= 0:
                state = int(self.transitions[state, self.byte_class[byte]])
        return state


def determinize(node: Node, max_work: int = limits.MAX_WORK) -> DFA:
    """Subset construction: a state is the set of NFA states in which the text so far may have ended.

    There are no dead ends: every part of a tree other than NOTHING matches something. Raises InputError, TooSlow.
    """
    if node == NOTHING:
        raise common.InputError("no answer can match the pattern")
    nfa, classes = NFA(node, max_work), [ALL_BYTES]
    for mask in set(nfa.masks):  # the coarsest partition of which each mask is a union
        classes = [part for old in classes for part in (old & mask, old & ~mask) if part]
    classes.sort(key=lambda part: part & -part)  # by their first byte
    classes_of = {mask: [i for i, part in enumerate(classes) if part & mask] for mask in set(nfa.masks)}
    subsets = [nfa.closure(nfa.start)]
    number, rows, examples = {subsets[0]: 0}, [], [b""]
    for subset in subsets:  # grows while we walk it
        moves: dict[int, set[int]] = {}
        for state in subset - {0}:
            reached, read = nfa.closure(nfa.targets[state][0]), classes_of[nfa.masks[state]]
            nfa.spend(len(reached) * len(read))
            for c in read:
                moves.setdefault(c, set()).update(reached)
        row = [-1] * len(classes)
        for c, reached in sorted(moves.items()):
            target = frozenset(reached)
            row[c] = number.setdefault(target, len(subsets))
            if row[c] == len(subsets):
                subsets.append(target)
                examples.append(examples[len(rows)] + bytes([(classes[c] & -classes[c]).bit_length() - 1]))
        if len(subsets) > limits.MAX_DFA_STATES:
            raise common.InputError(f"the pattern's automaton has more than {limits.MAX_DFA_STATES:,} states")
        rows.append(row)
    byte_class = [next(i for i, part in enumerate(classes) if part >> byte & 1) for byte in range(256)]
    accepting = np.array([0 in subset for subset in subsets])
    return DFA(np.array(rows, np.int32), np.array(byte_class, np.uint8), accepting, examples)

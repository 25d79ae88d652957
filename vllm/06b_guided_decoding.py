"""06b · Guided decoding: a model that cannot answer outside the format.

The question: a program reads the answer, and wants a date, one of three words, or JSON of a given shape. How does an
engine make that work every time, at what cost, and what does it do to what the model would have said?

The mechanism:
  1. A token may come next if what is written, with it, can still become a match. Trying each token is obviously right.
  2. A regular expression becomes an automaton over *bytes*, since tokens are bytes: é is two of them, and may be cut.
  3. Subset construction makes it deterministic: all that matters of what is written is one integer, the state.
  4. The vocabulary is a trie. One walk over it, a level at a time, finds all tokens that a state allows: a mask of one
     bit per token, computed when a request first comes to the state, and kept.
  5. The end-of-sequence token is allowed where the automaton accepts, and nowhere else.
  6. Before sampling, a kernel sets the logits of forbidden tokens to −∞, in the rows of the requests that asked for it.
  7. JSON schemas and grammars may nest without end: llguidance keeps a parser, and yields masks of the same form.
  8. Patterns come from strangers: our automata may not exceed a fixed size, and the library reads a schema or grammar
     first in a process of its own, where it may hang or crash.

Numbers to remember: a mask of 49,152 tokens is 6,144 bytes. (a|b)*a(a|b){n} has 2^(n+1) states. A model under masks
is not the model given that its answer matches: an answer of 2 % may become one of 60 %.

How to run:
  uv run python vllm/06b_guided_decoding.py                     the whole story
  uv run python vllm/06b_guided_decoding.py --regex '[a-f]{4}'  what the model says if it must match your pattern
  uv run python vllm/06b_guided_decoding.py --text-masks        break it: look at tokens as text, not as bytes
  uv run python vllm/06b_guided_decoding.py --eos always        break it: forget the rule about the end
  uv run python vllm/06b_guided_decoding.py --bench             a minute: more questions, longer measurements

Read for this: Thompson 1968 and Rabin & Scott 1959 (automata), Brzozowski 1964 (derivatives), Willard & Louf 2023
(masks from automata), Park et al. 2024 (what masks do to the distribution), vLLM 0.32 `v1/structured_output/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import ast
import contextlib
import functools
import inspect
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import _constants, _parser
from typing import Any

import numpy as np
import torch
from common import tl, triton

import llama

offline = common.lesson("04b_offline_engine")
from engine.sampling.guided import json_schemas as schemas

closed, TEXT, PERSON, CALL = schemas.closed, schemas.TEXT, schemas.PERSON, schemas.CALL
Request, SamplingParams, TokenBytes = offline.Request, offline.SamplingParams, offline.TokenBytes
SamplingModelRunner = offline.SamplingModelRunner

KEY = "06b_guided_decoding"

KINDS = ("json", "regex", "choice", "grammar", "json_object")  # what `structured_outputs` may ask for, one at a time

# What a stranger may cost us. Our own part is counted, not timed, so what passes here passes everywhere.
MAX_PATTERN = 4_096  # characters of a regular expression
MAX_DEPTH = 100  # of its parentheses and alternatives
MAX_DFA_STATES = 5_000
MAX_WORK = 1_000_000  # NFA states looked at while the DFA is built (a new one counts 20): half a second
MAX_SPEC = 65_536  # characters of a schema, of a grammar, of all choices together
MAX_SECONDS = 5.0  # for the library's first reading of a schema or grammar, as in vLLM for a pattern
MAX_MEMORY = 256 << 20  # bytes of addresses that this reading may have; the largest schema needs a fifth of them


class TooSlow(common.InputError):
    """More work than was allowed. Who allowed little may try again with more (06f2)."""


# --- A regular expression, as a tree over bytes -----------------------------------------------------------------------


@dataclass(frozen=True)
class Bytes:
    """One byte out of a set; bit b of `mask`, never 0, says whether byte b is in it."""

    mask: int


@dataclass(frozen=True)
class Concat:
    """Its parts, one after another; of none, the empty string."""

    parts: tuple[Node, ...] = ()  # none: the empty string


@dataclass(frozen=True)
class Alt:
    """One of its parts; of none, no string at all."""

    parts: tuple[Node, ...] = ()  # none: no string at all


@dataclass(frozen=True)
class Repeat:
    """`node` from `low` to `high` times; None is without end."""

    node: Node
    low: int
    high: int | None  # None: without end


Node = Bytes | Concat | Alt | Repeat
EMPTY, NOTHING, ALL_BYTES = Concat(), Alt(), (1 << 256) - 1

# Trees are built by these functions alone, and they keep one promise: a tree that no string matches is NOTHING itself.


def concat(nodes: Iterable[Node]) -> Node:
    """The parts in a row, flat; NOTHING if one of them is."""
    flat = [part for node in nodes for part in (node.parts if isinstance(node, Concat) else (node,))]
    return NOTHING if NOTHING in flat else flat[0] if len(flat) == 1 else Concat(tuple(flat))


def alt(nodes: Iterable[Node]) -> Node:
    """Any of the parts, flat, each once, single bytes united."""
    flat = dict.fromkeys(part for node in nodes for part in (node.parts if isinstance(node, Alt) else (node,)))
    if len(single := [part for part in flat if isinstance(part, Bytes)]) > 1:  # one byte out of either set
        mask = functools.reduce(lambda mask, part: mask | part.mask, single, 0)
        flat = {Bytes(mask): None} | {part: None for part in flat if part not in single}
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def repeat(node: Node, low: int, high: int | None) -> Node:
    """`low` to `high` times, and the empty string as EMPTY alone."""
    if high == 0 or node in (EMPTY, NOTHING):
        return NOTHING if node == NOTHING and low > 0 else EMPTY
    return Repeat(node, low, high)


def restrict(node: Node, alphabet: int) -> Node:
    """The same expression without the strings that have a byte outside of `alphabet`, a mask."""
    match node:
        case Bytes(mask):
            return Bytes(mask & alphabet) if mask & alphabet else NOTHING
        case Concat(parts):
            return concat(restrict(part, alphabet) for part in parts)
        case Alt(parts):
            return alt(restrict(part, alphabet) for part in parts)
        case Repeat(inner, low, high):
            return repeat(restrict(inner, alphabet), low, high)


Ranges = list[tuple[int, int]]  # of code points, both ends included
LAST = 0x10FFFF


def complement(ranges: Ranges) -> Ranges:
    """All code points that are in none of `ranges`."""
    found, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, LAST)] if start <= LAST else found


@functools.lru_cache(4096)
def utf8(low: bytes, high: bytes) -> Node:
    """The byte strings of one length from `low` to `high`, whose bytes but the first run from 80 to BF."""
    masks: dict[Node, int] = {}  # what may follow -> after which first bytes
    for first in range(low[0], high[0] + 1) if low else ():
        n = len(low) - 1
        tail = utf8(low[1:] if first == low[0] else b"\x80" * n, high[1:] if first == high[0] else b"\xbf" * n)
        masks[tail] = masks.get(tail, 0) | 1 << first
    return alt(concat([Bytes(mask), tail]) for tail, mask in masks.items()) if low else EMPTY


def characters(ranges: Ranges) -> Node:
    """One character out of `ranges`, as the bytes of its UTF-8. Surrogates have none."""
    lengths = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, LAST))
    pairs = [(max(low, a), min(high, b)) for low, high in ranges for a, b in lengths]
    return alt(utf8(chr(low).encode(), chr(high).encode()) for low, high in pairs if low <= high)


def literal(text: str) -> Node:
    """Exactly this text."""
    return concat(Bytes(1 << byte) for byte in text.encode())


CLASSES = {"DIGIT": [(48, 57)], "SPACE": [(9, 13), (32, 32)], "WORD": [(48, 57), (65, 90), (95, 95), (97, 122)]}
CLASSES |= {f"NOT_{name}": complement(ranges) for name, ranges in CLASSES.items()}
REFUSED = {
    "AT": "a boundary, or an anchor but ^ in front and $ at the end,", "ASSERT": "lookaround",
    "ASSERT_NOT": "lookaround", "GROUPREF": "a backreference", "GROUPREF_EXISTS": "a conditional",
    "ATOMIC_GROUP": "an atomic group", "POSSESSIVE_REPEAT": "a possessive quantifier",
}  # fmt: skip


def parse_regex(pattern: str) -> Node:
    r"""Python's syntax, as far as it describes a regular language; the whole answer must match. Raises InputError.

    Literals, `.`, classes and negated ones, escapes (\d \w \s as under re.ASCII), groups, `|`, `*`, `+`, `?`, `{m,n}`;
    a lazy quantifier matches the same strings as a greedy one. `^` in front and `$` at the end are implied. The rest is
    refused by name. The reading is Python's own, `re._parser`, from where vLLM's Outlines backend takes it, too.
    """
    try:
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"{len(pattern):,} characters, at most {MAX_PATTERN:,} are allowed")
        parsed = _parser.parse(pattern, re.ASCII)
        if parsed.state.flags != re.ASCII:
            raise ValueError("flags are not supported")
        items = list(parsed)
        items = items[bool(items) and items[0] == (_constants.AT, _constants.AT_BEGINNING) :]
        items = items[: len(items) - (bool(items) and items[-1] == (_constants.AT, _constants.AT_END))]
        return translate(items, 0)
    except RecursionError:
        raise common.InputError("nests too deep") from None
    except (ValueError, OverflowError, re.error) as error:
        raise common.InputError(str(error)) from None


def translate(items: Iterable[tuple[Any, Any]], depth: int) -> Node:
    """What Python has read, as our tree. Raises ValueError."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nests more than {MAX_DEPTH} deep")
    parts: list[Node] = []
    for operation, value in items:
        match str(operation), value:
            case (("LITERAL" | "NOT_LITERAL" | "ANY" | "IN"), _):
                parts.append(characters(code_points(value if str(operation) == "IN" else [(operation, value)])))
            case "BRANCH", (_, branches):
                parts.append(alt(translate(branch, depth + 1) for branch in branches))
            case "SUBPATTERN", (_, 0, 0, inner):
                parts.append(translate(inner, depth + 1))
            case (("MAX_REPEAT" | "MIN_REPEAT"), (low, high, inner)):
                limit = None if high is _constants.MAXREPEAT else high
                parts.append(repeat(translate(inner, depth + 1), low, limit))
            case name, _:
                raise ValueError(f"{REFUSED.get(name, 'a flag')} is not supported")
    return concat(parts)


def code_points(items: Iterable[tuple[Any, Any]]) -> Ranges:
    """What a class, a literal or a dot stands for."""
    ranges, names = [], [str(operation) for operation, _ in items]
    for name, (_, value) in zip(names, items):
        if name == "CATEGORY":
            ranges += CLASSES[str(value).removeprefix("CATEGORY_")]
        elif name != "NEGATE":
            ranges.append(value if name == "RANGE" else (10, 10) if name == "ANY" else (value, value))
    return ranges if {"NEGATE", "ANY", "NOT_LITERAL"}.isdisjoint(names) else complement(ranges)


# --- What we want, without cleverness: try every token ----------------------------------------------------------------


def nullable(node: Node) -> bool:
    """Does the empty string match?"""
    match node:
        case Bytes():
            return False
        case Concat(parts):
            return all(map(nullable, parts))
        case Alt(parts):
            return any(map(nullable, parts))
        case Repeat(inner, low, _):
            return low == 0 or nullable(inner)


def derivative(node: Node, byte: int) -> Node:
    """What must follow `byte`: the expression of all w such that byte·w matches (Brzozowski 1964)."""
    match node:
        case Bytes(mask):
            return EMPTY if mask >> byte & 1 else NOTHING
        case Alt(parts):
            return alt(derivative(part, byte) for part in parts)
        case Repeat(inner, low, high):
            rest = repeat(inner, max(0, low - 1), None if high is None else high - 1)
            return concat([derivative(inner, byte), rest])
        case Concat(()):
            return NOTHING
        case Concat((first, *rest)):
            found = concat([derivative(first, byte), *rest])
            return alt([found, derivative(concat(rest), byte)]) if nullable(first) else found


def tokens_by_trying(node: Node, written: bytes, vocabulary: Sequence[bytes]) -> set[int]:
    """Ids of the tokens with which `written` can still become a match. Tokens without bytes are never among them."""
    rest = functools.reduce(derivative, written, node)
    return {i for i, token in enumerate(vocabulary) if token and functools.reduce(derivative, token, rest) != NOTHING}


# --- From the tree to a deterministic automaton -----------------------------------------------------------------------


class NFA:
    """Thompson's construction, from the end to the beginning. A state reads one byte out of its mask, or forks.

    State 0 accepts. Equal states (the same mask, the same successors) are one, so all characters share their last byte.
    """

    def __init__(self, node: Node, max_work: int = MAX_WORK) -> None:
        self.masks, self.targets = [0], [()]  # a fork has mask 0, and any number of targets
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
            raise TooSlow("the pattern is too large, or the same text can be read in too many ways at once")


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


def determinize(node: Node, max_work: int = MAX_WORK) -> DFA:
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
        if len(subsets) > MAX_DFA_STATES:
            raise common.InputError(f"the pattern's automaton has more than {MAX_DFA_STATES:,} states")
        rows.append(row)
    byte_class = [next(i for i, part in enumerate(classes) if part >> byte & 1) for byte in range(256)]
    accepting = np.array([0 in subset for subset in subsets])
    return DFA(np.array(rows, np.int32), np.array(byte_class, np.uint8), accepting, examples)


# --- From states to masks over the vocabulary -------------------------------------------------------------------------


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


class Vocabulary:
    """What guiding must know of a tokenizer: the bytes of each token, and which tokens end an answer."""

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: Iterable[int],
                 tokenizer: llama.Tokenizer | None = None) -> None:  # fmt: skip
        self.tokens, self.eos_token_ids, self.tokenizer = list(tokens), sorted(eos_token_ids), tokenizer
        if not self.eos_token_ids:
            raise common.InputError("structured_outputs: this model has no end-of-sequence token to end an answer with")
        self.trie = TokenTrie(self.tokens)
        self.num_words = -(-len(self.tokens) // 32)  # of a mask
        # Bytes that no token brings alone are struck from patterns: what is left can always be finished, byte by byte.
        self.alphabet = sum(1 << token[0] for token in set(self.tokens) if len(token) == 1)
        self.only_eos = self.pack(np.isin(np.arange(len(self.tokens)), self.eos_token_ids))  # of a finished answer
        self.guides: OrderedDict[tuple[str, Any], Guide] = OrderedDict()  # the next request may ask for the same
        self.lock = threading.Lock()

    KEPT = 32  # guides, those used last

    def pack(self, allowed: np.ndarray) -> np.ndarray:
        """bool [vocab] -> int32 [⌈vocab/32⌉]: token t is bit t mod 32 of word t div 32."""
        padded = np.zeros(32 * self.num_words, dtype=bool)
        padded[: len(allowed)] = allowed
        return np.packbits(padded, bitorder="little").view("<i4")

    def unpack(self, bitmask: np.ndarray) -> np.ndarray:
        """The opposite: int32 [words] -> bool [vocab]."""
        return np.unpackbits(bitmask.view(np.uint8), count=len(self.tokens), bitorder="little").astype(bool)

    def kept(self, kind: str, spec: Any) -> Guide | None:
        """The guide for a normalized request, if it was compiled not long ago. Never waits."""
        with self.lock:
            if (guide := self.guides.get((kind, spec))) is not None:
                self.guides.move_to_end((kind, spec))
            return guide

    def guide(self, kind: str, spec: Any, max_work: int = MAX_WORK) -> Guide:
        """The guide that is kept, or a new one. Raises InputError, TooSlow."""
        if (guide := self.kept(kind, spec)) is None:
            guide = self.compile(kind, spec, max_work)
            with self.lock:
                guide = self.guides.setdefault((kind, spec), guide)
                while len(self.guides) > self.KEPT:
                    self.guides.popitem(last=False)
        return guide

    def compile(self, kind: str, spec: Any, max_work: int = MAX_WORK) -> Guide:
        """The guide for a normalized request. Raises InputError, TooSlow."""
        try:
            if kind in ("regex", "choice"):
                return RegexGuide(parse_regex(spec) if kind == "regex" else alt(map(literal, spec)), self, max_work)
            return GuidanceGrammar(read_grammar(self.ll_tokenizer, kind, spec), self)
        except ValueError as error:
            slow = TooSlow if isinstance(error, TooSlow) else common.InputError
            raise slow(f"structured_outputs: {kind} {spec!r:.60}: {error}") from None

    @functools.cached_property
    def ll_tokenizer(self) -> Any:
        """The library's view of the same tokens: no space goes in front of what a grammar forces. In half a second."""
        import llguidance

        about = self.tokenizer.backend.to_str().replace('"add_prefix_space":true', '"add_prefix_space":false')
        return llguidance.LLTokenizer(about, n_vocab=len(self.tokens), eos_token=self.eos_token_ids)


@functools.lru_cache(4)
def vocabulary_of(tokenizer: llama.Tokenizer, vocab_size: int | None = None,
                  eos_token_ids: tuple[int, ...] = ()) -> Vocabulary:  # fmt: skip
    """The tokenizer's `Vocabulary`, made once (in half a second). A model may have more ids than its tokenizer."""
    size = vocab_size or tokenizer.backend.get_vocab_size(with_added_tokens=True)
    if not eos_token_ids and (name := tokenizer.special_tokens.get("eos_token")):
        found = tokenizer.backend.token_to_id(name)
        eos_token_ids = () if found is None else (found,)
    token_bytes = TokenBytes(tokenizer)
    tokens = [b"" if token in token_bytes.special else token_bytes[token] for token in range(size)]
    return Vocabulary(tokens, eos_token_ids, tokenizer)


# --- How far one request has come: in a pattern, or in a grammar ------------------------------------------------------


class RegexGuide:
    """A compiled pattern: the automaton, and the masks of those states that requests have reached."""

    def __init__(self, node: Node, vocabulary: Vocabulary, max_work: int = MAX_WORK) -> None:
        self.vocabulary, self.dfa = vocabulary, determinize(restrict(node, vocabulary.alphabet), max_work)
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
        self.guide, self.vocabulary, self.state, self.terminated = guide, guide.vocabulary, 0, False

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


def read_grammar(tokenizer: Any, kind: str, spec: str) -> Any:
    """llguidance's matcher for a JSON schema or a grammar. Raises ValueError."""
    import re, llguidance  # noqa: E401, in the other process there is nothing else

    if kind == "grammar":
        grammar = llguidance.grammar_from("grammar", spec)
    else:  # as json.dumps writes it: where whitespace is free, a small model may write newlines until it is cut off
        compact = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(spec, overrides=compact)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0,
                                   limits=llguidance.LLParserLimits(verbose_errors=False))  # fmt: skip
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():  # a matcher is silent about what cannot match until it is asked for a mask
        error = matcher.get_error() or "no answer can match it"
        advice = 'Say "anyOf", or in the same schema "x-guidance": {"coerce_one_of": true}: both mean the same'
        raise ValueError(re.sub("Enable 'coerce_one_of' option .* anyOf", advice, error))
    return matcher


@functools.lru_cache(256)
def read_apart(kind: str, spec: str) -> None:
    """Have another process read it first: there the library may hang or crash, and nobody else does.

    (A few thousand rules, each naming the next, overflow its stack: no error that one could catch.) Raises InputError.
    """
    command, data = reading(kind, spec, MAX_SECONDS)
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=MAX_SECONDS)
        check_reading(kind, done.returncode, done.stdout, MAX_SECONDS)
    except subprocess.TimeoutExpired:
        check_reading(kind, None, b"", MAX_SECONDS)


def reading(kind: str, spec: str, seconds: float) -> tuple[list[str], bytes]:
    """The command of a process that reads a schema or grammar in `seconds` of a processor, and what to write to it."""
    code = inspect.getsource(read_grammar) + inspect.getsource(_in_the_other_process) + "_in_the_other_process()"
    command = [sys.executable, "-c", "from __future__ import annotations\n" + code]
    return command, json.dumps([seconds, MAX_MEMORY, kind, spec]).encode()


def check_reading(kind: str, returncode: int | None, printed: bytes, seconds: float) -> None:
    """What came of such a process; a return code of None is one that was not waited for. Raises InputError, TooSlow."""
    about = f"structured_outputs: {kind}:"
    if returncode is None or returncode == -getattr(signal, "SIGPROF", 0):
        raise TooSlow(f"{about} takes more than {seconds:g} s")
    error = printed.decode() if returncode == 0 else f"overflows the parser's stack, or {MAX_MEMORY >> 20:,} MiB"
    if error:
        raise common.InputError(f"{about} {' '.join(error.split())[:300]}")


def _in_the_other_process() -> None:
    import json, sys, threading, llguidance  # noqa: E401

    seconds, memory, kind, spec = json.load(sys.stdin)
    try:
        import resource, signal  # noqa: E401

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor's time: then SIGPROF ends it
    except (ImportError, AttributeError, ValueError, OSError):
        pass  # a system without such limits: the other side looks at the clock

    def read(kind: str, spec: str) -> None:
        try:
            read_grammar(llguidance.LLTokenizer("byte"), kind, spec)
        except Exception as error:
            print(error or repr(error))

    threading.stack_size(1 << 20)  # an eighth of what an engine has: what fits here fits there
    threading.Thread(target=read, args=(kind, spec)).start()


class GuidanceGrammar:
    """One request in a JSON schema or grammar: an Earley parser over lexemes, in llguidance."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self.matcher, self.vocabulary, self.terminated = matcher, vocabulary, False

    def start(self) -> GuidanceGrammar:
        return GuidanceGrammar(self.matcher.deep_copy(), self.vocabulary)

    def accept_token(self, token_id: int) -> bool:
        if token_id in self.vocabulary.eos_token_ids:
            self.terminated = self.terminated or self.matcher.is_accepting()
            return self.terminated
        return not self.terminated and self.matcher.consume_token(token_id)

    def fill_bitmask(self, row: np.ndarray) -> None:
        """The library's mask, bit t of `row` [V / 32] int32 for token t; at the end, only EOS."""
        if not self.terminated:
            self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self.matcher.is_error():  # a limit of the library, in the middle of an answer: it ends here
                warnings.warn(f"llguidance gave up: {self.matcher.get_error():.200}", stacklevel=2)
                self.terminated = True
        if self.terminated:
            row[:] = self.vocabulary.only_eos


Guide = RegexGuide | GuidanceGrammar  # what is kept for the next request that asks for the same


# --- From what a request asks for to a guide, or to a refusal ---------------------------------------------------------


def normalize(structured_outputs: dict[str, Any]) -> tuple[str, Any]:
    """What is asked for, as (kind, spec) that can be a key; types and sizes are checked. Raises InputError."""
    given = [k for k, v in structured_outputs.items() if v is not None] if isinstance(structured_outputs, dict) else []
    if len(given) != 1 or given[0] not in KINDS:
        raise common.InputError(f"structured_outputs {structured_outputs!r:.80}: must be an object with exactly one of "
                                f"{', '.join(KINDS)}")  # fmt: skip
    kind, spec = given[0], structured_outputs[given[0]]
    wrong = lambda what: common.InputError(f"structured_outputs: {kind} {spec!r:.60}: {what}")  # noqa: E731
    if kind == "json_object":
        if spec is not True:
            raise wrong("must be true")
        return "json", '{"type": "object"}'
    try:
        spec = json.dumps(spec) if kind == "json" and isinstance(spec, dict) else spec
        texts = (spec,) if kind != "choice" else tuple(spec) if isinstance(spec, list | tuple) else ()
        blank = kind in ("regex", "choice")  # may match the empty text
        if not texts or not all(isinstance(text, str) and (blank or text.strip()) for text in texts):
            raise wrong("must be a list of strings" if kind == "choice" else "must be a string, not empty")
        if sum(map(len, texts)) > MAX_SPEC:
            raise wrong(f"at most {MAX_SPEC:,} characters are allowed")
        "".join(texts).encode()  # a lone surrogate has no UTF-8
        spec = json.dumps(schemas.guidance_schema(spec)) if kind == "json" else spec
    except (ValueError, TypeError, RecursionError) as error:
        raise error if isinstance(error, common.InputError) else wrong(str(error)) from None
    return kind, texts if kind == "choice" else spec


def compile_guide(structured_outputs: dict[str, Any], vocabulary: Vocabulary, checked: bool = False) -> Guide:
    """The guide for what a request asks for; `checked` if a front end has called `validate`. Raises InputError."""
    kind, spec = normalize(structured_outputs)
    if not checked and kind in ("json", "grammar"):
        read_apart(kind, spec)
    return vocabulary.guide(kind, spec)


def validate(structured_outputs: dict[str, Any] | None, tokenizer: llama.Tokenizer, vocab_size: int | None = None,
             eos_token_ids: Iterable[int] = ()) -> Guide | None:  # fmt: skip
    """Refuse on arrival what cannot be guided or would cost too much. For the front end, so that no engine waits.

    Returns the guide; in the same process, the engine finds it in the cache. `vocab_size` and `eos_token_ids` are the
    model's, where they differ from the tokenizer's. Raises InputError, within MAX_SECONDS and a second for our part.
    """
    if structured_outputs is not None:
        return compile_guide(structured_outputs, vocabulary_of(tokenizer, vocab_size, tuple(eos_token_ids)))


# Where only a byte may follow that no token has, llguidance allows the token behind it, and refuses it afterwards.
BROKEN = "the answer has left its grammar, which may ask for a byte that no token of this model has"


def ending(engine: Any, sequence: Any, finish_reason: str | None, stop_reason: Any) -> tuple[str | None, Any]:
    """Why an answer of lesson 04b's engine has ended, if it has; "error" if its grammar refuses one of its tokens."""
    wanted, config = sequence.request.sampling_params.structured_outputs, engine.model.config
    if finish_reason is not None and wanted is not None:
        vocabulary = vocabulary_of(engine.tokenizer, config.vocab_size, config.eos_token_ids)
        if not all(map(compile_guide(wanted, vocabulary, checked=True).start().accept_token, sequence.token_ids)):
            return "error", BROKEN
    return finish_reason, stop_reason


# --- In the engine ----------------------------------------------------------------------------------------------------


@common.kernel
def apply_token_bitmask_kernel(logits_ptr, bitmask_ptr, indices_ptr, V, logits_stride, bitmask_stride,
                               BLOCK: tl.constexpr):  # fmt: skip
    """Program (g, i): tokens [i·BLOCK, (i + 1)·BLOCK) of the g-th guided row. No logit is read."""
    g = tl.program_id(0)
    row = tl.load(indices_ptr + g)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask_ptr + g * bitmask_stride + token // 32, mask=token < V, other=-1)  # behind V: all allowed
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + token, float("-inf"), mask=forbidden)


@torch.inference_mode()
def apply_token_bitmask_inplace(logits: torch.Tensor, bitmask: torch.Tensor, indices: torch.Tensor) -> None:
    """Forbid, in some rows of a batch, the tokens whose bit is 0.

    Semantics: logits[indices[g], t] ← −∞ where bit t mod 32 of bitmask[g, t div 32] is 0. Other rows are not touched.
    Shapes: logits [R, V], any float dtype; bitmask int32 [G, ⌈V/32⌉]; indices int64 [G], all different.
    """
    V, G = logits.shape[1], len(indices)
    if bitmask.shape != (G, -(-V // 32)) or logits.stride(1) != 1 or bitmask.stride(1) != 1:
        raise ValueError(f"bitmask {list(bitmask.shape)} does not fit {G} rows of {V} logits, or is not contiguous")
    if G == 0:
        return
    if common.runs_kernel(logits):
        BLOCK = 4096
        apply_token_bitmask_kernel[(G, triton.cdiv(V, BLOCK))](
            logits, bitmask, indices, V, logits.stride(0), bitmask.stride(0), BLOCK=BLOCK, num_warps=4
        )
        return
    bias = bias_of_bytes()[bitmask.view(torch.uint8).long()].view(G, -1)[:, :V]  # 8 tokens at a time
    logits.index_add_(0, indices, bias.to(logits.dtype))


@functools.cache
def bias_of_bytes() -> torch.Tensor:
    """What eight bits of a mask add to eight logits, 0 or −∞. [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.where(torch.from_numpy(bits).bool(), 0.0, -math.inf)


def example_launches(dtype: torch.dtype) -> None:
    """The kernel at the vocabularies of SmolLM2 and Llama 3: a few guided rows of a batch, and all of them."""
    for V, G in itertools.product((49152, 128256), (3, 32)):
        logits = torch.empty(32, V, dtype=dtype, device="meta")
        bitmask = torch.empty(G, -(-V // 32), dtype=torch.int32, device="meta")
        apply_token_bitmask_inplace(logits, bitmask, torch.empty(G, dtype=torch.int64, device="meta"))


class StructuredOutputManager:
    """The grammars of the running requests (`vllm/v1/structured_output/__init__.py`)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.grammars: dict[str, list] = {}  # request id -> [its grammar, output tokens accepted]

    def finish(self, request_ids: Iterable[str]) -> None:
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
            guide = request.guide or compile_guide(wanted, self.vocabulary, checked=True)
            self.grammars[request.request_id] = [guide.start(), 0]
        entry = self.grammars[request.request_id]
        for token_id in request.output_token_ids[entry[1] :]:
            if not entry[0].accept_token(token_id):  # BROKEN, or sampled without our mask: end the answer
                warnings.warn(f"request {request.request_id}: token {token_id} breaks its grammar", stacklevel=2)
                entry[0].terminated = True
        entry[1] = request.num_output_tokens
        entry[0].fill_bitmask(row)


def guided_runner(base: type[SamplingModelRunner], tokenizer: llama.Tokenizer | None = None) -> type:
    """A subclass of `base` that masks the logits of requests with `sampling_params.structured_outputs`.

    It needs the tokenizer (here, or later as its attribute), and a front end that calls `validate`.
    """

    class GuidedModelRunner(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tokenizer = tokenizer

        @property
        def vocabulary(self) -> Vocabulary:
            assert self.tokenizer is not None, "guided_runner(base, tokenizer) needs the tokenizer"
            config = self.model.config
            return vocabulary_of(self.tokenizer, config.vocab_size, config.eos_token_ids)

        @functools.cached_property
        def structured_output_manager(self) -> StructuredOutputManager:
            return StructuredOutputManager(self.vocabulary)

        def grammar_init(self, request: Request) -> None:
            """Compile on any thread what a request asks for, so that no step has to. Raises InputError."""
            request.guide = compile_guide(request.sampling_params.structured_outputs, self.vocabulary, checked=True)

        def execute_model(self, output: Any) -> dict[str, list[int]]:
            if "structured_output_manager" in vars(self):
                self.structured_output_manager.finish(output.finished_req_ids)
            return super().execute_model(output)

        def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> dict[str, list[int]]:
            rows = [i for i, request in enumerate(requests) if request.sampling_params.structured_outputs is not None]
            if not rows:
                return super().sample(logits, requests)
            guided = [requests[i] for i in rows]
            bitmask = torch.from_numpy(self.structured_output_manager.grammar_bitmask(guided)).to(logits.device)
            apply_token_bitmask_inplace(logits, bitmask, torch.tensor(rows, device=logits.device))
            sampled = super().sample(logits, requests)
            for request_id in {request.request_id for request in guided} & self.logprobs.keys():
                found = self.logprobs[request_id]  # what is forbidden is no alternative
                self.logprobs[request_id] = {token: x for token, x in found.items() if x.logprob > -math.inf}
            return sampled

    return GuidedModelRunner


class GuidedLLMEngine(offline.LLMEngine):
    """Lesson 04b's engine, with masks. Lesson 06 puts the same two pieces, in the same places, into its server."""

    @property
    def runner_class(self) -> type:
        return guided_runner(SamplingModelRunner, self.tokenizer)

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams | None = None, **about: Any) -> None:
        if isinstance(params, SamplingParams):
            config = self.model.config
            validate(params.structured_outputs, self.tokenizer, config.vocab_size, config.eos_token_ids)
        super().add_request(request_id, prompt, params, **about)

    def _answer(self, sequence: Any, *why: Any) -> Any:
        return super()._answer(sequence, *ending(self, sequence, *why))


class GuidedLLM(offline.LLM):
    """Lesson 04b's LLM, which also takes `SamplingParams.structured_outputs`."""

    engine_class = GuidedLLMEngine


# --- The simulation behind the widget ---------------------------------------------------------------------------------

EOS = b""  # in the widget's vocabulary: no bytes, so never text
TOKENS = [b"0", b"1", b"2", b"5", b"12", b"25", b".", b"-", b"a", b"c", b"t", b"s", b"ca", b"cat", b"at",
          b"\xe2", b"\x82", b"\xac", b"\xe2\x82", b"\xc3", b"\xa9", "é".encode(), EOS]  # fmt: skip
PATTERNS = {
    "a price": r"\d{1,2}€", "a decimal": r"\d+\.\d\d", "cats": r"cats?|at|2 ?cats", "é or €": "(é|€){1,2}",
    "any two characters": ".{2}", "no end": r"\d+(-\d+)*-",
}  # fmt: skip
CHOICES = {
    "pattern": list(PATTERNS), "masks": ["bytes", "text"], "eos": ["accepting", "always", "never"],
    "model": [0, 1, 2, 3, 4, 5],
}  # fmt: skip
WIDGET_DEFAULT = {"pattern": "a price", "masks": "bytes", "eos": "accepting", "model": 0}
MAX_STEPS = 8


def token_name(token: bytes) -> str:
    """A token as the widget writes it: its text, its bytes where it is a part of a character, or EOS."""
    try:
        return token.decode() or "EOS"
    except UnicodeDecodeError:
        return f"<{token.hex(' ').upper()}>"


def toy_vocabulary(masks: str = "bytes") -> Vocabulary:
    """23 tokens. With "text", the bug: the trie holds what a decoder shows, U+FFFD for half a character."""
    vocabulary = Vocabulary(TOKENS, [TOKENS.index(EOS)])
    if masks == "text":
        vocabulary.trie = TokenTrie([token.decode("utf-8", "replace").encode() for token in TOKENS])
    return vocabulary


def allowed_tokens(guide: RegexGuide, state: int, eos: str) -> list[int]:
    """What the guide's mask allows; with `eos` "always" or "never", the other bug: an end that ignores the state."""
    found = guide.vocabulary.unpack(guide.mask(state))
    if eos != "accepting":
        found[guide.vocabulary.eos_token_ids] = eos == "always"
    return found.nonzero()[0].tolist()


def simulate(params: dict) -> dict:
    """A model writes the token it likes best of those allowed, until it is done, stuck or cut. Raises InputError."""
    params = common.checked(params, CHOICES)
    guide, n = RegexGuide(parse_regex(PATTERNS[params["pattern"]]), toy_vocabulary(params["masks"])), len(TOKENS)
    grammar, written, steps, outcome = guide.start(), b"", [], "cut"
    for step in range(MAX_STEPS):
        # The toy model's ranking: in every step another permutation of the 23 tokens, so there are no ties.
        logits = [(5 * token + 7 * step + 4 * params["model"]) % n for token in range(n)]
        allowed = allowed_tokens(guide, grammar.state, params["eos"])
        chosen = max(allowed, key=lambda token: logits[token], default=None)
        steps.append({"state": grammar.state, "logits": logits, "allowed": allowed, "chosen": chosen, "path": []})
        if chosen is None or TOKENS[chosen] == EOS:
            outcome = "stuck" if chosen is None else "ended"
            break
        token, start = TOKENS[chosen], grammar.state
        steps[-1]["path"] = [guide.dfa.step(start, token[: i + 1]) for i in range(len(token))]
        grammar.accept_token(chosen)
        written += token
    states = range(len(guide.dfa.accepting))
    table = guide.dfa.transitions[:, guide.dfa.byte_class]  # [states, 256]
    return {
        "pattern": PATTERNS[params["pattern"]], "tokens": list(map(token_name, TOKENS)),
        "moves": [[a, b, np.flatnonzero(table[a] == b).tolist()] for a in states for b in states if b in table[a]],
        "accepting": guide.dfa.accepting.nonzero()[0].tolist(),
        "allowed": [allowed_tokens(guide, state, params["eos"]) for state in states], "steps": steps,
        "written": written.decode("utf-8", "replace"), "num_bytes": len(written), "outcome": outcome,
        "matches": bool(guide.dfa.accepting[grammar.state]),
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    names, fates = trace["tokens"], {"ended": "EOS", "stuck": "stuck", "cut": "cut off"}
    lines = [f"pattern {trace['pattern']}: {len(trace['allowed'])} states, accepting: {trace['accepting']}"]
    for i, step in enumerate(trace["steps"]):
        wish = names[step["logits"].index(max(step["logits"]))]
        taken = "nothing" if step["chosen"] is None else names[step["chosen"]]
        listed = " ".join(names[token] for token in step["allowed"][:9]) + " …" * (len(step["allowed"]) > 9)
        lines.append(f"step {i}, state {step['state']}: allowed {listed or 'nothing'}; likes {wish}, takes {taken}")
    lines.append(f"written {trace['written']!r} ({trace['num_bytes']} bytes), then {fates[trace['outcome']]}: "
                 f"{'a match' if trace['matches'] else 'no match'}")  # fmt: skip
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

# What a model thinks the best fruit is: it wants to say apple, and must choose between two others.
FRUIT = [b"ap", b"ple", b"ricot", b"ch", b"erry", *(bytes([b]) for b in b"aceghiloprty"), EOS]
FRUIT_MODEL = {b"": {b"ap": 0.6, b"ch": 0.4}, b"ap": {b"ple": 0.99, b"ricot": 0.01}, b"ch": {b"erry": 0.9, b"ple": 0.1}}
FRUIT_CHOICE = ["apricot", "cherry"]


def distortion() -> dict[str, dict[str, float]]:
    """Every answer of the model, by enumeration: free, given that it is one of the two, and under masks."""
    guide = RegexGuide(alt(map(literal, FRUIT_CHOICE)), Vocabulary(FRUIT, [FRUIT.index(EOS)]))

    def draws(written: bytes, masked: bool) -> Iterable[tuple[bytes, float]]:
        allowed = allowed_tokens(guide, guide.dfa.step(0, written), "accepting") if masked else range(len(FRUIT))
        kept = {FRUIT[i]: FRUIT_MODEL[written][FRUIT[i]] for i in allowed if FRUIT[i] in FRUIT_MODEL[written]}
        return [(token, p / sum(kept.values())) for token, p in kept.items()]

    free, masked = (
        {(a + b).decode(): p * q for a, p in draws(b"", how) for b, q in draws(a, how)} for how in (False, True)
    )
    total = sum(free[text] for text in FRUIT_CHOICE)
    return {"free": free, "given": {text: free[text] / total for text in FRUIT_CHOICE}, "masked": masked}


SHOWN = {  # patterns whose automata the text talks about
    "date": r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "ip": r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)",
    "phone": r"\+\d{1,3} \(\d{3}\) \d{3}-\d{4}", "character": ".", "kanji": "[一-鿿]{1,20}", "text": ".{1,200}",
}  # fmt: skip


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    automata = {name: determinize(parse_regex(pattern)) for name, pattern in SHOWN.items()}
    every = [dict(zip(CHOICES, values)) for values in itertools.product(*CHOICES.values())]
    runs = [(params, simulate(params)) for params in every]

    def fates(masks: str, eos: str) -> dict[str, int]:
        some = [run for params, run in runs if (params["masks"], params["eos"]) == (masks, eos)]
        wrong = sum(run["outcome"] == "ended" and not run["matches"] for run in some)
        return {"wrong": wrong, **{f: sum(run["outcome"] == f for run in some) for f in ("ended", "cut", "stuck")}}

    return {
        "states": {name: len(dfa.accepting) for name, dfa in automata.items()},
        "doubling": [len(determinize(parse_regex(f"(a|b)*a(a|b){{{n}}}")).accepting) for n in range(9)],
        "mask_bytes": 49152 // 8, "distortion": distortion(),
        "limits": {"dfa": MAX_DFA_STATES, "work": MAX_WORK, "spec": MAX_SPEC, "nesting": schemas.MAX_NESTING},
        "widget": {"tokens": len(TOKENS), "runs": len(runs), "accepting": fates("bytes", "accepting"),
                   "always": fates("bytes", "always"), "text": fates("text", "accepting")},
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------


def bytes_label(members: Sequence[int]) -> str:
    """Bytes as a reader would list them: "0–2, 5", "E2", "80–BF"."""
    runs: list[list[int]] = []
    for b in members:
        runs[-1:] = [[*runs[-1], b]] if runs and runs[-1][-1] == b - 1 else [*runs[-1:], [b]]
    name = lambda b: chr(b) if 32 < b < 127 else f"{b:02X}"  # noqa: E731
    return ", ".join(name(r[0]) if len(r) == 1 else f"{name(r[0])}–{name(r[-1])}" for r in runs)


def draw(folder: str | Path) -> list[Path]:
    """The automaton of the widget's default, and the mask of each of its states."""
    trace = simulate(WIDGET_DEFAULT)
    blue, ink, orange = (common.COLORS[name] for name in ("blue", "ink", "orange"))
    depth = {0: 0}
    for state, target, _ in sorted(trace["moves"]):
        depth.setdefault(target, depth[state] + 1)
    rows = {s: sum(depth[t] == d for t in range(s)) for s, d in depth.items()}
    where = {s: (2.0 * d + 0.8 * rows[s], 0.5 - rows[s]) for s, d in depth.items()}
    figure, axes = common.new_figure(8.0, 4.4, nrows=2, height_ratios=[1.1, 1.5])
    ax = axes[0]
    for state, target, members in trace["moves"]:
        (x0, y0), (x1, y1) = where[state], where[target]
        color = orange if min(members) > 127 else ink
        ax.annotate("", (x1, y1), (x0, y0), arrowprops=dict(arrowstyle="-|>", color=color, shrinkA=14, shrinkB=14))
        ax.text((x0 + x1) / 2, (y0 + y1) / 2 + 0.08, bytes_label(members), ha="center", va="bottom", color=color)
    for state, (x, y) in where.items():
        for size in (24, 18) if state in trace["accepting"] else (24,):
            ax.plot(x, y, "o", markersize=size, markerfacecolor="white", markeredgecolor=blue, markeredgewidth=1.4)
        ax.text(x, y, str(state), ha="center", va="center_baseline", color=blue, weight="bold")
    ax.set(xlim=(-0.6, max(x for x, _ in where.values()) + 0.6), ylim=(-1.0, 1.0))
    ax.set_axis_off()
    ax.set_title(f"{trace['pattern']} over bytes: € is E2 82 AC (orange), and a token may stop in its middle")
    ax, names = axes[1], trace["tokens"]
    for state, token in itertools.product(range(len(trace["allowed"])), range(len(names))):
        ax.plot(token, state, "s", markersize=9,
                color=blue if token in trace["allowed"][state] else common.COLORS["light"])  # fmt: skip
    ax.set(yticks=range(len(trace["allowed"])), xticks=range(len(names)), ylim=(len(trace["allowed"]) - 0.5, -0.5),
           xlim=(-0.6, len(names) - 0.4), ylabel="state", title="their masks: which tokens may come next")  # fmt: skip
    ax.set_xticklabels(names, rotation=60, ha="right", rotation_mode="anchor", fontsize=9)
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    return [common.save_figure(figure, folder, "06b_automaton")]


# --- The story --------------------------------------------------------------------------------------------------------

SUM = 'start: sum " = " N\nsum: term (" + " term)? (" + " term)?\nterm: N | "(" sum ")"\nN: /[1-9][0-9]{0,3}/\n'

TASKS = {  # what the answer must be, how to ask for it, and examples
    "date": ({"regex": SHOWN["date"]}, "When {}? Answer with a date like 2024-12-31 and nothing else.",
             ["did people first walk on the Moon", "did the Berlin Wall fall", "was the iPhone introduced"]),
    "ip": ({"regex": SHOWN["ip"]}, "Give me {}. Answer with one IP address and nothing else.",
           ["the address of this computer itself", "an address in a private network", "the address of a DNS server"]),
    "phone": ({"regex": SHOWN["phone"]}, "Invent a phone number in {}, written like +1 (555) 555-5555, nothing else.",
              ["New York", "London", "Tokyo"]),
    "choice": ({"choice": ["positive", "negative", "neutral"]}, "Is it positive, negative or neutral? '{}' One word.",
               ["What a waste of money!", "I loved every minute of it.", "It arrived on Tuesday."]),
    "person": ({"json": PERSON}, "Write JSON with name, age, city and hobbies: {}.",
               ["Anna, 31, lives in Rome, likes chess", "Bob from Paris is 45 and cooks", "Chloë, 28, London, paints"]),
    "tool call": ({"json": CALL}, "Call get_weather with a city and a unit, as JSON with name and arguments: {}?",
                  ["how warm is it in Oslo, in celsius", "is it hot in Dallas, in fahrenheit", "how cold is 札幌"]),
    "sum": ({"grammar": SUM}, "Write {} and its result, like (1 + 2) + 3 = 6, and nothing else.",
            ["a sum of two numbers", "a sum of three numbers", "a sum with parentheses"]),
}  # fmt: skip

EXPLOSIVE = {  # what anybody may send; the tests have more of it
    "2^21 states": {"regex": "(a|b)*a(a|b){20}"}, "many repeats": {"regex": "((a{1,99}){1,99}){1,99}"},
    "ambiguous": {"regex": "(a?){9999}"}, "only itself": {"json": {"$ref": "#"}},
    "product": {"json": {"allOf": [{"anyOf": [closed(**{f"{i}{j}": TEXT}) for j in range(6)]} for i in range(9)]}},
    "long chain": {"grammar": "start: r0\n" + "".join(f'r{i}: "x" r{i + 1}\n' for i in range(3000)) + 'r3000: "x"'},
}  # fmt: skip


def parses(text: str, wanted: dict[str, Any]) -> bool:
    """Is it what was asked for, in Python's opinion? (Of JSON, only whether it has the right keys.)"""
    ((kind, spec),) = wanted.items()
    try:
        if kind == "json":
            value = json.loads(text)
            return isinstance(value, dict) and sorted(value) == sorted(spec["required"])
        if kind == "grammar":
            return bool(ast.parse(text.replace(" = ", " == "), mode="eval")) and text.count(" = ") == 1
        return text in spec if kind == "choice" else re.fullmatch(spec, text, re.ASCII) is not None
    except (ValueError, SyntaxError):
        return False


def check_masks(vocabulary: Vocabulary, eos: str) -> int:
    """Each state of each preset against derivatives, its end against `re`. The number of masks. Raises CheckFailed."""
    checked, (end,) = 0, vocabulary.eos_token_ids
    for pattern in PATTERNS.values():
        guide = RegexGuide(parse_regex(pattern), vocabulary)
        for state, text in enumerate(guide.dfa.examples):
            expected = tokens_by_trying(parse_regex(pattern), text, vocabulary.tokens)
            with contextlib.suppress(UnicodeDecodeError):  # half a character matches nothing
                expected |= {end} if re.fullmatch(pattern, text.decode(), re.ASCII) else set()
            if wrong := expected ^ {*allowed_tokens(guide, state, eos)}:
                names = ", ".join(token_name(TOKENS[token]) for token in sorted(wrong))
                raise common.CheckFailed(f"{pattern} after {text.decode('utf-8', 'replace')!r}: wrong about {names}")
            checked += 1
    return checked


def check_real_masks(vocabulary: Vocabulary) -> None:
    """One mask against trying all tokens, then the kernel that applies it (or, without Triton, the torch path)."""
    start, written = time.perf_counter(), b"1969-0"
    expected = tokens_by_trying(parse_regex(SHOWN["date"]), written, vocabulary.tokens)
    seconds = time.perf_counter() - start
    guide = RegexGuide(parse_regex(SHOWN["date"]), vocabulary)
    mask = guide.mask(guide.dfa.step(0, written))
    allowed = vocabulary.unpack(mask)
    what = f"after {written.decode()} a date may go on with {len(expected)} tokens; trying all took {seconds:.1f} s"
    common.check_equal(what, {*allowed.nonzero()[0].tolist()}, expected)
    device = common.device()
    logits = torch.randn(3, len(allowed), device=device)
    want = logits.clone()
    want[2, torch.from_numpy(~allowed).to(device)] = -math.inf
    with common.use_kernels() if common.HAS_TRITON else contextlib.nullcontext():
        apply_token_bitmask_inplace(logits, torch.from_numpy(mask[None]).to(device), torch.tensor([2], device=device))
    common.check("the last of three rows, masked in place", logits, want)
    if not common.HAS_TRITON:
        common.skipped("the kernel", f"{common.kernel_mode()}; the torch path was checked")


def time_guides(vocabulary: Vocabulary) -> dict[str, dict[str, float]]:
    """What compiling, a first mask and a kept mask cost, for patterns and for a schema (which keeps none)."""
    costs, row = {}, np.empty(vocabulary.num_words, np.int32)
    read_apart("json", json.dumps(PERSON))
    for name, pattern in (SHOWN | {"schema": ""}).items():
        key = ("regex", pattern) if pattern else ("json", json.dumps(PERSON))
        compiles = functools.partial(vocabulary.compile, *key)
        guide = compiles()
        again = functools.partial(guide.start().fill_bitmask, row)
        first = functools.partial(lambda g: vocabulary.pack(g.allowed(0)), guide) if pattern else again
        found = [common.measure(part, 0.02).median * 1e3 for part in (compiles, first, again)]
        costs[name] = dict(zip(("compile_ms", "mask_ms", "again_ms"), found))
    return costs


def ask_everything(llm: offline.LLM, count: int, regex: str | None) -> dict[str, dict[str, float]]:
    """`count` questions of each task, free and guided, in one batch. The shares that parse. Raises CheckFailed."""
    tasks = ({} if regex is None else {"yours": ({"regex": regex}, "Say {}.", ["something"])}) | TASKS
    asked = [(name, template.format(x)) for name, (_, template, examples) in tasks.items() for x in examples[:count]]
    prompts = [{"prompt_token_ids": llm.llm_engine.tokenizer.ask(text)} for _, text in asked]
    wanted = [*[None] * len(asked), *(tasks[name][0] for name, _ in asked)]
    params = [SamplingParams(temperature=0, max_tokens=120 if x else 64, structured_outputs=x) for x in wanted]
    answers = [output.outputs[0] for output in llm.generate(prompts * 2, params)]
    rows: dict[str, list[str]] = {}
    parsed: dict[str, dict[str, list[bool]]] = {name: {"free": [], "guided": []} for name in ("all", *tasks)}
    for i, (name, _) in enumerate(asked):
        for kind, answer in (("free", answers[i]), ("guided", answers[i + len(asked)])):
            good, brief = parses(answer.text, tasks[name][0]), " ".join(answer.text.split())
            for group in (name, "all"):
                parsed[group][kind].append(good)
            if kind == "guided" and not good and answer.finish_reason == "stop":  # not cut by max_tokens
                raise common.CheckFailed(f"{name}: {answer.text!r} is not what was asked for")
            if len(parsed[name][kind]) == 1:
                rows.setdefault(name, [name]).append(f"{brief[:43]}{'…' * (len(brief) > 43)} {'✓' if good else '✗'}")
    common.table(["task", "free", "guided"], list(rows.values()))
    rates = {name: {kind: sum(found) / len(found) for kind, found in both.items()} for name, both in parsed.items()}
    common.say("of {} answers parse: {free:.0%} free, {guided:.0%} guided".format(len(asked), **rates["all"]))
    return rates


def refuse(vocabulary: Vocabulary) -> dict[str, float]:
    """Every one of EXPLOSIVE must be refused. Milliseconds until it is. Raises CheckFailed."""
    found = {}
    for name, wanted in EXPLOSIVE.items():
        start = time.perf_counter()
        with contextlib.suppress(common.InputError):
            compile_guide(wanted, vocabulary)
            raise common.CheckFailed(f"{name}: was not refused")
        found[name] = (time.perf_counter() - start) * 1e3
    return found


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    p.add_argument("--regex", metavar="PATTERN", help="one more answer of the real model, which must match this")
    p.add_argument("--text-masks", action="store_true", help="the bug: ask what tokens look like as text")
    p.add_argument("--eos", choices=CHOICES["eos"], default="accepting", help="where it may end (default %(default)s)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine, numbers, bench = common.start(args), facts(), {}
    llama.check_context(args.model, 256)
    model, tokenizer = llama.load(args.model)
    vocabulary = vocabulary_of(tokenizer, model.config.vocab_size, model.config.eos_token_ids)
    if args.regex is not None:
        compile_guide({"regex": args.regex}, vocabulary)

    common.heading("1. Masks from an automaton and a trie, against trying every token")
    checked = check_masks(toy_vocabulary("text" if args.text_masks else "bytes"), args.eos)
    common.say(f"✓ {checked} masks over {len(TOKENS)} tokens: every state of {len(PATTERNS)} patterns, ends included")

    common.heading(f"2. A real vocabulary: {len(vocabulary.tokens):,} tokens, {len(vocabulary.trie.byte):,} trie nodes")
    check_real_masks(vocabulary)
    bench["guides"] = time_guides(vocabulary)
    common.table(["what", "states", "compile ms", "mask ms", "again ms"], [
        [name, numbers["states"].get(name, "–"), *(f"{ms:.3f}" for ms in cost.values())]
        for name, cost in bench["guides"].items()])  # fmt: skip
    logits, rows = torch.randn(32, len(vocabulary.tokens)).to(model.device), torch.arange(32).to(model.device)
    masks = torch.from_numpy(np.tile(vocabulary.only_eos, (32, 1))).to(model.device)
    bench["apply_ms"] = common.measure(lambda: apply_token_bitmask_inplace(logits, masks, rows), 0.2).median * 1e3
    common.say(f"applying masks to 32 rows: {bench['apply_ms']:.1f} ms")

    common.heading("3. One batch: every question twice, free and guided")
    llm = GuidedLLM(model, tokenizer=tokenizer, max_model_len=256, max_num_seqs=64)
    bench["parse_rate"] = ask_everything(llm, 3 if args.bench else 1, args.regex)

    common.heading("4. One answer, mask by mask: simulate()")
    common.say(describe(simulate(WIDGET_DEFAULT)))

    common.heading("5. What strangers send, and must be refused")
    bench["refusal_ms"] = refuse(vocabulary)
    common.say("\n".join(f"{name}: refused in {ms:.0f} ms" for name, ms in bench["refusal_ms"].items()))

    common.heading("6. Masks change the distribution: a model that wants to say apple")
    kinds = {"free": "free", "given": "given that it matches", "masked": "under masks"}
    common.table(["answer", *kinds.values()], [
        [text, *(f"{100 * numbers['distortion'][kind].get(text, 0):.1f} %" for kind in kinds)]
        for text in ("apple", *FRUIT_CHOICE)])  # fmt: skip
    draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": numbers, "bench": bench})


if __name__ == "__main__":
    common.run(main)

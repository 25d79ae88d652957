"""A grammar holds behind what was thought, however the closing tag comes; before, everything is allowed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from engine.request import Request, SamplingParams
from engine.sampling.guided.after_reasoning import AfterReasoning
from engine.sampling.guided.manager import StructuredOutputManager
from engine.sampling.guided.structured_outputs import compile_guide, normalize
from engine.sampling.guided.vocabulary import Vocabulary

TOKENS = [b"", b"a", b"b", b"</think>", b"</th", b"ink>", b"x</think>y", b"<"]
EOS = 0


def vocabulary(special=None):
    """Of these tokens; `special` is one whose text says nothing."""
    tokens = [b"" if i == special else token for i, token in enumerate(TOKENS)]
    ids = {"</think>": special} if special else {}
    return Vocabulary(tokens, [EOS], SimpleNamespace(backend=SimpleNamespace(token_to_id=ids.get)))


def allowed(grammar, words):
    row = np.empty(words.num_words, np.int32)
    grammar.fill_bitmask(row)
    return [i for i, fine in enumerate(words.unpack(row)) if fine]


@pytest.mark.parametrize(
    ("closing", "special"), [([3], None), ([4, 5], None), ([2, 6], None), ([7, 4, 5], None), ([3], 3)]
)
def test_a_grammar_begins_behind_the_closing_tag(closing, special):
    words = vocabulary(special)
    grammar = AfterReasoning(compile_guide({"regex": "ab"}, words).start(), "</think>", words)
    for token in (2, 2, *closing):
        assert allowed(grammar, words) == [*range(len(TOKENS))] and grammar.accept_token(token)
    assert allowed(grammar, words) == [1] and grammar.accept_token(1)
    assert allowed(grammar, words) == [2] and not grammar.terminated
    assert grammar.accept_token(2) and allowed(grammar, words) == [EOS] and grammar.accept_token(EOS)
    assert grammar.terminated and not grammar.accept_token(1)


def test_what_is_ended_allows_nothing_more():
    words = vocabulary()
    grammar = AfterReasoning(compile_guide({"regex": "ab"}, words).start(), "</think>", words)
    grammar.terminated = True
    assert grammar.terminated and allowed(grammar, words) == [EOS]


def test_the_manager_waits_for_it_where_a_request_says_so():
    words = vocabulary()
    manager, masks = StructuredOutputManager(words), []
    for wanted in ({"regex": "ab"}, {"regex": "ab", "reasoning_end": "</think>"}):
        request = Request(str(len(masks)), [1], SamplingParams(structured_outputs=wanted))
        (mask,) = manager.grammar_bitmask([request])
        masks.append(words.unpack(mask).sum())
    assert masks == [1, len(TOKENS)]
    assert normalize({"regex": "ab", "reasoning_end": "</think>"}) == ("regex", "ab"), "the same guide"

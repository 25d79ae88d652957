"""Companion 06b: automata against Python's `re`, masks against derivatives, answers that always parse."""

from __future__ import annotations

import common

import contextlib
import json
import math
import random
import re
import time

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine import registry
from engine.core.scheduler import Scheduler
from engine.llm import LLM
from engine.model import llama
from engine.model.tokenizer import Tokenizer
from engine.request import Request, SamplingParams
from engine.sampling.detokenizer import TokenBytes
from engine.sampling.guided import bitmask, limits, reader_process, structured_outputs
from engine.sampling.guided.automaton import DFA, NFA
from engine.sampling.guided.characters import LAST, characters, complement
from engine.sampling.guided.expressions import ALL_BYTES, restrict
from engine.sampling.guided.guidance import GuidanceGrammar
from engine.sampling.guided.json_schemas import read_schema
from engine.sampling.guided.manager import StructuredOutputManager
from engine.sampling.guided.regex_guide import RegexGuide
from engine.sampling.guided.token_trie import TokenTrie
from lab import cli
from support.cases import named

lesson, page = registry.lesson("06b_guided_decoding"), cli.numbers("06b_guided_decoding")
REGEX = {"regex": r"[a-z]{2,5}-\d{1,3}"}


# --- Patterns, against Python's own engine ----------------------------------------------------------------------------

LETTERS = ["a", "b", "é", "€", "1", "-", "\n", "😀"]
ATOMS = ["a", "b", "é", "€", "1", ".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "[ab]", "[^a]", "[^aé]", "[a-é]",
         r"[\d-]",
         r"[^\W1]", "[é-€]", r"\n", r"\x61", r"\u20ac", "-", "😀", "[^😀]"]  # fmt: skip
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "*?", "{0}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)
TEXTS = st.lists(st.sampled_from(LETTERS), max_size=5).map("".join)


def compiled(pattern):
    return lesson.determinize(lesson.parse_regex(pattern))


def accepts(dfa, data):
    state = dfa.step(0, data)
    return state >= 0 and bool(dfa.accepting[state])


def random_match(dfa, rng):
    """A text that the automaton accepts, or None if the walk got lost: random steps, and an end where one is."""
    state, text = 0, b""
    for _ in range(12):
        if dfa.accepting[state] and rng.random() < 0.3:
            return text
        moves = [b for b in range(256) if dfa.transitions[state, dfa.byte_class[b]] >= 0]
        if not moves:
            break
        byte = rng.choice(moves)
        state, text = dfa.step(state, bytes([byte])), text + bytes([byte])
    return text if dfa.accepting[state] else None


@settings(max_examples=150)
@given(PATTERNS, TEXTS, st.integers(0, 99))
@example("^(?P<x>a|bc)$", "bc", 0)
@example("a{", "a{", 0)
@example(r"[]a]+|[^]]", "]a", 0)
@example("(a*)*b|()", "aab", 0)
@example("", "", 0)
def test_automata_match_what_re_matches(pattern, text, seed):
    try:
        dfa, node = compiled(pattern), lesson.parse_regex(pattern)
    except common.InputError:  # an empty class: nothing matches
        assert re.fullmatch(pattern, text, re.ASCII) is None
        return
    expected = re.fullmatch(pattern, text, re.ASCII) is not None
    assert accepts(dfa, text.encode()) == expected
    rest = node
    for byte in text.encode():
        rest = lesson.derivative(rest, byte)
    assert lesson.nullable(rest) == expected, "the reference has its own opinion"
    if (found := random_match(dfa, random.Random(seed))) is not None:
        assert re.fullmatch(pattern, found.decode(), re.ASCII), f"{found!r} is accepted"


@settings(max_examples=60)
@given(PATTERNS, st.binary(max_size=5))
@example(".", b"\xc0\x80")  # overlong
@example(".", b"\xed\xa0\x80")  # a surrogate
@example(".", b"\xf4\x90\x80\x80")  # beyond the last code point
@example("[^a]", b"\xe2\x82")  # half a character
def test_no_automaton_accepts_what_is_not_utf8(pattern, data):
    try:
        dfa = compiled(pattern)
    except common.InputError:
        return
    try:
        expected = re.fullmatch(pattern, data.decode(), re.ASCII) is not None
    except UnicodeDecodeError:
        expected = False
    assert accepts(dfa, data) == expected


EDGES = [0, 0x41, 0x7E, 0x7F, 0x80, 0xBF, 0xC0, 0x7FF, 0x800, 0xFFF, 0x1000, 0xCFFF, 0xD7FF, 0xE000, 0xFFFF, 0x10000,
         0x3FFFF,
         0x40000, 0xFFFFF, 0x100000, 0x10FFFF]  # fmt: skip


@settings(max_examples=60)
@given(st.sampled_from(EDGES), st.sampled_from(EDGES))
def test_ranges_of_code_points_as_bytes(one, other):
    low, high = sorted((one, other))
    dfa = lesson.determinize(characters([(low, high)]))
    for code in {c + d for c in (*EDGES, low, high) for d in (-1, 0, 1)}:
        if 0 <= code <= LAST and not 0xD800 <= code <= 0xDFFF:
            assert accepts(dfa, chr(code).encode()) == (low <= code <= high), hex(code)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: (min(p), max(p))), max_size=4))
def test_complement(ranges):
    inside = {c for low, high in ranges for c in range(low, high + 1)}
    outside = {c for low, high in complement(ranges) for c in range(low, min(high, 30) + 1)}
    assert inside | outside == set(range(31)) and not inside & outside


def test_every_state_can_still_reach_a_match():
    """And its example leads there: no dead ends, no unreachable states."""
    for pattern in (*lesson.SHOWN.values(), *lesson.PATTERNS.values(), r"(a[^\s\S]|b)*c", "(a|b)*a(a|b){4}"):
        dfa = lesson.determinize(restrict(lesson.parse_regex(pattern), ALL_BYTES & ~(1 << ord("5"))))
        live, before = np.append(dfa.accepting, False), -1  # at the end, where −1 leads: nowhere
        while live.sum() > before:
            before = live.sum()
            live[:-1] |= live[dfa.transitions].any(1)
        assert live[:-1].all()
        assert [dfa.step(0, text) for text in dfa.examples] == list(range(len(dfa.accepting)))


def test_automata_are_small():
    """Equal tails are shared: a dot is nine states, not one for each way to write a character."""
    assert page.facts()["states"] == {"date": 15, "ip": 24, "phone": 20, "character": 9, "kanji": 81, "text": 1601}
    assert page.facts()["doubling"] == [2 ** (n + 1) for n in range(9)]


# --- Masks, against trying every token --------------------------------------------------------------------------------


def vocabulary_with(words, eos=1):
    """All single bytes, these words, and `eos` tokens that end an answer."""
    tokens = [*(bytes([b]) for b in range(256)), *words, *[b""] * (1 + eos)]
    return lesson.Vocabulary(tokens, range(len(tokens) - eos, len(tokens)))


BYTES = vocabulary_with([])
WORDS = st.lists(
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=4).map(lambda w: "".join(w).encode()), max_size=8
)


@settings(max_examples=60)
@given(PATTERNS, WORDS, WORDS)
def test_masks_are_those_of_the_reference(pattern, words, cut):
    """Every state, every token; whole words and words that begin or end inside a character."""
    vocabulary = vocabulary_with(
        [*words, *(w[1:] for w in cut if len(w) > 1), *(w[:-1] for w in cut if len(w) > 1)], eos=2
    )
    node = lesson.parse_regex(pattern)
    assume(node != lesson.NOTHING)
    guide = lesson.RegexGuide(node, vocabulary)
    for state, text in list(enumerate(guide.dfa.examples))[:12]:
        found = vocabulary.unpack(guide.mask(state))
        expected = lesson.tokens_by_trying(node, text, vocabulary.tokens)
        ends = found[vocabulary.eos_token_ids]
        assert set(np.flatnonzero(found).tolist()) - {*vocabulary.eos_token_ids} == expected
        try:
            matches = re.fullmatch(pattern, text.decode(), re.ASCII) is not None
        except UnicodeDecodeError:
            matches = False
        assert ends.all() == ends.any() == matches
        assert found.any(), "no mask is empty"


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 100])
def test_packing(size):
    tokens = [bytes([i]) for i in range(size)] + [b""]
    vocabulary = lesson.Vocabulary(tokens, [size])
    allowed = np.random.default_rng(size).random(size + 1) < 0.5
    packed = vocabulary.pack(allowed)
    assert packed.dtype == np.int32 and len(packed) == -(-(size + 1) // 32)
    assert [bool(packed[t // 32] >> (t % 32) & 1) for t in range(size + 1)] == allowed.tolist()
    assert (vocabulary.unpack(packed) == allowed).all()


def test_bytes_that_no_token_brings_alone_are_struck():
    """é cannot be finished if its second byte is only part of other tokens: so it is not begun."""
    tokens = [b"a", b"b", b"\xc3", b"\xa9x", b"\xc3\xa9", b""]
    guide = lesson.RegexGuide(lesson.parse_regex("a|é|b"), lesson.Vocabulary(tokens, [5]))
    assert guide.vocabulary.unpack(guide.mask(0)).nonzero()[0].tolist() == [0, 1]
    with pytest.raises(common.InputError, match="no answer"):
        lesson.RegexGuide(lesson.parse_regex("é"), lesson.Vocabulary(tokens, [5]))


def test_a_mask_is_computed_once(monkeypatch):
    calls = []
    allowed = lesson.TokenTrie.allowed
    monkeypatch.setattr(lesson.TokenTrie, "allowed", lambda *a: calls.append(a[2]) or allowed(*a))
    guide = lesson.RegexGuide(lesson.parse_regex("[a-z]+"), lesson.toy_vocabulary())
    row = np.empty(guide.vocabulary.num_words, np.int32)
    for _ in range(5):
        guide.start().fill_bitmask(row)
    assert calls == [0]


@pytest.fixture(scope="module")
def vocabulary(real_model):
    model, tokenizer = real_model
    return lesson.vocabulary_of(tokenizer, model.config.vocab_size, model.config.eos_token_ids)


def test_the_real_vocabulary(vocabulary, real_model):
    token_bytes = TokenBytes(real_model[1])
    special = token_bytes.special
    assert len(vocabulary.tokens) == 49152 and vocabulary.eos_token_ids == [2]
    assert all((vocabulary.tokens[t] == b"") == (t in special) for t in range(1000))
    everything = lesson.RegexGuide(lesson.parse_regex(r"(.|\n)*"), vocabulary)
    allowed = vocabulary.unpack(everything.mask(0))
    assert not allowed[sorted(special - {2})].any(), "special tokens are never text"
    assert allowed[2] and allowed.sum() > 48_000
    grammar, tokens = everything.start(), real_model[1].encode("寿司 😀 naïve")
    assert all(grammar.accept_token(token) for token in tokens) and grammar.accept_token(2)


@pytest.mark.parametrize(("pattern", "written"), [("[一-鿿]{1,20}", b"\xe5"), (r"\+\d{1,3}( \d{3})+", b"+1 555")])
def test_real_masks_are_those_of_the_reference(vocabulary, pattern, written):
    node = restrict(lesson.parse_regex(pattern), vocabulary.alphabet)
    guide = lesson.RegexGuide(node, vocabulary)
    found = set(guide.allowed(guide.dfa.step(0, written)).nonzero()[0].tolist())
    some = random.Random(0).sample(range(49152), 4000) + sorted(found - {2})
    expected = lesson.tokens_by_trying(node, written, [vocabulary.tokens[t] for t in some])
    assert {some[i] for i in expected} == (found & set(some)) - {2} and found - {2}


@pytest.mark.long
def test_real_masks_are_those_of_the_reference_for_every_token(vocabulary):
    for pattern in (lesson.SHOWN["ip"], "[一-鿿]{1,3}"):
        node = restrict(lesson.parse_regex(pattern), vocabulary.alphabet)
        guide = lesson.RegexGuide(node, vocabulary)
        for state, written in list(enumerate(guide.dfa.examples))[:5]:
            found = set(guide.allowed(state).nonzero()[0].tolist()) - {2}
            assert found == lesson.tokens_by_trying(node, written, vocabulary.tokens)


def test_a_tokenizer_with_byte_fallback():
    import tokenizers
    from tokenizers import decoders, models

    vocab = {
        "<unk>": 0,
        "</s>": 1,
        "▁the": 2,
        "<0xE2>": 3,
        "<0x82>": 4,
        "<0xAC>": 5,
        "▁": 6,
        "t": 7,
        "h": 8,
        "e": 9,
        "5": 10,
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = type("Tokenizer", (), {"backend": backend, "special_tokens": {"eos_token": "</s>"}})()
    found = lesson.vocabulary_of(tokenizer)
    guide = lesson.compile_guide({"regex": "( the)? ?5€"}, found)
    allowed = lambda text: guide.allowed(guide.dfa.step(0, text)).nonzero()[0].tolist()  # noqa: E731
    assert allowed(b"") == [2, 6, 10] and allowed(b" the 5\xe2") == [4] and allowed("5€".encode()) == [1]
    assert allowed(b" t") == [8], "byte by byte, too"


def test_no_space_goes_in_front_of_what_a_grammar_forces(tmp_path):
    """A tokenizer may put one in front of every text. What a grammar forces stands in the middle of one."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["</s>", *characters, "Ġt", "th", "the"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("t", "h"), ("th", "e")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    vocabulary = lesson.vocabulary_of(Tokenizer(tmp_path), None, (0,))
    for wanted, text in (({"grammar": 'start: "the cache"'}, "the cache"), ({"json": {"const": "the"}}, '"the"')):
        grammar, written = lesson.compile_guide(wanted, vocabulary).start(), b""
        row = np.empty(vocabulary.num_words, np.int32)
        while not grammar.terminated:
            grammar.fill_bitmask(row)
            token = int(vocabulary.unpack(row).nonzero()[0][-1])  # the longest
            assert grammar.accept_token(token), (written, token)
            written += vocabulary.tokens[token]
        assert written.decode() == text


# --- What strangers send ----------------------------------------------------------------------------------------------

LIMIT = 3.0  # seconds for our own part, on a busy machine


REFUSED_PATTERNS = [
    ("(a|b)*a(a|b){20}", "states"), ("(.|..)*a(.|..){60}", "states|large"), ("a{1,100000}", "large|states"),
    ("(((a{1,100}){1,100}){1,100}){1,100}", "large"), ("(a?){9999}", "large"),
    (".{0,4000}x.{0,4000}", "large|states"),
    ("((((a*)*)*)*)*b{6000}", "states"), ("(" * 2000 + ")" * 2000, "deep"), ("(" * 150 + "a" + ")" * 150, "deep"),
    ("a" * 5000, "4,096"), ("a" * 100_000, "65,536"), ("a{99999999999999999999}", "large"),
    ("([ab]*[bc]*){50}c{30}d" * 20, "large|states"),
    (r"[^\s\S]", "no answer"), (r"a[^\s\S]", "no answer"), ("\ud800", "surrogate|no answer"),
    (r"\ud800", "no answer"),
    ("(?=a)a", "lookaround"), ("(?<!a)b", "lookaround"), (r"(a)\1", "backreference"), (r"a\bb", "boundary"),
    ("a^b", "anchor"), ("a$b", "anchor"), ("^a|b$", "anchor"), ("(?i)a", "flag"), ("(?i:a)", "flag"),
    ("a*+", "possessive"), (r"\bfoo", "^(?!.*middle).*boundary"), (r"\Afoo\Z", "^(?!.*middle).*anchor"),
    ("(?>a)", "atomic"), ("(a)(?(1)b|c)", "conditional"),
    ("(a", "unterminated"), ("a)", "unbalanced"), ("*a", "nothing to repeat"), ("a**", "multiple repeat"),
    ("[b-a]", "range"),
    ("a{2,1}", "min repeat"), ("\\", "escape"), (r"\q", "escape"), ("[a", "unterminated"),
]  # fmt: skip


def test_patterns_that_are_refused():
    for pattern, why in REFUSED_PATTERNS:
        with named(pattern, why):
            start = time.process_time()
            with pytest.raises(common.InputError, match=why) as error:
                lesson.compile_guide({"regex": pattern}, BYTES)
            assert time.process_time() - start < LIMIT and len(str(error.value)) < 400
            which = f"structured_outputs: regex {pattern[:20]!r}"
            assert str(error.value).startswith(which[:-1])


@pytest.mark.parametrize(
    "pattern", ["(a|a)*", "(a*)*", "(a+)+b", "((a|b)*)*c", "(a|aa)*", "(){1000000000}", "(.*)*", "^(a|b)$"]
)
def test_patterns_that_only_hurt_backtracking(pattern):
    start = time.process_time()
    dfa = compiled(pattern)
    assert len(dfa.accepting) < 40 and time.process_time() - start < 1


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"regex": None}, {"regex": "a", "choice": ["a"]}, {"xml": "a"}, [], "a", {"regex": 5}, {"regex": ["a"]},
        {"choice": []}, {"choice": "abc"}, {"choice": [1]}, {"choice": ["a", None]}, {"choice": {"a": 1}},
        {"choice": ["\ud800"]},
        {"choice": ["a" * 70_000]}, {"choice": [f"{i:06}" for i in range(10_000)]}, {"json_object": False},
        {"json_object": 1},
        {"json": ""}, {"json": " "}, {"json": "{"}, {"json": "[1]"}, {"json": "5"}, {"json": 5}, {"json": {1, 2}},
        {"json": {"type": {1}}}, {"json": "[" * 5000}, {"json": {"a": ["x" * 70_000]}}, {"grammar": ""},
        {"grammar": "\n"},
        {"grammar": 5}, {"grammar": "x" * 70_000}, {"json": json.loads('{"items":' * 80 + "{}" + "}" * 80)},
    ],
)  # fmt: skip
def test_requests_that_are_refused(wrong):
    start = time.process_time()
    with pytest.raises(common.InputError) as error:
        lesson.compile_guide(wrong, BYTES)
    assert len(str(error.value)) < 400 and time.process_time() - start < LIMIT


def test_what_may_look_wrong_and_is_not():
    for fine in (
        {"regex": ""},
        {"regex": " "},
        {"regex": "2", "choice": None},
        {"choice": ["", "a"]},
        {"choice": ("a", "a")},
    ):
        lesson.compile_guide(fine, BYTES)
    assert structured_outputs.validate(None, None) is None
    with pytest.raises(common.InputError, match="end-of-sequence"):
        lesson.Vocabulary([b"a"], [])


CHAIN = 'start: r0\n{}r3000: "x"'.format("".join(f'r{i}: "x" r{i + 1}\n' for i in range(3000)))
UNREADABLE = {
    "points to itself": ({"json": {"$ref": "#"}}, "no answer"),
    "left recursion": ({"grammar": "start: a\na: a\n"}, "no answer"),
    "chain of rules": ({"grammar": CHAIN}, "stack"),
    "junk": ({"grammar": "))) what"}, ""),
}
UNREADABLE_TOO = {
    "chain of references": ({"json": {"$ref": "#/$defs/d0", "$defs": {
        f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}, "type": "array"} for i in range(999)} | {"d999": {}}}},
                 "stack"),
    "product": (lesson.EXPLOSIVE["product"], "too large"), "unknown type": ({"json": {"type": "objekt"}}, "type"),
    "not": ({"json": {"not": {}}}, "not"), "remote": ({"json": {"$ref": "http://x.invalid/y.json"}}, "retriev"),
    "undefined rule": ({"grammar": "start: foo\n"}, ""), "no start": ({"grammar": 'a: "b"\n'}, ""),
    "special token": ({"grammar": 'start: <|im_end|> "a"\n'}, ""), "number": ({"json": {"minimum": 1e300,
    "type": "integer"}}, ""),
}  # fmt: skip


def check_refused(vocabulary, wanted, why):
    start = time.perf_counter()
    with pytest.raises(common.InputError, match=why or None) as error:
        lesson.compile_guide(wanted, vocabulary)
    assert time.perf_counter() - start < limits.MAX_SECONDS + 5 and len(str(error.value)) < 400


@pytest.mark.parametrize("name", UNREADABLE)
def test_schemas_and_grammars_that_are_refused(vocabulary, name):
    """Among them one that would end this process if it were read here."""
    check_refused(vocabulary, *UNREADABLE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", UNREADABLE_TOO)
def test_more_schemas_and_grammars_that_are_refused(vocabulary, name):
    check_refused(vocabulary, *UNREADABLE_TOO[name])


def test_a_tokenizer_that_the_library_does_not_take(real_model):
    with pytest.raises(common.InputError, match="vocab"):
        structured_outputs.validate({"json_object": True}, real_model[1], 128, [2])


def test_a_library_that_hangs_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.001)  # no process starts in that time
    with pytest.raises(common.InputError, match="takes more than"):
        reader_process.read_apart("json", '{"type": "string", "title": "unseen before"}')


@pytest.mark.slow
def test_schemas_that_are_large_but_fine(vocabulary):
    for schema in (
        {"enum": [f"value {i}" for i in range(2000)]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**8},
        {"type": "string", "maxLength": 10**8}, {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"},
        lesson.closed(**{f"p{i}": {"type": "string"} for i in range(500)}),
        json.loads('{"type":"array","items":' * 20 + "{}" + "}" * 20),
    ):  # fmt: skip
        grammar = lesson.compile_guide({"json": schema}, vocabulary).start()
        row = np.empty(vocabulary.num_words, np.int32)
        start = time.process_time()
        grammar.fill_bitmask(row)
        assert vocabulary.unpack(row).any() and time.process_time() - start < 1


# --- The kernel -------------------------------------------------------------------------------------------------------


def masked(logits, allowed, rows):
    """Row by row, obviously right."""
    out = logits.clone()
    for row, kept in zip(rows, allowed):
        for token in range(logits.shape[1]):
            if not kept[token]:
                out[row, token] = -math.inf
    return out


def check_apply(V, rows, R, dtype, device, guarded, stride=None):
    rng = np.random.default_rng(V + R)
    allowed = rng.random((len(rows), V)) < 0.5
    words = -(-V // 32)
    bits = np.zeros((len(rows), 32 * words), dtype=bool)
    bits[:, :V] = allowed
    bits[:, V:] = rng.random((len(rows), 32 * words - V)) < 0.5  # behind the vocabulary: anything
    packed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    wide = guarded(torch.randn(R, stride or V).to(device, dtype))
    before = wide.clone()
    logits = wide[:, :V]
    want = masked(logits.cpu().float(), allowed, rows).to(dtype)
    lesson.apply_token_bitmask_inplace(logits, guarded(packed), torch.tensor(rows, device=device))
    assert torch.equal(logits.cpu(), want) and torch.equal(wide[:, V:], before[:, V:])


SIZES = [(1, [0], 1), (31, [0], 1), (32, [1], 2), (33, [2, 0], 3), (100, [], 2), (65, [3, 1, 0, 2], 4), (4095, [1], 2),
         (4097, [2, 1], 3), (8200, [0, 4], 5)]  # fmt: skip


@pytest.mark.parametrize(("V", "rows", "R"), SIZES)
def test_kernel(kernels, dtype, device, guarded, V, rows, R):
    check_apply(V, rows, R, dtype, device, guarded)


@pytest.mark.parametrize(("V", "rows", "R"), SIZES)
def test_torch_path(dtype, V, rows, R):
    check_apply(V, rows, R, dtype, torch.device("cpu"), torch.clone)


def test_rows_that_are_part_of_wider_rows(kernels, device, guarded):
    check_apply(70, [2, 0], 3, torch.float32, device, guarded, stride=96)


def test_shapes_that_do_not_fit_are_refused():
    logits, indices = torch.zeros(2, 64), torch.tensor([0])
    for wrong in (torch.zeros(1, 3, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="bitmask"):
            lesson.apply_token_bitmask_inplace(logits, wrong, indices)
    with pytest.raises(ValueError, match="contiguous"):
        lesson.apply_token_bitmask_inplace(torch.zeros(64, 2).T, torch.zeros(1, 2, dtype=torch.int32), indices)


# --- In the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    """A random model of 128 tokens; with the real tokenizer these are special tokens, ASCII, and some more bytes."""
    return llama.random_model(seed=0, eos_token_ids=(2,))


@pytest.fixture
def llm(model, real_model):
    return LLM(model, tokenizer=real_model[1], max_model_len=64, max_num_seqs=8, block_size=4,
                            num_gpu_blocks_override=120)  # fmt: skip


def prompts(n, seed=0):
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(20, 128) for _ in range(rng.randint(1, 12))]} for _ in range(n)]


def params(wanted=REGEX, **kwargs):
    return SamplingParams(**{"temperature": 1, "max_tokens": 20, "structured_outputs": wanted} | kwargs)


def text_of(llm, prompt, sampling_params):
    return llm.generate(prompt, sampling_params)[0].outputs[0]


def free(llm):
    engine = llm.llm_engine
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    engine.core.step()
    manager = vars(engine.core.runner).get("structured_output_manager")
    return pool.num_free_blocks == pool.num_blocks - 1 and not (manager and manager.grammars)


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
def test_every_answer_matches(llm, temperature):
    wanted = [REGEX, {"choice": ["yes", "no", "maybe-so"]}, {"regex": r"(\d\d:){2}\d\d"}]
    some = [params(wanted[i % 3], temperature=temperature, seed=i, top_p=0.9 if i % 2 else 1, top_k=3 if i % 4 else 0,
                   repetition_penalty=1.3 if i % 5 else 1) for i in range(12)]  # fmt: skip
    for output, one in zip(llm.generate(prompts(12), some), some):
        (answer,) = output.outputs
        assert lesson.parses(answer.text, one.structured_outputs) and answer.finish_reason == "stop"
    assert free(llm)


def test_an_answer_that_is_cut_is_the_beginning_of_a_match(llm):
    dfa = compiled(r"([a-z]{3}-)*\.")
    for n in range(1, 9):
        answer = text_of(llm, prompts(1)[0], params({"regex": r"([a-z]{3}-)*\."}, max_tokens=n, temperature=0))
        assert dfa.step(0, answer.text.encode()) >= 0
        assert (answer.finish_reason == "stop") == accepts(dfa, answer.text.encode())


def test_neighbours_do_not_notice(llm):
    """A batch of free and guided requests: everybody gets what they get alone."""
    some = [
        params(None if i % 2 else REGEX, seed=i, temperature=i % 3, max_tokens=9, ignore_eos=bool(i % 2))
        for i in range(8)
    ]
    together = llm.generate(prompts(8), some)
    for output, prompt, one in zip(together, prompts(8), some):
        assert output.outputs[0].token_ids == text_of(llm, prompt, one).token_ids
    assert free(llm)


def test_a_free_batch_pays_nothing(llm, monkeypatch):
    monkeypatch.setattr(lesson, "apply_token_bitmask_inplace", None)
    monkeypatch.setattr(lesson, "vocabulary_of", None)
    monkeypatch.setattr(structured_outputs, "vocabulary_of", None)
    llm.generate(prompts(3), params(None))


def test_samples_of_one_prompt_go_their_own_ways(llm):
    (output,) = llm.generate(prompts(1), params(n=5, seed=1))
    texts = [answer.text for answer in output.outputs]
    assert all(lesson.parses(text, REGEX) for text in texts) and len(set(texts)) > 1
    assert free(llm)


def test_stop_strings_and_stop_tokens_cut_the_answer(llm, real_model):
    answer = text_of(llm, prompts(1)[0], params(stop="-"))
    assert re.fullmatch("[a-z]{2,5}", answer.text) and answer.stop_reason == "-"
    (dash,) = real_model[1].encode("-")
    answer = text_of(llm, prompts(1)[0], params(stop_token_ids=[dash]))
    assert re.fullmatch("[a-z]{2,5}", answer.text) and answer.stop_reason == dash
    assert free(llm)


@pytest.mark.parametrize("temperature", [0, 1])
def test_min_tokens(llm, temperature):
    """It makes an answer longer where the grammar allows, and never asks for what the grammar forbids."""
    early = text_of(llm, prompts(1)[0], params({"regex": "a*"}, temperature=temperature, max_tokens=10, min_tokens=7))
    assert re.fullmatch("a*", early.text) and len(early.token_ids) >= 7
    for wanted in ({"choice": ["ab", "cd"]}, {"regex": "a{1,3}"}, {"regex": ""}):
        answer = text_of(llm, prompts(1)[0], params(wanted, temperature=temperature, max_tokens=10, min_tokens=8))
        assert lesson.parses(answer.text, wanted) if "choice" in wanted else re.fullmatch(wanted["regex"], answer.text)
        assert answer.finish_reason == "stop" and answer.token_ids[-1] == 2


def test_min_tokens_and_a_stop_token_that_the_grammar_wants(llm, real_model):
    (x,) = real_model[1].encode("x")
    answer = text_of(llm, prompts(1)[0], params({"regex": "xy"}, stop_token_ids=[x], min_tokens=4))
    assert answer.token_ids == [x] and answer.stop_reason == x


def test_after_the_end_only_the_end(llm):
    """ignore_eos: nothing but end tokens, which are no text."""
    answer = text_of(llm, prompts(1)[0], params(ignore_eos=True, max_tokens=30))
    assert lesson.parses(answer.text, REGEX) and len(answer.token_ids) == 30 and set(answer.token_ids[15:]) == {2}
    for seed in range(5):
        answer = text_of(llm, prompts(1)[0], params({"regex": "a*"}, ignore_eos=True, max_tokens=30, seed=seed))
        after = answer.token_ids[answer.token_ids.index(2) :]
        assert set(after) == {2}, "a pattern that could go on does not"


def test_log_probabilities_are_among_what_is_allowed(llm):
    answer = text_of(llm, prompts(1)[0], params({"regex": "[ab]c[de]"}, logprobs=5, temperature=0))
    assert re.fullmatch("[ab]c[de]", answer.text)
    for found, choices in zip(answer.logprobs, (2, 1, 2, 1)):
        assert len(found) == choices and sum(math.exp(x.logprob) for x in found.values()) == pytest.approx(1)
        json.dumps([x.logprob for x in found.values()], allow_nan=False)


def test_a_bias_cannot_break_a_pattern(llm, real_model):
    (z,) = real_model[1].encode("z")
    answer = text_of(llm, prompts(1)[0], params({"regex": "[ab]{3}"}, logit_bias={z: 100.0, 2: 100.0}))
    assert re.fullmatch("[ab]{3}", answer.text)


def test_wrong_requests_are_refused_before_they_are_queued(llm):
    for wrong in ({"regex": "(a"}, {"regex": "(a|b)*a(a|b){20}"}, {"choice": []}, {"xml": ""}):
        with pytest.raises(common.InputError):
            llm.generate(prompts(2), [params(None), params(wrong)])
        with pytest.raises(common.InputError):
            llm.llm_engine.add_request("r", prompts(1)[0], params(wrong))
        assert not llm.llm_engine.callers and not llm.llm_engine.core.scheduler.requests
    assert free(llm)


def test_an_id_may_come_again(llm):
    """The second request under a name begins at the beginning, also if the first was aborted half way."""
    engine = llm.llm_engine
    for _ in range(2):
        engine.add_request("r", prompts(1)[0], params({"regex": "abcdefgh"}))
        for _ in range(3):
            engine.step()
        engine.abort_request(["r"])
    engine.add_request("r", prompts(1)[0], params({"choice": ["xyz"]}))
    while engine.has_unfinished_requests():
        last = engine.step()
    assert last[0].outputs[0].text == "xyz" and free(llm)


def test_a_token_that_breaks_the_grammar_ends_the_answer(llm):
    """Nobody samples such a token under a mask; a bug elsewhere must not crash an engine, or go on unguided."""
    engine = llm.llm_engine
    engine.add_request("r", prompts(1)[0], params({"regex": "a{9}"}))
    engine.step()
    engine.core.scheduler.requests["r"].append_output_token_id(100)
    with pytest.warns(UserWarning, match="breaks its grammar"):
        while engine.has_unfinished_requests():
            (output,) = engine.step() or [None]
    (answer,) = output.outputs
    assert len(answer.token_ids) == 2 and answer.token_ids[1] == 2, "its front end has not seen the other token"
    assert answer.finish_reason == "error" and "left its grammar" in answer.stop_reason and answer.text == "a"


@pytest.mark.parametrize("wish", [{"temperature": 0}, {}, {"logprobs": 2}, {"allowed_token_ids": [5, 6]}])
@pytest.mark.parametrize("fault", ["nothing is allowed", "no guide"])
def test_a_guide_that_allows_nothing_ends_its_request(llm, monkeypatch, fault, wish):
    """With an error; a neighbour writes what it writes alone. The engine may be slower than the front end was, and its
    compiler reach the limit of time."""
    engine, fill = llm.llm_engine, StructuredOutputManager.fill_row
    good = params({"regex": "b{9}"}, temperature=0)
    (alone,) = llm.generate(prompts(1), good)

    def fill_row(manager, row, request):
        if request.request_id == "good":
            return fill(manager, row, request)
        if fault == "no guide":
            raise common.InputError("structured_outputs: it took longer than 2 s")
        row[:] = 0

    monkeypatch.setattr(StructuredOutputManager, "fill_row", fill_row)
    engine.add_request("good", prompts(1)[0], good)
    engine.add_request("bad", prompts(1)[0], params({"regex": "a{9}"}, **wish))
    found = {}
    with pytest.warns(UserWarning, match="longer than 2 s") if fault == "no guide" else contextlib.nullcontext():
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0] for output in engine.step()}
    bad = found["bad"]
    assert (bad.token_ids, bad.finish_reason) == ([], "error") and "no token is allowed" in bad.stop_reason
    assert found["good"].token_ids == alone.outputs[0].token_ids and free(llm)


MISSING = {
    "grammar": {"grammar": 'start: "a\\u0004b"'}, "const": {"json": {"const": "x\U00040000"}},
    "pattern of a schema": {"json": {"type": "string", "pattern": "^\U000bffff$"}},
}  # fmt: skip


def test_an_answer_that_cannot_be_written_is_an_error(real_model):
    """SmolLM2 has no token with 04, F1 or F2; the library allows the one behind it. A neighbour does not notice."""
    llm = LLM(real_model[0], tokenizer=real_model[1], max_model_len=32, max_num_seqs=9,
                           num_gpu_blocks_override=19)  # fmt: skip
    engine, found, prompt, writable = llm.llm_engine, {}, {"prompt_token_ids": [30]}, "x\U0003ffff\U000c0000"
    for name, wanted in MISSING.items():
        engine.add_request(f"{name}, whole", prompt, params(wanted))
        engine.add_request(f"{name}, streamed", prompt, params(wanted), stream=True)
    engine.add_request("cut before", prompt, params(MISSING["const"], max_tokens=2))
    engine.add_request("cut behind", prompt, params(MISSING["const"], max_tokens=3))
    engine.add_request("neighbour", prompt, params({"json": {"const": writable}}))
    with pytest.warns(UserWarning, match="breaks its grammar"):
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0] for output in engine.step()}
    cut, neighbour = found.pop("cut before"), found.pop("neighbour")
    assert (cut.text, cut.finish_reason) == ('"x', "length"), "so far it was right"
    assert json.loads(neighbour.text) == writable and neighbour.finish_reason == "stop"
    assert {(answer.finish_reason, answer.stop_reason) for answer in found.values()} == {
        ("error", structured_outputs.BROKEN)
    }
    assert len(found) == 7 and free(llm)
    with pytest.raises(common.InputError, match="no answer can match"):  # of patterns, such strings are struck
        text_of(llm, prompt, params({"regex": "x\U00040000"}))


class Manager(RuleBasedStateMachine):
    """Requests come, write, go, and come again under the same name; whoever is asked for in whatever order."""

    def __init__(self):
        super().__init__()
        self.manager = StructuredOutputManager(BYTES)
        self.running = {}

    @rule(name=st.sampled_from("xyz"), pattern=st.sampled_from(["a{2,4}", "(ab|é)*", "[ab]c?", "€|ê"]))
    def add(self, name, pattern):
        if name not in self.running:
            self.running[name] = Request(name, [1], params({"regex": pattern}))

    @rule(names=st.permutations("xyz"), count=st.integers(1, 3), choice=st.integers(0, 999))
    def step(self, names, count, choice):
        """Some of them are sampled, as in a step in which others were preempted or computed a part of their prompt."""
        batch = [self.running[name] for name in names[:count] if name in self.running]
        for request, row in zip(batch, self.manager.grammar_bitmask(batch)):
            allowed = np.flatnonzero(BYTES.unpack(row)).tolist()
            assert allowed == self.replayed(request)
            request.append_output_token_id(allowed[choice % len(allowed)])

    @staticmethod
    def replayed(request):
        """The mask of somebody who reads the whole answer from its beginning."""
        text = bytes(token for token in request.output_token_ids if token < 256)
        node = lesson.parse_regex(request.sampling_params.structured_outputs["regex"])
        if len(text) < request.num_output_tokens:
            return BYTES.eos_token_ids
        rest = node
        for byte in text:
            rest = lesson.derivative(rest, byte)
        return sorted(
            {*lesson.tokens_by_trying(node, text, BYTES.tokens), *BYTES.eos_token_ids * lesson.nullable(rest)}
        )

    @rule(name=st.sampled_from("xyz"))
    def finish(self, name):
        self.running.pop(name, None)
        self.manager.finish([name])

    @invariant()
    def nobody_else_is_remembered(self):
        assert set(self.manager.grammars) <= set(self.running)


TestManager = Manager.TestCase
TestManager.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.parametrize("budget", [8, 64])
def test_chunks_and_preemptions_change_nothing(model, real_model, budget, monkeypatch):
    """A pool that is too small and prompts cut into pieces of 8: the same tokens as alone."""
    preempted = []
    preempt = Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *a: preempted.append(a[1]) or preempt(*a))

    wanted = [{"regex": r"([a-z]{4}-){5}\."}, None, {"choice": ["a-longer-answer-than-usual", "another-one,as-long"]}]
    some = [params(wanted[i % 3], seed=i, max_tokens=30, ignore_eos=i % 3 == 1) for i in range(9)]
    asked = [{"prompt_token_ids": list(range(20 + i, 40 + 2 * i))} for i in range(9)]

    def run(blocks):
        llm = LLM(model, tokenizer=real_model[1], max_model_len=80, max_num_seqs=8, block_size=4,
                  num_gpu_blocks_override=blocks, max_num_batched_tokens=budget)  # fmt: skip
        outputs = llm.generate(asked, some)
        assert free(llm)
        return [output.outputs[0].token_ids for output in outputs], [output.outputs[0].text for output in outputs]

    undisturbed = run(400)
    assert not preempted
    assert run(24) == undisturbed and preempted
    assert all(
        lesson.parses(text, one.structured_outputs) for text, one in zip(undisturbed[1], some) if one.structured_outputs
    )


def test_the_engine_runs_the_kernel(kernels, model, real_model):
    launches = bitmask.apply_token_bitmask_kernel.launches
    llm = LLM(model, tokenizer=real_model[1], max_model_len=32, max_num_seqs=2, block_size=16,
                           num_gpu_blocks_override=9)  # fmt: skip
    answer = text_of(llm, {"prompt_token_ids": [30]}, params({"choice": ["ab"]}, temperature=0))
    assert answer.text == "ab" and bitmask.apply_token_bitmask_kernel.launches > launches


# --- The real model ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_real_model_in_one_batch(real_model):
    """A date, JSON, a grammar and a free answer side by side; kanji and emoji, whose tokens are parts of characters."""
    model, tokenizer = real_model
    llm = LLM(model, tokenizer=tokenizer, max_model_len=256, max_num_seqs=16, num_gpu_blocks_override=257)
    chat = [{"prompt_token_ids": tokenizer.chat([{"role": "user", "content": "Tell me about Anna from Rome."}])}] * 6
    wanted = [{"regex": lesson.SHOWN["date"]}, {"json": lesson.PERSON}, {"grammar": lesson.SUM},
             {"regex": "(寿司|😀){2,4}"},
              {"choice": ["寿司を食べる", "naïve"]}, None]  # fmt: skip
    answers = [
        output.outputs[0] for output in llm.generate(chat, [params(w, temperature=0, max_tokens=60) for w in wanted])
    ]
    for answer, want in zip(answers[:-1], wanted):
        assert lesson.parses(answer.text, want), answer.text
        assert answer.finish_reason == "stop" and "\ufffd" not in answer.text
    validate_json(answers[1].text, lesson.PERSON)
    assert not any(lesson.parses(answers[-1].text, want) for want in wanted[:2])


def validate_json(text, schema):
    """By a validator that has nothing to do with us."""
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    jsonschema_rs.validator_for(schema).validate(json.loads(text))


@pytest.mark.slow
def test_json_always_conforms(real_model):
    model, tokenizer = real_model
    llm = LLM(model, tokenizer=tokenizer, max_model_len=256, max_num_seqs=16, num_gpu_blocks_override=257)
    for schema in (lesson.PERSON, lesson.CALL, lesson.closed(a={"type": "array", "items": {"type": "boolean"},
             "maxItems": 3},
                                                             b={"type": "null"}, c={"enum": [1, "é",
                                                                      None]})):  # fmt: skip
        some = [params({"json": schema}, temperature=1.5, seed=i, max_tokens=200) for i in range(8)]
        for output in llm.generate([{"prompt": "Data:"}] * 8, some):
            (answer,) = output.outputs
            assert answer.finish_reason == "stop"
            validate_json(answer.text, schema)
    assert free(llm)


INT = {"type": "integer"}
CLOSED = [  # schema, what may be written, what may not: XGrammar's answers (0.2.8, as vLLM 0.32 asks it)
    ({"type": "object"}, ["{}", '{"x": 1}'], ["1"]),
    ({"type": "object", "properties": {}}, ["{}"], ['{"x": 1}']),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "required": ["a"]}, ['{"a": 1}', '{"a": 1, "b": 2}'],
     ['{"a": 1, "c": 2}', '{"b": 2, "a": 1}', '{"c": 1, "a": 2}']),
    ({"type": "object", "properties": {"a": INT}, "additionalProperties": INT}, ['{"a": 1, "c": 2}'], ['{"c": "x"}']),
    ({"type": "object", "properties": {"a": INT}, "additionalProperties": True}, ['{"a": 1, "c": ""}'], ['{"a": ""}']),
    ({"anyOf": [{"type": "object", "properties": {"a": INT}}, {"type": "object", "properties": {"b": INT}}]},
     ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}', '{"c": 1}']),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "object",
      "properties": {"x": INT}}}}, ['{"a": {"x": 1}}'], ['{"a": {"y": 1}}', '{"a": {"x": 1}, "y": 1}']),
    ({"type": "array", "items": {"type": "object", "properties": {"a": INT}}}, ['[{"a": 1}, {}]'], ['[{"b": 1}]']),
    ({"type": "object", "additionalProperties": {"type": "object", "properties": {"a": INT}}}, ['{"q": {"a": 1}}'],
     ['{"q": {"b": 1}}']),
    ({"type": "array", "prefixItems": [INT, {"type": "object", "properties": {"a": INT}}]}, ["[1]", '[1, {"a": 1}]'],
     ["[1, {}, 3]", '[1, {"b": 1}]']),
    ({"type": "array", "prefixItems": [INT], "items": INT}, ["[1, 2]"], ['[1, "x"]']),
    # "properties" is a name here, and its schema is closed like any other
    ({"type": "object", "properties": {"properties": {"type": "object", "properties": {"a": INT}}}},
     ['{"properties": {"a": 1}}'], ['{"properties": {"b": 1}}', '{"a": 1}']),
    # several schemas of one object: nobody is closed (vLLM asks guidance, which closes nothing)
    ({"allOf": [{"type": "object", "properties": {"a": INT}}, {"type": "object", "properties": {"b": INT}}]},
     ['{"a": 1, "b": 2}', '{"c": 1}'], ['{"a": "x"}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "may", "may_not"), CLOSED, ids=[json.dumps(schema)[:60] for schema, _, _ in CLOSED])
def test_what_a_schema_does_not_name_is_not_written(vocabulary, schema, may, may_not):
    before = json.dumps(schema)
    guide = lesson.compile_guide({"json": schema}, vocabulary)
    assert json.dumps(schema) == before, "the request's own schema is not changed"
    assert lesson.compile_guide({"json": before}, vocabulary) is guide
    tokens = {token: i for i, token in enumerate(vocabulary.tokens)}
    for text in (*may, *may_not):
        grammar = guide.start()
        fits = all(grammar.accept_token(tokens[char.encode()]) for char in text) and grammar.accept_token(2)
        assert fits == (text in may), text


def closed_by_us(schema):
    return read_schema(json.dumps(schema)) != schema


def test_schemas_that_stay_as_they_are():
    """Each would be closed but for one thing."""
    a = {"type": "object", "properties": {"a": INT}}
    assert closed_by_us(a) and closed_by_us({"allOf": [a]}) and closed_by_us(a | {"required": ["a"]})
    for open_one in (
        a | {"required": ["a", "z"]}, a | {"unevaluatedProperties": True}, a | {"patternProperties": {"^x": INT}},
        a | {"required": 5}, a | {"required": [["a"]]}, {"const": a}, {"enum": [a]}, {"default": a, "type": "string"},
        a | {"anyOf": [{"required": ["a"]}]}, a | {"$ref": "#/$defs/B", "$defs": {"B": a}}, {"properties": 3},
        {"type": "object", "properties": {"b": a}, "oneOf": [{}]}, {"prefixItems": [INT], "items": True},
        {"prefixItems": [INT], "unevaluatedItems": True}, {"prefixItems": [INT], "anyOf": [{"minItems": 3}]},
        {"allOf": [{"$ref": "#/$defs/B"}, {"title": "x"}], "$defs": {"B": a}}, {"allOf": 7}, {"not": a}, {},
    ):  # fmt: skip
        assert not closed_by_us(open_one), open_one


OBJECT = {"type": "object", "properties": {"a": INT, "b": INT}, "required": ["a"]}
LIST = {"type": "array", "items": INT}
IDLE = [  # schemas, and what they ask for beside what the rest of them says: nothing
    (LIST, {"uniqueItems": False}), (LIST, {"minItems": 0, "maxItems": 4.0}), (LIST, {"unevaluatedItems": {}}),
    (LIST, {"contains": INT, "minContains": 0}), (LIST, {"minContains": 2}), (LIST, {"maxContains": 0}),
    (LIST, {"additionalItems": False}), (OBJECT, {"not": False}), (OBJECT, {"unevaluatedProperties": False}),
    (OBJECT, {"unevaluatedProperties": INT, "additionalProperties": False}), (OBJECT, {"propertyNames": True}),
    (OBJECT, {"propertyNames": {}}), (OBJECT, {"propertyNames": {"type": "string"}}), (OBJECT, {"if": {"minItems": 3}}),
    (OBJECT, {"then": False}), (OBJECT, {"else": {"type": "null"}}), (OBJECT, {"if": INT, "then": {}, "else": True}),
    (OBJECT, {"dependentRequired": {}}), (OBJECT, {"dependentRequired": {"a": []}}), (OBJECT, {"dependentSchemas": {}}),
    (OBJECT, {"dependentSchemas": {"a": True, "b": {}}}), (OBJECT, {"dependencies": {"a": [], "b": {}}}),
    (OBJECT, {"minProperties": 0}), (OBJECT, {"minProperties": 1.0}), (OBJECT, {"maxProperties": 2}),
    (OBJECT, {"maxProperties": 9}), (OBJECT, {"allOf": []}), (OBJECT, {"$recursiveAnchor": False}),
    (OBJECT, {"$schema": "http://json-schema.org/schema#"}), (OBJECT, {"$schema": "https://json-schema.org/draft-07/schema#"}),
    (OBJECT, {"$schema": "http://json-schema.org/draft-07/schema#"}),
]  # fmt: skip


def writes(vocabulary, schema, text):
    grammar, tokens = lesson.compile_guide({"json": schema}, vocabulary).start(), vocabulary.tokens
    return all(grammar.accept_token(tokens.index(char.encode())) for char in text) and grammar.accept_token(2)


@pytest.fixture
def in_this_process(monkeypatch):
    """Half a second per schema less: what is read here neither hangs nor crashes."""
    monkeypatch.setattr(structured_outputs, "read_apart", lambda kind, spec: None)


@pytest.mark.parametrize(("schema", "idle"), IDLE, ids=[json.dumps(idle) for _, idle in IDLE])
def test_what_asks_for_nothing_is_no_reason_to_refuse(vocabulary, in_this_process, schema, idle):
    """On the outside, and wherever else a schema may stand."""
    may, may_not = (["[]", "[1, 1]"], ["[true]"]) if schema is LIST else (['{"a": 1}', '{"a": 1, "b": 2}'], ["{}"])
    may_not += ['{"a": 1, "c": 1}'] if schema is OBJECT else []
    whole = schema | idle
    for where, shape in (
        (whole, "HERE"), ({"type": "array", "prefixItems": [whole]}, "[HERE]"), ({"anyOf": [INT, whole]}, "HERE"),
        ({"$ref": "#/$defs/uniqueItems", "$defs": {"uniqueItems": whole}}, "HERE"),
        ({"type": "object", "properties": {"not": whole}}, '{"not": HERE}'),
        ({"type": "object", "patternProperties": {"^x$": whole}, "additionalProperties": False}, '{"x": HERE}'),
    ):  # fmt: skip
        for text in (*may, *may_not):
            assert writes(vocabulary, where, shape.replace("HERE", text)) == (text in may), (where, text)


def test_what_asks_for_nothing_may_be_a_name_or_a_value(vocabulary, in_this_process):
    named = {"type": "object", "properties": {"uniqueItems": False, "a": {"const": {"not": False}}}}
    assert writes(vocabulary, named, '{"a": {"not": false}}')
    assert not writes(vocabulary, named, '{"uniqueItems": 1}') and not writes(vocabulary, named, '{"a": {}}')


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [(LIST | {"uniqueItems": True}, "uniqueItems"), (LIST | {"uniqueItems": 0}, "uniqueItems"),
     (LIST | {"contains": INT}, "contains"), (LIST | {"contains": {}, "minContains": 0, "maxContains": 1}, "Contains"),
     (OBJECT | {"not": {}}, "not"), (OBJECT | {"if": {}, "then": {"required": ["b"]}}, "then"),
     (OBJECT | {"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
     (OBJECT | {"anyOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties"),
     (OBJECT | {"minProperties": True}, "minProperties"), (OBJECT | {"maxProperties": 0}, "maxProperties")],
)  # fmt: skip
def test_what_asks_for_something_is_refused_by_its_name(vocabulary, in_this_process, schema, keyword):
    with pytest.raises(common.InputError, match=keyword):
        lesson.compile_guide({"json": schema}, vocabulary)


KIND = {k: {"type": "object", "properties": {"k": {"const": k}, "x": INT}, "required": ["k"]} for k in "ab"}
OVERLAPPING = [
    ([INT, {"type": "number"}], ["1", "1.5"], ["true"]), ([{"enum": [1, 2]}, {"enum": [2, 3]}], ["1", "2", "3"], ["4"]),
    ([{"type": "string"}, {"type": "string", "pattern": "^a$"}], ['"a"', '"b"'], ["1"]),
    ([{}, INT], ["1", "true"], ["}"]),
    ([*KIND.values()], ['{"k": "a"}', '{"k": "b", "x": 1}'], ['{"k": "c"}', '{"x": 1}']),  # Pydantic's discriminator
]  # fmt: skip


@pytest.mark.parametrize(("branches", "may", "may_not"), OVERLAPPING)
def test_one_of_several_schemas_that_overlap(vocabulary, in_this_process, branches, may, may_not):
    """As XGrammar reads it for vLLM: one of them, and nobody sees to it that the others do not match."""
    inner = {"type": "object", "properties": {"v": {"oneOf": branches}}}
    for text in (*may, *may_not):
        assert writes(vocabulary, {"oneOf": branches}, text) == (text in may), text
        assert writes(vocabulary, inner, f'{{"v": {text}}}') == (text in may), text


def test_a_grammars_schema_is_told_what_it_may_say(vocabulary, in_this_process):
    """A grammar is its client's own, and so are the options in it: the advice is one that a client can take."""
    schema = {"oneOf": [INT, {"type": "number"}]}
    with pytest.raises(common.InputError, match=r"anyOf.*x-guidance") as error:
        lesson.compile_guide({"grammar": f"start: %json {json.dumps(schema)}"}, vocabulary)
    assert "Enable" not in str(error.value)
    for better in ({"anyOf": schema["oneOf"]}, schema | {"x-guidance": {"coerce_one_of": True}}):
        lesson.compile_guide({"grammar": f"start: %json {json.dumps(better)}"}, vocabulary)


def test_json_object_and_schemas_as_text(vocabulary):
    """Compact, as json.dumps writes it: there is no run of whitespace to get lost in."""
    guide = lesson.compile_guide({"json_object": True}, vocabulary)
    assert lesson.compile_guide({"json": '{"type": "object"}'}, vocabulary) is guide
    tokens = {token: i for i, token in enumerate(vocabulary.tokens)}
    for text, fine in (('{"a": [1, 2]}', True), ('{"a":1}', False), ("{ }", False), ("{\n", False), ("[1]", False)):
        grammar = guide.start()
        assert all(grammar.accept_token(tokens[char.encode()]) for char in text) == fine
        if fine:
            row = np.empty(vocabulary.num_words, np.int32)
            grammar.fill_bitmask(row)
            assert vocabulary.unpack(row).nonzero()[0].tolist() == [2]
            assert grammar.accept_token(2) and grammar.accept_token(2) and not grammar.accept_token(tokens[b"a"])
    assert not guide.start().accept_token(2), "not before the end"


def test_a_parser_that_gives_up_ends_the_answer(vocabulary):
    """llguidance has limits of its own, and may reach them in the middle of an answer."""

    class TiredMatcher:
        """Allows everything; from the third mask on it is in error."""

        masks = 0

        def unsafe_compute_mask_ptr(self, address, size):
            self.masks += 1
            row[:] = -1

        def consume_token(self, token):
            return True

        def is_accepting(self):
            return False

        def is_error(self):
            return self.masks > 2

        def get_error(self):
            return "too many rows " * 100

    grammar, row = GuidanceGrammar(TiredMatcher(), vocabulary), np.zeros(vocabulary.num_words, np.int32)
    for _ in range(2):
        grammar.fill_bitmask(row)
        assert (row == -1).all() and grammar.accept_token(5)
    with pytest.warns(UserWarning, match="llguidance gave up: too many rows") as heard:
        grammar.fill_bitmask(row)
    assert len(str(heard[0].message)) < 300
    for _ in range(2):  # nothing but the end can follow, and nobody is warned again
        assert vocabulary.unpack(row).nonzero()[0].tolist() == [2] and not grammar.accept_token(5)
        row[:] = -1
        grammar.fill_bitmask(row)
    assert grammar.accept_token(2)


# --- The simulation, and what the script says -------------------------------------------------------------------------


@pytest.mark.parametrize("model", page.WIDGET_CHOICES["model"])
@pytest.mark.parametrize("pattern", lesson.PATTERNS)
def test_simulated_answers_match(pattern, model):
    trace = page.simulate({"pattern": pattern, "masks": "bytes", "eos": "accepting", "model": model})
    matches = re.fullmatch(trace["pattern"], trace["written"], re.ASCII) is not None
    assert trace["outcome"] == ("ended" if trace["matches"] else "cut") and trace["matches"] == matches
    assert all(step["allowed"] for step in trace["steps"])
    assert all(step["path"][-1] == after["state"] for step, after in zip(trace["steps"], trace["steps"][1:]))


def test_each_bug_shows():
    price = page.simulate(page.WIDGET_DEFAULT | {"masks": "text"})
    assert price["outcome"] == "stuck" and price["written"] == "12"
    never = page.simulate(page.WIDGET_DEFAULT | {"eos": "never"})
    assert never["outcome"] == "stuck" and never["matches"]
    assert page.facts()["widget"]["always"]["wrong"] > 20
    assert lesson.check_masks(lesson.toy_vocabulary(), "accepting") > 40
    for vocabulary, eos in (("text", "accepting"), ("bytes", "always"), ("bytes", "never")):
        with pytest.raises(common.CheckFailed, match="wrong about"):
            lesson.check_masks(lesson.toy_vocabulary(vocabulary), eos)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (TokenTrie, "allowed", lambda self, dfa, state: np.ones(len(self.node), dtype=bool)),
        (RegexGuide, "allowed", lambda self, state: self.vocabulary.trie.allowed(self.dfa, state)),
        (DFA, "step", lambda self, state, data: state),
        (NFA, "closure", lambda self, state: frozenset([0, state])),
    ],
)
def test_the_simulation_runs_the_real_classes(monkeypatch, owner, name, broken):
    before = page.simulate(page.WIDGET_DEFAULT)
    monkeypatch.setattr(owner, name, broken)
    with contextlib.suppress(IndexError, common.InputError):
        assert page.simulate(page.WIDGET_DEFAULT) != before


def test_masks_change_the_distribution():
    """By hand: free 0.6 · 0.01 and 0.4 · 0.9; under masks the first token decides."""
    found = lesson.distortion()
    assert found["free"]["apricot"] == pytest.approx(0.006) and found["free"]["cherry"] == pytest.approx(0.36)
    assert found["given"]["apricot"] == pytest.approx(0.006 / 0.366)
    assert found["masked"] == {"apricot": pytest.approx(0.6), "cherry": pytest.approx(0.4)}
    assert sum(found["free"].values()) == pytest.approx(1)


def test_the_scripts_checks_can_fail(vocabulary, monkeypatch):
    monkeypatch.setattr(lesson, "EXPLOSIVE", {"harmless": {"regex": "a"}})
    with pytest.raises(common.CheckFailed, match="harmless"):
        lesson.refuse(vocabulary)
    for text, wanted, good in (
        ("2024-02-30", {"regex": lesson.SHOWN["date"]}, True), ("2024-13-01", {"regex": lesson.SHOWN["date"]}, False),
        ("1 + (2 + 3) = 6", {"grammar": lesson.SUM}, True), ("1 + (2 = 3", {"grammar": lesson.SUM}, False),
        ("{}", {"json": lesson.CALL}, False), ("[", {"json": lesson.CALL}, False), ("no", {"choice": ["yes"]}, False),
    ):  # fmt: skip
        assert lesson.parses(text, wanted) == good

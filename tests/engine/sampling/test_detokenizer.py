"""Text byte for byte: whole characters only, and stop strings that never leak."""

from __future__ import annotations

import common

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import registry
from engine.request import SamplingParams
from engine.sampling.detokenizer import IncrementalDetokenizer, TokenBytes, decoded_token

tour = registry.lesson("04b_offline_engine")


@pytest.fixture(scope="module")
def token_bytes(real_model):
    return TokenBytes(real_model[1])


def pieces_of(token_bytes, ids, **params):
    detokenizer, pieces = IncrementalDetokenizer(token_bytes, SamplingParams(**params)), []
    for token in ids:
        detokenizer.append(token)
        pieces.append(detokenizer.get_next_output_text(finished=False))
    return pieces


@given(data=st.data())
def test_pieces_of_any_tokens_make_up_the_decoded_text(token_bytes, real_model, data):
    """Tokens at random, broken UTF-8 included: nothing but a last incomplete character is missing."""
    backend = real_model[1].backend
    broken = [token for token in range(300) if token_bytes[token].decode("utf-8", "replace") == "\ufffd"]
    ids = data.draw(st.lists(st.one_of(st.integers(0, 49151), st.sampled_from(broken)), max_size=12))
    text, whole = "".join(pieces_of(token_bytes, ids)), backend.decode(ids, skip_special_tokens=True)
    assert whole.startswith(text) and set(whole[len(text) :]) <= {"\ufffd"} and len(whole) - len(text) <= 1
    assert b"".join(token_bytes[t] for t in ids if t not in token_bytes.special).decode("utf-8", "replace") == whole


@pytest.mark.parametrize("text", ["🙂", "寿司", "👩‍🚀!", "naïve — Ω≈ç√", "مرحبا", "a\u0301", "\n\t x"])
def test_half_a_character_is_never_shown(token_bytes, real_model, text):
    ids = real_model[1].encode(text)
    pieces = pieces_of(token_bytes, ids)
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert all(text.startswith("".join(pieces[:i])) for i in range(len(pieces)))
    if text == "🙂":
        assert len(ids) > 1 and pieces[0] == ""


def decoded(token_bytes, ids):
    return [decoded_token(token_bytes, token, ids[max(0, i - 4) : i]) for i, token in enumerate(ids)]


def test_the_last_token_of_a_character_is_all_of_it(token_bytes, real_model):
    """As vLLM 0.32's `LogprobsProcessor` told these tokens, and 15,000 others of broken texts."""
    ids = real_model[1].encode(tour.TEXT)
    found = decoded(token_bytes, ids)
    assert found == ["Z", "o", "ë", " paid", " ", "5", " €", " for", "", "", " 寿", "", "司", ";", "", "", " 👩", "",
                     "\u200d", "", "", "🚀", " said", ":", " “", "bon", "”"]  # fmt: skip
    assert "".join(found) == tour.TEXT == real_model[1].decode(ids)


@pytest.mark.parametrize(
    ("before", "token", "text"),
    [
        ([], b"a", "a"), ([], b"\xe5", ""), ([b"\xe5", b"\xaf"], b"\xbf", "寿"), ([b"\xe5\xaf"], b"\xbf!", "\ufffd!"),
        ([b"x", b"\xe5\xaf"], b"\xbf", "寿"), ([b"x\xe5", b"\xaf"], b"\xbf", "x寿"), ([b"\xe5", b"\xaf"], b"A", "A"),
        ([b"\xf0", b"\x9f", b"\x9a"], b"\x80", "🚀"), ([b"y\xf0", b"\x9f", b"\x9a"], b"\x80", "y🚀"),
        ([b"\xe5", b"\xaf"], b"\xc3", ""), ([b"\xaf"], b"\xbf", ""), ([b"x"], b"\xbf", ""), ([b"y"], b"x\xe5", ""),
        ([b"\xe5", b"\xaf"], b"\xbf\xe5", ""), ([b"z", "\ufffd".encode(), b"\xc3"], b"\xab", "ë"),
    ],
)  # fmt: skip
def test_tokens_within_a_character_by_hand(before, token, text):
    """vLLM's rule to its odd ends: what has a text alone keeps it, and nobody tells of bytes that came to nothing."""
    pieces = [*before, token]
    assert decoded_token(dict(enumerate(pieces)), len(before), range(len(before))) == text


def test_special_tokens_are_shown_only_on_request(token_bytes, real_model):
    eos = real_model[0].config.eos_token_ids[0]
    assert pieces_of(token_bytes, [eos]) == [""]
    assert pieces_of(token_bytes, [eos], skip_special_tokens=False) == [real_model[1].backend.id_to_token(eos)]


def test_a_tokenizer_with_byte_fallback():
    """As Llama 1 and 2 and TinyLlama have: ▁ for a space, <0x..> for bytes."""
    import tokenizers
    from tokenizers import decoders, models

    vocab = {"▁the": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "▁": 4, "x": 5, "<unk>": 6, "</div>": 7, "<0x": 8}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    found = TokenBytes(type("Tokenizer", (), {"backend": backend})())
    assert pieces_of(found, [0, 4, 1, 2, 3, 5, 7, 8]) == [" the", " ", "", "", "€", "x", "</div>", "<0x"]
    backend.decoder = decoders.WordPiece()
    with pytest.raises(common.InputError, match="decoder"):
        TokenBytes(type("Tokenizer", (), {"backend": backend})())


class Letters:
    """Token i stands for a piece of text; enough for the detokenizer."""

    special = frozenset()

    def __init__(self, pieces):
        self.pieces = pieces

    def __getitem__(self, token):
        return self.pieces[token].encode()


def stopped(pieces, **params):
    """Feed pieces until a stop string ends it: (streamed text, full text, stop string, tokens used)."""
    detokenizer, streamed = IncrementalDetokenizer(Letters(pieces), SamplingParams(**params)), ""
    for i in range(len(pieces)):
        found = detokenizer.append(i)
        streamed += detokenizer.get_next_output_text(finished=found is not None)
        if found is not None:
            return streamed, detokenizer.text, found, i + 1
    return streamed + detokenizer.get_next_output_text(finished=True), detokenizer.text, None, len(pieces)


@pytest.mark.parametrize(
    ("pieces", "params", "text", "stop", "used"),
    [
        (["ab", "cd", "ef"], {"stop": "bc"}, "a", "bc", 2),  # across tokens
        (["ab", "cd", "ef"], {"stop": "bc", "include_stop_str_in_output": True}, "abc", "bc", 2),
        (["a", "b", "c", "d"], {"stop": ["abcd"]}, "", "abcd", 4),  # longer than any token
        (["a", "b", "c", "d"], {"stop": ["x", "bcd"]}, "a", "bcd", 4),  # across tokens, beside a shorter one
        (["xaby"], {"stop": ["by", "ab"]}, "x", "ab", 1),  # the one that ends first
        (["ab", "ab", "c"], {"stop": "abc"}, "ab", "abc", 3),
        (["aaa"], {"stop": "aa"}, "", "aa", 1),
        (["no", "ne"], {"stop": "x"}, "none", None, 2),
        (["stop", "stop"], {"stop": "stop", "min_tokens": 1}, "stop", "stop", 2),  # too early, then in time
        (["st", "op", "!"], {"stop": "stop", "min_tokens": 2}, "stop!", None, 3),  # it ended too early
        (["st", "op", "!"], {"stop": "stop", "min_tokens": 1}, "", "stop", 2),
    ],
)  # fmt: skip
def test_stop_strings_by_hand(pieces, params, text, stop, used):
    assert stopped(pieces, **params) == (text, text, stop, used)


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans(),
)  # fmt: skip
def test_stop_strings_never_leak_into_a_stream(pieces, stops, include):
    streamed, text, stop, used = stopped(pieces, stop=stops, include_stop_str_in_output=include)
    assert streamed == text
    # The naive reading: grow the text token by token; the first token that completes one ends it.
    for n in range(1, len(pieces) + 1):
        whole = "".join(pieces[:n])
        ends = [(whole.find(s) + len(s), whole.find(s), s) for s in stops if s in whole]
        if ends:
            first_end = min(e for e, _, _ in ends)
            assert used == n and stop in [s for e, _, s in ends if e == first_end]
            assert text == whole[: first_end if include else first_end - len(stop)]
            return
    assert stop is None and text == "".join(pieces)


def test_a_token_costs_the_same_early_and_late(token_bytes, monkeypatch):
    """Counted, not timed: neither the search nor a stream looks at text that is long past."""

    class Buffer(io.StringIO):
        seen = 0

        def read(self, count=-1):
            found = super().read(count)
            Buffer.seen += len(found)
            return found

        def getvalue(self):
            Buffer.seen += 10**6
            return super().getvalue()

    monkeypatch.setattr(io, "StringIO", Buffer)
    detokenizer = IncrementalDetokenizer(token_bytes, SamplingParams(stop=["no such text"]))
    for token in range(500, 3000):
        detokenizer.append(token)
        detokenizer.get_next_output_text(finished=False)
        assert len(detokenizer.tail) <= len("no such text") - 1
    assert Buffer.seen == detokenizer.length - detokenizer.held_back > 5000, "every character was read once"

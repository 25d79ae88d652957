"""Lesson 04b: distributions exactly, draws exactly, text byte for byte, and an engine that nobody can wedge."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import subprocess
import sys

import common
import numpy as np
import pytest
from support import scripts
import torch
from hypothesis import given
from hypothesis import strategies as st
from engine import registry
from engine.llm import LLM
import io
from engine.output import EngineCoreOutput
from engine.request import NO_TOKEN_ID
from engine.request import Request
from engine.request import RequestStatus
from engine.request import SamplingParams
from engine.llm_engine import LLMEngine
from engine.model.loader import find_dtype
from engine.model.tokenizer import Tokenizer
from engine.sampling.defaults import SamplingDefaults
from engine.sampling.detokenizer import IncrementalDetokenizer
from engine.sampling.detokenizer import TokenBytes
from engine.sampling.detokenizer import decoded_token
from engine.sampling import prompt_logprobs
from engine.sampling import sampler
from engine.sampling.sampler import Sampler
from engine.sampling.sampler import SamplingState
from engine.sampling.sampler import adjust_logits
from engine.sampling.sampler import distribution
from engine.sampling.sampler import draw_tokens
from engine.sampling.sampler import uniforms
from lab import cli, naive
from lab.naive_sampler import reference_distribution

lesson, page = registry.lesson("04b_offline_engine"), cli.numbers("04b_offline_engine")
INF = math.inf


def state_of(params, prompt=(1,), output=(), seed=0, eos=()):
    request = Request("r", list(prompt), params)
    for token in output:
        request.append_output_token_id(token)
    return SamplingState(request, seed, eos)


# --- Distributions, exactly -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_of_random_requests_equals_the_reference(seed):
    rng, vocab = random.Random(seed), 24
    cases = [lesson.random_case(rng, vocab) for _ in range(150)]
    logits = 3 * torch.randn(len(cases), vocab, dtype=torch.float64)
    rows = [reference_distribution(row.tolist(), *case, [5]) for row, case in zip(logits, cases)]
    want = torch.tensor(rows, dtype=torch.float64)
    got = lesson.batch_distributions(cases, logits, eos=5)
    assert torch.equal(got > 0, want > 0), "another set of candidates"
    assert common.relative_error(got, want) < 1e-6


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3]), ({"top_k": 1}, [0]), ({"top_k": 2}, [0, 1, 2]), ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_k": -1}, [0, 1, 2, 3]), ({"top_p": 0.39}, [0]), ({"top_p": 0.41}, [0, 1, 2]),
        ({"top_p": 0.89}, [0, 1, 2]),
        ({"top_p": 0.91}, [0, 1, 2, 3]), ({"min_p": 0.3}, [0, 1, 2]), ({"min_p": 0.7}, [0]), ({"min_p": 1}, [0]),
        # top_p looks at what top_k left (0.4 and twice 0.25 of 0.9), and min_p at what temperature made of it
        ({"top_k": 2, "top_p": 0.44}, [0]), ({"top_k": 2, "top_p": 0.45}, [0, 1, 2]),
        ({"min_p": 0.5, "temperature": 0.5}, [0]), ({"min_p": 0.5, "temperature": 2}, [0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_cuts_by_hand(params, kept):
    """Probabilities 0.4, 0.25, 0.25, 0.1: ties stay together."""
    logits = torch.tensor([[0.4, 0.25, 0.25, 0.1]], dtype=torch.float64).log()
    probs = Sampler.probabilities(logits, [state_of(SamplingParams(**params))])[0]
    assert probs.nonzero().flatten().tolist() == kept and probs.sum() == pytest.approx(1)


@pytest.mark.parametrize("candidates", [1, 3, 8, 1000])
def test_top_p_is_the_same_however_many_candidates_it_looks_at(monkeypatch, candidates):
    logits, p = 2 * torch.randn(40, 64), torch.linspace(0.05, 1, 40, dtype=torch.float64)
    off = torch.ones(40), torch.zeros(40), torch.full((40,), 64)
    want = distribution(logits, *off, p)
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    assert torch.equal(distribution(logits, *off, p), want)
    flat = torch.zeros(1, 64)  # all equal: nothing can be cut
    assert torch.allclose(distribution(flat, *(x[:1] for x in off), p[:1]), torch.full((1, 64), 1 / 64))


def test_penalties_by_hand():
    """Logits 2, −2, 1; token 0 in the prompt, token 1 generated twice."""
    logits = torch.tensor([[2.0, -2.0, 1.0]])

    def adjusted(**params):
        return adjust_logits(logits.clone(), [state_of(SamplingParams(**params), [0], [1, 1])])[0].tolist()

    assert adjusted(repetition_penalty=2) == [1, -4, 1]
    assert adjusted(presence_penalty=0.5) == [2, -2.5, 1]
    assert adjusted(frequency_penalty=0.5) == [2, -3, 1]
    assert adjusted(repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25) == [1, -5.25, 1]
    assert adjusted(logit_bias={2: 3.5, 0: -1}) == [1, -2, 4.5]
    assert adjusted(logit_bias={0: -4}, repetition_penalty=2) == [-4, -4, 1], "the bias comes before the penalty"


@given(st.lists(st.lists(st.integers(0, 15), max_size=3), max_size=8))
def test_counts_kept_from_step_to_step_are_those_of_a_recount(steps):
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4)
    request = Request("r", [3, 3, 7], params)
    kept = SamplingState(request, 0)
    for tokens in steps:
        for token in tokens:
            request.append_output_token_id(token)
        logits = torch.randn(1, 16)
        fresh = SamplingState(request, 0)
        assert torch.equal(*(adjust_logits(logits.clone(), [state]) for state in (kept, fresh)))
    if steps:
        assert kept.counts.tolist() == [float(request.output_token_ids.count(t)) for t in range(16)]


def test_min_tokens_forbids_every_way_to_stop():
    params = SamplingParams(min_tokens=2, stop_token_ids=[3])
    for output, banned in (([], {3, 5}), ([1], {3, 5}), ([1, 1], set())):
        adjusted = adjust_logits(torch.zeros(1, 8), [state_of(params, [0], output, eos=[5])])[0]
        assert {i for i, x in enumerate(adjusted) if x == -INF} == banned


# --- Draws, exactly -------------------------------------------------------------------------------------------------


def split_mix(x):
    """SplitMix64's output function in plain integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@given(st.integers(-(2**63), 2**63), st.integers(0, 2**20))
def test_uniforms_are_split_mix(seed, step):
    mask = 2**64 - 1
    hashed = split_mix((split_mix(seed & mask) + step * 0x9E3779B97F4A7C15) & mask)
    (u,) = uniforms([seed], [step])
    assert u == (hashed >> 12) / 2**52 and 0 <= u < 1
    assert uniforms([1, seed, 2], [9, step, 9])[1] == u, "the company does not matter"


def test_split_mix_is_the_published_one():
    assert split_mix(0) == 0xE220A8397B1DCDAF  # the first output of the reference implementation for seed 0


def test_uniforms_are_uniform():
    """χ² over 64 bins, along one seed and across seeds; 63 degrees of freedom: mean 63, standard deviation 11.2."""
    for u in (uniforms([5] * 64_000, range(64_000)), uniforms(range(64_000), [3] * 64_000)):
        counts = np.bincount((u * 64).astype(int), minlength=64)
        assert ((counts - 1000) ** 2 / 1000).sum() < 63 + 5 * 11.2
    first, second = (uniforms([seed] * 20_000, range(20_000)) for seed in (1, 2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(20_000)


def test_every_token_gets_exactly_its_share_of_the_numbers():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.125, 0.25, 0.125, 0.0])
    share = lesson.swept(probs, 4096)
    assert torch.equal(share, probs.double())  # eighths fall between the points: no rounding at all
    random_probs = torch.randn(200).softmax(0)
    assert (lesson.swept(random_probs, 50_000) - random_probs).abs().max() <= 1 / 50_000 + 1e-6


@pytest.mark.parametrize("probs", [[0.0, 1.0, 0.0], [0.3, 0.7, 0.0], [0.0, 0.1, 0.2, 0.7, 0.0]])
def test_an_impossible_token_is_never_drawn(probs):
    probs = torch.tensor([probs] * 2)
    first, last = draw_tokens(probs, np.array([0.0, 1 - 2.0**-52])).tolist()
    possible = probs[0].nonzero().flatten().tolist()
    assert (first, last) == (possible[0], possible[-1])


def test_a_sampler_call_leaves_the_logits_alone():
    logits = torch.randn(2, 16)
    before = logits.clone()
    changing = SamplingParams(repetition_penalty=2, logit_bias={3: 5.0})
    Sampler()(logits, [state_of(changing), state_of(SamplingParams(temperature=0))])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(3))
def test_rows_do_not_see_each_other(seed):
    """The same request alone and in a batch, in any row, with any neighbours: the same token and log probabilities."""
    rng, vocab = random.Random(seed), 32
    cases = [lesson.random_case(rng, vocab) for _ in range(20)]
    for params, *_ in cases:
        params.logprobs = rng.choice([None, 0, 3])
    logits = 3 * torch.randn(20, vocab)
    states = lambda: [state_of(p, prompt, out, seed=i) for i, (p, prompt, out) in enumerate(cases)]  # noqa: E731
    tokens, logprobs = Sampler()(logits, states())
    order = rng.sample(range(20), 20)
    shuffled, _ = Sampler()(logits[order], [states()[i] for i in order])
    assert shuffled == [tokens[i] for i in order]
    for i, state in enumerate(states()):
        assert Sampler()(logits[i : i + 1], [state]) == ([tokens[i]], [logprobs[i]])


def test_log_probabilities_are_the_models_own():
    """Before any adjustment; the sampled token first, then the best; ranks from 1."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 3)
    raw = logits[0].log_softmax(0).tolist()
    asked = [
        SamplingParams(temperature=0, logit_bias={2: 100.0}, logprobs=2),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0, logprobs=3),
    ]
    tokens, found = Sampler()(logits, [state_of(p) for p in asked])
    assert tokens == [2, 0, 0]
    assert [[(t, lp.rank) for t, lp in row.items()] for row in found] == [
        [(2, 3), (0, 1), (1, 2)], [(0, 1)], [(0, 1), (1, 2), (2, 3)],
    ]  # fmt: skip
    for row in found:
        assert all(lp.logprob == pytest.approx(raw[token], abs=1e-6) for token, lp in row.items())


BROKEN_ROWS = {
    "nan": torch.tensor([0.0, math.nan, 1.0, 2.0]), "all nan": torch.full((4,), math.nan),
    "inf": torch.tensor([0.0, INF, 1.0, 2.0]), "nothing": torch.full((4,), -INF),
    "both infinities": torch.tensor([INF, -INF, -INF, -INF]),
}  # fmt: skip
ASKED = {
    "greedy": {"temperature": 0}, "random": {}, "top_p": {"top_p": 0.5}, "top_k": {"top_k": 2}, "min_p": {"min_p": 0.1},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 1},
    "bias": {"logit_bias": {0: 5.0, 1: -100.0}}, "logprobs": {"temperature": 0, "logprobs": 3},
    "drawn logprobs": {"logprobs": 20, "top_k": 1, "top_p": 0.1}, "allowed": {"allowed_token_ids": [0, 2]},
    "allowed logprobs": {"allowed_token_ids": [3], "logprobs": 0}, "early": {"min_tokens": 2, "logprobs": 1},
    "bad words": {"temperature": 0, "_bad_words_token_ids": [[1]]},
}  # fmt: skip


@pytest.mark.parametrize("row", BROKEN_ROWS)
@pytest.mark.parametrize("asked", ASKED)
def test_a_row_that_is_no_distribution_has_no_token_and_harms_no_other(asked, row):
    """Alone, and between two others, which get what they get without it."""
    params = SamplingParams(**ASKED[asked])
    states = lambda: [state_of(params, [0], [2], seed=i, eos=[1]) for i in range(3)]  # noqa: E731
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    tokens, found = Sampler()(logits, states())
    assert Sampler()(BROKEN_ROWS[row][None], states()[:1]) == ([NO_TOKEN_ID], [None])
    logits[1] = BROKEN_ROWS[row]
    assert Sampler()(logits, states()) == ([tokens[0], -1, tokens[2]], [found[0], None, found[2]])


def test_whoever_wants_more_log_probabilities_than_there_are_tokens_gets_those_there_are():
    logits = torch.randn(2, 11)
    asked = [SamplingParams(temperature=0, logprobs=20), SamplingParams(logprobs=11)]
    _, found = Sampler()(logits, [state_of(p) for p in asked])
    assert [sorted(row) for row in found] == [list(range(11))] * 2


# --- Text -----------------------------------------------------------------------------------------------------------


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
    ids = real_model[1].encode(lesson.TEXT)
    found = decoded(token_bytes, ids)
    assert found == ["Z", "o", "ë", " paid", " ", "5", " €", " for", "", "", " 寿", "", "司", ";", "", "", " 👩", "",
                     "\u200d", "", "", "🚀", " said", ":", " “", "bon", "”"]  # fmt: skip
    assert "".join(found) == lesson.TEXT == real_model[1].decode(ids)


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


# --- The engine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def llm(tiny_model, real_model):
    """A random model of 128 tokens with the real tokenizer: prompts are given as ids."""
    return LLM(tiny_model, tokenizer=real_model[1], max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=60,
                      block_size=4)  # fmt: skip


def ids(*tokens):
    return {"prompt_token_ids": list(tokens)}


def free(llm):
    """Every block is back, and nobody is remembered."""
    engine = llm.llm_engine
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    pool.check()
    engine.core.step()
    assert not engine.sequences and not engine.callers and not engine.core.runner.states
    return pool.num_free_blocks == pool.num_blocks - 1


def test_outputs_have_vllms_shape(llm):
    (output,) = llm.generate(ids(5, 6, 7), SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True))
    assert output.prompt is None and output.prompt_token_ids == [5, 6, 7] and output.finished
    (answer,) = output.outputs
    assert answer.index == 0 and len(answer.token_ids) == 4 and answer.finished()
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)
    assert answer.token_ids == naive.generate(llm.llm_engine.model, [5, 6, 7], 4)
    assert [next(iter(found)) for found in answer.logprobs] == answer.token_ids
    assert all(len(found) == 2 for found in answer.logprobs)
    sampled = [found[token] for found, token in zip(answer.logprobs, answer.token_ids)]
    assert answer.cumulative_logprob == pytest.approx(sum(lp.logprob for lp in sampled))
    decode = llm.llm_engine.tokenizer.decode
    assert answer.text == decode(answer.token_ids) and sampled[0].decoded_token == decode(answer.token_ids[:1])
    assert free(llm)


def test_defaults_are_vllms():
    p = SamplingParams()
    assert (p.temperature, p.top_p, p.top_k, p.max_tokens, p.n, p.logprobs) == (1.0, 1.0, 0, 16, 1, None)


def mixed(rng, count):
    """Requests that differ in everything."""
    out = []
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice([0, 0.7, 1.5]), top_p=rng.choice([1, 0.9]), top_k=rng.choice([0, 5]),
            min_p=rng.choice([0, 0.1]), repetition_penalty=rng.choice([1, 1.3]), seed=i, max_tokens=rng.randint(1, 14),
            ignore_eos=rng.random() < 0.5, logprobs=rng.choice([None, 1]), min_tokens=rng.choice([0, 1]),
            stop_token_ids=rng.sample(range(128), 5),
        )  # fmt: skip
        out.append((ids(*(rng.randrange(128) for _ in range(rng.randint(1, 20)))), params))
    return out


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_any_batch_gives_each_request_what_it_gets_alone(llm, seed):
    requests = mixed(random.Random(seed), 12)
    together = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    for output, (prompt, params) in zip(together, requests):
        (alone,) = llm.generate(prompt, params)
        got, want = output.outputs[0], alone.outputs[0]
        assert (got.token_ids, got.text, got.finish_reason, got.stop_reason) == (
            want.token_ids, want.text, want.finish_reason, want.stop_reason)  # fmt: skip
    assert free(llm)


@pytest.mark.parametrize("seed", range(2))
def test_preemption_changes_no_draw(tiny_model, real_model, seed):
    """The assembled scheduler on a pool that is too small: sampled requests are preempted, and draw the same."""

    make = lambda blocks: LLMEngine(  # noqa: E731
        tiny_model, real_model[1], max_model_len=40, max_num_seqs=6, max_num_batched_tokens=16, block_size=4,
        num_gpu_blocks_override=blocks,
    )  # fmt: skip
    requests, found, preempted = mixed(random.Random(seed), 10), [], 0
    for blocks in (200, 12):
        engine = make(blocks)
        for i, (prompt, params) in enumerate(requests):
            engine.add_request(str(i), prompt, params)
        done = {}
        while engine.has_unfinished_requests():
            known = list(engine.sequences.values())
            done |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
            preempted += blocks == 12 and sum(s.request.num_preemptions for s in known) > 0
        found.append(done)
    assert found[0] == found[1] and preempted


def test_n_samples_are_n_requests_with_seeds_in_a_row(llm):
    params = SamplingParams(n=3, seed=40, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate(ids(1, 2), params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2] and output.finished
    for i, answer in enumerate(output.outputs):
        (alone,) = llm.generate(ids(1, 2), SamplingParams(seed=40 + i, max_tokens=8, ignore_eos=True))
        assert answer.token_ids == alone.outputs[0].token_ids
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    assert free(llm)


def test_the_seed_minus_one_is_none(llm):
    """As in vLLM; but the second sample of seed −2 has a seed."""

    def ask(**asked):
        (output,) = llm.generate(ids(1, 2), SamplingParams(max_tokens=8, ignore_eos=True, **asked))
        return [answer.token_ids for answer in output.outputs]

    assert SamplingParams(seed=-1).seed is None and ask(seed=-1) != ask(seed=-1)
    first = ask(n=2, seed=-2)
    assert first == ask(n=2, seed=-2) and first[0] != first[1]


def test_the_engines_seed_decides_for_those_who_bring_none(tiny_model, real_model):
    def run(seed):
        llm = LLM(tiny_model, tokenizer=real_model[1], max_model_len=64, seed=seed, kv_cache_memory_bytes=1 << 20)
        outputs = llm.generate([ids(1)] * 3, SamplingParams(max_tokens=6, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]

    assert run(0) == run(0) != run(1)
    assert len(set(map(tuple, run(0)))) == 3


def check_scores(found, model, prompt, k):
    """Against every position of one pass without a cache: `log_softmax`, and ranks by counting."""
    assert found[0] is None and len(found) == len(prompt)
    positions = torch.arange(len(prompt), device=model.device)
    hidden = model.forward(torch.tensor(prompt, device=model.device), positions, naive.recompute)
    for row, token, entry in zip(model.logits(hidden).float().log_softmax(1).cpu(), prompt[1:], found[1:]):
        assert next(iter(entry)) == token and k <= len(entry) <= k + 1
        order = row.sort(descending=True)
        assert {t for t, x in entry.items() if x.rank <= k} == set(order.indices[:k].tolist())
        for t, x in entry.items():
            assert x.logprob == pytest.approx(float(row[t]), abs=2e-4) and x.rank == int((row >= row[t]).sum())


def scored(engine, prompts, stream=False, max_tokens=4):
    """{request id: its scores}; they are told once, and in a stream with the first token."""
    for i, (prompt, k) in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=k)
        engine.add_request(str(i), ids(*prompt), sampling, stream=stream)
    found, heard = {}, set()
    while engine.has_unfinished_requests():
        for output in engine.step():
            wanted = prompts[int(output.request_id)][1] is not None and output.request_id not in heard
            assert (output.prompt_logprobs is not None) == wanted
            heard.add(output.request_id)
            if output.prompt_logprobs is not None:
                assert output.request_id not in found
                found[output.request_id] = output.prompt_logprobs
    assert not engine.core.runner.prompts.scored
    return found


@pytest.mark.parametrize("rows", [1, 3, 256])
def test_prompts_are_scored_in_any_company(llm, monkeypatch, rows):
    monkeypatch.setattr(prompt_logprobs, "SCORED_ROWS", rows)
    rng = random.Random(rows)
    prompts = [
        ([rng.randrange(40, 128) for _ in range(n)], k) for n, k in ((1, 2), (2, 0), (9, 3), (12, None), (5, 20))
    ]
    found = scored(llm.llm_engine, prompts, stream=rows == 3)
    assert sorted(found) == ["0", "1", "2", "4"], "and nobody else"
    for name, scores in found.items():
        check_scores(scores, llm.llm_engine.model, *prompts[int(name)])
    decode = llm.llm_engine.tokenizer.decode
    token = prompts[2][0][1]
    assert found["2"][1][token].decoded_token == decode([token])
    assert free(llm)


@pytest.mark.parametrize("stream", [False, True])
def test_scored_tokens_are_told_in_their_context(llm, monkeypatch, stream):
    """Tokens and their alternatives, of a prompt and of answers; neither continues the other, nor a first token."""
    engine = llm.llm_engine
    alphabet = (b"\xe5", b"\xaf", b"\xbf", b"a")
    monkeypatch.setattr(engine, "token_bytes", spelled := WithSpecial({i: alphabet[i % 4] for i in range(128)}))
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=3, n=2, logprobs=3, prompt_logprobs=2)
    engine.add_request("x", [3, 0, 1, 2, 4, 5, 6, 0, 1], params, stream=stream)
    scores, tokens, entries = None, {0: [], 1: []}, {0: [], 1: []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            scores = scores or output.prompt_logprobs
            for piece in output.outputs:
                tokens[piece.index] += piece.token_ids
                entries[piece.index] += piece.logprobs
    prompt = output.prompt_token_ids
    told = [entry[t].decoded_token for t, entry in zip(prompt[1:], scores[1:])]
    assert told == ["", "", "寿", "", "", "寿", "", ""]
    completed = 0
    for ids, found in ((prompt[1:], scores[1:]), *((tokens[i], entries[i]) for i in (0, 1))):
        assert len(ids) == len(found)
        for i, entry in enumerate(found):
            for token, x in entry.items():
                assert x.decoded_token == decoded_token(spelled, token, ids[max(0, i - 4) : i])
                completed += x.decoded_token == "寿"
    assert completed > 4
    engine.add_request("y", [0, 1, 2, 3], SamplingParams(max_tokens=1, prompt_logprobs=0))
    (output,) = engine.step()
    told = [x.decoded_token for entry in output.prompt_logprobs[1:] for x in entry.values()]
    assert told == ["", "", "a"] and free(llm)


class WithSpecial(dict):
    special = frozenset()


def test_each_of_n_samples_comes_with_the_prompts_scores(llm):
    params = SamplingParams(n=3, max_tokens=3, prompt_logprobs=1, logprobs=1)
    (output,) = llm.generate(ids(4, 5, 6), params)
    check_scores(output.prompt_logprobs, llm.llm_engine.model, [4, 5, 6], 1)
    assert len(output.outputs) == 3 and llm.generate(ids(4, 5, 6))[0].prompt_logprobs is None
    assert free(llm)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_prompts_are_scored_in_chunks_and_across_preemptions(tiny_model, real_model, seed, stream):
    """Nothing is missing and nothing is told twice, whatever is computed again; and no cached block is skipped."""
    engine = LLMEngine(
        tiny_model, real_model[1], max_model_len=40, max_num_seqs=6, max_num_batched_tokens=7, block_size=4,
        num_gpu_blocks_override=12,
    )  # fmt: skip
    rng, common_part = random.Random(seed), list(range(12))
    prompts = [
        (common_part[: rng.choice([4, 12])] + [rng.randrange(128) for _ in range(rng.randint(1, 16))], 2)
        for _ in range(10)
    ]
    preempted, preempt = [], engine.core.scheduler._preempt_request

    def watch(request, *about):
        preempted.append(request.num_computed_tokens < request.num_prompt_tokens)
        preempt(request, *about)

    engine.core.scheduler._preempt_request = watch
    found = scored(engine, prompts, stream, max_tokens=12)
    assert len(found) == 10
    for name, scores in found.items():
        check_scores(scores, tiny_model, *prompts[int(name)])
    assert any(preempted), "in the middle of a prompt"


def test_whoever_leaves_in_the_middle_of_a_prompt_leaves_no_scores(tiny_model, real_model):
    engine = LLMEngine(tiny_model, real_model[1], max_model_len=40, max_num_seqs=2, max_num_batched_tokens=8,
                    num_gpu_blocks_override=20)  # fmt: skip
    engine.add_request("a", ids(*range(20)), SamplingParams(prompt_logprobs=1))
    engine.step()
    assert len(engine.core.runner.prompts.scored["a"]) == 9
    engine.abort_request(["a"])
    engine.core.step()
    assert not engine.core.runner.prompts.scored


def test_a_scored_prompt_reads_no_cache_but_fills_it():
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(skip_reading_prefix_cache=True).skip_reading_prefix_cache is True


def test_every_way_to_stop(llm):
    def finish(**params):
        return llm.generate(ids(28, 4), SamplingParams(temperature=0, **params))[0].outputs[0]

    tokens = finish(max_tokens=12, ignore_eos=True).token_ids
    third = tokens[2]
    at = tokens.index(third)
    a = finish(max_tokens=12, stop_token_ids=[third], ignore_eos=True)
    assert (a.token_ids, a.finish_reason, a.stop_reason) == (tokens[: at + 1], "stop", third)
    assert a.text == llm.llm_engine.tokenizer.decode(tokens[:at]) == "RZ", "the stop token is not in the text"
    a = finish(max_tokens=12, stop_token_ids=[third], ignore_eos=True, include_stop_str_in_output=True)
    assert a.text == llm.llm_engine.tokenizer.decode(tokens[: at + 1]) == "RZl"
    config = llm.llm_engine.model.config
    object.__setattr__(config, "eos_token_ids", (third,))
    try:
        a = finish(max_tokens=12)
        assert (a.token_ids, a.finish_reason, a.stop_reason) == (tokens[: at + 1], "stop", None)
        assert finish(max_tokens=12, ignore_eos=True).token_ids == tokens
        assert len(finish(max_tokens=12, min_tokens=at + 2).token_ids) >= at + 2
        unused = next(token for token in range(128) if token not in tokens)
        object.__setattr__(config, "eos_token_ids", (unused, third))  # a second one: to vLLM it is a stop token
        a = finish(max_tokens=12)
        assert (a.token_ids, a.finish_reason, a.stop_reason) == (tokens[: at + 1], "stop", third)
        assert finish(max_tokens=12, ignore_eos=True).token_ids == tokens
        assert len(finish(max_tokens=12, min_tokens=at + 2).token_ids) >= at + 2
        object.__setattr__(config, "eos_token_ids", (third,))
        object.__setattr__(config, "tokenizer_has_eos", False)  # only generation_config.json has one
        a = finish(max_tokens=12)
        assert (a.token_ids, a.finish_reason, a.stop_reason) == (tokens[: at + 1], "stop", third)
        assert finish(max_tokens=12, ignore_eos=True).token_ids == tokens
    finally:
        object.__setattr__(config, "eos_token_ids", ())
        object.__setattr__(config, "tokenizer_has_eos", True)
    a = finish(max_tokens=None)
    assert (len(a.token_ids), a.finish_reason) == (64 - 2, "length"), "the context is full"
    assert free(llm)


def test_a_stop_string_ends_a_request_on_the_real_model(real_model):
    model, tokenizer = real_model
    llm = LLM(model, tokenizer=tokenizer, max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=33)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    text = llm.generate("The capital of France is", greedy)[0].outputs[0].text
    stop = text[3:7]  # " Paris…": begins and ends inside tokens
    for include in (False, True):
        params = SamplingParams(temperature=0, max_tokens=6, stop=[stop], include_stop_str_in_output=include)
        (answer,) = llm.generate("The capital of France is", params)[0].outputs
        end = text.index(stop) + (len(stop) if include else 0)
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (text[:end], "stop", stop)
        assert tokenizer.decode(answer.token_ids).find(stop) >= 0
        assert free(llm), "the core hears of an end that only text has"
        params = dataclasses.replace(params, max_tokens=len(answer.token_ids))  # the last token completes it
        assert llm.generate("The capital of France is", params)[0].outputs == [answer] and free(llm)
    (reply,) = llm.chat([{"role": "user", "content": "Say hi."}], SamplingParams(temperature=0, max_tokens=6))
    assert reply.prompt.endswith("assistant\n") and reply.outputs[0].text
    assert reply.outputs[0].finish_reason in ("stop", "length")
    several = llm.chat([[{"role": "user", "content": "Say hi."}]] * 2, SamplingParams(temperature=0, max_tokens=3))
    assert [o.outputs[0].token_ids for o in several] == [reply.outputs[0].token_ids[:3]] * 2
    assert free(llm)


def test_a_stream_adds_up_to_the_answer(llm):
    engine = llm.llm_engine
    params = SamplingParams(n=2, seed=3, max_tokens=9, ignore_eos=True, logprobs=1, stop=["never so long a text"])
    (whole,) = llm.generate(ids(1, 2, 3), params)
    engine.add_request("s", ids(1, 2, 3), params, stream=True)
    parts, finished = {0: [], 1: []}, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            finished.append(output.finished)
            for answer in output.outputs:
                parts[answer.index].append(answer)
    assert finished.count(True) == 1 and finished[-1]
    for answer in whole.outputs:
        seen = parts[answer.index]
        assert len(seen) == 9 and "".join(p.text for p in seen) == answer.text
        assert [token for p in seen for token in p.token_ids] == answer.token_ids
        assert [found for p in seen for found in p.logprobs] == answer.logprobs
        assert [p.finish_reason for p in seen] == [None] * 8 + ["length"]
    assert free(llm)


def test_a_request_that_fails_has_no_token_to_report(llm, monkeypatch):
    """As one whose keys and values did not arrive (lesson 08)."""
    engine = llm.llm_engine
    engine.add_request("f", ids(1, 2, 3), SamplingParams(max_tokens=9, logprobs=1), stream=True)
    (request_id,) = engine.sequences
    engine.core.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
    lost = EngineCoreOutput(request_id, [], "error", "lost")
    monkeypatch.setattr(engine.core, "step", lambda: [lost])
    (answer,) = engine.step()[0].outputs
    assert (answer.finish_reason, answer.stop_reason, answer.logprobs) == ("error", "lost", [])
    assert not engine.has_unfinished_requests()


def test_aborting_frees_everything(llm):
    engine = llm.llm_engine
    for name in ("a", "b", "c"):
        engine.add_request(name, ids(1, 2, 3), SamplingParams(n=3, max_tokens=30, ignore_eos=True), stream=True)
    for _ in range(3):
        engine.step()
    engine.abort_request(["a", "c", "c", "unknown"])
    heard = {output.request_id for _ in range(40) for output in engine.step()}
    assert heard == {"b"} and free(llm)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        (5, "prompt"), ({"text": "x"}, "prompt"), ({"prompt_token_ids": "x"}, "prompt"), (None, "prompt"),
        (["x"], "prompt"), (ids(128), "prompt_token_ids"), (ids(-1), "prompt_token_ids"),
        (ids("a"), "prompt_token_ids"), (ids(True), "prompt_token_ids"), (ids(), "empty"),
        (ids(*[1] * 64), "maximum model length"), ("", "empty"),
        ("a tokenizer may know more", "prompt: token id"), ({"prompt": "than its model"}, "prompt: token id"),
    ],
)  # fmt: skip
def test_wrong_prompts_are_refused_and_leave_nothing(llm, prompt, word):
    with pytest.raises(common.InputError, match=word):
        llm.generate([ids(1, 2), prompt], SamplingParams(max_tokens=2))
    assert free(llm)
    assert llm.generate(ids(1), SamplingParams(max_tokens=2, ignore_eos=True))[0].finished, "the engine lives"


def test_prompts_of_token_ids(llm):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    found = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        for prompts in ([ids(5, 6), ids(7)], [[5, 6], [7]], [[5, 6], ids(7)], [5, 6], [7])
    ]
    assert found[0] == found[1] == found[2] == found[3] + found[4] and len(found[0]) == 2
    assert llm.generate([], params) == []


def test_priorities(tiny_model, real_model, monkeypatch):
    """One seat: by priority, then by arrival; outputs keep their places."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for policy, order in (("priority", [1, 3, 0, 2]), ("fcfs", [0, 1, 2, 3])):
        llm = LLM(tiny_model, tokenizer=real_model[1], max_num_seqs=1, scheduling_policy=policy,
                         max_model_len=64, num_gpu_blocks_override=5)  # fmt: skip
        done, step = [], llm.llm_engine.step
        monkeypatch.setattr(llm.llm_engine, "step", lambda step=step, done=done: done.extend(found := step()) or found)
        outputs = llm.generate([[5], [6], [7], [8]], params, priority=[0, -2, 0, -1])
        assert [output.prompt_token_ids[0] for output in outputs] == [5, 6, 7, 8]
        assert [output.prompt_token_ids[0] - 5 for output in done] == order
        for wrong in ([0, 1], 0.5, [0, 1, 2, "high"]):
            with pytest.raises(common.InputError, match="priority"):
                llm.generate([[5], [6], [7], [8]], params, priority=wrong)
        assert free(llm)


def test_wrong_calls(llm, tiny_model, real_model):
    for params, word in (([SamplingParams()], "sampling_params"), ("greedy", "sampling_params"),
                         (SamplingParams(logit_bias={128: 1.0}), "logit_bias"),
                         (SamplingParams(stop_token_ids=[128]), "stop_token_ids"),
                         (SamplingParams(stop_token_ids=list(range(128)), min_tokens=1), "min_tokens")):  # fmt: skip
        with pytest.raises(common.InputError, match=word):
            llm.generate([ids(1), ids(2)], params)
    with pytest.raises(common.InputError, match="structured_outputs"):
        llm.generate(ids(1), SamplingParams(structured_outputs=3))
    for about, word in (({"cache_salt": 3}, "cache_salt 3"), ({"priority": "a"}, "priority 'a'"),
                        ({"priority": 2**63}, "priority"), ({"priority": True}, "priority")):  # fmt: skip
        with pytest.raises(common.InputError, match=word):
            llm.llm_engine.add_request("x", ids(1), **about)
    with pytest.raises(common.InputError, match="cache_salt 3"):
        llm.llm_engine.add_request("x", ids(1) | {"cache_salt": 3})
    with pytest.raises(TypeError, match=r"add_request\(\) got an unexpected keyword argument 'foo'"):
        llm.llm_engine.add_request("x", ids(1), foo=1)
    for nothing in (None, 5, 0.5, b"bytes"):
        with pytest.raises(common.InputError, match=f"prompt {nothing!r}: must be a string"):
            llm.generate(nothing)
        with pytest.raises(common.InputError, match="chat template"):
            llm.chat(nothing)
    assert free(llm)
    llm.llm_engine.add_request("x", ids(1))
    with pytest.raises(common.InputError, match="'x'"):
        llm.llm_engine.add_request("x", ids(1))
    llm.llm_engine.abort_request(["x"])
    for arguments, word in (
        ({"max_model_len": 0}, "max_model_len"), ({"max_model_len": 513}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"), ({"max_num_seqs": "4"}, "max_num_seqs"),
        ({"block_size": 1.5}, "block_size"), ({"dtype": "int8"}, "dtype"),
        ({"num_gpu_blocks_override": 3}, "num_blocks"), ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes"), ({"scheduling_policy": "lifo"}, "policy"),
        ({"max_num_batched_tokens": 10, "max_num_seqs": 11}, "max_num_batched_tokens"),
        ({"max_num_seq": 4}, "max_num_seq"), ({"max_num_seqs": 1 << 17}, "at most 65536"),
        ({"api_server_count": 1}, "is no argument of an LLM"),
    ):  # fmt: skip
        model = None if word == "dtype" else tiny_model
        with pytest.raises(common.InputError, match=word):
            LLM(model, tokenizer=real_model[1], **arguments)
    with pytest.raises(common.InputError, match="tokenizer"):
        LLM(tiny_model)
    with pytest.raises(common.InputError, match="tokenizer 'x'"):
        LLM(tiny_model, tokenizer="x")
    with pytest.raises(common.InputError, match="no-such-folder"):
        LLM("no-such-folder")


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_without_bf16_computes_in_fp16(has_bf16, monkeypatch):
    assert find_dtype("auto") == (torch.bfloat16 if common.HAS_GPU else torch.float32)
    monkeypatch.setattr(common, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: emulated or has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    assert find_dtype("auto") == (torch.bfloat16 if has_bf16 else torch.float16)
    assert find_dtype("float16") == torch.float16 and find_dtype(torch.float32) == torch.float32
    if has_bf16:
        assert find_dtype("bfloat16") == torch.bfloat16
        return
    for dtype in ("bfloat16", torch.bfloat16):
        with pytest.raises(common.InputError, match="T4 has no bf16; take float16"):
            find_dtype(dtype)


@pytest.mark.parametrize("temperature", [1e-5, 1, 2])
def test_the_extremes_of_what_is_allowed_leave_a_distribution(llm, temperature):
    """What is no number in one row would be a token that does not exist, and the end of everybody's engine."""
    extremes = [{"repetition_penalty": 0.01}, {"repetition_penalty": 100}, {"logit_bias": {1: 100.0, 2: -100.0}},
                {"top_k": 10**30}, {"top_p": 1e-300}, {"min_p": 1}, {"presence_penalty": -2, "frequency_penalty": -2},
                {"stop_token_ids": list(range(1, 128)), "min_tokens": 3},
                {"repetition_penalty": 0.01, "logit_bias": {1: 100.0}, "frequency_penalty": 2}]  # fmt: skip
    params = [SamplingParams(temperature=temperature, max_tokens=4, seed=i, **one) for i, one in enumerate(extremes)]
    outputs = [output.outputs[0].token_ids for output in llm.generate([ids(1, 2, 3)] * len(params), params)]
    assert all(tokens and max(tokens) < 128 for tokens in outputs) and free(llm)


def test_the_pool_has_the_size_that_was_asked_for(tiny_model, real_model):
    def blocks(**arguments):
        llm = LLM(tiny_model, tokenizer=real_model[1], **arguments)
        return llm.llm_engine.core.runner.cache.layers[0].shape[1]

    one = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, layers, slots, heads, size, bytes
    assert blocks(kv_cache_memory_bytes=100 * one, max_model_len=64) == 101
    assert blocks(kv_cache_memory_bytes=1, max_model_len=64) == 1 + 4, "at least one sequence of max_model_len"
    assert blocks(num_gpu_blocks_override=77) == 77


# --- The source's example -------------------------------------------------------------------------------------------

EXAMPLE = """
from vllm import LLM, SamplingParams
prompts = ["Hello, my name is", "The president of the United States is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
def main():
    llm = LLM(model="TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(output.prompt, "|", output.outputs[0].text.encode(), "|", len(output.outputs[0].token_ids))
    print(type(llm.llm_engine.core.scheduler).__module__)
if __name__ == "__main__":
    main()
"""


LOCAL = f"""
import sys
sys.path.insert(0, {str(common.HERE)!r})
import common
from engine.model import folders
folder = folders.model_folder
folders.model_folder = lambda name: folder(None) if name == "TinyLlama/TinyLlama-1.1B-Chat-v1.0" else folder(name)
sys.path.remove({str(common.HERE)!r})
"""
EXAMPLE_JOB = (("the offline example",), [sys.executable, "-c", LOCAL + EXAMPLE])


def test_the_offline_example_runs_as_printed(real_model):
    """From the repository root, with nothing but the model's name resolved to the local folder."""
    done = scripts.get(EXAMPLE_JOB)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, module = done.stdout.splitlines()
    assert first.startswith("Hello, my name is | ") and second.startswith("The president of the United States is | ")
    assert 1 <= int(first.split("|")[-1]) <= 16 and module == "engine.core.scheduler"


def test_the_package_hands_on_two_names():
    code = "import vllm; vllm.nonsense"
    done = subprocess.run([sys.executable, "-c", code], cwd=common.ROOT, capture_output=True, text=True)
    assert "AttributeError" in done.stderr and "nonsense" in done.stderr and "torch" not in done.stderr


# --- The widget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_state_of_the_widget(every):
    for values in list(itertools.product(*page.WIDGET_CHOICES.values()))[::every]:
        params = dict(zip(page.WIDGET_CHOICES, values))
        if params["seed"]:
            continue
        trace = page.simulate(params)
        assert [s["stage"] for s in trace["stages"]] == ["penalties", "temperature", "min_p", "top_k", "top_p"]
        for stage in trace["stages"]:
            assert sum(stage["probs"]) == pytest.approx(1)
            assert stage["kept"] == [i for i, p in enumerate(stage["probs"]) if p > 0]
        for before, after in zip(trace["stages"][1:], trace["stages"][2:]):
            assert set(after["kept"]) <= set(before["kept"])
        penalty = page.PENALTIES[params.pop("penalty")]
        chosen = SamplingParams(**params, **penalty)
        want = reference_distribution(lesson.LOGITS, chosen, page.PROMPT, page.OUTPUT)
        assert trace["stages"][-1]["probs"] == pytest.approx(want, abs=1e-6)
        assert all(want[i] > 0 for i in trace["draws"]) and len(trace["draws"]) == page.NUM_DRAWS


def test_the_words_of_the_story_are_those_of_the_simulation():
    for temperature, suffix in ((0.5, "_cold"), (1, ""), (2, "_hot")):
        for name, cut in (("top_p_75", {"top_p": 0.75}), ("min_p_20", {"min_p": 0.2})):
            probs = lesson.shaped(temperature, **cut)
            assert probs == page.last_stage(temperature=temperature, **cut)["probs"]
            assert sum(p > 0 for p in probs) == page.facts()["kept"][name + suffix]


def test_a_broken_sampler_breaks_the_simulation(monkeypatch):
    right = page.simulate(page.WIDGET_DEFAULT)
    original = draw_tokens
    monkeypatch.setattr(page, "draw_tokens", lambda probs, u: original(probs, 1 - u))
    assert page.simulate(page.WIDGET_DEFAULT)["draws"] != right["draws"]


def test_the_bug_of_decoding_token_by_token_is_caught(real_model, capsys):
    with pytest.raises(common.CheckFailed, match="pieces"):
        lesson.main(["--decode-tokens", "--figure", "unused"])


def test_greedy_samples_of_the_script_are_one(real_model, monkeypatch):
    """Two would be the same and are refused, but its --temperature may be 0."""
    asked = []

    def generate(self, prompts, params):
        asked.append([one.n for one in params])
        raise InterruptedError

    monkeypatch.setattr(lesson.loader, "load", lambda *_: real_model)
    monkeypatch.setattr(LLM, "generate", generate)
    with pytest.raises(InterruptedError):
        lesson.main(["--temperature", "0"])
    assert asked == [[1, 1, 1, 1]]


def test_a_model_without_some_characters_and_without_a_template_is_no_fault(tiny_model, tmp_path, monkeypatch, capsys):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    printable = [*map(chr, range(33, 127)), "Ġ"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(printable)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(lesson.TEXT)) == "Zo paid 5  for ;  said: bon"
    monkeypatch.setattr(lesson.loader, "load", lambda *_: (tiny_model, tokenizer))
    monkeypatch.setattr(page, "draw", lambda *_: None)
    lesson.main(["--figure", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "✓ the pieces make up the text" in shown and "SKIPPED chat: this model has no chat template" in shown


# --- What a model wishes for ------------------------------------------------------------------------------------------

WISHES = {"temperature": 0.25, "top_k": 7, "do_sample": False, "max_new_tokens": 5, "min_p": None, "eos_token_id": 2}


@pytest.mark.parametrize(("source", "override", "params", "limit"), [
    ("auto", None, {"temperature": 0.25, "top_k": 7, "max_tokens": 5}, None),
    ("auto", {"temperature": 1.5, "top_p": 0.5}, {"temperature": 1.5, "top_p": 0.5, "top_k": 7, "max_tokens": 5}, None),
    ("auto", '{"max_new_tokens": 3}', {"temperature": 0.25, "top_k": 7, "max_tokens": 3}, 3),
    ("auto", {"temperature": None}, {"top_k": 7, "max_tokens": 5}, None),
    ("auto", {"nonsense": 1}, {"temperature": 0.25, "top_k": 7, "max_tokens": 5}, None),  # vLLM passes over it, too
    ("vllm", None, {}, None),
    ("vllm", {"top_k": 3, "max_new_tokens": 4}, {"top_k": 3, "max_tokens": 4}, 4),
    ("FOLDER", None, {"repetition_penalty": 1.25, "max_tokens": 9}, 9),
    ("FOLDER", {"max_new_tokens": 4}, {"repetition_penalty": 1.25, "max_tokens": 4}, 4),
])  # fmt: skip
def test_sampling_defaults_are_those_of_vllm(tmp_path, source, override, params, limit):
    """`ModelConfig.get_diff_sampling_param`, and the servers' `override_max_tokens`."""
    (tmp_path / "other").mkdir()
    (tmp_path / "generation_config.json").write_text(json.dumps(WISHES))
    (tmp_path / "other" / "generation_config.json").write_text('{"repetition_penalty": 1.25, "max_new_tokens": 9}')
    source = str(tmp_path / "other") if source == "FOLDER" else source
    found = SamplingDefaults.of(tmp_path, source, override)
    assert (found.params, found.max_tokens_limit) == (params, limit)


def test_sampling_defaults_that_cannot_be(tmp_path):
    for override in ("[1]", "{", 5, ["x"]):
        with pytest.raises(common.InputError, match=r"override_generation_config .*: must be a JSON object"):
            SamplingDefaults.of(tmp_path, "auto", override)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(common.InputError, match="generation_config: temperature 'hot'"):
        SamplingDefaults.of(tmp_path, "auto", None)
    assert SamplingDefaults.of(tmp_path, "auto", {"temperature": 1}).params == {"temperature": 1}
    with pytest.raises(common.InputError, match=r"generation_config\.json: no such file"):
        SamplingDefaults.of(tmp_path, str(tmp_path / "nowhere"), None)


def test_who_says_nothing_gets_what_the_model_wishes(tiny_model, real_model):
    about = {"tokenizer": real_model[1], "max_model_len": 64, "max_num_seqs": 2, "num_gpu_blocks_override": 20}
    wished = {"temperature": 0, "max_new_tokens": 3}
    llm = LLM(tiny_model, override_generation_config=wished, **about)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
    (silent,) = llm.generate(ids(28, 4))
    (greedy,) = llm.generate(ids(28, 4), SamplingParams(temperature=0, max_tokens=3))
    assert silent.outputs[0].token_ids == greedy.outputs[0].token_ids and len(greedy.outputs[0].token_ids) == 3
    assert len(llm.generate(ids(28, 4), SamplingParams(seed=1))[0].outputs[0].token_ids) == 16, "who says something"
    assert LLM(tiny_model, **about).get_default_sampling_params() == SamplingParams()

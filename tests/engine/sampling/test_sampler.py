"""Distributions exactly, draws exactly: what each request asks for, applied to a batch at once."""

from __future__ import annotations

import common

import functools
import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import registry
from engine.request import NO_TOKEN_ID, Request, SamplingParams
from engine.sampling import sampler
from engine.sampling.sampler import Sampler, SamplingState, adjust_logits, distribution, draw_tokens, uniforms
from lab.naive_sampler import reference_distribution
from support.cases import named

tour = registry.lesson("04b_offline_engine")
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
    cases = [tour.random_case(rng, vocab) for _ in range(150)]
    logits = 3 * torch.randn(len(cases), vocab, dtype=torch.float64)
    rows = [reference_distribution(row.tolist(), *case, [5]) for row, case in zip(logits, cases)]
    want = torch.tensor(rows, dtype=torch.float64)
    got = tour.batch_distributions(cases, logits, eos=5)
    assert torch.equal(got > 0, want > 0), "another set of candidates"
    assert common.relative_error(got, want) < 1e-6


CUTS = [
    ({}, [0, 1, 2, 3]), ({"top_k": 1}, [0]), ({"top_k": 2}, [0, 1, 2]), ({"top_k": 3}, [0, 1, 2]),
    ({"top_k": 9}, [0, 1, 2, 3]),
    ({"top_k": -1}, [0, 1, 2, 3]), ({"top_p": 0.39}, [0]), ({"top_p": 0.41}, [0, 1, 2]),
    ({"top_p": 0.89}, [0, 1, 2]),
    ({"top_p": 0.91}, [0, 1, 2, 3]), ({"min_p": 0.3}, [0, 1, 2]), ({"min_p": 0.7}, [0]), ({"min_p": 1}, [0]),
    # top_p looks at what top_k left (0.4 and twice 0.25 of 0.9), and min_p at what temperature made of it
    ({"top_k": 2, "top_p": 0.44}, [0]), ({"top_k": 2, "top_p": 0.45}, [0, 1, 2]),
    ({"min_p": 0.5, "temperature": 0.5}, [0]), ({"min_p": 0.5, "temperature": 2}, [0, 1, 2, 3]),
]  # fmt: skip


def test_cuts_by_hand():
    """Probabilities 0.4, 0.25, 0.25, 0.1: ties stay together."""
    for params, kept in CUTS:
        with named(params, kept):
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
    share = tour.swept(probs, 4096)
    assert torch.equal(share, probs.double())  # eighths fall between the points: no rounding at all
    random_probs = torch.randn(200).softmax(0)
    assert (tour.swept(random_probs, 50_000) - random_probs).abs().max() <= 1 / 50_000 + 1e-6


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
    cases = [tour.random_case(rng, vocab) for _ in range(20)]
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


def three_states(params):
    return [state_of(params, [0], [2], seed=i, eos=[1]) for i in range(3)]


def test_a_row_that_is_no_distribution_has_no_token_and_harms_no_other():
    """Alone, and between two others, which get what they get without it."""
    for asked, row in itertools.product(ASKED, BROKEN_ROWS):
        with named(asked, row):
            states = functools.partial(three_states, SamplingParams(**ASKED[asked]))
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

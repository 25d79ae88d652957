"""Lesson 07: the rule is exact, the kernels follow it, and an engine with drafts writes what one without writes."""

from __future__ import annotations

import common

import contextlib
import copy
import functools
import itertools
import operator
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import registry
from engine.config import VllmConfig
from engine.core.scheduler import one_by_one
from engine.llm import LLM
from engine.llm_engine import LLMEngine
from engine.model import llama, loader
from engine.output import EngineCoreOutput
from engine.request import Request, RequestStatus, SamplingParams
from engine.sampling.sampler import Sampler, SamplingState, uniforms
from engine.spec_decode.verifier import DraftVerifier
from lab import cli, drafts_ahead, naive, roofline, timing
from support.broken import break_class
from support.close import assert_close

lesson = registry.lesson("07_spec_decode")
from engine.core.scheduler import Scheduler
from engine.core.stats import SpecDecodingStats
from engine.spec_decode import drafters
from engine.spec_decode.drafters import Draft, DraftContext, Drafter, SpeculativeConfig
from lab import enumeration
from support.cases import named
from support.close import Close
from support.jobs import prompts_and_params, ruled
from support.oracle import Oracle

page = cli.numbers("07_spec_decode")
PAIRS = list(page.PAIRS.values())


def test_a_model_without_a_chat_template_is_asked_the_bare_question(real_model, monkeypatch):
    """In the story and in the benchmark."""
    tokenizer, seen = copy.copy(real_model[1]), []
    tokenizer.chat_template = None

    def ask(model, prompt, *args):
        seen.append(prompt)
        raise common.CheckFailed("asked")

    monkeypatch.setattr(lesson, "generate", ask)
    monkeypatch.setattr(page, "serve", ask)
    monkeypatch.setattr(page, "make_engine", lambda *args, **options: None)
    monkeypatch.setattr(page, "step_costs", lambda *args: {})
    with pytest.raises(common.CheckFailed, match="asked"):
        lesson.tell_model(SimpleNamespace(k=3), None, tokenizer)
    with pytest.raises(common.CheckFailed, match="asked"):
        page.benchmark(None, tokenizer)
    bare = tokenizer.encode(page.TASKS["copy"])
    assert seen == [bare, [bare]]


# --- The rule -------------------------------------------------------------------------------------------------------


def test_adversarial_pairs_by_enumeration():
    for pair, K in itertools.product(PAIRS, range(6)):
        with named(pair, K):
            p, q = pair
            found = enumeration.exact_output(lambda _, p=p: p, lambda _, q=q: q, K, length=3)
            for output in itertools.product(range(3), repeat=3):
                assert abs(found.get(output, 0.0) - p[output[0]] * p[output[1]] * p[output[2]]) < 1e-12


def test_only_rounding_is_forgiven(tiny_model):
    """Two answers may part where u lies on the edge between both tokens, or where two logits tie; nowhere else."""
    prompt, seen = [3, 1, 4], set()
    params = [SamplingParams(temperature=0.7, seed=seed) for seed in range(300)]
    logits = tiny_model.logits(tiny_model.forward(
        torch.tensor(prompt, device=tiny_model.device), torch.arange(3, device=tiny_model.device),
        naive.recompute)[-1:])[0].double().cpu()  # fmt: skip
    edges = (logits / 0.7).softmax(0).cumsum(0).tolist()
    for each in params:
        u = uniforms([each.seed], [0])[0]
        drawn = next(x for x, edge in enumerate(edges) if edge > u)
        for other in {max(drawn - 1, 0), min(drawn + 1, 127), 127 - drawn} - {drawn}:
            close = all(abs(edges[x] - u) <= 1e-3 for x in (min(drawn, other), max(drawn, other) - 1))
            pair = [drawn, 5, 6], [other, 7, 8]
            assert enumeration.same_but_for_rounding(tiny_model, prompt, each, *pair, tolerance=1e-3) == close
            seen.add(close)
    assert seen == {True, False}
    same = functools.partial(enumeration.same_but_for_rounding, tiny_model, prompt, params[0])
    assert same([1, 2], [1, 2]) and not same([1, 2], [1, 2, 3])
    greedy = SamplingParams(temperature=0)
    best, second = logits.topk(2).indices.tolist()
    assert not enumeration.same_but_for_rounding(tiny_model, prompt, greedy, [best], [second])
    gap = (logits[best] - logits[second]).item() / logits.abs().max().item()
    assert enumeration.same_but_for_rounding(tiny_model, prompt, greedy, [best], [second], tolerance=gap * 1.01)


def test_rounding_is_judged_where_two_answers_part(tiny_model):
    """Behind what both have written, with the random number of that place; a tie is one within the logits' size."""
    ids = torch.tensor([3, 1, 4, 9, 9], device=tiny_model.device)
    hidden = tiny_model.forward(ids, torch.arange(5, device=ids.device), naive.recompute)
    logits = tiny_model.logits(hidden[-1:])[0].double().cpu()
    best, second = logits.topk(2).indices.tolist()
    edges = (logits / 0.7).softmax(0).cumsum(0)
    u = uniforms([5], [2])[0]
    drawn = int((edges > u).nonzero()[0])
    gap = ((logits[best] - logits[second]) / logits.abs().max()).item()
    cases = [(SamplingParams(temperature=0), best, second, gap),
             (SamplingParams(temperature=0.7, seed=5), drawn, drawn + 1, edges[drawn] - u)]  # fmt: skip
    for params, a, b, apart in cases:
        for tolerance, same in ((1.01 * abs(apart), True), (0.99 * abs(apart), False)):
            answers = [9, 9, a, 7], [9, 9, b, 8]
            assert enumeration.same_but_for_rounding(tiny_model, [3, 1, 4], params, *answers, tolerance) == same


def test_models_with_a_past_and_sampling_parameters_by_enumeration():
    target = enumeration.toy_model(1, top_k=2)
    p, q = target(()), enumeration.avoid(target)(())
    assert sum(map(operator.mul, p, q)) == 0 and sum(q) == 1, "nothing that this drafter says can stand"
    errors, outputs = enumeration.all_errors(range(5))
    assert max(errors) < 1e-12 and outputs == 6480
    assert any(p == 0 for p in enumeration.toy_model(1, top_k=2)(()))


@pytest.mark.parametrize(("right", "K", "places"), [(True, 2, [0, 1, 3, 4, 6]), (False, 2, range(7)), (True, 0, [])])
def test_rounds_are_enumerated_as_they_are_drafted(right, K, places):
    """Whoever is always right is not asked for the bonus; behind a draft that fell, K begin again."""
    p, asked = [1.0, 0.0, 0.0], set()

    def drafter(prefix):
        asked.add(len(prefix))
        return p if right else p[::-1]

    assert enumeration.exact_output(lambda _: p, drafter, K, length=7) == {(0,) * 7: 1.0}
    assert asked == {*places}


def test_toy_models_differ_by_all_tokens_before_and_have_every_setting():
    plain = enumeration.toy_model(1)
    assert len({plain(prefix) for prefix in itertools.product(range(3), repeat=2)}) == 9
    for prefix in [(), (0,), (1,), (2,)]:
        p = plain(prefix)
        squared, low = [x * x for x in p], min(p)
        want = {"plain": p, "temperature 0.5": squared, "top_k 2": [x * (x > low) for x in p],
                "top_p 0.7": [x * (sum(y for y in p if y > x) < 0.7) for x in p]}  # fmt: skip
        assert want.keys() == enumeration.SETTINGS.keys()
        for name, params in enumeration.SETTINGS.items():
            found = enumeration.toy_model(1, **params)(prefix)
            assert found == pytest.approx([x / sum(want[name]) for x in want[name]], abs=1e-6)


def test_drafters_that_are_sure_and_that_are_wrong():
    assert enumeration.one_hot(lambda _: [0.2, 0.5, 0.3])(()) == [0, 1, 0]
    assert enumeration.avoid(lambda _: [0.0, 1.0, 0.0])(()) == [0.5, 0, 0.5]
    assert enumeration.avoid(lambda _: [0.2, 0.5, 0.3])(()) == [1, 0, 0]  # it could say anything


@pytest.mark.parametrize("off", [0.01, -0.01])
@pytest.mark.parametrize("output", [(0, 0, 0, 0), (1, 2, 0, 1), (2, 2, 2, 2)])
def test_one_wrong_probability_is_the_largest_error(monkeypatch, output, off):
    target = enumeration.toy_model(1)
    right = enumeration.exact_output(target, target, K=1, length=4)
    monkeypatch.setattr(enumeration, "exact_output", lambda *args: {**right, output: right[output] + off})
    assert enumeration.largest_error(target, target, 1) == pytest.approx(0.01)


def test_every_setting_meets_every_drafter(monkeypatch):
    seen = []
    monkeypatch.setattr(enumeration, "largest_error", lambda *args: seen.append(args) or 0.0)
    errors, outputs = enumeration.all_errors([0, 3])
    assert (len(errors), outputs) == (32, 32 * 81) and [K for _, _, K in seen] == [0, 3] * 16
    for i, params in enumerate(enumeration.SETTINGS.values()):
        (target, other, _), (_, same, _), (_, sure, _), (_, wrong, _) = seen[8 * i : 8 * i + 8 : 2]
        p = target(())
        assert p == enumeration.toy_model(1, **params)(()) and same is target
        assert other(()) != p and max(sure(())) == 1
        assert wrong(()) == enumeration.avoid(target)(())


def test_a_ragged_batch_has_rows_of_every_kind():
    """Tests of the kernels see what is in it, and nothing else."""
    batch = enumeration.ragged_batch(40, [2, 1, 3, 0, 2, 1] * 20, seed=0)
    p, drafts, rows = (batch[name] for name in ("scores", "draft_token_ids", "draft_rows"))
    for b, (start, end) in enumerate(itertools.pairwise(batch["cu_num_sampled_tokens"].tolist())):
        assert drafts[end - 1] == -1 and (drafts[start : end - 1] >= 0).all()
        assert batch["is_greedy"][start:end].tolist() == [b % 3 == 0] * (end - start)
        assert rows[start:end].tolist() == ([*range(start, end - 1), -1] if b % 3 == 2 else [-1] * (end - start))
    for share in ((p == batch["draft_probs"]).all(1), (p.argmax(1) == drafts)[drafts >= 0]):
        assert 0.4 < share.float().mean() < 0.8, "drafts stand and fall, where a q is p and where it is not"


def test_the_enumeration_can_fail():
    target, drafter = enumeration.toy_model(1), enumeration.toy_model(2)
    found = enumeration.exact_output(target, drafter, K=2, length=2)
    other = enumeration.toy_model(3)
    assert max(abs(found[x, y] - other(())[x] * other((x,))[y]) for x in range(3) for y in range(3)) > 0.01


def test_the_naive_round_writes_what_is_enumerated():
    """In sixteenths, on a grid of which every cell has one answer: no error at all."""
    p, q = ([[n / 16 for n in row[i]] for row in page.GRID[:2]] for i in (0, 1))
    found: dict = {}
    for d, accept, draw in itertools.product(range(3), range(8), range(48)):
        u = [(draw + 0.5) / 48] * 2
        output = tuple(lesson.naive_round(p, q[:1], [d], [(accept + 0.5) / 8], u))
        found[output] = found.get(output, 0.0) + q[0][d] / (8 * 48)
    want = enumeration.exact_round(p, q[:1])
    assert found.keys() == want.keys()
    assert all(abs(found[output] - want[output]) < 1e-12 for output in want)


def test_the_naive_round_goes_row_by_row():
    """Each draft is looked at in its own row, with its own random number; what the target never says falls."""
    one = [[float(x == y) for x in range(3)] for y in range(3)]
    assert lesson.naive_round([one[2], one[1], one[0]], [one[2], one[1]], [2, 1], [0.9] * 2, [0.9] * 3) == [2, 1, 0]
    assert lesson.naive_round([one[2], one[1], one[0]], [one[2], one[2]], [2, 2], [0.0] * 2, [0.0] * 3) == [2, 1]
    p, q = [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]
    assert lesson.naive_round([p, p, p], [q, q], [0, 0], [0.4, 0.6], [0.9, 0.0, 0.9]) == [0, 1]
    assert lesson.naive_round([p, p, p], [q, q], [0, 0], [0.4, 0.4], [0.9, 0.0, 0.4]) == [0, 0, 0]


@pytest.mark.parametrize(("name", "what"), [(None, None), ("resample-from-p", "probability is off by 0.102"),
                                            ("no-bonus", "1.000 tokens a round"), ("stale-kv", None)])  # fmt: skip
def test_the_proof_notices_a_wrong_rule(name, what):
    """The page says by how much."""
    with lesson.broken(name), pytest.raises(common.CheckFailed, match=what) if what else contextlib.nullcontext():
        lesson.check_rule()


def test_the_proof_compares_with_the_naive_round(monkeypatch):
    monkeypatch.setattr(lesson, "naive_round", lambda p, q, draft, accept_u, draw_u: draft)
    with pytest.raises(common.CheckFailed, match="the naive round"):
        lesson.check_rule()


def test_rejection_sample_counted_without_error():
    exact = page.facts()["exact"]
    assert exact["error"] < 1e-12 and exact["counted_error"] < 1e-12
    for mean in exact["means"].values():
        assert abs(mean["counted"] - mean["expected"]) < 1e-12


@pytest.mark.slow
def test_rejection_sample_counted_without_error_for_three_drafts():
    rows = [*page.GRID, ([6, 6, 4], [4, 8, 4])]
    p, q = ([[n / 16 for n in row[i]] for row in rows] for i in (0, 1))
    shares, _ = enumeration.swept_round(lesson.rejection_sample, p, q[:3], levels=8, draws=48)
    want = enumeration.exact_round(p, q[:3])
    assert max(abs(shares.get(output, 0) - want.get(output, 0)) for output in {*shares, *want}) < 1e-12


def counted(rows, drafts, draw, **more):
    """One request per u in `draw`: `rows` of scores, these drafts."""
    B, n = len(draw), len(rows)
    tokens, sampled = lesson.rejection_sample(
        torch.tensor(rows, dtype=torch.float64).repeat(B, 1), torch.tensor([*drafts, -1] * B), torch.arange(B + 1) * n,
        torch.zeros(B * n, dtype=torch.bool), torch.tensor(draw, dtype=torch.float64).repeat_interleave(n),
        torch.zeros(B * n, dtype=torch.float64), **more,
    )  # fmt: skip
    return [tuple(row[:k]) for row, k in zip(tokens.view(B, n).tolist(), sampled.tolist())]


@pytest.mark.parametrize("d", range(3))
def test_a_draft_without_q_is_a_one_hot_q(d):
    p = [9 / 16, 5 / 16, 2 / 16]
    found = counted([p, p], [d], [(i + 0.5) / 16 for i in range(16)])
    want = enumeration.exact_round([p, [1, 0, 0]], [[float(x == d) for x in range(3)]])
    first = [sum(chance for output, chance in want.items() if output[0] == x) for x in range(3)]
    assert [sum(output[0] == x for output in found) / 16 for x in range(3)] == first
    assert all((len(output) == 2) == (output[0] == d) for output in found)


def both_paths(**arguments):
    """The answers of the torch path and of the kernels, which must agree."""
    found = [x.tolist() for x in lesson.rejection_sample(**arguments)]
    if common.HAS_TRITON:
        with common.use_kernels():
            on_device = {k: v.to(common.device()) for k, v in arguments.items()}
            assert [x.tolist() for x in lesson.rejection_sample(**on_device)] == found
    return found


def one_row(p, q, draft, accept_u, draw_u):
    """What a single draft and its bonus row become."""
    return both_paths(
        scores=torch.tensor([p, p]),
        draft_token_ids=torch.tensor([draft, -1]),
        cu_num_sampled_tokens=torch.tensor([0, 2]),
        is_greedy=torch.zeros(2, dtype=torch.bool),
        draft_probs=torch.tensor([q]),
        draft_rows=torch.tensor([0, -1]),
        accept_u=torch.tensor([accept_u, 0.5], dtype=torch.float64),
        draw_u=torch.tensor([draw_u, 0.5], dtype=torch.float64),
    )


def test_edges_of_the_rule_on_both_paths():
    assert one_row([0.0, 0.25, 0.75], [0.5, 0.5, 0.0], 0, 0.0, 0.0) == [[2, 2], [1]]  # p(d) = 0 and u = 0: it falls
    assert one_row([0.5, 0.25, 0.25], [1.0, 0.0, 0.0], 0, 0.5, 0.0) == [[1, 1], [1]]  # u q = p exactly: it falls
    assert one_row([0.5, 0.25, 0.25], [1.0, 0.0, 0.0], 0, 0.4999, 0.0) == [[0, 1], [2]]
    # All that is left of p is rounding, which is nothing: a draw from p.
    assert one_row([0.25, 0.25, 0.375], [0.25, 0.25, 0.5], 2, 0.9, 0.5)[0][0] == 1
    # What is left, [.25, .125, .125, 0], has half the weight of p: the draw is from that half.
    assert one_row([0.5, 0.25, 0.25, 0.0], [0.25, 0.125, 0.125, 0.5], 3, 0.9, 0.6) == [[1, 1], [1]]
    # The draw at the very edges: intervals are closed on the left, and a token without weight is never drawn.
    assert one_row([0.0, 0.5, 0.5], [0.0, 0.0, 1.0], 2, 0.9, 0.0) == [[1, 2], [1]]
    assert one_row([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], 2, 0.9, 0.5) == [[1, 1], [1]]
    assert one_row([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], 2, 0.9, 1 - 2**-52) == [[1, 1], [1]]


def test_every_row_is_decided_by_its_own_number_on_both_paths():
    """A greedy request, one without a q, and three whose drafts stand with probability 1/2."""
    is_draft = torch.arange(10) % 2 == 0
    tokens, n = both_paths(
        scores=torch.full((10, 2), 0.5),
        draft_token_ids=torch.where(is_draft, 0, -1),
        cu_num_sampled_tokens=torch.arange(6) * 2,
        is_greedy=torch.arange(10) < 2,
        draft_probs=torch.tensor([[1.0, 0.0]]),
        draft_rows=torch.where(is_draft & (torch.arange(10) > 3), 0, -1),
        accept_u=torch.tensor([0.9, 0.9, 0.9, 0.9, 0.4, 0.9, 0.6, 0.9, 0.6, 0.9], dtype=torch.float64),
        draw_u=torch.tensor([0.9, 0.9, 0.4, 0.6, 0.9, 0.4, 0.9, 0.6, 0.9, 0.4], dtype=torch.float64),
    )
    assert tokens == [0, 0, 0, 1, 0, 0, 1, 1, 1, 0] and n == [2, 2, 2, 1, 1]


def test_small_weights_are_added_up_on_both_paths():
    """Together they are 2^−18 of the whole, and lost in fp32. A u of 1 makes a draft of p = q fall: a draw from p."""
    p = [1.0, *[2.0**-26] * 255]
    assert one_row(p, p, 0, 1.0, 1 - 2**-20)[0][0] == 255 - 64


def test_what_is_left_lies_in_several_tiles_on_both_paths():
    p, q = (3 * torch.randn(2, 900)).softmax(1)
    falls = int((q - p).argmax())
    found = {one_row(p.tolist(), q.tolist(), falls, 0.999, u)[0][0] for u in (0.1, 0.5, 0.9)}
    assert len(found) > 1 and all(p[token] > q[token] for token in found)


def test_every_row_has_its_own_weights_in_every_tile_on_both_paths():
    """Drafts that fall, in rows where p − q is left and in rows where nothing is: a u of 1 makes those fall, too."""
    g = torch.Generator().manual_seed(5)
    p, other = torch.rand(2, 24, 700, generator=g).softmax(2)
    same = torch.arange(24)[:, None] % 4 < 2
    q, rows = torch.where(same, p, other), torch.arange(24)
    is_bonus = rows % 2 == 1
    tokens, _ = both_paths(
        scores=p,
        draft_token_ids=torch.where(is_bonus, -1, (q - p).argmax(1)),
        cu_num_sampled_tokens=torch.arange(13) * 2,
        is_greedy=torch.zeros(24, dtype=torch.bool),
        draft_probs=q,
        draft_rows=torch.where(is_bonus, -1, rows),
        accept_u=torch.where(same[:, 0] | (rows < 8), 1.0, torch.rand(24, generator=g)).double(),
        draw_u=torch.rand(24, generator=g, dtype=torch.float64),
    )
    assert {token // 256 for token in tokens[:4:2]} | {token // 256 for token in tokens[4::2]} == {0, 1, 2}


def test_nothing_is_read_before_the_first_row(kernels, device, first_in_memory):
    """A row without a draft has −1 for it, and −1 for the row of its q."""
    batch = {k: first_in_memory(v.to(device)) for k, v in enumeration.ragged_batch(40, [0, 0, 0], seed=1).items()}
    batch["is_greedy"][:] = False
    tokens, _ = lesson.rejection_sample(**batch)
    assert tokens.min() >= 0


def test_the_largest_score_of_any_tile_on_both_paths():
    """Tops of the tiles in every order; the first of equals wins, and a tile of many low ones does not."""
    rows = torch.zeros(9, 700)
    rows[7, 0] = 1
    for row, tops in zip(rows, [*itertools.permutations([0.2, 0.3, 0.5]), (0.4, 0.4, 0.1)]):
        row[[10, 300, 650]] = torch.tensor(tops)
    rows[8], rows[8, 300] = -1 - torch.rand(700), -0.5  # as logits may be; the last tile has the fewest to add up
    n = torch.arange(len(rows) + 1)
    tokens, _ = both_paths(
        scores=rows,
        draft_token_ids=torch.full((9,), -1),
        cu_num_sampled_tokens=n,
        is_greedy=torch.ones(9, dtype=torch.bool),
        draw_u=torch.zeros(9, dtype=torch.float64),
        accept_u=torch.zeros(9, dtype=torch.float64),
    )
    assert tokens == [*rows[:6].argmax(1).tolist(), 10, 0, 300]


def test_a_draw_at_the_very_end_is_a_token(kernels, device):
    """The total and the running sum add up in different orders, and differ in their last bits where weights do."""
    p = torch.rand(8, 520, generator=torch.Generator().manual_seed(0)).mul(-40).exp().to(device)
    p[:, -5:] = 0
    ids, zeros = torch.full((8,), -1, device=device), torch.zeros(8, dtype=torch.float64, device=device)
    starts, greedy = torch.arange(9, device=device), torch.zeros(8, dtype=torch.bool, device=device)
    tokens, _ = lesson.rejection_sample(p, ids, starts, greedy, zeros + (1 - 2**-52), zeros)
    assert tokens.max() < 520 and (p.gather(1, tokens[:, None]) > 0).all()
    # A u of 1 is never drawn; here it stands for a running sum that ends below the total, whatever the order of adding.
    tokens, _ = lesson.rejection_sample(p, ids, starts, greedy, zeros + 1, zeros)
    assert tokens.tolist() == [514] * 8
    p[:, 1:] = 0
    assert lesson.rejection_sample(p, ids, starts, greedy, zeros + 1, zeros)[0].tolist() == [0] * 8


def broken_scores(greedy):
    """[7, 300]: rows that leave no token, and a last one that does. One bad number is enough, in any tile."""
    scores = torch.randn(7, 300, generator=torch.Generator().manual_seed(2))
    scores = scores if greedy else scores.softmax(1)
    scores[0, 5], scores[1, 280], scores[2] = torch.nan, torch.nan, torch.nan
    scores[3, 10], scores[4, 290] = torch.inf, torch.inf
    scores[5] = -torch.inf if greedy else 0.0
    return scores


@pytest.mark.parametrize("with_q", [True, False])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_row_that_leaves_no_token_says_so_on_both_paths(greedy, with_q):
    """NaN, +∞, nothing at all; drafts in front of it stand, and no row is another's business."""
    scores, R = broken_scores(greedy), 14
    sound = torch.zeros(7, 300).index_fill(1, torch.tensor([3]), 1.0)  # the answer is 3, whatever is drawn
    rows = torch.stack((sound, scores), 1).flatten(0, 1)  # each broken row follows a draft
    q = {"draft_probs": sound, "draft_rows": torch.where(torch.arange(R) % 2 == 0, torch.arange(R) // 2, -1)}
    tokens, n = both_paths(
        scores=rows, draft_token_ids=torch.tensor([3, -1] * 7), cu_num_sampled_tokens=torch.arange(8) * 2,
        is_greedy=torch.full((R,), greedy), draw_u=torch.full((R,), 0.5, dtype=torch.float64),
        accept_u=torch.full((R,), 0.5, dtype=torch.float64), **(q if with_q else {}),
    )  # fmt: skip
    assert tokens[::2] == [3] * 7 and n == [2] * 7
    assert tokens[1:13:2] == [-1] * 6 and 0 <= tokens[13] < 300


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_draft_that_stands_in_a_broken_row_is_no_token_on_both_paths(bad):
    """Its own score is sound and q is below it, but something else in the row of the target is not."""
    p, q = torch.zeros(2, 300), torch.zeros(1, 300)
    p[:, 3], q[0, 3] = 0.9, 0.5
    p[0, 290] = bad
    tokens, n = both_paths(
        scores=p, draft_token_ids=torch.tensor([3, -1]), cu_num_sampled_tokens=torch.tensor([0, 2]),
        is_greedy=torch.tensor([False] * 2), draw_u=torch.tensor([0.5] * 2).double(),
        accept_u=torch.zeros(2).double(), draft_probs=q, draft_rows=torch.tensor([0, -1]),
    )  # fmt: skip
    assert tokens[0] == -1 and n == [1]


def test_a_draft_drawn_from_nan_is_replaced_by_a_draw_from_p_on_both_paths():
    """A broken drafter costs drafts, and no answer."""
    p = torch.rand(300, generator=torch.Generator().manual_seed(3)).softmax(0)
    for u in (0.1, 0.9):
        plain, _ = both_paths(
            scores=p[None], draft_token_ids=torch.tensor([-1]), cu_num_sampled_tokens=torch.tensor([0, 1]),
            is_greedy=torch.tensor([False]), draw_u=torch.tensor([u]).double(), accept_u=torch.zeros(1).double(),
        )  # fmt: skip
        tokens, n = both_paths(
            scores=p.expand(2, -1), draft_token_ids=torch.tensor([299, -1]),
            cu_num_sampled_tokens=torch.tensor([0, 2]), is_greedy=torch.tensor([False] * 2),
            draw_u=torch.tensor([u] * 2).double(), accept_u=torch.zeros(2).double(),
            draft_probs=torch.full((1, 300), torch.nan), draft_rows=torch.tensor([0, -1]),
        )  # fmt: skip
        assert tokens[0] == plain[0] and n == [1]


def test_the_benchmark_counts_the_bytes_that_must_be_read(monkeypatch):
    """160 rows and, where there is a q, the 128 of the drafts; all rows of one kind."""
    seen = []

    def measure(run):
        seen.append(run.keywords)
        tokens, n = run()
        assert len(tokens) == 160 and len(n) == 32
        return SimpleNamespace(median=1e-3)

    monkeypatch.setattr(timing, "measure_graph", measure)
    found = page.measure_sampler(V=100)
    assert [kind["us"] for kind in found.values()] == [1000] * 3
    rates = {"greedy": 160 * 400 / 1e6, "without_q": 160 * 400 / 1e6, "with_q": 288 * 400 / 1e6}
    assert {kind: x["gb_s"] for kind, x in found.items()} == pytest.approx(rates)
    assert [bool(x["is_greedy"].all()) for x in seen] == [True, False, False]
    assert [x["draft_probs"] is None for x in seen] == [True, True, False]
    assert (
        seen[2]["draft_rows"].ge(0).sum() == 128 and (seen[2]["draft_token_ids"][seen[2]["draft_rows"] < 0] < 0).all()
    )


def test_many_rows_on_both_paths():
    """Every kind of row beside every other, the q in another order, in the middle of a wider matrix."""
    batch = enumeration.ragged_batch(40, [1, 2, 3, 0, 1, 2] * 2, seed=4)
    order = torch.randperm(len(batch["scores"]))
    batch["draft_rows"] = torch.where(batch["draft_rows"] >= 0, order[batch["draft_rows"]], -1)
    q = torch.empty_like(batch["draft_probs"])
    q[order] = batch["draft_probs"]
    batch["draft_probs"] = torch.nn.functional.pad(q, (0, 9), value=7.0)[:, :40]
    batch["scores"] = torch.nn.functional.pad(batch["scores"], (0, 5), value=7.0)[:, :40]
    tokens, n = both_paths(**batch)
    assert len(set(n)) > 2 and max(tokens) < 40


def test_what_cannot_happen_does_not():
    q = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    p = [0.0, 0.25, 0.75]  # token 0 was drafted, and the target never says it: u = 0 must not let it pass
    draws = [0.0, 0.5, 1 - 2**-52]
    found = counted([p, p], [0], draws, draft_probs=q, draft_rows=torch.tensor([0, -1] * len(draws)))
    assert found == [(2,)] * 3  # only token 2 is likelier than its draft


def test_equal_distributions_never_reject_and_rounding_leaves_p():
    p = torch.tensor([[0.2, 0.3, 0.5]])
    assert torch.equal(lesson.residual(p, p), p)
    u = torch.tensor([1 - 2**-52, 0.0], dtype=torch.float64)
    tokens, n = lesson.rejection_sample(
        p.repeat(2, 1), torch.tensor([2, -1]), torch.tensor([0, 2]), torch.zeros(2, dtype=torch.bool), u, u, p,
        torch.tensor([0, -1]),
    )  # fmt: skip
    assert n.tolist() == [2] and tokens.tolist() == [2, 0]


# --- The kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("V", "counts"), [(1, [2, 0]), (255, [3, 1, 0]), (256, [0, 4, 2]), (520, [0, 1, 2])])
@pytest.mark.parametrize("with_q", [True, False])
def test_kernels_are_the_torch_path(kernels, guarded, device, V, counts, with_q):
    for seed in range(2):
        batch = enumeration.ragged_batch(V, counts, seed)
        if not with_q:
            batch |= {"draft_probs": None, "draft_rows": None}
        elif seed:
            batch["scores"][:, V // 2 :], batch["draft_probs"][:, : V // 2] = 0, 0  # disjoint supports
        tokens = lesson.sample_rows(*(batch[k] for k in ("scores", "draft_token_ids", "is_greedy", "draw_u", "accept_u",
                                                         "draft_probs", "draft_rows")))  # fmt: skip
        n = lesson.count_sampled(tokens, batch["draft_token_ids"], batch["cu_num_sampled_tokens"])
        greedy = {"is_greedy": batch.pop("is_greedy").to(device)}
        found = lesson.rejection_sample(**greedy, **{k: v if v is None else guarded(v) for k, v in batch.items()})
        if V == 1 and seed and with_q:  # nothing has any weight there
            continue
        assert found[0].tolist() == tokens.tolist() and found[1].tolist() == n.tolist()


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_kernels_take_scores_in_16_bits(kernels, device, low):
    batch = enumeration.ragged_batch(300, [2, 1, 3], seed=3)
    batch["scores"] = batch["scores"].to(low)
    right = lesson.sample_rows(batch["scores"].float(), *(batch[k] for k in ("draft_token_ids", "is_greedy", "draw_u",
                               "accept_u", "draft_probs", "draft_rows")))  # fmt: skip
    assert lesson.rejection_sample(**{k: v.to(device) for k, v in batch.items()})[0].tolist() == right.tolist()


def test_kernels_write_their_outputs_and_nothing_else(kernels, guarded, device):
    b = {k: v.to(device) for k, v in enumeration.ragged_batch(100, [2, 0, 3], seed=1).items()}
    R, tokens, n = len(b["scores"]), guarded((8,), torch.int64), guarded((3,), torch.int64)
    sums = guarded((2, R, 2), torch.float64)
    three = lesson.sum_tiles_kernel, lesson.sample_rows_kernel, lesson.count_sampled_kernel
    before = [kernel.launches for kernel in three]
    q = b["draft_probs"], b["draft_rows"]
    lesson.sum_tiles_kernel[(R, 2)](b["scores"], b["is_greedy"], *q, sums, 100, 100, 100, HAS_DRAFT_PROBS=True,
                                    BLOCK=64)  # fmt: skip
    lesson.sample_rows_kernel[(R,)](
        b["scores"], b["draft_token_ids"], b["is_greedy"], *q, b["accept_u"], b["draw_u"], sums, tokens, 100, 2, 100,
        100, HAS_DRAFT_PROBS=True, TILES=16, BLOCK=64,
    )  # fmt: skip
    lesson.count_sampled_kernel[(3,)](tokens, b["draft_token_ids"], b["cu_num_sampled_tokens"], n)
    assert (tokens[:R] < 100).all() and n.min() >= 1
    random = ~b["is_greedy"]
    torch.testing.assert_close(sums[1].sum(1)[random], b["scores"].double().sum(1)[random], rtol=1e-6, atol=0)
    assert [kernel.launches for kernel in three] == [count + 1 for count in before]


def test_rows_beyond_31_bits(kernels, device, apart):
    batch = {k: v.to(device) for k, v in enumeration.ragged_batch(40, [2], seed=1).items()}
    near = lesson.rejection_sample(**batch)
    scores = apart(batch["scores"].float())
    assert [x.tolist() for x in lesson.rejection_sample(**batch | {"scores": scores})] == [x.tolist() for x in near]


def test_an_empty_batch(kernels, device):
    empty = lambda *shape, dtype=torch.float64: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
    ids, before = empty(0, dtype=torch.int64), lesson.sum_tiles_kernel.launches
    tokens, n = lesson.rejection_sample(
        empty(0, 8),
        ids,
        torch.zeros(1, dtype=torch.int64, device=device),
        empty(0, dtype=torch.bool),
        empty(0),
        empty(0),
    )
    assert len(tokens) == len(n) == 0
    assert lesson.sum_tiles_kernel.launches == before, "a GPU refuses a grid of nothing"


def test_counts_are_leading_agreements():
    for seed in range(20):
        with named(seed):
            rng = random.Random(seed)
            drafts = [[rng.randrange(2) for _ in range(rng.randrange(5))] for _ in range(rng.randrange(1, 6))]
            flat = [t for draft in drafts for t in (*draft, -1)]
            tokens = [rng.randrange(2) for _ in flat]
            starts = [0, *itertools.accumulate(len(draft) + 1 for draft in drafts)]
            want = []
            for draft, start in zip(drafts, starts):
                n = 0
                while n < len(draft) and tokens[start + n] == draft[n]:
                    n += 1
                want.append(n + 1)
            found = lesson.count_sampled(torch.tensor(tokens), torch.tensor(flat), torch.tensor(starts))
            assert found.tolist() == want


# --- Drafters -------------------------------------------------------------------------------------------------------


def context(tokens, k=4, request_id="r", **more):
    return DraftContext(request_id=request_id, token_ids=list(tokens), max_tokens=k, params=SamplingParams(), **more)


@pytest.mark.parametrize("seed", range(10))
def test_ngram_is_the_first_place_of_the_longest_match(seed):
    rng = random.Random(seed)
    (low, high), k = rng.choice([(1, 3), (2, 2), (2, 5), (5, 5)]), rng.choice([1, 3, 8])
    drafter, tokens = drafters.NgramDrafter(low, high), [rng.randrange(3) for _ in range(5)]
    for _ in range(60):
        want: list = []
        for n in range(min(high, len(tokens) - 1), low - 1, -1):
            places = [i for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[-n:]]
            if places:
                want = tokens[places[0] + n : places[0] + n + k]
                break
        assert drafter.propose([context(tokens, k)]) == [Draft(want)]
        tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 4))]  # several at once, as after a good draft
    drafter.forget("r")
    assert not drafter.indexed
    assert drafter.propose([context([1, 2, 3])])[0].token_ids == []


@pytest.mark.parametrize("seed", range(10))
def test_suffix_automaton_knows_every_longest_repeat(seed):
    rng, automaton, tokens = random.Random(seed), drafters.SuffixAutomaton(), []
    for _ in range(80):
        tokens.append(rng.randrange(rng.choice([1, 2, 3])))
        automaton.extend(tokens[-1])
        n = len(tokens)
        best = (0, 0)
        for length in range(n - 1, 0, -1):
            ends = [e for e in range(length, n) if tokens[e - length : e] == tokens[n - length :]]
            if ends:
                best = (length, ends[0])
                break
        found = automaton.longest_repeat()
        assert found == best
    assert len(automaton.next) <= 2 * len(tokens)


def test_the_config_names_the_drafter(tiny_model):
    """Any drafter leaves the text as it is, so only this sees that another one was made."""
    options = {"prompt_lookup_min": 2, "prompt_lookup_max": 4, "suffix_decoding_max_spec_factor": 1.5}
    ngram, suffix, lookahead = (
        drafters.make_drafter(SpeculativeConfig(method, 3, **options), tiny_model) for method in drafters.METHODS
    )
    assert isinstance(ngram, drafters.NgramDrafter) and list(ngram.lengths) == [4, 3, 2]
    assert isinstance(suffix, drafters.SuffixDrafter)
    assert (suffix.min_n, suffix.max_spec_factor) == (2, 1.5)
    assert isinstance(lookahead, drafters.LookaheadDrafter)


def test_suffix_drafts_are_as_long_as_what_matched_and_loops_go_on():
    drafter = drafters.SuffixDrafter(2, max_spec_factor=1.0)
    assert drafter.propose([context([1, 2, 3, 4, 9, 2, 3], 8)])[0].token_ids == [4, 9]
    drafter.forget("r")
    assert drafter.propose([context([5, 6, 5, 6, 5, 6], 4)])[0].token_ids == [5, 6, 5, 6]
    drafter.forget("r")
    assert drafter.propose([context([1, 2, 9, 2], 8)])[0].token_ids == []
    assert drafters.SuffixDrafter(1, 3.0).propose([context([7, 8, 1, 7], 8)])[0].token_ids == [8, 1, 7]


def test_lookahead_keeps_the_newest_continuations_of_a_token():
    """Five of token 1, of which one came twice: the four that came last, and the last of them is drafted."""
    seen = [(10, 11, 12), (20, 21, 22), (30, 31, 32), (40, 41, 42), (20, 21, 22), (50, 51, 52), (30, 31, 32)]
    tokens = [token for gram in seen for token in (1, *gram)] + [1]
    drafter = drafters.LookaheadDrafter()
    context = drafters.DraftContext(request_id="r", token_ids=tokens, max_tokens=2, params=SamplingParams())
    assert drafter.propose([context])[0].token_ids == [30, 31], "no more than was asked for"
    assert list(drafter.pool["r"][1]) == [(40, 41, 42), (20, 21, 22), (50, 51, 52), (30, 31, 32)]


def test_lookahead_drafts_leftovers_and_what_it_has_pooled():
    drafter = drafters.LookaheadDrafter()
    assert drafter.propose([context([1, 2, 3, 4, 5, 1], 3)])[0].token_ids == [2, 3, 4]  # the prompt's own n-gram
    assert drafter.propose([context([1, 2, 3, 4, 5, 1, 7], 4, leftover=[8, 9])])[0].token_ids == [8, 9, 7, 7]
    # The diagonal: 7 in one pass, what was behind it in the next, … becomes an n-gram that starts with 7.
    drafter.propose([context([1, 2, 3, 4, 5, 1, 7, 8], 4, leftover=[6])])
    drafter.propose([context([1, 2, 3, 4, 5, 1, 7, 8, 6], 4, leftover=[5])])
    assert drafter.propose([context([1, 2, 3, 4, 5, 1, 7, 8, 6, 5, 7], 3)])[0].token_ids == [8, 6, 5]
    drafter.forget("r")
    assert not drafter.rows and not drafter.pool


REFUSED_CONFIGS = [
    ({"method": "magic"}, "method 'magic'.*ngram"),
    ({"num_speculative_tokens": 0}, "from 1 to 128"),
    ({"num_speculative_tokens": True}, "num_speculative_tokens"),
    ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min 3"),
    ({"prompt_lookup_max": -1}, "prompt_lookup_max"),
    ({"prompt_lookup_max": 0}, "prompt_lookup_max 0: must be a whole number of at least 1"),
    ({"prompt_lookup_max": False}, "prompt_lookup_max False"),
    ({"prompt_lookup_min": 0}, "prompt_lookup_min 0"),
    ({"prompt_lookup_min": 0, "prompt_lookup_max": 4}, "prompt_lookup_min 0"),
    ({"suffix_decoding_max_spec_factor": 0}, "above 0"),
    ({"model": 3}, "a path"),
    ({"num_speculative_tokens_schedule": "x"}, "heuristic"),
    ({"colour": 1}, "no such key"),
    ([], "JSON object"),
    ("{", "JSON"),
    ({"num_speculative_tokens_per_batch_size": [[2, 4, 1]]}, "from 1 on"),
    ({"num_speculative_tokens_per_batch_size": [[1, 4, 9]]}, "at most"),
    ({"num_speculative_tokens_per_batch_size": [[1, 4, 2], [4, 8, 1]]}, "overlap"),
    ({"num_speculative_tokens_per_batch_size": [1]}, "list"),
    ({"num_speculative_tokens_per_batch_size": []}, "list"),
]


def test_configs_that_are_refused():
    for wrong, words in REFUSED_CONFIGS:
        with named(wrong, words), pytest.raises(common.InputError, match=words):
            SpeculativeConfig.from_json(wrong)


def test_configs_as_vllm_reads_them():
    config = SpeculativeConfig.from_json('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}')
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (4, 4)
    assert (SpeculativeConfig().prompt_lookup_min, SpeculativeConfig().prompt_lookup_max) == (5, 5)
    config = SpeculativeConfig(prompt_lookup_min=3)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3)
    config = SpeculativeConfig(num_speculative_tokens_per_batch_size=[[1, 2, 4], [3, 8, 1], [9, 9, 0]])
    assert [config.drafts_in_batch(n) for n in (1, 2, 3, 8, 9, 50)] == [4, 4, 1, 1, 0, 0]


# --- The engine -----------------------------------------------------------------------------------------------------


def engine_of(model, tokenizer, config=None, drafter=None, kv_cache_dtype="auto", **options):
    options = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4, "num_gpu_blocks_override": 80} | options
    plug = {"drafter": drafter} if drafter else {}
    about = VllmConfig(speculative_config=config, kv_cache_dtype=kv_cache_dtype, plug=plug)
    return LLMEngine(model, tokenizer, config=about, **options)


def run(engine, jobs):
    """Everything at once, invariants after every step. Returns {id: tokens}, {id: logprobs}."""
    core, tokens, logprobs = engine.core, {}, {}
    for i, (prompt, params) in enumerate(jobs):
        core.add_request(Request(str(i), list(prompt), params, eos_token_id=17))
    scheduler = core.scheduler
    schedule = type(scheduler).schedule

    def watched():
        output = schedule(scheduler)
        assert getattr(output, "scheduled_spec_decode_tokens", {}).keys() <= output.num_scheduled_tokens.keys()
        assert output.total_num_scheduled_tokens <= scheduler.max_num_scheduled_tokens
        for request_id, n in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            blocks = scheduler.kv_cache_manager.get_block_ids(request_id)
            assert request.num_computed_tokens <= len(blocks) * scheduler.kv_cache_manager.block_size, (
                "no slot for a draft"
            )
            assert n <= getattr(scheduler, "long_prefill_cap", n)
            drafts = getattr(output, "scheduled_spec_decode_tokens", {}).get(request_id, ())
            assert request.num_computed_tokens <= request.num_tokens + len(drafts)
            assert request.num_output_tokens + len(drafts) < request.max_tokens
        return output

    scheduler.schedule = watched
    while core.scheduler.has_unfinished_requests():
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            params = jobs[int(output.request_id)][1]
            if params.logprobs is not None:
                found = output.new_logprobs
                assert output.new_token_ids[0] in found and len(output.new_token_ids) == 1
                logprobs.setdefault(output.request_id, []).append({t: Close(x.logprob) for t, x in found.items()})
        manager = core.scheduler.kv_cache_manager
        manager.block_pool.check()
        for request in core.scheduler.running:
            assert request.num_computed_tokens < request.num_tokens, "somebody has nothing left to compute"
            known = getattr(manager, "num_cached_block", {}).get(request.request_id, 0)
            assert known * manager.block_size <= request.num_computed_tokens, "a block was indexed before its time"
    assert manager.block_pool.num_free_blocks == manager.block_pool.num_blocks - 1
    return tokens, logprobs


@pytest.fixture(scope="module")
def jobs():
    return [*prompts_and_params(), *ruled()]


@pytest.fixture(scope="module")
def plain(tiny_model, real_model, jobs):
    return run(engine_of(tiny_model, real_model[1]), jobs)


def truth_of(jobs, plain):
    return {tuple(prompt): plain[0][str(i)] for i, (prompt, _) in enumerate(jobs)}


SETTINGS = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 7},
    "cramped": {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 16},  # preempts
}


def test_drafts_change_no_token(tiny_model, real_model, jobs, plain):
    """Greedy, sampled with seeds, penalties, min_tokens, logprobs, several lengths: in one batch. What else an engine
    may have beside drafts is tried in `tests/engine/core/test_combinations.py`."""
    oracle = Oracle(truth_of(jobs, plain))
    engine = engine_of(tiny_model, real_model[1], page.configure("ngram", 3), lambda config, model: oracle)
    assert run(engine, jobs) == plain
    stats = engine.core.scheduler.spec_decoding_stats
    assert 0.3 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
    assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos)
    assert {str(i) for i in range(len(jobs))} <= {*oracle.forgotten, *engine.core.scheduler.finished_req_ids}
    # What the prefix cache kept is what would have been computed: everybody again, the answer as part of the prompt.
    longer = [
        ([*prompt, *plain[0][str(i)][:-1]], SamplingParams(temperature=0, max_tokens=3))
        for i, (prompt, _) in enumerate(jobs[:3])
    ]
    assert run(engine, longer) == run(engine_of(tiny_model, real_model[1]), longer)


def test_drafts_that_are_granted_as_tokens_are_noticed(tiny_model, real_model, jobs, plain, monkeypatch):
    """The page's third exercise."""
    break_class(monkeypatch, Scheduler, "drafted := num_new_tokens - self._behind(request)", "drafted := 0")
    oracle = Oracle(truth_of(jobs, plain), right=1.0)
    engine = engine_of(tiny_model, real_model[1], page.configure("ngram", 5), lambda config, model: oracle)
    with pytest.raises(AssertionError, match="num_computed_tokens"):
        run(engine, jobs)


def test_drafts_go_with_the_last_token_as_far_as_the_budget_goes(tiny_model, real_model):
    """Not before it, and not while it is on its way; and where drafts are, too, nothing is taken back (06c)."""
    scheduler = engine_of(tiny_model, real_model[1], page.configure("ngram", 3)).core.scheduler
    request = Request("r", [1, 2, 3, 4, 5], SamplingParams())
    request.status, request.spec_token_ids = RequestStatus.RUNNING, [7, 8, 9]
    for computed, budget, granted in ((4, 9, 4), (4, 3, 3), (4, 1, 1), (2, 9, 6), (2, 2, 2), (5, 9, 0), (7, 9, 0)):
        request.num_computed_tokens, scheduler.token_budget = computed, budget
        assert scheduler._num_new_tokens(request) == granted


def test_who_loses_its_seat_in_a_step_takes_its_drafts_along(tiny_model, real_model):
    """It was in the step already, with a draft, when somebody more urgent needed its blocks."""
    engine = engine_of(tiny_model, real_model[1], page.configure("ngram", 3), scheduling_policy="priority")
    core, scheduler = engine.core, engine.core.scheduler
    low, high = (Request(name, prompt, SamplingParams(max_tokens=9, ignore_eos=True), priority=priority)
                 for name, prompt, priority in (("low", [1] * 5, 1), ("high", [2] * 8, 0)))  # fmt: skip
    for request in (low, high):
        core.add_request(request)
        core.step()
    pool = scheduler.kv_cache_manager.block_pool
    pool.allocate(pool.num_free_blocks)
    low.spec_token_ids, high.spec_token_ids = [9], []
    output = scheduler.schedule()
    assert output.preempted_reqs == [low] and output.num_scheduled_tokens == {"high": 1}
    assert not output.scheduled_spec_decode_tokens and not low.spec_token_ids
    # Whoever gets no token of a step has nothing taken back.
    high.num_computed_tokens, output.scheduled_spec_decode_tokens = 9, {"high": [5, 6]}
    scheduler.update_from_output(output, {})
    assert high.num_computed_tokens == 9 and scheduler.spec_decoding_stats.num_drafts == 0


def test_a_perfect_drafter_writes_k_plus_one_tokens_per_pass(tiny_model, real_model):
    jobs = [([1, 2, 3], SamplingParams(temperature=0, max_tokens=13, ignore_eos=True))]
    tokens, _ = run(engine_of(tiny_model, real_model[1]), jobs)
    oracle = Oracle({(1, 2, 3): tokens["0"]}, right=1.0)
    served = page.serve(engine_of(tiny_model, real_model[1], page.configure("ngram", 3), lambda c, m: oracle),
                          [[1, 2, 3]], [jobs[0][1]])  # fmt: skip
    assert [step[0] for step in served.steps] == [(0, 1), (3, 4), (3, 4), (3, 4)]
    assert served.tokens_per_pass(0) == 4


def test_what_was_drafted_counts_though_nothing_stood():
    stats = SpecDecodingStats()
    for drafted, accepted in ((3, 0), (3, 2), (1, 1)):
        stats.observe(drafted, accepted)
    assert vars(stats) == {"num_drafts": 3, "num_draft_tokens": 7, "num_accepted_tokens": 3,
                           "num_accepted_tokens_per_pos": [2, 1, 0]}  # fmt: skip


def test_one_by_one_the_last_token_brings_the_end():
    whole = EngineCoreOutput("r", [5, 6, 7], "stop", 7)
    parts = [(o.new_token_ids, o.finish_reason, o.stop_reason) for o in one_by_one(whole)]
    assert parts == [([5], None, None), ([6], None, None), ([7], "stop", 7)]


def test_text_and_log_probabilities_of_the_front_end(tiny_model, real_model):
    """Several tokens a step: stop strings in the middle, log probabilities token by token, samples of one prompt."""
    answers = []
    for config in (None, page.configure("ngram", 4)):
        llm = LLM.__new__(LLM)
        llm.llm_engine, llm.num_requests = engine_of(tiny_model, real_model[1], config), 0
        prompt = {"prompt_token_ids": [4, 9, 4, 9, 4, 9]}
        greedy = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=30, logprobs=1))[0]
        text = greedy.outputs[0].text
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        params = [
            SamplingParams(temperature=0, max_tokens=30, stop=[stop], logprobs=0),
            SamplingParams(n=2, seed=1, max_tokens=12),
        ]
        answers.append([greedy, *llm.generate([prompt] * 2, params)])
    for a, b in zip(*answers):
        for x, y in zip(a.outputs, b.outputs):
            assert (x.text, x.token_ids, x.finish_reason, x.stop_reason) == (
                y.text,
                y.token_ids,
                y.finish_reason,
                y.stop_reason,
            )
            assert (x.logprobs is None) == (y.logprobs is None)
            if x.logprobs is not None:
                assert len(x.logprobs) == len(y.logprobs) == len(y.token_ids)
                assert abs(x.cumulative_logprob - y.cumulative_logprob) < 1e-3
                assert [list(entry) for entry in x.logprobs] == [list(entry) for entry in y.logprobs]
    assert answers[1][1].outputs[0].finish_reason == "stop"


# --- Drafts that were drawn -----------------------------------------------------------------------------------------


class Dice(Drafter):
    """Draws every draft from a distribution of its own, and says which."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.g, self.vocab = torch.Generator().manual_seed(seed), vocab
        self.q = (1.5 * torch.randn(vocab, vocab, generator=self.g)).softmax(1)

    def propose(self, contexts):
        drafts = []
        for c in contexts:
            tokens, probs, last = [], [], c.token_ids[-1]
            for _ in range(c.max_tokens):
                probs.append(self.q[last])
                last = int(torch.multinomial(self.q[last], 1, generator=self.g))
                tokens.append(last)
            drafts.append(Draft(tokens, torch.stack(probs) if probs else None))
        return drafts


def distance_of_pairs(real_model, n: int) -> tuple[float, float]:
    """Σ|frequency − probability| of the second and third token of n answers, whose first is drafted for; and a bound
    that holds with probability 1 − 1e-6 (Bretagnolle–Huber–Carol)."""
    V = 6
    model = llama.random_model(seed=5, vocab_size=V, num_hidden_layers=1)
    params = [SamplingParams(temperature=1.3, top_k=5, max_tokens=3, seed=i, ignore_eos=True) for i in range(n)]
    engine = engine_of(model, real_model[1], page.configure("ngram", 2), lambda c, m: Dice(V),
                       max_num_seqs=128, num_gpu_blocks_override=600)  # fmt: skip
    for i, one in enumerate(params):
        engine.core.add_request(Request(str(i), [1, 2], one))
    outputs: dict = {}
    while engine.core.scheduler.has_unfinished_requests():
        for o in engine.core.step():
            outputs.setdefault(o.request_id, []).extend(o.new_token_ids)
    state = SamplingState(Request("x", [1, 2], params[0]), 0)

    def next_token(tokens):
        ids, positions = (torch.tensor(x, device=model.device) for x in (tokens, range(len(tokens))))
        hidden = model.forward(ids, positions, naive.recompute)
        return Sampler.probabilities(model.logits(hidden[-1:]), [state])[0].tolist()

    want: dict = {}
    for a, pa in enumerate(next_token([1, 2])):
        for b, pb in enumerate(next_token([1, 2, a]) if pa else ()):
            for c, pc in enumerate(next_token([1, 2, a, b]) if pb else ()):
                want[a, b, c] = pa * pb * pc
    found: dict = {}
    for tokens in outputs.values():
        found[tuple(tokens)] = found.get(tuple(tokens), 0) + 1
    assert engine.core.scheduler.spec_decoding_stats.num_draft_tokens > n / 2

    def pairs(d):
        return {bc: sum(x for abc, x in d.items() if abc[1:] == bc) for bc in itertools.product(range(V), repeat=2)}

    have, right = pairs(found), pairs(want)
    bound = ((36 * 0.6931 + 13.8) * 2 / n) ** 0.5
    return sum(abs(have[k] / n - right[k]) for k in right), bound


def test_the_engines_samples_have_the_targets_distribution(real_model, monkeypatch):
    numbers, right = [], lesson.rejection_sample

    def listening(scores, drafts, starts, greedy, draw_u, accept_u, *rest):
        numbers.append(torch.stack((draw_u, accept_u)))
        return right(scores, drafts, starts, greedy, draw_u, accept_u, *rest)

    monkeypatch.setattr(lesson, "rejection_sample", listening)
    distance, bound = distance_of_pairs(real_model, 400)
    assert distance < bound
    u = torch.cat(numbers, dim=1)
    assert abs(torch.corrcoef(u)[0, 1]) < 0.1, "who decides must not be who draws"
    assert (u.mean(1) - 0.5).abs().max() < 0.05


@pytest.mark.slow
def test_the_engines_samples_have_the_targets_distribution_closely(real_model):
    distance, bound = distance_of_pairs(real_model, 12_000)
    assert distance < bound < 0.09
    with lesson.broken("resample-from-p"):
        assert distance_of_pairs(real_model, 12_000)[0] > 1.2 * bound


def test_every_draft_is_verified_against_what_it_was_drawn_from(tiny_model, real_model, monkeypatch):
    """Also those that had to wait: a budget of 4 for three requests. (Forgetting a q stays exact, and costs drafts.)"""
    dice, seen, right = Dice(128), [], lesson.rejection_sample

    def listening(scores, drafts, starts, greedy, draw_u, accept_u, probs, rows):
        assert torch.equal(rows >= 0, (drafts >= 0) & ~greedy)
        for r in range(1, len(drafts)):
            if rows[r] >= 0 and rows[r - 1] >= 0 and r not in starts.tolist():
                assert torch.equal(probs[rows[r]].cpu(), dice.q[int(drafts[r - 1])])
        seen.extend(starts.diff().tolist())
        return right(scores, drafts, starts, greedy, draw_u, accept_u, probs, rows)

    monkeypatch.setattr(lesson, "rejection_sample", listening)
    engine = engine_of(tiny_model, real_model[1], page.configure("ngram", 3), lambda c, m: dice, max_num_seqs=3,
                       max_num_batched_tokens=4)  # fmt: skip
    run(engine, [([i, 1, 2], SamplingParams(seed=i, max_tokens=12)) for i in range(3)])
    assert {2, 4} <= set(seen), "some drafts in full, some cut by the budget"


def test_trees_are_refused(tiny_model, real_model):
    class Tree(Drafter):
        def propose(self, contexts):
            return [Draft([1, 2], parents=[-1, -1]) for _ in contexts]

    with pytest.raises(ValueError, match="07b"):
        run(engine_of(tiny_model, real_model[1], page.configure("ngram", 3), lambda c, m: Tree()),
            [([1, 2], SamplingParams(max_tokens=4))])  # fmt: skip


# --- Hidden states for trained drafters -----------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
def test_hidden_states_are_those_of_accepted_tokens(tiny_model, real_model, jobs, plain, setting):
    class Listening(Oracle):
        needs_hidden = True

        def propose(self, contexts):
            for c in contexts:
                n, end = len(c.hidden), len(c.token_ids) - 1
                ids, positions = (torch.tensor(x, device=tiny_model.device) for x in (c.token_ids[:end], range(end)))
                hidden = tiny_model.forward(ids, positions, naive.recompute)
                right = F.rms_norm(hidden, hidden.shape[-1:], tiny_model.norm, tiny_model.config.rms_norm_eps)
                assert_close(c.hidden, right[end - n :])
                known = self.known.get(c.request_id)
                assert end - n == known if known is not None else end - n in range(0, end, 4)  # or a cached prefix
                self.known[c.request_id] = end
                self.zeros += c.max_tokens == 0
            return super().propose(contexts)

        def forget(self, request_id):
            self.known.pop(request_id, None)

    oracle = Listening(truth_of(jobs, plain))
    oracle.known, oracle.zeros = {}, 0
    engine = engine_of(tiny_model, real_model[1], page.configure("ngram", 3), lambda c, m: oracle, **SETTINGS[setting])
    assert run(engine, jobs) == plain
    assert oracle.zeros > 0, "it must be asked even if nothing may be drafted"


# --- How much to draft ----------------------------------------------------------------------------------------------


def test_k_follows_the_batch_and_the_luck(tiny_model, real_model):
    jobs = [([i, 1, 2], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for i in range(3)]
    tokens, _ = run(engine_of(tiny_model, real_model[1]), jobs)
    truth = {tuple(p): tokens[str(i)] for i, (p, _) in enumerate(jobs)}
    drafted = lambda served: [max(k for k, _ in step.values()) for step in served.steps]  # noqa: E731
    serve = lambda right, n, **more: drafted(page.serve(  # noqa: E731
        engine_of(tiny_model, real_model[1], page.configure("ngram", 6, **more), lambda c, m: Oracle(truth, right)),
        [p for p, _ in jobs[:n]], [p for _, p in jobs[:n]]))  # fmt: skip
    by_batch = {"num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 2, 2], [3, 8, 0]]}
    assert (
        max(serve(1.0, 1, **by_batch)) == 5
        and max(serve(1.0, 2, **by_batch)) <= 5
        and max(serve(1.0, 3, **by_batch)) == 0
    )
    unlucky = serve(0.0, 1, num_speculative_tokens_schedule="heuristic")
    assert unlucky[1:8] == [6, 5, 4, 3, 2, 1, 1]


# --- With the rest of the engine --------------------------------------------------------------------------------------


def test_k_grows_by_two_where_all_stood_and_else_shrinks_by_one():
    """As Transformers does it: never above the config's, never 0; a pass without drafts says nothing."""
    verifier = SimpleNamespace(k={}, config=SimpleNamespace(num_speculative_tokens=7))
    passes = [(7, 3, 6), (6, 0, 5), (0, 0, 5), (5, 5, 7), (7, 7, 7), *((k, 0, k - 1) for k in range(7, 1, -1)),
              (1, 0, 1), (1, 1, 3)]  # fmt: skip
    for drafts, accepted, following in passes:
        assert DraftVerifier.adapt(verifier, "r", drafts, accepted) == following
    assert DraftVerifier.adapt(verifier, "other", 0, 0) == 7


def test_what_was_broken_to_show_it_is_mended_whatever_happens():
    for name, (function, wrong) in lesson.BREAKS.items():
        right = getattr(lesson, function)
        with pytest.raises(KeyError), lesson.broken(name):
            assert getattr(lesson, function) is wrong
            raise KeyError
        assert getattr(lesson, function) is right


def ahead(tiny_model):
    """The loop with three drafts a step ahead, and requests of four prompt tokens."""
    core, _ = drafts_ahead.make_loop("async", tiny_model, 3, 16)

    def make(n):
        return Request("r", [1, 2, 3, 4], SamplingParams(max_tokens=n, ignore_eos=True))

    return core, core.scheduler, make


def test_drafts_ahead_need_no_slot_behind_the_end_of_the_context(tiny_model):
    _, scheduler, make = ahead(tiny_model)
    assert [scheduler.num_slots(make(n)) for n in (1, 11, 12, 13)] == [5, 15, 16, 16]


def test_drafts_ahead_leave_no_count_behind(tiny_model):
    core, scheduler, make = ahead(tiny_model)
    drafts_ahead.run(core, [request := make(9)])
    assert request.num_draft_placeholders == request.num_output_placeholders == 0 and not scheduler.requests


def test_nothing_is_taken_back_from_who_will_begin_again(tiny_model):
    """Preempted while three drafts were on their way, of which none stood: it has computed nothing any more."""
    _, scheduler, make = ahead(tiny_model)
    scheduler.add_request(request := make(9))
    scheduler.schedule()
    output = scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"r": [-1] * 3}
    scheduler.running.remove(request)
    scheduler.waiting.prepend_request(request)
    request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
    scheduler.update_from_output(output, {"r": [5]})
    assert request.num_computed_tokens == 0 and scheduler.spec_decoding_stats.num_drafts == 0


def test_a_cache_that_cannot_take_back_is_refused(tiny_model, real_model):
    with pytest.raises(common.InputError, match="kivi_2bit"):
        engine_of(tiny_model, real_model[1], page.configure("ngram", 3), kv_cache_dtype="kivi_2bit")


def test_kernels_in_the_engine(tiny_model, real_model):
    model = tiny_model if not common.HAS_GPU else llama.random_model(seed=0)
    jobs = [([7, 8, 7, 8], SamplingParams(seed=1, temperature=0.1, max_tokens=3, ignore_eos=True)),
            ([1, 2, 1, 2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))]  # fmt: skip
    plain = run(engine_of(model, real_model[1], num_gpu_blocks_override=17), jobs)
    truth = {tuple(prompt): plain[0][str(i)] for i, (prompt, _) in enumerate(jobs)}
    kernels = lesson.sum_tiles_kernel, lesson.sample_rows_kernel, lesson.count_sampled_kernel
    before = [kernel.launches for kernel in kernels]
    engine = engine_of(model, real_model[1], page.configure("ngram", 1), lambda c, m: Oracle(truth, 1.0))
    with common.use_kernels():
        assert run(engine, jobs) == plain
    assert all(kernel.launches > count for kernel, count in zip(kernels, before))


def test_structured_output_is_not_drafted_for(tiny_model, real_model, jobs, plain):
    chosen = SamplingParams(temperature=0, max_tokens=6, structured_outputs={"choice": ["yes", "no"]})
    mixed = [([9, 8, 7], chosen), jobs[0], jobs[2]]
    want = run(engine_of(tiny_model, real_model[1]), mixed)
    assert real_model[1].decode(want[0]["0"]).startswith(("yes", "no"))
    oracle = Oracle({tuple(prompt): want[0][str(i)] for i, (prompt, _) in enumerate(mixed)}, right=0.9)
    engine = engine_of(tiny_model, real_model[1], page.configure("ngram", 3), lambda c, m: oracle)
    assert run(engine, mixed) == want
    assert engine.core.scheduler.spec_decoding_stats.num_accepted_tokens > 0


@pytest.mark.slow
def test_real_model_in_the_whole_engine(real_model):
    """Lesson 06's engine by the flag's JSON: a copied text, and beside it a request under a grammar, which no draft
    touches."""
    model, tokenizer = real_model
    prompts = [{"prompt_token_ids": tokenizer.chat([{"role": "user", "content": page.TASKS["copy"]}])},
               {"prompt_token_ids": tokenizer.encode("The answer is ")}]  # fmt: skip
    params = [SamplingParams(temperature=0, max_tokens=24),
              SamplingParams(temperature=0, max_tokens=6, structured_outputs={"choice": ["yes", "no"]})]  # fmt: skip
    answers, config = [], {"method": "suffix", "num_speculative_tokens": 4, "prompt_lookup_min": 2}
    for speculative_config in (None, config):
        llm = LLM(
            model,
            tokenizer=tokenizer,
            speculative_config=speculative_config,
            max_model_len=256,
            num_gpu_blocks_override=40,
            max_num_seqs=4,
        )
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert answers[0] == answers[1]
    assert llm.llm_engine.core.scheduler.spec_decoding_stats.num_accepted_tokens > 12


# --- Doing it wrong ---------------------------------------------------------------------------------------------------


def test_wrong_rules_are_caught():
    p, q = ([[n / 16 for n in row[i]] for row in page.GRID] for i in (0, 1))
    want = enumeration.exact_round(p[:2], q[:1])
    tokens = sum(len(output) * chance for output, chance in want.items())

    def counted_error():
        shares, mean = enumeration.swept_round(lesson.rejection_sample, p[:2], q[:1], levels=8, draws=48)
        return max(abs(shares.get(o, 0) - want.get(o, 0)) for o in {*shares, *want}), abs(mean - tokens)

    assert max(counted_error()) < 1e-12
    with lesson.broken("resample-from-p"):
        assert counted_error()[0] > 0.05
        mean = enumeration.swept_round(lesson.rejection_sample, p[:2], q[:1], levels=8, draws=48)[1]
        assert round(mean, 3) == 1.672  # too long: a replacement that equals the draft stands
    with lesson.broken("no-bonus"):
        assert counted_error()[1] > 0.2
    assert max(counted_error()) < 1e-12


def look_at_the_last_token(self, output, sampled, update_from_output=Scheduler.update_from_output):
    """The mistake: "a step brings one token, so the end of an answer is its last one"."""
    blind = [r for i, t in sampled.items() if (r := self.requests.get(i)) and {r.eos_token_id, *r.stop_token_ids}
             .isdisjoint(t[-1:])]  # fmt: skip
    ends = [(request.eos_token_id, request.stop_token_ids) for request in blind]
    for request in blind:
        request.eos_token_id, request.stop_token_ids = None, frozenset()
    heard = update_from_output(self, output, sampled)
    for request, (eos, stop) in zip(blind, ends):
        request.eos_token_id, request.stop_token_ids = eos, stop
    return heard


@pytest.mark.parametrize(("owner", "name", "wrong"), [
    (DraftVerifier, "_roll_back", lambda self, request, batch: None),
    (Scheduler, "update_from_output", look_at_the_last_token),
])  # fmt: skip
def test_wrong_bookkeeping_of_the_engine_is_caught(
    tiny_model, real_model, jobs, plain, monkeypatch, owner, name, wrong
):
    out, prompt = plain[0]["2"], jobs[2][0]
    at = next(i for i in range(2, len(out)) if out[i] not in out[:i])
    stop = [out[at]] if owner is Scheduler else None
    params, differ = SamplingParams(seed=3, max_tokens=len(out), stop_token_ids=stop), 0
    want = out[: at + 1] if stop else out
    for right in (0.5, 1.0):
        oracle = functools.partial(Oracle, {tuple(prompt): out}, right)
        engine = lambda: engine_of(tiny_model, real_model[1], page.configure("ngram", 4), lambda c, m: oracle())  # noqa: B023, E731
        assert run(engine(), [(prompt, params)])[0]["0"] == want
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, wrong)
            core, tokens = engine().core, []
            core.add_request(Request("0", prompt, params, eos_token_id=17))
            while core.scheduler.has_unfinished_requests():
                tokens += [t for output in core.step() for t in output.new_token_ids]
            differ += tokens != want
    assert differ


# --- The lesson's own loop --------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 6), st.booleans(), st.integers(1, 20))
def test_the_loop_writes_what_the_engine_writes(tiny_model, real_model, seed, K, greedy, max_tokens):
    """Tokens and drafts, pass by pass: greedy and sampled, with ends inside and between drafts."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
    stop = [rng.randrange(128) for _ in range(rng.choice([0, 5, 40]))]
    params = SamplingParams(temperature=0 if greedy else 0.3, seed=seed, max_tokens=max_tokens, stop_token_ids=stop)
    engine = engine_of(tiny_model, real_model[1], page.configure("ngram", K) if K else None)
    served = page.serve(engine, [prompt], [params])
    answer, passes = lesson.generate(tiny_model, prompt, params, K)
    assert (answer, passes) == (served.token_ids[0], [step[0] for step in served.steps])
    assert answer == lesson.target_tokens(tiny_model, prompt, answer, params)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_looked_up_is_what_the_engines_drafter_finds(seed):
    rng, drafter, tokens = random.Random(seed), drafters.NgramDrafter(2, 4), []
    for _ in range(60):
        tokens.append(rng.randrange(3))
        k = rng.randrange(6)
        assert lesson.look_up(tokens, k) == drafter.propose([context(tokens, k)])[0].token_ids


def test_a_cache_that_went_back_is_as_if_it_had_never_gone(tiny_model):
    """Four tokens that were wrong, then one that is right: its row is that of a pass without them."""
    ids = torch.tensor([5, 6, 7, 1, 2, 3, 4], device=tiny_model.device)
    places = torch.arange(7, device=ids.device)
    cache = lesson.KVCache(tiny_model)
    tiny_model.forward(ids, places, cache.attend)
    cache.length += 7
    lesson.roll_back(cache, 4)
    assert cache.length == 3
    found = tiny_model.forward(ids[6:], places[3:4], cache.attend)
    whole = tiny_model.forward(ids[[0, 1, 2, 6]], places[:4], naive.recompute)
    assert_close(found, whole[3:])


def test_an_answer_ends_at_its_first_end():
    assert lesson.until_end([4, 5, 6, 5], {5, 6}) == [4, 5] and lesson.until_end([4, 5], ()) == [4, 5]


def test_a_cache_that_never_goes_back_is_noticed(tiny_model):
    noticed = 0
    for seed in range(20):
        rng = random.Random(seed)
        prompt, params = [rng.randrange(3) for _ in range(12)], SamplingParams(temperature=0, max_tokens=16)
        with lesson.broken("stale-kv"):
            wrong, _ = lesson.generate(tiny_model, prompt, params, 4)
        right = wrong == lesson.target_tokens(tiny_model, prompt, wrong, params)
        assert right == (wrong == lesson.generate(tiny_model, prompt, params, 4)[0])
        noticed += not right
    assert noticed


def test_an_end_inside_a_draft_is_noticed(tiny_model, monkeypatch):
    """Wherever in a draft the end stands; only at its last place does the mistake not show."""
    prompt, params = [1, 2, 3], SamplingParams(temperature=0, max_tokens=13)
    right, _ = lesson.generate(tiny_model, prompt, params, 0)
    monkeypatch.setattr(lesson, "look_up", lambda tokens, k: right[len(tokens) - 3 :][:k])
    assert lesson.generate(tiny_model, prompt, params, 3)[1] == [(0, 1), (3, 4), (3, 4), (3, 4)]
    for end in right:
        params = SamplingParams(temperature=0, max_tokens=13, stop_token_ids=[end])
        first = right.index(end)
        assert lesson.generate(tiny_model, prompt, params, 3)[0] == right[: first + 1]
        with lesson.broken("past-eos"):
            wrong, _ = lesson.generate(tiny_model, prompt, params, 3)
        assert wrong == right[: 1 + next((i for i in range(0, 13, 4) if right[i] == end), 12)]


# --- When it pays, the simulation -------------------------------------------------------------------------------------


def test_it_pays_exactly_where_alpha_exceeds_the_cost():
    for alpha, cost in itertools.product([0.05, 0.3, 0.5, 0.9, 0.99], [0.02, 0.3, 0.5, 0.89, 1.2]):
        gains = [lesson.speedup(alpha, K, cost / 2, cost / 2) for K in range(200)]
        assert (max(gains) > 1 + 1e-12) == (alpha > cost)
        assert lesson.best_k(alpha, cost) == gains.index(max(gains))
    assert lesson.expected_tokens(1, 4) == 5 and abs(lesson.expected_tokens(1 - 1e-9, 4) - 5) < 1e-6


def test_a_disturbed_measurement_is_not_a_gain(tiny_model, real_model, monkeypatch):
    times = iter([2.0, 1.0])  # the plain step was interrupted: four rows more seem to take half as long
    monkeypatch.setattr(timing, "measure", lambda run, seconds: SimpleNamespace(median=next(times)))
    costs = page.step_costs(tiny_model, real_model[1], [1], 4, 0.1)
    assert costs["1"]["v"] == 0 and lesson.speedup(0.9, 4, 0, costs["1"]["v"]) <= 5


def test_published_predictions_follow_from_the_formula():
    for row in page.facts()["leviathan"]:
        assert row["low"] - 0.05 <= row["predicted"] <= row["high"] + 0.05
    table = page.facts()["table1"]
    assert round(table["k2_60"], 2) == 1.96 and round(table["k10_90"], 2) == 6.86


def test_the_roofline_by_hand():
    config = roofline.MODELS["Llama-3.1-8B"]
    assert sum(roofline.weights_read(config)) == lesson.WEIGHTS
    assert roofline.KVCacheSpec.from_config(config).bytes_per_token() == lesson.TOKEN_BYTES
    assert lesson.verify_cost(1, 4, 1024) == 0  # one sequence: rows are free
    huge = lesson.verify_cost(100_000, 4, 0)
    assert abs(huge - 1) < 1e-9  # nothing but arithmetic: a row more costs a row
    assert page.facts()["h100"]["4096"]["crossover"] is None and page.facts()["h100"]["128"]["crossover"] > 100


@pytest.mark.parametrize("bug", page.WIDGET_CHOICES["bug"])
def test_simulation_obeys_the_rule(bug):
    for pair, K, seed in itertools.product(page.PAIRS, (0, 1, 4, 8), (0, 2)):
        trace = page.simulate({**page.WIDGET_DEFAULT, "pair": pair, "drafts": K, "bug": bug, "seed": seed})
        p = trace["p"]
        assert abs(sum(trace["tried"]) - 1) < 1e-12 and sum(trace["counts"]) == sum(
            len(r["written"]) for r in trace["rounds"]
        )
        if bug != "resample-from-p":
            assert trace["distance"] < 1e-12 and max(abs(a - b) for a, b in zip(trace["written"], p)) < 1e-12
        for r in trace["rounds"]:
            stands = [u < ratio for u, ratio in zip(r["u"], r["ratio"])]
            kept = stands.index(False) if False in stands else len(stands)
            assert r["written"][:kept] == r["draft"][:kept]
            if bug == "resample-from-p":
                continue
            assert len(r["written"]) == kept + 1 - (bug == "no-bonus" and 0 < K == kept)
            if kept < K and bug == "none":
                d = r["draft"][kept]
                assert (
                    r["accepted"] == kept
                    and p[r["written"][-1]] > trace["q"][r["written"][-1]]
                    and r["written"][-1] != d
                )
        n = [len(r["written"]) for r in trace["rounds"]]
        assert abs(sum(n) / len(n) - trace["tokens_per_round"]) < 1.5
        assert trace["best"] == max(range(9), key=lambda k: (trace["speedups"][k], -k))
        assert abs(trace["speedups"][K] * (1 + K * 0.1) - trace["tokens_per_round"]) < 1e-12  # a bug's cost is in it


def test_simulation_runs_the_real_functions(monkeypatch):
    right = page.simulate(page.WIDGET_DEFAULT)
    monkeypatch.setattr(lesson, "residual", lambda p, q: q)
    assert page.simulate(page.WIDGET_DEFAULT) != right
    monkeypatch.undo()
    monkeypatch.setattr(lesson, "count_sampled", lambda tokens, drafts, starts: starts.diff())
    assert page.simulate(page.WIDGET_DEFAULT) != right
    monkeypatch.undo()
    assert page.simulate(page.WIDGET_DEFAULT) == right
    with pytest.raises(common.InputError, match="drafts"):
        page.simulate({**page.WIDGET_DEFAULT, "drafts": 9})


def test_size_of_the_widget():
    n = 1
    for values in page.WIDGET_CHOICES.values():
        n *= len(values)
    assert n <= 20_000


def test_a_bug_that_nothing_shows_is_said_to_be_there(monkeypatch, capsys):
    """Answers may end before a bug matters: then the story does not claim that all is well."""
    for name in ("check_rule", "check_kernels", "tell_model", "tell_end", "tell_engine", "tell_economics"):
        monkeypatch.setattr(lesson, name, lambda *args: {})
    monkeypatch.setattr(loader, "load", lambda name: (None, None))
    for flags in ([], ["--break", "past-eos"]):
        lesson.main(flags)
        assert ("NOT CAUGHT (--break past-eos)" in capsys.readouterr().out) == bool(flags)

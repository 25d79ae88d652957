"""Tour 05e: the page's numbers, its widget in every state, the story and what breaks it."""

from __future__ import annotations

import common

import dataclasses
import itertools

import pytest
import torch

from engine import registry
from engine.parallel.eplb import Placement, rebalance_experts
from lab import cli, experts, layouts
from support.close import assert_close
from support.rank_threads import in_threads
from support.scripts import run

lesson, page = registry.lesson("05e_experts"), cli.numbers("05e_experts")


SIZES = {"num_experts": 8, "hidden": 64, "intermediate": 48, "seed": 1}


@pytest.fixture(scope="module")
def layer():
    return layouts.random_moe(**SIZES, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def x():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(2))


# --- The arithmetic ---------------------------------------------------------------------------------------------------


def test_what_a_step_reads():
    """A mixture begins as a dense model of its active size, and ends as one of its total size."""
    facts = page.facts()
    steps = facts["models"]["qwen3_30b_a3b"]["step_gb"]
    assert steps["1"] * 1e9 == facts["dense"]["active"]
    assert steps["1024"] * 1e9 == pytest.approx(facts["dense"]["total"], rel=1e-6)
    assert facts["growth_32"] == pytest.approx(steps["32"] / steps["1"])
    assert facts["h100_ms"]["1"] == pytest.approx(1e3 * facts["dense"]["active"] / 3350e9)


def test_experts_of_four_bits():
    found, whole = page.facts()["int4"], page.facts()["models"]["qwen3_30b_a3b"]
    assert 3 < whole["weights_gb"] / found["weights_gb"] < 16 / page.INT4
    assert found["tokens"] == pytest.approx(whole["compute_bound_tokens"] * page.INT4 / 16)


def test_tiles_of_few_rows_are_mostly_empty():
    shares = [page.filled(n) for n in (1, 32, 256, 4096)]
    assert shares[0] == 1 / 16 and shares == sorted(shares) and shares[-1] > 0.8


def test_published_latencies_are_the_published_bandwidths():
    """DeepEP's table has both; 128 tokens of 8 rows in fp8 there and bf16 back have to fit them."""
    bandwidth = {8: (98, 127), 16: (63, 74), 32: (48, 53), 64: (43, 46), 128: (39, 39), 256: (39, 40)}
    for n, latencies in page.DEEP_EP.items():
        for size, us, gb_s in zip((1, 2), latencies, bandwidth[n]):
            assert 128 * 8 * 7168 * size / us / 1e3 == pytest.approx(gb_s, rel=0.04)


def test_wide_groups_read_little_and_wait_for_the_wire():
    ranks = page.facts()["v3"]["ranks"]
    reads, talks = ([of[name] for of in ranks.values()] for name in ("read_ms", "talk_ms"))
    assert reads == sorted(reads, reverse=True) and reads[0] > talks[0] and reads[1] < talks[1]
    assert all(of["rows"] == 4 * int(n) for n, of in ranks.items())


# --- The widget -------------------------------------------------------------------------------------------------------


STATES = [*itertools.product(*page.WIDGET_CHOICES.values())]


@pytest.mark.parametrize("values", STATES, ids=lambda v: "-".join(map(str, v)))
def test_every_state_of_the_widget(values):
    params = dict(zip(page.WIDGET_CHOICES, values))
    trace, pairs = page.simulate(params), params["tokens"] * params["top_k"]
    spare = 4 if "replicas" in params["placement"] else 0
    for i, step in enumerate(trace["steps"]):
        slots, rows = step["slots"], step["rows"]
        assert len(slots) == 16 + spare and set(slots) == set(range(16)), "every expert is somewhere"
        assert sum(rows) == pairs == sum(map(sum, step["flow"]))
        assert step["ticks"] == 2 * step["send"] + max(step["busy"])
        size = len(slots) // 4
        crossing = sum(n for g, of in enumerate(step["flow"]) for s, n in enumerate(of) if s // size != g)
        assert step["sent"] == crossing and params["top_k"] <= step["asked"] <= step["read"]
        assert step["moved"] == 0 or (i in (4, 8) and params["placement"] != "in order")
    assert trace["final"]["ticks"] == sum(step["ticks"] for step in trace["steps"])
    if params["placement"] == "in order":
        assert trace["final"]["ticks"] == trace["final"]["in_order"]


def test_no_token_visits_an_expert_twice_and_favourites_are_asked_more():
    weights = page.popularity("skewed", 0)
    us = page.uniforms([1] * 4000, range(4000)).tolist()
    found = [page.chosen(weights, us[i : i + 2]) for i in range(0, 4000, 2)]
    assert all(len(set(ids)) == 2 for ids in found)
    asked = torch.tensor(found).flatten().bincount(minlength=16)
    assert asked.argsort(descending=True)[:2].tolist() == page.POPULAR[:2]
    first = torch.tensor([ids[0] for ids in found]).bincount(minlength=16) / 2000
    assert first[page.POPULAR[0]] == pytest.approx(weights[page.POPULAR[0]] / sum(weights), abs=0.03)


def test_what_the_page_says_of_the_widget():
    ticks = {name: [step["ticks"] for step in page.simulate(page.WIDGET_DEFAULT | of)["steps"]] for name, of in (
        ("moved", {}), ("in order", {"placement": "in order"}), ("shifting", {"routing": "shifting"}))}  # fmt: skip
    assert max(ticks["moved"][4:]) < 0.8 * min(ticks["in order"])
    assert min(ticks["shifting"][6:8]) > 1.3 * max(ticks["shifting"][4:6]), "yesterday's placement"


# --- The story --------------------------------------------------------------------------------------------------------


def test_the_loop_is_the_layer(layer, x):
    assert_close(layer(x), lesson.token_by_token(layer, x))
    assert_close(lesson.token_by_token(layer, x), torch.cat([layer(row[None]) for row in x]))


def test_capacity_drops_pairs(layer, x):
    """With room for all it is the layer; without, whoever comes late gets another answer."""
    assert lesson.with_capacity(layer, x, 8.0).equal(layer(x))
    full = lesson.with_capacity(layer, x, 0.5)
    assert common.relative_error(full, layer(x)) > 0.1
    assert common.relative_error(full[:1], layer(x[:1])) < 1e-5, "the first in the batch always finds room"
    alone = lesson.with_capacity(layer, x[-1:], 8.0)
    assert common.relative_error(full[-1:], alone) > 0.1, "an answer that depends on who else is there"


def test_ranks_are_the_layer_before_and_after_experts_move(layer, x):
    found = in_threads(4, lambda group: lesson.rank_story(group, SIZES, x, 4))
    row, elsewhere = x[0].nbytes, sum(layouts.rows_sent(layer, x, 4))
    for name in ("in order", "EPLB"):
        assert_close(torch.cat([rank[name]["y"] for rank in found]), layer(x))
        assert len({rank[name]["placement"] for rank in found}) == 1
    assert sum(rank["in order"]["sent"] for rank in found) == elsewhere * (2 * row + 8)
    load = layouts.choose(layer, x)[1].flatten().bincount(minlength=8).tolist()
    assert found[0]["EPLB"]["placement"] == rebalance_experts(load, 12, 4)
    assert sum(rank["moved"] for rank in found) > 0


def test_rows_of_ranks_are_those_that_arrive(layer, x):
    ids, placement = layouts.choose(layer, x)[1], Placement.plain(8, 4)
    assert lesson.rows_of_ranks(ids, placement) == [int((ids // 2 == r).sum()) for r in range(4)]
    replicas = rebalance_experts(ids.flatten().bincount(minlength=8).tolist(), 12, 4)
    each = lesson.rows_of_ranks(ids, replicas)
    assert sum(each) == ids.numel() and max(each) <= max(lesson.rows_of_ranks(ids, placement))


def test_ranks_that_count_alone_are_wrong(layer, x):
    """Exercise 3: placements that differ send rows to other experts, in the right shapes. Here two ranks believe in
    another placement than the others, as from counts of their own."""

    def rank(group):
        whole, mine = layouts.stacked(layer), x.chunk(4)[group.rank_in_group]
        orders = (tuple(range(8)), (1, 0, *range(2, 8)))
        placement = Placement(orders[group.rank_in_group % 2], 4)
        held = placement.slots(group.rank_in_group)
        here = list(orders[0][held.start : held.stop])
        local = dataclasses.replace(whole, held=held, gate_up=whole.gate_up[here], down=whole.down[here])
        return lesson.dispatch(mine, *layouts.choose(layer, mine), local, group, placement)

    parts = in_threads(4, rank)
    wrong = [common.relative_error(y, want) > 0.01 for y, want in zip(parts, layer(x).chunk(4))]
    assert wrong == [False, True, False, True] and all(y.shape == (8, 64) for y in parts)


def test_wrong_replicas_are_refused_before_a_model_is_loaded():
    with pytest.raises(common.InputError, match="--num-redundant-experts 3: must be a multiple of 4"):
        lesson.main(["--num-redundant-experts", "3"])


def test_hidden_states_take_any_model():
    """One layer, and a text that is shorter than what is asked for."""
    from engine.model import llama

    class Words:
        def encode(self, text):
            return [5, 6, 7]

    model = llama.random_model(device=torch.device("cpu"), num_hidden_layers=1)
    found = lesson.hidden_states(model, Words(), 8)
    assert found.shape == (8, 80) and found.dtype == torch.float32
    assert found.square().mean(-1).tolist() == pytest.approx([1.0] * 8, rel=1e-2)


@pytest.mark.slow
def test_the_break_is_caught():
    done = run("05e_experts", "--capacity-factor", "1.25")
    assert done.returncode == 1 and done.stderr.startswith("05e_experts.py: CHECK FAILED: expert by expert")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_benchmark_measures_what_it_says():
    done = run("05e_experts", "--bench")
    assert done.returncode == 0, done.stderr[-2000:]
    bench = done.results["05e_experts"]["bench"]
    assert {*bench["ms"]} == {*bench["asked"]} == {"1", "8", "32", "256", "1024"}
    assert min(ms for of in bench["ms"].values() for ms in of.values()) > 0
    assert bench["asked"]["1"] == bench["top_k"] and bench["asked"]["1024"] == bench["experts"]
    assert experts.expected_experts(bench["experts"], bench["top_k"], 8) * 0.6 < bench["asked"]["8"]

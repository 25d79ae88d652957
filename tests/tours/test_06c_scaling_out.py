"""Tour 06c: a model in stages, the pipeline's bubble, and the page's own numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import registry
from engine.parallel.pipeline import PipelineEngineCore
from lab import cli, naive

lesson, page = registry.lesson("06c_scaling_out"), cli.numbers("06c_scaling_out")


def test_in_stages_is_the_model(tiny_model):
    ids, positions = (torch.tensor(x, device=tiny_model.device) for x in ([5, 1, 77, 126], [0, 1, 2, 3]))
    whole = tiny_model.forward(ids, positions, naive.recompute)
    assert lesson.in_stages(tiny_model, ids, naive.recompute, 2).equal(whole)


def test_routing_gains_hits_and_costs_balance():
    found = page.facts()["routing"]
    assert found["prefix_4"]["hit_rate"] > found["load"]["hit_rate"] + 0.1
    assert found["prefix_4"]["mean_ttft"] < found["load"]["mean_ttft"] < found["prefix_1000"]["mean_ttft"]
    assert found["load"]["spread"] < found["prefix_4"]["spread"] < found["prefix_1000"]["spread"]


@given(st.integers(1, 6), st.integers(1, 8))
def test_the_bubble_is_the_formulas(stages, micro_batches):
    """One prompt cut into equal chunks, no time on the way: GPipe's share, from the real scheduler and core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "SEND", 0)
        trace = lesson.pipeline(stages, stages, 60, [60 * micro_batches], [1])  # 240 + 60 ticks: 1 to 6 divide it
    assert len(trace["batches"]) == micro_batches
    assert trace["idle"] / (stages * trace["makespan"]) == pytest.approx(lesson.bubble(stages, micro_batches))


@pytest.mark.parametrize("workload", list(lesson.WORKLOADS))
@pytest.mark.parametrize("in_flight", page.WIDGET_CHOICES["in_flight"])
def test_stages_are_never_in_two_places(workload, in_flight):
    trace = page.simulate({"stages": 3, "in_flight": in_flight, "budget": 64, "workload": workload})
    prompts, outputs = lesson.WORKLOADS[workload]
    assert sum(b["tokens"] for b in trace["batches"]) == sum(prompts) + sum(outputs) - len(prompts)
    for before, after in zip(trace["batches"], trace["batches"][1:]):
        assert all(a[1] <= b[0] for a, b in zip(before["spans"], after["spans"]))
        assert in_flight != "one batch" or before["spans"][-1][1] <= after["spans"][0][0]
    for batch in trace["batches"]:
        assert all(a[1] + lesson.SEND <= b[0] for a, b in zip(batch["spans"], batch["spans"][1:]))
        assert sum(batch["scheduled"].values()) == batch["tokens"] and batch["at"] <= batch["spans"][0][0]
        on_the_way = [b for b in trace["batches"] if b["at"] <= batch["at"] < b["spans"][-1][1]]
        assert len({b["place"] for b in on_the_way}) == len(on_the_way) <= (3 if in_flight == "one per stage" else 1)


def test_the_widget_uses_the_real_core(monkeypatch):
    before, put = page.simulate(page.WIDGET_DEFAULT), PipelineEngineCore.put_in_flight
    monkeypatch.setattr(PipelineEngineCore, "put_in_flight", lambda self: None if self.batch_queue else put(self))
    assert page.simulate(page.WIDGET_DEFAULT)["makespan"] > before["makespan"]

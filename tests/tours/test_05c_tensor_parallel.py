"""Tour 05c: the page's numbers, its widget in every state, the story and what breaks it."""

from __future__ import annotations

import common

import itertools
import multiprocessing

import pytest

import on_gpu
from engine import registry
from engine.parallel.layers import ColumnParallelLinear, RowParallelLinear
from lab import cli
from lab.links import LINKS, Link, wire_bytes
from support.cases import named
from support.scripts import run

lesson, page = registry.lesson("05c_tensor_parallel"), cli.numbers("05c_tensor_parallel")


def test_published_sizes_are_bytes():
    """aiconfigurator lists bf16 elements. As bytes they would make NVLink's best ring half as fast as any known one."""
    payload, n, seconds = page.PUBLISHED["32mb_tp8"]
    assert 300e9 < wire_bytes("all_reduce", payload, n) / seconds < 450e9
    assert 300e9 < LINKS["nvlink"].bandwidth == LINKS["nvlink_eager"].bandwidth < 450e9


def test_arithmetic_of_the_facts():
    found = page.facts()
    wire = found["wire"]
    assert wire["calls"] == 61 and wire["payload"] == 2304
    assert wire["all_reduce"] == 61 * 2304 * 4 // 3 and wire["all_gather"] == 49152 * 4 * 2 // 3
    assert found["worst_fit"] < 0.15 and Link(1.0, 1.0).seconds("all_reduce", 8, 1) == 0, "nobody to talk to"
    assert found["too_low"] == pytest.approx({"256kb_tp8": 0.413, "8mb_tp2": 0.286}, abs=1e-3)
    for name, of in found["decode"].items():
        for link in ("nvlink", "nvlink_eager"):
            for n in ("1", "2", "4", "8"):
                total = of["read_ms"][n] + of["talk_ms"][link][n]
                assert of["ms"][link][n] == pytest.approx(total)
                assert of["talk_ms"][link][n] >= (of["floor_ms"][link] if n != "1" else 0), name
    assert found["decode"]["llama_31_8b"]["floor_ms"]["nvlink"] == pytest.approx(65 * 4.5e-3)
    gain = lambda model, link: found["prefill"][model][link]["8"]["speedup"]  # noqa: E731
    assert gain("llama_31_8b", "pcie5") < 1.2 < 2.5 < gain("llama_31_70b", "nvlink")
    for of in found["shared"].values():  # a group reads weights once, replicas send nothing
        ahead = {b: of["one"]["tokens_per_second"][b] > of["replicas"]["tokens_per_second"][b] for b in ("512", "2048")}
        assert ahead == {"512": True, "2048": False} and 512 < of["even_at"] < 2048
        assert of["one"]["prefill"] < of["replicas"]["prefill"]
    even = found["prefill"]["llama_31_8b"]["pcie5"]["even_at"]
    one, eight = (lesson.step_seconds("Llama-3.1-8B", n, LINKS["pcie5"], 1, 1024, 1024) for n in (1, 8))
    assert one["compute"] / even == pytest.approx(eight["compute"] / even + eight["talk"])
    eight = found["owns"]["llama_31_8b"]
    assert eight["16"]["kv_bytes"] == eight["8"]["kv_bytes"] and eight["16"]["kv_copies"] == 2


SPACE = {"ranks": [1, 2, 4], "order": page.ORDERS, "all_reduce": ["kept", "skipped"], "input": list(page.INPUTS)}


def states():
    return [dict(zip(SPACE, values)) for values in itertools.product(*SPACE.values())]


def test_every_state_of_the_widget():
    for params in states():
        with named(params):
            trace = page.simulate(params)
            n, x = params["ranks"], page.INPUTS[params["input"]]
            h = [max(0, sum(a * b for a, b in zip(row, x))) for row in page.A]
            want = [sum(a * b for a, b in zip(row, h)) for row in page.B]
            assert trace["reference"] == want
            after = "replicated" if params["all_reduce"] == "kept" or n == 1 else "broken"
            layouts = ["replicated", "sharded", "partial", after]
            layouts += [after, "sharded", "replicated"] if params["order"] == "row, column" else []
            assert [step["layout"] for step in trace["steps"]] == layouts
            for step in trace["steps"]:
                assert len(step["values"]) == n
                if step["layout"] == "replicated":
                    assert all(value == step["values"][0] for value in step["values"])
                if step["layout"] == "partial" and params["order"] == "column, row":
                    assert [sum(column) for column in zip(*step["values"])] == want, "the sum of partials is the result"
            if params["order"] == "column, row":
                assert [*itertools.chain(*trace["steps"][1]["values"])] == h, (
                    "shards, side by side, are the hidden layer"
                )
            if params["all_reduce"] == "kept" or n == 1:
                assert all(trace["right"]) and trace["agree"]
                assert trace["collectives"] == (0 if n == 1 else page.ORDERS.index(params["order"]) + 1)
            elif params["order"] == "column, row":
                assert not all(trace["right"]) and trace["sent"] == 0
                assert trace["right"][0] == (params["input"] == "lucky"), "a test that looks at rank 0 alone may pass"
            else:
                assert not any(trace["right"]) and trace["agree"], "after the gather all agree, on a wrong answer"
            assert len(page.describe(trace).splitlines()) <= 15


def test_broken_layers_break_the_simulation(monkeypatch):
    right = page.simulate(page.WIDGET_DEFAULT)
    first = staticmethod(lambda tensor, rank, n: tensor[: tensor.shape[0] // n])
    with monkeypatch.context() as patch:
        patch.setattr(ColumnParallelLinear, "shard", first)
        assert page.simulate(page.WIDGET_DEFAULT) != right
    with monkeypatch.context() as patch:
        patch.setattr(RowParallelLinear, "__call__", lambda self, x: 2 * self.local(x))
        assert not any(page.simulate(page.WIDGET_DEFAULT)["right"])
    with monkeypatch.context() as patch:
        patch.setattr(page, "wire_bytes", lambda collective, payload, n: 3 * payload)
        assert page.simulate(page.WIDGET_DEFAULT)["sent"] != right["sent"]


def test_the_wrong_number_of_ranks_is_refused_before_anything_starts(real_model):
    with pytest.raises(common.InputError, match=r"tensor_parallel_size 4: .*num_attention_heads \(9\).*: 1, 3$"):
        lesson.main(["--tensor-parallel-size", "4"])
    assert not multiprocessing.active_children()


def test_the_story_starts_with_the_default_size_of_its_model(monkeypatch, tmp_path):
    """A wrong size that somebody asked for stays an error."""
    folder = on_gpu.random_folder(tmp_path / "model", hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                                  num_attention_heads=8, num_key_value_heads=2, head_dim=8)  # fmt: skip
    asked = []

    def ranks(world_size, story, n, *rest):
        asked.append((world_size, n))
        raise common.CheckFailed("enough")

    monkeypatch.setattr(lesson, "Ranks", ranks)
    monkeypatch.setattr(lesson, "start_context", lambda: None)
    for flags, n in (([], 2), (["-tp", "8"], 8)):
        with pytest.raises(common.CheckFailed, match="enough"):
            lesson.main(["--model", str(folder), *flags])
        assert asked.pop() == (max(4, n), n)
    with pytest.raises(common.InputError, match=r"tensor_parallel_size 3: .*: 1, 2, 4, 8$"):
        lesson.main(["--model", str(folder), "-tp", "3"])


@pytest.mark.slow
def test_the_break_is_caught():
    done = run("05c_tensor_parallel", "--skip-all-reduce")
    assert done.returncode == 1 and "without the all-reduce: relative error of the logits" in done.stdout
    assert done.stderr.startswith("05c_tensor_parallel.py: CHECK FAILED: logits") and len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_benchmark_measures_what_it_says():
    done = run("05c_tensor_parallel", "--bench")
    assert done.returncode == 0, done.stderr[-2000:]
    bench = done.results["05c_tensor_parallel"]["bench"]
    assert {size: len(times) for size, times in bench["all_reduce_us"].items()} == {"2": 4, "3": 4}
    assert {name: [*of] for name, of in bench["step_ms"].items()} == {"smollm2": ["1", "3"], "wide": ["1", "2", "4"]}
    flat = [t for of in bench["step_ms"].values() for times in of.values() for t in times.values()]
    assert len(flat) == 10 and min(flat) > 0

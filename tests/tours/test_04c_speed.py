"""Lesson 04c: every stage writes the same tokens, operations are counted exactly, nobody pays for those who wait."""

from __future__ import annotations

import common

import itertools
import sys
from collections import Counter

import pytest
import torch

from engine import registry
from engine.config import SchedulerConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler
from engine.model import llama
from engine.model.packed_linear import PackedLinear
from engine.request import Request, SamplingParams
from engine.worker.input_batch import InputBatch
from lab import cli, naive, recorded
from lab.dry_run import DryRun
from lab.offline_run import serve

lesson, page = registry.lesson("04c_speed"), cli.numbers("04c_speed")
paged = registry.lesson("02_paged_attention")
LOOP, FINAL = lesson.STAGES[0], lesson.STAGES[-1]
PROMPTS, OUTPUTS = [[5, 9, 3], [7] * 17, [1, 2] * 20, [4]], [9, 3, 6, 1]


def served(model, stage, num_seqs=4):
    core = lesson.make_core(model, stage, num_seqs, 64)
    return serve(core, PROMPTS, OUTPUTS).token_ids


# --- The stages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", lesson.STAGES, ids=lambda stage: stage.name)
@pytest.mark.parametrize("num_seqs", [4, 2])
def test_every_stage_writes_the_same_tokens(stage, num_seqs):
    model = llama.random_model(3)
    expected = [naive.generate(model, p, n) for p, n in zip(PROMPTS, OUTPUTS)]
    assert served(model, stage, num_seqs) == expected
    assert lesson.alone(model, PROMPTS[:1], OUTPUTS[0], cached=True)[0] == expected[:1]
    assert lesson.alone(model, PROMPTS[:1], OUTPUTS[0], cached=False)[0] == expected[:1]


def test_a_stage_has_what_it_says(library):
    """The first has nothing, each next one thing more, the last is the engine's runner."""
    attention = ["in a loop", "gathered", "in place"].index
    done = [[attention(s.attention), s.fused, s.arrays, s.packed] for s in lesson.STAGES]
    assert [sum(each) for each in done] == [0, 1, 2, 3, 4, 5] and done[4] == [1, 1, 1, 1]
    assert all(a <= b for before, after in itertools.pairwise(done) for a, b in zip(before, after))
    model = llama.random_model(0, device=torch.device("cpu"))
    first, final = (lesson.make_core(model, stage, 2, 32).runner for stage in (LOOP, FINAL))
    assert isinstance(first.model.linear["layers.0.qkv_proj"], lesson.SplitLinear)
    assert isinstance(first.batch, lesson.ListBatch) and isinstance(final.batch, InputBatch)
    assert type(model.linear["layers.0.qkv_proj"]) is llama.Linear  # the caller's model is as it was
    packed = final.model.linear["layers.0.qkv_proj"]
    assert isinstance(packed, PackedLinear) == (library != "neither")
    assert getattr(packed, "mkl", False) == (library == "MKL")


@pytest.mark.parametrize("with_bias", [False, True])
def test_split_products_are_the_fused_ones(with_bias):
    torch.manual_seed(0)
    weight = torch.randn(10, 6)
    layer, x = llama.Linear(weight, torch.randn(10) if with_bias else None), torch.randn(3, 6)
    split = lesson.SplitLinear(layer, [4, 3, 3])
    torch.testing.assert_close(split(x), layer(x))
    assert [len(part.weight) for part in split.parts] == [4, 3, 3]
    assert all(part.weight.untyped_storage().data_ptr() == weight.data_ptr() for part in split.parts)  # no copy


def test_attention_in_a_loop_is_the_batched_one():
    """Prompts and decodes together, lengths on both sides of a block's end, blocks in any order, garbage elsewhere."""
    torch.manual_seed(1)
    model = llama.random_model(0)
    query_lens, seq_lens = [1, 5, 1, 16, 1], [1, 5, 17, 16, 32]
    blocks = [[7], [3], [9, 2], [4], [6, 1]]
    meta = paged.AttentionMetadata.build(blocks, seq_lens, query_lens, 16, model.device)
    caches = [paged.PagedKVCache(model, 12, 16) for _ in range(2)]
    for cache in caches:
        torch.manual_seed(2)
        for layer in cache.layers:
            layer.copy_(torch.randn(layer.shape))
            layer[:, 0] = 0
    T = sum(query_lens)
    q, k, v = (torch.randn(T, heads, 16).to(model.device) for heads in (6, 2, 2))
    for layer in range(2):
        one, other = lesson.loop_attention(caches[0], meta)(layer, q, k, v), caches[1].attend(meta)(layer, q, k, v)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        assert torch.equal(caches[0].layers[layer], caches[1].layers[layer])


def test_lists_and_arrays_prepare_the_same_batch():
    lists, arrays = lesson.ListBatch(16), InputBatch(4, 64, 16)
    requests = [Request(str(i), list(range(i, i + 5 + 11 * i)), SamplingParams()) for i in range(3)]
    blocks = [[3], [5, 8], [2, 9]]
    for request in requests:
        lists.add(request.request_id), arrays.add(request.request_id)
    for query_lens in ([5, 16, 27], [1, 1, 1]):
        seq_lens = [request.num_tokens for request in requests]
        found = []
        for batch in (lists, arrays):
            rows = [batch.update(request, b) for request, b in zip(requests, blocks)]
            found.append(batch.prepare(rows, query_lens, seq_lens, torch.device("cpu")))
        (ids, meta), (other_ids, other) = found
        assert torch.equal(ids, other_ids) and meta.max_seq_len == other.max_seq_len
        for name in ("positions", "slot_mapping", "query_start_loc", "seq_lens", "block_table"):
            assert torch.equal(getattr(meta, name), getattr(other, name)), name
        for request in requests:
            request.append_output_token_id(7)
    lists.remove("0")


# --- Operations -------------------------------------------------------------------------------------------------------


def test_operations_are_counted_as_they_run():
    with lesson.CountOperations() as counter:
        x = torch.zeros(4, 4)  # 1
        x.view(16).add_(1)  # 1: a view is free
        torch.cat((x, x))  # 1
        x.t()[0].unsqueeze(0)
    assert counter.count == 3


def test_a_loop_pays_per_sequence_and_a_batch_does_not():
    loop = {B: lesson.operations(LOOP, B) for B in (1, 2, 8)}
    per_sequence = loop[2][0] - loop[1][0]
    assert per_sequence > 3 and loop[8][0] - loop[2][0] == 6 * per_sequence
    for stage in lesson.STAGES[1:]:
        assert lesson.operations(stage, 8) == lesson.operations(stage, 2)
    counts = [lesson.operations(stage, 8)[0] for stage in lesson.STAGES]
    assert counts[:-1] == sorted(counts[:-1], reverse=True)
    assert counts[-1] == counts[-2] + 1  # scores, bias, softmax, sum: four for the fetch, the clearing and SDPA
    model = llama.random_model(0, num_hidden_layers=5, device=torch.device("cpu"))
    core = lesson.make_core(model, LOOP, 3, 32)
    for i in range(3):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        core.add_request(Request(str(i), [1] * 10, params))
    core.step()
    with lesson.CountOperations() as counter:
        core.step()
    per_layer, outside = lesson.operations(LOOP, 3)
    assert counter.count == 5 * per_layer + outside
    # Three products more per layer (q and k and v for qkv, gate and up for gate_up), and a concatenation for each pair.
    assert counts[1] - counts[2] == 5


# --- The profile ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [LOOP, FINAL], ids=lambda stage: stage.name)
def test_a_profile_adds_up(stage, monkeypatch):
    """On a clock that ticks once per look, every tick inside a step belongs to exactly one part."""
    model, ticks = llama.random_model(0), [0]

    def clock():
        ticks[0] += 1
        return float(ticks[0])

    core = lesson.make_core(model, stage, 2, 32)
    monkeypatch.setattr(lesson.time, "perf_counter", clock)
    parts = lesson.profile(core, [[1, 2, 3], [4, 5]], 5)
    assert list(parts) == list(lesson.PARTS) and all(ms > 0 for ms in parts.values())
    L = model.config.num_hidden_layers
    # A look at the clock before and after each call: 4 L + 1 products, L attentions and their planning, …
    assert parts["products"] == 1e3 * (4 * L + 1)
    assert parts["attention"] == 1e3 * (L + 1)
    assert parts["scheduler"] == 2e3 and parts["sampling"] == 1e3
    # … and of the forward pass what lies between its 5 L + 1 calls.
    assert parts["rest"] == 1e3 * (5 * L + 2)


# --- Who waits --------------------------------------------------------------------------------------------------------


def calls_per_step(kind, running, waiting):
    """Python and C functions called by a step: the same on every machine."""
    limits = SchedulerConfig(2048, running, max(2048, 16 * running))
    core = DryRun(kind(limits, KVCacheManager(1 + 4 * running, 16, 2048, enable_caching=False)))
    for i in range(running + waiting):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        core.add_request(Request(str(i), [0] * 16, params, arrival_time=float(i)))
    core.step()
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        core.step()
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"]


def test_a_step_is_linear_in_who_runs_and_blind_to_who_waits():
    one, two, three = (calls_per_step(Scheduler, n, 0) for n in (100, 200, 300))
    assert three - two == two - one > 0
    assert calls_per_step(Scheduler, 100, 5000) == calls_per_step(Scheduler, 100, 1) <= one + 1
    assert calls_per_step(lesson.RescanningScheduler, 100, 5000) > one + 5000


def test_the_rescanning_scheduler_is_slow_and_right():
    def order(kind):
        core = DryRun(kind(SchedulerConfig(64, 2, 64), KVCacheManager(30, 16, 64, enable_caching=False)))
        for i in range(9):
            params = SamplingParams(max_tokens=1 + i % 3, ignore_eos=True)
            core.add_request(Request(str(i), [0] * 4, params, arrival_time=float(i)))
        steps = []
        while core.scheduler.has_unfinished_requests():
            steps.append([output.request_id for output in core.step()])
        return steps

    assert order(lesson.RescanningScheduler) == order(Scheduler)


def test_the_clock_measures_a_full_engine():
    assert 0 < lesson.scheduler_seconds(3, 5, steps=4) < 1

    class Shy(Scheduler):
        def _schedule_waiting(self, output):
            if not self.running:
                super()._schedule_waiting(output)
                del self.running[2:]

    with pytest.raises(common.CheckFailed, match="2 run and 5 wait"):
        lesson.scheduler_seconds(3, 5, steps=4, kind=Shy)


# --- The model of a step ----------------------------------------------------------------------------------------------


def test_a_step_by_arithmetic():
    W = 134_515_008 - 576 * 61  # the norms' weights are not multiplied with
    assert page.facts()["weights"] == pytest.approx(W, rel=1e-3)
    trace = page.simulate(page.WIDGET_DEFAULT | {"batch": 8})
    assert [stage["name"] for stage in trace["stages"]] == [stage.name for stage in lesson.STAGES]
    loop, gathered, final = trace["stages"][0], trace["stages"][1], trace["stages"][-1]
    per_layer, outside = lesson.operations(FINAL, 8)
    assert final["operations"] == 30 * per_layer + outside
    assert final["parts_us"]["products"] == round(4 * page.facts()["weights"] / 4e10 * 1e6) == trace["floor_us"]
    assert loop["parts_us"]["products"] == round(2 * 8 * page.facts()["weights"] / 1.1e11 * 1e6)
    assert final["parts_us"]["attention"] == round(8 * 256 * 46_080 / 4e10 * 1e6)
    assert gathered["parts_us"]["attention"] == pytest.approx(3 * final["parts_us"]["attention"], abs=2)
    assert loop["per_layer"] - 8 * loop["per_sequence"] == lesson.operations(LOOP, 1)[0] - 5
    for stage in trace["stages"]:
        assert stage["total_us"] == sum(stage["parts_us"].values())
        assert stage["tokens_per_second"] == pytest.approx(8e6 / stage["total_us"])
        assert stage["share_of_floor"] == pytest.approx(trace["floor_us"] / stage["total_us"])
    bounds = [page.simulate(page.WIDGET_DEFAULT | {"batch": B})["stages"][-1]["bound"] for B in (1, 8, 32, 128)]
    assert bounds == ["memory", "memory", "arithmetic", "arithmetic"]


def test_the_arithmetic_is_near_what_was_measured():
    """32 sequences, of 160 tokens in the profile's middle, between contexts 64 and 256."""
    measured = recorded.results(lesson.KEY)["bench"]["profile"]
    low, high = (page.simulate(page.WIDGET_DEFAULT | {"context": S})["stages"] for S in (64, 256))
    for name, i in (("attention_in_a_loop", 0), ("final", -1)):
        assert 0.9 * low[i]["total_us"] < 1000 * measured[name]["total"] < 1.1 * high[i]["total_us"]
        assert low[i]["parts_us"]["products"] == pytest.approx(1000 * measured[name]["products"], rel=0.05)


def test_more_is_never_slower_by_arithmetic():
    """But for the operations that attention in place has more than a gather: among few on a GPU they cost more."""
    for machine in page.MACHINES:
        for B in page.WIDGET_CHOICES["batch"]:
            trace = page.simulate(page.WIDGET_DEFAULT | {"machine": machine, "batch": B})
            rates = [stage["tokens_per_second"] for stage in trace["stages"]]
            if machine == "a GPU" and B < 32:
                assert rates.pop() < rates[-1]
            assert rates == sorted(rates)


def test_what_the_page_says_of_stages_on_a_gpu():
    """In a batch the loop is the most that can be removed; of what then is left, two products more are a sixth."""
    for batch in (4, 8, 32):
        trace = page.simulate(page.WIDGET_DEFAULT | {"machine": "a GPU", "batch": batch})
        total = [stage["total_us"] for stage in trace["stages"]]
        saved = [before - after for before, after in itertools.pairwise(total)]
        assert saved[0] == max(saved) and round(total[1] / saved[1]) == 6
        assert (saved[-1] < 0) == (batch < 32)  # in place is an operation more


# --- The peers --------------------------------------------------------------------------------------------------------


def test_the_schedulers_side_by_side(monkeypatch, capsys):
    """In microseconds, ours and a peer's."""
    monkeypatch.setattr(lesson, "scheduler_seconds", lambda running, waiting: running * 1e-6)
    found = page.scheduler_table(lambda **asked: {"seconds": 1e-3 if asked["command"] == "schedule" else 0})
    assert found["1000_10000"] == {"ours": pytest.approx(1000), "vllm": pytest.approx(1000)}
    assert page.scheduler_table(None)["64_0"] == {"ours": pytest.approx(64)}


def test_measurements_are_sane():
    """What the page quotes: every stage has its numbers, later ones are not slower by much, and no floor is broken."""
    bench = recorded.results(lesson.KEY)["bench"]
    names = ["no cache", "a cache, one by one", *(stage.name for stage in lesson.STAGES)]
    rates = [bench["stages"][page.slug(name)]["tokens_per_second"] for name in names]
    assert all(b > 0.9 * a for a, b in itertools.pairwise(rates)) and rates[-1] > 50 * rates[0]
    assert all(rate < bench["floor"] for rate in rates)
    for parts in bench["profile"].values():
        assert sum(parts[part] for part in lesson.PARTS) == pytest.approx(parts["total"])
    for found in bench["throughput"].values():
        assert found["over_transformers"] > 1.5 and found["over_vllm"] > 0.8 and found["ours"] < found["floor"]
        assert found["same_answers"] == 1
    for found in bench["scheduler_us"].values():
        assert 5 * found["ours"] < found["vllm"]


@pytest.mark.slow
def test_the_real_model(real_model):
    model, tokenizer = real_model
    prompts = [tokenizer.encode(lesson.TEXT)[i : i + 20] for i in range(3)]
    expected = [naive.generate(model, prompt, 6) for prompt in prompts]
    for stage in lesson.STAGES:
        assert serve(lesson.make_core(model, stage, 3, 32), prompts, [6] * 3).token_ids == expected


def test_a_peer_that_nobody_asks_is_refused():
    with pytest.raises(common.InputError, match="only --bench"):
        lesson.main(["--vllm", "python"])

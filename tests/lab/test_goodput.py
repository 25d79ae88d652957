"""The goodput simulation of lesson 08: its cost model, its cluster on a clock, and what it says about deployments."""

from __future__ import annotations

import common

import functools
import itertools
import json
import math
import random
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler
from engine.request import Request, RequestStatus, SamplingParams
from engine.worker.model_runner import ModelRunner
from lab import goodput as lesson
from lab import recorded
from support.tiers import and_slowly

Cluster, CostModel, Deployment, Job, Limits = (
    lesson.Cluster, lesson.CostModel, lesson.Deployment, lesson.Job, lesson.Limits)  # fmt: skip
COST = lesson.H100_8B
LAYOUTS = ("1PD", "3PD", "1P1D", "2P2D", "1P3D", "3P1D")


@pytest.fixture(autouse=True)
def _fresh():
    """Tests break classes; nothing may be remembered from another one."""
    lesson.widget_cluster.cache_clear()
    lesson.outcomes.cache_clear()
    yield
    lesson.widget_cluster.cache_clear()
    lesson.outcomes.cache_clear()


def free_blocks(cluster):
    return [i.scheduler.kv_cache_manager.block_pool.num_free_blocks for i in cluster.instances]


# --- The cost model -------------------------------------------------------------------------------------------------


def test_roofline_is_the_published_line():
    """vLLM's blog: 6.44 ms + 43.7 ns per token of context, for a decode of Llama-3.1-8B on an H100."""
    assert COST.of([(1, 0)]) / 1e3 == pytest.approx(6.44, rel=0.002)
    slope = (COST.of([(1, 101_000)]) - COST.of([(1, 1000)])) / 100_000
    assert slope * 1e3 == pytest.approx(43.7, rel=0.01)


def test_prices_are_whole_picoseconds_and_durations_whole_microseconds():
    """The browser's copy of the arithmetic rests on these very numbers."""
    assert vars(COST) == {"overhead": 1_460_000_000, "weights": 4_978_391_159, "token": 23_524_058, "row": 1_770_599,
                          "pair": 884, "context": 43_473}  # fmt: skip
    assert (lesson.KV_TOKENS, lesson.HIDDEN_BYTES) == (477_742, 8192)
    cost = CostModel(1_000_000, 2_000_000, 1_000_000, 500_000, 100_000, 300_000)
    assert [cost(1, 1, 0, 0), cost(3, 1, 0, 0), cost(1, 1, 9, 0), cost(1, 1, 10, 3)] == [3, 4, 3, 4]


def test_a_step_is_bound_by_memory_or_by_compute():
    ridge = COST.weights // COST.token
    at = lambda n: COST(n, 1, 0, 0)  # noqa: E731
    assert at(1) == at(ridge - 1) < at(ridge + 2) and at(4 * ridge) - at(2 * ridge) == pytest.approx(
        2 * ridge * COST.token / 1e6, abs=1
    )


def test_a_step_of_256_tokens_takes_longer_than_one_of_224_by_what_the_page_says():
    short, long = (COST(budget, 8, (budget - 8) * 1024, 8 * 2048) for budget in (224, 256))  # 8 decodes and a chunk
    assert (long - short) / 1000 == pytest.approx(0.8, abs=0.05)


def test_features_count_what_attention_sees():
    work = [(1, 10), (1, 1), (4, 4), (3, 10)]
    seen = sum(S - n + i + 1 for n, S in work if n > 1 for i in range(n))
    assert lesson.features(work) == (9, 4, seen, 11)


TRUE = CostModel(2_000_000_000, 15_000_000_000, 1_100_000_000, 400_000_000, 90_000, 800_000)


def synthetic(noise: float, seed: int = 0, cost: CostModel = TRUE):
    works = [[(1, S)] * B for B in (1, 2, 4, 8, 16, 32) for S in (64, 512, 1024)]
    works += [[(n, n)] for n in (8, 16, 64, 128, 256, 512, 1024)]
    works += [[(1, S)] * B + [(n, n)] for B, S, n in itertools.product((4, 16), (128, 768), (64, 512))]
    rng = random.Random(seed)
    return [[*lesson.features(w), cost.of(w) / 1e6 * math.exp(rng.gauss(0, noise))] for w in works]


def test_fit_recovers_what_made_the_steps():
    found = lesson.fit(synthetic(0))
    for name in ("weights", "token", "row", "pair", "context", "overhead"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert lesson.fit_error(found, synthetic(0)) < 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_fit_stands_noise(seed):
    table = synthetic(0.05, seed)
    found = lesson.fit(table)
    assert lesson.fit_error(found, synthetic(0)) < 0.04 and lesson.fit_error(found, table) < 0.06
    assert found.token == pytest.approx(TRUE.token, rel=0.15) and min(vars(found).values()) >= 0


def test_fit_has_no_negative_prices():
    free = CostModel(0, 15_000_000_000, 1_100_000_000, 0, 0, 0)
    found = lesson.fit(synthetic(0.05, 1, free))
    assert min(vars(found).values()) >= 0 and lesson.fit_error(found, synthetic(0, 0, free)) < 0.04
    with pytest.raises(ValueError, match="6 are needed"):
        lesson.fit(synthetic(0)[:5])
    assert lesson.fit(synthetic(0)[:6])


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_stored_calibration_holds(machine):
    found = recorded.results("08_disagg", machine).get("bench", {}).get("cost_model")
    if not found:
        pytest.skip(f"results/{machine}.json has no calibration yet: run 08_disagg.py --bench --json")
    cost = lesson.fit(found["table"])
    assert vars(cost) == pytest.approx(found["cost"], rel=1e-3, abs=1000)  # picoseconds
    assert lesson.fit_error(cost, found["table"]) == pytest.approx(found["median_error"])
    assert found["median_error"] <= 0.10
    T, R, _, keys, _ = zip(*found["table"])
    assert max(T) >= 512 and max(R) >= 16 and max(keys) >= 4096 and len(T) >= 20  # it says something about a range


def test_measured_steps_are_what_they_say(tiny_model, monkeypatch):
    monkeypatch.setattr(lesson, "DECODES", ((1, 40), (3, 17)))
    monkeypatch.setattr(lesson, "PROMPTS", (16, 33))
    monkeypatch.setattr(lesson, "MIXTURES", ((2, 20, 9),))
    steps = []
    run = ModelRunner.execute_model

    def spy(self, output):
        steps.append([(n, r.num_computed_tokens) for r in [*output.scheduled_running_reqs, *output.scheduled_new_reqs]
                      for n in [output.num_scheduled_tokens[r.request_id]]])  # fmt: skip
        return run(self, output)

    monkeypatch.setattr(ModelRunner, "execute_model", spy)
    table = lesson.measure_steps(tiny_model, rounds=1)
    works = [[(1, 40)], [(1, 17)] * 3, [(16, 16)], [(33, 33)], [(1, 20)] * 2 + [(9, 9)]]
    assert [tuple(row[:4]) for row in table] == [lesson.features(w) for w in works]
    assert all(row[4] > 0 for row in table) and all(work in steps for work in works)


def test_a_measured_step_is_the_median_without_the_first_round(tiny_model, monkeypatch):
    monkeypatch.setattr(lesson, "DECODES", ((1, 40),))
    monkeypatch.setattr(lesson, "PROMPTS", ())
    monkeypatch.setattr(lesson, "MIXTURES", ())
    seconds = [99.0, 3.0, 98.0, 1.0]
    monkeypatch.setattr(lesson, "time_step", lambda core, work: seconds.pop(0))
    assert lesson.measure_steps(tiny_model, rounds=3)[0][4] == 3.0 and not seconds


# --- The cluster ----------------------------------------------------------------------------------------------------


def random_jobs(lengths, gaps):
    arrivals = itertools.accumulate(gaps)
    return [Job(str(i), at, prompt, output) for i, (at, (prompt, output)) in enumerate(zip(arrivals, lengths))]


jobs_of = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 40)), min_size=1, max_size=12).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.lists(st.integers(0, 60_000), min_size=len(lengths),
                                                         max_size=len(lengths))))  # fmt: skip


@settings(max_examples=40)
@given(jobs_of, st.sampled_from(LAYOUTS), st.sampled_from([None, 64, 512]), st.sampled_from([*lesson.LINKS.values()]),
       st.booleans())  # fmt: skip
def test_nothing_is_lost_and_leaps_change_nothing(drawn, layout, budget, link, layerwise):
    deployment = Deployment(layout, budget, link, layerwise)
    runs = [Cluster(deployment, random_jobs(*drawn), leap=leap) for leap in (1, 7, lesson.LEAP)]
    before = free_blocks(runs[0])
    for cluster in runs:
        jobs, split = cluster.run(), "P" in layout and "PD" not in layout
        assert free_blocks(cluster) == before  # no block leaks, on either side
        assert cluster.bytes_moved == split * sum(job.prompt for job in jobs) * lesson.KV_BYTES
        prompts = [sum(step[2] for step in gpu.steps) for gpu in cluster.instances]
        computed = [n for gpu, n in zip(cluster.instances, prompts) if "P" in gpu.roles]
        assert sum(computed) == sum(job.prompt for job in jobs)
        assert all(gpu.backlog == gpu.promised == 0 and not gpu.scheduler.requests for gpu in cluster.instances)
        for job in jobs:
            assert job.arrival <= job.prefill[0] < job.prefill[1] <= job.first <= job.last
            assert len(job.path) == 1 + split and (job.last - job.first == 0) == (job.output == 1)
            assert job.gap * (job.output - 1) >= job.last - job.first
            if split:
                assert job.prefill[0] <= job.transfer[0] < job.transfer[1] < job.first
                assert job.prefill[1] < job.transfer[1]
        for gpu in cluster.instances:
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(gpu.steps))  # one step at a time
        if split:
            for end in (0, 1):  # a link carries one cache at a time
                for _, group in itertools.groupby(sorted(jobs, key=lambda j: (j.path[end], j.transfer)),
                                                  key=lambda j: j.path[end]):  # fmt: skip
                    spans = [job.transfer for job in group]
                    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    states = [[(job.outcome, job.prefill, job.transfer, job.path) for job in run.jobs.values()] for run in runs]
    assert states[0] == states[1] == states[2]
    if max(output for _, output in drawn[0]) < 2:
        return
    counts = [sum(step[3] for gpu in run.instances for step in gpu.steps) for run in runs[:1]]
    expected = sum(job.output for job in runs[0].jobs.values()) - len(runs[0].jobs)
    assert counts == [expected]


def test_a_prompt_that_gets_one_token_per_step_does_not_leap():
    """63 decodes leave one token of a budget of 64: the newcomer's chunk looks like a decode, and is none."""
    crowd = [(1, 200)] * 63 + [(10, 5)]
    runs = [Cluster(Deployment("1PD", 64), random_jobs(crowd, [0] * 63 + [20_000]), leap=leap) for leap in (1, 32)]
    outcomes = [[job.outcome for job in run.run()] for run in runs]
    assert outcomes[0] == outcomes[1] and outcomes[0][-1][0] > 10 * COST(64, 64, 0, 0)


def test_one_request_takes_what_its_parts_take():
    prompt, output = 1000, 5
    prefill = COST.of([(prompt, prompt)])
    decode = [COST.of([(1, prompt + i)]) for i in range(output)]
    wire = -(-prompt * lesson.KV_BYTES * 10**6 // (50 * 10**9))
    (job,) = Cluster(Deployment("1P1D"), [Job("a", 70, prompt, output)]).run()
    assert job.outcome[0] == prefill + wire + decode[0]
    assert job.last - job.first == sum(decode[1:]) and job.gap == decode[-1]
    assert job.outcome[1:] == (sum(decode[1:]) / 4, job.gap), "four times between five tokens"
    (job,) = Cluster(Deployment("1PD"), [Job("a", 70, prompt, output)]).run()
    assert job.outcome[0] == prefill and job.last - job.first == sum(decode[1:])
    (job,) = Cluster(Deployment("1P1D", layerwise=True), [Job("a", 70, prompt, output)]).run()
    assert job.outcome[0] == prefill + -(-wire // 32) + decode[0]
    (job,) = Cluster(Deployment("1PD", 256), [Job("a", 70, prompt, output)]).run()
    assert job.outcome[0] == sum(COST.of([(n, S)]) for n, S in ((256, 256), (256, 512), (256, 768), (232, 1000)))


@pytest.mark.parametrize(
    ("layout", "budget", "roles", "kind", "limits"),
    [("4PD", None, "PD", "ReservingScheduler", (8192, 256)), ("2P2D", None, "P", "PrefillScheduler", (8192, 256)),
     ("2P2D", None, "D", "DecodeScheduler", (8192, 256)), ("4PD", 512, "PD", "ReservingScheduler", (512, 256)),
     ("4PD", 128, "PD", "ReservingScheduler", (128, 128)), ("1E1PD", None, "E", "PrefillScheduler", (8192, 1))],
)  # fmt: skip
def test_who_schedules_what_within_which_limits(layout, budget, roles, kind, limits):
    made = Deployment(layout, budget).scheduler(roles, 4000, 100)
    assert type(made).__name__ == kind
    assert made.config.enable_chunked_prefill == (budget is not None or roles != "PD")
    assert (made.max_num_scheduled_tokens, made.max_num_running_reqs) == limits


def test_without_chunks_a_budget_holds_the_longest_prompt():
    assert Deployment("1PD").scheduler("PD", 20_000, 200).max_num_scheduled_tokens == 20_000
    (job,) = Cluster(Deployment("1PD"), [Job("a", 0, 20_000, 2)]).run()
    assert job.outcome[0] == COST.of([(20_000, 20_000)])


def test_a_pool_holds_what_it_should_to_the_last_block():
    (job,) = Cluster(Deployment("1PD"), [Job("a", 0, 1000, 300)], kv_tokens=11 * lesson.BLOCK_SIZE).run()
    assert job.last > 0, "1,299 positions are eleven blocks"


def test_whoever_comes_when_a_step_ends_is_in_the_next_one():
    """In the same microsecond: a request at an engine that decodes, and a cache at a decoder."""
    (alone,) = (cluster := Cluster(Deployment("1PD"), [Job("a", 0, 100, 20)], leap=1)).run()
    ends = [end for _, end, *_ in cluster.instances[0].steps]
    for leap in (1, lesson.LEAP):
        jobs = Cluster(Deployment("1PD"), [Job("a", 0, 100, 20), Job("b", ends[9], 50, 2)], leap=leap).run()
        assert jobs[1].prefill[0] == ends[9] and jobs[0].last > alone.last
    (alone,) = (cluster := Cluster(Deployment("1P1D"), [Job("a", 0, 100, 20)], leap=1)).run()
    ends = [end for _, end, *_ in cluster.instances[1].steps]
    way = COST.of([(1000, 1000)]) + -(-1000 * lesson.KV_BYTES * 10**6 // cluster.deployment.link)
    start = next(end - way for end in ends if end > way + ends[0])
    for leap in (1, lesson.LEAP):
        cluster = Cluster(Deployment("1P1D"), [Job("a", 0, 100, 20), Job("b", start, 1000, 2)], leap=leap)
        job, (_, arrived) = cluster.jobs["b"], (cluster.run(), cluster.jobs["b"].transfer)[1]
        assert arrived in ends and job.first - arrived < 2 * COST.of([(1, 1000), (1, 120)]) - 1000


def test_a_prompt_goes_where_fewest_tokens_wait_and_then_fewest_requests():
    prompts = (8000, 8000, 5000, 50, 50, 50)  # the first two are begun at once, the others wait
    jobs = [Job(str(i), i, prompt, 4) for i, prompt in enumerate(prompts)]
    assert [job.path for job in Cluster(Deployment("2PD"), jobs).run()] == [[0], [1], [0], [1], [1], [1]]
    jobs = [Job("a", 0, 50, 99), Job("b", 200_000, 50, 4), Job("c", 600_000, 50, 4)]
    assert [job.path for job in Cluster(Deployment("2PD"), jobs).run()] == [[0], [1], [1]]


def test_whoever_is_done_at_a_prefill_leaves_the_books_and_keeps_its_blocks():
    manager = KVCacheManager(9, 16, 64, enable_caching=False)
    scheduler = lesson.PrefillScheduler(SchedulerConfig(64, 4, 64), manager)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    scheduler.add_request(Request("a", [0] * 20, params))
    scheduler.update_from_output(scheduler.schedule(), {"a": [0]})
    assert not scheduler.has_unfinished_requests() and scheduler.schedule().finished_req_ids == ["a"]
    assert len(manager.req_to_blocks["a"]) == 2
    scheduler.release("a")
    assert manager.block_pool.num_free_blocks == 8 and not scheduler.unsent


def test_a_decoder_never_waits_for_a_prompt():
    """What disaggregation buys, and nothing else does: its steps hold nobody's prompt."""
    jobs = [Job(str(i), 9000 * i, 8192 if i % 3 == 0 else 100, 30) for i in range(12)]
    longest = {}
    for layout, budget in (("2P1D", None), ("3PD", None), ("3PD", 512)):
        cluster = Cluster(Deployment(layout, budget, lesson.LINKS["NVLink"]), [Job(*vars(j).values()) for j in jobs])
        longest[layout, budget] = max(job.gap for job in cluster.run())
    assert longest["2P1D", None] <= COST.of([(1, 8192 + 30)] * 12)
    assert longest["3PD", None] > COST.of([(8192, 8192)]) and longest["3PD", 512] < COST.of([(1024, 8192)])


def test_a_prompt_keeps_its_blocks_until_they_have_arrived():
    """A slow link fills the memory where prompts are computed: the third must wait for the first one's transfer."""
    jobs = [Job(str(i), 0, 1024, 2) for i in range(3)]
    cluster = Cluster(Deployment("1P1D", None, 10**8), jobs, kv_tokens=2 * 1024 + 128)
    cluster.run()
    assert jobs[1].prefill[1] < jobs[0].transfer[1] <= jobs[2].prefill[0]
    roomy = [Job(str(i), 0, 1024, 2) for i in range(3)]
    Cluster(Deployment("1P1D", None, 10**8), roomy).run()
    assert roomy[2].prefill[1] < roomy[0].transfer[1]


def test_a_decoder_takes_room_for_prompt_and_answer_and_no_more():
    cluster = Cluster(Deployment("1P1D"), [Job("a", 0, 1000, 300), Job("long", 10**8, 5000, 2)])
    held = []
    begin = lesson.Instance.begin
    decoder = cluster.instances[1]
    decoder.begin = lambda now: begin(decoder, now) and not held.append(
        {i: len(b) for i, b in decoder.scheduler.kv_cache_manager.req_to_blocks.items()})  # fmt: skip
    cluster.run()
    assert held[0] == {"a": -(-1299 // lesson.BLOCK_SIZE)}


def test_caches_under_way_count_for_the_router():
    """Two prompts end together; the second cache goes to the other decoder, though the first has not arrived."""
    jobs = [Job("a", 0, 500, 4), Job("b", 0, 500, 4)]
    Cluster(Deployment("1P2D", None, 10**8), jobs).run()
    assert [job.path for job in jobs] == [[0, 1], [0, 2]]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 10**5), st.integers(1, 40), st.integers(0, 10**7))
def test_streaming_is_a_pipeline(a, compute, wire, pieces, free):
    """The formula against the pieces, one after the other."""
    compute, wire = compute * pieces, wire * pieces
    sent = max(free, a + compute // pieces)
    begin = sent
    for i in range(pieces):
        sent = max(sent, a + (i + 1) * compute // pieces) + wire // pieces
    assert lesson.streamed((a, a + compute), wire, free, pieces) == (begin, sent)


def test_images_are_encoded_where_the_layout_says():
    photo = lambda: [Job("a", 0, 600, 4, 500, 20_000)]  # noqa: E731
    encode, prefill = 20_000, COST.of([(600, 600)])
    crowd = [Job("text", 0, 100, 2), Job("a", 1, 600, 4, 500, 20_000), Job("b", 1, 600, 4, 500, 20_000)]
    busy, both = COST.of([(100, 100)]), COST.of([(1, 101), (600, 600), (600, 600)])
    assert [job.first for job in Cluster(Deployment("1EPD"), crowd).run()[1:]] == [busy + 2 * encode + both] * 2
    (whole,) = Cluster(Deployment("1EPD"), photo()).run()
    assert whole.outcome[0] == encode + prefill and whole.path == [0]
    cluster = Cluster(Deployment("1E1P1D"), photo())
    (split,) = cluster.run()
    sizes = 500 * lesson.HIDDEN_BYTES, 600 * lesson.KV_BYTES
    wires = [-(-size * 10**6 // cluster.deployment.link) for size in sizes]
    assert split.path == [0, 1, 2] and split.prefill[0] == encode + wires[0] and cluster.bytes_moved == sum(sizes)
    assert split.outcome[0] == encode + prefill + sum(wires) + COST.of([(1, 600)])
    text = Cluster(Deployment("1E1PD"), [Job("a", 0, 600, 4)]).run()[0]
    assert text.path == [1]  # nothing to see: straight to the prompt


def test_chunks_cannot_cut_a_picture():
    """While it writes, a stream is silent for as long as a picture takes, unless an encoder stands apart."""
    jobs = lambda: [Job("stream", 0, 100, 60), Job("photo", 100_000, 600, 4, 500, 20_000)]  # noqa: E731
    gaps = {layout: Cluster(Deployment(layout, 256), jobs()).run()[0].gap for layout in ("1EPD", "1E1PD")}
    assert gaps["1EPD"] > 20_000 > 10_000 > gaps["1E1PD"]


@pytest.mark.parametrize("layout", ["", "4", "PD", "0PD", "2P", "3E1P", "2D", "x", "4PD ", "2ED2P"])
def test_layouts_that_cannot_serve_are_refused(layout):
    with pytest.raises(common.InputError, match="layout"):
        Deployment(layout)


# --- Goodput --------------------------------------------------------------------------------------------------------


def test_limits_are_all_kept():
    limits = Limits(ttft=100, tpot=10, gap=50)
    good = (100_000, 10_000.0, 50_000)
    assert limits.met(*good)
    assert not any(limits.met(*(x + (i == j) for j, x in enumerate(good))) for i in range(3))
    assert lesson.attainment([good, (100_001, 0, 0)], limits) == 0.5


def test_rates_are_rungs_of_five_percent():
    assert lesson.RATES[:2] == (0.5, 0.525) and lesson.RATES[-1] == 462.884
    assert all(b / a == pytest.approx(1.05, rel=2e-3) for a, b in itertools.pairwise(lesson.RATES))


def test_throughput_is_nine_tenths_of_a_crowd_over_the_time_it_takes(monkeypatch):
    crowd = []

    def cluster(deployment, jobs):
        crowd.extend(jobs)
        for i, job in enumerate(reversed(jobs)):
            job.last = (i + 1) * 500_000
        jobs[0].last = 10**12  # a straggler is not waited for
        return type("Done", (), {"run": lambda self: jobs})()

    monkeypatch.setattr(lesson, "Cluster", cluster)
    assert lesson.throughput(Deployment("1PD"), "azure-code", 10) == pytest.approx(2.0)
    assert len(crowd) == 10 and max(job.arrival for job in crowd) < 100


def test_a_link_is_judged_after_and_during_the_prompt(monkeypatch):
    """The median TTFT in ms, and the share within the limits; whole caches first, then layer by layer."""
    asked, ms = [], {False: (10, 20, 900), True: (10, 10, 20)}

    def outcomes(deployment, workload, count, rate, seed):
        asked.append((deployment, workload, count, rate))
        return [(1000 * t, 0.0, 0) for t in ms[deployment.layerwise]]

    monkeypatch.setattr(lesson, "outcomes", outcomes)
    assert lesson.linked("azure-code", 10**9) == [20.0, 2 / 3, 10.0, 1.0]
    assert asked == [(Deployment("6P2D", None, 10**9, layerwise), "azure-code", 800, 45.0)
                     for layerwise in (False, True)]  # fmt: skip


def test_photos_are_what_they_weigh():
    patches = 4 * 1521
    flops = 2 * 675_000_000 * patches + 4 * 32 * 1280 * patches**2
    assert lesson.encode_seconds(1521) == pytest.approx(flops / (0.6 * 989e12))
    jobs = lesson.photo_jobs(10, 5)
    assert {(j.prompt, j.output, j.image_tokens, j.encode_us) for j in jobs} == {(1621, 64, 1521, 24_061)}
    assert jobs[-1].arrival == pytest.approx(5e5) and (lesson.PHOTO_LIMITS.ttft, lesson.PHOTO_LIMITS.gap) == (600, 20)
    for name, deployment in lesson.PHOTO_LAYOUTS.items():
        assert name == deployment.layout + (f"/{deployment.budget}" if deployment.budget else "")


@pytest.mark.parametrize("edge", [0, 1, 57, len(lesson.RATES) - 1, -1])
def test_search_finds_the_edge(edge):
    asked = []

    def at(rate):
        asked.append(rate)
        good = edge >= 0 and rate <= lesson.RATES[edge]
        return [(0, 0, 0)] * 9 + [(10**9, 0, 0)] * (1 if good else 2)

    assert lesson.search(at, Limits(1, 1)) == (lesson.RATES[edge] if edge >= 0 else 0.0)
    assert len(asked) <= 8


def test_workloads_are_as_published():
    for name, workload in lesson.WORKLOADS.items():
        drawn = lesson.lengths(name, 4000)
        for i, least in ((0, 1), (1, 2)):
            column, table = sorted(pair[i] for pair in drawn), (workload.input, workload.output)[i]
            assert column[0] >= least and column[-1] <= table[-1][1]
            for percent, tokens in table[-3:-1]:
                assert column[int(percent / 100 * 4000)] == pytest.approx(tokens, rel=0.2), (name, percent)
            assert sum(column) / 4000 == pytest.approx(workload.mean[i], rel=0.2)
    jobs = lesson.make_jobs("azure-code", 10, 50)
    assert jobs[-1].arrival == pytest.approx(5e6)
    assert [(j.prompt, j.output) for j in jobs] == list(lesson.lengths("azure-code", 50))


def holds(outcomes_at, limits, rate):
    """A recorded rate: 90 % are served within the limits there, and not one rung higher."""

    def good(rate):
        return lesson.attainment(outcomes_at(rate), limits) >= 0.9

    i = lesson.RATES.index(rate) if rate else -1
    return (i < 0 or good(rate)) and not good(lesson.RATES[i + 1])


def as_recorded(contest, names, columns):
    for name, i in itertools.product(names, columns):
        deployment = lesson.deployments(contest.gpus, contest.budgets, contest.splits)[name]
        rate = lesson.RECORDED[contest.workload][name][i]
        at = functools.partial(lesson.outcomes, deployment, contest.workload, contest.count)
        assert holds(at, Limits(contest.ttft, contest.tpots[i]), rate), (contest.workload, name, i)


def test_recorded_sample():
    as_recorded(lesson.CONTESTS[0], ["1P7D"], [2])


def test_recorded_draws():
    """What a run says depends on its draw, and of a short one it depends more."""
    found, split = lesson.RECORDED["draws"], Deployment("6P2D")
    spread = [max(found[count]) / min(found[count]) for count in ("800", "3200", "6400")]
    assert spread == sorted(spread, reverse=True) and spread[-1] == 1
    for seed, rate in list(enumerate(found["800"]))[2:]:
        assert holds(functools.partial(lesson.outcomes, split, "azure-code", 800, seed=seed), lesson.TIGHT, rate)
    assert lesson.linked("azure-code", lesson.LINKS["PCIe 4"], 3)[2] == found["PCIe 4"][3]
    for link in ("InfiniBand 400G", "PCIe 4"):
        assert found[link][0] == lesson.RECORDED["links"]["azure-code"][link][2]
    assert found["6400"][0] == lesson.RECORDED["azure-code"]["6P2D"][lesson.TPOT_8]
    assert found["3200"][0] == lesson.RECORDED["exposed"]["0"]["6P2D"][0]


@pytest.mark.parametrize(("contest", "names", "columns"), and_slowly(
    [], [(0, ["8PD/256", "6P2D"], [1, 9]), (2, ["8PD", "5P3D"], [0])],
    [(0, ["8PD", "8PD/224", "8PD/256", "6P2D", "5P3D"], [1, 2, 9]), (1, ["8PD", "8PD/256", "5P3D"], [1, 7]),
     (2, ["8PD", "8PD/256", "5P3D"], [0, 3]), (3, ["2PD", "2PD/256", "1P1D"], [1])],
))  # fmt: skip
def test_recorded_searches_are_what_the_simulation_says(contest, names, columns):
    as_recorded(lesson.CONTESTS[contest], names, columns)


@pytest.mark.slow
@pytest.mark.parametrize(("exposed", "name"), [(0, "8PD/224"), (25, "6P2D"), (100, "8PD/512")])
def test_recorded_steps_that_overlap_less(exposed, name):
    layout, _, budget = name.partition("/")
    at = lesson.exposed_outcomes(Deployment(layout, int(budget) if budget else None), exposed)
    for tpot, rate in zip(lesson.EXPOSED_TPOTS, lesson.RECORDED["exposed"][str(exposed)][name]):
        assert holds(at, Limits(300, tpot), rate), tpot


def test_what_a_step_does_not_hide_comes_on_top():
    cost = CostModel(10**9, 5 * 10**9, 10**8, 0, 0, 0)  # computing takes longer from 50 tokens on
    for exposed, times in ((0, [6000, 6000, 11000]), (25, [6250, 7250, 12250]), (100, [7000, 11000, 16000])):
        serial = lesson.SerialCost(**vars(cost), exposed=exposed)
        assert [serial(T, 1, 0, 0) for T in (10, 50, 100)] == times


@pytest.mark.long
def test_recorded_parts_are_what_the_simulation_says():
    assert lesson.record("throughput") == lesson.RECORDED["throughput"]
    assert lesson.record("links") == lesson.RECORDED["links"]
    assert lesson.record("draws") == lesson.RECORDED["draws"]
    for name in ("8EPD/256", "3E5PD/256"):
        at = lambda rate, d=lesson.PHOTO_LAYOUTS[name]: lesson.photo_outcomes(d, 4000, rate)  # noqa: E731
        assert holds(at, lesson.PHOTO_LIMITS, lesson.RECORDED["photos"][name])


def test_every_contest_is_recorded_in_full():
    for contest in lesson.CONTESTS:
        rows = lesson.RECORDED[contest.workload]
        assert list(rows) == list(lesson.deployments(contest.gpus, contest.budgets, contest.splits))
        for rates in rows.values():
            assert len(rates) == len(contest.tpots) and sorted(rates) == rates  # looser limits never hurt
            assert all(rate == 0 or rate in lesson.RATES[:-1] for rate in rates)


def test_nobody_serves_more_within_limits_than_without():
    """A run that ends before its queue has grown says so."""
    most = lesson.RECORDED["throughput"]
    for name, rates in lesson.RECORDED["azure-code"].items():
        assert rates[-1] <= most.get(name, max(most.values())), name


def test_a_column_is_one_limit():
    assert lesson.column("sharegpt", 2) == {"2PD": 130.182, "2PD/256": 123.983, "2PD/512": 130.182, "1P1D": 72.49}
    assert (lesson.CONTESTS[0].tpots[lesson.TPOT_8], lesson.CONTESTS[0].tpots[lesson.TPOT_20]) == (8, 20)


def test_what_the_text_concludes():
    found = lesson.facts()
    tight, loose = (found["goodput"]["azure_code"][f"tpot_{t}"] for t in (8, 50))
    assert tight["split_over_whole"] > 2 and tight["split_over_chunked"] < 1  # a budget that fits beats the split
    assert found["splits"]["6P2D"] > found["splits"]["8PD_256"]  # the next power of two does not
    assert tight["budget"] < 256 and loose["split_over_chunked"] < 1
    every = [row["split_over_chunked"] for row in found["goodput"]["azure_code"].values()]
    assert max(every) < 1.06  # nowhere does the split lead by more than a rung of the search
    over = {exposed: [rows[f"tpot_{tpot}"]["split_over_chunked"] for tpot in lesson.EXPOSED_TPOTS]
            for exposed, rows in found["exposed"].items()}  # fmt: skip
    assert max(over["0"]) < 1 and over["25"][0] > 1.5 and over["25"][1] == 1 and min(over["100"]) > 1.3
    assert found["splits"]["1P7D"] < tight["whole"] < tight["split"]  # the wrong ratio loses to doing nothing
    assert found["throughput"][tight["layout"]] < found["throughput"]["8PD"]  # and it was never throughput
    links = found["links"]["mooncake_conversation"]
    assert links["10_gbe"]["after_attained"] < 0.5 < 0.9 <= links["nvlink"]["after_attained"]
    photos = found["encode"]["goodput"]
    assert photos["8EPD_256"] < 0.2 * photos["3E5PD_256"] < photos["6EP2D"]
    patient = found["encode"]["patient"]
    assert patient["8EPD_256"] > max(patient.values()) * 0.999 > patient["3E5PD_256"]
    chat = found["goodput"]["sharegpt"]["tpot_15"]
    assert chat["split"] < chat["whole"]  # short prompts: nothing to take away


# --- Arithmetic -----------------------------------------------------------------------------------------------------


def test_mooncakes_break_even():
    assert lesson.mooncake_bandwidth(1.0, prefix=1, d=1, gqa=1, bytes_per_element=1) == pytest.approx(2 / (4 + 22))
    assert [round(lesson.mooncake_bandwidth(8 * flops) / 1e9) for flops in (312e12, 989e12)] == [6, 19]
    ours = lesson.shapes_bandwidth(lesson.roofline.MODELS["Llama-3.1-70B"], 8 * 312e12)
    assert ours == pytest.approx(lesson.mooncake_bandwidth(8 * 312e12), rel=0.1)
    W, _ = lesson.roofline.weights_read(lesson.MODEL)
    ours = lesson.shapes_bandwidth(lesson.MODEL, 1e12, prefix=2)
    assert ours == pytest.approx(2 * lesson.KV_BYTES * 1e12 / (2 * W * 2 + 4 * 32 * 32 * 128 * 3)), "three pairs"


def test_moving_against_computing():
    assert lesson.wire_seconds(8192, 1.25e9) == pytest.approx(0.859, abs=1e-3)
    for n in (64, 1000, 8192, 40_000):
        bandwidth = lesson.break_even(n)
        assert lesson.wire_seconds(n, bandwidth) == pytest.approx(lesson.prefill_seconds(n))
    hidden = lesson.exposed_seconds(8192, 50e9, True)
    assert hidden == pytest.approx(lesson.wire_seconds(8192, 50e9) / 32, rel=1e-6)
    slow = lesson.exposed_seconds(8192, 1.25e9, True)
    assert slow == pytest.approx(lesson.wire_seconds(8192, 1.25e9) - lesson.prefill_seconds(8192) * 31 / 32, rel=1e-3)


# --- The widget -----------------------------------------------------------------------------------------------------


def states():
    names = list(lesson.WIDGET_CHOICES)
    return [dict(zip(names, values)) for values in itertools.product(*lesson.WIDGET_CHOICES.values())]


def test_simulate_adds_up():
    assert len(states()) <= 20_000 and lesson.WIDGET_DEFAULT in states() and lesson.BREAK_IT in states()
    for params in random.Random(0).sample(states(), 12):
        trace = lesson.simulate(params)
        json.dumps(trace)
        assert len(lesson.describe(trace).splitlines()) <= 15
        for r in trace["requests"]:
            assert sum(r["parts"]) == r["first"] - r["arrival"] and min(r["parts"]) >= 0
        split = "P " in params["layout"]
        assert trace["bytes_moved"] == split * lesson.KV_BYTES * sum(r["prompt"] for r in trace["requests"])
        assert sum(step[2] for gpu in trace["gpus"] if "P" in gpu["roles"] for step in gpu["steps"]) == sum(
            r["prompt"] for r in trace["requests"])  # fmt: skip
        assert trace["end"] == max(r["last"] for r in trace["requests"])
        longest, link = max(r["prompt"] for r in trace["requests"]), lesson.LINKS[params["link"]]
        assert trace["wire_us"] == -(-longest * lesson.KV_BYTES * 10**6 // link)
        assert (trace["longest"], trace["prefill_us"]) == (longest, COST.of([(longest, longest)]))
        ttft, tpot = trace["limits_us"]
        good = [r["first"] - r["arrival"] <= ttft and r["last"] - r["first"] <= tpot * (r["output"] - 1)
                for r in trace["requests"]]  # fmt: skip
        assert [r["met"] for r in trace["requests"]] == good and trace["met"] == sum(good)


def test_a_limit_that_is_just_reached_is_met(monkeypatch):
    requests = lesson.simulate(lesson.WIDGET_DEFAULT)["requests"]
    worst = max(r["first"] - r["arrival"] for r in requests)
    slowest = max(Fraction(r["last"] - r["first"], r["output"] - 1) for r in requests)
    for ttft, tpot, met in ((worst, slowest, 16), (worst - 1, slowest, 15), (worst, slowest - 1, 15)):
        monkeypatch.setitem(lesson.WIDGET_LIMITS, "tight", (Fraction(ttft, 1000), Fraction(tpot, 1000)))
        assert lesson.simulate(lesson.WIDGET_DEFAULT)["met"] == met


def test_the_state_in_words():
    def request(arrival, first, last, gap, parts):
        return {"arrival": arrival, "prompt": 2048, "output": 3, "first": first, "last": last, "gap": gap,
                "parts": parts}  # fmt: skip

    trace = {
        "params": {"rate": 40, "mix": "code", "layout": "1P 1D", "link": "NVLink"}, "limits_us": [300_000, 8000],
        "requests": [request(0, 12_345, 20_345, 4000, [0, 10_000, 345, 2000]),
                     request(1000, 31_000, 51_000, 19_999, [5000, 20_000, 1000, 4000]),
                     request(2000, 32_000, 44_000, 6000, [0, 0, 0, 30_000])],
        "gpus": [{"roles": "P", "steps": [[0, 10_000, 2048, 0], [20_000, 35_500, 4096, 0]]},
                 {"roles": "D", "steps": [[0, 51_000, 0, 2]]}],
        "end": 51_000, "longest": 2048, "longest_bytes": 2048 * lesson.KV_BYTES, "wire_us": 597, "prefill_us": 49_000,
        "bytes_moved": 3 * 2048 * lesson.KV_BYTES, "met": 1,
    }  # fmt: skip
    assert lesson.describe(trace).splitlines() == [
        "3 requests at 40/s, code, on 1P 1D; limits TTFT 300 ms, TPOT 8 ms",
        "GPU 0 P     2 steps, busy  50 %:  6,144 prompt tokens,   0 decodes",
        "GPU 1 D     1 steps, busy 100 %:      0 prompt tokens,   2 decodes",
        "first request, #0, 2,048 tokens: TTFT 12.3 ms =",
        "  queue 0.0 ms + prefill 10.0 ms + transfer 0.3 ms + first step 2.0 ms",
        "slowest request, #1, 2,048 tokens: TTFT 30.0 ms =",
        "  queue 5.0 ms + prefill 20.0 ms + transfer 1.0 ms + first step 4.0 ms",
        "TPOT: median 6.0 ms, worst 10.0 ms; longest silence 19.9 ms",
        "the cache of 2,048 tokens, 256 MiB: 0.5 ms on NVLink, 49.0 ms to compute",
        "moved 768 MiB; within both limits: 1 of 3",
    ]


def only_integers(value):
    if isinstance(value, dict):
        return all(only_integers(v) for k, v in value.items() if k != "params")
    if isinstance(value, list | tuple):
        return all(map(only_integers, value))
    return isinstance(value, int | str)


def test_the_trace_is_integers():
    assert only_integers(lesson.simulate(lesson.WIDGET_DEFAULT))


@pytest.mark.parametrize("change", [{"layout": "5P 3D"}, {"rate": 3}, {"rate": True}, {"link": 1}, {"layerwise": 1},
                                    {"mix": "x"}, {"limits": None}, {"extra": 1}])  # fmt: skip
def test_simulate_refuses_what_it_does_not_know(change):
    with pytest.raises(common.InputError, match=next(iter(change))):
        lesson.simulate(lesson.WIDGET_DEFAULT | change)


def newest_first(self, output):
    while self.waiting:
        self.waiting.appendleft(self.waiting.pop())
        if self._admit(self.waiting[0]) == 0:
            return
        request = self.waiting.popleft()
        self.running.append(request)
        output.scheduled_new_reqs.append(request)
        request.status = RequestStatus.RUNNING
        self._grant(request, self._num_new_tokens(request), output)


def not_the_oldest(self, output):
    for request in self.running[1:] or self.running:
        output.scheduled_running_reqs.append(request)
        self._grant(request, self._num_new_tokens(request), output)


@pytest.mark.parametrize(("owner", "method", "broken"), [
    (Scheduler, "_schedule_waiting", newest_first),
    (KVCacheManager, "get_num_blocks_to_allocate", lambda self, request, num_tokens, computed=(): 10**9),
    (Scheduler, "_schedule_running", not_the_oldest),
    (KVCacheManager, "allocate_slots", lambda self, request, n: None),
])  # fmt: skip
def test_breaking_the_real_classes_breaks_simulate(owner, method, broken, monkeypatch):
    params = lesson.WIDGET_DEFAULT | {"rate": 80, "layout": "1P 3D"}
    right = lesson.simulate(params)
    lesson.widget_cluster.cache_clear()
    monkeypatch.setattr(owner, method, broken)
    try:
        wrong = lesson.simulate(params)
    except Exception:
        return
    assert wrong != right


def test_the_bet_the_surprise_and_the_break():
    default = lesson.WIDGET_DEFAULT
    met = {layout: lesson.simulate(default | {"layout": layout})["met"] for layout in lesson.WIDGET_LAYOUTS}
    assert met["1P 3D"] < met["4 chunked, 512"] < met["4 colocated"] < met["2P 2D"] < met["3P 1D"]
    slow = lesson.simulate(lesson.WIDGET_DEFAULT | {"link": "10 GbE"})
    assert slow["wire_us"] > 3 * slow["prefill_us"] and slow["met"] < met["4 chunked, 512"]


def test_help_simulates_nothing():
    command = [sys.executable, "-m", "vllm.lab.goodput", "--help"]
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "RECORDED" in done.stdout

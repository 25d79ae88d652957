"""Tour 06d: closed and open loops, the queue of the story, and every state of its widget."""

from __future__ import annotations

import common

import asyncio
import itertools
import statistics

import pytest

from engine import registry
from engine.core.queues import FCFSRequestQueue
from engine.core.scheduler import Scheduler
from lab import cli
from lab.records import summarize
from lab.simulated_engine import StepCost
from support.scripted_load import Script, ms, ones

lesson, page = registry.lesson("06d_load_generator"), cli.numbers("06d_load_generator")


def freezing_reply():
    """The freezing server as a streaming API on the loop's clock: one seat, first come, first served."""
    server = lesson.freezing_server()

    async def reply(body):
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(server(round(1e3 * now)) / 1e3 - now)
        async for chunk in Script(0, 0).reply(body):
            yield chunk

    return reply


def test_the_real_client_sees_what_the_naive_loops_see():
    """`drive` under --max-concurrency 1 is the naive closed loop; on a schedule it is the open one. Exactly."""
    until = 8_000
    want = lesson.closed_loop(lesson.freezing_server(), until)
    closed = lesson.drive_scripted(freezing_reply(), ones(len(want)), [0.0] * len(want), max_concurrency=1)
    assert ms(r.start for r in closed) == [at for at, _ in want]
    assert ms(r.e2el for r in closed) == [latency for _, latency in want]
    want = lesson.open_loop(lesson.freezing_server(), until, 40)
    due = [at / 1e3 for at, _ in want]
    opened = lesson.drive_scripted(freezing_reply(), ones(len(want)), due)
    assert ms(r.e2el for r in opened) == [latency for _, latency in want]
    # The same schedule through one seat: measured from sending it looks fine, from asking it is the open loop's truth.
    limited = lesson.drive_scripted(freezing_reply(), ones(len(want)), due, max_concurrency=1)
    assert sorted(ms(r.e2el for r in limited))[-2] == lesson.SERVICE
    assert ms(r.e2el_including_client_queue for r in limited) == [latency for _, latency in want]


def test_a_closed_loop_asks_until_its_time_is_up():
    assert lesson.closed_loop(lesson.freezing_server(), 60) == [(0, 20), (20, 20), (40, 20)]


def test_the_closed_loop_hides_the_freeze():
    known = page.facts()
    closed, opened = known["omission"]["closed"], known["omission"]["open"]
    assert closed["p99_e2el_ms"] == pytest.approx(20) and opened["p99_e2el_ms"] > 1900
    assert closed["completed"] > opened["completed"], "it even asked more"
    assert sum(latency > 20 for _, latency in lesson.closed_loop(lesson.freezing_server(), page.UNTIL)) == 1


def test_the_server_freezes_from_the_first_moment_to_the_last():
    assert [lesson.freezing_server()(at) for at in (4_999, 5_000, 6_999, 7_000)] == [5_019, 7_020, 7_020, 7_020]


def test_a_virtual_deadlock_is_said():
    async def for_ever(body):
        await asyncio.Event().wait()
        yield b""

    with pytest.raises(RuntimeError, match="none for time"):
        lesson.drive_scripted(for_ever, ones(1), [0.0], timeout=None)


def test_the_lessons_own_server():
    records, off = asyncio.run(lesson.load_own_server(0))
    assert all(not r.error and r.output_tokens == 12 and r.ttft >= 0.0299 for r in records)
    assert len(off) == 80 * 11 and statistics.median(map(abs, off)) < 0.02


def test_the_queue_of_the_story():
    for name, found in page.facts()["queue"].items():
        load = int(name) / 100
        assert found["exact"] and found["theory"] == pytest.approx(load / (2 * (1 - load)))


states = [dict(zip(page.WIDGET_CHOICES, values)) for values in itertools.product(*page.WIDGET_CHOICES.values())]


def check_state(params):
    trace = page.simulate(params)
    arrivals, sent, first, done = (trace[name] for name in ("arrivals", "sent", "first", "done"))
    assert arrivals == [at // params["rate"] for at in page.unit_arrivals(page.REQUESTS, params["seed"])]
    assert all(a <= s < f < d for a, s, f, d in zip(arrivals, sent, first, done))
    assert all(s <= at < f for s, at, f in zip(sent, trace["admitted"], first))
    assert set(trace["admitted"]) <= {step[0] for step in trace["steps"]}
    assert trace["area"] == trace["in_flight_sum"] == sum(d - s for d, s in zip(done, sent)), "Little, in integers"
    limit = params["max_concurrency"]
    assert sent == arrivals if not limit else trace["peak_concurrency"] <= limit
    assert all(a[0] < b[0] for a, b in itertools.pairwise(trace["steps"]))
    assert sum(step[1] for step in trace["steps"]) == trace["requests"] * trace["output_len"], "each token, once"
    for start, batch, waiting, outside in trace["steps"]:
        assert 1 <= batch <= params["max_num_seqs"] and min(waiting, outside) >= 0
        assert outside == sum(a <= start for a in arrivals) - sum(s <= start for s in sent), (
            "who asked and was not sent"
        )
        assert not outside or batch + waiting == limit, "nobody queues outside while the client has a seat"
    assert len(page.describe(trace).splitlines()) <= 15
    return trace


def test_states_of_the_widget():
    for params in states[::37]:
        check_state(params)


@pytest.mark.long
def test_every_state_of_the_widget():
    for params in states:
        check_state(params)


def test_overload_shows_in_an_open_loop_and_hides_in_a_closed_one():
    mean = lambda trace, since: statistics.fmean(b - a for a, b in zip(trace[since], trace["done"])) / 1e3  # noqa: E731
    over = {"rate": 60, "max_num_seqs": 16, "seed": 0}
    opened, closed = (page.simulate(over | {"max_concurrency": limit}) for limit in (0, 8))
    calm = page.simulate(over | {"rate": 10, "max_concurrency": 8})
    assert mean(opened, "arrivals") > 3 * mean(calm, "arrivals")
    assert mean(closed, "sent") < 1.7 * mean(calm, "sent"), "the closed loop reports a healthy server"
    assert mean(closed, "arrivals") > 1.2 * mean(opened, "arrivals"), (
        "its users wait longer than those of the open loop"
    )
    assert "HIDDEN" in page.describe(closed) and "OVERLOADED" in page.describe(opened)
    # Equal requests that share 64 seats wait longer on average than those who enter 16 at a time.
    shared, grouped = (page.simulate(over | {"max_num_seqs": 64, "max_concurrency": limit}) for limit in (0, 16))
    assert mean(grouped, "arrivals") < 0.9 * mean(shared, "arrivals")
    assert "OVERLOADED" in page.describe(grouped)  # 16 at a time are served no faster by 64 seats
    # Above capacity a latency is a statement about the length of the run; below, it is one about the server.
    longer = [page.load(rate, 0, 16, count=320).records for rate in (60, 20)]
    shorter = [page.load(rate, 0, 16, count=160).records for rate in (60, 20)]
    growth = [
        statistics.fmean(r.e2el for r in a) / statistics.fmean(r.e2el for r in b) for a, b in zip(longer, shorter)
    ]
    assert growth[0] > 1.4 and growth[1] < 1.15


def test_close_to_capacity_is_the_edge():
    """47.5 a second with 16 seats: 40 are less than nine tenths of that, 45 are more."""
    for rate, words in ((40, "keeps up"), (45, "At the edge"), (50, "OVERLOADED")):
        assert words in page.describe(page.simulate(page.WIDGET_DEFAULT | {"rate": rate}))


def test_a_broken_scheduler_breaks_the_simulation(monkeypatch):
    right, admit = page.simulate(page.WIDGET_DEFAULT), Scheduler._admit
    with monkeypatch.context() as patch:  # seats stay empty
        patch.setattr(Scheduler, "_admit", lambda self, r: admit(self, r) if len(self.running) < 8 else 0)
        assert max(page.simulate(page.WIDGET_DEFAULT)["done"]) > max(right["done"])
    with monkeypatch.context() as patch:  # the last in the queue is the first
        patch.setattr(FCFSRequestQueue, "add_request", FCFSRequestQueue.prepend_request)
        assert page.simulate(page.WIDGET_DEFAULT | {"rate": 80})["first"] != page.simulate(page.WIDGET_DEFAULT)["first"]
    with monkeypatch.context() as patch:  # a step that costs nothing for context
        patch.setattr(StepCost, "__call__", lambda self, work: 6_440)
        assert max(page.simulate(page.WIDGET_DEFAULT)["done"]) < max(right["done"])


def test_the_yardstick_is_the_same_for_all():
    run = page.load(30, 0, 16)
    found = summarize(run.records)
    assert found["completed"] == page.REQUESTS and found["total_output_tokens"] == page.REQUESTS * page.OUTPUT
    assert found["mean_ttft_ms"] == pytest.approx(statistics.fmean(t[0] - s for t, s in zip(run.times, run.sent)) / 1e3)
    rate_times_latency = found["request_throughput"] * found["mean_e2el_ms"] / 1e3
    assert found["mean_concurrency"] == pytest.approx(rate_times_latency), "Little's law"
    limited = page.load(60, 8, 16)
    queued = summarize(limited.records)["mean_client_queue_time_ms"]
    assert queued == pytest.approx(statistics.fmean(map(int.__sub__, limited.sent, limited.arrivals)) / 1e3) != 0


def test_the_most_throughput_is_not_the_most_goodput():
    found = page.facts()["tune"]
    assert found["most"]["output_throughput"] > found["best"]["output_throughput"]
    assert found["best"]["p99_itl_ms"] <= page.TUNE_LIMIT < found["most"]["p99_itl_ms"]
    assert found["goodput"]["request_goodput"] > 1.3 * found["goodput_of_most"]["request_goodput"]


def test_the_most_throughput_is_the_corner_of_the_grid(monkeypatch):
    """The page says so: 64 seats are the most of the grid, not the best there is."""
    most = page.facts()["tune"]["most"]
    assert most["max_num_seqs"] == max(page.TUNE_SEATS) and most["max_num_batched_tokens"] == max(page.TUNE_BUDGETS)
    monkeypatch.setattr(page, "TUNE_SEATS", (96,))
    rows = page.tune_simulated.__wrapped__()["rows"]
    assert max(row["output_throughput"] for row in rows) > 1.05 * most["output_throughput"]


@pytest.mark.parametrize(
    "line",
    [
        "--rate 0", "bench --request-rate 0", "bench --request-rate nan", "bench --num-prompts 0",
        "bench --burstiness -1", "bench --metric-percentiles 50,101", "bench latency --num-iters 0",
        "tune --max-num-seqs 1,x", "tune --limit-percentile 200", "bench --random-range-ratio 2",
        "bench --random-cv 1e308", "bench --request-rate 1e-320", "tune --request-rate 0.0009",
        "bench --num-prompts 99999999999999999999", "bench latency --batch-size 1000001", "--rate nan",
    ],
)  # fmt: skip
def test_wrong_flags_are_one_line(line, capsys):
    argv = line.split()
    with pytest.raises(SystemExit) as stop:
        lesson.build_parser().parse_args(argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and len(error.splitlines()) == 1 and argv[-2] in error


@pytest.mark.parametrize("command", ["bench", "bench latency", "tune --simulate"])
def test_a_file_that_holds_no_json_is_named_before_anything_is_measured(command, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("shopping")
    for name in ("bench.serve_load", "tuning.build_engine", "tuning.tune"):
        monkeypatch.setattr(f"lab.{name}", None)
    with pytest.raises(common.InputError, match=r"notes\.txt: not readable as JSON"):
        lesson.main([*command.split(), "--json", str(tmp_path / "notes.txt")])

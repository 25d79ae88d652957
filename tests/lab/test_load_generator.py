"""Lesson 06d: the instrument is exact where truth is known, wrong answers never count as fast ones, and the simulated
engine waits as queueing theory says it must."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import math
import random
import statistics
import threading
from collections import Counter

import common
import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from engine import registry
from lab import cli
from engine.core.queues import FCFSRequestQueue
from engine.core.scheduler import Scheduler
from engine.llm_engine import LLMEngine
from lab.bench import add_bench_commands, bench_command, print_result, serve_load
from lab.load_generator import BadAnswer, SSEDecoder, Target, drive, read_stream
from lab.records import Record, concurrency, percentile, summarize
from lab.simulated_engine import StepCost, run_simulated
from lab.tuning import build_engine, engine_run, latency_command, measure_latency, pareto, parse_limits, tune
from lab.workload import AZURE, Prompt, arrival_times, load_prompts, make_prompts, quantile, random_length, table_mean

lesson, page = registry.lesson("06d_load_generator"), cli.numbers("06d_load_generator")
Script = lesson.Script


def ms(seconds):
    """Milliseconds as whole numbers: virtual clocks add floats."""
    return [round(1e3 * x, 6) for x in seconds]


def ones(count, output_len=1):
    return [Prompt([i], 1, output_len) for i in range(count)]


# --- Closed and open loops ------------------------------------------------------------------------------------------


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


@settings(max_examples=25)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_a_limit_is_kept_and_nobody_overtakes(due, limit, tokens):
    due = [at / 100 for at in sorted(due)]
    records = lesson.drive_scripted(Script(0.05, 0.03).reply, ones(len(due), tokens), due, max_concurrency=limit)
    assert concurrency([(r.start, r.end) for r in records])[0] <= limit
    assert [r.start for r in records] == sorted(r.start for r in records)
    assert all(r.client_queue_time > -1e-9 and not r.error for r in records)
    free = lesson.drive_scripted(Script(0.05, 0.03).reply, ones(len(due), tokens), due)
    assert ms(r.start for r in free) == ms(due), "an open loop does not look at the server"


# --- The yardstick --------------------------------------------------------------------------------------------------

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(numbers, st.floats(0, 100))
def test_percentiles_are_numpys(values, p):
    assert percentile(values, p) == pytest.approx(np.percentile(values, p), rel=1e-9, abs=1e-6)


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=12)


@given(spans)
def test_concurrency_is_counted_instant_by_instant(pairs):
    found = [(start, start + length) for start, length in pairs]
    peak, area = concurrency(found)
    in_flight = [sum(a <= t < b for a, b in found) for t in range(50)]
    assert area == sum(in_flight) == sum(b - a for a, b in found), "Little: the integral is the sum of times"
    assert peak == max(in_flight) or (peak == 1 and not any(in_flight))  # a span of length 0 is there and gone


def test_counting_by_whole_seconds_is_no_concurrency():
    """What vLLM's max_concurrent_requests does: ten requests one after the other within a second count as ten."""
    in_turn = [(i / 10, i / 10 + 0.09) for i in range(10)]
    by_seconds = Counter(s for a, b in in_turn for s in range(int(a), int(b) + 1))
    assert concurrency(in_turn)[0] == 1 and max(by_seconds.values()) == 10


def hand_made():
    """Two answered requests, one of a single token, one that failed after its first token, very fast."""
    return [
        Record(0.0, 0.5, 3.5, [1.0, 1.5, 3.5], 10, 5),  # TTFT 0.5, ITL 0.5 and 2, TPOT 2.5/4, E2EL 3
        Record(1.0, 1.0, 2.0, [2.0], 20, 1),  # TTFT = E2EL = 1
        Record(1.0, 1.0, 1.1, [1.05], 30, 1, error="truncated"),
    ]


def test_numbers_of_a_hand_made_run():
    found = summarize(hand_made(), percentiles=(50, 90))
    assert (found["duration"], found["completed"], found["failed"], found["failures"]) == (3.5, 2, 1, {"truncated": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 6), "a failure's tokens do not count"
    assert found["request_throughput"] == 2 / 3.5 and found["output_throughput"] == 6 / 3.5
    assert found["total_token_throughput"] == 36 / 3.5
    assert found["max_concurrent_requests"] == 3 and found["mean_concurrency"] == pytest.approx((3 + 1 + 0.1) / 3.5)
    want = {"ttft": [500, 1000], "tpot": [625], "itl": [500, 2000], "e2el": [3000, 1000]}
    want |= {"client_queue_time": [500, 0], "e2el_including_client_queue": [3500, 1000]}
    for name, values in want.items():
        assert found[f"mean_{name}_ms"] == pytest.approx(np.mean(values)), name
        assert found[f"median_{name}_ms"] == found[f"p50_{name}_ms"] == pytest.approx(np.median(values)), name
        assert found[f"std_{name}_ms"] == pytest.approx(np.std(values)), name
        assert found[f"p90_{name}_ms"] == pytest.approx(np.percentile(values, 90)), name
    assert found["output_tokens_per_chunk"] == 6 / 4
    assert found["max_output_tokens_per_s"] == pytest.approx(1 + 5 / 3)  # from 1.5 to 2.5
    longer = summarize(hand_made(), 7.0)
    assert longer["request_throughput"] == 2 / 7 and longer["mean_concurrency"] == pytest.approx(4.1 / 7)


def test_a_failure_counts_in_time_and_a_connection_that_stays_open_does_not():
    """The run lasts until the last has failed; an answer until its last text. Two tokens have one time between them."""
    found = summarize([Record(1.0, 1.5, 4.0, [2.2, 2.4], 10, 2), Record(0.25, 0.25, 9.0, error="timeout")])
    assert found["duration"] == 9 and found["mean_concurrency"] == pytest.approx((2.5 + 8.75) / 9)
    assert [round(found[f"mean_{name}_ms"]) for name in ("tpot", "e2el", "e2el_including_client_queue")] == [
        200, 900, 1400]  # fmt: skip
    assert found["max_output_tokens_per_s"] == 1, "seconds are counted from the first request, 1.95 and 2.15 after it"


def test_keys_are_vllms():
    """Names of `vllm bench serve`'s result, where the meaning is the same (0.32, benchmarks/serve.py)."""
    names = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
    vllm = {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
        "max_concurrent_requests",
        *(f"{rule}_{name}_ms" for rule in ("mean", "median", "std", "p99", "p99.9") for name in names),
    }  # fmt: skip
    ours = {"failures", "mean_concurrency", "output_tokens_per_chunk"}
    assert set(summarize(hand_made(), percentiles=(99, 99.9))) == vllm | ours


@pytest.mark.parametrize(
    ("key", "value", "words", "said"),
    [
        ("max_lateness_ms", 151, "WARNING", True), ("max_lateness_ms", 149, "WARNING", False),  # a fifth of the TTFT
        ("max_lateness_ms", None, "WARNING", False), ("request_goodput", 0.0, "goodput: 0.00", True),
        ("request_goodput", None, "goodput", False), ("output_tokens_per_chunk", 1.06, "A chunk brought", True),
        ("output_tokens_per_chunk", 1.04, "A chunk brought", False), ("output_tokens_per_chunk", None, "A chu", False),
    ],
)  # fmt: skip
def test_what_the_report_says(capsys, key, value, words, said):
    print_result(summarize(hand_made()) | {"output_tokens_per_chunk": 1.0, key: value}, ["ttft:1"])
    assert (words in capsys.readouterr().out) == said


def test_nothing_measured_is_not_zero():
    failed = [Record(0.0, 0.0, 1.0, error="http 500")]
    found = summarize(failed, goodput={"ttft": 1e9})
    assert found["completed"] == 0 and found["request_goodput"] == 0
    assert found["mean_ttft_ms"] is None and found["p99_e2el_ms"] is None and found["output_tokens_per_chunk"] is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 500}, 1), ({"ttft": 499.9}, 0), ({"ttft": 1000}, 2), ({"tpot": 625}, 2), ({"tpot": 624.9}, 1),
        ({"e2el": 1000}, 1), ({"e2el": 3000}, 2), ({"ttft": 500, "e2el": 1000}, 0), ({"ttft": 1000, "tpot": 600}, 1),
    ],
)  # fmt: skip
def test_goodput_by_hand(limits, good):
    """A limit is kept when met exactly, all must hold at once, and one token has no TPOT to miss."""
    assert summarize(hand_made(), goodput=limits)["request_goodput"] * 3.5 == pytest.approx(good)


# --- The workload ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness):
    """Kolmogorov–Smirnov at 99.9 %: sup |F_n − F| ≤ 1.95/√n, fixed seed; and vLLM's scaling to count / rate."""
    n, rate = 4000, 7.0
    due = arrival_times(n, rate, random.Random(1), burstiness)
    assert due == sorted(due) and due[-1] == pytest.approx(n / rate)
    gaps = torch.tensor(np.diff([0.0, *due]) * rate).sort().values
    cdf = torch.special.gammainc(torch.tensor(burstiness, dtype=torch.float64), burstiness * gaps)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    assert max((steps[1:] - cdf).max(), (cdf - steps[:-1]).max()) <= 1.95 / math.sqrt(n)
    # Counts in windows of 10 expected arrivals: variance ÷ mean → 1 for Poisson, more for bursts, less for a clock.
    counts = Counter(int(at * rate / 10) for at in due[:-1])
    spread = np.var([counts[i] for i in range(n // 10)]) / 10
    bound = 4 * math.sqrt(2 / (n // 10))  # four standard deviations of a Poisson process's
    assert abs(spread - 1) <= bound if burstiness == 1 else (spread > 1 + bound) == (burstiness < 1)


def test_arrivals_at_the_ends():
    rng = random.Random(0)
    assert arrival_times(3, math.inf, rng) == [0.0] * 3
    assert arrival_times(4, 2.0, rng, math.inf) == [0.5, 1.0, 1.5, 2.0]
    again = [arrival_times(9, 2.0, random.Random(5)) for _ in range(2)]
    assert again[0] == again[1] != arrival_times(9, 2.0, random.Random(6))
    assert arrival_times(1, 4.0, rng) == [0.25]
    tight = [arrival_times(2, 4.0, random.Random(seed), 0.001) for seed in range(40)]  # gaps may all be 0
    assert [0.0, 0.0] in tight and {due[-1] for due in tight} == {0.0, 0.5}


def test_lengths():
    rng = random.Random(0)
    draw = lambda **how: [random_length(rng, 100, **how) for _ in range(4000)]  # noqa: E731
    assert set(draw()) == {100}
    uniform = draw(range_ratio=0.3)
    assert (min(uniform), max(uniform)) == (70, 130) and abs(statistics.fmean(uniform) - 100) < 4 * 17.6 / 63.2
    lognormal = draw(cv=0.5)
    assert abs(statistics.fmean(lognormal) - 100) < 4 * 50 / 63.2  # four standard errors
    assert statistics.pstdev(lognormal) == pytest.approx(50, rel=0.1) and min(lognormal) >= 1
    assert statistics.median(lognormal) == pytest.approx(100 / math.sqrt(1.25), rel=0.04)
    assert statistics.median(draw(cv=1.5)) == pytest.approx(100 / math.sqrt(1 + 1.5**2), rel=0.06)
    assert {random_length(rng, 10, 0.25) for _ in range(200)} == {*range(7, 14)}, "7.5 and 12.5, as vLLM rounds"
    for how in ({"range_ratio": 1.0}, {"cv": 2.0}):
        assert min(random_length(rng, 1, **how) for _ in range(50)) == 1, "never empty"


@pytest.mark.parametrize("name", AZURE)
def test_azure_lengths_have_the_published_percentiles(name):
    for side in ("input", "output"):
        table = AZURE[name][side]
        for p, tokens in table:
            assert quantile(table, p / 100) == pytest.approx(tokens)
        u = (np.arange(20_000) + 0.5) / 20_000
        values = [quantile(table, x) for x in u]
        assert values == sorted(values) and values[0] >= 1
        assert table_mean(table) == pytest.approx(np.mean(values), rel=1e-3)
        assert quantile(table, 0.999) == table[-1][1], "nothing beyond the last"
        published = AZURE[name]["mean"][side]
        assert table_mean(table) == pytest.approx(published, rel=0.02 if name == "azure-code" else 0.13)


def bench_args(*argv):
    return lesson.build_parser().parse_args(["bench", "--base-url", "http://127.0.0.1:9", "--model", "m", *argv])


def test_prompts_of_a_run(tmp_path):
    args = bench_args("--num-prompts", "5", "--random-input-len", "7", "--random-output-len", "3")
    prompts = make_prompts(args, 5, 0)
    assert [(len(p.content), p.input_len, p.output_len) for p in prompts] == [(7, 7, 3)] * 5
    assert prompts == make_prompts(args, 5, 0) and prompts != make_prompts(args, 5, 1)
    assert len({tuple(p.content) for p in prompts}) == 5, "nobody's prompt is another's prefix"
    texts = make_prompts(args, 5, 0, as_text=True)
    assert all(len(p.content.split()) == 7 for p in texts)
    azure = make_prompts(bench_args("--dataset-name", "azure-code"), 400, 0)
    assert statistics.median(p.input_len for p in azure) == pytest.approx(1469, rel=0.15)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\u2028line", "output_tokens": 9}\n\n{"prompt": "two"}\n', encoding="utf-8")
    custom = make_prompts(bench_args("--dataset-path", str(file), "--random-output-len", "4"), 3, 0)
    assert [(p.content, p.output_len) for p in custom] == [("one\u2028line", 9), ("two", 4), ("one\u2028line", 9)]


@pytest.mark.parametrize(("length", "tokens"), [(2.7, 3), (2.3, 2), (0.2, 1)])
def test_lengths_between_published_ones_are_rounded(monkeypatch, length, tokens):
    monkeypatch.setattr("lab.workload.quantile", lambda table, u: length)
    (prompt,) = make_prompts(bench_args("--dataset-name", "azure-code"), 1, 0)
    assert (len(prompt.content), prompt.input_len, prompt.output_len) == (tokens,) * 3


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"prompt": 3}', "line 1"), ('{"prompt": "a"}\n{"text": "b"}', "line 2"), ("[]", "line 1"), ("{", "line 1"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1"), ('{"prompt": "a"}\n\n{"prompt": ""}', "line 3"),
        ('{"prompt": "a", "output_tokens": true}', "line 1"), ("", "no prompt"), (b"\xff\xfe", "line 1"),
        (None, "not readable"),
    ],
)  # fmt: skip
def test_wrong_prompt_files_are_named(tmp_path, content, word):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(common.InputError, match=word):
        load_prompts(str(file))


def test_contradictions_in_the_workload_are_refused():
    with pytest.raises(common.InputError, match="--dataset-path"):
        make_prompts(bench_args("--dataset-name", "custom"), 1, 0)
    with pytest.raises(common.InputError, match="--random-cv"):
        make_prompts(bench_args("--random-cv", "1", "--random-range-ratio", "0.5"), 1, 0)


# --- The stream -----------------------------------------------------------------------------------------------------


def chunk(text="", finish=None, **more):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def delta(finish=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7}}


def stream(*messages, done=True, newline="\n"):
    """Messages as an SSE body, text left as it is (no \\u escapes): the harder case."""
    events = [*(json.dumps(m, ensure_ascii=False) for m in messages), *(["[DONE]"] if done else [])]
    return "".join(f"data: {event}{newline}{newline}" for event in events).encode()


def replying(*parts, every=0.1):
    """A server that sends these bytes, one piece every 0.1 s (virtual)."""

    async def reply(body):
        for part in parts:
            await asyncio.sleep(every)
            yield part

    return reply


def ask(reply, **target):
    (record,) = lesson.drive_scripted(reply, [Prompt([1, 2], 2, 4)], [0.0], **target)
    return record


AWKWARD = "Zoë 👩‍🚀 \u2028 \x85 寿司\r\n"


@settings(max_examples=60)
@given(st.data(), st.sampled_from(["\n", "\r\n", "\r"]))
def test_events_survive_any_cut(data, newline):
    body = b": ping" + newline.encode() * 2 + stream(chunk(AWKWARD), chunk("b"), USAGE, newline=newline)
    body += f"event: x{newline}data:1{newline}data: 2{newline}{newline}".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    decoder, events = SSEDecoder(), []
    for a, b in itertools.pairwise([0, *cuts, len(body)]):
        events += decoder.feed(body[a:b])
    if newline == "\r":  # a lone \r at the very end may still become \r\n
        events += decoder.feed(b"x")
    assert [json.loads(e)["choices"][0]["text"] for e in events[:2]] == [AWKWARD, "b"]
    assert events[3:] == ["[DONE]", "1\n2"]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_cut_inside_a_line_ending_is_no_event(newline):
    body = f": hello{newline}data: 1{newline}data: 2{newline}{newline}data:3{newline}{newline}".encode()
    for cut in range(len(body) + 1):
        decoder = SSEDecoder()
        assert [*decoder.feed(body[:cut]), *decoder.feed(body[cut:] + b"x")] == ["1\n2", "3"]


def test_of_an_events_data_one_space_is_the_formats():
    assert SSEDecoder().feed(b"data:  a \n\ndata:b\n\n") == [" a ", "b"]


def test_fields_of_other_names_are_not_data():
    assert SSEDecoder().feed(b"database: 1\ndata: 2\n\n") == ["2"]


def test_what_came_together_has_one_time_and_a_long_error_is_cut():
    async def pieces(*messages):
        yield stream(*messages)

    record, ticks = Record(0.0), itertools.count()
    asyncio.run(read_stream(pieces(chunk("a"), chunk("b", "stop"), USAGE), record, lambda: next(ticks)))
    assert record.times == [0, 0]
    with pytest.raises(BadAnswer) as bad:
        asyncio.run(read_stream(pieces({"error": "x" * 999}), record, lambda: next(ticks)))
    assert bad.value.args == ("error event", "x" * 200)


def test_httpx_lines_would_cut_the_text():
    """Why the client brings a decoder of its own."""
    lines = list(httpx.Response(200, content=stream(chunk(AWKWARD))).iter_lines())
    with pytest.raises(ValueError):
        json.loads(lines[0].removeprefix("data: "))
    body = stream(chunk(AWKWARD), chunk("!", "length"), USAGE)
    record = ask(replying(*(body[i : i + 1] for i in range(len(body))), every=0.001))
    assert not record.error and record.text == AWKWARD + "!" and record.output_tokens == 7


def test_one_stream_to_the_digit():
    record = ask(replying(stream(chunk("a"), done=False), stream(chunk("b"), chunk("c", "length"), done=False),
                          stream(USAGE)))  # fmt: skip
    assert not record.error and (record.text, record.prompt_tokens, record.output_tokens) == ("abc", 11, 7)
    assert ms([record.ttft, *record.itl, record.e2el, record.tpot]) == [100, 100, 0, 200, round(100 / 6, 6)]
    assert ms([record.end]) == [300], "the connection closed later than the last text"


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 3, 5, 40])
def test_tokens_in_chunks(tokens_per_chunk):
    """TPOT stays what the engine does; ITL grows with what the server puts into a chunk."""
    n, itl = 31, 0.01
    script = Script(0.2, itl * tokens_per_chunk, tokens_per_chunk)
    (record,) = lesson.drive_scripted(script.reply, ones(1, n), [0.0])
    chunks = -(-(n - 1) // tokens_per_chunk)
    assert record.output_tokens == n and len(record.itl) == chunks
    assert ms(record.itl) == ms([itl * tokens_per_chunk] * chunks) and ms([record.ttft]) == [200]
    if (n - 1) % tokens_per_chunk == 0:
        assert ms([record.tpot]) == ms([itl])


def test_what_counts_as_a_token():
    """A role is none, an empty goodbye is none, a token without text (special, or half a character) is one."""
    chat = functools.partial(ask, chat=True)
    role, hi = stream(delta(role="assistant", content=""), done=False), stream(delta(content="Hi"), done=False)
    record = chat(replying(role, hi, stream(delta("stop", content=""), USAGE)))
    assert not record.error and ms([record.ttft, record.e2el]) == [200, 200] and record.text == "Hi"
    for name in ("reasoning", "reasoning_content"):  # vLLM's name, and what others and its older versions say
        record = chat(replying(stream(delta(**{name: "hm"}), done=False), stream(delta("stop", content="!"), USAGE)))
        assert record.text == "hm!" and ms([record.ttft, record.e2el]) == [100, 200]
    record = ask(replying(stream(chunk("", None), done=False), stream(chunk("x", None), chunk("", "stop"), USAGE)))
    assert ms([record.ttft, record.e2el]) == [100, 200] and len(record.times) == 2
    record = ask(replying(stream(chunk("", "stop"), USAGE)))  # nothing but an end: its time is the first token's
    assert not record.error and ms([record.ttft]) == [100]


def test_a_chunk_of_usage_may_have_null_for_choices():
    record = ask(replying(stream(chunk("a", "stop"), USAGE | {"choices": None})))
    assert not record.error and record.output_tokens == 7


def test_an_address_that_is_none_is_a_failure_like_others_and_progress_counts_it():
    progress = []

    async def run():
        async with httpx.AsyncClient() as client:
            return await drive(client, Target("http://x:y", "m"), ones(2), [0.0, 0.0], None,
                                      lambda: progress.append(1))  # fmt: skip

    assert [record.error for record in asyncio.run(run())] == ["connection"] * 2 == ["connection"] * len(progress)


def test_the_server_freezes_from_the_first_moment_to_the_last():
    assert [lesson.freezing_server()(at) for at in (4_999, 5_000, 6_999, 7_000)] == [5_019, 7_020, 7_020, 7_020]


def test_without_usage_chunks_are_counted():
    record = ask(replying(stream(chunk("a"), chunk("b"), chunk("c", "stop"))))
    assert not record.error and (record.output_tokens, record.prompt_tokens) == (3, 2)


MISBEHAVIOUR = {
    "truncated": [stream(chunk("a"), chunk("b"), done=False)],
    "truncated, before any text": [b": ping\n\n"],
    "truncated, in an event": [stream(chunk("a"), done=False), b"data: {"],
    "error event": [stream(chunk("a"), {"error": {"message": "CUDA out of memory", "code": 500}})],
    "malformed": [stream(chunk("a"), done=False), b"data: {]\n\n", stream(USAGE)],
    "malformed, a list": [stream([1]), stream(USAGE)],
    "malformed, a string": [stream("boo"), stream(USAGE)],
    "malformed, choices of numbers": [stream({"choices": [3]}), stream(USAGE)],
    "malformed, no text": [stream({"choices": [{"index": 0}]}), stream(USAGE)],
    "malformed, usage": [stream(chunk("a"), {"usage": {"completion_tokens": 1}})],
    "malformed, no UTF-8": [b"data: \xff\xfe\n\n"],
    "no tokens": [stream(USAGE)],
    "no tokens, at all": [stream()],
    "timeout": [stream(chunk("a"), done=False), *[b": ping\n\n"] * 200],
    "timeout, silent": [b""] * 200,
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_bad_answer_fails_by_name_and_is_never_fast(name):
    def reply(body):
        return (replying(*MISBEHAVIOUR[name]) if body["prompt"] == [1] else Script(0.5, 0.1).reply)(body)

    records = lesson.drive_scripted(reply, ones(3, 4), [0.0] * 3, timeout=10.0)
    assert [r.error for r in records] == ["", name.split(",")[0], ""] and records[1].detail
    found = summarize(records, goodput={"e2el": 1e9})
    assert (found["completed"], found["failed"]) == (2, 1) and found["failures"] == {name.split(",")[0]: 1}
    assert found["request_goodput"] == found["request_throughput"] == pytest.approx(2 / found["duration"])
    assert found["p99_ttft_ms"] == pytest.approx(500) and found["total_output_tokens"] == 8


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_refusals_are_failures(status):
    async def run():
        transport = httpx.MockTransport(lambda request: httpx.Response(status, json={"error": {"message": "no room"}}))
        async with httpx.AsyncClient(transport=transport) as client:
            return await drive(client, Target("http://x", "m"), ones(2), [0.0, 0.0])

    for record in asyncio.run(run()):
        assert record.error == f"http {status}" and "no room" in record.detail and not record.times


def test_the_clock_starts_before_the_server_accepts():
    """A server that is too busy to accept is slow, not fast: what passes before the status line belongs to TTFT."""

    async def accept(request):
        await asyncio.sleep(3.0)
        return httpx.Response(200, content=Script(0.5, 0.1).reply(json.loads(request.content)))

    async def run():
        async with httpx.AsyncClient(transport=httpx.MockTransport(accept)) as client:
            return await drive(client, Target("http://x", "m"), ones(2, 2), [0.0, 1.0])

    with asyncio.Runner(loop_factory=lesson.VirtualTimeLoop) as runner:
        records = runner.run(run())
    assert ms(r.ttft for r in records) == [3500, 3500] and ms(r.end for r in records) == [3600, 4600]


def test_the_clock_starts_when_the_body_is_encoded(monkeypatch):
    """Ten thousand token ids take a while; that is our time, and the server's only begins then."""
    request = Target.request

    def slow(*args):
        asyncio.get_running_loop().now += 1.0
        return request(*args)

    monkeypatch.setattr(Target, "request", slow)
    (record,) = lesson.drive_scripted(Script(0.2, 0.1).reply, ones(1), [0.0])
    assert ms([record.client_queue_time, record.ttft]) == [1000, 200]


def test_a_generator_that_is_late_says_so():
    """Something blocks the event loop for a second: what was due meanwhile waited, and its clock knows."""

    async def blocking(body):
        if body["prompt"] == [0]:
            asyncio.get_running_loop().now += 1.0  # as a long computation in this process would
        async for data in Script(0.2, 0.1).reply(body):
            yield data

    records = lesson.drive_scripted(blocking, ones(3), [0.0, 0.4, 2.0])
    assert ms(r.client_queue_time for r in records) == [0, 600, 0] and ms([records[1].ttft]) == [200]
    assert ms([records[1].e2el_including_client_queue]) == [800]


def test_request_bodies():
    url, body = Target("http://x", "m", extra={"ignore_eos": True}).request(Prompt([5, 6], 2, 9))
    assert url == "http://x/v1/completions" and json.loads(body) == {
        "model": "m", "prompt": [5, 6], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }  # fmt: skip
    url, body = Target("http://x", "m", chat=True).request(Prompt("hello", 1, 9))
    assert url.endswith("/v1/chat/completions")
    assert json.loads(body)["messages"] == [{"role": "user", "content": "hello"}]
    assert json.loads(body)["max_completion_tokens"] == 9


def test_a_virtual_deadlock_is_said():
    async def for_ever(body):
        await asyncio.Event().wait()
        yield b""

    with pytest.raises(RuntimeError, match="none for time"):
        lesson.drive_scripted(for_ever, ones(1), [0.0], timeout=None)


# --- Over real sockets ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(handle):
    """A raw asyncio server in a thread: `handle(reader, writer)`. Yields its URL."""
    loop, started, url = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        started.set()

    def run():
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    yield url[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0)
    return head.decode(), json.loads(await reader.readexactly(length)) if length else None


def api(seen=None, fail=lambda body: False):
    """A small OpenAI server: /v1/models, and scripted streams on both endpoints; `fail(body)` cuts the connection."""

    async def handle(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head, body = await read_request(reader)
            if seen is not None:
                seen.append((head, body))
            if head.startswith("GET /v1/models"):
                content = b'{"data": [{"id": "served"}]}'
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(content) + content
                )
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
                async for data in Script(0.01, 0.002).reply(body):
                    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                    if fail(body):
                        await writer.drain()
                        writer.transport.abort()
                        return
                writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    return handle


def bench(capsys, *argv):
    lesson.main(["bench", *argv])
    return capsys.readouterr().out


def test_bench_from_end_to_end(tmp_path, capsys):
    seen, out = [], tmp_path / "out.json"
    out.write_text('{"other": 1}')
    with serving(api(seen)) as url:
        flags = "--num-prompts 12 --request-rate 200 --num-warmups 3 --random-input-len 6 --random-output-len 5"
        flags += " --ignore-eos --api-key secret --goodput ttft:10000 e2el:10000 --metric-percentiles 50,99"
        text = bench(capsys, "--base-url", url + "/v1/", *flags.split(), "--json", str(out))
    assert "12 answered, 0 failed" in text and "Little" in text and "goodput" in text
    content = json.loads(out.read_text())
    found = content["bench"]
    assert content["other"] == 1 and found["model_id"] == "served" and found["request_rate"] == 200
    assert (found["completed"], found["total_output_tokens"], found["total_input_tokens"]) == (12, 60, 72)
    assert found["request_goodput"] == found["request_throughput"] and found["max_lateness_ms"] >= 0
    assert found["p99_ttft_ms"] >= found["p50_ttft_ms"] >= 9.9 and found["median_itl_ms"] >= 1.9
    posts = [(head, body) for head, body in seen if body]
    assert len(posts) == 15 and all("Authorization: Bearer secret" in head for head, _ in posts)
    assert all(body["ignore_eos"] and body["model"] == "served" for _, body in posts)
    prompts = [tuple(body["prompt"]) for _, body in posts]
    assert len(set(prompts)) == 15, "a warm-up must not put a measured prompt into the server's prefix cache"


@pytest.mark.parametrize("rate", [5.0, math.inf])
def test_the_load_is_what_the_flags_say(monkeypatch, rate):
    calls = []

    async def drive(client, target, prompts, arrivals, limit, advance=None):
        calls.append((target, prompts, arrivals, limit))
        return [Record(0.0, 0.0, 1.0, [1.0], 1, 1) for _ in prompts]

    monkeypatch.setattr("lab.bench.drive", drive)
    flags = f"--num-prompts 3 --num-warmups 2 --seed 7 --request-rate {rate} --burstiness 0.5 --max-concurrency 4"
    args = bench_args(*flags.split(), "--request-timeout", "9", "--random-input-len", "3")
    result, _ = asyncio.run(serve_load(args))
    (_, warmups, at_once, few), (target, prompts, due, limit) = calls
    assert (at_once, few, limit) == ([0.0] * 2, 4, 4) and (target.timeout, target.extra) == (9, {})
    assert due == arrival_times(3, rate, random.Random(7), 0.5)
    assert prompts == make_prompts(args, 3, 7) and warmups[0] not in prompts
    # All at once, there is no time at which a user asked.
    assert ("mean_e2el_including_client_queue_ms" in result) == (rate == 5)


def test_bench_chat_with_a_limit(tmp_path, capsys):
    seen, out, file = [], tmp_path / "out.json", tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello", "output_tokens": 4}\n')
    with serving(api(seen)) as url:
        flags = (
            f"--base-url {url} --model m --backend openai-chat --num-prompts 6 --request-rate 1000 --max-concurrency 1"
        )
        text = bench(capsys, *flags.split(), "--dataset-path", str(file), "--json", str(out))
    found = json.loads(out.read_text())["bench"]
    assert found["max_concurrent_requests"] == 1 and found["completed"] == 6 and "queue in the client" in text
    assert found["mean_e2el_including_client_queue_ms"] > 2 * found["mean_e2el_ms"]
    assert found["max_lateness_ms"] is None
    assert all(head.startswith("POST /v1/chat/completions") for head, _ in seen)


def test_a_connection_that_breaks_is_a_cut_answer(capsys):
    with serving(api(fail=lambda body: body["prompt"][0] % 2)) as url:
        text = bench(capsys, "--base-url", url, "--model", "m", "--num-prompts", "6", "--random-input-len", "3",
                     "--random-output-len", "2", "--max-concurrency", "1")  # fmt: skip
    assert "failed; " in text and "x truncated" in text and "0 answered" not in text


def test_an_open_loop_has_a_connection_for_everybody():
    """120 users, and a server that answers when all of them are there; a client has 100 by default."""
    here = []

    async def reply(body):
        here.append(body)
        while len(here) < 120:
            await asyncio.sleep(0.01)
        async for data in Script(0.0, 0.0).reply(body):
            yield data

    async def run():
        server, url = await lesson.start_server(reply)
        async with server:
            return await serve_load(lesson.build_parser().parse_args(
                ["bench", "--base-url", url, "--model", "m", "--num-prompts", "120", "--random-input-len", "2",
                 "--random-output-len", "1", "--request-timeout", "10"]))  # fmt: skip

    result, _ = asyncio.run(run())
    assert (result["completed"], result["failed"]) == (120, 0)


def test_no_server_no_number(capsys, tmp_path):
    out = tmp_path / "out.json"
    with pytest.raises(common.CheckFailed, match="connection"):
        bench(capsys, "--base-url", "http://127.0.0.1:9", "--model", "m", "--num-prompts", "2", "--random-input-len",
              "3", "--json", str(out))  # fmt: skip
    assert json.loads(out.read_text())["bench"]["request_rate"] == "inf", "JSON has no word for infinity"
    assert "0 answered, 2 failed; 2 x connection" in capsys.readouterr().out
    with pytest.raises(common.InputError, match="--base-url"):
        bench(capsys, "--base-url", "http://127.0.0.1:9", "--num-prompts", "2")
    with pytest.raises(common.CheckFailed, match="connection"):  # a key that is not ASCII
        bench(capsys, "--base-url", "http://127.0.0.1:9", "--model", "m", "--num-prompts", "2", "--api-key", "clé")


def test_the_lessons_own_server():
    records, off = asyncio.run(lesson.load_own_server(0))
    assert all(not r.error and r.output_tokens == 12 and r.ttft >= 0.0299 for r in records)
    assert len(off) == 80 * 11 and statistics.median(map(abs, off)) < 0.02


# --- The simulated engine against theory ----------------------------------------------------------------------------


def batch_means(values, batches=20):
    """Mean of a correlated series, and the half-width of its 99.9 % confidence interval: means of long stretches are
    nearly independent where neighbours are not; 3.883 is Student's t for 19 degrees of freedom."""
    means = [statistics.fmean(part) for part in np.array_split(np.array(values, dtype=float), batches)]
    return statistics.fmean(means), 3.883 * statistics.stdev(means) / math.sqrt(batches)


def one_seat(prompts, load, seed):
    """Waits in front of one seat, and the service times."""
    services = [StepCost().alone(p) for p in prompts]
    rate = load / statistics.fmean(services)
    arrivals = [round(at) for at in arrival_times(len(prompts), rate, random.Random(seed))]
    run = run_simulated(prompts, arrivals, max_num_seqs=1)
    waits = [times[-1] - at - service for times, at, service in zip(run.times, arrivals, services)]
    return waits, services, arrivals, rate


def geometric_prompts(count, seed):
    rng = random.Random(seed)
    return [Prompt([], 16, 1 + min(60, int(rng.expovariate(1 / 4)))) for _ in range(count)]


def lindley(arrivals, services):
    waits, free_at = [], 0
    for at, service in zip(arrivals, services):
        waits.append(max(0, free_at - at))
        free_at = max(at, free_at) + service
    return waits


@pytest.mark.parametrize("load", [0.3, 0.9])
def test_every_wait_is_lindleys(load):
    waits, services, arrivals, _ = one_seat(geometric_prompts(300, 1), load, 2)
    assert waits == lindley(arrivals, services) and max(waits) > 0


@pytest.mark.parametrize(("count", "load"), [(6_000, 0.5), pytest.param(60_000, 0.8, marks=pytest.mark.slow)])
def test_mean_waits_are_pollaczek_khinchines(count, load):
    """M/D/1 and M/G/1: λ E[S²] / (2 (1 − ρ)) lies in the 99.9 % interval of the simulated mean."""
    for prompts in ([Prompt([], 128, 1)] * count, geometric_prompts(count // 5, 3)):
        waits, services, _, rate = one_seat(prompts, load, 4)
        theory = rate * statistics.fmean(s * s for s in services) / (2 * (1 - load))
        mean, half = batch_means(waits)
        assert abs(mean - theory) <= half and half < 0.6 * theory, (mean, half, theory)


def test_the_queue_of_the_story():
    for name, found in page.facts()["queue"].items():
        load = int(name) / 100
        assert found["exact"] and found["theory"] == pytest.approx(load / (2 * (1 - load)))


def test_a_step_costs_what_it_says():
    cost = StepCost()
    assert cost([(1, 1000)]) == 6_440 + (27_000 + 44_000) // 1000
    assert cost([(512, 512), (1, 600)]) == 6_440 + (27_000 * 513 + 44 * 1112) // 1000
    alone = cost.alone(Prompt([], page.INPUT, page.OUTPUT))
    assert page.capacity(1) == pytest.approx(1e6 / alone), "from the start, not from the first answer"
    assert cost.alone(Prompt([], 100, 3)) == cost([(100, 100)]) + cost([(1, 101)]) + cost([(1, 102)])


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


@pytest.mark.slow
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


# --- Tuning ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_the_front_is_what_nobody_beats(points):
    front = pareto(points)
    kept = [p for p, on in zip(points, front) if on]
    assert len(set(kept)) == len(kept)
    for cost, gain in points:
        assert any(c <= cost and g >= gain for c, g in kept), "everybody is on the front or behind someone on it"
    for (c, g), (d, h) in itertools.permutations(kept, 2):
        assert (c < d) == (g < h)


def measured(seats, budget):
    if budget < seats:
        raise common.InputError(f"max_num_batched_tokens {budget}: too small")
    return {
        "output_throughput": seats * 10,
        "request_goodput": 9 - seats,
        "p99_itl_ms": seats + budget,
        "p99_ttft_ms": None,
    }


def test_tune_chooses_within_the_limits():
    found = tune(measured, (1, 4, 8), (2, 8), {"itl": 13.0})
    assert [row.get("refused") is not None for row in found["rows"]] == [False, False, True, False, True, False]
    best = found["rows"][found["best"]]
    assert (best["max_num_seqs"], best["max_num_batched_tokens"]) == (4, 8)
    best = tune(measured, (1, 4, 8), (2, 8), {"itl": 13.0, "ttft": 1}, gain="request_goodput")
    assert best["rows"][best["best"]]["max_num_seqs"] == 1, "a metric that was not measured limits nobody"
    assert tune(measured, (1, 4), (2, 8), {"itl": 1.0})["best"] is None
    assert tune(measured, (8,), (2,), {})["best"] is None
    assert tune(measured, (1,), (2,), {"itl": 3.0})["best"] == 0, "a limit that is just kept"


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


def test_tune_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = "tune --simulate --max-num-seqs 2,8 --max-num-batched-tokens 256,1024 --num-prompts 24 --limit itl:60"
    lesson.main([*flags.split(), "--goodput", "ttft:5000", "--request-rate", "20", "--json", str(out)])
    text, found = capsys.readouterr().out, json.loads(out.read_text())["tune"]
    assert "Most request goodput under P99 itl ≤ 60 ms: --max-num-seqs 8" in text and found["simulated"] is True
    assert len(found["rows"]) == 4 and found["rows"][found["best"]]["max_num_seqs"] == 8
    lesson.main(["tune", "--simulate", "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--num-prompts", "8"])
    assert "refused: max_num_batched_tokens 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    "pair", ["ttft", "ttft:", "ttft:-1", "ttft:0", "ttft:x", "speed:3", "ttft:inf", "ttft:nan", ":5", "ttft:5x"]
)
def test_wrong_limits_are_named(pair):
    with pytest.raises(common.InputError, match="--goodput"):
        parse_limits([pair], "--goodput", ("ttft", "tpot", "e2el"))
    assert parse_limits(["ttft:200", "tpot:.5"], "--goodput", ("ttft", "tpot")) == {"ttft": 200.0, "tpot": 0.5}


# --- The real engine, offline ---------------------------------------------------------------------------------------


@pytest.fixture
def engine(tiny_model, real_model):
    return LLMEngine(tiny_model, real_model[1], max_model_len=64, max_num_seqs=4, max_num_batched_tokens=128)


def test_an_engine_run_has_every_token_in_order(engine):
    rng = random.Random(0)
    prompts = [
        Prompt(rng.choices(range(64, 128), k=n), n, m) for n, m in ((3, 5), (9, 1), (4, 7), (2, 2), (5, 3), (1, 4))
    ]
    due = [0.0, 0.0, 0.0, 0.01, 0.2, 0.2]
    records = engine_run(engine, prompts, due)
    assert [r.output_tokens for r in records] == [p.output_len for p in prompts] == [len(r.times) for r in records]
    assert all(r.times == sorted(r.times) and r.times[0] > r.start == at for r, at in zip(records, due))
    assert not engine.has_unfinished_requests() and all(r.end == r.times[-1] for r in records)


def test_latency_has_vllms_keys(engine):
    found = measure_latency(engine, 3, 8, 4, num_iters=3, num_iters_warmup=1)
    assert {"avg_latency", "latencies", "percentiles"} <= set(found) and len(found["latencies"]) == 3
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert found["avg_latency"] == pytest.approx(statistics.fmean(found["latencies"]))
    assert 0 < found["median_ttft_ms"] < 1e3 * max(found["latencies"])
    assert found["output_throughput"] == pytest.approx(3 * 4 / found["avg_latency"])
    one = measure_latency(engine, 2, 8, 1, num_iters=1)
    assert one["median_tpot_ms"] is None, "one token has no next one"


def test_a_batch_lasts_until_its_last_answer_and_no_prompt_comes_twice(engine, monkeypatch):
    asked = []

    def run(engine, prompts, due):
        asked.extend(prompts)
        return [Record(0.0, 0.0, end, [1.0, end], 8, 4) for end in (2.0, 3.0)]

    monkeypatch.setattr("lab.tuning.engine_run", run)
    found = measure_latency(engine, 2, 8, 4, num_iters=3, num_iters_warmup=2)
    assert found["latencies"] == [3.0] * 3
    assert len({tuple(p.content) for p in asked}) == 10 and {p[1:] for p in asked} == {(8, 4)}


def test_the_engine_has_room_for_all_that_is_measured(monkeypatch):
    """Blocks for every seat, a budget for the whole batch or for the longest request, and no prefix cache."""
    monkeypatch.setattr("lab.tuning.make_engine", lambda args: args)
    args = build_engine(None, 33, 4, 64)
    assert (args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens) == (33, 4, 64)
    assert args.num_gpu_blocks_override - 2 == 4 * 3 and not args.enable_prefix_caching
    sizes, known = [], {"avg_latency": 1, "percentiles": {"99": 1}, "output_throughput": 1, "median_ttft_ms": 1,
                        "median_tpot_ms": 1}  # fmt: skip
    monkeypatch.setattr("lab.tuning.build_engine", lambda model, *size: sizes.append(size))
    monkeypatch.setattr("lab.tuning.measure_latency", lambda *args: known)
    for n_in, n_out in ((8, 4), (2, 40)):
        lesson.main(["bench", "latency", "--batch-size", "3", "--input-len", str(n_in), "--output-len", str(n_out)])
    assert sizes == [(12, 3, 24), (42, 3, 42)]


def test_tune_asks_for_what_it_is_told_to(monkeypatch, capsys):
    seen, run = [], run_simulated
    monkeypatch.setattr("lab.tuning.run_simulated", lambda *args: seen.append(args) or run(*args))
    flags = "tune --simulate --max-num-seqs 4 --max-num-batched-tokens 512 --num-prompts 40 --input-tokens 100"
    lesson.main([*flags.split(), "--output-tokens", "10", "--request-rate", "20", "--limit", "itl:60",
                 "--limit-percentile", "90"])  # fmt: skip
    ((prompts, due, seats, budget),) = seen
    assert (len(due), due[-1], seats, budget) == (40, 2_000_000, 4, 512)
    assert all(50 <= p.input_len <= 150 and 5 <= p.output_len <= 15 for p in prompts)
    assert "under P90 itl ≤ 60 ms: --max-num-seqs 4" in capsys.readouterr().out


def test_the_commands_can_be_mounted_elsewhere():
    parser = argparse.ArgumentParser()
    add_bench_commands(parser.add_subparsers())
    args = parser.parse_args(["bench", "latency", "--input-len", "5", "--output-len", "6", "--batch-size", "2"])
    assert args.run is latency_command and (args.input_tokens, args.output_tokens, args.num_iters) == (5, 6, 30)
    args = parser.parse_args(["bench", "--request-rate", "inf", "--burstiness", "0.5", "--percentiles", "50,99.9"])
    assert args.run is bench_command and args.request_rate == math.inf and args.metric_percentiles == [50, 99.9]
    assert parser.parse_args(["tune", "--max-num-seqs", "1,2"]).max_num_seqs == [1, 2]


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


@pytest.mark.slow
def test_the_engine_that_is_served_can_be_tuned(capsys, tmp_path):
    out = str(tmp_path / "out.json")
    flags = "tune --max-num-seqs 1,4 --max-num-batched-tokens 32,64 --num-prompts 4 --input-tokens 24 --output-tokens 4"
    lesson.main([*flags.split(), "--json", out])
    rows = json.loads((tmp_path / "out.json").read_text())["tune"]["rows"]
    assert [row["completed"] for row in rows] == [4] * 4 and "Most output throughput" in capsys.readouterr().out
    flags = "bench latency --batch-size 2 --input-tokens 8 --output-tokens 4 --num-iters 2 --num-iters-warmup 0"
    lesson.main([*flags.split(), "--json", out])
    assert len(json.loads((tmp_path / "out.json").read_text())["bench latency"]["latencies"]) == 2

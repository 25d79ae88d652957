"""Lesson 06: the smallest server, the queue in front of it, and what its page says of both."""

from __future__ import annotations

import common

import asyncio
import contextlib
import itertools
import json
import sys
import time
from types import SimpleNamespace

import httpx
import openai
import pytest

from engine import registry
from engine.front_end import CompletionOutput, RequestOutput
from engine.llm_engine import LLMEngine
from engine.request import SamplingParams
from engine.serving.admission import AdmissionControl
from lab import cli
from support import scripts

lesson, page = registry.lesson("06_serving"), cli.numbers("06_serving")


# --- The widget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", list(page.PLACED))
@pytest.mark.parametrize("bound", page.WIDGET_CHOICES["queue_bound"])
@pytest.mark.parametrize("load", [50, 95, 120])
def test_books_are_balanced(place, bound, load):
    """arrived = served + rejected; Little's law, exactly, on every trace; nobody waits in front of a free seat."""
    trace = page.simulate({"load": load, "gpu_ms": 5, "cpu_ms": 8, "place": place, "queue_bound": bound})
    served = [i for i, at in enumerate(trace["finish"]) if at >= 0]
    assert len(served) == trace["served"] == page.REQUESTS - trace["rejected"]
    events = sorted((at, d) for i in served for at, d in ((trace["arrivals"][i], 1), (trace["finish"][i], -1)))
    area = inside = last = 0
    for at, change in events:
        area, last, inside = area + inside * (at - last), at, inside + change
    assert area == trace["inside_integral"] == sum(trace["finish"][i] - trace["arrivals"][i] for i in served)
    for _, running, waiting, late in trace["steps"]:
        assert running <= page.SEATS and (waiting == 0 or running == page.SEATS) and (not bound or waiting <= bound)
        assert 0 <= late <= waiting
    for i in served:
        assert trace["first"][i] >= trace["arrivals"][i] + trace["step_us"]
        assert trace["finish"][i] == trace["first"][i] + (page.TOKENS - 1) * trace["step_us"], "no gaps once it runs"
    assert trace["rejected"] == 0 or bound
    # The first request finds everything idle: its token takes cpu + gpu, overlapped or not.
    assert trace["first"][0] - trace["arrivals"][0] == 13_000


def test_overlap_and_bounds_do_what_the_text_says():
    known = page.facts()
    assert (
        known["gpu_share"]["20"]["turns"] > known["gpu_share"]["10"]["turns"] > known["gpu_share"]["2"]["turns"] == 0.2
    )
    waits = [known["load"][str(load)]["wait_ms"] for load in (50, 80, 90, 95, 105)]
    assert waits == sorted(waits) and waits[-1] > 2 * waits[-2]
    bounded, free = known["bounded"]["120"], known["load"]["120"]
    assert bounded["wait_ms"] < free["wait_ms"] / 2 and bounded["rejected"] > 0 and bounded["most_waiting"] == 20
    longer = page.pipeline(105, 20, 8, "one loop", 0, 1800)
    assert longer["wait_sum"] / longer["served"] / 1e3 > 1.5 * waits[-1], "it grows with the length of the run"


def test_above_its_capacity_the_queue_grows_but_not_with_every_newcomer():
    trace = page.simulate({**page.WIDGET_DEFAULT, "load": 120})
    waits = [(first - trace["step_us"] - at) / 1e6 for first, at in zip(trace["first"], trace["arrivals"])]
    means = [sum(waits[i : i + 50]) / 50 for i in range(0, 200, 50)]
    assert means == sorted(means) and [round(mean, 1) for mean in means[::3]] == [0.2, 1.3]
    shorter = sum(later < before for before, later in itertools.pairwise(waits))
    assert 80 < shorter < 100, "two that come close together find the same end of a step"
    mean = {n: page.facts()["load"]["120"]["wait_ms"] if n == 800 else 1e3 * sum(waits) / n for n in (200, 800)}
    assert mean[800] > 4 * mean[200]


def test_who_waits_for_more_than_a_second_is_counted_while_it_waits():
    trace = page.simulate({**page.WIDGET_DEFAULT, "load": 120})
    for now, _, _, late in trace["steps"]:
        inside = [now - at for at, wait in zip(trace["arrivals"], trace["waits"]) if at <= now < at + wait]
        assert late == sum(waited > 1_000_000 for waited in inside)
    assert trace["late"] == sum(wait > 1_000_000 for wait in trace["waits"]) == 72


def test_a_faster_server_gets_the_same_arrivals():
    """So that one scale serves all runs: only `load` moves them."""
    arrivals = [page.simulate({**page.WIDGET_DEFAULT, "gpu_ms": gpu})["arrivals"] for gpu in (2, 20)]
    assert arrivals[0] == arrivals[1]


def test_the_widget_uses_the_real_admission_and_scheduler(monkeypatch):
    params = {**page.WIDGET_DEFAULT, "load": 120, "queue_bound": 8}
    before = page.simulate(params)
    monkeypatch.setattr(AdmissionControl, "check", lambda self, inside, n=1: None)
    assert page.simulate(params)["rejected"] == 0 < before["rejected"]
    monkeypatch.undo()
    monkeypatch.setattr(page.DryRun, "step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        page.simulate(params)


def test_what_the_page_says_of_throughput():
    """As long as there are seats, it grows, though less than the number of streams."""
    load = json.loads((common.ROOT / "lessons/results/cpu.json").read_text())["06_serving"]["bench"]["load"]
    measured = [load[streams]["output_throughput"] for streams in ("1", "2", "4", "8", "16")]
    assert all(1 < more / fewer < 2 for fewer, more in itertools.pairwise(measured))


# --- The lesson's own server ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "bound"), [(50, 0), (80, 0), (95, 0), (105, 0), (120, 0), (105, 20), (120, 8)])
def test_the_lessons_queue_is_the_engines(load, bound):
    """Thirty lines against admission control and scheduler on a clock: the same waits, the same refused."""
    ours, theirs = lesson.queue_at(load, bound), page.pipeline(load, 20, 8, "one loop", bound, 800)
    assert (len(ours.waits), ours.refused) == (theirs["served"], theirs["rejected"])
    assert ours.most_waiting == theirs["most_waiting"]
    assert sum(ours.waits) == theirs["wait_sum"]


class Scripted:
    """An engine of the lesson's that writes letters, one in each step."""

    def __init__(self, step=lambda: None):
        self.inside, self.aborted, self.during_step = {}, [], step

    def has_unfinished_requests(self):
        return bool(self.inside)

    def add_request(self, request_id, prompt, params, stream):
        if prompt == "too long":
            raise common.InputError("prompt: too long")
        self.inside[request_id] = params.max_tokens

    def abort_request(self, ids):
        for name in ids:
            self.inside.pop(name, None)
            self.aborted.append(name)

    def step(self):
        time.sleep(0.002)
        self.during_step()
        heard = []
        for name in list(self.inside):
            self.inside[name] -= 1
            reason = None if self.inside[name] else "length"
            if reason:
                del self.inside[name]
            heard.append(
                RequestOutput(name, None, [], [CompletionOutput(0, "x", [1], finish_reason=reason)], bool(reason))
            )
        return heard


def with_engine(inner, use, places=4, **about):
    async def run():
        engine = lesson.AsyncEngine(inner, places, **about)
        try:
            return await asyncio.wait_for(use(engine), 30)
        finally:
            if not engine.dead:
                await asyncio.wait_for(engine.stop(), 30)

    return asyncio.run(run())


def few(tokens):
    return SamplingParams(max_tokens=tokens)


def test_a_slow_reader_finds_all_at_once_and_nobody_waits_for_it():
    async def use(engine):
        answer = engine.generate("a", few(20))
        first = await anext(answer)
        while inner.inside:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        return first, [piece async for piece in answer]

    inner = Scripted()
    (text, reason), rest = with_engine(inner, use)
    assert reason is None and [why for _, why in rest] == ["length"], "one piece, however many steps went by"
    assert len(text + rest[0][0]) == 20


@pytest.mark.parametrize("aborts", [True, False])
def test_whoever_leaves_is_not_computed_any_more(aborts):
    async def use(engine):
        async with contextlib.aclosing(engine.generate("a", few(10_000))) as answer:
            await anext(answer)
        await asyncio.sleep(0.1)
        left = dict(inner.inside)
        inner.inside.clear()
        return left, engine.mailboxes

    inner = Scripted()
    left, mailboxes = with_engine(inner, use, aborts=aborts)
    assert mailboxes == {} and (inner.aborted == ["0"]) == aborts and bool(left) != aborts


def test_who_finds_no_place_is_told_and_takes_none():
    async def use(engine):
        answers = [engine.generate("a", few(50)) for _ in range(5)]
        heard = await asyncio.gather(*map(anext, answers), return_exceptions=True)
        for answer in answers:
            await answer.aclose()
        again = [piece async for piece in engine.generate("a", few(1))]
        return heard, again

    heard, again = with_engine(Scripted(), use)
    assert [type(one) for one in heard] == [tuple] * 4 + [lesson.ServerFull] and again == [("x", "length")]


def test_what_is_wrong_with_one_request_is_that_ones_business():
    async def use(engine):
        good = engine.generate("a", few(5))
        await anext(good)
        with pytest.raises(common.InputError, match="too long"):
            await anext(engine.generate("too long", few(5)))
        return [piece async for piece in good]

    assert with_engine(Scripted(), use)[-1][1] == "length"


def test_an_engine_that_dies_tells_everybody_and_health():
    async def use(engine):
        answers = [engine.generate("a", few(10_000)) for _ in range(2)]
        for answer in answers:
            await anext(answer)
        inner.during_step = lambda: 1 / 0
        for answer in answers:
            with pytest.raises(ZeroDivisionError):
                while True:
                    await anext(answer)
        with pytest.raises(ZeroDivisionError):
            await anext(engine.generate("a", few(1)))
        app = httpx.ASGITransport(lesson.build_app(engine, "m"))
        async with httpx.AsyncClient(transport=app, base_url="http://test") as client:
            asked = {"prompt": "x", "max_tokens": 1}
            return (await client.get("/health")).status_code, (
                await client.post("/v1/completions", json=asked)
            ).status_code

    inner = Scripted()
    assert with_engine(inner, use) == (503, 500)


def test_a_stop_answers_those_inside_first():
    async def use(engine):
        answer = engine.generate("a", few(40))
        await anext(answer)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        with pytest.raises(lesson.ServerFull):
            await anext(engine.generate("a", few(1)))
        pieces = [piece async for piece in answer]
        await stopping
        return pieces, engine.thread.is_alive()

    async def run():
        return await use(lesson.AsyncEngine(Scripted(), 4))

    pieces, alive = asyncio.run(run())
    assert pieces[-1][1] == "length" and not alive


def test_an_error_in_the_story_leaves_no_thread_that_computes():
    """One that is in a step when Python ends would abort the process, and hide what the check said."""

    async def run():
        engine = lesson.AsyncEngine(Scripted(), 4)
        with pytest.raises(common.CheckFailed):
            async with lesson.serving(engine, "m"):
                await anext(engine.generate("a", few(10_000)))
                raise common.CheckFailed("not caught")
        return engine.thread.is_alive()

    assert not asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"prompt": "half', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "prompt: must be a text"),
        (b'{"prompt": ""}', "prompt: must be a text"),
        (b'{"prompt": "x", "stream": 1}', "stream 1: must be true or false"),
        (b'{"prompt": "x", "n": 2}', "n: no such field"),
        (b'{"prompt": "x", "temperature": "hot"}', "temperature"),
        (b'{"prompt": "x", "max_tokens": 0}', "max_tokens"),
    ],
)
def test_a_body_is_read_field_by_field(body, why):
    with pytest.raises(common.InputError, match=why):
        lesson.read_body(body)


def test_openais_client_reads_the_lessons_server(tiny_model, real_model):
    """Whole and streamed, as the naive reference writes it."""

    async def ask():
        inner = LLMEngine(tiny_model, real_model[1], max_model_len=64, num_gpu_blocks_override=40)
        async with lesson.serving(lesson.AsyncEngine(inner, 8), "tiny") as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
            about = {
                "model": "tiny",
                "prompt": "a",
                "max_tokens": 6,
                "temperature": 0,
                "extra_body": {"ignore_eos": True},
            }
            whole = await client.completions.create(**about)
            stream = await client.completions.create(**about, stream=True)
            pieces = [piece.choices[0] async for piece in stream]
            return whole.choices[0], pieces

    tokenizer = real_model[1]
    vocabulary = SimpleNamespace(encode=lambda text: [t % 128 for t in tokenizer.encode(text)], decode=tokenizer.decode)
    whole, pieces = asyncio.run(ask())
    assert whole.finish_reason == "length" and "".join(piece.text for piece in pieces) == whole.text
    if max(tokenizer.encode("a")) < 128:
        assert whole.text == lesson.answer_alone(tiny_model, vocabulary, "a", 6)


# --- The story with another model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "told", "asked"),
    [
        ([(200, [{"delta": {"role": "assistant"}}, {"delta": {"content": "Paris"}}, {"delta": {"content": "."}}])],
         "'Paris.' in 2 events", ["chat/completions"]),
        ([(200, [{"delta": {"role": "assistant"}}, {"delta": {}}])], "'' in 0 events", ["chat/completions"]),
        ([(400, "this model has no chat template"), (200, [{"text": "Pa"}, {"text": ""}])], "'Pa' in 1 events",
         ["chat/completions", "completions"]),
    ],
)  # fmt: skip
def test_one_request_is_followed_whatever_the_model_takes_and_says(answers, told, asked, monkeypatch, capsys):
    """A model without a chat template completes the question; one that says nothing has its first token at the end."""
    paths, names = [], ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency")
    monkeypatch.setattr(page, "metrics_of", lambda client: {f"{name}_seconds_sum": 0.0 for name in names})

    class Client:
        @contextlib.contextmanager
        def stream(self, method, path, json):
            paths.append(path.removeprefix("/v1/"))
            code, body = answers[len(paths) - 1]
            lines = [f"data: {dumps({'choices': [choice]})}" for choice in body] if code == 200 else []
            error = dumps({"error": {"message": body}})
            yield SimpleNamespace(status_code=code, read=lambda: error, iter_lines=lambda: [*lines, "data: [DONE]"])

    dumps = json.dumps
    found = page.follow_one_request(Client(), "m")
    out = capsys.readouterr().out
    assert told in out and paths == asked and ("no chat template" in out) == (len(asked) == 2)
    assert 0 <= found["client_ttft_ms"] <= found["client_e2e_ms"] == found["around_ms"] < 1e4


# --- Its command `serve` ----------------------------------------------------------------------------------------------


def refused_job(*flags):
    return ("serve", *flags), [sys.executable, common.HERE / "06_serving.py", "serve", "--port", "0", *flags]


REFUSED = [(refused_job(*flags), word) for *flags, word in (
    ("--trust-remote-code", "runs Python"), ("--model", "/nowhere", "/nowhere"), ("--quantization", "magic", "magic"),
    ("--max-model-len", "100000", "max_model_len"))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("job", "word"), [pytest.param(job, word, id=word) for job, word in REFUSED])
def test_the_command_line_ends_with_one_line(job, word):
    """Fast twins: tests of the engine's arguments, where the same errors are exceptions."""
    done = scripts.get(job)
    assert done.returncode == 2 and word in done.stderr and "Traceback" not in done.stderr, done.stderr

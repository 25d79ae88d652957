"""Guides of strangers are compiled in two lanes; nobody waits for what takes long but those who want it."""

from __future__ import annotations

import common

import asyncio
import functools
import json
import os
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
from engine.errors import QueueOverflowError
from engine.request import Request, SamplingParams
from engine.sampling.guided import guide_queue as lesson
from engine.sampling.guided import limits
from engine.sampling.guided.vocabulary import Vocabulary
from engine.serving.core_proc import EngineCoreProc
from engine.serving.letters import EngineCoreRequestType

ENDLESS = {"json": {"type": "integer", "multipleOf": 9_999_991}}  # 42 characters, and an automaton of gigabytes
EASY = {"json": {"type": "boolean"}}


@functools.cache
def letters():
    """A vocabulary of bytes, which only our own patterns need to know."""
    return Vocabulary([bytes([b]) for b in range(127)] + [b""], [127])


class Readings:
    """Stands where the library does: what a specification costs, in seconds of its reading, is what it says."""

    def __init__(self, monkeypatch, unit=0.01):
        self.running, self.most, self.order, self.unit = 0, 0, [], unit
        monkeypatch.setattr(lesson, "read_apart", self.read)
        vocabulary = letters()
        vocabulary.guides.clear()
        monkeypatch.setattr(vocabulary, "compile", lambda kind, spec, work: (self.order.append(spec), spec)[1])
        self.queue = lesson.GuideQueue(lambda: vocabulary)
        self.queue.lanes[0].seconds, self.queue.lanes[1].seconds = 2.0, 9000.0

    async def read(self, kind, spec, seconds):
        cost = float(spec.split()[0])
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(min(cost, seconds) * self.unit)
        finally:
            self.running -= 1
        if cost > seconds:
            raise limits.TooSlow(f"takes more than {seconds} s")

    def ask(self, spec):
        return asyncio.create_task(self.queue.compile(("grammar", spec)))

    def idle(self):
        return not (self.queue.tasks or self.queue.wanted or self.running or any(x.waiting for x in self.queue.lanes)
                    or [x.seats for x in self.queue.lanes] != [2, 1])  # fmt: skip


def test_a_cheap_one_passes_forty_slow_ones(monkeypatch):
    async def run():
        readings = Readings(monkeypatch)
        slow = [readings.ask(f"5000 s, number {i}" + "." * 100_000) for i in range(15)]
        await asyncio.sleep(0.005)
        assert await readings.ask("1 s") == "1 s" and not any(task.done() for task in slow)
        assert len(readings.queue.lanes[0].waiting) > 8, "it did not even wait for all to have their try"
        while readings.running != 1 or readings.queue.lanes[0].waiting:
            await asyncio.sleep(0.01)
        assert len(readings.queue.lanes[1].waiting) == 14
        assert await readings.ask("1 s again") == "1 s again" and readings.order == ["1 s", "1 s again"]
        assert readings.most == 3, "two who try, one who takes long"
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert readings.idle()

    asyncio.run(run())


def test_short_texts_go_first_and_long_ones_are_not_forgotten(monkeypatch):
    async def run():
        readings = Readings(monkeypatch)
        busy = [readings.ask(f"2 s {i}") for i in range(2)]
        await asyncio.sleep(0.001)
        tasks = [readings.ask("1 s" + "." * n) for n in (3000, 20, 500)]
        await asyncio.gather(*busy, *tasks)
        assert list(map(len, readings.order[2:])) == [23, 503, 3003]
        lane, order = lesson.Lane(1, 9, 1.0, 1), []

        async def sit(size):
            async with lane.seat(size):
                order.append(size)
                await asyncio.sleep(0.03)

        first = asyncio.create_task(sit(1))
        await asyncio.sleep(0)
        long = asyncio.create_task(sit(400))  # as if it had come 40 ms later
        await asyncio.sleep(0.05)
        await asyncio.gather(first, long, *(asyncio.create_task(sit(i)) for i in range(3)))
        assert order[:2] == [1, 400], "who comes much later is not before it"

    asyncio.run(run())


def test_the_same_is_compiled_once_and_stopped_with_the_last_who_wants_it(monkeypatch):
    async def run():
        readings = Readings(monkeypatch)
        same = [readings.ask("1 s") for _ in range(20)]
        assert set(await asyncio.gather(*same)) == {"1 s"} and readings.order == ["1 s"] and readings.most == 1
        waiting = [readings.ask("1.9 s") for _ in range(3)]
        await asyncio.sleep(0.001)
        waiting[0].cancel()
        waiting[1].cancel()
        assert await waiting[2] == "1.9 s", "two have left, the third still wants it"
        for where in ("running", "waiting", "in the second lane"):
            before = [readings.ask(f"1 s {i}") for i in range(2 if where == "waiting" else 0)]
            await asyncio.sleep(0)
            left = [readings.ask("8000 s") for _ in range(2)]
            await asyncio.sleep({"running": 0.005, "waiting": 0.002, "in the second lane": 0.03}[where])
            assert (readings.running == 1) == (where != "waiting")
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await asyncio.gather(*before)
            await asyncio.sleep(0.001)
            assert readings.idle(), where
        assert "8000 s" not in readings.order

    asyncio.run(run())


def test_errors_are_told_to_all_who_asked_and_too_many_are_refused(monkeypatch):
    async def run():
        readings = Readings(monkeypatch, unit=0.00001)
        found = await asyncio.gather(*(readings.ask("10000 s") for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in found] == ["takes more than 9000.0 s"] * 3
        slow = [readings.ask(f"8000 s {i}") for i in range(30)]
        refused = await asyncio.gather(*slow, return_exceptions=True)
        overflow = [error for error in refused if isinstance(error, QueueOverflowError)]
        assert len(overflow) == 13 and "try again" in str(overflow[0]), "one seat, and room for 16"
        assert readings.idle()

    asyncio.run(run())


def test_a_client_that_leaves_between_two_lines_gives_its_seat_back():
    """Cancelled when the seat is its already, and when it is about to be."""

    async def run():
        lane = lesson.Lane(1, 9, 1.0, 1)

        async def sit():
            async with lane.seat(1):
                await asyncio.sleep(0.001)

        for first, second in ((0, 1), (1, 0)):
            tasks = [asyncio.create_task(sit()) for _ in range(3)]
            await asyncio.sleep(0)
            tasks[first].cancel()
            tasks[second].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert tasks[2].exception() is None and (lane.seats, lane.waiting) == (1, [])

    asyncio.run(run())


def test_patterns_have_both_lanes_too(monkeypatch):
    """Our own automata are counted: a tenth of the work in the first lane, all of it in the second."""
    monkeypatch.setattr(letters(), "guides", type(letters().guides)())

    async def run():
        queue, works = lesson.GuideQueue(letters), []
        guide = letters().guide
        monkeypatch.setattr(
            letters(), "guide", lambda kind, spec, work: (works.append(work), guide(kind, spec, work))[1]
        )
        easy, hard = ("regex", "[a-c]+"), ("regex", "(a?){150}")
        assert (await queue.compile(easy)).dfa and works == [queue.lanes[0].work]
        assert (await queue.compile(hard)).dfa and works[1:] == [queue.lanes[0].work, queue.lanes[1].work]
        assert (await queue.look({"regex": "[a-c]+"})) == (easy, letters().kept(*easy)) and letters().kept(*easy)
        with pytest.raises(common.InputError, match="too large, or"):
            await queue.compile(("regex", "(a?){9999}"))
        assert [lane.seats for lane in queue.lanes] == [2, 1] and not queue.tasks

    asyncio.run(run())


def children():
    """Processes of ours that read."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            about = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            found += [int(pid)] if int(about[1]) == os.getpid() and about[0] != "Z" else []
        except OSError:
            pass
    return found


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_a_reading_that_nobody_wants_any_more_is_killed():
    async def run():
        before = set(children())
        task = asyncio.create_task(lesson.read_apart("json", json.dumps(ENDLESS["json"]), 5.0))
        while not set(children()) - before:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert set(children()) == before

    asyncio.run(run())


@pytest.mark.parametrize("limit", ["seconds", "memory", "clock"])
def test_a_reading_has_limits(monkeypatch, limit):
    """Of a processor's time, of memory, and of the time that anybody waits."""
    spec = json.dumps(ENDLESS["json"])
    monkeypatch.setattr(limits, "MAX_MEMORY", (64 if limit == "memory" else 4096) << 20)
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.3 if limit == "clock" else 20.0)
    kind, text = (
        (common.InputError, "stack, or 64 MiB") if limit == "memory" else (limits.TooSlow, "takes more than 0.2")
    )
    start = time.perf_counter()
    with pytest.raises(kind, match=text):
        asyncio.run(lesson.read_apart("json", spec, 20.0 if limit == "memory" else 0.2))
    assert time.perf_counter() - start < 10


def test_the_engine_compiles_beside_its_steps(monkeypatch):
    """A request whose guide takes long waits alone: it is not with the scheduler yet, and can be aborted."""
    gate, letters_sent = threading.Event(), []
    ADD, ABORT = EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT

    class Core:
        def __init__(self):
            self.runner = self.scheduler = self.grammar = self
            self.patience = None
            self.requests = []

        def grammar_init(self, request):
            wanted = request.sampling_params.structured_outputs["regex"]
            if wanted != "known":
                gate.wait(20)
            if wanted == "wrong":
                raise common.InputError("structured_outputs: no")
            request.guide = wanted

        def add_request(self, request):
            self.requests.append((request.request_id, request.guide))

        def abort_requests(self, request_ids):
            self.requests[:] = [entry for entry in self.requests if entry[0] not in request_ids]

    def request(name, regex=None):
        params = SamplingParams(structured_outputs=regex and {"regex": regex})
        return Request(name, [1], params)

    core = Core()
    proc = EngineCoreProc(type("Engine", (), {"core": core, "lora": None})(), letters_sent.append)
    asked = [("slow", "x"), ("leaves", "y"), ("known", "known"), ("free", None)]
    for name, regex in asked:
        proc.handle([(ADD, request(name, regex))])
    proc.settle()
    assert set(core.requests) <= {("known", "known"), ("free", None)} and ("free", None) in core.requests
    assert proc.patience == proc.GLANCE and {"slow", "leaves"} <= set(proc.guided)
    proc.handle([(ABORT, ["leaves"])])
    proc.handle([(ADD, request("wrong", "wrong"))])
    gate.set()
    while proc.later:
        proc.settle()
    assert sorted(name for name, _ in core.requests) == ["free", "known", "slow"] and not proc.guided
    assert [letter.refused for letter in letters_sent] == [{"wrong": "structured_outputs: no"}]
    assert proc.patience is None and set(proc.arrived) == {"slow", "known", "free"}

"""Lesson 06e: letters arrive whole, every client reads what a blocking loop writes, and nobody can wedge the engine."""

from __future__ import annotations

import common

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import itertools
import multiprocessing
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support import tokenizing
from engine import registry
from lab import cli
from engine.model import folders
from engine.core.engine_core import EngineCore
from engine.front_end import CompletionOutput
from engine.front_end import RequestOutput
from engine.llm import LLM
from engine.llm_engine import LLMEngine
from engine.sampling.sampler import Logprob
import on_gpu
from support import scripts
from engine.config import SchedulerConfig
from engine.core.scheduler import Scheduler, make_scheduler
from engine.errors import EngineDeadError, QueueOverflowError
from engine.output import EngineCoreOutput, ModelRunnerOutput
from engine.request import Request, SamplingParams
from engine.serving import clients, collector, metrics
from engine.serving.admission import AdmissionControl
from engine.serving.async_llm import AsyncLLM
from engine.serving.clients import CLIENTS, InprocClient, MPClient, ThreadClient
from engine.serving.collector import RequestOutputCollector
from engine.serving.core_proc import EngineCoreProc
from engine.serving.front_end import FrontEnd
from engine.serving.letters import Dead, EngineCoreOutputs
from engine.serving.letters import EngineCoreRequestType as Kind
from engine.serving.mailbox import ClientGone, Mailbox, hang_up
from engine.serving.wire import frame

lesson, page = registry.lesson("06e_async_engine"), cli.numbers("06e_async_engine")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder():
    return folders.model_folder(None)


@pytest.fixture
def tiny(monkeypatch, tiny_model, real_model):
    """The script's factory builds an engine on the tiny model, with the real tokenizer (both know ids below 128)."""

    def make(args=None, report=lambda text: None):
        report("building")
        return LLMEngine(tiny_model, real_model[1], max_model_len=128, max_num_seqs=8,
                                 num_gpu_blocks_override=73, **(args or {}))  # fmt: skip

    monkeypatch.setattr(lesson, "make_small_engine", make)
    tokenizing.building(monkeypatch, lambda folder: real_model[1])
    return make


def factory(args, report):
    """What this process builds an engine with: the fixture's, or a test's own."""
    return lesson.make_small_engine(args, report)


in_this_process = pytest.mark.parametrize("place", ["thread", "event-loop"])


def prompt(*token_ids):
    return {"prompt_token_ids": list(token_ids)}


@contextlib.asynccontextmanager
async def running(folder, place="thread", args=None, **options):
    llm = await AsyncLLM.start(factory, args, folder, place, **options)
    try:
        yield llm
    finally:
        await llm.shutdown()


async def read(llm, name, what, params, stream=False):
    """All that comes for a request: (texts by index, pieces, finish reasons)."""
    texts, pieces, reasons = {}, [], {}
    async for output in llm.generate(name, what, params, stream=stream):
        pieces.append(output)
        for answer in output.outputs:
            texts[answer.index] = texts.get(answer.index, "") + answer.text
            reasons[answer.index] = answer.finish_reason
    return texts, pieces, reasons


async def idle(llm):
    """Nothing is left anywhere, on either side."""
    state = await llm.call_utility("check_idle")
    assert state == {"unfinished": 0, "tables": 0, "owned_blocks": 0}
    assert not (llm.front.sequences or llm.front.callers or llm.collectors or llm.replies)


# --- Everybody reads what a blocking loop writes ----------------------------------------------------------------------


@in_this_process
@pytest.mark.parametrize("stream", [False, True])
def test_many_clients_read_what_one_would(tiny, folder, place, stream):
    prompts = [[3 + i, 5, 9 + i % 4] for i in range(24)]  # three times the seats
    reference = lesson.answer_blocking(tiny(), prompts, GREEDY)

    async def run():
        async with running(folder, place) as llm:
            found = await asyncio.gather(
                *(read(llm, str(i), prompt(*p), GREEDY, stream) for i, p in enumerate(prompts))
            )
            await idle(llm)
            return found

    found = asyncio.run(run())
    assert [texts[0] for texts, *_ in found] == reference
    assert {tuple(reasons.values()) for *_, reasons in found} == {("length",)}
    assert not stream or any(len(pieces) > 1 for _, pieces, _ in found)


@in_this_process
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompts_scores_come_once_and_to_its_owner(tiny, folder, monkeypatch, place, stream):
    """However many turns a letter is read in; they say what the engine says to a blocking caller."""
    monkeypatch.setattr(AsyncLLM, "CHUNK", 1)
    prompts = [[3 + i, 5, 9 + i] for i in range(6)]
    params = [dataclasses.replace(GREEDY, prompt_logprobs=1 if i % 2 else None) for i in range(6)]
    engine, want = tiny(), {}
    for i, (p, sampling) in enumerate(zip(prompts, params)):
        engine.add_request(str(i), prompt(*p), sampling)
    while engine.has_unfinished_requests():
        want |= {output.request_id: output.prompt_logprobs for output in engine.step()}
    assert [want[str(i)] is None for i in range(6)] == [True, False] * 3

    async def run():
        async with running(folder, place) as llm:
            some = (read(llm, str(i), prompt(*p), params[i], stream) for i, p in enumerate(prompts))
            return await asyncio.gather(*some)

    for i, (_, pieces, _) in enumerate(asyncio.run(run())):
        told = [output.prompt_logprobs for output in pieces if output.prompt_logprobs is not None]
        assert told == ([] if want[str(i)] is None else [want[str(i)]])


def test_scores_of_a_step_that_gave_nobody_a_token_are_not_lost(tiny_model, real_model):
    """As in a pipeline: who was preempted meanwhile computes that token again, but not its scores."""
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.front = FrontEnd(tiny_model.config, real_model[1], lambda letter: None, 64)
    llm.stat_logger, llm.collectors = None, {"a": RequestOutputCollector("a")}
    llm.front.add_request("a", prompt(1, 2), dataclasses.replace(GREEDY, prompt_logprobs=0), stream=True)
    (name,) = llm.front.sequences
    scores = [None, {2: Logprob(-1.0, 3)}]
    asyncio.run(llm._deliver(EngineCoreOutputs([EngineCoreOutput(name, [], new_prompt_logprobs=scores)])))
    assert llm.collectors["a"].get_nowait() is None
    for token in (5, 6):
        asyncio.run(llm._deliver(EngineCoreOutputs([EngineCoreOutput(name, [token])])))
    assert llm.collectors["a"].get_nowait().prompt_logprobs == scores, "kept when pieces are put together"


def test_a_letter_for_many_is_worked_off_in_pieces(tiny, folder, monkeypatch):
    """With 3 sequences at a time, everybody else has a turn in between, and nobody is left out."""
    monkeypatch.setattr(AsyncLLM, "CHUNK", 3)
    seen, process = [], FrontEnd.process_outputs

    def count(self, letter, outputs):
        seen.append(len(outputs))
        return process(self, letter, outputs)

    monkeypatch.setattr(FrontEnd, "process_outputs", count)

    async def run():
        async with running(folder) as llm:
            return await asyncio.gather(*(read(llm, str(i), prompt(i + 1), GREEDY) for i in range(8)))

    found = asyncio.run(run())
    assert [texts[0] for texts, *_ in found] == lesson.answer_blocking(tiny(), [[i + 1] for i in range(8)], GREEDY)
    assert max(seen) == 3 and sum(seen) == 8 * GREEDY.max_tokens


def test_sampled_answers_do_not_depend_on_where_the_engine_is(tiny, folder):
    params = SamplingParams(temperature=1.3, seed=5, n=3, max_tokens=6, ignore_eos=True, logprobs=2)
    engine = tiny()
    engine.add_request("x", prompt(7, 8, 9), params)
    while not (outputs := engine.step()):
        pass
    want = [(answer.token_ids, answer.text, list(map(list, answer.logprobs))) for answer in outputs[0].outputs]

    async def run(place):
        async with running(folder, place) as llm:
            _, (final,), _ = await read(llm, "x", prompt(7, 8, 9), params)
            _, pieces, _ = await read(llm, "y", prompt(7, 8, 9), params, stream=True)
            await idle(llm)
            streamed = {
                i: [t for p in pieces for a in p.outputs if a.index == i for t in a.token_ids] for i in range(3)
            }
            ranks = {
                i: [list(x) for p in pieces for a in p.outputs if a.index == i for x in a.logprobs] for i in range(3)
            }
            return final, streamed, ranks

    for place in ("thread", "event-loop"):
        final, streamed, ranks = asyncio.run(run(place))
        assert [(a.token_ids, a.text, list(map(list, a.logprobs))) for a in final.outputs] == want
        assert [streamed[i] for i in range(3)] == [ids for ids, *_ in want]
        assert [ranks[i] for i in range(3)] == [logprobs for *_, logprobs in want]


def test_a_stop_string_ends_the_request_in_the_core_too(tiny, folder):
    """Only the front end sees text; the core must hear of it, or it would go on for ever."""

    async def run():
        async with running(folder) as llm:
            texts, _, _ = await read(
                llm, "all", prompt(3, 4), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            )
            stop = texts[0][5:7]
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop])
            cut, pieces, reasons = await read(llm, "cut", prompt(3, 4), params, stream=True)
            assert cut[0] == texts[0][: texts[0].index(stop)] and reasons[0] == "stop"
            assert pieces[-1].outputs[-1].stop_reason == stop
            await idle(llm)

    asyncio.run(run())


@in_this_process
def test_whoever_leaves_early_is_forgotten_at_once(tiny, folder, place):
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    async def run():
        async with running(folder, place) as llm:
            async with contextlib.aclosing(llm.generate("left", prompt(3), long, stream=True)) as outputs:
                async for _ in outputs:
                    break
            await idle(llm)
            task = asyncio.create_task(read(llm, "cancelled", prompt(4), long))
            stays = asyncio.create_task(read(llm, "stays", prompt(5), GREEDY))
            await asyncio.sleep(0.005)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert "cancelled" not in llm.front.callers
            texts, *_ = await stays
            await idle(llm)
            return texts[0]

    assert asyncio.run(run()) == lesson.answer_blocking(tiny(), [[5]], GREEDY)[0]


@in_this_process
def test_a_late_goodbye_does_not_end_a_namesake(tiny, folder, place):
    """Whoever has read the last piece is done; its generator is closed later, when somebody else may have the name."""

    async def run():
        async with running(folder, place) as llm:
            first = llm.generate("x", prompt(3), GREEDY)
            assert (await anext(first)).finished
            second = asyncio.create_task(read(llm, "x", prompt(3), GREEDY))
            while not llm.num_unfinished:
                await asyncio.sleep(0)
            await first.aclose()
            async with asyncio.timeout(5):
                found = await second
            await idle(llm)
            return found[2]

    assert asyncio.run(run()) == {0: "length"}


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_still_reads_hears_of_an_abort(tiny, folder, stream):
    async def run():
        async with running(folder, "event-loop") as llm:
            long = SamplingParams(n=2, seed=0, max_tokens=120, ignore_eos=True)
            reader = asyncio.create_task(read(llm, "x", prompt(3), long, stream))
            for _ in range(20):
                await asyncio.sleep(0)
            llm.abort(["x", "unknown"])
            async with asyncio.timeout(5):
                texts, pieces, reasons = await reader
            await idle(llm)
            return bool(texts[0] and texts[1]), pieces[-1].finished, reasons

    assert asyncio.run(run()) == (True, True, {0: "abort", 1: "abort"})


def test_an_answer_that_was_complete_counts_although_its_sibling_was_aborted(tiny, folder):
    """Nobody has read it: without `stream`, answers wait for each other. The logger must not wait with them."""
    logger = metrics.PrometheusStatLogger("m")

    async def run():
        async with running(folder, "event-loop", stat_logger=logger) as llm:
            llm.add_request("x", prompt(3), SamplingParams(n=2, seed=0, max_tokens=120, ignore_eos=True))
            while any(times.tokens < 2 for times in logger.times.values()) or len(logger.times) < 2:
                await asyncio.sleep(0)
            first = next(iter(llm.front.sequences))
            llm.front.core.abort_requests([first])
            await llm._deliver(EngineCoreOutputs([EngineCoreOutput(first, [5], "length")]))
            llm.abort(["x"])
            await idle(llm)

    asyncio.run(run())
    said = [line for line in logger.expose().decode().splitlines() if "request_success_total{" in line]
    ends = [end for end in ("length", "abort") for line in said if f'"{end}"' in line and line.endswith(" 1.0")]
    assert not logger.times and not logger.answers and ends == ["length", "abort"]


def test_what_cannot_be_served_is_refused_on_arrival(tiny, folder):
    async def run():
        async with running(folder, max_num_queued_reqs=3) as llm:
            for wrong in (
                prompt(),
                prompt(*range(128)),
                prompt(*range(200)),
                prompt(-1),
                prompt(10**9),
                prompt("a"),
                5,
            ):
                with pytest.raises(common.InputError):
                    await read(llm, "wrong", wrong, GREEDY)
            first = llm.add_request("a", prompt(1), GREEDY)
            with pytest.raises(common.InputError, match="in use"):
                llm.add_request("a", prompt(1), GREEDY)
            with pytest.raises(QueueOverflowError, match="max_num_queued_reqs 3"):
                llm.add_request("b", prompt(1), SamplingParams(n=3))
            second = llm.add_request("b", prompt(1), SamplingParams(n=2, max_tokens=4))
            assert llm.num_unfinished == 3 and llm.admission.num_rejected == 3
            async for _ in llm.outputs(first):
                pass
            async for output in llm.outputs(second):
                assert len(output.outputs) == 2
            await idle(llm)
            assert (await read(llm, "a", prompt(1), GREEDY))[0][0], "the id is free again"

    asyncio.run(run())


def test_what_only_the_core_can_refuse_is_refused_too(tiny, folder, monkeypatch):
    monkeypatch.setattr(EngineCore, "check_request", refuse_long)

    async def run():
        async with running(folder) as llm:
            with pytest.raises(common.InputError, match="prompt: too long for me"):
                await asyncio.wait_for(read(llm, "a", prompt(1, 2, 3), SamplingParams(n=2)), 5)
            assert (await read(llm, "b", prompt(1), GREEDY))[2] == {0: "length"}
            await idle(llm)

    asyncio.run(run())


def refuse_long(core, request):
    if request.num_prompt_tokens > 2:
        raise common.InputError("prompt: too long for me")


def test_a_request_that_nobody_foresaw_ends_alone(tiny, folder, monkeypatch, capsys):
    """What adding it raises is its own end, with an error, and nobody else's."""
    add = Scheduler.add_request

    def add_request(scheduler, request):
        add(scheduler, request)
        assert request.num_prompt_tokens < 3, "defect"

    monkeypatch.setattr(Scheduler, "add_request", add_request)

    async def run():
        async with running(folder) as llm:
            other = asyncio.create_task(read(llm, "other", prompt(1), dataclasses.replace(GREEDY, max_tokens=90)))
            (output,) = (await asyncio.wait_for(read(llm, "a", prompt(1, 2, 3), GREEDY), 5))[1]
            assert output.outputs[0].finish_reason == "error" and "defect" in output.outputs[0].stop_reason
            assert (await other)[2] == {0: "length"}
            await idle(llm)

    asyncio.run(run())
    assert "AssertionError: defect" in capsys.readouterr().err, "the reason is in the log"


@pytest.mark.parametrize("place", ["thread", "event-loop"])
def test_own_blocks_found_after_a_preemption_are_no_cached_prompt(monkeypatch, tiny_model, real_model, folder, place):
    """The core and the front end share a `Request` in one process."""

    def make(args=None, report=lambda text: None):
        return LLMEngine(tiny_model, real_model[1], max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=14,
                    block_size=8)  # fmt: skip

    monkeypatch.setattr(lesson, "make_small_engine", make)
    tokenizing.building(monkeypatch, lambda folder: real_model[1])
    prompts, cached = [prompt(*range(i, i + 17)) for i in range(4)], {}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def run():
        async with running(folder, place) as llm:
            heard, read_letter = [], llm._deliver
            monkeypatch.setattr(
                llm, "_deliver", lambda letter: (heard.extend(letter.preempted), read_letter(letter))[1]
            )
            for stream in (False, True):
                found = await asyncio.gather(*(read(llm, str(i), p, params, stream) for i, p in enumerate(prompts)))
                cached[stream] = [{output.num_cached_tokens for output in pieces} for _, pieces, _ in found]
            return heard

    assert len(asyncio.run(run())) > 2, "somebody was preempted"
    assert cached[False] == [{0}] * 4
    assert all(len(each) == 1 and max(each) <= 16 for each in cached[True]), "what the first round has left"
    llm = LLM.__new__(LLM)
    llm.llm_engine, llm.num_requests = make(), 0
    assert [output.num_cached_tokens for output in llm.generate(prompts, params)] == [0] * 4


def test_finish_all_gives_readers_what_there_is(tiny, folder):
    long = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)

    async def run():
        async with running(folder, "event-loop") as llm:
            streamed = asyncio.create_task(read(llm, "s", prompt(3), long, stream=True))
            whole = asyncio.create_task(read(llm, "w", prompt(3), long))
            for _ in range(40):
                await asyncio.sleep(0)
            llm.finish_all()
            texts, pieces, reasons = await streamed
            assert reasons == {0: "abort"} and texts[0] and pieces[-1].finished
            final, _, reasons = await whole
            assert reasons == {0: "abort"} and len(final[0]) > 0
            await idle(llm)
            return texts[0], final[0]

    streamed, whole = asyncio.run(run())
    full = lesson.answer_blocking(tiny(), [[3]], long)[0]
    assert full.startswith(streamed) and full.startswith(whole) and len(whole) < len(full)


def test_shutdown_waits_for_those_inside(tiny, folder):
    async def run():
        llm = await AsyncLLM.start(factory, None, folder, "thread")
        task = asyncio.create_task(read(llm, "x", prompt(3), GREEDY))
        await asyncio.sleep(0)
        await llm.shutdown(timeout=20)
        return (await task)[2]

    assert asyncio.run(run()) == {0: "length"}


# --- An end that somebody wanted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", [0, 5])
def test_who_comes_during_the_shutdown_is_refused(tiny, folder, patience):
    """Whoever is inside may finish, or gets what there is; a new request would be cut off, so it is told to go away."""

    async def run():
        async with running(folder) as llm:
            inside = asyncio.create_task(read(llm, "inside", prompt(1), GREEDY))
            while not llm.num_unfinished:
                await asyncio.sleep(0)
            leaving = asyncio.create_task(llm.shutdown(patience))
            await asyncio.sleep(0)
            with pytest.raises(QueueOverflowError, match="shutting down"):
                await read(llm, "late", prompt(1), GREEDY)
            await leaving
            return (await inside)[2]

    assert asyncio.run(run()) == {0: "length" if patience else "abort"}


# --- An engine that dies ----------------------------------------------------------------------------------------------


def test_a_dead_engine_fails_everybody_at_once(tiny, folder, monkeypatch, capsys):
    """A defect in the model: whoever waits gets the error now, whoever comes later as well."""

    async def run():
        async with running(folder) as llm:
            before = await read(llm, "before", prompt(1), GREEDY)
            monkeypatch.setattr(EngineCore, "execute_model", lambda *args: 1 / 0)
            tasks = [asyncio.create_task(read(llm, str(i), prompt(i + 1), GREEDY, i % 2)) for i in range(6)]
            found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
            assert all(isinstance(error, EngineDeadError) for error in found) and "ZeroDivisionError" in str(found[0])
            await asyncio.wait_for(llm.died.wait(), 1)
            for attempt in (lambda: read(llm, "late", prompt(1), GREEDY), lambda: llm.call_utility("check_idle")):
                with pytest.raises(EngineDeadError):
                    await attempt()
            assert not llm.front.sequences
            return before

    assert asyncio.run(run())[2] == {0: "length"}
    assert "ZeroDivisionError" in capsys.readouterr().err, "the reason is in the log"


@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_of_the_front_end_is_not_silent(tiny, folder, monkeypatch, capsys, stream):
    """Whoever reads what the engine says fails: nobody waits for ever, and the reason is in the log."""

    async def run():
        async with running(folder) as llm:
            monkeypatch.setattr(llm.front, "process_outputs", lambda *args: {}["a defect"])
            tasks = [asyncio.create_task(read(llm, str(i), prompt(i + 1), GREEDY, stream)) for i in range(3)]
            found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
            for error in found:
                assert isinstance(error, EngineDeadError) and "output handler" in str(error)
            assert llm.died.is_set()
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(llm.call_utility("check_idle"), 5)

    asyncio.run(run())
    assert "KeyError: 'a defect'" in capsys.readouterr().err


def test_the_last_letter_arrives_although_somebody_still_writes():
    """A failed write would close our end, and drop what had been read: the engine listens until we hang up."""

    async def run():
        client = MPClient.__new__(MPClient)
        client.writer, (client.sock, theirs) = None, socket.socketpair()
        mailbox, go = Mailbox(theirs), threading.Event()

        def engine():
            mailbox.send("ready")
            go.wait()
            mailbox.send(Dead("why"))
            hang_up([theirs])
            theirs.close()

        thread = threading.Thread(target=engine, daemon=True)
        thread.start()
        assert await client.receive() == "ready"
        go.set()
        thread.join(0.1)  # the event loop is busy with something else while the engine dies
        client.send("one more request")
        assert await asyncio.wait_for(client.receive(), 2) == Dead("why")
        client.close()
        thread.join(2)
        assert not thread.is_alive(), "it ends as soon as we have hung up"

    asyncio.run(run())


def test_hanging_up_has_an_end():
    """A front end that never hangs up does not keep an engine alive."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start = time.perf_counter()
        hang_up([theirs], patience=0.1)
        assert 0.09 < time.perf_counter() - start < 2 and ours.recv(1) == b""


@pytest.mark.parametrize("used", [False, True])
def test_an_engine_that_nobody_has_any_more_ends(tiny, folder, used):
    """As vLLM's `__del__` does it: the task that reads its letters does not keep it."""

    async def run():
        llm = await AsyncLLM.start(factory, None, folder, "thread")
        if used:
            await read(llm, "x", prompt(1, 2, 3), GREEDY)
        thread, reader = llm.client.thread, llm.output_handler
        del llm
        await asyncio.wait([reader], timeout=5)
        await asyncio.to_thread(thread.join, 5)
        return reader.done() and not thread.is_alive()

    assert asyncio.run(run())


def test_a_process_that_nobody_has_any_more_is_waited_for(monkeypatch):
    class Process(threading.Thread):
        def __init__(self, target, args, name):
            super().__init__(target=target, args=(args[0].dup(),), daemon=True)

        def kill(self):
            assert not self.is_alive()

    monkeypatch.setattr(clients, "run_engine_core", lambda sock: sock.recv(1))  # until we hang up
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: SimpleNamespace(Process=Process))
    client = MPClient(factory, None)
    process = client.process
    assert process.is_alive()
    del client
    assert not process.is_alive()


def test_a_reply_that_will_never_come_is_an_error(tiny, folder):
    async def run():
        async with running(folder, "event-loop") as llm:
            future = asyncio.create_task(llm.call_utility("check_idle"))
            await asyncio.sleep(0)
            llm._fail(EngineDeadError("gone"))
            with pytest.raises(EngineDeadError):
                await future

    asyncio.run(run())


def test_who_calls_the_engine_during_or_after_a_shutdown_does_not_wait(tiny, folder):
    async def run():
        async with running(folder, "event-loop") as llm:
            during = asyncio.create_task(llm.call_utility("check_idle"))
            await asyncio.sleep(0)
            await llm.shutdown()
            for call in (during, llm.call_utility("check_idle")):
                with pytest.raises(EngineDeadError, match="shut down"):
                    async with asyncio.timeout(5):
                        await call

    asyncio.run(run())


@pytest.mark.parametrize("place", ["thread"])
def test_start_up_errors_reach_the_caller(monkeypatch, folder, place):
    heard = []

    def refuse(args, report):
        report("one")
        raise common.InputError("block_size 0: no") if args else ValueError("broken")

    monkeypatch.setattr(lesson, "make_small_engine", refuse)
    for args, error, text in ((1, common.InputError, "block_size"), (0, EngineDeadError, "broken")):
        with pytest.raises(error, match=text):
            asyncio.run(AsyncLLM.start(factory, args, folder, place, heard.append))
    assert heard == ["one", "one"]


def test_an_unknown_utility_and_a_failing_one(tiny, folder, monkeypatch):
    async def run():
        async with running(folder) as llm:
            assert "no utility" in await llm.call_utility("shutdown")
            monkeypatch.setattr(EngineCoreProc, "check_idle", lambda self: 1 / 0)
            with pytest.raises(RuntimeError, match="ZeroDivision"):
                await llm.call_utility("check_idle")
            monkeypatch.undo()
            return await read(llm, "x", prompt(1), GREEDY)

    assert asyncio.run(run())[2] == {0: "length"}


# --- Letters ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=12), st.integers(1, 50))
@settings(max_examples=40)
def test_letters_arrive_whole_however_the_socket_cuts_them(bodies, size):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mailbox, raw, got = Mailbox(theirs), b"".join(map(frame, bodies)), []
        for start in range(0, len(raw), size):
            ours.sendall(raw[start : start + size])
            got += mailbox.receive(0)
        assert got == bodies and not mailbox.buffer
        ours.close()
        with pytest.raises(ClientGone):
            mailbox.receive(None)
        with pytest.raises(ClientGone):
            for _ in range(1000):
                mailbox.send(b"x" * 10_000)


def test_receive_waits_only_if_it_is_asked_to():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mailbox = Mailbox(theirs)
        assert mailbox.receive(0) == []
        threading.Timer(0.05, lambda: ours.sendall(frame("late"))).start()
        start = time.perf_counter()
        assert mailbox.receive(None) == ["late"] and time.perf_counter() - start > 0.04


@pytest.mark.parametrize("kind", ["socket", "queue"])
def test_receive_waits_no_longer_than_it_is_asked_to(kind):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = SimpleNamespace(inbox=queue.SimpleQueue())
        receive = Mailbox(theirs).receive if kind == "socket" else partial(ThreadClient._receive, thread)
        start = time.perf_counter()
        assert receive(0.05) == [] and time.perf_counter() - start > 0.04
        for letter in ("a", "b"):
            ours.sendall(frame(letter))
            thread.inbox.put(letter)
        start = time.perf_counter()
        assert receive(20) == ["a", "b"] and time.perf_counter() - start < 10


def test_the_event_loop_asks_again_too():
    """An engine that others want something of, while its client wants nothing."""
    asked, client = [], object.__new__(InprocClient)

    def has_unfinished_requests():
        asked.append(time.perf_counter())
        return len(asked) > 2

    client.outbox, client.mail = collections.deque(), asyncio.Event()
    scheduler = SimpleNamespace(has_unfinished_requests=has_unfinished_requests)
    client.proc = SimpleNamespace(scheduler=scheduler, patience=0.02, settle=lambda: None,
                                  step=lambda: client.outbox.append("a letter"))  # fmt: skip
    assert asyncio.run(asyncio.wait_for(client.receive(), 10)) == "a letter"
    assert len(asked) == 3 and asked[2] - asked[0] > 0.03


def test_an_engine_waits_for_a_front_end_that_does_not_read():
    """Back-pressure: the socket's buffers fill, then `send` blocks until somebody reads."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mailbox, sent = Mailbox(theirs), []

        def engine():
            for i in range(64):
                mailbox.send(bytes(100_000))
                sent.append(i)

        thread = threading.Thread(target=engine, daemon=True)
        thread.start()
        time.sleep(0.1)
        stuck = len(sent)
        assert stuck < 64
        reader, got = Mailbox(ours), 0
        while got < 64:
            got += len(reader.receive(None))
        thread.join(5)
        assert len(sent) == 64 and got == 64


def test_the_thread_has_room_for_a_bounded_number_of_letters(monkeypatch):
    """The same for the engine on a thread, whose letters pass no socket."""

    async def run():
        posted = []
        client = ThreadClient.__new__(ThreadClient)
        client.outbox, client.room, client.loop = asyncio.Queue(), threading.Semaphore(4), asyncio.get_running_loop()
        thread = threading.Thread(target=lambda: [(client._post(i), posted.append(i)) for i in range(10)], daemon=True)
        thread.start()
        await asyncio.sleep(0.05)
        assert len(posted) == 4
        assert [await client.receive() for _ in range(10)] == list(range(10))
        thread.join(5)

    asyncio.run(run())


def test_the_thread_ends_before_python_does(tiny, folder, monkeypatch):
    """Whoever leaves without `shutdown`: Python aborts on a thread that is still inside of torch."""
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)

    async def leave():
        llm = await AsyncLLM.start(factory, None, folder, "thread")
        llm.add_request("r", [3, 5], SamplingParams(max_tokens=100, ignore_eos=True))
        return llm.client

    client = asyncio.run(leave())
    (end,) = at_exit
    end()
    assert not client.thread.is_alive() and not at_exit


def test_requests_and_outputs_survive_the_journey():
    params = SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0}, structured_outputs={"regex": "a"})
    request = Request("r", [1, 2, 3], params, priority=2, cache_salt="s", eos_token_id=7)
    copy = pickle.loads(frame((Kind.ADD, request))[4:])[1]
    assert vars(copy) == vars(request) and copy is not request


# --- Collectors -------------------------------------------------------------------------------------------------------


def piece(index, text, tokens, finished=False, logprobs=None):
    answer = CompletionOutput(index, text, tokens, logprobs=logprobs, finish_reason="stop" if finished else None)
    return RequestOutput("r", None, [], [answer], finished)


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2), st.text(max_size=3))), max_size=30))
def test_a_collector_loses_nothing_and_holds_one_item(events):
    """None is a read. Whatever the order: the texts of each answer concatenate, and never more than one item waits."""
    collector, want, got = RequestOutputCollector("r"), {}, {}

    def take():
        if output := collector.get_nowait():
            indices = [answer.index for answer in output.outputs]
            assert len(indices) == len(set(indices)), "one piece per answer"
            for answer in output.outputs:
                text, ids, logprobs = got.get(answer.index, ("", [], []))
                got[answer.index] = text + answer.text, ids + answer.token_ids, logprobs + answer.logprobs

    for n, item in enumerate(events):
        if item is None:
            take()
        else:
            index, text = item
            collector.put(piece(index, text, [n], logprobs=[{n: 0}]))
            old = want.get(index, ("", [], []))
            want[index] = old[0] + text, [*old[1], n], [*old[2], {n: 0}]
    take()
    assert got == want and collector.get_nowait() is None


def test_what_comes_with_the_last_token_is_in_what_waits():
    collector, last = RequestOutputCollector("r"), piece(0, "b", [2], True)
    last.kv_transfer_params, last.num_cached_tokens = {"remote_port": 7}, 16
    collector.put(piece(0, "a", [1]))
    collector.put(last)
    heard = collector.get_nowait()
    assert (heard.finished, heard.kv_transfer_params, heard.num_cached_tokens) == (True, {"remote_port": 7}, 16)


def test_an_exception_overtakes_what_waits():
    async def run():
        collector = RequestOutputCollector("r")
        waiting = asyncio.create_task(collector.get())
        await asyncio.sleep(0)
        collector.put(piece(0, "a", [1]))
        assert (await waiting).outputs[0].text == "a"
        collector.put(piece(0, "b", [2]))
        collector.put(EngineDeadError("dead"))
        collector.put(piece(0, "c", [3]))
        with pytest.raises(EngineDeadError):
            await collector.get()

    asyncio.run(run())


@pytest.mark.parametrize(("bound", "inside", "n", "full"), [(None, 10**6, 9, False), (4, 3, 1, False), (4, 4, 1, True),
                                                            (4, 0, 4, False), (4, 2, 3, True)])  # fmt: skip
def test_admission(bound, inside, n, full):
    admission = AdmissionControl(bound)
    with pytest.raises(QueueOverflowError) if full else contextlib.nullcontext():
        admission.check(inside, n)
    assert admission.num_rejected == (n if full else 0)


# --- Any order of events ----------------------------------------------------------------------------------------------


class Zeros(EngineCore):
    """No model: everybody's next token is 0."""

    def execute_model(self, output):
        return ModelRunnerOutput({request_id: [0] for request_id in output.num_scheduled_tokens})


class Life(RuleBasedStateMachine):
    """Requests come, leave, stop and finish in any order, letters are delayed, names are used again at once: both sides
    end up with nothing."""

    def __init__(self):
        super().__init__()
        config = SchedulerConfig(max_model_len=32, max_num_seqs=3, max_num_batched_tokens=16)
        self.core = Zeros(make_scheduler(config, 13, 4))  # tight: preemptions happen
        self.core.runner = None
        self.from_core, self.to_core = [], []
        self.proc = EngineCoreProc(SimpleNamespace(core=self.core, lora=None), self.from_core.append)
        self.proc.read_mail = self.deliver_to_core
        real = folders.model_folder(None)
        self.front = TOKENIZER[0](real, self.to_core.append)

    def deliver_to_core(self):
        letters, self.to_core[:] = list(self.to_core), []
        self.proc.handle(letters)

    @rule(length=st.integers(1, 20), n=st.integers(1, 3), max_tokens=st.integers(1, 14), stop=st.booleans())
    def add(self, length, n, max_tokens, stop):
        name = next(name for name in map(str, range(1000)) if name not in self.front.callers)
        params = SamplingParams(
            temperature=1, n=1, max_tokens=max_tokens, ignore_eos=True, stop=["!!"] if stop else None
        )
        self.front.add_request(name, prompt(*range(1, length + 1)), params, stream=bool(n % 2))

    @precondition(lambda self: self.front.callers)
    @rule(which=st.integers(0, 99))
    def leave(self, which):
        names = list(self.front.callers)
        self.front.abort_request([names[which % len(names)], "unknown"])

    @rule()
    def step(self):
        self.deliver_to_core()
        if self.core.scheduler.has_unfinished_requests():
            self.proc.step()

    @rule()
    def read(self):
        letters, self.from_core[:] = list(self.from_core), []
        for letter in letters:
            assert not letter.refused
            for output in self.front.process_outputs(letter, letter.outputs):
                assert output.request_id not in self.front.callers or not output.finished

    @invariant()
    def sound(self):
        self.core.scheduler.kv_cache_manager.block_pool.check()
        assert {s.caller.request_id for s in self.front.sequences.values()} == set(self.front.callers)
        known = set(self.front.sequences)
        assert set(self.core.scheduler.requests) <= known | {name for kind, what in self.to_core if kind is Kind.ABORT
                                                             for name in what}  # fmt: skip
        assert set(self.proc.arrived) <= set(self.core.scheduler.requests)

    def teardown(self):
        for _ in range(400):
            self.step()
            self.read()
            if not self.front.callers:
                break
        self.step()
        assert not self.front.callers and not self.front.sequences
        assert self.proc.check_idle() == {"unfinished": 0, "tables": 0, "owned_blocks": 0}


TOKENIZER = [lambda folder, send: None]


def test_any_order_of_events(real_model, tiny):
    model, tokenizer = real_model
    TOKENIZER[0] = lambda folder, send: FrontEnd(model.config, tokenizer, send, 32)
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Life, settings=settings(max_examples=20, stateful_step_count=30))


def test_an_abort_that_crosses_the_step_wins(tiny):
    """The letter comes while the model runs: the token of that step is for nobody, and its blocks are free."""
    engine, sent = tiny(), []
    proc = EngineCoreProc(engine, sent.append)
    proc.handle([(Kind.ADD, Request("gone", [1, 2], GREEDY)), (Kind.ADD, Request("stays", [1, 2], GREEDY))])
    proc.read_mail = lambda: proc.handle([(Kind.ABORT, ["gone"])])
    proc.step()
    assert [output.request_id for output in sent[-1].outputs] == ["stays"]
    assert sent[-1].scheduler_stats.num_running_reqs == 1 and list(engine.core.scheduler.requests) == ["stays"]


@pytest.mark.parametrize("late", [False, True])
def test_a_namesake_hears_nothing_of_whoever_left(real_model, tiny, late):
    """A caller may use a name again at once. The step that computes for its first owner is not over, or its letter is
    on the way: neither brings the second one a token."""
    model, tokenizer = real_model

    def story(leave):
        to_core, from_core, heard = [], [], {}
        proc = EngineCoreProc(tiny(), from_core.append)
        front = FrontEnd(model.config, tokenizer, to_core.append, 32)

        def read_mail():
            proc.handle(to_core), to_core.clear()

        def change_hands():
            front.abort_request(["x"])
            front.add_request("x", prompt(7), GREEDY)

        if leave:
            front.add_request("x", prompt(1, 2), GREEDY)
            read_mail()
            proc.read_mail = lambda: None if late else (change_hands(), read_mail())
            proc.step()
            if late:
                change_hands()
            proc.read_mail = lambda: None
        else:
            front.add_request("x", prompt(7), GREEDY)
        while front.callers:
            for letter in from_core:
                for output in front.process_outputs(letter, letter.outputs):
                    heard[output.request_id] = (output.prompt_token_ids, output.outputs[0].token_ids)
            from_core.clear(), read_mail()
            if proc.scheduler.has_unfinished_requests():
                proc.step()
        return heard

    assert story(leave=True) == story(leave=False)


def test_the_busy_loop_says_so_when_an_abort_empties_it(tiny):
    sent, mail = [], [[(Kind.ADD, Request("r", [1, 2], GREEDY))], [], [(Kind.ABORT, ["r"])], []]

    def receive(seconds):
        if not mail:
            raise ClientGone
        assert seconds == 0 or mail
        return mail.pop(0)

    with pytest.raises(ClientGone):
        EngineCoreProc(tiny(), sent.append).run_busy_loop(receive)
    assert sent[0].scheduler_stats.kv_cache_usage > 0
    assert sent[-1].scheduler_stats.num_running_reqs == 0 and sent[-1].scheduler_stats.kv_cache_usage == 0


def test_queue_time_and_cached_tokens_travel_with_the_admission(tiny):
    sent = []
    proc = EngineCoreProc(tiny(), sent.append)
    proc.handle([(Kind.ADD, Request("r", [1, 2], GREEDY))])
    time.sleep(0.02)
    proc.step()
    queued, cached, _ = sent[-1].admitted["r"]
    assert 0.02 <= queued < 1 and cached == 0 and not proc.arrived
    proc.step()
    assert sent[-1].admitted == {}


# --- The widget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handoff", list(lesson.HANDOFFS))
@pytest.mark.parametrize("step", page.WIDGET_CHOICES["step_ms"])
@pytest.mark.parametrize("read_ms", page.WIDGET_CHOICES["read_ms"])
def test_a_slow_reader(handoff, step, read_ms):
    trace = page.simulate({"handoff": handoff, "step_ms": step, "read_ms": read_ms, "tokens": 32})
    assert sum(read["tokens"] for read in trace["reads"]) == 32 == len(trace["put_at"])
    assert trace["reads"][-1]["left"] == 0
    at = [read["at"] for read in trace["reads"]]
    assert all(b - a >= read_ms for a, b in itertools.pairwise(at))
    if handoff == "collector":
        assert trace["most_items"] == 1 and trace["engine_waited"] == 0 and trace["oldest"] <= read_ms
    elif handoff == "queue":
        assert trace["engine_waited"] == 0 and len(at) == 32
    else:
        assert trace["most_items"] <= lesson.BOUND and trace["engine_done"] >= 27 * read_ms


def test_the_widget_uses_the_real_collector(monkeypatch):
    before = page.simulate(page.WIDGET_DEFAULT)
    monkeypatch.setattr(collector, "merge_outputs", lambda old, new: None)
    with pytest.raises(AttributeError):
        page.simulate(page.WIDGET_DEFAULT)
    monkeypatch.undo()
    assert page.simulate(page.WIDGET_DEFAULT) == before


def test_tasks_and_threads_hand_over_everything():
    for wake in (lesson.wake_threads, lesson.wake_tasks):
        created, seconds = wake(8, 2)
        assert created > 0 and seconds > 0


def test_a_model_with_a_short_context_is_named(tmp_path):
    """Nobody has set a max_model_len."""
    folder = on_gpu.random_folder(tmp_path / "model", hidden_size=48, intermediate_size=64, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=1, head_dim=24,
                                  max_position_embeddings=256)  # fmt: skip
    with pytest.raises(common.InputError) as refused:
        lesson.main(["--model", str(folder)])
    assert str(refused.value) == "--model: a context of 256 tokens is too short; this story takes 512"


@pytest.mark.slow
def test_a_killed_process_and_every_place_on_the_real_model(folder):
    """The fast twins: test_06_serving kills a real engine process; the places are compared on the tiny model above."""
    args = lesson.build_parser().parse_args([])
    prompts = [[504, 3575, 282, 4649, 314]] * 3
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = [asyncio.run(lesson.measure_place(place, args, prompts, params, 1))["texts"] for place in CLIENTS]
    assert found[0] == found[1] == found[2]
    heard, seconds = asyncio.run(lesson.kill_the_engine(args, prompts))
    assert heard == 3 and scripts.within(seconds, 2)

    async def drop():
        llm = await AsyncLLM.start(lesson.make_small_engine, {"model": args.model, "seed": 0}, folder)
        return llm.client.process

    process = asyncio.run(drop())
    process.join(10)
    assert process.exitcode == 0, "an engine that nobody has any more ends"


LEAVE = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
import common
from engine import registry
from engine.model import folders
from engine.request import SamplingParams
from engine.serving.async_llm import AsyncLLM
lesson = registry.lesson("06e_async_engine")
async def leave():
    engine, args = lesson.make_small_engine, {"model": None, "seed": 0}
    llm = await AsyncLLM.start(engine, args, folders.model_folder(None), sys.argv[2])
    llm.add_request("r", "Hello", SamplingParams(max_tokens=200, ignore_eos=True))
    await asyncio.sleep(0.3)
    sys.exit(3)
asyncio.run(leave())
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", CLIENTS)
def test_leaving_in_the_middle_of_an_answer(place):
    done = subprocess.run([sys.executable, "-c", LEAVE, str(common.HERE), place], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")


def test_of_pieces_put_together_the_last_says_how_it_ended():
    collector, last = RequestOutputCollector("r"), piece(0, "b", [2], True, [{2: 0}])
    last.outputs[0].cumulative_logprob, last.outputs[0].stop_reason = -3.0, "b"
    collector.put(piece(0, "a", [1], logprobs=[{1: 0}]))
    collector.put(last)
    (answer,) = collector.get_nowait().outputs
    assert (answer.cumulative_logprob, answer.finish_reason, answer.stop_reason) == (-3.0, "stop", "b")


def test_an_engine_on_a_thread_ends_although_nobody_has_read_its_letters(tiny, monkeypatch):
    monkeypatch.setattr(ThreadClient, "ROOM", 2)

    async def run():
        client = ThreadClient(factory, None)
        client.send((Kind.ADD, Request("r", [1, 2], GREEDY)))
        while client.outbox.qsize() < 2 or not client.inbox.empty():  # the letters of the start fill the room
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the engine waits in its first step, with a third letter in its hand
        client.close()
        await asyncio.to_thread(client.join, 2)
        return client.thread.is_alive()

    assert not asyncio.run(run())


def test_an_engine_whose_front_end_cannot_start_is_ended(tiny, folder, monkeypatch):
    def refuse(folder):
        raise common.InputError("no tokenizer")

    tokenizing.building(monkeypatch, refuse)
    before = set(threading.enumerate())
    with pytest.raises(common.InputError, match="no tokenizer"):
        asyncio.run(AsyncLLM.start(factory, None, folder, "thread"))
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "EngineCore"]


def test_who_is_aborted_is_counted_and_not_measured(tiny, folder):
    """Neither the time of one who was cut off nor that of one who never had a seat says anything about the server."""
    logger = metrics.PrometheusStatLogger("m")

    async def run():
        async with running(folder, "event-loop", stat_logger=logger) as llm:
            for i in range(9):  # one more than there are seats
                llm.add_request(str(i), prompt(3), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
            while not any(times.tokens > 2 for times in logger.times.values()):
                await asyncio.sleep(0)
            llm.abort(map(str, range(9)))

    asyncio.run(run())
    said = dict(line.rsplit(" ", 1) for line in logger.expose().decode().splitlines() if not line.startswith("#"))
    ended = {float(n) for name, n in said.items() if "request_success_total{" in name and '"abort"' in name}
    measured = {float(n) for name, n in said.items() if "e2e_request_latency_seconds_count" in name}
    assert (ended, measured, logger.times) == ({9.0}, {0.0}, {})

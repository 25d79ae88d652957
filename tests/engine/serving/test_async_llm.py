"""Every client reads what a blocking loop writes, and nobody can wedge the engine."""

from __future__ import annotations

import common

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
import threading

import pytest

from engine.core.engine_core import EngineCore
from engine.core.scheduler import Scheduler
from engine.errors import EngineDeadError, QueueOverflowError
from engine.llm import LLM
from engine.llm_engine import LLMEngine
from engine.output import EngineCoreOutput
from engine.request import SamplingParams
from engine.sampling.sampler import Logprob
from engine.serving import metrics
from engine.serving.async_llm import AsyncLLM
from engine.serving.clients import CLIENTS
from engine.serving.collector import RequestOutputCollector
from engine.serving.core_proc import EngineCoreProc
from engine.serving.front_end import FrontEnd
from engine.serving.letters import EngineCoreOutputs
from support import tokenizing
from support.async_engines import GREEDY, answer_blocking, idle, in_this_process, read, running
from support.engines import ids

# --- Everybody reads what a blocking loop writes ----------------------------------------------------------------------


@in_this_process
@pytest.mark.parametrize("stream", [False, True])
def test_many_clients_read_what_one_would(tiny, folder, place, stream):
    prompts = [[3 + i, 5, 9 + i % 4] for i in range(24)]  # three times the seats
    reference = answer_blocking(tiny(), prompts, GREEDY)

    async def run():
        async with running(tiny, folder, place) as llm:
            found = await asyncio.gather(*(read(llm, str(i), ids(*p), GREEDY, stream) for i, p in enumerate(prompts)))
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
        engine.add_request(str(i), ids(*p), sampling)
    while engine.has_unfinished_requests():
        want |= {output.request_id: output.prompt_logprobs for output in engine.step()}
    assert [want[str(i)] is None for i in range(6)] == [True, False] * 3

    async def run():
        async with running(tiny, folder, place) as llm:
            some = (read(llm, str(i), ids(*p), params[i], stream) for i, p in enumerate(prompts))
            return await asyncio.gather(*some)

    for i, (_, pieces, _) in enumerate(asyncio.run(run())):
        told = [output.prompt_logprobs for output in pieces if output.prompt_logprobs is not None]
        assert told == ([] if want[str(i)] is None else [want[str(i)]])


def test_scores_of_a_step_that_gave_nobody_a_token_are_not_lost(tiny_model, real_model):
    """As in a pipeline: who was preempted meanwhile computes that token again, but not its scores."""
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.front = FrontEnd(tiny_model.config, real_model[1], lambda letter: None, 64)
    llm.stat_logger, llm.collectors = None, {"a": RequestOutputCollector("a")}
    llm.front.add_request("a", ids(1, 2), dataclasses.replace(GREEDY, prompt_logprobs=0), stream=True)
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
        async with running(tiny, folder) as llm:
            return await asyncio.gather(*(read(llm, str(i), ids(i + 1), GREEDY) for i in range(8)))

    found = asyncio.run(run())
    assert [texts[0] for texts, *_ in found] == answer_blocking(tiny(), [[i + 1] for i in range(8)], GREEDY)
    assert max(seen) == 3 and sum(seen) == 8 * GREEDY.max_tokens


def test_sampled_answers_do_not_depend_on_where_the_engine_is(tiny, folder):
    params = SamplingParams(temperature=1.3, seed=5, n=3, max_tokens=6, ignore_eos=True, logprobs=2)
    engine = tiny()
    engine.add_request("x", ids(7, 8, 9), params)
    while not (outputs := engine.step()):
        pass
    want = [(answer.token_ids, answer.text, list(map(list, answer.logprobs))) for answer in outputs[0].outputs]

    async def run(place):
        async with running(tiny, folder, place) as llm:
            _, (final,), _ = await read(llm, "x", ids(7, 8, 9), params)
            _, pieces, _ = await read(llm, "y", ids(7, 8, 9), params, stream=True)
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
        async with running(tiny, folder) as llm:
            texts, _, _ = await read(
                llm, "all", ids(3, 4), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            )
            stop = texts[0][5:7]
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop])
            cut, pieces, reasons = await read(llm, "cut", ids(3, 4), params, stream=True)
            assert cut[0] == texts[0][: texts[0].index(stop)] and reasons[0] == "stop"
            assert pieces[-1].outputs[-1].stop_reason == stop
            await idle(llm)

    asyncio.run(run())


@in_this_process
def test_whoever_leaves_early_is_forgotten_at_once(tiny, folder, place):
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    async def run():
        async with running(tiny, folder, place) as llm:
            async with contextlib.aclosing(llm.generate("left", ids(3), long, stream=True)) as outputs:
                async for _ in outputs:
                    break
            await idle(llm)
            task = asyncio.create_task(read(llm, "cancelled", ids(4), long))
            stays = asyncio.create_task(read(llm, "stays", ids(5), GREEDY))
            await asyncio.sleep(0.005)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert "cancelled" not in llm.front.callers
            texts, *_ = await stays
            await idle(llm)
            return texts[0]

    assert asyncio.run(run()) == answer_blocking(tiny(), [[5]], GREEDY)[0]


@in_this_process
def test_a_late_goodbye_does_not_end_a_namesake(tiny, folder, place):
    """Whoever has read the last piece is done; its generator is closed later, when somebody else may have the name."""

    async def run():
        async with running(tiny, folder, place) as llm:
            first = llm.generate("x", ids(3), GREEDY)
            assert (await anext(first)).finished
            second = asyncio.create_task(read(llm, "x", ids(3), GREEDY))
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
        async with running(tiny, folder, "event-loop") as llm:
            long = SamplingParams(n=2, seed=0, max_tokens=120, ignore_eos=True)
            reader = asyncio.create_task(read(llm, "x", ids(3), long, stream))
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
        async with running(tiny, folder, "event-loop", stat_logger=logger) as llm:
            llm.add_request("x", ids(3), SamplingParams(n=2, seed=0, max_tokens=120, ignore_eos=True))
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
        async with running(tiny, folder, max_num_queued_reqs=3) as llm:
            for wrong in (
                ids(),
                ids(*range(128)),
                ids(*range(200)),
                ids(-1),
                ids(10**9),
                ids("a"),
                5,
            ):
                with pytest.raises(common.InputError):
                    await read(llm, "wrong", wrong, GREEDY)
            first = llm.add_request("a", ids(1), GREEDY)
            with pytest.raises(common.InputError, match="in use"):
                llm.add_request("a", ids(1), GREEDY)
            with pytest.raises(QueueOverflowError, match="max_num_queued_reqs 3"):
                llm.add_request("b", ids(1), SamplingParams(n=3))
            second = llm.add_request("b", ids(1), SamplingParams(n=2, max_tokens=4))
            assert llm.num_unfinished == 3 and llm.admission.num_rejected == 3
            async for _ in llm.outputs(first):
                pass
            async for output in llm.outputs(second):
                assert len(output.outputs) == 2
            await idle(llm)
            assert (await read(llm, "a", ids(1), GREEDY))[0][0], "the id is free again"

    asyncio.run(run())


def test_what_only_the_core_can_refuse_is_refused_too(tiny, folder, monkeypatch):
    monkeypatch.setattr(EngineCore, "check_request", refuse_long)

    async def run():
        async with running(tiny, folder) as llm:
            with pytest.raises(common.InputError, match="prompt: too long for me"):
                await asyncio.wait_for(read(llm, "a", ids(1, 2, 3), SamplingParams(n=2)), 5)
            assert (await read(llm, "b", ids(1), GREEDY))[2] == {0: "length"}
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
        async with running(tiny, folder) as llm:
            other = asyncio.create_task(read(llm, "other", ids(1), dataclasses.replace(GREEDY, max_tokens=90)))
            (output,) = (await asyncio.wait_for(read(llm, "a", ids(1, 2, 3), GREEDY), 5))[1]
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

    tokenizing.building(monkeypatch, lambda folder: real_model[1])
    prompts, cached = [ids(*range(i, i + 17)) for i in range(4)], {}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def run():
        async with running(make, folder, place) as llm:
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
        async with running(tiny, folder, "event-loop") as llm:
            streamed = asyncio.create_task(read(llm, "s", ids(3), long, stream=True))
            whole = asyncio.create_task(read(llm, "w", ids(3), long))
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
    full = answer_blocking(tiny(), [[3]], long)[0]
    assert full.startswith(streamed) and full.startswith(whole) and len(whole) < len(full)


def test_shutdown_waits_for_those_inside(tiny, folder):
    async def run():
        llm = await AsyncLLM.start(tiny, None, folder, "thread")
        task = asyncio.create_task(read(llm, "x", ids(3), GREEDY))
        await asyncio.sleep(0)
        await llm.shutdown(timeout=20)
        return (await task)[2]

    assert asyncio.run(run()) == {0: "length"}


# --- An end that somebody wanted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", [0, 5])
def test_who_comes_during_the_shutdown_is_refused(tiny, folder, patience):
    """Whoever is inside may finish, or gets what there is; a new request would be cut off, so it is told to go away."""

    async def run():
        async with running(tiny, folder) as llm:
            inside = asyncio.create_task(read(llm, "inside", ids(1), GREEDY))
            while not llm.num_unfinished:
                await asyncio.sleep(0)
            leaving = asyncio.create_task(llm.shutdown(patience))
            await asyncio.sleep(0)
            with pytest.raises(QueueOverflowError, match="shutting down"):
                await read(llm, "late", ids(1), GREEDY)
            await leaving
            return (await inside)[2]

    assert asyncio.run(run()) == {0: "length" if patience else "abort"}


# --- An engine that dies ----------------------------------------------------------------------------------------------


def test_a_dead_engine_fails_everybody_at_once(tiny, folder, monkeypatch, capsys):
    """A defect in the model: whoever waits gets the error now, whoever comes later as well."""

    async def run():
        async with running(tiny, folder) as llm:
            before = await read(llm, "before", ids(1), GREEDY)
            monkeypatch.setattr(EngineCore, "execute_model", lambda *args: 1 / 0)
            tasks = [asyncio.create_task(read(llm, str(i), ids(i + 1), GREEDY, i % 2)) for i in range(6)]
            found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
            assert all(isinstance(error, EngineDeadError) for error in found) and "ZeroDivisionError" in str(found[0])
            await asyncio.wait_for(llm.died.wait(), 1)
            for attempt in (lambda: read(llm, "late", ids(1), GREEDY), lambda: llm.call_utility("check_idle")):
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
        async with running(tiny, folder) as llm:
            monkeypatch.setattr(llm.front, "process_outputs", lambda *args: {}["a defect"])
            tasks = [asyncio.create_task(read(llm, str(i), ids(i + 1), GREEDY, stream)) for i in range(3)]
            found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
            for error in found:
                assert isinstance(error, EngineDeadError) and "output handler" in str(error)
            assert llm.died.is_set()
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(llm.call_utility("check_idle"), 5)

    asyncio.run(run())
    assert "KeyError: 'a defect'" in capsys.readouterr().err


@pytest.mark.parametrize("used", [False, True])
def test_an_engine_that_nobody_has_any_more_ends(tiny, folder, used):
    """As vLLM's `__del__` does it: the task that reads its letters does not keep it."""

    async def run():
        llm = await AsyncLLM.start(tiny, None, folder, "thread")
        if used:
            await read(llm, "x", ids(1, 2, 3), GREEDY)
        thread, reader = llm.client.thread, llm.output_handler
        del llm
        await asyncio.wait([reader], timeout=5)
        await asyncio.to_thread(thread.join, 5)
        return reader.done() and not thread.is_alive()

    assert asyncio.run(run())


def test_a_reply_that_will_never_come_is_an_error(tiny, folder):
    async def run():
        async with running(tiny, folder, "event-loop") as llm:
            future = asyncio.create_task(llm.call_utility("check_idle"))
            await asyncio.sleep(0)
            llm._fail(EngineDeadError("gone"))
            with pytest.raises(EngineDeadError):
                await future

    asyncio.run(run())


def test_who_calls_the_engine_during_or_after_a_shutdown_does_not_wait(tiny, folder):
    async def run():
        async with running(tiny, folder, "event-loop") as llm:
            during = asyncio.create_task(llm.call_utility("check_idle"))
            await asyncio.sleep(0)
            await llm.shutdown()
            for call in (during, llm.call_utility("check_idle")):
                with pytest.raises(EngineDeadError, match="shut down"):
                    async with asyncio.timeout(5):
                        await call

    asyncio.run(run())


@pytest.mark.parametrize("place", ["thread"])
def test_start_up_errors_reach_the_caller(folder, place):
    heard = []

    def refuse(args, report):
        report("one")
        raise common.InputError("block_size 0: no") if args else ValueError("broken")

    for args, error, text in ((1, common.InputError, "block_size"), (0, EngineDeadError, "broken")):
        with pytest.raises(error, match=text):
            asyncio.run(AsyncLLM.start(refuse, args, folder, place, heard.append))
    assert heard == ["one", "one"]


def test_an_unknown_utility_and_a_failing_one(tiny, folder, monkeypatch):
    async def run():
        async with running(tiny, folder) as llm:
            assert "no utility" in await llm.call_utility("shutdown")
            monkeypatch.setattr(EngineCoreProc, "check_idle", lambda self: 1 / 0)
            with pytest.raises(RuntimeError, match="ZeroDivision"):
                await llm.call_utility("check_idle")
            monkeypatch.undo()
            return await read(llm, "x", ids(1), GREEDY)

    assert asyncio.run(run())[2] == {0: "length"}


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


def test_an_engine_whose_front_end_cannot_start_is_ended(tiny, folder, monkeypatch):
    def refuse(folder):
        raise common.InputError("no tokenizer")

    tokenizing.building(monkeypatch, refuse)
    before = set(threading.enumerate())
    with pytest.raises(common.InputError, match="no tokenizer"):
        asyncio.run(AsyncLLM.start(tiny, None, folder, "thread"))
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "EngineCore"]


def test_who_is_aborted_is_counted_and_not_measured(tiny, folder):
    """Neither the time of one who was cut off nor that of one who never had a seat says anything about the server."""
    logger = metrics.PrometheusStatLogger("m")

    async def run():
        async with running(tiny, folder, "event-loop", stat_logger=logger) as llm:
            for i in range(9):  # one more than there are seats
                llm.add_request(str(i), ids(3), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
            while not any(times.tokens > 2 for times in logger.times.values()):
                await asyncio.sleep(0)
            llm.abort(map(str, range(9)))

    asyncio.run(run())
    said = dict(line.rsplit(" ", 1) for line in logger.expose().decode().splitlines() if not line.startswith("#"))
    ended = {float(n) for name, n in said.items() if "request_success_total{" in name and '"abort"' in name}
    measured = {float(n) for name, n in said.items() if "e2e_request_latency_seconds_count" in name}
    assert (ended, measured, logger.times) == ({9.0}, {0.0}, {})

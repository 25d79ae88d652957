"""A server asleep: who is inside, who comes meanwhile, and what the memory is."""

from __future__ import annotations

import common

import asyncio
from pathlib import Path

import pytest

from engine.engine_args import EngineArgs
from engine.model import folders
from engine.request import SamplingParams
from engine.serving import metrics
from engine.serving.async_llm import AsyncLLM
from engine.serving.engine_group import start_client
from engine.serving.start import make_engine
from support.async_engines import idle, in_this_process, read, running
from support.process_tree import descendants
from support.sleepers import sleeping_engine
from support.tiers import and_slowly

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def factory(real_model):
    def make(args=None, report=lambda text: None):
        return sleeping_engine(real_model[1], **(args or {}))

    return make


async def first_token(llm, name, params=LONG):
    """(what is read of an answer, once it has begun)"""
    answer = llm.generate(name, [1, 2, 3], params, stream=True)
    piece = await anext(answer)
    return answer, piece.outputs[0].token_ids


async def rest(answer):
    ids, reason = [], None
    async for piece in answer:
        ids += piece.outputs[0].token_ids
        reason = piece.outputs[0].finish_reason
    return ids, reason


async def alone(llm):
    answer, ids = await first_token(llm, "alone")
    return ids + (await rest(answer))[0]


@in_this_process
@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_who_is_inside_ends_and_who_comes_waits(factory, folder, place, level):
    async def story():
        logger = metrics.PrometheusStatLogger("tiny")
        async with running(factory, folder, place, stat_logger=logger) as llm:
            want = await alone(llm)
            answer, ids = await first_token(llm, "inside")
            await llm.sleep(level)
            more, reason = await rest(answer)
            assert reason == "abort" and want[: len(ids + more)] == ids + more and len(ids + more) < 60
            assert await llm.call_utility("is_sleeping")
            waits = asyncio.create_task(alone(llm))
            leaves = asyncio.create_task(read(llm, "leaves", [5], SHORT))
            await asyncio.sleep(0.05)
            assert not waits.done() and not leaves.done()
            leaves.cancel()
            states = [logger.value("engine_sleep_state", sleep_state=x) for x in metrics.SLEEP_STATES]
            assert states == [0, level == 1, level == 2]
            assert await llm.wake_up() and await waits == want
            assert not await llm.call_utility("is_sleeping")
            assert logger.value("engine_sleep_state", sleep_state="awake") == 1
            await asyncio.sleep(0.01)
            await idle(llm)

    asyncio.run(story())


@in_this_process
def test_who_is_inside_may_finish_first(factory, folder, place):
    async def story():
        async with running(factory, folder, place) as llm:
            want = await alone(llm)
            answer, ids = await first_token(llm, "inside")
            sleeps = asyncio.create_task(llm.sleep(1, "wait"))
            await asyncio.sleep(0)
            late = asyncio.create_task(read(llm, "late", [5], SHORT))
            more, reason = await rest(answer)
            await sleeps
            assert (ids + more, reason) == (want, "length") and not late.done()
            assert await llm.wake_up()
            await late
            await idle(llm)

    asyncio.run(story())


@in_this_process
@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_who_is_inside_may_go_on_afterwards(factory, folder, place, level):
    """Its keys and values are computed again."""

    async def story():
        async with running(factory, folder, place) as llm:
            want = await alone(llm)
            answer, ids = await first_token(llm, "inside")
            await llm.sleep(level, "keep")
            assert await llm.wake_up()
            more, reason = await rest(answer)
            assert (ids + more, reason) == (want, "length")
            await idle(llm)

    asyncio.run(story())


def test_only_with_both_is_it_awake(factory, folder):
    async def story():
        async with running(factory, folder) as llm:
            want = await alone(llm)
            await llm.sleep(2)
            assert not await llm.wake_up(["weights"]) and await llm.call_utility("is_sleeping")
            with pytest.raises(common.InputError, match=r"tags 'all': must be one of scheduling, weights, kv_cache"):
                await llm.wake_up(["all"])
            assert await llm.wake_up(["kv_cache"]) and await alone(llm) == want

    asyncio.run(story())


def test_without_the_flag_it_says_so(tiny, folder):
    async def story():
        async with running(tiny, folder) as llm:
            with pytest.raises(common.InputError, match="started without --enable-sleep-mode"):
                await llm.sleep(1)
            await llm.sleep(0)
            assert await llm.wake_up()

    asyncio.run(story())


@in_this_process
def test_what_is_cached_is_forgotten_if_nobody_has_it(tiny, folder, place):
    prompt = list(range(40))

    async def story():
        async with running(tiny, folder, place) as llm:

            async def cached():
                return (await read(llm, "r", prompt, SHORT))[1][-1].num_cached_tokens

            assert [await cached(), await cached()] == [0, 32]
            assert await llm.call_utility("reset_prefix_cache") is True
            assert [await cached(), await cached()] == [0, 32]
            answer, ids = await first_token(llm, "inside")
            assert await llm.call_utility("reset_prefix_cache") is False
            assert await llm.call_utility("reset_prefix_cache", True) is True
            more, _ = await rest(answer)
            assert ids + more == await alone(llm)
            await idle(llm)

    asyncio.run(story())


@pytest.mark.parametrize("flag", [
    {"enable_lora": True},
    {"kv_transfer_config": {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_consumer"}},
])  # fmt: skip
def test_what_it_does_not_go_with_is_named(flag):
    with pytest.raises(common.InputError, match=r"^--enable-sleep-mode: not together with --"):
        EngineArgs(enable_sleep_mode=True, **flag)


def resident(pids):
    """MiB of these processes."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * 4096 / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is measured in /proc")
@pytest.mark.parametrize("named", and_slowly([], [({},)], [({"tensor_parallel_size": 3},)]))
def test_the_memory_is_given_back(named):
    """The real model in fp32 has 513 MiB of weights, and as they are packed nearly as much again."""
    args = EngineArgs(max_model_len=256, max_num_seqs=4, kv_cache_gib=0.2, enable_sleep_mode=True, **named)

    async def story():
        place = start_client if named else "process"
        llm = await AsyncLLM.start(make_engine, args, folders.model_folder(None), place)
        try:
            want = await alone(llm)
            pids = [llm.ready.pid, *descendants(llm.ready.pid)]
            for level in (1, 2):
                awake = resident(pids)
                await llm.sleep(level)
                asleep = resident(pids)
                assert awake - asleep > 1000, (awake, asleep)
                assert await llm.wake_up() and await alone(llm) == want
            await idle(llm)
        finally:
            await llm.shutdown()

    asyncio.run(story())

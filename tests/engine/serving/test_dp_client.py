"""A client of several engines: one engine to its caller, tokens, totals, replies and death included."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest

from engine.core.engine_core import EngineCore
from engine.errors import EngineDeadError
from engine.request import SamplingParams
from engine.serving.async_llm import AsyncLLM
from engine.serving.balancer import LoadBalancer, PrefixAwareBalancer
from engine.serving.coordinator import DPCoordinator
from engine.serving.dp_client import DPLBClient
from engine.serving.engine_group import serve_clients
from engine.serving.engine_mailbox import EngineMailbox
from engine.serving.front_end import FrontEnd
from engine.serving.letters import (
    Dead,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequestType,
    Progress,
    Reply,
    SchedulerStats,
)
from support.runners import runner_of
from support.serving_loops import IDLE
from support.small_cores import OUTPUTS, PROMPTS, reference, scheduler_of, small_model
from support.small_requests import request_of

ADD = EngineCoreRequestType.ADD


def test_totals_are_of_all_engines_and_refusals_make_room():
    client, stats = DPLBClient([None, None], None, LoadBalancer(2)), SchedulerStats
    letter = EngineCoreOutputs
    client.send((ADD, request_of([1], "x")))
    assert client.balancer.inflight == [1, 0]
    first = client.take(0, letter(refused={"x": "in use"}, scheduler_stats=stats(1, 2, 0.5, 4, 7)))
    assert first.scheduler_stats.kv_cache_usage == 0.25, "who has not spoken yet has an empty cache"
    assert client.balancer.inflight == [0, 0] and not client.engine_of
    found = client.take(1, letter(scheduler_stats=stats(10, 20, 0.25, 1, 9))).scheduler_stats
    assert found == stats(11, 22, 0.375, 5, 9)
    found = client.take(0, letter(scheduler_stats=stats(0, 0, 0.0, 0, 5))).scheduler_stats
    assert found == stats(10, 20, 0.125, 1, 5)
    for engine, counts in ((0, (3, 9, 4)), (1, (1, 2, 1, 5))):  # as many positions as each has drafted for
        found = client.take(engine, letter(scheduler_stats=stats(0, 0, 0.0, 0, 0, spec_decoding=counts)))
    assert found.scheduler_stats.spec_decoding == (4, 11, 5, 5)


def test_replies_are_added_up_and_an_error_of_one_is_the_answer():
    client = DPLBClient([None, None], None, LoadBalancer(2))
    assert client.take(0, Reply(1, {"a": 2, "b": 0})) is None
    assert client.take(1, Reply(1, {"a": 3, "b": 0})).result == {"a": 5, "b": 0}
    client.take(1, Reply(2, {"a": 3}))
    assert client.take(0, Reply(2, {}, error="no")).error == "no" and not client.replies


def test_the_prefix_balancer_hashes_blocks_as_long_as_the_engines():
    client = DPLBClient([None], None, PrefixAwareBalancer(1))
    client.take(0, EngineCoreReady(64, 8, 64, 99, 4, "fcfs", True, 1))
    assert (client.balancer.block_size, client.balancer.num_blocks) == (4, 99)


def test_engines_that_differ_are_refused():
    client = DPLBClient([None, None], None, LoadBalancer(2))
    ready = lambda blocks, length: EngineCoreReady(length, 8, 64, blocks, 16, "fcfs", True, 1)  # noqa: E731
    assert client.take(0, ready(10, 64)) is None
    letter = client.take(1, ready(12, 32))
    assert isinstance(letter, Dead) and letter.bad_input and "max_model_len" in letter.error
    assert client.take(1, ready(12, 64)).num_gpu_blocks == 22, "of those who are alike, all blocks"


def test_which_of_several_engines_has_died_is_said():
    several, one = DPLBClient([None, None], None, LoadBalancer(2)), DPLBClient([None], None, LoadBalancer(1))
    assert several.take(1, Dead("worker 0 of 1 died")).error == "engine 1 of 2: worker 0 of 1 died"
    assert several.take(1, Dead("flag: wrong", bad_input=True)).error == "flag: wrong"
    assert one.take(0, Dead("worker 0 of 1 died")).error == "worker 0 of 1 died"


@pytest.mark.parametrize("shared", [True, False])
def test_engines_that_share_experts_all_hear_of_a_request(shared):
    """One gets it, and the others a letter without it; what is no request needs none."""
    client, written = DPLBClient([None] * 3, None, LoadBalancer(3), shares_experts=shared), []
    client._write = lambda engine, letter: written.append((engine, letter[0]))
    for name in "xy":
        client.send((ADD, request_of([1], name)))
    client.send((EngineCoreRequestType.ABORT, ["x"]))
    wave = EngineCoreRequestType.START_DP_WAVE
    others = {0: [(1, wave), (2, wave)], 1: [(0, wave), (2, wave)]} if shared else {0: [], 1: []}
    assert written == [(0, ADD), *others[0], (1, ADD), *others[1], (0, EngineCoreRequestType.ABORT)]


@pytest.mark.parametrize("said", [(1 << 31).to_bytes(4, "big"), b"\0\0\0\4junk"])
def test_an_engine_that_sends_no_letter_is_dead(said):
    async def go():
        ours, theirs = socket.socketpair()
        client = DPLBClient([ours], None, LoadBalancer(1))
        theirs.sendall(said)
        with theirs, pytest.raises(EngineDeadError):
            await asyncio.wait_for(client.receive(), 20)
        client.close()

    asyncio.run(go())


INSIDE, GO, ABORTED = threading.Event(), threading.Event(), []  # of a gated engine: in a step; may go on; was told


def make_tiny(args, report=lambda text: None):
    """An engine on the tiny model, as a factory makes one; `args` may break it."""
    report("here")
    scheduler = scheduler_of(blocks=80)
    core = EngineCore(scheduler, runner_of(small_model(), scheduler))
    if args == "broken":
        core.execute_model = lambda output: 1 / 0
    if args == "gated":
        core.execute_model = lambda output: (INSIDE.set(), GO.wait(60), type(core).execute_model(core, output))[-1]
        core.abort_requests = lambda ids: (ABORTED.extend(ids), type(core).abort_requests(core, ids))[-1]
    return SimpleNamespace(core=core, about={}, lora=None)


class Engines:
    """Engines as threads, with real sockets to clients and to a coordinator."""

    def __init__(self, count, clients, args=("",)):
        self.ours = {}
        self.threads = []
        for engine in range(count):
            theirs = []
            for slot in range(clients + 1):
                self.ours[engine, slot], other = socket.socketpair()
                theirs.append(other)
            box = EngineMailbox(theirs[:clients], theirs[clients], engine)
            thread = threading.Thread(target=self.run, args=(box, theirs, args[engine % len(args)]), daemon=True)
            thread.start()
            self.threads.append(thread)
        pairs = [socket.socketpair() for _ in range(clients)]
        coordinator = DPCoordinator([self.ours[i, clients] for i in range(count)], [b for _, b in pairs])
        threading.Thread(target=coordinator.run, daemon=True).start()
        self.coordinator, self.count, self.clients = [a for a, _ in pairs], count, clients

    @staticmethod
    def run(box, sockets, args):
        serve_clients(box, make_tiny, args)
        for sock in sockets:
            sock.close()

    def client(self, index, balancer=None):
        balancer = balancer or LoadBalancer(self.count, index, self.clients)
        return DPLBClient([self.ours[i, index] for i in range(self.count)], self.coordinator[index], balancer)


async def start(client, real_model):
    while not isinstance(letter := await client.receive(), EngineCoreReady):
        assert isinstance(letter, Progress)
    config, tokenizer = small_model().config, real_model[1]
    front = FrontEnd(config, tokenizer, client.send, letter.max_model_len)
    return AsyncLLM(client, letter, front)


async def ask(llm, name, prompt, n, **fields):
    params = SamplingParams(**{"temperature": 0, "max_tokens": n, "ignore_eos": True, **fields})
    async for output in llm.generate(name, {"prompt_token_ids": list(prompt)}, params):
        final = output
    return final.outputs[0].token_ids


def test_two_engines_one_client(real_model):
    """The tokens of one engine, spread over two; aborts reach the right one; totals are totals."""
    engines = Engines(2, 1)

    async def story():
        llm = await start(engines.client(0), real_model)
        assert llm.ready.about == {"engines": 2} and llm.ready.num_gpu_blocks == 160
        where = []
        choose = llm.client.balancer.choose
        llm.client.balancer.choose = lambda request: where.append(choose(request)) or where[-1]
        got = await asyncio.gather(*(ask(llm, str(i), p, n) for i, (p, n) in enumerate(zip(PROMPTS, OUTPUTS))))
        assert got == reference() and {where.count(0), where.count(1)} == {2, 3}
        tasks = [asyncio.create_task(ask(llm, f"x{i}", PROMPTS[0], 50)) for i in range(4)]
        while len(llm.client.engine_of) < 4:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await llm.call_utility("check_idle") == IDLE
        assert llm.client.balancer.inflight == [0, 0] and not llm.client.engine_of
        await llm.shutdown()

    asyncio.run(story())
    for thread in engines.threads:
        thread.join(30)
        assert not thread.is_alive(), "an engine that nobody talks to ends"


def test_two_clients_before_one_engine(real_model):
    """Each reads its own answers, under a name that the other uses as well; who hangs up leaves nothing behind."""
    engines = Engines(1, 2, ("gated",))

    async def hold(llm, name):
        """A request in the middle of a step that does not end until it is told to."""
        GO.clear(), INSIDE.clear()
        task = asyncio.create_task(ask(llm, name, PROMPTS[0], 55))
        assert await asyncio.to_thread(INSIDE.wait, 60)
        return task

    async def story():
        GO.set(), ABORTED.clear()
        a, b = await asyncio.gather(start(engines.client(0), real_model), start(engines.client(1), real_model))
        got = await asyncio.gather(*(ask((a, b)[i % 2], str(i), p, n, logprobs=1 if i == 3 else None)
                                     for i, (p, n) in enumerate(zip(PROMPTS, OUTPUTS))))  # fmt: skip
        assert got == reference()
        first = await hold(a, "same")
        second = asyncio.create_task(ask(b, "same", PROMPTS[1], 3))
        while not b.client.engine_of:
            await asyncio.sleep(0)
        GO.set()
        assert len(await first) == 55 and await second == reference()[1][:3]
        last = await hold(a, "again")
        a.client.close()  # the API server is gone, in the middle of its request
        GO.set()
        while await b.call_utility("check_idle") != IDLE:
            pass
        assert len(ABORTED) == 1 and ABORTED[0].startswith("again-")
        last.cancel(), a.output_handler.cancel()
        await asyncio.gather(last, a.output_handler, return_exceptions=True)
        assert await ask(b, "later", PROMPTS[0], 9) == reference()[0]
        await b.shutdown()

    asyncio.run(story())


def test_one_engine_of_two_dies_and_everybody_hears(real_model):
    engines = Engines(2, 1, ("", "broken"))

    async def story():
        llm = await start(engines.client(0), real_model)
        found = await asyncio.gather(*(ask(llm, str(i), PROMPTS[0], 50) for i in range(4)), return_exceptions=True)
        assert [type(x) for x in found] == [EngineDeadError] * 4
        assert "ZeroDivisionError" in str(llm.dead)
        with pytest.raises(EngineDeadError):
            llm.add_request("late", "x", SamplingParams())
        await llm.shutdown()

    asyncio.run(story())


def test_engines_end_with_who_had_them_although_the_loop_is_closed(real_model):
    """A notebook whose cell has ended, and then `del llm`."""
    engines = Engines(2, 1)

    async def story():
        llm = await start(engines.client(0), real_model)
        assert await ask(llm, "0", PROMPTS[0], 3) == reference()[0][:3]
        return llm

    asyncio.run(story()).client.close()
    for thread in engines.threads:
        thread.join(30)
        assert not thread.is_alive()

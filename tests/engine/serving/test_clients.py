"""An engine's three places, from their start to their end: nobody waits for one that has gone."""

from __future__ import annotations

import asyncio
import atexit
import collections
import multiprocessing
import socket
import threading
import time
from types import SimpleNamespace

from engine.request import Request, SamplingParams
from engine.serving import clients
from engine.serving.async_llm import AsyncLLM
from engine.serving.clients import InprocClient, MPClient, ThreadClient
from engine.serving.letters import Dead
from engine.serving.letters import EngineCoreRequestType as Kind
from engine.serving.mailbox import Mailbox, hang_up
from support.async_engines import GREEDY


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


def test_a_process_that_nobody_has_any_more_is_waited_for(monkeypatch):
    class Process(threading.Thread):
        def __init__(self, target, args, name):
            super().__init__(target=target, args=(args[0].dup(),), daemon=True)

        def kill(self):
            assert not self.is_alive()

    monkeypatch.setattr(clients, "run_engine_core", lambda sock: sock.recv(1))  # until we hang up
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: SimpleNamespace(Process=Process))
    client = MPClient(None, None)
    process = client.process
    assert process.is_alive()
    del client
    assert not process.is_alive()


def test_the_event_loop_asks_again_too():
    """An engine that others want something of, while its client wants nothing."""
    asked, client = [], object.__new__(InprocClient)

    def has_unfinished_requests():
        asked.append(time.perf_counter())
        return len(asked) > 2

    client.outbox, client.mail = collections.deque(), asyncio.Event()
    client.proc = SimpleNamespace(has_work=has_unfinished_requests, patience=0.02, settle=lambda: None,
                                  step=lambda: client.outbox.append("a letter"))  # fmt: skip
    assert asyncio.run(asyncio.wait_for(client.receive(), 10)) == "a letter"
    assert len(asked) == 3 and asked[2] - asked[0] > 0.03


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
        llm = await AsyncLLM.start(tiny, None, folder, "thread")
        llm.add_request("r", [3, 5], SamplingParams(max_tokens=100, ignore_eos=True))
        return llm.client

    client = asyncio.run(leave())
    (end,) = at_exit
    end()
    assert not client.thread.is_alive() and not at_exit


def test_an_engine_on_a_thread_ends_although_nobody_has_read_its_letters(tiny, monkeypatch):
    monkeypatch.setattr(ThreadClient, "ROOM", 2)

    async def run():
        client = ThreadClient(tiny, None)
        client.send((Kind.ADD, Request("r", [1, 2], GREEDY)))
        while client.outbox.qsize() < 2 or not client.inbox.empty():  # the letters of the start fill the room
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the engine waits in its first step, with a third letter in its hand
        client.close()
        await asyncio.to_thread(client.join, 2)
        return client.thread.is_alive()

    assert not asyncio.run(run())

"""Engines in step: what each writes is what one process writes, however their letters arrive."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from types import SimpleNamespace

import pytest

from engine.model import llama
from engine.parallel.config import ParallelConfig
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.worker import WorkerSpec
from engine.request import Request, SamplingParams
from engine.serving.dp_proc import DPEngineCoreProc
from engine.serving.letters import EngineCoreOutputs, EngineCoreRequestType
from engine.serving.mailbox import ClientGone
from lab import naive
from support.mixtures import CPU, MIXTURES
from support.rank_threads import WorkerThreads, world_of
from support.serving_loops import IDLE
from support.small_cores import remote_runner, scheduler_of

ADD, ABORT, WAVE = EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.START_DP_WAVE
FAMILY = "qwen3_moe"


class Engine:
    """One of several, its loop in a thread; `mail` is what it reads, `letters` what it writes."""

    def __init__(self, parallel, world):
        self.executor = WorkerThreads(parallel, world)
        self.mail, self.letters = queue.SimpleQueue(), []
        self.thread = threading.Thread(target=self.run, args=(parallel,), daemon=True)
        self.ready = threading.Event()
        self.thread.start()

    def run(self, parallel):
        self.executor.collective_rpc("load_model", WorkerSpec(MIXTURES[FAMILY], parallel))
        scheduler = scheduler_of()
        self.core = PipelineEngineCore(scheduler, remote_runner(self.executor, parallel, scheduler), 1)
        self.proc = DPEngineCoreProc(SimpleNamespace(core=self.core, lora=None), self.letters.append)
        self.ready.set()
        with contextlib.suppress(ClientGone):
            self.proc.run_busy_loop(self.receive)

    def receive(self, seconds):
        found = []
        while True:
            try:
                letter = self.mail.get(not found and seconds != 0, seconds)
            except queue.Empty:
                return found
            if letter is None:
                raise ClientGone
            found.append(letter)

    @property
    def tokens(self):
        found = {}
        for letter in list(self.letters):
            for output in letter.outputs if isinstance(letter, EngineCoreOutputs) else ():
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
        return found

    @property
    def finished(self):
        return {o.request_id for letter in list(self.letters) for o in letter.outputs if o.finish_reason}


@contextlib.contextmanager
def engines(dp=2, tp=1, **about):
    world = world_of(dp * tp)
    parallels = [
        ParallelConfig(tp, enable_expert_parallel=True, data_parallel_size=dp, data_parallel_rank=rank, **about)
        for rank in range(dp)
    ]
    found = [Engine(parallel, world) for parallel in parallels]
    try:
        for engine in found:
            assert engine.ready.wait(20)
        yield found
    finally:
        for engine in found:
            engine.mail.put(None)
        for engine in found:
            engine.thread.join(20)
            engine.executor.shutdown()


def request(name, prompt, n):
    return Request(name, list(prompt), SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))


def send(found, whose, one):
    """As `DPLBClient` does."""
    found[whose].mail.put((ADD, one))
    for i, engine in enumerate(found):
        if i != whose:
            engine.mail.put((WAVE, None))


def wait_for(condition, seconds=30):
    stop = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < stop, "somebody waits for ever"
        time.sleep(0.005)


def quiet(found):
    return all(engine.mail.empty() and not engine.proc.has_work() for engine in found)


def truth(prompt, n):
    return naive.generate(llama.random_model(device=CPU, **MIXTURES[FAMILY]), prompt, n)


ASKED = {"a": (0, [3, 1, 4], 6), "b": (1, [1, 5, 9, 2, 6, 5], 4), "c": (1, [*range(30)], 3), "d": (0, [35], 8)}


@pytest.mark.parametrize(("tp", "way"), [(1, "allreduce"), (1, "all2all"), (2, "all2all"), (2, "allreduce")])
def test_engines_that_share_experts_write_what_one_process_writes(tp, way):
    """Chunks, and answers of all lengths: in the end, one engine steps for the other alone. Then all is quiet."""
    with engines(2, tp, all2all_backend=way) as found:
        for name, (whose, prompt, n) in ASKED.items():
            send(found, whose, request(name, prompt, n))
        wait_for(lambda: sum(len(engine.finished) for engine in found) == len(ASKED))
        tokens = found[0].tokens | found[1].tokens
        assert tokens == {name: truth(prompt, n) for name, (_, prompt, n) in ASKED.items()}
        assert {name for name in found[0].tokens} == {"a", "d"}, "each engine answers its own"
        wait_for(lambda: quiet(found))
        send(found, 1, request("again", [7] * 20, 5))
        wait_for(lambda: found[1].finished >= {"again"})
        assert found[1].tokens["again"] == truth([7] * 20, 5)
        wait_for(lambda: quiet(found))
        assert [engine.proc.check_idle() for engine in found] == [IDLE] * 2
        held = [rank for engine in found for rank in engine.executor.ask(experts_of)]
        assert [expert for here in held for expert in here] == [*range(6)], "each expert is on one rank of one engine"


def experts_of(worker):
    return next(iter(worker.model.moe.values())).experts.held


def test_who_is_inside_but_not_scheduled_yet_keeps_all_engines_running():
    """Its guide is being compiled, or it waits for `wake_up`: it will be scheduled, and must find the others."""
    with engines(2, all2all_backend="all2all") as found:
        proc = found[1].proc
        assert proc.lockstep.state == (0, 0)
        proc.guided["x"] = None
        assert proc.lockstep.state == (1, 0)
        proc.guided.clear()
        proc.held = [None]
        assert proc.lockstep.state == (1, 0)


def test_letters_that_come_late_hold_nobody_up_for_ever():
    """The wave's letter comes after the request, or when the wave has long been over elsewhere."""
    with engines(2, all2all_backend="all2all") as found:
        found[0].mail.put((ADD, request("early", [1, 2, 3], 4)))
        time.sleep(0.2)
        assert not found[0].finished, "alone it cannot"
        found[1].mail.put((WAVE, None))
        wait_for(lambda: found[0].finished == {"early"})
        wait_for(lambda: quiet(found))
        # Both run for the second request; the letter that goes with the third comes when that is answered.
        send(found, 1, request("long", [4, 5], 12))
        found[0].mail.put((ADD, request("short", [6, 7], 2)))
        wait_for(lambda: found[0].finished >= {"short"} and found[1].finished >= {"long"})
        assert not quiet(found), "a letter is on its way, so nobody stops"
        found[1].mail.put((WAVE, None))
        wait_for(lambda: quiet(found))
        assert found[0].tokens["short"] == truth([6, 7], 2)


def test_who_is_aborted_or_refused_leaves_nobody_waiting():
    with engines(2, all2all_backend="all2all") as found:
        send(found, 0, request("gone", [1, 2, 3], 50))
        send(found, 1, request("too long", [1] * 64, 5))
        send(found, 1, request("stays", [9], 5))
        found[0].mail.put((ABORT, ["gone"]))
        wait_for(lambda: found[1].finished >= {"stays"})
        wait_for(lambda: quiet(found))
        refused = [name for letter in found[1].letters for name in letter.refused]
        assert refused == ["too long"] and found[1].tokens["stays"] == truth([9], 5)
        assert [engine.proc.check_idle() for engine in found] == [IDLE] * 2


def test_what_travels_are_the_rows_of_both_engines():
    """An engine with nothing to do sends no row, and answers those that come."""
    with engines(2, all2all_backend="all2all") as found:
        send(found, 0, request("a", [3, 1, 4], 4))
        wait_for(lambda: found[0].finished and quiet(found))
        counts = [engine.executor.collective_rpc("take_counts")[0]["all_to_all, experts"] for engine in found]
        steps = len([letter for letter in found[0].letters if letter.outputs])
        H, k, row = 80, 3, 80 * 4
        assert counts[0]["calls"] == counts[1]["calls"] >= 3 * 2 * steps, "three all-to-alls a layer, dummies included"
        there, back = counts[0]["bytes"], counts[1]["bytes"]
        rows = back // row
        assert back == rows * row and there == rows * (row + 8), "a row and its slot there, an answer back"
        assert 0 < rows < 2 * k * 6, "of three tokens of the prompt and three more, in two layers"
        assert llama.random_model(**MIXTURES[FAMILY]).config.hidden_size == H


def test_experts_move_by_what_all_engines_have_counted():
    about = {"all2all_backend": "all2all", "enable_eplb": True, "num_redundant_experts": 2, "eplb_step_interval": 3}
    with engines(2, **about) as found:
        for name, (whose, prompt, n) in ASKED.items():
            send(found, whose, request(name, prompt, n))
        wait_for(lambda: sum(len(engine.finished) for engine in found) == len(ASKED))
        wait_for(lambda: quiet(found))
        tokens = found[0].tokens | found[1].tokens
        assert tokens == {name: truth(prompt, n) for name, (_, prompt, n) in ASKED.items()}
        placements = [
            engine.executor.ask(lambda worker: [m.experts.placement for m in worker.model.moe.values()])[0]
            for engine in found
        ]
        assert placements[0] == placements[1], "all know where everybody is"

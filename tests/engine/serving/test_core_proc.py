"""The engine core with a mailbox: in any order of letters and steps, both sides end up with nothing."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.config import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.scheduler import make_scheduler
from engine.output import ModelRunnerOutput
from engine.request import Request, SamplingParams
from engine.serving.core_proc import EngineCoreProc
from engine.serving.front_end import FrontEnd
from engine.serving.letters import EngineCoreRequestType as Kind
from engine.serving.mailbox import ClientGone
from support.async_engines import GREEDY
from support.engines import ids


class Zeros(EngineCore):
    """No model: everybody's next token is 0."""

    def execute_model(self, output):
        return ModelRunnerOutput({request_id: [0] for request_id in output.num_scheduled_tokens})


class Life(RuleBasedStateMachine):
    """Requests come, leave, stop and finish in any order, letters are delayed, names are used again at once: both sides
    end up with nothing."""

    def __init__(self, model_config, tokenizer):
        super().__init__()
        config = SchedulerConfig(max_model_len=32, max_num_seqs=3, max_num_batched_tokens=16)
        self.core = Zeros(make_scheduler(config, 13, 4))  # tight: preemptions happen
        self.core.runner = None
        self.from_core, self.to_core = [], []
        self.proc = EngineCoreProc(SimpleNamespace(core=self.core, lora=None), self.from_core.append)
        self.proc.read_mail = self.deliver_to_core
        self.front = FrontEnd(model_config, tokenizer, self.to_core.append, 32)

    def deliver_to_core(self):
        letters, self.to_core[:] = list(self.to_core), []
        self.proc.handle(letters)

    @rule(length=st.integers(1, 20), n=st.integers(1, 3), max_tokens=st.integers(1, 14), stop=st.booleans())
    def add(self, length, n, max_tokens, stop):
        name = next(name for name in map(str, range(1000)) if name not in self.front.callers)
        params = SamplingParams(
            temperature=1, n=1, max_tokens=max_tokens, ignore_eos=True, stop=["!!"] if stop else None
        )
        self.front.add_request(name, ids(*range(1, length + 1)), params, stream=bool(n % 2))

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


def test_any_order_of_events(real_model):
    model, tokenizer = real_model
    run_state_machine_as_test(
        lambda: Life(model.config, tokenizer), settings=settings(max_examples=20, stateful_step_count=30)
    )


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
            front.add_request("x", ids(7), GREEDY)

        if leave:
            front.add_request("x", ids(1, 2), GREEDY)
            read_mail()
            proc.read_mail = lambda: None if late else (change_hands(), read_mail())
            proc.step()
            if late:
                change_hands()
            proc.read_mail = lambda: None
        else:
            front.add_request("x", ids(7), GREEDY)
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

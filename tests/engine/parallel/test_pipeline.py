"""Steps in flight: preempted, aborted, sampled, a request writes what it writes in step."""

from __future__ import annotations

import itertools

import pytest

from engine.assemble import make_core
from engine.config import SchedulerConfig, VllmConfig
from engine.output import SchedulerOutput
from engine.parallel.config import ParallelConfig
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.workers import Workers
from engine.request import Request, SamplingParams
from support.small_cores import PROMPTS, core_in_flight, one_worker, plain_core, reference, serve, small_model

CROWDED = [("fcfs", 17, 5), ("priority", 17, 2), ("fcfs", 60, 5)]


@pytest.mark.parametrize(("policy", "blocks", "depth"), [
    *CROWDED, *(pytest.param(*each, marks=pytest.mark.slow)
                for each in itertools.product(["fcfs", "priority"], [60, 17], [2, 5]) if each not in CROWDED)
])  # fmt: skip
def test_in_flight_preempted_and_cached_the_tokens_stay(depth, blocks, policy):
    core = core_in_flight(depth, blocks=blocks, policy=policy)
    outputs, seen, in_flight = [9, 14, 7, 20, 16], [], []
    preempt, put = core.scheduler._preempt_request, core.put_in_flight

    def count(victim, output):
        seen.append(victim.request_id)
        preempt(victim, output)

    def watch():
        found = put()
        in_flight.append(len(core.batch_queue))
        return found

    core.scheduler._preempt_request, core.put_in_flight = count, watch
    got = serve(core, outputs=outputs, priorities=[4, 3, 2, 1, 0])
    want = serve(plain_core(small_model(), blocks=60), outputs=outputs)
    assert got == want
    assert bool(seen) == (blocks == 17) and min(2, depth) <= max(in_flight) <= depth


def test_a_token_of_a_former_life_is_dropped():
    """Preempted while its token was on the way, back and computed again before that token arrived: it counts once."""
    core = core_in_flight(3, blocks=60)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    core.add_request(Request("0", [3, 1, 4], params))
    assert core.put_in_flight()
    (request,) = core.scheduler.running
    output = SchedulerOutput()
    core.scheduler._preempt_request(request, output)
    core.runner.writer.write(output)
    assert core.put_in_flight(), "it runs again, and the first token has not arrived"
    got = []
    while core.scheduler.has_unfinished_requests():
        got += [token for found in core.step() for token in found.new_token_ids]
    assert got == serve(plain_core(small_model()), [[3, 1, 4]], [6])[0]


def test_an_abort_in_flight_leaves_nothing():
    core = core_in_flight(3)
    for i in range(3):
        core.add_request(Request(str(i), PROMPTS[2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    while core.put_in_flight():
        pass
    assert len(core.batch_queue) == 3
    core.abort_requests(["0", "1", "2"])
    assert [core.step() for _ in range(4)] == [[], [], [], []]
    assert serve(core) == reference()
    core.runner.submit(core.scheduler.schedule())


def test_a_token_of_an_aborted_namesake_is_dropped():
    core = core_in_flight(3)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    core.add_request(Request("0", PROMPTS[1], params))
    assert core.put_in_flight()
    core.abort_requests(["0"])
    assert serve(core, [[3, 1, 4]], [6]) == serve(plain_core(small_model()), [[3, 1, 4]], [6])


def test_a_parallel_engine_has_a_batch_for_every_stage():
    model = small_model()
    workers = Workers(one_worker(), ParallelConfig(1, 3), model)
    limits = SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
    core = make_core(model, limits, 60, 4, VllmConfig(workers=workers))
    assert isinstance(core, PipelineEngineCore) and core.max_concurrent_batches == 3


def test_sampling_and_logprobs_survive_the_way():
    fields = {"temperature": 0.9, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 2}
    core, told = core_in_flight(2), []
    core.step = lambda: told.extend(found := PipelineEngineCore.step(core)) or found
    assert serve(core, **fields) == serve(plain_core(small_model()), **fields)
    assert told and all(output.new_token_ids[0] in output.new_logprobs for output in told)

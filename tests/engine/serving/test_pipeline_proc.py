"""The serving loop of an engine on workers keeps every stage busy."""

from __future__ import annotations

from engine.request import Request, SamplingParams
from engine.serving.letters import EngineCoreRequestType
from support.serving_loops import IDLE, proc_on
from support.small_cores import OUTPUTS, PROMPTS, core_in_flight, reference


def requests():
    return [Request(str(i), list(prompt), SamplingParams(temperature=0, max_tokens=n, ignore_eos=True), arrival_time=i)
            for i, (prompt, n) in enumerate(zip(PROMPTS, OUTPUTS))]  # fmt: skip


def test_the_serving_loop_keeps_every_stage_busy():
    core, got, in_flight = core_in_flight(3), {}, []
    proc, letters = proc_on(core, requests())
    while core.scheduler.has_unfinished_requests():
        proc.step()
        in_flight.append(1 + len(core.batch_queue))
    for letter in letters:
        for output in letter.outputs:
            got.setdefault(int(output.request_id), []).extend(output.new_token_ids)
    assert [got[i] for i in range(5)] == reference() and max(in_flight) == 3
    admitted = [list(letter.admitted) for letter in letters]
    assert admitted[0] == ["0", "1", "2"] and [name for names in admitted for name in names] == list("01234")
    assert letters[0].scheduler_stats.num_scheduled_tokens == 16 and proc.check_idle() == IDLE


def test_who_leaves_while_the_pipeline_runs_hears_no_more():
    proc, letters = proc_on(core_in_flight(2), requests())
    proc.read_mail = lambda: proc.handle([(EngineCoreRequestType.ABORT, ["0"])])
    proc.step()
    assert [output.request_id for output in letters[0].outputs] == ["1"]
    proc.handle([(EngineCoreRequestType.ABORT, list("1234"))])
    proc.step()
    assert proc.check_idle() == IDLE and not letters[-1].outputs

"""Where one caller's news wait: nothing is lost, and one thing waits."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineDeadError
from engine.front_end import CompletionOutput, RequestOutput
from engine.serving.collector import RequestOutputCollector


def piece(index, text, tokens, finished=False, logprobs=None):
    answer = CompletionOutput(index, text, tokens, logprobs=logprobs, finish_reason="stop" if finished else None)
    return RequestOutput("r", None, [], [answer], finished)


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2), st.text("ab", max_size=3))), max_size=30))
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


def test_of_pieces_put_together_the_last_says_how_it_ended():
    collector, last = RequestOutputCollector("r"), piece(0, "b", [2], True, [{2: 0}])
    last.outputs[0].cumulative_logprob, last.outputs[0].stop_reason = -3.0, "b"
    collector.put(piece(0, "a", [1], logprobs=[{1: 0}]))
    collector.put(last)
    (answer,) = collector.get_nowait().outputs
    assert (answer.cumulative_logprob, answer.finish_reason, answer.stop_reason) == (-3.0, "stop", "b")

"""Callers and their answers: what is refused on arrival, how an answer is told, and what is forgotten."""

from __future__ import annotations

import common

import pytest

from engine.output import EngineCoreOutput
from engine.request import RequestStatus, SamplingParams
from engine.sampling.detokenizer import decoded_token
from support.engines import free, ids


def test_n_samples_are_n_requests_with_seeds_in_a_row(llm):
    params = SamplingParams(n=3, seed=40, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate(ids(1, 2), params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2] and output.finished
    for i, answer in enumerate(output.outputs):
        (alone,) = llm.generate(ids(1, 2), SamplingParams(seed=40 + i, max_tokens=8, ignore_eos=True))
        assert answer.token_ids == alone.outputs[0].token_ids
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    assert free(llm)


def test_the_seed_minus_one_is_none(llm):
    """As in vLLM; but the second sample of seed −2 has a seed."""

    def ask(**asked):
        (output,) = llm.generate(ids(1, 2), SamplingParams(max_tokens=8, ignore_eos=True, **asked))
        return [answer.token_ids for answer in output.outputs]

    assert SamplingParams(seed=-1).seed is None and ask(seed=-1) != ask(seed=-1)
    first = ask(n=2, seed=-2)
    assert first == ask(n=2, seed=-2) and first[0] != first[1]


@pytest.mark.parametrize("stream", [False, True])
def test_scored_tokens_are_told_in_their_context(llm, monkeypatch, stream):
    """Tokens and their alternatives, of a prompt and of answers; neither continues the other, nor a first token."""
    engine = llm.llm_engine
    alphabet = (b"\xe5", b"\xaf", b"\xbf", b"a")
    monkeypatch.setattr(engine, "token_bytes", spelled := WithSpecial({i: alphabet[i % 4] for i in range(128)}))
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=3, n=2, logprobs=3, prompt_logprobs=2)
    engine.add_request("x", [3, 0, 1, 2, 4, 5, 6, 0, 1], params, stream=stream)
    scores, tokens, entries = None, {0: [], 1: []}, {0: [], 1: []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            scores = scores or output.prompt_logprobs
            for piece in output.outputs:
                tokens[piece.index] += piece.token_ids
                entries[piece.index] += piece.logprobs
    prompt = output.prompt_token_ids
    told = [entry[t].decoded_token for t, entry in zip(prompt[1:], scores[1:])]
    assert told == ["", "", "寿", "", "", "寿", "", ""]
    completed = 0
    for told, found in ((prompt[1:], scores[1:]), *((tokens[i], entries[i]) for i in (0, 1))):
        assert len(told) == len(found)
        for i, entry in enumerate(found):
            for token, x in entry.items():
                assert x.decoded_token == decoded_token(spelled, token, told[max(0, i - 4) : i])
                completed += x.decoded_token == "寿"
    assert completed > 4
    engine.add_request("y", [0, 1, 2, 3], SamplingParams(max_tokens=1, prompt_logprobs=0))
    (output,) = engine.step()
    told = [x.decoded_token for entry in output.prompt_logprobs[1:] for x in entry.values()]
    assert told == ["", "", "a"] and free(llm)


class WithSpecial(dict):
    special = frozenset()


def test_a_stream_adds_up_to_the_answer(llm):
    engine = llm.llm_engine
    params = SamplingParams(n=2, seed=3, max_tokens=9, ignore_eos=True, logprobs=1, stop=["never so long a text"])
    (whole,) = llm.generate(ids(1, 2, 3), params)
    engine.add_request("s", ids(1, 2, 3), params, stream=True)
    parts, finished = {0: [], 1: []}, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            finished.append(output.finished)
            for answer in output.outputs:
                parts[answer.index].append(answer)
    assert finished.count(True) == 1 and finished[-1]
    for answer in whole.outputs:
        seen = parts[answer.index]
        assert len(seen) == 9 and "".join(p.text for p in seen) == answer.text
        assert [token for p in seen for token in p.token_ids] == answer.token_ids
        assert [found for p in seen for found in p.logprobs] == answer.logprobs
        assert [p.finish_reason for p in seen] == [None] * 8 + ["length"]
    assert free(llm)


def test_a_request_that_fails_has_no_token_to_report(llm, monkeypatch):
    """As one whose keys and values did not arrive (lesson 08)."""
    engine = llm.llm_engine
    engine.add_request("f", ids(1, 2, 3), SamplingParams(max_tokens=9, logprobs=1), stream=True)
    (request_id,) = engine.sequences
    engine.core.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
    lost = EngineCoreOutput(request_id, [], "error", "lost")
    monkeypatch.setattr(engine.core, "step", lambda: [lost])
    (answer,) = engine.step()[0].outputs
    assert (answer.finish_reason, answer.stop_reason, answer.logprobs) == ("error", "lost", [])
    assert not engine.has_unfinished_requests()


def test_aborting_frees_everything(llm):
    engine = llm.llm_engine
    for name in ("a", "b", "c"):
        engine.add_request(name, ids(1, 2, 3), SamplingParams(n=3, max_tokens=30, ignore_eos=True), stream=True)
    for _ in range(3):
        engine.step()
    engine.abort_request(["a", "c", "c", "unknown"])
    heard = {output.request_id for _ in range(40) for output in engine.step()}
    assert heard == {"b"} and free(llm)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        (5, "prompt"), ({"text": "x"}, "prompt"), ({"prompt_token_ids": "x"}, "prompt"), (None, "prompt"),
        (["x"], "prompt"), (ids(128), "prompt_token_ids"), (ids(-1), "prompt_token_ids"),
        (ids("a"), "prompt_token_ids"), (ids(True), "prompt_token_ids"), (ids(), "empty"),
        (ids(*[1] * 64), "maximum model length"), ("", "empty"),
        ("a tokenizer may know more", "prompt: token id"), ({"prompt": "than its model"}, "prompt: token id"),
    ],
)  # fmt: skip
def test_wrong_prompts_are_refused_and_leave_nothing(llm, prompt, word):
    with pytest.raises(common.InputError, match=word):
        llm.generate([ids(1, 2), prompt], SamplingParams(max_tokens=2))
    assert free(llm)
    assert llm.generate(ids(1), SamplingParams(max_tokens=2, ignore_eos=True))[0].finished, "the engine lives"

"""Log probabilities in the shapes of the APIs."""

from __future__ import annotations

import itertools
import json

import pytest

from engine.front_end import CompletionOutput, RequestOutput
from engine.sampling.sampler import Logprob
from engine.serving.collector import RequestOutputCollector
from engine.serving.openai.job import Job
from engine.serving.openai.protocol import ChatCompletionRequest, CompletionRequest
from engine.serving.openai.serving import OpenAIServing
from support.scripted_api import M, ScriptedLLM, ask, read_events, serve


def logprobs_of(kind, **fields):
    serving = OpenAIServing(ScriptedLLM(), ["smol"])
    entry = {
        65: Logprob(-0.5, 2, "A"),
        66: Logprob(-0.25, 1, "B"),
        67: Logprob(float("-inf"), 3, "C"),
    }
    body = kind(**fields)
    job = Job("id", "smol", body, serving.check_params(body), [])
    answer = CompletionOutput(0, "AC", [65, 67], logprobs=[entry, {67: entry[67]}])
    return serving.logprobs(job, 0, answer)


def test_logprobs_of_a_chat():
    found = logprobs_of(ChatCompletionRequest, **M, logprobs=True, top_logprobs=2)["content"]
    assert found[0]["token"] == "A" and found[0]["logprob"] == -0.5 and found[0]["bytes"] == [65]
    assert [x["token"] for x in found[0]["top_logprobs"]] == ["B", "A"], "the two best, best first"
    assert found[1]["logprob"] == -9999.0 and found[1]["top_logprobs"] == [], "JSON has no infinity"
    json.dumps(found, allow_nan=False)
    none = logprobs_of(ChatCompletionRequest, **M, logprobs=True)["content"]
    assert none[0]["top_logprobs"] == []


def test_logprobs_of_a_completion():
    found = logprobs_of(CompletionRequest, prompt="x", logprobs=1)
    assert found["tokens"] == ["A", "C"] and found["text_offset"] == [0, 1]
    assert found["top_logprobs"][0] == {"B": -0.25, "A": -0.5}, "the best, and what was sampled"
    assert logprobs_of(CompletionRequest, prompt="x") is None


def test_of_tokens_with_one_text_the_most_probable_counts():
    """Also if another was chosen, and whatever their order: half a character has the text "", as others do."""
    serving = OpenAIServing(ScriptedLLM(), ["smol"])
    serving.token_bytes = dict.fromkeys(range(8), b"a")
    ranked = [(3, 1, "b"), (4, 2, "a"), (5, 3, "a"), (6, 4, ""), (7, 5, "")]
    for order, chosen in itertools.product(itertools.permutations(ranked), (4, 5)):
        body = CompletionRequest(prompt="x", logprobs=5)
        job = Job("id", "smol", body, serving.check_params(body), [])
        entry = {t: Logprob(-rank / 10, rank, text) for t, rank, text in order}
        found = serving.logprobs(job, 0, CompletionOutput(0, "a", [chosen], logprobs=[entry]))
        assert list(found["top_logprobs"][0].items()) == [("b", -0.1), ("a", -0.2), ("", -0.4)]
        assert found["token_logprobs"] == [-entry[chosen].rank / 10]
        job.body.return_tokens_as_token_ids = True
        found = serving.logprobs(job, 1, CompletionOutput(1, "a", [chosen], logprobs=[entry]))
        assert len(found["top_logprobs"][0]) == 5, "under its id, each has its own"


def test_logprobs_under_token_ids():
    """As vLLM names them: texts can be alike, and as keys two would be one. The places in the text stay."""
    by_id = {"return_tokens_as_token_ids": True}
    found = logprobs_of(CompletionRequest, prompt="x", logprobs=1, **by_id)
    assert found["tokens"] == ["token_id:65", "token_id:67"] and found["text_offset"] == [0, 1]
    assert found["top_logprobs"][0] == {"token_id:66": -0.25, "token_id:65": -0.5}
    found = logprobs_of(ChatCompletionRequest, **M, logprobs=True, top_logprobs=2, **by_id)["content"]
    assert found[0]["token"] == "token_id:65" and found[0]["bytes"] == [65], "the bytes are the text's"
    assert [x["token"] for x in found[0]["top_logprobs"]] == ["token_id:66", "token_id:65"]
    plain = logprobs_of(CompletionRequest, prompt="x", logprobs=1, return_tokens_as_token_ids=False)
    assert plain["tokens"] == ["A", "C"]


class Scoring(ScriptedLLM):
    """Scores what it is asked to score: token t gets −t/100 behind the Z; nothing predicts a prompt's first token."""

    ANSWER = ("y", "z")

    def add_request(self, request_id, prompt, params, *, stream=False, **about):
        self.added.append((request_id, prompt, params))

        def entry(t, k):
            return {t: Logprob(-t / 100, 2, chr(t))} | ({90: Logprob(-0.01, 1, "Z")} if k else {})

        told, told_prompt = params.logprobs, params.prompt_logprobs
        ids, collector = prompt["prompt_token_ids"], RequestOutputCollector(request_id)
        tokens = [ord(text) for text in self.ANSWER][: params.max_tokens]
        logprobs = None if told is None else [entry(t, told) for t in tokens]
        text = "".join(map(chr, tokens))
        answer = CompletionOutput(0, text, tokens, logprobs=logprobs, finish_reason="length")
        scores = None if told_prompt is None else [None, *(entry(t, told_prompt) for t in ids[1:])]
        collector.put(RequestOutput(request_id, prompt["prompt"], ids, [answer], True, 0, scores))
        return collector


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", ["abc", [97, 98, 99]])
@pytest.mark.parametrize(("limit", "answer"), [(16, "yz"), (0, "")])
def test_echo_with_logprobs_scores_the_prompt(stream, given, limit, answer):
    """What lm-eval asks for: every token's log probability, its place in the text, and the best one beside it."""
    llm, app = serve(Scoring())
    body = {"prompt": given, "echo": True, "logprobs": 1, "max_tokens": limit, "stream": stream}
    heard = ask(app, "/v1/completions", body)
    found = read_events(heard.text)[0] if stream else heard.json
    ((_, _, params),) = llm.added
    assert params.logprobs == params.prompt_logprobs == 1 and params.max_tokens == (limit or 1)
    (choice,), text = found["choices"], "abc" + answer
    assert choice["text"] == text and ("prompt_logprobs" in choice) is not stream
    if not stream:  # as in vLLM, where echo with logprobs asks for these, too
        assert [entry and [*entry] for entry in choice["prompt_logprobs"]] == [None, ["98", "90"], ["99", "90"]]
    assert choice["logprobs"] == {
        "tokens": list(text), "text_offset": list(range(len(text))),
        "token_logprobs": [None, *(-ord(t) / 100 for t in text[1:])],
        "top_logprobs": [None, *({"Z": -0.01, t: -ord(t) / 100} for t in text[1:])],
    }  # fmt: skip


def test_an_echoed_prompt_under_token_ids_names_its_first_token_too():
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0, "return_tokens_as_token_ids": True}
    found = ask(serve(Scoring())[1], "/v1/completions", body).json["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:97", "token_id:98", "token_id:99"] and found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {"token_id:90": -0.01, "token_id:98": -0.98}


@pytest.mark.parametrize("given", ["寿", [0xE5, 0xAF, 0xBF]])
def test_a_character_of_several_tokens_has_one_place_in_the_text(given):
    class Bytes(Scoring):
        """One token per byte."""

        def add_request(self, request_id, prompt, params, **about):
            ids, collector = [*"寿".encode()], RequestOutputCollector(request_id)

            def entry(t, text):
                return {t: Logprob(-1.0, 1, text), 65: Logprob(-2.0, 2, "A")}

            # A prompt's first token is not scored: who looks at the others alone knows nothing of its byte.
            said, scores = [*map(entry, [*ids, 33], ["", "", "寿", "!"])], [None, entry(ids[1], ""), entry(ids[2], "")]
            answer = CompletionOutput(0, "寿!", [*ids, 33], logprobs=said, finish_reason="length")
            collector.put(RequestOutput(request_id, prompt["prompt"], ids, [answer], True, 0, scores))
            return collector

    llm = Bytes()
    llm.front.token_bytes = {i: bytes([i]) for i in range(256)}
    llm.front.tokenizer.decode = lambda ids: bytes(ids).decode()
    (choice,) = ask(serve(llm)[1], "/v1/completions", {"prompt": given, "echo": True, "logprobs": 2}).json["choices"]
    found = choice["logprobs"]
    assert found["tokens"] == ["", "", "寿", "", "", "寿", "!"] and "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [0, 0, 0, 1, 1, 1, 2]
    assert found["top_logprobs"][2] == {"寿": -1.0, "A": -2.0}, "the token itself under the name that tokens gives it"


def test_prompt_logprobs_have_vllms_form():
    llm, app = serve(Scoring())
    want = [None, {"98": {"logprob": -0.98, "rank": 2, "decoded_token": "b"}}]
    found = ask(app, "/v1/completions", {"prompt": ["ab", "cb"], "prompt_logprobs": 0}).json["choices"]
    assert [choice["prompt_logprobs"] for choice in found] == [want, want]
    assert [(choice["text"], choice["logprobs"]) for choice in found] == [("yz", None)] * 2
    found = ask(app, "/v1/chat/completions", M | {"prompt_logprobs": 1}).json
    assert found["prompt_logprobs"][0] is None and "prompt_logprobs" not in found["choices"][0]
    assert found["prompt_logprobs"][1]["90"] == {"logprob": -0.01, "rank": 1, "decoded_token": "Z"}
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "prompt_logprobs": 5}
    assert ask(app, "/v1/completions", body).json["choices"][0]["logprobs"]["top_logprobs"] == [
        None, {"b": -0.98}, {"y": -1.21}, {"z": -1.22}]  # fmt: skip
    assert [params.prompt_logprobs for *_, params in llm.added] == [0, 0, 1, 5]
    heard = ask(app, "/v1/completions", {"prompt": "ab", "prompt_logprobs": 0, "stream": True})
    assert heard.status == 200 and "prompt_logprobs" not in heard.text, "as in vLLM: allowed, and not told"
    assert ask(app, "/v1/chat/completions", M).json["prompt_logprobs"] is None


def test_places_in_the_text_go_on_from_piece_to_piece(shared):
    serving = OpenAIServing(ScriptedLLM(), ["smol"])
    body = CompletionRequest(prompt="x", stream=True, logprobs=0, n=2)
    job = Job("id", "smol", body, serving.check_params(body), [])

    def offsets(index, *words):
        ids = [ord(word[0]) for word in words]
        serving.token_bytes |= {i: word.encode() for i, word in zip(ids, words)}
        logprobs = [{i: Logprob(-1.0, 1, word)} for i, word in zip(ids, words)]
        piece = CompletionOutput(index, "", ids, logprobs=logprobs)
        return serving.choice(job, index, piece)["logprobs"]["text_offset"]

    assert [offsets(0, "ab", "c"), offsets(1, "d"), offsets(0), offsets(0, "e", "f"), offsets(1, "g")] == [
        [0, 2], [0], [], [3, 4], [1]]  # fmt: skip

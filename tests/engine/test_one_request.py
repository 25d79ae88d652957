"""What one request brings upon itself ends that request: the others get the tokens that they get without it.

One token of the model is poison: its embedding is NaN, as an overflow in float16 makes the rest of a prompt. Whoever
has it in a prompt has no logits; whoever has not must not notice, in no batch, with no neighbour, in no reused block.
"""

from __future__ import annotations

import math

import pytest
import torch

from engine.model import llama
from engine.parallel.config import ParallelConfig
from engine.parallel.workers import make_executor
from engine.request import NO_TOKEN, Request, SamplingParams
from support import drafting, small_cores
from support.rank_threads import WorkerThreads

guess, small_models = drafting.guess, drafting.small_models
AHEAD = ParallelConfig(async_scheduling=True)
POISON = 99
SIZES = {**small_cores.SIZES, "tie_word_embeddings": False}


@pytest.fixture
def poisoned(monkeypatch):
    """Every random model has the poison."""
    make = llama.random_model

    def random_model(*args, **sizes):
        model = make(*args, **sizes)
        model.embed_tokens[POISON:][:1] = math.nan  # if it has so many
        return model

    monkeypatch.setattr(llama, "random_model", random_model)


@pytest.fixture
def here(poisoned):
    """Engines in this process, one step ahead, and on threads."""
    started = []

    def build(where, method, **limits):
        if where == "here":
            return drafting.engine_here(method, SIZES, **limits)
        parallel = AHEAD if where == "ahead" else ParallelConfig(2, 2)
        executor = make_executor(parallel) if where == "ahead" else WorkerThreads(parallel)
        started.append(executor)
        return drafting.engine_on(executor, parallel, method, sizes=SIZES, **limits)

    yield build
    for executor in started:
        executor.shutdown()


JOBS = [job for job in drafting.JOBS if POISON not in job[0]]
WISHES = [
    {"temperature": 0}, {"seed": 1}, {"top_p": 0.9}, {"top_k": 3, "logprobs": 2}, {"temperature": 0, "logprobs": 20},
    {"repetition_penalty": 1.5, "min_p": 0.1}, {"prompt_logprobs": 1}, {"allowed_token_ids": [1, 2], "logprobs": 0},
]  # fmt: skip
LIMITS = {"roomy": {}, "cramped": {"num_gpu_blocks_override": 18}, "chunks": {"max_num_batched_tokens": 7}}


def serve(engine, jobs, broken=()):
    """All of `jobs`, with one of `broken` behind each. Returns the tokens of the jobs, and how the broken ones end."""
    core, tokens, ended = engine.core, {}, {}
    for i, (prompt, params) in enumerate(jobs):
        core.add_request(Request(str(i), list(prompt), params, eos_token_id=17, arrival_time=2 * i))
        for prompt, params in broken[i : i + 1]:
            core.add_request(Request(f"bad {i}", list(prompt), params, eos_token_id=17, arrival_time=2 * i + 1))
    for outputs in drafting.steps(core):
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason:
                ended[output.request_id] = output.finish_reason, output.stop_reason
    pool = core.scheduler.kv_cache_manager.block_pool
    pool.check()
    assert pool.num_free_blocks == pool.num_blocks - 1
    return [tokens[str(i)] for i in range(len(jobs))], {
        name: (tokens[name], *how) for name, how in ended.items() if name.startswith("bad")
    }


PLACES = [("here", None), ("here", "ngram"), ("ahead", None), ("ahead", "ngram"), ("threads", None), ("here", "eagle"),
          ("ahead", "eagle")]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "method", "limits"),
    [pytest.param(*place, limits, marks=pytest.mark.slow if i and limits != "roomy" else ())
     for i, place in enumerate(PLACES) for limits in LIMITS],
)  # fmt: skip
def test_a_request_without_logits_ends_alone(here, monkeypatch, where, method, limits):
    engine = here(where, method, **LIMITS[limits])
    broken = [([5, 6, 7, 8, 9, POISON, *range(i)], SamplingParams(max_tokens=9, **w)) for i, w in enumerate(WISHES)]
    expected = serve(here("here", None, **LIMITS[limits]), JOBS)[0]
    drawn = method == "eagle"  # what is drawn follows the drafts
    for _ in range(2):  # the second time in blocks that had the poison
        tokens, ended = serve(engine, JOBS, broken)
        same = [i for i, (_, params) in enumerate(JOBS) if not drawn or params.temperature == 0]
        assert [tokens[i] for i in same] == [expected[i] for i in same]
        assert ended == {f"bad {i}": ([], "error", NO_TOKEN) for i in range(len(WISHES))}
    assert not [r for r in engine.core.scheduler.requests]


def test_whoever_writes_the_poison_ends_behind_it(here):
    """What came before stays; log probabilities are one for each token."""
    bias = {"logit_bias": {POISON: 100.0}, "max_tokens": 9}
    for where, method in (("here", None), ("here", "ngram"), ("ahead", None), ("ahead", "ngram")):
        jobs = [([1, 2, 3], SamplingParams(**bias, **w)) for w in ({"temperature": 0}, {}, {"logprobs": 1})]
        _, ended = serve(here(where, method), JOBS[:3], jobs)
        assert ended == {f"bad {i}": ([POISON], "error", NO_TOKEN) for i in range(3)}


@pytest.mark.parametrize(
    "wish", [{"temperature": 0, "logprobs": 1}, {"temperature": 0}, {"seed": 1, "temperature": 1e-3, "logprobs": 2}]
)
def test_drafts_in_front_of_a_row_without_a_token_stand(guess, wish):
    """The answer so far, with a log probability for each token, and then the error."""
    guess(1.0)
    engine, (prompt, params) = drafting.engine_here("ngram"), drafting.JOBS[-1]
    model, expected = engine.core.runner.model, drafting.plain()[0][-1]
    params, logits, seen = SamplingParams(max_tokens=24, **wish), model.logits, []

    @torch.inference_mode()
    def overflowing(hidden):
        found = logits(hidden)
        if engine.core.runner.drafts.drafts:
            seen.append(len(found))
            found[1:, 5] = math.nan
        return found

    model.logits, core, tokens, outputs = overflowing, engine.core, [], []
    core.add_request(Request("r", list(prompt), params))
    for heard in drafting.steps(core):
        for output in heard:
            tokens += output.new_token_ids
            if output.new_token_ids and params.logprobs is not None:
                assert output.new_token_ids[0] in output.new_logprobs and len(output.new_token_ids) == 1
        outputs += heard
    assert seen[0] > 1 and outputs[-1].finish_reason == "error"
    assert tokens == expected[:2]


def test_a_prompt_with_a_row_that_is_no_distribution_has_no_scores(here, monkeypatch):
    """Its last row is sound here, and still: a score that is NaN is no number for JSON."""
    engine = here("here", None, max_num_batched_tokens=8)
    logits, broken = engine.model.logits, []

    @torch.inference_mode()
    def overflowing(hidden):
        found = logits(hidden)
        if len(found) > 1 and not broken:  # rows of the prompt
            broken.append(len(found))
            found[1, 3] = math.inf
        return found

    monkeypatch.setattr(engine.core.runner.model, "logits", overflowing)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, logprobs=1)
    core, outputs, scored = engine.core, [], {}
    core.add_request(Request("bad", list(range(1, 21)), params))
    for heard in drafting.steps(core):
        outputs += heard
        scored |= {o.request_id: o.new_prompt_logprobs for o in heard if o.new_prompt_logprobs}
    assert [(o.new_token_ids, o.new_logprobs, o.finish_reason) for o in outputs] == [([], None, "error")]
    assert not scored and broken
    core.add_request(Request("good", list(range(1, 21)), params))
    for heard in drafting.steps(core):
        scored |= {o.request_id: o.new_prompt_logprobs for o in heard if o.new_prompt_logprobs}
    assert [*scored] == ["good"] and not core.runner.prompts.broken and not core.runner.prompts.scored


def test_what_a_broken_request_computed_is_not_hit(here):
    """Its blocks leave the index of the prefix cache; those of others stay."""
    engine = here("here", None)
    manager = engine.core.scheduler.kv_cache_manager
    good, bad = list(range(1, 10)), [*range(1, 5), POISON, *range(20, 24)]
    params = SamplingParams(temperature=0, max_tokens=2)
    assert serve(engine, [(good, params)], [(bad, params)])[1]
    assert manager.get_computed_blocks(Request("a", [*bad, 1], params))[1] == 0
    assert serve(engine, [(good, params)])[0] and manager.get_computed_blocks(Request("b", [*good, 1], params))[1] == 8


VOCAB = 11
FIELDS = {
    "logprobs": (0, 10, 11, 20), "prompt_logprobs": (0, 11, 20), "top_k": (1, 10, 11, 12, 10**30),
    "top_p": (1e-320, 1.0), "min_p": (1e-320, 1), "temperature": (1e-320, 1e-5, 2), "seed": (-(2**63), 2**63 - 1),
    "min_tokens": (9,), "allowed_token_ids": ([0], [10], list(range(11))), "stop_token_ids": ([10], list(range(11))),
    "logit_bias": ({i: -100.0 for i in range(11)}, {10: 100}, {i: 100.0 for i in range(11)}),
    "_bad_words_token_ids": ([[i] for i in range(11)], [[1, 1], [10]]), "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 100), "max_tokens": (1, 10**30),
}  # fmt: skip
TOGETHER = [
    {"logprobs": 20, "prompt_logprobs": 20, "top_k": 1, "top_p": 1e-320, "min_p": 1, "temperature": 1e-5},
    {"allowed_token_ids": [3], "_bad_words_token_ids": [[3]], "min_tokens": 9, "stop_token_ids": [3], "logprobs": 11},
    {"repetition_penalty": 0.01, "logit_bias": {4: 100.0}, "frequency_penalty": 2, "temperature": 1e-5, "logprobs": 0},
]  # fmt: skip


@pytest.mark.parametrize(("where", "method"), [("here", None), ("here", "ngram"), ("ahead", None), ("ahead", "ngram")])
def test_fields_at_their_limits_on_a_vocabulary_of_eleven(monkeypatch, here, where, method):
    """Fewer tokens than a caller may ask about: nothing that a request may say ends more than the request."""
    monkeypatch.setitem(SIZES, "vocab_size", VOCAB)
    asked = [{name: value} for name, values in FIELDS.items() for value in values] + TOGETHER
    jobs = [([1, 2, 1, 2, 10], SamplingParams(**({"max_tokens": 10, "seed": i} | w))) for i, w in enumerate(asked)]
    tokens, _ = serve(here(where, method), jobs)
    assert all(0 < len(each) <= 59 and set(each) < set(range(VOCAB)) for each in tokens)

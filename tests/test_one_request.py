"""What one request brings upon itself ends that request: the others get the tokens that they get without it.

One token of the model is poison: its embedding is NaN, as an overflow in float16 makes the rest of a prompt. Whoever
has it in a prompt has no logits; whoever has not must not notice, in no batch, with no neighbour, in no reused block.
"""

from __future__ import annotations

import math

import pytest
import test_06c_scaling_out as scaling
import test_drafts_on_workers as drafting

import llama

executors, scheduling, Request = scaling.executors, scaling.scheduling, scaling.Request
SamplingParams, ParallelConfig = scaling.SamplingParams, scaling.ParallelConfig
guess, on_threads, _small_models = drafting.guess, drafting.on_threads, drafting._small_models
AHEAD = ParallelConfig(async_scheduling=True)
POISON = 99
SIZES = {**scaling.SIZES, "tie_word_embeddings": False}


@pytest.fixture
def poisoned(monkeypatch):
    """Every random model has the poison."""
    make = llama.random_model

    def random_model(*args, **sizes):
        model = make(*args, **sizes)
        model.embed_tokens[POISON] = math.nan
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
        executor = executors.make_executor(parallel) if where == "ahead" else scaling.ThreadExecutor(parallel)
        started.append(executor)
        return drafting.engine_on(executor, parallel, method, SIZES, **limits)

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


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(("where", "method"), [("here", None), ("here", "ngram"), ("ahead", None), ("ahead", "ngram"),
                                               ("threads", None), ("here", "eagle"), ("ahead", "eagle")])  # fmt: skip
def test_a_request_without_logits_ends_alone(here, monkeypatch, where, method, limits):
    engine = here(where, method, **LIMITS[limits])
    broken = [([5, 6, 7, 8, 9, POISON, *range(i)], SamplingParams(max_tokens=9, **w)) for i, w in enumerate(WISHES)]
    expected = serve(here("here", None, **LIMITS[limits]), JOBS)[0]
    drawn = method == "eagle"  # what is drawn follows the drafts
    for _ in range(2):  # the second time in blocks that had the poison
        tokens, ended = serve(engine, JOBS, broken)
        same = [i for i, (_, params) in enumerate(JOBS) if not drawn or params.temperature == 0]
        assert [tokens[i] for i in same] == [expected[i] for i in same]
        assert ended == {f"bad {i}": ([], "error", scheduling.NO_TOKEN) for i in range(len(WISHES))}
    assert not [r for r in engine.core.scheduler.requests]

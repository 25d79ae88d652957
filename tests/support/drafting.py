"""Engines on the small model that draft, in this process and on workers; what they write, and what they guess."""

from __future__ import annotations

import functools

import pytest

from engine.config import VllmConfig
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model import llama
from engine.parallel.config import ParallelConfig
from engine.request import Request, SamplingParams
from engine.spec_decode import drafters, trained
from support import worker_engines
from support.close import Close
from support.jobs import prompts_and_params
from support.networks import random_network
from support.oracle import Oracle
from support.rank_threads import WorkerThreads
from support.small_cores import SIZES
from support.tokenizing import Words, of_characters

LIMITS = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=24, num_gpu_blocks_override=80, block_size=4)
ROOMY = dict(LIMITS, max_num_seqs=8, max_num_batched_tokens=256, num_gpu_blocks_override=150,
             enable_prefix_caching=False)  # fmt: skip
JOBS = [*prompts_and_params(), ([7, 8] * 8, SamplingParams(temperature=0, max_tokens=24))]
GREEDY = [i for i, (_, params) in enumerate(JOBS) if params.temperature == 0]
METHODS = ["ngram", "suffix", "lookahead", "draft_model", "eagle", "medusa", "early_exit"]


@pytest.fixture(autouse=True)
def small_models(request, monkeypatch):
    """Their tokenizer is one character a token; trained drafters are random, and on every rank the same."""
    if "real_model" in request.fixturenames:
        return
    of_characters(monkeypatch)
    monkeypatch.setattr(trained, "load_network", lambda path, model: random_network(path.stem, model, 41))


@pytest.fixture
def guess(monkeypatch):
    """`guess(right)`: what is called ngram knows what plain decoding writes, and is right as often as that."""

    def install(right):
        truth = {tuple(prompt): tokens for (prompt, _), tokens in zip(JOBS, plain()[0])}
        monkeypatch.setattr(drafters, "NgramDrafter", lambda *limits: Oracle(truth, right, 131))

    return install


def config_of(method):
    layers = {"model": "4"} if method == "early_exit" else {}
    return {"method": method, "num_speculative_tokens": 3, "prompt_lookup_min": 1, **layers}


def engine_on(executor, parallel, method, lora=None, kv_cache_dtype="auto", **about):
    """On the executor's workers. `about`: see `worker_engines`."""
    args = EngineArgs(speculative_config=method and config_of(method), **(lora or {}),
                      async_scheduling=parallel.async_scheduling, kv_cache_dtype=kv_cache_dtype)  # fmt: skip
    return worker_engines.engine_on(executor, parallel, args, embeds_last=method != "ngram", **{**LIMITS, **about})


@pytest.fixture
def on_threads():
    """An engine as `serve` makes it, on workers that are threads."""
    started = []

    def build(tp, pp, method, ahead=False, **about):
        parallel = ParallelConfig(tp, pp, async_scheduling=ahead)
        executor = WorkerThreads(parallel)
        started.append(executor)
        return engine_on(executor, parallel, method, **about)

    yield build
    for executor in started:
        executor.shutdown()


def engine_here(method=None, sizes=SIZES, **limits):
    """The same in one process, without workers."""
    config = method and drafters.SpeculativeConfig(**config_of(method))
    about = VllmConfig(speculative_config=config)
    return LLMEngine(llama.random_model(**sizes), Words(), config=about, **{**LIMITS, **limits})


def steps(core, most=400):
    """What each step brings until nobody is left. A request that is never served is an error, not a long wait."""
    while core.scheduler.has_unfinished_requests():
        most -= 1
        assert most, f"still there: {core.scheduler.requests}"
        yield core.step()


def requests_of(jobs, priorities=None):
    """Their names are their places. Each may end with token 17."""
    return [
        Request(str(i), list(prompt), params, eos_token_id=17, arrival_time=i, priority=(priorities or [0] * 99)[i])
        for i, (prompt, params) in enumerate(jobs)
    ]


def serve(engine, jobs=JOBS, priorities=None):
    """All at once. Returns tokens, log probabilities, and every proposal by (request, tokens that it followed)."""
    core, tokens, logprobs, proposed, latest = engine.core, {}, {}, {}, {}
    scheduler, pool = core.scheduler, core.scheduler.kv_cache_manager.block_pool
    if hasattr(scheduler, "update_draft_token_ids"):
        update = type(scheduler).update_draft_token_ids

        def note(drafts):
            latest.update((name, list(token_ids)) for name, token_ids in drafts.items())
            update(scheduler, drafts)

        scheduler.update_draft_token_ids = note
    for request in requests_of(jobs, priorities):
        core.add_request(request)
    for outputs in steps(core):
        for output in outputs:
            i = int(output.request_id)
            tokens.setdefault(i, []).extend(output.new_token_ids)
            if jobs[i][1].logprobs is not None:
                found = output.new_logprobs
                assert len(output.new_token_ids) == 1 and output.new_token_ids[0] in found
                logprobs.setdefault(i, []).append({t: Close(x.logprob) for t, x in found.items()})
        for name in latest.keys() & scheduler.requests.keys():
            proposed[int(name), scheduler.requests[name].num_tokens] = latest[name]
        latest.clear()
        pool.check()
    assert pool.num_free_blocks == pool.num_blocks - 1
    return [tokens[i] for i in range(len(jobs))], logprobs, proposed


@functools.cache
def plain(tied=True):
    """What one process writes without drafts."""
    return serve(engine_here(sizes={**SIZES, "tie_word_embeddings": tied}))[:2]


def kept(worker):
    """What this rank's runner and drafter remember of requests."""
    runner = worker.runner
    books = [runner.batch.rows, runner.states]
    if drafts := runner.drafts:
        books += [drafts.hidden, drafts.k, drafts.draft_probs]
    names = {name for book in books for name in book}
    for book in vars(drafts.drafter).values() if drafts else ():
        names |= {name for name in book if isinstance(name, str)} if isinstance(book, dict) else set()
    return sorted(names)


def check_nothing_is_kept(engine):
    """Who has finished is told with the next step, so there is one more."""
    serve(engine, [([1, 2, 3], SamplingParams(temperature=0, max_tokens=1))])
    found = engine.core.runner.executor.collective_rpc(kept)
    assert all(set(names) <= {"0"} for names in found)

"""Every layout of ranks writes the tokens of one process."""

from __future__ import annotations

import common

import gc
import multiprocessing
from types import SimpleNamespace

import pytest

from engine.llm import LLM, make_llm_engine
from engine.parallel.config import ParallelConfig, get_pp_indices
from engine.parallel.workers import Workers
from engine.request import Request, SamplingParams
from support import servers
from support.rank_threads import WorkerThreads
from support.servers import ASKED, PARAMS, TEXTS
from support.small_cores import PROMPTS, parallel_core, plain_core, reference, serve
from support.tiers import and_slowly

answers, folder, shipped = servers.answers, servers.folder, servers.shipped


@pytest.mark.parametrize(
    ("tp", "pp"), [(2, 1), (1, 5), (2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(4, 1), (1, 2)])]
)
def test_every_layout_writes_the_same_tokens(tp, pp):
    """Chunks of 16, five requests of all lengths; what travelled is what the formulas say."""
    parallel = ParallelConfig(tp, pp)
    executor = WorkerThreads(parallel)
    core = parallel_core(executor, parallel)
    executor.collective_rpc("take_counts")
    tokens = []
    submit = core.runner.submit
    core.runner.submit = lambda output: (tokens.append(output.total_num_scheduled_tokens), submit(output))[1]
    assert serve(core) == reference()
    total, steps, hidden = sum(tokens), sum(n > 0 for n in tokens), 80 * 4
    for rank, counts in enumerate(executor.collective_rpc("take_counts")):
        start, end = get_pp_indices(5, rank // tp, pp)
        first, last = rank // tp == 0, rank // tp == pp - 1
        reduces = 2 * (end - start) + first
        reduced = {"calls": steps * reduces, "bytes": total * hidden * reduces}
        assert counts.get("all_reduce") == (reduced if tp > 1 else None)
        assert counts.get("send", {"bytes": 0})["bytes"] == (0 if last else total * hidden)
    held = executor.collective_rpc("held")
    assert all(len({*h.values()}) == 1 for h in held), "the last step's finished are told with the next one"
    assert all(h["requests"] < 5 for h in held), "and all others are forgotten"
    assert serve(core) == reference(), "names that are used again"
    executor.shutdown()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3), (2, 2)])
def test_prompts_are_scored_where_the_logits_are(tp, pp):
    executor, parallel, prompts = WorkerThreads(ParallelConfig(tp, pp)), ParallelConfig(tp, pp), PROMPTS[:4]
    cores = [plain_core(), parallel_core(executor, parallel)]
    told = []
    for core in cores:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2 if i % 2 else None)
            core.add_request(Request(str(i), prompt, params))
        told.append({})
        while core.scheduler.has_unfinished_requests():
            scored = {o.request_id: o.new_prompt_logprobs for o in core.step() if o.new_prompt_logprobs}
            assert not told[-1].keys() & scored.keys(), "told once"
            told[-1] |= scored
    executor.shutdown()
    assert [*told[0]] == ["1", "3"] and told[0].keys() == told[1].keys()
    for name, scores in told[0].items():
        for one, other in zip(scores[1:], told[1][name][1:], strict=True):
            assert one.keys() == other.keys()
            for t in one:
                assert other[t].rank == one[t].rank and other[t].logprob == pytest.approx(one[t].logprob, abs=1e-4)


def test_the_fullest_worker_says_how_much_cache_there_is():
    executor = SimpleNamespace(collective_rpc=lambda name, args, budget: [5, 3, 4])
    assert Workers(executor, ParallelConfig(3), None, 0).available_memory(None, 64) == 3


def test_offline_workers_are_checked_and_not_left_behind(tiny_model):
    with pytest.raises(common.InputError, match="workers load it themselves"):
        make_llm_engine(tiny_model, tensor_parallel_size=2)
    with pytest.raises(common.InputError, match="heads"):
        make_llm_engine(tensor_parallel_size=2)


@pytest.mark.parametrize("options", and_slowly(
    [], [({"tensor_parallel_size": 3},)],
    [({"pipeline_parallel_size": 2},), ({"distributed_executor_backend": "mp"},)],
), ids=str)  # fmt: skip
def test_the_offline_engine_on_workers(options, folder, answers):
    with pytest.raises(common.InputError, match="max_num_seqs"):
        make_llm_engine(str(folder), max_num_seqs=0, **options)
    assert not multiprocessing.active_children(), "whoever cannot start leaves nobody behind"

    llm = LLM(str(folder), max_model_len=256, kv_cache_gib=0.1, **options)
    found = [output.outputs[0] for output in llm.generate(TEXTS, SamplingParams(**PARAMS))]
    assert [(one.text, one.cumulative_logprob) for one in found] == [answers[asked] for asked in ASKED]
    del llm
    gc.collect()
    assert not multiprocessing.active_children(), "its workers end with it"

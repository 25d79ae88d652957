"""Layers with windows and sinks on several ranks: a table for each group of layers travels, and the tokens are those of
one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import SchedulerConfig, VllmConfig
from engine.core.hybrid_kv_cache import HybridKVCacheManager
from engine.core.scheduler import Scheduler, make_scheduler
from engine.engine_args import EngineArgs
from engine.kv_cache_interface import groups_of
from engine.kv_transfer.digest import weights_digest
from engine.llm import LLM
from engine.model import loader
from engine.model.config import LlamaConfig
from engine.parallel.config import ParallelConfig
from engine.parallel.model import TensorParallelLlama
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.shards import model_tensors
from engine.parallel.worker import WorkerSpec
from engine.request import SamplingParams
from lab.make_model import make_model
from support import small_cores
from support.rank_threads import WorkerThreads, in_threads
from support.small_cores import PROMPTS, remote_runner


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """(folder, Transformers' model), windows of 5 in every second layer."""
    folder = tmp_path_factory.mktemp("models") / "gpt_oss"
    return str(folder), make_model("gpt_oss", folder, window=5, vocab_size=131, num_hidden_layers=4)


def serve(folder, parallel, hybrid):
    executor, config = WorkerThreads(parallel), VllmConfig(hybrid_kv_cache=hybrid)
    executor.collective_rpc("load_model", WorkerSpec(folder, parallel, config=config))
    limits = SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16)
    groups = groups_of(LlamaConfig.from_folder(Path(folder)), config, 4)
    scheduler = make_scheduler(limits, 40, 4, kv_cache_groups=groups)
    assert isinstance(scheduler.kv_cache_manager, HybridKVCacheManager) == hybrid
    core = PipelineEngineCore(scheduler, remote_runner(executor, parallel, scheduler), parallel.pipeline_parallel_size)
    tokens = small_cores.serve(core)
    executor.shutdown()
    return tokens


LAYOUTS = {  # ranks, and whether each group of layers has a table of its own
    "two ranks": (ParallelConfig(2), True),
    "whole experts": (ParallelConfig(2, enable_expert_parallel=True, all2all_backend="all2all"), True),
    "two stages": (ParallelConfig(1, 2), False),
    "both": (ParallelConfig(2, 2), False),
}


@pytest.mark.parametrize("layout", [
    "two ranks", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "two ranks"),
])  # fmt: skip
def test_every_layout_writes_transformers_tokens(layout, gpt_oss):
    """Chunks, five requests of all lengths, few blocks."""
    folder, theirs = gpt_oss
    with torch.inference_mode():
        for prompt, answer in zip(PROMPTS, serve(folder, *LAYOUTS[layout])):
            scores = theirs(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
            assert scores[len(prompt) - 1 :].argmax(-1).tolist() == answer


@pytest.mark.parametrize("way", [None, "all2all"])
def test_however_many_ranks_the_digest_is_one(way, gpt_oss):
    """Sinks are cut by heads, and biases of experts as their matrices are."""
    whole, _ = loader.load(gpt_oss[0], device=torch.device("cpu"))
    parallel = ParallelConfig(2, enable_expert_parallel=bool(way), all2all_backend=way or "all2all")

    def digest(group):
        return weights_digest(TensorParallelLlama(parallel.shared_experts(whole.config), model_tensors(whole), group))

    assert {*in_threads(2, digest)} == {weights_digest(whole)}


@pytest.mark.slow
def test_experts_with_biases_move(gpt_oss):
    """Their biases go with them."""
    folder, _ = gpt_oss
    about = {"enable_expert_parallel": True, "all2all_backend": "all2all"}
    moves = ParallelConfig(2, **about, enable_eplb=True, num_redundant_experts=2, eplb_step_interval=2)
    assert serve(folder, moves, True) == serve(folder, ParallelConfig(), True)


@pytest.mark.parametrize("about", [pytest.param({"async_scheduling": True}, marks=pytest.mark.slow), {
    "async_scheduling": True,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
}], ids=["ahead", "ahead with drafts"])  # fmt: skip
def test_a_step_ahead_the_tokens_are_the_same(about, gpt_oss):
    folder, _ = gpt_oss
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = []
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "num_gpu_blocks_override": 40, "block_size": 4}
    for each in ({}, about):
        llm = LLM(folder, max_model_len=96, kv_cache_gib=0.05, **limits, **each)
        assert isinstance(llm.llm_engine.core.scheduler.kv_cache_manager, HybridKVCacheManager)
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
        if llm.llm_engine.config.workers:
            llm.llm_engine.config.workers.executor.shutdown()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("about", [
    {}, {"enable_lora": True}, {"pipeline_parallel_size": 2}, {"plug": {"scheduler": Scheduler}},
    {"kv_offloading_size": 0.1},
], ids=str)  # fmt: skip
def test_who_counts_on_one_table_gets_one(about):
    assert EngineArgs(**about).vllm_config().hybrid_kv_cache == (not about)

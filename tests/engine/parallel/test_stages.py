"""A pipeline's stages: what each holds, what a block costs it, what is on the way to the next one."""

from __future__ import annotations

import functools
import weakref
from types import SimpleNamespace

import pytest
import torch

from engine.distributed.group import GroupCoordinator
from engine.model import llama
from engine.parallel import stages
from engine.parallel import worker as worker_file
from engine.parallel.config import ParallelConfig
from engine.parallel.messages import StepMessage
from engine.parallel.stages import PipelineGroup, skeleton
from engine.parallel.worker import Worker, WorkerSpec
from engine.quantization.kv_codes import block_bytes
from support.rank_threads import WorkerThreads
from support.small_cores import SIZES, scheduler_of


def test_a_skeleton_costs_a_block_what_the_largest_rank_pays():
    config = llama.random_model(**SIZES).config
    size = functools.partial(block_bytes, block_size=16, kv_cache_dtype="auto")
    whole = size(skeleton(config, ParallelConfig(), torch.float32))
    assert size(skeleton(config, ParallelConfig(2, 1), torch.float32)) == whole // 2
    assert size(skeleton(config, ParallelConfig(2, 2), torch.float32)) == whole // 2 * 3 // 5
    assert skeleton(config, ParallelConfig(8, 1), torch.float32).num_kv_heads == 1


@pytest.mark.parametrize("qk_norm", [False, True])
def test_weights_are_divided(qk_norm):
    sizes = {**SIZES, "qk_norm": qk_norm}
    whole = llama.random_model(**sizes).num_parameters
    executor = WorkerThreads(ParallelConfig(1, 5))
    held = executor.collective_rpc("load_model", WorkerSpec(sizes, ParallelConfig(1, 5)))
    executor.shutdown()
    embedding, norm = 131 * 80, 80
    assert sum(held) == whole + embedding + 4 * norm, "tied: the last stage has the embedding, too; norms have all"
    assert max(held[1:4]) < whole / 5


def test_an_embedding_that_is_not_tied_is_on_the_first_stage_only():
    sizes, parallel = {**SIZES, "tie_word_embeddings": False}, ParallelConfig(1, 2)
    executor = WorkerThreads(parallel)
    held = executor.collective_rpc("load_model", WorkerSpec(sizes, parallel))
    executor.shutdown()
    assert sum(held) == llama.random_model(**sizes).num_parameters + 80, "only the last norm is on both"


def test_no_more_is_on_the_way_than_there_are_stages(monkeypatch):
    group, waited, buffers = PipelineGroup(range(2), 0), [], []

    def work(x, rank, group):
        buffers.append(weakref.ref(x))
        return SimpleNamespace(wait=functools.partial(waited.append, x.item()))

    monkeypatch.setattr(torch.distributed, "isend", work)
    for i in range(5):
        group.send(torch.tensor(i))
    assert waited == [0, 1, 2] and len(group.on_the_way) == 2
    assert [buffer() is not None for buffer in buffers] == [False] * 3 + [True] * 2, "it lives until it has left"


def test_waiting_for_the_stage_before_is_not_computing(monkeypatch):
    worker = Worker()
    worker.load_model(WorkerSpec(SIZES, ParallelConfig()))
    worker.initialize_from_config(scheduler_of().config, 9, 4, 0)
    times = iter([10, 13, 20, 27])  # of the step: start and end; within it, of the wait
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(stages, "time", clock)
    monkeypatch.setattr(worker_file, "time", clock)
    monkeypatch.setattr(torch.distributed, "recv", lambda *args, **options: None)
    group = PipelineGroup(range(2), 1)
    group.recv((3,), torch.float32)
    assert group.waited == 3
    worker.pp, worker.runner = group, SimpleNamespace(execute_model=lambda output: group.__dict__.update(waited=8))
    worker.execute_model(StepMessage({}, [], [], [], [], []))
    assert worker.take_spans() == [(25, 27)] and worker.take_spans() == []


@pytest.mark.parametrize("rank", range(4))
def test_ranks_of_all_engines_are_one_world_and_shards_stay_in_their_engine(rank, monkeypatch):
    def new_group(ranks, world):
        made.append(list(ranks))
        return GroupCoordinator(ranks, ranks.index(rank)) if rank in ranks else None

    made = []
    monkeypatch.setattr(stages, "new_group", new_group)
    config = ParallelConfig(2, enable_expert_parallel=True, data_parallel_size=2, data_parallel_rank=rank // 2)
    tp, pp = stages.make_groups(GroupCoordinator(range(4), rank), config)
    assert tp.ranks == [[0, 1], [0, 1], [2, 3], [2, 3]][rank] and pp.ranks == [rank]
    assert made == [[0, 1], [2, 3], [0], [1], [2], [3]], "all ranks make all groups, in one order"

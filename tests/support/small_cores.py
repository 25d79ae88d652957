"""Engine cores on a small random model, in one process, on workers, with steps in flight; and what one process writes.

The model has five layers, so stages differ in size; eight heads that share four KV heads; a vocabulary that no number
of ranks divides.
"""

from __future__ import annotations

import functools

from engine.config import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.scheduler import make_scheduler
from engine.model import llama
from engine.parallel.config import ParallelConfig
from engine.parallel.executors import UniProcExecutor
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.remote_runner import RemoteRunner
from engine.parallel.worker import WorkerSpec
from engine.parallel.workers import Workers
from engine.request import Request, SamplingParams
from support.runners import runner_of

SIZES = dict(seed=5, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96,
             vocab_size=131)  # fmt: skip
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], list(range(40)), [35], [7] * 20]
OUTPUTS = [9, 4, 7, 12, 6]


@functools.cache
def small_model():
    """Nobody changes it."""
    return llama.random_model(**SIZES)


def scheduler_of(blocks=60, budget=16, policy="fcfs", caching=True):
    config = SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=budget, policy=policy)
    return make_scheduler(config, blocks, 4, enable_prefix_caching=caching)


def plain_core(model=None, **limits):
    """In this process, without workers."""
    scheduler = scheduler_of(**limits)
    return EngineCore(scheduler, runner_of(model or small_model(), scheduler))


def remote_runner(executor, parallel, scheduler):
    manager = scheduler.kv_cache_manager
    workers = Workers(executor, parallel, None)
    return RemoteRunner(workers, scheduler.config, manager.block_pool.num_blocks, manager.block_size)


def parallel_core(executor, parallel, **limits):
    """On the executor's workers."""
    executor.collective_rpc("load_model", WorkerSpec(SIZES, parallel))
    scheduler = scheduler_of(**limits)
    return PipelineEngineCore(scheduler, remote_runner(executor, parallel, scheduler), parallel.pipeline_parallel_size)


@functools.cache
def one_worker():
    """In this process, with the model. It computes at once what it tells when somebody asks."""
    executor = UniProcExecutor()
    executor.collective_rpc("load_model", WorkerSpec(SIZES, ParallelConfig()))
    return executor


def core_in_flight(depth, **limits):
    """What a core with up to `depth` steps in flight sees."""
    scheduler = scheduler_of(**limits)
    return PipelineEngineCore(scheduler, remote_runner(one_worker(), ParallelConfig(), scheduler), depth)


def serve(core, prompts=PROMPTS, outputs=OUTPUTS, priorities=None, **fields):
    """Tokens by request, everything handed in at once; afterwards nothing is left in the pool."""
    got = {}
    for i, (prompt, n) in enumerate(zip(prompts, outputs)):
        params = SamplingParams(**{"temperature": 0, "max_tokens": n, "ignore_eos": True, **fields})
        core.add_request(Request(str(i), list(prompt), params, arrival_time=i, priority=(priorities or [0] * 99)[i]))
    while core.scheduler.has_unfinished_requests():
        for output in core.step():
            got.setdefault(int(output.request_id), []).extend(output.new_token_ids)
    pool = core.scheduler.kv_cache_manager.block_pool
    pool.check()
    assert pool.num_free_blocks == pool.num_blocks - 1 and not core.scheduler.waiting and not core.scheduler.running
    return [got[i] for i in range(len(prompts))]


@functools.cache
def reference():
    """What one process writes."""
    return serve(plain_core())

"""The workers of one engine: an executor whose processes have the model.

Owns the executor; called when an engine with workers starts. It never sends a step. vLLM: `vllm/v1/engine/core.py`,
where `EngineCore` makes its executor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.model import folders, llama
from engine.model.config import LlamaConfig
from engine.parallel.config import ParallelConfig
from engine.parallel.executors import Executor, MultiprocExecutor, ThreadExecutor, UniProcExecutor
from engine.parallel.ray_executor import RayExecutor
from engine.parallel.stages import Skeleton, check_quantization, skeleton
from engine.parallel.worker import WorkerSpec
from engine.quantization.loader import stored_quantization


@dataclass
class Workers:
    """What `make_engine` has in place of a model: an executor whose workers have it."""

    executor: Executor
    parallel: ParallelConfig
    model: Skeleton
    parameters: int = 0  # of the whole model

    def available_memory(self, args: Any, budget: int) -> int:
        """Bytes for the KV cache of each worker: what the fullest one has left."""
        return min(self.executor.collective_rpc("determine_available_memory", args, budget))

    def __str__(self) -> str:
        p = self.parallel
        if p.data_parallel_size > 1:
            return f"TP {p.tensor_parallel_size}, experts shared by {p.data_parallel_size} engines ({p.backend})"
        if p.world_size == 1:
            return f"a worker ({p.backend}{', a step ahead' if p.async_scheduling else ''})"
        return f"{p.world_size} workers (TP {p.tensor_parallel_size} x PP {p.pipeline_parallel_size}, {p.backend})"


def start_workers(args: Any, dtype: torch.dtype) -> Workers:
    """Processes with a part of the model each, as the engine's arguments say. Raises InputError if it cannot be divided
    like that."""
    folder = folders.model_folder(args.model)
    parallel = ParallelConfig(
        args.tensor_parallel_size,
        args.pipeline_parallel_size,
        args.distributed_executor_backend,
        args.async_scheduling,
        args.enable_expert_parallel,
        args.all2all_backend,
        args.enable_eplb,
        args.num_redundant_experts,
        args.eplb_step_interval,
        *args.shares_experts_with,
    )
    config = LlamaConfig.from_folder(folder, True, args.generation_config)
    parallel.check(config)
    if args.quantization and stored_quantization(folder, args.quantization) is None:
        check_quantization(args.quantization)
    executor = make_executor(parallel)
    spec = WorkerSpec(
        args.model,
        parallel,
        dtype,
        config=args.vllm_config(),
        guided=True,
        quantization=args.quantization,
        embeds_last=args.speculation is not None and args.speculation.method in ("draft_model", "eagle"),
        generation_config=args.generation_config,
        tokenizer=args.tokenizer,
        load_format=args.load_format,
    )
    executor.collective_rpc("load_model", spec)
    parameters = sum(torch.Size(shape).numel() for shape in llama.tensor_shapes(config).values())
    return Workers(executor, parallel, skeleton(config, parallel, dtype), parameters)


def make_executor(parallel: ParallelConfig, ray_address: str | None = None) -> Executor:
    """The executor of `backend` (uni, mp, ray) for all ranks of `parallel`."""
    if parallel.backend == "uni":
        return ThreadExecutor() if parallel.async_scheduling else UniProcExecutor()
    if parallel.backend == "ray":
        return RayExecutor(parallel.world_size, ray_address)
    engines, n = parallel.data_parallel_size, parallel.world_size
    place = (parallel.data_parallel_rank * n, engines * n, parallel.data_parallel_master_port)
    return MultiprocExecutor(n, among=place if engines > 1 else None)

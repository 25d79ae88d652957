"""An engine core, put together: a scheduler with its collaborators, and what runs the model, here or with workers.

Owns the order in which they meet; called by `LLMEngine`. It never steps. vLLM: `EngineCore.__init__` in
`vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import common

from engine.attention.latent import check_latents
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore, check_pool
from engine.core.scheduler import make_scheduler
from engine.kv_cache_interface import groups_of
from engine.kv_transfer.connectors import make_connector
from engine.lora.manager import LoRAModelManager
from engine.model import llama
from engine.parallel.adapters import RemoteSlotMemory
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.remote_runner import RemoteRunner
from engine.parallel.transfers import RemoteConnector
from engine.seams import Grammar
from engine.worker.assemble import check_attention, make_runner


def make_core(  # noqa: PLR0913  one for each thing that others made
    model: llama.Llama,
    limits: SchedulerConfig,
    num_blocks: int,
    block_size: int,
    config: VllmConfig,
    *,
    enable_prefix_caching: bool = True,
    grammar: Grammar | None = None,
    lora: LoRAModelManager | None = None,
    seed: int = 0,
) -> EngineCore:
    """The core of one engine; with workers, `model` is without weights. Raises InputError."""
    if model.config.mla:
        check_latents(config)
    workers, transfers = config.workers, config.kv_transfer_config
    whole = getattr(model, "whole_config", model.config)
    check_attention(whole, config)  # before workers are asked
    remote = RemoteConnector(transfers) if transfers and workers else None
    local = make_connector(transfers) if transfers and not workers else None
    if lora and workers and lora.config.memory != "slots":
        raise common.InputError(f"memory {lora.config.memory!r}: workers have slots")
    scheduler = make_scheduler(
        limits,
        num_blocks,
        block_size,
        enable_prefix_caching,
        config.plug,
        groups_of(whole, config, block_size),
        connector=remote or local,
        drafts=config.speculative_config,
        adapters=lora,
        async_scheduling=config.async_scheduling,
    )
    check_pool(scheduler)  # before the memory is taken
    if lora:
        lora.block_pool = scheduler.kv_cache_manager.block_pool
    if workers:
        runner = RemoteRunner(workers, limits, num_blocks, block_size, connector=remote, seed=seed)
        if lora:
            lora.model_config, lora.memory = workers.model.whole_config, RemoteSlotMemory(workers.executor, model.dtype)
        return PipelineEngineCore(scheduler, runner, workers.parallel.max_concurrent_batches)
    runner = make_runner(
        model, limits, num_blocks, block_size, config, grammar=grammar, lora=lora, connector=local, seed=seed
    )
    return EngineCore(scheduler, runner)

"""A model runner that fits a scheduler, which may be a lesson's own."""

from __future__ import annotations

from typing import Any

from engine.config import VllmConfig
from engine.model import llama
from engine.worker.assemble import make_runner
from engine.worker.model_runner import ModelRunner


def runner_of(model: llama.Llama, scheduler: Any, config: VllmConfig | None = None, **about: Any) -> ModelRunner:
    """With as many blocks as the scheduler's manager hands out."""
    manager = scheduler.kv_cache_manager
    return make_runner(model, scheduler.config, manager.block_pool.num_blocks, manager.block_size, config, **about)

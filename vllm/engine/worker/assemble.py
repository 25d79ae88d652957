"""A model runner, put together from its parts.

Owns the order in which they meet; called by whoever has a model and wants to run steps. It never runs one. vLLM:
`load_model` and `initialize_kv_cache` in `vllm/v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

import common

from collections.abc import Sequence
from typing import Any

from engine import plugs, registry
from engine.attention.latent import LatentAttention
from engine.attention.windowed import WindowedAttention
from engine.config import SchedulerConfig, VllmConfig, check_model_len
from engine.kv_cache_interface import KVCacheGroup, groups_of
from engine.lora.layers import AppliedAdapters, adapted_model
from engine.model import llama
from engine.model.config import LlamaConfig
from engine.model.packed_linear import pack_weights
from engine.quantization.kv_cache import QuantizedAttention
from engine.sampling.sampler import Sampler
from engine.seams import AttentionBackend, Grammar, WorkerConnector
from engine.spec_decode.drafters import Drafter, make_drafter
from engine.spec_decode.verifier import DraftVerifier
from engine.worker.cuda_graphs import CapturedModel
from engine.worker.input_batch import InputBatch
from engine.worker.model_runner import ModelRunner


def make_runner(  # noqa: PLR0913  one for each thing that others made
    model: llama.Llama,
    limits: SchedulerConfig,
    num_blocks: int,
    block_size: int,
    config: VllmConfig | None = None,
    *,
    grammar: Grammar | None = None,
    lora: Any = None,
    connector: WorkerConnector | None = None,
    has_logits: bool = True,
    seed: int = 0,
    runner_class: type[ModelRunner] = ModelRunner,
) -> ModelRunner:
    """What runs `model` within `limits`, on a cache of its own. Raises InputError for what does not fit together.

    `lora` is who knows which adapter is in which slot, and what the layers ask.
    """
    config = config or VllmConfig()
    check_model_len(limits.max_model_len, model.config.max_position_embeddings)
    groups = groups_of(getattr(model, "whole_config", model.config), config, block_size)
    attention = attention_of(model.config, config, groups)
    model = pack_weights(model)
    cache = attention.make_cache(model, num_blocks, block_size)
    batch = InputBatch(limits.max_num_seqs, limits.max_model_len, block_size, len(groups))
    sampler = plugs.part("sampler", config.plug, Sampler)
    runner = runner_class(
        model, cache, attention, batch, sampler=sampler, grammar=grammar, has_logits=has_logits, seed=seed
    )
    if connector:
        connector.register_kv_caches(cache.layers, model)
        runner.connector = connector
    if drafts := config.speculative_config:
        if not cache.can_roll_back:
            raise common.InputError(
                "speculative_config: not with a KV cache that quantizes a block when it is full "
                f"({config.kv_cache_dtype}): rejected drafts could not be taken back out of it"
            )
        # Who has no logits does not sample, so its drafter is never asked.
        drafter = plugs.part("drafter", config.plug, make_drafter, drafts, model) if has_logits else Drafter()
        rule = plugs.load("rejection", config.plug.get("rejection") or registry.fill("rejection"))
        runner.drafts = DraftVerifier(drafts, drafter, rule, model, limits.max_model_len, config.async_scheduling)
    # A graph replays its kernels alone: no connector could act between layers, and adapters would never change.
    if not (config.enforce_eager or lora or connector or config.kv_cache_dtype != "auto"):
        K = drafts.num_speculative_tokens if drafts else 0
        graphs = CapturedModel(  # whose whole steps have one table
            model, cache, runner.attend, limits, num_speculative_tokens=K, full=not groups
        )
        runner.graphs = graphs if graphs.sizes else None  # without a GPU, nothing is captured
    if lora:
        lora.attach(model, cache)
        runner.adapters = AppliedAdapters(lora)
        add_lora = plugs.load("lora", config.plug.get("lora") or registry.fill("lora"))
        runner.model = adapted_model(model, lora, add_lora)
    return runner


def attention_of(model: LlamaConfig, config: VllmConfig, groups: Sequence[KVCacheGroup] = ()) -> AttentionBackend:
    """The backend for what this model's layers see, in `groups` with a table each, or all with one. Raises InputError
    for one that does not know it."""
    if model.mla and "attention" not in config.plug:
        return LatentAttention()
    if not (model.sliding_windows or model.attention_sinks):
        return find_attention(config)
    check_attention(model, config)
    return WindowedAttention([group.layers for group in groups] or [range(model.num_hidden_layers)])


def check_attention(model: LlamaConfig, config: VllmConfig) -> None:
    """Raises InputError for attention that does not know what this model's layers see."""
    for name, used in (
        ("kv_cache_dtype", config.kv_cache_dtype != "auto"),
        ("attention_backend", config.attention_backend != "unified"),
        ("plug attention", "attention" in config.plug),
    ):
        if used and (model.sliding_windows or model.attention_sinks):
            raise common.InputError(f"{name}: not for a model whose layers have windows or sinks")


def find_attention(config: VllmConfig) -> AttentionBackend:
    """The backend that a configuration names, or somebody else's. Raises InputError for one that there is not."""
    if config.kv_cache_dtype != "auto":  # which nobody else's backend goes with
        return QuantizedAttention(config.kv_cache_dtype)
    return plugs.part("attention", config.plug, registry.fill(f"attention.{config.attention_backend}"))

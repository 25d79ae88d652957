"""Attention on latents: one paged vector a token and layer, which is key and value of all heads.

Owns the cache of a model with latent attention, and how a step's tokens meet it; the runner has it in the place of a
backend for keys and values. Its kernel is lesson 09's. It never knows a head's own keys. vLLM:
`vllm/v1/attention/backends/mla/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine import registry
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_paged import attend_latents, plan_latents
from engine.config import VllmConfig
from engine.model import llama


def check_latents(config: VllmConfig) -> None:
    """Raises InputError for what an engine cannot have beside latents."""
    drafts = config.speculative_config
    for name, used in (
        ("kv_cache_dtype", config.kv_cache_dtype != "auto" and config.kv_cache_dtype),
        ("enable_lora", config.lora_config is not None),
        ("speculative_config: method", drafts and drafts.method in ("draft_model", "eagle") and drafts.method),
    ):
        if used:
            value = "" if used is True else f" {used!r}"
            raise common.InputError(f"{name}{value}: not with a model whose attention keeps latents (MLA)")


class LatentKVCache:
    """The memory of every layer: one tensor [1, num_blocks, block_size, 1, R + P] each. Where others have keys and then
    values of some heads, this has one vector for all: what copies blocks need not know."""

    can_roll_back = True  # what is written behind the last token of a sequence is overwritten later

    def __init__(self, model: llama.Llama, num_blocks: int, block_size: int) -> None:
        assert model.config.mla
        self.block_size, self.rank = block_size, model.config.mla.kv_lora_rank
        shape = (1, num_blocks, block_size, 1, model.config.mla.latent_size)
        layers = range(model.config.num_hidden_layers)
        self.layers = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in layers]

    def release(self, blocks: Sequence[int]) -> None:
        """A request has left these blocks: here, nothing else belongs to them."""


class LatentAttention:
    """The seam's backend (`AttentionBackend`) for models that ask for MQA whose value is its key.

    Prompts are absorbed like decodes. vLLM makes keys and values of a prompt's context instead: fewer multiplications
    for a pair of tokens (N + P + V of a head, and not 2 R + P), and a second kernel. Here a prompt's tokens are as many
    decodes: in the kernel, one token's heads fill a tile by themselves.
    """

    def __init__(self) -> None:
        self.reshape_and_cache, self.mla_decode = registry.fill("cache.write"), registry.fill("decode.latent")

    def make_cache(self, model: llama.Llama, num_blocks: int, block_size: int) -> LatentKVCache:
        """Half of what a backend for one KV head of this size would take."""
        return LatentKVCache(model, num_blocks, block_size)

    def plan(self, meta: AttentionMetadata, cache: Any) -> llama.Attend:
        """k [T, 1, R + P] into the cache, then one call for prompts, chunks and decodes."""
        look_back = self._plan(meta, cache)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            latents = cache.layers[layer]
            both = latents.expand(2, -1, -1, -1, -1)  # keys and values: the same memory
            self.reshape_and_cache(k, k, both, meta.slot_mapping)
            return look_back(q, latents[0, :, :, 0])

        return attend

    def _plan(
        self, meta: AttentionMetadata, cache: LatentKVCache
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """q [T, H, R + P], a layer's cache [num_blocks, block_size, R + P] -> [T, H, R], or R + P."""
        shape = cache.layers[0][0, :, :, 0].shape
        if not common.runs_kernel(cache.layers[0]):
            plan = plan_latents(meta.block_table, meta.query_lens, meta.seq_lens, shape)
            return functools.partial(attend_latents, plan=plan)
        table, lens = meta.block_table, meta.seq_lens
        if max(meta.query_lens) > 1:
            T = len(meta.positions)
            table = table.repeat_interleave(meta.query_start_loc.diff(), 0, output_size=T)
            lens = (meta.positions + 1).int()  # a token sees what came before it, and itself
        step = {"block_table": table, "seq_lens": lens, "max_seq_len": meta.max_seq_len}
        return functools.partial(self.mla_decode, **step, kv_lora_rank=cache.rank, scale=shape[2] ** -0.5)

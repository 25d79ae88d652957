"""One rank of a Llama: a narrower Llama whose layers know their group.

Owns the wrapping of its layers; made by workers, and called like the whole model. It never knows a scheduler.
vLLM: `vllm/model_executor/models/llama.py` (there, every model is made of parallel layers).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from engine.distributed.group import GroupCoordinator
from engine.model import folders, llama, weights
from engine.model.config import LlamaConfig
from engine.parallel.experts import local_experts, shared_by, with_local
from engine.parallel.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from engine.parallel.sharding import shard_config
from engine.parallel.shards import Tensors, model_tensors, shard_tensors


class TensorParallelLlama(llama.Llama):
    """One rank of a Llama: a narrower Llama whose layers know their group. It has the interface of the whole one.

    `config` is that of the whole model; `num_heads` and `num_kv_heads` are this rank's.
    """

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Tensors,
        group: GroupCoordinator,
        dtype: torch.dtype = torch.float32,
        ep: GroupCoordinator | None = None,
    ) -> None:
        """`tensors(name)` returns whole weights, best lazily: only this rank's part of each is kept. `ep` are the ranks
        that share the experts; None: those that share all else."""
        ep = ep or group
        mine = shard_config(config, group.world_size, group.rank_in_group, ep.world_size, ep.rank_in_group)
        super().__init__(mine, shard_tensors(tensors, config, group), dtype, group.device)
        self.config, self.group = config, group
        self.embedding = VocabParallelEmbedding(self.embed_tokens, group)
        kinds: dict[str, Callable[[Any, GroupCoordinator], Callable[[torch.Tensor], torch.Tensor]]] = {
            "qkv_proj": QKVParallelLinear,
            "qkv_a_proj": ColumnParallelLinear,
            "q_b_proj": ColumnParallelLinear,
            "o_proj": RowParallelLinear,
            "gate_up_proj": MergedColumnParallelLinear,
            "down_proj": RowParallelLinear,
            "shared_gate_up_proj": MergedColumnParallelLinear,
            "shared_down_proj": RowParallelLinear,
            "lm_head": functools.partial(ParallelLMHead, vocab_size=config.vocab_size),
        }
        for name, local in self.linear.items():
            self.linear[name] = kinds[name.split(".")[-1]](local, group)
        self.moe = {i: shared_by(layer, group, ep) for i, layer in self.moe.items()}

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(token_ids)  # [T, hidden], the same on all ranks

    def output_head(self, token_ids: torch.Tensor) -> ParallelLMHead:
        """Cut like the whole one. Its logits are gathered, so that all ranks guess the same, to the last bit."""
        head: Any = self.linear["lm_head"]
        rows = VocabParallelEmbedding(head.weight, self.group)(token_ids)  # [N, hidden]
        mine = ParallelLMHead.shard(rows, self.group.rank_in_group, self.group.world_size)
        return ParallelLMHead(llama.Linear(mine.clone()), self.group, len(token_ids))


def load_shard(
    path_or_id: str | None, group: GroupCoordinator, dtype: torch.dtype = torch.float32
) -> TensorParallelLlama:
    """One rank's part of a model folder (or hub id, or the default model), without ever holding the whole.

    The file is mapped, not read: cutting a tensor touches the pages that the rank keeps, and no others for long.
    """
    folder = folders.model_folder(path_or_id)
    with contextlib.ExitStack() as stack:
        tensors = weights.open_weights(folder, stack)
        return TensorParallelLlama(LlamaConfig.from_folder(folder), tensors, group, dtype)


def shard_model(model: llama.Llama, group: GroupCoordinator) -> TensorParallelLlama:
    """One rank's part of a model that is in memory whole; `model` is left alone."""
    return TensorParallelLlama(model.config, model_tensors(model), group, model.dtype)


def map_local(model: TensorParallelLlama, change: Callable[[llama.Llama], llama.Llama]) -> TensorParallelLlama:
    """Apply what replaces layers (packing, quantization) to the matrices that this rank multiplies with.

    The collectives stay around them; `model` itself is left alone.
    """
    inner, outer = copy.copy(model), copy.copy(model)
    whole: dict[str, Any] = dict(model.linear)
    inner.linear = {name: layer.local for name, layer in whole.items()}
    inner.moe = {i: dataclasses.replace(layer, experts=local_experts(layer)) for i, layer in model.moe.items()}
    different = change(inner)
    changed, outer.linear = different.linear, {}
    outer.moe = {i: with_local(layer, different.moe[i].experts) for i, layer in model.moe.items()}
    for name, layer in whole.items():
        outer.linear[name] = part = copy.copy(layer)
        part.local = changed[name]
    return outer

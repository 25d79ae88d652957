"""The experts of a layer on several ranks: a slice of every expert on each, or whole experts, dealt out.

Owns what travels; a model's layers of experts ask these in the place of experts that are here. What multiplies is
`local`, and never knows a rank. vLLM: `vllm/model_executor/layers/fused_moe/`: `all2all_utils.py`,
`prepare_finalize/`. Read: Lepikhin et al. 2020 (GShard).
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from engine.distributed.group import GroupCoordinator
from engine.experts.config import MoEConfig
from engine.experts.layer import Experts, MoELayer
from engine.parallel.sharding import experts_of


@dataclasses.dataclass
class ReducedExperts:
    """All ranks have all tokens, and each adds what its part of the experts says: one all-reduce.

    A part is a slice of every expert, which is tensor parallelism, or all of some experts: the others' pairs count as
    nothing here. Bytes do not depend on k: 2 · T · H · (n − 1) / n leave each rank.
    """

    local: Experts
    group: GroupCoordinator

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Shapes: x [T, H], weights, ids [T, k] -> [T, H], the same on all ranks."""
        return self.group.all_reduce(self.local(x, weights, ids))

    @property
    def held(self) -> range:
        """The experts of which a part is here."""
        return self.local.held

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of this rank's part."""
        return self.local.matrices

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Of this rank's part."""
        return self.local.tensors


@dataclasses.dataclass
class DispatchedExperts:
    """Each rank sends a share of the tokens to whoever has their experts, and gets the answers back: two all-to-alls.

    After attention all ranks hold the same tokens, so the share is an n-th of them, and at the end all are gathered. A
    pair travels only if its expert lives elsewhere: 2 · k · T · H / n · (n − 1) / n leave each rank, and the gathering
    takes T · H · (n − 1) / n more. That is less than an all-reduce as long as k < n / 2.
    """

    local: Experts
    group: GroupCoordinator
    config: MoEConfig

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Shapes: x [T, H], weights, ids [T, k], the same on all ranks -> [T, H], the same on all ranks."""
        T, n, r = len(x), self.group.world_size, self.group.rank_in_group
        share = -(-T // n)
        mine = slice(r * share, (r + 1) * share)
        y = dispatch(x[mine], weights[mine], ids[mine], self.local, self.group, self.config)
        return self.group.all_gather(F.pad(y, (0, 0, 0, share - len(y))), dim=0)[:T]

    @property
    def held(self) -> range:
        """The experts of which a part is here."""
        return self.local.held

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of this rank's part."""
        return self.local.matrices

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Of this rank's part."""
        return self.local.tensors


def dispatch(  # noqa: PLR0913  three tensors of a layer, and who answers
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    local: Experts,
    group: GroupCoordinator,
    config: MoEConfig,
) -> torch.Tensor:
    """This rank's own tokens through the experts of all ranks. Every rank must call it, also with no token.

    1. sort the pairs of a token and an expert by expert, and so by the rank that has it
    2. all-to-all: hidden states, and which expert they want; how many come from whom goes ahead of them
    3. each rank computes whatever has come for its experts
    4. all-to-all back, and each token's answers are weighted and added

    Shapes: x [T, H], weights, ids [T, k] -> [T, H].
    """
    k, n, pairs = ids.shape[1], group.world_size, ids.flatten()
    firsts = torch.tensor([experts_of(config, r, n).start for r in range(n)], device=ids.device)
    owner = torch.searchsorted(firsts, pairs, right=True) - 1  # the last that begins at or before it
    order = pairs.argsort(stable=True)
    counts = torch.bincount(owner, minlength=n).tolist()
    arrived, senders = group.all_to_all(x[order // k], counts)
    wanted, _ = group.all_to_all(pairs[order], counts)
    done = local(arrived, torch.ones(len(wanted), 1, device=x.device), wanted[:, None])
    back, _ = group.all_to_all(done, senders)
    said = torch.empty_like(back)
    said[order] = back * weights.flatten()[order, None].to(back.dtype)
    return said.unflatten(0, ids.shape).sum(1)


def shared_by(layer: MoELayer, group: GroupCoordinator) -> MoELayer:
    """The layer whose experts are this rank's part, as one of all ranks."""
    if layer.config.expert_parallel == "all2all":
        experts: Experts = DispatchedExperts(layer.experts, group, layer.config)
    else:
        experts = ReducedExperts(layer.experts, group)
    return dataclasses.replace(layer, experts=experts)


def local_experts(layer: MoELayer) -> Experts:
    """What `shared_by` was given: this rank's part."""
    assert isinstance(layer.experts, ReducedExperts | DispatchedExperts)
    return layer.experts.local

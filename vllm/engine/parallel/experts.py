"""The experts of a layer on several ranks: a slice of every expert on each, or whole experts, dealt out.

Owns what travels; a model's layers of experts ask these in the place of experts that are here. What multiplies is
`local`, and never knows a rank. vLLM: `vllm/model_executor/layers/fused_moe/`: `all2all_utils.py`,
`prepare_finalize/`; `vllm/distributed/eplb/`. Read: Lepikhin et al. 2020 (GShard).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.distributed.group import GroupCoordinator
from engine.experts.layer import Experts, MoELayer
from engine.experts.stacked import StackedExperts
from engine.parallel.eplb import Placement, rebalance_experts, slot_tables


@dataclasses.dataclass
class SharedExperts:
    """What multiplies on this rank, and what is known of it. How tokens get there, and back, is a subclass's."""

    local: Experts

    @property
    def held(self) -> range:
        """The experts of which a part is here, or this rank's slots."""
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
class ReducedExperts(SharedExperts):
    """All ranks have all tokens, and each adds what its part of the experts says: one all-reduce.

    A part is a slice of every expert, which is tensor parallelism, or all of some experts: the others' pairs count as
    nothing here. Bytes do not depend on k: 2 · T · H · (n − 1) / n leave each rank.
    """

    group: GroupCoordinator

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Shapes: x [T, H], weights, ids [T, k] -> [T, H], the same on all ranks."""
        return self.group.all_reduce(self.local(x, weights, ids))


@dataclasses.dataclass
class GatheredExperts(SharedExperts):
    """Engines share experts: every rank gets the tokens of all, and the sums of what ranks know go back to each.

    Engines have different tokens, and different numbers of them, so all are filled up to the most. Bytes do not depend
    on k: with T the most, (n − 1) · T · H leave each rank, and as many go back. vLLM: `allgather_reducescatter`.
    """

    group: GroupCoordinator  # all ranks of all engines
    tp: GroupCoordinator  # those of this engine, which hold the same tokens

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Shapes: x [T, H], weights, ids [T, k], the same on all ranks of an engine -> [T, H], the same on them."""
        return by_shares(self._exchange, x, weights, ids, self.tp)

    def _exchange(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        T = len(x)
        most = int(self.group.all_gather(torch.tensor([T], device=x.device)).max())
        if most == 0:
            return x
        everybodys = [self.group.all_gather(F.pad(part, (0, 0, 0, most - T)), dim=0) for part in (x, weights, ids)]
        return self.group.reduce_scatter(self.local(*everybodys))[:T]  # who is no token counts as nothing: weights 0


@dataclasses.dataclass
class DispatchedExperts(SharedExperts):
    """Each rank sends a share of the tokens to whoever has their experts, and gets the answers back: two all-to-alls.

    After attention all ranks of an engine hold the same tokens, so the share is an n-th of them, and at the end all are
    gathered. A pair travels only if its expert lives elsewhere: 2 · k · T · H / n · (n − 1) / n leave each rank, and
    the gathering takes T · H · (n − 1) / n more. That is less than an all-reduce as long as k < n / 2. Where engines
    share experts, rows travel among the ranks of all, and shares and gathering stay in each engine.

    With `step_interval`, experts move after every so many steps to where they had better be (EPLB). All ranks have the
    same counts by then, and none has to ask another where an expert is.
    """

    group: GroupCoordinator  # all ranks that share experts
    placement: Placement
    step_interval: int = 0
    tp: GroupCoordinator | None = None  # those that hold the same tokens; None: all

    def __post_init__(self) -> None:
        self.load = [0] * (max(self.placement.experts) + 1)  # of each expert, how often it was asked
        self.steps = 0

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Shapes: x [T, H], weights, ids [T, k], the same on all ranks -> [T, H], the same on all ranks."""
        if self.step_interval:
            self._balance(ids)
        return by_shares(self._exchange, x, weights, ids, self.tp or self.group)

    def _exchange(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return dispatch(x, weights, ids, self.local, self.group, self.placement)

    def _balance(self, ids: torch.Tensor) -> None:
        """Count this step, and move experts if it is time."""
        asked = torch.bincount(ids.flatten(), minlength=len(self.load)).tolist()
        self.load = [a + b for a, b in zip(self.load, asked)]
        self.steps += 1
        if self.steps % self.step_interval == 0:
            load = self.load
            if self.tp is not None:  # other engines have counted other tokens; ranks of one engine, all the same
                load = self.group.all_reduce(torch.tensor(load, device=ids.device)).tolist()
            placement = rebalance_experts(load, len(self.placement.experts), self.group.world_size)
            self.load = [0] * len(self.load)
            self.move_to(placement)

    def move_to(self, placement: Placement) -> None:
        """Give every rank the experts that it has from now on. All ranks must call it, with the same placement."""
        if placement != self.placement:
            assert isinstance(self.local, StackedExperts), "whoever has codes stays where it is"
            self.local, self.placement = moved(self.local, self.group, self.placement, placement), placement


def by_shares(
    exchange: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    tp: GroupCoordinator,
) -> torch.Tensor:
    """All of n ranks hold the same tokens: each exchanges an n-th of them, and all answers are gathered."""
    T, n, r = len(x), tp.world_size, tp.rank_in_group
    share = -(-T // n)
    mine = slice(r * share, (r + 1) * share)
    y = exchange(x[mine], weights[mine], ids[mine])
    return tp.all_gather(F.pad(y, (0, 0, 0, share - len(y))), dim=0)[:T] if T else y


def dispatch(  # noqa: PLR0913  three tensors of a layer, and who answers
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    local: Experts,
    group: GroupCoordinator,
    placement: Placement,
) -> torch.Tensor:
    """This rank's own tokens through the experts of all ranks. Every rank must call it, also with no token.

    1. of an expert's replicas, tokens take one after the other
    2. sort the pairs of a token and an expert by slot, and so by the rank that has it
    3. all-to-all: hidden states, and which slot they want; how many come from whom goes ahead of them
    4. each rank computes whatever has come for its slots
    5. all-to-all back, and each token's answers are weighted and added

    Shapes: x [T, H], weights, ids [T, k] -> [T, H].
    """
    slots, copies = slot_tables(placement, ids.device)
    turn = torch.arange(len(x), device=ids.device)[:, None] % copies[ids]  # [T, k]
    wanted, k = slots[ids, turn].flatten(), ids.shape[1]
    order = wanted.argsort(stable=True)
    per_slot = torch.bincount(wanted, minlength=len(placement.experts)).tolist()
    counts = [sum(per_slot[slot] for slot in placement.slots(rank)) for rank in range(placement.ranks)]
    arrived, senders = group.all_to_all(x[order // k], counts)
    asked, _ = group.all_to_all(wanted[order], counts)
    done = local(arrived, torch.ones(len(asked), 1, device=x.device), asked[:, None])
    back, _ = group.all_to_all(done, senders)
    said = torch.empty_like(back)
    said[order] = (back * weights.flatten()[order, None]).to(back.dtype)
    return said.unflatten(0, ids.shape).sum(1)


def moved(local: StackedExperts, group: GroupCoordinator, old: Placement, new: Placement) -> StackedExperts:
    """This rank's experts under another placement: each comes from the first slot that had it, in one all-to-all."""
    source = {expert: slot for slot, expert in reversed(list(enumerate(old.experts)))}
    r, names = group.rank_in_group, ("gate_up", "down", "gate_up_bias", "down_bias")
    parts = {name: part for name in names if (part := getattr(local, name)) is not None}
    wanted = [[source[new.experts[slot]] for slot in new.slots(rank)] for rank in range(new.ranks)]  # old slots
    leaving = [[slot - old.slots(r).start for slot in slots if slot in old.slots(r)] for slots in wanted]
    index = torch.tensor([i for part in leaving for i in part], dtype=torch.int64, device=local.down.device)
    flat = torch.cat([part.flatten(1) for part in parts.values()], 1)[index]
    arrived, _ = group.all_to_all(flat, [len(part) for part in leaving])
    # They come by sender, and of each in the order in which they are wanted here.
    senders = [old.owner(slot) for slot in wanted[r]]
    places = sorted(range(len(senders)), key=lambda i: senders[i])
    rows = torch.empty_like(arrived)
    rows[torch.tensor(places, dtype=torch.int64, device=local.down.device)] = arrived
    pieces = rows.split([part[0].numel() for part in parts.values()], 1)
    fresh = {name: x.unflatten(1, parts[name].shape[1:]).contiguous() for name, x in zip(parts, pieces)}
    return dataclasses.replace(local, held=new.slots(r), **fresh)


def shared_by(layer: MoELayer, tp: GroupCoordinator, ep: GroupCoordinator) -> MoELayer:
    """The layer whose experts are this rank's part, as one of the ranks `ep`. `tp` are those that hold the same tokens:
    the same ranks, or of several engines that share experts those of one."""
    config, experts = layer.config, layer.experts
    if config.expert_parallel != "all2all":
        shared = ReducedExperts(experts, tp) if ep is tp else GatheredExperts(experts, ep, tp)
        return dataclasses.replace(layer, experts=shared)
    plain = Placement.plain(config.num_experts, ep.world_size)
    dispatched = DispatchedExperts(experts, ep, plain, config.eplb_step_interval, None if ep is tp else tp)
    if config.eplb_step_interval:  # nothing is known of the load, so replicas are of whoever comes first
        num_slots = config.num_experts + config.num_redundant_experts
        dispatched.move_to(rebalance_experts([1] * config.num_experts, num_slots, ep.world_size))
    return dataclasses.replace(layer, experts=dispatched)


def local_experts(layer: MoELayer) -> Experts:
    """What multiplies on this rank."""
    assert isinstance(layer.experts, SharedExperts)
    return layer.experts.local


def with_local(layer: MoELayer, local: Experts) -> MoELayer:
    """The layer with something else that multiplies on this rank."""
    assert isinstance(layer.experts, SharedExperts)
    return dataclasses.replace(layer, experts=dataclasses.replace(layer.experts, local=local))

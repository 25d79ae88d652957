"""Which rank has which experts, when some are asked more than others: replicas, and who is packed with whom.

Owns the placement and the greedy that finds one; called by ranks that have whole experts, all of which know the same
load and so find the same. It never moves a weight. vLLM: `vllm/distributed/eplb/policy/default.py`. Read: DeepSeek-AI
2025 (EPLB).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """The expert in each slot; an expert that is in several has replicas. Of n ranks each has a range of the slots."""

    experts: tuple[int, ...]  # of slot 0, 1, …
    ranks: int

    @classmethod
    def plain(cls, num_experts: int, ranks: int) -> Placement:
        """Every expert once, in order."""
        return cls(tuple(range(num_experts)), ranks)

    def slots(self, rank: int) -> range:
        """Those of one rank, which has as many as any other, or one more."""
        return range(rank * len(self.experts) // self.ranks, (rank + 1) * len(self.experts) // self.ranks)

    def owner(self, slot: int) -> int:
        """The rank that has a slot."""
        return next(rank for rank in range(self.ranks) if slot in self.slots(rank))

    def rank_loads(self, load: Sequence[float]) -> list[float]:
        """What each rank has to do if `load` [E] is what each expert is asked, and replicas share it evenly."""
        copies = [self.experts.count(expert) for expert in range(len(load))]
        return [sum(load[e] / copies[e] for e in (self.experts[s] for s in self.slots(r))) for r in range(self.ranks)]


@functools.lru_cache(256)  # asked in every layer of every step, and experts move rarely
def slot_tables(placement: Placement, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For each expert its slots, int64 [E, replicas of the most], and how many they are [E]."""
    places: list[list[int]] = [[] for _ in range(max(placement.experts) + 1)]
    for slot, expert in enumerate(placement.experts):
        places[expert].append(slot)
    most = max(map(len, places))
    padded = [found + [found[0]] * (most - len(found)) for found in places]
    return torch.tensor(padded, device=device), torch.tensor([len(found) for found in places], device=device)


def rebalance_experts(load: Sequence[float], num_slots: int, ranks: int) -> Placement:
    """Where experts that were asked `load` [E] times had better be.

    1. a spare slot goes to whoever has the most to do per replica, one after the other
    2. the replica with the most to do goes to the rank with the least, as long as that has a slot left; to one that
       has the expert already only if no other rank has room
    Neither is the best there is, which is hard to find; both are what EPLB does. There is a slot for everybody, and
    `ranks` divide their number.
    """
    assert num_slots >= len(load) and num_slots % ranks == 0
    copies = [1] * len(load)
    heap = [(-asked, expert) for expert, asked in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(load)):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        heapq.heappush(heap, (-load[expert] / copies[expert], expert))
    replicas = [(load[expert] / n, expert) for expert, n in enumerate(copies) for _ in range(n)]
    held: list[list[int]] = [[] for _ in range(ranks)]
    busy = [0.0] * ranks
    for asked, expert in sorted(replicas, key=lambda replica: (-replica[0], replica[1])):
        room = [rank for rank in range(ranks) if len(held[rank]) < num_slots // ranks]
        rank = min(room, key=lambda rank: (expert in held[rank], busy[rank], rank))
        held[rank].append(expert)
        busy[rank] += asked
    return Placement(tuple(expert for experts in held for expert in experts), ranks)

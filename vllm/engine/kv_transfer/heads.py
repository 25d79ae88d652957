"""Who has which KV heads, when two engines of different tensor-parallel degree share them out.

Owns the arithmetic of shards; called by connectors. It never touches a tensor.
vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/tp_mapping.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

# Tensor parallelism shards the cache by KV heads, and copies them where ranks outnumber heads. Two engines of different
# degree cut at different places; a rank on the decode side asks whoever has its heads.


@dataclass(frozen=True)
class HeadSlice:
    """KV heads [head, head + heads), numbered as in the whole model, of one rank of the other engine."""

    rank: int
    head: int
    heads: int


def owned_heads(num_kv_heads: int, tp_size: int, rank: int) -> tuple[int, int]:
    """(first, number) of the KV heads in one rank's cache; neighbours hold the same one if tp_size > num_kv_heads."""
    return rank * num_kv_heads // tp_size, max(1, num_kv_heads // tp_size)


def tp_sources(num_kv_heads: int, producer_tp: int, consumer_tp: int, rank: int) -> list[HeadSlice]:
    """Whom rank `rank` of the consumer reads from: its heads, each from exactly one rank of the producer."""
    head, count = owned_heads(num_kv_heads, consumer_tp, rank)
    needed, found = set(range(head, head + count)), []
    # Among ranks that hold copies of a head, start where our own rank points, so that readers spread over them.
    start = rank * producer_tp // consumer_tp
    for producer in (*range(start, producer_tp), *range(start)):
        first, number = owned_heads(num_kv_heads, producer_tp, producer)
        if take := sorted(needed & set(range(first, first + number))):
            found.append(HeadSlice(producer, take[0], len(take)))
            needed -= set(take)
    return sorted(found, key=lambda piece: piece.head)


def num_consumers(num_kv_heads: int, producer_tp: int, consumer_tp: int, rank: int) -> int:
    """How many ranks of the consumer read from rank `rank` of the producer: that many DONEs free its blocks."""
    return sum(
        any(piece.rank == rank for piece in tp_sources(num_kv_heads, producer_tp, consumer_tp, reader))
        for reader in range(consumer_tp)
    )

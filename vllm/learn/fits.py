"""What a lesson's part lacks to stand in the engine's seam: a pool remembers no content, a scheduler no collaborators.

Owns those few answers; called by `my/plugged.py`, which `parts.py` writes. It adds no decision to the reader's part.
vLLM has nothing like it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Pool:
    """Lesson 02's pool in the seam `block_pool`: nothing that a block holds is ever found again."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.num_blocks, self.ref_count, self.free_queue = pool.num_blocks, pool.ref_count, pool.free_queue
        self.block_hash: list[bytes | None] = [None] * pool.num_blocks
        self.cached_block_hash_to_block: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def allocate(self, n: int) -> list[int]:
        return self.pool.allocate(n)

    def touch(self, blocks: Sequence[int]) -> None:
        self.pool.touch(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        self.pool.free(blocks)

    def get_cached_block(self, block_hash: bytes) -> int | None:
        return None

    def cache_block(self, block: int, block_hash: bytes) -> None: ...

    def evict(self, block: int) -> None: ...


def block_pool(kind: Callable[[int], Any]) -> Callable[[int], Pool]:
    """What makes the engine's pool of the reader's class."""

    def make(num_blocks: int) -> Pool:
        return Pool(kind(num_blocks))

    return make


def scheduler(kind: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """What makes the engine's scheduler of the reader's class: one without drafts, adapters or a connector."""

    def make(config: Any, kv_cache_manager: Any) -> Any:
        made = kind(config, kv_cache_manager)
        made.drafts = made.patience = None
        made.waiting_for_adapter, made.waiting_for_remote_kvs = [], {}
        return made

    return make


def as_it_is(part: Any) -> Any:
    """A part that fills its seam without help."""
    return part


FITS: dict[str, Callable[[Any], Any]] = {"block_pool": block_pool, "scheduler": scheduler}

"""The physical blocks of the KV cache: who owns them, which are free, which hold a known prefix.

Owns reference counts, the free queue and the index of full blocks; called by `kv_cache_manager`. It knows ids and
hashes, never tensors, tokens or requests. vLLM: `vllm/v1/core/block_pool.py`.
"""

from __future__ import annotations

from common import InputError

import collections
from collections.abc import Sequence


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """`num_blocks` blocks, counted, queued and indexed.

    Block 0 is the null block: block tables are padded with it, it is never written and never handed out, so
    `num_blocks - 1` are usable. Every other block is free (reference count 0, in the queue) or owned (count = number of
    block tables that hold it).

    "Free" and "cached" do not exclude each other: a block whose last owner left keeps its content and its hash until
    it is handed out for something else. There is no other eviction, and no policy but the order of the queue.
    """

    def __init__(self, num_blocks: int) -> None:
        """Raises InputError if there is no room for the null block and one more."""
        if num_blocks < 2:
            raise InputError(f"num_blocks is {num_blocks}; allowed: at least 2 (block 0 is the null block)")
        self.num_blocks = num_blocks
        # An ordered dict is a queue from whose middle a block can leave in O(1).
        # vLLM writes a doubly linked list by hand for it (FreeKVCacheBlockQueue).
        self.free_queue = collections.OrderedDict.fromkeys(range(1, num_blocks))
        self.ref_count = [0] * num_blocks
        # Equal blocks are not merged, since tables never change: one hash may have several blocks, oldest first.
        self.cached_block_hash_to_block: dict[bytes, dict[int, None]] = {}
        self.block_hash: list[bytes | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    # -- owners --

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks from the front of the queue, each with one owner; what they held is forgotten.

        Raises OutOfBlocks, changing nothing.
        """
        if n > len(self.free_queue):
            raise OutOfBlocks(f"{n} block{'s' * (n > 1)} asked for, {len(self.free_queue)} free")
        blocks = [self.free_queue.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self.ref_count[block] = 1
            if self.block_hash[block] is not None:
                self.evict(block)
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """One more owner for each block; a free one leaves the queue. Raises ValueError, changing nothing."""
        for block in blocks:
            if not 0 < block < self.num_blocks:
                raise ValueError(f"block {block} is not one of 1..{self.num_blocks - 1}")
        for block in blocks:
            if self.ref_count[block] == 0:
                del self.free_queue[block]
            self.ref_count[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One owner less for each block of a table, given in table order and walked from its end. O(len(blocks)).

        Raises ValueError for a block that is not owned (freed twice, the null block, unknown), changing nothing.
        """
        for block, times in collections.Counter(blocks).items():
            if not 0 < block < self.num_blocks:
                raise ValueError(f"block {block} is not one of 1..{self.num_blocks - 1}")
            if self.ref_count[block] < times:
                raise ValueError(f"block {block} is freed {times} times but has {self.ref_count[block]} owners")
        released = []
        for block in reversed(blocks):
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                released.append(block)
        self._release(released)

    def _release(self, blocks: list[int]) -> None:
        """Queue blocks that lost their last owner: the tail of a sequence comes first.

        Those without a hash go to the front as a group: the pool is a stack, and what was used last, and may still be
        in the GPU's L2 cache, is used next. Cached ones go to the back, where they live longest: a prefix outlives its
        continuations, and the queue is in least-recently-used order without a clock.
        """
        for block in reversed([block for block in blocks if self.block_hash[block] is None]):
            self.free_queue[block] = None
            self.free_queue.move_to_end(block, last=False)
        self.free_queue.update((block, None) for block in blocks if self.block_hash[block] is not None)

    # -- the index --

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """The block that has had this hash longest."""
        blocks = self.cached_block_hash_to_block.get(block_hash)
        return next(iter(blocks)) if blocks else None

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Enter a full block into the index."""
        self.block_hash[block] = block_hash
        self.cached_block_hash_to_block.setdefault(block_hash, {})[block] = None

    def evict(self, block: int) -> None:
        """Remove a block from the index."""
        block_hash, self.block_hash[block] = self.block_hash[block], None
        assert block_hash is not None, "the block is in the index"
        blocks = self.cached_block_hash_to_block[block_hash]
        del blocks[block]
        if not blocks:
            del self.cached_block_hash_to_block[block_hash]

    # -- the invariants --

    def check(self) -> None:
        """Raise AssertionError unless every block is free or owned, and the index is exactly the blocks with a hash."""
        assert min(self.ref_count) >= 0, "negative reference count"
        assert self.ref_count[0] == 0, "the null block has an owner"
        unowned = {block for block in range(1, self.num_blocks) if self.ref_count[block] == 0}
        assert unowned == set(self.free_queue), "the queue is not exactly the blocks without an owner"
        indexed = {block: key for key, blocks in self.cached_block_hash_to_block.items() for block in blocks}
        assert indexed == {b: key for b, key in enumerate(self.block_hash) if key is not None}, "the index is wrong"
        assert all(self.cached_block_hash_to_block.values()), "an indexed hash without a block"

"""Block tables for layers that keep different things: one for each group of layers, all from one pool.

A layer with a window of W never looks at a key more than W − 1 positions back, so it gives blocks back while a sequence
grows; a prefix that was computed before is a hit only as far as every group still has what it would read of it.
Owns the tables of every group; called by the scheduler in the place of `kv_cache_manager`. It never sees a tensor.
vLLM: `vllm/v1/core/kv_cache_coordinator.py`, `vllm/v1/core/single_type_kv_cache_manager.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from engine import seams
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_manager import KVCacheManager
from engine.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheGroup, SlidingWindowSpec
from engine.request import Request, RequestStatus

NULL_BLOCK = 0  # the pool never hands it out


# --- One group's tables -----------------------------------------------------------------------------------------------


class FullAttentionManager:
    """The block tables of one group, whose layers see everything (`v1/core/single_type_kv_cache_manager.py`).

    `alignment`: prefix hits are multiples of so many tokens. `hash_block_size`: a request has a hash for so many.
    """

    def __init__(  # noqa: PLR0913  its layers, and what all groups share
        self,
        spec: AttentionSpec,
        group_id: int,
        block_pool: seams.BlockPool,
        alignment: int,
        hash_block_size: int,
        max_in_flight_tokens: int,
    ) -> None:
        self.spec, self.block_size, self.block_pool = spec, spec.block_size, block_pool
        self.group_id = group_id.to_bytes(4, "big")  # part of the key: groups keep different layers of a token
        self.alignment, self.hashes_per_block = alignment, spec.block_size // hash_block_size
        self.max_in_flight_tokens = max_in_flight_tokens
        self.req_to_blocks: dict[str, list[int]] = {}
        self.num_cached_block: dict[str, int] = {}  # leading blocks that need not be indexed any more

    # What a kind of layer decides: what it can do without, and what of it a hit may ask for.

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no query from position `num_computed_tokens` on will see."""
        return 0

    def is_reachable(self, block: int) -> bool:
        """Can any hit ask for a request's `block`-th block? What cannot be asked for is not indexed."""
        return True

    @staticmethod
    def find_longest_cache_hit(
        managers: Sequence[FullAttentionManager], block_hashes: Sequence[bytes], max_length: int
    ) -> tuple[list[list[int]], int]:
        """(a table for each of the groups, tokens) of the longest hit up to `max_length`, looked for from the left."""
        first, tables = managers[0], [[] for _ in managers]
        for i in range(max_length // first.block_size):
            blocks = _cached_blocks(managers, block_hashes, i)
            if blocks is None:
                break
            for table, block in zip(tables, blocks):
                table.append(block)
        return tables, len(tables[0]) * first.block_size

    # The rest is the same for all.

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, hits: Sequence[int], admission: bool) -> int:
        """Blocks that would leave the free queue: those missing, and those found that nobody owns.

        For admission, a request that frees while it grows is not charged for its whole length.
        """
        required = math.ceil(num_tokens / self.block_size)
        if admission:
            required = self.spec.max_blocks(num_tokens, self.max_in_flight_tokens)
        held = len(self.req_to_blocks.get(request_id, ()))
        revived = sum(self.block_pool.ref_count[block] == 0 for block in hits if block != NULL_BLOCK)
        return max(0, required - held - len(hits)) + revived

    def add_computed_blocks(self, request_id: str, hits: Sequence[int]) -> None:
        """Begin a table with what was found."""
        self.block_pool.touch([block for block in hits if block != NULL_BLOCK])
        self.req_to_blocks[request_id] = list(hits)
        self.num_cached_block[request_id] = len(hits)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[int]:
        """Lengthen a table until it has a place for `num_tokens`; the caller has made sure that there are blocks."""
        table = self.req_to_blocks.setdefault(request_id, [])
        new_blocks = self.block_pool.allocate(max(0, math.ceil(num_tokens / self.block_size) - len(table)))
        table += new_blocks
        return new_blocks

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free what has left the window. Places in the table stay: position p is in block p // block_size for ever."""
        table = self.req_to_blocks.get(request_id, [])
        end = min(self.get_num_skipped_tokens(num_computed_tokens) // self.block_size, len(table))
        start = end
        while start > 0 and table[start - 1] != NULL_BLOCK:
            start -= 1
        self.block_pool.free(table[start:end])
        table[start:end] = [NULL_BLOCK] * (end - start)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Index the blocks that `num_tokens` computed tokens fill. They are still in the window: it last moved at the
        beginning of the step that fills them, and what `alignment` delays past that is out of a hit's reach. Only where
        a step is planned before the last one is heard of may the window have left one behind."""
        first, end = self.num_cached_block.get(request.request_id, 0), num_tokens // self.block_size
        if end <= first:
            return
        table = self.req_to_blocks[request.request_id]
        for i in filter(self.is_reachable, range(first, end)):
            if table[i] != NULL_BLOCK:
                self.block_pool.cache_block(table[i], self.key(request.block_hashes, i))
        self.num_cached_block[request.request_id] = end

    def evict_uncomputed(self, request_id: str, num_computed_tokens: int) -> None:
        """Take back what `cache_blocks` promised and no model run has kept."""
        first = num_computed_tokens // self.block_size
        self.num_cached_block[request_id] = min(self.num_cached_block.get(request_id, 0), first)
        for block in self.req_to_blocks[request_id][first:]:
            if self.block_pool.block_hash[block] is not None:
                self.block_pool.evict(block)

    def key(self, block_hashes: Sequence[bytes], i: int) -> bytes:
        """The key of the i-th block: a hash names the whole prefix, so the last one inside the block is the block's."""
        return block_hashes[(i + 1) * self.hashes_per_block - 1] + self.group_id

    def free(self, request_id: str) -> None:
        self.block_pool.free([block for block in self.req_to_blocks.pop(request_id, []) if block != NULL_BLOCK])
        self.num_cached_block.pop(request_id, None)


def _cached_blocks(managers: Sequence[FullAttentionManager], hashes: Sequence[bytes], i: int) -> list[int] | None:
    """The i-th block in each of these groups, or None if one of them lacks it: a hit must serve every layer."""
    blocks: list[int] = []
    for manager in managers:
        block = manager.block_pool.get_cached_block(manager.key(hashes, i))
        if block is None:
            return None
        blocks.append(block)
    return blocks


class SlidingWindowManager(FullAttentionManager):
    """A group whose layers see the last `sliding_window` positions."""

    @property
    def sliding_window(self) -> int:
        assert isinstance(self.spec, SlidingWindowSpec)
        return self.spec.sliding_window

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """The next query is at position n = `num_computed_tokens` and sees [n − W + 1, n]: all before that is dead."""
        return max(0, num_computed_tokens - self.sliding_window + 1)

    @property
    def num_blocks_for_hit(self) -> int:
        """Blocks that W − 1 tokens touch behind a block's end: ⌈(W − 1) / block⌉."""
        return math.ceil((self.sliding_window - 1) / self.block_size)

    def is_reachable(self, block: int) -> bool:
        """A hit ends at a multiple of `alignment` and needs the last few blocks before it."""
        period = self.alignment // self.block_size
        return block % period >= period - self.num_blocks_for_hit

    @staticmethod
    def find_longest_cache_hit(
        managers: Sequence[FullAttentionManager], block_hashes: Sequence[bytes], max_length: int
    ) -> tuple[list[list[int]], int]:
        """As above, looked for from the right: the first run of blocks that is long enough, or begins at the start.

        What lies before the run is not needed, so it may be long gone: the null block stands for it.
        """
        first = managers[0]
        assert isinstance(first, SlidingWindowManager)
        end = max_length // first.block_size
        tables, run = [[NULL_BLOCK] * end for _ in managers], 0
        for i in reversed(range(end)):
            blocks = _cached_blocks(managers, block_hashes, i)
            if blocks is None:
                run = 0
                continue
            for table, block in zip(tables, blocks):
                table[i] = block
            run += 1
            if run >= first.num_blocks_for_hit:
                return [table[: i + run] for table in tables], (i + run) * first.block_size
        return [table[:run] for table in tables], run * first.block_size


# --- All groups -------------------------------------------------------------------------------------------------------


class HybridKVCacheManager:
    """Tables for several groups from one pool, with the verbs of `KVCacheManager`.

    Where that one has a table, this one has a list of tables, one for each of `groups`. `req_to_blocks` is for the
    model runner: the i-th entry of a request has the i-th block of each group, as it was when the request got it. What
    has left a window since is not taken out there: nobody reads it.
    """

    hash_bits = 256
    update_block_hashes = KVCacheManager.update_block_hashes

    def __init__(  # noqa: PLR0913  `KVCacheManager`'s, and how far a step may go
        self,
        num_blocks: int,
        groups: Sequence[KVCacheGroup],
        max_model_len: int,
        enable_caching: bool = True,
        max_in_flight_tokens: int | None = None,
        make_pool: Callable[[int], seams.BlockPool] = BlockPool,
    ) -> None:
        """`max_in_flight_tokens` bounds the tokens of one request that are planned and not known to be computed."""
        sizes = [group.spec.block_size for group in groups]
        self.block_size = math.gcd(*sizes)  # of a hash
        self.alignment = math.lcm(*sizes)  # of a hit: whole blocks in every group
        self.block_pool = make_pool(num_blocks)
        self.max_model_len, self.enable_caching = max_model_len, enable_caching
        in_flight = max_in_flight_tokens or max_model_len
        self.managers = [
            (SlidingWindowManager if isinstance(group.spec, SlidingWindowSpec) else FullAttentionManager)(
                group.spec, i, self.block_pool, self.alignment, self.block_size, in_flight
            )
            for i, group in enumerate(groups)
        ]
        kinds: dict[AttentionSpec, list[int]] = {}
        for i, group in enumerate(groups):
            kinds.setdefault(group.spec, []).append(i)
        # Full attention first: what it finds bounds the search of the others.
        self.kinds = sorted(kinds.values(), key=lambda ids: not isinstance(groups[ids[0]].spec, FullAttentionSpec))
        self.req_to_blocks: dict[str, list[tuple[int, ...]]] = {}

    def get_block_ids(self, request_id: str) -> list[list[int]]:
        """The block tables of a running request, one for each group."""
        return [manager.req_to_blocks.get(request_id, []) for manager in self.managers]

    def get_computed_blocks(self, request: Request) -> tuple[list[list[int]], int]:
        """The longest prefix that all groups can serve: (a table for each, tokens). It changes nothing.

        Each kind of layer accepts the length that the kinds before it agreed on, or says a smaller one; whoever spoke
        earlier is then asked again. Lengths only fall, so this ends, at whole blocks in every group.
        """
        tables: list[list[int]] = [[] for _ in self.managers]
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return tables, 0
        self.update_block_hashes(request)
        length, agreed = request.num_tokens - 1, False  # one token is left to compute, for its logits
        while not agreed:
            start = length
            for ids in self.kinds:
                managers = [self.managers[i] for i in ids]
                found, length = managers[0].find_longest_cache_hit(managers, request.block_hashes, length)
                for i, table in zip(ids, found):
                    tables[i] = table
            agreed = length == start
        return tables, length

    def get_num_blocks_to_allocate(
        self, request: Request, num_tokens: int, new_computed_blocks: Sequence[Sequence[int]] = ()
    ) -> int:
        """Blocks that all groups together would have to find until `num_tokens` are computed, step by step: fewer than
        the tokens take, since windows give theirs back on the way."""
        return self._missing(request, min(num_tokens, self.max_model_len), new_computed_blocks, admission=True)

    def _missing(
        self, request: Request, num_tokens: int, hits: Sequence[Sequence[int]], admission: bool = False
    ) -> int:
        return sum(
            manager.get_num_blocks_to_allocate(request.request_id, num_tokens, found, admission)
            for manager, found in zip(self.managers, hits or [()] * len(self.managers))
        )

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[Sequence[int]] = (),
        full_sequence_must_fit: bool = False,
    ) -> list[list[int]] | None:
        """Room in every group for `num_new_tokens` behind those computed, `new_computed_blocks` among these.

        Returns the new blocks of each group, or None if the pool has too few for all groups together; then no group
        gets any. Blocks that left a window are freed in either case: nobody will read them. Drafts that are on their
        way may be taken back, and what is computed then sees further back, so they do not count. (In vLLM no token does
        that is on its way; here steps run in order, and whoever gets the block writes it in a later one.)
        """
        hits = new_computed_blocks or [()] * len(self.managers)
        request_id, computed, pool = request.request_id, request.num_computed_tokens, self.block_pool
        if full_sequence_must_fit:
            whole = self.get_num_blocks_to_allocate(request, request.num_tokens, hits)
            if whole > pool.num_free_blocks:
                return None
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, computed - request.num_draft_placeholders)
        num_tokens = min(computed + num_new_tokens, self.max_model_len)
        if self._missing(request, num_tokens, hits) > pool.num_free_blocks:
            return None
        rows = self.req_to_blocks.setdefault(request_id, [])
        if any(hits):  # all of them, before a new block of one group evicts what another has found
            for manager, found in zip(self.managers, hits):
                manager.add_computed_blocks(request_id, found)
            rows += zip(*hits)
        new_blocks = [manager.allocate_new_blocks(request_id, num_tokens) for manager in self.managers]
        rows += zip(*new_blocks)
        if self.enable_caching:
            self.cache_blocks(request, min(computed + num_new_tokens, request.num_tokens))
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Index the blocks that are full once the first `num_tokens` are computed, and are not indexed yet."""
        self.update_block_hashes(request)
        for manager in self.managers:
            manager.cache_blocks(request, num_tokens // self.alignment * self.alignment)

    def evict_uncomputed(self, request: Request, num_computed_tokens: int) -> None:
        """Take back what `cache_blocks` promised and no model run has kept."""
        for manager in self.managers:
            manager.evict_uncomputed(request.request_id, num_computed_tokens)

    def free(self, request: Request) -> None:
        """Give all its blocks back."""
        known = self.req_to_blocks.pop(request.request_id, None) is not None
        if known and request.status is RequestStatus.FINISHED_ERROR:
            self.evict_uncomputed(request, 0)  # its keys and values may be NaN: nobody shall hit them
        for manager in self.managers:
            manager.free(request.request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all that is indexed; whoever runs keeps its blocks."""
        for block, block_hash in enumerate(self.block_pool.block_hash):
            if block_hash is not None:
                self.block_pool.evict(block)

"""Block tables: which physical block holds which tokens of a request, and which were computed for an earlier one.

Owns the table and the hashes of every request that has blocks; called by the scheduler. It never chooses who gets
blocks, and never sees a tensor. vLLM: `vllm/v1/core/kv_cache_manager.py`, `vllm/v1/core/kv_cache_utils.py`.
"""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Callable, Sequence

from engine import seams
from engine.core.block_pool import BlockPool
from engine.request import Request, RequestStatus

ROOT_HASH = hashlib.sha256(b"the parent of every first block").digest()


def hash_block_tokens(parent_hash: bytes, token_ids: Sequence[int], extra_keys: tuple = ()) -> bytes:
    """The key of a full block: sha256(parent's key, its token ids, extra keys), so that it names a whole prefix.

    The fields cannot run into each other: 32 bytes of parent, 8 bytes per token, then what remains is the extra keys.
    """
    tail = json.dumps(extra_keys).encode() if extra_keys else b""
    return hashlib.sha256(parent_hash + array.array("q", token_ids).tobytes() + tail).digest()


def block_extra_keys(request: Request, first: bool) -> tuple:
    """What besides its tokens makes a request's block (its `first` one or another) what it is.

    Requests share blocks only if their salts are equal; through the chain it need be in the first block only.
    The adapter changes every layer's keys and values, so it is in every block: its name, and the fingerprint that tells
    its weights from others of this name.
    """
    known = (request.lora_fingerprint,) if request.lora_fingerprint else ()
    adapter = (("lora", request.lora_name, *known),) if request.lora_name else ()
    return (*adapter, ("cache_salt", request.cache_salt)) if request.cache_salt and first else adapter


class KVCacheManager:
    """Keeps each block table long enough for the tokens that are about to be computed. Tables only grow.

    Entry i of a request's table is the physical block that holds its tokens [i·block_size, (i+1)·block_size). A table
    may begin with blocks that an earlier request computed. With `enable_caching=False` none does, and nothing is
    indexed.
    """

    hash_bits = 256  # fewer is a bug: lesson 05's `--hash-bits`

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_caching: bool = True,
        make_pool: Callable[[int], seams.BlockPool] = BlockPool,
    ) -> None:
        """`num_blocks` counts block 0, which the pool keeps for padding and never hands out."""
        self.block_pool = make_pool(num_blocks)
        self.block_size, self.max_model_len = block_size, max_model_len
        self.enable_caching = enable_caching
        self.req_to_blocks: dict[str, list[int]] = {}
        self.num_cached_block: dict[str, int] = {}  # leading blocks of each table that are in the index

    # -- what is there already --

    def update_block_hashes(self, request: Request) -> None:
        """Extend `request.block_hashes` to all its full blocks, generated tokens included."""
        hashes, size = request.block_hashes, self.block_size
        for end in range((len(hashes) + 1) * size, request.num_tokens + 1, size):
            parent, extra_keys = hashes[-1] if hashes else ROOT_HASH, block_extra_keys(request, not hashes)
            block_hash = hash_block_tokens(parent, request.all_token_ids[end - size : end], extra_keys)
            hashes.append(block_hash[: self.hash_bits // 8])

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """The longest cached prefix: (its blocks, its tokens). It changes nothing.

        One token must be left to compute, for its logits; since hits are whole blocks, a prompt of exactly k cached
        blocks finds k − 1 of them and computes the last block again.
        """
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return [], 0
        self.update_block_hashes(request)
        blocks: list[int] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks, len(blocks) * self.block_size

    # -- room for what comes --

    def get_num_blocks_to_allocate(
        self, request: Request, num_tokens: int, new_computed_blocks: Sequence[int] = ()
    ) -> int:
        """Blocks that will leave the free queue for a table of `num_tokens`: those missing, ⌈num_tokens / block_size⌉ −
        blocks it has, and those found in the cache that have no owner."""
        needed = -(-min(num_tokens, self.max_model_len) // self.block_size)
        missing = max(0, needed - len(self.req_to_blocks.get(request.request_id, ())))
        if not new_computed_blocks:
            return missing
        revived = sum(self.block_pool.ref_count[block] == 0 for block in new_computed_blocks)
        return max(0, missing - len(new_computed_blocks)) + revived

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[int] = (),
        delay_caching: bool = False,
    ) -> list[int] | None:
        """Make room for `num_new_tokens` behind those computed, in a table that starts with `new_computed_blocks`.

        Returns the new blocks, or None, and nothing has changed, if the pool has too few.

        Blocks that the coming step fills are indexed now, before the model has run: a request admitted behind this
        one, in the same step, already shares them. A forward pass writes a layer's KV before attention reads it.
        `delay_caching`: what fills them comes later, and nobody may hit them before.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens
        missing = self.get_num_blocks_to_allocate(request, num_tokens, new_computed_blocks)
        if missing > self.block_pool.num_free_blocks:
            return None
        if new_computed_blocks:
            self.block_pool.touch(new_computed_blocks)
            self.req_to_blocks[request.request_id] = list(new_computed_blocks)
            self.num_cached_block[request.request_id] = len(new_computed_blocks)
            missing = self.get_num_blocks_to_allocate(request, num_tokens)
        new_blocks: list[int] = []
        if missing:
            new_blocks = self.block_pool.allocate(missing)
            self.req_to_blocks.setdefault(request.request_id, []).extend(new_blocks)
        if self.enable_caching and not delay_caching:
            self.cache_blocks(request, min(num_tokens, request.num_tokens))
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Index the blocks that are full once the first `num_tokens` are computed, and are not indexed yet."""
        num_full, num_cached = num_tokens // self.block_size, self.num_cached_block.get(request.request_id, 0)
        if num_full <= num_cached:
            return
        self.update_block_hashes(request)
        table = self.req_to_blocks[request.request_id]
        for block, block_hash in zip(table[num_cached:num_full], request.block_hashes[num_cached:num_full]):
            self.block_pool.cache_block(block, block_hash)
        self.num_cached_block[request.request_id] = num_full

    def evict_uncomputed(self, request: Request, num_computed_tokens: int) -> None:
        """Take back what `cache_blocks` promised and no model run has kept."""
        first = num_computed_tokens // self.block_size
        self.num_cached_block[request.request_id] = min(self.num_cached_block.get(request.request_id, 0), first)
        for block in self.req_to_blocks[request.request_id][first:]:
            if self.block_pool.block_hash[block] is not None:
                self.block_pool.evict(block)

    # -- tables --

    def get_block_ids(self, request_id: str) -> list[int]:
        """The block table of a running request."""
        return self.req_to_blocks[request_id]

    def free(self, request: Request) -> None:
        """Give all its blocks back; the pool decides where in the free queue they go."""
        if request.status is RequestStatus.FINISHED_ERROR and request.request_id in self.req_to_blocks:
            self.evict_uncomputed(request, 0)  # its keys and values may be NaN: nobody shall hit them
        self.block_pool.free(self.req_to_blocks.pop(request.request_id, []))
        self.num_cached_block.pop(request.request_id, None)

    def reset_prefix_cache(self) -> None:
        """Forget all that is indexed; whoever runs keeps its blocks."""
        for block, block_hash in enumerate(self.block_pool.block_hash):
            if block_hash is not None:
                self.block_pool.evict(block)

"""050 · Automatic prefix caching: the first part of lesson 05, and the cache under every later engine.

A block of the KV cache that is full is never written again, and causal attention makes its contents a function of the
tokens up to its end. So any request with the same tokens so far can read it. From the bottom up:
  * the reference: a cache that forgets nothing and compares tokens;
  * the key of a full block, a hash of all tokens up to its end;
  * `CachingBlockPool`: an index from keys to blocks, and a free queue in which cached blocks live longest;
  * `PrefixCachingKVCacheManager`: block tables that begin with blocks computed for earlier requests;
  * `PrefixCachingScheduler`: lesson 04's, looking before it admits;
  * what that finds, counted without a model: by formula, and by pool size for a workload of chats.
Lesson 05 serves the real model with it, breaks it (`--hash-bits 8`), and goes on to the other entries of its catalog.
Lesson 11's scheduler, and with it the whole engine, runs on this manager.

Read for this: vLLM 0.32 `v1/core/kv_cache_utils.py`, `v1/core/block_pool.py`, `v1/core/kv_cache_manager.py`; Zheng et
al. 2024 (SGLang: RadixAttention), Qin et al. 2025 (Mooncake).
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import array
import hashlib
import json
import math
import random
from collections.abc import Sequence

continuous_batching = common.lesson("04_continuous_batching")
BlockPool = common.lesson("02_paged_attention").BlockPool
KVCacheManager, Scheduler = continuous_batching.KVCacheManager, continuous_batching.Scheduler
Request, SamplingParams = continuous_batching.Request, continuous_batching.SamplingParams
SchedulerOutput = continuous_batching.SchedulerOutput

BLOCK = 16  # tokens in a block, vLLM's default


# --- The reference ----------------------------------------------------------------------------------------------------


def naive_hits(served: Sequence[tuple[list[int], list[int]]], block_size: int) -> list[int]:
    """What a cache should find, (prompt, answer) after (prompt, answer), if it forgot nothing and compared tokens."""
    seen: set[tuple[int, ...]] = set()
    hits = []
    for prompt, answer in served:
        tokens, blocks = prompt + answer[:-1], 0  # the last token of an answer is sampled, never computed
        while (blocks + 1) * block_size < len(prompt) and tuple(tokens[: (blocks + 1) * block_size]) in seen:
            blocks += 1
        hits.append(blocks * block_size)
        seen |= {tuple(tokens[:end]) for end in range(block_size, len(tokens) + 1, block_size)}
    return hits


# --- The key ----------------------------------------------------------------------------------------------------------


def hash_block_tokens(parent_hash: bytes, token_ids: Sequence[int], extra_keys: tuple = ()) -> bytes:
    """The key of a full block: sha256(parent's key, its token ids, extra keys), so that it names a whole prefix.

    The fields cannot run into each other: 32 bytes of parent, 8 bytes per token, then what remains is the extra keys.
    """
    tail = json.dumps(extra_keys).encode() if extra_keys else b""
    return hashlib.sha256(parent_hash + array.array("q", token_ids).tobytes() + tail).digest()


ROOT_HASH = hashlib.sha256(b"the parent of every first block").digest()


def block_extra_keys(request: Request, first: bool) -> tuple:
    """What besides its tokens makes a request's block (its `first` one or another) what it is.

    Requests share blocks only if their salts are equal; through the chain it need be in the first block only.
    The adapter changes every layer's keys and values, so it is in every block: its name, and the fingerprint that tells
    its weights from others of this name.
    """
    known = (request.lora_fingerprint,) if request.lora_fingerprint else ()
    adapter = (("lora", request.lora_name, *known),) if request.lora_name else ()
    return (*adapter, ("cache_salt", request.cache_salt)) if request.cache_salt and first else adapter


# --- The index and the queue ------------------------------------------------------------------------------------------


class CachingBlockPool(BlockPool):
    """A block pool with an index of full blocks (`vllm/v1/core/block_pool.py`).

    "Free" and "cached" do not exclude each other: a block whose last owner left keeps its content and its key until
    it is handed out for something else. There is no other eviction, and no policy but this order.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        # Equal blocks are not merged, since tables never change: one key may have several blocks, oldest first.
        self.cached_block_hash_to_block: dict[bytes, dict[int, None]] = {}
        self.block_hash: list[bytes | None] = [None] * num_blocks

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """The block that has had this key longest."""
        blocks = self.cached_block_hash_to_block.get(block_hash)
        return next(iter(blocks)) if blocks else None

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Enter a full block into the index."""
        self.block_hash[block] = block_hash
        self.cached_block_hash_to_block.setdefault(block_hash, {})[block] = None

    def allocate(self, n: int) -> list[int]:
        """Take blocks from the front of the queue; what they held is forgotten."""
        blocks = super().allocate(n)
        for block in blocks:
            if self.block_hash[block] is not None:
                self.evict(block)
        return blocks

    def evict(self, block: int) -> None:
        """Remove a block from the index."""
        block_hash, self.block_hash[block] = self.block_hash[block], None
        blocks = self.cached_block_hash_to_block[block_hash]
        del blocks[block]
        if not blocks:
            del self.cached_block_hash_to_block[block_hash]

    def _release(self, blocks: list[int]) -> None:
        """Blocks without a key go to the front as before; cached ones to the back, where they live longest.

        Both groups keep their order, the tail of the sequence first: a prefix outlives its continuations, and the
        queue is in least-recently-used order without a clock.
        """
        super()._release([block for block in blocks if self.block_hash[block] is None])
        self.free_queue.update((block, None) for block in blocks if self.block_hash[block] is not None)

    def check(self) -> None:
        """The pool's invariants, and: the index is exactly the blocks that have a key."""
        super().check()
        indexed = {block: key for key, blocks in self.cached_block_hash_to_block.items() for block in blocks}
        assert indexed == {b: key for b, key in enumerate(self.block_hash) if key is not None}, "the index is wrong"
        assert all(self.cached_block_hash_to_block.values()), "an indexed key without a block"


# --- The tables -------------------------------------------------------------------------------------------------------


class PrefixCachingKVCacheManager(KVCacheManager):
    """Block tables that may begin with blocks which an earlier request computed (`vllm/v1/core/kv_cache_manager.py`).

    Lesson 11's scheduler runs on it. With `enable_caching=False` it finds nothing and indexes nothing.
    """

    pool_class = CachingBlockPool
    hash_bits = 256  # fewer is a bug: lesson 05's `--hash-bits`

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, enable_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, max_model_len)
        self.enable_caching = enable_caching
        self.num_cached_block: dict[str, int] = {}  # leading blocks of each table that are in the index

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

    def get_num_blocks_to_allocate(
        self, request: Request, num_tokens: int, new_computed_blocks: Sequence[int] = ()
    ) -> int:
        """Blocks that will leave the free queue: those missing, and those found in the cache that have no owner."""
        missing = super().get_num_blocks_to_allocate(request, num_tokens)
        if not new_computed_blocks:
            return missing
        revived = sum(self.block_pool.ref_count[block] == 0 for block in new_computed_blocks)
        return max(0, missing - len(new_computed_blocks)) + revived

    def allocate_slots(
        self, request: Request, num_new_tokens: int, new_computed_blocks: Sequence[int] = ()
    ) -> list[int] | None:
        """As lesson 04's, with a table that starts with `new_computed_blocks` (their tokens count as computed).

        Blocks that the coming step fills are indexed now, before the model has run: a request admitted behind this
        one, in the same step, already shares them. A forward pass writes a layer's KV before attention reads it.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens
        if new_computed_blocks:
            needed = self.get_num_blocks_to_allocate(request, num_tokens, new_computed_blocks)
            if needed > self.block_pool.num_free_blocks:
                return None
            self.block_pool.touch(new_computed_blocks)
            self.req_to_blocks[request.request_id] = list(new_computed_blocks)
            self.num_cached_block[request.request_id] = len(new_computed_blocks)
        new_blocks = super().allocate_slots(request, num_new_tokens)
        if self.enable_caching and new_blocks is not None:
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

    def reset_prefix_cache(self) -> None:
        """Forget all that is indexed; whoever runs keeps its blocks."""
        for block, block_hash in enumerate(self.block_pool.block_hash):
            if block_hash is not None:
                self.block_pool.evict(block)

    def free(self, request: Request) -> None:
        super().free(request)
        self.num_cached_block.pop(request.request_id, None)


# --- The scheduler looks before it admits -----------------------------------------------------------------------------


class PrefixCachingScheduler(Scheduler):
    """Lesson 04's careful scheduler, looking into the cache when it admits. Lesson 11 has the one that vLLM has."""

    def _admit(self, request: Request) -> int:
        manager = self.kv_cache_manager
        computed_blocks, request.num_computed_tokens = manager.get_computed_blocks(request)
        if num_new_tokens := self._num_new_tokens(request):  # only what is not cached takes budget
            slots = self.num_slots(request) - request.num_computed_tokens
            if manager.allocate_slots(request, slots, computed_blocks) is not None:
                request.num_cached_tokens = request.num_computed_tokens
                return num_new_tokens
        request.num_computed_tokens = 0  # a lookup without admission changes nothing
        return 0

    def _grant(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> None:
        """A decode step may fill a block, too: the next turn of a conversation will find the answer in the cache."""
        super()._grant(request, num_new_tokens, output)
        if self.kv_cache_manager.enable_caching:
            self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)


# --- What it finds ----------------------------------------------------------------------------------------------------


def prefill_factor(prefix: int, message: int, requests: int, block_size: int = BLOCK) -> float:
    """Prompt tokens without a cache over those with one: R·(P + m) / (P + m + (R − 1)·(P + m − hit)).

    hit = ⌊P / block⌋ · block if the message is not empty. As R grows, it approaches (P + m) / (P + m − hit).
    """
    total = prefix + message
    hit = min(prefix, total - 1) // block_size * block_size
    return requests * total / (total + (requests - 1) * (total - hit))


# How large must the pool be? It depends on how much else is asked between two turns of a chat. So: a workload with
# parameters, served one request at a time through the real manager, without a model.

CHATS = {"conversations": 40, "system": 256, "turns": 5, "message": 60, "answer": 140, "gap_s": 1, "thinking_s": 8}


def chat_workload(seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """[(prompt, answer)] in order of arrival. Turns, message and answer lengths are geometric with the means in CHATS;
    conversations start as a Poisson process, and the time between an answer and the next message is exponential."""
    rng = random.Random(seed)

    def draw(mean: float) -> int:
        return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))

    def token() -> int:
        return rng.randrange(50_000)

    system, requests, start = [token() for _ in range(CHATS["system"])], [], 0.0
    for _ in range(CHATS["conversations"]):
        start += rng.expovariate(1 / CHATS["gap_s"])
        said, now = list(system), start
        for _ in range(draw(CHATS["turns"])):
            said += [token() for _ in range(draw(CHATS["message"]))]
            answer = [token() for _ in range(draw(CHATS["answer"]))]
            requests.append((now, list(said), answer))
            said += answer
            now += rng.expovariate(1 / CHATS["thinking_s"])
    return [(prompt, answer) for _, prompt, answer in sorted(requests, key=lambda request: request[0])]


def hit_rates(workload: Sequence[tuple[list[int], list[int]]], pools: Sequence[int]) -> dict[int, float]:
    """Share of prompt tokens found in the cache, for pools of so many usable blocks, each large enough for the longest
    request: one that does not fit is not served, so what it would have found is no hit. Raises ValueError."""
    rates, hashes = {}, {}  # a prefix has the same hashes whatever the pool: they are computed once
    for num_blocks in pools:
        manager, hit, total = PrefixCachingKVCacheManager(num_blocks + 1, BLOCK, 1 << 20), 0, 0
        for i, (prompt, answer) in enumerate(workload):
            request = Request(str(i), prompt, SamplingParams(max_tokens=len(answer)))
            request.block_hashes = list(hashes.get(i, ()))
            blocks, cached = manager.get_computed_blocks(request)
            request.num_computed_tokens = cached
            request.all_token_ids += answer[:-1]  # the last token is sampled, never computed
            if manager.allocate_slots(request, request.num_tokens - cached, blocks) is None:
                raise ValueError(f"a pool of {num_blocks} blocks cannot hold request {i}: {request.num_tokens} tokens")
            hashes[i] = list(request.block_hashes)
            manager.free(request)
            hit, total = hit + cached, total + len(prompt)
        rates[num_blocks] = hit / total
    return rates


# Qin et al. 2025 (Mooncake), conversation trace: the same, computed from the published trace; blocks of 512 tokens.
MOONCAKE = {1_000: 0.044, 3_000: 0.065, 10_000: 0.211, 30_000: 0.326, 50_000: 0.355}  # a pool without end: 0.366

"""What a lesson's part lacks to stand in the engine's seam: a pool that remembers content, requests, a batch's wishes.

Owns those few answers; called by `my/plugged/parts.py`, which `parts.py` writes. It adds no decision to the reader's
part. vLLM has nothing like it.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engine.core.block_pool import OutOfBlocks
from engine.request import NO_TOKEN_ID, Request, SamplingParams
from engine.sampling.sampler import Sampler, SamplingState, adjust_logits, uniforms

# --- The pool, and the index ------------------------------------------------------------------------------------------


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


class PrefixIndex:
    """Lesson 05's prefix cache in the seam `block_pool`. It is told of requests and the pool of blocks: so each call is
    a request that wants this and nothing else."""

    SIZE = 2  # tokens of a block of such a request

    def __init__(self, cache: Any) -> None:
        self.cache, self.it = cache, Request("it", [0], SamplingParams())
        self.num_blocks, self.ref_count, self.block_hash = len(cache.ref_count), cache.ref_count, cache.block_hash
        self.free_queue, self.cached_block_hash_to_block = cache.free_queue, cache.index

    def request(self, *keys: bytes) -> Request:
        """One that has a full block with each of these keys, and one token more."""
        self.it.block_hashes, self.it.num_computed_tokens = list(keys), len(keys) * self.SIZE
        self.it.all_token_ids = [0] * (self.it.num_computed_tokens + 1)
        return self.it

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    def allocate(self, n: int) -> list[int]:
        new_blocks = self.cache.allocate_slots(self.request(), n * self.SIZE)
        self.cache.tables.pop("it", None)
        if new_blocks is None:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free_blocks} free")
        return new_blocks

    def touch(self, blocks: Sequence[int]) -> None:
        self.cache.allocate_slots(self.request(), 0, blocks)
        del self.cache.tables["it"]

    def free(self, blocks: Sequence[int]) -> None:
        self.cache.tables["it"] = list(blocks)
        self.cache.free(self.request())

    def get_cached_block(self, block_hash: bytes) -> int | None:
        hits = self.cache.get_computed_blocks(self.request(block_hash))
        return hits[0] if hits else None

    def cache_block(self, block: int, block_hash: bytes) -> None:
        self.cache.tables["it"] = [block]
        self.cache.allocate_slots(self.request(block_hash), 0)
        del self.cache.tables["it"]

    def evict(self, block: int) -> None:
        """What the lesson does only where it takes a block."""
        key, self.block_hash[block] = self.block_hash[block], None
        self.cache.index[key].remove(block)
        if not self.cache.index[key]:
            del self.cache.index[key]


def prefix_index(kind: Callable[[int, int], Any]) -> Callable[[int], PrefixIndex]:
    """What makes the engine's pool of the reader's prefix cache."""

    def make(num_blocks: int) -> PrefixIndex:
        return PrefixIndex(kind(num_blocks, PrefixIndex.SIZE))

    return make


# --- The scheduler ----------------------------------------------------------------------------------------------------


def scheduler(kind: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """What makes the engine's scheduler of the reader's class: one without drafts, adapters or a connector."""

    def make(config: Any, kv_cache_manager: Any) -> Any:
        made = kind(config, kv_cache_manager)
        made.drafts = made.patience = None
        made.waiting_for_adapter, made.waiting_for_remote_kvs = [], {}
        return made

    return make


# --- The sampler ------------------------------------------------------------------------------------------------------


class RowsWithoutDrafts:
    """Lesson 07's rule in the seam `sampler`: where nobody has guessed, it is argmax, or a draw."""

    def __init__(self, sample_rows: Callable[..., torch.Tensor]) -> None:
        self.sample_rows = sample_rows

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> tuple[list[int], list[dict | None]]:
        """What each request wishes is the engine's to apply; which token it becomes is the rule's. [R, vocab]"""
        logits, device = logits.float(), logits.device
        scores, draw_u = adjust_logits(logits.clone(), states), np.zeros(len(states))
        if drawn := [row for row, state in enumerate(states) if not state.greedy]:
            chosen = [states[row] for row in drawn]
            scores[drawn] = Sampler.probabilities(scores[drawn], chosen)
            draw_u[drawn] = uniforms([s.seed for s in chosen], [s.request.num_output_tokens for s in chosen])
        nothing = torch.full((len(states),), NO_TOKEN_ID, device=device)
        is_greedy = torch.tensor([state.greedy for state in states], device=device)
        u = torch.from_numpy(draw_u).to(device)
        token_ids = self.sample_rows(scores, nothing, is_greedy, u, u, None, None)
        sampled: list[int] = token_ids.tolist()
        logprobs: list[dict | None] = [None] * len(states)
        for row, state in enumerate(states):
            if state.params.logprobs is not None and sampled[row] != NO_TOKEN_ID:
                one = slice(row, row + 1)
                raw = logits[one].log_softmax(1)
                (logprobs[row],) = Sampler.gather_logprobs(raw, token_ids[one], [state.params.logprobs])
        return sampled, logprobs


def sampler(sample_rows: Callable[..., torch.Tensor]) -> Callable[[], RowsWithoutDrafts]:
    """What makes the engine's sampler of the reader's rule."""

    def make() -> RowsWithoutDrafts:
        return RowsWithoutDrafts(sample_rows)

    return make


def as_it_is(part: Any) -> Any:
    """A part that fills its seam without help."""
    return part


FITS: dict[str, Callable[[Any], Any]] = {  # by the name of the lesson's object
    "BlockPool": block_pool,
    "PrefixCache": prefix_index,
    "Scheduler": scheduler,
    "sample_rows": sampler,
}

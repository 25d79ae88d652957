"""The hybrid KV cache: layers that forget, and one pool for all. For lesson 09.

A layer with a sliding window of W never looks at a key more than W − 1 positions back. In Gemma 3 five layers of six
are such, in gpt-oss every other one. A block table that serves all layers keeps their dead keys for the sake of the few
that see everything. So, from the bottom up:
  * a spec per layer: what it keeps, and how many bytes a block of it has;
  * groups of layers with equal specs and equally many layers, so that every group's block has the same bytes. The
    Jenga paper cuts pages of the least common multiple into small ones; vLLM makes the pages equal instead. Either way,
    a free block is free for whoever comes, and one pool serves all groups;
  * a table per group. As a sequence grows, blocks that left a window are freed; the null block keeps their place;
  * prefix hits that every group can serve. A full layer needs the whole prefix, a windowed one only its last
    ⌈(W − 1) / block⌉ blocks: the longest hit of one bounds the search of the next, until nobody wants less.
At the end, the same memory is filled with sequences in three ways: every layer as if it saw everything, a pool for each
kind of layer, and one for all. What is decided here is compared with vLLM, block by block
(tests/lab/test_hybrid_kv_cache.py).

Read for this: Zhang et al. 2025 (Jenga); vLLM 0.32 `v1/core/kv_cache_coordinator.py`,
`v1/core/single_type_kv_cache_manager.py`, `v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.core.block_pool import BlockPool
from engine.core.kv_cache_manager import KVCacheManager
from engine.model import llama
from engine.request import Request, SamplingParams
from lab.parameters import checked

BLOCK = 16  # tokens in a block, vLLM's default

NULL_BLOCK = 0  # the pool never hands it out


# --- The reference ----------------------------------------------------------------------------------------------------


def windowed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention that looks at the last `window` positions, its own among them (None: at all).

    Semantics: o_t = Σ_s softmax_s(q_t·k_s / √D) v_s over t − window < s ≤ t. The T queries are the last of S positions.
    Shapes: q [T, Hq, D]; k, v [S, Hkv, D] with T ≤ S -> [T, Hq, D].
    """
    (T, Hq, D), (S, Hkv, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(Hq // Hkv, dim=1) for x in (k, v))  # [S, Hq, D]
    t, s = torch.arange(S - T, S, device=q.device)[:, None], torch.arange(S, device=q.device)
    visible = (s <= t) & (s > t - (window or S))  # [T, S]
    scores = (torch.einsum("thd,shd->hts", q, k) / math.sqrt(D)).masked_fill(~visible, -math.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1), v)


# --- Specs and groups -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What one layer keeps of a token, and in blocks of how many tokens (`vllm/v1/kv_cache_interface.py`)."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int = 2

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's block: keys and values of `block_size` tokens."""
        return self.block_size * 2 * self.num_kv_heads * self.head_size * self.dtype_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every position sees all before it."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Every position sees `sliding_window` positions, itself among them."""

    sliding_window: int


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share a block table. A group with a layer less than others leaves some of each block unused."""

    layers: tuple[int, ...]
    spec: AttentionSpec


def unify_page_size(specs: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """Layers whose tokens are smaller get more tokens into a block, until all blocks have the same bytes.

    Raises InputError if they cannot: one page is no multiple of another.
    """
    largest = max(spec.page_size_bytes for spec in specs)
    for spec in specs:
        if largest % spec.page_size_bytes:
            raise common.InputError(
                f"a page of {spec.page_size_bytes} bytes does not divide one of {largest}: "
                "choose block sizes for which it does"
            )
    return [dataclasses.replace(s, block_size=s.block_size * (largest // s.page_size_bytes)) for s in specs]


def get_kv_cache_groups(specs: Sequence[AttentionSpec]) -> list[KVCacheGroup]:
    """Groups of equally many layers, `specs[i]` being layer i's (`vllm/v1/core/kv_cache_utils.py`).

    The rarest kind of layer sets the size of a group: 5 full and 29 windowed layers become one group of 5, and six of 5
    with one place unused. If kinds are almost equally frequent, the most frequent sets it, and each kind is one group.
    """
    kinds: dict[AttentionSpec, list[int]] = {}
    for layer, spec in enumerate(unify_page_size(specs)):
        kinds.setdefault(spec, []).append(layer)
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = most if most < 1.5 * fewest else fewest
    return [
        KVCacheGroup(tuple(layers[i::count]), spec)  # dealt out, so that a pipeline stage has some of each
        for spec, layers in kinds.items()
        for count in [math.ceil(len(layers) / size)]
        for i in range(count)
    ]


# --- One group's tables -----------------------------------------------------------------------------------------------


class FullAttentionManager:
    """The block tables of one group, whose layers see everything (`v1/core/single_type_kv_cache_manager.py`).

    `alignment`: prefix hits are multiples of so many tokens. `hash_block_size`: a request has a hash for so many.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        group_id: int,
        block_pool: Any,
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

    # What a kind of layer decides: what it can do without, what of it a hit may ask for, how much it holds at most.

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no query from position `num_computed_tokens` on will see."""
        return 0

    def is_reachable(self, block: int) -> bool:
        """Can any hit ask for a request's `block`-th block? What cannot be asked for is not indexed."""
        return True

    def max_admission_blocks_per_request(self) -> float:
        """The most blocks that a request ever holds."""
        return math.inf

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
        required: float = math.ceil(num_tokens / self.block_size)
        if admission:
            required = min(required, self.max_admission_blocks_per_request())
        held = len(self.req_to_blocks.get(request_id, ()))
        revived = sum(self.block_pool.ref_count[block] == 0 for block in hits if block != NULL_BLOCK)
        return int(max(0, required - held - len(hits))) + revived

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
        beginning of the step that fills them, and what `alignment` delays past that is out of a hit's reach."""
        first, end = self.num_cached_block.get(request.request_id, 0), num_tokens // self.block_size
        for i in filter(self.is_reachable, range(first, end)):
            self.block_pool.cache_block(self.req_to_blocks[request.request_id][i], self.key(request.block_hashes, i))
        self.num_cached_block[request.request_id] = max(first, end)

    def key(self, block_hashes: Sequence[bytes], i: int) -> bytes:
        """The key of the i-th block: a hash names the whole prefix, so the last one inside the block is the block's."""
        return block_hashes[(i + 1) * self.hashes_per_block - 1] + self.group_id

    def free(self, request_id: str) -> None:
        self.block_pool.free([block for block in self.req_to_blocks.pop(request_id, []) if block != NULL_BLOCK])
        self.num_cached_block.pop(request_id, None)


def _cached_blocks(managers: Sequence[FullAttentionManager], hashes: Sequence[bytes], i: int) -> list[int] | None:
    """The i-th block in each of these groups, or None if one of them lacks it: a hit must serve every layer."""
    blocks = [manager.block_pool.get_cached_block(manager.key(hashes, i)) for manager in managers]
    return None if None in blocks else blocks


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

    def max_admission_blocks_per_request(self) -> int:
        """W − 1 tokens and what one step adds; one more block, since a window may begin in the middle of its first."""
        return math.ceil((self.sliding_window - 1 + self.max_in_flight_tokens) / self.block_size) + 1

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
    """Tables for several groups from one pool (`v1/core/kv_cache_manager.py`, `v1/core/kv_cache_coordinator.py`).

    Where 050's manager has a table, this one has a list of tables, one for each of `groups`. `max_in_flight_tokens`
    bounds the tokens of one step.
    """

    hash_bits = 256
    update_block_hashes = KVCacheManager.update_block_hashes

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVCacheGroup],
        max_model_len: int,
        enable_caching: bool = True,
        max_in_flight_tokens: int | None = None,
    ) -> None:
        sizes = [group.spec.block_size for group in groups]
        self.block_size = math.gcd(*sizes)  # of a hash
        self.alignment = math.lcm(*sizes)  # of a hit: whole blocks in every group
        self.block_pool = BlockPool(num_blocks)
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

    def get_block_ids(self, request_id: str) -> list[list[int]]:
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
        self, request: Request, num_tokens: int, new_computed_blocks: Sequence[Sequence[int]], admission: bool = False
    ) -> int:
        """Blocks that all groups together would take from the free queue."""
        return sum(
            manager.get_num_blocks_to_allocate(request.request_id, num_tokens, hits, admission)
            for manager, hits in zip(self.managers, new_computed_blocks)
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
        gets any. Blocks that left a window are freed in either case: nobody will read them.
        """
        hits = new_computed_blocks or [()] * len(self.managers)
        request_id, computed = request.request_id, request.num_computed_tokens
        if full_sequence_must_fit:
            whole = min(request.num_tokens, self.max_model_len)
            if self.get_num_blocks_to_allocate(request, whole, hits, True) > self.block_pool.num_free_blocks:
                return None
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, computed)
        num_tokens = min(computed + num_new_tokens, self.max_model_len)
        if self.get_num_blocks_to_allocate(request, num_tokens, hits) > self.block_pool.num_free_blocks:
            return None
        if any(hits):  # all of them, before a new block of one group evicts what another has found
            for manager, found in zip(self.managers, hits):
                manager.add_computed_blocks(request_id, found)
        new_blocks = [manager.allocate_new_blocks(request_id, num_tokens) for manager in self.managers]
        if self.enable_caching:
            self.update_block_hashes(request)
            full = min(computed + num_new_tokens, request.num_tokens) // self.alignment * self.alignment
            for manager in self.managers:
                manager.cache_blocks(request, full)
        return new_blocks

    def free(self, request: Request) -> None:
        for manager in self.managers:
            manager.free(request.request_id)


# --- Memory behind the tables -----------------------------------------------------------------------------------------


class HybridKVCache:
    """One tensor [2, num_blocks, block_size, Hkv, D] for the j-th layer of every group, whose blocks are of one size.

    That is what equal bytes are for: a block has an owner in one group at a time, so layers of different groups share a
    tensor and never a row. Memory: num_blocks · layers of a group, however many groups there are.
    """

    def __init__(self, model: llama.Llama, groups: Sequence[KVCacheGroup], num_blocks: int) -> None:
        self.block_size = groups[0].spec.block_size
        shape = (2, num_blocks, self.block_size, model.num_kv_heads, model.config.head_dim)
        self.tensors = [
            torch.zeros(shape, dtype=model.dtype, device=model.device)
            for _ in range(max(len(group.layers) for group in groups))
        ]
        self.groups = groups
        self.place = {layer: (g, j) for g, group in enumerate(groups) for j, layer in enumerate(group.layers)}

    def attend(self, tables: Sequence[Sequence[int]], start: int) -> llama.Attend:
        """The model's `attend` for the next tokens of one sequence, from position `start` on, with a table per group.

        A windowed layer gathers from the first position that its first query sees: what the null block stands for is
        never touched.
        """

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            group, j = self.place[layer]
            kv_cache, size = self.tensors[j], self.block_size
            window = getattr(self.groups[group].spec, "sliding_window", None)
            table = torch.tensor(tables[group], device=q.device)
            p = torch.arange(start, start + len(q), device=q.device)
            kv_cache[:, table[p // size], p % size] = torch.stack((k, v))
            s = torch.arange(max(0, start - window + 1) if window else 0, start + len(q), device=q.device)
            keys, values = kv_cache[:, table[s // size], s % size]  # [S, Hkv, D]
            return windowed_attention(q, keys, values, window)

        return attend


# --- What it saves ----------------------------------------------------------------------------------------------------

# Layers, of which every n-th sees everything; window; KV heads; head size. As in Transformers' configurations.
MODELS = {"Gemma-3-4B": (34, 6, 1024, 4, 256), "gpt-oss-120b": (36, 2, 128, 8, 64)}
DEFAULT: dict[str, Any] = {"model": "Gemma-3-4B", "context": 32768, "planned": 8192, "chunk": 2048, "gib": 20}
CHOICES = {
    "model": tuple(MODELS), "context": (1024, 8192, 32768, 131072), "planned": (1024, 8192, 32768, 131072),
    "chunk": (512, 2048, 8192), "gib": (10, 20, 40),
}  # fmt: skip


def layer_specs(model: str) -> list[AttentionSpec]:
    """A spec for each layer of one of MODELS, in bf16."""
    layers, every, window, num_kv_heads, head_size = MODELS[model]
    shape = {"block_size": BLOCK, "num_kv_heads": num_kv_heads, "head_size": head_size}
    full, windowed = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=window)
    return [windowed if i % every else full for i in range(1, layers + 1)]


def serve(managers: Sequence[HybridKVCacheManager], name: str, context: int, chunk: int) -> list[list[int]] | None:
    """Let one sequence in, its prompt by chunks, then one token, with tables in all `managers`. After each step, the
    blocks that each group holds; None, and nothing is held, if one of the pools has too few."""
    request, steps = Request(name, [0] * context, SamplingParams(max_tokens=1)), []
    while request.num_computed_tokens < context:
        n = min(chunk, context - 1 - request.num_computed_tokens) or 1
        if any(manager.allocate_slots(request, n) is None for manager in managers):
            for manager in managers:
                manager.free(request)
            return None
        request.num_computed_tokens += n
        tables = [table for manager in managers for table in manager.get_block_ids(name)]
        steps.append([len(table) - table.count(NULL_BLOCK) for table in tables])
    return steps


def blocks_held(groups: Sequence[KVCacheGroup], context: int, chunk: int) -> list[list[int]]:
    """The blocks that a sequence of `context` tokens holds in each group, after each of its steps."""
    enough = len(groups) * (context // min(group.spec.block_size for group in groups) + 1) + 1
    return serve([HybridKVCacheManager(enough, groups, context, False)], "", context, chunk) or []


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """How many sequences of `context` tokens the memory holds in each of three ways, and what one holds on its way.

    params: model, context, planned, chunk (tokens), gib. Raises InputError. `as_if_full`: one table, every layer keeps
    everything. `pool_each`: full and windowed layers have memory of their own, divided for sequences of `planned`
    tokens. `hybrid`: one pool.
    """
    p = checked(params, CHOICES)
    specs, memory = layer_specs(p["model"]), p["gib"] * 2**30
    page, groups = specs[0].page_size_bytes, get_kv_cache_groups(specs)
    full = [group for group in groups if isinstance(group.spec, FullAttentionSpec)]
    windowed = [group for group in groups if isinstance(group.spec, SlidingWindowSpec)]
    block_bytes = max(len(group.layers) for group in groups) * page

    def manager(groups: Sequence[KVCacheGroup], num_blocks: int) -> HybridKVCacheManager:
        return HybridKVCacheManager(num_blocks + 1, groups, 1 << 20, False, p["chunk"])

    shares = [sum(blocks_held(kind, p["planned"], p["chunk"])[-1]) for kind in (full, windowed)]
    blocks = memory // block_bytes
    first = blocks * shares[0] // sum(shares)
    ways = {
        "as_if_full": [manager([KVCacheGroup(tuple(range(len(specs))), full[0].spec)], memory // (len(specs) * page))],
        "pool_each": [manager(full, first), manager(windowed, blocks - first)],
        "hybrid": [manager(groups, blocks)],
    }
    trace: dict[str, Any] = {
        "params": p,
        "groups": [[len(group.layers), getattr(group.spec, "sliding_window", 0)] for group in groups],
        "block_bytes": block_bytes,
        "steps": blocks_held(groups, p["context"], p["chunk"]),
        "ways": {},
    }
    for way, managers in ways.items():
        count = 0
        while serve(managers, str(count), p["context"], p["chunk"]):
            count += 1
        pools = [each.block_pool for each in managers]
        free, usable = (sum(xs) for xs in zip(*((pool.num_free_blocks, pool.num_blocks - 1) for pool in pools)))
        trace["ways"][way] = {"sequences": count, "free_permille": free * 1000 // usable}  # when no more fits
    return trace


def facts() -> dict[str, Any]:
    """The numbers that lesson 09 quotes of this part."""
    found: dict[str, Any] = {}
    for model, (layers, _, window, _, _) in MODELS.items():
        groups, page = get_kv_cache_groups(layer_specs(model)), layer_specs(model)[0].page_size_bytes
        steps, size = blocks_held(groups, 131072, DEFAULT["chunk"]), max(len(group.layers) for group in groups)
        windowed = next(i for i, group in enumerate(groups) if getattr(group.spec, "sliding_window", 0) == window)
        held, everything = sum(steps[-1]) * size * page, 131072 // BLOCK * layers * page
        runs = {f"{n // 1024}k": simulate(DEFAULT | {"model": model, "context": n})["ways"] for n in (1024, 32768)}
        found[model.lower().replace("-", "_")] = {
            "groups": len(groups), "layers_per_group": size, "unused": size * len(groups) - layers,
            "window_blocks": steps[-1][windowed], "window_peak": max(step[windowed] for step in steps),
            "mib_128k": held / 2**20, "as_if_full_mib_128k": everything / 2**20, "saved": 1 - held / everything,
            "fit": {n: {way: result["sequences"] for way, result in ways.items()} for n, ways in runs.items()},
            "free": {n: {way: result["free_permille"] / 1000 for way, result in ways.items()}
                     for n, ways in runs.items()},
        }  # fmt: skip
    return found

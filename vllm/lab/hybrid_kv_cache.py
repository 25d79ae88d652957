"""What the hybrid KV cache saves: layers that forget, and one pool for all. For lesson 09.

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
All that is `engine/kv_cache_interface.py` and `engine/core/hybrid_kv_cache.py`, whose decisions are compared with
vLLM's, block by block. Here the same memory is filled with sequences in three ways: every layer as if it saw
everything, a pool for each kind of layer, and one for all.

Read for this: Zhang et al. 2025 (Jenga); vLLM 0.32 `v1/core/kv_cache_coordinator.py`,
`v1/core/single_type_kv_cache_manager.py`, `v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.core.hybrid_kv_cache import NULL_BLOCK, HybridKVCacheManager
from engine.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    SlidingWindowSpec,
    get_kv_cache_groups,
)
from engine.request import Request, SamplingParams
from lab.parameters import checked

BLOCK = 16  # tokens in a block, vLLM's default

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

"""What automatic prefix caching finds, counted without a model: by formula, and by pool size for a workload of chats.

Owns the reference, a cache that forgets nothing and compares tokens, and the workload; called by lesson 05. It never
caches anything itself, which `engine/core/kv_cache_manager.py` does.
vLLM: `vllm/v1/core/kv_cache_utils.py`; Qin et al. 2025 (Mooncake) for the published trace.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from engine.core.kv_cache_manager import KVCacheManager
from engine.request import Request, SamplingParams

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
        manager, hit, total = KVCacheManager(num_blocks + 1, BLOCK, 1 << 20), 0, 0
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

"""Which engine gets a request.

Owns what an API server knows of its engines' queues, and what it sent where; asked by `dp_client` for every request.
It never asks an engine: the counts come from the coordinator, and prefixes from its own memory.
vLLM: `vllm/v1/engine/core_client.py:DPLBAsyncMPClient`.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.core.kv_cache_manager import ROOT_HASH, block_extra_keys, hash_block_tokens
from engine.request import Request


class LoadBalancer:
    """vLLM's choice among engines (`DPLBAsyncMPClient.get_core_engine_for_request`).

    score = max(client_count · inflight, waiting + running) + 6 · waiting · max(0, kv_cache_usage − 0.5)

    `inflight` is this client's own count and exact; the rest is the coordinator's latest word. A queue before a full
    cache drains slowly: at 100 % usage, each waiting request counts for three more.
    """

    def __init__(self, num_engines: int, client_index: int = 0, client_count: int = 1) -> None:
        self.counts: list[list[float]] = [[0, 0, 0.0] for _ in range(num_engines)]  # waiting, running, KV usage
        self.inflight = [0] * num_engines
        self.client_count, self.start = client_count, num_engines * client_index // client_count

    def score(self, engine: int) -> float:
        waiting, running, kv_cache_usage = self.counts[engine]
        load = max(self.client_count * self.inflight[engine], waiting + running)
        return load + waiting * 6.0 * max(0.0, kv_cache_usage - 0.5)

    def choose(self, request: Request) -> int:
        """The engine for a request, which counts as waiting there until the coordinator says otherwise."""
        engine = self.pick(request)
        self.counts[engine][0] += self.client_count
        self.inflight[engine] += 1
        return engine

    def pick(self, request: Request) -> int:
        """The lowest score; whom ties favour goes round."""
        n = len(self.counts)
        order = [(self.start + i) % n for i in range(n)]
        self.start = (self.start + 1) % n
        return min(order, key=self.score)

    def finished(self, engine: int) -> None:
        self.inflight[engine] -= 1


class PrefixAwareBalancer(LoadBalancer):
    """Send a request where its prefix is cached, unless that engine is `max_imbalance` requests behind the best.

    vLLM leaves this to routers in front of it. Like most of them, this one does not ask engines what they have: it
    remembers what it sent where (lesson 05's block hashes), and forgets the oldest when a cache must be full.
    """

    def __init__(  # noqa: PLR0913  a balancer's arguments, and three of its own
        self,
        num_engines: int,
        client_index: int = 0,
        client_count: int = 1,
        *,
        block_size: int = 16,
        num_blocks: int = 1 << 14,
        max_imbalance: float = 4,
    ) -> None:
        super().__init__(num_engines, client_index, client_count)
        self.block_size, self.num_blocks, self.max_imbalance = block_size, num_blocks, max_imbalance
        self.sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]

    def hashes(self, request: Request) -> list[bytes]:
        """Hashes of the prompt's full blocks, as that engine's prefix cache will have them."""
        parent, found, tokens = ROOT_HASH, [], request.prompt_token_ids
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            extra_keys = block_extra_keys(request, not found)
            parent = hash_block_tokens(parent, tokens[end - self.block_size : end], extra_keys)
            found.append(parent)
        return found

    def pick(self, request: Request) -> int:
        """The engine that was sent the longest matching prefix, unless it is `max_imbalance` behind the idlest."""
        hashes, engines = self.hashes(request), range(len(self.sent))
        matched = [next((i for i, h in enumerate(hashes) if h not in self.sent[e]), len(hashes)) for e in engines]
        by_load = super().pick(request)
        best = max(engines, key=lambda e: (matched[e], -self.score(e)))
        if matched[best] == matched[by_load] or self.score(best) > self.score(by_load) + self.max_imbalance:
            best = by_load
        for block_hash in hashes:
            self.sent[best][block_hash] = None
            self.sent[best].move_to_end(block_hash)
        while len(self.sent[best]) > self.num_blocks:
            self.sent[best].popitem(last=False)
        return best


BALANCERS = {"load": LoadBalancer, "prefix": PrefixAwareBalancer}

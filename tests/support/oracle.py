"""A drafter who knows the answers."""

from __future__ import annotations

import random

from engine.spec_decode.drafters import Draft, Drafter


class Oracle(Drafter):
    """Knows what plain decoding writes, and lies in some positions."""

    def __init__(self, truth: dict[tuple, list[int]], right: float = 0.7, vocab: int = 128) -> None:
        self.truth, self.right, self.vocab, self.rng = truth, right, vocab, random.Random(0)
        self.forgotten: list[str] = []

    def propose(self, contexts):
        drafts = []
        for c in contexts:
            whole = next([*p, *out] for p, out in self.truth.items() if c.token_ids[: len(p)] == list(p))
            draft = whole[len(c.token_ids) :][: c.max_tokens]
            drafts.append(Draft([t if self.rng.random() < self.right else (t + 1) % self.vocab for t in draft]))
        return drafts

    def forget(self, request_id):
        self.forgotten.append(request_id)

"""Chats that repeat themselves: the workload by which prefix caching is measured.

Owns who says how much, and when; called by lesson 05. It never looks anything up, which a prefix cache does.
"""

from __future__ import annotations

import math
import random

# Turns per conversation, lengths of messages and answers in tokens, and seconds: the means.
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

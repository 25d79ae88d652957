"""Transfers on a bad day: what may happen to messages, and what the engine's two state machines make of it.

Owns a wire in memory and a clock of its own; called by lesson 08, its numbers, and tests. It never opens a connection.
vLLM: the base is `tests/v1/kv_connector/unit/`.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from typing import Any

import torch

from engine.kv_transfer.consumer import Consumer
from engine.kv_transfer.heads import HeadSlice
from engine.kv_transfer.producer import Producer


class Faults:
    """What a bad day does to the messages of a prefill worker."""

    KINDS = ("none", "duplicate", "truncate", "drop", "reorder", "stall", "prefill-dies", "decode-dies")

    def __init__(self, kind: str, after: int = 12) -> None:
        self.kind, self.after, self.count, self.held = kind, after, 0, []

    def __call__(self, link: Any, header: dict[str, Any], payload: torch.Tensor) -> list[tuple[dict, torch.Tensor]]:
        """What is really sent. From message `after` on, each kind does its worst."""
        self.count += 1
        messages = [(header, payload)]
        if self.kind == "prefill-dies" and self.count > self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "duplicate":
            return messages * 2
        if self.kind == "stall":
            return messages if self.count <= self.after else []
        if self.kind in ("drop", "truncate", "reorder") and self.count == self.after:
            self.held = messages if self.kind == "reorder" else []
            return [(header, payload[: payload.nbytes // 2])] if self.kind == "truncate" else []
        held, self.held = self.held, []
        return messages + held


class MemoryLink:
    """One end of a connection that is two lists. What is sent here arrives at `other`."""

    has_room, lost = True, None

    def __init__(self) -> None:
        self.other, self.arrived = self, deque()

    def send(self, header: dict[str, Any], payload: Any = None) -> None:
        self.other.arrived.append((header, payload))


def rehearse(fault: str, num_layers: int = 30, num_tokens: int = 100, steps: int = 2) -> dict[str, Any]:
    """One prompt in `steps` chunks to one decode worker, on a clock of our own: what each kind of fault costs.

    Returns counts, the fake seconds it took, and why it failed, if it did.
    """
    now, died, memory, wire = 0.0, False, {}, Faults("none" if fault == "prefill-dies" else fault)
    ours, theirs = MemoryLink(), MemoryLink()  # the producer's end, the consumer's
    ours.other, theirs.other = theirs, ours

    def write(blocks: list[int], header: dict[str, Any], payload: torch.Tensor) -> bool:
        if payload.nbytes == 2:
            memory.update({(header["layer"], header["first"] + t): True for t in range(header["count"])})
        return payload.nbytes == 2

    producer = Producer(num_layers, lambda *_: torch.zeros(2, dtype=torch.uint8), clock=lambda: now)
    consumer = Consumer(num_layers, write, timeout=10, retries=1, clock=lambda: now)
    consumer.start("x", "r", [], 0, num_tokens, [(theirs, HeadSlice(0, 0, 3), 1)])

    def put(link: MemoryLink, header: dict[str, Any], payload: torch.Tensor) -> None:
        for each in wire(link, header, payload):
            link.send(*each)

    def exchange() -> None:
        """Everything on the wire arrives, and what that leads to as well."""
        nonlocal died
        while (ours.arrived or theirs.arrived) and not died:
            if ours.arrived:
                producer.on_message(ours, ours.arrived.popleft()[0])
                producer.pump(put)
            if theirs.arrived:
                header, payload = theirs.arrived.popleft()
                consumer.on_message(theirs, header, payload)
            if fault == "prefill-dies" and producer.stats["messages"] > wire.after:
                died = True
                consumer.on_lost(theirs, "the connection was closed in the middle of a message")

    exchange()
    for step in range(1, steps + 1):
        producer.export("x", [])
        for layer in range(num_layers if not died else 0):
            producer.written("x", layer, num_tokens * step // steps)
            producer.pump(put)
            exchange()
    kept = not died and producer.finish("x")
    while not (consumer.finished or consumer.failed):
        now += 1
        consumer.check()
        exchange()
    exchange()
    return {
        **{name: consumer.stats[name] for name in ("duplicate", "corrupt", "gap", "retries")}, "seconds": now,
        "messages": producer.stats["messages"], "arrived": consumer.stats["messages"], "left": len(producer.exports),
        "why": consumer.failed.get("r", ""), "whole": len(memory) == num_layers * num_tokens, "kept": kept,
    }  # fmt: skip

"""The producer's state machine: a prompt that was computed here is sent to whoever asks, and kept until they have it.

Owns exports, leases and who waits for what; runs on the engine's own thread, between steps or inside one, so nobody
reads a block behind the scheduler's back. It knows messages, positions and clocks, never sockets or tensors.
vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_worker.py`.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Subscription:
    """Somebody who wants an export: which heads, and for each layer up to which position it has been sent."""

    link: Any
    head: int
    heads: int
    end: int
    sent: list[int]


@dataclass
class Export:
    """A prompt being computed here for somebody else. `ready[i]`: leading positions that layer i has in `blocks`."""

    transfer: str
    blocks: list[int]
    ready: list[int]
    finished: bool = False
    deadline: float = 0.0  # of the lease, which begins when it is finished
    consumers: int = 1
    done: set = field(default_factory=set)  # links that need no more of it
    subscriptions: list[Subscription] = field(default_factory=list)


class Producer:
    """Sends what is ready to whoever asks, as soon as it is ready; keeps it until they have it, or the lease is up.

    A GET may come before the request, while it runs, or after: then its layers go out of the blocks, which is why these
    are kept. Nothing is buffered beyond what a link has room for.
    """

    PIECE = 1024  # most positions in a message

    def __init__(
        self,
        num_layers: int,
        read: Callable[..., Any],
        lease: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read(blocks, layer, first, count, head, heads)` is the payload of a rectangle."""
        self.num_layers, self.read, self.lease, self.clock = num_layers, read, lease, clock
        self.exports: dict[str, Export] = {}
        self.early: dict[str, list[tuple[Any, dict, float]]] = defaultdict(list)  # letters about what is not here yet
        self.gone: OrderedDict[str, str] = OrderedDict()  # transfers that are over, and how: the last thousand
        self.released: list[str] = []
        self.stats: Counter[str] = Counter()

    def export(self, transfer: str, blocks: list[int]) -> None:
        """A request that will be wanted elsewhere has (more) blocks."""
        if transfer in self.exports:
            self.exports[transfer].blocks = blocks
            return
        if transfer in self.gone:
            return
        self.exports[transfer] = Export(transfer, blocks, [0] * self.num_layers)
        for link, header, _ in self.early.pop(transfer, ()):
            self.on_message(link, header)

    def written(self, transfer: str, layer: int, num_tokens: int) -> None:
        """Layer `layer` has keys and values of the first `num_tokens` positions."""
        if export := self.exports.get(transfer):
            export.ready[layer] = num_tokens

    def preempted(self, transfer: str) -> None:
        """Its blocks are gone, it will be computed again; what was sent stays sent, since it will be the same."""
        if export := self.exports.get(transfer):
            export.ready, export.blocks = [0] * self.num_layers, []

    def finish(self, transfer: str) -> bool:
        """The prompt is computed. Must its blocks be kept? If so, its name will be in `released` one day."""
        if (export := self.exports.get(transfer)) is None:
            return False
        export.finished, export.deadline = True, self.clock() + self.lease
        if len(export.done) >= export.consumers:
            self._end(transfer, "delivered")
            return False
        return True

    def forget(self, transfer: str, why: str) -> None:
        """The request has ended without a prompt to hand over; whoever waits for it, or will ask, must know."""
        self._end(transfer, why)
        for link, header, _ in self.early.pop(transfer, ()):
            if header["kind"] == "GET":
                link.send({"kind": "GONE", "transfer": transfer, "why": why})

    def on_message(self, link: Any, header: dict[str, Any]) -> None:
        """GET: subscribe, or start again from what the consumer says it has. DONE, CANCEL: it needs no more."""
        transfer, get = header["transfer"], header["kind"] == "GET"
        if (export := self.exports.get(transfer)) is None:
            if transfer not in self.gone:
                self.early[transfer].append((link, header, self.clock() + self.lease))
            elif get:
                link.send({"kind": "GONE", "transfer": transfer, "why": self.gone[transfer]})
            return
        export.subscriptions = [s for s in export.subscriptions if s.link is not link]
        if not get:
            export.done.add(link)
            if export.finished and len(export.done) >= export.consumers:
                self.released.append(transfer)
                self._end(transfer, "delivered")
        elif len(header["have"]) != self.num_layers:
            link.send({"kind": "GONE", "transfer": transfer, "why": f"this model has {self.num_layers} layers"})
        else:
            wanted = Subscription(link, header["head"], header["heads"], header["end"], list(header["have"]))
            export.subscriptions.append(wanted)
            export.consumers, export.deadline = max(1, header["consumers"]), self.clock() + self.lease

    def on_lost(self, link: Any) -> None:
        """A consumer died, or the way to it. Another attempt has another name, so this is as good as a CANCEL."""
        for export in list(self.exports.values()):
            if any(s.link is link for s in export.subscriptions):
                self.on_message(link, {"kind": "CANCEL", "transfer": export.transfer})
        for transfer in list(self.early):
            self.early[transfer] = [entry for entry in self.early[transfer] if entry[0] is not link]

    def pump(self, send: Callable[[Any, dict, Any], None]) -> None:
        """Send everything that is ready, not sent yet, and has room: `send(link, header, payload)`."""
        for export in self.exports.values():
            for s in export.subscriptions:
                for layer in range(self.num_layers):
                    while s.sent[layer] < (end := min(export.ready[layer], s.end)) and s.link.has_room:
                        first = s.sent[layer]
                        count = min(end - first, self.PIECE)
                        payload = self.read(export.blocks, layer, first, count, s.head, s.heads)
                        s.sent[layer] = first + count
                        self.stats["messages"] += 1
                        self.stats["early"] += not export.finished
                        rectangle = {"layer": layer, "first": first, "count": count, "head": s.head, "heads": s.heads}
                        send(s.link, {"kind": "KV", "transfer": export.transfer, **rectangle}, payload)

    def is_late(self) -> bool:
        """Has somebody waited a whole lease for what never came here?"""
        return any(self.clock() >= deadline for letters in self.early.values() for *_, deadline in letters)

    def expire(self) -> None:
        """Nobody came, or nobody finished: take the blocks back."""
        now = self.clock()
        for export in [e for e in self.exports.values() if e.finished and now >= e.deadline]:
            self.stats["expired"] += 1
            self.released.append(export.transfer)
            self._end(export.transfer, f"its lease of {self.lease:g} s is up")
        for transfer in list(self.early):
            for link, header, _ in [entry for entry in self.early[transfer] if now >= entry[2]]:
                if header["kind"] == "GET":
                    link.send({"kind": "GONE", "transfer": transfer, "why": "no such request came here"})
            self.early[transfer] = [entry for entry in self.early[transfer] if now < entry[2]]
            if not self.early[transfer]:
                del self.early[transfer]

    def _end(self, transfer: str, why: str) -> None:
        export = self.exports.pop(transfer, None)  # None: it ended before it began
        for s in export.subscriptions if export else ():
            s.link.send({"kind": "GONE", "transfer": transfer, "why": why})
        self.gone[transfer] = why
        while len(self.gone) > 1000:
            self.gone.popitem(last=False)

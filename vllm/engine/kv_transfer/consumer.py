"""The consumer's state machine: asks for a prompt that somebody else computes, and gives up in the end.

Owns imports, retries and deadlines; runs on the engine's own thread, between steps or inside one, so nobody writes a
block behind the scheduler's back. It knows messages, positions and clocks, never sockets or tensors.
vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_worker.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.kv_transfer.heads import HeadSlice


@dataclass
class Source:
    """A producer's rank that one import reads from: `have[i]` is the position up to which layer i has arrived."""

    link: Any
    head: int
    heads: int
    consumers: int
    have: list[int]


@dataclass
class Import:
    """A prompt that somebody else computes, on its way into `blocks`: positions [first, end)."""

    transfer: str
    request_id: str
    blocks: list[int]
    end: int
    sources: list[Source]
    deadline: float
    retries: int
    started: float


class Consumer:
    """Asks, writes what arrives into blocks, asks again for what did not, and gives up in the end.

    Go-back-N for each layer: a rectangle is taken if it begins at or before the position up to which we have
    everything. What comes twice changes nothing; what is cut, changed, or comes too early is as good as lost.
    """

    def __init__(
        self,
        num_layers: int,
        write: Callable[..., bool],
        timeout: float = 10.0,
        retries: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`write(blocks, header, payload)` puts a rectangle into blocks; False: the payload is not what it says."""
        self.num_layers, self.write, self.timeout, self.retries, self.clock = num_layers, write, timeout, retries, clock
        self.imports: dict[str, Import] = {}  # by transfer
        self.finished: list[str] = []  # request ids
        self.cancelled: list[str] = []
        self.failed: dict[str, str] = {}  # request id: why
        self.stats: Counter[str] = Counter()

    def start(  # noqa: PLR0913, an import is that much
        self,
        transfer: str,
        request_id: str,
        blocks: list[int],
        first: int,
        end: int,
        sources: Sequence[tuple[Any, HeadSlice, int]],
    ) -> None:
        """Ask for positions [first, end); `sources` are (link, heads of it, how many ranks read from it)."""
        made = [
            Source(link, piece.head, piece.heads, consumers, [first] * self.num_layers)
            for link, piece, consumers in sources
        ]
        now = self.clock()
        found = Import(transfer, request_id, blocks, end, made, now + self.timeout, self.retries, now)
        self.imports[transfer] = found
        if first >= end:  # nothing is wanted, but somebody keeps it for us; and nobody here waits to hear that it came
            self._end(found, "DONE")
        else:
            self._ask(found)

    def _ask(self, found: Import) -> None:
        for s in found.sources:
            if min(s.have) < found.end:
                s.link.send(
                    {
                        "kind": "GET",
                        "transfer": found.transfer,
                        "head": s.head,
                        "heads": s.heads,
                        "end": found.end,
                        "have": s.have,
                        "consumers": s.consumers,
                    }
                )

    def on_message(self, link: Any, header: dict[str, Any], payload: Any) -> None:
        """Only for a transfer that still runs, from a link that it was asked of; others are counted as stale."""
        found = self.imports.get(header["transfer"])
        source = next((s for s in found.sources if s.link is link), None) if found else None
        if found is None or source is None:
            self.stats["stale"] += 1  # of a transfer that is over: its blocks belong to others now
        elif header["kind"] == "GONE":
            self._fail(found, f"the prefill worker has it no more: {header['why']}")
        else:
            self._on_kv(found, source, header, payload)

    def _on_kv(self, found: Import, source: Source, header: dict[str, Any], payload: Any) -> None:
        layer, first, end = header["layer"], header["first"], header["first"] + header["count"]
        heads = header["head"], header["heads"]
        if layer >= self.num_layers or end > found.end or heads != (source.head, source.heads):
            self.stats["corrupt"] += 1
        elif end <= source.have[layer]:
            self.stats["duplicate"] += 1
        elif first > source.have[layer]:
            self.stats["gap"] += 1
        elif not self.write(found.blocks, header, payload):
            self.stats["corrupt"] += 1
        else:
            source.have[layer] = end
            found.deadline = self.clock() + self.timeout
            self.stats["messages"] += 1
            if all(min(s.have) >= found.end for s in found.sources):
                self._complete(found)

    def on_lost(self, link: Any, why: str) -> None:
        for found in [i for i in self.imports.values() if any(s.link is link for s in i.sources)]:
            self._fail(found, f"the connection to the prefill worker is lost: {why}")

    def check(self) -> None:
        """Whoever has made no progress for `timeout` seconds asks again, `retries` times; then it has failed."""
        now = self.clock()
        for found in [i for i in self.imports.values() if now >= i.deadline]:
            if found.retries == 0:
                self._fail(found, f"no progress for {self.timeout:g} s")
                continue
            found.retries, found.deadline = found.retries - 1, now + self.timeout
            self.stats["retries"] += 1
            self._ask(found)

    def cancel(self, request_id: str) -> None:
        """The request has ended here. From now on nothing of it is written, and its blocks may be freed."""
        for found in [i for i in self.imports.values() if i.request_id == request_id]:
            self._end(found, "CANCEL")
            self.cancelled.append(request_id)

    def _complete(self, found: Import) -> None:
        self.stats["microseconds"] += round((self.clock() - found.started) * 1e6)
        self._end(found, "DONE")
        self.finished.append(found.request_id)

    def _fail(self, found: Import, why: str) -> None:
        self.stats["failed"] += 1
        self._end(found, "CANCEL")
        self.failed[found.request_id] = why

    def _end(self, found: Import, kind: str) -> None:
        del self.imports[found.transfer]
        for s in found.sources:
            s.link.send({"kind": kind, "transfer": found.transfer})

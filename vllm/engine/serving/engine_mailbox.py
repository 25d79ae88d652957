"""The engine core's end of its sockets: one for every API server process, and one to the coordinator.

Owns which client a request came from; called by `core_proc` as a mailbox is. It never waits for a reader: what one has
not taken yet lies in an `Outbox`. vLLM: `vllm/v1/engine/core.py`, `vllm/v1/engine/utils.py`.
"""

from __future__ import annotations

import pickle
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from engine.serving.letters import EngineCoreOutputs, EngineCoreRequestType, Reply
from engine.serving.mailbox import ClientGone, hang_up
from engine.serving.wire import frame, take_letters


class Outbox:
    """A socket, and what its reader has not taken yet. Who writes to several readers must not wait for one of them: one
    that has stopped would stop all the others."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.unsent, self.state, self.gone = sock, bytearray(), b"", False
        sock.setblocking(False)

    def fileno(self) -> int:  # `select` takes it as it is
        return self.sock.fileno()

    @property
    def pending(self) -> bool:
        return bool(self.unsent or self.state)

    def put(self, letter: Any, is_state: bool = False) -> None:
        """Send a letter now, or when there is room. Of those that only say how things are, one waits: the last."""
        if is_state:
            self.state = frame(letter)
        else:
            self.unsent += self.state + frame(letter)
            self.state = b""
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self.pending:
                if not self.unsent:
                    self.unsent, self.state = bytearray(self.state), b""
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # nobody will ever read it
            self.unsent, self.state, self.gone = bytearray(), b"", True


class EngineMailbox:
    """The engine core's end of its sockets: one for every API server process, and one to the coordinator.

    What an API server does not read waits here, and its own requests bound that: it asks for nothing more meanwhile.
    """

    def __init__(self, clients: Sequence[socket.socket], coordinator: socket.socket | None, engine: int) -> None:
        self.clients: dict[int, Outbox] = {index: Outbox(sock) for index, sock in enumerate(clients)}
        self.coordinator, self.engine = coordinator and Outbox(coordinator), engine
        self.buffers = {index: bytearray() for index in self.clients}
        self.owner: dict[str, int] = {}  # request id: the client that sent it
        self.watched: Sequence[Any] = ()  # readable when a worker has died
        self.alive: Callable[[], None] = lambda: None
        self.reported: list[float] = []

    def receive(self, seconds: float | None) -> list[Any]:
        """All letters that are here; waits up to `seconds` for one, None is for ever. Raises ClientGone, or
        ExecutorFailed."""
        letters, stop = [], time.monotonic() + (seconds or 0)
        while self.clients:
            wait = 0 if letters else seconds and max(0.0, stop - time.monotonic())
            readable, writable, _ = select.select([*self.clients.values(), *self.watched], self.pending(), [], wait)
            if not (readable or writable):
                return letters
            if any(x in self.watched for x in readable):
                self.alive()
            for box in writable:
                box.flush()
            for index, box in list(self.clients.items()):
                if box in readable:
                    letters += self._read(index, box.sock)
        raise ClientGone

    def pending(self) -> list[Outbox]:
        """Who has not taken all that was sent."""
        return [box for box in (*self.clients.values(), self.coordinator) if box and box.pending]

    def close(self, patience: float = 2.0) -> None:
        """Hang up when all that was sent has been read; after `patience` seconds in any case."""
        stop = time.monotonic() + patience
        while (late := self.pending()) and (wait := stop - time.monotonic()) > 0:
            for box in select.select([], late, [], wait)[1]:
                box.flush()
        hang_up(box.sock for box in self.clients.values())

    def _read(self, index: int, sock: socket.socket) -> list[Any]:
        try:
            chunk = sock.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        if not chunk:
            return self._hung_up(index)
        letters: list[Any] = []
        self.buffers[index] += chunk
        try:
            for letter in take_letters(self.buffers[index]):
                letters += self._sort(index, *letter)
        except (pickle.UnpicklingError, TypeError, AttributeError, LookupError):  # no letter: what else will it send?
            return letters + self._hung_up(index)
        return letters

    def _sort(self, index: int, kind: Any, content: Any) -> list[Any]:
        """A client's letter as the engine core takes it; nothing if it is refused here."""
        if kind is EngineCoreRequestType.ADD:
            if self.owner.get(content.request_id, index) != index:
                refused = {content.request_id: f"request_id {content.request_id!r}: is in use"}
                self._send(index, EngineCoreOutputs(refused=refused))
                return [(EngineCoreRequestType.START_DP_WAVE, None)]  # of which others have been told
            self.owner[content.request_id] = index
        elif kind is EngineCoreRequestType.ABORT:
            for request_id in content:
                self.owner.pop(request_id, None)
        elif kind is EngineCoreRequestType.UTILITY:
            content = ((index, content[0]), *content[1:])
        return [(kind, content)]

    def _hung_up(self, index: int) -> list[Any]:
        """An API server is gone, and nobody will read the answers of its requests."""
        del self.clients[index]
        gone = [request_id for request_id, owner in self.owner.items() if owner == index]
        for request_id in gone:
            del self.owner[request_id]
        return [(EngineCoreRequestType.ABORT, gone)] if gone and self.clients else []

    def send(self, letter: Any) -> None:
        """To everybody, to the one who asked, or to each what concerns its requests."""
        if isinstance(letter, Reply):
            index, letter.call_id = letter.call_id
            self._send(index, letter)
        elif isinstance(letter, EngineCoreOutputs):
            self._report(letter.scheduler_stats)
            for index, part in self.split(letter).items():
                self._send(index, part, is_state=part is letter)
        else:
            for index in self.clients:
                self._send(index, letter)
        if all(box.gone for box in self.clients.values()):
            raise ClientGone

    def split(self, letter: EngineCoreOutputs) -> dict[int, EngineCoreOutputs]:
        """A step's outputs by client. A step that brought nobody anything is told to all: it may have emptied us."""
        stats = letter.scheduler_stats
        parts: dict[int, Any] = defaultdict(lambda: EngineCoreOutputs(scheduler_stats=stats))
        for request_id, admission in letter.admitted.items():
            if (index := self.owner.get(request_id)) is not None:
                parts[index].admitted[request_id] = admission
        for request_id in letter.preempted:
            if (index := self.owner.get(request_id)) is not None:
                parts[index].preempted.append(request_id)
        for request_id, why in letter.refused.items():
            if (index := self.owner.pop(request_id, None)) is not None:
                parts[index].refused[request_id] = why
        for output in letter.outputs:
            if (index := self.owner.get(output.request_id)) is None:
                continue
            parts[index].outputs.append(output)
            if output.finish_reason:
                del self.owner[output.request_id]
        return parts if parts or letter.outputs else {index: letter for index in self.clients}

    def _send(self, index: int, letter: Any, is_state: bool = False) -> None:
        if index in self.clients:
            self.clients[index].put(letter, is_state)

    def _report(self, stats: Any) -> None:
        """Tell the coordinator when the queues have changed."""
        if self.coordinator is None or stats is None:
            return
        counts = [stats.num_waiting_reqs + stats.num_skipped_waiting_reqs, stats.num_running_reqs, stats.kv_cache_usage]
        if counts[:2] != self.reported[:2]:
            self.reported = counts
            self.coordinator.put((self.engine, counts), is_state=True)

"""The waiting queue, in its three orders: first come first served, by priority, by tenant.

Owns who is next; the scheduler's only. It never looks at blocks or budget. vLLM: `vllm/v1/core/sched/request_queue.py`
(the queue by tenant is Sheng et al. 2024's and not in vLLM).
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterator

from engine.request import Request


class FCFSRequestQueue(deque):
    """First come, first served; whoever is preempted goes back in front of all others (lesson 11)."""

    add_request, prepend_request = deque.append, deque.appendleft
    pop_request, remove_request = deque.popleft, deque.remove

    def peek_request(self) -> Request:
        return self[0]


class PriorityRequestQueue(list):
    """The smallest `(priority, arrival_time)` first; whoever is preempted goes back to that place (lesson 11).

    A sorted list. vLLM has a heap, out of whose middle it takes an aborted request by building it anew.
    """

    def add_request(self, request: Request) -> None:
        bisect.insort(self, request)

    prepend_request = add_request

    def pop_request(self) -> Request:
        return self.pop(0)

    def peek_request(self) -> Request:
        return self[0]

    def remove_request(self, request: Request) -> None:
        del self[bisect.bisect_left(self, request)]


class FairRequestQueue:
    """The next request is one of the tenant that has been served least (Sheng et al. 2024: virtual token counter).

    A tenant is an adapter. Its counter grows by what it is served; one that comes back from a pause starts at the
    least among those who wait (if nobody does, at that of who left the queue last), or it could claim all that it did
    not use.
    """

    def __init__(self) -> None:
        self.queues: dict[str | None, deque[Request]] = {}
        self.counters: Counter[str | None] = Counter()
        self.left_last: str | None = None

    def add_request(self, request: Request, front: bool = False) -> None:
        """A tenant that comes back starts at the least counter of those who wait: it saves nothing up."""
        tenant = request.lora_name
        if not self.queues.get(tenant):
            waiting = [other for other, queue in self.queues.items() if queue] or [self.left_last]
            if not front:
                self.counters[tenant] = max(self.counters[tenant], min(self.counters[other] for other in waiting))
            self.queues[tenant] = deque()
        (self.queues[tenant].appendleft if front else self.queues[tenant].append)(request)

    def prepend_request(self, request: Request) -> None:
        self.add_request(request, front=True)

    def charge(self, tenant: str | None, tokens: int) -> None:
        self.counters[tenant] += tokens

    def peek_request(self) -> Request:
        tenants = [tenant for tenant, queue in self.queues.items() if queue]
        return self.queues[min(tenants, key=lambda t: (self.counters[t], self.queues[t][0].arrival_time))][0]

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.queues[request.lora_name].popleft()
        self.left_last = request.lora_name
        return request

    def remove_request(self, request: Request) -> None:
        self.queues[request.lora_name].remove(request)

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def __iter__(self) -> Iterator[Request]:
        return iter(
            sorted(
                (request for queue in self.queues.values() for request in queue),
                key=lambda request: request.arrival_time,
            )
        )

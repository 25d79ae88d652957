"""Who is next."""

from __future__ import annotations

from engine.core.queues import FairRequestQueue
from engine.request import Request, SamplingParams


def test_a_tenant_that_comes_back_starts_at_the_least_of_those_who_wait():
    """And keeps its own counter where that is higher."""
    queue = FairRequestQueue()

    def arrive(name: str) -> None:
        queue.add_request(Request(name, [1], SamplingParams(), lora_name=name))

    for name in ("much", "little", "most"):
        arrive(name)
    for name, served in (("much", 9), ("little", 5), ("most", 20)):
        queue.charge(name, served)
    arrive("new")
    assert queue.counters["new"] == 5
    queue.remove_request(next(request for request in queue if request.lora_name == "most"))
    arrive("most")
    assert queue.counters["most"] == 20

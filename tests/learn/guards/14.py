from engine.core.queues import FairRequestQueue
from engine.request import Request, SamplingParams


def guard():
    queue = FairRequestQueue()
    queue.charge("blue", 1000)
    queue.charge("green", 10)
    for tenant in ("blue", "green"):
        queue.add_request(Request(tenant, [1], SamplingParams(), lora_name=tenant))
    assert queue.counters["green"] == queue.counters["blue"] == 1000

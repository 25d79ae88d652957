from engine.core.queues import PriorityRequestQueue
from engine.request import Request, SamplingParams


def guard():
    requests = [Request(str(i), [1], SamplingParams(), arrival_time=i) for i in range(3)]
    queue = PriorityRequestQueue(requests)
    queue.remove_request(requests[1])
    assert queue == [requests[0], requests[2]]

from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.request import Request, SamplingParams


def guard():
    scheduler = make_scheduler(SchedulerConfig(), num_blocks=32, block_size=4)
    scheduler.add_request(Request("a", [1, 2], SamplingParams(max_tokens=9)))
    scheduler.update_from_output(scheduler.schedule(), {"a": [7]})
    scheduler.add_request(Request("b", [3, 4], SamplingParams(max_tokens=9)))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1, "b": 2}

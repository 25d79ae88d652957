from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.request import Request, SamplingParams


def guard():
    config = SchedulerConfig(long_prefill_token_threshold=8)
    scheduler = make_scheduler(config, num_blocks=99, block_size=4)
    scheduler.add_request(Request("chat", [1, 2], SamplingParams(max_tokens=9)))
    scheduler.update_from_output(scheduler.schedule(), {"chat": [7]})
    scheduler.add_request(Request("long", list(range(50)), SamplingParams()))
    assert scheduler.schedule().num_scheduled_tokens == {"chat": 1, "long": 8}

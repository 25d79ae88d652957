from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.request import Request, SamplingParams


def guard():
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16)
    scheduler = make_scheduler(config, num_blocks=99, block_size=4)
    scheduler.add_request(Request("long", list(range(50)), SamplingParams()))
    assert scheduler.schedule().num_scheduled_tokens == {"long": 16}

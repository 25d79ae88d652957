from engine.config import SchedulerConfig
from engine.core.engine_core import check_pool
from engine.core.scheduler import make_scheduler


def guard():
    config = SchedulerConfig(max_model_len=64)
    check_pool(make_scheduler(config, num_blocks=17, block_size=4))
    try:
        check_pool(make_scheduler(config, num_blocks=16, block_size=4))
    except ValueError:
        return
    raise AssertionError("15 blocks of 4 tokens cannot hold 64")

from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.request import Request, SamplingParams


def guard():
    config = SchedulerConfig(64, 4, 16, policy="priority", long_prefill_token_threshold=8)
    scheduler = make_scheduler(config, num_blocks=18, block_size=4)
    job = Request("job", list(range(56)), SamplingParams(), priority=5)
    scheduler.add_request(job)
    computed = 0
    while not job.num_preemptions:
        scheduled = scheduler.schedule()
        computed += scheduled.num_scheduled_tokens.get("job", 0)
        chat = scheduler.requests.get("chat")
        done = chat and chat.num_computed_tokens >= chat.num_tokens
        scheduler.update_from_output(scheduled, {"chat": [7]} if done else {})
        if not chat:
            scheduler.add_request(Request("chat", list(range(90, 100)), SamplingParams()))
    assert computed == 48
    assert scheduler.kv_cache_manager.get_computed_blocks(job)[1] <= computed

"""Workers hear what has changed, not who is there."""

from __future__ import annotations

import pickle

from engine.parallel.messages import StepWriter
from engine.request import Request, SamplingParams
from lab.dry_run import DryRun
from support.small_cores import scheduler_of


def test_workers_hear_differences_not_requests():
    scheduler = scheduler_of()
    writer, sizes = StepWriter(scheduler.kv_cache_manager), []
    core = DryRun(scheduler)
    core.add_request(Request("0", list(range(40)), SamplingParams(max_tokens=20, ignore_eos=True)))
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        message = writer.write(output)
        sizes.append(len(pickle.dumps(message)))
        ready = [r for r in scheduler.running if r.num_computed_tokens == r.num_tokens]
        scheduler.update_from_output(output, {r.request_id: [0] for r in ready})
        assert (message.new == []) == (len(sizes) > 1)
        assert not any(twin.block_hashes for twin, _ in message.new), "whose prefix is cached was decided already"
    assert max(sizes[1:]) < sizes[0] / 2
    assert writer.write(scheduler.schedule()) is None and writer.finished == ["0"] and not writer.known

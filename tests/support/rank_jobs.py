"""What tests let spawned ranks and workers do: these find it here, by name."""

from __future__ import annotations

import common  # noqa: F401  a rank imports this file first, and it settles the device before torch is used

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine import registry
from engine.distributed.group import new_group
from engine.parallel.model import load_shard, shard_model
from lab.links import wire_bytes
from support.sharded_models import IDS

lesson = registry.lesson("05c_tensor_parallel")


def echo(worker, what, _):
    return what


def peak_memory_of(fn: Callable) -> tuple[Any, int]:
    """What `fn` returns, and the most memory it held that no file backs (Linux; else 0): looked at all the time."""
    status, done = Path("/proc/self/status"), threading.Event()
    anonymous = lambda: 1024 * int(re.search(r"RssAnon:\s+(\d+)", status.read_text())[1])  # noqa: E731
    if not status.exists():
        return fn(), 0
    seen = [anonymous()]
    watch = threading.Thread(target=lambda: [seen.append(anonymous()) for _ in iter(lambda: done.wait(0.002), True)])
    watch.start()
    result = fn()
    done.set()
    watch.join()
    return result, max(*seen, anonymous()) - seen[0]


def work(world, prompts):
    """One job, many checks: starting processes is what costs."""
    found = {"threads": torch.get_num_threads(), "backend": dist.get_backend()}
    for size, dtype in ((1, torch.float32), (7, torch.float32), (4096, torch.bfloat16)):
        x = (torch.arange(size, device=world.device) % 5 + world.rank_in_group).to(dtype)
        want = sum(torch.arange(size, device=world.device) % 5 + r for r in range(world.world_size)).to(dtype)
        total, sent = lesson.ring_all_reduce(x, world)
        padded = -(-size // world.world_size) * world.world_size * x.element_size()
        assert total.equal(want) and sent == wire_bytes("all_reduce", padded, world.world_size)
        assert world.all_reduce(x.clone()).equal(want)
    mine = torch.full((2, 1), float(world.rank_in_group), device=world.device)
    assert world.all_gather(mine).tolist() == [[*map(float, range(world.world_size))]] * 2
    assert world.all_gather(mine, dim=0).flatten().tolist() == [r for r in range(world.world_size) for _ in (0, 1)]
    counts = world.take_counts()
    assert counts["all_reduce"] == {"calls": 3, "bytes": 4 + 28 + 8192} and counts["all_gather"]["calls"] == 2
    assert world.take_counts() == {}

    three, last = new_group([0, 1, 2], world), new_group([3, 1], world)
    assert (three is None) == (world.rank_in_group == 3) and (last is None) == (world.rank_in_group in (0, 2))
    if last:  # ascending, however they were named
        x = torch.tensor([[float(world.rank_in_group)]], device=world.device)
        assert last.ranks == [1, 3] and last.ranks[last.rank_in_group] == world.rank_in_group
        assert last.all_gather(x).tolist() == [[1.0, 3.0]]
    if three:
        shard, found["memory"] = peak_memory_of(lambda: load_shard(None, three))
        found["logits"] = lesson.all_logits(shard, prompts[0])
        found["tokens"] = lesson.serve(shard, prompts, [6, 3]).token_ids
    for size in (2, 4):
        if group := new_group(range(size), world):
            found[size] = lesson.all_logits(shard_model(lesson.seeded_model(world.device), group), IDS)
    return found


def fail(world, how):
    if world.rank_in_group == 2:
        time.sleep(600)  # hears nothing of what happens to the others
    if world.rank_in_group == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("no such thing\nand more about it")
        if how == "is silent":
            time.sleep(600)
    world.all_reduce(torch.ones(3, device=world.device))
    time.sleep(600)

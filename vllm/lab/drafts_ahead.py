"""Drafts one step ahead: how a step is planned when not even the number of this one's tokens is known.

Async scheduling (lesson 05) plans step i + 1 while step i runs: it needs to know *that* a token will come, not which.
With drafts it does not even know how many will come, 1 to K + 1, and nobody has guessed the next ones yet. Two bets
and two corrections (vLLM: `AsyncScheduler`, its default with trained drafters):

  1. The plan counts on every draft: all K of the step that runs will stand. So blocks suffice, however it turns out.
  2. It reserves K places for drafts that nobody has made. The worker fills them; a place left empty counts as fallen.
  3. The worker knows at once how many stood, and computes each row where it belongs, not where the plan put it.
  4. The scheduler hears a step later, and takes what fell back from its own count.

What it costs: blocks and budget for drafts that will not be there, and a step in vain whenever accepted drafts reach
the end of an answer sooner than the plan could be sure of.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from engine.config import SchedulerConfig, VllmConfig
from engine.core.scheduler import make_scheduler
from engine.model import llama
from engine.parallel.config import ParallelConfig
from engine.parallel.executors import ThreadExecutor
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.remote_runner import RemoteRunner
from engine.parallel.stages import make_groups
from engine.parallel.worker import WorkerSpec
from engine.parallel.workers import Workers
from engine.request import Request, SamplingParams
from engine.spec_decode.drafters import SpeculativeConfig, make_drafter

BLOCK = 16  # tokens
LOOPS = {"synchronous": 1, "async": 2}  # steps in flight


def make_loop(
    kind: str,
    model: llama.Llama,
    num_speculative_tokens: int,
    max_model_len: int,
    drafter: Callable[..., Any] = make_drafter,
) -> tuple[PipelineEngineCore, Any]:
    """The served engine's loop with eight seats, and the worker that runs its steps on a thread of this process;
    `drafter(config, model)` is 07's."""
    parallel = ParallelConfig(async_scheduling=True)
    drafts = SpeculativeConfig(num_speculative_tokens=num_speculative_tokens)
    config = VllmConfig(speculative_config=drafts, async_scheduling=True, plug={"drafter": drafter})
    executor = ThreadExecutor()
    worker: Any = executor.worker  # its model is loaded already
    worker.spec, worker.model = WorkerSpec(None, parallel, model.dtype, config), model
    worker.set_groups(*make_groups(None, parallel))
    limits, blocks = SchedulerConfig(max_model_len=max_model_len, max_num_seqs=8), 8 * -(-max_model_len // BLOCK) + 1
    scheduler = make_scheduler(limits, blocks, BLOCK, enable_prefix_caching=False, drafts=drafts, async_scheduling=True)
    runner = RemoteRunner(Workers(executor, parallel, cast(Any, model)), limits, blocks, BLOCK)
    return PipelineEngineCore(scheduler, runner, LOOPS[kind]), worker


def run(core: PipelineEngineCore, requests: Sequence[Request], overhead: float = 0.0) -> tuple[list[list[int]], int]:
    """Serve requests that are all there at the start: their tokens, and how many samples came for one that had ended.

    `overhead`: seconds that every planning takes longer, in place of a server's further work on the host.
    """
    in_vain, scheduler = 0, core.scheduler
    for request in requests:
        core.add_request(request)
    while scheduler.has_unfinished_requests() or core.batch_queue:
        time.sleep(overhead)
        while core.put_in_flight():
            pass
        if not core.batch_queue and scheduler.requests:
            raise RuntimeError("nothing can run, but requests wait: a sample was lost")
        output, result = core.next_result()
        in_vain += sum(request_id not in scheduler.requests for request_id in output.num_scheduled_tokens)
        core.update_from_output(output, result)
    return [request.output_token_ids for request in requests], in_vain


def compare_loops(
    model: llama.Llama,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    num_speculative_tokens: int,
    drafter: Callable[..., Any] = make_drafter,
    overhead: float = 0.0,
) -> dict[str, dict[str, Any]]:
    """The same greedy requests in step and one step ahead: {loop: their tokens, and what they took}."""
    # Beyond the longest answer there is room for drafts: the end of the context cuts none.
    longest, found = max(map(len, prompts)) + max_tokens + num_speculative_tokens + 1, {}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=list(model.config.eos_token_ids))
    for kind in LOOPS:
        core, worker = make_loop(kind, model, num_speculative_tokens, longest, drafter)
        try:
            requests = [Request(str(i), list(prompt), params) for i, prompt in enumerate(prompts)]
            token_ids, in_vain = run(core, requests, overhead)
        finally:
            cast(Any, core.remote).executor.shutdown()
        spans, drafts = worker.take_spans(), worker.runner.drafts
        busy, whole = sum(end - start for start, end in spans), spans[-1][1] - spans[0][0]
        found[kind] = {
            "token_ids": token_ids,
            "steps": len(spans),
            "places": drafts.num_places,
            "drafts": drafts.num_drafts,
            "in_vain": in_vain,
            "idle": 1 - busy / whole,
        }
    return found


def demonstrate(
    model: llama.Llama,
    prompts: Sequence[Sequence[int]],
    expected: list[list[int]],
    num_speculative_tokens: int,
    drafter: Callable[..., Any],
) -> None:
    """Print both loops side by side. Raises CheckFailed unless both write `expected`, as plain decoding does."""
    loops = compare_loops(model, prompts, max(map(len, expected)), num_speculative_tokens, drafter, overhead=0.005)
    common.table(["loop, 5 ms of other work per plan", "steps", "places", "drafts", "samples in vain", "model idle"], [
        [kind, *(loop[key] for key in ("steps", "places", "drafts", "in_vain")), f"{loop['idle']:.0%}"]
        for kind, loop in loops.items()
    ])  # fmt: skip
    common.check_equal(
        "both wrote the tokens of plain greedy decoding", [x["token_ids"] for x in loops.values()], [expected] * 2
    )

"""04 · Continuous batching: which requests run in the next step?

The question: requests want 10 tokens, or 500. A batch that runs until its longest member is done leaves seats empty;
how does an engine keep them filled, what is that worth, and when is it worth nothing?

The mechanism:
  1. One forward pass yields one token for every sequence in it, whichever these are: so choose them anew every time.
  2. A `Request` is its tokens, and how many of them have their keys and values in the cache. It is behind by the rest.
  3. `Scheduler.schedule()`: running requests go on; then the head of the waiting queue is admitted while there is a
     seat (max_num_seqs), budget for its prompt (max_num_batched_tokens) and room in lesson 02's blocks.
  4. The model runs all of it as one flat list of tokens: prompts of new requests beside single tokens of the others.
  5. `Scheduler.update_from_output()` appends what was sampled, ends requests and frees their blocks, for the next step.
  6. This first scheduler is careful: it admits a request only if all of it, to its last token, fits. So it never has
     to take blocks back. Lesson 10 lets it cut prompts; lesson 11 admits on less, and takes blocks back (preempts).
The companion 04b_offline_engine.py puts sampling, text and `LLM.generate()` around it.

Numbers to remember: with lengths drawn token by token, static batching uses 1/(1 + 1/2 + … + 1/slots) of its slots:
48 % of 4, 25 % of 32. Equal lengths, or sorted ones: continuous batching buys nothing.

How to run:
  uv run python vllm/04_continuous_batching.py                    the whole story
  uv run python vllm/04_continuous_batching.py --max-num-seqs 1   one at a time: same tokens, several times the steps
  uv run python vllm/04_continuous_batching.py --num-blocks 34    break it: blocks for 22 of 32 requests at a time
  uv run python vllm/04_continuous_batching.py --bench            minutes: throughput beside Transformers and the floor

Read for this: Yu et al. 2022 (Orca: iteration-level scheduling), Kwon et al. 2023 (PagedAttention), Graham 1966 (list
scheduling), vLLM 0.32 `v1/core/sched/scheduler.py`, `v1/engine/core.py`, `v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import functools
import heapq
import math
import random
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

import llama
from lab import lengths, naive
from engine.config import VllmConfig
from engine.worker.assemble import make_runner
from engine.core.engine_core import EngineCore, check_pool
from engine.core.queues import FCFSRequestQueue, PriorityRequestQueue
from engine.output import EngineCoreOutput, SchedulerOutput
from engine.request import (
    NO_TOKEN,
    NO_TOKEN_ID,
    Request,
    RequestStatus,
    SamplingParams,
    check_stop,
)

paged_attention = common.lesson("02_paged_attention")
AttentionMetadata, BlockPool = paged_attention.AttentionMetadata, paged_attention.BlockPool
PagedKVCache = paged_attention.PagedKVCache

KEY = "04_continuous_batching"


# --- What we want, without cleverness ---------------------------------------------------------------------------------


def generate_alone(model: llama.Llama, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy decoding of one sequence: no cache, no batch, the whole sequence through the model for every token."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        ids = torch.tensor(tokens, device=model.device)
        hidden = model.forward(ids, torch.arange(len(tokens), device=model.device), naive.recompute)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def static_steps(slots: int, outputs: Sequence[int]) -> int:
    """Decode steps of static batching: every batch lasts as long as its longest. Σ over batches of max n."""
    return sum(max(outputs[i : i + slots]) for i in range(0, len(outputs), slots))


def continuous_steps(slots: int, outputs: Sequence[int]) -> int:
    """Decode steps if each request, in order, takes the slot that is free first (list scheduling, Graham 1966)."""
    free_at = [0] * slots
    for n in outputs:
        heapq.heapreplace(free_at, free_at[0] + n)
    return max(free_at)


# --- Blocks for requests --------------------------------------------------------------------------------------------


class KVCacheManager:
    """Keeps each block table long enough for the tokens that are about to be computed. Tables only grow.

    Entry i of a request's table is the physical block that holds its tokens [i·block_size, (i+1)·block_size).
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """`num_blocks` counts block 0, which the pool keeps for padding and never hands out."""
        self.block_pool = BlockPool(num_blocks)
        self.block_size, self.max_model_len = block_size, max_model_len
        self.req_to_blocks: dict[str, list[int]] = {}

    def get_num_blocks_to_allocate(self, request: Request, num_tokens: int) -> int:
        """Blocks missing until the table holds `num_tokens`: ⌈num_tokens / block_size⌉ − blocks it has."""
        needed = -(-min(num_tokens, self.max_model_len) // self.block_size)
        return max(0, needed - len(self.req_to_blocks.get(request.request_id, ())))

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Make room for `num_new_tokens` behind those computed.

        Returns the new blocks, or None, and nothing has changed, if the pool has too few.
        """
        missing = self.get_num_blocks_to_allocate(request, request.num_computed_tokens + num_new_tokens)
        if missing == 0:
            return []
        if missing > self.block_pool.num_free_blocks:
            return None
        new_blocks = self.block_pool.allocate(missing)
        self.req_to_blocks.setdefault(request.request_id, []).extend(new_blocks)
        return new_blocks

    def get_block_ids(self, request_id: str) -> list[int]:
        """The block table of a running request."""
        return self.req_to_blocks[request_id]

    def free(self, request: Request) -> None:
        """Give all its blocks back; the pool decides where in the free queue they go."""
        self.block_pool.free(self.req_to_blocks.pop(request.request_id, []))


# --- The scheduler --------------------------------------------------------------------------------------------------


@dataclass
class SchedulerConfig:
    """The limits of a step. Lessons 10 and 11 add their own knobs.

    Raises:
        common.InputError: limits that contradict each other, by vLLM's rules (`vllm/config/scheduler.py`).
    """

    max_model_len: int = 2048  # tokens in one sequence, prompt and output
    max_num_seqs: int = 128  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    policy: str = "fcfs"  # or "priority"

    enable_chunked_prefill: ClassVar[bool] = False  # lesson 10 makes it a choice

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise common.InputError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.policy not in ("fcfs", "priority"):
            raise common.InputError(f"policy {self.policy!r}: must be 'fcfs' or 'priority'")
        budget = f"max_num_batched_tokens {self.max_num_batched_tokens}: must be at least"
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise common.InputError(f"{budget} max_num_seqs ({self.max_num_seqs}), or decodes would starve")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise common.InputError(f"{budget} max_model_len ({self.max_model_len}) without chunked prefill")


class Scheduler:
    """Iteration-level scheduling: the batch is chosen anew for every forward pass (Orca, OSDI 2022)."""

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.max_num_scheduled_tokens = config.max_num_batched_tokens
        self.max_num_running_reqs = config.max_num_seqs
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.running: list[Request] = []  # in order of admission
        self.waiting = PriorityRequestQueue() if config.policy == "priority" else FCFSRequestQueue()
        self.finished_req_ids: list[str] = []
        self.token_budget = 0  # what is left of the step being scheduled

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Choose requests and token counts for the next step, and allocate the blocks that it will write."""
        output = SchedulerOutput(finished_req_ids=self.finished_req_ids,
                                 block_tables=self.kv_cache_manager.req_to_blocks)  # fmt: skip
        self.finished_req_ids = []
        self.token_budget = self.max_num_scheduled_tokens
        self._schedule_running(output)
        self._schedule_waiting(output)
        return output

    def _schedule_running(self, output: SchedulerOutput) -> None:
        """Running requests go on. Their blocks were taken when they were admitted."""
        for request in self.running:
            if num_new_tokens := self._num_new_tokens(request):
                output.scheduled_running_reqs.append(request)
                self._grant(request, num_new_tokens, output)

    def _schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit from the head of the queue while budget, seats and blocks last. No request overtakes the head."""
        while self.waiting and self.token_budget > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            num_new_tokens = self._admit(request)
            if num_new_tokens == 0:
                break
            self.running.append(self.waiting.pop_request())
            is_new = request.status is RequestStatus.WAITING
            (output.scheduled_new_reqs if is_new else output.scheduled_resumed_reqs).append(request)
            request.status = RequestStatus.RUNNING
            self._grant(request, num_new_tokens, output)

    def _num_new_tokens(self, request: Request) -> int:
        """How far a request may catch up in this step: all the way or, if that exceeds the budget, not at all."""
        behind = request.num_tokens - request.num_computed_tokens
        return behind if behind <= self.token_budget else 0

    def _admit(self, request: Request) -> int:
        """Take blocks for the whole life of a waiting request. Returns its tokens in this step; 0: it must wait."""
        num_new_tokens = self._num_new_tokens(request)
        if num_new_tokens == 0 or self.kv_cache_manager.allocate_slots(request, self.num_slots(request)) is None:
            return 0
        return num_new_tokens

    def num_slots(self, request: Request) -> int:
        """KV slots that a request fills in its life. Its last token is sampled and never computed, hence − 1."""
        return min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len) - 1

    def _grant(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> None:
        """Enter a request into the step. Its tokens count as computed from now on: the model is about to run."""
        output.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        request.num_computed_tokens += num_new_tokens

    def update_from_output(self, output: SchedulerOutput,
                           sampled_token_ids: dict[str, list[int]]) -> list[EngineCoreOutput]:  # fmt: skip
        """Append what was sampled, finish requests and free their blocks, in scheduling order.

        `sampled_token_ids` has an entry for each request that has caught up; a prompt that was computed in part
        samples nothing. NO_TOKEN_ID ends a request with an error; requests aborted while the model ran are passed over.
        """
        outputs, stopped = [], False
        for request_id in output.num_scheduled_tokens:
            request, token_ids = self.requests.get(request_id), sampled_token_ids.get(request_id)
            if request is None or not token_ids:
                continue
            new_token_ids = self._update_request_with_output(request, token_ids)
            outputs.append(result := EngineCoreOutput(request_id, new_token_ids))
            if request.is_finished():
                result.finish_reason, result.stop_reason = request.get_finished_reason(), request.stop_reason
                self._free_request(request)
                stopped = True
        if stopped:
            self.running = [request for request in self.running if not request.is_finished()]
        return outputs

    def _update_request_with_output(self, request: Request, token_ids: list[int]) -> list[int]:
        """Append tokens, up to one that ends the request. Returns those."""
        for count, token_id in enumerate(token_ids, 1):
            if token_id == NO_TOKEN_ID:
                request.status, request.stop_reason = RequestStatus.FINISHED_ERROR, NO_TOKEN
                return token_ids[: count - 1]
            request.append_output_token_id(token_id)
            if check_stop(request, self.config.max_model_len):
                return token_ids[:count]
        return token_ids

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside: an abort, or a stop string that only the detokenizer can see. Returns those ended;
        unknown and finished ids are passed over."""
        ended = []
        for request in filter(None, map(self.requests.get, request_ids)):
            (self.running.remove if request.status is RequestStatus.RUNNING else self.waiting.remove_request)(request)
            request.status = status
            self._free_request(request)
            ended.append(request)
        return ended

    def _free_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        self.finished_req_ids.append(request.request_id)
        del self.requests[request.request_id]


# --- What it is compared with -----------------------------------------------------------------------------------------


class StaticScheduler(Scheduler):
    """Request-level batching: fill the seats, run until the last one is done, only then look at the queue again.

    Kind to static batching: it starts with the requests that are there instead of waiting for a full batch, and a
    finished sequence costs nothing while its seat stands empty (a padded batch would go on computing it).
    """

    def _schedule_waiting(self, output: SchedulerOutput) -> None:
        if not self.running:
            super()._schedule_waiting(output)


POLICIES = {"static": StaticScheduler, "continuous": Scheduler}


class DryRun(EngineCore):
    """The loop without a model: every next token is 0, and only queues, budget and blocks are kept."""

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        self.batch = [*map(int, output.num_scheduled_tokens)]
        return {request_id: [0] for request_id in output.num_scheduled_tokens}


@dataclass
class Timeline:
    """A run of the scheduler: which request had which seat in which step. An output token takes a step."""

    lanes: list[list[int | None]]  # per step and seat: the request that computed something there
    waiting: list[int]  # per step: requests that have arrived and were not admitted
    arrival: list[int]
    finish: list[int]  # the first step that no longer needs the request

    @property
    def makespan(self) -> int:
        return len(self.lanes)

    @property
    def busy(self) -> int:
        """Seats used, summed over steps: equal to the output tokens."""
        return sum(request is not None for step in self.lanes for request in step)

    @property
    def utilisation(self) -> float:
        return self.busy / sum(map(len, self.lanes))

    @property
    def spans(self) -> list[list[int]]:
        """Of each request: seat, first step, and the step after its last."""
        where = {request: (seat, step) for step, lanes in reversed([*enumerate(self.lanes)])
                 for seat, request in enumerate(lanes)}  # fmt: skip
        return [[*where[i], finish] for i, finish in enumerate(self.finish)]

    @property
    def latencies(self) -> list[int]:
        return [finish - arrival for finish, arrival in zip(self.finish, self.arrival)]


def timeline(policy: str, seats: int, outputs: Sequence[int], prompts: Sequence[int] | None = None,
             arrivals: Sequence[int] | None = None, num_blocks: int | None = None,
             block_size: int = 16) -> Timeline:  # fmt: skip
    """Drive a real scheduler over requests of these lengths, without a model. By default: one-token prompts, all there
    at step 0, a pool that is never the limit."""
    prompts, arrivals = prompts or [1] * len(outputs), list(arrivals or [0] * len(outputs))
    longest = max(p + n for p, n in zip(prompts, outputs))
    num_blocks = num_blocks or 2 + seats * -(-longest // block_size)
    config = SchedulerConfig(max_model_len=longest, max_num_seqs=seats, max_num_batched_tokens=max(longest, 1 << 20))
    core = DryRun(POLICIES[policy](config, KVCacheManager(num_blocks, block_size, longest)))
    order = sorted(range(len(outputs)), key=lambda i: arrivals[i])
    run, lane_of = Timeline([], [], arrivals, [0] * len(outputs)), {}
    free, step, arrived = list(range(seats)), 0, 0
    while arrived < len(order) or core.scheduler.has_unfinished_requests():
        while arrived < len(order) and arrivals[order[arrived]] <= step:
            i = order[arrived]
            params = SamplingParams(temperature=0, max_tokens=outputs[i], ignore_eos=True)
            core.add_request(Request(str(i), [0] * prompts[i], params, arrival_time=arrived))
            arrived += 1
        finished = [int(o.request_id) for o in core.step() if o.finish_reason]
        assert core.batch or arrived < len(order), "nobody runs, and whoever waits will wait for ever"
        lanes: list[int | None] = [None] * seats
        for i in core.batch:
            if i not in lane_of:
                lane_of[i] = free.pop(0)
            lanes[lane_of[i]] = i
        for i in finished:
            run.finish[i] = step + 1
        free = sorted([*free, *(lane_of[i] for i in finished)])
        run.lanes.append(lanes)
        run.waiting.append(len(core.scheduler.waiting))
        step += 1
    return run


def lower_bound(seats: int, outputs: Sequence[int], arrivals: Sequence[int]) -> int:
    """No schedule ends earlier: a request needs a step for each token, and `seats` tokens are all that a step yields,
    so all tokens of the requests that arrive from t on need ⌈their sum/seats⌉ steps after t.

    For requests that are all there at step 0 it is max(longest, ⌈sum/seats⌉).
    """
    pairs = list(zip(arrivals, outputs))
    alone = max(arrival + n for arrival, n in pairs)
    return max(alone, *(t + -(-sum(n for arrival, n in pairs if arrival >= t) // seats) for t in set(arrivals)))


# --- The simulation behind the widget ---------------------------------------------------------------------------------

LENGTHS = {  # output tokens of each request, in order of arrival
    "stragglers": [8, 8, 8, 64] * 4,
    "stragglers, sorted": [8] * 12 + [64] * 4,
    "all equal": [32] * 16,
    "the article's": [10, 500, 200, 100],
    "giant last": [8] * 15 + [96],
    "geometric": [5, 24, 2, 41, 13, 7, 33, 1, 18, 9, 62, 3, 16, 28, 4, 11],  # drawn once, mean 17
}
ARRIVALS = {"together": 0, "one every 2 steps": 2, "one every 8 steps": 8}
SEATS = [1, 2, 3, 4, 6, 8]
WIDGET_DEFAULT = {"policy": "static", "slots": 4, "lengths": "stragglers", "arrivals": "together"}


def simulate(params: dict) -> dict:
    """The Gantt chart of one policy on one workload, from the Scheduler that serves the engine. Raises InputError."""
    allowed = {"policy": list(POLICIES), "slots": SEATS, "lengths": list(LENGTHS), "arrivals": list(ARRIVALS)}
    params = common.checked(params, allowed)
    outputs, seats = LENGTHS[params["lengths"]], params["slots"]
    arrivals = [i * ARRIVALS[params["arrivals"]] for i in range(len(outputs))]
    run = timeline(params["policy"], seats, outputs, arrivals=arrivals)
    return {
        "outputs": outputs, "arrivals": arrivals,
        "steps": [{"slots": lanes, "waiting": waiting} for lanes, waiting in zip(run.lanes, run.waiting)],
        "spans": run.spans, "makespan": run.makespan, "busy": run.busy, "cells": seats * run.makespan,
        "lower_bound": lower_bound(seats, outputs, arrivals),
        "latency_sum": sum(run.latencies), "latency_max": max(run.latencies),
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    outputs, slots = trace["outputs"], len(trace["steps"][0]["slots"])
    lines = [f"{len(outputs)} requests, {sum(outputs)} output tokens, {slots} slots",
             f"makespan {trace['makespan']} steps (no schedule needs fewer than {trace['lower_bound']})",
             f"slots in use {100 * trace['busy'] // trace['cells']} % ({trace['busy']} of {trace['cells']} cells)",
             f"latency: mean {trace['latency_sum'] // len(outputs)} steps, longest {trace['latency_max']}"]  # fmt: skip
    for slot in range(slots):
        spans = [f"#{i} [{start}, {stop})" for i, (s, start, stop) in enumerate(trace["spans"]) if s == slot]
        lines.append(f"slot {slot}: {'  '.join(spans[:5])}{'  …' if len(spans) > 5 else ''}")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


def geometric(count: int, mean: float, seed: int) -> list[int]:
    """As many lengths, drawn as lesson 01 draws them: every step has the same chance to be the last."""
    rng, draw_one = random.Random(seed), lengths.geometric
    return [draw_one(rng, mean) for _ in range(count)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers; everything comes out of the real Scheduler."""
    both = lambda *args, **kwargs: {policy: timeline(policy, *args, **kwargs) for policy in POLICIES}  # noqa: E731
    brief = lambda run: {"steps": run.makespan, "utilisation": run.utilisation}  # noqa: E731
    presets = {}
    for name, outputs in LENGTHS.items():
        runs = both(4, outputs)
        presets[re.sub(r"\W+", "_", name)] = {policy: brief(run) for policy, run in runs.items()} | {
            "bound": lower_bound(4, outputs, [0] * len(outputs)),
            "gain": runs["static"].makespan / runs["continuous"].makespan,
        }  # fmt: skip

    article = both(2, LENGTHS["the article's"])
    lengths, by_slots = geometric(512, 16, seed=0), {}
    for seats in (2, 4, 8, 16, 32):
        runs = both(seats, lengths)
        by_slots[str(seats)] = {policy: brief(run) for policy, run in runs.items()} | {
            "harmonic": 1 / sum(1 / k for k in range(1, seats + 1)),
            "gain": runs["static"].makespan / runs["continuous"].makespan,
            **{f"{policy}_mean": sum(run.latencies) / len(lengths) for policy, run in runs.items()},
            **{f"{policy}_p99": percentile(run.latencies, 0.99) for policy, run in runs.items()},
        }  # fmt: skip
    return {
        "article": {policy: brief(run) | {"spans": run.spans} for policy, run in article.items()},
        "presets": presets, "geometric": by_slots, "reserved": reserved_slots(),
    }  # fmt: skip


def reserved_slots() -> dict[str, Any]:
    """The same memory and requests, kept in blocks of 16 and in one reservation of `max_model_len` per sequence.

    A slot-based cache is a paged one whose block is as long as the longest sequence allowed. Lengths are as in the
    ShareGPT sample of the PagedAttention paper: 161 tokens in, 338 out on average.
    """
    prompts, outputs = geometric(96, 161, seed=1), geometric(96, 338, seed=2)
    max_model_len, tokens = 2048, 16384
    prompts, outputs = [min(p, 1024) for p in prompts], [min(n, 1023) for n in outputs]
    found: dict[str, Any] = {"pool_tokens": tokens, "max_model_len": max_model_len, "requests": len(prompts)}
    for name, block_size in (("paged", 16), ("reserved", max_model_len)):
        run = timeline("continuous", 96, outputs, prompts, num_blocks=tokens // block_size + 1, block_size=block_size)
        running = [sum(i is not None for i in lanes) for lanes in run.lanes]
        found[name] = {"steps": run.makespan, "most": max(running), "mean": sum(running) / len(running)}
    found["gain"] = found["reserved"]["steps"] / found["paged"]["steps"]
    return found


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The article's four requests as they really run, and what the number of slots does to static batching."""
    numbers = facts()
    figure, axes = common.new_figure(8.0, 3.9, nrows=2, sharex=True)
    colors = [common.COLORS[name] for name in ("orange", "blue", "green", "purple")]
    for ax, policy in zip(axes, POLICIES):
        found = numbers["article"][policy]
        for slot in range(2):
            ax.broken_barh([(0, found["steps"])], (slot - 0.36, 0.72), facecolor="white",
                           edgecolor=common.COLORS["grey"], hatch="////", linewidth=0.5, alpha=0.55)  # fmt: skip
        for name, length, (slot, start, stop), color in zip("ABCD", LENGTHS["the article's"], found["spans"], colors):
            ax.broken_barh([(start, stop - start)], (slot - 0.36, 0.72), facecolor=color, edgecolor="white")
            label = f"{name} {length}"
            if stop - start > 60:
                ax.text((start + stop) / 2, slot, label, ha="center", va="center", color="white", weight="bold")
            else:
                ax.text(start, slot - 0.4, label, ha="left", va="bottom", color=color, weight="bold")
        ax.set(yticks=[0, 1], yticklabels=["slot 0", "slot 1"], ylim=(1.5, -0.85), xlim=(0, 720))
        ax.set_title(f"{policy}: {found['steps']} steps, slots used {100 * found['utilisation']:.0f} %")
    axes[1].set_xlabel("step (hatched: an empty seat)")
    gantt = common.save_figure(figure, folder, "04_static_and_continuous")

    figure, ax = common.new_figure(8.0, 3.3)
    slots = [int(n) for n in numbers["geometric"]]
    of = lambda name: [numbers["geometric"][str(n)][name] for n in slots]  # noqa: E731
    ax.plot(slots, [100 * run["utilisation"] for run in of("continuous")], "o-", label="continuous")
    ax.plot(slots, [100 * run["utilisation"] for run in of("static")], "o-", label="static")
    ax.plot(slots, [100 * share for share in of("harmonic")], ":", color=common.COLORS["grey"],
            label="1 / (1 + 1/2 + … + 1/slots)")  # fmt: skip
    ax.set(xscale="log", ylim=(0, 105), xlabel="slots", ylabel="slots used, %", xticks=slots, xticklabels=slots,
           title="512 requests of 16 tokens on average, lengths geometric")  # fmt: skip
    ax.minorticks_off(), ax.legend()
    return [gantt, common.save_figure(figure, folder, "04_utilisation")]


# --- The story --------------------------------------------------------------------------------------------------------

PROMPTS = [
    "The capital of France is", "Once upon a time, in a small village by the sea,", "To make bread you need flour,",
    "The three laws of motion say that", "Water boils at", "Dear Sir or Madam, I am writing to you because",
    "In Python, a list is", "The best thing about winter is",
]  # fmt: skip
NUM_REQUESTS = 32
OUTPUTS = [4, 6, 5, 24] * 8  # tokens wanted: one in four is long


def make_core(model: llama.Llama, policy: str = "continuous", max_num_seqs: int = 32, num_blocks: int = 1024,
              max_model_len: int = 512, block_size: int = 16) -> EngineCore:  # fmt: skip
    """Scheduler, blocks, runner and model, put together. Raises InputError if they do not fit each other."""
    config = SchedulerConfig(max_model_len, max_num_seqs, max_num_batched_tokens=max(4096, max_model_len))
    scheduler = POLICIES[policy](config, KVCacheManager(num_blocks, block_size, max_model_len))
    about = VllmConfig(attention_backend="paged", enforce_eager=True)
    return EngineCore(scheduler, make_runner(model, config, num_blocks, block_size, about))


@dataclass
class Served:
    """What serving a list of requests gave and took."""

    token_ids: list[list[int]]
    seconds: list[float] = field(default_factory=list)  # of each step
    batch: list[int] = field(default_factory=list)  # sequences in each step
    finish: list[float] = field(default_factory=list)  # when each request was done, seconds after the start

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / sum(self.seconds)


def serve(core: EngineCore, prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> Served:
    """Hand everything in at once and step until all is done. Greedy, every request exactly as long as asked."""
    served = Served([[] for _ in prompts], finish=[0.0] * len(prompts))
    for i, (prompt, n) in enumerate(zip(prompts, outputs)):
        core.add_request(Request(str(i), list(prompt), SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)))
    while core.scheduler.has_unfinished_requests():
        start = time.perf_counter()
        heard = core.step()
        served.seconds.append(time.perf_counter() - start)
        served.batch.append(len(heard))  # whole prompts only: each request in the step gets a token
        for output in heard:
            served.token_ids[int(output.request_id)] += output.new_token_ids
            if output.finish_reason:
                served.finish[int(output.request_id)] = sum(served.seconds)
    return served


# --- The benchmark ----------------------------------------------------------------------------------------------------


def matmul_seconds(model: llama.Llama, rows: int, head_rows: int) -> float:
    """The matrix products of one step and nothing else: `rows` tokens through every layer, `head_rows` to logits."""
    inputs = {n: torch.randn(rows, n, dtype=model.dtype, device=model.device)
              for n in {layer.weight.shape[1] for layer in model.linear.values()}}  # fmt: skip

    def products() -> None:
        for name, layer in model.linear.items():
            layer(inputs[layer.weight.shape[1]][: head_rows if name == "lm_head" else rows])

    with torch.inference_mode():
        return common.measure(products).median


def benchmark(model: llama.Llama, args: argparse.Namespace) -> dict[str, Any]:
    """Prompts of 128 random tokens, 64 greedy tokens each: ours with and without packed weights, Transformers, and the
    floor. Competitors take turns within a round; the table shows medians of three rounds."""
    common.heading("6. Throughput: n prompts of 128 tokens, 64 greedy tokens each, fp32 on a CPU, bf16 on a GPU")
    n_in, n_out, rng, V = 128, 64, random.Random(0), model.config.vocab_size
    prompts = [[rng.randrange(min(1000, V // 2), min(40000, V)) for _ in range(n_in)] for _ in range(32)]
    cores = {"ours": make_core(model), "unpacked": make_core(model)}
    cores["unpacked"].runner.model = model
    peer = load_transformers(args.model, model)

    def seconds(name: str, n: int) -> float:
        start = time.perf_counter()
        if name == "transformers":
            ids = torch.tensor(prompts[:n], device=model.device)
            peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n_out,
                          min_new_tokens=n_out, pad_token_id=0)  # fmt: skip
        elif name == "one by one":
            for prompt in prompts[:4]:
                serve(cores["unpacked"], [prompt], [n_out])
        else:
            serve(cores[name], prompts[:n], [n_out] * n)
        return time.perf_counter() - start

    bench: dict[str, Any] = {"prompt_tokens": n_in, "output_tokens": n_out, "throughput": {}}
    rows, competitors = [], ("ours", "unpacked", "transformers")
    for n in (1, 8, 32):
        packed = cores["ours"].runner.model
        floor = matmul_seconds(packed, n * n_in, n) + (n_out - 1) * matmul_seconds(packed, n, n)
        found: dict[str, Any] = {"floor": n * n_out / floor}
        rounds = [{name: seconds(name, n) for name in competitors} for _ in range(4)][1:]  # the first warms up
        for name in competitors:
            rates = sorted(n * n_out / each[name] for each in rounds)
            found |= {name: rates[1], f"{name}_low": rates[0], f"{name}_high": rates[2]}
        found["share_of_floor"] = found["ours"] / found["floor"]
        found["over_transformers"] = found["ours"] / found["transformers"]
        bench["throughput"][str(n)] = found
        spread = [f"{found[c]:.0f} ({found[f'{c}_low']:.0f}–{found[f'{c}_high']:.0f})" for c in competitors]
        rows.append([n, *spread, f"{found['floor']:.0f}", f"{found['share_of_floor']:.0%}"])
    common.table(["prompts", *competitors, "matmuls alone", "share"], rows, title="output tokens per second")

    serial = bench["one_by_one"] = 4 * n_out / statistics.median(seconds("one by one", 4) for _ in range(3))
    final = bench["throughput"]["32"]
    common.table(["32 prompts", "tokens/s", "x"], [
        [name, f"{rate:.0f}", f"{rate / serial:.1f}"] for name, rate in
        (("4 of them, one by one", serial), ("batched", final["unpacked"]), ("batched, packed weights", final["ours"]))
    ])  # fmt: skip

    common.heading("7. Static against continuous: 64 requests, lengths geometric with mean 32")
    outputs, rows, bench["policies"] = geometric(64, 32, args.seed), [], {}
    for seats in (8, 32):
        for policy in POLICIES:
            run = serve(make_core(model, policy, seats), [prompts[i % 32][:32] for i in range(64)], outputs)
            found = {
                "steps": len(run.batch), "seconds": sum(run.seconds), "tokens_per_second": run.tokens_per_second,
                "utilisation": sum(run.batch) / seats / len(run.batch), "mean_latency": statistics.mean(run.finish),
                "p99_latency": percentile(run.finish, 0.99),
            }  # fmt: skip
            bench["policies"][f"{policy}_{seats}"] = found
            rows.append([f"{seats} seats, {policy}", found["steps"], f"{found['utilisation']:.0%}",
                         f"{found['seconds']:.1f} s", f"{found['tokens_per_second']:.0f}",
                         f"{found['mean_latency']:.1f} s", f"{found['p99_latency']:.1f} s"])  # fmt: skip
    common.table(["", "steps", "seats used", "makespan", "tokens/s", "mean latency", "p99"], rows)
    return bench


def load_transformers(model_name: str | None, like: llama.Llama) -> Any:
    """The same weights in Transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(llama.model_folder(model_name), dtype=like.dtype).eval().to(like.device)


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    p.add_argument("--policy", choices=tuple(POLICIES), default="continuous", help="batching of step 2")
    p.add_argument("--max-num-seqs", type=common.number(int, 1, 256), default=32, metavar="N",
                   help="sequences in one step (default %(default)s; 1 serves them one by one)")  # fmt: skip
    p.add_argument("--num-blocks", type=common.number(int, 2, 1 << 14), default=1024, metavar="N",
                   help="KV blocks of 16 tokens (default %(default)s; 34 hold few, below 33 is refused)")  # fmt: skip
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine, config = common.start(args), SchedulerConfig(512, args.max_num_seqs, 4096)
    check_pool(Scheduler(config, KVCacheManager(args.num_blocks, 16, 512)))  # before anything is computed
    llama.check_context(args.model, 512)
    numbers, bench = facts(), {}

    common.heading("1. Static against continuous batching, in steps of the real scheduler (4 slots)")
    rows = []
    for (name, outputs), found in zip(LENGTHS.items(), numbers["presets"].values()):
        for policy, reference in (("static", static_steps), ("continuous", continuous_steps)):
            if found[policy]["steps"] != reference(4, outputs):
                raise common.CheckFailed(f"{name}: {policy} took {found[policy]['steps']} steps")
        cells = [x for p in POLICIES for x in (found[p]["steps"], f"{found[p]['utilisation']:.0%}")]
        rows.append([name, *cells, found["bound"], f"{found['gain']:.2f}x"])
    common.table(["lengths", "static", "used", "continuous", "used", "bound", "gain"], rows)
    common.say(f"✓ all {2 * len(rows)} step counts equal the naive ones (sums of maxima; first free slot first)")

    common.heading(f"2. The real model: {NUM_REQUESTS} requests, {args.policy}, at most {args.max_num_seqs} at a time")
    model, tokenizer = llama.load(args.model)
    prompts = [tokenizer.encode(PROMPTS[i % len(PROMPTS)]) for i in range(NUM_REQUESTS)]
    core = make_core(model, args.policy, args.max_num_seqs, args.num_blocks)
    served = serve(core, prompts, OUTPUTS)
    for i in (3, 7):
        common.say(f"#{i} {PROMPTS[i % len(PROMPTS)]}…{tokenizer.decode(served.token_ids[i])!r}"[:108])
    common.say(f"{len(served.seconds)} steps, at most {max(served.batch)} sequences in one, {sum(served.batch)} tokens")
    common.say(f"{sum(served.seconds):.2f} s: {served.tokens_per_second:.0f} tokens/s")
    some = [0, 3, 6]
    alone = [serve(core, [prompts[i]], [OUTPUTS[i]]).token_ids[0] for i in some]
    common.check_equal(f"requests {some} get the same tokens served alone", [served.token_ids[i] for i in some], alone)
    common.check_equal("request 0 gets the tokens that a loop without any cache writes", alone[0],
                       generate_alone(model, prompts[0], OUTPUTS[0]))  # fmt: skip
    pool = core.scheduler.kv_cache_manager.block_pool
    common.check_equal(f"all {pool.num_blocks - 1} blocks are free again", pool.num_free_blocks, pool.num_blocks - 1)

    common.heading("3. Who sits where: simulate(), sixteen requests on 4 slots")
    common.say(describe(simulate(WIDGET_DEFAULT | {"policy": args.policy})))

    common.heading("4. Why slots need pages: one memory, kept in two ways")
    found = numbers["reserved"]
    common.table(["KV cache", "sequences at once, mean", "most", "steps"], [
        [name, f"{found[key]['mean']:.1f}", found[key]["most"], found[key]["steps"]]
        for name, key in ((f"reserved, {found['max_model_len']} each", "reserved"), ("paged, blocks of 16", "paged"))
    ])  # fmt: skip
    common.say(f"{found['requests']} requests, {found['pool_tokens']:,} token slots: {found['gain']:.1f}x fewer steps. "
               "Both batch continuously; paging seats more")  # fmt: skip

    rows, runs, n = [], {}, NUM_REQUESTS // 2
    common.heading(f"5. The first {n} of them on 8 seats, in seconds")
    for policy in POLICIES:
        runs[policy] = run = serve(make_core(model, policy, 8, 1 + 8 * 32), prompts[:n], OUTPUTS[:n])
        used = sum(run.batch) / (8 * len(run.batch))
        rows.append([policy, len(run.batch), f"{used:.0%}", f"{sum(run.seconds):.2f} s", f"{run.tokens_per_second:.0f}",
                     f"{sum(run.finish) / n:.2f} s", f"{percentile(run.finish, 0.99):.2f} s"])  # fmt: skip
    common.table(["policy", "steps", "seats used", "makespan", "tokens/s", "mean latency", "p99"], rows)
    common.check_equal("both policies write the same tokens", runs["static"].token_ids, runs["continuous"].token_ids)
    shorter = 1 - len(runs["continuous"].batch) / len(runs["static"].batch)
    faster = 1 - sum(runs["continuous"].seconds) / sum(runs["static"].seconds)
    change = f"{abs(faster):.0%} {'less' if faster >= 0 else 'more'} time"
    common.say(f"{shorter:.0%} fewer steps, {change} (a step with fewer sequences in it is shorter)")

    if args.bench:
        bench = benchmark(model, args)
    if args.figure:
        draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": numbers, "bench": bench})


if __name__ == "__main__":
    common.run(main)

"""11 · Preemption and swap: when the cache is full, who pays?

The question: a scheduler that takes blocks only when they are needed serves more requests at once, until the pool is
empty in the middle of a step. A running request must give its blocks back. Which one, and what happens to the keys and
values in them?

The mechanism:
  1. Admission is optimistic: a request comes in if what is known of it fits now. Its output has no reservation.
  2. A running request that finds no block preempts the one admitted last (priority policy: the least important).
  3. Recompute, vLLM's V1: the victim's blocks are freed and its tokens kept; back in the queue (in front; by priority
     at its place), it will be prefilled again, prompt and output in one go, except what the prefix cache still holds.
  4. Swap, as V0 could: the victim's blocks are copied to CPU memory and copied back later. Nothing is redone.
  5. Nobody is admitted in a step that preempted, so copies out and copies in never meet in one step.
  6. A second cache on the CPU, keyed by block hash, catches whatever the GPU's prefix cache evicts: copy, not compute.
  7. A request that can never fit is refused on arrival: in the queue it would wait forever, and block all behind it.
lab/workload_files.py holds the knobs (`SchedulerConfig`), and what `replay` reads and writes.

Numbers to remember: 16 requests of 64 + 192 tokens, one every 16 steps, in a pool that holds 4 of them at full length:
20 preemptions, and 32 % of all computed tokens were computed before. Copying a token of Llama-3.1-8B out and in again
takes 5 µs over PCIe 5, computing it again on an H100 14 µs: bandwidth alone would choose swap, and vLLM removed it.

How to run:
  uv run python vllm/11_preemption.py                                the whole story
  uv run python vllm/11_preemption.py --pool-blocks 12               break it: no request fits, all are refused
  uv run python vllm/11_preemption.py --watermark 8                  keep 8 blocks free of newcomers
  uv run python vllm/11_preemption.py replay WORKLOAD.json --table   what would vLLM do with this workload?
  uv run python vllm/11_preemption.py --bench                        a minute: scheduler cost, copies, computing

Read for this: Kwon et al. 2023 (swap and recompute, figure 19), vLLM 0.32 `v1/core/sched/scheduler.py` and
`v1/kv_offload/cpu/`, vLLM's blog on KV offloading (January 2026), V0's `core/scheduler.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import functools
import itertools
import random
import statistics
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import HARDWARE, tl

from engine.model import folders, llama, loader
from engine.model.tokenizer import Tokenizer
from engine.output import EngineCoreOutput
from engine.request import prompt_length_error
from engine.config import VllmConfig
from engine.worker.assemble import make_runner
from engine.core.engine_core import EngineCore
from engine.config import SchedulerConfig
from engine.attention.metadata import AttentionMetadata
from engine.core.block_pool import BlockPool
from engine.core.queues import FCFSRequestQueue, PriorityRequestQueue
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler as EngineScheduler
from engine.core.scheduler import make_scheduler
from engine.output import SchedulerOutput
from engine.request import Request, RequestStatus, SamplingParams, check_stop

from lab import roofline, workload_files

SCHEDULER_KEYS = workload_files.SCHEDULER_KEYS
Field, CONFIG_FIELDS, REQUEST_FIELDS = workload_files.Field, workload_files.CONFIG_FIELDS, workload_files.REQUEST_FIELDS
REFERENCE, check_workload = workload_files.REFERENCE, workload_files.check_workload
load_workload, dumps = workload_files.load_workload, workload_files.dumps
step_rows, owners_of, draw_owners = workload_files.step_rows, workload_files.owners_of, workload_files.draw_owners

KEY = "11_preemption"


# --- 1. The references ----------------------------------------------------------------------------------------------


def undisturbed(model: llama.Llama, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request must answer however often it was preempted: greedy, alone, without any cache."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # [T, heads, D]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    tokens = list(prompt)
    for _ in range(max_tokens):
        ids = torch.tensor(tokens, device=model.device)  # [T]
        hidden = model.forward(ids, torch.arange(len(tokens), device=model.device), attend)  # [T, hidden]
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def swap_blocks_one_by_one(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks between two caches as V0 did: keys and values of each block by a copy (`cudaMemcpyAsync`) of its own.

    Shapes: source [2, N, block_size, Hkv, D], target [2, M, block_size, Hkv, D], pairs of (block of source, of target).
    """
    for source_block, target_block in pairs:
        for half in (0, 1):
            target[half, target_block].copy_(source[half, source_block], non_blocking=True)


# --- 2. The scheduler: optimism, and its price ---------------------------------------------------------------------


class Scheduler:
    """Lesson 10's scheduler, which gives a request only the blocks that a step needs. What else differs is marked 11.

    If there are none, the least important running request loses its own. As in vLLM's V1, the victim keeps its tokens
    and forgets their keys and values (`num_computed_tokens = 0`). Back in the queue, in front or by priority at its
    place, it computes again what the prefix cache no longer holds: no swap.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config, self.kv_cache_manager = config, kv_cache_manager
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.running: list[Request] = []  # in order of admission
        self.waiting = PriorityRequestQueue() if config.policy == "priority" else FCFSRequestQueue()
        self.finished_req_ids: list[str] = []  # since the last step: the model runner has still to forget them
        most = config.max_num_batched_tokens
        self.max_num_scheduled_tokens = min(config.max_num_scheduled_tokens or most, most)
        self.token_budget, self.long_prefill_cap = 0, config.max_model_len  # of the step that is being scheduled
        # 11: fewer seats than the buffers have, and blocks that admission leaves free for those that run.
        self.max_num_running_reqs = config.max_num_active_seqs or config.max_num_seqs
        self.watermark_blocks = int(config.watermark * kv_cache_manager.block_pool.num_blocks)

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def num_slots(self, request: Request) -> int:
        """KV slots that a request fills in its life. Its last token is sampled and never computed, hence − 1."""
        return int(min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len)) - 1

    def schedule(self) -> SchedulerOutput:
        """Choose who computes how much in the next step, and allocate the blocks that it will write."""
        tables = self.kv_cache_manager.req_to_blocks
        output = SchedulerOutput(finished_req_ids=self.finished_req_ids, block_tables=tables)
        self.finished_req_ids = []
        self.token_budget, self.long_prefill_cap = self.max_num_scheduled_tokens, self._long_prefill_cap()
        self._schedule_running(output)
        if not output.preempted_reqs:  # 11: whoever was preempted would come back at once
            self._schedule_waiting(output)
        return output

    def _long_prefill_cap(self) -> int:
        """The most tokens that one request may get in this step, as in lesson 10."""
        config, num_requests = self.config, len(self.requests)
        if config.long_prefill_token_threshold == 0 or num_requests <= 1:
            return config.max_model_len
        if config.long_prefill_token_threshold_adaptive:
            return max(config.long_prefill_token_threshold, config.max_num_batched_tokens // num_requests)
        return config.long_prefill_token_threshold

    def _num_new_tokens(self, request: Request) -> int:
        """n = min(behind, cap, budget); a prompt that may not be cut gets all of it or nothing."""
        num_new_tokens = min(request.num_tokens - request.num_computed_tokens, self.long_prefill_cap)
        if num_new_tokens <= self.token_budget:
            return num_new_tokens
        may_be_cut = self.config.enable_chunked_prefill or request.status is RequestStatus.RUNNING
        return self.token_budget if may_be_cut else 0

    def _grant(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> None:
        """The model is about to run: what is granted counts as computed from now on."""
        output.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        request.num_computed_tokens += num_new_tokens

    def _schedule_running(self, output: SchedulerOutput) -> None:
        """Running requests go on, in order of admission; each preempts others until its own blocks are there."""
        for request in tuple(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago, for one in front of it
            # The last position of a sequence is sampled, never computed.
            room = self.config.max_model_len - 1 - request.num_computed_tokens
            num_new_tokens = min(self._num_new_tokens(request), room)
            if num_new_tokens <= 0:
                continue
            while self.kv_cache_manager.allocate_slots(request, num_new_tokens) is None:
                victim = self._choose_victim()
                self._preempt_request(victim, output)
                if victim is request:  # the walk ends here, even if others behind it could go on (in 0.33 they do)
                    return
            output.scheduled_running_reqs.append(request)
            self._grant(request, num_new_tokens, output)

    def _choose_victim(self) -> Request:
        """First come, first served: the one admitted last. Priority: the least important, and of those the latest."""
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival_time))
        return self.running[-1]

    def _preempt_request(self, victim: Request, output: SchedulerOutput) -> None:
        """Back to the queue without its blocks.

        By priority, the victim may stand in this step already. Then its tokens go back to the budget, and the blocks
        that they would have filled must leave the index: nobody will compute them. vLLM 0.32 leaves them there, and
        the victim resumes by hitting memory that was never written (vLLM issue 57580, pull request 43569).
        """
        self.running.remove(victim)
        if withdrawn := output.num_scheduled_tokens.pop(victim.request_id, 0):
            output.scheduled_running_reqs.remove(victim)
            self.token_budget += withdrawn
            if self.config.evict_uncomputed_blocks:
                self.kv_cache_manager.evict_uncomputed(victim, victim.num_computed_tokens - withdrawn)
        self.kv_cache_manager.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.prepend_request(victim)
        output.preempted_reqs.append(victim)

    def _schedule_waiting(self, output: SchedulerOutput) -> None:
        """From the head of the queue, while there are seats, budget and blocks. Nobody overtakes the head."""
        while self.waiting and self.token_budget > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            num_new_tokens = self._admit(request)
            if num_new_tokens == 0:
                break
            self.running.append(self.waiting.pop_request())
            is_new = request.status is RequestStatus.WAITING  # 11: or it comes back
            (output.scheduled_new_reqs if is_new else output.scheduled_resumed_reqs).append(request)
            request.status = RequestStatus.RUNNING
            self._grant(request, num_new_tokens, output)

    def _admit(self, request: Request) -> int:
        """Take what this step needs, no more: the cached prefix, and blocks for the tokens behind it.

        The test is stricter than the need: all known tokens must fit (`scheduler_reserve_full_isl`), and the watermark
        stay free if anybody runs. Nothing is set aside, so what fits now may still collide later.
        """
        computed_blocks, num_cached_tokens = self.kv_cache_manager.get_computed_blocks(request)
        request.num_computed_tokens = num_cached_tokens
        if num_new_tokens := self._num_new_tokens(request):
            num_tokens = request.num_tokens
            if not self.config.scheduler_reserve_full_isl:
                num_tokens = num_cached_tokens + num_new_tokens
            needed = self.kv_cache_manager.get_num_blocks_to_allocate(request, num_tokens, computed_blocks)
            watermark = self.watermark_blocks if self.running else 0
            if needed + watermark <= self.kv_cache_manager.block_pool.num_free_blocks:
                self.kv_cache_manager.allocate_slots(request, num_new_tokens, computed_blocks)
                if request.num_preemptions == 0:  # later it finds its own blocks, which were no cached prompt
                    request.num_cached_tokens = num_cached_tokens
                return num_new_tokens
        request.num_computed_tokens = 0  # a lookup that admits nobody changes nothing
        return 0

    def update_from_output(
        self, output: SchedulerOutput, sampled_token_ids: dict[str, list[int]]
    ) -> list[EngineCoreOutput]:
        """Append what was sampled, in scheduling order. Whoever is done leaves: its seat and its blocks are free now.

        `sampled_token_ids` has one new token of each request that has caught up.
        """
        outputs = []
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request_id not in sampled_token_ids:
                continue  # aborted while the model ran, or its chunk ended inside the prompt
            request.append_output_token_id(sampled_token_ids[request_id][0])
            if check_stop(request, self.config.max_model_len):
                self._free_request(request)
            reason = request.get_finished_reason()  # None: it goes on
            outputs.append(EngineCoreOutput(request_id, request.output_token_ids[-1:], reason, request.stop_reason))
        self.running = [request for request in self.running if not request.is_finished()]
        return outputs

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside, such as those of a client that hung up. Returns those that there were."""
        ended = []
        for request in filter(None, map(self.requests.get, request_ids)):
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove_request(request)
            request.status = status
            self._free_request(request)
            ended.append(request)
        return ended

    def _free_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        self.finished_req_ids.append(request.request_id)
        del self.requests[request.request_id]


def scheduler_cost(num_requests: int, steps: int = 60, enable_prefix_caching: bool = False) -> float:
    """Seconds per `schedule()` + `update_from_output()` while `num_requests` decode: the median over `steps`."""
    length = 100 + steps + 2
    config = SchedulerConfig(max_model_len=length, max_num_seqs=num_requests, max_num_batched_tokens=100 * num_requests)
    scheduler = make_scheduler(config, num_requests * -(-length // 16) + 1, 16, enable_prefix_caching)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for i in range(num_requests):
        scheduler.add_request(Request(f"r{i}", [i, *range(99)], params, arrival_time=i))
    seconds = []
    for _ in range(steps + 1):  # the first step is the prefill
        start = time.perf_counter()
        output = scheduler.schedule()
        middle = time.perf_counter()
        sampled = {request_id: [1] for request_id in output.num_scheduled_tokens}
        resumed = time.perf_counter()
        scheduler.update_from_output(output, sampled)
        seconds.append(middle - start + time.perf_counter() - resumed)
    return statistics.median(seconds[1:])


# --- 3. Moving blocks: one kernel for all of them -------------------------------------------------------------------


@common.kernel
def swap_blocks_kernel(source, target, pairs, stride_source, stride_target, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    pair, half, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # half 0: keys, 1: values
    source_block, target_block = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)  # int64: offsets may be large
    word = chunk * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source + half * stride_source + source_block * WIDTH + word)
    tl.store(target + half * stride_target + target_block * WIDTH + word, words)


def swap_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks from one cache to another; on a GPU, one of them is pinned host memory, which the kernel reads
    or writes over the link. A block is a row of bits: the copy is of 4-byte words, whatever the dtype.

    Semantics: target[:, t] = source[:, s] for every pair (s, t). No t twice, no overlap of the two caches.
    Shapes: source [2, N, block_size, Hkv, D], target [2, M, block_size, Hkv, D], pairs int64 [P, 2]. Raises ValueError
    for host memory that is not pinned.
    """
    on_gpu = target if target.is_cuda else source
    if not common.runs_kernel(on_gpu):
        for half in (0, 1):
            target[half].index_copy_(0, pairs[:, 1], source[half].index_select(0, pairs[:, 0]))
        return
    if on_gpu.is_cuda and not all(x.is_cuda or x.is_pinned() for x in (source, target)):
        raise ValueError("swap_blocks: a GPU can only reach host memory that is pinned")
    if len(pairs) == 0:
        return
    source, target = source.view(torch.int32), target.view(torch.int32)
    width = source[0, 0].numel()
    block = min(width & -width, 1024)  # the largest power of two that divides it: no tail, so no masks
    swap_blocks_kernel[(len(pairs), 2, width // block)](
        source, target, pairs, source.stride(0), target.stride(0), WIDTH=width, BLOCK=block, num_warps=4
    )


def example_launches(dtype: torch.dtype) -> None:
    """The launches of this lesson's models on meta tensors, for the compile check: SmolLM2 and an 8B model."""
    for Hkv, D in ((3, 64), (8, 128)):
        gpu, cpu = (torch.empty(2, n, 16, Hkv, D, dtype=dtype, device="meta") for n in (2048, 512))
        swap_blocks(gpu, cpu, torch.empty(64, 2, dtype=torch.int64, device="meta"))


class BlockCopies:
    """The copies between GPU and CPU pool that a step has to do before the model runs, in the order of decision.

    Consecutive copies of one direction form a batch {target: source}: a target that is reassigned before anybody read
    it is written once, by its last source.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[str, dict[int, int]]] = []
        self.total = {"out": 0, "in": 0}

    def add(self, direction: str, pairs: Iterable[tuple[int, int]]) -> None:
        """Note (source, target) pairs; `direction` is "out" (GPU to CPU) or "in"."""
        if not self.batches or self.batches[-1][0] != direction:
            self.batches.append((direction, {}))
        for source, target in pairs:
            self.batches[-1][1][target] = source
            self.total[direction] += 1

    def take(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """All that has been noted, as (direction, (source, target) pairs); the list is then empty."""
        taken, self.batches = self.batches, []
        return [(direction, [(s, t) for t, s in batch.items()]) for direction, batch in taken]


# --- 4. Swap: the victim's blocks go to the CPU ---------------------------------------------------------------------


class SwapScheduler(Scheduler):
    """Three methods make of recomputation what V0 called swapping: on the way out, on the way in, and at the end.

    V0 kept the swapped in a queue of their own, served before `waiting`; here they stand in front of `waiting`, which
    is the same. V0 stopped with an error when the CPU's pool was full; here that victim is recomputed.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, num_cpu_blocks: int) -> None:
        super().__init__(config, kv_cache_manager)
        self.cpu_pool = BlockPool(num_cpu_blocks + 1)  # its block 0 is a null block as well
        self.swapped: dict[str, tuple[list[int], int]] = {}  # request id: its blocks on the CPU, its computed tokens
        self.copies = BlockCopies()

    def _preempt_request(self, victim: Request, output: SchedulerOutput) -> None:
        """Copy the blocks with computed tokens out, then go on as if they were lost."""
        # What this very step was to compute does not exist yet.
        computed = victim.num_computed_tokens - output.num_scheduled_tokens.get(victim.request_id, 0)
        num_blocks = -(-computed // self.kv_cache_manager.block_size)
        if 0 < num_blocks <= self.cpu_pool.num_free_blocks:
            cpu_blocks = self.cpu_pool.allocate(num_blocks)
            self.copies.add("out", zip(self.kv_cache_manager.get_block_ids(victim.request_id), cpu_blocks))
            self.swapped[victim.request_id] = cpu_blocks, computed
        super()._preempt_request(victim, output)

    def _admit(self, request: Request) -> int:
        """A request with blocks on the CPU gets as many here, and their content; it goes on where it was."""
        if request.request_id not in self.swapped:
            return super()._admit(request)
        cpu_blocks, request.num_computed_tokens = self.swapped[request.request_id]
        manager, num_new_tokens = self.kv_cache_manager, self._num_new_tokens(request)
        needed = manager.get_num_blocks_to_allocate(request, request.num_tokens)
        watermark = self.watermark_blocks if self.running else 0
        if num_new_tokens == 0 or needed + watermark > manager.block_pool.num_free_blocks:
            request.num_computed_tokens = 0  # it still waits
            return 0
        manager.allocate_slots(request, num_new_tokens)
        self.copies.add("in", zip(cpu_blocks, manager.get_block_ids(request.request_id)))
        self._forget(request)
        return num_new_tokens

    def _free_request(self, request: Request) -> None:
        self._forget(request)  # aborted while it was swapped out
        super()._free_request(request)

    def _forget(self, request: Request) -> None:
        self.cpu_pool.free(self.swapped.pop(request.request_id, ([], 0))[0])


# --- 5. Offload: a second tier for the prefix cache -----------------------------------------------------------------


class CPUTier:
    """`num_blocks` of CPU memory for blocks that the GPU's prefix cache evicts, found by their hash, LRU.

    A block is in one tier at a time: `take` removes what goes back to the GPU, `store` brings what comes from there.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks + 1)
        self.blocks: OrderedDict[bytes, int] = OrderedDict()  # least recently stored first
        self.copies = BlockCopies()

    def store(self, block_hash: bytes, gpu_block: int) -> None:
        """Keep a block that is about to be overwritten on the GPU. If the tier is full, its oldest block goes."""
        if block_hash in self.blocks:
            self.blocks.move_to_end(block_hash)
            return
        if self.pool.num_free_blocks == 0:
            if not self.blocks:
                return  # every block is on its way back to the GPU
            self.pool.free([self.blocks.popitem(last=False)[1]])
        (cpu_block,) = self.pool.allocate(1)
        self.blocks[block_hash] = cpu_block
        self.copies.add("out", [(gpu_block, cpu_block)])

    def take(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The blocks of these hashes, no longer indexed; the caller frees them when their copies are noted."""
        return [self.blocks.pop(block_hash) for block_hash in block_hashes]


class OffloadingBlockPool(BlockPool):
    """Lesson 05's pool; what it evicts goes down a tier, unless the GPU has the same block once more."""

    def __init__(self, num_blocks: int, tier: CPUTier) -> None:
        super().__init__(num_blocks)
        self.tier = tier

    def allocate(self, n: int) -> list[int]:
        """Blocks are handed out before the model runs, so what they held can still be copied."""
        hashes = [self.block_hash[block] for block in itertools.islice(self.free_queue, n)]
        blocks = super().allocate(n)
        for block, block_hash in zip(blocks, hashes):
            if block_hash is not None and self.get_cached_block(block_hash) is None:
                self.tier.store(block_hash, block)
        return blocks


class OffloadingKVCacheManager(KVCacheManager):
    """Lesson 05's manager on two tiers. The scheduler above runs on it unchanged: to it, a hit is a hit."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, num_cpu_blocks: int) -> None:
        super().__init__(num_blocks, block_size, max_model_len)
        self.tier = CPUTier(num_cpu_blocks)
        self.block_pool = OffloadingBlockPool(num_blocks, self.tier)

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """Blocks found on the GPU, and the tokens found on either tier: from the first GPU miss on, the CPU's count."""
        blocks, num_tokens = super().get_computed_blocks(request)
        if not request.sampling_params.skip_reading_prefix_cache:
            limit = (request.num_tokens - 1) // self.block_size
            rest = request.block_hashes[len(blocks) : limit]
            found = itertools.takewhile(self.tier.blocks.__contains__, rest)
            num_tokens += self.block_size * sum(1 for _ in found)
        return blocks, num_tokens

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[int] = (),
        delay_caching: bool = False,
    ) -> list[int] | None:
        """Tokens that count as computed but have no block yet are on the CPU: they get new blocks, and a copy each."""
        if request.request_id in self.req_to_blocks:
            return super().allocate_slots(request, num_new_tokens, (), delay_caching)
        num_tokens = request.num_computed_tokens + num_new_tokens
        if self.get_num_blocks_to_allocate(request, num_tokens, new_computed_blocks) > self.block_pool.num_free_blocks:
            return None
        first, last = len(new_computed_blocks), request.num_computed_tokens // self.block_size
        cpu_blocks = self.tier.take(request.block_hashes[first:last])
        new_blocks = super().allocate_slots(request, num_new_tokens, new_computed_blocks, delay_caching)
        self.tier.copies.add("in", zip(cpu_blocks, self.get_block_ids(request.request_id)[first:last]))
        self.tier.pool.free(cpu_blocks)
        return new_blocks


# --- 6. The loop: with a meter, and with a model --------------------------------------------------------------------


class MeteredCore(EngineCore):
    """The engine's loop without a model. It counts: which tokens of a step are new, and which were computed before?"""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.copies = copies_of(scheduler)
        self.furthest: dict[str, int] = {}  # request id: how many of its tokens have ever been computed
        self.useful = self.redone = self.preemptions = 0

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Token 0 for each request that has computed all of its own; counts tokens computed before (`redone`)."""
        sampled: dict[str, list[int]] = {}
        self.preemptions += len(output.preempted_reqs)
        for request_id, n in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end, known = request.num_computed_tokens, self.furthest.get(request_id, 0)
            redone = max(0, min(end, known) - (end - n))
            self.redone += redone
            self.useful += n - redone
            self.furthest[request_id] = max(end, known)
            if end == request.num_tokens:
                sampled[request_id] = [0]
        return sampled


class OffloadingRunner:
    """In front of the engine's model runner: a second cache, of `num_cpu_blocks`, in host memory."""

    def __init__(self, model: llama.Llama, scheduler: Scheduler, num_cpu_blocks: int) -> None:
        manager, paged = scheduler.kv_cache_manager, VllmConfig(attention_backend="paged")
        self.runner = make_runner(model, scheduler.config, manager.block_pool.num_blocks, manager.block_size, paged)
        self.model, self.cache, self.copies = self.runner.model, self.runner.cache, copies_of(scheduler)
        shape = (2, num_cpu_blocks + 1, *self.cache.layers[0].shape[2:])
        self.host = [torch.zeros(shape, dtype=model.dtype, pin_memory=common.HAS_GPU) for _ in self.cache.layers]

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Copies first: a block taken away may already belong to a request that writes it in this forward pass."""
        for direction, pairs in self.copies.take() if self.copies else ():
            table = torch.tensor(pairs, dtype=torch.int64, device=self.model.device).view(-1, 2)
            for layer, host in zip(self.cache.layers, self.host):
                swap_blocks(*((layer, host) if direction == "out" else (host, layer)), table)
        return self.runner.execute_model(output)


class ModelCore(MeteredCore):
    """The metered loop with a model in it: greedy."""

    def __init__(self, scheduler: Scheduler, model: llama.Llama, num_cpu_blocks: int = 0) -> None:
        super().__init__(scheduler)
        self.runner = OffloadingRunner(model, scheduler, num_cpu_blocks)

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        super().execute_model(output)
        return self.runner.execute_model(output)


def copies_of(scheduler: Scheduler) -> BlockCopies | None:
    """The copies that a scheduler, or the manager below it, decides on."""
    if isinstance(scheduler, SwapScheduler):
        return scheduler.copies
    tier = getattr(scheduler.kv_cache_manager, "tier", None)
    return tier.copies if tier else None


POLICIES = ("recompute", "priority", "swap", "offload")


def build_scheduler(policy: str, num_blocks: int, block_size: int, max_model_len: int, num_cpu_blocks: int = 0,
                    prefix_caching: bool = False, watermark_blocks: int = 0, **limits: Any) -> Scheduler:  # fmt: skip
    """A scheduler over `num_blocks` usable blocks (the null block comes on top) for one of `POLICIES`."""
    order = "priority" if policy == "priority" else "fcfs"
    config = SchedulerConfig(max_model_len=max_model_len, policy=order, **limits)
    if policy == "offload":
        manager = OffloadingKVCacheManager(num_blocks + 1, block_size, max_model_len, num_cpu_blocks)
    else:
        manager = KVCacheManager(num_blocks + 1, block_size, max_model_len, prefix_caching)
    scheduler = SwapScheduler(config, manager, num_cpu_blocks) if policy == "swap" else Scheduler(config, manager)
    scheduler.watermark_blocks = watermark_blocks
    return scheduler


def run_to_end(core: EngineCore, requests: Iterable[Request]) -> dict[str, list[int]]:
    """Add all requests, step until everybody has finished, return {request id: output tokens}."""
    requests = list(requests)
    for request in requests:
        core.add_request(request)
    while core.scheduler.has_unfinished_requests():
        core.step()
    return {request.request_id: request.output_token_ids for request in requests}


# --- 7. replay: what would vLLM do with this workload? --------------------------------------------------------------


class ReplayCore(EngineCore):
    """The engine's loop without a model: a request that has caught up gets the next of its given tokens.

    `execute_model` runs between `schedule()` and `update_from_output()`: just when a step can be looked at. With async
    scheduling the tokens of a step are heard of when the next one has been scheduled.
    The one difference to serving is `evict_uncomputed_blocks=False`, without which it would not decide as vLLM does.
    """

    def __init__(self, config: dict) -> None:
        limits = SchedulerConfig(**{key: config[key] for key in SCHEDULER_KEYS}, evict_uncomputed_blocks=False)
        manager = KVCacheManager(config["num_blocks"], config["block_size"], config["max_model_len"],
                                 config["enable_prefix_caching"])  # fmt: skip
        super().__init__(EngineScheduler(limits, manager, async_scheduling=config["async_scheduling"]))
        self.config, self.depth = config, 1 + config["async_scheduling"]
        self.queue: deque[tuple[SchedulerOutput, dict[str, list[int]]]] = deque()  # steps not heard of
        self.forced: dict[str, list[int]] = {}
        self.last_tables: dict[str, list[int]] = {}
        self.entry: dict[str, Any] = {}

    def check_request(self, request: Request) -> None:
        """vLLM's front end looks at the prompt's length only, and that is done before the replay starts."""

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """The recorded tokens; `entry` is the step as the trace has it."""
        scheduler, tables = self.scheduler, self.scheduler.kv_cache_manager.req_to_blocks
        for request in output.preempted_reqs:  # its next table is news, even if it should be the same
            self.last_tables.pop(request.request_id, None)
        changed = {r.request_id: list(tables[r.request_id]) for r in scheduler.running
                   if self.last_tables.get(r.request_id) != tables[r.request_id]}  # fmt: skip
        self.last_tables.update(changed)
        admitted = {r.request_id: r for r in (*output.scheduled_new_reqs, *output.scheduled_resumed_reqs)}
        sampled = {}
        for request_id in output.num_scheduled_tokens:
            request = scheduler.requests[request_id]
            ahead = max(0, request.num_output_placeholders - 1)
            if request.num_computed_tokens >= request.num_tokens + ahead:
                sampled[request_id] = self.forced[request_id][request.num_output_tokens + ahead :][:1]
        self.entry = {
            "scheduled": dict(output.num_scheduled_tokens),
            "new": _ids(output.scheduled_new_reqs),
            "resumed": _ids(output.scheduled_resumed_reqs),
            "running": _ids(output.scheduled_running_reqs),
            "preempted": _ids(output.preempted_reqs),
            "prefix_hit": {
                i: admitted[i].num_computed_tokens - n for i, n in output.num_scheduled_tokens.items() if i in admitted
            },
            "computed": {r.request_id: r.num_computed_tokens for r in scheduler.running},
            "blocks": changed,
            "free_blocks": [scheduler.kv_cache_manager.block_pool.num_free_blocks],
        }
        return sampled

    def step(self) -> list[EngineCoreOutput]:
        """Schedule a step; hear of the oldest once `depth` are in the queue (vLLM: `step_with_batch_queue`)."""
        output = self.scheduler.schedule()
        self.queue.append((output, self.execute_model(output)))
        if len(self.queue) < self.depth:
            return []
        output, sampled = self.queue.popleft()
        for request_id, token_ids in sampled.items():
            if not token_ids and request_id in self.scheduler.requests:  # it has not ended while this was on its way
                raise common.InputError(f"forced_output_token_ids of request {request_id!r}: has "
                                        f"{len(self.forced[request_id])} tokens, but the request goes on")  # fmt: skip
        return self.scheduler.update_from_output(output, sampled)

    def recorded_step(self) -> dict[str, Any]:
        """One `step()`, described in the format of the recordings."""
        heard = self.step()
        self.entry["sampled"] = {o.request_id: o.new_token_ids[0] for o in heard if o.new_token_ids}
        entry, pool = self.entry, self.scheduler.kv_cache_manager.block_pool
        entry["free_blocks"].append(pool.num_free_blocks)
        entry["finished"] = {o.request_id: o.finish_reason for o in heard if o.finish_reason}
        entry["running_queue"] = _ids(self.scheduler.running)
        entry["waiting_queue"] = _ids(self.scheduler.waiting)
        if self.config["enable_prefix_caching"]:
            entry["cached_keys"] = len(pool.cached_block_hash_to_block)
        if self.config["record_free_queue"]:
            entry["free_queue"] = list(pool.free_queue)
        return entry


def _ids(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def replay(workload: dict, core_class: type[ReplayCore] = ReplayCore) -> dict:
    """What the scheduler decides on `workload`, step by step: the same JSON as recorded from vLLM.

    The trace ends "finished", or "stalled" when nothing was scheduled, nothing can arrive and somebody still waits
    (the state will never change), or after `max_steps` steps.

    Raises:
        common.InputError: the workload is malformed.
    """
    workload = check_workload(workload)
    config = workload["config"]
    core = core_class(config)
    scheduler = core.scheduler
    trace = {"vllm": REFERENCE, "workload": workload["name"], "config": config, "end": "max_steps",
             "rejected": {}, "steps": []}  # fmt: skip
    pending = []
    # The rank in (arrival step, position in the file) is the arrival time.
    for rank, spec in enumerate(sorted(workload["requests"], key=lambda spec: spec["arrival_step"])):
        error = prompt_length_error(len(spec["prompt_token_ids"]), config["max_model_len"])
        if error and not config["bypass_frontend"]:
            trace["rejected"][spec["id"]] = error
        else:
            pending.append((spec, rank))
    aborts = sorted((spec["abort_step"], spec["id"]) for spec, _ in pending if "abort_step" in spec)
    pending.reverse()  # to pop from the end
    aborts.reverse()

    step = 0
    while len(trace["steps"]) < config["max_steps"]:
        if not scheduler.has_unfinished_requests():
            if not pending:
                trace["end"] = "finished"
                break
            step = pending[-1][0]["arrival_step"]  # an idle engine sleeps until somebody comes
        added, aborted = [], []
        while pending and pending[-1][0]["arrival_step"] <= step:
            spec, rank = pending.pop()
            core.forced[spec["id"]] = spec["forced_output_token_ids"]
            core.add_request(workload_files.make_request(spec, rank, config))
            added.append(spec["id"])
        while aborts and aborts[-1][0] <= step:
            request_id = aborts.pop()[1]
            if request_id in scheduler.requests:
                core.abort_requests([request_id])
                aborted.append(request_id)
        entry = {"step": step, "added": added, "aborted": aborted, **core.recorded_step()}
        trace["steps"].append({key: value for key, value in entry.items() if value or key in ("step", "scheduled")})
        moving = (entry["scheduled"], entry["preempted"], entry["sampled"], pending, aborts)
        if not any(moving) and scheduler.has_unfinished_requests():
            trace["end"] = "stalled"
            break
        step += 1
    return trace


def replay_command(args: argparse.Namespace) -> None:
    """`replay WORKLOAD.json …`: traces to standard output or, under the workloads' names, into `--out`."""
    workloads = {Path(path): load_workload(path) for path in args.workloads}  # all are checked before the first runs
    if args.out and len({path.name for path in workloads}) < len(workloads):
        raise common.InputError("--out: two workload files have the same name")
    for path, workload in workloads.items():
        try:
            trace = replay(workload)
            if args.out:
                Path(args.out).mkdir(parents=True, exist_ok=True)
                (Path(args.out) / path.name).write_text(dumps(trace), encoding="utf-8")
        except common.InputError as error:
            raise common.InputError(f"{path}: {error}") from None
        except OSError as error:
            raise common.InputError(f"--out {args.out}: {error.strerror}") from None
        if args.owners and trace["steps"]:
            preemptions = [step["step"] for step in trace["steps"] for _ in step.get("preempted", ())]
            pool, title = workload["config"]["num_blocks"] - 1, f"Who owns the pool over time: {workload['name']}"
            try:
                draw_owners(args.owners, f"replay_{path.stem}", owners_of(trace), preemptions, pool, title)
            except OSError as error:
                raise common.InputError(f"--figure {args.owners}: {error.strerror}") from None
        if args.table:
            columns = ("step", "scheduled (+ new, ↻ resumed)", "preempted", "finished", "waiting", "free")
            common.table(columns, list(step_rows(trace)), title=f"{workload['name']}: {trace['end']}")
            for request_id, error in trace["rejected"].items():
                common.say(f"{request_id} refused: {error}")
        elif not args.out:
            sys.stdout.write(dumps(trace))


# --- 8. What a preemption costs: recompute against swap -------------------------------------------------------------

# Bytes/s in one direction. PCIe: what large copies reach of 31.5 and 63 GB/s; NVLink-C2C (GH200): the data sheet.
LINKS = {"PCIe 4": 25e9, "PCIe 5": 50e9, "NVLink-C2C": 450e9}
COPY_OVERHEAD = 2e-6  # seconds of one cudaMemcpyAsync, whatever its size: assumed. From Python, an H200's took 17 µs


def recompute_seconds(config: dict, gpu: common.GPU, num_tokens: int) -> float:
    """FLOPs = 2 · W · S + 4 · L · Hq · D · S(S + 1)/2, at the GPU's peak.

    A chunk rides along with a step that reads the weights for others anyway, so they are not charged here.
    """
    S, spec = num_tokens, roofline.KVCacheSpec.from_config(config)
    W = config["num_parameters"] if "num_parameters" in config else roofline.weights_read(config)[0]
    pairs = S * (S + 1) // 2
    return (2 * W * S + 4 * spec.num_layers * config["num_attention_heads"] * spec.head_size * pairs) / gpu.flops


def swap_seconds(config: dict, link: float, num_tokens: int, block_size: int = 16, one_by_one: bool = False) -> float:
    """Out and in: 2 · (S · bytes per token / link + copies · overhead). One kernel per direction, or V0's
    2 · L copies (keys and values of every layer) for each block."""
    spec, num_blocks = roofline.KVCacheSpec.from_config(config), -(-num_tokens // block_size)
    copies = 2 * spec.num_layers * num_blocks if one_by_one else 1
    return 2 * (num_blocks * block_size * spec.bytes_per_token() / link + copies * COPY_OVERHEAD)


def crossover(config: dict, gpu: common.GPU, link: float, **how: Any) -> int:
    """The least number of whole blocks, as tokens, from which swap is faster than recompute (0: never below 2^24)."""
    lengths = range(16, 1 << 24, 16)
    low, high = 0, len(lengths)  # recompute − swap grows with the length, once it is positive it stays so
    while low < high:
        middle = (low + high) // 2
        if recompute_seconds(config, gpu, lengths[middle]) > swap_seconds(config, link, lengths[middle], **how):
            high = middle
        else:
            low = middle + 1
    return lengths[low] if low < len(lengths) else 0


# --- 9. simulate: thrash --------------------------------------------------------------------------------------------

WIDGET_DEFAULT: dict[str, Any] = {
    "pool_blocks": 64, "block_size": 16, "requests": 16, "prompt": 64, "output": 192, "arrival_gap": 16,
    "watermark_blocks": 0, "policy": "recompute", "prefix_caching": False, "link_gb_s": 50, "prefill_tok_s": 40_000,
}  # fmt: skip
WIDGET_CHOICES: dict[str, Any] = {
    "pool_blocks": range(1, 4097), "block_size": range(1, 257), "requests": range(1, 65), "prompt": range(1, 4097),
    "output": range(1, 4097), "arrival_gap": range(4097), "watermark_blocks": range(4097),
    "policy": ("recompute", "swap"), "prefix_caching": (True, False), "link_gb_s": range(1, 1001),
    "prefill_tok_s": range(1, 10**6 + 1),
}  # fmt: skip
BYTES_PER_TOKEN = 131_072  # Llama-3.1-8B in bf16, as lesson 01 computes it


class ObservedCore(MeteredCore):
    """Writes down every step: who holds how many blocks, who was preempted, what was redone and copied."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.now = 0
        self.steps: list[dict[str, Any]] = []

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """As the parent, and appends the step as it is after scheduling."""
        scheduler, redone = self.scheduler, self.redone
        copied = sum(len(pairs) for _, pairs in self.copies.take()) if self.copies else 0
        sampled = super().execute_model(output)
        number = lambda requests: [int(request.request_id) for request in requests]  # noqa: E731
        tables = scheduler.kv_cache_manager.req_to_blocks
        self.steps.append({
            "step": self.now, "scheduled": {int(i): n for i, n in output.num_scheduled_tokens.items()},
            "held": {i: len(tables[str(i)]) for i in sorted(map(int, tables))},
            "free": scheduler.kv_cache_manager.block_pool.num_free_blocks,
            "waiting": number(scheduler.waiting), "preempted": number(output.preempted_reqs),
            "resumed": number(output.scheduled_resumed_reqs), "redone": self.redone - redone, "copied": copied,
        })  # fmt: skip
        self.now += 1
        return sampled


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Equal requests, one every `arrival_gap` steps, at a pool of `pool_blocks` usable blocks: every step.

    params: integers within WIDGET_CHOICES; policy "recompute" or "swap"; prefix_caching true or false. Times are
    integers: µs of recomputing at `prefill_tok_s`, µs of copying Llama-3.1-8B's blocks at `link_gb_s` one way.
    Raises InputError naming the field.
    """
    p = common.checked(params, WIDGET_CHOICES)
    length = p["prompt"] + p["output"]
    scheduler = build_scheduler(
        p["policy"], p["pool_blocks"], p["block_size"], length, num_cpu_blocks=p["requests"] * length,
        prefix_caching=p["prefix_caching"], watermark_blocks=p["watermark_blocks"], max_num_seqs=p["requests"],
    )  # fmt: skip
    core = ObservedCore(scheduler)
    trace: dict[str, Any] = {"params": p, "refused": None, "outputs": 0, "token_ns": {
        "recompute": 10**9 // p["prefill_tok_s"], "swap": 2 * BYTES_PER_TOKEN // p["link_gb_s"],
    }}  # fmt: skip
    sampling = SamplingParams(max_tokens=p["output"], ignore_eos=True)
    arrived = 0
    while arrived < p["requests"] or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            core.now = max(core.now, arrived * p["arrival_gap"])  # an idle engine sleeps
        while arrived < p["requests"] and arrived * p["arrival_gap"] <= core.now and not trace["refused"]:
            prompt = list(range(arrived * p["prompt"], (arrived + 1) * p["prompt"]))
            try:
                core.add_request(Request(str(arrived), prompt, sampling, arrival_time=arrived))
            except common.InputError as error:  # the engine's check at the door
                trace["refused"] = str(error)
            arrived += 1
        if trace["refused"]:
            break  # all requests are equal
        trace["outputs"] += len(core.step())
    copied = sum(step["copied"] for step in core.steps)
    return trace | {
        "steps": core.steps, "preemptions": core.preemptions, "useful": core.useful, "redone": core.redone,
        "copied_blocks": copied, "recompute_us": core.redone * 10**6 // p["prefill_tok_s"],
        "swap_us": copied * p["block_size"] * BYTES_PER_TOKEN // (p["link_gb_s"] * 1000),
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p = trace["params"]
    needed = -(-(p["prompt"] + p["output"] - 1) // p["block_size"])
    lines = [
        f"{p['requests']} requests of {p['prompt']} + {p['output']} tokens, one every {p['arrival_gap']} steps, "
        f"{needed} blocks of {p['block_size']} each",
        f"pool {p['pool_blocks']} blocks, watermark {p['watermark_blocks']}, {p['policy']}"
        + (", prefix caching" if p["prefix_caching"] else ""),
    ]
    if trace["refused"]:
        return "\n".join([*lines, f"REFUSED on arrival: {trace['refused']}"])
    preempting = [step for step in trace["steps"] if step["preempted"]]
    for step in preempting[:4]:
        held = " ".join(f"r{r}:{n}" for r, n in step["held"].items())
        victims = ", ".join(f"r{r}" for r in step["preempted"])
        lines.append(f"  step {step['step']:>3}: preempted {victims}; left {held}, {step['free']} free, "
                     f"{len(step['waiting'])} waiting")  # fmt: skip
    if len(preempting) > 4:
        lines.append(f"  … and {len(preempting) - 4} more with preemptions")
    cost = f"redone in {trace['recompute_us'] / 1e3:.1f} ms"
    if p["policy"] == "swap":
        cost += f"; {trace['copied_blocks']:,} blocks copied in {trace['swap_us'] / 1e3:.1f} ms"
    lines += [
        f"{len(trace['steps'])} steps, {trace['outputs']:,} tokens written, {trace['preemptions']} preemptions",
        f"tokens computed: {trace['useful']:,} useful, {trace['redone']:,} {cost}",
        f"a token out and in: {trace['token_ns']['swap']:,} ns; computed again: {trace['token_ns']['recompute']:,} ns",
    ]
    return "\n".join(lines)


# --- 10. The cliff: latency against load ----------------------------------------------------------------------------

CLIFF_MODEL, CLIFF_GPU = "Llama-2-7B", "RTX 4090 24GB"  # a roofline: 512 KiB of cache per token on a small card
STEP_OVERHEAD = 1e-3  # seconds of CPU per step: an assumption


class TimedCore(MeteredCore):
    """A clock instead of a model: a step lasts as long as the roofline says, plus its copies and STEP_OVERHEAD."""

    def __init__(self, scheduler: Scheduler, model: str = CLIFF_MODEL, gpu: str = CLIFF_GPU,
                 link: float = LINKS["PCIe 4"]) -> None:  # fmt: skip
        super().__init__(scheduler)
        config, self.gpu, self.link = roofline.MODELS[model], HARDWARE[gpu], link
        spec = roofline.KVCacheSpec.from_config(config)
        self.weights, self.head = roofline.weights_read(config)
        self.pair_flops = 4 * spec.num_layers * config["num_attention_heads"] * spec.head_size
        self.token_bytes = spec.bytes_per_token()
        self.clock = 0.0

    def execute_model(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """As the parent; `clock` goes on by the roofline of the step and what was copied, in seconds."""
        sampled, tokens, pairs, context = super().execute_model(output), 0, 0, 0
        for request_id, n in output.num_scheduled_tokens.items():
            S = self.scheduler.requests[request_id].num_computed_tokens
            tokens, pairs, context = tokens + n, pairs + n * S - n * (n - 1) // 2, context + S + n
        flops = 2 * self.weights * tokens + 2 * self.head * len(sampled) + self.pair_flops * pairs
        moved = 2 * (self.weights + self.head) + context * self.token_bytes
        copied = sum(len(pairs) for _, pairs in self.copies.take()) if self.copies else 0
        size = copied * self.scheduler.kv_cache_manager.block_size * self.token_bytes
        self.clock += self.gpu.seconds(flops, moved) + STEP_OVERHEAD + size / self.link
        return sampled


def load_test(rate: float, num_blocks: int, policy: str = "recompute", requests: int = 200, seed: int = 0) -> dict:
    """Poisson arrivals at `rate` per second, prompts of 64–448 and outputs of 64–192 tokens; seconds by TimedCore."""
    rng = random.Random(seed)
    scheduler = build_scheduler(policy, num_blocks, 16, 640, num_cpu_blocks=4096, max_num_seqs=256)
    core, arrivals, finished, used, running = TimedCore(scheduler), {}, {}, [], []
    time_of_arrival = 0.0
    for i in range(requests):
        time_of_arrival += rng.expovariate(rate)
        prompt = [i] * rng.randint(64, 448)
        params = SamplingParams(max_tokens=rng.randint(64, 192), ignore_eos=True)
        arrivals[str(i)] = Request(str(i), prompt, params, arrival_time=time_of_arrival)
    pending = list(arrivals.values())[::-1]
    while pending or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            core.clock = max(core.clock, pending[-1].arrival_time)
        while pending and pending[-1].arrival_time <= core.clock:
            core.add_request(pending.pop())
        for output in core.step():
            if output.finish_reason:
                finished[output.request_id] = core.clock - arrivals[output.request_id].arrival_time
        used.append(1 - scheduler.kv_cache_manager.block_pool.num_free_blocks / num_blocks)
        running.append(len(scheduler.running))
    latency = sorted(finished.values())
    return {
        "p50": latency[len(latency) // 2], "p99": latency[len(latency) * 99 // 100], "preemptions": core.preemptions,
        "redone": core.redone / (core.useful + core.redone), "pool_used": statistics.fmean(used),
        "running": statistics.fmean(running), "useful_tok_s": core.useful / core.clock,
    }  # fmt: skip


LOADS = (4, 6, 7, 8, 10)  # requests per second
POOLS = {"tight": 400, "ample": 960}  # blocks of 16 tokens; beside the weights, 90 % of the card have room for 968


@functools.cache
def cliff() -> dict[str, dict[str, dict]]:
    """The load sweep for both pools, and the overloaded end of it once more with swap."""
    sweep = {name: {str(rate): load_test(rate, size) for rate in LOADS} for name, size in POOLS.items()}
    return sweep | {"swap": {str(rate): load_test(rate, POOLS["tight"], "swap") for rate in LOADS[-2:]}}


# --- 11. The second tier at work ------------------------------------------------------------------------------------


def round_robin(num_blocks: int, num_cpu_blocks: int, documents: int = 6, length: int = 256, rounds: int = 4) -> dict:
    """Questions about `documents` long texts, one after the other, round and round: what is found, and where?

    With a GPU pool that holds fewer texts than there are, LRU throws each one out just before it is asked for again.
    """
    policy = "offload" if num_cpu_blocks else "recompute"
    scheduler = build_scheduler(policy, num_blocks, 16, length + 32, num_cpu_blocks, prefix_caching=True)
    core, prompt_tokens, hits = MeteredCore(scheduler), 0, 0
    for turn in range(rounds * documents):
        document = turn % documents
        prompt = [document * length + i for i in range(length)] + [10**6 + turn]  # the text, and a new question
        request = Request(str(turn), prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        run_to_end(core, [request])
        prompt_tokens, hits = prompt_tokens + len(prompt), hits + request.num_cached_tokens
    copied = dict(core.copies.total) if core.copies else {"out": 0, "in": 0}
    return {"prompt_tokens": prompt_tokens, "hits": hits, "hit_rate": hits / prompt_tokens, "copied": copied}


# --- 12. The numbers that the text quotes, and the figures ----------------------------------------------------------

THRASH = {
    "pool_128": {"pool_blocks": 128}, "pool_64": {}, "pool_32": {"pool_blocks": 32}, "pool_16": {"pool_blocks": 16},
    "watermark_8": {"watermark_blocks": 8}, "watermark_16": {"watermark_blocks": 16},
    "caching": {"prefix_caching": True}, "swap": {"policy": "swap"},
}  # fmt: skip
PAIRS = {"opt_13b": ("OPT-13B", "A100 40GB"), "llama_2_7b": ("Llama-2-7B", "A100 80GB"),
         "llama_31_8b": ("Llama-3.1-8B", "H100 80GB"), "llama_31_70b": ("Llama-3.1-70B", "H100 80GB")}  # fmt: skip
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (16, 64, 256, 1024, 4096, 16384, 65536)


@functools.cache
def facts() -> dict[str, Any]:
    """Every deterministic number of the lesson's text and figures. No model, about a second."""
    thrash, cost, slug = {}, {}, roofline.slug
    for name, change in THRASH.items():
        trace = simulate(WIDGET_DEFAULT | change)
        thrash[name] = {key: trace[key] for key in ("preemptions", "useful", "redone", "copied_blocks", "recompute_us")}
        thrash[name] |= {"steps": len(trace["steps"]), "share": trace["redone"] / (trace["redone"] + trace["useful"])}
    for name, (model, gpu) in PAIRS.items():
        config, gpu = roofline.MODELS[model], HARDWARE[gpu]
        again = recompute_seconds(config, gpu, 1024) / 1024
        cost[name] = {
            "recompute_us": again * 1e6, "token_kib": roofline.KVCacheSpec.from_config(config).bytes_per_token() / 1024,
            "break_even_gb_s": 2 * roofline.KVCacheSpec.from_config(config).bytes_per_token() / again / 1e9,
            "swap_us": {slug(link): swap_seconds(config, rate, 1024) / 1024 * 1e6 for link, rate in LINKS.items()},
            "one_by_one_from": {slug(k): crossover(config, gpu, rate, one_by_one=True) for k, rate in LINKS.items()},
        }  # fmt: skip
    opt, a100, pcie = roofline.MODELS["OPT-13B"], HARDWARE["A100 40GB"], LINKS["PCIe 4"]
    eight, h100 = roofline.MODELS["Llama-3.1-8B"], HARDWARE["H100 80GB"]
    return {
        "needed_blocks": -(-(64 + 192 - 1) // 16), "thrash": thrash, "cost": cost, "cliff": cliff(),
        "figure_19": {
            "recompute_ms": recompute_seconds(opt, a100, 256) * 1e3,
            "one_by_one_ms": {str(b): swap_seconds(opt, pcie, 256, b, one_by_one=True) * 1e3 for b in BLOCK_SIZES},
            "kernel_ms": {str(b): swap_seconds(opt, pcie, 256, b) * 1e3 for b in BLOCK_SIZES},
        },
        "lengths_ms": {
            "recompute": [recompute_seconds(eight, h100, n) * 1e3 for n in LENGTHS],
            "one_by_one": [swap_seconds(eight, LINKS["PCIe 5"], n, one_by_one=True) * 1e3 for n in LENGTHS],
            **{link: [swap_seconds(eight, rate, n) * 1e3 for n in LENGTHS] for link, rate in LINKS.items()},
        },
        "tier": {str(blocks): round_robin(48, blocks) for blocks in (0, 32, 96)},
        "widget": {"token_ns": simulate(WIDGET_DEFAULT)["token_ns"]},
    }  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from `facts()` and `simulate` alone."""
    known, trace = facts(), simulate(WIDGET_DEFAULT)
    owners = [(step["step"], {f"r{i}": n for i, n in step["held"].items()}) for step in trace["steps"]]
    preemptions = [step["step"] for step in trace["steps"] for _ in step["preempted"]]
    title = "Who owns the 64 blocks: 16 requests of 16 blocks each, and every preemption (▾)"
    return [
        draw_owners(folder, "11_owners", owners, preemptions, WIDGET_DEFAULT["pool_blocks"], title),
        _draw_cost(folder, known), _draw_cliff(folder, known["cliff"]),
    ]  # fmt: skip


def _draw_cost(folder: str | Path, known: dict[str, Any]) -> Path:
    """Left: against block size, the paper's figure 19 recomputed. Right: against length, for three links."""
    figure, (left, right) = common.new_figure(8.0, 3.5, ncols=2)
    old = known["figure_19"]
    left.axhline(old["recompute_ms"], color=common.COLORS["blue"], linewidth=2, label="recompute")
    left.plot(BLOCK_SIZES, old["one_by_one_ms"].values(), "o-", color=common.COLORS["red"], label="swap, one by one")
    left.plot(BLOCK_SIZES, old["kernel_ms"].values(), "s-", color=common.COLORS["green"], label="swap, one kernel")
    left.set_xscale("log", base=2)
    left.set(xlabel="block size", ylabel="ms", ylim=(0, None), title="256 tokens of OPT-13B\nA100, PCIe 4")
    left.set_xticks(BLOCK_SIZES, map(str, BLOCK_SIZES))
    left.legend(fontsize=9)
    styles = {"recompute": ("blue", "-"), "one_by_one": ("red", "-"), "PCIe 4": ("green", ":"),
              "PCIe 5": ("green", "--"), "NVLink-C2C": ("green", "-")}  # fmt: skip
    for name, (color, style) in styles.items():
        label = {"recompute": "recompute", "one_by_one": "PCIe 5, one by one"}.get(name, f"{name}, one kernel")
        right.plot(LENGTHS, known["lengths_ms"][name], style, color=common.COLORS[color], linewidth=2, label=label)
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title="Llama-3.1-8B, H100\nblocks of 16")
    right.set_xticks(LENGTHS[::2], [f"{n:,}" for n in LENGTHS[::2]])
    right.set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
    right.minorticks_off()
    right.legend(fontsize=8)
    return common.save_figure(figure, folder, "11_cost")


def _draw_cliff(folder: str | Path, known: dict[str, dict]) -> Path:
    """p99 and share of redone work against load, for a pool that saturates and one that does not."""
    figure, (left, right) = common.new_figure(8.0, 3.2, ncols=2)
    looks = {"tight": ("red", "o-"), "swap": ("orange", "s--"), "ample": ("blue", "o-")}
    for name, (color, style) in looks.items():
        rates = [int(rate) for rate in known[name]]
        label = {"tight": f"{POOLS['tight']} blocks, recompute", "swap": f"{POOLS['tight']} blocks, swap"}.get(
            name, f"{POOLS['ample']:,} blocks")  # fmt: skip
        left.plot(rates, [x["p99"] for x in known[name].values()], style, color=common.COLORS[color], label=label)
        if name != "swap":
            right.plot(rates, [100 * x["pool_used"] for x in known[name].values()], style, color=common.COLORS[color],
                       label=f"pool in use, {POOLS[name]:,} blocks")  # fmt: skip
    right.bar([int(r) for r in known["tight"]], [100 * x["redone"] for x in known["tight"].values()], width=0.5,
              color=common.COLORS["light"], edgecolor=common.COLORS["grey"],
              label=f"tokens redone, {POOLS['tight']} blocks")  # fmt: skip
    left.set(xlabel="requests per second", ylabel="p99 latency, s", ylim=(0, None), title="The cliff ...")
    right.set(xlabel="requests per second", ylabel="%", ylim=(0, 100), title="... stands where the pool is full")
    left.legend(fontsize=9)
    right.legend(fontsize=8)
    return common.save_figure(figure, folder, "11_cliff")


# --- 13. Measuring here ---------------------------------------------------------------------------------------------

# schedule() + update_from_output(), decodes, caching off: recorded from vLLM 0.32 on two cores of a 2.3 GHz Xeon.
VLLM_SCHEDULER_US = {8: 137, 64: 812, 256: 3170, 1000: 13260}


def measure_swap(block_size: int, megabytes: int, seconds: float) -> dict[str, float]:
    """GB/s of copying one layer's blocks out to (on a GPU: pinned) host memory, each way of doing it."""
    shape = (2, megabytes * 2**20 // (2 * block_size * 8 * 128 * 2), block_size, 8, 128)  # an 8B model's layer, bf16
    layer = torch.zeros(shape, dtype=torch.bfloat16, device=common.device())
    host = torch.zeros(shape, dtype=torch.bfloat16, pin_memory=common.HAS_GPU)
    table = torch.stack((torch.randperm(shape[1]), torch.randperm(shape[1])), dim=1)
    pairs, on_device = table.tolist(), table.to(layer.device)
    one_by_one = common.measure(lambda: swap_blocks_one_by_one(layer, host, pairs), seconds).median
    together = common.measure(lambda: swap_blocks(layer, host, on_device), seconds).median
    return {"one_by_one_gb_s": layer.nbytes / one_by_one / 1e9, "together_gb_s": layer.nbytes / together / 1e9,
            "copy_us": one_by_one / (2 * shape[1]) * 1e6}  # fmt: skip


def measure_model(model: llama.Llama, num_tokens: int) -> dict[str, float]:
    """Seconds to compute a prompt's keys and values, and to copy them out and in again."""
    num_blocks = -(-num_tokens // 16)
    runner = OffloadingRunner(model, build_scheduler("recompute", num_blocks, 16, num_tokens), num_blocks)
    blocks = [range(1, num_blocks + 1)]
    meta = AttentionMetadata.build(blocks, [num_tokens], [num_tokens], 16, model.device)
    token_ids, attend = torch.zeros(num_tokens, dtype=torch.int64, device=model.device), runner.cache.attend(meta)
    table = torch.arange(1, num_blocks + 1, device=model.device)[:, None].expand(-1, 2).contiguous()

    def out_and_in() -> None:
        for layer, host in zip(runner.cache.layers, runner.host):
            swap_blocks(layer, host, table)
            swap_blocks(host, layer, table)

    compute = common.measure(lambda: runner.model.forward(token_ids, meta.positions, attend), 0.1).median
    return {"recompute_ms": compute * 1e3, "swap_ms": common.measure(out_and_in, 0.1).median * 1e3}


# --- 14. The story --------------------------------------------------------------------------------------------------

TEXTS = ("The capital of France is", "Water boils at a temperature of", "Once upon a time, in a village by the sea,")


def check_kernel(seed: int) -> None:
    """The copy kernel against copies one by one: shuffled blocks, odd sizes, both directions, three dtypes."""
    if not common.HAS_TRITON:
        return common.skipped("the copy kernel", common.kernel_mode().removeprefix("skipped: "))
    generator = torch.Generator().manual_seed(seed)
    for dtype in common.TOLERANCE:
        cache = torch.randn(2, 12, 16, 3, 64, generator=generator).to(common.device(), dtype)
        host = torch.zeros(2, 8, 16, 3, 64, dtype=dtype, pin_memory=common.HAS_GPU)
        expected, pairs = host.clone(), [(7, 2), (1, 5), (11, 3)]
        with common.use_kernels():
            swap_blocks(cache, host, torch.tensor(pairs, device=cache.device))
        swap_blocks_one_by_one(cache, expected, pairs)
        if common.HAS_GPU:
            torch.cuda.synchronize()
        common.check_equal(f"one kernel copies what copies one by one do, {dtype}", torch.equal(host, expected), True)


def run_policies(args: argparse.Namespace, model: llama.Llama, tokenizer: Tokenizer) -> None:
    """The same requests under every policy in a pool too small for them: same tokens, different work."""
    prompts, new, rows = [tokenizer.encode(text) for text in TEXTS], 9, []
    loader.check_context(args.model, longest := max(map(len, prompts)) + new)
    expected = {str(i): undisturbed(model, prompt, new) for i, prompt in enumerate(prompts)}
    sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    for policy, pool in (("recompute", 64), *((policy, -(-longest // 4) + 1) for policy in POLICIES)):
        core = ModelCore(build_scheduler(policy, pool, 4, longest, num_cpu_blocks=32), model, 32)
        requests = [Request(str(i), p, sampling, arrival_time=i, priority=-i) for i, p in enumerate(prompts)]
        if run_to_end(core, requests) != expected:
            raise common.CheckFailed(f"{policy} with {pool} blocks: tokens differ from an undisturbed run")
        copied = core.copies.total if core.copies else {"out": 0, "in": 0}
        rows.append([f"{policy}, {pool} blocks", core.preemptions, core.useful, core.redone, *copied.values()])
    common.say(f"✓ {len(rows)} runs of {len(prompts)} requests, preempted or not: each wrote what it writes alone")
    common.table(("policy and pool", "preempted", "useful tokens", "redone", "blocks out", "in"), rows)


def build_parser() -> common.Parser:
    parser = common.parser(__doc__)
    for flag, name, text in (
        ("--pool-blocks", "pool_blocks", "usable blocks in the pool; below 16 no request can ever fit"),
        ("--watermark", "watermark_blocks", "blocks that admission leaves free"),
        ("--requests", "requests", "requests of 64 + 192 tokens"),
    ):  # fmt: skip
        choices, default = WIDGET_CHOICES[name], WIDGET_DEFAULT[name]
        kind = common.number(int, choices[0], choices[-1])
        parser.add_argument(flag, dest=name, type=kind, default=default, help=f"{text} (default {default})")
    parser.add_argument("--policy", choices=("recompute", "swap"), default="recompute", help="what a preemption does")
    parser.add_argument("--prefix-caching", action="store_true", help="let the preempted look for their old blocks")
    commands = parser.add_subparsers(dest="command", metavar="replay")
    command = commands.add_parser("replay", help="print what the scheduler decides on recorded or own workloads")
    command.add_argument("workloads", nargs="+", metavar="WORKLOAD.json")
    command.add_argument("--out", metavar="DIR", help="write one trace per workload here, under the workload's name")
    command.add_argument("--table", action="store_true", help="print the steps for people")
    command.add_argument("--figure", dest="owners", type=common.folder, metavar="DIR", help="draw the pool's owners")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.command == "replay":
        return replay_command(args)
    machine, known = common.start(args), facts()
    model, tokenizer = loader.load(args.model)
    common.heading("1 · One kernel moves blocks between two pools")
    check_kernel(args.seed)

    name = Path(args.model or folders.DEFAULT_MODEL).name
    common.heading(f"2 · {name}: preempted, none the worse for it (blocks of 4 tokens)")
    run_policies(args, model, tokenizer)

    common.heading("3 · Too many requests for one pool")
    chosen = {name: value for name, value in vars(args).items() if name in WIDGET_DEFAULT}
    common.say(describe(simulate(WIDGET_DEFAULT | chosen)))
    rows = [[name.replace("_", " "), f"{x['steps']:,}", x["preemptions"], f"{x['redone']:,}", f"{x['share']:.0%}"]
            for name, x in known["thrash"].items()]  # fmt: skip
    common.table(("with ...", "steps", "preempted", "redone", "of all computed"), rows)

    common.heading("4 · Compute again, or copy out and in? Microseconds per token (1,024 tokens, rooflines)")
    rows = [[", ".join(PAIRS[name]), f"{x['recompute_us']:.1f}", *(f"{us:.1f}" for us in x["swap_us"].values()),
             f"{x['break_even_gb_s']:.0f} GB/s"] for name, x in known["cost"].items()]  # fmt: skip
    common.table(("model, GPU", "recompute", *LINKS, "equal at"), rows)

    common.heading(f"5 · The cliff: p99 against load ({CLIFF_MODEL}, roofline of an {CLIFF_GPU})")
    tight, ample, swap = (known["cliff"][name] for name in ("tight", "ample", "swap"))
    rows = [[rate, f"{x['pool_used']:.0%}", x["preemptions"], f"{x['redone']:.0%}", f"{x['p99']:.1f} s",
             f"{swap[rate]['p99']:.1f} s" if rate in swap else "", f"{ample[rate]['p99']:.1f} s"]
            for rate, x in tight.items()]  # fmt: skip
    columns = ("req/s", "pool in use", "preempted", "redone", "p99", "p99, swap", f"p99, {POOLS['ample']:,} blocks")
    common.table(columns, rows)

    common.heading("6 · A second tier: 6 texts of 16 blocks, asked round and round, 48 blocks on the GPU")
    for blocks, x in known["tier"].items():
        common.say(f"{int(blocks):>3} blocks on the CPU: {x['hit_rate']:>4.0%} of prompt tokens found, "
                   f"{x['copied']['out']} blocks copied out, {x['copied']['in']} in")  # fmt: skip

    common.heading("7 · Measured on this machine")
    bench = measure(args, model)
    if args.figure:
        draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": known, "bench": bench})


def measure(args: argparse.Namespace, model: llama.Llama) -> dict[str, Any]:
    """Print and return what this machine does: the scheduler's cost, copies, and copy against compute."""
    sizes, lengths, counts, steps = (16,), (128,), (8, 64), 30
    if args.bench:
        sizes, lengths, counts, steps = (1, 4, 16, 64), (128, 512, 1024), (8, 64, 256, 1000), 240
    bench: dict[str, Any] = {"scheduler_us": {str(n): scheduler_cost(n, steps) * 1e6 for n in counts}}
    for n, us in bench["scheduler_us"].items():
        common.say(f"scheduling {n:>4} decodes: {us:7.0f} µs a step; vLLM 0.32 on another machine: "
                   f"{VLLM_SCHEDULER_US[int(n)]:,} µs")  # fmt: skip
    where = "GPU to pinned host memory" if common.HAS_GPU else "host to host memory (no link here)"
    bench["swap"] = {str(b): measure_swap(b, 256 if common.HAS_GPU else 32, 1.0 if args.bench else 0.1) for b in sizes}
    for b, x in bench["swap"].items():
        common.say(f"blocks of {b:>2}, {where}: {x['one_by_one_gb_s']:.1f} GB/s one by one "
                   f"({x['copy_us']:.1f} µs each), {x['together_gb_s']:.1f} GB/s together")  # fmt: skip
    bench["model"] = {str(n): measure_model(model, n) for n in lengths if n <= model.config.max_position_embeddings}
    for n, x in bench["model"].items():
        common.say(f"{n:>4} tokens: {x['recompute_ms']:.0f} ms to compute, {x['swap_ms']:.1f} ms to copy out and in")
    return bench


if __name__ == "__main__":
    common.run(main)

"""11 · Preemption and swap: when the cache is full, who pays?

The question: a scheduler that takes blocks only when they are needed serves more requests at once, until the pool is
empty in the middle of a step. A running request must give its blocks back. Which one, and what happens to the keys and
values in them?

The mechanism:
  1. Admission is optimistic: a request comes in if what is known of it fits now. Its output has no reservation.
  2. A running request that finds no block preempts the one admitted last (priority policy: the least important).
  3. Recompute, vLLM's V1: the victim's blocks are freed, and its tokens are kept. It goes back to the front of the
     queue (with priorities, to its place), and is prefilled again, prompt and output in one go, but for what is cached.
  4. Swap, as V0 could: the victim's blocks are copied to CPU memory and copied back later. Nothing is redone.
  5. Nobody is admitted in a step that preempted, so copies out and copies in never meet in one step.
  6. A second cache on the CPU, keyed by block hash, catches whatever the GPU's prefix cache evicts: copy, not compute.
  7. A request that can never fit is refused on arrival: in the queue it would wait forever, and block all behind it.

Numbers to remember: 16 requests of 64 + 192 tokens, one every 16 steps, in a pool that holds 4 of them at full length:
20 preemptions, and 32 % of all computed tokens were computed before. Copying a token of Llama-3.1-8B out and in again
takes 5 µs over PCIe 5, computing it again on an H100 14 µs: bandwidth alone would choose swap, and vLLM removed it.

How to run:
  uv run python vllm/11_preemption.py                                the whole story
  uv run python vllm/11_preemption.py --watermark 16                 keep 16 blocks free of newcomers
  uv run python vllm/11_preemption.py --pool-blocks 12               break it: no request fits, all are refused
  uv run python vllm/11_preemption.py --bench                        a minute: scheduler cost, copies, computing

Read for this: Kwon et al. 2023 (swap and recompute, figure 19), vLLM 0.32 `v1/core/sched/scheduler.py` and
`v1/kv_offload/cpu/`, vLLM's blog on KV offloading (January 2026), V0's `core/scheduler.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used
from common import tl

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from engine import arguments
from engine.attention.torch_paged import prefill_attention
from engine.config import SchedulerConfig, VllmConfig
from engine.core.block_pool import BlockPool
from engine.core.engine_core import EngineCore
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.queues import FCFSRequestQueue, PriorityRequestQueue
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from engine.request import Request, RequestStatus, SamplingParams, check_stop
from engine.worker.assemble import make_runner
from lab import cli

KEY = "11_preemption"


# --- What we want, obviously right ----------------------------------------------------------------------------------


def undisturbed(model: llama.Llama, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request must answer however often it was preempted: greedy, alone, without any cache."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        ids = torch.tensor(tokens, device=model.device)  # [T]
        positions = torch.arange(len(tokens), device=model.device)
        hidden = model.forward(ids, positions, lambda layer, q, k, v: prefill_attention(q, k, v))  # [T, hidden]
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def swap_blocks_one_by_one(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks between two caches as V0 did: keys and values of each block by a copy (`cudaMemcpyAsync`) of its own.

    Shapes: source [2, N, block_size, Hkv, D], target [2, M, block_size, Hkv, D], pairs of (block of source, of target).
    """
    for source_block, target_block in pairs:
        for half in range(len(source)):
            target[half, target_block].copy_(source[half, source_block], non_blocking=True)


# --- The scheduler: optimism, and its price -------------------------------------------------------------------------


class Scheduler:
    """Lesson 10's scheduler, which gives a request only the blocks that a step needs. What else differs is marked 11.

    If there are none, the least important running request loses its own. As in vLLM's V1, the victim keeps its tokens
    and forgets their keys and values. Back in the queue, it computes again what the prefix cache no longer holds.
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

    def schedule(self) -> SchedulerOutput:
        """Choose who computes how much in the next step, and allocate the blocks that it will write."""
        manager = self.kv_cache_manager
        output = SchedulerOutput(finished_req_ids=self.finished_req_ids, block_tables=manager.req_to_blocks)
        self.finished_req_ids = []
        self.token_budget, self.long_prefill_cap = self.max_num_scheduled_tokens, self._long_prefill_cap()

        # 1. Whoever runs goes on, in order of admission.
        #    11: nobody has seen to its blocks. It preempts others until they are there, or until it is itself the least
        #    important. Then it waits, and the walk ends, even if others behind it could go on (in 0.33 they do).
        for request in tuple(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue  # 11: preempted a moment ago, for one in front of it
            num_new_tokens = self._num_new_tokens(request)
            if num_new_tokens == 0:
                continue
            while request.status is RequestStatus.RUNNING and manager.allocate_slots(request, num_new_tokens) is None:
                self._preempt_request(self._choose_victim(), output)
            if request.status is not RequestStatus.RUNNING:
                break
            output.scheduled_running_reqs.append(request)
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            self.token_budget -= num_new_tokens

        # 2. Then the queue, from its head, while there are seats, budget and blocks. Nobody overtakes the head.
        #    11: in a step that preempted, nobody: the victim would come back at once.
        while not output.preempted_reqs and self.waiting and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            num_new_tokens = self._admit(request)
            if num_new_tokens == 0:
                break
            self.running.append(self.waiting.pop_request())
            is_new = request.status is RequestStatus.WAITING  # 11: or it comes back
            (output.scheduled_new_reqs if is_new else output.scheduled_resumed_reqs).append(request)
            request.status = RequestStatus.RUNNING
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            self.token_budget -= num_new_tokens

        # 3. The model is about to run: what was granted counts as computed from now on.
        for request_id, num_new_tokens in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_new_tokens
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
        """n = min(behind, cap, budget), as in lesson 10; a prompt that may not be cut gets all of it or nothing."""
        num_new_tokens = min(request.num_tokens - request.num_computed_tokens, self.long_prefill_cap)
        if num_new_tokens <= self.token_budget:
            return num_new_tokens
        may_be_cut = self.config.enable_chunked_prefill or request.status is RequestStatus.RUNNING
        return self.token_budget if may_be_cut else 0

    def _choose_victim(self) -> Request:
        """11. First come, first served: the one admitted last. Priority: the least important, of those the latest."""
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival_time))
        return self.running[-1]

    def _preempt_request(self, victim: Request, output: SchedulerOutput) -> None:
        """11. Back to the queue without its blocks.

        By priority, the victim may stand in this step already. Then its tokens go back to the budget, and the blocks
        that they would have filled must leave the index: nobody will compute them. vLLM 0.32 leaves them there, and
        the victim resumes by hitting memory that was never written (vLLM issue 57580, pull request 43569).
        """
        self.running.remove(victim)
        if withdrawn := output.num_scheduled_tokens.pop(victim.request_id, 0):
            output.scheduled_running_reqs.remove(victim)
            self.token_budget += withdrawn
            self.kv_cache_manager.evict_uncomputed(victim, victim.num_computed_tokens)
        self.kv_cache_manager.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.prepend_request(victim)
        output.preempted_reqs.append(victim)

    def _admit(self, request: Request) -> int:
        """11. Take what this step needs, no more: what is computed already, and blocks for the tokens behind it.

        The test is stricter than the need: all known tokens must fit (`scheduler_reserve_full_isl`), and the watermark
        stay free if anybody runs. Nothing is set aside, so what fits now may still collide later.
        """
        manager = self.kv_cache_manager
        computed_blocks, num_computed_tokens = self._find_computed(request)
        request.num_computed_tokens = num_computed_tokens
        if num_new_tokens := self._num_new_tokens(request):
            whole = self.config.scheduler_reserve_full_isl
            num_tokens = request.num_tokens if whole else num_computed_tokens + num_new_tokens
            needed = manager.get_num_blocks_to_allocate(request, num_tokens, computed_blocks)
            watermark = self.watermark_blocks if self.running else 0
            if needed + watermark <= manager.block_pool.num_free_blocks:
                manager.allocate_slots(request, num_new_tokens, computed_blocks)
                if request.num_preemptions == 0:  # later it finds its own blocks, which were no cached prompt
                    request.num_cached_tokens = num_computed_tokens
                return num_new_tokens
        request.num_computed_tokens = 0  # a lookup that admits nobody changes nothing
        return 0

    def _find_computed(self, request: Request) -> tuple[list[int], int]:
        """Blocks of the prefix cache that a waiting request can begin with, and how many tokens need no computing."""
        return self.kv_cache_manager.get_computed_blocks(request)

    def num_slots(self, request: Request) -> int:
        """KV slots that a request fills in its life. Its last token is sampled and never computed, hence − 1."""
        return int(min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len)) - 1

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


# --- Moving blocks: one kernel for all of them ----------------------------------------------------------------------


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
    Shapes: source [2, N, block_size, Hkv, D], target [2, M, block_size, Hkv, D], of latents [1, …]; pairs int64 [P, 2].
    Raises ValueError for host memory that is not pinned.
    """
    on_gpu = target if target.is_cuda else source
    if not common.runs_kernel(on_gpu):
        for half in range(len(source)):
            target[half].index_copy_(0, pairs[:, 1], source[half].index_select(0, pairs[:, 0]))
        return
    if on_gpu.is_cuda and not all(x.is_cuda or x.is_pinned() for x in (source, target)):
        raise ValueError("swap_blocks: a GPU can only reach host memory that is pinned")
    if len(pairs) == 0:
        return
    source, target = source.view(torch.int32), target.view(torch.int32)
    width = source[0, 0].numel()
    block = min(width & -width, 1024)  # the largest power of two that divides it: no tail, so no masks
    swap_blocks_kernel[(len(pairs), len(source), width // block)](
        source, target, pairs, source.stride(0), target.stride(0), WIDTH=width, BLOCK=block, num_warps=4
    )


class BlockCopies:
    """The copies between GPU and CPU that a step has to do before the model runs, in the order of decision.

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


# --- Swap: the victim's blocks go to the CPU ------------------------------------------------------------------------


class SwapScheduler(Scheduler):
    """What V0 called swapping: on the way out, on the way in, and at the end, one more thing to do.

    V0 kept the swapped in a queue of their own, served before `waiting`; here they stand in front of `waiting`, which
    is the same. V0 stopped with an error when the CPU's pool was full; here that victim is recomputed.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, num_cpu_blocks: int) -> None:
        super().__init__(config, kv_cache_manager)
        self.cpu_pool = BlockPool(num_cpu_blocks + 1)  # its block 0 is a null block as well
        self.swapped: dict[str, tuple[list[int], int]] = {}  # request id: its blocks on the CPU, its computed tokens
        self.copies = BlockCopies()

    def _preempt_request(self, victim: Request, output: SchedulerOutput) -> None:
        computed = victim.num_computed_tokens  # without this step's, which nobody will compute
        num_blocks = -(-computed // self.kv_cache_manager.block_size)
        if 0 < num_blocks <= self.cpu_pool.num_free_blocks:
            cpu_blocks = self.cpu_pool.allocate(num_blocks)
            self.copies.add("out", zip(self.kv_cache_manager.get_block_ids(victim.request_id), cpu_blocks))
            self.swapped[victim.request_id] = cpu_blocks, computed
        super()._preempt_request(victim, output)

    def _find_computed(self, request: Request) -> tuple[list[int], int]:
        if request.request_id in self.swapped:
            return [], self.swapped[request.request_id][1]  # all it had, in new blocks
        return super()._find_computed(request)

    def _admit(self, request: Request) -> int:
        num_new_tokens = super()._admit(request)
        if num_new_tokens and request.request_id in self.swapped:
            cpu_blocks, _ = self.swapped[request.request_id]
            self.copies.add("in", zip(cpu_blocks, self.kv_cache_manager.get_block_ids(request.request_id)))
            self._forget(request)
        return num_new_tokens

    def _free_request(self, request: Request) -> None:
        self._forget(request)  # aborted while it was swapped out
        super()._free_request(request)

    def _forget(self, request: Request) -> None:
        self.cpu_pool.free(self.swapped.pop(request.request_id, ([], 0))[0])


# --- Offload: a second tier for the prefix cache --------------------------------------------------------------------


class CPUTier(BlockPool):
    """`num_blocks` of CPU memory for blocks that the GPU's prefix cache evicts, found by their hash, LRU.

    What keeps blocks by their hash and gives up the least recently used one is a block pool: we have that already. A
    block is in one tier at a time: `take` removes what goes back to the GPU, `store` brings what comes from there.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks + 1)
        self.copies = BlockCopies()

    def store(self, block_hash: bytes, gpu_block: int) -> None:
        """Keep a block that is about to be overwritten on the GPU. If the tier is full, its oldest block goes."""
        cpu_block = self.get_cached_block(block_hash)
        if cpu_block is not None:
            self.touch([cpu_block])  # known: only its age changes
        elif self.num_free_blocks == 0:
            return  # every block is on its way back to the GPU
        else:
            (cpu_block,) = self.allocate(1)
            self.cache_block(cpu_block, block_hash)
            self.copies.add("out", [(gpu_block, cpu_block)])
        self.free([cpu_block])  # nobody's, and kept until it is handed out

    def take(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The blocks of these hashes, no longer indexed; the caller frees them when their copies are noted."""
        cpu_blocks = []
        for block_hash in block_hashes:
            cpu_block = self.get_cached_block(block_hash)
            assert cpu_block is not None, "only what was found is taken"
            self.touch([cpu_block])
            self.evict(cpu_block)
            cpu_blocks.append(cpu_block)
        return cpu_blocks


class OffloadingKVCacheManager(KVCacheManager):
    """The prefix cache on two tiers. The scheduler above runs on it unchanged: to it, a hit is a hit."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, num_cpu_blocks: int) -> None:
        super().__init__(num_blocks, block_size, max_model_len)
        self.tier = CPUTier(num_cpu_blocks)
        self.copies = self.tier.copies

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """Blocks found on the GPU, and the tokens found on either tier: from the first GPU miss on, the CPU's count."""
        blocks, num_tokens = super().get_computed_blocks(request)
        if not request.sampling_params.skip_reading_prefix_cache:
            rest = request.block_hashes[len(blocks) : (request.num_tokens - 1) // self.block_size]
            found = itertools.takewhile(self.tier.cached_block_hash_to_block.__contains__, rest)
            num_tokens += self.block_size * len(list(found))
        return blocks, num_tokens

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[int] = (),
        delay_caching: bool = False,
    ) -> list[int] | None:
        """The same blocks, and notes what is copied: out of those that held something, into those that were found."""
        # What the blocks hold that are about to be handed out. The model has not run: it can still be copied.
        pool, num_tokens = self.block_pool, request.num_computed_tokens + num_new_tokens
        assert isinstance(pool, BlockPool)
        most = self.get_num_blocks_to_allocate(request, num_tokens, new_computed_blocks)
        held = {block: pool.block_hash[block] for block in itertools.islice(pool.free_queue, most)}
        new_blocks = super().allocate_slots(request, num_new_tokens, new_computed_blocks, delay_caching)
        if new_blocks is None:
            return None

        # Tokens that count as computed and had no block until now were found on the CPU: these blocks come in.
        table = self.get_block_ids(request.request_id)
        first, last = len(table) - len(new_blocks), request.num_computed_tokens // self.block_size
        cpu_blocks = self.tier.take(request.block_hashes[first:last])  # before others push them out

        # What is overwritten goes out, unless the GPU has it once more.
        for block in new_blocks:
            block_hash = held[block]
            if block_hash is not None and pool.get_cached_block(block_hash) is None:
                self.tier.store(block_hash, block)
        if cpu_blocks:
            self.copies.add("in", zip(cpu_blocks, table[first:last]))
            self.tier.free(cpu_blocks)
        return new_blocks


# --- The loop: with a meter, and with a model -----------------------------------------------------------------------


class MeteredCore(EngineCore):
    """The engine's loop without a model. It counts: which tokens of a step are new, and which were computed before?"""

    def __init__(self, scheduler: Any) -> None:  # this lesson's: it has all that the loop asks for
        super().__init__(scheduler)
        decides = scheduler if isinstance(scheduler, SwapScheduler) else scheduler.kv_cache_manager
        self.copies = getattr(decides, "copies", BlockCopies())  # those that recompute copy nothing
        self.furthest: dict[str, int] = {}  # request id: how many of its tokens have ever been computed
        self.useful = self.redone = self.preemptions = 0

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
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
        return ModelRunnerOutput(sampled)


class ModelCore(MeteredCore):
    """The metered loop with a model in it, and beside the model's cache a second one, in host memory."""

    def __init__(self, scheduler: Scheduler, model: llama.Llama, num_cpu_blocks: int = 0) -> None:
        super().__init__(scheduler)
        manager, paged = scheduler.kv_cache_manager, VllmConfig(attention_backend="paged")
        self.runner = make_runner(model, scheduler.config, manager.block_pool.num_blocks, manager.block_size, paged)
        self.layers = self.runner.cache.layers  # of each layer [2, num_blocks, block_size, Hkv, D], of latents [1, …]
        shape = (len(self.layers[0]), num_cpu_blocks + 1, *self.layers[0].shape[2:])
        self.host = [torch.zeros(shape, dtype=model.dtype, pin_memory=common.HAS_GPU) for _ in self.layers]

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Copies first: a block taken away may already belong to a request that writes it in this forward pass."""
        super().execute_model(output)
        for direction, pairs in self.copies.take():
            table = torch.tensor(pairs, dtype=torch.int64, device=self.layers[0].device).view(-1, 2)
            for layer, host in zip(self.layers, self.host):
                source, target = (layer, host) if direction == "out" else (host, layer)
                swap_blocks(source, target, table)
        return self.runner.execute_model(output)


POLICIES = ("recompute", "priority", "swap", "offload")


def build_scheduler(
    policy: str,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    num_cpu_blocks: int = 0,
    prefix_caching: bool = False,
    watermark_blocks: int = 0,
    **limits: Any,
) -> Scheduler:
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


# --- The story ------------------------------------------------------------------------------------------------------

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


def show_policies(path: str | None, model: llama.Llama, tokenizer: Tokenizer) -> None:
    """The same requests under every policy in a pool too small for them: same tokens, different work."""
    prompts, new, rows = [tokenizer.encode(text) for text in TEXTS], 9, []
    longest = max(map(len, prompts)) + new
    loader.check_context(path, longest)
    expected = {str(i): undisturbed(model, prompt, new) for i, prompt in enumerate(prompts)}
    sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    tight = -(-longest // 4) + 1  # blocks for the longest request, and one more
    for policy, pool in (("recompute", 64), *((policy, tight) for policy in POLICIES)):
        core = ModelCore(build_scheduler(policy, pool, 4, longest, num_cpu_blocks=32), model, 32)
        requests = [Request(str(i), p, sampling, arrival_time=i, priority=-i) for i, p in enumerate(prompts)]
        if run_to_end(core, requests) != expected:
            raise common.CheckFailed(f"{policy} with {pool} blocks: tokens differ from an undisturbed run")
        copied = core.copies.total.values()
        rows.append([f"{policy}, {pool} blocks", core.preemptions, core.useful, core.redone, *copied])
    common.say(f"✓ {len(rows)} runs of {len(prompts)} requests, preempted or not: each wrote what it writes alone")
    common.table(("policy and pool", "preempted", "useful tokens", "redone", "blocks out", "in"), rows)


VARIANTS = {
    "pool 128": {"pool_blocks": 128}, "pool 64": {}, "pool 32": {"pool_blocks": 32}, "pool 16": {"pool_blocks": 16},
    "watermark 8": {"watermark_blocks": 8}, "watermark 16": {"watermark_blocks": 16},
    "caching": {"prefix_caching": True}, "swap": {"policy": "swap"},
}  # fmt: skip


def serve_crowd(
    pool_blocks: int = 64, watermark_blocks: int = 0, policy: str = "recompute", prefix_caching: bool = False
) -> tuple[int, MeteredCore]:
    """Sixteen requests of 64 + 192 tokens, one every 16 steps, without a model. Each needs 16 blocks in the end.

    Returns the steps that it took, and who has counted in them. Raises InputError for a request that is refused.
    """
    core = MeteredCore(build_scheduler(policy, pool_blocks, 16, 256, 4096, prefix_caching, watermark_blocks))
    steps, params = 0, SamplingParams(max_tokens=192, ignore_eos=True)
    coming = deque(Request(str(i), [i] * 64, params, arrival_time=16 * i) for i in range(16))
    while coming or core.scheduler.has_unfinished_requests():
        if coming and coming[0].arrival_time <= steps:
            core.add_request(coming.popleft())
        core.step()
        steps += 1
    return steps, core


def show_crowd(asked: dict[str, Any]) -> None:
    """What the pool, the watermark and the policy make of the crowd; in a row of its own, what is `asked` for."""
    rows = {}
    for name, change in (VARIANTS | ({"as asked": asked} if asked else {})).items():
        try:
            steps, core = serve_crowd(**change)
        except common.InputError:
            rows[name] = ["refused", "", "", ""]
            continue
        share = core.redone / (core.useful + core.redone)
        rows[name] = [f"{steps:,}", core.preemptions, f"{core.redone:,}", f"{share:.0%}"]
    columns = ("with ...", "steps", "preempted", "redone", "of all computed")
    common.table(columns, [[name, *row] for name, row in rows.items()])
    (steps, _, redone, _), (steps_with_swap, _, left, _) = rows["pool 64"], rows["swap"]
    common.say(f"Recompute redoes {redone} tokens in {steps} steps, swap {left} in {steps_with_swap}:")
    common.say("what everybody waits for is blocks, and no policy makes more of them.")


def show_stall(pool_blocks: int) -> None:
    """A request that outgrows the pool: refused on arrival. Past that check, it would be admitted and never finish."""
    core = MeteredCore(build_scheduler("recompute", pool_blocks, 16, 256))
    request = Request("0", [0] * 64, SamplingParams(max_tokens=192, ignore_eos=True))
    try:
        core.add_request(request)
    except common.InputError as error:
        common.say(f"REFUSED on arrival: {error}")
        core.scheduler.add_request(request)  # vLLM's scheduler has no such check
    while core.step():
        pass
    common.say(
        f"Past that check it writes {request.num_output_tokens} tokens, needs one block more, and preempts itself."
    )
    scheduled = core.scheduler.schedule().num_scheduled_tokens
    common.check_equal("STALLED: it does not fit again, so no step schedules anything any more", scheduled, {})


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    help = "usable blocks in part 3's pool (default 64; below 16 no request can ever fit)"
    p.add_argument("--pool-blocks", type=arguments.number(int, 1, 4096), default=64, help=help)
    help = "blocks of it that admission leaves free (default 0)"
    p.add_argument("--watermark", type=arguments.number(int, 0, 4096), default=0, help=help)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    common.heading("1 · One kernel moves blocks between two pools")
    check_kernel(args.seed)
    common.heading("2 · The real model: preempted, and none the worse for it (blocks of 4 tokens)")
    show_policies(args.model, *loader.load(args.model))
    common.heading("3 · Sixteen requests that need 16 blocks each in the end, and a pool that has fewer")
    asked = {"pool_blocks": args.pool_blocks, "watermark_blocks": args.watermark}
    show_crowd(asked if asked != {"pool_blocks": 64, "watermark_blocks": 0} else {})
    common.heading("4 · What breaks it: a pool in which no request fits")
    show_stall(args.pool_blocks if 4 <= args.pool_blocks < 16 else 12)
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

"""The scheduler: which requests run in the next step, how many tokens of each, and in which blocks.

Owns the queue, the running list and the budget of a step. The engine core calls it before each step (`schedule`) and
after it (`update_from_output`). It never touches a tensor, a socket or a file.
vLLM: `vllm/v1/core/sched/scheduler.py`, `vllm/v1/core/sched/async_scheduler.py`.
"""

from __future__ import annotations

from common import InputError

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine import plugs
from engine.config import SchedulerConfig
from engine.core.block_pool import BlockPool
from engine.core.hybrid_kv_cache import HybridKVCacheManager
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.queues import FairRequestQueue, FCFSRequestQueue, PriorityRequestQueue
from engine.core.stats import SpecDecodingStats
from engine.kv_cache_interface import KVCacheGroup
from engine.output import EngineCoreOutput, KVConnectorOutput, SchedulerOutput
from engine.request import NO_TOKEN, NO_TOKEN_ID, Request, RequestStatus, check_stop
from engine.seams import Adapters, DraftPlan, SchedulerConnector

NO_CAP = sys.maxsize


class Scheduler:
    """Every decision of the engine, in the order in which it is made.

    There is no prefill phase and no decode phase. A request is behind by some tokens, and every step lets it catch up
    by some of them: by one where it decodes, by a chunk where it is a prompt, by one and its drafts where it
    speculates. Blocks are taken when they are needed; if there are none, the least important running request loses its
    own, keeps its tokens, and computes their keys and values again.

    Four collaborators are optional, and each adds a condition where it stands in the code:
      * `drafts`: how many tokens are guessed and verified in a step. They are tokens to catch up, for one step only.
      * `async_scheduling`: the next step is planned before the last one is heard of, so a token that is sure to come
        counts before it is known (`num_output_placeholders`), and so does a draft (`num_draft_placeholders`).
      * `connector`: keys and values may come from elsewhere, and go there.
      * `adapters`: a request may need a LoRA adapter, which needs a place in memory.
    """

    def __init__(  # noqa: PLR0913  one argument for each optional collaborator
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        *,
        connector: SchedulerConnector | None = None,
        drafts: DraftPlan | None = None,
        adapters: Adapters | None = None,
        async_scheduling: bool = False,
    ) -> None:
        self.config, self.kv_cache_manager = config, kv_cache_manager
        self.connector, self.drafts, self.adapters = connector, drafts, adapters
        self.async_scheduling = async_scheduling
        self.max_num_scheduled_tokens = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        self.max_num_scheduled_tokens = min(self.max_num_scheduled_tokens, config.max_num_batched_tokens)
        self.max_num_running_reqs = config.max_num_active_seqs or config.max_num_seqs
        self.watermark_blocks = int(config.watermark * kv_cache_manager.block_pool.num_blocks)
        # Of one request's step with drafts: who is sent for must find room for its first one. Without drafts, nothing.
        self.tokens_with_drafts = 1 + drafts.num_speculative_tokens if drafts else 0
        self.blocks_for_drafts = -(-self.tokens_with_drafts // kv_cache_manager.block_size)

        self.requests: dict[str, Request] = {}  # all that are not finished
        self.running: list[Request] = []  # in order of admission
        self.waiting: FCFSRequestQueue | PriorityRequestQueue | FairRequestQueue = FCFSRequestQueue()
        if config.policy == "priority":
            self.waiting = PriorityRequestQueue()
        if adapters and adapters.fair:
            self.waiting = FairRequestQueue()
        self.finished_req_ids: list[str] = []
        self.token_budget = 0  # what is left of the step being scheduled
        self.long_prefill_cap = NO_CAP  # the most tokens that one request gets in it

        self.spec_decoding_stats = SpecDecodingStats()
        self.waiting_for_remote_kvs: dict[str, Request] = {}  # they have blocks and no seat
        self.received: set[str] = set()  # of them: their keys and values have arrived
        self.held: dict[str, Request] = {}  # finished, and somebody still reads their blocks, or writes into them
        self.void: list[Request] = []  # to be preempted: they read blocks that others must compute again
        self.loading: dict[str, int] = {}  # request id: tokens that were here already, of those that load in this step
        self.prefilling: set[Request] = set()  # when this step began
        self.waiting_for_adapter: list[str] = []  # passed over in the last step
        self.broken: dict[str, str] = {}  # request id: why its adapter can never be used

    # --- requests come ----------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Raises InputError."""
        if self.connector:
            if request.request_id in self.held:
                raise InputError(f"request_id {request.request_id!r}: is in use")
            self.connector.on_new_request(request)
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def has_unfinished_requests(self) -> bool:
        """Must the loop go on? With a connector, others may still want something of us."""
        return bool(self.requests) or (self.connector is not None and self.connector.has_pending_work())

    @property
    def patience(self) -> float | None:
        """Seconds after which an idle loop asks again whether others want something; None: they never do."""
        return self.connector.patience if self.connector else None

    def num_slots(self, request: Request) -> int:
        """KV slots that a request fills in its life. Its last token is sampled and never computed, hence − 1; a step
        ahead, drafts that reach the end sooner than planned are followed by a step in vain, hence + 1."""
        in_vain = 1 if self.async_scheduling and self.drafts else 0
        return int(min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len)) - 1 + in_vain

    # --- before a step ----------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose requests and token counts for the next step, and allocate the blocks that it will write."""
        tables = self.kv_cache_manager.req_to_blocks
        output = SchedulerOutput(finished_req_ids=self.finished_req_ids, block_tables=tables)
        self.finished_req_ids = []
        self.token_budget = self.max_num_scheduled_tokens
        self.long_prefill_cap = self._long_prefill_cap()
        self._preempt_void(output)
        self._schedule_running(output)
        if self.adapters:
            self.adapters.collect()
            self.waiting_for_adapter = []
        # No request is admitted in a step that preempted one, however many blocks are free now.
        if not output.preempted_reqs and self._schedule_received(output):
            self._schedule_waiting(output)
        if self.async_scheduling:
            self._expect_tokens(output)
        if self.connector:
            self._order_transfers(output, self.connector)
        return output

    def _long_prefill_cap(self) -> int:
        """A request that is alone has nobody to starve, and is not capped. The adaptive form gives each request,
        running or waiting, at least its share of the budget."""
        config, num_requests = self.config, len(self.requests)
        if config.long_prefill_token_threshold == 0 or num_requests <= 1:
            return NO_CAP
        if config.long_prefill_token_threshold_adaptive:
            return max(config.long_prefill_token_threshold, config.max_num_batched_tokens // num_requests)
        return config.long_prefill_token_threshold

    # --- who runs goes on -------------------------------------------------------------------------------------------

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
                if self.adapters and self.adapters.give_blocks({r.lora_name for r in self.running}):
                    continue  # before anybody is preempted, adapters that nobody uses go
                victim = self._choose_victim()
                if self.adapters and victim is request:
                    self._end_if_it_never_fits(request, self.adapters)
                self._preempt_request(victim, output)
                if victim is request:  # the walk ends here, even if others behind it could go on (in 0.33 they do)
                    return
            output.scheduled_running_reqs.append(request)
            self._grant(request, num_new_tokens, output)

    def _num_new_tokens(self, request: Request) -> int:
        """How far a request may catch up in this step: n = min(tokens behind, cap, budget), then drafts on top.

        Without chunked prefill a prompt starts only if n is not cut by the budget (the cap still splits it). A request
        that is sure to end with the tokens on their way gets no further step; a stop token cannot be foreseen, and
        costs one.
        """
        coming = request.num_output_placeholders
        if coming and (
            request.num_output_tokens + coming >= request.max_tokens
            or request.num_tokens + coming >= self.config.max_model_len
        ):
            return 0
        num_new_tokens = min(self._behind(request), self.long_prefill_cap)
        if num_new_tokens > self.token_budget:
            may_be_cut = self.config.enable_chunked_prefill or request.status is RequestStatus.RUNNING
            num_new_tokens = self.token_budget if may_be_cut else 0
        if num_new_tokens <= 0:  # below 0 while its drafts are on their way
            return 0
        if request.spec_token_ids:
            room = min(self.token_budget, self.long_prefill_cap) - num_new_tokens  # 0 if it does not catch up
            num_new_tokens += min(len(request.spec_token_ids), room)
        return num_new_tokens

    @staticmethod
    def _behind(request: Request) -> int:
        """Tokens without keys and values, those included that are on their way from the step that runs."""
        ahead = request.num_output_placeholders + request.num_draft_placeholders
        return request.num_tokens + ahead - request.num_computed_tokens

    def _grant(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> None:
        """Enter a request into the step. Its tokens count as computed from now on: the model is about to run."""
        if self.drafts:
            if (drafted := num_new_tokens - self._behind(request)) > 0:
                output.scheduled_spec_decode_tokens[request.request_id] = request.spec_token_ids[:drafted]
            request.spec_token_ids = []  # whatever happens, they are gone after this step
        output.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        request.num_computed_tokens += num_new_tokens
        if self.adapters and isinstance(self.waiting, FairRequestQueue):
            self.waiting.charge(request.lora_name, num_new_tokens)

    def _choose_victim(self) -> Request:
        """First come, first served: the one admitted last. Priority: the least important, and of those the latest."""
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival_time))
        return self.running[-1]

    def _preempt_request(self, victim: Request, output: SchedulerOutput) -> None:
        """Back to the queue without its blocks, in front or, by priority, at its place.

        By priority, the victim may stand in this step already. Then its tokens go back to the budget, and the blocks
        that they would have filled must leave the index: nobody will compute them. vLLM 0.32 leaves them there, and
        the victim resumes by hitting memory that was never written (vLLM issue 57580, pull request 43569).
        """
        self.running.remove(victim)
        if withdrawn := output.num_scheduled_tokens.pop(victim.request_id, 0):
            output.scheduled_running_reqs.remove(victim)
            output.scheduled_spec_decode_tokens.pop(victim.request_id, None)
            self.token_budget += withdrawn
            if self.config.evict_uncomputed_blocks:
                self.kv_cache_manager.evict_uncomputed(victim, victim.num_computed_tokens - withdrawn)
        self.kv_cache_manager.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = victim.num_draft_placeholders = 0  # a sample that is on its way still counts
        victim.spec_token_ids = []
        victim.num_preemptions += 1
        self.waiting.prepend_request(victim)
        output.preempted_reqs.append(victim)

    def preempt_all(self) -> None:
        """Whoever runs begins anew in the next step: what was computed is about to go."""
        self.void += self.running

    # --- who waits is admitted --------------------------------------------------------------------------------------

    def _schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit from the head of the queue while budget, seats and blocks last.

        No request overtakes the head, but for two: one that waits for its adapter is passed over and keeps its place,
        and one whose keys and values are elsewhere leaves the queue until they are here.
        """
        passed_over: list[Request] = []
        while self.waiting and self.token_budget > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            if self.adapters and not self._adapter_is_ready(request, output, self.adapters):
                passed_over.append(self.waiting.pop_request())
                continue
            num_new_tokens = self._admit_with_adapter(request)
            if num_new_tokens is None:
                continue
            if num_new_tokens == 0:
                break
            self._seat(self.waiting.pop_request(), num_new_tokens, output)
        for request in reversed(passed_over):
            self.waiting.prepend_request(request)
        self.waiting_for_adapter = [request.request_id for request in passed_over]
        if self.adapters and passed_over and not output.num_scheduled_tokens:
            self.adapters.wait()  # nothing else to do than to wait for a file

    def _seat(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> None:
        """From now on it runs."""
        is_resumed = request.status is RequestStatus.PREEMPTED
        (output.scheduled_resumed_reqs if is_resumed else output.scheduled_new_reqs).append(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._grant(request, num_new_tokens, output)

    def _admit_with_adapter(self, request: Request) -> int | None:
        """`_admit`, once its adapter is resident; adapters that nobody uses make room for keys and values."""
        if not self.adapters:
            return self._admit(request)
        name, in_use = request.lora_name, {r.lora_name for r in self.running if r.lora_name}
        pool, size = self.kv_cache_manager.block_pool, self.kv_cache_manager.block_size
        num_new_tokens: int | None = 0
        if name is None or self.adapters.make_resident(name, in_use):
            num_new_tokens = self._admit(request)
            wanted = -(-request.num_tokens // size) + (self.blocks_for_drafts if self.connector else 0)
            while num_new_tokens == 0 and pool.num_free_blocks < wanted:
                if not self.adapters.give_blocks(in_use | {name}):
                    break
                num_new_tokens = self._admit(request)
        if num_new_tokens == 0:
            self._end_if_it_never_fits(request, self.adapters)
        return num_new_tokens

    def _end_if_it_never_fits(self, request: Request, adapters: Adapters) -> None:
        """A request with an adapter that lacks blocks although nobody else has any, but for adapters in use."""
        manager, pool = self.kv_cache_manager, self.kv_cache_manager.block_pool
        own = len(manager.req_to_blocks.get(request.request_id, ()))
        alone = pool.num_blocks - 1 - pool.num_free_blocks == own + adapters.num_blocks
        fits = own and manager.get_num_blocks_to_allocate(request, request.num_tokens) <= pool.num_free_blocks
        if request.lora_name is not None and alone and not fits:  # if it fits, it lacks them for its drafts alone
            why = f"lora_name {request.lora_name!r}: no room for it beside this prompt, ever"
            self.broken[request.request_id] = why

    def _admit(self, request: Request) -> int | None:
        """Take what this step needs, no more: the cached prefix, and blocks for the tokens behind it.

        Returns its tokens in this step; 0: it must wait; None: its keys and values are sent for, and it has left.

        The test is stricter than the need: all known tokens must fit (`scheduler_reserve_full_isl`), and the watermark
        stay free if anybody runs. Nothing is set aside, so what fits now may still collide later.
        """
        manager = self.kv_cache_manager
        computed_blocks, num_local = manager.get_computed_blocks(request)
        num_external = 0  # found elsewhere, and loaded within the step: to admission, a hit is a hit
        if self.connector:
            num_external, later = self._match_elsewhere(request, num_local, self.connector)
            if later:
                sent_for = self._send_for(request, computed_blocks, num_local, num_external, self.connector)
                return None if sent_for else 0
        request.num_computed_tokens = num_cached_tokens = num_local + num_external
        if num_new_tokens := self._num_new_tokens(request):
            num_tokens = request.num_tokens
            if not self.config.scheduler_reserve_full_isl:
                num_tokens = num_cached_tokens + num_new_tokens
            needed = manager.get_num_blocks_to_allocate(request, num_tokens, computed_blocks)
            watermark = self.watermark_blocks if self.running else 0
            fits = needed + watermark <= manager.block_pool.num_free_blocks
            if fits and manager.allocate_slots(request, num_new_tokens, computed_blocks) is not None:
                if request.num_preemptions == 0:  # later it finds its own blocks, which were no cached prompt
                    request.num_cached_tokens, request.num_external_computed_tokens = num_cached_tokens, num_external
                if self.connector and num_external:
                    blocks = manager.get_block_ids(request.request_id)
                    self.connector.update_state_after_alloc(request, blocks, num_external)
                    self.loading[request.request_id] = num_local
                return num_new_tokens
        request.num_computed_tokens = 0  # a lookup that admits nobody changes nothing
        return 0

    # --- after a step -----------------------------------------------------------------------------------------------

    def update_from_output(
        self, output: SchedulerOutput, sampled_token_ids: dict[str, list[int]]
    ) -> list[EngineCoreOutput]:
        """Append what was sampled, finish requests and free their blocks, in scheduling order.

        `sampled_token_ids` has an entry for each request that has caught up; a prompt that was computed in part
        samples nothing. Requests aborted while the model ran are passed over.
        """
        news, lost = KVConnectorOutput(), {}
        if self.connector:
            news = self.connector.get_finished()
            lost = self._lost(news)
            self.loading.clear()
            for request in lost:
                sampled_token_ids.pop(request.request_id, None)  # computed on nothing
        if self.drafts:
            self._take_back_drafts(output, sampled_token_ids)
        if self.async_scheduling:
            for request in filter(None, map(self.requests.get, sampled_token_ids)):
                request.num_output_placeholders -= 1

        outputs = self._append_sampled(output, sampled_token_ids)
        if self.connector:
            outputs += self._hear_of_transfers(outputs, news, lost, self.connector)
        return outputs + self._end_broken()

    def _append_sampled(
        self, output: SchedulerOutput, sampled_token_ids: dict[str, list[int]]
    ) -> list[EngineCoreOutput]:
        """To each request what it got; who ends leaves."""
        outputs: list[EngineCoreOutput] = []
        stopped = False
        for request_id in output.num_scheduled_tokens:
            request, token_ids = self.requests.get(request_id), sampled_token_ids.get(request_id)
            if request is None or not token_ids:
                continue
            result = EngineCoreOutput(request_id, self._append_tokens(request, token_ids))
            if request.is_finished():
                result.finish_reason, result.stop_reason = request.get_finished_reason(), request.stop_reason
                if request.num_computed_tokens == 0 and request in self.waiting:  # preempted; this token was its last
                    self.waiting.remove_request(request)
                self._free_request(request)
                stopped = True
            if self.drafts and request.sampling_params.logprobs is not None:
                outputs += one_by_one(result)
            else:
                outputs.append(result)
        if stopped:
            self.running = [request for request in self.running if not request.is_finished()]
        return outputs

    def _append_tokens(self, request: Request, token_ids: list[int]) -> list[int]:
        """Append tokens, up to one that ends the request. Returns those. NO_TOKEN_ID ends it with an error."""
        for count, token_id in enumerate(token_ids, 1):
            if token_id == NO_TOKEN_ID:
                request.status, request.stop_reason = RequestStatus.FINISHED_ERROR, NO_TOKEN
                return token_ids[: count - 1]
            request.append_output_token_id(token_id)
            if check_stop(request, self.config.max_model_len):
                token_ids = token_ids[:count]
                break
        if self.async_scheduling and self.kv_cache_manager.enable_caching:
            # All but the last are computed (of a preempted request, none), and only now are their blocks' hashes known.
            num_computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self.kv_cache_manager.cache_blocks(request, num_computed)
        return token_ids

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside: an abort, or a stop string that only the detokenizer can see. Returns those ended;
        unknown and finished ids are passed over."""
        ended = []
        for request in filter(None, map(self.requests.get, request_ids)):
            if self.waiting_for_remote_kvs.pop(request.request_id, None):
                if request.request_id not in self.received:
                    self.held[request.request_id] = request  # a load that nobody wants any more still knows its blocks
                self.received.discard(request.request_id)
            elif request.status is RequestStatus.RUNNING:
                self.running.remove(request)
                if request.request_id in self.loading:  # nobody will hear whether it comes, so nobody shall hit it
                    self.kv_cache_manager.evict_uncomputed(request, self.loading[request.request_id])
            else:
                self.waiting.remove_request(request)
            request.status = status
            self._free_request(request)
            ended.append(request)
        return ended

    def _free_request(self, request: Request) -> None:
        """All of it ends here, but blocks that somebody elsewhere still reads or writes: these stay in its table until
        `get_finished` names it."""
        manager, name = self.kv_cache_manager, request.request_id
        blocks = manager.req_to_blocks.get(name, [])
        if self.connector and self.connector.request_finished(request, blocks):
            self.held[name] = request
        if name not in self.held:
            manager.free(request)
        self.finished_req_ids.append(name)
        del self.requests[name]
        lora = request.lora_name
        if self.adapters and lora and self.adapters.is_leaving(lora) and not self.uses(lora):
            self.adapters.release(lora)

    # --- drafts, and one step ahead ---------------------------------------------------------------------------------

    def update_draft_token_ids(self, drafts: dict[str, list[int]]) -> None:
        """What the drafter wants verified in the next step."""
        for request_id, token_ids in drafts.items():
            if request := self.requests.get(request_id):
                request.spec_token_ids = token_ids

    def _expect_tokens(self, output: SchedulerOutput) -> None:
        """Count what this step will bring before it is known: a token for every request that catches up, and with
        drafts K places in the next step, filled with −1, which is no token. The plan counts on every draft, so blocks
        suffice however it turns out."""
        num_places = self.drafts.drafts_in_batch(len(output.num_scheduled_tokens)) if self.drafts else 0
        for request in map(self.requests.__getitem__, output.num_scheduled_tokens):
            if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1
            if self.drafts and request.num_output_placeholders:
                drafts = output.scheduled_spec_decode_tokens.get(request.request_id, ())
                request.num_draft_placeholders += len(drafts)
                request.spec_token_ids = [-1] * num_places

    def _take_back_drafts(self, output: SchedulerOutput, sampled_token_ids: dict[str, list[int]]) -> None:
        """Roll back what was computed for rejected drafts; not where it is lost already, with a preempted request's
        blocks."""
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            request, token_ids = self.requests.get(request_id), sampled_token_ids.get(request_id)
            if request is None or (self.async_scheduling and request.status is RequestStatus.PREEMPTED):
                continue
            if self.async_scheduling:
                request.num_draft_placeholders -= len(drafts)
            if token_ids:
                num_accepted = len(token_ids) - 1  # and one that is not a draft
                request.num_computed_tokens -= len(drafts) - num_accepted
                self.spec_decoding_stats.observe(len(drafts), num_accepted)

    # --- adapters ---------------------------------------------------------------------------------------------------

    def _adapter_is_ready(self, request: Request, output: SchedulerOutput, adapters: Adapters) -> bool:
        """Does its adapter fit into this step, and is it in CPU memory, or resident?"""
        if (name := request.lora_name) is None:
            return True
        # A step ahead, some may run of whom nothing more is to be computed: they do not count.
        members = (output.scheduled_running_reqs, output.scheduled_new_reqs, output.scheduled_resumed_reqs)
        scheduled = {r.lora_name for part in members for r in part if r.lora_name}
        if name not in scheduled and len(scheduled) == adapters.max_loras:
            return False
        try:
            if not adapters.is_loaded(name):
                return False
        except InputError as error:
            self.broken[request.request_id] = str(error)
            return False
        request.lora_fingerprint = adapters.fingerprint(name)  # before its blocks are looked up
        return True

    def _end_broken(self) -> list[EngineCoreOutput]:
        """End those whose adapter can never be used, and say why."""
        broken, self.broken = self.broken, {}
        ended = self.finish_requests(sorted(broken), RequestStatus.FINISHED_ABORTED)
        return [EngineCoreOutput(r.request_id, [], "error", broken[r.request_id]) for r in ended]

    def uses(self, name: str) -> bool:
        """Does a request that has not ended need this adapter?"""
        return any(request.lora_name == name for request in self.requests.values())

    # --- keys and values from elsewhere -----------------------------------------------------------------------------

    def _match_elsewhere(self, request: Request, num_local: int, connector: SchedulerConnector) -> tuple[int, bool]:
        """How many tokens beyond those found here are elsewhere, and whether they come later than within this step."""
        if connector.needs_hashes:
            self.kv_cache_manager.update_block_hashes(request)
        num_external, later = connector.get_num_new_matched_tokens(request, num_local)
        if request.sampling_params.skip_reading_prefix_cache:
            return 0, False
        return num_external, later

    def _send_for(
        self,
        request: Request,
        computed_blocks: list[int],
        num_local: int,
        num_external: int,
        connector: SchedulerConnector,
    ) -> bool:
        """Take blocks for the whole prompt and leave the queue, until its keys and values have come. False: not now.

        Such a request costs no step anything, and nobody waits behind it. It gets its blocks only if the prompts that
        are being computed can still have theirs, and each one's first step with drafts (vLLM's pull request 57104: two
        with blocks could wait for each other). vLLM calls this state WAITING_FOR_REMOTE_KVS.
        """
        manager = self.kv_cache_manager
        size, tables, ahead = manager.block_size, manager.req_to_blocks, self.tokens_with_drafts
        missing = manager.get_num_blocks_to_allocate(request, request.num_tokens, computed_blocks)
        # vLLM wants room for such a step even where prompt and step will never fit together, and waits for ever.
        fit = -(-request.num_tokens // size) + self.blocks_for_drafts < manager.block_pool.num_blocks
        if fit or self.running or self.waiting_for_remote_kvs:
            missing += self.blocks_for_drafts
        prefills = [r for r in self.running if r.num_computed_tokens < r.num_tokens or r in self.prefilling]
        promised = sum(
            max(0, -(-(r.num_tokens + ahead) // size) - len(tables.get(r.request_id, ())))  # none, if nothing came
            for r in (*prefills, *self.waiting_for_remote_kvs.values())
        )
        watermark = self.watermark_blocks if self.running else 0
        if missing + promised + watermark > manager.block_pool.num_free_blocks:
            return False
        request.num_computed_tokens = request.num_cached_tokens = num_local
        manager.allocate_slots(request, request.num_tokens - num_local, computed_blocks, delay_caching=True)
        request.num_computed_tokens += num_external  # a load that fails takes them back
        self.waiting.remove_request(request)
        self.waiting_for_remote_kvs[request.request_id] = request
        connector.update_state_after_alloc(request, manager.get_block_ids(request.request_id), num_external)
        return True

    def _schedule_received(self, output: SchedulerOutput) -> bool:
        """Seat who has got its keys and values. False: one of them must wait, so nobody from the queue comes before it.

        They hold blocks already. If others came first, both could wait for ever, for a seat and for blocks.
        """
        arrived, waits = [r for r in self.waiting_for_remote_kvs.values() if r.request_id in self.received], False
        if self.config.policy == "priority":
            arrived.sort(key=lambda request: (request.priority, request.arrival_time))
        for request in arrived:
            if self.token_budget == 0 or len(self.running) >= self.max_num_running_reqs:
                return False
            if request.num_computed_tokens == 0:  # nothing came: it is a prompt like any other, and the next one
                self.kv_cache_manager.free(request)
            elif self.kv_cache_manager.enable_caching:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)  # others may hit them now
            if self.adapters and not self._adapter_may_run(request, output, self.adapters):
                continue
            num_new_tokens = self._admit_received(request)
            if not num_new_tokens and (self.running or request.num_computed_tokens):
                return False
            if not num_new_tokens:  # nobody runs: it waits for blocks of those who have arrived behind it
                waits = True
                continue
            self.received.remove(request.request_id)
            del self.waiting_for_remote_kvs[request.request_id]
            self._seat(request, num_new_tokens, output)
        return not waits

    def _adapter_may_run(self, request: Request, output: SchedulerOutput, adapters: Adapters) -> bool:
        name, in_use = request.lora_name, {r.lora_name for r in self.running if r.lora_name}
        return self._adapter_is_ready(request, output, adapters) and (
            name is None or adapters.make_resident(name, in_use)
        )

    def _admit_received(self, request: Request) -> int | None:
        """Its tokens in this step; nothing: it must wait."""
        manager = self.kv_cache_manager
        if request.num_computed_tokens == 0:
            return self._admit_with_adapter(request)
        if self.running and manager.block_pool.num_free_blocks < self.watermark_blocks:
            return 0
        found = min(request.num_computed_tokens, request.num_tokens - 1)  # the last one: for its logits
        request.num_external_computed_tokens = found - request.num_cached_tokens
        request.num_computed_tokens = request.num_cached_tokens = found
        if num_new_tokens := self._num_new_tokens(request):
            manager.allocate_slots(request, num_new_tokens)  # it has the blocks: for the index
        return num_new_tokens

    def _order_transfers(self, output: SchedulerOutput, connector: SchedulerConnector) -> None:
        """Tell the worker's half what to load and save in this step."""
        # A decode without a token in this step (somebody before it evicted itself) has one left, and is no prefill.
        prefills = (*self.prefilling, *output.scheduled_new_reqs, *output.scheduled_resumed_reqs)
        running = [r for r in prefills if r.status is RequestStatus.RUNNING]
        self.prefilling = {r for r in running if r.num_computed_tokens < r.num_tokens}
        self.prefilling |= set(self.waiting_for_remote_kvs.values())
        if connector.needs_hashes:
            for request in self.running:
                self.kv_cache_manager.update_block_hashes(request)
        output.kv_connector_metadata = connector.build_connector_meta(output, output.block_tables)

    def _lost(self, news: KVConnectorOutput) -> dict[Request, tuple[int, str]]:
        """Whose load has failed: up to which position its keys and values are there, and why not further."""
        loading = [r for name, r in self.waiting_for_remote_kvs.items() if name not in self.received]
        found = {r: (0, news.failed_recving[r.request_id]) for r in loading if r.request_id in news.failed_recving}
        left, manager = set(news.invalid_block_ids), self.kv_cache_manager
        for request in (*self.running, *loading) if left else ():
            table = manager.get_block_ids(request.request_id)
            if bad := [block for block in table if block in news.invalid_block_ids]:
                found[request] = table.index(bad[0]) * manager.block_size, "a block is unreadable"
                if not left.issuperset(bad):  # somebody else computes them again, and not always in one step
                    self.void.append(request)
                left.difference_update(bad)
        return found

    def _preempt_void(self, output: SchedulerOutput) -> None:
        """Who reads blocks that another must compute again begins anew, before anybody runs."""
        void, self.void = self.void, []
        for request in void:
            if request.status is RequestStatus.RUNNING:  # not aborted meanwhile
                self._preempt_request(request, output)

    def _hear_of_transfers(
        self,
        outputs: list[EngineCoreOutput],
        news: KVConnectorOutput,
        lost: dict[Request, tuple[int, str]],
        connector: SchedulerConnector,
    ) -> list[EngineCoreOutput]:
        """Say where the blocks of prompts for others are; recompute or end what was lost; free what nobody needs any
        more. Returns the outputs of requests that end here."""
        for output in outputs:
            if output.request_id in self.held:
                output.kv_transfer_params = connector.answer_params(self.held[output.request_id])
        ended: list[EngineCoreOutput] = []
        for request in sorted(lost, key=lambda request: request.request_id):  # sets have no order of their own
            ended += self._handle_failed_load(request, *lost[request], connector)
        over = news.finished_recving | news.failed_recving.keys()
        self.received |= self.waiting_for_remote_kvs.keys() & over
        for request_id in sorted(news.finished_sending | (self.held.keys() & over)):
            self.kv_cache_manager.free(self.held.pop(request_id))
        return ended

    def _handle_failed_load(
        self, request: Request, num_tokens: int, why: str, connector: SchedulerConnector
    ) -> list[EngineCoreOutput]:
        """Compute here what is not there, in its turn, or end the request and say why."""
        if request.status is RequestStatus.RUNNING:
            self.kv_cache_manager.evict_uncomputed(request, num_tokens)
        # All outputs of a request with log probabilities have some, and an error has none.
        if connector.load_failure_policy == "recompute" or request.sampling_params.logprobs is not None:
            request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)
            request.num_cached_tokens = min(request.num_cached_tokens, num_tokens)
            return []
        self.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
        return [EngineCoreOutput(request.request_id, [], "error", f"KV load failed: {why}")]


def one_by_one(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """The front end reads the log probabilities of one token per output."""
    parts = [EngineCoreOutput(output.request_id, [token_id]) for token_id in output.new_token_ids[:-1]]
    last = output.new_token_ids[-1:]  # none, where it ended without a token
    return [*parts, EngineCoreOutput(output.request_id, last, output.finish_reason, output.stop_reason)]


def make_scheduler(  # noqa: PLR0913  one for each thing that decides about blocks
    config: SchedulerConfig,
    num_blocks: int,
    block_size: int,
    enable_prefix_caching: bool = True,
    plug: Mapping[str, Any] | None = None,
    kv_cache_groups: Sequence[KVCacheGroup] = (),
    **collaborators: Any,
) -> Scheduler:
    """A scheduler on a manager and a pool of its own; `collaborators` are its keyword arguments. Raises InputError.

    With `kv_cache_groups`, each group of layers has a table of its own, and windows give blocks back.
    """
    plug = plug or {}
    make_pool = functools.partial(plugs.part, "block_pool", plug, BlockPool)
    limits = config.max_model_len, enable_prefix_caching
    manager: Any  # either has the other's verbs
    if kv_cache_groups:
        in_flight = config.max_num_batched_tokens * (1 + bool(collaborators.get("async_scheduling")))
        manager = HybridKVCacheManager(num_blocks, kv_cache_groups, *limits, in_flight, make_pool)
    else:
        manager = KVCacheManager(num_blocks, block_size, *limits, make_pool)
    there = {name: one for name, one in collaborators.items() if one is not None and one is not False}
    return plugs.part("scheduler", plug, Scheduler, config, manager, **there)

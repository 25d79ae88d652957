"""10 · Chunked prefill: one token budget for every step.

The question: somebody sends a prompt of 10,000 tokens. Why does everybody else's answer freeze, and what does it cost
to prevent that?

The mechanism:
  1. A step has a budget of tokens (`max_num_batched_tokens`), and takes about as long as it has tokens.
  2. Running requests come first, in order of admission: a decode takes 1 token of the budget.
  3. A prompt takes what is left. If it is longer than that, it is cut: it now runs, and takes more in the next step.
  4. So no step is longer than the budget allows, whatever arrives: the streams slow down instead of stopping.
  5. One kernel attends for all. Each sequence has any number of queries in a step; they are the last of its context.
  6. A chunk inside a prompt yields no token: its last logits predict the prompt's own next token, which is known.
  7. `long_prefill_token_threshold` caps what one prompt gets of a step, so that a short prompt can pass a long one.

Numbers to remember: in bf16, the intensity of a step's matrix products is its number of tokens (FLOP/byte). An H100
needs 295 of them to be busy, a batch of 32 decodes brings 32: 263 prompt tokens per step ride almost free.

How to run:
  uv run python vllm/10_chunked_prefill.py                  the whole story
  uv run python vllm/10_chunked_prefill.py --budget 64      smaller chunks: smoother for others, later for the newcomer
  uv run python vllm/10_chunked_prefill.py --budget 16      break it: 16 decodes use all of it, and the prompt starves
  uv run python vllm/10_chunked_prefill.py --bench          minutes: budgets from 16 to 1,504, timed on the real model

Read for this: Agrawal et al. 2023 (Sarathi) and 2024 (Sarathi-Serve), Holmes et al. 2024 (DeepSpeed-FastGen),
vLLM 0.32 `v1/core/sched/scheduler.py` and `v1/attention/ops/triton_unified_attention.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used
from common import tl, triton

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine import arguments, registry
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_paged import FEW_TOKENS, attend_with_sinks, plan_few, prefill_attention
from engine.config import SchedulerConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.queues import FCFSRequestQueue, PriorityRequestQueue
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.output import EngineCoreOutput, SchedulerOutput
from engine.request import Request, RequestStatus, SamplingParams, check_stop
from engine.worker.assemble import make_runner
from lab import cli

KEY = "10_chunked_prefill"


# --- The references -------------------------------------------------------------------------------------------------


def mixed_attention_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each sequence by itself: gather its whole context, score all of its queries, mask, softmax; in fp64.

    Shapes: q [T, Hq, D], kv_cache [2, num_blocks, block_size, Hkv, D], block_table [B, W], query_start_loc [B + 1],
    seq_lens [B] -> [T, Hq, D]. Sequence b's queries q[query_start_loc[b] : query_start_loc[b + 1]] are the last of its
    seq_lens[b] tokens: the chunk of a prompt, or the one token of a decode. With a `window`, a query sees so many keys,
    its own among them; `sinks` [Hq] are scores that take their part of the softmax, and have no value.
    """
    T, Hq, D = q.shape
    block_size, Hkv = kv_cache.shape[2:4]
    out = torch.empty(T, Hq, D, dtype=torch.float64)
    for b, S in enumerate(seq_lens.tolist()):
        first, last = query_start_loc[b : b + 2].tolist()
        places = [int(block_table[b, p // block_size]) * block_size + p % block_size for p in range(S)]
        k, v = kv_cache.flatten(1, 2)[:, places].double().cpu().repeat_interleave(Hq // Hkv, dim=2)  # [S, Hq, D]
        scores = torch.einsum("thd,shd->hts", q[first:last].double().cpu(), k) / math.sqrt(D)
        position = torch.arange(S - (last - first), S)[:, None]
        key = torch.arange(S)
        scores = scores.masked_fill((key > position) | (key <= position - (window or S)), -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().cpu()[:, None, None].expand(-1, last - first, 1)), -1)
        out[first:last] = torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :S], v)
    return out


def next_tokens(model: llama.Llama, tokens: Sequence[int]) -> list[int]:
    """The token that the model puts behind each position: no chunks, no cache, the whole text at once."""
    ids = torch.tensor(tokens, device=model.device)  # [T]
    positions = torch.arange(len(tokens), device=model.device)
    hidden = model.forward(ids, positions, lambda layer, q, k, v: prefill_attention(q, k, v))  # [T, hidden]
    return model.logits(hidden).argmax(-1).tolist()


# --- The scheduler --------------------------------------------------------------------------------------------------


class Scheduler:
    """Lesson 04's scheduler, without static batching, for prompts that can be cut. What differs is marked "10:".

    There is no prefill phase and no decode phase. A request is behind by num_tokens − num_computed_tokens, and a step
    lets it catch up: in lesson 04 all the way, here by as many tokens as the step has room for.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config, self.kv_cache_manager = config, kv_cache_manager
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.running: list[Request] = []  # in order of admission
        self.waiting = PriorityRequestQueue() if config.policy == "priority" else FCFSRequestQueue()
        self.finished_req_ids: list[str] = []  # since the last step: the model runner has still to forget them
        # 10: a budget that may be smaller than the buffers, and even smaller than the number of requests.
        most = config.max_num_batched_tokens
        self.max_num_scheduled_tokens = min(config.max_num_scheduled_tokens or most, most)

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Choose who computes how much in the next step, and allocate the blocks that it will write."""
        manager, token_budget, cap = self.kv_cache_manager, self.max_num_scheduled_tokens, self._long_prefill_cap()
        output = SchedulerOutput(finished_req_ids=self.finished_req_ids, block_tables=manager.req_to_blocks)
        self.finished_req_ids = []

        # 1. Running requests go on, in order of admission. Their blocks are sure: admission has counted them.
        #    10: no longer by one token each. A prompt that was cut is among them, and takes min(behind, cap, budget)
        #    tokens. A request that comes after the budget's last token gets nothing in this step.
        for request in self.running:
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, cap, token_budget)
            if num_new_tokens == 0:
                continue
            manager.allocate_slots(request, num_new_tokens)
            output.scheduled_running_reqs.append(request)
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens

        # 2. Then the queue, from its head, while there are seats, budget and blocks. Nobody overtakes the head.
        #    10: a prompt that is longer than what is left of the budget waits in lesson 04. Here it takes the rest.
        while self.waiting and token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek_request()
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, cap)  # 10: the cap
            if num_new_tokens > token_budget:
                if not self.config.enable_chunked_prefill:
                    break
                num_new_tokens = token_budget  # 10: cut
            if not self._fits(request):
                break
            manager.allocate_slots(request, num_new_tokens)
            self.running.append(self.waiting.pop_request())
            request.status = RequestStatus.RUNNING
            output.scheduled_new_reqs.append(request)
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens

        # 3. The model is about to run: what was granted counts as computed from now on.
        for request_id, num_new_tokens in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_new_tokens
        return output

    def _long_prefill_cap(self) -> int:
        """10: the most tokens that one request may get in this step.

        A request that is alone is in nobody's way, and is not capped. The adaptive form gives each request, running or
        waiting, at least its share of the budget.
        """
        config, num_requests = self.config, len(self.requests)
        if config.long_prefill_token_threshold == 0 or num_requests <= 1:
            return config.max_model_len
        if config.long_prefill_token_threshold_adaptive:
            return max(config.long_prefill_token_threshold, config.max_num_batched_tokens // num_requests)
        return config.long_prefill_token_threshold

    def num_slots(self, request: Request) -> int:
        """KV slots that a request fills in its life. Its last token is sampled and never computed, hence − 1."""
        return int(min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len)) - 1

    def _fits(self, request: Request) -> bool:
        """Are there enough blocks if all running requests, and this one, go on to their last token?"""
        manager = self.kv_cache_manager
        missing = sum(manager.get_num_blocks_to_allocate(r, self.num_slots(r)) for r in (*self.running, request))
        return missing <= manager.block_pool.num_free_blocks

    def update_from_output(
        self, output: SchedulerOutput, sampled_token_ids: dict[str, list[int]]
    ) -> list[EngineCoreOutput]:
        """Append what was sampled, in scheduling order. A request that is done leaves, and frees its seat and blocks.

        `sampled_token_ids` has one new token of each request that has caught up.
        """
        outputs = []
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request_id not in sampled_token_ids:
                continue  # aborted while the model ran; or, 10: its chunk ended inside the prompt
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


# --- The kernel: queries of any length against block tables ---------------------------------------------------------
#
# Rows. Query t of a sequence and the G = Hq / Hkv query heads that share a KV head are G rows of one tile, so a tile of
# BLOCK_M rows holds BLOCK_Q = ⌊BLOCK_M / G⌋ query positions, and each key it loads serves all of them:
#
#     row r   ->   query first + ⌊r / G⌋,   head kv_head · G + r mod G
#
# Which tile belongs to whom. Query lengths are known to the GPU only, so the grid may not depend on them. Sequence b
# needs ⌈n_b / BLOCK_Q⌉ tiles. Give it the numbers from ⌊query_start_loc[b] / BLOCK_Q⌋ + b on: that is always enough,
# ⌊T / BLOCK_Q⌋ + B numbers in all, and a program finds its sequence by binary search. Numbers too many return at once.
#
# Causality with an offset. Query t stands at position S − n + t and sees the keys up to there: all that earlier chunks
# left in the cache, and its own chunk's up to itself. With context = S − n, the mask is  j ≤ context + t.
#
# The recurrence is lesson 03's online softmax, in powers of two: 2^(x·log2 e) = e^x.


@triton.jit
def find_sequence(query_start_loc, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence b whose first tile, query_start_loc[b] // BLOCK_Q + b, is not behind `tile`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle).to(tl.int32) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@common.kernel
def unified_attention_kernel(q, kv_cache, block_table, query_start_loc, seq_lens, sinks, out, scale,
                             num_seqs: tl.int32, stride_q, stride_kv, table_width: tl.int32,
                             G: tl.constexpr, Hkv: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                             BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
                             WINDOW: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # from the back, where prompts stand: the longest work first
    b = find_sequence(query_start_loc, tile, num_seqs, BLOCK_Q)
    start = tl.load(query_start_loc + b).to(tl.int32)
    query_len = tl.load(query_start_loc + b + 1).to(tl.int32) - start
    first = (tile - start // BLOCK_Q - b) * BLOCK_Q  # the tile's first query, counted within its sequence
    if first >= query_len:
        return
    S = tl.load(seq_lens + b)
    context = S - query_len  # tokens computed in earlier steps

    r, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    t, head = first + r // G, kv_head * G + r % G
    inside = ((r < BLOCK_Q * G) & (t < query_len))[:, None] & (d < D)[None, :]
    row = (start + t).to(tl.int64)[:, None]
    q_tile = tl.load(q + row * stride_q + head[:, None] * D + d[None, :], mask=inside, other=0.0)  # [BLOCK_M, D]
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS:  # a score of each head that is there before any key, and has no value
        l = tl.full([BLOCK_M], 1.0, tl.float32)
        m = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634  # log2 e

    position = context + t
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, context + first - WINDOW + 1)  # the first key that the first query sees
    end = tl.minimum(S, context + first + BLOCK_Q)  # causality: no query in this tile sees a key from there on
    for n in range(begin, end, TILE):
        p = n + tl.arange(0, TILE)  # positions of the keys
        live = p < end
        block = tl.load(block_table + b * table_width + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        place = ((block * BLOCK_SIZE + p % BLOCK_SIZE) * Hkv + kv_head) * D  # int64: more than 2^31 elements
        key = kv_cache + place[:, None] + d[None, :]  # [TILE, D]

        k = tl.load(key, mask=(d < D)[None, :], other=0.0)
        if UPCAST:  # Triton's interpreter multiplies 16-bit floats wrongly; a GPU wants them as they are
            k = k.to(tl.float32)
        s = tl.dot(q_tile, k.T, input_precision="ieee") * scale  # [BLOCK_M, TILE]
        s = tl.where(p[None, :] <= position[:, None], s, float("-inf"))
        if WINDOW:
            s = tl.where(p[None, :] > position[:, None] - WINDOW, s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        origin = m_new
        if WINDOW:  # a later query's may begin behind this tile: 2^(−∞ − −∞) would not be a number
            origin = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.math.exp2(m - origin)
        w = tl.math.exp2(s - origin[:, None])
        l = l * alpha + tl.sum(w, 1)
        # Positions from `end` on read the null block, whatever it holds: 0 · NaN is NaN, so a weight of 0 is no mask.
        v = tl.load(key + stride_kv, mask=live[:, None] & (d < D)[None, :], other=0.0)
        if UPCAST:
            v = v.to(tl.float32)
        acc = tl.dot(w.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")  # [BLOCK_M, D]
        m = m_new

    o = acc / l[:, None]  # every query sees at least its own key, so ℓ > 0
    tl.store(out + (row * Hkv * G + head[:, None]) * D + d[None, :], o.to(out.dtype.element_ty), mask=inside)


def unified_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a mixed batch through block tables: prompts' chunks and decodes in one launch.

    Semantics: out[t, h] = softmax_j(q[t, h]·k_j / √D) v_j over the keys j ≤ position of t in its own sequence b, where
    position = seq_lens[b] − query_start_loc[b + 1] + t, and k_j is found through block_table[b, j // block_size].
    Shapes: q [T, Hq, D] (token stride free), kv_cache [2, num_blocks, block_size, Hkv, D], block_table int32 [B, W],
    query_start_loc [B + 1], seq_lens int32 [B] -> [T, Hq, D]. A sequence may have no query in this step. The step's own
    keys and values are in the cache already. `max_query_len` only chooses the tile. A `window` hides the keys
    j ≤ position − window; `sinks` [Hq] adds Σ' = exp(sinks[h]) to the denominator of every softmax of head h.
    vLLM 0.32: v1/attention/ops/triton_unified_attention.py (its 2D kernel), whose numbering of tiles this is.
    """
    if not common.runs_kernel(q):
        plan = plan_torch(block_table, query_start_loc.diff().tolist(), seq_lens, kv_cache, q.shape[1], window)
        return run_torch(plan, q, kv_cache, sinks)
    T, Hq, D = q.shape
    B, (block_size, Hkv) = len(seq_lens), kv_cache.shape[2:4]
    out = torch.empty(T, Hq, D, dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    G = Hq // Hkv
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda and not torch.version.hip else None
    block_m, tile, num_warps, num_stages = choose_tiles(q.dtype, D, G, max_query_len, capability)
    block_q, scale = block_m // G, math.log2(math.e) / math.sqrt(D)
    tensors = q, kv_cache, block_table, query_start_loc, seq_lens, q if sinks is None else sinks, out
    strides, masks = (q.stride(0), kv_cache.stride(0)), {"WINDOW": window or 0, "SINKS": sinks is not None}
    sizes = {"G": G, "Hkv": Hkv, "D": D, "BLOCK_SIZE": block_size, "D_PAD": max(16, triton.next_power_of_2(D))}
    tiles = {"BLOCK_M": block_m, "BLOCK_Q": block_q, "TILE": tile, "num_warps": num_warps, "num_stages": num_stages}
    unified_attention_kernel[(Hkv, T // block_q + B)](
        *tensors, scale, B, *strides, block_table.stride(0), **sizes, **tiles, **masks, UPCAST=common.INTERPRET
    )
    return out


def choose_tiles(
    dtype: torch.dtype, D: int, G: int, max_query_len: int, capability: tuple[int, int] | None = None
) -> tuple[int, int, int, int]:
    """(rows, keys per tile, warps, stages): as many rows as the longest query fills, within the registers.

    Tall tiles read the keys fewer times, but where everybody decodes they would be padding. Chosen by compiling: these
    spill on no GPU that the tests compile for; Hopper, capability (9, 0), has room for larger ones.
    """
    least = max(16, triton.next_power_of_2(G))  # a tile holds the group's heads at least once
    rows = max(least, triton.next_power_of_2(G * max_query_len))
    if dtype == torch.float32:  # no tensor cores for exact fp32
        if least > (32 if D <= 64 else 16):
            return least, 16, 8, 1
        return (min(rows, 32), 32, 8 if rows > 16 else 4, 2) if D <= 64 else (16, 32, 4, 1)
    if rows == 16:  # hardly more than a decode each: lesson 02's tiles
        if D > 128:
            return 16, 32, 8, 5 if capability else 3
        return 16, 128 if capability and D > 64 else 64, 4, 3
    most, tile = (128, 64) if D <= 64 or capability == (9, 0) else (64, 32)
    if capability == (9, 0) and 64 < D <= 128 and max_query_len < 1024:
        most = 64  # a decode beside a chunk fills a tile of its own: on an H200 a shorter one gains more than it loses
    rows = max(least, min(rows, most))
    # The table's load takes its share of the stages (lesson 02). On Blackwell 5 spill.
    return rows, tile, 8 if rows >= 128 else 4, 5 if capability and capability < (10, 0) and D <= 128 else 2


# --- The same on a CPU ----------------------------------------------------------------------------------------------


def plan_torch(
    block_table: torch.Tensor,
    query_lens: Sequence[int],
    seq_lens: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    window: int | None = None,
) -> list[tuple[Any, Callable]]:
    """What a step has to do in each layer, worked out once: (rows of q, what to call with them and the layer's cache).

    Decodes, and others with few tokens, go together, in place: there are many. Prompts go one by one, each over a copy
    of all of its context: the budget keeps them few. Arguments as in `unified_attention`; any layer's `kv_cache`.
    """
    num_blocks, block_size = kv_cache.shape[1:3]
    plan: list[tuple[Any, Callable]] = [*plan_few(block_table, query_lens, seq_lens, kv_cache, num_heads, window)]
    last = 0
    for b, n in enumerate(query_lens):
        last += n
        if n > FEW_TOKENS:
            S = int(seq_lens[b])
            gone = max(0, S - n - window + 1) // block_size if window else 0  # blocks in front of every window
            blocks = block_table[b, gone : -(-S // block_size)].long()
            S -= gone * block_size
            bias = None  # a prompt's first chunk is plainly causal; a later one also sees all that came before it
            if n < S or (window and window < n):
                hidden = torch.full((n, S), -math.inf, device=kv_cache.device)
                bias = hidden.triu(S - n + 1).to(kv_cache.dtype)
                if window:
                    bias += hidden.tril(S - n - window).to(kv_cache.dtype)
            attend = functools.partial(attend_to_copy, pages=torch.cat((blocks, blocks + num_blocks)), S=S, bias=bias)
            plan.append((slice(last - n, last), attend))
    return plan


def attend_to_copy(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    pages: torch.Tensor,
    S: int,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The chunk of one prompt, q [n, Hq, D], with PyTorch's fused attention: bias [n, S] is added to the scores."""
    (Hq, D), Hkv = q.shape[1:], kv_cache.shape[3]
    copy = kv_cache.flatten(0, 1).index_select(0, pages)  # blocks of keys, then of values
    k, v = copy.view(2, -1, Hkv, 1, D)[:, :S].permute(0, 2, 3, 1, 4).expand(-1, -1, Hq // Hkv, -1, -1)
    # [Hkv, G, S, D]: a KV head is a batch entry with G heads, whose keys have stride 0. Nothing is repeated.
    queries = q.view(-1, Hkv, Hq // Hkv, D).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    if sinks is None:
        o = F.scaled_dot_product_attention(queries, k, v, bias, is_causal=bias is None)
    else:
        bias = torch.full((len(q), S), -math.inf, device=q.device).triu(1) if bias is None else bias
        o = attend_with_sinks(queries, k, v, bias, sinks.view(Hkv, -1, 1, 1))
    return o.permute(2, 0, 1, 3).reshape(-1, Hq, D)


def run_torch(
    plan: Sequence[tuple[Any, Callable]], q: torch.Tensor, kv_cache: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """What `unified_attention` computes, by `plan_torch`'s plan. Shapes as there."""
    if len(plan) == 1:
        return plan[0][1](q, kv_cache, sinks=sinks)
    out = torch.empty_like(q)
    for rows, attend in plan:
        out[rows] = attend(q[rows], kv_cache, sinks=sinks)
    return out


# --- Into the engine ------------------------------------------------------------------------------------------------


class UnifiedAttention:
    """This lesson in an engine's seam (`AttentionBackend`): a step may hold any mixture of chunks and decodes."""

    def __init__(self) -> None:
        """The paged cache, writing into it, and the kernel for a step of decodes alone are lesson 02's."""
        self.reshape_and_cache, self.paged_decode = registry.fill("cache.write"), registry.fill("decode.paged")

    def make_cache(self, model: llama.Llama, num_blocks: int, block_size: int) -> Any:
        """For each layer a tensor [2, num_blocks, block_size, Hkv, D]: keys, then values."""
        return registry.fill("cache.paged")(model, num_blocks, block_size)

    def plan(self, meta: AttentionMetadata, cache: Any) -> llama.Attend:
        """K and V [T, Hkv, D] into the cache first, then one call for prompts, chunks and decodes."""
        table, loc, seq_lens, longest = meta.block_table, meta.query_start_loc, meta.seq_lens, max(meta.query_lens)
        plan = None  # on a GPU there is nothing to plan
        if not common.runs_kernel(cache.layers[0]):
            plan = plan_torch(table, meta.query_lens, seq_lens, cache.layers[0], cache.num_heads)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv_cache = cache.layers[layer]
            self.reshape_and_cache(k, v, kv_cache, meta.slot_mapping)  # so a chunk reads its own keys there, too
            if plan is not None:
                return run_torch(plan, q, kv_cache)
            if longest == 1:  # everybody decodes: lesson 02's kernel can spread a long context over the GPU
                return self.paged_decode(q, kv_cache, table, seq_lens, meta.max_seq_len)
            return unified_attention(q, kv_cache, table, loc, seq_lens, longest)

        return attend


# --- The engine's loop, on the model and on a clock -----------------------------------------------------------------


def make_scheduler(prompts: Sequence[Sequence[int]], budget: int, max_tokens: int, threshold: int = 0) -> Scheduler:
    """With room for all of them, and `budget` tokens in a step, even fewer than there are prompts."""
    longest = max(map(len, prompts)) + max_tokens
    config = SchedulerConfig(
        max_model_len=longest,
        max_num_seqs=len(prompts),
        # vLLM refuses less, so that nobody starves; the next knob is the way around that rule.
        max_num_batched_tokens=max(budget, len(prompts)),
        max_num_scheduled_tokens=budget,
        long_prefill_token_threshold=threshold,
    )
    num_blocks = 1 + len(prompts) * -(-longest // 16)
    return Scheduler(config, KVCacheManager(num_blocks, 16, longest, enable_caching=False))


def serve(model: llama.Llama, prompts: Sequence[Sequence[int]], budget: int, max_tokens: int) -> list[list[int]]:
    """Everybody's greedy tokens on the model. It is the engine's loop: schedule, run, update, until all is done."""
    scheduler = make_scheduler(prompts, budget, max_tokens)
    runner = make_runner(model, scheduler.config, scheduler.kv_cache_manager.block_pool.num_blocks, 16)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    requests = [Request(str(i), list(prompt), params) for i, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        scheduler.update_from_output(output, runner.execute_model(output).sampled_token_ids)
    return [request.output_token_ids for request in requests]


def freeze(budget: int, threshold: int = 0, streams: int = 16, prompt: int = 4096) -> tuple[list[int], float, float]:
    """No model, but a clock: a step takes 10 ms and 50 µs for each token. A prompt arrives among endless streams.

    Returns its tokens in each step, its time to first token, and the longest time between two tokens of a stream from
    the arrival on, in ms. A prompt that gets nothing in one step never will, for the streams never end: inf.
    """
    scheduler, now = make_scheduler([[0]] * streams + [[0] * prompt], budget, 4096, threshold), 0.0
    times: dict[str, list[float]] = {}  # when the tokens of each request came

    def step() -> dict[str, int]:
        """How many tokens each request computed."""
        nonlocal now
        output = scheduler.schedule()
        now += 10 + 0.05 * output.total_num_scheduled_tokens
        caught_up = [r for r in scheduler.running if r.num_computed_tokens == r.num_tokens]
        for written in scheduler.update_from_output(output, {r.request_id: [0] for r in caught_up}):
            times.setdefault(written.request_id, []).append(now)
        return output.num_scheduled_tokens

    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    for i in range(streams):
        scheduler.add_request(Request(str(i), [0], endless))
    for _ in range(3):  # the streams alone
        step()
    arrival, chunks = now, []
    scheduler.add_request(Request("newcomer", [0] * prompt, endless))
    while "newcomer" not in times and 0 not in chunks:
        chunks.append(step().get("newcomer", 0))
    ttft = times.pop("newcomer", [math.inf])[0] - arrival
    silences = [b - a for stream in times.values() for a, b in itertools.pairwise(stream) if b > arrival]
    return chunks, ttft, max(silences)


# --- The story ------------------------------------------------------------------------------------------------------

QUESTION = "Which is the largest planet of the solar system? Answer with its name alone."
OTHERS = ["Once upon a time, in a small village by the sea,", "The three laws of motion say that"]


def random_batch(work: Sequence[tuple[int, int]], Hq: int, Hkv: int, D: int, dtype: torch.dtype) -> tuple:
    """Arguments of `unified_attention` for sequences of these (new tokens, context), on shuffled blocks of 16."""
    need = [-(-S // 16) for _, S in work]
    ids = (torch.randperm(sum(need)) + 1).tolist()
    blocks = [[ids.pop() for _ in range(n)] for n in need]
    meta = AttentionMetadata.build(blocks, [S for _, S in work], [n for n, _ in work], 16)
    kv_cache = torch.randn(2, sum(need) + 1, 16, Hkv, D, dtype=dtype, device=common.device())
    kv_cache[:, 0] = 0  # the null block
    q = torch.randn(len(meta.positions), Hq, D, dtype=dtype, device=common.device())
    return q, kv_cache, meta.block_table, meta.query_start_loc, meta.seq_lens, max(meta.query_lens)


def check_kernel() -> None:
    """Both paths of `unified_attention` against the reference: a mixed batch at SmolLM2's heads."""
    batch = random_batch([(1, 33), (1, 17), (19, 19), (11, 50)], 9, 3, 64, torch.float32)
    reference = mixed_attention_reference(*batch[:-1]).to(common.device())
    common.say("Two decodes, a prompt's first 19 tokens, and tokens 40–50 of another, in one call:")
    if not common.HAS_GPU:
        common.check("torch path", unified_attention(*batch), reference)
    if not common.HAS_TRITON:
        common.skipped("the Triton kernel", common.kernel_mode())
        return
    with common.use_kernels():
        common.check(f"Triton kernel ({common.kernel_mode()})", unified_attention(*batch), reference)


def show_chunks(model: llama.Llama, tokenizer: Tokenizer) -> None:
    """Chunked equals whole on the real model, and what a chunk's last position would have said."""
    prompt = tokenizer.ask(QUESTION)
    prompts = [*map(tokenizer.encode, OTHERS), prompt]
    whole, *cut = (serve(model, prompts, budget, 12) for budget in (512, 16, 5))
    said = next_tokens(model, prompt + whole[-1][:-1])
    what = f"a prompt of {len(prompt)} tokens, whole, beside two answers: what the model says without a cache"
    common.check_equal(what, whole[-1], said[len(prompt) - 1 :])
    common.check_equal("with budgets of 16 tokens and of 5: the same 12 tokens for everybody", cut, [whole] * 2)
    common.say("What the last position of a chunk of 16 predicts, and what it is worth:")
    for end in (*range(16, len(prompt), 16), len(prompt)):
        guess, known = (tokenizer.decode([token], False) for token in (said[end - 1], (prompt + whole[-1])[end]))
        worth = f"known already: {known!r}" if end < len(prompt) else "the answer's first token"
        common.say(f"  after {end:>3} of {len(prompt)} tokens: {guess!r:<14} {worth}")


def show_freeze(budget: int, threshold: int) -> None:
    """The surprise: a smaller budget ends the freeze for little, then costs much for nothing, and then everything."""
    rows, ttft, silence = [], {}, {}
    for tokens in sorted({4112, 2048, 512, 64, 24, budget}, reverse=True):
        chunks, ttft[tokens], silence[tokens] = freeze(tokens, threshold)
        shown = " ".join(map(str, chunks[:4])) + (" …" if len(chunks) > 4 else "")
        first = "never" if ttft[tokens] == math.inf else f"{ttft[tokens]:,.0f} ms"
        rows.append([f"{tokens:,}", shown, len(chunks), first, f"{silence[tokens]:,.0f} ms"])
    common.table(["budget", "chunks", "steps", "TTFT of the prompt", "longest silence of the streams"], rows)
    if ttft[budget] == math.inf:
        common.say(f"STARVED: the streams use all {budget} tokens of every step. The prompt will never start.")
        return
    shorter, longer = silence[4112] / silence[512], ttft[512] / ttft[4112]
    common.say(
        f"A budget of 512 makes the silence {shorter:.1f} times shorter, and the TTFT {longer:.1f} times longer."
    )
    common.say(f"From 64 to 24 the TTFT grows {ttft[24] / ttft[64]:.1f} times, and the silence is hardly shorter.")


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    help = "tokens per step in part 3 (default %(default)s; with 16 or fewer, the prompt starves)"
    p.add_argument("--budget", type=arguments.number(int, 1, 8192), default=256, help=help)
    help = "part 3's long_prefill_token_threshold (default 0: off)"
    p.add_argument("--threshold", type=arguments.number(int, 0, 4096), default=0, help=help)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    loader.check_context(args.model, 128)

    common.heading("1 · One call for prompts, chunks and decodes")
    check_kernel()
    common.heading("2 · The real model: chunked is whole, and a chunk has nothing to say")
    model, tokenizer = loader.load(args.model)
    show_chunks(model, tokenizer)
    common.heading("3 · The freeze, on a clock: 4,096 tokens arrive among 16 streams, 10 ms + 50 µs per token a step")
    show_freeze(args.budget, args.threshold)
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

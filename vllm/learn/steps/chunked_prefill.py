"""Lesson 10's steps: slots of a life, the cap, answers of chunks, tiles and their sequences, the kernel, `schedule()`.

Owns their cases; called by the grader. It never grades.
"""

from __future__ import annotations

import common

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from engine.config import SchedulerConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.request import Request, RequestStatus, SamplingParams
from learn import pictures
from learn.step import Case, Context, Step
from learn.steps.paged_attention import shuffled

LESSON = "10_chunked_prefill"


# --- The scheduler ----------------------------------------------------------------------------------------------------

Arrival = tuple[int, int, int]  # (step, tokens of the prompt, tokens of the answer)


def make(module: ModuleType, num_blocks: int = 99, **limits: Any) -> Any:
    """A scheduler over blocks of 4."""
    limits = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64} | limits
    config = SchedulerConfig(**limits)
    return module.Scheduler(config, KVCacheManager(num_blocks, 4, config.max_model_len, enable_caching=False))


def request(name: int | str, prompt: int, answer: int) -> Request:
    return Request(str(name), list(range(prompt)), SamplingParams(max_tokens=answer, ignore_eos=True))


IN_A_STEP = (
    "num_scheduled_tokens",
    "scheduled_new_reqs",
    "scheduled_running_reqs",
    "finished_req_ids",
    "block_tables",
    "what each hears",
    "running afterwards",
    "how many wait",
    "free blocks",
)


def life(module: ModuleType, arrivals: Sequence[Arrival], aborted: dict[int, str], **limits: Any) -> list:
    """Step by step: who computes how many tokens, what each is told, who runs, who waits, the blocks that are free."""
    scheduler, told = make(module, **limits), []
    for step in range(40):
        for name, (when, prompt, answer) in enumerate(arrivals):
            if when == step:
                scheduler.add_request(request(name, prompt, answer))
        if not scheduler.has_unfinished_requests() and step > max(when for when, _, _ in arrivals):
            break
        output = scheduler.schedule()
        behind = {r: scheduler.requests[r].num_tokens - scheduler.requests[r].num_computed_tokens
                  for r in output.num_scheduled_tokens}  # fmt: skip
        new = [r.request_id for r in output.scheduled_new_reqs]
        old = [r.request_id for r in output.scheduled_running_reqs]
        left, tables = list(output.finished_req_ids), {r: list(output.block_tables.get(r, ())) for r in behind}
        if step in aborted:
            scheduler.finish_requests([aborted[step]], RequestStatus.FINISHED_ABORTED)
        sampled = {r: [7] for r, n in behind.items() if n == 0}
        answers = [
            (o.request_id, o.new_token_ids, o.finish_reason) for o in scheduler.update_from_output(output, sampled)
        ]
        free = scheduler.kv_cache_manager.block_pool.num_free_blocks
        running = [r.request_id for r in scheduler.running]
        told.append(
            (output.num_scheduled_tokens, new, old, left, tables, answers, running, len(scheduler.waiting), free)
        )
    return told


def lives(mine: ModuleType, given: ModuleType, context: Context, first: Sequence[tuple]) -> Iterator[Case]:
    rng, some = context.rng, []
    for _ in range(5):
        arrivals = [(rng.randint(0, 6), rng.randint(1, 30), rng.randint(1, 6)) for _ in range(rng.randint(2, 6))]
        limits = {
            "max_num_scheduled_tokens": rng.randint(3, 24),
            "num_blocks": rng.randint(12, 30),
            "max_num_seqs": rng.randint(1, 5),
            "long_prefill_token_threshold": rng.choice([0, 0, 5]),
            "enable_chunked_prefill": rng.random() < 0.8,
        }
        some.append((arrivals, {}, limits))
    for arrivals, aborted, limits in (*first, *some):
        right = life(given, arrivals, aborted, **limits)
        yield Case(
            f"requests 0, 1, … as (arrives at step, prompt, answer): {arrivals}; {limits}"
            + (f"; hang up while a step runs {aborted}" if aborted else "")
            + "; of each step: tokens by request, the new ones, those that went on, who has finished since, the "
            "answers, who runs, how many wait, free blocks",
            lambda: life(mine, arrivals, aborted, **limits),
            right,
            lambda got, right: pictures.steps(got, right, names=IN_A_STEP),
        )


def schedules(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    first = [
        ([(0, 6, 2)], {}, {}),
        ([(0, 10, 3)], {}, {"max_num_scheduled_tokens": 4}),
        ([(0, 2, 4), (0, 3, 4), (1, 12, 2)], {}, {"max_num_scheduled_tokens": 5}),
        ([(0, 2, 9), (0, 2, 9), (0, 2, 9), (1, 9, 2)], {}, {"max_num_scheduled_tokens": 3}),  # 3 starves
        ([(0, 3, 3), (0, 9, 3), (0, 2, 3)], {}, {"max_num_scheduled_tokens": 8, "enable_chunked_prefill": False}),
        ([(0, 20, 2), (0, 3, 4), (0, 20, 2)], {}, {"long_prefill_token_threshold": 6, "max_num_scheduled_tokens": 16}),
        ([(0, 9, 8), (0, 9, 8), (0, 2, 2)], {}, {"num_blocks": 9}),
        ([(0, 3, 3), (0, 4, 3), (0, 5, 3)], {}, {"max_num_seqs": 2}),
        # Two leave, the cap grows from 2 to 4, and 1, which runs already, gets nothing; then 1 hangs up.
        (
            [(0, 20, 1), (0, 20, 1), (0, 2, 1), (0, 2, 1)],
            {0: "2", 1: "3", 3: "1"},
            {
                "max_num_batched_tokens": 8,
                "max_num_scheduled_tokens": 4,
                "long_prefill_token_threshold": 2,
                "long_prefill_token_threshold_adaptive": True,
            },
        ),
    ]
    yield from lives(mine, given, context, first)


def answers(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    first = [
        ([(0, 3, 2)], {}, {}),
        ([(0, 9, 2), (0, 1, 5)], {}, {"max_num_scheduled_tokens": 5}),
        ([(0, 3, 4), (0, 3, 4), (0, 3, 4)], {1: "1", 2: "0"}, {}),
        ([(0, 3, 1), (0, 3, 1), (0, 3, 2)], {}, {"max_num_seqs": 1}),
        ([(0, 60, 20), (0, 2, 3)], {}, {}),  # the context is full before the answer is
    ]
    yield from lives(mine, given, context, first)


def slots(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [(rng.randint(1, 40), rng.randint(1, 60)) for _ in range(6)]
    for prompt, answer in [(5, 3), (1, 1), (60, 20), *some]:
        yield Case(
            f"a prompt of {prompt} tokens, an answer of at most {answer}, a context of at most 64",
            lambda: make(mine).num_slots(request(0, prompt, answer)),
            len([p for p in range(64) if p < prompt + answer][:-1]),
        )
    endless = request(0, 5, 1)
    endless.max_tokens = math.inf  # as a request has it whose caller set no limit
    yield Case("a prompt of 5, an answer without a limit", lambda: make(mine).num_slots(endless), 63)


def caps(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [(rng.randint(0, 9), rng.choice([0, rng.randint(1, 40)]), rng.random() < 0.5) for _ in range(8)]
    for count, threshold, adaptive in [
        (2, 8, False), (1, 8, False), (3, 0, False), (3, 0, True), (2, 8, True), (9, 8, True), *some,
    ]:  # fmt: skip

        def cap(module: ModuleType) -> int:
            scheduler = make(
                module,
                long_prefill_token_threshold=threshold,
                long_prefill_token_threshold_adaptive=adaptive,
                max_num_scheduled_tokens=20,
            )
            for name in range(count):
                scheduler.add_request(request(name, 3, 3))
            return scheduler._long_prefill_cap()

        share = max(threshold, 64 // max(count, 1)) if adaptive else threshold
        yield Case(
            f"{count} requests, a threshold of {threshold}{', adaptive' * adaptive}; at most 64 tokens in a step "
            "and in a context",
            lambda: cap(mine),
            64 if threshold == 0 or count < 2 else share,
        )


# --- The kernel -------------------------------------------------------------------------------------------------------


def mixed(
    context: Context, lens: list[tuple[int, int]], size: int, Hq: int, Hkv: int, D: int, loud: float = 1
) -> tuple:
    """(q, cache, table, query_start_loc, seq_lens, longest) of sequences with (queries, context in all)."""
    cache, table = shuffled(context, [S for _, S in lens], size, Hkv, D)
    n = [queries for queries, _ in lens]
    q = context.fence(context.randn(sum(n), Hq, D) * loud)
    starts = context.ints([0, *torch.tensor(n).cumsum(0).tolist()])
    return q, cache, table, starts, context.ints([S for _, S in lens]), max(n)


def sequences(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [[(n := rng.choice([0, 1, 1, 3, 17, 40]), n + rng.randint(1, 9)) for _ in range(6)] for _ in range(2)]
    for lens in ([(3, 3)], [(1, 5), (1, 2)], [(20, 20), (1, 9), (37, 40)], [(16, 16), (0, 3), (33, 33), (1, 1)], *some):
        batch = mixed(context, lens, 8, 2, 1, 16)
        q, cache, table, starts, seq_lens, longest = batch
        rows = given.choose_tiles(q.dtype, 16, 2, longest)[0] // 2
        about = f"sequences of {[n for n, _ in lens]} queries in this step, tiles of {rows}"
        if common.INTERPRET and longest:
            firsts = [first // rows + b for b, first in enumerate(starts.tolist()[:-1])]
            right = [max(b for b, first in enumerate(firsts) if first <= n) for n in range(len(q) // rows + len(lens))]
            yield Case(f"{about}: the sequence of each tile number", lambda: found(mine, batch), right)
        yield Case(
            f"{about}: what they attend to",
            lambda: mine.unified_attention(*batch),
            given.mixed_attention_reference(q, cache, table, starts, seq_lens).float(),
            lambda got, right: pictures.grid(got, right, "tokens", "heads"),
        )


def found(mine: ModuleType, batch: tuple) -> list[int]:
    """Where a kernel is interpreted, its calls of `find_sequence` are written down."""
    numbers: dict[int, int] = {}
    inner = mine.find_sequence

    def outer(query_start_loc: Any, tile: Any, *more: Any) -> Any:
        b = inner(query_start_loc, tile, *more)
        numbers[int(tile)] = int(b)
        return b

    with mock.patch.object(mine, "find_sequence", outer):
        mine.unified_attention(*batch)
    return [numbers[tile] for tile in sorted(numbers)]


def attentions(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    n = rng.randint(3, 30)
    for lens, size, Hq, Hkv, D, loud in [
        ([(2, 2)], 4, 1, 1, 16, 1),
        ([(1, 9), (5, 7), (1, 1)], 4, 6, 2, 16, 1),
        ([(20, 45), (0, 3), (1, 33)], 8, 3, 1, 20, 1),
        ([(n, 2 * n), (1, 40), (17, 17)], 16, 4, 2, 24, 60),
    ]:
        q, cache, table, starts, seq_lens, longest = mixed(context, lens, size, Hq, Hkv, D, loud)
        right = given.mixed_attention_reference(q, cache, table, starts, seq_lens).float()
        cache[:, 0] = math.nan  # the null block: no answer may depend on it
        yield Case(
            f"(queries in this step, tokens in all) {lens}, blocks of {size}, {Hq} query and {Hkv} KV heads of {D}; "
            "NaN wherever no token lies" + "; exp of one score alone overflows" * (loud > 1),
            lambda: mine.unified_attention(q, cache, table, starts, seq_lens, longest),
            right,
            lambda got, right: pictures.grid(got, right, "tokens", "heads"),
        )


STEPS = (
    Step(
        "10.1",
        LESSON,
        "Slots of a life",
        "Scheduler.num_slots",
        "return how many tokens of this request will ever have keys and values: its last one never has.",
        "Prompt and answer end at max_model_len at the latest. max_tokens may be infinite, and the number is an int.",
        slots,
    ),
    Step(
        "10.2",
        LESSON,
        "The cap",
        "Scheduler._long_prefill_cap",
        "return the most tokens that a request gets in a step: the threshold if it is set and somebody else is there.",
        "Without a cap, max_model_len does. Adaptive: max_num_batched_tokens divided by the requests, if that is more.",
        caps,
    ),
    Step(
        "10.3",
        LESSON,
        "Answers, and chunks without one",
        "Scheduler.update_from_output",
        "append what was sampled, in scheduling order, and let go of requests that are done. Return all answers.",
        "A request may be gone (its client hung up), or have no token (its chunk ended in the prompt). check_stop says "
        "whether it is done, and sets its status; _free_request gives its blocks back; `running` loses it.",
        answers,
    ),
    Step(
        "10.4",
        LESSON,
        "Whose tile is it?",
        "find_sequence",
        "return the last sequence b with query_start_loc[b] // BLOCK_Q + b ≤ tile, by binary search.",
        "Sequence 0 always fits, num_seqs never does: halve what is between them. Divide each start before you add b.",
        sequences,
        launches=("unified_attention_kernel",),
        forbidden=("mixed_attention_reference",),
    ),
    Step(
        "10.5",
        LESSON,
        "One kernel for chunks and decodes",
        "unified_attention_kernel",
        "a program per (KV head, tile of BLOCK_Q queries times G heads): all keys that they may see, from the cache.",
        "Count tiles from the back; find_sequence says whose it is. Query t of n stands at S − n + t. Lesson 02's loop "
        "over the block table, up to the last query's position; then lesson 03's mask. Mask values, too. WINDOW and "
        "SINKS are off here: leave them to the engine.",
        attentions,
        launches=("unified_attention_kernel",),
        forbidden=("mixed_attention_reference",),
        plugs=(("attention", "UnifiedAttention"),),
    ),
    Step(
        "10.6",
        LESSON,
        "A whole schedule",
        "Scheduler.schedule",
        "choose who computes how many tokens: those that run, then the queue, within budget, cap, seats and blocks.",
        "Running: min(behind, cap, budget), nothing if that is 0. Waiting: the head only, cut to the budget if chunks "
        "are allowed, and if it _fits. Each gets its blocks by allocate_slots, before its tokens count as computed. "
        "The output also has finished_req_ids, which begin anew then, and block_tables: the manager's req_to_blocks.",
        schedules,
        plugs=(("scheduler", "Scheduler"),),
    ),
)

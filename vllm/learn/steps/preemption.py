"""Lesson 11's steps: who loses its blocks and how, who comes in, blocks that move, and the whole of schedule().

Owns their cases; called by the grader. It never grades.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from engine.config import SchedulerConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.output import SchedulerOutput
from engine.request import Request, RequestStatus, SamplingParams
from learn import pictures
from learn.step import Case, Context, Step, outcome

LESSON = "11_preemption"
SIZE = 4  # tokens in a block


def a_request(name: str, prompt: Sequence[int], most: int = 4, priority: int = 0, arrival: float = 0.0) -> Request:
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    return Request(name, list(prompt), params, priority=priority, arrival_time=arrival)


def a_scheduler(
    module: ModuleType, num_blocks: int, kind: str = "Scheduler", caching: bool = True, **limits: Any
) -> Any:
    """Sequences of up to 24 tokens; 6 blocks on the CPU for the scheduler that swaps."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 24, **limits}
    manager = KVCacheManager(num_blocks + 1, SIZE, 24, caching)
    made_with = (SchedulerConfig(24, **limits), manager) + ((6,) if kind == "SwapScheduler" else ())
    return getattr(module, kind)(*made_with)


def runs(scheduler: Any, request: Request, computed: int) -> None:
    """As if it had been admitted, and the model had computed so many of its tokens."""
    scheduler.kv_cache_manager.allocate_slots(request, computed)
    request.num_computed_tokens, request.status = computed, RequestStatus.RUNNING
    scheduler.requests[request.request_id] = request
    scheduler.running.append(request)


def state(scheduler: Any) -> dict:
    """Who runs, who waits, whose blocks, which are free, which hold a known prefix."""
    pool, manager = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager
    of = {r.request_id: (r.status.name, r.num_computed_tokens, r.num_preemptions) for r in scheduler.requests.values()}
    told = {
        "running": [r.request_id for r in scheduler.running],
        "waiting": [r.request_id for r in scheduler.waiting],
        "(status, computed, preemptions)": of,
        "tables": {n: list(t) for n, t in manager.req_to_blocks.items() if t},
        "free": list(pool.free_queue),
        "known": [i for i, key in enumerate(pool.block_hash) if key is not None],
    }
    if hasattr(scheduler, "swapped"):
        told["on the CPU"] = {name: (list(blocks), n) for name, (blocks, n) in scheduler.swapped.items()}
        told["copies"] = scheduler.copies.take()
        told["free there"] = scheduler.cpu_pool.num_free_blocks
    return told


# --- Who, and how -----------------------------------------------------------------------------------------------------


def victims(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    first = [
        ("fcfs", [(0, 1), (0, 2)]),
        ("fcfs", [(0, 2), (0, 1)]),
        ("fcfs", [(9, 1), (0, 2)]),
        ("priority", [(0, 1), (9, 2), (3, 3)]),
        ("priority", [(1, 1), (5, 4), (5, 3)]),
        ("priority", [(2, 7), (2, 9), (2, 8), (1, 10)]),
    ]
    some = [
        (p, [(rng.randint(0, 2), rng.random()) for _ in range(5)]) for p in ("fcfs", "priority", "priority", "priority")
    ]
    for policy, running in (*first, *some):

        def choose(module: ModuleType) -> Any:
            scheduler = a_scheduler(module, 40, policy=policy)
            for i, (priority, arrival) in enumerate(running):
                runs(scheduler, a_request(f"r{i}", [i], priority=priority, arrival=arrival), 1)
            return scheduler._choose_victim().request_id

        shown = ", ".join(f"r{i}: ({p}, {at:.3g})" for i, (p, at) in enumerate(running))
        yield Case(
            f"policy {policy}; running in order of admission, with (priority, arrival): {shown}",
            lambda: choose(mine),
            choose(given),
        )


def preempted(
    module: ModuleType, kind: str, policy: str, running: list[tuple], victim: int, caching: bool, cpu: int
) -> Any:
    """(tokens, computed before, granted in this step, priority) each; then the victim loses its blocks."""
    scheduler = a_scheduler(module, 30, kind, caching, policy=policy)
    if kind == "SwapScheduler":
        scheduler.cpu_pool.allocate(6 - cpu)
    output = SchedulerOutput()
    for i, (tokens, computed, granted, priority) in enumerate(running):
        request = a_request(f"r{i}", range(100 * i, 100 * i + tokens), priority=priority, arrival=float(i))
        runs(scheduler, request, computed)
        if granted:
            scheduler.kv_cache_manager.allocate_slots(request, granted)
            output.scheduled_running_reqs.append(request)
            output.num_scheduled_tokens[request.request_id] = granted
    scheduler.add_request(a_request("w", [1, 2], arrival=99.0))
    scheduler.token_budget = 5
    scheduler._preempt_request(scheduler.running[victim], output)
    in_step = {
        "in the step": dict(output.num_scheduled_tokens),
        "runs on": [r.request_id for r in output.scheduled_running_reqs],
        "preempted": [r.request_id for r in output.preempted_reqs],
        "budget": scheduler.token_budget,
    }
    return {**state(scheduler), **in_step}


def losses(kind: str) -> Callable:
    def cases(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
        rng = context.rng
        first = [
            ("fcfs", [(6, 5, 0, 0)], 0, True, 6),
            ("fcfs", [(6, 5, 1, 0), (9, 8, 0, 0)], 1, True, 6),
            ("priority", [(6, 5, 1, 9), (9, 8, 0, 0)], 0, True, 6),
            ("priority", [(14, 5, 9, 9), (9, 8, 1, 0)], 0, True, 6),
            ("priority", [(16, 0, 16, 9), (9, 8, 0, 0)], 0, True, 6),
            ("fcfs", [(16, 15, 1, 0), (9, 8, 0, 0)], 0, False, 6),
            ("fcfs", [(9, 8, 0, 0), (16, 12, 0, 0)], 1, True, 3),
            ("fcfs", [(9, 8, 0, 0), (16, 12, 0, 0)], 1, True, 2),
            ("fcfs", [(9, 8, 0, 0), (17, 13, 0, 0)], 1, True, 3),
        ]
        some = []
        for _ in range(5):
            running = []
            for _ in range(rng.randint(1, 4)):
                tokens = rng.randint(2, 20)
                computed = rng.randint(1, tokens - 1)
                running.append((tokens, computed, rng.randint(0, tokens - computed), rng.randint(0, 3)))
            policy = rng.choice(["fcfs", "priority"])
            some.append((policy, running, rng.randrange(len(running)), rng.random() < 0.7, rng.randint(1, 6)))
        for policy, running, victim, caching, cpu in (*first, *some):
            shown = "; ".join(
                f"r{i}: {t} tokens, {c} computed"
                + (f", {g} in this step" if g else "")
                + (f", priority {p}" if p else "")
                for i, (t, c, g, p) in enumerate(running)
            )
            there = f"; {cpu} blocks are free on the CPU" if kind == "SwapScheduler" else ""
            yield Case(
                f"blocks of {SIZE} tokens, {'a' if caching else 'no'} prefix cache, policy {policy}{there}; {shown}; "
                f"budget left 5; one request waits. r{victim} is preempted: what is then where",
                lambda: preempted(mine, kind, policy, running, victim, caching, cpu),
                preempted(given, kind, policy, running, victim, caching, cpu),
                what_differs,
            )

    return cases


def what_differs(got: Any, right: Any) -> str:
    if not isinstance(got, dict):
        return ""
    return "\n".join(f"{x}: yours {got.get(x)}   right {right[x]}" for x in right if got.get(x) != right[x])


# --- Who comes in -----------------------------------------------------------------------------------------------------


def admissions(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """A prompt of `tokens`, of which the first `shared` were computed for somebody before (who still runs, if there are
    `others`), meets so many free blocks."""
    rng = context.rng

    def admit(
        module: ModuleType,
        tokens: int,
        shared: int,
        free: int,
        marks: int,
        others: bool,
        whole: bool,
        budget: int,
        before: int,
    ) -> Any:
        scheduler = a_scheduler(module, 30, scheduler_reserve_full_isl=whole)
        manager = scheduler.kv_cache_manager
        if shared:
            old = a_request("old", [*range(shared), 77])
            runs(scheduler, old, shared + 1)
            if not others:
                scheduler.finish_requests(["old"], RequestStatus.FINISHED_ABORTED)
        elif others:
            runs(scheduler, a_request("other", [50]), 1)
        blocks = [block for block in manager.block_pool.free_queue if manager.block_pool.block_hash[block] is None]
        gone = max(0, manager.block_pool.num_free_blocks - free)
        for block in blocks[:gone]:
            manager.block_pool.touch([block])
        scheduler.watermark_blocks, scheduler.token_budget = marks, budget
        request = a_request("new", range(tokens))
        request.num_preemptions = before
        scheduler.add_request(request)
        granted = scheduler._admit(request)
        return {
            "granted": granted,
            "cached": request.num_cached_tokens,
            "budget": scheduler.token_budget,
            **state(scheduler),
        }

    first = [
        (8, 0, 9, 0, False, True, 24, 0),
        (8, 0, 2, 0, False, True, 24, 0),
        (8, 0, 1, 0, False, True, 24, 0),
        (16, 0, 2, 0, False, True, 8, 0),
        (16, 0, 2, 0, False, False, 8, 0),
        (8, 0, 3, 1, True, True, 24, 0),
        (8, 0, 3, 2, True, True, 24, 0),
        (8, 0, 2, 2, False, True, 24, 0),
        (10, 8, 9, 0, False, True, 24, 0),
        (10, 8, 3, 0, False, True, 24, 0),
        (10, 8, 2, 0, False, True, 24, 0),
        (10, 8, 9, 0, False, True, 24, 2),
        (8, 0, 9, 0, False, True, 0, 0),
        (20, 8, 3, 0, True, True, 24, 0),
        (10, 8, 9, 0, False, True, 0, 0),
        (20, 8, 4, 0, False, False, 4, 0),
        (20, 8, 3, 1, True, False, 4, 0),
    ]
    some = [
        (
            rng.randint(1, 20),
            rng.choice([0, 4, 8]),
            rng.randint(2, 7),
            rng.randint(0, 2),
            rng.random() < 0.5,
            rng.random() < 0.5,
            rng.randint(1, 24),
            rng.randint(0, 1),
        )
        for _ in range(8)
    ]
    for tokens, shared, free, marks, others, whole, budget, before in (*first, *some):
        known = f", of which the first {min(shared, tokens)} are in the prefix cache" if shared else ""
        yield Case(
            f"a prompt of {tokens} tokens{known}, preempted {before} times; blocks of {SIZE}, {free} are free; "
            f"{'nobody' if not others else 'somebody else with this beginning' if shared else 'somebody'} runs, the "
            f"watermark is {marks} blocks, the budget {budget} tokens, scheduler_reserve_full_isl {whole}",
            lambda: admit(mine, tokens, shared, free, marks, others, whole, budget, before),
            admit(given, tokens, shared, free, marks, others, whole, budget, before),
            what_differs,
        )


# --- Blocks that move -------------------------------------------------------------------------------------------------


def moves(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    half = torch.bfloat16
    for N, M, size, Hkv, width, dtype, count in [
        (3, 3, 2, 1, 4, torch.float32, 1),
        (6, 5, 4, 2, 8, torch.float32, 3),
        (5, 6, 4, 3, 24, half, 4),
        (4, 7, 16, 3, 64, torch.float32, 3),
        (4, 4, 2, 1, 4, torch.float32, 0),
    ]:
        source, target = (
            context.randn(2, N, size, Hkv, width, dtype=dtype),
            context.randn(2, M, size, Hkv, width, dtype=dtype),
        )
        pairs = list(zip(rng.sample(range(N), count), rng.sample(range(M), count)))
        right, before = target.clone(), source.clone()
        for s, t in pairs:
            right[:, t] = source[:, s]

        def move() -> list:
            mine.swap_blocks(source, target, context.ints(pairs, torch.int64).view(-1, 2))
            return [target, bool((source == before).all())]

        if pairs:  # without any, nothing is launched
            yield Case(
                f"(source, target) {pairs}; {N} and {M} blocks of {size} tokens, {Hkv} heads of {width}, {dtype}; the "
                "target, and whether the source is as before",
                move,
                [right, True],
                lambda got, right: pictures.grid(got[0], right[0], "keys, values", "blocks"),
            )


def orders_to_copy(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng

    def note(module: ModuleType, calls: list[tuple]) -> list:
        copies, told = module.BlockCopies(), []
        for direction, *pairs in calls:
            told.append(copies.take() if direction == "take" else copies.add(direction, iter(pairs[0])))
        return [told, copies.take(), copies.take(), dict(copies.total)]

    some = []
    for _ in range(5):
        calls: list[tuple] = []
        for _ in range(6):
            pairs = [(rng.randint(1, 5), rng.randint(1, 5)) for _ in range(rng.randint(0, 3))]
            calls.append((rng.choice(["out", "out", "in"]), pairs) if rng.random() < 0.9 else ("take",))
        some.append(calls)
    first: list[list[tuple]] = [
        [("out", [(1, 5)])],
        [("out", [(1, 5), (2, 6)]), ("out", [(3, 7)])],
        [("out", [(1, 5)]), ("in", [(5, 1)])],
        [("out", [(1, 5)]), ("in", [(5, 1)]), ("out", [(2, 6)])],
        [("out", [(1, 5)]), ("out", [(2, 5)])],
        [("out", [(1, 5)]), ("take",), ("out", [(2, 6)])],
        [("in", [(5, 1), (6, 2)]), ("out", [(1, 5)]), ("in", [(7, 1)])],
    ]
    for calls in (*first, *some):
        yield Case(
            f"{calls}: what is taken in between, at the end, and once more; the totals",
            lambda: note(mine, calls),
            note(given, calls),
        )


def second_tier(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """Blocks a, b, c, … are about to be overwritten on the GPU; "+x" is being brought back, "-x" is there."""
    rng = context.rng

    def keep(module: ModuleType, num_blocks: int, calls: list[str]) -> list:
        tier, told, taken = module.CPUTier(num_blocks), [], {}
        for i, call in enumerate(calls):
            key = call[-1].encode() * 32
            if call[0] == "+":
                taken[call[-1]] = outcome(lambda: tier.take([key]))
            elif call[0] == "-":
                tier.free(taken.pop(call[-1]))
            else:
                tier.store(key, 10 + i)
            known = sorted((k[:1].decode(), block) for block, k in enumerate(tier.block_hash) if k is not None)
            told.append((call, known, list(tier.free_queue), list(tier.ref_count), tier.copies.take()))
        return told

    some = [[rng.choice("abcde") for _ in range(9)] for _ in range(4)]
    first = [
        ["a"],
        ["a", "b", "a"],
        ["a", "b", "c"],
        ["a", "b", "a", "c"],
        ["a", "b", "+a", "c"],
        ["a", "+a", "b", "-a", "c"],
        ["a", "b", "+a", "+b", "c", "-a", "c"],
    ]
    for calls in (*first, *some):
        yield Case(
            f"a tier of 2 blocks; {', '.join(calls)} (x: it is stored; +x: it goes back, -x: it is there): known "
            "blocks, the queue, the counts, the copies, after each",
            lambda: keep(mine, 2, calls),
            keep(given, 2, calls),
            lambda got, right: pictures.steps(got, right),
        )


# --- Whole lives ------------------------------------------------------------------------------------------------------

Asked = tuple[int, int, int, int]  # when it comes, its prompt, how many tokens it writes, its priority


def lives(scheduler: Any, asked: Sequence[Asked], shared: int) -> list:
    """Step by step: what was planned, and how everything stood then; a token for each that has caught up."""
    requests = [
        a_request(
            str(i),
            [*range(min(shared, p)), *range(100 * i + 30, 100 * i + 30 + p - min(shared, p))],
            most,
            priority,
            float(at),
        )
        for i, (at, p, most, priority) in enumerate(asked)
    ]
    coming, told = sorted(requests, key=lambda r: r.arrival_time), []
    for step in range(150):
        while coming and coming[0].arrival_time <= step:
            scheduler.add_request(coming.pop(0))
        if not coming and not scheduler.has_unfinished_requests():
            break
        output = scheduler.schedule()
        names = {
            what: [r.request_id for r in getattr(output, what)]
            for what in ("scheduled_running_reqs", "scheduled_new_reqs", "scheduled_resumed_reqs", "preempted_reqs")
        }
        planned = dict(output.num_scheduled_tokens)
        about = {
            **names,
            "finished_req_ids": list(output.finished_req_ids),
            "block_tables": {name: list(output.block_tables.get(name, ())) for name in planned},
            **state(scheduler),
            "budget": scheduler.token_budget,
        }
        behind = {r.request_id: r.num_computed_tokens - r.num_tokens for r in scheduler.running}
        tokens = {name: [step + 1000] for name in planned if behind.get(name) == 0}
        heard = [(o.request_id, o.finish_reason) for o in scheduler.update_from_output(output, tokens)]
        told.append((planned, about, heard))
    return told


def side_by_side(got: Any, right: Any) -> str:
    if not isinstance(got, list):
        return ""
    short = [[row[0] | {f"-{name}": 0 for name in row[1]["preempted_reqs"]} for row in side] for side in (got, right)]
    if short[0] != short[1]:
        return "tokens of each; -x was preempted\n" + pictures.steps(short[0], short[1])
    for i, (a, b) in enumerate(zip(got, right)):
        if a != b:
            return f"step {i}\n" + what_differs(a[1], b[1])
    return ""


def some_days(rng: random.Random) -> tuple[int, dict, int, list[Asked]]:
    asked = [
        (rng.randint(0, 5), rng.randint(1, 14), rng.randint(1, 9), rng.randint(0, 2)) for _ in range(rng.randint(3, 7))
    ]
    limits: dict[str, Any] = {
        "policy": rng.choice(["fcfs", "priority"]),
        "max_num_batched_tokens": rng.choice([8, 12, 24]),
    }
    limits |= {"watermark": 0.2} if rng.random() < 0.3 else {}
    limits |= {"max_num_active_seqs": 2} if rng.random() < 0.3 else {}
    limits |= {"scheduler_reserve_full_isl": False} if rng.random() < 0.3 else {}
    limits |= {"long_prefill_token_threshold": 3} if rng.random() < 0.2 else {}
    return rng.randint(6, 9), limits, rng.choice([0, 0, 8]), asked


def schedules(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    days: list[tuple[int, dict, int, list[Asked]]] = [
        (6, {}, 0, [(0, 3, 2, 0)]),
        (8, {}, 0, [(0, 8, 3, 0), (0, 7, 9, 0)]),
        (6, {"max_num_batched_tokens": 8}, 0, [(0, 14, 2, 0), (0, 3, 5, 0)]),
        (6, {}, 0, [(0, 8, 9, 0), (0, 8, 9, 0)]),
        (6, {}, 0, [(0, 6, 9, 0), (0, 6, 9, 0), (1, 6, 9, 0)]),
        (6, {"policy": "priority"}, 0, [(0, 8, 9, 2), (0, 4, 9, 0), (1, 4, 9, 1)]),
        (5, {"policy": "priority"}, 0, [(0, 8, 5, 2), (1, 4, 5, 0), (1, 4, 5, 1)]),
        (4, {"policy": "priority"}, 0, [(0, 7, 5, 0), (0, 3, 5, 2), (1, 3, 5, 1)]),
        (8, {"max_num_active_seqs": 2}, 0, [(0, 3, 4, 0), (0, 3, 4, 0), (0, 3, 4, 0)]),
        (8, {"watermark": 0.3}, 8, [(0, 10, 4, 0), (0, 12, 4, 0), (2, 9, 9, 0)]),
        (6, {"max_num_batched_tokens": 8, "scheduler_reserve_full_isl": False}, 0, [(0, 14, 9, 0), (0, 14, 9, 0)]),
        (
            7,
            {"max_num_batched_tokens": 8, "policy": "priority", "scheduler_reserve_full_isl": False},
            0,
            [(0, 12, 9, 2), (0, 3, 9, 0), (1, 3, 9, 1)],
        ),
        *(some_days(context.rng) for _ in range(14)),
    ]
    for num_blocks, limits, shared, asked in days:
        comes = ", ".join(
            f"{i}: step {at}, {p} + {n}" + (f", priority {x}" if x else "") for i, (at, p, n, x) in enumerate(asked)
        )
        more = "".join(f", {name} {value}" for name, value in limits.items())
        more += f"; all begin with the same {shared} tokens" if shared else ""
        yield Case(
            f"{num_blocks} blocks of {SIZE} tokens{more}; requests (prompt + answer) {comes}",
            lambda: outcome(lambda: lives(a_scheduler(mine, num_blocks, **limits), asked, shared)),
            lives(a_scheduler(given, num_blocks, **limits), asked, shared),
            side_by_side,
        )


STEPS = (
    Step(
        "11.1",
        LESSON,
        "Who loses its blocks",
        "Scheduler._choose_victim",
        "first come, first served: the one admitted last. By priority: the least important, of equals the latest to "
        "arrive.",
        "A larger number is less important. self.running is in order of admission, which is no order of arrival once "
        "somebody has been preempted.",
        victims,
    ),
    Step(
        "11.2",
        LESSON,
        "Blocks that one kernel moves",
        "swap_blocks_kernel",
        "a program per (pair, keys or values, chunk of BLOCK words): copy the source block's words to the target "
        "block.",
        "The two ids of a pair lie side by side. A block is WIDTH words, and the values lie a stride further, which "
        "may differ between the two caches. BLOCK divides WIDTH, so that no mask is needed.",
        moves,
        launches=("swap_blocks_kernel",),
        forbidden=("swap_blocks_one_by_one",),
    ),
    Step(
        "11.3",
        LESSON,
        "Does it come in?",
        "Scheduler._admit",
        "find what is computed already; take blocks for the tokens of this step, if all known tokens would fit now "
        "(without scheduler_reserve_full_isl: those of this step) and, where somebody runs, the watermark stays free. "
        "Return the tokens granted, or 0, and nothing has changed.",
        "_num_new_tokens looks at num_computed_tokens: set it first, and back to 0 if it comes to nothing. "
        "get_num_blocks_to_allocate counts the found blocks that nobody owns. num_cached_tokens is what a request "
        "found when it first came in.",
        admissions,
    ),
    Step(
        "11.4",
        LESSON,
        "Back to the queue",
        "Scheduler._preempt_request",
        "the victim leaves `running`, its blocks, and this step, if it is in it; it goes back to the front of the "
        "queue with nothing computed, and counts one preemption more.",
        "If it stands in the step, its tokens go back to the budget, and blocks that they would have filled must leave "
        "the index before they are freed: evict_uncomputed with the tokens that were computed before this step.",
        losses("Scheduler"),
    ),
    Step(
        "11.5",
        LESSON,
        "Copies in the order of decision",
        "BlockCopies",
        "add: one batch {target: source} for consecutive copies of a direction, so that a later source of a target "
        "wins; take: all batches as pairs, which are then forgotten; the totals stay.",
        "A new batch begins when the direction changes. The total counts every pair that was noted.",
        orders_to_copy,
    ),
    Step(
        "11.6",
        LESSON,
        "A second tier",
        "CPUTier.store",
        "keep a block by its hash: if it is known it becomes the youngest; else it takes the place of the oldest, and "
        "is copied out. If all blocks are on their way back to the GPU, it is not kept.",
        "touch and free make a known block the youngest. A new one: allocate, cache_block, note the copy (GPU block, "
        "CPU block), free. Nobody owns what is kept.",
        second_tier,
    ),
    Step(
        "11.7",
        LESSON,
        "Swap, as V0 did",
        "SwapScheduler._preempt_request",
        "if the CPU has room for the blocks that hold the victim's computed tokens, note their copies and where they "
        "go; then preempt as always.",
        "num_computed_tokens does not have this step's tokens yet, and blocks that only they would fill need no copy. "
        "zip ends with the shorter table. super()._preempt_request frees the blocks: look at them before.",
        losses("SwapScheduler"),
    ),
    Step(
        "11.8",
        LESSON,
        "Optimism, and its price",
        "Scheduler.schedule",
        "running requests go on in order of admission; who has no blocks preempts victims until it has, or is one "
        "itself: then the walk ends. Then the queue, while there are seats, but not in a step that preempted. What is "
        "granted counts as computed.",
        "Walk over a copy of self.running, and pass over those that were preempted meanwhile. Set token_budget and "
        "long_prefill_cap first. Of `running`, whoever has 0 new tokens is passed over. _admit takes the blocks; a "
        "request that comes back is `resumed`, not `new`, which its status says until you change it. The output "
        "also has finished_req_ids, which begin anew then, and block_tables: the manager's req_to_blocks.",
        schedules,
        plugs=(("scheduler", "Scheduler"),),
    ),
)

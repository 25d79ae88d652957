"""Lesson 04's steps: steps counted without a model, blocks for requests, who is admitted, who has ended.

Owns their cases; called by the grader. It never grades.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from engine.config import SchedulerConfig
from engine.request import Request, RequestStatus, SamplingParams
from learn import pictures
from learn.step import Case, Context, Step, outcome

LESSON = "04_continuous_batching"


# --- Steps, counted ---------------------------------------------------------------------------------------------------


def batches_that_wait(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [(rng.randint(2, 5), rng.choices(range(1, 30), k=rng.randint(6, 13))) for _ in range(4)]
    for slots, outputs in [(2, [3, 5]), (2, [3, 5, 1, 1]), (2, [7, 1, 2]), (4, [6]), *some]:
        right, left = 0, list(outputs)
        while left:
            batch, left = left[:slots], left[slots:]
            right += max(batch)
        yield Case(
            f"{slots} slots, answers of {outputs} tokens", lambda: mine.static_steps(slots, outputs), right, beside
        )


def slots_filled_at_once(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [(rng.randint(2, 5), rng.choices(range(1, 30), k=rng.randint(6, 13))) for _ in range(5)]
    for slots, outputs in [(2, [3, 5]), (2, [5, 1, 1, 1]), (1, [2, 3, 4]), (3, [4, 4, 4, 9]), (4, [6, 2]), *some]:
        left, seats, right = list(outputs), [0] * slots, 0
        while left or any(seats):  # step by step, as it happens
            seats = [seat or (left.pop(0) if left else 0) for seat in seats]
            seats = [max(seat - 1, 0) for seat in seats]
            right += 1
        yield Case(
            f"{slots} slots, answers of {outputs} tokens", lambda: mine.continuous_steps(slots, outputs), right, beside
        )


def beside(got: Any, right: Any) -> str:
    return f"yours {'█' * min(got, 100) if isinstance(got, int) else got}\nright {'█' * min(right, 100)}"


# --- Blocks for requests ----------------------------------------------------------------------------------------------


def a_request(name: str, prompt: int, max_tokens: int, **more: Any) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=[1])
    return Request(name, [0] * prompt, params, arrival_time=float(name), **more)


def blocks_missing(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    def missing(module: ModuleType, size: int, has: int, tokens: int) -> int:
        manager = module.KVCacheManager(40, size, 30)
        if has:
            manager.req_to_blocks["0"] = list(range(1, has + 1))
        return manager.get_num_blocks_to_allocate(a_request("0", 5, 5), tokens)

    rng, some = context.rng, []
    for _ in range(5):
        has, size = rng.randint(0, 4), rng.randint(1, 7)
        some.append((size, has, rng.randint(max(1, has * size), 30)))
    for size, has, tokens in [(4, 0, 1), (4, 0, 4), (4, 0, 5), (4, 2, 8), (4, 2, 9), (16, 1, 30), *some]:
        right = len({p // size for p in range(tokens)}) - has
        yield Case(
            f"blocks of {size} tokens; a table of {has} blocks that has to hold {tokens} tokens",
            lambda: missing(mine, size, has, tokens),
            right,
        )


def lives_of_requests(module: ModuleType, num_blocks: int, calls: Sequence[tuple[str, int]]) -> list:
    """("0", n): n tokens more of request 0 are about to be computed; ("0", 0): it is done. All tables after each."""
    manager = module.KVCacheManager(num_blocks, 4, 8)
    requests = {name: a_request(name, 30, 5) for name, _ in calls}
    told = []
    for name, n in calls:
        request = requests[name]
        if n:
            new = outcome(lambda: manager.allocate_slots(request, n))
            request.num_computed_tokens += n if isinstance(new, list) else 0
        else:
            new = outcome(lambda: manager.free(request))
            request.num_computed_tokens = 0
        tables = {who: list(table) for who, table in sorted(manager.req_to_blocks.items()) if table}
        told.append((name, n, new, tables, manager.block_pool.num_free_blocks))
    return told


def room(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [[(rng.choice("012"), rng.choice([0, 1, 1, 2, 5, 9])) for _ in range(9)] for _ in range(5)]
    first = [
        [("0", 3)],
        [("0", 4), ("0", 1)],
        [("0", 5), ("1", 2), ("0", 3), ("0", 1)],
        [("0", 24), ("1", 1)],
        [("0", 25), ("0", 24)],
        [("0", 20), ("1", 5), ("1", 4), ("0", 1)],
        [("0", 9), ("1", 2), ("0", 0), ("1", 20)],
    ]
    for calls in (*first, *some):
        yield Case(
            "6 blocks of 4 tokens, none taken yet; (request, so many tokens more; 0: it is done), one after the "
            f"other: {calls}. What allocate_slots answers, all tables, how many blocks are free",
            lambda: lives_of_requests(mine, 7, calls),
            lives_of_requests(given, 7, calls),
            lambda got, right: pictures.steps(got, right),
        )


# --- The scheduler ----------------------------------------------------------------------------------------------------


def a_scheduler(module: ModuleType, num_blocks: int, seats: int, budget: int, **more: Any) -> Any:
    """Blocks of 4 tokens, sequences of up to 20."""
    static = more.pop("static", False)
    config = SchedulerConfig(20, seats, max(budget, 20), enable_chunked_prefill=False, **more)
    return module.Scheduler(config, module.KVCacheManager(num_blocks + 1, 4, 20), static)


def fitting(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """Running requests are (prompt, most new tokens, blocks they have); then comes (prompt, most new tokens)."""
    rng = context.rng

    def fits(module: ModuleType, num_blocks: int, running: list, comes: tuple[int, int]) -> bool:
        scheduler = a_scheduler(module, num_blocks, 9, 20)
        for i, (prompt, most, blocks) in enumerate(running):
            request = a_request(str(i), prompt, most)
            scheduler.running.append(request)
            scheduler.requests[request.request_id] = request
            manager = scheduler.kv_cache_manager
            manager.req_to_blocks[request.request_id] = manager.block_pool.allocate(blocks)
        return scheduler._fits(a_request("99", *comes))

    first = [
        (5, [], (4, 5)),
        (5, [], (4, 17)),
        (5, [], (20, 90)),
        (6, [(4, 9, 1)], (4, 9)),
        (6, [(4, 9, 1)], (4, 10)),
        (6, [(4, 5, 2)], (4, 10)),
        (6, [(4, 10, 1)], (4, 9)),
        (5, [(1, 4, 1), (1, 8, 1)], (4, 5)),
        (7, [(5, 4, 2), (2, 19, 1)], (1, 1)),
    ]
    some = []
    for _ in range(9):
        running = [(p := rng.randint(1, 12), rng.randint(1, 9), -(-p // 4)) for _ in range(rng.randint(1, 3))]
        some.append((rng.randint(9, 14), running, (rng.randint(1, 12), rng.randint(1, 12))))
    for num_blocks, running, comes in (*first, *some):
        shown = "; ".join(f"{p} + {m} tokens, {b} blocks so far" for p, m, b in running) or "nobody"
        yield Case(
            f"{num_blocks} blocks of 4 tokens, sequences of up to 20; running: {shown}. Does a prompt of {comes[0]} "
            f"with up to {comes[1]} new tokens fit?",
            lambda: bool(fits(mine, num_blocks, running, comes)),
            fits(given, num_blocks, running, comes),
        )


Asked = tuple[int, int, int]  # when it comes, its prompt, how many tokens it writes

IN_A_STEP = (
    "num_scheduled_tokens",
    "scheduled_new_reqs",
    "block_tables",
    "num_computed_tokens of each",
    "status of those that run",
    "scheduled_running_reqs",
    "finished_req_ids",
    "what each hears",
    "running afterwards",
    "free blocks",
)


def lives(scheduler: Any, asked: Sequence[Asked], aborts: dict[int, list[str]], stops: dict[str, int]) -> list:
    """Step by step: who is in it with how many tokens, who is new, who runs then, blocks in use, what each hears."""
    requests = [a_request(str(i), prompt, most, priority=i % 3) for i, (_, prompt, most) in enumerate(asked)]
    coming, told = sorted(range(len(asked)), key=lambda i: asked[i][0]), []
    for step in range(120):
        while coming and asked[coming[0]][0] <= step:
            scheduler.add_request(requests[coming.pop(0)])
        if not coming and not scheduler.has_unfinished_requests():
            break
        output = scheduler.schedule()
        admitted = [r.request_id for r in output.scheduled_new_reqs]
        in_step = dict(output.num_scheduled_tokens)
        blocks = {name: list(output.block_tables.get(name, ())) for name in in_step}
        counted = [scheduler.requests[name].num_computed_tokens for name in in_step]
        marks = [r.status.name for r in scheduler.running], [r.request_id for r in output.scheduled_running_reqs]
        forgotten = list(output.finished_req_ids)
        scheduler.finish_requests(aborts.get(step, []), RequestStatus.FINISHED_ABORTED)
        tokens = {n: [int(requests[int(n)].num_output_tokens + 1 == stops.get(n))] for n in in_step}
        heard = [
            (o.request_id, list(o.new_token_ids), o.finish_reason) for o in scheduler.update_from_output(output, tokens)
        ]
        running, free = [r.request_id for r in scheduler.running], scheduler.kv_cache_manager.block_pool.num_free_blocks
        told.append((in_step, admitted, blocks, counted, *marks, forgotten, heard, running, free))
    return told


def short(steps: Sequence[Any]) -> list:
    """Of each step, what fits into a line: who is in it with how many tokens."""
    return [row[0] for row in steps]


def side_by_side(got: Any, right: Any) -> str:
    if not isinstance(got, list) or short(got) != short(right):
        return pictures.steps(short(got), short(right)) if isinstance(got, list) else ""
    return pictures.steps(got, right, names=IN_A_STEP)


def some_days(rng: random.Random, count: int) -> list[tuple[int, int, int, list[Asked]]]:
    days = []
    for _ in range(count):
        asked = [(rng.randint(0, 6), rng.randint(1, 12), rng.randint(1, 7)) for _ in range(rng.randint(4, 8))]
        days.append((rng.randint(5, 11), rng.randint(1, 4), rng.randint(20, 24), asked))
    return days


def schedules(more: Sequence[dict[str, Any]], ends: bool) -> Callable:
    """Whole lives of a few requests, with each set of a scheduler's further arguments."""

    def cases(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
        rng = context.rng
        first = [
            (5, 2, 20, [(0, 3, 2)]),
            (9, 2, 20, [(0, 3, 1), (0, 2, 4), (0, 5, 2)]),
            (9, 3, 20, [(0, 12, 2), (0, 9, 2), (0, 1, 1)]),
            (5, 4, 20, [(0, 8, 5), (0, 8, 5), (0, 1, 1)]),
            (9, 2, 20, [(0, 2, 5), (1, 2, 2), (1, 2, 2), (4, 1, 1)]),
            (9, 4, 20, [(0, 2, 5), (1, 19, 2), (1, 2, 2)]),
            (12, 4, 20, [(0, 2, 5), (0, 2, 3), (1, 19, 1)]),
        ]
        for kind in more:
            for num_blocks, seats, budget, asked in (*first, *some_days(rng, 6)):
                names = [str(i) for i in range(len(asked))]
                aborts = {rng.randint(1, 5): rng.sample(names, 1)} if ends else {}
                stops = {name: rng.randint(1, 4) for name in names if rng.random() < 0.3}
                days = f"{num_blocks} blocks of 4 tokens, {seats} seats, {budget} tokens a step"
                if kind:
                    days += f", {', '.join(f'{name} {value}' for name, value in kind.items())}"
                comes = ", ".join(f"{i}: at step {at}, {p} + {n} tokens" for i, (at, p, n) in enumerate(asked))
                comes += f"; stop token at their so-manieth: {stops}" if stops else ""
                yield Case(
                    f"{days}; requests {comes}" + (f"; aborted while the model runs: {aborts}" if aborts else ""),
                    lambda: lives(a_scheduler(mine, num_blocks, seats, budget, **kind), asked, aborts, stops),
                    lives(a_scheduler(given, num_blocks, seats, budget, **kind), asked, aborts, stops),
                    side_by_side,
                )

    return cases


STEPS = (
    Step(
        "04.1",
        LESSON,
        "Batches that wait for their longest",
        "static_steps",
        "return the decode steps of batches of `slots` answers, taken in order, each as long as its longest.",
        "outputs[i : i + slots] is a batch, for i = 0, slots, 2 · slots, … The last one may be smaller.",
        batches_that_wait,
        first="return",
    ),
    Step(
        "04.2",
        LESSON,
        "A slot is filled as soon as it is free",
        "continuous_steps",
        "return the step after which all are done, if each answer, in order, takes the slot that is free first.",
        "Note for each slot when it is free. The next answer takes the smallest of these times and adds its own "
        "length; heapq.heapreplace(heap, x) does both on a list of zeros, which is a heap. Not the sum: slots work "
        "side by side.",
        slots_filled_at_once,
    ),
    Step(
        "04.3",
        LESSON,
        "Blocks that are missing",
        "KVCacheManager.get_num_blocks_to_allocate",
        "return how many blocks a request's table lacks to hold `num_tokens`; a request without a table has none.",
        "Round up: 5 tokens need two blocks of 4. −(−a // b) is ⌈a / b⌉ in whole numbers.",
        blocks_missing,
        first="return",
    ),
    Step(
        "04.4",
        LESSON,
        "Room for the next tokens",
        "KVCacheManager.allocate_slots",
        "make the request's table long enough for the tokens computed and `num_new_tokens` more; None if it cannot be.",
        "Ask for the number that is missing first, and look at block_pool.num_free_blocks before anything changes. The "
        "new blocks go to the end of the table, and are the answer, which may be an empty list.",
        room,
    ),
    Step(
        "04.5",
        LESSON,
        "Does one more life fit?",
        "Scheduler._fits",
        "may `request` come in, if all that run, and it, go on to their last token? No block is ever taken back.",
        "num_slots says how long a life is. What somebody already has is not missing any more, and what is missing to "
        "all of them together must be free.",
        fitting,
    ),
    Step(
        "04.6",
        LESSON,
        "What the model has said",
        "Scheduler.update_from_output",
        "append each request's token, free those that are done, and answer an EngineCoreOutput for each, in order.",
        "check_stop sets the status. A request of the step may be gone from self.requests: it was aborted while the "
        "model ran. Whoever is finished leaves `running` as well.",
        schedules([{}], ends=True),
    ),
    Step(
        "04.7",
        LESSON,
        "Who is in the next step",
        "Scheduler.schedule",
        "running requests go on by what they are behind; then the queue's head comes in, again and again, while there "
        "are a seat, budget for its whole prompt and room for its life. Nobody overtakes. What is granted counts as "
        "computed. A static scheduler admits only when nobody runs.",
        "Three parts: those in self.running, in order; the queue with peek_request, _fits and pop_request; then "
        "num_computed_tokens of everybody in output.num_scheduled_tokens. Each grant needs allocate_slots, an entry in "
        "the output and a smaller budget; who is admitted needs a place in self.running and a new status, too. The "
        "output also has finished_req_ids, which begin anew then, and block_tables: the manager's req_to_blocks.",
        schedules([{}, {"static": True}, {"policy": "priority"}], ends=True),
        plugs=(("scheduler", "Scheduler"),),
    ),
)

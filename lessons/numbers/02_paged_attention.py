"""What the page of lesson 02, `lessons/02_paged_attention.md`, simulates, quotes, draws and measures."""

from __future__ import annotations

import common
from common import triton

import argparse
import collections
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from engine import registry
from engine.model import llama, loader
from lab import figures, lengths, roofline, timing
from lab.parameters import checked

KEY = "02_paged_attention"
lesson = registry.lesson(KEY)


# --- The allocators that paging replaced ----------------------------------------------------------------------------


class FirstFit:
    """Contiguous runs of slots: a request gets the lowest hole that is large enough."""

    def __init__(self, num_slots: int) -> None:
        self.holes = [(0, num_slots)]  # (start, size), in order of address, never adjacent

    def allocate(self, size: int) -> tuple[int, int]:
        """Take `size` slots in a row. Returns (start, size taken). Raises OutOfBlocks if no hole is that large."""
        for i, (start, hole) in enumerate(self.holes):
            if hole >= size:
                self.holes[i : i + 1] = [(start + size, hole - size)] if hole > size else []
                return start, size
        largest = max((hole for _, hole in self.holes), default=0)
        raise lesson.OutOfBlocks(f"{size} slots in a row asked for, the largest hole has {largest}")

    def free(self, start: int, size: int) -> None:
        """Give a run back and merge it with the holes it touches."""
        merged: list[tuple[int, int]] = []
        for first, n in sorted([*self.holes, (start, size)]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + n)
            else:
                merged.append((first, n))
        self.holes = merged


class Buddy:
    """Runs of 2^k slots at multiples of 2^k: halved until they just fit, merged with their other half when freed.

    What the paper assumes Orca to use. A pool that is no power of two starts as the powers of two it is the sum of.
    """

    def __init__(self, num_slots: int) -> None:
        self.starts: dict[int, set[int]] = {1 << k: set() for k in range(num_slots.bit_length())}
        start = 0
        for size in reversed(self.starts):
            if num_slots & size:
                self.starts[size].add(start)
                start += size

    def allocate(self, size: int) -> tuple[int, int]:
        """As FirstFit.allocate; takes the next power of two."""
        wanted = triton.next_power_of_2(size)
        found = min((n for n, starts in self.starts.items() if n >= wanted and starts), default=None)
        if found is None:
            raise lesson.OutOfBlocks(f"{wanted} slots in a row asked for, and no free buddy is that large")
        start = min(self.starts[found])
        self.starts[found].remove(start)
        while found > wanted:  # keep the lower half, free the upper one
            found //= 2
            self.starts[found].add(start + found)
        return start, wanted

    def free(self, start: int, size: int) -> None:
        while start ^ size in self.starts.get(size, ()):  # the other half is free as well: one run of twice the size
            self.starts[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self.starts[size].add(start)


class Reservation:
    """What a contiguous allocator gives a request: all the slots it may ever need. (Paging gives a BlockTable.)"""

    def __init__(self, memory: FirstFit | Buddy, size: int) -> None:
        self.memory = memory
        self.start, self.capacity = memory.allocate(size)

    def append(self, n: int) -> None:
        """More tokens move into slots that were set aside for them."""

    def free(self) -> None:
        self.memory.free(self.start, self.capacity)


MAX_MODEL_LEN = 2048  # OPT-13B's context, and what a reservation without knowledge has to assume

# How a contiguous allocator places a request and how much it reserves: the paper's three versions of Orca on buddies,
# and the one that knows every length placed without rounding up.
POLICIES = {
    "Max": (Buddy, lambda prompt, output: MAX_MODEL_LEN),
    "Pow2": (Buddy, lambda prompt, output: min(MAX_MODEL_LEN, prompt + triton.next_power_of_2(output))),
    "Oracle": (Buddy, lambda prompt, output: prompt + output),
    "First-fit": (FirstFit, lambda prompt, output: prompt + output),
    "Paged": (lesson.BlockPool, lambda prompt, output: prompt),
}


def request_lengths(workload: str, n: int, seed: int = 0) -> list[tuple[int, int]]:
    """`n` (prompt, output) lengths: geometric with the published means (lesson 01), at most 2,048 in sum."""
    rng, means = random.Random(seed), lengths.WORKLOADS[workload]
    pairs = ([lengths.geometric(rng, mean) for mean in means] for _ in range(n))
    pairs = ((min(prompt, MAX_MODEL_LEN // 2), output) for prompt, output in pairs)
    return [(prompt, min(output, MAX_MODEL_LEN - prompt)) for prompt, output in pairs]


def contest(
    policy: str, lengths: Sequence[tuple[int, int]], num_slots: int, steps: int, block_size: int = 16
) -> dict[str, float]:
    """Serve a queue that never empties, first come first served; every running request writes one token per step.

    A request is admitted when its reservation (paging: what it holds already) fits. When paging runs out of blocks, the
    youngest gives its own back and waits at the head of the queue. Returns means over the last three quarters of the
    steps: requests in the batch; shares of all slots that hold tokens, that will (`reserved`), that never will
    (`internal`) and that nobody has (`external`); and the preemptions per request served.
    """
    kind, reserve = POLICIES[policy]
    memory = kind(num_slots // block_size if kind is lesson.BlockPool else num_slots)
    queue = collections.deque(SimpleNamespace(final=p + o, tokens=p, reserved=reserve(p, o)) for p, o in lengths)
    running: list[SimpleNamespace] = []
    sums, preempted, served = collections.Counter(), 0, 0
    for step in range(steps):
        while True:
            job = queue[0]
            try:
                job.place = place(memory, job.tokens, job.reserved, block_size)
            except lesson.OutOfBlocks:
                break
            running.append(queue.popleft())
        i = 0
        while i < len(running):
            try:
                running[i].place.append(1)
                running[i].tokens += 1
                i += 1
            except lesson.OutOfBlocks:
                victim = running.pop()  # the youngest; then try again, unless that was this one
                victim.place.free()
                queue.appendleft(victim)
                preempted += 1
        if step >= steps // 4:
            tokens = sum(job.tokens for job in running)
            used = sum(min(job.final, job.place.capacity) for job in running)
            never = sum(job.place.capacity for job in running) - used
            sums.update(batch=len(running), tokens=tokens, reserved=used - tokens, internal=never)
        for job in running:
            if job.tokens == job.final:
                served += 1
                job.place.free()
        running = [job for job in running if job.tokens < job.final]
    steps -= steps // 4
    shares = {key: sums[key] / (steps * num_slots) for key in ("tokens", "reserved", "internal")}
    return {
        "batch": sums["batch"] / steps,
        **shares,
        "external": 1 - sum(shares.values()),
        "preemptions": preempted / max(1, served),
    }


def place(
    memory: lesson.BlockPool | FirstFit | Buddy, tokens: int, reserved: int, block_size: int
) -> lesson.BlockTable | Reservation:
    """Admit a request: paging takes blocks for what it holds, the others what it may ever need. Raises OutOfBlocks."""
    if not isinstance(memory, lesson.BlockPool):
        return Reservation(memory, reserved)
    table = lesson.BlockTable(memory, block_size)
    table.append(tokens)
    return table


def sharing(n: int, lengths: Sequence[tuple[int, int]], block_size: int = 16) -> float:
    """Share of blocks that parallel sampling saves, from block tables alone: each prompt forked n − 1 times, then one
    token per sample and step (all samples of a prompt equally long). Counted like `Run.saved`, over all requests."""
    used = entries = 0
    for prompt, output in lengths:
        pool = lesson.BlockPool(2 + n * (prompt + output))
        tables = [place(pool, prompt, 0, block_size)]
        tables += [tables[0].fork() for _ in range(n - 1)]
        for _ in range(output - 1):  # the last token's keys and values are never stored
            for table in tables:
                table.append(1)
            used += pool.num_blocks - 1 - pool.num_free_blocks
            entries += sum(len(table.blocks) for table in tables)
    return 1 - used / entries


# --- The simulation: one table that grows, among others -------------------------------------------------------------

ALLOCATORS = ("paged", "contiguous", "first-fit")
ROOM, LONGEST = 512, 64  # slots in all; the tokens that any request may reach
WIDGET_DEFAULT = {"allocator": "paged", "block_size": 4, "fork": False, "finish": False}
WIDGET_CHOICES = {
    "allocator": ALLOCATORS,
    "block_size": [1 << k for k in range(7)],
    "fork": [False, True],
    "finish": [False, True],
}


def arrivals() -> list[tuple[str, int]]:
    """40 requests of 4 to 32 tokens, by Lehmer's random numbers, which are exact in JavaScript as well."""
    requests, x = [], 1
    for i in range(40):
        x = x * 16807 % 2147483647
        requests.append((str(i + 1), 4 + x % 29))
    return requests


def widget_events(fork: bool, finish: bool) -> list[tuple[str, Any]]:
    """("arrive", requests), ("first", request), ("grow", (name, tokens)), ("fork", name), or ("finish", names).

    A request is (name, tokens now, tokens in the end).
    """
    others = [(name, n, n) for name, n in arrivals()]
    events: list[tuple[str, Any]] = [("arrive", [("A", 10, LONGEST)])]
    for i in range(8):
        events += [("arrive", others[i : i + 1]), ("grow", ("A", 6))]
        events += [("finish", ["2"])] * (i == 3)
    if fork:
        events += [("fork", "A"), ("grow", ("B", 1)), ("grow", ("A", 1))]
    events.append(("arrive", others[8:]))
    if finish:
        events += [("finish", [name for name, _, _ in others[::2]]), ("first", ("L", 40, 40))]
    return events


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """A grows among 40 requests that arrive, first come, first served; an allocator places them. JSON to JSON.

    params: as WIDGET_CHOICES lists them. `fork`: B begins as a copy of A. `finish`: in the end every second request
    leaves, and L, of 40 tokens, comes and is the first in the queue. Returns a step for each admission, growth, fork
    and finish, and for each of them that found no room (`why`). A step holds the whole memory after it: `places` lists
    [request, tokens, slots of a unit, first slot of each unit], a unit being a block or a reservation; `queue` lists
    the blocks that will be taken next, `copied` [source, target] of a block. Raises InputError.
    """
    params = checked(params, WIDGET_CHOICES)
    paged, size = params["allocator"] == "paged", params["block_size"]
    memory = lesson.BlockPool(ROOM // size) if paged else FirstFit(ROOM)
    places: dict[str, lesson.BlockTable | Reservation] = {}
    length: dict[str, int] = {}
    waiting: collections.deque[tuple[str, int, int]] = collections.deque()
    steps: list[dict[str, Any]] = []
    moved = 0  # slots that were copied

    def record(event: str, request: str, tokens: int, copied: list[int] | None = None, why: object = "") -> None:
        holes = [memory.num_free_blocks * size] if paged else [hole for _, hole in memory.holes]
        rows, held = [], set()
        for name, where in places.items():
            starts = [block * size for block in where.blocks] if paged else [where.start]
            unit = size if paged else where.capacity
            rows.append([name, length[name], unit, starts])
            held.update([start + i for start in starts for i in range(unit)][: length[name]])
        state = {
            "running": len(places),
            "waiting": len(waiting),
            "tokens": len(held),
            "taken": ROOM - (size if paged else 0) - sum(holes),
            "free": sum(holes),
            "largest_fit": max(holes, default=0),
            "copied": moved,
        }
        queue = list(memory.free_queue)[:16] if paged else []
        steps.append(
            {"event": event, "request": request, "tokens": tokens, "copied": copied, "why": str(why)}
            | {"queue": queue, "places": rows, "state": state}
        )

    blocked = False  # there was no room for the queue's head when it was last looked at
    for event, what in widget_events(params["fork"], params["finish"]):
        if event == "arrive":
            waiting.extend(what)
            blocked = False
        elif event == "first":
            waiting.appendleft(what)
            blocked = False
        elif event == "grow" and what[0] in places:
            name, more = what
            try:
                copies = places[name].append(more) or []
                length[name] += more
                moved += size * len(copies)
                record("grow", name, more, list(copies[0]) if copies else None)
            except lesson.OutOfBlocks as error:
                record("grow", name, more, None, error)
        elif event == "fork":
            try:
                places["B"] = places["A"].fork() if paged else Reservation(memory, LONGEST)
                length["B"] = length["A"]
                moved += 0 if paged else length["A"]
                record("fork", "B", length["B"])
            except lesson.OutOfBlocks as error:
                record("fork", "B", length["A"], None, error)
        elif event == "finish":
            left = [name for name in what if name in places]
            for name in left:
                places.pop(name).free()
            record("finish", " ".join(left), sum(length.pop(name) for name in left))
        while waiting and not blocked:
            name, tokens, final = waiting[0]
            try:
                places[name] = place(memory, tokens, LONGEST if params["allocator"] == "contiguous" else final, size)
                length[name] = tokens
                waiting.popleft()
                record("admit", name, tokens)
            except lesson.OutOfBlocks as error:
                record("admit", name, tokens, None, error)
                blocked = True
    return {"params": params, "null_slots": size if paged else 0, "steps": steps, "final": steps[-1]["state"]}


def describe(trace: dict[str, Any]) -> str:
    """The end of a simulation as text: A's table, a strip of memory, and what is in it."""
    params, end, last = trace["params"], trace["final"], trace["steps"][-1]
    paged, size = params["allocator"] == "paged", params["block_size"]
    slots: dict[int, bool] = {}  # slot -> does it hold a token?
    for _, tokens, unit, starts in last["places"]:
        for i, slot in enumerate(start + j for start in starts for j in range(unit)):
            slots[slot] = slots.get(slot, False) or i < tokens
    taken = collections.Counter(slot // 8 for slot in slots)  # per 64th of the memory
    held = collections.Counter(slot // 8 for slot, full in slots.items() if full)
    strip = (
        "." if t == 0 else "-" if 2 * h < t else "+" if h < 8 else "#"
        for t, h in ((taken[i], held[i]) for i in range(64))
    )
    tables = [
        f"{name}, {tokens} tokens: "
        + (f"blocks {' '.join(str(s // size) for s in starts)}" if paged else f"{unit} slots from {starts[0]}")
        for name, tokens, unit, starts in last["places"]
        if name in ("A", "B")
    ]
    refused = [s for s in trace["steps"] if s["why"]]
    could = {"admit": "has to wait", "grow": "cannot grow", "fork": "cannot be forked from A"}
    blocks = f", blocks of {size}" if paged else ""
    return "\n".join(
        [
            f"{params['allocator']}{blocks}, {ROOM} slots: A grows among 40 requests of 4 to 32 tokens",
            *tables,
            f"[{''.join(strip)}]",
            "# all tokens   + at least half of what is taken   - less   . free",
            f"running {end['running']}, waiting {end['waiting']}; tokens {end['tokens']}, taken {end['taken']} "
            f"(wasted {end['taken'] - end['tokens']}), copied {end['copied']}",
            f"free {end['free']}, and the largest request that fits is {end['largest_fit']}",
            *(f"{s['request']} {could[s['event']]}: {s['why']}" for s in refused[-1:]),
        ]
    )


# --- Facts and figures ----------------------------------------------------------------------------------------------

# Kwon et al. 2023: share of memory that holds tokens (figure 2) and requests in the batch (§6.2, ShareGPT, 2 req/s);
# blocks saved by sharing on Alpaca (figure 15).
PAPER = {"Max": (0.204, 7.00), "Pow2": (0.268, 9.81), "Oracle": (0.382, 13.62), "Paged": (0.963, 30.42)}
PAPER_SAVED = {"parallel": {2: 0.0609, 4: 0.0853, 6: 0.0979}, "beam": {2: 0.3756, 4: 0.5313, 6: 0.5516}}


def story() -> dict[str, Any]:
    """Ten blocks of four slots: A and B are prompts of 6 and 3 tokens, C is forked from A, then all three grow."""
    pool = lesson.BlockPool(10)
    a, b = lesson.BlockTable(pool, 4), lesson.BlockTable(pool, 4)
    a.append(6), b.append(3)
    c = a.fork()
    copies = [list(pair) for table, n in ((a, 1), (c, 4), (b, 6)) for pair in table.append(n)]
    tables = {name: {"blocks": t.blocks, "tokens": t.num_tokens} for name, t in (("A", a), ("B", b), ("C", c))}
    return {"tables": tables, "ref_count": pool.ref_count, "copies": copies}


@functools.cache
def facts() -> dict[str, Any]:
    """What the text quotes and can be computed without a model."""
    chats = lesson.short_chats()
    sweep = {f"block_{1 << k}": lesson.admitted(1 << k, 16384, chats) for k in range(12)}
    changes = {"paged": {}, "block_64": {"block_size": 64}, "contiguous": {"allocator": "contiguous"}}
    changes["holes"] = {"allocator": "first-fit", "finish": True}
    runs = {name: simulate(WIDGET_DEFAULT | change) for name, change in changes.items()}
    opt, llama_8b = (roofline.KVCacheSpec.from_config(roofline.MODELS[name]) for name in ("OPT-13B", "Llama-3.1-8B"))
    opt_slots = 12 * 2**30 // opt.bytes_per_token()  # what the weights leave of an A100 with 40 GB
    share_gpt, alpaca = request_lengths("ShareGPT", 1500), request_lengths("Alpaca", 100)
    block = 16 * llama_8b.bytes_per_token() // llama_8b.num_layers
    return {
        "story": story(),
        "sweep": {name: {"running": running, "wasted": wasted} for name, (running, wasted) in sweep.items()},
        "widget": {name: run["final"] | {"next": run["steps"][-1]["tokens"]} for name, run in runs.items()},
        "opt_slots": opt_slots,
        "contest": {policy: contest(policy, share_gpt, opt_slots, 6000) for policy in POLICIES},
        "sharing": {f"parallel_{n}": sharing(n, alpaca) for n in PAPER_SAVED["parallel"]},
        # One layer's block of 16 tokens and its table entry, which the program of every KV head reads for itself.
        "bytes": {"block": block, "entry": 4, "stored": 4 / block, "read": 4 * llama_8b.num_kv_heads / block},
    }


def draw(folder: str | Path) -> list[Path]:
    """The figures, from `facts()` alone."""
    f, color = facts(), figures.COLORS
    # Block tables above, physical memory below, a line from each entry to its block.
    figure, ax = figures.new_figure(8, 3.2)
    owner_color = {"A": color["blue"], "B": color["orange"], "C": color["green"]}
    owners, filled = collections.defaultdict(str), [0] * 10
    for (name, table), left in zip(f["story"]["tables"].items(), (0.5, 6.5, 14.0)):
        ax.text(left - 0.75, 6.3, f"block table of {name}, {table['tokens']} tokens", color=owner_color[name])
        for i, block in enumerate(table["blocks"]):
            x = left + 1.5 * i
            ax.bar(x, 1.1, 1.5, 4.9, color="white", edgecolor=owner_color[name], linewidth=1.5)
            ax.text(x, 5.45, str(block), ha="center", va="center")
            ax.plot([x, 2 * block + 1], [4.85, 2.25], color=owner_color[name], linewidth=1.3)
            owners[block] += name
            filled[block] = min(4, table["tokens"] - 4 * i)
    for block in range(10):
        who = owners.get(block, "")
        shade = color["purple"] if len(who) > 1 else owner_color.get(who, color["light"])
        slots = [shade] * filled[block] + [color["light"]] * (4 - filled[block])
        ax.bar([2 * block + 0.34 + 0.44 * i for i in range(4)], 1.2, 0.4, 1.0, color=slots)
        count = f["story"]["ref_count"][block]
        note = "null" if block == 0 else "free" if not who else f"{count} owner{'s' * (count > 1)}"
        ax.text(2 * block + 1, 0.75, f"{block}\n{note}", ha="center", va="top", fontsize=9)
    ax.set(xlim=(-0.4, 20.2), ylim=(-0.5, 7))
    ax.axis("off")
    paths = [figures.save_figure(figure, folder, "02_block_tables")]
    # What the memory is filled with.
    figure, ax = figures.new_figure(8, 3.1)
    left = [0.0] * len(POLICIES)
    parts = {"tokens": "blue", "reserved": "green", "internal": "orange", "external and other": "light"}
    for part, shade in parts.items():
        widths = [f["contest"][policy][part.split()[0]] for policy in POLICIES]
        ax.barh(list(POLICIES), widths, left=left, color=color[shade], label=part)
        left = [a + b for a, b in zip(left, widths)]
    known = {policy: share for policy, (share, _) in PAPER.items()}
    ax.plot(list(known.values()), list(known), "D", color=color["ink"], label="paper: tokens")
    for policy in POLICIES:
        ax.text(1.015, policy, f"{f['contest'][policy]['batch']:.1f} requests", va="center", fontsize=9)
    ax.set(xlim=(0, 1), xlabel="share of all KV slots")
    ax.invert_yaxis()
    ax.legend(ncols=5, loc="lower left", bbox_to_anchor=(-0.14, 1.0), fontsize=9, columnspacing=1.2)
    return [*paths, figures.save_figure(figure, folder, "02_contest")]


# --- Measured: a batch, n samples of one prompt, beams --------------------------------------------------------------
#
# One loop for all three. In each step every sequence has a parent and a new token: in a batch and among samples it
# continues itself, a beam continues whatever scored best. All that differs is
# `select(log probabilities [sequences, vocab]) -> (parents, tokens)`.

Select = Callable[[torch.Tensor], tuple[Sequence[int], list[int]]]


def greedy(logp: torch.Tensor) -> tuple[Sequence[int], list[int]]:
    """Every sequence continues itself with the most probable token."""
    return range(len(logp)), logp.argmax(-1).tolist()


def sampling(n: int, seed: int = 0) -> Select:
    """`n` independent samples at temperature 1: all start from the prompt, then each goes its own way."""
    generators = [torch.Generator().manual_seed(seed + i) for i in range(n)]

    def select(logp: torch.Tensor) -> tuple[Sequence[int], list[int]]:
        parents = [0] * n if len(logp) == 1 else range(n)
        p = logp.exp().cpu()
        return parents, [int(p[i].multinomial(1, generator=g)) for i, g in zip(parents, generators)]

    return select


def beams(width: int) -> Select:
    """Keep the `width` most probable sequences. A token that ends the text is taken like any other."""
    scores: torch.Tensor | float = 0.0  # log probability of each beam [beams, 1]

    def select(logp: torch.Tensor) -> tuple[Sequence[int], list[int]]:
        nonlocal scores
        best, index = (scores + logp).flatten().topk(width)
        scores = best[:, None]
        return (index // logp.shape[1]).tolist(), (index % logp.shape[1]).tolist()

    return select


@dataclasses.dataclass
class Run:
    """What the prompts became, and after each step the blocks that the sequences held."""

    token_ids: list[list[int]]
    blocks: list[int]  # distinct physical blocks
    table_entries: list[int]  # blocks if each entry of each table had its own
    copied_blocks: int

    @property
    def saved(self) -> float:
        """As the paper counts it: blocks saved by sharing / blocks without sharing, over all steps."""
        return 1 - sum(self.blocks) / sum(self.table_entries)


def decode(
    model: llama.Llama,
    prompts: Sequence[Sequence[int]],
    select: Select,
    max_tokens: int,
    num_blocks: int,
    block_size: int,
    share: bool = True,
) -> Run:
    """Decode prompts, all together, into the sequences that `select` asks for. Those with the same past share blocks
    or, naively, have private copies. Raises OutOfBlocks."""
    cache, pool = lesson.PagedKVCache(model, num_blocks, block_size), lesson.BlockPool(num_blocks)
    tables, new = [lesson.BlockTable(pool, block_size) for _ in prompts], prompts
    run = Run([[] for _ in prompts], [], [], 0)
    for _ in range(max_tokens):
        parents, tokens = select(lesson.run_step(model, cache, tables, new).float().log_softmax(-1))
        for p, table in enumerate(tables):
            if p not in parents:  # nobody continues this beam
                table.free()
        # A parent's first child inherits its table, the others fork it.
        tables = [fork(cache, tables[p], share) if p in parents[:i] else tables[p] for i, p in enumerate(parents)]
        run.token_ids = [[*run.token_ids[p], token] for p, token in zip(parents, tokens)]
        run.blocks.append(len({block for table in tables for block in table.blocks}))
        run.table_entries.append(sum(len(table.blocks) for table in tables))
        new = [[token] for token in tokens]
    for table in tables:
        table.free()
    pool.check()
    assert pool.num_free_blocks == num_blocks - 1, "blocks leaked"
    run.copied_blocks = cache.copied_blocks
    return run


def fork(cache: lesson.PagedKVCache, table: lesson.BlockTable, share: bool) -> lesson.BlockTable:
    """A sequence with the same past: by sharing its blocks, or by copying each of them."""
    if share:
        return table.fork()
    child = lesson.BlockTable(table.pool, table.block_size)
    child.append(table.num_tokens)
    cache.copy_blocks(list(zip(table.blocks, child.blocks)))
    return child


def contiguous_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """What a table costs is measured against: full sequences in a contiguous cache.

    On a GPU lesson 01's kernel, which is tiled like this lesson's and knows no table: torch's own would differ in more
    than that. It is loaded here and for nothing else. On a CPU torch's.
    Shapes: q [B, Hq, D], k, v [B, S, Hkv, D], seq_lens [B], all S -> [B, Hq, D].
    """
    (B, Hq, D), (S, Hkv) = q.shape, k.shape[1:3]
    if common.runs_kernel(q):
        return registry.lesson("01_kv_cache").decode_attention(q, k, v, seq_lens, S)
    # A group's heads are rows of one query, as in the kernel: keys are read once.
    o = F.scaled_dot_product_attention(q.reshape(B, Hkv, Hq // Hkv, D), k.transpose(1, 2), v.transpose(1, 2))
    return o.reshape(B, Hq, D)


def measure_indirection(
    cases: Iterable[tuple[int, int, int]], Hq: int, Hkv: int, D: int, dtype: torch.dtype, seconds: float
) -> list[dict[str, Any]]:
    """Decode attention for (B, S, block_size): through shuffled blocks; through one block per sequence, which is a
    contiguous cache read by the same code; and by `contiguous_attention`. Seconds."""
    rows = []
    for B, S, block_size in cases:
        row: dict[str, Any] = {"B": B, "S": S, "block_size": block_size}
        for name, size in (("paged", block_size), ("one_block", S)):
            case = lesson.random_case([S] * B, size, Hq, Hkv, D, dtype)
            row[name] = timing.measure_graph(functools.partial(lesson.paged_decode, *case, S), seconds).median
        k, v = torch.randn(2, B, S, Hkv, D, device=common.device()).to(dtype)
        contiguous = functools.partial(contiguous_attention, case[0], k, v, case[3])
        row["contiguous"] = timing.measure_graph(contiguous, seconds).median
        row["gbps"] = 2 * k.nbytes / row["paged"] / 1e9
        rows.append(row | {"ratio": row["paged"] / row["contiguous"], "to_one_block": row["paged"] / row["one_block"]})
    return rows


# What the beams continue.
QUESTIONS = [
    "What are the three primary colors?",
    "Say hello.",
    "Describe the structure of an atom, and how large its nucleus is compared with the whole.",
    "Write a short story about a small brave boat.",
]
MAX_TOKENS = 58  # as long as Alpaca's answers


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Through a table against contiguous, and what beams save on the real model: printed and returned."""
    model, tokenizer = loader.load(args.model)
    prompts = [tokenizer.ask(question) for question in QUESTIONS]
    loader.check_context(args.model, max(map(len, prompts)) + MAX_TOKENS)
    copy = timing.copy_bandwidth()
    if common.HAS_GPU:
        cases = [(32, S, 16) for S in (1024, 4096, 16384)] + [(32, 4096, n) for n in (8, 32, 128)] + [(1, 65536, 16)]
        rows = measure_indirection(cases, 32, 8, 128, torch.bfloat16, 0.3)
    else:
        cases = [(32, 192, n) for n in (8, 16, 64)] + [(32, 1024, 16)]
        rows = measure_indirection(cases, 9, 3, 64, torch.float32, 1.5)
    shown = []
    for r in rows:
        ms = [f"{r[name] * 1e3:.3f}" for name in ("paged", "one_block", "contiguous")]
        rate = [f"{r['to_one_block']:.2f}", f"{r['gbps']:.1f}", f"{r['gbps'] / copy * 1e9:.0%}"]
        shown.append([r["B"], r["S"], r["block_size"], *ms, *rate])
    common.heading("What the table costs, and what beams share")
    other = "lesson 01's" if common.HAS_GPU else "SDPA"
    common.table(["B", "S", "block", "paged, ms", "one block", other, "paged : one block", "GB/s", "of copy"], shown)
    saved = {}
    for width, paper in PAPER_SAVED["beam"].items():
        runs = [decode(model, [prompt], beams(width), MAX_TOKENS, 1024, 16) for prompt in prompts]
        saved[f"beam_{width}"] = 1 - sum(sum(r.blocks) for r in runs) / sum(sum(r.table_entries) for r in runs)
        common.say(f"beam search, width {width}: {saved[f'beam_{width}']:.1%} of blocks saved (paper {paper:.1%})")
    return {"indirection": rows, "sharing": saved, "copy_bandwidth": copy}

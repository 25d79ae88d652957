"""Lesson 12's steps: the naive sum, who leaves a slot, the queue, batched products on a CPU, and the four kernels.

Owns their cases; called by the grader. It never grades.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from engine.lora import lora_model
from engine.lora.layers import NONE, LoRAKernelMeta
from engine.lora.lora_model import LayerShape, LoRAModel
from engine.lora.memory import LoRATables, SlotMemory
from engine.model import llama
from learn import pictures
from learn.step import Case, Context, Step

LESSON = "12_multi_lora"


# --- Adapters ---------------------------------------------------------------------------------------------------------

Pairs = list[tuple[torch.Tensor, torch.Tensor] | None]  # of each slice, A [rank, in] and B [out, rank]


def adapters(context: Context, ranks: list[list[int]], shape: LayerShape) -> list[Pairs]:
    """ranks[slot][slice]; 0: that slice has no adapter."""
    return [
        [
            (context.randn(rank, shape.in_features), context.randn(width, rank)) if rank else None
            for rank, width in zip(row, shape.slices)
        ]
        for row in ranks
    ]


def summed(y: torch.Tensor, x: torch.Tensor, of_row: list[Pairs | None], shape: LayerShape) -> torch.Tensor:
    """y + B (A x), a number at a time, in fp64."""
    out = y.double()
    for t, pairs in enumerate(of_row):
        for i, pair in enumerate(pairs or []):
            start = sum(shape.slices[:i])
            for c in range(shape.slices[i] if pair is not None else 0):
                assert pair is not None
                out[t, start + c] += float(pair[1][c].double() @ (pair[0].double() @ x[t].double()))
    return out


def one_by_one(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    for ranks, slots, shape in [
        ([[1]], [0], LayerShape(2, (2,))),
        ([[2, 2], [1, 0]], [0, NONE, 1], LayerShape(3, (4, 2))),
        ([[2, 1, 2], [0, 3, 0], [1, 1, 4]], [2, 0, 1, NONE, 2], LayerShape(5, (4, 2, 3))),
    ]:
        loras = adapters(context, ranks, shape)
        of_row = [None if slot == NONE else loras[slot] for slot in slots]
        x, y = context.randn(len(slots), shape.in_features), context.randn(len(slots), sum(shape.slices))
        yield Case(
            f"{shape.in_features} inputs, slices of {list(shape.slices)}; rows of adapters {slots} (−1: none), ranks "
            f"of their slices {ranks} (0: none)",
            lambda: mine.add_lora_reference(y, x, of_row, shape).float(),
            summed(y, x, of_row, shape).float(),
            lambda got, right: pictures.grid(got, right, "rows", "outputs"),
        )


# --- Slots ------------------------------------------------------------------------------------------------------------


def residents(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    def lives(module: ModuleType, places: int, calls: list[tuple[str, str]]) -> list:
        slots, told = module.Slots(places), []
        for adapter, in_use in calls:
            answer = slots.make_resident(adapter, set(in_use))
            told.append((adapter, answer, dict(slots.places), slots.loads))
        return told

    rng = context.rng
    some = [
        [(rng.choice("ABCDE"), "".join(rng.sample("ABCDE", rng.randint(0, 3)))) for _ in range(14)] for _ in range(4)
    ]
    for places, calls in [
        (2, [("A", ""), ("B", ""), ("C", "")]),
        (2, [("A", ""), ("B", ""), ("A", ""), ("C", "")]),
        (2, [("A", ""), ("B", ""), ("C", "A"), ("D", "AC")]),
        (1, [("A", ""), ("B", "A"), ("A", "A"), ("B", "")]),
        *((3, calls) for calls in some),
    ]:
        yield Case(
            f"{places} places; (wanted, in use) one after the other: {calls}; after each: is it there, who is where "
            "(used longest ago first), the loads",
            lambda: lives(mine, places, calls),
            lives(given, places, calls),
            lambda got, right: pictures.steps(got, right),
        )


def queues(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    def admitted(module: ModuleType, wants: str, running: list[int], places: int, seats: int, pass_over: bool) -> list:
        slots, going = module.Slots(places), list(running)
        for request in running:
            slots.make_resident(wants[request])
        waiting = deque(request for request in range(len(wants)) if request not in running)
        module.admit(going, waiting, wants, slots, seats, pass_over)
        return [going, list(waiting), dict(slots.places)]

    rng = context.rng
    some = []
    for _ in range(5):
        places = rng.randint(1, 3)
        wants = "".join(rng.choices("ABCD", k=9))
        running = [i for i in range(9) if len(set(wants[: i + 1])) <= places][: rng.randint(0, 3)]
        some.append((wants, running, places, rng.randint(1, 8)))
    for wants, running, places, seats in [
        ("AB", [0], 1, 4),
        ("ABAB", [], 1, 4),
        ("ABACB", [0], 2, 8),
        ("AAAA", [0], 1, 3),
        ("ABCABC", [0], 2, 4),
        *some,
    ]:
        for pass_over in (True, False):
            yield Case(
                f"requests 0, 1, … want {wants}; {running} run; {places} places, {seats} seats; a request without a "
                f"place {'is passed over' if pass_over else 'stops the queue'}: who runs, who waits, who has a place",
                lambda: admitted(mine, wants, running, places, seats, pass_over),
                admitted(given, wants, running, places, seats, pass_over),
            )


# --- Products ---------------------------------------------------------------------------------------------------------


def batched(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """On the CPU's path, wherever we are; in slots: equal to row by row."""
    cpu = torch.device("cpu")
    model = llama.random_model(context.rng.randrange(1 << 16), device=cpu, hidden_size=16, intermediate_size=24)
    memory, targets = SlotMemory(model, 3, 6), [("k_proj",), lora_model.TARGETS, ("q_proj", "v_proj", "down_proj")]
    loras: list[LoRAModel] = []
    for slot, (rank, on) in enumerate(zip((2, 4, 6), targets)):
        loras.append(lora_model.random_adapter(model.config, rank, seed=context.rng.randrange(1 << 16), targets=on))
        memory.write(slot, loras[-1])
    mixed = [context.rng.choice([NONE, 0, 1, 2]) for _ in range(9)]
    for kind, slots in [
        ("o_proj", [0]),
        ("qkv_proj", [0, 0, 0]),
        ("qkv_proj", [1, NONE, 0, 1]),
        ("gate_up_proj", [1, 0, 2, 1]),  # only adapter 1 is on this layer
        ("qkv_proj", [*mixed, 2]),
    ]:
        shape = memory.shapes[kind]
        x, y = (context.randn(len(slots), width).to(cpu) for width in (shape.in_features, sum(shape.slices)))
        meta = LoRAKernelMeta.build(slots, cpu)
        of_row: list[Any] = [None if s == NONE else loras[s].weights.get(f"layers.1.{kind}") for s in slots]
        yield Case(
            f"{kind}, rows of adapters {slots} (−1: none)",
            lambda: mine.add_lora(y.clone(), x, memory, 1, kind, meta),
            summed(y, x, of_row, shape).float(),
            lambda got, right: pictures.grid(got, right, "rows", "outputs"),
        )


def scattered(context: Context, loras: list[Pairs], shape: LayerShape, most: int) -> tuple[torch.Tensor, LoRATables]:
    """(pages, tables): rows of A and Bᵀ anywhere, in no order, and NaN between them."""
    tables = LoRATables.empty(shape, len(loras), most, context.device)
    rows = []
    for slot, pairs in enumerate(loras):
        for i, pair in enumerate(pairs):
            for r in range(0 if pair is None else len(pair[0])):
                assert pair is not None
                rows += [(tables.a_rows, slot, i, r, pair[0][r]), (tables.b_rows, slot, i, r, pair[1][:, r])]
            tables.ranks[slot, i] = 0 if pair is None else len(pair[0])
    context.rng.shuffle(rows)
    parts, place = [torch.full((16,), math.nan)], 16
    for table, slot, i, r, values in rows:
        table[slot, i, r] = place
        gap = -len(values) % 16 + 16 * context.rng.randint(0, 1)
        parts += [values.cpu(), torch.full((gap,), math.nan)]
        place += len(values) + gap
    return context.fence(torch.cat(parts)), tables


KERNEL_BATCHES = [
    ([[1]], 16, (16,), [0]),
    ([[2, 3], [1, 0]], 20, (24, 8), [1, NONE, 0]),
    ([[4, 20, 1], [0, 3, 16], [17, 1, 0]], 48, (40, 8, 24), [2, NONE, 0]),
    ([[3, 1], [2, 18]], 300, (272, 16), [1, 0]),
]


def kernel_cases(name: str) -> Callable:
    """y += (x Aᵀ) Bᵀ by `bgmv` or `sgmv`; where an adapter has several rows, they stand in no order."""

    def cases(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
        for ranks, width, slices, slots in KERNEL_BATCHES:
            shape = LayerShape(width, slices)
            loras = adapters(context, ranks, shape)
            if name == "sgmv":
                slots = [*slots, *(context.rng.choice(slots) for _ in range(4)), *slots[:1] * 14]
                context.rng.shuffle(slots)
            meta = LoRAKernelMeta.build(slots, context.device)
            most = max(max(row) for row in ranks)
            pages, tables = scattered(context, loras, shape, most)
            x = context.fence(context.randn(len(slots), width) * 3)
            y = context.randn(len(slots), sum(slices))
            of_row = [None if slot == NONE else loras[slot] for slot in slots]
            right = summed(y, x, of_row, shape).float()

            def add() -> torch.Tensor:
                getattr(mine, name)(y, x, pages, tables, meta)
                return y

            yield Case(
                f"{width} inputs, slices of {list(slices)}, rows of adapters {slots} (−1: none), ranks of their slices "
                f"{ranks} (0: none)",
                add,
                right,
                lambda got, right: pictures.grid(got, right, "rows", "outputs"),
            )

    return cases


REFERENCES = ("add_lora_reference",)

STEPS = (
    Step(
        "12.1",
        LESSON,
        "The naive sum",
        "add_lora_reference",
        "add to row t, in the columns of this slice, what its adapter makes of x[t]: A [rank, in], then B [out, rank].",
        "The slice has the columns start … start + width. Compute in fp64, as `out` is: x[t] needs to be told so.",
        one_by_one,
        first="out[t, start",
    ),
    Step(
        "12.2",
        LESSON,
        "Who leaves",
        "Slots.make_resident",
        "`victim`: of the adapters that nobody uses now, the one that was used longest ago; None if there is none.",
        "`places` is in that order already: used longest ago first.",
        residents,
        first="victim = next(",
    ),
    Step(
        "12.3",
        LESSON,
        "The queue, with places",
        "admit",
        "admit from the head while there are seats. Who has no place keeps its position; without pass_over, all stop.",
        "Take each request off the queue, and put the ones that were passed over back in front, in their order. "
        "Places of running requests' adapters, those just admitted too, are in use.",
        queues,
    ),
    Step(
        "12.4",
        LESSON,
        "Many adapters, one batch",
        "add_lora",
        "for each adapter's segment of rows: two products, and into `added` in the columns of each slice.",
        "memory.layer(slot, layer, kind) is None or (A of all adapted slices, one below the other, [(first column, "
        "last, Bᵀ) …]). One product with A serves all slices; its columns, in equal chunks, belong to one slice each.",
        batched,
        first="for slot, start, stop",
        forbidden=REFERENCES,
        plugs=(("lora", "add_lora"),),
    ),
    Step(
        "12.5",
        LESSON,
        "Shrink, a row at a time",
        "bgmv_shrink_kernel",
        "a program per (row, slice, tile of inputs): h [splits, slices, N, MAX_RANK] gets its part of A x.",
        "tiles[n] is (place, rows, slot), order[n] the row of x. `lora_rows` loads RANK_TILE rows of A; go on until "
        "the rank is done. Above its rank h is not written.",
        kernel_cases("bgmv"),
        launches=("bgmv_shrink_kernel", "bgmv_expand_kernel"),
        forbidden=REFERENCES,
    ),
    Step(
        "12.6",
        LESSON,
        "Expand, a row at a time",
        "bgmv_expand_kernel",
        "a program per (row, slice, tile of outputs): add up h over the splits, multiply with Bᵀ, add to y in place.",
        "starts [slices + 1] has the slices' first columns. Slices differ in width, and one without an adapter has "
        "rank 0. Above the rank, h is NaN, and 0 · NaN is NaN.",
        kernel_cases("bgmv"),
        launches=("bgmv_shrink_kernel", "bgmv_expand_kernel"),
        forbidden=REFERENCES,
    ),
    Step(
        "12.7",
        LESSON,
        "Shrink, a tile of rows at a time",
        "sgmv_shrink_kernel",
        "a program per (tile of rows, slice, split of the inputs): h gets the tile's part of x Aᵀ.",
        "A tile's rows are order[place … place + count − 1], with one adapter. A split takes whole tiles of TILE_K "
        "inputs, ⌈⌈K / TILE_K⌉ / SPLITS⌉ of them. tl.dot wants rows of x and the transpose of the rows of A.",
        kernel_cases("sgmv"),
        launches=("sgmv_shrink_kernel", "sgmv_expand_kernel"),
        forbidden=REFERENCES,
    ),
    Step(
        "12.8",
        LESSON,
        "Expand, a tile of rows at a time",
        "sgmv_expand_kernel",
        "a program per (tile of rows, slice, tile of outputs): h, added up over the splits, times Bᵀ, added to y.",
        "12.6 with TILE_M rows and tl.dot. Row m of the tile is row order[place + m] of y, and row place + m of h. "
        "Rows behind `count` belong to others, or to nobody.",
        kernel_cases("sgmv"),
        launches=("sgmv_shrink_kernel", "sgmv_expand_kernel"),
        forbidden=REFERENCES,
    ),
)

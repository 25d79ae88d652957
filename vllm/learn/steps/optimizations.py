"""Lesson 05's steps: keys of blocks, what is found and forgotten, a recorded step, guesses, the loop on a clock.

Owns their cases; called by the grader. It never grades.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from engine.model import llama
from engine.request import Request, SamplingParams
from engine.worker.cuda_graphs import Tape
from learn import pictures
from learn.step import Case, Context, Step, outcome

LESSON = "05_optimizations"


# --- Keys -------------------------------------------------------------------------------------------------------------


def names_of_blocks(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """Which encoding it is does not matter, but what is equal and what is not."""
    rng = context.rng
    a, b = bytes(range(32)), bytes([*range(31), 77])
    some = [rng.randrange(100_000) for _ in range(4)]
    salted = (("cache_salt", "x"),)
    pairs = [
        ((a, [1, 2, 3]), (a, [1, 2, 3])),
        ((a, [1, 2, 3]), (a, [1, 3, 2])),
        ((a, [1, 2, 3]), (a, [1, 2, 4])),
        ((a, [1, 2, 3]), (b, [1, 2, 3])),
        ((a, [1, 23]), (a, [12, 3])),
        ((a, [7, 128_000]), (a, [7, 128_000 % 256])),
        ((a, [1, 2, 3]), (a, [1, 2, 3], salted)),
        ((a, [1, 2], salted), (a, [1, 2], (("cache_salt", "y"),))),
        ((a, [1, 2], salted), (a, [1, 2], salted)),
        ((a, some), (a, some)),
        ((a, some), (a, [*some[:3], some[3] + 1])),
        ((a, some), (a, [some[0] + 1, *some[1:]])),
    ]

    def compare(one: tuple, other: tuple) -> tuple:
        keys = [mine.hash_block_tokens(*x) for x in (one, other)]
        return type(keys[0]).__name__, [len(key) for key in keys], keys[0] == keys[1]

    for one, other in pairs:
        told = [f"parent …{x[0][-1]:02x}, tokens {x[1]}{', ' + str(x[2]) if x[2:] else ''}" for x in (one, other)]
        yield Case(
            f"the keys of ({told[0]}) and of ({told[1]}): their type, their lengths, whether they are the same",
            lambda: compare(one, other),
            ("bytes", [32, 32], one == other),
        )


def a_request(name: str, tokens: Sequence[int], salt: str | None = None) -> Request:
    return Request(name, list(tokens), SamplingParams(), cache_salt=salt)


def chains(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """A request that grows; the keys are compared with those of mine's own hash_block_tokens."""
    rng = context.rng

    def grow(size: int, parts: list[list[int]], salt: str | None, bits: int) -> list:
        cache, request, told = mine.PrefixCache(9, size, bits), a_request("it", [], salt), []
        for part in parts:
            for token in part:
                request.append_output_token_id(token)
            told.append([key.hex() for key in cache.update_block_hashes(request)])
        return [*told, [key.hex() for key in request.block_hashes]]

    def right(size: int, parts: list[list[int]], salt: str | None, bits: int) -> list:
        told = []
        for i in range(len(parts)):
            tokens, keys = list(itertools.chain(*parts[: i + 1])), []
            for block in range(len(tokens) // size):
                extra = (("cache_salt", salt),) if salt and block == 0 else ()
                parent = keys[-1] if keys else mine.ROOT_HASH
                keys.append(
                    mine.hash_block_tokens(parent, tokens[block * size : (block + 1) * size], extra)[: bits // 8]
                )
            told.append([key.hex() for key in keys])
        return told + told[-1:]

    some = [[[rng.randrange(100) for _ in range(rng.randint(0, 5))] for _ in range(4)] for _ in range(3)]
    first = [
        (3, [[5, 6]], None, 256),
        (3, [[5, 6, 7]], None, 256),
        (2, [[5, 6, 5, 6, 5]], None, 256),
        (2, [[1, 2, 3], [4]], None, 256),
        (2, [[1, 2, 3], [4, 5]], "s", 256),
        (2, [[1, 2, 3, 4]], None, 16),
    ]
    for size, parts, salt, bits in (*first, *((2, parts, None, 256) for parts in some), (3, some[0], "pepper", 256)):
        yield Case(
            f"blocks of {size} tokens; a request becomes longer by {parts}; salt {salt!r}, keys of {bits} bits: "
            "the keys after each part, and those that the request keeps",
            lambda: outcome(lambda: grow(size, parts, salt, bits)),
            right(size, parts, salt, bits),
        )


# --- The index and the queue ------------------------------------------------------------------------------------------

Event = tuple[Any, ...]


def a_day(module: ModuleType, num_blocks: int, size: int, events: Sequence[Event]) -> list:
    """("in", name, tokens[, salt[, how many of them]]), ("write", name, tokens), ("out", name), ("lose", name, i): its
    i-th block leaves the index. After each: hits, new blocks, all tables, the queue, the counts, which are known."""
    cache, requests, told = module.PrefixCache(num_blocks + 1, size), {}, []
    for verb, name, *more in events:
        hits: Any = None
        answer: Any = None
        if verb == "in":
            requests[name] = request = a_request(name, *more[:2])
            hits = outcome(lambda: cache.get_computed_blocks(request))
            found = hits if isinstance(hits, list) else []
            request.num_computed_tokens = len(found) * size
            end = more[2] if more[2:] else request.num_tokens
            answer = outcome(lambda: cache.allocate_slots(request, end - request.num_computed_tokens, found))
            if not isinstance(answer, list):
                del requests[name]
        elif name not in requests:
            continue
        elif verb == "write":
            request = requests[name]
            request.num_computed_tokens = request.num_tokens
            request.all_token_ids += more[0]
            answer = outcome(lambda: cache.allocate_slots(request, len(more[0])))
            if not isinstance(answer, list):
                del request.all_token_ids[-len(more[0]) :], request.block_hashes[request.num_tokens // size :]
        elif verb == "lose":
            block = cache.tables[name][more[0]]
            key, cache.block_hash[block] = cache.block_hash[block], None
            cache.index.pop(key, None)
        else:
            answer = outcome(lambda: cache.free(requests.pop(name)))
        known = sorted(list(blocks) for blocks in cache.index.values())
        hashed = [i for i, key in enumerate(cache.block_hash) if key is not None]
        told.append(
            (
                verb,
                name,
                {
                    "hits": hits,
                    "new": answer,
                    "tables": {n: list(t) for n, t in cache.tables.items()},
                    "queue": list(cache.free_queue),
                    "owners": list(cache.ref_count),
                    "known": known,
                    "hashed": hashed,
                },
            )
        )
    return told


A, B = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9]
DAYS: list[tuple[int, list[Event]]] = [
    (6, [("in", "a", A), ("out", "a")]),
    (6, [("in", "a", A[:5]), ("out", "a")]),
    (6, [("in", "a", A), ("in", "b", A)]),
    (6, [("in", "a", A), ("out", "a"), ("in", "b", A)]),
    (6, [("in", "a", A), ("out", "a"), ("in", "b", B), ("out", "b"), ("in", "c", [*A, 7])]),
    (6, [("in", "a", A), ("in", "b", B, "salt"), ("in", "c", B, "salt")]),
    (6, [("in", "a", A, None, 3), ("in", "b", A)]),
    (4, [("in", "a", A[:4]), ("in", "b", A[:4]), ("out", "a"), ("in", "c", [7, 7, 7])]),
    (6, [("in", "a", [*A, 7]), ("lose", "a", 0), ("in", "b", [*A, 7])]),
    (6, [("in", "a", [*A, 7]), ("lose", "a", 1), ("in", "b", [*A, 7])]),
    (6, [("in", "a", A[:3]), ("write", "a", [8]), ("write", "a", [8]), ("out", "a"), ("in", "b", [1, 2, 3, 8, 8])]),
    (4, [("in", "a", A[:4]), ("out", "a"), ("in", "b", [*A, 7, 8, 9]), ("in", "c", [*A, 7, 8])]),
    (4, [("in", "a", A[:4]), ("in", "b", [7, 7, 7, 7]), ("out", "a"), ("in", "c", [*A[:4], 7, 8, 9])]),
    (4, [("in", "a", A), ("in", "b", [7]), ("in", "c", [7]), ("write", "b", [7, 7])]),
    (3, [("in", "a", A), ("out", "a"), ("in", "b", [7, 7, 7]), ("out", "b"), ("in", "c", A), ("out", "c")]),
    (5, [("in", "a", A), ("in", "b", A), ("out", "a"), ("out", "b"), ("in", "c", [7] * 7), ("in", "d", [*A, 1])]),
]


def days(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng, some = context.rng, []
    for _ in range(6):
        text, events, names = [rng.randint(1, 3) for _ in range(12)], [], iter("abcdefghijkl")
        inside: list[str] = []
        for _ in range(12):
            verb = rng.choice(["in", "in", "out", "write"]) if inside else "in"
            if verb == "in":
                inside.append(next(names))
                events.append(("in", inside[-1], text[: rng.randint(1, 12)]))
            elif verb == "write":
                events.append(("write", rng.choice(inside), [rng.randint(1, 3)]))
            else:
                events.append(("out", inside.pop(rng.randrange(len(inside)))))
        some.append((rng.randint(6, 12), events))
    for num_blocks, events in (*DAYS, *some):
        yield Case(
            f"{num_blocks} blocks of 2 tokens; {events}: what is found, which blocks are new, and what then stands in "
            "the tables, the queue, the counts and the index",
            lambda: a_day(mine, num_blocks, 2, events),
            a_day(given, num_blocks, 2, events),
            first_that_differs,
        )


def first_that_differs(got: Any, right: Any) -> str:
    """Of the first event that went another way, what differs."""
    for (verb, name, a), (_, _, b) in zip(got, right):
        if a != b:
            return "\n".join(f"{verb} {name}: {x:7} yours {a[x]}   right {b[x]}" for x in b if a[x] != b[x])
    return ""


# --- A step on a tape -------------------------------------------------------------------------------------------------

NO_MATTER = ("zeros", "zero_", "full", "fill_", "ones", "arange", "copy_", "_to_copy")  # how token ids are made


def launched(tape: Tape) -> list:
    """(name, shape of the result) of each launch, but those that make the token ids."""
    told = []
    for operation, _, _, out in tape.tape:
        name = operation.kernel.name if not hasattr(operation, "name") else operation.name()
        if name.removeprefix("aten::").split(".")[0] not in NO_MATTER:
            told.append((name, list(out.shape) if isinstance(out, torch.Tensor) else None))
    return told


def recorded_steps(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    def record(module: ModuleType, model: llama.Llama, num_seqs: int) -> list:
        tape = module.record_step(model, num_seqs)
        try:
            before = len(tape.tape)
            torch.ones(2).add(1)
            return [launched(tape), "launches after the end", len(tape.tape) - before]
        finally:
            tape.exits.close()

    for layers, num_seqs in [(1, 1), (1, 4), (2, 3), (context.rng.randint(3, 5), context.rng.randint(2, 9))]:
        model = llama.random_model(num_hidden_layers=layers)
        yield Case(
            f"a model of {layers} layer{'s' * (layers > 1)}, {num_seqs} sequences: each launch and its result's shape",
            lambda: record(mine, model, num_seqs),
            record(given, model, num_seqs),
            lambda got, right: pictures.steps(got[0], right[0]),
        )


def bytes_between(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    def tape_of(work: Callable[[], Any]) -> Tape:
        tape = Tape()
        tape.capture_begin()
        work()
        tape.capture_end()
        return tape

    T, W = context.rng.randint(3, 9), context.rng.randint(3, 9)
    x, y, w, half = torch.ones(2, 4), torch.ones(2, 4), torch.ones(4, 4), torch.ones(T, W, dtype=torch.bfloat16)
    ids = torch.zeros(3, dtype=torch.int64)
    small: list[tuple[str, Callable[[], Any], list]] = [
        ("x + y, [2, 4] in fp32", lambda: x + y, [("aten::add.Tensor", 3 * 32)]),
        ("2 · x, [2, 4] in fp32", lambda: x * 2.0, [("aten::mul.Tensor", 2 * 32)]),
        ("x @ w, [2, 4] and [4, 4]", lambda: torch.mm(x, w), []),
        ("x @ w, and y added", lambda: torch.mm(x, w) + y, [("aten::add.Tensor", 3 * 32)]),
        (f"x + x, [{T}, {W}] in bf16", lambda: half + half, [("aten::add.Tensor", 3 * 2 * T * W)]),
        ("x, y and x put together", lambda: torch.cat([x, y, x]), [("aten::cat", 6 * 32)]),
        ("rows 0, 0, 0 of an embedding w", lambda: torch.nn.functional.embedding(ids, w), []),
        ("silu(x), then its argmax", lambda: torch.nn.functional.silu(x).argmax(1), [("aten::silu", 2 * 32)]),
        (
            "x + y, of which only row 0 is used, twice",
            lambda: (x + y)[0] * 2.0,
            [("aten::add.Tensor", 96), ("aten::mul.Tensor", 32)],
        ),
    ]
    for told, work, right in small:
        tape = tape_of(work)
        yield Case(f"recorded: {told}", lambda: mine.small_operations(tape), right)
    tape = given.record_step(llama.random_model(num_hidden_layers=1), 3)
    yield Case(
        "a step of a model of one layer, for 3 sequences",
        lambda: mine.small_operations(tape),
        given.small_operations(tape),
        lambda got, right: pictures.steps(got, right),
    )


# --- Guesses ----------------------------------------------------------------------------------------------------------


def lookups(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    first = [
        ([1, 2, 3, 1], 2),
        ([1, 2, 3], 2),
        ([1, 2, 3, 4, 9, 2, 3], 1),
        ([3, 7, 2, 3, 8, 2, 3], 2),
        ([5, 5, 5], 4),
        ([1, 2, 9, 1, 2, 8, 1, 2], 1),
        ([1], 3),
        ([4, 4], 3),
        ([1, 2, 1, 2], 9),
        ([1, 2, 1], 0),
    ]
    some = [([rng.randint(1, 3) for _ in range(rng.randint(4, 14))], rng.randint(1, 5)) for _ in range(12)]
    for tokens, k in (*first, *some):
        yield Case(
            f"tokens {tokens}, up to {k} guesses",
            lambda: mine.prompt_lookup(tokens, k),
            by_definition(tokens, k, 3),
        )
    yield Case(
        "tokens [3, 9, 2, 3, 8, 2, 3], 1 guess, longest=1", lambda: mine.prompt_lookup([3, 9, 2, 3, 8, 2, 3], 1, 1), [9]
    )


def by_definition(tokens: list[int], k: int, longest: int) -> list[int]:
    """All places where an ending occurs with something behind it; the longest ending wins, then the first place."""
    places = [
        (-n, start)
        for n in range(1, longest + 1)
        for start in range(len(tokens) - n)
        if tokens[start : start + n] == tokens[len(tokens) - n :] and n < len(tokens)
    ]
    if not places:
        return []
    n, start = min(places)
    return tokens[start - n : start - n + k]


def agreed(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [
        (rng.randrange(99), [rng.randrange(7) for _ in range(rng.randint(2, 9))], rng.randint(1, 5)) for _ in range(5)
    ]
    for seed, prompt, k in [(0, [1, 2, 3], 0), (0, [1, 2, 3], 1), (3, [1, 2, 1, 2, 1], 4), (5, [4, 4, 4], 3), *some]:
        model = llama.random_model(seed, vocab_size=7)
        plain, _ = given.generate_with_lookup(model, prompt, 24, 0)
        _, passes = given.generate_with_lookup(model, prompt, 24, k)
        yield Case(
            f"a random model of 7 words (seed {seed}), prompt {prompt}, 24 tokens, up to {k} guesses a pass: the "
            "tokens, which must be those without guesses, and the passes",
            lambda: list(mine.generate_with_lookup(model, prompt, 24, k)),
            [plain, passes],
        )


# --- The loop on a clock ----------------------------------------------------------------------------------------------


def loops(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    some = [[rng.randint(1, 12) for _ in range(rng.randint(3, 14))] for _ in range(2)]
    for stops, host in [([1], 5.0), ([3], 5.0), ([3, 5], 5.0), ([2] * 9, 3.0), (some[0], 14.0), (some[1], 7.0)]:
        for kind in given.LOOPS:
            yield Case(
                f"{kind}; answers that stop after {stops} tokens, a plan takes {host:g} ms, a step 10 ms",
                lambda: mine.on_a_clock(kind, stops, host),
                given.on_a_clock(kind, stops, host),
            )


STEPS = (
    Step(
        "05.1",
        LESSON,
        "The key of a block",
        "hash_block_tokens",
        "return sha256 of the parent's key, 8 bytes for each token, and `tail`: 32 bytes.",
        'hashlib.sha256(…).digest() takes bytes; array.array("q", numbers).tobytes() is 8 bytes for each number.',
        names_of_blocks,
        first="return",
    ),
    Step(
        "05.2",
        LESSON,
        "A chain of keys",
        "PrefixCache.update_block_hashes",
        "append the keys of full blocks that request.block_hashes does not have yet, each cut to hash_bytes; return "
        "all.",
        'The parent of the first block is ROOT_HASH, of others the key before. The salt, as (("cache_salt", salt),), '
        "belongs to the first block only: the chain carries it on. Who grows by a token mostly gets no new key.",
        chains,
    ),
    Step(
        "05.3",
        LESSON,
        "What is known of a prompt",
        "PrefixCache.get_computed_blocks",
        "return the blocks of the longest prefix that the index has; at least one token must be left to compute.",
        "A block counts only if all before it are known. For a prompt of exactly k full blocks, ask for k − 1: "
        "(num_tokens − 1) // block_size is right for any length. Of several blocks with one key take the oldest.",
        days,
    ),
    Step(
        "05.4",
        LESSON,
        "Eviction",
        "PrefixCache._take",
        "take the block at the front of the queue, with one owner; nobody can find any more what it held.",
        "A key may have other blocks: only this one leaves its list, and the key goes when the list is empty.",
        days,
    ),
    Step(
        "05.5",
        LESSON,
        "The order of the queue",
        "PrefixCache.free",
        "give the request's blocks back: a block that nobody owns now goes to the end of the queue, one that nobody "
        "can find to its front. A beginning is to outlive what came after it.",
        "Walk the table from its end. An OrderedDict appends a new key at its end, and move_to_end(x, last=False) "
        "brings it to the front. Who still has an owner is not queued.",
        days,
    ),
    Step(
        "05.6",
        LESSON,
        "A table that begins with what was found",
        "PrefixCache.allocate_slots",
        "a table that holds the computed tokens and the new ones, and begins with `hits` if it is new; its full blocks "
        "enter the index now. None, and nothing changed, if too few blocks are free.",
        "A hit without an owner lies in the queue, so it is one of the free blocks that you need. Take hits out of the "
        "queue before you take new blocks from its front. Index only what has no key yet, up to the last full block "
        "of the tokens that will be computed.",
        days,
        plugs=(("block_pool", "PrefixCache"),),
    ),
    Step(
        "05.7",
        LESSON,
        "A step without Python",
        "record_step",
        "record on `tape` what one decode step launches: a token of each sequence through the model, logits, the best.",
        "Between capture_begin and capture_end: model.forward of num_seqs token ids (which ones does not matter) at "
        "`positions` with `attend`; of what it returns model.logits, and of these argmax over the words.",
        recorded_steps,
        first="tape.capture_begin()",
        last="tape.capture_end()",
    ),
    Step(
        "05.8",
        LESSON,
        "What small operations move",
        "small_operations",
        "return (name, bytes) of each small operation on the tape, without those OUTSIDE_LAYERS: all tensors that it "
        "reads, and what it writes.",
        "An entry is (operation, args, kwargs, result); kind_of tells small ones, operation.name() their name. "
        "tree_leaves finds the tensors in args and result, lists included; a tensor has numel() · element_size() "
        "bytes.",
        bytes_between,
    ),
    Step(
        "05.9",
        LESSON,
        "Guesses out of the text",
        "prompt_lookup",
        "return up to k tokens that followed the last three where they first occurred; if nowhere, the last two, or "
        "one.",
        "Try n = longest first, then less. An ending finds itself at the end of the text: something has to come "
        "behind.",
        lookups,
    ),
    Step(
        "05.10",
        LESSON,
        "Guesses that agree",
        "generate_with_lookup",
        "of draft and choice: append the guesses that agree and the model's own token behind them; update `computed`.",
        "choice[i] is what the model writes after i guesses. Up to the first guess that differs both are the same, so "
        "choice alone has all tokens to append. The last one of them has no keys and values yet.",
        agreed,
        first="agreed =",
        last="computed =",
    ),
    Step(
        "05.11",
        LESSON,
        "Three loops on one clock",
        "on_a_clock",
        "until all is done: plan up to `depth` steps (a plan costs host_ms, a step starts when the plan and the step "
        "before are there), and then hear of the oldest. `overlap`: plan also while steps are in flight.",
        "Plan if overlap, or if nothing is in flight: host moves on by host_ms once, and each step that has tokens by "
        "step_ms from max(model, host); request i's stop token is 1, all its others 0. Hear: popleft, the host is not "
        "earlier than the tokens, update_from_output; what was sampled for requests that are not told is wasted.",
        loops,
        first="while scheduler.has_unfinished_requests()",
    ),
)

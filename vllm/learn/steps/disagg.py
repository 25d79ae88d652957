"""Lesson 08's steps: what is elsewhere, who keeps blocks, a layer on its way, how it ends, and a router.

Owns their cases; called by the grader. It never grades, and opens no port: links and workers are played here.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.frames import as_bytes, checksum
from engine.request import Request, RequestStatus, SamplingParams
from learn import pictures
from learn.step import Case, Context, Step, outcome

LESSON = "08_disagg"
SIZE, HEADS, D = 4, 2, 4  # of the caches here: tokens in a block, KV heads, numbers in a head


class Wire:
    """In place of a Link: what was sent over it; after `room` messages it has none."""

    def __init__(self, room: int = 99) -> None:
        self.sent: list[tuple[dict, Any]] = []
        self.room = room

    @property
    def has_room(self) -> bool:
        return len(self.sent) < self.room

    def send(self, header: dict, payload: torch.Tensor | None = None) -> None:
        self.sent.append((header, payload))

    def letters(self) -> list[tuple]:
        return [(header["kind"], header["transfer"]) for header, _ in self.sent]


def a_side(module: ModuleType, layers: Sequence[torch.Tensor] = (), **extra: Any) -> Any:
    """A HandOver that listens nowhere, on these layers [2, num_blocks, SIZE, HEADS, D]."""
    config = KVTransferConfig(kv_connector="TCPConnector", kv_role="kv_consumer", kv_connector_extra_config=extra)
    side = module.HandOver(config)
    side.layers, side.num_kv_heads, side.head, side.heads = list(layers), HEADS, 0, HEADS
    return side


def a_request(name: str, prompt: int, **params: Any) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=4)
    sampling.extra_args = {"kv_transfer_params": params} if params else None
    return Request(name, [0] * prompt, sampling)


def a_promise(module: ModuleType, name: str, blocks: list[int], **more: Any) -> Any:
    ready = more.pop("ready", [0, 0])
    return module.Promise(a_request(name, 6, do_remote_decode=True, transfer_id=name), blocks, ready, **more)


def a_pull(module: ModuleType, name: str, link: Wire, deadline: float = math.inf) -> Any:
    return module.Pull(a_request(name, 6, do_remote_prefill=True, transfer_id=name), [3, 1], [0, 0], 6, link, deadline)


def news_of(side: Any) -> dict:
    """What the scheduler will hear, and what is left."""
    news = side.news
    return {
        "freed": sorted(news.finished_sending),
        "arrived": sorted(news.finished_recving),
        "failed": dict(sorted(news.failed_recving.items())),
        "promises": sorted(side.promises),
        "pulls": sorted(side.pulls),
        "failures counted": side.stats["failed"],
    }


# --- The scheduler's half ---------------------------------------------------------------------------------------------


def what_is_elsewhere(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    def ask(prompt: int, computed: int, params: dict, asked: bool) -> Any:
        side = a_side(mine)
        if asked:
            side.asked.add("r")
        return list(side.get_num_new_matched_tokens(a_request("r", prompt, **params), computed))

    n, c = context.rng.randint(9, 40), context.rng.randint(1, 8)
    fetch = {"do_remote_prefill": True, "transfer_id": "r", "remote_host": "there", "remote_port": 9}
    for prompt, computed, params, asked, right in [
        (8, 0, fetch, False, [8, True]),
        (8, 4, fetch, False, [4, True]),
        (8, 0, {}, False, [0, False]),
        (8, 0, fetch, True, [0, False]),
        (8, 0, {"do_remote_decode": True, "transfer_id": "r"}, False, [0, False]),
        (n, c, fetch, False, [n - c, True]),
        (n, 0, {**fetch, "do_remote_prefill": False}, False, [0, False]),
        (n, c, fetch, True, [0, False]),
    ]:
        told = "; it was asked for before" if asked else ""
        yield Case(
            f"a prompt of {prompt} tokens, {computed} of them are here; kv_transfer_params {params}{told}",
            lambda: ask(prompt, computed, params, asked),
            right,
        )


def who_keeps_blocks(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    lease = float(context.rng.randint(3, 99))

    def finish(module: ModuleType, status: str, delivered: bool, known: bool) -> dict:
        side = a_side(module, kv_lease_duration=lease)
        side.promises["other"] = a_promise(module, "other", [7])
        if known:
            side.promises["r"] = a_promise(module, "r", [3, 1], delivered=delivered)
        request = a_request("r", 6, do_remote_decode=True, transfer_id="r")
        request.status = RequestStatus[status]
        now, kept = time.monotonic(), side.request_finished(request, [3, 1])
        leases = {
            name: float(round(p.lease - now)) if p.lease < math.inf else p.lease for name, p in side.promises.items()
        }
        return {"kept": kept, "lease in seconds": leases}

    for status in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_ABORTED", "FINISHED_ERROR"):
        for delivered, known in [(False, True), (True, True), (False, False)]:
            told = "" if known else ", and nobody wants its blocks"
            yield Case(
                f"a request has ended: {status}{', and the other engine has everything' * delivered}{told}; "
                f"kv_lease_duration is {lease:g}. Are its blocks kept, and which promises are there for how long?",
                lambda: finish(mine, status, delivered, known),
                finish(given, status, delivered, known),
            )


# --- A layer on its way -----------------------------------------------------------------------------------------------


def what_leaves(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng

    def pump(module: ModuleType, promises: list[tuple], room: int) -> dict:
        side, wire, calls = a_side(module), Wire(room), []
        for i, (ready, sent, end, asked) in enumerate(promises):
            more = {"sent": list(sent), "reader": wire, "end": end} if asked else {}
            side.promises[f"r{i}"] = a_promise(module, f"r{i}", [3, 1], ready=list(ready), **more)

        def sends(transfer: str, promise: Any, layer: int, first: int, last: int) -> None:
            calls.append((transfer, layer, first, last))
            wire.send({"kind": "KV", "transfer": transfer})

        with mock.patch.object(side, "send_layer", sends):
            side.pump()
            side.pump()  # and nothing leaves twice
        return {"messages": calls, "sent": [list(promise.sent) for promise in side.promises.values()]}

    first = [
        ([([6, 0], [0, 0], 6, True)], 99),
        ([([6, 6], [0, 0], 6, True)], 99),
        ([([6, 6], [0, 0], 6, False)], 99),
        ([([4, 2], [2, 2], 6, True)], 99),
        ([([8, 8], [0, 0], 6, True)], 99),
        ([([6, 6, 6], [0, 0, 0], 6, True)], 1),
        ([([6, 6], [6, 3], 6, True), ([5, 0], [0, 0], 5, True)], 99),
        ([([6, 6], [0, 0], 6, False), ([4, 4], [4, 0], 4, True)], 2),
    ]
    some = []
    for _ in range(4):
        promises = []
        for _ in range(rng.randint(1, 3)):
            sent = [rng.randint(0, 6) for _ in range(3)]
            promises.append(([rng.randint(s, 9) for s in sent], sent, rng.randint(6, 9), rng.random() < 0.8))
        some.append((promises, rng.randint(1, 6)))
    for promises, room in (*first, *some):
        told = "; ".join(
            f"r{i}: {ready} positions of the layers are ready, "
            + (f"{sent} sent, {end} wanted" if asked else "nobody has asked")
            for i, (ready, sent, end, asked) in enumerate(promises)
        )
        yield Case(
            f"{told}; the link has room for {room} messages. Which (transfer, layer, first, last) leave?",
            lambda: pump(mine, promises, room),
            pump(given, promises, room),
        )


def layers_leave(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    layers = [
        torch.randn(2, 9, SIZE, HEADS, D, generator=torch.Generator().manual_seed(rng.randrange(99))) for _ in range(3)
    ]

    def leave(
        module: ModuleType, blocks: list[int], layer: int, first: int, last: int, copies: int, late: bool
    ) -> list:
        side, wire = a_side(module, layers), Wire()
        if copies != 1:
            side.wire = lambda link, header, payload: [(header, payload)] * copies
        promise = a_promise(module, "r", blocks, reader=wire, end=last, lease=9.0 if late else math.inf)
        side.send_layer("r", promise, layer, first, last)
        told: list[Any] = []
        for header, payload in wire.sent:
            told.append(sorted((name, value) for name, value in header.items() if name != "crc"))
            told += [header.get("crc") == checksum(payload), payload.view(torch.float32)]
        return [*told, side.stats["messages"]]

    def right(blocks: list[int], layer: int, first: int, last: int, copies: int) -> list:
        rows = given.gather_reference(layers[layer], blocks, first, last - first, 0, HEADS)
        header = {
            "kind": "KV",
            "transfer": "r",
            "layer": layer,
            "first": first,
            "count": last - first,
            "head": 0,
            "heads": HEADS,
        }
        return [sorted(header.items()), True, rows.reshape(-1)] * copies + [1]

    first_cases = [
        ([3, 1], 0, 0, 4, 1, False),
        ([3, 1], 1, 0, 6, 1, False),
        ([3, 1], 2, 3, 7, 1, True),
        ([5, 2, 8], 0, 5, 6, 1, False),
        ([3, 1], 0, 0, 6, 2, False),
        ([3, 1], 0, 0, 6, 0, False),
    ]
    for _ in range(3):
        first = rng.randint(0, 10)
        first_cases.append((rng.sample(range(1, 9), 3), rng.randrange(3), first, rng.randint(first + 1, 12), 1, False))
    for blocks, layer, first, last, copies, late in first_cases:
        told = "" if copies == 1 else f"; the wire has a bad day: every message leaves {copies} times"
        yield Case(
            f"positions [{first}, {last}) of layer {layer}, blocks {blocks} of {SIZE} tokens{told}: each message's "
            "header without its checksum, whether the checksum is right, the payload, and how many messages are "
            "counted",
            lambda: leave(mine, blocks, layer, first, last, copies, late),
            right(blocks, layer, first, last, copies),
        )


Message = tuple[str, int, int, int, str]  # transfer, layer, first, count, what is wrong with it


def taken(module: ModuleType, source: list[torch.Tensor], messages: Sequence[Message]) -> list:
    """After each message: what has arrived, what was counted, which positions were written, and what was answered."""
    layers = [torch.full((2, 5, SIZE, HEADS, D), math.nan) for _ in source]
    side, wire, told = a_side(module, layers, timeout=5.0), Wire(), []
    pull = side.pulls["r"] = a_pull(module, "r", wire, deadline=0.0)
    for transfer, layer, first, count, wrong in messages:
        heads = 1 if wrong == "half of the heads" else HEADS
        rows = torch.stack([source[min(layer, 1)][:, p, :heads] for p in range(first, first + count)], dim=1)
        payload = as_bytes(rows.contiguous())
        header = {
            "kind": "KV",
            "transfer": transfer,
            "layer": layer,
            "first": first,
            "count": count,
            "head": 0,
            "heads": heads,
            "crc": checksum(payload),
        }
        if wrong == "a bit has flipped":
            payload = payload.clone()
            payload[5] ^= 1
        link = Wire() if wrong == "from another link" else wire
        answer = outcome(lambda: side.take(link, header, payload))
        written = []
        for cache, rows in zip(layers, source):
            flat = cache[:, [3, 1]].reshape(2, 2 * SIZE, HEADS, D)
            written.append([p for p in range(2 * SIZE) if bool((flat[:, p] == rows[:, p]).all())])
        alone = sum(int((~cache.isnan()).sum()) for cache in layers) == sum(map(len, written)) * 2 * HEADS * D
        waits = "long" if pull.deadline > time.monotonic() else "no longer"
        counted = {name: side.stats[name] for name in ("strange", "out of order", "corrupt")}
        told.append(
            {
                "answer": answer,
                "have": list(pull.have),
                "written": written,
                "nothing else": alone,
                "waits": waits,
                **counted,
                "said": wire.letters(),
                **news_of(side),
            }
        )
    return told


def messages_come(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng
    source = [torch.randn(2, 9, HEADS, D, generator=torch.Generator().manual_seed(rng.randrange(99))) for _ in range(2)]
    ok = ""
    days: list[list[Message]] = [
        [("r", 0, 0, 6, ok), ("r", 1, 0, 6, ok)],
        [("r", 0, 0, 2, ok), ("r", 1, 0, 6, ok), ("r", 0, 2, 4, ok)],
        [("r", 0, 3, 3, ok), ("r", 0, 0, 3, ok)],
        [("r", 0, 0, 3, ok), ("r", 0, 0, 3, ok), ("r", 0, 3, 3, ok)],
        [("r", 0, 0, 6, "a bit has flipped"), ("r", 0, 0, 6, ok)],
        [("x", 0, 0, 6, ok)],
        [("r", 0, 0, 6, "from another link")],
        [("r", 2, 0, 6, ok)],
        [("r", 0, 0, 7, ok)],
        [("r", 0, 0, 6, "half of the heads")],
        [("r", 0, 0, 6, ok), ("r", 1, 0, 6, ok), ("r", 0, 0, 6, ok)],
    ]
    for _ in range(4):
        day: list[Message] = []
        for layer in (0, 1):
            cuts = sorted({0, 6, *rng.choices(range(1, 6), k=2)})
            day += [("r", layer, a, b - a, ok) for a, b in itertools.pairwise(cuts)]
        if rng.random() < 0.5:
            rng.shuffle(day)
        days.append(day)
    for day in days:
        shown = "; ".join(f"{t}: layer {i}, {n} from {f}{' (' + w + ')' if w else ''}" for t, i, f, n, w in day)
        yield Case(
            f"6 positions of r's 2 layers are to come, into blocks [3, 1] of {SIZE} tokens. Messages: {shown}. After "
            "each: what has arrived, what is in the blocks, what is counted, what is said",
            lambda: taken(mine, source, day),
            taken(given, source, day),
            first_that_differs,
        )


def first_that_differs(got: Any, right: Any) -> str:
    for i, (a, b) in enumerate(zip(got, right)):
        if a != b:
            return "\n".join(f"message {i}: {x}: yours {a[x]}   right {b[x]}" for x in b if a[x] != b[x])
    return ""


# --- How it ends ------------------------------------------------------------------------------------------------------


def endings_of_pulls(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    def end(module: ModuleType, names: list[str], calls: list[tuple]) -> dict:
        side, wire = a_side(module), Wire()
        for name in names:
            side.pulls[name] = a_pull(module, name, wire)
        for call in calls:
            side.end_pull(*call)
        return {"said": wire.letters(), **news_of(side)}

    names = [f"r{context.rng.randrange(100)}", "b", "c"]
    for calls in [
        [("b", "DONE")],
        [("b", "CANCEL", "no progress")],
        [("b", "CANCEL")],
        [("b", "CANCEL", "lost"), (names[0], "DONE")],
        [("c", "CANCEL", "lost"), ("b", "CANCEL", "lost")],
        [(name, "DONE") for name in names],
    ]:
        yield Case(
            f"{', '.join(names)} are on their way; end_pull{', '.join(map(str, calls))}: what is said, what the "
            "scheduler will hear",
            lambda: end(mine, names, calls),
            end(given, names, calls),
        )


def endings_of_promises(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """A promise is (its lease, or None while the prompt is computed)."""

    def free(module: ModuleType, leases: dict[str, float | None], names: list[str]) -> dict:
        side, wire = a_side(module), Wire()
        for name, lease in leases.items():
            until = math.inf if lease is None else time.monotonic() + lease
            side.promises[name] = a_promise(module, name, [3, 1], reader=wire, lease=until, sent=[0, 0], end=6)
        for name in names:
            side.free(name)
        left = {name: (p.delivered, p.reader is None) for name, p in side.promises.items()}
        return {"(delivered, without a reader)": left, **news_of(side)}

    lease = float(context.rng.randint(1, 50))
    for leases, names in [
        ({"r": 9.0}, ["r"]),
        ({"r": None}, ["r"]),
        ({"r": lease, "s": lease}, ["s"]),
        ({"r": None, "s": lease}, ["r", "s"]),
        ({"r": None}, ["r", "r"]),
    ]:
        told = ", ".join(
            f"{n} ({'being computed' if t is None else f'computed, kept for {t:g} s'})" for n, t in leases.items()
        )
        yield Case(
            f"promises: {told}; free {', then '.join(names)}: what is left, what the scheduler will hear",
            lambda: free(mine, leases, names),
            free(given, leases, names),
        )


def patience_ends(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng

    def end(module: ModuleType, leases: list[float], deadlines: list[float]) -> dict:
        side, wire = a_side(module, timeout=3.0), Wire()
        now = time.monotonic()
        for i, lease in enumerate(leases):
            side.promises[f"p{i}"] = a_promise(module, f"p{i}", [3, 1], lease=now + lease)
        for i, deadline in enumerate(deadlines):
            side.pulls[f"q{i}"] = a_pull(module, f"q{i}", wire, deadline=now + deadline)
        news = side.get_finished()
        failed = sorted(news.failed_recving)
        return {
            "freed": sorted(news.finished_sending),
            "failed": failed,
            "arrived": sorted(news.finished_recving),
            "said": sorted(wire.letters()),
            "left": sorted([*side.promises, *side.pulls]),
        }

    some = [
        ([rng.choice([-3.0, 60.0, math.inf]) for _ in range(3)], [rng.choice([-3.0, 60.0]) for _ in range(3)])
        for _ in range(4)
    ]
    for leases, deadlines in [
        ([60.0], [60.0]),
        ([-1.0], []),
        ([], [-1.0]),
        ([math.inf], [60.0]),
        ([-1.0, -2.0], [-1.0, 60.0, -2.0]),
        *some,
    ]:
        yield Case(
            f"promises that end in {leases} s and pulls that end in {deadlines} s: who is freed, who has failed, what "
            "is said",
            lambda: end(mine, leases, deadlines),
            end(given, leases, deadlines),
        )


def the_other_dies(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    """Links a and b; then one of them is lost."""
    rng = context.rng

    def lose(module: ModuleType, pulls: str, readers: str, early: str, which: str) -> dict:
        side, links = a_side(module), {"a": Wire(), "b": Wire()}
        side.links = {(name, 1): link for name, link in links.items()}
        for i, name in enumerate(pulls):
            side.pulls[f"q{i}"] = a_pull(module, f"q{i}", links[name])
        for i, name in enumerate(readers):
            more = {"reader": links[name], "sent": [0, 0]} if name in links else {}
            side.promises[f"p{i}"] = a_promise(module, f"p{i}", [3, 1], lease=time.monotonic() + 60, **more)
        for i, name in enumerate(early):
            side.early[f"e{i}"] = links[name], {"kind": "GET"}
        side.hear(links[which], {"kind": "LOST", "why": "it has died"})
        return {"links": sorted(name for name, _ in side.links), "early": sorted(side.early), **news_of(side)}

    some = [(*("".join(rng.choices("ab", k=rng.randint(0, 4))) for _ in range(3)), rng.choice("ab")) for _ in range(4)]
    for pulls, readers, early, which in [
        ("a", "", "", "a"),
        ("a", "", "", "b"),
        ("", "a", "", "a"),
        ("", "-", "a", "a"),
        ("aab", "aba-", "aab", "a"),
        *some,
    ]:
        yield Case(
            f"links a and b; pulls over {list(pulls)}, promises read by {list(readers)} (-: nobody yet), early letters "
            f"from {list(early)}; then {which} is lost",
            lambda: lose(mine, pulls, readers, early, which),
            lose(given, pulls, readers, early, which),
        )


# --- The router -------------------------------------------------------------------------------------------------------


def next_token(tokens: Sequence[int]) -> int:
    return (sum(tokens) + 7 * len(tokens)) % 97


class Player:
    """In place of a Worker: it answers at once, into its pipe. After `dies` answers it is dead; of the first `errors`
    requests it says that they failed; a silent one says nothing."""

    def __init__(self, name: str, dies: int | None = None, errors: int = 0, silent: bool = False) -> None:
        self.name, self.alive, self.left, self.errors, self.silent = name, True, dies, errors, silent
        self.pipe, self.end = multiprocessing.Pipe(duplex=False)
        self.process = SimpleNamespace(join=lambda seconds: None, exitcode=-9)
        self.address = {"remote_host": name, "remote_port": 7}
        self.heard: list[tuple] = []

    def send(self, kind: str, *content: Any) -> None:
        self.heard.append((kind, *(sorted(x.items()) if isinstance(x, dict) else x for x in content)))
        if kind != "add" or self.silent:
            return
        name, prompt, most, params = content
        if self.errors:
            self.errors -= 1
            self.say(name, [], "error", "its prompt did not come")
            self.say(name, [99], None, None)  # too late: nobody waits for it
            return
        tokens = list(prompt)
        for i in range(most):
            tokens.append(777 if params.get("do_remote_decode") else next_token(tokens))
            self.say(name, tokens[-1:], "length" if i + 1 == most else None, None)

    def say(self, *answer: Any) -> None:
        if self.left == 0:
            self.end.close()
            self.left = -1
        if self.left != -1:
            self.end.send(("output", *answer))
            self.left = None if self.left is None else self.left - 1


def routes(mine: ModuleType, given: ModuleType, context: Context) -> Iterator[Case]:
    rng = context.rng

    def route(module: ModuleType, prefill: dict, decode: dict, jobs: list[tuple[list[int], int]], dead: str) -> Any:
        players = {"prefill": Player("prefill", **prefill), "decode": Player("decode", **decode)}
        for name in dead.split():
            players[name].alive = False
        router, told = module.Router(*players.values()), []
        for i, (prompt, most) in enumerate(jobs):
            router.submit(f"r{i}", prompt, most)
        heard: list[tuple] = []
        ended = outcome(
            lambda: router.run(timeout=0.3, on_token=lambda job: heard.append((job.request_id, len(job.token_ids))))
        )
        for job in router.jobs:
            told.append(
                {
                    "tokens": list(job.token_ids),
                    "error": job.error,
                    "attempts": job.attempts,
                    "a first one": job.first > 0,
                }
            )
        sent = {name: player.heard for name, player in players.items()}
        return [
            told,
            sent,
            {
                "events": list(router.events),
                "told": sorted(heard),
                "ended": ended if isinstance(ended, str) else len(ended),
            },
        ]

    some = [([rng.randrange(50) for _ in range(rng.randint(1, 4))], rng.randint(1, 4)) for _ in range(3)]
    one: list[tuple[list[int], int]] = [([5, 6], 3)]
    for told, prefill, decode, jobs, dead in [
        ("both workers are well", {}, {}, one, ""),
        ("both workers are well", {}, {}, some, ""),
        ("the prefill worker is dead before", {}, {}, one, "prefill"),
        ("the decode worker is dead before", {}, {}, one, "decode"),
        ("both are dead before", {}, {}, one, "prefill decode"),
        ("what prefill computes does not come", {}, {"errors": 1}, one, ""),
        ("it fails twice", {}, {"errors": 2}, one, ""),
        ("the prefill worker dies, and the decode worker goes on", {"dies": 0}, {}, one, ""),
        ("the decode worker dies after 2 answers", {}, {"dies": 2}, one, ""),
        ("the decode worker dies after 1 answer", {}, {"dies": 1}, some, ""),
        ("the decode worker dies at once, and prefill says nothing", {"silent": True}, {"dies": 0}, one, ""),
        ("nobody says anything", {"silent": True}, {"silent": True}, one, ""),
    ]:
        shown = ", ".join(f"r{i}: {prompt}, {most} tokens" for i, (prompt, most) in enumerate(jobs))
        yield Case(
            f"{told}; jobs {shown}: what becomes of them, what each worker is sent, what the router notes",
            lambda: route(mine, prefill, decode, jobs, dead),
            route(given, prefill, decode, jobs, dead),
            lambda got, right: "" if not isinstance(got, list) else sent_to_each(got[1], right[1]),
        )


def sent_to_each(got: dict, right: dict) -> str:
    return "\n".join(
        f"to {name}:\n{pictures.steps(got[name], right[name])}" for name in right if got[name] != right[name]
    )


STEPS = (
    Step(
        "08.1",
        LESSON,
        "What is elsewhere",
        "HandOver.get_num_new_matched_tokens",
        "of a request with do_remote_prefill, all of the prompt that is not computed here comes later; ask once only.",
        "kv_transfer_params(request) is a dict; self.asked has the ids of those that were asked for. (0, False) says "
        "that nothing comes.",
        what_is_elsewhere,
    ),
    Step(
        "08.2",
        LESSON,
        "Who keeps its blocks",
        "HandOver.request_finished",
        "keep the blocks (True) of a prompt that was computed to its end and that the other engine does not have yet, "
        "for the lease from now on (kv_lease_duration, 30.0); otherwise forget the promise.",
        "Stopped and length-capped requests have computed their prompt, aborted ones and errors have not. "
        "self.config.extra(name, default) has the seconds, time.monotonic() the clock.",
        who_keeps_blocks,
        first="computed =",
        last="return True",
    ),
    Step(
        "08.3",
        LESSON,
        "What may leave",
        "HandOver.pump",
        "of each promise that somebody has asked for, send what is ready, wanted and not sent yet, layer by layer, "
        "while the reader has room; note what has left.",
        "A layer's message is [sent, min(ready, end)), by send_layer. What has no room leaves at the next call: its "
        "blocks are kept anyway.",
        what_leaves,
    ),
    Step(
        "08.4",
        LESSON,
        "One message",
        "HandOver.send_layer",
        "send positions [first, last) of a layer, all heads, with a KV header: transfer, layer, first, count, head, "
        "heads, and the payload's checksum as crc. If there is a wire, what it makes of the message leaves instead.",
        "self.payload takes the first position and a count, then the first head and a count. self.wire(link, header, "
        "payload) returns a list of messages, perhaps none.",
        layers_leave,
        first="payload =",
        last="for message in",
        forbidden=("gather_reference",),
    ),
    Step(
        "08.5",
        LESSON,
        "What is not believed",
        "HandOver.take",
        "write a message only if it continues its layer: count it as strange (no such pull, another link, no such "
        "layer, beyond the end), out of order (it begins elsewhere, or has not all heads) or corrupt. Wait as long "
        "again after each; the last one ends the pull.",
        "self.write says False for bytes that are not those that were sent, and has then written nothing. A pull is at "
        "its "
        'end when every layer has all up to pull.end: end_pull(transfer, "DONE").',
        messages_come,
    ),
    Step(
        "08.6",
        LESSON,
        "The end of a pull",
        "HandOver.end_pull",
        "forget the pull, tell the other engine, and the scheduler: it has arrived, or, with a `why`, it has failed.",
        "self.news has finished_recving, a set, and failed_recving, a dict of reasons, by request id. Failures are "
        "counted in self.stats. The diary (self.note) is not looked at.",
        endings_of_pulls,
    ),
    Step(
        "08.7",
        LESSON,
        "The end of a promise",
        "HandOver.free",
        "the other engine has it, or never will: nothing is sent any more; if the prompt is computed, its blocks are "
        "free.",
        "A prompt that is still being computed has a lease without an end: then the promise stays, marked as "
        "delivered, until request_finished asks. Otherwise forget it, and name its request in news.finished_sending.",
        endings_of_promises,
    ),
    Step(
        "08.8",
        LESSON,
        "Nobody waits for ever",
        "HandOver.get_finished",
        "free the promises whose lease is up, and cancel, with a reason, the pulls whose deadline has passed.",
        "Both calls change the dict that you look at: collect the names first.",
        patience_ends,
        first="now = time.monotonic()",
        last="for transfer in [t for t, p in self.pulls",
    ),
    Step(
        "08.9",
        LESSON,
        "The other engine has died",
        "HandOver.hear",
        "a connection is lost: pulls over it fail, promises to it are freed, and neither it nor what it said early is "
        "kept.",
        "give_up(link, why) ends pulls. self.links and self.early are dicts whose values name the link; compare with "
        "`is`.",
        the_other_dies,
        first='self.give_up(link, header["why"])',
        last="for t in [t for t, p in self.promises",
    ),
    Step(
        "08.10",
        LESSON,
        "Two workers, one answer",
        "Router",
        "write the methods: the first attempt goes to both workers, another one to the decode worker alone, or to the "
        "prefill worker if that is dead. Tokens that were heard stay. A second failure is an error.",
        "_dispatch: one attempt more; a worker that is alive, or an error; the prompt with the tokens so far, and as "
        "many tokens as are left. The first attempt has a transfer named after it, if both live: do_remote_decode for "
        "one token there, do_remote_prefill and the prefill worker's address here. run: wait for the pipes of those "
        "alive; EOFError or OSError is a death. _hear: what no job waits for under that name is passed over, and so is "
        "the prefill worker's own token. _bury: the dead worker's jobs are dispatched again; if it was the decode "
        "worker, prefill hears an abort of the old name first. Silence for `timeout` seconds: CheckFailed.",
        routes,
    ),
)

"""08 · Disaggregation: one machine reads the prompt, another writes the answer.

The question: a prefill is bound by arithmetic, a decode by memory. On one GPU they wait for each other. On two, the KV
cache has to travel from one to the other. What does that take, what can go wrong on the way, and when is it worth it?

The mechanism:
  1. A prefill worker and a decode worker: two processes, each a complete engine with blocks of its own.
  2. The router gives a request to both, under one name. The prefill worker computes the prompt, and one token too many.
  3. The decode worker takes blocks for the prompt and sets the request aside: it waits in no queue and in no batch.
  4. It asks the prefill worker for that name. Each layer leaves as soon as attention has written it.
  5. On the wire there are positions and heads, no blocks: the two engines' block sizes may differ.
  6. When all layers have arrived, the decode worker computes the prompt's last token again, and goes on as ever.
  7. The prefill worker keeps its blocks until the other one has them; or cancels, or dies, or a lease is up.
  8. Whatever does not arrive in time is computed by the decode worker.

Numbers to remember: a prompt of 8,192 tokens of Llama-3.1-8B is 1 GiB of KV cache: 2.4 ms on NVLink, 21 ms on 400G,
859 ms on 10 GbE. Logits never travel: for them, the decode worker computes one position again.

How to run:
  uv run python vllm/08_disagg.py                       one request's life, two processes, a death, and what it buys
  uv run python vllm/08_disagg.py --fault stall         break it: the wire falls silent after twelve messages
  uv run python vllm/08_disagg.py --fault decode-dies   break it: the other worker, in the middle of an answer
  uv run python vllm/08_disagg.py --bench               minutes: wires, streaming, steps for the cost model

Read for this: Zhong et al. 2024 (DistServe), Patel et al. 2024 (Splitwise), Qin et al. 2025 (Mooncake), vLLM 0.32
`distributed/kv_transfer/kv_connector/v1/`, `v1/core/sched/scheduler.py`, `config/kv_transfer.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import contextlib
import math
import multiprocessing.connection
import queue
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine import arguments, registry
from engine.attention.metadata import AttentionMetadata
from engine.distributed import handshake
from engine.kv_transfer.base import KVConnectorBase
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.frames import checksum
from engine.kv_transfer.kernels import gather_kv, scatter_kv
from engine.kv_transfer.links import Link
from engine.kv_transfer.params import kv_transfer_params
from engine.model import llama, loader
from engine.output import KVConnectorOutput
from engine.parallel.ranks import last_words
from engine.request import Request, RequestStatus
from lab import cli, goodput
from lab.transfers import Faults
from lab.workers import Worker, make_core, make_request, settled

KEY = "08_disagg"


# --- 1. What we want, without cleverness ------------------------------------------------------------------------------


def gather_reference(
    kv_cache: torch.Tensor, blocks: Sequence[int], first: int, count: int, head: int, heads: int
) -> torch.Tensor:
    """The rectangle, position by position. kv_cache [2, num_blocks, block_size, Hkv, D] -> [2, count, heads, D]."""
    size = kv_cache.shape[2]
    rows = [kv_cache[:, blocks[p // size], p % size, head : head + heads] for p in range(first, first + count)]
    return torch.stack(rows, dim=1)


def scatter_reference(
    buffer: torch.Tensor, kv_cache: torch.Tensor, blocks: Sequence[int], first: int, head: int
) -> None:
    """The inverse: write a rectangle [2, count, heads, D] into the blocks of another engine, position by position."""
    size, heads = kv_cache.shape[2], buffer.shape[2]
    for t in range(buffer.shape[1]):
        p = first + t
        kv_cache[:, blocks[p // size], p % size, head : head + heads] = buffer[:, t]


def next_token(model: llama.Llama, cache: Any, blocks: list[int], tokens: Sequence[int], num_new: int) -> int:
    """What follows `tokens`, of which the last `num_new` are computed now and the others are in the cache."""
    meta = AttentionMetadata.build([blocks], [len(tokens)], [num_new], cache.block_size, model.device)
    ids = torch.tensor(tokens[-num_new:], device=model.device)  # [T]
    return int(model.logits(model.forward(ids, meta.positions, cache.attend(meta))[-1:]).argmax())


def hand_over(model: llama.Llama, prompt: Sequence[int], max_tokens: int, how: str = "reference") -> list[int]:
    """Two caches, with blocks of 16 and of 32. One computes the prompt, the other one goes on with it.

    `how` the keys and values get there: "reference", position by position; "kernel"; or "again", by computing them.
    """
    sizes, n = (16, 32), len(prompt)
    caches = [registry.fill("cache.paged")(model, 1 + -(-(n + max_tokens) // size), size) for size in sizes]
    here, there = (list(range(cache.layers[0].shape[1] - 1, 0, -1)) for cache in caches)  # block 0 is nobody's
    tokens = [*prompt, next_token(model, caches[0], here, prompt, n)]
    if how == "again":
        next_token(model, caches[1], there, prompt, n)
    for source, target in zip(caches[0].layers, caches[1].layers):
        heads = source.shape[3]
        if how == "reference":
            scatter_reference(gather_reference(source, here, 0, n, 0, heads), target, there, 0, 0)
        elif how == "kernel":
            ours, theirs = (torch.tensor(blocks, device=source.device) for blocks in (here, there))
            with common.use_kernels():  # for this one: attention's are lesson 02's
                scatter_kv(gather_kv(source, ours, 0, n, 0, heads), target, theirs, 0, 0)
    while len(tokens) < n + max_tokens:
        tokens.append(next_token(model, caches[1], there, tokens, 1))
    return tokens[n:]


# --- 2. The hand-over: what prefill promises, what decode pulls, when blocks are freed --------------------------------
#
#   decode → prefill    GET     layer i from position have[i] on, to `end`
#                       DONE    I have all of it: free it            CANCEL  I do not want it any more
#   prefill → decode    HELLO   what my cache is like                KV      one layer, some positions
#
# The engine's `Link` carries them: a socket, and a thread at each end, so that no step ever waits for the network.


@dataclass
class Promise:
    """A prompt that is computed here for another engine: its blocks are kept until that one has it."""

    request: Request
    blocks: list[int]
    ready: list[int]  # of each layer: how many positions are in the blocks
    sent: list[int] = field(default_factory=list)  # of each layer: how many have left
    reader: Link | None = None  # who asked
    end: int = 0  # for how many positions
    delivered: bool = False  # it has them, or does not want them any more
    lease: float = math.inf  # nobody may keep blocks for longer; it begins when the prompt is computed


@dataclass
class Pull:
    """A prompt that another engine computes, on its way into `blocks`."""

    request: Request
    blocks: list[int]
    have: list[int]  # of each layer: how many positions have arrived
    end: int
    link: Link
    deadline: float


class HandOver(KVConnectorBase):
    """vLLM's verbs, which an engine calls where its connector may have something to say or to do.

    One object is both halves, the scheduler's and the worker's, and both sides, prefill's and decode's. The engine's
    own connectors (`vllm/engine/kv_transfer/p2p.py`) speak the same language, and more of it: tests join the two.
    """

    fetches_later = True  # a request whose prompt is elsewhere waits outside the batch
    patience = 0.1  # seconds: an engine without work looks up, for others may want something

    def __init__(self, config: KVTransferConfig) -> None:
        """A producer takes a port."""
        super().__init__(config)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()  # (link, header, payload)
        self.links: dict[tuple[str, int], Link] = {}  # those that we made
        self.accepted: list[Link] = []
        self.promises: dict[str, Promise] = {}  # by the transfer's name
        self.early: dict[str, tuple[Link, dict]] = {}  # what was said about a prompt that is not here yet
        self.pulls: dict[str, Pull] = {}
        self.asked: set[str] = set()  # request ids
        self.news = KVConnectorOutput()
        self.server = socket.create_server(("127.0.0.1", 0)) if config.is_kv_producer else None
        # What a bad day does to messages.
        self.wire: Callable[[Link, dict, torch.Tensor], list[tuple[dict, torch.Tensor]]] | None = None
        self.diary: list[tuple] = []  # (side, verb, what it did)

    def note(self, verb: str, what: str) -> None:
        self.diary.append(("prefill" if self.config.is_kv_producer else "decode", verb, what))

    @property
    def address(self) -> dict[str, Any]:
        return {"remote_host": "127.0.0.1", "remote_port": self.server.getsockname()[1]} if self.server else {}

    # -- the scheduler's half --

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Decode. How much of this request is elsewhere, and does it come later? All of the prompt; later."""
        if not kv_transfer_params(request).get("do_remote_prefill") or request.request_id in self.asked:
            return 0, False  # once: whoever did not get it, or lost it, computes it
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        """Decode. It has blocks and has left the queue: it costs no step anything, and no step waits for it."""
        self.asked.add(request.request_id)
        self.loads.append((request, blocks, request.num_prompt_tokens - num_external_tokens, request.num_prompt_tokens))
        self.note("update_state_after_alloc", f"{num_external_tokens} tokens are to come into blocks {blocks}")

    def saves(self, request: Request) -> bool:
        return bool(kv_transfer_params(request).get("do_remote_decode"))

    def request_finished(self, request: Request, blocks: Sequence[int]) -> bool:
        """Prefill. True is the promise: these blocks are not freed before `get_finished` has named the request."""
        transfer = kv_transfer_params(request).get("transfer_id", "")
        if transfer in self.pulls:  # decode, and its client has left
            self.end_pull(transfer, "CANCEL")
        promise = self.promises.get(transfer)
        if promise is None:
            return False
        computed = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if promise.delivered or not computed:
            del self.promises[transfer]
            return False
        promise.lease = time.monotonic() + self.config.extra("kv_lease_duration", 30.0)
        self.note("request_finished", f"the prompt is computed, blocks {promise.blocks} are kept")
        return True

    def has_pending_work(self) -> bool:
        unheard = self.news != KVConnectorOutput() or not self.inbox.empty()
        return bool(self.promises or self.pulls or self.loads) or unheard

    # -- the worker's half: before the model runs --

    def register_kv_caches(self, layers: list[torch.Tensor], model: Any) -> None:
        """There are blocks now, so callers may come."""
        super().register_kv_caches(layers, model)
        if self.server:
            self.reception = handshake.Reception(self.server, handshake.secret(), self.welcome)

    def welcome(self, sock: socket.socket, address: tuple) -> None:
        """Prefill. A caller that has proved to be one of ours."""
        hello = {"kind": "HELLO", "layout": self.layout(), "engine_id": self.config.engine_id, "port": 0}
        self.accepted.append(Link(self.inbox, self.wake, sock, hello=hello, max_payload=0))

    def start_load_kv(self) -> None:
        """Promise what this step computes for others, ask for what others compute, and wait for nothing."""
        for request in filter(self.saves, self.meta.preempted):
            promise = self.promises[kv_transfer_params(request)["transfer_id"]]
            promise.ready, promise.blocks = [0] * len(self.layers), []  # it will be computed again
        for request, blocks, _ in self.meta.to_save:
            self.promise(request, blocks)
        for request, blocks, first, end in self.meta.to_load:
            self.ask(request, blocks, first, end)
        self.poll()

    def promise(self, request: Request, blocks: list[int]) -> None:
        """Prefill. This prompt is somebody's. The decode worker is quicker: it may have asked already."""
        transfer = kv_transfer_params(request)["transfer_id"]
        promise = self.promises.setdefault(transfer, Promise(request, blocks, [0] * len(self.layers)))
        promise.blocks = blocks
        if transfer in self.early:
            self.hear(*self.early.pop(transfer))

    def ask(self, request: Request, blocks: list[int], first: int, end: int) -> None:
        """Decode. Positions [first, end) of this prompt, please, all layers of them."""
        params, timeout = kv_transfer_params(request), self.config.extra("timeout", 10.0)
        where = params["remote_host"], params["remote_port"]
        if where not in self.links:
            self.links[where] = Link(self.inbox, self.wake, address=where, max_payload=self.layers[0].nbytes)
        have = [first] * len(self.layers)
        pull = Pull(request, blocks, have, end, self.links[where], time.monotonic() + timeout)
        self.pulls[params["transfer_id"]] = pull
        wanted = {"head": 0, "heads": self.num_kv_heads, "end": end, "have": have, "consumers": 1}
        pull.link.send({"kind": "GET", "transfer": params["transfer_id"], **wanted})
        self.note("start_load_kv", f"GET positions {first} to {end - 1} of {len(have)} layers")

    # -- inside the model, after each layer's attention --

    def save_kv_layer(self, layer: int) -> None:
        """Prefill. This layer is in the blocks: it leaves while the next one is computed."""
        for request, _, num_tokens in self.meta.to_save:
            self.promises[kv_transfer_params(request)["transfer_id"]].ready[layer] = num_tokens
        if self.meta.to_save:
            self.poll()
            self.pump()

    def pump(self) -> None:
        """Prefill. All that is ready, wanted and not sent yet."""
        for transfer, promise in self.promises.items():
            if promise.reader is None:
                continue  # nobody has asked yet
            for layer, ready in enumerate(promise.ready):
                first, last = promise.sent[layer], min(ready, promise.end)
                if first < last and promise.reader.has_room:
                    self.send_layer(transfer, promise, layer, first, last)
                    promise.sent[layer] = last

    def send_layer(self, transfer: str, promise: Promise, layer: int, first: int, last: int) -> None:
        """Prefill. One message: positions [first, last) of a layer, all heads."""
        assert promise.reader
        payload = self.payload(promise.blocks, layer, first, last - first, 0, self.num_kv_heads)
        rectangle = {"first": first, "count": last - first, "head": 0, "heads": self.num_kv_heads}
        header = {"kind": "KV", "transfer": transfer, "layer": layer, **rectangle, "crc": checksum(payload)}
        for message in self.wire(promise.reader, header, payload) if self.wire else [(header, payload)]:
            promise.reader.send(*message)
        self.stats.update(messages=1, early=promise.lease == math.inf)  # early: the prompt is still being computed
        if layer in (0, len(self.layers) - 1):
            self.note("save_kv_layer", f"layer {layer}: KV of positions {first} to {last - 1} leaves")

    # -- between steps --

    def get_finished(self) -> KVConnectorOutput:
        """Whose blocks may be freed, whose prompt has come, and whose never will."""
        self.poll()
        self.pump()
        now = time.monotonic()
        for transfer in [t for t, p in self.promises.items() if now >= p.lease]:
            self.free(transfer)
        for transfer in [t for t, p in self.pulls.items() if now >= p.deadline]:
            self.end_pull(transfer, "CANCEL", f"no progress for {self.config.extra('timeout', 10.0):g} s")
        news, self.news = self.news, KVConnectorOutput()
        return news

    def poll(self) -> None:
        """All that the network has brought, on the engine's own thread: no block is written behind its back."""
        while not self.inbox.empty():
            self.hear(*self.inbox.get())

    def hear(self, link: Link, header: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """One message, or (LOST) the end of a connection."""
        kind, transfer = header["kind"], header.get("transfer", "")
        if kind == "KV":
            self.take(link, header, payload)
        elif kind in ("GET", "DONE", "CANCEL") and transfer not in self.promises:
            self.early[transfer] = link, header
        elif kind == "GET":
            promise = self.promises[transfer]
            promise.reader, promise.sent, promise.end = link, list(header["have"]), header["end"]
        elif kind in ("DONE", "CANCEL"):
            self.free(transfer)
        elif kind == "HELLO":
            if header["layout"] != self.layout():
                self.give_up(link, "its cache is of another kind")
        elif kind == "GONE":  # the engine's producers answer so if they have nothing for this name
            self.give_up(link, header["why"], transfer)
        else:  # LOST: the other engine has died, or the way to it
            self.give_up(link, header["why"])
            self.links = {where: other for where, other in self.links.items() if other is not link}
            self.early = {t: letter for t, letter in self.early.items() if letter[0] is not link}
            for t in [t for t, p in self.promises.items() if p.reader is link]:
                self.free(t)

    def take(self, link: Link, header: dict[str, Any], payload: torch.Tensor | None) -> None:
        """Decode. A layer's message is written if it begins where that layer ends. What belongs to no pull is late: its
        blocks may be somebody else's by now."""
        pull, layer, end = self.pulls.get(header["transfer"]), header["layer"], header["first"] + header["count"]
        if pull is None or pull.link is not link or layer >= len(pull.have) or end > pull.end:
            self.stats["strange"] += 1
        elif (header["first"], header["head"], header["heads"]) != (pull.have[layer], 0, self.num_kv_heads):
            self.stats["out of order"] += 1
        elif not self.write(pull.blocks, header, payload):
            self.stats["corrupt"] += 1  # its bytes are not those that were sent
        else:
            pull.have[layer], pull.deadline = end, time.monotonic() + self.config.extra("timeout", 10.0)
            if min(pull.have) == pull.end:
                self.end_pull(header["transfer"], "DONE")

    # -- how it ends --

    def give_up(self, link: Link, why: str, transfer: str | None = None) -> None:
        """Decode. This transfer will not come over this link any more; None: nothing will."""
        for t in [t for t, pull in self.pulls.items() if pull.link is link and transfer in (None, t)]:
            self.end_pull(t, "CANCEL", why)

    def end_pull(self, transfer: str, kind: str, why: str = "") -> None:
        """Decode. From now on nothing of it is written; and if it has failed, the prompt is computed here."""
        pull = self.pulls.pop(transfer)
        pull.link.send({"kind": kind, "transfer": transfer})
        self.note("get_finished", why or f"{len(pull.have)} layers have arrived: {kind}")
        if why:
            self.stats["failed"] += 1
            self.news.failed_recving[pull.request.request_id] = why
        else:
            self.news.finished_recving.add(pull.request.request_id)

    def free(self, transfer: str) -> None:
        """Prefill. Nobody needs it any more, or for too long: its blocks are free, at once or when it is computed."""
        promise = self.promises[transfer]
        promise.delivered, promise.reader = True, None
        if promise.lease < math.inf:
            del self.promises[transfer]
            self.news.finished_sending.add(promise.request.request_id)
            self.note("get_finished", f"blocks {promise.blocks} are freed")

    def close(self) -> None:
        """End the threads and their connections."""
        if self.server:
            self.reception.close()
        for link in (*self.links.values(), *self.accepted):
            link.close()
            link.reader.join(5)  # a fork takes no thread with it, but the locks that one holds


# --- 3. The router ----------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A request as its caller sees it: one prompt, one answer, however many attempts."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    attempts: int = 0
    worker: Worker | None = None  # who writes the answer
    start: float = field(default_factory=time.perf_counter)
    prefilled: float = 0.0  # when the prefill worker was done, seconds after the start
    first: float = 0.0  # when the first token came

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.token_ids) == self.max_tokens

    @property
    def name(self) -> str:
        """Of this attempt. No two attempts share one, so nobody can mistake one's keys and values for another's."""
        return f"{self.request_id}.{self.attempts}"


class Router:
    """Gives each request to a prefill and a decode worker, and does not lose it if one of them dies.

    Tokens that have been heard stay: another attempt has them in its prompt. That one does without a transfer, and if
    the decode worker is dead, the prefill worker writes the answer: an engine is an engine.
    """

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.prefill, self.decode = prefill, decode
        self.jobs: list[Job] = []
        self.events: list[str] = []

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> Job:
        self.jobs.append(Job(request_id, list(prompt), max_tokens))
        self._dispatch(self.jobs[-1])
        return self.jobs[-1]

    def _dispatch(self, job: Job) -> None:
        """Both workers at once, so that the decode worker has asked before the first layer is done."""
        job.attempts += 1
        job.worker = next((worker for worker in (self.decode, self.prefill) if worker.alive), None)
        if job.worker is None:
            job.error = "no worker is left"
            return
        prompt, left, params = job.prompt + job.token_ids, job.max_tokens - len(job.token_ids), {}
        if job.attempts == 1 and job.worker is self.decode and self.prefill.alive:
            self.prefill.send("add", job.name, prompt, 1, {"do_remote_decode": True, "transfer_id": job.name})
            params = {"do_remote_prefill": True, "transfer_id": job.name, **self.prefill.address}
        job.worker.send("add", job.name, prompt, left, params)

    def run(self, timeout: float = 600.0, on_token: Callable[[Job], None] = lambda job: None) -> list[Job]:
        """Until every job has its answer, or an error. Raises CheckFailed after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not all(job.done for job in self.jobs):
            alive = [worker for worker in (self.prefill, self.decode) if worker.alive]
            pipes = [worker.pipe for worker in alive]
            ready = multiprocessing.connection.wait(pipes, max(0, deadline - time.monotonic()))
            if not ready:
                raise common.CheckFailed(f"no worker has said anything for {timeout:g} s")
            for worker in (worker for worker in alive if worker.pipe in ready):
                try:
                    self._hear(worker, *worker.pipe.recv()[1:], on_token=on_token)
                except (EOFError, OSError):
                    self._bury(worker)
        return self.jobs

    def _hear(
        self,
        worker: Worker,
        name: str,
        token_ids: list[int],
        finish_reason: str | None,
        why: str | None,
        on_token: Callable[[Job], None],
    ) -> None:
        job = next((job for job in self.jobs if job.name == name and not job.done), None)
        if job is None:
            return  # of an attempt that has been given up, or of a router that had this worker before
        if worker is not job.worker:
            job.prefilled = time.perf_counter() - job.start  # its token is the decode worker's first as well
        elif finish_reason != "error":
            job.first = job.first or time.perf_counter() - job.start
            job.token_ids += token_ids
            on_token(job)
        elif job.attempts == 1:
            self.events.append(f"{name}: {why}")
            self._dispatch(job)
        else:
            job.error = why

    def _bury(self, worker: Worker) -> None:
        """A worker died. What it was writing goes on elsewhere; what it was prefilling, the decode worker will miss."""
        worker.alive = False
        self.events.append(f"{worker.name} died ({last_words(worker.process)})")
        for job in self.jobs:
            if job.worker is worker and not job.done:
                if worker is self.decode:  # nobody comes for its prompt
                    self.prefill.send("abort", job.name)
                self._dispatch(job)


# --- The story --------------------------------------------------------------------------------------------------------

TEXT = """The harbour was quiet that morning. Two ships lay at the quay, one of them loaded with grain, the other empty
but for a cat that slept on a coil of rope. The harbour master counted the crates, wrote a number into his book, crossed
it out, and counted again. He had done this for thirty years, and he had never once come to the same result twice. The
captain of the second ship came down the gangway with a letter in her hand. She asked him"""
LENGTHS, TOKENS = (90, 61, 34), 12
WAYS = {"again": "the prompt computed once more, in the other cache: the tokens of one engine",
        "reference": "moved position by position, from blocks of 16 to blocks of 32: the same",
        "kernel": "moved by the kernel: the same"}  # fmt: skip
PREFILL: dict[str, Any] = {"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 0}
DECODE: dict[str, Any] = {
    "kv_connector": "TCPConnector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
}
TROUBLES = {"out of order": "messages out of order", "corrupt": "messages corrupt",
            "failed": "prompts that did not come, and are computed here"}  # fmt: skip


def start_workers(
    model: llama.Llama,
    name: str | None,
    stack: contextlib.ExitStack,
    timeout: float = 10.0,
    make: Callable[..., Any] = HandOver,
) -> tuple[Worker, Worker]:
    """A prefill and a decode worker with blocks of different sizes, for as long as the stack. They are forks with
    `model`; but CUDA does not survive a fork, so on a GPU they load `name` themselves. The decode worker gives up on a
    prompt of which nothing comes for `timeout` seconds."""
    waits = {"kv_connector_extra_config": {"timeout": timeout}}
    loaded = model if sys.platform == "linux" and not common.HAS_GPU else name
    prefill = Worker("prefill worker", loaded, PREFILL, [], make, block_size=16, num_blocks=33)
    stack.callback(prefill.stop)
    decode = Worker("decode worker", loaded, DECODE | waits, [prefill], make, block_size=32, num_blocks=17)
    stack.callback(decode.stop)
    prefill.address, decode.address = prefill.ask(), decode.ask()
    return prefill, decode


def colocated(model: llama.Llama, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """What one engine answers, without a connector."""
    core = make_core(model)
    for i, prompt in enumerate(prompts):
        core.add_request(make_request(str(i), prompt, max_tokens))
    found: list[list[int]] = [[] for _ in prompts]
    while core.scheduler.has_unfinished_requests():
        for output in core.step():
            found[int(output.request_id)] += output.new_token_ids
    return found


def one_life(model: llama.Llama, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[tuple]]:
    """A request's tokens and its diary: two engines in this process, stepped in turn."""
    sides = [HandOver(KVTransferConfig(**config)) for config in (PREFILL, DECODE)]
    sides[1].diary = sides[0].diary
    prefill, decode = (make_core(model, side, 512 // size + 1, size) for side, size in zip(sides, (16, 32)))
    job, tokens = {"transfer_id": "x"}, []
    decode.add_request(make_request("r", prompt, max_tokens, do_remote_prefill=True, **job, **sides[0].address))
    while sides[0].inbox.empty():  # as a router would, it gives both workers the request at once; decode is quicker
        decode.step()
    prefill.add_request(make_request("r", prompt, 1, do_remote_decode=True, **job))
    while any(core.scheduler.has_unfinished_requests() for core in (prefill, decode)):
        prefill.step()
        tokens += [token for output in decode.step() for token in output.new_token_ids]
    for side in sides:
        side.close()
    return tokens, sides[0].diary


def disaggregated(
    prefill: Worker,
    decode: Worker,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    on_token: Callable[[Job], None] = lambda job: None,
    name: str = "r",
) -> tuple[list[Job], list[str]]:
    """The same from two workers: the jobs, and what the router noticed. Every `name` is used once with an engine."""
    router = Router(prefill, decode)
    for i, prompt in enumerate(prompts):
        router.submit(f"{name}{i}", prompt, max_tokens)
    return router.run(on_token=on_token), router.events


def show_good_day(
    prefill: Worker, decode: Worker, model: llama.Llama, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Part 3: what two processes say, and what has moved between them."""
    jobs, _ = disaggregated(prefill, decode, prompts, TOKENS)
    found = [job.token_ids for job in jobs]
    common.check_equal(f"the tokens of one engine, {len(prompts)} × {TOKENS}", found, expected)
    there, here = settled(prefill), settled(decode)
    halves = 1 if model.config.mla else 2  # a latent is key and value in one
    each = model.config.num_hidden_layers * halves * model.num_kv_heads * model.config.head_dim * 4  # fp32
    what = f"{sum(LENGTHS)} positions × {each:,} bytes have moved, no more"
    common.check_equal(what, here["bytes_in"], sum(LENGTHS) * each)
    common.say(f"✓ {there['messages']} messages, {there['early']} of them during the prefill; all blocks are free")
    last = max(jobs, key=lambda job: job.prefilled)
    common.say(f"prefill done after {last.prefilled * 1e3:.0f} ms, first token after {last.first * 1e3:.0f} ms")


def show_bad_day(
    prefill: Worker, decode: Worker, fault: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Part 4: whatever happens, the same answers, and nobody keeps a block."""
    prefill.send("fault", fault)

    def kill(job: Job) -> None:
        if fault == "decode-dies" and len(job.token_ids) == 3 and decode.alive:
            decode.process.kill()

    jobs, events = disaggregated(prefill, decode, prompts, TOKENS, kill)
    common.check_equal(f"{len(jobs)} answers, the tokens of one engine", [job.token_ids for job in jobs], expected)
    for event in events:
        common.say(event)
    for worker in (prefill, decode):
        if worker.process.is_alive():
            stats = settled(worker)
            told = "".join(f"; {what}: {stats[name]}" for name, what in TROUBLES.items() if stats.get(name))
            common.say(f"✓ {worker.name}: every block is free{told}")


def in_time(layout: str, budget: int | None = None, link: str = "InfiniBand 400G", exposed: int = 0) -> list[str]:
    """Of 800 requests, 2,048 tokens in and 28 out on average, 36 a second on four H100s with an 8B model: the share in
    time (300 ms to the first token, 8 ms for each further one), the median TTFT, and the longest silence.

    Each GPU is the engine's scheduler on a clock. `exposed` per cent of the shorter of reading and computing come on
    top of the longer one.
    """
    price = goodput.SerialCost(**vars(goodput.H100_8B), exposed=exposed)
    deployment = goodput.Deployment(layout, budget, goodput.LINKS[link])
    cluster = goodput.Cluster(deployment, goodput.make_jobs("azure-code", 36, 800), price)
    outcomes = [job.outcome for job in cluster.run()]
    share = goodput.attainment(outcomes, goodput.Limits(300, 8))
    ttft, silence = statistics.median(o[0] for o in outcomes), max(o[2] for o in outcomes)
    return [f"{share:.0%}", f"{ttft / 1e3:,.0f} ms", f"{silence / 1e3:,.0f} ms"]


def show_worth() -> None:
    """Part 5: the same four GPUs, used in different ways."""
    rows = []
    for what, options in {
        "4 engines, whole prompts": ("4PD",),
        "4 engines, chunks of 512": ("4PD", 512),
        "4 engines, chunks of 224": ("4PD", 224),
        "1 for prompts, 3 decode": ("1P3D",),
        "2 for prompts, 2 decode": ("2P2D",),
        "3 for prompts, 1 decodes": ("3P1D",),
        "the same, over 10 GbE": ("3P1D", None, "10 GbE"),
    }.items():
        rows.append([what, *in_time(*options), in_time(*options, exposed=25)[0]])
    common.table(["4 GPUs", "in time", "TTFT, median", "longest silence", "in time, a quarter exposed"], rows)
    chunks, split = rows[2], rows[5]
    common.say(f"The right chunks serve {chunks[1]} in time and move nothing; the right split serves {split[1]}.")
    common.say(f"If computing hides reading less well, it is the other way round: {chunks[-1]} and {split[-1]}.")


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument(
        "--fault",
        choices=Faults.KINDS,
        default="prefill-dies",
        help="what happens in part 4, from the twelfth message on; if the model has fewer layers, "
        "from as many messages on (default %(default)s)",
    )
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    loader.check_context(args.model, 512)  # `make_core`'s max_model_len

    common.heading("1. Naively: compute in one cache, move every position, go on in the other")
    model, tokenizer = loader.load(args.model, torch.float32)
    text = tokenizer.encode(TEXT)
    prompts = [text[-n:] for n in LENGTHS]
    expected = colocated(model, prompts, TOKENS)
    common.say(f"…{tokenizer.decode(prompts[2])!r} → {tokenizer.decode(expected[2])!r}"[:108])
    for how, what in WAYS.items():
        if how == "kernel" and not common.HAS_TRITON:
            common.skipped("move_kv_kernel", common.kernel_mode())
            continue
        common.check_equal(what, hand_over(model, prompts[2], TOKENS, how), expected[2])

    common.heading(f"2. One request's life: {LENGTHS[2]} tokens, two engines with a connector, stepped in turn")
    tokens, diary = one_life(model, prompts[2], TOKENS)
    for side, verb, what in diary:
        common.say(f"{side:<9}{verb:<26}{what}")
    common.check_equal("the tokens of one engine", tokens, expected[2])

    with contextlib.ExitStack() as stack:
        common.heading(f"3. Two processes, blocks of 16 and of 32, prompts of {', '.join(map(str, LENGTHS))} tokens")
        show_good_day(*start_workers(model, args.model, stack), model, prompts, expected)
    with contextlib.ExitStack() as stack:
        common.heading(f"4. A bad day: --fault {args.fault}")
        show_bad_day(*start_workers(model, args.model, stack, timeout=1.0), args.fault, prompts, expected)

    common.heading("5. When is it worth it? 36 requests/s on four GPUs, in the engine's scheduler on a clock")
    show_worth()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

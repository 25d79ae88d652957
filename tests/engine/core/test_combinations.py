"""All features at once: one scheduler, any of its collaborators, a real model, and the tokens that each request gets
alone.

The model computes in float64, and adapters are multiples of 1/64: a batch, a chunk or a merged weight rounds
differently in the sixteenth digit only, so tokens are compared exactly, through a cache in 8 bits, too.
"""

from __future__ import annotations

import common

import copy
import dataclasses
import functools
import itertools
import os
import random
import tempfile
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, Verbosity, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.assemble import make_core
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.core.hybrid_kv_cache import NULL_BLOCK, HybridKVCacheManager, SlidingWindowManager
from engine.core.scheduler import Scheduler, make_scheduler
from engine.kv_cache_interface import groups_of, max_blocks
from engine.kv_transfer.base import KVConnectorBase
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.store import KVStore
from engine.kv_transfer.store_connector import StoreConnector
from engine.lora.config import LoRAConfig
from engine.lora.lora_model import LoRAModel, merged, random_adapter
from engine.lora.manager import LoRAModelManager
from engine.model import llama
from engine.output import KVConnectorOutput
from engine.parallel.config import ParallelConfig
from engine.parallel.executors import UniProcExecutor
from engine.parallel.stages import make_groups, skeleton
from engine.parallel.worker import WorkerSpec
from engine.parallel.workers import Workers
from engine.quantization.kv_codes import dequantize, find_format, quantize
from engine.request import Request, RequestStatus, SamplingParams
from engine.sampling.sampler import Sampler, SamplingState
from engine.spec_decode import trained
from engine.spec_decode.drafters import Draft, Drafter, SpeculativeConfig, make_drafter
from engine.worker.assemble import make_runner
from lab import naive
from support.broken import break_class

# --- A model, and what a request gets alone ---------------------------------------------------------------------------

VOCABULARY, MOST = 32, 12  # tokens that there are; the longest answer
INT8 = "int8_per_token_head"
MODEL = llama.random_model(
    seed=6, dtype=torch.float64, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
DOCUMENTS = [random.Random(i).choices(range(VOCABULARY), k=40) for i in range(2)] + [[5, 6, 7, 6] * 10]
WISHES = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0, "logprobs": 1},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_p": 0.9, "presence_penalty": 1.0},
    {"temperature": 1.0, "seed": 5, "top_k": 5, "logprobs": 2},
    {"temperature": 0.9, "seed": 6, "min_p": 0.1, "logit_bias": {3: 2.0}, "allowed_token_ids": list(range(0, 32, 2))},
    {"temperature": 0, "bad_words": ["xx"], "_bad_words_token_ids": [[t, t] for t in range(VOCABULARY)]},
]


@functools.cache
def adapter(seed: int) -> LoRAModel:
    """Whatever multiplies its matrices, and in whichever order, gets the same numbers."""
    lora = random_adapter(MODEL.config, 1 + seed % 2, seed, size=1.5, targets=("q_proj", "v_proj", "down_proj"))
    exact = {
        name: tuple(pair and tuple((64 * matrix).round() / 64 for matrix in pair) for pair in pairs)
        for name, pairs in lora.weights.items()
    }
    return dataclasses.replace(lora, weights=exact)


@functools.cache
def model_of(seed: int | None, windows: tuple = ()) -> llama.Llama:
    """With an adapter in it, and with `windows` of its layers."""
    model = copy.copy(MODEL if seed is None else merged(MODEL, adapter(seed)))
    model.config = dataclasses.replace(model.config, sliding_windows=windows)
    return model


def recompute_in(kv_cache_dtype: str, windows: tuple = ()):
    """`attend` without a cache, but with keys and values as such a cache gives them back, in windows if there are
    any."""
    if windows:
        return functools.partial(recompute_in_windows, windows)
    if kv_cache_dtype == "auto":
        return naive.recompute

    def through(x: torch.Tensor) -> torch.Tensor:
        fmt = find_format(kv_cache_dtype)
        return dequantize(*quantize(x, fmt), fmt).to(x.dtype)

    return lambda layer, q, k, v: naive.recompute(layer, q, through(k), through(v))


def recompute_in_windows(windows, layer, q, k, v):
    """A query at t sees the keys s with t − window < s ≤ t."""
    t = torch.arange(len(q))
    seen = (t <= t[:, None]) & (t > t[:, None] - (windows[layer] or len(q)))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(0, 1)


@functools.cache
def alone(
    prompt: tuple[int, ...], wish: int, seed: int | None, kv_cache_dtype: str, windows: tuple = ()
) -> tuple[list[int], list[dict]]:
    """`MOST` tokens, and their log probabilities: the whole sequence through the model for each, without an engine."""
    model, attend, logprobs = model_of(seed, windows), recompute_in(kv_cache_dtype, windows), []
    params = SamplingParams(**WISHES[wish])
    request = Request("alone", list(prompt), params)
    state, sampler = SamplingState(request, params.seed or 0), Sampler()
    for _ in range(MOST):
        ids = torch.tensor(request.all_token_ids)
        hidden = model.forward(ids, torch.arange(len(ids)), attend)
        (token,), (found,) = sampler(model.logits(hidden[-1:]), [state])
        request.append_output_token_id(token)
        logprobs.append(found)
    return request.output_token_ids, logprobs


@functools.cache
def keys_and_values(prompt: tuple[int, ...], seed: int | None, windows: tuple = ()) -> list[torch.Tensor]:
    """Of each layer, [2, T, Hkv, D]: what a prefill engine would send."""
    found, attend = [], recompute_in("auto", windows)

    def listening(layer, q, k, v):
        found.append(torch.stack((k, v)))
        return attend(layer, q, k, v)

    model_of(seed, windows).forward(torch.tensor(prompt), torch.arange(len(prompt)), listening)
    return found


# --- Collaborators that the machine can steer -------------------------------------------------------------------------


UNTRAINED = ("draft_model", "medusa", "eagle")


class Oracle(Drafter):
    """Knows what each request will get, and lies in some places."""

    def __init__(self, answers: dict[str, list[int]], right: int) -> None:
        self.answers, self.right = answers, right  # of ten drafts

    def propose(self, contexts):
        drafts = []
        for each in contexts:
            first = len(each.token_ids)
            guesses = enumerate(self.answers[each.request_id][first : first + each.max_tokens], first)
            drafts.append(Draft([t if 7 * p % 10 < self.right else (t + 1) % VOCABULARY for p, t in guesses]))
        return drafts


def untrained(method: str) -> Drafter:
    """With random weights: it guesses badly. EAGLE and Medusa need hidden states."""
    g = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=g, dtype=MODEL.dtype) / shape[-1] ** 0.5
               for name, shape in trained.network_shapes(method, MODEL.config).items()}  # fmt: skip
    return trained.DRAFTERS[method](trained.Network(method, MODEL, torch.arange(0, VOCABULARY, 2), tensors))


class Elsewhere(KVConnectorBase):
    """Another engine has the keys and values of some prompts, and wants those of others; both take some steps."""

    fetches_later = True
    windows: tuple = ()  # of the model

    def __init__(self, policy: str) -> None:
        super().__init__(KVTransferConfig("TCPConnector", "kv_both", kv_load_failure_policy=policy))
        self.there: dict[str, tuple[int, int | None, int | None]] = {}  # id: steps, tokens that arrive, adapter
        self.coming: dict[str, tuple] = {}
        self.wanted: dict[str, int] = {}  # id: steps for which its blocks are read
        self.read: dict[str, tuple[int, list[int]]] = {}

    def register_kv_caches(self, layers, model):
        self.layers, self.block_size = layers, layers[0].shape[2]

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.request_id not in self.there:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        steps, arrive, seed = self.there.pop(request.request_id)
        prompt = tuple(request.prompt_token_ids)
        self.coming[request.request_id] = (steps, arrive, seed, prompt, list(blocks), len(prompt) - num_external_tokens)

    def request_finished(self, request, blocks):
        self.there.pop(request.request_id, None)
        steps = self.wanted.pop(request.request_id, None)
        ended = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if steps is None or not ended:
            return False
        self.read[request.request_id] = steps, list(blocks)
        return True

    def has_pending_work(self):
        return bool(self.coming or self.read)

    def get_finished(self):
        news = KVConnectorOutput()
        for name, (steps, arrive, seed, prompt, blocks, first) in list(self.coming.items()):
            self.coming[name] = (steps - 1, arrive, seed, prompt, blocks, first)
            if steps > 0:
                continue
            del self.coming[name]
            if arrive == 0:
                news.failed_recving[name] = "lost"
                continue
            news.finished_recving.add(name)
            end = len(prompt) if arrive is None else max(first, min(arrive, len(prompt)))
            if end < len(prompt):
                end -= end % self.block_size
                news.invalid_block_ids |= set(
                    blocks[max(first, end) // self.block_size : -(-len(prompt) // self.block_size)]
                )
            for p in range(first, end):
                for layer, kv in zip(self.layers, keys_and_values(prompt, seed, self.windows)):
                    layer[:, blocks[p // self.block_size], p % self.block_size] = kv[:, p]
        for name, (steps, blocks) in list(self.read.items()):
            self.read[name] = steps - 1, blocks
            if steps <= 0:
                del self.read[name]
                news.finished_sending.add(name)
        return news

    def idle(self, seconds):
        """Nothing comes sooner for it."""


class Turns:
    """Reads adapters as the engine's thread does, one a turn, and a turn is when the machine says so."""

    def __init__(self) -> None:
        self.queue: deque = deque()

    def submit(self, function, *args) -> Future:
        future: Future = Future()
        self.queue.append((future, function, args))
        return future

    def turn(self) -> None:
        while self.queue:
            future, function, args = self.queue.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except common.InputError as error:
                    future.set_exception(error)
                return


def core_of(
    limits, num_blocks, block_size, caching=False, config=None, connector=None, lora=None, model=MODEL
) -> EngineCore:
    """An engine core whose model runs here; `config` has its drafts."""
    config = config or VllmConfig()
    scheduler = make_scheduler(
        limits, num_blocks, block_size, caching, kv_cache_groups=groups_of(model.config, config, block_size),
        connector=connector, drafts=config.speculative_config, adapters=lora,
    )  # fmt: skip
    if lora:
        lora.block_pool = scheduler.kv_cache_manager.block_pool
    return EngineCore(
        scheduler, make_runner(model, limits, num_blocks, block_size, config, lora=lora, connector=connector)
    )


def tables_of(manager, name: str) -> list[list[int]]:
    """A request's block tables, one for each group of layers."""
    tables = manager.get_block_ids(name)
    return tables if isinstance(manager, HybridKVCacheManager) else [tables]


def indexed_of(manager) -> dict[str, int]:
    """Leading blocks of each request's tables that need not be indexed any more."""
    if not isinstance(manager, HybridKVCacheManager):
        return manager.num_cached_block
    return {name: n for each in manager.managers for name, n in each.num_cached_block.items()}


def load_adapter(lora: LoRAModelManager, name: str, source) -> None:
    """As an engine does between two steps, with a reader that takes turns."""
    future = lora.begin_reading(name, source)
    while not future.done():
        lora.reader.turn()
    lora.add_read(name, source, future.result())


def adapters_of(**about) -> LoRAModelManager:
    """A manager that reads when it is told to."""
    lora = LoRAModelManager(LoRAConfig(max_lora_rank=2, **about))
    lora.reader, lora.patience = Turns(), 0.0
    return lora


@dataclass
class Sent:
    """A request, and what must become of it."""

    request: Request
    answer: list[int]  # alone, with the token that ends it
    reason: str
    logprobs: list[dict]
    exact: bool  # else it is drawn, with drafts that are drawn: its distribution is the promise
    heard: list[int] = field(default_factory=list)


# --- The machine ------------------------------------------------------------------------------------------------------

# Choices within a rule are drawn uniformly, in place of from strategies: these repeat themselves, to shrink well.
dice = st.randoms(use_true_random=True)
STORES = itertools.count()  # the next one's folder


class Combinations(RuleBasedStateMachine):
    """Requests come, go and end, while keys and values get lost, adapters leave, and the next step is planned.

    `KIND` is a connector, or that a step is planned ahead: the engine has one of them, or none.
    """

    KIND: str | None = None

    @initialize(rng=dice)
    def start(self, rng):
        self.block_size = rng.choice([2, 3, 4, 8])
        self.max_model_len, seats = rng.randint(16, 36), rng.choice([1, 2, 4, 5, 6])
        chunked = rng.choice([True, False])
        self.limits = SchedulerConfig(
            self.max_model_len,
            seats,
            (seats if chunked else max(self.max_model_len, seats)) + rng.randint(0, 12),
            rng.choice(["fcfs", "priority", "priority"]),
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice([0, 0, 3]),
            scheduler_reserve_full_isl=rng.choice([True, False]),
            watermark=rng.choice([0.0, 0.0, 0.2]),
        )
        kind, self.ahead = self.KIND, self.KIND == "ahead"
        # Some do not go together, and the engine's arguments say so.
        self.kv_cache_dtype = rng.choice(["auto", "auto" if kind in ("store", "elsewhere") else INT8])
        self.answers: dict[str, list[int]] = {}
        drafts, drafter = self.draw_drafts(rng)
        self.windows = () if self.kv_cache_dtype == INT8 else rng.choice([(), (5, None), (3, 9), (4, 4)])
        self.draw_adapters(rng, kind)
        self.model = model_of(None, self.windows)
        self.folder = Path(tempfile.gettempdir()) / f"blocks-{os.getpid()}-{next(STORES)}" if kind == "store" else None
        self.connector = self.make_connector(rng, kind)
        config = VllmConfig(
            kv_cache_dtype=self.kv_cache_dtype, enforce_eager=True, async_scheduling=self.ahead,
            hybrid_kv_cache=not (self.lora or self.connector), speculative_config=drafts,
            lora_config=self.lora and self.lora.config, plug={"drafter": drafter} if drafts else {},
        )  # fmt: skip
        caching = rng.choice([True, False])
        self.groups = groups_of(self.model.config, config, self.block_size)
        self.in_flight = self.limits.max_num_batched_tokens * (1 + self.ahead)
        num_blocks = 1 + max_blocks(self.groups, self.block_size, self.max_model_len, self.in_flight)
        num_blocks += rng.choice([0, 0, 1, 2, 4, 9])
        self.core = (self.make_ahead if self.ahead else self.make_here)(num_blocks, config, caching)
        self.scheduler = self.core.scheduler
        self.manager, self.pool = self.scheduler.kv_cache_manager, self.scheduler.kv_cache_manager.block_pool
        self.sent: dict[str, Sent] = {}  # not ended
        self.ended: list[Sent] = []
        self.arrivals = itertools.count()
        note(f"{self.limits}, {num_blocks} blocks of {self.block_size}, prefix cache {caching}")
        note(f"{config}, {self.connector and self.connector.config}, windows {self.windows}")
        for i in range(3 if self.lora else 0):
            self.load(i, 0)
        for _ in range(rng.randint(2, 7)):
            self.add_one(rng)

    def draw_drafts(self, rng):
        method = rng.choice([None, None, *["oracle"] * 5, "ngram", "suffix", "lookahead", "early_exit", *UNTRAINED])
        self.drawn = method in ("early_exit", "draft_model", "eagle")
        if method is None:
            return None, None
        right = rng.choice([5, 8, 10])
        makers = {name: functools.partial(lambda name, *about: untrained(name), name) for name in UNTRAINED}
        makers["oracle"] = lambda *about: Oracle(self.answers, right)
        drafts = SpeculativeConfig(
            "ngram" if method in makers else method,  # a plug needs no name
            rng.randint(1, 3 if method == "medusa" else 4),
            prompt_lookup_min=1,
            prompt_lookup_max=3,
            model="1" if method == "early_exit" else None,
            num_speculative_tokens_per_batch_size=rng.choice([None, None, [[1, 1, 1], [2, 9, 0]]]),
            num_speculative_tokens_schedule=rng.choice(["constant", "heuristic"]),
        )
        return drafts, makers.get(method, make_drafter)

    def draw_adapters(self, rng, kind):
        self.lora: LoRAModelManager | None = None
        self.versions: dict[str, int] = {}  # of known adapters, their seeds
        self.spoiled: set[str] = set()
        self.unread: set[str] = set()  # that could not be read, some time
        if kind == "store" or rng.random() < (0.6 if self.windows else 0.3):
            return
        max_loras = rng.randint(1, 2)
        unified = self.kv_cache_dtype == "auto" and not self.ahead and self.block_size > 2 and rng.choice([True, False])
        self.lora = adapters_of(
            max_loras=max_loras, max_cpu_loras=max_loras + rng.randint(0, 2),
            memory="unified" if unified else "slots", fair=rng.choice([True, False]),
        )  # fmt: skip

    def make_connector(self, rng, kind):
        if kind not in ("store", "elsewhere"):
            return None
        policy = rng.choice(["recompute", "recompute", "fail"])
        if kind == "elsewhere":
            elsewhere = Elsewhere(policy)
            elsewhere.windows = self.windows
            return elsewhere
        sizes = rng.choice([(1 << 24, 0), (1 << 14, 1 << 24), (1 << 14, 0)])
        extra = dict(zip(("folder", "cpu_bytes", "disk_bytes"), (str(self.folder), *sizes)))
        return StoreConnector(KVTransferConfig("StoreConnector", "kv_both", "", 0, policy, extra))

    def make_here(self, num_blocks, config, caching):
        sizes = num_blocks, self.block_size, caching
        about = {"connector": self.connector, "lora": self.lora, "model": self.model}
        core = core_of(self.limits, *sizes, config=config, **about)
        self.runner = core.runner
        return core

    def make_ahead(self, num_blocks, config, caching):
        """The worker runs a step as soon as it is sent, on this thread; it is heard of when the next one is planned."""
        executor, parallel = UniProcExecutor(), ParallelConfig(async_scheduling=True)
        worker = executor.worker
        worker.spec, worker.model = WorkerSpec(None, parallel, MODEL.dtype, config), copy.copy(self.model)
        worker.model.whole_config = self.model.config
        worker.set_groups(*make_groups(None, parallel))
        workers = Workers(executor, parallel, skeleton(self.model.config, parallel, MODEL.dtype))
        config = dataclasses.replace(config, workers=workers)
        core = make_core(
            workers.model, self.limits, num_blocks, self.block_size, config, enable_prefix_caching=caching,
            lora=self.lora,
        )  # fmt: skip
        self.runner, self.worker = worker.runner, worker
        return core

    # --- what happens

    def prompt(self, rng, owner) -> list[int]:
        """A part of a document, or of what somebody has with this adapter, and perhaps something new."""
        known = [sent.request for sent in (*self.sent.values(), *self.ended[-6:])]
        known = [request.all_token_ids for request in known if request.lora_name == owner] or DOCUMENTS
        text = rng.choice(known if rng.random() < 0.5 else DOCUMENTS)
        most = self.max_model_len - 1
        n = rng.choice([rng.randint(1, 8), rng.randint(1, most // 2), rng.randint(1, most), most])
        n -= n % self.block_size if rng.random() < 0.3 else 0
        return [*text[: max(1, n)], *rng.choices(range(4), k=rng.choice([0, 0, 1, 2]))][:most]

    @rule(rng=dice, n=st.integers(1, 3))
    def add(self, rng, n):
        for _ in range(n):
            self.add_one(rng)
        self.steps(rng.randint(0, 2))

    def add_one(self, rng, owner=None):
        name = rng.choice("abcdefgh")
        if name in self.sent or name in self.scheduler.held:
            with pytest.raises(common.InputError, match="in use"):
                self.core.add_request(Request(name, [1], SamplingParams()))
            return
        known = sorted(filter(self.lora.knows, self.versions)) if self.lora else []
        owner = owner or rng.choice([None, *known])
        prompt, wish = self.prompt(rng, owner), rng.randint(0, len(WISHES) - 1)
        most = rng.choice([1, 4, MOST, MOST])
        tokens, logprobs = alone(tuple(prompt), wish, self.versions.get(owner), self.kv_cache_dtype, self.windows)
        self.answers[name] = [*prompt, *tokens]
        params = SamplingParams(
            max_tokens=most, skip_reading_prefix_cache=rng.choice([False] * 4 + [True]),
            stop_token_ids=rng.choice([[], [], [tokens[most // 2]]]), **WISHES[wish],
        )  # fmt: skip
        request = Request(
            name, prompt, params, arrival_time=next(self.arrivals), lora_name=owner,
            priority=rng.randint(-len(self.sent), 3),  # who comes late is often more urgent
            eos_token_id=rng.choice([None, None, tokens[-1]]),
            cache_salt=rng.choice([None, None, None, "salt"]),
        )  # fmt: skip
        if isinstance(self.connector, Elsewhere):  # its prompt may be there, or be wanted there
            if rng.choice([True, False]):
                arrive = rng.choice([None, None, 0, 1, len(prompt) // 2])
                self.connector.there[name] = rng.randint(0, 3), arrive, self.versions.get(owner)
            elif rng.choice([True, False]):
                self.connector.wanted[name] = rng.randint(0, 3)
        note(f"{name}: {prompt}, {WISHES[wish]}, at most {most}, {owner}, priority {request.priority}")
        self.core.add_request(request)
        self.sent[name] = self.expect(request, tokens, logprobs)

    def expect(self, request, tokens, logprobs) -> Sent:
        """Where its answer must end, and why."""
        most = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        ends = [
            i for i, token in enumerate(tokens[:most], 1) if token in {request.eos_token_id, *request.stop_token_ids}
        ]
        length = ends[0] if ends else most
        exact = not (self.drawn and request.sampling_params.temperature)
        return Sent(request, tokens[:length], "stop" if ends else "length", logprobs, exact)

    @precondition(lambda self: self.sent)
    @rule(rng=dice, during=st.booleans())
    def end(self, rng, during):
        """A client leaves, perhaps while the model runs, or a front end has found a stop string."""
        name = rng.choice(sorted(self.sent))
        if during:
            self.step(name)
        else:
            self.finish(name, rng.choice([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED]))

    def finish(self, name, status=RequestStatus.FINISHED_ABORTED):
        assert [request.request_id for request in self.scheduler.finish_requests([name, "nobody"], status)] == [name]
        del self.sent[name]

    @rule(n=st.integers(1, 3))
    def steps(self, n):
        for _ in range(n):
            self.step()

    @precondition(lambda self: self.folder)
    @rule(rng=dice)
    def lose_stored_blocks(self, rng):
        """Some are cut short: a look-up finds them, a load does not."""
        store = self.connector.store
        paths = sorted(path for tier in (store.cpu, store.disk) if tier for path in tier.folder.iterdir())
        every = rng.randint(1, 3)
        for path in paths[::every]:
            path.write_bytes(path.read_bytes()[:-5])

    @rule()
    def forget_cached_blocks(self):
        self.manager.reset_prefix_cache()

    @precondition(lambda self: self.lora)
    @rule(i=st.integers(0, 2), rng=dice)
    def load_or_unload(self, i, rng):
        """Or both, so that a name stands for other weights."""
        name = f"a{i}"
        if self.lora.knows(name):
            self.lora.remove_adapter(name, in_use=self.scheduler.uses(name))
            if rng.random() < 0.5:
                return
        if name in self.lora.retired:
            with pytest.raises(common.InputError, match="still used"):
                self.lora.begin_reading(name, lambda: None)
        else:
            self.load(i, 1 - self.versions[name] // 3)
            self.add_one(rng, name)

    def load(self, i, version):
        name, seed = f"a{i}", i + 3 * version
        self.spoiled.discard(name)
        source = functools.partial(self.read, name, seed)
        load_adapter(self.lora, name, source)
        self.versions[name] = seed

    def read(self, name, seed) -> LoRAModel:
        if name in self.spoiled:
            self.unread.add(name)
            raise common.InputError(f"{name}: cannot be read any more")
        return adapter(seed)

    @precondition(lambda self: self.lora)
    @rule(i=st.integers(0, 2))
    def spoil_an_adapter(self, i):
        self.spoiled ^= {f"a{i}"}

    # --- a step

    def step(self, leaves: str | None = None):
        """Plan, run, hear; a client may leave in between."""
        self.poison()
        if self.lora:
            self.lora.reader.turn()
        if self.ahead:
            while output := self.core.put_in_flight():
                self.check_plan(output)
            output, result = self.core.next_result()
        else:
            output = self.scheduler.schedule()
            self.check_plan(output)
            self.poison()  # what a window has just left, too
            result = self.core.execute_model(output)
        if leaves:
            self.finish(leaves)
        for heard in self.core.update_from_output(output, result):
            self.hear(heard)

    def poison(self):
        """Whoever reads what nobody owns and the index does not know gets NaN."""
        dead = [block for block in self.pool.free_queue if self.pool.block_hash[block] is None]
        for layer in self.runner.cache.layers:
            layer[:, dead] = 255 if layer.dtype == torch.uint8 else float("nan")

    def hear(self, heard):
        sent = self.sent[heard.request_id]
        request, sent.heard = sent.request, sent.heard + heard.new_token_ids
        assert request.output_token_ids[: len(sent.heard)] == sent.heard
        if sent.exact:
            assert sent.heard == sent.answer[: len(sent.heard)], "it gets other tokens than alone"
        if request.sampling_params.logprobs is not None and heard.new_token_ids:
            (token,), found = heard.new_token_ids, heard.new_logprobs
            assert token in found
            if sent.exact:
                right = sent.logprobs[len(sent.heard) - 1]
                assert found.keys() == right.keys()
                assert all(abs(found[t].logprob - right[t].logprob) < 1e-5 for t in right)
        assert request.is_finished() or not heard.finish_reason
        if heard.finish_reason == "error":
            self.check_error(request, heard.stop_reason)
        elif heard.finish_reason:
            ends = {request.eos_token_id, *request.stop_token_ids}
            assert heard.finish_reason == ("stop" if sent.heard[-1] in ends else "length")
            assert not ends & set(sent.heard[:-1]) and len(sent.heard) <= request.max_tokens
            assert not sent.exact or (sent.heard, heard.finish_reason) == (sent.answer, sent.reason)
        if heard.finish_reason:
            self.ended.append(self.sent.pop(heard.request_id))

    def check_error(self, request, why):
        """Only where something was lost, or an adapter cannot be read, or has no room."""
        if why.startswith("KV load failed"):
            assert self.connector.load_failure_policy == "fail" and request.sampling_params.logprobs is None
        else:
            assert why.startswith(f"lora_name {request.lora_name!r}: "), why
            assert "no room" in why or request.lora_name in self.unread

    def check_plan(self, output):
        """Between `schedule()` and the model."""
        scheduler, planned = self.scheduler, output.num_scheduled_tokens
        most = scheduler.max_num_scheduled_tokens
        assert output.total_num_scheduled_tokens == most - scheduler.token_budget <= most
        assert all(0 < n <= scheduler.long_prefill_cap for n in planned.values())
        admitted = output.scheduled_new_reqs + output.scheduled_resumed_reqs
        members = output.scheduled_running_reqs + admitted
        assert sorted(planned) == sorted(request.request_id for request in members)
        assert {*members} <= {*scheduler.running} and not (admitted and output.preempted_reqs)
        assert output.scheduled_spec_decode_tokens.keys() <= planned.keys()
        writers: dict[tuple[int, int], str] = {}
        for request in members:
            tables, end = tables_of(self.manager, request.request_id), request.num_computed_tokens
            drafts = output.scheduled_spec_decode_tokens.get(request.request_id, ())
            places = request.num_output_placeholders + request.num_draft_placeholders
            assert all(end <= len(table) * self.block_size for table in tables), "a token without a slot"
            assert end <= request.num_tokens + (places if self.ahead else len(drafts))
            assert self.ahead or request.num_output_tokens + len(drafts) < request.max_tokens
            for table in tables:
                for p in range(end - planned[request.request_id], end):
                    slot = table[p // self.block_size], p % self.block_size
                    assert writers.setdefault(slot, request.request_id) == request.request_id, "two writers"
            for group, table in zip(self.groups, tables):
                held = len(table) - table.count(NULL_BLOCK)
                assert held <= group.spec.max_blocks(end, self.in_flight), "a block out of the window is held"
        if self.lora:
            used = {request.lora_name for request in members} - {None}
            assert len(used) <= self.lora.max_loras and used <= self.lora.slots.keys()

    # --- what must hold

    @invariant()
    def books_are_right(self):
        """Every block is free, owned or cached once; every request is in one place; counts fit."""
        if not hasattr(self, "core"):
            return
        scheduler, manager = self.scheduler, self.manager
        self.pool.check()
        tables = [table for name in manager.req_to_blocks for table in tables_of(manager, name)]
        tables = [[block for block in table if block != NULL_BLOCK] for table in tables]
        tables += self.lora.blocks.values() if self.lora else ()
        assert all(len(set(table)) == len(table) for table in tables)
        owners = Counter(block for table in tables for block in table)
        assert [owners[block] for block in range(self.pool.num_blocks)] == self.pool.ref_count
        running, waiting, loading = scheduler.running, list(scheduler.waiting), scheduler.waiting_for_remote_kvs
        assert manager.req_to_blocks.keys() <= {r.request_id for r in running} | loading.keys() | scheduler.held.keys()
        places = [request.request_id for request in (*running, *waiting)] + [*loading]
        assert sorted(places) == sorted(scheduler.requests) == sorted(self.sent)
        assert len(running) <= scheduler.max_num_running_reqs
        for request in running:
            ahead = request.num_output_placeholders + request.num_draft_placeholders
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens <= request.num_tokens + (ahead if self.ahead else -1)
            indexed = indexed_of(manager).get(request.request_id, 0) * self.block_size
            assert indexed <= min(request.num_computed_tokens, request.num_tokens), "a block is indexed before its time"
            assert request.num_cached_tokens <= request.num_computed_tokens or request.num_preemptions
        for request in waiting:
            assert request.num_computed_tokens == request.num_draft_placeholders == 0 and not request.spec_token_ids
        if self.lora:
            self.lora.check()
            assert self.lora.meta is None, "whoever uses the model outside a step has no adapter"

    def teardown(self):
        """Everything ends, what was kept is right, and nothing is kept of who has ended."""
        if not hasattr(self, "core"):
            return
        try:
            self.drain()
            for i, sent in enumerate(self.ended[-3:]):
                self.ask_again(f"again {i}", sent)
            self.drain()
            self.ask_again("last", None)
            self.drain()
            if not self.ahead:
                self.step()  # tells the runner who has ended
            self.check_nothing_is_left()
        finally:
            if self.folder:
                self.connector.close()
                KVStore(self.folder, 0, 1).clear()

    def drain(self):
        for _ in range(600):
            if not self.scheduler.has_unfinished_requests() and not getattr(self.core, "batch_queue", ()):
                return
            self.step()
            self.books_are_right()
        waiting, loading = list(self.scheduler.waiting), self.scheduler.waiting_for_remote_kvs
        where = f"{self.scheduler.running} run, {waiting} wait, {loading} load, {self.pool.num_free_blocks} blocks free"
        raise AssertionError(f"somebody waits for ever: {where}; tables {self.manager.req_to_blocks}")

    def ask_again(self, name, sent):
        """The conversation as a prompt: what caches and stores keep of it is what would be computed."""
        prompt = sent.request.all_token_ids[: self.max_model_len - 2] if sent else [1]
        owner = sent and sent.request.lora_name
        if owner and not (self.lora.knows(owner) and owner not in self.spoiled):
            return
        tokens, logprobs = alone(tuple(prompt), 0, self.versions.get(owner), self.kv_cache_dtype, self.windows)
        request = Request(name, prompt, SamplingParams(max_tokens=2, **WISHES[0]), lora_name=owner,
                          cache_salt=sent and sent.request.cache_salt)  # fmt: skip
        self.answers[name] = [*prompt, *tokens]
        self.core.add_request(request)
        self.sent[name] = self.expect(request, tokens, logprobs)

    def check_nothing_is_left(self):
        scheduler, runner = self.scheduler, self.runner
        last = {"last"} if self.ahead else set()  # it hears with its next step who has ended
        kept = (scheduler.requests, scheduler.running, scheduler.waiting, scheduler.received, scheduler.held,
                scheduler.waiting_for_remote_kvs, scheduler.void, scheduler.broken, self.manager.req_to_blocks,
                indexed_of(self.manager))  # fmt: skip
        assert not any(map(len, kept))
        names = [runner.batch.rows, runner.states, runner.prompts.scored]
        if self.ahead:
            names += [self.worker.requests, self.worker.block_ids]
        if drafts := runner.drafts:
            drafter = drafts.drafter
            names += [drafts.draft_probs, drafts.hidden, drafts.k, drafts.proposed, drafts.computed]
            about = ("indexed", "automata", "rows", "pool", "known", "drafted", "true_rows", "offset")
            names += [getattr(drafter, each) for each in about if hasattr(drafter, each)]
            if hasattr(drafter, "cache"):
                names.append(drafter.cache.tables)
        assert all(known.keys() <= last for known in names)
        if self.connector:
            assert not any(map(len, (self.connector.loads, *(
                (self.connector.staged, self.connector.void) if self.folder else
                (self.connector.there, self.connector.coming, self.connector.wanted, self.connector.read)
            ))))  # fmt: skip
        if self.lora:
            assert not self.lora.retired
            for name in list(self.lora.sources):
                self.lora.remove_adapter(name)
            assert len(self.lora.free_slots) == self.lora.max_loras and not self.lora.loading
        assert self.pool.num_free_blocks == self.pool.num_blocks - 1


class Store(Combinations):
    KIND = "store"


class FromElsewhere(Combinations):
    KIND = "elsewhere"


class Ahead(Combinations):
    KIND = "ahead"


MACHINES = (Combinations, Store, FromElsewhere, Ahead)
TestAlone, TestStore, TestFromElsewhere, TestAhead = (machine.TestCase for machine in MACHINES)
TestAlone.settings = TestStore.settings = settings(max_examples=18, stateful_step_count=30)
TestFromElsewhere.settings = TestAhead.settings = TestAlone.settings


@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES)
def test_for_longer(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=50))


# --- It can fail ------------------------------------------------------------------------------------------------------

BREAK = {  # a machine that notices, whose text, what stands there, and what stands in its place
    "rejected drafts stay computed": (
        Combinations, Scheduler, "request.num_computed_tokens -= len(drafts) - num_accepted", "pass"),
    "drafts exceed the budget": (
        Combinations, Scheduler, "num_new_tokens += min(len(request.spec_token_ids), room)",
        "num_new_tokens += len(request.spec_token_ids)"),
    "a victim keeps its drafts": (Combinations, Scheduler, "victim.spec_token_ids = []", "pass"),
    "adapters are not released": (Combinations, Scheduler, "self.adapters.release(lora)", "pass"),
    "an adapter in use may go": (
        Combinations, Scheduler, "self.adapters.give_blocks({r.lora_name for r in self.running})",
        "self.adapters.give_blocks(set())"),
    "a victim counts on drafts": (
        Ahead, Scheduler, "victim.num_computed_tokens = victim.num_draft_placeholders = 0",
        "victim.num_computed_tokens = 0"),
    "a victim is rolled back": (
        Ahead, Scheduler, "(self.async_scheduling and request.status is RequestStatus.PREEMPTED)", "False"),
    "who ended without a seat queues on": (
        Ahead, Scheduler, "if request.num_computed_tokens == 0 and request in self.waiting:", "if False:"),
    "seated without an adapter": (
        FromElsewhere, Scheduler, "if self.adapters and not self._adapter_may_run(request, output, self.adapters):",
        "if False:"),
    "held blocks are never freed": (
        FromElsewhere, Scheduler, "self.kv_cache_manager.free(self.held.pop(request_id))", "self.held.pop(request_id)"),
    "what was computed on nothing counts": (
        Store, Scheduler, "sampled_token_ids.pop(request.request_id, None)  # computed on nothing", "pass"),
    "a window leaves a key too early": (
        Combinations, SlidingWindowManager, "num_computed_tokens - self.sliding_window + 1)",
        "num_computed_tokens - self.sliding_window + 2)"),
    "a hit is a block short of its window": (
        Combinations, SlidingWindowManager, "(self.sliding_window - 1) / self.block_size",
        "(self.sliding_window - 2) / self.block_size - 1"),
    "a window forgets that drafts may be taken back": (
        Ahead, HybridKVCacheManager, "computed - request.num_draft_placeholders", "computed"),
    "a window that is not left": (
        Combinations, SlidingWindowManager, "return max(0, num_computed_tokens - self.sliding_window + 1)", "return 0"),
    "lost blocks stay in the index": (
        Store, Scheduler, "self.kv_cache_manager.evict_uncomputed(request, num_tokens)", "pass"),
}  # fmt: skip


SELDOM = "drafts exceed the budget", "an adapter in use may go", "a window forgets that drafts may be taken back"


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.long if what in SELDOM else pytest.mark.slow) for what in BREAK]
)
def test_the_machine_notices(what, monkeypatch):
    machine, owner, old, new = BREAK[what]
    break_class(monkeypatch, owner, old, new)
    often = settings(max_examples=200, stateful_step_count=30, phases=[Phase.generate], verbosity=Verbosity.quiet)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(machine, settings=often)


# --- What it has found ------------------------------------------------------------------------------------------------


def asked(core, name, prompt, most=8, lora=None, seed=None, **about) -> Request:
    """A greedy request, on its way."""
    request = Request(name, prompt, SamplingParams(max_tokens=most, temperature=0), lora_name=lora, **about)
    request.answer = alone(tuple(prompt), 0, seed, "auto")[0][:most]
    core.add_request(request)
    return request


def run_to_end(core) -> dict[str, str]:
    """Why each request that did not end by itself has ended."""
    errors = {}
    for _ in range(200):
        if not core.scheduler.has_unfinished_requests():
            return errors
        if core.scheduler.adapters:
            core.scheduler.adapters.reader.turn()
        errors |= {output.request_id: output.stop_reason for output in core.step() if output.finish_reason == "error"}
    raise AssertionError("somebody waits for ever")


def test_whoever_outgrows_the_room_beside_its_adapter_is_ended():
    """It came in by a chunk, gives its blocks back when it needs the last one, and would come in again for ever."""
    lora = adapters_of(memory="unified")
    limits = SchedulerConfig(16, 1, 2, scheduler_reserve_full_isl=False)
    core = core_of(limits, 7, 3, lora=lora)
    load_adapter(lora, "a0", adapter(0))
    room = 3 * (6 - lora.memory.num_blocks_of(adapter(0)))
    assert 0 < room < 15
    fits = asked(core, "fits", [5], room, "a0", 0)  # the last token has no slot
    outgrows = asked(core, "outgrows", [5], room + 1, "a0", 0)
    errors = run_to_end(core)
    assert fits.output_token_ids == fits.answer and errors.keys() == {"outgrows"} and "no room" in errors["outgrows"]
    assert outgrows.output_token_ids == outgrows.answer[:room]


def test_who_got_nothing_and_waits_for_an_adapter_has_no_table():
    """While somebody else is sent for."""
    lora, connector = adapters_of(max_cpu_loras=2), Elsewhere("recompute")
    core = core_of(SchedulerConfig(16, 4, 16), 20, 4, lora=lora, connector=connector)
    for i in range(2):
        load_adapter(lora, f"a{i}", adapter(i))
    connector.there |= {"lost": (0, 0, 1), "comes": (0, None, None)}
    lost, runs = asked(core, "lost", [3, 4, 5], lora="a1", seed=1), asked(core, "runs", [1, 2], 12, "a0", 0)
    core.step()
    core.step()
    assert "lost" in core.scheduler.received and "lost" not in core.scheduler.kv_cache_manager.req_to_blocks
    comes = asked(core, "comes", [6, 7, 8])
    assert not run_to_end(core)
    assert all(request.output_token_ids == request.answer for request in (runs, lost, comes))


def test_idle_adapters_make_room_for_a_fetch_and_its_drafts():
    """The prompt has room, and the first step with drafts has none: nobody runs, so nobody would ever make any."""
    lora, connector = adapters_of(memory="unified"), Elsewhere("recompute")
    drafts = SpeculativeConfig(num_speculative_tokens=2, prompt_lookup_min=1)
    core = core_of(SchedulerConfig(21, 1, 16), 8, 3, config=VllmConfig(speculative_config=drafts), lora=lora,
                   connector=connector)  # fmt: skip
    load_adapter(lora, "a0", adapter(0))
    first = asked(core, "first", [1], 1, "a0", 0)
    run_to_end(core)
    free = core.scheduler.kv_cache_manager.block_pool.num_free_blocks
    connector.there["second"] = 0, None, None
    second = asked(core, "second", [4] * 3 * free, 3)
    assert not run_to_end(core) and not lora.slots
    assert (first.output_token_ids, second.output_token_ids) == (first.answer, second.answer)


def test_who_got_nothing_does_not_wait_for_those_behind_it():
    """Its adapter has taken the room of its prompt, and the rest of the pool has come with a request that could run."""
    limits, lora, connector = SchedulerConfig(12, 2, 12), adapters_of(memory="unified"), Elsewhere("recompute")
    core_of(limits, 20, 4, lora=lora)
    size = lora.memory.num_blocks_of(adapter(0))
    core = core_of(limits, 1 + size + 2, 4, lora=lora, connector=connector)
    load_adapter(lora, "a0", adapter(0))
    connector.there |= {"lost": (1, 0, 0), "comes": (1, None, None)}
    lost, comes = asked(core, "lost", [1] * 7, 2, "a0", 0), asked(core, "comes", [2, 3], 2)
    core.step()
    assert not lora.slots and list(core.scheduler.waiting_for_remote_kvs) == ["lost", "comes"], (
        "an idle adapter has left"
    )
    assert not run_to_end(core)
    assert (lost.output_token_ids, comes.output_token_ids) == (lost.answer, comes.answer)


class Attentive(Drafter):
    """Guesses nothing, and looks at the hidden states that it is told."""

    needs_hidden = True

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def propose(self, contexts):
        for each in contexts:
            ids = torch.tensor(each.token_ids[:-1])
            hidden = MODEL.forward(ids, torch.arange(len(ids)), naive.recompute)
            right = F.rms_norm(hidden, hidden.shape[-1:], MODEL.norm, MODEL.config.rms_norm_eps)
            first = self.known.get(each.request_id, len(ids) - len(each.hidden))
            self.known[each.request_id] = len(ids)
            if not each.hidden.isnan().any():  # of what was computed on nothing
                torch.testing.assert_close(each.hidden, right[first:])
        return [Draft([]) for _ in contexts]

    def forget(self, request_id):
        self.known.pop(request_id, None)


def store_core(folder, **about) -> EngineCore:
    """On a store of blocks of 4, and a cache in which nothing has been written."""
    extra = {"folder": str(folder), "cpu_bytes": 1 << 20}
    connector = StoreConnector(KVTransferConfig("StoreConnector", "kv_both", "", 0, None, extra))
    core = core_of(SchedulerConfig(32, 2, 32), 20, 4, connector=connector, **about)
    for layer in core.runner.cache.layers:
        layer[:, 1:] = float("nan")
    return core


def damage(core) -> None:
    """All blocks of its store are cut short."""
    for path in core.scheduler.connector.store.cpu.folder.iterdir():
        path.write_bytes(path.read_bytes()[:-5])


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    KVStore(tmp_path, 0, 1).clear()


def test_a_drafter_is_told_again_what_is_computed_again(folder):
    """A load fails within the step, so the request goes back; positions of which it was told come once more."""
    config = VllmConfig(speculative_config=SpeculativeConfig(), plug={"drafter": lambda config, model: Attentive()})
    for _ in range(2):
        core = store_core(folder, config=config)
        request = asked(core, "r", DOCUMENTS[0][:14], 6)
        run_to_end(core)
        damage(core)
        assert request.output_token_ids == request.answer
        core.scheduler.connector.close()
    assert core.scheduler.connector.stats["void_blocks"]


def test_nobody_hits_what_was_lost_with_a_client(folder):
    """It leaves in the step in which its load fails: its blocks are free, and stand in the index no more."""
    first, core = store_core(folder), store_core(folder, caching=True)
    asked(first, "first", DOCUMENTS[0][:17], 1)
    run_to_end(first)
    damage(first)
    asked(core, "leaves", DOCUMENTS[0][:17], 1)
    output = core.scheduler.schedule()
    result = core.execute_model(output)
    core.abort_requests(["leaves"])
    core.update_from_output(output, result)
    assert core.scheduler.connector.stats["void_blocks"] == 4
    request = asked(core, "comes", DOCUMENTS[0][:17])
    assert not run_to_end(core) and request.output_token_ids == request.answer and request.num_cached_tokens == 0
    for each in (first, core):
        each.scheduler.connector.close()

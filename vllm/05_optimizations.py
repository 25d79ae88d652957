"""05 · Optimizations: what does each one save, and where does it stop saving?

The question: memory is paged (02), attention is tiled (03), the batch is always full (04). What is left to gain is a
list of smaller things, each a few lines on top of that engine. Which of them matter on your workload?

The mechanism, one entry each (`--list` counts what it saves, `--only NAME` runs it):
  prefix-caching    a full block is never written again: key it by a hash of all tokens up to its end, and share it
  cuda-graphs       record the kernels of a decode step once, replay them with one launch
  torch-compile     let a compiler merge neighbouring operations into one kernel
  async-scheduling  plan the next step while the model runs this one, with placeholders for tokens not yet known
  prompt-lookup     guess the next tokens from the prompt, check all of them in one pass over the weights
Three more have scripts of their own: tensor parallelism (05c), quantized weights (05b), a quantized KV cache (05d).
The first has its mechanism in engine/core, the second in engine/worker/cuda_graphs.py; the engine's scheduler plans
ahead itself.

Numbers to remember: a hit skips 95 % of a prompt if 95 % of it was sent before, and not one token if a single
character in front differs. A decode step is hundreds of launches; as one graph it is one, and the step gets faster
only where launching was slower than computing: for one sequence SmolLM2 by at most 56x, an 8B by 1.15x (bounds at 10 us
a launch, for kernels that cost the GPU only what they move; an H200, at 22 us with Python, measured 5x and 2x).

How to run:
  uv run python vllm/05_optimizations.py                       the cheap form of every entry
  uv run python vllm/05_optimizations.py --list                what each entry saves, counted
  uv run python vllm/05_optimizations.py --only torch-compile  one entry in full (this one: a minute)
  uv run python vllm/05_optimizations.py --hash-bits 8         break it: serve another user's text
  uv run python vllm/05_optimizations.py --bench               minutes: everything measured

Read for this: vLLM 0.32 `v1/core/sched/async_scheduler.py`, `v1/spec_decode/ngram_proposer.py`; Saxena 2023 (prompt
lookup), vLLM's blog on 0.6.0.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import copy
import dataclasses
import functools
import gc
import itertools
import math
import re
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import HARDWARE
from torch.utils._pytree import tree_leaves

from engine.model import llama, loader
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from lab import roofline
from engine.config import VllmConfig
from engine.worker.assemble import make_runner
from engine.core.engine_core import EngineCore
from engine.worker.model_runner import ModelRunner
from engine import registry
from engine.attention.metadata import AttentionMetadata
from engine.config import SchedulerConfig
from engine.core.kv_cache_manager import ROOT_HASH, KVCacheManager, hash_block_tokens
from engine.core.scheduler import Scheduler
from engine.output import EngineCoreOutput, SchedulerOutput
from engine.request import Request, SamplingParams

from engine.worker.cuda_graphs import CapturedModel, Tape, capture_sizes
from lab import offline_run, peers
from lab.matrix_products import matmul_seconds
from lab.prefix_hits import BLOCK, CHATS, MOONCAKE, chat_workload, hit_rates, naive_hits, prefill_factor

PagedKVCache = registry.fill("cache.paged")  # lesson 02's

KEY = "05_optimizations"


# --- 1. Automatic prefix caching -----------------------------------------------------------------------------------
#
# The mechanism is in engine/core: a key for every full block, an index from keys to physical blocks, a free queue that
# keeps cached blocks longest. Here it serves the model, and what a request finds shows as the time until its first
# token.


def make_core(model: llama.Llama, caching: bool = True, num_blocks: int = 160, max_model_len: int = 1024,
              hash_bits: int = 256, graphs: Callable[..., Any] | None = None) -> EngineCore:  # fmt: skip
    """The engine, with lesson 02's attention. `graphs(model, cache, plan, limits)` makes a `CapturedModel`."""
    config = SchedulerConfig(max_model_len, max_num_seqs=32, max_num_batched_tokens=max_model_len)
    manager = KVCacheManager(num_blocks, BLOCK, max_model_len, caching)
    manager.hash_bits = hash_bits
    scheduler = Scheduler(config, manager)
    return EngineCore(scheduler, runner_with(graphs, model, config, num_blocks))


def runner_with(graphs: Callable[..., Any] | None, model: llama.Llama, limits: Any, num_blocks: int) -> ModelRunner:
    """Lesson 02's attention, and in the slot for graphs what `graphs` makes of the model and its cache."""
    config = VllmConfig(attention_backend="paged", enforce_eager=True)
    runner = make_runner(model, limits, num_blocks, BLOCK, config)
    if graphs:
        runner.graphs = graphs(runner.model, runner.cache, runner.attend, limits)
    return runner


def ask(core: EngineCore, prompt: Sequence[int], max_tokens: int = 1) -> tuple[Request, float]:
    """Serve one prompt, greedily, to its end. Returns the request, and the seconds until its first token."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = Request("ask", list(prompt), params, eos_token_id=(core.runner.model.config.eos_token_ids or (None,))[0])
    core.add_request(request)
    start = time.perf_counter()
    core.step()
    ttft = time.perf_counter() - start
    while core.scheduler.has_unfinished_requests():
        core.step()
    return request, ttft


# What a server sees: an instruction in front of every prompt, definitions of tools, chats that repeat themselves.
SYSTEM = """You are the assistant of a public library. Answer in one short sentence. Be friendly, be exact, and if you
do not know something, say so. The library opens at nine in the morning and closes at eight in the evening, on Sundays
at five. Books may be kept for four weeks, films for one week. A reader's card costs nothing for children."""
TOOLS = """You are the assistant of a library and can call functions.
{"name": "find_book", "parameters": {"title": "string", "author": "string"}}
{"name": "reserve", "parameters": {"book_id": "integer", "card": "string"}}
{"name": "opening_hours", "parameters": {"day": "string"}}
{"name": "renew", "parameters": {"book_id": "integer"}}"""
TURNS = ["When do you close on Sundays?", "And how long may I keep a film?", "Thank you! Does a card cost anything?"]


def conversation(core: EngineCore, tokenizer: Tokenizer, max_tokens: int) -> list[tuple[Request, float]]:
    """A chat of three turns; each prompt repeats everything said so far, the model's own words included."""
    messages, answers = [{"role": "system", "content": TOOLS}], []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        answers.append(ask(core, tokenizer.converse(messages), max_tokens))
        messages.append({"role": "assistant", "content": tokenizer.decode(answers[-1][0].output_token_ids)})
    return answers


def three_requests(core: EngineCore, tokenizer: Tokenizer, prefix: int, message: int) -> list[tuple[Request, float]]:
    """The source's table: an instruction of `prefix` tokens for all three, `message` tokens of their own, no answer."""
    shared = tokenizer.encode(SYSTEM * (1 + prefix // 60))[:prefix]
    return [ask(core, shared + tokenizer.encode(f"{turn} " * message)[:message]) for turn in TURNS]


# A hash that is cut to 8 bits has 256 values. Some account number gives the first block of a prompt the key that the
# first block of another user's prompt has, and the cache compares keys, not tokens.


def account_prompt(tokenizer: Tokenizer, number: int, word: str) -> list[int]:
    """One block that says the code word of an account, and the beginning of a sentence that repeats it."""
    first = f"Account {number}. The code word is {word}. Remember it well, please, it will be needed soon enough again."
    question = "\nQuestion: What is the code word?\nAnswer: The code word is"
    return tokenizer.encode(first)[:BLOCK] + tokenizer.encode(question)


def colliding_account(tokenizer: Tokenizer, other: Sequence[int], word: str, hash_bits: int) -> int | None:
    """The first of 2,000 account numbers whose first block has the key of `other`'s, or None."""
    key = lambda tokens: hash_block_tokens(ROOT_HASH, tokens[:BLOCK])[: hash_bits // 8]  # noqa: E731
    return next((n for n in range(2000, 4000) if key(account_prompt(tokenizer, n, word)) == key(other)), None)


# --- 2. CUDA graphs -------------------------------------------------------------------------------------------------
#
# The mechanism is in engine/worker/cuda_graphs.py: a recording of launches, replayed with one. Here the launches of a
# step are counted, on a tape of the model's own forward pass, and with them what a graph can save.


WIDTH = 16  # `decode_step` runs models a sixteenth as wide: the same operations, activations a sixteenth as large


@functools.cache
def decode_step(name: str, num_seqs: int = 8) -> Tape:
    """One decode step of a model of lesson 01's table, recorded as a GPU would run it: Triton kernels for attention."""
    c = dataclasses.asdict(roofline.llama_config(roofline.MODELS[name])) | {"vocab_size": 16}
    narrow = {key: c[key] // WIDTH for key in ("hidden_size", "intermediate_size", "head_dim")}
    config = LlamaConfig(**c | narrow)
    shapes = llama.tensor_shapes(config)
    weights = lambda key: torch.zeros(shapes[key]) if key in shapes else None  # noqa: E731
    model = llama.Llama(config, weights, torch.bfloat16, torch.device("cpu"))
    meta = AttentionMetadata.build([[1]] * num_seqs, [9] * num_seqs, [1] * num_seqs, BLOCK, model.device)
    # Attention gets meta tensors: there the wrappers launch kernels, and a tape records launches without running them.
    cache, values = PagedKVCache(model, 2, BLOCK), [getattr(meta, f.name) for f in dataclasses.fields(meta)]
    cache.layers = [layer.to("meta") for layer in cache.layers]
    on_gpu = AttentionMetadata(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in values))
    launch, tape = cache.attend(on_gpu), Tape()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        launch(layer, *(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (q, k, v)))
        return torch.empty_like(q)

    tape.capture_begin()
    model.logits(model.forward(torch.zeros(num_seqs, dtype=torch.int64), meta.positions, attend)).argmax(1)
    tape.capture_end()
    return tape


def kind_of(func: Any) -> str:
    """What a recorded operation is: a matrix product, one of our Triton kernels (attention, cache), or small."""
    if isinstance(func, common.Launch):
        return "triton"
    name = func.name().split("::")[1].split(".")[0]
    return "product" if name in ("mm", "addmm", "linear", "bmm") else "other"


def launches(name: str) -> dict[str, int]:
    """Kernels of one decode step, by kind."""
    kinds = [kind_of(func) for func, *_ in decode_step(name).tape]
    return {"total": len(kinds), **{kind: kinds.count(kind) for kind in ("product", "triton", "other")}}


def step_seconds(name: str, num_seqs: int, context: int, gpu: common.GPU, launch: float,
                 kernel: float = 0.0) -> tuple[float, float]:  # fmt: skip
    """(eager, as one graph). The CPU launches ahead of the GPU, so the slower of the two decides: max(n · launch, GPU).

    The GPU's time is lesson 01's roofline, what the step must compute and move, and `kernel` seconds for each kernel:
    to start it, to fill and drain the GPU. No graph saves those. With 0 the gain of a graph is a bound.
    """
    n = launches(name)["total"]
    on_gpu = gpu.seconds(*roofline.step_cost(roofline.MODELS[name], num_seqs, 1, context)) + n * kernel
    return max(n * launch, on_gpu), max(launch, on_gpu)


# --- 3. torch.compile -----------------------------------------------------------------------------------------------
#
# Between two matrix products a layer does small things: a norm, a rotation, a SiLU, an addition. Each is a kernel that
# reads its input from memory and writes its output back. A compiler that sees them together makes one kernel of them.
# Attention stays outside: it is one hand-written kernel already, and it needs this step's lengths and block tables,
# which are not constants. vLLM hides it behind a custom operator that the compiler cannot look into; so do we.

CONTEXT: dict[str, Any] = {}  # what the opaque operator reads: vLLM's `forward_context`


@functools.cache
def opaque_attention() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The current step's attention as an operator of which a compiler knows the shapes and nothing else."""

    @torch.library.custom_op("lessons::attention", mutates_args=())
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return CONTEXT["attend"](CONTEXT["layer"], q, k, v)

    attention.register_fake(lambda q, k, v: torch.empty_like(q, memory_format=torch.contiguous_format))
    return attention


def compiled_forward(model: llama.Llama) -> Callable[[torch.Tensor, torch.Tensor, llama.Attend], torch.Tensor]:
    """`model.forward` with its layers compiled at the first call with a new T. Each layer becomes a model of one layer,
    all with the same code: it is compiled once and not L times."""
    attention, views = opaque_attention(), []
    for i in range(model.config.num_hidden_layers):
        view, prefix = copy.copy(model), f"layers.{i}."
        view.config = dataclasses.replace(model.config, num_hidden_layers=1)
        view.linear = {name.replace(prefix, "layers.0."): layer for name, layer in model.linear.items()
                       if name.startswith(prefix)}  # fmt: skip
        for norms in ("input_norm", "post_attention_norm", "q_norm", "k_norm"):
            setattr(view, norms, getattr(model, norms)[i : i + 1])
        views.append(view)
    run = llama.Llama.forward.__wrapped__  # without its switch to inference mode

    @functools.partial(torch.compile, dynamic=False)
    def one_layer(view: llama.Llama, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return run(view, None, positions, lambda layer, q, k, v: attention(q, k, v), hidden=hidden)

    @torch.no_grad()
    def forward(token_ids: torch.Tensor, positions: torch.Tensor, attend: llama.Attend) -> torch.Tensor:
        hidden = torch.nn.functional.embedding(token_ids, model.embed_tokens)
        for i, view in enumerate(views):
            CONTEXT.update(attend=attend, layer=i)
            hidden = one_layer(view, hidden, positions)
        return hidden

    return forward


OUTSIDE_LAYERS = ("aten::embedding", "aten::index.Tensor", "aten::argmax")


def activation_bytes(name: str, num_tokens: int) -> tuple[float, float]:
    """(bytes that a layer's small operations read and write one by one, bytes of its weights), in bf16.

    Merging can save no more than the first; the second has to be read in any case.
    """
    moved = lambda xs: sum(x.numel() * x.element_size() for x in tree_leaves(xs) if isinstance(x, torch.Tensor))  # noqa: E731
    layers, tape = roofline.MODELS[name]["num_hidden_layers"], decode_step(name).tape
    inside = [step for step in tape if kind_of(step[0]) == "other" and step[0].name() not in OUTSIDE_LAYERS]
    small = sum(moved((args, out)) for _, args, _, out in inside)
    return WIDTH * small * num_tokens / 8 / layers, 2 * roofline.weights_read(roofline.MODELS[name])[0] / layers


def measure_compile(model: llama.Llama, num_seqs: int = 8) -> dict[str, Any]:
    """The same decode step eager and compiled: seconds, kernels in a layer, error. Raises what the compiler raises."""
    from torch._inductor.utils import run_and_get_code

    token_ids = torch.arange(100, 100 + num_seqs, device=model.device)
    cache = PagedKVCache(model, 4 * num_seqs + 1, BLOCK)
    tables = [[1 + 4 * b + i for i in range(4)] for b in range(num_seqs)]
    meta = AttentionMetadata.build(tables, [50] * num_seqs, [1] * num_seqs, BLOCK, model.device)
    forward = compiled_forward(model)
    eager = lambda: model.forward(token_ids, meta.positions, cache.attend(meta))  # noqa: E731
    fast = lambda: forward(token_ids, meta.positions, cache.attend(meta))  # noqa: E731
    reference, start = eager(), time.perf_counter()
    out, code = run_and_get_code(fast)
    cold, tape = time.perf_counter() - start, Tape()
    tape.capture_begin()
    model.forward(None, meta.positions, lambda layer, q, k, v: q, hidden=reference, layers=[0])
    tape.capture_end()
    called = re.findall(r"(?<!def )\b(?:(?:cpp_fused|triton)_\w+(?=\(|\.run\()|extern_kernels\.\w+(?=\())", code[0])
    times = [(common.measure(eager, 0.5).median, common.measure(fast, 0.5).median) for _ in range(3)]  # taking turns
    before, after = (statistics.median(column) for column in zip(*times))
    return {
        "cold_s": cold, "eager_ms": 1e3 * before, "compiled_ms": 1e3 * after, "factor": before / after,
        "operations": len(tape.tape), "kernels": len(called), "compilations": len(code),
        "error": common.relative_error(out, reference),
    }  # fmt: skip


# --- 4. Between two steps: multi-step and async scheduling ----------------------------------------------------------
#
# `step()` is a chain: schedule, run, update, schedule, run, … While the CPU plans, the GPU waits. Two ways out; both
# plan steps whose tokens are not known yet. The plan does not need to know *which* token it will be, only *that* there
# will be one: a placeholder is counted.
#   n-step (vLLM until 2025): plan n steps in one go, run them, hear of all n, plan again. A request that stops inside
#     computes to the end of the n for nothing, and new requests are not admitted before that end.
#   async (vLLM's default since 0.14): plan step i + 1 while the model runs step i.


class Worker:
    """The model's side of the queue: a thread with its own copy of every request.

    It is told which requests are new, how far each is computed, which are gone. Sampled tokens it knows before the
    scheduler does: that is how a placeholder becomes a token. vLLM's workers, processes of their own, keep copies, too.
    """

    def __init__(self, execute_model: Callable[[SchedulerOutput], dict[str, list[int]]]) -> None:
        self.execute_model = execute_model
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, list[int]] = {}
        self.thread = ThreadPoolExecutor(1)
        self.busy: list[tuple[float, float]] = []  # when the model ran

    def submit(self, output: SchedulerOutput) -> Future:
        """Queue a step, as it is now: the scheduler's requests will have changed when it runs."""
        new = {r.request_id: (r.prompt_token_ids, r.sampling_params) for r in output.scheduled_new_reqs}
        scheduled = (*output.scheduled_running_reqs, *output.scheduled_new_reqs)
        computed = {r.request_id: r.num_computed_tokens for r in scheduled}
        tables = {r.request_id: list(output.block_tables[r.request_id]) for r in scheduled}
        return self.thread.submit(self._run, output, new, computed, tables)

    def _run(
        self, output: SchedulerOutput, new: dict, computed: dict[str, int], tables: dict[str, list[int]]
    ) -> dict[str, list[int]]:
        start = time.perf_counter()
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None), self.tables.pop(request_id, None)
        self.tables.update(tables)
        for request_id, (prompt, params) in new.items():
            self.requests[request_id] = Request(request_id, prompt, params)
        for request_id, num_computed_tokens in computed.items():
            self.requests[request_id].num_computed_tokens = num_computed_tokens
        step = copy.copy(output)  # the same step with this side's requests and tables: the scheduler is steps ahead
        step.block_tables = self.tables
        step.scheduled_running_reqs = [self.requests[i] for i in computed if i not in new]
        step.scheduled_new_reqs = [self.requests[i] for i in new]
        sampled = self.execute_model(step)
        for request_id, token_ids in sampled.items():
            for token_id in token_ids:
                # Who has got no token ends when the scheduler hears of it; the step on its way needs some token's id.
                self.requests[request_id].append_output_token_id(max(token_id, 0))
        if computed:
            self.busy.append((start, time.perf_counter()))
        return sampled


LOOPS = {"synchronous": (1, False), "n-step": (4, False), "async": (2, True)}  # (steps planned ahead, while one runs?)


class QueuedEngineCore(EngineCore):
    """Lesson 04's loop with a queue between scheduler and model (vLLM: `EngineCore.step_with_batch_queue`)."""

    def __init__(self, kind: str, scheduler: Scheduler, worker: Worker, overhead: float = 0.0) -> None:
        """`overhead`: seconds that every planning takes longer, in place of a server's further work on the host."""
        super().__init__(scheduler)
        (self.depth, self.overlap), self.worker, self.overhead = LOOPS[kind], worker, overhead
        self.queue: deque[tuple[SchedulerOutput, Future]] = deque()
        self.host_seconds: list[float] = []  # of each planning
        # Tokens sampled for requests that had ended. Their keys and values do no harm: the next owner of those blocks
        # is planned later, so writes them later.
        self.num_wasted = 0

    def plan(self) -> None:
        """Schedule steps until `depth` of them are in the queue, or nothing is left to run."""
        start = time.perf_counter()
        time.sleep(self.overhead)
        while len(self.queue) < self.depth:
            output = self.scheduler.schedule()
            future = self.worker.submit(output)  # even if empty: it says what is gone
            if not output.num_scheduled_tokens:
                break
            self.queue.append((output, future))
        self.host_seconds.append(time.perf_counter() - start)

    def step(self) -> list[EngineCoreOutput]:
        """Plan if it is time to, then wait for the oldest step."""
        if self.overlap or not self.queue:
            self.plan()
        if not self.queue:
            if self.scheduler.requests:
                raise RuntimeError("nothing can run, but requests wait: a sample was lost")
            return []
        output, future = self.queue.popleft()
        sampled = future.result()
        heard = self.scheduler.update_from_output(output, sampled)
        self.num_wasted += len(sampled) - len(heard)
        return heard

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Serve requests that are all there at the start, to their end. Returns the tokens of each."""
        for request in requests:
            self.add_request(request)
        while self.scheduler.has_unfinished_requests() or self.queue:
            self.step()
        self.worker.thread.shutdown()
        return [request.output_token_ids for request in requests]

    @property
    def idle(self) -> float:
        """Share of the time, first model run to last, in which no model ran: the bubbles."""
        busy = self.worker.busy
        return 1 - sum(stop - start for start, stop in busy) / (busy[-1][1] - busy[0][0])


def make_loop(kind: str, run: llama.Llama | Callable, overhead: float = 0.0) -> QueuedEngineCore:
    """One of LOOPS, eight seats, around the engine's runner of a model, or around what runs in its place."""
    config = SchedulerConfig(max_model_len=256, max_num_seqs=8)
    scheduler = Scheduler(config, KVCacheManager(8 * 16 + 1, BLOCK, 256, enable_caching=False), async_scheduling=True)
    if not isinstance(run, llama.Llama):
        return QueuedEngineCore(kind, scheduler, Worker(run), overhead)
    runner = runner_with(None, run, config, 8 * 16 + 1)
    return QueuedEngineCore(kind, scheduler, Worker(runner.execute_model), overhead)


def dry_run(kind: str, stops: Sequence[int]) -> QueuedEngineCore:
    """The loop without a model: request i says the stop token, 1, as its `stops[i]`-th. Counts plans and waste."""
    samples: Counter[str] = Counter()

    def execute_model(output: SchedulerOutput) -> dict[str, list[int]]:
        samples.update(output.num_scheduled_tokens.keys())
        return {i: [int(samples[i] == stops[int(i)])] for i in output.num_scheduled_tokens}

    core, params = make_loop(kind, execute_model), SamplingParams(temperature=0, max_tokens=200, stop_token_ids=[1])
    tokens = core.run([Request(str(i), [0], params) for i in range(len(stops))])
    if [len(each) for each in tokens] != list(stops):
        raise common.CheckFailed(f"{kind}: outputs of {[len(each) for each in tokens]} tokens")
    return core


# --- 5. A first look at speculative decoding ------------------------------------------------------------------------
#
# A decode step reads all weights to compute one row; a second row would cost next to nothing. If the next k tokens are
# guessed, one pass over 1 + k rows says for each what the model would have written there. The guesses that agree
# are free tokens, the first that does not is replaced by the model's own. Where do guesses come from? In a task
# to quote, edit or summarise: from the prompt.


def prompt_lookup(tokens: Sequence[int], k: int, longest: int = 3) -> list[int]:
    """The up to `k` tokens that followed the last 3 (or 2, or 1) tokens where they first occurred. vLLM's "ngram"."""
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return list(tokens[start + n : start + n + k])
    return []


def generate_with_lookup(model: llama.Llama, prompt: Sequence[int], max_tokens: int, k: int) -> tuple[list[int], int]:
    """Greedy decoding with guesses from the prompt. Returns the tokens, and how many passes they took. k = 0: none."""
    tokens, computed, passes = list(prompt), 0, 0
    blocks = list(range(1, 2 + (len(prompt) + max_tokens + k) // BLOCK))
    cache = PagedKVCache(model, len(blocks) + 1, BLOCK)
    while len(tokens) < len(prompt) + max_tokens:
        draft = prompt_lookup(tokens, k) if computed else []
        new = tokens[computed:] + draft
        meta = AttentionMetadata.build([blocks], [computed + len(new)], [len(new)], BLOCK, model.device)
        hidden = model.forward(torch.tensor(new, device=model.device), meta.positions, cache.attend(meta))
        choice = model.logits(hidden[-1 - len(draft) :]).argmax(1).tolist()  # after the last token and each guess
        agreed = next((i for i, (guess, chosen) in enumerate(zip(draft, choice)) if guess != chosen), len(draft))
        tokens += choice[: agreed + 1]  # the guesses that agreed, and the model's own next token
        computed = len(tokens) - 1  # keys and values of rejected guesses lie behind it, and will be overwritten
        passes += 1
    return tokens[len(prompt) : len(prompt) + max_tokens], passes


# --- The simulation behind the widget: a hash chain you type into ---------------------------------------------------

PREFIX = "You are a helpful assistant. Use the tools; never guess a price."  # 64 characters, each of them a token here
EDITS = {"none": PREFIX, "change character 60": f"{PREFIX[:60]}#{PREFIX[61:]}", "change character 0": f"#{PREFIX[1:]}",
         "insert one in front": f"#{PREFIX}"}  # fmt: skip
CHOICES = {"edit": list(EDITS), "block_size": [4, 8, 16, 32], "hash_bits": [8, 16, 64, 256], "salt": ["", "b"],
           "pool_blocks": [8, 12, 16, 64]}  # fmt: skip
LONGEST_SUFFIX = 48
WIDGET_DEFAULT = {"suffix_a": " What is 2+2?", "suffix_b": " What is the capital of France?", "edit": "none",
                  "block_size": 16, "hash_bits": 256, "salt": "", "pool_blocks": 64}  # fmt: skip
BREAK_IT = {"suffix_a": " My PIN is 1234. What is it?", "suffix_b": " My PIN is 1400. What is it?", "hash_bits": 8}


def simulate(params: dict) -> dict:
    """Two prompts one after the other, and the first one again, through the real manager. Characters are tokens.

    params: two suffixes of printable ASCII, at most 48 characters each; the others one of CHOICES. "edit" and "salt"
    concern the second prompt. Raises InputError naming the field.
    """
    texts = ("suffix_a", "suffix_b")
    common.checked({name: value for name, value in params.items() if name not in texts}, CHOICES)
    for name in texts:
        value = params.get(name)
        if not (isinstance(value, str) and len(value) <= LONGEST_SUFFIX and all(" " <= c <= "~" for c in value)):
            raise common.InputError(f"{name} {value!r}: must be up to {LONGEST_SUFFIX} printable ASCII characters")
    size = params["block_size"]
    manager = KVCacheManager(params["pool_blocks"] + 1, size, 1024)
    manager.hash_bits, pool = params["hash_bits"], manager.block_pool
    contents: dict[int, tuple[str, str]] = {}  # of each physical block: salt, and text up to its end
    first, second = PREFIX + params["suffix_a"], EDITS[params["edit"]] + params["suffix_b"]
    prompts = (("A", first, ""), ("B", second, params["salt"]), ("A again", first, ""))
    sends = [send(manager, contents, *prompt) for prompt in prompts]
    pool.check()
    return {"block_size": size, "hash_bits": params["hash_bits"], "pool_blocks": params["pool_blocks"], "sends": sends}


def send(manager: KVCacheManager, contents: dict, name: str, text: str, salt: str) -> dict:
    """One prompt through the manager: lookup, allocation, end. `contents` says what really lies in each block."""
    size, pool = manager.block_size, manager.block_pool
    request = Request(name, [ord(c) for c in text], SamplingParams(max_tokens=1), cache_salt=salt or None)
    trace = {"name": name, "text": text, "salt": salt, "cached": 0, "computed": 0, "refused": False, "blocks": []}
    before = list(pool.block_hash)
    hits, request.num_computed_tokens = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, len(text) - request.num_computed_tokens, hits) is None:
        trace["refused"] = True
    else:
        table, hashes = manager.get_block_ids(name), request.block_hashes
        trace |= {"cached": request.num_computed_tokens, "computed": len(text) - request.num_computed_tokens}
        for i, block in enumerate(table):
            part = text[i * size : (i + 1) * size]
            if i >= len(hits):
                contents[block] = (salt, text[: i * size + len(part)])
            trace["blocks"].append({
                "text": part, "block": block, "owners": pool.ref_count[block],
                "state": "hit" if i < len(hits) else "computed" if len(part) == size else "partial",
                "parent": (hashes[i - 1] if i else ROOT_HASH).hex()[:16] if len(part) == size else "",
                "hash": hashes[i].hex()[:16] if len(part) == size else "",
                "holds": contents[block][1][-len(part) :],  # what attention will read there
                "wrong": contents[block] != (salt, text[: i * size + len(part)]),
            })  # fmt: skip
    manager.free(request)
    now = pool.block_hash
    trace["evicted"] = [block for block, key in enumerate(before) if key is not None and now[block] != key]
    trace["free_queue"] = [[block, int(now[block] is not None)] for block in pool.free_queue]
    return trace


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    signs, lines = {"hit": "=", "computed": "+", "partial": "·"}, []
    lines.append(f"blocks of {trace['block_size']} tokens, hashes of {trace['hash_bits']} bits, {trace['pool_blocks']} "
                 "blocks; = found, + computed and indexed, · not full")  # fmt: skip
    for sent in trace["sends"]:
        total = sent["cached"] + sent["computed"]
        what = "refused: the pool is too small" if sent["refused"] else f"{sent['cached']} of {total} tokens cached"
        lines.append(f"{sent['name']}{' (salted)' if sent['salt'] else ''}: {what}")
        if sent["blocks"]:
            lines.append("  " + " ".join(f"{signs[b['state']]}{b['block']}{'!' * b['wrong']}" for b in sent["blocks"]))
        lines += [f"  WRONG: {b['text']!r} is served from {b['holds']!r}" for b in sent["blocks"] if b["wrong"]][:1]
    chain = [block for block in trace["sends"][1]["blocks"] if block["hash"]][:3]
    for block in chain:
        lines.append(f"  {block['parent'][:8]} + {block['text']!r} -> {block['hash'][:8]}")
    queue = [f"{block}{'*' * cached}" for block, cached in trace["sends"][-1]["free_queue"]]
    shown = queue if len(queue) <= 18 else [*queue[:8], "…", *queue[-9:]]
    return "\n".join([*lines, f"free queue (* still cached): {' '.join(shown)}"])


# --- Numbers that the text quotes -----------------------------------------------------------------------------------

POOLS = (192, 256, 384, 512, 768, 1024, 2048, 4096)  # the longest chat needs 166
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LAUNCH = 10e-6  # seconds: the source's figure; an H200's host took 22 for each of an eager step, Python included
KERNEL_US = (1, 3)  # that a kernel takes beside its bytes; 3: NVIDIA's aiconfigurator, on an H100 and on an H200
STOPS = [5, 9, 14, 20, 7, 11, 26, 3] * 4  # where each request of the dry run stops


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers. No weights, about a second."""
    found = lambda **changes: simulate(WIDGET_DEFAULT | changes)["sends"][1]["cached"]  # noqa: E731
    bare, workload, graphs = {"suffix_a": "", "suffix_b": ""}, chat_workload(), {}
    tokens = sum(len(prompt) for prompt, _ in workload)
    for name in ("SmolLM2-135M", "Llama-3.1-8B"):
        step = functools.partial(step_seconds, name, context=1024, gpu=HARDWARE["H100 80GB"], launch=LAUNCH)
        times = {str(n): step(n) for n in BATCHES}
        slower = {str(us): step(1, kernel=1e-6 * us) for us in KERNEL_US}
        graphs[re.sub(r"\W", "_", name).lower()] = launches(name) | {
            "eager_ms": {n: 1e3 * eager for n, (eager, _) in times.items()},
            "graph_ms": {n: 1e3 * graph for n, (_, graph) in times.items()},
            "factor": {n: eager / graph for n, (eager, graph) in times.items()},
            "factor_if_kernel_us": {us: eager / graph for us, (eager, graph) in slower.items()},  # one sequence
        }  # fmt: skip
    h100, loops = HARDWARE["H100 80GB"], {kind: dry_run(kind, STOPS) for kind in LOOPS}
    padding = [capture_sizes(n)[-1] - n for n in range(1, 513)]
    config = roofline.MODELS["Llama-3.1-8B"]
    reduces, (linear, head) = 2 * config["num_hidden_layers"] + 1, roofline.weights_read(config)  # 1: the embedding's
    return {
        "source": {
            "skipped": 2000 / 2105, "three": 3 * 400 / (400 + 2 * 20), "limit": 400 / 20,
            "tokens_three": prefill_factor(2000, 105, 3), "tokens_hundred": prefill_factor(2000, 105, 100),
            "small_three": prefill_factor(304, 16, 3), "with_answers": 3 * (400 + 1000) / (440 + 3 * 1000),
            "found_of_three": 2 / 3 * 2000 / 2105,
        },
        "widget": {
            "default": found(), "change_60": found(**bare, edit="change character 60"),
            "change_0": found(edit="change character 0"), "insert": found(edit="insert one in front"),
            "salted": found(salt="b"), "identical": found(**bare), "identical_32": found(**bare, block_size=32),
        },
        "hash": {f"expected_{bits}": math.sqrt(math.pi / 2 * 2**bits) for bits in (8, 16, 64)},  # birthdays
        "hits": CHATS | {
            "requests": len(workload), "tokens": tokens, "mean_prompt": tokens / len(workload),
            "rate": {str(n): rate for n, rate in hit_rates(workload, POOLS).items()},
            "best": sum(naive_hits(workload, BLOCK)) / tokens,
        },
        "graphs": graphs | {
            "sizes": len(capture_sizes(512)), "most_padding": max(padding), "mean_padding": statistics.mean(padding),
        },
        "compile": {
            str(n): {"small": small, "weights": weights, "share": small / (small + weights),
                     "small_ms": 1e3 * small / h100.bandwidth, "products_ms": 1e3 * h100.seconds(weights * n, weights)}
            for n in (1, 256, 2048) for small, weights in [activation_bytes("Llama-3.1-8B", n)]
        },
        "loops": {kind: {"plans": len(core.host_seconds), "wasted": core.num_wasted} for kind, core in loops.items()}
        | {"tokens": sum(STOPS), "requests": len(STOPS)},
        "catalog": {
            "weights": roofline.weight_bytes(config), "all_reduces": reduces, "read": 2 * (linear + head),
            "all_reduce_kib": reduces * config["hidden_size"] * 2 / 1024,
            "read_int4": linear / 8 * (4 + 20 / 128) + 2 * head,  # fp16 scale, zero point; the output matrix stays bf16
            "kv_bytes": roofline.KVCacheSpec.from_config(config).bytes_per_token(),
        },
    }  # fmt: skip


# --- Figures --------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The hash chain of the widget's default, hit rates by pool size, and the launch-cost model."""
    from matplotlib.patches import Patch, Rectangle

    numbers, C = facts(), common.COLORS
    colors = {"computed": C["blue"], "hit": C["green"], "partial": C["grey"]}
    figure, ax = common.new_figure(8.0, 3.3)
    for y, sent in zip((1.7, 0), simulate(WIDGET_DEFAULT)["sends"]):
        ax.text(
            0, y + 0.8, f"request {sent['name']}: {sent['cached']} of {len(sent['text'])} tokens found", weight="bold"
        )
        for i, block in enumerate(sent["blocks"]):
            x, middle = 1.3 * i, {"ha": "center", "va": "center"}
            ax.add_patch(Rectangle((x, y), 1.2, 0.62, color=colors[block["state"]]))
            ax.text(x + 0.6, y + 0.42, block["text"].replace(" ", "␣"), fontsize=7.8, color="white",
                    family="DejaVu Sans Mono", **middle)  # fmt: skip
            ax.text(x + 0.6, y + 0.17, f"block {block['block']}", fontsize=8, color="white", **middle)
            ax.text(x + 0.6, y - 0.2, block["hash"][:8] or "not full: no key", fontsize=8, color=C["ink"], **middle)
            if i and block["hash"]:
                ax.annotate(
                    "", (x + 0.2, y - 0.2), (x - 0.3, y - 0.2), arrowprops={"arrowstyle": "->", "color": C["grey"]}
                )
    labels = {"computed": "computed, then indexed", "hit": "found: the same physical block", "partial": "not full"}
    ax.legend(handles=[Patch(color=colors[state], label=label) for state, label in labels.items()], ncols=3,
              loc="lower center", bbox_to_anchor=(0.5, -0.12))  # fmt: skip
    ax.set(xlim=(-0.05, 7.75), ylim=(-0.75, 2.7))
    ax.axis("off")
    paths = [common.save_figure(figure, folder, "05_hash_chain")]

    figure, axes = common.new_figure(8.0, 3.4, ncols=2, sharey=True)
    ours = {int(n): rate for n, rate in numbers["hits"]["rate"].items()}
    for ax, title, rates, best, color in (
        (axes[0], f"ours: {CHATS['conversations']} conversations, blocks of 16", ours, numbers["hits"]["best"], "blue"),
        (axes[1], "literature: Mooncake's trace, blocks of 512", MOONCAKE, 0.366, "orange"),
    ):
        ax.plot(list(rates), [100 * rate for rate in rates.values()], "o-", color=C[color])
        ax.axhline(100 * best, ls=":", color=C["grey"])
        ax.text(min(rates), 100 * best + 2, f"a cache that forgets nothing: {100 * best:.0f} %", fontsize=8.5)
        ax.set(xscale="log", ylim=(0, 100), xlabel="blocks in the pool")
        ax.set_title(title, fontsize=9.5)
    for ax, ticks in zip(axes, ((256, 512, 1024, 2048, 4096), (1000, 3000, 10_000, 30_000))):
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.minorticks_off()
    axes[0].set_ylabel("prompt tokens found, %")
    paths.append(common.save_figure(figure, folder, "05_hit_rates"))

    figure, axes = common.new_figure(8.0, 3.4, ncols=2, sharey=True)
    for ax, (key, name) in zip(axes, (("smollm2_135m", "SmolLM2-135M"), ("llama_3_1_8b", "Llama-3.1-8B"))):
        known = numbers["graphs"][key]
        for kind, color, label in (
            ("eager_ms", "orange", f"{known['total']} launches"),
            ("graph_ms", "blue", "one graph"),
        ):
            ax.plot(BATCHES, [known[kind][str(n)] for n in BATCHES], "o-", color=C[color], label=label)
        ax.set(xscale="log", yscale="log", xlabel="sequences in the step", xticks=[1, 4, 16, 64, 256],
               xticklabels=[1, 4, 16, 64, 256], yticks=[0.1, 1, 10], yticklabels=["0.1", "1", "10"])  # fmt: skip
        ax.set_title(f"{name}: H100, 10 µs a launch", fontsize=9.5)
        ax.minorticks_off()
        ax.legend()
    axes[0].set_ylabel("decode step, ms (model)")
    return [*paths, common.save_figure(figure, folder, "05_launches")]


# --- The catalog, and the story of each entry -----------------------------------------------------------------------

COMPANIONS = {"tensor-parallelism": "05c_tensor_parallel", "weight-quantization": "05b_quantization",
              "kv-cache-quantization": "05d_kv_cache_quantization"}  # fmt: skip


def catalog() -> dict[str, str]:
    """What each entry saves, counted. The unit is a step, or a prompt, of Llama-3.1-8B in bf16."""
    f = facts()
    c, waste, small = f["catalog"], f["loops"], f["compile"]["1"]
    return {
        "prefix-caching": f"prefill: {f['source']['skipped']:.0%} of 2,000 + 105 tokens if the 2,000 are known",
        "cuda-graphs": f"launches: {f['graphs']['llama_3_1_8b']['total']} -> 1 per decode step",
        "torch-compile": f"up to {small['small'] / 1e3:.0f} kB per token and layer between the products (its weights: "
        f"{small['weights'] / 1e6:.0f} MB)",
        "async-scheduling": "waiting: plan + run -> max(plan, run); samples in vain: "
        f"{waste['async']['wasted']} where n-step has {waste['n-step']['wasted']}",
        "prompt-lookup": "passes over the weights: each gives 1 + the guesses that agree, not 1",
        "tensor-parallelism": f"weights per GPU: {c['weights'] / 1e9:.1f} -> {c['weights'] / 2e9:.1f} GB on 2; costs "
        f"{c['all_reduces']} all-reduces, {c['all_reduce_kib']:.0f} KiB per token",
        "weight-quantization": f"weights read: {c['read'] / 1e9:.1f} -> {c['read_int4'] / 1e9:.1f} GB a step (4 bits)",
        "kv-cache-quantization": f"cache: {c['kv_bytes']:,} -> {c['kv_bytes'] // 2:,} bytes per token (fp8)",
    }


@functools.cache
def load(name: str | None) -> tuple[llama.Llama, Tokenizer]:
    """The model, once for all entries that need it."""
    return loader.load(name)


def tell_prefix_caching(args: argparse.Namespace, f: dict[str, Any]) -> dict:
    """TTFT of prompts that share a beginning, with and without the cache; ms by workload."""
    (model, tokenizer), rows, bench = load(args.model), [], {}
    workloads = {"instruction of 304, own 16": lambda core: three_requests(core, tokenizer, 304, 16),
                 "chat of 3 turns, with tools": lambda core: conversation(core, tokenizer, 6)}  # fmt: skip
    if args.full:
        workloads["instruction of 2000, own 105"] = lambda core: three_requests(core, tokenizer, 2000, 105)
    for name, serve in workloads.items():
        longest = min(2112, model.config.max_position_embeddings)
        rounds = [[serve(make_core(model, cached, max_model_len=longest)) for cached in (False, True)]
                  for _ in range(3 if args.full else 1)]  # fmt: skip
        off, on = rounds[0]
        if [r.output_token_ids for r, _ in on] != [r.output_token_ids for r, _ in off]:
            raise common.CheckFailed(f"{name}: the cache changed the tokens")
        prompt, cached = sum(r.num_prompt_tokens for r, _ in on), sum(r.num_cached_tokens for r, _ in on)
        slow, fast = (statistics.median(sum(ttft for _, ttft in each[i]) for each in rounds) for i in (0, 1))
        third = on[-1][0]
        bench[re.sub(r"\W+", "_", name)] = {"factor": slow / fast, "without_ms": 1e3 * slow, "with_ms": 1e3 * fast}
        rows.append([name, prompt, f"{cached / prompt:.0%}", f"{third.num_cached_tokens / third.num_prompt_tokens:.0%}",
                     f"{prompt / (prompt - cached):.2f}x", f"{slow / fast:.2f}x"])  # fmt: skip
    common.table(["3 prompts each", "tokens", "found", "of the third", "less to compute", "TTFT, sum"], rows)
    common.say("✓ every token is the same with and without the cache")
    common.say(describe(simulate(WIDGET_DEFAULT | {"hash_bits": args.hash_bits})))
    rates, best = f["hits"]["rate"], f["hits"]["best"]
    common.say(f"{f['hits']['requests']} turns of {CHATS['conversations']} chats, found: " + ", ".join(
        f"{rates[n]:.0%} by {n} blocks" for n in ("192", "512", "768", "4096")))  # fmt: skip
    common.check_equal(f"comparing tokens, forgetting nothing, finds the same {best:.1%}", rates["4096"], best)

    bits, tiger = args.hash_bits, account_prompt(tokenizer, 1234, "tiger")
    number = colliding_account(tokenizer, tiger, "banana", bits)
    if number is None:
        common.say(f"hashes of {bits} bits: none of 2,000 other accounts has the key of account 1234's first block")
        return bench
    banana = account_prompt(tokenizer, number, "banana")
    core, honest = make_core(model, hash_bits=bits), make_core(model, caching=False)
    said = [tokenizer.decode(ask(where, prompt, 2)[0].output_token_ids)
            for where, prompt in ((core, tiger), (core, banana), (honest, banana))]  # fmt: skip
    common.say(f"hashes of {bits} bits: account 1234 says {said[0]!r}. Account {number}, whose prompt says banana, "
               f"has the same key\nand hears {said[1]!r} (without the cache {said[2]!r}). WRONG")  # fmt: skip
    return bench


def tell_cuda_graphs(args: argparse.Namespace, f: dict[str, Any]) -> dict:
    """Launches per step, and graphs (or their stand-in, a tape) against eager steps: the same tokens."""
    (model, tokenizer), names = load(args.model), {"smollm2_135m": "SmolLM2-135M", "llama_3_1_8b": "Llama-3.1-8B"}
    common.table(["launches per decode step", "all", "products", "Triton", "small", "B=1", "B=16", "B=256"], [
        [name, *(f["graphs"][key][kind] for kind in ("total", "product", "triton", "other")),
         *(f"{f['graphs'][key]['factor'][n]:.2f}x" for n in ("1", "16", "256"))] for key, name in names.items()
    ])  # fmt: skip
    common.say("(B: eager over one graph, by max(launches · 10 µs, roofline of an H100 at 1,024 tokens of context). A "
               "bound:\nif each kernel takes 1 µs beside its bytes, B=1 is " + " and ".join(
                   f"{f['graphs'][key]['factor_if_kernel_us']['1']:.2f}x" for key in names) + ")")  # fmt: skip
    if not common.HAS_GPU:
        common.skipped("CUDA graphs", "no GPU. A tape of operations takes their place: same buckets, padding, buffers")
    recorder = torch.cuda.CUDAGraph if common.HAS_GPU else Tape
    graphs = functools.partial(CapturedModel, graph_class=recorder, largest=32)
    cores = [make_core(model, caching=False, graphs=each) for each in (None, graphs)]
    prompts = [tokenizer.encode(f"{turn} The answer is") for turn in TURNS]
    eager, replayed = (offline_run.serve(core, prompts, [6, 3, 5]).token_ids for core in cores)
    graphs = cores[1].runner.graphs
    buckets, pieces = sorted({n for n, _ in graphs.captured}), max(len(s.graphs) for s in graphs.captured.values())
    common.check_equal(f"{graphs.num_replays} steps from buckets of {buckets} tokens, {pieces} graphs each: the same "
                       "tokens as eager", replayed, eager)  # fmt: skip
    if not (common.HAS_GPU and args.full):
        return {}
    found = measure_graphs(loader.load(args.model, torch.bfloat16)[0])
    return found | {"llama_3_1_8b": measure_graphs(*peers.random_twins("Llama-3.1-8B"))}


def measure_graphs(model: llama.Llama, twin: Any = None) -> dict[str, Any]:
    """On a GPU: ms of a decode step in bf16, and the launches that the profiler sees in one; beside it the matrix
    products alone and, given its `twin`, Transformers. Before it, what a server's start pays: every bucket captured."""
    found: dict[str, Any] = {}
    for n in (1, 8, 32):
        found[f"products_{n}"] = {"ms": 1e3 * matmul_seconds(model, n, n)}
        if twin is not None:
            found[f"transformers_{n}"] = {"ms": peers.transformers_ms(twin, n)}
    pieces, full = (functools.partial(CapturedModel, full=full, largest=512) for full in (False, True))
    runners = {"eager": None, "piecewise": pieces, "full": full}
    graphs = make_core(model, caching=False, graphs=full).runner.graphs
    (free, _), start = torch.cuda.mem_get_info(), time.perf_counter()
    graphs.capture_all()
    found["capture"] = {"s": time.perf_counter() - start, "gib": (free - torch.cuda.mem_get_info()[0]) / 2**30,
                        "graphs": sum(len(step.graphs) for step in graphs.captured.values())}  # fmt: skip
    common.say("captured before any request: {graphs:,} graphs in {s:.1f} s, {gib:.2f} GiB".format(**found["capture"]))
    del graphs
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for n, (name, graphs) in itertools.product((1, 8, 32), runners.items()):
        gc.collect()  # engines hold themselves in cycles, and each has gigabytes of keys and values
        core = make_core(model, caching=False, num_blocks=2048, graphs=graphs)
        for i in range(n):
            core.add_request(Request(str(i), [i + 5] * 64, params))
        for _ in range(8):
            core.step()
        start = time.perf_counter()
        for _ in range(50):
            core.step()  # ends with its tokens on the host, so the GPU is done
        seconds = (time.perf_counter() - start) / 50
        with torch.profiler.profile() as profile:
            core.step()
        launched = sum(event.count for event in profile.key_averages() if "Launch" in event.key)
        found[f"{name}_{n}"] = {"ms": 1e3 * seconds, "launches": launched}
        common.say(f"{n:>2} sequences, {name:<9}: {1e3 * seconds:.2f} ms, {launched} launches")
    return found


def tell_torch_compile(args: argparse.Namespace, f: dict[str, Any]) -> dict | None:
    """Bytes that fusing saves, and a compiled step: measured with `full`, else the stored result."""
    for n in f["compile"] if args.full else ("2048",):
        known = f["compile"][n]
        common.say(f"{int(n):>5,} tokens: a layer's small operations move {known['small'] / 1e6:6.2f} MB one by one, "
                   f"its weights are {known['weights'] / 1e6:.0f} MB: {known['share']:.1%} of all")  # fmt: skip
    found = common.results(KEY, "h200" if common.HAS_GPU else "cpu").get("bench", {}).get("torch-compile")
    if not args.full and not found:
        common.skipped("compiling", "it takes 10–45 s: `--only torch-compile` does it")
        return None
    if args.full:
        from torch._dynamo.exc import TorchDynamoException

        try:
            found = measure_compile(load(args.model)[0])
        except (TorchDynamoException, RuntimeError) as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            common.skipped("compiling", f"{reason[:80]} (on a CPU, a C++ compiler is needed)")
            return None
        if not found["error"] <= common.TOLERANCE[torch.float32]:
            raise common.CheckFailed(f"the compiled step is off by {found['error']:.1e}")
        common.say(f"✓ the compiled step of 8 sequences: relative error {found['error']:.1e}")
    common.say(f"{'' if args.full else 'stored result: '}{found['operations']} operations of a layer became "
               f"{found['kernels']} kernels; step {found['eager_ms']:.1f} -> {found['compiled_ms']:.1f} ms, compiled "
               f"in {found['cold_s']:.0f} s")  # fmt: skip
    return found if args.full else None


def tell_async_scheduling(args: argparse.Namespace, f: dict[str, Any]) -> dict:
    """Three loops on the same requests: the same tokens, and how long the model waits for a plan."""
    (model, tokenizer), times, rows, bench, tokens = load(args.model), 4 if args.full else 1, [], {}, []
    prompts = [tokenizer.encode(turn) for turn in (*TURNS, "Which films are new?")] * times
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in [9, 5, 12, 7] * times]
    for kind in LOOPS:
        core, start = make_loop(kind, model, args.host_ms / 1e3), time.perf_counter()
        tokens.append(core.run([Request(str(i), list(p), s) for i, (p, s) in enumerate(zip(prompts, params))]))
        seconds, host = time.perf_counter() - start, 1e3 * statistics.median(core.host_seconds)
        bench[kind] = {"runs": len(core.worker.busy), "host_ms": host, "idle": core.idle, "seconds": seconds}
        rows.append([kind, len(core.worker.busy), len(core.host_seconds), f"{host:.1f} ms", f"{core.idle:.0%}",
                     f"{seconds:.2f} s"])  # fmt: skip
    common.table([f"{args.host_ms:g} ms of other work per plan", "model runs", "plans", "a plan", "model idle",
                  "total"], rows)  # fmt: skip
    common.check_equal("all three loops write the same tokens", tokens, [tokens[0]] * 3)
    common.say(f"{f['loops']['requests']} requests, {f['loops']['tokens']} tokens, ended by an unforeseen stop token;"
               "\nsampled in vain: " + ", ".join(f"{kind} {f['loops'][kind]['wasted']}" for kind in LOOPS))  # fmt: skip
    return bench


def tell_prompt_lookup(args: argparse.Namespace, f: dict[str, Any]) -> dict:
    """Tokens per pass with guesses out of the text itself, where it repeats and where it does not."""
    (model, tokenizer), n, rows, bench = load(args.model), 64 if args.full else 16, [], {}
    quote = "The library opens at nine in the morning and closes at eight in the evening, on Sundays at five."
    tasks = {"repeat": f"Repeat the text exactly.\nText: {quote}\nText: {quote[:11]}",
             "invent": "Once upon a time, in a small village by the sea,"}  # fmt: skip
    for name, prompt in tasks.items():
        found = {}
        for k in (0, 2, 4, 8) if args.full else (0, 4):
            start = time.perf_counter()
            tokens, passes = generate_with_lookup(model, tokenizer.encode(prompt), n, k)
            found[k] = tokens, time.perf_counter() - start
            if tokens != found[0][0]:
                raise common.CheckFailed(f"{name}: guesses changed the tokens")
            bench[f"{name}_{k}"] = {"tokens_per_pass": n / passes, "factor": found[0][1] / found[k][1]}
            rows.append([name, k, n, passes, f"{n / passes:.2f}", f"{found[0][1] / found[k][1]:.2f}x"])
    common.table(["greedy, one sequence", "guesses", "tokens", "passes", "tokens per pass", "faster"], rows)
    common.say("✓ the same tokens with and without guesses. Who else can guess, and how to sample exactly: lesson 07")
    return bench


TELLERS = {
    "prefix-caching": tell_prefix_caching, "cuda-graphs": tell_cuda_graphs, "torch-compile": tell_torch_compile,
    "async-scheduling": tell_async_scheduling, "prompt-lookup": tell_prompt_lookup,
}  # fmt: skip


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    p.add_argument("--list", action="store_true", help="the catalog: what each entry saves, counted")
    p.add_argument("--only", choices=(*TELLERS, *COMPANIONS), help="one entry of the catalog, in full")
    p.add_argument("--hash-bits", type=int, choices=(8, 16, 64, 256), default=256,
                   help="bits of a block's key (default 256; 8 serves another user's text)")  # fmt: skip
    p.add_argument("--host-ms", type=common.number(float, 0, 1000), default=5.0, metavar="MS",
                   help="work on the host per plan that async scheduling hides (default %(default)s)")  # fmt: skip
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine, entries = common.start(args), catalog()

    def command(name: str) -> str:
        tour = COMPANIONS.get(name)
        return f"uv run python -m vllm.tours.{tour}" if tour else f"uv run python vllm/{KEY}.py --only {name}"

    if args.list:
        common.table(["entry", "saves (Llama-3.1-8B in bf16)"], list(entries.items()))
        common.say("\n".join(f"{name:<22} {command(name)}" for name in entries))
        return
    args.full, bench = bool(args.only or args.bench), {}
    loader.check_context(args.model, 2112 if args.full and args.only in (None, "prefix-caching") else 1024)
    for number, name in enumerate(entries, 1):
        if args.only in (None, name):
            common.heading(f"{number}. {name}")
            common.say(f"saves {entries[name]}")
            if name in COMPANIONS:
                common.say(f"a script of its own: {command(name)}")
            elif found := TELLERS[name](args, facts()):
                bench[name] = found
    if args.figure:
        draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": facts(), "bench": bench})


if __name__ == "__main__":
    common.run(main)

"""06c1 · Executors: one scheduler decides, many workers execute. The lower half of lesson 06c.

A worker is one rank of an engine: some layers of the model, and of these some heads and neurons, with the ordinary
model runner around them. It keeps copies of the requests, and hears what is new in each step. An executor is how a step
gets to the workers: a call, shared memory and pipes, or Ray. The engine core keeps as many steps in flight as there are
pipeline stages. Data parallelism, API servers, the story and the tests of all of it belong to 06c.

Read for this: vLLM 0.32 `v1/executor/multiproc_executor.py`, `v1/executor/ray_executor_v2.py`, `v1/engine/core.py`,
`v1/worker/gpu_worker.py`, `distributed/device_communicators/shm_broadcast.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import atexit
import contextlib
import copy
import dataclasses
import functools
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import re
import signal
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import llama
from engine.output import SchedulerOutput

tensor_parallel = common.lesson("05c_tensor_parallel")
scheduling = common.lesson("04_continuous_batching")
serving = common.lesson("06_serving")
async_engine = serving.async_engine
GroupCoordinator, Request = tensor_parallel.GroupCoordinator, scheduling.Request


# --- 1. Which rank holds what -----------------------------------------------------------------------------------------

BACKENDS = ("uni", "mp", "ray")


@dataclass(frozen=True)
class ParallelConfig:
    """How one engine is spread. Rank r is shard r % TP of stage r // TP, as in vLLM: neighbours talk most."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str | None = None  # None: uni for one rank, mp for more
    async_scheduling: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def backend(self) -> str:
        return self.distributed_executor_backend or ("mp" if self.world_size > 1 else "uni")

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight: one per stage, or one that runs and the next."""
        return 2 if self.async_scheduling else self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The rank that answers for all: the first shard of the last stage. Its peers have drawn the same tokens."""
        return self.world_size - self.tensor_parallel_size

    def check(self, config: llama.LlamaConfig) -> None:
        """Raises InputError if this model cannot be spread like that."""
        if self.backend == "uni" and self.world_size > 1:
            raise common.InputError(f"distributed_executor_backend uni: one process cannot be {self.world_size} ranks; "
                                    "allowed: mp, ray")  # fmt: skip
        if self.pipeline_parallel_size > config.num_hidden_layers:
            raise common.InputError(f"pipeline_parallel_size {self.pipeline_parallel_size}: must be at most "
                                    f"num_hidden_layers ({config.num_hidden_layers})")  # fmt: skip
        tensor_parallel.check_tensor_parallel_size(config, self.tensor_parallel_size)


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """The layers [start, end) of a stage. What does not divide goes to the stages before the last, which has the
    output matrix to compute, too (`vllm/distributed/utils.py`)."""
    sizes = [num_hidden_layers // pp_size] * pp_size
    for i in range(2, num_hidden_layers % pp_size + 2):
        sizes[-i] += 1
    start = sum(sizes[:pp_rank])
    return start, start + sizes[pp_rank]


def parameters_held(model: llama.Llama) -> int:
    """Elements in this rank's memory, each counted once; what only has a shape has none."""
    tensors = [model.embed_tokens, model.norm, *model.norms]
    for layer in model.linear.values():
        tensors += [layer.weight, layer.bias]
    return sum({t.data_ptr(): t.numel() for t in tensors if t is not None}.values())


class PipelineGroup(GroupCoordinator):
    """The same shard of every stage: hidden states go from each to the next."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_the_way: deque[tuple[Any, torch.Tensor]] = deque()
        self.waited = 0.0  # seconds in `recv`

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def send(self, x: torch.Tensor) -> None:
        """Send to the next stage, and go on: a stage that waited until its neighbour listens would be no stage."""
        x = x.to(self.wire).contiguous()
        while len(self.on_the_way) >= self.world_size:  # never more than there can be micro-batches
            self.on_the_way.popleft()[0].wait()
        work = dist.isend(x, self.ranks[self.rank_in_group + 1], group=self.process_group)
        self.on_the_way.append((work, x))  # the buffer must live until it has left
        self._count("send", x)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the stage before sent. Its shape needs no message: the step says how many tokens there are."""
        x, start = torch.empty(shape, dtype=dtype, device=self.wire), time.monotonic()
        dist.recv(x, self.ranks[self.rank_in_group - 1], group=self.process_group)
        self.waited += time.monotonic() - start
        return x.to(self.device)


def make_groups(world: GroupCoordinator | None, config: ParallelConfig) -> tuple[GroupCoordinator, PipelineGroup]:
    """This rank's tensor-parallel and pipeline-parallel groups. All ranks call this, and make all groups in order."""
    if world is None:
        return GroupCoordinator([0], 0), PipelineGroup([0], 0)
    n, mine = config.tensor_parallel_size, []
    rows = [range(first, first + n) for first in range(0, config.world_size, n)]
    columns = [range(shard, config.world_size, n) for shard in range(n)]
    for groups in (rows, columns):
        mine += filter(None, [tensor_parallel.new_group(ranks, world) for ranks in groups])
    row, column = mine
    return row, PipelineGroup(column.ranks, column.rank_in_group, column.device, column.process_group)


def pipeline_stage(base: type[llama.Llama]) -> type[llama.Llama]:
    """A subclass of `base` that is one stage: it gets hidden states, or embeds; and sends them on, or has logits."""

    class PipelineStage(base):
        pp: PipelineGroup

        @torch.inference_mode()
        def forward(self, token_ids: torch.Tensor | None, positions: torch.Tensor, attend: llama.Attend,
                    hidden: torch.Tensor | None = None, layers: Any = None) -> torch.Tensor:  # fmt: skip
            if not self.pp.is_first_rank:
                hidden = self.pp.recv((len(positions), self.config.hidden_size), self.dtype)
            hidden = super().forward(token_ids, positions, attend, hidden, layers)
            if not self.pp.is_last_rank:
                self.pp.send(hidden)
            return hidden

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().logits(hidden) if self.pp.is_last_rank else hidden

    return PipelineStage


def check_quantization(method: str) -> None:
    """Raises InputError for what no rank can do with a part of the weights."""
    if method in common.lesson("05b_quantization").CALIBRATED:
        raise common.InputError(f"quantization {method!r}: not on workers, none of which sees what a whole model "
                                "computes; a folder that was quantized with it is loaded")  # fmt: skip


def shard_codes(codes: dict[str, Any], config: llama.LlamaConfig, tp: GroupCoordinator,
                layers: range) -> dict[str, Any]:  # fmt: skip
    """This rank's part of the matrices of codes that its layers have; names count from the stage's first layer.

    Codes are cut as the weights are, and scales and zero points with them: the numbers of an output stay together, and
    so do those of a group of inputs. Raises InputError if a group would be cut.
    """
    parts, n = {}, tp.world_size
    for name, whole in codes.items():
        prefix, layer, rest = re.fullmatch(r"(.*layers\.)(\d+)(\..*)", name).groups()
        if int(layer) not in layers:
            continue
        groups, by_rows = whole.scale.shape[1], name.endswith(("o_proj", "down_proj"))
        if by_rows and groups > 1 and groups % n:
            raise common.InputError(f"tensor_parallel_size {n}: {rest[1:]} is quantized in {groups} groups of inputs")
        shared = by_rows and groups == 1  # a scale for all inputs of an output is everybody's
        cut = functools.partial(tensor_parallel.shard_tensor, f"{name}.weight", config=config, group=tp)
        scale, zero = (x if x is None or shared else cut(x) for x in (whole.scale, whole.zero))
        part = dataclasses.replace(whole, codes=cut(whole.codes), scale=scale, zero=zero)
        parts[f"{prefix}{int(layer) - layers.start}{rest}"] = part
    return parts


def load_stage(source: str | dict | None, dtype: torch.dtype, tp: GroupCoordinator, pp: PipelineGroup,
               quantization: str | None = None, embeds_last: bool = False,
               generation_config: str = "auto") -> llama.Llama:  # fmt: skip
    """One rank's part of a model: some layers, and of these some heads and neurons. The file is mapped, so what other
    ranks own is never read. A dict stands for a seeded random model with these sizes, which tests use.

    A stage is a shallower Llama: its layers are counted from 0, so its KV cache has as many as it needs. What the model
    is as a whole, `whole_config` says. With `embeds_last`, the last stage has the embedding in any case. Codes that a
    file has are cut; otherwise a rank quantizes what it owns, so where inputs are divided an output has a scale on each
    rank.
    """
    codes: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if isinstance(source, dict):
            whole = llama.random_model(dtype=dtype, device=tp.device, **source)
            config, tensors = whole.config, tensor_parallel.model_tensors(whole)
        else:
            folder = llama.model_folder(source)
            config = llama.LlamaConfig.from_folder(folder, True, generation_config)
            tensors = llama._open_weights(folder, stack)
            if serving.stored_quantization(folder, quantization):
                from engine.quantization import formats

                tensors, codes = formats.checkpoint_tensors(folder, tensors)
            elif quantization == "gguf":
                codes = common.lesson("05b_quantization").gguf_codes(config)
        start, end = get_pp_indices(config.num_hidden_layers, pp.rank_in_group, pp.world_size)
        shapes, embeds_last = llama.tensor_shapes(config), embeds_last or config.tie_word_embeddings
        embeds = {"model.embed_tokens.weight": pp.is_first_rank or (pp.is_last_rank and embeds_last),
                  "lm_head.weight": pp.is_last_rank}  # fmt: skip

        def lookup(name: str) -> torch.Tensor | None:
            if not embeds.get(name, True):  # vLLM's PPMissingLayer: a shape without memory
                return torch.zeros((), dtype=dtype).expand(shapes[name])
            prefix, _, rest = name.partition("layers.")
            layer, _, tail = rest.partition(".")
            return tensors(f"{prefix}layers.{int(layer) + start}.{tail}" if rest else name)

        stage_config = dataclasses.replace(config, num_hidden_layers=end - start)
        if tp.world_size > 1:
            model = pipeline_stage(tensor_parallel.TensorParallelLlama)(stage_config, lookup, tp, dtype)
        else:
            model = pipeline_stage(llama.Llama)(stage_config, lookup, dtype, tp.device)
    model.pp, model.whole_config = pp, config
    if not pp.is_last_rank:
        del model.linear["lm_head"]
    if not embeds["model.embed_tokens.weight"]:
        model.embed_tokens = model.embedding = None

    def change(part: llama.Llama) -> llama.Llama:
        if codes:
            part = common.lesson("05b_quantization").on_codes(part, shard_codes(codes, config, tp, range(start, end)))
        elif quantization:
            part = common.lesson("05b_quantization").quantize_model(part, quantization)
        return scheduling.pack_weights(part)

    return tensor_parallel.map_local(model, change) if tp.world_size > 1 else change(model)


def skeleton(config: llama.LlamaConfig, parallel: ParallelConfig, dtype: torch.dtype) -> llama.Llama:
    """The largest rank's shape without its weights: from it, the engine core knows what a block costs. `whole_config`
    is that of all ranks together."""
    stages = [get_pp_indices(config.num_hidden_layers, i, parallel.pipeline_parallel_size)
              for i in range(parallel.pipeline_parallel_size)]  # fmt: skip
    deepest = dataclasses.replace(config, num_hidden_layers=max(end - start for start, end in stages))
    n, model = parallel.tensor_parallel_size, object.__new__(llama.Llama)
    model.config, model.dtype, model.device, model.linear = deepest, dtype, torch.device("cpu"), {}
    model.whole_config = config
    model.num_heads, model.num_kv_heads = config.num_attention_heads // n, max(1, config.num_key_value_heads // n)
    return model


# --- 2. Decisions, as they travel -------------------------------------------------------------------------------------


@dataclass(slots=True)
class CachedRequestData:
    """A request that workers know: what came since they last heard of it (`vllm/v1/core/sched/output.py`)."""

    request_id: str
    new_token_ids: list[int]
    new_block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class StepMessage:
    """A `SchedulerOutput` for workers, which keep copies: whole requests once, differences from then on."""

    num_scheduled_tokens: dict[str, int]
    new: list[tuple[Request, list[int]]]  # and its blocks
    running: list[CachedRequestData]
    resumed: list[CachedRequestData]
    preempted: list[str]
    finished: list[str]
    scheduled_spec_decode_tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # lesson 07


class StepWriter:
    """The engine core's side: remembers what workers know of each request. One step ahead, they know the tokens first:
    `sends_tokens` is False then."""

    def __init__(self, manager: Any, sends_tokens: bool = True) -> None:
        self.manager, self.sends_tokens = manager, sends_tokens
        self.known: dict[str, tuple[int, int]] = {}  # request id: tokens and blocks that were sent
        self.preempted: list[str] = []  # not sent yet
        self.finished: list[str] = []

    def write(self, output: Any) -> StepMessage | None:
        """The message of one step; None if nothing is computed in it. What has ended is told with the next one."""
        self.preempted += [request.request_id for request in output.preempted_reqs]
        self.finished += output.finished_req_ids
        for request in output.preempted_reqs:
            self.known[request.request_id] = (self.known[request.request_id][0], 0)
        for request_id in output.finished_req_ids:  # its name may be taken again in this very step
            self.known.pop(request_id, None)
        if not output.num_scheduled_tokens:
            return None
        news = [(self.as_new(request), self.blocks(request)) for request in output.scheduled_new_reqs]
        differences = [[self.difference(request) for request in requests]
                       for requests in (output.scheduled_running_reqs, output.scheduled_resumed_reqs)]  # fmt: skip
        drafts = output.scheduled_spec_decode_tokens
        message = StepMessage(output.num_scheduled_tokens, news, *differences, self.preempted, self.finished, drafts)
        self.preempted, self.finished = [], []
        return message

    def blocks(self, request: Request) -> list[int]:
        return list(self.manager.get_block_ids(request.request_id))

    def as_new(self, request: Request) -> Request:
        """A copy for the workers: what they append must not be appended twice where they share our memory."""
        self.known[request.request_id] = (request.num_tokens, len(self.manager.get_block_ids(request.request_id)))
        twin = copy.copy(request)
        twin.all_token_ids, twin.output_token_ids = list(request.all_token_ids), list(request.output_token_ids)
        twin.block_hashes = []
        return twin

    def difference(self, request: Request) -> CachedRequestData:
        """What is new of a request since the last step: token ids, blocks, num_computed_tokens."""
        tokens, num_blocks = self.known[request.request_id]
        blocks = self.manager.get_block_ids(request.request_id)
        self.known[request.request_id] = (request.num_tokens, len(blocks))
        new_token_ids = request.all_token_ids[tokens:] if self.sends_tokens else []
        return CachedRequestData(request.request_id, new_token_ids, list(blocks[num_blocks:]),
                                 request.num_computed_tokens)  # fmt: skip


# --- 3. A worker ------------------------------------------------------------------------------------------------------


@dataclass
class WorkerSpec:
    """All that a worker must be told to become one rank of an engine. It can be pickled."""

    model: str | dict | None
    parallel: ParallelConfig
    dtype: torch.dtype = torch.float32
    runner: Callable[[Any, bool], type] | None = None  # called with `runner_args` and whether this rank samples
    runner_args: Any = None
    quantization: str | None = None
    embeds_last: bool = False  # a drafter on the last stage looks tokens up
    generation_config: str = "auto"  # whose tokens end an answer


def served_runner(args: Any, samples: bool) -> type:
    """What `serve` runs on with these flags. No CUDA graphs for several: a collective over gloo could not be captured.
    Only where tokens are sampled is there a drafter, and a tokenizer."""
    tokenizer = llama.Tokenizer(llama.model_folder(args.model)) if samples else None
    eager = args.enforce_eager or args.world_size > 1
    return serving.worker_runner(args.kv_cache_dtype, eager, tokenizer, args.lora_config, args.speculation, samples,
                                 args.async_scheduling, args.kv_transfer)  # fmt: skip


class Worker:
    """One rank: its part of the model, a runner, and copies of the requests (`vllm/v1/worker/gpu_worker.py`)."""

    def __init__(self, world: GroupCoordinator | None = None) -> None:
        self.world = world

    def load_model(self, spec: WorkerSpec) -> int:
        """Returns the parameters that this rank holds."""
        self.spec = spec
        self.set_groups(*make_groups(self.world, spec.parallel))
        self.model = load_stage(spec.model, spec.dtype, self.tp, self.pp, spec.quantization, spec.embeds_last,
                                spec.generation_config)  # fmt: skip
        return parameters_held(self.model)

    def set_groups(self, tp: GroupCoordinator, pp: PipelineGroup) -> None:
        self.tp, self.pp = tp, pp

    def determine_available_memory(self, args: Any, budget: int) -> int:
        """Bytes for this rank's KV cache, after a profile run in which all ranks take part."""
        return serving.kv_cache_memory(args, self.model, budget)

    def initialize_from_config(self, config: Any, num_blocks: int, block_size: int, seed: int) -> None:
        """A runner, and memory for its blocks. Its scheduler is elsewhere; what it would ask it, the copies answer."""
        make, last = self.spec.runner, self.pp
        base = make(self.spec.runner_args, last.is_last_rank) if make else serving.MixedModelRunner

        class StageRunner(base):
            def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> dict[str, list[int]]:
                return super().sample(logits, requests) if last.is_last_rank else {}

            def score_prompts(self, *step: Any) -> None:
                if last.is_last_rank:  # nobody else has logits
                    super().score_prompts(*step)

        self.spans: list[tuple[float, float]] = []
        self.requests: dict[str, Request] = {}
        self.block_ids: dict[str, list[int]] = {}
        manager = SimpleNamespace(block_pool=SimpleNamespace(num_blocks=num_blocks), block_size=block_size,
                                  get_block_ids=self.block_ids.__getitem__)  # fmt: skip
        self.runner = StageRunner(self.model, SimpleNamespace(config=config, kv_cache_manager=manager), seed)
        if hasattr(self.runner.cache, "in_use"):  # companion 05d's keys per channel: the pool is elsewhere
            self.runner.cache.in_use = lambda block: any(block in table for table in self.block_ids.values())
        if hasattr(self.runner, "capture_all"):
            self.runner.capture_all()

    def execute_model(self, message: StepMessage) -> tuple[dict[str, list[int]], dict[str, dict], dict[str, list],
                                                           dict[str, list[int]]]:  # fmt: skip
        """Bring the copies up to date and run the step. Returns sampled tokens, their logprobs and those of prompts,
        and drafts for the next step; empty before the end."""
        output = SchedulerOutput(message.num_scheduled_tokens, finished_req_ids=message.finished,
                                 scheduled_spec_decode_tokens=message.scheduled_spec_decode_tokens)  # fmt: skip
        for request_id in message.preempted:
            if request := self.requests.get(request_id):
                output.preempted_reqs.append(request)
                self.block_ids[request_id].clear()
        for request_id in message.finished:
            self.requests.pop(request_id, None)
            self.block_ids.pop(request_id, None)
        for request, blocks in message.new:
            self.requests[request.request_id], self.block_ids[request.request_id] = request, blocks
            output.scheduled_new_reqs.append(request)
        for known, target in ((message.running, output.scheduled_running_reqs),
                              (message.resumed, output.scheduled_resumed_reqs)):  # fmt: skip
            for data in known:
                request = self.requests[data.request_id]
                for token_id in data.new_token_ids:
                    request.append_output_token_id(token_id)
                self.block_ids[data.request_id] += data.new_block_ids
                request.num_computed_tokens = data.num_computed_tokens
                target.append(request)
        start, waited = time.monotonic(), self.pp.waited
        sampled = self.runner.execute_model(output)
        if self.spec.parallel.async_scheduling:  # the next step may be here already, and needs them
            for request_id, token_ids in sampled.items():
                for token_id in token_ids:
                    # Who has got no token (04's NO_TOKEN_ID) is ended a step later; until then any token's id will do.
                    self.requests[request_id].append_output_token_id(max(token_id, 0))
        self.spans.append((start + self.pp.waited - waited, time.monotonic()))
        drafts = getattr(self.runner, "take_draft_token_ids", dict)()
        return sampled, self.runner.logprobs, self.runner.prompt_logprobs, drafts

    def take_spans(self) -> list[tuple[float, float]]:
        """When this rank computed, by the machine's clock: of each step since the last call, [start, end)."""
        spans, self.spans = self.spans, []
        return spans

    def take_counts(self) -> dict[str, dict[str, int]]:
        """What this rank told others since the last call."""
        return self.tp.take_counts() | self.pp.take_counts()

    def held(self) -> dict[str, int]:
        """For tests: what is left of requests."""
        return {"requests": len(self.requests), "tables": len(self.block_ids), "rows": len(self.runner.batch.rows)}

    def sleep(self, seconds: float, rank: int) -> None:
        """For tests: one rank falls silent."""
        if self.world is not None and self.world.rank_in_group == rank:
            time.sleep(seconds)

    def call(self, method: str | Callable, args: tuple) -> Any:
        """A method of this class, or a function, which gets the worker first."""
        if isinstance(method, str):
            return getattr(self, method)(*args)
        return method(self, *args)

    def call_pickled(self, data: bytes, answers: bool) -> bytes:
        """`call`, for workers that were not started by our processes and know nothing of their main module."""
        method, args = MainUnpickler(io.BytesIO(data)).load()
        value = self.call(method, args)
        return pickle.dumps(value if answers else None, protocol=5)


class MainUnpickler(pickle.Unpickler):
    """What the script that was started calls __main__ is a lesson, here."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("__main__", "__mp_main__"):
            return getattr(serving, name)
        return super().find_class(module, name)


# --- 4. Executors: one interface, three places ------------------------------------------------------------------------


class ExecutorFailed(RuntimeError):
    """A worker raised, died or fell silent. The message says which and how; all of them have been ended."""


_living: weakref.WeakSet[Executor] = weakref.WeakSet()


def shutdown_all() -> None:
    """For a process that leaves without its exit handlers: end all workers of its executors."""
    for executor in list(_living):
        executor.shutdown()


class Executor:
    """What brings decisions to the workers and answers back (`vllm/v1/executor/abstract.py`)."""

    world_size = 1
    failed: str | None = None
    sentinels: Sequence[Any] = ()  # readable when a worker dies

    def submit(self, method: str | Callable, *args: Any, reply_rank: int | None = None,
               timeout: float | None = None) -> Any:  # fmt: skip
        """Have every worker call `method`; returns an object whose `result()` waits for `reply_rank`, or for all."""
        raise NotImplementedError

    def collective_rpc(self, method: str | Callable, *args: Any, **options: Any) -> Any:
        return self.submit(method, *args, **options).result()

    def check_health(self) -> None:
        """Raises ExecutorFailed if a worker is gone."""

    def shutdown(self) -> None:
        """End the workers; afterwards none is left."""


class Done:
    """A result that is there already."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        return self.value


class UniProcExecutor(Executor):
    """One worker, in this process."""

    def __init__(self) -> None:
        self.worker = Worker()

    def submit(self, method: str | Callable, *args: Any, reply_rank: int | None = None,
               timeout: float | None = None) -> Done:  # fmt: skip
        value = self.worker.call(method, args)
        return Done([value] if reply_rank is None else value)


class ThreadExecutor(UniProcExecutor):
    """One worker, on a thread of this process: it runs a step while the engine core plans the next.

    What a step is told must not change until it runs: a `StepMessage` is a copy. (In vLLM `UniProcExecutor` runs on the
    engine core's own thread and needs no other: launches on a GPU return at once, and the tokens are copied to the host
    on a stream of their own, for which a future waits.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = ThreadPoolExecutor(1, "worker")

    def submit(self, method: str | Callable, *args: Any, reply_rank: int | None = None,
               timeout: float | None = None) -> Any:  # fmt: skip
        submit = super().submit
        return self.thread.submit(lambda: submit(method, *args, reply_rank=reply_rank).result())

    def shutdown(self) -> None:
        self.thread.shutdown(cancel_futures=True)


class MessageQueue:
    """One writer, n readers: pickled once, written once into shared memory, read by all (`shm_broadcast.py`).

    A ring of chunks; each has a flag per reader that says "read". The writer waits only if it is a whole ring ahead.
    A pipe to each reader says that a chunk is there, which wakes the reader, and how much of the message is left. One
    that exceeds a chunk takes several: a pipe would hold the writer for ever if its reader had stopped.
    (vLLM's readers spin for a while before they sleep, which is faster and needs cores to burn.)
    """

    def __init__(self, context: Any, readers: int, chunks: int = 8, chunk_bytes: int = 1 << 20) -> None:
        self.readers, self.chunks, self.chunk_bytes, self.written = readers, chunks, chunk_bytes, 0
        self.memory = SharedMemory(create=True, size=chunks * (readers + chunk_bytes))
        if hasattr(os, "posix_fallocate"):  # Linux gives a page when it is first written; with none left, that is a
            try:  # SIGBUS, and nobody hears why
                os.posix_fallocate(self.memory._fd, 0, self.memory.size)
            except OSError as error:
                self.memory.close(), self.memory.unlink()
                raise common.InputError(f"distributed_executor_backend mp: {self.memory.size:,} bytes of shared memory "
                                        f"for decisions: {error.strerror}") from None  # fmt: skip
        self.memory.buf[: chunks * readers] = b"\1" * (chunks * readers)
        self.pipes = [context.Pipe(duplex=False) for _ in range(readers)]

    def enqueue(self, item: Any, alive: Callable[[], None] = lambda: None) -> int:
        """Returns the bytes of the message. `alive` may raise while the ring is full."""
        data = pickle.dumps(item, protocol=5)
        for at in range(0, len(data), self.chunk_bytes):
            chunk, piece = self.written % self.chunks, data[at : at + self.chunk_bytes]
            flags = slice(chunk * self.readers, (chunk + 1) * self.readers)
            while bytes(self.memory.buf[flags]) != b"\1" * self.readers:
                alive()
                time.sleep(0.0005)
            self.memory.buf[flags] = bytes(self.readers)
            start = self.chunks * self.readers + chunk * self.chunk_bytes
            self.memory.buf[start : start + len(piece)] = piece
            for _, pipe in self.pipes:
                pipe.send_bytes((len(data) - at).to_bytes(8, "big"))
            self.written += 1
        return len(data)

    def reader(self, index: int) -> MessageReader:
        return MessageReader(self.memory, self.pipes[index][0], index, self.readers, self.chunks, self.chunk_bytes)

    def close(self) -> None:
        """Give pipes and memory back; the first process to do so removes the segment."""
        for ours, theirs in self.pipes:
            ours.close(), theirs.close()
        self.memory.close()
        with contextlib.suppress(FileNotFoundError):
            self.memory.unlink()


@dataclass
class MessageReader:
    """A reader's end; it travels to the reader's process."""

    memory: SharedMemory
    pipe: Any
    index: int
    readers: int
    chunks: int
    chunk_bytes: int
    read: int = 0

    def dequeue(self) -> Any:
        """The next message; waits for it. Raises EOFError when the writer is gone."""
        data, left = bytearray(), 1
        while left > 0:
            left, chunk = int.from_bytes(self.pipe.recv_bytes(), "big"), self.read % self.chunks
            start = self.chunks * self.readers + chunk * self.chunk_bytes
            data += self.memory.buf[start : start + min(left, self.chunk_bytes)]
            self.memory.buf[chunk * self.readers + self.index] = 1
            self.read += 1
            left -= self.chunk_bytes
        return pickle.loads(data)


class Future:
    """The answers to one call, collected when somebody asks. Calls are answered in the order they were made in."""

    def __init__(self, executor: MultiprocExecutor, name: str, ranks: Iterable[int], one: bool, timeout: float) -> None:
        self.executor, self.name, self.waiting, self.one, self.timeout = executor, name, set(ranks), one, timeout
        self.answers: dict[int, Any] = {}

    def result(self) -> Any:
        """Raises ExecutorFailed, after which no worker is left, or InputError if a worker refused its input."""
        deadline = time.monotonic() + self.timeout
        while self.waiting:
            self.executor.read_replies(deadline, self)
        answers = [self.answers[rank] for rank in sorted(self.answers)]
        return answers[0] if self.one else answers


class MultiprocExecutor(Executor):
    """A process per rank. Decisions go out through one `MessageQueue`, answers come back through a pipe each.

    A pipe whose process has died reads as end of file, so waiting for answers is watching the workers. One that neither
    dies nor answers is found out after `timeout` seconds (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS; vLLM's default is 300).
    """

    def __init__(self, world_size: int, timeout: float | None = None) -> None:
        self.world_size = world_size
        self.timeout = timeout or float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 120))
        self.pending: list[deque[Future]] = [deque() for _ in range(world_size)]
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.bytes_broadcast = 0
        context = tensor_parallel.start_context()
        self.queue = MessageQueue(context, world_size)
        # Called by `shutdown`, or when nobody has this executor any more, or when this process ends.
        self._end = weakref.finalize(self, end_workers, self.processes, self.pipes, self.queue)
        atexit.register(self._end)  # before multiprocessing's own end, which would wait for the workers
        _living.add(self)
        try:
            self.store = tensor_parallel.meeting_point()  # of the process group
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                self.pipes.append(ours)
                process = context.Process(target=run_worker, daemon=True, name=f"Worker_{rank}", args=(
                    theirs, self.queue.reader(rank), rank, world_size, self.store.port))  # fmt: skip
                process.start()
                self.processes.append(process)
                theirs.close()  # the worker has the only writing end now: its death is an end of file
            for ours, _ in self.queue.pipes:
                ours.close()
            self.sentinels = [process.sentinel for process in self.processes]
            self._expect("start", None, 300).result()
        except BaseException:
            self.shutdown()
            raise

    def submit(self, method: str | Callable, *args: Any, reply_rank: int | None = None,
               timeout: float | None = None) -> Future:  # fmt: skip
        """Broadcast a call; a Future of the answer of `reply_rank` (None: of all). ExecutorFailed if one has died."""
        if self.failed:
            raise ExecutorFailed(self.failed)
        name = method if isinstance(method, str) else method.__name__
        timeout = self.timeout if timeout is None else timeout
        stop = time.monotonic() + timeout

        def alive() -> None:
            self.check_health()
            if time.monotonic() > stop:
                self.fail(f"no room for {name} within {timeout:g} s: a worker of {self.world_size} does not read; all "
                          "were ended")  # fmt: skip

        with self._no_broken_pipes():
            self.bytes_broadcast += self.queue.enqueue((method, args, reply_rank), alive)
        return self._expect(name, reply_rank, timeout)

    @contextlib.contextmanager
    def _no_broken_pipes(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.fail(None)

    def _expect(self, name: str, reply_rank: int | None, timeout: float) -> Future:
        ranks = range(self.world_size) if reply_rank is None else [reply_rank]
        future = Future(self, name, ranks, reply_rank is not None, timeout)
        for rank in ranks:
            self.pending[rank].append(future)
        return future

    def read_replies(self, deadline: float, wanted: Future) -> None:
        """Wait for some replies and give them to the futures they belong to."""
        if self.failed:
            raise ExecutorFailed(self.failed)
        ready = multiprocessing.connection.wait(self.pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = ", ".join(map(str, sorted(wanted.waiting)))
            self.fail(f"no answer to {wanted.name} from worker {ranks} of {self.world_size} within "
                      f"{wanted.timeout:g} s; all were ended")  # fmt: skip
        for pipe in ready:
            rank = self.pipes.index(pipe)
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                self.fail(None)
            if kind != "result":
                self.fail(value, common.InputError if kind == "input" else ExecutorFailed)
            future = self.pending[rank].popleft()
            future.answers[rank] = value
            future.waiting.discard(rank)

    def fail(self, why: str | None, kind: type[Exception] = ExecutorFailed) -> None:
        """End all workers and raise. The first error need not come from the worker that died: its peers lose their
        connection to it. So a worker that is dead within a second is named before workers that raised."""
        if kind is ExecutorFailed and (why is None or "worker" in why):
            multiprocessing.connection.wait([process.sentinel for process in self.processes], 1 if why else 5)
            dead = [rank for rank, process in enumerate(self.processes) if not process.is_alive()]
            if dead:
                words = tensor_parallel._last_words(self.processes[dead[0]])
                why = f"worker {dead[0]} of {self.world_size} died ({words}); the others were ended"
        self.failed = why or "a worker closed its connection; all were ended"
        self.shutdown()
        raise kind(self.failed)

    def check_health(self) -> None:
        if not self.failed and any(not process.is_alive() for process in self.processes):
            self.fail(None)

    def shutdown(self) -> None:
        """Kill the workers: no step is in flight that anybody waits for."""
        self.failed = self.failed or "the executor was shut down"
        self._end()
        atexit.unregister(self._end)
        _living.discard(self)


def end_workers(processes: list[Any], pipes: list[Any], queue: MessageQueue) -> None:
    """Kill the processes and give back what connected them."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for pipe in pipes:
        pipe.close()
    queue.close()


def run_worker(pipe: multiprocessing.connection.Connection, reader: MessageReader, rank: int, world_size: int,
               port: int) -> None:  # fmt: skip
    """A worker process from start to end. It ends with the process that started it, whatever way that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; what they mean is not ours to decide
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))

    # A thread sends the answers. A pipe holds 64 KiB: a worker that waited until its answer is read would not read
    # meanwhile, and the engine core does not either while it waits for a chunk to be free.
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send() -> None:
        with contextlib.suppress(OSError):  # nobody reads any more: `dequeue` finds out as well
            while True:
                pipe.send_bytes(answers.get())

    threading.Thread(target=send, daemon=True).start()

    def reply(kind: str, value: Any) -> None:
        answers.put(pickle.dumps((kind, value), protocol=5))

    try:
        world = tensor_parallel.init_distributed(rank, world_size, port, timeout=1800) if world_size > 1 else None
        worker = Worker(world)
        reply("result", os.getpid())
        while True:
            method, args, reply_rank = reader.dequeue()
            value = worker.call(method, args)
            if reply_rank in (None, rank):
                reply("result", value)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # nobody is left to work for
    except common.InputError as error:
        reply("input", str(error))
    except BaseException as error:
        traceback.print_exc()
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        reply("raised", f"worker {rank} of {world_size} raised {first_line}; all were ended")
    threading.Event().wait()  # stay until we are ended: a worker that left now would look like the one that died


class RayWorker:
    """A worker as one of Ray's actors."""

    def __init__(self, rank: int, world_size: int, host: str, port: int) -> None:
        join = tensor_parallel.init_distributed
        self.worker = Worker(join(rank, world_size, port, host, 1800) if world_size > 1 else None)

    def call(self, data: bytes, answers: bool) -> bytes:
        return self.worker.call_pickled(data, answers)


class RayExecutor(Executor):
    """The same workers as Ray's actors, one bundle of a placement group each: on this machine, or on the machines of a
    cluster that runs already (`address`). vLLM 0.32: `RayExecutorV2`, with message queues where we use Ray's calls.
    """

    def __init__(self, world_size: int, address: str | None = None, timeout: float | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise common.InputError("distributed_executor_backend ray: not installed; `uv sync --extra ray`") from None
        self.ray, self.world_size, self.timeout = ray, world_size, timeout or 300.0
        self.owns_ray = not ray.is_initialized()
        if self.owns_ray:
            options = {} if address else {"num_cpus": world_size, "include_dashboard": False}
            ray.init(address=address or os.environ.get("RAY_ADDRESS"), log_to_driver=False, logging_level="error",
                     runtime_env={"env_vars": {"PYTHONPATH": str(common.HERE)}}, **options)  # fmt: skip
        _living.add(self)
        device = {"GPU": 1} if common.HAS_GPU else {"CPU": 1}
        self.group = ray.util.placement_group([device] * world_size, strategy="PACK")  # as few machines as possible
        self.actors: list[Any] = []
        self._end = weakref.finalize(self, end_actors, ray, self.actors, self.group, self.owns_ray)
        atexit.register(self._end)
        ray.get(self.group.ready(), timeout=self.timeout)
        one_machine = len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 1
        host = "127.0.0.1" if one_machine else ray.util.get_node_ip_address()
        self.store = tensor_parallel.meeting_point(host)

        bundle = lambda i: ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, i)  # noqa: E731
        resources = {"num_gpus": 1} if common.HAS_GPU else {"num_cpus": 1}
        self.actors += [ray.remote(RayWorker).options(scheduling_strategy=bundle(rank), **resources).remote(
            rank, world_size, host, self.store.port) for rank in range(world_size)]  # fmt: skip

    def submit(self, method: str | Callable, *args: Any, reply_rank: int | None = None,
               timeout: float | None = None) -> RayFuture:  # fmt: skip
        """Call every actor; who is not to answer sends None. `timeout` in seconds. ExecutorFailed if one has died."""
        if self.failed:
            raise ExecutorFailed(self.failed)
        data = pickle.dumps((method, args), protocol=5)
        calls = [actor.call.remote(data, reply_rank in (None, rank)) for rank, actor in enumerate(self.actors)]
        return RayFuture(self, calls, reply_rank, timeout or self.timeout)

    def shutdown(self) -> None:
        """End actors and their places, and Ray where we started it."""
        self.failed = self.failed or "the executor was shut down"
        self._end()
        atexit.unregister(self._end)
        _living.discard(self)


def end_actors(ray: Any, actors: list[Any], group: Any, owns_ray: bool) -> None:
    """End the actors, give their places back, and end Ray where it was started for them."""
    for actor in actors:
        ray.kill(actor)
    ray.util.remove_placement_group(group)
    if owns_ray:
        ray.shutdown()


class RayFuture:
    """The answers that Ray has promised; a failed call ends the whole group of workers."""

    def __init__(self, executor: RayExecutor, calls: list[Any], reply_rank: int | None, timeout: float) -> None:
        self.executor, self.calls, self.reply_rank, self.timeout = executor, calls, reply_rank, timeout

    def result(self) -> Any:
        """Waits for all: an actor that is gone fails its call at once, even if another was to answer."""
        ray, executor = self.executor.ray, self.executor
        try:
            answers = [pickle.loads(x) for x in ray.get(self.calls, timeout=self.timeout)]
        except ray.exceptions.RayTaskError as error:
            cause = error.as_instanceof_cause()
            executor.failed = f"a worker raised {str(error.cause).partition(chr(10))[0]}; all were ended"
            executor.shutdown()
            if isinstance(cause, ValueError) and "InputError" in type(cause).__name__:
                raise common.InputError(str(error.cause)) from None
            raise ExecutorFailed(executor.failed) from None
        except ray.exceptions.RayError as error:
            executor.failed = f"a worker died ({type(error).__name__}); the others were ended"
            executor.shutdown()
            raise ExecutorFailed(executor.failed) from None
        return answers if self.reply_rank is None else answers[self.reply_rank]


def make_executor(parallel: ParallelConfig, ray_address: str | None = None) -> Executor:
    """The executor of `backend` (uni, mp, ray) for all ranks of `parallel`."""
    if parallel.backend == "uni":
        return ThreadExecutor() if parallel.async_scheduling else UniProcExecutor()
    if parallel.backend == "ray":
        return RayExecutor(parallel.world_size, ray_address)
    return MultiprocExecutor(parallel.world_size)


# --- 5. The engine core, with micro-batches in flight -----------------------------------------------------------------


class RemoteRunner:
    """Stands where an engine core has its model runner: it writes decisions instead of executing them."""

    def __init__(self, executor: Executor, parallel: ParallelConfig, scheduler: Any, seed: int = 0) -> None:
        manager = scheduler.kv_cache_manager
        self.executor, self.output_rank = executor, parallel.output_rank
        self.writer = StepWriter(manager, sends_tokens=not parallel.async_scheduling)
        self.logprobs: dict[str, dict] = {}
        self.prompt_logprobs: dict[str, list] = {}
        executor.collective_rpc(
            "initialize_from_config", scheduler.config, manager.block_pool.num_blocks, manager.block_size, seed
        )

    def submit(self, output: Any) -> Any:
        """Send a step on its way; None if there is nothing to compute in it."""
        message = self.writer.write(output)
        return message and self.executor.submit("execute_model", message, reply_rank=self.output_rank)


class PipelineEngineCore(scheduling.ModelEngineCore):
    """Lesson 04's loop with up to `max_concurrent_batches` steps in flight: one per stage (`step_with_batch_queue`).

    The scheduler needs no change. A request whose token is still on its way has nothing left to compute (with lesson
    07's drafts, less than nothing), so a second `schedule()` passes it over and finds others; of a long prompt it takes
    the next chunk, right behind the last one. Unless `async_scheduling` asks for lesson 05's scheduler, which counts on
    that token: then the second step is planned for the same requests while the first one runs.
    """

    def __init__(self, scheduler: Any, runner: Any, max_concurrent_batches: int = 1) -> None:
        super().__init__(scheduler, runner)
        self.max_concurrent_batches = max_concurrent_batches
        self.batch_queue: deque[tuple[Any, Any, dict[str, tuple[Request, int]]]] = deque()
        self.empty_output: Any = None  # of the last step in which nobody could run
        self.preempted: list[str] = []  # since it was last told: a step without members may preempt, too

    def put_in_flight(self) -> Any:
        """Schedule one more micro-batch if there is room for it. Returns its SchedulerOutput, or None."""
        if len(self.batch_queue) == self.max_concurrent_batches:
            return None
        output = self.scheduler.schedule()
        self.preempted += [request.request_id for request in output.preempted_reqs]
        future = self.runner.submit(output)
        if future is None:
            self.empty_output = output
            return None
        members = (*output.scheduled_running_reqs, *output.scheduled_new_reqs, *output.scheduled_resumed_reqs)
        lives = {request.request_id: (request, request.num_preemptions) for request in members}
        self.batch_queue.append((output, future, lives))
        return output

    def next_result(self) -> tuple[Any, dict[str, list[int]]]:
        """The oldest micro-batch's output and tokens; waits for it.

        What belongs to a request that has ended is dropped: another may have its name by now. A request preempted
        meanwhile will compute that token again, so this one is dropped: it would count twice.
        Drafts for the next step go to the scheduler, but not those that follow such a token. A scheduler that is one
        step ahead counts what is on its way, and hears of every token but those of requests that have ended.
        """
        if not self.batch_queue:  # nobody could run; the scheduler may have something to say about that
            self.runner.logprobs, self.runner.prompt_logprobs = {}, {}
            return self.empty_output, {}
        output, future, lives = self.batch_queue.popleft()
        sampled, self.runner.logprobs, scores, drafts = future.result()
        alive = {name for name, (request, _) in lives.items() if self.scheduler.requests.get(name) is request}
        self.runner.prompt_logprobs = {name: scores[name] for name in scores.keys() & alive}
        if self.scheduler.async_scheduling:
            for name in lives.keys() - alive:
                output.scheduled_spec_decode_tokens.pop(name, None)
        else:
            alive = {name for name in alive if lives[name][0].num_preemptions == lives[name][1]}
        if drafts:
            self.scheduler.update_draft_token_ids({name: drafts[name] for name in drafts.keys() & alive})
        return output, {request_id: token_ids for request_id, token_ids in sampled.items() if request_id in alive}

    def step(self) -> list[Any]:
        """Fill the pipeline, then take what comes out of it first."""
        while self.put_in_flight():
            pass
        return self.scheduler.update_from_output(*self.next_result())


def parallel_engine(base: type[Any], executor: Executor, parallel: ParallelConfig) -> type[Any]:
    """A subclass of lesson 04b's or 12's engine whose model is with the workers of `executor`; its model is a
    `skeleton`."""

    class ParallelEngine(base):
        remote_runner_class = getattr(base, "remote_runner_class", RemoteRunner)
        runner_class = staticmethod(
            lambda model, scheduler, seed: ParallelEngine.remote_runner_class(executor, parallel, scheduler, seed)
        )

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            core = self.core
            self.core = PipelineEngineCore(core.scheduler, core.runner, parallel.max_concurrent_batches)

    return ParallelEngine


class ParallelEngineCoreProc(async_engine.EngineCoreProc):
    """Lesson 06e's loop around a core that may have several steps in flight."""

    def __init__(self, engine: Any, send: Callable[[Any], None]) -> None:
        super().__init__(engine, send)
        self.admitted: deque[dict] = deque()

    def step(self) -> None:
        """With a pipeline: fill it, then wait for the oldest step alone; without, as the parent."""
        if not isinstance(self.core, PipelineEngineCore):
            return super().step()
        start = time.monotonic()
        while output := self.core.put_in_flight():
            self.admitted.append(self._admissions(output, start))
        output, sampled = self.core.next_result()
        self.read_mail()  # a request aborted while the model ran is out before its token is looked at
        outputs = self.scheduler.update_from_output(output, sampled)
        if not (output.num_scheduled_tokens or outputs):
            return
        admitted = self.admitted.popleft() if output.num_scheduled_tokens else {}
        stats = self.stats()
        stats.num_scheduled_tokens = output.total_num_scheduled_tokens
        stats.step_seconds = time.monotonic() - start
        runner, preempted, self.core.preempted = self.core.runner, self.core.preempted, []
        self.send(async_engine.EngineCoreOutputs(outputs, stats, runner.logprobs, admitted, preempted,
                                                 prompt_logprobs=runner.prompt_logprobs))  # fmt: skip

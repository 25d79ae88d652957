"""06 · Serving: the life of one request, from HTTP to tokens and back.

The question: somebody posts a chat message and reads the answer word by word. What stands between that connection and
the engine of the earlier lessons, and what must it refuse, forget or survive so that the next request works, too?

The mechanism:
  1. `EngineArgs`, with vLLM's flags, puts an engine together: one scheduler on 05's prefix cache, 10's mixed
     batches, 04b's sampler; quantized weights, a quantized cache and guided decoding by flag.
  2. It starts as vLLM does: device, weights, profile run, KV-cache size, warm-up; in a process of its own (06e).
  3. An HTTP request is checked field by field, rendered by the chat template, tokenized off the event loop, admitted or
     refused with 503, and handed over. From there on it is a lesson-04 `Request` and a mailbox.
  4. What comes back is text, as server-sent events in the shapes that OpenAI's clients expect.
  5. A client that hangs up aborts its request; SIGTERM finishes what it can; a dead engine turns /health red.
  6. Every step of it is counted under vLLM's metric names (engine/serving/metrics.py).

Numbers to remember: at 95 % load the queue is three times as long as at 80 %, and at 105 % it grows for ever: only a
bound keeps it short. With 8 ms of Python per step in one loop, a GPU with 2 ms steps is used 20 % of the time.

How to run:
  uv run python vllm/06_serving.py                            start a server, load it, stop it: the whole story
  uv run python vllm/06_serving.py serve --port 8000          keep one running, for any OpenAI client
  uv run python vllm/06_serving.py --max-num-queued-reqs 2    break it: nearly everybody is turned away
  uv run python vllm/06_serving.py --max-num-seqs 1           one at a time: the same answers, later
  uv run python vllm/06_serving.py --bench                    minutes: latency and throughput against load
  uv run python vllm/06_serving.py bench --help               lesson 06d's load generator, for any server

Read for this: vLLM 0.32 `entrypoints/launchers/`, `entrypoints/openai/`, `v1/engine/async_llm.py`,
`v1/metrics/loggers.py`; OpenAI's API reference; the HTML standard's chapter on server-sent events; Little 1961.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import asyncio
import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import llama

KEY = "06_serving"

from engine.serving import metrics

async_engine = common.lesson("06e_async_engine")
openai_api = common.lesson("06f_openai_api")
offline = common.lesson("04b_offline_engine")
scheduling = common.lesson("04_continuous_batching")
chunked_prefill = common.lesson("10_chunked_prefill")
preemption = common.lesson("11_preemption")
AsyncLLM, QueueOverflowError = async_engine.AsyncLLM, async_engine.QueueOverflowError
LLMEngine, RequestOutput, SamplingParams = offline.LLMEngine, offline.RequestOutput, offline.SamplingParams

PLACES = tuple(async_engine.CLIENTS)
MAX_NUM_SEQS = 1 << 16  # there are tables with a row for each


# --- 1. An engine from flags ------------------------------------------------------------------------------------------


@dataclass
class EngineArgs:
    """What `serve` takes on its command line, under vLLM's names (`vllm/engine/arg_utils.py`)."""

    model: str | None = None
    served_model_name: list[str] | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    seed: int = 0
    quantization: str | None = None
    max_model_len: int | None = None
    generation_config: str = "auto"
    override_generation_config: str | dict[str, Any] | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    max_num_queued_reqs: int | None = 1024
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_gib: float = 1.0
    enforce_eager: bool = False
    async_scheduling: bool = False
    speculative_config: str | dict[str, Any] | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_modules: list[str] | None = None  # name=path of each
    chat_template: str | None = None  # a file or the text; from __post_init__ on the text
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    kv_transfer_config: str | dict[str, Any] | None = None
    engine_place: str = "process"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    data_parallel_size: int = 1
    data_parallel_size_local: int | None = None
    data_parallel_start_rank: int = 0
    data_parallel_address: str = "127.0.0.1"
    data_parallel_rpc_port: int = 29550
    data_parallel_routing: str = "load"
    api_server_count: int = 1
    headless: bool = False

    def __post_init__(self) -> None:
        """Refuse early what would fail late. Raises InputError."""
        if self.trust_remote_code:
            raise common.InputError("--trust-remote-code: refused. It lets a model folder run its own Python; this "
                                    "engine reads config.json, weights and tokenizer, and runs none of it")  # fmt: skip
        for name, low in (("max_num_seqs", 1), ("max_model_len", 2), ("max_num_batched_tokens", 1), ("block_size", 1),
                          ("num_gpu_blocks_override", 2), ("max_num_queued_reqs", 1), ("seed", 0),
                          ("long_prefill_token_threshold", 0), ("tensor_parallel_size", 1),
                          ("pipeline_parallel_size", 1), ("data_parallel_size", 1), ("data_parallel_size_local", 0),
                          ("data_parallel_start_rank", 0), ("api_server_count", 1)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < low):
                raise common.InputError(f"{name} {value!r}: must be a whole number of at least {low}")
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise common.InputError(f"max_num_seqs {self.max_num_seqs}: must be at most {MAX_NUM_SEQS}")
        if not all(self.served_model_name or ["default"]):
            raise common.InputError(f"served_model_name {self.served_model_name}: a name must not be empty")
        for name, high in (("gpu_memory_utilization", 1), ("kv_cache_gib", 1 << 20)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= high:
                raise common.InputError(f"{name} {value!r}: must be a number above 0, at most {high}")
        offline._dtype(self.dtype)
        offline.override_generation_config(self.override_generation_config)
        allowed = {"scheduling_policy": ("fcfs", "priority"), "engine_place": PLACES}
        if self.tool_call_parser is not None:
            allowed["tool_call_parser"] = ("hermes",)
        if self.quantization is not None:
            methods = openai_api.companion("05b_quantization", "--quantization").METHODS
            allowed["quantization"] = (*methods, "compressed-tensors", "fp8")
        if self.kv_cache_dtype != "auto":
            cache = openai_api.companion("05d_kv_cache_quantization", "--kv-cache-dtype")
            allowed["kv_cache_dtype"] = cache.KV_CACHE_DTYPES
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise common.InputError(f"{name} {getattr(self, name)!r}: must be one of {', '.join(values)}")
        if self.chat_template is not None:
            self.chat_template = llama.read_chat_template(self.chat_template)
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise common.InputError("--enable-auto-tool-choice: needs --tool-call-parser")

        if self.scales_out:
            openai_api.companion("06c_scaling_out", "--tensor-parallel-size").check_args(self)
        _, _, kv_transfer = self.lora_config, self.speculation, self.kv_transfer  # wrong ones are refused now
        if kv_transfer:
            stored = kv_transfer.kv_connector == "StoreConnector"  # an adapter's name may mean another one tomorrow
            quantized = self.kv_cache_dtype != "auto"
            for flag, used in (("--kv-cache-dtype", quantized),
                               ("--enable-lora if blocks go to a store", stored and self.enable_lora)):  # fmt: skip
                if used:
                    raise common.InputError(f"--kv-transfer-config: not together with {flag}")
            if self.has_workers or self.has_engines:
                from engine.kv_transfer import remote

                remote.check(self)
        if self.lora_modules and not self.enable_lora:
            raise common.InputError("--lora-modules: needs --enable-lora")
        if self.enable_lora and (twice := [name for name in self.adapters if name in self.names]):
            raise common.InputError(f"--lora-modules {twice[0]}: is the name of the model itself")

    @property
    def speculation(self) -> Any:
        """Lesson 07's config, or None without --speculative-config. Raises InputError."""
        if self.speculative_config is None:
            return None
        return openai_api.companion("07_spec_decode", "--speculative-config").SpeculativeConfig.from_json(
            self.speculative_config
        )

    @property
    def kv_transfer(self) -> Any:
        """Lesson 08's config, or None without --kv-transfer-config. Raises InputError."""
        if self.kv_transfer_config is None:
            return None
        from engine.kv_transfer import connectors

        return connectors.KVTransferConfig.from_json(self.kv_transfer_config)

    @property
    def lora_config(self) -> Any:
        """Lesson 12's limits, or None without --enable-lora. Raises InputError."""
        lora = common.lesson("12_multi_lora") if self.enable_lora else None
        return lora and lora.LoRAConfig(self.max_loras, self.max_lora_rank, self.max_cpu_loras)

    @property
    def adapters(self) -> dict[str, str]:
        """Paths of the adapters to start with, by name. Raises InputError."""
        pairs = [module.partition("=") for module in self.lora_modules or ()]
        for i, (name, _, path) in enumerate(pairs):
            if not name or not path or name in [other for other, _, _ in pairs[:i]]:
                raise common.InputError(f"--lora-modules {name}={path}: must be name=path, each name once")
        return {name: path for name, _, path in pairs}

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def scales_out(self) -> bool:
        """More than one engine, one API server, or one process or thread per engine: companion 06c's business."""
        return self.has_workers or self.has_engines

    def for_engine(self, engine: int) -> EngineArgs:
        """The flags of one of several engines: each listens at ports of its own."""
        config = self.kv_transfer
        if config is None:
            return self
        port = config.port_of(engine * self.world_size)
        own = dataclasses.replace(config, engine_id=f"{config.engine_id}_dp{engine}", kv_port=port)
        mine = copy.copy(self)  # without looking at everything once more
        mine.kv_transfer_config = dataclasses.asdict(own)
        return mine

    @property
    def has_engines(self) -> bool:
        """More than one engine or API server, or engines on other machines?"""
        return self.data_parallel_size > 1 or self.api_server_count > 1 or self.headless

    @property
    def has_workers(self) -> bool:
        """Does the engine core send its decisions to an executor, in place of running the model itself?"""
        return self.world_size > 1 or self.distributed_executor_backend is not None or self.async_scheduling

    @property
    def names(self) -> list[str]:
        """What clients may call the model; the first one is what answers say."""
        return self.served_model_name or [self.model or llama.DEFAULT_MODEL]


def has_guided_decoding() -> bool:
    """Whether lesson 06b's file is there: without it, the server refuses `structured_outputs`."""
    return (common.HERE / "06b_guided_decoding.py").is_file()


class MixedModelRunner(offline.SamplingModelRunner, chunked_prefill.ModelRunner):
    """Lesson 04b's sampling on lesson 10's attention for chunks and decodes together."""


def engine_class(kv_cache_dtype: str = "auto", enforce_eager: bool = False, tokenizer: llama.Tokenizer | None = None,
                 lora_config: Any = None, speculation: Any = None, kv_transfer: Any = None,
                 on_workers: bool = False, async_scheduling: bool = False) -> type[LLMEngine]:  # fmt: skip
    """The engine that the lessons add up to: lesson 04b's interface around everybody else's parts."""
    runner, block_bytes = MixedModelRunner, LLMEngine.cache_block_bytes
    if kv_cache_dtype != "auto":
        kv_quantization = common.lesson("05d_kv_cache_quantization")
        runner = kv_quantization.quantized_runner(runner, kv_cache_dtype)
        block_bytes = functools.partial(_quantized_block_bytes, kv_cache_dtype)
    elif not (enforce_eager or lora_config or kv_transfer):  # captures CUDA graphs on a GPU, nothing elsewhere
        # A graph replays its kernels alone: no connector could act between layers, and adapters would never change.
        from engine.worker import cuda_graphs

        runner = cuda_graphs.graph_runner(runner)
    if has_guided_decoding():
        runner = common.lesson("06b_guided_decoding").guided_runner(runner, tokenizer)

    class Engine(LLMEngine):
        runner_class = runner
        cache_block_bytes = staticmethod(block_bytes)

        def collaborators(self) -> dict[str, Any]:
            return {"async_scheduling": async_scheduling}

        def add_request(self, request_id: str, prompt: offline.Prompt, params: SamplingParams | None = None,
                        **about: Any) -> None:  # fmt: skip
            if getattr(params, "structured_outputs", None) is not None:
                config = self.model.config  # with its own vocabulary: the runner then finds what is compiled here
                common.lesson("06b_guided_decoding").validate(
                    params.structured_outputs, self.tokenizer, config.vocab_size, config.eos_token_ids
                )
            super().add_request(request_id, prompt, params, **about)

        def _answer(self, sequence: Any, *why: Any) -> RequestOutput | None:
            if sequence.request.sampling_params.structured_outputs is not None:
                why = common.lesson("06b_guided_decoding").ending(self, sequence, *why)
            return super()._answer(sequence, *why)

    # In this order: a connector sees drafts as tokens; and a request whose adapter finds no place waits before any of
    # its blocks are fetched and before it gets a seat.
    engine = Engine if speculation is None else drafting_engine(Engine, speculation, async_scheduling)
    if kv_transfer is not None:
        disagg = common.lesson("08_disagg")
        if on_workers:
            from engine.kv_transfer.remote import remote_connector_engine as remote

            engine = remote(engine, kv_transfer)
        else:
            engine = disagg.connector_engine(engine, kv_transfer)
    if lora_config is None:
        return engine
    multi_lora = common.lesson("12_multi_lora")
    make_runner = multi_lora.lora_runner
    if on_workers:
        from engine.lora.remote import remote_lora_runner as make_runner
    return multi_lora.lora_engine(engine, lora_config, make_runner)


def drafting_engine(base: type[LLMEngine], config: Any, async_scheduling: bool) -> type[LLMEngine]:
    """`base` with drafts; planned before they are made, if it is asked to be a step ahead."""
    spec_decode = common.lesson("07_spec_decode")
    if not async_scheduling:
        return spec_decode.speculative_engine(base, config)
    from engine.spec_decode import drafts_ahead as ahead

    engine = spec_decode.speculative_engine(base, config)
    engine.runner_class = type("DraftsAheadRunner", (ahead.DraftsAheadRunner, engine.runner_class), {})
    return engine


def worker_runner(kv_cache_dtype: str, enforce_eager: bool, tokenizer: llama.Tokenizer | None, lora_config: Any,
                  speculation: Any, drafts: bool, async_scheduling: bool, kv_transfer: Any = None) -> Any:  # fmt: skip
    """What a worker of lesson 06c runs, while its engine is elsewhere. Without `drafts` it computes those of others."""
    enforce_eager = enforce_eager or lora_config is not None or kv_transfer is not None
    runner = engine_class(kv_cache_dtype, enforce_eager, tokenizer, speculation=speculation,
                          async_scheduling=async_scheduling).runner_class  # fmt: skip
    if speculation is not None and not drafts:
        silent = common.lesson("07_spec_decode").Drafter()  # this worker does not sample, so its drafter is never asked
        runner = type(runner.__name__, (runner,), {"make_drafter": staticmethod(lambda config, model: silent)})
    if kv_transfer is not None:
        runner = common.lesson("08_disagg").connector_runner(runner)
        from engine.kv_transfer import remote

        runner = remote.worker_runner(runner, kv_transfer)
    if lora_config is None:
        return runner
    from engine.lora import remote

    mine = remote.WorkerAdapters(lora_config)
    return common.lesson("12_multi_lora").lora_runner(runner, mine)


def stored_quantization(folder: Path, asked: str | None) -> str | None:
    """What a folder's weights are in; None: floats. Raises InputError if something else was `asked` for."""
    stored = (llama._read_json(folder / "config.json").get("quantization_config") or {}).get("quant_method")
    if stored is not None and asked not in (None, stored):
        raise common.InputError(f"quantization {asked!r}: {folder.name} has {stored} weights already")
    return stored


def load_model(path_or_id: str | None, dtype: torch.dtype, quantization: str | None,
               generation_config: str = "auto") -> tuple[llama.Llama, llama.Tokenizer]:  # fmt: skip
    """Float weights as they are or quantized here; or weights that are codes already, and whose folder says which."""
    folder = llama.model_folder(path_or_id)
    if stored_quantization(folder, quantization):
        load = common.lesson("05b_quantization").load_checkpoint
        return load(folder, dtype, generation_config), llama.Tokenizer(folder)
    model, tokenizer = llama.load(path_or_id, dtype, generation_config=generation_config)
    if quantization is not None:
        model = common.lesson("05b_quantization").quantize_model(model, quantization, tokenizer)
    return model, tokenizer


def offline_engine(
    model: str | llama.Llama | None = None, tokenizer: llama.Tokenizer | None = None, *,
    dtype: str | torch.dtype = "auto", quantization: str | None = None, kv_cache_dtype: str = "auto",
    enforce_eager: bool = False, enable_lora: bool = False, max_loras: int = 1, max_lora_rank: int = 16,
    max_cpu_loras: int | None = None, speculative_config: str | dict[str, Any] | None = None,
    tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1, distributed_executor_backend: str | None = None,
    async_scheduling: bool = False, generation_config: str = "auto", **engine_args: Any,
) -> LLMEngine:  # fmt: skip
    """What `vllm.LLM` runs on: lesson 04b's arguments, and those of this engine's other parts. Raises InputError."""
    loaded = isinstance(model, llama.Llama)
    checked = EngineArgs(model=None if loaded else model, quantization=quantization, kv_cache_dtype=kv_cache_dtype,
                         enforce_eager=enforce_eager, enable_lora=enable_lora, max_loras=max_loras,
                         max_lora_rank=max_lora_rank, max_cpu_loras=max_cpu_loras,
                         speculative_config=speculative_config, tensor_parallel_size=tensor_parallel_size,
                         pipeline_parallel_size=pipeline_parallel_size,
                         distributed_executor_backend=distributed_executor_backend,
                         async_scheduling=async_scheduling, generation_config=generation_config)  # fmt: skip
    workers = None
    if checked.has_workers:
        if loaded:
            raise common.InputError("model: workers load it themselves; give a folder or an id")
        workers = common.lesson("06c_scaling_out").start_workers(checked, offline._dtype(dtype))
        model, tokenizer = workers.model, tokenizer or llama.Tokenizer(llama.model_folder(model))
    elif not loaded:
        model, own = load_model(model, offline._dtype(dtype), quantization, generation_config)
        tokenizer = tokenizer or own
    elif quantization is not None:
        model = common.lesson("05b_quantization").quantize_model(model, quantization, tokenizer)
    kind = engine_class(kv_cache_dtype, enforce_eager, tokenizer, checked.lora_config, checked.speculation,
                        on_workers=workers is not None, async_scheduling=async_scheduling)  # fmt: skip
    if not workers:
        return kind(model, tokenizer, **engine_args)
    kind = common.lesson("06c_scaling_out").parallel_engine(kind, workers.executor, workers.parallel)
    try:
        return kind(model, tokenizer, **engine_args)
    except Exception:
        workers.executor.shutdown()
        raise


def _quantized_block_bytes(kv_cache_dtype: str, model: llama.Llama, block_size: int) -> int:
    return common.lesson("05d_kv_cache_quantization").block_bytes(model, block_size, kv_cache_dtype)


def make_engine(args: EngineArgs, report: Callable[[str], None] = lambda text: None) -> LLMEngine:
    """Start an engine, in vLLM's order: device, weights, profile, KV cache, warm-up. `report` hears of each stage.

    Raises InputError. The engine's attribute `about` has what was found out.
    """
    start, seconds = time.perf_counter(), {}

    def stage(name: str, text: str) -> None:
        nonlocal start
        now = time.perf_counter()
        seconds[name], start = now - start, now
        report(f"{name:<8} {seconds[name]:5.1f} s  {text}")

    dtype = offline._dtype(args.dtype)
    m = common.machine()
    stage("device", f"{m['name']}, {m['threads']} threads, {str(dtype).removeprefix('torch.')}")

    scaling = common.lesson("06c_scaling_out") if args.has_workers else None
    workers = scaling.start_workers(args, dtype) if scaling else None
    if workers:
        model, tokenizer = workers.model, llama.Tokenizer(llama.model_folder(args.model))
    else:
        model, tokenizer = load_model(args.model, dtype, args.quantization, args.generation_config)
    parameters = workers.parameters if workers else sum(map(math.prod, llama.tensor_shapes(model.config).values()))
    stage("load", f"{args.names[0]}, {parameters / 1e6:.{0 if parameters > 1e7 else 2}f} M parameters"
          + (f", {args.quantization}" if args.quantization else "")
          + (f" on {workers}" if workers else ""))  # fmt: skip

    kv_transfer = args.kv_transfer
    engine_type = engine_class(args.kv_cache_dtype, args.enforce_eager, tokenizer, args.lora_config, args.speculation,
                               kv_transfer, bool(workers), args.async_scheduling)  # fmt: skip
    if workers:
        engine_type = scaling.parallel_engine(engine_type, workers.executor, workers.parallel)
    budget = args.max_num_batched_tokens or (8192 if common.HAS_GPU else 512)
    budget = max(budget, args.max_num_seqs)
    max_model_len = args.max_model_len or model.config.max_position_embeddings
    if not args.enable_chunked_prefill:
        budget = max(budget, max_model_len)
    memory = workers.available_memory(args, budget) if workers else kv_cache_memory(args, model, budget)
    stage("profile", f"{memory / 2**30:.2f} GiB for the KV cache" + ("" if common.HAS_GPU else " (--kv-cache-gib)"))

    block_bytes = engine_type.cache_block_bytes(model, args.block_size)
    asked = args.num_gpu_blocks_override * block_bytes if args.num_gpu_blocks_override else max(memory, 2 * block_bytes)
    if asked > (there := total_memory() * args.world_size):
        raise common.InputError(f"KV cache: {asked / 2**30:,.1f} GiB in blocks of {args.block_size} tokens, here are "
                                f"{there / 2**30:,.1f}; lower "
                                + ("num_gpu_blocks_override" if args.num_gpu_blocks_override else
                                   "kv_cache_gib" if memory > there else "block_size"))  # fmt: skip

    engine = engine_type(
        model, tokenizer, seed=args.seed, max_model_len=max_model_len, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=budget, block_size=args.block_size, num_gpu_blocks_override=args.num_gpu_blocks_override,
        kv_cache_memory_bytes=memory, scheduling_policy=args.scheduling_policy,
        enable_chunked_prefill=args.enable_chunked_prefill, enable_prefix_caching=args.enable_prefix_caching,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
    )  # fmt: skip
    blocks = engine.core.scheduler.kv_cache_manager.block_pool.num_blocks - 1
    tokens = blocks * args.block_size
    stage("kv cache", f"{blocks:,} blocks of {args.block_size} = {tokens:,} tokens "
          f"({tokens / max_model_len:.1f} sequences of {max_model_len:,})")  # fmt: skip

    for name, path in args.adapters.items():
        engine.lora.add_adapter(name, path)
    warm_up(engine)
    graphs = len({size for size, _ in getattr(engine.core.runner, "captured", ())})
    stage("warm-up", f"{graphs} batch sizes as CUDA graphs" if graphs else "compiled, packed, paged in")
    engine.about = {"seconds": seconds, "kv_cache_tokens": tokens, "device": m["device"]}
    return engine


def total_memory() -> int:
    """Bytes of the GPU, or of the host; where the host does not say (Windows), as many as can be addressed."""
    if common.HAS_GPU:
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize


def kv_cache_memory(args: EngineArgs, model: llama.Llama, budget: int) -> int:
    """Bytes that the KV cache may have.

    On a GPU: gpu_memory_utilization · total − the peak of a profile run, the largest step there can be, with room for
    adapters. As in vLLM, the run skips attention, whose own memory is small. On a CPU memory is shared with everybody,
    so the flag decides.
    """
    if not common.HAS_GPU:
        return int(args.kv_cache_gib * 2**30)
    from engine.lora import remote

    slots = args.lora_config and remote.WorkerAdapters(args.lora_config)
    if slots:  # the engine makes its own later, as large as these: a slot has room for the largest rank allowed
        slots.attach(model, None, None)
    torch.cuda.reset_peak_memory_stats()
    ids = torch.zeros(budget, dtype=torch.int64, device=model.device)
    hidden = model.forward(ids, ids, lambda layer, q, k, v: q)
    rows = model.logits(hidden[: args.max_num_seqs]).float()
    rows.clone().softmax(1)  # what the sampler holds at once
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()  # the driver, other processes
    peak = torch.cuda.max_memory_allocated()
    del ids, hidden, rows, slots
    torch.cuda.empty_cache()
    memory = int(args.gpu_memory_utilization * total) - peak - others
    if memory <= 0:
        raise common.InputError(f"gpu_memory_utilization {args.gpu_memory_utilization}: weights and activations need "
                                f"{(peak + others) / 2**30:.1f} GiB of {total / 2**30:.1f}; raise it")  # fmt: skip
    return memory


def warm_up(engine: LLMEngine) -> None:
    """What the first request would otherwise pay: CUDA graphs, compiled kernels, packed weights, pages of memory."""
    if hasattr(engine.core.runner, "capture_all"):  # a worker does it itself
        engine.core.runner.capture_all()
    # On a GPU lesson 10's kernel has a variant for each height of its tiles, and a prompt's length decides which it is.
    lengths = [2**i for i in range(1, 10)] if common.HAS_GPU else [8]
    for i, (length, temperature) in enumerate(itertools.product(lengths, (0.0, 1.0))):
        params = SamplingParams(temperature=temperature, top_p=0.9, max_tokens=3, ignore_eos=True)
        length = min(length, engine.core.scheduler.config.max_model_len - 1)
        engine.add_request(f"warm-up-{i}", {"prompt_token_ids": [1 + i] * length}, params)
        while engine.has_unfinished_requests():
            engine.step()


# --- 2. The server's own life -----------------------------------------------------------------------------------------


def bind(host: str, port: int, flags: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    """Take the port before anything slow happens. Raises InputError if somebody has it."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        return sock
    except OSError as error:
        where = f"{flags[0]} {host or repr(host)} {flags[1]} {port}"
        raise common.InputError(f"{where}: {error.strerror or error}") from None


async def run_server(args: EngineArgs, host: str, port: int, api_keys: Sequence[str], shutdown_timeout: float,
                     sock: socket.socket | None = None, client: Any = None,
                     say: Callable[[str], None] | None = None) -> int:  # fmt: skip
    """From start-up to the last answer. Returns the exit code: 0 after a signal, 1 after the engine died.

    One of several API servers (companion 06c) is given its listening socket and the client of its engines.
    """
    import uvicorn

    sock, say = sock or bind(host, port), say or functools.partial(print, flush=True)
    started = time.perf_counter()
    place = "event-loop" if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else args.engine_place
    if client is not None:
        place = lambda factory, args: client  # noqa: E731
    elif args.scales_out:
        place = common.lesson("06c_scaling_out").start_client
    logger = metrics.PrometheusStatLogger(args.names[0], getattr(args.speculation, "num_speculative_tokens", 0),
                                          args.max_loras if args.enable_lora else 0,
                                          args.kv_transfer is not None)  # fmt: skip
    llm = await AsyncLLM.start((KEY, "make_engine"), args, llama.model_folder(args.model), place, say,
                               max_num_queued_reqs=args.max_num_queued_reqs, stat_logger=logger)  # fmt: skip
    logger.describe(llm.ready)
    if defaults := llm.sampling_defaults.params:  # where a request says nothing, it is not OpenAI's defaults that count
        say(f"sampling defaults of the model: {json.dumps(defaults)} (--generation-config vllm: none)")
    serving = openai_api.OpenAIServing(llm, args.names, args.adapters)
    serving.tokenizer.chat_template = args.chat_template or serving.tokenizer.chat_template
    with contextlib.suppress(common.InputError):  # no template, or one that wants more than a greeting
        serving.tokenizer.render_chat([{"role": "user", "content": "warm-up"}])  # else the first client waits for it
    serving.has_kv_connector = args.kv_transfer is not None
    serving.enable_auto_tool_choice, serving.tool_call_parser = args.enable_auto_tool_choice, args.tool_call_parser
    serving.root, serving.runtime_loras = args.model or str(llama.model_folder()), may_load_adapters(args)
    serving.system_fingerprint = system_fingerprint(args)
    app = openai_api.build_app(serving, api_keys, os.environ.get("VLLM_SERVER_DEV_MODE") == "1")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off",
                                           timeout_graceful_shutdown=int(shutdown_timeout) + 3))  # fmt: skip
    server.capture_signals = contextlib.nullcontext  # what a signal means is decided below
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop.set)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    running = asyncio.create_task(server.serve(sockets=[sock]))
    address = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    say(f"ready after {time.perf_counter() - started:.1f} s: {', '.join([*args.names, *args.adapters])}, engine core: "
        f"{place if isinstance(place, str) else f'{args.data_parallel_size} x process'}, "
        f"pid {llm.ready.pid}")  # fmt: skip
    gc.freeze()  # else a large request has the collector look through a million objects of imported libraries
    sock.listen(2048)  # the server is about to do it: whoever reads the next line may connect
    say(f"Listening on {address}")

    died, stopped = asyncio.create_task(llm.died.wait()), asyncio.create_task(stop.wait())
    await asyncio.wait((died, stopped, running), return_when=asyncio.FIRST_COMPLETED)
    if died.done() and not stop.is_set():
        say(f"EngineCore is dead: {llm.dead}")
        if os.environ.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH") == "1":
            await stopped  # stay, and answer /health with 503
    try:
        say(f"stopping: {llm.num_unfinished} sequences inside, {shutdown_timeout:g} s for them")
    except BrokenPipeError:  # whoever read this has left; those inside still get their answers
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    server.should_exit = True  # no new connections from here on
    await llm.shutdown(shutdown_timeout)
    await running
    gc.unfreeze()  # some of those libraries complain at exit of what was not collected
    died.cancel()
    stopped.cancel()
    return 1 if llm.dead else 0


def system_fingerprint(args: EngineArgs) -> str:
    """Changes with whatever may change an answer: this version, torch's, the flags, what it runs on."""
    place = torch.cuda.get_device_name() if common.HAS_GPU else "cpu"
    about = hashlib.sha256(repr((torch.__version__, place, args)).encode())
    return f"fp-{openai_api.VERSION}-{about.hexdigest()[:8]}"


def may_load_adapters(args: EngineArgs) -> bool:
    """May clients load and unload adapters? It lets them name folders that the server then reads."""
    return args.enable_lora and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1"


def stop_at_eof(descriptor: int) -> None:
    """SIGTERM for this process when nobody holds the other end of a pipe: its parent has ended, whatever way."""
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def serve_command(args: argparse.Namespace) -> None:
    """Serve a model over OpenAI's API until SIGINT or SIGTERM."""
    if os.environ.get("SERVE_UNTIL_EOF") == "1":
        threading.Thread(target=stop_at_eof, args=[0], daemon=True).start()
    common.set_ulimit()
    if args.device == "cuda" and not common.HAS_GPU:
        raise common.InputError("--device cuda: torch sees no GPU here; allowed on this machine: auto, cpu")
    engine_args = EngineArgs(**{f.name: getattr(args, f.name) for f in dataclasses.fields(EngineArgs)})
    keys = args.api_key or list(filter(None, [os.environ.get("VLLM_API_KEY")]))
    if not all(keys):  # of an unset variable, perhaps: no key at all would be a surprise, and an empty one is none
        raise common.InputError("--api-key '': a key must not be empty")
    if engine_args.headless:
        raise SystemExit(common.lesson("06c_scaling_out").run_headless((KEY, "make_engine"), engine_args))
    server = {"host": args.host, "port": args.port, "api_keys": keys, "shutdown_timeout": args.shutdown_timeout}
    if engine_args.api_server_count > 1:
        if may_load_adapters(engine_args):
            raise common.InputError("VLLM_ALLOW_RUNTIME_LORA_UPDATING: not together with --api-server-count: the other "
                                    "servers would not hear of an adapter that one has loaded")  # fmt: skip
        raise SystemExit(common.lesson("06c_scaling_out").run_api_servers((KEY, "make_engine"), engine_args, server))
    raise SystemExit(asyncio.run(run_server(engine_args, **server)))


def add_serve_command(subparsers: Any) -> None:
    """The flags of `serve`, under the names of vLLM's."""
    p = subparsers.add_parser("serve", help="keep a server running", description=serve_command.__doc__)
    add, whole, switch = p.add_argument, functools.partial(common.number, int), argparse.BooleanOptionalAction
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=whole(0, 65535), default=8000, help="default 8000; 0 takes a free one")
    add("--api-key", action="append", metavar="KEY", help="clients must send it; may be given several times")
    add("--shutdown-timeout", type=common.number(float, 0), default=10.0, metavar="S",
        help="seconds for running requests after a signal (default 10; vLLM's is 0)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--model", metavar="PATH_OR_ID", help="a local Llama-architecture folder, or a hub id")
    add("--served-model-name", nargs="+", metavar="NAME", help="what clients call it (default: as --model)")
    add("--trust-remote-code", action="store_true", help="refused, with the reason")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    add("--seed", type=whole(0, 2**31 - 1), default=0)
    add("--quantization", "-q", metavar="METHOD", help="of the weights: lesson 05b's methods")
    add("--max-model-len", type=whole(2), metavar="N", help="tokens in a sequence (default: the model's)")
    add("--generation-config", default="auto", metavar="auto|vllm|FOLDER",
        help="whose generation_config.json has sampling defaults: the model's, nobody's, a folder's")  # fmt: skip
    add("--override-generation-config", metavar="JSON", help='comes before: {"temperature": 0.5}')
    add("--max-num-seqs", type=whole(1, MAX_NUM_SEQS), default=64, metavar="N", help="sequences in a step (default 64)")
    add("--max-num-batched-tokens", type=whole(1), metavar="N", help="tokens in a step (default 512, on a GPU 8192)")
    add("--enable-chunked-prefill", action=switch, default=True)
    add("--long-prefill-token-threshold", type=whole(0), default=0, metavar="N", help="a prompt's cap per step")
    add("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    add("--max-num-queued-reqs", type=whole(1), default=1024, metavar="N", help="one more gets a 503 (default 1024)")
    add("--block-size", type=whole(1), default=16, metavar="N", help="tokens in a KV block (default 16)")
    add("--enable-prefix-caching", action=switch, default=True)
    add("--kv-cache-dtype", default="auto", metavar="DTYPE", help="auto, or one of lesson 05d's")
    add("--num-gpu-blocks-override", type=whole(2), metavar="N", help="KV blocks, whatever the memory")
    add("--gpu-memory-utilization", type=common.number(float, 0.01, 1), default=0.92, metavar="F", help="default 0.92")
    add("--kv-cache-gib", type=common.number(float, 0.001), default=1.0, metavar="G", help="on a CPU (default 1)")
    add("--enforce-eager", action="store_true", help="capture no CUDA graphs (lesson 05)")
    add("--async-scheduling", action=switch, default=False, help="plan a step while the last one runs (lesson 05)")
    add("--speculative-config", metavar="JSON", help='lesson 07: \'{"method": "suffix", …}\'')
    add("--enable-lora", action="store_true", help="serve adapters, too (lesson 12)")
    add("--max-loras", type=whole(1), default=1, metavar="N", help="adapters in a step (default 1)")
    add("--max-lora-rank", type=whole(1), default=16, metavar="R", help="largest rank (default 16)")
    add("--max-cpu-loras", type=whole(1), metavar="N", help="adapters kept in CPU memory (default: as --max-loras)")
    add("--lora-modules", nargs="+", metavar="NAME=PATH", help="adapters to start with")
    add("--chat-template", metavar="FILE", help="a Jinja template in place of the model's own; or its text")
    add("--enable-auto-tool-choice", action="store_true", help="the model may decide to call a tool")
    add("--tool-call-parser", metavar="NAME", help="how it writes that down: hermes")
    add("--tensor-parallel-size", "-tp", type=whole(1, 64), default=1, metavar="N", help="shards of a layer (06c)")
    add("--pipeline-parallel-size", "-pp", type=whole(1, 64), default=1, metavar="N", help="ranges of layers (06c)")
    add("--distributed-executor-backend", choices=("uni", "mp", "ray"), help="where workers run (06c)")
    add("--data-parallel-size", "-dp", type=whole(1, 64), default=1, metavar="N", help="engines (06c)")
    add("--data-parallel-size-local", "-dpl", type=whole(0, 64), metavar="N", help="of these, on this machine")
    add("--data-parallel-start-rank", "-dpr", type=whole(0, 64), default=0, metavar="N", help="of headless engines")
    add("--data-parallel-address", "-dpa", default="127.0.0.1", metavar="HOST", help="where the API servers are")
    add("--data-parallel-rpc-port", "-dpp", type=whole(0, 65535), default=29550, metavar="PORT")
    add("--data-parallel-routing", choices=("load", "prefix"), default="load", help="prefix: where it is cached")
    add("--api-server-count", "-asc", type=whole(1, 64), default=1, metavar="N", help="API server processes (06c)")
    add("--headless", action="store_true", help="engines without an API server (06c)")
    add("--kv-transfer-config", metavar="JSON", help="lesson 08: kv_connector, kv_role, kv_port, ...")
    add("--engine-place", choices=PLACES, default="process",
        help="where the engine core runs (VLLM_ENABLE_V1_MULTIPROCESSING=0: event-loop)")  # fmt: skip
    p.set_defaults(run=serve_command)


@contextlib.contextmanager
def running_server(*flags: str, echo: Callable[[str], None] = lambda line: None, **environment: str
                   ) -> Iterator[tuple[str, subprocess.Popen]]:  # fmt: skip
    """A server as anybody would start it, on a free port: (its URL, its process). Stopped by SIGTERM at the end, its
    own if we are killed: then nobody holds the other end of its input."""
    command = [sys.executable, str(Path(__file__).resolve()), "serve", "--port", "0", *flags]
    environment = {**os.environ, "SERVE_UNTIL_EOF": "1", **environment}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        url = None
        for line in process.stdout:
            echo(line.rstrip())
            if line.startswith("Listening on "):
                url = line.split()[-1]
                break
        if url is None:
            raise common.CheckFailed(f"the server did not start: exit code {process.wait()}")
        yield url, process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdin.close()
        process.stdout.close()


# --- The simulation behind the widget ---------------------------------------------------------------------------------

SEATS, TOKENS, REQUESTS = 8, 16, 200
PLACED = {"one loop": "CPU and GPU take turns", "two processes": "they overlap"}
CHOICES = {"load": [50, 70, 80, 90, 95, 105, 120], "gpu_ms": [2, 5, 10, 20], "cpu_ms": [2, 4, 8], "place": list(PLACED),
           "queue_bound": [0, 8, 20, 64]}  # fmt: skip
WIDGET_DEFAULT = {"load": 105, "gpu_ms": 20, "cpu_ms": 8, "place": "one loop", "queue_bound": 0}


def gaps(count: int, seed: int = 6) -> list[int]:
    """Exponential times between arrivals with mean 1,000: what independent users look like."""
    rng = random.Random(seed)
    return [int(-1000 * math.log(1 - rng.random())) for _ in range(count)]


def simulate(params: dict) -> dict:
    """Requests of 16 tokens arrive by themselves at a server of 8 seats. Times in µs. Raises InputError."""
    return pipeline(**common.checked(params, CHOICES))


def pipeline(load: int, gpu_ms: int, cpu_ms: int, place: str, queue_bound: int, count: int = REQUESTS) -> dict:
    """The engine's scheduler and 06e's admission control on a clock of our own.

    A step takes cpu + gpu in one loop, the longer of the two if they overlap; then its tokens come out by the shorter
    one later. `load` is in percent of what the seats can serve at that pace. A bound of 0 is no bound.
    """
    cpu, gpu = 1000 * cpu_ms, 1000 * gpu_ms
    step = cpu + gpu if place == "one loop" else max(cpu, gpu)
    lag = 0 if place == "one loop" else min(cpu, gpu)
    arrivals, now = [], 0
    for gap in gaps(count):
        now += gap * step * TOKENS * 100 // (SEATS * load * 1000)
        arrivals.append(now)
    config = preemption.SchedulerConfig(max_model_len=64, max_num_seqs=SEATS, max_num_batched_tokens=1024)
    core = scheduling.DryRun(preemption.make_scheduler(config, 1 + 4 * SEATS, 16, enable_prefix_caching=False))
    admission = async_engine.AdmissionControl(SEATS + queue_bound if queue_bound else None)
    first, finish, steps = [-1] * count, [-1] * count, []
    now = arrived = 0
    while arrived < count or core.scheduler.has_unfinished_requests():
        if not core.scheduler.has_unfinished_requests():
            now = max(now, arrivals[arrived])
        while arrived < count and arrivals[arrived] <= now:
            with contextlib.suppress(QueueOverflowError):
                admission.check(len(core.scheduler.requests))
                params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
                core.add_request(scheduling.Request(str(arrived), [0], params, arrival_time=arrived))
            arrived += 1
        if not core.scheduler.has_unfinished_requests():
            continue
        outputs = core.step()
        steps.append([now, len(outputs), len(core.scheduler.waiting)])
        now += step
        for output in outputs:
            i = int(output.request_id)
            first[i] = now + lag if first[i] < 0 else first[i]
            if output.finish_reason:
                finish[i] = now + lag
    served = [i for i in range(count) if finish[i] >= 0]
    waits = sorted(first[i] - step - lag - arrivals[i] for i in served)
    return {
        "step_us": step, "arrivals": arrivals, "first": first, "finish": finish, "steps": steps, "makespan": now + lag,
        "served": len(served), "rejected": admission.num_rejected, "gpu_busy": gpu * len(steps),
        "gpu_percent": 100 * gpu * len(steps) // (now + lag),
        "wait_sum": sum(waits), "wait_p99": waits[-(-99 * len(waits) // 100) - 1],
        "most_waiting": max(waiting for _, _, waiting in steps),
        "inside_integral": sum(finish[i] - arrivals[i] for i in served),
    }  # fmt: skip


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    served, seconds = trace["served"], trace["makespan"] / 1e6
    return "\n".join([
        f"{len(trace['arrivals'])} requests of {TOKENS} tokens, {SEATS} seats, steps of {trace['step_us'] // 1000} ms",
        f"served {served}, rejected {trace['rejected']}; {served * TOKENS / seconds:.0f} tokens/s",
        f"the GPU computes {trace['gpu_percent']} % of the time",
        f"wait before the first step: mean {(trace['wait_sum'] // served + 500) // 1000} ms, "
        f"p99 {(trace['wait_p99'] + 500) // 1000} ms; most waiting: {trace['most_waiting']}",
        f"Little: {trace['inside_integral'] / trace['makespan']:.1f} inside on average = "
        f"{served / seconds:.1f} per second x {trace['inside_integral'] / served / 1e6:.2f} s",
    ])  # fmt: skip


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    long = {"gpu_ms": 20, "cpu_ms": 8, "place": "one loop", "count": 800}

    def brief(**params: Any) -> dict[str, float]:
        trace = pipeline(**{"queue_bound": 0, **long, **params})
        return {"wait_ms": trace["wait_sum"] / trace["served"] / 1e3, "p99_ms": trace["wait_p99"] / 1e3,
                "rejected": trace["rejected"], "most_waiting": trace["most_waiting"],
                "gpu_busy": trace["gpu_busy"] / trace["makespan"]}  # fmt: skip

    share = lambda cpu, gpu: {"turns": gpu / (cpu + gpu), "overlap": gpu / max(cpu, gpu),  # noqa: E731
                              "steps_turns": 1e3 / (cpu + gpu), "steps_overlap": 1e3 / max(cpu, gpu)}  # fmt: skip
    default = simulate(WIDGET_DEFAULT)
    return {
        "gpu_share": {str(gpu): share(8, gpu) for gpu in (20, 10, 5, 2)},
        "load": {str(load): brief(load=load) for load in (50, 80, 90, 95, 105, 120)},
        "bounded": {str(load): brief(load=load, queue_bound=20) for load in (95, 105, 120)}, "requests": long["count"],
        "widget": {"served": default["served"], "wait_ms": default["wait_sum"] / default["served"] / 1e3,
                   "most_waiting": default["most_waiting"]},
        "seats": SEATS, "tokens": TOKENS,
        "default": {f.name: f.default for f in dataclasses.fields(EngineArgs) if type(f.default) in (int, float)},
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------

LIFE = [  # from lane, to lane, what; lanes: client, HTTP, event loop, engine core
    (0, 1, "POST /v1/chat/completions"),
    (1, 2, "key, size, JSON, every field"),
    (2, 2, "chat template; tokenize (on a thread)"),
    (2, 2, "admission: full? 503, Retry-After"),
    (2, 3, "ADD Request"),
    (3, 3, "waiting queue → schedule()"),
    (3, 3, "prefill in chunks, first token"),
    (3, 2, "EngineCoreOutputs, once per step"),
    (2, 2, "detokenize, stop strings, metrics"),
    (2, 0, "data: {…\"delta\": {\"content\": …}}"),
    (3, 3, "decode steps, among all others"),
    (3, 2, "EngineCoreOutputs … finish_reason"),
    (2, 0, "data: [DONE]"),
]  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The life of one request, and what load does to waiting."""
    return [_draw_life(folder), _draw_load(folder)]


def _draw_life(folder: str | Path) -> Path:
    figure, ax = common.new_figure(8.0, 6.0)
    colors, at, shade = common.COLORS, [0.0, 1.1, 2.2, 4.0], "#eceff2"
    names = ["client", "HTTP\n(06f)", "front end\n(06e, 04b)", "engine core\n(06e: 11, 05, 10, 04b)"]
    ax.axvspan(0.6, 3.1, color=shade)
    ax.axvspan(3.2, 4.6, color=colors["blue"], alpha=0.14)
    ax.text(1.85, -2.05, "API server process: one event loop", ha="center", fontsize=9, color=colors["grey"])
    ax.text(3.9, -2.05, "engine process", ha="center", fontsize=9, color=colors["grey"])
    for x, name in zip(at, names):
        ax.plot([x, x], [-0.4, len(LIFE) - 0.3], color=colors["grey"], linewidth=0.8)
        ax.text(x, -0.6, name, ha="center", va="bottom", weight="bold", fontsize=9)
    for y, (start, end, text) in enumerate(LIFE):
        if start == end:
            ax.plot(at[start], y, "o", color=colors["green"], markersize=7)
            side = -1 if start == 3 else 1
            ax.text(at[start] + 0.09 * side, y, text, ha="right" if side < 0 else "left", va="center", fontsize=9)
        else:
            color = colors["blue"] if end > start else colors["orange"]
            ax.annotate(
                "", (at[end], y), (at[start], y), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6}
            )
            past = (start, end) == (2, 0)  # its label covers the line of the station that it passes
            middle = 1.4 if past else (at[start] + at[end]) / 2 if start < 3 and end < 3 else 3.1
            ax.text(middle, y - 0.12, text, ha="center", va="bottom", color=color,
                    fontsize=9 if past or 3 in (start, end) else 8,
                    bbox={"facecolor": shade, "edgecolor": "none", "pad": 1} if past else None)  # fmt: skip
        ax.text(-0.45, y, y + 1, ha="right", va="center", fontsize=9, color=colors["grey"])
    ax.set(xlim=(-0.55, 4.65), ylim=(len(LIFE) - 0.2, -2.4), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return common.save_figure(figure, folder, "06_life")


def _draw_load(folder: str | Path) -> Path:
    measured = common.results(KEY).get("bench", {}).get("load", {})
    figure, axes = common.new_figure(8.0, 3.0, ncols=3 if measured else 1, squeeze=False)
    ax, colors = axes[0][0], common.COLORS
    free, known = facts()["load"], facts()
    bounded = {load: known["bounded"].get(load, x) for load, x in free.items()}  # below 95 % no more than 20 ever wait
    for waits, color, label in ((free, "red", "no bound"), (bounded, "blue", "at most 20 wait")):
        at, ms = [int(load) for load in waits], [x["wait_ms"] for x in waits.values()]
        ax.plot(at, ms, "o-", color=colors[color], label=label)
    worst = max(known["bounded"], key=int)
    ax.text(int(worst) + 3, 0.7 * known["bounded"][worst]["wait_ms"], f"{known['bounded'][worst]['rejected']}\nrefused",
            ha="right", va="top", fontsize=8)  # fmt: skip
    ax.axvline(100, color=colors["grey"], linewidth=0.8, linestyle=":")
    ax.set(xlabel="load, % of capacity", ylabel="mean wait, ms", ylim=(0, None), title="simulated: the queue")
    ax.legend(loc="upper left", frameon=True, framealpha=1, edgecolor="none")
    at = sorted(map(int, measured))
    for ax, key, label in zip(
        axes[0][1:], ("output_throughput", "median_ttft_ms"), ("output tokens/s", "median TTFT, ms")
    ):
        ax.plot(at, [measured[str(n)][key] for n in at], "o-", color=colors["green"])
        ax.set(xscale="log", xlabel="clients at once", ylabel=label, title="measured: 2 CPU cores")
        ax.set_xticks(at, at)
        ax.set_ylim(0)
        ax.minorticks_off()
    return common.save_figure(figure, folder, "06_load")


# --- The story --------------------------------------------------------------------------------------------------------

PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "Water boils at",
           "To make bread you need flour,"]  # fmt: skip


def metrics_of(client: Any) -> dict[str, float]:
    """/metrics as {name: value}, labels left out."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("vllm:") and "_bucket" not in line and "_created" not in line:
            name, value = line.split("{")[0].removeprefix("vllm:"), float(line.rsplit(" ", 1)[1])
            found[name] = found.get(name, 0.0) + value
    return found


async def load_server(url: str, model: str, clients: int, count: int, tokens: int) -> tuple[list[Any], float]:
    """`clients` at a time ask until `count` requests are answered: lesson 06d's records, and seconds."""
    import httpx

    generator = common.lesson("06d_load_generator")
    target = generator.Target(url, model, extra={"temperature": 0, "ignore_eos": True})
    prompts = [generator.Prompt(PROMPTS[i % len(PROMPTS)], 8, tokens) for i in range(count)]
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None) as client:
        start = time.perf_counter()
        records = await generator.drive(client, target, prompts, [0.0] * count, clients)
    return records, time.perf_counter() - start


def follow_one_request(client: Any, model: str) -> dict[str, float]:
    """Stream one answer, in a chat if the model knows chats; where its time went, by the client's clock and by the
    server's metrics."""
    before, first, chunks, text, question = metrics_of(client), 0.0, 0, "", "What is the capital of France?"
    always = {"model": model, "stream": True, "temperature": 0}
    for path, ask in {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": question}], "max_completion_tokens": 16},
        "/v1/completions": {"prompt": question, "max_tokens": 16},
    }.items():
        start = time.perf_counter()
        with client.stream("POST", path, json=always | ask) as response:
            if response.status_code == 400:  # no chat template
                common.say(f"{path}: {json.loads(response.read())['error']['message']}")
                continue
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    if piece := choice["text"] if "text" in choice else choice["delta"].get("content"):
                        first, chunks, text = first or time.perf_counter(), chunks + 1, text + piece
        break
    end, after = time.perf_counter(), metrics_of(client)
    spent = lambda name: (after[f"{name}_sum"] - before[f"{name}_sum"]) * 1e3  # noqa: E731
    common.say(f"“{question}” → {text!r} in {chunks} events")
    found = {"client_ttft_ms": ((first or end) - start) * 1e3, "client_e2e_ms": (end - start) * 1e3,
             "queue_ms": spent("request_queue_time_seconds"), "prefill_ms": spent("request_prefill_time_seconds"),
             "decode_ms": spent("request_decode_time_seconds"),
             "e2e_ms": spent("e2e_request_latency_seconds")}  # fmt: skip
    found["around_ms"] = found["client_e2e_ms"] - found["queue_ms"] - found["prefill_ms"] - found["decode_ms"]
    return found


def build_parser() -> common.Parser:
    p = common.parser(__doc__)
    p.add_argument("--max-num-seqs", type=common.number(int, 1, 64), default=16, metavar="N",
                   help="seats of the demonstration's engine (default %(default)s)")  # fmt: skip
    p.add_argument("--max-num-queued-reqs", type=common.number(int, 1), default=64, metavar="N",
                   help="its queue bound (default %(default)s; 2 turns nearly everybody away)")  # fmt: skip
    p.add_argument("--engine-place", choices=PLACES, default="process", help="where its engine core runs")
    commands = p.add_subparsers(dest="command", metavar="serve|bench|tune")
    add_serve_command(commands)
    if (common.HERE / "06d_load_generator.py").is_file():
        common.lesson("06d_load_generator").add_bench_commands(commands)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.command:
        if args.json:  # not after minutes
            common.stored_object(args.json)
        return args.run(args)
    machine = common.start(args)
    numbers, bench = facts(), {}
    import httpx

    llama.check_context(args.model, 1024)
    common.heading("1. Start-up, as `serve` prints it")
    flags = ["--max-num-seqs", str(args.max_num_seqs), "--max-num-queued-reqs", str(args.max_num_queued_reqs),
             "--engine-place", args.engine_place, "--max-model-len", "1024", "--kv-cache-gib", "0.25", "--seed",
             str(args.seed), "--device", args.device, *(["--model", args.model] if args.model else [])]  # fmt: skip
    started = time.perf_counter()
    with running_server(*flags, echo=common.say, VLLM_SERVER_DEV_MODE="1") as (url, process):
        bench["start_s"] = time.perf_counter() - started
        with httpx.Client(base_url=url, timeout=60) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            tell_story(args, client, url, model, bench)
        common.heading("5. The end")
        process.send_signal(signal.SIGTERM)
        common.check_equal("SIGTERM: the server finished and left with code 0", process.wait(20), 0)

    common.heading("6. What load does to a queue: 8 seats, 28 ms a step, independent arrivals (simulated)")
    rows = [[f"{load} %", f"{x['wait_ms']:.0f} ms", f"{x['p99_ms']:.0f} ms", x["most_waiting"], x["rejected"]]
            for load, x in [*numbers["load"].items(), ("120", numbers["bounded"]["120"])]]  # fmt: skip
    rows[-1][0] += ", bound 20"
    common.table(["load", "mean wait", "p99", "most waiting", "refused"], rows)
    common.say("The widget's default, the queue without a bound:\n" + describe(simulate(WIDGET_DEFAULT)))
    draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": numbers, "bench": bench})


def tell_story(args: argparse.Namespace, client: Any, url: str, model: str, bench: dict[str, Any]) -> None:
    """Steps 2 to 4, against the running server."""
    common.heading("2. One request, followed from outside and inside")
    spent = bench["life"] = follow_one_request(client, model)
    common.say(f"{spent['client_e2e_ms']:.0f} ms: {spent['queue_ms']:.1f} queue + {spent['prefill_ms']:.0f} prefill + "
               f"{spent['decode_ms']:.0f} decode + {spent['around_ms']:.0f} around the engine (HTTP, template, "
               "tokens, sockets)")  # fmt: skip

    common.heading("3. Load: streams at once, each asking for one answer after the other")
    generator, rows, texts, bench["load"] = common.lesson("06d_load_generator"), [], {}, {}
    tokens, levels = (32, (1, 2, 4, 8, 16, 32)) if args.bench else (8, (1, 4, 16))
    for clients in levels:
        count = max(8, 4 * clients) if args.bench else max(4, min(16, 2 * clients))
        records, seconds = asyncio.run(load_server(url, model, clients, count, tokens))
        found = generator.summarize(records, seconds)
        texts |= {clients: {r.text for r in records if not r.error}}
        if not found["completed"]:
            rows.append([clients, 0, found["failed"], "", "", "", ""])
            continue
        bench["load"][str(clients)] = {
            name: found[name] for name in ("completed", "failed", "output_throughput", "median_ttft_ms", "p99_ttft_ms",
                                           "median_itl_ms", "p99_itl_ms", "median_e2el_ms", "p99_e2el_ms")
        }  # fmt: skip
        times = (found[f"median_{name}_ms"] for name in ("ttft", "itl", "e2el"))  # None: of answers without a text
        rows.append([clients, found["completed"], found["failed"],
                     *("–" if ms is None else f"{ms:.0f} ms" for ms in times),
                     f"{found['output_throughput']:.0f}"])  # fmt: skip
    common.table(["streams", "answered", "refused", "TTFT", "ITL", "end to end", "tokens/s"], rows)
    if args.max_num_queued_reqs >= max(levels):
        if not texts[1]:
            raise common.CheckFailed("no request of the load was answered")
        common.check_equal(f"{levels[-1]} at once read the same texts as one by one", texts[levels[-1]], texts[1])

    common.heading("4. What must not harm anybody else")
    long = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=long) as response:
        next(response.iter_lines())  # one piece, and the client hangs up
    start = time.perf_counter()
    while (state := client.get("/debug/engine").json())["unfinished"] and time.perf_counter() - start < 5:
        time.sleep(0.01)
    common.check_equal("a client hung up: its request is gone", state["unfinished"], 0)
    common.say(f"  … {1e3 * (time.perf_counter() - start):.0f} ms later")
    answers = [client.post("/v1/completions", **wrong).status_code for wrong in (
        {"content": b'{"prompt": "half'}, {"json": {"prompt": 5}}, {"json": {"prompt": "x", "temperature": 9}},
        {"json": {"prompt": "x", "model": "gpt-9"}}, {"content": b" " * (openai_api.MAX_BODY_BYTES + 1)},
    )]  # fmt: skip
    common.check_equal("malformed, wrong type, out of range, unknown model, too large: " + ", ".join(map(str, answers)),
                       answers, [400, 400, 400, 404, 413])  # fmt: skip
    state = client.get("/debug/engine").json()
    common.check_equal("no KV block is owned, no block table is left", (state["owned_blocks"], state["tables"]), (0, 0))


if __name__ == "__main__":
    common.run(main)

"""An engine from its arguments, stage by stage, and warm before the first request.

Owns the order of a start; called in an engine's process. It never takes a request from a client. vLLM:
`vllm/v1/engine/core.py`, `EngineCore.__init__` and `_initialize_kv_caches`.
"""

from __future__ import annotations

import common

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence

from engine.engine_args import AUTO, EngineArgs
from engine.kv_cache_interface import KVCacheGroup, groups_of, max_blocks
from engine.llm_engine import LLMEngine
from engine.model import llama
from engine.model.config import LlamaConfig
from engine.model.loader import find_dtype
from engine.model.tokenizer import read_tokenizer
from engine.parallel.memory import kv_cache_memory, total_memory
from engine.parallel.remote_runner import RemoteSleeper
from engine.parallel.workers import start_workers
from engine.quantization.kv_codes import block_bytes
from engine.quantization.loader import load_model
from engine.request import SamplingParams
from engine.worker.sleep import Sleeper


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

    dtype = find_dtype(args.dtype)
    m = common.machine()
    stage("device", f"{m['name']}, {m['threads']} threads, {str(dtype).removeprefix('torch.')}")

    workers = start_workers(args, dtype) if args.has_workers else None
    if workers:
        model, tokenizer = workers.model, read_tokenizer(args.tokenizer, args.model)
    else:
        model, tokenizer = load_model(args.model, dtype, args.quantization, args.generation_config, args.load_format)
        if args.tokenizer is not None:
            tokenizer = read_tokenizer(args.tokenizer, args.model)
            tokenizer.vocab_size = model.config.vocab_size
    parameters = workers.parameters if workers else sum(map(math.prod, llama.tensor_shapes(model.config).values()))
    stage(
        "load",
        f"{args.names[0]}, {parameters / 1e6:.{0 if parameters > 1e7 else 2}f} M parameters"
        + (f", {args.quantization}" if args.quantization else "")
        + (f" on {workers}" if workers else ""),
    )

    auto, args = args.max_model_len == AUTO, args.filled_in("serve", model.config)
    budget = args.scheduler_config().max_num_batched_tokens
    memory = workers.available_memory(args, budget) if workers else kv_cache_memory(args, model, budget)
    stage("profile", f"{memory / 2**30:.2f} GiB for the KV cache" + ("" if common.HAS_GPU else " (--kv-cache-gib)"))

    groups = groups_of(getattr(model, "whole_config", model.config), args.vllm_config(), args.block_size)
    one = block_bytes(model, args.block_size, args.kv_cache_dtype, groups)
    if auto:
        args.shorten(args.num_gpu_blocks_override - 1 if args.num_gpu_blocks_override else memory // one, groups)
    max_model_len = args.context
    asked = args.num_gpu_blocks_override * one if args.num_gpu_blocks_override else max(memory, 2 * one)
    if asked > (there := total_memory() * args.world_size):
        raise common.InputError(
            f"KV cache: {asked / 2**30:,.1f} GiB in blocks of {args.block_size} tokens, here are "
            f"{there / 2**30:,.1f}; lower "
            + (
                "num_gpu_blocks_override"
                if args.num_gpu_blocks_override
                else "kv_cache_gib"
                if memory > there
                else "block_size"
            )
        )

    args.kv_cache_memory_bytes = memory
    engine = LLMEngine(model, tokenizer, args, config=args.vllm_config(workers))
    blocks = engine.core.scheduler.kv_cache_manager.block_pool.num_blocks - 1
    tokens, sequences = capacity(blocks, args, groups)
    stage(
        "kv cache",
        f"{blocks:,} blocks of {args.block_size} = {tokens:,} tokens ({sequences:.1f} sequences of {max_model_len:,})"
        + copies(model.config, args.tensor_parallel_size),
    )

    for name, path in args.adapters.items():
        assert engine.lora  # --lora-modules needs --enable-lora
        engine.lora.add_adapter(name, path)
    warm_up(engine)
    graphs = len({size for size, _ in engine.core.runner.graphs.captured}) if engine.core.runner.graphs else 0
    stage("warm-up", f"{graphs} batch sizes as CUDA graphs" if graphs else "compiled, packed, paged in")
    if args.enable_sleep_mode and not workers:
        again = functools.partial(load_model, args.model, dtype, args.quantization, args.generation_config)
        engine.sleeper = Sleeper(engine.core.runner, model, lambda: again()[0])
    elif workers and args.enable_sleep_mode:
        engine.sleeper = RemoteSleeper(workers.executor)
    engine.about = {"seconds": seconds, "kv_cache_tokens": tokens, "device": m["device"]}
    return engine


def copies(config: LlamaConfig, ranks: int) -> str:
    """How many ranks keep the same bytes: heads are divided, and of fewer heads than ranks, as of latents, each is
    copied."""
    kept = max(1, ranks // config.num_key_value_heads)
    what = "latents have no heads" if config.mla else f"of {config.num_key_value_heads} KV heads"
    return f", {kept} copies of each on {ranks} ranks ({what})" if kept > 1 else ""


def capacity(blocks: int, args: EngineArgs, groups: Sequence[KVCacheGroup]) -> tuple[int, float]:
    """What so many blocks hold: (tokens, sequences of `max_model_len`)."""
    tokens = blocks * args.block_size
    if not groups:
        return tokens, tokens / args.context
    # A token has a place in a block of each, and a window does not keep all of a sequence.
    per_sequence = max_blocks(groups, args.block_size, args.context, args.max_in_flight_tokens)
    return tokens // len(groups), blocks / per_sequence


def warm_up(engine: LLMEngine) -> None:
    """What the first request would otherwise pay: CUDA graphs, compiled kernels, packed weights, pages of memory."""
    if graphs := engine.core.runner.graphs:  # a worker does it itself
        graphs.capture_all()
    # On a GPU lesson 10's kernel has a variant for each height of its tiles, and a prompt's length decides which it is.
    lengths = [2**i for i in range(1, 10)] if common.HAS_GPU else [8]
    for i, (length, temperature) in enumerate(itertools.product(lengths, (0.0, 1.0))):
        params = SamplingParams(temperature=temperature, top_p=0.9, max_tokens=3, ignore_eos=True)
        length = min(length, engine.core.scheduler.config.max_model_len - 1)
        engine.add_request(f"warm-up-{i}", {"prompt_token_ids": [1 + i] * length}, params)
        while engine.has_unfinished_requests():
            engine.step()

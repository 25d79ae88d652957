"""Engines as `serve` makes them, on the workers of an executor."""

from __future__ import annotations

import torch

from engine.llm_engine import LLMEngine
from engine.model import llama
from engine.parallel.stages import skeleton
from engine.parallel.worker import WorkerSpec
from engine.parallel.workers import Workers
from support.small_cores import SIZES
from support.tokenizing import Words

LIMITS = dict(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16, num_gpu_blocks_override=60, block_size=4)


def engine_on(executor, parallel, args, sizes=SIZES, tokenizer=None, quantization=None, embeds_last=False, **limits):
    """`sizes`: of a random model, or the config of the real one. `limits`: where they are not `LIMITS`."""
    config, source = (llama.random_model(**sizes).config, sizes) if isinstance(sizes, dict) else (sizes, None)
    spec = WorkerSpec(source, parallel, torch.float32, args.vllm_config(), True, quantization, embeds_last)
    executor.collective_rpc("load_model", spec)
    workers = Workers(executor, parallel, skeleton(config, parallel, torch.float32))
    return LLMEngine(workers.model, tokenizer or Words(), config=args.vllm_config(workers), **{**LIMITS, **limits})

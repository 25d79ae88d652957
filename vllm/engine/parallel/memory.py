"""How much memory the KV cache may have.

Owns the profile run; called when an engine starts, on every rank. It never allocates the cache. vLLM:
`determine_available_memory` in `vllm/v1/worker/gpu_worker.py`.
"""

from __future__ import annotations

import common

import os
import sys
from typing import Any

import torch

from engine.model import llama
from engine.parallel.adapters import WorkerAdapters


def kv_cache_memory(args: Any, model: llama.Llama, budget: int) -> int:
    """Bytes that the KV cache may have.

    On a GPU: gpu_memory_utilization · total − the peak of a profile run, the largest step there can be, with room for
    adapters. As in vLLM, the run skips attention, whose own memory is small. On a CPU memory is shared with everybody,
    so what was asked for decides.
    """
    if args.kv_cache_memory_bytes or not common.HAS_GPU:
        return args.kv_cache_bytes
    slots = WorkerAdapters(args.lora_config) if args.lora_config else None
    if slots:  # the engine makes its own later, as large as these: a slot has room for the largest rank allowed
        slots.attach(model, None)
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
        raise common.InputError(
            f"gpu_memory_utilization {args.gpu_memory_utilization}: weights and activations need "
            f"{(peak + others) / 2**30:.1f} GiB of {total / 2**30:.1f}; raise it"
        )
    return memory


def total_memory() -> int:
    """Bytes of the GPU, or of the host; where the host does not say (Windows), as many as can be addressed."""
    if common.HAS_GPU:
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize

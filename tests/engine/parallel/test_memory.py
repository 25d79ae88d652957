"""How much memory is left for keys and values, with a GPU that is not here."""

from __future__ import annotations

import common

import dataclasses
import weakref

import pytest
import torch

from engine.engine_args import EngineArgs
from engine.lora.memory import SlotMemory
from engine.parallel import adapters
from engine.parallel.memory import kv_cache_memory


def test_profile_run_on_a_gpu(monkeypatch, tiny_model):
    """The arithmetic, with a GPU that is not here: utilisation · total − peak − what others hold."""
    monkeypatch.setattr(common, "HAS_GPU", True)
    for name, value in (("reset_peak_memory_stats", None), ("synchronize", None), ("empty_cache", None),
                        ("mem_get_info", (60, 100)), ("memory_reserved", 30),
                        ("max_memory_allocated", 25)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    args = EngineArgs(gpu_memory_utilization=0.9)
    assert kv_cache_memory(args, tiny_model, 16) == 90 - 25 - 10
    with pytest.raises(common.InputError, match="gpu_memory_utilization"):
        kv_cache_memory(dataclasses.replace(args, gpu_memory_utilization=0.3), tiny_model, 16)


def test_slots_for_adapters_are_there_while_the_peak_is_taken(monkeypatch, tiny_model):
    """On a GPU, memory that the KV cache was given cannot hold them as well; afterwards they are gone."""
    made = []

    class Watched(SlotMemory):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(adapters, "SlotMemory", Watched)
    monkeypatch.setattr(common, "HAS_GPU", True)

    def sizes():
        return sum(pages.nbytes for memory in made if memory() for pages in memory().pages)

    for name, value in (("reset_peak_memory_stats", lambda: None), ("synchronize", lambda: None),
                        ("empty_cache", lambda: None), ("mem_get_info", lambda: (10**9, 10**9)),
                        ("memory_reserved", lambda: 0), ("max_memory_allocated", sizes)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    args = EngineArgs(gpu_memory_utilization=1, enable_lora=True, max_loras=3, max_lora_rank=8)
    left = kv_cache_memory(args, tiny_model, 16)
    c, (memory,) = tiny_model.config, made
    Hq, Hkv, D, H, I = (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size, c.intermediate_size)
    per_rank = 3 * H + (Hq + 2 * Hkv) * D + Hq * D + H + 2 * H + 2 * I + I + H  # qkv, o, gate and up, down
    assert 10**9 - left == 3 * 8 * per_rank * c.num_hidden_layers * 4 and memory() is None
    assert kv_cache_memory(EngineArgs(gpu_memory_utilization=1), tiny_model, 16) == 10**9

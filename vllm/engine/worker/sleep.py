"""Weights and KV cache away and back: who has nothing to do gives its memory to others.

Owns what lies elsewhere meanwhile; called between two steps, by an engine here or by a worker. It never decides when,
and never looks at a request. vLLM: `vllm/device_allocator/cumem.py`, `sleep` in `vllm/v1/worker/gpu_worker.py`.
"""

from __future__ import annotations

import common

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from engine.model import llama
from engine.model.packed_linear import PackedLinear
from engine.worker.model_runner import ModelRunner

TAGS = ("weights", "kv_cache")


class Sleeper:
    """One runner's memory. Its tensors stay the objects that they are, so whoever shares one (a drafter, a packed
    layer) finds it again; only what they hold goes.

    Level 1 keeps the weights where there is room: a GPU's in CPU memory. Those of a CPU are in the model's own files
    already, so they are read again, as for level 2. The KV cache goes at either level, and comes back empty.
    """

    def __init__(self, runner: ModelRunner, model: llama.Llama, reload: Callable[[], llama.Llama]) -> None:
        """`model` is what was loaded, before it was packed; `reload` loads it once more."""
        self.runner, self.model, self.reload = runner, model, reload
        self.asleep: set[str] = set()
        self.kept: list[torch.Tensor] | None = None  # the weights, if they are kept
        self.shapes = [layer.shape for layer in runner.cache.layers]

    @torch.inference_mode()
    def sleep(self, level: int) -> None:
        """Give the memory back; 1 or 2. Asleep already, nothing happens."""
        if self.asleep:
            return
        weights, packed = parts_of(self.model)
        on_gpu = weights[0].is_cuda
        self.kept = [weight.cpu() for weight in weights] if level == 1 and on_gpu else None
        for layer in packed:
            layer.packed = None
        bases = [weight._base for weight in weights if weight._base is not None]  # that hold a file's pages
        for tensor in (*weights, *bases, *self.runner.cache.layers):
            tensor.data = tensor.new_empty(0)
        if self.runner.graphs:
            self.runner.graphs.forget()
        self.asleep = set(TAGS)
        release_memory()

    @torch.inference_mode()
    def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Bring back what is still away of these."""
        for tag in self.asleep & set(tags):
            if tag == "weights":
                self._wake_weights()
            else:
                for layer, shape in zip(self.runner.cache.layers, self.shapes):
                    layer.data = layer.new_zeros(shape)
            self.asleep.remove(tag)
        if not self.asleep and self.runner.graphs:
            self.runner.graphs.capture_all()

    def _wake_weights(self) -> None:
        weights, packed = parts_of(self.model)
        fresh = self.kept if self.kept is not None else parts_of(self.reload())[0]
        self.kept = None
        for weight, new in zip(weights, fresh, strict=True):
            weight.data = new.to(weight.device).data
        for layer in packed:
            layer.pack()


def parts_of(model: llama.Llama) -> tuple[list[torch.Tensor], list[PackedLinear]]:
    """A model's tensors, each once and in the order in which they are found, and the layers that hold packed ones."""
    found = list(objects_in(model))
    packed = [part for part in found if isinstance(part, PackedLinear)]
    return [part for part in found if isinstance(part, torch.Tensor) and part.layout == torch.strided], packed


NOTHING_IN = (str, bytes, int, float, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def objects_in(root: Any) -> Iterator[Any]:
    """All that hangs on an object, each once: a model's layers, and what theirs are made of."""
    left, seen = [root], set()
    while left:
        value = left.pop()
        if isinstance(value, NOTHING_IN) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif not isinstance(value, torch.Tensor):
            left += getattr(value, "__dict__", {}).values()


def release_memory() -> None:
    """To the system, and not to our own allocators' lists."""
    gc.collect()
    if common.HAS_GPU:
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library than Linux's has none
        ctypes.CDLL("libc.so.6").malloc_trim(0)

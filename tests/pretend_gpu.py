"""A GPU that is not there. What lies on it is in host memory, calls itself cuda:0, and refuses what a GPU would refuse.

    PYTHONPATH=tests python -m pytest -p pretend_gpu tests/test_02_paged_attention.py
    python tests/pretend_gpu.py vllm/02_paged_attention.py

Code that asks "is there a GPU?" then takes the way of a GPU, as far as Python goes; kernels run in Triton's
interpreter. That finds a tensor of the host beside one of the GPU in an operation, an index or a launch, `.numpy()` of
what is not in host memory, a wrong random generator; and in a CUDA graph, which records here as there and computes
nothing until it is replayed, a copy to the host or a length that was read. It says nothing of kernels as a GPU runs
them (`compile_kernels.py` compiles them), of streams or of time. Tests that ask for more are skipped by name.
`as_if_on_gpu.py` knows which tests are enough.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

VLLM = str(Path(__file__).resolve().parent.parent / "vllm") + "/"
aten, GPU, CPU = torch.ops.aten, torch.device("cuda", 0), torch.device("cpu")

BEYOND = {  # tests that need more of a GPU than this, and what
    "test_layer_by_layer_through_the_opaque_operator": "an operator of our own",
    "test_cuda_graphs_on_the_real_model": "the profiler",
    "test_greedy_tokens_equal_transformers": "Transformers looks for the GPU itself",
    "test_logits_equal_transformers": "Transformers looks for the GPU itself",
    "test_low_precision_weights": "Transformers looks for the GPU itself",
    "test_the_engines_samples_have_the_targets_distribution": "torch.corrcoef makes tensors in C++",
    "test_launches_are_counted_from_the_models_own_forward": "counts operations of inference mode",
    "test_the_count_follows_the_model": "counts operations of inference mode",
    "test_a_loop_pays_per_sequence_and_a_batch_does_not": "counts operations of inference mode",
    "test_a_step_by_arithmetic": "counts operations of inference mode",
    "test_more_is_never_slower_by_arithmetic": "counts operations of inference mode",
}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    import pytest

    for item in items:
        if why := BEYOND.get(item.name) or BEYOND.get(item.name.split("[")[0]):
            item.add_marker(pytest.mark.skip(reason=f"beyond a GPU that is not there: {why}"))


# --- Tensors --------------------------------------------------------------------------------------------------------


def two_devices(what: Any) -> RuntimeError:
    return RuntimeError(f"Expected all tensors to be on the same device, found cuda:0 and cpu ({what})")


def on_gpu(inner: torch.Tensor, requires_grad: bool = False) -> OnGPU:
    return OnGPU(inner, requires_grad)


torch.serialization.add_safe_globals([on_gpu])


class OnGPU(torch.Tensor):
    """A tensor "on the GPU": `inner` has the numbers. C++ takes it for one on the meta device, Python for cuda:0."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> OnGPU:
        self = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=torch.device("meta"), requires_grad=requires_grad,
        )  # fmt: skip
        self.inner = inner
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def type_as(self, other: torch.Tensor) -> torch.Tensor:
        return self.to(other)

    def numpy(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy: copy it to host memory first")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        note("tolist")
        not_while_capturing("tolist")
        return self.inner.tolist()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, device: Any = GPU) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(moved(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value, dtype=self.dtype, device=GPU)
        super().__setitem__(moved(index), value)

    def __deepcopy__(self, memo: dict) -> OnGPU:
        return memo.setdefault(id(self), OnGPU(self.inner.clone(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return on_gpu, (self.inner, self.requires_grad)

    def __format__(self, spec: str) -> str:
        return format(self.inner, spec)

    def __repr__(self) -> str:
        return f"OnGPU({tuple(self.shape)}, {self.dtype})"


def moved(index: Any) -> Any:
    """Lists and arrays in an index become tensors on the GPU: a copy, so not in a graph."""

    def one(x: Any) -> Any:
        if isinstance(x, (list, range)) or (type(x).__module__ == "numpy" and x.ndim):
            not_while_capturing("an index from the host")
            return torch.tensor(list(x), device=GPU, **({} if len(x) else {"dtype": torch.int64}))
        return x

    return tuple(map(one, index)) if isinstance(index, tuple) else one(index)


def unwrap(x: Any) -> Any:
    return x.inner if isinstance(x, OnGPU) else x


# --- Operations -----------------------------------------------------------------------------------------------------

COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
STRICT = {"aten::mm", "aten::addmm", "aten::bmm", "aten::cat", "aten::stack", "aten::embedding", "aten::gather",
          "aten::index_select", "aten::scatter_"}  # where a scalar of the host is not welcome either  # fmt: skip
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
         aten._unique2.default, aten.repeat_interleave.Tensor}  # the host waits for a number of the GPU  # fmt: skip
NO_KERNEL = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::detach"}
capture: Graph | None = None  # the graph that records now
pinned: list[torch.Tensor] = []  # kept for ever: an address must not come back as somebody else's


places: set[str] | None = None  # where our code asks something of the GPU, if somebody collects that
launched: set[str] = set()  # which file has launched which kernel


def callers() -> Iterator[types.FrameType]:
    """Our own functions that run now, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(VLLM):
            yield frame
        frame = frame.f_back


def note(what: str) -> None:
    """Whose line asks for it, and which function of ours has called that one."""
    if places is None:
        return
    found = [f"{x.f_code.co_filename.removeprefix(VLLM)}:{x.f_lineno} {x.f_code.co_name}" for x in islice(callers(), 2)]
    recorded = "recorded" if capture is not None else ""
    if found:
        places.add(f"{found[0]} {what} {recorded}")
        places.add(" < ".join(re.sub(r":\d+", "", each) for each in found) + recorded)


def not_while_capturing(what: Any) -> None:
    if capture is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def check_devices(func: Any, name: str, args: tuple, tensors: list[torch.Tensor]) -> None:
    if func in INDEXING:
        if not isinstance(args[0], OnGPU):
            raise RuntimeError(f"indices should be on cpu, as the indexed tensor is ({func})")
        if len(args) > 2 and not isinstance(args[2], OnGPU) and args[2].dim():
            raise two_devices(func)
    elif func not in COPIES and any(not isinstance(x, OnGPU) and (x.dim() or name in STRICT) for x in tensors):
        raise two_devices(func)


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """One operation: on what is inside if it is the GPU's business, after a look at who is on which device."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, OnGPU)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if kwargs.get("pin_memory"):
        pinned.append(func(*args, **{**kwargs, "pin_memory": False}))
        return pinned[-1]
    if not ours and asked != "cuda":
        return func(*args, **kwargs)
    name, to_gpu = func.name().split(".")[0], asked in (None, "cuda")
    note(name)
    if func in INDEXING and args[0].device.type == "meta":  # zeros that the gradient of an index starts from
        args = (OnGPU(torch.zeros(args[0].shape, dtype=args[0].dtype)), *args[1:])
        return run(func, args, kwargs)
    if ours and any(not isinstance(x, OnGPU) and x.device.type == "meta" for x in tensors):
        # C++ made one for "the same device". It has no numbers: better no answer than a wrong one.
        raise NotImplementedError(f"{func}: a tensor on the meta device beside ours")
    if ours:
        check_devices(func, name, args, tensors)
    if kwargs.get("generator") is not None and to_gpu:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    crosses = asked is not None and (asked == "cuda") != bool(ours)
    crosses |= func is aten.copy_.default and isinstance(args[0], OnGPU) != isinstance(args[1], OnGPU)
    if (crosses and func in COPIES) or func in WAITS:
        not_while_capturing(func)

    real_args, real_kwargs = tree_unflatten([unwrap(x) for x in leaves], spec)
    if asked is not None:
        real_kwargs["device"] = CPU if asked == "cuda" else torch.device(asked)
    if capture is not None and func._schema.is_mutable and torch.Tag.inplace_view not in func.tags:
        capture.tape.append((functools.partial(func, *real_args, **real_kwargs), None))
        return written(func, args, kwargs)
    out = func(*real_args, **real_kwargs)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # the shape that others see
    if func is aten._to_copy.default and crosses and out.data_ptr() == real_args[0].data_ptr():
        out = out.clone()
    if capture is not None and not func.is_view and name not in NO_KERNEL:
        capture.tape.append((functools.partial(func, *real_args, **real_kwargs), out))
    if not to_gpu:
        return out
    if func is aten.copy_.default:
        return args[0]
    known = {id(x.inner): x for x in ours}  # in place: the result is an argument
    return tree_map(lambda x: known.get(id(x), OnGPU(x)) if type(x) is torch.Tensor else x, out)


def written(func: Any, args: tuple, kwargs: dict) -> Any:
    """The arguments that an operation in place returns."""
    given = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(func._schema.arguments)}
    alias = {min(a.alias_info.before_set): a.name for a in func._schema.arguments if a.alias_info is not None}
    found = [given[alias[min(r.alias_info.before_set)]] for r in func._schema.returns if r.alias_info is not None]
    return found[0] if len(found) == 1 else tuple(found)


class Mode(TorchDispatchMode):
    """Sees operations that have no tensor yet: `torch.zeros(…, device="cuda")`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run(func, args, kwargs or {})


# --- CUDA graphs ----------------------------------------------------------------------------------------------------


class Graph:
    """`torch.cuda.CUDAGraph`: between `capture_begin` and `capture_end` nothing is computed, and results are NaN."""

    def __init__(self) -> None:
        self.tape: list[tuple[Callable, Any]] = []

    def capture_begin(self, pool: Any = None) -> None:
        global capture
        note("capture")
        if not streams:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        not_while_capturing("another capture")
        capture = self

    def capture_end(self) -> None:
        global capture
        capture = None
        for _, out in self.tape:
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    x.fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        note("replay")
        with _disable_current_modes():
            for launch, recorded in self.tape:
                for old, new in zip(tree_leaves(recorded), tree_leaves(launch())):
                    if isinstance(old, torch.Tensor) and old is not new:
                        old.copy_(new)


streams: list[Any] = []


class Stream:
    def __enter__(self) -> None:
        streams.append(self)

    def __exit__(self, *error: Any) -> None:
        streams.pop()


# --- torch, as if there were one ------------------------------------------------------------------------------------


def pretend_cuda() -> None:
    properties = types.SimpleNamespace(multi_processor_count=132, total_memory=3 << 29, uuid="GPU-0")
    for name, value in {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_name": "a GPU that is not there", "get_device_capability": (9, 0), "is_bf16_supported": True,
        "get_device_properties": properties, "mem_get_info": (1 << 30, 3 << 29), "memory_reserved": 1 << 28,
        "max_memory_allocated": 1 << 28, "graph_pool_handle": (0, 1), "_lazy_init": None, "set_device": None,
        "empty_cache": None, "reset_peak_memory_stats": None, "manual_seed": None, "manual_seed_all": None,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *args, value=value: value)

    def synchronize(*args: Any) -> None:
        note("synchronize")
        not_while_capturing("synchronize")

    torch.cuda.synchronize = synchronize
    torch.cuda.CUDAGraph, torch.cuda.Stream, torch.cuda.stream = Graph, Stream, lambda stream: stream
    stream = types.SimpleNamespace(is_capturing=lambda: capture is not None)
    torch.accelerator.current_stream = lambda *args: stream  # AdamW asks, in older versions in this way:
    torch.cuda.is_current_stream_capturing = stream.is_capturing


def numbered(device: Any) -> Any:
    return GPU if isinstance(device, (str, torch.device)) and str(device) == "cuda" else device


def pretend_torch() -> None:
    """What C++ decides by a device that it takes for another, decided here."""
    plain = types.SimpleNamespace(to=torch.Tensor.to, load=torch.load, where=torch.where, rms_norm=F.rms_norm,
                                  attention=F.scaled_dot_product_attention, run=threading.Thread.run)  # fmt: skip

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        return plain.to(self, *map(numbered, args), **{k: numbered(v) for k, v in kwargs.items()})

    def made_here(make: Callable) -> Callable:
        @functools.wraps(make)
        def from_data(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            if isinstance(data, (list, tuple)):
                data = [x.item() if isinstance(x, OnGPU) else x for x in data]
            if isinstance(data, torch.Tensor) and device is None:
                return make(data, *args, **kwargs)
            out = make(data, *args, device=CPU, **kwargs)
            return out.to(device or torch.empty(0).device)

        return from_data

    def load(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
        out = plain.load(file, map_location=CPU, **kwargs)
        to_gpu = map_location is not None and torch.device(map_location).type == "cuda"
        return tree_map(lambda x: OnGPU(unwrap(x)) if to_gpu and isinstance(x, torch.Tensor) else unwrap(x), out)

    def where(condition: Any, *sides: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, OnGPU) for x in (condition, *sides)):
            dtype = next((x.dtype for x in sides if isinstance(x, torch.Tensor)), None)
            sides = [x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=dtype, device=GPU) for x in sides]
        return plain.where(condition, *sides, **kwargs)

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if not isinstance(x, OnGPU):
            return plain.rms_norm(x, shape, weight, eps)
        note("rms_norm")
        if weight is not None and not isinstance(weight, OnGPU):
            raise two_devices("rms_norm")
        if torch.is_grad_enabled():
            y = x.float() * (x.float().square().mean(-1, keepdim=True) + (eps or torch.finfo(x.dtype).eps)).rsqrt()
            return (y if weight is None else y * weight.float()).to(x.dtype)
        launch = functools.partial(plain.rms_norm, x.inner, shape, unwrap(weight), eps)
        with _disable_current_modes():
            out = launch()
        if capture is not None:
            capture.tape.append((launch, out))
        return OnGPU(out)

    def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
                  scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
        given = [x for x in (q, k, v, attn_mask) if x is not None]
        if not any(isinstance(x, OnGPU) for x in given):
            options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return plain.attention(q, k, v, **options)
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = q.float() @ k.float().transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=GPU).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype is torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    def run_thread(self: threading.Thread) -> None:
        with Mode():
            plain.run(self)

    torch.Tensor.to, torch.Tensor.cuda = to, lambda self, *args: self.to(GPU)
    torch.tensor, torch.as_tensor, torch.asarray = map(made_here, (torch.tensor, torch.as_tensor, torch.asarray))
    torch.load, torch.where, torch.Tensor.where = (
        load,
        where,
        lambda self, condition, other: where(condition, self, other),
    )
    F.rms_norm, F.scaled_dot_product_attention, threading.Thread.run = rms_norm, attention, run_thread
    torch.Tensor.is_pinned = lambda self, *args: any(self.data_ptr() == x.data_ptr() for x in pinned)
    torch.compile = lambda fn=None, **options: fn or (lambda fn: fn)
    torch.inference_mode = lambda mode=True: torch.no_grad()(mode) if callable(mode) else torch.no_grad()


def pretend_kernels() -> None:
    """Launches take pointers to the GPU (or to pinned memory) alone. The interpreter has room for one at a time."""
    import common

    import triton

    from lab import timing

    turn = threading.Lock()

    def launch(self: common.Kernel, grid: Any, *args: Any, **kwargs: Any) -> None:
        if common._captures is not None:
            common._captures.append(common.Launch(self, grid, args, kwargs))
            return
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor) and not isinstance(x, OnGPU) and not x.is_pinned():
                raise ValueError(
                    f"{self.name}: a pointer to {tuple(x.shape)} cannot be accessed from Triton (cpu tensor?)"
                )
        self.launches += 1
        note(self.name)
        file = next((x.f_code.co_filename.removeprefix(VLLM) for x in callers()), "")
        launched.add(f"{file} {self.name}")

        def run_kernel() -> None:
            with turn, _disable_current_modes():
                self.fn[grid](*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()})

        if capture is None:
            run_kernel()
        else:
            capture.tape.append((run_kernel, None))

    def do_bench(fn: Callable, rep: int = 100, quantiles: list[float] | None = None) -> Any:
        start = time.perf_counter()
        fn()
        return [1e3 * (time.perf_counter() - start)] * len(quantiles or [0])

    common.Kernel._launch, triton.testing.do_bench = launch, do_bench
    timing.copy_bandwidth, timing.matmul_rate = lambda: 4e12, lambda dtype: 7e14  # no time to measure what is not there


pretend_cuda()
pretend_torch()
Mode().__enter__()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "vllm"))
pretend_kernels()

if __name__ == "__main__":
    import runpy

    sys.modules["pretend_gpu"] = sys.modules["__main__"]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Gluon on a CPU, as far as `hopper.py` speaks it: warp groups are threads, shared memory is poisoned, waits are real.

Triton's interpreter knows no Gluon. Here a kernel's own source runs against stand-ins for Gluon's modules:
  * each partition of `warp_specialize` is a thread;
  * an mbarrier counts arrivals and bytes, and has phases; a wait that never ends is an error after a while;
  * shared memory is NaN until the TMA unit has written it;
  * an asynchronous product reads its operands when it is waited for, as late as hardware might;
  * who is slow can be chosen: every second load, or the groups that compute.
So a wait that is missing, a place that is freed too early or a phase that is wrong gives a wrong result, NaN, or an
end that never comes.
Layouts say nothing here: what lies in which register only a GPU can show.
"""

from __future__ import annotations

import operator
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PATIENCE = 20  # seconds that a wait may take


def raw(x: Any) -> Any:
    return x.value if isinstance(x, Register) else x


class Register:
    """A tensor in registers, or a number."""

    type = SimpleNamespace(layout=SimpleNamespace(parent=None))

    def __init__(self, value: Any) -> None:
        self.value = torch.as_tensor(value)

    dtype = property(lambda self: self.value.dtype)

    def to(self, dtype: torch.dtype) -> Register:
        return Register(self.value.to(dtype))

    def __getitem__(self, index: Any) -> Register:
        return Register(self.value[index])

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    __hash__ = None


def _operator(name: str) -> None:
    fn = getattr(operator, f"__{name.strip('_')}__")
    setattr(Register, f"__{name}__", lambda self, other: Register(fn(self.value, raw(other))))
    setattr(Register, f"__r{name}__", lambda self, other: Register(fn(torch.as_tensor(raw(other)), self.value)))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and"):
    _operator(_name)
for _name in ("lt", "le", "gt", "ge", "eq"):
    _fn = getattr(operator, _name)
    setattr(Register, f"__{_name}__", lambda self, other, fn=_fn: Register(fn(self.value, raw(other))))


def of_one(fn: Any) -> Any:
    return lambda a: Register(fn(raw(a)))


def of_two(fn: Any) -> Any:
    return lambda a, b: Register(fn(torch.as_tensor(raw(a)), torch.as_tensor(raw(b))))


def layout(*args: Any) -> None:
    """Where a tensor's elements lie: nowhere in particular."""


class Pointer:
    """Into a flat tensor, with an offset."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    dtype = property(lambda self: SimpleNamespace(element_ty=self.memory.dtype))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + raw(more))


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def move(self, arrivals: int, some_bytes: int) -> None:
        with self.changed:
            assert self.pending >= arrivals, "more arrivals than the barrier counts"
            self.pending -= arrivals
            self.bytes += some_bytes
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            passed = self.changed.wait_for(lambda: self.phase % 2 != int(raw(parity)), PATIENCE)
        if not passed:
            raise TimeoutError("a barrier whose phase never comes")


class Shared:
    """Shared memory: a view of a torch tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    dtype = property(lambda self: self.value.dtype)

    def index(self, i: Any) -> Shared:
        return Shared(self.value[int(raw(i))])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.value.permute(order))

    def load(self, layout: Any) -> Register:
        return Register(self.value.clone())

    def store(self, register: Register) -> None:
        self.value.copy_(register.value)


class Rows:
    """A descriptor: rows and columns outside of the matrix read as zero."""

    layout = None

    def __init__(self, base: torch.Tensor, shape: list, strides: list, block_shape: list, layout: Any) -> None:
        assert base.data_ptr() % 16 == 0 and strides[0] * base.element_size() % 16 == 0 and strides[1] == 1
        self.matrix, self.block = base.as_strided(shape, strides), block_shape

    dtype = property(lambda self: self.matrix.dtype)

    def read(self, row: int, column: int) -> torch.Tensor:
        (T, width), (rows, columns) = self.matrix.shape, self.block
        out = self.matrix.new_zeros(rows, columns)
        inside = self.matrix[max(row, 0) : min(row + rows, T), max(column, 0) : min(column + columns, width)]
        out[max(0, -row) : max(0, -row) + len(inside), : inside.shape[1]] = inside
        return out


class Function:
    """What Gluon compiles. Called by another one, or launched as `fn[grid](...)`: then program after program runs."""

    def __init__(self, emulator: Emulator, fn: Any) -> None:
        self.emulator, self.fn = emulator, fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, num_warps: int, **kwargs: Any) -> None:
            given = [Pointer(x.view(-1)) if isinstance(x, torch.Tensor) else x for x in args]
            for program in range(grid[0]):
                self.emulator.program, self.emulator.errors = Register(program), []
                self.fn(*given, **kwargs)
                if self.emulator.errors:
                    raise self.emulator.errors[0]

        return launch


class Emulator:
    """The stand-ins, and the threads that run a kernel."""

    def __init__(self, slow: str) -> None:
        self.slow, self.loads = slow, 0  # "odd" or "even" loads, or "groups"
        self.errors: list[BaseException] = []
        self.local = threading.local()
        self.program = 0

    # Gluon's language
    def allocate(self, dtype: Any, shape: list, layout: Any) -> Any:
        if layout == "barrier":
            made = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=lambda i: made[int(raw(i))]) if len(shape) == 2 else made[0]
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def load(self, pointer: Pointer) -> Register:
        return Register(pointer.memory[int(pointer.offset)].long())

    def store(self, pointer: Pointer, value: Register, mask: Register) -> None:
        shape = value.value.shape
        chosen = mask.value.broadcast_to(shape)
        pointer.memory[torch.as_tensor(pointer.offset).broadcast_to(shape)[chosen]] = value.value[chosen]

    def mma(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        def product() -> Register:
            return Register(a.value.float() @ b.value.float() + (raw(acc) if use_acc else 0.0))

        if not is_async:
            self.dawdle()
            return product()
        token = SimpleNamespace(product=product, done=None)
        self.local.queue = [*getattr(self.local, "queue", []), token]
        return token

    def mma_wait(self, left: int, deps: list) -> Any:
        queue = self.local.queue
        self.dawdle()
        while len(queue) > left:
            token = queue.pop(0)
            token.done = token.product()
        out = tuple(d if isinstance(d, Register) else d.done for d in deps)
        assert None not in out, "a product is used that is not waited for"
        return out[0] if len(out) == 1 else out

    def tma_load(self, rows: Rows, at: list, barrier: Barrier, place: Shared) -> None:
        def arrive() -> None:
            place.value.copy_(rows.read(*(int(raw(x)) for x in at)))
            barrier.move(0, -place.value.numel() * place.value.element_size())

        self.loads += 1
        if self.slow == ("even", "odd")[self.loads % 2]:  # what was asked for first need not come first
            threading.Timer(0.008, arrive).start()
        else:
            arrive()

    def warp_specialize(self, partitions: list, warps: list, registers: list) -> None:
        def run(fn: Any, args: tuple) -> None:
            try:
                fn(*args)
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=run, args=p, daemon=True) for p in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)

    def modules(self) -> dict[str, Any]:
        """What the kernel's module is given instead of Gluon's names."""
        gl = SimpleNamespace(
            constexpr=lambda x: x, program_id=lambda axis: self.program, load=self.load, store=self.store,
            arange=lambda start, stop, layout: Register(torch.arange(start, stop)),
            full=lambda shape, x, dtype, layout: Register(torch.full(shape, x, dtype=dtype)),
            zeros=lambda shape, dtype, layout: Register(torch.zeros(shape, dtype=dtype)),
            zeros_like=of_one(torch.zeros_like), exp2=of_one(torch.exp2), log2=of_one(torch.log2),
            where=lambda c, a, b: Register(torch.where(raw(c), raw(a), raw(b))),
            maximum=of_two(torch.maximum), minimum=of_two(torch.minimum), cdiv=lambda a, b: (a + b - 1) // b,
            max=lambda x, axis: Register(x.value.amax(axis)), sum=lambda x, axis: Register(x.value.sum(axis)),
            convert_layout=lambda x, layout: x, static_range=range, allocate_shared_memory=self.allocate,
            warp_specialize=self.warp_specialize, float32=torch.float32, int64=torch.int64, bfloat16=torch.bfloat16,
            float16=torch.float16, SliceLayout=layout, NVMMADistributedLayout=layout, DotOperandLayout=layout,
            BlockedLayout=layout, SwizzledSharedLayout=layout,
            NVMMASharedLayout=SimpleNamespace(get_default_for=layout),
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: "barrier", init=self.init, wait=lambda b, parity: b.wait(parity),
            expect=lambda b, n: b.move(1, n), arrive=lambda b: b.move(1, 0))  # fmt: skip
        hopper = SimpleNamespace(
            warpgroup_mma=self.mma, warpgroup_mma_wait=self.mma_wait, fence_async_shared=lambda: None)  # fmt: skip
        return {"gl": gl, "mbarrier": mbarrier, "hopper": hopper, "tma_load": self.tma_load, "TensorDescriptor": Rows,
                "gluon": SimpleNamespace(jit=self.jit), "tma": SimpleNamespace(async_load=self.tma_load)}  # fmt: skip

    def jit(self, fn: Any = None, **options: Any) -> Any:
        return Function(self, fn) if fn else self.jit

    def dawdle(self) -> None:
        if self.slow == "groups":
            time.sleep(0.004)

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count


def load(path: Path, slow: str = "even", change: tuple[str, str] | None = None) -> SimpleNamespace:
    """A part's module with the stand-ins in Gluon's place; `change`: one text of its source, and what replaces it."""
    source = path.read_text()
    if change:
        assert source.count(change[0]) == 1, change
        source = source.replace(*change)
    source = re.sub(r"^from triton\.experimental.*\n", "", source, flags=re.M)
    names = Emulator(slow).modules() | {"__name__": path.stem}
    exec(compile(source, str(path), "exec"), names)
    return SimpleNamespace(**names)

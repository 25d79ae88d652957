"""What all lessons need of the machine: device, Triton, tolerances, console.

Import this before `torch` and `triton`: it decides, once, whether kernels run natively on a GPU or in Triton's
interpreter, and that has to be settled before the first kernel is defined. No lesson's mechanism lives here.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = 110  # columns


class _Nothing(ModuleType):
    """Stands where torch would, while `--help` is printed: lets a script define its functions, computes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, cast(Any, cls)) if name.split(".")[0] == "torch" else None

    @classmethod
    def create_module(cls, spec: Any) -> ModuleType:
        return cls(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None: ...


# Importing torch takes 2 s, and `--help` has no use for it.
_HELP = not {"-h", "--help"}.isdisjoint(sys.argv[1:]) and "torch" not in sys.modules
if _HELP:
    sys.meta_path.insert(0, _Nothing)

import torch

# glibc gives large buffers back to the system as soon as they are free, and the next layer pays for every page again:
# 2 million page faults, a quarter of the time, in a prefill of 4,096 tokens. So it keeps them.
if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
    ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD

# --- Device and Triton ----------------------------------------------------------------------------------------------


def _asked_for_cpu(argv: Sequence[str]) -> bool:
    return "--device=cpu" in argv or any(a == "--device" and b == "cpu" for a, b in itertools.pairwise(argv))


HAS_GPU: bool = not _HELP and not _asked_for_cpu(sys.argv) and torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by @triton.jit at definition time
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # today's default, set here because 3.10 changes it
INTERPRET: bool = os.environ.get("TRITON_INTERPRET") == "1"


class _StandIn:
    """Takes Triton's place where it has no wheel (macOS, Windows): kernels can be defined there, not launched."""

    constexpr = staticmethod(lambda value: value)
    jit = staticmethod(lambda fn, **options: fn)

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    triton = tl = cast(Any, _StandIn())
    HAS_TRITON = False

if INTERPRET and HAS_TRITON:
    from triton.runtime import interpreter

    @functools.cache
    def _languages(fn: Callable) -> list[Any]:
        return [module for module in fn.__globals__.values() if module is tl or module is tl.core]

    def _patch_lang(fn: Callable, patch: Callable = interpreter._patch_lang) -> Any:
        """A launch makes Triton's language interpreted, and would do so again whenever its kernel calls a function
        (`tl.sum` is one): a fifth of all the time."""
        is_native = any(tl.core.is_builtin(module.load) for module in _languages(fn))
        return patch(fn) if is_native else interpreter._LangPatchScope()

    interpreter._patch_lang = _patch_lang
    # It would add, subtract and multiply integers once more in 64 bits, for an assertion that is off: a third.
    _builder = interpreter.interpreter_builder
    _builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)

    if triton.__version__.startswith("3.6."):
        # It takes int() of an array when a loop's bound is a tensor, and numpy 2.4 refuses that.
        def _patch_lang_tensor(tensor: type, scope: Any, patch: Callable = interpreter._patch_lang_tensor) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = _patch_lang_tensor


@dataclasses.dataclass
class Launch:
    """One recorded kernel launch: what `Kernel` was given, not run."""

    kernel: Kernel
    grid: Any
    args: tuple
    kwargs: dict


class Kernel:
    """A Triton kernel, launched as `kernel[grid](...)`, that counts its launches.

    The count is how a test proves that an engine runs the kernel; `captured()` is how the compile check sees
    exactly what a wrapper would launch on a GPU that is not here. Integers of a step, like its number of sequences, are
    annotated `tl.int32`: for one that is 1, or a multiple of 16, Triton would else compile anew while requests wait.
    """

    def __init__(self, fn: Callable) -> None:
        functools.update_wrapper(cast(Any, self), fn)
        self.name = fn.__name__
        of_a_step = [name for name, kind in fn.__annotations__.items() if kind == "tl.int32"]
        self.fn = triton.jit(fn, do_not_specialize=of_a_step)
        self.launches = 0

    def __getitem__(self, grid: Any) -> Callable:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        if _captures is not None:
            _captures.append(Launch(self, grid, args, kwargs))
            return
        if not HAS_TRITON:
            raise RuntimeError(f"kernel {self.name} needs Triton, which has no wheel for {platform.system()}")
        self.launches += 1
        self.fn[grid](*args, **kwargs)


kernel = Kernel  # the decorator: @common.kernel

_captures: list[Launch] | None = None
_kernels_forced = False


@contextlib.contextmanager
def captured() -> Iterator[list[Launch]]:
    """Record kernel launches instead of running them; tensors may live on the `meta` device."""
    global _captures
    before, _captures = _captures, []
    try:
        yield _captures
    finally:
        _captures = before


@contextlib.contextmanager
def use_kernels() -> Iterator[None]:
    """Inside this block, wrappers launch their Triton kernel on CPU tensors too (in the interpreter: slow, exact)."""
    global _kernels_forced
    before, _kernels_forced = _kernels_forced, True
    try:
        yield
    finally:
        _kernels_forced = before


def runs_kernel(x: torch.Tensor) -> bool:
    """What every kernel wrapper asks: launch the Triton kernel for `x`, or take the vectorised torch path?

    True on a GPU (or when a launch is being captured); on a CPU only inside `use_kernels()`, because the
    interpreter needs milliseconds per tile.
    """
    if x.device.type == "meta":
        return True
    return HAS_TRITON and (x.is_cuda or _kernels_forced)


def kernel_mode() -> str:
    """How kernels run on this machine, in words."""
    if not HAS_TRITON:
        return f"skipped: no Triton wheel for {platform.system()}"
    return "Triton's interpreter" if INTERPRET else "native"


def device() -> torch.device:
    """Where tensors live unless a caller says otherwise."""
    return torch.device("cuda" if HAS_GPU else "cpu")


# --- Precision ------------------------------------------------------------------------------------------------------

# One table for every comparison in scripts and tests: relative error in the 2-norm.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2e-2}


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """‖out − ref‖ / ‖ref‖ in fp64. Equal infinities count as equal; NaN anywhere gives NaN, which passes no check."""
    if out.shape != ref.shape:
        raise AssertionError(f"shapes differ: {tuple(out.shape)} and {tuple(ref.shape)}")
    out, ref = out.double(), ref.double().to(out.device)
    difference = torch.where(out == ref, 0.0, out - ref).norm().item()
    size = torch.where(ref.isinf(), 0.0, ref).norm().item()
    return difference / size if size else (math.inf if difference else 0.0) if difference == difference else math.nan


@functools.cache
def cpu_name() -> str:
    """The processor, as the system calls it."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), name)
    return name


def machine() -> dict[str, Any]:
    """What this is, for the first printed line and for `results/*.json`."""
    return {
        "device": device().type,
        "name": torch.cuda.get_device_name() if HAS_GPU else cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__ if HAS_TRITON else None,
        "kernels": kernel_mode(),
    }


# --- Console --------------------------------------------------------------------------------------------------------


class CheckFailed(Exception):
    """A script's own check found a wrong result: exit code 1."""


class InputError(ValueError):
    """The user's input is wrong; the message names the field and the allowed values: exit code 2."""


@functools.cache
def console() -> Any:
    """The one console; a page wide where the output is not a terminal, so that tables fit a page."""
    from rich.console import Console

    class OurConsole(Console):
        def on_broken_pipe(self) -> None:  # rich would leave with code 1; `run` says what it is
            raise

    return OurConsole(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else PAGE)


def heading(text: str) -> None:
    """A blank line and a bold heading: each step of a script's story starts with one."""
    console().print()
    console().print(text, style="bold")


# What a model wrote never moves a terminal's cursor: ESC is shown as ␛; only newlines stay.
VISIBLE = {c: 0x2400 + c for c in range(32) if c != ord("\n")} | {0x7F: "␡"} | dict.fromkeys(range(0x80, 0xA0), "�")


def say(text: str) -> None:
    """One line (or paragraph) of the story, indented under its heading. What a page cannot hold goes on below."""
    lines = ["  " + line for line in text.translate(VISIBLE).splitlines()]
    console().print("\n".join(part for line in lines for part in _on_a_page(line)))


def _on_a_page(line: str) -> list[str]:
    """A stranger's model may answer with anything, at any length."""
    return (
        [line]
        if len(line) <= PAGE
        else textwrap.wrap(
            line, PAGE, subsequent_indent="    ", replace_whitespace=False, expand_tabs=False, break_on_hyphens=False
        )
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
    """A small table; the first column is left-aligned, the others right-aligned."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=True, show_edge=False)
    for i, column in enumerate(columns):
        grid.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        grid.add_row(*(str(cell).translate(VISIBLE) for cell in row))
    console().print(grid)


def check(what: str, out: torch.Tensor, ref: torch.Tensor) -> float:
    """Compare with the reference and print the error; a script that computes wrong results stops here."""
    tolerance, error = TOLERANCE[out.dtype], relative_error(out, ref)
    if not error <= tolerance:
        raise CheckFailed(f"{what}: relative error {error:.3g} exceeds {tolerance:g}")
    say(f"✓ {what}: relative error {error:.1e} (allowed {tolerance:g})")
    return error


def check_equal(what: str, out: Any, ref: Any) -> None:
    """Compare exactly (tokens, ids, counts) and print one line; a difference stops the script."""
    if out != ref:
        raise CheckFailed(f"{what}: got {out!r:.120}, expected {ref!r:.120}")
    say(f"✓ {what}")


def skipped(what: str, why: str) -> None:
    """Say that a step did not run, and why. Nothing that was skipped is ever called passed."""
    say(f"SKIPPED {what}: {why}")

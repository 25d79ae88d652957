"""What all lessons need of the machine: device, Triton, timing, console, figures, command line.

Import this before `torch` and `triton`: it decides, once, whether kernels run natively on a GPU or in Triton's
interpreter, and that has to be settled before the first kernel is defined. No lesson's mechanism lives here.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import dataclasses
import functools
import importlib.util
import itertools
import io
import json
import logging
import math
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import textwrap
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FIGURES = ROOT / "lessons" / "figures"
RESULTS = ROOT / "lessons" / "results"
NUMBERS = ROOT / "lessons" / "numbers"
PAGE = 110  # columns


class _Nothing(ModuleType):
    """Stands where torch would, while `--help` is printed: lets a script define its functions, computes nothing."""

    __path__: ClassVar[list[str]] = []

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
        return importlib.util.spec_from_loader(name, cls) if name.split(".")[0] == "torch" else None

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
    triton = tl = _StandIn()
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
        functools.update_wrapper(self, fn)
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


def lesson(name: str) -> ModuleType:
    """Load a lesson by file name without suffix, e.g. `lesson("02_paged_attention")`.

    By path, because its name starts with a digit and because the folder `vllm/` must not be imported as a package.
    The script that is being run is returned as it is, never loaded a second time.
    """
    path = HERE / f"{name}.py"
    if not path.is_file() and (HERE / "tours" / path.name).is_file():
        path = HERE / "tours" / path.name
    main = sys.modules["__main__"]
    if (file := getattr(main, "__file__", None)) and Path(file).resolve() == path:
        return main
    return _load(name, path)


def numbers(name: str) -> ModuleType:
    """`lessons/numbers/NAME.py`: what the page of lesson `name` simulates, quotes, draws and measures."""
    return _load(f"numbers.{name}", NUMBERS / f"{name}.py")


def _load(name: str, path: Path) -> ModuleType:
    with _loading:  # a server has threads: none of them may get a lesson that is half loaded
        if name not in sys.modules:
            if not path.is_file():
                raise ImportError(f"there is no {path.stem!r} in {path.parent.name}/")
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]


_loading = threading.RLock()


def hand_over(name: str, args: argparse.Namespace) -> None:
    """What `--bench`, `--figure` and `--json` ask for is the page's business: its numbers do it."""
    if not (args.bench or args.figure or args.json):
        return
    page = numbers(name)
    bench = {"bench": page.measure(args)} if args.bench else {}
    if args.figure:
        page.draw(args.figure)
    if args.json:
        merge_json(args.json, name, {"machine": machine(), "facts": page.facts()} | bench)


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


def assert_close(out: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype | None = None) -> float:
    """Relative error of `out` against `ref`, which must be within `TOLERANCE` of `dtype` (default: that of `out`)."""
    tolerance = TOLERANCE[dtype or out.dtype]
    error = relative_error(out, ref)
    if not error <= tolerance:
        raise AssertionError(f"relative error {error:.3g} exceeds {tolerance:g}")
    return error


# --- Hardware: what the arithmetic is done with ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GPU:
    """Vendor figures: memory in bytes, HBM bandwidth in bytes/s, dense bf16 tensor-core rate in FLOP/s.

    A data sheet's GB of memory are taken as 10^9 bytes. Most cards have some 6 % more (an "80 GB" H100 79.6 GiB), about
    what a server keeps for activations and graphs.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """FLOP per byte above which compute, not memory, is the limit."""
        return self.flops / self.bandwidth

    def seconds(self, flops: float, bytes_moved: float) -> float:
        """The roofline: the slower of the two ceilings, perfectly overlapped."""
        return max(flops / self.flops, bytes_moved / self.bandwidth)


# Data sheets: NVIDIA A10, A100 (SXM), H100 (SXM), H200, RTX 4090; AMD MI300X.
HARDWARE = {
    gpu.name: gpu
    for gpu in (
        GPU("A10 24GB", 24e9, 600e9, 125e12),
        GPU("RTX 4090 24GB", 24e9, 1008e9, 165e12),
        GPU("A100 40GB", 40e9, 1555e9, 312e12),
        GPU("A100 80GB", 80e9, 2039e9, 312e12),
        GPU("H100 80GB", 80e9, 3350e9, 989e12),
        GPU("H200 141GB", 141e9, 4800e9, 989e12),
        GPU("MI300X 192GB", 192e9, 5300e9, 1307e12),
    )
}


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


# --- Timing ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: median and the 20th and 80th percentile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median * 1e3:.3g} ms ({self.low * 1e3:.3g}–{self.high * 1e3:.3g})"


def measure(fn: Callable[[], Any], seconds: float = 0.5) -> Timing:
    """Time `fn` for about `seconds`: after a warm-up, synchronised, with a cold L2 cache on a GPU."""
    if HAS_GPU:
        median, low, high = triton.testing.do_bench(fn, rep=int(seconds * 1e3), quantiles=[0.5, 0.2, 0.8])
        return Timing(median / 1e3, low / 1e3, high / 1e3)
    fn()
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        fn()
        samples.append(time.perf_counter() - start)
    samples.sort()
    return Timing(statistics.median(samples), samples[len(samples) // 5], samples[len(samples) * 4 // 5])


def measure_graph(fn: Callable[[], Any], seconds: float = 0.5) -> Timing:
    """Time what `fn` asks of the GPU, replayed as a CUDA graph: small kernels end sooner than Python launches them.

    `fn` may not wait for the GPU. On a CPU as `measure`.
    """
    if not HAS_GPU:
        return measure(fn, seconds)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        fn()  # compiles
        graph.capture_begin()
        fn()
        graph.capture_end()
    torch.cuda.synchronize()
    return measure(graph.replay, seconds)


def measure_in_a_row(layer: Callable[[Any], Any], x: torch.Tensor, nbytes: float, seconds: float = 0.5) -> float:
    """Seconds that a layer of `nbytes` takes when another one went before and another one follows: as many copies as
    exceed four times 60 MB, more than an L2 cache holds, in one CUDA graph; their time divided by their number."""
    layers = [layer, *(copy.deepcopy(layer) for _ in range(math.ceil(4 * 60e6 / nbytes)))]

    def run() -> None:
        for one in layers:
            one(x)

    return measure_graph(run, seconds).median / len(layers)


def copy_bandwidth() -> float:
    """Ceiling one: bytes/s (read + written) of a large device copy, measured now."""
    n = (1 << 30) if HAS_GPU else (1 << 27)
    source = torch.ones(n // 4, device=device())
    target = torch.empty_like(source)
    return 2 * n / measure(lambda: target.copy_(source)).median


def matmul_rate(dtype: torch.dtype) -> float:
    """Ceiling two: FLOP/s of a large square matmul in `dtype`, measured now."""
    n = 8192 if HAS_GPU else 1024
    a = torch.randn(n, n, device=device()).to(dtype)
    return 2 * n**3 / measure(lambda: a @ a).median


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
    return [line] if len(line) <= PAGE else textwrap.wrap(
        line, PAGE, subsequent_indent="    ", replace_whitespace=False, expand_tabs=False, break_on_hyphens=False
    )  # fmt: skip


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
        raise CheckFailed(f"{what}: got {_brief(out)}, expected {_brief(ref)}")
    say(f"✓ {what}")


def skipped(what: str, why: str) -> None:
    """Say that a step did not run, and why. Nothing that was skipped is ever called passed."""
    say(f"SKIPPED {what}: {why}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


# --- Figures and results --------------------------------------------------------------------------------------------

COLORS = {"blue": "#2f6fb0", "orange": "#d9822b", "green": "#3a8f5c", "red": "#c0453f", "grey": "#7a8189",
          "purple": "#7b5ea7", "light": "#e4e8ec", "ink": "#22272e"}  # fmt: skip


def new_figure(width: float = 8.0, height: float = 3.6, **kwargs: Any) -> tuple[Any, Any]:
    """A matplotlib figure and its axes in the lessons' style; size in inches."""
    os.environ.setdefault("MPLBACKEND", "svg")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # else it reports a HOME that cannot be written
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "svg.hashsalt": "vllm-from-first-principles", "svg.fonttype": "path", "font.family": "DejaVu Sans",
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": COLORS["grey"],
        "axes.labelcolor": COLORS["ink"], "text.color": COLORS["ink"], "xtick.color": COLORS["ink"],
        "ytick.color": COLORS["ink"], "axes.titlesize": 11, "axes.titlelocation": "left", "legend.frameon": False,
        "axes.prop_cycle": plt.cycler(color=[COLORS[c] for c in ("blue", "orange", "green", "red", "purple")]),
        "figure.facecolor": "white", "axes.axisbelow": True,
    })  # fmt: skip
    return plt.subplots(figsize=(width, height), layout="constrained", **kwargs)


def save_figure(figure: Any, folder: str | Path, name: str) -> Path:
    """Write `folder/name.svg`, byte for byte the same for the same drawing. Raises InputError."""
    import matplotlib.pyplot as plt

    path, drawn = Path(folder) / f"{name}.svg", io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    # Names of clip paths and markers are hashes of coordinates, whose last bit differs from run to run: count instead.
    text = drawn.getvalue()
    for n, old in enumerate(re.findall(r'id="([a-z][0-9a-f]{10})"', text)):
        text = text.replace(old, f"id-{n}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InputError(f"--figure {folder}: {path.name} cannot be written there ({error.strerror})") from None
    return path


def results(name: str, machine_name: str = "cpu") -> dict[str, Any]:
    """The committed measurements of lesson `name` on one machine (`cpu` or `h200`); empty if there are none."""
    path = RESULTS / f"{machine_name}.json"
    return json.loads(path.read_text()).get(name, {}) if path.is_file() else {}


def stored_object(path: str | Path) -> dict[str, Any]:
    """The JSON object stored at `path`, an empty one if there is no file. Raises InputError."""
    path = Path(path)
    try:
        content = json.loads(path.read_text()) if path.exists() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"--json {path}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"--json {path}: holds a JSON {type(content).__name__}, expected an object")
    return content


def merge_json(path: str | Path, key: str, value: dict[str, Any]) -> None:
    """Set `key` in the JSON object stored at `path`, leaving other keys alone; the file is replaced atomically."""
    path, content = Path(path), stored_object(path)
    content[key] = value
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump(content, file, indent=1, sort_keys=True)
            file.write("\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise InputError(f"--json {path}: cannot be written ({error.strerror})") from None


# --- Command line ---------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the flags)\n")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """argparse reads a value before it looks at the choices: a text that is no number must hear of them, too."""
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError:
            if action.choices is None:
                raise
            allowed = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {text!r} (choose from {allowed})") from None


def number(kind: type = int, low: float | None = None, high: float | None = None) -> Callable[[str], Any]:
    """An argparse type: an int or float within [low, high]."""
    range_text = f"from {low} to {high}" if high is not None else f"of at least {low}" if low is not None else ""
    what = f"{'a whole number' if kind is int else 'a number'} {range_text}".strip()

    def parse(text: str) -> Any:
        try:
            value = kind(text)
            if math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high):
                return value
        except (ValueError, OverflowError):  # no number; a whole one that no float reaches
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


def folder(text: str) -> str:
    """An argparse type: a folder to write to, or what may become one."""
    path = Path(text).absolute()
    try:
        there = [path for path in (path, *path.parents) if path.exists()]
    except OSError as error:  # a name that is too long
        raise argparse.ArgumentTypeError(f"{text[:60]!r}: {error.strerror}") from None
    if wrong := [path for path in there if not path.is_dir()]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} is not a folder")
    if not os.access(there[0], os.W_OK):
        raise argparse.ArgumentTypeError(f"{there[0]} cannot be written to")
    return text


def file(text: str) -> str:
    """An argparse type: a file in a folder to write to, or what may become one."""
    folder(str(Path(text).absolute().parent))
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    return text


def url(text: str) -> str:
    """An argparse type: where an HTTP server is, without a slash at the end."""
    with contextlib.suppress(ValueError):  # a port that is none
        parts = urllib.parse.urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return text.rstrip("/")
    raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT (or https://), with a port from 1 to 65535")


def checked(params: dict[str, Any], allowed: dict[str, Sequence[Any]]) -> dict[str, Any]:
    """A copy of `params` if it has exactly the fields of `allowed`, each with one of its allowed values.

    `allowed[name]` is a range, or the choices in a sequence. Raises InputError naming the field and what is allowed.
    """
    if not isinstance(params, dict):
        raise InputError(f"parameters {params!r:.60}; allowed: an object with {', '.join(allowed)}")
    for name in [*params, *allowed]:
        if name not in allowed or name not in params:
            problem = "missing" if name in allowed else "no such parameter"
            raise InputError(f"{name}: {problem}; allowed: {', '.join(allowed)}")
        value, values = params[name], allowed[name]
        kinds = {int} if isinstance(values, range) else set(map(type, values))
        if type(value) not in (kinds | {int} if float in kinds else kinds) or value not in values:  # 1 is not true
            shown = [f"{values[0]} to {values[-1]}"] if isinstance(values, range) else values
            raise InputError(f"{name}: {value!r}; allowed: {', '.join(map(str, shown))}")
    return dict(params)


def listed(name: str, given: Any, kind: type, may_be_empty: bool = True) -> list[Any]:
    """A list of texts (kind str), none of them empty, or of token ids (kind int). Raises InputError."""
    fits = (lambda x: isinstance(x, str) and x) if kind is str else (lambda x: type(x) is int and x >= 0)
    if not (isinstance(given, list | tuple | set) and all(map(fits, given)) and (given or may_be_empty)):
        wanted = "texts, none of them empty" if kind is str else "token ids, 0 or above"
        raise InputError(f"{name} {given!r:.60}: must be a list of {wanted}{'' if may_be_empty else '; at least one'}")
    return list(given)


def parser(doc: str, **kwargs: Any) -> Parser:
    """A parser with the flags that every lesson has; the lesson adds the knobs that its text talks about."""
    p = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
    p.add_argument("--bench", action="store_true", help="measure, and print the full table")
    p.add_argument(
        "--json", type=file, metavar="FILE", help="merge facts and measurements into FILE under this lesson's key"
    )
    p.add_argument("--figure", type=folder, metavar="DIR", help="draw the page's figures there")
    p.add_argument("--model", metavar="PATH_OR_ID", help="a local Llama-architecture folder, or a hub id "
                   "(default: SmolLM2-135M-Instruct, prepared on first use)")  # fmt: skip
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run (default auto)")
    p.add_argument("--seed", type=number(int, 0, 2**31 - 1), default=0, help="seed of everything random (default 0)")
    return p


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Seed everything, print the machine line, return `machine()`. Raises InputError if the device is not here, or if
    nothing could be merged into `--json` in the end."""
    if args.device == "cuda" and not HAS_GPU:
        raise InputError("--device cuda: torch sees no GPU here; allowed on this machine: auto, cpu")
    if args.json:
        stored_object(args.json)
    torch.manual_seed(args.seed)
    m = machine()
    console().print(f"Machine: {m['name']}, {m['device']}, {m['threads']} threads, torch {m['torch']}; "
                    f"kernels: {m['kernels']}")  # fmt: skip
    return m


def run(main: Callable[[], Any]) -> None:
    """Call a script's `main` and turn expected failures into one line and an exit code: 2 bad input, 1 wrong result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: whatever was started on the way is ended, too
    try:
        main()
    except InputError as error:
        _exit(2, f"error: {error}")
    except CheckFailed as error:
        _exit(1, f"CHECK FAILED: {error}")
    except KeyboardInterrupt:
        _exit(130, "interrupted")
    except BrokenPipeError:  # the reader closed the pipe (`| head`): not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def set_ulimit(wanted: int = 65535) -> None:
    """Let this process have more files open, if it may: every connection is one, and shells allow 256 or 1,024. vLLM's
    servers do the same (`vllm/utils/system_utils.py`)."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limit on Windows, a second one on macOS
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < wanted:  # -1: there is none
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))


def _exit(code: int, message: str) -> None:
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(code)

"""Does a part of the reader's do what its step asks? Decided in a process of its own, which may hang or crash.

Owns the verdict, the comparison and what counts as cheating; called by the command line (`check`) and by the test that
proves every step. It never changes the reader's file. vLLM has nothing like it.

    python -m vllm.learn.grader STEP FILE SEED        prints one verdict as JSON
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import ast
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from engine import registry
from learn import starter
from learn.step import Context, Step
from learn.steps import find

LIMIT = 10  # seconds of a processor for all cases of a step
WAIT = 60  # seconds by the clock, where others need the processor as well, or nobody computes
TOO_LONG = [-getattr(signal, name) for name in ("SIGALRM", "SIGPROF") if hasattr(signal, name)]  # exit codes
LONG = 200  # characters of a value that nobody reads where there is a picture

# What no answer needs, and what would bring the given one back.
NEVER = ("importlib", "runpy", "pkgutil", "inspect", "gc", "ctypes", "vllm", "learn", "tests", "subprocess", "pickle")
CALLS = ("__import__", "exec", "eval", "compile", "open", "globals", "vars", "breakpoint")
DOORS = ("sys.modules", "registry.lesson", "registry.fill", "registry.load")
STANDARD = sys.stdlib_module_names | {"torch", "numpy", "triton"}


@dataclasses.dataclass
class Verdict:
    """`what` is passed, open, wrong, refused (a cheat), or broken (it raised, hung or crashed)."""

    what: str
    cases: int = 0  # that were right
    message: str = ""
    given: str = ""
    got: str = ""
    expected: str = ""
    picture: str = ""
    seed: int = 0


# --- What is not an answer --------------------------------------------------------------------------------------------


def cheats(text: str, given: str) -> str | None:
    """Why a file is no answer of one's own, or None: it imports what the script does not, or reads what is given."""
    known = imports(given)
    for node in ast.walk(starter.parsed(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node) not in known:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] not in STANDARD or name.split(".")[0] in NEVER:
                    return f"line {node.lineno}: `{ast.unparse(node)}` is not one of the script's own imports"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in CALLS and f"{node.func.id}(" not in given:
                return f"line {node.lineno}: {node.func.id}() is not needed here"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            door = f"{node.value.id}.{node.attr}"
            if door in DOORS and door not in given:
                return f"line {node.lineno}: {door} would bring the given part back"
    return None


@functools.cache
def imports(given: str) -> set[str]:
    """All imports of a script, wherever they stand."""
    return {ast.unparse(x) for x in ast.walk(starter.parsed(given)) if isinstance(x, ast.Import | ast.ImportFrom)}


# --- The script that is graded ----------------------------------------------------------------------------------------


def composed(step: Step, text: str, given: str, steps: Sequence[Step]) -> str:
    """The reader's text, with the given parts where other steps are open and with silent references.

    Raises Missing for a part that is not there any more.
    """
    others = [s for s in steps if s.id != step.id and s.cut != step.cut and starter.is_open(text, s)]
    text = starter.completed(text, given, [s.cut for s in others])
    return starter.silenced(text, step.forbidden, f"{step.id}: the reference answers nothing here")


@contextlib.contextmanager
def loaded(text: str, lesson: str) -> Iterator[ModuleType]:
    """The module of a text. From a real file: Triton reads a kernel's source there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{lesson}.py"
        path.write_text(text, encoding="utf-8")
        name = f"mine.{lesson}"
        sys.modules.pop(name, None)
        try:
            yield registry.load(name, path)
        finally:
            sys.modules.pop(name, None)


def grade(step: Step, text: str, seed: int, steps: Sequence[Step]) -> Verdict:
    """The verdict on the reader's text, reached in this process."""
    given_path = common.HERE / f"{step.lesson}.py"
    given = given_path.read_text(encoding="utf-8")
    try:
        if starter.is_open(text, step):
            return Verdict("open", message=step.task)
        if why := cheats(text, given):
            return Verdict("refused", message=why)
        whole = composed(step, text, given, steps)
    except SyntaxError as error:
        return Verdict("broken", message=f"line {error.lineno}: {error.msg}")
    except starter.Missing as error:
        return Verdict("broken", message=f"there is no {error.args[0]} in the file any more")
    context = Context(random.Random(seed), common.device())
    try:
        with loaded(whole, step.lesson) as mine, torch.inference_mode():
            return asked(step, mine, context, seed)
    except Exception as error:
        return Verdict("broken", message=where(error, step.lesson), seed=seed)


def asked(step: Step, mine: ModuleType, context: Context, seed: int) -> Verdict:
    """Every case in turn, up to the first that is wrong."""
    right = 0
    kernels = [getattr(mine, name) for name in step.launches]
    for case in step.cases(mine, registry.lesson(step.lesson), context):
        before = [kernel.launches for kernel in kernels]
        about = {"cases": right, "given": case.given, "seed": seed}
        try:
            with common.use_kernels() if kernels else contextlib.nullcontext(), no_luck(context):
                got = case.run()
        except Exception as error:
            return Verdict("broken", message=where(error, step.lesson), expected=shown(case.expected), **about)
        picture = case.picture(got, case.expected) if case.picture else ""
        about |= {"got": shown(got), "expected": shown(case.expected), "picture": picture}
        if isinstance(got, torch.Tensor) and isinstance(case.expected, torch.Tensor):
            about |= {"got": shown_beside(got, case.expected), "expected": shown_beside(case.expected, got)}
        elif picture and len(about["expected"]) > LONG:  # which shows where they differ
            about |= {"got": "", "expected": ""}
        if idle := [k.name for k, n in zip(kernels, before) if k.launches == n]:
            return Verdict("refused", message=f"{idle[0]} was not launched: the step is about that kernel", **about)
        if not context.intact():
            return Verdict("wrong", message="something outside a tensor was overwritten: a mask is missing", **about)
        if not same(got, case.expected):
            return Verdict("wrong", **about)
        right += 1
    return Verdict("passed", cases=right, seed=seed)


@contextlib.contextmanager
def no_luck(context: Context) -> Iterator[None]:
    """Memory that nobody has filled is full of NaN, where it might hold the right answer from before; floats stand
    between fences, so that a mask that is missing is found before it ends the process."""

    def filled(make: Any) -> Any:
        def empty(*shape: Any, **more: Any) -> torch.Tensor:
            x = make(*shape, **more)
            if x.device.type == "meta":
                return x
            if not x.dtype.is_floating_point:
                return x.fill_(torch.iinfo(x.dtype).max // 2)
            x.fill_(torch.nan)
            return context.fence(x) if make is empty_memory and x.device.type == context.device.type else x

        return empty

    empty_memory = torch.empty
    like = mock.patch.object(torch, "empty_like", filled(torch.empty_like))
    with mock.patch.object(torch, "empty", filled(empty_memory)), like:
        yield


def where(error: Exception, *lessons: str) -> str:
    """An exception, and the line of a script that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).stem in lessons]
    line = f" (in {frames[-1].name}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{line}"


def same(got: Any, expected: Any) -> bool:
    """Tensors within the project's tolerance, floats within 1e-6, all else exactly; kinds of sequences do not count."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
            return False
        if not expected.dtype.is_floating_point:
            return bool((got.cpu() == expected.cpu()).all())
        return common.relative_error(got, expected) <= common.TOLERANCE[expected.dtype]
    if isinstance(expected, list | tuple):
        is_sequence = isinstance(got, list | tuple) and len(got) == len(expected)
        return is_sequence and all(same(a, b) for a, b in zip(got, expected))
    if isinstance(expected, Mapping):
        return isinstance(got, Mapping) and list(got) == list(expected) and all(same(got[k], expected[k]) for k in got)
    if isinstance(expected, float):
        return isinstance(got, int | float) and math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9)
    return type(got) is type(expected) and got == expected


def shown_beside(x: torch.Tensor, other: torch.Tensor) -> str:
    """Of a large tensor, the first row in which it is not the other one."""
    if x.shape != other.shape or x.dim() < 2 or x.numel() <= 64:
        return shown(x)
    rows, others = x.reshape(-1, x.shape[-1]), other.reshape(-1, x.shape[-1])
    for i, (a, b) in enumerate(zip(rows, others)):
        if not same(a, b):
            place = ", ".join(str(int(n)) for n in np.unravel_index(i, x.shape[:-1]))
            return f"of {list(x.shape)} row [{place}]: {shown(a)}"
    return shown(x)


def shown(x: Any, most: int = 600) -> str:
    """A value as the reader sees it."""
    if isinstance(x, torch.Tensor):
        name = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        body = " ".join(str(x.detach().float().cpu() if x.dtype.is_floating_point else x.cpu()).split())
        return f"{name} {body.removeprefix('tensor(').removesuffix(')')}"[:most]
    return repr(x)[:most]


# --- The process ------------------------------------------------------------------------------------------------------


def check(step: Step, file: Path, seed: int) -> Verdict:
    """The verdict, reached in a process of its own."""
    command = [sys.executable, "-m", "vllm.learn.grader", step.id, str(file.absolute()), str(seed)]
    start = time.monotonic()
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # cases are small, and others may need the machine
    try:
        done = subprocess.run(
            command, cwd=common.ROOT, env=one_thread, capture_output=True, text=True, timeout=WAIT + 60
        )
    except subprocess.TimeoutExpired:
        return Verdict("broken", message=f"no answer after {time.monotonic() - start:.0f} s", seed=seed)
    if done.returncode in TOO_LONG:
        return Verdict("broken", message=f"it takes more than {LIMIT} s: a loop without an end?", seed=seed)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return Verdict("broken", message=f"it ended by {name}: memory was read or written that is not there", seed=seed)
    try:
        return Verdict(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        return Verdict("broken", message=(done.stderr or done.stdout)[-600:].strip(), seed=seed)


def begin() -> None:
    """From now on this process has its time, and then ends: what imports have taken does not count."""
    if hasattr(signal, "setitimer"):
        for alarm in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(alarm, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        signal.alarm(WAIT)


def main(argv: Sequence[str]) -> None:
    name, file, seed = argv
    step, steps = find(name)
    begin()
    verdict = grade(step, Path(file).read_text(encoding="utf-8"), int(seed), steps)
    print(json.dumps(dataclasses.asdict(verdict)))


if __name__ == "__main__":
    main(sys.argv[1:])

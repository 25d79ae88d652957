"""Break every kernel on purpose, one small change at a time, and see whether its lesson's own tests notice.

    python tests/kernel_mutants.py                       # of each file's kernels one change of each class of faults
    python tests/kernel_mutants.py --all                 # every change of every kernel: about an hour
    python tests/kernel_mutants.py --all 02 09_gqa:mla   # of some lessons, or of one kernel
    python tests/kernel_mutants.py --seed 1              # others of each class

A mutant is one change to the text of a `@common.kernel` or `@triton.jit` function: a mask or half of one dropped, a
comparison off by one, a rescale forgotten, an indirection skipped, a loop one tile short, a cast, an update or a store
deleted. It takes the kernel's place in a forked child, which runs the lesson's fast tests that launch the kernel,
quickest first, until one fails. A failure, a crash (the guard pages of `conftest.py`) and a hang all kill it; the
unchanged text, put in place in the same way, has to live. Where not all changes are made, three cases of each test run
first, and the others of those that launch the kernel only against what these let live.

What lives otherwise is a hole in the tests, unless no test can see it because it computes the same. Such mutants stand
in `equivalent_mutants.txt`, each with the reason; with `--all`, one of them that dies does not belong there. The exit
code is 1 if there is either. Only in Triton's interpreter: a GPU does not survive a fork.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import linecache
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "vllm"))

import common

import pytest
from _pytest.runner import runtestprotocol

from support import modules
from support.mutants import first_difference, listed, replaced

LIST = HERE / "equivalent_mutants.txt"

# --- What is changed ------------------------------------------------------------------------------------------------

FLIP = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
SWAP = {"tl.maximum": "tl.minimum", "tl.minimum": "tl.maximum", "tl.max": "tl.min", "tl.min": "tl.max"}
# Assembly of NVIDIA's, which the interpreter cannot run. `tests/on_gpu.py` does.
NATIVE = {("engine.quantization.decoding", "decode_four_bits")}
# Arguments that are shapes, axes or hints: to change them is a mistake of another kind.
SHAPES = {"tl.zeros", "tl.full", "tl.reshape", "tl.multiple_of", "tl.program_id", "tl.num_programs"}
AXES = {"tl.sum", "tl.max", "tl.min", "tl.cumsum"}
TABLE = re.compile(r"\w*(table|slot|pairs|loc|lens|order|rows|tiles|ranks|starts|blocks|indices|accepted|ids|tokens)")


class Mutant(NamedTuple):
    lesson: str
    kernel: str
    before: str  # the first line that differs, without indentation
    after: str
    source: str  # all of the function
    kind: str  # the class of the fault

    @property
    def key(self) -> tuple[str, str, str]:
        return f"{self.lesson}:{self.kernel}", self.before, self.after


@functools.cache
def kernels() -> dict[tuple[str, str], ast.FunctionDef]:
    """Every function that Triton compiles, by lesson and name."""
    found = {}
    for name, path in modules.paths().items():
        text = path.read_text()
        for node in ast.parse(text).body if "@triton.jit" in text or "@common.kernel" in text else []:
            decorators = {ast.unparse(d) for d in getattr(node, "decorator_list", [])}
            if decorators & {"common.kernel", "triton.jit"}:
                found[name, node.name] = node
    return found


@functools.cache
def names_in(lesson: str, kernel: str) -> set[str]:
    return {node.id for node in ast.walk(kernels()[lesson, kernel]) if isinstance(node, ast.Name)}


@functools.cache
def launched_for(lesson: str, kernel: str) -> set[tuple[str, str]]:
    """The kernels whose launches run a function: itself, or those that call it."""
    if ast.unparse(kernels()[lesson, kernel].decorator_list[0]) == "common.kernel":
        return {(lesson, kernel)}
    callers = [key for key in kernels() if kernel in names_in(*key) and key != (lesson, kernel)]
    near = [key for key in callers if key[0] == lesson] or callers  # two lessons may each have a helper of that name
    return {launched for key in near for launched in launched_for(*key)}


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """What may be changed below a node."""
    skip: set[ast.AST] = set()
    match node:
        case ast.FunctionDef(body=body):
            skip = {node.args, *(s for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))}
        case ast.AnnAssign():
            skip = {node.target, node.annotation}
        case ast.Subscript():
            skip = {node.slice}
        case ast.Call(func=func, args=args):
            name = ast.unparse(func)
            skip = {k for k in node.keywords if k.arg != "mask"}
            skip |= {*args} if name in SHAPES else {*args[1:]} if name in AXES else set()
            skip |= {args[0]} if name == "tl.arange" else set()
    for child in ast.iter_child_nodes(node):
        if child not in skip:
            yield child
            yield from parts(child)


def changes(node: ast.AST, strides: list[str], assigned: Counter) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in the place of a node, each with the class of the fault."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="to"), args=[kind, *_]) if "dtype" not in ast.unparse(kind):
            yield "cast", value
        case ast.Call(func=func, args=args):
            name, keywords = ast.unparse(func), {k.arg: k for k in node.keywords}
            if "mask" in keywords:
                unmasked = [k for k in node.keywords if k.arg not in ("mask", "other")]
                yield "mask", ast.Call(func, args, unmasked)
            if "other" in keywords:
                poison = {"0": "1", "-1": "0"}.get(ast.unparse(keywords["other"].value), 'float("inf")')
                other = ast.keyword("other", ast.parse(poison, mode="eval").body)
                yield "other", ast.Call(func, args, [k if k.arg != "other" else other for k in node.keywords])
            if name == "tl.load" and isinstance(args[0], ast.BinOp) and TABLE.match(ast.unparse(args[0])):
                yield "indirection", args[0].right  # the index in the place of what the table has there
            if name in SWAP:
                yield "extreme", ast.Call(ast.Name(SWAP[name]), args, node.keywords)
            if name in ("tl.maximum", "tl.minimum"):
                yield from (("extreme", arg) for arg in args)
            if name == "tl.where":
                yield from (("choice", arg) for arg in args[1:])
            if name in ("tl.abs", "tl.clamp"):
                yield "choice", args[0]
            if name == "tl.cdiv":
                yield "tail", ast.BinOp(args[0], ast.FloorDiv(), args[1])
            if name in ("range", "tl.static_range"):
                start = args[0] if len(args) > 1 else ast.Constant(0)
                stop, step = args[min(1, len(args) - 1)], args[2] if len(args) == 3 else ast.Constant(1)
                for first, end in (
                    (ast.BinOp(start, ast.Add(), step), stop),
                    (start, ast.BinOp(stop, ast.Sub(), step)),
                    (start, ast.BinOp(stop, ast.Add(), step)),
                ):
                    yield "tail", ast.Call(func, [first, end, *args[2:]], [])
            if name == "float":
                yield "constant", ast.Constant(0.0)
        case ast.BinOp(left, op, right):
            kind = {ast.BitAnd: "condition", ast.BitOr: "condition", ast.Mult: "rescale"}.get(type(op), "address")
            if isinstance(op, ast.Add | ast.Sub):
                yield "sign", ast.BinOp(left, ast.Sub() if isinstance(op, ast.Add) else ast.Add(), right)
            if isinstance(op, ast.BitAnd | ast.BitOr) or isinstance(left, ast.Constant):
                yield kind, right
            if not isinstance(left, ast.Constant):
                yield kind, left
        case ast.BoolOp(op, values):
            for dropped in values:
                yield "condition", ast.BoolOp(op, [v for v in values if v is not dropped])
        case ast.Compare(left, [op], right):
            yield "comparison", ast.Compare(left, [FLIP[type(op)]()], right)
        case ast.IfExp():
            yield "choice", node.body
            yield "choice", node.orelse
        case ast.If(test=test, body=body, orelse=orelse):
            if ast.unparse(test) != "UPCAST":  # which is true in the interpreter, always
                yield "branch", ast.If(ast.Constant(True), body, orelse)
            yield "branch", ast.If(ast.Constant(False), body, orelse)
        case ast.UnaryOp(operand=operand) if not isinstance(operand, ast.Constant):
            yield "sign", operand
        case ast.Constant(value) if type(value) in (int, float):
            yield "constant", ast.Constant(value - 1 if value else type(value)(1))
        case ast.AugAssign() | ast.Expr():
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Name(name)]) if assigned[name] > 1:
            yield "statement", ast.Pass()
        case ast.Name(name, ast.Load()) if name in strides and len(strides) > 1:
            yield "stride", ast.Name(strides[(strides.index(name) + 1) % len(strides)])


def text_of(lesson: str, kernel: str) -> str:
    """A kernel's own lines, without its decorator."""
    node = kernels()[lesson, kernel]
    lines = modules.paths()[lesson].read_text().splitlines(keepends=True)
    return "".join(lines[node.lineno - 1 : node.end_lineno])


def mutants(lesson: str, kernel: str) -> list[Mutant]:
    """Every change of one kernel, in the order of its lines."""
    source = text_of(lesson, kernel)
    (function,) = ast.parse(source).body
    names = [argument.arg for argument in function.args.args]
    strides = [name for name in names if "stride" in name or name in ("table_width", "WIDTH", "PAGE", "ROW")]
    stored = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    found: dict[str, tuple[int, Mutant]] = {}
    for node in parts(function):
        for kind, new in changes(node, strides, Counter(stored + names)):
            text = replaced(source, node, new)
            before, after = first_difference(source, text)
            found.setdefault(text, (node.lineno, Mutant(lesson, kernel, before, after, text, kind)))
    return [mutant for _, mutant in sorted(found.values(), key=lambda pair: pair[0])]


def equivalent() -> dict[tuple[str, str, str], str]:
    """The list, as {mutant's key: reason}."""
    return listed(LIST)


# --- Running the tests against a change -----------------------------------------------------------------------------


def install(mutant: Mutant) -> None:
    """Put a mutant in the place of its kernel, in every module that has it."""
    module, path = modules.load(mutant.lesson), f"<{mutant.kernel}, changed>"
    lines = ["from __future__ import annotations\n", *mutant.source.splitlines(keepends=True)]
    linecache.cache[path] = 0, None, lines, path  # where Triton reads a function's source
    made: dict[str, Any] = {}
    exec(compile("".join(lines), path, "exec"), vars(module), made)
    old, new = getattr(module, mutant.kernel), common.triton.jit(made[mutant.kernel])
    if isinstance(old, common.Kernel):
        old.fn = new
        return
    for other in map(vars, list(sys.modules.values())):
        for name in [name for name, value in list(other.items()) if value is old]:
            other[name] = new


def in_a_child(work: Callable[[Callable], Any]) -> tuple[int, list[Any]]:
    """Run `work(tell)` in a fork: its exit status (3 for an exception, -s for signal s), and what it told."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        status = 3
        try:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            status = work(lambda what: os.write(write, (json.dumps(what) + "\n").encode())) or 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as file:
        told = [json.loads(line) for line in file]
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


def passes(items: list[pytest.Item], i: int) -> bool:
    following = items[i + 1] if i + 1 < len(items) else None
    return not any(report.failed for report in runtestprotocol(items[i], log=False, nextitem=following))


@functools.cache
def launchers(module: ModuleType) -> list[str]:
    """Functions of a test module that launch kernels for its tests."""
    functions = inspect.getmembers(module, inspect.isfunction)
    return [
        "use_kernels",
        '"kernels"',
        *(name for name, function in functions if "use_kernels" in inspect.getsource(function)),
    ]


def may_launch(item: pytest.Item) -> bool:
    if "real_model" in item.fixturenames:
        return False
    source = inspect.getsource(getattr(item, "function", item.module))
    return "kernels" in item.fixturenames or any(name in source for name in launchers(item.module))


class Campaign:
    """A pytest plugin that runs the tests against mutants, not once as they are."""

    def __init__(self, chosen: list[tuple[str, str]], every: bool, seed: int) -> None:
        self.chosen, self.every, self.seed = chosen, every, seed
        self.wrong: list[str] = []

    def some_of(self, known: Container) -> dict[tuple[str, str], list[Mutant]]:
        """By kernel: all its changes; or of each file, of each class of faults, the change of one of its kernels."""
        if self.every:
            return {key: mutants(*key) for key in self.chosen}
        some: dict[tuple[str, str], list[Mutant]] = {key: [] for key in self.chosen}
        for file in {lesson for lesson, _ in self.chosen}:
            found = [m for key in self.chosen if key[0] == file for m in mutants(*key) if m.key not in known]
            drawn = random.Random(f"{self.seed}{file}").sample(found, len(found))
            for kind in sorted({mutant.kind for mutant in drawn}):  # of the kernel that has had the fewest so far
                mutant = min((m for m in drawn if m.kind == kind), key=lambda m: len(some[m.lesson, m.kernel]))
                some[mutant.lesson, mutant.kernel].append(mutant)
            for key in self.chosen:  # and each kernel has one
                if key[0] == file and not some[key]:
                    some[key] += [m for m in drawn if (m.lesson, m.kernel) == key][:1]
        return some

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """For each kernel: which tests launch it, do they pass without a change, and what do they let live?"""
        items = [item for item in session.items if may_launch(item)]
        first = items if self.every else [item for cases in by_test(items).values() for item in few_of(cases)]
        status, told = in_a_child(lambda tell: watch(first, tell))
        assert status == 0, f"{first[len(told)].nodeid} fails without a change"
        known = equivalent()
        for (lesson, kernel), found in self.some_of(known).items():
            wanted, kills = launched_for(lesson, kernel), Counter()
            costs = {i: seconds for i, (seconds, launched) in zip(first, told) if wanted & set(map(tuple, launched))}
            unchanged = Mutant(lesson, kernel, "", "", text_of(lesson, kernel), "")
            quick = {item: costs[item] for item in sorted(costs, key=costs.get)[:3]}
            assert (fate := run(unchanged, quick, kills)) == "lives", f"{kernel} {fate} without a change"
            others = [item for test in by_test(costs) for item in by_test(items)[test] if item not in costs]
            start = time.perf_counter()
            fates = {mutant: run(mutant, costs, kills, others) for mutant in found}
            listed = sum(mutant.key in known for mutant in found)
            for mutant, fate in fates.items():
                if (fate == "lives") != (mutant.key in known):
                    what = "lives" if fate == "lives" else f"{fate}, though {LIST.name} says that it cannot"
                    self.wrong.append(f"{lesson}:{kernel} {what}\n- {mutant.before}\n+ {mutant.after}")
            print(f"{lesson:26} {kernel:27} {len(costs):3} tests {len(found):4} mutants {listed:3} equivalent "
                  f"{sum(f == 'lives' for f in fates.values()):3} live {time.perf_counter() - start:5.0f} s",
                  flush=True)  # fmt: skip
        return True


def by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each test."""
    found = defaultdict(list)
    for item in items:
        found[item.nodeid.partition("[")[0]].append(item)
    return found


def few_of(cases: list[pytest.Item]) -> list[pytest.Item]:
    """The first, the last, and one between."""
    return [cases[i] for i in sorted({0, len(cases) // 2, len(cases) - 1})]


def watch(items: list[pytest.Item], tell: Callable) -> int:
    """Run tests as they are, and tell of each how long it takes and which kernels it launches."""
    launched: set[tuple[str, str]] = set()
    launch = common.Kernel._launch

    def watched(self: common.Kernel, *args: Any, **kwargs: Any) -> None:
        launched.add((self.__module__, self.name))
        launch(self, *args, **kwargs)

    common.Kernel._launch = watched
    for i in range(len(items)):
        launched.clear()
        start = time.perf_counter()
        if not passes(items, i):
            return 1
        tell((time.perf_counter() - start, sorted(launched)))
    return 0


def run(mutant: Mutant, costs: dict[pytest.Item, float], kills: Counter, others: Iterable[pytest.Item] = ()) -> str:
    """What becomes of a mutant: 'lives', or how it dies in which test. What kills often is tried first, and tests that
    nobody has timed last."""
    order = [*sorted(costs, key=lambda item: costs[item] / (1 + kills[item])), *others]

    def attempt(tell: Callable) -> int:
        install(mutant)
        for i, item in enumerate(order):
            tell(i)
            signal.alarm(int(5 + 10 * costs.get(item, 5)))  # whose default is to end the process
            if not passes(order, i):
                return 1
        return 0

    status, told = in_a_child(attempt)
    if status == 0:
        return "lives"
    assert told, f"{mutant} cannot be put in place"
    killer = order[told[-1]]
    kills[killer] += 1
    how = {1: "fails", -signal.SIGALRM: "hangs"}.get(status, "crashes")
    return f"{how} in {killer.name}"


def tests_of(lesson: str, kernel: str) -> set[str]:
    """The test files of the lessons, or of the engine's folders, whose kernels run a function."""
    found: set[Path] = set()
    for name, _ in launched_for(lesson, kernel):
        folder = HERE / ("lessons" if "." not in name else "/".join(name.split(".")[:-1]))
        exact = TESTED_IN.get(name, folder / f"test_{name.split('.')[-1]}.py")
        found |= {exact} if exact.is_file() else set(folder.glob("test_*.py"))
    return {str(path) for path in found}


TESTED_IN = {
    "engine.kv_transfer.kernels": HERE / "lessons" / "test_08_disagg.py",  # with a transfer on either side
    "lab.tree": HERE / "engine" / "spec_decode" / "test_trained.py",  # with the drafters whose trees they are
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="beginnings of LESSON:KERNEL (default: every kernel)")
    parser.add_argument("--all", action="store_true", help="every mutant, not some of each file")
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument("-k", default="", help="only these tests, as pytest's -k")
    args = parser.parse_args()
    if not common.INTERPRET:
        parser.exit(2, "kernels are broken in Triton's interpreter: set CUDA_VISIBLE_DEVICES to nothing\n")
    wanted = tuple(args.which or [""])
    chosen = [key for key in kernels() if ":".join(key).startswith(wanted) and key not in NATIVE]
    if not chosen:
        parser.error(f"no kernel begins with {args.which}; there are {', '.join(map(':'.join, kernels()))}")
    campaign = Campaign(chosen, args.all, args.seed)
    files = sorted(set().union(*(tests_of(*key) for key in chosen)))
    options = ["-q", "-s", "--no-header", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-k", args.k]
    code = pytest.main([*options, *files], plugins=[campaign])
    print("\n".join(campaign.wrong))
    return 1 if campaign.wrong else int(code)


if __name__ == "__main__":
    sys.exit(main())

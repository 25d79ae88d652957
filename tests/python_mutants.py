"""Break the engine's Python on purpose, one small change at a time, and see whether a test notices.

    python tests/python_mutants.py                          # 300 changes, drawn at random, as many of each folder
    python tests/python_mutants.py engine/core --sample 50  # of some folders or files
    python tests/python_mutants.py --seed 1 --jobs 2        # others, by two at a time

A mutant is one change to the text of a file: a comparison off by one, `and` for `or`, a number that is one more, a
`not` dropped, a condition that always holds, a statement deleted, an exception no longer caught. It stands in a copy of
the tree, so that the processes which a test starts see it, too. A fork, which has torch but nothing of ours in memory,
runs those tests of the fast tier that run its line (`line_coverage.py` knows them), quickest first, until one fails. A
failure, a crash and a hang all kill it. In the end the tests that killed have to pass on the tree as it is.

What lives is a hole in the tests, unless it computes the same or only costs time. Such mutants stand in
`surviving_mutants.txt`, each with the reason; one of them that dies does not belong there. The exit code is 1 if there
is either. Linux only; kernels have `kernel_mutants.py`.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:] = [str(HERE), *(path for path in sys.path if path != str(HERE))]

import pytest

import line_coverage
from support.mutants import first_difference, listed, replaced

LIST = HERE / "surviving_mutants.txt"
FOLDERS = ("core", "sampling", "spec_decode", "kv_transfer", "lora", "serving")

# --- What is changed ------------------------------------------------------------------------------------------------

FLIP = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
        ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
SWAP = {"min": "max", "max": "min", "any": "all", "all": "any"}
MESSAGES = ("print", "log", "warnings.warn", "console.", "say")  # what they say is for people
KERNELS = {"common.kernel", "triton.jit"}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Mutant(NamedTuple):
    path: str  # below `vllm/`
    scope: str  # the class and function, "" for what runs on import
    line: int
    looked_at: range | None  # lines whose tests may notice; None: all that run something of the file
    before: str  # the first line that differs, without indentation
    after: str
    text: str  # all of the file

    @property
    def key(self) -> tuple[str, str, str]:
        return f"{self.path}:{self.scope}", self.before, self.after

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.scope}\n- {self.before}\n+ {self.after}"


class Place(NamedTuple):
    """A node that may be changed, and what it stands in."""

    node: ast.AST
    statement: ast.AST
    scope: tuple[str, ...]
    function: FUNCTION | None


def is_message(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("self.").startswith(MESSAGES)


def not_asked(node: ast.AST) -> bool:
    """What has no meaning to a program, or another command's attention."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name == "__repr__" or bool(KERNELS & {ast.unparse(d) for d in node.decorator_list})
        case ast.If(test=test):
            return "TYPE_CHECKING" in ast.unparse(test) or "__name__" in ast.unparse(test)
        case ast.Expr(value=value):
            return isinstance(value, ast.Constant) or is_message(value)
        case ast.keyword(arg="help" | "description" | "epilog" | "metavar"):
            return True
    return isinstance(node, ast.Assert | ast.JoinedStr | ast.arg | ast.Import | ast.ImportFrom) or is_message(node)


def children(node: ast.AST) -> Iterator[ast.AST]:
    """What may be changed directly below a node: no types, no decorators, no messages of errors."""
    skip: list[ast.AST | None] = []
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            skip = [*node.decorator_list, node.returns]
        case ast.ClassDef():
            skip = [*node.decorator_list, *node.bases, *node.keywords]
        case ast.AnnAssign():
            skip = [node.annotation, node.target]
        case ast.Raise():
            skip = [node.exc, node.cause]
        case ast.ExceptHandler():
            skip = [node.type]
        case ast.Call(func=ast.Name("cast" | "isinstance" | "TypeVar" | "field"), args=args):
            skip = [*args]
    yield from (child for child in ast.iter_child_nodes(node) if child not in skip and not not_asked(child))


def places(node: ast.AST, statement: ast.AST, scope: tuple[str, ...], function: FUNCTION | None) -> Iterator[Place]:
    for child in children(node):
        inner, owner, within = scope, function, statement
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            within = child
        if isinstance(child, FUNCTION | ast.ClassDef):
            inner = (*scope, child.name)
            owner = child if isinstance(child, FUNCTION) else function
        yield Place(child, within, inner, owner)
        yield from places(child, within, inner, owner)


def changes(place: Place, assigned: Counter) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Pairs: a node, and what may stand in its place."""
    node = place.node
    match node:
        case ast.Compare(left, [op], right):
            yield node, ast.Compare(left, [FLIP[type(op)]()], right)
        case ast.BoolOp(op, values):
            yield node, ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for dropped in values:
                rest = [value for value in values if value is not dropped]
                yield node, ast.BoolOp(op, rest) if len(rest) > 1 else rest[0]
        case ast.BinOp(left, op, right) if type(op) in OTHER and not {type(left), type(right)} & TEXT:
            yield node, ast.BinOp(left, OTHER[type(op)](), right)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, operand
        case ast.Constant(value) if isinstance(value, bool):
            yield node, ast.Constant(not value)
        case ast.Constant(value) if isinstance(value, int | float):
            yield node, ast.Constant(value + 1)
            yield node, ast.Constant(value - 1)
        case ast.Subscript(value, ast.Slice(lower, upper, step), context):
            if lower:
                yield node, ast.Subscript(value, ast.Slice(None, upper, step), context)
            if upper:
                yield node, ast.Subscript(value, ast.Slice(lower, None, step), context)
                yield upper, ast.BinOp(upper, ast.Sub(), ast.Constant(1))
        case ast.Call(func=ast.Name(name), args=args) if name in SWAP:
            yield node, ast.Call(ast.Name(SWAP[name]), args, node.keywords)
        case ast.Call(func=func, args=[*args]) if ast.unparse(func).endswith("suppress"):
            yield node, ast.Call(func, [], [])
        case ast.ExceptHandler(type=ast.Tuple(elts=kinds) as caught):
            for kind in kinds:
                yield caught, ast.Tuple([other for other in kinds if other is not kind], ast.Load())
        case ast.ExceptHandler(type=ast.expr() as caught):
            yield caught, ast.Tuple([], ast.Load())
    yield from conditions(node)
    yield from deletions(place, assigned)


TEXT = {ast.JoinedStr, ast.List, ast.Tuple}  # what may be added, but is no number


def conditions(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Conditions that hold always, or never."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            yield test, ast.Constant(True)
            yield test, ast.Constant(False)
        case ast.While(test=test) if not isinstance(test, ast.Constant):
            yield test, ast.Constant(False)
        case ast.comprehension(ifs=ifs):
            for test in ifs:
                yield test, ast.Constant(True)
                yield test, ast.Constant(False)


def deletions(place: Place, assigned: Counter) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Statements that are not there. A name without its only assignment would be a mistake of another kind."""
    node = place.node
    match node:
        case ast.Assign(targets=targets) if place.function and place.function.name not in ("__init__", "__post_init__"):
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if not any(isinstance(target, ast.Tuple) for target in targets) and all(assigned[n] > 1 for n in names):
                yield node, ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield node, ast.Pass()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, ast.Constant(None)
        case ast.Continue():
            yield node, ast.Break()
        case ast.Break():
            yield node, ast.Continue()


def looked_at(place: Place) -> range | None:
    """The lines of what is changed: those of its statement, without its body; of a default, those of the function."""
    statement, function = place.statement, place.function
    if function is None:
        return None
    if statement is function:
        return range(function.body[0].lineno, function.end_lineno + 1)
    body = getattr(statement, "body", None)
    first = statement.pattern.lineno if isinstance(statement, ast.match_case) else statement.lineno
    return range(first, max(first, body[0].lineno - 1) + 1 if body else statement.end_lineno + 1)


def assignments(function: ast.AST) -> Counter[str]:
    """How often a function binds each name, as an argument or with a statement."""
    nodes = list(ast.walk(function))
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    return Counter(stored + [node.arg for node in nodes if isinstance(node, ast.arg)])


def mutants(root: Path, path: str) -> list[Mutant]:
    """Every change of one file, in the order of its lines."""
    source = (root / "vllm" / path).read_text()
    tree, found = ast.parse(source), {}
    names: dict[ast.AST, Counter] = {}
    for place in places(tree, tree, (), None):
        owner = place.function or tree
        if owner not in names:
            names[owner] = assignments(owner)
        for old, new in changes(place, names[owner]):
            text = replaced(source, old, new)
            if text != source:
                where = path, ".".join(place.scope), old.lineno, looked_at(place)
                found.setdefault(text, Mutant(*where, *first_difference(source, text), text))
    return sorted(found.values(), key=lambda mutant: mutant.line)


def draw(root: Path, which: tuple[str, ...], sample: int, seed: int) -> list[Mutant]:
    """As many mutants of each folder, at random; more of them are these and others."""
    groups: dict[str, list[Mutant]] = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((root / "vllm" / "engine" / folder).rglob("*.py")):
            if (name := str(path.relative_to(root / "vllm"))).startswith(which):
                groups[folder] += mutants(root, name)
    for folder, found in groups.items():
        random.Random(f"{seed} {folder}").shuffle(found)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    drawn = [mutant for mutant in in_turn if mutant][:sample]
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.line, mutant.after))


# --- Which tests look at it -------------------------------------------------------------------------------------------


class Tests:
    """The tests that run a line, and what they cost."""

    def __init__(self, notes: dict[str, line_coverage.Ran]) -> None:
        self.notes = notes
        self.kills: Counter[str] = Counter()  # who kills often is tried first
        self.users: dict[str, set[str]] = defaultdict(set)  # of a fixture
        self.running: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name, ran in notes.items():
            for fixture in ran.uses:
                self.users[fixture].add(name)
        for name, ran in notes.items():
            for path, lines in ran.lines.items():
                for line in lines if name else ():
                    self.running[path][line].add(name)

    def of(self, mutant: Mutant) -> list[str]:
        """In the order in which they are tried."""
        lines = self.running[mutant.path]
        names = set().union(*(lines.get(i, ()) for i in mutant.looked_at or ()))
        if not names:
            names = self.naming(Path(mutant.path).stem).union(*lines.values())
        tests = {name for name in names if name not in self.users}
        return self.in_order(tests.union(*(self.users.get(name, ()) for name in names)))

    def naming(self, module: str) -> set[str]:
        """The tests whose text has the name of a file. A process that is killed cannot tell what it has run, and
        whoever looks at a constant runs nothing."""
        found: set[str] = set()
        for file in sorted({name.partition("::")[0] for name in self.notes}):
            path = ROOT / file
            if path.is_file() and module in (text := path.read_text()):
                lines = text.splitlines()
                for node in ast.parse(text).body:
                    if isinstance(node, FUNCTION):
                        first = min(part.lineno for part in (node, *node.decorator_list))
                        if module in "\n".join(lines[first - 1 : node.end_lineno]):
                            found.add(f"{file}::{node.name}")
        return {name for name in self.notes if name.partition("[")[0] in found}

    def shared(self, test: str) -> float:
        return sum(self.notes[name].seconds for name in self.notes[test].uses if name in self.notes)

    def cost(self, test: str) -> float:
        return self.notes[test].seconds + self.shared(test)

    def in_order(self, tests: set[str]) -> list[str]:
        """Quickest first; those of a file that share something expensive together."""
        price = {test: self.cost(test) / (1 + self.kills[test]) for test in sorted(tests)}
        first: dict[str, float] = {}
        for test, seconds in price.items():
            if self.shared(test) > 0.5:
                file = test.partition("::")[0]
                first[file] = min(first.get(file, seconds), seconds)

        def rank(test: str) -> tuple[float, str, float]:
            file = test.partition("::")[0] if self.shared(test) > 0.5 else ""
            return first.get(file, price[test]), file, price[test]

        return sorted(price, key=rank)

    def rounds(self, tests: list[str], patience: float) -> tuple[list[list[str]], int]:
        """Few that are quick, then the others, as far as patience goes; and how many are left out."""
        quick: list[str] = []
        later: list[str] = []
        files: set[str] = set()
        spent = 0.0
        for test in tests:
            files_then = {*files, test.partition("::")[0]}
            spent += self.notes[test].seconds + (self.shared(test) if files_then != files else 0.0)
            if spent <= 8 and len(files_then) <= 8:
                files = files_then
                quick.append(test)
            elif spent <= patience or not quick:
                later.append(test)
        return [part for part in (quick, later) if part], len(tests) - len(quick) - len(later)


# --- Running the tests against a change -----------------------------------------------------------------------------


def others() -> list[str]:
    """The modules that ours import and that are neither ours nor Python's."""
    texts = [path.read_text() for folder in ("vllm", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    names = {name: None for text in texts for name in re.findall(r"^ *(?:from|import) (\w[\w.]*)", text, flags=re.M)}
    ours = {path.stem for folder in (ROOT, ROOT / "vllm", HERE) for path in folder.iterdir()}
    return [name for name in names if name.split(".")[0] not in ours | sys.stdlib_module_names]


def get_ready() -> None:
    """Import, once for all children, what is not ours: as `common` has it where there is no GPU."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in others():
        with suppress(ImportError):
            importlib.import_module(name)


class Chosen:
    """A pytest plugin, in a child: only some tests, in an order, until one fails."""

    def __init__(self, tree: Path, seconds: dict[str, float] | None) -> None:
        self.tree, self.seconds = tree, seconds

    def pytest_sessionstart(self) -> None:
        if "hypothesis" in sys.modules:
            from hypothesis import Phase, settings  # to know that it fails, an example need not be small

            settings.register_profile("mutants", settings(), phases=[Phase.explicit, Phase.generate])
            settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {name: i for i, name in enumerate(self.seconds or [item.nodeid for item in items])}
        kept = [item for item in items if item.nodeid in order and not item.get_closest_marker("alone")]
        items[:] = sorted(kept, key=lambda item: order[item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        (self.tree / "at").write_text(item.nodeid)
        limit = 600 if self.seconds is None else 20 + 5 * self.seconds[item.nodeid]
        signal.alarm(int(limit))  # whose default is to end the process

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(1)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            os._exit(1)


def in_the_tree(tree: Path, tests: dict[str, float], slow: bool) -> int:
    """In a child: run tests of the tree, as `python -m pytest` there would."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` ignores, and with it a test that is hung up on
    for name, module in list(sys.modules.items()):  # ours, of another tree
        if (getattr(module, "__file__", None) or "").startswith(str(ROOT) + os.sep) and ".venv" not in module.__file__:
            del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")  # which a spawned process has not to run again
    sys.path[:] = [path for path in sys.path if path != str(HERE)]
    sys.argv[:] = ["pytest"]
    os.chdir(tree)
    os.environ["TMPDIR"] = tempfile.tempdir = str(tree / "tmp")
    (tree / "at").write_text("its import")
    signal.alarm(120)
    files = sorted({name.partition("::")[0] for name in tests})
    tier = ["-m", "slow"] if slow else []
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--tb=no", "--basetemp", str(tree / "tmp" / "pytest"), *tier]
    return int(pytest.main([*options, *files], plugins=[Chosen(tree, None if slow else tests)]))


def descendants(of: int) -> list[int]:
    below: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            below[int(path.read_text().rpartition(")")[2].split()[1])].append(int(path.parent.name))
    found = below[of]
    for pid in found:
        found += below[pid]
    return found


def end_all(grace: float) -> None:
    """Wait a little for the processes that a child has left behind, then end them: all have become this one's."""
    until = time.monotonic() + grace
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not (left := descendants(os.getpid())):
            return
        if time.monotonic() > until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


MEMORY = 8 << 30  # bytes that a child may come to
# What prctl(2) is asked for: to become the parent of processes whose parent has ended; a signal when one's own ends.
ADOPT, END_WITH_PARENT = 36, 1


def run(tree: Path, tests: dict[str, float], slow: bool = False) -> tuple[str, str]:
    """What becomes of the tree as it stands: 'lives', or how it dies, and in which test. Of `tests`, with the seconds
    that they take; or all slow ones of their files."""
    shutil.rmtree(tree / "tmp", ignore_errors=True)
    (tree / "tmp").mkdir()
    if (pid := os.fork()) == 0:
        status = 3
        try:
            ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
            status = in_the_tree(tree, tests, slow)
        finally:
            os._exit(status)
    try:
        while not (done := os.waitpid(pid, os.WNOHANG))[0]:
            time.sleep(0.02)
            with suppress(OSError):
                if int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() > MEMORY:
                    os.kill(pid, signal.SIGKILL)
    finally:
        end_all(grace=1.0)
    code = os.waitstatus_to_exitcode(done[1])
    if code == 0 or (code == 5 and slow):  # no test of the file is slow
        return "lives", ""
    return {1: "fails", -signal.SIGALRM: "hangs"}.get(code, "crashes"), (tree / "at").read_text()


class Copy:
    """A copy of the project, in which one file at a time is another."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.tree, self.turn = root, folder / "tree", 1
        left = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "site", "__pycache__")
        shutil.copytree(root, self.tree, ignore=left)

    def write(self, path: str, text: str) -> None:
        file = self.tree / "vllm" / path
        file.write_text(text)
        self.turn += 1
        os.utime(file, (self.turn, self.turn))  # or the text before might be taken from __pycache__

    def restore(self, path: str) -> None:
        self.write(path, (self.root / "vllm" / path).read_text())

    def fate(self, mutant: Mutant, tests: Tests, patience: float, slow: bool) -> dict[str, Any]:
        """How it dies, in which test, and how many have looked at it."""
        start = time.perf_counter()
        parts, left = tests.rounds(tests.of(mutant), patience)
        costs = {name: tests.cost(name) for part in parts for name in part}
        tried, fate, killer = 0, "lives", ""
        self.write(mutant.path, mutant.text)
        while parts and fate == "lives":
            part = parts.pop(0)
            fate, killer = run(self.tree, {name: costs[name] for name in part})
            tried += len(part)
            if fate == "fails" and costs.get(killer, 0) > 1 and not self.confirms(mutant, {killer: costs[killer]}):
                parts.insert(0, part[part.index(killer) + 1 :])
                fate, killer = "lives", ""
        if slow and costs and fate == "lives":
            fate, killer = run(self.tree, costs, slow=True)
        tests.kills[killer] += fate != "lives"
        self.restore(mutant.path)
        seconds = time.perf_counter() - start
        return {"fate": fate, "killer": killer, "tried": tried, "left": left, "seconds": seconds}

    def confirms(self, mutant: Mutant, test: dict[str, float]) -> bool:
        """Is it the mutant that a long test fails for, and not a machine where others are at work, too?"""
        self.restore(mutant.path)
        sound = run(self.tree, test)[0] == "lives"
        self.write(mutant.path, mutant.text)
        return sound and run(self.tree, test)[0] != "lives"


def campaign(
    root: Path, drawn: list[Mutant], notes: dict[str, line_coverage.Ran], known: dict, *, jobs: int = 1,
    patience: float = 60.0, slow: bool = False,
) -> list[str]:  # fmt: skip
    """Try mutants, print what becomes of them, and return what is wrong."""
    ctypes.CDLL(None).prctl(ADOPT, 1)
    with tempfile.TemporaryDirectory(prefix="mutants") as name:
        folder, fates = Path(name), {}

        def work(job: int, tell: Callable) -> None:
            (folder / str(job)).mkdir()
            copy, tests = Copy(root, folder / str(job)), Tests(notes)
            for i in range(job, len(drawn), jobs):
                tell({"i": i, **copy.fate(drawn[i], tests, patience, slow)})

        for told in in_children(work, jobs):
            mutant = drawn[told["i"]]
            fates[told["i"]] = told
            by = told["killer"] or f"{told['tried']} tests, {told['left']} not asked"
            print(f"{told['fate']:7} {told['seconds']:5.1f} s  {by}\n{mutant}", flush=True)
        assert len(fates) == len(drawn), "a process that breaks things has died"
        killers = {told["killer"] for told in fates.values() if told["fate"] != "lives"} & notes.keys()
        wrong = [*control(root, folder, Tests(notes), killers)]
    table(drawn, fates, known)
    for i, mutant in enumerate(drawn):
        if (fates[i]["fate"] == "lives") != (mutant.key in known):
            what = "lives" if fates[i]["fate"] == "lives" else f"{fates[i]['fate']}, though {LIST.name} has it"
            wrong.append(f"{what}: {mutant}")
    return wrong


def control(root: Path, folder: Path, tests: Tests, killers: set[str]) -> Iterator[str]:
    """The tests that killed, on the tree as it is: one that fails there has killed nothing."""
    (folder / "control").mkdir()
    tree, left = Copy(root, folder / "control").tree, tests.in_order(killers)
    while left:
        fate, at = run(tree, {name: tests.cost(name) for name in left})
        if fate == "lives":
            return
        yield f"{at} {fate} without a change"
        left = left[left.index(at) + 1 :] if at in left else []


def in_children(work: Callable[[int, Callable], None], jobs: int) -> Iterator[dict[str, Any]]:
    """What `work(job, tell)` tells, in as many forks."""
    read, write = os.pipe()
    pids = []
    for job in range(jobs):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
                ctypes.CDLL(None).prctl(ADOPT, 1)
                work(job, lambda what: os.write(write, (json.dumps(what) + "\n").encode()))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    os.close(write)
    try:
        with os.fdopen(read) as lines:
            yield from map(json.loads, lines)
    finally:
        end_all(grace=0.0)


def table(drawn: list[Mutant], fates: dict[int, dict[str, Any]], known: dict) -> None:
    rows: dict[str, Counter] = defaultdict(Counter)
    for i, mutant in enumerate(drawn):
        for row in (mutant.path.split("/")[1], "all"):
            rows[row]["tried"] += 1
            rows[row]["live"] += fates[i]["fate"] == "lives"
            rows[row]["listed"] += fates[i]["fate"] == "lives" and mutant.key in known
    for name, row in sorted(rows.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        print(f"{name:14} {row['tried']:4} mutants {row['tried'] - row['live']:4} killed {row['live']:3} live "
              f"({100 * row['live'] / row['tried']:.1f} %), {row['listed']} of them listed")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="beginnings of paths below vllm/ (default: all six folders)")
    parser.add_argument("--sample", type=int, default=300, help="so many mutants (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time (default: 1)")
    parser.add_argument("--patience", type=float, default=60, help="seconds of tests that a mutant gets (default: 60)")
    parser.add_argument("--tests", nargs="*", default=[], help="only these test files (default: all)")
    parser.add_argument("--slow", action="store_true", help="show what lives to the slow tests of those files, too")
    args = parser.parse_args()
    drawn = draw(ROOT, tuple(args.which or ["engine"]), args.sample, args.seed)
    if not drawn:
        parser.error(f"nothing to change in {args.which}")
    notes = line_coverage.notes([str(Path(path).resolve()) for path in args.tests])
    get_ready()
    wrong = campaign(ROOT, drawn, notes, listed(LIST), jobs=args.jobs, patience=args.patience, slow=args.slow)
    print("\n".join(["", *wrong]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

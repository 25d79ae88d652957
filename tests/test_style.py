"""The code as text: what a linter does not look at."""

from __future__ import annotations

import common

import ast
import functools
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

KERNELS_OF_A_TOUR = common.HERE / "lab" / "tree.py"
FILES = sorted(
    [
        *common.HERE.glob("*.py"),
        *(common.HERE / "engine").rglob("*.py"),
        *common.HERE.glob("tours/*.py"),
        KERNELS_OF_A_TOUR,
    ]
)
parse = functools.cache(ast.parse)  # five tests look at each file


def found(check: Callable[[str], Collection]) -> dict[str, Collection]:
    """What a check finds, by the file that it finds it in."""
    told = {str(path.relative_to(common.HERE)): check(path.read_text()) for path in FILES}
    return {name: what for name, what in told.items() if what}


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Kernels take pointers and constants whose types only a launch knows."""
    names = {ast.unparse(d).split("(")[0] for d in node.decorator_list}
    return bool(names & {"common.kernel", "triton.jit", "gluon.jit"})


def untyped(source: str) -> list[str]:
    """Public functions and methods with a parameter or a result that has no type."""
    found = []
    for scope in ast.walk(parse(source)):
        if not isinstance(scope, ast.Module | ast.ClassDef):
            continue
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_kernel(node):
                continue
            if node.name.startswith("_") and node.name != "__init__":
                continue
            a = node.args
            arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            missing = [x.arg for x in arguments if x.annotation is None and x.arg not in ("self", "cls")]
            if missing or node.returns is None:
                found.append(f"{node.name}({', '.join(missing)})")
    return found


SCRIPT = ("main", "build_parser")  # the same in every script: tests/test_scripts.py says what they do


def undocumented(source: str) -> list[str]:
    """Public functions and classes, and public methods of more than five lines, without a docstring.

    A kernel's stands at its wrapper (`undocumented_wrappers`).
    """
    found = []

    def visit(body: list[ast.stmt], scope: str) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name[0] == "_":
                continue
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{scope}{node.name}.")
            elif is_kernel(node) or node.name in SCRIPT or (scope and node.end_lineno - node.lineno < 5):
                continue
            if not ast.get_docstring(node):
                found.append(scope + node.name)

    visit(parse(source).body, "")
    return found


def kernels_in(source: str) -> set[str]:
    return {n.name for n in parse(source).body if isinstance(n, ast.FunctionDef) and is_kernel(n)}


def undocumented_wrappers(source: str, kernels: Collection[str]) -> list[str]:
    """Functions and methods that launch one of `kernels` (another file's, too) without `Semantics:` and `Shapes:`."""
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef) and not is_kernel(node):
            launches = {  # `kernel[grid]` and `lesson.kernel[grid]`
                ast.unparse(n.value).rpartition(".")[2]
                for n in ast.walk(node)
                if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load)
            }
            text = ast.get_docstring(node) or ""
            if launches & set(kernels) and not ("Semantics:" in text and "Shapes:" in text):
                found.append(node.name)
    return found


def cut_too_late(source: str) -> list[int]:
    """Lines that cut what they say beyond a page's last column: `say` puts two spaces in front."""
    said = [n.args[0] for n in ast.walk(parse(source)) if isinstance(n, ast.Call) and ast.unparse(n.func)[-3:] == "say"]
    cuts = [x.slice.upper for x in said if isinstance(x, ast.Subscript) and isinstance(x.slice, ast.Slice)]
    return [x.lineno for x in cuts if not (isinstance(x, ast.Constant) and x.value <= common.PAGE - 2)]


KERNELS = set().union(*(kernels_in(path.read_text()) for path in FILES))


def test_public_functions_have_types():
    assert found(untyped) == {}


def test_public_functions_have_docstrings():
    assert found(undocumented) == {}


def test_kernel_wrappers_say_what_they_compute():
    assert found(lambda source: undocumented_wrappers(source, KERNELS)) == {}


def test_scripts_say_what_they_are():
    assert found(lambda source: [] if ast.get_docstring(parse(source)) else ["no docstring"]) == {}


def test_an_answer_ends_where_the_page_does():
    assert found(cut_too_late) == {}


def imported_too_early(source: str) -> list[str]:
    """What of ours a tool imports before it has put `vllm/` on the path: Python finds `tests/lab` then, or nothing."""
    found: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr) and ast.unparse(node.value).startswith("sys.path.insert"):
            return found
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.split(".")[0] in ("common", "engine", "lab")]
    return []  # it does not touch the path: it is imported by tests, which have


TOOLS = [path for path in sorted((common.ROOT / "tests").glob("*.py")) if not path.name.startswith("test_")]


@pytest.mark.parametrize("path", [*TOOLS, common.HERE / "__main__.py"], ids=lambda path: path.name)
def test_a_tool_finds_our_files_from_anywhere(path):
    assert imported_too_early(path.read_text()) == []


TESTS = common.ROOT / "tests"


def imported_tests(source: str) -> list[str]:
    """What a file imports from a test. What two tests need stands in `tests/support/`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return [name for name in found if name.startswith(("tests.", "test_")) or ".test_" in name or name == "tests"]


def without_a_room(tests: Path, rooms: Path) -> list[str]:
    """Test files below `tests` in folders that `rooms` lacks: whoever moves a file finds its test by the same path."""
    files = [path.relative_to(tests) for path in sorted(tests.rglob("test_*.py"))]
    return [str(path) for path in files if not (rooms / path.parent).is_dir()]


def test_no_test_imports_a_test():
    found = {str(path.relative_to(TESTS)): imported_tests(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}
    assert {name: tests for name, tests in found.items() if tests} == {}


def test_tests_of_the_engine_stand_where_its_files_stand():
    assert without_a_room(TESTS / "engine", common.HERE / "engine") == []


def test_a_test_elsewhere_is_named(tmp_path):
    for folder in ("rooms/core", "tests/core", "tests/cellar"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("test_a.py", "core/test_b.py", "cellar/test_c.py"):
        (tmp_path / "tests" / name).touch()
    assert without_a_room(tmp_path / "tests", tmp_path / "rooms") == ["cellar/test_c.py"]


def test_the_checks_can_fail():
    wrong = ("from tests.lessons.test_12 import Words", "def f():\n    import tests.engine.test_llm as t",
             "from tests.lessons import test_07 as drafting", "from .test_a import x", "import test_a")  # fmt: skip
    assert all(len(imported_tests(source)) == 1 for source in wrong)
    assert imported_tests("from support.words import Words\nimport pytest, on_gpu\nfrom . import latest_a") == []
    assert imported_too_early("import sys\nfrom lab import x\nsys.path.insert(0, 'vllm')") == ["lab"]
    assert imported_too_early("import sys\nsys.path.insert(0, 'vllm')\nimport common") == []
    assert cut_too_late("\ncommon.say(f'{x!r}'[:109])") == [2] and cut_too_late("common.say(f'{x}'[:108])") == []
    assert cut_too_late("say(x[: common.PAGE])") == [1]
    assert untyped("def f(x: int, y): ...") == ["f(y)"]
    assert untyped("class A:\n    def g(self) -> None: ...\n    def h(self): ...") == ["h()"]
    assert untyped("@common.kernel\ndef k(x): ...") == []
    long = "class A:\n    'A.'\n    def g(self):\n" + "        x = 1\n" * 5
    assert undocumented(long) == ["A.g"] and undocumented(long.replace("x = 1", "'G.'", 1)) == []
    assert undocumented(long.replace("        x = 1\n", "", 1)) == [] == undocumented(long.replace("def g", "def _g"))
    assert undocumented("async def f(): ...\nclass B: ...\ndef main(): ...") == ["f", "B"]
    assert undocumented("@common.kernel\ndef k(x): ...\nclass _C:\n    x = 1") == []
    launch = "@common.kernel\ndef k(x): ...\ndef f() -> None:\n    '''Adds.'''\n    k[(1,)](2)"
    assert kernels_in(launch) == {"k"}
    far = launch.replace("k[(1,)]", "paged.k[(1,)]").replace("def k", "def other")
    for source in (launch, far):
        assert undocumented_wrappers(source, {"k"}) == ["f"]
        assert undocumented_wrappers(source.replace("Adds.", "Semantics: 1\n    Shapes: 2"), {"k"}) == []
    method = "class A:\n    def g(self) -> None:\n        paged.k[(1,)](2)"
    assert undocumented_wrappers(method, {"k"}) == ["g"]


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_the_linter_agrees(command):
    """Whoever runs the tests learns it here, not from CI."""
    ran = subprocess.run(
        [sys.executable, "-m", "ruff", *command, str(common.HERE.parent)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

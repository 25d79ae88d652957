"""The code as text: what a linter does not look at."""

from __future__ import annotations

import ast
import subprocess
import sys

import common
import pytest

FILES = sorted(common.HERE.glob("*.py"))
by_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def is_kernel(node: ast.FunctionDef) -> bool:
    """Kernels take pointers and constants whose types only a launch knows."""
    return any(ast.unparse(d) in ("common.kernel", "triton.jit") for d in node.decorator_list)


def untyped(source: str) -> list[str]:
    """Public functions and methods with a parameter or a result that has no type."""
    found = []
    for scope in ast.walk(ast.parse(source)):
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


def undocumented_wrappers(source: str) -> list[str]:
    """Functions that launch a kernel and do not say `Semantics:` and `Shapes:`."""
    tree = ast.parse(source)
    kernels = {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and is_kernel(n)}
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in kernels:
            launches = {
                ast.unparse(n.value)
                for n in ast.walk(node)
                if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load)
            }
            text = ast.get_docstring(node) or ""
            if launches & kernels and not ("Semantics:" in text and "Shapes:" in text):
                found.append(node.name)
    return found


@by_file
def test_public_functions_have_types(path):
    assert untyped(path.read_text()) == []


@by_file
def test_kernel_wrappers_say_what_they_compute(path):
    assert undocumented_wrappers(path.read_text()) == []


@by_file
def test_scripts_stay_readable(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 1200
    assert ast.get_docstring(ast.parse("\n".join(lines)))


def test_the_checks_can_fail():
    assert untyped("def f(x: int, y): ...") == ["f(y)"]
    assert untyped("class A:\n    def g(self) -> None: ...\n    def h(self): ...") == ["h()"]
    assert untyped("@common.kernel\ndef k(x): ...") == []
    launch = "@common.kernel\ndef k(x): ...\ndef f() -> None:\n    '''Adds.'''\n    k[(1,)](2)"
    assert undocumented_wrappers(launch) == ["f"]
    assert undocumented_wrappers(launch.replace("Adds.", "Semantics: 1\n    Shapes: 2")) == []


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_the_linter_agrees(command):
    """Whoever runs the tests learns it here, not from CI."""
    ran = subprocess.run(
        [sys.executable, "-m", "ruff", *command, str(common.HERE.parent)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

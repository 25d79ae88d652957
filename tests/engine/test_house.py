"""The tools that keep the engine's house in order can fail: each is given a house with one thing wrong."""

from __future__ import annotations

import common

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(sys.executable).parent
ROOMS = [path for path in sorted((common.HERE / "engine").rglob("*.py")) if path.name != "__init__.py"]


def house(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the engine and its settings in which one place of one file is another."""
    shutil.copy(common.ROOT / "pyproject.toml", folder)
    (folder / "vllm").mkdir()
    shutil.copy(common.HERE / "common.py", folder / "vllm")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(common.HERE / "engine", folder / "vllm" / "engine", ignore=ignored)
    path = folder / "vllm" / "engine" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return folder


def check(folder: Path, tool: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of one of the tools that `.ci/run` calls."""
    command = [str(TOOLS / tool), *arguments]
    environment = {"PYTHONPATH": "vllm", "PATH": f"{TOOLS}:/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def missing(source: str) -> list[str]:
    first = ast.get_docstring(ast.parse(source)) or ""
    text = first.replace("\n", " ").replace("vLLM: the base", "vLLM: `")
    told = {
        "3 to 6 lines": 3 <= len(first.splitlines()) <= 6,
        "what it owns": "Owns" in first,
        "what it never does": "ever" in first,
        "vLLM's file": "vLLM: `" in text,
    }
    return [what for what, is_there in told.items() if not is_there]


def test_a_file_says_first_what_it_owns_who_calls_it_what_it_never_does_and_where_vllm_has_it():
    found = {str(path.relative_to(common.HERE)): missing(path.read_text()) for path in ROOMS}
    assert {name: what for name, what in found.items() if what} == {}
    assert missing("'Owns.'") == ["3 to 6 lines", "what it never does", "vLLM's file"]


WRONG = {
    "an import that goes up": (
        "lint-imports", (), "request.py", "import common\n", "import common\nfrom engine import seams\n", "seams"),
    "blocks that know tables": (
        "lint-imports", (), "core/block_pool.py", "from common import InputError\n",
        "from common import InputError\nfrom engine.core import kv_cache_manager\n", "kv_cache_manager"),
    "too many arguments": (
        "ruff", ("check", "--isolated", "--select", "PLR0913", "vllm/engine"), "core/block_pool.py",
        "def get_cached_block(self, block_hash: bytes)",
        "def get_cached_block(self, block_hash: bytes, a: int, b: int, c: int, d: int, e: int)", "PLR0913"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(tmp_path, what):
    tool, arguments, file, old, new, named = WRONG[what]
    code, output = check(house(tmp_path, file, old, new), tool, *arguments)
    assert code != 0 and named in output, output


def test_the_house_is_in_order():
    assert check(common.ROOT, "lint-imports")[0] == 0
    assert check(common.ROOT, "ruff", "check", "vllm/engine")[0] == 0


@pytest.mark.long
def test_a_wrong_type_is_named(tmp_path):
    """In the engine, and in a lesson, though it has kernels, which the type checker does not understand. It fetches its
    own program once, from the package registry."""
    wrong = house(tmp_path, "core/scheduler.py", "self.waiting.prepend_request(victim)", "self.waiting.no_such(victim)")
    shutil.copytree(common.ROOT / "tests/support/typings", tmp_path / "tests/support/typings")
    text, old = (common.HERE / "03_flash_attention.py").read_text(), "aligned(x) for x in (q, k, v))"
    assert text.count(old) == 1
    (wrong / "vllm" / "03_flash_attention.py").write_text(text.replace(old, "aligned(x, 16) for x in (q, k, v))"))
    code, output = check(wrong, "pyright", "--pythonpath", sys.executable)
    assert code == 1 and "no_such" in output, output
    assert "03_flash_attention.py" in output and "Expected 1 positional argument" in output, output
    assert check(common.ROOT, "pyright", "--pythonpath", sys.executable)[0] == 0

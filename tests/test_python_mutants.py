"""The harness that breaks the engine's Python: what it changes and what it leaves, and that it tells of what lives.

`python tests/python_mutants.py` runs hundreds; here, all of a project of one file, and a few of the engine's (slow).
"""

from __future__ import annotations

import common

import ast
import re
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from support import scripts

if sys.platform != "linux":
    pytest.skip("what a test leaves behind is found in /proc", allow_module_level=True)

import line_coverage
import python_mutants
from support.mutants import listed

TOOLS = ("python_mutants.py", "line_coverage.py", "support/__init__.py", "support/mutants.py")


def test_mutants_are_other_programs():
    for path in ("engine/core/block_pool.py", "engine/serving/balancer.py"):
        original = ast.dump(ast.parse((common.HERE / path).read_text()))
        found = python_mutants.mutants(common.ROOT, path)
        assert len({mutant.text for mutant in found}) == len(found) > 50
        assert all(ast.dump(ast.parse(mutant.text)) != original for mutant in found)


def changed(tmp_path: Path, function: str) -> set[str]:
    """All that a function's text becomes."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "file.py").write_text(textwrap.dedent(function))
    return {mutant.text for mutant in python_mutants.mutants(tmp_path, "file.py")}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a < b", "x = (a <= b)"),
        ("x = a is b", "x = (a is not b)"),
        ("x = a in b", "x = (a not in b)"),
        ("x = a and b", "x = (a or b)"),
        ("x = a and b", "x = b"),
        ("x = a + b", "x = (a - b)"),
        ("x = a * b", "x = (a // b)"),
        ("x = 5", "x = 6"),
        ("x = 5", "x = 4"),
        ("x = True", "x = (False)"),
        ("x = not a", "x = a"),
        ("if a: x = b", "if (True): x = b"),
        ("if a: x = b", "if (False): x = b"),
        ("x = [i for i in a if i]", "x = [i for i in a if (True)]"),
        ("while a: a = b", "while (False): a = b"),
        ("a.x = b", "pass"),
        ("a = b", "pass"),
        ("a += b", "pass"),
        ("a(b)", "pass"),
        ("del a.x", "pass"),
        ("raise a", "pass"),
        ("return a", "return (None)"),
        ("x = min(a, b)", "x = max(a, b)"),
        ("x = a[b:5]", "x = a[:5]"),
        ("x = a[b:5]", "x = a[b:]"),
        ("for x in a: break", "for x in a: continue"),
        ("for x in a: continue", "for x in a: break"),
        ("with suppress(a): b()", "with suppress(): b()"),
    ],
)
def test_kinds_of_changes(tmp_path, before, after):
    text = f"def function(a, b):\n    {before}\n"
    assert text.replace(before, after) in changed(tmp_path, text)


def test_an_exception_is_caught_no_longer(tmp_path):
    text = "def function(a):\n    try: a()\n    except (KeyError, ValueError): pass\n    except OSError: pass\n"
    expected = {
        text.replace("(KeyError, ValueError)", "((ValueError,))"),
        text.replace("(KeyError, ValueError)", "((KeyError,))"),
        text.replace("OSError", "(())"),
    }
    assert expected <= changed(tmp_path, text)


def test_defaults_are_changed(tmp_path):
    text = "def function(a=1, *, b=True):\n    return 'a'\n"
    expected = {text.replace("a=1", "a=0"), text.replace("a=1", "a=2"), text.replace("True", "(False)")}
    assert changed(tmp_path, text) == expected


def test_what_has_no_meaning_is_left(tmp_path):
    text = '''
    """A file of 3 words."""
    from typing import TYPE_CHECKING
    if TYPE_CHECKING:
        a = 1

    @decorated(maxsize=1)
    class Thing(base(1)):
        x: tuple[int, 3]

        def __repr__(self) -> "list[1]":
            """A docstring."""
            return 1 + 2

        def speak(self, how: Literal[1]):
            assert how == 1
            log.info("so many", 1 + 1)
            self.logger.info("so many", 1 + 1)
            print(1)

    @common.kernel
    def kernel(a):
        return a + 1
    '''
    assert changed(tmp_path, text) == set()


def test_the_words_of_an_error_are_left(tmp_path):
    text = "def function(a):\n    raise ValueError(f'{a + 1}', a + 1)\n"
    assert changed(tmp_path, text) == {"def function(a):\n    pass\n"}


def test_a_larger_sample_holds_the_smaller_one():
    which = ("engine/core/block_pool.py", "engine/lora/config.py")
    few, more, others = (
        set(python_mutants.draw(common.ROOT, which, n, seed)) for n, seed in ((6, 0), (20, 0), (20, 1))
    )
    assert len(few) == 6 and len(more) == 20 and few < more != others
    assert sum(mutant.path == which[0] for mutant in more) == 10


def test_the_list_of_survivors_is_of_today():
    found = listed(python_mutants.LIST)
    assert all(re.fullmatch(r"# \S.{10,}", reason) for reason in found.values())
    paths = {place.partition(":")[0] for place, _, _ in found}
    there = {mutant.key for path in paths for mutant in python_mutants.mutants(common.ROOT, path)}
    assert not found.keys() - there, "no such change: " + "\n".join(map(str, found.keys() - there))


def ran(seconds: float, *uses: str, lines: list[int]) -> line_coverage.Ran:
    return line_coverage.Ran(seconds, list(uses), {"file.py": lines})


def test_who_looks_at_a_line():
    notes = {
        "a::slow": ran(3, lines=[1, 2]),
        "a::quick": ran(1, lines=[2]),
        "b::user": ran(0.1, "b::<server>", lines=[7]),
        "b::<server>": ran(5, lines=[2]),
        "": ran(0, lines=[1, 2, 3]),
    }
    tests = python_mutants.Tests(notes)

    def of(looked_at: range | None) -> list[str]:
        return tests.of(python_mutants.Mutant("file.py", "f", 2, looked_at, "", "", ""))

    assert of(range(2, 3)) == ["a::quick", "a::slow", "b::user"]
    assert of(range(1, 2)) == ["a::slow"]
    assert of(range(7, 8)) == ["b::user"]
    assert set(of(None)) == {"a::quick", "a::slow", "b::user"}  # imports are nobody's
    assert set(of(range(3, 5))) == set(of(None))  # perhaps a process that was killed has run it
    tests.kills["b::user"] += 9
    assert of(range(2, 3))[0] == "b::user"
    assert tests.rounds(of(range(2, 3)), patience=7) == ([["b::user", "a::quick"]], 1)


POOL = """LIMIT = 3


def room(n):
    if n > LIMIT:
        return False
    return True


def apart(n):
    return n + n


def unseen(n):
    return -n


def closed(files):
    files.close()
"""
TESTS = """
import pathlib, subprocess, sys
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "vllm"))
from engine.core import pool

def test_room():
    assert pool.room(2) and not pool.room(5)

@pytest.fixture(scope="module")
def far():
    code = "import sys; sys.path.insert(0, 'vllm'); from engine.core import pool; print(pool.apart(3))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout

def test_another_look(far):
    assert "room" not in far

def test_another_process(far):
    assert far == "6\\n"

def test_nothing_is_left(tmp_path):
    with open(tmp_path / "file", "w") as file:
        pool.closed(file)
        assert file.closed
"""
LISTED = """What may live.

# Nobody asks at the edge, and this reason is long enough.

engine/core/pool.py:room
- if n > LIMIT:
+ if (n >= LIMIT):

# Nobody runs it, or so this list says.

engine/core/pool.py:apart
- return n + n
+ return (n - n)
"""


@pytest.mark.slow
def test_what_lives_is_told_and_so_is_what_dies_though_it_is_listed(tmp_path):
    for name, text in {
        "vllm/engine/core/pool.py": POOL,
        "vllm/engine/__init__.py": "",
        "tests/conftest.py": "",
        "tests/test_pool.py": TESTS,
        "tests/surviving_mutants.txt": LISTED,
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in TOOLS:
        (tmp_path / "tests" / name).parent.mkdir(exist_ok=True)
        shutil.copy(common.ROOT / "tests" / name, tmp_path / "tests" / name)
    done = scripts.execute([sys.executable, tmp_path / "tests" / "python_mutants.py"])
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    told, wrong = done.stdout.rsplit("\n\n", 1)
    assert re.findall(r"^(\w+): \S+ (\w*)\n- (.*)\n\+ (.*)", wrong, flags=re.M) == [
        ("lives", "", "LIMIT = 3", "LIMIT = 2"),
        ("lives", "", "LIMIT = 3", "LIMIT = 4"),
        ("lives", "unseen", "return -n", "return (None)"),
    ]
    assert "fails, though surviving_mutants.txt has it: engine/core/pool.py:11 apart" in wrong
    assert re.search(r"^all +11 mutants +7 killed +4 live \(36.4 %\), 1 of them listed$", told, flags=re.M)
    assert re.search(r"^fails .* tests/test_pool.py::test_another_process$", told, flags=re.M)


@pytest.mark.long
def test_some_mutants_of_the_engine_are_killed():
    places = ["engine/core/block_pool.py", "engine/core/queues.py", "--sample", "6"]
    looking = ["--tests", "tests/engine/core/test_conformance.py"]
    done = scripts.execute([sys.executable, python_mutants.__file__, *places, *looking])
    counts = re.search(r"^all +6 mutants +(\d) killed", done.stdout, flags=re.M)
    assert counts and int(counts[1]) >= 3, done.stdout + done.stderr
    assert "without a change" not in done.stdout

"""Which lines of the engine does the fast tier run, and which test runs which?

    python tests/line_coverage.py               # per folder, and the lines that no test runs: some 20 minutes, once
    python tests/line_coverage.py engine/core   # of some folders or files

Each test runs once under coverage.py, which notes the test (its context) beside every line, in the processes that it
starts, too. What a fixture of a module or of the session runs counts for every test that uses it. The notes of a test
file are kept in `.pytest_cache` for as long as that file, `vllm/`, `conftest.py` and `support/` stay as they are.
`python_mutants.py` reads them: a mutant is shown to the tests that run its line.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENGINE = ROOT / "vllm" / "engine"
CACHE = ROOT / ".pytest_cache" / "lines"
# Files that judge text, tools or the site: they do not ask what Python of the engine computes.
APART = {"test_style", "test_docs", "test_site", "test_house", "test_widget_sims", "test_kernel_mutants",
         "test_python_mutants", "test_pretend_gpu", "test_processes"}  # fmt: skip


class Ran(NamedTuple):
    """What a test ran itself, or a fixture that several tests share."""

    seconds: float
    uses: list[str]  # the shared fixtures of a test
    lines: dict[str, list[int]]  # by the path of a file below `vllm/`


# --- Recording --------------------------------------------------------------------------------------------------------


class Recorder:
    """A pytest plugin that tells coverage.py who runs: a test, or a fixture that several tests share."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.uses: dict[str, list[str]] = {}
        self.failed: set[str] = set()
        self.running: list[str] = []

    def switch(self) -> None:
        name = self.running[-1] if self.running else ""
        if not self.running and not multiprocessing.active_children():
            forkserver._forkserver._stop()  # its forks would all say that they are the first one's test
        self.coverage.switch_context(name)
        os.environ["COVERAGE_CONTEXT"] = name  # of the processes that start now

    def timed(self, name: str) -> Iterator[None]:
        """Whatever runs meanwhile is `name`'s, but for what interrupts it."""
        self.running.append(name)
        self.switch()
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            took = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + took
            self.running.pop()
            if self.running:
                self.seconds[self.running[-1]] = self.seconds.get(self.running[-1], 0.0) - took
            self.switch()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        definitions = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]
        self.uses[item.nodeid] = [shared(found) for found in definitions if found.scope != "function"]
        return (yield from self.timed(item.nodeid))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        return (yield from self.timed(shared(fixturedef)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def shared(fixturedef: Any) -> str:
    return f"{fixturedef.baseid}::<{fixturedef.argname}>"


SETTINGS = """[run]
source = {engine}
data_file = {folder}/data
parallel = true
context = ${{COVERAGE_CONTEXT-}}
sigterm = true
patch = _exit, fork
"""


def record(folder: Path, files: list[str]) -> int:
    """In a process of its own: run test files, and leave what they ran in the cache."""
    settings = folder / "coveragerc"
    settings.write_text(SETTINGS.format(engine=ENGINE, folder=folder))
    import coverage

    watch = coverage.Coverage(config_file=str(settings))
    watch.start()
    os.environ["COVERAGE_PROCESS_START"] = str(settings)
    recorder = Recorder(watch)
    options = ["-q", "-n0", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=short"]
    code = pytest.main([*options, *files], plugins=[recorder])
    del os.environ["COVERAGE_PROCESS_START"]
    watch.stop()
    watch.save()
    whole = coverage.Coverage(config_file=str(settings))
    whole.combine([str(folder)])
    data = whole.get_data()
    lines: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for path in data.measured_files():
        name = str(Path(path).relative_to(ROOT / "vllm"))
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                lines[context.removeprefix("|")].setdefault(name, []).append(line)
    CACHE.mkdir(parents=True, exist_ok=True)
    for file in files:
        own = f"{Path(file).relative_to(ROOT)}::"
        tests = [name for name in recorder.uses if name.startswith(own) and name not in recorder.failed]
        fixtures = {name for test in tests for name in recorder.uses[test]}
        ran = {
            name: Ran(recorder.seconds.get(name, 0.0), recorder.uses.get(name, []), lines[name])
            for name in [*tests, *fixtures]
        }
        ran[""] = Ran(0.0, [], lines[""])  # while modules were imported
        place(file).write_text(json.dumps(ran))
    for name in sorted(recorder.failed):
        print(f"{name} fails while it is watched, and is left out")
    return int(code)


@functools.cache
def of_all() -> bytes:
    """What every test depends on."""
    paths = [*(ROOT / "vllm").rglob("*.py"), *(HERE / "support").rglob("*.py"), HERE / "conftest.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).digest()


def place(file: str) -> Path:
    """Where the notes of a test file are kept."""
    content = hashlib.sha256(of_all() + Path(file).read_bytes()).hexdigest()
    return CACHE / f"{'.'.join(Path(file).relative_to(HERE).with_suffix('').parts)}-{content[:16]}.json"


def test_files() -> list[str]:
    return [str(path) for path in sorted(HERE.rglob("test_*.py")) if path.stem not in APART]


def notes(files: Sequence[str] = ()) -> dict[str, Ran]:
    """What every test and every shared fixture ran; made anew where it is of another day. Imports are under ""."""
    files = files or test_files()
    if missing := [file for file in files if not place(file).is_file()]:
        for file in missing:
            for old in CACHE.glob(f"{place(file).name.rpartition('-')[0]}-*.json"):
                old.unlink()
        print(f"{len(missing)} test files run once, to see which lines they run", flush=True)
        # A process that a test has ended may still write what it ran.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            subprocess.run([sys.executable, __file__, "--record", folder, *missing], cwd=ROOT, check=False)
    found: dict[str, Ran] = {}
    imported: dict[str, set[int]] = defaultdict(set)
    for file in files:
        for name, ran in json.loads(place(file).read_text()).items():
            found[name] = Ran(*ran)
        for path, lines in found.pop("").lines.items():
            imported[path].update(lines)
    return found | {"": Ran(0.0, [], {path: sorted(lines) for path, lines in imported.items()})}


# --- Reporting --------------------------------------------------------------------------------------------------------


def ranges(lines: list[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    parts: list[list[int]] = []
    for line in lines:
        if parts and line == parts[-1][1] + 1:
            parts[-1][1] = line
        else:
            parts.append([line, line])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)


def statements(path: Path) -> set[int]:
    """The lines of a file that can run in Python: neither kernels nor what only a type checker reads."""
    import coverage

    watch = coverage.Coverage(config_file=False, data_file=None)
    watch.exclude(r"@(common\.kernel|triton\.jit)\b")
    watch.exclude(r"if TYPE_CHECKING:")
    return set(watch.analysis2(str(path))[1])


def report(which: tuple[str, ...]) -> None:
    ran = notes().values()
    run: dict[str, set[int]] = defaultdict(set)
    for one in ran:
        for path, lines in one.lines.items():
            run[path].update(lines)
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    below = []
    for path in sorted(ENGINE.rglob("*.py")):
        name = str(path.relative_to(ROOT / "vllm"))
        if not name.startswith(which) or not (all_lines := statements(path)):
            continue
        missed = sorted(all_lines - run[name])
        for key in (str(Path(name).parent), "all"):
            folders[key][0] += len(all_lines) - len(missed)
            folders[key][1] += len(all_lines)
        if len(missed) > 0.05 * len(all_lines):
            below.append(f"{name}: {100 - 100 * len(missed) / len(all_lines):.0f} %, not {ranges(missed)}")
    for name, (done, there) in sorted(folders.items(), key=lambda pair: (pair[0] == "all", pair)):
        print(f"{name:28} {done:5} of {there:5} lines {100 * done / there:6.1f} %")
    print("\n".join(["", "below 95 %:", *below] if below else []))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="beginnings of paths below vllm/ (default: engine)")
    parser.add_argument("--record", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.record:
        return record(args.record, args.which)
    report(tuple(args.which or ["engine"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A test process that dies, or a test that never ends, fails the run at once and by name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import processes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there, tests run in one process")

FILE = """
import os, signal, time, pytest

@pytest.mark.parametrize("i", range(3))
def test_passes(i):
    pass
"""
LAST = """
def test_ends():
    if os.fork() == 0:
        time.sleep(1000)  # with pytest's pipe and the locks of the process that has forked it
    {end}

def test_after():
    pass
"""


def run(folder: Path, end: str, plugin: str = "") -> tuple[int, str]:
    """Six files of tests in two processes; the last one's test does `end`. -> exit status, all output."""
    for i in range(6):
        (folder / f"test_{i}.py").write_text(FILE + (LAST.format(end=end) if i == 5 else ""))
    (folder / "more.py").write_text(f"import os, processes\n{plugin}")
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name in ("processes.py", "__init__.py"):  # with locks of its own
        shutil.copy(Path(processes.__file__).with_name(name), folder)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder",
               "-p", "processes", "-p", "more", "-p", "no:cacheprovider"]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGFPE", marks=pytest.mark.slow)])
def test_a_process_that_dies_fails_the_run_by_the_name_of_its_test(tmp_path, name):
    """Within the minute that `run` waits, although what the test has forked would live on."""
    status, output = run(tmp_path, f"os.kill(os.getpid(), signal.{name})")
    assert status == 1
    assert len(re.findall(r"^FAILED test_5.py::test_ends", output, re.M)) == 1, output
    assert re.search(r"the test process gw\d died in test_5.py::test_ends", output)
    said = output.replace(".", "")  # the other process's tests pass meanwhile, a dot each, wherever this line is
    assert ("Fatal Python error: Floating point exception" in said) == (name == "SIGFPE")


def test_a_test_that_never_ends_is_ended(tmp_path):
    """Where it stood, its traceback says."""
    status, output = run(tmp_path, "while True: time.sleep(1)", "processes.LIMIT = 1")
    assert status == 1 and "FAILED test_5.py::test_ends" in output
    assert re.search(r'File ".*test_5.py", line \d+ in test_ends', output)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_fails_its_test_and_no_other(tmp_path):
    status, output = run(tmp_path, "os.write(os.open('/dev/full', os.O_WRONLY), b'x')")
    assert status == 1 and "1 failed, 19 passed" in output
    assert re.search(r"FAILED test_5.py::test_ends - OSError: \[Errno 28\] No space left", output)


TIMES = """
import contextlib, pytest, time

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    alone = item.name == "test_passes[1]"  # in each file, so that both processes ask at once
    with processes.alone() if alone else contextlib.nullcontext():
        start = time.monotonic()
        time.sleep(0.1)
        with open("times", "a") as file:
            print(alone, start, time.monotonic(), file=file)
        return (yield)
"""


def test_who_looks_at_the_clock_is_alone(tmp_path):
    status, output = run(tmp_path, "pass", TIMES)
    assert status == 0 and "20 passed" in output
    times = [(alone == "True", float(start), float(end))
             for alone, start, end in map(str.split, (tmp_path / "times").read_text().splitlines())]  # fmt: skip
    overlapping = [(a, b) for a in times for b in times if a[1] < b[1] < a[2]]
    assert overlapping and not any(alone for pair in overlapping for alone, *_ in pair)


@pytest.mark.slow  # the fast ones die in a test
def test_a_process_that_dies_after_its_tests_fails_the_run_too(tmp_path):
    plugin = 'def pytest_sessionfinish(session):\n    if hasattr(session.config, "workerinput"): os._exit(3)'
    status, output = run(tmp_path, "pass", plugin)
    assert status == 1 and re.search(r"the test process gw\d died in no test", output)


@pytest.mark.slow  # the fast ones fork as well
def test_what_a_test_has_forked_has_alarms_of_its_own(tmp_path):
    """They end it as they would without us, and it prints nothing."""
    end = """
    if (other := os.fork()) == 0:
        signal.alarm(1)
        time.sleep(1000)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == -signal.SIGALRM
"""
    status, output = run(tmp_path, end)
    assert status == 0 and "20 passed" in output and "most recent call first" not in output

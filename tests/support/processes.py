"""How pytest's tests are divided among processes, what one waits for, and what ends all when one of them has died.

`conftest.py` loads it as a plugin; `test_processes.py` alone, without torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

if sys.platform != "win32":
    import fcntl  # there, one process runs all tests

LIMIT = 600  # seconds that a test may take, fixtures included, before its process is ended; a slow one three times that


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return min(os.cpu_count() or 1, 4)  # each takes some 2 GB


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        _split_scope = staticmethod(together)

    return Together(config, log)


def together(nodeid: str) -> str:
    """What the tests that one process has to run have in common: they are of a file, for these share what is expensive;
    or they look at the processes of one lesson, where a file starts some of each lesson. Its story is apart.
    """
    file, _, test = nodeid.partition("::")
    lesson = re.search(r"\[(\w+)", test)
    if not lesson or not file.endswith(BY_LESSON):
        return file
    return f"{lesson[1]}'s story" if test.startswith(STORIES) else lesson[1]


BY_LESSON = ("test_docs.py", "test_scripts.py")
STORIES = ("test_default_run", "test_a_story_has_its_parts", "test_quoted_output[")
LONGEST = (
    *BY_LESSON,
    "test_pretend_gpu.py",
    "test_kernels.py",
    "test_official_client.py",
    "test_widget_sims.py",
    "test_site.py",
    "test_kernel_mutants.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, so that no process has to wait for another in the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Every test is in the room; one that looks at the clock may ask to be `alone` there."""
    global room
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with open(Path(__file__).with_name("__init__.py")) as room:
        enter(exclusive=False)
        signal.alarm(3 * LIMIT if item.get_closest_marker("slow") else LIMIT)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            fcntl.flock(room, fcntl.LOCK_UN)  # processes that it has forked have the file open
            room = None


room: TextIO | None = None  # the running test's, a lock that they share


def enter(exclusive: bool) -> None:
    with open(__file__) as door:
        fcntl.flock(door, fcntl.LOCK_EX)  # nobody overtakes who waits for the room
        fcntl.flock(room, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """For what looks at the clock: the other processes end their tests first, and begin no other meanwhile."""
    if room is None:
        yield
        return
    fcntl.flock(room, fcntl.LOCK_UN)  # before the door: of two who want to be alone, each would wait for the other
    enter(exclusive=True)
    try:
        yield
    finally:
        fcntl.flock(room, fcntl.LOCK_UN)
        enter(exclusive=False)


# --- Processes that die ---------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        return
    # A test without end: the tracebacks of its threads, then the signal does what it does to any process.
    faulthandler.register(signal.SIGALRM, file=os.dup(sys.__stderr__.fileno()), chain=True)
    # What a test has forked holds this process's pipe to pytest, and its locks: both would outlive it.
    os.register_at_fork(after_in_child=end_with_parent)


own = os.getpid()


def end_with_parent() -> None:
    """In a process that was just forked: it ends within a second of the one that has forked it, whatever ended that."""
    global own
    parent, own = own, os.getpid()
    faulthandler.unregister(signal.SIGALRM)  # its alarms are its own

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@pytest.hookimpl(optionalhook=True, trylast=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """A process that dies ends the run, by the name of its test.

    pytest-xdist would start that test again in a new process, as often as it dies. And it would divide anew what the
    dead one was given, files included that had come to their end; whoever gets one of these waits for ever.
    """
    if not error or error == "keyboard-interrupt":
        return
    session, name = node.config.pluginmanager.get_plugin("dsession"), "no test"
    given = session.sched.assigned_work.get(node, {}).values()  # file by file: is a test done?
    running = [test for tests in given for test, done in tests.items() if not done][:1]
    for name in running:
        session.handle_crashitem(name, node)  # a failure among the others
    pytest.exit(f"the test process {node.gateway.id} died in {name}", returncode=pytest.ExitCode.TESTS_FAILED)

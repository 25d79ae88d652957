"""Running a lesson's script as a reader does, once per set of arguments, for every test that looks at its output.

Scripts take most of the suite's time. `ahead` starts the ones that will be asked for beside the other tests, one after
another on the second core. When only they are left, both cores do them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import common

Job = tuple[tuple, list[Any]]  # a key, and the command

_futures: dict[tuple, Future] = {}
_waiting: deque[Job] = deque()  # those of `ahead` that nobody has begun
_running: list[subprocess.Popen] = []
# Who has it may open files and start processes. A test that limits this process holds it meanwhile: else the thread of
# `ahead` would find that no job can be started, of one after the other.
unlimited = threading.Lock()


@dataclasses.dataclass
class Done:
    """A process that has ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float  # by the clock
    cpu_seconds: float  # of it and of the processes that it waited for
    results: dict[str, Any]  # what it wrote to --json
    figures: dict[str, bytes]  # what it drew


def execute(command: list[Any], environment: dict[str, str] | None = None) -> Done:
    """Run a command to its end; `FILE.json` and `FIGURES` in it stand for scratch paths."""
    with unlimited, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "results.json").write_text('{"other": 1}')
        words = [str(word).replace("FILE.json", f"{folder}/results.json").replace("FIGURES", name) for word in command]
        start = time.perf_counter()
        with open(folder / "out", "w+") as out, open(folder / "err", "w+") as err:
            process = subprocess.Popen(words, stdout=out, stderr=err, cwd=common.ROOT,
                                       env={**os.environ, **(environment or {})})  # fmt: skip
            _running.append(process)
            unlimited.release()
            try:
                _, status, usage = os.wait4(process.pid, 0)
            finally:
                unlimited.acquire()
            process.returncode = os.waitstatus_to_exitcode(status)
            _running.remove(process)
            seconds = time.perf_counter() - start
            out.seek(0), err.seek(0)
            results = json.loads((folder / "results.json").read_text())
            cpu = usage.ru_utime + usage.ru_stime
            figures = {path.name: path.read_bytes() for path in folder.glob("*.svg")}
            return Done(process.returncode, out.read(), err.read(), seconds, cpu, results, figures)


def script_job(lesson: str, *arguments: str, prelude: str = "") -> Job:
    """A lesson's script; `prelude` is code to run first."""
    command = [common.HERE / f"{lesson}.py", "--figure", "FIGURES", "--json", "FILE.json", *arguments]
    if prelude:
        argv, here = [str(word) for word in command], str(common.HERE)
        code = f"import runpy, sys; sys.argv[:] = {argv!r}; sys.path.insert(0, {here!r})"
        command = ["-c", f"{prelude}\n{code}\nrunpy.run_path(sys.argv[0], run_name='__main__')"]
    return (lesson, *arguments, prelude), [sys.executable, *command]


def run(lesson: str, *arguments: str, prelude: str = "") -> Done:
    """The finished process. Figures and results go to a scratch folder."""
    return get(script_job(lesson, *arguments, prelude=prelude))


def output_of(lesson: str, *arguments: str) -> str:
    """What the script prints; it must end well."""
    done = run(lesson, *arguments)
    assert done.returncode == 0, f"{lesson} {' '.join(arguments)}: {done.stdout[-500:]}\n{done.stderr[-2000:]}"
    return done.stdout


def get(job: Job) -> Done:
    """The result of a job: of the one that was started ahead, of an earlier call, or of running it now. While somebody
    else runs it, the last of those that wait can be done."""
    key, command = job
    if key not in _futures:
        _futures[key] = Future()
        _futures[key].set_result(execute(command))
    with contextlib.suppress(ValueError):  # somebody has begun it
        _waiting.remove(job)
        work(job)
    with contextlib.suppress(IndexError):  # none waits
        while not _futures[key].done():
            work(_waiting.pop())
    return _futures[key].result()


def work(job: Job) -> None:
    """Do a job of `ahead` on one core."""
    key, command = job
    try:
        _futures[key].set_result(execute(command, {"OMP_NUM_THREADS": "1"}))
    except BaseException as error:  # whoever asks for it raises it
        _futures[key].set_exception(error)


# What scripts do, in 3.1 s on two quiet cores of the EPYC that DESIGN's limits are for: import torch, stream weights
# through both cores, run Python.
YARDSTICK = """
import torch
weights, x = [torch.ones(1536, 576) for _ in range(40)], torch.ones(8, 576)
for _ in range(40):
    for weight in weights:
        torch.nn.functional.linear(x, weight)
sum(i * i for i in range(5_000_000))
"""
YARDSTICK_SECONDS = 3.1


def within(seconds: float, limit: float) -> bool:
    """Whether what took `seconds` just now takes at most `limit` on that machine. One that is slower, by its nature or
    by what else is running on it, gets more in proportion; a faster one gets no less."""
    if seconds <= limit:
        return True
    return seconds <= limit * execute([sys.executable, "-c", YARDSTICK]).seconds / YARDSTICK_SECONDS


def ahead(jobs: Iterable[Job]) -> None:
    """Do jobs in a thread, in their order, those that are new; `get` waits for one that has begun, and does one that
    has not."""
    new = {key: command for key, command in jobs if key not in _futures}
    _futures.update({key: Future() for key in new})
    _waiting.extend(new.items())

    def work_ahead() -> None:
        with contextlib.suppress(IndexError):  # nothing is left
            while True:
                work(_waiting.popleft())

    if not any(thread.name == "ahead" for thread in threading.enumerate()):
        threading.Thread(target=work_ahead, daemon=True, name="ahead").start()


def stop() -> None:
    """Start nothing more, and end what runs."""
    _waiting.clear()
    for process in list(_running):
        process.terminate()

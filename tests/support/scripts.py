"""Running a lesson's script as a reader does, once per set of arguments, for every test that looks at its output."""

from __future__ import annotations

import common

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import modules

Job = tuple[tuple, list[Any]]  # a key, and the command

# Another process runs tests on the other core.
ONE_CORE = {"OMP_NUM_THREADS": "1"} if "PYTEST_XDIST_WORKER" in os.environ else {}

_done: dict[tuple, Done] = {}


@dataclasses.dataclass
class Done:
    """A process that has ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float  # by the clock
    results: dict[str, Any]  # what it wrote to --json
    figures: dict[str, bytes]  # what it drew


def execute(command: list[Any], environment: dict[str, str] | None = None) -> Done:
    """Run a command to its end; `FILE.json` and `FIGURES` in it stand for scratch paths."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "results.json").write_text('{"other": 1}')
        words = [str(word).replace("FILE.json", f"{folder}/results.json").replace("FIGURES", name) for word in command]
        start = time.perf_counter()
        with open(folder / "out", "w+") as out, open(folder / "err", "w+") as err:
            process = subprocess.Popen(words, stdout=out, stderr=err, cwd=common.ROOT,
                                       env={**os.environ, **(environment or {})})  # fmt: skip
            try:
                process.wait()
            finally:
                process.kill()  # if the test was stopped
            seconds = time.perf_counter() - start
            out.seek(0), err.seek(0)
            results = json.loads((folder / "results.json").read_text())
            figures = {path.name: path.read_bytes() for path in folder.glob("*.svg")}
            return Done(process.returncode, out.read(), err.read(), seconds, results, figures)


def script_job(lesson: str, *arguments: str, prelude: str = "") -> Job:
    """A lesson's script; `prelude` is code to run first."""
    path = modules.paths()[lesson]
    start = ["-m", f"vllm.tours.{lesson}"] if path.parent.name == "tours" else [path]
    command = [*start, "--figure", "FIGURES", "--json", "FILE.json", *arguments]
    if prelude:
        argv, here = [str(word) for word in (path, *command[len(start) :])], str(common.HERE)
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
    """The result of a job: of an earlier call, or of running it now."""
    key, _ = job
    return _done[key] if key in _done else run_now(job, ONE_CORE)


def run_now(job: Job, environment: dict[str, str] | None = None) -> Done:
    """The result of running a job now, whatever ran before; `get` returns it from now on."""
    key, command = job
    _done[key] = execute(command, environment)
    return _done[key]


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

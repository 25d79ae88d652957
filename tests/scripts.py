"""Running a lesson's script as a reader does, once per set of arguments, for every test that looks at its output."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import time

import common


@functools.cache
def run(lesson: str, *arguments: str, prelude: str = "") -> tuple[subprocess.CompletedProcess, float]:
    """The finished process and its seconds. Figures go to a scratch folder; `prelude` is code to run first."""
    script = common.HERE / f"{lesson}.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, *arguments, "--figure", folder]
        if prelude:
            argv, here = [str(word) for word in command[1:]], str(common.HERE)
            code = f"import runpy, sys; sys.argv[:] = {argv!r}; sys.path.insert(0, {here!r})"
            command = [sys.executable, "-c", f"{prelude}\n{code}\nrunpy.run_path(sys.argv[0], run_name='__main__')"]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=common.ROOT)
        return done, time.perf_counter() - start


def output_of(lesson: str, *arguments: str) -> str:
    """What the script prints; it must end well."""
    done, _ = run(lesson, *arguments)
    assert done.returncode == 0, f"{lesson} {' '.join(arguments)}: {done.stdout[-500:]}\n{done.stderr[-2000:]}"
    return done.stdout

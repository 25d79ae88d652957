"""What `incidents.holds` says of guards, each run in a forked child of a process that knows torch, and no engine.

A child imports the engine of its ticket in a tenth of the time that a new process takes for all that it needs besides.

    python tests/support/forked_guards.py NUMBER=FILE …        prints {"NUMBER=FILE": what is wrong, or null}
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

VLLM = Path(__file__).resolve().parent.parent.parent / "vllm"


def run_forked(command, timeout, **about):
    """As `subprocess.run` of `python -m vllm.learn.incidents …`."""
    from learn import incidents

    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if pid == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            signal.alarm(timeout)
            code = 1
            try:
                incidents.run_guard(command[3:])
                code = 0
            except BaseException as error:
                print(repr(error), file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(command, timeout)
        said.seek(0)
        return subprocess.CompletedProcess(command, code, said.read(), "")


def main(argv: list[str]) -> None:
    sys.path.insert(0, str(VLLM))
    import common  # first: it settles the device before torch is used

    import numpy  # noqa: F401  for the children
    import torch  # noqa: F401  for the children

    from learn import incidents

    said = {}
    incidents.subprocess.run = run_forked
    for pair in argv:
        number, _, file = pair.partition("=")
        said[pair] = incidents.holds(incidents.find(number), Path(file))
    assert common and not any(name.startswith("engine") for name in sys.modules), "the engine is loaded"
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])

"""A server of one's own, for as long as somebody looks at it.

Owns a child process that ends with its parent, whatever way that ends; called by tours, numbers and tests. It never
serves anybody itself. vLLM: `RemoteOpenAIServer` in `tests/utils.py`.
"""

from __future__ import annotations

import common

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def running_server(
    *flags: str, echo: Callable[[str], None] = lambda line: None, **environment: str
) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server as anybody would start it, on a free port: (its URL, its process). Stopped by SIGTERM at the end, its
    own if we are killed: then nobody holds the other end of its input."""
    quiet = [
        "--uvicorn-log-level",
        "warning",
    ]  # of its output nobody reads more than the start, and a pipe is soon full
    command = [sys.executable, str(common.HERE / "__main__.py"), "serve", "--port", "0", *quiet, *flags]
    environment = {**os.environ, "SERVE_UNTIL_EOF": "1", **environment}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin and process.stdout
    try:
        url = None
        for line in process.stdout:
            echo(line.rstrip())
            if line.startswith("Listening on "):
                url = line.split()[-1]
                break
        if url is None:
            raise common.CheckFailed(f"the server did not start: exit code {process.wait()}")
        yield url, process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdin.close()
        process.stdout.close()

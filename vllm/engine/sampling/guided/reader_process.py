"""A process that reads a stranger's schema or grammar first: there the library may hang or crash, and nobody else does.

Owns its command, its limits and what its end means; called by `structured_outputs`, which waits for it, and by the
queue, which may kill it. What it has read is never used: who is told that it went well reads again.
vLLM: `vllm/v1/structured_output/utils.py`, whose limit is a thread that is given up on.
"""

from __future__ import annotations

import common

import functools
import inspect
import json
import signal
import subprocess
import sys

from engine.sampling.guided import limits
from engine.sampling.guided.guidance import read_grammar


@functools.lru_cache(256)
def read_apart(kind: str, spec: str) -> None:
    """Have another process read it first: there the library may hang or crash, and nobody else does.

    (A few thousand rules, each naming the next, overflow its stack: no error that one could catch.) Raises InputError.
    """
    command, data = reading(kind, spec, limits.MAX_SECONDS)
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=limits.MAX_SECONDS)
        check_reading(kind, done.returncode, done.stdout, limits.MAX_SECONDS)
    except subprocess.TimeoutExpired:
        check_reading(kind, None, b"", limits.MAX_SECONDS)


def reading(kind: str, spec: str, seconds: float) -> tuple[list[str], bytes]:
    """The command of a process that reads a schema or grammar in `seconds` of a processor, and what to write to it."""
    code = inspect.getsource(read_grammar) + inspect.getsource(_in_the_other_process) + "_in_the_other_process()"
    command = [sys.executable, "-c", "from __future__ import annotations\n" + code]
    return command, json.dumps([seconds, limits.MAX_MEMORY, kind, spec]).encode()


def check_reading(kind: str, returncode: int | None, printed: bytes, seconds: float) -> None:
    """What came of such a process; a return code of None is one that was not waited for. Raises InputError, TooSlow."""
    about = f"structured_outputs: {kind}:"
    if returncode is None or returncode == -getattr(signal, "SIGPROF", 0):
        raise limits.TooSlow(f"{about} takes more than {seconds:g} s")
    error = printed.decode() if returncode == 0 else f"overflows the parser's stack, or {limits.MAX_MEMORY >> 20:,} MiB"
    if error:
        raise common.InputError(f"{about} {' '.join(error.split())[:300]}")


def _in_the_other_process() -> None:
    import json
    import sys
    import threading

    import llguidance

    seconds, memory, kind, spec = json.load(sys.stdin)
    try:
        import resource
        import signal

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor's time: then SIGPROF ends it
    except (ImportError, AttributeError, ValueError, OSError):
        pass  # a system without such limits: the other side looks at the clock

    def read(kind: str, spec: str) -> None:
        try:
            read_grammar(llguidance.LLTokenizer("byte"), kind, spec)
        except Exception as error:
            print(error or repr(error))

    threading.stack_size(1 << 20)  # an eighth of what an engine has: what fits here fits there
    threading.Thread(target=read, args=(kind, spec)).start()

"""Processes below one of ours, and whether they are gone. Where there is no /proc, nothing is alive."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path


def alive(pid):
    """A zombie, dead and not yet collected by whoever adopted it, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid):
    """All processes below one, where /proc says so."""
    found = []
    with contextlib.suppress(OSError):
        for line in subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout.splitlines():
            child, parent = map(int, line.split())
            if parent == pid:
                found += [child, *descendants(child)]
    return found


def wait_until_gone(pids):
    stop = time.monotonic() + 60
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < stop, f"left running: {left}"
        time.sleep(0.05)

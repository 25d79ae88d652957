"""`python -m vllm serve | bench | tune | replay …`, from the repository root: the lessons' commands."""

from __future__ import annotations

import sys

import common

COMMANDS = ("serve", "bench", "tune", "replay")


def main() -> None:
    """Raises InputError for a command that there is not."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in COMMANDS:
        raise common.InputError(
            f"python -m vllm: command {command!r}: must be one of {', '.join(COMMANDS)}; each has --help"
        )
    if command in ("bench", "tune"):
        from lab import bench  # here: to say that a command is wrong takes no torch

        return bench.main(sys.argv[1:])
    common.lesson({"serve": "06_serving", "replay": "11_preemption"}[command]).main(sys.argv[1:])


if __name__ == "__main__":
    common.run(main)

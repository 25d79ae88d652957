"""`python -m vllm serve | bench | tune | replay …`, from the repository root: the lessons' commands."""

from __future__ import annotations

import sys

import common

COMMANDS = {"serve": "06_serving", "bench": "06_serving", "tune": "06_serving", "replay": "11_preemption"}


def main() -> None:
    """Raises InputError for a command that there is not."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in COMMANDS:
        raise common.InputError(
            f"python -m vllm: command {command!r}: must be one of {', '.join(COMMANDS)}; each has --help"
        )
    common.lesson(COMMANDS[command]).main(sys.argv[1:])


if __name__ == "__main__":
    common.run(main)

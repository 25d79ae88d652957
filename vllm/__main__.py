"""`python -m vllm serve | proxy | bench | tune | replay | predict | learn | make-model …`, from the repository root."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `python vllm/__main__.py` has it there already

from engine import arguments

COMMANDS = ("serve", "proxy", "bench", "tune", "replay", "predict", "learn", "make-model")


def main() -> None:
    """Exits with one line for a command that there is not. A wrong flag of `serve` is found before torch is there."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in COMMANDS:
        names = ", ".join(COMMANDS)
        print(f"python -m vllm: command {command!r}: must be one of {names}; each has --help", file=sys.stderr)
        sys.exit(2)
    work = find_work(command)
    from lab import cli

    cli.run(work)


def find_work(command: str) -> Callable[[], Any]:
    """What the command line asks for."""
    if command in ("serve", "proxy"):
        if command == "serve":
            from engine.serving.cli import add_serve_command as add_command
        else:
            from engine.serving.proxy import add_proxy_command as add_command

        parser = arguments.Parser(prog="python -m vllm")
        add_command(parser.add_subparsers(dest="command"))
        args = parser.parse_args()
        return functools.partial(args.run, args)
    return functools.partial(run_in_lab, command)


def run_in_lab(command: str) -> None:
    """`bench`, `tune`, `replay`, `predict` and `learn` read their flags themselves."""
    if command == "replay":
        from lab import replay

        replay.main(sys.argv[2:])
    elif command == "predict":
        from lab import predict_command

        predict_command.main(sys.argv[2:])
    elif command == "make-model":
        from lab import make_model

        make_model.main(sys.argv[2:])
    elif command == "learn":
        from learn import cli as learning

        learning.main(sys.argv[2:])
    else:
        from lab import bench

        bench.main(sys.argv[1:])


if __name__ == "__main__":
    main()

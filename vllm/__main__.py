"""`python -m vllm serve | proxy | bench | tune | replay | learn | make-model …`, from the repository root."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `python vllm/__main__.py` has it there already

import common

from engine import arguments
from lab import cli

COMMANDS = ("serve", "proxy", "bench", "tune", "replay", "learn", "make-model")


def main() -> None:
    """Raises InputError for a command that there is not."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in ("serve", "proxy"):
        if command == "serve":
            from engine.serving.cli import add_serve_command as add_command
        else:
            from engine.serving.proxy import add_proxy_command as add_command

        parser = arguments.Parser(prog="python -m vllm")
        add_command(parser.add_subparsers(dest="command"))
        args = parser.parse_args()
        args.run(args)
    elif command in ("bench", "tune"):
        from lab import bench

        bench.main(sys.argv[1:])
    elif command == "replay":
        from lab import replay

        replay.main(sys.argv[2:])
    elif command == "make-model":
        from lab import make_model

        make_model.main(sys.argv[2:])
    elif command == "learn":
        from learn import cli as learning

        learning.main(sys.argv[2:])
    else:
        raise common.InputError(
            f"python -m vllm: command {command!r}: must be one of {', '.join(COMMANDS)}; each has --help"
        )


if __name__ == "__main__":
    cli.run(main)

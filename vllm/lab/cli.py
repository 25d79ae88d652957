"""What every script's command line has: flags, a first line, exit codes, and what is handed over to the page."""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from engine import registry
from engine.arguments import Parser, number
from lab import recorded


def folder(text: str) -> str:
    """An argparse type: a folder to write to, or what may become one."""
    path = Path(text).absolute()
    try:
        there = [path for path in (path, *path.parents) if path.exists()]
    except OSError as error:  # a name that is too long
        raise argparse.ArgumentTypeError(f"{text[:60]!r}: {error.strerror}") from None
    if wrong := [path for path in there if not path.is_dir()]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} is not a folder")
    if not os.access(there[0], os.W_OK):
        raise argparse.ArgumentTypeError(f"{there[0]} cannot be written to")
    return text


def file(text: str) -> str:
    """An argparse type: a file in a folder to write to, or what may become one."""
    folder(str(Path(text).absolute().parent))
    if os.path.isdir(text):  # False for a name that is too long
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    return text


def parser(doc: str | None, **kwargs: Any) -> Parser:
    """A parser with the flags that every lesson has; the lesson adds the knobs that its text talks about."""
    p = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
    p.add_argument("--bench", action="store_true", help="measure, and print the full table")
    p.add_argument(
        "--json", type=file, metavar="FILE", help="merge facts and measurements into FILE under this lesson's key"
    )
    p.add_argument("--figure", type=folder, metavar="DIR", help="draw the page's figures there")
    p.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="a local Llama-architecture folder or .gguf file, or a hub id (default: SmolLM2-135M-Instruct)",
    )
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run (default auto)")
    p.add_argument("--seed", type=number(int, 0, 2**31 - 1), default=0, help="seed of everything random (default 0)")
    return p


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Seed everything, print the machine line, return `machine()`. Raises InputError if the device is not here, or if
    nothing could be merged into `--json` in the end."""
    if args.device == "cuda" and not common.HAS_GPU:
        raise common.InputError("--device cuda: torch sees no GPU here; allowed on this machine: auto, cpu")
    if args.json:
        recorded.stored_object(args.json)
    torch.manual_seed(args.seed)
    m = common.machine()
    common.console().print(f"Machine: {m['name']}, {m['device']}, {m['threads']} threads, torch {m['torch']}; "
                    f"kernels: {m['kernels']}")  # fmt: skip
    return m


NUMBERS = common.ROOT / "lessons" / "numbers"


def numbers(name: str) -> ModuleType:
    """`lessons/numbers/NAME.py`: what the page of lesson `name` simulates, quotes, draws and measures."""
    return registry.load(f"numbers.{name}", NUMBERS / f"{name}.py")


def hand_over(name: str, args: argparse.Namespace) -> None:
    """What `--bench`, `--figure` and `--json` ask for is the page's business: its numbers do it."""
    if not (args.bench or args.figure or args.json):
        return
    page = numbers(name)
    bench = {"bench": page.measure(args)} if args.bench else {}
    if args.figure:
        page.draw(args.figure)
    if args.json:
        recorded.merge_json(args.json, name, {"machine": common.machine(), "facts": page.facts()} | bench)


def run(main: Callable[[], Any]) -> None:
    """Call a script's `main` and turn expected failures into one line and an exit code: 2 bad input, 1 wrong result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: whatever was started on the way is ended, too
    try:
        main()
    except common.InputError as error:
        _exit(2, f"error: {error}")
    except common.CheckFailed as error:
        _exit(1, f"CHECK FAILED: {error}")
    except KeyboardInterrupt:
        _exit(130, "interrupted")
    except BrokenPipeError:  # the reader closed the pipe (`| head`): not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit(code: int, message: str) -> None:
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(code)

"""`bench`: its arguments, and a run whose numbers can be told by hand."""

from __future__ import annotations

import argparse

from engine import arguments
from lab.bench import add_bench_commands
from lab.records import Record


def bench_args(*argv: str) -> argparse.Namespace:
    """What `bench` reads from these words; nobody listens at its URL."""
    parser = arguments.Parser()
    add_bench_commands(parser.add_subparsers())
    return parser.parse_args(["bench", "--base-url", "http://127.0.0.1:9", "--model", "m", *argv])


def hand_made() -> list[Record]:
    """Two answered requests, one of a single token, one that failed after its first token, very fast."""
    return [
        Record(0.0, 0.5, 3.5, [1.0, 1.5, 3.5], 10, 5),  # TTFT 0.5, ITL 0.5 and 2, TPOT 2.5/4, E2EL 3
        Record(1.0, 1.0, 2.0, [2.0], 20, 1),  # TTFT = E2EL = 1
        Record(1.0, 1.0, 1.1, [1.05], 30, 1, error="truncated"),
    ]

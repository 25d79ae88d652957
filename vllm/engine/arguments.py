"""Command lines whose errors are one line, and the types of their values.

Owns no flag; `serve`, the scripts and the lab's commands parse with it. It never exits but from a parser. vLLM:
`vllm/utils/argparse_utils.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import urllib.parse
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the flags)\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """argparse reads a value before it looks at the choices: a text that is no number must hear of them, too."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.choices is None:
                raise
            allowed = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {arg_string!r} (choose from {allowed})") from None


def number(kind: type = int, low: float | None = None, high: float | None = None) -> Callable[[str], Any]:
    """An argparse type: an int or float within [low, high]."""
    range_text = f"from {low} to {high}" if high is not None else f"of at least {low}" if low is not None else ""
    what = f"{'a whole number' if kind is int else 'a number'} {range_text}".strip()

    def parse(text: str) -> Any:
        try:
            value = kind(text)
            if math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high):
                return value
        except (ValueError, OverflowError):  # no number; a whole one that no float reaches
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


def url(text: str) -> str:
    """An argparse type: where an HTTP server is, without a slash at the end."""
    with contextlib.suppress(ValueError):  # a port that is none
        parts = urllib.parse.urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return text.rstrip("/")
    raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT (or https://), with a port from 1 to 65535")

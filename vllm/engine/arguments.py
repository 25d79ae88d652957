"""Command lines whose errors are one line, and the types of their values.

Owns no flag; `serve`, the scripts and the lab's commands parse with it. It never exits but from a parser. vLLM:
`vllm/utils/argparse_utils.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and which takes `--max_num_seqs` for `--max-num-seqs`."""

    def __init__(
        self,
        *args: Any,
        prepare: Callable[[Parser, list[str]], list[str]] | None = None,
        elsewhere: Callable[[str], str | None] | None = None,
        **kwargs: Any,
    ) -> None:
        """`prepare(parser, words)` makes of a command line the one to be read. `elsewhere(flag)` says, of a flag that
        is not here, why; None: it knows of none, "": it may be left out."""
        super().__init__(*args, **kwargs)
        self.prepare, self.elsewhere = prepare, elsewhere

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  argparse declares it three times
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's, but nothing is left over: an unknown word is an error here, where its flags are known."""
        words = [with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        words = [word for word in (self.prepare(self, words) if self.prepare else words) if not self.needless(word)]
        found, rest = super().parse_known_args(words, namespace)
        if len(rest) == 1 and not rest[0].startswith("-"):  # Python 3.11 gives up on `[MODEL]` at the first flag
            for action in self._get_positional_actions():
                if action.nargs == "?" and getattr(found, action.dest, action.default) is action.default:
                    setattr(found, action.dest, rest.pop())
                    break
        if rest:
            self.error(self.unknown(rest[0]))
        return found, []

    def option(self, word: str) -> argparse.Action | None:
        """The flag that a word begins with, whatever stands behind `=` or a dot."""
        return self._option_string_actions.get(word.partition("=")[0].partition(".")[0])

    def needless(self, word: str) -> bool:
        """Is it a flag that is not here, and that may be left out? Exits if it is one that may not: argparse might take
        it for the beginning of another."""
        if not self.elsewhere or not word.startswith("-") or self.option(word):
            return False
        flag = word.partition("=")[0].partition(".")[0]
        if reason := self.elsewhere(flag):
            self.error(f"{flag}: {reason}")
        return reason is not None

    def unknown(self, word: str) -> str:
        """What is wrong with a word that no flag of ours took."""
        flag = word.partition("=")[0].partition(".")[0]
        if not word.startswith("-"):
            return f"unrecognized argument: {word}"
        near = difflib.get_close_matches(flag, self._option_string_actions, 1, 0.7)
        return f"{flag}: no such flag" + (f"; did you mean {near[0]}?" if near else "")

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


def with_dashes(word: str) -> str:
    """`--max_num_seqs=8` as `--max-num-seqs=8`; a value, and the keys behind a dot, stay as they are."""
    return re.sub(r"^--[^=.]+", lambda match: match[0].replace("_", "-"), word)


class Switch(argparse.BooleanOptionalAction):
    """`--enable-x`, `--no-enable-x` and, as in vLLM, `--disable-x`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self.option_strings = [*self.option_strings, *opposites(option_strings)]

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        off = option_string and (
            option_string.startswith("--no-") or option_string in opposites(self.option_strings[:1])
        )
        setattr(namespace, self.dest, not off)

    def format_usage(self) -> str:
        return " | ".join(self.option_strings[:2])


def opposites(flags: Iterable[str]) -> list[str]:
    """`--disable-x` of `--enable-x`, and the other way round."""
    pairs = {"--enable-": "--disable-", "--disable-": "--enable-"}
    return [pairs[start] + flag.removeprefix(start) for flag in flags for start in pairs if flag.startswith(start)]


def human_readable_int(text: str) -> int:
    """An argparse type, with vLLM's units: 4k is 4,000 and 4K is 4,096; likewise m and M, g and G, t and T. Before a
    small letter, decimals are allowed: 25.6k."""
    match = re.fullmatch(r"\s*(?:(-?\d+)([KMGT]?)|(\d+\.?\d*)([kmgt]))\s*", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number like 4096, 4k (4,000) or 4K (4,096)")
    whole, binary, decimal, thousands = match.groups()
    if decimal:
        return round(float(decimal) * 1000 ** ("kmgt".index(thousands) + 1))
    return int(whole) * 1024 ** (" KMGT".index(binary) if binary else 0)


def human_readable_int_or_auto(text: str) -> int:
    """The same, or auto, which is -1."""
    return -1 if text.strip().lower() == "auto" else human_readable_int(text)


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

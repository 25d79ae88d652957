"""Calls as Python writes them: `[f(city="Rome"), g(days=[1, 2])]`, as Llama 3.2 and ToolACE were taught.

Owns what of one answer has not been understood; one for each answer, called by `tool_calls` with every piece. It never
runs what it reads: arguments are literals, and a list that has others is text.
vLLM: `vllm/tool_parsers/pythonic_tool_parser.py`, which reads a whole answer otherwise than a streamed one.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from typing import Any

NAME = re.compile(r"[A-Za-z_][\w.]*")
NAMES = {"true": True, "false": False, "null": None}  # as JSON writes them
ESCAPES = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}  # what Python has in no string of one line
KEYWORD = re.compile(rf"([(,]\s*)({'|'.join(keyword.kwlist)})(?=\s*=(?!=))")  # a parameter may be called `from`


class PythonicParser:
    """A list of calls is one if it begins the answer; whatever follows it is text."""

    def __init__(self) -> None:
        self.unread = ""  # while the answer may be a list: all of it
        self.done = self.behind = False  # what comes is text; but blanks right behind the list are none
        self.at = 0  # how far the list was looked at
        self.depth, self.quote, self.escaped = 0, "", False

    def read(self, text: str, final: bool) -> tuple[str, list[tuple[str, str]]]:
        """Text, and name and arguments of every call before it. `final`: no more will come."""
        if self.done:
            text = text.lstrip() if self.behind else text
            self.behind = self.behind and not text
            return text, []
        self.unread += text
        end = self.end()
        if end is None and not final and self.may_begin():
            return "", []
        calls = None if end is None else calls_in(self.unread[:end])
        rest, self.done, self.unread = self.unread if calls is None else self.unread[end:].lstrip(), True, ""
        self.behind = calls is not None and not rest
        return rest, calls or []

    def may_begin(self) -> bool:
        """Whether the answer may yet turn out to be a list of calls."""
        return re.fullmatch(rf"\s*(\[\s*({NAME.pattern}\s*(\(.*)?)?)?", self.unread, re.DOTALL) is not None

    def end(self) -> int | None:
        """Where the list that begins the answer ends; None as long as it does not."""
        while self.at < len(self.unread):
            char, self.at = self.unread[self.at], self.at + 1
            if self.quote:
                self.quote = "" if char == self.quote and not self.escaped else self.quote
                self.escaped = char == "\\" and not self.escaped
            elif char in "\"'":
                self.quote = char
            elif char in "[({":
                self.depth += 1
            elif char in "])}":
                self.depth -= 1
                if self.depth <= 0:
                    return self.at
        return None


def calls_in(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments, the latter as JSON, of a list of calls; None if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\d" in a model's string
            tree = ast.parse(as_python(text.strip()), mode="eval").body
        if isinstance(tree, ast.List) and tree.elts:
            return [call_of(node) for node in tree.elts]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        pass
    return None


def as_python(text: str) -> str:
    """The same list with line breaks in strings escaped, and parameters that are called as Python's words renamed."""
    parts = re.split(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""", text, flags=re.DOTALL)
    strings = [re.sub(r"[\n\r\0]", lambda found: ESCAPES[found[0]], part) for part in parts[1::2]]
    between = [KEYWORD.sub(r"\1_\2_", part) for part in parts[::2]]
    return "".join(a + b for a, b in zip(between, [*strings, ""]))


def call_of(node: ast.expr) -> tuple[str, str]:
    """Name and arguments of one call. Raises ValueError if it is none, or has an argument without a name."""
    if not isinstance(node, ast.Call) or node.args or not NAME.fullmatch(function := ast.unparse(node.func)):
        raise ValueError("no call by names")
    arguments = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise ValueError("** names no argument")
        inner = argument.arg[1:-1]
        name = inner if argument.arg == f"_{inner}_" and keyword.iskeyword(inner) else argument.arg
        arguments[name] = value_of(argument.value)
    said = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return function, said.encode(errors="backslashreplace").decode()


def value_of(node: ast.expr) -> Any:
    """A literal's value, with JSON's names for true, false and null. Raises ValueError."""
    if isinstance(node, ast.Name) and node.id in NAMES:
        return NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [value_of(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key that is no text")
        return dict(zip(keys, map(value_of, node.values)))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no value of JSON")
    return value

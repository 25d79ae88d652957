"""What the commands that break our code on purpose share: the changed text, and the lists of changes that may live."""

from __future__ import annotations

import ast
from pathlib import Path


def replaced(source: str, node: ast.AST, new: ast.AST) -> str:
    """The source with `new` in the place of a node, every other character as it is."""
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    text = ast.unparse(ast.fix_missing_locations(new)).replace("\n", "\n" + " " * node.col_offset)
    closed = isinstance(new, ast.stmt | ast.Name | ast.Call | ast.Subscript | ast.Attribute) or text.isdigit()
    if not closed or (text.isdigit() and tail.startswith(b".")):
        text = f"({text})"
    return b"".join([*lines[:first], head, text.encode(), tail, *lines[last + 1 :]]).decode()


def first_difference(source: str, text: str) -> tuple[str, str]:
    """The first line that differs, before and after, without indentation."""
    pairs = zip(source.splitlines(), text.splitlines())
    return next((a.strip(), b.strip()) for a, b in pairs if a != b)


def listed(path: Path) -> dict[tuple[str, str, str], str]:
    """A list of changes, as {(place, line before, line after): reason}.

    A reason is a paragraph's first line, then places, then - and + lines.
    """
    found, reason, place, before = {}, "", "", ""
    for line in path.read_text().splitlines():
        if line.startswith("- "):
            before = line[2:]
        elif line.startswith("+ "):
            found[place, before, line[2:]] = reason
        elif line.startswith("#"):
            reason = line
        elif line:
            place = line
    return found

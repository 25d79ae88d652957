"""Scripts with holes: parts cut out by name, put back by name, and told apart.

Owns how a text is cut and completed; called by the workbook and the grader. It never reads or writes a file: texts go
in, texts come out. vLLM has nothing like it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import textwrap
from collections.abc import Iterable

from learn.step import Step

WIDTH = 120

Part = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Missing(LookupError):
    """A text has no part of that name, or no such statement."""


parsed = functools.lru_cache(64)(ast.parse)  # who grades asks for many parts of one text


def part(text: str, name: str) -> Part:
    """The function, `Class.method` or class. Raises Missing, and SyntaxError for a text that is no Python."""
    body: list[ast.stmt] = parsed(text).body
    found: Part | None = None
    for word in name.split("."):
        found = next((x for x in body if isinstance(x, Part) and x.name == word), None)
        if found is None:
            raise Missing(name)
        body = found.body
    assert found
    return found


def lines_of(node: Part) -> tuple[int, int]:
    """[first, last) in lines from 0, decorators included."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    assert node.end_lineno
    return first - 1, node.end_lineno


def source(text: str, name: str) -> str:
    """A part's own lines."""
    first, last = lines_of(part(text, name))
    return "\n".join(text.splitlines()[first:last])


def digest(text: str, name: str) -> str:
    """Tells whether a part is still the same program; comments and layout do not count."""
    return hashlib.sha256(ast.dump(part(text, name)).encode()).hexdigest()[:16]


def raising(step: Step) -> str:
    """The statement that stands in a hole."""
    return f'raise NotImplementedError("{step.id}")'


def is_open(text: str, step: Step) -> bool:
    """Is there still a hole of this step?"""
    return raising(step) in source(text, step.cut)


# --- Cutting ----------------------------------------------------------------------------------------------------------


def with_holes(text: str, steps: Iterable[Step]) -> str:
    """A script without the parts of these steps; signatures, docstrings, shapes and formulas stay."""
    lines, found = text.splitlines(), []
    for step in steps:
        for first, last, indent, told in holes(text, step):
            filling = [indent + raising(step)]
            if told:
                about = textwrap.wrap(f"{step.id}: {step.task}", WIDTH - len(indent) - 2)
                filling[:0] = [f"{indent}# {line}" for line in about]
            found.append((first, last, filling))
    return replaced(lines, found)


def replaced(lines: list[str], found: Iterable[tuple[int, int, list[str]]]) -> str:
    """The text with other lines in place of [first, last), of places that do not overlap."""
    for first, last, filling in sorted(found, reverse=True):
        lines[first:last] = filling
    return "\n".join(lines) + "\n"


def holes(text: str, step: Step) -> list[tuple[int, int, str, bool]]:
    """(first line, end, indentation, whether it tells the task) of each, from the top."""
    node = part(text, step.cut)
    if step.first:
        return [(*statements(text, node, step), True)]
    functions = [node]
    if isinstance(node, ast.ClassDef):
        defined = [x for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
        functions = [x for x in defined if x.name != "__init__"]
    found = []
    for i, function in enumerate(functions):
        has_doc = ast.get_docstring(function) is not None
        body = function.body[1:] if has_doc else function.body
        if not body:
            continue  # a docstring alone: nothing to write
        before = function.body[0].end_lineno if has_doc else body[0].lineno - 1
        assert before is not None and function.end_lineno
        found.append((before, function.end_lineno, " " * body[0].col_offset, i == 0))
    return found


def statements(text: str, node: Part, step: Step) -> tuple[int, int, str]:
    """Where the step's statements stand. Raises Missing unless exactly one run of statements begins so."""
    lines, found = text.splitlines(), []
    for owner in ast.walk(node):
        for block in (getattr(owner, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(block, list):
                continue
            begins = [lines[x.lineno - 1].strip() for x in block]
            for i in (i for i, line in enumerate(begins) if line.startswith(step.first)):
                ends = [j for j in range(i, len(block)) if begins[j].startswith(step.last or step.first)]
                if ends:
                    last = block[ends[0]].end_lineno
                    found.append((block[i].lineno - 1, last, " " * block[i].col_offset))
    if len(found) != 1:
        raise Missing(f"{step.cut}: {len(found)} statements begin with {step.first!r}")
    return found[0]


# --- Completing -------------------------------------------------------------------------------------------------------


def completed(text: str, given: str, names: Iterable[str]) -> str:
    """The reader's text, with the given script's own lines in place of these parts. Raises Missing."""
    return replaced(
        text.splitlines(), [(*lines_of(part(text, name)), source(given, name).splitlines()) for name in names]
    )


def silenced(text: str, names: Iterable[str], say: str) -> str:
    """The text with functions that raise instead of answering."""
    for name in names:
        node = part(text, name)
        body, last = node.body[0], node.end_lineno
        lines = text.splitlines()
        lines[body.lineno - 1 : last] = [" " * body.col_offset + f"raise RuntimeError({say!r})"]
        text = "\n".join(lines) + "\n"
    return text

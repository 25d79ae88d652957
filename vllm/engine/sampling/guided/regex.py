"""Python's syntax of regular expressions, read into a tree over bytes.

Owns what is supported and the words for what is not; called when a pattern is compiled. It never guesses: what is not
regular, or not supported, is refused by its name.
vLLM: `vllm/v1/structured_output/backend_outlines.py`, whose library reads patterns with the same module of Python.
"""

from __future__ import annotations

import common

import re
from collections.abc import Iterable
from re import _constants, _parser  # pyright: ignore[reportAttributeAccessIssue]  Python's own, without stubs
from typing import Any

from engine.sampling.guided import limits
from engine.sampling.guided.characters import Ranges, characters, complement
from engine.sampling.guided.expressions import Node, alt, concat, repeat

CLASSES = {"DIGIT": [(48, 57)], "SPACE": [(9, 13), (32, 32)], "WORD": [(48, 57), (65, 90), (95, 95), (97, 122)]}
CLASSES |= {f"NOT_{name}": complement(ranges) for name, ranges in CLASSES.items()}
REFUSED = {
    "AT": "a boundary, or an anchor but ^ in front and $ at the end,", "ASSERT": "lookaround",
    "ASSERT_NOT": "lookaround", "GROUPREF": "a backreference", "GROUPREF_EXISTS": "a conditional",
    "ATOMIC_GROUP": "an atomic group", "POSSESSIVE_REPEAT": "a possessive quantifier",
}  # fmt: skip


def parse_regex(pattern: str) -> Node:
    r"""Python's syntax, as far as it describes a regular language; the whole answer must match. Raises InputError.

    Literals, `.`, classes and negated ones, escapes (\d \w \s as under re.ASCII), groups, `|`, `*`, `+`, `?`, `{m,n}`;
    a lazy quantifier matches the same strings as a greedy one. `^` in front and `$` at the end are implied. The rest is
    refused by name. The reading is Python's own, `re._parser`, from where vLLM's Outlines backend takes it, too.
    """
    try:
        if len(pattern) > limits.MAX_PATTERN:
            raise ValueError(f"{len(pattern):,} characters, at most {limits.MAX_PATTERN:,} are allowed")
        parsed = _parser.parse(pattern, re.ASCII)
        if parsed.state.flags != re.ASCII:
            raise ValueError("flags are not supported")
        items = list(parsed)
        items = items[bool(items) and items[0] == (_constants.AT, _constants.AT_BEGINNING) :]
        items = items[: len(items) - (bool(items) and items[-1] == (_constants.AT, _constants.AT_END))]
        return translate(items, 0)
    except RecursionError:
        raise common.InputError("nests too deep") from None
    except (ValueError, OverflowError, re.error) as error:
        raise common.InputError(str(error)) from None


def translate(items: Iterable[tuple[Any, Any]], depth: int) -> Node:
    """What Python has read, as our tree. Raises ValueError."""
    if depth > limits.MAX_DEPTH:
        raise ValueError(f"nests more than {limits.MAX_DEPTH} deep")
    parts: list[Node] = []
    for operation, value in items:
        match str(operation), value:
            case (("LITERAL" | "NOT_LITERAL" | "ANY" | "IN"), _):
                parts.append(characters(code_points(value if str(operation) == "IN" else [(operation, value)])))
            case "BRANCH", (_, branches):
                parts.append(alt(translate(branch, depth + 1) for branch in branches))
            case "SUBPATTERN", (_, 0, 0, inner):
                parts.append(translate(inner, depth + 1))
            case (("MAX_REPEAT" | "MIN_REPEAT"), (low, high, inner)):
                limit = None if high is _constants.MAXREPEAT else high
                parts.append(repeat(translate(inner, depth + 1), low, limit))
            case name, _:
                raise ValueError(f"{REFUSED.get(name, 'a flag')} is not supported")
    return concat(parts)


def code_points(items: Iterable[tuple[Any, Any]]) -> Ranges:
    """What a class, a literal or a dot stands for."""
    ranges, names = [], [str(operation) for operation, _ in items]
    for name, (_, value) in zip(names, items):
        if name == "CATEGORY":
            ranges += CLASSES[str(value).removeprefix("CATEGORY_")]
        elif name != "NEGATE":
            ranges.append(value if name == "RANGE" else (10, 10) if name == "ANY" else (value, value))
    return ranges if {"NEGATE", "ANY", "NOT_LITERAL"}.isdisjoint(names) else complement(ranges)

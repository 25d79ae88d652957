"""Tickets: what each says of the engine is true, and a guard tells the engine of the ticket from the sound one."""

from __future__ import annotations

import common

import ast
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections import Counter

import pytest

from learn import incidents, tickets

GUARDS = common.ROOT / "tests" / "learn" / "guards"
CHANGED = [incident for incident in tickets.ALL if incident.old]
by_ticket = pytest.mark.parametrize("incident", tickets.ALL, ids=lambda x: f"{x.number:02}")
by_change = pytest.mark.parametrize("incident", CHANGED, ids=lambda x: f"{x.number:02}")


def text_of(file):
    return (common.HERE / "engine" / file).read_text(encoding="utf-8")


def function_at(text, start, end):
    """The function, as `functions` names it, that these characters lie in; None: they lie in none, or in two."""
    first, last = text.count("\n", 0, start) + 1, text.count("\n", 0, end) + 1
    for node in ast.parse(text).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in members:
            is_function = isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and member.lineno <= first and last <= member.end_lineno:
                return prefix + member.name
    return None


def test_numbers_have_no_gaps():
    files = [importlib.import_module(f"learn.tickets.{found.name}") for found in pkgutil.iter_modules(tickets.__path__)]
    assert sorted(x.number for file in files for x in file.TICKETS) == [x.number for x in tickets.ALL]
    for file in files:
        numbers = [incident.number for incident in file.TICKETS]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_some_are_no_bug():
    assert len(tickets.ALL) - len(CHANGED) >= len(tickets.ALL) // 6


@by_ticket
def test_a_ticket_can_be_read(incident):
    lines = incident.evidence.strip("\n").splitlines()
    assert 3 <= len(lines) <= 25 and max(map(len, lines)) <= 100
    assert incident.title and incident.why.strip() and incident.lesson in {f"{n:02}" for n in range(1, 13)}
    assert incident.ticket.count(".") + incident.ticket.count("?") >= 2


@by_ticket
def test_there_is_much_to_choose_from(incident):
    assert len(set(incident.suspects)) == len(incident.suspects) >= 3
    names = incidents.functions(incident)
    assert len(names) >= 25
    # Two with one name (a property and its setter) could not be told apart.
    assert incident.cause == "none" or Counter(names)[incident.cause] == 1


@by_ticket
def test_a_change_stands_once_and_in_the_function_that_is_named(incident):
    if not incident.old:
        assert incident.cause == "none" and not incident.new
        return
    file, _, function = incident.cause.partition(":")
    text = text_of(file)
    assert text.count(incident.old) == 1 and incident.new != incident.old
    start = text.index(incident.old)
    assert function_at(text, start, start + len(incident.old.rstrip())) == function
    ast.parse(text.replace(incident.old, incident.new))


@by_change
def test_evidence_does_not_print_the_change(incident):
    for line in incident.new.splitlines():
        assert len(line.strip()) < 12 or line.strip() not in incident.evidence + incident.ticket


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """What is wrong with each ticket's guard, and with an empty one and one that always fails, of the first ticket."""
    if not hasattr(os, "fork"):
        pytest.skip("guards run in forked children here")
    folder = tmp_path_factory.mktemp("guards")
    (folder / "empty.py").write_text("def guard():\n    pass\n")
    (folder / "never.py").write_text("def guard():\n    assert False\n")
    pairs = [f"{x.number}={GUARDS / f'{x.number:02}.py'}" for x in CHANGED]
    pairs += [f"{CHANGED[0].number}={folder / name}" for name in ("empty.py", "never.py")] if CHANGED else []
    command = [sys.executable, str(common.ROOT / "tests" / "support" / "forked_guards.py"), *pairs]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return {(int(pair.partition("=")[0]), pair.rpartition("/")[2]): problem for pair, problem in said.items()}


@pytest.mark.slow
@by_change
def test_a_guard_holds(incident, verdicts):
    assert verdicts[incident.number, f"{incident.number:02}.py"] is None


@pytest.mark.slow
def test_a_guard_that_notices_nothing_or_everything_is_refused(verdicts):
    number = CHANGED[0].number
    assert "passes on the engine of the ticket" in verdicts[number, "empty.py"]
    assert "does not pass on the sound engine" in verdicts[number, "never.py"]


@by_change
def test_a_guard_is_short_and_needs_the_engine_alone(incident):
    text = (GUARDS / f"{incident.number:02}.py").read_text()
    (guard,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "guard"]
    assert guard.end_lineno - guard.lineno <= 20
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
    assert all(module.partition(".")[0] in {"engine", "torch"} or module == "__future__" for module in modules)


def test_the_place_of_a_change_is_found():
    text = "class A:\n    x = 1\n    def f(self):\n        return 2\ndef g():\n    return 3\n"
    assert [function_at(text, text.index(n), text.index(n) + 1) for n in "123"] == [None, "A.f", "g"]

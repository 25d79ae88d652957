"""Tickets: name the cause, then write a guard that fails on the engine of the ticket and passes on the sound one.

Owns how they are told and how a guard is graded, in two processes; called by the command line. It never changes a file
of the engine: the change exists in the one process that imports it. vLLM has nothing like it.

    python -m vllm.learn.incidents NUMBER FILE sound|broken        runs a guard in one of the two engines
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from learn import tickets
from learn.incident import Incident
from learn.prose import paragraph

NOT_IN_A_GUARD = {"open", "exec", "eval", "__import__", "inspect", "importlib", "learn", "sys", "dis", "linecache"}
LIMIT = 60  # seconds of a guard, imports included

GUARD = '''"""Incident {number}: {title}

`guard()` must raise (an assert will do) on the engine of the ticket, and return on the sound one.
Import what you need from `engine`, as `from engine.core.block_pool import BlockPool`.
"""


def guard():
    raise NotImplementedError("incident {number}")
'''


@functools.cache
def functions(incident: Incident) -> list[str]:
    """What can be named: every function of the suspected files, by file."""
    found = []
    for file in incident.suspects:
        tree = ast.parse((common.HERE / "engine" / file).read_text(encoding="utf-8"))
        for node in tree.body:
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            names = [x.name for x in members if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
            found += [f"{file}:{prefix}{name}" for name in names]
    return found


def find(text: str) -> Incident:
    """Raises InputError."""
    for incident in tickets.ALL:
        if text == str(incident.number):
            return incident
    raise common.InputError(f"incident {text}: there are 1 to {len(tickets.ALL)}")


def solved(book: Any) -> int:
    return sum(bool(entry.get("solved")) for entry in book.progress["incidents"].values())


def main(book: Any, which: str | None, cause: str | None, guard: bool) -> None:
    """Raises InputError, and CheckFailed for a wrong cause and for a guard that does not hold."""
    if which is None:
        rows = [(f"{x.number:2} {x.title}", state(book, x)) for x in tickets.ALL]
        common.table(("incident", ""), rows)
        common.say("learn incident 7 tells a ticket, --cause names the cause, --guard grades my/incident_07.py")
        return
    incident = find(which)
    if cause is not None:
        name(book, incident, cause)
    elif guard:
        grade(book, incident)
    else:
        tell(incident)


def state(book: Any, incident: Incident) -> str:
    entry = book.progress["incidents"].get(str(incident.number), {})
    return "solved" if entry.get("solved") else "cause found, guard open" if entry.get("cause") else ""


def tell(incident: Incident) -> None:
    common.heading(f"Incident {incident.number}: {incident.title}")
    paragraph(incident.ticket)
    common.console().print()
    common.console().print(incident.evidence.strip("\n"))
    common.heading("Where is it? One of these, in vllm/engine/, or `none`: the engine does what it should")
    by_file: dict[str, list[str]] = {}
    for place in functions(incident):
        file, _, function = place.partition(":")
        by_file.setdefault(file, []).append(function)
    for file, names in by_file.items():
        paragraph(f"{file}: {', '.join(names)}")
    common.say(f"As: uv run python -m vllm learn incident {incident.number} --cause {functions(incident)[0]}")


def name(book: Any, incident: Incident, cause: str) -> None:
    """Raises CheckFailed for another function than the changed one, InputError for one that is not in the list."""
    if cause != "none" and cause not in functions(incident):
        raise common.InputError(f"--cause {cause}: is not in the list; learn incident {incident.number} prints it")
    entry = book.progress["incidents"].setdefault(str(incident.number), {})
    if cause != incident.cause:
        entry["tries"] = entry.get("tries", 0) + 1
        book.save()
        raise common.CheckFailed(f"incident {incident.number}: {cause} is not it")
    entry["cause"] = True
    common.say(f"✓ {cause}")
    paragraph(incident.why)
    if incident.source:
        common.say(f"After {incident.source}")
    if not incident.old:
        entry["solved"] = True
        book.save()
        return
    book.save()
    path = guard_file(book, incident)
    if not path.exists():
        path.write_text(GUARD.format(number=incident.number, title=incident.title), encoding="utf-8")
    common.say(f"Now keep it out: write `guard()` in my/{path.name}, then learn incident {incident.number} --guard")


def guard_file(book: Any, incident: Incident) -> Path:
    return book.folder / f"incident_{incident.number:02}.py"


def grade(book: Any, incident: Incident) -> None:
    """Raises CheckFailed."""
    path = guard_file(book, incident)
    if not path.is_file():
        raise common.InputError(f"incident {incident.number}: name the cause first; then there is a guard to write")
    problem = holds(incident, path)
    if problem:
        raise common.CheckFailed(f"incident {incident.number}: {problem}")
    book.progress["incidents"].setdefault(str(incident.number), {})["solved"] = True
    book.save()
    common.say("✓ It fails on the engine of the ticket, and passes on the sound one.")


def holds(incident: Incident, guard: Path) -> str | None:
    """What is wrong with a guard, or None. It may not read the engine's text: a guard looks at what the engine does."""
    try:
        tree = ast.parse(guard.read_text(encoding="utf-8"))
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            words |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            words.add((node.module or "").split(".")[0])
    if cheat := words & NOT_IN_A_GUARD:
        return f"{min(cheat)}: a guard looks at what the engine does, not at its text"
    for engine, wanted in (("sound", True), ("broken", False)):
        command = [sys.executable, "-m", "vllm.learn.incidents", str(incident.number), str(guard.absolute()), engine]
        try:
            done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True, timeout=LIMIT)
            code, told = done.returncode, done.stdout.strip() or done.stderr.strip()
        except subprocess.TimeoutExpired:
            code, told = 3, f"it takes more than {LIMIT} s"  # an engine that hangs is noticed as well
        if wanted and code != 0:
            return f"it does not pass on the sound engine: {told[-400:]}"
        if not wanted and code == 0:
            return "it passes on the engine of the ticket, too"
    return None


# --- The engine of the ticket -----------------------------------------------------------------------------------------


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module of the engine with a ticket's change in it."""

    def __init__(self, incident: Incident) -> None:
        file = incident.cause.partition(":")[0]
        self.path = common.HERE / "engine" / file
        self.name = "engine." + file.removesuffix(".py").replace("/", ".")
        self.change = incident.old, incident.new

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)  # type: ignore[arg-type]  # ours

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        text = self.path.read_text(encoding="utf-8")
        times = text.count(self.change[0])
        assert times == 1, f"the ticket's lines stand {times} times in {self.name}"
        exec(compile(text.replace(*self.change), str(self.path), "exec"), module.__dict__)


def install(incident: Incident) -> None:
    """From now on, this process imports the engine of the ticket."""
    sys.meta_path.insert(0, Changed(incident))


def run_guard(argv: Sequence[str]) -> None:
    number, file, engine = argv
    incident = find(number)
    if engine == "broken":
        assert not any(name.startswith("engine.core") for name in sys.modules), "the engine is loaded already"
        install(incident)
    spec = importlib.util.spec_from_file_location("guard", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        module.guard()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    run_guard(sys.argv[1:])

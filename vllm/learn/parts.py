"""The reader's parts for the engine: which have passed, which go together, and the files that `--plug` names.

Owns `my/plugged/`: scripts with the reader's text of every step that has passed, and the lesson's of the others. Called
by `beside.py`. It never grades a part, and changes nothing of the engine. vLLM: `--scheduler-cls`, and the plugins of
`vllm/plugins/__init__.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine import registry
from engine.lora.files import SHIPPED
from learn import starter, steps
from learn.fits import FITS, as_it_is
from learn.step import Step
from learn.workbook import Workbook, given

ADAPTERS = ("pirate", "json", "report")  # that come with the engine
NO_PREFIXES = ("02", "04", "10")  # lessons whose pool, or scheduler, knows no prefix cache
NOT_WITH_A_SCHEDULER = {"rejection": "drafts", "lora": "adapters"}  # of which a lesson's scheduler knows nothing


@dataclass(frozen=True)
class Part:
    """An object of a lesson in a seam, and the step by which it became the reader's."""

    seam: str
    name: str
    step: Step

    @property
    def lesson(self) -> str:
        return self.step.id[:2]


def passed(book: Workbook) -> list[Part]:
    """One for each seam, of the last lesson that has one and whose step has passed. Raises InputError if none has."""
    found = {}
    for number in steps.FILES:
        for step in steps.of(number):
            if book.has_passed(step):
                found |= {seam: Part(seam, name, step) for seam, name in step.plugs}
    if not found:
        first = next(step for number in steps.FILES for step in steps.of(number) if step.plugs)
        raise common.InputError(f"none of your parts fills a seam of the engine yet: step {first.id} is the first")
    return list(found.values())


def chosen(parts: Sequence[Part], seams: Sequence[str]) -> list[Part]:
    """Those in the seams that are named. Raises InputError for one that none of them fills, or two that do not go."""
    by_seam = {part.seam: part for part in parts}
    for seam in seams:
        if seam not in by_seam:
            raise common.InputError(f"seam {seam!r}: none of your parts is for it; there are {', '.join(by_seam)}")
    if alone := sorted(NOT_WITH_A_SCHEDULER.keys() & set(seams) if "scheduler" in seams else ()):
        what = NOT_WITH_A_SCHEDULER[alone[0]]
        raise common.InputError(f"seams scheduler and {alone[0]}: a lesson's scheduler knows nothing of {what}")
    return [by_seam[seam] for seam in seams]


def together(parts: Sequence[Part]) -> list[Part]:
    """All that one engine can have."""
    if all(part.seam != "scheduler" for part in parts):
        return list(parts)
    return [part for part in parts if part.seam not in NOT_WITH_A_SCHEDULER]


def needs(parts: Sequence[Part]) -> dict[str, Any]:
    """Arguments of an engine in which all of these parts are asked, and none is asked what it does not know."""
    found: dict[str, Any] = {}
    for part in parts:
        if part.seam in ("block_pool", "scheduler") and part.lesson in NO_PREFIXES:
            found["enable_prefix_caching"] = False
        elif part.seam == "rejection":
            found["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
        elif part.seam == "lora":
            found |= {"enable_lora": True, "max_loras": len(ADAPTERS)}
            found["lora_modules"] = [f"{name}={SHIPPED / name}" for name in ADAPTERS]
    return found


def of_the_lesson(part: Part) -> Any:
    """The lesson's own object for the seam."""
    return FITS.get(part.name, as_it_is)(getattr(registry.lesson(part.step.lesson), part.name))


# --- Their files ------------------------------------------------------------------------------------------------------

FILE = '''"""Written by `learn`: your parts, as the engine's seams ask for them."""

import sys

sys.path.insert(0, {here!r})

from engine import plugs
from learn.fits import FITS, as_it_is

PARTS = {parts!r}


def __getattr__(seam):
    if seam not in PARTS:
        raise AttributeError(seam)
    file, name = PARTS[seam]
    return FITS.get(name, as_it_is)(plugs.load(seam, f"{{file}}:{{name}}"))
'''


def write(book: Workbook, parts: Sequence[Part]) -> dict[str, str]:
    """Write `my/plugged/`. Returns FILE.py:OBJECT of each part by its seam, as `--plug` asks. Raises InputError."""
    folder = book.folder / "plugged"
    folder.mkdir(exist_ok=True)
    files = {}
    for part in parts:
        path = folder / f"{part.step.lesson}.py"
        path.write_text(with_what_has_passed(book, part.lesson), encoding="utf-8")
        files[part.seam] = str(path.absolute()), part.name
    path = folder / "parts.py"
    path.write_text(FILE.format(here=str(common.HERE), parts=files), encoding="utf-8")
    return {part.seam: f"{path.absolute()}:{part.seam}" for part in parts}


def with_what_has_passed(book: Workbook, number: str) -> str:
    """The reader's script, with the lesson's own part where a step has not passed. Raises InputError."""
    lesson = steps.of(number)
    others = [step.cut for step in lesson if not book.has_passed(step)]
    text, file = book.text(lesson[0]), book.file(lesson[0].lesson).name
    try:
        return starter.completed(text, given(lesson[0]), others)
    except SyntaxError as error:
        raise common.InputError(f"{file}: line {error.lineno}: {error.msg}") from None
    except starter.Missing as error:
        raise common.InputError(f"{file}: there is no {error.args[0]} in it any more") from None

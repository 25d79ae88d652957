"""The reader's folder: a script with holes for each lesson that was begun, and what has passed.

Owns `my/` and its `progress.json`; called by the command line. It never overwrites a line that the reader wrote, but on
`reset`, which keeps the old text beside it. vLLM has nothing like it.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import json
import os
from pathlib import Path
from typing import Any

from learn import starter, steps
from learn.step import Step

MY = common.ROOT / "my"


class Workbook:
    """Scripts and progress in one folder."""

    def __init__(self, folder: Path = MY) -> None:
        """Raises InputError for a progress file that is none."""
        self.folder = folder
        self.progress_file = folder / "progress.json"
        self.progress: dict[str, Any] = {"steps": {}, "incidents": {}}
        if self.progress_file.is_file():
            try:
                self.progress |= json.loads(self.progress_file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise common.InputError(f"{self.progress_file}: {error}; move it away to begin anew") from None

    def file(self, lesson: str) -> Path:
        """The reader's script of a lesson."""
        return self.folder / f"{lesson}.py"

    def begin(self, number: str) -> bool:
        """Write a lesson's script with its holes, unless there is one. Says whether it was written."""
        lesson_steps = steps.of(number)
        path = self.file(lesson_steps[0].lesson)
        if path.exists():
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(starter.with_holes(given(lesson_steps[0]), lesson_steps), encoding="utf-8")
        for step in lesson_steps:
            self.entry(step)["given"] = starter.digest(given(step), step.cut)
        self.save()
        return True

    def text(self, step: Step) -> str:
        """The reader's script. Raises InputError before it was begun."""
        path = self.file(step.lesson)
        if not path.is_file():
            raise common.InputError(
                f"{path.name} is not in my/: begin with `uv run python -m vllm learn {step.id[:2]}`"
            )
        return path.read_text(encoding="utf-8")

    def entry(self, step: Step) -> dict[str, Any]:
        """What is known of a step: `given`, the part's digest when it was left out; `passed`; `failures`."""
        return self.progress["steps"].setdefault(step.id, {})

    def has_passed(self, step: Step) -> bool:
        return bool(self.entry(step).get("passed"))

    def has_changed(self, step: Step) -> bool:
        """Is the lesson's part another one than when the reader began?"""
        known = self.entry(step).get("given")
        return known is not None and known != starter.digest(given(step), step.cut)

    def next_step(self, number: str) -> Step | None:
        """The first of a lesson that has not passed."""
        return next((step for step in steps.of(number) if not self.has_passed(step)), None)

    def reset(self, step: Step) -> Path:
        """Put the hole back. The whole text from before stays in the file that is returned."""
        text = self.text(step)
        kept = self.file(step.lesson).with_suffix(f".before-{step.id}.py")
        number = 1
        while kept.exists():
            number += 1
            kept = self.file(step.lesson).with_suffix(f".before-{step.id}-{number}.py")
        try:
            with_given = starter.completed(text, given(step), [step.cut])
        except SyntaxError as error:
            raise common.InputError(f"{self.file(step.lesson).name}: line {error.lineno}: {error.msg}") from None
        except starter.Missing:
            raise common.InputError(
                f"{self.file(step.lesson).name}: there is no {step.cut} any more to reset"
            ) from None
        kept.write_text(text, encoding="utf-8")
        self.file(step.lesson).write_text(starter.with_holes(with_given, [step]), encoding="utf-8")
        self.progress["steps"][step.id] = {"given": starter.digest(given(step), step.cut)}
        self.save()
        return kept

    def save(self) -> None:
        """Whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self.progress_file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(self.progress, indent=1), encoding="utf-8")
        scratch.replace(self.progress_file)


def given(step: Step) -> str:
    """The lesson's own script."""
    return (common.HERE / f"{step.lesson}.py").read_text(encoding="utf-8")

"""The grader is proven: of each step the starter is open, the solution passes, and what only looks right does not."""

from __future__ import annotations

import common

import dataclasses
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from learn import grader, starter, steps

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="wrong answers run in forked processes")

ALL = [step for number in steps.FILES for step in steps.of(number)]
by_step = pytest.mark.parametrize("step", ALL, ids=lambda step: step.id)
SEED = 7


def wrong_answers(number: str) -> dict[str, list[tuple[str, str]]]:
    path = Path(__file__).parent / "wrong" / f"{steps.FILES[number]}.py"
    spec = importlib.util.spec_from_file_location(f"wrong.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


def script(step) -> str:
    return (common.HERE / f"{step.lesson}.py").read_text(encoding="utf-8")


def starter_of(step) -> str:
    return starter.with_holes(script(step), steps.of(step.id[:2]))


def solved(step, change: tuple[str, str] | None = None) -> str:
    """The starter, with this step's part as given, or with a change in it."""
    text = starter.completed(starter_of(step), script(step), [step.cut])
    if change is None:
        return text
    part = starter.source(text, step.cut) + "\n"
    assert change[0] in part, f"{step.id}: {change[0]!r} is not in {step.cut}"
    return text.replace(part, part.replace(*change))


def verdict(step, text: str) -> grader.Verdict:
    """In a forked child: a wrong kernel may read what is not there, and a wrong loop may never end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(grader.LIMIT)
            found = grader.grade(step, text, SEED, steps.of(step.id[:2]))
            os.write(writing, json.dumps(dataclasses.asdict(found)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return grader.Verdict(**json.loads(told)) if told else grader.Verdict("broken", message="it crashed, or hung")


def test_no_two_steps_leave_out_the_same():
    for number in steps.FILES:
        cuts = [step.cut for step in steps.of(number)]
        assert len(set(cuts)) == len(cuts)
        assert not [(a, b) for a in cuts for b in cuts if b.startswith(f"{a}.")], "a class and its method"
        assert [step.id for step in steps.of(number)] == [f"{number}.{i}" for i in range(1, len(cuts) + 1)]


@by_step
def test_a_starter_is_open_and_says_what_to_do(step):
    text = starter_of(step)
    assert verdict(step, text).what == "open" and f"# {step.id}: " in text
    compile(text, step.lesson, "exec")


@pytest.mark.slow
@by_step
def test_the_solution_passes_and_what_looks_right_does_not(step):
    if step.launches and not common.HAS_TRITON:
        pytest.skip("no Triton wheel on this platform")
    done = verdict(step, solved(step))
    assert done.what == "passed" and done.cases >= 3, done
    wrong = wrong_answers(step.id[:2])[step.id]
    assert len(wrong) >= 5
    lets_pass = [change for change in wrong if verdict(step, solved(step, change)).what == "passed"]
    assert lets_pass == []

"""The grader is proven: of each step the starter is open, the solution passes, and what only looks right does not."""

from __future__ import annotations

import common

import dataclasses
import faulthandler
import functools
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from engine import registry
from learn import grader, starter, steps

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="wrong answers run in forked processes")

ALL = [step for number in steps.FILES for step in steps.of(number)]
by_step = pytest.mark.parametrize("step", ALL, ids=lambda step: step.id)
SEED = 7


@functools.cache
def wrong_answers(number: str) -> dict[str, list[tuple[str, str]]]:
    path = Path(__file__).parent / "wrong" / f"{steps.FILES[number]}.py"
    spec = importlib.util.spec_from_file_location(f"wrong.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


def script(step) -> str:
    return (common.HERE / f"{step.lesson}.py").read_text(encoding="utf-8")


@functools.cache
def starter_of(number: str) -> str:
    return starter.with_holes(script(steps.of(number)[0]), steps.of(number))


def changed(step, change: tuple[str, str]) -> str:
    """The lesson's own script with a change in this step's part."""
    text = script(step)
    part = starter.source(text, step.cut) + "\n"
    assert change[0] in part, f"{step.id}: {change[0]!r} is not in {step.cut}"
    return text.replace(part, part.replace(*change))


def verdicts(step, texts: list[str]) -> list[grader.Verdict]:
    """Of each text in turn, in forked children: a wrong kernel may read what is not there, and a wrong loop may never
    end. One child goes on until it dies, and the next one goes on behind what killed it.
    """
    registry.lesson(step.lesson)  # children need not load it
    found: list[grader.Verdict] = []
    while len(found) < len(texts):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                faulthandler.disable()
                for text in texts[len(found) :]:
                    grader.begin()
                    verdict = grader.grade(step, text, SEED, steps.of(step.id[:2]))
                    os.write(writing, json.dumps(dataclasses.asdict(verdict)).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            found += [grader.Verdict(**json.loads(line)) for line in pipe]
        os.waitpid(child, 0)
        if len(found) < len(texts):
            found.append(grader.Verdict("broken", message="it crashed, or hung"))
    return found


def test_no_two_steps_leave_out_the_same():
    for number in steps.FILES:
        cuts = [step.cut for step in steps.of(number)]
        assert len(set(cuts)) == len(cuts)
        assert not [(a, b) for a in cuts for b in cuts if b.startswith(f"{a}.")], "a class and its method"
        assert [step.id for step in steps.of(number)] == [f"{number}.{i}" for i in range(1, len(cuts) + 1)]


def test_a_child_that_dies_costs_one_verdict():
    """Those behind it are graded as well."""
    step, _ = steps.find("01.1")
    crash = changed(step, ("return", "import os; os.kill(os.getpid(), 11); return"))
    found = verdicts(step, [script(step), crash, script(step), crash])
    assert [verdict.what for verdict in found] == ["passed", "broken", "passed", "broken"]


@by_step
def test_a_starter_is_open_and_says_what_to_do(step):
    text = starter_of(step.id[:2])
    assert grader.grade(step, text, SEED, steps.of(step.id[:2])).what == "open" and f"# {step.id}: " in text
    compile(text, step.lesson, "exec")


@pytest.mark.slow
@by_step
def test_the_solution_passes_and_what_looks_right_does_not(step):
    if step.launches and not common.HAS_TRITON:
        pytest.skip("no Triton wheel on this platform")
    wrong = wrong_answers(step.id[:2])[step.id]
    assert len(wrong) >= 5
    alone = starter.completed(starter_of(step.id[:2]), script(step), [step.cut])  # all other steps are open
    done, *others = verdicts(step, [alone, *(changed(step, change) for change in wrong)])
    assert done.what == "passed" and done.cases >= 3, done
    assert [
        change for change, verdict in zip(wrong, others) if verdict.what not in ("wrong", "broken", "refused")
    ] == []

"""`learn`: begin a lesson, write its parts, have them graded, plug them into the engine.

Owns the commands and what they print; called by `python -m vllm learn`. It never grades: that is `grader.py`, in a
process of its own. vLLM has nothing like it.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import random
import runpy
import sys
from collections.abc import Sequence

from engine import arguments
from learn import beside, grader, incidents, starter, steps, tickets
from learn.prose import paragraph
from learn.step import Step
from learn.workbook import Workbook, given

EPILOG = """\
  learn                 where you are, and what comes next
  learn 02              begin lesson 02: my/02_paged_attention.py, the script with parts left out
  learn check [02.3]    grade the next step of the lesson that you began last, or this one
  learn hint 02.3       a hint, once a check has failed
  learn show 02.3       the lesson's own part beside yours, once it has passed
  learn reset 02.3      the hole again; your text stays beside it
  learn run 02          run your script as it stands
  learn status          what has passed
  learn incident [7]    tickets from an engine with one fault in it, or none: find the cause, write a guard
  learn bench [SEAM …]  the engine with your parts that have passed, beside the given one: tokens and speed
  learn conform         your pool and scheduler on what the real vLLM was recorded deciding
  learn serve [SEAM …] [FLAGS]   a server with your parts; flags as those of `python -m vllm serve`
"""


def build_parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="python -m vllm learn",
        description="Write the lessons' parts yourself, have them graded, and run them in the engine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("what", nargs="?", default="status", help="a lesson's number, or one of the commands below")
    p.add_argument("which", nargs="?", help="a step, as 02.3; a lesson; an incident's number")
    p.add_argument("--seed", type=arguments.number(int, 0), help="of a check, to repeat one")
    p.add_argument("--cause", metavar="NAME", help="of an incident: file:function, or `none`")
    p.add_argument("--guard", action="store_true", help="of an incident: grade my/incident_NN.py")
    return p


def main(argv: Sequence[str], book: Workbook | None = None) -> None:
    """Raises InputError, and CheckFailed for a step that does not pass."""
    argv = list(argv)
    book = book or Workbook()
    if argv and argv[0] in beside.COMMANDS:
        beside.main(book, argv[0], argv[1:])
        return
    args = build_parser().parse_args(argv)
    if args.what in steps.FILES:
        begin(book, args.what)
    elif args.what == "check":
        check(book, chosen(book, args.which), args.seed)
    elif args.what == "incident":
        incidents.main(book, args.which, args.cause, args.guard)
    elif args.what == "run":
        run(book, args.which)
    elif args.what in ("hint", "show", "reset"):
        {"hint": hint, "show": show, "reset": reset}[args.what](book, chosen(book, args.which))
    elif args.what == "status":
        status(book)
    else:
        verbs = "check", "hint", "show", "reset", "run", "status", "incident", *beside.COMMANDS
        raise common.InputError(f"learn {args.what}: must be one of {', '.join((*steps.FILES, *verbs))}")


def chosen(book: Workbook, name: str | None) -> Step:
    """The step of this name, or the next one: of a lesson, or of the lesson whose script was written last."""
    if name and "." in name:
        return steps.find(name)[0]
    if name is None:
        name = latest(book)
        if name is None:
            raise common.InputError("nothing is begun: `uv run python -m vllm learn 01`")
    step = book.next_step(name)
    if step is None:
        raise common.InputError(f"all steps of lesson {name} have passed; `learn check {name}.1` grades one again")
    return step


def latest(book: Workbook) -> str | None:
    """The lesson whose script was written last."""
    begun = [(path.stat().st_mtime, n) for n in steps.FILES if (path := book.file(steps.of(n)[0].lesson)).is_file()]
    return max(begun)[1] if begun else None


# --- The commands -----------------------------------------------------------------------------------------------------


def begin(book: Workbook, number: str) -> None:
    written = book.begin(number)
    step = book.next_step(number)
    path = book.file(steps.of(number)[0].lesson)
    common.heading(f"Lesson {number}: {path.parent.name}/{path.name}")
    if not written:
        common.say("It is there already, and stays as it is.")
    if step:
        tell(step, book.text(step))


def tell(step: Step, text: str) -> None:
    """A step's task and where its hole is."""
    lines = text.splitlines()
    line = next((i + 1 for i, x in enumerate(lines) if starter.raising(step) in x), None)
    common.say(f"Step {step.id}, {step.title}: {step.cut}" + (f", line {line}" if line else ""))
    paragraph(step.task)
    common.say(f"Write it in place of `{starter.raising(step)}`, then: uv run python -m vllm learn check")


def check(book: Workbook, step: Step, seed: int | None) -> None:
    """Raises CheckFailed unless it passes."""
    book.text(step)  # it has to be there
    verdict = grader.check(step, book.file(step.lesson), random.randrange(1 << 30) if seed is None else seed)
    if verdict.what == "open":
        tell(step, book.text(step))
        raise common.CheckFailed(f"step {step.id} is still open")
    common.heading(f"Step {step.id}, {step.title}")
    entry = book.entry(step)
    if verdict.what == "passed":
        entry["passed"] = True
        book.save()
        common.say(f"✓ all {verdict.cases} cases")
        after = book.next_step(step.id[:2])
        common.say(f"learn show {step.id}: the lesson's own, beside yours.")
        if step.plugs:
            seams = " and ".join(repr(seam) for seam, _ in step.plugs)
            common.say(f"It fills the engine's seam {seams} now: learn bench, learn serve, learn conform.")
        common.say(f"Next: {after.id}, {after.title}." if after else "The lesson's last step: all of it is yours.")
        return
    entry["failures"] = entry.get("failures", 0) + 1
    book.save()
    if verdict.cases:
        common.say(f"✓ {verdict.cases} case{'s' * (verdict.cases > 1)}")
    for name, value in (
        ("✗ given", verdict.given),
        ("expected", verdict.expected),
        ("got", verdict.got),
        ("why", verdict.message),
    ):
        if value:
            common.say(f"{name:>9}  {value}")
    if verdict.picture:
        common.say(verdict.picture)
    common.say(f"Again with the same numbers: --seed {verdict.seed}. A hint: learn hint {step.id}")
    raise common.CheckFailed(f"step {step.id} does not pass yet")


def hint(book: Workbook, step: Step) -> None:
    if not book.entry(step).get("failures") and not book.has_passed(step):
        raise common.InputError(f"learn hint {step.id}: try first; `learn check {step.id}` opens it")
    paragraph(step.hint)


def show(book: Workbook, step: Step) -> None:
    """The reader's part and the lesson's, one below the other."""
    if not book.has_passed(step):
        raise common.InputError(f"learn show {step.id}: opens once the step has passed")
    for title, text in ((f"Yours: my/{step.lesson}.py", book.text(step)), (f"vllm/{step.lesson}.py", given(step))):
        common.heading(title)
        common.console().print(starter.source(text, step.cut))


def reset(book: Workbook, step: Step) -> None:
    kept = book.reset(step)
    common.say(f"Step {step.id} is open again; what was there is in my/{kept.name}")


def run(book: Workbook, number: str | None) -> None:
    """The reader's script, as `python vllm/NN.py` runs the lesson's."""
    if number is None:
        raise common.InputError("learn run: which lesson? e.g. learn run 02")
    step = steps.of(number)[0]
    book.text(step)
    sys.argv = [str(book.file(step.lesson))]
    runpy.run_path(sys.argv[0], run_name="__main__")


def status(book: Workbook) -> None:
    """A bar for each lesson, what has changed since it was begun, and the next step."""
    rows, passed, all_steps = [], 0, 0
    for number in steps.FILES:
        mine = steps.of(number)
        done = [book.has_passed(step) for step in mine]
        begun = book.file(mine[0].lesson).is_file()
        passed, all_steps = passed + sum(done), all_steps + len(done)
        bar = "".join("█" if x else "·" for x in done).ljust(11)
        step = book.next_step(number)
        rows.append(
            (mine[0].lesson, bar, f"{sum(done)} of {len(done)}", f"{step.id} {step.title}" if step and begun else "")
        )
    common.table(("lesson", "steps", "passed", "next"), rows)
    common.say(f"{passed} of {all_steps} steps, {incidents.solved(book)} of {len(tickets.ALL)} incidents.")
    for number in steps.FILES:
        for step in steps.of(number):
            if book.has_changed(step):
                common.say(
                    f"{step.id}: the lesson's {step.cut} has changed since; learn reset {step.id} begins it anew."
                )
    number = latest(book)
    if number and (following := book.next_step(number)):
        common.say(f"Next: {following.id}, {following.title}: uv run python -m vllm learn check {following.id}")
    elif passed == 0:
        common.say("Begin: uv run python -m vllm learn 01")

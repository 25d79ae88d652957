"""`learn` as a reader types it: begin, fail, be told why, pass, look, reset; nothing of the reader's is overwritten."""

from __future__ import annotations

import common

import subprocess
import sys

import pytest

from learn import cli, grader, starter, steps
from learn.workbook import Workbook, given

RIGHT = "return self.num_layers * self.num_kv_heads * (self.head_size + self.head_size_v) * element_size"


@pytest.fixture
def book(tmp_path):
    return Workbook(tmp_path / "my")


def fill(book, name, text):
    step, _ = steps.find(name)
    path = book.file(step.lesson)
    path.write_text(path.read_text().replace(starter.raising(step), text))


def say(capsys):
    return capsys.readouterr().out


def test_a_lesson_from_its_first_line_to_a_pass(book, capsys):
    cli.main(["01"], book)
    assert "Step 01.1" in say(capsys) and book.file("01_kv_cache").is_file()
    with pytest.raises(common.CheckFailed, match="still open"):
        cli.main(["check"], book)
    with pytest.raises(common.InputError, match="try first"):
        cli.main(["hint", "01.1"], book)
    fill(book, "01.1", RIGHT.replace("(self.head_size + self.head_size_v)", "self.head_size"))
    with pytest.raises(common.CheckFailed, match="does not pass yet"):
        cli.main(["check", "--seed", "3"], book)
    told = say(capsys)
    assert "expected  131072" in told and "got  65536" in told and "--seed 3" in told
    cli.main(["hint", "01.1"], book)
    assert "formula" in say(capsys)
    with pytest.raises(common.InputError, match="opens once the step has passed"):
        cli.main(["show", "01.1"], book)
    path = book.file("01_kv_cache")
    path.write_text(path.read_text().replace("self.head_size * el", "(self.head_size + self.head_size_v) * el"))
    cli.main(["check"], book)
    assert "all 7 cases" in say(capsys)
    cli.main(["show", "01.1"], book)
    assert say(capsys).count(RIGHT) == 2
    cli.main(["status"], Workbook(book.folder))
    assert "█·····" in say(capsys)


def test_a_file_that_is_there_stays_as_it_is(book, capsys):
    cli.main(["02"], book)
    book.file("02_paged_attention").write_text("# mine\n")
    assert book.begin("02") is False
    assert book.file("02_paged_attention").read_text() == "# mine\n"


def test_reset_keeps_what_was_there(book, capsys):
    book.begin("01")
    fill(book, "01.1", "return 5  # mine")
    fill(book, "01.5", "return iter(())")
    cli.main(["reset", "01.1"], book)
    text = book.file("01_kv_cache").read_text()
    assert "# mine" not in text and "return iter(())" in text and starter.raising(steps.find("01.1")[0]) in text
    (kept,) = book.folder.glob("*.before-01.1.py")
    assert "return 5  # mine" in kept.read_text()
    cli.main(["reset", "01.1"], book)
    assert len(list(book.folder.glob("*.before-01.1*.py"))) == 2


def test_a_step_whose_script_changed_is_named(book, capsys, monkeypatch):
    book.begin("01")
    book.entry(steps.find("01.2")[0])["given"] = "of another day"
    cli.main(["status"], book)
    assert "01.2: the lesson's causal_attention" in say(capsys)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["check"], "nothing is begun"),
        (["check", "01.1"], "is not in my/"),
        (["check", "99.1"], "no such lesson"),
        (["check", "01.99"], "no step '01.99'; lesson 01 has 01.1"),
        (["nonsense"], "learn nonsense: must be one of 01"),
        (["run"], "which lesson"),
        (["bench"], "step 02.4 is the first"),
        (["incident", "0"], "incident 0"),
    ],
)
def test_what_cannot_be_done_is_one_line(book, argv, why):
    with pytest.raises(common.InputError, match=why):
        cli.main(argv, book)


CHEATS = {
    "the given class imported": ("import collections", "import collections\nfrom engine import registry as r"),
    "the given script run": ("import collections", "import collections\nimport runpy"),
    "its text read": (starter.raising(steps.find("02.1")[0]), 'return eval(open("vllm/02_paged_attention.py").read())'),
    "by another name": (starter.raising(steps.find("02.1")[0]), "return __import__('engine.core.block_pool')"),
    "by the table of modules": (
        starter.raising(steps.find("02.1")[0]),
        "import sys\n        return sys.modules['02_paged_attention'].BlockPool.allocate(self, n)",
    ),
}


@pytest.mark.parametrize("how", CHEATS)
def test_a_cheater_is_refused(book, how):
    book.begin("02")
    step, of_lesson = steps.find("02.1")
    text = book.text(step).replace(*CHEATS[how])
    text = text.replace(starter.raising(step), "return []")
    assert grader.grade(step, text, 1, of_lesson).what == "refused"


def test_answers_by_heart_do_not_pass(book):
    """What is right for one seed is wrong for the next: cases are drawn."""
    step, of_lesson = steps.find("01.1")
    book.begin("01")
    text = book.text(step).replace(starter.raising(step), "return 131072 if self.num_layers == 32 else 70272")
    assert grader.grade(step, text, 1, of_lesson).what == "wrong"


def test_the_reference_in_disguise_answers_nothing(book):
    step, of_lesson = steps.find("02.7")
    book.begin("02")
    text = starter.completed(book.text(step), given(step), ["paged_decode_kernel"])
    disguise = "    return paged_decode_reference(q, kv_cache, block_table, seq_lens).float()\n"
    text = text.replace(
        "    if not common.runs_kernel(q):\n        return plan_decode", f"{disguise}    return plan_decode"
    )
    found = grader.grade(step, text, 1, of_lesson)
    assert found.what == "broken" and "answers nothing here" in found.message


def test_a_kernel_that_is_not_launched_is_refused(book):
    step, of_lesson = steps.find("02.6")
    book.begin("02")
    text = starter.completed(book.text(step), given(step), ["copy_blocks_kernel"])
    text = text.replace("    if not common.runs_kernel(kv_cache):", "    if True:")
    found = grader.grade(step, text, 1, of_lesson)
    assert found.what == "refused" and "was not launched" in found.message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        pytest.param("return missing", "NameError", marks=pytest.mark.slow),
        ("import sys; sys.exit(0)", ""),
        pytest.param("while True: pass", "a loop without an end", marks=pytest.mark.slow),
    ],
)
def test_a_part_that_dies_or_hangs_has_a_verdict(book, text, why):
    book.begin("01")
    fill(book, "01.1", text)
    step, _ = steps.find("01.1")
    verdict = grader.check(step, book.file(step.lesson), 1)
    assert verdict.what == "broken" and why in verdict.message


@pytest.mark.slow
def test_the_first_green_within_a_minute_of_a_clone(tmp_path):
    """As a reader types it, in a copy of the repository."""
    subprocess.run(["git", "clone", "-q", str(common.ROOT), str(tmp_path / "clone")], check=True)
    folder = tmp_path / "clone"
    learn = [sys.executable, "-m", "vllm", "learn"]
    subprocess.run([*learn, "01"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    path = folder / "my" / "01_kv_cache.py"
    path.write_text(path.read_text().replace('raise NotImplementedError("01.1")', RIGHT))
    done = subprocess.run([*learn, "check"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "all 7 cases" in done.stdout, done.stdout + done.stderr

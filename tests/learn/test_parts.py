"""Which parts of the reader's are plugged in: what has passed, one for each seam, and what goes together."""

from __future__ import annotations

import common

import pytest

from engine import plugs
from learn import parts, starter, steps
from learn.workbook import Workbook


@pytest.fixture
def book(tmp_path):
    return Workbook(tmp_path / "my")


def solve(book, *names):
    """These steps have passed, with the lesson's own text and a mark of the reader's."""
    for name in names:
        step, _ = steps.find(name)
        book.begin(name[:2])
        path = book.file(step.lesson)
        path.write_text(starter.completed(path.read_text(), (common.HERE / path.name).read_text(), [step.cut]))
        book.entry(step)["passed"] = True


def seams(found):
    return {part.seam: f"{part.lesson}:{part.name}" for part in found}


def test_a_later_lesson_takes_the_place_of_an_earlier_one(book):
    with pytest.raises(common.InputError, match=r"step 02[.]4 is the first"):
        parts.passed(book)
    solve(book, "02.4", "02.7")
    assert seams(parts.passed(book)) == {"block_pool": "02:BlockPool", "attention": "02:PagedAttention"}
    solve(book, "05.6", "07.6", "12.4")
    assert seams(parts.passed(book)) == {
        "block_pool": "05:PrefixCache",
        "attention": "02:PagedAttention",
        "rejection": "07:rejection_sample",
        "sampler": "07:sample_rows",
        "lora": "12:add_lora",
    }


def test_every_seam_but_the_drafter_has_a_part():
    found = {seam for number in steps.FILES for step in steps.of(number) for seam, _ in step.plugs}
    assert found == plugs.SEAMS.keys() - {"drafter"}


@pytest.mark.parametrize(
    ("solved", "needed"),
    [
        (["02.4"], {"enable_prefix_caching": False}),
        (["05.6"], {}),
        (["04.7"], {"enable_prefix_caching": False}),
        (["10.6"], {"enable_prefix_caching": False}),
        (["11.8"], {}),
        (["07.6"], {"speculative_config"}),
        (["12.4"], {"enable_lora", "max_loras", "lora_modules"}),
    ],
)
def test_an_engine_asks_its_parts_and_asks_nothing_that_they_do_not_know(book, solved, needed):
    solve(book, *solved)
    found = parts.needs(parts.passed(book))
    assert found == needed if isinstance(needed, dict) else found.keys() == needed


def test_a_lessons_scheduler_goes_with_neither_drafts_nor_adapters(book):
    solve(book, "07.6", "11.8", "12.4")
    found = parts.passed(book)
    assert [part.seam for part in parts.together(found)] == ["sampler", "scheduler"]
    assert [part.seam for part in parts.chosen(found, ["lora", "sampler"])] == ["lora", "sampler"]
    with pytest.raises(common.InputError, match=r"seams scheduler and lora: a lesson's scheduler knows nothing"):
        parts.chosen(found, ["lora", "scheduler"])
    with pytest.raises(common.InputError, match=r"seam 'attention': none of your parts is for it; there are rej"):
        parts.chosen(found, ["attention"])


def test_what_has_not_passed_is_the_lessons(book):
    """A hole, or a half-written kernel, is not plugged in."""
    solve(book, "02.4")
    path = book.file("02_paged_attention")
    half = path.read_text().replace(starter.raising(steps.find("02.7")[0]), "half = written")
    path.write_text(half + "MINE = 5\n")
    text = parts.with_what_has_passed(book, "02")
    assert "NotImplementedError" not in text and "half = written" not in text and "MINE = 5" in text
    path.write_text("def f(:\n")
    with pytest.raises(common.InputError, match=r"02_paged_attention[.]py: line 1: "):
        parts.with_what_has_passed(book, "02")
    path.write_text("x = 1\n")
    with pytest.raises(common.InputError, match=r"there is no [A-Za-z_.]+ in it any more"):
        parts.with_what_has_passed(book, "02")

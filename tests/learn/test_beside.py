"""The reader's parts beside the given engine: the same tokens, and as many of vLLM's recordings as the lesson's own."""

from __future__ import annotations

import common

import shutil

import pytest

from engine import plugs
from engine.model import llama, loader
from engine.serving import cli as serving
from learn import beside, cli, steps
from learn.workbook import Workbook

RECORDED = ("03_ragged_lengths", "07_prompt_block_multiples", "09_aborts")


@pytest.fixture
def book(tmp_path):
    return Workbook(tmp_path / "my")


@pytest.fixture
def small(monkeypatch, real_model, tmp_path):
    """A tiny model that knows the tokenizer's words, one round, three workloads."""
    monkeypatch.setattr(loader, "load", lambda: (llama.random_model(vocab_size=49152), real_model[1]))
    monkeypatch.setattr(beside, "ROUNDS", 1)
    for kind in ("workloads", "traces"):
        (tmp_path / kind).mkdir()
        for name in RECORDED:
            shutil.copy(beside.RECORDED / kind / f"{name}.json", tmp_path / kind)
    monkeypatch.setattr(beside, "RECORDED", tmp_path)


def solve(book, number, *names, change=("", "")):
    """The lesson's whole script, with a change; these of its steps have passed."""
    book.begin(number)
    path = book.file(steps.of(number)[0].lesson)
    text = (common.HERE / path.name).read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    for name in names:
        book.entry(steps.find(name)[0])["passed"] = True
    plugs.module_of.cache_clear()  # a reader's next command is another process


def test_the_same_tokens_with_each_part_and_with_all(book, small, capsys):
    solve(book, "05", "05.6")
    solve(book, "07", "07.6")
    solve(book, "11", "11.8")
    cli.main(["bench"], book)
    told = capsys.readouterr().out
    assert told.count("✓ the same tokens") == 5 and "✗" not in told
    assert "3 together" in told, "a lesson's scheduler knows no drafts"
    cli.main(["bench", "sampler"], book)
    assert capsys.readouterr().out.count("✓ the same tokens") == 1


def test_other_tokens_and_errors_are_named(book, small, capsys):
    solve(book, "07", "07.6", change=("    token_ids = most_probable(scores)\n", "    token_ids = scores.argmin(1)\n"))
    allocate = "    def allocate(self, n: int) -> list[int]:\n"
    solve(book, "02", "02.1", "02.4", change=(allocate, f"{allocate}        return self.nothing\n"))
    with pytest.raises(common.CheckFailed, match="not as the given engine: block_pool, sampler"):
        cli.main(["bench", "block_pool", "sampler"], book)
    told = " ".join(capsys.readouterr().out.split())
    error = "✗ AttributeError: 'BlockPool' object has no attribute 'nothing' (in allocate: return self.nothing)"
    assert told.count(error) == 2, "alone, and together with the other"
    assert "✗ answer 0 differs from token 0 on: yours" in told


def test_decisions_beside_those_of_vllm(book, small, capsys):
    solve(book, "05", "05.6")
    cli.main(["conform"], book)
    told = " ".join(capsys.readouterr().out.split())
    assert "block_pool: 1 of 3 recorded workloads" in told and "1 of the 1 with a prefix cache" in told
    assert "The lesson's: 1." in told and "The first that is not: 03_ragged_lengths: step 1" in told
    solve(book, "11", "11.8")
    cli.main(["conform", "scheduler"], book)
    assert "scheduler: 3 of 3 recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["bench", "--port", "1"], "learn bench --port: takes seams only, no flags"),
        (["conform", "attention"], "seam 'attention': none of your parts is for it; there are rejection, sampler"),
        (["conform"], "learn conform: compares schedulers and block pools; none of yours has passed yet"),
    ],
)
def test_what_cannot_be_compared_is_one_line(book, argv, why):
    solve(book, "07", "07.6")
    with pytest.raises(common.InputError) as refused:
        cli.main(argv, book)
    assert str(refused.value) == why


def test_a_server_is_started_with_what_goes_together(book, monkeypatch, capsys):
    """And with what its parts need; the other flags are the reader's."""
    solve(book, "04", "04.7")
    solve(book, "07", "07.6")
    solve(book, "12", "12.4")
    started = []
    monkeypatch.setattr(serving, "serve_command", lambda args: started.append(args))
    cli.main(["serve", "--port", "8123"], book)
    told = capsys.readouterr().out
    assert "Without lora: your scheduler knows nothing of adapters. Alone: learn serve lora" in told
    assert "Without rejection" in told and "Without a prefix cache" in told
    (args,) = started
    assert [plug.partition("=")[0] for plug in args.plug] == ["scheduler", "sampler"] and args.port == 8123
    assert args.enable_prefix_caching is False and not hasattr(args, "enable_lora")
    cli.main(["serve", "lora", "rejection"], book)
    assert started[1].enable_lora and started[1].max_loras == 3 and "ngram" in started[1].speculative_config


@pytest.mark.slow
def test_adapters_through_a_kernel_of_ones_own(book, monkeypatch, capsys):
    """On the real model, whose adapters they are."""
    monkeypatch.setattr(beside, "ROUNDS", 1)
    solve(book, "12", "12.4")
    cli.main(["bench"], book)
    assert capsys.readouterr().out.count("✓ the same tokens") == 1

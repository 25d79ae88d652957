"""Command lines: one line for what is wrong, vLLM's numbers, and flags with underscores."""

from __future__ import annotations

import argparse

import pytest

from engine import arguments


def parser(**about):
    made = arguments.Parser(prog="p", **about)
    made.add_argument("model", nargs="?")
    made.add_argument("--max-num-seqs", type=int)
    made.add_argument("--enable-lora", action=arguments.Switch)
    made.add_argument("--lora-modules", nargs="+")
    return made


def refused(capsys, made, *words):
    with pytest.raises(SystemExit) as end:
        made.parse_args(words)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("flag", ["--max_num_seqs", "--max-num-seqs", "--max_num-seqs"])
def test_underscores_are_dashes_in_flags_alone(flag):
    assert parser().parse_args([flag, "3"]).max_num_seqs == 3 == parser().parse_args([f"{flag}=3"]).max_num_seqs
    assert parser().parse_args(["--lora_modules", "a_b=c_d", "--", "m_m"]).lora_modules == ["a_b=c_d"]
    assert arguments.with_dashes("--a_b.c_d=e_f") == "--a-b.c_d=e_f" and arguments.with_dashes("a_b") == "a_b"


@pytest.mark.parametrize(
    ("word", "value"),
    [("--enable-lora", True), ("--no-enable-lora", False), ("--disable-lora", False), ("--enable_lora", True)],
)
def test_a_switch_has_two_opposites(word, value):
    assert parser().parse_args([word]).enable_lora is value
    assert arguments.opposites(["--disable-x", "--y"]) == ["--enable-x"]


def test_no_opposite_of_a_flag_that_disables():
    made = arguments.Parser()
    made.add_argument("--disable-x", action=arguments.Switch)
    assert [made.parse_args([word]).disable_x for word in ("--disable-x", "--no-disable-x", "--enable-x")] == [
        True,
        False,
        False,
    ]


def test_a_wrong_flag_is_named_with_its_neighbour(capsys):
    assert refused(capsys, parser(), "--max-num-seq=3x", "m").endswith("(--help lists the flags)")
    line = refused(capsys, parser(), "--max-nun-seqs", "3")
    assert line == "p: error: --max-nun-seqs: no such flag; did you mean --max-num-seqs? (--help lists the flags)"
    assert "--zzz: no such flag (" in refused(capsys, parser(), "--zzz")
    assert "unrecognized argument: n" in refused(capsys, parser(), "m", "n")


def test_a_flag_of_elsewhere_says_why(capsys):
    known = {"--there": "is not here", "--off": ""}
    made = parser(elsewhere=known.get)
    assert "p: error: --there: is not here (" in refused(capsys, made, "--there=5")
    assert "--there: is not here" in refused(capsys, made, "--there.key", "5")
    assert made.parse_args(["--off", "m"]).model == "m", "what is switched off is not missed"


@pytest.mark.parametrize("words", [["m", "--max-num-seqs", "3"], ["--max-num-seqs", "3", "m"]])
def test_a_name_may_stand_in_front_and_behind(words):
    args = parser().parse_args(words)
    assert (args.model, args.max_num_seqs) == ("m", 3)


def test_a_command_line_is_prepared():
    made = parser(prepare=lambda parser, words: [*words, "--max-num-seqs=7"])
    assert made.parse_args(["m"]).max_num_seqs == 7
    assert made.option("--max-num-seqs.a=b").dest == "max_num_seqs" and made.option("--x") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25_600), ("2.01k", 2010), ("1m", 10**6), ("1M", 1 << 20),
     ("1g", 10**9), ("2G", 2 << 30), ("1t", 10**12), ("1T", 1 << 40), (" 7 ", 7), ("-1", -1), ("0", 0)],
)  # fmt: skip
def test_numbers_with_vllms_units(text, value):
    assert arguments.human_readable_int(text) == value == arguments.human_readable_int_or_auto(text)
    assert arguments.human_readable_int_or_auto("auto") == arguments.human_readable_int_or_auto("AUTO") == -1


@pytest.mark.parametrize("text", ["", "k", "4.5", "4.5K", "4kk", "4 k", "x", "auto", "1e3", "4b", "-1k", "--1"])
def test_texts_that_are_no_such_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number like 4096, 4k"):
        arguments.human_readable_int(text)

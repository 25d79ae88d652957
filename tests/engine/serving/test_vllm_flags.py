"""Every flag of vLLM's `serve` is served, taken without effect, or refused with a reason."""

from __future__ import annotations

import common

import re
import subprocess
import sys

import pytest

from engine import arguments
from engine.serving import vllm_flags
from engine.serving.cli import add_serve_command
from engine.serving.command_line import PARTS

LINES = (common.ROOT / "tests" / "golden" / "vllm_serve_flags.txt").read_text().splitlines()
VLLMS = [line.split() for line in LINES if not line.startswith("#")]
ACCEPTED = {flags[0]: (flags, value, text) for flags, value, text in vllm_flags.rows(vllm_flags.ACCEPTED)}
REFUSED = {flags[0]: (flags, value, text) for flags, value, text in vllm_flags.rows(vllm_flags.REFUSED)}


def serve_parser():
    parser = arguments.Parser(prog="p")
    return add_serve_command(parser.add_subparsers()) or parser


def served():
    """Names that our parser has and that are not taken without effect."""
    (commands,) = (action for action in serve_parser()._actions if action.choices)
    options = commands.choices["serve"]._option_string_actions
    return {name for name, action in options.items() if action.dest != "without_effect"}


def test_each_of_vllms_flags_has_one_row():
    told = {name for flags, _, _ in (*ACCEPTED.values(), *REFUSED.values()) for name in flags} - {"-O"}
    every = {name for names in VLLMS for name in names}
    assert len(VLLMS) == 320 and told <= every, "a row for a flag that vLLM has not"
    assert not told & served(), "a flag that we have leaves its row"
    assert every - told - served() == set(), "flags of vLLM's that nobody speaks of"
    assert not ACCEPTED.keys() & REFUSED.keys() and set(PARTS) <= served()
    assert not vllm_flags.DROPPED.keys() & (every | served())
    short = {name for names in VLLMS for name in names if not name.startswith("--")}
    assert short <= told | served()


def test_a_row_is_a_sentence_of_ours():
    for flag, (_, value, text) in (ACCEPTED | REFUSED).items():
        assert re.fullmatch(r"in vLLM it [a-z].*; .*[^.]", text) and len(text) < 220, flag
        assert flag in ACCEPTED or not value, flag


PARSER = serve_parser()  # which keeps nothing of what it parses


def refused(capsys, *words):
    with pytest.raises(SystemExit) as end:
        PARSER.parse_args(["serve", *words])
    assert end.value.code == 2, words
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_is_refused_says_why(capsys):
    for name in (name for flags, _, _ in REFUSED.values() for name in flags):
        assert f"p serve: error: {name}: in vLLM it " in refused(capsys, name, "5")
        if name.startswith("--"):
            PARSER.parse_args(["serve", f"--no-{name[2:]}"])  # nobody misses what is switched off


def test_what_vllm_has_dropped(capsys):
    for name in vllm_flags.DROPPED:
        assert f"{name}: vLLM has dropped it; " in refused(capsys, name, "5")


VALUES = {"JSON": "{}", "N": "2", "N…": "1", "F": "0.5", "G": "1"}


def test_what_is_taken_is_taken_as_vllm_takes_it(capsys):
    """A switch and its opposites; one value, or several; and where a value would change something, that one alone."""
    for flag, (flags, value, text) in ACCEPTED.items():
        given = [value.split("|")[0]] if value and not value[0].isupper() else [VALUES.get(value, "x")] if value else []
        for name in flags:
            args = PARSER.parse_args(["serve", "m", name, *given, "--port", "5"])
            assert (args.model_tag, args.port) == ("m", 5), name
            assert args.without_effect == [f"{flag}: without effect here: {text}"]
        if not value:
            for name in (f"--no-{flag[2:]}", *arguments.opposites([flag])):
                assert len(PARSER.parse_args(["serve", name]).without_effect) == 1, name
        elif value.endswith("…"):
            assert PARSER.parse_args(["serve", flag, *given, *given]).without_effect, flag
        elif not value[0].isupper():
            assert "only " in (line := refused(capsys, flag, "other")) and "in vLLM it " in line, flag
        else:
            assert "expected one argument" in refused(capsys, flag), flag


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [(["serve", "--bogus"], 2, "--bogus: no such flag"), (["serve", "--enable-dbo"], 2, "overlaps two halves"),
     (["serve", "--help"], 0, "--max-model-len"), (["serve", "--port", "x"], 2, "--port"), (["nonsense"], 2, "serve"),
     (["serve", "--scheduling-policy", "lifo"], 2, "fcfs")],
)  # fmt: skip
def test_a_wrong_flag_is_found_before_torch_is_there(words, code, told):
    """Torch alone takes two seconds."""
    command = [sys.executable, "-X", "importtime", "-m", "vllm", *words]
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True)
    assert done.returncode == code and told in done.stdout + done.stderr
    assert not re.search(r"\| +(torch|numpy|common|transformers|fastapi|pydantic)$", done.stderr, re.MULTILINE)

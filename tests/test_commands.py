"""`python -m vllm …`: the lessons' commands under one name."""

from __future__ import annotations

import common

import sys

import pytest

from support import scripts

GOLDEN = common.ROOT / "tests" / "golden" / "recorded"


def test_replay_under_the_packages_name():
    done = scripts.execute([sys.executable, "-m", "vllm", "replay", GOLDEN / "workloads" / "25_preempt_basic.json"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (GOLDEN / "traces" / "25_preempt_basic.json").read_text()


def test_tune_under_the_packages_name():
    flags = "--simulate --max-num-seqs 1,8 --max-num-batched-tokens 256 --num-prompts 8"
    done = scripts.execute([sys.executable, "-m", "vllm", "tune", *flags.split()])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith(
        "Most output throughput under no limit: --max-num-seqs 8 --max-num-batched-tokens 256"
    )


@pytest.mark.parametrize("command", ["serve", "proxy", "bench", "tune", "replay", "predict", "make-model"])
def test_each_command_has_help(command):
    done = scripts.execute([sys.executable, "-m", "vllm", command, "--help"])
    assert done.returncode == 0 and command in done.stdout


@pytest.mark.parametrize("argv", [[], ["nonsense"]])
def test_a_wrong_command_is_named_in_one_line(argv):
    done = scripts.execute([sys.executable, "-m", "vllm", *argv])
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "serve, proxy, bench, tune, replay" in line and "Traceback" not in line

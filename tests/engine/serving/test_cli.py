"""What the command line takes."""

from __future__ import annotations

import argparse

import pytest

from engine.serving.cli import add_model_flags


def test_a_seed_has_31_bits(capsys):
    parser = argparse.ArgumentParser()
    add_model_flags(parser.add_argument)
    assert parser.parse_args([]).seed == 0
    assert parser.parse_args(["--seed", str(2**31 - 1)]).seed == 2**31 - 1
    for wrong in (2**31, -1):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--seed={wrong}"])
        assert "--seed" in capsys.readouterr().err

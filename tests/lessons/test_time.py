"""Every script tells its story in time, alone on the machine."""

from __future__ import annotations

import common

import pytest

from support import scripts
from support.documents import LESSONS
from support.scripts import YARDSTICK_SECONDS, Done, execute, script_job, within


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("lesson", [path.stem for path in LESSONS])
def test_default_run_takes_at_most_twenty_seconds(lesson, monkeypatch):
    if common.HAS_GPU:
        pytest.skip("the limit is for two CPU cores; a GPU's first run compiles kernels")
    # With threads that sleep while they wait, then as a reader starts it, with threads that spin: these are faster on
    # two free cores, but take twice as long as the others while something else keeps one of them busy.
    for policy in ("PASSIVE", None):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if policy:
            monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        seconds = execute(script_job(lesson)[1]).seconds
        if within(seconds, 20):
            return
    pytest.fail(f"took {seconds:.0f} s")


@pytest.mark.parametrize("slower", [0.8, 1, 2])
def test_a_slower_machine_gets_more_time_in_proportion(slower, monkeypatch):
    def measured(command):
        return Done(0, "", "", slower * YARDSTICK_SECONDS, 0.0, {}, {})

    monkeypatch.setattr(scripts, "execute", measured)
    assert within(20, 20) and within(19.9 * slower, 20) and not within(20.1 * max(1, slower), 20)

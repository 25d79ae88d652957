"""The serving loop around a core that has workers, in this thread, and the letters that it sends."""

from __future__ import annotations

from types import SimpleNamespace

from engine.serving.letters import EngineCoreRequestType
from engine.serving.pipeline_proc import ParallelEngineCoreProc

IDLE = {"unfinished": 0, "tables": 0, "owned_blocks": 0}  # what `check_idle` says when nothing is left


def proc_on(core, requests):
    """(the loop, with all requests handed in; its letters)."""
    letters = []
    proc = ParallelEngineCoreProc(SimpleNamespace(core=core, lora=None), letters.append)
    for request in requests:
        proc.handle([(EngineCoreRequestType.ADD, request)])
    return proc, letters

"""What an incident is: a ticket about an engine with one change in it, or with none.

Owns the record; made by the files of `tickets/`, told and graded by `incidents.py`. It never runs the engine.
vLLM has nothing like it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Incident:
    """A symptom and its evidence. Without `old`, the engine is sound and the cause is `none`: it is no bug."""

    number: int
    title: str
    lesson: str  # whose page lists it: 02
    ticket: str  # what whoever runs the engine wrote
    evidence: str  # a metrics excerpt, a trace, a log, a small figure: from the engine with the change in it
    why: str  # told once it is solved
    cause: str = "none"  # file:function in vllm/engine/, as core/scheduler.py:Scheduler.schedule
    old: str = ""  # these lines of that file…
    new: str = ""  # …are these in the engine of the ticket
    suspects: tuple[str, ...] = ()  # files whose functions are the list to choose from, the cause's among them
    source: str = ""  # a public issue that it retells, if any

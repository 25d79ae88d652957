"""The incidents, by the part of the engine that they are about: what was reported, and the one change behind it."""

from __future__ import annotations

from learn.incident import Incident
from learn.tickets import decisions, memory, serving

ALL: tuple[Incident, ...] = (*decisions.TICKETS, *serving.TICKETS, *memory.TICKETS)

"""The engine that the lessons are plugged into: `seams.py` has the interfaces, `core/scheduler.py` every decision."""

"""Clients of an engine in another process; seam: none, it stands above them all."""

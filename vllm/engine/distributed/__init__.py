"""Processes that meet: groups of ranks, and who may connect; it fills no seam."""

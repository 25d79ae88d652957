"""Tokens that are guessed, and verified in one pass; seam: `Drafter`."""

"""Answers that a grammar allows, and nothing else; seam: `Grammar`."""

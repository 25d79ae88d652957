"""A paragraph in a terminal: as wide as the terminal, and never wider than is good to read.

Owns the wrapping; called by the command line and by incidents. It knows nothing of what it prints.
vLLM has nothing like it.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import textwrap

WIDEST = 100  # columns


def paragraph(text: str) -> None:
    """Print a text whose own line breaks do not count. Names and paths are not broken."""
    width = min(WIDEST, common.console().width) - 2
    for line in textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False):
        common.say(line)

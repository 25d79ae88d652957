"""After a benchmark: write what lessons/results/ holds now into README and lessons, wherever they quote it.

    uv run python -m vllm.tours.04c_speed --bench --json lessons/results/cpu.json
    uv run python tests/refresh.py

It writes each page's list of steps as well, as `learn` has them. Prints the lines that changed, to be read again: a
sentence may say "twice" where the number now says otherwise.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "vllm"))

from lab import recorded
from support import documents


def main() -> None:
    for page in documents.PAGES:
        before, after = page.read_text(), documents.measured_again(page, recorded.results)
        listed = f"<!-- steps -->\n{documents.steps_of(page)}<!-- /steps -->\n"
        after = documents.STEPS.sub(lambda _, listed=listed: listed, after)
        page.write_text(after)
        lines = before.splitlines(), after.splitlines()
        for line in difflib.unified_diff(*lines, page.name, page.name, n=0, lineterm=""):
            print(line)


if __name__ == "__main__":
    main()

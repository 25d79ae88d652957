"""Where a JSON object ends, in text that comes piece by piece.

Owns the state of one object; called by readers of calls, demanded and decided. It never keeps a character, and never
says what the object means. vLLM: `partial_json_loads` in `vllm/tool_parsers/utils.py`.
"""

from __future__ import annotations

import json
import string


class JSONEnd:
    """Finds where a JSON object ends, in text that comes piece by piece: its braces count, those in strings do not."""

    BLANK, BETWEEN = frozenset(" \t\r\n"), frozenset(string.ascii_letters + string.digits + " \t\r\n+-.,:")

    def __init__(self) -> None:
        self.depth, self.in_string, self.escaped = 0, False, False
        self.ended = self.broken = False  # broken: there is a character that JSON cannot have at this place

    def read(self, text: str) -> int:
        """How many characters of `text` belong to the object: all of them, unless it has ended or is broken."""
        for i, char in enumerate(text):
            if self.in_string:
                self.broken = char < " "
                self.in_string = self.escaped or char != '"'
                self.escaped = not self.escaped and char == "\\"
            elif char in "{[":
                self.depth += 1
            elif self.depth == 0:
                self.broken = char not in self.BLANK
            elif char in "]}":
                self.depth -= 1
                self.ended = self.depth == 0
            else:
                self.in_string = char == '"'
                self.broken = not (self.in_string or char in self.BETWEEN)
            if self.ended or self.broken:
                return i + self.ended
        return len(text)


def decided_call(text: str, *names: str) -> tuple[str, str] | None:
    """Name and arguments of a call that nothing but the model's habit has formed; None if it is none. The arguments
    stand under the first of `names` that is there.

    Half of a surrogate pair, which JSON can escape and no answer could carry, stays an escape in the arguments.
    """
    try:
        call = json.loads(text)
        name, arguments = call["name"], next(call[key] for key in names if key in call)
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            return None
        name.encode()
        return name, json.dumps(arguments, ensure_ascii=False).encode(errors="backslashreplace").decode()
    except (ValueError, TypeError, KeyError, StopIteration, RecursionError):
        return None

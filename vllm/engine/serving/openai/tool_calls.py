"""Reads one answer piece by piece: what of it is text, and what is a call.

Owns the characters that may yet become something; one reader per answer, called by `serving` with every piece. Since a
client wants to see a call grow, it is never kept until it is whole, unless it may turn out to be text.
vLLM: `vllm/tool_parsers/hermes_tool_parser.py`, `vllm/parser/`.
"""

from __future__ import annotations

import json
import re
import string
import uuid
from collections.abc import Sequence
from typing import Any

from engine.serving.openai.protocol import CommonRequest, NamedTool
from engine.serving.openai.tools import tool_choice


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


class ToolCallReader:
    """Reads one answer, piece by piece, and says what of it is text and what is a call.

    Pieces of a stream and a whole answer go the same way. A demanded call is told while its arguments grow. One that
    the model decided on, `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes' format, and Qwen's), is told
    when it is complete: until then it may turn out to be text. Where it ends is said by its JSON: in a string, the tags
    are text like any other.
    """

    HEAD = re.compile(r'[}\[, ]*\{"name": ("(?:[^"\\]|\\.)*"), "parameters": ')
    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, body: CommonRequest) -> None:
        self.choice, self.parallel = tool_choice(body), getattr(body, "parallel_tool_calls", True) is not False
        self.unread, self.count = "", 0  # characters that may yet become something; calls so far
        self.json: JSONEnd | None = None  # within a call: how far its JSON has come
        self.block = ""  # and that JSON, if it may turn out to be text
        self.behind: str | None = None  # after a call: what may follow it, and is no text

    def read(self, text: str, final: bool) -> dict[str, Any]:
        """The news in `text` as OpenAI's delta: `content`, `tool_calls` or nothing. `final`: no more will come."""
        if self.choice == "none":
            return {"content": text}
        if self.choice == "auto":
            content, calls = self.read_decided(text, final)
            return ({"content": content} if content or not calls else {}) | ({"tool_calls": calls} if calls else {})
        if isinstance(self.choice, NamedTool):
            start = [] if self.count or not text else [self.begin(self.choice.function.name)]
            calls = [*start, self.grow(text)] if text else []
        else:
            calls = self.read_demanded(text)
        return {"tool_calls": merged_calls(calls)} if calls else {}

    def begin(self, name: str) -> dict[str, Any]:
        """The first piece of a call of this function, with an id of its own."""
        self.count += 1
        return {
            "index": self.count - 1,
            "id": f"chatcmpl-tool-{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }

    def grow(self, arguments: str) -> dict[str, Any]:
        return {"index": self.count - 1, "function": {"arguments": arguments}}

    def read_demanded(self, text: str) -> list[dict[str, Any]]:
        """`[{"name": "f", "parameters": {…}}, …]`: the grammar has fixed every character around name and arguments."""
        calls, self.unread = [], self.unread + text
        while self.unread:
            if self.json is None:
                head = self.HEAD.match(self.unread)
                if head is None:
                    break  # half a head, or the end of the list
                self.unread, self.json = self.unread[head.end() :], JSONEnd()
                calls.append(self.begin(json.loads(head[1])))
            else:
                end = self.json.read(self.unread)
                end = len(self.unread) if self.json.broken else end  # the engine has ended this answer with an error
                if end:
                    calls.append(self.grow(self.unread[:end]))
                self.unread = self.unread[end:]
                self.json = None if self.json.ended else self.json
        return calls

    def read_decided(  # noqa: C901  a branch for each thing that the next characters may be
        self, text: str, final: bool
    ) -> tuple[str, list[dict[str, Any]]]:
        """Text, and calls in the midst of it. What may yet become a call is held back."""
        content, calls, self.unread = "", [], self.unread + text
        while self.unread or (final and self.json):
            if self.json:
                end = self.json.read(self.unread)
                self.block, self.unread = self.block + self.unread[:end], self.unread[end:]
                if self.json.ended:
                    call, self.json = decided_call(self.block), None
                    if call is None:
                        content += self.OPEN + self.block
                        continue
                    if self.parallel or self.count == 0:
                        calls += [self.begin(call[0]), self.grow(call[1])]
                    self.behind = self.CLOSE
                elif self.json.broken or final:  # the tag was text, and a call may stand in what followed it
                    content, self.unread, self.json = content + self.OPEN, self.block + self.unread, None
                else:
                    break
            elif self.behind is not None:  # blanks, the closing tag, blanks
                self.unread = self.unread.lstrip()
                if self.behind.startswith(self.unread):  # half of it, or nothing: no text, even if no more comes
                    break
                if self.behind and self.unread.startswith(self.behind):
                    self.unread, self.behind = self.unread.removeprefix(self.behind), ""
                else:
                    self.behind = None
            else:
                said, tag, rest = self.unread.partition(self.OPEN)
                end = len(said) - (0 if final or tag else self.half_open())
                content, self.unread = content + said[:end], rest if tag else said[end:]
                if not tag:
                    break
                self.json, self.block = JSONEnd(), ""
        return content, merged_calls(calls)

    def half_open(self) -> int:
        """How many characters at the end may be the beginning of `<tool_call>`."""
        return next((n for n in range(len(self.OPEN) - 1, 0, -1) if self.unread.endswith(self.OPEN[:n])), 0)


def decided_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that nothing but the model's habit has formed; None if it is none.

    Half of a surrogate pair, which JSON can escape and no answer could carry, stays an escape in the arguments.
    """
    try:
        call = json.loads(text)
        name, arguments = call["name"], call["arguments"]
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            return None
        name.encode()
        return name, json.dumps(arguments, ensure_ascii=False).encode(errors="backslashreplace").decode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def merged_calls(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One delta per call: its beginning and the arguments that came with it."""
    found: list[dict[str, Any]] = []
    for call in calls:
        if found and found[-1]["index"] == call["index"]:
            found[-1]["function"]["arguments"] += call["function"]["arguments"]
        else:
            found.append(call)
    return found

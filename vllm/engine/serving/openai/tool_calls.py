"""Reads one answer piece by piece: what of it is text, and what is a call.

Owns the characters that may yet become something; one reader per answer, called by `serving` with every piece. Since a
client wants to see a call grow, it is never kept until it is whole, unless it may turn out to be text.
vLLM: `vllm/parser/abstract_parser.py`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from engine.serving.openai.protocol import CommonRequest, NamedTool
from engine.serving.openai.tool_parsers.hermes import HermesParser
from engine.serving.openai.tool_parsers.json_end import JSONEnd
from engine.serving.openai.tool_parsers.llama3_json import Llama3JSONParser
from engine.serving.openai.tool_parsers.pythonic import PythonicParser
from engine.serving.openai.tools import tool_choice

PARSERS = {"hermes": HermesParser, "llama3_json": Llama3JSONParser, "pythonic": PythonicParser}


class ToolCallReader:
    """Reads one answer, piece by piece, and says what of it is text and what is a call.

    Pieces of a stream and a whole answer go the same way. A demanded call is told while its arguments grow. One that
    the model decided on, in the format of `parser`, is told when it is complete: until then it may turn out to be text.
    """

    HEAD = re.compile(r'[}\[, ]*\{"name": ("(?:[^"\\]|\\.)*"), "parameters": ')

    def __init__(self, body: CommonRequest, parser: str = "hermes") -> None:
        self.choice, self.parallel = tool_choice(body), getattr(body, "parallel_tool_calls", True) is not False
        self.unread, self.count = "", 0  # characters that may yet become something; calls so far
        self.json: JSONEnd | None = None  # within a demanded call: how far its JSON has come
        self.decided = PARSERS[parser]()

    def read(self, text: str, final: bool) -> dict[str, Any]:
        """The news in `text` as OpenAI's delta: `content`, `tool_calls` or nothing. `final`: no more will come."""
        if self.choice == "none":
            return {"content": text}
        if self.choice == "auto":
            content, found = self.decided.read(text, final)
            calls = merged_calls([piece for call in found for piece in self.told(*call)])
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

    def told(self, name: str, arguments: str) -> list[dict[str, Any]]:
        """A whole call in two pieces; none, if the client wants one and has it."""
        return [self.begin(name), self.grow(arguments)] if self.parallel or self.count == 0 else []

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


def merged_calls(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One delta per call: its beginning and the arguments that came with it."""
    found: list[dict[str, Any]] = []
    for call in calls:
        if found and found[-1]["index"] == call["index"]:
            found[-1]["function"]["arguments"] += call["function"]["arguments"]
        else:
            found.append(call)
    return found

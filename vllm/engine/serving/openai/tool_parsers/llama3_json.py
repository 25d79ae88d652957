"""Llama 3's format: `{"name": …, "parameters": …}`, perhaps behind `<|python_tag|>`, several with `;` between them.

Owns what of one answer has not been understood; one for each answer, called by `tool_calls` with every piece. A call is
never told before it is complete, since it may turn out to be text.
vLLM: `vllm/tool_parsers/llama_tool_parser.py`, which reads a whole answer otherwise than a streamed one.
"""

from __future__ import annotations

from engine.serving.openai.tool_parsers.hermes import half_open
from engine.serving.openai.tool_parsers.json_end import JSONEnd, decided_call


class Llama3JSONParser:
    """An object that has a name and parameters is a call, wherever it stands; any other object is text."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self.unread = ""  # characters that may yet become something
        self.json: JSONEnd | None = None  # within an object: how far it has come
        self.block = ""  # and the object, behind what is text if it is no call
        self.behind = False  # after a call, `;` and blanks are no text

    def read(  # noqa: C901  a branch for each thing that the next characters may be
        self, text: str, final: bool
    ) -> tuple[str, list[tuple[str, str]]]:
        """Text, and name and arguments of every call in the midst of it. `final`: no more will come."""
        content, calls, self.unread = "", [], self.unread + text
        while self.unread or (final and self.block):
            if self.json:
                end = self.json.read(self.unread)
                self.block, self.unread = self.block + self.unread[:end], self.unread[end:]
                if not (self.json.ended or self.json.broken or final):
                    break
                call = None
                if self.json.ended:
                    call = decided_call(self.block.removeprefix(self.TAG), "arguments", "parameters")
                if call is None:
                    content += self.block
                else:
                    calls.append(call)
                self.json, self.block, self.behind = None, "", call is not None
            elif self.behind:
                self.unread = self.unread.lstrip("; \t\r\n")
                self.behind = not self.unread
            elif self.block:  # the tag: an object may follow it
                blanks = len(self.unread) - len(self.unread.lstrip())
                self.block, self.unread = self.block + self.unread[:blanks], self.unread[blanks:]
                if self.unread.startswith("{"):
                    self.json = JSONEnd()
                elif self.unread or final:
                    content, self.block = content + self.block, ""
            else:
                tag, brace = self.unread.find(self.TAG), self.unread.find("{")
                begins = min((at for at in (tag, brace) if at >= 0), default=None)
                if begins is None:
                    end = len(self.unread) - (0 if final else half_open(self.unread, self.TAG))
                    content, self.unread = content + self.unread[:end], self.unread[end:]
                    break
                content, self.unread = content + self.unread[:begins], self.unread[begins:]
                if begins == tag:
                    self.block, self.unread = self.TAG, self.unread.removeprefix(self.TAG)
                else:
                    self.json = JSONEnd()
        return content, calls

"""Hermes' format, which is Qwen's, too: `<tool_call>{"name": …, "arguments": …}</tool_call>`.

Owns what of one answer has not been understood; one for each answer, called by `tool_calls` with every piece. A call is
never told before it is complete, since it may turn out to be text.
vLLM: `vllm/tool_parsers/hermes_tool_parser.py`.
"""

from __future__ import annotations

from engine.serving.openai.tool_parsers.json_end import JSONEnd, decided_call


class HermesParser:
    """Where a call ends is said by its JSON: in a string, the tags are text like any other."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self.unread = ""  # characters that may yet become something
        self.json: JSONEnd | None = None  # within a call: how far its JSON has come
        self.block = ""  # and that JSON
        self.behind: str | None = None  # after a call: what may follow it, and is no text

    def read(self, text: str, final: bool) -> tuple[str, list[tuple[str, str]]]:
        """Text, and name and arguments of every call in the midst of it. `final`: no more will come."""
        content, calls, self.unread = "", [], self.unread + text
        while self.unread or (final and self.json):
            if self.json:
                end = self.json.read(self.unread)
                self.block, self.unread = self.block + self.unread[:end], self.unread[end:]
                if self.json.ended:
                    call, self.json = decided_call(self.block, "arguments"), None
                    if call is None:
                        content += self.OPEN + self.block
                        continue
                    calls.append(call)
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
                end = len(said) - (0 if final or tag else half_open(said, self.OPEN))
                content, self.unread = content + said[:end], rest if tag else said[end:]
                if not tag:
                    break
                self.json, self.block = JSONEnd(), ""
        return content, calls


def half_open(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)

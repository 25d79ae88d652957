"""What a model thinks before it answers: `<think>…</think>`, as DeepSeek R1 and Qwen3 write it.

Owns the characters that may yet become a tag; one reader per answer, called by `answers` with every piece. It never
changes a character of what it takes apart.
vLLM: `vllm/reasoning/deepseek_r1_reasoning_parser.py`, `vllm/parser/qwen3.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.serving.openai.tool_parsers.hermes import half_open

OPEN, CLOSE = "<think>", "</think>"
ENDS = {"deepseek_r1": (CLOSE,), "qwen3": (CLOSE, "<tool_call>")}  # by parser: a call ends thinking, too


def is_open(prompt: str) -> bool | None:
    """Whether the tag that came last opens; None if there is none of them."""
    opened, closed = prompt.rfind(OPEN), prompt.rfind(CLOSE)
    return None if opened == closed else opened > closed


class ReasoningReader:
    """Reads one answer: what comes before the closing tag is thinking, with an opening tag or, where the template has
    written that, without. As in vLLM, an answer that never closes it has nothing else."""

    def __init__(self, parser: str) -> None:
        self.ends = ENDS[parser]
        self.unread, self.begun, self.ended = "", False, False

    def read(self, text: str, final: bool) -> tuple[str, str]:
        """The news in `text`: (thinking, answer). `final`: no more will come."""
        if self.ended:
            return "", text
        self.unread += text
        if not self.begun:  # the opening tag, and blanks before it
            if OPEN.startswith(self.unread.lstrip()) and not final:
                return "", ""
            before, tag, behind = self.unread.partition(OPEN)
            self.unread = behind if tag and not before.strip() else self.unread
            self.begun = True
        found = [at for end in self.ends if (at := self.unread.find(end)) >= 0]
        if not found:
            keep = 0 if final else max(half_open(self.unread, end) for end in self.ends)
            said, self.unread = self.unread[: len(self.unread) - keep], self.unread[len(self.unread) - keep :]
            return said, ""
        at = min(found)
        said, rest = self.unread[:at], self.unread[at:].removeprefix(CLOSE)
        self.unread, self.ended = "", True
        return said, rest


class ReasoningCounter:
    """How many of an answer's tokens came before the closing tag, which one of them may complete."""

    def __init__(self, parser: str) -> None:
        self.ends = [end.encode() for end in ENDS[parser]]
        self.tail, self.ended = b"", False

    def read(self, tokens: Iterable[bytes]) -> int:
        """How many of these do."""
        count = 0
        for token in tokens:
            said = self.tail + token
            self.ended, self.tail = self.ended or any(end in said for end in self.ends), said[-16:]
            count += not self.ended
        return count

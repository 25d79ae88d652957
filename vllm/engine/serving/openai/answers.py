"""Reads one answer piece by piece: what of it is thinking, what is text, and what is a call.

Owns the readers of one answer in their order; made for each by `job`, called with every piece. Pieces of a stream and
a whole answer go the same way. vLLM: `vllm/parser/abstract_parser.py`.
"""

from __future__ import annotations

from typing import Any

from engine.serving.openai.protocol import CommonRequest
from engine.serving.openai.reasoning import ReasoningCounter, ReasoningReader
from engine.serving.openai.tool_calls import ToolCallReader


class AnswerReader:
    """`reasoning_parser` is given where the answer begins with thinking."""

    def __init__(self, body: CommonRequest, tool_parser: str = "hermes", reasoning_parser: str | None = None) -> None:
        self.calls = ToolCallReader(body, tool_parser)
        self.reasoning = ReasoningReader(reasoning_parser) if reasoning_parser else None
        self.thoughts = ReasoningCounter(reasoning_parser) if reasoning_parser else None
        self.tells = getattr(body, "include_reasoning", True)

    def read(self, text: str, final: bool) -> dict[str, Any]:
        """The news in `text` as a chat's delta: `reasoning`, `content`, `tool_calls`. `final`: no more will come."""
        if self.reasoning is None:
            return self.calls.read(text, final)
        thought, text = self.reasoning.read(text, final)
        delta = self.calls.read(text, final) if text or final else {}
        delta = {name: value for name, value in delta.items() if value}  # who only thinks has said nothing
        return ({"reasoning": thought} if thought and self.tells else {}) | delta

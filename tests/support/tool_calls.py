"""Chats that offer tools, and a call as the grammar of a demanded one has it."""

from __future__ import annotations

import json
from typing import Any

from engine.serving.openai.protocol import ChatCompletionRequest
from support.scripted_api import TOOLS, M


def request(choice: Any, tools: list = TOOLS, **fields: Any) -> ChatCompletionRequest:
    """A chat with these tools and this `tool_choice`."""
    return ChatCompletionRequest.model_validate(M | {"tools": tools, "tool_choice": choice} | fields)


def call_of(name: str, arguments: Any) -> str:
    """As text."""
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)

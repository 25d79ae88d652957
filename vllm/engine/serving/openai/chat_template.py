"""A chat as its model's template wants it.

Owns the form of messages in front of a template; called by `serving` and for `/tokenize`. It never knows a token.
vLLM: `vllm/entrypoints/chat_utils.py`.
"""

from __future__ import annotations

import common

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from engine.serving.openai.protocol import ChatMessage, ToolCall

NEWER = {"developer": "system", "function": "tool"}  # roles as templates know them


def messages_for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Roles and plain text, as templates want them; arguments of calls as objects."""
    found = []
    for message in messages:
        content = message.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        entry: dict[str, Any] = {"role": NEWER.get(message.role, message.role), "content": text}
        entry |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
        calls = message.tool_calls or [ToolCall(function=call) for call in [message.function_call] if call]
        if calls:
            entry["tool_calls"] = [call.model_dump(exclude_none=True) for call in calls]
            for call in entry["tool_calls"]:
                call["function"]["arguments"] = _arguments(call["function"].get("arguments"))
        if message.role == "assistant" and isinstance(message.reasoning, str):
            entry |= dict.fromkeys(("reasoning", "reasoning_content"), message.reasoning)  # templates know either
        found.append(entry)
    return found


def left_open(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """A chat whose last message is not closed, so that the answer goes on with it. Raises InputError.

    Only the template knows what it writes behind a message: with a mark at its end, everybody does. The space behind
    the mark tells whether the template strips messages of theirs.
    """
    mark = f"{uuid.uuid4().hex} "
    *before, last = messages
    text = render([*before, {**last, "content": last["content"] + mark}])
    kept = mark in text
    text, found, _ = text.rpartition(mark if kept else mark.strip())
    if not found:
        raise common.InputError("continue_final_message: this model's chat template leaves the last message out")
    return text if kept else text.rstrip()


def _arguments(text: str | None) -> dict[str, Any]:
    """What cannot be read is {}: a call that was cut off stays in its history, where a refusal would end every turn."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

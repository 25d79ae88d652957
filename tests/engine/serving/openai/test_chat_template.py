"""Messages as templates want them."""

from __future__ import annotations

from engine.serving.openai.chat_template import messages_for_template
from engine.serving.openai.protocol import ChatMessage


def test_a_template_sees_no_field_that_a_call_has_not():
    """Templates ask whether a field is there, not whether it is none."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    (message,) = messages_for_template([ChatMessage(role="assistant", tool_calls=calls)])
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }

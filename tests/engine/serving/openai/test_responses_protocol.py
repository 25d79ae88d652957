"""What a client may say to the Responses API, and the chat that says the same."""

from __future__ import annotations

import pytest

from engine.serving.openai.chat_template import messages_for_template
from engine.serving.openai.responses_protocol import ResponsesRequest, as_chat
from engine.serving.openai.tools import structured_outputs

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
@pytest.mark.parametrize("said", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_that_names_no_parameters_has_none(said, choice):
    import llguidance

    from engine.sampling.guided.guidance import read_grammar
    from engine.sampling.guided.structured_outputs import normalize

    chat = chat_of(input=[{"role": "user", "content": "x"}], tools=[{"type": "function", "name": "f", **said}],
                   tool_choice=choice)  # fmt: skip
    field, constraint = structured_outputs(chat)

    def matches(arguments):
        text = f'[{{"name": "f", "parameters": {arguments}}}]' if choice == "required" else arguments
        matcher = read_grammar(llguidance.LLTokenizer("byte"), *normalize(constraint))
        return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()

    assert field == "tools" and matches("{}") and not matches('{"x": 1}')


def chat_of(**fields):
    body = ResponsesRequest(**fields)
    return as_chat(body, body.input)


def test_items_are_messages():
    said = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "…"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": '{"x": 1}', "status": None},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": "said with it"},
        {"role": "assistant", "content": "said after it"},
        {"role": "user", "content": "e"},
    ]  # fmt: skip
    chat = chat_of(input=said, instructions="I")

    def call(i, name, arguments):
        return {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert messages_for_template(chat.messages) == [
        {"role": "system", "content": "I"}, {"role": "system", "content": "D"}, {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [call("1", "f", {"x": 1}), call("2", "g", {})]},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "2"},
        {"role": "assistant", "content": "said with it", "tool_calls": [call("3", "f", {})]},
        {"role": "assistant", "content": "said after it"}, {"role": "user", "content": "e"},
    ]  # fmt: skip


def test_a_call_without_arguments_has_none():
    chat = chat_of(input=[{"type": "function_call", "call_id": "1", "name": "f", "arguments": None}])
    assert messages_for_template(chat.messages)[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_fields_are_fields_of_a_chat():
    schema = {"type": "object"}
    chat = chat_of(
        input="x", tools=[TOOL], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"}, temperature=0.5, seed=3, stop=["."], stream=True, user="u",
        max_output_tokens=7, top_k=4, stream_options={"include_obfuscation": False}, store=False, service_tier="auto",
    )  # fmt: skip
    assert chat.tools[0].function.model_dump() == {"name": "f", "description": "d", "parameters": schema}
    assert chat.tool_choice.function.name == "f" and chat.parallel_tool_calls is False
    assert chat.response_format.json_schema.schema_ == schema and chat.verbosity == "low"
    assert (chat.reasoning_effort, chat.temperature, chat.seed, chat.stop) == ("low", 0.5, 3, ["."])
    assert (chat.stream, chat.max_completion_tokens, chat.top_k, chat.n) == (True, 7, 4, 1)
    plain = chat_of(input="x", tool_choice="auto", tools=[])
    assert (plain.tools, plain.tool_choice, plain.logprobs, plain.temperature) == (None, None, False, None)
    assert chat_of(input="x", text={"format": {"type": "json_object"}}).response_format.type == "json_object"
    assert chat_of(input="x", text={"format": {"type": "text"}}).response_format is None


@pytest.mark.parametrize(
    ("role", "status", "open_end"),
    [("assistant", "incomplete", True), ("assistant", "in_progress", True), ("assistant", "completed", False),
     ("assistant", None, False)],
)  # fmt: skip
def test_a_message_that_is_marked_as_unfinished_goes_on(role, status, open_end):
    said = {"type": "message", "role": role, "content": [{"type": "output_text", "text": "Sure,"}], "status": status}
    question = {"role": "user", "content": "a"}
    chat = chat_of(input=[question, said])
    assert (chat.continue_final_message, chat.add_generation_prompt) == (open_end, not open_end)
    assert not chat_of(input=[question, said, question]).continue_final_message

"""A chat as its model's template wants it."""

from __future__ import annotations

import copy

import pytest

from engine.model import folders
from engine.model.tokenizer import Tokenizer
from engine.serving.openai.chat_template import left_open, messages_for_template
from engine.serving.openai.protocol import ChatCompletionRequest, ChatMessage
from support.scripted_api import (
    CITY,
    TOOLS,
    Calling,
    M,
    ScriptedLLM,
    ScriptedTokenizer,
    ask,
    check_error,
    read_events,
    serve,
)

CALL = {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("said", "want"),
    [([CALLED, {"role": "tool", "tool_call_id": "1", "content": "sunny"}], "Hisunny"),
     ([CALLED | {"content": "Let me see"}, {"role": "tool", "tool_call_id": "1", "name": "f", "content": [
         {"type": "text", "text": "sun", "cache_control": {"type": "ephemeral"}}]}], "HiLet me seesun"),
     ([{"role": "assistant", "content": "Yes", "reasoning_content": "?", "thinking_blocks": []}], "HiYes"),
     ([{"role": "assistant", "content": "Yes", "provider_specific_fields": {"refusal": None}}], "HiYes"),
     ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}], "HiNo"),
     ([{"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "closed": True},
                                         {"type": "output_text", "text": "Yes"}]}], "HiHm.\nYes"),
     ([{"role": "user", "content": [{"type": "input_text", "text": "b"}]}], "Hib"),
     ([{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
       {"role": "function", "name": "f", "content": "sunny"}], "Hisunny"),
     ([{"role": "assistant"}], "Hi")],
)  # fmt: skip
def test_histories_that_clients_send(shared, said, want):
    """Answers with calls and their results, and what LiteLLM and others hang on messages."""
    llm, app = shared
    llm.added.clear()
    assert ask(app, "/v1/chat/completions", {"messages": [*M["messages"], *said]}).status == 200
    assert llm.added[0][1]["prompt"] == want


def test_a_template_hears_of_tools_and_wishes(shared):
    heard = []

    class Listening(ScriptedTokenizer):
        def render_chat(self, messages, add_generation_prompt=True, **variables):
            heard.append((messages, variables))
            return super().render_chat(messages)

    llm = ScriptedLLM(512)
    llm.front.tokenizer = Listening()
    body = {"messages": [*M["messages"], CALLED], "tools": TOOLS, "tool_choice": "none", "reasoning_effort": "none",
            "chat_template_kwargs": {"tools": 5, "x": 1}}  # fmt: skip
    assert ask(serve(llm)[1], "/v1/chat/completions", body).status == 200
    ((messages, variables),) = heard
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "Rome"}}, "an object"
    function = {"name": "f", "description": "F.", "parameters": CITY}
    assert variables == {"x": 1, "reasoning_effort": "none", "enable_thinking": False,
                         "tools": [{"type": "function", "function": function}]}  # fmt: skip


@pytest.mark.parametrize(("said", "heard"), [
    ({"reasoning": "Hm."}, "Hm."), ({"reasoning_content": "Hm."}, "Hm."), ({"reasoning": ""}, ""),
    ({"reasoning": None}, None), ({"reasoning": {"of": "a library"}}, None),
    ({"role": "user", "reasoning": "Hm."}, None),
])  # fmt: skip
def test_a_template_hears_what_an_answer_was_thought_of(said, heard):
    """Of answers that other servers gave; vLLM hands it on under both names, too."""
    chat = ChatCompletionRequest(messages=[{"role": "assistant", "content": "42", **said}])
    (message,) = messages_for_template(chat.messages)
    assert message.get("reasoning") == message.get("reasoning_content") == heard


def test_a_template_hears_of_documents(shared):
    heard = []

    class Listening(ScriptedTokenizer):
        def render_chat(self, messages, add_generation_prompt=True, **variables):
            heard.append(variables)
            return super().render_chat(messages)

    llm = ScriptedLLM(512)
    llm.front.tokenizer = Listening()
    given = [{"title": "t", "text": "x"}]
    for more in ({}, {"chat_template_kwargs": {"documents": 5}}):
        assert ask(serve(llm)[1], "/v1/chat/completions", M | more | {"documents": given}).status == 200
    assert [variables["documents"] for variables in heard] == [given, given]


class Closing(ScriptedTokenizer):
    """Its template closes every message; `strips` as Llama 3's does."""

    def __init__(self, strips=False, omits=False):
        self.strips, self.omits = strips, omits

    def render_chat(self, messages, add_generation_prompt=True, **variables):
        texts = [message["content"].strip() if self.strips else message["content"] for message in messages]
        texts[-1:] = [] if self.omits else texts[-1:]
        return "".join(f"<{text}>" for text in texts) + "<" * add_generation_prompt


@pytest.mark.parametrize(("strips", "want"), [(False, "<Hi>< Sure, "), (True, "<Hi><Sure,")])
def test_an_answer_goes_on_where_its_client_began_it(strips, want):
    """What the client began is the prompt's end, and no part of the answer."""
    llm = ScriptedLLM(512)
    llm.front.tokenizer = Closing(strips)
    _, app = serve(llm)
    said = {"messages": [*M["messages"], {"role": "assistant", "content": " Sure, "}]}
    body = said | {"continue_final_message": True, "add_generation_prompt": False, "return_prompt_text": True}
    found = ask(app, "/v1/chat/completions", body).json
    assert found["choices"][0]["message"]["content"] == "Paris." and found["prompt_text"] == want
    assert llm.added[0][1]["prompt"] == want
    streamed = read_events(ask(app, "/v1/chat/completions", body | {"stream": True}).text)
    assert [x.get("prompt_text") for x in streamed[:-1]] == [want, *[None] * (len(streamed) - 2)], "once"
    tokens = {name: value for name, value in body.items() if name != "return_prompt_text"}
    assert ask(app, "/tokenize", tokens).json["tokens"] == llm.added[0][1]["prompt_token_ids"]
    for path in ("/v1/chat/completions", "/tokenize"):
        more = {"continue_final_message": True}
        check_error(ask(app, path, said | more), 400, "continue_final_message", "add_generation_prompt to be false")
    llm.front.tokenizer.omits = True
    check_error(ask(app, "/v1/chat/completions", body), 400, "continue_final_message", "leaves the last message out")


def test_tools_have_a_template_of_their_own(real_model):
    """Hermes' and Mixtral's folders have two: what a client sends as tools must reach the model."""
    llm = ScriptedLLM(512)
    llm.front.tokenizer = tokenizer = copy.copy(real_model[1])
    tokenizer.chat_template = {
        "default": "{{ messages[0].content }}",
        "tool_use": "{{ tools | tojson(ensure_ascii=False) }} {{ messages[0].content }}",
    }
    _, app = serve(llm, kind=Calling)
    tools = [{"type": "function", "function": {"name": "wetter", "description": "für München"}}]
    for more, start in (({}, "Hi"), ({"tools": tools}, '[{"type": "function"')):
        assert ask(app, "/v1/chat/completions", M | more).status == 200
        prompt = llm.added[-1][1]["prompt"]
        assert prompt.startswith(start) and ("für München" in prompt) == ("tools" in more)
        tokens = ask(app, "/tokenize", M | more).json["tokens"]
        assert tokenizer.decode(tokens, False) == prompt


@pytest.fixture(scope="module")
def tokenizers():
    """Transformers' and ours."""
    import transformers

    folder = folders.model_folder()
    return transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(folder)


@pytest.mark.parametrize("strip", ["", " | trim"])
@pytest.mark.parametrize("said", ["Sure, ", "Sure", "  two  words\n", "", "<|im_end|>", "Hello"])
def test_an_open_end_is_transformers_own(tokenizers, said, strip):
    """Of SmolLM2's template, and of one that strips messages as Llama 3's does."""
    theirs, ours = map(copy.copy, tokenizers)
    template = theirs.chat_template.replace("message['content']", f"(message['content']{strip})")
    theirs.chat_template = ours.chat_template = template
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
    want = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)

    def render(found):
        return ours.render_chat(found, add_generation_prompt=False)

    assert left_open(render, messages) == want and messages[-1]["content"] == said


@pytest.mark.parametrize("arguments", ['{"x": 3, "alternative', "[]", "5", "", None, "[" * 5000])
def test_arguments_that_cannot_be_read_do_not_end_a_conversation(shared, arguments):
    """A call that max_tokens has cut comes back in every later request (Semantic Kernel)."""
    said = CALLED | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}]}
    body = ChatCompletionRequest(messages=[*M["messages"], said])
    assert messages_for_template(body.messages)[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert ask(shared[1], "/v1/chat/completions", {"messages": [*M["messages"], said]}).status == 200


def test_a_call_in_the_older_form_is_a_call():
    """What OpenAI has replaced stands in old histories: the role `function`, and one call beside the content."""
    said = [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
            {"role": "function", "name": "f", "content": None}]  # fmt: skip
    assert messages_for_template(ChatCompletionRequest(messages=said).messages) == [
        {"role": "assistant", "content": "",
         "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "", "name": "f"}]  # fmt: skip


def test_a_template_sees_no_field_that_a_call_has_not():
    """Templates ask whether a field is there, not whether it is none."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    (message,) = messages_for_template([ChatMessage(role="assistant", tool_calls=calls)])
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }

"""What was thought is no answer, however its characters come."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_args import REASONING_PARSERS
from engine.serving.openai.answers import AnswerReader
from engine.serving.openai.reasoning import ENDS, ReasoningCounter, ReasoningReader, is_open
from engine.serving.openai.serving import OpenAIServing
from support.scripted_api import CHAT, CITY, Calling, M, Total, ask, read_events
from support.scripted_api import serve as scripted
from support.scripted_server import Forced, TellingTokenizer
from support.tool_calls import request

CALL = '<tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>'


def read(pieces, parser="deepseek_r1"):
    reader = ReasoningReader(parser)
    found = [reader.read(piece, i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    return "".join(thought for thought, _ in found), "".join(text for _, text in found)


CASES = [
    ("<think>\nHm.\n</think>\n\nYes.", "deepseek_r1", "\nHm.\n", "\n\nYes."),
    (" \n<think>Hm.</think>Yes.", "qwen3", "Hm.", "Yes."), ("Hm.</think>Yes.", "deepseek_r1", "Hm.", "Yes."),
    ("Hm.", "deepseek_r1", "Hm.", ""), ("", "qwen3", "", ""), ("</think>Yes.", "qwen3", "", "Yes."),
    ("a < b </thin", "deepseek_r1", "a < b </thin", ""), ("<thin", "deepseek_r1", "<thin", ""),
    ("<think>a<think>b</think>c</think>d", "deepseek_r1", "a<think>b", "c</think>d"),
    ("a <think>b</think>c", "deepseek_r1", "a <think>b", "c"),
    (f"Hm.{CALL}", "qwen3", "Hm.", CALL), (f"Hm.{CALL}", "deepseek_r1", f"Hm.{CALL}", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parser", "thought", "said"), CASES)
def test_thinking_reads_the_same_however_it_comes(text, parser, thought, said):
    assert read([text], parser) == (thought, said) == read([*text, ""], parser)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "<", "</", "a", " ", "\n"]), max_size=10)
       .map("".join), st.lists(st.integers(0, 60), max_size=9), st.sampled_from(REASONING_PARSERS))  # fmt: skip
@settings(max_examples=200)
def test_cut_anywhere_it_reads_the_same(text, cuts, parser):
    at = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    whole = read([text], parser)
    assert read([text[a:b] for a, b in itertools.pairwise(at)] or [""], parser) == whole == read([*text, ""], parser)


def test_every_parser_that_the_command_line_knows_is_there():
    assert tuple(ENDS) == REASONING_PARSERS


@pytest.mark.parametrize(
    ("behind", "want"),
    [("", None), ("<|im_start|>assistant\n<think>\n", True), ("<think>\n\n</think>\n\n", False), ("</think>", False)],
)
def test_what_a_template_has_written_behind_the_last_message(behind, want):
    assert is_open(behind) is want


def test_tokens_that_were_thought():
    assert ReasoningCounter("qwen3").read([b"<think>", b"a", b"b</th", b"ink>c", b"d"]) == 3
    counter = ReasoningCounter("deepseek_r1")
    assert [counter.read([token]) for token in (b"a", b"</think>", b"b")] == [1, 0, 0]


def test_a_call_behind_what_was_thought():
    reader = AnswerReader(request("auto"), "hermes", "qwen3")
    delta = reader.read(f"<think>Hm.</think>{CALL}", True)
    assert delta["reasoning"] == "Hm." and "content" not in delta
    assert delta["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city": "Rome"}'}
    silent = AnswerReader(request("none", include_reasoning=False), "hermes", "qwen3")
    assert silent.read("Hm.</think>Yes.", True) == {"content": "Yes."}


class Thinking(Calling):
    """Served with --reasoning-parser qwen3 --response-role bot."""

    reasoning_parser, response_role = "qwen3", "bot"


def serve(said, kind=Thinking):
    return scripted(Forced([said]), kind=kind)[1]


@pytest.mark.parametrize(
    ("said", "thought", "content"),
    [("<think>Hm.</think>Yes.", "Hm.", "Yes."), ("Hm.", "Hm.", None), ("</think>Yes.", None, "Yes.")],
)
def test_what_was_thought_stands_in_a_field_of_its_own(said, thought, content):
    """As in vLLM 0.32: `reasoning`, whole and streamed, and its tokens beside the others in `usage`."""
    whole = ask(serve(said), CHAT, M).json
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["content"], message["role"]) == (thought, content, "bot")
    tokens = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    body = M | {"stream": True, "stream_options": {"include_usage": True}}
    *events, last, done = read_events(ask(serve(said), CHAT, body).text)
    assert done == "[DONE]" and last["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}
    assert tokens == len(said.partition("</think>")[0]) + ("</think>" in said) * (len("</think>") - 1)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "bot", "content": ""}
    assert "".join(delta.get("reasoning", "") for delta in deltas) == (thought or "")
    assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
    silent = ask(serve(said), CHAT, M | {"include_reasoning": False}).json["choices"][0]["message"]
    assert (silent["reasoning"], silent["content"]) == (None, content)


@pytest.mark.parametrize("body", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_who_wants_no_thinking_gets_an_answer(body):
    message = ask(serve("Yes."), CHAT, M | body).json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "Yes.")


@pytest.mark.parametrize(("behind", "thinks"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False)])
def test_what_the_template_writes_counts_more_than_a_wish(behind, thinks):
    """What stands in the history counts for nothing: an assistant's thoughts of before are closed."""
    llm = Forced(["Yes."])
    render = llm.front.tokenizer.render_chat
    llm.front.tokenizer.render_chat = lambda messages, **about: render(messages, **about)[:-2] + behind
    llm.add_request = lambda *about, **more: Forced.add_request(
        llm, about[0], about[1] | {"prompt": render([], True)}, *about[2:], **more
    )
    _, app = scripted(llm, kind=Thinking)
    turns = [{"role": "assistant", "content": "<think>a</think>b" if thinks else "<think>"}, *M["messages"]]
    wish = {"reasoning_effort": "none" if thinks else "high"}
    message = ask(app, CHAT, {"messages": turns} | wish).json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (("Yes.", None) if thinks else (None, "Yes."))


class ThinkingJSON(OpenAIServing):
    """Served with --reasoning-parser deepseek_r1; guides are the real ones."""

    reasoning_parser = "deepseek_r1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("city", "fits"), [("Rome", True), ("Bonn", False)])
def test_a_form_is_the_answers_and_not_the_thoughts(stream, city, fits):
    llm, total, tokenizer = Forced([f'<think>{{"city"?</think>{{"city": "{city}"}}']), Total(), TellingTokenizer()
    tokenizer.config, tokenizer.backend = total.front.tokenizer.config, total.front.tokenizer.backend
    llm.front = total.front
    llm.front.tokenizer = tokenizer
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    heard = ask(scripted(llm, kind=ThinkingJSON)[1], CHAT, M | {"response_format": form, "stream": stream})
    asked = llm.added[0][2].structured_outputs
    assert asked["json"] == CITY and asked["reasoning_end"] == "</think>"
    if not fits:
        assert "left its grammar" in heard.text
        return
    choices = [e["choices"][0] for e in read_events(heard.text)[:-1]] if stream else heard.json["choices"]
    said = [choice["delta" if stream else "message"] for choice in choices]
    assert "".join(each.get("reasoning") or "" for each in said) == '{"city"?'
    assert "".join(each.get("content") or "" for each in said) == '{"city": "Rome"}'


def test_a_message_that_goes_on_keeps_its_role():
    said = {"messages": [*M["messages"], {"role": "assistant", "content": "Yes"}], "add_generation_prompt": False}
    assert ask(serve("."), CHAT, said).json["choices"][0]["message"]["role"] == "assistant"

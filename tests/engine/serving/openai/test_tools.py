"""What an answer must match: a demanded call, and nothing else where one is demanded."""

from __future__ import annotations

import functools
import json

import pytest

from engine.serving.openai.protocol import CompletionRequest
from engine.serving.openai.tools import structured_outputs
from support.scripted_api import CITY, NAMED, M, P, Total, ask, check_error, serve
from support.tool_calls import call_of, request

NAMED_G = {"type": "function", "function": {"name": "g"}}


def matches(constraint, text):
    """May an answer be `text`, byte by byte?"""
    import llguidance

    from engine.sampling.guided.guidance import read_grammar
    from engine.sampling.guided.structured_outputs import normalize

    matcher = read_grammar(llguidance.LLTokenizer("byte"), *normalize(constraint))
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def constraint(body):
    return structured_outputs(body)[1]


def test_a_demanded_call_can_only_be_one():
    """Two tools whose schemas use the same `$defs` name for different things, and one that takes any object."""

    def thing(kind):
        return {"type": "object", "properties": {"x": {"$ref": "#/$defs/T"}}, "required": ["x"],
                "additionalProperties": False, "$defs": {"T": {"type": kind}}}  # fmt: skip

    tools = [{"type": "function", "function": {"name": 'q"é', "parameters": thing("integer")}},
             {"type": "function", "function": {"name": "g", "parameters": thing("boolean")}},
             {"type": "function", "function": {"name": "h", "parameters": {"type": "object"}}}]  # fmt: skip
    a, b, c = call_of('q"é', {"x": 1}), call_of("g", {"x": True}), call_of("h", {"y": "z"})
    many, one = (constraint(request("required", tools, parallel_tool_calls=p)) for p in (True, False))
    for text in (a, b, c):
        assert matches(many, f"[{text}]") and matches(one, f"[{text}]") and not matches(many, text)
    assert matches(many, f"[{a}, {b}, {a}]") and not matches(one, f"[{a}, {b}]")
    for wrong in ("[]", f"[{call_of('g', {'x': 1})}]", f"[{call_of('i', {})}]", f"[{call_of('h', 5)}]"):
        assert not matches(many, wrong)
    named = constraint(request({"type": "function", "function": {"name": "g"}}, tools))
    assert matches(named, '{"x": true}') and not matches(named, '{"x": 1}')


def test_a_demanded_calls_schema_may_overlap_and_ask_for_nothing():
    value = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    parameters = {"type": "object", "properties": {"x": {"type": "array", "items": value, "uniqueItems": False}}}
    tools = [{"type": "function", "function": {"name": "g", "parameters": parameters}}]
    many, one = (constraint(request(choice, tools)) for choice in ("required", NAMED_G))
    for x, fine in (([1, 1.5, 1], True), ([""], False)):
        assert matches(many, f"[{call_of('g', {'x': x})}]") == matches(one, json.dumps({"x": x})) == fine


def test_a_demanded_call_has_no_arguments_of_its_own():
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "g", "parameters": parameters}}]
    many, one = (constraint(request(choice, tools)) for choice in ("required", NAMED_G))
    for arguments, fine in (({"x": 1}, True), ({"x": 1, "y": 2}, False)):
        assert matches(many, f"[{call_of('g', arguments)}]") == matches(one, json.dumps(arguments)) == fine


@pytest.mark.parametrize("said", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_that_names_no_parameters_has_none(said):
    """As OpenAI says and vLLM does: a demanded call has the arguments {}, and invents none."""
    tools = [{"type": "function", "function": {"name": "g", **said}}]
    many, one = (constraint(request(choice, tools)) for choice in ("required", NAMED_G))
    for arguments, fine in (({}, True), ({"x": 1}, False)):
        assert matches(many, f"[{call_of('g', arguments)}]") == matches(one, json.dumps(arguments)) == fine


def test_a_demanded_call_comes_before_a_form_for_texts():
    both = request("required", response_format={"type": "json_object"})
    assert "grammar" in constraint(both)
    for choice in ("auto", "none"):
        assert constraint(request(choice, response_format={"type": "json_object"})) == {"json_object": True}


@pytest.mark.parametrize(
    ("fields", "want"),
    [({}, None), ({"response_format": {"type": "text"}}, None),
     ({"response_format": {"type": "json_object"}}, {"json_object": True}),
     ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
      {"json": {"type": "object"}}),
     ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
     ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
     ({"structured_outputs": {"json": "{}"}}, {"json": "{}"}),
     ({"guided_json": {"type": "null"}}, {"json": {"type": "null"}}),
     ({"guided_choice": ["x", "y"]}, {"choice": ["x", "y"]}), ({"guided_grammar": "g"}, {"grammar": "g"}),
     ({"guided_grammar": "g", "structured_outputs": {"grammar": "g"}, "guided_decoding_backend": "guidance"},
      {"grammar": "g"})],
)  # fmt: skip
def test_three_dialects_of_one_constraint(fields, want):
    found = structured_outputs(CompletionRequest(prompt="x", **fields))
    assert found is None if want is None else found[0] in fields and found[1] == want


WRONG_SCHEMA = {"type": "wrong"}
DEEP = functools.reduce(lambda inner, _: {"items": inner}, range(70), {})


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def answer_of(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


NAMED_TOOL = {"tools": [tool("h", CITY), tool("f", WRONG_SCHEMA)], "tool_choice": NAMED}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [("completions", {"structured_outputs": {"json": WRONG_SCHEMA}}, "structured_outputs: json: Invalid type: wrong"),
     ("completions", {"structured_outputs": {"regex": "("}}, "structured_outputs: regex '(': missing )"),
     ("completions", {"structured_outputs": {"choice": []}}, "structured_outputs: choice []: must be a list of str"),
     ("completions", {"structured_outputs": {"grammar": "start: a"}}, "structured_outputs: grammar: at 1(8): unknown"),
     ("completions", {"guided_json": WRONG_SCHEMA}, "guided_json: json: Invalid type: wrong"),
     ("completions", {"guided_regex": "("}, "guided_regex: regex '(': missing )"),
     ("completions", answer_of(WRONG_SCHEMA), "response_format: json: Invalid type: wrong"),
     ("completions", answer_of(DEEP), "response_format: json '"),
     ("completions", {"structured_outputs": {"regex": "a"}} | answer_of(CITY), "structured_outputs: exactly one"),
     ("chat/completions", answer_of(WRONG_SCHEMA), "response_format: json: Invalid type: wrong"),
     ("chat/completions", NAMED_TOOL, "tools: f: Invalid type: wrong"),
     ("chat/completions", NAMED_TOOL | {"tool_choice": "required"}, "tools: f: Invalid type: wrong"),
     ("chat/completions", {"tools": [tool("f", CITY), tool("é", {"properties": {"x": 5}})], "tool_choice": "required"},
      "tools: é: "),
     ("chat/completions", {"tools": [tool("f", CITY), tool("f", {"not": {}}), tool("g", CITY)],
                           "tool_choice": "required"}, 'tools: f: Unimplemented keys: ["not"]'),
     ("chat/completions", {"tools": [tool("f", CITY), tool("g", DEEP)], "tool_choice": "required"}, "tools: g: obj"),
     ("chat/completions", {"tools": [tool("f", DEEP)], "tool_choice": NAMED}, "tools: f: json '"),
     ("chat/completions", {"tools": [tool("f" * i, CITY) for i in range(1, 300)], "tool_choice": "required"},
      "tools: at most 65,536 characters are allowed"),
     ("chat/completions", {"tools": [tool("f", {"type": "w" * 400})], "tool_choice": "required"},
      f"tools: f: Invalid type: {'w' * 200}"),
     ("responses", {"text": {"format": {"type": "json_schema", "schema": WRONG_SCHEMA}}},
      "text: json: Invalid type: wrong"),
     ("responses", {"tools": [{"type": "function", "name": "f", "parameters": WRONG_SCHEMA}],
                    "tool_choice": "required"}, "tools: f: Invalid type: wrong")],
)  # fmt: skip
def test_a_wrong_constraint_is_blamed_on_what_the_client_wrote(path, body, text):
    """On its field, and of tools on the function; our own grammar of calls is nobody's business."""
    llm, app = serve(Total())
    message = check_error(
        ask(app, f"/v1/{path}", {"completions": P, "responses": {"input": "x"}}.get(path, M) | body),
        400, text.split(":")[0],
    )["message"]  # fmt: skip
    assert message.startswith(text) and not llm.added
    assert path == "completions" or not any(ours in message for ours in ("structured_", "arguments_", "x-guidance"))

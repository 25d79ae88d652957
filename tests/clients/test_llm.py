"""The command `llm` on our server, as a model in its YAML file: a prompt, a conversation, a schema, a function."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

MODELS = """
- model_id: here
  model_name: smol
  api_base: {url}/v1
  api_key_name: here
  supports_tools: true
  supports_schema: true
"""
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
FUNCTION = 'def weather(city: str) -> str:\n    "The weather."\n    return f"sunny in {city}"'


@pytest.mark.slow
def test_a_prompt_a_conversation_a_schema_and_a_function(tmp_path):
    program = clients.python("llm==0.36").with_name("llm")
    person = {"name": "Ann", "age": 30}
    answers = ["Hello there.", "Hello again.", json.dumps(person), CALL, "Sunny."]
    with scripted_server(answers, keys=["secret"]) as (url, llm):
        (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=url))
        (tmp_path / "keys.json").write_text(json.dumps({"here": "secret"}))

        def ask(*arguments):
            about = {"LLM_USER_PATH": str(tmp_path), "PYTHONPATH": "", "VIRTUAL_ENV": ""}
            return clients.run([program, *arguments], tmp_path, **about).stdout.strip()

        said = [ask("-m", "here", "-s", "Be brief.", "Hello"), ask("-c", "And again")]
        shaped = ask("-m", "here", "--no-stream", "--schema", "name, age int", "Ann is 30.")
        found = ask("-m", "here", "--functions", FUNCTION, "-o", "temperature", "0", "How is the weather?")
    assert said == ["Hello there.", "Hello again."] and json.loads(shaped) == person and found == "Sunny."
    asked = [[message["content"] for message in each["messages"]] for each in llm.asked]
    assert asked[:2] == [["Be brief.", "Hello"], ["Be brief.", "Hello", "Hello there.", "And again"]]
    assert asked[4][-1] == "sunny in Rome" and llm.added[3][2].temperature == 0

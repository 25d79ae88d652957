"""Instructor on our server: an answer of a given shape in three of its modes, one that it asks for again, and parts."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

PROGRAM = """
import json, os
import instructor, openai
from pydantic import BaseModel, field_validator

class Person(BaseModel):
    name: str
    age: int

    @field_validator("age")
    @classmethod
    def grown_up(cls, age):
        if age < 18:
            raise ValueError("must be 18 or more")
        return age

server = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key="secret", max_retries=0)
about = {"model": "smol", "response_model": Person, "messages": [{"role": "user", "content": "Ann is 30."}]}
found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    found[mode.name] = instructor.from_openai(server, mode=mode).chat.completions.create(**about).model_dump()
client = instructor.from_openai(server, mode=instructor.Mode.JSON_SCHEMA)
found["again"] = client.chat.completions.create(**about, max_retries=2).model_dump()
*parts, last = client.chat.completions.create_partial(**about)
found["parts"], found["last"] = len(parts), last.model_dump()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_three_modes_a_second_try_and_parts(tmp_path):
    interpreter = clients.python("instructor==1.17.0")
    person, child = {"name": "Ann", "age": 30}, {"name": "Ann", "age": 3}
    answers = [json.dumps(each) for each in (person, person, person, child, person)]
    with scripted_server(answers, keys=["secret"]) as (url, llm):
        found = json.loads(clients.script(interpreter, PROGRAM, tmp_path, URL=url))
    assert found["TOOLS"] == found["JSON"] == found["JSON_SCHEMA"] == found["again"] == found["last"] == person
    assert found["parts"] > 2 and len(llm.asked) == 6
    assert "must be 18 or more" in json.dumps(llm.asked[4]["messages"]), "the second try is told what was wrong"

"""DSPy on our server: a signature with types, a chain of thought, a program that calls a tool."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

PROGRAM = """
import json, os
import dspy

lm = dspy.LM("openai/smol", api_base=os.environ["URL"] + "/v1", api_key="secret", cache=False, num_retries=0)
dspy.configure(lm=lm)

def weather(city: str) -> str:
    "The weather of a city."
    return f"sunny in {city}"

plain = dspy.Predict("question -> answer: str, score: float")(question="How is Rome?")
thought = dspy.ChainOfThought("question -> answer")(question="How is Rome?")
looked = dspy.ReAct("question -> answer", tools=[weather], max_iters=3)(question="How is the weather in Rome?")
print(json.dumps({"raw": lm("Hello")[0], "plain": [plain.answer, plain.score], "looked": looked.answer,
                  "thought": [thought.reasoning, thought.answer], "seen": looked.trajectory["observation_0"]}))
"""
FIELD = "[[ ## {} ## ]]\n{}\n\n"


def written(**fields):
    """The fields as DSPy's own format has them."""
    return "".join(FIELD.format(*each) for each in fields.items()) + "[[ ## completed ## ]]"


@pytest.mark.long
def test_a_signature_a_thought_and_a_tool(tmp_path):
    interpreter = clients.python("dspy==3.4.1")
    look = written(next_thought="I look.", next_tool_name="weather", next_tool_args=json.dumps({"city": "Rome"}))
    end = written(next_thought="Done.", next_tool_name="finish", next_tool_args="{}")
    told = written(reasoning="It was said.", answer="Sunny.")
    answers = [written(answer="Fine.", score="0.5"), told, look, end, told, "Hello there."]
    with scripted_server(answers, keys=["secret"]) as (url, llm):
        about = {"URL": url, "DSPY_CACHEDIR": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        found = json.loads(clients.script(interpreter, PROGRAM, tmp_path, **about).splitlines()[-1])
    assert (found["plain"], found["thought"]) == (["Fine.", 0.5], ["It was said.", "Sunny."])
    assert (found["seen"], found["looked"], found["raw"]) == ("sunny in Rome", "Sunny.", "Hello there.")
    assert len(llm.asked) == 6

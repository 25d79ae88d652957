"""opencode on our server, set up as for any that speaks like OpenAI's: a command, and a session that goes on."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server


def act(messages, tools):
    """A model that runs one command and then tells what came of it; asked without tools, it names the session."""
    if tools and messages[-1]["role"] == "user" and "list" in messages[-1]["content"]:
        arguments = {"command": "echo forty-$((1 + 1))", "description": "says it"}
        return f"I look.<tool_call>{json.dumps({'name': 'bash', 'arguments': arguments})}</tool_call>"
    return f"Heard: {messages[-1]['content'].strip()[-40:]}"


@pytest.mark.slow
def test_a_command_and_a_session_that_goes_on(tmp_path):
    opencode = clients.npm("opencode-ai@1.18.33") / ".bin" / "opencode"
    work = tmp_path / "work"
    work.mkdir()
    homes = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("DATA", "CONFIG", "CACHE", "STATE")}

    def ask(*arguments):
        return clients.run([opencode, "run", *arguments], work, HOME=str(tmp_path), PWD=str(work), **homes,
                           OPENCODE_DISABLE_MODELS_FETCH="1").stdout  # fmt: skip

    with scripted_server([act], keys=["secret"]) as (url, llm):
        models = {"smol": {"name": "smol", "limit": {"context": 100_000, "output": 4_000}}}
        here = {"npm": "@ai-sdk/openai-compatible", "name": "here", "models": models,
                "options": {"baseURL": f"{url}/v1", "apiKey": "secret"}}  # fmt: skip
        about = {"provider": {"here": here}, "model": "here/smol", "small_model": "here/smol", "autoupdate": False}
        (work / "opencode.json").write_text(json.dumps(about))
        first = ask("please list it")
        again = ask("--continue", "and again")
    assert "I look." in first and "Heard: forty-2" in first and "Heard: " in again
    asked = [each for each in llm.asked if each["tools"]]
    assert len(asked) == 3 and "bash" in [tool["function"]["name"] for tool in asked[0]["tools"]]
    history = [message["role"] for message in asked[-1]["messages"]]
    assert history[-1] == "user" and "tool" in history, "a session that goes on has its calls"

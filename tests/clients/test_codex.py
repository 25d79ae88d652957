"""OpenAI's coding agent on our server, as its users set it up: two turns, a command, and a resumed session."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

CONFIG = """
model = "smol"
model_provider = "here"

[model_providers.here]
name = "here"
base_url = "{url}/v1"
env_key = "HERE_KEY"
wire_api = "responses"
"""
FLAGS = ["--skip-git-repo-check", "--json"]


def act(messages, tools):
    """A model that runs one command and then tells what came of it."""
    if messages[-1]["role"] == "user" and "list" in messages[-1]["content"]:
        arguments = {"cmd": "echo forty-$((1 + 1))"}
        return f"I look.<tool_call>{json.dumps({'name': 'exec_command', 'arguments': arguments})}</tool_call>"
    return f"Heard: {messages[-1]['content'][-40:]}"


@pytest.mark.slow
def test_two_turns_a_command_and_a_resumed_session(tmp_path):
    codex = clients.npm("@openai/codex@0.171.0") / ".bin" / "codex"
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir(), work.mkdir()

    def ask(*arguments):
        done = clients.run([codex, "exec", *arguments], work, CODEX_HOME=str(home), HOME=str(home), HERE_KEY="secret")
        events = [json.loads(line) for line in done.stdout.splitlines()]
        assert events[-1]["type"] == "turn.completed", done.stdout
        return [event["item"] for event in events if event["type"] == "item.completed"]

    with scripted_server([act], keys=["secret"]) as (url, llm):
        (home / "config.toml").write_text(CONFIG.format(url=url))
        first = ask(*FLAGS, "-s", "danger-full-access", "please list it")
        again = ask("resume", "--last", *FLAGS, "and again")
    (command,) = [item for item in first if item["type"] == "command_execution"]
    assert (command["exit_code"], command["aggregated_output"].strip()) == (0, "forty-2")
    said = [item["text"] for item in (*first, *again) if item["type"] == "agent_message"]
    assert said[0] == "I look." and "forty-2" in said[1] and said[2] == "Heard: and again"
    assert len(llm.asked) == 3
    names = [tool["function"]["name"] for tool in llm.asked[0]["tools"]]
    assert "exec_command" in names and all(tool["type"] == "function" for tool in llm.asked[0]["tools"])
    history = [message["role"] for message in llm.asked[-1]["messages"]]
    assert history[-1] == "user" and "tool" in history, "a resumed session has its calls"

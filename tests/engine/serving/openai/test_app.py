"""The routes: who finds what, and what a client hears where there is nothing."""

from __future__ import annotations

import json

import pytest

from engine.errors import EngineDeadError
from engine.serving.openai.app import build_app
from engine.serving.openai.serving import OpenAIServing
from support.scripted_api import COMPLETION, TOOLS, M, P, ScriptedLLM, ScriptedTokenizer, ask, check_error, serve


@pytest.mark.parametrize("root", [None, "/models/of/mine"])
def test_a_client_finds_the_tokenizer_of_a_model_that_has_another_name(root):
    """`vllm bench serve` loads it from what a model's card calls root."""
    llm, serving = ScriptedLLM(), OpenAIServing(ScriptedLLM(), ["smol"], {"mine": "/adapters/1"})
    serving.llm, serving.root = llm, root
    app = build_app(serving)
    cards = {card["id"]: card for card in ask(app, "/v1/models", method="GET").json["data"]}
    assert {name: (card["root"], card["parent"]) for name, card in cards.items()} == {
        "smol": (root or "smol", None), "mine": ("/adapters/1", "smol")}  # fmt: skip
    assert ask(app, "/v1/models/mine", method="GET").json == cards["mine"]
    assert ask(app, "/v1/models/", method="GET").json == ask(app, "/v1/models", method="GET").json, "a slash at its end"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [("GET", "/v1/completions", None, 405), ("POST", "/health", None, 405), ("GET", "/nowhere", None, 404),
     ("GET", "/v1/models/gpt-9", None, 404), ("POST", "/tokenize", {}, 400), ("POST", "/tokenize", {"prompt": 5}, 400),
     ("POST", "/tokenize", {"prompt": "a", "messages": M["messages"]}, 400),
     ("POST", "/tokenize", {"messages": []}, 400), ("DELETE", "/v1/models", None, 405),
     ("POST", "/detokenize", {"tokens": "abc"}, 400), ("POST", "/tokenize", {"prompt": "a", "model": "x"}, 404)],
)  # fmt: skip
def test_other_paths(shared, method, path, body, status):
    check_error(ask(shared[1], path, body, method=method), status)


def test_what_one_key_has_loaded_no_other_key_replaces(monkeypatch):
    """A name is what clients ask for: another's weights under it would answer them."""
    loaded = []

    class Loading(ScriptedLLM):
        async def call_utility(self, *about):
            loaded.append(about)

    serving = OpenAIServing(Loading(), ["smol"], {"own": "/adapters/0"})
    serving.runtime_loras = True
    app = build_app(serving, ["a", "b"])

    def change(path, name, key, **about):
        if path == "load":
            about["lora_path"] = f"/adapters/{key}"
        return ask(app, f"/v1/{path}_lora_adapter", about | {"lora_name": name},
                   headers={"authorization": f"Bearer {key}"})  # fmt: skip

    assert change("load", "x", "a").status == 200
    for path, about in (("load", {"load_inplace": True}), ("unload", {})):
        check_error(change(path, "x", "b", **about), 400, "lora_name", "another key")
    assert len(loaded) == 1 and serving.loras["x"][0] == "/adapters/a"
    assert ask(app, COMPLETION, P | {"model": "x"}, headers={"authorization": "Bearer b"}).status == 200
    assert change("load", "x", "a", load_inplace=True).status == 200
    assert change("unload", "x", "a").status == 200 and change("load", "x", "b").status == 200
    assert change("unload", "own", "b").status == 200, "the server's own are everybody's"


def test_a_page_in_a_browser_may_ask():
    """A preflight has no key; and what a page is refused, it may read."""
    llm, app = serve(keys=["key"])
    wants = {"origin": "http://page", "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type,x-stainless-os"}  # fmt: skip
    heard = ask(app, "/v1/chat/completions", method="OPTIONS", headers=wants)
    assert heard.status == 200 and heard.headers["access-control-allow-origin"] == "*"
    assert "POST" in heard.headers["access-control-allow-methods"]
    assert heard.headers["access-control-allow-headers"] == wants["access-control-request-headers"]
    for key, status in (("key", 200), ("wrong", 401)):
        heard = ask(app, "/v1/completions", P, headers={"origin": "http://page", "authorization": f"Bearer {key}"})
        assert heard.status == status and heard.headers["access-control-allow-origin"] == "*"
    assert len(llm.added) == 1


def test_a_dead_engine_is_said_at_once():
    llm, app = serve()
    llm.dead = EngineDeadError("the engine process has died")
    check_error(ask(app, "/v1/completions", P), 500, text="died")
    assert ask(app, "/health", method="GET").status == ask(app, "/ping", method="GET").status == 503
    assert ask(app, "/v1/models", method="GET").status == 200


def test_tokenize_and_back(shared):
    _, app = shared
    found = ask(app, "/tokenize", {"prompt": "abc", "return_token_strs": True}).json
    assert found == {"count": 3, "max_model_len": 512, "tokens": [97, 98, 99], "token_strs": ["a", "b", "c"]}
    assert ask(app, "/tokenize", {"messages": M["messages"]}).json["tokens"] == [72, 105]


def test_a_tokenized_chat_is_the_chat_that_would_be_answered():
    class Showing(ScriptedTokenizer):
        def render_chat(self, messages, add_generation_prompt=True, **variables):
            return json.dumps([messages, add_generation_prompt, variables])

    llm = ScriptedLLM(512)
    llm.front.tokenizer = Showing()
    _, app = serve(llm)
    body = M | {"tools": TOOLS, "chat_template_kwargs": {"x": 1, "add_generation_prompt": 5},
                "add_generation_prompt": False}  # fmt: skip
    tokens = ask(app, "/tokenize", body).json["tokens"]
    assert ask(app, "/v1/chat/completions", body | {"tool_choice": "none"}).status == 200
    ((_, prompt, _),) = llm.added
    assert tokens == prompt["prompt_token_ids"] and '"x": 1' in prompt["prompt"] and ", false, " in prompt["prompt"]


def test_a_tokens_name_is_the_vocabularys(shared):
    """As in vLLM: a byte that is no character has a name there, and as text it would be lost."""
    llm = ScriptedLLM(512)
    llm.front.tokenizer = tokenizer = ScriptedTokenizer()
    tokenizer.backend = type("", (), {"get_vocab": staticmethod(lambda: {"Ġw": 32, "Ã": 97})})
    found = ask(serve(llm)[1], "/tokenize", {"prompt": " a", "return_token_strs": True}).json
    assert found["token_strs"] == ["Ġw", "Ã"]
    assert ask(shared[1], "/tokenize", {"prompt": "a", "return_token_strs": None}).status == 200


def test_the_document_describes_the_routes(shared):
    document = ask(shared[1], "/openapi.json", method="GET").json
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert {"200", "400", "404", "413", "503"} <= set(document["paths"][path]["post"]["responses"])
    assert {"/v1/models", "/health", "/version", "/tokenize", "/detokenize"} <= set(document["paths"])
    assert "/metrics" in document["paths"] and not {"/debug/engine", "/sleep", "/server_info"} & set(document["paths"])

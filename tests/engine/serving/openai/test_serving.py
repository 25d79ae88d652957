"""What the API says of its models."""

from __future__ import annotations

import common  # noqa: F401  it must come before torch

from engine import registry
from engine.serving.openai.serving import OpenAIServing

openai_api = registry.lesson("06f_openai_api")


def test_an_adapters_parent_is_the_models_first_name():
    serving = OpenAIServing(openai_api.ScriptedLLM(), ["first", "second"], {"adapter": "folder"})
    card = serving.model_card("adapter")
    assert (card["id"], card["root"], card["parent"]) == ("adapter", "folder", "first")
    assert [serving.model_card(name)["parent"] for name in ("first", "second")] == [None, None]

"""What the engine turns text into token ids with, in a test that brings its own: `building(monkeypatch, make)`."""

import engine.llm
import engine.model.loader
import engine.model.tokenizer
import engine.serving.async_llm
from engine import front_end
from engine.model import folders

WHO_BUILDS_ONE = (engine.llm, engine.model.loader, engine.model.tokenizer, engine.serving.async_llm)


def building(monkeypatch, make):
    """`make(folder)` in place of `Tokenizer(folder)`, wherever the engine builds one."""
    for module in WHO_BUILDS_ONE:
        monkeypatch.setattr(module, "Tokenizer", make)


class Words:
    """A tokenizer for a model with 128 tokens: a character is a token."""

    chat_template = None

    class backend:
        @staticmethod
        def get_vocab():
            return {chr(i): i for i in range(128)}

        @staticmethod
        def id_to_token(i):
            return chr(i)

        @staticmethod
        def get_added_tokens_decoder():
            return {}

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))

    def render_chat(self, messages, **wishes):
        return "".join(f"{message['role']}: {message['content']}" for message in messages)


class NoBytes(dict):
    """The bytes of such a token: its own."""

    special = frozenset()

    def __init__(self, tokenizer):
        super().__init__()

    def __missing__(self, token):
        return bytes([token])


def of_characters(monkeypatch):
    """Every engine has `Words`, whatever folder its model is in, and no folder is looked for."""
    monkeypatch.setattr(front_end, "TokenBytes", NoBytes)
    building(monkeypatch, lambda folder: Words())
    monkeypatch.setattr(folders, "model_folder", lambda name: name)

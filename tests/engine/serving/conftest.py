"""The tiny model in place of the real one, wherever a server's engine is built."""

from __future__ import annotations

import pytest

from engine.llm_engine import LLMEngine
from engine.model import folders, loader
from support import tokenizing


@pytest.fixture(scope="module")
def folder():
    """The real model's, for its tokenizer."""
    return folders.model_folder(None)


@pytest.fixture
def tiny(monkeypatch, tiny_model, real_model):
    """A factory of engines on the tiny model, with the real tokenizer: both know the ids below 128."""

    def make(args=None, report=lambda text: None):
        report("building")
        return LLMEngine(tiny_model, real_model[1], max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=73,
                         **(args or {}))  # fmt: skip

    tokenizing.building(monkeypatch, lambda folder: real_model[1])
    return make


@pytest.fixture
def tiny_load(monkeypatch, tiny_model, real_model):
    """`make_engine` on the tiny model: its flags in milliseconds."""
    monkeypatch.setattr(loader, "load", lambda model, dtype, **about: (tiny_model, real_model[1]))
    tokenizing.building(monkeypatch, lambda folder: real_model[1])

"""What the engine turns text into token ids with, in a test that brings its own: `building(monkeypatch, make)`."""

import engine.llm
import engine.model.loader
import engine.parallel.worker
import engine.serving.async_llm
import engine.serving.start

WHO_BUILDS_ONE = (engine.llm, engine.model.loader, engine.parallel.worker, engine.serving.async_llm,
                  engine.serving.start)  # fmt: skip


def building(monkeypatch, make):
    """`make(folder)` in place of `Tokenizer(folder)`, wherever the engine builds one."""
    for module in WHO_BUILDS_ONE:
        monkeypatch.setattr(module, "Tokenizer", make)

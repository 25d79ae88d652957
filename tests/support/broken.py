"""Break a class on purpose: one place in its file's text, and only for one test."""

from __future__ import annotations

import inspect
import sys

import pytest


def break_class(monkeypatch: pytest.MonkeyPatch, owner: type, old: str, new: str) -> None:
    """Make `owner` what it would be if `old`, which stands once in its module's text, read `new`."""
    module = sys.modules[owner.__module__]
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
    scope = dict(vars(module))
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), scope)
    for name, value in vars(scope[owner.__name__]).items():
        if inspect.isfunction(value) and "__class__" in value.__code__.co_freevars:  # for `super()`
            value.__closure__[value.__code__.co_freevars.index("__class__")].cell_contents = owner
        if inspect.isroutine(value) or isinstance(value, property):
            monkeypatch.setattr(owner, name, value)

"""Our Python files as modules: a script by its file name, a file of a folder by its dotted name."""

from __future__ import annotations

import common

import importlib
from pathlib import Path
from types import ModuleType

from engine import registry


def paths() -> dict[str, Path]:
    """Every file of `vllm/` that is a lesson or stands in a folder, by the name of its module."""
    folders = [path for folder in ("engine", "lab") for path in sorted((common.HERE / folder).rglob("*.py"))]
    names = {".".join(path.relative_to(common.HERE).with_suffix("").parts): path for path in folders}
    return {
        path.stem: path for path in sorted([*common.HERE.glob("[01]*.py"), *common.HERE.glob("tours/[01]*.py")])
    } | names


def load(name: str) -> ModuleType:
    """Raises ImportError if there is none."""
    return importlib.import_module(name) if "." in name else registry.lesson(name)

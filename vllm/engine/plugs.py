"""Somebody else's part in a seam: read from a file, held against what the seam asks for, made.

Owns which seams can be filled from outside, and the one line that says what does not fit; called where arguments are
checked, and where an engine is put together. It never runs a part.
vLLM: `--scheduler-cls` in `vllm/engine/arg_utils.py`, and `vllm/plugins/__init__.py`.
"""

from __future__ import annotations

from common import InputError

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from engine import seams


@dataclass(frozen=True)
class Seam:
    """What fills a seam: something made with so many arguments (None: a function that is called itself), which then has
    the methods of `asks`."""

    made_with: tuple[str, ...] | None
    asks: type


SEAMS = {
    "attention": Seam((), seams.AttentionBackend),
    "scheduler": Seam(("config", "kv_cache_manager"), seams.Scheduler),
    "block_pool": Seam(("num_blocks",), seams.BlockPool),
    "sampler": Seam((), seams.Sampler),
    "rejection": Seam(None, seams.RejectionRule),
    "drafter": Seam(("config", "model"), seams.Drafter),
    "lora": Seam(None, seams.AddLoRA),
}


def read(given: Mapping[str, Any] | Sequence[str] | None) -> dict[str, Any]:
    """Parts by the name of their seam: from `{"scheduler": MyScheduler}`, or from `["scheduler=my.py:MyScheduler"]`.

    A path becomes absolute, since other processes load it, too. Raises InputError for what does not fit.
    """
    if isinstance(given, Mapping):
        parts = dict(given)
    else:
        parts = {name: target for name, _, target in (text.partition("=") for text in given or ())}
    for name, target in parts.items():
        if name not in SEAMS:
            raise InputError(f"plug {name!r}: no such seam; allowed: {', '.join(SEAMS)}")
        if isinstance(target, str):
            file, _, attribute = target.rpartition(":")
            parts[name] = f"{Path(file).absolute()}:{attribute}"
        if problem := difference(load(name, parts[name]), SEAMS[name]):
            raise InputError(f"plug {name}: {problem}")
    return parts


def load(name: str, target: Any) -> Any:
    """The object behind `FILE.py:OBJECT`, or the object itself. Raises InputError."""
    if not isinstance(target, str):
        return target
    file, _, attribute = target.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise InputError(f"plug {name}={target}: must be FILE.py:OBJECT, and the file must be there")
    try:
        module = module_of(path)
    except Exception as error:
        raise InputError(f"plug {name}: {path.name} does not load: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise InputError(f"plug {name}: {path.name} has no {attribute!r}")
    return getattr(module, attribute)


@functools.cache
def module_of(path: Path) -> ModuleType:
    """The file as a module, once a process."""
    spec = importlib.util.spec_from_file_location(f"plugged.{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its own module up
    spec.loader.exec_module(module)
    return module


def part(name: str, plug: Mapping[str, Any], own: Callable[..., Any], *made_with: Any, **more: Any) -> Any:
    """What fills a seam, made: somebody else's if `plug` names one, else `own`. Raises InputError for what it lacks."""
    if name not in plug:
        return own(*made_with, **more)
    made = maker = load(name, plug[name])
    if makes(maker):
        try:
            inspect.signature(maker).bind(*made_with, **more)
        except TypeError as error:
            raise InputError(f"plug {name}: {called(maker)} cannot be made as the flags ask: {error}") from None
        made = maker(*made_with, **more)
    for needed in (*methods(SEAMS[name].asks), *attributes(SEAMS[name].asks)):
        if not hasattr(made, needed):
            raise InputError(f"plug {name}: {called(maker)} has no {needed!r}")
    return made


# --- What does not fit ------------------------------------------------------------------------------------------------


def difference(maker: Any, seam: Seam) -> str | None:
    """In what a part differs from what its seam asks for; None: in nothing that can be seen before it is made."""
    if seam.made_with is None:
        if not callable(maker):
            return f"{maker!r:.60} is not a function"
        return wrong_arguments(called(maker), maker, arguments(vars(seam.asks)["__call__"]))
    if makes(maker):
        try:
            inspect.signature(maker).bind(*seam.made_with)
        except TypeError:
            return f"{called(maker)}{inspect.signature(maker)}: the seam calls it with ({', '.join(seam.made_with)})"
        if not isinstance(maker, type):
            return None  # what a function makes is looked at when it is made
    kind = maker if isinstance(maker, type) else type(maker)
    for name, asked in methods(seam.asks).items():
        found = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
        if found is None:
            return f"{called(maker)} has no method {name}({', '.join(arguments(asked))})"
        if inspect.isfunction(found) and (
            problem := wrong_arguments(f"{called(maker)}.{name}", functools.partial(found, None), arguments(asked))
        ):
            return problem
    return None


def makes(maker: Any) -> bool:
    """Is it a class or a function, which makes a part, or one that is made already?"""
    return isinstance(maker, type | functools.partial) or inspect.isroutine(maker)


def wrong_arguments(what: str, function: Callable[..., Any], asked: list[str]) -> str | None:
    """Whether the seam's call, by position or by name, is one that the function takes."""
    takes = inspect.signature(function).parameters.values()
    names = [p.name for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in takes if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    anything = any(p.kind == p.VAR_POSITIONAL for p in takes)
    fits = names[: len(asked)] == asked and set(needed) <= set(asked)
    return None if anything or fits else f"{what}({', '.join(names)}): the seam calls it with ({', '.join(asked)})"


def arguments(function: Any) -> list[str]:
    """The names that a seam passes, without `self`."""
    return list(inspect.signature(function).parameters)[1:]


def methods(asks: type) -> dict[str, Any]:
    """A seam's methods by name."""
    return {
        name: value
        for name, value in vars(asks).items()
        if inspect.isfunction(value) and (name == "__call__" or not name.startswith("_"))
    }


def attributes(asks: type) -> Iterator[str]:
    """A seam's fields and properties."""
    yield from (name for name, value in vars(asks).items() if isinstance(value, property))
    yield from (name for name in inspect.get_annotations(asks) if not name.startswith("_"))


def called(maker: Any) -> str:
    """A part's name, as an error says it."""
    return getattr(maker, "__name__", type(maker).__name__)

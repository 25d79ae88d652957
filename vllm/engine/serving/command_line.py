"""What is typed behind `serve`, before its flags are read: a file of flags, and JSON in pieces.

Owns the words of a command line; called by the parser that `cli` makes. It never knows what a flag means, and imports
no torch. vLLM: `FlexibleArgumentParser` in `vllm/utils/argparse_utils.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from engine.arguments import Parser, human_readable_int, with_dashes

PARTS = {  # flags that are a part of another one
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
}


def prepare(parser: Parser, words: list[str]) -> list[str]:
    """A command line without `--config FILE` and without keys behind dots, which says the same."""
    words = with_config(parser, [whole(word) for word in words])
    return with_json(parser, words)


def whole(word: str) -> str:
    """`--spec-method` by its full name."""
    flag, equals, value = word.partition("=")
    return PARTS.get(flag, flag) + equals + value


def with_config(parser: Parser, words: list[str]) -> list[str]:
    """The flags of a YAML file in front of the others; what the command line says itself is not taken from there."""
    at = [i for i, word in enumerate(words) if word.partition("=")[0] == "--config"]
    if not at:
        return words
    _, equals, path = words[at[0]].partition("=")
    end = at[0] + (1 if equals else 2)
    path = path or "".join(words[at[0] + 1 : end])
    if len(at) > 1 or not path:
        parser.error("--config: expected one file")
    rest = words[: at[0]] + words[end:]
    found = [word for item in read_yaml(parser, path).items() for word in as_words(parser, path, *item, rest)]
    model = [word for word in rest[:1] if not word.startswith("-")]
    return model + found + rest[len(model) :]


def read_yaml(parser: Parser, path: str) -> dict[str, Any]:
    """The mapping in a file. Exits with one line if there is none."""
    import yaml  # it takes a tenth of a second

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--config {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}")
    except (yaml.YAMLError, RecursionError) as error:
        parser.error(f"--config {path}: not YAML: {' '.join(str(error).split())[:200]}")
    if not isinstance(found, dict):
        parser.error(f"--config {path}: must map flags to values, as in `port: 8000`")
    return found


def as_words(parser: Parser, path: str, key: Any, value: Any, rest: list[str]) -> list[str]:
    """One line of the file as words; none if `rest`, the command line itself, has that flag."""
    flag = whole(with_dashes(f"--{key}"))
    action = parser.option(flag)
    if action is None or flag in ("--config", "--help"):
        if action is None and parser.elsewhere and parser.elsewhere(flag) is not None:
            return [flag]  # the parser says why it is not here
        parser.error(f"--config {path}: {f'{flag}: not in a file' if action else parser.unknown(flag)}")
    if value is None or any(parser.option(word) is action for word in rest):
        return []
    if isinstance(value, bool):
        off = [name for name in action.option_strings if name.startswith("--no-")]
        return [flag] if value else off[:1]
    if isinstance(value, list):
        return [flag, *map(as_text, value)] if value else []
    return [f"{flag}={as_text(value)}"]


def as_text(value: Any) -> str:
    """A value of a file as it would be typed."""
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def with_json(parser: Parser, words: list[str]) -> list[str]:
    """`--speculative-config.method ngram` as `--speculative-config '{"method": "ngram"}'`: all keys of a flag become
    one object. `.key+ a` and `.key+=a,b` add to a list."""
    kept: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        given, equals, text = word.partition("=")
        name, dot, keys = given.partition(".")
        action = parser.option(name) if dot and word.startswith("-") else None
        if action is None:
            kept.append(word)
        elif equals or queue:
            put(objects.setdefault(action.option_strings[0], {}), keys, text if equals else queue.pop(0))
        else:
            parser.error(f"{given}: expected one argument")
    return kept + [f"{name}={json.dumps(found)}" for name, found in objects.items()]


def put(found: dict[str, Any], keys: str, text: str) -> None:
    """Put a value where its keys say."""
    *path, last = keys.split(".")
    for key in path:
        inner = found.setdefault(key, {})
        found = inner if isinstance(inner, dict) else found
    if last.endswith("+"):
        found[last[:-1]] = [*found.get(last[:-1], []), *map(as_value, text.split(","))]
    else:
        found[last] = as_value(text)


def as_value(text: str) -> Any:
    """JSON, a number like 4k, or else a text."""
    try:
        return json.loads(text)
    except ValueError:
        try:
            return human_readable_int(text)
        except argparse.ArgumentTypeError:
            return text

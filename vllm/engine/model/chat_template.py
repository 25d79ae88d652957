"""A folder's chat templates, and the sandbox that they are rendered in.

Owns what a template may call; `Tokenizer` renders with it. It never trusts a template, which is code from a stranger's
folder. vLLM: `vllm/entrypoints/chat_utils.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import datetime
import functools
import json
from pathlib import Path
from typing import Any, cast


def read_chat_templates(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """A folder's chat template, or several by their names. Files count before what `tokenizer_config.json` has.

    Raises InputError.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    files_found: dict[str, str] = {}
    for name, path in files.items():
        try:
            if path.is_file():
                files_found[name] = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise common.InputError(f"{path}: {error}") from None
    found: Any = files_found or config.get("chat_template")
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    texts: list[Any] = [*found, *found.values()] if isinstance(found, dict) else [found or ""]
    if not all(isinstance(text, str) for text in texts):
        raise common.InputError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a text, or a list of "
            "objects with a name and a template each"
        )
    if isinstance(found, dict) and list(found) == ["default"]:
        return texts[1]
    return cast("str | dict[str, str] | None", found)


def read_chat_template(given: str) -> str:
    """A template that takes the place of a model's own: a file, or (with a brace or a newline in it) the text itself.

    Raises InputError if there is no such file, or if it is no template.
    """
    import jinja2

    try:
        text = given if set(given) & set("{}\n") else Path(given).read_text("utf-8")
        _chat_environment().from_string(text)
    except (OSError, UnicodeDecodeError) as error:
        raise common.InputError(f"chat template {given}: {getattr(error, 'strerror', None) or error}") from None
    except jinja2.TemplateSyntaxError as error:
        raise common.InputError(f"chat template: line {error.lineno}: {error.message}") from None
    return text


@functools.lru_cache(32)
def compiled(template: str) -> Any:
    """A template ready to be rendered; the last 32 are kept."""
    return _chat_environment().from_string(template)


def _chat_environment() -> Any:
    """What Transformers' templates are written for: tags, filters and functions of the same names."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # a template is code from a stranger's folder

    class Generation(Extension):
        """{% generation %}: marks what a model is trained to say. It changes no text."""

        tags = {"generation"}  # noqa: RUF012 — Jinja's name, and Jinja says that it is an instance's

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body)  # what is set inside is not known outside

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = _refuse_chat
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Transformers' filter: Jinja's own would write what is safe inside HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse_chat(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)

"""What was measured and kept: `lessons/results/*.json`, and files that `--json` merges into."""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import json
import os
import tempfile
from pathlib import Path
from typing import Any

RESULTS = common.ROOT / "lessons" / "results"


def results(name: str, machine_name: str = "cpu") -> dict[str, Any]:
    """The committed measurements of lesson `name` on one machine (`cpu` or `h200`); empty if there are none."""
    path = RESULTS / f"{machine_name}.json"
    return json.loads(path.read_text()).get(name, {}) if path.is_file() else {}


def stored_object(path: str | Path) -> dict[str, Any]:
    """The JSON object stored at `path`, an empty one if there is no file. Raises InputError."""
    path = Path(path)
    try:
        content = json.loads(path.read_text()) if path.exists() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise common.InputError(f"--json {path}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise common.InputError(f"--json {path}: holds a JSON {type(content).__name__}, expected an object")
    return content


def merge_json(path: str | Path, key: str, value: dict[str, Any]) -> None:
    """Set `key` in the JSON object stored at `path`, leaving other keys alone; the file is replaced atomically."""
    path, content = Path(path), stored_object(path)
    content[key] = value
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump(content, file, indent=1, sort_keys=True)
            file.write("\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise common.InputError(f"--json {path}: cannot be written ({error.strerror})") from None

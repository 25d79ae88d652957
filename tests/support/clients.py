"""Other people's clients, each in an environment of its own, installed once for a user; skipped where that fails.

`npm("@openai/codex@0.171.0")` is a folder with that package and what it needs; `python("anthropic==2.14.0")` is the
interpreter of an environment that has it. Both stay in the user's cache folder, under a name made of what they hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.model.folders import cache_folder

INSTALL_SECONDS = 240  # a registry that is slower than this is none
RUN_SECONDS = 120
NOT_NEWER = "2026-11-28T00:00:00Z"  # what a client needs shall not change from one day to the next

# What several files use.
OPENAI_NPM = ["openai@7.59.0"]
AI_SDK = ["ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"]
LANGCHAIN = ["langchain-openai==1.7.4"]


def npm(*packages: str) -> Path:
    """The `node_modules` of these packages. Skips the test if there is no npm, or no registry that has them."""
    program = program_of("npm")
    soon = ["--fetch-retry-mintimeout", "1000", "--fetch-retry-maxtimeout", "2000"]  # else a minute without a network
    command = [program, "install", "--no-audit", "--no-fund", *soon, "--prefix", ".", *packages]
    return installed("npm", packages, [command]) / "node_modules"


def python(*requirements: str) -> Path:
    """The interpreter of an environment with these. Skips the test if there is no uv, or no registry that has them."""
    program = program_of("uv")
    bin_ = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    make = [program, "venv", "--quiet", "--no-project", "--relocatable", "venv"]
    where_and_when = ["--python", f"venv/{bin_}", "--exclude-newer", NOT_NEWER]
    fill = [program, "pip", "install", "--quiet", *where_and_when, *requirements]
    return installed("python", requirements, [make, fill]) / "venv" / bin_


def program_of(name: str) -> str:
    """Where a program is; skips the test if it is nowhere."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here")
    return found


def installed(kind: str, packages: Sequence[str], commands: Sequence[Sequence[str]]) -> Path:
    """The folder in which these commands were run once, one after the other. Skips the test if one of them fails."""
    name = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:16]
    final = cache_folder() / "clients" / f"{kind}-{name}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent) as made:
        folder = Path(made) / "made"
        folder.mkdir()
        for command in commands:
            try:
                run(command, folder, timeout=INSTALL_SECONDS, UV_HTTP_RETRIES="1")
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                said = (error.stderr or error.stdout or str(error)).strip().splitlines()
                pytest.skip(f"{' '.join(packages)} cannot be installed here: {said[0] if said else error}")
        with contextlib.suppress(OSError):  # another process was faster
            folder.rename(final)
    return final


def run(
    command: Sequence[str | Path], folder: Path, timeout: float = RUN_SECONDS, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command to its end in a folder. Raises CalledProcessError, TimeoutExpired; both have what it said."""
    return subprocess.run([*map(str, command)], cwd=folder, env={**os.environ, **environment}, timeout=timeout,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)  # fmt: skip


def script(interpreter: Path, code: str, folder: Path, **environment: str) -> str:
    """What a program of one's own prints, run by the interpreter of an environment and by no other's packages."""
    file = folder / "client.py"
    file.write_text(code)
    return said_by([interpreter, "-I", file], folder, PYTHONPATH="", VIRTUAL_ENV="", **environment)


def module(node_modules: Path, code: str, folder: Path, **environment: str) -> str:
    """What an ECMAScript module of one's own prints, run by Node in a folder that has these packages."""
    (folder / "node_modules").symlink_to(node_modules, target_is_directory=True)
    file = folder / "client.mjs"
    file.write_text(code)
    return said_by([program_of("node"), file], folder, **environment)


def said_by(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """What a client prints. Where it fails, the test does, with all that it said."""
    try:
        return run(command, folder, **environment).stdout
    except subprocess.CalledProcessError as error:
        raise AssertionError(f"the client failed:\n{error.stdout}\n{error.stderr}") from None

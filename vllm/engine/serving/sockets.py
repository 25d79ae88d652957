"""Taking a port, and enough open files for many of them.

Owns nothing for longer than a call; called by the API server, and by engines that wait for others. It never listens.
vLLM: `vllm/entrypoints/openai/api_server.py:create_server_socket`.
"""

from __future__ import annotations

import common

import contextlib
import os
import socket
import stat


def bind(host: str, port: int, flags: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    """Take the port before anything slow happens. Raises InputError if somebody has it."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        return sock
    except OSError as error:
        where = f"{flags[0]} {host or repr(host)} {flags[1]} {port}"
        raise common.InputError(f"{where}: {error.strerror or error}") from None


def bind_path(path: str) -> socket.socket:
    """Take a place in the file system; what a killed server has left there is removed. Raises InputError."""
    if not hasattr(socket, "AF_UNIX"):
        raise common.InputError("--uds: this system has no Unix domain sockets")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not answers(path):
                os.unlink(path)
        sock.bind(path)
        return sock
    except (OSError, ValueError) as error:  # a name that is too long, or has a null byte
        sock.close()
        raise common.InputError(f"--uds {path}: {getattr(error, 'strerror', None) or error}") from None


def unbind_path(path: str) -> None:
    """Remove it, if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def answers(path: str) -> bool:
    """Does anybody listen there?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(path) == 0


def set_ulimit(wanted: int = 65535) -> None:
    """Let this process have more files open, if it may: every connection is one, and shells allow 256 or 1,024. vLLM's
    servers do the same (`vllm/utils/system_utils.py`)."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limit on Windows, a second one on macOS
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < wanted:  # -1: there is none
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))

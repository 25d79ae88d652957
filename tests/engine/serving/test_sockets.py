"""A port that is taken, and a host that is none."""

from __future__ import annotations

import common

import socket

import pytest

from engine.serving.sockets import bind, bind_path, unbind_path

unix = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix domain sockets here")


def test_a_port_that_is_taken_and_a_host_that_is_none():
    sock = bind("127.0.0.1", 0)
    sock.listen()
    with sock, pytest.raises(common.InputError, match="--port"):
        bind("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(common.InputError, match="--host"):
        bind("no.such.host.invalid", 0)


@unix
def test_a_place_in_the_file_system(tmp_path):
    path = str(tmp_path / "s")
    with bind_path(path) as sock:
        sock.listen()
        with pytest.raises(common.InputError, match=f"--uds {path}: Address already in use"):
            bind_path(path)
    with bind_path(path):  # what a server left that was killed
        pass
    unbind_path(path)
    unbind_path(path)
    assert not (tmp_path / "s").exists()


@unix
def test_a_place_that_is_none(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path, words in ((tmp_path / "file", "Address already in use"), (tmp_path / "no" / "s", "No such file"),
                        (tmp_path / ("x" * 200), "too long")):  # fmt: skip
        with pytest.raises(common.InputError, match=f"--uds {path}: .*{words}"):
            bind_path(str(path))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_system_without_such_places(monkeypatch):
    monkeypatch.delattr(socket, "AF_UNIX", raising=False)
    with pytest.raises(common.InputError, match="--uds: this system has no"):
        bind_path("s")

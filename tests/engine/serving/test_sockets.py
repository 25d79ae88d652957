"""A port that is taken, and a host that is none."""

from __future__ import annotations

import common

import pytest

from engine.serving.sockets import bind


def test_a_port_that_is_taken_and_a_host_that_is_none():
    sock = bind("127.0.0.1", 0)
    sock.listen()
    with sock, pytest.raises(common.InputError, match="--port"):
        bind("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(common.InputError, match="--host"):
        bind("no.such.host.invalid", 0)

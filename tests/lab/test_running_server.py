"""A server that cannot start says why and is not waited for."""

from __future__ import annotations

import socket

import common
import pytest
from lab.running_server import running_server


def test_a_port_in_use_ends_the_wait_by_its_name(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(common.CheckFailed, match="did not start: exit code 2"), running_server("--port", str(port)):
            pass
    assert f"port {port}" in capfd.readouterr().err


def test_a_server_that_ends_at_once_is_not_waited_for(capfd):
    with pytest.raises(common.CheckFailed, match="did not start: exit code 2"), running_server("--max-num-seqs", "0"):
        pass
    assert "max_num_seqs 0: must be a whole number" in capfd.readouterr().err
